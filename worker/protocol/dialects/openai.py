"""OpenAI's API: schemas of requests and responses."""

from collections.abc import Mapping

from worker.protocol import schema as s
from worker.protocol.dialects.generation_fields import (
    EFFORTS,
    GRAMMAR,
    MAX_CHOICES,
    MAX_INT32,
    MAX_NAME_LENGTH,
    MAX_TEXTS,
    MAX_TOOLS,
    NO_EFFECT,
    REASONING_BUDGETS,
    ROLES,
    SAMPLING,
    SPECULATION,
    VERBOSITIES,
)
from worker.protocol.schema import Body, ResponseSchema, Schema

STREAM_OPTIONS: Body = {
    "include_usage": s.flag(),
    "continuous_usage_stats": s.flag("With include_usage: every chunk contains the usage so far."),
    "include_obfuscation": s.flag("Reported as ignored if true: nothing is added to chunks."),
}
PING_INTERVAL = s.any_of(
    s.or_null({**s.NUMBER, "minimum": 0.01, "maximum": 86400}),
    s.const(-1),
    about="Seconds of silence in a stream before a comment; -1 is never.",
)
MODEL: Schema = s.text(
    "Id or alias; required if several models are configured and none is the default.", most=MAX_NAME_LENGTH
)
_FROM_ONE: Schema = {**s.COUNT, "minimum": 1}
MAX_TOKENS = s.any_of(s.or_null(_FROM_ONE), s.const(-1), about="New tokens at most; -1 is all that fits.")
MAX_TOKENS_OR_ZERO: Schema = s.integer(-1, None, "New tokens at most; -1 is all that fits.")
_SCALE: Schema = {**s.NUMBER, "minimum": -1e6, "maximum": 1e6}
_BY_ID: Schema = {**s.described({"id": s.COUNT, "scale": _SCALE}), "required": ["id"]}
_BY_NAME: Schema = {**s.described({"name": {**s.TEXT, "minLength": 1}, "scale": _SCALE}), "required": ["name"]}
ADAPTERS = s.any_of(
    s.or_null(s.TEXT),
    s.several(s.TEXT),
    s.several(s.any_of(_BY_ID, _BY_NAME)),
    about="A LoRA adapter by name, one for each of several prompts, or one with its scale, by name or by its place in"
    " GET /lora-adapters. Empty is none.",
)
TOKENS_AND_TEXTS: Schema = {**s.several(s.any_of(s.COUNT, s.TEXT)), "minItems": 1}
_PARTS: Schema = {**s.several(s.described({"type": s.const("text"), "text": s.TEXT})), "minItems": 1}
# Objects that llama-server accepts in place of a text.
TEXT_OBJECTS: tuple[Schema, ...] = (
    s.described({"prompt_string": s.TEXT, "multimodal_data": s.one_of([[]], "Not supported: send a chat.")}),
    s.described({"content": s.any_of(s.TEXT, _PARTS)}),
)
_TEXT_OR_TOKENS = (s.TEXT, TOKENS_AND_TEXTS, *TEXT_OBJECTS)
TEXTS = s.any_of(
    *_TEXT_OR_TOKENS,
    {**s.several(s.any_of(*_TEXT_OR_TOKENS)), "minItems": 1, "maxItems": MAX_TEXTS},
    about="A text, several, token ids, or several arrays of them; texts may stand between token ids, and in objects of"
    " a prompt_string or of content.",
)
MAX_ENDS = 128
# vLLM's fields for details about tokens in the response.
TOKEN_DETAILS: Body = {
    "prompt_logprobs": s.integer(0, None, "At most the model's max-logprobs; not in streams."),
    "return_token_ids": s.flag("Prompt and completion are also returned as token ids."),
    "return_tokens_as_token_ids": s.flag("Logprobs name tokens as token_id:N."),
}
COMMON: Body = {
    "model": MODEL,
    **SAMPLING,
    **SPECULATION,
    **GRAMMAR,
    "max_tokens": MAX_TOKENS,
    "max_completion_tokens": MAX_TOKENS,
    "n_predict": MAX_TOKENS,
    "n": s.integer(1, MAX_CHOICES),
    "stream": s.flag(),
    "stream_options": s.record(STREAM_OPTIONS, "Only with stream: true."),
    **TOKEN_DETAILS,
    "stop_token_ids": s.array(s.COUNT, most=MAX_ENDS, about="Token ids that end the text."),
    "include_stop_str_in_output": s.flag("The stop string is part of the text."),
    "skip_special_tokens": s.flag("true unless stated."),
    "truncate_prompt_tokens": s.any_of(
        s.or_null(_FROM_ONE),
        s.const(-1),
        about="Truncate a longer prompt to this many tokens, the last ones by default; -1 is all that fit.",
    ),
    "truncation_side": s.choice(("left", "right"), "Where truncate_prompt_tokens cuts; left unless stated."),
    "cache_salt": s.text("The prefix cache is shared only with requests of the same salt.", most=MAX_NAME_LENGTH),
    "return_progress": s.flag("Chunks contain the progress of the prompt."),
    "timings_per_token": s.flag("Every chunk contains timings."),
    "sse_ping_interval": PING_INTERVAL,
}
ALLOWED_MODES = ("auto", "required")
_FUNCTION: Schema = s.described(
    {
        "name": s.TEXT,
        "description": s.ANYTHING,
        "parameters": {"description": "A JSON schema, an object; read where calls are held to it."},
        "strict": {
            "description": "true: arguments satisfy the parameters, where calls are held to them; else reported."
        },
    }
)
_TOOL = s.tagged("function", {"function": _FUNCTION})
TOOLS: Schema = s.array(_TOOL, most=MAX_TOOLS)
_ALLOWED_TOOLS: Body = {
    "mode": s.required(s.choice(ALLOWED_MODES)),
    "tools": s.required(s.array(_TOOL, least=1, about="By their names; others are not shown to the model.")),
}
TOOL_CHOICE = s.any_of(
    s.enum(None, "none", "auto", "required"),
    s.tagged("function", {"function": s.described({"name": s.TEXT})}),
    s.tagged("allowed_tools", {"allowed_tools": s.described(_ALLOWED_TOOLS)}),
)
# Cache markers of clients. No effect: common prompt prefixes are cached automatically.
CACHE_HINTS: Body = {"cache_control": NO_EFFECT, "prompt_cache_breakpoint": NO_EFFECT}
# Parts of the content of a message.
CONTENT_PARTS: tuple[Schema, ...] = (
    s.tagged("text", {"text": s.TEXT, **CACHE_HINTS}),
    s.tagged("refusal", {"refusal": s.TEXT, **CACHE_HINTS}),
)
DETAILS = ("auto", "low", "high", "original")
VISION_ONLY = "For models whose input_modalities contain image."
DATA_URL: Schema = {
    **s.TEXT,
    "pattern": "^data:image/",
    "description": "A data URL in base64, of a PNG, JPEG, WebP or GIF; nothing is fetched.",
}
BASE64: Schema = {**s.TEXT, "contentEncoding": "base64"}
_IMAGE = s.described({"url": DATA_URL, "detail": s.choice(DETAILS, "Reported as ignored.")})
_IMAGE_PART = s.tagged(
    "image_url", {"image_url": _IMAGE, **CACHE_HINTS}, about=f"{VISION_ONLY} In messages of the user."
)
IMAGES = s.array(BASE64, about=f"{VISION_ONLY} They stand before the text.")
CONTENT = s.any_of(s.TEXT, s.several(s.any_of(*CONTENT_PARTS, _IMAGE_PART)))
_ARGUMENTS = s.any_of({"type": ["string", "null", "object"]}, s.enum(0, False, []))
TOOL_CALL: Schema = s.described(
    {
        "id": s.ANYTHING,
        "type": s.ANYTHING,
        "index": NO_EFFECT,
        "function": s.described({"name": s.TEXT, "arguments": _ARGUMENTS, "index": NO_EFFECT}),
    }
)
_MESSAGE: Body = {
    "role": s.required(s.choice(ROLES)),
    "content": s.or_null(CONTENT),
    "name": s.text(),
    "tool_call_id": s.text(),
    "reasoning_content": s.text(),
    "audio": s.one_of([]),
    "function_call": s.one_of([]),
}
_OF_ASSISTANT: Body = {
    **_MESSAGE,
    "role": s.const("assistant"),
    "refusal": s.text("Used as content if there is no other."),
    "reasoning": s.text("The same as reasoning_content."),
    "annotations": NO_EFFECT,
    "tool_calls": s.array(TOOL_CALL),
}
MESSAGE = s.any_of(
    s.described({**_MESSAGE, "content": CONTENT}),
    s.described({**_MESSAGE, "reasoning_content": s.TEXT}),
    s.described({**_OF_ASSISTANT, "tool_calls": s.required(s.array(TOOL_CALL, least=1))}, "role"),
    s.described({**_OF_ASSISTANT, "refusal": s.TEXT}, "role"),
    s.described({**_OF_ASSISTANT, "reasoning": s.TEXT}, "role"),
)
MESSAGES: Schema = s.required(s.array(MESSAGE, least=1))
# Fields that determine the prompt of a chat.
CONVERSATION: Body = {
    "messages": MESSAGES,
    "tools": TOOLS,
    "documents": s.array(s.ANY_OBJECT, about="For chat templates that use documents."),
    "chat_template_kwargs": s.or_null({**s.ANY_OBJECT, "description": "Variables of the chat template."}),
    "reasoning_effort": s.choice(EFFORTS, "none: reasoning is off, if the chat template has a switch."),
    "verbosity": s.choice(VERBOSITIES),
    "add_generation_prompt": s.flag(),
    "continue_final_message": s.flag(),
}
TOOL_USE: Body = {"tool_choice": TOOL_CHOICE, "parallel_tool_calls": s.flag()}
CHAT: Body = {
    **COMMON,
    **CONVERSATION,
    **TOOL_USE,
    "logprobs": s.flag(),
    "top_logprobs": s.integer(0, None, "At most the model's max-logprobs."),
    "reasoning_format": s.choice(("none", "auto", "deepseek")),
    "include_reasoning": s.flag("false: the reasoning is omitted."),
    **s.members(
        s.integer(-1, MAX_INT32, "Tokens after which reasoning is ended; 0: no reasoning, -1: no limit."),
        *REASONING_BUDGETS,
    ),
    "store": s.flag("No effect: nothing is stored."),
    "add_special_tokens": s.one_of([False], "Not supported: the chat template adds them."),
    "adapters": ADAPTERS,
    "lora": ADAPTERS,
}


