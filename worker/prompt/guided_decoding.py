"""Fields that constrain an answer to a grammar, from several APIs.

A JSON schema is closed before use: objects that list their properties get no additional ones. JSON Schema allows
additional properties by default, but authors of schemas for models expect only the listed ones, and other servers
behave like this. The closed schema accepts a subset of the original one. Whether a grammar compiles is checked by the
engine.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson

from worker.errors import InvalidValue, UnsupportedField
from worker.interface import Grammar
from worker.prompt.body_reader import MAX_LEVELS, BodyFields, is_deep
from worker.protocol.dialects.generation_fields import MAX_GUIDED_CHOICES, NAMED_SCHEMA, RESPONSE_FORMAT, STRUCTURED
from worker.protocol.memory import MAX_GRAMMAR_LENGTH

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_SINGLE = ("items", "additionalProperties")
_LISTED = ("prefixItems", *_ALTERNATIVES)
# keywords that already constrain additional properties, or need some
_OF_MEMBERS = (
    "additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties",
    "dependentRequired", "const", "enum",
)  # fmt: skip
_COMBINING = ("not", "if", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef")

# keywords of JSON Schema that llguidance does not enforce
NOT_ENFORCED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
    "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties",
    "$dynamicRef", "$recursiveRef",
)  # fmt: skip


def read(fields: BodyFields) -> Grammar | None:
    """Read the grammar from OpenAI's field (`response_format`), llama-server's (`json_schema`, `grammar`), vLLM's
    (`guided_*`, `structured_outputs`) or SGLang's (`regex`, `ebnf`). Return None for an unconstrained answer.

    Raise InvalidValue, naming the field, for an invalid value and for two fields with different grammars. Equal ones
    are accepted: clients of several server versions send the same grammar twice.
    """
    given = [grammar for name, reader in _READERS.items() if (grammar := reader(fields, name)) is not None]
    other = next((grammar for grammar in given if grammar != given[0]), None)
    if other is not None:
        raise InvalidValue(
            f"{given[0].field} and {other.field} both constrain the answer; send one of them", param=other.field
        )
    return given[0] if given else None


def of_schema(schema: Any, field: str, *, lenient: bool = False) -> Grammar:
    """Return the grammar of `schema`, a JSON Schema as an object or as a string."""
    if isinstance(schema, str):
        _check_length(schema, field)
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError:
            schema = None
        if is_deep(schema):  # a schema in a string was not covered by the nesting limit of bodies
            raise InvalidValue(f"{field} is nested too deeply: at most {MAX_LEVELS} levels are supported", param=field)
    if not isinstance(schema, dict):
        raise InvalidValue(f"{field} must be a JSON schema, an object", param=field)
    _check_length(orjson.dumps(schema).decode(), field)
    return Grammar("json_schema", orjson.dumps(close_schema(schema)).decode(), field, lenient=lenient)


def _check_length(text: str, field: str) -> None:
    """Raise InvalidValue for a schema that is too long to be compiled, before it is read."""
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise InvalidValue(f"{field} has {len(text)} characters; at most {MAX_GRAMMAR_LENGTH} are allowed", param=field)


def _response_format(fields: BodyFields, name: str) -> Grammar | None:
    if fields.mapping(name) is None:
        return None
    within = fields.within(name, RESPONSE_FORMAT)
    kind = within.choice("type")
    if kind is None:
        known = ", ".join(RESPONSE_FORMAT["type"]["enum"])
        raise InvalidValue(f"{name}.type must be one of {known}", param=f"{name}.type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = _one_schema((within, "schema"), (within, "value"))
        return of_schema({"type": "object"} if schema is None else schema, name)
    described = within.within("json_schema", NAMED_SCHEMA)
    strict = described.flag("strict") or False
    if described.take("description") is not None:
        fields.mark_unused(f"{described.path}description")
    # a keyword that cannot be enforced is an error with `strict` and is reported as ignored otherwise
    schema = _one_schema((described, "schema"), (within, "schema"), (within, "value"))
    grammar = of_schema(schema, f"{name}.json_schema", lenient=not strict)
    if not strict:
        keywords = {keyword for subschema in _subschemas(orjson.loads(grammar.text)) for keyword in subschema}
        for keyword in NOT_ENFORCED:
            if keyword in keywords:
                fields.mark_unused(f"{grammar.field}.{keyword}")
    return grammar


def _one_schema(*places: tuple[BodyFields, str]) -> Any:
    """Return the schema from one of `places`; None if there is none."""
    given = {place.path + name: value for place, name in places if (value := place.take(name)) is not None}
    if len(given) > 1:
        first, second, *_ = given
        raise InvalidValue(f"{first} and {second} mean the same; send one of them", param=second)
    return next(iter(given.values()), None)


def _schema(fields: BodyFields, name: str) -> Grammar | None:
    value = fields.take(name)
    return None if value is None else of_schema(value, fields.path + name)


def _text(kind: Any) -> Callable[[BodyFields, str], Grammar | None]:
    def read(fields: BodyFields, name: str) -> Grammar | None:
        text = fields.text(name)
        return Grammar(kind, text, fields.path + name) if text else None

    return read


def _choice(fields: BodyFields, name: str) -> Grammar | None:
    choices = fields.sequence(name)
    if choices is None:
        return None
    if not 0 < len(choices) <= MAX_GUIDED_CHOICES or not all(isinstance(choice, str) and choice for choice in choices):
        where = fields.path + name
        raise InvalidValue(f"{where} must be an array of 1 to {MAX_GUIDED_CHOICES} non-empty strings", param=where)
    return Grammar("choice", orjson.dumps(choices).decode(), fields.path + name)


def _json_object(fields: BodyFields, name: str) -> Grammar | None:
    return of_schema({"type": "object"}, fields.path + name) if fields.flag(name) else None


def _structured_outputs(fields: BodyFields, name: str) -> Grammar | None:
    if fields.mapping(name) is None:
        return None
    within = fields.within(name, STRUCTURED)
    given = [grammar for member, reader in _STRUCTURED.items() if (grammar := reader(within, member)) is not None]
    for member in _NO_EFFECT:
        within.refuse(member, f"{name}.{member} is not supported; leave it out")
    unknown = within.check_unknown(strict=False)
    if unknown:
        raise UnsupportedField(
            f"{name}.{unknown[0][:64]} is not supported; use one of {', '.join(_STRUCTURED)}", param=name
        )
    if len(given) != 1:
        raise InvalidValue(f"{name} must have exactly one of {', '.join(_STRUCTURED)}", param=name)
    return given[0]


# Fields of `structured_outputs` that vLLM's clients always send. false has no effect.
_NO_EFFECT = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
_Reader = Callable[[BodyFields, str], Grammar | None]
_STRUCTURED: dict[str, _Reader] = {
    "json": _schema,
    "json_object": _json_object,
    "regex": _text("regex"),
    "choice": _choice,
    "grammar": _text("gbnf"),
}
_READERS: dict[str, _Reader] = {
    "response_format": _response_format,
    "json_schema": _schema,
    "grammar": _text("gbnf"),
    "guided_json": _schema,
    "guided_regex": _text("regex"),
    "guided_choice": _choice,
    "guided_grammar": _text("gbnf"),
    "structured_outputs": _structured_outputs,
    "regex": _text("regex"),
    "ebnf": _text("gbnf"),
}


def close_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return `schema` with `additionalProperties: false` for objects that list their properties without restricting
    others.

    Schemas that combine several subschemas for one object are returned unchanged: a property that one of them does
    not list may be required by another. The argument is not modified.
    """
    if any(map(_is_combined, _subschemas(schema))):
        return schema
    copy: dict[str, Any] = orjson.loads(orjson.dumps(schema))
    for subschema in _subschemas(copy):
        if _can_close(subschema):
            subschema["additionalProperties"] = False
    return copy


