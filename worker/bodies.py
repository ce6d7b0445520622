"""What a request's body may say: for every call its fields, each with the values that it takes, as JSON Schema.

The readers in `worker.fields` take their types and ranges from here and know no field that is not, and the description
of the API is written from the same tables: neither can say what the other does not.

Law: standard library only; the router reads this through `worker.routes`.
"""

from collections.abc import Collection

from worker.schemas import (
    ANYTHING,
    Body,
    Schema,
    array,
    choice,
    described,
    flag,
    integer,
    number,
    one_of,
    or_null,
    record,
    required,
    text,
)

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_BIASES = 1024
MAX_TOOLS = 512
MAX_TEXTS = 2048
"""Prompts, inputs or documents of one request, as many as at OpenAI."""
MAX_GUIDED_CHOICES = 1024
MAX_SHOWN = 64
"""Fields that an answer may be cut to."""
MAX_BIASED = 128
"""Characters of a text whose tokens are biased."""
_LARGEST = 2**31 - 1
_LONG = 2**63

ROLES = ("system", "developer", "user", "assistant", "tool")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
VERBOSITIES = ("low", "medium", "high")
FORMATS = ("text", "json_object", "json_schema")

# Fields of all calls

NO_OPS: Body = {
    name: {"description": "Makes no difference here."}
    for name in (
        "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "moderation", "id_slot", "cache_prompt", "n_keep", "n_discard", "n_cache_reuse", "backend_sampling",
        "guided_decoding_backend", "spaces_between_special_tokens",
    )
}  # fmt: skip
"""Nothing here depends on them, so any value is as good as none."""

_OFF = "Not supported: only the value that makes no difference is taken."
_TUNES = "Makes no difference: what it tunes is off."
NEUTRAL: Body = {
    "audio": one_of([], _OFF),
    "modalities": one_of([[], ["text"]], _OFF),
    "web_search_options": one_of([], _OFF),
    "prediction": one_of([], _OFF),
    "store": one_of([False], _OFF),
    "functions": one_of([[]], _OFF),
    "function_call": one_of(["none", "auto"], _OFF),
    "mirostat": one_of([0], _OFF),
    "mirostat_tau": {"description": _TUNES},
    "mirostat_eta": {"description": _TUNES},
    "xtc_probability": one_of([0], _OFF),
    "xtc_threshold": {"description": _TUNES},
    "dry_multiplier": one_of([0], _OFF),
    "dry_base": {"description": _TUNES},
    "dry_allowed_length": {"description": _TUNES},
    "dry_penalty_last_n": {"description": _TUNES},
    "dry_sequence_breakers": {"description": _TUNES},
    "dynatemp_range": one_of([0], _OFF),
    "dynatemp_exponent": {"description": _TUNES},
    "typical_p": one_of([1], _OFF),
    "typ_p": one_of([1], _OFF),
    "top_n_sigma": {"type": ["number", "null"], "maximum": 0, "description": _OFF},
    "adaptive_target": {"type": ["number", "null"], "maximum": 0, "description": _OFF},
    "adaptive_decay": {"description": _TUNES},
    "tfs_z": one_of([1], _OFF),
    "min_keep": one_of([0, 1], _OFF),
    "t_max_predict_ms": {"type": ["number", "null"], "maximum": 0, "description": _OFF},
    "grammar_lazy": one_of([False], _OFF),
    "grammar_triggers": one_of([[]], _OFF),
    "preserved_tokens": one_of([[]], _OFF),
    "parse_tool_calls": one_of([True], _OFF),
    "thinking_forced_open": one_of([False], _OFF),
    "reasoning_budget": one_of([-1], _OFF),
    "reasoning_budget_tokens": one_of([-1], _OFF),
    "thinking_budget_tokens": one_of([-1], _OFF),
    "thinking_token_budget": one_of([-1], _OFF),
    "include_reasoning": one_of([True], _OFF),
    "chat_template": one_of([""], "Not supported in a request: a model's preset states it."),
    "use_beam_search": one_of([False], _OFF),
    "length_penalty": {"description": _TUNES},
    "early_stopping": {"description": _TUNES},
    "best_of": one_of([1], _OFF),
    "echo": one_of([False], _OFF),
    "priority": one_of([0], "Not supported in a request: a model's preset states it."),
    "allowed_token_ids": one_of([[]], _OFF),
    "bad_words": one_of([[]], _OFF),
    "logits_processors": one_of([[]], _OFF),
    "logprob_token_ids": one_of([[]], _OFF),
    "guided_whitespace_pattern": one_of([""], _OFF),
    "structural_tag": one_of([""], _OFF),
    "repetition_detection": one_of([{}], _OFF),
    "kv_transfer_params": one_of([{}], _OFF),
    "vllm_xargs": one_of([{}], _OFF),
    "mm_processor_kwargs": one_of([{}], _OFF),
    "media_io_kwargs": one_of([{}], _OFF),
}
"""Fields with a meaning that no engine of ours has, and the values with which that makes no difference."""