def skip_all_but(body: Body, *read: Body) -> Body:
    """Return `body` for a route that reads only the fields in `read`; all others accept any value."""
    names = {name for fields in read for name in fields}
    return {name: schema if name in names else s.ANYTHING for name, schema in body.items()}


CHAT_TOKENS = skip_all_but(CHAT, CONVERSATION, TOOL_USE)
# Fields of a text completion that other dialects share.
TEXT_COMPLETION: Body = {
    **COMMON,
    "prompt": TEXTS,
    "logprobs": s.integer(0, None, "At most the model's max-logprobs."),
    **s.members(MAX_TOKENS_OR_ZERO, "max_tokens", "max_completion_tokens", "n_predict"),
    **s.members(ADAPTERS, "adapters", "lora"),
}
COMPLETIONS: Body = {
    **TEXT_COMPLETION,
    "add_special_tokens": s.flag("Add the tokenizer's special tokens to the prompt; true unless stated."),
    "suffix": s.text("What follows the gap, for models that can fill one in."),
    "echo": s.flag(),
    "best_of": s.integer(1, MAX_CHOICES),
}
_TRUNCATE = s.any_of(
    {"type": ["boolean", "null"]},
    {**s.TEXT, "pattern": "^([Nn][Oo][Nn][Ee]|[Ee][Nn][Dd])$"},
    about="Truncate texts that are too long instead of rejecting them.",
)
_CUT = s.any_of(
    s.or_null(_FROM_ONE),
    s.const(-1),
    about="Truncate longer texts to this many tokens, or all that fit; -1 is `truncate`.",
)
_CUT_SIDE: Schema = s.one_of(["right"], "Where `truncate_prompt_tokens` cuts: only the end is supported.")
# Truncation of texts that are too long.
TRUNCATION: Body = {"truncate": _TRUNCATE, "truncate_prompt_tokens": _CUT, "truncation_side": _CUT_SIDE}
PROMPT_NAME: Schema = s.text("Name of one of the model's instructions, which is put before each text.")
EMBEDDINGS: Body = {
    "model": MODEL,
    "input": TEXTS,
    "encoding_format": s.choice(("float", "base64")),
    "dimensions": s.integer(1),
    "prompt_name": PROMPT_NAME,
    **TRUNCATION,
}

