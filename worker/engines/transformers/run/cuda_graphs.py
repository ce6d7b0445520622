"""Decode steps of fixed shapes, recorded once as CUDA graphs and replayed.

A decode step is hundreds of small kernels. On a large GPU, launching them from the host takes longer than computing
them. A graph launches all of them at once, but replays exactly what was recorded: the same shapes at the same
addresses. So there is a fixed set of batch sizes and of sequence lengths, and a batch is padded to the next of both.
The numbers of a step (tokens, positions, targets in the pool, lengths, blocks) are copied in one go into buffers that
never move. Padding rows repeat the first row: they write the same keys and values to the same position, which is
harmless. Where attention has its Triton kernel (`paged_kernel`), lengths are read on the device, and the length of the
shape is the whole context.

Only `record` needs CUDA. Without recordings, `GraphRunner` computes the same steps kernel by kernel, which is how the
tests check it on a machine without a GPU.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from worker.engines.transformers.attention import paged_kernel
from worker.engines.transformers.attention.decode_plan import additive
from worker.engines.transformers.attention.kv_pool import KvPool
from worker.engines.transformers.attention.paged import LayerAttention
from worker.engines.transformers.device import cuda_errors
from worker.engines.transformers.run.runner import PagedRunner
from worker.engines.transformers.schedule.kv_cache import BlockTable, blocks_for
from worker.engines.transformers.schedule.scheduler import Batch, Segment
from worker.protocol.memory import BLOCK_TOKENS, GATHERED_BYTES

# The smallest recorded length in blocks. Reading this much costs nothing noticeable, so shorter graphs gain nothing.
_SHORTEST = 16
_TOKEN, _POSITION, _TARGET, _LENGTH, _BLOCKS = range(5)  # columns of the buffer; blocks take all from theirs on

log = logging.getLogger(__name__)


def batch_sizes(rows: int) -> tuple[int, ...]:
    """Recorded batch sizes: powers of two below `rows`, then `rows`.

    Powers of two bound padding by a factor of two and keep the number of graphs logarithmic. Padding rows cost little:
    a decode step is bound by reading the weights, which all rows share.
    """
    return (*(1 << power for power in range(rows.bit_length()) if 1 << power < rows), rows)


def block_counts(ctx_size: int) -> tuple[int, ...]:
    """Recorded lengths in blocks, for the longest sequence of a step: doubling, up to the whole context."""
    most, sizes = blocks_for(ctx_size), [_SHORTEST]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return (*(size for size in sizes if size < most), most)


def graph_shapes(rows: int, ctx_size: int, token_bytes: int, *, gathers: bool = True) -> tuple[tuple[int, int], ...]:
    """Batch sizes and lengths (in blocks) to record. `token_bytes`: keys and values of one token in one layer.
    `gathers`: attention reads a copy of the keys and values; else every shape has the whole context.

    Shapes that would gather more than GATHERED_BYTES in a layer are left out: such a step computes long enough to hide
    its launches, and its gather buffers would dominate the memory of all graphs.
    """
    if not gathers:
        return tuple((size, blocks_for(ctx_size)) for size in batch_sizes(rows))
    return tuple(
        (size, blocks)
        for size in batch_sizes(rows)
        for blocks in block_counts(ctx_size)
        if size * blocks * BLOCK_TOKENS * token_bytes <= GATHERED_BYTES
    )


class GraphLayout:
    """Layout of a step of fixed shape, for attention: views of the buffers, and masks made from them."""

    def __init__(self, pool: KvPool, numbers: torch.Tensor, *, has_kernel: bool):
        """`numbers` `[rows, 4 + blocks]`: the buffer, one row for each token. `has_kernel`: `paged_kernel` attends."""
        self._pool = pool
        self._targets = numbers[:, _TARGET].contiguous()  # positions in the pool to write
        self._lengths = numbers[:, _LENGTH, None]
        self._tables = numbers[:, _BLOCKS:]
        # To gather, all layers need one contiguous copy of the tables. The kernel reads them in place.
        self._blocks = self._tables if has_kernel else self._tables.flatten()
        self._rows = len(numbers)
        self._has_kernel = has_kernel
        self._masks: dict[int, torch.Tensor] = {}

    def attend(self, at: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend from `query` `[1, heads, rows, head_dim]` to the pool; result `[1, rows, heads, head_dim]`."""
        self._pool.write(at.layer, self._targets, key[0].transpose(0, 1), value[0].transpose(0, 1))
        if self._has_kernel:
            keys, values = self._pool.keys[at.layer], self._pool.values[at.layer]
            tokens, lengths = query[0].transpose(0, 1), self._lengths[:, 0]
            return paged_kernel.attend(
                tokens, keys, values, self._tables, lengths, window=at.window, scaling=at.scaling
            )[None]
        # [rows, kv_heads, tokens, head_dim]
        keys, values = self._pool.gather(at.layer, self._blocks, self._rows)
        _, heads, rows, head_dim = query.shape
        kv_heads = keys.shape[1]
        # Grouped-query attention: heads that share keys become queries of one head.
        # [1, heads, rows, head_dim] to [rows, kv_heads, heads / kv_heads, head_dim]
        grouped = query[0].transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, head_dim)
        mask = self._mask(at.window, query.dtype)
        answer: torch.Tensor = at.kernel(grouped, keys, values, mask, causal=False, scaling=at.scaling)
        return answer.reshape(1, rows, heads, head_dim)

    def _mask(self, window: int, dtype: torch.dtype) -> torch.Tensor:
        """`[rows, 1, 1, tokens]`, added to the scores: each row sees its own tokens, the last `window` of them."""
        if window not in self._masks:
            tokens = self._tables.shape[1] * BLOCK_TOKENS
            position = torch.arange(tokens, device=self._tables.device)
            hidden = position >= self._lengths
            if window:
                hidden |= position < self._lengths - window
            self._masks[window] = additive(hidden[:, None, None], dtype)
        return self._masks[window]


