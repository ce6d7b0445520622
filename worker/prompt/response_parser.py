"""Parsing of an answer into reasoning, content and tool calls while its text grows.

The text is parsed by transformers' ResponseParser, which only finds where regions begin and end. Each call is parsed
separately once it is complete, and text that cannot be parsed becomes content unchanged.
"""

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from worker.interface import Delta
from worker.prompt.body_reader import Json
from worker.prompt.chat_formats import BARE_CALLS, CALLS_FIELD, REASONING_FIELDS, CallSyntax, ChatFormat

_MARK = "mark"
_BODY = "body"
_PIECE = 512  # characters
_RAW_TEXT: Json = {"repeats": True, "content": "text", "content_args": {"strip": False}}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A parsed tool call. `arguments` is JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """New output of an answer. Exactly one field is set."""

    content: str = ""
    reasoning: str = ""
    call: ToolCall | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseOptions:
    """Options for parsing the answers of one request."""

    chat_format: ChatFormat | None
    # The part of the answer, or of the prompt before it, that the prompt already contains. The parser is fed this
    # text first.
    prefix: str = ""
    tools: Sequence[Json] = ()  # tools that may be called; empty: text that looks like a call is content
    is_constrained: bool = False  # a grammar constrains the answer to calls, in the format's syntax or in BARE_CALLS
    max_calls: int | None = None  # further calls are dropped
    # separate reasoning from content; otherwise it stays in the content, including its markers
    separate_reasoning: bool = True


