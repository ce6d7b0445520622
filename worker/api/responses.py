"""OpenAI's responses, without memory: items in, items out. A body becomes that of a chat completion."""

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from worker.api.call import Call, Model, Result
from worker.api.openai import Chat, count, understand
from worker.api.openai_replies import Totals, logprobs_of, progress_of
from worker.errors import InvalidValue, UnsupportedField
from worker.images import Image
from worker.interface import Delta, TokenLogprob
from worker.prompt.body_reader import Fields, Json
from worker.prompt.chat_template import detailed
from worker.prompt.response_parser import Part, Reading, ToolCall
from worker.protocol.dialects.responses import FURTHER, INCLUDED, REASONING, RESPONSE_TEXT, RESPONSES, STREAM_OPTIONS

_STATELESS = "nothing is kept between requests here; send the whole conversation in input"
_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"


async def responses(body: Json, model: Model) -> Call:
    """One response; raises RequestError."""
    fields = Fields(body, RESPONSES)
    asked, echoed = _read(fields, model)
    ignored = fields.settle(strict=model.options.strict_fields)
    id = f"resp_{uuid.uuid4().hex}"
    chat = await understand(asked, model, id=id, names=_names(fields))
    return Call(
        generations=chat.generations,
        reply=ResponseReply(id, chat, echoed),
        stream=chat.common.stream,
        ping_interval=chat.common.ping_interval,
        ignored=(*ignored, *chat.ignored),
    )


async def input_tokens(body: Json, model: Model) -> Result:
    """Tokens of the prompt that this input makes; raises RequestError."""
    fields = Fields(body, RESPONSES)
    asked, _ = _read(fields, model)
    ignored = fields.settle(strict=model.options.strict_fields)
    tokens, further = await count(asked, model, names=_names(fields))
    told = {"object": "response.input_tokens", "input_tokens": tokens}
    return Result(body=told, ignored=(*ignored, *further), prompt_tokens=tokens)


# Bodies

_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "tools[].function": "tools[]",
}
"""What fields of a chat completion are called here."""


def _names(fields: Fields) -> Mapping[str, str]:
    """The same for one request: what its answer is held to may stand in either of two places."""
    if fields.take("response_format") is not None:
        return _NAMES
    return {"response_format.json_schema": "text.format", "response_format": "text.format", **_NAMES}


def _read(fields: Fields, model: Model) -> tuple[Json, Json]:
    """The fields of a chat completion, and what a response says again of its request."""
    fields.refuse("previous_response_id", f"previous_response_id is not supported: {_STATELESS}")
    fields.refuse("conversation", f"conversation is not supported: {_STATELESS}")
    fields.refuse("store", f"store is not supported: {_STATELESS}; leave store out or send false")
    fields.refuse("background", "background is not supported: an answer ends with its connection; use stream")
    fields.refuse("truncation", 'truncation must be "disabled": no input is cut')
    fields.refuse("prompt", "prompt is not supported: no prompts are kept here; use instructions and input")
    included = fields.sequence("include") or []
    for name in included:
        if name not in INCLUDED:
            raise UnsupportedField(f"include: only {' and '.join(INCLUDED)} may stand there", param="include")
        if name == _ENCRYPTED:
            fields.mark_unused(f"include[{name}]")  # thoughts come as they are
    top = fields.integer("top_logprobs", high=model.options.max_logprobs) or 0
    instructions = fields.text("instructions")
    before = [{"role": "system", "content": instructions}] if instructions else []
    tools, choice = _tools(fields), _tool_choice(fields)
    asked: Json = {
        "model": fields.text("model"),
        "messages": [*before, *_input(fields, model.engine.blind)],
        "max_tokens": fields.integer("max_output_tokens"),
        "tools": tools,
        "tool_choice": choice,
        "logprobs": _LOGPROBS in included or top > 0,
        "top_logprobs": top or None,
    }
    for name in ("temperature", "top_p", "parallel_tool_calls", "stream", "sse_ping_interval"):
        asked[name] = fields.handed(name)
    reasoning = fields.within("reasoning", REASONING)
    asked["reasoning_effort"] = reasoning.choice("effort")
    for name in ("summary", "generate_summary"):
        if reasoning.take(name) is not None:
            fields.mark_unused(reasoning.path + name)  # thoughts come as they are
    options = fields.within("stream_options", STREAM_OPTIONS)
    if options.flag("include_obfuscation"):
        fields.mark_unused(f"{options.path}include_obfuscation")
    text = fields.within("text", RESPONSE_TEXT)
    asked["verbosity"] = text.choice("verbosity")
    form = text.mapping("format")
    asked |= {name: fields.take(name) for name in FURTHER}  # by the same names, so that refusals name them
    if form is not None:
        if asked["response_format"] is not None:
            raise InvalidValue("text.format and response_format mean the same; state one", param="response_format")
        asked["response_format"] = _format(form)
        if form.get("description") is not None:
            fields.mark_unused(f"{text.path}format.description")
    echoed = {
        "instructions": instructions,
        "max_output_tokens": asked["max_tokens"],
        "metadata": fields.mapping("metadata") or {},
        "parallel_tool_calls": asked["parallel_tool_calls"] is not False,
        "reasoning": {"effort": asked["reasoning_effort"], "summary": None},
        "text": {"format": form or {"type": "text"}},
        "tool_choice": fields.take("tool_choice") or "auto",
        "tools": [{"type": "function", **tool["function"]} for tool in tools],
        "top_logprobs": top,
    }
    return asked, echoed


