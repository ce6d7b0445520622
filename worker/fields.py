"""The fields of one JSON body: each read once, strictly, and the rest reported.

Law: PURE, values only. Messages name a field and its range, never its value: bodies are not echoed.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import orjson

from worker.errors import InvalidJson, InvalidValue, UnknownField, UnsupportedField

Json = dict[str, Any]

NO_OPS = frozenset({
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "moderation", "id_slot", "cache_prompt", "n_keep",
})  # fmt: skip
"""Nothing here depends on them, so any value is as good as none."""


def _is_one_of(*neutral: Any) -> Callable[[Any], bool]:
    return lambda value: type(value) is not bool and value in neutral


def _is_off(value: Any) -> bool:
    return type(value) in (int, float) and value <= 0


def _is_anything(value: Any) -> bool:
    """For fields that only tune a step whose switch, another field, is refused unless it is off."""
    return True


_NEUTRAL: Mapping[str, Callable[[Any], bool]] = {
    "audio": _is_one_of(),
    "modalities": lambda value: value in ([], ["text"]),
    "web_search_options": _is_one_of(),
    "prediction": _is_one_of(),
    "store": lambda value: value is False,
    "functions": lambda value: value == [],
    "function_call": _is_one_of("none", "auto"),
    "mirostat": _is_one_of(0),
    "mirostat_tau": _is_anything,
    "mirostat_eta": _is_anything,
    "xtc_probability": _is_one_of(0),
    "xtc_threshold": _is_anything,
    "dry_multiplier": _is_one_of(0),
    "dry_base": _is_anything,
    "dry_allowed_length": _is_anything,
    "dry_penalty_last_n": _is_anything,
    "dry_sequence_breakers": _is_anything,
    "dynatemp_range": _is_one_of(0),
    "dynatemp_exponent": _is_anything,
    "typical_p": _is_one_of(1),
    "typ_p": _is_one_of(1),
    "top_n_sigma": _is_off,
    "samplers": lambda value: value in ([], ""),
    "t_max_predict_ms": _is_off,
}
"""Fields with a meaning that no engine of ours has, and the values with which that makes no difference."""


def parse(body: bytes) -> Json:
    """The JSON object in `body`; raises InvalidJson.

    orjson is strict: it refuses NaN, infinities, bad UTF-8, lone surrogates and more than 1024 levels.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidJson(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidJson("the request body must be a JSON object")
    return value


def parse_setting(text: str) -> Json | None:
    """The JSON object that an option holds, empty where it is; None if it holds none."""
    try:
        value = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


class Fields:
    """Typed reading of one object. Each reader returns None for a field that is absent or null.

    A boolean is no number and a numeric string is none either; `40.0` is an integer, as JSON knows only numbers.
    """

    def __init__(self, body: Mapping[str, Any], *, path: str = ""):
        """`path`: what stands before a field's name in messages, `stream_options.` say."""
        self._body = body
        self.path = path
        self.known: set[str] = set()
        """Names that somebody has asked for."""
        self._unused: list[str] = []

    def take(self, *names: str) -> Any:
        """The value of the first of `names` that is neither absent nor null; all of them count as known."""
        self.known.update(names)
        return next((value for name in names if (value := self._body.get(name)) is not None), None)

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.take(name)
        if value is not None and (type(value) not in (int, float) or not low <= value <= high):
            raise InvalidValue(
                f"{self.path}{name} must be a number between {low:g} and {high:g}", param=self.path + name
            )
        return None if value is None else float(value)

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        whole = to_integer(value)
        if whole is None or whole < low or (high is not None and whole > high):
            bounds = f"of at least {low}" if high is None else f"between {low} and {high}"
            raise InvalidValue(f"{self.path}{name} must be an integer {bounds}", param=self.path + name)
        return whole

    def flag(self, name: str) -> bool | None:
        value = self.take(name)
        if value is not None and type(value) is not bool:
            raise InvalidValue(f"{self.path}{name} must be true or false", param=self.path + name)
        return value

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise InvalidValue(f"{self.path}{name} must be a string", param=self.path + name)
        return value

    def choice(self, name: str, allowed: Collection[str]) -> str | None:
        value = self.text(name)
        if value is not None and value not in allowed:
            raise InvalidValue(f"{self.path}{name} must be one of {', '.join(allowed)}", param=self.path + name)
        return value

    def mapping(self, name: str) -> Json | None:
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise InvalidValue(f"{self.path}{name} must be an object", param=self.path + name)
        return value

    def sequence(self, name: str) -> list[Any] | None:
        value = self.take(name)
        if value is not None and not isinstance(value, list):
            raise InvalidValue(f"{self.path}{name} must be an array", param=self.path + name)
        return value

    def refuse(self, name: str, neutral: Sequence[Any], message: str) -> None:
        """Raise UnsupportedField with `message` unless the field is absent, null or one of the `neutral` values."""
        value = self.take(name)
        if value is not None and not any(type(value) is type(other) and value == other for other in neutral):
            raise UnsupportedField(message, param=self.path + name)

    def skip(self, names: Collection[str]) -> None:
        """Count `names` as known without looking at them."""
        self.known.update(names)

    def mark_unused(self, name: str) -> None:
        """Report a field that was read but makes no difference to this model."""
        self._unused.append(name)

    def settle(self, *, strict: bool) -> tuple[str, ...]:
        """The names to report as ignored; to be called once all has been read.

        Raises UnsupportedField for a field that means something nobody here can do, and, if `strict`, UnknownField for
        one that nobody knows.
        """
        unknown = []
        for name, value in self._body.items():
            if value is None or name in self.known or name in NO_OPS:
                continue
            is_neutral = _NEUTRAL.get(name)
            if is_neutral is None:
                unknown.append(name)
            elif not is_neutral(value):
                raise UnsupportedField(f"{name} is not supported; leave it out", param=self.path + name)
        if strict and unknown:
            raise UnknownField(
                "this field is unknown; leave it out, or serve without strict-fields to have it ignored",
                param=unknown[0][:128],
            )
        return (*self._unused, *unknown)


def to_integer(value: Any) -> int | None:
    """The integer that a JSON number is; None for all that is none."""
    if type(value) is int:
        return value
    if type(value) is float and value.is_integer() and abs(value) <= 2**53:
        return int(value)
    return None