class _StagedStep:
    """The numbers of one step in host memory, laid out as in the device buffer."""

    def __init__(self, rows: int, width: int, *, pinned: bool):
        self.numbers = torch.zeros(rows, width, dtype=torch.int64, pin_memory=pinned)
        # By row: the table whose blocks are written there, and their number.
        self._written: list[tuple[BlockTable, int] | None] = [None] * rows

    def write(self, row: int, segment: Segment, token: int) -> None:
        table, count = segment.table, blocks_for(segment.end)
        assert table is not None, "this cache has blocks"
        ((target, _),) = table.spans(segment.start, segment.end)
        before = self._written[row]
        # If the row held the same table before, only its last block can have been replaced (copy on write) and some
        # appended. Entries behind the row's own are stale but valid block numbers, and attention masks them.
        first = min(before[1], count) - 1 if before is not None and before[0] is table else 0
        self.numbers[row, :_BLOCKS] = torch.tensor((token, segment.start, target, segment.end))
        self.numbers[row, _BLOCKS + first : _BLOCKS + count] = torch.tensor(table.blocks[first:count])
        self._written[row] = table, count

    def pad(self, count: int, rows: int) -> None:
        """Fill the rows from `count` on with the first row."""
        for row in range(count, rows):
            self._written[row] = None
        self.numbers[count:rows] = self.numbers[0]


