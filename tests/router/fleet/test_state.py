"""The states of a worker, forwards only."""

from itertools import pairwise

import pytest

from router.fleet.worker import State, advance

STATES = list(State)


@pytest.mark.parametrize(("earlier", "later"), [(a, b) for a in STATES for b in STATES if a < b])
def test_any_later_state_may_follow(earlier: State, later: State) -> None:
    assert advance(earlier, later) is later


@pytest.mark.parametrize(("current", "to"), [(a, b) for a in STATES for b in STATES if b <= a])
def test_a_state_never_goes_back(current: State, to: State) -> None:
    with pytest.raises(ValueError, match=f"cannot go back from {current.name} to {to.name}"):
        advance(current, to)


def test_the_states_come_in_the_order_of_a_life() -> None:
    names = ["DOWNLOADING", "QUEUED", "STARTING", "READY", "STOPPING", "STOPPED"]
    assert [state.name for state in sorted(STATES)] == names
    assert all(earlier < later for earlier, later in pairwise(STATES))


def test_memory_is_held_from_starting_until_stopped() -> None:
    assert [state for state in STATES if state.holds_memory] == [State.STARTING, State.READY, State.STOPPING]
