"""One serving worker process of this machine: its devices, its socket, its state as its events report it.

`router.launch.local` starts and ends the process. The classes here only read its events and send it orders.
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from router.launch.exit_causes import OomKills, lost_by_exit, lost_by_verdict
from router.launch.heartbeat import Heartbeat, Verdict, Watchdog
from router.launch.interface import Listen, Program, WorkerLost
from router.launch.process import Child
from router.launch.shared_reservations import Claim
from router.launch.worker_client import WorkerClient, WorkerClientError
from router.planner.ledger import HOST, Bytes, DeviceId
from worker.protocol.argv import Serve
from worker.protocol.events import Event, Prepared, Pulse, Ready, RequestEnded
from worker.protocol.orders import MemoryGrant, encode_grant
from worker.protocol.routes import TOKEN_HEADER

log = logging.getLogger("router.launch.interface")

T = TypeVar("T")

HEALTH_TIMEOUT = 30.0
# Seconds within which the exit of a process is known after its socket has failed. The socket closes first.
EXIT_WAIT = 0.2


class LocalWorker:
    """One worker process of this machine, as `LocalLauncher.serve` yields it. See `WorkerProcess`."""

    def __init__(
        self,
        program: Program,
        command: Serve,
        child: Child,
        names: Mapping[str, DeviceId],
        socket: Path,
        token: str,
        listen: Listen,
        claim: Claim,
        ooms: OomKills,
        *,
        began: float,
        forked: bool,
    ):
        """`names`: its devices, by the worker's names for them. `began`: when its start began, by the loop's clock."""
        loop = asyncio.get_running_loop()
        self.token = token
        self.pid = child.pid
        self.measured: dict[DeviceId, int] = {}
        self.settle_seconds = 0.0
        self.worker_client = WorkerClient(f"unix:{socket}")
        self._program = program
        self._address = command.listen
        self._child = child
        self.names = names
        self._prepared: asyncio.Future[None] = loop.create_future()
        self._listen = listen
        self._claim = claim
        self._ooms = ooms
        self._loop = loop
        self.forked = forked
        self._began = began
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

    async def prepared(self) -> None:
        """Implements `EarlyProcess.prepared`."""
        await self._unless_lost(asyncio.shield(self._prepared))

    def go(self, names: Mapping[str, DeviceId], *, reserved: str, visible: str) -> None:
        """Send the order to load on these devices."""
        self.names = names
        self.measured.clear()  # measured before it had devices
        self._heartbeat.go(self._loop.time())
        go = MemoryGrant(devices=list(model_devices(names)), reserved=reserved, visible=visible)
        self._child.send(encode_grant(go))

    async def end(self) -> None:
        """Close its connections and, if it served and lives, stop it with SIGTERM. Returns once that is done."""
        self._watchdog.cancel()
        self.worker_client.close()
        if self._serving and not self._lost.done():
            await self._child.stop(self._program.stop_timeout)

    async def _unless_lost(self, work: Awaitable[T]) -> T:
        """Return the result of `work`. Raises WorkerLost as soon as the process is lost."""
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._lost}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._lost.done():
                raise self._lost.result()
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _check_health(self) -> None:
        """Check that it answers HTTP: its `ready` event does not prove that its socket can be reached."""
        exchange = self.worker_client.begin("GET", "/health", {TOKEN_HEADER: f"Bearer {self.token}"})
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT):
                await exchange.head()
                while await exchange.read():
                    pass
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

    def _on_event(self, event: Event) -> None:
        if type(event) is RequestEnded:  # does not count for the heartbeat
            self._listen(event)
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
                spawn_seconds = max(0.0, self._loop.time() - self._began - sum(event.seconds.values()))
                self._ready.set_result(
                    replace(event, seconds={"fork" if self.forked else "exec": spawn_seconds, **event.seconds})
                )
            case Pulse():
                self._measure(event.measured)
                self._count_claim(event.mapped)
            case Prepared() if not self._prepared.done():
                self._measure(event.measured)
                self._prepared.set_result(None)
        self._heartbeat.record(event, self._loop.time())
        self._listen(event)

    def _measure(self, measured: Mapping[str, int]) -> None:
        self.measured.update({self.names[name]: size for name, size in measured.items() if name in self.names})

    def _count_claim(self, mapped: int) -> None:
        """Mark as seen what the drivers count: all that it measured but `mapped` bytes of main memory.

        The kernel counts pages of mapped files as available, so other routers would not see them.
        """
        self._claim.count({id: size - mapped if id.index == HOST else size for id, size in self.measured.items()})

    def _on_verdict(self, verdict: Verdict) -> None:
        self._lose(lost_by_verdict(self._program, "serve", verdict, self._child.cause))

    def _on_exited(self, exited: "asyncio.Future[int]") -> None:
        code = exited.result()
        oom_killed = code == -signal.SIGKILL and self._ooms.happened(self._loop.time())
        self._lose(lost_by_exit(self._program, "serve", code, self._child.cause, oom_killed=oom_killed))

    def _lose(self, lost: WorkerLost) -> None:
        if not self._lost.done():
            self._lost.set_result(lost)


class LocalEarlyProcess:
    """A worker process of this machine without weights, as `LocalLauncher.prepare` yields it. See `EarlyProcess`."""

    def __init__(
        self,
        worker: LocalWorker,
        visible: Callable[[Mapping[str, DeviceId]], str],
        started: Callable[[LocalWorker], Awaitable[None]],
        claim: Claim,
    ):
        """`visible`: returns CUDA_VISIBLE_DEVICES for devices.

        `started`: returns once a worker that got `Go` is ready.
        """
        self._claim = claim
        self._worker = worker
        self._visible = visible
        self._started = started
        self.pid = worker.pid

    @property
    def measured(self) -> Bytes:
        return self._worker.measured

    async def prepared(self) -> None:
        await self._worker.prepared()

    async def lost(self) -> WorkerLost:
        return await self._worker.lost()

    async def go(self, command: Serve, place: Bytes) -> LocalWorker:
        names = device_names(place)
        self._claim.extend(place)
        self._worker.go(names, reserved=command.reserved, visible=self._visible(names))
        await self._started(self._worker)
        return self._worker


def device_names(place: Bytes) -> dict[str, DeviceId]:
    """The devices of `place` by the worker's names: `cuda:0`, ... in the order of the shards, `cpu` for main memory."""
    accelerators = [device for device in place if device.index >= 0]
    names = {f"cuda:{shard}": device for shard, device in enumerate(accelerators)}
    hosts = [device for device in place if device.index == HOST]
    return names | ({"cpu": hosts[0]} if hosts else {})


def model_devices(names: Mapping[str, DeviceId]) -> tuple[str, ...]:
    """The devices of a worker's shards: its accelerators, or main memory if it has none."""
    return tuple(name for name in names if name != "cpu") or ("cpu",)
