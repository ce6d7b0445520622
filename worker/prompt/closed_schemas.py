"""Objects of a JSON schema that list their members are closed: a model adds none of its own.

JSON Schema lets an object have any further members unless its schema says otherwise; those who write schemas for
models mean the ones that they list, and other servers write no others. What is left is still what the schema takes:
less of it, never more.

Law: PURE; a schema that is given is not changed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_WITHIN = ("items", "additionalProperties")
_LISTS = ("prefixItems", *_ALTERNATIVES)
_OF_MEMBERS = (
    "additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties",
    "dependentRequired", "const", "enum",
)  # fmt: skip
"""What says something of further members already, or needs some."""
_ENTANGLED = ("not", "if", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef")


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` in which objects that list their properties, and say nothing of others, have no others.

    As it is where two schemas may hold one object together, or one's refusal is another's consent: what the one does
    not list the other may need.
    """
    if any(map(_is_entangled, _each(schema))):
        return schema
    copy: dict[str, Any] = orjson.loads(orjson.dumps(schema))
    for each in _each(copy):
        if _can_close(each):
            each["additionalProperties"] = False
    return copy


def _is_entangled(schema: Mapping[str, Any]) -> bool:
    if any(name in schema for name in _ENTANGLED):
        return True
    others = [name for name in (*_ALTERNATIVES, "$ref") if name in schema]
    if len(others) > 1 or (others and ("properties" in schema or "required" in schema)):
        return True
    if "oneOf" in schema and "discriminator" not in schema:
        return True  # a value that only one closed alternative takes may be taken by two open ones
    together = schema.get("allOf")
    return isinstance(together, list) and len(together) > 1


def _can_close(schema: Mapping[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    return not any(name in schema for name in _OF_MEMBERS) and all(
        isinstance(name, str) and name in properties for name in required
    )


def _each(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`schema` and all that lie within it, without recursion: how deep they lie is the client's choice."""
    waiting: list[Any] = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting.extend(_within(one))


def _within(schema: Mapping[str, Any]) -> Iterator[Any]:
    for name in _BY_NAME:
        if isinstance(named := schema.get(name), dict):
            yield from named.values()
    for name in _LISTS:
        if isinstance(listed := schema.get(name), list):
            yield from listed
    for name in _WITHIN:
        if isinstance(held := schema.get(name), list):
            yield from held
        else:
            yield held
