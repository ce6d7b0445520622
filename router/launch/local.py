"""This machine: download, estimate, serve.

Each run of a program is a block: spawn, record, token; and whatever ends the block, the group is killed, reaped and
struck off before it is left. Sockets and tokens are made here and told to nobody but the worker.
"""

import asyncio
import contextlib
import logging
import math
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
from router.launch import fork_server as nurseries
from router.launch import reaper
from router.launch.device_sampler import Devices, Probe
from router.launch.environment import Verb
from router.launch.exit_causes import how_it_ended, lost_at_birth, lost_by_exit, lost_by_verdict
from router.launch.fork_server import Nursery, NurseryRefused
from router.launch.guard import Guard
from router.launch.heartbeat import Verdict, Vitals
from router.launch.interface import Listen, NotForked, NotHeld, Program
from router.launch.oom import OomKills, counted
from router.launch.page_lock import Keeper, KeeperFailed
from router.launch.pidfile import RunFolder, RunFolderError
from router.launch.process import Child, Log, uncancelled
from router.launch.shared_reservations import Claim, Neighbours
from router.launch.watchdog import Watch
from router.launch.worker_process import LocalStandby, LocalWorker, device_names, model_devices
from router.planner.ledger import HOST, LOCAL, Bytes, DeviceId, Reading
from worker.protocol.argv import Command, Convert, Download, Estimate, ModelOptions, Serve, to_argv
from worker.protocol.events import Converted, Downloaded, Estimated, Event, Exit

log = logging.getLogger("router.launch.interface")

Answer = TypeVar("Answer", Downloaded, Converted, Estimated)

PYTHON_ARGV = (sys.executable, "-P", "-m", "worker")
"""How a worker is started: `-P` keeps the current folder out of its imports."""
CLOSE_TIMEOUT = 5.0
CONVERT_SILENCE = 600.0
"""Seconds in which a conversion that goes on writes another quarter of a gigabyte, however busy the machine is."""
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
"""Seconds until a nursery that has ended is replaced: twice as long each time, from the first again after one that
lived so long."""
REFUSAL_PAUSE = 60.0
"""Seconds for which a nursery that would not fork is not counted on."""


