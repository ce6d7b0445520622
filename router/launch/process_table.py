"""All child processes of one router: recorded on disk, registered with the guard, killed, reaped.

The runtime folder of a router has mode 0700 and is locked. It contains the sockets of the workers, and a record for
each process that was started and is not reaped yet. The router that opens the folder next kills the recorded processes,
if they are still the same ones: a process is identified by its id, start time and boot, never by name. That matters
only if the guard (`router.launch.reaper`) was killed too.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import secrets
import select
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from router.errors import RouterError
from router.launch import reaper
from router.launch.process import Child

log = logging.getLogger("router.launch.interface")

CLOSE_TIMEOUT = 5.0  # seconds that killed processes get to be reaped before the table is left anyway
SOCKET_PATH_BYTES = 107  # longest path of a unix socket: `sun_path` has 108 bytes, one of them for the end (unix(7))
_TAG_DIGITS = 12
_SWEEP_TIMEOUT = 5.0


class RunFolderError(RouterError):
    """This router cannot use the folder; the message is for people."""


class ProcessTable:
    """The running child processes, from `open` to `close`."""

    def __init__(self, runtime_dir: Path):
        self.folder = RunFolder(runtime_dir)
        self._children: dict[str, Child] = {}
        self._guard: reaper.Guard | None = None
        self._opened = contextlib.ExitStack()

    def open(self) -> None:
        """Take the runtime folder, kill what an earlier router left, start the guard.

        Raises RunFolderError, OSError.
        """
        with contextlib.ExitStack() as stack:
            for survivor in self.folder.open():
                log.warning("killed %s (process %d), left by an earlier router", survivor.worker, survivor.pid)
            stack.callback(self.folder.close)
            had_adopted = reaper.adopt()
            stack.callback(reaper.adopt, whether=had_adopted)
            self._guard = reaper.Guard()
            stack.callback(self._guard.close)
            self._opened = stack.pop_all()

    def close(self) -> None:
        """End the guard and give up the folder."""
        self._opened.close()

    def child(self, tag: str) -> Child:
        return self._children[tag]

    def add(self, tag: str, child: Child, worker: str) -> None:
        """Register a new process. Call it before the process gets its token.

        From then on the next router finds it on disk, and the guard knows its group. If either fails, this is logged
        and the process runs on: it also ends by itself when the router dies.
        """
        self._children[tag] = child
        assert self._guard is not None, "the table is not open"
        try:
            self._guard.add(child.pid)
            self.folder.write(tag, child.pid, worker)
        except (OSError, RunFolderError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            log.warning("%s: cannot record process %d in %s: %s", worker, child.pid, self.folder.path, why)

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
            self.folder.remove(tag)
        except OSError as error:
            log.warning("cannot remove the record of process %d: %s", child.pid, error)

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


@dataclass(frozen=True, kw_only=True)
class ProcessRecord:
    """One process, with what distinguishes it from a later one of the same id."""

    pid: int
    start_time: int  # in clock ticks since the boot
    boot_id: str
    worker: str


class RunFolder:
    """The runtime folder of one router, from `open` to `close`. All methods but `tag` and `socket` touch the disk."""

    def __init__(self, path: Path):
        self.path = path.absolute()
        self._lock = -1
        self._salt = secrets.token_hex(8)
        self._tags = 0
        self._boot_id = ""

    def open(self) -> list[ProcessRecord]:
        """Create and lock the folder, kill survivors, remove stale files. Returns the survivors that were killed.

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
            self._boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return self._sweep()
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

    def write(self, tag: str, pid: int, worker: str) -> None:
        """Write the record of a process, completely or not at all. Raises OSError, RunFolderError.

        A folder that was deleted, as services that clean /tmp do, is created again: the worker's socket needs it, too.
        The records of other running processes are then lost, but the guard knows these processes.
        """
        if not (self.path / "lock").exists():
            log.warning("the content of the runtime folder %s was deleted; creating it again", self.path)
            self.close()
            self._take()
        record = ProcessRecord(pid=pid, start_time=start_time(pid) or 0, boot_id=self._boot_id, worker=worker)
        draft = self.path / f"{tag}.tmp"
        # Without fsync, which can take as long as loading a model. The kernel's copy outlives this process however it
        # ends, and a record is of no use after a reboot.
        try:
            draft.touch(mode=0o600)
            draft.write_text(json.dumps(asdict(record)))
            draft.rename(self._record(tag))
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise

    def remove(self, tag: str) -> None:
        """Remove the record and the socket of a process that is reaped."""
        self._record(tag).unlink(missing_ok=True)
        self.socket(tag).unlink(missing_ok=True)

    def _record(self, tag: str) -> Path:
        return self.path / f"{tag}.json"

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

    def _sweep(self) -> list[ProcessRecord]:
        """Kill survivors, wait for their exit, remove what they left."""
        records = [record for file in self.path.glob("*.json") if (record := _read(file)) is not None]
        survivors = [
            record
            for record in records
            if record.boot_id == self._boot_id and start_time(record.pid) == record.start_time
        ]
        for record in survivors:
            _kill(record.pid)
        for pattern in ("*.json", "*.tmp", "*.sock"):
            for file in self.path.glob(pattern):
                file.unlink(missing_ok=True)
        return survivors


def start_time(pid: int) -> int | None:
    """The start of process `pid` in clock ticks since the boot; None: no such process (proc_pid_stat(5), field 22)."""
    fields = reaper.stat(pid)
    return int(fields[19]) if fields is not None else None


def _read(file: Path) -> ProcessRecord | None:
    """The record in `file`; None if it is incomplete or of another version."""
    try:
        return ProcessRecord(**json.loads(file.read_text()))
    except (ValueError, TypeError):
        return None


def _kill(pid: int) -> None:
    """Send SIGKILL to the group of a process that is not our child. Returns once it has exited, or after a timeout."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(_SWEEP_TIMEOUT * 1000)
    finally:
        os.close(pidfd)


__all__ = ["ProcessTable", "RunFolder", "RunFolderError", "start_time"]
