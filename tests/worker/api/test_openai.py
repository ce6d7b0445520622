"""OpenAI's chat and text completions and embeddings: parsing of bodies and serialization of answers."""

import json
import math
from typing import Any

import pytest
import transformers

from tests import tiny
from tests.worker import serving
from tests.worker.fake_engine import FakeEngine
from tests.worker.speaking import ANSWERS, CHAT, SCHEMA, THINKING, Speaking, encoded, model, only, streamed, whole
from worker.api import embeddings, openai
from worker.api.openai_replies import TextWriter
from worker.api.served_model import ServedModel
from worker.api.usage import UsageTotals
from worker.errors import ContextExceeded, InvalidValue, RequestError, UnknownField, UnsupportedByModel
from worker.interface import ChoiceTimings, Delta, GenerationRequest, Grammar, SamplingParams
from worker.protocol.dialects.generation_fields import REASONING_BUDGETS

# Parsing of bodies


async def test_a_chat_becomes_one_generation_of_its_rendered_prompt() -> None:
    made = model()
    generation = await only({}, made)
    assert made.decode(generation.prompt) == "<s><|user|>\nhi\n<|assistant|>\n"
    assert generation.prompt.count(made.tokenizer.bos_token_id) == 1
    assert (generation.max_tokens, generation.n, generation.stop) == (None, 1, ())
    assert generation.sampling == SamplingParams()


async def test_every_field_of_a_chat_reaches_the_engine() -> None:
    body = {
        "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.2,
        "repeat_last_n": 9, "presence_penalty": 0.3, "frequency_penalty": 0.4, "logit_bias": {"3": 2}, "seed": 11,
        "stop": ["a", "b"], "n": 3, "logprobs": True, "top_logprobs": 2, "min_tokens": 2, "ignore_eos": True,
    }  # fmt: skip
    generation = await only(body)
    assert (generation.max_tokens, generation.n, generation.stop) == (7, 3, ("a", "b"))
    assert generation.sampling == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, repetition_penalty=1.2, repeat_last_n=9, presence_penalty=0.3,
        frequency_penalty=0.4, logit_bias={3: 2.0}, seed=11, min_tokens=2, ignore_eos=True, logprobs=2,
    )  # fmt: skip


async def test_the_newer_name_of_the_token_limit_takes_precedence_and_the_older_is_reported() -> None:
    for older, ignored in ((6, ()), (5, ("max_tokens",)), (-1, ("max_tokens",))):
        call = await openai.chat({**CHAT, "max_tokens": older, "max_completion_tokens": 6}, model())
        assert (call.generations[0].max_tokens, call.ignored) == (6, ignored)


async def test_the_presets_token_limit_is_the_default() -> None:
    assert (await only({}, model(n_predict=9))).max_tokens == 9
    assert (await only({"max_tokens": 4}, model(n_predict=9))).max_tokens == 4
    assert (await only({"max_tokens": -1}, model(n_predict=9))).max_tokens is None


async def test_a_text_without_a_limit_has_that_of_the_preset_and_no_other() -> None:
    for n_predict, expected in ((-1, None), (9, 9)):
        [generation] = (await openai.completions({"prompt": "a"}, model(n_predict=n_predict))).generations
        assert generation.max_tokens == expected


FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"n_predict": 5, "max_completion_tokens": 6}, "n_predict", "invalid_value"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "invalid_value"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"max_tokens": 5, "n_predict": 6}, "n_predict", "invalid_value"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "invalid_value"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids", "invalid_value"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "unsupported_parameter"),
    ({"allowed_token_ids": [10**6]}, "allowed_token_ids", "unsupported_parameter"),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    ({"lora": [{"id": 0, "scale": 1}, {"id": 1, "scale": 1}]}, "lora", "unsupported_parameter"),
    ({"adapters": "french", "lora": "german"}, "lora", "invalid_value"),
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CHAT_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"top_logprobs": 1}, "top_logprobs", "invalid_value"),
    ({"logprobs": False, "top_logprobs": 1}, "top_logprobs", "invalid_value"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "invalid_value"),
    ({"tools": [TOOL] * 513}, "tools", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "invalid_value"),
    ({"echo": True}, "echo", "unsupported_parameter"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
]
TEXT_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"prompt": [10**6]}, "prompt", "invalid_value"),
    ({"prompt": ["a"] * 2049}, "prompt", "invalid_value"),
    ({"suffix": "x"}, "suffix", "unsupported_parameter"),
    ({"suffix": "x", "echo": True}, "echo", "invalid_value"),
    ({"best_of": 2, "n": 3}, "best_of", "invalid_value"),
    ({"best_of": 2, "stream": True}, "best_of", "invalid_value"),
]


