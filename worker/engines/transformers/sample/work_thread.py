"""A thread for calls into a library that cannot be interrupted, and of which a slow one can be detached.

A detached call goes on in its thread, and the calls behind it continue in another one. The CPU time of a call
is measured from outside, so a machine that is busy with something else makes no call slow.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")
Clock = Callable[[], float]


def thread_clock() -> Clock:
    """The CPU time of the calling thread in seconds, for any thread. It is 0.0 once the thread has ended."""
    clock = time.pthread_getcpuclockid(threading.get_ident())

    def read() -> float:
        try:
            return time.clock_gettime(clock)
        except OSError:
            return 0.0

    return read


class Job(Generic[Result]):
    """One call. `future` has its result."""

    def __init__(self, function: Callable[[], Result], clock_of_thread: Callable[[], Clock] = thread_clock):
        self._function, self._clock_of_thread = function, clock_of_thread
        self.future: Future[Result] = Future()
        self._clock: Clock | None = None  # of the thread that runs it
        self._begun = 0.0
        self._seconds = 0.0

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the call so far; 0.0 before it has begun."""
        clock = self._clock
        return self._seconds if clock is None else max(0.0, clock() - self._begun)

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        clock = self._clock_of_thread()
        self._begun, self._clock = clock(), clock
        function = self._function
        del self._function  # what it refers to may refer to this job, and take much memory
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            self._end(clock)
            self.future.set_exception(error)
        else:
            self._end(clock)
            self.future.set_result(result)

    def _end(self, clock: Clock) -> None:
        # The time is stored before the clock is dropped: another thread may read it in between.
        self._seconds = clock() - self._begun
        self._clock = None


class WorkThread:
    """Runs jobs one after the other in a thread that starts with the first one."""

    def __init__(
        self,
        name: str,
        clock_of_thread: Callable[[], Clock] = thread_clock,
        *,
        stack_bytes: int = 0,
        rest: Callable[[float], float] = lambda _: 0.0,
    ):
        """`clock_of_thread`: returns the clock of the thread that calls it; tests replace it. `stack_bytes`: of its
        threads; 0: as usual. Only what is used of a stack takes memory. `rest`: returns the
        pause in seconds after a job, given the CPU seconds of that job."""
        self._name, self.clock_of_thread, self._stack_bytes = name, clock_of_thread, stack_bytes
        self._rest = rest
        self._jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._current: Job[Any] | None = None

    def submit(self, function: Callable[[], Result]) -> Job[Result]:
        job = Job(function, self.clock_of_thread)
        with self._lock:
            self._jobs.put(job)
            if self._thread is None:
                self._start()
        return job

    @property
    def current(self) -> Job[Any] | None:
        """The job that is running, unless it was detached."""
        return self._current

    def detach(self, job: Job[Any]) -> None:
        """Continue with the next job in a new thread, if `job` is still running. It goes on in its own thread."""
        with self._lock:
            if self._current is job:
                self._start()

    def make_way(self) -> None:
        """Detach the job that calls this. For a job that waits: its CPU time, by which others detach it, does not
        grow."""
        with self._lock:
            if self._thread is threading.current_thread():
                self._start()

    def close(self) -> None:
        """End the thread after the jobs that were submitted."""
        with self._lock:
            if self._thread is not None:
                self._jobs.put(None)

    def _start(self) -> None:
        self._current = None
        # A daemon: a detached job must not delay the exit of the process.
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        before = threading.stack_size(self._stack_bytes)  # for all threads that start from now on
        try:
            self._thread.start()
        finally:
            threading.stack_size(before)

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
            # No call for a pause of 0.0 s: `time.sleep(0.0)` takes 0.1 ms, longer than a usual grammar mask.
            if pause := self._rest(job.cpu_seconds):
                time.sleep(pause)
