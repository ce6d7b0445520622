"""Which backend serves an architecture, and the shape of the cache that the packed one needs.

The table lists the families whose greedy text our tests have compared with transformers' own `generate`, token for
token, alone and in a changing batch, on that backend. Whatever is not in it runs on the aligned backend, if a trial
with its own weights finds that right (`trial`): an architecture with attention of its own, packed, would run and be
silently wrong.
Law: PURE; a configuration comes in as an object with the attributes of config.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from worker.images import TEXT_ONLY

PAGED = frozenset(
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
"""`model_type` of decoders with plain attention, which the packed backend serves."""

ALIGNED = frozenset(
    {
        "bamba",
        "bart",
        "biogpt",
        "bloom",
        "codegen",
        "cohere2",
        "dbrx",
        "deepseek_v2",
        "deepseek_v3",
        "falcon",
        "falcon_h1",
        "falcon_mamba",
        "gemma2",
        "gpt_neo",
        "gpt_oss",
        "gptj",
        "jamba",
        "lfm2",
        "llama4_text",
        "mamba",
        "mamba2",
        "mpt",
        "nemotron",
        "olmoe",
        "persimmon",
        "phimoe",
        "qwen3_next",
        "stablelm",
        "t5",
        "xglm",
    }
)
"""`model_type` of the rest that is verified."""

DIVIDED = frozenset(
    {
        "cohere",
        "exaone4",
        "gemma",
        "gemma3_text",
        "gpt_neox",
        "granite",
        "llama",
        "mistral",
        "olmo",
        "phi",
        "qwen2",
        "qwen3",
        "smollm3",
        "starcoder2",
    }
)
"""`model_type` of those whose matrices may be divided among ranks (`slices`): tests/worker/test_tensor_parallel.py has
compared the text of each."""

VERIFIED = PAGED | ALIGNED
"""tests/worker/test_engine_equality.py has one of each."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What a family with a vision tower needs beside the features of its images in the place of their tokens."""

    is_whole: bool = False
    """Tokens of one image see each other: they are computed in one step."""


VISION: Mapping[str, Sight] = {
    "gemma3": Sight(is_whole=True),
    "idefics3": Sight(),
    "llava": Sight(),
}
"""By `model_type`: families whose images tests/worker/test_vision_equality.py has verified. Others of their kind are
served as the language models that they contain."""

Backend = Literal["paged", "aligned"]

_OFFSET_POSITIONS = frozenset(
    {"camembert", "data2vec-text", "ibert", "longformer", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta",
     "xlm-roberta-xl", "xmod"}
)  # fmt: skip
"""Encoders that count positions from behind the padding token's id, so that the table's first rows are never used."""

_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")


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


def backend(config: Any) -> Backend:
    """What computes the steps of a model with this configuration."""
    crosses = getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False)
    return "paged" if config.model_type in PAGED and not crosses else "aligned"


def positions(config: Any) -> int:
    """Tokens that one sequence may have, by the model's own limits; 0: it states none.

    `longrope` changes the frequencies of all tokens, those in the cache included, once a sequence outgrows the original
    context; we stay within it. (`dynamic` does so beyond max_position_embeddings, which is the limit anyway.)
    """
    config = config.get_text_config()
    stated = (getattr(config, name, None) for name in _POSITIONS)
    limit = next((int(each) for each in stated if isinstance(each, int) and each > 0), 0)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
        return min(limit or int(original), int(original))
    if limit and config.model_type in _OFFSET_POSITIONS:
        return limit - int(config.pad_token_id or 0) - 1
    return limit


def why_blind(config: Any) -> str:
    """Why a model of none of VISION takes no images, for people."""
    if getattr(config, "vision_config", None) is None:
        return TEXT_ONLY
    return (
        f"images for architecture {config.model_type!r} are not supported by this version: the model is served for"
        f" text; those of {', '.join(sorted(VISION))} are"
    )
