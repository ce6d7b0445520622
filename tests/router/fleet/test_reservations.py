"""Reservations of executed and forked workers, and what is learned from their measurements: never too little."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from router.api.status import status
from router.config.presets import Preset
from router.errors import DoesNotFit, LoadFailed
from router.fleet.model import FEWEST_PAUSES
from router.fleet.scheduler import MOST_SHARED_HEADROOM, resident_of
from router.fleet.worker import EXCESS_BYTES, EXCESS_PATIENCE
from router.fleet.worker_argv import estimate_command, options, serve_fields, threads
from router.launch.interface import WorkerLost
from router.memory.estimate import SAFETY_FACTOR, SERVING_HOST, beside_steps, estimate
from router.planner.ledger import LOCAL, DeviceId
from tests.fakes import CPU, GIB, FakeLauncher, FakeModel
from tests.router.fleet.worlds import LLAMA, Schedule
from worker.protocol.argv import Serve
from worker.protocol.events import MemoryNeed, Pulse
from worker.protocol.memory import DEVICE_LIBRARIES_HOST_BYTES, DEVICE_PROCESS_BYTES, DEVICE_PROCESS_HOST_BYTES

MIB = 1 << 20
TOTALS = {CPU: 8 * GIB}
SHARED = 250 * MIB
NEEDS = 500 * MIB


def forking(**models: FakeModel) -> Schedule:
    """One model or more, whose workers are forked as long as `launcher.fork_server` is True."""
    others = {name: {"parallel": 3} for name in models if name != "a"}  # estimates of one do not hold for another
    world = Schedule(dict.fromkeys(models, NEEDS), totals=TOTALS, models=models, keys=others, stated=False)
    world.launcher.fork_server = True
    return world


def model() -> FakeModel:
    return FakeModel(shards=(NEEDS,), shared=SHARED)


def needs(*, forked: bool) -> int:
    """The reservation of one of these models before anything is learned."""
    preset = Preset(id="a")
    found = estimate(LLAMA, preset, on_host=True, threads=threads(preset, on_host=True), forked=forked)
    return found.granted(found.kv_steps).total


async def leave(world: Schedule, name: str) -> None:
    workers = list(world.fleet.models[name].workers)
    world.fleet.unload(name)
    await asyncio.gather(*(worker.stopped.wait() for worker in workers))


async def test_the_reservation_of_a_forked_worker_excludes_pages_of_the_fork_server() -> None:
    world = forking(a=model())
    await world.ask("a")
    forked = world.worker("a").reserved[CPU]
    await leave(world, "a")
    world.launcher.fork_server = False
    await world.ask("a")
    assert (forked, world.worker("a").reserved[CPU]) == (needs(forked=True), needs(forked=False))
    assert needs(forked=False) - needs(forked=True) > SHARED


@pytest.mark.parametrize(
    ("keys", "warmed_up", "expected"),
    [
        ({}, True, "measured"),
        ({}, False, "measured and steps"),
        ({"reserved_memory": 100 * MIB}, True, "measured and reserved"),
        ({"required_memory": {"": GIB}}, True, "required"),
        ({"enable_lora": "on"}, True, "estimated"),
    ],
)
async def test_a_forked_worker_is_charged_what_it_takes_and_its_preset_asks_for(
    keys: dict[str, Any], warmed_up: bool, expected: str
) -> None:
    launched = replace(model(), shards=(SHARED + 100 * MIB,), warmed_up=warmed_up, later=7 * MIB)
    world = Schedule({"a": NEEDS}, totals=TOTALS, models={"a": launched}, keys={"a": keys}, stated=False)
    world.launcher.fork_server = True
    await world.ask("a")
    worker, estimated, measured = world.worker("a"), world.costs("a").estimate, 107 * MIB
    reserved = {
        "measured": measured,
        "measured and steps": measured + estimated.compute[0],
        "measured and reserved": measured + 100 * MIB,
        "required": GIB,
        "estimated": estimated.total,
    }
    assert worker.reserved[CPU] == reserved[expected]
    world.launcher.say("a", Pulse(steps=1, running=0, waiting=0, measured={"cpu": 3 * GIB}, later=0))
    assert worker.reserved[CPU] == 3 * GIB


def with_grammars(headroom: int) -> FakeModel:
    return replace(model(), warmed_up=True, later=7 * MIB, unannounced=headroom)


async def test_a_forked_worker_is_charged_for_grammars_as_soon_as_it_announces_them() -> None:
    world = forking(a=with_grammars(40 * MIB))
    await world.ask("a")
    worker = world.worker("a")
    assert (worker.reserved[CPU], worker.headroom) == (257 * MIB, 40 * MIB)
    world.launcher.say("a", MemoryNeed(measured={"cpu": 255 * MIB}, later=55 * MIB, unannounced=0))
    assert (worker.reserved[CPU], worker.headroom) == (310 * MIB, 0)
    pulse = Pulse(steps=1, running=0, waiting=0, measured={"cpu": 290 * MIB}, later=7 * MIB, unannounced=30 * MIB)
    world.launcher.say("a", pulse)
    assert (worker.reserved[CPU], worker.headroom) == (297 * MIB, 30 * MIB)
    await leave(world, "a")
    await world.ask("a")
    assert world.costs("a").estimate.source == "learned"
    assert world.costs("a").estimate.total >= 297 * MIB, "with the grammars"
    assert world.worker("a").reserved[CPU] == 257 * MIB


async def test_other_routers_count_the_reservation_of_a_worker_as_it_is_now() -> None:
    world = forking(a=with_grammars(40 * MIB))
    await world.ask("a")
    process = world.launcher.running[str(world.worker("a"))]
    assert process.reserved[CPU] == (257 + 40) * MIB, "with what it announces before it takes it"
    world.launcher.say("a", MemoryNeed(measured={"cpu": 255 * MIB}, later=55 * MIB, unannounced=0))
    assert process.reserved[CPU] == world.worker("a").reserved[CPU] == 310 * MIB


async def test_a_later_load_is_charged_for_its_steps_as_soon_as_it_announces_them() -> None:
    world = forking(a=replace(with_grammars(40 * MIB), steps=12 * MIB))
    await world.ask("a")
    assert (world.worker("a").reserved[CPU], world.worker("a").headroom) == (257 * MIB, 40 * MIB)
    for _ in range(2):
        await leave(world, "a")
        await world.ask("a")
        assert world.costs("a").estimate.source == "learned"
        assert (world.worker("a").reserved[CPU], world.worker("a").headroom) == (245 * MIB, 52 * MIB)
    world.launcher.say("a", MemoryNeed(measured={"cpu": 238 * MIB}, later=19 * MIB, unannounced=40 * MIB))
    assert (world.worker("a").reserved[CPU], world.worker("a").headroom) == (257 * MIB, 40 * MIB)


async def test_a_later_load_is_charged_by_its_pulse_what_it_reported_as_an_upper_bound_when_ready() -> None:
    exact = replace(with_grammars(40 * MIB), steps=12 * MIB)
    world = forking(a=exact)
    await world.ask("a")
    known = set()
    for _ in range(2):
        await leave(world, "a")
        world.launcher.models["a"] = replace(exact, shards=(NEEDS + 60 * MIB,))
        await world.ask("a")
        worker = world.worker("a")
        known.add(world.costs("a").estimate.total)
        assert (worker.reserved[CPU], worker.headroom) == (305 * MIB, 52 * MIB)
        pulse = Pulse(steps=1, running=0, waiting=0, measured={"cpu": 238 * MIB}, later=7 * MIB, unannounced=52 * MIB)
        world.launcher.say("a", pulse)
        assert (worker.reserved[CPU], worker.headroom) == (245 * MIB, 52 * MIB)
    assert len(known) == 1, "an upper bound raises no learned figure"


async def test_a_first_load_is_charged_for_estimated_steps_as_soon_as_it_announces_them() -> None:
    steps = 260 * MIB
    large = replace(with_grammars(40 * MIB), shards=(SHARED + 50 * MIB + steps,), warmed_up=False, steps=steps)
    world = forking(a=large)
    for _ in range(2):
        await world.ask("a")
        assert (world.worker("a").reserved[CPU], world.worker("a").headroom) == (57 * MIB, 300 * MIB)
        learned = world.fleet.learned_estimates.learned(world.costs("a").key)
        await leave(world, "a")
    assert learned is not None
    assert not learned.steps, "an estimate is not learned"


async def test_slots_of_adapters_are_charged_when_they_are_mapped_and_do_not_lower_what_is_learned() -> None:
    steps, taken, learned = 40 * MIB, 160 * MIB, []
    large = replace(with_grammars(40 * MIB), shards=(SHARED + taken + steps,), warmed_up=False, steps=steps)
    for keys in ({}, {"enable_lora": "on"}):
        world = Schedule({"a": NEEDS}, totals=TOTALS, models={"a": large}, keys={"a": keys}, stated=False)
        world.files.checkpoint = replace(LLAMA, linears=replace(LLAMA.linears, lora_elements=1 << 18))
        world.launcher.fork_server = True
        await world.ask("a")
        assert world.worker("a").reserved[CPU] == taken + 7 * MIB
        learned.append(world.fleet.learned_estimates.learned(world.costs("a").key))
    without, with_slots = learned
    assert without is not None
    assert without.beside > (0,)
    assert with_slots == without


async def test_announced_memory_is_charged_beside_estimated_steps() -> None:
    small = replace(with_grammars(40 * MIB), shards=(SHARED + 50 * MIB,), warmed_up=False)
    world = forking(a=small)
    await world.ask("a")
    before = 57 * MIB + world.costs("a").estimate.compute[0]
    assert (world.worker("a").reserved[CPU], world.worker("a").headroom) == (before, 40 * MIB)
    world.launcher.say("a", MemoryNeed(measured={"cpu": 50 * MIB}, later=47 * MIB, unannounced=0))
    assert (world.worker("a").reserved[CPU], world.worker("a").headroom) == (before + 40 * MIB, 0)


async def test_memory_that_a_pulse_shows_to_be_free_is_used_at_once() -> None:
    world = forking(a=with_grammars(40 * MIB), b=model())
    await world.ask("a")
    world.launcher.say("a", MemoryNeed(measured={"cpu": 250 * MIB}, later=47 * MIB, unannounced=0))
    required = 8 * GIB - 257 * MIB
    world.fleet.models.apply({**world.presets, "b": replace(world.presets["b"], required_memory={"": required})})
    with world.fleet.lease("a"):
        waiting = await world.asking("b", wait=1.0)
        assert "start b" not in world.journal
        pulse = Pulse(steps=1, running=0, waiting=0, measured={"cpu": 250 * MIB}, later=7 * MIB, unannounced=0)
        world.launcher.say("a", pulse)
        await asyncio.sleep(1.0)
        assert "start b" in world.journal
    await waiting


async def test_an_executed_worker_is_charged_for_grammars_from_the_beginning() -> None:
    world = forking(a=with_grammars(40 * MIB))
    world.launcher.fork_server = False
    await world.ask("a")
    pulse = Pulse(steps=1, running=0, waiting=0, measured={"cpu": 3 * GIB}, later=7 * MIB, unannounced=40 * MIB)
    world.launcher.say("a", pulse)
    assert (world.worker("a").reserved[CPU], world.worker("a").headroom) == (3 * GIB + 47 * MIB, 0)


@pytest.mark.parametrize(("beside", "fits"), [(60 * MIB, True), (60 * MIB - 1, False)])
async def test_the_largest_headroom_is_kept_free_once_for_all_workers(beside: int, fits: bool) -> None:
    world = forking(a=with_grammars(40 * MIB), b=with_grammars(60 * MIB), c=model())
    await world.ask("a")
    await world.ask("b")
    assert world.fleet.scheduler.reserved(CPU) == 2 * 257 * MIB + 60 * MIB
    required = 8 * GIB - 2 * 257 * MIB - beside
    world.fleet.models.apply({**world.presets, "c": replace(world.presets["c"], required_memory={"": required})})
    await world.ask("c")
    assert [worker.preset.id for worker in world.fleet.workers()] == (["a", "b", "c"] if fits else ["b", "c"])


async def test_a_headroom_above_a_limit_is_kept_free_for_each_worker() -> None:
    most = MOST_SHARED_HEADROOM
    world = forking(a=with_grammars(most + 1), b=with_grammars(most + 2), c=with_grammars(most))
    for name in "abc":
        await world.ask(name)
    reserved = sum(world.worker(name).reserved[CPU] for name in "abc")
    assert world.fleet.scheduler.reserved(CPU) == reserved + 2 * most + 3


async def test_a_model_that_needs_all_memory_gets_the_headroom_too() -> None:
    world = forking(a=with_grammars(40 * MIB), b=with_grammars(60 * MIB), c=model())
    await world.ask("a")
    await world.ask("b")
    world.fleet.models.apply({**world.presets, "c": replace(world.presets["c"], required_memory={"": 8 * GIB})})
    await world.ask("c")
    assert [worker.preset.id for worker in world.fleet.workers()] == ["c"]


async def test_learned_estimates_of_forked_workers_do_not_hold_for_executed_ones() -> None:
    world = forking(a=model())
    await world.ask("a")
    assert world.worker("a").measured == {CPU: NEEDS - SHARED}
    await leave(world, "a")
    await world.ask("a")
    estimate = world.costs("a").estimate
    assert (estimate.source, estimate.total < NEEDS) == ("learned", True)
    await leave(world, "a")
    world.launcher.fork_server = False
    await world.ask("a")
    costs = world.costs("a")
    assert costs.estimate.source == "static", "nothing is known of this way yet"
    assert world.worker("a").reserved[CPU] >= NEEDS


async def test_a_worker_reserved_as_forked_is_never_executed_instead() -> None:
    world = forking(a=model(), b=model())
    world.launcher.set_foreign(CPU, 8 * GIB - needs(forked=True) - 100 * MIB)  # a forked one fits, no other
    world.launcher.hold("start a")
    asking = await world.asking("a", wait=1)
    waiting = await world.asking("b", wait=1)
    world.launcher.fork_server = False  # it died while b was in the queue
    world.launcher.release("start a")
    await asking
    await leave(world, "a")
    await asyncio.sleep(5)
    assert "start b" not in world.journal, "it has to wait for the room of an executed one"
    assert not world.launcher.over_commits
    world.launcher.set_foreign(CPU, 0)
    await waiting
    assert world.worker("b").reserved[CPU] >= NEEDS
    assert world.fleet.models["b"].failure is None


async def test_a_model_that_is_requested_before_the_fork_server_is_warm_is_estimated_as_a_forked_worker() -> None:
    world = forking(a=model())
    world.launcher.fork_server = False
    world.launcher.hold("imports")
    asking = await world.asking("a", wait=5)
    assert "start a" not in world.journal
    world.launcher.fork_server = True
    world.launcher.release("imports")
    await asking
    assert world.costs("a").forked


def forking_only() -> Schedule:
    """A model on a device that holds it only if it is forked. The fork server is not warm yet."""
    keys = {"a": {"parallel": 3}}
    world = Schedule({"a": NEEDS}, totals={CPU: needs(forked=True)}, models={"a": model()}, keys=keys, stated=False)
    world.launcher.hold("imports")
    return world


async def test_a_model_that_fits_only_if_it_is_forked_waits_for_the_imports_of_the_fork_server() -> None:
    world = forking_only()
    asking = await world.asking("a", wait=5)
    assert "start a" not in world.journal
    world.launcher.fork_server = True
    world.launcher.release("imports")
    await asking
    assert world.costs("a").forked


async def test_it_is_refused_if_the_fork_server_exits_before() -> None:
    world = forking_only()
    asking = await world.asking("a", wait=5)
    world.launcher.release("imports")
    with pytest.raises(DoesNotFit):
        await asking


async def test_a_measurement_is_stored_for_the_actual_way_of_starting() -> None:
    world = forking(a=model(), b=model())
    world.launcher.fork_server = False
    world.launcher.hold("start a")
    world.launcher.set_foreign(CPU, 8 * GIB - needs(forked=False) - 100 * MIB)
    asking = await world.asking("a", wait=1)
    waiting = await world.asking("b", wait=1)
    world.launcher.fork_server = True  # warm only now: b was estimated as an executed one
    world.launcher.release("start a")
    await asking
    await leave(world, "a")
    await waiting
    assert world.worker("b").measured == {CPU: NEEDS - SHARED}
    await leave(world, "b")
    world.launcher.fork_server = False
    world.launcher.set_foreign(CPU, 0)
    await world.ask("b")
    costs = world.costs("b")
    assert costs.estimate.source == "exact", "nothing was learned of this way"
    assert costs.estimate.total >= NEEDS


async def test_what_a_worker_takes_after_it_is_ready_is_reserved_and_not_learned() -> None:
    world = forking(a=model())
    await world.ask("a")
    costs, measured = world.costs("a"), NEEDS - SHARED
    [compute] = costs.estimate.compute
    first = world.fleet.learned_estimates.learned(costs.key)
    world.launcher.say("a", Pulse(steps=1, running=0, waiting=0, measured={"cpu": 3 * GIB}, later=200 * MIB))
    assert world.worker("a").reserved[CPU] == 3 * GIB + 200 * MIB, "it is there, whatever took it"
    await leave(world, "a")
    assert world.fleet.learned_estimates.learned(costs.key) == first
    await world.ask("a")
    assert world.worker("a").reserved[CPU] == measured + compute, "and the largest steps, which are not measured yet"


@pytest.mark.parametrize("given_back", [True, False])
async def test_an_idle_worker_that_keeps_memory_beyond_its_reservation_is_replaced(given_back: bool) -> None:
    world = forking(a=model())
    await world.ask("a")
    worker = world.worker("a")
    most = worker.reserved[CPU] + EXCESS_BYTES

    def pulse(resident: int) -> None:
        world.launcher.say("a", Pulse(steps=1, running=0, waiting=0, measured={"cpu": 3 * GIB}, resident=resident))

    pulse(most + 1)
    await asyncio.sleep(EXCESS_PATIENCE / 2)
    if given_back:
        pulse(most)
    pulse(most + 1)
    assert not worker.retired
    await asyncio.sleep(EXCESS_PATIENCE / 2)
    pulse(most + 1)
    assert worker.retired is not given_back
    if not given_back:
        await worker.stopped.wait()
        assert worker.reason == "oversized"
        [event] = world.events_of("oversized")
        assert event.data["resident"] == most + 1
        await world.ask("a")
        assert world.worker("a") is not worker


async def test_a_worker_with_requests_is_not_replaced_for_its_memory() -> None:
    world = forking(a=model())
    with world.fleet.lease("a") as lease:
        await lease.ready()
        worker = world.worker("a")
        for _ in range(3):
            world.launcher.say("a", Pulse(steps=1, running=1, waiting=0, measured={}, resident=7 * GIB))
            await asyncio.sleep(EXCESS_PATIENCE)
        assert not worker.retired
    world.launcher.say("a", Pulse(steps=1, running=0, waiting=0, measured={}, resident=7 * GIB))
    assert worker.retired


async def test_a_learned_figure_never_refuses_a_model() -> None:
    world = Schedule({"a": NEEDS}, totals={CPU: needs(forked=False) + 100 * MIB}, models={"a": model()}, stated=False)
    await world.ask("a")
    costs = world.costs("a")
    await leave(world, "a")
    known = world.fleet.learned_estimates
    known.record(costs.key, costs.estimate, [20 * GIB])
    await world.ask("a")
    assert world.costs("a").estimate.source == "static"
    raised = known.learned(costs.key)
    assert raised is not None
    assert raised.beside[0] < 20 * GIB, "measured once more, and lower"


async def test_accelerators_learn_the_peak_of_the_allocator_and_main_memory_only_until_ready() -> None:
    models = {"a": FakeModel(shards=(5 * GIB,), host=GIB)}
    world = Schedule({"a": 0}, totals={GPU: 24 * GIB, CPU: 8 * GIB}, models=models, stated=False)
    await world.ask("a")
    costs = world.costs("a")
    world.launcher.say(
        "a", Pulse(steps=1, running=0, waiting=0, measured={"cuda:0": 6 * GIB, "cpu": 7 * GIB}, later=GIB)
    )
    await leave(world, "a")
    known = world.fleet.learned_estimates.learned(costs.key)
    assert known is not None
    assert known.beside == (6 * GIB - costs.estimate.weights[0] - costs.estimate.context[0],)
    assert known.host == GIB


GPU = DeviceId(LOCAL, 0)


async def test_what_the_first_worker_on_a_device_measures_counts_for_all_models_there_and_for_their_caps() -> None:
    overhead = {"cuda:0": 300 * MIB, "cpu": 700 * MIB}
    models = {name: FakeModel(shards=(5 * GIB,), host=GIB, overhead=overhead) for name in "ab"}
    world = Schedule(dict.fromkeys("ab", 0), totals={GPU: 24 * GIB, CPU: 8 * GIB}, models=models, stated=False,
                     keys={"b": {"parallel": 3}})  # fmt: skip
    await world.ask("a")
    first = world.costs("a")
    beside = beside_steps(first.estimate.compute[0])
    assert (first.estimate.runtime, first.estimate.overhead.device) == ((DEVICE_PROCESS_BYTES + beside,), 0)
    await world.ask("b")
    worker, found = world.worker("b"), world.costs("b").estimate
    assert (found.source, found.runtime) == ("static", (300 * MIB + beside_steps(found.compute[0]),))
    process = 700 * MIB + DEVICE_LIBRARIES_HOST_BYTES + SERVING_HOST
    assert found.host == first.estimate.host - DEVICE_PROCESS_HOST_BYTES + process
    asked = estimate_command(worker)
    assert asked.overhead == options(worker, Serve, listen="").overhead == 300 * MIB, "its cap is made of it"
    assert asked.host_overhead == process, "the exact figure counts with the same as the static one"


async def test_the_largest_step_is_tried_at_a_start_only_until_what_it_takes_is_learned() -> None:
    world = forking(a=model())
    await world.ask("a")
    assert serve_fields(world.worker("a"), world.fleet)["warm_up"]
    await leave(world, "a")
    await world.ask("a")
    assert not serve_fields(world.worker("a"), world.fleet)["warm_up"]


async def test_a_worker_that_drains_or_dies_stays_charged_until_its_memory_is_back() -> None:
    launcher = FakeLauncher(TOTALS, {name: FakeModel(shards=(5 * GIB,)) for name in "abc"}, reading_lag=3.0)
    world = Schedule(dict.fromkeys("abc", 5 * GIB), totals=TOTALS, launcher=launcher)
    serving = await world.asking("a", seconds=20.0, wait=5)
    worker = world.worker("a")
    world.fleet.unload("a")
    coming = await world.asking("b", wait=5)
    assert (worker.reserved[CPU], launcher.journal) == (5 * GIB, ["start a"]), "it drains and keeps its reservation"
    await serving
    await asyncio.sleep(0.2)
    assert (worker.reserved[CPU], launcher.journal) == (5 * GIB, ["start a", "stop a"]), "it stops"
    await coming
    dying = world.worker("b")
    last = asyncio.create_task(world.ask("c"))
    launcher.die("b")
    await asyncio.sleep(1)
    assert dying.reserved[CPU] == 5 * GIB, "dead, but the driver still shows its memory"
    assert "start c" not in launcher.journal
    await last
    assert launcher.over_commits == []


async def test_shards_on_an_accelerator_without_memory_and_their_process_are_charged_to_main_memory() -> None:
    launcher = FakeLauncher({CPU: 8 * GIB, GPU: 8 * GIB}, {"a": FakeModel(shards=(GIB,), host=GIB)}, pools={GPU: CPU})
    keys = {"a": {"required_memory": {"": GIB, "cpu": GIB}}}
    world = Schedule({"a": GIB}, keys=keys, launcher=launcher)
    await world.ask("a")
    worker = world.worker("a")
    assert (worker.place, worker.reserved[CPU], worker.reserved.get(GPU, 0)) == ((GPU,), 2 * GIB, 0)
    world.fleet.scheduler.plan_now()
    assert [(device.used, device.foreign) for device in world.fleet.scheduler.devices] == [(2 * GIB, 0)] * 2


async def test_where_only_the_weights_are_known_the_exact_estimate_comes_before_the_plan() -> None:
    world = forking(a=model())
    world.files.checkpoint = replace(LLAMA, kv_heads=0)
    await world.ask("a")
    assert world.journal == ["estimate a", "start a"]
    shown = status(world.fleet, world.fleet.models["a"])
    assert shown["estimate"] == {"source": "exact"}


async def test_without_an_exact_estimate_the_weights_are_multiplied_and_the_state_says_so() -> None:
    world = forking(a=model())
    world.launcher.fork_server = False
    world.files.checkpoint = replace(LLAMA, kv_heads=0, tensors={}, file_bytes=0)
    await world.refuses("a", LoadFailed, match="set required-memory")
    world.files.checkpoint = replace(LLAMA, kv_heads=0)
    world.files.change("a")
    world.launcher.models["a"].estimate_fails = [WorkerLost("no kv heads", cause="crashed", exit=1)]
    await world.ask("a")
    costs = world.costs("a")
    assert (costs.estimate.source, costs.is_exact) == ("weights", True)
    weights = costs.estimate.weights[0]
    assert world.worker("a").reserved[CPU] >= SAFETY_FACTOR * weights
    shown = status(world.fleet, world.fleet.models["a"])["estimate"]
    assert shown["source"] == "weights"
    assert f"weights x {SAFETY_FACTOR}" in shown["note"]
    estimates = [event.data for event in world.events_of("estimate")]
    assert estimates[-1]["source"] == "weights"


async def test_a_guess_from_the_weights_is_never_unlimited() -> None:
    weights = 5 * GIB
    world = forking(a=model())
    world.files.checkpoint = replace(LLAMA, kv_heads=0, tensors={"bfloat16": replace(LLAMA.tensors["bfloat16"],
                                elements=weights // 2, bytes=weights)})  # fmt: skip
    world.launcher.models["a"].estimate_fails = [WorkerLost("no kv heads", cause="crashed", exit=1)]
    await world.refuses("a", Exception, match="does not fit on empty devices")
    assert world.journal == ["estimate a"]


async def test_a_refusal_names_the_keys_that_lower_the_estimate() -> None:
    for total, stated, way_out in (
        (GIB // 2, True, "lower required-memory"),
        (GIB // 2, False, "use a device with more memory, or a smaller model"),
        (GIB, True, "lower required-memory, or lower the margin"),
    ):
        models = {"a": FakeModel(shards=(GIB,))}
        world = Schedule({"a": GIB}, totals={CPU: total}, margin=64 * MIB, models=models, stated=stated)
        await world.refuses("a", DoesNotFit, match=rf"MiB\); {way_out}$")
        await world.stop()


async def test_the_planners_view_of_a_worker_is_cached_until_it_changes() -> None:
    world = Schedule({"a": GIB}, keys={"a": {"ttl": 60.0}})
    await world.ask("a")
    [worker] = world.fleet.workers()
    before = resident_of(worker)
    assert resident_of(worker) is before
    world.launcher.say("a", Pulse(steps=1, running=0, waiting=0, measured={"cpu": 2 * GIB}, mapped=GIB))
    assert (resident_of(worker).measured[CPU], resident_of(worker).reserved[CPU]) == (GIB, 2 * GIB)
    before = resident_of(worker)
    for change in (
        lambda: world.fleet.models.apply({**world.presets, "a": replace(world.presets["a"], priority=1)}),
        lambda: setattr(worker.usage, "keep_alive", 5.0),
        lambda: world.fleet.unload("a"),
    ):
        change()
        assert resident_of(worker) != before
        before = resident_of(worker)
    assert (before.priority, before.expires, before.leaving) == (1, worker.usage.last_used + 5.0, True)
    worker.model.pauses.extend([1.0] * FEWEST_PAUSES)
    assert resident_of(worker).request_interval == 1.0


async def test_the_planners_view_shows_the_present_reservation_and_is_a_copy() -> None:
    world = Schedule({"a": GIB})
    await world.ask("a")
    [worker] = world.fleet.workers()
    before = resident_of(worker)
    worker.reserved[CPU] -= GIB // 4  # as after an early start has ended
    assert before.reserved[CPU] == GIB
    assert resident_of(worker).reserved[CPU] == GIB - GIB // 4
    assert {id: reserved for id, _, reserved in resident_of(worker).holds} == worker.reserved
