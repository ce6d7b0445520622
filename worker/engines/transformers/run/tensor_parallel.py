"""A divided model at work: the leader has all ranks compute the same step, each with its slices and its heads' keys.

What a step is, the host's numbers say: tokens, where each sequence's lie in the pool, what to erase and copy before.
The leader tells them and computes its own part; sums and logits come together on the way (`slices`). Only the leader
has sequences, a scheduler and a sampler; a follower knows blocks by number, and its pool has the same ones.

Law: whoever has failed in a step is out of step for good, as others wait for its sums. So a rank that fails ends the
worker, and nothing is tried again.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from worker.engines.transformers.attention import paged
from worker.engines.transformers.attention.kv_pool import Pool
from worker.engines.transformers.attention.paged import Packed
from worker.engines.transformers.device import memory
from worker.engines.transformers.device.memory import upload
from worker.engines.transformers.device.process_group import Peers
from worker.engines.transformers.device.process_overhead import overhead
from worker.engines.transformers.device.rank_processes import DEVICE_BYTES, HOST_BYTES, LOADED_BYTES, Link, Ranks
from worker.engines.transformers.load import loader, placement, tensor_parallel_plan
from worker.engines.transformers.load.tensor_parallel_plan import Slice
from worker.engines.transformers.run import backends
from worker.engines.transformers.run.runner import Chores, PackedRunner
from worker.engines.transformers.schedule.kv_cache import Blocks, Run, Table
from worker.engines.transformers.schedule.scheduler import Batch
from worker.errors import RankLost, StartError, WorkerError
from worker.protocol.argv import Serve
from worker.protocol.events import Progress
from worker.protocol.memory import NCCL_BYTES

log = logging.getLogger(__name__)


class Stretch(NamedTuple):
    """Tokens of one sequence: see `attention.Piece`."""

    start: int
    length: int
    logits: int
    """At how many of its last positions logits are wanted."""
    runs: tuple[tuple[int, int, int], ...]
    """Of its blocks, as `kv_cache.Run` has them."""

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def table(self) -> Table:
        return Table(runs=[Run(*each) for each in self.runs])


class Step(NamedTuple):
    """What a follower computes."""

    chores: Chores
    tokens: Sequence[int]
    stretches: Sequence[Stretch]

    @classmethod
    def of(cls, batch: Batch, chores: Chores) -> "Step":
        tokens: list[int] = []
        stretches = []
        for segment in batch:
            assert segment.table is not None, "this cache has blocks"
            tokens.extend(segment.sequence.tokens[segment.start : segment.end])
            runs = tuple((run.first, run.block, run.count) for run in segment.table.runs)
            stretches.append(Stretch(segment.start, segment.length, segment.logits, runs))
        return cls(chores, tokens, stretches)


class Leader(PackedRunner):
    """Computes a step together with all followers."""

    def __init__(self, model: Any, pool: Pool, blocks: Blocks, device: torch.device, ranks: Ranks, peers: Peers):
        super().__init__(model, pool, blocks, device)
        self._ranks, self._peers = ranks, peers

    @torch.inference_mode()
    def run(self, batch: Batch, fed: torch.Tensor | None = None) -> torch.Tensor:
        """As `Runner.run`; returns once the device is through, as what it gives is worth nothing if a rank is lost
        meanwhile. Raises RankLost, or StartError for a follower that said with which exit code the process is to end.
        """
        assert fed is None, "steps of a divided model are not launched ahead"
        self._ranks.tell(Step.of(batch, self.tidy(batch)))
        try:
            logits = super().run(batch)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        except Exception as error:
            if memory.is_exhausted(error):
                raise RankLost(f"rank 0 of {self._ranks.count}: {memory.one_line(error)}") from error
            raise self._ranks.why() from error
        if self._ranks.lost is not None:
            raise self._ranks.lost
        return logits

    def measured(self) -> dict[str, int]:
        """Peak bytes by device name, of all ranks."""
        found = memory.measured((str(self.device),))
        found["cpu"] += sum(self._ranks.figures(HOST_BYTES))
        if self.device.type == "cuda":
            found[str(self.device)] += NCCL_BYTES
            found |= {f"cuda:{rank}": size for rank, size in enumerate(self._ranks.figures(DEVICE_BYTES), start=1)}
        return found

    def on_lost(self, tell: Callable[[WorkerError], None]) -> None:
        """`tell` will be called once, by some thread, if a rank is lost."""
        self._ranks.on_lost(tell)

    def end(self) -> None:
        """Returns once there are no followers any more."""
        self._ranks.end()
        self._peers.part()


def begin(options: Serve, ctx_size: int, ranks: Ranks | None) -> tuple[Slice, Peers]:
    """Have all followers load: the leader's own slice, and its way to the others, whom it has not met yet."""
    if ranks is None:
        raise StartError(f"--tensor-parallel={options.tensor_parallel}: the ranks were not started with this process")
    ranks.tell((replace(options, ctx_size=ctx_size), os.environ.get("CUDA_VISIBLE_DEVICES")))
    return Slice(0, ranks.count), Peers(0, ranks.count, placement.device_of(options, 0))


