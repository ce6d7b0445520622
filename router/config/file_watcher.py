"""The file watcher of --models-watch: calls back when a preset file or a folder of models has changed.

Changes are found by comparison. `watchfiles` triggers a comparison soon after an event in one of the folders. Further
ones run at an interval, for changes without an event there: a switched link on the way to a file, a folder that
appears later, and all changes if the system refuses to watch (fs.inotify.max_user_watches).
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence, Set
from itertools import islice
from pathlib import Path

log = logging.getLogger("router.config.file_watcher")

QUIET = 0.5  # seconds without a further change before a change is reported
EMPTY = 5.0  # seconds that a preset file is waited for after it was emptied; a guess
INTERVAL = 5.0  # seconds between comparisons without an event; a guess
DEPTH = 2  # levels below a folder of models that may contain models: `model` and `organisation/model`
MAX_FOLDERS = 1000  # watched folders below one folder of models


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
    folders = await asyncio.to_thread(_folders, paths)
    while True:
        async with contextlib.aclosing(_triggers(folders, interval)) as triggers:
            async for _ in triggers:
                state = await _settled(paths, reported, quiet)
                if state != reported:
                    reported = state
                    changed()
                before, folders = folders, await asyncio.to_thread(_folders, paths)
                if folders != before:
                    break


async def _triggers(folders: Set[Path], interval: float) -> AsyncGenerator[None]:
    """Yield soon after an event in one of the folders, and at least at each interval."""
    from watchfiles import awatch  # Imported late: only --models-watch needs it, and the import takes 40 ms.

    try:
        # Not recursive: a recursive watch of the folder of models.ini could be one of a whole home directory.
        async with contextlib.aclosing(
            awatch(*folders, watch_filter=None, recursive=False, yield_on_timeout=True,
                   rust_timeout=int(interval * 1000), ignore_permission_denied=True)
        ) as events:  # fmt: skip
            async for _ in events:
                yield
    except FileNotFoundError:
        pass  # a folder was removed after it was listed
    except (OSError, RuntimeError) as error:
        log.warning("--models-watch: %s; changes are found every %.0f s", error, interval)
    while True:
        await asyncio.sleep(interval)
        yield


async def _settled(paths: Sequence[Path], reported: list[object], quiet: float) -> list[object]:
    """The state of `paths`. One that differs from `reported` is returned when it has been the same for `quiet` seconds.

    Only these paths have to be quiet, not their folders: a log that is written beside a file delays nothing. The
    debounce of watchfiles cannot replace this: it waits for the end of new paths, so it ends each second while one long
    file is copied.
    """
    state = await asyncio.to_thread(_look, paths)
    while state != reported:
        await asyncio.sleep(quiet)
        before, state = state, await asyncio.to_thread(_look, paths)
        if state == before:
            break
    return state


def _folders(paths: Sequence[Path]) -> set[Path]:
    """The folders in which events are expected: those of the file and of the target of a link, because editors and
    deployments replace a file by renaming another one over it, and a folder of models with the folders in it."""
    folders = {folder for path in paths for folder in (path.parent, Path(os.path.realpath(path)).parent)}
    for path in paths:
        folders.update(islice(_below(path), MAX_FOLDERS))
    return {folder for folder in folders if os.path.isdir(folder)}


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
