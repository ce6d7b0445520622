"""A model's own forward, called for rows that begin at different columns.

The signature of the forward shows which arguments it takes: the name of its cache, positions, and the number of logits
to compute.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput

from worker.engines.transformers.device.memory import upload
from worker.engines.transformers.run.cache_probe import UnsupportedCache

# Settings of models that use distances between tokens instead of positions.
_NO_POSITIONS = ("alibi", "relative_attention_num_buckets")


@dataclass(frozen=True, slots=True)
class PromptEmbeddings:
    """The input of a forward for a prompt with images."""

    embedded: torch.Tensor | None  # `[1, tokens, hidden]`, in place of token ids; None: these tokens have no image
    # `[1, tokens so far]`, 1 for tokens of images, for models whose mask depends on that.
    kinds: torch.Tensor | None = None


class Forward:
    """A model's forward, with the arguments that it takes."""

    def __init__(self, model: Any, device: torch.device):
        parameters = inspect.signature(model.forward).parameters
        self.config = model.config
        self.is_encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
        self._model, self._device = model, device
        self._cache = next((name for name in ("past_key_values", "cache_params") if name in parameters), "")
        if not self._cache:
            raise UnsupportedCache("its forward takes no cache")
        prefix = "decoder_" if self.is_encoder_decoder else ""
        self._tokens, self._mask = f"{prefix}input_ids", f"{prefix}attention_mask"
        self._positions = next((n for n in (f"{prefix}position_ids", "position_ids") if n in parameters), "")
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self._encoded: tuple[int, torch.dtype] = 0, torch.float32
        # False if layers cache states only: the attention mask then covers the new tokens alone.
        self.masks_past = True
        text = model.config.get_text_config(decoder=True)
        sees_distances = any(getattr(text, name, None) for name in _NO_POSITIONS) or text.model_type in ("mpt", "bloom")
        # True if rows of different lengths may share a forward: it takes positions, or does not need them.
        self.mixes_lengths = bool(self._positions) or sees_distances or self._cache == "cache_params"

    def encode(self, tokens: Sequence[int]) -> torch.Tensor:
        """The encoder's output for one prompt, `[1, tokens, width]`."""
        ids = upload(tokens, self._device)[None]
        hidden: torch.Tensor = self._model.get_encoder()(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
        self._encoded = hidden.shape[-1], hidden.dtype
        return hidden

    def __call__(
        self,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        cache: Cache | None,
        *,
        logits_to_keep: int,
        past: int,
        encoded: torch.Tensor | None = None,
        cross_columns: Sequence[int] = (),
        embeddings: PromptEmbeddings | None = None,
        device_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits `[rows, logits_to_keep, vocab]` of the last `logits_to_keep` tokens of each row.

        tokens: `[rows, count]`. device_tokens: `[rows]`, used in their place if given.
        starts: tokens of each row in the cache; they are the last of the `past` columns that it shows.
        encoded: the encoder's output, if it is new.
        cross_columns: the number of columns of it that each row has in the cache, if it is not.
        embeddings: of one row, some of whose tokens stand for images.
        """
        count = len(tokens[0])
        # Left padding: a row sees the columns from its own begin on.
        begin = upload([past - start for start in starts], self._device)[:, None]  # [rows, 1]
        mask = (torch.arange(past + count, device=self._device) >= begin).long()  # [rows, past + count]
        if not self.masks_past:
            mask = mask[:, past:]
        options: dict[str, Any] = {self._mask: mask, self._cache: cache, "use_cache": cache is not None}
        # Without a cache, transformers' models count positions themselves. The self-check thus finds those whose
        # positions do not begin at 0 (Kosmos-2.5: behind the padding token's id). Code of a snapshot may need them.
        counts_itself = cache is None and type(self._model).__module__.startswith("transformers.")
        if self._positions and not counts_itself:
            place = upload([start + i for start in starts for i in range(count)], self._device)
            options[self._positions] = place.view(len(starts), count)
        if self._takes_logits_to_keep:
            options["logits_to_keep"] = logits_to_keep
        if self.is_encoder_decoder:
            options |= self._encoder_options(encoded, cross_columns)
        if embeddings is not None and embeddings.kinds is not None:
            options["token_type_ids"] = embeddings.kinds
        if embeddings is not None and embeddings.embedded is not None:
            options["inputs_embeds"] = embeddings.embedded
        elif device_tokens is not None:
            options[self._tokens] = device_tokens.to(self._device)[:, None]
        else:
            options[self._tokens] = upload([token for row in tokens for token in row], self._device).view(
                len(starts), count
            )
        logits: torch.Tensor = self._model(**options).logits
        return logits[:, -logits_to_keep:]

    def _encoder_options(self, encoded: torch.Tensor | None, cross_columns: Sequence[int]) -> dict[str, Any]:
        if encoded is not None:
            mask = torch.ones(1, encoded.shape[1], dtype=torch.int64, device=self._device)
            return {"encoder_outputs": BaseModelOutput(last_hidden_state=encoded), "attention_mask": mask}
        # The model takes keys and values from the cache and reads only the shape of this tensor: it costs no memory.
        width, dtype = self._encoded
        nothing = torch.zeros(1, 1, 1, dtype=dtype, device=self._device).expand(
            len(cross_columns), max(cross_columns), width
        )
        columns = torch.arange(max(cross_columns), device=self._device)
        mask = (columns < upload(cross_columns, self._device)[:, None]).long()
        return {"encoder_outputs": BaseModelOutput(last_hidden_state=nothing), "attention_mask": mask}


def first_token(model: Any) -> int:
    """The token with which the decoder's text begins. Raises UnsupportedCache if the configuration has none."""
    for config in (model.generation_config, model.config, model.config.get_text_config(decoder=True)):
        for name in ("decoder_start_token_id", "bos_token_id"):
            token = getattr(config, name, None)
            if isinstance(token, int):
                return token
    raise UnsupportedCache("its configuration has no decoder_start_token_id")
