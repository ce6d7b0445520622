"""Ollama's chats, texts and vectors: bodies become those of OpenAI's calls, answers lines of JSON."""

import math
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from worker.api import embeddings as vectors
from worker.api.call import Call, Model, Result, read_ping_interval
from worker.api.openai import Chat, understand, understand_text
from worker.api.openai_replies import Totals, described
from worker.errors import ContextExceeded, InvalidValue, UnsupportedField
from worker.images import Image, from_url, of_base64
from worker.interface import Delta, TokenLogprob
from worker.prompt.body_reader import Fields, Json, to_integer
from worker.prompt.chat_template import read_tools
from worker.prompt.response_parser import Part, Reading
from worker.prompt.sampling_options import read_stop
from worker.protocol.dialects.ollama import (
    OF_LOADS,
    OLLAMA_CHAT,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    OLLAMA_GENERATE,
    OPTIONS,
)
from worker.protocol.streams import timestamp

_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "seed", "repeat_penalty", "repeat_last_n", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
"""Options that OpenAI's bodies have by the same name."""
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ns|us|µs|ms|s|m|h)")
_IMPOSSIBLE = -9999.0
"""The logprob of a token that cannot be, for clients that want a number."""
_THINKING = ("low", "medium", "high", "max")
_NAMES: Mapping[str, str] = {
    "response_format.json_schema": "format",
    "response_format": "format",
    "reasoning_effort": "think",
    "max_tokens": "options.num_predict",
}
"""What fields of a chat completion are called here."""


async def chat(body: Json, model: Model, *, waited: float = 0.0) -> Call | Result:
    """One message of the assistant; without messages, the model is loaded. `waited`: seconds until it was, before this
    was called. Raises RequestError."""
    fields = Fields(body, OLLAMA_CHAT)
    asked, room, keep_alive = _read(fields, model)
    messages = fields.sequence("messages") or []
    asked["messages"] = [_message(f"messages[{index}]", message, model) for index, message in enumerate(messages)]
    asked["tools"] = fields.sequence("tools") or []
    if messages:
        asked |= _logprobs(fields)
        ignored = fields.settle(strict=model.options.strict_fields)
        understood = await understand(asked, model, id=f"chat-{uuid.uuid4().hex}", names=_NAMES)
        return _call(understood, room, keep_alive, ignored, is_chat=True, waited=waited)
    read_tools(fields)
    return _loaded(fields, model, asked, keep_alive, {"message": {"role": "assistant", "content": ""}})


async def generate(body: Json, model: Model, *, waited: float = 0.0) -> Call | Result:
    """A text that answers a prompt, or with `raw` goes on from it; without a prompt, the model is loaded. `waited`: as
    in `chat`. Raises RequestError."""
    fields = Fields(body, OLLAMA_GENERATE)
    asked, room, keep_alive = _read(fields, model)
    prompt, system, raw = fields.text("prompt"), fields.text("system"), fields.flag("raw") or False
    images = _images("images", fields.take("images"), model)
    context = _context(fields, model)
    fields.refuse("template", "template is not supported; set chat-template in the model's preset")
    suffix = fields.text("suffix") or ""
    if not prompt:
        return _loaded(fields, model, asked, keep_alive, {"response": ""})
    logprobs = _logprobs(fields)
    if raw and system:
        fields.mark_unused("system")  # a raw prompt is all that the model gets
    if (raw or suffix) and fields.take("think") is not None:
        fields.mark_unused("think")
    ignored = fields.settle(strict=model.options.strict_fields)
    id = f"text-{uuid.uuid4().hex}"
    if images and (raw or suffix):
        why = "a raw prompt; send raw: false" if raw else "a prompt with a suffix; leave one of them out"
        raise UnsupportedField(f"images have no place in {why}", param="images")
    if suffix and system:
        raise InvalidValue("suffix and system exclude each other; state one", param="suffix")
    if context and (raw or suffix or images):
        other = "raw" if raw else "suffix" if suffix else "images"
        raise InvalidValue(f"context and {other} exclude each other; leave one of them out", param="context")
    if raw or suffix or not model.template.exists:
        asked.pop("chat_template_kwargs", None), asked.pop("reasoning_effort", None)
        top = logprobs.get("top_logprobs") or 0 if logprobs.get("logprobs") else None
        joined = f"{system}\n{prompt}" if system and not raw else prompt
        asked |= {"prompt": [*context, joined] if context else joined, "logprobs": top}
        understood = await understand_text(asked, model, id=id, suffix=suffix)
    else:
        before = [{"role": "system", "content": system}] if system else []
        asked["messages"] = [*before, {"role": "user", "content": _content(images, prompt)}]
        understood = await understand({**asked, **logprobs}, model, id=id, names=_NAMES, before=context)
    goes_on = not (raw or suffix or images)
    return _call(understood, room, keep_alive, ignored, is_chat=False, waited=waited, has_context=goes_on)


