"""llama-server's own calls: completion, infill and apply-template."""

import math
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from worker.api.call import GenerationCall, JsonAnswer, ReplyWriter, data_frame
from worker.api.openai import client_field_names, parse_text
from worker.api.served_model import ServedModel
from worker.api.usage import UsageTotals, progress_field
from worker.errors import InvalidValue, UnsupportedByModel
from worker.interface import Delta, GenerationRequest, TokenLogprob
from worker.prompt import chat_template, logprob_options, sampling_options
from worker.prompt.body_reader import BodyFields, Json
from worker.prompt.chat_formats import FillInTheMiddle
from worker.prompt.logprob_options import finite_or_none
from worker.protocol.dialects.generation_fields import MAX_SHOWN, MAX_TEXTS
from worker.protocol.dialects.llama_server import COMPLETION, INFILL, SAME_AS_OPENAI, TEMPLATE

_MISSING = object()
_STOPS = {"stop": "eos", "length": "limit", None: "none"}


async def completion(body: Json, model: ServedModel) -> GenerationCall:
    """Parse a completion of one or more prompts. Raise RequestError."""
    fields = BodyFields(body, COMPLETION)
    return await _completion(fields, model, fields.take("prompt"))


async def infill(body: Json, model: ServedModel) -> GenerationCall:
    """Parse a fill-in-the-middle request. Raise RequestError; UnsupportedByModel for a model without fill-in-the-middle
    tokens."""
    model.require("completion")
    fields = BodyFields(body, INFILL)
    return await _completion(fields, model, await _infill_prompt(fields, model))


async def _completion(fields: BodyFields, model: ServedModel, prompt: Any) -> GenerationCall:
    """Parse everything but the prompt, as the text completion with the same fields in OpenAI's API."""
    fields.refuse("return_tokens_only", "return_tokens_only is not supported; leave it out")
    openai_body: Json = {name: fields.take(name) for name in SAME_AS_OPENAI}
    openai_body["n"] = fields.any_of(fields.integer, "n", "n_cmpl")
    openai_body["max_tokens"] = fields.any_of(fields.integer, "n_predict", "max_tokens")
    # Without alternatives there are no probabilities. In OpenAI's API the token's own logprob would be left.
    openai_body["logprobs"] = logprob_options.alternatives(fields, "n_probs", model.options.max_logprobs) or None
    post_sampling_logprobs = fields.flag("post_sampling_probs") or False
    returns_tokens, shown = fields.flag("return_tokens") or False, _response_fields(fields)
    with client_field_names({"logprobs": "n_probs"}):
        parsed = await parse_text({**openai_body, "prompt": prompt}, model, id=f"cmpl-{uuid.uuid4().hex}")
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    generations = tuple(
        replace(generation, sampling=replace(generation.sampling, post_sampling_logprobs=post_sampling_logprobs))
        for generation in parsed.generations
    )
    reply = LlamaServerWriter(
        generations,
        prompts=parsed.prompts,
        settings=_settings(generations[0], stream=parsed.common.stream),
        model=parsed.common.model,
        returns_tokens=returns_tokens,
        has_progress=parsed.common.chunk_options.has_progress,
        shown=shown,
    )
    return parsed.call(reply, ignored=ignored, generations=generations)


async def _infill_prompt(fields: BodyFields, model: ServedModel) -> list[int]:
    """Return the prompt of an infill request: extra files, prefix and suffix, and the beginning of the answer."""
    layout = model.fill_in_the_middle
    if layout is None:
        raise UnsupportedByModel(
            "this model has no fill-in-the-middle tokens; use one that was trained for it, as most coding models are"
        )
    prefix_text, suffix_text, start_text = (fields.text(name) for name in ("input_prefix", "input_suffix", "prompt"))
    for name, given in (("input_prefix", prefix_text), ("input_suffix", suffix_text)):
        if given is None:
            raise InvalidValue(f"{name} must be a string", param=name)
    files = fields.sequence("input_extra") or []
    if len(files) > MAX_TEXTS or not all(map(_is_file, files)):
        raise InvalidValue(
            f"input_extra must be an array of at most {MAX_TEXTS} objects with text and an optional filename",
            param="input_extra",
        )
    prefix, suffix, start = await model.encode(
        [text or "" for text in (prefix_text, suffix_text, start_text)],
        model.prompt_limit("input_prefix"),
        add_special=False,
    )
    return [*model.start, *await _extra_file_tokens(files, layout, model), *layout.around(prefix, suffix), *start]


