"""Linear layers on the CPU: the same numbers by other kernels, and no weight in memory twice."""

import asyncio
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests import tiny
from tests.worker.families import FAMILIES
from tests.worker.loaded import complete_one, generated, load, reference, serving, work_of
from worker.engines.transformers.attention import cpu_linear
from worker.engines.transformers.attention.cpu_linear import (
    PLAIN,
    REORDERED,
    CpuLinears,
    SmallBatchSizes,
    fastest_sizes,
    row_chunks,
)
from worker.engines.transformers.load import safetensors
from worker.estimate.memory_tracer import peak_bytes

pytestmark = pytest.mark.skipif(
    not cpu_linear.is_supported(torch.float32), reason="oneDNN has no fast kernels for this processor"
)
FOREVER = 1e9
LAYERS: list[Callable[[], nn.Module]] = [
    lambda: Pair(nn.Linear(72, 200)),
    lambda: Pair(nn.Linear(72, 200, bias=False)),
    lambda: Pair(Conv1D(200, 72)),  # type: ignore[no-untyped-call]
]


@given(st.integers(1, 256), st.booleans())
def test_rows_are_made_of_known_sizes_of_which_only_the_last_is_padded_and_no_size_alone_is_cheaper(
    rows: int, is_reordered: bool
) -> None:
    way, costs = row_chunks(rows, is_reordered), REORDERED if is_reordered else PLAIN
    assert set(way) <= set(costs)
    assert sum(way[:-1]) < rows <= sum(way)
    assert sum(costs[size] for size in way) <= costs[min(size for size in costs if size >= rows)]
    assert row_chunks(256 + rows, is_reordered) == (256 + rows,), "more than the largest size are computed as they are"


@pytest.mark.parametrize("inputs", [40, 400])
@pytest.mark.parametrize("is_reordered", [False, True])
def test_the_scratch_bytes_of_a_number_of_rows_are_known(is_reordered: bool, inputs: int) -> None:
    layer = made(nn.Linear(inputs, 200))
    ours = CpuLinears(Pair(layer), least_bytes=0)
    if is_reordered:
        ours.pretend()
    (mine,) = ours._all
    for rows in (1, 2, 3, 16, 17, 61, 100, 243, 255, 256, 259, 511, 700):
        x = torch.randn(rows, inputs)
        with torch.inference_mode():
            alive = peak_bytes(partial(layer, x)) // 4
        assert rows * 200 + mine.scratch(rows) <= alive <= 1.02 * (rows * 200 + mine.scratch(rows)) + 64 * inputs, rows


def test_the_costliest_numbers_of_rows_leave_out_none_that_costs_more() -> None:
    layer = made(nn.Linear(300, 200))
    ours = CpuLinears(Pair(layer), least_bytes=0)
    (mine,) = ours._all

    def cost(rows: int) -> int:
        return rows * 500 + mine.scratch(rows)

    for most in (1, 7, 64, 255, 259, 1000):
        found = ours.peak_row_counts(most)
        assert most in found
        assert max(map(cost, range(1, most + 1))) == max(map(cost, found))
        assert all(extra == 4 * mine.scratch(rows) for rows, extra in found.items())


@pytest.mark.parametrize(
    ("seconds", "sizes"),
    [
        ({1: 33.0, 2: 36.0, 4: 41.0}, {1: 1, 2: 2, 3: 4}),
        ({1: 194.0, 2: 190.0, 4: 147.0}, {1: 4, 2: 4, 3: 4}),
        ({1: 3.0, 2: 2.0, 4: 2.5}, {1: 2, 2: 2, 3: 4}),
        ({1: 1.0, 2: 1.0, 4: 1.0}, {1: 1, 2: 2, 3: 4}),
    ],
)
def test_few_rows_are_padded_to_the_size_that_was_the_quickest(
    seconds: dict[int, float], sizes: dict[int, int]
) -> None:
    assert fastest_sizes(seconds) == sizes


def test_how_few_rows_are_computed_is_measured_once_all_weights_are_reordered() -> None:
    layer = made(nn.Linear(72, 200))
    weight, bias = layer.weight.clone(), layer.bias.clone()
    ours = CpuLinears(Pair(layer), least_bytes=0)
    (mine,) = ours._all
    assert not mine.small_batches.measure([mine]), "nothing is reordered yet"
    mine.small_batches = ours._small_batches = SmallBatchSizes()
    turns = 0
    ours.reorder(0.0)
    while mine.small_batches.measure([mine]):
        turns += 1
    assert turns == 3 * SmallBatchSizes.TURNS
    assert mine.small_batches.sizes == fastest_sizes(mine.small_batches._seconds)
    x = torch.randn(3, 72)
    for rows in (1, 2, 3):
        for size in (size for size in (1, 2, 4) if size >= rows):
            mine.small_batches.sizes[rows] = size
            with torch.inference_mode():
                torch.testing.assert_close(layer(x[:rows]), x[:rows] @ weight.t() + bias)


class Pair(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module | None = None):
        super().__init__()
        self.first, self.second = first, second or nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x))


