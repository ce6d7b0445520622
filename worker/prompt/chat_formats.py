"""Markup of tool calls, reasoning and fill-in-the-middle by model family, for tokenizers that do not describe it.

A format is recognized by markers in the chat template. Its `response` is a response template of transformers (the
declarative form that `ResponseParser` reads); `call_syntax` defines how a grammar constrains the model to tool calls.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from worker.prompt.body_reader import Json
from worker.prompt.call_notations import gemma_to_json, keyed_to_json, lines_to_json, objects_to_list, python_to_json

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # names of reasoning fields in response templates
CALLS_FIELD = "tool_calls"
_ANYWHERE = r"\A"  # start anchor for parsers that are given only the answer's prefix


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Syntax of tool calls, each written as `{<name>: ..., <arguments>: {...}}`."""

    begin: str = ""  # before the first call
    each: tuple[str, str] = ("", "")  # around each call
    between: str | None = None  # between two calls; None: one call at most
    end: str = ""
    name: str = "name"
    arguments: str = "arguments"


# Syntax for models whose own one cannot be written as a grammar: a JSON array of calls and nothing else.
BARE_CALLS = CallSyntax("[", ("", ""), ", ", "]")


@dataclass(frozen=True, slots=True)
class Messages:
    """Markup of an answer in several messages, of which reasoning is one."""

    next: str  # begins each message but the first
    final: str  # begins the message with the answer
    others: Sequence[str]  # beginnings of all messages that are no reasoning, behind the token of their first marker


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Markup of a model's answers."""

    response: Json  # a response template, with tool calls and reasoning if the model has them
    call_syntax: CallSyntax | None = None  # None: constrained calls use BARE_CALLS
    to_json: Callable[[str], str] = str  # rewrites the text of calls as the JSON that `response` reads
    markers: tuple[str, str] | None = None  # markers around reasoning, if `response` has patterns for them
    messages: Messages | None = None
    is_anchored: bool = False  # the response template finds the answer's prefix in the whole prompt

    @property
    def reasoning_markers(self) -> tuple[str, str] | None:
        """The markers around reasoning; None for a model without reasoning, or if only their patterns are known."""
        for name in REASONING_FIELDS:
            found = self.response.get("fields", {}).get(name)
            if isinstance(found, dict) and isinstance(found.get("open"), str) and isinstance(found.get("close"), str):
                return found["open"], found["close"]
        return self.markers

    @property
    def has_reasoning(self) -> bool:
        return any(name in self.response["fields"] for name in REASONING_FIELDS)

    @property
    def marks_content(self) -> bool:
        """True if content has markers as well, so that every answer consists of regions."""
        return not self.response["fields"].get("content", {}).keys().isdisjoint(("open", "open_pattern"))


_RESPONSE = ("<response>", "</response>")  # around ERNIE's content
_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


def find(source: str, response_template: Any) -> ChatFormat | None:
    """Return the format of a model whose chat template has the text `source`. The tokenizer's own response template
    `response_template` takes precedence.

    Return None for a model that answers in plain text only.
    """
    if isinstance(response_template, dict):
        return ChatFormat(response_template, is_anchored=True)
    for markers, chat_format in _KNOWN:
        if all(marker in source for marker in markers):
            return _with_reasoning(chat_format, source)
    plain = _with_reasoning(ChatFormat(_response({})), source)
    return plain if plain.has_reasoning else None


def _with_reasoning(chat_format: ChatFormat, source: str) -> ChatFormat:
    for begin, end in _REASONING:
        if end in source and not chat_format.has_reasoning:
            reasoning = {"open": begin, "close": end, "content": "text"}
            if chat_format is _KIMI:  # the model may begin its calls without closing the reasoning
                reasoning = {"open": begin, "close_pattern": rf"{end}|(?={_KIMI_CALLS})", "content": "text"}
            fields = {"reasoning_content": reasoning, **chat_format.response["fields"]}
            if _RESPONSE[0] in source and _RESPONSE[1] in source:
                fields["content"] = {"open": _RESPONSE[0], "close": _RESPONSE[1], "content": "text"}
            return replace(chat_format, response={**chat_format.response, "fields": fields}, markers=(begin, end))
    return chat_format


