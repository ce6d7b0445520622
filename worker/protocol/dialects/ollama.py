"""Ollama's API: schemas of requests and responses."""

from collections.abc import Mapping

from worker.protocol.dialects import openai
from worker.protocol.dialects.generation_fields import ROLES, SAMPLING, STOP
from worker.protocol.schema import (
    ANY_OBJECT,
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    Body,
    ResponseSchema,
    Schema,
    any_of,
    array,
    choice,
    const,
    described,
    enum,
    flag,
    integer,
    members,
    one_of,
    or_null,
    record,
    ref,
    required,
    several,
    shape,
    text,
)

_DURATION = r"^-?([0-9]+(\.[0-9]+)?|([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+)$"
KEEP_ALIVE = any_of(
    or_null(NUMBER),
    {**TEXT, "pattern": _DURATION},
    about="Idle seconds before the model is unloaded, or a duration such as 5m; below 0 is never.",
)
# Options for loading a model, which belong to the preset here, and options without effect. Samplers that are not
# offered are among them: the example in Ollama's documentation has typical_p, and Ollama ignores the older ones.
IGNORED_OPTIONS = (
    "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap",
    "use_mlock", "embedding_only", "num_thread", "num_keep", "penalize_newline", "draft_num_predict",
    "typical_p", "tfs_z", "mirostat", "mirostat_tau", "mirostat_eta",
)  # fmt: skip
# Options with the name and the meaning of a field of OpenAI's API.
SAME_AS_OPENAI = (
    "temperature", "top_k", "top_p", "min_p", "seed", "repeat_penalty", "repeat_last_n", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
OPTIONS: Body = {
    **{name: SAMPLING[name] for name in SAME_AS_OPENAI},
    "stop": STOP,
    "num_predict": integer(-2, None, "New tokens at most; 0, -1 and -2 are all that fit."),
    "num_ctx": integer(
        1, None, "Tokens of prompt and answer together, at most. Above the model's context: reported as ignored."
    ),
    **members({"description": "Reported as ignored."}, *IGNORED_OPTIONS),
}
_NAMES: Body = {"model": openai.MODEL, "name": text("Name of the model in older clients.")}
GENERATION: Body = {
    **_NAMES,
    "options": record(OPTIONS),
    "stream": flag("true unless stated."),
    "sse_ping_interval": openai.PING_INTERVAL,
    "format": any_of(enum(None, "", "json"), ANY_OBJECT, about="json, or a JSON schema."),
    "think": any_of(flag(), enum("low", "medium", "high", "max")),
    "truncate": flag("Reported as ignored: a prompt that is too long is rejected."),
    "shift": flag("Reported as ignored: the text ends with the context."),
    "keep_alive": KEEP_ALIVE,
    "_debug_render_only": one_of([False], "Not supported: POST /apply-template shows a chat's prompt."),
    "logprobs": flag(),
    "top_logprobs": {"description": "Alternatives for each token; read where logprobs is true."},
}
_CHAT_MESSAGE = any_of(
    described(
        {
            "role": required(choice(ROLES)),
            "content": or_null(openai.CONTENT),
            **members(text(), "thinking", "tool_name", "tool_call_id"),
            "images": openai.IMAGES,
        }
    ),
    described(
        {
            "role": const("assistant"),
            "tool_calls": required(array(openai.TOOL_CALL, least=1)),
            "content": or_null(openai.CONTENT),
            "images": openai.IMAGES,
        },
        "role",
    ),
)
CHAT: Body = {**GENERATION, "messages": array(_CHAT_MESSAGE), "tools": openai.TOOLS}
GENERATE: Body = {
    **GENERATION,
    "prompt": text("None: the model is loaded, or with keep_alive 0 unloaded."),
    "system": text(),
    "raw": flag(),
    "images": openai.IMAGES,
    "context": array(COUNT, about="The `context` of an earlier response, which the prompt continues."),
    "template": one_of([""]),
    "suffix": text("What follows the gap, for models that can fill one in; the prompt is what goes before it."),
}
_EMBEDDING: Body = {**_NAMES, "keep_alive": KEEP_ALIVE, "options": record(OPTIONS)}
EMBED: Body = {
    **_EMBEDDING,
    "input": any_of(*openai.TEXTS["anyOf"], enum(None, [])),
    "truncate": flag("true unless stated."),
    "dimensions": integer(0, None, "0 is all."),
}
EMBEDDINGS: Body = {**_EMBEDDING, "prompt": text()}
SHOW: Body = members(text(), "model", "name")
PULL: Body = {
    **SHOW,
    "stream": {**FLAG, "description": "true unless stated."},
    "insecure": {"description": "No effect: the router's configuration decides how the hub is reached."},
}

_CALL = shape({"id": TEXT, "function": shape({"name": TEXT, "arguments": ANY_OBJECT})})
_GENERATED: dict[str, Schema] = {"thinking": TEXT, "tool_calls": several(_CALL)}
_LOGPROB: dict[str, Schema] = {"token": TEXT, "logprob": NUMBER, "bytes": several(COUNT)}
_LINE: dict[str, Schema] = {"model": TEXT, "created_at": TEXT, "done": FLAG}
_DURATIONS: dict[str, Schema] = members(COUNT, "total_duration", "load_duration", "prompt_eval_count")
_END: dict[str, Schema] = {
    "done_reason": enum("stop", "length", "load", "unload"),
    **_DURATIONS,
    **members(COUNT, "prompt_eval_duration", "eval_count", "eval_duration"),
    "logprobs": several(shape({**_LOGPROB, "top_logprobs": several(shape(_LOGPROB))})),
}
_MESSAGE = shape({"role": const("assistant"), "content": TEXT}, _GENERATED)
_DETAILS = shape(
    {
        **members(TEXT, "parent_model", "format", "family", "parameter_size", "quantization_level"),
        "families": several(TEXT),
    }
)
_MODEL: dict[str, Schema] = {
    **members(TEXT, "name", "model", "modified_at", "digest"),
    "size": COUNT,
    "details": _DETAILS,
}
_LOADED = shape({**_MODEL, "size_vram": COUNT, "expires_at": TEXT, "context_length": COUNT})
_PULLED = shape({"status": TEXT}, {"digest": TEXT, "total": COUNT, "completed": COUNT})

COMPONENTS: Mapping[str, Schema] = {
    "OllamaChat": shape({**_LINE, "message": _MESSAGE}, {**_END, "response": const("")}),
    "OllamaText": shape(
        {**_LINE, "response": TEXT}, {**_END, **_GENERATED, "context": several(COUNT), "message": _MESSAGE}
    ),
    "OllamaModel": shape(_MODEL),
}

CHAT_RESPONSE = ResponseSchema(body=ref("OllamaChat"), frame=ref("OllamaChat"))
GENERATE_RESPONSE = ResponseSchema(body=ref("OllamaText"), frame=ref("OllamaText"))
EMBED_RESPONSE = ResponseSchema(body=shape({"model": TEXT, "embeddings": several(several(NUMBER))}, _DURATIONS))
EMBEDDINGS_RESPONSE = ResponseSchema(body=shape({"embedding": several(NUMBER)}))
TAGS_RESPONSE = ResponseSchema(body=shape({"models": several(ref("OllamaModel"))}))
PS_RESPONSE = ResponseSchema(body=shape({"models": several(_LOADED)}))
VERSION_RESPONSE = ResponseSchema(body=shape({"version": TEXT}))
SHOW_RESPONSE = ResponseSchema(
    body=shape(
        {
            **members(TEXT, "modified_at", "template"),
            "details": _DETAILS,
            "model_info": ANY_OBJECT,
            "capabilities": several(TEXT),
        }
    )
)
PULL_RESPONSE = ResponseSchema(body=_PULLED, frame=_PULLED)
DELETE_RESPONSE = ResponseSchema(media="text/plain")
