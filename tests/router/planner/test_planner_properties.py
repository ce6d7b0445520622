"""Properties of starts and evictions over random fleets."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from router.planner.eviction import keep_reasons
from tests.router.planner.fleets import claim_of
from tests.router.planner.questions import Fleet, overtaken, starts_too_much, superfluous
from tests.router.planner.random_fleets import random_fleet

laws = settings(max_examples=250)


def fleets() -> st.SearchStrategy[Fleet]:
    """By seed: quicker than drawing each number, so that there can be more of them."""
    return st.builds(random_fleet, st.integers(0, 2**40), st.integers(1, 4))


def law(test: Callable[[Fleet], None]) -> Callable[[], None]:
    """Holds for random fleets."""
    return laws(given(fleet=fleets())(test))


# Room


@law
def test_no_plan_exceeds_the_margin(fleet: Fleet) -> None:
    assert starts_too_much(fleet, fleet.ask()) == []


@law
def test_a_start_reserves_all_that_was_demanded(fleet: Fleet) -> None:
    plan = fleet.ask()
    for one in fleet.waiting:
        if start := plan.start.get(one.id):
            assert start.claim == claim_of(one, start.place, fleet.devices, start.steps)
            assert 0 <= start.steps <= one.steps
            assert set(start.place) <= one.devices
            assert len(set(start.place)) == len(one.shards)


# Ranges


@law
def test_a_range_changes_nothing_but_the_grant(fleet: Fleet) -> None:
    """Place, victims, waits and refusals are those of the least."""
    plan = fleet.ask()
    fixed = replace(fleet, waiting=[replace(one, growth=(), steps=0, shard_limits={}) for one in fleet.waiting])
    least = fleet.claims(plan, fleet.waiting, granted=False)
    start = {id: replace(start, claim=least[id], steps=0) for id, start in plan.start.items()}
    assert replace(plan, start=start) == fixed.ask()


# Victims


@law
def test_no_victim_is_superfluous(fleet: Fleet) -> None:
    """If any victim stayed, its demand, or a demand ahead of that, would start later or not at all."""
    assert superfluous(fleet, fleet.ask()) == []


@law
def test_no_demand_takes_the_place_of_one_ahead(fleet: Fleet) -> None:
    """As each that has to wait gets its place, in the order of the queue, there is room for all claims."""
    assert overtaken(fleet, fleet.ask()) == []


# Best-effort demands


@law
def test_best_effort_never_displaces_required(fleet: Fleet) -> None:
    plan = fleet.ask()
    residents = {one.id: one for one in fleet.residents}
    best_effort = {one.id for one in fleet.waiting if one.best_effort}
    assert not best_effort & set(plan.refuse)
    for id, eviction in plan.evict.items():
        if eviction.for_demand in best_effort:
            assert residents[id].best_effort
            assert not residents[id].busy
    without = replace(fleet, waiting=[one for one in fleet.waiting if not one.best_effort]).ask()
    # Its least may come before the range of a required demand: the whole queue is placed before anything is granted.
    assert {id: start.place for id, start in plan.start.items() if id not in best_effort} == {
        id: start.place for id, start in without.start.items()
    }
    assert {id: wait.place for id, wait in plan.waits.items() if id not in best_effort} == {
        id: wait.place for id, wait in without.waits.items()
    }


# The answer


@laws
@given(fleets(), st.integers())
def test_the_order_of_the_arguments_does_not_matter(fleet: Fleet, seed: int) -> None:
    random, answer = Random(seed), fleet.ask()
    for things in (fleet.waiting, fleet.residents, fleet.devices):
        random.shuffle(things)
    assert fleet.ask() == answer


@law
def test_residents_that_stay_have_a_reason(fleet: Fleet) -> None:
    plan = fleet.ask()
    residents = {one.id: one for one in fleet.residents}
    for id, wait in plan.waits.items():
        kept = keep_reasons(wait, plan, fleet.residents, fleet.now)
        assert not set(kept) & {*wait.victims, *plan.evict}
        assert not any(residents[one].leaving for one in kept)
        for one, reason in kept.items():
            assert (reason == "pinned") == residents[one].pinned, id


@laws
@given(fleets(), st.floats(0.01, 0.99))
def test_time_alone_changes_nothing_before_the_moment_to_look_again(fleet: Fleet, fraction: float) -> None:
    plan = fleet.ask()
    assert plan.look_again is None or plan.look_again > fleet.now
    if plan.evict or plan.start or plan.drop:
        return  # those are other residents and demands
    until = fleet.now + 100 if plan.look_again is None else plan.look_again
    later = replace(fleet, now=fleet.now + fraction * (until - fleet.now)).ask()
    assert (later.start, later.evict, later.refine, later.refuse) == (plan.start, plan.evict, plan.refine, plan.refuse)


@law
def test_a_waiting_demand_has_a_cause(fleet: Fleet) -> None:
    """For those who leave or load, for those in use past patience, for a moment, or for an exact estimate."""
    plan = fleet.ask()
    loading = plan.start or any(one.starting for one in fleet.residents)
    for id, wait in plan.waits.items():
        if wait.cause == "stopping":
            assert set(wait.on) & {one.id for one in fleet.leaving(plan)}
        elif wait.cause == "exclusive":
            assert loading or any(other.place for one, other in plan.waits.items() if one != id)
        elif wait.cause in ("residency", "busy"):
            assert plan.look_again or any(one.starting for one in fleet.residents if one.id in wait.on)
        else:
            ahead = {victim for other in plan.waits.values() for victim in other.victims}
            assert id in plan.refine or not wait.place or set(wait.on) & ahead
