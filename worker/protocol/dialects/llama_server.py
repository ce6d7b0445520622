"""llama-server's API: schemas of requests and responses."""

from collections.abc import Mapping

from worker.protocol.dialects import openai
from worker.protocol.dialects.generation_fields import (
    GRAMMAR,
    MAX_CHOICES,
    MAX_SHOWN,
    MAX_TEXTS,
    NON_EMPTY_TEXT,
    SAMPLING,
    SPECULATION,
)
from worker.protocol.dialects.openai import MODEL
from worker.protocol.dialects.vllm import TOKEN_COUNT
from worker.protocol.schema import (
    ANY_OBJECT,
    COUNT,
    FLAG,
    NULL,
    NUMBER,
    TEXT,
    WHOLE,
    Body,
    ResponseSchema,
    Schema,
    any_of,
    array,
    by_name,
    const,
    described,
    enum,
    flag,
    integer,
    members,
    one_of,
    or_null,
    ref,
    required,
    several,
    shape,
    text,
)

# Fields with the name and the meaning of a field of OpenAI's text completions.
SAME_AS_OPENAI = (
    "model", "stream", "return_progress", "timings_per_token", "sse_ping_interval", "lora", "adapters", *SAMPLING,
    *SPECULATION, *GRAMMAR,
)  # fmt: skip
COMPLETION: Body = {
    **{name: openai.TEXT_COMPLETION[name] for name in SAME_AS_OPENAI},
    "prompt": openai.TEXTS,
    "n_predict": openai.MAX_TOKENS_OR_ZERO,
    "max_tokens": openai.MAX_TOKENS_OR_ZERO,
    "n_probs": integer(0, None, "At most the model's max-logprobs."),
    "n": integer(1, MAX_CHOICES),
    "n_cmpl": integer(1, MAX_CHOICES, "The same as n."),
    "return_tokens": flag(),
    "post_sampling_probs": flag("With n_probs: probabilities after all samplers."),
    "response_fields": array(TEXT, most=MAX_SHOWN, about="Fields of the response to return; `a/b` is a nested field."),
    "return_tokens_only": one_of([False]),
}
INFILL: Body = {
    **COMPLETION,
    "prompt": text("Text with which the completion begins."),
    "input_prefix": required(text("Text before the gap.")),
    "input_suffix": required(text("Text after the gap.")),
    "input_extra": array(
        described({"text": TEXT, "filename": text()}), most=MAX_TEXTS, about="Further files, put before the prefix."
    ),
}
TOKENIZE: Body = {
    "model": MODEL,
    "content": any_of(TEXT, {**openai.TOKENS_AND_TEXTS, "minItems": 0}),
    "add_special": flag(),
    "parse_special": flag("true unless stated."),
    "with_pieces": flag(),
}
DETOKENIZE: Body = {"model": MODEL, "tokens": several(COUNT)}

_TEXTS_OR_NULL: Schema = {**openai.TEXTS, "anyOf": [*openai.TEXTS["anyOf"], NULL]}
EMBEDDING: Body = {
    "model": MODEL,
    "input": _TEXTS_OR_NULL,
    "content": _TEXTS_OR_NULL,
    "embd_normalize": integer(-1, 1 << 20, "-1 none, 0 largest value, 1 taxicab, 2 Euclidean."),
    "prompt_name": openai.PROMPT_NAME,
    **openai.TRUNCATION,
}
_DOCUMENT = any_of(TEXT, described({"text": TEXT}))
RERANK: Body = {
    "model": MODEL,
    "query": NON_EMPTY_TEXT,
    "documents": array(_DOCUMENT, least=1, most=MAX_TEXTS, about="Either these or `texts`."),
    "texts": array(TEXT, least=1, most=MAX_TEXTS, about="As in text-embeddings-inference: the answer is a bare list."),
    "top_n": integer(1),
    "max_tokens_per_doc": integer(
        0, None, "The first tokens of each document that are read, as in Cohere's API; 0: all."
    ),
    "return_documents": flag(),
    "return_text": flag("The same as `return_documents`."),
    **openai.TRUNCATION,
}
TEMPLATE = openai.skip_all_but(openai.CHAT, openai.CONVERSATION)

