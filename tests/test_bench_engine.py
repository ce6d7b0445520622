"""scripts/bench_engine: its figures from given measurements, and a run in which every engine takes part."""

import json
import os
import pickle
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.apart import Apart
from tests.programs import load

PROGRAM = Path(__file__).resolve().parent.parent / "scripts" / "bench_engine"


@pytest.fixture(scope="module")
def bench() -> Any:
    return load("bench_engine")


class Steady:
    """Gives `rate` tokens per second to each request; None: fails."""

    def __init__(self, bench: Any, name: str, rate: float | None):
        self.bench, self.name, self.rate = bench, name, rate
        self.asked: list[int] = []

    def run(self, requests: Sequence[Any]) -> Any:
        self.asked.append(len(requests))
        if self.rate is None:
            raise RuntimeError("out of order")
        return self.bench.TokenTimes(0.0, [[(n + 1) / self.rate for n in range(each.new)] for each in requests])


def test_percentiles_are_by_nearest_rank(bench: Any) -> None:
    assert [bench.percentile(range(1, 101), percent) for percent in (1, 50, 99)] == [1, 50, 99]
    assert bench.percentile([7.0], 99) == 7.0


def test_a_floor_counts_weights_once_and_the_cache_of_every_sequence(bench: Any) -> None:
    shape = bench.Shape(64, 128, 2, 4, 2, 1024, True, "float32", (10, 10), (20, 20))
    # 2 for keys and values, 2 layers, 2 heads of 16, 4 bytes; 10 tokens of prompt and half of the answer
    assert bench.floor_seconds(shape, 3, 1000, 4, 100.0) == (1000 + 3 * 20 * 2 * 2 * 2 * 16 * 4) / 100.0


def test_what_requests_need_is_two_operations_for_each_weight_a_token_meets_and_what_it_looks_back_at(
    bench: Any,
) -> None:
    shape = bench.Shape(64, 128, 2, 4, 2, 1024, True, "float32", (10, 10), (20, 20))
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128  # queries and output, keys and values of two heads of 16, the MLP
    head = 64 * 1024
    one = bench.Request((5,), 1)
    assert shape.flops([one]) == 2 * (2 * layer + head) + 2 * 4 * 64
    more = bench.Request((5, 5, 5), 2)  # four tokens go through the layers, and look at one to four
    assert shape.flops([more]) == 2 * (4 * 2 * layer + 2 * head) + 2 * 4 * 64 * (1 + 2 + 3 + 4)
    assert shape.flops([one, more]) == shape.flops([one]) + shape.flops([more])


def test_everybody_takes_a_turn_at_every_level_and_begins_once(bench: Any) -> None:
    shape = bench.SHAPES["tiny"]
    some = [Steady(bench, "ours, paged", 10.0), Steady(bench, "other", 5.0), Steady(bench, "broken", None)]
    found = bench.take_turns(some, [1, 4], shape, rounds=3, seconds=99.0, patience=1e9)
    assert [each.asked for each in some] == [[1, 4] * 3, [1, 4] * 3, [1, 4]]
    assert found[1]["ours, paged"].rates == pytest.approx([10.0] * 3)
    assert found[4]["other"].summary(0.1)["gap_p50"] == pytest.approx(0.2)
    assert found[4]["other"].summary(0.1)["floor"] == pytest.approx(0.5)
    flops = shape.flops(bench.requests_of(shape, 4, seed=0))
    seconds = max(each.new for each in bench.requests_of(shape, 4, seed=0)) / 5.0
    assert found[4]["other"].flops[0] == pytest.approx(flops / seconds)
    half = found[4]["other"].summary(0.1, peak=2.0 * statistics.median(found[4]["other"].flops))
    assert half["peak"] == pytest.approx(0.5)
    assert found[4]["broken"].summary(0.1) == {"error": "RuntimeError: out of order"}


def test_who_would_take_too_long_is_left_out_and_named_in_the_table(bench: Any) -> None:
    shape = bench.SHAPES["tiny"]
    slow = Steady(bench, "slow", 0.5)
    found = bench.take_turns([slow], [1, 16], shape, rounds=1, seconds=99.0, patience=60.0)
    assert slow.asked == [1]
    assert found[16]["slow"].error.startswith("left out")
    assert "left out" in bench._row("16", "slow", found[16]["slow"].summary(0.1), 1.0)


