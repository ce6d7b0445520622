"""Tensor parallelism: all ranks compute the same step, each with its slice of the weights and its heads' keys.

Rank 0, the leader, has the sequences, the scheduler and the sampler. It sends each step as plain numbers: tokens,
blocks of each sequence, and blocks to erase and copy. Followers have block numbers only, and their pools have the
same blocks. Partial sums and logits are combined inside the forward (`tensor_parallel_plan`).

A rank that fails in a step is out of step for good, since the others wait for its sums. So a failing rank ends the
worker, and nothing is repeated.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from worker.engines.transformers.attention import paged
from worker.engines.transformers.attention.kv_pool import KvPool
from worker.engines.transformers.device import cuda_errors, memory
from worker.engines.transformers.device.process_group import ProcessGroup
from worker.engines.transformers.device.process_overhead import overhead
from worker.engines.transformers.device.rank_processes import (
    DEVICE_BYTES,
    HOST_BYTES,
    LOADED_BYTES,
    LeaderLink,
    RankProcesses,
)
from worker.engines.transformers.load import layer_split, loader, tensor_parallel_plan
from worker.engines.transformers.load.lora import LoraStep
from worker.engines.transformers.load.snapshot import load_config
from worker.engines.transformers.load.tensor_parallel_plan import RankSlice
from worker.engines.transformers.run import backends
from worker.engines.transformers.run.runner import BlockUpdates, PagedRunner
from worker.engines.transformers.schedule.kv_cache import BlockAllocator, BlockRun, BlockTable
from worker.engines.transformers.schedule.scheduler import Batch, Segment
from worker.errors import RankLost, StartError, WorkerError
from worker.protocol.argv import Serve
from worker.protocol.events import Progress
from worker.protocol.memory import NCCL_BYTES

log = logging.getLogger(__name__)


class FollowerSegment(NamedTuple):
    """Tokens of one sequence, as a forward needs them."""

    tokens: Sequence[int]
    start: int
    logits: int  # number of last positions whose logits are needed
    runs: tuple[tuple[int, int, int], ...]  # runs of its blocks, as in `kv_cache.BlockRun`

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def table(self) -> BlockTable:
        return BlockTable(runs=[BlockRun(*run) for run in self.runs])


class FollowerStep(NamedTuple):
    """All that a follower needs for a step."""

    updates: BlockUpdates
    lora: LoraStep
    segments: Sequence[FollowerSegment]


class LeaderRunner(PagedRunner):
    """Computes each step together with all followers."""

    def __init__(
        self,
        model: Any,
        pool: KvPool,
        blocks: BlockAllocator,
        device: torch.device,
        ranks: RankProcesses,
        group: ProcessGroup,
    ):
        super().__init__(model, pool, blocks, device)
        self._ranks, self._group = ranks, group
        # Ranks that hold a slice of the head must compute its logits with the leader.
        self._divides_head = tensor_parallel_plan.divides_head(model, ranks.count)

    @torch.inference_mode()
    def run(self, batch: Batch, device_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """See `Runner.run`. Returns when the device has finished: logits are worthless if a rank is lost meanwhile.

        Raises RankLost, or the StartError of a follower that names the exit code of the process. Raises UnusableAdapter
        before any rank has begun the step.
        """
        assert device_tokens is None, "steps of a tensor-parallel model are not launched ahead"
        lora = self.plan_adapters(batch)
        self._ranks.send(FollowerStep(self.prepare_blocks(batch), lora, [self._for_followers(part) for part in batch]))
        try:
            logits = self.compute(batch, lora)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        except Exception as error:
            if cuda_errors.is_exhausted(error):
                raise RankLost(f"rank 0 of {self._ranks.count}: {cuda_errors.one_line(error)}") from error
            raise self._ranks.why() from error
        if self._ranks.lost is not None:
            raise self._ranks.lost
        return logits

    def _for_followers(self, segment: Segment) -> FollowerSegment:
        assert segment.table is not None, "this cache has blocks"
        runs = tuple((run.first, run.block, run.count) for run in segment.table.runs)
        logits = segment.logits if self._divides_head else 0
        return FollowerSegment(segment.tokens, segment.start, logits, runs)

    def measured(self) -> dict[str, int]:
        """Peak bytes of all ranks by device name."""
        found = memory.measured((str(self.device),))
        found["cpu"] += sum(self._ranks.figures(HOST_BYTES))
        if self.device.type == "cuda":
            found[str(self.device)] += NCCL_BYTES
            found |= {f"cuda:{rank}": size for rank, size in enumerate(self._ranks.figures(DEVICE_BYTES), start=1)}
        return found

    def on_lost(self, callback: Callable[[WorkerError], None]) -> None:
        """Call `callback` once, on some thread, if a rank is lost."""
        self._ranks.on_lost(callback)

    def end(self) -> None:
        """End all followers, and wait for them."""
        self._ranks.end()
        self._group.disconnect()


def start_followers(options: Serve, ctx_size: int, ranks: RankProcesses | None) -> tuple[RankSlice, ProcessGroup]:
    """Make all followers load. Return the leader's slice, and its process group, which is not connected yet."""
    if ranks is None:
        raise StartError(f"--tensor-parallel={options.tensor_parallel}: this process was started without its ranks")
    ranks.send((replace(options, ctx_size=ctx_size), os.environ.get("CUDA_VISIBLE_DEVICES")))
    return RankSlice(0, ranks.count), ProcessGroup(0, ranks.count, layer_split.device_of(options, 0))


