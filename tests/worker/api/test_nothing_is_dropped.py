"""Every request field changes the outcome, is rejected by name, or is reported as ignored.

Each field is sent alone, and the outcome is compared with the one without it. The exceptions are listed here.
"""

import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

import ollama
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from tests import tiny
from tests.worker.fake_engine import FakeEngine
from tests.worker.serving import Serving, serving
from tests.worker.speaking import CALL, SCHEMA, TOOLS, Speaking
from worker.protocol.dialects import anthropic, openai, responses
from worker.protocol.dialects.generation_fields import NEUTRAL, NO_OPS
from worker.protocol.schema import Body

Sample = tuple[Any, Mapping[str, Any]]  # a value that makes a difference, and other fields that it needs

# fields about identity, storage or routing, on which no answer depends
SILENT = {
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "moderation", "id_slot", "cache_prompt", "n_keep", "n_discard", "n_cache_reuse",
    "backend_sampling", "cache_control",
}  # fmt: skip
# parameters of a feature that is rejected by its own field
TUNING_WHAT_IS_OFF = {
    "mirostat_tau", "mirostat_eta", "xtc_threshold", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "dry_sequence_breakers", "dynatemp_exponent", "adaptive_decay",
}  # fmt: skip
OF_A_FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
TEMPLATE = TOOLS + "{{ reasoning_effort }}{{ verbosity }}{{ colour }}{{ documents }}{{ enable_thinking }}"
HI: Any = [{"role": "user", "content": "hi"}]
STREAMS = {"stream": True}
TOOLED = {"tools": [OF_A_FUNCTION]}


def alone(**fields: Any) -> dict[str, Sample]:
    return {name: (value, {}) for name, value in fields.items()}


