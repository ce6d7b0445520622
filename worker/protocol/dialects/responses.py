"""OpenAI's Responses API: schemas of requests and responses."""

from collections.abc import Mapping

from worker.protocol import schema as s
from worker.protocol.dialects import openai
from worker.protocol.dialects.generation_fields import (
    EFFORTS,
    FREE_FORMATS,
    GRAMMAR,
    MAX_TOOLS,
    NAMED_SCHEMA,
    NO_EFFECT,
    ROLES,
    SAMPLING,
    VERBOSITIES,
    tuning,
)
from worker.protocol.dialects.openai import ADAPTERS, CACHE_HINTS, CONVERSATION, PROMPT_PROGRESS, TOKEN_LOGPROBS
from worker.protocol.schema import Body, ResponseSchema, Schema

_FUNCTION = s.tagged("function", {"name": s.TEXT, **s.members(s.ANYTHING, "description", "parameters", "strict")})
_OTHER_TOOL = s.described({"type": s.TEXT}, about="Another type, such as a hosted tool, is reported as ignored.")
_STATELESS = "Nothing is kept between requests."
_TEXT_PART = s.described(
    {
        "type": s.enum("input_text", "output_text", "text", "reasoning_text", "summary_text"),
        "text": s.TEXT,
        "annotations": NO_EFFECT,
        "logprobs": NO_EFFECT,
        **CACHE_HINTS,
    }
)
_IMAGE_PART = s.tagged(
    "input_image",
    {"image_url": openai.DATA_URL, "detail": s.choice(openai.DETAILS, "Reported as ignored."), **CACHE_HINTS},
    about=f"{openai.VISION_ONLY} In messages of the user and results of functions.",
)
_CONTENT = s.any_of(s.TEXT, s.several(s.any_of(_TEXT_PART, openai.CONTENT_PARTS[1], _IMAGE_PART)))
_REASONING_CONTENT = s.any_of(*_CONTENT["anyOf"], s.ANYTHING)
# Members of output items that have no effect when clients send them back as input.
_OF_ITEMS: Body = s.members(NO_EFFECT, "id", "status", "phase")
_MESSAGE = s.described(
    {"type": s.enum("message", "", None), "role": s.required(s.choice(ROLES)), "content": _CONTENT, **_OF_ITEMS}
)
_ITEM = s.any_of(
    _MESSAGE,
    s.tagged("function_call", {**s.members(s.TEXT, "call_id", "name", "arguments"), **_OF_ITEMS}),
    s.tagged("function_call_output", {"call_id": s.text(), "output": _CONTENT, **_OF_ITEMS}),
    s.tagged("reasoning", {**s.members(_REASONING_CONTENT, "content", "summary"), **_OF_ITEMS}),
)
STREAM_OPTIONS: Body = {"include_obfuscation": openai.STREAM_OPTIONS["include_obfuscation"]}
REASONING: Body = {"effort": s.choice(EFFORTS), "summary": s.ANYTHING, "generate_summary": s.ANYTHING}
_FORMAT = s.any_of(*FREE_FORMATS, s.tagged("json_schema", NAMED_SCHEMA))
TEXT_OPTIONS: Body = {"verbosity": s.choice(VERBOSITIES), "format": s.or_null(_FORMAT)}
# Fields of chats that are accepted in addition to OpenAI's fields of a response.
CHAT_FIELDS: Body = {
    **{name: schema for name, schema in SAMPLING.items() if name not in ("temperature", "top_p")},
    **GRAMMAR,
    "chat_template_kwargs": CONVERSATION["chat_template_kwargs"],
    "cache_salt": openai.COMMON["cache_salt"],
    "return_progress": s.flag("In streams: response.in_progress is repeated with the progress of the prompt."),
    "timings_per_token": s.flag("In streams: every delta and the last event contain timings."),
    "adapters": ADAPTERS,
    "lora": ADAPTERS,
}
# Values of `include`. All but the first are reported as ignored: reasoning is not encrypted, hosted tools are not run,
# and items of the input are not repeated.
INCLUDED = (
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
# Bytes in JSON of the fields that each event with the response repeats. The prompt may be without them, so
# the context does not limit them. OpenAI allows 16 texts of 512 characters in `metadata`.
MOST_REPEATED: Mapping[str, int] = {"metadata": 64 << 10, "tools": 1 << 20, "tool_choice": 1 << 20, "text": 1 << 20}
# Request fields without effect, of any type. A response repeats texts of at most MAX_NAME_LENGTH characters.
LABELS = ("safety_identifier", "prompt_cache_key")


def _most(name: str) -> str:
    return f"At most {MOST_REPEATED[name]} bytes of JSON."


_ALLOWED_TOOLS: Body = {
    "mode": s.required(s.choice(openai.ALLOWED_MODES)),
    "tools": s.required(s.array(_FUNCTION, least=1, about="By their names; others are not shown.")),
}
RESPONSES: Body = {
    **CHAT_FIELDS,
    "model": openai.MODEL,
    "input": s.any_of(s.TEXT, {**s.several(_ITEM), "minItems": 1}),
    "instructions": s.text(),
    "max_output_tokens": s.integer(1),
    **tuning("temperature", "top_p"),
    "tools": s.array(s.any_of(_FUNCTION, _OTHER_TOOL), most=MAX_TOOLS, about=_most("tools")),
    "tool_choice": s.any_of(
        s.enum(None, "none", "auto", "required"),
        s.tagged("function", {"name": s.TEXT}),
        s.tagged("allowed_tools", _ALLOWED_TOOLS),
        about=_most("tool_choice"),
    ),
    "parallel_tool_calls": s.flag(),
    "text": s.record(TEXT_OPTIONS, about=_most("text")),
    "reasoning": s.record(REASONING),
    "stream": s.flag(),
    "stream_options": s.record(STREAM_OPTIONS),
    "sse_ping_interval": openai.PING_INTERVAL,
    "include": s.array(s.enum(*INCLUDED)),
    "top_logprobs": s.integer(
        0, None, "At most the model's max-logprobs; above 0 the text has logprobs, included or not."
    ),
    "metadata": s.or_null({**s.ANY_OBJECT, "description": _most("metadata")}),
    **s.members(NO_EFFECT, *LABELS),
    "previous_response_id": s.one_of([""], _STATELESS),
    "conversation": s.one_of([], _STATELESS),
    "store": s.flag("No effect: nothing is stored, and the response has store false."),
    "background": s.one_of([False]),
    "truncation": s.choice(("auto", "disabled"), "auto: the oldest turns of an input that is too long are dropped."),
    "prompt": s.one_of([]),
}
# For counting only: sampling and structured output accept any value.
INPUT_TOKENS: Body = {
    **RESPONSES,
    **openai.skip_all_but(CHAT_FIELDS, CONVERSATION),
    "input": s.or_null({**RESPONSES["input"], "description": "Unless it is given, an empty text is counted."}),
}

_OUTPUT_TEXT = s.shape(
    {"type": s.const("output_text"), "text": s.TEXT, "annotations": s.several(s.ANY_OBJECT), "logprobs": TOKEN_LOGPROBS}
)
_REASONING_TEXT = s.shape({"type": s.const("reasoning_text"), "text": s.TEXT})
_STATUS = s.enum("in_progress", "completed", "incomplete")
_OUTPUT_ITEM: dict[str, Schema] = {"id": s.TEXT, "status": _STATUS}
_EVENT: dict[str, Schema] = {"type": s.TEXT, "sequence_number": s.COUNT}
_OF_ITEM: dict[str, Schema] = {**_EVENT, "item_id": s.TEXT, "output_index": s.COUNT}
_OF_CONTENT: dict[str, Schema] = {**_OF_ITEM, "content_index": s.COUNT}
_TIMINGS: dict[str, Schema] = {"timings": s.ref("Timings")}
_USAGE = s.shape(
    {
        **s.members(s.COUNT, "input_tokens", "output_tokens", "total_tokens"),
        "input_tokens_details": s.shape(s.members(s.COUNT, "cached_tokens", "cache_write_tokens")),
        "output_tokens_details": s.shape({"reasoning_tokens": s.COUNT}),
    }
)

COMPONENTS: Mapping[str, Schema] = {
    "ResponseItem": s.any_of(
        s.shape(
            {
                **_OUTPUT_ITEM,
                "type": s.const("message"),
                "role": s.const("assistant"),
                "content": s.several(_OUTPUT_TEXT),
            }
        ),
        s.shape(
            {
                **_OUTPUT_ITEM,
                "type": s.const("reasoning"),
                "summary": s.several(s.ANY_OBJECT),
                "content": s.several(_REASONING_TEXT),
            }
        ),
        s.shape(
            {**_OUTPUT_ITEM, "type": s.const("function_call"), **s.members(s.TEXT, "call_id", "name", "arguments")}
        ),
    ),
    "Response": s.shape(
        {
            "id": s.TEXT,
            "object": s.const("response"),
            "created_at": s.COUNT,
            "completed_at": s.or_null(s.COUNT),
            "model": s.TEXT,
            "status": _STATUS,
            "incomplete_details": s.or_null(s.shape({"reason": s.const("max_output_tokens")})),
            **s.members(s.NULL, "error", "previous_response_id", "max_tool_calls"),
            **s.members(s.or_null(s.TEXT), *LABELS),
            **s.members(s.const(False), "store", "background"),
            **s.members(s.NUMBER, "temperature", "top_p", "presence_penalty", "frequency_penalty"),
            "truncation": s.enum("auto", "disabled"),
            "service_tier": s.const("default"),
            "instructions": s.or_null(s.TEXT),
            "max_output_tokens": s.or_null(s.COUNT),
            "metadata": s.ANY_OBJECT,
            "parallel_tool_calls": s.FLAG,
            "reasoning": s.shape({"effort": s.or_null(s.TEXT), "summary": s.NULL}),
            "text": s.shape({"format": s.ANY_OBJECT, "verbosity": s.or_null(s.TEXT)}),
            "tool_choice": s.any_of(s.TEXT, s.ANY_OBJECT),
            "tools": s.several(s.ANY_OBJECT),
            "top_logprobs": s.COUNT,
            "output": s.several(s.ref("ResponseItem")),
            "usage": s.or_null(_USAGE),
        }
    ),
    "ResponseEvent": s.any_of(
        s.shape({**_EVENT, "response": s.ref("Response")}, {"prompt_progress": PROMPT_PROGRESS, **_TIMINGS}),
        s.shape({**_EVENT, "output_index": s.COUNT, "item": s.ref("ResponseItem")}),
        s.shape({**_EVENT, "output_index": s.COUNT, "item": s.ANY_OBJECT}),
        s.shape({**_OF_CONTENT, "part": s.any_of(_OUTPUT_TEXT, _REASONING_TEXT)}),
        s.shape({**_OF_CONTENT, "delta": s.TEXT}, {"logprobs": TOKEN_LOGPROBS, **_TIMINGS}),
        s.shape({**_OF_CONTENT, "text": s.TEXT}, {"logprobs": TOKEN_LOGPROBS}),
        s.shape({**_OF_ITEM, "delta": s.TEXT}, _TIMINGS),
        s.shape({**_OF_ITEM, "name": s.TEXT, "arguments": s.TEXT}),
    ),
    "InputTokens": s.shape({"object": s.const("response.input_tokens"), "input_tokens": s.COUNT}),
}

RESPONSES_RESPONSE = ResponseSchema(body=s.ref("Response"), frame=s.ref("ResponseEvent"))
INPUT_TOKENS_RESPONSE = ResponseSchema(body=s.ref("InputTokens"))
