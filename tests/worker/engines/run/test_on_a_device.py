"""Steps on a pretended accelerator: operands share a device, and the host waits only when it reads the results.

Values and speed need a real one (tests/gpu).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import tiny
from tests.worker.families import FAMILIES, SHALLOW
from tests.worker.loaded import options
from tests.worker.pretended import CUDA, TOLD, Watch, accelerator, moved
from tests.worker.stepped import Drive
from worker.engines.transformers import load_draft
from worker.engines.transformers.attention import paged, paged_kernel
from worker.engines.transformers.attention.kv_pool import KvPool
from worker.engines.transformers.load import layer_split, snapshot
from worker.engines.transformers.load.layer_split import LayerSplit, SplitKvPools
from worker.engines.transformers.run import backends
from worker.engines.transformers.run.aligned import AlignedRunner
from worker.engines.transformers.run.cuda_graphs import GraphRunner
from worker.engines.transformers.run.runner import PagedRunner, Runner
from worker.engines.transformers.run.warmup import warm_up
from worker.engines.transformers.sample import sampler, topk
from worker.engines.transformers.schedule.kv_cache import BlockAllocator, RowAllocator
from worker.engines.transformers.schedule.prefill_budget import PrefillBudget
from worker.engines.transformers.schedule.scheduler import Batch
from worker.estimate import meta_model
from worker.estimate.largest_steps import GenerationSteps
from worker.interface import SamplingParams

# torch's build for CUDA asks the driver which attention kernels a device has.
pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(), reason="torch's build for CUDA has no driver here"
)
CTX = 128
FAST = ("llama", "gemma2", "mamba")  # one family of each kind. The others are in the slow tier.
ANSWER = 2
DEVICES = CUDA, torch.device("cuda:1")
# Families whose own code waits for the device in a step, and the place. They are not recorded as graphs.
WAITING = {
    "dbrx": "nonzero",  # the experts that were chosen
    "falcon": "modeling_falcon.py",  # a list as a subscript
    "falcon with grouped heads": "modeling_falcon.py",
    "gpt_neo": "modeling_gpt_neo.py",  # a constant, made again in each layer
    "llama with positions that stretch beyond its context": "modeling_rope_utils.py",  # the longest position
    "phimoe": "modeling_phimoe.py",
    "phi3 with two sets of frequencies": "modeling_rope_utils.py",  # in the first step only
}


@contextmanager
def made(
    name: str, folder: Path, *, dtype: torch.dtype = torch.bfloat16, split: LayerSplit | None = None, **changes: Any
) -> Iterator[tuple[PagedRunner | AlignedRunner, RowAllocator, Watch]]:
    """A model of a family on the device, or on those of `split`, with its cache."""
    family, overrides = FAMILIES[name]
    snapshot_folder = tiny.make(family, folder, **(overrides | SHALLOW.get(name, {})))
    asked = options(snapshot_folder, ctx_size=CTX, parallel=4, prefill_chunk=32, **changes)
    config = snapshot.load_config(asked)
    paged.register()
    with accelerator() as watch:
        model = meta_model.build(snapshot.model_class(asked, config, False), config, dtype, embeds=False)
        if (implementation := backends.implementation(asked, config)) is not None:
            model.set_attn_implementation(implementation)
        for path, device in {"": CUDA}.items() if split is None else layer_split.device_map(model, split).items():
            moved(model.get_submodule(path), device)
        if split is not None:
            layer_split.place(model, split)
        runner, capacity = backends.make_runner(model, config, asked, CTX, CUDA, caches=True, split=split)
        watch.waits.clear()
        yield runner, capacity, watch


def every(names: tuple[str, ...]) -> list[Any]:
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", every(tuple(FAMILIES)))
async def test_every_step_of_every_family_is_all_on_the_device_and_waits_for_nothing(name: str, tmp_path: Path) -> None:
    """A prompt in two chunks, a decode of two rows, and the largest of the steps that are recorded as graphs."""
    with made(name, tmp_path) as (runner, capacity, watch):
        drive = Drive(runner, capacity)
        drive.ask(0, tuple(range(5, 25)), most=ANSWER)
        drive.ask(1, most=ANSWER)
        drive.to_the_end()
        assert drive.work.steps_ahead > 0
        assert await drive.collected(0) == [*[TOLD] * ANSWER, "length"]
        if isinstance(runner, PagedRunner) and name not in WAITING:
            fixed = GraphRunner(runner, rows=4, ctx_size=CTX)
            with torch.inference_mode():
                fixed.compute(*fixed.shapes[-1])
    expected = WAITING.get(name, "")
    assert [each for each in watch.waits if not expected or expected not in each] == []
    assert bool(watch.waits) == bool(expected)


@pytest.mark.parametrize("name", every(("llama", "gemma2", "mamba", "qwen3_moe")))
async def test_a_model_on_two_devices_moves_what_must_move_and_waits_for_nothing(name: str, tmp_path: Path) -> None:
    with made(name, tmp_path, split=LayerSplit(DEVICES, (1, 1))) as (runner, capacity, watch):
        drive = Drive(runner, capacity)
        drive.ask(0, tuple(range(5, 25)), most=ANSWER, sampling=SamplingParams(temperature=0.7, logprobs=2))
        drive.ask(1, most=ANSWER)
        drive.to_the_end()
        assert await drive.collected(0) == [*[TOLD] * ANSWER, "length"]
        assert all(runner.bytes_on(device) for device in DEVICES)
    assert watch.waits == []


@pytest.mark.parametrize("devices", [(CUDA,), DEVICES])
@pytest.mark.parametrize("name", ["llama", "gemma2"])  # packed, and aligned
async def test_the_host_waits_for_each_step_also_without_results(
    name: str, devices: tuple[torch.device, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the prefill budget would learn how long it takes to launch a chunk of a prompt. The layers of a split
    model end on its last device."""
    waited: list[object] = []
    split = LayerSplit(devices, (1, 1)) if len(devices) > 1 else None
    with made(name, tmp_path, split=split) as (runner, capacity, _):
        monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: waited.append(event.stream))
        drive = Drive(runner, capacity)
        drive.ask(0, tuple(range(5, 45)), most=1)  # in three chunks
        drive.to_the_end()
    assert waited == [devices[-1]] * 3


