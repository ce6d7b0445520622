"""Anthropic's messages, translated to and from OpenAI's chat completions."""

import itertools
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from worker.api.call import GenerationCall, JsonAnswer, ReplyWriter, event_frame, switch_reasoning
from worker.api.openai import ParsedCompletion, chat_prompt_tokens, parse_chat
from worker.api.served_model import ServedModel
from worker.api.usage import UsageTotals
from worker.errors import InvalidValue, UnsupportedField
from worker.images import EncodedImage, from_base64, from_url
from worker.interface import Delta
from worker.prompt.body_reader import BodyFields, Json
from worker.prompt.chat_template import USER_IMAGES_ONLY, join_content, join_texts
from worker.prompt.response_parser import AnswerParser, AnswerPart
from worker.prompt.sampling_options import read_stop
from worker.protocol.dialects.anthropic import COUNT_TOKENS, MESSAGES, OUTPUT, THINKING, TOOL_CHOICE
from worker.protocol.dialects.generation_fields import REASONING_BUDGETS

_MAX_TOKENS = 4096  # default of this server; Anthropic's clients always send max_tokens
# Error details that make Anthropic's clients continue without threads, which they request by default.
_NO_THREADS: Json = {"details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}
_NOT_STOPPED: Json = {"stop_reason": None, "stop_sequence": None, "stop_details": None}


async def messages(body: Json, model: ServedModel) -> GenerationCall:
    """Parse a message request. Raise RequestError."""
    fields = BodyFields(body, MESSAGES)
    chat_body = _read(fields, model)
    chat_body["max_tokens"] = fields.integer("max_tokens") or _MAX_TOKENS
    for name in ("temperature", "top_p", "top_k", "stream", "sse_ping_interval"):
        chat_body[name] = fields.checked(name)
    chat_body["stop"] = _stops(fields)
    id = f"msg_{uuid.uuid4().hex[:24]}"
    chat = await parse_chat(chat_body, model, id=id, names=_client_names(fields))
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    return chat.call(AnthropicWriter(id, chat), ignored=ignored)


async def count_tokens(body: Json, model: ServedModel) -> JsonAnswer:
    """Count the prompt tokens of these messages. Raise RequestError."""
    fields = BodyFields(body, COUNT_TOKENS)
    chat_body = _read(fields, model)
    fields.skip(COUNT_TOKENS)
    tokens, further = await chat_prompt_tokens(chat_body, model, names=_client_names(fields))
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    return JsonAnswer(body={"input_tokens": len(tokens)}, ignored=(*ignored, *further), prompt_tokens=len(tokens))


def _client_names(fields: BodyFields) -> Mapping[str, str]:
    """Return this request's names for fields of a chat completion."""
    format_ = "output_config.format" if fields.take("output_format") is None else "output_format"
    return {
        "response_format.json_schema": format_,
        "response_format": format_,
        "reasoning_effort": "output_config.effort",
        REASONING_BUDGETS[0]: "thinking.budget_tokens",
        "tools[].function": "tools[]",
    }


def _read(fields: BodyFields, model: ServedModel) -> Json:
    """Return the fields that determine the prompt and constrain the answer, as fields of a chat completion."""
    for name in ("mcp_servers", "container", "compaction"):
        fields.refuse(name, f"{name} is not supported; leave it out")
    fields.refuse(
        "thread",
        "thread is not supported: conversations are not stored; send all messages, without thread",
        extra=_NO_THREADS,
    )
    if fields.mapping("context_management"):
        fields.mark_unused("context_management")  # no effect: it only allows the server to shorten long conversations
    fields.skip(("cache_control",))  # no effect: prefix caching needs no hints
    chat_body: Json = {"model": fields.text("model"), "messages": _system(fields)}
    for index, message in enumerate(fields.sequence("messages") or ()):
        chat_body["messages"] += _message(f"messages[{index}]", message, model.engine.no_vision)
    chat_body["messages"] = _joined(chat_body["messages"])
    if not any(message["role"] != "system" for message in chat_body["messages"]):
        raise InvalidValue("messages must be an array of at least one message", param="messages")
    last = chat_body["messages"][-1]
    if last["role"] == "assistant":
        if last.get("tool_calls"):
            raise InvalidValue("the last message has a tool_use without a tool_result after it", param="messages")
        chat_body["continue_final_message"] = True
    chat_body["tools"] = [_tool(f"tools[{index}]", tool) for index, tool in enumerate(fields.sequence("tools") or ())]
    chat_body |= _tool_choice(fields)
    thinking = _translate_thinking(fields, model)
    variables = {**(fields.mapping("chat_template_kwargs") or {}), **thinking.pop("chat_template_kwargs", {})}
    return {**chat_body, **_translate_output(fields), **thinking, "chat_template_kwargs": variables or None}


def _system(fields: BodyFields) -> list[Json]:
    given = fields.take("system")
    text = given if isinstance(given, str) or given is None else _texts("system", given)
    return [{"role": "system", "content": text}] if text else []


def _message(where: str, message: Any, no_vision: str) -> list[Json]:
    """Translate one message; each tool result becomes a message of its own. `no_vision`: reason why images are not
    supported."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise InvalidValue(f"{where} must be an object whose role is user or assistant", param=where)
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise InvalidValue(f"{where}.content must be a string or an array of blocks", param=f"{where}.content")
    tool_messages, calls, reasoning = [], [], []
    shown: list[str | EncodedImage] = []
    result_images: list[EncodedImage] = []
    for index, block in enumerate(content):
        place = f"{where}.content[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and role == "user":
            tool_message, images = _tool_result(place, block, no_vision)
            tool_messages.append(tool_message)
            result_images += images
        elif kind == "tool_use" and role == "assistant":
            calls.append(_tool_use(place, block))
        elif kind == "thinking" and role == "assistant" and isinstance(block.get("thinking"), str):
            reasoning.append(block["thinking"])
        elif kind == "redacted_thinking" and role == "assistant":
            continue  # encrypted by Anthropic, so it cannot be rendered
        elif kind == "image" and role == "user":
            shown.append(_image(place, block, no_vision))
        elif kind == "document" and role == "user":
            shown.append(_document(place, block))
        else:
            shown.append(_text(place, block))
    shown = [*result_images, *shown]
    own_message: Json = {"role": role, "content": join_content(shown) if shown else None}
    if calls:
        own_message["tool_calls"] = calls
    if reasoning:
        own_message["reasoning_content"] = "\n".join(reasoning)
    if not shown and not calls and not reasoning:
        if tool_messages:
            return tool_messages
        own_message["content"] = ""
    return [*tool_messages, own_message]


def _joined(messages: Sequence[Json]) -> list[Json]:
    """Join consecutive messages of one role, as Anthropic does: many templates need alternating roles."""
    joined: list[Json] = []
    for role, group in itertools.groupby(messages, _role_of_plain):
        together = list(group)
        if role and len(together) > 1:
            parts = [part for message in together for part in _parts(message["content"])]
            together = [{"role": role, "content": join_content(parts)}]
        joined += together
    return joined


def _role_of_plain(message: Json) -> str:
    """Return the role of a message that may be joined with others of this role; empty if it may not."""
    is_plain = message.keys() == {"role", "content"} and message["role"] != "system"
    return str(message["role"]) if is_plain else ""


def _parts(content: Any) -> list[str | EncodedImage]:
    """Return the texts and images of content made by `join_content`."""
    if not isinstance(content, list):
        return [content or ""]
    return [part if isinstance(part, EncodedImage) else part["text"] for part in content]


def _image(where: str, block: Json, no_vision: str) -> EncodedImage:
    """Return the image of a block."""
    if no_vision:
        raise UnsupportedField(f"{where}: {no_vision}", param=where)
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or not isinstance(kind, str):
        raise InvalidValue(f"{where}.source must be an object with a type", param=f"{where}.source")
    if kind == "url":
        return from_url(f"{where}.source.url", source.get("url"))
    if kind != "base64":
        raise UnsupportedField(
            f"{where}.source: files are not stored; send the image itself, with type base64", param=f"{where}.source"
        )
    return from_base64(f"{where}.source", source.get("data"), source.get("media_type"))


def _tool_result(where: str, block: Json, no_vision: str) -> tuple[Json, list[EncodedImage]]:
    """Return the message of a tool and the images of its result. The images move to the following user message, because
    templates do not render them in tool messages."""
    if not isinstance(block.get("tool_use_id"), str):
        raise InvalidValue(f"{where}.tool_use_id must be a string", param=f"{where}.tool_use_id")
    content = block.get("content") or []
    if not isinstance(content, str | list):
        raise InvalidValue(f"{where}.content must be a string or an array of blocks", param=f"{where}.content")
    parts: list[str | EncodedImage] = [content] if isinstance(content, str) else []
    for index, part in enumerate(content if isinstance(content, list) else ()):
        place = f"{where}.content[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "image":
            parts.append(_image(place, part, no_vision))
        else:
            parts.append(_document(place, part) if kind == "document" else _text(place, part))
    text = join_texts(parts)
    if block.get("is_error") is True:
        text = f"Error: {text}"
    images = [part for part in parts if isinstance(part, EncodedImage)]
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}, images


def _tool_use(where: str, block: Json) -> Json:
    if not all(isinstance(block.get(name), str) for name in ("id", "name")) or not isinstance(block.get("input"), dict):
        raise InvalidValue(f"{where} must have a string id, a string name and an object input", param=where)
    function = {"name": block["name"], "arguments": orjson.dumps(block["input"]).decode()}
    return {"id": block["id"], "type": "function", "function": function}


def _texts(where: str, blocks: Any) -> str:
    if not isinstance(blocks, list):
        raise InvalidValue(f"{where} must be a string or an array of text blocks", param=where)
    return "\n".join(_text(f"{where}[{index}]", block) for index, block in enumerate(blocks))


def _text(where: str, block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    if kind == "image":
        raise UnsupportedField(f"{where}: {USER_IMAGES_ONLY}", param=where)
    if kind in ("document", "search_result", "container_upload"):
        raise UnsupportedField(f"{where}: this model takes text, not blocks of type {kind}", param=where)
    raise InvalidValue(f"{where} has an unsupported block type; send a text block", param=where)


def _document(where: str, block: Json) -> str:
    """Return the title, the context and the text of a document, which a prompt has on lines of their own."""
    source = block.get("source")
    if not isinstance(source, dict):
        raise InvalidValue(f"{where}.source must be an object with a type", param=f"{where}.source")
    if source.get("type") != "text":
        raise UnsupportedField(
            f"{where}.source: this model takes text; send the text of the document, with type text",
            param=f"{where}.source",
        )
    if not isinstance(source.get("data"), str):
        raise InvalidValue(f"{where}.source.data must be a string", param=f"{where}.source.data")
    about = [block[name] for name in ("title", "context") if block.get(name) is not None]
    if not all(isinstance(text, str) for text in about):
        raise InvalidValue(f"{where}: title and context must be strings", param=where)
    return "\n".join([*about, source["data"]])


def _tool(where: str, tool: Any) -> Json:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "custom":
        raise UnsupportedField(f"{where}: server tools are not supported; define client tools", param=where)
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise InvalidValue(f"{where} must be an object with a name", param=where)
    if not isinstance(tool.get("input_schema"), dict):
        raise InvalidValue(f"{where}.input_schema must be a JSON schema, an object", param=f"{where}.input_schema")
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def _tool_choice(fields: BodyFields) -> Json:
    if fields.mapping("tool_choice") is None:
        return {}
    within = fields.within("tool_choice", TOOL_CHOICE)
    kind = within.choice("type")
    name = within.text("name")
    if kind is None or (kind == "tool" and name is None):
        raise InvalidValue("tool_choice must have a type: auto, any, none, or tool with a name", param="tool_choice")
    named = {"type": "function", "function": {"name": name}}
    choice = named if kind == "tool" else "required" if kind == "any" else kind
    return {"tool_choice": choice, "parallel_tool_calls": not within.flag("disable_parallel_tool_use")}


def _translate_thinking(fields: BodyFields, model: ServedModel) -> Json:
    """Translate `thinking`: the switch of the template, and the budget."""
    if fields.mapping("thinking") is None:
        return {}
    within = fields.within("thinking", THINKING)
    kind = within.choice("type")
    if kind is None:
        raise InvalidValue("thinking.type must be enabled, disabled or adaptive", param="thinking.type")
    budget = within.integer("budget_tokens")
    if budget is not None and kind == "disabled":
        fields.mark_unused("thinking.budget_tokens")
        budget = None
    return {REASONING_BUDGETS[0]: budget, **switch_reasoning(fields, "thinking", model, is_on=kind != "disabled")}


def _translate_output(fields: BodyFields) -> Json:
    """Translate the output format and the effort."""
    config = fields.within("output_config", OUTPUT)
    chat_body: Json = {}
    effort = config.choice("effort")
    if effort is not None:
        chat_body["reasoning_effort"] = effort
    for owner, name in ((config, "format"), (fields, "output_format")):
        format_ = owner.mapping(name)
        if format_ is None:
            continue
        if format_.get("type") != "json_schema" or not isinstance(format_.get("schema"), dict):
            where = owner.path + name
            raise InvalidValue(f'{where} must be {{"type": "json_schema", "schema": object}}', param=where)
        schema_format = {"name": name, "schema": format_["schema"], "strict": True}
        chat_body["response_format"] = {"type": "json_schema", "json_schema": schema_format}
    return chat_body


def _stops(fields: BodyFields) -> list[str] | None:
    fields.sequence("stop_sequences")  # unlike in other APIs, not a single string
    return read_stop(fields, "stop_sequences")


class AnthropicWriter(ReplyWriter):
    """Writer of `message` and of the events that build it."""

    def __init__(self, id: str, chat: ParsedCompletion):
        self._parser = AnswerParser(chat.parse_options)
        self._totals = UsageTotals(chat.generations)
        [generation] = chat.generations
        self._max_tokens = generation.max_tokens or 0
        self._head: Json = {"id": id, "type": "message", "role": "assistant", "model": chat.common.model}
        self._content: list[Json] = []
        self._has_started = False
        self._is_open = False  # the last block may still grow

    def full_body(self, deltas: Iterable[tuple[int, Delta]]) -> Json:
        last = Delta()
        for number, delta in deltas:
            self._add(number, delta)
            last = delta
        return {**self._head, "content": self._content, **self._end(last), "usage": self._usage()}

    def frames(self, number: int, delta: Delta) -> bytes:
        if delta.progress is not None:
            return b""
        events: list[Json] = []
        if not self._has_started:
            self._has_started = True
            usage = {**self._usage(), "output_tokens": 0}
            del usage["output_tokens_details"]  # older clients keep the details of the first event
            message = {**self._head, "content": [], **_NOT_STOPPED, "usage": usage}
            events.append({"type": "message_start", "message": message})
        events += self._add(number, delta)
        if delta.finish is not None:
            events.append({"type": "message_delta", "delta": self._end(delta), "usage": self._usage()})
        return b"".join(event_frame(event) for event in events)

    def closing_frames(self) -> bytes:
        return event_frame({"type": "message_stop"})

    def _add(self, number: int, delta: Delta) -> list[Json]:
        """Add the next delta and return the events of its blocks."""
        self._totals.add(number, delta)
        parts, reasoning_tokens = self._parser.take(delta)
        self._totals.add_reasoning(reasoning_tokens)
        events = [event for part in parts for event in self._part(part)]
        return [*events, *self._close()] if delta.finish is not None else events

    def _part(self, part: AnswerPart) -> list[Json]:
        if part.call is not None:
            call = {"type": "tool_use", "id": f"toolu_{part.call.id.removeprefix('call_')}", "name": part.call.name}
            events = self._open({**call, "input": {}})
            self._content[-1]["input"] = orjson.loads(part.call.arguments)
            grown = {"type": "input_json_delta", "partial_json": part.call.arguments}
            return [*events, self._delta(grown), *self._close()]
        kind, text = ("thinking", part.reasoning) if part.reasoning else ("text", part.content)
        events = []
        if not self._is_open or self._content[-1]["type"] != kind:
            # no signature is needed: reasoning that comes back is not verified
            events = self._open({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        self._content[-1][kind] += text
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _open(self, block: Json) -> list[Json]:
        events = self._close()
        self._content.append(dict(block))
        self._is_open = True
        return [*events, {"type": "content_block_start", "index": len(self._content) - 1, "content_block": block}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _close(self) -> list[Json]:
        was_open, self._is_open = self._is_open, False
        return [{"type": "content_block_stop", "index": len(self._content) - 1}] if was_open else []

    def _end(self, delta: Delta) -> Json:
        """Return the stop reason."""
        reason = "end_turn"
        if delta.finish == "length":
            is_full = self._totals.usage()["completion_tokens"] < self._max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        if delta.stop is not None:
            reason = "stop_sequence"
        elif reason == "end_turn" and any(block["type"] == "tool_use" for block in self._content):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": delta.stop, "stop_details": None}

    def _usage(self) -> Json:
        """Return the usage. Cached prompt tokens are counted separately, as Anthropic does."""
        usage = self._totals.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "output_tokens": usage["completion_tokens"],
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens_details": {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        }
