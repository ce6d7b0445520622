"""Warmup steps before the first request: kernels are chosen, buffers grow, and the prefill budget learns its costs."""

import time
from collections.abc import Callable

from worker.engines.transformers.run.aligned import AlignedRunner
from worker.engines.transformers.run.cuda_graphs import GraphRunner
from worker.engines.transformers.run.runner import PagedRunner, Runner
from worker.engines.transformers.sample.sampler import COSTLIEST_SAMPLING, RowSampling, sample
from worker.engines.transformers.schedule.kv_cache import RowAllocator
from worker.engines.transformers.schedule.prefill_budget import PrefillBudget
from worker.engines.transformers.schedule.scheduler import Segment
from worker.engines.transformers.schedule.sequence import Sequence
from worker.interface import SamplingParams
from worker.protocol.events import Progress


def warm_up(
    runner: Runner,
    capacity: RowAllocator,
    prefill_budget: PrefillBudget,
    *,
    chunk: int,
    ctx_size: int,
    progress: Callable[[Progress], None],
) -> None:
    """Compute steps that choose kernels and teach `prefill_budget` the cost of a token, then the largest steps.

    Prompt chunks double in size. Decode steps have one row at the beginning of the context, and all rows at its end.
    """
    size = min(chunk, 16)
    while True:
        _time_step(runner, prefill_budget, (_chunk(runner, capacity, 0, size, ctx_size),))
        progress(Progress(stage="warmup", done=size, total=chunk))
        if size == chunk:
            break
        size = min(2 * size, chunk)
    batch = _all_rows(capacity, ctx_size)
    for _ in range(2):  # the first run of a shape includes the choice of kernels, the second its real time
        _time_step(runner, prefill_budget, (_segment(capacity, 0, min(1, ctx_size - 1), 1),))
        _time_step(runner, prefill_budget, batch)
    compute_largest_steps(runner, capacity, chunk=chunk, ctx_size=ctx_size)


def compute_largest_steps(runner: Runner, capacity: RowAllocator, *, chunk: int, ctx_size: int) -> None:
    """Compute a whole chunk beside all other rows, and all rows alone, both with the most expensive sampling.

    Buffers reach their final size, and the peak measured now is the worker's.
    """
    batch = _all_rows(capacity, ctx_size)
    last = _chunk(runner, capacity, capacity.rows - 1, chunk, ctx_size)
    for largest in ((*batch[:-1], last), batch):
        _compute(runner, largest, COSTLIEST_SAMPLING)


def record(
    runner: PagedRunner,
    capacity: RowAllocator,
    prefill_budget: PrefillBudget,
    *,
    ctx_size: int,
    progress: Callable[[Progress], None],
) -> GraphRunner:
    """Record the decode steps of `runner` as CUDA graphs, and teach `prefill_budget` how fast they are."""
    recorded = GraphRunner(runner, rows=capacity.rows, ctx_size=ctx_size)
    recorded.record(lambda: progress(Progress(stage="warmup")))
    for rows in (1, capacity.rows) * 4:
        _time_step(
            recorded, prefill_budget, tuple(_segment(capacity, row, min(1, ctx_size - 1), 1) for row in range(rows))
        )
    return recorded


def _chunk(runner: Runner, capacity: RowAllocator, row: int, size: int, ctx_size: int) -> Segment:
    """A chunk of a prompt at the end of the context; at its beginning if only there several tokens share a forward."""
    begins = isinstance(runner, AlignedRunner) and runner.has_states and not runner.continues_states
    return _segment(capacity, row, 0 if begins else ctx_size - size, size)


def _all_rows(capacity: RowAllocator, ctx_size: int) -> tuple[Segment, ...]:
    """A decode step of all rows at the end of the context."""
    return tuple(_segment(capacity, row, ctx_size - 1, 1) for row in range(capacity.rows))


def _segment(capacity: RowAllocator, row: int, start: int, length: int) -> Segment:
    """A part of a made-up sequence of zeros."""
    tokens = [0] * (start + length)
    sequence = Sequence(
        id=row, prompt_tokens=max(start, 1), tokens=tokens, limit=len(tokens), ends=frozenset(), computed=start
    )
    return Segment(sequence, row, start, length, capacity.contiguous_table(row, start + length))


def _time_step(runner: Runner, prefill_budget: PrefillBudget, batch: tuple[Segment, ...]) -> None:
    begin = time.monotonic()
    _compute(runner, batch, SamplingParams())
    prefill_budget.learn(batch, time.monotonic() - begin)


def _compute(runner: Runner, batch: tuple[Segment, ...], sampling: SamplingParams) -> None:
    sample(runner.run(batch), [RowSampling(sampling, uniform=0.5)] * len(batch))
    for segment in batch:
        runner.forget(segment.row)
