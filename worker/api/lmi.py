"""LMI's invocations: inputs and parameters, answered whole or as lines of JSON, or with vectors by embedders. Bodies
with fields of OpenAI's or vLLM's calls are answered as at the paths of these calls."""

import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from worker.api import embeddings, openai
from worker.api.call import GenerationCall, JsonAnswer, ReplyWriter
from worker.api.openai import client_field_names, parse_text
from worker.api.served_model import ServedModel
from worker.errors import InvalidValue
from worker.interface import Delta, TokenLogprob
from worker.prompt.body_reader import BodyFields, Json
from worker.prompt.logprob_options import finite_or_none
from worker.prompt.sampling_options import read_stop
from worker.protocol.dialects import Dialect
from worker.protocol.dialects.lmi import DEFAULTS_WITHOUT_EFFECT, INVOCATIONS, OPENAI_FIELDS, PARAMETERS, SAME_AS_OPENAI
from worker.protocol.dialects.vllm import SCORE_FIELDS

_NEW_TOKENS = 30  # default for requests without max_new_tokens
# Fields of a text completion by their name in `parameters`, for errors.
_NAMES: Mapping[str, str] = {
    "truncate_prompt_tokens": "parameters.truncate",
    "prompt_logprobs": "parameters.decoder_input_details",
    "logprobs": "parameters.top_n_tokens",
    "max_tokens": "parameters.max_new_tokens",
    **{name: f"parameters.{name}" for name in SAME_AS_OPENAI},
}
_FINISHES = {"length": "length", "stop": "eos_token"}


async def invocations(body: Json, model: ServedModel) -> GenerationCall | JsonAnswer:
    """Parse a completion of one or more inputs, or with messages or a prompt OpenAI's; otherwise compute vectors or
    scores. Raise RequestError."""
    generates = "completion" in model.engine.capabilities
    if "inputs" not in body and (compute := _vector_call(body, generates=generates)):
        return await compute(body, model)
    if not OPENAI_FIELDS.isdisjoint(body):
        call = await (openai.chat if "messages" in body else openai.completions)(body, model)
        return replace(call, frame_dialect=Dialect.OPENAI)
    fields = BodyFields(body, INVOCATIONS)
    name, stream = fields.text("model"), fields.flag("stream") or False
    inputs = fields.take("inputs")
    texts = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidValue("inputs must be a string or an array of strings", param="inputs")
    if not generates:
        return await _vectors(fields, texts, model, is_list=isinstance(inputs, list))
    if stream and len(texts) > 1:
        raise InvalidValue("stream needs a single input: lines do not name their input", param="inputs")
    openai_body, options = _parameters(fields, model, stream=stream)
    openai_body |= {"model": name, "prompt": texts, "stream": stream, "adapters": fields.take("adapters")}
    with client_field_names(_NAMES):
        parsed = await parse_text(openai_body, model, id=f"lmi-{uuid.uuid4().hex}")
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    reply = LmiWriter(texts, options, is_list=isinstance(inputs, list))
    return parsed.call(reply, ignored=ignored, ping_interval=None)


def _vector_call(body: Json, *, generates: bool) -> Callable[[Json, ServedModel], Awaitable[JsonAnswer]] | None:
    """Return the call of vectors or scores whose fields the body has."""
    if "input" in body or ("messages" in body and not generates):
        return embeddings.embeddings
    if "query" in body:
        return embeddings.rerank
    return embeddings.score if any(body.keys() >= set(pair) for pair in SCORE_FIELDS) else None