@pytest.mark.parametrize("name", every(("llama", "mamba")))  # packed, and aligned
async def test_no_kind_of_sampling_waits(name: str, tmp_path: Path) -> None:
    with made(name, tmp_path) as (runner, capacity, watch):
        drive = Drive(runner, capacity)
        drive.ask(0, most=ANSWER, sampling=SamplingParams(temperature=0.0, logprobs=2))
        drive.ask(
            1, most=2, sampling=SamplingParams(temperature=1.0, top_p=0.9, top_k=40, min_p=0.01, logit_bias={7: 2.0})
        )
        drive.ask(2, most=2, sampling=SamplingParams(temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.5))
        drive.ask(3, tuple(range(5, 25)), most=2, sampling=SamplingParams(logprobs=1), prompt_logprobs=True)
        drive.to_the_end()
        assert drive.work.steps_ahead > 0
        assert await drive.collected(0) == [*[TOLD] * ANSWER, "length"]
    assert watch.waits == []


class Sums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the shape of each tensor that is summed up cumulatively."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "cumsum" in str(func):
            self.shapes.append(args[0].shape)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cut", [True, False])
def test_a_draw_of_one_row_leaves_out_the_kernel_that_sums_in_any_order(cut: bool) -> None:
    """torch chooses it for a tensor of a single row (ScanUtils.cuh, `scan_dim`)."""
    with accelerator(), Sums() as sums:
        floor = torch.empty(1, device=CUDA) if cut else None
        drawn = topk.draw(torch.empty(1, 512, device=CUDA), floor, torch.empty(1, device=CUDA))
    assert drawn.shape == (1,)
    assert sums.shapes == [(2, 512)]


async def test_a_step_of_fixed_shape_is_filled_without_a_wait(tmp_path: Path) -> None:
    with made("llama", tmp_path) as (runner, capacity, watch):
        assert isinstance(runner, PagedRunner)
        fixed = GraphRunner(runner, rows=4, ctx_size=CTX)
        drive = Drive(fixed, capacity)
        for id in range(3):
            drive.ask(id, most=ANSWER)
        drive.to_the_end()
        assert fixed.graph_steps > 0
        assert drive.work.steps_ahead > 0
        with torch.inference_mode():
            for shape in fixed.shapes:
                fixed.compute(*shape)
    assert watch.waits == []


async def test_with_the_decode_kernel_one_shape_for_each_batch_size_gathers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_kernel, "missing", lambda: "")
    monkeypatch.setattr(KvPool, "gather", None)
    with made("llama", tmp_path) as (runner, capacity, watch):
        assert isinstance(runner, PagedRunner)
        fixed = GraphRunner(runner, rows=5, ctx_size=10_000)
        assert fixed.shapes == tuple((rows, 625) for rows in (1, 2, 4, 5))
        drive = Drive(GraphRunner(runner, rows=4, ctx_size=CTX), capacity)
        for id in range(3):
            drive.ask(id, most=ANSWER)
        drive.to_the_end()
    assert watch.waits == []


