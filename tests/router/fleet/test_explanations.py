"""Reports of decisions: while a request waits, in previews, and in events."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from router import log
from router.api.metrics import Metrics
from router.config.api_keys import ApiKey
from router.config.settings import Settings
from router.errors import ApiError, DoesNotFit, QueueFull
from router.fleet.model import FIRST_LOAD_SECONDS
from router.http.proxy import status_comment
from router.launch.interface import WorkerLost
from router.registry.auth import Access
from tests.fakes import GIB, FakeModel
from tests.router.fleet.worlds import Schedule
from worker.protocol.events import Progress

BUSY = {"a": 8 * GIB, "b": 8 * GIB, "c": 8 * GIB}


def plans(world: Schedule) -> list[tuple[str, str]]:
    events = world.events.since(0) or ()
    return [(event.model, event.data["decision"]) for event in events if event.kind == "plan"]


async def test_a_waiting_request_gets_its_position_cause_and_time() -> None:
    models = {name: FakeModel(shards=(size,), load_seconds=6.0) for name, size in BUSY.items()}
    world = Schedule(BUSY, models=models)
    asking = [asyncio.create_task(world.ask("a", 60.0))]
    await asyncio.sleep(7)
    with world.fleet.lease("b") as first, world.fleet.lease("c") as second:
        await asyncio.sleep(1)
        patience = 9  # seconds of it are left, and the minimum residency of `a` ends before
        assert status_comment(world.fleet, first) == f"queued position=1 waiting_for=residency eta_s={patience + 6}"
        assert status_comment(world.fleet, second) == f"queued position=2 waiting_for=memory eta_s={patience + 6 + 6}"
    await asyncio.gather(*asking)


async def test_a_request_that_waits_for_a_load_gets_its_progress() -> None:
    world = Schedule({"a": GIB}, models={"a": FakeModel(shards=(GIB,), load_seconds=6.0)})
    with world.fleet.lease("a") as lease:
        await asyncio.sleep(1)
        assert status_comment(world.fleet, lease) == "loading stage=start"
        world.launcher.say("a", Progress(stage="weights", done=43, total=100))
        assert status_comment(world.fleet, lease) == "loading percent=43 stage=weights"
        await lease.ready()
        assert status_comment(world.fleet, lease) == "ping"


async def test_a_preview_names_the_victims_and_changes_nothing() -> None:
    world = Schedule({"a": 4 * GIB, "b": 3 * GIB, "c": 5 * GIB})
    await world.ask("a")
    await world.ask("b")
    await asyncio.sleep(60)
    shown = await world.fleet.scheduler.preview("c")
    assert (shown["decision"], shown["evict"]) == ("evict", [{"model": "a", "reason": "evicted", "idle": True}])
    assert shown["keep"] == {"b": "unneeded"}
    assert shown["shortage"]["cpu"] == {"required": 5 * GIB, "available": GIB, "margin": 0, "used": 7 * GIB}
    assert len(world.fleet.workers()) == 2
    assert ("c", "evict") not in plans(world)


async def test_a_preview_has_the_queue_position_of_its_request() -> None:
    """There is room for `c`, and `b` is going to take it."""
    world = Schedule({"a": 5 * GIB, "b": 6 * GIB, "c": 3 * GIB}, keys={"b": {"priority": -1}})
    using = await world.asking("a", 20.0, wait=5)
    assert (await world.fleet.scheduler.preview("c"))["decision"] == "start"
    first = await world.asking("b", wait=1)
    assert (await world.fleet.scheduler.preview("c"))["decision"] == "start", "by its priority it comes before `b`"
    world.fleet.models.apply({**world.presets, "b": replace(world.presets["b"], priority=0)})
    shown = await world.fleet.scheduler.preview("c")
    assert (shown["decision"], shown["cause"], shown["ahead"]) == ("wait", "memory", ["b"])
    second = await world.asking("c", wait=1)
    assert "start c" not in world.journal
    again = await world.fleet.scheduler.preview("c")
    assert {**shown, "devices": ()} == {**again, "devices": ()}, "as in the preview"
    assert (await world.fleet.scheduler.preview("b"))["ahead"] == []
    await asyncio.gather(using, first, second)


async def test_a_preview_of_a_failed_model_is_the_error_of_its_request() -> None:
    world = Schedule({"a": GIB, "b": GIB})
    crash, unusable = WorkerLost("died", cause="crashed", exit=1), WorkerLost("odd", cause="load_failed", exit=3)
    for name, lost in (("a", crash), ("b", unusable)):
        world.launcher.models[name].start_fails = [lost]
        await world.refuses(name, ApiError)
        with pytest.raises(ApiError) as refused:
            await world.ask(name)
        shown = await world.fleet.scheduler.preview(name)
        assert shown == {
            "decision": "refuse", "reason": refused.value.reason, "message": refused.value.message,
            "retry_after": refused.value.retry_after,
        }  # fmt: skip
    await asyncio.sleep(2)
    assert (await world.fleet.scheduler.preview("a"))["decision"] == "start"
    world.files.change("b")
    assert (await world.fleet.scheduler.preview("b"))["decision"] == "start"
    assert world.fleet.models["b"].failure is not None, "looking at it changes nothing"
    await world.ask("b")


async def test_the_eta_of_a_download_includes_the_load() -> None:
    models = {"a": FakeModel(shards=(GIB,), download_seconds=100.0, load_seconds=6.0)}
    world = Schedule({"a": GIB}, models=models, missing=("a",), settings=Settings(queue_size=2))
    assert "not here yet" in (await world.fleet.scheduler.preview("a"))["message"]
    first = await world.asking("a", wait=20)
    worker = world.fleet.models["a"].open
    assert worker is not None
    worker.load.update("download", 20, 100, world.now)
    assert "being downloaded" in (await world.fleet.scheduler.preview("a"))["message"]
    second = await world.asking("a", wait=0)
    with pytest.raises(QueueFull) as refused:
        await world.ask("a")
    assert refused.value.retry_after == 60.0, "the most that is reported"
    assert world.fleet.queue.eta(world.fleet.models["a"]) == pytest.approx(80 + FIRST_LOAD_SECONDS)
    await asyncio.gather(first, second)


async def test_every_decision_is_an_event_with_its_numbers() -> None:
    """Started, waits, evicted, refused, dropped; and each is a line of the log."""
    world = Schedule(
        {"a": 5 * GIB, "b": 5 * GIB, "huge": 900 * GIB}, keys={"a": {"replicas": (2, 2)}, "huge": {"priority": 1}}
    )
    log.follow(world.events)
    await world.ask("a")
    await world.ask("b")
    await world.refuses("huge", DoesNotFit)
    found = plans(world)
    for expected in [("a", "start"), ("a", "drop"), ("a", "evict"), ("b", "wait"), ("b", "start"), ("huge", "refuse")]:
        assert expected in found
    for event in world.events.since(0) or ():
        if event.kind == "plan":
            assert event.data["needs"]
            assert event.data["devices"]["cpu"]["total"] == 8 * GIB
            assert log.plan_line(event) if event.data["decision"] != "start" else True


async def test_a_key_at_its_limit_gets_the_duration_of_requests() -> None:
    world = Schedule({"a": GIB})
    await world.ask("a", 6.0)
    key, access = ApiKey(name="k", digest=b"k", admin=False, models=(), max_concurrent=1), Access((), Settings())
    running = await world.asking("a", 6.0, wait=0.1)
    model, queue = world.fleet.model("a"), world.fleet.queue
    with access.running(key, lambda: queue.turnover(model)):
        with pytest.raises(QueueFull) as refused, access.running(key, lambda: queue.turnover(model)):
            pass
        assert refused.value.retry_after == pytest.approx(6.0)
    await running


async def test_replicas_and_reloads_are_counted() -> None:
    world: Any = Schedule({"a": GIB}, keys={"a": {"replicas": (2, 2)}})
    metrics = Metrics(world.fleet, world.events)
    await world.ask("a")
    await asyncio.sleep(10)
    world.events.append("config", "*", added=[], changed=[], restarted=[], removed=[])
    world.events.append("config_refused", "*", errors=["models.ini:3: x"])
    shown = metrics.render().decode()
    assert 'router_model_workers{model="a"} 2.0' in shown
    assert 'router_reloads_total{result="applied"} 1.0' in shown
    assert 'router_reloads_total{result="refused"} 1.0' in shown