def make_leader(
    loaded: loader.LoadedModel,
    config: Any,
    options: Serve,
    ctx_size: int,
    ranks: RankProcesses,
    group: ProcessGroup,
    progress: Callable[[Progress], None],
) -> tuple[LeaderRunner, BlockAllocator]:
    """The leader's runner, after all ranks have loaded and connected. Raises StartError or RankLost."""
    own = sum(parameter.nbytes for parameter in loaded.model.parameters())

    def report(done: int) -> None:
        progress(Progress(stage="weights", done=own + done, total=max(own * ranks.count, own + done)))

    ranks.until_ready(report)
    ranks.watch(group.abort)
    ranks.send("connect")
    group.connect(ranks.store)
    blocks = backends.make_blocks(options, ctx_size, caches=options.prefix_caching)
    kv_dtype = options.kv_cache_dtype
    pool = backends.make_pool(config, blocks, loaded.dtype, loaded.device, ranks=ranks.count, kv_dtype=kv_dtype)
    log.info("%d ranks, the followers processes %s", ranks.count, ", ".join(map(str, ranks.pids)))
    return LeaderRunner(loaded.model, pool, blocks, loaded.device, ranks, group), blocks


def follow(options: Serve, link: LeaderLink) -> None:
    """Load a slice, then compute the leader's steps until the leader is gone.

    `options`: as known at the start of the process; the leader sends the rest. Raises StartError and errors of a step.
    """
    torch.set_num_threads(options.threads)
    memory.keep_small()
    paged.register()
    message: tuple[Serve, str | None] = link.receive()
    options, visible = message
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    config = load_config(options)
    device = layer_split.device_of(options, link.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else pinned memory would open a context on the leader's device
    overhead.begin((), options.overhead)  # the leader accounts for it: NCCL's channels are counted apart
    memory.cap((str(device),), options.reserved)
    group = ProcessGroup(link.rank, link.count, device)
    share = RankSlice(link.rank, link.count), group
    implementation = backends.implementation(options, config)

    def report(progress: Progress) -> None:
        link.note(LOADED_BYTES, progress.done)

    loaded = loader.load_model(options, config, implementation, report, share=share)
    blocks = backends.make_blocks(options, options.ctx_size, caches=False)
    kv_dtype = options.kv_cache_dtype
    pool = backends.make_pool(config, blocks, loaded.dtype, device, ranks=link.count, kv_dtype=kv_dtype)
    runner = PagedRunner(loaded.model, pool, blocks, device)
    backends.make_adapters(runner, loaded.model, options, device, copies=0, share=share)
    runner.try_decode_kernel()
    _report_memory(link, device)
    link.ready()
    link.receive()
    group.connect(link.store)
    while True:
        _compute(runner, link.receive())
        _report_memory(link, device)


@torch.inference_mode()
def _compute(runner: PagedRunner, step: FollowerStep) -> None:
    runner.apply_updates(step.updates)
    runner.compute(step.segments, step.lora)


def _report_memory(link: LeaderLink, device: torch.device) -> None:
    own = memory.measured((str(device),))
    link.note(HOST_BYTES, own["cpu"])
    if device.type == "cuda":
        link.note(DEVICE_BYTES, own[str(device)] + NCCL_BYTES)
