"""The eye on one child: it looks at its vitals in time, and kills it when they fail."""

import asyncio
from collections.abc import Callable

from router.launch.heartbeat import Verdict, Vitals
from router.launch.process import Child

LOOK_INTERVAL = 1.0
"""Seconds between two looks at a process's vitals."""
LATE = 1.0
"""Seconds by which our own timer may be late before what it would judge is not trusted."""


class Watch:
    """Looks at a child's vitals each second or oftener and kills it when they fail; `judged` is told why, once."""

    def __init__(self, child: Child, vitals: Vitals, judged: Callable[[Verdict], None]):
        self._child = child
        self._vitals = vitals
        self._interval = min(LOOK_INTERVAL, vitals.shortest_timeout / 4)
        self._judged = judged
        self._loop = asyncio.get_running_loop()
        self._arm()

    def cancel(self) -> None:
        self._timer.cancel()

    def _arm(self) -> None:
        self._due = self._loop.time() + self._interval
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        if self._child.exited.done():
            return
        self._child.read()  # what it said while we were busy
        if now - self._due > LATE:  # we slept, or were stopped: its silence may be ours
            self._vitals.excuse(now - self._due)
        elif (verdict := self._vitals.verdict(now)) is not None:
            self._judged(verdict)
            self._child.kill()
            return
        self._arm()