async def _extra_file_tokens(files: Sequence[Json], layout: FillInTheMiddle, model: ServedModel) -> list[int]:
    """Return the tokens of extra files in the model's repository layout, or one after another."""
    if not files:
        return []
    pieces: list[tuple[int | None, str]] = []
    if layout.file is None:
        pieces += [(None, f"\n\n--- snippet ---\n\n{file['text']}") for file in files]
    else:
        pieces += [(layout.repository, "myproject\n")] if layout.repository is not None else []
        pieces += [(layout.file, f"{file.get('filename') or 'tmp'}\n{file['text']}") for file in files]
        pieces += [(layout.file, "filename\n")]
    encoded = await model.encode([text for _, text in pieces], model.prompt_limit("input_extra"), add_special=False)
    marked = zip([mark for mark, _ in pieces], encoded, strict=True)
    return [id for mark, tokens in marked for id in ([] if mark is None else [mark]) + tokens]


def _is_file(given: Any) -> bool:
    return (
        isinstance(given, dict)
        and isinstance(given.get("text"), str)
        and isinstance(given.get("filename", ""), str | None)
    )


def _response_fields(fields: BodyFields) -> list[str]:
    listed = fields.sequence("response_fields") or []
    if not all(isinstance(field, str) for field in listed) or len(listed) > MAX_SHOWN:
        raise InvalidValue(
            f"response_fields must be an array of at most {MAX_SHOWN} field names", param="response_fields"
        )
    return listed


def _settings(generation: GenerationRequest, *, stream: bool) -> Json:
    """Return the effective settings by llama-server's names."""
    sampling, max_tokens = generation.sampling, generation.max_tokens
    known = asdict(sampling)
    known["repeat_penalty"] = known.pop("repetition_penalty")
    known["samplers"] = sampling_options.sampler_names(known)
    known["post_sampling_probs"] = known.pop("post_sampling_logprobs")
    del known["temperature_last"]
    known["n_probs"] = known.pop("logprobs") or 0
    known["logit_bias"] = [{"token": token, "bias": bias} for token, bias in sampling.logit_bias.items()]
    return {
        **known,
        "n_predict": -1 if max_tokens is None else max_tokens,
        "stop": list(generation.stop),
        "stream": stream,
    }


async def apply_template(body: Json, model: ServedModel) -> JsonAnswer:
    """Render a chat to its prompt, without a beginning of text that the tokenizer adds to a prompt. Raise
    RequestError."""
    fields = BodyFields(body, TEMPLATE)
    conversation = chat_template.read(fields, model.template)
    fields.skip(TEMPLATE)
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    prompt = await model.render(conversation, model.count_limit("messages"))
    # The client sends the prompt to /completion.
    return JsonAnswer(body={"prompt": model.without_start(prompt)}, ignored=ignored)


