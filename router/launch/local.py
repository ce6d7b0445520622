"""The launcher of this machine: download, convert, estimate, serve.

Socket paths and tokens are made here, and only the worker gets them. The parts: `router.launch.spawn` (start and end of
a process), `router.launch.worker_process` (a serving worker), `router.launch.process_table` (all processes),
`router.launch.readings` (devices) and `router.launch.page_lock` (files in main memory).
"""

import asyncio
import contextlib
import logging
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from router.launch import page_lock
from router.launch.devices import OomKills, count_oom_kills
from router.launch.exit_causes import Verdict, lost_by_exit, lost_by_verdict
from router.launch.fork_server import FIRST_PAUSE
from router.launch.interface import Listen, LockedFiles, Program, Verb
from router.launch.process import UNKNOWN_EXIT, uncancelled
from router.launch.process_table import ProcessTable, reap_ended_orphans
from router.launch.readings import Claim, DeviceSampler, ReadableDevices, SharedReservations
from router.launch.spawn import PYTHON_ARGV, Spawner, may_fork
from router.launch.worker_process import (
    Heartbeat,
    LaunchServices,
    LocalWorker,
    Watchdog,
    WorkerStart,
    device_names,
    model_devices,
)
from router.planner.ledger import MAIN_MEMORY, Bytes, DeviceId, Reading
from worker.protocol.argv import Command, Convert, Download, Estimate, Serve
from worker.protocol.events import Converted, Downloaded, Estimated, Event, Exit

log = logging.getLogger("router.launch.local")

FinalEvent = TypeVar("FinalEvent", Downloaded, Converted, Estimated)

SAMPLE_INTERVAL = 1.0  # seconds between two readings of the devices


