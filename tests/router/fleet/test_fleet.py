"""The fleet's promises, in virtual time."""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import pytest

from router import errors
from router.api.status import status
from router.config.settings import Settings
from router.fleet.fleet import IDLE_LOOK
from router.launch.interface import WorkerLost
from tests.fakes import CPU, GIB, MIB, FakeModel
from tests.router.fleet.worlds import Schedule
from worker.protocol.events import Estimated


def crash(message: str = "died") -> WorkerLost:
    return WorkerLost(message, cause="crashed", exit=1)


async def gather(*requests: Awaitable[Any]) -> list[Any]:
    return await asyncio.gather(*requests, return_exceptions=True)


async def test_a_request_loads_its_model_and_the_next_one_finds_it_ready() -> None:
    world = Schedule({"a": GIB})
    assert await world.ask("a") == pytest.approx(2.0, abs=0.1)
    assert await world.ask("a") == 0.0
    assert world.journal == ["start a"]
    await world.stop()
    assert world.journal == ["start a", "stop a"]


async def test_ending_requests_share_a_plan_while_no_demand_waits() -> None:
    world = Schedule({"a": GIB})
    await world.ask("a")
    plans, began = [world.fleet.scheduler.last_plan], world.now
    for _ in range(200):
        await world.ask("a", 0.005)
        if world.fleet.scheduler.last_plan is not plans[-1]:
            plans.append(world.fleet.scheduler.last_plan)
    assert 2 < len(plans) <= (world.now - began) / IDLE_LOOK + 2


async def test_an_idle_worker_leaves_at_once_for_a_demand_and_else_at_its_ttl() -> None:
    world = Schedule(
        {"a": GIB, "b": GIB}, keys={"a": {"min_residency": 0}, "b": {"ttl": 1.0}}, settings=Settings(models_max=1)
    )
    await world.ask("a")
    long = await world.asking("a", 3.0, wait=1.0)
    model = world.launcher.models["b"]
    waited = await world.ask("b", 0.0)
    assert waited == pytest.approx(2.0 + model.stop_seconds + model.load_seconds, abs=IDLE_LOOK / 2)
    await long
    await world.ask("b", 7.0)
    (worker,), idle_since = world.fleet.workers(), world.now
    await worker.retirement.began.wait()
    assert worker.reason == "idle"
    assert 1.0 <= world.now - idle_since <= 1.0 + 2 * IDLE_LOOK


async def test_many_cold_requests_begin_one_load() -> None:
    world = Schedule({"a": GIB})
    await gather(*(world.ask("a") for _ in range(500)))
    assert world.journal == ["start a"]


async def test_a_fetch_takes_no_memory_and_becomes_a_load_with_a_request() -> None:
    models = {name: FakeModel(shards=(GIB,), download_seconds=5.0) for name in "bc"}
    world = Schedule({"a": GIB, "b": GIB, "c": GIB}, settings=Settings(models_max=1), models=models, missing=("b", "c"))
    await world.ask("a")
    worker = world.fleet.fetch("b")
    await worker.stopped.wait()
    assert (worker.reason, world.journal) == ("downloaded", ["start a", "download b"])
    assert world.fleet.model("b").failure is None
    world.fleet.fetch("c")
    assert await world.ask("c") > 5.0
    assert world.journal[2:] == ["download c", "stop a", "start c"]


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (3 * GIB, Settings()),
        (1, Settings(models_max=2)),
        (6 * GIB, Settings(models_max=2, models_memory_margin={"": 0})),
    ],
    ids=["by memory", "by the count of workers", "by the count alone if no memory is limited"],
)
async def test_the_least_recently_used_is_evicted(size: int, settings: Settings) -> None:
    models = {name: FakeModel(shards=(1,)) for name in "abc"}
    world = Schedule(dict.fromkeys("abc", size), settings=settings, models=models)
    for name in "aba":
        await world.ask(name)
    await asyncio.sleep(60)
    await world.ask("c")
    assert world.journal == ["start a", "start b", "stop b", "start c"]
    assert world.fleet.models["b"].reason == "evicted"


