"""Tensor parallelism: all ranks compute the same step, each with its slice of the weights and its heads' keys.

Rank 0, the leader, has the sequences, the scheduler and the sampler. It sends each step as plain numbers: tokens,
blocks of each sequence, and blocks to erase and copy. Followers have block numbers only, and their pools have the
same blocks. Where there are no blocks, followers repeat the calls of the leader's runner. Partial sums and logits are
combined inside the forward (`tensor_parallel_plan`).

A rank that fails in a step is out of step for good, since the others wait for its sums. So a failing rank ends the
worker, and nothing is repeated.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from worker.engines.transformers.attention import paged
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
from worker.engines.transformers.load import architectures, layer_split, loader, tensor_parallel_plan
from worker.engines.transformers.load.lora import LoraAdapters, LoraStep
from worker.engines.transformers.load.snapshot import load_config
from worker.engines.transformers.load.tensor_parallel_plan import RankSlice
from worker.engines.transformers.run import backends
from worker.engines.transformers.run.aligned import AlignedRunner
from worker.engines.transformers.run.cache_probe import UnsupportedCache
from worker.engines.transformers.run.runner import PagedRunner
from worker.engines.transformers.schedule import sequence as schedule
from worker.engines.transformers.schedule.kv_cache import BlockTable, RowAllocator
from worker.engines.transformers.schedule.scheduler import Batch, ForwardPart, Segment
from worker.errors import RankLost, StartError
from worker.protocol.argv import Serve
from worker.protocol.events import Progress
from worker.protocol.memory import NCCL_BYTES

log = logging.getLogger(__name__)


class FollowerRow(NamedTuple):
    """A segment of a model without blocks. Its runner is the leader's, so it needs what a scheduler's segment has."""

    row: int
    start: int
    length: int
    drafted: tuple[int, ...]
    prompt_tokens: int
    prompt_logprobs: bool
    adapter: tuple[int, float] | None  # its slot and scale
    begin: int  # position of the first of `tokens` in the sequence; no earlier token is needed
    tokens: Sequence[int]

    def segment(self, adapters: LoraAdapters | None) -> Segment:
        """The same as the scheduler's."""
        sequence = schedule.Sequence(
            id=self.row,
            prompt_tokens=self.prompt_tokens,
            tokens=[*([0] * self.begin), *self.tokens],
            limit=0,
            ends=frozenset(),
            prompt_logprobs=self.prompt_logprobs,
            adapter=adapters.in_slot(*self.adapter) if adapters is not None and self.adapter is not None else None,
        )
        return Segment(sequence, self.row, self.start, self.length, drafted=self.drafted)


class FollowerCall(NamedTuple):
    """A call of a method of the follower's runner."""

    method: Literal["apply_updates", "compute", "run", "fork", "forget"]
    arguments: tuple[Any, ...] = ()
    batch: Sequence[FollowerRow] = ()  # of `run`
    lora: LoraStep = LoraStep()  # of `run`: the adapters to load before


class Leader:
    """The connection of rank 0 to all followers."""

    def __init__(self, ranks: RankProcesses, group: ProcessGroup, device: torch.device):
        self._ranks, self._group, self._device = ranks, group, device
        self.count, self.send, self.on_lost = ranks.count, ranks.send, ranks.on_lost

    @contextmanager
    def step(self, *, loads: bool = False) -> Iterator[None]:
        """Compute the block together with all followers. The device has finished at its end: logits are worthless if a
        rank is lost meanwhile.

        Raises RankLost, or the StartError of a follower that names the exit code of the process. With `loads`, errors
        of a load are raised as they are.
        """
        try:
            yield
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        except Exception as error:
            if loads and (isinstance(error, UnsupportedCache) or cuda_errors.is_exhausted(error)):
                raise
            if cuda_errors.is_exhausted(error):
                raise RankLost(f"rank 0 of {self.count}: {cuda_errors.one_line(error)}") from error
            raise self._ranks.why() from error
        if self._ranks.lost is not None:
            raise self._ranks.lost

    def measured(self) -> dict[str, int]:
        """Peak bytes of all ranks by device name."""
        found = memory.measured((str(self._device),))
        found["cpu"] += sum(self._ranks.figures(HOST_BYTES))
        if self._device.type == "cuda":
            found[str(self._device)] += NCCL_BYTES
            found |= {f"cuda:{rank}": size for rank, size in enumerate(self._ranks.figures(DEVICE_BYTES), start=1)}
        return found

    def end(self) -> None:
        """End all followers, and wait for them."""
        self._ranks.end()
        self._group.disconnect()


