"""Sampling parameters of a request. Precedence: request, preset, checkpoint (generation_config.json), API default.

Includes llama-server's `samplers`, which selects the samplers and their order. The engine supports two orders:
temperature before top-k, top-p and min-p (vLLM, transformers), or after them (llama.cpp).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.errors import InvalidValue, StartError, UnsupportedField
from worker.interface import Grammar, SamplingParams
from worker.prompt import guided_decoding
from worker.prompt.body_reader import BodyFields, Json, parse_setting, to_integer
from worker.protocol.dialects.generation_fields import (
    GRAMMAR,
    MAX_BIAS_LENGTH,
    MAX_BIASES,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    REASONING_BUDGETS,
    SAMPLER_ALIASES,
    SAMPLER_LETTERS,
    SAMPLING,
    SPECULATION,
    TUNING,
)
from worker.protocol.events import Exit

_NUMBER = re.compile(r"[+-]?[0-9]+")  # a key of `logit_bias` that is a token id, and no text
_DIGITS = 20
_SHOWN = 8  # token ids in a message
EncodeText = Callable[[str], Sequence[int]]
_PRESET_KEYS = {
    "temp": "temperature",
    "top-k": "top_k",
    "top-p": "top_p",
    "min-p": "min_p",
    "repeat-penalty": "repetition_penalty",
    "repeat-last-n": "repeat_last_n",
    "presence-penalty": "presence_penalty",
    "frequency-penalty": "frequency_penalty",
    "stop": "stop",
}
# Keys of a preset whose values are members of a request that has none of this meaning.
_MEMBERS = {
    "samplers": "samplers",
    "logit-bias": "logit_bias",
    "ignore-eos": "ignore_eos",
    "grammar": "grammar",
    "json-schema": "json_schema",
    "reasoning-format": "reasoning_format",
    "reasoning-budget": REASONING_BUDGETS[0],
}
_CHECKPOINT_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size")
_WITHOUT_SAMPLING = ("repetition_penalty", "no_repeat_ngram_size")
_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_ALL_ACTIVE = {"temperature": 0.5, "top_k": 2, "top_p": 0.5, "min_p": 0.5, "presence_penalty": 1.0}
_CUTS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # in the engine's order, with the value that disables each


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for requests that do not set them: fields of SamplingParams by name, stop strings, members of a body."""

    tuning: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    members: Mapping[str, Any] = field(default_factory=dict)
    grammar: Grammar | None = None  # that of `members`

    def complete(self, body: Json, table: Mapping[str, Any]) -> Json:
        """Return `body` with the members of `table` that it lacks. A member of the body with the same meaning takes
        precedence, and tools do over a grammar."""
        if not self.members:
            return body
        added = {name: value for name, value in self.members.items() if name in table and body.get(name) is None}
        has_tools = bool(body.get("tools")) and body.get("tool_choice") != "none"
        if has_tools or any(body.get(name) is not None for name in GRAMMAR):
            added = {name: value for name, value in added.items() if name not in GRAMMAR}
        if any(body.get(name) is not None for name in REASONING_BUDGETS):
            added.pop(REASONING_BUDGETS[0], None)
        if body.get("include_reasoning") is False:
            added.pop("reasoning_format", None)
        return {**body, **added} if added else body


def defaults(preset: str, checkpoint: Mapping[str, Any], *, vocab_size: int) -> SamplingDefaults:
    """Return the defaults from `preset` (the JSON object in `Serve.sampling`) and `checkpoint`
    (generation_config.json).

    Raise StartError for a preset value that would be invalid in a request. Checkpoint values outside this API's
    ranges are ignored, because they were written for another program.
    """
    values = parse_setting(preset)
    if values is None:
        raise StartError("sampling: must be a JSON object", Exit.USAGE)
    unknown = sorted(set(values) - set(_PRESET_KEYS) - set(_MEMBERS))
    if unknown:
        known = ", ".join((*_PRESET_KEYS, *_MEMBERS))
        raise StartError(f"sampling: unknown key {unknown[0]!r}; known: {known}", Exit.USAGE)
    members = {_MEMBERS[key]: value for key, value in values.items() if key in _MEMBERS}
    body = {_PRESET_KEYS[key]: value for key, value in values.items() if key in _PRESET_KEYS}
    fields = BodyFields({**members, **body}, {**SAMPLING, **GRAMMAR})
    try:
        grammar = guided_decoding.read(fields)
        _logit_bias(fields.take("logit_bias"), vocab_size, None)
        apply_samplers(fields, _ALL_ACTIVE)
        tuning = {**_of_checkpoint(checkpoint), **_tuning(fields)}
        return SamplingDefaults(tuning, tuple(read_stop(fields, "stop") or ()), members, grammar)
    except (InvalidValue, UnsupportedField) as error:
        raise StartError(f"sampling: {error.message}", Exit.USAGE) from None


