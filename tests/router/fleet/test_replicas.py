"""Replicas: further workers of a crowded model. They start where memory is free, and are evicted for any demand."""

import asyncio
from dataclasses import replace
from typing import Any

from router.config.settings import Settings
from router.fleet.worker import Worker
from router.launch.interface import WorkerLost
from tests.fakes import CPU, GIB, GPU0, GPU1, GPU2, MIB, FakeModel
from tests.router.fleet.worlds import Schedule
from worker.protocol.events import Pulse

TWO = {GPU0: 8 * GIB, GPU1: 8 * GIB, CPU: 64 * GIB}


def world(sizes: dict[str, int], replicas: tuple[int, int] = (1, 2), **more: Any) -> Schedule:
    """Model `a` may have replicas, and runs one request at a time."""
    keys = {"a": {"replicas": replicas, "parallel": 1, "replica_idle": 20.0, **more.pop("a", {})}}
    return Schedule(sizes, **{"totals": TWO, "keys": keys, **more})


def workers(world: Schedule, model: str = "a") -> list[Worker]:
    return [worker for worker in world.fleet.workers() if worker.preset.id == model]


async def load_of(world: Schedule, count: int, seconds: float = 30.0) -> list[asyncio.Task[float]]:
    """`count` requests for `a`, one after another within a second, each of `seconds`."""
    return [await world.asking("a", seconds, wait=0.1) for _ in range(count)]


async def test_a_crowded_model_gets_a_replica_on_the_emptier_device_and_leases_go_to_the_least_loaded() -> None:
    scene = world({"a": 3 * GIB})
    await scene.ask("a")
    asking = await load_of(scene, 3)
    await asyncio.sleep(5)
    assert [(worker.place, worker.best_effort) for worker in workers(scene)] == [((GPU0,), False), ((GPU1,), True)]
    asking += await load_of(scene, 3)
    assert [len(worker.leases) for worker in workers(scene)] == [3, 3]
    await asyncio.gather(*asking)


async def test_a_model_without_parallel_is_crowded_beyond_the_sequences_of_a_step() -> None:
    """Before its first pulse, too."""
    scene = Schedule({"a": 3 * GIB}, totals=TWO, keys={"a": {"replicas": (1, 2)}})
    asking = await load_of(scene, 16)
    await asyncio.sleep(5)
    assert len(workers(scene)) == 1
    asking += await load_of(scene, 1)
    await asyncio.sleep(5)
    assert len(workers(scene)) == 2
    await asyncio.gather(*asking)


async def test_an_embedder_is_crowded_by_requests_however_many_tokens_it_reports() -> None:
    scene = world({"a": 3 * GIB}, a={"task": "embed", "parallel": 4})
    await scene.ask("a")
    scene.launcher.say("a", Pulse(steps=1, running=0, waiting=0, measured={}, parallel=512))
    asking = await load_of(scene, 5)
    await asyncio.sleep(5)
    assert len(workers(scene)) == 2
    await asyncio.gather(*asking)


async def test_a_replica_is_evicted_for_a_required_demand() -> None:
    """Though it is in constant use itself once patience is over, and at once while it idles."""
    scene = world({"a": 5 * GIB, "b": 5 * GIB}, (2, 2))
    await scene.ask("a")
    await asyncio.sleep(10)
    required, replica = workers(scene)
    await asyncio.gather(scene.ask("a", 0.1), scene.ask("a", 3.0))  # the replica was used last
    assert replica.usage.last_used > required.usage.last_used
    assert await scene.ask("b") < 5
    assert (workers(scene), replica.reason) == ([required], "evicted")


async def test_models_short_of_their_minimum_do_not_evict_each_others_replicas() -> None:
    """Three devices for four workers. The model that came into use last has two. It evicts an idle replica of the other
    model once it is crowded."""
    keys = {name: {"replicas": (2, 3), "parallel": 1} for name in "ab"}
    scene = Schedule({"a": 5 * GIB, "b": 5 * GIB}, totals=TWO | {GPU2: 8 * GIB}, keys=keys)

    async def client(model: str) -> None:
        for _ in range(300):
            await scene.ask(model, 0.3)
            await asyncio.sleep(0.7)

    first = asyncio.create_task(client("a"))
    await asyncio.sleep(20)
    second = asyncio.create_task(client("b"))
    await asyncio.sleep(200)
    assert scene.journal == ["start a", "start a", "start b", "stop a", "start b"]
    crowd = [asyncio.create_task(scene.ask("a", 30.0)) for _ in range(4)]
    await asyncio.sleep(30)
    assert len(workers(scene)) == 2
    await asyncio.gather(first, second, *crowd)