async def test_memory_is_reserved_before_spawn_and_returned_after_settling() -> None:
    world = Schedule({"a": 5 * GIB, "b": 5 * GIB})
    world.launcher.reading_lag = 1.5
    await world.ask("a")
    await asyncio.sleep(60)
    asked = asyncio.create_task(world.ask("b"))
    await asked
    stopped = next(at for at, entry in world.launcher.timeline if entry == "stopped a")
    started = next(at for at, entry in world.launcher.timeline if entry == "start b")
    assert started >= stopped + 1.5


async def test_a_leased_worker_is_not_stopped() -> None:
    world = Schedule({"a": 5 * GIB, "b": 5 * GIB})
    long = await world.asking("a", 100.0, wait=10)
    waited = await world.ask("b")
    assert long.done()
    assert waited > 90
    assert world.journal == ["start a", "stop a", "start b"]


async def test_a_busy_model_of_high_priority_does_not_starve_another() -> None:
    """It is evicted after the swap patience. Its next request must not take back the memory that was freed."""
    world = Schedule({"a": 5 * GIB, "b": 5 * GIB}, keys={"a": {"priority": 10}})

    async def client() -> None:
        while True:
            await world.ask("a")

    clients = [asyncio.create_task(client()) for _ in range(4)]
    await asyncio.sleep(15)  # past the minimum residency
    assert await world.ask("b") == pytest.approx(10 + 1 + 0.5 + 2, abs=0.1), "patience, longest request, stop and load"
    for task in clients:
        task.cancel()
    await gather(*clients)
    assert world.journal == ["start a", "stop a", "start b"]


async def test_a_ready_model_waits_for_nobody() -> None:
    world = Schedule({"a": GIB, "slow": GIB}, models={"slow": FakeModel(shards=(GIB,), load_seconds=500.0)})
    await world.ask("a")
    loading = await world.asking("slow", wait=1)
    assert [await world.ask("a") for _ in range(10)] == [0.0] * 10
    assert not loading.done()
    loading.cancel()
    await gather(loading)


async def test_a_model_that_can_never_fit_is_refused_with_the_arithmetic_and_evicts_nothing() -> None:
    world = Schedule({"a": GIB, "huge": 20 * GIB}, margin=GIB)
    await world.ask("a")
    with pytest.raises(errors.DoesNotFit) as refused:
        await world.ask("huge")
    row = refused.value.extra["devices"]["cpu"]
    assert row == {"required_mib": 20480, "available_mib": 7168, "margin_mib": 1024}
    assert "20480 MiB on cpu where 7168 MiB" in refused.value.message
    assert status(world.fleet, world.fleet.models["huge"])["reason"] == "does_not_fit"
    assert world.journal == ["start a"]
    assert world.fleet.models["huge"].open is None


async def test_no_eviction_or_refusal_on_a_static_estimate() -> None:
    sizes = {"a": 5 * GIB, "b": 5 * GIB}
    world = Schedule(sizes, keys={"a": {"required_memory": {"": 5 * GIB}}}, totals={CPU: 5 * GIB + 300}, stated=False)
    world.launcher.models["b"].shards = (GIB,)
    await world.ask("a")
    await asyncio.sleep(60)
    await world.ask("b")
    assert world.journal == ["start a", "estimate b", "stop a", "start b"]


