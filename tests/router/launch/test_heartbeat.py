"""The heartbeat of a process as a function of time."""

import pytest

from router.launch.exit_causes import Verdict
from router.launch.worker_process import Heartbeat
from worker.protocol.events import Prepared, Progress, Pulse

START, STALL = 10.0, 4.0


def loading(*, repeats_count: bool = False) -> Heartbeat:
    return Heartbeat(0.0, start_timeout=START, stall_timeout=STALL, repeats_count=repeats_count)


def pulse(steps: int, running: int = 1) -> Pulse:
    return Pulse(steps=steps, running=running, waiting=0, measured={})


def weights(done: int) -> Progress:
    return Progress(stage="weights", done=done, total=90)


def serving() -> Heartbeat:
    found = loading()
    found.serving(0.0)
    return found


def cause(verdict: Verdict | None) -> str:
    return verdict.cause if verdict else ""


def test_a_load_without_progress_is_ended() -> None:
    assert loading().verdict(9.9) is None
    assert cause(loading().verdict(10.0)) == "load_timeout"


def test_a_slow_load_with_progress_is_not() -> None:
    heartbeat = loading()
    for done in range(100):
        heartbeat.record(weights(done), done * 9.0)
        assert heartbeat.verdict(done * 9.0 + 9.0) is None
    verdict = heartbeat.verdict(99 * 9.0 + 10.0)
    assert verdict == Verdict("load_timeout", "made no progress for 10 s (last: weights, 99 of 90)")


def test_repeated_progress_does_not_count() -> None:
    heartbeat = loading()
    for second in range(1, 10):
        heartbeat.record(weights(5), float(second))
        heartbeat.record(pulse(0, running=0), float(second))
    assert heartbeat.verdict(10.9) is None
    assert cause(heartbeat.verdict(11.0)) == "load_timeout"


def test_any_event_counts_as_progress_if_repeats_count() -> None:
    heartbeat = loading(repeats_count=True)
    heartbeat.record(weights(5), 1.0)
    heartbeat.record(weights(5), 9.0)
    assert heartbeat.verdict(18.9) is None


@pytest.mark.parametrize("running", [0, 1])
def test_a_worker_without_a_pulse_is_ended(running: int) -> None:
    heartbeat = serving()
    heartbeat.record(pulse(1, running), 2.0)
    assert heartbeat.verdict(5.9) is None
    assert cause(heartbeat.verdict(6.0)) == "stalled"


def test_a_busy_worker_without_steps_is_ended_despite_its_pulse() -> None:
    heartbeat = serving()
    for second in range(1, 5):
        heartbeat.record(pulse(7), float(second))
    assert heartbeat.verdict(4.9) is None
    heartbeat.record(pulse(7), 5.0)
    assert heartbeat.verdict(5.0) == Verdict("stalled", "took no step for 4 s with 1 running")


def test_an_idle_worker_needs_no_steps() -> None:
    heartbeat = serving()
    for second in range(1, 50):
        heartbeat.record(pulse(7, running=0), float(second))
        assert heartbeat.verdict(float(second)) is None
    heartbeat.record(pulse(7, running=1), 50.0)
    assert heartbeat.verdict(50.0) is None, "the time before its first request does not count"


def test_time_in_which_events_were_not_read_does_not_count() -> None:
    heartbeat = serving()
    heartbeat.record(pulse(1), 1.0)
    heartbeat.excuse(100.0)
    assert heartbeat.verdict(104.9) is None
    assert cause(heartbeat.verdict(105.0)) == "stalled"


def test_a_process_that_waits_for_its_grant_is_exempt_and_loads_under_supervision_again() -> None:
    heartbeat = loading()
    heartbeat.record(Prepared(measured={"cpu": 1}), 9.0)
    assert heartbeat.verdict(10_000.0) is None
    heartbeat.memory_granted(10_000.0)
    assert heartbeat.verdict(10_009.9) is None
    assert cause(heartbeat.verdict(10_010.0)) == "load_timeout"
