"""scripts/gpu_check, as far as a machine without an accelerator can tell."""

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts import gpu_parts
from tests import fake_nvml
from tests.programs import load

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "scripts" / "gpu_check"


@pytest.fixture(scope="module")
def program() -> Any:
    return load("gpu_check")


def setting(folder: Path) -> gpu_parts.PartRun:
    return gpu_parts.PartRun("cpu", folder / "models", folder / "gpu", lambda step, facts: None)


def test_a_line_that_a_kill_left_unfinished_is_passed_over_and_the_next_is_whole(program: Any, tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    results = program.Results(path)
    assert results.lines() == []
    results.append({"part": "load", "outcome": "failed", "error": "slow", "seconds": 1.0})
    with path.open("a") as file:
        file.write('{"part": "load", "outco')
    results.append({"part": "load", "outcome": "passed", "facts": {}, "seconds": 2.0})
    assert [line["outcome"] for line in results.lines()] == ["failed", "passed"]
    assert results.passed() == {"load"}, "the last outcome counts"


def test_the_table_has_every_part_and_the_steps_of_those_without_an_outcome(program: Any) -> None:
    lines = [
        {"run": {"name": "X", "command": "c", "commit": "1", "date": "d", "torch": "t"}},
        {"part": "load", "step": "8 GiB", "facts": {"bytes": 3 << 20, "seconds": [0.5, 2.0]}},
        {"part": "swap", "outcome": "failed", "error": "7 MiB | are not back", "seconds": 3.0},
        {"part": "ahead", "outcome": "passed", "facts": {"gain": 1.25}, "seconds": 4.0},
    ]
    table = program.render(lines, ["load", "swap", "ahead", "ranks"]).splitlines()
    assert table[-4:] == [
        "| load | **not run** | 0.0 | 8 GiB (bytes: 3 MiB, seconds: 0.5, 2) |",
        "| swap | **failed** | 3.0 | 7 MiB / are not back |",
        "| ahead | passed | 4.0 | gain 1.25 |",
        "| ranks | **not run** | 0.0 |  |",
    ]


def test_a_part_that_fails_or_breaks_has_an_outcome(program: Any, tmp_path: Path) -> None:
    def fails(setting: gpu_parts.PartRun) -> dict[str, Any]:
        raise gpu_parts.Defect("7 MiB are not back")

    def breaks(setting: gpu_parts.PartRun) -> dict[str, Any]:
        raise ZeroDivisionError("nothing")

    results = program.Results(tmp_path / "gpu.jsonl")
    program.PARTS = {name: gpu_parts.GpuPart(run, 60) for name, run in (("fails", fails), ("breaks", breaks))}
    for name in program.PARTS:
        program.run_part(name, setting(tmp_path), results)
    program.PARTS = gpu_parts.PARTS
    errors = {name: line["error"] for name, line in results.outcomes().items()}
    assert errors["fails"] == "7 MiB are not back"
    assert errors["breaks"].startswith("ZeroDivisionError: nothing (test_gpu_check.py, line ")


def test_a_part_is_ended_at_its_limit_and_without_budget_none_begins(program: Any, tmp_path: Path) -> None:
    args = argparse.Namespace(device="cpu", out=tmp_path / "gpu", models=tmp_path, budget=0.0, resume=False)
    results = program.Results(tmp_path / "gpu.jsonl")
    program.check(args, ["device"], results)
    assert results.lines() == []
    args.budget = gpu_parts.PARTS["device"].seconds - 1.0
    program.check(args, ["device"], results)
    assert results.lines() == [], "it would not end within the budget"
    program.start_part("device", args, results, 0.05)
    ended = results.outcomes()["device"]
    assert ended["error"].startswith("ended after 0 s")
    assert ended["outcome"] == "unfinished", "its own limit is longer"


def test_a_resumed_run_begins_with_what_was_not_run_and_ends_with_what_failed(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, run = program.Results(tmp_path / "gpu.jsonl"), []
    for name, outcome in (("device", "passed"), ("smoke", "failed"), ("decode", "unfinished")):
        results.append({"part": name, "outcome": outcome, "seconds": 1.0})

    def start_part(name: str, args: argparse.Namespace, results: Any, limit: float) -> None:
        run.append(name)
        results.append({"part": name, "outcome": "passed", "seconds": 1.0})

    monkeypatch.setattr(program, "start_part", start_part)
    args = argparse.Namespace(budget=600.0, resume=True)
    program.check(args, ["device", "smoke", "decode", "trace"], results)
    assert run == ["decode", "trace", "smoke"]


def test_steps_of_an_unfinished_part_are_known_to_its_next_run(program: Any, tmp_path: Path) -> None:
    results = program.Results(tmp_path / "gpu.jsonl")
    for line in (
        {"part": "promise", "step": "llama", "facts": {"promised": 1}},
        {"part": "promise", "outcome": "failed"},
        {"part": "promise", "step": "qwen3", "facts": {"promised": 2}},
        {"part": "promise", "outcome": "unfinished"},
        {"part": "long", "step": "1 x 64", "facts": {}},
        {"part": "promise", "step": "gpt2", "facts": {"promised": 3}},
    ):
        results.append(line)
    assert results.steps("promise") == {"qwen3": {"promised": 2}, "gpt2": {"promised": 3}}


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        ("tests/gpu/test_a.py::test_b[x-{'n': 2}] PASSED      [ 10%]\n", ("test_b[x-{'n': 2}]", "PASSED")),
        ("[gw0] [ 12%] FAILED tests/gpu/test_a.py::test_b[x-{'n': 2}] \n", ("test_b[x-{'n': 2}]", "FAILED")),
        ("tests/gpu/test_a.py::test_b \n", None),
        ("FAILED tests/gpu/test_a.py::test_b - AssertionError\n", None),
    ],
)
def test_outcomes_of_tests_are_read_with_and_without_xdist(line: str, outcome: tuple[str, str] | None) -> None:
    assert gpu_parts._test_outcome(line) == outcome


