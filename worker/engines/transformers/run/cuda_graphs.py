"""Decoding at fixed shapes: a step that is recorded once, as a CUDA graph, and replayed ever after.

A step of decoding is hundreds of small kernels, and starting each costs the host more than computing it costs a large
card. A graph starts them all at once, but replays exactly what was recorded: the same shapes at the same addresses. So
there is a ladder of batch sizes and one of lengths; a batch is padded to the next rung of both, and what differs from
step to step (tokens, positions, slots, lengths, blocks) is copied, in one go, into buffers that never move. Rows of
padding repeat the first row, and so write what is written anyway.

Law: nothing here is special to CUDA but `record`. `FixedRunner` without a recording computes the very same step one
kernel at a time, which is how a machine without an accelerator tests it.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

from worker.engines.transformers.attention.kv_pool import Pool
from worker.engines.transformers.device import memory
from worker.engines.transformers.run.runner import PackedRunner
from worker.engines.transformers.schedule.kv_cache import Table, blocks_for
from worker.engines.transformers.schedule.scheduler import Batch, Segment
from worker.protocol.memory import BLOCK_TOKENS, GATHERED_BYTES

_SHORTEST = 16
"""Blocks of the lowest rung of lengths: reading more than there is costs nothing noticeable below."""
_TOKEN, _POSITION, _SLOT, _LENGTH, _BLOCKS = range(5)
"""Columns of the buffer; the blocks take all from theirs on."""

log = logging.getLogger(__name__)


def ladder(rows: int) -> tuple[int, ...]:
    """Batch sizes, rising, each twice the one before, the last one `rows`.

    Rows of padding cost little: a step of decoding reads the weights once, whoever is in it.
    """
    return (*(1 << power for power in range(rows.bit_length()) if 1 << power < rows), rows)


def lengths(ctx_size: int) -> tuple[int, ...]:
    """Blocks of the longest sequence of a step, each twice the one before, the last one for the whole context."""
    most, sizes = blocks_for(ctx_size), [_SHORTEST]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return (*(size for size in sizes if size < most), most)


def shapes(rows: int, ctx_size: int, token_bytes: int) -> tuple[tuple[int, int], ...]:
    """Batch sizes and blocks that are worth recording; `token_bytes`: of one token's keys and values in one layer."""
    return tuple(
        (size, blocks)
        for size in ladder(rows)
        for blocks in lengths(ctx_size)
        if size * blocks * BLOCK_TOKENS * token_bytes <= GATHERED_BYTES
    )


class FixedLayout:
    """What attention is told of a step with fixed shapes: views of the buffers, and masks made from them."""

    def __init__(self, pool: Pool, numbers: torch.Tensor):
        """`numbers` `[rows, 4 + blocks]`: a row of the buffer for each token."""
        self._pool = pool
        self._slots = numbers[:, _SLOT].contiguous()
        self._lengths = numbers[:, _LENGTH, None]
        self._blocks = numbers[:, _BLOCKS:].flatten()
        self._rows = len(numbers)
        self._masks: dict[int, torch.Tensor] = {}

    def attend(
        self,
        kernel: Any,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int,
        scaling: float | None,
    ) -> torch.Tensor:
        """`query` `[1, heads, rows, head_dim]` to `[1, rows, heads, head_dim]`; `key` and `value` go into the pool."""
        self._pool.write(layer, self._slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        keys, values = self._pool.gather(layer, self._blocks, self._rows)
        _, heads, rows, head_dim = query.shape
        kv_heads = keys.shape[1]
        # heads that share keys become queries of one head  # [rows, kv_heads, group, head_dim]
        mine = query[0].transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, head_dim)
        answer: torch.Tensor = kernel(
            mine, keys, values, self._mask(window, query.dtype), causal=False, scaling=scaling
        )
        return answer.reshape(1, rows, heads, head_dim)

    def _mask(self, window: int, dtype: torch.dtype) -> torch.Tensor:
        """`[rows, 1, 1, tokens]`, added to the scores: a row sees its own tokens, the last `window` of them."""
        if window not in self._masks:
            tokens = len(self._blocks) // self._rows * BLOCK_TOKENS
            position = torch.arange(tokens, device=self._blocks.device)
            hidden = position >= self._lengths
            if window:
                hidden |= position < self._lengths - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[window] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self._masks[window]


