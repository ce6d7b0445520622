"""The step loop: the one thread that computes and touches the model.

The asyncio side posts commands, and the thread runs them between steps. So the scheduler, the cache and the model need
no locks. Results return through `call_soon_threadsafe`, one call for each step and event loop. The thread never waits
for a client. It also sends the pulse, once a second: a hanging step stops the pulse, and the router notices.
"""

import asyncio
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol, TypeVar

import torch

from worker.engines.transformers.device import cuda_errors, memory
from worker.engines.transformers.device.growth import Growth
from worker.errors import Draining, RankLost, RequestError, StartError
from worker.interface import EngineLoad
from worker.protocol.events import Exit, Pulse

PULSE_INTERVAL = 1.0  # seconds
# Seconds from the end of announced steps to the pulse that reports their memory. Counting its pages at once would delay
# a swap that begins as soon as the steps have ended.
_IDLE_PULSE = 0.1

T = TypeVar("T")

log = logging.getLogger(__name__)


class CounterRate:
    """Rate of a counter between two readings."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None

    def since(self, count: int, now: float) -> float:
        """Return the increase per second since the last call, rounded to a tenth. The first call returns 0.0."""
        (before, then), self._last = self._last or (count, now), (count, now)
        return round((count - before) / (now - then), 1) if now > then else 0.0


class StepWork(Protocol):
    """The work of a step loop. All methods are called on the loop's thread."""

    @property
    def has_work(self) -> bool: ...

    @property
    def load(self) -> tuple[int, int]:
        """Numbers of running and of waiting sequences or texts."""

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens computed since the start."""

    @property
    def decode_tokens(self) -> int:
        """Tokens generated since the start."""

    def report(self, pulse: Pulse) -> Pulse:
        """Return `pulse` with the figures of the work. Called once a second, between two steps."""

    def step(self) -> None:
        """Do one step. A failure that one request causes ends that request. An exception ends the process."""

    def abandon(self, error: RequestError) -> None:
        """End all requests with `error`."""


class Outbox:
    """Calls for event loops, collected during a step and delivered together."""

    def __init__(self) -> None:
        self._calls: defaultdict[asyncio.AbstractEventLoop, list[Callable[[], object]]] = defaultdict(list)

    def put(self, loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
        self._calls[loop].append(call)

    def flush(self) -> None:
        """Deliver the calls without waiting. Calls for a closed event loop are dropped: its requests have ended."""
        for loop, calls in self._calls.items():
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_run_all, calls)
        self._calls.clear()


def _run_all(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()


class StepLoop:
    """Runs a `StepWork` on a thread of its own, from construction until `close`."""

    def __init__(
        self,
        work: StepWork,
        outbox: Outbox,
        *,
        pulse: Callable[[Pulse], None],
        measured: Callable[[], dict[str, int]],
        later: Callable[[], int],
        threads: Callable[[], int],
        unannounced: Callable[[], int] = lambda: 0,
        growth: Growth | None = None,
        interval: float = PULSE_INTERVAL,
    ):
        """`measured`, `later` and `unannounced` return the values of these `Pulse` fields, and `threads` the number of
        torch threads. Each is called once per pulse. `growth`: announcements of main memory, None for none."""
        self._interval = interval
        self._work, self._outbox = work, outbox
        self._pulse, self._measured, self._later, self._threads = pulse, measured, later, threads
        self._unannounced, self._growth = unannounced, growth or Growth()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._closing = False
        self._failure: Exception | None = None
        self._has_ended = False
        self._steps = 0
        self._prefill, self._decode = CounterRate(), CounterRate()
        self.occupancy = EngineLoad(steps=0, running=0, waiting=0)
        # Done when the loop has died and the process must end. The result is a StartError with the exit code, after a
        # sticky device error or if the model cannot be computed. An exception is set for anything else: a crash.
        self.fatal: Future[StartError] = Future()
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)
        self._thread.start()

    def post(self, command: Callable[[], None]) -> bool:
        """Run `command` on the thread before the next step. False if the loop has ended. From any thread."""
        with self._lock:
            if self._has_ended:
                return False
            self._inbox.append(command)
        self._wake.set()
        return True

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread between two steps, and return its result or raise its exception.

        Raises Draining if the loop has ended. From any other thread.
        """
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(work())
            except Exception as error:  # noqa: BLE001 - raised in the waiting thread
                answer.set_exception(error)

        if not self.post(run):
            raise Draining("the model is being unloaded")
        return answer.result()

    def fail(self, error: Exception) -> None:
        """End the loop with `error` as if its next step had raised it. From any thread."""
        self._failure = error
        self._wake.set()

    def close(self) -> None:
        """End all work with Draining, and wait for the thread, which finishes its current step."""
        self._closing = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop()
            self._end(Draining("the model is being unloaded"))
        except Exception as error:
            # These messages name the process and the cause, so that a traceback of this process adds nothing.
            is_explained = isinstance(error, RankLost | StartError)
            log.error("step loop ended: %s", error if is_explained else type(error).__name__, exc_info=not is_explained)
            self._end(Draining("the engine has failed and its worker is being replaced"))
            if isinstance(error, RankLost):
                self.fatal.set_exception(error)
            elif isinstance(error, StartError):
                self.fatal.set_result(error)
            elif cuda_errors.is_sticky(error):
                self.fatal.set_result(StartError(f"the device is lost: {cuda_errors.one_line(error)}", Exit.POISONED))
            elif isinstance(error, NotImplementedError):  # without a warmup, the first step finds this out
                self.fatal.set_result(StartError(f"this architecture cannot be served: {cuda_errors.one_line(error)}"))
            else:
                self.fatal.set_exception(error)

    def _end(self, error: RequestError) -> None:
        with self._lock:
            # Under the lock: a command is either posted before this and run below, or `post` returns False.
            self._has_ended = True
        self._run_commands()
        self._work.abandon(error)
        self._publish()

    def _loop(self) -> None:
        torch.set_num_threads(self._threads())
        due = time.monotonic() + self._interval  # `Ready` has the figures of now
        while not self._closing:
            if time.monotonic() >= due:
                self._send_pulse()
                due = time.monotonic() + self._interval
            self._wake.clear()
            # Cleared before the commands are read: one that is posted meanwhile sets it again, and no wake-up is lost.
            if self._failure is not None:
                raise self._failure
            self._run_commands()
            self._publish()
            if self._work.has_work:
                self._work.step()
                self._steps += 1
                self._publish()
            else:
                if self._growth.step_bytes:  # report what the steps took; until then all that they may take is reserved
                    due = min(due, time.monotonic() + _IDLE_PULSE)
                self._wake.wait(max(0.0, due - time.monotonic()))

    def _run_commands(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _publish(self) -> None:
        running, waiting = self._work.load
        self.occupancy = EngineLoad(steps=self._steps, running=running, waiting=waiting)
        self._outbox.flush()

    def _send_pulse(self) -> None:
        torch.set_num_threads(self._threads())  # OpenMP has one count for each thread that starts a parallel region
        # An announcement waits while the pipe of events is full. The loop does not: it leaves out this pulse.
        if self._growth.lock.acquire(blocking=False):
            try:
                self._compose_pulse()
            finally:
                self._growth.lock.release()

    def _compose_pulse(self) -> None:
        now, at, work = self.occupancy, time.monotonic(), self._work
        self._growth.settle()  # what steps have taken is measured below
        with memory.inheritance.one_count():
            # Read before `measured`: memory that is allocated in between counts twice, which is safe, and not never.
            later = self._later()
            pulse = Pulse(
                steps=now.steps,
                running=now.running,
                waiting=now.waiting,
                measured=self._measured(),
                later=later,
                unannounced=self._unannounced(),
                resident=memory.held(),
                mapped=memory.mapped(),
                prefill_rate=self._prefill.since(work.prefill_tokens, at),
                decode_rate=self._decode.since(work.decode_tokens, at),
            )
            self._pulse(work.report(pulse))
