"""Decode steps of fixed shape: the recorded sizes, and equality of graph steps and dynamic steps.

All but the recording itself, which tests/gpu/test_engine_on_gpu.py tests.
"""

import asyncio
import random
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny
from tests.worker.loaded import complete_one, generated, load_with, options, paged_runner, reference, serving
from tests.worker.scheduled import sequence
from worker.engines.transformers.attention.kv_pool import KvPool
from worker.engines.transformers.run.cuda_graphs import (
    GraphRunner,
    batch_sizes,
    block_counts,
    graph_shapes,
    waiting_forbidden,
)
from worker.engines.transformers.run.runner import PagedRunner, Runner
from worker.engines.transformers.schedule.kv_cache import BlockAllocator
from worker.engines.transformers.schedule.prefill_budget import PrefillBudget
from worker.engines.transformers.schedule.scheduler import Batch, Segment
from worker.protocol.memory import BLOCK_TOKENS

CTX, ROWS = 600, 6


def test_a_ladder_ends_where_the_batch_can_and_never_more_than_doubles() -> None:
    for rows in range(1, 300):
        sizes = batch_sizes(rows)
        assert sizes[-1] == rows
        assert list(sizes) == sorted(set(sizes))
        assert all(after <= 2 * before for before, after in pairwise(sizes))


def test_lengths_end_with_the_whole_context_and_never_more_than_double() -> None:
    for ctx_size in (1, 16, 17, 255, 256, 257, 4096, 100_000):
        sizes = block_counts(ctx_size)
        assert sizes[-1] * BLOCK_TOKENS >= ctx_size > (sizes[-1] - 1) * BLOCK_TOKENS
        assert all(before < after <= 2 * before for before, after in pairwise(sizes))


def test_the_bytes_that_a_recorded_step_gathers_are_bounded() -> None:
    found = graph_shapes(64, 8192, 4096)
    assert (1, 512) in found
    assert (64, 16) in found
    assert max(rows * blocks * BLOCK_TOKENS * 4096 for rows, blocks in found) <= 256 << 20
    assert (64, 512) not in found