class _Staging:
    """The numbers of a step on the host, as the device will have them."""

    def __init__(self, rows: int, width: int, *, pinned: bool):
        self.numbers = torch.zeros(rows, width, dtype=torch.int64, pin_memory=pinned)
        self._written: list[tuple[Table, int] | None] = [None] * rows
        """By row: whose blocks are written there, and how many."""

    def write(self, row: int, segment: Segment, token: int) -> None:
        table, count = segment.table, blocks_for(segment.end)
        assert table is not None, "this cache has blocks"
        ((slot, _),) = table.slots(segment.start, segment.end)
        before = self._written[row]
        # of a table that was here before only the last block can have been replaced, by a copy, and some added;
        # entries beyond the row's own are masked, and may be of any step before: all are blocks of the pool
        first = min(before[1], count) - 1 if before is not None and before[0] is table else 0
        self.numbers[row, :_BLOCKS] = torch.tensor((token, segment.start, slot, segment.end))
        self.numbers[row, _BLOCKS + first : _BLOCKS + count] = torch.tensor(table.blocks[first:count])
        self._written[row] = table, count

    def pad(self, count: int, rows: int) -> None:
        """Rows from `count` on repeat the first one."""
        for row in range(count, rows):
            self._written[row] = None
        self.numbers[count:rows] = self.numbers[0]


