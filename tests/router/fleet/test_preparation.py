"""Preparation: once for a model, while nobody wants anything; and loads that find it, or that cannot use it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from router.fleet.limits import Limits
from router.fleet.preparation import LONGEST_PAUSE, LOOK_INTERVAL, PAUSE, QUIET, Preparation
from router.launch.interface import WorkerLost
from router.memory.checkpoint_facts import Checkpoint
from router.memory.process import RUNTIME_HOST
from tests.fakes import CPU, GIB, FakeModel, virtual
from tests.router.fleet.worlds import Schedule
from worker.protocol.exits import Exit


class FakeConversions:
    """Snapshots that have to be converted, and those that were, which `files` finds from then on."""

    def __init__(self, world: Schedule):
        self.given_up: list[Path] = []
        self.settled: set[str] = set()
        self.sweeps = 0
        self._files = world.files

    def target(self, snapshot: str) -> Path:
        return Path(f"/converted/{Path(snapshot).name}")

    def is_settled(self, snapshot: str, facts: Checkpoint) -> bool:
        return snapshot in self.settled or self.target(snapshot) in self.given_up

    def give_up(self, target: Path) -> None:
        self.given_up.append(target)

    async def swept(self) -> None:
        await asyncio.sleep(0.01)
        self.sweeps += 1

    def finish(self, name: str) -> None:
        self.settled.add(f"/snapshots/{name}")
        self._files.conversions[f"/snapshots/{name}"] = f"/converted/{name}"


class World:
    """A fleet with its preparation, which hears of everything."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self.conversions = FakeConversions(schedule)
        self.preparation = Preparation(schedule.fleet, self.conversions)
        schedule.events.fold(self.preparation.hear)
        self.task = asyncio.ensure_future(self.preparation.run())

    @property
    def told(self) -> list[dict[str, Any]]:
        found = self.schedule.events.since(0) or []
        return [{"model": event.model, **event.data} for event in found if event.kind == "prepared"]

    def when(self, entry: str) -> float:
        return next(at for at, said in self.schedule.launcher.timeline if said == entry)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})
        await self.schedule.stop()


def world_of(*names: str, models: dict[str, FakeModel] | None = None, **fields: Any) -> World:
    sizes = dict.fromkeys(names, GIB)
    return World(Schedule(sizes, models=models or {}, limits=Limits(patience=0.0), **{"stated": False, **fields}))


@virtual
async def test_a_model_is_prepared_once_after_its_first_load_when_nobody_wants_anything() -> None:
    world = world_of("a")
    await world.schedule.ask("a", seconds=20.0)
    ended = world.schedule.now
    await asyncio.sleep(60.0)
    assert world.when("convert a") >= ended + QUIET
    assert world.schedule.journal.count("convert a") == 1
    [told] = world.told
    assert (told["model"], told["outcome"], told["bytes"]) == ("a", "done", GIB)
    world.conversions.finish("a")
    await world.schedule.ask("a")
    await asyncio.sleep(60.0)
    assert world.schedule.journal.count("convert a") == 1
    await world.stop()


@virtual
async def test_what_is_told_of_is_listed_by_then() -> None:
    world, sweeps = world_of("a"), []
    world.schedule.events.fold(
        lambda event: sweeps.append(world.conversions.sweeps) if event.kind == "prepared" else None
    )
    await world.schedule.ask("a")
    await asyncio.sleep(60.0)
    assert sweeps == [3], "at first, before the conversion, and after it"
    await world.stop()


@virtual
async def test_what_was_fetched_is_prepared_before_anybody_asks_and_its_exact_footprint_is_known() -> None:
    world = world_of("a", missing=("a",))
    fleet = world.schedule.fleet
    fleet.fetch("a")
    await asyncio.sleep(30.0)
    assert world.schedule.journal == ["download a", "convert a", "estimate a"]
    assert world.told[0]["estimated"]
    await world.schedule.ask("a")
    [said] = [event for event in world.schedule.events.since(0) or () if event.kind == "estimate"]
    assert said.data["source"] == "exact", "no load has to work it out any more"
    await world.stop()


@virtual
async def test_what_lies_there_torn_is_deleted_before_it_is_made_anew() -> None:
    world = world_of("a", missing=("a",), models={"a": FakeModel(shards=(GIB,), convert_seconds=1000.0)})
    await asyncio.sleep(1.0)
    before = world.conversions.sweeps
    world.schedule.fleet.fetch("a")
    await asyncio.sleep(30.0)
    assert world.schedule.journal == ["download a", "convert a"]
    assert world.conversions.sweeps == before + 1
    await world.stop()


@virtual
async def test_nobody_waits_for_a_preparation() -> None:
    """Who is asked for while it runs is loaded as it came."""
    world = world_of("a", models={"a": FakeModel(shards=(GIB,), convert_seconds=1000.0)}, missing=("a",))
    world.schedule.fleet.fetch("a")
    await asyncio.sleep(30.0)
    assert world.schedule.journal == ["download a", "convert a"]
    assert await world.schedule.ask("a") < 5.0
    [worker] = world.schedule.fleet.workers()
    assert worker.snapshot == "/snapshots/a"
    await world.stop()


@virtual
async def test_a_request_postpones_what_has_not_begun() -> None:
    world = world_of("a", "b")
    await world.schedule.ask("a")
    await world.schedule.ask("b", seconds=100.0)
    ended = world.schedule.now
    await asyncio.sleep(60.0)
    assert min(world.when("convert a"), world.when("convert b")) >= ended
    await world.stop()


