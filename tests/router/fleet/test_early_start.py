"""Demands whose process may start before their memory is free, as values."""

import asyncio
from dataclasses import replace
from typing import Any, cast

from router.fleet.early_start import (
    Candidate,
    EarlyStart,
    Phase,
    add_unallocated,
    decide,
    spare_memory,
    subtract_early_start,
)
from router.fleet.prefetch import readable
from router.launch.interface import EarlyProcess
from router.planner.planner import plan
from router.planner.types import Policy
from tests.router.planner.fleets import CPU, GPU, NOW, demand, machine, resident

TOTAL, RUNTIME = 100, 10


def host(id: int, size: int, **facts: Any) -> Any:
    return demand(id, size, on=[CPU], **facts)


def asked(waiting: list[Any], residents: list[Any], totals: Any, **facts: Any) -> Any:
    """The decision about these demands, each of which would hold RUNTIME, or what `runtime` says by its id; `standing`
    names those that have an early start."""
    standing, runtime = facts.pop("standing", ()), facts.pop("runtime", {})
    devices = machine(residents, totals, **facts)
    found = plan(waiting, residents, devices, NOW, Policy(patience=0.0))
    candidates = [
        Candidate(
            demand=one,
            runtime=0 if one.id in standing else runtime.get(one.id, RUNTIME),
            started_early=one.id in standing,
        )
        for one in waiting
    ]
    return decide(found, candidates, residents, devices)


def test_only_the_first_demand_that_lacks_main_memory_starts_early() -> None:
    residents = [resident(1, {CPU: 45}), resident(2, {CPU: 45})]
    decision = asked([host(10, 40), host(11, 40, since=NOW + 1)], residents, {CPU: TOTAL})
    assert (dict(decision.begin), decision.end) == ({10: RUNTIME}, frozenset())


def test_a_demand_that_waits_for_more_than_leaving_workers_does_not_start_early() -> None:
    busy = resident(1, {CPU: 85}, busy=True, residency_ends=NOW + 9)
    assert not asked([host(10, 40)], [busy], {CPU: TOTAL}).begin


def test_a_process_that_does_not_fit_beside_its_victim_does_not_start_early() -> None:
    assert not asked([host(10, 40)], [resident(1, {CPU: 91})], {CPU: TOTAL}).begin
    assert asked([host(10, 40)], [resident(1, {CPU: 90})], {CPU: TOTAL}).begin


def test_an_early_start_gets_no_main_memory_of_a_demand_ahead() -> None:
    """Both wait for an accelerator; of main memory there is enough for what each needs, but not for more."""
    residents = [resident(1, {GPU[0]: 100}), resident(2, {GPU[1]: 100})]
    ahead = demand(10, 50, on=[GPU[0]], host=60)
    behind = demand(11, 50, on=[GPU[1]], host=20, since=NOW + 1)
    totals = {CPU: TOTAL, GPU[0]: TOTAL, GPU[1]: TOTAL}
    assert asked([ahead, behind], residents, totals).begin == {10: RUNTIME, 11: RUNTIME}
    assert asked([ahead, behind], residents, totals, foreign={CPU: 35}).begin == {10: RUNTIME}


def test_an_early_start_ends_once_a_demand_ahead_lacks_main_memory() -> None:
    residents = [resident(1, {CPU: 60}, leaving=True), resident(11, {CPU: 10}, pinned=True)]
    behind, ahead = host(11, 50), host(12, 95, priority=1)
    assert asked([behind], residents, {CPU: TOTAL}, standing=[11]).end == frozenset()
    assert asked([behind, ahead], residents, {CPU: TOTAL}, standing=[11]).end == {11}


def test_an_early_start_and_the_rest_of_its_demand_add_up_to_the_demand() -> None:
    assert subtract_early_start(host(1, 50), 10).shards == (40,)
    assert subtract_early_start(demand(1, 50, host=20), 10) == demand(1, 50, host=10)
    assert subtract_early_start(host(1, 50), 0) == host(1, 50)
    assert subtract_early_start(host(1, 50, shard_limits={CPU: 70}), 10).shard_limits == {CPU: 60}
    assert subtract_early_start(host(1, 5), 10).shards == (0,)
    assert subtract_early_start(demand(1, 50, host=5), 10).host == 0


def test_memory_that_an_early_start_may_still_allocate_counts_as_used() -> None:
    devices = machine([resident(1, {CPU: 30, GPU[0]: 40})], {CPU: TOTAL, GPU[0]: TOTAL})
    assert {each.id: each.used for each in add_unallocated(devices, 7)} == {CPU: 37, GPU[0]: 40}
    assert add_unallocated(devices, 0) == devices


def test_no_early_start_begins_behind_a_demand_that_lacks_main_memory() -> None:
    """There is memory for the process, but the first in the queue waits for main memory and is not to be prepared."""
    residents = [resident(1, {CPU: 60}), resident(2, {GPU[0]: 100}, leaving=True)]
    ahead, behind = host(10, 80, priority=1), demand(11, 50, on=[GPU[0]], host=5)
    totals = {CPU: TOTAL, GPU[0]: TOTAL}
    assert asked([behind], residents, totals).begin == {11: RUNTIME}
    assert asked([ahead, behind], residents, totals, runtime={10: 0}).begin == {}


