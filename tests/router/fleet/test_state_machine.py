"""The fleet as a state machine under a virtual clock: requests, ends, departures, deaths, foreign memory, operators and
time in any order; the laws hold after every step, and in the end nobody is left."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.config.presets import same_load
from router.errors import ApiError
from router.fleet.admission import Limits
from router.fleet.scheduler import demand_of
from router.fleet.worker import State
from router.launch.interface import WorkerLost
from tests.fakes import CPU, GIB, GPU0, GPU1, FakeModel, VirtualLoop
from tests.router.fleet.worlds import Schedule
from tests.router.planner.questions import Fleet as Question
from tests.router.planner.questions import starts_too_much, superfluous

pytestmark = pytest.mark.slow
T = TypeVar("T")
SIZES = {"small": GIB, "middle": 3 * GIB, "large": 6 * GIB, "hydra": 2 * GIB}
MARGIN = GIB // 2
models = st.sampled_from(sorted(SIZES))


class FleetMachine(RuleBasedStateMachine):
    """Four models, of which not all fit, on two devices and main memory."""

    def __init__(self) -> None:
        super().__init__()
        logging.disable(logging.CRITICAL)
        self.runner = asyncio.Runner(loop_factory=VirtualLoop)
        self.asking: list[asyncio.Task[None]] = []
        self.done: list[asyncio.Event] = []
        self.states: dict[int, State] = {}

    def live(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def step(self, act: Callable[[], object]) -> None:
        """Do something on the loop, and let a moment pass."""

        async def acting() -> None:
            with suppress(ApiError):
                act()
            await asyncio.sleep(0.01)

        self.live(acting())

    @initialize(count=st.sampled_from([0, 0, 2]), patience=st.sampled_from([0.0, 5.0]), lag=st.sampled_from([0.0, 0.5]))
    def build(self, count: int, patience: float, lag: float) -> None:
        async def build() -> Schedule:
            keys = {name: {"ttl": 60.0 if name == "small" else -1.0} for name in SIZES}
            keys["hydra"] = {"replicas": (1, 3), "parallel": 1, "replica_idle": 10.0}  # type: ignore[dict-item]
            return Schedule(
                SIZES,
                totals={GPU0: 8 * GIB, GPU1: 4 * GIB, CPU: 64 * GIB},
                margin=MARGIN,
                limits=Limits(models_max=count, patience=patience, queue_timeout=120.0),
                keys=keys,
                models={name: FakeModel(shards=(size,)) for name, size in SIZES.items()},
            )

        self.world = self.live(build())
        self.world.launcher.reading_lag = lag
        self.fleet = self.world.fleet

    # What happens

    @rule(model=models)
    def request(self, model: str) -> None:
        async def ask(over: asyncio.Event) -> None:
            try:
                with self.fleet.lease(model) as lease:
                    await lease.ready()
                    await over.wait()
            except ApiError:
                return

        over = asyncio.Event()
        self.done.append(over)
        self.step(lambda: self.asking.append(asyncio.create_task(ask(over))))

    @precondition(lambda self: self.asking)
    @rule(pick=st.integers(0, 100))
    def finish(self, pick: int) -> None:
        self.done[pick % len(self.done)].set()
        self.live(asyncio.sleep(0.01))

    @precondition(lambda self: self.asking)
    @rule(pick=st.integers(0, 100))
    def leave(self, pick: int) -> None:
        self.asking[pick % len(self.asking)].cancel()
        self.live(asyncio.sleep(0.01))

    @rule(model=models)
    def die(self, model: str) -> None:
        if any(each.program.model == model and not each.is_lost for each in self.world.launcher.running.values()):
            self.step(lambda: self.world.launcher.die(model))

    @rule(model=models, memory=st.booleans())
    def fail_at_the_next_start(self, model: str, memory: bool) -> None:
        crash = WorkerLost("crash", cause="crashed", exit=1)
        full = WorkerLost("no memory", cause="oom", exit=4, memory="device")
        self.world.launcher.models[model].start_fails[:] = [full if memory else crash]

    @rule(device=st.sampled_from([GPU0, GPU1]), used=st.sampled_from([0, GIB, 3 * GIB]))
    def foreign(self, device: Any, used: int) -> None:
        self.step(lambda: self.world.launcher.set_foreign(device, used))

    @rule(model=models, force=st.booleans())
    def unload(self, model: str, force: bool) -> None:
        self.step(lambda: self.fleet.unload(model, force=force))

    @rule(model=models, pin=st.booleans(), ctx=st.sampled_from([64, 128]))
    def rewrite(self, model: str, pin: bool, ctx: int) -> None:
        presets = {id: known.preset for id, known in self.fleet.models.items()}
        presets[model] = replace(presets[model], pin=pin, ctx_size=ctx)
        self.step(lambda: self.fleet.models.apply(presets))

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 15.0, 130.0]))
    def tick(self, seconds: float) -> None:
        self.live(asyncio.sleep(seconds))

    # What holds

    @invariant()
    def the_margin_is_kept(self) -> None:
        if not hasattr(self, "fleet"):
            return
        for device, total in self.world.launcher.totals.items():
            assert sum(worker.reserved.get(device, 0) for worker in self.fleet.workers()) <= total - MARGIN
        if self.fleet.limits.models_max:
            assert sum(worker.state.holds_memory for worker in self.fleet.workers()) <= self.fleet.limits.models_max

    @invariant()
    def no_state_goes_back(self) -> None:
        for worker in self.fleet.workers() if hasattr(self, "fleet") else ():
            assert worker.state >= self.states.get(worker.id, worker.state)
            self.states[worker.id] = worker.state

    @invariant()
    def one_generation_admits(self) -> None:
        for model in self.fleet.models.values() if hasattr(self, "fleet") else ():
            ours = model.all_open
            assert len(ours) <= model.preset.replicas[1]
            assert all(same_load(worker.preset, model.preset) for worker in ours)
            assert sum(not worker.best_effort for worker in ours) <= 1

    @invariant()
    def plans_keep_their_laws(self) -> None:
        if not hasattr(self, "fleet"):
            return

        async def ask() -> None:
            scheduler, patience = self.fleet.scheduler, self.fleet.limits.patience
            queued = [worker for worker in self.fleet.workers() if worker.state is State.QUEUED]
            waiting = [demand_of(worker) for worker in queued if worker.costs and not worker.queue.room.done()]
            question = Question(waiting, scheduler.residents(), scheduler.devices, self.fleet.now(), patience)
            answer = question.ask()
            assert starts_too_much(question, answer) == []
            assert superfluous(question, answer) == []

        self.live(ask())

    def teardown(self) -> None:
        """Everybody is done: all requests end, no lease is left, nothing runs."""
        try:
            if hasattr(self, "fleet"):
                self.live(self._end())
                assert self.world.launcher.running == {}
        finally:
            self.runner.close()
            logging.disable(logging.NOTSET)

    async def _end(self) -> None:
        for over in self.done:
            over.set()
        async with asyncio.timeout(1000.0):
            await asyncio.gather(*self.asking, return_exceptions=True)
        await asyncio.sleep(300)  # what is loaded for a pin has found room or given up, too
        assert all(not worker.leases for worker in self.fleet.workers())
        async with asyncio.timeout(100.0):
            await self.fleet.close()


FleetMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTheFleetAsAStateMachine = FleetMachine.TestCase
