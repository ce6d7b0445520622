"""JSON objects that vLLM and LMI take as options, and the keys of a preset that mean the same. Pure functions."""

import json
import math
from collections.abc import Mapping
from typing import Any

from router.config.option_types import JsonObject, plain, shown

# By member of `speculative_config`: the key.
_SPECULATIVE = {
    "model": "model-draft",
    "num_speculative_tokens": "draft-max",
    "prompt_lookup_max": "spec-ngram-size-n",
}
# Members without effect on texts. The router chooses lengths and batches at which drafts pay.
_FURTHER = {"method", "draft_tensor_parallel_size", "prompt_lookup_min", "disable_by_batch_size", "max_model_len"}
_METHODS = ("ngram", "draft_model")
_ROPE_KINDS = {"default": "none", "linear": "linear", "yarn": "yarn"}
# By member: the key, and the value of that key where the object does not have the member.
_ROPE_NUMBERS: Mapping[str, tuple[str, str]] = {
    "factor": ("rope-scale", "1"),
    "original_max_position_embeddings": ("yarn-orig-ctx", "0"),
    "beta_fast": ("yarn-beta-fast", "-1"),
    "beta_slow": ("yarn-beta-slow", "-1"),
    "attn_factor": ("yarn-attn-factor", "-1"),  # vLLM's: multiplies the factor of the paper, as llama.cpp's does
}
_ROPE_OTHERS = {"rope-freq-scale": "1", "yarn-ext-factor": "-1"}  # keys that would contradict the object


def speculative_config(text: str) -> dict[str, str]:
    """The keys that a `speculative_config` means, with their values. Raises ValueError or click.BadParameter."""
    members = _members(text)
    method = str(members.get("method", "draft_model" if "model" in members else ""))
    if members.get("model") in _METHODS:  # vLLM also takes the method as the model
        method = str(members.pop("model"))
    if method.endswith("mtp") and "model" not in members:
        return {"spec-type": "draft-mtp"}
    if method not in _METHODS:
        raise ValueError(f"the method {shown(method)} is not offered; write model-draft, or spec-type = ngram-simple")
    if further := sorted(members.keys() - _SPECULATIVE.keys() - _FURTHER):
        raise ValueError(f"no key means the member {shown(further[0])}; remove it")
    if members.get("draft_tensor_parallel_size") not in (None, 1):
        raise ValueError("the draft model is on one device; remove draft_tensor_parallel_size")
    found = {key: str(members[member]) for member, key in _SPECULATIVE.items() if member in members}
    return found | ({"spec-type": "ngram-simple"} if method == "ngram" else {})


def lora_modules(text: str) -> dict[str, str]:
    """The key `lora` for the objects of a `lora_modules`, with commas between them. Raises ValueError or
    click.BadParameter."""
    try:
        adapters = json.loads(f"[{text}]")
    except (ValueError, RecursionError):
        raise ValueError(f"{shown(text)} is not JSON; write lora = name=folder") from None
    for adapter in adapters:
        names = (adapter.get("name"), adapter.get("path")) if isinstance(adapter, dict) else ()
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError('each adapter must be {"name": ..., "path": ...}, or write lora = name=folder')
        if further := sorted(adapter.keys() - {"name", "path", "base_model_name"}):
            raise ValueError(f"no key means the member {shown(further[0])}; remove it")
    return {"lora": json.dumps([f"{adapter['name']}={adapter['path']}" for adapter in adapters])}


def limit_mm_per_prompt(text: str) -> dict[str, str]:
    """The keys that a `limit_mm_per_prompt` means. Older versions write it as `image=2,video=0`. Raises ValueError or
    click.BadParameter."""
    if text.lstrip().startswith("{"):
        members: Mapping[str, Any] = _members(text)
    else:
        members = dict(item.strip().split("=", 1) for item in text.split(",") if "=" in item)
    if further := [name for name, most in members.items() if name != "image" and str(most) != "0"]:
        raise ValueError(f"{shown(further[0])} cannot be sent; write limit-images = N")
    if "image" not in members:
        raise ValueError("write limit-images = N")
    return {"limit-images": str(members["image"])}


def rope_scaling(text: str) -> dict[str, str]:
    """The keys that a `rope_scaling` means, with their values.

    They are all keys of scaling, so that no key of a weaker source is left beside those of the object.

    Raises ValueError or click.BadParameter with the remedy.
    """
    members = _members(text)
    if not members:
        return {}
    kinds = {str(members.pop(name)) for name in ("rope_type", "type") if name in members}
    base = {"rope-freq-base": _number("rope_theta", members.pop("rope_theta"))} if "rope_theta" in members else {}
    if len(kinds) != 1:
        raise ValueError("the object must have one rope_type; write rope-scaling and rope-scale in its place")
    (kind,) = kinds
    known = set(_ROPE_NUMBERS) if kind == "yarn" else {"factor"}
    further = sorted(members.keys() - known)
    if kind not in _ROPE_KINDS or further:
        what = f"the member {shown(further[0])}" if kind in _ROPE_KINDS else f"the kind {shown(kind)}"
        raise ValueError(f'no key means {what}; write config-override = {{"rope_scaling": THE OBJECT}}')
    if kind != "default" and "factor" not in members:
        raise ValueError("the object has no factor; add it, or write rope-scaling and rope-scale in its place")
    scale = {
        key: _number(member, members[member]) if member in members and kind != "default" else unset
        for member, (key, unset) in _ROPE_NUMBERS.items()
    }
    return {"rope-scaling": _ROPE_KINDS[kind], **scale, **base, **_ROPE_OTHERS}


def _members(text: str) -> dict[str, Any]:
    members: dict[str, Any] = json.loads(JsonObject()(text) or "{}")
    return members


def _number(member: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{member} must be a number")
    return plain(value) if math.isfinite(value) else str(value)
