"""Parsing of answers into reasoning, content and calls, independent of how the text is split."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.interface import Delta
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
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|> </think>",
    "minimax": "<minimax:tool_call> <invoke name= </think>",
    "seed": "<seed:tool_call><function= <seed:think></seed:think>",
    "nemotron": "<TOOLCALL>[]</TOOLCALL> </think>",
    "phi": "<|tool_call|><|/tool_call|>",
    "phi-list": "functools[",
    "lfm": "<|im_start|> List of tools: </think>",
    "gemma": "<|tool_call>call: <|channel>thought",
    "cohere": "<|START_ACTION|><|END_ACTION|>",
    "cohere-fenced": "<|CHATBOT_TOKEN|> Action: tool_name",
    "dsml": "<\uff5cDSML\uff5cinvoke </think>",
    "tool-calls": "<tool_calls></tool_calls> </think>",
    "hunyuan": "<tool_calls><tool_call>function_name ```json </tool_call> arguments </think>",
    "olmo": "<function_calls>",
    "apertus": "<|tools_prefix|> <|inner_prefix|>",
    "functionary": ">>>all",
    "function-json": "<function=",
    "pythonic": "[func_name1(",
    "array": "JSON array tool_call_name",
    "thinker": "</think>",
    "ernie": "<tool_call></tool_call> arguments </think> <response></response>",
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


def kimi(name: str, arguments: str, number: int = 0) -> str:
    return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def minimax(name: str, **parameters: str) -> str:
    tags = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in parameters.items())
    return f'<invoke name="{name}">\n{tags}</invoke>\n'


def seed(name: str, **parameters: str) -> str:
    tags = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in parameters.items())
    return f"<seed:tool_call>\n<function={name}>\n{tags}</function>\n</seed:tool_call>"


def dsml(calls: str) -> str:
    """DeepSeek-V3.2's tags."""
    tagged = f"<function_calls>\n{calls}</function_calls>".replace("</", "\0").replace("<", f"<{BAR}DSML{BAR}")
    return tagged.replace("\0", f"</{BAR}DSML{BAR}")


