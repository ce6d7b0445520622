"""Closing of JSON schemas: objects that list their properties get no others, unless the schema prevents it."""

import copy
from typing import Any

import pytest

from worker.prompt.guided_decoding import close_schema

TEXT = {"type": "string"}
LISTED = {"type": "object", "properties": {"a": TEXT}}
SHUT = {**LISTED, "additionalProperties": False}


@pytest.mark.parametrize(
    ("stated", "meant"),
    [
        (LISTED, SHUT),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({"type": "array", "items": LISTED}, {"type": "array", "items": SHUT}),
        ({"type": "array", "prefixItems": [LISTED]}, {"type": "array", "prefixItems": [SHUT]}),
        ({"anyOf": [LISTED, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"oneOf": [LISTED], "discriminator": {}}, {"oneOf": [SHUT], "discriminator": {}}),
        ({"$ref": "#/$defs/x", "$defs": {"x": LISTED}}, {"$ref": "#/$defs/x", "$defs": {"x": SHUT}}),
        ({"allOf": [LISTED]}, {"allOf": [SHUT]}),
        ({"type": "object", "additionalProperties": LISTED}, {"type": "object", "additionalProperties": SHUT}),
    ],
)
def test_an_object_with_listed_properties_is_closed_at_every_level(stated: Any, meant: Any) -> None:
    before = copy.deepcopy(stated)
    assert close_schema(stated) == meant
    assert stated == before, "what was given is as it was"


@pytest.mark.parametrize(
    "stated",
    [
        {"type": "object"},
        SHUT,
        {**LISTED, "additionalProperties": True},
        {**LISTED, "additionalProperties": TEXT},
        {**LISTED, "patternProperties": {"^x": TEXT}},
        {**LISTED, "minProperties": 2},
        {**LISTED, "required": ["a", "b"]},
        {"enum": [{"b": 1}], "properties": {"a": TEXT}},
    ],
)
def test_schemas_that_restrict_further_members_are_unchanged(stated: Any) -> None:
    assert close_schema(stated) == stated


@pytest.mark.parametrize(
    "stated",
    [
        {"allOf": [LISTED, {"properties": {"b": TEXT}, "required": ["b"]}]},
        {**LISTED, "anyOf": [{"properties": {"b": TEXT}}, {"properties": {"c": TEXT}}]},
        {"$ref": "#/$defs/x", "properties": {"b": TEXT}, "$defs": {"x": LISTED}},
        {**LISTED, "if": {"properties": {"b": TEXT}}},
        {"properties": {"deep": {"not": LISTED}}},
        {"oneOf": [LISTED, {"properties": {"b": TEXT}, "required": ["b"]}]},
    ],
)
def test_combined_schemas_of_one_object_are_unchanged(stated: Any) -> None:
    assert close_schema(stated) == stated


def test_properties_may_have_the_names_of_keywords() -> None:
    stated = {"type": "object", "properties": {"not": TEXT, "allOf": LISTED, "required": {"type": "boolean"}}}
    assert close_schema(stated)["additionalProperties"] is False
    assert close_schema(stated)["properties"]["allOf"] == SHUT


def test_deep_schemas_are_closed() -> None:
    stated: dict[str, Any] = LISTED
    for _ in range(60):
        stated = {"type": "object", "properties": {"a": {"type": "array", "items": stated}}}
    assert close_schema(stated)["properties"]["a"]["items"]["additionalProperties"] is False
