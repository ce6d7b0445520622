"""config.json: where it states the quantization, and the changes of a preset: `config-override`, and the RoPE keys of
llama-server and EricLLM. PURE.

transformers 5 writes the rotation of positions into `rope_parameters`. Older checkpoints have `rope_theta` and
`rope_scaling` beside other members. A checkpoint that rotates kinds of layers differently has one object for each kind;
the RoPE keys then change the layers of full attention, as in llama.cpp.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from worker.protocol.architectures import OFFSET_POSITIONS, POSITION_KEYS

_OF_AUTOAWQ = {"w_bit": "bits", "q_group_size": "group_size"}  # members that transformers has by another name
TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")  # nested language models
FULL = "full_attention"
# Old names: the kind of layers that they describe, and their name in `rope_parameters`.
OLD_NAMES: Mapping[str, tuple[str, str]] = {
    "rope_theta": (FULL, "rope_theta"),
    "rotary_emb_base": (FULL, "rope_theta"),
    "rope_local_base_freq": ("sliding_attention", "rope_theta"),
    "partial_rotary_factor": (FULL, "partial_rotary_factor"),
    "rotary_pct": (FULL, "partial_rotary_factor"),
}
ROPE_NAMES = frozenset({*OLD_NAMES, "rope_scaling", "rope_parameters"})
_UNSCALED = ("rope_theta", "partial_rotary_factor", "mrope_section")  # members that all kinds of scaling have
_REPLACEABLE = ("default", "linear", "dynamic", "yarn")  # kinds of scaling that rope-scale may replace
_STATES_PRODUCT = "gemma3"  # in the type of a model whose config states the longest sequence after linear scaling
_BETAS = {"yarn-beta-fast": "beta_fast", "yarn-beta-slow": "beta_slow"}
_OF_YARN = ("yarn-orig-ctx", "yarn-attn-factor", *_BETAS)


def with_quantization(config: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the quantization in `quantization_config`, the only place that transformers reads.

    compressed-tensors first wrote `compression_config`. `beside`: that of `quantization_beside`, which counts if
    config.json states no quantization, as in gptqmodel. A quantization in the config of the language model is not
    taken: for transformers it would be that of the vision tower, too.
    """
    if config.get("quantization_config"):
        return dict(config)
    stated, method = config.get("compression_config"), "compressed-tensors"
    if not stated and "w_bit" in beside:
        stated, method = {_OF_AUTOAWQ.get(name, name): value for name, value in beside.items()}, "awq"
    elif not stated and "bits" in beside:  # a file of transformers.js describes ONNX files, without bits
        stated, method = beside, "gptq"
    if not isinstance(stated, Mapping) or not stated:
        return dict(config)
    if "sparsity_config" in stated and not stated.get("config_groups"):  # a pruned model, which is not quantized
        return dict(config)
    return {**config, "quantization_config": {"quant_method": method, **stated}}