ADD = ("add", {"a": 1, "b": 2})
SAY = ("say", {"text": "hé </x> {"})
SAID_ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
SAID_SAY = '{"name": "say", "arguments": {"text": "hé </x> {"}}'
SAID_BOTH = f"[{SAID_ADD}, {SAID_SAY}]"
CASES: list[tuple[str, str, tuple[str, str, list[tuple[str, Any]]]]] = [
    ("hermes", f"Sure.\n<tool_call>\n{SAID_ADD}\n</tool_call>\n<tool_call>{SAID_SAY}</tool_call>",
     ("", "Sure.", [ADD, SAY])),
    ("hermes", f"<tool_call>{SAID_ADD}", ("", "", [ADD])),
    ("hermes", f'<tool_call>{{"name": "add"}}</tool_call><tool_call>{SAID_ADD}</tool_call>!',
     ("", '<tool_call>{"name": "add"}</tool_call>!', [ADD])),
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
    ("granite", f"<|tool_call|>[{SAID_ADD},\n{SAID_SAY}]", ("", "", [ADD, SAY])),
    ("mistral", f"[TOOL_CALLS] [{SAID_ADD}]", ("", "", [ADD])),
    ("mistral", f"ok[TOOL_CALLS]{SAID_BOTH}", ("", "ok", [ADD, SAY])),
    ("mistral-args", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]say[ARGS]{"text": "hé </x> {"}',
     ("", "", [ADD, SAY])),
    ("mistral-args", '[TOOL_CALLS]add[CALL_ID]x12345678[ARGS]{"a": 1, "b": 2}', ("", "", [ADD])),
    ("llama", '{"name": "add", "parameters": {"a": 1, "b": 2}}', ("", "", [ADD])),
    ("llama", '\n<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', ("", "", [ADD])),
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
    ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>",
     ("Hm.", "Hello.", [])),
    (
        "kimi",
        "<think>I add.</think>Sure.<|tool_calls_section_begin|>"
        + kimi("add", '{"a": 1, "b": 2}')
        + kimi("say", '{"text": "hé </x> {"}', 1)
        + "<|tool_calls_section_end|>",
        ("I add.", "Sure.", [ADD, SAY]),
    ),
    ("kimi", kimi("add", '{"a": 1, "b": 2}').replace("functions.", ""), ("", "", [ADD])),
    ("kimi",
     "<think>I add.<|tool_calls_section_begin|>" + kimi("add", '{"a": 1, "b": 2}') + "<|tool_calls_section_end|>",
     ("I add.", "", [ADD])),
    (
        "minimax",
        "<think>\nI add.\n</think>\n\nSure.\n<minimax:tool_call>\n"
        + minimax("add", a="1", b="2")
        + minimax("say", text="hé </x> {")
        + "</minimax:tool_call>",
        ("I add.", "Sure.", [ADD, SAY]),
    ),
    ("minimax", minimax("say", text="a\nb"), ("", "", [("say", {"text": "a\nb"})])),
    ("seed",
     "<seed:think>I add.</seed:think>\nSure.\n" + seed("add", a="1", b="2") + "\n" + seed("say", text="hé </x> {"),
     ("I add.", "Sure.", [ADD, SAY])),
    ("nemotron", f"<think>\nI add.\n</think>\n\n<TOOLCALL>{SAID_BOTH}</TOOLCALL>\n", ("I add.", "", [ADD, SAY])),
    ("nemotron", '<TOOLCALL>[{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}]</TOOLCALL>', ("", "", [ADD])),
    ("phi", f"Sure.<|tool_call|>{SAID_ADD}<|/tool_call|><|tool_call|>{SAID_SAY}<|/tool_call|>",
     ("", "Sure.", [ADD, SAY])),
    ("phi", f"<|tool_call|>{SAID_BOTH}<|/tool_call|>", ("", "", [ADD, SAY])),
    ("phi-list", f"functools{SAID_BOTH}", ("", "", [ADD, SAY])),
    ("lfm", "<think>I add.</think>Sure.<|tool_call_start|>[add(a=1, b=2), say(text='hé </x> {')]<|tool_call_end|>",
     ("I add.", "Sure.", [ADD, SAY])),
    ("lfm", "<|tool_call_start|>[add(a=1,\n b=2)]<|tool_call_end|> Done.", ("", "Done.", [ADD])),
    ("lfm", f"<|tool_call_start|>[{SAID_ADD}]<|tool_call_end|>", ("", "", [ADD])),
    (
        "gemma",
        "<|channel>thought\nI add.<channel|>Sure.<|tool_call>call:add{a:1,b:2}<tool_call|>"
        '<|tool_call>call:say{text:<|"|>hé </x> {<|"|>}<tool_call|>',
        ("I add.", "Sure.", [ADD, SAY]),
    ),
    (
        "cohere",
        "<|START_THINKING|>I add.<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1, "b": 2}},\n'
        '    {"tool_call_id": "1", "tool_name": "say", "parameters": {"text": "hé </x> {"}}\n]<|END_ACTION|>',
        ("I add.", "", [ADD, SAY]),
    ),
    ("cohere", "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Hello.<|END_RESPONSE|>", ("Hm.", "Hello.", [])),
    ("cohere", "<|START_TEXT|>Hello.<|END_TEXT|>", ("", "Hello.", [])),
    (
        "cohere-fenced",
        'Action:\n```json\n[\n    {\n        "tool_name": "add",\n        "parameters": {"a": 1, "b": 2}\n    },\n'
        '    {"tool_name": "say", "parameters": {"text": "hé </x> {"}}\n]\n```',
        ("", "", [ADD, SAY]),
    ),
    (
        "dsml",
        "<think>I add.</think>Sure.\n\n"
        + dsml(
            '<invoke name="add">\n<parameter name="a" string="false">1</parameter>\n'
            '<parameter name="b" string="false">2</parameter>\n</invoke>\n'
            '<invoke name="say">\n<parameter name="text" string="true">hé {</parameter>\n</invoke>\n'
        ),
        ("I add.", "Sure.", [ADD, ("say", {"text": "hé {"})]),
    ),
    ("tool-calls", f"<think>\nI add.\n</think>\n<tool_calls>\n{SAID_ADD}\n{SAID_SAY}\n</tool_calls>",
     ("I add.", "", [ADD, SAY])),
    ("tool-calls", f"Sure.<tool_calls>{SAID_BOTH}</tool_calls>", ("", "Sure.", [ADD, SAY])),
    (
        "hunyuan",
        '<think>I add.</think>Sure.<tool_calls>\n<tool_call>add\n```json\n{"a": 1, "b": 2}\n```</tool_call>\n'
        '<tool_call>say\n```json\n{"text": "hé </x> {"}\n```\n</tool_call>\n</tool_calls>',
        ("I add.", "Sure.", [ADD, SAY]),
    ),
    ("olmo", "Sure.<function_calls>\nadd(a=1, b=2)\nsay(text='hé </x> {')\n</function_calls>",
     ("", "Sure.", [ADD, SAY])),
    (
        "apertus",
        '<|inner_prefix|>I add.<|inner_suffix|>Sure.<|tools_prefix|>[{"add": {"a": 1, "b": 2}}, '
        '{"say": {"text": "hé </x> {"}}]<|tools_suffix|>',
        ("I add.", "Sure.", [ADD, SAY]),
    ),
    ("functionary", 'all\nSure.>>>add\n{"a": 1, "b": 2}>>>say\n{"text": "hé </x> {"}', ("", "Sure.", [ADD, SAY])),
    ("functionary", 'add\n{"a": 1, "b": 2}', ("", "", [ADD])),
    ("functionary", ">>>all\nHello.", ("", "Hello.", [])),
    ("function-json", '<function=add>{"a": 1, "b": 2}</function>', ("", "", [ADD])),
    ("pythonic", "[add(a=1, b=2), say(text='hé </x> {')]", ("", "", [ADD, SAY])),
    ("pythonic", '<|python_start|>[say(text="hé </x> {")]<|python_end|>', ("", "", [SAY])),
    ("array", SAID_BOTH, ("", "", [ADD, SAY])),
    ("thinker", "<think>\nHm, well. \n</think>\n\nHello", ("Hm, well.", "Hello", [])),
    ("thinker", "<think>cut off ", ("cut off", "", [])),
    ("ernie", "<think>\nHm.\n</think>\n\n<response>\nHello\n</response>", ("Hm.", "Hello\n", [])),
    ("ernie", f"<think>I add.</think>\n\n<tool_call>\n{SAID_ADD}\n</tool_call>\n", ("I add.", "", [ADD])),
    ("hermes-thinker", f"<think>I must add.</think>\n\nNow:\n<tool_call>{SAID_ADD}</tool_call>",
     ("I must add.", "Now:", [ADD])),
]  # fmt: skip
# Texts without a complete call: all of it is content.
CONTENT = [
    ("hermes", "Hello  world "),
    ("hermes", "x <tool_call>\n{broken}\n</tool_call> y"),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", "a <tool"),
    ("glm", '<tool_call>{"name": "add"}</tool_call>'),
    ("mistral", "[TOOL_CALLS] [nonsense"),
    ("llama", '{"just": "json"}'),
    ("llama", 'no {"name": "add", "parameters": {}}'),
    ("harmony", "Plain after all."),
    ("kimi", kimi("add", "{broken}")),
    ("kimi", "a <|tool_call_begin|>add"),
    ("seed", seed("unknown")),
    ("phi-list", "Use functools.partial."),
    ("lfm", "<|tool_call_start|>[add(1, 2)]<|tool_call_end|>"),
    ("gemma", "<|tool_call>call:add{a:}<tool_call|>"),
    ("cohere", "Plain after all."),
    ("tool-calls", "<tool_calls>\n{} no\n</tool_calls>"),
    ("olmo", "<function_calls>\nadd(1)\n</function_calls>"),
    ("functionary", "Plain after all."),
    ("functionary", "unknown\n{}"),
    ("pythonic", "[A link](https://example.org)"),
    ("array", '[{"just": "json"}]'),
    ("thinker", "Hello"),
    ("ernie", "Plain after all."),
    # a parameter that is not closed
    ("qwen-xml", "<tool_call><function=add><parameter=a>1</parameter><parameter=b>2</function></tool_call>"),
    ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</tool_call>"),
    ("minimax", '<invoke name="add"><parameter name="a">1</parameter><parameter name="b">2</invoke>'),
]


