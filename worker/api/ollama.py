"""Ollama's chat, generate and embed calls, translated to and from OpenAI's. Answers are lines of JSON."""

import itertools
import math
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from worker.api import embeddings as vectors
from worker.api.call import GenerationCall, JsonAnswer, ReplyWriter, read_ping_interval, switch_reasoning
from worker.api.openai import ParsedCompletion, parse_chat, parse_text
from worker.api.openai_replies import token_entry
from worker.api.served_model import ServedModel
from worker.api.usage import UsageTotals
from worker.errors import ContextExceeded, InvalidValue, UnsupportedField
from worker.images import EncodedImage, from_base64, from_url
from worker.interface import Delta, GenerationRequest, TokenLogprob
from worker.prompt.body_reader import BodyFields, Json, to_integer
from worker.prompt.chat_template import read_tools
from worker.prompt.response_parser import AnswerParser, AnswerPart
from worker.prompt.sampling_options import read_stop
from worker.protocol.dialects.ollama import (
    CHAT,
    EMBED,
    EMBEDDINGS,
    GENERATE,
    IGNORED_OPTIONS,
    OPTIONS,
    SAME_AS_OPENAI,
)
from worker.protocol.streams import timestamp

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST_DURATION = 100  # characters
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ns|us|µs|ms|s|m|h)")
_IMPOSSIBLE_LOGPROB = -9999.0  # logprob of an impossible token, for clients that need a number
_THINKING_LEVELS = ("low", "medium", "high", "max")
# Ollama's names for fields of a chat completion
_NAMES: Mapping[str, str] = {
    "response_format.json_schema": "format",
    "response_format": "format",
    "reasoning_effort": "think",
    "max_tokens": "options.num_predict",
}


async def chat(body: Json, model: ServedModel, *, waited: float = 0.0) -> GenerationCall | JsonAnswer:
    """Parse a chat request; without messages it only loads the model. Raise RequestError.

    `waited`: seconds that the model took to load before this call.
    """
    fields = BodyFields(body, CHAT)
    chat_body, num_ctx, keep_alive = _read(fields, model)
    messages = fields.sequence("messages") or []
    chat_body["messages"] = [_message(f"messages[{index}]", message, model) for index, message in enumerate(messages)]
    chat_body["tools"] = fields.sequence("tools") or []
    most = min((num_ctx or model.engine.ctx_size) - 1, model.max_prompt)
    turns_limit = most if fields.flag("truncate") else None  # by default Ollama hides that a chat is too long
    if messages:
        chat_body |= _logprobs(fields)
        id = f"chat-{uuid.uuid4().hex}"
        parsed = await parse_chat(chat_body, model, id=id, names=_NAMES, turns_limit=turns_limit)
        ignored = fields.check_unknown(strict=model.options.strict_fields)
        return _call(parsed, num_ctx, keep_alive, ignored, is_chat=True, waited=waited)
    read_tools(fields)
    empty = {"message": {"role": "assistant", "content": ""}}
    return _load_answer(fields, model, chat_body, keep_alive, empty, waited=waited)