async def embed(body: Json, model: Model, *, waited: float = 0.0) -> Result:
    """A vector for each text. `waited`: as in `chat`. Raises RequestError."""
    began = time.monotonic() - waited
    fields = Fields(body, OLLAMA_EMBED)
    name, keep_alive = _named(fields, model), _keep_alive(fields)
    _pass_over_options(fields, model)
    texts = fields.take("input")
    truncate = fields.flag("truncate")
    asked = {"input": texts, "dimensions": fields.integer("dimensions") or None, "truncate": truncate is not False}
    ignored = fields.settle(strict=model.options.strict_fields)
    if texts in (None, "", []):
        model.require("embedding")
        return Result(body={"model": name, "embeddings": []}, ignored=ignored, keep_alive=keep_alive)
    made = await vectors.embeddings(asked, model)
    told = {
        "model": name,
        "embeddings": [each["embedding"] for each in made.body["data"]],
        "total_duration": _nanoseconds(time.monotonic() - began),
        "load_duration": _nanoseconds(waited),
        "prompt_eval_count": made.prompt_tokens,
    }
    return Result(body=told, ignored=ignored, prompt_tokens=made.prompt_tokens, keep_alive=keep_alive)


async def embeddings(body: Json, model: Model) -> Result:
    """The older call: one text, one vector; raises RequestError."""
    fields = Fields(body, OLLAMA_EMBEDDINGS)
    _named(fields, model)
    keep_alive = _keep_alive(fields)
    _pass_over_options(fields, model)
    prompt = fields.text("prompt")
    ignored = fields.settle(strict=model.options.strict_fields)
    if not prompt:
        model.require("embedding")
        return Result(body={"embedding": []}, ignored=ignored, keep_alive=keep_alive)
    made = await vectors.embeddings({"input": prompt, "truncate": True}, model)
    vector = made.body["data"][0]["embedding"]
    return Result(body={"embedding": vector}, ignored=ignored, prompt_tokens=made.prompt_tokens, keep_alive=keep_alive)


# Bodies


def _read(fields: Fields, model: Model) -> tuple[Json, int | None, float | None]:
    """What chats and texts state alike, as fields of a chat completion; the tokens that prompt and answer may have
    together (None: the context); and `keep_alive` in seconds."""
    asked, room = _options(fields, model)
    stream = fields.flag("stream")
    asked |= {"model": _named(fields, model), "stream": stream is not False}
    fields.refuse(
        "_debug_render_only", "_debug_render_only is not supported; POST /apply-template shows a chat's prompt"
    )
    for name in ("truncate", "shift"):
        if fields.flag(name):
            fields.mark_unused(name)  # what is too long is refused
    read_ping_interval(fields)
    asked["sse_ping_interval"] = fields.take("sse_ping_interval")
    return asked | _format(fields) | _think(fields, model), room, _keep_alive(fields)


def _named(fields: Fields, model: Model) -> str:
    model_name, older = fields.text("model"), fields.text("name")
    return model_name or older or model.options.name


def _options(fields: Fields, model: Model) -> tuple[Json, int | None]:
    within = fields.within("options", OPTIONS)
    asked: Json = {name: within.handed(name) for name in _SAMPLING}
    asked["stop"] = read_stop(within, "stop")
    for name in ("typical_p", "mirostat"):
        within.refuse(name, f"options.{name} is not supported; leave it out")
    for name in ("mirostat_tau", "mirostat_eta"):
        within.take(name)
    within.refuse("tfs_z", "options.tfs_z is not supported; leave it out")
    most = within.integer("num_predict")
    asked["max_tokens"] = -1 if most is not None and most <= 0 else most
    room = within.integer("num_ctx")
    if room is not None and room > model.engine.ctx_size:
        raise InvalidValue(
            f"options.num_ctx is above this model's context of {model.engine.ctx_size} tokens; raise ctx-size in the"
            " preset",
            param="options.num_ctx",
        )
    for name in OF_LOADS:
        if within.take(name) is not None:
            fields.mark_unused(within.path + name)
    for name in within.settle(strict=model.options.strict_fields):
        fields.mark_unused(within.path + name)
    return asked, room