@pytest.mark.parametrize(
    ("call", "body", "param", "reason"),
    [
        *((openai.chat, {**CHAT, **body}, *rest) for body, *rest in [*FIELDS, *CHAT_FIELDS]),
        *((openai.completions, {"prompt": "hi", **body}, *rest) for body, *rest in [*FIELDS, *TEXT_FIELDS]),
    ],
    ids=lambda each: getattr(each, "__name__", str(each))[:40],
)
async def test_an_invalid_field_is_rejected_by_name(call: Any, body: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        await call(body, model())
    assert (caught.value.status, caught.value.param, caught.value.reason) == (400, param, reason)


@pytest.mark.parametrize("body", [{"store": True}, {"prediction": {"type": "content", "content": "hi"}}])
async def test_a_field_that_changes_no_answer_is_reported_as_ignored(body: dict[str, Any]) -> None:
    assert (await openai.chat({**CHAT, **body}, model())).ignored == tuple(body)


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "text"}},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tool_choice": "auto"},
        {"parallel_tool_calls": True},
        {"grammar": ""},
        {"lora": []},
        {"store": False, "user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "cache_prompt": True},
        {"stream_options": {"include_usage": True, "include_obfuscation": False}, "stream": True},
        {"stream_options": {}, "use_beam_search": False, "length_penalty": 1.0, "priority": 0, "echo": False},
        {"spaces_between_special_tokens": True, "guided_decoding_backend": "auto", "min_keep": 0, "tfs_z": 1},
        {"mirostat": 0, "mirostat_tau": 5.0, "dry_multiplier": 0.0, "dry_base": 1.75, "typ_p": 1.0, "samplers": []},
    ],
    ids=str,
)
async def test_neutral_values_are_accepted_without_a_report(body: dict[str, Any]) -> None:
    made = model(strict_fields=True)
    call = await openai.chat({**CHAT, **body}, made)
    assert call.ignored == ()
    assert call.generations[0].prompt == (await only({}, made)).prompt


async def test_a_chat_that_is_too_long_is_rejected_before_its_parts_are_searched_for_unknown_members() -> None:
    for length, error in ((4_000_000, ContextExceeded), (1, UnknownField)):
        part = {"type": "text", "text": "a" * length, "wibble": 1}
        with pytest.raises(error):
            await openai.chat({"messages": [{"role": "user", "content": [part]}]}, model(strict_fields=True))


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        (["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], "<s><|fim_prefix|>ab<|fim_suffix|>yz<|fim_middle|>"),
        (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "<s><fim_prefix>ab<fim_suffix>yz<fim_middle>"),
        (["[SUFFIX]", "[PREFIX]"], "<s>[SUFFIX]yz[PREFIX]ab"),
    ],
)
async def test_a_suffix_uses_the_fill_in_the_middle_layout(marks: list[str], expected: str) -> None:
    tokenizer = tiny.make_tokenizer("llama")
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    made = ServedModel(FakeEngine(tokenizer), tokenizer, serving.options())
    call = await openai.completions({"prompt": ["ab", "c"], "suffix": "yz"}, made)
    assert made.decode(call.generations[0].prompt) == expected
    assert made.decode(call.generations[1].prompt) == expected.replace("ab", "c")
    tokens = tokenizer.encode("ab", add_special_tokens=False)
    [generation] = (await openai.completions({"prompt": tokens, "suffix": "yz"}, made)).generations
    assert generation.prompt == call.generations[0].prompt


@pytest.mark.parametrize(
    "template", [5, {}, {"fields": {"content": {}}}, {"start_anchor": "x", "fields": {"a": {"open": 5}}}]
)
def test_an_invalid_response_template_is_ignored(template: Any) -> None:
    tokenizer = tiny.make_tokenizer("llama")
    tokenizer.response_template = template
    assert ServedModel(FakeEngine(tokenizer), tokenizer, serving.options()).chat_format is None


TAKES_TOOLS = "{{ 'tools' if tools else 'none' }} <tool_call></tool_call> arguments"


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}])
async def test_tools_that_the_template_does_not_render_are_rejected_with_a_remedy(choice: Any) -> None:
    with pytest.raises(UnsupportedByModel, match="chat-template") as caught:
        await only({"tools": [TOOL], "tool_choice": choice})
    assert caught.value.param == "tools"


async def grammar_of(body: dict[str, Any], made: ServedModel) -> Grammar:
    """The grammar of a chat, which must have one."""
    grammar = (await only(body, made)).grammar
    assert grammar is not None
    return grammar


async def test_a_required_call_is_constrained_in_the_models_syntax() -> None:
    made = model(chat_template=TAKES_TOOLS)
    assert (await only({"tools": [TOOL]}, made)).grammar is None
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        grammar = await grammar_of({"tools": [TOOL], "tool_choice": choice}, made)
        assert grammar.field == "tools"
        assert "<tool_call>" in grammar.text


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("choice", "is_one"),
    [
        ({"tool_choice": "required"}, False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, True),
        ({"tool_choice": NAMED}, True),
        ({"tool_choice": NAMED, "parallel_tool_calls": True}, False),
    ],
)
async def test_a_named_function_is_called_once_by_default(choice: dict[str, Any], is_one: bool) -> None:
    made = model(chat_template=TAKES_TOOLS)
    assert (")*" not in (await grammar_of({"tools": [TOOL], **choice}, made)).text) is is_one


