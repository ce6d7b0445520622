"""The aligned backend: any model that transformers runs through its `Cache`, by its own forward and its own attention.

All rows that decode are one forward `[rows, 1]`; they end at one common time, and the attention mask says where each
begins, as if they were padded on the left (`alignment`). A prompt is computed alone, in chunks, and joins at the next
step. No padding ever goes through a layer, so that experts, convolutions and states see tokens only.

With an encoder, the prompt is what the encoder reads, as a whole, once its last token is due; a row's columns are then
those of the answer, which begins with a token of the model's own.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from worker.engines.transformers.device.memory import upload
from worker.engines.transformers.load.lora import Adapters
from worker.engines.transformers.run.aligned_cache import AlignedCache
from worker.engines.transformers.run.cache_probe import read_off
from worker.engines.transformers.run.forward import Forward, Seen, first_token
from worker.engines.transformers.run.vision import Tower
from worker.engines.transformers.schedule.aligned_layout import Alignment
from worker.engines.transformers.schedule.scheduler import Batch, Segment
from worker.interface import PromptImages


@dataclass(frozen=True, slots=True)
class _Part:
    """A segment in the decoder's own count: `tokens` behind `start` columns of its row."""

    segment: Segment
    start: int
    tokens: list[int]

    @property
    def row(self) -> int:
        return self.segment.row

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def wanted(self) -> int:
        return min(self.segment.logits, len(self.tokens))

    @property
    def encodes(self) -> bool:
        """The encoder has not read the prompt yet."""
        return self.start == 0


