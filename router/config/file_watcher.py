"""The file watcher of --models-watch: calls back when a preset file or a folder of models has changed.

`watchfiles` reports events of folders. The folder of a file is watched and not the file, because editors and
deployments replace a file by renaming another one over it. The folder of each symbolic link on the way is watched, too,
because deployments switch links. An event only triggers a comparison: changes of other files in these folders (logs,
editor files) are common and must not cause a reload.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence, Set
from itertools import islice
from pathlib import Path

from watchfiles import awatch

log = logging.getLogger("router.config.file_watcher")

QUIET = 0.5
"""Seconds without a further change before a change is reported."""
DEPTH = 2
"""Levels below a folder of models that may contain models: `model` and `organisation/model`."""
MAX_FOLDERS = 1000
"""Watched folders below one folder of models."""
MAX_LINKS = 40
"""Symbolic links followed for one path, as in the kernel (path_resolution(7))."""


@contextlib.asynccontextmanager
async def watching(paths: Sequence[Path], changed: Callable[[], None], *, quiet: float = QUIET) -> AsyncIterator[None]:
    """Call `changed` after each change of one of `paths` until the end of the block.

    Raises OSError if the files cannot be watched, for example at the limit fs.inotify.max_user_watches.
    """
    started = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(_watch([path.absolute() for path in paths], changed, quiet, started), name="watch")
    task.add_done_callback(lambda _: started.cancel())  # it failed before it started
    try:
        await asyncio.wait({started, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _watch(
    paths: Sequence[Path], changed: Callable[[], None], quiet: float, started: "asyncio.Future[None]"
) -> None:
    """Compare the files after each event until cancelled. Raises OSError if they cannot be watched at the start."""
    reported = _look(paths)
    while True:
        folders = _folders(paths)
        try:
            async with _events(folders, quiet) as event:
                if not started.done():
                    reported = _look(paths)
                    started.set_result(None)
                while folders == _folders(paths):
                    found = await _settled(paths, reported, quiet)
                    if found != reported:
                        reported = found
                        changed()
                    await event()
        except FileNotFoundError:
            continue  # a folder was removed after it was listed
        except OSError as error:
            if not started.done():
                raise
            log.error("--models-watch has stopped: %s; reload with SIGHUP", error)
            return


@contextlib.asynccontextmanager
async def _events(folders: Set[Path], quiet: float) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """A function that waits for the next event in one of `folders`. It and the block raise OSError."""
    news = asyncio.Event()

    async def collect() -> None:
        # Not recursive: a recursive watch of the folder of models.ini could be one of a whole home directory.
        step = int(quiet * 1000 / 5) or 1
        async for _ in awatch(
            *folders, watch_filter=None, recursive=False, step=step, debounce=5 * step, ignore_permission_denied=True
        ):
            news.set()

    async def event() -> None:
        await news.wait()
        news.clear()
        if collecting.done():
            _raise(collecting)

    collecting = asyncio.create_task(collect())
    collecting.add_done_callback(lambda _: news.set())
    try:
        await asyncio.sleep(0)  # the first step of the task registers the folders: from here on, no event is lost
        if collecting.done():
            _raise(collecting)
        yield event
    finally:
        collecting.cancel()
        await asyncio.wait({collecting})


def _raise(collecting: "asyncio.Task[None]") -> None:
    """Raise the error of the task as an OSError: watchfiles has an error of its own for exhausted limits."""
    try:
        collecting.result()
    except RuntimeError as error:
        raise OSError(str(error)) from error


async def _settled(paths: Sequence[Path], reported: list[object], quiet: float) -> list[object]:
    """The state of `paths`. One that differs from `reported` is returned when it has been the same for `quiet` seconds.

    Only these paths have to be quiet, not their folders: a log that is written beside a file delays nothing.
    """
    state = _look(paths)
    while state != reported:
        await asyncio.sleep(quiet)
        before, state = state, _look(paths)
        if state == before:
            break
    return state


def _look(paths: Sequence[Path]) -> list[object]:
    return [_state(path) for path in paths]


def _folders(paths: Sequence[Path]) -> set[Path]:
    """All folders in which a change of one of `paths` can be seen: the (nearest existing) folder of the path and of
    each link on the way to it and, for a folder of models, itself and its folders."""
    folders: set[Path] = set()
    for path in paths:
        folders.update(_nearest(step.parent) for step in _steps(path))
        folders.update(islice(_below(path), MAX_FOLDERS))
    return folders


def _steps(path: Path) -> Iterator[Path]:
    """Each link on the way to the target of `path`, then the target, which need not exist."""
    for _ in range(MAX_LINKS):
        link = next((each for each in (*reversed(path.parents), path) if os.path.islink(each)), None)
        yield link or path
        if link is None:
            return
        try:
            path = link.parent / os.readlink(link) / path.relative_to(link)
        except OSError:  # the link was replaced at this moment, which causes an event
            return


def _nearest(folder: Path) -> Path:
    """The folder or the nearest one above it that exists."""
    while not os.path.isdir(folder):
        folder = folder.parent
    return folder


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
        for each in entries:
            size = time = 0
            if not (is_folder := each.is_dir()):
                with contextlib.suppress(OSError):
                    size, time = (facts := each.stat()).st_size, facts.st_mtime_ns
            found.append((each.name, is_folder, size, time))
    return sorted(found)


def _state(path: Path) -> object:
    """A value that is equal as long as there is nothing new to read at `path`."""
    if os.path.isdir(path):
        return [(folder, _entries(folder)) for folder in islice(_below(path), MAX_FOLDERS)]
    try:
        facts = path.stat()
    except OSError as error:
        return error.errno
    return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_mode, facts.st_uid, facts.st_gid


__all__ = ["QUIET", "watching"]