class LocalLauncher:
    """Runs workers on this machine, from entering the block to leaving it.

    Entering takes the runtime folder (raises RunFolderError), kills what an earlier router left, and reads the devices
    once. Leaving kills and reaps whatever still runs; the fleet should have stopped its workers before. Use it in the
    program's main thread: workers die with the thread that started them.
    """

    def __init__(
        self,
        *,
        devices: Devices,
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
        nursery: bool = False,
        nursery_pause: float = FIRST_PAUSE,
    ):
        """`environ`: the router's own environment, of which an allow-list is handed on; `beside`: a folder in which
        routers of this machine tell each other what they set aside; `on_reading` is called on the
        loop after each new reading; `sample_interval`: seconds between them; `download_silence`: seconds without any
        event after which a download counts as dead; `estimate_timeout`: seconds that an estimate may take in all;
        `python_argv`: how the worker program is started, the interpreter first; `nursery`: whether
        workers are forked where that is possible; `nursery_pause`: seconds until one that died is replaced for the
        first time."""
        self._environ = dict(environ)
        self._offline = offline
        self._hf_token = hf_token
        self._interval = sample_interval
        self._download_silence = download_silence
        self._estimate_timeout = estimate_timeout
        self._argv = tuple(python_argv)
        self._folder = RunFolder(runtime_dir)
        self._neighbours = Neighbours(devices, beside)
        self._probe = Probe(self._neighbours, on_reading)
        self._ooms = OomKills(counted)
        self._children: dict[str, Child] = {}
        self.nursery: Nursery | None = None
        """The one that runs now; it may not be warm yet."""
        self.on_nursery: Callable[[], None] = lambda: None
        """Called when the nursery has imported something: from the first time on it forks."""
        self._guard: Guard | None = None
        self._watching: asyncio.Task[None] | None = None
        self._wants_nursery = nursery
        self._nursery_pause = nursery_pause
        self._nursing: asyncio.Task[None] | None = None
        self._refused_at = -math.inf
        """When a nursery would not fork, by the loop's clock."""
        self._estimating = asyncio.Lock()
        """One at a time: the 360 MiB that an estimate's process takes of main memory are charged to nobody, and lie
        within the margin as long as there are not several of them."""
        self._keeper = Keeper(self._keeper_born, self._keeper_gone)
        self._entered = contextlib.ExitStack()

    @property
    def on_reading(self) -> Callable[[], None]:
        """May be assigned, once there is a fleet to tell."""
        return self._probe.on_reading

    @on_reading.setter
    def on_reading(self, call: Callable[[], None]) -> None:
        self._probe.on_reading = call

    @property
    def problems(self) -> Mapping[DeviceId, str]:
        """Devices that are shown as full because they cannot be read, and why."""
        return self._probe.problems

    async def __aenter__(self) -> Self:
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else the kernel reaps, and exit codes are lost
        with contextlib.ExitStack() as stack:
            for survivor in self._folder.open():
                log.warning("killed %s (process %d), left by an earlier router", survivor.worker, survivor.pid)
            stack.callback(self._folder.close)
            self._neighbours.open()
            stack.callback(self._neighbours.close)
            had_adopted = reaper.adopt()
            stack.callback(reaper.adopt, whether=had_adopted)
            self._guard = Guard()
            stack.callback(self._close_guard)
            reaper.known.add(self._guard.pid)
            stack.callback(self._keeper.close)
            stack.callback(self._probe.close)
            await self._probe.start()
            self._entered = stack.pop_all()
        self._watching = asyncio.create_task(self._watch(), name="devices")
        self._watching.add_done_callback(_tell_failure)
        if self._wants_nursery:
            self._nursing = asyncio.create_task(self._keep_nursery(), name=nurseries.NAME)
            self._nursing.add_done_callback(_tell_failure)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await uncancelled(self._close())

    def kill_all(self) -> None:
        """SIGKILL to every group, at once: for a router that may not wait. Their blocks end as usual."""
        for child in self._workers():
            child.kill()

    # Readings

    def readings(self) -> Sequence[Reading]:
        """The latest reading of each device; one that cannot be read is shown as full, see `problems`."""
        return self._probe.latest

    async def refresh(self) -> Sequence[Reading]:
        return await self._probe.refresh()

    def forks(self, program: Program) -> bool:
        """Whether a worker of `program` would be forked, were it started now: it may be, and there is a nursery that
        has refused nobody of late."""
        is_willing = asyncio.get_running_loop().time() - self._refused_at > REFUSAL_PAUSE
        return is_willing and self._can_fork(program, "serve")

    def _can_fork(self, program: Program, verb: Verb) -> bool:
        return self.nursery is not None and self.nursery.can_fork and may_fork(program, verb)

    # Verbs

    async def download(self, program: Program, command: Download, listen: Listen) -> str:
        loop = asyncio.get_running_loop()
        silence = self._download_silence
        vitals = Vitals(loop.time(), start_timeout=silence, stall_timeout=silence, repeats_count=True)

        def hear(event: Event) -> None:
            vitals.hear(event, loop.time())
            listen(event)

        answer = await self._ask(program, command, Downloaded, vitals, hear)
        return answer.snapshot

    async def convert(self, program: Program, command: Convert, listen: Listen) -> Converted:
        now = asyncio.get_running_loop().time()
        vitals = Vitals(now, start_timeout=CONVERT_SILENCE, stall_timeout=CONVERT_SILENCE)
        return await self._ask(program, command, Converted, vitals, listen)

    async def estimate(self, program: Program, command: Estimate) -> Estimated:
        async with self._estimating:
            now = asyncio.get_running_loop().time()
            limit = self._estimate_timeout  # of which no event buys more
            vitals = Vitals(now, start_timeout=limit, stall_timeout=limit)
            return await self._ask(program, command, Estimated, vitals, lambda event: None)

    @asynccontextmanager
    async def serve(self, program: Program, command: Serve, place: Bytes, listen: Listen) -> AsyncIterator[LocalWorker]:
        names = device_names(place)
        command = replace(command, devices=model_devices(names))
        with self._neighbours.claim(place) as claim:
            async with self._born(program, command, names, listen, claim) as worker:
                await self._started(worker)
                yield worker

    @asynccontextmanager
    async def prepare(self, program: Program, command: Serve, listen: Listen) -> AsyncIterator[LocalStandby]:
        names = device_names({DeviceId(LOCAL, HOST): 0})
        with self._neighbours.claim({}) as claim:
            async with self._born(program, replace(command, prepare=True), names, listen, claim) as worker:
                yield LocalStandby(worker, self._visible, self._started, claim)

    @asynccontextmanager
    async def _born(
        self, program: Program, command: Serve, names: Mapping[str, DeviceId], listen: Listen, claim: Claim
    ) -> AsyncIterator[LocalWorker]:
        """A worker that is about to start, for the length of the block; left, all it had is given back."""
        tag = self._folder.tag(program.model, program.worker)
        socket = self._folder.socket(tag)
        token = secrets.token_urlsafe(32)
        command = replace(command, listen=f"unix:{socket}")
        began = asyncio.get_running_loop().time()
        visible = "" if command.prepare else self._visible(names)
        worker = None
        try:
            async with self._running(program, command, "serve", tag, token, visible) as child:
                forked = self.nursery is not None and self.nursery.has(child.pid)
                worker = LocalWorker(
                    program, command, child, names, socket, token, listen, claim, self._ooms, began=began, forked=forked
                )
                try:
                    yield worker
                finally:
                    await uncancelled(worker.end())
        finally:
            loop = asyncio.get_running_loop()
            ended = loop.time()
            await uncancelled(self._probe.settle(list((worker.names if worker is not None else names).values())))
            if worker is not None:
                worker.settle_seconds = loop.time() - ended

    async def _started(self, worker: LocalWorker) -> None:
        """Returns once it is ready, and the next of its family will be sooner. Raises WorkerLost."""
        await worker.start()
        if self.nursery is not None:
            self.nursery.warm(worker.ready.modules)

    async def _ask(
        self, program: Program, command: Command, kind: type[Answer], vitals: Vitals, listen: Listen
    ) -> Answer:
        """Run a process to its end; returns the last event of `kind` that it said. Raises WorkerLost."""
        verb = _verb(command)
        tag = self._folder.tag(program.model, program.worker)
        answers: list[Answer] = []
        verdicts: list[Verdict] = []

        def hear(event: Event) -> None:
            if isinstance(event, kind):
                answers.append(event)
            listen(event)

        async with self._running(program, command, verb, tag, secrets.token_urlsafe(32), "") as child:
            child.on_event = hear
            watch = Watch(child, vitals, verdicts.append)
            try:
                code = await asyncio.shield(child.exited)
            finally:
                watch.cancel()
            if verdicts:
                raise lost_by_verdict(program, verb, verdicts[0], child.said)
            if code != Exit.OK or not answers:
                raise lost_by_exit(program, verb, code, child.said, oom_killed=self._oom_killed(code))
            return answers[-1]

    # Files in main memory

    @asynccontextmanager
    async def keep(self, files: Sequence[str]) -> AsyncIterator["LocalHeld"]:
        try:
            async with self._keeper.hold(files) as lost:
                yield LocalHeld(lost)
        except KeeperFailed as failed:
            raise NotHeld(str(failed)) from None

    async def read_ahead(self, files: Sequence[str]) -> int:
        try:
            return await self._keeper.read(files)
        except KeeperFailed as failed:
            raise NotHeld(str(failed)) from None

    def _keeper_born(self, pid: int) -> None:
        reaper.known.add(pid)
        if self._guard is not None:
            with contextlib.suppress(OSError):  # its pipe and its parent's death end it all the same
                self._guard.add(pid)

    def _keeper_gone(self, pid: int) -> None:
        reaper.known.discard(pid)
        if self._guard is not None:
            with contextlib.suppress(OSError):
                self._guard.remove(pid)

    # Processes

    @asynccontextmanager
    async def _running(
        self, program: Program, command: Command, verb: Verb, tag: str, token: str, visible: str
    ) -> AsyncIterator[Child]:
        """A child that has its token, for the length of the block; left, it is dead, reaped and struck off."""
        try:
            await uncancelled(self._bear(program, command, verb, tag, (token, visible)))
            child = self._children[tag]
            child.send_token(token)
            yield child
        finally:
            await uncancelled(self._bury(tag))

    async def _bear(self, program: Program, command: Command, verb: Verb, tag: str, told: tuple[str, str]) -> None:
        """Returns once there is a child of that tag, on record. `told`: its token, and which devices it may see."""
        token, visible = told
        env = self._environment(verb, tag, visible, program.env, command)
        name = program.worker if verb == "serve" else f"{program.worker} ({verb})"
        words = Log(program.model, name, secrets=(token, *environments.secrets(env)))
        nursery = self.nursery
        child = None
        if nursery is not None and self._can_fork(program, verb):
            argv = to_argv(replace(command, supervised=True, parent_pid=nursery.pid))
            try:
                child = await nursery.spawn(argv, env, name=name, log=words)
            except NurseryRefused as refused:
                self._refused_at = asyncio.get_running_loop().time()
                log.warning("%s: the nursery cannot fork, so it has to be executed: %s", name, refused)
        if child is None and verb == "serve" and program.must_fork:
            raise NotForked(f"{program.worker} was to be forked, and there is no nursery that would")
        if child is None:
            argv = to_argv(replace(command, supervised=True, parent_pid=os.getpid()))
            argv = [program.python or self._argv[0], *self._argv[1:], *argv]
            try:
                child = Child.spawn(argv, env, name=name, log=words, private=verb != "download")
            except OSError as error:
                raise lost_at_birth(program, verb, argv[0], error) from error
        self._children[tag] = child
        self._put_on_record(program, verb, tag, child.pid)

    def _environment(
        self, verb: Verb, tag: str, visible: str, extra: Mapping[str, str], command: Command | None
    ) -> dict[str, str]:
        return environments.environment(
            self._environ,
            verb,
            tag=tag,
            visible=visible,
            threads=command.threads if isinstance(command, ModelOptions) else 1,
            extra=extra,
            offline=self._offline,
            hf_token=self._hf_token,
        )

    # The nursery

    async def _keep_nursery(self) -> None:
        """Have a nursery at all times, or soon again; never returns. Cancelling it ends the one that runs."""
        loop = asyncio.get_running_loop()
        pause = self._nursery_pause
        while True:
            began = loop.time()
            try:
                await self._nurse()
            except OSError as error:
                log.warning("cannot start the nursery: %s", error.strerror or error)
            if loop.time() - began > LONGEST_PAUSE:
                pause = self._nursery_pause
            log.warning("workers are executed until there is another nursery, in %g s", pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _nurse(self) -> None:
        """One nursery from its start to its end. Raises OSError if it cannot be started."""
        tag = self._folder.tag("", nurseries.NAME)
        program = Program(model="", worker=nurseries.NAME)
        env = self._environment("serve", tag, "", {}, None)
        self.nursery = Nursery.start(
            self._argv,
            env,
            log=Log(nurseries.NAME, nurseries.NAME),
            on_warm=lambda: self.on_nursery(),
        )
        self._children[tag] = child = self.nursery.child
        try:
            self._put_on_record(program, "serve", tag, child.pid)
            code = await asyncio.shield(child.exited)
            log.warning("the nursery %s", how_it_ended(code, child.said, oom_killed=False))
        finally:
            self.nursery = None
            await uncancelled(self._bury(tag))

    def _put_on_record(self, program: Program, verb: Verb, tag: str, pid: int) -> None:
        """Before it gets its token: whoever kills the router now finds it on disk, and the guard knows its group."""
        assert self._guard is not None, "the launcher is not entered"
        try:
            self._guard.add(pid)
            reaper.known.add(self._guard.pid)  # it may be a new one
            self._folder.write(tag, pid, model=program.model, worker=program.worker, verb=verb)
        except (OSError, RunFolderError) as error:  # its leash holds it all the same
            why = error.strerror if isinstance(error, OSError) else error
            folder = self._folder.path
            log.warning("%s: cannot put process %d on record in %s: %s", program.worker, pid, folder, why)

    async def _bury(self, tag: str) -> None:
        """Returns once the process of that tag, if there is one, its group and its orphans are gone and struck off."""
        child = self._children.get(tag)
        if child is None:
            return
        await child.end()
        for pid in await reaper.end(child.pid, tag):
            log.error("process %d, left by a worker, is stuck: SIGKILL did not end it", pid)
        del self._children[tag]
        try:
            if self._guard is not None:
                self._guard.remove(child.pid)
            self._folder.remove(tag)
        except OSError as error:
            log.warning("cannot strike process %d off: %s", child.pid, error)

    def _workers(self) -> list[Child]:
        """All that run but the nursery: it has to reap its own, and ends last."""
        nursery = self.nursery.pid if self.nursery is not None else 0
        return [child for child in self._children.values() if child.pid != nursery]

    async def _close(self) -> None:
        """Returns once everything that ran here has been reaped, or does not die."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        self.kill_all()
        left = {child.exited for child in self._workers()}
        if left:
            await asyncio.wait(left, timeout=CLOSE_TIMEOUT)
        if self._nursing is not None:
            self._nursing.cancel()
            await asyncio.wait({self._nursing})
        self._entered.close()

    def _close_guard(self) -> None:
        assert self._guard is not None
        self._guard.close()
        reaper.known.discard(self._guard.pid)
        self._guard = None

    async def _watch(self) -> None:
        """What is looked at regularly: devices, the kernel's kills, orphans that ended by themselves."""
        while True:
            await asyncio.sleep(self._interval)
            await self._probe.look()
            self._ooms.look(asyncio.get_running_loop().time())
            try:
                reaper.reap_ended()
            except OSError as error:  # no descriptor left: next time
                log.warning("cannot look for orphans: %s", error)

    def _visible(self, names: Mapping[str, DeviceId]) -> str:
        """CUDA_VISIBLE_DEVICES for these devices, by UUID as far as the driver tells them."""
        uuids = {reading.id: reading.uuid for reading in self._probe.latest}
        accelerators = [device for device in names.values() if device.index >= 0]
        return ",".join(uuids.get(device) or str(device.index) for device in accelerators)

    def _oom_killed(self, code: int) -> bool:
        return code == -signal.SIGKILL and self._ooms.happened(asyncio.get_running_loop().time())


class LocalHeld:
    """Files that the keeper holds. See `Held`."""

    def __init__(self, lost: "asyncio.Future[None]"):
        self._lost = lost

    async def lost(self) -> NotHeld:
        await asyncio.shield(self._lost)
        return NotHeld("the process that held them has ended")


def _verb(command: Command) -> Verb:
    """Of a process that runs to its end."""
    match command:
        case Download():
            return "download"
        case Convert():
            return "convert"
    return "estimate"


def may_fork(program: Program, verb: Verb) -> bool:
    """Whether a process of `verb` is the same, forked or executed; a download reaches the network, which the nursery's
    libraries do not."""
    return verb != "download" and program.may_fork


def _tell_failure(task: "asyncio.Task[None]") -> None:
    """A task that should never end has: say so now, not when it is collected."""
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler({"message": "readings have ended", "exception": error, "task": task})
