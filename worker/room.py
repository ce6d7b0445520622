"""Room on a disk that has been promised to downloads in flight: what is free there is not all to be had.

Whoever fetches says in a file of its own which files are to come and how large they will be, and holds a lock on that
file meanwhile. So whoever was killed claims nothing, and routers that share a cache see each other.
"""

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

PARTIAL = ".incomplete"
"""Behind the name of a file until all of it is there; the hub library's word for it."""


@contextlib.contextmanager
def claimed(folder: Path, coming: Mapping[Path, int], check: Callable[[int, int], None]) -> Iterator[None]:
    """`coming`: sizes, in bytes, of the files that will be written on the disk of `folder`, where claims are kept.

    `check` is told how many bytes of them are missing, and how many others still await; it raises if that is too much,
    and nobody claims anything between its look and this claim. Files that others await as well are not counted twice.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        with open(folder / "lock", "w", encoding="utf-8") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            check(_missing(coming), _missing(_claims(folder), besides=coming))
            mine = held.enter_context(tempfile.NamedTemporaryFile("w", dir=folder, prefix="claim-", encoding="utf-8"))
            fcntl.flock(mine, fcntl.LOCK_EX)
            json.dump({str(path): size for path, size in coming.items()}, mine)
            mine.flush()
        yield


def _missing(coming: Mapping[Path, int], besides: Mapping[Path, int] | None = None) -> int:
    """Bytes that are not on the disk yet."""
    return sum(max(0, size - _there(path)) for path, size in coming.items() if path not in (besides or {}))


def _there(path: Path) -> int:
    for each in (path, path.with_name(path.name + PARTIAL)):
        with contextlib.suppress(OSError):
            return each.stat().st_size
    return 0


def _claims(folder: Path) -> dict[Path, int]:
    """All that is claimed by somebody who lives; what the dead left is removed."""
    claims: dict[Path, int] = {}
    for path in folder.glob("claim-*"):
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                claims |= {Path(name): int(size) for name, size in json.load(file).items()}
            else:
                os.unlink(path)
    return claims


__all__ = ["PARTIAL", "claimed"]