class Reader(nn.Module):
    """Uses its layer's weights itself."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> Any:
        return x @ self.read.weight.t()


class Many(nn.Module):
    def __init__(self, count: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(count))


def made(module: Any, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    for each in module.parameters():
        each.requires_grad_(False).normal_()
    return module.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 13, 17, 64, 100, 300])
@pytest.mark.parametrize("layer", LAYERS, ids=["linear", "without bias", "across"])
def test_a_layer_gives_the_same_numbers_before_and_after_it_is_reordered(
    layer: Callable[[], nn.Module], rows: int, dtype: torch.dtype
) -> None:
    if not cpu_linear.is_supported(dtype):
        pytest.skip(f"no kernels for {dtype}")
    module = made(layer(), dtype)
    x = torch.randn(2, rows, 72, dtype=dtype)
    with torch.inference_mode():
        before = module(x)
        ours = CpuLinears(module, least_bytes=0)
        plain = module(x)
        ours.reorder(FOREVER)
        after = module(x)
    tolerance: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 0.3}
    torch.testing.assert_close(plain, before, **tolerance)
    torch.testing.assert_close(after, before, **tolerance)


def test_a_large_matrix_is_reordered_by_slices_and_right_at_every_one() -> None:
    model = made(Pair(nn.Linear(64, 1000)))
    x = torch.randn(7, 64)
    before = model(x)
    ours = CpuLinears(model, release_pages=lambda weights: True, least_bytes=0, slice_bytes=300 * 64 * 4)
    with torch.inference_mode():
        for _ in range(5):
            ours.reorder(0.0)
            torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-3)
    assert ours.are_done


def test_a_large_matrix_that_could_not_be_freed_slice_by_slice_is_never_there_twice() -> None:
    layer = made(nn.Linear(64, 1000))
    x = torch.randn(7, 64)
    before = layer(x)
    ours = CpuLinears(Pair(layer), least_bytes=0, slice_bytes=300 * 64 * 4)
    with torch.inference_mode():
        ours.reorder(FOREVER)
        torch.testing.assert_close(layer(x), before, rtol=1e-4, atol=1e-3)
    assert ours.are_done
    assert not layer.weight.is_meta


def test_weights_that_are_used_elsewhere_too_stay_as_they_are() -> None:
    embedding, head = made(nn.Embedding(300, 64)), made(nn.Linear(64, 300, bias=False))
    head.weight = embedding.weight
    CpuLinears(Pair(embedding, head), least_bytes=0).reorder(FOREVER)
    with torch.inference_mode():
        assert embedding(torch.tensor([3])).isfinite().all()
        torch.testing.assert_close(head(torch.eye(64)), embedding.weight.t(), rtol=1e-4, atol=1e-4)


def test_small_matrices_are_left_to_torch() -> None:
    model = made(Pair(nn.Linear(64, 64)))
    CpuLinears(model)
    assert "forward" not in vars(model.first)


def resident_bytes() -> int:
    """Of this process, by the kernel's count of pages."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no Rss")


@pytest.mark.slow
@pytest.mark.parametrize("is_mapped", [True, False])
def test_reordering_leaves_one_copy_of_the_weights_in_memory(tmp_path: Path, is_mapped: bool) -> None:
    from safetensors.torch import save_file

    count, size = 24, 4 << 20
    save_file({str(i): torch.randn(1024, 1024) for i in range(count)}, tmp_path / "model.safetensors")
    file = safetensors.WeightFile(tmp_path / "model.safetensors")
    model: Any = Many(count)
    for layer, (_, view) in zip(model.layers, file.tensors(), strict=True):
        layer.weight = nn.Parameter(view if is_mapped else view.clone(), requires_grad=False)
        view.sum()  # now all of it is in memory
    del view
    if not is_mapped:
        file.keep_only(set())
    gc.collect()
    before = resident_bytes()
    with torch.inference_mode():
        CpuLinears(model, release_pages=file.release_pages).reorder(FOREVER)
        for layer in model.layers:
            layer(torch.randn(16, 1024))
    gc.collect()
    assert resident_bytes() - before < 0.25 * count * size


def test_reading_freed_weights_is_an_error() -> None:
    layer = made(nn.Linear(64, 300))
    CpuLinears(Pair(layer), least_bytes=0).reorder(FOREVER)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        layer.weight.sum().item()


def test_weights_that_the_code_around_a_layer_reads_stay_where_they_are() -> None:
    model = made(Reader())
    x = torch.randn(3, 64)
    before = model(x)
    CpuLinears(model, least_bytes=0).reorder(FOREVER)
    assert torch.equal(model(x), before)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_reads_weights_past_their_layer(name: str, tmp_path: Path) -> None:
    family, changes = FAMILIES[name]
    model = reference(tiny.make(family, tmp_path, **changes))
    prompt = torch.tensor([[5, 9, 17, 40, 33, 21, 60, 8, 11]])
    answer = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        before = model.generate(prompt, **answer)
        CpuLinears(model, least_bytes=0).reorder(FOREVER)
        assert torch.equal(model.generate(prompt, **answer), before)


async def test_weights_are_reordered_between_decode_steps_and_the_text_stays_the_same(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path, intermediate_size=8192, num_hidden_layers=1)
    prompts = [list(range(5, 5 + length)) for length in (3, 20, 9)]
    expected = [generated(reference(folder), prompt, 12) for prompt in prompts]
    engine = load(folder, ctx_size=64)
    linears = work_of(engine)._backend.linears
    assert linears is not None
    async with serving(engine):
        await complete_one(engine, prompts[0], max_tokens=1)
        assert not linears.are_done, "a step without decodes reorders nothing"
        for _ in range(2):  # while they are reordered, which takes fewer decode steps than 12, and after that
            answers = await asyncio.gather(*(complete_one(engine, prompt, max_tokens=12) for prompt in prompts))
            assert [each.tokens for each in answers] == expected
    assert linears.are_done
