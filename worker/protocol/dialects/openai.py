"""OpenAI's API: schemas of requests and responses."""

from collections.abc import Mapping

from worker.protocol.dialects.generation_fields import (
    EFFORTS,
    GRAMMAR,
    MAX_CHOICES,
    MAX_TEXTS,
    MAX_TOOLS,
    NO_EFFECT,
    ROLES,
    SAMPLING,
    VERBOSITIES,
)
from worker.protocol.schema import (
    ANYTHING,
    COUNT,
    NUMBER,
    TEXT,
    Body,
    ResponseSchema,
    Schema,
    array,
    by_name,
    choice,
    const,
    described,
    enum,
    flag,
    integer,
    maybe,
    one_of,
    or_null,
    record,
    ref,
    required,
    several,
    shape,
    text,
)

STREAM_OPTIONS: Body = {
    "include_usage": flag(),
    "continuous_usage_stats": flag("With include_usage: every chunk contains the usage so far."),
    "include_obfuscation": flag("Reported as ignored if true: nothing is added to chunks."),
}
PING_INTERVAL: Schema = {
    "anyOf": [{"type": "number", "minimum": 0.01, "maximum": 86400}, {"const": -1}, {"type": "null"}],
    "description": "Seconds of silence in a stream before a comment; -1 is never.",
}
MODEL: Schema = text("Id or alias; required if several models are configured and none is the default.")
MAX_TOKENS: Schema = {
    "anyOf": [{"type": "integer", "minimum": 1}, {"const": -1}, {"type": "null"}],
    "description": "New tokens at most; -1 is all that fits.",
}
MAX_TOKENS_OR_ZERO: Schema = integer(-1, None, "New tokens at most; -1 is all that fits.")
_SCALE: Schema = {"type": "number", "minimum": -1e6, "maximum": 1e6}
ADAPTERS: Schema = {
    "anyOf": [
        {"type": ["string", "null"]},
        {"type": "array", "items": {"type": "string"}},
        {
            "type": "array",
            "items": {
                "anyOf": [
                    {**described({"id": {"type": "integer", "minimum": 0}, "scale": _SCALE}), "required": ["id"]},
                    {**described({"name": {"type": "string", "minLength": 1}, "scale": _SCALE}), "required": ["name"]},
                ]
            },
        },
    ],
    "description": "A LoRA adapter by name, one for each of several prompts, or one with its scale, by name or by its"
    " place in GET /lora-adapters. Empty is none.",
}
TOKENS_AND_TEXTS: Schema = {
    "type": "array",
    "items": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]},
    "minItems": 1,
}
_PART: Schema = described({"type": {"const": "text"}, "text": required(text())})
# Objects that llama-server accepts in place of a text.
TEXT_OBJECTS: tuple[Schema, ...] = (
    described({"prompt_string": required(text()), "multimodal_data": one_of([[]], "Not supported: send a chat.")}),
    described({"content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "minItems": 1}]}}),
)
TEXTS: Schema = {
    "anyOf": [
        {"type": "string"},
        TOKENS_AND_TEXTS,
        *TEXT_OBJECTS,
        {
            "type": "array",
            "items": {"anyOf": [{"type": "string"}, TOKENS_AND_TEXTS, *TEXT_OBJECTS]},
            "minItems": 1,
            "maxItems": MAX_TEXTS,
        },
    ],
    "description": "A text, several, token ids, or several arrays of them; texts may stand between token ids, and in"
    " objects of a prompt_string or of content.",
}
MAX_ENDS = 128
# vLLM's fields for details about tokens in the response.
TOKEN_DETAILS: Body = {
    "prompt_logprobs": integer(0, None, "At most the model's max-logprobs; not in streams."),
    "return_token_ids": flag("Prompt and completion are also returned as token ids."),
    "return_tokens_as_token_ids": flag("Logprobs name tokens as token_id:N."),
}
COMMON: Body = {
    "model": MODEL,
    **SAMPLING,
    **GRAMMAR,
    "max_tokens": MAX_TOKENS,
    "max_completion_tokens": MAX_TOKENS,
    "n_predict": MAX_TOKENS,
    "n": integer(1, MAX_CHOICES),
    "stream": flag(),
    "stream_options": record(STREAM_OPTIONS, "Only with stream: true."),
    **TOKEN_DETAILS,
    "stop_token_ids": array({"type": "integer", "minimum": 0}, most=MAX_ENDS, about="Token ids that end the text."),
    "include_stop_str_in_output": flag("The stop string is part of the text."),
    "skip_special_tokens": flag("true unless stated."),
    "truncate_prompt_tokens": {
        "anyOf": [{"type": "integer", "minimum": 1}, {"const": -1}, {"type": "null"}],
        "description": "Truncate a longer prompt to this many tokens, the last ones by default; -1 is all that fit.",
    },
    "truncation_side": choice(("left", "right"), "Where truncate_prompt_tokens cuts; left unless stated."),
    "cache_salt": text("The prefix cache is shared only with requests of the same salt."),
    "return_progress": flag("Chunks contain the progress of the prompt."),
    "timings_per_token": flag("Every chunk contains timings."),
    "sse_ping_interval": PING_INTERVAL,
}
ALLOWED_MODES = ("auto", "required")
_FUNCTION: Schema = described(
    {
        "name": required(text()),
        "description": ANYTHING,
        "parameters": {"description": "A JSON schema, an object; read where calls are held to it."},
        "strict": {
            "description": "true: arguments satisfy the parameters, where calls are held to them; else reported."
        },
    }
)
TOOLS: Schema = array(
    {**described({"type": {"const": "function"}, "function": _FUNCTION}), "required": ["type", "function"]},
    most=MAX_TOOLS,
)
TOOL_CHOICE: Schema = {
    "anyOf": [
        {"enum": [None, "none", "auto", "required"]},
        {
            **described({"type": {"const": "function"}, "function": described({"name": required(text())})}),
            "required": ["type", "function"],
        },
        described(
            {
                "type": {"enum": ["allowed_tools"]},
                "allowed_tools": described(
                    {
                        "mode": required(choice(ALLOWED_MODES)),
                        "tools": required(
                            array(
                                {
                                    **described({"type": {"const": "function"}, "function": _FUNCTION}),
                                    "required": ["type", "function"],
                                },
                                least=1,
                                about="By their names; others are not shown to the model.",
                            )
                        ),
                    }
                ),
            }
        ),
    ]
}
# Cache markers of clients. No effect: common prompt prefixes are cached automatically.
CACHE_HINTS: Body = {"cache_control": NO_EFFECT, "prompt_cache_breakpoint": NO_EFFECT}
# Parts of the content of a message.
CONTENT_PARTS: tuple[Schema, ...] = (
    {**described({"type": {"const": "text"}, "text": required(text()), **CACHE_HINTS}), "required": ["type", "text"]},
    {
        **described({"type": {"const": "refusal"}, "refusal": required(text()), **CACHE_HINTS}),
        "required": ["type", "refusal"],
    },
)
DETAILS = ("auto", "low", "high", "original")
VISION_ONLY = "For models whose input_modalities contain image."
DATA_URL: Schema = {
    "type": "string",
    "pattern": "^data:image/",
    "description": "A data URL in base64, of a PNG, JPEG, WebP or GIF; nothing is fetched.",
}
BASE64: Schema = {"type": "string", "contentEncoding": "base64"}
_IMAGE_PART: Schema = {
    **described(
        {
            "type": {"const": "image_url"},
            "image_url": described({"url": DATA_URL, "detail": choice(DETAILS, "Reported as ignored.")}),
            **CACHE_HINTS,
        }
    ),
    "required": ["type", "image_url"],
    "description": f"{VISION_ONLY} In messages of the user.",
}
IMAGES: Schema = {
    "anyOf": [{"type": "array", "items": BASE64}, {"enum": [None, "", 0, False, {}]}],
    "description": f"{VISION_ONLY} They stand before the text.",
}
CONTENT: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [*CONTENT_PARTS, _IMAGE_PART]}}]}
TOOL_CALL: Schema = described(
    {
        "id": ANYTHING,
        "type": ANYTHING,
        "index": NO_EFFECT,
        "function": described(
            {
                "name": required(text()),
                "arguments": {"anyOf": [{"type": ["string", "null", "object"]}, {"enum": [0, False, []]}]},
            }
        ),
    }
)
_MESSAGE: Body = {
    "role": required(choice(ROLES)),
    "content": {"anyOf": [CONTENT, {"type": "null"}]},
    "name": text(),
    "tool_call_id": text(),
    "reasoning_content": text(),
    "audio": one_of([]),
    "function_call": one_of([]),
}
_OF_ASSISTANT: Body = {
    **_MESSAGE,
    "role": {"const": "assistant"},
    "refusal": text("Used as content if there is no other."),
    "reasoning": text("The same as reasoning_content."),
    "annotations": NO_EFFECT,
    "tool_calls": array(TOOL_CALL),
}
MESSAGE: Schema = {
    "anyOf": [
        {**described({**_MESSAGE, "content": CONTENT}), "required": ["role", "content"]},
        {
            **described({**_MESSAGE, "reasoning_content": required(text())}),
            "required": ["role", "reasoning_content"],
        },
        {
            **described({**_OF_ASSISTANT, "tool_calls": required(array(TOOL_CALL, least=1))}),
            "required": ["role", "tool_calls"],
        },
        *(
            {**described({**_OF_ASSISTANT, name: required(text())}), "required": ["role", name]}
            for name in ("refusal", "reasoning")
        ),
    ],
}
MESSAGES: Schema = required(array(MESSAGE, least=1))
# Fields that determine the prompt of a chat.
CONVERSATION: Body = {
    "messages": MESSAGES,
    "tools": TOOLS,
    "documents": array({"type": "object"}, about="For chat templates that use documents."),
    "chat_template_kwargs": or_null({"type": "object", "description": "Variables of the chat template."}),
    "reasoning_effort": choice(EFFORTS, "none: reasoning is off, if the chat template has a switch."),
    "verbosity": choice(VERBOSITIES),
    "add_generation_prompt": flag(),
    "continue_final_message": flag(),
}
TOOL_USE: Body = {"tool_choice": TOOL_CHOICE, "parallel_tool_calls": flag()}
CHAT: Body = {
    **COMMON,
    **CONVERSATION,
    **TOOL_USE,
    "logprobs": flag(),
    "top_logprobs": integer(0, None, "At most the model's max-logprobs."),
    "reasoning_format": choice(("none", "auto", "deepseek")),
    "include_reasoning": flag("false: the reasoning is omitted."),
    "add_special_tokens": one_of([False], "Not supported: the chat template adds them."),
    "adapters": ADAPTERS,
    "lora": ADAPTERS,
}


