"""Ollama's API: schemas of requests and responses."""

from collections.abc import Mapping

from worker.protocol import schema as s
from worker.protocol.dialects import openai
from worker.protocol.dialects.generation_fields import MAX_NAME_LENGTH, ROLES, SAMPLING, STOP
from worker.protocol.schema import Body, ResponseSchema, Schema

_DURATION = r"^-?([0-9]+(\.[0-9]+)?|([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+)$"
KEEP_ALIVE = s.any_of(
    s.or_null(s.NUMBER),
    {**s.TEXT, "pattern": _DURATION},
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
    "num_predict": s.integer(-2, None, "New tokens at most; 0, -1 and -2 are all that fit."),
    "num_ctx": s.integer(
        1, None, "Tokens of prompt and answer together, at most. Above the model's context: reported as ignored."
    ),
    **s.members({"description": "Reported as ignored."}, *IGNORED_OPTIONS),
}
_NAMES: Body = {"model": openai.MODEL, "name": s.text("Name of the model in older clients.", most=MAX_NAME_LENGTH)}
GENERATION: Body = {
    **_NAMES,
    "options": s.record(OPTIONS),
    "stream": s.flag("true unless stated."),
    "sse_ping_interval": openai.PING_INTERVAL,
    "format": s.any_of(s.enum(None, "", "json"), s.ANY_OBJECT, about="json, or a JSON schema."),
    "think": s.any_of(s.flag(), s.enum("low", "medium", "high", "max")),
    "truncate": s.flag("Reported as ignored: a prompt that is too long is rejected."),
    "shift": s.flag("Reported as ignored: the text ends with the context."),
    "keep_alive": KEEP_ALIVE,
    "_debug_render_only": s.one_of([False], "Not supported: POST /apply-template shows a chat's prompt."),
    "logprobs": s.flag(),
    "top_logprobs": {"description": "Alternatives for each token; read where logprobs is true."},
}
_CHAT_MESSAGE = s.any_of(
    s.described(
        {
            "role": s.required(s.choice(ROLES)),
            "content": s.or_null(openai.CONTENT),
            **s.members(s.text(), "thinking", "tool_name", "tool_call_id"),
            "images": openai.IMAGES,
        }
    ),
    s.described(
        {
            "role": s.const("assistant"),
            "tool_calls": s.required(s.array(openai.TOOL_CALL, least=1)),
            "content": s.or_null(openai.CONTENT),
            "images": openai.IMAGES,
        },
        "role",
    ),
)
_TRUNCATE = s.flag("true: the oldest turns of a chat that is too long are dropped. Unless stated, it is rejected.")
CHAT: Body = {**GENERATION, "truncate": _TRUNCATE, "messages": s.array(_CHAT_MESSAGE), "tools": openai.TOOLS}
GENERATE: Body = {
    **GENERATION,
    "prompt": s.text("None: the model is loaded, or with keep_alive 0 unloaded."),
    "system": s.text(),
    "raw": s.flag(),
    "images": openai.IMAGES,
    "context": s.array(s.COUNT, about="The `context` of an earlier response, which the prompt continues."),
    "template": s.one_of([""]),
    "suffix": s.text("What follows the gap, for models that can fill one in; the prompt is what goes before it."),
}
_EMBEDDING: Body = {**_NAMES, "keep_alive": KEEP_ALIVE, "options": s.record(OPTIONS)}
EMBED: Body = {
    **_EMBEDDING,
    "input": s.any_of(*openai.TEXTS["anyOf"], s.enum(None, [])),
    "truncate": s.flag("true unless stated."),
    "dimensions": s.integer(0, None, "0 is all."),
}
EMBEDDINGS: Body = {**_EMBEDDING, "prompt": s.text()}
SHOW: Body = s.members(s.text(), "model", "name")
PULL: Body = {
    **SHOW,
    "stream": {**s.FLAG, "description": "true unless stated."},
    "insecure": {"description": "No effect: the router's configuration decides how the hub is reached."},
}

_CALL = s.shape({"id": s.TEXT, "function": s.shape({"index": s.COUNT, "name": s.TEXT, "arguments": s.ANY_OBJECT})})
_GENERATED: dict[str, Schema] = {"thinking": s.TEXT, "tool_calls": s.several(_CALL)}
_LOGPROB: dict[str, Schema] = {"token": s.TEXT, "logprob": s.NUMBER, "bytes": s.several(s.COUNT)}
_LINE: dict[str, Schema] = {"model": s.TEXT, "created_at": s.TEXT, "done": s.FLAG}
_DURATIONS: dict[str, Schema] = s.members(s.COUNT, "total_duration", "load_duration", "prompt_eval_count")
_END: dict[str, Schema] = {
    "done_reason": s.enum("stop", "length", "load", "unload"),
    **_DURATIONS,
    **s.members(s.COUNT, "prompt_eval_duration", "eval_count", "eval_duration"),
    "logprobs": s.several(s.shape({**_LOGPROB, "top_logprobs": s.several(s.shape(_LOGPROB))})),
}
_MESSAGE = s.shape({"role": s.const("assistant"), "content": s.TEXT}, _GENERATED)
_DETAILS = s.shape(
    {
        **s.members(s.TEXT, "parent_model", "format", "family", "parameter_size", "quantization_level"),
        "families": s.several(s.TEXT),
    }
)
_MODEL: dict[str, Schema] = {
    **s.members(s.TEXT, "name", "model", "modified_at", "digest"),
    "size": s.COUNT,
    "details": _DETAILS,
}
_LOADED = s.shape({**_MODEL, "size_vram": s.COUNT, "expires_at": s.TEXT, "context_length": s.COUNT})
_PULLED = s.shape({"status": s.TEXT}, {"digest": s.TEXT, "total": s.COUNT, "completed": s.COUNT})

COMPONENTS: Mapping[str, Schema] = {
    "OllamaChat": s.shape({**_LINE, "message": _MESSAGE}, {**_END, "response": s.const("")}),
    "OllamaText": s.shape(
        {**_LINE, "response": s.TEXT}, {**_END, **_GENERATED, "context": s.several(s.COUNT), "message": _MESSAGE}
    ),
    "OllamaModel": s.shape(_MODEL),
}

CHAT_RESPONSE = ResponseSchema(body=s.ref("OllamaChat"), frame=s.ref("OllamaChat"))
GENERATE_RESPONSE = ResponseSchema(body=s.ref("OllamaText"), frame=s.ref("OllamaText"))
EMBED_RESPONSE = ResponseSchema(
    body=s.shape({"model": s.TEXT, "embeddings": s.several(s.several(s.NUMBER))}, _DURATIONS)
)
EMBEDDINGS_RESPONSE = ResponseSchema(body=s.shape({"embedding": s.several(s.NUMBER)}))
TAGS_RESPONSE = ResponseSchema(body=s.shape({"models": s.several(s.ref("OllamaModel"))}))
PS_RESPONSE = ResponseSchema(body=s.shape({"models": s.several(_LOADED)}))
VERSION_RESPONSE = ResponseSchema(body=s.shape({"version": s.TEXT}))
SHOW_RESPONSE = ResponseSchema(
    body=s.shape(
        {
            **s.members(s.TEXT, "modified_at", "template"),
            "details": _DETAILS,
            "model_info": s.ANY_OBJECT,
            "capabilities": s.several(s.TEXT),
        }
    )
)
PULL_RESPONSE = ResponseSchema(body=_PULLED, frame=_PULLED)
DELETE_RESPONSE = ResponseSchema(media="text/plain")