class AnswerParser:
    """Incremental parser of one answer."""

    def __init__(self, parse_options: ParseOptions):
        self._options = parse_options
        self._names = {tool["function"]["name"] for tool in parse_options.tools}
        self._call_count = 0
        self._call_ids: set[str] = set()
        self._is_bare_syntax = parse_options.is_constrained and call_syntax(parse_options.chat_format) is BARE_CALLS
        self._bare_text = ""
        self._held_blanks = ""  # blanks that are content only if content follows
        # The next content starts after a different region, so its leading blanks are separators.
        self._at_region_start = False
        self._raw_text = ""
        self._read_end = 0
        self._is_cut = False
        self._parser: Any = None
        self._region_template: Any = None
        self.is_thinking = False
        if parse_options.chat_format is not None and self._regions(parse_options.chat_format):
            self._start_parser(parse_options.chat_format)

    def push(self, text: str) -> list[AnswerPart]:
        """Parse the next piece of text."""
        if self._parser is None:
            return self._add_content(text)
        self._raw_text += text
        return self._to_parts(self._feed(text))

    def _feed(self, text: str) -> list[Any]:
        """Return the parser's events. After each region it searches the rest of its text for each marker, so a long
        text of many regions would take quadratic time at once."""
        return [event for at in range(0, len(text), _PIECE) for event in self._parser.feed(text[at : at + _PIECE])]

    def take(self, delta: Delta) -> tuple[list[AnswerPart], int]:
        """Parse the next delta; the last one also returns text that was held back. The second value is the number of
        reasoning tokens."""
        was_thinking = self.is_thinking
        parts = self.push(delta.text) if delta.text else []
        if delta.finish is not None:
            parts = [*parts, *self.finish(is_cut=delta.finish == "length")]
        return parts, len(delta.tokens) if was_thinking or self.is_thinking else 0

    def finish(self, *, is_cut: bool = False) -> list[AnswerPart]:
        """End the answer and return text that was held back. `is_cut`: the model had more to write."""
        parts: list[AnswerPart] = []
        self._is_cut = is_cut
        if self._parser is not None:
            _, events = self._parser.finalize()
            parts = self._to_parts(events)
        if self._is_bare_syntax and self._bare_text:
            parts = [*parts, *self._finish_bare()]
        if self._held_blanks:
            parts.append(AnswerPart(content=self._held_blanks))
        return parts

    def _start_parser(self, chat_format: ChatFormat) -> None:
        # imported late: the library takes a second to import
        from transformers.utils.chat_parsing import ResponseParser
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self._region_template = load_response_template(
            _region_boundaries(chat_format.response, self._regions(chat_format))
        )
        self._parser = ResponseParser(self._region_template, prefix="")
        self._raw_text = self._region_template.truncate_past_last_anchor(self._options.prefix)
        for event in self._feed(self._raw_text):  # the prefix is known already; only the state at its end matters
            self._track_region(event)
        self._at_region_start = self.is_thinking

    def _regions(self, chat_format: ChatFormat) -> list[str]:
        """Return the names of the regions to separate from content."""
        fields = chat_format.response["fields"]
        reasoning = [name for name in REASONING_FIELDS if name in fields and self._options.separate_reasoning]
        has_calls = CALLS_FIELD in fields and bool(self._options.tools) and not self._is_bare_syntax
        if chat_format.messages is not None:  # each message is a region
            return list(fields)
        return [*reasoning, *([CALLS_FIELD] if has_calls else [])] or ["content"] * chat_format.marks_content

    @property
    def _has_tags(self) -> bool:
        assert self._options.chat_format is not None
        return bool(self._options.chat_format.response["fields"][CALLS_FIELD].get("content") == "xml-inline")

    def _track_region(self, event: Mapping[str, Any]) -> None:
        if event["type"] == "region_open":
            self.is_thinking = event["field"] in REASONING_FIELDS
        elif event["type"] == "region_close":
            self.is_thinking = False

    def _to_parts(self, events: Sequence[Mapping[str, Any]]) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for event in events:
            self._track_region(event)
            name, kind = event["field"], event["type"]
            is_reasoning = name in REASONING_FIELDS
            if kind == "region_chunk" and name != CALLS_FIELD:
                parts += self._add_reasoning(event["text"]) if is_reasoning else self._add_content(event["text"])
            elif kind == "region_close" and name == CALLS_FIELD:
                parts += self._parse_region(event["value"])
            elif kind in ("region_open", "region_close") and is_reasoning:
                self._held_blanks, self._at_region_start = "", True
        return parts

    def _add_reasoning(self, text: str) -> list[AnswerPart]:
        shown = self._without_outer_blanks(text)
        return [AnswerPart(reasoning=shown)] if shown else []

    def _add_content(self, text: str) -> list[AnswerPart]:
        if self._is_bare_syntax:
            self._bare_text += text
            return []
        shown = text if self._parser is None else self._without_outer_blanks(text)
        return [AnswerPart(content=shown)] if shown else []

    def _without_outer_blanks(self, text: str) -> str:
        """Return the text that may be shown: leading blanks of a region are dropped, trailing ones are held back."""
        text = self._held_blanks + text
        if self._at_region_start:
            text = text.lstrip()
        shown = text.rstrip()
        self._held_blanks = text[len(shown) :]
        self._at_region_start = self._at_region_start and not shown
        return shown

    def _parse_region(self, region: Mapping[str, str]) -> list[AnswerPart]:
        """Return the calls in a region, or the region's text as content if they cannot be parsed."""
        # The parser returns the region's mark and body but not its position, and the end mark may be part of neither.
        # The text is needed as a whole, because a call that cannot be parsed becomes content unchanged.
        begin = max(self._raw_text.find(region[_MARK] + region[_BODY], self._read_end), self._read_end)
        end = begin + len(region[_MARK]) + len(region[_BODY])
        close = self._region_template.fields[CALLS_FIELD].close_re
        closed = close.match(self._raw_text, end) if close is not None else None
        self._read_end = closed.end() if closed else end
        text = self._raw_text[begin : self._read_end]
        # JSON shows whether it is complete. Tags do not: parameters may be missing.
        is_partial = self._is_cut and not closed and self._has_tags
        calls = None if is_partial else self._try_parse(lambda: self._parse_calls(text))
        if calls is None:
            return self._add_content(text)
        self._held_blanks, self._at_region_start = "", True
        return self._limit_calls(calls)

    def _parse_calls(self, text: str) -> Any:
        from transformers.utils.chat_parsing import parse_response

        assert self._options.chat_format is not None
        response = {**self._options.chat_format.response}
        response["fields"] = {
            name: field for name, field in response["fields"].items() if name in (CALLS_FIELD, "content")
        }
        text = self._options.chat_format.to_json(text)
        found = parse_response(text, response, prefix="", tools=list(self._options.tools))
        listed = found.get(CALLS_FIELD)
        if found.get("content"):
            raise ValueError("text besides the call")
        return [call for item in listed for call in (item if isinstance(item, list) else [item])] if listed else None

    def _finish_bare(self) -> list[AnswerPart]:
        def parsed() -> Any:
            return [{"function": call} for call in json.loads(self._bare_text)]

        calls = self._try_parse(parsed)
        if calls is not None:
            return self._limit_calls(calls)
        return [AnswerPart(content=self._bare_text)]

    def _try_parse(self, parse: Callable[[], Any]) -> list[ToolCall] | None:
        try:
            return [self._to_call(call["function"], call.get("id")) for call in parse()]
        except Exception:  # noqa: BLE001 - parsers raise various errors for malformed text
            return None

    def _to_call(self, function: Mapping[str, Any], id: Any) -> ToolCall:
        name, arguments = function["name"], function["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if name not in self._names or not isinstance(arguments, dict):
            raise ValueError("not a call of a known tool")
        if not isinstance(id, str) or id in self._call_ids:  # the model gives none, or one twice
            id = f"call_{uuid.uuid4().hex[:24]}"
        self._call_ids.add(id)
        return ToolCall(id, name, orjson.dumps(arguments).decode())

    def _limit_calls(self, calls: Sequence[ToolCall]) -> list[AnswerPart]:
        most = self._options.max_calls
        left = len(calls) if most is None else max(most - self._call_count, 0)
        self._call_count += len(calls)
        return [AnswerPart(call=call) for call in calls[:left]]


def call_syntax(chat_format: ChatFormat | None) -> CallSyntax:
    """Return the syntax of tool calls for a constrained model with this format."""
    return (chat_format and chat_format.call_syntax) or BARE_CALLS


def marker_tokens(chat_format: ChatFormat | None, special: Mapping[str, int]) -> frozenset[int]:
    """Return the ids of the special tokens that mark regions in this format. They must stay in the
    text for the parser."""
    if chat_format is None:
        return frozenset()
    text = re.sub(r"\\(.)", r"\1", "\n".join(_strings(chat_format.response)))
    return frozenset(id for token, id in special.items() if token in text)


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for member in inner for text in _strings(member)]