def _is_combined(schema: Mapping[str, Any]) -> bool:
    if any(name in schema for name in _COMBINING):
        return True
    others = [name for name in (*_ALTERNATIVES, "$ref") if name in schema]
    if len(others) > 1 or (others and ("properties" in schema or "required" in schema)):
        return True
    if "oneOf" in schema and "discriminator" not in schema:
        return True  # closing would make a value match one alternative that matched two open ones before
    all_of = schema.get("allOf")
    return isinstance(all_of, list) and len(all_of) > 1


def _can_close(schema: Mapping[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    return not any(name in schema for name in _OF_MEMBERS) and all(
        isinstance(name, str) and name in properties for name in required
    )


def _subschemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield `schema` and all schemas nested in it. Iterative, because clients choose the nesting depth."""
    stack: list[Any] = [schema]
    while stack:
        current = stack.pop()
        if isinstance(current, dict):
            yield current
            stack.extend(_direct_subschemas(current))


def _direct_subschemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    for name in _BY_NAME:
        if isinstance(named := schema.get(name), dict):
            yield from named.values()
    for name in _LISTED:
        if isinstance(listed := schema.get(name), list):
            yield from listed
    for name in _SINGLE:
        if isinstance(subschema := schema.get(name), list):
            yield from subschema
        else:
            yield subschema
