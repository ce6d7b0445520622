"""Who was spawned, on disk: a restart sweeps survivors.

One folder per router, 0700 and locked: sockets of its workers, and a record for each process that was started and is
not reaped yet. Whoever opens the folder next kills what the records name, if it is still the same process.

Law: a process is known by number, start time and boot, never by name.
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

SOCKET_PATH_BYTES = 107
"""Longest path of a unix socket: `sun_path` of sockaddr_un has 108 bytes, one of them for the end (unix(7))."""
_TAG_DIGITS = 12
_SWEEP_TIMEOUT = 5.0


class RunFolderError(RouterError):
    """The folder cannot be this router's; the message is for a person."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One process, so that nobody else can be taken for it."""

    pid: int
    start_time: int
    """Field 22 of `/proc/PID/stat`, in clock ticks since the boot."""
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

    def open(self) -> list[Record]:
        """Take the folder: make it, lock it, kill survivors, remove stale files. Returns the survivors that it killed.

        Raises RunFolderError if another router has it, or if it cannot be used.
        """
        longest = len(os.fsencode(self.path / f"{'0' * _TAG_DIGITS}.sock"))
        if longest > SOCKET_PATH_BYTES:
            raise RunFolderError(
                f"the runtime folder's path is {longest - SOCKET_PATH_BYTES} bytes too long for sockets in it:"
                f" {self.path}; give a shorter --runtime-dir"
            )
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._claim()
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
        """Twelve hex digits for one run of one process, never given twice."""
        self._tags += 1
        text = "\0".join((self._salt, model, worker, str(self._tags)))
        return hashlib.sha256(text.encode()).hexdigest()[:_TAG_DIGITS]

    def socket(self, tag: str) -> Path:
        """Where the worker of this run is to listen."""
        return self.path / f"{tag}.sock"

    def write(self, tag: str, pid: int, *, model: str, worker: str, verb: str) -> None:
        """Put the process on record, whole or not at all, for whoever opens the folder after us. Raises OSError.

        A folder that somebody has deleted, as services that clean /tmp do, is made anew: the socket needs it, too.
        Nothing is flushed to the disk, which can take as long as a whole swap: what the kernel has outlives this
        process however it ends, and no record outlives a boot.
        """
        socket = str(self.socket(tag)) if verb == "serve" else ""
        record = Record(
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
        try:
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                if os.write(file, text) < len(text):  # the disk is full, and had room for some of it
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(file)
            draft.rename(self._record(tag))
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise

    def remove(self, tag: str) -> None:
        """The process is reaped: strike it off, with its socket."""
        self._record(tag).unlink(missing_ok=True)
        self.socket(tag).unlink(missing_ok=True)

    def _record(self, tag: str) -> Path:
        return self.path / f"{tag}.json"

    def _restore(self) -> None:
        """Raises OSError. Records that are lost are of processes that run: the guard ends those all the same."""
        log.warning("somebody has deleted what was in the runtime folder %s; it is made anew", self.path)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.close()
        self._claim()

    def _claim(self) -> None:
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

    def _sweep(self) -> list[Record]:
        """Kill survivors, wait for their end, remove what they left."""
        records = [record for file in self.path.glob("*.json") if (record := _read(file)) is not None]
        survivors = [record for record in records if self._is_alive(record)]
        for record in survivors:
            _kill(record.pid)
        for pattern in ("*.json", "*.tmp", "*.sock"):
            for file in self.path.glob(pattern):
                file.unlink(missing_ok=True)
        return survivors

    def _is_alive(self, record: Record) -> bool:
        return record.boot_id == self._boot_id and start_time(record.pid) == record.start_time


def start_time(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since the boot; None if there is none (proc_pid_stat(5), field 22)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])


def _read(file: Path) -> Record | None:
    """None for a file that is no record: half written, or from another version."""
    try:
        return Record(**json.loads(file.read_text()))
    except (ValueError, TypeError):
        return None


def _kill(pid: int) -> None:
    """Returns once the process, no child of ours, has ended after SIGKILL to its group, or will not."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        poll = select.poll()
        poll.register(watch, select.POLLIN)
        poll.poll(_SWEEP_TIMEOUT * 1000)
    finally:
        os.close(watch)