def test_what_a_random_model_says_is_text_and_comes_back_as_the_same_tokens(bench: Any) -> None:
    tokenizer = bench.make_tokenizer(1024)
    assert len(tokenizer) == 1024
    tokens = [300, 1000, 512, 1023]
    assert tokenizer.decode(tokens).isprintable()
    assert all(tokenizer(tokenizer.decode([token]), add_special_tokens=False).input_ids == [token] for token in tokens)


class InProcess:
    """`Apart` without its process, which would import torch and transformers once more for each contestant."""

    def __init__(self, make: Callable[[], dict[str, Any]]):
        self._objects: dict[str, Any] = pickle.loads(pickle.dumps(make))()
        self.names = list(self._objects)

    def call(self, name: str, method: str, *given: Any) -> Any:
        return pickle.loads(pickle.dumps(getattr(self._objects[name], method)(*pickle.loads(pickle.dumps(given)))))

    def close(self) -> None:
        for each in self._objects.values():
            if hasattr(each, "close"):
                each.close()


@pytest.mark.slow
def test_all_contestants_run_and_the_table_has_a_line_for_each(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bandwidth, threads = bench.bandwidth, torch.get_num_threads()
    monkeypatch.setattr(bench, "Apart", InProcess)
    monkeypatch.setattr(bench, "begin_process", lambda args: None)  # it would change this process for later tests
    monkeypatch.setattr(bench, "bandwidth", lambda device, threads, size: bandwidth(device, threads, size >> 5))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # the program sets them
        monkeypatch.setenv(name, "1")
    words = ["--shape", "tiny", "--levels", "1,3", "--rounds", "1", "--threads", "1", "--dtype", "bfloat16"]
    words += ["--no-http", "--no-long-prompt", "--no-host", "--out", str(tmp_path / "engine")]
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), *words])
    try:
        with warnings.catch_warnings():
            assert bench.main() == 0
    finally:
        torch.set_num_threads(threads)
    report = json.loads((tmp_path / "engine.json").read_text())
    for rows in report["levels"].values():
        assert {"ours, paged", "ours, aligned", "one at a time", "static batch", "continuous batch"} <= rows.keys()
        assert all(row["tokens_per_second"] > 0 for row in rows.values())
        assert all(row["tokens_per_cpu_second"] > 0 for row in rows.values())
        assert all(0.0 < row["peak"] < 1.0 for row in rows.values())
    assert report["bandwidth"] > 1e8
    assert report["peak"] > 1e8
    assert "bfloat16" in report["model"]
    table = (tmp_path / "engine.md").read_text()
    assert table.count("| ours, paged |") == 2
    assert str(tmp_path) in table


def test_a_contestant_apart_is_called_in_its_own_process() -> None:
    """Results and exceptions come back, and the process ends with its contestant."""
    apart = Apart(partial(json.loads, '{"letters": ["a", "b"]}'))
    process = apart._process
    assert process.pid not in (None, os.getpid())
    assert apart.names == ["letters"]
    assert apart.call("letters", "index", "b") == 1
    with pytest.raises(RuntimeError, match="ValueError: "):
        apart.call("letters", "index", "c")
    apart.close()
    assert process.exitcode == 0
    with pytest.raises(RuntimeError, match="JSONDecodeError: "):
        Apart(partial(json.loads, "letters"))


def test_a_draft_agrees_the_more_the_less_its_target_adds(bench: Any, tmp_path: Path) -> None:
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    shape = replace(bench.SHAPES["tiny"], layers=8, hidden=128, vocab=4096)
    tokens, agreement = torch.arange(300, 360)[None], {}
    for name, weight in (("good", 0.02), ("poor", 20.0)):
        pair = bench.make_pair(shape, tmp_path / name, "cpu", weight)
        with torch.inference_mode():
            target, draft = (auto.from_pretrained(path)(tokens).logits.argmax(-1) for path in pair)
        agreement[name] = (target == draft).float().mean().item()
        if name == "good":
            assert len(set(target[0].tolist())) > 40, "the text does not repeat itself"
    assert agreement["good"] > 0.8
    assert agreement["poor"] < 0.5