def test_the_larger_of_process_and_demand_is_kept_from_demands_behind() -> None:
    """The first takes 0 bytes of main memory for its worker, but RUNTIME for its process."""
    residents = [resident(1, {GPU[0]: 100}, leaving=True), resident(2, {GPU[1]: 100}, leaving=True)]
    waiting = [demand(10, 50, on=[GPU[0]]), demand(11, 50, on=[GPU[1]], since=NOW + 1)]
    totals = {CPU: 2 * RUNTIME, GPU[0]: TOTAL, GPU[1]: TOTAL}
    assert asked(waiting, residents, totals).begin == {10: RUNTIME, 11: RUNTIME}
    assert asked(waiting, residents, totals, foreign={CPU: 1}).begin == {10: RUNTIME}


def test_memory_of_started_demands_is_not_given_to_an_early_start() -> None:
    residents = [resident(1, {GPU[0]: 100}, leaving=True)]
    waiting = [host(9, 91, priority=1), demand(10, 50, on=[GPU[0]])]
    totals = {CPU: TOTAL, GPU[0]: TOTAL}
    assert asked(waiting[1:], residents, totals).begin == {10: RUNTIME}
    assert asked(waiting, residents, totals).begin == {}


def test_an_early_start_stays_within_the_margin() -> None:
    residents = [resident(1, {GPU[0]: 90}, leaving=True)]
    totals = {CPU: 2 * RUNTIME, GPU[0]: TOTAL}
    assert asked([demand(10, 50)], residents, totals, margin=RUNTIME).begin == {10: RUNTIME}
    assert asked([demand(10, 50)], residents, totals, margin=RUNTIME + 1).begin == {}


# Prefetch: files that are read ahead


def test_files_are_read_ahead_only_into_memory_that_is_free_beside_the_margin() -> None:
    devices = machine([], {CPU: 100, GPU[0]: 10}, foreign={CPU: 30}, margin=10)
    assert readable([("a", 60)], devices) == ["a"]
    assert readable([("a", 61)], devices) == []
    assert readable([("a", 55)], devices, 5) == ["a"], "beside what is being read"
    assert readable([("a", 56)], devices, 5) == []
    assert readable([("a", 40), ("b", 21), ("c", 20), ("d", 1)], devices) == ["a", "c"], "in order, each that fits"
    assert readable([("a", 0)], devices) == [], "there is nothing to read"
    assert readable([("a", 1)], machine([], {GPU[0]: 100})) == [], "main memory is not known"


# Memory for sleeping weights


def left(waiting: list[Any], residents: list[Any], totals: Any, **facts: Any) -> int:
    """Bytes of main memory for weights that are put to sleep."""
    devices = machine(residents, totals, **facts)
    return spare_memory(plan(waiting, residents, devices, NOW, Policy(patience=0.0)), waiting, residents, devices)


def test_memory_of_started_and_waiting_demands_is_not_spare() -> None:
    there = [resident(1, {CPU: 20}), resident(2, {GPU[0]: 90}, leaving=True)]
    totals = {CPU: TOTAL, GPU[0]: TOTAL}
    assert left([], there, totals, margin=5) == 75
    assert left([host(9, 30)], there, totals, margin=5) == 45, "it starts"
    assert left([demand(9, 50, host=7)], there, totals, margin=5) == 68, "it waits for the accelerator"
    assert left([demand(9, 50, host=7), host(10, 30)], there, totals, margin=5) == 38
    loads_alone = resident(1, {CPU: 20}, starting=True, busy=True, exclusive=True)
    assert left([host(9, 30)], [loads_alone], {CPU: TOTAL}) == 50, "it waits for the load, and memory is free"


def test_no_weights_are_put_to_sleep_while_a_demand_lacks_main_memory() -> None:
    there = [resident(1, {CPU: 60}, busy=True, residency_ends=NOW + 9)]
    assert left([host(9, 30)], there, {CPU: TOTAL}) == 10
    assert left([host(9, 41)], there, {CPU: TOTAL}) == 0
    assert left([host(9, 41)], [replace(there[0], pinned=True)], {CPU: TOTAL}) == 0


def test_main_memory_under_the_name_of_an_accelerator_is_the_same_memory() -> None:
    """A demand for the accelerator takes its shards from main memory."""
    there = [resident(1, {CPU: 60}, pinned=True)]
    [cpu] = machine(there, {CPU: TOTAL})
    devices = [cpu, replace(cpu, id=GPU[0], pool=CPU)]

    def rest(size: int) -> int:
        waiting = [demand(9, size, on=[GPU[0]])]
        return spare_memory(plan(waiting, there, devices, NOW, Policy(patience=0.0)), waiting, there, devices)

    assert (rest(30), rest(41)) == (10, 0)


async def test_a_worker_gets_the_process_of_its_early_start_unless_that_has_ended() -> None:
    process = cast("EarlyProcess", object())
    for last, expected in ((Phase.TAKEN, process), (Phase.ENDED, None)):
        early = EarlyStart()
        early.reserve(RUNTIME)
        early.advance(Phase.TAKEN)
        taken = asyncio.create_task(early.taken_process())
        await asyncio.sleep(0)
        early.spawned(process)
        early.advance(last)
        assert await taken is expected
