"""Who may have its process before its room, as values."""

from typing import Any

from router.planner import plan
from router.plans import Policy
from router.standby import Candidate, cautious, decide, less
from tests.router.fleets import CPU, GPU, NOW, demand, machine, resident

TOTAL, RUNTIME = 100, 10


def host(id: int, size: int, **facts: Any) -> Any:
    return demand(id, size, on=[CPU], **facts)


def asked(waiting: list[Any], residents: list[Any], totals: Any, **facts: Any) -> Any:
    """The decision about these demands, each of which would hold RUNTIME; `standing` names those that have one."""
    standing = facts.pop("standing", ())
    devices = machine(residents, totals, **facts)
    found = plan(waiting, residents, devices, NOW, Policy(patience=0.0))
    candidates = [
        Candidate(demand=one, runtime=0 if one.id in standing else RUNTIME, stands_by=one.id in standing)
        for one in waiting
    ]
    return decide(found, candidates, residents, devices)


def test_only_the_first_who_lacks_main_memory_is_prepared() -> None:
    residents = [resident(1, {CPU: 45}), resident(2, {CPU: 45})]
    decision = asked([host(10, 40), host(11, 40, since=NOW + 1)], residents, {CPU: TOTAL})
    assert (dict(decision.begin), decision.end) == ({10: RUNTIME}, frozenset())


def test_who_waits_for_more_than_those_who_leave_is_not_prepared() -> None:
    busy = resident(1, {CPU: 85}, busy=True, turn_ends=NOW + 9)
    assert not asked([host(10, 40)], [busy], {CPU: TOTAL}).begin


def test_a_process_that_does_not_fit_beside_its_victim_is_not_prepared() -> None:
    assert not asked([host(10, 40)], [resident(1, {CPU: 91})], {CPU: TOTAL}).begin
    assert asked([host(10, 40)], [resident(1, {CPU: 90})], {CPU: TOTAL}).begin


def test_main_memory_that_somebody_ahead_is_going_to_take_is_not_given_to_a_standby() -> None:
    """Both wait for an accelerator; of main memory there is enough for what each needs, but not for more."""
    residents = [resident(1, {GPU[0]: 100}), resident(2, {GPU[1]: 100})]
    ahead = demand(10, 50, on=[GPU[0]], host=60)
    behind = demand(11, 50, on=[GPU[1]], host=20, since=NOW + 1)
    totals = {CPU: TOTAL, GPU[0]: TOTAL, GPU[1]: TOTAL}
    assert asked([ahead, behind], residents, totals).begin == {10: RUNTIME, 11: RUNTIME}
    assert asked([ahead, behind], residents, totals, foreign={CPU: 35}).begin == {10: RUNTIME}


def test_a_standby_goes_as_soon_as_somebody_ahead_lacks_main_memory() -> None:
    residents = [resident(1, {CPU: 60}, leaving=True), resident(11, {CPU: 10}, pinned=True)]
    behind, ahead = host(11, 50), host(12, 95, priority=1)
    assert asked([behind], residents, {CPU: TOTAL}, standing=[11]).end == frozenset()
    assert asked([behind, ahead], residents, {CPU: TOTAL}, standing=[11]).end == {11}


def test_what_a_standby_holds_and_what_it_still_lacks_are_what_its_worker_takes() -> None:
    assert less(host(1, 50), 10).shards == (40,)
    assert less(demand(1, 50, host=20), 10) == demand(1, 50, host=10)
    assert less(host(1, 50), 0) == host(1, 50)


def test_memory_that_a_standby_may_still_take_counts_as_used() -> None:
    devices = machine([resident(1, {CPU: 30, GPU[0]: 40})], {CPU: TOTAL, GPU[0]: TOTAL})
    assert {each.id: each.used for each in cautious(devices, 7)} == {CPU: 37, GPU[0]: 40}