class FixedRunner:
    """A `PackedRunner` whose steps of pure decoding have fixed shapes, and are replayed where they were recorded."""

    def __init__(self, runner: PackedRunner, *, rows: int, ctx_size: int):
        """Makes the buffers; `record` makes the graphs."""
        self._runner = runner
        pool, device = runner.pool, runner.device
        self._shapes = shapes(rows, ctx_size, pool.token_bytes)
        width = _BLOCKS + blocks_for(ctx_size)
        self._numbers = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self._staged = tuple(_Staging(rows, width, pinned=device.type == "cuda") for _ in range(2))
        """Two, in turn: the copy of the step in front may still be on its way. That of the one before that is not,
        because whoever launches a step has read the tokens of the last but one."""
        self._logits = torch.zeros(rows, runner.vocab_size, dtype=torch.float32, device=device)
        self._graphs: dict[tuple[int, int], Any] = {}
        self.fixed_steps = 0
        """So many steps went through here since the start."""

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def bytes(self) -> int:
        return self._runner.bytes

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Batch sizes and blocks, rising."""
        return self._shapes

    @property
    def buffer_bytes(self) -> int:
        """On the device, beside graphs and cache."""
        return self._numbers.nbytes + self._logits.nbytes

    @property
    def recorded(self) -> int:
        """Graphs."""
        return len(self._graphs)

    def fork(self, source: int, target: int) -> None:
        self._runner.fork(source, target)

    def forget(self, row: int) -> None:
        self._runner.forget(row)

    @torch.inference_mode()
    def run(self, batch: Batch, fed: torch.Tensor | None = None) -> torch.Tensor:
        """See `Runner`. The logits of a step with fixed shapes are the buffer's own: the next step overwrites them."""
        shape = self.shape_of(batch)
        if shape is None:
            return self._runner.run(batch, fed)
        self._runner.tidy(batch)
        self._fill(batch, shape[0], fed)
        self.fixed_steps += 1
        if shape in self._graphs:
            self._graphs[shape].replay()
        else:
            self.compute(*shape)
        return self._logits[: len(batch)]

    def shape_of(self, batch: Batch) -> tuple[int, int] | None:
        """The smallest shape that the batch fits into; None if it is not pure decoding, or too large to record."""
        if not batch or not all(segment.is_decode and segment.logits == 1 for segment in batch):
            return None
        if any(segment.sequence.adapter is not None for segment in batch):
            return None  # which layers add what, a recording cannot know
        rows, blocks = len(batch), max(blocks_for(segment.end) for segment in batch)
        fitting = (shape for shape in self._shapes if shape[0] >= rows and shape[1] >= blocks)
        return next(fitting, None)

    def _fill(self, batch: Batch, rows: int, fed: torch.Tensor | None) -> None:
        """Copy the numbers of the step to where the graph reads them. The host waits for nothing."""
        self._staged = staging, _ = self._staged[::-1]
        for row, segment in enumerate(batch):
            token = segment.sequence.tokens[segment.start] if fed is None else 0
            staging.write(row, segment, token)
        staging.pad(len(batch), rows)
        # whole rows: one run of memory, one copy
        self._numbers[:rows].copy_(staging.numbers[:rows], non_blocking=True)
        if fed is not None:
            self._numbers[: len(batch), _TOKEN] = fed
            self._numbers[len(batch) : rows, _TOKEN] = fed[0]

    def compute(self, rows: int, blocks: int) -> None:
        """The step itself: reads the buffers, writes keys, values and logits; waits for nothing."""
        numbers = self._numbers[:rows, : _BLOCKS + blocks]
        logits = self._runner.forward(
            numbers[:, _TOKEN].contiguous(),
            numbers[:, _POSITION].contiguous(),
            torch.arange(rows, device=numbers.device),
            FixedLayout(self._runner.pool, numbers),
        )
        self._logits[:rows].copy_(logits)

    @torch.inference_mode()
    def record(self, report: Callable[[], object]) -> None:
        """Record every shape, the largest first, all in the same memory. Nobody may be running.

        `report` is called after each. A model that cannot be recorded (its code waits for the device, or its shapes
        depend on its numbers) is served without, and so is one for whose graphs there is no memory.
        """
        self._numbers.zero_()
        self._numbers[:, _LENGTH] = 1  # everybody is at the beginning of block 0, which is nobody's yet
        try:
            self._record_all(report)
        except Exception as error:  # noqa: BLE001 - it is told, and the steps are computed one kernel at a time
            self._graphs.clear()
            self._shapes = ()
            log.warning("this model's steps cannot be recorded as CUDA graphs: %s", memory.one_line(error))
            device = self._runner.device
            torch.cuda.set_stream(torch.cuda.default_stream(device))  # a recording that fails leaves its own behind
            torch.cuda.synchronize(device)  # raises if the device itself is lost
            torch.cuda.empty_cache()

    def _record_all(self, report: Callable[[], object]) -> None:
        device = self._runner.device
        shared = torch.cuda.graph_pool_handle()
        side = _stream(device)
        largest_first = sorted(self._shapes, key=lambda shape: shape[0] * shape[1], reverse=True)
        for shape in largest_first:
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                self.compute(*shape)  # libraries choose their kernels, and take their workspaces, now
                if not self._graphs:
                    self._compute_without_waiting(shape)
            torch.cuda.current_stream(device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=shared, stream=side):
                self.compute(*shape)
            self._graphs[shape] = graph
            report()
        torch.cuda.synchronize(device)

    def _compute_without_waiting(self, shape: tuple[int, int]) -> None:
        """Raises RuntimeError if the model's code waits for the device. A recording would fail for that, too, but it
        would leave torch's allocator as if it went on for ever, which then gives nothing back to the device."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.compute(*shape)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _stream(device: torch.device) -> torch.cuda.Stream:
    build: Any = torch.cuda.Stream  # untyped in torch
    stream: torch.cuda.Stream = build(device)
    return stream