def _response(fields: Json) -> Json:
    return {"start_anchor_pattern": _ANYWHERE, "fields": {"content": {"content": "text"}, **fields}}


def _family(
    calls: Json,
    call_syntax: CallSyntax | None = None,
    further: Json | None = None,
    to_json: Callable[[str], str] = str,
) -> ChatFormat:
    """`further`: fields beside those of calls and of unmarked content."""
    response = _response({CALLS_FIELD: {"content": "json", "repeats": True, **calls}, **(further or {})})
    return ChatFormat(response, call_syntax, to_json)


def _function(name: str, arguments: str) -> Json:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


_EACH: Json = {"transform": _function("{name}", "{arguments}"), "transform_each": True}  # of a JSON array of calls


def _array(begin: str, end: str = "", to_json: Callable[[str], str] = str) -> ChatFormat:
    """A format with all calls in a JSON array between two markers."""
    calls = {"open": begin, **({"close": end} if end else {}), **_EACH}
    return _family(calls, CallSyntax(begin=f"{begin}[", between=", ", end=f"]{end}"), to_json=to_json)


_HERMES = _family(
    {"open": "<tool_call>", "close": "</tool_call>", "transform": _function("{content.name}", "{content.arguments}")},
    CallSyntax(each=("<tool_call>\n", "\n</tool_call>"), between="\n"),
)
# Repetitions at the beginning and end of a region are bounded: an incomplete match is searched again with each token.
# A tag that is not closed has no key, which is an error: the call becomes content. Its text to the end is taken, since
# a search from each such tag would take quadratic time.
_PARAMETER = r"<parameter=(?:(?P<key>[^>\n]{1,256})>\n?(?P<value>.*?)\n?</parameter>|.*)"


def _function_tags(tag: str) -> ChatFormat:
    return _family(
        {
            "open_pattern": rf"<{tag}>\s{{0,32}}<function=(?P<name>[^>\n]{{1,256}})>",
            "close_pattern": rf"</function>\s{{0,32}}</{tag}>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": _PARAMETER},
            "transform": _function("{name}", "{content}"),
        },
    )


_QWEN_XML = _function_tags("tool_call")
_GLM = _family(
    {
        "open_pattern": r"<tool_call>\s{0,32}(?P<name>[^\s<{]{1,256})",
        "close": "</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<arg_key>\s{0,32}+(?:(?P<key>[^<>]{1,256}?)\s{0,32}</arg_key>\s{0,32}"
            r"<arg_value>(?P<value>.*?)</arg_value>|.*)"
        },
        "transform": _function("{name}", "{content}"),
    },
)
_GRANITE = _array("<|tool_call|>")
_MISTRAL = _array("[TOOL_CALLS]")
_MISTRAL_ARGS = _family(
    {
        "open_pattern": r"\[TOOL_CALLS\]\s{0,32}(?P<name>[^\[\]{}\s]{1,256})(?:\[CALL_ID\][^\[\]]{0,256})?\[ARGS\]",
        "close_pattern": r"(?=\[TOOL_CALLS\])",
        "transform": _function("{name}", "{content}"),
    },
)
_LLAMA = _family(
    {
        "open_pattern": r"\A\s{0,32}(?:<\|python_tag\|>\s{0,32})?(?=\{)",
        "transform": _function("{content.name}", "{content.parameters}"),
    },
    CallSyntax(arguments="parameters"),
)
_BAR, _SPACE = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"


def _token(name: str) -> str:
    """Return a special token in DeepSeek's spelling."""
    return f"<{_BAR}{name.replace(' ', _SPACE)}{_BAR}>"


