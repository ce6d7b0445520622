"""Room on a disk that has been promised to downloads in flight: what is free there is not all to be had.

Whoever fetches says in a file of its own which files are to come and how large they will be, and holds a lock on that
file meanwhile. So whoever was killed claims nothing, and routers that share a cache see each other. Where nobody may
write such files, or somebody who was stopped keeps others waiting, downloads do without.
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

PARTIAL = ".incomplete"
"""Behind the name of a file until all of it is there; the hub library's word for it."""
TURN_TIMEOUT = 5.0
"""Seconds. A turn takes milliseconds; it takes longer where somebody was stopped in the middle of his, or where the
cache is on a file system whose server does not answer, and a download that is silent for long is taken for dead."""
_LOOK = 0.02
"""Seconds between two tries to lock: to wait for a lock, and not for ever, is something that the kernel does not do."""
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOLCK, errno.EWOULDBLOCK)


@contextlib.contextmanager
def claimed(
    root: Path, coming: Mapping[Path, int], check: Callable[[int, int], None], *, turn_timeout: float = TURN_TIMEOUT
) -> Iterator[None]:
    """`coming`: sizes, in bytes, of the files that will be written below `root`, where claims are kept meanwhile.

    `check` is told how many bytes of them are missing, and how many others still await; it raises if that is too much,
    and nobody claims anything between its look and this claim, unless somebody has held that up for `turn_timeout`
    seconds. Files that others await as well are not counted twice.
    """
    root.mkdir(parents=True, exist_ok=True)
    folder = root / ".locks" / "room"
    with contextlib.ExitStack() as held:
        with _turn(root, turn_timeout) as is_alone:
            if not is_alone:
                log.warning(
                    "another download has kept %s locked for %g s, and was perhaps stopped; this one goes on, and may"
                    " be promised room that others are promised at the same moment",
                    root,
                    turn_timeout,
                )
            check(_missing(coming), _missing(_claims(folder), besides=coming))
            held.callback(_tidy, root, folder)
            try:
                held.enter_context(_claim(folder, coming))
            except OSError as error:
                if error.errno not in _CLOSED:
                    raise
        yield


@contextlib.contextmanager
def _turn(root: Path, timeout: float) -> Iterator[bool]:
    """Alone among those who claim, and who give back: whether that is so. Waits for `timeout` seconds at most."""
    descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield _locks(descriptor, timeout)
    finally:
        os.close(descriptor)


def _locks(descriptor: int, timeout: float) -> bool:
    """False: somebody else has held the lock for so many seconds. A file system without locks lets everybody pass."""
    until = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK)
        except OSError:
            return True
        else:
            return True


@contextlib.contextmanager
def _claim(folder: Path, coming: Mapping[Path, int]) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"claim-{secrets.token_hex(8)}"
    with open(path, "w", encoding="utf-8") as mine:
        try:
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody else locks it but to see whether we have
            # as seen from here: containers mount one cache at different places
            json.dump({os.path.relpath(file, folder): size for file, size in coming.items()}, mine)
            mine.flush()
            yield
        finally:
            path.unlink(missing_ok=True)


def _tidy(root: Path, folder: Path) -> None:
    """Leave no empty folder behind; it stays where that would have to wait: the next one sees to it."""
    with contextlib.suppress(OSError), _turn(root, 0.0) as is_alone:
        if is_alone:
            folder.rmdir()
            folder.parent.rmdir()


def _missing(coming: Mapping[Path, int], besides: Mapping[Path, int] | None = None) -> int:
    """Bytes that are not on the disk yet."""
    return sum(size - bytes_present(path, size) for path, size in coming.items() if path not in (besides or {}))


def bytes_present(path: Path, size: int) -> int:
    """The bytes on the disk of a file that will have `size` bytes. A whole file of another size is fetched again."""
    # The partial file first: when it is renamed between the two looks, the second one finds the whole file.
    partial = _size(path.with_name(path.name + PARTIAL))
    return size if _size(path) == size else min(partial, size)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _claims(folder: Path) -> dict[Path, int]:
    """All that is claimed by somebody who lives; what the dead left is removed."""
    claims: dict[Path, int] = {}
    for path in folder.glob("claim-*"):
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                told = json.load(file).items()
                claims |= {Path(os.path.normpath(folder / name)): int(size) for name, size in told}
            else:
                path.unlink(missing_ok=True)
    return claims


__all__ = ["PARTIAL", "bytes_present", "claimed"]