class PagedLeader(PagedRunner):
    """Computes each step together with all followers."""

    def __init__(self, leader: Leader, model: Any, *rest: Any):
        super().__init__(model, *rest)
        self.leader = leader
        # Ranks that hold a slice of the head must compute its logits with the leader.
        self._divides_head = tensor_parallel_plan.divides_head(model, leader.count)

    @torch.inference_mode()
    def run(self, batch: Batch, device_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """See `Runner.run` and `Leader.step`. Raises UnusableAdapter before any rank has begun the step."""
        assert device_tokens is None, "steps of a tensor-parallel model are not launched ahead"
        lora = self.plan_adapters(batch)
        updates = self.prepare_blocks(batch)
        if any(updates):
            self.leader.send(FollowerCall("apply_updates", (updates,)))
        self.leader.send(FollowerCall("compute", ([self._for_followers(part) for part in batch], lora)))
        with self.leader.step():
            return self.compute(batch, lora)

    def _for_followers(self, segment: Segment) -> ForwardPart:
        assert segment.table is not None, "this cache has blocks"
        logits = segment.logits if self._divides_head else 0
        # Of a table, followers read the runs only.
        return ForwardPart(segment.tokens, segment.start, logits, BlockTable(runs=segment.table.runs))


class AlignedLeader(AlignedRunner):
    """Computes each step together with all followers. They have the same runner, and all its decisions follow from its
    calls, so each rank arranges its rows alike."""

    def __init__(self, leader: Leader, *rest: Any, **named: Any):
        self.leader = leader
        self._sends = True
        with leader.step(loads=True):
            super().__init__(*rest, **named)

    def run(self, batch: Batch, device_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """See `Runner.run` and `Leader.step`. Raises UnusableAdapter before any rank has begun the step."""
        assert device_tokens is None, "steps of a tensor-parallel model are not launched ahead"
        lora = LoraStep()
        if self.adapters is not None:  # all of the step are loaded first, so no forward of it loads any
            lora = self.adapters.plan([(segment.sequence.adapter, segment.length) for segment in batch])
        self._send(FollowerCall("run", (), [self._for_followers(segment) for segment in batch], lora))
        with self.leader.step():
            if self.adapters is not None:
                self.adapters.apply(lora)
            return super().run(batch)

    def fork(self, source: int, target: int) -> None:
        """See `Runner.fork`."""
        self._send(FollowerCall("fork", (source, target)))
        super().fork(source, target)

    def forget(self, row: int) -> None:
        """See `Runner.forget`."""
        with suppress(RankLost, StartError):  # answers also end where a rank is lost
            self._send(FollowerCall("forget", (row,)))
        super().forget(row)

    def run_self_check(self, check: Callable[[AlignedRunner], None], *, tokens: int) -> None:
        """See `AlignedRunner.run_self_check`. Each rank checks for itself: all have the same logits."""
        self._sends = False
        with self.leader.step(loads=True):
            super().run_self_check(check, tokens=tokens)
        self._sends = True

    def _send(self, call: FollowerCall) -> None:
        if self._sends:
            self.leader.send(call)

    def _for_followers(self, segment: Segment) -> FollowerRow:
        sequence, adapter = segment.sequence, None
        if self.adapters is not None and sequence.adapter is not None:
            adapter = self.adapters.slots.slot(sequence.adapter.adapter), sequence.adapter.scale
        # A model that continues a state with one token at a time computes a lost state from the first token on.
        begin = segment.start if self.continues_states or not self.has_states else 0
        return FollowerRow(
            segment.row,
            segment.start,
            segment.length,
            segment.drafted,
            sequence.prompt_tokens,
            sequence.prompt_logprobs,
            adapter,
            begin,
            sequence.tokens[begin:],
        )


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
) -> tuple[PagedRunner | AlignedRunner, RowAllocator]:
    """The leader's runner, after all ranks have loaded and connected. Raises StartError or RankLost."""
    own = sum(parameter.nbytes for parameter in loaded.model.parameters())

    def report(done: int) -> None:
        progress(Progress(stage="weights", done=own + done, total=max(own * ranks.count, own + done)))

    ranks.until_ready(report)
    ranks.watch(group.abort)
    ranks.send("connect")
    group.connect(ranks.store)
    log.info("%d ranks, the followers processes %s", ranks.count, ", ".join(map(str, ranks.pids)))
    leader = Leader(ranks, group, loaded.device)
    return backends.make_runner(
        loaded.model,
        config,
        options,
        ctx_size,
        loaded.device,
        caches=options.prefix_caching,
        ranks=ranks.count,
        paged_runner=partial(PagedLeader, leader),
        aligned_runner=partial(AlignedLeader, leader),
    )


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
    make = partial(
        backends.make_runner,
        loaded.model,
        config,
        options,
        options.ctx_size,
        device,
        caches=False,
        ranks=link.count,
    )
    runner = None
    if architectures.backend(config) == "paged":
        runner, _ = make()
        assert isinstance(runner, PagedRunner)
        backends.make_adapters(runner, loaded.model, options, device, copies=0, share=share)
        runner.try_decode_kernel()
    _report_memory(link, device)
    link.ready()
    link.receive()
    group.connect(link.store)
    if runner is None:  # it looks at the model's cache with a forward, in which all ranks take part
        runner, _ = make()
        backends.check_cache(runner, config, options.ctx_size)
        backends.make_adapters(runner, loaded.model, options, device, copies=0, share=share)
        _report_memory(link, device)
    while True:
        _compute(runner, link.receive())
        _report_memory(link, device)


@torch.inference_mode()
def _compute(runner: PagedRunner | AlignedRunner, call: FollowerCall) -> None:
    if call.method == "run":
        if runner.adapters is not None:
            runner.adapters.apply(call.lora)
        runner.run(tuple(row.segment(runner.adapters) for row in call.batch))
    else:
        getattr(runner, call.method)(*call.arguments)


def _report_memory(link: LeaderLink, device: torch.device) -> None:
    own = memory.measured((str(device),))
    link.note(HOST_BYTES, own["cpu"])
    if device.type == "cuda":
        link.note(DEVICE_BYTES, own[str(device)] + NCCL_BYTES)