class AlignedRunner:
    """Runs a model of transformers by its own forward. Raises Unsupported for one whose cache is not transformers'."""

    def __init__(
        self,
        model: Any,
        *,
        rows: int,
        ctx_size: int,
        chunk: int,
        device: torch.device,
        tower: Tower | None = None,
        homes: Sequence[torch.device] | None = None,
        kept_as: str = "auto",
    ):
        """`chunk`: prompt tokens of one step at most; `tower`: of a model that takes images; `homes`: the device of
        each layer, if that is not `device` for all; `kept_as`: the type of keys and values (`cache_types`)."""
        self._model, self._device, self._homes = model, device, homes
        self._kept_as = kept_as
        self._forward = Forward(model, device)
        self._chunk = chunk
        self.rows = rows
        self.dtype: torch.dtype = model.dtype
        self._first = first_token(model) if self._forward.crosses else 0
        self._alignment = Alignment(rows, ctx_size)
        self._tower = tower
        self.adapters: Adapters | None = None
        self._seeing: dict[int, PromptImages] = {}
        """By row: the images of a prompt that is being computed."""
        self._lengths: dict[int, int] = {}
        """By row: columns that hold something, or will after this step."""
        shapes = read_off(model.config, self._probe)
        self._forward.masks_past = any(shape.keys is not None for shape in shapes)
        self._cache = AlignedCache(
            shapes, slots=rows, width=ctx_size, devices=homes or [device] * len(shapes), kept_as=kept_as
        )
        self.continues = True
        """Whether states can be carried on by several tokens at once; `trial` finds out. Where the model's code cannot
        (it begins anew, as Mamba's does), a prompt's first chunk is computed as a whole and every token behind it by
        itself."""

    @property
    def vocab_size(self) -> int:
        size: int = self._forward.config.get_text_config(decoder=True).vocab_size
        return size

    @property
    def hidden(self) -> int:
        """Width of the features that stand for images, as of all embeddings."""
        size: int = self._forward.config.get_text_config(decoder=True).hidden_size
        return size

    @property
    def bytes(self) -> int:
        return self._cache.bytes

    def bytes_on(self, device: torch.device) -> int:
        """Those of one device."""
        return self._cache.bytes_on(device)

    @property
    def mixes(self) -> bool:
        """Whether rows of different lengths may be in one forward."""
        return self._forward.mixes

    @mixes.setter
    def mixes(self, mixes: bool) -> None:
        self._forward.mixes = mixes

    @property
    def crosses(self) -> bool:
        """Whether an encoder reads the prompt."""
        return self._forward.crosses

    @property
    def has_states(self) -> bool:
        return self._cache.has_states

    def tried_by(self, trial: Callable[["AlignedRunner"], None], *, tokens: int) -> None:
        """Be used as `trial`, of up to two rows of so many `tokens`, finds that the model has to be. It compares
        numbers, so it is given a cache that keeps them as they are."""
        if self._kept_as == "auto":
            return trial(self)
        exact = AlignedRunner(
            self._model,
            rows=min(self.rows, 2),
            ctx_size=tokens,
            chunk=min(self._chunk, tokens),
            device=self._device,
            homes=self._homes,
        )
        trial(exact)
        self.continues, self.mixes = exact.continues, exact.mixes

    @torch.inference_mode()
    def run(self, batch: Batch, fed: torch.Tensor | None = None) -> torch.Tensor:
        """See `runner.Runner`. Raises LookupError if `fed` is to go on with states that are not here any more."""
        found: dict[int, torch.Tensor] = {}  # logits by place in the batch
        together: dict[int, _Part] = {}
        for index, segment in enumerate(batch):
            part = self._part(segment)
            if part is None:
                continue
            self._admit(part)
            if self._decodes(part):
                together[index] = part
            elif fed is not None:
                raise LookupError(f"the states behind {part.start} tokens are gone")
            else:
                found[index] = self._alone(part)
        for group in self._groups(together):
            found |= self._decode(group, fed)
        wanted = [found[index] for index in sorted(found) if len(found[index])]
        if not wanted:
            return torch.empty(0, self.vocab_size, dtype=torch.float32)
        return torch.cat(wanted).float() if len(wanted) > 1 else wanted[0].float()

    def fork(self, source: int, target: int) -> None:
        """See `runner.Runner`."""
        move = self._alignment.fork(source, target, self._lengths[source])
        self._cache.carry_out([move])
        self._lengths[target] = self._lengths[source]

    def forget(self, row: int) -> None:
        """See `runner.Runner`. Its columns are erased: no mask hides what is no number from another row there."""
        if self._alignment.has(row):
            self._cache.erase(self._alignment.slot(row), self._alignment.begin(row), self._lengths.get(row, 0))
        self._alignment.forget(row)
        self._lengths.pop(row, None)
        prompt_images = self._seeing.pop(row, None)
        if prompt_images is not None and self._tower is not None:
            self._tower.forget(prompt_images)

    @torch.inference_mode()
    def plainly(self, tokens: Sequence[int], prompt_tokens: int) -> torch.Tensor:
        """Logits `[len(tokens) - prompt_tokens + 1, vocab]` from the prompt's last token on, computed in one forward of
        the model without any cache: what `run` has to agree with."""
        encoded = None
        if self._forward.crosses:
            encoded = self._forward.encode(tokens[:prompt_tokens])
            tokens = [self._first, *tokens[prompt_tokens:]]
            prompt_tokens = 1
        kept = len(tokens) - prompt_tokens + 1
        return self._forward([tokens], [0], None, kept=kept, past=0, encoded=encoded)[0].float()

    # Parts

    def _part(self, segment: Segment) -> _Part | None:
        """What of `segment` the decoder computes; None: nothing yet, as the encoder will read the prompt as a whole."""
        tokens = segment.sequence.tokens
        if segment.ahead:  # the token is fed
            before = segment.sequence.prompt_tokens - 1 if self._forward.crosses else 0
            return _Part(segment, segment.start - before, [0])
        if not self._forward.crosses:
            return _Part(segment, segment.start, tokens[segment.start : segment.end])
        before = segment.sequence.prompt_tokens - 1  # the prompt's last token stands for the answer's first
        if segment.end <= before:
            return None
        start = max(segment.start - before, 0)
        answer = [self._first, *tokens[before + 1 : segment.end]]
        return _Part(segment, start, answer[start:])

    def _admit(self, part: _Part) -> None:
        """Give its row a slot if it has none; a row that begins anew forgets what it was."""
        row, is_new = part.row, not self._alignment.has(part.row)
        self._lengths[row] = part.end
        self._cache.carry_out(self._alignment.alone(row, part.start, len(part.tokens) if is_new else 0))
        if not is_new and part.start:
            return
        slot = self._alignment.slot(row)
        self._cache.clear(slot)
        if part.start:  # nobody computed it: a step that only takes time
            self._cache.pretend(slot, part.start)
            self._cache.has_crossed(slot, part.segment.sequence.prompt_tokens)

    def _decodes(self, part: _Part) -> bool:
        is_next = part.start > 0 and len(part.tokens) == 1 and part.segment.completes
        if is_next and self._cache.has_states:
            return self._cache.knows(self._alignment.slot(part.row), part.start)
        return is_next

    def _groups(self, parts: dict[int, _Part]) -> list[dict[int, _Part]]:
        """Those that may be one forward."""
        if self._forward.mixes:
            return [parts] if parts else []
        groups: dict[int, dict[int, _Part]] = {}
        for index, part in parts.items():
            groups.setdefault(part.start, {})[index] = part
        return list(groups.values())

    # Forwards

    def _decode(self, parts: dict[int, _Part], fed: torch.Tensor | None) -> dict[int, torch.Tensor]:
        """One token of each, in one forward; `fed` by place in the batch."""
        plan = self._alignment.together([(part.row, part.start) for part in parts.values()])
        self._cache.carry_out(plan.moves)
        by_row = {part.row: (index, part) for index, part in parts.items()}
        order = [by_row[row] for row in plan.rows]
        starts = [part.start for _, part in order]
        crossed = [self._cache.crossed(slot) for slot in range(plan.slots.start, plan.slots.stop)]
        self._cache.prepare(plan.slots, starts)
        self._adapt([part for _, part in order])
        logits = self._forward(
            [part.tokens for _, part in order],
            starts,
            self._cache.show(plan.slots, plan.low, plan.time, has_past=True, crossed=max(crossed)),
            kept=1,
            past=plan.time - plan.low,
            crossed=crossed,
            fed=fed[upload([index for index, _ in order], torch.int64, fed.device)] if fed is not None else None,
        )
        self._done(plan.slots, [part for _, part in order])
        return {index: logits[place, : part.wanted] for place, (index, part) in enumerate(order)}

    def _alone(self, part: _Part) -> torch.Tensor:
        """Some tokens of one row; logits `[wanted, vocab]`."""
        slot = self._alignment.slot(part.row)
        whole = part.tokens
        if not self.continues and self._cache.has_states:
            known = part.start > 0 and self._cache.knows(slot, part.start)
            first = min(len(part.segment.sequence.tokens), self._chunk)
            if part.segment.sequence.prompt_logprobs and part.start == 0:
                first = part.end
            if not known and part.end < first:
                return torch.empty(0, 0)  # all of the first chunk at once, when its end comes
            if known:
                return self._pieces(part, [[token] for token in part.tokens])
            tokens = part.segment.sequence.tokens[: part.end]
            part = _Part(part.segment, 0, tokens)
            return self._pieces(part, [tokens[:first], *([token] for token in tokens[first:])])
        return self._pieces(part, [whole])

    def _pieces(self, part: _Part, pieces: Iterable[list[int]]) -> torch.Tensor:
        """`part`, computed in as many forwards as there are `pieces` of its tokens; logits `[wanted, vocab]`."""
        self._cache.carry_out(self._alignment.alone(part.row, part.start, len(part.tokens)))
        slot, begin = self._alignment.slot(part.row), self._alignment.begin(part.row)
        slots = slice(slot, slot + 1)
        self._adapt([part])
        encoded = self._encode(part) if self._forward.crosses and part.encodes else None
        crossed = [] if encoded is not None or not self._forward.crosses else [self._cache.crossed(slot)]
        self._cache.prepare(slots, [part.start])
        found: list[torch.Tensor] = []
        start = part.start
        for piece in pieces:
            end = start + len(piece)
            kept = max(1, end - max(start, part.end - part.wanted))
            time = begin + start
            view = self._cache.show(slots, begin, time, has_past=start > 0, crossed=max(crossed, default=0))
            logits = self._forward(
                [piece],
                [start],
                view,
                kept=kept,
                past=start,
                encoded=encoded,
                crossed=crossed,
                seen=self._see(part, piece, start),
            )
            if end > part.end - part.wanted:
                found.append(logits[0])
            start = end
        if encoded is not None:
            self._cache.has_crossed(slot, encoded.shape[1])
        self._done(slots, [part])
        return torch.cat(found) if len(found) > 1 else found[0] if found else torch.empty(0, 0)

    def _adapt(self, parts: Sequence[_Part]) -> None:
        """The next forwards are of these rows; one alone may be computed in pieces, and read by the encoder."""
        if self.adapters is not None:
            self.adapters.begin([(part.segment.sequence.adapter, len(part.tokens)) for part in parts])

    def _encode(self, part: _Part) -> torch.Tensor:
        sequence = part.segment.sequence
        return self._forward.encode(sequence.tokens[: sequence.prompt_tokens])

    def _see(self, part: _Part, piece: list[int], start: int) -> Seen | None:
        """What the forward is given in place of tokens, where some of them stand for images."""
        prompt_images = part.segment.sequence.prompt_images
        if prompt_images is None or start >= part.segment.sequence.prompt_tokens:
            return None
        assert self._tower is not None, "nobody else makes prompts with images"
        self._seeing[part.row] = prompt_images
        return self._tower.see(piece, start, prompt_images)

    def _done(self, slots: slice, parts: Sequence[_Part]) -> None:
        self._cache.done(slots, [part.end for part in parts])

    def _probe(self, cache: Cache) -> None:
        """Two tokens of one row."""
        with torch.inference_mode():
            if self._forward.crosses:
                self._forward([[self._first, 0]], [0], cache, kept=1, past=0, encoded=self._forward.encode([0, 0]))
            else:
                self._forward([[0, 0]], [0], cache, kept=1, past=0)