@pytest.mark.parametrize("lacks", ["", "Triton needs a C compiler; install gcc"])
async def test_where_the_decode_kernel_cannot_be_compiled_steps_gather_and_a_warning_says_why(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no folder for Triton's cache")

    monkeypatch.setattr(paged_kernel, "missing", lambda: lacks)
    monkeypatch.setattr(paged_kernel, "attend", fail)
    monkeypatch.setattr(paged_kernel, "_failures", [])
    with made("llama", tmp_path) as (runner, _, _):
        assert isinstance(runner, PagedRunner)
        runner.try_decode_kernel()
        assert not runner.has_decode_kernel
        fixed = GraphRunner(runner, rows=4, ctx_size=CTX)
        with torch.inference_mode():
            fixed.compute(*fixed.shapes[-1])
    assert (lacks or "no folder for Triton's cache") in caplog.text


def test_the_decode_kernel_is_tried_on_each_device_of_a_split_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[torch.device] = []
    monkeypatch.setattr(paged_kernel, "missing", lambda: "")
    monkeypatch.setattr(torch.cuda, "synchronize", tried.append)
    with made("llama", tmp_path) as (runner, capacity, _):
        assert isinstance(runner, PagedRunner)
        assert isinstance(capacity, BlockAllocator)
        pools = [
            KvPool(layers=1, kv_heads=2, head_dim=16, rows=4, blocks=4, dtype=torch.bfloat16, device=device)
            for device in DEVICES
        ]
        split = SplitKvPools(pools, LayerSplit(DEVICES, (1, 1)))
        PagedRunner(runner._model, split, capacity, CUDA).try_decode_kernel()
    assert tried == list(DEVICES)


def test_the_decode_kernel_is_tried_for_a_draft_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a step with drafts compiles it."""
    tried: list[torch.device] = []
    monkeypatch.setattr(paged_kernel, "missing", lambda: "")
    monkeypatch.setattr(torch.cuda, "synchronize", tried.append)
    with made("llama", tmp_path) as (target, capacity, _):
        assert isinstance(target, PagedRunner)
        assert isinstance(capacity, BlockAllocator)
        load_draft.make_runner(target._model, target._model.config, options(tmp_path), capacity, CUDA)
    assert tried == [CUDA]


@pytest.mark.parametrize(("name", "kv_dtype"), [("llama", "int8"), ("llama", "f16"), ("gemma2", "int4")])
async def test_a_cache_in_another_type_is_read_without_a_wait(name: str, kv_dtype: str, tmp_path: Path) -> None:
    with made(name, tmp_path, kv_cache_dtype=kv_dtype) as (runner, capacity, watch):
        drive = Drive(runner, capacity)
        drive.ask(0, tuple(range(5, 25)), most=ANSWER)
        drive.ask(1, most=ANSWER)
        drive.to_the_end()
    assert watch.waits == []


@pytest.mark.parametrize("name", every(("llama", "gemma2", "gpt2")))
def test_adapters_make_the_host_wait_for_nothing(name: str, tmp_path: Path) -> None:
    with made(name, tmp_path, max_loras=2) as (runner, capacity, watch):
        asked = options(tmp_path, ctx_size=CTX, parallel=4, prefill_chunk=32, max_loras=2)
        adapters = backends.make_adapters(runner, runner._model, asked, CUDA, copies=0)
        assert adapters is not None
        watch.waits.clear()
        steps: list[Any] = list(GenerationSteps(runner, capacity, asked, CTX, adapters.pretend()).largest())
        for _, batch in (step.args for step in steps):
            for segment in batch:
                runner.forget(segment.row)
            assert runner.run(batch).device == CUDA
            assert adapters._is_installed
    assert watch.waits == []


def test_the_masks_of_grammars_go_to_the_device_without_a_wait() -> None:
    with accelerator() as watch:
        assert sampler.mask_bias(np.zeros((3, 64), np.uint8), CUDA).device == CUDA
    assert watch.waits == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_prompts_are_left_to_kernels_that_do_not_compute_all_scores_at_once(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Without FlashAttention, keys are repeated for kernels that need one for each head, and masks have aligned rows;
    otherwise each layer would copy them."""
    with made("llama", tmp_path, dtype=dtype) as (runner, capacity, watch):
        drive = Drive(runner, capacity)
        drive.ask(0, tuple(range(5, 35)), most=1)  # in two chunks
        drive.to_the_end()
    masks = [mask for _, _, mask, _ in watch.attended if mask is not None]
    assert 0 < len(masks) < len(watch.attended)
    assert all(mask.stride(-1) == 1 and all(each % 16 == 0 for each in mask.stride()[:-1]) for mask in masks)
    assert all(query.shape[1] == keys.shape[1] for query, keys, _, _ in watch.attended)
    assert not any(is_grouped for _, _, _, is_grouped in watch.attended)


class Noting:
    """A runner that records the tokens of each segment of its steps."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self.steps: list[tuple[int, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, batch: Batch, device_tokens: torch.Tensor | None = None) -> torch.Tensor:
        self.steps.append(tuple(segment.length for segment in batch))
        return self._runner.run(batch, device_tokens)


@pytest.mark.parametrize("name", every(("llama", "t5")))
def test_the_largest_steps_lie_behind_a_load(name: str, tmp_path: Path) -> None:
    """A whole chunk beside all other rows, and all rows: the peak is known before the worker is ready."""
    with made(name, tmp_path) as (runner, capacity, _):
        noting: Any = Noting(runner)
        warm_up(noting, capacity, PrefillBudget(), chunk=32, ctx_size=CTX, progress=lambda event: None)
    assert noting.steps[-2:] == [(1, 1, 1, 32), (1, 1, 1, 1)]
