"""How a request wants its tokens picked: what it says itself, else the preset, else the checkpoint, else the API.

Law: PURE, values only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.errors import InvalidValue, StartError
from worker.interface import Sampling
from worker.prompt import llama_server_samplers
from worker.prompt.body_reader import Fields, Json, parse_setting, to_integer
from worker.protocol.dialects.generation_fields import MAX_BIASED, MAX_BIASES, MAX_STOPS, SAMPLING, TUNING
from worker.protocol.exits import Exit

Encode = Callable[[str], Sequence[int]]
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
_CHECKPOINT_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Defaults:
    """Where a request says nothing: values of `Sampling` by name, and stop strings."""

    tuning: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()


def defaults(preset: str, checkpoint: Mapping[str, Any]) -> Defaults:
    """What `preset` (the JSON object of `Serve.sampling`) and `checkpoint` (generation_config.json) state.

    Raises StartError for a preset that no request could state either. Values of the checkpoint outside the ranges of
    this API are passed over: its author wrote them for another program.
    """
    values = parse_setting(preset)
    if values is None:
        raise StartError("sampling: must be a JSON object", Exit.USAGE)
    unknown = sorted(set(values) - set(_PRESET_KEYS))
    if unknown:
        raise StartError(f"sampling: unknown key {unknown[0]!r}; known: {', '.join(_PRESET_KEYS)}", Exit.USAGE)
    fields = Fields({_PRESET_KEYS[key]: value for key, value in values.items()}, SAMPLING)
    try:
        return Defaults({**_of_checkpoint(checkpoint), **_tuning(fields)}, tuple(read_stop(fields, "stop") or ()))
    except InvalidValue as error:
        raise StartError(f"sampling: {error.message}", Exit.USAGE) from None


def _of_checkpoint(config: Mapping[str, Any]) -> Json:
    """What generation_config.json means: `do_sample: false`, where stated, is greedy, and its other knobs rest."""
    tuning: Json = {}
    for key in _CHECKPOINT_KEYS:
        try:
            tuning.update(_tuning(Fields({key: config.get(key)}, TUNING)))
        except InvalidValue:
            continue
    if config.get("do_sample") is False:
        tuning = {key: value for key, value in tuning.items() if key == "repetition_penalty"}
        tuning["temperature"] = 0.0
    return tuning


def read(
    fields: Fields,
    defaults: Defaults,
    *,
    vocab_size: int,
    logprobs: int | None,
    seed: int | None,
    encode: Encode | None = None,
) -> tuple[Sampling, tuple[str, ...]]:
    """The request's sampling and its stop strings; raises InvalidValue naming the field.

    `logprobs`: how many alternatives to report, as each dialect spells that in its own way; `seed`: where the request
    has none. A request's seed of -1 asks for another one each time, as in llama-server. `encode`: a text's tokens, for
    biases that are stated by text; None: they cannot be.
    """
    stated = fields.integer("seed")
    stop = read_stop(fields, "stop")
    sampling = Sampling(
        **llama_server_samplers.read(fields, {**defaults.tuning, **_tuning(fields)}),
        logit_bias=_logit_bias(fields.take("logit_bias"), vocab_size, encode),
        seed=seed if stated is None else None if stated == -1 else stated,
        min_tokens=fields.integer("min_tokens") or 0,
        ignore_eos=fields.flag("ignore_eos") or False,
        logprobs=logprobs,
    )
    return sampling, defaults.stop if stop is None else tuple(stop)


def _tuning(fields: Fields) -> Json:
    """The knobs that `fields` state, by their name in Sampling."""
    top_k = fields.integer("top_k")
    top_p = fields.number("top_p")
    penalty = fields.number("repetition_penalty")
    same = fields.number("repeat_penalty")
    if penalty is not None and same is not None and penalty != same:
        raise InvalidValue(
            "repetition_penalty and repeat_penalty mean the same but differ; state one", param="repeat_penalty"
        )
    stated = {
        "temperature": fields.number("temperature"),
        "top_k": None if top_k is None else max(top_k, 0),
        # nothing reaches a probability of 0, but the likeliest token alone reaches any tiny one
        "top_p": None if top_p is None else max(top_p, 1e-6),
        "min_p": fields.number("min_p"),
        "repetition_penalty": same if penalty is None else penalty,
        "repeat_last_n": fields.integer("repeat_last_n"),
        "presence_penalty": fields.number("presence_penalty"),
        "frequency_penalty": fields.number("frequency_penalty"),
    }
    return {name: value for name, value in stated.items() if value is not None}


def read_stop(fields: Fields, *names: str) -> list[str] | None:
    """The stop strings of the first of `names` that is stated; each of them must be right."""
    found = [(name, stated) for name in names if (stated := fields.take(name)) is not None]
    lists = [[stated] if isinstance(stated, str) else stated for _, stated in found]
    for (name, _), stops in zip(found, lists, strict=True):
        if (
            not isinstance(stops, list)
            or len(stops) > MAX_STOPS
            or not all(isinstance(stop, str) and stop for stop in stops)
        ):
            where = fields.path + name
            raise InvalidValue(
                f"{where} must be a string or up to {MAX_STOPS} strings, none of them empty", param=where
            )
    return lists[0] if lists else None


def _to_token(key: str) -> int | None:
    return int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else None


def _logit_bias(value: Any, vocab_size: int, encode: Encode | None) -> dict[int, float]:
    """Biases by token id, from `{"id or text": bias}` or `[[id or text, bias], ...]`; a bias of false bans, as in
    llama-server."""
    if value is None:
        return {}
    if isinstance(value, dict):
        pairs: list[Any] = [[key if (id := _to_token(key)) is None else id, bias] for key, bias in value.items()]
    else:
        pairs = value if isinstance(value, list) else [None]
    if len(pairs) > MAX_BIASES:
        raise InvalidValue(f"logit_bias must have at most {MAX_BIASES} entries", param="logit_bias")
    biases: dict[int, float] = {}
    for pair in pairs:
        token, bias = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
        if isinstance(token, str) and encode is not None and 0 < len(token) <= MAX_BIASED:
            ids: Sequence[int | None] = encode(token)
        else:
            ids = [to_integer(token)]
        number: Any = -100 if bias is False else bias
        is_number = type(number) in (int, float)
        if not all(id is not None and 0 <= id < vocab_size for id in ids) or not is_number or not -100 <= number <= 100:
            raise InvalidValue(
                "logit_bias must map token ids of this model to numbers between -100 and 100", param="logit_bias"
            )
        biases.update((id, float(number)) for id in ids if id is not None)
    return biases
