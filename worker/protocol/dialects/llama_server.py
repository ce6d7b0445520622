"""llama-server's API: schemas of requests and responses."""

from collections.abc import Mapping

from worker.protocol import schema as s
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
from worker.protocol.schema import Body, ResponseSchema, Schema

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
    "n_probs": s.integer(0, None, "At most the model's max-logprobs."),
    "n": s.integer(1, MAX_CHOICES),
    "n_cmpl": s.integer(1, MAX_CHOICES, "The same as n."),
    "return_tokens": s.flag(),
    "post_sampling_probs": s.flag("With n_probs: probabilities after all samplers."),
    "response_fields": s.array(
        s.TEXT, most=MAX_SHOWN, about="Fields of the response to return; `a/b` is a nested field."
    ),
    "return_tokens_only": s.one_of([False]),
}
INFILL: Body = {
    **COMPLETION,
    "prompt": s.text("Text with which the completion begins."),
    "input_prefix": s.required(s.text("Text before the gap.")),
    "input_suffix": s.required(s.text("Text after the gap.")),
    "input_extra": s.array(
        s.described({"text": s.TEXT, "filename": s.text()}),
        most=MAX_TEXTS,
        about="Further files, put before the prefix.",
    ),
}
TOKENIZE: Body = {
    "model": MODEL,
    "content": s.any_of(s.TEXT, {**openai.TOKENS_AND_TEXTS, "minItems": 0}),
    "add_special": s.flag(),
    "parse_special": s.flag("true unless stated."),
    "with_pieces": s.flag(),
}
DETOKENIZE: Body = {"model": MODEL, "tokens": s.several(s.COUNT)}

_TEXTS_OR_NULL: Schema = {**openai.TEXTS, "anyOf": [*openai.TEXTS["anyOf"], s.NULL]}
EMBEDDING: Body = {
    "model": MODEL,
    "input": _TEXTS_OR_NULL,
    "content": _TEXTS_OR_NULL,
    "embd_normalize": s.integer(-1, 1 << 20, "-1 none, 0 largest value, 1 taxicab, 2 Euclidean."),
    "prompt_name": openai.PROMPT_NAME,
    **openai.TRUNCATION,
}
_DOCUMENT = s.any_of(s.TEXT, s.described({"text": s.TEXT}))
RERANK: Body = {
    "model": MODEL,
    "query": NON_EMPTY_TEXT,
    "documents": s.array(_DOCUMENT, least=1, most=MAX_TEXTS, about="Either these or `texts`."),
    "texts": s.array(
        s.TEXT, least=1, most=MAX_TEXTS, about="As in text-embeddings-inference: the answer is a bare list."
    ),
    "top_n": s.integer(1),
    "max_tokens_per_doc": s.integer(
        0, None, "The first tokens of each document that are read, as in Cohere's API; 0: all."
    ),
    "return_documents": s.flag(),
    "return_text": s.flag("The same as `return_documents`."),
    **openai.TRUNCATION,
}
TEMPLATE = openai.skip_all_but(openai.CHAT, openai.CONVERSATION)

MODEL_NAME: Body = {
    "model": NON_EMPTY_TEXT,
    "extra_args": {"not": {}, "description": "Not supported: change the model's preset."},
}
DOWNLOAD: Body = {**MODEL_NAME, "model": {**NON_EMPTY_TEXT, "description": "org/name, or org/name:revision."}}

