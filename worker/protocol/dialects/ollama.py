"""Ollama's API: schemas of requests and responses."""

from collections.abc import Mapping

from worker.protocol.dialects.generation_fields import NEUTRAL, ROLES, SAMPLING, STOP, TUNING
from worker.protocol.dialects.openai import BASE64, CALL, CONTENT, IMAGES, MODEL, PING, SEEING, TEXTS, TOOLS
from worker.protocol.schema import (
    ANY_OBJECT,
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    Body,
    ResponseSchema,
    Schema,
    array,
    choice,
    const,
    described,
    enum,
    flag,
    integer,
    one_of,
    record,
    ref,
    required,
    several,
    shape,
    text,
)

_DURATION = r"^-?([0-9]+(\.[0-9]+)?|([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+)$"
KEEP_ALIVE: Schema = {
    "anyOf": [{"type": ["number", "null"]}, {"type": "string", "pattern": _DURATION}],
    "description": "Seconds that the model stays when idle, or a duration such as 5m; below 0 is for ever.",
}
OF_LOADS = (
    "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap",
    "use_mlock", "embedding_only", "num_thread", "num_keep", "penalize_newline",
)  # fmt: skip
"""Options of how a model is loaded, which presets state here, and some that do nothing."""
OPTIONS: Body = {
    **{name: schema for name, schema in TUNING.items() if name != "repetition_penalty"},
    "seed": SAMPLING["seed"],
    "stop": STOP,
    **{name: NEUTRAL[name] for name in ("typical_p", "mirostat", "mirostat_tau", "mirostat_eta")},
    "tfs_z": NEUTRAL["tfs_z"],
    "num_predict": integer(-2, None, "New tokens at most; 0, -1 and -2 are all that fit."),
    "num_ctx": integer(1, None, "Tokens of prompt and answer together, at most; never above the model's context."),
    **{name: {"description": "Presets state this; it is reported as ignored."} for name in OF_LOADS},
}
_NAMES: Body = {"model": MODEL, "name": text("What older clients call the model.")}
OLLAMA: Body = {
    **_NAMES,
    "options": record(OPTIONS),
    "stream": flag("true unless stated."),
    "sse_ping_interval": PING,
    "format": {"anyOf": [{"enum": [None, "", "json"]}, {"type": "object"}], "description": "json, or a JSON schema."},
    "think": {"anyOf": [{"type": ["boolean", "null"]}, {"enum": ["low", "medium", "high", "max"]}]},
    "truncate": flag("Reported as ignored: what is too long is refused."),
    "shift": flag("Reported as ignored: an answer ends with the context."),
    "keep_alive": KEEP_ALIVE,
    "_debug_render_only": one_of([False], "Not supported: POST /apply-template shows a chat's prompt."),
    "logprobs": flag(),
    "top_logprobs": {"description": "Alternatives for each token; read where logprobs is true."},
}
_OLLAMA_MESSAGE: Schema = {
    "anyOf": [
        {
            **described(
                {
                    "role": required(choice(ROLES)),
                    "content": CONTENT,
                    "thinking": text(),
                    "tool_name": text(),
                    "tool_call_id": text(),
                    "images": IMAGES,
                }
            ),
            "required": ["role", "content"],
        },
        {
            **described(
                {
                    "role": {"const": "assistant"},
                    "tool_calls": required(array(CALL, least=1)),
                    "content": {"anyOf": [CONTENT, {"type": "null"}]},
                    "images": IMAGES,
                }
            ),
            "required": ["role", "tool_calls"],
        },
    ]
}
OLLAMA_CHAT: Body = {**OLLAMA, "messages": array(_OLLAMA_MESSAGE), "tools": TOOLS}
OLLAMA_GENERATE: Body = {
    **OLLAMA,
    "prompt": text("None: the model is loaded, or with keep_alive 0 unloaded."),
    "system": text(),
    "raw": flag(),
    "images": array(BASE64, about=f"{SEEING} They stand before the prompt."),
    "context": array(
        {"type": "integer", "minimum": 0}, about="What an answer told as its context: the prompt goes on from there."
    ),
    "template": one_of([""]),
    "suffix": text("What follows the gap, for models that can fill one in; the prompt is what goes before it."),
}
OLLAMA_EMBED: Body = {
    **_NAMES,
    "keep_alive": KEEP_ALIVE,
    "options": record(OPTIONS),
    "input": {"anyOf": [*TEXTS["anyOf"], {"enum": [None, []]}]},
    "truncate": flag("true unless stated."),
    "dimensions": integer(0, None, "0 is all."),
}
OLLAMA_EMBEDDINGS: Body = {
    **_NAMES,
    "keep_alive": KEEP_ALIVE,
    "options": record(OPTIONS),
    "prompt": text(),
}
OLLAMA_SHOW: Body = {
    "model": text(),
    "name": text(),
}
OLLAMA_PULL: Body = {
    **OLLAMA_SHOW,
    "stream": {"type": "boolean", "description": "true unless stated."},
    "insecure": {"description": "Makes no difference: the hub is always asked as the router is set up to."},
}

