"""Random fleets, clients and failures in virtual time: one world per seed, and the invariants of every step.

A world is *wild* or *calm*. In a wild one workers crash and run out of memory, clients disconnect, operators load,
unload and rewrite presets, and other programs take memory. In a calm one none of this happens, so the bound of a wait
is known when a request joins the queue, and is checked. In most worlds some models have a range of KV cache. Where
these are in main memory, their workers are forked, and announce the memory of grammars and of large steps.
Some worlds are *crowded*: most clients request the same model
in quick succession, so that it is never idle by itself.
"""

import asyncio
import random
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from router.config.presets import Preset, same_load
from router.config.settings import Settings
from router.errors import ApiError
from router.events import Event
from router.fleet.fleet import Fleet
from router.fleet.scheduler import demand_of
from router.fleet.worker import State, Worker
from router.launch.interface import WorkerLost
from router.memory.checkpoint_facts import Checkpoint, Tally
from router.memory.estimate import MemoryEstimate, estimate, grammar_bytes
from router.planner.ledger import DeviceId, Resident
from tests.fakes import CPU, GIB, GPU0, GPU1, MIB, FakeLauncher, FakeModel, run_virtual
from tests.router.fleet.worlds import LLAMA, Schedule
from tests.router.planner.fleets import overcommitted
from tests.router.planner.questions import Fleet as Question
from tests.router.planner.questions import overtaken, starts_too_much, superfluous
from worker.protocol.events import Estimated, MemoryNeed, Pulse

MARGIN = GIB // 2
RANGE_CTX = 1024  # tokens of one request of a model with a range
# Entries of vocabularies. Grammars for the largest take 124 MiB, so the margin has those of four further models.
VOCABULARIES = (1000, 100_000)
CALM = 3  # every third seed is a calm world
CROWDED = (1, 3, 4, 6)  # the crowded worlds, by the remainder of the seed by 8
# Seconds: of a request in a calm world, of a load, of stopping and settling; the minimum residency.
LONGEST, LOAD, STOP, RESIDENCY = 8.0, 8.0, 3.0, 10.0


