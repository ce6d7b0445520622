"""Tools of a request: which ones may be called, whether a call is required, and the grammar that enforces it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from worker.errors import InvalidValue, UnsupportedByModel
from worker.interface import JSON_WHITESPACE, Grammar
from worker.prompt.body_reader import BodyFields, Json
from worker.prompt.chat_formats import CallSyntax, ChatFormat, Messages
from worker.prompt.guided_decoding import close_schema
from worker.protocol.dialects.generation_fields import REASONING_BUDGETS

_JSON_FIRST_CHARACTERS = '{["-0123456789tfn \t\r\n'


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """Tools of a request and constraints on their calls."""

    shown: Sequence[Json] = ()  # tools for the chat template: all or the allowed ones
    callable: Sequence[Json] = ()  # tools whose calls are parsed: the shown ones, or the required one
    is_required: bool = False  # the answer must consist of calls
    max_calls: int | None = None  # maximum number of calls; None: no limit


def read(fields: BodyFields, tools: Sequence[Json], *, has_place: bool) -> ToolOptions:
    """Read `tool_choice` and `parallel_tool_calls` for `tools`. `has_place`: the chat template renders tools.

    Raise InvalidValue, or UnsupportedByModel if the template does not render tools.
    """
    choice = fields.take("tool_choice")
    is_parallel = fields.flag("parallel_tool_calls")
    named: str | None = None
    allowed: frozenset[str] | None = None
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, allowed = _allowed(choice.get("allowed_tools"))
    elif isinstance(choice, dict):
        named = _read_function_name(choice)
    elif choice not in (None, "none", "auto", "required"):
        raise InvalidValue("tool_choice must be none, auto, required or name a function", param="tool_choice")
    if not tools:
        if choice in (None, "none", "auto") and allowed is None:
            return ToolOptions()
        raise InvalidValue("tool_choice needs tools of type function", param="tool_choice")
    if choice == "none":
        return ToolOptions()
    if not has_place:
        raise UnsupportedByModel(
            'this model\'s chat template does not render tools; send tool_choice "none" and describe them in a'
            " message, or set a template that renders them with chat-template in the preset",
            param="tools",
        )
    if allowed is not None:  # other tools are hidden: without a grammar the model may call any tool that it sees
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
    called = [tool for tool in tools if named in (None, tool["function"]["name"])]
    if not called or (allowed is not None and allowed != {tool["function"]["name"] for tool in tools}):
        raise InvalidValue("tool_choice names a function that is not in tools", param="tool_choice")
    is_required = named is not None or choice == "required"
    is_one = named is not None if is_parallel is None else not is_parallel  # a named function is called once by default
    return ToolOptions(tools, called, is_required, 1 if is_one else None)


def is_distinguishable(call_syntax: CallSyntax, special: Mapping[str, int]) -> bool:
    """Check that the beginning of a call is never the beginning of JSON, so that a grammar can allow either."""
    first = call_syntax.begin + call_syntax.each[0]
    return bool(first) and (
        first[0] not in _JSON_FIRST_CHARACTERS or any(first.startswith(mark) for mark in special if mark)
    )


def grammar(
    tooling: ToolOptions, call_syntax: CallSyntax, special: Mapping[str, int], *, otherwise: Grammar | None = None
) -> Grammar:
    """Return the grammar of one or more tool calls and nothing else. Arguments satisfy the tool's parameters.

    `special`: special tokens by text, which the grammar refers to as tokens. `otherwise`: a JSON schema that the
    answer may satisfy instead.
    """
    rules = []
    for index, tool in enumerate(tooling.callable):
        function = tool["function"]
        begin = f"{{{_json(call_syntax.name)}: {_json(function['name'])}, {_json(call_syntax.arguments)}: "
        rules.append(f"f{index}: {_literal(begin)} a{index} {_literal('}')}")
        rules.append(f"a{index}: %json {_json(_parameters(function))}")
    alternatives = " | ".join(f"f{index}" for index in range(len(tooling.callable)))
    further = (
        f" ({lark_text(call_syntax.between, special)} call)*"
        if call_syntax.between is not None and tooling.max_calls != 1
        else ""
    )
    first, last = (lark_text(mark, special) for mark in call_syntax.each)
    rules = [
        f"calls: {lark_text(call_syntax.begin, special)} call{further} {lark_text(call_syntax.end, special)}",
        f"call: {first} ({alternatives}) {last}",
        *rules,
    ]
    if otherwise is None:
        return Grammar("lark", "\n".join(["start: calls", *rules]), "tools")
    compiler = {"lenient": otherwise.lenient, "whitespace_pattern": JSON_WHITESPACE}
    answer = _json({**orjson.loads(otherwise.text), "x-guidance": compiler})
    return Grammar("lark", "\n".join(["start: calls | answer", f"answer: %json {answer}", *rules]), otherwise.field)


def preamble(
    chat_format: ChatFormat | None,
    *,
    is_open: bool,
    special: Mapping[str, int],
    budget: int | None = None,
    is_free: bool = False,
) -> str:
    """Return Lark's rule `preamble` for optional reasoning before constrained text; empty for a model without
    reasoning.

    `is_open`: the prompt ends inside the reasoning. `budget`: the most tokens of it; None: no limit. `is_free`: the
    grammar of `any_text` follows.
    """
    if chat_format is None or chat_format.reasoning_markers is None:
        return ""
    begin, end = chat_format.reasoning_markers
    if end in special:
        thoughts = "/(?s:.*)/" if budget is None else f"<[^{special[end]}]>{{0,{budget}}}" if budget > 0 else ""
        rules = [f"thoughts: {thoughts} <[{special[end]}]>"]
    else:
        rules = [f"thoughts[suffix={_literal(end)}]: /(?s:.*)/"]
    blanks = r"blanks: /[ \n]{1,8}/"
    messages = chat_format.messages
    whole = f"thoughts {lark_text(messages.next, special)}" if messages else "thoughts blanks?"
    rule = f"preamble: {whole}" if is_open else f"preamble: ({lark_text(begin, special)} {whole})?"
    if messages and not is_free:
        rule = f"{rule} {lark_text(messages.final, special)}"
    return "\n".join([rule, *rules, blanks])


def opening_token(chat_format: ChatFormat | None, special: Mapping[str, int]) -> int | None:
    """Return the token that begins reasoning; None unless one special token begins and another one ends it, so that a
    grammar can limit it."""
    if chat_format is None or chat_format.reasoning_markers is None:
        return None
    begin, end = chat_format.reasoning_markers
    first = max((mark for mark in special if mark and begin.startswith(mark)), key=len, default=None)
    return None if first is None or end not in special else special[first]


def any_text(opening: int, *, is_open: bool, messages: Messages | None = None) -> Grammar:
    """Return the grammar of any text, for an answer whose reasoning a preamble limits. `opening`: the token that begins
    reasoning. No text begins with it, so that the preamble cannot be bypassed. It begins all `messages`, of which none
    is reasoning."""
    if messages is not None:
        others = " | ".join(map(_literal, messages.others))
        return Grammar("lark", f"start: (<[{opening}]> ({others}) <[^{opening}]>*)+", REASONING_BUDGETS[0])
    text = "<[*]>*" if is_open else f"(<[^{opening}]> <[*]>*)?"
    return Grammar("lark", f"start: {text}", REASONING_BUDGETS[0])


def lark_text(text: str, special: Mapping[str, int]) -> str:
    """Return `text` in Lark, as literals and special tokens."""
    marks = sorted((mark for mark in special if mark and mark in text), key=len, reverse=True)
    if not marks:
        return _literal(text) if text else ""
    pieces = re.split("(" + "|".join(map(re.escape, marks)) + ")", text)
    return " ".join(f"<[{special[piece]}]>" if piece in special else _literal(piece) for piece in pieces if piece)


def _read_function_name(choice: Json) -> str:
    name = _function_name(choice)
    if name is None:
        raise InvalidValue(
            'tool_choice must be none, auto, required, {"type": "function", "function": {"name": ...}} or of type'
            " allowed_tools",
            param="tool_choice",
        )
    return name


def _allowed(given: Any) -> tuple[str, frozenset[str]]:
    """Return the mode (auto or required) and the names of the functions that may be called."""
    mode, tools = (given.get("mode"), given.get("tools")) if isinstance(given, dict) else (None, None)
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
    """Return the schema of the arguments. Keywords that cannot be enforced are ignored unless the tool is `strict`."""
    given = function.get("parameters")
    if given is None:
        given = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(given, dict):
        raise InvalidValue("a tool's parameters must be a JSON schema, an object", param="tools")
    compiler = {"lenient": function.get("strict") is not True, "whitespace_pattern": JSON_WHITESPACE}
    return {"type": "object", **close_schema(given), "x-guidance": compiler}


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _literal(text: str) -> str:
    return _json(text)
