"""Parsing of answers into reasoning, content and calls, independent of how the text is split."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.prompt.body_reader import Json
from worker.prompt.chat_formats import ChatFormat, find
from worker.prompt.response_parser import AnswerParser, AnswerPart, ParseOptions, marker_tokens

SIGNS = {
    "hermes": "<tool_call></tool_call> arguments",
    "qwen-xml": "<tool_call><function=",
    "glm": "<tool_call></tool_call> arguments <arg_key>",
    "granite": "<|tool_call|>",
    "mistral": "[TOOL_CALLS]",
    "mistral-args": "[TOOL_CALLS][ARGS]",
    "llama": '"parameters" ipython',
    "deepseek": "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "harmony": "<|channel|> functions.",
    "thinker": "</think>",
    "hermes-thinker": "<tool_call></tool_call> arguments </think>",
}
BAR, LOW = "\uff5c", "\u2581"
DS = {
    name: f"<{BAR}{name.replace(' ', LOW)}{BAR}>"
    for name in ("tool calls begin", "tool call begin", "tool sep", "tool call end", "tool calls end")
}


def tool(name: str, **properties: Json) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [tool("add", a={"type": "integer"}, b={"type": "integer"}), tool("say", text={"type": "string"})]


def chat_format(name: str) -> ChatFormat:
    found = find(SIGNS[name], None)
    assert found is not None
    return found


def read(name: str | ChatFormat, pieces: Sequence[str], **manner: Any) -> list[AnswerPart]:
    known = chat_format(name) if isinstance(name, str) else name
    reading = AnswerParser(ParseOptions(chat_format=known, **{"tools": TOOLS, **manner}))
    return [*(part for piece in pieces for part in reading.push(piece)), *reading.finish()]


def summary(parts: Sequence[AnswerPart]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return reasoning, content and calls."""
    calls = [(part.call.name, json.loads(part.call.arguments)) for part in parts if part.call is not None]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts), calls


