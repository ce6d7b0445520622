"""The tools of a request: which may be called, whether one must be, and the grammar that makes it so.

Law: PURE, values only.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from worker.errors import InvalidValue, UnsupportedByModel
from worker.interface import JSON_WHITESPACE, Grammar
from worker.prompt.body_reader import Fields, Json
from worker.prompt.chat_formats import Family, Written
from worker.prompt.closed_schemas import closed

_JSON_BEGINS = '{["-0123456789tfn \t\r\n'


@dataclass(frozen=True, slots=True)
class Tooling:
    """What a request says about tools."""

    shown: Sequence[Json] = ()
    """To the chat template: all, or those that are allowed."""
    callable: Sequence[Json] = ()
    """Those whose calls are told apart: all that are shown, or the one that must be called."""
    is_required: bool = False
    """The answer must be calls."""
    most: int | None = None
    """Calls at most."""


def read(fields: Fields, tools: Sequence[Json], *, has_place: bool) -> Tooling:
    """`tools` as the chat has them, with `tool_choice` and `parallel_tool_calls`; `has_place`: the chat template shows
    tools to the model. Raises InvalidValue, or UnsupportedByModel where there is no such place."""
    choice = fields.take("tool_choice")
    is_parallel = fields.flag("parallel_tool_calls")
    named: str | None = None
    allowed: frozenset[str] | None = None
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, allowed = _allowed(choice.get("allowed_tools"))
    elif isinstance(choice, dict):
        named = _named(choice)
    elif choice not in (None, "none", "auto", "required"):
        raise InvalidValue("tool_choice must be none, auto, required or name a function", param="tool_choice")
    if not tools:
        if choice in (None, "none", "auto") and allowed is None:
            return Tooling()
        raise InvalidValue("tool_choice needs tools", param="tool_choice")
    if choice == "none":
        return Tooling()
    if not has_place:
        raise UnsupportedByModel(
            'this model\'s chat template has no place for tools; send tool_choice "none" and describe them in a'
            " message, or set a template that has one with chat-template in the preset",
            param="tools",
        )
    if allowed is not None:  # others are not shown: where no grammar holds it, a model may call what it sees
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
    called = [tool for tool in tools if named in (None, tool["function"]["name"])]
    if not called or (allowed is not None and allowed != {tool["function"]["name"] for tool in tools}):
        raise InvalidValue("tool_choice names a function that is not among the tools", param="tool_choice")
    is_required = named is not None or choice == "required"
    is_one = named is not None if is_parallel is None else not is_parallel  # who names a function wants it called once
    return Tooling(tools, called, is_required, 1 if is_one else None)


def can_tell(written: Written, special: Mapping[str, int]) -> bool:
    """Whether what a call begins with can never begin JSON, so that an answer may be one or the other."""
    first = written.begin + written.each[0]
    return bool(first) and (first[0] not in _JSON_BEGINS or any(first.startswith(mark) for mark in special if mark))


def grammar(
    tooling: Tooling, written: Written, special: Mapping[str, int], *, otherwise: Grammar | None = None
) -> Grammar:
    """One call of a tool, or several, and nothing else; arguments satisfy the tool's parameters.

    `special`: the tokenizer's special tokens by text; they are written as tokens, not letter by letter. `otherwise`:
    of a JSON schema, which the answer may satisfy instead of being calls.
    """
    rules = []
    for index, tool in enumerate(tooling.callable):
        function = tool["function"]
        begin = f'{{"name": {_json(function["name"])}, {_json(written.arguments)}: '
        rules.append(f"f{index}: {_literal(begin)} a{index} {_literal('}')}")
        rules.append(f"a{index}: %json {_json(_parameters(function))}")
    alternatives = " | ".join(f"f{index}" for index in range(len(tooling.callable)))
    further = f" ({spelt(written.between, special)} call)*" if written.between is not None and tooling.most != 1 else ""
    first, last = (spelt(mark, special) for mark in written.each)
    rules = [
        f"calls: {spelt(written.begin, special)} call{further} {spelt(written.end, special)}",
        f"call: {first} ({alternatives}) {last}",
        *rules,
    ]
    if otherwise is None:
        return Grammar("lark", "\n".join(["start: calls", *rules]), "tools")
    compiler = {"lenient": otherwise.lenient, "whitespace_pattern": JSON_WHITESPACE}
    answer = _json({**orjson.loads(otherwise.text), "x-guidance": compiler})
    return Grammar("lark", "\n".join(["start: calls | answer", f"answer: %json {answer}", *rules]), otherwise.field)


def preamble(family: Family | None, *, is_begun: bool, special: Mapping[str, int]) -> str:
    """Lark's rule `preamble` for the thoughts that may come before what a grammar holds; empty for a model that has
    none. `is_begun`: the prompt ends within them."""
    if family is None or family.think is None:
        return ""
    begin, end = family.think
    if end in special:
        rules = [f"thoughts: /(?s:.*)/ <[{special[end]}]>"]
    else:
        rules = [f"thoughts[suffix={_literal(end)}]: /(?s:.*)/"]
    blanks = r"blanks: /[ \n]{1,8}/"
    whole = "thoughts blanks?"
    rule = f"preamble: {whole}" if is_begun else f"preamble: ({spelt(begin, special)} {whole})?"
    return "\n".join([rule, *rules, blanks])


def spelt(text: str, special: Mapping[str, int]) -> str:
    """`text` in Lark: literals, and special tokens where it has some."""
    marks = sorted((mark for mark in special if mark and mark in text), key=len, reverse=True)
    if not marks:
        return _literal(text) if text else ""
    pieces = re.split("(" + "|".join(map(re.escape, marks)) + ")", text)
    return " ".join(f"<[{special[each]}]>" if each in special else _literal(each) for each in pieces if each)


def _named(choice: Json) -> str:
    name = _function_name(choice)
    if name is None:
        raise InvalidValue(
            'tool_choice must be none, auto, required, {"type": "function", "function": {"name": ...}} or of type'
            " allowed_tools",
            param="tool_choice",
        )
    return name


def _allowed(stated: Any) -> tuple[str, frozenset[str]]:
    """The mode, auto or required, and the names of the functions that may be called."""
    mode, tools = (stated.get("mode"), stated.get("tools")) if isinstance(stated, dict) else (None, None)
    names = [_function_name(tool) for tool in tools] if isinstance(tools, list) else []
    if mode not in ("auto", "required") or not names or None in names:
        raise InvalidValue(
            "allowed_tools of tool_choice must have a mode, auto or required, and tools, each of type function with its"
            " name",
            param="tool_choice",
        )
    return mode, frozenset(name for name in names if name is not None)


def _function_name(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _parameters(function: Mapping[str, Any]) -> Json:
    """What no grammar can say is passed over, unless the tool is `strict`."""
    stated = function.get("parameters")
    if stated is None:
        stated = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(stated, dict):
        raise InvalidValue("a tool's parameters must be a JSON schema, an object", param="tools")
    compiler = {"lenient": function.get("strict") is not True, "whitespace_pattern": JSON_WHITESPACE}
    return {"type": "object", **closed(stated), "x-guidance": compiler}


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _literal(text: str) -> str:
    return _json(text)