async def generate(body: Json, model: ServedModel, *, waited: float = 0.0) -> GenerationCall | JsonAnswer:
    """Parse a completion request; without a prompt it only loads the model. `raw` skips the chat template. Raise
    RequestError.

    `waited`: as for `chat`.
    """
    fields = BodyFields(body, GENERATE)
    chat_body, num_ctx, keep_alive = _read(fields, model)
    prompt, system, raw = fields.text("prompt"), fields.text("system"), fields.flag("raw") or False
    images = _images("images", fields.sequence("images"), model)
    context = _context(fields, model)
    fields.refuse("template", "template is not supported; set chat-template in the model's preset")
    if fields.flag("truncate"):
        fields.mark_unused("truncate")  # no effect: a prompt that is too long is rejected
    suffix = fields.text("suffix") or ""
    if not prompt:
        return _load_answer(fields, model, chat_body, keep_alive, {"response": ""}, waited=waited)
    logprobs = _logprobs(fields)
    if raw and system:
        fields.mark_unused("system")  # a raw prompt has no system message
    if (raw or suffix) and fields.take("think") is not None:
        fields.mark_unused("think")
    id = f"text-{uuid.uuid4().hex}"
    if images and (raw or suffix):
        why = "a raw prompt; send raw: false" if raw else "a prompt with a suffix; send one of them"
        raise UnsupportedField(f"images are not supported in {why}", param="images")
    if suffix and system:
        raise InvalidValue("suffix and system exclude each other; send one of them", param="suffix")
    if context and (raw or suffix or images):
        other = "raw" if raw else "suffix" if suffix else "images"
        raise InvalidValue(f"context and {other} exclude each other; send one of them", param="context")
    if raw or suffix or not model.template.exists:
        # A text completion. Its schema has no fields of the template; unknown ones would be reported as ignored.
        chat_body.pop("chat_template_kwargs", None), chat_body.pop("reasoning_effort", None)
        top = logprobs.get("top_logprobs") or 0 if logprobs.get("logprobs") else None
        joined = f"{system}\n{prompt}" if system and not raw else prompt
        chat_body |= {"prompt": [*context, joined] if context else joined, "logprobs": top}
        parsed = await parse_text(chat_body, model, id=id, suffix=suffix)
    else:
        before = [{"role": "system", "content": system}] if system else []
        chat_body["messages"] = [*before, {"role": "user", "content": _content(images, prompt)}]
        parsed = await parse_chat({**chat_body, **logprobs}, model, id=id, names=_NAMES, before=context)
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    # a context continues a conversation; token ids cannot represent images
    has_context = not (raw or suffix or images)
    return _call(parsed, num_ctx, keep_alive, ignored, is_chat=False, waited=waited, has_context=has_context)


async def embed(body: Json, model: ServedModel, *, waited: float = 0.0) -> JsonAnswer:
    """Compute one vector per text. `waited`: as for `chat`. Raise RequestError."""
    started = time.monotonic() - waited
    fields = BodyFields(body, EMBED)
    name, keep_alive = _model_name(fields, model), _keep_alive(fields)
    _ignore_options(fields, model)
    texts = fields.take("input")
    truncate = fields.flag("truncate")
    dimensions = fields.integer("dimensions") or None  # 0 means all dimensions
    openai_body = {"input": texts, "dimensions": dimensions, "truncate": truncate is not False}
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    if texts in (None, "", []):
        model.require("embedding")
        return JsonAnswer(body={"model": name, "embeddings": []}, ignored=ignored, keep_alive=keep_alive)
    embedded = await vectors.embeddings(openai_body, model)
    answer = {
        "model": name,
        "embeddings": [item["embedding"] for item in embedded.body["data"]],
        "total_duration": _nanoseconds(time.monotonic() - started),
        "load_duration": _nanoseconds(waited),
        "prompt_eval_count": embedded.prompt_tokens,
    }
    return JsonAnswer(body=answer, ignored=ignored, prompt_tokens=embedded.prompt_tokens, keep_alive=keep_alive)


async def embeddings(body: Json, model: ServedModel) -> JsonAnswer:
    """Compute the vector of one text, in the older API. Raise RequestError."""
    fields = BodyFields(body, EMBEDDINGS)
    _model_name(fields, model)
    keep_alive = _keep_alive(fields)
    _ignore_options(fields, model)
    prompt = fields.text("prompt")
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    if not prompt:
        model.require("embedding")
        return JsonAnswer(body={"embedding": []}, ignored=ignored, keep_alive=keep_alive)
    embedded = await vectors.embeddings({"input": prompt, "truncate": True}, model)
    vector = embedded.body["data"][0]["embedding"]
    return JsonAnswer(
        body={"embedding": vector}, ignored=ignored, prompt_tokens=embedded.prompt_tokens, keep_alive=keep_alive
    )