_TOP: dict[str, Schema] = {"token": s.TEXT, "logprob": s.or_null(s.NUMBER), "bytes": s.several(s.COUNT)}
TOKEN_LOGPROBS = s.several(s.shape({**_TOP, "top_logprobs": s.several(s.shape(_TOP))}))
_LOGPROBS = s.or_null(s.shape({"content": TOKEN_LOGPROBS, "refusal": s.NULL}))
_LEGACY_LOGPROBS = s.shape(
    {
        "tokens": s.several(s.TEXT),
        "token_logprobs": s.several(s.or_null(s.NUMBER)),
        "top_logprobs": s.several(s.or_null(s.by_name(s.or_null(s.NUMBER)))),
        "text_offset": s.several(s.COUNT),
    }
)
_PROMPT_LOGPROB = s.shape({"logprob": s.or_null(s.NUMBER), "rank": s.or_null(s.COUNT), "decoded_token": s.TEXT})
_PROMPT_LOGPROBS = s.several(s.or_null(s.by_name(_PROMPT_LOGPROB)))
PROMPT_PROGRESS = s.shape({**s.members(s.COUNT, "total", "cache", "processed"), "time_ms": s.NUMBER})
_CALL: dict[str, Schema] = {
    "id": s.TEXT,
    "type": s.const("function"),
    "function": s.shape({"name": s.TEXT, "arguments": s.TEXT}),
}
_REPLY = s.shape(
    {"role": s.const("assistant"), "content": s.or_null(s.TEXT), "refusal": s.NULL},
    {**s.members(s.TEXT, "reasoning_content", "reasoning"), "tool_calls": s.several(s.shape(_CALL))},
)
_DELTA: dict[str, Schema] = {
    "role": s.const("assistant"),
    "content": s.or_null(s.TEXT),
    **s.members(s.TEXT, "reasoning_content", "reasoning"),
    "tool_calls": s.several(s.shape({"index": s.COUNT, **_CALL})),
}
_FINISH = s.enum("stop", "length", "tool_calls")
_CHOICE: dict[str, Schema] = {"index": s.COUNT, "logprobs": _LOGPROBS}
_TEXT_CHOICE: dict[str, Schema] = {
    "index": s.COUNT,
    "text": s.TEXT,
    "logprobs": s.or_null(_LEGACY_LOGPROBS),
    "finish_reason": s.or_null(s.enum("stop", "length")),
}
_HEAD: dict[str, Schema] = {"created": s.COUNT, **s.members(s.TEXT, "id", "model", "system_fingerprint")}
# Members that some requests ask for, or that only the last chunk has.
_STOP_REASON: dict[str, Schema] = {"stop_reason": s.any_of(s.TEXT, s.COUNT, s.NULL)}
_IDS = s.several(s.COUNT)
_OF_PROMPT: dict[str, Schema] = {"prompt_logprobs": _PROMPT_LOGPROBS, "prompt_token_ids": _IDS}
_OF_CHUNK: dict[str, Schema] = {
    "usage": s.or_null(s.ref("Usage")),
    "timings": s.ref("Timings"),
    "prompt_progress": PROMPT_PROGRESS,
}
_EMBEDDING = s.shape(
    {"object": s.const("embedding"), "index": s.COUNT, "embedding": s.any_of(s.several(s.NUMBER), BASE64)}
)