def lead(
    loaded: loader.Loaded,
    config: Any,
    options: Serve,
    ctx_size: int,
    ranks: Ranks,
    peers: Peers,
    progress: Callable[[Progress], None],
) -> tuple[Leader, Blocks]:
    """The leader's runner, once all have loaded and met. Raises StartError, or RankLost."""
    own = sum(each.nbytes for each in loaded.model.parameters())

    def told(done: int) -> None:
        progress(Progress(stage="weights", done=own + done, total=max(own * ranks.count, own + done)))

    ranks.until_ready(told)
    ranks.watch(peers.abort)
    ranks.tell("meet")
    peers.meet(ranks.store)
    blocks = backends.make_blocks(options, ctx_size, caches=options.prefix_caching)
    kept_as = options.kv_cache_dtype
    pool = backends.make_pool(config, blocks, loaded.dtype, loaded.device, ranks=ranks.count, kept_as=kept_as)
    log.info("%d ranks, the followers processes %s", ranks.count, ", ".join(map(str, ranks.pids)))
    return Leader(loaded.model, pool, blocks, loaded.device, ranks, peers), blocks


def follow(options: Serve, link: Link) -> None:
    """Load a slice, and compute with it what the leader says, until that one is gone. `options`: as far as they are
    known at birth. Raises StartError, and what a step raises."""
    torch.set_num_threads(options.threads)
    memory.keep_small()
    paged.register()
    told: tuple[Serve, str | None] = link.hear()
    options, visible = told
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    config = loader.load_config(options)
    device = placement.device_of(options, link.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # what names no device, as pinned memory, would take a context on the leader's
    overhead.begin((), options.overhead)  # it is told, and does not measure: NCCL's channels are counted apart
    memory.cap((str(device),), options.reserved)
    share = Slice(link.rank, link.count), Peers(link.rank, link.count, device)
    implementation = backends.implementation(options.attention, config)

    def report(progress: Progress) -> None:
        link.note(LOADED_BYTES, progress.done)

    loaded = loader.load_model(options, config, implementation, report, share=share)
    blocks = backends.make_blocks(options, options.ctx_size, caches=False)
    kept_as = options.kv_cache_dtype
    pool = backends.make_pool(config, blocks, loaded.dtype, device, ranks=link.count, kept_as=kept_as)
    runner = PackedRunner(loaded.model, pool, blocks, device)
    helps = tensor_parallel_plan.is_divided(loaded.model, link.count)
    _note(link, device)
    link.ready()
    link.hear()
    share[1].meet(link.store)
    while True:
        _compute(runner, link.hear(), helps=helps)
        _note(link, device)


@torch.inference_mode()
def _compute(runner: PackedRunner, step: Step, *, helps: bool) -> None:
    """A follower's part of a step; with logits only where it `helps` with them."""
    runner.carry_out(step.chores)
    positions: list[int] = []
    wanted: list[int] = []
    for stretch in step.stretches:
        positions.extend(range(stretch.start, stretch.end))
        wanted.extend(range(len(positions) - stretch.logits, len(positions)))
    tokens, places, logits = (
        upload(each, torch.int64, runner.device) for each in (step.tokens, positions, wanted if helps else ())
    )
    runner.forward(tokens, places, logits, Packed.of(step.stretches, runner.pool))


def _note(link: Link, device: torch.device) -> None:
    own = memory.measured((str(device),))
    link.note(HOST_BYTES, own["cpu"])
    if device.type == "cuda":
        link.note(DEVICE_BYTES, own[str(device)] + NCCL_BYTES)