def allowing(mode: Any, *names: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


TOOLS_OF_THREE = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("f", "g", "h")]
SHOWN = "{% for t in tools %}{{ t.function.name }}{% endfor %} <tool_call></tool_call> arguments"


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_functions_outside_allowed_tools_are_hidden_and_not_callable(mode: str) -> None:
    made = model(chat_template=SHOWN)
    generation = await only({"tools": TOOLS_OF_THREE, "tool_choice": allowing(mode, "h", "f", "h")}, made)
    assert made.decode(generation.prompt).startswith("fh ")
    assert (generation.grammar is not None) is (mode == "required")
    if generation.grammar is not None:
        text = generation.grammar.text
        assert [json.dumps(json.dumps({"name": name}))[1:-2] in text for name in "fgh"] == [True, False, True]
        assert ")*" in text, "parallel calls are allowed by default"


@pytest.mark.parametrize(
    "choice",
    [
        allowing("auto"),
        allowing("sometimes", "f"),
        allowing([], "f"),
        allowing("auto", "f", "x"),
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "mcp", "name": "f"}]}},
        {"type": "allowed_tools", "mode": "auto", "tools": []},
        {"type": "function", "function": {"name": "x"}},
    ],
)
async def test_a_tool_choice_without_a_function_of_the_request_is_rejected(choice: Any) -> None:
    with pytest.raises(InvalidValue) as caught:
        await only({"tools": TOOLS_OF_THREE, "tool_choice": choice}, model(chat_template=SHOWN))
    assert caught.value.param == "tool_choice"


def test_tools_are_a_capability_if_the_template_renders_them() -> None:
    assert "tools" in model(chat_template=TAKES_TOOLS).capabilities
    assert "tools" not in model().capabilities
    assert "tools" not in model(("embedding",), chat_template=TAKES_TOOLS).capabilities


@pytest.mark.parametrize(
    ("held", "template"),
    [
        ({"grammar": 'root ::= "x"'}, TAKES_TOOLS),
        ({"guided_regex": "x"}, TAKES_TOOLS),
        ({"response_format": {"type": "json_object"}}, "{{ tools }} its calls are JSON themselves"),
    ],
)
async def test_optional_tools_exclude_a_grammar_that_calls_could_match(held: dict[str, Any], template: str) -> None:
    made = model(chat_template=template)
    with pytest.raises(InvalidValue, match="tool_choice") as caught:
        await only({"tools": [TOOL], **held}, made)
    assert caught.value.param == next(iter(held))
    none = await only({"tools": [TOOL], **held, "tool_choice": "none"}, made)
    assert none.grammar is not None


