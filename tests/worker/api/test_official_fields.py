"""Nested fields of the official clients are known: supported, or ignored with a report."""

from collections.abc import Iterable, Iterator
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest
import typing_extensions as typed
from anthropic.types import message_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from openai.types.shared.reasoning_effort import ReasoningEffort

from worker.protocol.dialects.anthropic import MESSAGES
from worker.protocol.dialects.generation_fields import EFFORTS
from worker.protocol.dialects.openai import CHAT
from worker.protocol.dialects.responses import RESPONSES
from worker.protocol.schema import Body
from worker.protocol.unknown_fields import unknown_paths

# supported values of `type`; objects of another type are rejected
TAKEN = {
    "function", "text", "refusal", "image_url", "json_object", "json_schema", "message", "function_call",
    "function_call_output", "reasoning", "input_text", "output_text", "input_image", "reasoning_text", "summary_text",
    "tool_use", "tool_result", "thinking", "redacted_thinking", "image", "base64", "auto", "any", "tool", "none",
    "enabled", "disabled", "adaptive",
}  # fmt: skip
# output fields of the assistant, which Anthropic's types do not mark as such
OF_ANSWERS = {"tool_use", "thinking", "redacted_thinking"}
# nested fields that are reported as ignored
REPORTED_INSIDE = {
    "messages[].content[].transformations", "messages[].content[].toolset_name",
    "messages[].content[].content[].transformations", "thinking.display", "tools[].allowed_callers",
    "tools[].defer_loading", "tools[].eager_input_streaming", "tools[].input_examples", "tools[].output_schema",
    "tools[].async", "input[].encrypted_content", "input[].async", "input[].caller", "input[].name",
    "input[].namespace", "input[].content[].file_id", "input[].output[].file_id", "reasoning.context", "reasoning.mode",
}  # fmt: skip


def samples(kind: Any, taken: set[str], within: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Return values of a client's type, with all members of its objects."""
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, typed.TypeAliasType):
        yield from samples(kind.__value__, taken, within)
    elif typed.is_typeddict(kind):
        yield from objects(kind, taken, within)
    elif origin in (Union, UnionType):
        for each in inner:
            yield from samples(each, taken, within)
    elif origin in (typed.Required, typed.NotRequired, typed.Annotated):
        yield from samples(inner[0], taken, within)
    elif origin is typed.Literal:
        yield from inner
    elif origin is not None and issubclass(origin, Iterable) and origin is not dict:
        yield from ([value] for value in samples(inner[0], taken, within))
    else:
        yield True


def objects(kind: Any, taken: set[str], within: tuple[Any, ...] = ()) -> Iterator[dict[str, Any]]:
    if kind in within:
        return
    hints = typed.get_type_hints(kind, include_extras=True)
    members = {name: list(samples(hint, taken, (*within, kind))) for name, hint in hints.items()}
    types = [value for value in members.get("type", ()) if isinstance(value, str) and value in taken]
    if "type" in members and not types:
        return
    first = {name: values[0] for name, values in members.items() if values} | ({"type": types[0]} if types else {})
    for name, values in members.items():
        for value in types if name == "type" else values:
            yield {**first, name: value}


@pytest.mark.parametrize(
    ("client", "known", "taken"),
    [
        (chat_create_params.CompletionCreateParamsBase, CHAT, TAKEN),
        (response_create_params.ResponseCreateParamsBase, RESPONSES, TAKEN),
        (message_create_params.MessageCreateParamsBase, MESSAGES, {*TAKEN, "custom"}),
    ],
    ids=["chat", "responses", "messages"],
)
def test_every_member_inside_a_field_of_an_official_client_is_known(client: Any, known: Body, taken: set[str]) -> None:
    found: set[str] = set()
    stated = list(objects(client, taken))
    assert len(stated) > 60
    for body in stated:
        for said in body["messages"] if known is MESSAGES else ():
            parts = said["content"] if isinstance(said["content"], list) else []
            answers = any(isinstance(part, dict) and part["type"] in OF_ANSWERS for part in parts)
            said["role"] = "assistant" if answers else "user"
        found |= set(unknown_paths(known, body))
    assert found <= REPORTED_INSIDE


def test_every_effort_of_the_official_client_is_supported() -> None:
    words = {word for each in get_args(ReasoningEffort) for word in get_args(each)}
    assert "low" in words
    assert words <= set(EFFORTS)
