"""The seam between the fleet, which decides, and machines, which run programs.

A launcher is the only thing that touches a machine. It knows processes, sockets and drivers, and nothing of leases,
plans or presets' meaning. There is one implementation for this machine and one fake for the schedule tests.
"""

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from router.errors import RouterError
from router.launch.worker_client import Wire
from router.planner.ledger import Bytes, Reading
from worker.protocol.argv import Convert, Download, Estimate, Serve
from worker.protocol.events import PERMANENT_EXITS, Converted, Estimated, Event, Exit, Ready

Cause = Literal["crashed", "oom", "load_failed", "load_timeout", "stalled", "download_failed"]


_FROM_OUTSIDE = frozenset({Exit.OK, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})
"""Exit codes of a process that somebody ended: by a signal that none raises by a fault of its own, or one that it took
for our wish to stop."""


class WorkerLost(RouterError):
    """A worker process, of any verb, ended without being asked to. `message` is for a person."""

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
        self.exit = exit
        """Exit code, negative for a signal; None if it was killed by us (stall, time-out)."""
        self.memory = memory
        """Which memory ran out, if one did."""

    @property
    def final(self) -> bool:
        """Whether the same attempt would fail the same way again."""
        return self.exit in PERMANENT_EXITS

    @property
    def from_outside(self) -> bool:
        """Whether somebody else ended the process, for no fault of its model that is known."""
        return self.exit in _FROM_OUTSIDE and not self.memory


@dataclass(frozen=True, kw_only=True)
class Program:
    """How a model's worker processes are to be run."""

    model: str
    """The model's id, for logs and records."""
    worker: str
    """The worker's own id, unique in the router's life, for logs, records and the socket's name."""
    python: str = ""
    """Another interpreter; empty: the router's own."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Beside the launcher's allow-list."""
    forks: bool = True
    """May be born by fork from a process that has its imports done (`EngineTraits`)."""
    must_fork: bool = False
    """What was reserved for it is enough for a worker that is forked, and for no other."""
    start_timeout: float = 240.0
    """Seconds without load progress."""
    stop_timeout: float = 10.0
    """Seconds from SIGTERM to SIGKILL."""
    stall_timeout: float = 120.0
    """Seconds without a pulse, or with work but without a step."""

    @property
    def may_fork(self) -> bool:
        """Whether its workers are the same, forked or executed: what a preset says of interpreter and environment is
        looked up when libraries are loaded."""
        return self.forks and not self.python and not self.env


class NotForked(RouterError):
    """There is no nursery to fork a worker for whom no more was reserved than a forked one takes; nothing was started.
    What another one takes has to be reserved first."""


Listen = Callable[[Event], None]
"""Called on the event loop with each event of a process as it comes; must not block or raise."""


class WorkerProcess(Protocol):
    """A worker that is ready."""

    @property
    def wire(self) -> Wire:
        """Reaches this worker's socket; closed with the worker."""

    @property
    def token(self) -> str:
        """Bearer token of this worker."""

    @property
    def pid(self) -> int: ...

    @property
    def forked(self) -> bool:
        """Born from a nursery; what it shares with that is not in `measured`."""

    @property
    def measured(self) -> Bytes:
        """Peak bytes by device, as the worker last said."""

    @property
    def ready(self) -> Ready: ...

    @property
    def settle_seconds(self) -> float:
        """From its end until its memory was seen to be back; 0 while it lives."""

    async def lost(self) -> WorkerLost:
        """Returns once the process has ended by itself, fell silent or stalled. Cancelling stops nothing."""

    async def unreachable(self) -> None:
        """Returns once it lives and takes no connections any more, as somebody has found who tried: its socket's file
        was deleted, say. Answers that have begun go on. Cancelling stops nothing."""


class Standby(Protocol):
    """A worker process without weights and device, which has prepared itself or is about to."""

    @property
    def measured(self) -> Bytes:
        """Bytes of main memory that it holds; nothing before it is prepared."""

    async def prepared(self) -> None:
        """Returns once it is prepared, however often it is asked; from then on it takes no more memory.

        Raises WorkerLost if it ended, or made no progress.
        """

    async def lost(self) -> WorkerLost:
        """Returns once the process has ended. Cancelling stops nothing."""

    async def go(self, command: Serve, place: Bytes) -> WorkerProcess:
        """Load on the devices of `place`; to be told once. Returns once the worker is ready; raises WorkerLost.

        Of `command` only `reserved` is looked at: the rest the process has from `prepare`.
        """


class NotHeld(RouterError):
    """Files could not be had in main memory, or stay there; the message says why."""


class Held(Protocol):
    """Files that are in main memory to stay."""

    async def lost(self) -> NotHeld:
        """Returns once they are held no longer, though nobody wanted that. Cancelling gives nothing back."""


class Launcher(Protocol):
    """Everything a router does to one machine or more."""

    def readings(self) -> Sequence[Reading]:
        """The latest reading of every device that this router may use, HOST included; never blocks."""

    def forks(self, program: Program) -> bool:
        """Whether a worker of `program` would be forked, were it started now."""

    async def refresh(self) -> Sequence[Reading]:
        """Read all devices now; returns once that is done (bounded by a second)."""

    async def download(self, program: Program, command: Download, listen: Listen) -> str:
        """Folder of the complete snapshot. Raises WorkerLost; cancelling kills the process, partial files stay."""

    async def convert(self, program: Program, command: Convert, listen: Listen) -> Converted:
        """Returns once the target is complete. Raises WorkerLost; cancelling kills the process, nothing is used of what
        it leaves."""

    async def estimate(self, program: Program, command: Estimate) -> Estimated:
        """Raises WorkerLost; cancelling kills the process."""

    def serve(
        self, program: Program, command: Serve, place: Bytes, listen: Listen
    ) -> AbstractAsyncContextManager[WorkerProcess]:
        """Run a worker on the devices of `place` (in the order of its shards) for the length of the block.

        Entering returns once the worker is ready, or raises WorkerLost, or NotForked where `program.must_fork`. Leaving
        returns once the process is reaped and the driver has settled (two readings agree; bounded), and cannot be
        cancelled half-way. `command.devices`, `listen`, `leashed` and `spawner` are filled in by the launcher.
        """

    def prepare(self, program: Program, command: Serve, listen: Listen) -> AbstractAsyncContextManager[Standby]:
        """Run a worker for the length of the block, in two steps: it prepares itself, and loads when told to go.

        Entering returns once the process is there. Leaving is as with `serve`.
        """

    def keep(self, files: Sequence[str]) -> AbstractAsyncContextManager[Held]:
        """All of `files` in main memory, locked there, for the length of the block.

        Entering returns once they are; raises NotHeld. Leaving lets them go, which is done at once.
        """

    async def read_ahead(self, files: Sequence[str]) -> int:
        """Returns once all of `files` have been read into what the kernel keeps of them: their bytes. Raises NotHeld.

        Cancelling stops it.
        """


__all__ = [
    "Cause", "Held", "Launcher", "Listen", "NotForked", "NotHeld", "Program", "Standby", "WorkerLost",
    "WorkerProcess",
]  # fmt: skip
