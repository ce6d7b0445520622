"""OpenAI's chat and text completions: parsing of bodies to GenerationRequests."""

import asyncio
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from worker.api.call import GenerationCall, JsonAnswer, ReplyWriter, check_choices, read_texts
from worker.api.openai_options import CommonOptions, read_common_options
from worker.api.openai_replies import ChatWriter, TextWriter
from worker.api.served_model import ServedModel
from worker.errors import ContextExceeded, InvalidValue, RequestError, UnsupportedField
from worker.interface import GenerationRequest, Grammar, PromptImages
from worker.prompt import adapter_choice, logprob_options, tools
from worker.prompt import chat_template as chats
from worker.prompt.body_reader import BodyFields, Json
from worker.prompt.chat_formats import ChatFormat
from worker.prompt.response_parser import AnswerParser, ParseOptions, call_syntax, marker_tokens
from worker.prompt.text_limits import TextLimit
from worker.protocol.dialects.generation_fields import REASONING_BUDGETS
from worker.protocol.dialects.openai import CHAT, CHAT_TOKENS, COMPLETIONS, TEXT_COMPLETION

_OWN_NAMES: Mapping[str, str] = {}
_PLAIN_TEXT = ParseOptions(chat_format=None)


async def chat(body: Json, model: ServedModel) -> GenerationCall:
    """Parse a chat completion. Raise RequestError."""
    id = f"chatcmpl-{uuid.uuid4().hex}"
    read = await parse_chat(body, model, id=id)
    reply = ChatWriter(
        _head(id, "chat.completion.chunk", read.common, model),
        read.generations,
        read.common,
        parse_options=read.parse_options,
        include_reasoning=read.include_reasoning,
    )
    return read.call(reply)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCompletion:
    """A parsed completion. Other dialects translate their bodies to it."""

    common: CommonOptions
    generations: tuple[GenerationRequest, ...]  # one; for a text completion, one per prompt
    ignored: tuple[str, ...]
    parse_options: ParseOptions = _PLAIN_TEXT
    include_reasoning: bool = True  # the answer includes the reasoning
    prompts: Sequence[str] = ()  # of a text completion: the prompts as texts, after truncation

    def call(self, reply: ReplyWriter, *, ignored: Sequence[str] = (), **further: Any) -> GenerationCall:
        """Return the call that `reply` answers. `ignored`: ignored fields of the other dialect's body."""
        call = GenerationCall(
            generations=self.generations,
            reply=reply,
            stream=self.common.stream,
            ping_interval=self.common.ping_interval,
            ignored=(*ignored, *self.ignored),
        )
        return replace(call, **further)


async def parse_chat(
    body: Json,
    model: ServedModel,
    *,
    id: str,
    names: Mapping[str, str] = _OWN_NAMES,
    before: Sequence[int] = (),
    turns_limit: int | None = None,
) -> ParsedCompletion:
    """Parse the body of a chat completion, sent by an OpenAI client or translated from another dialect. Raise
    RequestError.

    `names`: names of its fields in the client's own body, for errors; longer keys before shorter ones.
    `before`: tokens of an earlier prompt and its answer that the messages continue.
    `turns_limit`: drop the oldest turns of a chat of more tokens; None: it is rejected if it is too long.
    """
    with client_field_names(names):
        return await _parse_chat(body, model, id=id, names=names, before=before, turns_limit=turns_limit)


def client_name(names: Mapping[str, str], field: str) -> str:
    """Return the client's name for a field of a chat completion or for something inside of it."""
    within = next((ours for ours in names if field == ours or field.startswith(f"{ours}.")), "")
    return names[within] + field.removeprefix(within) if within else field


