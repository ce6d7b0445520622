"""Grammar fields of every API: accepted or rejected by name."""

import copy
import json
from typing import Any

import jsonschema_specifications  # type: ignore[import-untyped]
import pytest
from llguidance import LLMatcher

from worker.errors import InvalidValue, RequestError
from worker.interface import Grammar
from worker.prompt.body_reader import BodyFields
from worker.prompt.guided_decoding import NOT_ENFORCED, close_schema, read
from worker.protocol.dialects.generation_fields import GRAMMAR

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
TEXT = '{"type":"object","properties":{"é":{"type":"integer"}},"additionalProperties":false}'
INVALID = "invalid_value"
ANY_OBJECT = '{"type":"object"}'


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"grammar": "", "guided_regex": ""}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_schema", ANY_OBJECT)),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Grammar("json_schema", TEXT)),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, Grammar("json_schema", TEXT)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            Grammar("json_schema", TEXT),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            Grammar("json_schema", TEXT, lenient=True),
        ),
        ({"json_schema": SCHEMA}, Grammar("json_schema", TEXT)),
        ({"json_schema": {}}, Grammar("json_schema", "{}")),
        ({"grammar": 'root ::= "a"'}, Grammar("gbnf", 'root ::= "a"')),
        ({"guided_json": SCHEMA}, Grammar("json_schema", TEXT)),
        ({"guided_json": json.dumps(SCHEMA)}, Grammar("json_schema", TEXT)),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["ja", "nö"]}, Grammar("choice", '["ja","nö"]')),
        ({"guided_grammar": 'start: "a"'}, Grammar("gbnf", 'start: "a"')),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"ebnf": 'root ::= "a"'}, Grammar("gbnf", 'root ::= "a"')),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, Grammar("json_schema", TEXT)),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_schema", ANY_OBJECT)),
        ({"structured_outputs": {"regex": "a", "disable_fallback": False}}, Grammar("regex", "a")),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar("choice", '["a"]')),
        ({"structured_outputs": {"grammar": "start: x"}}, Grammar("gbnf", "start: x")),
        ({"structured_outputs": {"grammar": "start: x"}, "guided_grammar": "start: x"}, Grammar("gbnf", "start: x")),
    ],
)
def test_each_grammar_field_gives_a_grammar(body: dict[str, Any], expected: Grammar | None) -> None:
    fields = BodyFields(body, GRAMMAR)
    assert read(fields) == expected
    assert fields.check_unknown(strict=True) == ()


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"response_format": {}}, "response_format.type", INVALID),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", INVALID),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", INVALID),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
         "response_format.json_schema.strict", INVALID),
        ({"json_schema": "{"}, "json_schema", INVALID),
        ({"json_schema": "5"}, "json_schema", INVALID),
        ({"json_schema": "[" * (1 << 18) + "]" * (1 << 18)}, "json_schema", INVALID),
        ({"json_schema": {"enum": ["a" * (1 << 18)]}}, "json_schema", INVALID),
        ({"guided_choice": ["a", ""]}, "guided_choice", INVALID),
        ({"guided_choice": ["a"] * 1025}, "guided_choice", INVALID),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", INVALID),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", INVALID),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "unsupported_parameter"),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
         "structured_outputs.disable_any_whitespace", "unsupported_parameter"),
        ({"json_schema": {}, "response_format": {"type": "json_object"}}, "json_schema", INVALID),
        ({"structured_outputs": {"grammar": "b"}, "guided_grammar": "a"}, "structured_outputs.grammar", INVALID),
        ({"guided_regex": "a", "grammar": "b"}, "guided_regex", INVALID),
        ({"regex": "a", "ebnf": "b"}, "ebnf", INVALID),
        ({"response_format": {"type": "json_object", "schema": SCHEMA, "value": SCHEMA}}, "response_format.value",
         INVALID),
    ],
)  # fmt: skip
def test_an_invalid_grammar_field_is_rejected_by_name(body: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(BodyFields(body, GRAMMAR))
    assert (caught.value.param, caught.value.reason) == (param, reason)


def test_the_length_of_a_schema_counts_characters_and_not_bytes() -> None:
    schema = {"enum": ["é" * 200_000]}
    for given in (schema, json.dumps(schema, ensure_ascii=False)):
        assert read(BodyFields({"json_schema": given}, GRAMMAR)) is not None


def test_a_grammar_names_its_field() -> None:
    found = read(BodyFields({"structured_outputs": {"regex": "("}}, GRAMMAR))
    assert found is not None
    assert found.field == "structured_outputs.regex"
    with pytest.raises(InvalidValue, match="response_format and guided_json"):
        read(BodyFields({"response_format": {"type": "json_object"}, "guided_json": {}}, GRAMMAR))


@pytest.mark.parametrize("as_text", [False, True])
def test_keywords_that_are_not_enforced_are_reported_without_strict(*, as_text: bool) -> None:
    items = {"type": "array", "items": {"if": True, "then": True}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"not": items, "b": {"$ref": "#/$defs/c"}}, "$defs": {"c": {"not": {}}}}
    described = {"name": "x", "schema": json.dumps(schema) if as_text else schema}
    form: dict[str, Any] = {"type": "json_schema", "json_schema": described}
    fields = BodyFields({"response_format": form}, GRAMMAR)
    read(fields)
    keywords = ("not", "if", "then", "uniqueItems")
    assert fields.check_unknown(strict=True) == tuple(f"response_format.json_schema.{name}" for name in keywords)
    named: dict[str, Any] = {"properties": {"not": {}, "if": {}}}
    silent: tuple[dict[str, Any], ...] = ({**described, "strict": True}, {**described, "schema": named})
    for each in silent:
        fields = BodyFields({"response_format": {**form, "json_schema": each}}, GRAMMAR)
        read(fields)
        assert fields.check_unknown(strict=True) == ()


