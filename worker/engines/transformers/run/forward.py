"""A model's own forward, called with the arguments that it takes, for rows that begin at different columns.

What a model takes is read off the signature of its forward: the name of its cache, whether it wants to be told
positions, whether it can leave out logits that nobody wants.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput

from worker.engines.transformers.device.memory import upload
from worker.engines.transformers.run.cache_probe import Unsupported

_NO_POSITIONS = ("alibi", "relative_attention_num_buckets")
"""Settings of models that see distances between tokens, and no positions."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Tokens of a prompt with images, as the forward is given them."""

    embedded: torch.Tensor | None
    """`[1, tokens, hidden]`, in place of the tokens; None: they are words only."""
    kinds: torch.Tensor | None = None
    """`[1, tokens so far]`, 1 for those of images, for models whose mask depends on that."""


class Forward:
    """A model's forward, with the arguments that it takes."""

    def __init__(self, model: Any, device: torch.device):
        taken = inspect.signature(model.forward).parameters
        self.config = model.config
        self.crosses = bool(getattr(model.config, "is_encoder_decoder", False))
        self._model, self._device = model, device
        self._cache = next((name for name in ("past_key_values", "cache_params") if name in taken), "")
        if not self._cache:
            raise Unsupported("its forward takes no cache")
        prefix = "decoder_" if self.crosses else ""
        self._tokens, self._mask = f"{prefix}input_ids", f"{prefix}attention_mask"
        self._positions = next((n for n in (f"{prefix}position_ids", "position_ids") if n in taken), "")
        self._keeps = "logits_to_keep" in taken
        self._encoded: tuple[int, torch.dtype] = 0, torch.float32
        self.masks_past = True
        """Whether the attention mask covers what is in the cache: not where layers keep nothing but states."""
        text = model.config.get_text_config(decoder=True)
        sees_distances = any(getattr(text, name, None) for name in _NO_POSITIONS) or text.model_type in ("mpt", "bloom")
        self.mixes = bool(self._positions) or sees_distances or self._cache == "cache_params"
        """Whether rows of different lengths may be in one forward: it can be told, or need not know, where each is."""

    def encode(self, tokens: Sequence[int]) -> torch.Tensor:
        """The encoder's output for one prompt, `[1, tokens, width]`."""
        ids = self._upload(tokens)[None]
        hidden: torch.Tensor = self._model.get_encoder()(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
        self._encoded = hidden.shape[-1], hidden.dtype
        return hidden

    def __call__(
        self,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        cache: Cache | None,
        *,
        kept: int,
        past: int,
        encoded: torch.Tensor | None = None,
        crossed: Sequence[int] = (),
        seen: Seen | None = None,
        fed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits `[rows, kept, vocab]` of the last `kept` of `tokens` `[rows, count]`, or in their place of `fed`
        `[rows]`, which is on the device already.

        Row `r` has `starts[r]` tokens in the cache, the last of the `past` columns that it shows. `encoded` is the
        encoder's output where it is new, `crossed` how many columns of it each row has where it is in the cache.
        `seen`: of one row some of whose tokens stand for images.
        """
        count = len(tokens[0])
        begin = self._upload([past - start for start in starts])[:, None]
        mask = (torch.arange(past + count, device=self._device) >= begin).long()  # [rows, past + count]
        if not self.masks_past:
            mask = mask[:, past:]
        options: dict[str, Any] = {self._mask: mask, self._cache: cache, "use_cache": cache is not None}
        if self._positions:
            place = self._upload([start + i for start in starts for i in range(count)])
            options[self._positions] = place.view(len(starts), count)
        if self._keeps:
            options["logits_to_keep"] = kept
        if self.crosses:
            options |= self._encoder_options(encoded, crossed)
        if seen is not None and seen.kinds is not None:
            options["token_type_ids"] = seen.kinds
        if seen is not None and seen.embedded is not None:
            options["inputs_embeds"] = seen.embedded
        elif fed is not None:
            options[self._tokens] = fed.to(self._device)[:, None]
        else:
            options[self._tokens] = self._upload([token for row in tokens for token in row]).view(len(starts), count)
        logits: torch.Tensor = self._model(**options).logits
        return logits[:, -kept:]

    def _encoder_options(self, encoded: torch.Tensor | None, crossed: Sequence[int]) -> dict[str, Any]:
        if encoded is not None:
            mask = torch.ones(1, encoded.shape[1], dtype=torch.int64, device=self._device)
            return {"encoder_outputs": BaseModelOutput(last_hidden_state=encoded), "attention_mask": mask}
        # its keys and values are in the cache; only its shape is looked at
        width, dtype = self._encoded
        nothing = torch.zeros(1, 1, 1, dtype=dtype, device=self._device).expand(len(crossed), max(crossed), width)
        columns = torch.arange(max(crossed), device=self._device)
        mask = (columns < self._upload(crossed)[:, None]).long()
        return {"encoder_outputs": BaseModelOutput(last_hidden_state=nothing), "attention_mask": mask}

    def _upload(self, values: Sequence[int]) -> torch.Tensor:
        return upload(values, torch.int64, self._device)


def first_token(model: Any) -> int:
    """What the decoder's text begins with. Raises Unsupported if the model does not say."""
    for config in (model.generation_config, model.config, model.config.get_text_config(decoder=True)):
        for name in ("decoder_start_token_id", "bos_token_id"):
            token = getattr(config, name, None)
            if isinstance(token, int):
                return token
    raise Unsupported("its configuration names no decoder_start_token_id")
