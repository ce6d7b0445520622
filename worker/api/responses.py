"""OpenAI's Responses API without stored state, translated to and from chat completions."""

import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from worker.api.call import GenerationCall, JsonAnswer, ReplyWriter, event_frame
from worker.api.openai import ParsedCompletion, chat_prompt_tokens, parse_chat
from worker.api.openai_replies import logprob_entries
from worker.api.served_model import ServedModel
from worker.api.usage import UsageTotals, progress_field
from worker.errors import InvalidValue, UnsupportedField
from worker.images import EncodedImage
from worker.interface import Delta, TokenLogprob
from worker.prompt import logprob_options
from worker.prompt.body_reader import BodyFields, Json
from worker.prompt.chat_template import USER_IMAGES_ONLY, join_content, join_texts, read_image_url
from worker.prompt.response_parser import AnswerParser, AnswerPart, ToolCall
from worker.protocol.dialects.generation_fields import MAX_NAME_LENGTH
from worker.protocol.dialects.responses import (
    CHAT_FIELDS,
    INCLUDED,
    LABELS,
    MOST_REPEATED,
    REASONING,
    RESPONSES,
    STREAM_OPTIONS,
    TEXT_OPTIONS,
)

_STATELESS = "requests are stateless; send the whole conversation in input"
_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
_OF_FUNCTION = ("description", "parameters", "strict")
_LOGPROBS = "message.output_text.logprobs"


async def responses(body: Json, model: ServedModel) -> GenerationCall:
    """Parse a response request. Raise RequestError."""
    fields = BodyFields(body, RESPONSES)
    chat_body, repeated_fields = _read(fields, model)
    id = f"resp_{uuid.uuid4().hex}"
    most = model.max_prompt if repeated_fields["truncation"] == "auto" else None
    chat = await parse_chat(chat_body, model, id=id, names=_client_names(fields), turns_limit=most)
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    return chat.call(ResponsesWriter(id, chat, repeated_fields), ignored=ignored)


async def input_tokens(body: Json, model: ServedModel) -> JsonAnswer:
    """Count the prompt tokens of this input, by default an empty text. Raise RequestError."""
    given = {**body, "input": ""} if body.get("input") is None else body
    fields = BodyFields(given, RESPONSES)
    chat_body, _ = _read(fields, model)
    tokens, further = await chat_prompt_tokens(chat_body, model, names=_client_names(fields))
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    answer = {"object": "response.input_tokens", "input_tokens": len(tokens)}
    return JsonAnswer(body=answer, ignored=(*ignored, *further), prompt_tokens=len(tokens))


# this API's names for fields of a chat completion
_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "tools[].function": "tools[]",
}


def _client_names(fields: BodyFields) -> Mapping[str, str]:
    """Return the names for one request: its output format has two possible places."""
    if fields.take("response_format") is not None:
        return _NAMES
    return {"response_format.json_schema": "text.format", "response_format": "text.format", **_NAMES}


