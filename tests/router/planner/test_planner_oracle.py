"""The planner's answers beside those of a brute-force planner, for thousands of small random fleets.

The promise: the least disturbing place, and there the smallest set of victims, on every device at once. A range of KV
cache gets the most that is free in the order of the queue, without an eviction and without memory that is promised.
"""

from dataclasses import replace

import pytest

from tests.router.planner.plan_oracle import Expected, expected
from tests.router.planner.questions import Fleet
from tests.router.planner.random_fleets import random_fleet

FLEETS = 500  # for each number of demands; a few seconds together


def without_ties(fleet: Fleet) -> Fleet:
    """The same without two residents that are equal in everything that ranks them: of such, either may leave."""
    apart = [
        replace(one, last_used=one.last_used - one.id / 1000, residency_ends=one.residency_ends - one.id / 1000)
        for one in fleet.residents
    ]
    return replace(fleet, residents=apart)


def answered(fleet: Fleet) -> Expected:
    plan = fleet.ask()
    return Expected(
        start={id: start.place for id, start in plan.start.items()},
        steps={id: start.steps for id, start in plan.start.items()},
        wait={id: (wait.place, wait.victims) for id, wait in plan.waits.items()},
        until={id: wait.until for id, wait in plan.waits.items()},
        evict={id: eviction.for_demand for id, eviction in plan.evict.items()},
        refine=set(plan.refine),
        refuse=set(plan.refuse),
        drop=set(plan.drop),
    )


@pytest.mark.parametrize("demands", [3, 2, 1])
def test_place_victims_and_grants_are_those_of_the_rules(demands: int) -> None:
    for seed in range(FLEETS):
        fleet = without_ties(random_fleet(1000 * demands + seed, demands))
        assert answered(fleet) == expected(fleet), f"seed {seed}: {fleet}"