@pytest.mark.parametrize(
    ("total", "margin"), [(8 * GIB, {}), (256 * MIB, {"": 0})], ids=["memory suffices", "memory is not limited"]
)
async def test_no_exact_estimate_where_only_the_count_of_workers_decides(total: int, margin: dict[str, int]) -> None:
    """Without a limit of memory, also for a model whose static estimate exceeds the device."""
    settings = Settings(models_max=1, models_memory_margin=margin)
    models = {name: FakeModel(shards=(MIB,)) for name in "abc"}
    keys = {"b": {"parallel": 3}, "c": {"parallel": 5}}  # what is learned of one does not hold for another
    world = Schedule(
        dict.fromkeys("abc", 0), totals={CPU: total}, settings=settings, keys=keys, models=models, stated=False
    )
    for name in "abca":
        await world.ask(name)
        await asyncio.sleep(60)
    assert world.journal == ["start a", "stop a", "start b", "stop b", "start c", "stop c", "start a"]
    assert {event.data["source"] for event in world.events_of("estimate")} <= {"static", "learned"}


async def test_a_refusal_names_the_reason_for_which_there_is_no_exact_estimate() -> None:
    lost = WorkerLost("a: no end of the estimate after 20 s", cause="stalled")
    world = Schedule({"a": GIB}, totals={CPU: 256 * MIB}, stated=False)
    world.launcher.models["a"].estimate_fails = [lost]
    with pytest.raises(
        errors.DoesNotFit, match=r"\(an upper bound; no exact estimate: no end of the estimate after 20 s\); "
    ):
        await world.ask("a")
    assert world.journal == ["estimate a"]


async def test_a_request_that_waits_for_an_estimate_is_told_so_and_holds_up_nobody() -> None:
    stated = {name: {"required_memory": {"": size}} for name, size in (("a", 5 * GIB), ("c", 60 * MIB))}
    world = Schedule({"a": 5 * GIB, "b": GIB, "c": 60 * MIB}, keys=stated, totals={CPU: 5 * GIB + 64 * MIB},
                     settings=Settings(queue_timeout=20.0), stated=False)  # fmt: skip
    world.launcher.models["b"].estimate_seconds = 100.0
    await world.ask("a")
    await asyncio.sleep(60)
    late = await world.asking("b", wait=1)
    await world.ask("c")
    with pytest.raises(errors.QueueTimeout, match=r"waited 20 s for its exact memory estimate; try again"):
        await late


async def test_a_download_comes_before_the_queue_and_takes_no_memory() -> None:
    world = Schedule({"a": 5 * GIB, "b": 5 * GIB}, missing=("b",))
    world.launcher.models["b"].download_seconds = 30.0
    await world.ask("a")
    coming = await world.asking("b", wait=20)
    assert await world.ask("a") == 0.0
    await coming
    assert world.journal == ["start a", "download b", "stop a", "start b"]


async def test_no_eviction_for_a_client_that_left() -> None:
    world = Schedule({"a": 5 * GIB, "b": 5 * GIB})
    busy = await world.asking("a", 5.0, wait=3)
    leaver = await world.asking("b", wait=1)
    leaver.cancel()
    await gather(leaver)
    await asyncio.sleep(60)
    assert busy.done()
    assert world.journal == ["start a"]
    assert world.fleet.models["b"].workers == []


async def test_autoload_off_loads_nothing() -> None:
    world = Schedule({"a": GIB}, settings=Settings(models_autoload=False))
    await world.refuses("a", errors.ModelNotLoaded)
    await world.fleet.load("a")
    assert await world.ask("a") == 0.0


async def test_load_and_unload_reject_what_is_already_done() -> None:
    world = Schedule({"a": GIB})
    with pytest.raises(errors.NotRunning):
        world.fleet.unload("a")
    loading = world.fleet.load("a")
    with pytest.raises(errors.AlreadyRunning):
        world.fleet.load("a")
    await loading
    with pytest.raises(errors.AlreadyRunning):
        world.fleet.load("a")
    (worker,) = world.fleet.unload("a")
    with pytest.raises(errors.NotRunning):
        world.fleet.unload("a")
    await worker.stopped.wait()
    assert world.fleet.models["a"].reason == "requested"


async def answer_until_cut(world: Schedule) -> tuple[float, errors.ApiError | None]:
    """Answer a request for `a` until the worker ends it; return the time of that and the cause."""
    cut = asyncio.Event()
    with world.fleet.lease("a") as lease:
        await lease.ready()
        lease.on_abort = cut.set
        await cut.wait()
        return world.now, lease.aborted