@virtual
async def test_requests_that_come_and_go_wake_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits until nobody wants anything looks at how it is then, and not at each of them."""
    world = world_of("a")
    await world.schedule.ask("a")
    await asyncio.sleep(QUIET / 2)
    loop, woken = asyncio.get_running_loop(), list[object]()
    call_soon = loop.call_soon

    def wake(*args: Any, **more: Any) -> asyncio.Handle:
        woken.append(args)
        return call_soon(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "call_soon", wake)
        world.schedule.events.mention("request", "a")
        world.schedule.events.append("plan", "a", worker=1, decision="wait")
    assert woken == []
    busy = world.schedule.now
    await asyncio.sleep(60.0)
    assert world.when("convert a") >= busy + QUIET
    await world.stop()


@virtual
async def test_the_next_load_takes_what_was_converted() -> None:
    world = world_of("a")
    world.conversions.finish("a")
    await world.schedule.ask("a")
    [worker] = world.schedule.fleet.workers()
    assert worker.snapshot == "/converted/a"
    await world.stop()


@virtual
async def test_a_converted_snapshot_that_cannot_be_loaded_is_forsaken_and_the_request_does_not_notice() -> None:
    lost = WorkerLost("a: damaged", cause="crashed", exit=Exit.DAMAGED)
    world = world_of("a", models={"a": FakeModel(shards=(GIB,), start_fails=[lost])})
    world.conversions.finish("a")
    await world.schedule.ask("a")
    [worker] = world.schedule.fleet.workers()
    assert worker.snapshot == "/snapshots/a"
    assert world.schedule.journal == ["start a", "start a"]
    assert world.schedule.fleet.models["a"].failure is None
    await world.stop()


@virtual
async def test_a_converted_snapshot_of_which_nothing_can_be_read_is_forsaken_and_the_request_does_not_notice() -> None:
    world = world_of("a")
    world.conversions.finish("a")
    world.schedule.files.damaged.add("/converted/a")
    await world.schedule.ask("a")
    assert world.schedule.files.conversions == {}
    assert world.schedule.fleet.models["a"].failure is None
    await world.stop()


@virtual
async def test_a_conversion_that_would_fail_the_same_way_again_is_told_and_not_tried_again() -> None:
    broken = WorkerLost("a: no such architecture", cause="crashed", exit=Exit.UNUSABLE)
    world = world_of("a", models={"a": FakeModel(shards=(GIB,), convert_fails=[broken])})
    for _ in range(2):
        await world.schedule.ask("a")
        world.schedule.fleet.unload("a")
        await asyncio.sleep(2 * LONGEST_PAUSE)
    [told] = world.told
    assert (told["outcome"], told["why"], told["again"]) == ("failed", "a: no such architecture", None)
    assert world.schedule.journal.count("convert a") == 1
    await world.stop()


@virtual
async def test_a_conversion_that_fails_is_tried_again_after_pauses_that_grow() -> None:
    """A disk may have room by then; it is told each time, and what is asked for meanwhile hastens nothing."""
    full = [WorkerLost("a: the disk is full", cause="crashed", exit=Exit.DISK_FULL) for _ in range(3)]
    world = world_of("a", models={"a": FakeModel(shards=(GIB,), convert_fails=full)})
    await world.schedule.ask("a")
    await asyncio.sleep(LOOK_INTERVAL + QUIET)
    await world.schedule.ask("a")
    await asyncio.sleep(0.5 * PAUSE)
    assert world.schedule.journal.count("convert a") == 1
    await asyncio.sleep(10 * PAUSE)
    assert [told["outcome"] for told in world.told] == ["no_room", "no_room", "no_room", "done"]
    assert [told["again"] for told in world.told] == [PAUSE, 2 * PAUSE, 4 * PAUSE, None]
    await world.stop()


@virtual
async def test_what_a_conversion_takes_is_charged_and_given_back_to_whoever_needs_it() -> None:
    """It goes before any model has to, and comes again once there is room."""
    models = {name: FakeModel(shards=(GIB,), convert_seconds=100.0) for name in "ab"}
    world = world_of("a", "b", models=models, stated=True, totals={CPU: 2 * GIB + RUNTIME_HOST // 2})
    fleet = world.schedule.fleet
    await world.schedule.ask("a")
    await asyncio.sleep(LOOK_INTERVAL + QUIET)
    assert world.schedule.journal == ["start a", "convert a"]
    assert fleet.reserved(CPU) == GIB + RUNTIME_HOST
    await world.schedule.ask("b")
    assert world.when("cancelled a") <= world.when("start b")
    assert fleet.reserved(CPU) == 2 * GIB, "a is still there"
    await asyncio.sleep(LOOK_INTERVAL + QUIET)
    assert [(told["outcome"], told["again"]) for told in world.told][:1] == [("failed", PAUSE)], "there is no room now"
    fleet.unload("b")
    await asyncio.sleep(PAUSE + 200.0)
    assert ("a", "done") in [(told["model"], told["outcome"]) for told in world.told]
    assert fleet.reserved(CPU) == GIB
    await world.stop()


@virtual
async def test_a_model_that_was_removed_meanwhile_is_not_prepared() -> None:
    world = world_of("a")
    await world.schedule.ask("a")
    world.schedule.fleet.remove("a", "requested")
    await asyncio.sleep(60.0)
    assert "convert a" not in world.schedule.journal
    await world.stop()


@virtual
async def test_what_another_interpreter_loads_is_left_to_it() -> None:
    world = world_of("a", keys={"a": {"python": "/other/python"}})
    await world.schedule.ask("a")
    await asyncio.sleep(60.0)
    assert "convert a" not in world.schedule.journal
    assert world.told == []
    await world.stop()
