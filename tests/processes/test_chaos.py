"""Kills in the middle of swaps, of real workers: nothing is left over, and the next request is answered."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.programs import load


@pytest.fixture(scope="module")
def chaos() -> Any:
    """The script, as a module."""
    return load("chaos")


@pytest.mark.slow
def test_kills_in_the_middle_of_swaps_leave_nothing_over_and_the_next_request_works(chaos: Any) -> None:
    """Six swaps, every other one disturbed. The processes that are killed are fixed here, the moments are not;
    scripts/chaos does 200, and also kills guards and deletes sockets (here: test_guard, test_router_life)."""
    found = chaos.Total()
    pick = random.Random(random.randrange(1 << 30))
    with chaos.house() as house:
        house.logs("is warm")
        assert len(house.of("guard")) == 1
        last = "one"
        assert chaos.ask(house.port, last).whole
        for kind in ("worker", "fork-server", "router"):
            last = chaos.round_(house, pick, found, kind, last, 0.4)
        assert [found.kills[kind] for kind in ("fork-server", "router")] == [1, 1]
        chaos.unload(house.port, last)
        house.settle(workers=0)


def test_whatever_is_left_over_is_found(chaos: Any, tmp_path: Path) -> None:
    """The script would see it: a process by its command line, and what no kind of ours is."""
    assert [chaos.kind_of(line) for line in ("python -P -m router --port 0", "x -m worker serve y", "sleep 9")] == [
        "router", "worker", "other"
    ]  # fmt: skip
    assert chaos.processes(tmp_path) == {}
    with pytest.raises(chaos.Broken, match="outlived"):
        chaos.until(lambda: False, 0.0, lambda: "it outlived the router")