class LlamaServerWriter(ReplyWriter):
    """Writer of one body per choice of each prompt; a list if there are several."""

    def __init__(
        self,
        generations: Sequence[GenerationRequest],
        *,
        model: str,
        prompts: Sequence[str],
        settings: Json,
        returns_tokens: bool,
        has_progress: bool,
        shown: Sequence[str] = (),
    ):
        """`prompts`: the prompts as texts. `settings`: the effective settings. `shown`: return only these fields of a
        whole body, with `a/b` for a nested field; empty for all."""
        self._shown = shown
        self._generations = generations
        self._n = generations[0].n
        self._has_progress = has_progress
        self._choices = [
            _CompletionChoice(
                number * self._n + index,
                generation,
                {"model": model, "prompt": prompts[number], "generation_settings": settings},
                returns_tokens=returns_tokens,
            )
            for number, generation in enumerate(generations)
            for index in range(generation.n)
        ]

    def full_body(self, deltas: Iterable[tuple[int, Delta]]) -> Any:
        for number, delta in deltas:
            self._choice(number, delta).add(delta)
        bodies = [self._select_fields(answer.body()) for answer in self._choices]
        return bodies[0] if len(bodies) == 1 else bodies

    def frames(self, number: int, delta: Delta) -> bytes:
        answer = self._choice(number, delta)
        answer.add(delta)
        if delta.progress is not None:
            if not self._has_progress:
                return b""
            progress = progress_field(delta.progress, has_timings=self._generations[number].timings)
            return data_frame(answer.chunk(Delta()) | progress)
        frames = []
        if delta.text or delta.tokens:
            further = answer.timings() if self._generations[number].timings else {}
            frames.append(data_frame(answer.chunk(delta) | further))
        if delta.finish is not None:
            excluded = {"content", "tokens", "completion_probabilities"}
            last = {name: value for name, value in answer.body().items() if name not in excluded}
            frames.append(data_frame(self._select_fields(last | {"content": "", "tokens": []})))
        return b"".join(frames)

    def _select_fields(self, body: Json) -> Json:
        if not self._shown:
            return body
        found = ((path, _field_at(body, path.split("/"))) for path in self._shown)
        return {path: value for path, value in found if value is not _MISSING}

    def _choice(self, number: int, delta: Delta) -> "_CompletionChoice":
        return self._choices[number * self._n + delta.index]


class _CompletionChoice:
    """One choice so far."""

    def __init__(self, index: int, generation: GenerationRequest, about: Json, *, returns_tokens: bool):
        self._index = index
        self._generation = generation
        self._head = about
        self._returns_tokens = returns_tokens
        self._totals = UsageTotals([replace(generation, n=1)])
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._last = Delta()
        self._max_tokens = math.inf if generation.max_tokens is None else generation.max_tokens

    def add(self, delta: Delta) -> None:
        self._totals.add(0, replace(delta, index=0))
        self._text.append(delta.text)
        self._tokens.extend(delta.tokens)
        self._logprobs.extend(delta.logprobs)
        self._last = delta

    def timings(self) -> Json:
        return self._totals.so_far()

    def chunk(self, delta: Delta) -> Json:
        """Return the chunk for `delta`."""
        return {
            "index": self._index,
            "content": delta.text,
            "tokens": list(delta.tokens),  # always sent, as in llama-server
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": len(self._tokens),
            "tokens_evaluated": len(self._generation.prompt),
            **self._probabilities(delta.logprobs),
        }

    def body(self) -> Json:
        """Return the whole body."""
        timings = self._totals.timings()
        text = "".join(self._text)
        predicted = timings["predicted_n"]
        return {
            "index": self._index,
            "content": text,
            "tokens": self._tokens if self._returns_tokens else [],
            "id_slot": -1,
            "stop": True,
            **self._head,
            "tokens_predicted": predicted,
            "tokens_evaluated": len(self._generation.prompt),
            "has_new_line": "\n" in text,
            "truncated": self._last.finish == "length" and predicted < self._max_tokens,
            "stop_type": _STOPS[self._last.finish] if self._last.stop is None else "word",
            "stopping_word": self._last.stop or "",
            "tokens_cached": len(self._generation.prompt) + predicted,
            "timings": timings,
            **self._probabilities(self._logprobs),
        }

    def _probabilities(self, logprobs: Sequence[TokenLogprob]) -> Json:
        sampling = self._generation.sampling
        if sampling.logprobs is None or not logprobs:
            return {}
        is_post = sampling.post_sampling_logprobs
        name, read = ("top_probs", _probability_entry) if is_post else ("top_logprobs", _logprob_entry)
        entries = [
            {**read(entry), name: [read(top) for top in entry.top if top.logprob is not None]} for entry in logprobs
        ]
        return {"completion_probabilities": entries}


def _field_at(value: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        value = value.get(key, _MISSING) if isinstance(value, dict) else _MISSING
    return value


def _logprob_entry(entry: TokenLogprob) -> Json:
    return {**_token_fields(entry), "logprob": finite_or_none(entry.logprob)}


def _probability_entry(entry: TokenLogprob) -> Json:
    return {**_token_fields(entry), "prob": 0.0 if entry.logprob is None else math.exp(entry.logprob)}


def _token_fields(entry: TokenLogprob) -> Json:
    return {"id": entry.token, "token": entry.piece.decode(errors="replace"), "bytes": list(entry.piece)}
