"""Process overhead: measured once for each type of device, kept, and used by later estimates."""

import json
from pathlib import Path

from router.config.presets import Preset
from router.memory import estimate, tensor_parallel
from router.memory.estimate import RUNTIME_HOST, SERVING_HOST, UNKNOWN, Overhead
from router.memory.learned import LearnedEstimates
from tests.router.fleet.worlds import LLAMA
from worker.estimate import estimate as exact
from worker.protocol.argv import Estimate
from worker.protocol.events import Estimated
from worker.protocol.memory import (
    CUBLAS_WORKSPACE_BYTES,
    DEVICE_LIBRARIES_HOST_BYTES,
    DEVICE_PROCESS_BYTES,
    DEVICE_PROCESS_HOST_BYTES,
    NCCL_BYTES,
    STAGING_BYTES,
)

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
CARD = "NVIDIA Fake A"
MEASURED = Overhead(device=300 * MIB, host=900 * MIB)
PRESET = Preset(id="a")


def test_router_and_worker_count_workspaces_and_fragmentation_alike() -> None:
    assert estimate.beside_steps(400 * MIB) == CUBLAS_WORKSPACE_BYTES + 100 * MIB
    asked = Estimate(snapshot="", overhead=7 * MIB)
    assert exact.device_overhead(asked, 400 * MIB) == 7 * MIB + estimate.beside_steps(400 * MIB)


# Main memory of an executed process on accelerators that has measured itself.
BESIDE = 900 * MIB + DEVICE_LIBRARIES_HOST_BYTES + SERVING_HOST


def test_the_static_estimate_uses_the_measurement() -> None:
    guessed = estimate.estimate(LLAMA, PRESET, on_host=False)
    known = estimate.estimate(LLAMA, PRESET, on_host=False, overhead=MEASURED)
    beside = estimate.beside_steps(guessed.compute[0])
    assert (guessed.runtime, known.runtime) == ((DEVICE_PROCESS_BYTES + beside,), (300 * MIB + beside,))
    assert guessed.host - known.host == DEVICE_PROCESS_HOST_BYTES - BESIDE
    assert known.overhead == MEASURED
    assert (known.weights, known.context, known.compute) == (guessed.weights, guessed.context, guessed.compute)
    split = estimate.estimate(LLAMA, PRESET, layers=(1, 1), on_host=False, overhead=MEASURED)
    assert split.runtime == tuple(300 * MIB + estimate.beside_steps(each) for each in split.compute)
    on_host = [estimate.estimate(LLAMA, PRESET, on_host=True, overhead=each) for each in (UNKNOWN, Overhead(host=MIB))]
    assert on_host[0].runtime[0] - on_host[1].runtime[0] == RUNTIME_HOST - MIB - SERVING_HOST


def test_each_rank_has_it_beside_its_communication() -> None:
    found = tensor_parallel.estimate(LLAMA, PRESET, 2, on_host=False, overhead=MEASURED)
    beside = estimate.beside_steps(found.compute[0])
    assert found.runtime == (300 * MIB + NCCL_BYTES + beside,) * 2
    guessed = tensor_parallel.estimate(LLAMA, PRESET, 2, on_host=False)
    assert guessed.host - found.host == 2 * (DEVICE_PROCESS_HOST_BYTES - BESIDE)


def test_an_earlier_exact_estimate_gets_the_current_overhead() -> None:
    own = 5 * MIB
    said = Estimated(
        weights=[9], context=[8], compute=[7], runtime=[DEVICE_PROCESS_BYTES], host=DEVICE_PROCESS_HOST_BYTES + own
    )
    exact = estimate.from_trace(said, PRESET, first=estimate.estimate(LLAMA, PRESET, on_host=False))
    first = estimate.estimate(LLAMA, PRESET, on_host=False, overhead=MEASURED)
    assert estimate.refreshed(exact, first).runtime == (300 * MIB + estimate.beside_steps(first.compute[0]),)
    assert estimate.refreshed(exact, first).weights == (9,)
    assert estimate.refreshed(exact, first).host == BESIDE + own
    assert estimate.refreshed(estimate.refreshed(exact, first), first) == estimate.refreshed(exact, first)


def test_the_process_figure_of_an_exact_estimate_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "estimates.json"
    guessed, first = (estimate.estimate(LLAMA, PRESET, on_host=False, overhead=each) for each in (UNKNOWN, MEASURED))
    said = Estimated(weights=[9], context=[8], compute=[7], runtime=[DEVICE_PROCESS_BYTES], host=guessed.process + 5)
    LearnedEstimates(file).store_exact("a", estimate.from_trace(said, PRESET, first=guessed))
    again = LearnedEstimates(file).exact("a")
    assert again is not None
    assert estimate.refreshed(again, first).host == first.process + 5


def test_it_is_kept_by_device_type_driver_and_start(tmp_path: Path) -> None:
    file = tmp_path / "estimates.json"
    LearnedEstimates(file, driver="550.54").record_overhead(CARD, MEASURED, forked=False)
    again = LearnedEstimates(file, driver="550.54")
    assert again.overhead(CARD, forked=False) == MEASURED
    assert again.overhead(CARD, forked=True) == UNKNOWN
    assert again.overhead("NVIDIA Fake B", forked=False) == UNKNOWN
    assert LearnedEstimates(file, driver="560.1").overhead(CARD, forked=False) == UNKNOWN
    [words] = json.loads(file.read_text())["overhead"]
    assert words.startswith(f"{CARD}, driver 550.54, torch ")


def test_a_growth_of_device_memory_counts_once_two_loads_agree(tmp_path: Path) -> None:
    known = LearnedEstimates(tmp_path / "estimates.json")

    def record(device: int) -> int:
        known.record_overhead(CARD, Overhead(device * MIB, 900 * MIB), forked=False, is_own=False)
        return known.overhead(CARD, forked=False).device // MIB

    assert [record(300), record(1500), record(310), record(320)] == [0, 0, 0, 320]
    assert record(3000) == 320, "another process grew meanwhile"
    assert known.overhead(CARD, forked=False).host == 900 * MIB, "main memory is measured by the process itself"


def test_an_invalid_overhead_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "estimates.json"
    LearnedEstimates(file).record_overhead("cpu", Overhead(host=MIB), forked=False)
    body = json.loads(file.read_text())
    file.write_text(json.dumps({**body, "overhead": {key: [3] for key in body["overhead"]}}))
    assert LearnedEstimates(file).overhead("cpu", forked=False) == UNKNOWN


def test_the_assumed_figures_cover_what_cards_took() -> None:
    """Executed workers of five families on an H200 (benchmarks/gpu.md), before and after the overhead is measured."""
    lines = (ROOT / "benchmarks" / "gpu" / "h200.jsonl").read_text("utf-8").splitlines()
    found = [line["facts"] for line in map(json.loads, lines) if line.get("part") == "promise" and "step" in line]
    assert len(found) == 5
    for facts in found:
        measured = Overhead(host=facts["overhead"]["cpu"])
        assert facts["overhead"]["cuda:0"] <= UNKNOWN.on_device
        for overhead in (UNKNOWN, measured):
            assert facts["host"] <= overhead.beside_device(forked=False) + STAGING_BYTES
