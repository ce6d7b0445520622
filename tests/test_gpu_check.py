"""scripts/gpu_check, as far as a machine without an accelerator can tell."""

import argparse
import asyncio
import json
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.gpu import running_ahead

PROGRAM = Path(__file__).resolve().parent.parent / "scripts" / "gpu_check"


@pytest.fixture(scope="module")
def program() -> Any:
    loader = SourceFileLoader("gpu_check", str(PROGRAM))
    spec = spec_from_loader("gpu_check", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_a_check_that_fails_is_reported_and_the_rest_go_on(program: Any) -> None:
    def passes(args: argparse.Namespace) -> dict[str, Any]:
        return {"bytes": 3 << 20, "seconds": [0.5, 2.0]}

    def fails(args: argparse.Namespace) -> dict[str, Any]:
        raise program.Failed("7 MiB are not back")

    def breaks(args: argparse.Namespace) -> dict[str, Any]:
        raise ZeroDivisionError("nothing")

    found = program.run_all(argparse.Namespace(), {"fails": fails, "breaks": breaks, "passes": passes})
    assert [each["passed"] for each in found] == [False, False, True]
    report = {"device": "X", "command": "c", "commit": "1", "date": "d", "torch": "t", "checks": found}
    lines = program.render(report).splitlines()
    assert any(line.startswith("| fails | **failed** |") and "7 MiB are not back" in line for line in lines)
    assert any(line.startswith("| breaks | **failed** |") and "ZeroDivisionError: nothing" in line for line in lines)
    assert any(line.startswith("| passes | passed |") and "bytes 3 MiB; seconds 0.5, 2" in line for line in lines)


@pytest.mark.slow
def test_what_running_ahead_is_worth_is_measured_and_judged(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The measurement itself runs on any device; a minute of a card is a second of a small model here."""
    words = ["--device=cpu", "--hidden=128", "--layers=1", "--requests=2", "--tokens=12"]
    monkeypatch.setattr(sys, "argv", ["running_ahead", *words])
    running_ahead.main()
    found = json.loads(capsys.readouterr().out)
    assert {name: each["steps_ahead"] > 20 for name, each in found.items()} == {
        "step by step": False, "ahead": True, "step by step, no graphs": False, "ahead, no graphs": True,
    }  # fmt: skip
    even = {name: each | {"tokens_per_second": 100.0} for name, each in found.items()}
    assert program.judge_ahead(even)["ahead, no graphs"] == 100.0
    with pytest.raises(program.Failed, match="ahead made 90 tokens per second"):
        program.judge_ahead(even | {"ahead": even["ahead"] | {"tokens_per_second": 90.0}})
    with pytest.raises(program.Failed, match="0 were launched ahead"):
        program.judge_ahead(even | {"ahead": even["ahead"] | {"steps_ahead": 0}})


@pytest.mark.slow
def test_without_an_accelerator_it_says_so_and_is_no_success(tmp_path: Path) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--out", str(tmp_path / "gpu")],
        capture_output=True, text=True, check=False, env=environment, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, "")
    assert "nothing was checked" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_load_that_it_measures_arrives_whole(program: Any) -> None:
    """Within main memory, where there is no bus."""
    facts = program.measure_load("cpu", 32 << 20)
    assert facts["bytes"] > 32 << 20 >= facts["bytes"] - 100_000
    assert facts["staged"] > 0
    assert facts["fraction_of_bus"] > 0


@pytest.mark.slow
def test_a_worker_that_it_starts_answers_and_tells_what_it_takes(program: Any, tmp_path: Path) -> None:
    """On main memory, where there is one. What two checks compare comes with pulses, one a second."""
    snapshot = tiny.make("llama", tmp_path, max_position_embeddings=4096)
    shared = [f"--snapshot={snapshot}", "--ctx-size=4096", "--parallel=4"]
    estimated = program._estimate([*shared, "--devices=cuda:0"])
    assert all(len(estimated[part]) == 1 for part in ("weights", "context", "compute", "runtime"))
    with program._worker([*shared, "--devices=cpu"]) as (address, events, _):
        texts = asyncio.run(program._texts(address))
        assert len(set(texts)) == len(texts) == 4
        asyncio.run(program._load(address))
        pulses = [event["measured"] for event in events if event["event"] == "pulse"]
    assert max(pulse["cpu"] for pulse in pulses) > 0


def test_a_check_that_does_not_exist_is_refused_by_name(program: Any) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--only", "context,luck"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "no check is called luck" in done.stderr
