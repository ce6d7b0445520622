"""One worker process of this machine as its events report it: its heartbeat, and if it serves, its devices and socket.

`router.launch.local` starts and ends the process. The classes here only read its events and send it orders.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import TypeVar

from router.launch.devices import OomKills
from router.launch.exit_causes import Verdict, lost_by_exit, lost_by_verdict
from router.launch.fork_server import ForkServerSupervisor
from router.launch.interface import Listen, Program, WorkerLost
from router.launch.process import MAX_LATENESS, Child, tasks_of
from router.launch.readings import Claim, DeviceSampler
from router.launch.worker_client import WorkerClient, WorkerClientError
from router.planner.ledger import HOST, Bytes, DeviceId
from worker.protocol.argv import Serve
from worker.protocol.events import Event, MemoryNeed, Prepared, Progress, Pulse, Ready, RequestEnded
from worker.protocol.orders import MemoryGrant, encode_grant
from worker.protocol.routes import TOKEN_HEADER

log = logging.getLogger("router.launch.worker_process")

T = TypeVar("T")

HEALTH_TIMEOUT = 30.0
CHECK_INTERVAL = 1.0  # seconds between two checks of a heartbeat
# Seconds within which the exit of a process is known after its socket has failed. The socket closes first.
EXIT_WAIT = 0.2


class Heartbeat:
    """Decides by the events of one process whether it is alive. Times are seconds of a monotonic clock.

    Before `serving`, the process must make progress every `start_timeout` seconds: send an event that differs from the
    last one of its kind (with `repeats_count`, any event). A prepared process that waits for its `MemoryGrant` is
    exempt. After `serving`, it must send a pulse every `stall_timeout` seconds, and take a step within that time while
    requests run.
    """

    def __init__(self, now: float, *, start_timeout: float, stall_timeout: float = inf, repeats_count: bool = False):
        self._start_timeout = start_timeout
        self._stall_timeout = stall_timeout
        self._repeats_count = repeats_count
        self._last: dict[type[Event], Event] = {}
        self._stage = ""
        self._serving = False
        self._waits_for_grant = False
        self._progress_at = now
        self._pulse_at = now
        self._step_at = now
        self._steps = -1
        self._running = 0

    @property
    def shortest_timeout(self) -> float:
        return min(self._start_timeout, self._stall_timeout)

    def record(self, event: Event, now: float) -> None:
        """Take note of an event."""
        if self._repeats_count or self._last.get(type(event)) != event:
            self._progress_at = now
        self._last[type(event)] = event
        if isinstance(event, Progress):
            self._stage = f"{event.stage}, {event.done} of {event.total}" if event.total else event.stage
        if isinstance(event, Prepared):
            self._waits_for_grant = True
        if isinstance(event, Pulse):
            self._pulse_at = now
            # An idle engine takes no steps, so it counts as having just taken one.
            if event.steps != self._steps or not event.running:
                self._step_at = now
            self._steps, self._running = event.steps, event.running

    def memory_granted(self, now: float) -> None:
        """Expect progress from now on: a prepared process got its `MemoryGrant`."""
        self._waits_for_grant = False
        self._progress_at = now

    def serving(self, now: float) -> None:
        """Expect pulses from now on."""
        self._serving = True
        self._pulse_at = self._step_at = now

    def excuse(self, seconds: float) -> None:
        """Do not count `seconds` as silence, in which events were not read."""
        self._progress_at += seconds
        self._pulse_at += seconds
        self._step_at += seconds

    def verdict(self, now: float) -> Verdict | None:
        """The reason to kill the process; None: it is alive."""
        if self._waits_for_grant:
            return None
        if not self._serving:
            if now - self._progress_at < self._start_timeout:
                return None
            stage = f" (last: {self._stage})" if self._stage else ""
            return Verdict("load_timeout", f"made no progress for {self._start_timeout:g} s{stage}")
        if now - self._pulse_at >= self._stall_timeout:
            return Verdict("stalled", f"gave no pulse for {self._stall_timeout:g} s")
        if self._running and now - self._step_at >= self._stall_timeout:
            return Verdict("stalled", f"took no step for {self._stall_timeout:g} s with {self._running} running")
        return None


class Watchdog:
    """Checks the heartbeat of a child each second or more often.

    If it fails, calls `on_verdict` and kills the child.
    """

    def __init__(self, child: Child, heartbeat: Heartbeat, on_verdict: Callable[[Verdict], None]):
        self._child = child
        self._heartbeat = heartbeat
        self._interval = min(CHECK_INTERVAL, heartbeat.shortest_timeout / 4)
        self._on_verdict = on_verdict
        self._loop = asyncio.get_running_loop()
        self._arm()

    def cancel(self) -> None:
        self._timer.cancel()

    def _arm(self) -> None:
        self._due = self._loop.time() + self._interval
        self._timer = self._loop.call_at(self._due, self._check)

    def _check(self) -> None:
        now = self._loop.time()
        if self._child.exited.done():
            return
        self._child.read()  # events that arrived while this process was busy
        if now - self._due > MAX_LATENESS:  # this process was suspended or blocked
            self._heartbeat.excuse(now - self._due)
        elif (verdict := self._heartbeat.verdict(now)) is not None:
            self._on_verdict(verdict)
            self._child.kill()
            return
        self._arm()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStart:
    """The start of one serving worker process."""

    program: Program
    command: Serve  # as the process was started, with the address of its socket
    token: str
    names: Mapping[str, DeviceId]  # its devices, by the worker's names for them
    claim: Claim
    listen: Listen
    began: float  # when its start began, by the loop's clock


@dataclass(frozen=True, slots=True)
class LaunchServices:
    """The parts of a launcher that its worker processes use."""

    devices: DeviceSampler
    ooms: OomKills
    fork_servers: ForkServerSupervisor


class LocalWorker:
    """One serving worker process of this machine. Implements `WorkerProcess`, and `EarlyProcess` before it is ready."""

    def __init__(self, start: WorkerStart, child: Child, services: LaunchServices):
        loop = asyncio.get_running_loop()
        self.token = start.token
        self.pid = child.pid
        self.forked = child.forked
        self.names = start.names
        self.measured: dict[DeviceId, int] = {}
        self.settle_seconds = 0.0
        self.worker_client = WorkerClient(start.command.listen)
        self._program = program = start.program
        self._address = start.command.listen
        self._start = start
        self._child = child
        self._services = services
        self._loop = loop
        self._prepared: asyncio.Future[None] = loop.create_future()
        self._ready: asyncio.Future[Ready] = loop.create_future()
        self._lost: asyncio.Future[WorkerLost] = loop.create_future()
        self._serving = False
        self._heartbeat = Heartbeat(
            loop.time(), start_timeout=program.start_timeout, stall_timeout=program.stall_timeout
        )
        self._watchdog = Watchdog(child, self._heartbeat, self._on_verdict)
        child.on_event = self._on_event
        child.exited.add_done_callback(self._on_exited)

    @property
    def ready(self) -> Ready:
        return self._ready.result()

    async def lost(self) -> WorkerLost:
        """Implements `WorkerProcess.lost`; returns also when the process has exited because it was stopped."""
        return await asyncio.shield(self._lost)

    async def unreachable(self) -> None:
        """Implements `WorkerProcess.unreachable`."""
        await self.worker_client.unreachable.wait()
        await asyncio.wait({self._lost}, timeout=EXIT_WAIT)
        if self._lost.done():  # reported by `lost`; this one never returns, so that callers handle one of the two only
            await asyncio.Event().wait()

    async def start(self) -> None:
        """Return once it is ready and answers on its socket. Raises WorkerLost."""
        await self._unless_lost(asyncio.shield(self._ready))
        await self._unless_lost(self._check_health())
        self._serving = True
        self._heartbeat.serving(self._loop.time())
        self._services.fork_servers.warm(self.ready.modules)  # for the next worker of its family

    async def prepared(self) -> None:
        """Implements `EarlyProcess.prepared`."""
        await self._unless_lost(asyncio.shield(self._prepared))

    async def load(self, command: Serve, place: Bytes) -> "LocalWorker":
        """Implements `EarlyProcess.load`."""
        self.names = device_names(place)
        self._start.claim.extend(place)
        self.measured.clear()  # measured before it had devices
        self._heartbeat.memory_granted(self._loop.time())
        grant = MemoryGrant(
            devices=list(model_devices(self.names)),
            reserved=command.reserved,
            kv_tokens=command.kv_tokens,
            visible=self._services.devices.visible(self.names),
        )
        self._child.send(encode_grant(grant))
        await self.start()
        return self

    async def end(self) -> None:
        """Close its connections and, if it served and lives, stop it with SIGTERM. Returns once that is done."""
        self._watchdog.cancel()
        self.worker_client.close()
        if self._serving and not self._lost.done():
            await self._child.stop(self._program.stop_timeout)

    async def _unless_lost(self, work: Awaitable[T]) -> T:
        """Return the result of `work`. Raises WorkerLost as soon as the process is lost."""
        async with tasks_of(work) as (task,):
            await asyncio.wait({task, self._lost}, return_when=asyncio.FIRST_COMPLETED)
            if self._lost.done():
                raise self._lost.result()
            result: T = task.result()
            return result

    async def _check_health(self) -> None:
        """Check that it answers HTTP: its `ready` event does not prove that its socket can be reached."""
        exchange = self.worker_client.begin("GET", "/health", {TOKEN_HEADER: f"Bearer {self.token}"})
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT):
                await exchange.whole()
            problem = "" if exchange.status == 200 else f"its /health answered {exchange.status}"
        except (WorkerClientError, TimeoutError) as error:
            problem = f"its socket does not answer ({str(error) or 'no answer in time'})"
        finally:
            exchange.close()
        if problem:
            await asyncio.wait({self._lost}, timeout=EXIT_WAIT)  # if it has died, that is the cause to report
            raise WorkerLost(
                f"{self._program.model}: the worker reported that it is ready, but {problem}", cause="crashed"
            )

    def reserve(self, place: Bytes) -> None:
        self._start.claim.settle(place)

    def _on_event(self, event: Event) -> None:
        if type(event) is RequestEnded:  # does not count for the heartbeat
            self._start.listen(event)
            return
        match event:
            case Ready() if event.address != self._address:
                log.warning("%s: skipped a ready for %s, which is not its socket", self._program.worker, event.address)
                return
            case Ready() if self._ready.done():
                log.warning("%s: skipped a second ready", self._program.worker)
                return
            case Ready():
                self._measure(event.measured)
                self._count_claim(event.mapped)
                spawn_seconds = max(0.0, self._loop.time() - self._start.began - sum(event.seconds.values()))
                self._ready.set_result(
                    replace(event, seconds={"fork" if self.forked else "exec": spawn_seconds, **event.seconds})
                )
            case Pulse():
                self._measure(event.measured)
                self._count_claim(event.mapped)
            case MemoryNeed():
                self._measure(event.measured)
            case Prepared() if not self._prepared.done():
                self._measure(event.measured)
                self._prepared.set_result(None)
        self._heartbeat.record(event, self._loop.time())
        self._start.listen(event)

    def _measure(self, measured: Mapping[str, int]) -> None:
        self.measured.update({self.names[name]: size for name, size in measured.items() if name in self.names})

    def _count_claim(self, mapped: int) -> None:
        """Mark as seen what the drivers count: all that it measured but `mapped` bytes of main memory.

        The kernel counts pages of mapped files as available, so other routers would not see them.
        """
        self._start.claim.count({id: size - mapped if id.index == HOST else size for id, size in self.measured.items()})

    def _on_verdict(self, verdict: Verdict) -> None:
        self._lose(lost_by_verdict(self._program, "serve", verdict, self._child.cause))

    def _on_exited(self, exited: "asyncio.Future[int]") -> None:
        code = exited.result()
        oom_killed = self._services.ooms.explains(code, self._loop.time())
        self._lose(lost_by_exit(self._program, "serve", code, self._child.cause, oom_killed=oom_killed))

    def _lose(self, lost: WorkerLost) -> None:
        if not self._lost.done():
            self._lost.set_result(lost)


def device_names(place: Bytes) -> dict[str, DeviceId]:
    """The devices of `place` by the worker's names: `cuda:0`, ... in the order of the shards, `cpu` for main memory."""
    accelerators = [device for device in place if device.index >= 0]
    names = {f"cuda:{shard}": device for shard, device in enumerate(accelerators)}
    hosts = [device for device in place if device.index == HOST]
    return names | ({"cpu": hosts[0]} if hosts else {})


def model_devices(names: Mapping[str, DeviceId]) -> tuple[str, ...]:
    """The devices of a worker's shards: its accelerators, or main memory if it has none."""
    return tuple(name for name in names if name != "cpu") or ("cpu",)
