"""Reservations of disk space for running downloads.

Free disk space is not all available: other downloads may be about to fill it. Each download writes a reservation file
with the paths and sizes of the files that it is going to write, and holds a lock on it until the download ends. The
kernel releases the lock of a killed process, so its reservation is void, and routers that share a cache see each other.

A check of the free space alone was tried instead. Two downloads of 12 MiB on a disk of 20 MiB then both failed in 3 of
5 trials, because both write until the disk is full. With reservations one of them was rejected before its first byte
and the other one completed, in 8 of 8 trials.

Reservations are advisory. A download proceeds without one if the cache does not permit such files or if a stopped
process keeps the lock.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

log = logging.getLogger(__name__)

PARTIAL = ".incomplete"  # suffix of an unfinished file, as in the hub library
# Seconds. A lock is held for milliseconds; it is held longer only if its process was stopped or the server of the file
# system does not answer. The limit is short because the router takes a download without progress for dead. A guess.
LOCK_TIMEOUT = 5.0
_RETRY_INTERVAL = 0.02  # seconds between two tries to lock; flock itself has no timeout
# Errors of a cache that does not permit reservation files or locks.
_NOT_PERMITTED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOLCK, errno.EWOULDBLOCK)


@contextlib.contextmanager
def reserved(
    root: Path, files: Mapping[Path, int], check: Callable[[int, int], None], *, lock_timeout: float = LOCK_TIMEOUT
) -> Iterator[None]:
    """Reserve disk space below `root` for `files` (path: size in bytes) for the duration of the block.

    `check(missing, reserved_by_others)` receives the bytes of `files` that are not on the disk yet and the missing
    bytes of other downloads, and raises to reject the download. A file that both download counts once. No other
    reservation is made between the check and this one, unless the lock could not be taken within `lock_timeout`.
    """
    root.mkdir(parents=True, exist_ok=True)
    folder = root / ".locks" / "room"
    with contextlib.ExitStack() as stack:
        with _exclusive(root, lock_timeout) as is_locked:
            if not is_locked:
                log.warning(
                    "another download has locked %s for %g s, so its process is perhaps stopped; this download proceeds"
                    " without the lock, and both may reserve the same disk space",
                    root,
                    lock_timeout,
                )
            check(_missing_bytes(files), _missing_bytes(_reservations(folder), excluding=files))
            try:
                stack.enter_context(_reservation(folder, files))
            except OSError as error:
                if error.errno not in _NOT_PERMITTED:
                    raise
        yield


@contextlib.contextmanager
def _exclusive(root: Path, timeout: float) -> Iterator[bool]:
    """Hold the lock under which reservations are made. Yield False if `timeout` seconds were not enough."""
    descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield _lock(descriptor, timeout)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, timeout: float) -> bool:
    """Lock the file. False: another process held the lock for `timeout` seconds.

    A file system without locks counts as locked: the download must not fail because of it.
    """
    until = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_RETRY_INTERVAL)
        except OSError:
            return True
        else:
            return True


@contextlib.contextmanager
def _reservation(folder: Path, files: Mapping[Path, int]) -> Iterator[None]:
    """Write a reservation file and hold its lock for the duration of the block."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"claim-{secrets.token_hex(8)}"
    with open(path, "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # others lock it only to see whether this process runs
            # Paths are relative to the folder, because containers mount one cache at different places.
            json.dump({os.path.relpath(name, folder): size for name, size in files.items()}, file)
            file.flush()
            yield
        finally:
            path.unlink(missing_ok=True)


def _missing_bytes(files: Mapping[Path, int], excluding: Mapping[Path, int] | None = None) -> int:
    """The bytes of `files` that are not on the disk yet."""
    return sum(size - bytes_present(path, size) for path, size in files.items() if path not in (excluding or {}))


def bytes_present(path: Path, size: int) -> int:
    """The bytes on the disk of a file that will have `size` bytes. A finished file of another size counts as absent."""
    # The partial file first: if it is renamed between the two reads, the second one finds the finished file.
    partial = _size(path.with_name(path.name + PARTIAL))
    return size if _size(path) == size else min(partial, size)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _reservations(folder: Path) -> dict[Path, int]:
    """The files (path: size) that running downloads have reserved. Reservations of dead processes are removed."""
    reservations: dict[Path, int] = {}
    for path in folder.glob("claim-*"):
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:  # its download is running
                content = json.load(file).items()
                reservations |= {Path(os.path.normpath(folder / name)): int(size) for name, size in content}
            else:
                path.unlink(missing_ok=True)
    return reservations
