"""What `scripts/bench_scheduler` measures and the documents promise."""

import runpy
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench_scheduler"


@pytest.mark.slow
def test_two_models_that_exclude_each_other_are_swapped_five_times_less_than_by_count_at_no_worse_p95() -> None:
    bench = runpy.run_path(str(BENCH))
    trace = next(trace for trace in bench["TRACES"] if trace.name == "alternating pair: 2 s answers, 6 s loads")
    ours, by_count = (bench["play"](trace, contestant, 1) for contestant in ("ours", "lru, polite"))
    assert ours["answers"] == by_count["answers"] == 800
    assert 5 * ours["swaps"] <= by_count["swaps"]
    assert ours["p95"] <= by_count["p95"]


@pytest.mark.slow
def test_agents_wait_less_in_a_round_and_are_done_sooner_than_under_either_other_rule() -> None:
    bench = runpy.run_path(str(BENCH))
    trace = next(trace for trace in bench["TRACES"] if trace.name.startswith("agents"))
    ours, by_count, in_line = (bench["play"](trace, contestant, 1) for contestant in ("ours", "lru, polite", "fcfs"))
    for other in (by_count, in_line):
        assert ours["answers"] == other["answers"]
        assert ours["swaps"] < other["swaps"]
        for figure in ("done", "mean", "p95_of_a_round", "max"):
            assert ours[figure] < other[figure]


@pytest.mark.slow
def test_a_router_with_a_thousand_presets_starts_within_a_second_and_stays_small() -> None:
    """A second of its own work: how long that takes by the clock is a matter of what else this machine does."""
    cost = runpy.run_path(str(BENCH))["start_cost"](1000)
    assert cost["own_seconds"] < 1.0
    assert cost["mib_after_a_list"] < 120


@pytest.mark.slow
def test_a_plan_costs_no_more_than_it_did() -> None:
    """Well above what it takes on a quiet machine, well below what it took when each waiter was compared with all."""
    cost = runpy.run_path(str(BENCH))["plan_cost"]
    assert cost(64, 1, 16) < 2.0
    assert cost(64, 40, 16) < 10.0
