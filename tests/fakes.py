"""Simulations of the outer edges: a launcher and devices without processes, a loop without waiting; and what tests
need to run the fake program of `fake_worker.py` in real ones.

`VirtualLoop` makes time jump: when nothing is ready, the clock goes to the next timer at once. When there is no timer
either, a task that still waits would wait for ever, which is an error (`Deadlock`). `FakeLauncher` runs no program; it
keeps a journal of its orders, so that a test reads `["download c", "stop b", "start c"]`.
"""

import asyncio
import functools
import json
import os
import selectors
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

from router.launch.interface import Listen, NotLocked, NotStarted, Program, WorkerLost
from router.launch.process import uncancelled
from router.launch.worker_client import WorkerClient
from router.planner.ledger import HOST, LOCAL, Bytes, DeviceId, Reading, pooled
from worker.protocol.argv import Convert, Download, Estimate, Serve
from worker.protocol.events import Converted, Estimated, Event, Exit, MemoryNeed, Progress, Pulse, Ready

T = TypeVar("T")
P = ParamSpec("P")

MIB = 1 << 20
GIB = 1 << 30
CPU = DeviceId(LOCAL, HOST)
GPU0, GPU1, GPU2 = (DeviceId(LOCAL, index) for index in range(3))


# Time


class Deadlock(AssertionError):
    """A task waits, and neither a ready callback nor a timer is left that could end the wait."""


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that polls file descriptors without waiting, and moves the clock of the loop instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            waiting = [repr(task) for task in asyncio.all_tasks(asyncio.get_running_loop())]
            raise Deadlock("\n".join(["no timer and nothing ready, but these still wait:", *sorted(waiting)]))
        if not ready and timeout is not None and timeout > 0:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time` starts at 0.0 and jumps from timer to timer. No threads, no real sockets."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """The result of `main`, run to its end on a new `VirtualLoop`. Raises Deadlock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def virtual(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Decorates an async test so that it runs in virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_virtual(test(*args, **kwargs))

    return run


# Devices


class FixedDevices:
    """Devices as `LocalLauncher` reads them, with the values that the test wrote last into `used` and `problems`."""

    def __init__(self, totals: Mapping[DeviceId, int] | None = None):
        self.totals = dict(totals or {CPU: 8 * GIB})
        self.used = dict.fromkeys(self.totals, 0)
        self.problems: dict[DeviceId, str] = {}
        self.reads = 0

    def read(self) -> list[Reading]:
        self.reads += 1
        return [_reading(device, total, self.used[device]) for device, total in self.totals.items()]


def _reading(device: DeviceId, total: int, used: int) -> Reading:
    return Reading(device, total, min(total, used), name=f"fake {device}", uuid=fake_uuid(device))


def fake_uuid(device: DeviceId) -> str:
    """The name of a fake accelerator in CUDA_VISIBLE_DEVICES; empty for main memory."""
    return f"GPU-fake-{device.index}" if device.index >= 0 else ""


# The launcher

SETTLE_SECONDS = 5.0  # seconds that the end of `serve` waits at most until the driver shows that memory is back


@dataclass(kw_only=True)
class FakeModel:
    """Times and sizes of one model. Seconds are of the virtual clock; bytes are real use, not an estimate."""

    shards: tuple[int, ...] = (GIB,)  # bytes on each device of its place; on the CPU, all of them in main memory
    host: int = 0  # bytes of main memory beside accelerators
    # Of them, or of its shard in main memory, bytes that it has in common with its fork server if it is forked.
    shared: int = 0
    overhead: dict[str, int] = field(default_factory=dict)
    knows_its_own: bool = True  # as in `Ready`
    bytes_per_token: int = 0  # of the KV cache on each device, for each of `Serve.kv_tokens`
    warmed_up: bool = False
    later: int = 0  # as in `Ready`
    unannounced: int = 0  # as in `Ready`
    steps: int = 0  # of its shard in main memory, bytes of its largest steps: missing while it announces them
    mapped: int = 0  # of its shard in main memory, bytes of files: it measures them, and the driver does not
    download_seconds: float = 1.0
    convert_seconds: float = 1.0
    estimate_seconds: float = 0.5
    load_seconds: float = 2.0
    stop_seconds: float = 0.5  # from the request to stop until memory is back
    estimated: Estimated | None = None  # the answer of `estimate`; None: the real use
    dies_after: float | None = None  # seconds after ready
    # One for each attempt that is to fail, the first first; when used up, attempts succeed.
    download_fails: list[WorkerLost] = field(default_factory=list)
    convert_fails: list[WorkerLost] = field(default_factory=list)
    estimate_fails: list[WorkerLost] = field(default_factory=list)
    start_fails: list[WorkerLost] = field(default_factory=list)
    prepare_seconds: float = 0.1
    prepared: int = 64 * MIB  # bytes of main memory that it holds before its weights
    prepare_fails: list[WorkerLost] = field(default_factory=list)
    capabilities: tuple[str, ...] = ("chat", "completion")

    def parts(self, count: int) -> tuple[int, ...]:
        """Bytes on each of that many devices: `shards` if their number is equal, else all on one, or equal parts."""
        if count == len(self.shards):
            return self.shards
        return (-(-sum(self.shards) // count),) * count

    def steps_to_come(self, command: Serve) -> int:
        """Bytes that are missing when it is ready: those of steps that it has not computed, and announces."""
        return self.steps if command.announce_steps and not (command.warm_up and self.warmed_up) else 0

    def counted(self, sizes: dict[DeviceId, int]) -> dict[DeviceId, int]:
        """Of these, what the driver shows."""
        return {**sizes, CPU: sizes[CPU] - self.mapped} if self.mapped else sizes

    def on(self, place: Bytes, command: Serve, *, forked: bool = False) -> dict[DeviceId, int]:
        """Bytes by device when it is ready on `place`."""
        cache = command.kv_tokens * self.bytes_per_token
        accelerators = [device for device in place if device.index >= 0]
        shared = self.shared if forked else 0
        if not accelerators:
            size = sum(self.shards) + self.host - shared + cache - self.steps_to_come(command)
            return {device: size for device in place if device.index == HOST}
        node = accelerators[0].node
        sizes = {device: size + cache for device, size in zip(accelerators, self.parts(len(accelerators)), strict=True)}
        return sizes | ({DeviceId(node, HOST): self.host - shared} if self.host else {})


class FakeWorker:
    """A worker process that is ready, as far as a fleet can see. Requests to it are the test's own sleeps."""

    def __init__(self, program: Program, pid: int, measured: Bytes, ready: Ready):
        self.program = program
        self.forked = False
        self.pid = pid
        self.measured = dict(measured)
        self.reserved: Bytes = {}  # as other routers count it, once it is ready
        self.ready = ready
        self.token = f"token-of-{program.worker}"
        self.stopped = False
        self.settle_seconds = 0.0
        self.is_unreachable = asyncio.Event()
        self._lost: asyncio.Future[WorkerLost] = asyncio.get_running_loop().create_future()

    @property
    def worker_client(self) -> WorkerClient:
        raise AssertionError("a fake worker has no socket; use fake_worker.py where HTTP is the point")

    @property
    def is_lost(self) -> bool:
        return self._lost.done()

    async def lost(self) -> WorkerLost:
        return await asyncio.shield(self._lost)

    async def unreachable(self) -> None:
        await self.is_unreachable.wait()

    def reserve(self, place: Bytes) -> None:
        self.reserved = place

    def lose(self, error: WorkerLost) -> None:
        if not self._lost.done():
            self._lost.set_result(error)


class FakeEarlyProcess:
    """A worker process without weights, as far as a fleet can see."""

    def __init__(self, launcher: "FakeLauncher", program: Program, model: FakeModel, listen: Listen):
        self._launcher = launcher
        self._program = program
        self._model = model
        self._listen = listen
        self._forked = launcher.forks(program)
        self.measured: dict[DeviceId, int] = {}
        self.told = False
        self.worker: FakeWorker | None = None  # the worker that it becomes, once it is ready
        self._prepared: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lost: asyncio.Future[WorkerLost] = asyncio.get_running_loop().create_future()
        self.preparing = asyncio.ensure_future(self._prepare())

    async def _prepare(self) -> None:
        name = self._program.model
        await self._launcher._take(self._model.prepare_seconds, f"prepare {name}", "")
        if self._model.prepare_fails:
            self._launcher._note(f"lost {name}")
            self._lost.set_result(self._model.prepare_fails.pop(0))
            return
        self._launcher._occupy(self._program, {CPU: self._model.prepared})
        self.measured = {CPU: self._model.prepared}
        self._launcher._note(f"prepared {name}")
        self._prepared.set_result(None)

    async def prepared(self) -> None:
        either: set[asyncio.Future[Any]] = {self._prepared, self._lost}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._lost.done():
            raise self._lost.result()

    async def lost(self) -> WorkerLost:
        return await asyncio.shield(self._lost)

    async def load(self, command: Serve, place: Bytes) -> FakeWorker:
        self.told = True
        await self.prepared()
        self._launcher.kv_tokens[self._program.model] = command.kv_tokens
        sizes = self._model.on(place, command, forked=self._forked)
        self._launcher._begin(f"start {self._program.model}")
        self._launcher._occupy(self._program, self._model.counted(sizes))
        self.worker = await self._launcher._load(
            self._program, self._model, command, sizes, self._listen, forked=self._forked
        )
        return self.worker


class FakeLockedFiles:
    """Files in main memory, as far as a fleet can see."""

    def __init__(self) -> None:
        self._lost: asyncio.Future[NotLocked] = asyncio.get_running_loop().create_future()

    async def lost(self) -> NotLocked:
        return await asyncio.shield(self._lost)

    def lose(self) -> None:
        self._lost.set_result(NotLocked("the process that held them has ended"))


class FakeLauncher:
    """A machine of `totals` bytes by device, on which nothing runs and everything takes the time that it says.

    `journal` lists what the fleet asked for, in order: `download M`, `estimate M`, `start M`, `stop M`. `timeline` has
    (virtual seconds, entry) with the outcomes as well: `downloaded M`, `estimated M`, `ready M`, `stopped M`, `lost M`
    (died or failed), `abandoned M` (cancelled before it was ready), `cancelled M` (a download or an estimate); and, of
    an early start, `prepare M`, `prepared M`, `dismissed M` (ended without having been told to go); of files `hold M`,
    `held M`, `let go M`, `read M`, `stopped reading M`.
    """

    def __init__(
        self,
        totals: Mapping[DeviceId, int] | None = None,
        models: Mapping[str, FakeModel] | None = None,
        *,
        on_reading: Callable[[], None] = lambda: None,
        reading_lag: float = 0.0,
        pools: Mapping[DeviceId, DeviceId] | None = None,
    ):
        self.totals = dict(totals or {CPU: 8 * GIB})
        self.models = dict(models or {})
        # Accelerators without memory of their own, and the devices whose memory they use.
        self.pools = dict(pools or {})
        self.on_reading = on_reading  # called after each new reading; assign it once there is a fleet
        self.reading_lag = reading_lag  # seconds from a change of memory until the driver shows it
        self.read_seconds = 0.5  # seconds that reading the files of any model takes
        self.file_bytes = 128 * MIB  # of each of them
        self.kv_tokens: dict[str, int] = {}  # `Serve.kv_tokens` of the last start of each model
        self.locked: dict[str, FakeLockedFiles] = {}
        self.journal: list[str] = []
        self.timeline: list[tuple[float, str]] = []
        self.fork_server = False  # true if workers are forked
        self.running: dict[str, FakeWorker] = {}  # ready workers, by `Program.worker`
        self.foreign = dict.fromkeys(self.totals, 0)
        self.over_commits: list[str] = []  # each moment at which more was used than a device has
        self._occupied: dict[str, dict[DeviceId, int]] = {}
        self._listeners: dict[str, Listen] = {}
        self._gates: dict[str, asyncio.Event] = {}
        self._readings = self._read()
        self._pids = iter(range(1000, 1 << 30))

    # Orders of a test

    def hold(self, entry: str) -> None:
        """Keep the step that `entry` begins (`start c`) from ending before `release`."""
        self._gates.setdefault(entry, asyncio.Event())

    def release(self, entry: str) -> None:
        self._gates.pop(entry).set()

    def die(self, model: str, error: WorkerLost | None = None) -> None:
        """The first ready worker of `model` ends by itself, now."""
        worker = next(each for each in self.running.values() if each.program.model == model and not each.is_lost)
        error = error or WorkerLost(f"{model}: ended by signal 9", cause="crashed", exit=-9)
        self._note(f"lost {model}")
        worker.lose(error)

    def say(self, model: str, event: Event) -> None:
        """Send `event` from a worker of `model`; a report of memory from a ready one, whose measurement it becomes.

        `model` may name a worker (`a#1`) instead, for a report of memory.
        """
        if not isinstance(event, Pulse | MemoryNeed):
            next(listen for name, listen in self._listeners.items() if name.startswith(f"{model}#"))(event)
            return
        worker = self.running.get(model)
        worker = worker or next(each for each in self.running.values() if each.program.model == model)
        names = self._names(self._occupied[worker.program.worker])
        measured = {names[name]: size for name, size in event.measured.items()}
        worker.measured.update(measured)
        self._occupied[worker.program.worker].update(measured)
        self._memory_changed()
        self._listeners[worker.program.worker](event)

    def set_foreign(self, device: DeviceId, used: int) -> None:
        """Set the bytes of foreign memory on `device`."""
        self.foreign[device] = used
        self._memory_changed()

    def used(self, device: DeviceId) -> int:
        """Bytes really in use by all processes; readings may lag behind."""
        pool = self.pools.get(device, device)
        return self.foreign[pool] + sum(pooled(sizes, self.pools).get(pool, 0) for sizes in self._occupied.values())

    # Launcher

    def readings(self) -> Sequence[Reading]:
        return self._readings

    def forks(self, program: Program) -> bool:
        return self.fork_server and program.forks

    async def will_fork(self, program: Program) -> bool:
        if gate := self._gates.get("imports"):
            await gate.wait()
        return self.forks(program)

    async def refresh(self) -> Sequence[Reading]:
        await asyncio.sleep(0)
        self._publish()
        return self._readings

    async def download(self, program: Program, command: Download, listen: Listen) -> str:
        model = self._model(program)
        self._begin(f"download {program.model}")
        if listed := self._gates.get(f"list {program.model}"):  # the hub has not listed the files
            await listed.wait()
        listen(Progress(stage="download", done=0, total=sum(model.shards)))
        await self._take(model.download_seconds, f"download {program.model}", f"cancelled {program.model}")
        self._fail(program, model.download_fails)
        listen(Progress(stage="download", done=sum(model.shards), total=sum(model.shards)))
        self._note(f"downloaded {program.model}")
        return f"/snapshots/{command.repo or command.demo or program.model}"

    async def convert(self, program: Program, command: Convert, listen: Listen) -> Converted:
        model = self._model(program)
        self._begin(f"convert {program.model}")
        await self._take(model.convert_seconds, f"convert {program.model}", f"cancelled {program.model}")
        self._fail(program, model.convert_fails)
        self._note(f"converted {program.model}")
        return Converted(weights=sum(model.shards))

    async def estimate(self, program: Program, command: Estimate) -> Estimated:
        model = self._model(program)
        self._begin(f"estimate {program.model}")
        await self._take(model.estimate_seconds, f"estimate {program.model}", f"cancelled {program.model}")
        self._fail(program, model.estimate_fails)
        self._note(f"estimated {program.model}")
        shards = model.parts(len(command.devices))
        zeros = [0] * len(shards)
        truth = Estimated(
            weights=[size - model.shared if not model.host else size for size in shards],
            context=zeros,
            compute=zeros,
            runtime=[0 if model.host else model.shared for _ in shards],
            host=model.host,
            inherited=model.shared if self.forks(program) else 0,
        )
        return model.estimated or truth

    @asynccontextmanager
    async def serve(self, program: Program, command: Serve, place: Bytes, listen: Listen) -> AsyncIterator[FakeWorker]:
        model = self._model(program)
        forked = self.forks(program)
        if program.must_fork and not forked:
            raise NotStarted(f"{program.worker}: there is no fork server")
        self.kv_tokens[program.model] = command.kv_tokens
        sizes = model.on(place, command, forked=forked)
        self._begin(f"start {program.model}")
        assert program.worker not in self._occupied, f"{program.worker} was started twice"
        self._listeners[program.worker] = listen
        self._occupy(program, model.counted(sizes))
        worker = None
        try:
            worker = await self._load(program, model, command, sizes, listen, forked=forked)
            yield worker
        finally:
            await uncancelled(self._end(program, model, worker))

    @asynccontextmanager
    async def prepare(self, program: Program, command: Serve, listen: Listen) -> AsyncIterator[FakeEarlyProcess]:
        model = self._model(program)
        if program.must_fork and not self.forks(program):
            raise NotStarted(f"{program.worker}: there is no fork server")
        assert program.worker not in self._occupied, f"{program.worker} was started twice"
        self._note(f"prepare {program.model}")
        self._listeners[program.worker] = listen
        self._occupy(program, {})
        early = FakeEarlyProcess(self, program, model, listen)
        try:
            yield early
        finally:
            early.preparing.cancel()
            await asyncio.wait({early.preparing})
            if not early.told:
                self._note(f"dismissed {program.model}")
            await uncancelled(self._end(program, model, early.worker))

    async def _load(
        self,
        program: Program,
        model: FakeModel,
        command: Serve,
        sizes: dict[DeviceId, int],
        listen: Listen,
        *,
        forked: bool,
    ) -> FakeWorker:
        listen(Progress(stage="start"))
        await self._take(model.load_seconds, f"start {program.model}", f"abandoned {program.model}")
        self._fail(program, model.start_fails)
        self._run_out(program, sizes)
        worker = self._ready(program, model, sizes, steps=model.steps_to_come(command))
        worker.forked = forked
        listen(worker.ready)
        return worker

    @asynccontextmanager
    async def lock_files(self, files: Sequence[str]) -> AsyncIterator["FakeLockedFiles"]:
        name = Path(files[0]).parent.name
        self._note(f"locking {name}")
        key = f"locking {next(self._pids)}"
        self._occupied[key] = {CPU: self.file_bytes}
        self._memory_changed()
        locked = self.locked[name] = FakeLockedFiles()
        try:
            await self._take(self.read_seconds, f"locking {name}", "")
            self._note(f"locked {name}")
            yield locked
        finally:
            self._note(f"unlock {name}")
            del self._occupied[key], self.locked[name]
            self._memory_changed()

    async def prefetch(self, files: Sequence[str]) -> int:
        name = Path(files[0]).parent.name
        self._note(f"read {name}")
        await self._take(self.read_seconds, f"read {name}", f"stopped reading {name}")
        return self.file_bytes

    def _occupy(self, program: Program, sizes: dict[DeviceId, int]) -> None:
        self._occupied[program.worker] = sizes
        self._memory_changed()

    def _ready(self, program: Program, model: FakeModel, sizes: Bytes, *, steps: int) -> FakeWorker:
        names = {device: name for name, device in self._names(sizes).items()}
        ready = Ready(
            address="unix:/fake",
            measured={names[device]: size for device, size in sizes.items()},
            mapped=model.mapped,
            later=model.later,
            unannounced=model.unannounced + steps,
            steps=steps,
            has_warmed_up=model.warmed_up and not steps,
            capabilities=list(model.capabilities),
            n_ctx=8192,
            overhead=model.overhead,
            overhead_is_own=model.knows_its_own,
        )
        worker = FakeWorker(program, next(self._pids), sizes, ready)
        self.running[program.worker] = worker
        self._note(f"ready {program.model}")
        if model.dies_after is not None:
            asyncio.get_running_loop().call_later(model.dies_after, self._die, worker)
        return worker

    def _die(self, worker: FakeWorker) -> None:
        if not worker.stopped and not worker.is_lost:
            self._note(f"lost {worker.program.model}")
            name = worker.program.model
            worker.lose(WorkerLost(f"{name}: ended with exit code 1", cause="crashed", exit=1))

    async def _end(self, program: Program, model: FakeModel, worker: FakeWorker | None) -> None:
        self.running.pop(program.worker, None)
        self._listeners.pop(program.worker)
        if worker is not None:
            worker.stopped = True
            if not worker.is_lost:
                self._begin(f"stop {program.model}")
                await self._take(model.stop_seconds, f"stop {program.model}", "")
                self._note(f"stopped {program.model}")
        del self._occupied[program.worker]
        self._memory_changed()
        settling = min(self.reading_lag, SETTLE_SECONDS)
        await asyncio.sleep(settling)
        if worker is not None:
            worker.settle_seconds = settling

    # Memory

    def _read(self) -> list[Reading]:
        return [
            replace(_reading(device, total, self.used(device)), pool=self.pools.get(device))
            for device, total in self.totals.items()
        ]

    def _memory_changed(self) -> None:
        for device, total in self.totals.items():
            if self.used(device) > total:
                self.over_commits.append(f"{device}: {self.used(device)} of {total} bytes used")
        asyncio.get_running_loop().call_later(self.reading_lag, self._publish)

    def _publish(self) -> None:
        readings = self._read()
        if readings != self._readings:
            self._readings = readings
            self.on_reading()

    def _run_out(self, program: Program, sizes: Bytes) -> None:
        for device in sizes:
            if self.used(device) > self.totals[device]:
                self._note(f"lost {program.model}")
                message = f"{program.model}: out of memory on {device}"
                if device.index == HOST:
                    raise WorkerLost(message, cause="oom", exit=Exit.HOST_MEMORY, memory="host")
                raise WorkerLost(message, cause="oom", exit=Exit.DEVICE_MEMORY, memory="device")

    def _names(self, sizes: Bytes) -> dict[str, DeviceId]:
        """Devices by the worker's own names."""
        accelerators = [device for device in sizes if device.index >= 0]
        names = {f"cuda:{shard}": device for shard, device in enumerate(accelerators)}
        for device in sizes:
            if device.index == HOST:
                names["cpu"] = device
        return names

    # Steps

    def _model(self, program: Program) -> FakeModel:
        return self.models.setdefault(program.model, FakeModel())

    def _begin(self, entry: str) -> None:
        self.journal.append(entry)
        self._note(entry)

    def _note(self, entry: str) -> None:
        self.timeline.append((asyncio.get_running_loop().time(), entry))

    async def _take(self, seconds: float, entry: str, if_cancelled: str) -> None:
        try:
            await asyncio.sleep(seconds)
            if entry in self._gates:
                await self._gates[entry].wait()
        except asyncio.CancelledError:
            self._note(if_cancelled)
            raise

    def _fail(self, program: Program, fails: list[WorkerLost]) -> None:
        if fails:
            self._note(f"lost {program.model}")
            raise fails.pop(0)


