"""FastChat's worker calls: generation, embeddings, token counts, and the conversation template.

A stream consists of frames with the whole text so far, each terminated by a zero byte.
"""

import uuid
from collections.abc import Iterable
from typing import Any

import orjson

from worker.api import embeddings as vectors
from worker.api.call import GenerationCall, JsonAnswer, ReplyWriter
from worker.api.openai import ParsedCompletion, parse_text
from worker.api.openai_replies import LegacyLogprobs
from worker.api.served_model import ServedModel
from worker.errors import InvalidValue, UnsupportedByModel
from worker.interface import Delta
from worker.prompt.body_reader import BodyFields, Json
from worker.prompt.chat_template import Conversation
from worker.prompt.logprob_options import LogprobOptions
from worker.protocol.dialects.fastchat import CONV_TEMPLATE, COUNT_TOKENS, GENERATE, SAME_AS_OPENAI

_NEW_TOKENS = 256  # default for requests without max_new_tokens
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
# Lower temperatures mean greedy, and so does a top_p below a thousandth of it (FastChat's
# fastchat/serve/inference.py).
_GREEDY = 1e-5
# FastChat's SeparatorStyle of role, message and two alternating separators (fastchat/conversation.py)
_NO_COLON_TWO = 5
_QUESTION, _ANSWER, _FURTHER, _SYSTEM = ("<question-8d1f>", "<answer-8d1f>", "<further-8d1f>", "<system-8d1f>")


async def generate_stream(body: Json, model: ServedModel) -> GenerationCall:
    """Parse a streamed completion. Raise RequestError."""
    return await _generate(body, model, streams=True)


async def generate(body: Json, model: ServedModel) -> GenerationCall:
    """Parse a completion. Raise RequestError."""
    return await _generate(body, model, streams=False)


async def _generate(body: Json, model: ServedModel, *, streams: bool) -> GenerationCall:
    fields = BodyFields(body, GENERATE)
    fields.refuse("images", "images is not supported; leave it out")
    fields.flag("stream")  # the path determines streaming
    openai_body: Json = {name: fields.take(name) for name in SAME_AS_OPENAI}
    openai_body |= {name: value for name, value in _DEFAULTS.items() if openai_body[name] is None}
    new_tokens = fields.integer("max_new_tokens")
    openai_body["max_tokens"] = _NEW_TOKENS if new_tokens is None else new_tokens
    top_p = fields.number("top_p")
    temperature = fields.number("temperature")
    if (top_p is not None and top_p < _GREEDY / 1000) or (temperature is not None and temperature < _GREEDY):
        openai_body |= {"temperature": 0.0, "top_p": 1.0}
    prompt, echo = fields.text("prompt"), fields.flag("echo")
    if prompt is None:
        raise InvalidValue("prompt must be a string", param="prompt")
    parsed = await parse_text({**openai_body, "prompt": prompt}, model, id=f"fastchat-{uuid.uuid4().hex}")
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    begin = "" if echo is False else prompt
    reply = FastChatWriter(parsed, begin, model, has_logprobs=openai_body["logprobs"] is not None)
    return parsed.call(reply, ignored=ignored, stream=streams)


async def get_embeddings(body: Json, model: ServedModel) -> JsonAnswer:
    """Compute a vector for each input. Raise RequestError."""
    embedded = await vectors.embeddings(body, model)
    found = [item["embedding"] for item in embedded.body["data"]]
    answer = {"embedding": found, "token_num": embedded.prompt_tokens}
    return JsonAnswer(body=answer, ignored=embedded.ignored, prompt_tokens=embedded.prompt_tokens)


async def count_token(body: Json, model: ServedModel) -> JsonAnswer:
    """Count the tokens of a prompt. Raise RequestError."""
    fields = BodyFields(body, COUNT_TOKENS)
    fields.text("model")
    prompt = fields.text("prompt")
    if prompt is None:
        raise InvalidValue("prompt must be a string", param="prompt")
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    [tokens] = await model.encode([prompt], model.count_limit("prompt"))
    return JsonAnswer(body={"count": len(tokens), "error_code": 0}, ignored=ignored, prompt_tokens=len(tokens))


async def get_conv_template(body: Json, model: ServedModel) -> JsonAnswer:
    """Return the model's chat template as FastChat's separators. Raise RequestError, or UnsupportedByModel if
    separators cannot express it."""
    fields = BodyFields(body, CONV_TEMPLATE)
    fields.text("model")
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    return JsonAnswer(body={"conv": separators(model)}, ignored=ignored)