_DEEPSEEK = _family(
    {
        "open_pattern": rf"(?:{_token('tool calls begin')})?\s{{0,32}}{_token('tool call begin')}"
        rf"(?:function{_token('tool sep')})?(?P<name>[^\s<]{{1,256}})"
        rf"(?:\s{{0,32}}```json\s{{0,32}}|{_token('tool sep')})",
        "close_pattern": rf"(?:\s{{0,32}}```)?\s{{0,32}}{_token('tool call end')}",
        "transform": _function("{name}", "{content}"),
    },
    # the optional end marker is a field of its own, so that the end of a call does not depend on how its text is
    # streamed
    further={"calls_end": {"open": _token("tool calls end"), "content": "text"}},
)
_KIMI_CALLS = r"<\|tool_calls_section_begin\|>"
_KIMI = _family(
    {
        "open_pattern": rf"(?:{_KIMI_CALLS})?\s{{0,32}}<\|tool_call_begin\|>\s{{0,32}}"
        r"(?P<id>(?:functions\.)?(?P<name>[^\s<>:]{1,256}):\d{1,9})\s{0,32}<\|tool_call_argument_begin\|>",
        "close": "<|tool_call_end|>",
        # The next prompt repeats the id, and the model goes on with its number.
        "transform": {"id": "{id}", **_function("{name}", "{content}")},
    },
    further={"calls_end": {"open": "<|tool_calls_section_end|>", "content": "text"}},
)


def _invoke_tags(begin: str, end: str, prefix: str = "") -> ChatFormat:
    """`prefix` is a part of each tag."""
    tag = (
        rf"<{prefix}parameter name=(?:\"(?P<key>[^\"<>]{{1,256}})\"(?: string=\"\w{{1,8}}\")?>"
        rf"\n?(?P<value>.*?)\n?</{prefix}parameter>|.*)"
    )
    calls = {
        "open_pattern": rf"(?:{begin}\s{{0,32}})?<{prefix}invoke name=\"(?P<name>[^\"<>]{{1,256}})\">",
        "close": f"</{prefix}invoke>",
        "content": "xml-inline",
        "content_args": {"tag_pattern": tag},
        "transform": _function("{name}", "{content}"),
    }
    return _family(calls, further={"calls_end": {"open_pattern": end, "content": "text"}})


