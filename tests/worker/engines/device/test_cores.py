"""Threads of a step beside other programs."""

from pathlib import Path

import pytest

from worker.engines.transformers.device.cores import StepThreads, busy_seconds, thread_count


@pytest.mark.parametrize(
    ("most", "cores", "others", "count"),
    [
        (2, 2, 0.0, 2),
        (2, 2, 0.4, 2),  # the router and a client
        (2, 2, 0.6, 1),  # a worker with one thread beside ours with two
        (2, 2, 2.0, 1),
        (1, 64, 70.0, 1),
        (8, 64, 56.0, 8),
        (8, 64, 58.0, 4),
        (12, 16, 12.0, 3),
        (3, 2, 0.0, 2),
        (4, 4, -0.1, 4),  # clocks of different resolution
    ],
)
def test_threads_are_halved_until_each_has_a_core(most: int, cores: int, others: float, count: int) -> None:
    assert thread_count(most, cores, others) == count


@pytest.mark.parametrize(("workers", "most", "cores"), [(2, 2, 2), (2, 4, 4), (3, 2, 4), (4, 8, 16), (5, 4, 4)])
def test_workers_that_compute_at_once_soon_lack_at_most_half_a_core_each(workers: int, most: int, cores: int) -> None:
    counts = [most] * workers
    for turn in range(4 * workers):  # their pulses are not at the same time
        mine = turn % workers
        share = min(1.0, cores / sum(counts))  # of a core, for each thread, because all threads spin
        counts[mine] = thread_count(most, cores, share * (sum(counts) - counts[mine]))
    share = min(1.0, cores / sum(counts))
    assert all(count == 1 or count * (1 - share) <= 0.5 for count in counts)
    assert thread_count(most, cores, 0.0) == min(most, cores), "the last one that computes has all again"


def test_threads_follow_the_use_of_the_cores_since_the_call_before() -> None:
    now, others, own = 10.0, 500.0, 3.0
    threads = StepThreads(2, {4, 5}, busy=lambda _: others + own, own=lambda: own, clock=lambda: now)
    assert threads() == 2, "nothing is known yet"
    now, own = 11.0, 5.0
    assert threads() == 2, "its own time does not count"
    now, own, others = 12.0, 6.0, 501.0
    assert threads() == 1
    now = 13.0
    assert threads() == 2


def test_one_thread_reads_nothing() -> None:
    def fail(_: object) -> float:
        raise AssertionError("needless")

    threads = StepThreads(1, {0}, busy=fail)
    assert (threads(), threads()) == (1, 1)


def test_time_of_our_cores_counts_but_for_idle_time(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  9 9 9 9 9 9 9 9 9 9\n"
        "cpu1 100 20 30 9999 9999 1 2 47 5 0\n"
        "cpu11 9 9 9 9 9 9 9 9 9 9\n"
        "cpu12 1000 0 0 0 0 0 0 0 0 0\n"
        "intr 5 4 3\n"
    )
    assert busy_seconds({1, 12}, stat, ticks_per_second=100) == 12.0
    assert busy_seconds({1, 12}, tmp_path / "absent") == 0.0