def separators(model: ServedModel) -> Json:
    """Return a FastChat conversation equivalent to the model's template. Raise UnsupportedByModel if there is none.

    The template renders probe messages. The text around them gives the separators: before a question, between
    question and answer, and between an answer and the next question.
    """
    question = {"role": "user", "content": _QUESTION}
    answered = [question, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _FURTHER}]
    before, after = _split_at(_render(model, question), _QUESTION)
    first, last = _split_at(_render(model, *answered), _ANSWER)
    start, reply = _split_at(first, _QUESTION)
    between, end = _split_at(last, _FURTHER)
    if not start == before or not reply == after == end:
        raise _not_expressible()
    user = _common_end(before, between)
    opening = before.removesuffix(user)
    system, message = "{system_message}", opening
    try:
        head, tail = _split_at(_render(model, {"role": "system", "content": _SYSTEM}, question), _SYSTEM)
    except InvalidValue:
        pass  # the template rejects system messages, so the beginning of the prompt is used as the system message
    else:
        foot, rest = _split_at(tail, _QUESTION)
        if rest != after or not foot.endswith(user):
            raise _not_expressible()
        foot = foot.removesuffix(user)
        given = opening.startswith(head) and opening.endswith(foot) and len(opening) >= len(head) + len(foot)
        message = opening[len(head) : len(opening) - len(foot)] if given else ""
        system = "".join([_escaped(head), "{system_message}", _escaped(foot)])
    return {
        "name": model.options.name, "system_template": system, "system_message": message, "roles": [user, after],
        "messages": [], "offset": 0, "sep_style": _NO_COLON_TWO, "sep": "", "sep2": between.removesuffix(user),
        "stop_str": None, "stop_token_ids": None,
    }  # fmt: skip


def _render(model: ServedModel, *messages: Json) -> str:
    return model.without_start(model.template.render(Conversation(messages=messages, variables={})))


def _split_at(text: str, mark: str) -> tuple[str, str]:
    before, found, after = text.partition(mark)
    if not found or mark in after:
        raise _not_expressible()
    return before, after


def _common_end(one: str, other: str) -> str:
    """Return the longest common suffix."""
    length = 0
    while length < min(len(one), len(other)) and one[-length - 1] == other[-length - 1]:
        length += 1
    return one[len(one) - length :]


def _escaped(text: str) -> str:
    """Escape text for str.format."""
    return text.replace("{", "{{").replace("}", "}}")


def _not_expressible() -> UnsupportedByModel:
    return UnsupportedByModel(
        "this model's chat template cannot be expressed as separators between messages; use POST /v1/chat/completions"
    )


class FastChatWriter(ReplyWriter):
    """Writer of `{text, usage, logprobs, error_code, finish_reason}` with all of the text so far, including an echoed
    prompt."""

    def __init__(self, parsed: ParsedCompletion, begin: str, model: ServedModel, *, has_logprobs: bool):
        self._text = begin
        self._prompt_tokens = len(parsed.generations[0].prompt)
        self._tokens = 0
        self._arrays = LegacyLogprobs(model.special_ids, "", LogprobOptions()) if has_logprobs else None
        self._echo_length = len(begin)
        self._logprobs: Json | None = None
        self._finish: str | None = None

    def full_body(self, deltas: Iterable[tuple[int, Delta]]) -> Json:
        for _, delta in deltas:
            self._add(delta)
        return self._body()

    def frames(self, number: int, delta: Delta) -> bytes:
        if delta.progress is not None:
            return b""
        self._add(delta)
        return orjson.dumps(self._body()) + b"\0"

    def _add(self, delta: Delta) -> None:
        self._text += delta.text
        self._tokens += len(delta.tokens)
        if delta.finish is not None:
            self._finish = delta.finish
            self._tokens = delta.timings.completion_tokens if delta.timings is not None else self._tokens
        if self._arrays is None or not delta.logprobs:
            return
        more: dict[str, list[Any]] = self._arrays.arrays((), delta.logprobs)
        more["text_offset"] = [self._echo_length + offset for offset in more["text_offset"]]
        before = self._logprobs or {name: [] for name in more}
        self._logprobs = {name: before[name] + entries for name, entries in more.items()}

    def _body(self) -> Json:
        total = self._prompt_tokens + self._tokens
        usage = {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._tokens, "total_tokens": total}
        # the order matters: see `worker.protocol.streams.stream`
        answer: Json = {"text": self._text, "usage": usage, "logprobs": self._logprobs}
        return {**answer, "error_code": 0, "finish_reason": self._finish}
