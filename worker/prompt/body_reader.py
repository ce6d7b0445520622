"""The fields of one JSON body: each read once, strictly, and the rest reported.

Law: PURE, values only. Messages name a field and its range, never its value: bodies are not echoed.
"""

from collections.abc import Collection, Mapping
from typing import Any

import orjson

from worker.errors import InvalidJson, InvalidValue, UnknownField, UnsupportedField
from worker.protocol.dialects.generation_fields import NEUTRAL, NO_OPS
from worker.protocol.schema import Body, Schema, allows, bounds, kinds
from worker.protocol.unknown_fields import unknown

Json = dict[str, Any]
MAX_LEVELS = 200
_LEVELS_WRITTEN = 254
"""By orjson; the rest is for what answers and grammars put around."""


def parse(body: bytes) -> Json:
    """The JSON object in `body`; raises InvalidJson.

    orjson is strict: it refuses NaN, infinities, bad UTF-8 and lone surrogates. It reads 1024 levels but writes 254,
    and what a client sends is written again: in answers that repeat it, and in grammars.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidJson(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidJson("the request body must be a JSON object")
    if body.count(b"[") + body.count(b"{") > MAX_LEVELS and is_deep(value):
        raise InvalidJson(f"the request body is nested too deeply: {MAX_LEVELS} levels are read")
    return value


def is_deep(value: Any) -> bool:
    """Whether what JSON was read as has more than MAX_LEVELS levels."""
    try:
        for _ in range(_LEVELS_WRITTEN - MAX_LEVELS):
            value = [value]
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return True
    return False


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

    def __init__(self, body: Mapping[str, Any], table: Body | None = None, *, path: str = ""):
        """`table`: the fields that may be read, with their types and ranges, and all that must be before `settle`;
        None: any, and readers are told what they take. `path`: what stands before a field's name in messages,
        `stream_options.` say."""
        self._body = body
        self._table = table
        self.path = path
        self.known: set[str] = set()
        """Names that somebody has asked for."""
        self._unused: list[str] = []
        self._settled: set[str] = set()
        """Objects whose own fields have been settled."""
        self._above: tuple[Fields, str] | None = None
        """What this is an object of, and by what name."""

    def within(self, name: str, table: Body) -> "Fields":
        """The fields of the object that field `name` holds; of an empty one if it holds none."""
        found = Fields(self.mapping(name) or {}, table, path=f"{self.path}{name}.")
        found._above = self, name
        return found

    def take(self, *names: str) -> Any:
        """The value of the first of `names` that is neither absent nor null; all of them count as known."""
        assert self._table is None or self._table.keys() >= set(names), f"{names} are in no table of this call's fields"
        self.known.update(names)
        return next((value for name in names if (value := self._body.get(name)) is not None), None)

    def _stated(self, name: str, kind: str) -> Schema:
        """The schema of a field of this kind; where there is no table, one that says nothing."""
        schema = self._table[name] if self._table is not None else {"type": kind}
        assert kind in kinds(schema), f"{name} is stated to be one of {kinds(schema)}, and read as {kind}"
        return schema

    def number(self, name: str, low: float | None = None, high: float | None = None) -> float | None:
        """Within the bounds of the table, or where there is none `low` and `high`."""
        value = self.take(name)
        stated = self._stated(name, "number")
        least, most = bounds(stated)
        low, high = least if low is None else low, most if high is None else high
        assert low is not None
        assert high is not None
        if value is not None and (type(value) not in (int, float) or not low <= value <= high):
            raise InvalidValue(
                f"{self.path}{name} must be a number between {low:g} and {high:g}", param=self.path + name
            )
        return None if value is None else float(value)

    def integer(self, name: str, low: int | None = None, high: int | None = None) -> int | None:
        """Within the bounds of the table, or where there is none `low` and `high`; `high` may be lower than the
        table's, where only the model knows."""
        value = self.take(name)
        stated = self._stated(name, "integer")
        least, most = bounds(stated)
        lowest, highest = least if low is None else low, most if high is None else high
        assert lowest is not None
        if value is None:
            return None
        whole = to_integer(value)
        if whole is None or whole < lowest or (highest is not None and whole > highest):
            within = f"of at least {lowest}" if highest is None else f"between {lowest} and {highest}"
            raise InvalidValue(f"{self.path}{name} must be an integer {within}", param=self.path + name)
        return whole

    def flag(self, name: str) -> bool | None:
        value = self.take(name)
        self._stated(name, "boolean")
        if value is not None and type(value) is not bool:
            raise InvalidValue(f"{self.path}{name} must be true or false", param=self.path + name)
        return value

    def text(self, name: str) -> str | None:
        value = self.take(name)
        self._stated(name, "string")
        if value is not None and not isinstance(value, str):
            raise InvalidValue(f"{self.path}{name} must be a string", param=self.path + name)
        return value

    def choice(self, name: str, allowed: Collection[str] = ()) -> str | None:
        """One of the table's, or where there is none of `allowed`."""
        value = self.text(name)
        allowed = allowed or [each for each in self._stated(name, "string")["enum"] if each is not None]
        if value is not None and value not in allowed:
            raise InvalidValue(f"{self.path}{name} must be one of {', '.join(allowed)}", param=self.path + name)
        return value

    def mapping(self, name: str) -> Json | None:
        value = self.take(name)
        self._stated(name, "object")
        if value is not None and not isinstance(value, dict):
            raise InvalidValue(f"{self.path}{name} must be an object", param=self.path + name)
        return value

    def sequence(self, name: str) -> list[Any] | None:
        value = self.take(name)
        self._stated(name, "array")
        if value is not None and not isinstance(value, list):
            raise InvalidValue(f"{self.path}{name} must be an array", param=self.path + name)
        return value

    def handed(self, name: str) -> Any:
        """The value of a field that goes on as part of another body: checked here, so that it is refused by the name
        that the client knows."""
        assert self._table is not None, "only a table says what a field takes"
        match sorted(kinds(self._table[name]) - {"null"}):
            case ["integer"]:
                self.integer(name)
            case ["number"]:
                self.number(name)
            case ["boolean"]:
                self.flag(name)
        return self.take(name)

    def refuse(self, name: str, message: str, *, extra: Json | None = None) -> None:
        """Raise UnsupportedField with `message` unless the field is absent, null or of a value that the table takes."""
        value = self.take(name)
        assert self._table is not None, "only a table says what makes no difference"
        if value is not None and not allows(self._table[name], value):
            raise UnsupportedField(message, param=self.path + name, extra=extra)

    def skip(self, names: Collection[str]) -> None:
        """Count `names` as known without looking at them."""
        self.known.update(names)

    def mark_unused(self, name: str) -> None:
        """Report a field that was read but makes no difference to this model."""
        self._unused.append(name)

    def settle(self, *, strict: bool) -> tuple[str, ...]:
        """The names to report as ignored, those inside of objects with their paths; to be called once all has been
        read.

        Raises UnsupportedField for a field that means something nobody here can do, and, if `strict`, UnknownField for
        one that nobody knows.
        """
        left = () if self._table is None else self._table.keys() - self.known
        assert not left, f"{sorted(left)} are in the table of this call's fields, and nobody reads them"
        if self._above is not None:
            above, name = self._above
            above._settled.add(name)
        strange = []
        for name, value in self._body.items():
            if value is None or name in self.known or name in NO_OPS:
                continue
            neutral = NEUTRAL.get(name)
            if neutral is None:
                strange.append(name)
            elif not allows(neutral, value):
                raise UnsupportedField(f"{name} is not supported; leave it out", param=self.path + name)
        if self._table is not None:
            strange += unknown(self._table, self._body, but=self._settled)
        if strict and strange:
            raise UnknownField(
                "this field is unknown; leave it out, or serve without strict-fields to have it ignored",
                param=strange[0][:128],
            )
        return (*self._unused, *strange)


def to_integer(value: Any) -> int | None:
    """The integer that a JSON number is; None for all that is none."""
    if type(value) is int:
        return value
    if type(value) is float and value.is_integer() and abs(value) <= 2**53:
        return int(value)
    return None
