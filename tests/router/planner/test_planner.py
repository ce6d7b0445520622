"""Plans of small fleets: their causes, reasons, numbers and refusals, and places on more devices than the oracle tries.

Places, victims and grants as such are compared with a brute-force planner in test_planner_oracle.py. Sizes are in any
unit, times in seconds around NOW.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from router.planner.eviction import keep_reasons
from router.planner.ledger import DeviceId, Resident
from router.planner.types import Eviction, KeepReason, Plan
from tests.router.planner.fleets import COUNT, CPU, GPU, NOW, PATIENCE, decide, demand, resident

ONE = {GPU[0]: 100}
TWO = {GPU[0]: 100, GPU[1]: 100}
LATE = NOW - PATIENCE  # the arrival of a demand whose swap patience is over
FRESH = {"residency_ends": NOW + 5}


def evicted(plan: Plan) -> list[int]:
    return sorted(plan.evict)


def kept(plan: Plan, residents: Sequence[Resident], id: int = 9) -> Mapping[int, KeepReason]:
    return keep_reasons(plan.waits[id], plan, residents, NOW)


def places(plan: Plan) -> dict[int, tuple[DeviceId, ...]]:
    return {id: start.place for id, start in plan.start.items()}


# 1. It fits: start


def test_with_unified_memory_the_host_share_comes_from_the_one_pool() -> None:
    assert decide([demand(1, 60, host=41)], [], ONE).refuse[1].devices[GPU[0]].required == 101
    assert decide([demand(1, 60, host=40)], [], ONE).start[1].claim == {GPU[0]: 100, COUNT: 1}


def test_shards_are_never_spread_over_two_nodes() -> None:
    far = DeviceId("far", 0)
    plan = decide([demand(1, 60, 60, on=[GPU[0], far])], [], {GPU[0]: 100, far: 100})
    assert (plan.refuse[1].needs, plan.refuse[1].offered, plan.refuse[1].devices) == (2, 1, {})


def test_on_many_devices_a_split_takes_an_aligned_run() -> None:
    busy = [resident(id, {GPU[id]: 90}, busy=True) for id in (0, 3, 4, 7, 9, 10, 12, 15)]
    plan = decide([demand(99, 20, 20, on=GPU)], busy, dict.fromkeys(GPU, 100))
    assert plan.start == {}  # 1 and 2 are free, but no aligned pair: it claims one
    assert len(plan.waits[99].victims) == 1
    plan = decide([demand(99, 20, 20, on=GPU)], busy[:6], dict.fromkeys(GPU, 100))
    assert places(plan) == {99: (GPU[12], GPU[13])}
    plan = decide([demand(99, 20, 20, on=GPU)], busy[:7], dict.fromkeys(GPU, 100))
    assert places(plan) == {99: (GPU[14], GPU[15])}


# 2. It fits without some residents: claim


def test_memory_of_leaving_workers_counts_until_they_are_stopped() -> None:
    plan = decide([demand(9, 60)], [resident(1, {GPU[0]: 90}, leaving=True)], ONE)
    assert (plan.start, plan.evict) == ({}, {})
    assert (plan.waits[9].cause, plan.waits[9].on, plan.waits[9].victims) == ("stopping", (1,), ())


def test_a_wait_for_residents_that_only_an_estimate_keeps_has_no_known_end() -> None:
    """9 fits beside 8 once 1 has left, and 1 may leave now, but the estimate of 8 is static."""
    residents = [resident(1, {GPU[0]: 70}), resident(2, {GPU[0]: 30}, pinned=True)]
    wait = decide([demand(8, 60, is_exact=False, since=NOW - 1), demand(9, 10)], residents, ONE).waits[9]
    assert (wait.cause, wait.on, wait.place, wait.victims, wait.until) == ("memory", (1,), (GPU[0],), (), None)


def test_time_alone_ends_no_wait_for_a_model_that_is_loading() -> None:
    loading = resident(1, {GPU[0]: 90}, starting=True, busy=True)
    plan = decide([demand(9, 60)], [loading], ONE)
    assert (plan.waits[9].victims, plan.waits[9].until, plan.look_again) == ((1,), None, None)


def test_an_eviction_reports_its_numbers() -> None:
    residents = [resident(1, {GPU[0]: 50}, measured={GPU[0]: 45}), resident(2, {GPU[0]: 20}, pinned=True)]
    plan = decide([demand(9, 30)], residents, ONE, foreign={GPU[0]: 10}, margin=5)
    wait = plan.waits[9]
    assert wait.shortage == {GPU[0]: (30, 15)}
    assert (wait.cause, wait.on, wait.victims, wait.place) == ("stopping", (1,), (1,), (GPU[0],))
    assert kept(plan, residents) == {2: "pinned"}


def test_each_resident_that_stays_has_its_reason() -> None:
    residents = [
        resident(1, {GPU[0]: 20}, pinned=True),
        resident(2, {GPU[0]: 10}, busy=True, residency_ends=NOW),
        resident(3, {GPU[0]: 10}, busy=True, starting=True),
        resident(4, {GPU[0]: 10}, busy=True, **FRESH),
        resident(5, {GPU[1]: 50}),
        resident(6, {GPU[0]: 30}),
        resident(7, {GPU[0]: 10}),
        resident(8, {GPU[0]: 10}, leaving=True),
    ]
    plan = decide([demand(9, 30)], residents, TWO)
    assert evicted(plan) == [6]
    assert kept(plan, residents) == {
        1: "pinned", 2: "busy", 3: "starting", 4: "residency", 5: "elsewhere", 7: "unneeded",
    }  # fmt: skip


# Minimum residency, idle grace, swap patience


def test_a_busy_worker_stays_until_swap_patience_is_over() -> None:
    residents = [resident(1, {GPU[0]: 90}, busy=True)]
    plan = decide([demand(9, 60)], residents, ONE)
    assert (plan.evict, plan.look_again) == ({}, NOW + PATIENCE)
    assert (plan.waits[9].cause, plan.waits[9].on, plan.waits[9].until) == ("busy", (1,), NOW + PATIENCE)
    plan = decide([demand(9, 60)], residents, ONE, now=NOW + PATIENCE)
    assert plan.waits[9].until is None
    assert plan.evict == {1: Eviction(reason="evicted", for_demand=9, idle=False)}


def test_a_busy_worker_stays_until_its_minimum_residency_is_over() -> None:
    residents = [resident(1, {GPU[0]: 90}, busy=True, residency_ends=NOW + 5)]
    plan = decide([demand(9, 60, since=LATE)], residents, ONE)
    assert (plan.evict, plan.look_again, plan.waits[9].cause) == ({}, NOW + 5, "residency")
    assert evicted(decide([demand(9, 60, since=LATE)], residents, ONE, now=NOW + 5)) == [1]


def test_a_busy_worker_whose_minimum_residency_is_just_over_stays_for_swap_patience() -> None:
    residents = [resident(1, {GPU[0]: 90}, busy=True, residency_ends=NOW)]
    assert decide([demand(9, 60)], residents, ONE).waits[9].cause == "busy"


def test_a_best_effort_victim_beside_a_required_one_disturbs_less_than_two_required_ones() -> None:
    """The second device has the older workers. The bound that skips places may not rank it first."""
    residents = [
        resident(1, {GPU[0]: 50}, last_used=NOW - 20),
        resident(2, {GPU[0]: 50}, last_used=NOW - 20, busy=True, best_effort=True),
        resident(3, {GPU[1]: 50}, last_used=NOW - 90),
        resident(4, {GPU[1]: 50}, last_used=NOW - 90, busy=True),
    ]
    assert evicted(decide([demand(9, 100, on=GPU[:2], since=LATE)], residents, TWO)) == [1, 2]


def test_all_sets_of_eight_devices_are_tried() -> None:
    """Aligned pairs alone would not do: 1 and 2 belong to two of them."""
    residents = [resident(1 + index, {id: 90}, pinned=True) for index, id in enumerate(GPU[:8]) if index not in (1, 2)]
    plan = decide([demand(20, 50, 50, on=GPU[:8])], residents, dict.fromkeys(GPU[:8], 100))
    assert places(plan) == {20: (GPU[1], GPU[2])}


def test_a_refusal_reports_the_place_where_least_is_missing() -> None:
    plan = decide([demand(9, 70, 70, on=GPU[:3])], [], {GPU[0]: 10, GPU[1]: 60, GPU[2]: 60})
    assert set(plan.refuse[9].devices) == {GPU[1], GPU[2]}


# 3. It would fit nowhere: refuse


def test_a_demand_that_no_empty_machine_could_hold_is_refused_with_the_arithmetic() -> None:
    residents = [resident(1, {GPU[0]: 50})]
    plan = decide([demand(9, 96)], residents, ONE, margin=5, foreign={GPU[0]: 10})
    assert (plan.evict, plan.waits) == ({}, {})
    assert plan.refuse[9].devices == {GPU[0]: (96, 95)}


def test_foreign_memory_makes_a_demand_wait_not_fail() -> None:
    plan = decide([demand(9, 60)], [resident(1, {GPU[0]: 10})], ONE, foreign={GPU[0]: 80})
    assert (plan.refuse, plan.evict) == ({}, {}), "no model is evicted in vain"
    assert (plan.waits[9].cause, plan.waits[9].place) == ("memory", ())
    assert plan.waits[9].shortage == {GPU[0]: (60, 10)}


@pytest.mark.parametrize("shared", [0, 30])
def test_a_limit_is_a_budget_for_our_memory_alone(shared: int) -> None:
    """The host has more in use than the limit. Only workers and what they share are ours."""

    def ask(size: int) -> Plan:
        ours, waiting = resident(1, {CPU: 100}), [demand(9, size - shared, on=[CPU])]
        limit, ours_too, others = {CPU: 200}, {CPU: shared}, {CPU: 700}
        return decide(waiting, [ours], {CPU: 1000}, margin=20, limit=limit, shared=ours_too, foreign=others)

    assert set(ask(80).start) == {9}
    assert evicted(ask(81)) == [1]
    assert ask(181).refuse[9].devices == {CPU: (181 - shared, 180 - shared)}


def test_a_demand_for_an_absent_device_is_refused() -> None:
    plan = decide([demand(9, 10, on=[GPU[5]])], [], ONE)
    assert (plan.refuse[9].needs, plan.refuse[9].offered) == (1, 0)


# Time to live


def test_an_idle_worker_leaves_after_its_time_to_live() -> None:
    one = resident(1, {GPU[0]: 90}, expires=NOW)
    assert decide([], [one], ONE).evict == {1: Eviction(reason="idle", for_demand=None, idle=True)}
    assert decide([], [one], ONE, now=NOW - 3).look_again == NOW
    assert decide([], [replace(one, busy=True)], ONE).evict == {}
    assert decide([], [replace(one, pinned=True)], ONE).evict == {}
    assert decide([], [replace(one, leaving=True)], ONE).evict == {}


# Engines that load alone


def test_an_engine_that_measures_the_device_shares_it_with_no_other_load() -> None:
    plan = decide([demand(8, 10, exclusive=True, since=NOW - 1), demand(9, 10)], [], ONE)
    assert (set(plan.start), plan.waits[9].cause) == ({8}, "exclusive")
    plan = decide([demand(8, 10, since=NOW - 1), demand(9, 10, exclusive=True)], [], ONE)
    assert (set(plan.start), plan.waits[9].cause) == ({8}, "exclusive")
    loading = resident(1, {GPU[0]: 10}, starting=True, busy=True)
    plan = decide([demand(9, 10, exclusive=True)], [loading], ONE)
    assert (plan.start, plan.waits[9].cause, plan.waits[9].on) == ({}, "exclusive", (1,))
    plan = decide([demand(9, 10)], [replace(loading, exclusive=True)], ONE)
    assert (plan.start, plan.waits[9].cause, plan.waits[9].on) == ({}, "exclusive", (1,))


def test_no_resident_leaves_a_device_while_it_is_measured() -> None:
    residents = [resident(1, {GPU[0]: 20}, starting=True, busy=True, exclusive=True), resident(2, {GPU[0]: 80})]
    plan = decide([demand(9, 50)], residents, ONE)
    assert (plan.evict, plan.waits[9].cause, plan.waits[9].on) == ({}, "exclusive", (1,))


# The count of workers


def test_models_max_evicts_the_least_recently_used() -> None:
    residents = [resident(1, {GPU[0]: 10}, busy=True), resident(2, {GPU[0]: 10}), resident(3, {GPU[0]: 10})]
    plan = decide([demand(9, 10)], residents, {**ONE, COUNT: 3})
    assert evicted(plan) == [2]
    assert list(plan.waits[9].shortage) == [COUNT]


def test_the_count_of_pinned_workers_makes_others_wait_for_a_slot() -> None:
    plan = decide([demand(9, 10)], [resident(1, {GPU[0]: 10}, pinned=True)], {**ONE, COUNT: 1})
    assert (plan.waits[9].cause, plan.waits[9].on, plan.refuse) == ("slots", (1,), {})