_MINIMAX = _invoke_tags("<minimax:tool_call>", "</minimax:tool_call>")
_DSML_TAG = f"{_BAR}DSML{_BAR}"
_DSML = _invoke_tags(
    f"<{_DSML_TAG}(?:function|tool)_calls>", f"</{_DSML_TAG}(?:function|tool)_calls>", prefix=_DSML_TAG
)
_SEED = _function_tags("seed:tool_call")
_NEMOTRON = _array("<TOOLCALL>", "</TOOLCALL>")
_PHI = _family(
    {"open": "<|tool_call|>", "close": "<|/tool_call|>", **_EACH},
    CallSyntax(each=("<|tool_call|>", "<|/tool_call|>"), between=""),
    to_json=objects_to_list,  # the model writes lists and single calls
)
_PHI_LIST = _family(
    {"open_pattern": r"functools(?=\[)", **_EACH},
    CallSyntax(begin="functools[", between=", ", end="]"),
)
_LFM = _family({"open": "<|tool_call_start|>", "close": "<|tool_call_end|>", **_EACH}, to_json=python_to_json)
_GEMMA = _family(
    {
        "open_pattern": r"<\|tool_call>call:(?P<name>[^\s{}<>]{1,256})(?=\{)",
        "close": "<tool_call|>",
        "content_args": {"string_delims": [['<|"|>', '<|"|>']]},  # names the token that `marker_tokens` must find
        "transform": _function("{name}", "{content}"),
    },
    further={"reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"}},
    to_json=gemma_to_json,
)
# Jamba and Hunyuan-A13B write an array, MiniMax-M1 an object a line.
_TOOL_CALLS = _array("<tool_calls>", "</tool_calls>", objects_to_list)
_HUNYUAN = _family(
    {
        "open_pattern": r"(?:<tool_calls>\s{0,32})?<tool_call>\s{0,32}(?P<name>[^\s<{]{1,256})\s{0,32}```json\s{0,32}",
        "close_pattern": r"\s{0,32}```\s{0,32}</tool_call>",
        "transform": _function("{name}", "{content}"),
    },
    further={"calls_end": {"open": "</tool_calls>", "content": "text"}},
)
_OLMO = _family({"open": "<function_calls>", "close": "</function_calls>", **_EACH}, to_json=lines_to_json)
_PYTHONIC = _family(
    {
        "open_pattern": r"\A\s{0,32}(?:<\|python_start\|>\s{0,32})?(?=\[\s{0,32}[A-Za-z_{])",
        "close": "<|python_end|>",
        **_EACH,
    },
    to_json=python_to_json,
)
_ARRAY = _family({"open_pattern": r"\A\s{0,32}(?=\[\s{0,32}\{)", **_EACH}, BARE_CALLS)
_APERTUS = _family(
    {"open": "<|tools_prefix|>", "close": "<|tools_suffix|>", **_EACH},
    further={"reasoning_content": {"open": "<|inner_prefix|>", "close": "<|inner_suffix|>", "content": "text"}},
    to_json=keyed_to_json,
)
_FUNCTION_JSON = _family(
    {
        "open_pattern": r"<function=(?P<name>[^<>\s]{1,256})>",
        "close": "</function>",
        "transform": _function("{name}", "{content}"),
    },
)
_FUNCTIONARY = _family(
    {
        "open_pattern": r"(?:\A|>>>)(?P<name>[\w.-]{1,256})\n\s{0,32}(?=\{)",
        "close_pattern": r"(?=>>>)",
        "transform": _function("{name}", "{content}"),
    },
    further={"content": {"open_pattern": r"(?:\A|>>>)all\n", "close_pattern": r"(?=>>>)", "content": "text"}},
)
_COHERE = _family(
    {
        "open": "<|START_ACTION|>",
        "close": "<|END_ACTION|>",
        "transform": _function("{tool_name}", "{parameters}"),
        "transform_each": True,
    },
    CallSyntax("<|START_ACTION|>[", ("", ""), ", ", "]<|END_ACTION|>", "tool_name", "parameters"),
    further={
        "reasoning_content": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>", "content": "text"},
        "content": {
            "open": ["<|START_RESPONSE|>", "<|START_TEXT|>"],
            "close": ["<|END_RESPONSE|>", "<|END_TEXT|>"],
            "content": "text",
        },
    },
)
_COHERE_FENCED = _family(
    {
        "open_pattern": r"Action:\s{0,8}```json\s",
        "close": "```",
        "transform": _function("{tool_name}", "{parameters}"),
        "transform_each": True,
    },
    CallSyntax("Action:\n```json\n[", ("", ""), ",\n", "]\n```", "tool_name", "parameters"),
)
_HARMONY = replace(
    _family(
        {
            "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:commentary|analysis) to=functions\."
            r"(?P<name>[\w.-]{1,256})\s{0,32}(?:<\|constrain\|>\w{0,32})?<\|message\|>",
            "close_pattern": r"<\|call\|>",
            "transform": _function("{name}", "{content}"),
        },
        further={
            "reasoning_content": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
                "close_pattern": r"<\|end\|>",
                "content": "text",
            },
            "content": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)\s{0,32}"
                r"(?:<\|constrain\|>\w{0,32})?<\|message\|>",
                "close_pattern": r"<\|(?:end|return)\|>",
                "content": "text",
            },
        },
    ),
    markers=("<|channel|>analysis<|message|>", "<|end|>"),
    messages=Messages("<|start|>assistant", "<|channel|>final<|message|>", ("final", "commentary")),
)
_KNOWN: Sequence[tuple[tuple[str, ...], ChatFormat]] = (
    (("<function=", "<tool_call>"), _QWEN_XML),
    (("<tool_calls>", "<tool_call>function_name"), _HUNYUAN),
    (("<tool_call>", "<arg_key>"), _GLM),
    (("<tool_call>", "</tool_call>", "arguments"), _HERMES),
    (("<|tool_call|>", "<|/tool_call|>"), _PHI),
    (("<|tool_call|>",), _GRANITE),
    (("functools[",), _PHI_LIST),
    (("[TOOL_CALLS]", "[ARGS]"), _MISTRAL_ARGS),
    (("[TOOL_CALLS]",), _MISTRAL),
    ((_token("tool call begin"),), _DEEPSEEK),
    (("<|channel|>", "functions."), _HARMONY),
    (("<|tool_call_begin|>",), _KIMI),
    (("<|im_system|>tool_declare",), _KIMI),  # the first template of Kimi-K2, which has no past calls
    (("<minimax:tool_call>",), _MINIMAX),
    (("<seed:tool_call>", "<function="), _SEED),
    ((_DSML_TAG,), _DSML),
    (("<tool_calls>",), _TOOL_CALLS),
    (("<function_calls>",), _OLMO),
    (("<|tools_prefix|>",), _APERTUS),
    ((">>>all",), _FUNCTIONARY),
    (("<function=",), _FUNCTION_JSON),
    (("<TOOLCALL>",), _NEMOTRON),
    (("<|tool_call>call:",), _GEMMA),
    (("<|START_ACTION|>",), _COHERE),
    (("<|CHATBOT_TOKEN|>", "Action:", "tool_name"), _COHERE_FENCED),
    (("<|tool_call_start|>",), _LFM),
    (("<|im_start|>", "List of tools: "), _LFM),  # templates of LFM2 without past calls
    (("[func_name1(",), _PYTHONIC),
    (("tool_call_name", "JSON array"), _ARRAY),  # xLAM-2
    (('"parameters"', "ipython"), _LLAMA),
    (("<|python_tag|>",), _LLAMA),
)