async def test_optional_tools_with_a_json_schema_allow_either() -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}}
    body = {"tools": [TOOL], "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    either = await grammar_of(body, model(chat_template=TAKES_TOOLS))
    assert (either.kind, either.field) == ("lark", "response_format.json_schema")
    assert either.text.startswith("start: calls | answer\n")
    assert '"answer"' in either.text
    assert "<tool_call>" in either.text


async def test_strict_is_reported_as_ignored_for_optional_calls() -> None:
    function = {"name": "f", "parameters": {}, "strict": True}
    async with serving.serving(chat_template=TAKES_TOOLS) as world:
        for choice, received in (("auto", "tools[].function.strict"), ("required", None), ("none", None)):
            body = {**serving.chat("hi"), "tools": [{"type": "function", "function": function}], "tool_choice": choice}
            _, headers, _ = await world.post("/v1/chat/completions", body)
            assert headers.get("X-Ignored-Fields") == received
        _, headers, _ = await world.post("/v1/responses", {"input": "hi", "tools": [{"type": "function", **function}]})
        assert headers["X-Ignored-Fields"] == "tools[].strict"


async def test_a_format_beside_required_calls_is_reported_as_ignored() -> None:
    body = {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}
    async with serving.serving(chat_template=TAKES_TOOLS) as world:
        status, headers, _ = await world.post("/v1/chat/completions", {**serving.chat("hi"), **body})
        assert (status, headers["X-Ignored-Fields"]) == (200, "response_format")


async def test_a_grammar_allows_reasoning_before_the_constrained_answer() -> None:
    body = {"response_format": {"type": "json_object"}}
    opened = await grammar_of(body, model(chat_template="{{ messages[0].content }}</think>x<think>\n"))
    assert "preamble: thoughts" in opened.preamble
    free = await grammar_of(body, model(chat_template="{{ messages[0].content }} </think>"))
    assert free.preamble.startswith('preamble: ("<think>"')
    assert (await grammar_of(body, model())).preamble == ""


def reasoning_model(
    chat_template: str = "{{ messages[0].content }}<think>\n</think>x<think>", **settings: Any
) -> ServedModel:
    tokenizer = tiny.make_tokenizer("llama")
    tokenizer.add_tokens([transformers.AddedToken(mark, special=False) for mark in ("<think>", "</think>")])
    return ServedModel(FakeEngine(tokenizer), tokenizer, serving.options(chat_template=chat_template, **settings))


@pytest.mark.parametrize("name", REASONING_BUDGETS)
async def test_a_budget_limits_the_reasoning_by_any_of_its_names(name: str) -> None:
    made = reasoning_model()
    end = made.special["</think>"]
    for budget, limit in ((5, f"<[^{end}]>{{0,5}} <[{end}]>"), (0, f"thoughts:  <[{end}]>")):
        grammar = await grammar_of({name: budget}, made)
        assert limit in grammar.preamble
        assert grammar.text == "start: <[*]>*"
    for body in ({name: -1}, {name: made.engine.ctx_size}, {}):
        assert (await only(body, made)).grammar is None
    held = await grammar_of({name: 5, "guided_regex": "a"}, made)
    assert (held.kind, "{0,5}" in held.preamble) == ("regex", True)


async def test_the_presets_budget_holds_unless_the_request_states_another() -> None:
    made = reasoning_model(sampling='{"reasoning-budget": 7}')
    for body, limit in (({}, "{0,7}"), ({"thinking_budget": 3}, "{0,3}")):
        assert limit in (await grammar_of(body, made)).preamble
    assert (await only({"reasoning_budget": -1}, made)).grammar is None
    with pytest.raises(InvalidValue, match="mean the same but differ"):
        await only({"thinking_budget": 3, "reasoning_budget": 4}, made)


async def test_a_budget_of_zero_turns_the_switch_of_the_template_off() -> None:
    made = reasoning_model("{{ 'thinks' if enable_thinking else 'does not' }}</think>")
    generation = await only({"thinking_budget": 0}, made)
    assert made.decode(generation.prompt).startswith("does not")
    assert generation.grammar is None
    stated = await only({"thinking_budget": 0, "chat_template_kwargs": {"enable_thinking": True}}, made)
    assert made.decode(stated.prompt).startswith("thinks")
    assert stated.grammar is not None


async def test_a_budget_is_a_variable_of_a_template_that_uses_it() -> None:
    template = (
        "{% set end = '</seed:think>' %}{{ thinking_budget }}"
        "{% if thinking_budget == 0 %}<seed:think><seed:cot_budget_reflect>{% endif %}"
    )
    tokenizer = tiny.make_tokenizer("llama")
    tokenizer.add_tokens(["<seed:think>", "</seed:think>"])
    made = ServedModel(FakeEngine(tokenizer), tokenizer, serving.options(chat_template=template))
    assert made.decode((await only({"thinking_budget": 100}, made)).prompt) == "100"
    generation = await only({"thinking_budget": 0}, made)
    assert made.decode(generation.prompt) == "0<seed:think><seed:cot_budget_reflect>"
    assert generation.grammar is not None
    assert generation.grammar.text == "start: <[*]>*", "the prompt ends inside of the reasoning"


async def test_a_budget_and_a_grammar_apply_to_an_answer_in_messages() -> None:
    tokenizer = tiny.make_tokenizer("llama")
    tokenizer.add_tokens(["<|channel|>", "<|message|>", "<|end|>", "<|start|>"])
    template = "<|channel|> functions. {{ messages[0].content }}<|start|>assistant"
    made = ServedModel(FakeEngine(tokenizer), tokenizer, serving.options(chat_template=template))
    call = await openai.chat({**CHAT, "thinking_budget": 5}, made)
    grammar = call.generations[0].grammar
    assert (call.ignored, grammar is not None) == ((), True)
    assert grammar is not None
    assert "{0,5}" in grammar.preamble
    assert "final" not in grammar.preamble
    assert "final" in (await grammar_of({"guided_regex": "a"}, made)).preamble


async def test_a_budget_that_cannot_be_kept_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    call = await openai.chat({**CHAT, "thinking_budget": 5}, model())
    assert (call.ignored, call.generations[0].grammar) == (("thinking_budget",), None)
    preset = model(sampling='{"reasoning-budget": 7}')
    assert (await openai.chat(CHAT, preset)).ignored == ()
    await preset.check_grammar()
    assert "reasoning-budget has no effect" in caplog.text
    caplog.clear()
    await reasoning_model(sampling='{"reasoning-budget": 7}').check_grammar()
    assert caplog.text == ""


async def test_tool_choice_none_hides_the_tools() -> None:
    made = model(chat_template="{{ 'tools' if tools else 'none' }}")
    generation = await only({"tools": [TOOL], "tool_choice": "none"}, made)
    assert made.decode(generation.prompt) == "none"


@pytest.mark.parametrize(
    ("body", "interval"), [({}, 15.0), ({"sse_ping_interval": 2}, 2.0), ({"sse_ping_interval": -1}, None)]
)
async def test_the_request_sets_the_ping_interval(body: dict[str, Any], interval: float | None) -> None:
    assert (await openai.chat({**CHAT, **body}, model())).ping_interval == interval


async def test_a_prompt_that_fills_the_context_is_rejected_with_both_numbers() -> None:
    made = model()
    room = made.engine.ctx_size
    await openai.completions({"prompt": [5] * (room - 1)}, made)
    with pytest.raises(ContextExceeded, match=f"maximum context length is {room} tokens") as caught:
        await openai.completions({"prompt": [5] * room}, made)
    assert caught.value.extra == {"n_prompt_tokens": room, "n_ctx": room}
    assert caught.value.param == "prompt"
    with pytest.raises(ContextExceeded) as of_chat:
        await openai.chat({"messages": [{"role": "user", "content": "word " * room}]}, made)
    assert of_chat.value.param == "messages"


async def test_max_input_tokens_limits_prompts() -> None:
    message = "has 11 tokens, but this model's maximum prompt length is 10 tokens; shorten the prompt or raise max-in"
    with pytest.raises(ContextExceeded, match=message):
        await openai.completions({"prompt": [5] * 11}, model(max_input_tokens=10))
    with pytest.raises(ContextExceeded, match="raise max-input-tokens"):
        await openai.completions({"prompt": "word " * 5000}, model(max_input_tokens=10))
    with pytest.raises(ContextExceeded, match=r"maximum prompt length is 10 tokens.*raise max-input-tokens"):
        await openai.completions({"prompt": [5] * 65}, model(ctx_size=64, max_input_tokens=10))
    await openai.completions({"prompt": [5] * 10}, model(max_input_tokens=10))


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ["<s>hi"]),
        (["hi", "ho"], ["<s>hi", "<s>ho"]),
        ([0, 40, 41], ["<s>GH"]),
        ([[0, 40], [41, 42]], ["<s>G", "HI"]),
        ("", ["<s>"]),
        (["a", ""], ["<s>a", "<s>"]),
    ],
    ids=str,
)
async def test_a_prompt_has_four_forms(prompt: Any, prompts: list[str]) -> None:
    made = model()
    call = await openai.completions({"prompt": prompt}, made)
    assert [made.decode(generation.prompt) for generation in call.generations] == prompts
    assert len({generation.id for generation in call.generations}) == len(prompts)