ADD = ("add", {"a": 1, "b": 2})
SAY = ("say", {"text": "hé </x> {"})
CASES: list[tuple[str, str, tuple[str, str, list[tuple[str, Any]]]]] = [
    ("hermes", "Hello  world ", ("", "Hello  world ", [])),
    (
        "hermes",
        'Sure.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n<tool_call>'
        '{"name": "say", "arguments": {"text": "hé </x> {"}}</tool_call>',
        ("", "Sure.", [ADD, SAY]),
    ),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}', ("", "", [ADD])),
    ("hermes", "x <tool_call>\n{broken}\n</tool_call> y", ("", "x <tool_call>\n{broken}\n</tool_call> y", [])),
    (
        "hermes",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        ("", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', []),
    ),
    (
        "hermes",
        '<tool_call>{"name": "add"}</tool_call><tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>!',
        ("", '<tool_call>{"name": "add"}</tool_call>!', [ADD]),
    ),
    ("hermes", "a <tool", ("", "a <tool", [])),
    (
        "qwen-xml",
        "I will.\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        ("", "I will.", [ADD]),
    ),
    (
        "glm",
        "Now.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>say<arg_key>text</arg_key><arg_value>hé </x> {</arg_value>"
        "</tool_call>",
        ("", "Now.", [ADD, SAY]),
    ),
    ("glm", "<tool_call>add\n</tool_call>", ("", "", [("add", {})])),
    ("glm", '<tool_call>{"name": "add"}</tool_call>', ("", '<tool_call>{"name": "add"}</tool_call>', [])),
    (
        "granite",
        '<|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": 2}},\n'
        '{"name": "say", "arguments": {"text": "hé </x> {"}}]',
        ("", "", [ADD, SAY]),
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]', ("", "", [ADD])),
    (
        "mistral",
        'ok[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}, '
        '{"name": "say", "arguments": {"text": "hé </x> {"}}]',
        ("", "ok", [ADD, SAY]),
    ),
    ("mistral", "[TOOL_CALLS] [nonsense", ("", "[TOOL_CALLS] [nonsense", [])),
    (
        "mistral-args",
        '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]say[ARGS]{"text": "hé </x> {"}',
        ("", "", [ADD, SAY]),
    ),
    ("mistral-args", '[TOOL_CALLS]add[CALL_ID]x12345678[ARGS]{"a": 1, "b": 2}', ("", "", [ADD])),
    ("llama", '{"name": "add", "parameters": {"a": 1, "b": 2}}', ("", "", [ADD])),
    ("llama", '\n<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', ("", "", [ADD])),
    ("llama", '{"just": "json"}', ("", '{"just": "json"}', [])),
    ("llama", 'no {"name": "add", "parameters": {}}', ("", 'no {"name": "add", "parameters": {}}', [])),
    (
        "deepseek",
        f"Well.{DS['tool calls begin']}{DS['tool call begin']}function{DS['tool sep']}add\n```json\n"
        f'{{"a": 1, "b": 2}}\n```{DS["tool call end"]}{DS["tool calls end"]}',
        ("", "Well.", [ADD]),
    ),
    (
        "deepseek",
        f'{DS["tool calls begin"]}{DS["tool call begin"]}add{DS["tool sep"]}{{"a": 1, "b": 2}}{DS["tool call end"]}'
        f'{DS["tool call begin"]}say{DS["tool sep"]}{{"text": "hé </x> {{"}}{DS["tool call end"]}'
        f"{DS['tool calls end']}",
        ("", "", [ADD, SAY]),
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>',
        ("I add.", "", [ADD]),
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>",
        ("Hm.", "Hello.", []),
    ),
    ("harmony", "Plain after all.", ("", "Plain after all.", [])),
    ("thinker", "<think>\nHm, well. \n</think>\n\nHello", ("Hm, well.", "Hello", [])),
    ("thinker", "Hello", ("", "Hello", [])),
    ("thinker", "<think>cut off ", ("cut off", "", [])),
    (
        "hermes-thinker",
        '<think>I must add.</think>\n\nNow:\n<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',
        ("I must add.", "Now:", [ADD]),
    ),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_every_familys_answers_are_parsed_however_the_text_is_split(name: str, text: str, expected: Any) -> None:
    draw = random.Random(text)
    cuts = [sorted(draw.sample(range(len(text)), min(len(text), count))) for count in (1, 3, 9)]
    ways = [[text[a:b] for a, b in zip([0, *cut], [*cut, len(text)], strict=True)] for cut in cuts]
    for pieces in [[text], list(text), *ways]:
        assert summary(read(name, pieces)) == expected


@settings(max_examples=150)
@given(
    name=st.sampled_from(sorted(SIGNS)),
    pieces=st.lists(
        st.sampled_from(
            ["a", " ", "\n", "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "add", "arguments": {}}',
             "{", "}", "[TOOL_CALLS]", "[ARGS]", "[", "]", "<function=add>", "</function>", "<|python_tag|>", "é", "<",
             "<|channel|>", "final", "<|message|>", "<|end|>", *DS.values()]
        ),
        max_size=12,
    ),
)  # fmt: skip
def test_no_text_makes_parsing_fail(name: str, pieces: list[str]) -> None:
    whole = summary(read(name, ["".join(pieces)]))
    assert summary(read(name, pieces)) == whole
    if not whole[2] and "think" not in name and name not in ("harmony", "deepseek"):
        assert whole[1] == "".join(pieces), "what is no call is content, letter by letter"


def test_reasoning_that_the_prompt_began_is_reasoning() -> None:
    assert summary(read("thinker", ["so</think>Hi"], prefix="<think>")) == ("so", "Hi", [])
    assert summary(read("thinker", ["so"], prefix="<think>half a")) == ("so", "", [])
    assert summary(read("thinker", ["Hi"], prefix="<think></think>")) == ("", "Hi", [])
    assert summary(read("thinker", ["go on"], prefix="Once upon")) == ("", "go on", []), (
        "what was begun is not repeated"
    )


def test_reasoning_stays_in_the_content_on_request() -> None:
    assert summary(read("thinker", ["<think>Hm</think> Hi"], separate_reasoning=False)) == (
        "",
        "<think>Hm</think> Hi",
        [],
    )


def test_without_tools_the_text_of_a_call_is_content() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    assert summary(read("hermes", [text], tools=[])) == ("", text, [])


def test_calls_beyond_the_limit_are_dropped() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    assert summary(read("hermes", [call, call], max_calls=1)) == ("", "", [ADD])


def test_a_model_without_a_call_syntax_calls_in_plain_json() -> None:
    text = '[{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "say", "arguments": {"text": "hé </x> {"}}]'
    bare = AnswerParser(ParseOptions(chat_format=None, tools=TOOLS, is_constrained=True))
    assert [*(part for letter in text for part in bare.push(letter))] == []
    assert summary(bare.finish()) == ("", "", [ADD, SAY])
    cut = AnswerParser(ParseOptions(chat_format=None, tools=TOOLS, is_constrained=True))
    cut.push(text[:30])
    assert summary(cut.finish()) == ("", text[:30], [])
    thinker = "<think>Hm</think>" + text
    assert summary(read("thinker", [thinker], is_constrained=True)) == ("Hm", "", [ADD, SAY])


def test_a_tokenizers_own_response_template_takes_precedence() -> None:
    stated = {
        "start_anchor": "<|assistant|>",
        "defaults": {"role": "assistant"},
        "fields": {
            "thinking": {"open": "<thoughts>", "close": "</thoughts>", "content": "text"},
            "tool_calls": {
                "open_pattern": r"<call (?P<name>\w+)>",
                "close": "</call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</(?P=key)>"},
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"content": "text", "close_pattern": r"<done>"},
        },
    }
    known = find("<tool_call></tool_call> arguments", stated)
    assert known is not None
    assert known.reasoning_markers == ("<thoughts>", "</thoughts>")
    text = "Hm</thoughts>Hi <call add><a>1</a><b>2</b></call><call none></call><done>"
    prompt = "<|user|><thoughts>x<|assistant|><thoughts>"
    received = summary(read(known, list(text), prefix=prompt))
    assert received == ("Hm", "Hi<call none></call>", [ADD]), "arguments have the types that the tool states"


def test_only_special_tokens_that_mark_regions_are_kept() -> None:
    special = {"[TOOL_CALLS]": 5, "</s>": 2, "<|python_tag|>": 7, "<think>": 9}
    assert marker_tokens(chat_format("mistral"), special) == {5}
    assert marker_tokens(chat_format("llama"), special) == {7}
    assert marker_tokens(chat_format("thinker"), special) == {9}
    assert marker_tokens(None, special) == frozenset()
