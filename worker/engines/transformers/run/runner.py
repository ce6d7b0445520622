"""Runners: one forward of the model for all tokens of a step, from a batch to logits.

A runner holds tensors and makes no decisions. The scheduler decides about batches and rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from worker.engines.transformers.attention import paged_kernel
from worker.engines.transformers.attention.kv_pool import KvPool
from worker.engines.transformers.attention.paged import SDPA, AttentionLayout, PackedBatch
from worker.engines.transformers.device.memory import upload
from worker.engines.transformers.load.architectures import CacheShape
from worker.engines.transformers.load.layer_split import SplitKvPools
from worker.engines.transformers.load.lora import LoraAdapters, LoraStep
from worker.engines.transformers.schedule.kv_cache import BlockAllocator
from worker.engines.transformers.schedule.scheduler import Batch, ForwardPart, Segment


class Runner(Protocol):
    """A backend that computes steps. Its cache has one row for each sequence that may run at once."""

    @property
    def vocab_size(self) -> int: ...

    def run(self, batch: Batch, device_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Logits `[sum of segment.logits, vocab]` in float32, in the order of the segments.

        `device_tokens` `[segments]`, int64, on the device: the input tokens of a batch launched ahead, one for each
        segment. The host does not have them yet, and must not wait for the device. Running a batch or a part of it
        again gives the same result: keys and values are written at fixed positions.
        """

    def fork(self, source: int, target: int) -> None:
        """Give row `target` the contents of row `source`, for another choice of the same prompt.

        Called directly after the step that computed the last token of the prompt, before anything else runs.
        """

    def forget(self, row: int) -> None:
        """Discard the contents of `row`: its sequence has ended, was cancelled or preempted."""


class BlockUpdates(NamedTuple):
    """Changes to blocks before a step: blocks to erase, then (source, target) pairs to copy."""

    erased: Sequence[int]
    copied: Sequence[tuple[int, int]]


class PagedRunner:
    """Runs a causal language model with paged attention (`attention.paged`)."""

    def __init__(
        self,
        model: Any,
        pool: KvPool | SplitKvPools,
        blocks: BlockAllocator,
        device: torch.device,
        tail: torch.device | None = None,
    ):
        """`blocks`: the owner of each block of the pool; `tail`: the device of the head, if it is another."""
        self._model = model
        self._blocks = blocks
        self._cache, self.device = pool, device
        self.mirrors: list[KvPool] = []  # pools of a draft model, whose blocks are erased and copied along
        self._tail = tail or device
        self.adapters: LoraAdapters | None = None

    @property
    def vocab_size(self) -> int:
        size: int = self._model.config.get_text_config().vocab_size
        return size

    @property
    def pool(self) -> KvPool:
        """Keys and values of all layers. Only for a model on one device."""
        assert isinstance(self._cache, KvPool), "a split model has a pool on each device"
        return self._cache

    @property
    def has_decode_kernel(self) -> bool:
        """True if decodes attend with `paged_kernel`."""
        return self._model.config._attn_implementation == SDPA and paged_kernel.supports(self.pool)

    def try_decode_kernel(self) -> None:
        """Compile `paged_kernel` for this model, if it would be used. If that fails, decodes do without it."""
        if self._model.config._attn_implementation == SDPA:
            config = self._model.config
            group = config.num_attention_heads // CacheShape.of(config).kv_heads
            # The parts of a split model may lie on cards of several kinds, each with its own compilation.
            for pool in (self._cache,) if isinstance(self._cache, KvPool) else self._cache.pools:
                paged_kernel.try_out(pool, group * pool.kv_heads)  # a tensor-parallel rank has a part of the heads

    def bytes_on(self, device: torch.device) -> int:
        """Bytes of the cache on one device. It is allocated at load and does not grow."""
        return self._cache.bytes_on(device)

    def fork(self, source: int, target: int) -> None:
        """Do nothing: both rows share their blocks until one must be copied (`BlockTable.copy`)."""

    def forget(self, row: int) -> None:
        """Do nothing: attention reads a row only up to the length that its current sequence has written."""

    @torch.inference_mode()
    def run(self, batch: Batch, device_tokens: torch.Tensor | None = None) -> torch.Tensor:
        self.prepare_blocks(batch)
        return self.compute(batch, self.plan_adapters(batch), device_tokens)

    def plan_adapters(self, batch: Batch) -> LoraStep:
        """The adapter of each run of tokens, in the order of the flat batch. Raises UnusableAdapter."""
        if self.adapters is None:
            return LoraStep()
        return self.adapters.plan([(segment.sequence.adapter, segment.length) for segment in batch])

    def compute(
        self, batch: Sequence[Segment | ForwardPart], lora: LoraStep, device_tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The logits of `run`, after all preparations."""
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []  # positions in the flat batch whose logits are needed
        for segment in batch:
            if device_tokens is None:
                tokens.extend(segment.tokens)
            positions.extend(range(segment.start, segment.end))
            wanted.extend(range(len(positions) - segment.logits, len(positions)))
        if self.adapters is not None:
            self.adapters.apply(lora)
        return self.forward(
            upload(tokens, self.device) if device_tokens is None else device_tokens.to(self.device),
            upload(positions, self.device),
            upload(wanted, self._tail),
            PackedBatch.of(batch, self._cache) if isinstance(self._cache, KvPool) else self._cache.lay_out(batch),
        )

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, layout: AttentionLayout
    ) -> torch.Tensor:
        """Logits `[wanted, vocab]` in float32.

        `tokens`, `positions` `[tokens]`: all segments one after the other, without padding; `layout` tells attention
        where each begins.
        """
        out = self._model(
            # Batch size 1: sequences are separated by `layout`, not by rows.
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=wanted,  # the head is computed for these positions only
            packed=layout,
        )
        logits: torch.Tensor = out.logits[0]
        return logits.float()

    def prepare_blocks(self, batch: Batch) -> BlockUpdates:
        """Erase and copy blocks before a step, and return what was done. Later calls for the same batch do nothing."""
        tables = [segment.table for segment in batch if segment.table is not None]
        copied = [table.copy for table in tables if table.copy is not None]
        updates = BlockUpdates(self._blocks.take_corrupt(), copied)
        self.apply_updates(updates)
        if copied:
            for table in tables:
                table.copy = None
        return updates

    def apply_updates(self, updates: BlockUpdates) -> None:
        for pool in (self._cache, *self.mirrors):
            if updates.erased:
                pool.erase(updates.erased)
            if updates.copied:
                pool.copy(updates.copied)