def skip_all_but(body: Body, *read: Body) -> Body:
    """Return `body` for a route that reads only the fields in `read`; all others accept any value."""
    names = {name for fields in read for name in fields}
    return {name: schema if name in names else ANYTHING for name, schema in body.items()}


CHAT_TOKENS = skip_all_but(CHAT, CONVERSATION, TOOL_USE)
# Fields of a text completion that other dialects share.
TEXT_COMPLETION: Body = {**COMMON, "prompt": TEXTS, "logprobs": integer(0, None, "At most the model's max-logprobs.")}
COMPLETIONS: Body = {
    **TEXT_COMPLETION,
    "max_tokens": MAX_TOKENS_OR_ZERO,
    "max_completion_tokens": MAX_TOKENS_OR_ZERO,
    "n_predict": MAX_TOKENS_OR_ZERO,
    "add_special_tokens": flag("Add the tokenizer's special tokens to the prompt; true unless stated."),
    "suffix": text("What follows the gap, for models that can fill one in."),
    "echo": flag(),
    "best_of": integer(1, MAX_CHOICES),
    "adapters": ADAPTERS,
    "lora": ADAPTERS,
}
_TRUNCATE: Schema = {
    "anyOf": [{"type": ["boolean", "null"]}, {"type": "string", "pattern": "^([Nn][Oo][Nn][Ee]|[Ee][Nn][Dd])$"}],
    "description": "Truncate texts that are too long instead of rejecting them.",
}
_CUT: Schema = one_of([-1], "The same as `truncate`; other numbers are not supported.")
_CUT_SIDE: Schema = one_of(["right"], "Where `truncate_prompt_tokens` cuts: only the end is supported.")
# Truncation of texts that are too long.
TRUNCATION: Body = {"truncate": _TRUNCATE, "truncate_prompt_tokens": _CUT, "truncation_side": _CUT_SIDE}
PROMPT_NAME: Schema = text("Name of one of the model's instructions, which is put before each text.")
EMBEDDINGS: Body = {
    "model": MODEL,
    "input": TEXTS,
    "encoding_format": choice(("float", "base64")),
    "dimensions": integer(1),
    "prompt_name": PROMPT_NAME,
    **TRUNCATION,
}