# Fill-in-the-middle

_PREFIX, _SUFFIX = "prefix", "suffix"
# Codestral, the last one, has the suffix first and no marker for the middle.
_LAYOUTS: Sequence[tuple[str, ...]] = (
    ("<|fim_prefix|>", _PREFIX, "<|fim_suffix|>", _SUFFIX, "<|fim_middle|>"),
    ("<fim_prefix>", _PREFIX, "<fim_suffix>", _SUFFIX, "<fim_middle>"),
    ("<fim-prefix>", _PREFIX, "<fim-suffix>", _SUFFIX, "<fim-middle>"),
    ("<|fim_begin|>", _PREFIX, "<|fim_hole|>", _SUFFIX, "<|fim_end|>"),
    (_token("fim begin"), _PREFIX, _token("fim hole"), _SUFFIX, _token("fim end")),
    ("<PRE>", _PREFIX, "<SUF>", _SUFFIX, "<MID>"),
    (f"{_SPACE}<PRE>", _PREFIX, f"{_SPACE}<SUF>", _SUFFIX, f"{_SPACE}<MID>"),
    ("[SUFFIX]", _SUFFIX, "[PREFIX]", _PREFIX),
)  # fmt: skip
_REPOSITORY = ("<|repo_name|>", "<repo_name>", "<reponame>", "<|fim_repo|>", "<fim-repo>")
# Markers before the name of a repository, and before the name of each of its files (Qwen2.5-Coder technical report,
# section 3.1).
_FILE = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")


@dataclass(frozen=True, slots=True)
class FillInTheMiddle:
    """Fill-in-the-middle tokens of one vocabulary."""

    layout: tuple[int | str, ...]  # token ids, and the positions of prefix and suffix
    repository: int | None = None
    file: int | None = None  # tokens that begin a repository and each of its files; None: not available

    def around(self, prefix: Iterable[int], suffix: Iterable[int]) -> list[int]:
        """Return the prompt after which the model generates the text between prefix and suffix."""
        parts = {_PREFIX: list(prefix), _SUFFIX: list(suffix)}
        return [id for part in self.layout for id in (parts[part] if isinstance(part, str) else [part])]


def find_fill_in_the_middle(vocabulary: Mapping[str, int]) -> FillInTheMiddle | None:
    """Return the fill-in-the-middle tokens of a vocabulary; None if it has none."""
    for layout in _LAYOUTS:
        marks = [mark for mark in layout if mark not in (_PREFIX, _SUFFIX)]
        if all(mark in vocabulary for mark in marks):
            found = tuple(vocabulary[part] if part in marks else part for part in layout)
            return FillInTheMiddle(found, _first(_REPOSITORY, vocabulary), _first(_FILE, vocabulary))
    return None


def _first(names: Sequence[str], vocabulary: Mapping[str, int]) -> int | None:
    return next((vocabulary[name] for name in names if name in vocabulary), None)