def _read(fields: BodyFields, model: ServedModel) -> tuple[Json, int | None, float | None]:
    """Read the fields that chat and generate share.

    Return fields of a chat completion, the maximum tokens of prompt and answer together (None: the context size), and
    `keep_alive` in seconds.
    """
    chat_body, num_ctx = _options(fields, model)
    stream = fields.flag("stream")
    chat_body |= {"model": _model_name(fields, model), "stream": stream is not False}
    fields.refuse(
        "_debug_render_only", "_debug_render_only is not supported; POST /apply-template returns a chat's prompt"
    )
    if fields.flag("shift"):
        fields.mark_unused("shift")  # no effect: the text ends with the context
    read_ping_interval(fields)
    chat_body["sse_ping_interval"] = fields.take("sse_ping_interval")
    return chat_body | _format(fields) | _think(fields, model), num_ctx, _keep_alive(fields)


def _model_name(fields: BodyFields, model: ServedModel) -> str:
    model_name, older = fields.text("model"), fields.text("name")
    return model_name or older or model.options.name


def _options(fields: BodyFields, model: ServedModel) -> tuple[Json, int | None]:
    within = fields.within("options", OPTIONS)
    chat_body: Json = {name: within.checked(name) for name in SAME_AS_OPENAI}
    chat_body["stop"] = read_stop(within, "stop")
    most = within.integer("num_predict")
    chat_body["max_tokens"] = -1 if most is not None and most <= 0 else most
    num_ctx = within.integer("num_ctx")
    if num_ctx is not None and num_ctx > model.engine.ctx_size:
        # Ollama lowers it to the model's context as well. Editors send one number for all models. A prompt
        # that does not fit is still rejected, with both lengths.
        fields.mark_unused("options.num_ctx")
        num_ctx = None
    for name in IGNORED_OPTIONS:
        if within.take(name) is not None:
            fields.mark_unused(within.path + name)
    for name in within.check_unknown(strict=model.options.strict_fields):
        fields.mark_unused(within.path + name)
    return chat_body, num_ctx


def _ignore_options(fields: BodyFields, model: ServedModel) -> None:
    """Validate the options of an embedding request and report them as ignored."""
    _options(fields, model)
    for name, value in (fields.mapping("options") or {}).items():
        if value is not None:
            fields.mark_unused(f"options.{name}")


def _format(fields: BodyFields) -> Json:
    given = fields.take("format")
    if given in (None, ""):
        return {}
    if given == "json":
        return {"response_format": {"type": "json_object"}}
    if not isinstance(given, dict):
        raise InvalidValue('format must be "json" or a JSON schema, an object', param="format")
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "format", "schema": given}}}


def _think(fields: BodyFields, model: ServedModel) -> Json:
    given = fields.take("think")
    if given is None:
        return {}
    if given in _THINKING_LEVELS:
        return {"reasoning_effort": given}
    if not isinstance(given, bool):
        raise InvalidValue(f"think must be true, false or one of {', '.join(_THINKING_LEVELS)}", param="think")
    return switch_reasoning(fields, "think", model, is_on=given)


def _logprobs(fields: BodyFields) -> Json:
    is_requested, alternatives = fields.flag("logprobs"), fields.take("top_logprobs")
    if alternatives is not None and not is_requested:
        fields.mark_unused("top_logprobs")
    return {"logprobs": is_requested, "top_logprobs": alternatives if is_requested else None}


def _keep_alive(fields: BodyFields) -> float | None:
    """Return keep_alive in seconds; -1.0 is unlimited."""
    given = fields.take("keep_alive")
    if given is None:
        return None
    seconds = float(given) if type(given) in (int, float) else _seconds(given) if isinstance(given, str) else None
    if seconds is None or not math.isfinite(seconds):
        raise InvalidValue(
            'keep_alive must be seconds, or a duration such as "5m"; a negative value keeps the model loaded',
            param="keep_alive",
        )
    return -1.0 if seconds < 0 else seconds


