"""Options that OpenAI's chat and text completions share, and the GenerationRequests made from them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from worker.api.call import read_ping_interval, read_stream_flag
from worker.api.served_model import ServedModel
from worker.api.usage import ChunkOptions
from worker.errors import InvalidValue
from worker.interface import GenerationRequest
from worker.prompt import adapter_choice, guided_decoding, logprob_options, sampling_options
from worker.prompt.body_reader import BodyFields, to_integer
from worker.prompt.text_limits import TextLimit
from worker.protocol.dialects.openai import MAX_ENDS, STREAM_OPTIONS

# Logprobs of prompt tokens in one answer, with alternatives and repetitions: each takes 600 bytes of memory until the
# answer is sent, and 0.7 microseconds of the event loop.
MAX_PROMPT_LOGPROBS = 1 << 19


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    """Options that chat and text completions share."""

    model: str
    stream: bool
    chunk_options: ChunkOptions
    logprob_settings: logprob_options.LogprobOptions
    request: GenerationRequest  # without id and prompt
    max_prompt_tokens: int | None  # truncate longer prompts to this many tokens; None: reject them
    keep_first: bool  # truncation keeps the beginning instead of the end
    ping_interval: float | None

    def check_max_tokens(self) -> None:
        if self.request.max_tokens is not None and self.request.sampling.min_tokens > self.request.max_tokens:
            raise InvalidValue("min_tokens must not exceed max_tokens", param="min_tokens")

    def cut(self, prompt: list[int]) -> list[int]:
        """Return `prompt` after truncation."""
        if self.max_prompt_tokens is None:
            return prompt
        return prompt[: self.max_prompt_tokens] if self.keep_first else prompt[-self.max_prompt_tokens :]

    def limit(self, model: ServedModel, param: str) -> TextLimit:
        """The limit of a prompt in field `param`."""
        whole = model.prompt_limit(param)
        if self.max_prompt_tokens is None:
            return whole
        # One token too many is kept of a prompt that is truncated to more than the context, so that it is rejected.
        tokens = min(self.max_prompt_tokens, whole.tokens + 1)
        return replace(whole, tokens=tokens, keep="start" if self.keep_first else "end")

    def generations(
        self,
        id: str,
        prompts: Sequence[Sequence[int]],
        *,
        adapters: adapter_choice.AdapterChoices,
        copies: int = 1,
        **further: Any,
    ) -> tuple[GenerationRequest, ...]:
        """Return one request per prompt. `adapters` has one entry per prompt. `copies`: the times that the
        answer has the logprobs of each prompt. `further`: other fields.

        Raise InvalidValue for too many logprobs.
        """
        generations = tuple(
            replace(self.request, id=f"{id}.{number}", prompt=tuple(prompt), adapter=adapter, **further)
            for number, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True))
        )
        sampling = generations[0].sampling
        tokens = sum(len(generation.prompt) for generation in generations if generation.prompt_logprobs)
        if tokens * copies * (1 + (sampling.logprobs or 0)) > MAX_PROMPT_LOGPROBS:
            choices = f" in {copies} choices" if copies > 1 else ""
            raise InvalidValue(
                f"logprobs of {tokens} prompt tokens with {sampling.logprobs} alternatives each{choices} are more than"
                f" {MAX_PROMPT_LOGPROBS}; ask for fewer alternatives, or send less text at once",
                param="prompt_logprobs" if self.request.prompt_logprobs else "logprobs",
            )
        return generations


def read_common_options(fields: BodyFields, model: ServedModel, *, logprobs: int | None) -> CommonOptions:
    options = model.options
    stream = fields.flag("stream") or False
    logprob_settings = logprob_options.read(fields, logprobs=logprobs, most=options.max_logprobs, stream=stream)
    sampling, stop = sampling_options.read(
        fields,
        model.defaults,
        vocab_size=model.vocab_size,
        logprobs=logprob_settings.engine_logprobs,
        seed=options.seed if options.seed >= 0 else None,
        encode=model.encode_piece,
    )
    shows_special = fields.flag("skip_special_tokens") is False
    chunk_options = _chunk_options(fields, stream)
    request = GenerationRequest(
        id="",
        prompt=(),
        max_tokens=_max_tokens(fields, options.n_predict),
        stop=stop,
        ends=_stop_token_ids(fields, model),
        include_stop=fields.flag("include_stop_str_in_output") or False,
        n=fields.integer("n") or 1,
        sampling=sampling,
        grammar=guided_decoding.read(fields),
        visible_special_tokens=model.special_ids | frozenset(model.special.values()) if shows_special else frozenset(),
        salt=fields.text("cache_salt") or "",
        prompt_logprobs=logprob_settings.prompt_logprobs is not None,
        timings=chunk_options.has_timings or chunk_options.counts,
        progress=stream,  # also needed without progress chunks: it is sent in comments
        **sampling_options.read_draft_limits(fields, speculates=options.speculates),
    )
    max_prompt_tokens = _max_prompt_tokens(fields, model)
    return CommonOptions(
        model=fields.text("model") or options.name,
        stream=stream,
        chunk_options=chunk_options,
        logprob_settings=logprob_settings,
        request=request,
        max_prompt_tokens=max_prompt_tokens,
        keep_first=_keeps_first(fields, max_prompt_tokens),
        ping_interval=read_ping_interval(fields),
    )


def _chunk_options(fields: BodyFields, stream: bool) -> ChunkOptions:
    if fields.mapping("stream_options") and not stream:
        raise InvalidValue("stream_options needs stream: true", param="stream_options")
    options = fields.within("stream_options", STREAM_OPTIONS)
    if options.flag("include_obfuscation"):
        fields.mark_unused(f"{options.path}include_obfuscation")
    has_usage, counts = options.flag("include_usage") or False, options.flag("continuous_usage_stats") or False
    if counts and not has_usage:
        fields.mark_unused(f"{options.path}continuous_usage_stats")
    return ChunkOptions(
        has_usage=has_usage,
        counts=counts and has_usage,
        has_progress=read_stream_flag(fields, "return_progress", stream=stream),
        has_timings=read_stream_flag(fields, "timings_per_token", stream=stream),
    )


def _stop_token_ids(fields: BodyFields, model: ServedModel) -> frozenset[int]:
    given = fields.sequence("stop_token_ids") or []
    tokens = [to_integer(value) for value in given]
    if len(tokens) > MAX_ENDS or not all(token is not None and 0 <= token < model.vocab_size for token in tokens):
        raise InvalidValue(
            f"stop_token_ids must be at most {MAX_ENDS} token ids between 0 and {model.vocab_size - 1}",
            param="stop_token_ids",
        )
    return frozenset(token for token in tokens if token is not None)


def _max_prompt_tokens(fields: BodyFields, model: ServedModel) -> int | None:
    tokens = fields.integer("truncate_prompt_tokens")
    return model.max_prompt if tokens == -1 else tokens


def _keeps_first(fields: BodyFields, max_prompt_tokens: int | None) -> bool:
    side = fields.choice("truncation_side")
    if side is not None and max_prompt_tokens is None:
        fields.mark_unused("truncation_side")
    return side == "right"


def _max_tokens(fields: BodyFields, default: int) -> int | None:
    """Return the maximum number of new tokens; None for -1, llama-server's value for no limit.

    OpenAI deprecated max_tokens in favour of max_completion_tokens. Clients that set both mean the newer one.
    """
    tokens = fields.any_of(fields.integer, "max_completion_tokens", "n_predict")
    older = fields.any_of(fields.integer, "max_tokens", "n_predict")
    if tokens is None:
        tokens = older
    elif older != tokens and older is not None:
        fields.mark_unused("max_tokens")
    if tokens is None:
        return default if default > 0 else None
    return None if tokens == -1 else tokens
