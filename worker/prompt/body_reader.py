"""Typed, strict reading of the fields of a JSON body, and a report of the fields that were not read.

Error messages name a field and its range but never its value, so bodies are not echoed.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import orjson

from worker.errors import InvalidJson, InvalidValue, UnknownField, UnsupportedField
from worker.protocol import json_faults
from worker.protocol.dialects.generation_fields import NEUTRAL, NO_OPS
from worker.protocol.routes import MAX_IGNORED_FIELDS
from worker.protocol.schema import Body, Schema, allows, kinds, ranges
from worker.protocol.unknown_fields import unknown_paths

Json = dict[str, Any]
Value = TypeVar("Value")
Ranges = list[tuple[float, float | None]]
MAX_LEVELS = 200
# Maximum levels that orjson serializes. The difference is for what answers and grammars put around a client's value.
_LEVELS_WRITTEN = 254


def parse(body: bytes | bytearray) -> Json:
    """Parse the JSON object in `body`. Raise InvalidJson, and InvalidValue for too many values.

    orjson is strict: it rejects NaN, infinities, invalid UTF-8 and lone surrogates. It parses 1024 levels but
    serializes 254, and client input is serialized again in answers that repeat it and in grammars.

    Do not call it in another thread: orjson keeps the interpreter lock there, too, and glibc keeps the memory that such
    a thread allocated (`malloc_trim` does not trim the top of its arena).
    """
    if fault := json_faults.too_many_values(body):
        raise InvalidValue(fault)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidJson(f"the request body is not valid JSON: {json_faults.describe(body, str(error))}") from None
    if not isinstance(value, dict):
        raise InvalidJson("the request body must be a JSON object")
    if body.count(b"[") + body.count(b"{") > MAX_LEVELS and is_deep(value):
        raise InvalidJson(f"the request body is nested too deeply: at most {MAX_LEVELS} levels are supported")
    return value


def is_deep(value: Any) -> bool:
    """Check whether a parsed JSON value has more than MAX_LEVELS levels."""
    try:
        for _ in range(_LEVELS_WRITTEN - MAX_LEVELS):
            value = [value]
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return True
    return False


def parse_setting(text: str) -> Json | None:
    """Parse the JSON object in an option's text; an empty text is an empty object. Return None for anything else."""
    try:
        value = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


