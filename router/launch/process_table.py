"""All child processes of one router: registered, killed, reaped.

Each process has a tag, a record on disk (`router.launch.pidfile`) for the next router, and its process group is known
to the guard (`router.launch.guard`), which kills it if this router dies. `end` undoes all three.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path

from router.launch import reaper
from router.launch.environment import Verb
from router.launch.guard import Guard
from router.launch.interface import Program
from router.launch.pidfile import RunFolder, RunFolderError
from router.launch.process import Child

log = logging.getLogger("router.launch.interface")

CLOSE_TIMEOUT = 5.0  # seconds that killed processes get to be reaped before the table is left anyway


class ProcessTable:
    """The running child processes, from `open` to `close`."""

    def __init__(self, runtime_dir: Path):
        self._folder = RunFolder(runtime_dir)
        self._children: dict[str, Child] = {}
        self._guard: Guard | None = None
        self._opened = contextlib.ExitStack()

    def open(self) -> None:
        """Take the runtime folder, kill what an earlier router left, start the guard.

        Raises RunFolderError, OSError.
        """
        with contextlib.ExitStack() as stack:
            for survivor in self._folder.open():
                log.warning("killed %s (process %d), left by an earlier router", survivor.worker, survivor.pid)
            stack.callback(self._folder.close)
            had_adopted = reaper.adopt()
            stack.callback(reaper.adopt, whether=had_adopted)
            self._guard = Guard()
            stack.callback(self._close_guard)
            reaper.known.add(self._guard.pid)
            self._opened = stack.pop_all()

    def close(self) -> None:
        """End the guard and give up the folder."""
        self._opened.close()

    def tag(self, program: Program) -> str:
        """The name of one run of one process; never given twice."""
        return self._folder.tag(program.model, program.worker)

    def socket(self, tag: str) -> Path:
        """The path of the socket on which the worker of this run listens."""
        return self._folder.socket(tag)

    def child(self, tag: str) -> Child:
        return self._children[tag]

    def add(self, tag: str, child: Child, program: Program, verb: Verb) -> None:
        """Register a new process. Call it before the process gets its token.

        From then on the next router finds it on disk, and the guard knows its group. If either fails, this is logged
        and the process runs on: it also ends by itself when the router dies.
        """
        self._children[tag] = child
        assert self._guard is not None, "the table is not open"
        try:
            self._guard.add(child.pid)
            reaper.known.add(self._guard.pid)  # `add` may have replaced a guard that died
            self._folder.write(tag, child.pid, model=program.model, worker=program.worker, verb=verb)
        except (OSError, RunFolderError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            folder = self._folder.path
            log.warning("%s: cannot record process %d in %s: %s", program.worker, child.pid, folder, why)

    async def end(self, tag: str) -> None:
        """Return once the process of that tag, its group and its orphans are gone. Does nothing for an unknown tag.

        Must not be cancelled half-way; callers wrap it in `uncancelled`.
        """
        child = self._children.get(tag)
        if child is None:
            return
        await child.end()
        # Only now: orphans pass to this process when their parent has ended.
        for pid in await reaper.end(child.pid, tag):
            log.error("process %d, left by a worker, is stuck: SIGKILL did not end it", pid)
        del self._children[tag]
        try:
            if self._guard is not None:
                self._guard.remove(child.pid)
            self._folder.remove(tag)
        except OSError as error:
            log.warning("cannot remove the record of process %d: %s", child.pid, error)

    def add_helper(self, pid: int) -> None:
        """Have the guard kill the group of a helper process that has no record and is reaped by its owner."""
        reaper.known.add(pid)
        if self._guard is not None:
            with contextlib.suppress(OSError):  # the helper also ends with its pipe and its parent
                self._guard.add(pid)

    def remove_helper(self, pid: int) -> None:
        """Forget a helper process that was reaped."""
        reaper.known.discard(pid)
        if self._guard is not None:
            with contextlib.suppress(OSError):
                self._guard.remove(pid)

    def kill(self, besides: int = 0) -> None:
        """Send SIGKILL to all groups but that of the process `besides`. Whoever waits in `end` then returns."""
        for child in self._but(besides):
            child.kill()

    async def wait_for_exits(self, besides: int = 0) -> None:
        """Return once all processes but `besides` are reaped, or after `CLOSE_TIMEOUT`."""
        left = {child.exited for child in self._but(besides)}
        if left:
            await asyncio.wait(left, timeout=CLOSE_TIMEOUT)

    def _but(self, pid: int) -> Iterable[Child]:
        return [child for child in self._children.values() if child.pid != pid]

    def _close_guard(self) -> None:
        assert self._guard is not None
        self._guard.close()
        reaper.known.discard(self._guard.pid)
        self._guard = None


__all__ = ["ProcessTable"]
