"""RoPE scaling as a JSON object, as vLLM and LMI take it (`rope_scaling`), and the keys of a preset that mean the same.

Pure functions.
"""

import json
import math
from collections.abc import Mapping

from router.config.option_types import JsonObject, plain, shown

_KINDS = {"default": "none", "linear": "linear", "yarn": "yarn"}
# By member: the key, and the value of that key where the object does not have the member.
_NUMBERS: Mapping[str, tuple[str, str]] = {
    "factor": ("rope-scale", "1"),
    "original_max_position_embeddings": ("yarn-orig-ctx", "0"),
    "beta_fast": ("yarn-beta-fast", "-1"),
    "beta_slow": ("yarn-beta-slow", "-1"),
    "attn_factor": ("yarn-attn-factor", "-1"),  # vLLM's: multiplies the factor of the paper, as llama.cpp's does
}
_OTHERS = {"rope-freq-scale": "1", "yarn-ext-factor": "-1"}  # keys that would contradict the object


def keys_of(text: str) -> dict[str, str]:
    """Return the keys that a JSON object means, with their values.

    They are all keys of scaling, so that no key of a weaker source is left beside those of the object.

    Raises ValueError or click.BadParameter with the way out.
    """
    members = json.loads(JsonObject()(text))
    if not members:
        return {}
    kinds = {str(members.pop(name)) for name in ("rope_type", "type") if name in members}
    base = {"rope-freq-base": _number("rope_theta", members.pop("rope_theta"))} if "rope_theta" in members else {}
    if len(kinds) != 1:
        raise ValueError("the object must have one rope_type; write rope-scaling and rope-scale in its place")
    (kind,) = kinds
    known = set(_NUMBERS) if kind == "yarn" else {"factor"}
    further = sorted(members.keys() - known)
    if kind not in _KINDS or further:
        what = f"the member {shown(further[0])}" if kind in _KINDS else f"the kind {shown(kind)}"
        raise ValueError(f'no key means {what}; write config-override = {{"rope_scaling": THE OBJECT}}')
    if kind != "default" and "factor" not in members:
        raise ValueError("the object has no factor; add it, or write rope-scaling and rope-scale in its place")
    scale = {
        key: _number(member, members[member]) if member in members and kind != "default" else unset
        for member, (key, unset) in _NUMBERS.items()
    }
    return {"rope-scaling": _KINDS[kind], **scale, **base, **_OTHERS}


def _number(member: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{member} must be a number")
    return plain(value) if math.isfinite(value) else str(value)
