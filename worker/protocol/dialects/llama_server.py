"""llama-server's API: schemas of requests and responses."""

from collections.abc import Mapping

from worker.protocol.dialects.generation_fields import (
    GRAMMAR,
    MAX_CHOICES,
    MAX_SHOWN,
    MAX_TEXTS,
    NON_EMPTY_TEXT,
    SAMPLING,
)
from worker.protocol.dialects.openai import (
    ADAPTERS,
    CHAT,
    CONVERSATION,
    MAX_TOKENS_OR_ZERO,
    MODEL,
    PING_INTERVAL,
    PROMPT_NAME,
    PROMPT_PROGRESS,
    TEXTS,
    TOKENS_AND_TEXTS,
    TRUNCATION,
    skip_all_but,
)
from worker.protocol.dialects.vllm import TOKEN_COUNT
from worker.protocol.schema import (
    ANY_OBJECT,
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    WHOLE,
    Body,
    ResponseSchema,
    Schema,
    array,
    by_name,
    const,
    described,
    enum,
    flag,
    integer,
    maybe,
    one_of,
    ref,
    required,
    several,
    shape,
    text,
)

COMPLETION: Body = {
    "model": MODEL,
    **SAMPLING,
    **GRAMMAR,
    "prompt": TEXTS,
    "n_predict": MAX_TOKENS_OR_ZERO,
    "max_tokens": MAX_TOKENS_OR_ZERO,
    "n_probs": integer(0, None, "At most the model's max-logprobs."),
    "n": integer(1, MAX_CHOICES),
    "n_cmpl": integer(1, MAX_CHOICES, "The same as n."),
    "stream": flag(),
    "return_tokens": flag(),
    "return_progress": flag("Chunks contain the progress of the prompt."),
    "timings_per_token": flag("Every chunk contains timings."),
    "sse_ping_interval": PING_INTERVAL,
    "post_sampling_probs": flag("With n_probs: probabilities after all samplers."),
    "n_indent": one_of([0]),
    "response_fields": array(
        {"type": "string"},
        most=MAX_SHOWN,
        about="Fields of the response to return; `a/b` is a nested field.",
    ),
    "return_tokens_only": one_of([False]),
    "lora": ADAPTERS,
    "adapters": ADAPTERS,
}
INFILL: Body = {
    **COMPLETION,
    "prompt": text("Text with which the completion begins."),
    "input_prefix": required(text("Text before the gap.")),
    "input_suffix": required(text("Text after the gap.")),
    "input_extra": array(
        described({"text": required(text()), "filename": text()}),
        most=MAX_TEXTS,
        about="Further files, put before the prefix.",
    ),
}
TOKENIZE: Body = {
    "model": MODEL,
    "content": {"anyOf": [{"type": "string"}, {**TOKENS_AND_TEXTS, "minItems": 0}]},
    "add_special": flag(),
    "parse_special": flag("true unless stated."),
    "with_pieces": flag(),
}
DETOKENIZE: Body = {"model": MODEL, "tokens": required(array({"type": "integer", "minimum": 0}))}

EMBEDDING: Body = {
    "model": MODEL,
    "input": {**TEXTS, "anyOf": [*TEXTS["anyOf"], {"type": "null"}]},
    "content": {**TEXTS, "anyOf": [*TEXTS["anyOf"], {"type": "null"}]},
    "embd_normalize": integer(-1, 1 << 20, "-1 none, 0 largest value, 1 taxicab, 2 Euclidean."),
    "prompt_name": PROMPT_NAME,
    **TRUNCATION,
}
RERANK: Body = {
    "model": MODEL,
    "query": NON_EMPTY_TEXT,
    "documents": array(
        {"anyOf": [{"type": "string"}, described({"text": required(text())})]},
        least=1,
        most=MAX_TEXTS,
        about="Either these or `texts`.",
    ),
    "texts": array(
        {"type": "string"}, least=1, most=MAX_TEXTS, about="As in text-embeddings-inference: the answer is a bare list."
    ),
    "top_n": integer(1),
    "return_documents": flag(),
    "return_text": flag("The same as `return_documents`."),
    "raw_scores": one_of([False]),
    **TRUNCATION,
}
TEMPLATE = skip_all_but(CHAT, CONVERSATION)

MODEL_NAME: Body = {
    "model": {"type": "string", "minLength": 1},
    "extra_args": {"not": {}, "description": "Not supported: change the model's preset."},
}
DOWNLOAD: Body = {
    **MODEL_NAME,
    "model": {"type": "string", "minLength": 1, "description": "org/name, or org/name:revision."},
}

