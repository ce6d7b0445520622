"""Batch to logits: one forward of the model for all tokens of a step.

Law: it holds tensors and decides nothing; what is in a batch, and in which row, the scheduler says.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from worker.engines.transformers.attention.kv_pool import Pool
from worker.engines.transformers.attention.paged import Layout, Packed
from worker.engines.transformers.device.memory import upload
from worker.engines.transformers.load.layer_split import Pools
from worker.engines.transformers.load.lora import Adapters
from worker.engines.transformers.schedule.kv_cache import Blocks
from worker.engines.transformers.schedule.scheduler import Batch


class Runner(Protocol):
    """What computes a step: a backend. Its cache has one row for each sequence that may run at once."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bytes(self) -> int:
        """Of the cache, allocated at load; nothing of it grows later."""

    def run(self, batch: Batch, fed: torch.Tensor | None = None) -> torch.Tensor:
        """Logits `[sum of segment.logits, vocab]` in float32, in the order of the segments.

        `fed` `[segments]`, int64, on the device: the tokens of a batch whose segments run ahead, each of one token that
        its sequence does not have yet; a device is not waited for, then. Running a batch again, or a part of it, gives
        the same: keys and values are written at fixed places.
        """

    def fork(self, source: int, target: int) -> None:
        """What row `source` holds is what row `target` holds from now on, for another choice of the same prompt.

        Called right behind the step that computed the last token of the prompt, before anything else runs.
        """

    def forget(self, row: int) -> None:
        """The sequence of `row` has ended, was cancelled or preempted: what the row holds is void."""


class Chores(NamedTuple):
    """Blocks to be seen to before a step: erased, and then copied, the first of each pair into the second."""

    erased: Sequence[int]
    copied: Sequence[tuple[int, int]]


class PackedRunner:
    """Runs a causal language model whose attention is ours (`attention.register`)."""

    def __init__(
        self, model: Any, pool: Pool | Pools, blocks: Blocks, device: torch.device, tail: torch.device | None = None
    ):
        """`blocks` say which of the pool belong to whom; `tail`: the device of the head, if it is another."""
        self._model = model
        self._blocks = blocks
        self._cache, self.device = pool, device
        self._tail = tail or device
        self.adapters: Adapters | None = None

    @property
    def vocab_size(self) -> int:
        size: int = self._model.config.get_text_config().vocab_size
        return size

    @property
    def pool(self) -> Pool:
        """Keys and values of all layers, of a model on one device."""
        assert isinstance(self._cache, Pool), "a split model has a pool on each device"
        return self._cache

    @property
    def bytes(self) -> int:
        return self._cache.bytes

    def bytes_on(self, device: torch.device) -> int:
        """Those of one device."""
        return self._cache.bytes_on(device)

    def fork(self, source: int, target: int) -> None:
        """Nothing to do: both have the same blocks, until one has to be copied (`Table.copy`)."""

    def forget(self, row: int) -> None:
        """Nothing to do: a token sees its own row only as far as this sequence has written it."""

    @torch.inference_mode()
    def run(self, batch: Batch, fed: torch.Tensor | None = None) -> torch.Tensor:
        self.tidy(batch)
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for segment in batch:
            if fed is None:
                tokens.extend(segment.sequence.tokens[segment.start : segment.end])
            positions.extend(range(segment.start, segment.end))
            wanted.extend(range(len(positions) - segment.logits, len(positions)))
        if self.adapters is not None:
            self.adapters.begin([(segment.sequence.adapter, segment.length) for segment in batch])
        return self.forward(
            self._to_device(tokens) if fed is None else fed.to(self.device),
            self._to_device(positions),
            upload(wanted, torch.int64, self._tail),
            Packed.of(batch, self._cache) if isinstance(self._cache, Pool) else self._cache.lay_out(batch),
        )

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, layout: Layout
    ) -> torch.Tensor:
        """Logits `[wanted, vocab]`, in float32, of the `tokens` that lie as `layout` says."""
        out = self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=wanted,
            packed=layout,
        )
        logits: torch.Tensor = out.logits[0]
        return logits.float()

    def tidy(self, batch: Batch) -> Chores:
        """What had to be done before anything is computed, and is now; done once, so a step can be repeated."""
        tables = [segment.table for segment in batch if segment.table is not None]
        copied = [table.copy for table in tables if table.copy is not None]
        chores = Chores(self._blocks.take_spoiled(), copied)
        self.carry_out(chores)
        if copied:
            for table in tables:
                table.copy = None
        return chores

    def carry_out(self, chores: Chores) -> None:
        if chores.erased:
            self._cache.erase(chores.erased)
        if chores.copied:
            self._cache.copy(chores.copied)

    def _to_device(self, values: list[int]) -> torch.Tensor:
        return upload(values, torch.int64, self.device)