# Real processes: the fake program of `fake_worker.py`

# For `LocalLauncher(python_argv=...)`.
FAKE_ARGV = (sys.executable, "-P", str(Path(__file__).with_name("fake_worker.py")))
DEADLINE = 60.0  # seconds; far above what anything here takes on a busy machine


def fake_program(model: str, *, number: int = 1, **told: Any) -> Program:
    """A program that runs the fake worker with this `fake_worker.Behaviour`; fields of `Program` are taken as such."""
    fields = {name: told.pop(name) for name in Program.__dataclass_fields__ if name in told}
    env = {"FAKE_WORKER": json.dumps(told)} | fields.pop("env", {})
    return Program(model=model, worker=f"{model}#{number}", env=env, **fields)


class Journal:
    """The journal of fake workers: a FIFO at `path`, read by the running loop. Their children and those of other
    routers may write to it as well."""

    def __init__(self, path: Path):
        os.mkfifo(path, 0o600)
        self.path = str(path)
        self.lines: list[str] = []
        self._taken: set[int] = set()
        self._rest = b""
        self._changed = asyncio.Event()
        self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # a writer of our own, so that there is no end of file
        asyncio.get_running_loop().add_reader(self._pipe, self._read)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe)
        os.close(self._pipe)

    async def line(self, start: str, *, within: float = DEADLINE) -> str:
        """Returns once there is a line that begins with `start` and was not returned before: the rest of it."""
        async with asyncio.timeout(within):
            while True:
                for number, line in enumerate(self.lines):
                    if line.startswith(start) and number not in self._taken:
                        self._taken.add(number)
                        return line[len(start) :].strip()
                self._changed.clear()
                await self._changed.wait()

    async def pid(self, of: str = "started", *, within: float = DEADLINE) -> int:
        """The number in the next line of `started` or `grandchild`."""
        return int(await self.line(of, within=within))

    def _read(self) -> None:
        *lines, self._rest = (self._rest + os.read(self._pipe, 1 << 16)).split(b"\n")
        self.lines += [line.decode() for line in lines]
        self._changed.set()


async def ended(pid: int, *, within: float = DEADLINE) -> None:
    """Return once process `pid` has ended, which need not be our child. Raises TimeoutError."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_reader(watch, over.set)
    try:
        async with asyncio.timeout(within):
            await over.wait()
    finally:
        loop.remove_reader(watch)
        os.close(watch)