# Sampling

_WORD: Schema = {"type": "string", "minLength": 1}
_STOP: Schema = {
    "anyOf": [_WORD, {"type": "array", "items": _WORD, "maxItems": MAX_STOPS}, {"type": "null"}],
    "description": "Strings at which the text ends; none of them is part of it.",
}
_BIAS: Schema = {"anyOf": [{"type": "number", "minimum": -100, "maximum": 100}, {"const": False}]}
_LOGIT_BIAS: Schema = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"minLength": 1, "maxLength": MAX_BIASED},
            "additionalProperties": _BIAS,
            "maxProperties": MAX_BIASES,
        },
        {
            "type": "array",
            "items": {
                "type": "array",
                "prefixItems": [
                    {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "maxLength": MAX_BIASED}]},
                    _BIAS,
                ],
                "minItems": 2,
                "maxItems": 2,
            },
            "maxItems": MAX_BIASES,
        },
        {"type": "null"},
    ],
    "description": "Biases by token id; a text stands for each of its tokens; false bans a token.",
}
TUNING: Body = {
    "temperature": number(0, 100, "0 takes the likeliest token."),
    "top_k": integer(-1, _LARGEST, "0 and -1 are off."),
    "top_p": number(0, 1),
    "min_p": number(0, 1),
    "repetition_penalty": number(0.01, 100),
    "repeat_penalty": number(0.01, 100, "The same as repetition_penalty."),
    "repeat_last_n": integer(-1, _LARGEST, "Tokens that repetition_penalty looks back at; -1 is all."),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
}
SAMPLING: Body = {
    **TUNING,
    "stop": _STOP,
    "seed": integer(-_LONG, _LONG - 1, "-1 asks for another one each time."),
    "logit_bias": _LOGIT_BIAS,
    "samplers": {
        "anyOf": [array({"type": "string"}), {"type": "string"}],
        "description": "llama-server's: which of penalties, top_k, top_p, min_p and temperature, in this order or with"
        " temperature before the other three.",
    },
    "min_tokens": integer(0),
    "ignore_eos": flag(),
}

# What holds an answer

