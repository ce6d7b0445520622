"""When silence is death, as a function of time."""

import pytest

from router.launch.exit_causes import Verdict
from router.launch.worker_process import Heartbeat
from worker.protocol.events import Prepared, Progress, Pulse

START, STALL = 10.0, 4.0


def vitals(*, repeats_count: bool = False) -> Heartbeat:
    return Heartbeat(0.0, start_timeout=START, stall_timeout=STALL, repeats_count=repeats_count)


def pulse(steps: int, running: int = 1) -> Pulse:
    return Pulse(steps=steps, running=running, waiting=0, measured={})


def weights(done: int) -> Progress:
    return Progress(stage="weights", done=done, total=90)


def serving() -> Heartbeat:
    found = vitals()
    found.serving(0.0)
    return found


def cause(verdict: Verdict | None) -> str:
    return verdict.cause if verdict else ""


def test_a_load_without_progress_is_ended() -> None:
    assert vitals().verdict(9.9) is None
    assert cause(vitals().verdict(10.0)) == "load_timeout"


def test_a_slow_load_with_progress_is_not() -> None:
    one = vitals()
    for done in range(100):
        one.record(weights(done), done * 9.0)
        assert one.verdict(done * 9.0 + 9.0) is None
    verdict = one.verdict(99 * 9.0 + 10.0)
    assert verdict == Verdict("load_timeout", "made no progress for 10 s (last: weights, 99 of 90)")


def test_the_same_progress_again_is_none() -> None:
    one = vitals()
    for second in range(1, 10):
        one.record(weights(5), float(second))
        one.record(pulse(0, running=0), float(second))
    assert one.verdict(10.9) is None
    assert cause(one.verdict(11.0)) == "load_timeout"


def test_where_repeats_count_any_word_will_do() -> None:
    one = vitals(repeats_count=True)
    one.record(weights(5), 1.0)
    one.record(weights(5), 9.0)
    assert one.verdict(18.9) is None


@pytest.mark.parametrize("running", [0, 1])
def test_a_worker_without_a_pulse_is_ended(running: int) -> None:
    one = serving()
    one.record(pulse(1, running), 2.0)
    assert one.verdict(5.9) is None
    assert cause(one.verdict(6.0)) == "stalled"


def test_a_busy_worker_that_takes_no_step_is_ended_though_its_pulse_goes_on() -> None:
    one = serving()
    for second in range(1, 5):
        one.record(pulse(7), float(second))
    assert one.verdict(4.9) is None
    one.record(pulse(7), 5.0)
    assert one.verdict(5.0) == Verdict("stalled", "took no step for 4 s with 1 running")


def test_an_idle_worker_need_take_no_step() -> None:
    one = serving()
    for second in range(1, 50):
        one.record(pulse(7, running=0), float(second))
        assert one.verdict(float(second)) is None
    one.record(pulse(7, running=1), 50.0)
    assert one.verdict(50.0) is None, "the time before its first request counts for nothing"


def test_time_in_which_nobody_listened_counts_for_nothing() -> None:
    one = serving()
    one.record(pulse(1), 1.0)
    one.excuse(100.0)
    assert one.verdict(104.9) is None
    assert cause(one.verdict(105.0)) == "stalled"


def test_standing_by_is_no_silence_and_loading_after_it_is_watched_again() -> None:
    one = vitals()
    one.record(Prepared(measured={"cpu": 1}), 9.0)
    assert one.verdict(10_000.0) is None
    one.go(10_000.0)
    assert one.verdict(10_009.9) is None
    assert cause(one.verdict(10_010.0)) == "load_timeout"
