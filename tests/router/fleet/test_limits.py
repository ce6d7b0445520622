"""Limits at their smallest values: refusals, their errors and their events, in virtual time."""

import asyncio
from typing import Any

import pytest

from router.config.settings import Settings
from router.errors import ApiError, LoadBackoff, ModelNotFound, QueueFull, QueueTimeout
from router.http.response import whole_seconds
from router.launch.interface import WorkerLost
from tests.fakes import GIB, FakeModel
from tests.router.fleet.worlds import Schedule
from worker.protocol.events import Progress, RequestEnded


async def test_a_load_command_counts_towards_no_request_limit() -> None:
    """Neither in the model's queue, nor in that of all, nor among those that it answers at once."""
    for keys, settings in (
        ({"queue_size": 1}, Settings()),
        ({}, Settings(queue_size=1)),
        ({"max_concurrent": 1}, Settings()),
    ):
        world = Schedule({"a": GIB}, keys={"a": keys}, settings=settings)
        loading = [world.fleet.load("a"), world.fleet.ensure_loaded("a")]
        await asyncio.sleep(0.5)
        first = await world.asking("a", 5.0, wait=0.5)
        await world.refuses("a", QueueFull, match="1 requests")
        assert await first < 2.0
        await asyncio.gather(*loading)
        assert await world.ask("a") == 0.0
        await world.stop()


async def test_a_full_queue_does_not_stop_requests_of_a_ready_model() -> None:
    world = Schedule({"a": GIB, "b": GIB, "c": GIB}, settings=Settings(queue_size=1))
    await world.ask("a")
    first = await world.asking("b", wait=0.1)
    await world.refuses("c", QueueFull, match="--queue-size")
    assert await world.ask("a") == 0.0
    await first
    assert await world.ask("c") > 0.0


async def test_a_request_refused_by_one_limit_is_not_counted_by_another() -> None:
    """One request may run and one may wait. A further one gets the error of the first limit and changes nothing."""
    world = Schedule({"a": GIB}, keys={"a": {"max_concurrent": 1, "queue_size": 1}})
    first = await world.asking("a", 3.0, wait=0.1)
    for _ in range(3):
        await world.refuses("a", QueueFull, match="max-concurrent")
    assert len(world.worker("a").leases) == 1
    await first
    await world.ask("a")


async def test_a_storm_of_refusals_is_an_event_each_second_with_its_numbers() -> None:
    world = Schedule({"a": GIB}, keys={"a": {"queue_size": 2}}, models={"a": FakeModel(load_seconds=30.0)})
    waiting = [asyncio.create_task(world.ask("a")) for _ in range(2)]
    await asyncio.sleep(0.1)
    for _ in range(300):
        await world.refuses("a", QueueFull)
        await asyncio.sleep(0.01)
    found = world.events_of("refused")
    assert [event.data["count"] for event in found] == [1, *[pytest.approx(100, abs=2)] * (len(found) - 1)]
    assert len(found) in (3, 4)
    await asyncio.sleep(2.0)
    found = world.events_of("refused")
    assert sum(event.data["count"] for event in found) == 300, "nor are the last ones forgotten"
    first = found[0]
    assert (first.model, first.data["reason"]) == ("a", "queue_full")
    assert (first.data["waiting"], first.data["limit"], first.data["limit_of_all"]) == (2, 2, Settings().queue_size)
    assert first.data["retry_after"] >= 1.0
    await asyncio.gather(*waiting)


async def test_a_queue_timeout_is_an_event_with_its_numbers() -> None:
    world = Schedule({"a": 5 * GIB, "b": 5 * GIB}, keys={"a": {"pin": True}}, settings=Settings(queue_timeout=0.5))
    await world.ask("a")
    await world.refuses("b", QueueTimeout)
    (event,) = world.events_of("refused")
    numbers = {name: event.data[name] for name in ("reason", "cause", "position", "limit_seconds")}
    assert numbers == {"reason": "queue_timeout", "cause": "memory", "position": 1, "limit_seconds": 0.5}


# Retry-After


@pytest.mark.parametrize(
    ("seconds", "header"), [(0.0, 1), (1.0, 1), (1.2, 2), (2.5, 3), (4.0000001, 4), (59.4, 60), (300.0, 300)]
)
def test_retry_after_is_never_too_short(seconds: float, header: int) -> None:
    assert whole_seconds(seconds) == header


async def test_a_request_after_retry_after_is_tried_again() -> None:
    """However the pauses of a model that keeps failing fall between two seconds."""
    world = Schedule({"a": GIB}, keys={"a": {"max_restarts": 0}})
    world.launcher.models["a"].start_fails = [WorkerLost("died", cause="crashed", exit=1) for _ in range(6)]
    for attempt in range(1, 7):
        await world.refuses("a", LoadBackoff)
        assert world.journal == ["start a"] * attempt
        with pytest.raises(LoadBackoff, match="next attempt in") as refused:
            await world.ask("a")
        assert world.journal == ["start a"] * attempt
        assert refused.value.retry_after is not None
        if refused.value.retry_after == 60.0:
            break
        await asyncio.sleep(whole_seconds(refused.value.retry_after))