_SCHEMA: Schema = {
    "anyOf": [
        {"type": "object"},
        {"type": "string", "contentMediaType": "application/json"},
        {"type": "null"},
    ],
    "description": "A JSON schema, or one as a string.",
}
_CHOICES: Schema = array(_WORD, least=1, most=MAX_GUIDED_CHOICES)
DESCRIBED: Body = {"strict": flag(), "schema": _SCHEMA}
RESPONSE_FORMAT: Body = {
    "type": required(choice(FORMATS)),
    "schema": _SCHEMA,
    "json_schema": record(DESCRIBED),
}
"""`schema` and `json_schema` are read only for the types that have one."""
STRUCTURED: Body = {
    "json": _SCHEMA,
    "json_object": flag(),
    "regex": text(),
    "choice": _CHOICES,
    "grammar": text(),
    "disable_fallback": one_of([False]),
    "disable_any_whitespace": one_of([False]),
    "disable_additional_properties": one_of([False]),
}
GRAMMAR: Body = {
    "response_format": or_null(
        {
            "anyOf": [
                {"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]},
                described({"type": {"const": "json_object"}, "schema": _SCHEMA}),
                {
                    **described({k: v for k, v in RESPONSE_FORMAT.items() if k != "type"}),
                    "properties": {**RESPONSE_FORMAT, "type": {"const": "json_schema"}},
                    "required": ["type"],
                },
            ]
        }
    ),
    "json_schema": _SCHEMA,
    "grammar": text("GBNF."),
    "guided_json": _SCHEMA,
    "guided_regex": text(),
    "guided_choice": _CHOICES,
    "guided_grammar": text("GBNF."),
    "structured_outputs": record(STRUCTURED, "Exactly one of json, json_object, regex, choice and grammar."),
}

# OpenAI

STREAM_OPTIONS: Body = {
    "include_usage": flag(),
    "continuous_usage_stats": flag("With include_usage: every chunk has the usage so far."),
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
_ZERO_TOO: Schema = integer(-1, None, "New tokens at most; -1 is all that fits.")
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
_PIECES: Schema = {
    "type": "array",
    "items": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]},
    "minItems": 1,
}
_TEXTS: Schema = {
    "anyOf": [
        {"type": "string"},
        _PIECES,
        {
            "type": "array",
            "items": {"anyOf": [{"type": "string"}, _PIECES]},
            "minItems": 1,
            "maxItems": MAX_TEXTS,
        },
    ],
    "description": "A text, several, token ids, or several arrays of them; texts may stand between token ids.",
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
        "description": "Of a longer prompt so many tokens, the last; -1 is all that fit.",
    },
    "cache_salt": text("What is cached of a prompt serves only requests with the same salt."),
    "return_progress": flag("Chunks tell how far the prompt is."),
    "timings_per_token": flag("Every chunk has timings."),
    "sse_ping_interval": PING,
}
_FUNCTION: Schema = described(
    {
        "name": required(text()),
        "description": ANYTHING,
        "parameters": {"description": "A JSON schema, an object; read where calls are held to it."},
        "strict": ANYTHING,
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
    ]
}
PARTS: tuple[Schema, ...] = (
    {**described({"type": {"const": "text"}, "text": required(text())}), "required": ["type", "text"]},
    {**described({"type": {"const": "refusal"}, "refusal": required(text())}), "required": ["type", "refusal"]},
)
"""What the content of a message may be made of."""
DETAILS = ("auto", "low", "high", "original")
_SEEING = "For models whose input_modalities name image."
_DATA_URL: Schema = {
    "type": "string",
    "pattern": "^data:image/",
    "description": "A data URL in base64, of a PNG, JPEG, WebP or GIF; nothing is fetched.",
}
_BASE64: Schema = {"type": "string", "contentEncoding": "base64"}
_IMAGE_PART: Schema = {
    **described(
        {
            "type": {"const": "image_url"},
            "image_url": described({"url": _DATA_URL, "detail": choice(DETAILS, "Reported as ignored.")}),
        }
    ),
    "required": ["type", "image_url"],
    "description": f"{_SEEING} In messages of the user.",
}
_IMAGES: Schema = {
    "anyOf": [{"type": "array", "items": _BASE64}, {"enum": [None, "", 0, False, {}]}],
    "description": f"{_SEEING} They stand before the text.",
}
CONTENT: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [*PARTS, _IMAGE_PART]}}]}
_CALL: Schema = described(
    {
        "id": ANYTHING,
        "type": ANYTHING,
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
MESSAGE: Schema = {
    "anyOf": [
        {**described({**_MESSAGE, "content": CONTENT}), "required": ["role", "content"]},
        {
            **described({**_MESSAGE, "reasoning_content": required(text())}),
            "required": ["role", "reasoning_content"],
        },
        {
            **described({**_MESSAGE, "role": {"const": "assistant"}, "tool_calls": required(array(_CALL, least=1))}),
            "required": ["role", "tool_calls"],
        },
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
    "add_special_tokens": one_of([False], "Not supported: the chat template writes them."),
    "adapters": ADAPTERS,
    "lora": ADAPTERS,
}


def _unread(body: Body, *read: Body) -> Body:
    """`body` for a call that reads only the fields of `read` of it: whatever else it has is passed over."""
    looked_at = {name for each in read for name in each}
    return {name: schema if name in looked_at else ANYTHING for name, schema in body.items()}


CHAT_TOKENS = _unread(CHAT, CONVERSATION, TOOLING)
TEMPLATE = _unread(CHAT, CONVERSATION)
TEXT: Body = {**COMMON, "prompt": _TEXTS, "logprobs": integer(0, None, "At most the model's max-logprobs.")}
"""A text completion as other dialects ask for one."""
COMPLETIONS: Body = {
    **TEXT,
    "max_tokens": _ZERO_TOO,
    "max_completion_tokens": _ZERO_TOO,
    "n_predict": _ZERO_TOO,
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
_PROMPT_NAME: Schema = text("One of the model's own instructions, to put before each text.")
EMBEDDINGS: Body = {
    "model": MODEL,
    "input": _TEXTS,
    "encoding_format": choice(("float", "base64")),
    "dimensions": integer(1),
    "prompt_name": _PROMPT_NAME,
    "truncate": _TRUNCATE,
    "truncate_prompt_tokens": _CUT,
}
EMBEDDING: Body = {
    "model": MODEL,
    "input": {**_TEXTS, "anyOf": [*_TEXTS["anyOf"], {"type": "null"}]},
    "content": {**_TEXTS, "anyOf": [*_TEXTS["anyOf"], {"type": "null"}]},
    "embd_normalize": integer(-1, 1 << 20, "-1 none, 0 largest value, 1 taxicab, 2 Euclidean."),
    "prompt_name": _PROMPT_NAME,
    "truncate": _TRUNCATE,
    "truncate_prompt_tokens": _CUT,
}
RERANK: Body = {
    "model": MODEL,
    "query": _WORD,
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
    "truncate": _TRUNCATE,
    "truncate_prompt_tokens": _CUT,
}

# Responses

_STATELESS = "Nothing is kept between requests."
_TEXT_KINDS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_RESPONSE_TEXT: Schema = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "anyOf": [
                    {
                        **described({"type": {"enum": list(_TEXT_KINDS)}, "text": required(text())}),
                        "required": ["type", "text"],
                    },
                    PARTS[1],
                    {
                        **described(
                            {
                                "type": {"const": "input_image"},
                                "image_url": _DATA_URL,
                                "detail": choice(DETAILS, "Reported as ignored."),
                            }
                        ),
                        "required": ["type", "image_url"],
                        "description": f"{_SEEING} In messages of the user.",
                    },
                ]
            },
        },
    ]
}
_ITEM: Schema = {
    "anyOf": [
        {
            **described(
                {"type": {"enum": ["message", "", None]}, "role": required(choice(ROLES)), "content": _RESPONSE_TEXT}
            ),
            "required": ["role", "content"],
        },
        {
            **described(
                {
                    "type": {"const": "function_call"},
                    "call_id": required(text()),
                    "name": required(text()),
                    "arguments": required(text()),
                }
            ),
            "required": ["type", "call_id", "name", "arguments"],
        },
        {
            **described({"type": {"const": "function_call_output"}, "call_id": text(), "output": _RESPONSE_TEXT}),
            "required": ["type", "output"],
        },
        {
            **described({"type": {"const": "reasoning"}}),
            "required": ["type"],
        },
    ]
}
REASONING: Body = {"effort": choice(EFFORTS), "summary": ANYTHING, "generate_summary": ANYTHING}
RESPONSE_TEXT: Body = {"verbosity": choice(VERBOSITIES), "format": or_null({"type": "object"})}
FURTHER: Body = {
    **{name: schema for name, schema in SAMPLING.items() if name not in ("temperature", "top_p")},
    **GRAMMAR,
    "chat_template_kwargs": CONVERSATION["chat_template_kwargs"],
    "cache_salt": COMMON["cache_salt"],
    "adapters": ADAPTERS,
    "lora": ADAPTERS,
}
"""What a response takes from chats, beside what OpenAI's has."""
RESPONSES: Body = {
    **FURTHER,
    "model": MODEL,
    "input": {"anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM, "minItems": 1}]},
    "instructions": text(),
    "max_output_tokens": integer(1),
    "temperature": TUNING["temperature"],
    "top_p": TUNING["top_p"],
    "tools": array(
        {
            **described({"type": {"const": "function"}, "name": required(text())}),
            "required": ["type", "name"],
        },
        most=MAX_TOOLS,
    ),
    "tool_choice": {
        "anyOf": [
            {"enum": [None, "none", "auto", "required"]},
            {
                **described({"type": {"const": "function"}, "name": required(text())}),
                "required": ["type", "name"],
            },
        ]
    },
    "parallel_tool_calls": flag(),
    "text": record(RESPONSE_TEXT),
    "reasoning": record(REASONING),
    "stream": flag(),
    "stream_options": or_null({"type": "object"}),
    "sse_ping_interval": PING,
    "include": array({"const": "reasoning.encrypted_content"}),
    "metadata": or_null({"type": "object"}),
    "previous_response_id": one_of([""], _STATELESS),
    "conversation": one_of([], _STATELESS),
    "store": one_of([False], _STATELESS),
    "background": one_of([False]),
    "truncation": one_of(["disabled"]),
    "prompt": one_of([]),
    "top_logprobs": one_of([0]),
}

# Anthropic

_BLOCK_TEXT: Schema = PARTS[0]
_BLOCK_TEXTS: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK_TEXT}]}
_BLOCK_IMAGE: Schema = {
    **described(
        {
            "type": {"const": "image"},
            "source": {
                **described(
                    {"type": {"const": "base64"}, "media_type": required(text("image/png, say.")), "data": _BASE64}
                ),
                "required": ["type", "media_type", "data"],
            },
        }
    ),
    "required": ["type", "source"],
    "description": _SEEING,
}
_BLOCKS: tuple[Schema, ...] = (
    _BLOCK_TEXT,
    _BLOCK_IMAGE,
    {
        **described(
            {
                "type": {"const": "tool_result"},
                "tool_use_id": required(text()),
                "content": {"anyOf": [*_BLOCK_TEXTS["anyOf"], {"enum": [None, False, 0, {}]}]},
                "is_error": ANYTHING,
            }
        ),
        "required": ["type", "tool_use_id"],
    },
)
_ANSWER_BLOCKS: tuple[Schema, ...] = (
    _BLOCK_TEXT,
    _BLOCK_IMAGE,
    {
        **described(
            {
                "type": {"const": "tool_use"},
                "id": required(text()),
                "name": required(text()),
                "input": {"type": "object"},
            }
        ),
        "required": ["type", "id", "name", "input"],
    },
    {
        **described({"type": {"const": "thinking"}, "thinking": required(text())}),
        "required": ["type", "thinking"],
    },
    {**described({"type": {"const": "redacted_thinking"}}), "required": ["type"]},
)


