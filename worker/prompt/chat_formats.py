"""Markup of tool calls, reasoning and fill-in-the-middle by model family, for tokenizers that do not describe it.

A format is recognized by markers in the chat template. Its `response` is a response template of transformers (the
declarative form that `ResponseParser` reads); `call_syntax` defines how a grammar constrains the model to tool calls.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from worker.prompt.body_reader import Json

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # names of reasoning fields in response templates
CALLS_FIELD = "tool_calls"
_ANYWHERE = r"\A"  # start anchor for parsers that are given only the answer's prefix


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Syntax of tool calls, each written as `{"name": ..., <arguments>: {...}}`."""

    begin: str = ""  # before the first call
    each: tuple[str, str] = ("", "")  # around each call
    between: str | None = None  # between two calls; None: one call at most
    end: str = ""
    arguments: str = "arguments"


# Syntax for models whose own one cannot be written as a grammar: a JSON array of calls and nothing else.
BARE_CALLS = CallSyntax("[", ("", ""), ", ", "]")


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Markup of a model's answers."""

    name: str
    response: Json  # a response template, with tool calls and reasoning if the model has them
    call_syntax: CallSyntax | None = None  # None: constrained calls use BARE_CALLS
    reasoning_markers: tuple[str, str] | None = None  # markers around reasoning, if both are literal strings
    is_anchored: bool = field(default=True)  # the response template finds the answer's prefix in the whole prompt

    @property
    def has_reasoning(self) -> bool:
        return any(name in self.response["fields"] for name in REASONING_FIELDS)


def find(source: str, response_template: Any) -> ChatFormat | None:
    """Return the format of a model whose chat template has the text `source`. The tokenizer's own response template
    `response_template` takes precedence.

    Return None for a model that answers in plain text only.
    """
    if isinstance(response_template, dict):
        return ChatFormat("tokenizer", response_template, reasoning_markers=_literal_marks(response_template))
    for markers, chat_format in _KNOWN:
        if all(marker in source for marker in markers):
            return _with_reasoning(chat_format, source)
    plain = _with_reasoning(ChatFormat("plain", _response({}), is_anchored=False), source)
    return plain if plain.has_reasoning else None


def _with_reasoning(chat_format: ChatFormat, source: str) -> ChatFormat:
    for begin, end in (("<think>", "</think>"), ("[THINK]", "[/THINK]")):
        if end in source and not chat_format.has_reasoning:
            reasoning = {"open": begin, "close": end, "content": "text"}
            fields = {"reasoning_content": reasoning, **chat_format.response["fields"]}
            return replace(
                chat_format, response={**chat_format.response, "fields": fields}, reasoning_markers=(begin, end)
            )
    return chat_format


def _literal_marks(response: Json) -> tuple[str, str] | None:
    for name in REASONING_FIELDS:
        found = response.get("fields", {}).get(name)
        if isinstance(found, dict) and isinstance(found.get("open"), str) and isinstance(found.get("close"), str):
            return found["open"], found["close"]
    return None


def _response(fields: Json) -> Json:
    return {"start_anchor_pattern": _ANYWHERE, "fields": {**fields, "content": {"content": "text"}}}


def _family(name: str, calls: Json, call_syntax: CallSyntax | None = None, further: Json | None = None) -> ChatFormat:
    response = _response({CALLS_FIELD: {"content": "json", "repeats": True, **calls}, **(further or {})})
    return ChatFormat(name, response, call_syntax, is_anchored=False)


def _function(name: str, arguments: str) -> Json:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