def _of_checkpoint(config: Mapping[str, Any]) -> Json:
    """Translate generation_config.json. `do_sample: false` means greedy, which disables all sampling parameters but
    those against repetition."""
    tuning: Json = {}
    for key in _CHECKPOINT_KEYS:
        try:
            tuning.update(_tuning(BodyFields({key: config.get(key)}, TUNING)))
        except InvalidValue:
            continue
    if config.get("do_sample") is False:
        tuning = {key: value for key, value in tuning.items() if key in _WITHOUT_SAMPLING}
        tuning["temperature"] = 0.0
    return tuning


def read(
    fields: BodyFields,
    defaults: SamplingDefaults,
    *,
    vocab_size: int,
    logprobs: int | None,
    seed: int | None,
    encode: EncodeText | None = None,
) -> tuple[SamplingParams, tuple[str, ...]]:
    """Read the request's sampling parameters and stop strings. Raise InvalidValue naming the field.

    `logprobs`: number of alternatives, which each dialect names differently. `seed`: the preset's seed; a request's
    seed of -1 is a random one, as in llama-server. `encode`: tokenizes the texts of `logit_bias`; None: only token
    ids are accepted.
    """
    given = fields.integer("seed")
    stop = read_stop(fields, "stop")
    sampling = SamplingParams(
        **apply_samplers(fields, {**defaults.tuning, **_tuning(fields)}),
        logit_bias=_logit_bias(fields.take("logit_bias"), vocab_size, encode),
        seed=seed if given is None else None if given == -1 else given,
        min_tokens=fields.integer("min_tokens") or 0,
        ignore_eos=fields.flag("ignore_eos") or False,
        logprobs=logprobs,
    )
    return sampling, defaults.stop if stop is None else tuple(stop)


def read_draft_limits(fields: BodyFields, *, speculates: bool) -> Json:
    """Read `draft_max` and `draft_min` of a GenerationRequest. Without speculative decoding, they have no effect."""
    limits = {"draft_max": fields.integer("speculative.n_max"), "draft_min": fields.integer("speculative.n_min")}
    if not speculates:
        for name, value in zip(SPECULATION, limits.values(), strict=True):
            if value is not None:
                fields.mark_unused(name)
    return limits


def _tuning(fields: BodyFields) -> Json:
    """Read the sampling parameters by their name in SamplingParams."""
    given = {name: fields.checked(name) for name in TUNING if name != "repeat_penalty"}
    given["repetition_penalty"] = fields.any_of(fields.number, "repetition_penalty", "repeat_penalty")
    tuning = {name: value for name, value in given.items() if value is not None}
    # top_p = 0 must keep the most likely token; any tiny probability does
    least = {"top_k": 0, "top_p": 1e-6}
    return tuning | {name: max(tuning[name], low) for name, low in least.items() if name in tuning}


def read_stop(fields: BodyFields, *names: str) -> list[str] | None:
    """Return the stop strings of the first of `names` that is present. All present ones are validated."""
    given_fields = [(name, given) for name in names if (given := fields.take(name)) is not None]
    lists = [[given] if isinstance(given, str) else given for _, given in given_fields]
    for (name, given), stops in zip(given_fields, lists, strict=True):
        where = fields.path + name
        if not isinstance(stops, list):
            raise InvalidValue(f"{where} must be a string or an array of strings", param=where)
        if len(stops) > MAX_STOPS:
            raise InvalidValue(f"{where} must have at most {MAX_STOPS} entries", param=where)
        for index, stop in enumerate(stops):
            if not (isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_LENGTH):
                place = where if stops is not given else f"{where}[{index}]"
                raise InvalidValue(f"{place} must be a string of 1 to {MAX_STOP_LENGTH} characters", param=where)
    return lists[0] if lists else None


def _to_token(key: str) -> int | None:
    """The token id that a key of `logit_bias` states; None for a text. Long numbers are cut: no vocabulary has them."""
    return int(key[:_DIGITS]) if _NUMBER.fullmatch(key) else None