_NATIVE_FRAME: dict[str, Schema] = {
    "index": COUNT,
    "content": TEXT,
    "tokens": several(COUNT),
    "id_slot": const(-1),
    "stop": FLAG,
    "tokens_predicted": COUNT,
    "tokens_evaluated": COUNT,
}
_NATIVE_TOKEN: dict[str, Schema] = {"id": COUNT, "token": TEXT, "bytes": several(COUNT)}
_NATIVE_LOGPROB: dict[str, Schema] = {**_NATIVE_TOKEN, "logprob": maybe(NUMBER)}
_NATIVE_ODDS: dict[str, Schema] = {**_NATIVE_TOKEN, "prob": {"type": "number", "minimum": 0, "maximum": 1}}
_NATIVE_MORE: dict[str, Schema] = {
    "completion_probabilities": {
        "anyOf": [
            several(shape({**_NATIVE_LOGPROB, "top_logprobs": several(shape(_NATIVE_LOGPROB))})),
            several(shape({**_NATIVE_ODDS, "top_probs": several(shape(_NATIVE_ODDS))})),
        ]
    }
}
_NATIVE_END: dict[str, Schema] = {
    "model": TEXT,
    "prompt": TEXT,
    "generation_settings": ANY_OBJECT,
    "has_new_line": FLAG,
    "truncated": FLAG,
    "stop_type": enum("eos", "limit", "word", "none"),
    "stopping_word": TEXT,
    "tokens_cached": COUNT,
    "timings": ref("Timings"),
}
_TOKENS = shape(
    {"tokens": several({"anyOf": [COUNT, shape({"id": COUNT, "piece": {"anyOf": [TEXT, several(COUNT)]}})]})}
)
_MEMORY = by_name(shape({"estimated_mib": COUNT, "measured_mib": maybe(COUNT), "reserved_mib": COUNT}))
_PULSE = shape(
    {
        "steps": COUNT,
        "running": COUNT,
        "waiting": COUNT,
        "parallel": COUNT,
        "prefill_tokens_per_second": NUMBER,
        "decode_tokens_per_second": NUMBER,
        "cache": shape({"used": COUNT, "reusable": COUNT, "total": COUNT}),
    }
)
_SUCCESS = shape({"success": const(True)})
_HEALTH = shape({"status": TEXT}, {"model": TEXT, "message": TEXT, "waiting_for": several(TEXT), "error": ANY_OBJECT})

COMPONENTS: Mapping[str, Schema] = {
    # all optional, because of `response_fields`
    "NativeCompletion": shape({}, {**_NATIVE_FRAME, **_NATIVE_END, **_NATIVE_MORE}),
    "NativeCompletionFrame": shape(
        {}, {**_NATIVE_FRAME, **_NATIVE_END, **_NATIVE_MORE, "prompt_progress": PROMPT_PROGRESS}
    ),
    "Status": shape(
        {
            "value": enum("unloaded", "loading", "loaded", "sleeping", "downloading"),
            "args": several(TEXT),
            "pinned": FLAG,
            "in_flight": COUNT,
            "queued": COUNT,
        },
        {
            "preset": TEXT,
            "failed": const(True),
            "exit_code": WHOLE,
            "error": TEXT,
            "retry_at": NUMBER,
            "reason": TEXT,
            "since": NUMBER,
            "draining": FLAG,
            "waiting_for": TEXT,
            "progress": ANY_OBJECT,
            "replicas": shape({"ready": COUNT, "open": COUNT, "least": COUNT, "most": COUNT}),
            "pulse": _PULSE,
            "spent": by_name(NUMBER),
            "processor_seconds": NUMBER,
            "estimate": shape({"source": TEXT}, {"note": TEXT}),
            "memory": _MEMORY,
            "shares": several(TEXT),
        },
    ),
    "Model": shape(
        {
            "id": TEXT,
            "aliases": several(TEXT),
            "tags": several(TEXT),
            "object": const("model"),
            "owned_by": const("llamacpp"),
            "created": COUNT,
            "status": ref("Status"),
            "architecture": shape({"input_modalities": several(TEXT), "output_modalities": several(TEXT)}),
            "source": enum("preset", "models_dir", "cache"),
            "can_remove": FLAG,
            "capabilities": several(enum("chat", "completion", "tools", "vision", "embedding", "rerank")),
            "meta": shape(
                {},
                {
                    "vocab_type": WHOLE,
                    "n_vocab": COUNT,
                    "n_ctx": COUNT,
                    "n_ctx_train": COUNT,
                    "n_embd": COUNT,
                    "n_params": COUNT,
                    "size": COUNT,
                    "ftype": maybe(TEXT),
                },
            ),
        },
        {"parent": TEXT, "max_model_len": COUNT, "type": const("model"), "display_name": TEXT, "created_at": TEXT},
    ),
    "Reload": shape(
        {
            "added": several(TEXT),
            "changed": several(TEXT),
            "restarted": several(TEXT),
            "removed": several(TEXT),
            "warnings": several(TEXT),
        }
    ),
    "Slot": shape(
        {
            "id": COUNT,
            "model": TEXT,
            "n_ctx": COUNT,
            "id_task": WHOLE,
            "is_processing": FLAG,
            "n_prompt_tokens_left": COUNT,
            "next_token": shape({"n_decoded": COUNT, "n_remain": WHOLE}),
        }
    ),
    "Ranking": shape(
        {
            "object": const("list"),
            "model": TEXT,
            "results": several(shape({"index": COUNT, "relevance_score": NUMBER}, {"document": shape({"text": TEXT})})),
            "usage": ref("PromptUsage"),
        }
    ),
}