def _pass_over_options(fields: Fields, model: Model) -> None:
    """Of a call for vectors: checked as for any other, and reported, as no vector depends on them."""
    _options(fields, model)
    for name, value in (fields.mapping("options") or {}).items():
        if value is not None:
            fields.mark_unused(f"options.{name}")


def _format(fields: Fields) -> Json:
    stated = fields.take("format")
    if stated in (None, ""):
        return {}
    if stated == "json":
        return {"response_format": {"type": "json_object"}}
    if not isinstance(stated, dict):
        raise InvalidValue('format must be "json" or a JSON schema, an object', param="format")
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "format", "schema": stated}}}


def _think(fields: Fields, model: Model) -> Json:
    stated = fields.take("think")
    if stated is None:
        return {}
    if isinstance(stated, str):
        if stated not in _THINKING:
            raise InvalidValue(f"think must be true, false or one of {', '.join(_THINKING)}", param="think")
        return {"reasoning_effort": stated}
    if not isinstance(stated, bool):
        raise InvalidValue(f"think must be true, false or one of {', '.join(_THINKING)}", param="think")
    if not model.template.mentions("enable_thinking"):
        thinks = model.family is not None and model.family.thinks
        if thinks != stated:
            fields.mark_unused("think")
        return {}
    return {"chat_template_kwargs": {"enable_thinking": stated}}


def _logprobs(fields: Fields) -> Json:
    wanted, alternatives = fields.flag("logprobs"), fields.take("top_logprobs")
    if alternatives is not None and not wanted:
        fields.mark_unused("top_logprobs")
    return {"logprobs": wanted, "top_logprobs": alternatives if wanted else None}


def _keep_alive(fields: Fields) -> float | None:
    """Seconds; -1.0: for ever."""
    stated = fields.take("keep_alive")
    if stated is None:
        return None
    seconds = float(stated) if type(stated) in (int, float) else _seconds(stated) if isinstance(stated, str) else None
    if seconds is None or not math.isfinite(seconds):
        raise InvalidValue(
            'keep_alive must be seconds, or a duration such as "5m"; below 0 is for ever', param="keep_alive"
        )
    return -1.0 if seconds < 0 else seconds


def _seconds(text: str) -> float | None:
    """Of a number, or of a duration as Go writes it: `1h30m`."""
    sign, digits = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", digits):
        return sign * float(digits)
    if not re.fullmatch(f"(?:{_DURATION.pattern})+", digits):
        return None
    return sign * sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(digits))


def _images(where: str, stated: Any, model: Model) -> list[Image]:
    """Images in base64."""
    if not stated:
        return []
    if model.engine.blind:
        raise UnsupportedField(f"{where}: {model.engine.blind}", param=where)
    if not isinstance(stated, list):
        raise InvalidValue(f"{where} must be an array of images in base64", param=where)
    return [
        from_url(f"{where}[{index}]", each)
        if isinstance(each, str) and each.startswith(("data:", "http://", "https://"))
        else of_base64(f"{where}[{index}]", each)
        for index, each in enumerate(stated)
    ]


def _context(fields: Fields, model: Model) -> list[int]:
    """Tokens of a prompt and its answer, as an answer has told them."""
    listed = fields.sequence("context") or []
    if len(listed) > model.max_prompt:  # before each is looked at
        raise ContextExceeded(len(listed), model.engine.ctx_size, param="context")
    tokens = [id for each in listed if (id := to_integer(each)) is not None and 0 <= id < model.vocab_size]
    if len(tokens) < len(listed):
        raise InvalidValue(
            f"context must be the tokens that an answer of this model told, between 0 and {model.vocab_size - 1}",
            param="context",
        )
    return tokens


def _content(images: Sequence[Image], text: Any) -> Any:
    """Images stand before the text, as at Ollama."""
    return [*images, *([{"type": "text", "text": text}] if text else [])] if images else text


def _message(where: str, message: Any, model: Model) -> Json:
    """A message as OpenAI has it."""
    if not isinstance(message, dict):
        raise InvalidValue(f"{where} must be an object", param=where)
    known = {name: message.get(name) for name in ("role", "content", "tool_call_id")}
    if isinstance(known["role"], str):
        known["role"] = known["role"].lower()  # as Ollama reads it
    known["content"] = _content(_images(f"{where}.images", message.get("images"), model), message.get("content"))
    known["reasoning_content"] = message.get("thinking")
    known["name"] = message.get("tool_name")
    known["tool_calls"] = message.get("tool_calls")
    return {name: value for name, value in known.items() if value is not None}


# Answers


