"""What OpenAI's responses answer, and the counts of tokens that came with them."""

from collections.abc import Mapping

from router.answers.openai import PROMPT_PROGRESS, TOKENS
from router.answers.words import (
    ANY_OBJECT,
    COUNT,
    FLAG,
    NULL,
    NUMBER,
    TEXT,
    Answer,
    Schema,
    const,
    enum,
    maybe,
    ref,
    several,
    shape,
)

_OUTPUT_TEXT = shape(
    {"type": const("output_text"), "text": TEXT, "annotations": several(ANY_OBJECT), "logprobs": TOKENS}
)
_THOUGHT = shape({"type": const("reasoning_text"), "text": TEXT})
_ITEM_STATUS = enum("in_progress", "completed", "incomplete")
_EVENT: dict[str, Schema] = {"type": TEXT, "sequence_number": COUNT}
_ABOUT_ITEM: dict[str, Schema] = {**_EVENT, "item_id": TEXT, "output_index": COUNT}

COMPONENTS: Mapping[str, Schema] = {
    "ResponseItem": {
        "anyOf": [
            shape(
                {
                    "id": TEXT,
                    "type": const("message"),
                    "role": const("assistant"),
                    "status": _ITEM_STATUS,
                    "content": several(_OUTPUT_TEXT),
                }
            ),
            shape(
                {
                    "id": TEXT,
                    "type": const("reasoning"),
                    "summary": several(ANY_OBJECT),
                    "status": _ITEM_STATUS,
                    "content": several(_THOUGHT),
                }
            ),
            shape(
                {
                    "id": TEXT,
                    "type": const("function_call"),
                    "call_id": TEXT,
                    "name": TEXT,
                    "arguments": TEXT,
                    "status": _ITEM_STATUS,
                }
            ),
        ]
    },
    "Response": shape(
        {
            "id": TEXT,
            "object": const("response"),
            "created_at": COUNT,
            "model": TEXT,
            "status": enum("in_progress", "completed", "incomplete"),
            "error": NULL,
            "incomplete_details": maybe(shape({"reason": const("max_output_tokens")})),
            "previous_response_id": NULL,
            "store": const(False),
            "background": const(False),
            "temperature": NUMBER,
            "top_p": NUMBER,
            "truncation": const("disabled"),
            "instructions": maybe(TEXT),
            "max_output_tokens": maybe(COUNT),
            "metadata": ANY_OBJECT,
            "parallel_tool_calls": FLAG,
            "reasoning": shape({"effort": maybe(TEXT), "summary": NULL}),
            "text": shape({"format": ANY_OBJECT}),
            "tool_choice": {"anyOf": [TEXT, ANY_OBJECT]},
            "tools": several(ANY_OBJECT),
            "top_logprobs": COUNT,
            "output": several(ref("ResponseItem")),
            "usage": maybe(
                shape(
                    {
                        "input_tokens": COUNT,
                        "input_tokens_details": shape({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
                        "output_tokens": COUNT,
                        "output_tokens_details": shape({"reasoning_tokens": COUNT}),
                        "total_tokens": COUNT,
                    }
                )
            ),
        }
    ),
    "ResponseEvent": {
        "anyOf": [
            shape(
                {**_EVENT, "response": ref("Response")},
                {"prompt_progress": PROMPT_PROGRESS, "timings": ref("Timings")},
            ),
            shape({**_EVENT, "output_index": COUNT, "item": ref("ResponseItem")}),
            shape({**_EVENT, "output_index": COUNT, "item": ANY_OBJECT}),
            shape({**_ABOUT_ITEM, "content_index": COUNT, "part": {"anyOf": [_OUTPUT_TEXT, _THOUGHT]}}),
            shape(
                {**_ABOUT_ITEM, "content_index": COUNT, "delta": TEXT}, {"logprobs": TOKENS, "timings": ref("Timings")}
            ),
            shape({**_ABOUT_ITEM, "content_index": COUNT, "text": TEXT}, {"logprobs": TOKENS}),
            shape({**_ABOUT_ITEM, "delta": TEXT}, {"timings": ref("Timings")}),
            shape({**_ABOUT_ITEM, "name": TEXT, "arguments": TEXT}),
        ]
    },
    "InputTokens": shape({"object": const("response.input_tokens"), "input_tokens": COUNT}),
}

ANSWERS: Mapping[str, Answer] = {
    "responses": Answer(body=ref("Response"), frame=ref("ResponseEvent"), about="A response."),
    "responses_input_tokens": Answer(body=ref("InputTokens"), about="Tokens of the prompt that this input makes."),
    "chat_input_tokens": Answer(body=ref("InputTokens"), about="Tokens of the prompt that this chat makes."),
}