async def test_an_empty_prompt_is_the_beginning_of_text_token() -> None:
    tokenizer = serving.bare_tokenizer()
    assert tokenizer.encode("") == []
    made = model(bare=True)
    call = await openai.completions({"prompt": ""}, made)
    assert call.generations[0].prompt == (tokenizer.bos_token_id,)


async def test_an_embedding_model_rejects_chats_and_names_its_calls() -> None:
    made = model(["embedding"])
    assert made.capabilities == ["embedding"]
    with pytest.raises(UnsupportedByModel, match="/v1/embeddings") as caught:
        await openai.chat(CHAT, made)
    assert (caught.value.status, caught.value.reason) == (501, "unsupported_by_model")
    with pytest.raises(UnsupportedByModel):
        await openai.completions({"prompt": "hi"}, made)


async def test_a_generating_model_rejects_embeddings_and_names_its_calls() -> None:
    made = model(["completion"])
    assert made.capabilities == ["chat", "completion"]
    with pytest.raises(UnsupportedByModel, match="/v1/chat/completions"):
        await embeddings.embeddings({"input": "hi"}, made)


async def test_a_model_without_a_template_does_not_chat() -> None:
    made = model(bare=True)
    assert made.capabilities == ["completion", "embedding"]
    with pytest.raises(UnsupportedByModel, match="use /v1/completions, or set chat-template"):
        await openai.chat(CHAT, made)


# Serialization of answers


async def test_the_answer_of_a_chat_has_the_format_of_the_api() -> None:
    made = model()
    call = await openai.chat({**CHAT, "model": "asked/for:this", "max_tokens": 2}, made)
    body = await whole(call, made.engine)
    prompt = len(call.generations[0].prompt)
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1.6e9
    assert body.pop("system_fingerprint").startswith("b0-")
    assert body == {
        "object": "chat.completion",
        "model": "asked/for:this",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "0 G", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": 2,
            "total_tokens": prompt + 2,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "timings": {
            "cache_n": 2,
            "prompt_n": prompt - 2,
            "prompt_ms": 500.0,
            "prompt_per_token_ms": 500.0 / (prompt - 2),
            "prompt_per_second": (prompt - 2) / 0.5,
            "predicted_n": 2,
            "predicted_ms": 250.0,
            "predicted_per_token_ms": 250.0,
            "predicted_per_second": 4.0,
        },
    }


async def test_the_stream_of_a_chat_has_the_format_of_the_api() -> None:
    made = model()
    call = await openai.chat({**CHAT, "max_tokens": 2, "stream": True}, made)
    assert call.stream
    [first, one, two, last, done] = await streamed(call, made.engine)
    choice = {"index": 0, "logprobs": None, "finish_reason": None}
    assert first["choices"] == [{**choice, "delta": {"role": "assistant", "content": None}}]
    assert one["choices"] == [{**choice, "delta": {"content": "0"}}]
    assert two["choices"] == [{**choice, "delta": {"content": " G"}}]
    assert last["choices"] == [{**choice, "delta": {}, "finish_reason": "length", "stop_reason": None}]
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in (first, one, two, last)} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in (first, one, two, last)}) == 1
    assert "usage" not in first
    assert [("timings" in chunk) for chunk in (first, one, two, last)] == [False, False, False, True]