def _seconds(text: str) -> float | None:
    """Parse seconds, or a duration in Go's notation such as `1h30m`."""
    if len(text) > _LONGEST_DURATION:
        return None
    sign, digits = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", digits):
        return sign * float(digits)
    if not re.fullmatch(f"(?:{_DURATION.pattern})+", digits):
        return None
    return sign * sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(digits))


def _images(where: str, given: Any, model: ServedModel) -> list[EncodedImage]:
    """Read images in base64 or as data URLs."""
    if given in (None, []):
        return []
    if model.engine.no_vision:
        raise UnsupportedField(f"{where}: {model.engine.no_vision}", param=where)
    if not isinstance(given, list):
        raise InvalidValue(f"{where} must be an array of images in base64", param=where)
    # The engine refuses the first one that is too many by its name. A body may list two million.
    return [
        from_url(f"{where}[{index}]", image)
        if isinstance(image, str) and image.startswith(("data:", "http://", "https://"))
        else from_base64(f"{where}[{index}]", image)
        for index, image in enumerate(given[: model.options.limit_images + 1])
    ]


def _context(fields: BodyFields, model: ServedModel) -> list[int]:
    """Read the tokens of an earlier prompt and its answer."""
    listed = fields.sequence("context") or []
    if len(listed) > model.max_prompt:  # checked before the ids themselves, to bound the work
        raise model.prompt_limit("context").error(len(listed), is_exact=True)
    tokens = [id for value in listed if (id := to_integer(value)) is not None and 0 <= id < model.vocab_size]
    if len(tokens) < len(listed):
        raise InvalidValue(
            f"context must be the token ids of an earlier answer of this model, between 0 and {model.vocab_size - 1}",
            param="context",
        )
    return tokens


def _content(images: Sequence[EncodedImage], text: Any) -> Any:
    """Put images before the text, as Ollama does."""
    return [*images, *([{"type": "text", "text": text}] if text else [])] if images else text


def _message(where: str, message: Any, model: ServedModel) -> Json:
    """Translate a message to OpenAI's form."""
    if not isinstance(message, dict):
        raise InvalidValue(f"{where} must be an object", param=where)
    known = {name: message.get(name) for name in ("role", "content", "tool_call_id")}
    if isinstance(known["role"], str):
        known["role"] = known["role"].lower()  # Ollama is case-insensitive here
    text = "" if known["content"] is None else known["content"]  # Ollama's clients leave out a content that is empty
    known["content"] = _content(_images(f"{where}.images", message.get("images"), model), text)
    known["reasoning_content"] = message.get("thinking")
    known["name"] = message.get("tool_name")
    known["tool_calls"] = message.get("tool_calls")
    return {name: value for name, value in known.items() if value is not None}


def _call(
    chat: ParsedCompletion,
    num_ctx: int | None,
    keep_alive: float | None,
    ignored: tuple[str, ...],
    *,
    is_chat: bool,
    waited: float,
    has_context: bool = False,
) -> GenerationCall:
    if num_ctx is not None:
        chat = replace(
            chat, generations=tuple(_limit_to_num_ctx(num_ctx, generation) for generation in chat.generations)
        )
    reply = OllamaWriter(chat, is_chat=is_chat, waited=waited, has_context=has_context)
    return chat.call(reply, ignored=ignored, keep_alive=keep_alive)


def _limit_to_num_ctx(num_ctx: int, generation: GenerationRequest) -> GenerationRequest:
    left = num_ctx - len(generation.prompt)
    if left < 1:
        raise ContextExceeded(len(generation.prompt), num_ctx, param="options.num_ctx")
    return replace(generation, max_tokens=min(left, generation.max_tokens or left))


