"""The launcher of this machine: download, convert, estimate, serve.

Each run of a program is a block: spawn the process, record it, send its token. However the block ends, the process
group is killed and reaped and its record is removed before the block is left. Socket paths and tokens are made here,
and only the worker gets them.

The parts: `router.launch.process_table` (processes), `router.launch.fork_server` (start by fork),
`router.launch.page_lock` (files in main memory), `router.launch.device_sampler` and `router.launch.shared_reservations`
(devices).
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from router.launch import environment as environments
from router.launch import reaper
from router.launch.device_sampler import DeviceSampler, ReadableDevices
from router.launch.environment import Verb
from router.launch.exit_causes import OomKills, counted, lost_at_spawn, lost_by_exit, lost_by_verdict
from router.launch.fork_server import FIRST_PAUSE, ForkServerProcess, ForkServerSupervisor
from router.launch.heartbeat import Heartbeat, Verdict, Watchdog
from router.launch.interface import Listen, NotForked, NotLocked, Program
from router.launch.output import Log
from router.launch.page_lock import PageLocker, PageLockFailed
from router.launch.process import Child, uncancelled
from router.launch.process_table import ProcessTable
from router.launch.shared_reservations import Claim, SharedReservations
from router.launch.worker_process import LocalEarlyProcess, LocalWorker, device_names, model_devices
from router.planner.ledger import HOST, LOCAL, Bytes, DeviceId, Reading
from worker.protocol.argv import Command, Convert, Download, Estimate, ModelOptions, Serve, to_argv
from worker.protocol.events import Converted, Downloaded, Estimated, Event, Exit

log = logging.getLogger("router.launch.interface")

FinalEvent = TypeVar("FinalEvent", Downloaded, Converted, Estimated)

# The command of a worker. `-P` keeps the current folder out of its imports.
PYTHON_ARGV = (sys.executable, "-P", "-m", "worker")
# Seconds without an event after which a conversion counts as dead. It reports every quarter of a gigabyte; 10 minutes
# for that is a guess for a machine that is busy with other things.
CONVERT_SILENCE = 600.0


class LocalLauncher:
    """Runs workers on this machine, from entering the block to leaving it.

    Entering takes the runtime folder (raises RunFolderError), kills what an earlier router left, and reads the devices
    once. Leaving kills and reaps what still runs; the fleet should have stopped its workers before. Use it in the
    program's main thread: the kernel ends workers with the thread that started them.
    """

    def __init__(
        self,
        *,
        devices: ReadableDevices,
        runtime_dir: Path,
        environ: Mapping[str, str],
        beside: Path | None = None,
        on_reading: Callable[[], None] = lambda: None,
        offline: bool = False,
        hf_token: str = "",
        sample_interval: float = 1.0,
        download_silence: float = 60.0,
        estimate_timeout: float = 120.0,
        python_argv: Sequence[str] = PYTHON_ARGV,
        fork_server: bool = False,
        fork_server_pause: float = FIRST_PAUSE,
    ):
        """
        environ: the router's own environment; an allow-list of it is passed on.
        beside: the folder in which the routers of this machine share their reservations; None: there is no other.
        on_reading: called on the event loop after each new reading.
        sample_interval: seconds between readings.
        download_silence: seconds without any event after which a download counts as dead.
        estimate_timeout: seconds that an estimate may take in all.
        python_argv: the command of the worker program, the interpreter first.
        fork_server: True to fork workers where that is possible.
        fork_server_pause: seconds until a fork server that died is replaced for the first time.
        """
        self._environ = dict(environ)
        self._offline = offline
        self._hf_token = hf_token
        self._interval = sample_interval
        self._download_silence = download_silence
        self._estimate_timeout = estimate_timeout
        self._argv = tuple(python_argv)
        self._shared = SharedReservations(devices, beside)
        self._sampler = DeviceSampler(self._shared, on_reading)
        self._ooms = OomKills(counted)
        self._processes = ProcessTable(runtime_dir)
        self._page_locker = PageLocker(self._processes.add_helper, self._processes.remove_helper)
        self._wants_fork_server = fork_server
        self._fork_servers = ForkServerSupervisor(self._processes, self._argv, self._fork_server_env, fork_server_pause)
        self._sampling: asyncio.Task[None] | None = None
        # One estimate at a time: its process takes 360 MiB of main memory without a reservation, which the margin
        # covers as long as there are not several of them.
        self._estimating = asyncio.Lock()
        self._entered = contextlib.ExitStack()

    @property
    def on_reading(self) -> Callable[[], None]:
        """Called after each new reading. May be assigned later, as the fleet is made after the launcher."""
        return self._sampler.on_reading

    @on_reading.setter
    def on_reading(self, call: Callable[[], None]) -> None:
        self._sampler.on_reading = call

    @property
    def fork_server(self) -> ForkServerProcess | None:
        """The fork server that runs now; it may not be warm yet."""
        return self._fork_servers.server

    @property
    def on_fork_server(self) -> Callable[[], None]:
        """Called when the fork server has imported modules; from the first time on it can fork."""
        return self._fork_servers.on_warm

    @on_fork_server.setter
    def on_fork_server(self, call: Callable[[], None]) -> None:
        self._fork_servers.on_warm = call

    @property
    def problems(self) -> Mapping[DeviceId, str]:
        """Devices that are shown as full because they cannot be read, and the reason."""
        return self._sampler.problems

    async def __aenter__(self) -> Self:
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else the kernel reaps, and exit codes are lost
        with contextlib.ExitStack() as stack:
            self._processes.open()
            stack.callback(self._processes.close)
            self._shared.open()
            stack.callback(self._shared.close)
            stack.callback(self._page_locker.close)
            stack.callback(self._sampler.close)
            await self._sampler.start()
            self._entered = stack.pop_all()
        self._sampling = asyncio.create_task(self._sample(), name="devices")
        self._sampling.add_done_callback(_report_failure)
        if self._wants_fork_server:
            self._fork_servers.start().add_done_callback(_report_failure)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await uncancelled(self._close())

    async def _close(self) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.wait({self._sampling})
        # The fork server ends last: it is the parent of the forked workers, so only it can reap them.
        self.kill_all()
        await self._processes.wait_for_exits(besides=self._fork_servers.pid)
        await self._fork_servers.stop()
        self._entered.close()

    def kill_all(self) -> None:
        """Send SIGKILL to every group at once, for a router that must not wait. Their blocks end as usual."""
        self._processes.kill(besides=self._fork_servers.pid)

    # Readings

    def readings(self) -> Sequence[Reading]:
        """The latest reading of each device. One that cannot be read is shown as full, see `problems`."""
        return self._sampler.latest

    async def refresh(self) -> Sequence[Reading]:
        return await self._sampler.refresh()

    def forks(self, program: Program) -> bool:
        """True if a worker of `program` would be forked now: it may be, and the fork server has not refused lately."""
        return self._fork_servers.is_reliable and self._can_fork(program, "serve")

    def _can_fork(self, program: Program, verb: Verb) -> bool:
        return self._fork_servers.can_fork and may_fork(program, verb)

    async def _sample(self) -> None:
        """Check devices, the kernel's OOM kills and orphans that ended by themselves, at regular intervals."""
        while True:
            await asyncio.sleep(self._interval)
            await self._sampler.sample()
            self._ooms.sample(asyncio.get_running_loop().time())
            try:
                reaper.reap_ended()
            except OSError as error:  # no descriptor left; tried again next time
                log.warning("cannot look for orphans: %s", error)

    # Verbs

    async def download(self, program: Program, command: Download, listen: Listen) -> str:
        loop = asyncio.get_running_loop()
        silence = self._download_silence
        heartbeat = Heartbeat(loop.time(), start_timeout=silence, stall_timeout=silence, repeats_count=True)

        def on_event(event: Event) -> None:
            heartbeat.record(event, loop.time())
            listen(event)

        result = await self._run_to_end(program, command, Downloaded, heartbeat, on_event)
        return result.snapshot

    async def convert(self, program: Program, command: Convert, listen: Listen) -> Converted:
        now = asyncio.get_running_loop().time()
        heartbeat = Heartbeat(now, start_timeout=CONVERT_SILENCE, stall_timeout=CONVERT_SILENCE)
        return await self._run_to_end(program, command, Converted, heartbeat, listen)

    async def estimate(self, program: Program, command: Estimate) -> Estimated:
        async with self._estimating:
            now = asyncio.get_running_loop().time()
            limit = self._estimate_timeout
            # Events are not recorded in this heartbeat, so no event prolongs the time limit.
            heartbeat = Heartbeat(now, start_timeout=limit, stall_timeout=limit)
            return await self._run_to_end(program, command, Estimated, heartbeat, lambda event: None)

    @asynccontextmanager
    async def serve(self, program: Program, command: Serve, place: Bytes, listen: Listen) -> AsyncIterator[LocalWorker]:
        names = device_names(place)
        command = replace(command, devices=model_devices(names))
        with self._shared.claim(place) as claim:
            async with self._worker(program, command, names, listen, claim) as worker:
                await self._started(worker)
                yield worker

    @asynccontextmanager
    async def prepare(self, program: Program, command: Serve, listen: Listen) -> AsyncIterator[LocalEarlyProcess]:
        names = device_names({DeviceId(LOCAL, HOST): 0})
        with self._shared.claim({}) as claim:
            async with self._worker(program, replace(command, prepare=True), names, listen, claim) as worker:
                yield LocalEarlyProcess(worker, self._visible, self._started, claim)

    @asynccontextmanager
    async def _worker(
        self, program: Program, command: Serve, names: Mapping[str, DeviceId], listen: Listen, claim: Claim
    ) -> AsyncIterator[LocalWorker]:
        """A serving process that has just been started. Leaving the block returns once its memory is free again."""
        tag = self._processes.tag(program)
        socket = self._processes.socket(tag)
        token = secrets.token_urlsafe(32)
        command = replace(command, listen=f"unix:{socket}")
        began = asyncio.get_running_loop().time()
        visible = "" if command.prepare else self._visible(names)
        worker = None
        try:
            async with self._running(program, command, "serve", tag, token, visible) as child:
                worker = LocalWorker(
                    program,
                    command,
                    child,
                    names,
                    socket,
                    token,
                    listen,
                    claim,
                    self._ooms,
                    began=began,
                    forked=self._fork_servers.has_forked(child.pid),
                )
                try:
                    yield worker
                finally:
                    await uncancelled(worker.end())
        finally:
            # Outside the block above: the driver returns memory some time after the process is reaped.
            loop = asyncio.get_running_loop()
            ended = loop.time()
            await uncancelled(self._sampler.settle(list((worker.names if worker is not None else names).values())))
            if worker is not None:
                worker.settle_seconds = loop.time() - ended

    async def _started(self, worker: LocalWorker) -> None:
        """Return once the worker is ready. Has the fork server import what it used, for the next one of its family.

        Raises WorkerLost.
        """
        await worker.start()
        if self.fork_server is not None:
            self.fork_server.warm(worker.ready.modules)

    async def _run_to_end(
        self, program: Program, command: Command, kind: type[FinalEvent], heartbeat: Heartbeat, listen: Listen
    ) -> FinalEvent:
        """Run a process to its end and return its last event of `kind`. Raises WorkerLost."""
        verb = _verb(command)
        tag = self._processes.tag(program)
        results: list[FinalEvent] = []
        verdicts: list[Verdict] = []

        def on_event(event: Event) -> None:
            if isinstance(event, kind):
                results.append(event)
            listen(event)

        async with self._running(program, command, verb, tag, secrets.token_urlsafe(32), "") as child:
            child.on_event = on_event
            watchdog = Watchdog(child, heartbeat, verdicts.append)
            try:
                code = await asyncio.shield(child.exited)
            finally:
                watchdog.cancel()
            if verdicts:
                raise lost_by_verdict(program, verb, verdicts[0], child.cause)
            if code != Exit.OK or not results:
                raise lost_by_exit(program, verb, code, child.cause, oom_killed=self._oom_killed(code))
            return results[-1]

    # Files in main memory

    @asynccontextmanager
    async def keep(self, files: Sequence[str]) -> AsyncIterator["LocalLockedFiles"]:
        try:
            async with self._page_locker.lock(files) as lost:
                yield LocalLockedFiles(lost)
        except PageLockFailed as failed:
            raise NotLocked(str(failed)) from None

    async def read_ahead(self, files: Sequence[str]) -> int:
        try:
            return await self._page_locker.read(files)
        except PageLockFailed as failed:
            raise NotLocked(str(failed)) from None

    # Processes

    @asynccontextmanager
    async def _running(
        self, program: Program, command: Command, verb: Verb, tag: str, token: str, visible: str
    ) -> AsyncIterator[Child]:
        """A child process that has its token, for the length of the block. `visible`: the devices that it may use."""
        try:
            # Not cancelled between fork and registration: a process without an entry in the table would be lost.
            await uncancelled(self._spawn(program, command, verb, tag, token, visible))
            child = self._processes.child(tag)
            child.send_token(token)
            yield child
        finally:
            await uncancelled(self._processes.end(tag))

    async def _spawn(self, program: Program, command: Command, verb: Verb, tag: str, token: str, visible: str) -> None:
        """Start a process by fork if possible, else by exec, and register it. Raises WorkerLost, NotForked."""
        threads = command.threads if isinstance(command, ModelOptions) else 1
        env = self._environment(verb, tag, visible, program.env, threads)
        name = program.worker if verb == "serve" else f"{program.worker} ({verb})"
        output = Log(program.model, name, secrets=(token, *environments.secrets(env)))
        child = None
        if self._can_fork(program, verb):
            child = await self._fork_servers.spawn(command, env, name=name, output=output)
        if child is None and verb == "serve" and program.must_fork:
            raise NotForked(f"{program.worker}: no fork server can fork it, and it may not be executed instead")
        if child is None:
            argv = to_argv(replace(command, supervised=True, parent_pid=os.getpid()))
            argv = [program.python or self._argv[0], *self._argv[1:], *argv]
            try:
                # Downloads go to the shared hub cache, so their files keep the user's umask.
                child = Child.spawn(argv, env, name=name, log=output, private=verb != "download")
            except OSError as error:
                raise lost_at_spawn(program, verb, argv[0], error) from error
        self._processes.add(tag, child, program, verb)

    def _fork_server_env(self, tag: str) -> dict[str, str]:
        """The environment of a fork server. Its workers get their own with each fork."""
        return self._environment("serve", tag, "", {}, 1)

    def _environment(
        self, verb: Verb, tag: str, visible: str, extra: Mapping[str, str], threads: int
    ) -> dict[str, str]:
        return environments.environment(
            self._environ,
            verb,
            tag=tag,
            visible=visible,
            threads=threads,
            extra=extra,
            offline=self._offline,
            hf_token=self._hf_token,
        )

    def _visible(self, names: Mapping[str, DeviceId]) -> str:
        """CUDA_VISIBLE_DEVICES for these devices, by UUID where the driver gives one."""
        uuids = {reading.id: reading.uuid for reading in self._sampler.latest}
        accelerators = [device for device in names.values() if device.index >= 0]
        return ",".join(uuids.get(device) or str(device.index) for device in accelerators)

    def _oom_killed(self, code: int) -> bool:
        return code == -signal.SIGKILL and self._ooms.happened(asyncio.get_running_loop().time())


class LocalLockedFiles:
    """Files that the page locker holds. See `LockedFiles`."""

    def __init__(self, lost: "asyncio.Future[None]"):
        self._lost = lost

    async def lost(self) -> NotLocked:
        await asyncio.shield(self._lost)
        return NotLocked("the process that locked the files has ended")


def _verb(command: Command) -> Verb:
    """The verb of a process that runs to its end."""
    match command:
        case Download():
            return "download"
        case Convert():
            return "convert"
    return "estimate"


def may_fork(program: Program, verb: Verb) -> bool:
    """True if a process of `verb` behaves the same forked or executed.

    A download does not: it uses the network, and the libraries in the fork server are set to work offline.
    """
    return verb != "download" and program.may_fork


def _report_failure(task: "asyncio.Task[None]") -> None:
    """Report that a task ended that should run for ever. asyncio would do so only when the task is collected."""
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler({"message": "readings have ended", "exception": error, "task": task})
