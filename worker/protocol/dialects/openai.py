"""OpenAI's API: schemas of requests and responses."""

from collections.abc import Mapping

from worker.protocol.dialects.generation_fields import (
    EFFORTS,
    GRAMMAR,
    MAX_CHOICES,
    MAX_INT32,
    MAX_TEXTS,
    MAX_TOOLS,
    NO_EFFECT,
    REASONING_BUDGETS,
    ROLES,
    SAMPLING,
    SPECULATION,
    VERBOSITIES,
)
from worker.protocol.schema import (
    ANY_OBJECT,
    ANYTHING,
    COUNT,
    NULL,
    NUMBER,
    TEXT,
    Body,
    ResponseSchema,
    Schema,
    any_of,
    array,
    by_name,
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
    tagged,
    text,
)

STREAM_OPTIONS: Body = {
    "include_usage": flag(),
    "continuous_usage_stats": flag("With include_usage: every chunk contains the usage so far."),
    "include_obfuscation": flag("Reported as ignored if true: nothing is added to chunks."),
}
PING_INTERVAL = any_of(
    or_null({**NUMBER, "minimum": 0.01, "maximum": 86400}),
    const(-1),
    about="Seconds of silence in a stream before a comment; -1 is never.",
)
MODEL: Schema = text("Id or alias; required if several models are configured and none is the default.")
_FROM_ONE: Schema = {**COUNT, "minimum": 1}
MAX_TOKENS = any_of(or_null(_FROM_ONE), const(-1), about="New tokens at most; -1 is all that fits.")
MAX_TOKENS_OR_ZERO: Schema = integer(-1, None, "New tokens at most; -1 is all that fits.")
_SCALE: Schema = {**NUMBER, "minimum": -1e6, "maximum": 1e6}
_BY_ID: Schema = {**described({"id": COUNT, "scale": _SCALE}), "required": ["id"]}
_BY_NAME: Schema = {**described({"name": {**TEXT, "minLength": 1}, "scale": _SCALE}), "required": ["name"]}
ADAPTERS = any_of(
    or_null(TEXT),
    several(TEXT),
    several(any_of(_BY_ID, _BY_NAME)),
    about="A LoRA adapter by name, one for each of several prompts, or one with its scale, by name or by its place in"
    " GET /lora-adapters. Empty is none.",
)
TOKENS_AND_TEXTS: Schema = {**several(any_of(COUNT, TEXT)), "minItems": 1}
_PARTS: Schema = {**several(described({"type": const("text"), "text": TEXT})), "minItems": 1}
# Objects that llama-server accepts in place of a text.
TEXT_OBJECTS: tuple[Schema, ...] = (
    described({"prompt_string": TEXT, "multimodal_data": one_of([[]], "Not supported: send a chat.")}),
    described({"content": any_of(TEXT, _PARTS)}),
)
_TEXT_OR_TOKENS = (TEXT, TOKENS_AND_TEXTS, *TEXT_OBJECTS)
TEXTS = any_of(
    *_TEXT_OR_TOKENS,
    {**several(any_of(*_TEXT_OR_TOKENS)), "minItems": 1, "maxItems": MAX_TEXTS},
    about="A text, several, token ids, or several arrays of them; texts may stand between token ids, and in objects of"
    " a prompt_string or of content.",
)
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
    **SPECULATION,
    **GRAMMAR,
    "max_tokens": MAX_TOKENS,
    "max_completion_tokens": MAX_TOKENS,
    "n_predict": MAX_TOKENS,
    "n": integer(1, MAX_CHOICES),
    "stream": flag(),
    "stream_options": record(STREAM_OPTIONS, "Only with stream: true."),
    **TOKEN_DETAILS,
    "stop_token_ids": array(COUNT, most=MAX_ENDS, about="Token ids that end the text."),
    "include_stop_str_in_output": flag("The stop string is part of the text."),
    "skip_special_tokens": flag("true unless stated."),
    "truncate_prompt_tokens": any_of(
        or_null(_FROM_ONE),
        const(-1),
        about="Truncate a longer prompt to this many tokens, the last ones by default; -1 is all that fit.",
    ),
    "truncation_side": choice(("left", "right"), "Where truncate_prompt_tokens cuts; left unless stated."),
    "cache_salt": text("The prefix cache is shared only with requests of the same salt."),
    "return_progress": flag("Chunks contain the progress of the prompt."),
    "timings_per_token": flag("Every chunk contains timings."),
    "sse_ping_interval": PING_INTERVAL,
}
ALLOWED_MODES = ("auto", "required")
_FUNCTION: Schema = described(
    {
        "name": TEXT,
        "description": ANYTHING,
        "parameters": {"description": "A JSON schema, an object; read where calls are held to it."},
        "strict": {
            "description": "true: arguments satisfy the parameters, where calls are held to them; else reported."
        },
    }
)
_TOOL = tagged("function", {"function": _FUNCTION})
TOOLS: Schema = array(_TOOL, most=MAX_TOOLS)
_ALLOWED_TOOLS: Body = {
    "mode": required(choice(ALLOWED_MODES)),
    "tools": required(array(_TOOL, least=1, about="By their names; others are not shown to the model.")),
}
TOOL_CHOICE = any_of(
    enum(None, "none", "auto", "required"),
    tagged("function", {"function": described({"name": TEXT})}),
    tagged("allowed_tools", {"allowed_tools": described(_ALLOWED_TOOLS)}),
)
# Cache markers of clients. No effect: common prompt prefixes are cached automatically.
CACHE_HINTS: Body = {"cache_control": NO_EFFECT, "prompt_cache_breakpoint": NO_EFFECT}
# Parts of the content of a message.
CONTENT_PARTS: tuple[Schema, ...] = (
    tagged("text", {"text": TEXT, **CACHE_HINTS}),
    tagged("refusal", {"refusal": TEXT, **CACHE_HINTS}),
)
DETAILS = ("auto", "low", "high", "original")
VISION_ONLY = "For models whose input_modalities contain image."
DATA_URL: Schema = {
    **TEXT,
    "pattern": "^data:image/",
    "description": "A data URL in base64, of a PNG, JPEG, WebP or GIF; nothing is fetched.",
}
BASE64: Schema = {**TEXT, "contentEncoding": "base64"}
_IMAGE = described({"url": DATA_URL, "detail": choice(DETAILS, "Reported as ignored.")})
_IMAGE_PART = tagged("image_url", {"image_url": _IMAGE, **CACHE_HINTS}, about=f"{VISION_ONLY} In messages of the user.")
IMAGES = array(BASE64, about=f"{VISION_ONLY} They stand before the text.")
CONTENT = any_of(TEXT, several(any_of(*CONTENT_PARTS, _IMAGE_PART)))
_ARGUMENTS = any_of({"type": ["string", "null", "object"]}, enum(0, False, []))
TOOL_CALL: Schema = described(
    {
        "id": ANYTHING,
        "type": ANYTHING,
        "index": NO_EFFECT,
        "function": described({"name": TEXT, "arguments": _ARGUMENTS}),
    }
)
_MESSAGE: Body = {
    "role": required(choice(ROLES)),
    "content": or_null(CONTENT),
    "name": text(),
    "tool_call_id": text(),
    "reasoning_content": text(),
    "audio": one_of([]),
    "function_call": one_of([]),
}
_OF_ASSISTANT: Body = {
    **_MESSAGE,
    "role": const("assistant"),
    "refusal": text("Used as content if there is no other."),
    "reasoning": text("The same as reasoning_content."),
    "annotations": NO_EFFECT,
    "tool_calls": array(TOOL_CALL),
}
MESSAGE = any_of(
    described({**_MESSAGE, "content": CONTENT}),
    described({**_MESSAGE, "reasoning_content": TEXT}),
    described({**_OF_ASSISTANT, "tool_calls": required(array(TOOL_CALL, least=1))}, "role"),
    described({**_OF_ASSISTANT, "refusal": TEXT}, "role"),
    described({**_OF_ASSISTANT, "reasoning": TEXT}, "role"),
)
MESSAGES: Schema = required(array(MESSAGE, least=1))
# Fields that determine the prompt of a chat.
CONVERSATION: Body = {
    "messages": MESSAGES,
    "tools": TOOLS,
    "documents": array(ANY_OBJECT, about="For chat templates that use documents."),
    "chat_template_kwargs": or_null({**ANY_OBJECT, "description": "Variables of the chat template."}),
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
    **members(
        integer(-1, MAX_INT32, "Tokens after which reasoning is ended; 0: no reasoning, -1: no limit."),
        *REASONING_BUDGETS,
    ),
    "store": flag("No effect: nothing is stored."),
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
TEXT_COMPLETION: Body = {
    **COMMON,
    "prompt": TEXTS,
    "logprobs": integer(0, None, "At most the model's max-logprobs."),
    **members(MAX_TOKENS_OR_ZERO, "max_tokens", "max_completion_tokens", "n_predict"),
    **members(ADAPTERS, "adapters", "lora"),
}
COMPLETIONS: Body = {
    **TEXT_COMPLETION,
    "add_special_tokens": flag("Add the tokenizer's special tokens to the prompt; true unless stated."),
    "suffix": text("What follows the gap, for models that can fill one in."),
    "echo": flag(),
    "best_of": integer(1, MAX_CHOICES),
}
_TRUNCATE = any_of(
    {"type": ["boolean", "null"]},
    {**TEXT, "pattern": "^([Nn][Oo][Nn][Ee]|[Ee][Nn][Dd])$"},
    about="Truncate texts that are too long instead of rejecting them.",
)
_CUT = any_of(
    or_null(_FROM_ONE), const(-1), about="Truncate longer texts to this many tokens, or all that fit; -1 is `truncate`."
)
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

_TOP: dict[str, Schema] = {"token": TEXT, "logprob": or_null(NUMBER), "bytes": several(COUNT)}
TOKEN_LOGPROBS = several(shape({**_TOP, "top_logprobs": several(shape(_TOP))}))
_LOGPROBS = or_null(shape({"content": TOKEN_LOGPROBS, "refusal": NULL}))
_LEGACY_LOGPROBS = shape(
    {
        "tokens": several(TEXT),
        "token_logprobs": several(or_null(NUMBER)),
        "top_logprobs": several(or_null(by_name(or_null(NUMBER)))),
        "text_offset": several(COUNT),
    }
)
_PROMPT_LOGPROB = shape({"logprob": or_null(NUMBER), "rank": or_null(COUNT), "decoded_token": TEXT})
_PROMPT_LOGPROBS = several(or_null(by_name(_PROMPT_LOGPROB)))
PROMPT_PROGRESS = shape({**members(COUNT, "total", "cache", "processed"), "time_ms": NUMBER})
_CALL: dict[str, Schema] = {
    "id": TEXT,
    "type": const("function"),
    "function": shape({"name": TEXT, "arguments": TEXT}),
}
_REPLY = shape(
    {"role": const("assistant"), "content": or_null(TEXT), "refusal": NULL},
    {**members(TEXT, "reasoning_content", "reasoning"), "tool_calls": several(shape(_CALL))},
)
_DELTA: dict[str, Schema] = {
    "role": const("assistant"),
    "content": or_null(TEXT),
    **members(TEXT, "reasoning_content", "reasoning"),
    "tool_calls": several(shape({"index": COUNT, **_CALL})),
}
_FINISH = enum("stop", "length", "tool_calls")
_CHOICE: dict[str, Schema] = {"index": COUNT, "logprobs": _LOGPROBS}
_TEXT_CHOICE: dict[str, Schema] = {
    "index": COUNT,
    "text": TEXT,
    "logprobs": or_null(_LEGACY_LOGPROBS),
    "finish_reason": or_null(enum("stop", "length")),
}
_HEAD: dict[str, Schema] = {"created": COUNT, **members(TEXT, "id", "model", "system_fingerprint")}
# Members that some requests ask for, or that only the last chunk has.
_STOP_REASON: dict[str, Schema] = {"stop_reason": any_of(TEXT, COUNT, NULL)}
_IDS = several(COUNT)
_OF_PROMPT: dict[str, Schema] = {"prompt_logprobs": _PROMPT_LOGPROBS, "prompt_token_ids": _IDS}
_OF_CHUNK: dict[str, Schema] = {
    "usage": or_null(ref("Usage")),
    "timings": ref("Timings"),
    "prompt_progress": PROMPT_PROGRESS,
}
_EMBEDDING = shape({"object": const("embedding"), "index": COUNT, "embedding": any_of(several(NUMBER), BASE64)})

COMPONENTS: Mapping[str, Schema] = {
    "Usage": shape(
        {
            **members(COUNT, "prompt_tokens", "completion_tokens", "total_tokens"),
            "prompt_tokens_details": shape({"cached_tokens": COUNT}),
            "completion_tokens_details": shape(
                {"reasoning_tokens": COUNT},
                members(COUNT, "accepted_prediction_tokens", "rejected_prediction_tokens"),  # with speculative decoding
            ),
        }
    ),
    "PromptUsage": shape(members(COUNT, "prompt_tokens", "total_tokens")),
    "Timings": shape(
        {
            **members(COUNT, "cache_n", "prompt_n", "predicted_n"),
            **members(NUMBER, "prompt_ms", "prompt_per_token_ms", "prompt_per_second"),
            **members(NUMBER, "predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
        },
        members(COUNT, "draft_n", "draft_n_accepted"),  # with speculative decoding
    ),
    "ChatCompletion": shape(
        {
            **_HEAD,
            "object": const("chat.completion"),
            "choices": several(
                shape({**_CHOICE, **_STOP_REASON, "message": _REPLY, "finish_reason": _FINISH}, {"token_ids": _IDS})
            ),
            "usage": ref("Usage"),
            "timings": ref("Timings"),
        },
        _OF_PROMPT,
    ),
    "ChatCompletionChunk": shape(
        {
            **_HEAD,
            "object": const("chat.completion.chunk"),
            "choices": several(
                shape(
                    {**_CHOICE, "delta": shape({}, _DELTA), "finish_reason": or_null(_FINISH)},
                    {"token_ids": _IDS, **_STOP_REASON},
                )
            ),
        },
        {**_OF_CHUNK, "prompt_token_ids": _IDS},
    ),
    "Completion": shape(
        {
            **_HEAD,
            "object": const("text_completion"),
            "choices": several(shape(_TEXT_CHOICE, {"token_ids": _IDS, **_OF_PROMPT, **_STOP_REASON})),
        },
        _OF_CHUNK,
    ),
    "Embeddings": shape(
        {"object": const("list"), "model": TEXT, "data": several(_EMBEDDING), "usage": ref("PromptUsage")}
    ),
}

CHAT_RESPONSE = ResponseSchema(body=ref("ChatCompletion"), frame=ref("ChatCompletionChunk"))
COMPLETIONS_RESPONSE = ResponseSchema(body=ref("Completion"), frame=ref("Completion"))
EMBEDDINGS_RESPONSE = ResponseSchema(body=ref("Embeddings"))
CHAT_INPUT_TOKENS_RESPONSE = ResponseSchema(body=ref("InputTokens"))
