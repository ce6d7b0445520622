"""The aligned runner: any model that transformers runs through its `Cache`, by the model's own forward and attention.

All rows that decode share one forward `[rows, 1]`. They end at one common column, and the attention mask shows where
each begins, as with left padding (`aligned_layout`). Rows with drafts of equal length share a forward
`[rows, 1 + draft]`. The next step overwrites the columns of rejected tokens. States cannot be taken back, so nothing is
drafted where there are any. A prompt is computed alone, in chunks, and joins at the next step. No padding goes through
a layer, because experts, convolutions and states would take it for tokens.

An encoder reads the whole prompt at once, when the prompt's last token is due. The columns of a row are then those of
the answer, which begins with the model's start token.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from worker.engines.transformers.device.memory import upload
from worker.engines.transformers.load.lora import LoraAdapters
from worker.engines.transformers.run.aligned_cache import AlignedCache
from worker.engines.transformers.run.cache_probe import read_layer_shapes
from worker.engines.transformers.run.forward import Forward, PromptEmbeddings, first_token
from worker.engines.transformers.run.vision import VisionTower
from worker.engines.transformers.schedule.aligned_layout import AlignedLayout
from worker.engines.transformers.schedule.scheduler import Batch, Segment
from worker.interface import PromptImages


@dataclass(frozen=True, slots=True)
class _DecoderPart:
    """A segment in columns of the decoder: `tokens` follow the first `start` columns of its row. With an encoder,
    columns differ from positions in the sequence."""

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


class AlignedRunner:
    """Runs a model by its own forward. Raises UnsupportedCache for one that does not use transformers' cache."""

    def __init__(
        self,
        model: Any,
        *,
        rows: int,
        ctx_size: int,
        chunk: int,
        device: torch.device,
        tower: VisionTower | None = None,
        layer_devices: Sequence[torch.device] | None = None,
        kv_dtype: str = "auto",
    ):
        """Allocate the cache.

        chunk: the most prompt tokens of one step.
        tower: the vision tower of a model that takes images.
        layer_devices: the device of each layer; None: `device` for all.
        kv_dtype: the type of keys and values, as the option `kv_cache_dtype`.
        """
        self._model, self._device, self._layer_devices = model, device, layer_devices
        self._kv_dtype = kv_dtype
        self._forward = Forward(model, device)
        self._chunk = chunk
        self.rows = rows
        self.dtype: torch.dtype = model.dtype
        self._first = first_token(model) if self._forward.is_encoder_decoder else 0
        self._alignment = AlignedLayout(rows, ctx_size)
        self._tower = tower
        self.adapters: LoraAdapters | None = None
        self._images_by_row: dict[int, PromptImages] = {}  # images of prompts that are being computed
        self._lengths: dict[int, int] = {}  # by row: columns in use after this step
        shapes = read_layer_shapes(model, self._probe)
        self._forward.masks_past = any(shape.keys is not None for shape in shapes)
        self._cache = AlignedCache(
            shapes, buffer_rows=rows, width=ctx_size, devices=layer_devices or [device] * len(shapes), kv_dtype=kv_dtype
        )
        self.mixes_lengths = self._forward.mixes_lengths  # until the self-check finds that it does not
        # True if the model can continue a state with several tokens at once. The self-check finds out. Code that cannot
        # (Mamba's begins anew) gets the first chunk of a prompt as a whole, and each token after it alone.
        self.continues_states = True

    @property
    def vocab_size(self) -> int:
        size: int = self._forward.config.get_text_config(decoder=True).vocab_size
        return size

    @property
    def hidden(self) -> int:
        """Width of embeddings, and so of the features of images."""
        size: int = self._forward.config.get_text_config(decoder=True).hidden_size
        return size

    def bytes_on(self, device: torch.device) -> int:
        """Bytes of the cache on one device."""
        return self._cache.bytes_on(device)

    def shorten(self) -> None:
        """See `AlignedCache.shorten`."""
        self._cache.shorten()

    @property
    def is_encoder_decoder(self) -> bool:
        """True if an encoder reads the prompt."""
        return self._forward.is_encoder_decoder

    @property
    def caches_keys(self) -> bool:
        """True if some layer caches keys and values."""
        return self._forward.masks_past

    @property
    def has_states(self) -> bool:
        return self._cache.has_states

    def run_self_check(self, check: Callable[["AlignedRunner"], None], *, tokens: int) -> None:
        """Run `check` and keep the settings that it finds. It uses up to two rows of `tokens` tokens.

        It compares logits, so a quantized cache is replaced by an exact one.
        """
        if self._kv_dtype == "auto":
            return check(self)
        exact = AlignedRunner(
            self._model,
            rows=min(self.rows, 2),
            ctx_size=tokens,
            chunk=min(self._chunk, tokens),
            device=self._device,
            layer_devices=self._layer_devices,
        )
        check(exact)
        self.continues_states, self.mixes_lengths = exact.continues_states, exact.mixes_lengths

    @torch.inference_mode()
    def run(self, batch: Batch, device_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """See `Runner.run`. Raises LookupError if the states before `device_tokens` are no longer stored."""
        found: dict[int, torch.Tensor] = {}  # logits by index in the batch
        decodes: dict[int, _DecoderPart] = {}
        for index, segment in enumerate(batch):
            part = self._part(segment)
            if part is None:
                continue
            self._admit(part)
            if self._decodes(part):
                decodes[index] = part
            elif device_tokens is not None:
                # Rebuilding the states needs the tokens on the host: the step is computed in turn.
                raise LookupError(f"the states after {part.start} tokens are not stored any more")
            else:
                found[index] = self._prefill(part)
        for group in self._groups(decodes):
            found |= self._decode(group, device_tokens)
        wanted = [found[index] for index in sorted(found) if len(found[index])]
        if not wanted:
            # On the device that finishes the step: the host waits for it.
            last = self._layer_devices[-1] if self._layer_devices is not None else self._device
            return torch.empty(0, self.vocab_size, dtype=torch.float32, device=last)
        return torch.cat(wanted).float() if len(wanted) > 1 else wanted[0].float()

    def fork(self, source: int, target: int) -> None:
        """See `runner.Runner`."""
        move = self._alignment.fork(source, target, self._lengths[source])
        self._cache.carry_out([move])
        self._lengths[target] = self._lengths[source]

    def forget(self, row: int) -> None:
        """See `Runner.forget`. Erases the row's columns."""
        # Other rows may reach into these columns, and a masked column still takes part in sums: 0 * NaN is NaN.
        if self._alignment.has(row):
            self._cache.erase(self._alignment.buffer_row(row), self._alignment.begin(row), self._lengths.get(row, 0))
        self._alignment.forget(row)
        self._lengths.pop(row, None)
        prompt_images = self._images_by_row.pop(row, None)
        if prompt_images is not None and self._tower is not None:
            self._tower.forget(prompt_images)

    @torch.inference_mode()
    def forward_without_cache(self, tokens: Sequence[int], prompt_tokens: int) -> torch.Tensor:
        """Logits `[len(tokens) - prompt_tokens + 1, vocab]` from the prompt's last token on, in one forward without a
        cache: the reference of the self-check."""
        encoded = None
        if self._forward.is_encoder_decoder:
            encoded = self._forward.encode(tokens[:prompt_tokens])
            tokens = [self._first, *tokens[prompt_tokens:]]
            prompt_tokens = 1
        logits_to_keep = len(tokens) - prompt_tokens + 1
        return self._forward([tokens], [0], None, logits_to_keep=logits_to_keep, past=0, encoded=encoded)[0].float()

    # Parts

    def _part(self, segment: Segment) -> _DecoderPart | None:
        """The decoder's part of `segment`. None before the end of a prompt that an encoder reads."""
        tokens = segment.sequence.tokens
        if segment.ahead:  # the token is on the device only; 0 takes its place
            before = segment.sequence.prompt_tokens - 1 if self._forward.is_encoder_decoder else 0
            return _DecoderPart(segment, segment.start - before, [0])
        if not self._forward.is_encoder_decoder:
            return _DecoderPart(segment, segment.start, segment.tokens)
        before = segment.sequence.prompt_tokens - 1  # the prompt's last token takes the place of the start token
        if segment.end <= before:
            return None
        start = max(segment.start - before, 0)
        answer = [self._first, *tokens[before + 1 : segment.end], *segment.drafted]
        return _DecoderPart(segment, start, answer[start:])

    def _admit(self, part: _DecoderPart) -> None:
        """Give the part's row a buffer row if it has none. Clear the buffer row of a row that begins."""
        row, is_new = part.row, not self._alignment.has(part.row)
        # A step before may have drafted further: such columns are erased with the row.
        self._lengths[row] = max(part.end, self._lengths.get(row, 0) if part.start else 0)
        self._cache.carry_out(self._alignment.reserve(row, part.start, len(part.tokens) if is_new else 0))
        if not is_new and part.start:
            return
        buffer_row = self._alignment.buffer_row(row)
        self._cache.clear(buffer_row)
        if part.start:  # a warmup step: its past was never computed
            self._cache.assume_states(buffer_row, part.start)
            self._cache.cross_columns[buffer_row] = part.segment.sequence.prompt_tokens

    def _decodes(self, part: _DecoderPart) -> bool:
        is_next = part.start > 0 and len(part.tokens) == 1 + len(part.segment.drafted) and part.segment.completes
        # The last token of a prompt may be one of an image, whose embeddings only `_prefill` has.
        is_next = is_next and not part.segment.has_image_tokens
        # With states, a token can be computed in a batch only if the states before it are stored.
        if is_next and self._cache.has_states:
            return self._cache.has_states_at(self._alignment.buffer_row(part.row), part.start)
        return is_next

    def _groups(self, parts: dict[int, _DecoderPart]) -> list[dict[int, _DecoderPart]]:
        """The parts that may share a forward, by index in the batch."""
        groups: dict[tuple[int, int], dict[int, _DecoderPart]] = {}
        # Without positions or a relative mask, all rows of a forward must have the same length.
        for index, part in parts.items():
            start = 0 if self.mixes_lengths else part.start
            groups.setdefault((start, len(part.tokens)), {})[index] = part
        return list(groups.values())

    # Forwards

    def _decode(self, parts: dict[int, _DecoderPart], device_tokens: torch.Tensor | None) -> dict[int, torch.Tensor]:
        """Compute the tokens of each part, of which all have as many, in one forward. `device_tokens` by index in the
        batch."""
        count = len(next(iter(parts.values())).tokens)
        plan = self._alignment.align([(part.row, part.start) for part in parts.values()], count)
        # Rows may have to move so that their buffer rows are adjacent and all rows end at one column.
        self._cache.carry_out(plan.moves)
        by_row = {part.row: (index, part) for index, part in parts.items()}
        order = [by_row[row] for row in plan.rows]
        starts = [part.start for _, part in order]
        cross_columns = self._cache.cross_columns[plan.buffer_rows]
        self._cache.prepare(plan.buffer_rows, starts)
        self._select_adapters([part for _, part in order])
        logits = self._forward(
            [part.tokens for _, part in order],
            starts,
            self._cache.show(plan.buffer_rows, plan.low, plan.time, has_past=True, cross_columns=max(cross_columns)),
            logits_to_keep=count,
            past=plan.time - plan.low,
            cross_columns=cross_columns,
            device_tokens=device_tokens[upload([index for index, _ in order], device_tokens.device)]
            if device_tokens is not None
            else None,
        )
        self._cache.done(plan.buffer_rows, [part.end for _, part in order])
        return {index: logits[place, : part.wanted] for place, (index, part) in enumerate(order)}

    def _prefill(self, part: _DecoderPart) -> torch.Tensor:
        """Compute the tokens of one row; logits `[wanted, vocab]`."""
        buffer_row = self._alignment.buffer_row(part.row)
        if not self.continues_states and self._cache.has_states:
            known = part.start > 0 and self._cache.has_states_at(buffer_row, part.start)
            first = min(len(part.segment.sequence.tokens), self._chunk)
            if part.segment.sequence.prompt_logprobs and part.start == 0:
                first = part.end
            if not known and part.end < first:
                return torch.empty(0, 0)  # the first chunk is computed as a whole, when its last token is due
            if known:
                # One forward for each token: slow, but the only correct way for such code.
                return self._forward_pieces(part, [[token] for token in part.tokens])
            tokens = part.segment.sequence.tokens[: part.end]
            # The states are gone (preemption, or a row that begins): compute from the first token.
            part = _DecoderPart(part.segment, 0, tokens)
            return self._forward_pieces(part, [tokens[:first], *([token] for token in tokens[first:])])
        return self._forward_pieces(part, [part.tokens])

    def _forward_pieces(self, part: _DecoderPart, pieces: Iterable[list[int]]) -> torch.Tensor:
        """Compute `part` in one forward for each of `pieces`; logits `[wanted, vocab]`."""
        self._cache.carry_out(self._alignment.reserve(part.row, part.start, len(part.tokens)))
        buffer_row, begin = self._alignment.buffer_row(part.row), self._alignment.begin(part.row)
        buffer_rows = slice(buffer_row, buffer_row + 1)
        self._select_adapters([part])
        encoded, cross_columns = None, list[int]()
        if self._forward.is_encoder_decoder and part.start == 0:  # the encoder has not read the prompt yet
            sequence = part.segment.sequence
            encoded = self._forward.encode(sequence.tokens[: sequence.prompt_tokens])
        elif self._forward.is_encoder_decoder:
            cross_columns.append(self._cache.cross_columns[buffer_row])
        self._cache.prepare(buffer_rows, [part.start])
        found: list[torch.Tensor] = []
        start = part.start
        for piece in pieces:
            end = start + len(piece)
            logits_to_keep = max(1, end - max(start, part.end - part.wanted))  # transformers takes 0 for all
            time = begin + start
            view = self._cache.show(
                buffer_rows, begin, time, has_past=start > 0, cross_columns=max(cross_columns, default=0)
            )
            logits = self._forward(
                [piece],
                [start],
                view,
                logits_to_keep=logits_to_keep,
                past=start,
                encoded=encoded,
                cross_columns=cross_columns,
                embeddings=self._embed_images(part, piece, start),
            )
            if end > part.end - part.wanted:
                found.append(logits[0])
            start = end
        if encoded is not None:
            self._cache.cross_columns[buffer_row] = encoded.shape[1]
        self._cache.done(buffer_rows, [part.end])
        return torch.cat(found) if len(found) > 1 else found[0] if found else torch.empty(0, 0)

    def _select_adapters(self, parts: Sequence[_DecoderPart]) -> None:
        """Select the adapters of the next forwards, which are of these rows."""
        if self.adapters is not None:
            self.adapters.begin([(part.segment.sequence.adapter, len(part.tokens)) for part in parts])

    def _embed_images(self, part: _DecoderPart, piece: list[int], start: int) -> PromptEmbeddings | None:
        """Embeddings to compute in place of tokens, if some of these stand for images."""
        prompt_images = part.segment.sequence.prompt_images
        if prompt_images is None or start >= part.segment.sequence.prompt_tokens:
            return None
        assert self._tower is not None, "a prompt has images, but the model has no vision tower"
        self._images_by_row[part.row] = prompt_images
        return self._tower.embed_prompt(piece, start, prompt_images)

    def _probe(self, cache: Cache) -> None:
        """Run two tokens of one row, to see what the model stores."""
        with torch.inference_mode():
            if self._forward.is_encoder_decoder:
                self._forward(
                    [[self._first, 0]], [0], cache, logits_to_keep=1, past=0, encoded=self._forward.encode([0, 0])
                )
            else:
                self._forward([[0, 0]], [0], cache, logits_to_keep=1, past=0)
