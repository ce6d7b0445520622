"""Room on a disk that has been promised to downloads in flight: what is free there is not all to be had.

Whoever fetches says in a file of its own which files are to come and how large they will be, and holds a lock on that
file meanwhile. So whoever was killed claims nothing, and routers that share a cache see each other. Where nobody may
write such files, downloads do without.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

PARTIAL = ".incomplete"
"""Behind the name of a file until all of it is there; the hub library's word for it."""
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOLCK)


@contextlib.contextmanager
def claimed(root: Path, coming: Mapping[Path, int], check: Callable[[int, int], None]) -> Iterator[None]:
    """`coming`: sizes, in bytes, of the files that will be written below `root`, where claims are kept meanwhile.

    `check` is told how many bytes of them are missing, and how many others still await; it raises if that is too much,
    and nobody claims anything between its look and this claim. Files that others await as well are not counted twice.
    """
    root.mkdir(parents=True, exist_ok=True)
    folder = root / ".locks" / "room"
    with contextlib.ExitStack() as held:
        with _turn(root):
            check(_missing(coming), _missing(_claims(folder), besides=coming))
            held.callback(_tidy, root, folder)
            try:
                held.enter_context(_claim(folder, coming))
            except OSError as error:
                if error.errno not in _CLOSED:
                    raise
        yield


@contextlib.contextmanager
def _turn(root: Path) -> Iterator[None]:
    """Alone among those who claim, and who give back."""
    descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _claim(folder: Path, coming: Mapping[Path, int]) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"claim-{secrets.token_hex(8)}"
    with open(path, "w", encoding="utf-8") as mine:
        try:
            fcntl.flock(mine, fcntl.LOCK_EX)
            # as seen from here: containers mount one cache at different places
            json.dump({os.path.relpath(file, folder): size for file, size in coming.items()}, mine)
            mine.flush()
            yield
        finally:
            path.unlink(missing_ok=True)


def _tidy(root: Path, folder: Path) -> None:
    """Leave no empty folder behind."""
    with contextlib.suppress(OSError), _turn(root):
        folder.rmdir()
        folder.parent.rmdir()


def _missing(coming: Mapping[Path, int], besides: Mapping[Path, int] | None = None) -> int:
    """Bytes that are not on the disk yet."""
    return sum(size - _there(path, size) for path, size in coming.items() if path not in (besides or {}))


def _there(path: Path, size: int) -> int:
    """Of `size` bytes. A whole file of another size will be fetched anew."""
    for each in (path, path.with_name(path.name + PARTIAL)):
        with contextlib.suppress(OSError):
            found = each.stat().st_size
            if found == size or each != path:
                return min(found, size)
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


__all__ = ["PARTIAL", "claimed"]
