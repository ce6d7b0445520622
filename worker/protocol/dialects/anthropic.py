"""Anthropic's API: schemas of requests and responses."""

from collections.abc import Mapping

from worker.protocol import schema as s
from worker.protocol.dialects.generation_fields import MAX_STOPS, MAX_TOOLS, NO_EFFECT, STOP_TEXT, tuning
from worker.protocol.dialects.openai import BASE64, CONVERSATION, MODEL, PING_INTERVAL, VISION_ONLY, skip_all_but
from worker.protocol.schema import Body, ResponseSchema, Schema

_OF_BLOCKS: Body = {"cache_control": NO_EFFECT}
_BLOCK_TEXT = s.tagged("text", {"text": s.TEXT, "citations": NO_EFFECT, **_OF_BLOCKS})
_IMAGE_SOURCE = s.tagged("base64", {"media_type": {**s.TEXT, "description": "For example image/png."}, "data": BASE64})
_BLOCK_IMAGE = s.tagged("image", {"source": _IMAGE_SOURCE, **_OF_BLOCKS}, about=VISION_ONLY)
# Without `citations`: answers have none, so a request for them is reported as ignored.
_BLOCK_DOCUMENT = s.tagged(
    "document",
    {
        "source": s.tagged("text", {"media_type": NO_EFFECT, "data": s.TEXT}),
        "title": s.text(),
        "context": s.text(),
        **_OF_BLOCKS,
    },
    about="Plain text: title, context and data become lines of the prompt.",
)
_OF_RESULT = s.several(s.any_of(_BLOCK_TEXT, _BLOCK_IMAGE, _BLOCK_DOCUMENT))
_BLOCK_RESULT = s.tagged(
    "tool_result",
    {
        "tool_use_id": s.TEXT,
        "content": s.any_of(s.TEXT, _OF_RESULT, s.enum(None, False, 0, {})),
        "is_error": s.ANYTHING,
        **_OF_BLOCKS,
    },
)
_BLOCKS = (_BLOCK_TEXT, _BLOCK_IMAGE, _BLOCK_DOCUMENT, _BLOCK_RESULT)
_ANSWER_BLOCKS: tuple[Schema, ...] = (
    _BLOCK_TEXT,
    _BLOCK_IMAGE,
    s.tagged("tool_use", {"id": s.TEXT, "name": s.TEXT, "input": s.ANY_OBJECT, "caller": NO_EFFECT, **_OF_BLOCKS}),
    s.tagged("thinking", {"thinking": s.TEXT, "signature": NO_EFFECT}),
    s.tagged("redacted_thinking", {"data": {"description": "Ignored: encrypted."}}),
)


def _message(role: str, *blocks: Schema) -> Schema:
    return s.described({"role": s.const(role), "content": s.any_of(s.TEXT, s.several(s.any_of(*blocks)))}, "role")


TOOL_CHOICE: Body = {
    "type": s.required(s.choice(("auto", "any", "tool", "none"))),
    "name": s.text(),
    "disable_parallel_tool_use": s.flag(),
}
THINKING: Body = {
    "type": s.required(s.choice(("enabled", "disabled", "adaptive"))),
    "budget_tokens": s.integer(1),
}
_FORMAT = s.or_null(s.tagged("json_schema", {"schema": s.ANY_OBJECT}))
OUTPUT: Body = {"effort": s.choice(("low", "medium", "high", "xhigh", "max")), "format": _FORMAT}
_TOOL = s.described(
    {
        "type": s.any_of(s.const("custom"), {"not": s.TEXT}),
        "name": s.TEXT,
        "input_schema": s.ANY_OBJECT,
        "description": s.ANYTHING,
        "strict": s.ANYTHING,
        **_OF_BLOCKS,
    }
)
_MESSAGES = s.any_of(
    _message("user", *_BLOCKS), _message("assistant", *_ANSWER_BLOCKS), _message("system", _BLOCK_TEXT)
)
PROMPT: Body = {
    "model": MODEL,
    "messages": s.required(s.array(_MESSAGES, least=1)),
    "system": s.any_of(s.TEXT, s.several(_BLOCK_TEXT), s.NULL),
    "tools": s.array(_TOOL, most=MAX_TOOLS),
    "tool_choice": s.record(TOOL_CHOICE),
    "thinking": s.record(THINKING),
    "output_config": s.record(OUTPUT),
    "output_format": _FORMAT,
    "chat_template_kwargs": CONVERSATION["chat_template_kwargs"],  # vLLM's
    **s.members(s.one_of([[], {}, ""]), "mcp_servers", "container", "compaction", "thread"),
    "context_management": s.or_null(
        {**s.ANY_OBJECT, "description": "Reported as ignored: the context is never edited."}
    ),
    "cache_control": {"description": "No effect: common prompt prefixes are cached automatically."},
}
MESSAGES: Body = {
    **PROMPT,
    "max_tokens": s.integer(1),
    **tuning("temperature", "top_p", "top_k"),
    "stop_sequences": s.array(STOP_TEXT, most=MAX_STOPS),
    "stream": s.flag(),
    "sse_ping_interval": PING_INTERVAL,
}
COUNT_TOKENS = skip_all_but({name: schema for name, schema in MESSAGES.items() if name != "sse_ping_interval"}, PROMPT)

_ANSWER_BLOCK = s.any_of(
    s.shape({"type": s.const("text"), "text": s.TEXT}),
    s.shape({"type": s.const("thinking"), "thinking": s.TEXT, "signature": s.TEXT}),
    s.shape({"type": s.const("tool_use"), "id": s.TEXT, "name": s.TEXT, "input": s.ANY_OBJECT}),
)
_STOP = s.shape({"stop_reason": s.TEXT, "stop_sequence": s.or_null(s.TEXT), "stop_details": s.NULL})
COMPONENTS: Mapping[str, Schema] = {
    "AnthropicUsage": s.shape(
        s.members(s.COUNT, "input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"),
        {"output_tokens_details": s.shape({"thinking_tokens": s.COUNT})},
    ),
    "Message": s.shape(
        {
            "id": s.TEXT,
            "type": s.const("message"),
            "role": s.const("assistant"),
            "model": s.TEXT,
            "content": s.several(_ANSWER_BLOCK),
            "stop_reason": s.or_null(
                s.enum("end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use")
            ),
            "stop_sequence": s.or_null(s.TEXT),
            "stop_details": s.NULL,
            "usage": s.ref("AnthropicUsage"),
        }
    ),
    "MessageEvent": s.any_of(
        s.shape({"type": s.const("message_start"), "message": s.ref("Message")}),
        s.shape({"type": s.const("content_block_start"), "index": s.COUNT, "content_block": s.ANY_OBJECT}),
        s.shape({"type": s.const("content_block_delta"), "index": s.COUNT, "delta": s.by_name(s.TEXT)}),
        s.shape({"type": s.const("content_block_stop"), "index": s.COUNT}),
        s.shape({"type": s.const("message_delta"), "delta": _STOP, "usage": s.ref("AnthropicUsage")}),
        s.shape({"type": s.enum("message_stop", "ping")}),
    ),
}

MESSAGES_RESPONSE = ResponseSchema(body=s.ref("Message"), frame=s.ref("MessageEvent"))
COUNT_TOKENS_RESPONSE = ResponseSchema(body=s.shape({"input_tokens": s.COUNT}))