@pytest.fixture(scope="module", params=["llama", "mistral", "gpt2"])
def snapshot(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grouped-query attention; a window in each layer; learned positions."""
    sizes: dict[str, Any] = {"max_position_embeddings": CTX} if request.param != "gpt2" else {"n_positions": CTX}
    return tiny.make(request.param, tmp_path_factory.mktemp("snapshot"), **sizes)


class Both:
    """Computes every step of fixed shape in both ways, and compares."""

    def __init__(self, runner: PagedRunner):
        self.dynamic = runner
        self.fixed = GraphRunner(runner, rows=ROWS, ctx_size=CTX)
        self.seen: set[tuple[int, int, int]] = set()  # rows of each batch, and the shape that it was padded to

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fixed, name)

    def run(self, batch: Batch, device_tokens: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.fixed.run(batch, device_tokens).clone()
        shape = self.fixed.shape_of(batch)
        if shape is not None:
            self.seen.add((len(batch), *shape))
            torch.testing.assert_close(logits, self.dynamic.run(batch, device_tokens), atol=2e-4, rtol=1e-4)
        return logits


async def test_a_step_of_fixed_shape_gives_the_logits_of_the_dynamic_one(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of many lengths join and end; some grow beyond the smallest recorded length."""
    monkeypatch.setattr(
        PrefillBudget, "budget", lambda self, decoding, chunk, *waiting: chunk
    )  # independent of the machine
    made: list[Both] = []

    def wrap(runner: Runner) -> Any:
        assert isinstance(runner, PagedRunner)
        made.append(Both(runner))
        return made[0]

    source = random.Random(7)
    prompts = [tuple(source.randrange(2, 500) for _ in range(length)) for length in (3, 30, 243, 250, 60, 7, 31, 12)]
    model = reference(snapshot)
    async with serving(load_with(snapshot, wrap, ctx_size=CTX, parallel=ROWS, prefill_chunk=512)) as engine:
        collected = await asyncio.gather(
            *(complete_one(engine, each, max_tokens=8 + len(each) % 20) for each in prompts)
        )
    for prompt, each in zip(prompts, collected, strict=True):
        assert each.tokens == generated(model, prompt, 8 + len(prompt) % 20)
    padded = {(size, blocks) for size, _, blocks in made[0].seen}
    assert {size for size, _ in padded} >= {1, 3, 5, 6}
    assert {blocks for _, blocks in padded} == {16, 32}
    assert made[0].fixed.graph_steps >= 20


@pytest.fixture
def world(snapshot: Path) -> tuple[GraphRunner, KvPool, BlockAllocator]:
    runner, blocks = paged_runner(options(snapshot, ctx_size=128, parallel=4))
    return GraphRunner(runner, rows=4, ctx_size=128), runner.pool, blocks


def decodes(blocks: BlockAllocator, count: int) -> Batch:
    batch = []
    for id in range(count):
        each = sequence(id, [7 + id] * 5, limit=9, computed=5)
        each.append(7 + id)
        row, _ = blocks.admit(each)
        batch.append(Segment(each, row, 5, 1, blocks.table(row)))
    return tuple(batch)


def test_rows_of_padding_write_the_same_as_the_first_row(world: tuple[GraphRunner, KvPool, BlockAllocator]) -> None:
    fixed, pool, blocks = world
    batch = decodes(blocks, 3)
    before = [store.clone() for store in (*pool.keys, *pool.values)]
    assert fixed.shape_of(batch) == (4, 8)
    fixed.run(batch)
    written = {
        position
        for old, new in zip(before, (*pool.keys, *pool.values), strict=True)
        for position in (old != new).flatten(1).any(1).nonzero()[:, 0].tolist()
    }
    assert written == {next(iter(each.table.spans(5, 6)))[0] for each in batch if each.table is not None}


def test_the_numbers_of_a_step_stay_where_the_device_reads_them_while_the_next_is_written(
    world: tuple[GraphRunner, KvPool, BlockAllocator],
) -> None:
    """Its copy may still be running when the next step is launched."""
    fixed, _, blocks = world
    batch = decodes(blocks, 3)
    fixed.run(batch)
    staged = fixed._staged[0].numbers
    before = staged.clone()
    ahead = tuple(
        Segment(each.sequence, each.row, each.end, 1, each.table, ahead=True)
        for each in batch
        if blocks.grow(each.row, each.end, each.end + 1)
    )
    fixed.run(ahead, torch.tensor([5, 6, 7]))
    assert torch.equal(staged, before)
    fixed.run(batch)
    assert torch.equal(staged, before), "the same numbers again, in the same place"
    assert fixed._staged[0].numbers is staged


def test_rows_ahead_and_their_padding_are_fed_on_the_device(world: tuple[GraphRunner, KvPool, BlockAllocator]) -> None:
    fixed, _, blocks = world
    batch = decodes(blocks, 3)
    for each in batch:
        assert blocks.grow(each.row, each.end, each.end + 1)
    device_tokens = torch.tensor([50, 60, 70])
    ahead = tuple(Segment(each.sequence, each.row, each.end, 1, each.table, ahead=True) for each in batch)
    fixed.run(batch)
    found = fixed.run(ahead, device_tokens).clone()
    assert fixed._numbers[:4, 0].tolist() == [50, 60, 70, 50]
    for each, token in zip(batch, device_tokens.tolist(), strict=True):
        each.sequence.tokens.append(token)
        each.sequence.computed = each.end
    known = tuple(Segment(each.sequence, each.row, each.end, 1, each.table) for each in batch)
    torch.testing.assert_close(fixed.run(known), found)


def test_a_prompt_or_a_larger_batch_is_no_step_of_fixed_shape(
    world: tuple[GraphRunner, KvPool, BlockAllocator],
) -> None:
    fixed, _, blocks = world
    batch = decodes(blocks, 4)
    prompt = Segment(sequence(9, 6, computed=5), batch[0].row, 5, 1, batch[0].table)
    assert fixed.shape_of(batch) is not None
    assert fixed.shape_of((*batch[:3], prompt)) is None
    assert fixed.shape_of((*batch, batch[0])) is None
    assert fixed.shape_of(()) is None


def test_torchs_warning_about_the_mode_that_forbids_waits_is_no_error_and_the_mode_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch sets the mode and then warns, once in a process. Warnings are errors here."""
    mode = ["default"]

    def set_mode(name: str) -> None:
        mode[0] = name
        warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with waiting_forbidden():
        assert mode == ["error"]
    assert mode == ["default"]
