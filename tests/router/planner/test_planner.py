"""Plans of small fleets: starts, evictions, waits and refusals. Sizes are in any unit, times in seconds around NOW."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from router.planner.ledger import Device, DeviceId, Resident
from router.planner.planner import plan
from router.planner.reasons import keep_reasons
from router.planner.types import Demand, Eviction, KeepReason, Plan, Policy
from tests.router.planner.fleets import COUNT, CPU, GPU, NOW, PATIENCE, decide, demand, machine, resident

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


def test_a_demand_that_fits_starts_at_once() -> None:
    plan = decide([demand(1, 60)], [resident(2, {GPU[0]: 40})], ONE)
    assert plan.start[1].claim == {GPU[0]: 60, COUNT: 1}
    assert (plan.evict, plan.waits, plan.look_again) == ({}, {}, None)


def test_main_memory_can_be_what_is_short() -> None:
    plan = decide([demand(1, 10, host=30)], [resident(2, {GPU[0]: 10, CPU: 80})], {**ONE, CPU: 100})
    assert evicted(plan) == [2]
    assert list(plan.waits[1].shortage) == [CPU]


def test_with_unified_memory_the_host_share_comes_from_the_one_pool() -> None:
    assert decide([demand(1, 60, host=41)], [], ONE).refuse[1].devices[GPU[0]].required == 101
    assert decide([demand(1, 60, host=40)], [], ONE).start[1].claim == {GPU[0]: 100, COUNT: 1}


def with_range(one: Demand, growth: int, steps: int, **facts: Any) -> Demand:
    return replace(one, growth=(growth,), steps=steps, **facts)


@pytest.mark.parametrize(
    ("asked", "facts", "granted"),
    [
        (with_range(demand(1, 30), 9, 100), {"foreign": {GPU[0]: 40}}, 3),
        (with_range(demand(1, 30), 9, 2), {}, 2),
        (with_range(demand(1, 30), 1, 100), {"margin": 5, "limit": {GPU[0]: 80}}, 45),
        (with_range(demand(1, 30), 9, 9, most={GPU[0]: 50}), {}, 2),
        (with_range(demand(1, 30), 9, 9, most={GPU[0]: 20}), {}, 0),
        (with_range(demand(1, 30), 9, 100), {"memory": False}, 100),
    ],
    ids=["what is free", "its most", "margin and limit", "its share of the device", "below its least", "no policy"],
)
def test_a_range_is_granted_in_whole_steps(asked: Demand, facts: dict[str, Any], granted: int) -> None:
    start = decide([asked], [], ONE, **facts).start[1]
    assert (start.steps, start.claim[GPU[0]]) == (granted, 30 + granted * asked.growth[0])


def test_a_grant_leaves_memory_that_is_promised_to_a_waiting_demand() -> None:
    """Demand 1 waits for a busy worker inside its residency and for the 20 units that are free beside it."""
    busy = resident(3, {GPU[0]: 60}, busy=True, **FRESH)
    queue = [demand(1, 70, since=NOW - 1), with_range(demand(2, 5), 1, 100)]
    plan = decide(queue, [busy], ONE)
    assert plan.waits[1].victims == (3,)
    assert plan.start[2].steps == 25  # of 100: 70 of demand 1, and 5 of its own least


def test_shards_are_never_spread_over_two_nodes() -> None:
    far = DeviceId("far", 0)
    plan = decide([demand(1, 60, 60, on=[GPU[0], far])], [], {GPU[0]: 100, far: 100})
    assert (plan.refuse[1].needs, plan.refuse[1].offered, plan.refuse[1].devices) == (2, 1, {})


def test_a_place_that_is_given_is_taken_or_waited_for() -> None:
    given = replace(demand(9, 20, 60, on=GPU[:3]), place=(GPU[2], GPU[0]))
    assert places(decide([given], [], dict.fromkeys(GPU[:3], 100))) == {9: (GPU[2], GPU[0])}
    there = resident(1, {GPU[0]: 70})
    plan = decide([given], [there], dict.fromkeys(GPU[:3], 100))
    assert (plan.start, evicted(plan)) == ({}, [1]), "though the second device is empty"
    plan = decide([given], [], {GPU[0]: 50, GPU[1]: 100, GPU[2]: 100})
    assert list(plan.refuse[9].devices) == [GPU[0]], "the other would do"


def test_on_many_devices_a_split_takes_an_aligned_run() -> None:
    busy = [resident(id, {GPU[id]: 90}, busy=True) for id in (0, 3, 4, 7, 9, 10, 12, 15)]
    plan = decide([demand(99, 20, 20, on=GPU)], busy, dict.fromkeys(GPU, 100))
    assert plan.start == {}  # 1 and 2 are free, but no aligned pair: it claims one
    assert len(plan.waits[99].victims) == 1
    plan = decide([demand(99, 20, 20, on=GPU)], busy[:6], dict.fromkeys(GPU, 100))
    assert places(plan) == {99: (GPU[12], GPU[13])}


# 2. It fits without some residents: claim


def test_the_least_recently_used_leaves_first() -> None:
    residents = [resident(id, {GPU[0]: 30}, last_used=last) for id, last in ((1, 70.0), (2, 50.0), (3, 60.0))]
    assert evicted(decide([demand(9, 30)], residents, ONE)) == [2]
    assert evicted(decide([demand(9, 50)], residents, ONE)) == [2, 3]
    assert evicted(decide([demand(9, 90)], residents, ONE)) == [1, 2, 3]


def test_the_smallest_sufficient_set_is_taken_on_every_device_at_once() -> None:
    """One worker on both devices is enough where two would be needed otherwise; its age does not matter then."""
    residents = [resident(1, {GPU[0]: 30}), resident(2, {GPU[1]: 30}), resident(3, {GPU[0]: 60, GPU[1]: 60})]
    assert evicted(decide([demand(9, 65, 65, on=GPU[:2])], residents, TWO)) == [3]
    assert evicted(decide([demand(9, 40, 40, on=GPU[:2])], residents, TWO)) == [1, 2]


@pytest.mark.parametrize(
    ("stays", "leaves"),
    [
        ({"busy": True}, {}),
        ({}, {"best_effort": True}),
        ({"priority": 1}, {}),
        ({"load_seconds": 7.0}, {"load_seconds": 6.0}),
    ],
    ids=["idle before busy", "best-effort before required", "lower priority", "cheaper to load again"],
)
def test_of_two_residents_the_less_valuable_leaves(stays: dict[str, Any], leaves: dict[str, Any]) -> None:
    residents = [resident(1, {GPU[0]: 50}, last_used=5.0, **stays), resident(2, {GPU[0]: 50}, last_used=5.0, **leaves)]
    assert evicted(decide([demand(9, 50, since=LATE)], residents, ONE)) == [2]


def test_a_pinned_worker_never_leaves() -> None:
    residents = [resident(1, {GPU[0]: 60}, pinned=True), resident(2, {GPU[0]: 40})]
    assert evicted(decide([demand(9, 40, since=LATE)], residents, ONE)) == [2]
    plan = decide([demand(9, 41, since=LATE)], residents, ONE)
    assert (plan.evict, plan.refuse) == ({}, {})
    assert (plan.waits[9].cause, kept(plan, residents)) == ("memory", {1: "pinned", 2: "unneeded"})


def test_the_place_that_disturbs_least_is_claimed() -> None:
    def choice(since: float = NOW, **facts: object) -> list[int]:
        rivals = [resident(1, {GPU[0]: 90}, last_used=5.0), resident(2, {GPU[1]: 90}, last_used=5.0)]
        waiting = [demand(9, 50, on=GPU[:2], since=since)]
        return evicted(decide(waiting, [replace(rivals[0], **facts), rivals[1]], TWO))  # type: ignore[arg-type]

    assert choice() == [1]
    assert choice(busy=True) == [2]
    assert choice(busy=True, since=LATE) == [2]
    assert choice(priority=1) == [2]
    assert choice(last_used=6.0) == [2]
    assert choice(load_seconds=6.0) == [2]
    assert choice(pinned=True) == [2]
    assert choice(last_used=NOW - 0.1, **FRESH) == [2]
    assert choice(best_effort=True, last_used=6.0) == [1]
    assert choice(best_effort=True, priority=1) == [1]


def test_memory_of_leaving_workers_counts_until_they_are_stopped() -> None:
    plan = decide([demand(9, 60)], [resident(1, {GPU[0]: 90}, leaving=True)], ONE)
    assert (plan.start, plan.evict) == ({}, {})
    assert (plan.waits[9].cause, plan.waits[9].on, plan.waits[9].victims) == ("stopping", (1,), ())


def test_memory_freed_for_a_demand_is_not_taken_by_another() -> None:
    leaving = resident(1, {GPU[0]: 90}, leaving=True)
    plan = decide([demand(8, 60, since=NOW - 1), demand(9, 30)], [leaving], ONE)
    assert plan.waits[9].cause == "stopping"
    plan = decide([demand(8, 60, since=NOW - 1), demand(9, 10)], [leaving], ONE)
    assert set(plan.start) == {9}, "beside what is claimed there is room for 9, now and later"
    plan = decide([demand(8, 95, since=NOW - 1), demand(9, 10)], [leaving], ONE)
    assert plan.start == {}, "there is room for 9 now, but it is promised to 8"
    assert (plan.waits[9].cause, plan.waits[9].victims) == ("memory", ())
    assert plan.waits[9].shortage[GPU[0]].available == 5


def test_a_demand_behind_does_not_take_memory_that_is_free_by_now() -> None:
    """8 lacks 4 that 1 will give back soon. If 9 took what is free, 8 would have to wait for 2, who drains longer."""
    first = resident(1, {GPU[0]: 15}, leaving=True, leaving_since=NOW - 9)
    second = resident(2, {GPU[0]: 51}, leaving=True, leaving_since=NOW - 1)
    waiting = [demand(8, 38, since=NOW - 1), demand(9, 27)]
    plan = decide(waiting, [first, second], ONE)
    assert (plan.start, plan.waits[9].cause) == ({}, "stopping")
    plan = decide(waiting, [replace(first, leaving_since=NOW), second], ONE)
    assert set(plan.start) == {9}, "2 goes first, and leaves enough for both"


def test_a_wait_for_residents_that_only_an_estimate_keeps_has_no_known_end() -> None:
    """9 fits beside 8 once 1 has left, and 1 may leave now, but the estimate of 8 is static."""
    residents = [resident(1, {GPU[0]: 70}), resident(2, {GPU[0]: 30}, pinned=True)]
    wait = decide([demand(8, 60, is_exact=False, since=NOW - 1), demand(9, 10)], residents, ONE).waits[9]
    assert (wait.cause, wait.on, wait.place, wait.victims, wait.until) == ("memory", (1,), (GPU[0],), (), None)


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


@pytest.mark.parametrize(
    ("preset", "load_seconds", "expected"),
    [(None, 0.0, 0.2), (None, 1.0, 0.5), (None, 60.0, 2.0), (0.0, 60.0, 0.0), (4.0, 1.0, 4.0), (9.0, 1.0, 5.0)],
)
def test_an_idle_worker_inside_its_minimum_residency_is_kept_for_the_idle_grace(
    preset: float | None, load_seconds: float, expected: float
) -> None:
    residents = [resident(1, {GPU[0]: 90}, last_used=NOW, idle_grace=preset, **FRESH)]
    waiting = [demand(9, 60, load_seconds=load_seconds)]
    plan = decide(waiting, residents, ONE)
    if expected:
        assert (plan.evict, plan.look_again, plan.waits[9].cause) == ({}, NOW + expected, "residency")
        plan = decide(waiting, residents, ONE, now=NOW + expected)
    assert evicted(plan) == [1]


@pytest.mark.parametrize(("request_interval", "is_kept"), [(0.5, True), (0.6, False)])
def test_there_is_no_idle_grace_for_clients_that_return_later(request_interval: float, is_kept: bool) -> None:
    waiting = [demand(9, 60, load_seconds=1.0)]
    one = resident(1, {GPU[0]: 90}, last_used=NOW, request_interval=request_interval, **FRESH)
    assert evicted(decide(waiting, [one], ONE)) == ([] if is_kept else [1])
    assert evicted(decide(waiting, [replace(one, idle_grace=4.0)], ONE)) == [], "the key of the preset comes first"


def test_there_is_no_idle_grace_after_the_minimum_residency() -> None:
    assert evicted(decide([demand(9, 60)], [resident(1, {GPU[0]: 90}, last_used=NOW, residency_ends=NOW)], ONE)) == [1]


def test_victims_leave_together_or_not_at_all() -> None:
    residents = [resident(1, {GPU[0]: 50}), resident(2, {GPU[0]: 50}, busy=True)]
    plan = decide([demand(9, 80)], residents, ONE)
    assert plan.evict == {}
    assert (plan.waits[9].victims, plan.waits[9].on) == ((1, 2), (2,))
    assert evicted(decide([demand(9, 80)], residents, ONE, now=NOW + PATIENCE)) == [1, 2]


def test_waiting_for_a_measurement_is_preferred_to_an_eviction() -> None:
    residents = [
        resident(1, {GPU[0]: 10}, starting=True, busy=True, exclusive=True),
        resident(2, {GPU[1]: 90}, best_effort=True),
    ]
    plan = decide([demand(9, 50, on=GPU[:2])], residents, TWO)
    assert (plan.evict, plan.waits[9].place, plan.waits[9].cause) == ({}, (GPU[0],), "exclusive")


def test_all_sets_of_eight_devices_are_tried() -> None:
    """Aligned pairs alone would not do: 1 and 2 belong to two of them."""
    residents = [resident(1 + index, {id: 90}, pinned=True) for index, id in enumerate(GPU[:8]) if index not in (1, 2)]
    plan = decide([demand(20, 50, 50, on=GPU[:8])], residents, dict.fromkeys(GPU[:8], 100))
    assert places(plan) == {20: (GPU[1], GPU[2])}


def test_a_refusal_reports_the_place_where_least_is_missing() -> None:
    plan = decide([demand(9, 70, 70, on=GPU[:3])], [], {GPU[0]: 10, GPU[1]: 60, GPU[2]: 60})
    assert set(plan.refuse[9].devices) == {GPU[1], GPU[2]}


def test_of_busy_workers_the_first_to_end_its_minimum_residency_leaves() -> None:
    """Each request that ends says anew when a worker was last used: who has to leave must not change with it."""
    first, then = {"busy": True, "residency_ends": NOW - 9}, {"busy": True, "residency_ends": NOW - 1}
    for last_used in (NOW - 8, NOW):
        residents = [resident(1, {GPU[0]: 50}, **then, last_used=NOW - 5)]
        residents += [resident(2, {GPU[0]: 50}, **first, last_used=last_used)]
        assert evicted(decide([demand(9, 50, since=LATE)], residents, ONE)) == [2]


def test_a_load_with_requests_is_not_evicted() -> None:
    residents = [resident(1, {GPU[0]: 90}, starting=True, busy=True)]
    plan = decide([demand(9, 60, since=LATE)], residents, ONE, now=NOW + 100)
    assert (plan.evict, plan.look_again, plan.waits[9].cause) == ({}, None, "residency")
    assert plan.waits[9].victims == (1,), "but its place is claimed"


def test_a_load_whose_clients_have_left_is_an_idle_resident() -> None:
    residents = [resident(1, {GPU[0]: 90}, starting=True, last_used=NOW)]
    plan = decide([demand(9, 60)], residents, ONE)
    assert (plan.evict, plan.look_again) == ({}, NOW + 0.2)
    assert evicted(decide([demand(9, 60)], residents, ONE, now=NOW + 0.2)) == [1]


def test_a_claim_protects_its_place_from_those_behind() -> None:
    """9 would fit now; but then 8, who waits for 1, would have to wait for 9 as well."""
    residents = [resident(1, {GPU[0]: 60}, busy=True)]
    plan = decide([demand(8, 90, since=NOW - 1), demand(9, 30)], residents, ONE)
    assert (plan.start, plan.evict) == ({}, {})
    assert decide([demand(9, 30)], residents, ONE).start


def test_no_victim_leaves_for_a_place_that_is_not_available_yet() -> None:
    """9 needs the memory of 1 that 8 does not take. To evict 2 before 1 may be evicted would start neither."""
    residents = [resident(1, {GPU[0]: 60}, busy=True), resident(2, {GPU[0]: 40})]
    plan = decide([demand(8, 50, since=NOW - 1), demand(9, 45)], residents, ONE)
    assert (plan.evict, plan.waits[8].victims, plan.waits[9].victims) == ({}, (1,), (2,))
    assert (plan.waits[9].cause, plan.waits[9].on) == ("memory", (1,))
    assert evicted(decide([demand(8, 50, since=NOW - 1), demand(9, 40)], residents, ONE)) == [2], "beside 1 and 8"


def test_the_queue_goes_by_priority_then_arrival() -> None:
    waiting = [demand(1, 60, since=5.0), demand(2, 60, since=9.0, priority=1), demand(3, 60, since=4.0)]
    assert set(decide(waiting, [], ONE).start) == {2}
    assert set(decide([waiting[0], waiting[2]], [], ONE).start) == {3}


# 3. It would fit nowhere: refuse


def test_a_demand_that_no_empty_machine_could_hold_is_refused_with_the_arithmetic() -> None:
    residents = [resident(1, {GPU[0]: 50})]
    plan = decide([demand(9, 96)], residents, ONE, margin=5, foreign={GPU[0]: 10})
    assert (plan.evict, plan.waits) == ({}, {})
    assert plan.refuse[9].devices == {GPU[0]: (96, 95)}


def test_the_refusal_names_the_place_that_comes_nearest() -> None:
    plan = decide([demand(9, 150, on=GPU[:3])], [], {GPU[0]: 100, GPU[1]: 120, GPU[2]: 80})
    assert {id: short.available for id, short in plan.refuse[9].devices.items()} == {GPU[1]: 120}


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
        limits = {"limit": {CPU: 200}, "shared": {CPU: shared}, "foreign": {CPU: 700}}
        return plan(waiting, [ours], machine([ours], {CPU: 1000}, margin=20, **limits), NOW, Policy(patience=PATIENCE))

    assert set(ask(80).start) == {9}
    assert evicted(ask(81)) == [1]
    assert ask(181).refuse[9].devices == {CPU: (181 - shared, 180 - shared)}


def test_a_demand_for_an_absent_device_is_refused() -> None:
    plan = decide([demand(9, 10, on=[GPU[5]])], [], ONE)
    assert (plan.refuse[9].needs, plan.refuse[9].offered) == (1, 0)


# Static estimates


def test_a_static_estimate_may_start() -> None:
    plan = decide([demand(9, 60, is_exact=False)], [], ONE)
    assert (set(plan.start), plan.refine) == ({9}, frozenset())


def test_a_static_estimate_is_refined_before_an_eviction() -> None:
    residents = [resident(1, {GPU[0]: 90})]
    plan = decide([demand(9, 60, is_exact=False)], residents, ONE)
    assert (set(plan.refine), plan.evict) == ({9}, {})
    assert (plan.waits[9].cause, plan.waits[9].victims) == ("memory", (1,))
    assert evicted(decide([demand(9, 60)], residents, ONE)) == [1]


def test_a_static_estimate_is_not_refined_where_only_the_number_of_workers_is_short() -> None:
    counted = {**ONE, COUNT: 1}
    residents = [resident(1, {GPU[0]: 30})]
    plan = decide([demand(9, 60, is_exact=False)], residents, counted)
    assert (evicted(plan), plan.refine) == ([1], frozenset())
    plan = decide([demand(9, 80, is_exact=False)], residents, counted)
    assert (evicted(plan), set(plan.refine)) == ([], {9}), "memory is short as well"


def test_a_static_estimate_is_refined_before_it_is_refused() -> None:
    plan = decide([demand(9, 101, is_exact=False)], [], ONE)
    assert (set(plan.refine), plan.refuse) == ({9}, {})
    assert plan.waits[9].shortage[GPU[0]].available == 100


def test_while_it_is_refined_a_demand_keeps_its_place() -> None:
    residents = [resident(1, {GPU[0]: 60})]
    plan = decide([demand(8, 90, since=NOW - 1, is_exact=False), demand(9, 30)], residents, ONE)
    assert (plan.start, plan.evict, set(plan.refine)) == ({}, {}, {8})


# Best-effort demands


def test_a_best_effort_demand_starts_at_once_or_is_dropped() -> None:
    assert set(decide([demand(9, 60, best_effort=True)], [], ONE).start) == {9}
    plan = decide([demand(9, 60, best_effort=True, since=LATE)], [resident(1, {GPU[0]: 50})], ONE)
    assert (set(plan.drop), plan.evict, plan.waits) == ({9}, {}, {})


def test_a_best_effort_demand_evicts_an_older_idle_best_effort_resident() -> None:
    old = resident(1, {GPU[0]: 90}, best_effort=True)
    assert evicted(decide([demand(9, 60, best_effort=True)], [old], ONE)) == [1]
    assert decide([demand(9, 60, best_effort=True, since=LATE)], [replace(old, busy=True)], ONE).drop == {9}
    assert decide(
        [demand(9, 60, best_effort=True)], [replace(old, last_used=NOW - 0.1, residency_ends=NOW + 5)], ONE
    ).drop == {9}
    assert decide([demand(9, 60, best_effort=True)], [replace(old, last_used=NOW)], ONE).drop == {9}
    waits = decide([demand(9, 60, best_effort=True)], [replace(old, leaving=True)], ONE).waits
    assert waits[9].cause == "stopping", "having displaced one it is not dropped"


# Time to live


def test_an_idle_worker_leaves_after_its_time_to_live() -> None:
    one = resident(1, {GPU[0]: 90}, expires=NOW)
    assert decide([], [one], ONE).evict == {1: Eviction(reason="idle", for_demand=None, idle=True)}
    assert decide([], [one], ONE, now=NOW - 3).look_again == NOW
    assert decide([], [replace(one, busy=True)], ONE).evict == {}
    assert decide([], [replace(one, pinned=True)], ONE).evict == {}
    assert decide([], [replace(one, leaving=True)], ONE).evict == {}


def test_memory_of_an_expired_worker_is_used_before_an_eviction() -> None:
    residents = [resident(1, {GPU[0]: 50}), resident(2, {GPU[0]: 50}, expires=NOW)]
    plan = decide([demand(9, 50)], residents, ONE)
    assert {id: eviction.reason for id, eviction in plan.evict.items()} == {2: "idle"}
    assert plan.waits[9].cause == "stopping"


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


def test_an_exclusive_load_blocks_others_from_its_claim_on() -> None:
    """Else small loads, one after the other, could keep it out for ever."""
    residents = [resident(1, {GPU[0]: 50}, busy=True)]
    plan = decide([demand(8, 60, exclusive=True, since=NOW - 1), demand(9, 10)], residents, ONE)
    assert (plan.start, plan.waits[9].cause) == ({}, "exclusive")


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


def test_without_a_margin_memory_evicts_nobody() -> None:
    residents = [resident(1, {GPU[0]: 90}), resident(2, {GPU[0]: 90})]
    plan = decide([demand(9, 500)], residents, {**ONE, COUNT: 3}, memory=False)
    assert (set(plan.start), plan.evict, plan.refuse) == ({9}, {}, {})
    plan = decide([demand(9, 500)], residents, {**ONE, COUNT: 2}, memory=False)
    assert evicted(plan) == [1]


def test_the_count_of_pinned_workers_makes_others_wait_for_a_slot() -> None:
    plan = decide([demand(9, 10)], [resident(1, {GPU[0]: 10}, pinned=True)], {**ONE, COUNT: 1})
    assert (plan.waits[9].cause, plan.waits[9].on, plan.refuse) == ("slots", (1,), {})


# 120 GiB of unified memory; an embedder of 6 GiB, models of 37 and 81 GiB


POOL = {GPU[0]: 120}


def seed(id: int, size: int, **facts: object) -> Resident:
    return resident(id, {GPU[0]: size}, **facts)


def test_the_large_model_evicts_only_what_it_needs() -> None:
    waiting = [demand(3, 79, host=2)]
    embedder, middle = seed(1, 6, last_used=NOW - 50), seed(2, 37, last_used=NOW - 20)
    assert evicted(decide(waiting, [embedder, middle], POOL, margin=1)) == [1], "81 + 37 + 1 of margin are 119"
    assert evicted(decide(waiting, [replace(embedder, last_used=NOW), middle], POOL, margin=1)) == [2]
    assert evicted(decide(waiting, [embedder, middle], POOL, margin=3)) == [2], "6 would not do: 81 + 37 + 3 are 121"
    assert evicted(decide(waiting, [embedder, middle], POOL, margin=3, foreign={GPU[0]: 33})) == [1, 2]


# One memory under two names


def one_pool(residents: Sequence[Resident], total: int = 120) -> list[Device]:
    """An accelerator that uses main memory."""
    [host] = machine(residents, {CPU: total})
    return [host, replace(host, id=GPU[0], pool=CPU)]


def test_shards_on_an_accelerator_without_memory_are_charged_to_main_memory() -> None:
    found = plan([demand(1, 37, host=2)], [], one_pool([]), NOW, Policy(patience=PATIENCE))
    assert found.start[1].place == (GPU[0],)
    assert found.start[1].claim == {CPU: 39, COUNT: 1}


def test_workers_on_either_name_of_one_memory_make_room_for_each_other() -> None:
    on_cpu, on_gpu = resident(1, {CPU: 60}), resident(2, {CPU: 50})
    for on in ([CPU], [GPU[0]]):
        found = plan([demand(9, 65, on=on)], [on_cpu, on_gpu], one_pool([on_cpu, on_gpu]), NOW, Policy(patience=0.0))
        assert set(found.evict) == {1}