MODEL_NAME: Body = {
    "model": NON_EMPTY_TEXT,
    "extra_args": {"not": {}, "description": "Not supported: change the model's preset."},
}
DOWNLOAD: Body = {**MODEL_NAME, "model": {**NON_EMPTY_TEXT, "description": "org/name, or org/name:revision."}}

_TOKEN: dict[str, Schema] = {"id": COUNT, "token": TEXT, "bytes": several(COUNT)}
_LOGPROB: dict[str, Schema] = {**_TOKEN, "logprob": or_null(NUMBER)}
_PROBABILITY: dict[str, Schema] = {**_TOKEN, "prob": {**NUMBER, "minimum": 0, "maximum": 1}}
# All are optional, because of `response_fields`.
_NATIVE: dict[str, Schema] = {
    **members(COUNT, "index", "tokens_predicted", "tokens_evaluated", "tokens_cached"),
    **members(TEXT, "content", "model", "prompt", "stopping_word"),
    **members(FLAG, "stop", "has_new_line", "truncated"),
    "tokens": several(COUNT),
    "id_slot": const(-1),
    "generation_settings": ANY_OBJECT,
    "stop_type": enum("eos", "limit", "word", "none"),
    "timings": ref("Timings"),
    "completion_probabilities": any_of(
        several(shape({**_LOGPROB, "top_logprobs": several(shape(_LOGPROB))})),
        several(shape({**_PROBABILITY, "top_probs": several(shape(_PROBABILITY))})),
    ),
}
_MEMORY = by_name(shape({**members(COUNT, "estimated_mib", "reserved_mib"), "measured_mib": or_null(COUNT)}))
_KV_CACHE = shape(members(COUNT, "tokens", "mib"))
_PULSE = shape(
    {
        **members(COUNT, "steps", "running", "waiting", "parallel"),
        **members(NUMBER, "prefill_tokens_per_second", "decode_tokens_per_second"),
        "cache": shape(members(COUNT, "used", "reusable", "total")),
    }
)
_META: dict[str, Schema] = {
    **members(COUNT, "n_vocab", "n_ctx", "n_ctx_train", "n_embd", "n_params", "size"),
    "vocab_type": WHOLE,
    "ftype": or_null(TEXT),
}
_HEALTH = shape({"status": TEXT}, {"model": TEXT, "message": TEXT, "waiting_for": several(TEXT), "error": ANY_OBJECT})
_RESULT = shape({"index": COUNT, "relevance_score": NUMBER}, {"document": shape({"text": TEXT})})

COMPONENTS: Mapping[str, Schema] = {
    "NativeCompletion": shape({}, _NATIVE),
    "NativeCompletionFrame": shape({}, {**_NATIVE, "prompt_progress": openai.PROMPT_PROGRESS}),
    "Status": shape(
        {
            "value": enum("unloaded", "loading", "loaded", "sleeping", "downloading"),
            "args": several(TEXT),
            "pinned": FLAG,
            **members(COUNT, "in_flight", "queued"),
        },
        {
            **members(TEXT, "preset", "error", "reason", "waiting_for"),
            **members(NUMBER, "retry_at", "since", "processor_seconds"),
            "failed": const(True),
            "exit_code": WHOLE,
            "draining": FLAG,
            "progress": ANY_OBJECT,
            "replicas": shape(members(COUNT, "ready", "open", "least", "most")),
            "pulse": _PULSE,
            "spent": by_name(NUMBER),
            "estimate": shape({"source": TEXT}, {"note": TEXT}),
            "memory": _MEMORY,
            "kv_cache": shape({"least": _KV_CACHE, "granted": or_null(_KV_CACHE), "most": _KV_CACHE}),
            "shares": several(TEXT),
        },
    ),
    "Model": shape(
        {
            "id": TEXT,
            **members(several(TEXT), "aliases", "tags"),
            "object": const("model"),
            "owned_by": const("llamacpp"),
            "created": COUNT,
            "status": ref("Status"),
            "architecture": shape(members(several(TEXT), "input_modalities", "output_modalities")),
            "source": enum("preset", "models_dir", "cache"),
            "can_remove": FLAG,
            "capabilities": or_null(several(enum("chat", "completion", "tools", "vision", "embedding", "rerank"))),
            "meta": shape({}, _META),
        },
        {
            **members(TEXT, "parent", "display_name", "created_at"),
            "max_model_len": COUNT,
            "type": const("model"),
            "lifecycle": const("active"),
        },
    ),
    "Reload": shape(members(several(TEXT), "added", "changed", "restarted", "removed", "warnings")),
    "Slot": shape(
        {
            **members(COUNT, "id", "n_ctx", "n_prompt_tokens_left", "draft_n", "draft_n_accepted"),
            "model": TEXT,
            "id_task": WHOLE,
            **members(FLAG, "is_processing", "speculative"),
            "next_token": several(shape({"has_next_token": FLAG, "n_decoded": COUNT, "n_remain": WHOLE})),
        }
    ),
    "Ranking": shape(
        {
            **members(TEXT, "id", "model"),
            "object": const("list"),
            "results": several(_RESULT),
            "usage": ref("PromptUsage"),
        }
    ),
}