def test_the_table_of_speculation_has_ratios_to_the_engine_without_drafts(bench: Any) -> None:
    def row(rate: float) -> Any:
        rates = [(100.0, rate), (300.0, 3 * rate), (200.0, 2.2 * rate)]
        return {"tokens_per_second": rates, "tokens_per_cpu_second": rates[:1]}

    levels = {"4": {"without, again": row(100.0), "draft model": row(150.0), "assisted generation": {"error": "broke"}}}
    text = "\n".join(bench.render_speculative({"good": {"drafts": {"draft model": (80, 60)}, "levels": levels}}))
    assert (
        "| good | 4 | draft model | 3 | 200.0 | 330.0 | 1.50 (1.50 to 1.65) | 1.50 (1.50 to 1.50) | 75% of 80 |" in text
    )
    assert "| good | 4 | without, again | 3 | 200.0 | 220.0 | 1.00 (1.00 to 1.10) | 1.00 (1.00 to 1.00) |  |" in text
    assert "| good | 4 | assisted generation | broke | | | | | |" in text


def test_each_contestant_runs_beside_one_without_drafts(bench: Any) -> None:
    shape = bench.SHAPES["tiny"]
    plain, drafting = Steady(bench, "without draft model", 10.0), Steady(bench, "draft model", 9.0)
    assisted, broken = Steady(bench, "assisted generation", 5.0), Steady(bench, "prompt lookup", None)
    pairs = {"without, again": (plain, plain)} | {each.name: (plain, each) for each in (drafting, assisted, broken)}
    found = bench.take_pairs(pairs, [1, 16], shape, rounds=5, seconds=99.0)
    assert sorted(drafting.asked) == [1] * 5 + [16] * 5
    assert sorted(assisted.asked) == [1] * 3 + [4] * 3, "few rounds, and one request after another"
    assert sorted(broken.asked) == [1, 16]
    assert 36 <= len(plain.asked) <= 38, "twice as the control, and once beside each of the others"
    assert [rate / without for without, rate in found[1]["draft model"].rates] == pytest.approx([0.9] * 5)
    assert [rate / without for without, rate in found[16]["without, again"].rates] == pytest.approx([1.0] * 5)
    assert found[16]["prompt lookup"].summary() == {"error": "RuntimeError: out of order"}


def test_the_measured_engine_turns_drafts_off_for_its_twin_only(bench: Any) -> None:
    class Engine:
        name, drafts_off, runs = "draft model", False, list[bool]()

        def run(self, requests: Sequence[Any]) -> None:
            self.runs.append(self.drafts_off)

    engine = Engine()
    twin = bench.WithoutDrafts(engine)
    for each in (engine, twin, engine):
        each.run(())
    assert (twin.name, engine.runs) == ("without draft model", [False, True, False])
    assert bench.Pairs().summary() == {"error": "not run"}


def test_pairs_are_compared_by_tokens_per_second_and_per_second_of_cpu_time(bench: Any) -> None:
    pairs = bench.Pairs()
    pairs.add(bench.TokenTimes(0.0, [[2.0] * 8], 4.0), bench.TokenTimes(0.0, [[1.0] * 8], 3.0), True)
    assert pairs.summary() == {"tokens_per_second": [(4.0, 8.0)], "tokens_per_cpu_second": [(2.0, 8 / 3)]}
    pairs.add(bench.TokenTimes(0.0, [[2.0] * 8]), bench.TokenTimes(0.0, [[1.0] * 8]), False)
    assert (len(pairs.rates), len(pairs.work)) == (2, 1)


def test_the_interval_of_a_median_leaves_out_what_chance_gives_seldom(bench: Any) -> None:
    # Of n coins, fewer than k show heads with a probability of at most 2.5 %: tables of the sign test.
    for count, first in ((1, 1), (5, 1), (6, 1), (8, 1), (9, 2), (15, 4), (20, 6), (30, 10)):
        middle = (count + 1) / 2
        assert bench.median_interval(range(count, 0, -1)) == (middle, first, count + 1 - first)