async def test_an_unload_drains_and_cuts_only_after_the_drain_timeout() -> None:
    world = Schedule({"a": GIB}, settings=Settings(drain_timeout=30.0))
    answer = asyncio.create_task(answer_until_cut(world))
    await asyncio.sleep(5)
    began = world.now
    (worker,) = world.fleet.unload("a")
    again = asyncio.create_task(world.ask("a"))
    at, error = await answer
    assert at - began == pytest.approx(30.0)
    assert isinstance(error, errors.Draining)
    await worker.stopped.wait()
    await again


async def test_with_an_evict_timeout_a_running_answer_is_cut_when_that_is_over_and_not_before() -> None:
    settings = Settings(swap_patience=5.0, evict_timeout=20.0)
    world = Schedule({"a": 5 * GIB, "b": 5 * GIB}, keys={"a": {"min_residency": 1.0}}, settings=settings)
    answer = asyncio.create_task(answer_until_cut(world))
    await asyncio.sleep(10)
    arrived = world.now
    waited = await world.ask("b")
    at, error = await answer
    assert at - arrived == pytest.approx(5.0 + 20.0, abs=0.1), "swap patience and evict timeout"
    assert error is not None
    assert (error.reason, error.status) == ("draining", 503)
    assert waited == pytest.approx(5.0 + 20.0 + 0.5 + 2.0, abs=0.1), "and stop and load"


@pytest.mark.parametrize("by_command", [True, False])
async def test_a_final_failure_is_not_retried_without_a_load_command_or_new_files(by_command: bool) -> None:
    world = Schedule({"a": GIB})
    world.launcher.models["a"].start_fails = [WorkerLost("no such architecture", cause="load_failed", exit=3)]
    for _ in range(3):
        await world.refuses("a", errors.LoadFailed, match="no such architecture")
        await asyncio.sleep(100)
    assert world.journal == ["start a"]
    if by_command:
        await world.fleet.load("a")
    else:
        world.files.change("a")
    await world.ask("a")
    assert world.journal == ["start a", "start a"]


async def test_a_load_that_runs_out_of_memory_evicts_one_more_and_is_retried() -> None:
    """The estimate is too low: beside `b` there is room for the estimate, not for the model."""
    sizes = {"c": 32 * GIB, "b": 48 * GIB, "a": 33 * GIB}
    exact = Estimated(weights=[31 * GIB], context=[0], compute=[0], runtime=[0], host=0)
    models = {"a": FakeModel(shards=(33 * GIB,), estimated=exact)}
    keys: dict[str, dict[str, Any]] = {"a": {"required_memory": {}}}
    world = Schedule(sizes, totals={CPU: 80 * GIB + 300 * MIB}, models=models, keys=keys)
    for name in ("c", "b"):
        await world.ask(name)
    await asyncio.sleep(60)
    await world.ask("a")
    assert world.journal == ["start c", "start b", "estimate a", "stop c", "start a", "stop b", "start a"]
    assert world.fleet.models["a"].failure is None
    with world.fleet.lease("a"):
        assert world.costs("a").estimate.source == "learned"
        assert sum(world.costs("a").estimate.shards) >= 33 * GIB
    await world.fleet.close()


async def test_the_load_itself_does_not_count_as_time_in_the_queue() -> None:
    world = Schedule({"a": GIB}, settings=Settings(queue_timeout=5.0),
                     models={"a": FakeModel(shards=(GIB,), load_seconds=50.0)})  # fmt: skip
    assert await world.ask("a") == pytest.approx(50.0, abs=0.1)