COMPLETION_RESPONSE = ResponseSchema(
    body=any_of(ref("NativeCompletion"), several(ref("NativeCompletion"))), frame=ref("NativeCompletionFrame")
)
RANKING = any_of(ref("Ranking"), several(shape({"index": COUNT, "score": NUMBER}, {"text": TEXT})))
RERANK_RESPONSE = ResponseSchema(body=RANKING)
EMBEDDING_RESPONSE = ResponseSchema(body=several(shape({"index": COUNT, "embedding": several(several(NUMBER))})))
MODELS_RESPONSE = ResponseSchema(
    body=shape(
        {"object": const("list"), "data": several(ref("Model"))},
        {"reload": ref("Reload"), "has_more": const(False), **members(or_null(TEXT), "first_id", "last_id")},
    )
)
MODEL_RESPONSE = ResponseSchema(body=ref("Model"))
MODELS_SSE_RESPONSE = ResponseSchema(frame=shape({"model": TEXT, "event": TEXT, "data": ANY_OBJECT}))
# Of downloads, deletions and unloads.
SUCCESS_RESPONSE = ResponseSchema(body=shape({"success": const(True)}))
_EVICTED = several(shape({"model": TEXT, "reason": TEXT}))
LOAD_RESPONSE = ResponseSchema(
    body=shape({"success": const(True)}, {"status": ref("Status"), "evicted": _EVICTED, "load_ms": NUMBER})
)
HEALTH_RESPONSE = ResponseSchema(body=_HEALTH, further={503: _HEALTH})
METRICS_RESPONSE = ResponseSchema(media="text/plain")
_ROUTER_PROPS = shape(
    {
        "role": const("router"),
        **members(COUNT, "max_instances", "memory_margin_mib"),
        **members(TEXT, "model_alias", "model_path", "build_info"),
        **members(ANY_OBJECT, "default_generation_settings", "ui_settings"),
        "models_autoload": FLAG,
        "cors_proxy_enabled": const(False),
    }
)
_MODEL_PROPS = shape(
    {
        **members(TEXT, "model_alias", "model_path", "chat_template", "bos_token", "eos_token", "build_info"),
        **members(ANY_OBJECT, "default_generation_settings", "chat_template_caps"),
        **members(FLAG, "is_sleeping", "is_loaded"),
        "total_slots": COUNT,
        "modalities": by_name(FLAG),
        "capabilities": several(TEXT),
    }
)
PROPS_RESPONSE = ResponseSchema(body=any_of(_ROUTER_PROPS, _MODEL_PROPS))
_PIECE = shape({"id": COUNT, "piece": any_of(TEXT, several(COUNT))})
TOKENIZE_RESPONSE = ResponseSchema(body=any_of(shape({"tokens": several(any_of(COUNT, _PIECE))}), TOKEN_COUNT))
DETOKENIZE_RESPONSE = ResponseSchema(body=shape({"content": TEXT, "prompt": TEXT}))
APPLY_TEMPLATE_RESPONSE = ResponseSchema(body=shape({"prompt": TEXT}))
SLOTS_RESPONSE = ResponseSchema(body=several(ref("Slot")))
LORA_ADAPTERS_RESPONSE = ResponseSchema(body=several(shape({"id": COUNT, "path": TEXT, "scale": NUMBER})))
STREAMS_LOOKUP_RESPONSE = ResponseSchema(body={"type": "array", "maxItems": 0})
