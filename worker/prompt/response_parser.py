"""The parts of an answer: thoughts, content and tool calls, told apart in its text as it grows.

The text is read by transformers' ResponseParser. What the parser would fail on becomes content here, letter by letter:
it only has to find where parts begin and end, and each call is read for itself once it is whole.
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
from worker.prompt.chat_formats import BARE, CALLS, THOUGHTS, Family, Written

_MARK = "mark"
_BODY = "body"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Part:
    """What is new: one of these."""

    content: str = ""
    reasoning: str = ""
    call: ToolCall | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How the answers of one request are to be read."""

    family: Family | None
    begun: str = ""
    """What of the answer, or of what leads to it, the prompt has already: the text that the parser is given first."""
    tools: Sequence[Json] = ()
    """Those that may be called; none: what looks like a call is content."""
    is_held: bool = False
    """The answer was held by a grammar to be calls in the family's way of writing, or in the BARE one."""
    most_calls: int | None = None
    """Further ones are left out."""
    separates: bool = True
    """Thoughts are told apart; else they are content, marks and all."""


class Reading:
    """One answer, as far as it has come."""

    def __init__(self, manner: Manner):
        self._manner = manner
        self._names = {tool["function"]["name"] for tool in manner.tools}
        self._calls = 0
        self._is_bare = manner.is_held and written(manner.family) is BARE
        self._bare = ""
        self._held = ""
        """Blanks that are content only if content follows them."""
        self._is_fresh = False
        """Something else came before the content that begins now: blanks at its front only set the two apart."""
        self._raw = ""
        self._read = 0
        self._parser: Any = None
        self._response: Any = None
        self.is_thinking = False
        if manner.family is not None and self._kept(manner.family):
            self._begin(manner.family)

    def push(self, text: str) -> list[Part]:
        """What `text`, which comes next, adds."""
        if self._parser is None:
            return self._plain(text)
        self._raw += text
        return self._parts(self._parser.feed(text))

    def take(self, delta: Delta) -> tuple[list[Part], int]:
        """What `delta`, which comes next, adds, all that was held back if it is the last; and how many of its tokens
        were thoughts."""
        was_thinking = self.is_thinking
        parts = self.push(delta.text) if delta.text else []
        if delta.finish is not None:
            parts = [*parts, *self.finish()]
        return parts, len(delta.tokens) if was_thinking or self.is_thinking else 0

    def finish(self) -> list[Part]:
        """The answer is over; returns what was held back."""
        parts: list[Part] = []
        if self._parser is not None:
            _, events = self._parser.finalize()
            parts = self._parts(events)
        if self._is_bare and self._bare:
            parts = [*parts, *self._finish_bare()]
        if self._held:
            parts.append(Part(content=self._held))
        return parts

    def _begin(self, family: Family) -> None:
        from transformers.utils.chat_parsing import ResponseParser  # late: the library takes a second to import
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self._response = load_response_template(_located(family.response, self._kept(family)))
        self._parser = ResponseParser(self._response, prefix=self._manner.begun)
        for event in self._parser.initial_events:  # what was begun is known; only where it leaves off matters
            self._note(event)
        self._raw = self._response.truncate_past_last_anchor(self._manner.begun)
        self._is_fresh = self.is_thinking

    def _kept(self, family: Family) -> list[str]:
        """The names of those parts that this request wants told apart."""
        fields = family.response["fields"]
        thoughts = [name for name in THOUGHTS if name in fields and self._manner.separates]
        has_calls = CALLS in fields and bool(self._manner.tools) and not self._is_bare
        if family.name == "harmony":  # its answers are never plain
            return list(fields)
        return [*thoughts, *([CALLS] if has_calls else [])]

    def _note(self, event: Mapping[str, Any]) -> None:
        if event["type"] == "region_open":
            self.is_thinking = event["field"] in THOUGHTS
        elif event["type"] == "region_close":
            self.is_thinking = False

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            self._note(event)
            name, kind = event["field"], event["type"]
            if kind == "region_open" and name in THOUGHTS:
                self._held, self._is_fresh = "", True
            elif kind == "region_chunk" and name != CALLS:
                parts += self._thought(event["text"]) if name in THOUGHTS else self._plain(event["text"])
            elif kind == "region_close" and name == CALLS:
                parts += self._call(event["value"])
            elif kind == "region_close" and name in THOUGHTS:
                self._held, self._is_fresh = "", True
        return parts

    def _thought(self, text: str) -> list[Part]:
        text = self._held + text
        text, self._held = _split_blanks(text.lstrip() if self._is_fresh else text)
        if not text:
            return []
        self._is_fresh = False
        return [Part(reasoning=text)]

    def _plain(self, text: str) -> list[Part]:
        if self._is_bare:
            self._bare += text
            return []
        if self._parser is None:
            return [Part(content=text)] if text else []
        text = self._held + text
        if self._is_fresh:
            text = text.lstrip()
        text, self._held = _split_blanks(text)
        if not text:
            return []
        self._is_fresh = False
        return [Part(content=text)]

    def _call(self, region: Mapping[str, str]) -> list[Part]:
        """The calls in a region; its text, as it stands there, if they cannot be read."""
        begin = max(self._raw.find(region[_MARK] + region[_BODY], self._read), self._read)
        end = begin + len(region[_MARK]) + len(region[_BODY])
        close = self._response.fields[CALLS].close_re
        closed = close.match(self._raw, end) if close is not None else None
        self._read = closed.end() if closed else end
        text = self._raw[begin : self._read]
        calls = self._understood(lambda: self._parsed(text))
        if calls is None:
            return self._plain(text)
        self._held, self._is_fresh = "", True
        return self._counted(calls)

    def _parsed(self, text: str) -> Any:
        from transformers.utils.chat_parsing import parse_response

        assert self._manner.family is not None
        response = {**self._manner.family.response}
        response["fields"] = {name: each for name, each in response["fields"].items() if name in (CALLS, "content")}
        found = parse_response(text, response, prefix="", tools=list(self._manner.tools))
        listed = found.get(CALLS)
        if found.get("content"):
            raise ValueError("not a call alone")
        return [each for item in listed for each in (item if isinstance(item, list) else [item])] if listed else None

    def _finish_bare(self) -> list[Part]:
        def parsed() -> Any:
            return [{"function": each} for each in json.loads(self._bare)]

        calls = self._understood(parsed)
        if calls is not None:
            return self._counted(calls)
        return [Part(content=self._bare)]

    def _understood(self, parse: Callable[[], Any]) -> list[ToolCall] | None:
        try:
            return [self._to_call(each["function"]) for each in parse()]
        except Exception:  # noqa: BLE001 - whatever a parser makes of a model's text: it is no call then
            return None

    def _to_call(self, function: Mapping[str, Any]) -> ToolCall:
        name, arguments = function["name"], function["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if name not in self._names or not isinstance(arguments, dict):
            raise ValueError("not a call of a tool that there is")
        return ToolCall(f"call_{uuid.uuid4().hex[:24]}", name, orjson.dumps(arguments).decode())

    def _counted(self, calls: Sequence[ToolCall]) -> list[Part]:
        most = self._manner.most_calls
        left = len(calls) if most is None else max(most - self._calls, 0)
        self._calls += len(calls)
        return [Part(call=call) for call in calls[:left]]


def written(family: Family | None) -> Written:
    """How a model of `family` is held to its calls."""
    return (family and family.written) or BARE


def shown(family: Family | None, special: Mapping[str, int]) -> frozenset[int]:
    """Those of a tokenizer's special tokens, by text, that tell parts of this family's answers apart."""
    if family is None:
        return frozenset()
    text = re.sub(r"\\(.)", r"\1", "\n".join(_strings(family.response)))
    return frozenset(id for token, id in special.items() if token in text)


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in inner for text in _strings(each)]


