"""The wait until a preset file is written.

Some editors and `cp` empty a file before they write it. A reload at that moment would unload all models.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("router.config.written_file")

QUIET = 0.5  # seconds without a change after which a file counts as written
EMPTY = 5.0  # the same for an empty file; a guess

State = tuple[int, int, int]  # inode, size and modification time


async def until_written(
    path: Path, *, look: Callable[[Path], State | None] | None = None, quiet: float = QUIET, empty: float = EMPTY
) -> None:
    """Return once the file has not changed for `quiet` seconds, or for `empty` seconds while it is empty.

    Returns at once if there is no file. `look`: reads the state, None if there is none; for tests.
    """
    look = look or look_at
    warned, unchanged = False, 0.0
    state = await asyncio.to_thread(look, path)
    while state is not None:
        is_empty = not state[1]
        if unchanged >= (empty if is_empty else quiet):
            return
        if is_empty and not warned:
            warned = True
            log.warning("%s is empty; the models are kept if it is written within %g s", path, empty)
        await asyncio.sleep(quiet)
        before, state = state, await asyncio.to_thread(look, path)
        unchanged = unchanged + quiet if state == before else 0.0


def look_at(path: Path) -> State | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
