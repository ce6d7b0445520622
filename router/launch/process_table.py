"""All child processes of one router: registered with the guard, killed, reaped; and the folder of their sockets.

A worker exits with its router by itself, and the guard kills what it started (`router.launch.reaper`). So there are no
records on disk from which the next router could kill survivors: their process ids might have been reused.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from router.errors import RouterError
from router.launch import reaper
from router.launch.process import Child

log = logging.getLogger("router.launch.interface")

CLOSE_TIMEOUT = 5.0  # seconds that killed processes get to be reaped before the table is left anyway
SOCKET_PATH_BYTES = 107  # longest path of a unix socket: `sun_path` has 108 bytes, one of them for the end (unix(7))
_TAG_DIGITS = 12


class RunFolderError(RouterError):
    """This router cannot use the folder; the message is for people."""


class ProcessTable:
    """The running child processes."""

    def __init__(self, runtime_dir: Path):
        self.folder = RunFolder(runtime_dir)
        self._children: dict[str, Child] = {}
        self._guard: reaper.Guard | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Take the runtime folder and run the guard, for the length of the block. Raises RunFolderError, OSError."""
        with contextlib.ExitStack() as stack:
            self.folder.open()
            stack.callback(self.folder.close)
            stack.callback(reaper.adopt, whether=reaper.adopt())
            self._guard = reaper.Guard()
            stack.callback(self._guard.close)
            yield

    def child(self, tag: str) -> Child:
        return self._children[tag]

    def add(self, tag: str, child: Child, worker: str) -> None:
        """Register a new process. Call it before the process gets its token.

        From then on the guard knows its group. If that fails, this is logged and the process runs on: it also ends by
        itself when the router dies.
        """
        self._children[tag] = child
        assert self._guard is not None, "the table is not open"
        try:
            self._guard.add(child.pid)
        except OSError as error:
            log.warning("%s: cannot register process %d with the guard: %s", worker, child.pid, error)

    async def end(self, tag: str) -> None:
        """Return once the process of that tag, its group and its orphans are gone. Does nothing for an unknown tag.

        Must not be cancelled half-way; callers wrap it in `uncancelled`.
        """
        child = self._children.get(tag)
        if child is None:
            return
        await child.end()
        # Only now: orphans pass to this process when their parent has ended.
        for pid in await reaper.end(child.pid, tag):
            log.error("process %d, left by a worker, is stuck: SIGKILL did not end it", pid)
        del self._children[tag]
        assert self._guard is not None
        try:
            self._guard.remove(child.pid)
            self.folder.socket(tag).unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot remove what process %d left: %s", child.pid, error)

    def kill(self, besides: int = 0) -> None:
        """Send SIGKILL to all groups but that of the process `besides`. Tasks that wait in `end` then return."""
        for child in self._all_but(besides):
            child.kill()

    async def wait_for_exits(self, besides: int = 0) -> None:
        """Return once all processes but `besides` are reaped, or after `CLOSE_TIMEOUT`."""
        if children := self._all_but(besides):
            await asyncio.wait({child.exited for child in children}, timeout=CLOSE_TIMEOUT)

    def _all_but(self, pid: int) -> Sequence[Child]:
        return [child for child in self._children.values() if child.pid != pid]


class RunFolder:
    """The runtime folder of one router, from `open` to `close`: locked, private, with the sockets of its workers."""

    def __init__(self, path: Path):
        self.path = path.absolute()
        self._lock = -1
        self._salt = secrets.token_hex(8)
        self._tags = 0

    def open(self) -> None:
        """Create and lock the folder, and remove what an earlier router left in it.

        Raises RunFolderError if another router uses it, or if it cannot be used.
        """
        longest = len(os.fsencode(self.path / f"{'0' * _TAG_DIGITS}.sock"))
        if longest > SOCKET_PATH_BYTES:
            raise RunFolderError(
                f"the runtime folder's path is {longest - SOCKET_PATH_BYTES} bytes too long for sockets in it:"
                f" {self.path}; give a shorter --runtime-dir"
            )
        try:
            self._take()
            self.path.chmod(0o700)
            for pattern in ("*.sock", "*.json", "*.tmp"):  # earlier versions had records of processes
                for file in self.path.glob(pattern):
                    file.unlink(missing_ok=True)
        except OSError as error:
            self.close()
            raise RunFolderError(
                f"cannot use the runtime folder {self.path}: {error.strerror or error}; give another --runtime-dir"
            ) from None

    def close(self) -> None:
        """Give the folder up; its files stay."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def tag(self, model: str, worker: str) -> str:
        """Twelve hex digits for one run of one process. No two runs get the same ones."""
        self._tags += 1
        text = "\0".join((self._salt, model, worker, str(self._tags)))
        return hashlib.sha256(text.encode()).hexdigest()[:_TAG_DIGITS]

    def socket(self, tag: str) -> Path:
        """The path on which the worker of this run listens."""
        return self.path / f"{tag}.sock"

    def restore(self) -> None:
        """Create the folder again if it was deleted, as services that clean /tmp do. If that fails, this is logged."""
        if (self.path / "lock").exists():
            return
        log.warning("the content of the runtime folder %s was deleted; creating it again", self.path)
        self.close()
        try:
            self._take()
        except (OSError, RunFolderError) as error:
            log.warning("cannot use the runtime folder %s: %s", self.path, error)

    def _take(self) -> None:
        """Create the folder if it is missing, and lock it. Raises OSError, RunFolderError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            self.close()
            raise RunFolderError(
                f"another router (process {holder or 'unknown'}) uses the runtime folder {self.path};"
                " stop it, or give this one a --runtime-dir of its own"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)


__all__ = ["ProcessTable", "RunFolder", "RunFolderError"]