PICKED = alone(
    temperature=0.3, top_p=0.5, top_k=3, min_p=0.2, presence_penalty=0.5, frequency_penalty=0.5, seed=7, stop="fox"
)
TUNED = {
    **PICKED,
    **alone(repeat_penalty=1.5, repeat_last_n=9, logit_bias={"70": 5}, min_tokens=3, ignore_eos=True),
    **alone(no_repeat_ngram_size=2),
}
HELD = alone(
    response_format={"type": "json_object"}, json_schema=SCHEMA, grammar='root ::= "a"', regex="a", ebnf='root ::= "a"'
)
MEANT = alone(
    audio={"voice": "x", "format": "mp3"}, modalities=["audio"], web_search_options={}, store=True,
    prediction={"type": "content", "content": "x"}, functions=[{"name": "f"}], mirostat=2, xtc_probability=0.5,
    dry_multiplier=0.5, dynatemp_range=0.5, typical_p=0.5, typ_p=0.5, top_n_sigma=1.0,
    t_max_predict_ms=5, adaptive_target=0.5, min_keep=2,
    stop_regex="a", lora_path="x", custom_logit_processor="x", return_hidden_states=True, session_params={"id": "s"},
)  # fmt: skip
SAMPLERS: dict[str, Sample] = {"samplers": (["top_k"], {"temperature": 0.3, "top_k": 3})}
OPENAIS = {
    **TUNED,
    **HELD,
    **MEANT,
    **SAMPLERS,
    **alone(
        model="other", n=2, stream=True, max_tokens=3, max_completion_tokens=3, n_predict=3, lora="x", adapters="x"
    ),
    "stream_options": ({"include_usage": True}, STREAMS),
    "return_progress": (True, {}),
    "timings_per_token": (True, STREAMS),
    **dict.fromkeys(SILENT | TUNING_WHAT_IS_OFF, ("x", {})),
}
CHAT: dict[str, Sample] = {
    **OPENAIS,
    **alone(
        messages=[{"role": "user", "content": "ho"}], reasoning_effort="low", verbosity="high", logprobs=True,
        chat_template_kwargs={"colour": "red"}, documents=[{"text": "d"}], add_generation_prompt=False,
        tools=[OF_A_FUNCTION],
        function_call={"name": "f"}, reasoning_format="deepseek", include_obfuscation=True,
    ),
    "top_logprobs": (2, {"logprobs": True}),
    "tool_choice": ("none", TOOLED),
    "parallel_tool_calls": (False, {**TOOLED, "tool_choice": "required"}),
    "continue_final_message": (True, {"messages": [*HI, {"role": "assistant", "content": "w"}]}),
    "stream_options": ({"continuous_usage_stats": True}, STREAMS),
}  # fmt: skip
COMPLETIONS: dict[str, Sample] = {
    **OPENAIS,
    **alone(prompt="ho", echo=True, logprobs=2, suffix="x"),
    "best_of": (2, {}),
}
EMBEDDINGS: dict[str, Sample] = {
    **alone(input="ho ho", encoding_format="base64", dimensions=2, prompt_name="query", model="other", user="u"),
    **alone(messages=HI),
    "truncate": (True, {"input": "hi " * 400}),
}
RESPONSES: dict[str, Sample] = {
    **{name: PICKED[name] for name in ("temperature", "top_p")},
    **alone(
        input="ho", model="other", instructions="S", max_output_tokens=3, stream=True, store=True, background=True,
        previous_response_id="r", conversation="c", prompt={"id": "p"}, truncation="auto", text={"verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"}, max_tool_calls=1, top_logprobs=2,
        context_management=[{"type": "x"}],
        include=["reasoning.encrypted_content"], access_programs=["x"], image={"x": 1},
        tools=[{"type": "function", "name": "weather", "parameters": SCHEMA}],
    ),
    "tool_choice": ("required", {"tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}]}),
    "parallel_tool_calls": (False, {}),
    "stream_options": ({"include_obfuscation": True}, STREAMS),
    **dict.fromkeys(("user", "service_tier", "safety_identifier", "moderation"), ("x", {})),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"), ("x", {})),
    "metadata": ({"a": "b"}, {}),
}  # fmt: skip
WEATHER = {"name": "weather", "input_schema": SCHEMA}
MESSAGES: dict[str, Sample] = {
    **{name: PICKED[name] for name in ("temperature", "top_p", "top_k")},
    **alone(
        messages=[{"role": "user", "content": "ho"}], model="other", max_tokens=3, system="S", stop_sequences=["fox"],
        stream=True, thinking={"type": "disabled"}, tools=[WEATHER], container="c", mcp_servers=[{"x": 1}],
        output_config={"effort": "low"}, inference_geo="eu", speed="fast", diagnostics={"x": 1}, workspace_id="w",
        user_profile_id="u", context_management={"edits": [{"type": "x"}]}, metadata={"user_id": "x"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
    ),
    "tool_choice": ({"type": "any"}, {"tools": [WEATHER]}),
}  # fmt: skip
PLAIN = {"stream": False}
OPTIONS: dict[str, Sample] = {
    f"options.{name}": ({name: value}, {})
    for name, (value, _) in {
        **PICKED,
        **alone(
            repeat_penalty=1.5, repeat_last_n=9, num_predict=3, num_ctx=99, tfs_z=0.5, typical_p=0.5,
            mirostat=1, numa=True,
            num_batch=3, num_gpu=1, main_gpu=1, low_vram=True, f16_kv=True, logits_all=True, vocab_only=True,
            use_mmap=True, use_mlock=True, embedding_only=True, num_thread=2, num_keep=5, penalize_newline=True,
            mirostat_tau=2.0, mirostat_eta=0.5,
        ),
    }.items()
}  # fmt: skip
OLLAMAS: dict[str, Sample] = {
    **OPTIONS,
    **alone(model="other", stream=True, format="json", keep_alive=60, think=False, logprobs=True, top_logprobs=2),
}
OLLAMA_CHAT = {**OLLAMAS, **alone(messages=[{"role": "user", "content": "ho"}], tools=[OF_A_FUNCTION])}
OLLAMA_GENERATE = {
    **OLLAMAS,
    **alone(
        prompt="ho", suffix="x", system="S", template="t", context=[1], raw=True, images=["aGk="], width=1, height=1,
        steps=1,
    ),
}  # fmt: skip
OLLAMA_EMBED: dict[str, Sample] = {
    **OPTIONS,
    **alone(model="other", input="ho ho", dimensions=2, keep_alive=60),
    "truncate": (True, {"input": "hi " * 400, "truncate": False}),
}
OLLAMA_EMBEDDINGS: dict[str, Sample] = {**OPTIONS, **alone(prompt="ho ho", keep_alive=60)}
COMPLETION: dict[str, Sample] = {
    **TUNED,
    **{name: HELD[name] for name in ("json_schema", "grammar")},
    **SAMPLERS,
    **{name: MEANT[name] for name in MEANT if name not in ("audio", "modalities", "functions", "prediction")},
    **alone(
        prompt="ho", n_predict=3, n_indent=2, n_cmpl=2, n_probs=2, return_tokens=True, response_fields=["content"],
        t_max_prompt_ms=5, grammar_lazy=True, grammar_triggers=[{"type": 0}], preserved_tokens=["x"], stream=True,
        return_progress=True, timings_per_token=True, image_data=[{"data": "x"}], lora=[{"id": 0, "scale": 0.5}],
        penalize_nl=True, chat_format=1, verbose=True,
    ),
    "post_sampling_probs": (True, {"n_probs": 2}),
    **alone(**{f"speculative.{name}": 3 for name in ("n_max", "n_min", "p_min", "type")}),
    **dict.fromkeys(("id_slot", "cache_prompt", "n_keep", "n_discard", "n_cache_reuse", "backend_sampling"), (1, {})),
    **dict.fromkeys(TUNING_WHAT_IS_OFF, (1, {})),
}  # fmt: skip
INVOCATIONS: dict[str, Sample] = {
    **alone(inputs="ho", stream=True, adapters="x"),
    **{
        f"parameters.{name}": ({"do_sample": True, name: value}, {"parameters": {"do_sample": True}})
        for name, value in {
            "temperature": 0.3, "top_k": 3, "top_p": 0.5, "min_p": 0.2, "repetition_penalty": 1.5, "seed": 7,
            "presence_penalty": 0.5, "frequency_penalty": 0.5, "max_new_tokens": 3,
            "stop_sequences": ["fox"], "stop": ["fox"],
            "ignore_eos_token": True, "details": True, "return_full_text": True, "num_beams": 2, "typical_p": 0.5,
            "watermark": True, "truncate": 1, "best_of": 2, "n": 2, "stop_token_ids": [70], "min_tokens": 3,
            "include_stop_str_in_output": True, "skip_special_tokens": False, "logit_bias": {"70": 5},
            "decoder_input_details": True, "prompt_logprobs": 1, "top_n_tokens": 2, "logprobs": 2,
            "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}, "guided_json": {},
            "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": 'root ::= "a"',
        }.items()
    },
    **{
        f"parameters.{name}": ({"details": True, name: value}, {"parameters": {"details": True}})
        for name, value in {
            "decoder_input_details": True, "prompt_logprobs": 1, "top_n_tokens": 2, "logprobs": 2,
        }.items()
    },
    "parameters.do_sample": ({"do_sample": True}, {}),
}  # fmt: skip
ERICLLM: dict[str, Sample] = alone(
    prompt="ho", max_tokens=3, temperature=0.3, top_k=3, top_p=0.4, token_repetition_penalty=1.5, stop="fox",
    n=2, min_p=0.2,
    skip_special_tokens=False, top_a=0.5, filters=["x"], typical=0.5,
)  # fmt: skip
FASTCHAT: dict[str, Sample] = alone(
    prompt="ho", temperature=0.3, top_p=0.5, top_k=3, repetition_penalty=1.5, presence_penalty=0.5,
    frequency_penalty=0.5,
    max_new_tokens=3, stop="fox", stop_token_ids=[70], echo=False, logprobs=2, best_of=2, use_beam_search=True, seed=7,
    images=["aGk="], context_len=9, stop_str="fox",
)  # fmt: skip
RERANK: dict[str, Sample] = {
    **alone(documents=["a b c", "d"], top_n=1, return_documents=True, return_text=True, raw_scores=True, model="other"),
    **alone(query="ho ho", rank_fields=["x"], priority=3),
    "max_tokens_per_doc": (1, {"documents": ["a b c", "d"]}),
    "truncate": (True, {"documents": ["hi " * 400], "truncate": False}),
}
EMBEDDING: dict[str, Sample] = {
    **alone(prompt_name="query", encoding_format="base64", dimensions=2),
    "truncate": (True, {"content": "hi " * 400, "truncate": False}),
}

TOKENS: dict[str, Sample] = {
    **alone(prompt="ho", add_special_tokens=False, return_token_strs=True),
    "with_pieces": (True, {}),
}
SCORE: dict[str, Sample] = {
    **alone(text_1="ho", text_2="ho ho", model="other", use_activation=False),
    "truncate": (True, {"text_1": "hi " * 400}),
    "queries": ("ho", {}),
}
COHERE: dict[str, Sample] = {
    **alone(
        texts=["ho"], input_type="search_query", embedding_types=["base64"], output_dimension=2,
        images=["aGk="], truncate="START", inputs=[{"content": "ho"}],
    ),
    "max_tokens": (9, {"texts": ["hi " * 40]}),
}  # fmt: skip

CALLS: dict[str, tuple[dict[str, Any], dict[str, Sample]]] = {
    "/v1/chat/completions": ({"messages": HI}, CHAT),
    "/v1/completions": ({"prompt": "hi"}, COMPLETIONS),
    "/v1/embeddings": ({"input": "hi"}, EMBEDDINGS),
    "/v1/responses": ({"input": "hi"}, RESPONSES),
    "/v1/messages": ({"messages": HI}, MESSAGES),
    "/api/chat": ({"messages": HI, **PLAIN}, OLLAMA_CHAT),
    "/api/generate": ({"prompt": "hi", **PLAIN}, OLLAMA_GENERATE),
    "/api/embed": ({"input": "hi"}, OLLAMA_EMBED),
    "/api/embeddings": ({"prompt": "hi"}, OLLAMA_EMBEDDINGS),
    "/completion": ({"prompt": "hi"}, COMPLETION),
    "/tokenize": ({"prompt": "hi"}, TOKENS),
    "/v1/score": ({"text_1": "hi", "text_2": "ho"}, SCORE),
    "/v2/embed": ({"texts": ["hi"]}, COHERE),
    "/embedding": ({"content": "hi"}, EMBEDDING),
    "/v1/rerank": ({"query": "hi", "documents": ["a", "b"]}, RERANK),
    "/invocations": ({"inputs": "hi"}, INVOCATIONS),
    "/generate": ({"prompt": "hi"}, ERICLLM),
    "/worker_generate": ({"prompt": "hi"}, FASTCHAT),
}
_OF_THE_MOMENT = re.compile(rb'"(id|item_id|created|created_at|completed_at|total_duration)":("[^"]*"|[0-9.]+)')


async def outcome(world: Serving, path: str, body: Mapping[str, Any]) -> tuple[int, bytes, set[str], Any]:
    """Return the status, the answer without time-dependent fields, the ignored fields, and the engine's requests."""
    world.engine.requests.clear()
    world.engine.texts.clear()
    async with world.client.post(world.url + path, data=json.dumps(body)) as answer:
        received = _OF_THE_MOMENT.sub(b"", await answer.read())
        ignored = set(filter(None, answer.headers.get("X-Ignored-Fields", "").split(",")))
    asked = [re.sub(r"id='[^']*'", "", repr(request)) for request in world.engine.requests]
    return answer.status, received, ignored, (asked, world.engine.texts[:], world.events[-1].keep_alive)


@pytest.mark.parametrize("path", CALLS)
async def test_every_field_has_an_effect_or_is_reported_or_rejected(path: str) -> None:
    base, samples = CALLS[path]
    tokenizer = tiny.make_tokenizer("llama")
    engine = FakeEngine(tokenizer, capabilities=("completion", "embedding", "rerank"))
    silent = []
    async with serving(engine, chat_template=TEMPLATE) as world:
        for name, (value, beside) in samples.items():
            field = name.partition(".")[0] if name.startswith(("options.", "parameters.")) else name
            without = await outcome(world, path, {**base, **beside})
            status, received, ignored, asked = await outcome(world, path, {**base, **beside, field: value})
            assert status in (200, 400), (name, received)
            assert without[0] == 200 or status == 200, (name, without)
            refused = status == 400 and name.rpartition(".")[2].encode() in received
            assert status == 200 or refused or without[0] == 400, (name, received)
            reported = any(each.startswith(name) for each in ignored - without[2])
            if not (refused or reported or (status, received, asked) != (without[0], without[1], without[3])):
                silent.append(name)
    allowed = SILENT | TUNING_WHAT_IS_OFF | {f"options.{name}" for name in TUNING_WHAT_IS_OFF}
    assert set(silent) <= allowed


# top-level fields of the official clients that are unknown here and therefore reported as ignored
REPORTED = {
    "max_tool_calls", "context_management", "speed", "inference_geo", "diagnostics", "user_profile_id", "workspace_id",
    "access_programs", "image", "prediction",
}  # fmt: skip


@pytest.mark.parametrize(
    ("client", "samples", "known"),
    [
        (chat_create_params.CompletionCreateParamsBase, CHAT, openai.CHAT),
        (completion_create_params.CompletionCreateParamsBase, COMPLETIONS, openai.COMPLETIONS),
        (embedding_create_params.EmbeddingCreateParams, EMBEDDINGS, openai.EMBEDDINGS),
        (response_create_params.ResponseCreateParamsBase, RESPONSES, responses.RESPONSES),
        (message_create_params.MessageCreateParamsBase, MESSAGES, anthropic.MESSAGES),
        (message_count_tokens_params.MessageCountTokensParams, MESSAGES, anthropic.COUNT_TOKENS),
    ],
)
def test_the_samples_and_the_schemas_cover_the_official_clients(
    client: Any, samples: dict[str, Sample], known: Body
) -> None:
    fields = set(client.__annotations__)
    assert len(fields) > 4
    assert fields <= samples.keys()
    assert fields - known.keys() - NO_OPS.keys() - NEUTRAL.keys() <= REPORTED


@pytest.mark.parametrize(
    ("method", "samples"),
    [
        (ollama.Client.chat, OLLAMA_CHAT),
        (ollama.Client.generate, OLLAMA_GENERATE),
        (ollama.Client.embed, OLLAMA_EMBED),
        (ollama.Client.embeddings, {**OLLAMA_EMBEDDINGS, "model": ("other", {})}),
    ],
)
def test_the_samples_cover_ollamas_client(method: Any, samples: dict[str, Sample]) -> None:
    fields = set(inspect.signature(method).parameters) - {"self", "options"}
    assert len(fields) > 1
    assert fields <= samples.keys()
    assert {f"options.{name}" for name in ollama.Options.model_fields} <= OPTIONS.keys()


async def test_every_member_of_ollamas_message_reaches_the_template() -> None:
    message = ollama.Message(
        role="assistant",
        content="said",
        thinking="thought",
        tool_calls=[
            ollama.Message.ToolCall(
                function=ollama.Message.ToolCall.Function(name="weather", arguments={"city": "Oslo"})
            )
        ],
        tool_name="named",
    )
    assert message.model_fields_set | {"images"} == set(ollama.Message.model_fields)
    template = (
        "{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}{{ m.name }}{{ m.tool_calls }}{% endfor %}"
    )
    engine = Speaking("fine")
    async with serving(engine, chat_template=template) as world:
        body = {"messages": [message.model_dump(exclude_none=True), *HI], **PLAIN}
        _, headers, _ = await world.post("/api/chat", body)
        assert "X-Ignored-Fields" not in headers
        assert all(word in engine.prompt() for word in ("said", "thought", "named", "weather", "Oslo"))
        assert CALL not in engine.prompt()