_TOKEN: dict[str, Schema] = {"id": s.COUNT, "token": s.TEXT, "bytes": s.several(s.COUNT)}
_LOGPROB: dict[str, Schema] = {**_TOKEN, "logprob": s.or_null(s.NUMBER)}
_PROBABILITY: dict[str, Schema] = {**_TOKEN, "prob": {**s.NUMBER, "minimum": 0, "maximum": 1}}
# All are optional, because of `response_fields`.
_NATIVE: dict[str, Schema] = {
    **s.members(s.COUNT, "index", "tokens_predicted", "tokens_evaluated", "tokens_cached"),
    **s.members(s.TEXT, "content", "model", "prompt", "stopping_word"),
    **s.members(s.FLAG, "stop", "has_new_line", "truncated"),
    "tokens": s.several(s.COUNT),
    "id_slot": s.const(-1),
    "generation_settings": s.ANY_OBJECT,
    "stop_type": s.enum("eos", "limit", "word", "none"),
    "timings": s.ref("Timings"),
    "completion_probabilities": s.any_of(
        s.several(s.shape({**_LOGPROB, "top_logprobs": s.several(s.shape(_LOGPROB))})),
        s.several(s.shape({**_PROBABILITY, "top_probs": s.several(s.shape(_PROBABILITY))})),
    ),
}
_MEMORY = s.by_name(
    s.shape({**s.members(s.COUNT, "estimated_mib", "reserved_mib"), "measured_mib": s.or_null(s.COUNT)})
)
_KV_CACHE = s.shape(s.members(s.COUNT, "tokens", "mib"))
_PULSE = s.shape(
    {
        **s.members(s.COUNT, "steps", "running", "waiting", "parallel"),
        **s.members(s.NUMBER, "prefill_tokens_per_second", "decode_tokens_per_second"),
        "cache": s.shape(s.members(s.COUNT, "used", "reusable", "total")),
    }
)
_META: dict[str, Schema] = {
    **s.members(s.COUNT, "n_vocab", "n_ctx", "n_ctx_train", "n_embd", "n_params", "size"),
    "vocab_type": s.WHOLE,
    "ftype": s.or_null(s.TEXT),
}
_HEALTH = s.shape(
    {"status": s.TEXT}, {"model": s.TEXT, "message": s.TEXT, "waiting_for": s.several(s.TEXT), "error": s.ANY_OBJECT}
)
_RESULT = s.shape({"index": s.COUNT, "relevance_score": s.NUMBER}, {"document": s.shape({"text": s.TEXT})})

COMPONENTS: Mapping[str, Schema] = {
    "NativeCompletion": s.shape({}, _NATIVE),
    "NativeCompletionFrame": s.shape({}, {**_NATIVE, "prompt_progress": openai.PROMPT_PROGRESS}),
    "Status": s.shape(
        {
            "value": s.enum("unloaded", "loading", "loaded", "sleeping", "downloading"),
            "args": s.several(s.TEXT),
            "pinned": s.FLAG,
            **s.members(s.COUNT, "in_flight", "queued"),
        },
        {
            **s.members(s.TEXT, "preset", "error", "reason", "waiting_for"),
            **s.members(s.NUMBER, "retry_at", "since", "processor_seconds"),
            "failed": s.const(True),
            "exit_code": s.WHOLE,
            "draining": s.FLAG,
            "progress": s.ANY_OBJECT,
            "replicas": s.shape(s.members(s.COUNT, "ready", "open", "least", "most")),
            "pulse": _PULSE,
            "spent": s.by_name(s.NUMBER),
            "estimate": s.shape({"source": s.TEXT}, {"note": s.TEXT}),
            "memory": _MEMORY,
            "kv_cache": s.shape({"least": _KV_CACHE, "granted": s.or_null(_KV_CACHE), "most": _KV_CACHE}),
            "shares": s.several(s.TEXT),
        },
    ),
    "Model": s.shape(
        {
            "id": s.TEXT,
            **s.members(s.several(s.TEXT), "aliases", "tags"),
            "object": s.const("model"),
            "owned_by": s.const("llamacpp"),
            "created": s.COUNT,
            "status": s.ref("Status"),
            "architecture": s.shape(s.members(s.several(s.TEXT), "input_modalities", "output_modalities")),
            "source": s.enum("preset", "models_dir", "cache"),
            "can_remove": s.FLAG,
            "capabilities": s.or_null(
                s.several(s.enum("chat", "completion", "tools", "vision", "embedding", "rerank"))
            ),
            "meta": s.shape({}, _META),
        },
        {
            **s.members(s.TEXT, "parent", "display_name", "created_at"),
            "max_model_len": s.COUNT,
            "type": s.const("model"),
            "lifecycle": s.const("active"),
        },
    ),
    "Reload": s.shape(s.members(s.several(s.TEXT), "added", "changed", "restarted", "removed", "warnings")),
    "Slot": s.shape(
        {
            **s.members(s.COUNT, "id", "n_ctx", "n_prompt_tokens_left", "draft_n", "draft_n_accepted"),
            "model": s.TEXT,
            "id_task": s.WHOLE,
            **s.members(s.FLAG, "is_processing", "speculative"),
            "next_token": s.several(s.shape({"has_next_token": s.FLAG, "n_decoded": s.COUNT, "n_remain": s.WHOLE})),
        }
    ),
    "Ranking": s.shape(
        {
            **s.members(s.TEXT, "id", "model"),
            "object": s.const("list"),
            "results": s.several(_RESULT),
            "usage": s.ref("PromptUsage"),
        }
    ),
}