async def test_the_eta_of_a_slow_load_uses_its_own_rate() -> None:
    world = Schedule({"a": GIB}, models={"a": FakeModel(load_seconds=2.0)}, keys={"a": {"queue_size": 1}})
    await world.ask("a")
    await world.fleet.unload("a")[0].stopped.wait()
    world.launcher.models["a"].load_seconds = 44.0
    waiting = await world.asking("a", wait=0.5)
    assert world.fleet.queue.eta(world.fleet.models["a"]) == pytest.approx(1.5, abs=0.2), "as it took before"
    for tenth in range(1, 4):
        await asyncio.sleep(4.0)
        world.launcher.say("a", Progress(stage="weights", done=tenth, total=10))
    with pytest.raises(QueueFull) as refused:
        await world.ask("a")
    assert refused.value.retry_after == pytest.approx(28.0), "seven tenths are left, of four seconds each"
    await waiting


# Previews


async def test_a_preview_never_changes_anything() -> None:
    """Of a model that is here, starts, is too large, has no room beside what is pinned, waits; and of none."""
    world = Schedule(
        {"pinned": 5 * GIB, "small": GIB, "large": 9 * GIB, "out": 5 * GIB}, keys={"pinned": {"pin": True}}
    )
    await world.ask("pinned")

    async def ask_all() -> dict[str, Any]:
        before = world.events.last_id, world.journal.copy(), [worker.id for worker in world.fleet.workers()]
        found = {name: await world.fleet.scheduler.preview(name) for name in world.presets}
        with pytest.raises(ModelNotFound):
            await world.fleet.scheduler.preview("nobody")
        await asyncio.sleep(0.1)
        assert before == (world.events.last_id, world.journal, [worker.id for worker in world.fleet.workers()])
        return found

    found = await ask_all()
    assert {name: each["decision"] for name, each in found.items()} == {
        "pinned": "none", "small": "start", "large": "refuse", "out": "wait",
    }  # fmt: skip
    assert found["large"]["shortage"]["cpu"]["required"] == 9 * GIB
    assert (found["out"]["cause"], found["out"]["keep"], found["out"]["evict"]) == ("memory", {"pinned": "pinned"}, [])
    waiting = await world.asking("out", wait=0.1)
    again = await ask_all()
    assert {name: each["decision"] for name, each in again.items()} == {
        name: each["decision"] for name, each in found.items()
    }
    assert again["out"]["cause"] == "memory"
    world.fleet.unload("pinned")
    await waiting


async def test_a_preview_of_a_full_model_is_the_error_of_one_more_request() -> None:
    world = Schedule({"a": GIB, "b": GIB}, keys={"a": {"max_concurrent": 1}, "b": {"queue_size": 1}})
    running = [asyncio.create_task(world.ask(name, 9.0)) for name in "ab"]
    await asyncio.sleep(1)
    for name in "ab":
        shown = await world.fleet.scheduler.preview(name)
        with pytest.raises(ApiError) as refused:
            await world.ask(name)
        assert shown == {
            "decision": "refuse", "reason": "queue_full", "message": refused.value.message,
            "retry_after": refused.value.retry_after,
        }  # fmt: skip
    await asyncio.sleep(5)
    assert (await world.fleet.scheduler.preview("b"))["decision"] == "none", "it is ready, so no request waits"
    await asyncio.gather(*running)


# Idle workers


async def test_the_shorter_idle_time_holds_unless_a_request_sets_another() -> None:
    """`sleep-idle-seconds` 20 s, `ttl` 60 s; what requests wish as keep-alive stands in place of `ttl`."""
    for request, leaves_after in ((None, 20.0), (5.0, 5.0), (0.0, 0.0), (40.0, 20.0), (-1.0, 20.0)):
        world = Schedule({"a": GIB}, keys={"a": {"ttl": 60.0, "sleep_idle": 20.0}})
        with world.fleet.lease("a") as lease:
            await lease.ready()
            if request is not None:
                world.launcher.say("a", RequestEnded(id="r", keep_alive=request))
        idle_since = world.now
        (worker,) = world.fleet.workers()
        await worker.retirement.began.wait()
        assert world.now - idle_since == pytest.approx(leaves_after, abs=0.2), request
        await world.stop()


async def test_keep_alive_zero_ends_minimum_residency_and_idle_grace() -> None:
    world = Schedule(
        {"a": 5 * GIB, "b": 5 * GIB}, keys={"a": {"idle_grace": 60.0}}, settings=Settings(swap_patience=60.0)
    )
    with world.fleet.lease("a") as lease:
        await lease.ready()
        world.launcher.say("a", RequestEnded(id="r", keep_alive=0.0))
        waiting = await world.asking("b", wait=1.0)
    assert await waiting < 5.0
