"""Unknown members inside the objects of a body are reported by their path, and nothing else is."""

from typing import Any

import pytest

from worker.errors import UnknownField
from worker.prompt.body_reader import BodyFields
from worker.protocol.dialects.anthropic import MESSAGES
from worker.protocol.dialects.llama_server import RERANK
from worker.protocol.dialects.openai import CHAT
from worker.protocol.dialects.responses import RESPONSES
from worker.protocol.schema import Body, flag, record
from worker.protocol.unknown_fields import unknown_paths

MESSAGE = {"role": "user", "content": "hi"}
FUNCTION = {"name": "f", "parameters": {"type": "object", "odd": 1}, "description": "?", "strict": True}
CALL = {"id": "1", "type": "function", "index": 0, "function": {"name": "f", "arguments": {"odd": 1}}}


@pytest.mark.parametrize(
    ("body", "paths"),
    [
        ({"odd": {"odd": 1}, "messages": [MESSAGE]}, []),
        ({"messages": [MESSAGE, {**MESSAGE, "odd": 1}, {**MESSAGE, "odd": 2, "even": None}]}, ["messages[].odd"]),
        ({"messages": [{**MESSAGE, "tool_calls": []}]}, ["messages[].tool_calls"]),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL], "refusal": None, "annotations": []}]}, []),
        ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "odd": 1}}]}]},
         ["messages[].tool_calls[].function.odd"]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}, "odd": 1}]}]},
         ["messages[].content[].odd"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "", "odd": 1}}]}]},
         ["messages[].content[].image_url.odd"]),
        ({"tools": [{"type": "function", "function": FUNCTION}]}, []),
        ({"tools": [{"type": "function", "function": {**FUNCTION, "odd": 1}, "odd": 1}]},
         ["tools[].function.odd", "tools[].odd"]),
        (
            {"tool_choice": {"type": "allowed_tools", "odd": 1, "allowed_tools": {
                "mode": "auto", "odd": 1, "tools": [{"type": "function", "function": {**FUNCTION, "odd": 1}}]}}},
            ["tool_choice.odd", "tool_choice.allowed_tools.odd", "tool_choice.allowed_tools.tools[].function.odd"],
        ),
        ({"stream_options": {"include_usage": True, "odd": 1}}, ["stream_options.odd"]),
        ({"response_format": {"type": "text", "schema": {}}}, ["response_format.schema"]),
        ({"response_format": {"type": "json_schema", "odd": 1, "json_schema": {"schema": {}, "odd": 1}}},
         ["response_format.odd", "response_format.json_schema.odd"]),
        ({"chat_template_kwargs": {"anything": {"goes": 1}}, "documents": [{"odd": 1}], "json_schema": {"odd": 1}}, []),
    ],
)  # fmt: skip
def test_unknown_members_inside_a_chat_are_reported(body: dict[str, Any], paths: list[str]) -> None:
    assert unknown_paths(CHAT, body) == paths


@pytest.mark.parametrize(
    ("table", "body", "paths"),
    [
        (
            RESPONSES,
            {
                "input": [
                    {"type": "message", "id": "m", "status": "completed", "role": "user", "content": [
                        {"type": "output_text", "text": "a", "annotations": [], "logprobs": []},
                        {"type": "input_text", "text": "a", "odd": 1},
                    ]},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "async": True},
                    {"type": "reasoning", "id": "r", "summary": [], "content": [], "encrypted_content": "x"},
                ],
                "reasoning": {"effort": "low", "odd": 1},
                "text": {"format": {"type": "json_schema", "name": "a", "schema": {}, "odd": 1}, "odd": 1},
                "tools": [{"type": "function", "name": "f", "parameters": {"odd": 1}, "odd": 1}],
            },
            ["input[].content[].odd", "input[].async", "input[].encrypted_content", "reasoning.odd",
             "text.format.odd", "text.odd", "tools[].odd"],
        ),
        (
            MESSAGES,
            {
                "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "odd": 1}],
                "messages": [
                    {"role": "assistant", "content": [
                        {"type": "thinking", "thinking": "a", "signature": ""},
                        {"type": "tool_use", "id": "t", "name": "f", "input": {"odd": 1}, "odd": 1},
                    ]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [
                        {"type": "text", "text": "a", "odd": 1}
                    ]}]},
                ],
                "thinking": {"type": "enabled", "odd": 1},
                "tool_choice": {"type": "auto", "odd": 1},
                "output_config": {"format": {"type": "json_schema", "schema": {}, "odd": 1}},
                "metadata": {"user_id": "u"},
            },
            ["system[].odd", "messages[].content[].odd", "messages[].content[].content[].odd", "thinking.odd",
             "tool_choice.odd", "output_config.format.odd"],
        ),
        (RERANK, {"documents": ["a", {"text": "a", "title": "b"}]}, ["documents[].title"]),
    ],
    ids=["responses", "messages", "rerank"],
)  # fmt: skip
def test_unknown_members_are_reported_in_other_dialects(table: Body, body: Any, paths: list[str]) -> None:
    assert unknown_paths(table, body) == paths


@pytest.mark.parametrize(
    "body", [{"messages": 5}, {"messages": [5]}, {"messages": {"odd": 1}}, {"tools": [[[{}]]]}, {"response_format": []},
             {"messages": [{"role": ["user"], "content": {"odd": 1}}]}]
)  # fmt: skip
def test_values_of_a_wrong_type_are_not_reported(body: dict[str, Any]) -> None:
    assert unknown_paths(CHAT, body) == []


def test_inner_members_are_reported_or_rejected_with_strict_fields() -> None:
    inner: Body = {"x": flag()}

    def read(body: dict[str, Any]) -> BodyFields:
        fields = BodyFields(body, {"a": record(inner)})
        fields.within("a", inner).flag("x")
        return fields

    assert read({"a": {"x": True, "odd": 1}, "beside": 1}).check_unknown(strict=False) == ("beside", "a.odd")
    with pytest.raises(UnknownField) as caught:
        read({"a": {"odd": 1}}).check_unknown(strict=True)
    assert caught.value.param == "a.odd"


def test_an_object_that_has_checked_its_own_fields_is_not_reported_twice() -> None:
    inner: Body = {"x": flag()}
    fields = BodyFields({"a": {"odd": 1}}, {"a": record(inner)})
    within = fields.within("a", inner)
    within.flag("x")
    assert within.check_unknown(strict=False) == ("odd",)
    assert fields.check_unknown(strict=True) == ()
