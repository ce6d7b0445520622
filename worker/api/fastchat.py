"""FastChat's worker: frames of the text so far, each ending in a zero byte; vectors, counts, and the separators with
which its own API server lays out a chat."""

import uuid
from collections.abc import Iterable
from typing import Any

import orjson

from worker.api import embeddings as vectors
from worker.api.call import Call, Model, Result
from worker.api.openai import Chat, understand_text
from worker.api.openai_replies import LegacyLogprobs
from worker.errors import InvalidValue, UnsupportedByModel
from worker.interface import Delta
from worker.prompt.body_reader import Fields, Json
from worker.prompt.chat_template import Conversation
from worker.prompt.logprob_options import Telling
from worker.protocol.dialects.fastchat import FASTCHAT, FASTCHAT_CONV, FASTCHAT_COUNT, FASTCHAT_EMBED

_NEW_TOKENS = 256
"""Where a request does not say how many."""
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
_SAME = (*_DEFAULTS, "presence_penalty", "frequency_penalty", "stop", "stop_token_ids", "logprobs", "seed", "model")
_GREEDY = 1e-5
"""A temperature below it is none, and so is, at a thousandth of it, top_p (FastChat's fastchat/serve/inference.py)."""
_NO_COLON_TWO = 5
"""FastChat's number for: a role's words, the message, and one of two separators in turn (fastchat/conversation.py)."""
_QUESTION, _ANSWER, _FURTHER, _SYSTEM = ("<question-8d1f>", "<answer-8d1f>", "<further-8d1f>", "<system-8d1f>")


async def generate_stream(body: Json, model: Model) -> Call:
    """The text so far, again and again; raises RequestError."""
    return await _generate(body, model, streams=True)


async def generate(body: Json, model: Model) -> Call:
    """The text; raises RequestError."""
    return await _generate(body, model, streams=False)


async def _generate(body: Json, model: Model, *, streams: bool) -> Call:
    fields = Fields(body, FASTCHAT)
    for name in ("images", "best_of", "use_beam_search"):
        fields.refuse(name, f"{name} is not supported; leave it out")
    fields.flag("stream")  # the path says it
    asked: Json = {name: fields.take(name) for name in _SAME}
    asked |= {name: value for name, value in _DEFAULTS.items() if asked[name] is None}
    new_tokens = fields.integer("max_new_tokens")
    asked["max_tokens"] = _NEW_TOKENS if new_tokens is None else new_tokens
    top_p = fields.number("top_p")
    temperature = fields.number("temperature")
    if (top_p is not None and top_p < _GREEDY / 1000) or (temperature is not None and temperature < _GREEDY):
        asked |= {"temperature": 0.0, "top_p": 1.0}
    prompt, echo = fields.text("prompt"), fields.flag("echo")
    if prompt is None:
        raise InvalidValue("prompt must be a string", param="prompt")
    ignored = fields.settle(strict=model.options.strict_fields)
    chat = await understand_text({**asked, "prompt": prompt}, model, id=f"fastchat-{uuid.uuid4().hex}")
    begin = "" if echo is False else prompt
    return Call(
        generations=chat.generations,
        reply=_Reply(chat, begin, model, has_logprobs=asked["logprobs"] is not None),
        stream=streams,
        ignored=(*ignored, *chat.ignored),
    )


async def get_embeddings(body: Json, model: Model) -> Result:
    """A vector of each input; raises RequestError."""
    Fields(body, FASTCHAT_EMBED).skip(FASTCHAT_EMBED)
    made = await vectors.embeddings(body, model)
    found = [each["embedding"] for each in made.body["data"]]
    told = {"embedding": found, "token_num": made.prompt_tokens}
    return Result(body=told, ignored=made.ignored, prompt_tokens=made.prompt_tokens)


async def count_token(body: Json, model: Model) -> Result:
    """Tokens of a prompt; raises RequestError."""
    fields = Fields(body, FASTCHAT_COUNT)
    fields.text("model")
    prompt = fields.text("prompt")
    if prompt is None:
        raise InvalidValue("prompt must be a string", param="prompt")
    ignored = fields.settle(strict=model.options.strict_fields)
    [tokens] = await model.encode([prompt])
    return Result(body={"count": len(tokens), "error_code": 0}, ignored=ignored, prompt_tokens=len(tokens))


async def get_conv_template(body: Json, model: Model) -> Result:
    """The model's chat template as FastChat's two separators. Raises RequestError, UnsupportedByModel where it is more
    than that."""
    fields = Fields(body, FASTCHAT_CONV)
    fields.text("model")
    ignored = fields.settle(strict=model.options.strict_fields)
    return Result(body={"conv": separators(model)}, ignored=ignored)


