"""Failures of a fleet and their reports, in virtual time."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from router import log
from router.api.status import status
from router.config.settings import Settings
from router.errors import ApiError, Draining, LoadBackoff, LoadFailed, ModelNotFound, NotRunning, QueueTimeout
from router.events import Event
from router.fleet.failures import LONGEST_PAUSE, WINDOW, Crashes
from router.fleet.worker import State
from router.launch.interface import WorkerLost
from router.planner.ledger import DeviceId, Reading
from tests.fakes import CPU, GIB, FakeLauncher, FakeModel
from tests.router.fleet.worlds import Schedule
from worker.protocol.events import Progress, RequestEnded


def crash(message: str = "died", exit: int | None = 1) -> WorkerLost:
    return WorkerLost(message, cause="crashed", exit=exit)


def killed(exit: int = -9) -> WorkerLost:
    return WorkerLost("killed from outside", cause="crashed", exit=exit)


def out_of_memory() -> WorkerLost:
    return WorkerLost("no memory left", cause="oom", exit=6, memory="host")


def unusable() -> WorkerLost:
    return WorkerLost("no such architecture", cause="load_failed", exit=3)


async def outcome(request: "asyncio.Future[Any]") -> Any:
    """Its result or its exception."""
    return (await asyncio.gather(request, return_exceptions=True))[0]


def states_by_worker(world: Schedule) -> dict[int, list[str]]:
    """Return the states of the event log by worker, in order."""
    states: dict[int, list[str]] = {}
    for event in world.events.since(0) or []:
        if event.kind == "state":
            states.setdefault(event.data["worker"], []).append(event.data["state"])
    return states


# Back-off


async def test_a_crash_loop_is_detected_with_slow_loads() -> None:
    """The crash count is reset by time in service and a complete answer, not by time spent loading."""
    world = Schedule({"a": GIB}, keys={"a": {"max_restarts": 2}},
                     models={"a": FakeModel(load_seconds=90.0, dies_after=0.5)})  # fmt: skip
    for _ in range(3):
        await world.ask("a", 0.6)
        await asyncio.sleep(0.2)
    await world.refuses("a", LoadBackoff)


async def test_service_and_a_complete_answer_reset_the_crash_count() -> None:
    world = Schedule({"a": GIB}, keys={"a": {"max_restarts": 1}}, models={"a": FakeModel(dies_after=70.0)})
    for _ in range(5):
        await world.ask("a", 1.0)
        world.launcher.say("a", RequestEnded(id="r", completion_tokens=3))
        await asyncio.sleep(80)
    assert world.journal == ["start a"] * 5


async def test_events_lists_and_log_show_the_cause_and_end_of_a_pause() -> None:
    world = Schedule({"a": GIB}, keys={"a": {"max_restarts": 0}})
    world.launcher.models["a"].start_fails = [crash("no such kernel"), unusable()]
    for final, least, most in ((False, 1.6, 2.4), (True, 600.0, 600.0)):
        await world.refuses("a", ApiError)
        event = world.events_of("back_off")[-1]
        failure = world.fleet.models["a"].failure
        assert failure is not None
        assert (event.model, event.data["error"], event.data["final"]) == ("a", failure.message, final)
        assert least <= event.data["seconds"] <= most
        assert event.data["seconds"] == pytest.approx(failure.until - world.now, abs=0.1)
        assert event.data["until"] == pytest.approx(event.time + event.data["seconds"], abs=0.1)
        shown = status(world.fleet, world.fleet.models["a"])
        assert (shown["failed"], shown["error"]) == (True, failure.message)
        assert f"next attempt in {event.data['seconds']:.1f} s" in log.pause_line(event)
        await asyncio.sleep(3)


async def test_each_error_has_the_name_of_its_model_once() -> None:
    world = Schedule({"a": GIB}, keys={"a": {"max_restarts": 0}})
    world.launcher.models["a"].start_fails = [crash("a: the worker ended")]
    with pytest.raises(LoadBackoff, match=r"^a failed to load: the worker ended$"):
        await world.ask("a")
    with pytest.raises(LoadBackoff, match=r"^a failed: the worker ended; next attempt in \d+ s$"):
        await world.ask("a")


async def test_a_model_whose_old_worker_still_drains_shows_why_its_new_one_failed() -> None:
    world = Schedule({"a": GIB})
    long = await world.asking("a", 20.0, wait=5)
    world.fleet.unload("a")
    world.launcher.models["a"].start_fails = [crash("no such kernel")]
    await world.refuses("a", LoadBackoff)
    shown = status(world.fleet, world.fleet.models["a"])
    assert (shown["value"], shown["draining"], shown["error"]) == ("loaded", True, "no such kernel")
    assert shown["retry_at"] > 0
    await long


async def test_an_older_worker_that_stops_does_not_clear_a_newer_failure() -> None:
    world = Schedule({"a": GIB})
    long = await world.asking("a", 10.0, wait=5)
    world.fleet.unload("a")
    world.launcher.models["a"].start_fails = [unusable()]
    await world.refuses("a", LoadFailed)
    await long
    await asyncio.sleep(5)
    await world.refuses("a", LoadFailed)
    assert world.journal.count("start a") == 2


async def test_a_load_that_cannot_begin_shows_the_cause() -> None:
    world = Schedule({"a": GIB}, keys={"a": {"device": ("cuda:7",)}})
    for _ in range(2):
        await world.refuses("a", LoadFailed, match="cuda:7")
    shown = status(world.fleet, world.fleet.models["a"])
    assert (shown["value"], shown["failed"], shown["reason"]) == ("unloaded", True, "load_failed")
    assert "cuda:7" in shown["error"]


async def test_a_status_shows_the_end_of_a_worker_and_its_time() -> None:
    world = Schedule({"a": GIB})
    world.launcher.reading_lag = 2.0

    def shown() -> dict[str, Any]:
        return status(world.fleet, world.fleet.models["a"])

    assert "since" not in shown()
    await world.ask("a", 10.0)
    ready = shown()
    assert (ready["value"], ready["draining"]) == ("loaded", False)
    world.launcher.die("a")
    await asyncio.sleep(1)
    dying = shown()
    assert (dying["value"], dying["draining"], dying["reason"]) == ("loaded", True, "crashed")
    await asyncio.sleep(5)
    dead = shown()
    assert (dead["value"], dead["failed"], dead["exit_code"], dead["reason"]) == ("unloaded", True, -9, "crashed")
    assert all("since" in each for each in (ready, dying, dead))
    await world.ask("a")
    assert "failed" not in shown()
    (worker,) = world.fleet.unload("a")
    await worker.stopped.wait()
    stopped = shown()
    assert (stopped["value"], stopped["reason"], "failed" in stopped) == ("unloaded", "requested", False)


# Memory that runs out


async def test_new_requests_cause_no_further_retry_of_a_load_that_ran_out_of_memory() -> None:
    world = Schedule({"a": GIB}, keys={"a": {"required_memory": {}}})
    world.launcher.models["a"].start_fails = [out_of_memory() for _ in range(6)]
    asked: list[asyncio.Task[float]] = []

    def arrive(event: Event) -> None:
        """Send a request between the end of a worker and the outcome of its leases."""
        if event.kind == "state" and event.data["state"] == "stopped" and len(asked) < 6:
            asyncio.get_running_loop().call_soon(lambda: asked.append(asyncio.create_task(world.ask("a"))))

    world.events.subscribe(arrive)
    await world.refuses("a", LoadBackoff, match="twice")
    assert world.journal == ["start a", "start a"]
    for request in asked:
        assert isinstance(await outcome(request), ApiError)


async def test_a_removed_model_is_not_loaded_again_for_waiting_requests() -> None:
    world = Schedule({"a": GIB})
    world.launcher.models["a"].start_fails = [out_of_memory()]

    def remove(event: Event) -> None:
        if event.kind == "state" and event.data["state"] == "stopped":
            asyncio.get_running_loop().call_soon(world.fleet.models.apply, {})

    world.events.subscribe(remove)
    await world.refuses("a", ModelNotFound)
    await asyncio.sleep(5)
    assert world.journal == ["start a"]
    assert world.fleet.workers() == []


# Loads that are killed from outside


@pytest.mark.parametrize("exit", [-9, -15, 0])
async def test_a_load_killed_from_outside_is_retried_once_for_all_waiting_requests(exit: int) -> None:
    world = Schedule({"a": GIB})
    world.launcher.models["a"].start_fails = [killed(exit)]
    await asyncio.gather(*(world.ask("a") for _ in range(3)))
    assert world.journal == ["start a", "start a"]
    assert world.fleet.models["a"].failure is None


async def test_a_load_killed_twice_fails_and_the_next_one_is_retried_again() -> None:
    world = Schedule({"a": GIB})
    world.launcher.models["a"].start_fails = [killed() for _ in range(3)]
    await world.refuses("a", LoadBackoff, match="killed from outside")
    assert world.journal == ["start a", "start a"]
    await asyncio.sleep(2)
    await world.ask("a")
    assert world.journal == ["start a"] * 4


async def test_a_load_that_exits_by_itself_is_not_retried_at_once() -> None:
    for exit in (1, 5, -11, None):
        world = Schedule({"a": GIB})
        world.launcher.models["a"].start_fails = [crash(exit=exit)]
        await world.refuses("a", LoadBackoff)
        assert world.journal == ["start a"]
        await world.stop()


# Reloads


async def test_waiting_requests_of_a_changed_preset_get_its_new_worker() -> None:
    world = Schedule({"a": GIB})
    asked = [asyncio.create_task(world.ask("a")) for _ in range(3)]
    await asyncio.sleep(1)
    world.fleet.models.apply({"a": replace(world.presets["a"], ctx_size=128)})
    assert [await request for request in asked] == [pytest.approx(3.0, abs=0.2)] * 3
    assert world.journal == ["start a", "start a"]
    (worker,) = world.fleet.models["a"].workers
    assert worker.preset.ctx_size == 128


async def test_a_reload_is_complete_even_if_the_queue_is_full() -> None:
    sizes = {"a": GIB, "b": GIB, "c": GIB}
    world = Schedule(sizes, keys={"a": {"pin": True}}, settings=Settings(queue_size=1))
    await world.ask("a")
    world.launcher.hold("start c")
    waiting = await world.asking("c", wait=1)
    changed = {name: replace(world.presets[name], ctx_size=128) for name in "ab"} | {"c": world.presets["c"]}
    world.fleet.models.apply(changed)
    assert {name: model.preset for name, model in world.fleet.models.items()} == changed
    world.launcher.release("start c")
    await waiting


async def test_a_removed_model_has_one_event_after_its_last_worker() -> None:
    world = Schedule({"a": GIB, "b": GIB})
    long = await world.asking("a", 10.0, wait=3)
    world.fleet.models.apply({})
    world.fleet.models.apply({"a": world.presets["a"]})
    await long
    await asyncio.sleep(5)
    removed = [event.model for event in world.events_of("removed")]
    assert removed in (["a", "b"], ["b"])
    assert removed.count("b") == 1
    last = [event for event in world.events.since(0) or [] if event.model == "a"][-1]
    assert last.kind == "state"


# Explicit control


async def test_a_worker_that_ends_before_its_first_step_has_an_event() -> None:
    world = Schedule({"a": GIB})
    loading = world.fleet.load("a")
    (worker,) = world.fleet.unload("a")
    assert isinstance(await outcome(loading), Draining)
    await worker.stopped.wait()
    assert states_by_worker(world) == {worker.id: ["queued", "stopped"]}
    assert world.fleet.models["a"].reason == "requested"


async def test_a_load_command_during_a_change_begins_one_worker() -> None:
    """A plan in the same pass must not retire the load as one without requests."""
    world = Schedule({"a": GIB})
    world.fleet.scheduler.plan_soon()
    await world.fleet.load("a")
    assert list(states_by_worker(world).values()) == [["queued", "starting", "ready"]]


async def test_an_unload_sets_a_deadline_for_an_eviction_without_one() -> None:
    world = Schedule({"a": 5 * GIB, "b": 5 * GIB}, settings=Settings(drain_timeout=30.0))
    long = await world.asking("a", 1000.0, wait=20)
    other = await world.asking("b", wait=20)
    (worker,) = world.fleet.models["a"].workers
    assert worker.retired
    assert worker.retirement.deadline is None
    world.fleet.unload("a")
    assert worker.retirement.deadline == pytest.approx(world.now + 30.0)
    with pytest.raises(NotRunning):
        world.fleet.unload("a")
    long.cancel()
    await outcome(long)
    await other


# The queue


async def test_a_queue_timeout_names_foreign_memory() -> None:
    world = Schedule({"a": 3 * GIB}, settings=Settings(queue_timeout=20.0))
    world.launcher.set_foreign(CPU, 6 * GIB)
    await asyncio.sleep(0.1)
    await world.refuses("a", QueueTimeout, match=r"; other programs or routers hold 6144 MiB of cpu")


@pytest.mark.parametrize(("models_max", "limit"), [(1, {}), (0, {CPU: 3 * GIB})])
async def test_a_queue_timeout_names_the_pinned_models_in_the_way_and_no_memory_that_is_not(
    models_max: int, limit: dict[DeviceId, int]
) -> None:
    settings = Settings(queue_timeout=20.0, models_max=models_max)
    pins = {"a": {"pin": True}, "b": {"pin": True}}
    world = Schedule({"a": 2 * GIB, "b": 2 * GIB}, keys=pins, settings=settings, limit=limit)
    world.launcher.set_foreign(CPU, GIB // 2)
    await world.ask("a")
    with pytest.raises(QueueTimeout) as late:
        await world.ask("b")
    assert "pinned models are not evicted (a): unpin or unload one" in late.value.message
    assert "other programs" not in late.value.message


async def test_progress_of_a_download_is_not_shown_while_queued() -> None:
    world = Schedule({"a": 5 * GIB, "b": 5 * GIB}, missing=("b",))
    busy = await world.asking("a", 60.0, wait=5)
    waiting = await world.asking("b", wait=5)
    (worker,) = world.fleet.models["b"].workers
    assert worker.state is State.QUEUED
    assert "progress" not in status(world.fleet, world.fleet.models["b"])
    await busy
    await waiting


async def test_many_progress_reports_do_not_crowd_out_other_events() -> None:
    world = Schedule({"a": GIB})
    world.launcher.hold("start a")
    asked = await world.asking("a", wait=1)
    (worker,) = world.fleet.models["a"].workers
    listen = world.launcher._listeners[str(worker)]
    for done in range(5000):
        listen(Progress(stage="weights", done=done, total=5000))
        await asyncio.sleep(0.001)
    for _ in range(1000):
        listen(Progress(stage="weights", done=5000, total=5000))
    reports = [event.data["done"] for event in world.events_of("progress")]
    assert len(reports) < 100
    assert reports[-1] == 5000
    world.launcher.release("start a")
    await asked


# The router's own faults


class Flickering(FakeLauncher):
    """A machine whose readings cannot be had for a while."""

    broken = False

    def readings(self) -> Sequence[Reading]:
        if self.broken:
            raise RuntimeError("no readings")
        return super().readings()


async def test_a_plan_that_fails_is_made_again() -> None:
    launcher = Flickering({CPU: 8 * GIB}, {"a": FakeModel(shards=(GIB,)), "b": FakeModel(shards=(GIB,))})
    world = Schedule({"a": GIB, "b": GIB}, launcher=launcher, keys={"a": {"ttl": 20.0}})
    await world.ask("a")
    launcher.broken = True
    world.fleet.scheduler.plan_soon()
    await asyncio.sleep(0.5)
    world.fleet.scheduler.plan_now()
    await asyncio.sleep(2.0)
    launcher.broken = False
    assert await world.ask("b") < 4.0
    await asyncio.sleep(30)
    assert "stop a" in world.journal
    assert not world.fleet.scheduler.broken.is_set()


async def test_a_planner_that_keeps_failing_ends_the_router() -> None:
    launcher = Flickering({CPU: 8 * GIB}, {"a": FakeModel(shards=(GIB,))})
    world = Schedule({"a": GIB}, launcher=launcher)
    await world.ask("a")
    launcher.broken = True
    world.fleet.scheduler.plan_soon()
    async with asyncio.timeout(60):
        await world.fleet.scheduler.broken.wait()
    await world.fleet.close()
    assert world.fleet.workers() == []


async def test_content_that_is_damaged_twice_is_not_fetched_a_third_time() -> None:
    damaged = [WorkerLost("sha256 of a shard is wrong", cause="download_failed", exit=10) for _ in range(2)]
    world = Schedule({"a": GIB}, missing=("a",), models={"a": FakeModel(download_fails=damaged)})
    await world.refuses("a", LoadBackoff, match="sha256")
    await asyncio.sleep(1.1)
    for _ in range(2):
        await world.refuses("a", LoadFailed, match="sha256")
        await asyncio.sleep(100)
    assert world.journal == ["download a", "download a"]
    await world.fleet.load("a")


@pytest.mark.parametrize("exit", [10, -7])
async def test_damaged_files_are_verified_by_a_download_before_the_next_load(exit: int) -> None:
    """The worker found them damaged (exit code 10), or a mapped file became shorter (SIGBUS)."""
    damaged = WorkerLost("model.safetensors is damaged", cause="crashed", exit=exit)
    world = Schedule({"a": GIB}, models={"a": FakeModel(start_fails=[damaged])})
    world.files.is_on_hub = True
    await world.refuses("a", LoadBackoff, match="damaged")
    await asyncio.sleep(1.1)
    await world.ask("a")
    assert world.journal == ["start a", "download a", "start a"]
    await world.fleet.unload("a")[0].stopped.wait()
    await world.ask("a")
    assert world.journal[3:] == ["stop a", "start a"], "they were verified"


async def test_damaged_files_of_a_local_folder_are_not_downloaded() -> None:
    damaged = WorkerLost("model.safetensors is damaged", cause="crashed", exit=10)
    world = Schedule({"a": GIB}, models={"a": FakeModel(start_fails=[damaged] * 2)})
    await world.refuses("a", LoadBackoff, match="damaged")
    await asyncio.sleep(1.1)
    await world.refuses("a", LoadFailed, match="damaged")
    assert world.journal == ["start a", "start a"]


async def test_memory_freed_meanwhile_ends_the_exact_estimate() -> None:
    world = Schedule({"a": 5 * GIB, "b": GIB}, totals={CPU: 5 * GIB + 300}, stated=False,
                     keys={"a": {"required_memory": {"": 5 * GIB}}},
                     models={"b": FakeModel(shards=(GIB,), estimate_seconds=60.0)})  # fmt: skip
    await world.ask("a")
    asked = await world.asking("b", wait=5)
    assert world.journal == ["start a", "estimate b"]
    world.fleet.unload("a")
    assert await asked < 10.0
    assert world.journal == ["start a", "estimate b", "stop a", "start b"]
    assert [entry for _, entry in world.launcher.timeline if entry.startswith("cancelled")] == ["cancelled b"]


# When a model that failed may be tried again, as values.


def pauses(count: int, *, allowed: int = 3, served: bool = False, jitter: float = 1.0) -> list[float]:
    """Of a model that is tried again as soon as it may, and crashes each time."""
    crashes, now, found = Crashes(), 0.0, []
    for _ in range(count):
        found.append(crashes.pause(now, allowed=allowed, served=served, jitter=jitter))
        now += found[-1]
    return found


def test_the_first_crashes_cost_a_second_and_the_next_ones_twice_the_last() -> None:
    assert pauses(7) == [1, 1, 1, 2, 4, 8, 16]


def test_a_crash_in_service_costs_nothing_until_there_are_many() -> None:
    assert pauses(5, allowed=2, served=True) == [0, 0, 2, 4, 8]


def test_pauses_end_at_five_minutes_and_never_fall_while_it_crashes() -> None:
    found = pauses(2000)
    assert found == sorted(found)
    assert found[-1] == LONGEST_PAUSE


def test_models_that_failed_together_retry_at_different_times() -> None:
    assert pauses(1, allowed=0, jitter=0.8) < pauses(1, allowed=0, jitter=1.2)


def test_good_service_resets_the_crash_count() -> None:
    crashes = Crashes()
    for _ in range(9):
        crashes.pause(0.0, allowed=1, served=False, jitter=1.0)
    crashes.forget()
    assert crashes.pause(1.0, allowed=1, served=False, jitter=1.0) == 1.0


@pytest.mark.parametrize(("later", "pause"), [(WINDOW - 1, 2.0), (WINDOW + 1, 1.0)])
def test_crashes_count_for_ten_minutes(later: float, pause: float) -> None:
    crashes = Crashes()
    crashes.pause(0.0, allowed=1, served=False, jitter=1.0)
    assert crashes.pause(later, allowed=1, served=False, jitter=1.0) == pause