def _read(fields: BodyFields, model: ServedModel) -> tuple[Json, Json]:
    """Return the fields of a chat completion, and the request fields that a response repeats."""
    fields.refuse("previous_response_id", f"previous_response_id is not supported: {_STATELESS}")
    fields.refuse("conversation", f"conversation is not supported: {_STATELESS}")
    if fields.flag("store"):
        fields.mark_unused("store")  # the default of OpenAI, which some clients send
    fields.refuse("background", "background is not supported: an answer ends when its connection closes; use stream")
    fields.refuse("prompt", "prompt is not supported: prompts are not stored; use instructions and input")
    included = fields.sequence("include") or []
    for name in included:
        if name not in INCLUDED:
            raise UnsupportedField(f"include supports only {', '.join(INCLUDED)}", param="include")
        if name != _LOGPROBS:
            fields.mark_unused(f"include[{name}]")
    top = logprob_options.alternatives(fields, "top_logprobs", model.options.max_logprobs) or 0
    instructions = fields.text("instructions")
    before = [{"role": "system", "content": instructions}] if instructions else []
    tools, choice = _tools(fields), _tool_choice(fields)
    chat_body: Json = {
        "model": fields.text("model"),
        "messages": [*before, *_input(fields, model.engine.no_vision)],
        "max_tokens": fields.integer("max_output_tokens"),
        "tools": tools,
        "tool_choice": choice,
        "logprobs": _LOGPROBS in included or top > 0,
        "top_logprobs": top or None,
    }
    for name in ("temperature", "top_p", "parallel_tool_calls", "stream", "sse_ping_interval"):
        chat_body[name] = fields.checked(name)
    reasoning = fields.within("reasoning", REASONING)
    chat_body["reasoning_effort"] = reasoning.choice("effort")
    for name in ("summary", "generate_summary"):
        if reasoning.take(name) is not None:
            fields.mark_unused(reasoning.path + name)  # no effect: reasoning is not summarized
    options = fields.within("stream_options", STREAM_OPTIONS)
    if options.flag("include_obfuscation"):
        fields.mark_unused(f"{options.path}include_obfuscation")
    text = fields.within("text", TEXT_OPTIONS)
    chat_body["verbosity"] = text.choice("verbosity")
    format_ = text.mapping("format")
    chat_body |= {name: fields.take(name) for name in CHAT_FIELDS}  # same names in both APIs
    if format_ is not None:
        if chat_body["response_format"] is not None:
            raise InvalidValue(
                "text.format and response_format mean the same; send one of them", param="response_format"
            )
        chat_body["response_format"] = _format(format_)
        if format_.get("description") is not None:
            fields.mark_unused(f"{text.path}format.description")
    for name, most in MOST_REPEATED.items():
        value = fields.take(name)
        if isinstance(value, dict | list) and len(orjson.dumps(value)) > most:
            raise InvalidValue(f"{name} must have at most {most} bytes of JSON", param=name)
    repeated_fields = {
        "instructions": instructions,
        "max_output_tokens": chat_body["max_tokens"],
        "metadata": fields.mapping("metadata") or {},
        "parallel_tool_calls": chat_body["parallel_tool_calls"] is not False,
        "reasoning": {"effort": chat_body["reasoning_effort"], "summary": None},
        "text": {"format": format_ or {"type": "text"}, "verbosity": chat_body["verbosity"]},
        "tool_choice": fields.take("tool_choice") or "auto",
        # a function has all members in a response
        "tools": [{"type": "function", **dict.fromkeys(_OF_FUNCTION), **tool["function"]} for tool in tools],
        "top_logprobs": top,
        "truncation": fields.choice("truncation") or "disabled",
        **{name: _label(fields.take(name)) for name in LABELS},
    }
    return chat_body, repeated_fields


def _label(given: Any) -> str | None:
    """Return a label that has no effect as a response repeats it."""
    return given if isinstance(given, str) and len(given) <= MAX_NAME_LENGTH else None


