"""The heartbeat of one process, from its events, and the watchdog that kills the process when it stops."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from router.launch.process import Child
from worker.protocol.events import Event, Prepared, Progress, Pulse

CHECK_INTERVAL = 1.0  # seconds between two checks of a heartbeat
LATE = 1.0  # a check that is later than this, in seconds, is not trusted: events may not have been read either


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reason to kill a process; `reason` is the text for people."""

    cause: Literal["load_timeout", "stalled"]
    reason: str


class Heartbeat:
    """Decides by the events of one process whether it is alive. Times are seconds of a monotonic clock.

    Before `serving`, the process must make progress every `start_timeout` seconds: send an event that differs from the
    last one of its kind (with `repeats_count`, any event). A prepared process that waits for `Go` is exempt. After
    `serving`, it must send a pulse every `stall_timeout` seconds, and take a step within that time while requests run.
    """

    def __init__(self, now: float, *, start_timeout: float, stall_timeout: float, repeats_count: bool = False):
        self._start_timeout = start_timeout
        self._stall_timeout = stall_timeout
        self._repeats_count = repeats_count
        self._last: dict[type[Event], Event] = {}
        self._stage = ""
        self._serving = False
        self._waits_for_go = False
        self._progress_at = now
        self._pulse_at = now
        self._step_at = now
        self._steps = -1
        self._running = 0

    @property
    def shortest_timeout(self) -> float:
        return min(self._start_timeout, self._stall_timeout)

    def record(self, event: Event, now: float) -> None:
        """Take note of an event."""
        if self._repeats_count or self._last.get(type(event)) != event:
            self._progress_at = now
        self._last[type(event)] = event
        if isinstance(event, Progress):
            self._stage = f"{event.stage}, {event.done} of {event.total}" if event.total else event.stage
        if isinstance(event, Prepared):
            self._waits_for_go = True
        if isinstance(event, Pulse):
            self._pulse_at = now
            # An idle engine takes no steps, so it counts as having just taken one.
            if event.steps != self._steps or not event.running:
                self._step_at = now
            self._steps, self._running = event.steps, event.running

    def go(self, now: float) -> None:
        """Expect progress from now on: a prepared process got `Go`."""
        self._waits_for_go = False
        self._progress_at = now

    def serving(self, now: float) -> None:
        """Expect pulses from now on."""
        self._serving = True
        self._pulse_at = self._step_at = now

    def excuse(self, seconds: float) -> None:
        """Do not count `seconds` as silence, in which events were not read."""
        self._progress_at += seconds
        self._pulse_at += seconds
        self._step_at += seconds

    def verdict(self, now: float) -> Verdict | None:
        """The reason to kill the process; None: it is alive."""
        if self._waits_for_go:
            return None
        if not self._serving:
            if now - self._progress_at < self._start_timeout:
                return None
            stage = f" (last: {self._stage})" if self._stage else ""
            return Verdict("load_timeout", f"made no progress for {self._start_timeout:g} s{stage}")
        if now - self._pulse_at >= self._stall_timeout:
            return Verdict("stalled", f"gave no pulse for {self._stall_timeout:g} s")
        if self._running and now - self._step_at >= self._stall_timeout:
            return Verdict("stalled", f"took no step for {self._stall_timeout:g} s with {self._running} running")
        return None


class Watchdog:
    """Checks the heartbeat of a child each second or more often.

    If it fails, calls `on_verdict` and kills the child.
    """

    def __init__(self, child: Child, heartbeat: Heartbeat, on_verdict: Callable[[Verdict], None]):
        self._child = child
        self._heartbeat = heartbeat
        self._interval = min(CHECK_INTERVAL, heartbeat.shortest_timeout / 4)
        self._on_verdict = on_verdict
        self._loop = asyncio.get_running_loop()
        self._arm()

    def cancel(self) -> None:
        self._timer.cancel()

    def _arm(self) -> None:
        self._due = self._loop.time() + self._interval
        self._timer = self._loop.call_at(self._due, self._check)

    def _check(self) -> None:
        now = self._loop.time()
        if self._child.exited.done():
            return
        self._child.read()  # events that arrived while this process was busy
        if now - self._due > LATE:  # this process was suspended or blocked
            self._heartbeat.excuse(now - self._due)
        elif (verdict := self._heartbeat.verdict(now)) is not None:
            self._on_verdict(verdict)
            self._child.kill()
            return
        self._arm()