@contextmanager
def client_field_names(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the field that a RequestError names to the client's name."""
    try:
        yield
    except RequestError as error:
        if error.param is not None:
            name = client_name(names, error.param)
            if error.message.startswith(error.param):
                error.message = name + error.message.removeprefix(error.param)
            error.param = name
        raise


async def _parse_chat(
    body: Json,
    model: ServedModel,
    *,
    id: str,
    names: Mapping[str, str],
    before: Sequence[int],
    turns_limit: int | None,
) -> ParsedCompletion:
    model.require("completion")
    fields = BodyFields(model.defaults.complete(body, CHAT), CHAT)
    conversation = replace(chats.read(fields, model.template, no_vision=model.engine.no_vision), before=before)
    tooling = tools.read(fields, conversation.tools, has_place=model.template.mentions("tools"))
    separate_reasoning = _reads_reasoning(fields, model)
    budget, budget_fields = _reasoning_budget(fields, body, model)
    if budget is not None and model.template.mentions("thinking_budget"):  # that of Seed-OSS states the budget
        conversation = replace(conversation, variables={"thinking_budget": budget, **conversation.variables})
    if budget == 0 and model.template.thinking_switch and "enable_thinking" not in conversation.variables:
        conversation = replace(conversation, variables={**conversation.variables, "enable_thinking": False})
        budget, budget_fields = None, ()
    if fields.flag("store"):
        fields.mark_unused("store")
    include_reasoning = fields.flag("include_reasoning") is not False
    if not (include_reasoning or separate_reasoning):
        raise InvalidValue(
            "include_reasoning: false and reasoning_format: none exclude each other; send one of them",
            param="include_reasoning",
        )
    adapters = adapter_choice.read(fields, "adapters", "lora")
    has_logprobs = fields.flag("logprobs") or False
    top = logprob_options.alternatives(fields, "top_logprobs", model.options.max_logprobs)
    if top and not has_logprobs:
        raise InvalidValue("top_logprobs needs logprobs: true", param="top_logprobs")
    fields.refuse("add_special_tokens", "add_special_tokens must be false: the chat template writes special tokens")
    common = read_common_options(fields, model, logprobs=(top or 0) if has_logprobs else None)
    common.check_max_tokens()
    limit = common.limit(model, "messages")
    if turns_limit is None:
        prompt, tokens, prompt_images = await _prompt_tokens(conversation, tooling, model, limit)
    else:
        prompt, tokens, prompt_images = await _latest_turns(conversation, tooling, model, limit, turns_limit)
    # After the length check: of a chat with many parts, this search takes most of the time.
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    if common.max_prompt_tokens is not None and prompt_images is not None:
        raise UnsupportedField(
            "truncate_prompt_tokens is not supported for prompts with images; leave it out",
            param="truncate_prompt_tokens",
        )
    tokens = common.cut(tokens)
    model.check_prompt(tokens, param="messages")
    parse_options = ParseOptions(
        chat_format=model.chat_format,
        prefix=_answer_prefix(model.chat_format, prompt, conversation),
        tools=tooling.callable,
        is_constrained=tooling.is_required,
        max_calls=tooling.max_calls,
        separate_reasoning=separate_reasoning,
    )
    grammar = common.request.grammar
    if grammar is not None:
        if tooling.is_required:
            ignored = (*ignored, grammar.field)  # every answer is a tool call, so the grammar has no effect
        grammar = replace(grammar, field=client_name(names, grammar.field))
    if (
        grammar is None
        and not tooling.is_required
        and any(tool["function"].get("strict") is True for tool in tooling.callable)
    ):
        ignored = (*ignored, "tools[].function.strict")  # an optional call is parsed without a grammar
    if budget is not None and tools.opening_token(model.chat_format, model.special) is None:
        budget, ignored = None, (*ignored, *budget_fields)
    grammar = _answer_grammar(grammar, tooling, parse_options, model, budget)
    markers = marker_tokens(model.chat_format, model.special)
    generations = common.generations(
        id,
        [tokens],
        adapters=adapters,
        grammar=grammar,
        prompt_images=prompt_images,
        visible_special_tokens=common.request.visible_special_tokens | markers,
    )
    return ParsedCompletion(
        common=common,
        generations=generations,
        parse_options=parse_options,
        ignored=tuple(client_name(names, name) for name in ignored),
        include_reasoning=include_reasoning,
    )


async def parse_text(body: Json, model: ServedModel, *, id: str, suffix: str = "") -> ParsedCompletion:
    """Parse the body of a text completion, translated from another dialect. The answer is not searched for reasoning or
    tool calls.

    `suffix`: text behind the gap that the model fills in. Raise RequestError.
    """
    model.require("completion")
    fields = BodyFields(model.defaults.complete(body, TEXT_COMPLETION), TEXT_COMPLETION)
    logprobs = logprob_options.alternatives(fields, "logprobs", model.options.max_logprobs)
    common = read_common_options(fields, model, logprobs=logprobs)
    common.check_max_tokens()
    prompts, texts = await _read_prompts(fields, model, common, suffix)
    check_choices(len(prompts), common.request.n)
    adapters = adapter_choice.read(fields, "adapters", "lora", prompts=len(prompts))
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    generations = common.generations(id, prompts, adapters=adapters)
    return ParsedCompletion(common=common, generations=generations, ignored=ignored, prompts=texts)


async def _read_prompts(
    fields: BodyFields, model: ServedModel, common: CommonOptions, suffix: str | None, *, add_special: bool = True
) -> tuple[list[list[int]], list[str]]:
    """Return the tokens of each prompt of a text completion, after truncation, and their texts."""
    limit = common.limit(model, "prompt")
    prompts, texts = await read_texts(fields, "prompt", model, limit=limit, add_special=add_special)
    if suffix:
        prompts = await model.encode_around(prompts, texts, suffix, limit)
    kept = [common.cut(prompt) for prompt in prompts]
    for prompt in kept:
        model.check_prompt(prompt, param="prompt")
    pairs = zip(kept, prompts, texts, strict=True)
    shown = [None if len(short) < len(prompt) else text for short, prompt, text in pairs]
    decoded = iter(await model.decode_all([prompt for prompt, text in zip(kept, shown, strict=True) if text is None]))
    return kept, [next(decoded) if text is None else text for text in shown]


async def input_tokens(body: Json, model: ServedModel) -> JsonAnswer:
    """Count the tokens of the prompt of a chat with this body. Raise RequestError."""
    tokens, ignored = await chat_prompt_tokens(body, model)
    answer = {"object": "response.input_tokens", "input_tokens": len(tokens)}
    return JsonAnswer(body=answer, ignored=ignored, prompt_tokens=len(tokens))


async def chat_prompt_tokens(
    body: Json, model: ServedModel, *, names: Mapping[str, str] = _OWN_NAMES, add_special: bool = False
) -> tuple[list[int], tuple[str, ...]]:
    """Return the prompt tokens of a chat with this body, and the names of ignored fields. Raise RequestError.

    `names`: as for `parse_chat`. `add_special`: add the tokenizer's special tokens around texts.
    """
    model.require("completion")
    fields = BodyFields(body, CHAT_TOKENS)
    with client_field_names(names):
        conversation = chats.read(fields, model.template, no_vision=model.engine.no_vision)
        tooling = tools.read(fields, conversation.tools, has_place=model.template.mentions("tools"))
        if add_special and conversation.images:
            raise UnsupportedField(
                "add_special_tokens is not supported for prompts with images; leave it out", param="add_special_tokens"
            )
        fields.skip(CHAT_TOKENS)
        limit = model.count_limit("messages")
        prompt, tokens, _ = await _prompt_tokens(conversation, tooling, model, limit)
        if add_special:
            [tokens] = await model.encode([prompt], limit)
        # After the length check: of a chat with many parts, this search takes most of the time.
        ignored = fields.check_unknown(strict=model.options.strict_fields)
    return tokens, tuple(client_name(names, name) for name in ignored)


async def _prompt_tokens(
    conversation: chats.Conversation, tooling: tools.ToolOptions, model: ServedModel, limit: TextLimit
) -> tuple[str, list[int], PromptImages | None]:
    """Return the prompt as text, its tokens and its images."""
    prompt, tokens, prompt_images = await model.read(replace(conversation, tools=tooling.shown), limit)
    if not tokens:
        raise InvalidValue("this model's chat template renders the messages to an empty prompt", param="messages")
    return prompt, tokens, prompt_images


async def _latest_turns(
    conversation: chats.Conversation, tooling: tools.ToolOptions, model: ServedModel, limit: TextLimit, most: int
) -> tuple[str, list[int], PromptImages | None]:
    """Return `_prompt_tokens` without the oldest turns, as few as the context and `most` tokens require. Leading system
    messages stay. A turn begins with a message of the user, so that results of tools keep their calls. The last turn
    may have more than `most` tokens. Raise ContextExceeded if the context has no room for it."""
    messages = conversation.messages
    head = next((at for at, message in enumerate(messages) if message["role"] not in ("system", "developer")), 0)
    begins = [head, *(at for at, message in enumerate(messages) if at > head and message["role"] == "user")]
    found, low, high = None, 0, len(begins) - 1
    # All turns, which mostly fit. Then one, two, four ... of them, and a binary search from the first number that does
    # not fit: no try but the first renders more than twice of what fits.
    tried, turns = 0, 1
    while low <= high:
        await asyncio.sleep(0)  # short chats are rendered and tokenized in the event loop, and there are several tries
        kept = replace(conversation, messages=[*messages[:head], *messages[begins[tried] :]])
        try:
            prompt = await _prompt_tokens(kept, tooling, model, limit)
            model.check_prompt(prompt[1], param="messages")
            if len(prompt[1]) > most and tried < len(begins) - 1:
                raise limit.error(len(prompt[1]))
            found, high = prompt, tried - 1
        except ContextExceeded:
            if tried == len(begins) - 1:
                raise
            low = tried + 1
        tried = max((low + high) // 2, len(begins) - turns)
        turns *= 2
    assert found is not None
    return found


async def completions(body: Json, model: ServedModel) -> GenerationCall:
    """Parse a text completion of one or more prompts. Raise RequestError."""
    model.require("completion")
    fields = BodyFields(model.defaults.complete(body, COMPLETIONS), COMPLETIONS)
    suffix = fields.text("suffix")
    echo = fields.flag("echo") or False
    if suffix and echo:
        raise InvalidValue("suffix and echo exclude each other; send one of them", param="echo")
    logprobs = logprob_options.alternatives(fields, "logprobs", model.options.max_logprobs)
    common = read_common_options(fields, model, logprobs=logprobs)
    is_only_echo = common.request.max_tokens == 0
    if is_only_echo and not echo:
        raise InvalidValue("max_tokens must be at least 1 without echo, or -1 for no limit", param="max_tokens")
    if not is_only_echo:
        common.check_max_tokens()
    best_of = _best_of(fields, common)
    add_special = fields.flag("add_special_tokens") is not False
    prompts, texts = await _read_prompts(fields, model, common, suffix, add_special=add_special)
    check_choices(len(prompts), best_of)
    adapters = adapter_choice.read(fields, "adapters", "lora", prompts=len(prompts))
    ignored = fields.check_unknown(strict=model.options.strict_fields)
    id = f"cmpl-{uuid.uuid4().hex}"
    request = common.request
    sampling = request.sampling
    if best_of > request.n:  # the best choice is the one with the highest mean logprob, so logprobs are needed
        sampling = replace(sampling, logprobs=sampling.logprobs or 0)
    generations = common.generations(
        id,
        prompts,
        adapters=adapters,
        copies=request.n,
        n=best_of,
        max_tokens=1 if is_only_echo else request.max_tokens,
        sampling=sampling,
        prompt_logprobs=request.prompt_logprobs or (echo and logprobs is not None),
    )
    reply = TextWriter(
        _head(id, "text_completion", common, model),
        generations,
        common,
        echoes=texts if echo else None,
        is_only_echo=is_only_echo,
        special_ids=model.special_ids,
    )
    return ParsedCompletion(common=common, generations=generations, ignored=ignored).call(reply)


def _head(id: str, kind: str, common: CommonOptions, model: ServedModel) -> Json:
    """Return the first fields of every chunk."""
    return {
        "id": id,
        "object": kind,
        "created": int(time.time()),
        "model": common.model,
        "system_fingerprint": model.fingerprint,
    }


def _best_of(fields: BodyFields, common: CommonOptions) -> int:
    n = common.request.n
    best_of = fields.integer("best_of") or n
    if best_of < n:
        raise InvalidValue("best_of must be at least n", param="best_of")
    if best_of > n and common.stream:
        raise InvalidValue(
            "best_of above n cannot be streamed: the best choice is known only at the end", param="best_of"
        )
    return best_of


def _reads_reasoning(fields: BodyFields, model: ServedModel) -> bool:
    """Return True unless `reasoning_format`, with llama-server's values, leaves reasoning in the content."""
    given = fields.choice("reasoning_format")
    if given == "deepseek" and (model.chat_format is None or not model.chat_format.has_reasoning):
        fields.mark_unused("reasoning_format")
    return given != "none"


def _reasoning_budget(fields: BodyFields, body: Json, model: ServedModel) -> tuple[int | None, tuple[str, ...]]:
    """Return the most tokens of reasoning, None for no limit, and the fields of the request that state it."""
    budget = fields.any_of(fields.integer, *REASONING_BUDGETS)
    if budget is None or not 0 <= budget < model.engine.ctx_size:
        return None, ()
    return budget, tuple(name for name in REASONING_BUDGETS if body.get(name) is not None)


def _answer_prefix(chat_format: ChatFormat | None, prompt: str, conversation: chats.Conversation) -> str:
    """Return the part of the answer that the prompt already contains, see `ParseOptions.prefix`."""
    if chat_format is None:
        return ""
    if chat_format.is_anchored:
        return prompt
    if conversation.continue_final_message:
        return str(conversation.messages[-1]["content"])
    prompt = prompt.rstrip().removesuffix("<seed:cot_budget_reflect>")  # Seed-OSS writes it for a budget of 0
    is_thinking = chat_format.reasoning_markers is not None and prompt.endswith(chat_format.reasoning_markers[0])
    return chat_format.reasoning_markers[0] if is_thinking and chat_format.reasoning_markers else ""


def _answer_grammar(
    grammar: Grammar | None,
    tooling: tools.ToolOptions,
    parse_options: ParseOptions,
    model: ServedModel,
    budget: int | None,
) -> Grammar | None:
    """Return the grammar of the whole answer, which applies after the reasoning of at most `budget` tokens.

    Required tool calls replace the request's grammar. With optional tool calls the answer is either calls or JSON.
    """
    calls = call_syntax(model.chat_format)
    if tooling.is_required:
        grammar = tools.grammar(tooling, calls, model.special)
    elif grammar is not None and tooling.shown:
        if grammar.kind != "json_schema" or not tools.is_distinguishable(calls, model.special):
            raise InvalidValue(
                f'{grammar.field} cannot be combined with optional tool calls; send tool_choice "none" or "required"'
                " with it, or leave one of them out",
                param=grammar.field,
            )
        grammar = tools.grammar(tooling, calls, model.special, otherwise=grammar)
    if grammar is None and budget is None:
        return None
    is_free = grammar is None
    is_open = AnswerParser(replace(parse_options, separate_reasoning=True)).is_thinking
    if grammar is None:
        opening = tools.opening_token(model.chat_format, model.special)
        assert opening is not None, "a budget needs the token"
        messages = model.chat_format.messages if model.chat_format is not None else None
        grammar = tools.any_text(opening, is_open=is_open, messages=messages)
    before = tools.preamble(model.chat_format, is_open=is_open, special=model.special, budget=budget, is_free=is_free)
    return replace(grammar, preamble=before)