def test_launching_ahead_fails_if_it_costs_time_or_does_not_happen() -> None:
    """The measurement itself runs in the part `ahead`."""
    rows = {"step by step": 0, "ahead": 95, "step by step, no graphs": 0, "ahead, no graphs": 95}
    even = {name: {"tokens_per_second": 100.0, "steps": 100, "steps_ahead": ahead} for name, ahead in rows.items()}
    assert gpu_parts.judge_ahead(even)["ahead, no graphs"] == 100.0
    with pytest.raises(gpu_parts.Defect, match="ahead made 90 tokens per second"):
        gpu_parts.judge_ahead(even | {"ahead": even["ahead"] | {"tokens_per_second": 90.0}})
    with pytest.raises(gpu_parts.Defect, match="0 were launched ahead"):
        gpu_parts.judge_ahead(even | {"ahead": even["ahead"] | {"steps_ahead": 0}})


def test_a_family_whose_worker_or_requests_break_counts_for_itself(tmp_path: Path) -> None:
    recorded: dict[str, Any] = {}

    def measure(family: str) -> dict[str, Any]:
        if family == "mamba":
            raise httpx.ReadTimeout("")
        return {"promised": 5 << 20, "measured": 3 << 20, "nvml_loaded": 6 << 20 if family == "gpt2" else 4 << 20}

    place = gpu_parts.PartRun("cpu", tmp_path / "models", tmp_path / "gpu", recorded.__setitem__)
    with pytest.raises(gpu_parts.Defect, match=r"^mamba: ReadTimeout: ; gpt2: promised 5 MiB"):
        gpu_parts.judge_families(place, ["llama", "mamba", "gpt2"], measure)
    assert recorded["mamba"] == {"error": "ReadTimeout: "}
    assert [family for family, found in recorded.items() if "promised" in found] == ["llama", "gpt2"]


def test_a_family_may_fill_the_cache_that_its_recording_emptied_but_not_exceed_its_peak(tmp_path: Path) -> None:
    place = gpu_parts.PartRun("cuda:0", tmp_path / "models", tmp_path / "gpu", lambda step, facts: None)
    found = {"promised": 90 << 20, "nvml_ready": 40 << 20, "nvml_loaded": 80 << 20, "fragmentation": 8 << 20}
    found |= {"measured_ready": 70 << 20, "measured": 78 << 20, "host": 1, "host_promised": 1}
    assert gpu_parts.judge_families(place, ["llama"], lambda family: found) == {"llama": found}
    with pytest.raises(gpu_parts.Defect, match="llama: its peak rose under load"):
        gpu_parts.judge_families(place, ["llama"], lambda family: found | {"measured": 79 << 20})