class GraphRunner:
    """A `PagedRunner` whose pure decode steps have fixed shapes, and replay graphs where they were recorded."""

    def __init__(self, runner: PagedRunner, *, rows: int, ctx_size: int):
        """Allocate the buffers. `record` makes the graphs."""
        self._runner = runner
        pool, device = runner.pool, runner.device
        self._has_kernel = runner.has_decode_kernel
        # Batch sizes and lengths in blocks, rising.
        self.shapes = graph_shapes(rows, ctx_size, pool.token_bytes, gathers=not self._has_kernel)
        width = _BLOCKS + blocks_for(ctx_size)
        self._numbers = torch.zeros(rows, width, dtype=torch.int64, device=device)
        # Two, used in turn: the copy of the step in front may still be running. The copy of the step before that has
        # ended, because a step is launched only after the results of the last but one have been read.
        self._staged = tuple(_StagedStep(rows, width, pinned=device.type == "cuda") for _ in range(2))
        self._logits = torch.zeros(rows, runner.vocab_size, dtype=torch.float32, device=device)
        self._graphs: dict[tuple[int, int], Any] = {}
        self.graph_steps = 0  # steps of fixed shape since the start

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def buffer_bytes(self) -> int:
        """Bytes on the device, without graphs and cache."""
        return self._numbers.nbytes + self._logits.nbytes

    @property
    def recorded(self) -> int:
        """The number of graphs."""
        return len(self._graphs)

    def fork(self, source: int, target: int) -> None:
        self._runner.fork(source, target)

    def forget(self, row: int) -> None:
        self._runner.forget(row)

    @torch.inference_mode()
    def run(self, batch: Batch, device_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """See `Runner.run`. The logits of a graph step lie in a buffer that the next step overwrites."""
        shape = self.shape_of(batch)
        if shape is None:
            return self._runner.run(batch, device_tokens)
        self._runner.prepare_blocks(batch)
        self._fill(batch, shape[0], device_tokens)
        self.graph_steps += 1
        if shape in self._graphs:
            self._graphs[shape].replay()
        else:
            self.compute(*shape)
        return self._logits[: len(batch)]

    def shape_of(self, batch: Batch) -> tuple[int, int] | None:
        """The smallest recorded shape for the batch. None if it is not pure decoding, or too large."""
        if not batch or not all(segment.is_decode and segment.logits == 1 for segment in batch):
            return None
        if any(segment.sequence.adapter is not None for segment in batch):
            return None  # which layers add an adapter differs between steps; a graph cannot
        rows, blocks = len(batch), max(blocks_for(segment.end) for segment in batch)
        fitting = (shape for shape in self.shapes if shape[0] >= rows and shape[1] >= blocks)
        return next(fitting, None)

    def _fill(self, batch: Batch, rows: int, device_tokens: torch.Tensor | None) -> None:
        """Copy the numbers of the step into the buffer that the graph reads. The host does not wait."""
        self._staged = staging, _ = self._staged[::-1]
        for row, segment in enumerate(batch):
            token = segment.sequence.tokens[segment.start] if device_tokens is None else 0
            staging.write(row, segment, token)
        staging.pad(len(batch), rows)
        # Whole rows, so that it is one contiguous copy instead of one for each row.
        self._numbers[:rows].copy_(staging.numbers[:rows], non_blocking=True)
        if device_tokens is not None:
            self._numbers[: len(batch), _TOKEN] = device_tokens
            self._numbers[len(batch) : rows, _TOKEN] = device_tokens[0]

    def compute(self, rows: int, blocks: int) -> None:
        """Compute the step: read the buffers, write keys, values and logits. The host does not wait."""
        numbers = self._numbers[:rows, : _BLOCKS + blocks]
        logits = self._runner.forward(
            numbers[:, _TOKEN].contiguous(),
            numbers[:, _POSITION].contiguous(),
            torch.arange(rows, device=numbers.device),
            GraphLayout(self._runner.pool, numbers, has_kernel=self._has_kernel),
        )
        self._logits[:rows].copy_(logits)

    @torch.inference_mode()
    def record(self, report: Callable[[], object]) -> None:
        """Record every shape, the largest first, in one shared memory pool. No step may be running.

        `report` is called after each. A model that cannot be recorded is served without graphs: its code waits for the
        device, its shapes depend on values, or there is no memory for the graphs.
        """
        self._numbers.zero_()
        self._numbers[:, _LENGTH] = 1  # all rows write to the beginning of block 0, which no sequence owns yet
        try:
            return self._record_all(report)
        except Exception as error:  # noqa: BLE001 - logged; steps are then computed kernel by kernel
            log.warning("this model's steps cannot be recorded as CUDA graphs: %s", cuda_errors.one_line(error))
        # Outside of the handler, where the error still refers to the tensors of the failed recording.
        self._graphs.clear()
        self.shapes = ()
        device = self._runner.device
        torch.cuda.set_stream(torch.cuda.default_stream(device))  # a failed recording leaves its own stream set
        torch.cuda.synchronize(device)  # raises if the device itself is lost
        torch.cuda.empty_cache()

    def _record_all(self, report: Callable[[], object]) -> None:
        device = self._runner.device
        shared = torch.cuda.graph_pool_handle()
        capture_stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Largest first: smaller graphs then fit into the memory that the pool already has.
        largest_first = sorted(self.shapes, key=lambda shape: shape[0] * shape[1], reverse=True)
        for shape in largest_first:
            capture_stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(capture_stream):
                # Before the recording: libraries choose kernels and allocate workspaces in the first run of a shape.
                self.compute(*shape)
                if not self._graphs:
                    # Once more, and raise RuntimeError if the model's code waits for the device. A recording would fail
                    # for this too, but it would leave torch's allocator in recording mode, in which no memory is ever
                    # returned to the device.
                    with waiting_forbidden():
                        self.compute(*shape)
            torch.cuda.current_stream(device).wait_stream(capture_stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=shared, stream=capture_stream):
                self.compute(*shape)
            self._graphs[shape] = graph
            report()
        torch.cuda.synchronize(device)


@contextmanager
def waiting_forbidden() -> Iterator[None]:
    """Make torch raise RuntimeError where the host waits for the device."""
    with warnings.catch_warnings():
        # torch warns at the first call. Where warnings are errors, that call raises, and the mode is set nevertheless.
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