def separators(model: Model) -> Json:
    """A conversation of FastChat's that lays out a chat as the model's template does. Raises UnsupportedByModel if none
    does.

    Texts that stand for messages are rendered, and what comes out around them is looked at: before a question, between
    question and answer, between an answer and the next question.
    """
    asked = {"role": "user", "content": _QUESTION}
    answered = [asked, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _FURTHER}]
    before, after = _around(_render(model, asked), _QUESTION)
    first, last = _around(_render(model, *answered), _ANSWER)
    start, reply = _around(first, _QUESTION)
    between, end = _around(last, _FURTHER)
    if not start == before or not reply == after == end:
        raise _too_much()
    user = _common_end(before, between)
    opening = before.removesuffix(user)
    system, message = "{system_message}", opening
    try:
        head, tail = _around(_render(model, {"role": "system", "content": _SYSTEM}, asked), _SYSTEM)
    except InvalidValue:
        pass  # it takes no such message: what it begins with stands there instead
    else:
        foot, rest = _around(tail, _QUESTION)
        if rest != after or not foot.endswith(user):
            raise _too_much()
        foot = foot.removesuffix(user)
        stated = opening.startswith(head) and opening.endswith(foot) and len(opening) >= len(head) + len(foot)
        message = opening[len(head) : len(opening) - len(foot)] if stated else ""
        system = "".join([_escaped(head), "{system_message}", _escaped(foot)])
    return {
        "name": model.options.name, "system_template": system, "system_message": message, "roles": [user, after],
        "messages": [], "offset": 0, "sep_style": _NO_COLON_TWO, "sep": "", "sep2": between.removesuffix(user),
        "stop_str": None, "stop_token_ids": None,
    }  # fmt: skip


def _render(model: Model, *messages: Json) -> str:
    """The prompt, without the token that begins a text where the tokenizer puts it there itself."""
    text = model.template.render(Conversation(messages=messages, variables={}))
    begins = model.tokenizer.bos_token
    is_added = begins and model.tokenizer("?")["input_ids"][:1] == [model.tokenizer.bos_token_id]
    return text.removeprefix(str(begins)) if is_added else text


def _around(text: str, mark: str) -> tuple[str, str]:
    before, found, after = text.partition(mark)
    if not found or mark in after:
        raise _too_much()
    return before, after


def _common_end(one: str, other: str) -> str:
    """The longest text that both end with."""
    length = 0
    while length < min(len(one), len(other)) and one[-length - 1] == other[-length - 1]:
        length += 1
    return one[len(one) - length :]


def _escaped(text: str) -> str:
    """As str.format reads it."""
    return text.replace("{", "{{").replace("}", "}}")


def _too_much() -> UnsupportedByModel:
    return UnsupportedByModel(
        "this model's chat template is more than separators between messages; use POST /v1/chat/completions"
    )


class _Reply:
    """`{text, usage, logprobs, error_code, finish_reason}`: all of the text so far, with the prompt if it is echoed."""

    def __init__(self, chat: Chat, begin: str, model: Model, *, has_logprobs: bool):
        self._text = begin
        self._prompt_tokens = len(chat.generations[0].prompt)
        self._tokens = 0
        self._arrays = LegacyLogprobs(model.special_ids, "", Telling()) if has_logprobs else None
        self._begin = len(begin)
        self._logprobs: Json | None = None
        self._finish: str | None = None

    def whole(self, deltas: Iterable[tuple[int, Delta]]) -> Json:
        for _, delta in deltas:
            self._add(delta)
        return self._body()

    def frames(self, number: int, delta: Delta) -> bytes:
        if delta.progress is not None:
            return b""
        self._add(delta)
        return orjson.dumps(self._body()) + b"\0"

    def closing(self) -> bytes:
        return b""  # the last frame says why it is the last

    def _add(self, delta: Delta) -> None:
        self._text += delta.text
        self._tokens += len(delta.tokens)
        if delta.finish is not None:
            self._finish = delta.finish
            self._tokens = delta.timings.completion_tokens if delta.timings is not None else self._tokens
        if self._arrays is None or not delta.logprobs:
            return
        more: dict[str, list[Any]] = self._arrays.arrays((), delta.logprobs)
        more["text_offset"] = [self._begin + offset for offset in more["text_offset"]]
        before = self._logprobs or {name: [] for name in more}
        self._logprobs = {name: before[name] + entries for name, entries in more.items()}

    def _body(self) -> Json:
        total = self._prompt_tokens + self._tokens
        usage = {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._tokens, "total_tokens": total}
        told: Json = {"text": self._text, "usage": usage, "logprobs": self._logprobs}
        return {
            **told,
            "error_code": 0,
            "finish_reason": self._finish,
        }  # in this order: see `worker.protocol.streams.stream`