def test_llguidance_enforces_all_other_keywords() -> None:
    metaschemas = [jsonschema_specifications.REGISTRY[uri].contents for uri in jsonschema_specifications.REGISTRY]
    keywords = {name for metaschema in metaschemas for name in metaschema.get("properties", {})}
    refused = set()
    for keyword in keywords - {"$dynamicAnchor", "$recursiveAnchor"}:  # anchors constrain nothing
        grammar = LLMatcher.grammar_from_json_schema(json.dumps({keyword: {}}))
        if "Unimplemented keys" in LLMatcher.validate_grammar(grammar):
            refused.add(keyword)
    assert set(NOT_ENFORCED) == refused


def test_a_schema_in_a_string_has_the_nesting_limit_of_bodies() -> None:
    with pytest.raises(InvalidValue, match="guided_json is nested too deeply: at most 200 levels"):
        read(BodyFields({"guided_json": '{"a":' * 260 + "{}" + "}" * 260}, GRAMMAR))


# Closing of schemas

STRING = {"type": "string"}
LISTED = {"type": "object", "properties": {"a": STRING}}
SHUT = {**LISTED, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
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
def test_an_object_with_listed_properties_is_closed_at_every_level(schema: Any, closed: Any) -> None:
    before = copy.deepcopy(schema)
    assert close_schema(schema) == closed
    assert schema == before, "the argument is unchanged"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        SHUT,
        {**LISTED, "additionalProperties": True},
        {**LISTED, "additionalProperties": STRING},
        {**LISTED, "patternProperties": {"^x": STRING}},
        {**LISTED, "minProperties": 2},
        {**LISTED, "required": ["a", "b"]},
        {"enum": [{"b": 1}], "properties": {"a": STRING}},
        # several schemas of one object
        {"allOf": [LISTED, {"properties": {"b": STRING}, "required": ["b"]}]},
        {**LISTED, "anyOf": [{"properties": {"b": STRING}}, {"properties": {"c": STRING}}]},
        {"$ref": "#/$defs/x", "properties": {"b": STRING}, "$defs": {"x": LISTED}},
        {**LISTED, "if": {"properties": {"b": STRING}}},
        {"properties": {"deep": {"not": LISTED}}},
        {"oneOf": [LISTED, {"properties": {"b": STRING}, "required": ["b"]}]},
    ],
)
def test_schemas_that_restrict_further_members_or_describe_one_object_together_are_unchanged(schema: Any) -> None:
    assert close_schema(schema) == schema


def test_properties_may_have_the_names_of_keywords() -> None:
    schema = {"type": "object", "properties": {"not": STRING, "allOf": LISTED, "required": {"type": "boolean"}}}
    assert close_schema(schema)["additionalProperties"] is False
    assert close_schema(schema)["properties"]["allOf"] == SHUT


def test_deep_schemas_are_closed() -> None:
    schema: dict[str, Any] = LISTED
    for _ in range(60):
        schema = {"type": "object", "properties": {"a": {"type": "array", "items": schema}}}
    assert close_schema(schema)["properties"]["a"]["items"]["additionalProperties"] is False