def _load_answer(
    fields: BodyFields, model: ServedModel, chat_body: Json, keep_alive: float | None, empty: Json, *, waited: float
) -> JsonAnswer:
    """Return the answer to a request that only loads or unloads the model."""
    reason = "unload" if keep_alive == 0 else "load"
    if reason == "load":  # `ollama stop` unloads embedders with the same call
        model.require("completion")
    _logprobs(fields)
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    head = {"model": chat_body["model"], "created_at": timestamp()}
    answer = {**head, **empty, "done_reason": reason, "done": True}
    # Ollama's answer is never a stream, and Open WebUI accepts no other. But the router may have begun one in a load.
    return JsonAnswer(body=answer, ignored=ignored, keep_alive=keep_alive, stream=chat_body["stream"] and waited > 0)


class OllamaWriter(ReplyWriter):
    """Writer of an answer as one object or as lines. `done` is the last field of each."""

    def __init__(self, chat: ParsedCompletion, *, is_chat: bool, waited: float, has_context: bool):
        """`has_context`: return the tokens of prompt and answer, so that another request can continue from them."""
        self._model = chat.common.model
        self._context = list(chat.generations[0].prompt) if has_context else None
        self._is_chat = is_chat
        self._parser = AnswerParser(chat.parse_options)
        self._totals = UsageTotals(chat.generations)
        self._waited = waited  # seconds until the model was loaded
        self._started = time.monotonic() - waited
        self._pending_logprobs: list[TokenLogprob] = []
        self._call_numbers = itertools.count()

    def full_body(self, deltas: Iterable[tuple[int, Delta]]) -> Json:
        parts: list[AnswerPart] = []
        last = Delta()
        for number, delta in deltas:
            parts += self._add(number, delta)
            last = delta
        return self._line(parts) | self._end(last)

    def frames(self, number: int, delta: Delta) -> bytes:
        lines = [_frame(self._line([part])) for part in self._add(number, delta)]
        if delta.finish is not None:
            lines.append(_frame(self._line([]) | self._end(delta)))
        return b"".join(lines)

    def _add(self, number: int, delta: Delta) -> list[AnswerPart]:
        self._totals.add(number, delta)
        self._pending_logprobs.extend(delta.logprobs)
        if self._context is not None:
            self._context.extend(delta.tokens)
        return self._parser.take(delta)[0]

    def _line(self, parts: list[AnswerPart]) -> Json:
        content = "".join(part.content for part in parts)
        thinking = "".join(part.reasoning for part in parts)
        calls = [_tool_call(part, next(self._call_numbers)) for part in parts if part.call is not None]
        extras: Json = {"thinking": thinking} if thinking else {}
        if calls:
            extras["tool_calls"] = calls
        line: Json = {"model": self._model, "created_at": timestamp()}
        if self._is_chat:
            line["message"] = {"role": "assistant", "content": content, **extras}
        else:
            line |= {"response": content, **extras}
        if self._pending_logprobs:
            line["logprobs"] = [
                {**_logprob(entry), "top_logprobs": [_logprob(top) for top in entry.top]}
                for entry in self._pending_logprobs
            ]
            self._pending_logprobs = []
        return line | {"done": False}

    def _end(self, delta: Delta) -> Json:
        timings = self._totals.timings()
        usage = self._totals.usage()
        context = {} if self._context is None else {"context": self._context}
        return context | {
            "done_reason": delta.finish,
            "total_duration": _nanoseconds(time.monotonic() - self._started),
            "load_duration": _nanoseconds(self._waited),
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(timings["prompt_ms"] / 1e3),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(timings["predicted_ms"] / 1e3),
            "done": True,
        }


def _logprob(entry: TokenLogprob) -> Json:
    fields = token_entry(entry)
    return {**fields, "logprob": _IMPOSSIBLE_LOGPROB if fields["logprob"] is None else fields["logprob"]}


def _tool_call(part: AnswerPart, index: int) -> Json:
    assert part.call is not None
    function = {"index": index, "name": part.call.name, "arguments": orjson.loads(part.call.arguments)}
    return {"id": part.call.id, "function": function}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _frame(line: Json) -> bytes:
    done = line.pop("done")  # last field, so that the end of a stream is recognized without parsing the line
    return orjson.dumps({**line, "done": done}) + b"\n"