def _said(role: str, blocks: Collection[Schema]) -> Schema:
    content = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": list(blocks)}}]}
    return {**described({"role": {"const": role}, "content": content}), "required": ["role", "content"]}


TOOL_CHOICE_OF_MESSAGES: Body = {
    "type": required(choice(("auto", "any", "tool", "none"))),
    "name": text(),
    "disable_parallel_tool_use": flag(),
}
THINKING: Body = {
    "type": required(choice(("enabled", "disabled", "adaptive"))),
    "budget_tokens": integer(1),
}
_FORMAT: Schema = {
    **described({"type": {"const": "json_schema"}, "schema": {"type": "object"}}),
    "required": ["type", "schema"],
}
OUTPUT: Body = {
    "effort": choice(("low", "medium", "high", "xhigh", "max")),
    "format": or_null(_FORMAT),
}
PROMPT_OF_MESSAGES: Body = {
    "model": MODEL,
    "messages": required(
        array(
            {
                "anyOf": [
                    _said("user", _BLOCKS),
                    _said("assistant", _ANSWER_BLOCKS),
                    _said("system", [_BLOCK_TEXT]),
                ]
            },
            least=1,
        )
    ),
    "system": {"anyOf": [*_BLOCK_TEXTS["anyOf"], {"type": "null"}]},
    "tools": array(
        described(
            {
                "type": {"anyOf": [{"const": "custom"}, {"not": {"type": "string"}}]},
                "name": required(text()),
                "input_schema": {"type": "object"},
                "description": ANYTHING,
                "strict": ANYTHING,
            }
        ),
        most=MAX_TOOLS,
    ),
    "tool_choice": record(TOOL_CHOICE_OF_MESSAGES),
    "thinking": record(THINKING),
    "output_config": record(OUTPUT),
    "output_format": or_null(_FORMAT),
    "mcp_servers": one_of([[], {}, ""]),
    "container": one_of([[], {}, ""]),
    "context_management": or_null({"type": "object", "description": "Reported as ignored: nothing is left out here."}),
    "cache_control": {"description": "Makes no difference: what prompts share is found without being told."},
}
ANTHROPIC: Body = {
    **PROMPT_OF_MESSAGES,
    "max_tokens": integer(1),
    "temperature": TUNING["temperature"],
    "top_p": TUNING["top_p"],
    "top_k": TUNING["top_k"],
    "stop_sequences": array(_WORD, most=MAX_STOPS),
    "stream": flag(),
    "sse_ping_interval": PING,
}
COUNT_TOKENS = _unread(
    {name: schema for name, schema in ANTHROPIC.items() if name != "sse_ping_interval"}, PROMPT_OF_MESSAGES
)