def _input(fields: Fields, blind: str) -> list[Json]:
    """Messages; the calls and thoughts of one turn of the assistant are one message. `blind`: why images cannot be."""
    stated = fields.take("input")
    if isinstance(stated, str):
        return [{"role": "user", "content": stated}]
    if not isinstance(stated, list) or not stated:
        raise InvalidValue("input must be a string or an array of items", param="input")
    messages: list[Json] = []
    thoughts = ""
    seen: list[Image] = []
    for index, item in enumerate(stated):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise InvalidValue(f"{where} must be an object", param=where)
        kind = item.get("type") or "message"
        if seen and kind != "function_call_output":
            messages.append({"role": "user", "content": seen})  # templates show images of results nowhere else
            seen = []
        if kind == "reasoning":
            thoughts = _text(f"{where}.content", item.get("content") or item.get("summary") or [])
        elif kind == "function_call_output":
            output = _content(f"{where}.output", item.get("output"), fields, blind)
            text = output if isinstance(output, str) else _joined(output)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
            seen += [part for part in output if isinstance(part, Image)]
        elif kind == "function_call":
            last = messages[-1] if messages else {}
            if last.get("role") != "assistant" or thoughts:
                messages.append({"role": "assistant", "content": None, "tool_calls": []})
            call = _function_call(where, item)
            messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", ()), call]
            thoughts = _think(messages[-1], thoughts)
        elif kind == "message":
            content = _content(f"{where}.content", item.get("content"), fields, blind)
            messages.append({"role": item.get("role"), "content": content})
            if item.get("role") == "assistant":
                thoughts = _think(messages[-1], thoughts)
        else:
            raise UnsupportedField(f"{where}: items of this type are not supported; leave it out", param=where)
    return [*messages, {"role": "user", "content": seen}] if seen else messages


def _think(message: Json, thoughts: str) -> str:
    if thoughts:
        message["reasoning_content"] = thoughts
    return ""


def _function_call(where: str, item: Json) -> Json:
    if not all(isinstance(item.get(name), str) for name in ("call_id", "name", "arguments")):
        raise InvalidValue(f"{where} must have call_id, name and arguments, all strings", param=where)
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _content(where: str, content: Any, fields: Fields, blind: str) -> str | list[Any]:
    """A text; of what has images, parts as a chat completion has them."""
    if not isinstance(content, list) or not any(_is_image(part) for part in content):
        return _text(where, content)
    parts: list[Any] = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        if not _is_image(part):
            parts.append({"type": "text", "text": _part(place, part)})
        elif blind:
            raise UnsupportedField(f"{place}: {blind}", param=place)
        elif part.get("file_id") is not None:
            raise UnsupportedField(f"{place}: no files are kept here; send image_url, a data URL", param=place)
        else:
            parts.append(detailed(place, part.get("image_url"), part.get("detail"), fields))
    return parts