class BodyFields:
    """Typed access to the fields of one object. Each reader returns None for an absent or null field.

    A boolean is not a number and neither is a numeric string. `40.0` is an integer, because JSON has only one number
    type.
    """

    def __init__(self, body: Mapping[str, Any], table: Body, *, path: str = ""):
        """`table`: the schema of the supported fields; all of them must be read before `check_unknown`.

        `path`: prefix of field names in messages, such as `stream_options.`.
        """
        self._body = body
        self._table = table
        self.path = path
        self.known: set[str] = set()  # names that were read or skipped
        self._unused: list[str] = []
        self._checked_objects: set[str] = set()  # nested objects whose own fields were checked
        self._parent: tuple[BodyFields, str] | None = None  # the enclosing object and the name of this object in it

    def within(self, name: str, table: Body) -> "BodyFields":
        """Return the fields of the object in field `name`; an empty object if the field is absent."""
        found = BodyFields(self.mapping(name) or {}, table, path=f"{self.path}{name}.")
        found._parent = self, name
        return found

    def take(self, *names: str) -> Any:
        """Return the value of the first of `names` that is neither absent nor null. All of them count as known."""
        assert self._table.keys() >= set(names), f"{names} are missing in the schema of this call"
        self.known.update(names)
        return next((value for name in names if (value := self._body.get(name)) is not None), None)

    def _schema_of(self, name: str, kind: str) -> Schema:
        schema = self._table[name]
        assert kind in kinds(schema), f"{name} has types {kinds(schema)} in the schema but is read as {kind}"
        return schema

    def _typed(self, name: str, kind: str, type_: type[Value], expected: str) -> Value | None:
        """Read a value of one JSON type. `expected`: the type in words, for the error."""
        value = self.take(name)
        self._schema_of(name, kind)
        if value is not None and type(value) is not type_:
            raise self._invalid(name, expected)
        return value

    def _invalid(self, name: str, expected: str) -> InvalidValue:
        return InvalidValue(f"{self.path}{name} must be {expected}", param=self.path + name)

    def number(self, name: str) -> float | None:
        """Read a number within the ranges of the table."""
        value = self.take(name)
        if value is None:
            return None
        allowed = ranges(self._schema_of(name, "number"))
        if type(value) not in (int, float) or not _is_within(value, allowed):
            raise self._invalid(name, f"a number {_in_words(allowed)}")
        return float(value)

    def integer(self, name: str) -> int | None:
        """Read an integer within the ranges of the table."""
        value = self.take(name)
        allowed = ranges(self._schema_of(name, "integer"))
        if value is None:
            return None
        whole = to_integer(value)
        if whole is None or not _is_within(whole, allowed):
            raise self._invalid(name, f"an integer {_in_words(allowed)}")
        return whole

    def flag(self, name: str) -> bool | None:
        return self._typed(name, "boolean", bool, "true or false")

    def text(self, name: str) -> str | None:
        """Read a string of at most the characters in the table."""
        value, most = self._typed(name, "string", str, "a string"), self._table[name].get("maxLength")
        if value is not None and most is not None and len(value) > most:
            raise self._invalid(name, f"a string of at most {most} characters")
        return value

    def mapping(self, name: str) -> Json | None:
        return self._typed(name, "object", dict, "an object")

    def sequence(self, name: str) -> list[Any] | None:
        return self._typed(name, "array", list, "an array")

    def choice(self, name: str) -> str | None:
        """Read one of the values in the table."""
        value = self.text(name)
        allowed = [known for known in self._table[name]["enum"] if known is not None]
        if value is not None and value not in allowed:
            raise self._invalid(name, f"one of {', '.join(allowed)}")
        return value

    def checked(self, name: str) -> Any:
        """Return the value of a field that becomes part of another dialect's body. It is validated here, so that errors
        use the name that the client sent."""
        match sorted(kinds(self._table[name]) - {"null"}):
            case ["integer"]:
                return self.integer(name)
            case ["number"]:
                return self.number(name)
            case ["boolean"]:
                return self.flag(name)
        return self.take(name)

    def any_of(self, read: Callable[[str], Value | None], *names: str) -> Value | None:
        """Read fields that mean the same. Raise InvalidValue if they differ."""
        given = {name: value for name in names if (value := read(name)) is not None}
        first = next(iter(given.values()), None)
        if any(value != first for value in given.values()):
            message = f"{' and '.join(given)} mean the same but differ; send one of them"
            raise InvalidValue(message, param=self.path + list(given)[-1])
        return first

    def refuse(self, name: str, message: str, *, extra: Json | None = None) -> None:
        """Raise UnsupportedField with `message` unless the field is absent, null or has a value that
        the table accepts."""
        value = self.take(name)
        if value is not None and not allows(self._table[name], value):
            raise UnsupportedField(message, param=self.path + name, extra=extra)

    def skip(self, names: Collection[str]) -> None:
        """Count `names` as known without reading them."""
        self.known.update(names)

    def mark_unused(self, name: str) -> None:
        """Report a field that was read but has no effect for this model."""
        self._unused.append(name)

    def check_unknown(self, *, strict: bool) -> tuple[str, ...]:
        """Return the names of ignored fields, with paths for nested ones. Call it after all fields were read.

        Raise UnsupportedField for a known field that is not supported, and, if `strict`, UnknownField for an unknown
        one.
        """
        unread = self._table.keys() - self.known
        assert not unread, f"{sorted(unread)} are in the schema of this call but are not read"
        if self._parent is not None:
            parent, name = self._parent
            parent._checked_objects.add(name)
        unknown_names = []
        for name, value in self._body.items():
            if value is None or name in self.known or name in NO_OPS:
                continue
            neutral = NEUTRAL.get(name)
            if neutral is None:
                unknown_names.append(name)
            elif not allows(neutral, value):
                reason = str(neutral["description"]).removesuffix(".")
                raise UnsupportedField(f"{name} is {reason[0].lower()}{reason[1:]}", param=self.path + name)
        unknown_names += unknown_paths(self._table, self._body, but=self._checked_objects)
        if strict and unknown_names:
            raise UnknownField(
                "this field is unknown; leave it out, or turn strict-fields off to have it ignored",
                param=unknown_names[0][:128],
            )
        names = list(dict.fromkeys([*self._unused, *unknown_names]))
        # The answer keeps the names until it ends. These are enough for its header.
        return tuple(name[:128] for name in names[: MAX_IGNORED_FIELDS + 1])


def _is_within(value: float, ranges: Ranges) -> bool:
    return any(low <= value and (high is None or value <= high) for low, high in ranges)


def _in_words(ranges: Ranges) -> str:
    return ", or ".join(
        f"of at least {low}" if high is None else f"{low}" if low == high else f"between {low} and {high}"
        for low, high in ranges
    )


def to_integer(value: Any) -> int | None:
    """Return a JSON number as an integer; None if it is not one."""
    if type(value) is int:
        return value
    if type(value) is float and value.is_integer() and abs(value) <= 2**53:
        return int(value)
    return None
