"""Anthropic's API: schemas of requests and responses."""

from collections.abc import Mapping

from worker.protocol.dialects.generation_fields import MAX_STOPS, MAX_TOOLS, NO_EFFECT, NON_EMPTY_TEXT, tuning
from worker.protocol.dialects.openai import BASE64, CONVERSATION, MODEL, PING_INTERVAL, VISION_ONLY, skip_all_but
from worker.protocol.schema import (
    ANY_OBJECT,
    ANYTHING,
    COUNT,
    NULL,
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

_OF_BLOCKS: Body = {"cache_control": NO_EFFECT}
_BLOCK_TEXT = tagged("text", {"text": TEXT, "citations": NO_EFFECT, **_OF_BLOCKS})
_IMAGE_SOURCE = tagged("base64", {"media_type": {**TEXT, "description": "For example image/png."}, "data": BASE64})
_BLOCK_IMAGE = tagged("image", {"source": _IMAGE_SOURCE, **_OF_BLOCKS}, about=VISION_ONLY)
_BLOCK_RESULT = tagged(
    "tool_result",
    {
        "tool_use_id": TEXT,
        "content": any_of(TEXT, several(any_of(_BLOCK_TEXT, _BLOCK_IMAGE)), enum(None, False, 0, {})),
        "is_error": ANYTHING,
        **_OF_BLOCKS,
    },
)
_BLOCKS = (_BLOCK_TEXT, _BLOCK_IMAGE, _BLOCK_RESULT)
_ANSWER_BLOCKS: tuple[Schema, ...] = (
    _BLOCK_TEXT,
    _BLOCK_IMAGE,
    tagged("tool_use", {"id": TEXT, "name": TEXT, "input": ANY_OBJECT, "caller": NO_EFFECT, **_OF_BLOCKS}),
    tagged("thinking", {"thinking": TEXT, "signature": NO_EFFECT}),
    tagged("redacted_thinking", {"data": {"description": "Ignored: encrypted."}}),
)


def _message(role: str, *blocks: Schema) -> Schema:
    return described({"role": const(role), "content": any_of(TEXT, several(any_of(*blocks)))}, "role")


TOOL_CHOICE: Body = {
    "type": required(choice(("auto", "any", "tool", "none"))),
    "name": text(),
    "disable_parallel_tool_use": flag(),
}
THINKING: Body = {
    "type": required(choice(("enabled", "disabled", "adaptive"))),
    "budget_tokens": integer(1),
}
_FORMAT = or_null(tagged("json_schema", {"schema": ANY_OBJECT}))
OUTPUT: Body = {"effort": choice(("low", "medium", "high", "xhigh", "max")), "format": _FORMAT}
_TOOL = described(
    {
        "type": any_of(const("custom"), {"not": TEXT}),
        "name": TEXT,
        "input_schema": ANY_OBJECT,
        "description": ANYTHING,
        "strict": ANYTHING,
        **_OF_BLOCKS,
    }
)
_MESSAGES = any_of(_message("user", *_BLOCKS), _message("assistant", *_ANSWER_BLOCKS), _message("system", _BLOCK_TEXT))
PROMPT: Body = {
    "model": MODEL,
    "messages": required(array(_MESSAGES, least=1)),
    "system": any_of(TEXT, several(_BLOCK_TEXT), NULL),
    "tools": array(_TOOL, most=MAX_TOOLS),
    "tool_choice": record(TOOL_CHOICE),
    "thinking": record(THINKING),
    "output_config": record(OUTPUT),
    "output_format": _FORMAT,
    "chat_template_kwargs": CONVERSATION["chat_template_kwargs"],  # vLLM's
    **members(one_of([[], {}, ""]), "mcp_servers", "container", "compaction", "thread"),
    "context_management": or_null({**ANY_OBJECT, "description": "Reported as ignored: the context is never edited."}),
    "cache_control": {"description": "No effect: common prompt prefixes are cached automatically."},
}
MESSAGES: Body = {
    **PROMPT,
    "max_tokens": integer(1),
    **tuning("temperature", "top_p", "top_k"),
    "stop_sequences": array(NON_EMPTY_TEXT, most=MAX_STOPS),
    "stream": flag(),
    "sse_ping_interval": PING_INTERVAL,
}
COUNT_TOKENS = skip_all_but({name: schema for name, schema in MESSAGES.items() if name != "sse_ping_interval"}, PROMPT)

_ANSWER_BLOCK = any_of(
    shape({"type": const("text"), "text": TEXT}),
    shape({"type": const("thinking"), "thinking": TEXT, "signature": TEXT}),
    shape({"type": const("tool_use"), "id": TEXT, "name": TEXT, "input": ANY_OBJECT}),
)
_STOP = shape({"stop_reason": TEXT, "stop_sequence": or_null(TEXT), "stop_details": NULL})
COMPONENTS: Mapping[str, Schema] = {
    "AnthropicUsage": shape(
        members(COUNT, "input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    ),
    "Message": shape(
        {
            "id": TEXT,
            "type": const("message"),
            "role": const("assistant"),
            "model": TEXT,
            "content": several(_ANSWER_BLOCK),
            "stop_reason": or_null(enum("end_turn", "max_tokens", "stop_sequence", "tool_use")),
            "stop_sequence": or_null(TEXT),
            "stop_details": NULL,
            "usage": ref("AnthropicUsage"),
        }
    ),
    "MessageEvent": any_of(
        shape({"type": const("message_start"), "message": ref("Message")}),
        shape({"type": const("content_block_start"), "index": COUNT, "content_block": ANY_OBJECT}),
        shape({"type": const("content_block_delta"), "index": COUNT, "delta": by_name(TEXT)}),
        shape({"type": const("content_block_stop"), "index": COUNT}),
        shape({"type": const("message_delta"), "delta": _STOP, "usage": ref("AnthropicUsage")}),
        shape({"type": enum("message_stop", "ping")}),
    ),
}

MESSAGES_RESPONSE = ResponseSchema(body=ref("Message"), frame=ref("MessageEvent"))
COUNT_TOKENS_RESPONSE = ResponseSchema(body=shape({"input_tokens": COUNT}))