def _input(fields: BodyFields, no_vision: str) -> list[Json]:
    """Return the messages. Calls and reasoning of one assistant turn become one message. `no_vision`: reason why images
    are not supported."""
    given = fields.take("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise InvalidValue("input must be a string or an array of items", param="input")
    messages: list[Json] = []
    result_images: list[EncodedImage] = []
    for index, item in enumerate(given):
        where, last = f"input[{index}]", messages[-1] if messages else {}
        if not isinstance(item, dict):
            raise InvalidValue(f"{where} must be an object", param=where)
        kind = item.get("type") or "message"
        if result_images and kind != "function_call_output":
            # templates do not render images in tool results
            messages.append({"role": "user", "content": result_images})
            result_images = []
        if kind == "reasoning":
            content = item.get("content") or item.get("summary") or []
            if text := join_texts(_parts(f"{where}.content", content, fields, USER_IMAGES_ONLY)):
                messages.append({"role": "assistant", "reasoning_content": text})
        elif kind == "function_call_output":
            output = _parts(f"{where}.output", item.get("output"), fields, no_vision)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": join_texts(output)})
            result_images += [part for part in output if isinstance(part, EncodedImage)]
        elif kind == "function_call":
            if last.get("role") != "assistant":
                messages.append({"role": "assistant"})
            messages[-1].setdefault("tool_calls", []).append(_function_call(where, item))
        elif kind == "message":
            content = _parts(f"{where}.content", item.get("content"), fields, no_vision)
            message = {"role": item.get("role"), "content": join_content(content)}
            if message["role"] == "assistant" and last.keys() == {"role", "reasoning_content"}:
                last["content"] = message["content"]
            else:
                messages.append(message)
        else:
            raise UnsupportedField(f"{where}: items of this type are not supported; leave it out", param=where)
    return [*messages, {"role": "user", "content": result_images}] if result_images else messages


def _function_call(where: str, item: Json) -> Json:
    if not all(isinstance(item.get(name), str) for name in ("call_id", "name", "arguments")):
        raise InvalidValue(f"{where} must have call_id, name and arguments, all strings", param=where)
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _parts(where: str, content: Any, fields: BodyFields, no_vision: str) -> list[str | EncodedImage]:
    """Return the texts and images of content."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InvalidValue(f"{where} must be a string or an array of text parts", param=where)
    return [_part(f"{where}[{index}]", part, fields, no_vision) for index, part in enumerate(content)]


def _part(where: str, part: Any, fields: BodyFields, no_vision: str) -> str | EncodedImage:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if kind in _TEXTS and isinstance(text, str):
        return text
    if kind == "input_image":
        if no_vision:
            raise UnsupportedField(f"{where}: {no_vision}", param=where)
        if part.get("file_id") is not None:
            raise UnsupportedField(f"{where}: files are not stored; send image_url with a data URL", param=where)
        return read_image_url(where, part.get("image_url"), part.get("detail"), fields)
    if kind in ("input_file", "input_audio"):
        raise UnsupportedField(f"{where}: this model takes text, not parts of type {kind}", param=where)
    raise InvalidValue(f"{where} must be a text part, for example of type input_text", param=where)


def _tools(fields: BodyFields) -> list[Json]:
    """Return the functions in the format of chats. Tools of other types are reported as ignored."""
    tools = []
    for index, tool in enumerate(fields.sequence("tools") or ()):
        where = f"tools[{index}]"
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            raise InvalidValue(f"{where} must be an object with a type", param=where)
        if tool["type"] != "function":
            # Codex sends hosted tools with every request and works without them. llama-server skips them as well.
            fields.mark_unused(f"tools[{tool['type']}]")
            continue
        if not isinstance(tool.get("name"), str):
            raise InvalidValue(f"{where}.name must be a string", param=f"{where}.name")
        known = {name: tool.get(name) for name in ("name", *_OF_FUNCTION)}
        tools.append(
            {"type": "function", "function": {name: value for name, value in known.items() if value is not None}}
        )
    return tools


def _tool_choice(fields: BodyFields) -> Any:
    choice = fields.take("tool_choice")
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        named = [_to_chat_name(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise UnsupportedField(
            'tool_choice must be none, auto, required, {"type": "function", "name": ...} or of type allowed_tools',
            param="tool_choice",
        )
    return _to_chat_name(choice)


def _to_chat_name(named: Any) -> Any:
    """Translate the name of a function to the chat format. Return anything else unchanged."""
    if not isinstance(named, dict) or named.get("type") != "function":
        return named
    return {"type": "function", "function": {"name": named.get("name")}}


def _format(format_: Json) -> Json:
    if format_.get("type") != "json_schema":
        return format_
    schema_format = {name: format_.get(name) for name in ("name", "schema", "strict")}
    return {"type": "json_schema", "json_schema": schema_format}


class ResponsesWriter(ReplyWriter):
    """Writer of `response` and of the events that build it."""

    def __init__(self, id: str, chat: ParsedCompletion, repeated_fields: Mapping[str, Any]):
        self._chat = chat
        self._parser = AnswerParser(chat.parse_options)
        self._totals = UsageTotals(chat.generations)
        sampling = chat.generations[0].sampling
        self._head: Json = {
            "id": id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "model": chat.common.model,
            "error": None,
            "previous_response_id": None,
            "store": False,
            "background": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "service_tier": "default",
            "max_tool_calls": None,
            **repeated_fields,
        }
        self._output: list[Json] = []
        # tokens of a message, or of text that may become one, that no event has reported yet
        self._pending: list[TokenLogprob] = []
        self._sequence_number = -1
        self._open = ""  # type of the last item while it may still grow, otherwise empty
        self._has_started = False

    def full_body(self, deltas: Iterable[tuple[int, Delta]]) -> Json:
        last = Delta()
        for number, delta in deltas:
            self._add(number, delta)
            last = delta
        return self._response(last)

    def frames(self, number: int, delta: Delta) -> bytes:
        chunk_options = self._chat.common.chunk_options
        if delta.progress is not None and not chunk_options.has_progress:
            return b""
        events, grown = self._opening(delta), self._add(number, delta)
        timings = self._totals.so_far() if chunk_options.has_timings else {}
        events += [{**event, **timings} if "delta" in event else event for event in grown]
        if delta.finish is not None:
            response = self._response(delta)
            events.append({"type": f"response.{response['status']}", "response": response, **timings})
        return b"".join(self._frame(event) for event in events)

    def _opening(self, delta: Delta) -> list[Json]:
        """Return the first event, and an event for each prefill progress."""
        if self._has_started and delta.progress is None:
            return []
        started = self._response(None)
        created = [] if self._has_started else [{"type": "response.created", "response": started}]
        self._has_started = True
        progress = {} if delta.progress is None else progress_field(delta.progress)
        return [*created, {"type": "response.in_progress", "response": started, **progress}]

    def _add(self, number: int, delta: Delta) -> list[Json]:
        """Add the next delta and return the events of its items."""
        self._totals.add(number, delta)
        parts, reasoning_tokens = self._parser.take(delta)
        self._totals.add_reasoning(reasoning_tokens)
        self._pending += self._chat.common.logprob_settings.cut(delta).logprobs
        if (parts or reasoning_tokens) and not any(part.content for part in parts):
            self._pending = []  # logprobs of reasoning and tool calls are not reported
        events = [event for part in parts for event in self._part(part)]
        if delta.finish is not None:
            events += self._close("completed" if delta.finish == "stop" else "incomplete")
        return events

    def _part(self, part: AnswerPart) -> list[Json]:
        if part.call is not None:
            return [*self._close(), *self._call(part.call)]
        kind, text = ("reasoning", part.reasoning) if part.reasoning else ("message", part.content)
        events = []
        if self._open != kind:
            events = [*self._close(), *self._begin(kind)]
        grown = self._event(f"{self._channel}.delta", content_index=0, delta=text)
        [part_body] = self._output[-1]["content"]
        part_body["text"] += text
        if kind == "message":
            grown["logprobs"] = logprob_entries(self._pending, self._chat.common.logprob_settings)
            part_body["logprobs"] += grown["logprobs"]
            self._pending = []
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
        """Return the events that end the item that may still grow."""
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

    def _event(self, kind: str, **fields: Any) -> Json:
        """Return an event about the last item."""
        return {"type": kind, "item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, **fields}

    def _item(self, kind: str, item: Json) -> Json:
        return {"type": kind, "output_index": len(self._output) - 1, "item": item}

    def _response(self, last: Delta | None) -> Json:
        """Return the response so far. `last`: its last delta once it has ended."""
        status, details, usage = "in_progress", None, None
        if last is not None:
            status, usage = "completed", self._usage()
            if last.finish == "length":
                status, details = "incomplete", {"reason": "max_output_tokens"}
        completed = {"completed_at": int(time.time())} if status == "completed" else {}
        return {
            **self._head,
            **completed,
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
        self._sequence_number += 1
        return event_frame({**event, "sequence_number": self._sequence_number})


def _empty(kind: str) -> Json:
    """Return the empty content part of an item of this type."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
