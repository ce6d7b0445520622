"""Builders of JSON Schemas for request fields and responses, and queries of a schema.

The modules of `dialects` import this one as `s`: nearly every line of their tables uses a builder.

A request field whose schema does not allow null is required. In all other fields null has the same meaning as absence.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

Schema = Mapping[str, Any]
# Fields by name.
Body = Mapping[str, Schema]

ANYTHING: Schema = {}
TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
ANY_OBJECT: Schema = {"type": "object", "additionalProperties": True}


# Request fields. All but `required` ones allow null.


def or_null(schema: Schema) -> Schema:
    if "type" in schema and "enum" not in schema:
        kinds = [schema["type"]] if isinstance(schema["type"], str) else list(schema["type"])
        return {**schema, "type": [*kinds, "null"]}
    return any_of(schema, NULL)


def integer(low: int | None = None, high: int | None = None, about: str = "") -> Schema:
    return or_null({"type": "integer", **_given(minimum=low, maximum=high, description=about)})


def number(low: float, high: float, about: str = "") -> Schema:
    return or_null({"type": "number", **_given(minimum=low, maximum=high, description=about)})


def flag(about: str = "") -> Schema:
    return or_null({"type": "boolean", **_given(description=about)})


def text(about: str = "", *, most: int | None = None) -> Schema:
    """A string of at most `most` characters; None: no bound."""
    return or_null({"type": "string", **_given(maxLength=most, description=about)})


def choice(values: Collection[str], about: str = "") -> Schema:
    return {"enum": [*values, None], "type": ["string", "null"], **_given(description=about)}


def array(items: Schema, *, most: int | None = None, least: int | None = None, about: str = "") -> Schema:
    return or_null({"type": "array", "items": items, **_given(minItems=least, maxItems=most, description=about)})


def record(fields: Body, about: str = "") -> Schema:
    """An object; fields whose schema has no null are required."""
    return or_null({**described(fields), **_given(description=about)})


def one_of(values: Collection[Any], about: str = "") -> Schema:
    """Exactly these values, or null: for a field of which no other value is supported."""
    return {"enum": [None, *values], **_given(description=about)}


def required(schema: Schema) -> Schema:
    """Return the schema without null, so that the field is required."""
    kinds = [kind for kind in schema["type"] if kind != "null"]
    values = {"enum": [value for value in schema["enum"] if value is not None]} if "enum" in schema else {}
    return {**schema, "type": kinds[0] if len(kinds) == 1 else kinds, **values}


def described(fields: Body, *also: str, about: str = "") -> Schema:
    """Return the schema of an object with these fields. Further members are allowed.

    `also`: fields that are required, beside those whose schema has no null.
    """
    needed = [name for name, schema in fields.items() if name in also or not allows_null(schema)]
    stated = _given(required=needed or None, description=about)
    return {"type": "object", "properties": dict(fields), **stated}


def tagged(type: str, fields: Body, about: str = "") -> Schema:
    """One of several kinds of object in the same place, which the member `type` distinguishes."""
    return described({"type": const(type), **fields}, "type", about=about)


def allows_null(schema: Schema) -> bool:
    if "anyOf" in schema:
        return any(map(allows_null, schema["anyOf"]))
    if "enum" in schema:
        return None in schema["enum"]
    if "not" in schema and not schema["not"]:
        return True  # no value is allowed, so the field must be absent
    return "type" not in schema or "null" in schema["type"]


def allows(schema: Schema, value: Any) -> bool:
    """True if a schema of `NEUTRAL` or of `one_of` allows `value`. Booleans are not numbers."""
    if "enum" in schema:
        return any(_same(value, allowed) for allowed in schema["enum"])
    if "maximum" in schema:
        return type(value) in (int, float) and bool(value <= schema["maximum"])
    return True


def kinds(schema: Schema) -> set[str]:
    """Return the names of the types that the schema allows."""
    named = schema.get("type", ())
    own = {named} if isinstance(named, str) else set(named)
    return own.union(*(kinds(option) for option in schema.get("anyOf", ())))


def ranges(schema: Schema) -> list[tuple[float, float | None]]:
    """Return the smallest and the largest number of each range that the schema of a request field allows; None: no
    bound. A field that takes numbers has a minimum."""
    if "anyOf" in schema:
        return [each for option in schema["anyOf"] for each in ranges(option)]
    if "const" in schema or "enum" in schema:
        values = (schema.get("const"), *schema.get("enum", ()))
        return [(value, value) for value in values if type(value) in (int, float)]
    return [(schema["minimum"], schema.get("maximum"))] if kinds(schema) & {"integer", "number"} else []


def _same(left: Any, right: Any) -> bool:
    if type(left) in (int, float) and type(right) in (int, float):
        return bool(left == right)
    return type(left) is type(right) and bool(left == right)


def _given(**keywords: Any) -> dict[str, Any]:
    """The keywords of a schema that have a value."""
    return {name: value for name, value in keywords.items() if value not in (None, "")}


# Responses


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSchema:
    """The successful response of a route."""

    body: Schema | None = None  # the JSON body of a response that is not a stream; None: no body
    frame: Schema | None = None  # the JSON after `data:`, or of one line, of a stream; None: no stream
    events: Schema | None = None  # the frame for requests in OpenAI's format at a path of another dialect
    media: str = "application/json"
    has_page: bool = False  # clients that accept text/html get a page instead
    # Responses that are neither a success nor an error object, by status.
    further: Mapping[int, Schema] = field(default_factory=dict)


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def any_of(*schemas: Schema, about: str = "") -> Schema:
    return {"anyOf": list(schemas), **_given(description=about)}


def const(value: Any) -> Schema:
    return {"const": value}


def enum(*values: Any) -> Schema:
    return {"enum": list(values)}


def several(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def by_name(schema: Schema) -> Schema:
    """An object with arbitrary member names, whose values match `schema`."""
    return {"type": "object", "additionalProperties": schema}


def members(schema: Schema, *names: str) -> dict[str, Schema]:
    """Several members with the same schema."""
    return dict.fromkeys(names, schema)


def shape(always: Mapping[str, Schema], sometimes: Mapping[str, Schema] | None = None) -> dict[str, Any]:
    """An object that has all members of `always` and may have those of `sometimes`."""
    return {"type": "object", "properties": {**always, **(sometimes or {})}, "required": list(always)}
