"""Backend of an architecture, and the shape of its KV cache.

Families outside of the paged backend's table run on the aligned backend if a self-check with their weights succeeds
(`run.self_check`). On the paged backend, special attention would be ignored and give wrong text.

PURE. A configuration is an object with the attributes of config.json.
"""

from dataclasses import dataclass
from typing import Any, Literal

from worker.protocol.architectures import PAGED
from worker.protocol.model_config import longest_sequence

Backend = Literal["paged", "aligned"]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape of the keys (and of the values) of one token, in each of `layers` layers."""

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
    """Backend of a model with this configuration."""
    crosses = getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False)
    return "paged" if config.model_type in PAGED and not crosses else "aligned"


def positions(config: Any) -> int:
    """Maximum context of the model by its own configuration; 0 if there is none."""
    text = config.get_text_config()
    return longest_sequence(lambda name: getattr(text, name, None))
