"""Sleeping weights: weights of evicted models stay in main memory until a demand needs it."""

import asyncio
from dataclasses import replace

import pytest

from router.api.status import status, value_of
from router.config.settings import Settings
from router.errors import AlreadyRunning, LoadFailed, NotRunning
from router.events import Event
from router.fleet.sleeping_weights import SleepRequest
from router.launch.interface import WorkerLost
from tests.fakes import CPU, GIB, GPU0, MIB, FakeModel
from tests.router.fleet.worlds import Schedule

FILES = 128 * MIB  # bytes of the files of a fake snapshot


def gpu(
    *names: str, sleep: int = 2 * FILES, host: int = 8 * GIB, keys: dict[str, dict[str, object]] | None = None
) -> Schedule:
    """Models of 6 GiB on an accelerator that has room for one of them."""
    own = keys or {}
    return Schedule(
        dict.fromkeys(names, 6 * GIB),
        totals={GPU0: 8 * GIB, CPU: host},
        models={name: FakeModel(shards=(6 * GIB,), prepared=MIB) for name in names},
        settings=Settings(swap_patience=0.0, sleep_memory=sleep),
        keys={name: {"min_residency": 0.0, "required_memory": {"": 6 * GIB, "cpu": 0}} | own.get(name, {})
              for name in names},
    )  # fmt: skip


def sleeping_weights(world: Schedule, state: str) -> list[Event]:
    return [event for event in world.events_of("sleeping_weights") if event.data["state"] == state]


async def settled(world: Schedule) -> None:
    """Return once everything that was begun is over."""
    await asyncio.sleep(5.0)


async def ask_each(world: Schedule, names: str) -> None:
    for name in names:
        await world.ask(name)
    await settled(world)


def value(world: Schedule, name: str) -> str:
    return value_of(world.fleet.models[name])


async def test_an_evicted_model_sleeps_and_wakes_through_a_planned_load() -> None:
    world = gpu("a", "b")
    await ask_each(world, "ab")
    assert (value(world, "a"), value(world, "b")) == ("sleeping", "loaded")
    assert world.launcher.used(CPU) == FILES
    shown = status(world.fleet, world.fleet.models["a"])
    assert shown["memory"] == {"cpu": {"estimated_mib": 128, "measured_mib": 128, "reserved_mib": 128}}
    await world.ask("a")
    await settled(world)
    assert (value(world, "a"), value(world, "b")) == ("loaded", "sleeping")
    assert world.entries("locking", "locked", "unlock", "ready") == [
        "ready a", "locking a", "locked a", "ready b", "locking b", "locked b", "ready a", "unlock a"
    ]  # fmt: skip
    await world.ask("b")
    await settled(world)
    assert (value(world, "a"), value(world, "b")) == ("sleeping", "loaded"), "again"
    await world.stop()
    assert world.launcher.locked == {}


async def test_sleeping_weights_are_reserved_and_the_least_recently_used_leave_for_the_budget() -> None:
    world = gpu("a", "b", "c", "d", sleep=2 * FILES)
    for name in "abcd":
        await world.ask(name)
        await settled(world)
        assert world.launcher.used(CPU) <= 2 * FILES
    assert [value(world, name) for name in "abcd"] == ["unloaded", "sleeping", "sleeping", "loaded"]
    [host] = [device for device in world.fleet.scheduler.devices if device.id == CPU]
    assert sum(one.reserved.get(CPU, 0) for one in world.fleet.scheduler.residents()) == host.used == 2 * FILES
    assert host.foreign == 0
    asleep = [one for one in world.fleet.scheduler.residents() if CPU in one.measured and one.best_effort]
    assert max(one.last_used for one in asleep) < -1e6, "they are evicted before any worker"


async def test_a_pinned_model_that_sleeps_stays() -> None:
    world = gpu("a", "b", "c", sleep=FILES)
    await ask_each(world, "ab")
    sleeping = world.fleet.models["a"].sleeping
    assert sleeping is not None
    sleeping.preset = replace(sleeping.preset, pin=True)
    await world.ask("c")
    await settled(world)
    assert [value(world, name) for name in "abc"] == ["sleeping", "unloaded", "loaded"]


async def test_a_model_that_has_a_worker_again_when_its_sleep_is_decided_does_not_sleep() -> None:
    world = gpu("a")
    await world.ask("a")
    model = world.fleet.models["a"]
    model.sleep_request = SleepRequest(files=("a.safetensors",), size=FILES, last_used=world.now, expires=None)
    world.fleet.sleeping_weights.put_to_sleep([model], 8 * GIB)
    assert world.fleet.sleeping_weights.all == {}


