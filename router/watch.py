"""Tells when files or folders have been changed, as the kernel does (inotify(7)); nothing is polled.

What is watched is the folder that something stands in, since editors and deployments put new files in the place of
old ones. Changes that come together are told once, when it has been quiet for a moment, and only if what is there is
different: a file that is half written, put back or merely touched beside them is nobody's news.
"""

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

QUIET = 0.5
"""Seconds without a further change until one is told."""
_CLOSED_AFTER_WRITING, _MOVED, _CREATED, _DELETED = 0x8, 0xC0, 0x100, 0x200
_EVENTS = _CLOSED_AFTER_WRITING | _MOVED | _CREATED | _DELETED
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC


class Watch:
    """For the length of the block `changed` is called, on the running loop, after each change of one of `paths`.

    Raises OSError where there is no inotify, or no more of it (fs.inotify.max_user_watches).
    """

    def __init__(self, paths: Sequence[Path], changed: Callable[[], None], *, quiet: float = QUIET):
        self._paths = [path.absolute() for path in paths]
        self._changed = changed
        self._quiet = quiet
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._file = _open(sorted({folder for path in self._paths for folder in _folders(path)}))
        self._seen = self._look()
        asyncio.get_running_loop().add_reader(self._file, self._hear)
        return self

    def __exit__(self, *exc_info: object) -> None:
        asyncio.get_running_loop().remove_reader(self._file)
        os.close(self._file)
        if self._timer is not None:
            self._timer.cancel()

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._file, 1 << 16)  # which file it was is looked up anyway
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._quiet, self._settle)

    def _settle(self) -> None:
        found = self._look()
        if found != self._seen:
            self._seen = found
            self._changed()

    def _look(self) -> list[object]:
        return [_state(path) for path in self._paths]


def _folders(path: Path) -> set[Path]:
    """Where a change of `path` can be seen: in itself if it is a folder, in the one it stands in, and, if it is a link,
    in the one that what it points to stands in."""
    found = {path.parent, path.resolve().parent}
    return {folder for folder in (found | {path} if path.is_dir() else found) if folder.is_dir()}


def _state(path: Path) -> object:
    """Equal as long as nothing has changed there; of a folder: the names in it."""
    try:
        facts = path.stat()
        if path.is_dir():
            return sorted(os.listdir(path))
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def _open(folders: Sequence[Path]) -> int:
    """A descriptor of inotify that becomes readable with each change in one of the folders."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "inotify_init1"):
        raise OSError(0, "this system has no inotify; reload with SIGHUP or POST /router/reload")
    file = int(libc.inotify_init1(_FLAGS))
    if file < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    for folder in folders:
        if libc.inotify_add_watch(file, os.fsencode(folder), _EVENTS) < 0:
            error = ctypes.get_errno()
            os.close(file)
            raise OSError(error, os.strerror(error), str(folder))
    return file


__all__ = ["QUIET", "Watch"]
