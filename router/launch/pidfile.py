"""Records of running processes on disk, so that the next router can kill those that survived this one.

One folder per router, mode 0700 and locked. It contains the sockets of the workers, and a record for each process that
was started and is not reaped yet. The router that opens the folder next kills the recorded processes, if they are still
the same ones: a process is identified by its id, start time and boot, never by name.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import secrets
import select
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from router.errors import RouterError

log = logging.getLogger("router.launch.interface")

SOCKET_PATH_BYTES = 107  # longest path of a unix socket: `sun_path` has 108 bytes, one of them for the end (unix(7))
_TAG_DIGITS = 12
_SWEEP_TIMEOUT = 5.0


class RunFolderError(RouterError):
    """This router cannot use the folder; the message is for people."""


@dataclass(frozen=True, kw_only=True)
class ProcessRecord:
    """One process, with what distinguishes it from a later one of the same id."""

    pid: int
    start_time: int  # field 22 of `/proc/PID/stat`, in clock ticks since the boot
    boot_id: str
    model: str
    worker: str
    verb: str
    socket: str = ""


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
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._take_lock()
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

    def write(self, tag: str, pid: int, *, model: str, worker: str, verb: str) -> None:
        """Write the record of a process, completely or not at all. Raises OSError.

        A folder that was deleted, as services that clean /tmp do, is created again: the worker's socket needs it, too.
        """
        socket = str(self.socket(tag)) if verb == "serve" else ""
        record = ProcessRecord(
            pid=pid,
            start_time=start_time(pid) or 0,
            boot_id=self._boot_id,
            model=model,
            worker=worker,
            verb=verb,
            socket=socket,
        )
        draft, text = self.path / f"{tag}.tmp", json.dumps(asdict(record)).encode()
        if not (self.path / "lock").exists():
            self._restore()
        # Without fsync, which can take as long as loading a model. The kernel's copy outlives this process however it
        # ends, and a record is of no use after a reboot.
        try:
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                if os.write(file, text) < len(text):  # the disk is full and had room for a part only
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(file)
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

    def _restore(self) -> None:
        """Create the folder and its lock again. Raises OSError.

        The records of running processes are lost; the guard still knows these.
        """
        log.warning("the content of the runtime folder %s was deleted; creating it again", self.path)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.close()
        self._take_lock()

    def _take_lock(self) -> None:
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
        survivors = [record for record in records if self._is_alive(record)]
        for record in survivors:
            _kill(record.pid)
        for pattern in ("*.json", "*.tmp", "*.sock"):
            for file in self.path.glob(pattern):
                file.unlink(missing_ok=True)
        return survivors

    def _is_alive(self, record: ProcessRecord) -> bool:
        return record.boot_id == self._boot_id and start_time(record.pid) == record.start_time


def start_time(pid: int) -> int | None:
    """The start of process `pid` in clock ticks since the boot; None: no such process (proc_pid_stat(5), field 22)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])


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