_HERMES = _family(
    "hermes",
    {"open": "<tool_call>", "close": "</tool_call>", "transform": _function("{content.name}", "{content.arguments}")},
    CallSyntax(each=("<tool_call>\n", "\n</tool_call>"), between="\n"),
)
_QWEN_XML = _family(
    "qwen-xml",
    {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
        "transform": _function("{name}", "{content}"),
    },
)
_GLM = _family(
    "glm",
    {
        "open_pattern": r"<tool_call>\s*(?P<name>[^\s<{]+)",
        "close": "</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
        },
        "transform": _function("{name}", "{content}"),
    },
)
_GRANITE = _family(
    "granite",
    {"open": "<|tool_call|>", "transform": _function("{name}", "{arguments}"), "transform_each": True},
    CallSyntax(begin="<|tool_call|>[", between=", ", end="]"),
)
_MISTRAL = _family(
    "mistral",
    {"open": "[TOOL_CALLS]", "transform": _function("{name}", "{arguments}"), "transform_each": True},
    CallSyntax(begin="[TOOL_CALLS][", between=", ", end="]"),
)
_MISTRAL_ARGS = _family(
    "mistral-args",
    {
        "open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>[^\[\]{}\s]+)(?:\[CALL_ID\][^\[\]]*)?\[ARGS\]",
        "close_pattern": r"(?=\[TOOL_CALLS\])",
        "transform": _function("{name}", "{content}"),
    },
)
_LLAMA = _family(
    "llama",
    {
        "open_pattern": r"\A\s*(?:<\|python_tag\|>\s*)?(?=\{)",
        "transform": _function("{content.name}", "{content.parameters}"),
    },
    CallSyntax(arguments="parameters"),
)
_BAR, _SPACE = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"


def _token(name: str) -> str:
    """Return a special token in DeepSeek's spelling."""
    return f"<{_BAR}{name.replace(' ', _SPACE)}{_BAR}>"


_DEEPSEEK = _family(
    "deepseek",
    {
        "open_pattern": rf"(?:{_token('tool calls begin')})?\s*{_token('tool call begin')}"
        rf"(?:function{_token('tool sep')})?(?P<name>[^\s<]+)(?:\s*```json\s*|{_token('tool sep')})",
        "close_pattern": rf"(?:\s*```)?\s*{_token('tool call end')}",
        "transform": _function("{name}", "{content}"),
    },
    # the optional end marker is a field of its own, so that the end of a call does not depend on how its text is
    # streamed
    further={"calls_end": {"open": _token("tool calls end"), "content": "text"}},
)
_HARMONY = ChatFormat(
    "harmony",
    {
        "start_anchor_pattern": _ANYWHERE,
        "fields": {
            "reasoning_content": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
                "close_pattern": r"<\|end\|>",
                "content": "text",
            },
            CALLS_FIELD: {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:commentary|analysis) to=functions\."
                r"(?P<name>[\w.-]+)\s*(?:<\|constrain\|>\w*)?<\|message\|>",
                "close_pattern": r"<\|call\|>",
                "content": "json",
                "repeats": True,
                "transform": _function("{name}", "{content}"),
            },
            "content": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>\w*)?"
                r"<\|message\|>",
                "close_pattern": r"<\|(?:end|return)\|>",
                "content": "text",
            },
            "stray": {"content": "text"},
        },
    },
    is_anchored=False,
)
_KNOWN: Sequence[tuple[tuple[str, ...], ChatFormat]] = (
    (("<function=", "<tool_call>"), _QWEN_XML),
    (("<tool_call>", "<arg_key>"), _GLM),
    (("<tool_call>", "</tool_call>", "arguments"), _HERMES),
    (("<|tool_call|>",), _GRANITE),
    (("[TOOL_CALLS]", "[ARGS]"), _MISTRAL_ARGS),
    (("[TOOL_CALLS]",), _MISTRAL),
    ((_token("tool call begin"),), _DEEPSEEK),
    (("<|channel|>", "functions."), _HARMONY),
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
    ("<\N{FULLWIDTH VERTICAL LINE}fim\N{LOWER ONE EIGHTH BLOCK}begin\N{FULLWIDTH VERTICAL LINE}>", _PREFIX,
     "<\N{FULLWIDTH VERTICAL LINE}fim\N{LOWER ONE EIGHTH BLOCK}hole\N{FULLWIDTH VERTICAL LINE}>", _SUFFIX,
     "<\N{FULLWIDTH VERTICAL LINE}fim\N{LOWER ONE EIGHTH BLOCK}end\N{FULLWIDTH VERTICAL LINE}>"),
    ("<PRE>", _PREFIX, "<SUF>", _SUFFIX, "<MID>"),
    ("\N{LOWER ONE EIGHTH BLOCK}<PRE>", _PREFIX, "\N{LOWER ONE EIGHTH BLOCK}<SUF>", _SUFFIX,
     "\N{LOWER ONE EIGHTH BLOCK}<MID>"),
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