COMPLETION_RESPONSE = ResponseSchema(
    body=s.any_of(s.ref("NativeCompletion"), s.several(s.ref("NativeCompletion"))), frame=s.ref("NativeCompletionFrame")
)
RANKING = s.any_of(s.ref("Ranking"), s.several(s.shape({"index": s.COUNT, "score": s.NUMBER}, {"text": s.TEXT})))
RERANK_RESPONSE = ResponseSchema(body=RANKING)
EMBEDDING_RESPONSE = ResponseSchema(
    body=s.several(s.shape({"index": s.COUNT, "embedding": s.several(s.several(s.NUMBER))}))
)
MODELS_RESPONSE = ResponseSchema(
    body=s.shape(
        {"object": s.const("list"), "data": s.several(s.ref("Model"))},
        {"reload": s.ref("Reload"), "has_more": s.const(False), **s.members(s.or_null(s.TEXT), "first_id", "last_id")},
    )
)
MODEL_RESPONSE = ResponseSchema(body=s.ref("Model"))
MODELS_SSE_RESPONSE = ResponseSchema(frame=s.shape({"model": s.TEXT, "event": s.TEXT, "data": s.ANY_OBJECT}))
# Of downloads, deletions and unloads.
SUCCESS_RESPONSE = ResponseSchema(body=s.shape({"success": s.const(True)}))
_EVICTED = s.several(s.shape({"model": s.TEXT, "reason": s.TEXT}))
LOAD_RESPONSE = ResponseSchema(
    body=s.shape({"success": s.const(True)}, {"status": s.ref("Status"), "evicted": _EVICTED, "load_ms": s.NUMBER})
)
HEALTH_RESPONSE = ResponseSchema(body=_HEALTH, further={503: _HEALTH})
METRICS_RESPONSE = ResponseSchema(media="text/plain")
_ROUTER_PROPS = s.shape(
    {
        "role": s.const("router"),
        **s.members(s.COUNT, "max_instances", "memory_margin_mib"),
        **s.members(s.TEXT, "model_alias", "model_path", "build_info"),
        **s.members(s.ANY_OBJECT, "default_generation_settings", "ui_settings"),
        "models_autoload": s.FLAG,
        "cors_proxy_enabled": s.const(False),
    }
)
_MODEL_PROPS = s.shape(
    {
        **s.members(s.TEXT, "model_alias", "model_path", "chat_template", "bos_token", "eos_token", "build_info"),
        **s.members(s.ANY_OBJECT, "default_generation_settings", "chat_template_caps"),
        **s.members(s.FLAG, "is_sleeping", "is_loaded"),
        "total_slots": s.COUNT,
        "modalities": s.by_name(s.FLAG),
        "capabilities": s.several(s.TEXT),
    }
)
PROPS_RESPONSE = ResponseSchema(body=s.any_of(_ROUTER_PROPS, _MODEL_PROPS))
_PIECE = s.shape({"id": s.COUNT, "piece": s.any_of(s.TEXT, s.several(s.COUNT))})
TOKENIZE_RESPONSE = ResponseSchema(
    body=s.any_of(s.shape({"tokens": s.several(s.any_of(s.COUNT, _PIECE))}), TOKEN_COUNT)
)
DETOKENIZE_RESPONSE = ResponseSchema(body=s.shape({"content": s.TEXT, "prompt": s.TEXT}))
APPLY_TEMPLATE_RESPONSE = ResponseSchema(body=s.shape({"prompt": s.TEXT}))
SLOTS_RESPONSE = ResponseSchema(body=s.several(s.ref("Slot")))
LORA_ADAPTERS_RESPONSE = ResponseSchema(body=s.several(s.shape({"id": s.COUNT, "path": s.TEXT, "scale": s.NUMBER})))
STREAMS_LOOKUP_RESPONSE = ResponseSchema(body={"type": "array", "maxItems": 0})