async def test_a_long_queue_is_planned_less_often() -> None:
    """However often something changes: with forty who wait there are not more than a few dozen plans a second, and a
    change that comes meanwhile is not forgotten."""
    names = [f"m{number}" for number in range(41)]
    world = Schedule(dict.fromkeys(names, 5 * GIB), settings=Settings(queue_timeout=3600.0))
    asking = [asyncio.create_task(world.ask(name, 9.0)) for name in names]
    await asyncio.sleep(5)
    plans = [world.fleet.scheduler.last_plan]
    for _ in range(1000):
        world.fleet.scheduler.plan_soon()
        await asyncio.sleep(0.001)
        if world.fleet.scheduler.last_plan is not plans[-1]:
            plans.append(world.fleet.scheduler.last_plan)
    assert 10 <= len(plans) <= 40
    await asyncio.gather(*asking)


async def test_devices_are_read_again_before_a_start() -> None:
    """As routers do that share a machine: the driver is asked again before each start."""
    world = Schedule({"a": 4 * GIB})
    world.launcher.reading_lag = 1000.0
    world.launcher.set_foreign(CPU, 6 * GIB)
    assert world.launcher.readings()[0].used == 0
    asking = await world.asking("a", wait=5)
    assert world.journal == []
    world.launcher.reading_lag = 0.0
    world.launcher.set_foreign(CPU, 0)
    await asking
    assert world.journal == ["start a"]


async def test_a_changed_preset_restarts_its_worker_and_a_live_key_does_not() -> None:
    world = Schedule({"a": GIB, "b": GIB})
    await world.ask("a")
    await world.ask("b")
    changed = {"a": replace(world.presets["a"], ctx_size=128), "b": replace(world.presets["b"], ttl=1000.0)}
    world.fleet.models.apply(changed)
    assert [worker.preset.id for worker in world.fleet.workers() if worker.retired] == ["a"]
    await asyncio.sleep(5)
    assert world.journal == ["start a", "start b", "stop a"]
    assert world.fleet.models["a"].reason == "config_changed"


async def test_a_closing_fleet_takes_no_requests_and_leaves_no_worker() -> None:
    world = Schedule({"a": GIB, "b": GIB})
    await world.ask("a")
    loading = await world.asking("b", wait=0.5)
    closing = asyncio.create_task(world.fleet.close())
    await asyncio.sleep(0)
    await world.refuses("a", errors.Draining)
    assert isinstance((await gather(loading))[0], errors.Draining)
    await closing
    assert world.fleet.workers() == []
    assert world.launcher.running == {}


async def test_requests_that_end_with_the_router_are_told_so() -> None:
    world = Schedule({"a": GIB, "b": GIB})
    with world.fleet.lease("a") as running:
        await running.ready()
        loading = await world.asking("b", wait=0.5)
        closing = asyncio.create_task(world.fleet.close())
        assert str((await gather(loading))[0]) == "the router is shutting down"
        await closing
        assert str(running.aborted) == "the router is shutting down; the answer was cut"


async def test_the_idle_grace_holds_only_for_clients_that_return_soon() -> None:
    """`b` waits for `a`, which has just become idle inside its minimum residency."""
    waited = {}
    for pause in (0.5, 6.0):
        world = Schedule({"a": 5 * GIB, "b": 5 * GIB})
        for _ in range(5):
            await world.ask("a")
            await asyncio.sleep(pause)
        await world.ask("a")
        world.worker("a").usage.residency_ends = world.now + 5.0
        waited[pause] = await world.ask("b")
        await world.stop()
    assert waited[0.5] == pytest.approx(1.0 + 0.5 + 2.0, abs=0.05), "idle grace, stop, load"
    assert waited[6.0] == pytest.approx(0.5 + 2.0, abs=0.05)


async def test_a_refused_load_is_never_reported_as_queued() -> None:
    world = Schedule({"a": GIB, "huge": 900 * GIB})
    await world.ask("a")
    for passes in range(12):  # whatever the loop does in between
        loading = asyncio.create_task(world.fleet.load_queued("huge"))
        for _ in range(passes):
            await asyncio.sleep(0)
        world.fleet.scheduler.plan_soon()
        with pytest.raises(errors.DoesNotFit):
            await loading
