"""OpenAI's chat and text completions: bodies to Generations."""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from worker.api.call import Call, Model, Result, read_ping_interval, read_texts
from worker.api.openai_replies import ChatReply, Chunks, TextReply
from worker.errors import InvalidValue, RequestError, UnsupportedField
from worker.interface import Generation, Grammar, Pictures, Sampling
from worker.prompt import adapter_choice, guided_decoding, logprob_options, sampling_options, tools
from worker.prompt import chat_template as chats
from worker.prompt.body_reader import Fields, Json, to_integer
from worker.prompt.chat_formats import Family
from worker.prompt.response_parser import Manner, Reading, shown, written
from worker.protocol.dialects.openai import CHAT, CHAT_TOKENS, COMPLETIONS, MAX_ENDS, STREAM_OPTIONS, TEXT_PROMPT

_OWN_NAMES: Mapping[str, str] = {}


async def chat(body: Json, model: Model) -> Call:
    """A chat completion; raises RequestError."""
    id = f"chatcmpl-{uuid.uuid4().hex}"
    read = await understand(body, model, id=id)
    common = read.common
    return Call(
        generations=read.generations,
        reply=ChatReply(
            common.head(id, model),
            read.generations,
            shape=common.shape,
            telling=common.telling,
            manner=read.manner,
            shows_thoughts=read.shows_thoughts,
        ),
        stream=common.stream,
        ping_interval=common.ping_interval,
        ignored=read.ignored,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A chat's body, understood."""

    common: "_Common"
    generations: tuple[Generation, ...]
    """One; of a text completion, one for each prompt."""
    manner: Manner
    ignored: tuple[str, ...]
    shows_thoughts: bool = True
    """What the model thinks is part of the answer."""


async def understand(
    body: Json, model: Model, *, id: str, names: Mapping[str, str] = _OWN_NAMES, before: Sequence[int] = ()
) -> Chat:
    """The body of a chat completion, of OpenAI's clients or as another face has translated it; raises RequestError.

    `names`: what its fields are called in the body that the client wrote, the longer before the shorter; `before`:
    tokens of a prompt and its answer, from which the messages go on.
    """
    theirs = partial(renamed, names)
    with in_their_words(theirs):
        read = await _understand(body, model, id=id, theirs=theirs, before=before)
    return replace(read, ignored=tuple(map(theirs, read.ignored))) if names else read


def renamed(names: Mapping[str, str], field: str) -> str:
    """What a field of a chat completion, or something inside of it, is called by the client."""
    within = next((ours for ours in names if field == ours or field.startswith(f"{ours}.")), "")
    return names[within] + field.removeprefix(within) if within else field


@contextmanager
def in_their_words(theirs: Callable[[str], str]) -> Iterator[None]:
    """A RequestError from within names the field as the client does."""
    try:
        yield
    except RequestError as error:
        if error.param is not None:
            if error.message.startswith(error.param):
                error.message = theirs(error.param) + error.message.removeprefix(error.param)
            error.param = theirs(error.param)
        raise


async def _understand(
    body: Json, model: Model, *, id: str, theirs: Callable[[str], str], before: Sequence[int]
) -> Chat:
    model.require("completion")
    fields = Fields(body, CHAT)
    conversation = replace(chats.read(fields, model.template, blind=model.engine.blind), before=before)
    tooling = tools.read(fields, conversation.tools, has_place=model.template.mentions("tools"))
    separates = _separates(fields, model)
    shows_thoughts = fields.flag("include_reasoning") is not False
    if not (shows_thoughts or separates):
        raise InvalidValue(
            "include_reasoning: false leaves out what reasoning_format: none makes part of the content; state one",
            param="include_reasoning",
        )
    adapters = adapter_choice.read(fields, "adapters", "lora")
    has_logprobs = fields.flag("logprobs") or False
    top = logprob_options.alternatives(fields, "top_logprobs", model.options.max_logprobs)
    if top and not has_logprobs:
        raise InvalidValue("top_logprobs needs logprobs: true", param="top_logprobs")
    fields.refuse("add_special_tokens", "add_special_tokens must be false: the chat template writes special tokens")
    common = _read_common(fields, model, logprobs=(top or 0) if has_logprobs else None)
    common.check_max_tokens()
    ignored = fields.settle(strict=model.options.strict_fields)
    prompt, tokens, pictures = await _tokens(conversation, tooling, model)
    if common.truncates is not None and pictures is not None:
        raise UnsupportedField(
            "truncate_prompt_tokens is not supported for prompts with images; leave it out",
            param="truncate_prompt_tokens",
        )
    tokens = common.cut(tokens)
    model.check_prompt(tokens, param="messages")
    manner = Manner(
        family=model.family,
        begun=_begun(model.family, prompt, conversation),
        tools=tooling.callable,
        is_held=tooling.is_required,
        most_calls=tooling.most,
        separates=separates,
    )
    if common.grammar is not None:
        common = replace(common, grammar=replace(common.grammar, field=theirs(common.grammar.field)))
    if common.grammar is not None and tooling.is_required:
        ignored = (*ignored, common.grammar.field)  # there is no answer but calls
    common = replace(common, grammar=_held(common.grammar, tooling, manner, model))
    if common.grammar is None and any(tool["function"].get("strict") is True for tool in tooling.callable):
        ignored = (*ignored, "tools[].function.strict")  # a call that may be made is read as it comes
    generations = common.generations(
        id, [tokens], shown=shown(model.family, model.special), pictures=pictures, adapters=adapters
    )
    return Chat(common=common, generations=generations, manner=manner, ignored=ignored, shows_thoughts=shows_thoughts)


async def understand_text(body: Json, model: Model, *, id: str, suffix: str = "") -> Chat:
    """The body of a text completion, as another face has translated it: nothing in the answer is told apart. `suffix`:
    what follows the gap that it fills in. Raises RequestError."""
    model.require("completion")
    fields = Fields(body, TEXT_PROMPT)
    logprobs = logprob_options.alternatives(fields, "logprobs", model.options.max_logprobs)
    common = _read_common(fields, model, logprobs=logprobs)
    common.check_max_tokens()
    prompts, texts = await read_texts(fields, "prompt", model)
    if suffix:
        prompts = await model.encode_around(prompts, texts, suffix)
    ignored = fields.settle(strict=model.options.strict_fields)
    prompts = [common.cut(prompt) for prompt in prompts]
    for prompt in prompts:
        model.check_prompt(prompt, param="prompt")
    generations = common.generations(id, prompts)
    return Chat(common=common, generations=generations, manner=Manner(family=None), ignored=ignored)


async def input_tokens(body: Json, model: Model) -> Result:
    """Tokens of the prompt that a chat with this body starts from; raises RequestError."""
    tokens, ignored = await count(body, model)
    told = {"object": "response.input_tokens", "input_tokens": tokens}
    return Result(body=told, ignored=ignored, prompt_tokens=tokens)


async def count(body: Json, model: Model, *, names: Mapping[str, str] = _OWN_NAMES) -> tuple[int, tuple[str, ...]]:
    """Tokens of the prompt that a chat with this body starts from, and what of it made no difference to them although
    it is meant to; raises RequestError. `names`: as of `understand`."""
    tokens, ignored = await prompt_of(body, model, names=names)
    return len(tokens), ignored


async def prompt_of(
    body: Json, model: Model, *, names: Mapping[str, str] = _OWN_NAMES, add_special: bool = False
) -> tuple[list[int], tuple[str, ...]]:
    """As `count`, the tokens themselves; `add_special`: with what the tokenizer puts around texts."""
    model.require("completion")
    theirs = partial(renamed, names)
    fields = Fields(body, CHAT_TOKENS)
    with in_their_words(theirs):
        conversation = chats.read(fields, model.template, blind=model.engine.blind)
        tooling = tools.read(fields, conversation.tools, has_place=model.template.mentions("tools"))
        if add_special and conversation.images:
            raise UnsupportedField(
                "add_special_tokens is not supported for prompts with images; leave it out", param="add_special_tokens"
            )
        fields.skip(CHAT_TOKENS)
        ignored = fields.settle(strict=model.options.strict_fields)
        prompt, tokens, _ = await _tokens(conversation, tooling, model)
    if add_special:
        [tokens] = await model.encode([prompt])
    return tokens, tuple(map(theirs, ignored))


async def _tokens(
    conversation: chats.Conversation, tooling: tools.Tooling, model: Model
) -> tuple[str, list[int], Pictures | None]:
    """The prompt, as text and as tokens, with its images."""
    prompt, tokens, pictures = await model.read(replace(conversation, tools=tooling.shown))
    if not tokens:
        raise InvalidValue("messages render to an empty prompt with this model's chat template", param="messages")
    return prompt, tokens, pictures


async def completions(body: Json, model: Model) -> Call:
    """A text completion of one or more prompts; raises RequestError."""
    model.require("completion")
    fields = Fields(body, COMPLETIONS)
    suffix = fields.text("suffix")
    echo = fields.flag("echo") or False
    if suffix and echo:
        raise InvalidValue("suffix and echo exclude each other; state one", param="echo")
    logprobs = logprob_options.alternatives(fields, "logprobs", model.options.max_logprobs)
    common = _read_common(fields, model, logprobs=logprobs)
    is_only_echo = echo and common.max_tokens == 0
    if not is_only_echo:
        common.check_max_tokens()
    best_of = _best_of(fields, common)
    add_special = fields.flag("add_special_tokens") is not False
    prompts, texts = await read_texts(fields, "prompt", model, add_special=add_special)
    adapters = adapter_choice.read(fields, "adapters", "lora", prompts=len(prompts))
    if suffix:
        prompts = await model.encode_around(prompts, texts, suffix)
    ignored = fields.settle(strict=model.options.strict_fields)
    whole, prompts = prompts, [common.cut(prompt) for prompt in prompts]
    for prompt in prompts:
        model.check_prompt(prompt, param="prompt")
    id = f"cmpl-{uuid.uuid4().hex}"
    wanted = replace(
        common,
        n=best_of,
        max_tokens=1 if is_only_echo else common.max_tokens,
        # the best is the likeliest, so the choice among them needs to know
        sampling=replace(common.sampling, logprobs=common.telling.wanted or 0)
        if best_of > common.n
        else common.sampling,
    )
    generations = wanted.generations(id, prompts, prompt_logprobs=echo and logprobs is not None, adapters=adapters)
    echoes = [
        model.decode(prompt) if text is None or len(prompt) < len(all_of_it) else text
        for prompt, text, all_of_it in zip(prompts, texts, whole, strict=True)
    ]
    reply = TextReply(
        common.head(id, model),
        generations,
        n=common.n,
        shape=common.shape,
        telling=common.telling,
        echoes=echoes if echo else None,
        is_only_echo=is_only_echo,
        special_ids=model.special_ids,
    )
    return Call(
        generations=generations,
        reply=reply,
        stream=common.stream,
        ping_interval=common.ping_interval,
        ignored=ignored,
    )


# Bodies


@dataclass(frozen=True, slots=True, kw_only=True)
class _Common:
    """What both endpoints read alike."""

    model: str
    max_tokens: int | None
    sampling: Sampling
    grammar: Grammar | None
    stop: tuple[str, ...]
    n: int
    stream: bool
    shape: Chunks
    telling: logprob_options.Telling
    ends: frozenset[int]
    shows_end: bool
    shown: frozenset[int]
    """Special tokens that the answer's text has, whatever its model."""
    truncates: int | None
    """Of a longer prompt so many tokens; None: a longer one is refused."""
    keeps_first: bool
    """They are the first, not the last."""
    salt: str
    ping_interval: float | None

    def check_max_tokens(self) -> None:
        if self.max_tokens == 0:
            raise InvalidValue("max_tokens must be at least 1, or -1 for all that fits", param="max_tokens")
        if self.max_tokens is not None and self.sampling.min_tokens > self.max_tokens:
            raise InvalidValue("min_tokens must not exceed max_tokens", param="min_tokens")

    def cut(self, prompt: list[int]) -> list[int]:
        """What of `prompt` is to be computed."""
        if self.truncates is None:
            return prompt
        return prompt[: self.truncates] if self.keeps_first else prompt[-self.truncates :]

    def generations(
        self,
        id: str,
        prompts: Sequence[Sequence[int]],
        *,
        prompt_logprobs: bool = False,
        shown: frozenset[int] = frozenset(),
        pictures: Pictures | None = None,
        adapters: adapter_choice.Choices = (),
    ) -> tuple[Generation, ...]:
        """One for each prompt, with its adapter if there are any; `pictures` are those of the only one."""
        return tuple(
            Generation(
                id=f"{id}.{number}",
                prompt=tuple(prompt),
                pictures=pictures,
                adapter=adapters[number] if adapters else None,
                max_tokens=self.max_tokens,
                stop=self.stop,
                n=self.n,
                sampling=self.sampling,
                grammar=self.grammar,
                ends=self.ends,
                shows_end=self.shows_end,
                shown=shown | self.shown,
                salt=self.salt,
                prompt_logprobs=prompt_logprobs or self.telling.prompt_logprobs is not None,
                progress=self.stream,  # comments tell it, where chunks do not
                timings=self.shape.has_timings or self.shape.counts,
            )
            for number, prompt in enumerate(prompts)
        )

    def head(self, id: str, model: Model) -> Json:
        """What every object of the answer repeats."""
        return {
            "id": id,
            "object": "",
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": model.fingerprint,
        }


def _read_common(fields: Fields, model: Model, *, logprobs: int | None) -> _Common:
    options = model.options
    stream = fields.flag("stream") or False
    told = logprob_options.read(fields, logprobs=logprobs, most=options.max_logprobs, stream=stream)
    picked, stop = sampling_options.read(
        fields,
        model.defaults,
        vocab_size=model.vocab_size,
        logprobs=told.wanted,
        seed=options.seed if options.seed >= 0 else None,
        encode=model.encode_piece,
    )
    shows_special = fields.flag("skip_special_tokens") is False
    truncates = _truncates(fields, model)
    return _Common(
        model=fields.text("model") or options.name,
        max_tokens=_max_tokens(fields, options.n_predict),
        sampling=picked,
        grammar=guided_decoding.read(fields),
        stop=stop,
        n=fields.integer("n") or 1,
        stream=stream,
        shape=_chunks(fields, stream),
        telling=told,
        ends=_stop_token_ids(fields, model),
        shows_end=fields.flag("include_stop_str_in_output") or False,
        shown=model.special_ids | frozenset(model.special.values()) if shows_special else frozenset(),
        truncates=truncates,
        keeps_first=_keeps_first(fields, truncates),
        salt=fields.text("cache_salt") or "",
        ping_interval=read_ping_interval(fields),
    )


def _chunks(fields: Fields, stream: bool) -> Chunks:
    if fields.mapping("stream_options") and not stream:
        raise InvalidValue("stream_options may be stated with stream: true only", param="stream_options")
    options = fields.within("stream_options", STREAM_OPTIONS)
    if options.flag("include_obfuscation"):
        fields.mark_unused(f"{options.path}include_obfuscation")
    has_usage, counts = options.flag("include_usage") or False, options.flag("continuous_usage_stats") or False
    if counts and not has_usage:
        fields.mark_unused(f"{options.path}continuous_usage_stats")
    return Chunks(
        has_usage=has_usage,
        counts=counts and has_usage,
        has_progress=_only_streamed(fields, "return_progress", stream),
        has_timings=_only_streamed(fields, "timings_per_token", stream),
    )


def _stop_token_ids(fields: Fields, model: Model) -> frozenset[int]:
    stated = fields.sequence("stop_token_ids") or []
    tokens = [to_integer(each) for each in stated]
    if len(tokens) > MAX_ENDS or not all(token is not None and 0 <= token < model.vocab_size for token in tokens):
        raise InvalidValue(
            f"stop_token_ids must be at most {MAX_ENDS} token ids between 0 and {model.vocab_size - 1}",
            param="stop_token_ids",
        )
    return frozenset(token for token in tokens if token is not None)


def _truncates(fields: Fields, model: Model) -> int | None:
    tokens = fields.integer("truncate_prompt_tokens")
    if tokens == 0:
        raise InvalidValue("truncate_prompt_tokens must be at least 1, or -1", param="truncate_prompt_tokens")
    return model.max_prompt if tokens == -1 else tokens


def _keeps_first(fields: Fields, truncates: int | None) -> bool:
    side = fields.choice("truncation_side")
    if side is not None and truncates is None:
        fields.mark_unused("truncation_side")
    return side == "right"


def _only_streamed(fields: Fields, name: str, stream: bool) -> bool:
    """A flag about chunks; reported as ignored where an answer in one piece has none."""
    is_set = fields.flag(name) or False
    if is_set and not stream:
        fields.mark_unused(name)
    return is_set and stream


def _best_of(fields: Fields, common: _Common) -> int:
    best_of = fields.integer("best_of") or common.n
    if best_of < common.n:
        raise InvalidValue("best_of must be at least n", param="best_of")
    if best_of > common.n and common.stream:
        raise InvalidValue("best_of above n cannot be streamed: the best is known at the end", param="best_of")
    return best_of


def _max_tokens(fields: Fields, default: int) -> int | None:
    """New tokens at most; None for -1, llama-server's word for all that fits."""
    names = ("max_tokens", "max_completion_tokens", "n_predict")
    stated = {name: tokens for name in names if (tokens := fields.integer(name)) is not None}
    if len(set(stated.values())) > 1:
        raise InvalidValue(f"{' and '.join(stated)} mean the same but differ; state one", param=list(stated)[-1])
    if not stated:
        return default if default > 0 else None
    tokens = next(iter(stated.values()))
    return None if tokens == -1 else tokens


def _separates(fields: Fields, model: Model) -> bool:
    """Whether thoughts are told apart from content: `reasoning_format`, in llama-server's words."""
    stated = fields.choice("reasoning_format")
    if stated == "deepseek" and (model.family is None or not model.family.thinks):
        fields.mark_unused("reasoning_format")
    return stated != "none"


def _begun(family: Family | None, prompt: str, conversation: chats.Conversation) -> str:
    """What of the answer the prompt has already, as `Manner.begun` wants it."""
    if family is None:
        return ""
    if family.is_anchored:
        return prompt
    if conversation.continue_final_message:
        return str(conversation.messages[-1]["content"])
    is_thinking = family.think is not None and prompt.rstrip().endswith(family.think[0])
    return family.think[0] if is_thinking and family.think else ""


def _held(grammar: Grammar | None, tooling: tools.Tooling, manner: Manner, model: Model) -> Grammar | None:
    """What the answer is held to, after the thoughts of a model that thinks. Calls that must be made are all of it;
    where they may be made, the answer is either calls or JSON."""
    calls = written(model.family)
    if tooling.is_required:
        grammar = tools.grammar(tooling, calls, model.special)
    elif grammar is not None and tooling.shown:
        if grammar.kind != "json_schema" or not tools.can_tell(calls, model.special):
            raise InvalidValue(
                f'{grammar.field} would keep the model from calling tools; send tool_choice "none" or "required" with'
                " it, or leave one of them out",
                param=grammar.field,
            )
        grammar = tools.grammar(tooling, calls, model.special, otherwise=grammar)
    if grammar is None:
        return None
    is_thinking = Reading(replace(manner, separates=True)).is_thinking
    return replace(grammar, preamble=tools.preamble(model.family, is_begun=is_thinking, special=model.special))
