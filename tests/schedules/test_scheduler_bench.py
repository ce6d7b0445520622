"""What `scripts/bench_scheduler` measures and the documents promise of two models that exclude each other."""

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