def _logit_bias(value: Any, vocab_size: int, encode: EncodeText | None) -> dict[int, float]:
    """Return biases by token id from `{"id or text": bias}` or `[[id or text, bias], ...]`. A bias of false bans the
    token, as in llama-server. Token ids outside the vocabulary are an error, as in OpenAI's API and vLLM."""
    if value is None:
        return {}
    if isinstance(value, dict | list) and len(value) > MAX_BIASES:
        raise InvalidValue(f"logit_bias must have at most {MAX_BIASES} entries", param="logit_bias")
    if isinstance(value, dict):
        pairs: list[Any] = [[key if (id := _to_token(key)) is None else id, bias] for key, bias in value.items()]
    else:
        pairs = value if isinstance(value, list) else [None]
    biases: dict[int, float] = {}
    outside: list[int] = []
    for pair in pairs:
        token, bias = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
        if isinstance(token, str) and encode is not None and 0 < len(token) <= MAX_BIAS_LENGTH:
            ids: Sequence[int | None] = encode(token)
        else:
            ids = [to_integer(token)]
        number: Any = -100 if bias is False else bias
        is_number = type(number) in (int, float)
        if None in ids or not is_number or not -100 <= number <= 100:
            raise InvalidValue(
                "logit_bias must map token ids of this model to numbers between -100 and 100", param="logit_bias"
            )
        biases.update((id, float(number)) for id in ids if id is not None)
        outside += [id for id in ids if id is not None and not 0 <= id < vocab_size]
    if outside:
        shown = ", ".join(map(str, outside[:_SHOWN])) + (", ..." if len(outside) > _SHOWN else "")
        raise InvalidValue(
            f"logit_bias has token ids outside this model's vocabulary of {vocab_size} tokens: {shown}; remove them",
            param="logit_bias",
        )
    return biases


def apply_samplers(fields: BodyFields, tuning: Mapping[str, Any]) -> Json:
    """Apply `samplers` to `tuning`, values of SamplingParams by name. Samplers that are not listed are disabled.

    Raise InvalidValue for an unknown name, and UnsupportedField for an order that makes a difference and that the
    engine does not have.
    """
    names = _read_samplers(fields)
    if not names:
        return dict(tuning)
    changed = dict(tuning)
    if "penalties" not in names:
        changed |= _PENALTIES
    changed |= {name: off for name, off in _CUTS.items() if name not in names}
    if "temperature" not in names:
        changed["temperature"] = 1.0
    effective = [name for name in names if _has_effect(name, changed)]
    first, temperature = [
        [sampler for sampler in effective if sampler == name] for name in ("penalties", "temperature")
    ]
    cuts = [name for name in _CUTS if name in effective]
    # both compare with the most likely token only, so their order does not matter
    lists = [cuts, cuts[::-1]] if set(cuts) == {"top_k", "min_p"} else [cuts]
    before = [[*first, *temperature, *order] for order in lists]
    after = [[*first, *order, *temperature] for order in lists]
    if effective not in before + after:
        raise UnsupportedField(
            "samplers in this order are not supported: penalties come first, then top_k, top_p and min_p, and"
            " temperature either before or behind these three",
            param="samplers",
        )
    return changed | {"temperature_last": effective not in before}


def _has_effect(name: str, tuning: Mapping[str, Any]) -> bool:
    """Check whether a sampler has an effect. Greedy needs no temperature, and 1.0 changes nothing."""
    if name == "penalties":
        return any(tuning.get(penalty, off) != off for penalty, off in _PENALTIES.items())
    if name == "temperature":
        return tuning.get(name, 1.0) not in (0.0, 1.0)
    return name in _CUTS and tuning.get(name, _CUTS[name]) != _CUTS[name]


def sampler_names(tuning: Mapping[str, Any]) -> list[str]:
    """Return the order of the samplers by llama-server's names."""
    cuts = [*_CUTS]
    return ["penalties", *([*cuts, "temperature"] if tuning["temperature_last"] else ["temperature", *cuts])]


def _read_samplers(fields: BodyFields) -> list[str]:
    given = fields.take("samplers")
    if given is None:
        return []
    if isinstance(given, str | list):
        given = given[: len(SAMPLER_LETTERS) + 1]  # more than all would contain one of them twice
    listed = [SAMPLER_LETTERS.get(letter, "") for letter in given] if isinstance(given, str) else given
    is_list = isinstance(listed, list) and all(isinstance(item, str) for item in listed)
    named = [SAMPLER_ALIASES.get(item, item) for item in listed] if is_list else []
    if not is_list or not set(named) <= set(SAMPLER_LETTERS.values()) or len(set(named)) < len(named):
        raise InvalidValue(
            f"samplers must be names among {', '.join(SAMPLER_LETTERS.values())}, each at most once, or a string of"
            f" {''.join(SAMPLER_LETTERS)}",
            param="samplers",
        )
    if "infill" in named:
        fields.mark_unused("samplers[infill]")  # editor plugins always send it
        named.remove("infill")
    return named