COMPLETION_RESPONSE = ResponseSchema(
    body={"anyOf": [ref("NativeCompletion"), several(ref("NativeCompletion"))]}, frame=ref("NativeCompletionFrame")
)
INFILL_RESPONSE = ResponseSchema(
    body={"anyOf": [ref("NativeCompletion"), several(ref("NativeCompletion"))]}, frame=ref("NativeCompletionFrame")
)
RERANK_RESPONSE = ResponseSchema(
    body={"anyOf": [ref("Ranking"), several(shape({"index": COUNT, "score": NUMBER}, {"text": TEXT}))]}
)
EMBEDDING_RESPONSE = ResponseSchema(body=several(shape({"index": COUNT, "embedding": several(several(NUMBER))})))
MODELS_RESPONSE = ResponseSchema(
    body=shape(
        {"object": const("list"), "data": several(ref("Model"))},
        {"reload": ref("Reload"), "has_more": const(False), "first_id": maybe(TEXT), "last_id": maybe(TEXT)},
    )
)
MODEL_RESPONSE = ResponseSchema(body=ref("Model"))
MODELS_SSE_RESPONSE = ResponseSchema(frame=shape({"model": TEXT, "event": TEXT, "data": ANY_OBJECT}))
DOWNLOAD_RESPONSE = ResponseSchema(body=_SUCCESS)
DELETE_RESPONSE = ResponseSchema(body=_SUCCESS)
LOAD_RESPONSE = ResponseSchema(
    body=shape(
        {"success": const(True)},
        {
            "status": ref("Status"),
            "evicted": several(shape({"model": TEXT, "reason": TEXT})),
            "load_ms": NUMBER,
        },
    )
)
UNLOAD_RESPONSE = ResponseSchema(body=_SUCCESS)
HEALTH_RESPONSE = ResponseSchema(body=_HEALTH, further={503: _HEALTH})
READY_RESPONSE = ResponseSchema(body=_HEALTH, further={503: _HEALTH})
METRICS_RESPONSE = ResponseSchema(media="text/plain")
PROPS_RESPONSE = ResponseSchema(
    body={
        "anyOf": [
            shape(
                {
                    "role": const("router"),
                    "max_instances": COUNT,
                    "models_autoload": FLAG,
                    "model_alias": TEXT,
                    "model_path": TEXT,
                    "default_generation_settings": ANY_OBJECT,
                    "ui_settings": ANY_OBJECT,
                    "build_info": TEXT,
                    "cors_proxy_enabled": const(False),
                    "memory_margin_mib": COUNT,
                }
            ),
            shape(
                {
                    "default_generation_settings": ANY_OBJECT,
                    "total_slots": COUNT,
                    "model_alias": TEXT,
                    "model_path": TEXT,
                    "modalities": by_name(FLAG),
                    "chat_template": TEXT,
                    "chat_template_caps": ANY_OBJECT,
                    "bos_token": TEXT,
                    "eos_token": TEXT,
                    "capabilities": several(TEXT),
                    "build_info": TEXT,
                    "is_sleeping": FLAG,
                    "is_loaded": FLAG,
                }
            ),
        ]
    }
)
TOKENIZE_RESPONSE = ResponseSchema(body={"anyOf": [_TOKENS, TOKEN_COUNT]})
DETOKENIZE_RESPONSE = ResponseSchema(body=shape({"content": TEXT, "prompt": TEXT}))
APPLY_TEMPLATE_RESPONSE = ResponseSchema(body=shape({"prompt": TEXT}))
SLOTS_RESPONSE = ResponseSchema(body=several(ref("Slot")))
LORA_ADAPTERS_RESPONSE = ResponseSchema(body=several(shape({"id": COUNT, "path": TEXT, "scale": NUMBER})))
STREAMS_LOOKUP_RESPONSE = ResponseSchema(body={"type": "array", "maxItems": 0})
