"""A thread for calls into a library that cannot be interrupted, and of which a slow one can be given up.

A call that is given up goes on in its thread, and the calls behind it continue in another one. The CPU time of a call
is measured from outside, so a machine that is busy with something else makes no call slow.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class Job(Generic[Result]):
    """One call. `future` has its result."""

    def __init__(self, function: Callable[[], Result]):
        self._function = function
        self.future: Future[Result] = Future()
        self._clock: int | None = None  # the CPU clock of the thread that runs it
        self._begun = 0.0

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the call so far; 0.0 before it has begun and after it has ended."""
        clock = self._clock
        if clock is None:
            return 0.0
        with contextlib.suppress(OSError):  # the thread has ended in between
            return time.clock_gettime(clock) - self._begun
        return 0.0

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        clock = time.pthread_getcpuclockid(threading.get_ident())
        self._begun, self._clock = time.clock_gettime(clock), clock
        try:
            result = self._function()
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            self._clock = None
            self.future.set_exception(error)
        else:
            self._clock = None
            self.future.set_result(result)


class WorkThread:
    """Runs jobs one after the other in a thread that starts with the first one."""

    def __init__(self, name: str):
        self._name = name
        self._jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._current: Job[Any] | None = None

    def submit(self, function: Callable[[], Result]) -> Job[Result]:
        job = Job(function)
        with self._lock:
            self._jobs.put(job)
            if self._thread is None:
                self._start()
        return job

    def give_up(self, job: Job[Any]) -> None:
        """Continue with the next job in a new thread, if `job` is still running. Its result is then dropped."""
        with self._lock:
            if self._current is job:
                self._start()

    def close(self) -> None:
        """End the thread after the jobs that were submitted."""
        with self._lock:
            if self._thread is not None:
                self._jobs.put(None)

    def _start(self) -> None:
        self._current = None
        # A daemon: a job that was given up must not delay the exit of the process.
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        me = threading.current_thread()
        while (job := self._jobs.get()) is not None:
            with self._lock:
                self._current = job
            job.run()
            with self._lock:
                if self._thread is not me:
                    return
                self._current = None
