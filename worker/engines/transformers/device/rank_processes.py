"""Processes of a tensor-parallel model: the leader is the worker itself, the others follow.

Followers are forked before the worker has a second thread or uses a device. Forked from the fork server, they share its
imports; in an executed worker each imports for itself, in parallel. The leader sends steps to each follower over a
socket; a follower sends that it is ready, or its error. Memory figures are in a memory area shared by all.

Invariants: no follower outlives its leader (the kernel kills it with the thread that forked it, and end of file on its
socket ends it, too). A lost follower is never replaced: the leader reports the cause and exits.
"""

import gc
import mmap
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

from worker.errors import RankLost, StartError, WorkerError
from worker.protocol.events import Exit

HOST_BYTES, DEVICE_BYTES, LOADED_BYTES = range(3)  # figures of a follower: two memory peaks, and bytes loaded so far
_FIGURES = 3
_REPORT_INTERVAL = 0.5  # seconds between progress reports
_CAUSE_TIMEOUT = 2.0  # seconds to wait for the cause after a connection has broken; a guess
_PROTOCOL = 5


class LeaderLink:
    """A follower's connection to the leader."""

    def __init__(self, rank: int, count: int, store: int, connection: Connection, board: memoryview):
        """`store`: descriptor of the rendezvous file; `board`: figures of all ranks in shared memory."""
        self.rank, self.count, self.store = rank, count, store
        self._connection, self._board = connection, board

    def receive(self) -> Any:
        """Wait for the leader's next message. Exits if the leader is gone."""
        try:
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(Exit.ORPHANED)

    def ready(self) -> None:
        self._send((0, ""))

    def fail(self, exit: int, message: str) -> None:
        """Report the error with which this follower exits."""
        self._send((exit, message))

    def note(self, figure: int, value: int) -> None:
        self._board[self.rank * _FIGURES + figure] = value

    def _send(self, message: tuple[int, str]) -> None:
        with suppress(OSError):
            self._connection.send_bytes(pickle.dumps(message, _PROTOCOL))


class RankProcesses:
    """The leader's connections to all followers."""

    def __init__(self, store: int, connections: Sequence[Connection], pids: Sequence[int], board: memoryview):
        self.count = len(pids) + 1
        self.store = store
        self.pids = tuple(pids)  # of ranks 1, 2, ...
        self._connections, self._board = tuple(connections), board
        self._codes: dict[int, int] = {}
        self._lock = threading.Lock()
        self.lost: WorkerError | None = None  # set some time after `watch` when a follower has exited
        self._loss: Future[WorkerError] = Future()  # the same, after `abort`
        self._is_ending = False

    @classmethod
    def fork(cls, count: int, follow: Callable[[LeaderLink], int], bind: Callable[[int], None]) -> "RankProcesses":
        """Fork followers 1 to `count - 1`. Each runs `follow` and exits with the code that it returns.

        `bind` gets the leader's process id and ties the new process to it (`worker.program.supervision.attach_rank`).
        Must be called by the only thread of the process, or where no other one holds a lock. Raises OSError.
        """
        parent, board = os.getpid(), memoryview(mmap.mmap(-1, count * _FIGURES * 8)).cast("q")
        store = os.memfd_create("ranks")
        connections: list[Connection] = []
        pids: list[int] = []
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(1, count):
            ours, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                for connection in (*connections, ours):
                    connection.close()
                link = LeaderLink(rank, count, store, theirs, board)
                _become(partial(bind, parent), partial(follow, link))
            theirs.close()
            connections.append(ours)
            pids.append(pid)
        return cls(store, connections, pids, board)

    def send(self, message: Any) -> None:
        """Send `message` to all followers. Raises RankLost if one is gone."""
        pickled = pickle.dumps(message, _PROTOCOL)
        try:
            for connection in self._connections:
                connection.send_bytes(pickled)
        except OSError:
            raise self.why() from None

    def until_ready(self, report: Callable[[int], None]) -> None:
        """Wait until all followers are ready. `report` is called regularly with the bytes they have loaded.

        Raises StartError or RankLost if one fails.
        """
        left = dict(zip(self._connections, range(1, self.count), strict=True))
        while left:
            for connection in wait(list(left), _REPORT_INTERVAL):
                assert isinstance(connection, Connection)
                if (lost := self._read_message(connection, left[connection])) is not None:
                    raise lost
                del left[connection]
            report(sum(self.figures(LOADED_BYTES)))

    def watch(self, abort: Callable[[], None]) -> None:
        """Start a thread that waits for a follower's exit and then calls `abort`, before the callbacks of `on_lost`."""
        threading.Thread(target=self._watch, args=(abort,), name="ranks", daemon=True).start()

    def on_lost(self, callback: Callable[[WorkerError], None]) -> None:
        """Call `callback` when a follower is lost, from the watching thread; immediately if one is lost already."""
        self._loss.add_done_callback(lambda loss: callback(loss.result()))

    def figures(self, figure: int) -> list[int]:
        """One figure of ranks 1, 2, ..."""
        return [self._board[rank * _FIGURES + figure] for rank in range(1, self.count)]

    def why(self) -> WorkerError:
        """The loss of a follower: StartError with its exit code if it reported one, else RankLost. Waits up to
        _CAUSE_TIMEOUT until it is known."""
        with suppress(TimeoutError):
            return self._loss.result(_CAUSE_TIMEOUT)
        return self.lost or RankLost("the ranks of this model have lost one another")

    def end(self) -> None:
        """Kill all followers and wait for their exit."""
        self._is_ending = True
        for pid in self.pids:
            with suppress(ProcessLookupError):
                if pid not in self._codes:
                    os.kill(pid, signal.SIGKILL)
            self._reaped(pid)

    def _watch(self, abort: Callable[[], None]) -> None:
        connection = next(iter(wait(self._connections)))
        assert isinstance(connection, Connection)
        why = self._read_message(connection, 1 + self._connections.index(connection))
        if why is None or self._is_ending:
            return
        self.lost = why
        abort()
        self._loss.set_result(why)

    def _read_message(self, connection: Connection, rank: int) -> WorkerError | None:
        """Read a follower's message: None if it is ready, else the error with which this process must exit."""
        try:
            code, message = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            code = self._reaped(self.pids[rank - 1])
            message = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if not message:
            return None
        report = f"rank {rank} of {self.count} (process {self.pids[rank - 1]}): {message}"
        return StartError(report, Exit(code)) if code in set(Exit) and code else RankLost(report)

    def _reaped(self, pid: int) -> int:
        """Wait for a follower's exit and return its exit code."""
        with self._lock:
            if pid not in self._codes:
                self._codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            return self._codes[pid]


def _become(bind: Callable[[], None], follow: Callable[[], int]) -> NoReturn:
    """Run a follower in the forked child. Nothing inherited from the leader is destroyed here (gc.freeze): finalizers,
    such as that of a process group, could wait for threads that only the leader has."""
    gc.freeze()
    code = 1
    try:
        if (memory := sys.modules.get("worker.engines.transformers.device.memory")) is not None:
            memory.inheritance.take()  # the page map can be opened only before `bind`
        bind()
        code = follow()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
