"""How large a LoRA adapter is, by what PEFT wrote beside it. Law: PURE."""

import json

USUAL = 16
"""Of adapters of which nothing is known."""
MOST = 4096
"""Of max-lora-rank; beyond it a number in a file is no rank."""


def rank_of(config: str) -> int:
    """The largest rank that the text of an adapter_config.json states; 0: none, as far as that tells."""
    try:
        stated = json.loads(config)
        patterns = stated.get("rank_pattern") or {}
        ranks = [stated.get("r"), *patterns.values()]
    except (ValueError, RecursionError, AttributeError):
        return 0
    return max((rank for rank in ranks if type(rank) is int and 0 < rank <= MOST), default=0)