def _region_boundaries(response: Json, kept: Sequence[str]) -> Json:
    """Return the response template reduced to region boundaries: contents are captured as raw text, so that parsing
    never fails."""
    fields: dict[str, Json] = {}
    for name, given in response["fields"].items():
        if name in (CALLS_FIELD, *REASONING_FIELDS) and name not in kept:
            continue
        boundaries = {key: given[key] for key in ("close", "close_pattern") if key in given}
        opens = given.get("open_pattern") or _alternatives(given.get("open"))
        captured = {_BODY: "{content}"}
        if name == CALLS_FIELD:
            boundaries["open_pattern"] = f"(?P<{_MARK}>{opens})"
            captured[_MARK] = "{mark}"
        elif "open" in given:
            boundaries["open"] = given["open"]  # literals match immediately, patterns only one token later
        elif opens is not None:
            boundaries["open_pattern"] = opens
        fields[name] = {**boundaries, **_RAW_TEXT, "transform": captured}
    if not any("open" not in field and "open_pattern" not in field for field in fields.values()):
        fields["stray"] = {**_RAW_TEXT}
    anchor: Json = {key: response[key] for key in ("start_anchor", "start_anchor_pattern") if key in response}
    return {**anchor, "fields": fields}


def _alternatives(literals: Any) -> str | None:
    if literals is None:
        return None
    return "|".join(re.escape(literal) for literal in ([literals] if isinstance(literals, str) else literals))
