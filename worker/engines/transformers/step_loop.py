"""The step loop: one thread that computes, and the only one that touches the model.

The event loop posts commands; the thread runs them between steps, so what it works on needs no locks. Answers go back
through `call_soon_threadsafe`, all of a step in one call, and nothing ever waits for a reader. Once a second, busy or
idle, the thread itself calls `pulse`: if a step hangs, it falls silent.
"""

import asyncio
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from worker.engines.transformers.device import memory
from worker.errors import Draining, RankLost, RequestError, StartError
from worker.interface import EngineLoad
from worker.protocol.events import Pulse
from worker.protocol.exits import Exit

PULSE_INTERVAL = 1.0
"""Seconds."""

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a pulse says of the work, beyond its load. The two counters only rise; meanings as in `Pulse`."""

    parallel: int
    prefill_tokens: int
    """Counted since the start."""
    decode_tokens: int = 0
    """Counted since the start."""
    largest: tuple[int, int, int] = (0, 0, 0)
    seen: tuple[int, int] = (0, 0)
    cache_used: int = 0
    cache_reusable: int = 0
    cache_total: int = 0
    slots: tuple[tuple[int, int, int, int, int], ...] = ()


class Rate:
    """How fast a counter rises, from one look to the next."""

    def __init__(self) -> None:
        self._seen: tuple[int, float] | None = None

    def since(self, count: int, now: float) -> float:
        """Per second since the look before this one, to a tenth; 0.0 at the first look. `now` in seconds."""
        (before, then), self._seen = self._seen or (count, now), (count, now)
        return round((count - before) / (now - then), 1) if now > then else 0.0


class Work(Protocol):
    """What a step loop does. All of it is called on the loop's thread."""

    @property
    def has_work(self) -> bool: ...

    @property
    def load(self) -> tuple[int, int]:
        """How many run, how many wait."""

    def report(self) -> Report:
        """For a pulse: once a second, between two steps."""

    def step(self) -> None:
        """One step. Whatever fails for one request's sake ends that request; raising ends the process."""

    def abandon(self, error: RequestError) -> None:
        """End everything with `error`."""


class Outbox:
    """Calls for event loops, gathered during a step and handed over together."""

    def __init__(self) -> None:
        self._calls: defaultdict[asyncio.AbstractEventLoop, list[Callable[[], object]]] = defaultdict(list)

    def put(self, loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
        self._calls[loop].append(call)

    def flush(self) -> None:
        """Never waits. A loop that is closed has nobody left who listens."""
        for loop, calls in self._calls.items():
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_run_all, calls)
        self._calls.clear()


def _run_all(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()


class StepLoop:
    """Runs a `Work` on a thread of its own, from construction until `close`."""

    def __init__(
        self,
        work: Work,
        outbox: Outbox,
        *,
        pulse: Callable[[Pulse], None],
        measured: Callable[[], dict[str, int]],
        later: Callable[[], int],
        threads: int,
        interval: float = PULSE_INTERVAL,
    ):
        """`measured`, `later`: as in `Pulse`."""
        self._interval = interval
        self._work, self._outbox = work, outbox
        self._pulse, self._measured, self._later, self._threads = pulse, measured, later, threads
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._closing = False
        self._failure: Exception | None = None
        self._has_ended = False
        self._steps = 0
        self._prefill, self._decode = Rate(), Rate()
        self.occupancy = EngineLoad(steps=0, running=0, waiting=0)
        self.fatal: Future[StartError] = Future()
        """Done when the loop has died and the process must end. After a sticky device error, or if the model turns out
        to need what cannot be computed, the result says with which exit code; otherwise it raises what killed the loop,
        which is a crash."""
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)
        self._thread.start()

    def post(self, command: Callable[[], None]) -> bool:
        """Have `command` run on the thread before the next step; false if there will be none. From any thread."""
        with self._lock:
            if self._has_ended:
                return False
            self._inbox.append(command)
        self._wake.set()
        return True

    def call(self, work: Callable[[], T]) -> T:
        """What `work` gives, called on the thread between two steps; returns once it has. Raises what it raises, and
        Draining if there will be no step. From any other thread."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(work())
            except Exception as error:  # noqa: BLE001 - it is raised in the thread that waits for us
                answer.set_exception(error)

        if not self.post(run):
            raise Draining("the model is being unloaded")
        return answer.result()

    def fail(self, error: Exception) -> None:
        """Have the loop die of `error` as if its next step had raised it. From any thread."""
        self._failure = error
        self._wake.set()

    def close(self) -> None:
        """End all work with Draining; returns once the thread has ended, after its current step."""
        self._closing = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP counts for each thread that starts a parallel region
        try:
            self._loop()
            self._end(Draining("the model is being unloaded"))
        except Exception as error:
            is_told = isinstance(error, RankLost | StartError)  # it says what happened, and where: in another process
            log.error("the step loop has died: %s", error if is_told else type(error).__name__, exc_info=not is_told)
            self._end(Draining("the engine has failed and its worker is being replaced"))
            if isinstance(error, RankLost):
                self.fatal.set_exception(error)
            elif isinstance(error, StartError):
                self.fatal.set_result(error)
            elif memory.is_sticky(error):
                self.fatal.set_result(StartError(f"the device is lost: {memory.one_line(error)}", Exit.POISONED))
            elif isinstance(error, NotImplementedError):  # of a model whose load computed nothing
                self.fatal.set_result(StartError(f"this architecture cannot be served: {memory.one_line(error)}"))
            else:
                self.fatal.set_exception(error)

    def _end(self, error: RequestError) -> None:
        with self._lock:
            self._has_ended = True
        self._run_commands()
        self._work.abandon(error)
        self._note()

    def _loop(self) -> None:
        due = time.monotonic()
        while not self._closing:
            if time.monotonic() >= due:
                self._say()
                due = time.monotonic() + self._interval
            self._wake.clear()
            if self._failure is not None:
                raise self._failure
            self._run_commands()
            self._note()
            if self._work.has_work:
                self._work.step()
                self._steps += 1
                self._note()
            else:
                self._wake.wait(max(0.0, due - time.monotonic()))

    def _run_commands(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _note(self) -> None:
        running, waiting = self._work.load
        self.occupancy = EngineLoad(steps=self._steps, running=running, waiting=waiting)
        self._outbox.flush()

    def _say(self) -> None:
        now, at, report = self.occupancy, time.monotonic(), self._work.report()
        later = self._later()  # first: what comes meanwhile counts twice, and not never
        self._pulse(
            Pulse(
                steps=now.steps,
                running=now.running,
                waiting=now.waiting,
                measured=self._measured(),
                later=later,
                largest=list(report.largest),
                seen=list(report.seen) if any(report.seen) else [],
                mapped=memory.mapped(),
                parallel=report.parallel,
                prefill_rate=self._prefill.since(report.prefill_tokens, at),
                decode_rate=self._decode.since(report.decode_tokens, at),
                cache_used=report.cache_used,
                cache_reusable=report.cache_reusable,
                cache_total=report.cache_total,
                slots=[list(slot) for slot in report.slots],
            )
        )