_TOP = shape({"token": TEXT, "logprob": maybe(NUMBER), "bytes": several(COUNT)})
TOKEN_LOGPROBS = several(
    shape({"token": TEXT, "logprob": maybe(NUMBER), "bytes": several(COUNT), "top_logprobs": several(_TOP)})
)
_LOGPROBS = maybe(shape({"content": TOKEN_LOGPROBS}))
_LEGACY_LOGPROBS = maybe(
    shape(
        {
            "tokens": several(TEXT),
            "token_logprobs": several(maybe(NUMBER)),
            "top_logprobs": several(maybe(by_name(maybe(NUMBER)))),
            "text_offset": several(COUNT),
        }
    )
)
_PROMPT_LOGPROBS = several(
    maybe(by_name(shape({"logprob": maybe(NUMBER), "rank": maybe(COUNT), "decoded_token": TEXT})))
)
_IDS = several(COUNT)
PROMPT_PROGRESS = shape({"total": COUNT, "cache": COUNT, "processed": COUNT, "time_ms": NUMBER})
_CALLED_FUNCTION = shape({"name": TEXT, "arguments": TEXT})
_CALL = shape({"id": TEXT, "type": const("function"), "function": _CALLED_FUNCTION})
_FINISH = enum("stop", "length", "tool_calls")
_HEAD: dict[str, Schema] = {"id": TEXT, "created": COUNT, "model": TEXT, "system_fingerprint": TEXT}

