"""OpenAI's API: schemas of requests and responses."""

from collections.abc import Mapping

from worker.protocol.dialects.generation_fields import (
    EFFORTS,
    GRAMMAR,
    MAX_CHOICES,
    MAX_TEXTS,
    MAX_TOOLS,
    PASSED,
    ROLES,
    SAMPLING,
    VERBOSITIES,
    WORD,
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
    "continuous_usage_stats": flag("With include_usage: every chunk has the usage so far."),
    "include_obfuscation": flag("Reported as ignored if true: nothing is added to chunks."),
}
PING: Schema = {
    "anyOf": [{"type": "number", "minimum": 0.01, "maximum": 86400}, {"const": -1}, {"type": "null"}],
    "description": "Seconds of silence in a stream before a comment; -1 is never.",
}
MODEL: Schema = text("Id or alias; needed where several models are configured and none is the default.")
MAX_TOKENS: Schema = {
    "anyOf": [{"type": "integer", "minimum": 1}, {"const": -1}, {"type": "null"}],
    "description": "New tokens at most; -1 is all that fits.",
}
ZERO_TOO: Schema = integer(-1, None, "New tokens at most; -1 is all that fits.")
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
PIECES: Schema = {
    "type": "array",
    "items": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]},
    "minItems": 1,
}
_PART: Schema = described({"type": {"const": "text"}, "text": required(text())})
OBJECTS: tuple[Schema, ...] = (
    described({"prompt_string": required(text()), "multimodal_data": one_of([[]], "Not supported: send a chat.")}),
    described({"content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "minItems": 1}]}}),
)
"""What llama-server takes for a text."""
TEXTS: Schema = {
    "anyOf": [
        {"type": "string"},
        PIECES,
        *OBJECTS,
        {
            "type": "array",
            "items": {"anyOf": [{"type": "string"}, PIECES, *OBJECTS]},
            "minItems": 1,
            "maxItems": MAX_TEXTS,
        },
    ],
    "description": "A text, several, token ids, or several arrays of them; texts may stand between token ids, and in"
    " objects of a prompt_string or of content.",
}
MAX_ENDS = 128
TELLING: Body = {
    "prompt_logprobs": integer(0, None, "At most the model's max-logprobs; not in streams."),
    "return_token_ids": flag("Prompt and answer come as token ids, too."),
    "return_tokens_as_token_ids": flag("Logprobs name tokens as token_id:N."),
}
"""What vLLM's clients ask an answer to tell of its tokens."""
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
    **TELLING,
    "stop_token_ids": array({"type": "integer", "minimum": 0}, most=MAX_ENDS, about="Tokens at which the text ends."),
    "include_stop_str_in_output": flag("What ends the text is part of it."),
    "skip_special_tokens": flag("true unless stated."),
    "truncate_prompt_tokens": {
        "anyOf": [{"type": "integer", "minimum": 1}, {"const": -1}, {"type": "null"}],
        "description": "Of a longer prompt so many tokens, the last unless truncation_side says; -1 is all that fit.",
    },
    "truncation_side": choice(("left", "right"), "Where truncate_prompt_tokens cuts; left unless stated."),
    "cache_salt": text("What is cached of a prompt serves only requests with the same salt."),
    "return_progress": flag("Chunks tell how far the prompt is."),
    "timings_per_token": flag("Every chunk has timings."),
    "sse_ping_interval": PING,
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
CACHED: Body = {"cache_control": PASSED, "prompt_cache_breakpoint": PASSED}
"""What clients say of the parts of a prompt that are to be cached: what prompts share is found without being told."""
PARTS: tuple[Schema, ...] = (
    {**described({"type": {"const": "text"}, "text": required(text()), **CACHED}), "required": ["type", "text"]},
    {
        **described({"type": {"const": "refusal"}, "refusal": required(text()), **CACHED}),
        "required": ["type", "refusal"],
    },
)
"""What the content of a message may be made of."""
DETAILS = ("auto", "low", "high", "original")
SEEING = "For models whose input_modalities name image."
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
            **CACHED,
        }
    ),
    "required": ["type", "image_url"],
    "description": f"{SEEING} In messages of the user.",
}
IMAGES: Schema = {
    "anyOf": [{"type": "array", "items": BASE64}, {"enum": [None, "", 0, False, {}]}],
    "description": f"{SEEING} They stand before the text.",
}
CONTENT: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [*PARTS, _IMAGE_PART]}}]}
CALL: Schema = described(
    {
        "id": ANYTHING,
        "type": ANYTHING,
        "index": PASSED,
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
    "refusal": text("Its content, where it has no other."),
    "reasoning": text("The same as reasoning_content."),
    "annotations": PASSED,
    "tool_calls": array(CALL),
}
MESSAGE: Schema = {
    "anyOf": [
        {**described({**_MESSAGE, "content": CONTENT}), "required": ["role", "content"]},
        {
            **described({**_MESSAGE, "reasoning_content": required(text())}),
            "required": ["role", "reasoning_content"],
        },
        {
            **described({**_OF_ASSISTANT, "tool_calls": required(array(CALL, least=1))}),
            "required": ["role", "tool_calls"],
        },
        *(
            {**described({**_OF_ASSISTANT, name: required(text())}), "required": ["role", name]}
            for name in ("refusal", "reasoning")
        ),
    ],
}
MESSAGES: Schema = required(array(MESSAGE, least=1))
CONVERSATION: Body = {
    "messages": MESSAGES,
    "tools": TOOLS,
    "documents": array({"type": "object"}, about="For chat templates that have a place for them."),
    "chat_template_kwargs": or_null({"type": "object", "description": "Variables of the chat template."}),
    "reasoning_effort": choice(EFFORTS, "none: the model does not think, where its template has a switch."),
    "verbosity": choice(VERBOSITIES),
    "add_generation_prompt": flag(),
    "continue_final_message": flag(),
}
"""What makes the prompt of a chat."""
TOOLING: Body = {"tool_choice": TOOL_CHOICE, "parallel_tool_calls": flag()}
CHAT: Body = {
    **COMMON,
    **CONVERSATION,
    **TOOLING,
    "logprobs": flag(),
    "top_logprobs": integer(0, None, "At most the model's max-logprobs."),
    "reasoning_format": choice(("none", "auto", "deepseek")),
    "include_reasoning": flag("false: what the model thinks is left out."),
    "add_special_tokens": one_of([False], "Not supported: the chat template writes them."),
    "adapters": ADAPTERS,
    "lora": ADAPTERS,
}


def unread(body: Body, *read: Body) -> Body:
    """`body` for a call that reads only the fields of `read` of it: whatever else it has is passed over."""
    looked_at = {name for each in read for name in each}
    return {name: schema if name in looked_at else ANYTHING for name, schema in body.items()}


CHAT_TOKENS = unread(CHAT, CONVERSATION, TOOLING)
TEMPLATE = unread(CHAT, CONVERSATION)
TEXT_PROMPT: Body = {**COMMON, "prompt": TEXTS, "logprobs": integer(0, None, "At most the model's max-logprobs.")}
"""A text completion as other dialects ask for one."""
COMPLETIONS: Body = {
    **TEXT_PROMPT,
    "max_tokens": ZERO_TOO,
    "max_completion_tokens": ZERO_TOO,
    "n_predict": ZERO_TOO,
    "add_special_tokens": flag("Whether the prompt gets what the tokenizer puts around texts; true unless stated."),
    "suffix": text("What follows the gap, for models that can fill one in."),
    "echo": flag(),
    "best_of": integer(1, MAX_CHOICES),
    "adapters": ADAPTERS,
    "lora": ADAPTERS,
}
_TRUNCATE: Schema = {
    "anyOf": [{"type": ["boolean", "null"]}, {"type": "string", "pattern": "^([Nn][Oo][Nn][Ee]|[Ee][Nn][Dd])$"}],
    "description": "Cut what is too long instead of refusing it.",
}
_CUT: Schema = one_of([-1], "The same as `truncate`; other numbers are not supported.")
_CUT_SIDE: Schema = one_of(["right"], "Where `truncate_prompt_tokens` cuts: at the end, nowhere else.")
CUTS: Body = {"truncate": _TRUNCATE, "truncate_prompt_tokens": _CUT, "truncation_side": _CUT_SIDE}
"""What becomes of texts that are too long."""
_PROMPT_NAME: Schema = text("One of the model's own instructions, to put before each text.")
EMBEDDINGS: Body = {
    "model": MODEL,
    "input": TEXTS,
    "encoding_format": choice(("float", "base64")),
    "dimensions": integer(1),
    "prompt_name": _PROMPT_NAME,
    **CUTS,
}
EMBEDDING: Body = {
    "model": MODEL,
    "input": {**TEXTS, "anyOf": [*TEXTS["anyOf"], {"type": "null"}]},
    "content": {**TEXTS, "anyOf": [*TEXTS["anyOf"], {"type": "null"}]},
    "embd_normalize": integer(-1, 1 << 20, "-1 none, 0 largest value, 1 taxicab, 2 Euclidean."),
    "prompt_name": _PROMPT_NAME,
    **CUTS,
}
RERANK: Body = {
    "model": MODEL,
    "query": WORD,
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
    **CUTS,
}

_TOP = shape({"token": TEXT, "logprob": maybe(NUMBER), "bytes": several(COUNT)})
TOKENS = several(
    shape({"token": TEXT, "logprob": maybe(NUMBER), "bytes": several(COUNT), "top_logprobs": several(_TOP)})
)
_LOGPROBS = maybe(shape({"content": TOKENS}))
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
    "Ranking": shape(
        {
            "object": const("list"),
            "model": TEXT,
            "results": several(shape({"index": COUNT, "relevance_score": NUMBER}, {"document": shape({"text": TEXT})})),
            "usage": ref("PromptUsage"),
        }
    ),
}

CHAT_RESPONSE = ResponseSchema(body=ref("ChatCompletion"), frame=ref("ChatCompletionChunk"))
COMPLETIONS_RESPONSE = ResponseSchema(body=ref("Completion"), frame=ref("Completion"))
EMBEDDINGS_RESPONSE = ResponseSchema(body=ref("Embeddings"))
RERANK_RESPONSE = ResponseSchema(
    body={"anyOf": [ref("Ranking"), several(shape({"index": COUNT, "score": NUMBER}, {"text": TEXT}))]}
)
CHAT_INPUT_TOKENS_RESPONSE = ResponseSchema(body=ref("InputTokens"))