COMPONENTS: Mapping[str, Schema] = {
    "Usage": s.shape(
        {
            **s.members(s.COUNT, "prompt_tokens", "completion_tokens", "total_tokens"),
            "prompt_tokens_details": s.shape({"cached_tokens": s.COUNT}),
            "completion_tokens_details": s.shape(
                {"reasoning_tokens": s.COUNT},
                s.members(
                    s.COUNT, "accepted_prediction_tokens", "rejected_prediction_tokens"
                ),  # with speculative decoding
            ),
        }
    ),
    "PromptUsage": s.shape(s.members(s.COUNT, "prompt_tokens", "total_tokens")),
    "Timings": s.shape(
        {
            **s.members(s.COUNT, "cache_n", "prompt_n", "predicted_n"),
            **s.members(s.NUMBER, "prompt_ms", "prompt_per_token_ms", "prompt_per_second"),
            **s.members(s.NUMBER, "predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
        },
        s.members(s.COUNT, "draft_n", "draft_n_accepted"),  # with speculative decoding
    ),
    "ChatCompletion": s.shape(
        {
            **_HEAD,
            "object": s.const("chat.completion"),
            "choices": s.several(
                s.shape({**_CHOICE, **_STOP_REASON, "message": _REPLY, "finish_reason": _FINISH}, {"token_ids": _IDS})
            ),
            "usage": s.ref("Usage"),
            "timings": s.ref("Timings"),
        },
        _OF_PROMPT,
    ),
    "ChatCompletionChunk": s.shape(
        {
            **_HEAD,
            "object": s.const("chat.completion.chunk"),
            "choices": s.several(
                s.shape(
                    {**_CHOICE, "delta": s.shape({}, _DELTA), "finish_reason": s.or_null(_FINISH)},
                    {"token_ids": _IDS, **_STOP_REASON},
                )
            ),
        },
        {**_OF_CHUNK, "prompt_token_ids": _IDS},
    ),
    "Completion": s.shape(
        {
            **_HEAD,
            "object": s.const("text_completion"),
            "choices": s.several(s.shape(_TEXT_CHOICE, {"token_ids": _IDS, **_OF_PROMPT, **_STOP_REASON})),
        },
        _OF_CHUNK,
    ),
    "Embeddings": s.shape(
        {"object": s.const("list"), "model": s.TEXT, "data": s.several(_EMBEDDING), "usage": s.ref("PromptUsage")}
    ),
}

CHAT_RESPONSE = ResponseSchema(body=s.ref("ChatCompletion"), frame=s.ref("ChatCompletionChunk"))
COMPLETIONS_RESPONSE = ResponseSchema(body=s.ref("Completion"), frame=s.ref("Completion"))
EMBEDDINGS_RESPONSE = ResponseSchema(body=s.ref("Embeddings"))
CHAT_INPUT_TOKENS_RESPONSE = ResponseSchema(body=s.ref("InputTokens"))
