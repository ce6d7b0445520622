"""scripts/bench_estimates: what it makes of what it measured, and that a run goes on where another one ended."""

from pathlib import Path
from typing import Any

import pytest

from tests.programs import load

MACHINE = "2 cores"


@pytest.fixture(scope="module")
def bench() -> Any:
    return load("bench_estimates")


def row(bench: Any, model: str, shape: tuple[int, int], commit: str = "a", exact: int = 100, static: int = 100) -> Any:
    def parts(total: int) -> Any:
        return bench.Parts(total - 30, 20, 10)

    return bench.Row(model, *shape, parts(100), parts(exact), parts(static), dict.fromkeys(bench.RULES, 50), commit, 1)


def test_errors_are_of_all_segments_together_and_the_worst_on_each_side_is_told(bench: Any) -> None:
    shape = bench.SHAPES[0]
    rows = [row(bench, "Llama", shape, exact=each, static=each + 5) for each in (99, 100, 102)]
    said = bench.summary(rows).splitlines()
    assert said[2:4] == ["| exact | 1.0 % | 2.0 % | -1.0 % |", "| static | 5.0 % | 7.0 % | 0.0 % |"]
    assert "| x 1.2 | 50.0 % | 0.0 % | -50.0 % |" in said


def test_a_run_goes_on_with_what_is_not_measured_of_this_code(bench: Any, tmp_path: Path) -> None:
    out = tmp_path / "estimates"
    first = bench.Record(out)
    first.put([row(bench, "T5", shape) for shape in bench.SHAPES], MACHINE)
    first.put([row(bench, "Llama", shape) for shape in bench.SHAPES[1:]], MACHINE)
    again = bench.Record(out)
    assert again.rows == first.rows
    assert [again.has("T5", "a"), again.has("T5", "b"), again.has("Llama", "a")] == [True, False, False]
    again.put([row(bench, "T5", shape, commit="b") for shape in bench.SHAPES], MACHINE)
    kept = bench.Record(out).rows
    assert [each.model for each in kept] == ["Llama"] * (len(bench.SHAPES) - 1) + ["T5"] * len(bench.SHAPES)
    assert {each.commit for each in kept if each.model == "T5"} == {"b"}
    told = out.with_suffix(".md").read_text()
    missing = told.partition("Not measured: ")[2].partition("\n\n")[0]
    assert missing.startswith("Llama, 16 bits, Llama, large vocabulary, Mistral")
    assert missing.endswith("T5, int8 cache.")
    assert f"{len(kept)} rows" in told
