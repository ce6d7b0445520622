"""llama-server's `samplers`: which of them pick a token, and in which order.

The engine has two orders: temperature before top-k, top-p and min-p, as vLLM and transformers have it, or behind them,
as in llama.cpp. A sampler that is not named is off, and the order among those that are off makes no difference.

Law: PURE, values only.
"""

from collections.abc import Mapping
from typing import Any

from worker.errors import InvalidValue, UnsupportedField
from worker.prompt.body_reader import Fields, Json

_LETTERS = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p",
    "x": "xtc", "t": "temperature", "i": "infill", "a": "adaptive_p",
}  # fmt: skip
"""As llama-server spells an order in a string (common/sampling.cpp)."""
_SAME = {
    "top-k": "top_k", "top-p": "top_p", "nucleus": "top_p", "min-p": "min_p", "typ-p": "typ_p", "typ": "typ_p",
    "typical_p": "typ_p", "typical-p": "typ_p", "typical": "typ_p", "temp": "temperature", "top-n-sigma": "top_n_sigma",
    "adaptive-p": "adaptive_p",
}  # fmt: skip
_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_CUTS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""In the engine's order; each with the value that cuts nothing."""


def read(fields: Fields, tuning: Mapping[str, Any]) -> Json:
    """`tuning`, values of Sampling by name, as `samplers` leaves them; unchanged where it is not stated.

    Raises InvalidValue for a name that is none, UnsupportedField for an order that would matter and is neither of ours.
    """
    names = _names(fields)
    if not names:
        return dict(tuning)
    changed = dict(tuning)
    if "penalties" not in names:
        changed |= _PENALTIES
    changed |= {name: off for name, off in _CUTS.items() if name not in names}
    if "temperature" not in names:
        changed["temperature"] = 1.0
    acting = [name for name in names if _acts(name, changed)]
    first, heat = [[each for each in acting if each == name] for name in ("penalties", "temperature")]
    cuts = [name for name in _CUTS if name in acting]
    lists = [cuts, cuts[::-1]] if set(cuts) == {"top_k", "min_p"} else [cuts]  # both look at the likeliest token alone
    before = [[*first, *heat, *each] for each in lists]
    behind = [[*first, *each, *heat] for each in lists]
    if acting not in before + behind:
        raise UnsupportedField(
            "samplers in this order are not supported: penalties come first, then top_k, top_p and min_p, and"
            " temperature either before or behind these three",
            param="samplers",
        )
    return changed | {"tempers_last": acting not in before}


def _acts(name: str, tuning: Mapping[str, Any]) -> bool:
    """Whether it makes a difference: greedy is greedy, and a temperature of 1 changes nothing."""
    if name == "penalties":
        return any(tuning.get(each, off) != off for each, off in _PENALTIES.items())
    if name == "temperature":
        return tuning.get(name, 1.0) not in (0.0, 1.0)
    return name in _CUTS and tuning.get(name, _CUTS[name]) != _CUTS[name]


def told(tuning: Mapping[str, Any]) -> list[str]:
    """The order that such values have, in llama-server's words."""
    cuts = [*_CUTS]
    return ["penalties", *([*cuts, "temperature"] if tuning["tempers_last"] else ["temperature", *cuts])]


def _names(fields: Fields) -> list[str]:
    stated = fields.take("samplers") or []
    listed = [_LETTERS.get(letter, "") for letter in stated] if isinstance(stated, str) else stated
    is_list = isinstance(listed, list) and all(isinstance(each, str) for each in listed)
    named = [_SAME.get(each, each) for each in listed] if is_list else []
    if not is_list or not set(named) <= set(_LETTERS.values()) or len(set(named)) < len(named):
        raise InvalidValue(
            f"samplers must be names among {', '.join(_LETTERS.values())}, none of them twice, or a string of"
            f" {''.join(_LETTERS)}",
            param="samplers",
        )
    if "infill" in named:
        raise UnsupportedField("samplers: infill is not supported; leave it out", param="samplers")
    return named