@pytest.mark.parametrize("asked", [{"stop": ["never", "G"]}, {"stop_token_ids": [408, 5]}, {"ignore_eos": False}])
async def test_the_stop_string_or_token_that_ended_an_answer_is_named_as_in_vllm(asked: dict[str, Any]) -> None:
    made = model()
    expected = {"stop": "G", "stop_token_ids": 408, "ignore_eos": None}[next(iter(asked))]
    chat, text = {**CHAT, **asked}, {"prompt": "a", **asked}
    for call in (await openai.chat(chat, made), await openai.completions(text, made)):
        [choice] = (await whole(call, made.engine))["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", expected)
    for call in (
        await openai.chat(chat | {"stream": True}, made),
        await openai.completions(text | {"stream": True}, made),
    ):
        ends = [chunk["choices"][0] for chunk in (await streamed(call, made.engine))[:-1]]
        assert (ends[-1]["finish_reason"], ends[-1]["stop_reason"]) == ("stop", expected)
        assert not any("stop_reason" in choice for choice in ends[:-1])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_reports_prefill_progress_on_request(path: str) -> None:
    async with serving.serving() as world:
        world.engine.gate.set()
        body = serving.chat("prefill") if "chat" in path else {"prompt": "prefill it now"}
        frames = serving.chunks(await world.stream(path, {**body, "return_progress": True}))
        total = len(world.engine.requests[0].prompt)
        received = [frame["prompt_progress"] for frame in frames[:-1] if "prompt_progress" in frame]
        assert received == [
            {"total": total, "cache": 2, "processed": total // 2, "time_ms": 125.0},
            {"total": total, "cache": 2, "processed": total, "time_ms": 500.0},
        ]
        first_text = next(at for at, frame in enumerate(frames) if _text_of(frame))
        assert all("prompt_progress" not in frame for frame in frames[first_text:-1])
        assert all(frame["choices"][0]["finish_reason"] is None for frame in frames[:first_text])
        asked = {**body, "return_progress": True, "timings_per_token": True}
        timed = [each for each in serving.chunks(await world.stream(path, asked))[:-1] if "prompt_progress" in each]
        assert [(each["timings"]["cache_n"], each["timings"]["prompt_n"]) for each in timed] == [
            (2, total // 2 - 2),
            (2, total - 2),
        ]
        assert [each["timings"]["prompt_ms"] for each in timed] == [125.0, 500.0]
        plain = await world.stream(path, body)
        assert not any("prompt_progress" in frame for frame in plain)
        assert len(plain) == len(frames) - 2, "all other frames are equal"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_each_chunk_of_text_has_the_timings_so_far_on_request(path: str) -> None:
    async with serving.serving() as world:
        body = serving.chat("hello") if "chat" in path else {"prompt": "hello"}
        frames = serving.chunks(await world.stream(path, {**body, "timings_per_token": True, "n": 2}))[:-1]
        said = [frame for frame in frames if _text_of(frame)]
        counts = [frame["timings"]["predicted_n"] for frame in said]
        assert counts == sorted(counts)
        assert counts[0] == 1, "only sent tokens count"
        assert frames[-1]["timings"]["predicted_n"] > counts[0]
        whole = (await world.post(path, {**body, "n": 2}))[2]
        assert frames[-1]["timings"] == whole["timings"]
        plain = serving.chunks(await world.stream(path, {**body, "n": 2}))[:-1]
        assert ["timings" in frame for frame in plain] == [False] * (len(plain) - 1) + [True]


def _text_of(frame: Any) -> str:
    choice = frame["choices"][0]
    return choice.get("text") or choice.get("delta", {}).get("content") or ""


async def test_usage_has_its_own_chunk_on_request() -> None:
    made = model()
    body = {**CHAT, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = await streamed(await openai.chat(body, made), made.engine)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (usage["choices"], done) == ([], "[DONE]")
    assert usage["usage"]["completion_tokens"] == usage["timings"]["predicted_n"] == 2


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"n": 3},
        {"max_tokens": 6, "n": 2},
        {"stop": ["brown"], "logprobs": True, "top_logprobs": 3},
        {"stop": "🦊", "n": 2, "logprobs": True},
    ],
    ids=str,
)
async def test_chat_deltas_add_up_to_the_full_answer(body: dict[str, Any]) -> None:
    made = model()
    expected = await whole(await openai.chat({**CHAT, **body}, made), made.engine)
    chunks = await streamed(await openai.chat({**CHAT, **body, "stream": True}, made), made.engine)
    assert sum("timings" in chunk for chunk in chunks[:-1]) == 1
    for choice in expected["choices"]:
        mine = [one for chunk in chunks[:-1] for one in chunk["choices"] if one["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": None}
        assert all(one["delta"]["content"] for one in mine[1:-1])
        assert "".join(one["delta"]["content"] for one in mine[1:-1]) == choice["message"]["content"]
        assert (mine[-1]["delta"], mine[-1]["finish_reason"]) == ({}, choice["finish_reason"])
        entries = [entry for one in mine if one["logprobs"] for entry in one["logprobs"]["content"]]
        assert entries == (choice["logprobs"] or {"content": []})["content"]


@pytest.mark.parametrize("said", ANSWERS)
async def test_deltas_of_reasoning_and_calls_add_up_to_the_full_answer(said: str) -> None:
    path, body = "/v1/chat/completions", serving.chat("hi", tools=[WEATHER])
    async with serving.serving(Speaking(said), chat_template=THINKING) as world:
        message = (await world.post(path, body))[2]["choices"][0]["message"]
        *frames, _ = serving.chunks(await world.stream(path, body))
        deltas = [frame["choices"][0]["delta"] for frame in frames]
        for name in ("content", "reasoning_content"):
            assert "".join(delta.get(name) or "" for delta in deltas) == (message.get(name) or "")
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
        assert calls == [call["function"] for call in message.get("tool_calls", [])]


async def test_logprobs_hold_bytes_and_no_infinity() -> None:
    made = model()
    body = {**CHAT, "logprobs": True, "top_logprobs": 2, "max_tokens": 4}
    answer = await whole(await openai.chat(body, made), made.engine)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None  # a member that OpenAI's schema requires
    entries = logprobs["content"]
    assert [entry["token"] for entry in entries] == [
        "0",
        " G",
        "r\N{REPLACEMENT CHARACTER}",
        "\N{REPLACEMENT CHARACTER}",
    ]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "0 Grü"
    assert [top["logprob"] for top in entries[0]["top_logprobs"]] == [-2.0, None]
    assert entries[0]["logprob"] == -1.0


async def test_the_answer_of_a_completion_has_the_format_of_the_api() -> None:
    made = model()
    body = await whole(await openai.completions({"prompt": ["a", "b"], "n": 2, "max_tokens": 2}, made), made.engine)
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": index, "text": text, "logprobs": None, "finish_reason": "length", "stop_reason": None}
        for index, text in enumerate(["0 G", "1 G", "0 G", "1 G"])
    ]
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 8
    assert body["timings"]["predicted_n"] == 8


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"n": 2, "max_tokens": 5},
        {"prompt": ["one", "two"], "n": 2, "echo": True},
        {"echo": True, "logprobs": 2, "max_tokens": 6},
        {"prompt": [0, 40, 41], "echo": True, "logprobs": 0, "stop": ["世"]},
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        {"echo": True, "max_tokens": 0},
        {"prompt": "silent", "logprobs": 1},
    ],
    ids=str,
)
async def test_text_deltas_add_up_to_the_full_answer(body: dict[str, Any]) -> None:
    made, body = model(), {"prompt": "word", **body}
    expected = await whole(await openai.completions(body, made), made.engine)
    *chunks, done = await streamed(await openai.completions({**body, "stream": True}, made), made.engine)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    for choice in expected["choices"]:
        mine = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        assert (mine[-1]["text"], mine[-1]["finish_reason"]) == ("", choice["finish_reason"])
        assert [one["finish_reason"] for one in mine[:-1]] == [None] * (len(mine) - 1)
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [each for one in mine if one["logprobs"] for each in one["logprobs"][name]]
            assert joined == (choice["logprobs"] or {name: []})[name]


