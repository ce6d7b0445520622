"""Bodies of OpenAI's calls, and of reranking, as vLLM and llama-server take them."""

from worker.bodies.common import (
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
from worker.schemas import (
    ANYTHING,
    Body,
    Schema,
    array,
    choice,
    described,
    flag,
    integer,
    one_of,
    or_null,
    record,
    required,
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
TEXT: Body = {**COMMON, "prompt": TEXTS, "logprobs": integer(0, None, "At most the model's max-logprobs.")}
"""A text completion as other dialects ask for one."""
COMPLETIONS: Body = {
    **TEXT,
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
