"""The words in which answers are told: JSON Schema of usual kinds, and what is said of a call. Law: PURE."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
ANY_OBJECT: Schema = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One call's success."""

    body: Schema | None = None
    """Of an answer in one piece; None: it has no JSON."""
    frame: Schema | None = None
    """What stands behind `data:`, or in one line, of a stream; None: it does not stream."""
    events: Schema | None = None
    """The same of a stream of OpenAI's, where a body of theirs gets one at a path that is not."""
    about: str = ""
    media: str = "application/json"
    has_page: bool = False
    """Browsers, which ask for text/html, get a page in its place."""
    further: Mapping[int, Schema] = field(default_factory=dict)
    """Answers that are no success and no error object either, by status."""


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def const(value: Any) -> Schema:
    return {"const": value}


def enum(*values: Any) -> Schema:
    return {"enum": list(values)}


def maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def several(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def by_name(schema: Schema) -> Schema:
    """An object whose members are named by what they are about."""
    return {"type": "object", "additionalProperties": schema}


def shape(always: Mapping[str, Schema], sometimes: Mapping[str, Schema] | None = None) -> dict[str, Any]:
    """An object with all members of `always`, and perhaps some of `sometimes`."""
    return {"type": "object", "properties": {**always, **(sometimes or {})}, "required": list(always)}