async def _vectors(fields: BodyFields, texts: list[str], model: ServedModel, *, is_list: bool) -> JsonAnswer:
    """Compute the vector of one text, or one vector per text of an array, as DJL Serving does for embedders."""
    if fields.flag("stream"):
        raise InvalidValue("stream is only for generated text; leave it out", param="stream")
    fields.refuse("adapters", "adapters is not supported for vectors; leave it out")
    if fields.take("parameters") is not None:
        fields.mark_unused("parameters")
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    with client_field_names({"input": "inputs"}):
        embedded = await embeddings.embeddings({"input": texts}, model)
    vectors = [item["embedding"] for item in embedded.body["data"]]
    return replace(embedded, body=vectors if is_list else vectors[0], ignored=ignored)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Options of the answer."""

    has_details: bool
    is_full: bool  # the text begins with the input
    kept: int  # choices that are returned
    choices: int  # choices that are generated
    top_tokens: int  # alternatives of each token in the details
    has_prefill: bool  # the details have the tokens of the prompt


def _parameters(fields: BodyFields, model: ServedModel, *, stream: bool) -> tuple[Json, AnswerOptions]:
    """Return fields of a text completion, and options of the answer."""
    within = fields.within("parameters", PARAMETERS)
    within.refuse("num_beams", "parameters.num_beams is not supported above 1; leave it out")
    within.refuse("typical_p", "parameters.typical_p is not supported; leave it out")
    for name, default in DEFAULTS_WITHOUT_EFFECT.items():
        if within.take(name) not in (None, default):
            fields.mark_unused(within.path + name)
    openai_body: Json = {name: within.checked(name) for name in SAME_AS_OPENAI}
    if not within.flag("do_sample"):
        if openai_body["temperature"]:
            fields.mark_unused(f"{within.path}temperature")
        openai_body["temperature"] = 0.0
    openai_body["max_tokens"] = within.integer("max_new_tokens") or _NEW_TOKENS
    openai_body["stop"] = read_stop(within, "stop_sequences", "stop")
    openai_body["ignore_eos"] = within.flag("ignore_eos_token")
    openai_body["truncate_prompt_tokens"] = within.integer("truncate")
    options = _answer_options(within, fields, stream=stream)
    openai_body["logprobs"] = options.top_tokens  # 0 alternatives: the token's own logprob is always part of it
    openai_body["prompt_logprobs"] = 0 if options.has_prefill else None
    openai_body["n"] = options.choices
    for unknown in within.check_unknown(strict=model.options.strict_fields):
        fields.mark_unused(within.path + unknown)
    return openai_body, options


def _answer_options(within: BodyFields, fields: BodyFields, *, stream: bool) -> AnswerOptions:
    given, best_of = within.integer("n"), within.integer("best_of")
    choices = best_of or given or 1
    kept = given or choices
    if kept > choices:
        raise InvalidValue("parameters.best_of must be at least parameters.n", param="parameters.best_of")
    if stream and choices > 1:
        name = within.path + ("n" if best_of is None else "best_of")
        raise InvalidValue(f"{name} above 1 cannot be streamed; leave out stream", param=name)
    # Several choices are always returned with details (djl_python/output_formatter.py).
    has_details = within.flag("details") or choices > 1
    top_tokens = within.any_of(within.integer, "logprobs", "top_n_tokens") or 0
    prefill = {
        "decoder_input_details": within.flag("decoder_input_details") or False,
        "prompt_logprobs": within.integer("prompt_logprobs") is not None,
    }
    if not has_details:
        inner = {"logprobs": top_tokens, "top_n_tokens": top_tokens, **prefill}
        for name, is_set in inner.items():
            if is_set and within.take(name) is not None:
                fields.mark_unused(within.path + name)
    return AnswerOptions(
        has_details=has_details,
        is_full=within.flag("return_full_text") or False,
        kept=kept,
        choices=choices,
        top_tokens=top_tokens if has_details else 0,
        has_prefill=has_details and any(prefill.values()),
    )


@dataclass(slots=True)
class _ChoiceReply:
    """One choice of one input, as far as it is generated."""

    text: str
    tokens: list[Json] = field(default_factory=list)
    top_tokens: list[list[Json]] = field(default_factory=list)
    logprob: float = 0.0  # the sum over all tokens
    last: Delta = field(default_factory=Delta)

    def add(self, delta: Delta, alternatives: int) -> list[Json]:
        """Add the next delta and return its tokens. Their texts add up to the delta's text."""
        self.text += delta.text
        tokens = [_token(entry, text="") for entry in delta.logprobs]
        if tokens:
            tokens[-1]["text"] = delta.text
        elif delta.text:  # text that was held back as a possible stop string
            tokens = [{"id": -1, "text": delta.text, "log_prob": None}]
        self.tokens += [token for token in tokens if token["id"] >= 0]
        if alternatives:
            self.top_tokens += [[_token(top) for top in entry.top[:alternatives]] for entry in delta.logprobs]
        self.logprob += sum(entry.logprob for entry in delta.logprobs if entry.logprob is not None)
        if delta.finish is not None:
            self.last = delta
        return tokens

    def details(self, options: AnswerOptions) -> Json:
        reason = "stop_sequence" if self.last.stop is not None else _FINISHES[self.last.finish or "stop"]
        count = self.last.timings.completion_tokens if self.last.timings is not None else len(self.tokens)
        found: Json = {"finish_reason": reason, "generated_tokens": count, "tokens": self.tokens}
        return found | ({"top_tokens": self.top_tokens} if options.top_tokens else {})


def _token(entry: TokenLogprob, text: str | None = None) -> Json:
    shown = entry.piece.decode(errors="replace") if text is None else text
    return {"id": entry.token, "text": shown, "log_prob": finite_or_none(entry.logprob)}


class LmiWriter(ReplyWriter):
    """Writer of `{generated_text, details}`, or of a list of them; in a stream, one line per token."""

    def __init__(self, inputs: Sequence[str], options: AnswerOptions, *, is_list: bool):
        self._is_list = is_list
        self._inputs = inputs
        self._options = options
        self._choices = [
            [_ChoiceReply(text if options.is_full else "") for _ in range(options.choices)] for text in inputs
        ]
        self._prefill: list[list[Json]] = [[] for _ in inputs]

    def full_body(self, deltas: Iterable[tuple[int, Delta]]) -> Any:
        for number, delta in deltas:
            self._add(number, delta)
        bodies = [self._body(number) for number in range(len(self._inputs))]
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

    def _add(self, number: int, delta: Delta) -> list[Json]:
        if delta.prompt_logprobs:
            self._prefill[number] = [_token(entry) for entry in delta.prompt_logprobs]
        return self._choices[number][delta.index].add(delta, self._options.top_tokens)

    def _body(self, number: int) -> Json:
        options = self._options
        # `sorted` keeps the order of equally likely choices.
        best, *others = sorted(self._choices[number], key=lambda choice: -choice.logprob)[: options.kept]
        body: Json = {"generated_text": best.text}
        if not options.has_details:
            return body
        details = {**best.details(options), "inputs": self._inputs[number]}
        if options.has_prefill:
            details["prefill"] = self._prefill[number]
        if others:
            details["best_of_sequences"] = [
                {"generated_text": other.text, **other.details(options)} for other in others
            ]
        return body | {"details": details}