def _joined(parts: Sequence[Any]) -> str:
    """The texts among the parts, on lines of their own."""
    return "\n".join(part["text"] for part in parts if not isinstance(part, Image))


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _text(where: str, content: Any) -> str:
    """The text of a string or of text parts; parts are put on lines of their own."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidValue(f"{where} must be a string or an array of text parts", param=where)
    return "\n".join(_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _part(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if kind in _TEXTS and isinstance(text, str):
        return text
    if kind == "input_image":
        raise UnsupportedField(f"{where}: images may stand in messages of the user only", param=where)
    if kind in ("input_file", "input_audio"):
        raise UnsupportedField(f"{where}: this model takes text, not parts of type {kind}", param=where)
    raise InvalidValue(f"{where} must be a text part, of type input_text say", param=where)


def _tools(fields: Fields) -> list[Json]:
    tools = []
    for index, tool in enumerate(fields.sequence("tools") or ()):
        where = f"tools[{index}]"
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            raise InvalidValue(f"{where} must be an object with a type", param=where)
        if tool["type"] != "function":
            raise UnsupportedField(f"{where}: hosted tools are not supported; define functions", param=where)
        if not isinstance(tool.get("name"), str):
            raise InvalidValue(f"{where}.name must be a string", param=f"{where}.name")
        known = {name: tool.get(name) for name in ("name", "description", "parameters", "strict")}
        tools.append({"type": "function", "function": {name: each for name, each in known.items() if each is not None}})
    return tools


def _tool_choice(fields: Fields) -> Any:
    choice = fields.take("tool_choice")
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        named = [_of_chats(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise UnsupportedField(
            'tool_choice must be none, auto, required, {"type": "function", "name": ...} or of type allowed_tools',
            param="tool_choice",
        )
    return _of_chats(choice)


def _of_chats(named: Any) -> Any:
    """A function's name as chats have it; what names none stays what it is."""
    if not isinstance(named, dict) or named.get("type") != "function":
        return named
    return {"type": "function", "function": {"name": named.get("name")}}


def _format(form: Json) -> Json:
    if form.get("type") != "json_schema":
        return form
    described = {name: form.get(name) for name in ("name", "schema", "strict")}
    return {"type": "json_schema", "json_schema": described}


# Answers


