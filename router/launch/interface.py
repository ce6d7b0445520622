"""The seam between the fleet, which decides, and machines, which run programs.

A launcher is the only thing that touches a machine. It handles processes, sockets and drivers, but no leases,
plans or meanings of presets. There is one implementation for this machine and one fake for the schedule tests.
"""

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from router.errors import RouterError
from router.launch.worker_client import WorkerClient
from router.planner.ledger import Bytes, Reading
from worker.protocol.argv import Convert, Download, Estimate, Serve
from worker.protocol.events import PERMANENT_EXITS, Converted, Estimated, Event, Exit, Ready

Verb = Literal["download", "convert", "estimate", "serve"]
Cause = Literal["crashed", "oom", "load_failed", "load_timeout", "stalled", "download_failed"]

# Exit codes of a process that was ended from outside: by a signal that no fault of its own raises, or by a SIGTERM that
# it took for the router's.
_FROM_OUTSIDE = frozenset({Exit.OK, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})


class WorkerLost(RouterError):
    """A worker process, of any verb, exited without being asked to. `message` is for people."""

    def __init__(
        self,
        message: str,
        *,
        cause: Cause,
        exit: int | None = None,
        memory: Literal["", "device", "host"] = "",
    ):
        super().__init__(message)
        self.message = message
        self.cause: Cause = cause
        self.exit = exit  # exit code, negative for a signal; None if unknown, or if the router killed it
        self.memory = memory  # the memory that ran out; empty: none did

    @property
    def final(self) -> bool:
        """True if the same attempt would fail the same way again."""
        return self.exit in PERMANENT_EXITS

    @property
    def from_outside(self) -> bool:
        """True if the process was ended from outside, and no fault of its model is known."""
        return self.exit in _FROM_OUTSIDE and not self.memory


@dataclass(frozen=True, kw_only=True)
class Program:
    """The way to run a model's worker processes. Timeouts are in seconds."""

    model: str  # the model's id, for logs and records
    worker: str  # the worker's own id, unique in the router's life, for logs, records and the socket's name
    python: str = ""  # another interpreter; empty: the router's own
    env: Mapping[str, str] = field(default_factory=dict)  # besides the launcher's allow-list
    forks: bool = True  # its engine allows forking from a process that has the imports done (`EngineCapabilities`)
    must_fork: bool = False  # its reservation is enough for a forked worker only
    start_timeout: float = 240.0  # without load progress
    stop_timeout: float = 10.0  # from SIGTERM to SIGKILL
    stall_timeout: float = 120.0  # without a pulse, or with work but without a step


class NotStarted(RouterError):
    """The plan does not hold any more, so nothing was started, and the worker must be planned again.

    `Program.must_fork` is set and no fork server can fork: an executed worker takes more memory, which must be reserved
    first. Or another router has reserved memory of the same device since the devices were read.
    """


# Called on the event loop with each event of a process as it arrives; must not block or raise.
Listen = Callable[[Event], None]


class WorkerProcess(Protocol):
    """A worker that is ready."""

    @property
    def worker_client(self) -> WorkerClient:
        """The HTTP client of this worker's socket; closed with the worker."""

    @property
    def token(self) -> str:
        """Bearer token of this worker."""

    @property
    def pid(self) -> int: ...

    @property
    def forked(self) -> bool:
        """True if it was forked. Memory that it shares with the fork server is not in `measured`."""

    @property
    def measured(self) -> Bytes:
        """Peak bytes by device, as the worker last reported."""

    @property
    def ready(self) -> Ready: ...

    @property
    def settle_seconds(self) -> float:
        """Seconds from its exit until the readings showed its memory as free; 0 while it lives."""

    async def lost(self) -> WorkerLost:
        """Return once the process has exited by itself, became silent or stalled. Cancelling stops nothing."""

    def reserve(self, place: Bytes) -> None:
        """Replace its reservation, as other routers count it, by `place`."""

    async def unreachable(self) -> None:
        """Return once it lives but accepts no connections any more, for example because its socket's file was deleted.

        A failed attempt to connect shows that. Responses that have begun go on. Cancelling stops nothing.
        """


class EarlyProcess(Protocol):
    """A worker process that is started before its memory is free (early start): without weights, on no device."""

    @property
    def measured(self) -> Bytes:
        """Bytes of main memory that it holds; empty before it is prepared."""

    async def prepared(self) -> None:
        """Return once it is prepared; from then on it takes no more memory. May be awaited several times.

        Raises WorkerLost if it exited or made no progress.
        """

    async def lost(self) -> WorkerLost:
        """Return once the process has exited. Cancelling stops nothing."""

    async def load(self, command: Serve, place: Bytes) -> WorkerProcess:
        """Load on the devices of `place`. Returns once the worker is ready. Call it once.

        Raises WorkerLost, NotStarted.

        Only `reserved` and `kv_tokens` of `command` are used: the process has the rest from `prepare`.
        """


class NotLocked(RouterError):
    """Files could not be read into main memory, or locked there. The message has the reason."""


class LockedFiles(Protocol):
    """Files that are locked in main memory."""

    async def lost(self) -> NotLocked:
        """Return once the files are no longer locked, for a reason other than `lock_files` ending.

        Cancelling unlocks nothing.
        """


class Launcher(Protocol):
    """The effects of a router on one machine or more."""

    def readings(self) -> Sequence[Reading]:
        """The latest reading of every device that this router may use, HOST included; never blocks."""

    def forks(self, program: Program) -> bool:
        """True if a worker of `program` would be forked if it were started now."""

    async def will_fork(self, program: Program) -> bool:
        """Wait while the fork server does its imports, for a bounded time.

        Return True if a worker of `program` would be forked then.
        """

    async def refresh(self) -> Sequence[Reading]:
        """Read all devices now. Returns once that is done, within about a second."""

    async def download(self, program: Program, command: Download, listen: Listen) -> str:
        """The folder of the complete snapshot. Raises WorkerLost. Cancelling kills the process; partial files stay."""

    async def convert(self, program: Program, command: Convert, listen: Listen) -> Converted:
        """Return once the target is complete. Raises WorkerLost.

        Cancelling kills the process; its partial files are not used.
        """

    async def estimate(self, program: Program, command: Estimate) -> Estimated:
        """Raises WorkerLost. Cancelling kills the process."""

    def serve(
        self, program: Program, command: Serve, place: Bytes, listen: Listen
    ) -> AbstractAsyncContextManager[WorkerProcess]:
        """Run a worker on the devices of `place` (in the order of its shards) for the length of the block.

        Entering returns once the worker is ready; raises WorkerLost, NotStarted. Leaving returns once the process is
        reaped and the driver's readings have settled (two agree; bounded), and cannot be cancelled half-way. The
        launcher fills in `devices`, `listen`, `supervised` and `parent_pid` of `command`.
        """

    def prepare(self, program: Program, command: Serve, listen: Listen) -> AbstractAsyncContextManager[EarlyProcess]:
        """Run a worker for the length of the block, in two steps: it prepares itself, and loads on `EarlyProcess.load`.

        Entering returns once the process is started. Leaving is as with `serve`.
        """

    def lock_files(self, files: Sequence[str]) -> AbstractAsyncContextManager[LockedFiles]:
        """Hold all of `files` in main memory, locked, for the length of the block.

        Entering returns once they are locked; raises NotLocked. Leaving unlocks them at once.
        """

    async def prefetch(self, files: Sequence[str]) -> int:
        """Read all of `files` into the page cache and return their bytes. Raises NotLocked. Cancelling stops it."""
