"""How families of models write tool calls and thoughts, where their tokenizers do not say so themselves.

A family is known by what its chat template mentions. Its `response` is a response template of transformers (the
declarative form that `ResponseParser` reads); `written` says how to hold such a model to a call by a grammar.
Law: PURE, values only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from worker.prompt.body_reader import Json

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names that response templates have for what a model thinks."""
CALLS = "tool_calls"
_ANYWHERE = r"\A"
"""An anchor of those who are given the begun answer alone."""


@dataclass(frozen=True, slots=True)
class Written:
    """A family's way to write calls, each as `{"name": ..., <arguments>: {...}}`."""

    begin: str = ""
    """Before all calls."""
    each: tuple[str, str] = ("", "")
    """Around each call."""
    between: str | None = None
    """Between two of them; None: there is only ever one."""
    end: str = ""
    arguments: str = "arguments"


BARE = Written("[", ("", ""), ", ", "]")
"""For models whose own way no grammar here can write: the calls as a JSON array, and nothing else."""


@dataclass(frozen=True, slots=True)
class Family:
    """What is known of how a model answers."""

    name: str
    response: Json
    """A response template, without tool calls or thoughts where the model has none."""
    written: Written | None = None
    """None: held to calls, it answers in the BARE way."""
    think: tuple[str, str] | None = None
    """What stands around thoughts, where both are plain strings."""
    is_anchored: bool = field(default=True)
    """The response template finds the begun answer in the whole prompt by itself."""

    @property
    def thinks(self) -> bool:
        return any(name in self.response["fields"] for name in THOUGHTS)

    @property
    def calls(self) -> bool:
        return CALLS in self.response["fields"]


def find(source: str, stated: Any) -> Family | None:
    """The family of a model whose chat template reads `source`; `stated` is the response template of its tokenizer,
    which comes first. None for a model that answers in plain text only."""
    if isinstance(stated, dict):
        return Family("stated", stated, think=_plain_thoughts(stated))
    for signs, family in _KNOWN:
        if all(sign in source for sign in signs):
            return _with_thoughts(family, source)
    thinking = _with_thoughts(Family("plain", _response({}), is_anchored=False), source)
    return thinking if thinking.thinks else None


def _with_thoughts(family: Family, source: str) -> Family:
    for begin, end in (("<think>", "</think>"), ("[THINK]", "[/THINK]")):
        if end in source and not family.thinks:
            thoughts = {"open": begin, "close": end, "content": "text"}
            fields = {"reasoning_content": thoughts, **family.response["fields"]}
            return replace(family, response={**family.response, "fields": fields}, think=(begin, end))
    return family


def _plain_thoughts(response: Json) -> tuple[str, str] | None:
    for name in THOUGHTS:
        found = response.get("fields", {}).get(name)
        if isinstance(found, dict) and isinstance(found.get("open"), str) and isinstance(found.get("close"), str):
            return found["open"], found["close"]
    return None


def _response(fields: Json) -> Json:
    return {"start_anchor_pattern": _ANYWHERE, "fields": {**fields, "content": {"content": "text"}}}


def _family(name: str, calls: Json, written: Written | None = None, further: Json | None = None) -> Family:
    response = _response({CALLS: {"content": "json", "repeats": True, **calls}, **(further or {})})
    return Family(name, response, written, is_anchored=False)


def _function(name: str, arguments: str) -> Json:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


_HERMES = _family(
    "hermes",
    {"open": "<tool_call>", "close": "</tool_call>", "transform": _function("{content.name}", "{content.arguments}")},
    Written(each=("<tool_call>\n", "\n</tool_call>"), between="\n"),
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
_MISTRAL = _family(
    "mistral",
    {"open": "[TOOL_CALLS]", "transform": _function("{name}", "{arguments}"), "transform_each": True},
    Written(begin="[TOOL_CALLS][", between=", ", end="]"),
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
    Written(arguments="parameters"),
)
_BAR, _SPACE = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"


def _token(name: str) -> str:
    """A special token as DeepSeek spells it."""
    return f"<{_BAR}{name.replace(' ', _SPACE)}{_BAR}>"


_DEEPSEEK = _family(
    "deepseek",
    {
        "open_pattern": rf"(?:{_token('tool calls begin')})?\s*{_token('tool call begin')}"
        rf"(?:function{_token('tool sep')})?(?P<name>[^\s<]+)(?:\s*```json\s*|{_token('tool sep')})",
        "close_pattern": rf"(?:\s*```)?\s*{_token('tool call end')}",
        "transform": _function("{name}", "{content}"),
    },
    # an end that may be missing is a part of its own: what ends a call must not depend on how its text arrives
    further={"calls_end": {"open": _token("tool calls end"), "content": "text"}},
)
_HARMONY = Family(
    "harmony",
    {
        "start_anchor_pattern": _ANYWHERE,
        "fields": {
            "reasoning_content": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
                "close_pattern": r"<\|end\|>",
                "content": "text",
            },
            CALLS: {
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
_KNOWN: Sequence[tuple[tuple[str, ...], Family]] = (
    (("<function=", "<tool_call>"), _QWEN_XML),
    (("<tool_call>", "</tool_call>", "arguments"), _HERMES),
    (("[TOOL_CALLS]", "[ARGS]"), _MISTRAL_ARGS),
    (("[TOOL_CALLS]",), _MISTRAL),
    ((_token("tool call begin"),), _DEEPSEEK),
    (("<|channel|>", "functions."), _HARMONY),
    (('"parameters"', "ipython"), _LLAMA),
    (("<|python_tag|>",), _LLAMA),
)
