"""The file watcher of --models-watch: calls back when a preset file or a folder of models has changed.

Changes are found by comparison at an interval, which takes 6 µs for a file and 12 ms for a folder of 100 models. Events
of the kernel would only come a moment earlier: a switched link on the way to a file, a folder that appears later, and
network file systems cause none, and the system may refuse to watch (fs.inotify.max_user_watches).
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

log = logging.getLogger("router.config.file_watcher")

QUIET = 0.5  # seconds without a further change before a change is reported
EMPTY = 5.0  # seconds that a preset file is waited for after it was emptied; a guess
INTERVAL = 2.0  # seconds between comparisons; a guess
DEPTH = 2  # levels below a folder of models that may contain models: `model` and `organisation/model`
MAX_FOLDERS = 1000  # compared folders below one folder of models


@contextlib.asynccontextmanager
async def watching(
    paths: Sequence[Path], changed: Callable[[], None], *, quiet: float = QUIET, interval: float = INTERVAL
) -> AsyncIterator[None]:
    """Call `changed` after each change of one of `paths` until the end of the block."""
    paths = [path.absolute() for path in paths]
    task = asyncio.create_task(_watch(paths, _look(paths), changed, quiet, interval), name="watch")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def until_written(
    path: Path, *, look: Callable[[Path], tuple[int, float] | None] | None = None, quiet: float = QUIET
) -> None:
    """Return when the last change of a file is `quiet` seconds old, or `EMPTY` seconds while the file is empty.

    Some editors and `cp` empty a file before they write it. Returns at once if there is no file, or if its time is in
    the future. `look` reads the size in bytes and the age in seconds, None if there is no file; for tests.
    """
    look = look or _size_and_age
    warned = False
    while (found := await asyncio.to_thread(look, path)) is not None:
        size, age = found
        if not 0 <= age < (quiet if size else EMPTY):
            return
        if not size and not warned:
            warned = True
            log.warning("%s is empty; the models are kept if it is written within %g s", path, EMPTY)
        await asyncio.sleep(quiet)


def _size_and_age(path: Path) -> tuple[int, float] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_size, time.time() - facts.st_mtime  # noqa: TID251 - times of files are of this clock


async def _watch(
    paths: Sequence[Path], reported: list[object], changed: Callable[[], None], quiet: float, interval: float
) -> None:
    """Compare the files with their `reported` state until cancelled."""
    while True:
        await asyncio.sleep(interval)
        state = await _settled(paths, reported, quiet)
        if state != reported:
            reported = state
            changed()


async def _settled(paths: Sequence[Path], reported: list[object], quiet: float) -> list[object]:
    """The state of `paths`. One that differs from `reported` is returned when it has been the same for `quiet` seconds.

    Only these paths have to be quiet, not their folders: a log that is written beside a file delays nothing.
    """
    state = await asyncio.to_thread(_look, paths)
    while state != reported:
        await asyncio.sleep(quiet)
        before, state = state, await asyncio.to_thread(_look, paths)
        if state == before:
            break
    return state


def _below(path: Path, depth: int = DEPTH) -> Iterator[Path]:
    """A folder and the folders below it that may contain models. Nothing if `path` is no folder."""
    if not os.path.isdir(path):
        return
    yield path
    if depth:
        for name, is_folder, *_ in _entries(path):
            if is_folder and not name.startswith(".") and os.access(path / name, os.R_OK | os.X_OK):
                yield from _below(path / name, depth - 1)


def _entries(folder: Path) -> list[tuple[str, bool, int, int]]:
    """(name, is a folder, size and modification time of a file) of each entry, sorted by name."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            size = time = 0
            if not (is_folder := os.path.isdir(entry.path)):  # entry.is_dir raises for links that cannot be followed
                with contextlib.suppress(OSError):
                    size, time = (facts := entry.stat()).st_size, facts.st_mtime_ns
            found.append((entry.name, is_folder, size, time))
    return sorted(found)


def _look(paths: Sequence[Path]) -> list[object]:
    """A value that is equal as long as there is nothing new to read at any of `paths`."""
    return [_state(path) for path in paths]


def _state(path: Path) -> object:
    if os.path.isdir(path):
        return [(folder, _entries(folder)) for folder in islice(_below(path), MAX_FOLDERS)]
    try:
        facts = path.stat()
    except OSError as error:
        return error.errno
    return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_mode, facts.st_uid, facts.st_gid