def _call(
    chat: Chat,
    room: int | None,
    keep_alive: float | None,
    ignored: tuple[str, ...],
    *,
    is_chat: bool,
    waited: float,
    has_context: bool = False,
) -> Call:
    if room is not None:
        chat = replace(chat, generations=tuple(_within(room, each) for each in chat.generations))
    return Call(
        generations=chat.generations,
        reply=LineReply(chat, is_chat=is_chat, waited=waited, has_context=has_context),
        stream=chat.common.stream,
        ping_interval=chat.common.ping_interval,
        ignored=(*ignored, *chat.ignored),
        keep_alive=keep_alive,
    )


def _within(room: int, generation: Any) -> Any:
    left = room - len(generation.prompt)
    if left < 1:
        raise ContextExceeded(len(generation.prompt), room, param="options.num_ctx")
    return replace(generation, max_tokens=min(left, generation.max_tokens or left))


def _loaded(fields: Fields, model: Model, asked: Json, keep_alive: float | None, empty: Json) -> Result:
    """The answer to a request that asks for nothing but the model itself."""
    model.require("completion")
    _logprobs(fields)
    ignored = fields.settle(strict=model.options.strict_fields)
    reason = "unload" if keep_alive == 0 else "load"
    head = {"model": asked["model"], "created_at": timestamp()}
    told = {**head, **empty, "done_reason": reason, "done": True}
    return Result(body=told, ignored=ignored, keep_alive=keep_alive, stream=asked["stream"])


class LineReply:
    """An answer whole, and as lines; `done` stands last in each."""

    def __init__(self, chat: Chat, *, is_chat: bool, waited: float, has_context: bool):
        """`has_context`: it tells the tokens of prompt and answer, so that another request can go on from them."""
        self._model = chat.common.model
        self._context = list(chat.generations[0].prompt) if has_context else None
        self._is_chat = is_chat
        self._reading = Reading(chat.manner)
        self._totals = Totals(chat.generations)
        self._waited = waited
        """Seconds until the model was loaded."""
        self._began = time.monotonic() - waited
        self._held: list[TokenLogprob] = []

    def whole(self, deltas: Iterable[tuple[int, Delta]]) -> Json:
        parts: list[Part] = []
        ended = Delta()
        for number, delta in deltas:
            parts += self._add(number, delta)
            ended = delta
        return self._line(parts) | self._end(ended)

    def frames(self, number: int, delta: Delta) -> bytes:
        lines = [_frame(self._line([part])) for part in self._add(number, delta)]
        if delta.finish is not None:
            lines.append(_frame(self._line([]) | self._end(delta)))
        return b"".join(lines)

    def closing(self) -> bytes:
        return b""  # the last line says `done`

    def _add(self, number: int, delta: Delta) -> list[Part]:
        self._totals.add(number, delta)
        self._held.extend(delta.logprobs)
        if self._context is not None:
            self._context.extend(delta.tokens)
        return self._reading.take(delta)[0]

    def _line(self, parts: list[Part]) -> Json:
        content = "".join(part.content for part in parts)
        thinking = "".join(part.reasoning for part in parts)
        calls = [_tool_call(part) for part in parts if part.call is not None]
        said: Json = {"thinking": thinking} if thinking else {}
        if calls:
            said["tool_calls"] = calls
        line: Json = {"model": self._model, "created_at": timestamp()}
        if self._is_chat:
            line["message"] = {"role": "assistant", "content": content, **said}
        else:
            line |= {"response": content, **said}
        if self._held:
            line["logprobs"] = [
                {**_logprob(each), "top_logprobs": [_logprob(top) for top in each.top]} for each in self._held
            ]
            self._held = []
        return line | {"done": False}

    def _end(self, delta: Delta) -> Json:
        timings = self._totals.timings()
        usage = self._totals.usage()
        context = {} if self._context is None else {"context": self._context}
        return context | {
            "done_reason": delta.finish,
            "total_duration": _nanoseconds(time.monotonic() - self._began),
            "load_duration": _nanoseconds(self._waited),
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(timings["prompt_ms"] / 1e3),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(timings["predicted_ms"] / 1e3),
            "done": True,
        }


def _logprob(entry: TokenLogprob) -> Json:
    told = described(entry)
    return {**told, "logprob": _IMPOSSIBLE if told["logprob"] is None else told["logprob"]}


def _tool_call(part: Part) -> Json:
    assert part.call is not None
    return {"id": part.call.id, "function": {"name": part.call.name, "arguments": orjson.loads(part.call.arguments)}}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _frame(line: Json) -> bytes:
    done = line.pop("done")  # stands last: that is how an end is known without reading the line
    return orjson.dumps({**line, "done": done}) + b"\n"