@pytest.mark.parametrize(("name", "text", "expected"), [*CASES, *((*each, ("", each[1], [])) for each in CONTENT)])
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
             "<|channel|>", "final", "<|message|>", "<|end|>", *DS.values(), "<parameter=a>", "</parameter>",
             "add(a=1)", "<|tool_calls_section_begin|>", kimi("add", "{}"), "<minimax:tool_call>", minimax("add"),
             "<TOOLCALL>", "</TOOLCALL>", "<|tool_call|>", "<|/tool_call|>", "functools", "<|tool_call_start|>",
             "<|tool_call_end|>", "<|tool_call>call:add", '<|"|>', "<tool_call|>", "<|channel>thought\n", "<channel|>",
             "<|START_ACTION|>", "<|END_ACTION|>", "<|START_TEXT|>", "<|END_TEXT|>", "'", '"', "a=", "a:", "1", ",",
             ">>>", "all\n", "add\n", "<tool_calls>", "</tool_calls>",
             "<function_calls>", "</function_calls>", dsml(""), "<|tools_prefix|>", "<|inner_prefix|>", "```json"]
        ),
        max_size=12,
    ),
)  # fmt: skip
def test_no_text_makes_parsing_fail(name: str, pieces: list[str]) -> None:
    whole = summary(read(name, ["".join(pieces)]))
    assert summary(read(name, pieces)) == whole
    if not whole[2] and not chat_format(name).has_reasoning and name != "deepseek":
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


