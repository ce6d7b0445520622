"""What a request holds its answer to: the fields that several APIs have for that, as one Grammar.

Law: PURE, values only. Whether a grammar can be compiled is known where it is compiled.
"""

from collections.abc import Callable
from typing import Any

import orjson

from worker.errors import InvalidValue, UnsupportedField
from worker.interface import Grammar
from worker.prompt.body_reader import MAX_LEVELS, Fields, is_deep
from worker.prompt.closed_schemas import closed
from worker.protocol.dialects.generation_fields import DESCRIBED, MAX_GUIDED_CHOICES, RESPONSE_FORMAT, STRUCTURED


def read(fields: Fields) -> Grammar | None:
    """The grammar that `fields` state, in OpenAI's way (`response_format`), llama-server's (`json_schema`, `grammar`),
    vLLM's (`guided_*`, `structured_outputs`) or SGLang's (`regex`, `ebnf`); None if the answer is free.

    Raises InvalidValue, naming the field, for a value that is none and for two that say different things: clients that
    know older and newer servers say one thing twice.
    """
    stated = [grammar for name, reader in _READERS.items() if (grammar := reader(fields, name)) is not None]
    other = next((grammar for grammar in stated if grammar != stated[0]), None)
    if other is not None:
        raise InvalidValue(
            f"{stated[0].field} and {other.field} both say what the answer must be; state one", param=other.field
        )
    return stated[0] if stated else None


def of_schema(schema: Any, field: str, *, lenient: bool = False) -> Grammar:
    """JSON that satisfies `schema`, an object of JSON Schema or such an object as a string."""
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError:
            schema = None
        if is_deep(schema):  # as a string it came past the limit of bodies
            raise InvalidValue(f"{field} is nested too deeply: {MAX_LEVELS} levels are read", param=field)
    if not isinstance(schema, dict):
        raise InvalidValue(f"{field} must be a JSON schema, an object", param=field)
    return Grammar("json_schema", orjson.dumps(closed(schema)).decode(), field, lenient=lenient)


def _response_format(fields: Fields, name: str) -> Grammar | None:
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
        return of_schema(_or(_one_schema((within, "schema"), (within, "value")), {"type": "object"}), name)
    described = within.within("json_schema", DESCRIBED)
    strict = described.flag("strict") or False
    if described.take("description") is not None:
        fields.mark_unused(f"{described.path}description")
    # what no grammar can say is an error where it was promised, and passed over where it was only wished for
    schema = _one_schema((described, "schema"), (within, "schema"), (within, "value"))
    return of_schema(schema, f"{name}.json_schema", lenient=not strict)


def _one_schema(*places: tuple[Fields, str]) -> Any:
    """The schema that stands in one of `places`; None if there is none."""
    stated = {each.path + name: value for each, name in places if (value := each.take(name)) is not None}
    if len(stated) > 1:
        first, second, *_ = stated
        raise InvalidValue(f"{first} and {second} mean the same; state one", param=second)
    return next(iter(stated.values()), None)


def _schema(fields: Fields, name: str) -> Grammar | None:
    value = fields.take(name)
    return None if value is None else of_schema(value, fields.path + name)


def _text(kind: Any) -> Callable[[Fields, str], Grammar | None]:
    def read(fields: Fields, name: str) -> Grammar | None:
        text = fields.text(name)
        return Grammar(kind, text, fields.path + name) if text else None

    return read


def _choice(fields: Fields, name: str) -> Grammar | None:
    choices = fields.sequence(name)
    if choices is None:
        return None
    if not 0 < len(choices) <= MAX_GUIDED_CHOICES or not all(isinstance(each, str) and each for each in choices):
        where = fields.path + name
        raise InvalidValue(
            f"{where} must be an array of 1 to {MAX_GUIDED_CHOICES} strings, none of them empty", param=where
        )
    return Grammar("choice", orjson.dumps(choices).decode(), fields.path + name)


def _json_object(fields: Fields, name: str) -> Grammar | None:
    return of_schema({"type": "object"}, fields.path + name) if fields.flag(name) else None


def _structured_outputs(fields: Fields, name: str) -> Grammar | None:
    if fields.mapping(name) is None:
        return None
    within = fields.within(name, STRUCTURED)
    stated = [grammar for each, reader in _STRUCTURED.items() if (grammar := reader(within, each)) is not None]
    for each in _TUNING:
        within.refuse(each, f"{name}.{each} is not supported; leave it out")
    unknown = within.settle(strict=False)
    if unknown:
        raise UnsupportedField(
            f"{name}.{unknown[0][:64]} is not supported; state one of {', '.join(_STRUCTURED)}", param=name
        )
    if len(stated) != 1:
        raise InvalidValue(f"{name} must state exactly one of {', '.join(_STRUCTURED)}", param=name)
    return stated[0]


def _or(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


_TUNING = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
"""Of `structured_outputs`, and sent by vLLM's own clients: false as good as absent."""
_Reader = Callable[[Fields, str], Grammar | None]
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
