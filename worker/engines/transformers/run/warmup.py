"""Steps that nobody asked for, before the first request: kernels are chosen, buffers grow, and the pace is known."""

import time
from collections.abc import Callable

from worker.engines.transformers.run.cuda_graphs import FixedRunner
from worker.engines.transformers.run.runner import PackedRunner, Runner
from worker.engines.transformers.sample.sampler import COSTLIEST, Pick, sample
from worker.engines.transformers.schedule.kv_cache import Capacity
from worker.engines.transformers.schedule.prefill_budget import Pace
from worker.engines.transformers.schedule.scheduler import Segment
from worker.engines.transformers.schedule.sequence import Sequence
from worker.interface import SamplingParams
from worker.protocol.events import Progress


def warm_up(
    runner: Runner,
    capacity: Capacity,
    pace: Pace,
    *,
    chunk: int,
    ctx_size: int,
    progress: Callable[[Progress], None],
) -> None:
    """Compute prompt chunks at the far end of the context, each twice as long, then steps of decoding: of one row, at
    the beginning of the context, and of all, twice. Kernels are chosen, and `pace` learns what a token costs.

    Then the largest steps that there are, a whole chunk beside all other rows and all rows alone, each of which is
    sampled as costs the most: buffers reach their size, and what is measured now is what the worker will take.
    """
    size = min(chunk, 16)
    while True:
        _time_step(runner, pace, (_segment(capacity, 0, ctx_size - size, size),))
        progress(Progress(stage="warmup", done=size, total=chunk))
        if size == chunk:
            break
        size = min(2 * size, chunk)
    batch = tuple(_segment(capacity, row, ctx_size - 1, 1) for row in range(capacity.rows))
    for _ in range(2):
        _time_step(runner, pace, (_segment(capacity, 0, min(1, ctx_size - 1), 1),))
        _time_step(runner, pace, batch)
    last = _segment(capacity, capacity.rows - 1, ctx_size - chunk, chunk)
    for largest in ((*batch[:-1], last), batch):
        _compute(runner, largest, COSTLIEST)


def record(
    runner: PackedRunner,
    capacity: Capacity,
    pace: Pace,
    *,
    ctx_size: int,
    progress: Callable[[Progress], None],
) -> FixedRunner:
    """`runner` with its steps of decoding recorded as CUDA graphs; `pace` learns how fast they are."""
    fixed = FixedRunner(runner, rows=capacity.rows, ctx_size=ctx_size)
    fixed.record(lambda: progress(Progress(stage="warmup")))
    for rows in (1, capacity.rows) * 4:
        _time_step(fixed, pace, tuple(_segment(capacity, row, min(1, ctx_size - 1), 1) for row in range(rows)))
    return fixed


def _segment(capacity: Capacity, row: int, start: int, length: int) -> Segment:
    """A part of a sequence that nobody asked for."""
    tokens = [0] * (start + length)
    sequence = Sequence(
        id=row, prompt_tokens=max(start, 1), tokens=tokens, limit=len(tokens), ends=frozenset(), computed=start
    )
    return Segment(sequence, row, start, length, capacity.trial(row, start + length))


def _time_step(runner: Runner, pace: Pace, batch: tuple[Segment, ...]) -> float:
    begin = time.monotonic()
    _compute(runner, batch, SamplingParams())
    seconds = time.monotonic() - begin
    pace.learn(batch, seconds)
    return seconds


def _compute(runner: Runner, batch: tuple[Segment, ...], sampling: SamplingParams) -> None:
    sample(runner.run(batch), [Pick(sampling, uniform=0.5)] * len(batch))
    for segment in batch:
        runner.forget(segment.row)