def merge(config: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Apply `config-override` to config.json: objects are merged key by key, all other values are replaced.

    RoPE members have an effect by their old and their new names, whichever of them the checkpoint has.
    """
    if ROPE_NAMES & override.keys() and any(
        isinstance(side.get("rope_parameters"), dict) for side in (config, override)
    ):
        by_kind = any(_is_by_kind(side) for side in (config, override))
        unscales = "rope_scaling" in override and not override["rope_scaling"]
        config = _in_new_layout(config, by_kind=by_kind, unscaled=unscales)
        override = _in_new_layout(override, by_kind=by_kind)
    return _merged(config, override)


def _merged(config: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(config)
    for key, value in override.items():
        before = found.get(key)
        found[key] = merge(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return found


def _is_by_kind(config: Mapping[str, Any]) -> bool:
    """True if kinds of layers have rotations of their own."""
    stated = config.get("rope_parameters")
    return "rope_local_base_freq" in config or (isinstance(stated, dict) and isinstance(stated.get(FULL), dict))


def _in_new_layout(config: Mapping[str, Any], *, by_kind: bool, unscaled: bool = False) -> dict[str, Any]:
    """Return `config` with all of its RoPE members in `rope_parameters`; new names take precedence over old ones."""
    stated, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    kinds: dict[str, dict[str, Any]] = {}
    for key, (kind, name) in OLD_NAMES.items():
        if config.get(key) is not None:
            kinds.setdefault(kind, {}).setdefault(name, config[key])
    flat = {name: value for name, value in stated.items() if not isinstance(value, dict)}
    full = {**kinds.pop(FULL, {}), **scaling, **flat}
    if "type" in full:
        full["rope_type"] = full.pop("type")
    nested = {name: value for name, value in stated.items() if isinstance(value, dict)}
    kinds = _merged({**kinds, FULL: full}, nested)
    if unscaled:
        kinds[FULL] = {name: value for name, value in kinds[FULL].items() if name in _UNSCALED}
    rope = {kind: members for kind, members in kinds.items() if members} if by_kind else kinds[FULL]
    return {**{key: value for key, value in config.items() if key not in ROPE_NAMES}, "rope_parameters": rope}


def longest_sequence(member: Callable[[str], Any]) -> int:
    """Return the tokens that one sequence may have by the config of a language model; 0 if it states no maximum.

    `member` returns a member of the config, or None. Linear and YaRN scaling multiply the context of the training, as
    in vLLM (vllm/config/model.py). LongRoPE and dynamic scaling rotate all tokens differently, cached ones included,
    when a sequence outgrows that context, so it is the limit. The config of the kind llama3 states the product.
    """
    stated = (number for number in map(member, POSITION_KEYS) if isinstance(number, (int, float)) and number > 0)
    longest = int(next(stated, 0))
    rope = member("rope_scaling") or member("rope_parameters")
    rope = rope if isinstance(rope, dict) else {}
    rope = rope.get(FULL) or rope
    kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor") or 1.0
    original = rope.get("original_max_position_embeddings") or member("original_max_position_embeddings") or longest
    if kind in ("longrope", "su"):
        return min(filter(None, (longest, int(original))), default=0)
    if kind == "yarn":
        return max(longest, int(original * factor))
    model_type = str(member("model_type"))
    if kind == "linear" and _STATES_PRODUCT not in model_type:
        return int(longest * factor)
    if longest and model_type in OFFSET_POSITIONS:
        padding = member("pad_token_id")
        return longest - 1 - (padding if isinstance(padding, int) else 1)
    return longest


def apply_rope(config: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the RoPE keys of a preset in the language model's members.

    Raises ValueError with a message for the user if the keys do not fit the checkpoint.
    """
    for name in TEXT_KEYS:
        if isinstance(config.get(name), dict):
            return {**config, name: apply_rope(config[name], keys)}
    return {**{key: value for key, value in config.items() if key not in ROPE_NAMES}, **rope_members(config, keys)}


def needs_rope(keys: Mapping[str, Any]) -> bool:
    """True if the keys ask for more than the default of llama.cpp, which a model without RoPE has, too."""
    return any(name != "rope-scaling" for name in keys) or keys.get("rope-scaling") == "yarn"


def rope_members(config: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a language model's config that the RoPE keys change: `rope_parameters`, and the longest
    sequence by the name that it has in the config.

    The result of `longest_sequence` grows by the factor by which the slowest rotation becomes slower, as in
    llama-server. Raises ValueError like `apply_rope`.
    """
    stated = _in_new_layout(config, by_kind=_is_by_kind(config))["rope_parameters"]
    rope = dict(stated.get(FULL, {})) if _is_by_kind(config) else stated
    rope = {**rope, "rope_type": rope.get("rope_type", "default"), "rope_theta": float(rope.get("rope_theta") or 1e4)}
    position_key = next((key for key in POSITION_KEYS if config.get(key)), "")
    states_product = _STATES_PRODUCT in str(config.get("model_type"))
    trained = config[position_key] if position_key else 0
    if states_product and rope["rope_type"] == "linear":
        trained /= rope["factor"]
    scaled, longest = _scale(rope, trained, keys)
    if states_product and scaled["rope_type"] == "linear":
        longest *= scaled["factor"]
    if "alpha-value" in keys or "rope-freq-base" in keys:
        scaled["rope_theta"], slower = _theta(rope, config, keys)
        longest *= slower
    members: dict[str, Any] = {"rope_parameters": {**stated, FULL: scaled} if _is_by_kind(config) else scaled}
    # not less by an error of rounding
    return {**members, position_key: int(longest + 1e-6)} if position_key else members


def _theta(rope: Mapping[str, Any], config: Mapping[str, Any], keys: Mapping[str, Any]) -> tuple[float, float]:
    """Return the base of the rotation, and the factor by which the slowest rotation becomes slower (at least 1).

    NTK-aware scaling: with d rotated dimensions, theta x alpha ** (d / (d - 2)) makes the slowest rotation alpha times
    slower and keeps the fastest one (ExLlamaV2, exllamav2/device.py, `scale_alpha_value`, which EricLLM sets).
    """
    heads = config.get("num_attention_heads") or config.get("n_head") or config.get("n_heads") or 1
    hidden = config.get("hidden_size") or config.get("n_embd") or config.get("d_model") or 0
    width, share = config.get("head_dim") or hidden // heads, rope.get("partial_rotary_factor") or 1.0
    rotated = config.get("qk_rope_head_dim") or int(width * share)
    if rotated <= 2:
        raise ValueError(f"alpha-value: {rotated} rotated dimensions of a head are too few; use rope-scale")
    alpha, base = keys.get("alpha-value", 1.0), keys.get("rope-freq-base", rope["rope_theta"])
    exponent = rotated / (rotated - 2)
    return base * alpha**exponent, max(1.0, alpha * (base / rope["rope_theta"]) ** (1 / exponent))


def _scale(rope: Mapping[str, Any], longest: float, keys: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """Return the RoPE parameters under the keys for scaling, and the longest sequence for the config to state.

    `longest`: the one that config.json states, without the factor of linear scaling.
    """
    kind, factor, wanted = rope["rope_type"], keys.get("rope-scale"), keys.get("rope-scaling")
    of_yarn = [name for name in _OF_YARN if name in keys]
    named = next(name for name in (*of_yarn, "rope-scale", "rope-scaling", "") if name in keys or not name)
    if not named:
        return dict(rope), longest
    if kind not in _REPLACEABLE:
        if named == "rope-scaling" and wanted != "yarn":
            return dict(rope), longest  # llama.cpp keeps the frequencies of such a checkpoint, too
        raise ValueError(
            f"{named}: the checkpoint has RoPE scaling of the kind {kind}, which this cannot be combined with; remove"
            " it, or write other rope_parameters into config-override"
        )
    if kind == "yarn":
        longest = rope.get("original_max_position_embeddings") or longest  # config.json may state the product
    wanted = wanted or (kind if kind in ("linear", "yarn") else "linear")
    if of_yarn and wanted != "yarn":
        raise ValueError(f"{named}: needs rope-scaling = yarn")
    unscaled = {**{name: value for name, value in rope.items() if name in _UNSCALED}, "rope_type": "default"}
    before = float(rope.get("factor") or 1.0) if kind in ("linear", "yarn") else 1.0
    factor = before if factor is None else float(factor)
    if wanted == "none" or (wanted == "linear" and factor == 1.0):
        return unscaled, longest
    if wanted == "linear":
        return {**unscaled, "rope_type": "linear", "factor": factor}, longest
    if factor == 1.0:
        raise ValueError("rope-scaling: yarn needs rope-scale, the factor by which the context grows")
    original = int(keys.get("yarn-orig-ctx") or longest)
    if not original:
        raise ValueError("rope-scaling: config.json states no longest sequence; set yarn-orig-ctx")
    scaled = {**(rope if kind == "yarn" else unscaled), "rope_type": "yarn", "factor": factor}
    scaled["original_max_position_embeddings"] = original
    scaled |= {member: float(keys[name]) for name, member in _BETAS.items() if name in keys}
    if "yarn-attn-factor" in keys:  # llama.cpp multiplies the factor of the paper (ggml, rope_yarn)
        scaled["attention_factor"] = float(keys["yarn-attn-factor"]) * (0.1 * math.log(factor) + 1.0)
    return scaled, max(longest, original * factor)
