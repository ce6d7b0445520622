"""Models that may not be loaded are counted for by clerks, in virtual time."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from router.clerks import Clerks
from router.errors import Draining, LoadFailed, ModelNotLoaded, QueueFull, QueueTimeout
from router.launchers import WorkerLost
from router.lease import Lease
from router.limits import Limits
from tests.fakes import CPU, GIB, MIB, FakeModel, virtual
from tests.schedules.worlds import Schedule
from worker.protocol.exits import Exit

OFF = Limits(autoload=False)
SMALL = 64 * MIB


class World(Schedule):
    """Models of which none may be loaded, and their clerks."""

    def __init__(self, *names: str, most: int = 4, limits: Limits = OFF, **further: Any):
        super().__init__(dict.fromkeys(names, SMALL), limits=limits, **further)
        self.clerks = Clerks(self.fleet, most=most)

    async def count(self, model: str = "a", seconds: float = 0.01) -> Lease:
        """One request, answered for `seconds`; its lease, given back."""
        with self.clerks.lease(model, autoload=None) as lease:
            await lease.ready()
            await asyncio.sleep(seconds)
        return lease

    async def end(self) -> None:
        await self.fleet.close()
        await self.clerks.close()
        assert self.launcher.running == {}

    def told(self) -> list[tuple[str, str]]:
        """(model, state) of each clerk."""
        return [(clerk.preset.id, clerk.state.name.lower()) for clerk in self.clerks.alive]


@virtual
async def test_a_model_that_may_not_be_loaded_is_counted_for_by_a_clerk_which_idles_and_ends() -> None:
    world = World("a")
    first = await world.count()
    assert world.told() == [("a", "ready")]
    assert (await world.count()).worker is first.worker
    assert world.fleet.workers() == []
    await asyncio.sleep(59.0)
    await world.count()
    await asyncio.sleep(59.0)
    assert world.told() == [("a", "ready")], "a minute after the last request, not after the first"
    await asyncio.sleep(2.0)
    assert world.told() == []
    assert world.journal == ["start a", "stop a"]
    await world.end()


@virtual
async def test_a_clerk_that_nobody_reaches_is_replaced_and_ends_with_its_last_answer() -> None:
    world = World("a")
    with world.clerks.lease("a", autoload=None) as lease:
        await lease.ready()
        next(iter(world.launcher.running.values())).is_unreachable.set()
        await lease.worker.ended.wait()
        assert (await world.count()).worker is not lease.worker
        assert world.told() == [("a", "ready"), ("a", "ready")]
    await asyncio.sleep(1.0)
    assert world.told() == [("a", "ready")]
    await world.end()


@virtual
async def test_a_converted_snapshot_of_which_nothing_can_be_read_keeps_nobody_from_being_counted_for() -> None:
    world = World("a")
    world.files.conversions["/snapshots/a"] = "/converted/a"
    world.files.damaged.add("/converted/a")
    await world.count()
    assert world.told() == [("a", "ready")]
    await world.end()


@virtual
async def test_a_model_that_is_loaded_or_may_be_is_counted_for_by_its_worker() -> None:
    world = World("a", "b", keys={"b": {"autoload": True}})
    assert (await world.count("b")).worker in world.fleet.workers()
    await world.count("a")
    await world.fleet.wanted("a")
    assert (await world.count("a")).worker in world.fleet.workers()
    await asyncio.sleep(1.0)
    assert world.told() == [], "its clerk is of no use any more"
    await world.end()


@virtual
async def test_one_clerk_more_than_there_may_be_takes_the_place_of_the_one_that_has_idled_longest() -> None:
    world = World("a", "b", "c", most=2)
    await world.count("a")
    await world.count("b")
    await world.count("a")
    await world.count("c")
    assert sorted(world.told()) == [("a", "ready"), ("c", "ready")]
    await world.end()


@virtual
async def test_while_all_clerks_are_in_use_others_wait_for_one_but_not_for_ever() -> None:
    world = World("a", "b", most=1, limits=Limits(autoload=False, queue_timeout=10.0))
    busy = asyncio.ensure_future(world.count("a", seconds=8.0))
    await asyncio.sleep(3.0)
    began = world.now
    await world.count("b")
    assert world.now - began > 5.0
    assert busy.done()
    busy = asyncio.ensure_future(world.count("a", seconds=60.0))
    await asyncio.sleep(5.0)
    with pytest.raises(QueueTimeout, match="were in use"):
        await world.count("b")
    busy.cancel()
    await world.end()


@virtual
async def test_limits_of_a_model_and_its_queue_hold_for_its_clerk() -> None:
    world = World("a", "b", keys={"a": {"max_concurrent": 1}, "b": {"queue_size": 1}})
    with world.clerks.lease("a", autoload=None), pytest.raises(QueueFull, match="max-concurrent"):
        world.clerks.lease("a", autoload=None)
    with world.clerks.lease("b", autoload=None), pytest.raises(QueueFull, match="queue-size"):
        world.clerks.lease("b", autoload=None)
    await world.end()


@virtual
async def test_a_clerk_that_is_killed_is_replaced() -> None:
    world = World("a")
    first = await world.count()
    world.launcher.die("a")
    await first.worker.stopped.wait()
    assert (await world.count()).worker is not first.worker
    await world.end()


@virtual
async def test_a_clerk_that_is_killed_while_it_starts_is_begun_once_more_and_not_for_ever() -> None:
    killed = WorkerLost("a: was killed", cause="crashed", exit=-9)
    world = World("a", models={"a": FakeModel(shards=(SMALL,), start_fails=[killed])})
    await world.count()
    await world.end()
    world = World("a", models={"a": FakeModel(shards=(SMALL,), start_fails=[killed] * 9)})
    with pytest.raises(Exception, match="was killed"):
        await world.count()
    assert world.journal.count("start a") == 2
    await world.end()


@virtual
async def test_what_no_clerk_can_be_made_of_is_not_tried_again_before_its_files_change() -> None:
    broken = WorkerLost("a: has no tokenizer", cause="load_failed", exit=Exit.UNUSABLE)
    world = World("a", models={"a": FakeModel(shards=(SMALL,), start_fails=[broken])})
    for _ in range(3):
        with pytest.raises(LoadFailed, match="has no tokenizer"):
            await world.count()
    assert world.journal.count("start a") == 1
    world.files.change("a")
    await world.count()
    await world.end()


@virtual
async def test_without_its_files_there_is_no_clerk_and_the_error_says_what_to_do() -> None:
    world = World("a", missing=("a",))
    with pytest.raises(ModelNotLoaded, match="fetch and load it with POST /models/load"):
        await world.count()
    assert world.journal == []
    await world.end()


@virtual
async def test_a_reload_ends_the_clerk_of_a_model_whose_preset_or_files_are_others_now() -> None:
    world = World("a", "b", "c")
    first = {name: (await world.count(name)).worker for name in "abc"}
    world.files.change("b")
    presets = {**world.presets, "a": replace(world.presets["a"], chat_template="x")}
    world.fleet.apply(presets)
    now = {name: (await world.count(name)).worker for name in "abc"}
    assert {name for name in "abc" if now[name] is not first[name]} == {"a", "b"}
    del presets["c"]
    world.fleet.apply(presets)
    await first["c"].stopped.wait()
    await world.end()


@virtual
async def test_a_request_that_its_clerk_answers_is_not_cut_by_a_reload() -> None:
    world = World("a")
    counting = asyncio.ensure_future(world.count(seconds=10.0))
    await asyncio.sleep(5.0)
    world.files.change("a")
    world.fleet.apply(world.presets)
    other = await world.count()
    lease = await counting
    assert lease.aborted is None
    assert lease.worker is not other.worker
    await world.end()


@virtual
async def test_clerks_make_way_for_who_waits_for_main_memory_once_they_idle() -> None:
    large: dict[str, Any] = {"models": {"b": FakeModel(shards=(GIB,))}, "keys": {"b": {"required_memory": {"": GIB}}}}
    world = World("a", "b", totals={CPU: GIB + SMALL // 2}, **large)
    busy = asyncio.ensure_future(world.count(seconds=5.0))
    await asyncio.sleep(4.0)
    await world.fleet.wanted("b")
    assert busy.done()
    assert world.told() == []
    assert world.journal == ["start a", "stop a", "start b"]
    await world.end()


@virtual
async def test_what_a_clerk_takes_is_charged_until_readings_show_it() -> None:
    world = World("a")
    world.launcher.hold("start a")
    counting = asyncio.ensure_future(world.count())
    await asyncio.sleep(1.0)
    assert world.told() == [("a", "starting")]
    charged = world.fleet.reserved(CPU)
    assert charged == world.clerks.alive[0].reserved[CPU] > 64 * MIB
    world.launcher.release("start a")
    await counting
    assert world.fleet.reserved(CPU) == 0
    assert world.launcher.readings()[0].used == SMALL
    await world.end()


@virtual
async def test_a_router_that_closes_takes_its_clerks_along() -> None:
    world = World("a", "b")
    await world.count("a")
    world.launcher.hold("start b")
    waiting = asyncio.ensure_future(world.count("b"))
    await asyncio.sleep(1.0)
    await world.end()
    with pytest.raises(Draining):
        await waiting
    assert world.told() == []
