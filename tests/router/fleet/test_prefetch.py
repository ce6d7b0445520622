"""Prefetch: files of queued models and of models under `prefetch` are read into free memory."""

import asyncio

from router.config.settings import Settings
from tests.fakes import CPU, GIB, GPU0, MIB, FakeModel
from tests.router.fleet.worlds import Schedule

FILES = 128 * MIB


def world_of(*names: str, host: int = 8 * GIB, keys: dict[str, dict[str, object]] | None = None) -> Schedule:
    """Models of 3 GiB on an accelerator that has room for two of them."""
    own = keys or {}
    return Schedule(
        dict.fromkeys(names, 3 * GIB),
        totals={GPU0: 7 * GIB, CPU: host},
        models={name: FakeModel(shards=(3 * GIB,), prepared=MIB, stop_seconds=3.0) for name in names},
        settings=Settings(swap_patience=0.0),
        keys={name: {"min_residency": 0.0, "required_memory": {"": 3 * GIB, "cpu": 0}} | own.get(name, {})
              for name in names},
    )  # fmt: skip


async def test_the_files_of_a_queued_model_are_prefetched() -> None:
    world = world_of("a", "b", "c")
    await world.ask("a")
    await world.ask("b")
    await world.ask("c")
    assert world.entries("read ", "stopped a", "start c") == ["read c", "stopped a", "start c"]
    [event] = world.events_of("prefetch")
    assert (event.model, event.data["bytes"]) == ("c", FILES)


async def test_file_sizes_of_a_queued_worker_are_looked_up_once() -> None:
    world = world_of("a", "b", "c", host=FILES - 1)
    using = [asyncio.create_task(world.ask(name, 60.0)) for name in "ab"]
    await asyncio.sleep(5)
    using.append(await world.asking("c", wait=5))
    looks = world.files.looks
    for _ in range(20):
        world.fleet.scheduler.plan_now()
    assert world.files.looks == looks
    await asyncio.gather(*using)


async def test_a_prefetch_ends_when_the_worker_has_its_place() -> None:
    world = world_of("a", "b", "c")
    world.launcher.read_seconds = 100.0
    for name in "abc":
        await world.ask(name)
    assert "stopped reading c" in world.entries("stopped reading")


async def test_a_model_under_prefetch_is_read_with_the_requested_one_and_loaded_into_free_memory() -> None:
    world = world_of("a", "b", keys={"a": {"prefetch": ("b",)}})
    await world.ask("a")
    await asyncio.sleep(5.0)
    assert world.entries("read ", "ready") == ["read b", "ready a", "ready b"]
    assert await world.ask("b") == 0.0


async def test_files_that_are_being_prefetched_count_against_free_memory() -> None:
    keys: dict[str, dict[str, object]] = {"a": {"prefetch": ("x",)}, "b": {"prefetch": ("y",)}}
    world = world_of("a", "b", "x", "y", host=2 * FILES - 1, keys=keys)
    world.launcher.read_seconds = 100.0
    await asyncio.gather(world.ask("a"), world.ask("b"))
    assert world.entries("read ") == ["read x"]


async def test_a_prefetched_model_evicts_no_worker_and_is_evicted_first() -> None:
    world = world_of("a", "b", "c", keys={"a": {"prefetch": ("b",)}})
    await world.ask("c")
    await world.ask("a")
    await asyncio.sleep(5.0)
    assert world.entries("ready", "stop ") == ["ready c", "ready a"], "there is no room for b"
    world.fleet.unload("c")
    world.fleet.unload("a")
    await asyncio.sleep(40.0)
    await world.ask("a")
    await asyncio.sleep(5.0)
    assert world.entries("ready")[-1] == "ready b"
    await world.ask("c")
    assert world.entries("stop ")[-1] == "stop b", "the prefetched model, rather than a"


async def test_a_prefetched_model_becomes_required_with_its_first_request() -> None:
    world = world_of("a", "b", "c", keys={"a": {"prefetch": ("b",)}})
    await world.ask("a")
    await asyncio.sleep(5.0)
    await world.ask("b")
    await world.ask("c")
    assert world.entries("stop ") == ["stop a"], "the least recently used"


async def test_models_that_prefetch_each_other_do_not_loop() -> None:
    world = world_of("a", "b", "c", keys={"a": {"prefetch": ("b",)}, "b": {"prefetch": ("a", "b")}})
    await world.ask("a")
    for _ in range(10):
        await asyncio.sleep(20.0)
    assert world.entries("ready", "stop ") == ["ready a", "ready b"]
    world.fleet.unload("a")
    await asyncio.sleep(20.0)
    await world.ask("c")
    await asyncio.sleep(20.0)
    assert world.entries("ready").count("ready a") == 1
