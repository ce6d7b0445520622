"""Tells when files or folders have been changed, as the kernel does (inotify(7)); nothing is polled.

What is watched is the folder that something stands in, since editors and deployments put new files in the place of
old ones; and the folder of each link that leads there, since they turn links, too. Changes that come together are told
once, when it has been quiet for a moment, and only if what is there is different: a file that is half written, put back
or merely touched beside them is nobody's news, and holds up none.
"""

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Self

log = logging.getLogger("router.watch")

QUIET = 0.5
"""Seconds without a further change until one is told."""
DEPTH = 2
"""Folders below a folder of models, one in the other, in which models may be: of themselves, and of organisations."""
MOST_FOLDERS = 1000
"""Below one; of more, not all are watched."""
LOOKS = 5
"""In the time that has to be quiet, at most: so many are enough to see whether it was, however much happens there."""
MOST_LINKS = 40
"""On the way to one file, as for the kernel (path_resolution(7)); more lead nowhere."""
_ATTRIBUTES, _CLOSED_AFTER_WRITING, _MOVED, _CREATED, _DELETED = 0x4, 0x8, 0xC0, 0x100, 0x200
_ITSELF_DELETED_OR_MOVED = 0xC00
_EVENTS = _ATTRIBUTES | _CLOSED_AFTER_WRITING | _MOVED | _CREATED | _DELETED | _ITSELF_DELETED_OR_MOVED
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC


class Watch:
    """For the length of the block `changed` is called, on the running loop, after each change of one of `paths`.

    Raises OSError where there is no inotify, or no more of it (fs.inotify.max_user_watches).
    """

    def __init__(self, paths: Sequence[Path], changed: Callable[[], None], *, quiet: float = QUIET):
        self._paths = [path.absolute() for path in paths]
        self._changed = changed
        self._quiet = quiet
        self._soon: asyncio.TimerHandle | None = None
        """It is about to be looked what has happened."""
        self._timer: asyncio.TimerHandle | None = None
        """Of a change that is about to be told."""

    def __enter__(self) -> Self:
        self._kernel = _Kernel()
        try:
            self._kernel.follow(self._folders())
        except BaseException:
            self._kernel.close()
            raise
        self._told = self._seen = self._look()
        asyncio.get_running_loop().add_reader(self._kernel.file, self._hear)
        return self

    def __exit__(self, *exc_info: object) -> None:
        asyncio.get_running_loop().remove_reader(self._kernel.file)
        self._kernel.close()
        for timer in (self._soon, self._timer):
            if timer is not None:
                timer.cancel()

    def _hear(self) -> None:
        """Something has happened in one of the folders."""
        self._kernel.skip()
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(self._quiet / LOOKS, self._see)

    def _see(self) -> None:
        """What it was; the folders may be others by now."""
        self._soon = None
        try:
            self._kernel.follow(self._folders())
        except OSError as failed:
            log.warning("--models-watch: not everything is watched any more: %s", failed)
        found = self._look()  # after that: what came meanwhile is in it
        if found == self._seen:
            return
        self._seen = found
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._quiet, self._settle)

    def _settle(self) -> None:
        if self._seen != self._told:
            self._told = self._seen
            self._changed()

    def _folders(self) -> set[Path]:
        return {folder for path in self._paths for folder in _folders(path)}

    def _look(self) -> list[object]:
        return [_state(path) for path in self._paths]


class _Kernel:
    """Folders of which the kernel tells what happens in them. Raises OSError where it cannot."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self._libc, "inotify_init1"):
            raise OSError(0, "this system has no inotify; reload with SIGHUP or POST /router/reload")
        self.file = int(self._libc.inotify_init1(_FLAGS))
        """Becomes readable when something has happened."""
        if self.file < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._watches: set[int] = set()

    def close(self) -> None:
        os.close(self.file)

    def skip(self) -> None:
        """What it was is looked up anyway."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.file, 1 << 16)

    def follow(self, folders: Iterable[Path]) -> None:
        """These, from now on, and no others; those that are gone by now aside."""
        watches = {self._add(folder) for folder in folders} - {-1}
        for watch in self._watches - watches:
            self._libc.inotify_rm_watch(self.file, watch)  # it may have gone with its folder
        self._watches = watches

    def _add(self, folder: Path) -> int:
        """The number of its watch, the same for a folder that has one; -1: there is no such folder."""
        watch = int(self._libc.inotify_add_watch(self.file, os.fsencode(folder), _EVENTS))
        if watch < 0 and (error := ctypes.get_errno()) not in (errno.ENOENT, errno.ENOTDIR):
            raise OSError(error, os.strerror(error), str(folder))
        return watch


def _folders(path: Path) -> set[Path]:
    """Where a change of `path` can be seen: where it stands, and each link on the way to it, or would stand; and, if it
    is a folder, in itself and in those below."""
    return {*(_nearest(step.parent) for step in _steps(path)), *islice(_below(path), MOST_FOLDERS)}


def _steps(path: Path) -> Iterator[Path]:
    """Each link that leads to what `path` means, and that itself, whether or not it is there."""
    for _ in range(MOST_LINKS):
        link = next((each for each in (*reversed(path.parents), path) if os.path.islink(each)), None)
        yield link or path
        if link is None:
            return
        try:
            path = link.parent / os.readlink(link) / path.relative_to(link)
        except OSError:  # turned at this moment, which is told
            return


def _nearest(folder: Path) -> Path:
    """The folder, or the one above it that is there: where it would appear."""
    while not os.path.isdir(folder):
        folder = folder.parent
    return folder


def _below(path: Path, depth: int = DEPTH) -> Iterator[Path]:
    """A folder and those below it that may hold models; nothing if it is none."""
    if not os.path.isdir(path):
        return
    yield path
    if depth:
        for name, is_folder, *_ in _entries(path):
            if is_folder and not name.startswith(".") and os.access(path / name, os.R_OK | os.X_OK):
                yield from _below(path / name, depth - 1)


def _entries(folder: Path) -> list[tuple[str, bool, int, int]]:
    """(name, whether it is a folder, size and time of a file) of what is there, by name."""
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
    """Equal as long as nothing has changed there that anybody would want to read again."""
    if os.path.isdir(path):
        return [(folder, _entries(folder)) for folder in islice(_below(path), MOST_FOLDERS)]
    try:
        facts = path.stat()
    except OSError as error:
        return error.errno
    return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_mode, facts.st_uid, facts.st_gid


__all__ = ["QUIET", "Watch"]
