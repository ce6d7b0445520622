"""The processes that a model's matrices are divided among: one leads and is the worker, the others follow it.

All are forked before the worker has a second thread or has looked at a device: in one that was forked from a nursery
the imports are done and shared, in an executed one each process does its own, all at once. Leader and follower speak
over a socket each: the leader says what to compute, a follower that it is ready, or why it fails. What they occupy they
write to memory that all of them share.

Laws. No follower outlives its leader: the kernel kills it with the thread that forked it, and the end of its socket
ends it, too. A follower that is lost is never replaced: whoever leads tells why, and ends. Standard library only.
"""

import gc
import mmap
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

from worker.errors import RankLost, StartError, WorkerError
from worker.protocol.exits import Exit

HOST_BYTES, DEVICE_BYTES, LOADED_BYTES = range(3)
"""What each follower tells of itself: peaks of main memory and of its device, and what it has loaded so far."""
_FIGURES = 3
_TOLD_INTERVAL = 0.5
"""Seconds between two looks at how far followers are."""
_LAST_WORDS = 2.0
"""Seconds within which the end of a process is known, once its connections have broken."""
_PROTOCOL = 5


class Board:
    """Figures of all ranks, in memory that they share."""

    def __init__(self, ranks: int):
        self._figures = memoryview(mmap.mmap(-1, ranks * _FIGURES * 8)).cast("q")

    def write(self, rank: int, figure: int, value: int) -> None:
        self._figures[rank * _FIGURES + figure] = value

    def read(self, rank: int, figure: int) -> int:
        return self._figures[rank * _FIGURES + figure]


class Link:
    """A follower's end."""

    def __init__(self, rank: int, count: int, store: int, connection: Connection, board: Board):
        """`store`: descriptor of the file by which all ranks find one another."""
        self.rank, self.count, self.store = rank, count, store
        self._connection, self._board = connection, board

    def hear(self) -> Any:
        """What the leader says next; returns once it has. Ends the process if the leader is gone."""
        try:
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(Exit.ORPHANED)

    def ready(self) -> None:
        self._say((0, ""))

    def fail(self, exit: int, message: str) -> None:
        """It ends, and why."""
        self._say((exit, message))

    def note(self, figure: int, value: int) -> None:
        self._board.write(self.rank, figure, value)

    def _say(self, word: tuple[int, str]) -> None:
        with suppress(OSError):
            self._connection.send_bytes(pickle.dumps(word, _PROTOCOL))


class Ranks:
    """The leader's end: all followers."""

    def __init__(self, store: int, connections: Sequence[Connection], pids: Sequence[int], board: Board):
        self.count = len(pids) + 1
        self.store = store
        self.pids = tuple(pids)
        """Of ranks 1, 2, ..."""
        self._connections, self._board = tuple(connections), board
        self._codes: dict[int, int] = {}
        self._lock = threading.Lock()
        self.lost: WorkerError | None = None
        """Why the process has to end: a follower has. Known some time after `watch`."""
        self._tell: list[Callable[[WorkerError], None]] = []
        self._is_known = threading.Event()
        self._is_ending = False

    @classmethod
    def fork(cls, count: int, follow: Callable[[Link], int], bind: Callable[[int], None]) -> "Ranks":
        """Fork followers 1 to `count - 1`. Each runs `follow` and exits with the code that it returns.

        `bind` ties the new process to its leader, whose process id it gets (`worker.program.supervision.follow`).

        Must be called by the only thread of the process, or where no other one holds a lock. Raises OSError.
        """
        parent, board = os.getpid(), Board(count)
        store = os.memfd_create("ranks")
        connections: list[Connection] = []
        pids: list[int] = []
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(1, count):
            ours, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                for each in (*connections, ours):
                    each.close()
                link = Link(rank, count, store, theirs, board)
                _become(partial(bind, parent), partial(follow, link))
            theirs.close()
            connections.append(ours)
            pids.append(pid)
        return cls(store, connections, pids, board)

    def tell(self, word: Any) -> None:
        """Say `word` to all followers. Raises RankLost if one is gone."""
        packed = pickle.dumps(word, _PROTOCOL)
        try:
            for connection in self._connections:
                connection.send_bytes(packed)
        except OSError:
            raise self.why() from None

    def until_ready(self, told: Callable[[int], None]) -> None:
        """Returns once all followers are; `told` with the bytes that they have loaded so far, now and then.

        Raises StartError or RankLost if one fails.
        """
        left = dict(zip(self._connections, range(1, self.count), strict=True))
        while left:
            for connection in wait(list(left), _TOLD_INTERVAL):
                assert isinstance(connection, Connection)
                if (lost := self._word(connection, left[connection])) is not None:
                    raise lost
                del left[connection]
            told(sum(self.figures(LOADED_BYTES)))

    def watch(self, abort: Callable[[], None]) -> None:
        """From now on a thread waits for the end of a follower, and calls `abort` then, before anybody is told."""
        threading.Thread(target=self._watch, args=(abort,), name="ranks", daemon=True).start()

    def on_lost(self, tell: Callable[[WorkerError], None]) -> None:
        """`tell` is called once a follower is lost: by the thread that waits for that, or now."""
        with self._lock:
            self._tell.append(tell)
            known = self.lost
        if known is not None:
            tell(known)

    def figures(self, figure: int) -> list[int]:
        """Of ranks 1, 2, ..."""
        return [self._board.read(rank, figure) for rank in range(1, self.count)]

    def why(self) -> WorkerError:
        """Which follower was lost and how: StartError with its exit code if it said one, else RankLost. Waits a moment
        until that is known."""
        self._is_known.wait(_LAST_WORDS)
        return self.lost or RankLost("the ranks of this model have lost one another")

    def end(self) -> None:
        """Returns once no follower is left."""
        self._is_ending = True
        for pid in self.pids:
            with suppress(ProcessLookupError):
                if pid not in self._codes:
                    os.kill(pid, signal.SIGKILL)
            self._reaped(pid)

    def _watch(self, abort: Callable[[], None]) -> None:
        connection = next(iter(wait(self._connections)))
        assert isinstance(connection, Connection)
        why = self._word(connection, 1 + self._connections.index(connection))
        if why is None or self._is_ending:
            return
        with self._lock:
            self.lost, tell = why, tuple(self._tell)
        self._is_known.set()
        abort()
        for each in tell:
            each(why)

    def _word(self, connection: Connection, rank: int) -> WorkerError | None:
        """What a follower says: None as it is ready, or how the process is to end now that this one has."""
        try:
            code, message = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            code = self._reaped(self.pids[rank - 1])
            message = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if not message:
            return None
        told = f"rank {rank} of {self.count} (process {self.pids[rank - 1]}): {message}"
        return StartError(told, Exit(code)) if code in set(Exit) and code else RankLost(told)

    def _reaped(self, pid: int) -> int:
        """The exit code of a follower; returns once it has ended."""
        with self._lock:
            if pid not in self._codes:
                self._codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            return self._codes[pid]


def _become(bind: Callable[[], None], follow: Callable[[], int]) -> NoReturn:
    """In the child: nothing of the leader's own business is left, and nothing that it held is ever destroyed here: a
    group of processes, say, waits at its end for threads that only the leader has."""
    gc.freeze()
    code = 1
    try:
        if (memory := sys.modules.get("worker.engines.transformers.device.memory")) is not None:
            memory.inheritance.take()  # what it shares with a nursery, it can only tell while it may look at itself
        bind()
        code = follow()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