# Notations of LFM2 and Gemma 4: the text of the arguments, and the value of the first one.
NOTED = [
    ("lfm", "say(text='it\\'s')", "it's"),
    ("lfm", "say(text='it's', b=1)", "it's"),  # as the chat template writes it
    ("lfm", "say(text='a\nb\\n\\t\\u00e9\\x41\\d\\\\')", "a\nb\n\té" + "A\\d\\"),
    ("lfm", 'say(text="(a=1), [\\"b\\"]")', '(a=1), ["b"]'),
    ("lfm", "say(text=['a', True, None, (1, -2.5e3), {'k': false}])", ["a", True, None, [1, -2500.0], {"k": False}]),
    ("lfm", "say(from='a')", "a"),  # a keyword of Python
    ("lfm", "add(a=007, b=1)", 7),
    ("lfm", "say(text=celsius)", "celsius"),
    ("gemma", '{text:<|"|>it\'s "{" \\n<|"|>,b:1}', 'it\'s "{" \\n'),
    (
        "gemma",
        '{text:[<|"|>a<|"|>,true,null,1.5,{k-1:<|"|>{<|"|>,<|"|>k 2<|"|>:[]}]}',
        ["a", True, None, 1.5, {"k-1": "{", "k 2": []}],
    ),
    ("gemma", "{text:celsius}", "celsius"),
]


@pytest.mark.parametrize(("name", "written", "value"), NOTED)
def test_values_of_the_models_own_notations_are_read(name: str, written: str, value: Any) -> None:
    call = (
        f"<|tool_call_start|>[{written}]<|tool_call_end|>"
        if name == "lfm"
        else f"<|tool_call>call:say{written}<tool_call|>"
    )
    _, content, calls = summary(read(name, list(call)))
    assert content == ""
    assert next(iter(calls[0][1].values())) == value


def test_a_call_keeps_the_models_id_unless_it_is_given_twice() -> None:
    parts = read("kimi", [kimi("add", "{}", 3), kimi("say", "{}", 4), kimi("say", "{}", 4)])
    ids = [part.call.id for part in parts if part.call is not None]
    assert ids[:2] == ["functions.add:3", "functions.say:4"]
    assert ids[2].startswith("call_")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen-xml", "<tool_call><function=add><parameter=a>1</parameter>"),
        ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>"),
        ("minimax", '<minimax:tool_call><invoke name="add"><parameter name="a">1</parameter>'),
        ("seed", "<seed:tool_call><function=add><parameter=a>1</parameter>"),
    ],
)
def test_a_tagged_call_that_the_token_limit_cut_is_content(name: str, text: str) -> None:
    parser = AnswerParser(ParseOptions(chat_format=chat_format(name), tools=TOOLS))
    parts, _ = parser.take(Delta(text=text, finish="length"))
    assert summary(parts) == ("", text, []), "further parameters may be missing"
    assert summary(read(name, [text])) == ("", "", [("add", {"a": 1})]), "the model has ended the call itself"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen-xml", "<tool_call>" + "\n" * 30000),
        ("qwen-xml", "<tool_call><function=add>" + "<parameter=a>" * 3000 + "</function></tool_call>"),
        ("glm", "<tool_call>add<arg_key>" + " " * 30000 + "</tool_call>"),
        ("kimi", "<|tool_call_begin|>" + " " * 30000),
        ("seed", "<seed:tool_call><function=" + "a" * 30000),
        ("lfm", "<|tool_call_start|>[say(text=" + "('" * 15000 + "]<|tool_call_end|>"),
        ("gemma", "<|tool_call>call:say{" + "a:{" * 10000 + "}<tool_call|>"),
        ("nemotron", "<TOOLCALL>" + "[" * 30000 + "</TOOLCALL>"),
    ],
)
def test_a_long_malformed_call_is_content(name: str, text: str) -> None:
    pieces = [text[place : place + 4] for place in range(0, len(text), 4)]
    assert summary(read(name, pieces)) == ("", text, [])


def test_a_long_prefix_of_many_regions_takes_linear_time() -> None:
    """A request with continue_final_message can have any. Quadratic, this one takes many minutes."""
    prefix = ">>>all\n" * 40_000
    assert summary(read("functionary", ["Hi"], prefix=prefix)) == ("", "Hi", [])


def test_only_special_tokens_that_mark_regions_are_kept() -> None:
    special = {"[TOOL_CALLS]": 5, "</s>": 2, "<|python_tag|>": 7, "<think>": 9}
    assert marker_tokens(chat_format("mistral"), special) == {5}
    assert marker_tokens(chat_format("llama"), special) == {7}
    assert marker_tokens(chat_format("thinker"), special) == {9}
    assert marker_tokens(None, special) == frozenset()
    special = {"<|tool_call>": 1, "<tool_call|>": 2, '<|"|>': 3, "<|channel>": 4, "<channel|>": 5, "<turn|>": 6}
    assert marker_tokens(chat_format("gemma"), special) == {1, 2, 3, 4, 5}
    special = {"<|tool_call_start|>": 1, "<|tool_call_end|>": 2, "<|im_end|>": 3}
    assert marker_tokens(chat_format("lfm"), special) == {1, 2}
