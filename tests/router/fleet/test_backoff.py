"""When a model that failed may be tried again, as values."""

import pytest

from router.fleet.failures import LONGEST_PAUSE, WINDOW, Crashes


def pauses(count: int, *, allowed: int = 3, served: bool = False, jitter: float = 1.0) -> list[float]:
    """Of a model that is tried again as soon as it may, and crashes each time."""
    crashes, now, found = Crashes(), 0.0, []
    for _ in range(count):
        found.append(crashes.pause(now, allowed=allowed, served=served, jitter=jitter))
        now += found[-1]
    return found


def test_the_first_crashes_cost_a_second_and_the_next_ones_twice_the_last() -> None:
    assert pauses(7) == [1, 1, 1, 2, 4, 8, 16]


def test_a_crash_in_service_costs_nothing_until_there_are_many() -> None:
    assert pauses(5, allowed=2, served=True) == [0, 0, 2, 4, 8]


def test_pauses_end_at_five_minutes_and_never_fall_while_it_crashes() -> None:
    found = pauses(2000)
    assert found == sorted(found)
    assert found[-1] == LONGEST_PAUSE


def test_models_that_failed_together_retry_at_different_times() -> None:
    assert pauses(1, allowed=0, jitter=0.8) < pauses(1, allowed=0, jitter=1.2)


def test_good_service_resets_the_crash_count() -> None:
    crashes = Crashes()
    for _ in range(9):
        crashes.pause(0.0, allowed=1, served=False, jitter=1.0)
    crashes.forget()
    assert crashes.pause(1.0, allowed=1, served=False, jitter=1.0) == 1.0


@pytest.mark.parametrize(("later", "pause"), [(WINDOW - 1, 2.0), (WINDOW + 1, 1.0)])
def test_crashes_count_for_ten_minutes(later: float, pause: float) -> None:
    crashes = Crashes()
    crashes.pause(0.0, allowed=1, served=False, jitter=1.0)
    assert crashes.pause(later, allowed=1, served=False, jitter=1.0) == pause
