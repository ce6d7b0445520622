"""Anthropic's messages: a body becomes that of a chat completion, and what is read of the answer becomes blocks."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from worker.api.call import Call, Model, Result
from worker.api.openai import Chat, count, understand
from worker.api.openai_replies import Totals
from worker.errors import InvalidValue, UnsupportedField
from worker.images import Image, from_url, of_base64
from worker.interface import Delta
from worker.prompt.body_reader import Fields, Json
from worker.prompt.response_parser import Part, Reading
from worker.protocol.dialects.anthropic import ANTHROPIC, COUNT_TOKENS, OUTPUT, THINKING, TOOL_CHOICE_OF_MESSAGES
from worker.protocol.dialects.generation_fields import MAX_STOPS

_MAX_TOKENS = 4096
"""Where a request says nothing; Anthropic's own clients always say it."""
_NO_THREADS: Json = {"details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}
"""What Anthropic's own clients, who ask for threads unasked, understand: they go on without."""
_NOT_YET: Json = {"stop_reason": None, "stop_sequence": None, "stop_details": None}


async def messages(body: Json, model: Model) -> Call:
    """One message of the assistant; raises RequestError."""
    fields = Fields(body, ANTHROPIC)
    asked = _read(fields, model)
    asked["max_tokens"] = fields.integer("max_tokens") or _MAX_TOKENS
    for name in ("temperature", "top_p", "top_k", "stream", "sse_ping_interval"):
        asked[name] = fields.handed(name)
    asked["stop"] = _stops(fields)
    ignored = fields.settle(strict=model.options.strict_fields)
    id = f"msg_{uuid.uuid4().hex[:24]}"
    chat = await understand(asked, model, id=id, names=_names(fields))
    return Call(
        generations=chat.generations,
        reply=MessageReply(id, chat),
        stream=chat.common.stream,
        ping_interval=chat.common.ping_interval,
        ignored=(*ignored, *chat.ignored),
    )


async def count_tokens(body: Json, model: Model) -> Result:
    """Tokens of the prompt that these messages make; raises RequestError."""
    fields = Fields(body, COUNT_TOKENS)
    asked = _read(fields, model)
    fields.skip(COUNT_TOKENS)
    ignored = fields.settle(strict=model.options.strict_fields)
    tokens, further = await count(asked, model, names=_names(fields))
    return Result(body={"input_tokens": tokens}, ignored=(*ignored, *further), prompt_tokens=tokens)


# Bodies


def _names(fields: Fields) -> Mapping[str, str]:
    """What fields of a chat completion are called in this request."""
    form = "output_config.format" if fields.take("output_format") is None else "output_format"
    return {
        "response_format.json_schema": form,
        "response_format": form,
        "reasoning_effort": "output_config.effort",
        "tools[].function": "tools[]",
    }


def _read(fields: Fields, model: Model) -> Json:
    """What decides the prompt, and how the answer may be, as fields of a chat completion."""
    for name in ("mcp_servers", "container", "compaction"):
        fields.refuse(name, f"{name} is not supported: nothing runs here but the model; leave it out")
    fields.refuse("thread", "no conversation is kept here: send all of it, without thread", extra=_NO_THREADS)
    if fields.mapping("context_management"):
        fields.mark_unused("context_management")  # it only says what may be left out of long conversations
    fields.skip(("cache_control",))  # what prompts share is found without being told
    asked: Json = {"model": fields.text("model"), "messages": _system(fields)}
    for index, message in enumerate(fields.sequence("messages") or ()):
        asked["messages"] += _message(f"messages[{index}]", message, model.engine.blind)
    asked["messages"] = _joined(asked["messages"])
    if not any(message["role"] != "system" for message in asked["messages"]):
        raise InvalidValue("messages must be an array of at least one message", param="messages")
    last = asked["messages"][-1]
    if last["role"] == "assistant":
        if last.get("tool_calls"):
            raise InvalidValue("the last message's tool_use needs a tool_result after it", param="messages")
        asked["continue_final_message"] = True
    asked["tools"] = [_tool(f"tools[{index}]", tool) for index, tool in enumerate(fields.sequence("tools") or ())]
    asked |= _tool_choice(fields)
    thinking = _thinking(fields, model)
    return asked | _output(fields) | thinking


def _system(fields: Fields) -> list[Json]:
    stated = fields.take("system")
    text = stated if isinstance(stated, str) or stated is None else _texts("system", stated)
    return [{"role": "system", "content": text}] if text else []


def _message(where: str, message: Any, blind: str) -> list[Json]:
    """The messages that one of Anthropic's is: each result of a tool is one of its own. `blind`: why images cannot
    be."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise InvalidValue(f"{where} must be an object whose role is user or assistant", param=where)
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise InvalidValue(f"{where}.content must be a string or an array of blocks", param=f"{where}.content")
    results, calls, thoughts = [], [], []
    shown: list[str | Image] = []
    seen: list[Image] = []
    for index, block in enumerate(content):
        place = f"{where}.content[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and role == "user":
            result, images = _tool_result(place, block, blind)
            results.append(result)
            seen += images
        elif kind == "tool_use" and role == "assistant":
            calls.append(_tool_use(place, block))
        elif kind == "thinking" and role == "assistant" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "redacted_thinking" and role == "assistant":
            continue  # nobody here can read it
        elif kind == "image" and role == "user":
            shown.append(_image(place, block, blind))
        else:
            shown.append(_text(place, block))
    shown = [*seen, *shown]
    own: Json = {"role": role, "content": _content(shown) if shown else None}
    if calls:
        own["tool_calls"] = calls
    if thoughts:
        own["reasoning_content"] = "\n".join(thoughts)
    if not shown and not calls and not thoughts:
        if results:
            return results
        own["content"] = ""
    return [*results, own]


def _joined(messages: Sequence[Json]) -> list[Json]:
    """Messages of one role that follow each other are one, as at Anthropic: many templates want roles to alternate."""
    joined: list[Json] = []
    for message in messages:
        is_plain = set(message) == {"role", "content"} and message["role"] != "system"
        if is_plain and joined and set(joined[-1]) == {"role", "content"} and joined[-1]["role"] == message["role"]:
            both = [*_parts(joined[-1]["content"]), *_parts(message["content"])]
            joined[-1] = {"role": message["role"], "content": _content(both)}
        else:
            joined.append(message)
    return joined


def _parts(content: Any) -> list[str | Image]:
    """What `_content` was given, as far as that makes a difference."""
    if not isinstance(content, list):
        return [content or ""]
    return [part if isinstance(part, Image) else part["text"] for part in content]


def _content(shown: Sequence[str | Image]) -> Any:
    """Texts on lines of their own; with images, parts as a chat completion has them."""
    if not any(isinstance(part, Image) for part in shown):
        return "\n".join(part for part in shown if isinstance(part, str))
    return [part if isinstance(part, Image) else {"type": "text", "text": part} for part in shown]


def _image(where: str, block: Json, blind: str) -> Image:
    """The image of a block: it comes within the body, or not at all."""
    if blind:
        raise UnsupportedField(f"{where}: {blind}", param=where)
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or not isinstance(kind, str):
        raise InvalidValue(f"{where}.source must be an object with a type", param=f"{where}.source")
    if kind == "url":
        return from_url(f"{where}.source.url", source.get("url"))
    if kind != "base64":
        raise UnsupportedField(
            f"{where}.source: no files are kept here; send the image itself, with type base64", param=f"{where}.source"
        )
    return of_base64(f"{where}.source", source.get("data"), source.get("media_type"))


def _tool_result(where: str, block: Json, blind: str) -> tuple[Json, list[Image]]:
    """The message of a tool, and the images of its result: they go into the message of the user behind it, as templates
    show them nowhere else."""
    if not isinstance(block.get("tool_use_id"), str):
        raise InvalidValue(f"{where}.tool_use_id must be a string", param=f"{where}.tool_use_id")
    content = block.get("content") or []
    if not isinstance(content, str | list):
        raise InvalidValue(f"{where}.content must be a string or an array of blocks", param=f"{where}.content")
    parts: list[str | Image] = [content] if isinstance(content, str) else []
    for index, part in enumerate(content if isinstance(content, list) else ()):
        place = f"{where}.content[{index}]"
        is_image = isinstance(part, dict) and part.get("type") == "image"
        parts.append(_image(place, part, blind) if is_image else _text(place, part))
    text = "\n".join(part for part in parts if isinstance(part, str))
    if block.get("is_error") is True:
        text = f"Error: {text}"
    images = [part for part in parts if isinstance(part, Image)]
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
        raise UnsupportedField(f"{where}: images may stand in messages of the user only", param=where)
    if kind in ("document", "search_result", "container_upload"):
        raise UnsupportedField(f"{where}: this model takes text, not blocks of type {kind}", param=where)
    raise InvalidValue(f"{where} is no block that may stand here; text blocks may", param=where)


def _tool(where: str, tool: Any) -> Json:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "custom":
        raise UnsupportedField(f"{where}: tools that run at a server are not supported; define your own", param=where)
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise InvalidValue(f"{where} must be an object with a name", param=where)
    if not isinstance(tool.get("input_schema"), dict):
        raise InvalidValue(f"{where}.input_schema must be a JSON schema, an object", param=f"{where}.input_schema")
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def _tool_choice(fields: Fields) -> Json:
    if fields.mapping("tool_choice") is None:
        return {}
    within = fields.within("tool_choice", TOOL_CHOICE_OF_MESSAGES)
    kind = within.choice("type")
    name = within.text("name")
    if kind is None or (kind == "tool" and name is None):
        raise InvalidValue("tool_choice must have a type: auto, any, none, or tool with a name", param="tool_choice")
    named = {"type": "function", "function": {"name": name}}
    choice = named if kind == "tool" else "required" if kind == "any" else kind
    return {"tool_choice": choice, "parallel_tool_calls": not within.flag("disable_parallel_tool_use")}


def _thinking(fields: Fields, model: Model) -> Json:
    """Whether the model shall think, for templates that have a switch. A budget is nothing that can be kept."""
    if fields.mapping("thinking") is None:
        return {}
    within = fields.within("thinking", THINKING)
    kind = within.choice("type")
    if kind is None:
        raise InvalidValue("thinking.type must be enabled, disabled or adaptive", param="thinking.type")
    if within.integer("budget_tokens") is not None:
        fields.mark_unused("thinking.budget_tokens")
    has_switch = model.template.mentions("enable_thinking")
    thinks = model.family is not None and model.family.thinks
    if not has_switch and thinks == (kind == "disabled"):
        fields.mark_unused("thinking")
    return {"chat_template_kwargs": {"enable_thinking": kind != "disabled"}} if has_switch else {}


def _output(fields: Fields) -> Json:
    """What the answer is held to, and how hard the model shall think."""
    config = fields.within("output_config", OUTPUT)
    asked: Json = {}
    effort = config.choice("effort")
    if effort is not None:
        asked["reasoning_effort"] = effort
    for owner, name in ((config, "format"), (fields, "output_format")):
        form = owner.mapping(name)
        if form is None:
            continue
        if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
            where = owner.path + name
            raise InvalidValue(f'{where} must be {{"type": "json_schema", "schema": object}}', param=where)
        described = {"name": name, "schema": form["schema"], "strict": True}
        asked["response_format"] = {"type": "json_schema", "json_schema": described}
    return asked


def _stops(fields: Fields) -> list[str] | None:
    stops = fields.sequence("stop_sequences")
    if stops and (len(stops) > MAX_STOPS or not all(isinstance(stop, str) and stop for stop in stops)):
        raise InvalidValue(
            f"stop_sequences must be up to {MAX_STOPS} strings, none of them empty", param="stop_sequences"
        )
    return stops


# Answers


class MessageReply:
    """`message`, whole and as the events that build it."""

    def __init__(self, id: str, chat: Chat):
        self._chat = chat
        self._reading = Reading(chat.manner)
        self._totals = Totals(chat.generations)
        self._head: Json = {"id": id, "type": "message", "role": "assistant", "model": chat.common.model}
        self._content: list[Json] = []
        self._has_begun = False
        self._is_open = False
        """The last block may still grow."""

    def whole(self, deltas: Iterable[tuple[int, Delta]]) -> Json:
        ended = Delta()
        for number, delta in deltas:
            self._add(number, delta)
            ended = delta
        return {**self._head, "content": self._content, **self._end(ended), "usage": self._usage()}

    def frames(self, number: int, delta: Delta) -> bytes:
        if delta.progress is not None:
            return b""
        events: list[Json] = []
        if not self._has_begun:
            self._has_begun = True
            usage = {**self._usage(), "output_tokens": 0}
            message = {**self._head, "content": [], **_NOT_YET, "usage": usage}
            events.append({"type": "message_start", "message": message})
        events += self._add(number, delta)
        if delta.finish is not None:
            events.append({"type": "message_delta", "delta": self._end(delta), "usage": self._usage()})
        return b"".join(_frame(event) for event in events)

    def closing(self) -> bytes:
        return _frame({"type": "message_stop"})

    def _add(self, number: int, delta: Delta) -> list[Json]:
        """Take the next delta; returns the events of its blocks."""
        self._totals.add(number, delta)
        parts, _ = self._reading.take(delta)
        events = [event for part in parts for event in self._part(part)]
        return [*events, *self._close()] if delta.finish is not None else events

    def _part(self, part: Part) -> list[Json]:
        if part.call is not None:
            call = {"type": "tool_use", "id": f"toolu_{part.call.id.removeprefix('call_')}", "name": part.call.name}
            events = self._open({**call, "input": {}})
            self._content[-1]["input"] = orjson.loads(part.call.arguments)
            grown = {"type": "input_json_delta", "partial_json": part.call.arguments}
            return [*events, self._delta(grown), *self._close()]
        kind, text = ("thinking", part.reasoning) if part.reasoning else ("text", part.content)
        events = []
        if not self._is_open or self._content[-1]["type"] != kind:
            # no signature: what comes back is read as it is
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
        """Why it ended."""
        reason = "max_tokens" if delta.finish == "length" else "end_turn"
        if delta.stop is not None:
            reason = "stop_sequence"
        elif reason == "end_turn" and any(block["type"] == "tool_use" for block in self._content):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": delta.stop, "stop_details": None}

    def _usage(self) -> Json:
        """As at Anthropic, tokens of the prompt that cost nothing are counted apart."""
        usage = self._totals.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "output_tokens": usage["completion_tokens"],
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
        }


def _frame(event: Json) -> bytes:
    return f"event: {event['type']}\n".encode() + b"data: " + orjson.dumps(event) + b"\n\n"
