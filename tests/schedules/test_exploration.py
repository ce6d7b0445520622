"""Random worlds, lived through: what must hold at every step, and at the end. `scripts/explore_scheduler` runs more."""

import time

import pytest

from tests.schedules.exploration import explore

pytestmark = pytest.mark.slow

SEEDS = 1000
SECONDS = 30.0
"""After so many no further worlds are begun: a busy machine looks at fewer."""
AT_LEAST = 100
SEEDS_THAT_FAILED: tuple[int, ...] = (71, 98, 117, 3040)


@pytest.mark.parametrize("seed", SEEDS_THAT_FAILED)
def test_a_seed_that_failed_once_holds(seed: int) -> None:
    explore(seed)


def test_every_request_ends_once_and_its_lease_is_back() -> None:
    """And a quiet loop has no waiter: if nothing is left to happen while somebody waits, `run_virtual` raises."""
    answers = refusals = 0
    until = time.monotonic() + SECONDS
    for seed in range(SEEDS):
        done = explore(seed)
        answers += done.answers
        refusals += done.refusals
        if seed >= AT_LEAST and time.monotonic() > until:
            break
    assert answers > refusals > 0