async def test_echo_puts_the_prompt_before_the_answer_with_its_logprobs() -> None:
    made = model()
    call = await openai.completions({"prompt": "Grün", "echo": True, "logprobs": 1, "max_tokens": 1}, made)
    assert call.generations[0].prompt_logprobs
    [choice] = (await whole(call, made.engine))["choices"]
    assert choice["text"] == "Grün0"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["<s>", "G", r"bytes:\x72\xc3", r"bytes:\xbc", "n", "0"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5, -1.0]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][-1] == {"1": -2.0, "0": -1.0}
    assert [choice["text"][offset:][:1] for offset in logprobs["text_offset"]] == ["G", "G", "r", "ü", "n", "0"]


async def test_offsets_count_special_tokens_that_the_prompt_contains() -> None:
    made = model()
    call = await openai.completions({"prompt": "a</s>b", "echo": True, "logprobs": 0, "max_tokens": 1}, made)
    [choice] = (await whole(call, made.engine))["choices"]
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "</s>", "b", "0"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 5, 6]


async def test_an_echo_without_new_tokens_scores_the_prompt() -> None:
    made = model()
    call = await openai.completions({"prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 0}, made)
    body = await whole(call, made.engine)
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert body["usage"]["completion_tokens"] == 0


async def test_best_of_returns_the_most_likely_choices() -> None:
    made = model()
    call = await openai.completions({"prompt": "a", "best_of": 3, "n": 2, "max_tokens": 2}, made)
    assert call.generations[0].n == 3
    assert isinstance(call.reply, TextWriter)
    body = await whole(call, made.engine)
    assert [(one["index"], one["text"], one["logprobs"]) for one in body["choices"]] == [
        (0, "2 G", None),
        (1, "1 G", None),
    ]
    assert body["usage"]["completion_tokens"] == 6


# Embeddings


@pytest.mark.parametrize(
    ("value", "lengths"),
    [("hi", [2]), (["hi", "hi.."], [2, 4]), ([0, 40, 41], [3]), ([[0, 40], [41]], [2, 1])],
    ids=str,
)
async def test_an_input_has_four_forms(value: Any, lengths: list[int]) -> None:
    result = await embeddings.embeddings({"input": value, "model": "m"}, model())
    assert result.body == {
        "object": "list",
        "model": "m",
        "data": [
            {"object": "embedding", "index": index, "embedding": [float(length * part) for part in (1, 2, 3, 4)]}
            for index, length in enumerate(lengths)
        ],
        "usage": {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)},
    }
    assert result.prompt_tokens == sum(lengths)


async def test_fewer_dimensions_are_truncated_and_normalized() -> None:
    result = await embeddings.embeddings({"input": "hi", "dimensions": 2}, model())
    vector = result.body["data"][0]["embedding"]
    assert vector == pytest.approx([1 / math.sqrt(5), 2 / math.sqrt(5)])


async def test_a_chat_is_embedded_as_its_template_renders_it() -> None:
    async def seen(body: dict[str, Any], **settings: Any) -> tuple[str, tuple[str, ...]]:
        made = model(**settings)
        result = await embeddings.embeddings({**CHAT, **body}, made)
        [text] = encoded(made)
        assert result.body["usage"]["prompt_tokens"] == len(text.tokens) == result.prompt_tokens
        assert [entry["index"] for entry in result.body["data"]] == [0]
        return made.decode(text.tokens), result.ignored

    assert await seen({}) == ("<s><|user|>\nhi\n", ())
    assert await seen({"add_generation_prompt": True}) == ("<s><|user|>\nhi\n<|assistant|>\n", ())
    assert await seen({"add_special_tokens": True}) == ("<s><s><|user|>\nhi\n", ())
    said = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "ho"}], "continue_final_message": True}
    assert (await seen(said))[0].endswith("ho")
    assert await seen({"chat_template_kwargs": {"tone": "low"}}, chat_template="{{ tone }}") == ("low", ())
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert await seen({"tools": tools}) == ("<s><|user|>\nhi\n", ("tools",))
    assert await seen({"tools": tools}, chat_template="{{ tools[0].function.name }}") == ("f", ())


