"""What one field takes, as JSON Schema: how such schemas are made, and what can be asked of them.

Law: standard library only; the router reads this through `worker.routes`. A field whose schema has no null must be
there; everywhere else null is as good as absent.
"""

from collections.abc import Collection, Mapping
from typing import Any

Schema = Mapping[str, Any]
Body = Mapping[str, Schema]
"""Fields by name."""

ANYTHING: Schema = {}


def or_null(schema: Schema) -> Schema:
    if "type" in schema:
        kinds = [schema["type"]] if isinstance(schema["type"], str) else list(schema["type"])
        return {**schema, "type": [*kinds, "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def integer(low: int | None = None, high: int | None = None, about: str = "") -> Schema:
    return or_null({"type": "integer", **_bounds(low, high), **_about(about)})


def number(low: float, high: float, about: str = "") -> Schema:
    return or_null({"type": "number", **_bounds(low, high), **_about(about)})


def flag(about: str = "") -> Schema:
    return or_null({"type": "boolean", **_about(about)})


def text(about: str = "") -> Schema:
    return or_null({"type": "string", **_about(about)})


def choice(values: Collection[str], about: str = "") -> Schema:
    return {"enum": [*values, None], "type": ["string", "null"], **_about(about)}


def array(items: Schema, *, most: int | None = None, least: int | None = None, about: str = "") -> Schema:
    return or_null({"type": "array", "items": items, **_sizes(least, most), **_about(about)})


def record(
    fields: Body,
    about: str = "",
) -> Schema:
    """An object; the fields that must be there are those whose schema has no null."""
    return or_null({**described(fields), **_about(about)})


def one_of(values: Collection[Any], about: str = "") -> Schema:
    """Exactly these values, or nothing: a field that means something nobody here can do."""
    return {"enum": [None, *values], **_about(about)}


def required(schema: Schema) -> Schema:
    """The same, which must be there."""
    kinds = [kind for kind in schema["type"] if kind != "null"]
    values = {"enum": [value for value in schema["enum"] if value is not None]} if "enum" in schema else {}
    return {**schema, "type": kinds[0] if len(kinds) == 1 else kinds, **values}


def described(fields: Body) -> Schema:
    """The JSON Schema of an object with these fields; what else it holds is anybody's."""
    needed = [name for name, schema in fields.items() if not allows_null(schema)]
    return {"type": "object", "properties": dict(fields), **({"required": needed} if needed else {})}


def allows_null(schema: Schema) -> bool:
    if "anyOf" in schema:
        return any(map(allows_null, schema["anyOf"]))
    if "enum" in schema:
        return None in schema["enum"]
    if "not" in schema and not schema["not"]:
        return True  # nothing may stand there, so it may be left out
    return "type" not in schema or "null" in schema["type"]


def allows(schema: Schema, value: Any) -> bool:
    """Whether `value` is one that a schema of `NEUTRAL` or of `one_of` takes: booleans are no numbers."""
    if "enum" in schema:
        return any(_same(value, each) for each in schema["enum"])
    if "maximum" in schema:
        return type(value) in (int, float) and bool(value <= schema["maximum"])
    return True


def kinds(schema: Schema) -> set[str]:
    """The types of the values that it takes, as far as it names them."""
    named = schema.get("type", ())
    own = {named} if isinstance(named, str) else set(named)
    return own.union(*(kinds(each) for each in schema.get("anyOf", ())))


def bounds(schema: Schema) -> tuple[float | None, float | None]:
    """The least and the largest number that it takes; None: no bound."""
    if "anyOf" not in schema:
        numbers = [value for value in (schema.get("const"), *schema.get("enum", ())) if type(value) in (int, float)]
        return (min(numbers), max(numbers)) if numbers else (schema.get("minimum"), schema.get("maximum"))
    each = [bounds(one) for one in schema["anyOf"] if one.get("type") != "null"]
    lows, highs = [low for low, _ in each if low is not None], [high for _, high in each]
    return min(lows, default=None), None if None in highs else max(high for high in highs if high is not None)


def _same(one: Any, other: Any) -> bool:
    if type(one) in (int, float) and type(other) in (int, float):
        return bool(one == other)
    return type(one) is type(other) and bool(one == other)


def _bounds(low: float | None, high: float | None) -> dict[str, float]:
    stated = {"minimum": low, "maximum": high}
    return {name: value for name, value in stated.items() if value is not None}


def _sizes(least: int | None, most: int | None) -> dict[str, int]:
    stated = {"minItems": least, "maxItems": most}
    return {name: value for name, value in stated.items() if value is not None}


def _about(text: str) -> dict[str, str]:
    return {"description": text} if text else {}