# Ollama

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
    "stop": _STOP,
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
    "think": {"anyOf": [{"type": ["boolean", "null"]}, {"enum": ["low", "medium", "high"]}]},
    "truncate": flag("Reported as ignored: what is too long is refused."),
    "shift": flag("Reported as ignored: an answer ends with the context."),
    "keep_alive": KEEP_ALIVE,
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
                    "images": _IMAGES,
                }
            ),
            "required": ["role", "content"],
        },
        {
            **described(
                {
                    "role": {"const": "assistant"},
                    "tool_calls": required(array(_CALL, least=1)),
                    "content": {"anyOf": [CONTENT, {"type": "null"}]},
                    "images": _IMAGES,
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
    "images": array(_BASE64, about=f"{_SEEING} They stand before the prompt."),
    "context": one_of([[]]),
    "template": one_of([""]),
    "suffix": text("What follows the gap, for models that can fill one in; the prompt is what goes before it."),
}
OLLAMA_EMBED: Body = {
    **_NAMES,
    "keep_alive": KEEP_ALIVE,
    "options": record(OPTIONS),
    "input": {"anyOf": [*_TEXTS["anyOf"], {"enum": [None, []]}]},
    "truncate": flag("true unless stated."),
    "dimensions": integer(1),
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

# llama-server

COMPLETION: Body = {
    "model": MODEL,
    **SAMPLING,
    **GRAMMAR,
    "prompt": _TEXTS,
    "n_predict": _ZERO_TOO,
    "max_tokens": _ZERO_TOO,
    "n_probs": integer(0, None, "At most the model's max-logprobs."),
    "n": integer(1, MAX_CHOICES),
    "n_cmpl": integer(1, MAX_CHOICES, "The same as n."),
    "stream": flag(),
    "return_tokens": flag(),
    "return_progress": flag("Chunks tell how far the prompt is."),
    "timings_per_token": flag("Every chunk has timings."),
    "sse_ping_interval": PING,
    "post_sampling_probs": flag("With n_probs: how likely tokens were once all samplers had been at work."),
    "n_indent": one_of([0]),
    "response_fields": array(
        {"type": "string"}, most=MAX_SHOWN, about="Of the answer these fields alone; `a/b` is a field of a field."
    ),
    "return_tokens_only": one_of([False]),
    "lora": ADAPTERS,
    "adapters": ADAPTERS,
}
INFILL: Body = {
    **COMPLETION,
    "prompt": text("What the answer begins with already."),
    "input_prefix": required(text("What stands before the gap.")),
    "input_suffix": required(text("What follows it.")),
    "input_extra": array(
        described({"text": required(text()), "filename": text()}),
        most=MAX_TEXTS,
        about="Further files, to stand before.",
    ),
}
TOKENIZE: Body = {
    "model": MODEL,
    "content": {"anyOf": [{"type": "string"}, {**_PIECES, "minItems": 0}]},
    "add_special": flag(),
    "parse_special": flag("true unless stated."),
    "with_pieces": flag(),
}
DETOKENIZE: Body = {"model": MODEL, "tokens": required(array({"type": "integer", "minimum": 0}))}

# LMI and EricLLM

PARAMETERS: Body = {
    **{
        name: TUNING[name]
        for name in (
            "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
        )
    },
    "seed": SAMPLING["seed"],
    "do_sample": flag(),
    "max_new_tokens": integer(1, None, "30 unless stated."),
    "stop_sequences": _STOP,
    "stop": _STOP,
    "ignore_eos_token": flag(),
    "details": flag(),
    "return_full_text": flag(),
    "num_beams": one_of([1]),
    "typical_p": one_of([1]),
}  # fmt: skip
INVOCATIONS: Body = {
    "model": MODEL,
    "inputs": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]},
    "parameters": record(PARAMETERS),
    "stream": flag(),
    "adapters": ADAPTERS,
}
ERICLLM: Body = {
    "model": MODEL,
    "prompt": text(),
    "max_tokens": MAX_TOKENS,
    "temperature": TUNING["temperature"],
    "top_k": TUNING["top_k"],
    "top_p": TUNING["top_p"],
    "min_p": TUNING["min_p"],
    "stop": _STOP,
    "n": integer(1, MAX_CHOICES),
    "seed": SAMPLING["seed"],
    "token_repetition_penalty": TUNING["repetition_penalty"],
    "top_a": one_of([0]),
    "filters": one_of([[]]),
    "skip_special_tokens": one_of([True]),
}

# FastChat's worker

FASTCHAT: Body = {
    "model": MODEL,
    "prompt": required(text()),
    "temperature": TUNING["temperature"],
    "top_k": TUNING["top_k"],
    "top_p": TUNING["top_p"],
    "repetition_penalty": TUNING["repetition_penalty"],
    "presence_penalty": TUNING["presence_penalty"],
    "frequency_penalty": TUNING["frequency_penalty"],
    "max_new_tokens": integer(1, None, "256 unless stated."),
    "echo": flag("Whether the text begins with the prompt; true unless stated."),
    "stop": _STOP,
    "stop_token_ids": COMMON["stop_token_ids"],
    "logprobs": integer(0, None, "At most the model's max-logprobs."),
    "seed": SAMPLING["seed"],
    "stream": flag("Makes no difference: the path says it."),
    "best_of": one_of([1]),
    "use_beam_search": one_of([False]),
    "images": one_of([[]]),
}
FASTCHAT_EMBED: Body = EMBEDDINGS
FASTCHAT_COUNT: Body = {"model": MODEL, "prompt": required(text())}
FASTCHAT_CONV: Body = {"model": MODEL}
FASTCHAT_CHECK: Body = {
    "prompts": required(
        array(record({"model": MODEL, "prompt": required(text()), "max_tokens": integer(0, _LARGEST)}), most=256)
    )
}

# What the router itself answers

NAMED: Body = {
    "model": {"type": "string", "minLength": 1},
    "extra_args": {"not": {}, "description": "Not supported: settings stand in the model's preset."},
}
FETCH: Body = {
    **NAMED,
    "model": {"type": "string", "minLength": 1, "description": "org/name, or org/name:revision."},
}
PIN: Body = {
    "model": {"type": "string", "minLength": 1},
    "pinned": {"type": "boolean", "description": "true unless stated."},
}
NOTHING: Body = {}
"""A call whose body, if it has one, is not looked at."""
