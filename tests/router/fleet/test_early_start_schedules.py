"""Early start: a process starts while its victims drain and stop, and its memory is reserved."""

import asyncio

import pytest

from router.config.settings import Settings
from router.errors import LoadFailed
from router.fleet.worker import State
from router.launch.interface import WorkerLost
from tests.fakes import CPU, GIB, GPU0, MIB, FakeModel
from tests.router.fleet.worlds import Schedule

HELD = 64 * MIB


def two(**changes: object) -> Schedule:
    """Models a and b of 4 GiB on main memory that has room for one of them and for what a process takes."""
    models = {name: FakeModel(shards=(4 * GIB,), stop_seconds=3.0, prepared=HELD) for name in "ab"}
    for name, value in changes.items():
        setattr(models["b"], name, value)
    keys = {name: {"min_residency": 0.0} for name in "ab"}
    return Schedule({"a": 4 * GIB, "b": 4 * GIB}, totals={CPU: 6 * GIB}, models=models, keys=keys)


def at(world: Schedule, entry: str) -> float:
    """When it happened last."""
    return max(seconds for seconds, noted in world.launcher.timeline if noted == entry)


async def test_a_worker_starts_early_while_its_victim_stops() -> None:
    world = two(prepare_seconds=2.0)
    await world.ask("a")
    waited = await world.ask("b")
    assert at(world, "prepare b") == at(world, "stop a")
    assert at(world, "prepared b") < at(world, "stopped a") <= at(world, "start b")
    assert waited == pytest.approx(3.0 + 2.0, abs=0.1), "stop and load, and nothing for preparing"
    assert "dismissed b" not in world.entries("")


async def test_memory_of_an_early_start_becomes_part_of_its_worker() -> None:
    world = two(prepare_seconds=1.0)
    await world.ask("a")
    request = await world.asking("b", wait=0.5)
    worker = world.worker("b")
    assert worker.state is State.QUEUED
    assert worker.reserved[CPU] > 400 * MIB, "the most that such a process may take, until it is measured"
    await asyncio.sleep(1.0)
    assert worker.reserved == {CPU: HELD}
    await request
    starts = [event for event in world.events.since(0) or () if event.data.get("state") == "starting"]
    assert starts[-1].data["reserved"] == {"cpu": 4 * GIB}, "from its start on, and not only what it measures"
    assert worker.reserved[CPU] == 4 * GIB


async def test_no_weights_are_loaded_before_the_memory_is_back() -> None:
    world = two()
    world.launcher.reading_lag = 2.0
    await world.ask("a")
    await world.ask("b")
    assert at(world, "start b") >= at(world, "stopped a") + 2.0


async def test_a_process_without_memory_of_its_own_is_not_started_early() -> None:
    world = two()
    world.launcher.set_foreign(CPU, 2 * GIB - 100 * MIB)
    await world.ask("a")
    await world.ask("b")
    assert world.entries("prepare") == []


async def test_a_crashed_early_start_does_not_fail_the_request() -> None:
    world = two(prepare_fails=[WorkerLost("b: ended by signal 9", cause="crashed", exit=-9)])
    await world.ask("a")
    assert await world.ask("b") == pytest.approx(3.0 + 2.0, abs=0.1)
    assert world.entries("").count("prepare b") == 1, "at most once per worker"
    assert world.fleet.models["b"].failure is None


async def test_a_final_error_of_an_early_start_fails_the_load_at_once() -> None:
    world = two(prepare_fails=[WorkerLost("b: config.json names no architecture", cause="load_failed", exit=3)])
    await world.ask("a")
    await world.refuses("b", LoadFailed, match=r"^b cannot be loaded: config\.json names no architecture$")
    assert at(world, "dismissed b") < at(world, "stop a") + 1.0


async def test_an_early_start_that_exceeds_its_reservation_ends() -> None:
    world = two(prepared=GIB)
    await world.ask("a")
    await world.ask("b")
    assert at(world, "dismissed b") < at(world, "start b")


async def test_an_early_start_ends_for_a_demand_ahead_and_other_victims_do_not_wait_for_its_end() -> None:
    """`first` has priority. It needs the memory of `idle` and that of b's early start. Both stop at the same time."""
    sizes = {"a": 4 * GIB, "b": 4 * GIB, "idle": GIB, "first": 6 * GIB - 100 * MIB}
    models = {name: FakeModel(shards=(size,), stop_seconds=3.0, prepared=200 * MIB) for name, size in sizes.items()}
    keys = {name: {"min_residency": 0.0} for name in sizes} | {"first": {"priority": 1}}
    world = Schedule(sizes, totals={CPU: 6 * GIB}, models=models, keys=keys, settings=Settings(swap_patience=0.0))
    await world.ask("a")
    await world.ask("idle")
    behind = await world.asking("b", wait=1.0)
    assert "prepared b" in world.entries("")
    world.launcher.reading_lag = 1.5
    arrived = world.now
    await world.ask("first")
    assert at(world, "stop idle") == arrived
    assert world.entries("ready") == ["ready a", "ready idle", "ready first"]
    assert at(world, "dismissed b") < at(world, "start first")
    await behind


async def test_an_early_start_for_an_accelerator_uses_main_memory_only() -> None:
    models = {name: FakeModel(shards=(6 * GIB,), host=GIB, stop_seconds=3.0, prepared=HELD) for name in "ab"}
    keys = {name: {"min_residency": 0.0, "required_memory": {"": 6 * GIB, "cpu": GIB}} for name in "ab"}
    totals = {GPU0: 8 * GIB, CPU: 8 * GIB}
    world = Schedule({"a": 6 * GIB, "b": 6 * GIB}, totals=totals, models=models, keys=keys)
    await world.ask("a")
    waited = await world.ask("b")
    assert at(world, "prepared b") < at(world, "stopped a") <= at(world, "start b")
    assert waited == pytest.approx(5.0, abs=0.1)
    worker = world.worker("b")
    assert (worker.reserved[GPU0], worker.reserved[CPU]) == (6 * GIB, GIB)
