"""Which architectures the engine's cache serves, and the shape of the cache each needs.

VERIFIED lists the families whose greedy text our tests have compared with transformers' own `generate`, token for
token, alone and in a changing batch. Whatever is not in it is refused at load: an architecture with attention of its
own would run and be silently wrong.
Law: PURE; a configuration comes in as an object with the attributes of config.json.
"""

from dataclasses import dataclass
from typing import Any

from worker.errors import StartError

VERIFIED = frozenset(
    {
        "cohere",
        "exaone4",
        "gemma",
        "gemma3_text",
        "glm4",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "olmo3",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "starcoder2",
    }
)
"""`model_type` of causal language models; tests/worker/test_engine_equality.py has one of each."""

_OFFSET_POSITIONS = frozenset(
    {"camembert", "data2vec-text", "ibert", "longformer", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta",
     "xlm-roberta-xl", "xmod"}
)  # fmt: skip
"""Encoders that count positions from behind the padding token's id, so that the table's first rows are never used."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Of the keys (and of the values) of one token, in each of `layers` layers."""

    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> "CacheShape":
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )


def check(config: Any) -> None:
    """Raises StartError, naming the architecture, if text generated from our cache could be wrong."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise StartError(
            f"architecture {kind!r} has an encoder and a decoder, which this engine does not generate with"
        )
    if kind not in VERIFIED:
        known = ", ".join(sorted(VERIFIED))
        raise StartError(
            f"architecture {kind!r} is not verified for this engine's batched cache, and could give wrong text;"
            f" it serves {known}, or any encoder with task = embed"
        )


def positions(config: Any) -> int:
    """Tokens that one sequence may have, by the model's own limits; 0: it states none.

    `longrope` changes the frequencies of all tokens, those in the cache included, once a sequence outgrows the original
    context; we stay within it. (`dynamic` does so beyond max_position_embeddings, which is the limit anyway.)
    """
    limit = int(getattr(config, "max_position_embeddings", None) or 0)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
        return min(limit or int(original), int(original))
    if limit and config.model_type in _OFFSET_POSITIONS:
        return limit - int(config.pad_token_id or 0) - 1
    return limit
