"""One worker process of this machine that serves, or stands by to: its devices, its socket, how it does.

Whoever runs the process gives it to one of these, and ends it: what is here only hears and tells.
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from router.launch.exit_causes import lost_by_exit, lost_by_verdict
from router.launch.heartbeat import Verdict, Vitals
from router.launch.interface import Listen, Program, WorkerLost
from router.launch.oom import OomKills
from router.launch.process import Child
from router.launch.shared_reservations import Claim
from router.launch.watchdog import Watch
from router.launch.worker_client import Wire, WireError
from router.planner.ledger import HOST, Bytes, DeviceId
from worker.protocol.argv import Serve
from worker.protocol.events import Event, Prepared, Pulse, Ready, RequestEnded
from worker.protocol.orders import MemoryGrant, encode_grant
from worker.protocol.routes import TOKEN_HEADER

log = logging.getLogger("router.launch.interface")

T = TypeVar("T")

HEALTH_TIMEOUT = 30.0
DYING = 0.2
"""Seconds in which word comes of the end of a process whose socket nobody has any more."""


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
        """`began`: when it was decided to start it, by the loop's clock."""
        loop = asyncio.get_running_loop()
        self.token = token
        self.pid = child.pid
        self.measured: dict[DeviceId, int] = {}
        self.settle_seconds = 0.0
        self.wire = Wire(f"unix:{socket}")
        self._program = program
        self._address = command.listen
        self._child = child
        self.names = names
        """Its devices, by its own names for them."""
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
        self._vitals = Vitals(loop.time(), start_timeout=program.start_timeout, stall_timeout=program.stall_timeout)
        self._watch = Watch(child, self._vitals, self._judged)
        child.on_event = self._hear
        child.exited.add_done_callback(self._exited)

    @property
    def ready(self) -> Ready:
        return self._ready.result()

    async def lost(self) -> WorkerLost:
        """As `WorkerProcess.lost`; returns also when the process has ended because it was told to."""
        return await asyncio.shield(self._lost)

    async def unreachable(self) -> None:
        """As `WorkerProcess.unreachable`."""
        await self.wire.unreachable.wait()
        await asyncio.wait({self._lost}, timeout=DYING)
        if self._lost.done():  # which is another matter, and told by `lost`
            await asyncio.Event().wait()

    async def start(self) -> None:
        """Returns once it is ready and answers on its socket. Raises WorkerLost."""
        await self._unless_lost(asyncio.shield(self._ready))
        await self._unless_lost(self._check_health())
        self._serving = True
        self._vitals.serving(self._loop.time())

    async def prepared(self) -> None:
        """As `Standby.prepared`."""
        await self._unless_lost(asyncio.shield(self._prepared))

    def go(self, names: Mapping[str, DeviceId], *, reserved: str, visible: str) -> None:
        """Tell it to load on these devices; what it measured before says nothing about them."""
        self.names = names
        self.measured.clear()
        self._vitals.go(self._loop.time())
        go = MemoryGrant(devices=list(model_devices(names)), reserved=reserved, visible=visible)
        self._child.send(encode_grant(go))

    async def end(self) -> None:
        """Returns once nothing is sent to it any more and, if it served and lives, it has stopped in good order."""
        self._watch.cancel()
        self.wire.close()
        if self._serving and not self._lost.done():
            await self._child.stop(self._program.stop_timeout)

    async def _unless_lost(self, work: Awaitable[T]) -> T:
        """The result of `work`; raises WorkerLost as soon as the process is lost."""
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
        """Ready is what it says; that it hears us is another matter."""
        exchange = self.wire.begin("GET", "/health", {TOKEN_HEADER: f"Bearer {self.token}"})
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT):
                await exchange.head()
                while await exchange.read():
                    pass
            problem = "" if exchange.status == 200 else f"its /health answered {exchange.status}"
        except (WireError, TimeoutError) as error:
            problem = f"its socket does not answer ({str(error) or 'no answer in time'})"
        finally:
            exchange.close()
        if problem:
            await asyncio.wait({self._lost}, timeout=DYING)  # if it has died, then that is the reason to tell
            raise WorkerLost(f"{self._program.model}: the worker said that it is ready, but {problem}", cause="crashed")

    def _hear(self, event: Event) -> None:
        if type(event) is RequestEnded:  # says nothing of its health
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
                self._count(event.mapped)
                birth = max(0.0, self._loop.time() - self._began - sum(event.seconds.values()))
                self._ready.set_result(
                    replace(event, seconds={"fork" if self.forked else "exec": birth, **event.seconds})
                )
            case Pulse():
                self._measure(event.measured)
                self._count(event.mapped)
            case Prepared() if not self._prepared.done():
                self._measure(event.measured)
                self._prepared.set_result(None)
        self._vitals.hear(event, self._loop.time())
        self._listen(event)

    def _measure(self, measured: Mapping[str, int]) -> None:
        self.measured.update({self.names[name]: size for name, size in measured.items() if name in self.names})

    def _count(self, mapped: int) -> None:
        """Of what it measures, all but so many bytes of main memory is in the figures of drivers."""
        self._claim.count({id: size - mapped if id.index == HOST else size for id, size in self.measured.items()})

    def _judged(self, verdict: Verdict) -> None:
        self._lose(lost_by_verdict(self._program, "serve", verdict, self._child.said))

    def _exited(self, exited: "asyncio.Future[int]") -> None:
        code = exited.result()
        oom_killed = code == -signal.SIGKILL and self._ooms.happened(self._loop.time())
        self._lose(lost_by_exit(self._program, "serve", code, self._child.said, oom_killed=oom_killed))

    def _lose(self, lost: WorkerLost) -> None:
        if not self._lost.done():
            self._lost.set_result(lost)


class LocalStandby:
    """A worker process of this machine without weights, as `LocalLauncher.prepare` yields it. See `Standby`."""

    def __init__(
        self,
        worker: LocalWorker,
        visible: Callable[[Mapping[str, DeviceId]], str],
        started: Callable[[LocalWorker], Awaitable[None]],
        claim: Claim,
    ):
        """`visible`: CUDA_VISIBLE_DEVICES for devices; `started` returns once a worker that was told to go is ready."""
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
        self._claim.give(place)
        self._worker.go(names, reserved=command.reserved, visible=self._visible(names))
        await self._started(self._worker)
        return self._worker


def device_names(place: Bytes) -> dict[str, DeviceId]:
    """The devices of `place` by the names that a worker has for them: `cuda:0`, ... in the order of the shards, and
    `cpu` for main memory."""
    accelerators = [device for device in place if device.index >= 0]
    names = {f"cuda:{shard}": device for shard, device in enumerate(accelerators)}
    hosts = [device for device in place if device.index == HOST]
    return names | ({"cpu": hosts[0]} if hosts else {})


def model_devices(names: Mapping[str, DeviceId]) -> tuple[str, ...]:
    """Of a worker's devices those of its shards: accelerators, or main memory if it has none."""
    return tuple(name for name in names if name != "cpu") or ("cpu",)