async def test_a_chat_to_embed_is_truncated_only_on_request() -> None:
    made = model()
    long: dict[str, Any] = {"messages": [{"role": "user", "content": "word " * 500}]}
    with pytest.raises(ContextExceeded) as caught:
        await embeddings.embeddings(long, made)
    assert caught.value.param == "messages"
    result = await embeddings.embeddings({**long, "truncate_prompt_tokens": -1}, made)
    assert result.prompt_tokens == made.max_text


async def test_a_chat_that_cannot_be_embedded_is_rejected() -> None:
    with pytest.raises(InvalidValue, match="input and messages"):
        await embeddings.embeddings({**CHAT, "input": "a"}, model())
    with pytest.raises(InvalidValue, match="empty text"):
        await embeddings.embeddings(CHAT, model(chat_template="{{ '' }}"))
    with pytest.raises(UnsupportedByModel, match="input instead of messages"):
        await embeddings.embeddings(CHAT, model(bare=True))


# Speculative decoding


async def test_a_request_may_change_the_limits_of_drafts() -> None:
    made = model(ngram_size=3)
    limited = await only({"speculative.n_max": 5, "speculative.n_min": 2}, made)
    assert (limited.draft_max, limited.draft_min) == (5, 2)
    unlimited = await only({}, made)
    assert (unlimited.draft_max, unlimited.draft_min) == (None, None)
    with pytest.raises(InvalidValue, match=r"speculative\.n_max"):
        await only({"speculative.n_max": -1}, made)


async def test_limits_of_drafts_are_reported_as_ignored_without_speculative_decoding() -> None:
    call = await openai.chat({**CHAT, "speculative.n_max": 5}, model())
    assert call.ignored == ("speculative.n_max",)


async def test_usage_and_timings_count_drafted_and_accepted_tokens() -> None:
    totals = UsageTotals([GenerationRequest(id="x", prompt=(5, 6), n=2)])
    for index, (drafted, accepted) in enumerate(((8, 5), (2, 0))):
        timings = ChoiceTimings(
            prompt_tokens=2, cached_tokens=0, completion_tokens=9, prefill_seconds=0.5, decode_seconds=1.0,
            drafted_tokens=drafted, accepted_tokens=accepted,
        )  # fmt: skip
        totals.add(0, Delta(index=index, finish="stop", timings=timings))
    assert totals.timings()["draft_n"] == 10
    assert totals.timings()["draft_n_accepted"] == 5
    assert totals.usage()["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 5,
        "rejected_prediction_tokens": 5,
    }
