"""What Anthropic's messages answer."""

from collections.abc import Mapping

from router.answers.words import (
    ANY_OBJECT,
    COUNT,
    NULL,
    TEXT,
    Answer,
    Schema,
    by_name,
    const,
    enum,
    maybe,
    ref,
    several,
    shape,
)

COMPONENTS: Mapping[str, Schema] = {
    "AnthropicUsage": shape(
        {
            "input_tokens": COUNT,
            "output_tokens": COUNT,
            "cache_read_input_tokens": COUNT,
            "cache_creation_input_tokens": COUNT,
        }
    ),
    "Message": shape(
        {
            "id": TEXT,
            "type": const("message"),
            "role": const("assistant"),
            "model": TEXT,
            "content": several(
                {
                    "anyOf": [
                        shape({"type": const("text"), "text": TEXT}),
                        shape({"type": const("thinking"), "thinking": TEXT, "signature": TEXT}),
                        shape({"type": const("tool_use"), "id": TEXT, "name": TEXT, "input": ANY_OBJECT}),
                    ]
                }
            ),
            "stop_reason": maybe(enum("end_turn", "max_tokens", "stop_sequence", "tool_use")),
            "stop_sequence": maybe(TEXT),
            "stop_details": NULL,
            "usage": ref("AnthropicUsage"),
        }
    ),
    "MessageEvent": {
        "anyOf": [
            shape({"type": const("message_start"), "message": ref("Message")}),
            shape({"type": const("content_block_start"), "index": COUNT, "content_block": ANY_OBJECT}),
            shape({"type": const("content_block_delta"), "index": COUNT, "delta": by_name(TEXT)}),
            shape({"type": const("content_block_stop"), "index": COUNT}),
            shape(
                {
                    "type": const("message_delta"),
                    "delta": shape({"stop_reason": TEXT, "stop_sequence": maybe(TEXT), "stop_details": NULL}),
                    "usage": ref("AnthropicUsage"),
                }
            ),
            shape({"type": enum("message_stop", "ping")}),
        ]
    },
}

ANSWERS: Mapping[str, Answer] = {
    "messages": Answer(body=ref("Message"), frame=ref("MessageEvent"), about="One message of the assistant."),
    "count_tokens": Answer(body=shape({"input_tokens": COUNT}), about="Tokens of the prompt that these messages make."),
}