_SAID: dict[str, Schema] = {
    "thinking": TEXT,
    "tool_calls": several(shape({"id": TEXT, "function": shape({"name": TEXT, "arguments": ANY_OBJECT})})),
}
_LOGPROB: dict[str, Schema] = {"token": TEXT, "logprob": NUMBER, "bytes": several(COUNT)}
_LINE: dict[str, Schema] = {"model": TEXT, "created_at": TEXT, "done": FLAG}
_END: dict[str, Schema] = {
    "done_reason": enum("stop", "length", "load", "unload"),
    "total_duration": COUNT,
    "load_duration": COUNT,
    "prompt_eval_count": COUNT,
    "prompt_eval_duration": COUNT,
    "eval_count": COUNT,
    "eval_duration": COUNT,
    "logprobs": several(shape({**_LOGPROB, "top_logprobs": several(shape(_LOGPROB))})),
}
_MESSAGE = shape({"role": const("assistant"), "content": TEXT}, _SAID)
_DETAILS = shape(
    {
        "parent_model": TEXT,
        "format": TEXT,
        "family": TEXT,
        "families": several(TEXT),
        "parameter_size": TEXT,
        "quantization_level": TEXT,
    }
)
_MODEL: dict[str, Schema] = {
    "name": TEXT,
    "model": TEXT,
    "modified_at": TEXT,
    "size": COUNT,
    "digest": TEXT,
    "details": _DETAILS,
}
_PULLED = shape({"status": TEXT}, {"digest": TEXT, "total": COUNT, "completed": COUNT})

COMPONENTS: Mapping[str, Schema] = {
    "OllamaChat": shape({**_LINE, "message": _MESSAGE}, {**_END, "response": const("")}),
    "OllamaText": shape({**_LINE, "response": TEXT}, {**_END, **_SAID, "context": several(COUNT), "message": _MESSAGE}),
    "OllamaModel": shape(_MODEL),
}

OLLAMA_CHAT_RESPONSE = ResponseSchema(body=ref("OllamaChat"), frame=ref("OllamaChat"))
OLLAMA_GENERATE_RESPONSE = ResponseSchema(body=ref("OllamaText"), frame=ref("OllamaText"))
OLLAMA_EMBED_RESPONSE = ResponseSchema(
    body=shape(
        {"model": TEXT, "embeddings": several(several(NUMBER))},
        {"total_duration": COUNT, "load_duration": COUNT, "prompt_eval_count": COUNT},
    )
)
OLLAMA_EMBEDDINGS_RESPONSE = ResponseSchema(body=shape({"embedding": several(NUMBER)}))
OLLAMA_TAGS_RESPONSE = ResponseSchema(body=shape({"models": several(ref("OllamaModel"))}))
OLLAMA_PS_RESPONSE = ResponseSchema(
    body=shape(
        {
            "models": several(
                shape(
                    {
                        **_MODEL,
                        "size_vram": COUNT,
                        "expires_at": TEXT,
                        "context_length": COUNT,
                    }
                )
            )
        }
    )
)
OLLAMA_VERSION_RESPONSE = ResponseSchema(body=shape({"version": TEXT}))
OLLAMA_SHOW_RESPONSE = ResponseSchema(
    body=shape(
        {
            "modified_at": TEXT,
            "details": _DETAILS,
            "model_info": ANY_OBJECT,
            "template": TEXT,
            "capabilities": several(TEXT),
        }
    )
)
OLLAMA_PULL_RESPONSE = ResponseSchema(body=_PULLED, frame=_PULLED)
OLLAMA_DELETE_RESPONSE = ResponseSchema(media="text/plain")