class Exploration:
    """One random world and its invariants."""

    def __init__(self, seed: int, *, ranges: bool = True):
        """`ranges`: some models have a range of KV cache."""
        self.random = random.Random(seed)
        pick = self.random
        self.calm = seed % CALM == 0
        self.crowded = seed % 8 in CROWDED
        names = [f"m{number}" for number in range(pick.randint(2, 5))]
        self.totals: dict[DeviceId, int] = {CPU: 8 * GIB}
        pools: dict[DeviceId, DeviceId] = {}
        match pick.choice(["cpu", "cpu", "gpus", "gpus", "gpus", "unified"]):
            case "gpus":
                self.totals = {CPU: 64 * GIB, GPU0: 8 * GIB, GPU1: 6 * GIB}
            case "unified":
                self.totals, pools = {CPU: 12 * GIB, GPU0: 12 * GIB}, {GPU0: CPU}
        self.beside = pick.choice([0, GIB // 8]) if len(self.totals) > 1 else 0
        sizes = {name: pick.randint(1, 14) * GIB // 2 for name in names}
        stated = {name: {"": size} | ({"cpu": self.beside} if self.beside else {}) for name, size in sizes.items()}
        parted = self.parted(names) if seed % 4 == 2 and not self.calm else {}
        for name, parts in parted.items():
            stated[name] = {f"cuda:{index}": size for index, size in enumerate(parts)} | {"cpu": self.beside}
            if not self.beside:
                del stated[name]["cpu"]
        ranged = self.ranged(sizes, parted) if ranges else {}
        for name in ranged:
            stated[name] = {}
        settings = Settings(
            models_max=pick.choice([0, 0, 1, 2, 3]),
            swap_patience=pick.choice([0.0, 2.0, 10.0]),
            queue_timeout=600.0,
            sleep_memory=pick.choice([0, GIB // 4]),
        )
        if self.crowded:
            settings = replace(settings, drain_timeout=pick.choice([0.0, 5.0, 30.0]))
            settings = replace(settings, evict_timeout=-1.0 if self.calm else pick.choice([-1.0, -1.0, 0.0, 4.0]))
        launcher = FakeLauncher(self.totals, {name: self.model(size) for name, size in sizes.items()}, pools=pools)
        for name, parts in parted.items():
            launcher.models[name].shards = parts
        range_keys = {name: self.range_keys() for name in ranged}
        launcher.fork_server = bool(ranged) and GPU0 not in self.totals
        for name, facts in ranged.items():
            preset = Preset(id=name, **range_keys[name])
            found = estimate(facts, preset, on_host=GPU0 not in self.totals, forked=launcher.fork_server)
            self.grow(launcher.models[name], found)
            if launcher.fork_server:
                self.announce_grammars(launcher.models[name], grammar_bytes(facts, preset))
        launcher.reading_lag = 0.0 if self.calm else pick.choice([0.0, 0.2, 1.0])
        self.world = Schedule(
            sizes, margin=MARGIN, settings=settings, launcher=launcher,
            keys={name: {"required_memory": stated[name], "pipeline_parallel": 2 if name in parted else 1}
                  | self.keys(settings) | range_keys.get(name, {}) for name in names},
            missing=() if self.calm else tuple(name for name in names if pick.random() < 0.3),
        )  # fmt: skip
        self.world.files.facts_of = ranged
        self.events = self.world.events
        self.events.subscribe(self.check)
        self.most = {name: preset.replicas[1] for name, preset in self.world.presets.items()}
        self.states: dict[int, State] = {}
        self.kv_tokens: dict[int, int] = {}  # the granted tokens of each worker with a range
        self.grants = 0  # the number of grants between the least and the most
        self.announced: dict[int, int] = {}  # bytes that each worker has announced since the last start
        self.announcements = 0
        self.answers = 0
        self.prepared = 0  # the number of early starts
        self.refusals = 0
        self.longest = 0.0  # the longest wait of a calm world, as a share of its bound
        self._looking = False
        self._broken: list[str] = []

    def parted(self, names: list[str]) -> dict[str, tuple[int, int]]:
        """Return the shards of models that are split over two accelerators, seldom evenly."""
        if GPU1 not in self.totals:
            return {}
        pick = random.Random(self.random.getstate()[1][0])
        return {
            name: (pick.randint(1, 12) * GIB // 2, pick.randint(1, 12) * GIB // 2)
            for name in names
            if pick.random() < 0.5
        }

    def ranged(self, sizes: dict[str, int], parted: Collection[str]) -> dict[str, Checkpoint]:
        """Return the facts of models with a range of KV cache: of 256 MiB for one request, in steps of 4 MiB."""
        pick = random.Random(self.random.getstate()[1][0] + 1)
        share = pick.choice([0.0, 0.5, 1.0])
        return {
            name: replace(
                LLAMA,
                identity=name,
                kv_heads=32,
                head_dim=512,
                value_dim=512,
                vocab_size=pick.choice(VOCABULARIES),
                tensors={"bfloat16": Tally(size // 4, size // 2)},  # half the size of a stated model
            )
            for name, size in sizes.items()
            if name not in parted and pick.random() < share
        }

    def range_keys(self) -> dict[str, Any]:
        pick = random.Random(self.random.getstate()[1][0] + 2)
        return {"parallel": pick.choice([2, 8, 64]), "ctx_size": RANGE_CTX, "threads": 1, "split_mode": "none"}

    def grow(self, model: FakeModel, found: MemoryEstimate) -> None:
        """Give a model the memory that its static estimate bounds, with a KV cache of the granted tokens."""
        model.shards, model.host = (sum(found.shards) - sum(found.context),), found.host
        model.bytes_per_token = found.kv_step[0] // found.step_tokens
        model.estimated = Estimated(
            weights=list(found.weights),
            context=list(found.granted(found.kv_steps).context),
            compute=list(found.compute),
            runtime=list(found.runtime),
            host=found.host,
        )
        if self.calm:
            model.estimate_seconds = 0.0

    def announce_grammars(self, model: FakeModel, size: int) -> None:
        """Let the workers of a grown model announce `size` of its bytes, for grammars, before they take them. Half of
        the models compute their largest steps in their first load, and announce them in later ones."""
        model.unannounced, model.later = size, 8 * MIB
        model.shards = (model.shards[0] - model.unannounced - model.later,)
        model.warmed_up = random.Random(self.random.getstate()[1][0] + 3).random() < 0.5
        model.steps = 12 * MIB if model.warmed_up else 0

    def model(self, size: int) -> FakeModel:
        pick, wild = self.random, not self.calm
        return FakeModel(
            shards=(size,),
            host=self.beside,
            load_seconds=pick.uniform(0.1, LOAD),
            stop_seconds=pick.uniform(0.0, STOP),
            download_seconds=pick.uniform(0.1, 20.0),
            estimate_seconds=pick.uniform(0.1, 2.0),
            prepare_seconds=pick.uniform(0.0, 4.0),
            prepared=pick.choice([GIB // 16, GIB // 4, GIB // 2]),
            prepare_fails=[self.failure() for _ in range(pick.choice([0, 0, 0, 1]) if wild else 0)],
            start_fails=[self.failure() for _ in range(pick.choice([0, 0, 0, 1, 2]) if wild else 0)],
            dies_after=pick.choice([None, None, None, pick.uniform(1.0, 60.0)]) if wild else None,
        )

    def keys(self, settings: Settings) -> dict[str, Any]:
        pick = self.random
        if self.calm:
            return {"min_residency": min(RESIDENCY, settings.swap_patience)}
        return {
            "ttl": pick.choice([-1.0, -1.0, 5.0]),
            "priority": pick.choice([0, 0, 1]),
            "parallel": 1,
            "replicas": pick.choice([(1, 1), (1, 1), (1, 2), (2, 3)]),
            "replica_idle": pick.choice([1.0, 30.0]),
            "prefetch": pick.choice([(), (), ("m0", "m1")]),
            "max_concurrent": pick.choice([0, 0, 3]),
        }

    def failure(self) -> WorkerLost:
        return self.random.choice(
            [
                WorkerLost("crash", cause="crashed", exit=1),
                WorkerLost("no memory", cause="oom", exit=6, memory="host"),
                WorkerLost("unusable", cause="load_failed", exit=3),
            ]
        )

    # Invariants

    def check(self, event: Event) -> None:
        """Check after every event. The event log swallows exceptions of listeners, so they are kept for the end."""
        try:
            self._check(event)
        except AssertionError as broken:
            self._broken.append(str(broken))

    def _check(self, event: Event) -> None:
        fleet = self.world.fleet
        self._reservations()
        if fleet.settings.workers_at_once:
            assert sum(worker.state.holds_memory for worker in fleet.workers()) <= fleet.settings.workers_at_once
        for worker in fleet.workers():
            assert worker.state < State.STOPPING or not worker.open
        if event.kind == "state":
            state = State[event.data["state"].upper()]
            assert state >= self.states.get(event.data["worker"], state), "a state went back"
            self.states[event.data["worker"]] = state
            self._grants(event, state)
        if event.kind == "plan" and event.data["decision"] == "early_start":
            self.prepared += 1
            assert worker_of(fleet, event).state is State.QUEUED
        if event.kind == "plan" and event.data["decision"] == "start":
            self.announced.clear()
            self._margins()
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _reservations(self) -> None:
        """Check the sums of reservations. After a start, the memory for the largest announcement is free: only further
        ones may use up the margin."""
        fleet = self.world.fleet
        announced = [size for id, size in self.announced.items() if any(worker.id == id for worker in fleet.workers())]
        further = sum(announced) - max(announced, default=0)
        for device, total in self.totals.items():
            reserved = sum(worker.reserved.get(device, 0) for worker in fleet.workers())
            reserved += sum(weights.request.size for weights in fleet.sleeping_weights.all.values() if device == CPU)
            assert reserved <= total - MARGIN + further, f"{device}: {reserved} reserved"

    def _grants(self, event: Event, state: State) -> None:
        """Check that a worker has what it was granted when it started, and never more."""
        worker = next((worker for worker in self.world.fleet.workers() if worker.id == event.data["worker"]), None)
        if worker is None or worker.kv_range is None or worker.costs is None:
            return
        tokens = worker.costs.estimate.kv_tokens
        least, most = worker.kv_range.kv_tokens, worker.kv_range.granted(worker.kv_range.kv_steps).kv_tokens
        assert least <= tokens <= most, f"{worker} has {tokens} tokens, of {least} to {most}"
        assert self.kv_tokens.setdefault(worker.id, tokens) == tokens, f"the grant of {worker} has changed"
        self.grants += state is State.STARTING and least < tokens < most
        if state is State.READY:
            for device, size in worker.measured.items():
                assert size <= worker.reserved[worker.pools.get(device, device)], f"{worker} takes {size} on {device}"

    def _margins(self) -> None:
        """Check that the started demands fit beside all residents, by driver and by ledger."""
        fleet = self.world.fleet
        assert fleet.scheduler.last_plan is not None
        start = fleet.scheduler.last_plan.start
        here = [resident for resident in fleet.scheduler.residents() if resident.id not in start]
        # An early start is in the driver's figure already. In the ledger it is what its worker has beside the claim.
        for worker in (worker for worker in fleet.workers() if worker.id in start):
            claim = start[worker.id].claim
            held = {id: size - claim.get(id, 0) for id, size in worker.reserved.items() if size > claim.get(id, 0)}
            here.append(Resident(id=-worker.id, model="", reserved=held, starting=True))
        over = overcommitted(fleet.scheduler.devices, here, [], [found.claim for found in start.values()])
        assert over == [], f"margin exceeded on {over}"

    def _look(self) -> None:
        """Plan once more with the present state, and check the invariants of the plan."""
        self._looking = False
        fleet = self.world.fleet
        if fleet.closing:
            return
        scheduler = fleet.scheduler
        queued = [worker for worker in fleet.workers() if worker.state is State.QUEUED and not worker.retired]
        waiting = [demand_of(worker) for worker in queued if worker.costs and not worker.queue.granted.done()]
        devices = scheduler.cautious_devices()
        question = Question(waiting, scheduler.residents(), devices, fleet.now(), fleet.settings.swap_patience)
        try:
            for model in fleet.models.values():
                ours = model.all_open
                assert len(ours) <= self.most[model.preset.id], "too many are open"
                presets = [worker.preset for worker in ours if worker.preset is not model.preset]
                assert all(same_load(preset, model.preset) for preset in presets), "workers of two presets are open"
                assert sum(not worker.best_effort for worker in ours) <= 1, "two required workers of one model"
            if not waiting:
                return
            answer = question.ask()
            assert starts_too_much(question, answer) == [], "a plan exceeds the margin"
            assert superfluous(question, answer) == [], "a victim is superfluous"
            assert overtaken(question, answer) == [], "a demand takes the place of one ahead"
            if not self._is_about_to_plan():
                assert not answer.start, "memory was free and no plan was made"
                assert not answer.evict, "victims could leave and no plan was made"
        except AssertionError as broken:
            self._broken.append(str(broken))

    def _is_about_to_plan(self) -> bool:
        fleet = self.world.fleet
        scheduler = fleet.scheduler
        again = scheduler.last_plan.look_again if scheduler.last_plan is not None else None
        looks = scheduler._refresh is not None and not scheduler._refresh.done()
        # A plan follows each exact estimate.
        looks |= any(worker.queue.refine.is_set() for worker in fleet.workers())
        return scheduler._is_requested or looks or (again is not None and again <= fleet.now())

    def bound(self, model: str) -> float:
        """Return the longest wait in seconds of a request for `model` that arrives now, in a calm world."""
        fleet, patience = self.world.fleet, self.world.fleet.settings.swap_patience
        mine = fleet.models[model].open
        queue = [w for w in fleet.workers() if w.state is State.QUEUED]
        ahead = [w for w in queue if mine is None or w.state is not mine.state or w.since < mine.since]
        k = 1 + sum(w is not mine for w in ahead) + sum(w.state is State.STARTING for w in fleet.workers())
        return patience + k * (LONGEST + LOAD + STOP) + (k - 1) * min(RESIDENCY, patience) + 0.1

    # Clients and operators

    async def client(self) -> None:
        pick, names = self.random, list(self.world.presets)
        favourite = names[0] if self.crowded and pick.random() < 0.7 else None
        for _ in range(pick.randint(10, 30) if favourite else pick.randint(1, 6)):
            await asyncio.sleep(pick.expovariate(5.0 if favourite else 0.2))
            seconds = min(LONGEST, pick.expovariate(0.3)) if self.calm else pick.expovariate(0.3)
            request = asyncio.create_task(self.request(favourite or pick.choice(names), seconds))
            if pick.random() < (0.05 if favourite else 0.2):
                await asyncio.sleep(pick.uniform(0.0, 10.0))
                request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            if not request.cancelled() and request.exception() is not None:
                raise AssertionError(f"a request ended in {request.exception()!r}")

    async def request(self, model: str, seconds: float) -> None:
        bound = self.bound(model) if self.calm else 0.0
        worker = self.world.fleet.models[model].open if model in self.world.fleet.models else None
        ready = worker is not None and worker.state is State.READY
        try:
            waited = await self.ask(model, seconds)
        except ApiError as refused:
            self.refusals += 1
            if self.calm and refused.status != 507:
                raise AssertionError(f"a calm world refused: {refused}") from refused
            return
        self.answers += 1
        assert not ready or waited == 0.0 or not self.calm, f"{model} was ready, but waited {waited}"
        if self.calm:
            self.longest = max(self.longest, waited / bound)
            assert waited <= bound, f"{model} waited {waited:.1f} s, the bound is {bound:.1f} s"

    async def ask(self, model: str, seconds: float) -> float:
        """As `Schedule.ask`; also check that the worker was not ended under its lease without a reason."""
        fleet = self.world.fleet
        arrived = fleet.now()
        with fleet.lease(model) as lease:
            process = await lease.ready()
            began = fleet.now()
            if lease.worker.headroom and self.random.random() < 0.8:
                self.use_grammar(lease.worker)
            await asyncio.sleep(seconds)
            worker, over = lease.worker, fleet.now()
            if lease.aborted is None and worker.lost is None:
                assert worker.process is process, "the lease has moved to another worker"
                assert worker.state is State.READY, f"{worker} was stopped under its lease: {worker.reason}"
            elif lease.aborted is not None and worker.lost is None:
                assert worker.retirement.deadline is not None, f"{worker} was cut without a deadline: {worker.reason}"
                assert over >= worker.retirement.deadline, f"{worker} was cut too early: {worker.reason}"
        return began - arrived

    def use_grammar(self, worker: Worker) -> None:
        """Announce all that the worker may announce, take a part of it, and report it a second later."""
        process, size, later = worker.process, worker.headroom, worker.expected_growth
        assert process is not None
        held, taken = process.measured[CPU], self.random.randint(0, size)
        left = self.random.choice([0, size - taken])

        def report() -> None:
            if self.world.launcher.running.get(str(worker)) is process and worker.state is State.READY:
                measured = {"cpu": held + taken}
                pulse = Pulse(steps=1, running=0, waiting=0, measured=measured, later=later, unannounced=left)
                self.world.launcher.say(str(worker), pulse)
                self._announced(worker, held + taken + later)

        need = MemoryNeed(measured={"cpu": held}, later=later + size, unannounced=0)
        self.world.launcher.say(str(worker), need)
        self.announcements += 1
        self.announced[worker.id] = self.announced.get(worker.id, 0) + size
        self._announced(worker, held + later + size)
        asyncio.get_running_loop().call_later(1.0, report)

    def _announced(self, worker: Worker, size: int) -> None:
        """Check the reservations when `worker` has announced or reported that it needs `size` bytes."""
        try:
            assert worker.reserved[CPU] >= size, f"{worker} has {worker.reserved[CPU]} bytes of {size}"
            self._reservations()
        except AssertionError as broken:
            self._broken.append(str(broken))

    async def meddle(self) -> None:
        """Act as operators and as other programs."""
        pick, names, fleet = self.random, list(self.world.presets), self.world.fleet
        for _ in range(0 if self.calm else pick.randint(0, 6)):
            await asyncio.sleep(pick.expovariate(0.1))
            try:
                match pick.choice(["load", "unload", "force", "foreign", "reload", "files", "die", "plan"]):
                    case "load":
                        fleet.load(pick.choice(names))
                    case "unload":
                        fleet.unload(pick.choice(names))
                    case "force":
                        fleet.unload(pick.choice(names), force=True)
                    case "reload":
                        fleet.models.apply(self.edited())
                    case "files":
                        self.world.files.change(pick.choice(names))
                    case "die":
                        self.kill(pick.choice(names))
                    case "plan":
                        await fleet.scheduler.preview(pick.choice(names))
                    case "foreign":
                        self.world.launcher.set_foreign(pick.choice(list(self.totals)), pick.randint(0, 1) * GIB)
            except ApiError:
                continue

    def edited(self) -> dict[str, Preset]:
        """Return changed presets: some removed, some changed, some as at the beginning."""
        pick, presets = self.random, dict(self.world.presets)
        for name in tuple(presets):
            match pick.choice(["keep", "keep", "keep", "remove", "restart", "pin", "live"]):
                case "remove":
                    del presets[name]
                case "restart":
                    presets[name] = self.changed(presets[name], pick.choice([128, 256]))
                case "pin":
                    presets[name] = replace(self.changed(presets[name], 512), pin=True, ttl=5.0)
                case "live":
                    most = pick.choice([1, 2])
                    self.most[name] = max(most, self.most[name])  # replicas beyond it end when idle
                    presets[name] = replace(presets[name], priority=pick.choice([0, 1]), replicas=(1, most))
        return presets

    def changed(self, preset: Preset, number: int) -> Preset:
        """Return a preset that needs another load, with the same memory for a model with a range."""
        is_ranged = preset.id in self.world.files.facts_of
        return replace(preset, seed=number) if is_ranged else replace(preset, ctx_size=number)

    def kill(self, name: str) -> None:
        if any(worker.program.model == name and not worker.is_lost for worker in self.world.launcher.running.values()):
            self.world.launcher.die(name)

    # The run of a world

    async def run(self) -> None:
        """Run the world to its end. Raises AssertionError if an invariant was broken."""
        clients = [asyncio.create_task(self.client()) for _ in range(self.random.randint(2, 12))]
        meddler = asyncio.create_task(self.meddle())
        async with asyncio.timeout(20_000):
            await asyncio.gather(*clients, meddler)
        fleet = self.world.fleet
        await asyncio.sleep(700)  # until load commands have started or timed out
        assert self._broken == [], self._broken[:3]
        assert all(not worker.leases for worker in fleet.workers())
        assert {worker.state for worker in fleet.workers()} <= {State.READY}
        await fleet.close()
        assert fleet.workers() == []
        assert self.world.launcher.running == {}
        assert self.world.launcher.locked == {}
        assert set(self.states.values()) <= {State.STOPPED}
        if self.calm:
            assert self.world.launcher.over_commits == []
        assert self._broken == [], self._broken[:3]


def worker_of(fleet: Fleet, event: Event) -> Worker:
    return next(worker for worker in fleet.workers() if worker.id == event.data["worker"])


def explore(seed: int, *, ranges: bool = True) -> Exploration:
    """Run the world of a seed, the same each time. Raises AssertionError with the seed. `ranges`: as in Exploration."""
    random.seed(seed)  # the router draws the length of pauses
    Schedule.made.clear()  # worlds before, which would take memory in a long exploration

    async def live() -> Exploration:
        exploration = Exploration(seed, ranges=ranges)
        await exploration.run()
        return exploration

    try:
        return run_virtual(live())
    except BaseException as failed:
        raise AssertionError(f"seed {seed}: {failed!r}") from failed