async def test_sleeping_weights_are_evicted_for_a_demand() -> None:
    """On main memory, where room for weights is room for models."""
    sizes = {"a": 4 * GIB, "b": 4 * GIB, "c": 6 * GIB - FILES // 2}
    world = Schedule(
        sizes,
        totals={CPU: 6 * GIB},
        models={name: FakeModel(shards=(size,), prepared=MIB) for name, size in sizes.items()},
        settings=Settings(swap_patience=0.0, sleep_memory=GIB),
        keys={name: {"min_residency": 0.0} for name in sizes},
    )
    await ask_each(world, "ab")
    assert value(world, "a") == "sleeping"
    await world.ask("c")
    assert world.launcher.over_commits == []
    await settled(world)
    assert [value(world, name) for name in "abc"] == ["unloaded", "unloaded", "loaded"]
    assert world.entries("locking", "unlock") == ["locking a", "unlock a"], "and there was no room for b's"


async def test_unloading_a_model_that_sleeps_gives_its_memory_back() -> None:
    world = gpu("a", "b")
    await ask_each(world, "ab")
    with pytest.raises(AlreadyRunning):
        world.fleet.load("a")
    [sleeping] = world.fleet.unload("a")
    await sleeping.stopped.wait()
    assert [event.data["reason"] for event in sleeping_weights(world, "released")] == ["requested"]
    assert value(world, "a") == "unloaded"
    assert world.launcher.used(CPU) == 0
    with pytest.raises(NotRunning):
        world.fleet.unload("a")


async def test_a_model_that_sleeps_wakes_for_requests_whatever_autoload_says() -> None:
    world = gpu("a", "b")
    await ask_each(world, "ab")
    with world.fleet.lease("a", autoload=False) as lease:
        await lease.ready()


async def test_an_idle_model_sleeps_and_its_weights_are_released_after_its_ttl() -> None:
    world = gpu("a", keys={"a": {"sleep_idle": 10.0, "ttl": 60.0}})
    await world.ask("a")
    await settled(world)
    assert value(world, "a") == "loaded"
    for _ in range(3):
        await settled(world)
    assert value(world, "a") == "sleeping"
    assert world.fleet.models["a"].reason == "idle"
    for _ in range(10):
        await settled(world)
    assert value(world, "a") == "unloaded"
    assert world.launcher.used(CPU) == 0


async def test_a_model_that_idles_past_its_ttl_and_one_that_was_unloaded_do_not_sleep() -> None:
    world = gpu("a", "b", keys={"a": {"ttl": 2.0}})
    await world.ask("a")
    await settled(world)
    await world.ask("b")
    world.fleet.unload("b")
    await settled(world)
    assert [value(world, name) for name in "ab"] == ["unloaded", "unloaded"]
    assert world.entries("locking") == []


async def test_lost_sleeping_weights_leave_an_unloaded_model() -> None:
    world = gpu("a", "b")
    await ask_each(world, "ab")
    world.launcher.locked["a"].lose()
    await settled(world)
    assert [event.data["reason"] for event in sleeping_weights(world, "released")] == ["failed"]
    assert value(world, "a") == "unloaded"
    assert world.launcher.used(CPU) == 0
    await world.ask("a")


async def test_a_model_that_cannot_be_woken_sleeps_no_longer() -> None:
    """Its files are gone, for example. Then the locked weights are of no use."""
    world = gpu("a", "b")
    await ask_each(world, "ab")
    assert value(world, "a") == "sleeping"
    gone = WorkerLost("there is no config.json", cause="load_failed", exit=3)
    world.launcher.models["a"].start_fails.append(gone)
    await world.refuses("a", LoadFailed, match="config")
    await settled(world)
    assert value(world, "a") == "unloaded"
    assert "a" not in world.launcher.locked


async def test_a_model_that_is_changed_or_removed_sleeps_no_longer() -> None:
    world = gpu("a", "b", "c", sleep=GIB)
    await ask_each(world, "abc")
    assert [value(world, name) for name in "abc"] == ["sleeping", "sleeping", "loaded"]
    world.fleet.models.apply({"a": replace(world.presets["a"], ctx_size=64), "c": world.presets["c"]})
    await settled(world)
    assert value(world, "a") == "unloaded"
    assert world.launcher.locked == {}


async def test_weights_sleep_in_exactly_the_main_memory_that_is_free() -> None:
    for missing, entries in ((0, ["locking a"]), (1, [])):
        world = gpu("a", host=FILES - missing, keys={"a": {"sleep_idle": 1.0}})
        await world.ask("a")
        await asyncio.sleep(20)
        assert world.entries("locking") == entries