class LocalLauncher:
    """Runs workers on this machine, from entering the block to leaving it.

    Entering takes the runtime folder (raises RunFolderError) and reads the devices once. Leaving kills and reaps what
    still runs; the fleet should have stopped its workers before. Use it in the program's main thread: the kernel ends
    workers with the thread that started them.
    """

    def __init__(
        self,
        *,
        devices: ReadableDevices,
        runtime_dir: Path,
        environ: Mapping[str, str],
        shared_folder: Path | None = None,
        offline: bool = False,
        hf_token: str = "",
        download_silence: float = 60.0,
        conversion_silence: float = 600.0,
        estimate_timeout: float = 120.0,
        python_argv: Sequence[str] = PYTHON_ARGV,
        fork_server: bool = False,
        fork_server_pause: float = FIRST_PAUSE,
    ):
        """
        environ: the router's own environment; an allow-list of it is passed on.
        shared_folder: in which the routers of this machine share their reservations; None: there is no other.
        download_silence, conversion_silence: seconds without any event after which one counts as dead. A conversion
            reports every quarter of a gigabyte; 10 minutes are a guess for a machine that is busy with other things.
        estimate_timeout: seconds that an estimate may take in all.
        python_argv: the command of the worker program, the interpreter first.
        fork_server: True to fork workers where that is possible.
        fork_server_pause: seconds until a fork server that died is replaced for the first time.
        """
        self.on_reading: Callable[[], None] = lambda: None  # called on the event loop after each new reading
        self._download_silence = download_silence
        self._conversion_silence = conversion_silence
        self._estimate_timeout = estimate_timeout
        self._ooms = OomKills(count_oom_kills)
        self._processes = ProcessTable(runtime_dir)
        self._spawner = Spawner(
            self._processes,
            environ=environ,
            offline=offline,
            hf_token=hf_token,
            python_argv=python_argv,
            fork_server_pause=fork_server_pause,
        )
        self.fork_servers = self._spawner.fork_servers
        self._wants_fork_server = fork_server
        shared_bytes = (lambda: self.fork_servers.resident) if fork_server else (lambda: 0)
        self._shared = SharedReservations(
            devices, shared_folder, shared_bytes=shared_bytes, latest=lambda: self._sampler.latest
        )
        self._sampler = DeviceSampler(self._shared, lambda: self.on_reading())
        self._services = LaunchServices(self._sampler, self._ooms, self.fork_servers)
        self._sampling: asyncio.Task[None] | None = None
        # One estimate at a time: its process takes 360 MiB of main memory without a reservation, which the margin
        # covers as long as there are not several of them.
        self._estimating = asyncio.Lock()
        self._entered = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else the kernel reaps, and exit codes are lost
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._processes.opened())
            self._shared.open()
            stack.callback(self._shared.close)
            stack.callback(self._sampler.close)
            await self._sampler.start()
            self._entered = stack.pop_all()
        self._sampling = asyncio.create_task(self._sample(), name="devices")
        self._sampling.add_done_callback(_report_failure)
        if self._wants_fork_server:
            self.fork_servers.start().add_done_callback(_report_failure)
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
        await self._processes.wait_for_exits(except_pid=self.fork_servers.pid)
        await self.fork_servers.stop()
        await self._entered.aclose()

    def kill_all(self) -> None:
        """Send SIGKILL to every group at once, for a router that must not wait. Their blocks end as usual."""
        self._processes.kill(except_pid=self.fork_servers.pid)

    # Readings

    def readings(self) -> Sequence[Reading]:
        """The latest reading of each device. One that cannot be read is shown as full."""
        return self._sampler.latest

    async def refresh(self) -> Sequence[Reading]:
        return await self._sampler.refresh()

    def forks(self, program: Program) -> bool:
        """True if a worker of `program` would be forked now: it may be, and the fork server has not refused lately."""
        return self.fork_servers.is_reliable and self._spawner.can_fork(program, "serve")

    async def will_fork(self, program: Program) -> bool:
        if may_fork(program, "serve"):
            await self.fork_servers.imported()
        return self.forks(program)

    async def _sample(self) -> None:
        """Check devices, the kernel's OOM kills and orphans that ended by themselves, at regular intervals."""
        while True:
            await asyncio.sleep(SAMPLE_INTERVAL)
            await self._sampler.sample()
            self._ooms.sample(asyncio.get_running_loop().time())
            try:
                reap_ended_orphans()
            except OSError as error:  # no descriptor left; tried again next time
                log.warning("cannot look for orphans: %s", error)

    # Verbs

    async def download(self, program: Program, command: Download, listen: Listen) -> str:
        silence = self._download_silence
        return (await self._run_to_end(program, command, "download", Downloaded, silence, listen)).snapshot

    async def convert(self, program: Program, command: Convert, listen: Listen) -> Converted:
        return await self._run_to_end(program, command, "convert", Converted, self._conversion_silence, listen)

    async def estimate(self, program: Program, command: Estimate) -> Estimated:
        async with self._estimating:
            return await self._run_to_end(program, command, "estimate", Estimated, self._estimate_timeout)

    @asynccontextmanager
    async def serve(self, program: Program, command: Serve, place: Bytes, listen: Listen) -> AsyncIterator[LocalWorker]:
        names = device_names(place)
        command = replace(command, devices=model_devices(names))
        with self._shared.claim(place) as claim:
            async with self._worker(program, command, names, claim, listen) as worker:
                await worker.start()
                yield worker

    @asynccontextmanager
    async def prepare(self, program: Program, command: Serve, listen: Listen) -> AsyncIterator[LocalWorker]:
        names = device_names({MAIN_MEMORY: 0})
        with self._shared.claim({}) as claim:
            async with self._worker(program, replace(command, prepare=True), names, claim, listen) as worker:
                yield worker

    @asynccontextmanager
    async def _worker(
        self, program: Program, command: Serve, names: Mapping[str, DeviceId], claim: Claim, listen: Listen
    ) -> AsyncIterator[LocalWorker]:
        """A serving process that has just been started. Leaving the block returns once its memory is free again."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        tag = self._processes.folder.tag(program.model, program.worker)
        token = secrets.token_urlsafe(32)
        self._processes.folder.restore()
        command = replace(command, listen=f"unix:{self._processes.folder.socket(tag)}")
        visible = "" if command.prepare else self._sampler.visible(names)
        start = WorkerStart(
            program=program, command=command, token=token, names=names, claim=claim, listen=listen, began=began
        )
        worker = None
        try:
            async with self._spawner.running(program, command, "serve", tag, token, visible) as child:
                worker = LocalWorker(start, child, self._services)
                try:
                    yield worker
                finally:
                    await uncancelled(worker.end())
        finally:
            # Outside the block above: the driver returns memory some time after the process is reaped.
            ended = loop.time()
            await uncancelled(self._sampler.settle(list((worker.names if worker is not None else names).values())))
            if worker is not None:
                worker.settle_seconds = loop.time() - ended

    async def _run_to_end(
        self,
        program: Program,
        command: Command,
        verb: Verb,
        kind: type[FinalEvent],
        silence: float,
        listen: Listen | None = None,
    ) -> FinalEvent:
        """Run a process to its end and return its last event of `kind`. Raises WorkerLost.

        `silence`: seconds without an event, also a repeated one: a process may wait for another one that does the same
        work. Without `listen`, seconds in all.
        """
        loop = asyncio.get_running_loop()
        heartbeat = Heartbeat(loop.time(), start_timeout=silence, repeats_count=True)
        tag = self._processes.folder.tag(program.model, program.worker)
        results: list[FinalEvent] = []
        verdicts: list[Verdict] = []

        def on_event(event: Event) -> None:
            if isinstance(event, kind):
                results.append(event)
            if listen is not None:
                heartbeat.record(event, loop.time())
                listen(event)

        async with self._spawner.running(program, command, verb, tag, secrets.token_urlsafe(32)) as child:
            child.on_event = on_event
            watchdog = Watchdog(child, heartbeat, verdicts.append)
            try:
                # Shielded: the child owns this future, and a cancellation would lose the exit code.
                code = await asyncio.shield(child.exited)
            finally:
                watchdog.cancel()
            # A verdict comes first: the exit code of a process that the watchdog killed is only SIGKILL.
            if verdicts:
                raise lost_by_verdict(program, verb, verdicts[0], child.cause)
            if code not in (Exit.OK, UNKNOWN_EXIT) or not results:
                oom_killed = self._ooms.explains(code, loop.time())
                raise lost_by_exit(program, verb, code, child.cause, oom_killed=oom_killed)
            return results[-1]

    # Files in main memory

    def lock_files(self, files: Sequence[str]) -> AbstractAsyncContextManager[LockedFiles]:
        return page_lock.lock(files)

    async def prefetch(self, files: Sequence[str]) -> int:
        return await page_lock.read(files)


def _report_failure(task: "asyncio.Task[None]") -> None:
    """Report that a task ended that should never end. asyncio would do so only when the task is collected."""
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler({"message": "readings have ended", "exception": error, "task": task})
