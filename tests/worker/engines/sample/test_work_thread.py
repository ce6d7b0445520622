"""The thread of calls of which a slow one can be detached."""

import functools
import threading

import pytest

from worker.engines.transformers.sample.work_thread import WorkThread

DEADLINE = 60.0


def test_jobs_run_in_their_order_in_one_thread() -> None:
    thread = WorkThread("jobs")
    order: list[tuple[int, int]] = []

    def note(number: int) -> None:
        order.append((number, threading.get_ident()))

    jobs = [thread.submit(functools.partial(note, number)) for number in range(5)]
    for job in jobs:
        job.future.result(DEADLINE)
    assert [number for number, _ in order] == list(range(5))
    assert len({ident for _, ident in order}) == 1
    thread.close()


def test_the_jobs_behind_a_detached_one_run_in_another_thread() -> None:
    thread = WorkThread("jobs")
    begun, release = threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        release.wait()
        return "late"

    stuck = thread.submit(slow)
    behind = thread.submit(lambda: "result")
    assert begun.wait(DEADLINE)
    assert not behind.future.done()
    thread.detach(stuck)
    assert behind.future.result(DEADLINE) == "result"
    release.set()
    assert stuck.future.result(DEADLINE) == "late"
    # the thread of the detached job takes no further one
    thread.detach(stuck)
    assert thread.submit(lambda: "next").future.result(DEADLINE) == "next"
    thread.close()


def test_a_cancelled_job_is_not_run_and_an_error_reaches_the_caller() -> None:
    thread = WorkThread("jobs")
    release = threading.Event()
    thread.submit(release.wait)
    ran: list[str] = []
    cancelled = thread.submit(lambda: ran.append("cancelled"))
    assert cancelled.future.cancel()
    failing = thread.submit(lambda: 1 // 0)
    release.set()
    with pytest.raises(ZeroDivisionError):
        failing.future.result(DEADLINE)
    assert not ran
    thread.close()


def test_the_cpu_time_of_a_job_is_that_of_its_thread_alone() -> None:
    thread = WorkThread("jobs")
    release = threading.Event()
    waiting = thread.submit(release.wait)
    sum(range(3_000_000))  # work of another thread
    assert waiting.cpu_seconds < 0.01

    def spin() -> None:
        while not spun.is_set():
            pass

    spun = threading.Event()
    spinning = thread.submit(spin)
    assert spinning.cpu_seconds == 0.0
    release.set()
    while spinning.cpu_seconds < 0.02:
        pass
    spun.set()
    spinning.future.result(DEADLINE)
    after = spinning.cpu_seconds
    assert after >= 0.02
    sum(range(3_000_000))
    assert spinning.cpu_seconds == after, "it has ended"
    thread.close()


def test_a_thread_rests_between_jobs_by_the_cpu_time_of_each() -> None:
    clock, seen = [0.0], []
    rests = threading.Event()

    def rest(seconds: float) -> float:
        seen.append(seconds)
        if len(seen) == 2:
            rests.set()
        return 0.0

    thread = WorkThread("jobs", lambda: lambda: clock[0], rest=rest)
    for seconds in (0.5, 2.0):
        thread.submit(lambda seconds=seconds: clock.__setitem__(0, clock[0] + seconds)).future.result(DEADLINE)  # type: ignore[misc]
    assert rests.wait(DEADLINE)
    assert seen == [0.5, 2.0]
    thread.close()
