"""JSON objects that vLLM and LMI take as options, and the keys of a preset that mean the same. Pure functions."""

import json
from collections.abc import Mapping
from typing import Any

from router.config.option_types import JsonObject, shown

# By member of `speculative_config`: the key.
_SPECULATIVE = {
    "model": "model-draft",
    "num_speculative_tokens": "draft-max",
    "prompt_lookup_max": "spec-ngram-size-n",
}
# Members without effect on texts. The router chooses lengths and batches at which drafts pay.
_FURTHER = {"method", "draft_tensor_parallel_size", "prompt_lookup_min", "disable_by_batch_size", "max_model_len"}
_METHODS = ("ngram", "draft_model")


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


def _members(text: str) -> dict[str, Any]:
    members: dict[str, Any] = json.loads(JsonObject()(text) or "{}")
    return members