async def test_a_replica_evicts_sleeping_weights_however_recently_used() -> None:
    """`b` is used after `a` has come into use, and falls asleep: a replica of `a` fits without its weights only."""
    keys: dict[str, dict[str, Any]] = {
        "a": {"replicas": (2, 2)}, "b": {"sleep_idle": 5.0, "required_memory": {"": 3 * GIB // 2}}
    }  # fmt: skip
    sizes = {"a": 2 * GIB, "b": 3 * GIB // 2}
    settings = Settings(sleep_memory=GIB)
    scene = Schedule(sizes, totals={CPU: 4 * GIB + 64 * MIB}, keys=keys, settings=settings)

    async def client() -> None:
        for _ in range(60):
            await scene.ask("a", 0.3)
            await asyncio.sleep(0.7)

    using = asyncio.create_task(client())
    await asyncio.sleep(1)
    await scene.ask("b")
    await asyncio.sleep(12)
    assert (scene.fleet.models["b"].sleeps, len(workers(scene))) == (True, 1)
    await asyncio.sleep(30)
    assert (scene.fleet.models["b"].sleeps, len(workers(scene))) == (False, 2)
    await using


async def test_a_replica_without_memory_is_dropped_and_not_tried_with_each_request() -> None:
    scene = world({"a": 5 * GIB, "b": 5 * GIB})
    await scene.ask("b")
    await scene.ask("a")
    asking = await load_of(scene, 8, 10.0)
    drops = [event for event in scene.events.since(0) or () if event.data.get("decision") == "drop"]
    assert (len(drops), len(workers(scene))) == (1, 1)
    assert {worker.preset.id for worker in scene.fleet.workers()} == {"a", "b"}
    await asyncio.gather(*asking)
    assert scene.fleet.models["a"].failure is None


async def test_a_failed_replica_harms_no_request() -> None:
    models = {"a": FakeModel(shards=(3 * GIB,))}
    scene = world({"a": 3 * GIB}, models=models)
    await scene.ask("a")
    models["a"].start_fails.append(WorkerLost("crash", cause="crashed", exit=1))
    asking = await load_of(scene, 3)
    await asyncio.gather(*asking)
    assert scene.fleet.models["a"].failure is None
    assert await scene.ask("a") == 0.0


async def test_a_replica_becomes_required_when_the_required_worker_dies() -> None:
    scene = world({"a": 3 * GIB, "b": 8 * GIB}, (2, 2))
    await scene.ask("a")
    await asyncio.sleep(10)
    scene.launcher.die("a")
    await asyncio.sleep(0.1)
    assert await scene.ask("a", 0.1) == 0.0
    assert next(worker.best_effort for worker in workers(scene) if worker.open) is False


async def test_replicas_of_an_unused_model_are_not_started_again() -> None:
    """Neither by the time to live of the first one, nor by crashes."""
    scene = world({"a": GIB}, (2, 3), a={"ttl": 5.0}, models={"a": FakeModel(shards=(GIB,), dies_after=7.0)})
    await scene.ask("a")
    await asyncio.sleep(60)
    begun = len(scene.journal)
    await asyncio.sleep(600)
    assert (workers(scene), len(scene.journal)) == ([], begun)


async def test_fewer_replicas_take_effect_without_a_restart() -> None:
    scene = world({"a": 3 * GIB}, (2, 2))
    await scene.ask("a")
    await asyncio.sleep(10)
    fewer = {id: replace(preset, replicas=(1, 1)) for id, preset in scene.presets.items()}
    scene.fleet.models.apply(fewer)
    assert not any(worker.retired for worker in scene.fleet.workers())
    await asyncio.sleep(25)
    assert len(workers(scene)) == 1
    assert scene.journal == ["start a", "start a", "stop a"]