def _split_blanks(text: str) -> tuple[str, str]:
    """The text, and the blanks at its end."""
    kept = text.rstrip()
    return kept, text[len(kept) :]


def _located(response: Json, kept: Sequence[str]) -> Json:
    """The response template made to find parts without reading them: regions come as they stand, and never fail."""
    fields: dict[str, Json] = {}
    for name, stated in response["fields"].items():
        is_plain = name not in (CALLS, *THOUGHTS)
        if not is_plain and name not in kept:
            continue
        opens = stated.get("open_pattern") or _alternatives(stated.get("open"))
        if is_plain and opens is None:
            fields[name] = {"repeats": True}
            if "close" in stated or "close_pattern" in stated:
                fields[name] |= {key: stated[key] for key in ("close", "close_pattern") if key in stated}
        else:
            closes = {key: stated[key] for key in ("close", "close_pattern") if key in stated}
            captured = {"transform": {_MARK: "{mark}", _BODY: "{content}"}}
            opened = {"open_pattern": f"(?P<{_MARK}>{opens})"} if name == CALLS else {"open_pattern": opens}
            if name != CALLS and "open" in stated:
                opened = {"open": stated["open"]}  # literals are recognized at once, patterns a token later
            fields[name] = {"repeats": True, **opened, **closes, **(captured if name == CALLS else {})}
        fields[name] |= {"content": "text", "content_args": {"strip": False}}
        fields[name].setdefault("transform", {_BODY: "{content}"})
    if not any("open" not in each and "open_pattern" not in each for each in fields.values()):
        fields["stray"] = {"content": "text", "content_args": {"strip": False}, "repeats": True}
    anchor: Json = {key: response[key] for key in ("start_anchor", "start_anchor_pattern") if key in response}
    return {**anchor, "fields": fields}


def _alternatives(literals: Any) -> str | None:
    if literals is None:
        return None
    return "|".join(re.escape(each) for each in ([literals] if isinstance(literals, str) else literals))