COMPONENTS: Mapping[str, Schema] = {
    "Usage": shape(
        {
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "total_tokens": COUNT,
            "prompt_tokens_details": shape({"cached_tokens": COUNT}),
            "completion_tokens_details": shape({"reasoning_tokens": COUNT}),
        }
    ),
    "PromptUsage": shape({"prompt_tokens": COUNT, "total_tokens": COUNT}),
    "Timings": shape(
        {
            "cache_n": COUNT,
            "prompt_n": COUNT,
            "prompt_ms": NUMBER,
            "prompt_per_token_ms": NUMBER,
            "prompt_per_second": NUMBER,
            "predicted_n": COUNT,
            "predicted_ms": NUMBER,
            "predicted_per_token_ms": NUMBER,
            "predicted_per_second": NUMBER,
        }
    ),
    "ChatCompletion": shape(
        {
            **_HEAD,
            "object": const("chat.completion"),
            "choices": several(
                shape(
                    {
                        "index": COUNT,
                        "message": shape(
                            {"role": const("assistant"), "content": maybe(TEXT)},
                            {"reasoning_content": TEXT, "tool_calls": several(_CALL)},
                        ),
                        "logprobs": _LOGPROBS,
                        "finish_reason": _FINISH,
                    },
                    {"token_ids": _IDS},
                )
            ),
            "usage": ref("Usage"),
            "timings": ref("Timings"),
        },
        {"prompt_logprobs": _PROMPT_LOGPROBS, "prompt_token_ids": _IDS},
    ),
    "ChatCompletionChunk": shape(
        {
            **_HEAD,
            "object": const("chat.completion.chunk"),
            "choices": several(
                shape(
                    {
                        "index": COUNT,
                        "delta": shape(
                            {},
                            {
                                "role": const("assistant"),
                                "content": maybe(TEXT),
                                "reasoning_content": TEXT,
                                "tool_calls": several(
                                    shape(
                                        {
                                            "index": COUNT,
                                            "id": TEXT,
                                            "type": const("function"),
                                            "function": _CALLED_FUNCTION,
                                        }
                                    )
                                ),
                            },
                        ),
                        "logprobs": _LOGPROBS,
                        "finish_reason": maybe(_FINISH),
                    },
                    {"token_ids": _IDS},
                )
            ),
        },
        {
            "usage": maybe(ref("Usage")),
            "timings": ref("Timings"),
            "prompt_progress": PROMPT_PROGRESS,
            "prompt_token_ids": _IDS,
        },
    ),
    "Completion": shape(
        {
            **_HEAD,
            "object": const("text_completion"),
            "choices": several(
                shape(
                    {
                        "index": COUNT,
                        "text": TEXT,
                        "logprobs": _LEGACY_LOGPROBS,
                        "finish_reason": maybe(enum("stop", "length")),
                    },
                    {"token_ids": _IDS, "prompt_token_ids": _IDS, "prompt_logprobs": _PROMPT_LOGPROBS},
                )
            ),
        },
        {"usage": maybe(ref("Usage")), "timings": ref("Timings"), "prompt_progress": PROMPT_PROGRESS},
    ),
    "Embeddings": shape(
        {
            "object": const("list"),
            "model": TEXT,
            "data": several(
                shape(
                    {
                        "object": const("embedding"),
                        "index": COUNT,
                        "embedding": {"anyOf": [several(NUMBER), {"type": "string", "contentEncoding": "base64"}]},
                    }
                )
            ),
            "usage": ref("PromptUsage"),
        }
    ),
}

CHAT_RESPONSE = ResponseSchema(body=ref("ChatCompletion"), frame=ref("ChatCompletionChunk"))
COMPLETIONS_RESPONSE = ResponseSchema(body=ref("Completion"), frame=ref("Completion"))
EMBEDDINGS_RESPONSE = ResponseSchema(body=ref("Embeddings"))
CHAT_INPUT_TOKENS_RESPONSE = ResponseSchema(body=ref("InputTokens"))