class ResponseReply:
    """`response`, whole and as the events that build it."""

    def __init__(self, id: str, chat: Chat, echoed: Mapping[str, Any]):
        self._chat = chat
        self._reading = Reading(chat.manner)
        self._totals = Totals(chat.generations)
        sampling = chat.generations[0].sampling
        self._head: Json = {
            "id": id,
            "object": "response",
            "created_at": int(time.time()),
            "model": chat.common.model,
            "error": None,
            "previous_response_id": None,
            "store": False,
            "background": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            **echoed,
        }
        self._output: list[Json] = []
        self._untold: list[TokenLogprob] = []
        """Tokens of a message, or of what may become one, that no part has told of yet."""
        self._number = -1
        self._open = ""
        """The kind of the last item, if it may still grow."""
        self._has_begun = False

    def whole(self, deltas: Iterable[tuple[int, Delta]]) -> Json:
        ended = Delta()
        for number, delta in deltas:
            self._add(number, delta)
            ended = delta
        return self._response(ended)

    def frames(self, number: int, delta: Delta) -> bytes:
        shape = self._chat.common.shape
        if delta.progress is not None and not shape.has_progress:
            return b""
        events, grown = self._opening(delta), self._add(number, delta)
        timings = self._totals.so_far() if shape.has_timings else {}
        events += [{**event, **timings} if "delta" in event else event for event in grown]
        if delta.finish is not None:
            response = self._response(delta)
            events.append({"type": f"response.{response['status']}", "response": response, **timings})
        return b"".join(self._frame(event) for event in events)

    def _opening(self, delta: Delta) -> list[Json]:
        """That the response has begun, and, each time it is known, how far its prompt is."""
        if self._has_begun and delta.progress is None:
            return []
        begun = self._response(None)
        created = [] if self._has_begun else [{"type": "response.created", "response": begun}]
        self._has_begun = True
        progress = {} if delta.progress is None else progress_of(delta.progress)
        return [*created, {"type": "response.in_progress", "response": begun, **progress}]

    def closing(self) -> bytes:
        return b""  # the last event says how it ended

    def _add(self, number: int, delta: Delta) -> list[Json]:
        """Take the next delta; returns the events of its items."""
        self._totals.add(number, delta)
        parts, thoughts = self._reading.take(delta)
        self._totals.add_reasoning(thoughts)
        self._untold += self._chat.common.telling.cut(delta).logprobs
        if (parts or thoughts) and not any(part.content for part in parts):
            self._untold = []  # they made thoughts or a call, of which nobody tells probabilities
        events = [event for part in parts for event in self._part(part)]
        if delta.finish is not None:
            events += self._close("completed" if delta.finish == "stop" else "incomplete")
        return events

    def _part(self, part: Part) -> list[Json]:
        if part.call is not None:
            return [*self._close(), *self._call(part.call)]
        kind, text = ("reasoning", part.reasoning) if part.reasoning else ("message", part.content)
        events = []
        if self._open != kind:
            events = [*self._close(), *self._begin(kind)]
        grown = self._event(f"{self._channel}.delta", content_index=0, delta=text)
        [whole] = self._output[-1]["content"]
        whole["text"] += text
        if kind == "message":
            grown["logprobs"] = logprobs_of(self._untold, self._chat.common.telling)
            whole["logprobs"] += grown["logprobs"]
            self._untold = []
        return [*events, grown]

    @property
    def _channel(self) -> str:
        return "response.reasoning_text" if self._open == "reasoning" else "response.output_text"

    def _begin(self, kind: str) -> list[Json]:
        self._open = kind
        item: Json = {"id": f"{'rs' if kind == 'reasoning' else 'msg'}_{uuid.uuid4().hex}", "type": kind}
        if kind == "reasoning":
            item["summary"] = []
        else:
            item["role"] = "assistant"
        self._output.append({**item, "status": "in_progress", "content": [_empty(kind)]})
        added = self._item("response.output_item.added", {**self._output[-1], "content": []})
        return [added, self._event("response.content_part.added", content_index=0, part=_empty(kind))]

    def _close(self, status: str = "completed") -> list[Json]:
        """The events at the end of the item that may still grow."""
        if not self._open:
            return []
        item = self._output[-1]
        item["status"] = status
        [part] = item["content"]
        done = self._event(f"{self._channel}.done", content_index=0, text=part["text"])
        if self._open == "message":
            done["logprobs"] = part["logprobs"]
        self._open = ""
        return [
            done,
            self._event("response.content_part.done", content_index=0, part=dict(part)),
            self._item("response.output_item.done", {**item, "content": [dict(part)]}),
        ]

    def _call(self, call: ToolCall) -> list[Json]:
        item: Json = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": call.id, "name": call.name}
        self._output.append({**item, "arguments": call.arguments, "status": "completed"})
        arguments = "response.function_call_arguments"
        return [
            self._item("response.output_item.added", {**item, "arguments": "", "status": "in_progress"}),
            self._event(f"{arguments}.delta", delta=call.arguments),
            self._event(f"{arguments}.done", name=call.name, arguments=call.arguments),
            self._item("response.output_item.done", dict(self._output[-1])),
        ]

    def _event(self, kind: str, **told: Any) -> Json:
        """About the last item."""
        return {"type": kind, "item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, **told}

    def _item(self, kind: str, item: Json) -> Json:
        return {"type": kind, "output_index": len(self._output) - 1, "item": item}

    def _response(self, ended: Delta | None) -> Json:
        """As it is now; `ended`: its last delta."""
        status, details, usage = "in_progress", None, None
        if ended is not None:
            status, usage = "completed", self._usage()
            if ended.finish == "length":
                status, details = "incomplete", {"reason": "max_output_tokens"}
        return {
            **self._head,
            "status": status,
            "incomplete_details": details,
            "output": list(self._output),
            "usage": usage,
        }

    def _usage(self) -> Json:
        usage = self._totals.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }

    def _frame(self, event: Json) -> bytes:
        self._number += 1
        numbered = {**event, "sequence_number": self._number}
        return f"event: {event['type']}\n".encode() + b"data: " + orjson.dumps(numbered) + b"\n\n"


def _empty(kind: str) -> Json:
    """The part that an item of `kind` begins with."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