async def test_a_load_that_does_not_end_fails_at_its_limit() -> None:
    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(never_answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(gpu_parts.Defect, match="did not end within 0 s"):
            await gpu_parts._load(f"http://127.0.0.1:{port}", [1, 1], 0.01)


def test_opening_and_asking_nvml_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = fake_nvml.Driver(fake_nvml.build(tmp_path), tmp_path / "cards", [fake_nvml.Card(uuid="GPU-a", total=9)])
    for name, value in driver.environment().items():
        monkeypatch.setenv(name, value)
    assert [each >= 0 for each in gpu_parts.nvml_seconds()] == [True] * 3


def test_without_git_the_commit_is_that_of_the_bundle(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_CHECK_COMMIT", "0123456789ab")
    assert program.commit() != "0123456789ab", "git knows better"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program.commit() == "0123456789ab"


def test_every_part_is_shorter_than_five_minutes_and_all_fit_one_command_of_nine(program: Any) -> None:
    assert all(part.seconds < part.limit < 300 for part in gpu_parts.PARTS.values())
    assert sum(part.seconds for part in gpu_parts.PARTS.values()) < 540
    assert all(f"    {name} " in program.__doc__ for name in gpu_parts.PARTS)


ALL_PARTS = """
import json, sys, weakref
from pathlib import Path
from scripts import gpu_parts
from tests.programs import load

program, tool, folder, models, loads = load("gpu_check"), gpu_parts.bench(), Path(sys.argv[1]), [], {}

class Watched(tool.Ours):
    def __init__(self, *args, **options):
        loads[name].append(sum(model() is not None for model in models))
        super().__init__(*args, **options)
        models.append(weakref.ref(self.engine._generation._backend.runner._model))

tool.Ours = Watched
setting = gpu_parts.PartRun("cpu", folder / "models", folder / "gpu", lambda step, facts: None)
for name in program.PARTS:
    loads[name] = []
    program.run_part(name, setting, program.Results(folder / "gpu.jsonl"))
print(json.dumps(loads))
"""


@dataclass(frozen=True)
class Run:
    folder: Path
    lines: list[dict[str, Any]]
    loads: dict[str, list[int]]
    """How many models of earlier loads there still were at each load of a part."""
    errors: str


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All parts on the CPU, in one process, since most of their time here is for imports."""
    folder = tmp_path_factory.mktemp("parts")
    done = subprocess.run(
        [sys.executable, "-c", ALL_PARTS, str(folder)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    lines = list(map(json.loads, (folder / "gpu.jsonl").read_text("utf-8").splitlines()))
    return Run(folder, lines, json.loads(done.stdout.splitlines()[-1]), done.stderr)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_part_passes_on_the_cpu(whole: Run) -> None:
    assert [(line["part"], line.get("error", line["outcome"])) for line in whole.lines] == [
        (name, "passed") for name in gpu_parts.PARTS
    ], whole.errors
    facts = {line["part"]: line["facts"] for line in whole.lines}
    assert {"workspace", "assumed_workspaces"} <= facts["device"].keys()
    assert {"call_us", "call_bytes", "assumed_bytes"} <= facts["long"]["attention"].keys()
    assert facts["swap"]["memory"].keys() == {"reserved", "measured", "expected_growth"}
    for rows_in_step in (1, 4):
        trace = json.loads((whole.folder / f"gpu-step-{rows_in_step}.trace.json").read_text("utf-8"))
        assert any(event["name"] == "aten::mm" for event in trace["traceEvents"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_part_that_loads_a_model_several_times_has_one_of_them_at_a_time(whole: Run) -> None:
    """On a card each of them may take a third of the memory."""
    several = {part: loads for part, loads in whole.loads.items() if len(loads) > 1}
    assert several == {"prompts": [0] * 2, "ahead": [0] * 4}


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_is_resumed_to_a_whole_table(tmp_path: Path) -> None:
    """The moment is a line of its progress, drawn at random."""
    command = [sys.executable, str(PROGRAM), "--device", "cpu", "--only", "device,load"]
    command += ["--out", str(tmp_path / "gpu"), "--models", str(tmp_path / "models")]
    moment = random.Random(7).randrange(2, 6)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        seen = [line for line, _ in zip(process.stderr, range(moment), strict=False)]
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.stderr.read()  # its end: nothing that it started is left
    lines = (tmp_path / "gpu.jsonl").read_text("utf-8").splitlines()
    assert len(seen) == moment
    assert not (tmp_path / "gpu.md").exists()
    passed = [line for line in map(json.loads, lines) if line.get("outcome") == "passed"]

    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if " | passed | " in line]
    assert [row.split()[1] for row in rows] == ["device", "load"]
    assert (tmp_path / "gpu.md").read_text("utf-8") in done.stdout
    again = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text("utf-8").splitlines()]
    assert {line["outcome"] for line in again if "outcome" in line} == {"passed"}, "no part has failed"
    assert [line for line in again if line.get("outcome") == "passed"][: len(passed)] == passed
    assert len([line for line in again if line.get("outcome") == "passed"]) == 2


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


def test_a_model_that_was_not_finished_is_made_again(tmp_path: Path) -> None:
    def breaks(path: Path) -> None:
        path.mkdir()
        (path / "part").write_text("")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        gpu_parts.kept(setting(tmp_path), "model", breaks)
    assert list((tmp_path / "models").iterdir()) == [], "it takes no space that other parts need"
    made = gpu_parts.kept(setting(tmp_path), "model", lambda path: path.mkdir())
    assert list(made.iterdir()) == []
    assert gpu_parts.kept(setting(tmp_path), "model", breaks) == made, "it is kept"


def test_a_part_that_does_not_exist_is_refused_by_name() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--only", "device,luck"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "no part is called luck" in done.stderr
