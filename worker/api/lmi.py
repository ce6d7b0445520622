"""LMI's invocations: inputs and parameters, answered whole or as lines of JSON. Bodies with messages or a prompt are
OpenAI's.
"""

import uuid
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import orjson

from worker.api import openai
from worker.api.call import GenerationCall
from worker.api.openai import ParsedCompletion, parse_text
from worker.api.served_model import ServedModel
from worker.errors import InvalidValue
from worker.interface import Delta
from worker.prompt import adapter_choice
from worker.prompt.body_reader import BodyFields, Json
from worker.prompt.logprob_options import finite_or_none
from worker.prompt.sampling_options import read_stop
from worker.protocol.dialects import Dialect
from worker.protocol.dialects.lmi import INVOCATIONS, OPENAI_FIELDS, PARAMETERS

_NEW_TOKENS = 30  # default for requests without max_new_tokens
_SAME = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)
_FINISHES = {"length": "length", "stop": "eos_token"}


async def invocations(body: Json, model: ServedModel) -> GenerationCall:
    """Parse a completion of one or more inputs; with messages or a prompt, OpenAI's completion. Raise RequestError."""
    if not OPENAI_FIELDS.isdisjoint(body):
        call = await (openai.chat if "messages" in body else openai.completions)(body, model)
        return replace(call, frame_dialect=Dialect.OPENAI)
    fields = BodyFields(body, INVOCATIONS)
    name, stream = fields.text("model"), fields.flag("stream") or False
    inputs = fields.take("inputs")
    texts = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidValue("inputs must be a string or an array of strings", param="inputs")
    if stream and len(texts) > 1:
        raise InvalidValue("stream needs a single input: lines do not name their input", param="inputs")
    adapters = adapter_choice.read(fields, "adapters", prompts=len(texts))
    openai_body, settings = _parameters(fields, model)
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    openai_body |= {"model": name, "prompt": texts, "stream": stream, "logprobs": 0}
    chat = await parse_text(openai_body, model, id=f"lmi-{uuid.uuid4().hex}")
    generations = tuple(
        replace(generation, adapter=adapter) for generation, adapter in zip(chat.generations, adapters, strict=True)
    )
    reply = LmiWriter(chat, texts, is_list=isinstance(inputs, list), **settings)
    return chat.call(reply, ignored=ignored, generations=generations, ping_interval=None)


def _parameters(fields: BodyFields, model: ServedModel) -> tuple[Json, dict[str, bool]]:
    """Return fields of a text completion, and options of the answer."""
    within = fields.within("parameters", PARAMETERS)
    within.refuse("num_beams", "parameters.num_beams is not supported above 1; leave it out")
    within.refuse("typical_p", "parameters.typical_p is not supported; leave it out")
    openai_body: Json = {name: within.checked(name) for name in _SAME}
    if not within.flag("do_sample"):
        if openai_body["temperature"]:
            fields.mark_unused(f"{within.path}temperature")
        openai_body["temperature"] = 0.0
    openai_body["max_tokens"] = within.integer("max_new_tokens") or _NEW_TOKENS
    openai_body["stop"] = read_stop(within, "stop_sequences", "stop")
    openai_body["ignore_eos"] = within.flag("ignore_eos_token")
    settings = {"has_details": within.flag("details") or False, "is_full": within.flag("return_full_text") or False}
    for unknown in within.check_unknown(strict=model.options.strict_fields):
        fields.mark_unused(within.path + unknown)
    return openai_body, settings


class LmiWriter:
    """Writer of `{generated_text, details}`, or of a list of them; in a stream, one line per token."""

    def __init__(self, chat: ParsedCompletion, inputs: list[str], *, is_list: bool, has_details: bool, is_full: bool):
        self._is_list = is_list
        self._has_details = has_details
        self._inputs = inputs
        self._texts = [text if is_full else "" for text in inputs]
        self._tokens: list[list[Json]] = [[] for _ in inputs]
        self._last = [Delta() for _ in chat.generations]

    def full_body(self, deltas: Iterable[tuple[int, Delta]]) -> Any:
        for number, delta in deltas:
            self._add(number, delta)
        bodies = [self._body(number) for number in range(len(self._texts))]
        return bodies if self._is_list else bodies[0]

    def frames(self, number: int, delta: Delta) -> bytes:
        if delta.progress is not None:
            return b""
        tokens = self._add(number, delta)
        lines: list[Json] = [{"token": token} for token in tokens]
        if delta.finish is not None:
            last = lines.pop() if lines else {"token": {"id": -1, "text": "", "log_prob": None}}
            lines.append(self._body(number) | last)
        return b"".join(orjson.dumps(line) + b"\n" for line in lines)

    def closing_frames(self) -> bytes:
        return b""  # the last line has the whole text

    def _add(self, number: int, delta: Delta) -> list[Json]:
        """Add the next delta and return its tokens. Their texts add up to the delta's text."""
        self._texts[number] += delta.text
        tokens: list[Json] = [
            {"id": entry.token, "text": "", "log_prob": finite_or_none(entry.logprob)} for entry in delta.logprobs
        ]
        if tokens:
            tokens[-1]["text"] = delta.text
        elif delta.text:  # text that was held back as a possible stop string
            tokens = [{"id": -1, "text": delta.text, "log_prob": None}]
        self._tokens[number] += [token for token in tokens if token["id"] >= 0]
        if delta.finish is not None:
            self._last[number] = delta
        return tokens

    def _body(self, number: int) -> Json:
        body: Json = {"generated_text": self._texts[number]}
        if not self._has_details:
            return body
        last = self._last[number]
        reason = "stop_sequence" if last.stop is not None else _FINISHES[last.finish or "stop"]
        count = last.timings.completion_tokens if last.timings is not None else len(self._tokens[number])
        details = {"finish_reason": reason, "generated_tokens": count, "inputs": self._inputs[number]}
        return body | {"details": {**details, "tokens": self._tokens[number]}}
