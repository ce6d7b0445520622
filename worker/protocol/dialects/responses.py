"""OpenAI's Responses API: schemas of requests and responses."""

from collections.abc import Mapping

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
from worker.protocol.schema import (
    ANY_OBJECT,
    ANYTHING,
    COUNT,
    FLAG,
    NULL,
    NUMBER,
    TEXT,
    Body,
    ResponseSchema,
    Schema,
    any_of,
    array,
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

_FUNCTION = tagged("function", {"name": TEXT, **members(ANYTHING, "description", "parameters", "strict")})
_OTHER_TOOL = described({"type": TEXT}, about="Another type, such as a hosted tool, is reported as ignored.")
_STATELESS = "Nothing is kept between requests."
_TEXT_PART = described(
    {
        "type": enum("input_text", "output_text", "text", "reasoning_text", "summary_text"),
        "text": TEXT,
        "annotations": NO_EFFECT,
        "logprobs": NO_EFFECT,
        **CACHE_HINTS,
    }
)
_IMAGE_PART = tagged(
    "input_image",
    {"image_url": openai.DATA_URL, "detail": choice(openai.DETAILS, "Reported as ignored."), **CACHE_HINTS},
    about=f"{openai.VISION_ONLY} In messages of the user and results of functions.",
)
_CONTENT = any_of(TEXT, several(any_of(_TEXT_PART, openai.CONTENT_PARTS[1], _IMAGE_PART)))
_REASONING_CONTENT = any_of(*_CONTENT["anyOf"], ANYTHING)
# Members of output items that have no effect when clients send them back as input.
_OF_ITEMS: Body = members(NO_EFFECT, "id", "status", "phase")
_MESSAGE = described(
    {"type": enum("message", "", None), "role": required(choice(ROLES)), "content": _CONTENT, **_OF_ITEMS}
)
_ITEM = any_of(
    _MESSAGE,
    tagged("function_call", {**members(TEXT, "call_id", "name", "arguments"), **_OF_ITEMS}),
    tagged("function_call_output", {"call_id": text(), "output": _CONTENT, **_OF_ITEMS}),
    tagged("reasoning", {**members(_REASONING_CONTENT, "content", "summary"), **_OF_ITEMS}),
)
STREAM_OPTIONS: Body = {"include_obfuscation": openai.STREAM_OPTIONS["include_obfuscation"]}
REASONING: Body = {"effort": choice(EFFORTS), "summary": ANYTHING, "generate_summary": ANYTHING}
_FORMAT = any_of(*FREE_FORMATS, tagged("json_schema", NAMED_SCHEMA))
TEXT_OPTIONS: Body = {"verbosity": choice(VERBOSITIES), "format": or_null(_FORMAT)}
# Fields of chats that are accepted in addition to OpenAI's fields of a response.
CHAT_FIELDS: Body = {
    **{name: schema for name, schema in SAMPLING.items() if name not in ("temperature", "top_p")},
    **GRAMMAR,
    "chat_template_kwargs": CONVERSATION["chat_template_kwargs"],
    "cache_salt": openai.COMMON["cache_salt"],
    "return_progress": flag("In streams: response.in_progress is repeated with the progress of the prompt."),
    "timings_per_token": flag("In streams: every delta and the last event contain timings."),
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
# Request fields without effect, of any type. A response repeats texts.
LABELS = ("safety_identifier", "prompt_cache_key")
_ALLOWED_TOOLS: Body = {
    "mode": required(choice(openai.ALLOWED_MODES)),
    "tools": required(array(_FUNCTION, least=1, about="By their names; others are not shown.")),
}
RESPONSES: Body = {
    **CHAT_FIELDS,
    "model": openai.MODEL,
    "input": any_of(TEXT, {**several(_ITEM), "minItems": 1}),
    "instructions": text(),
    "max_output_tokens": integer(1),
    **tuning("temperature", "top_p"),
    "tools": array(any_of(_FUNCTION, _OTHER_TOOL), most=MAX_TOOLS),
    "tool_choice": any_of(
        enum(None, "none", "auto", "required"),
        tagged("function", {"name": TEXT}),
        tagged("allowed_tools", _ALLOWED_TOOLS),
    ),
    "parallel_tool_calls": flag(),
    "text": record(TEXT_OPTIONS),
    "reasoning": record(REASONING),
    "stream": flag(),
    "stream_options": record(STREAM_OPTIONS),
    "sse_ping_interval": openai.PING_INTERVAL,
    "include": array(enum(*INCLUDED)),
    "top_logprobs": integer(
        0, None, "At most the model's max-logprobs; above 0 the text has logprobs, included or not."
    ),
    "metadata": or_null(ANY_OBJECT),
    **members(NO_EFFECT, *LABELS),
    "previous_response_id": one_of([""], _STATELESS),
    "conversation": one_of([], _STATELESS),
    "store": flag("No effect: nothing is stored, and the response has store false."),
    "background": one_of([False]),
    "truncation": choice(("auto", "disabled"), "auto: the oldest turns of an input that is too long are dropped."),
    "prompt": one_of([]),
}
# For counting only: sampling and structured output accept any value.
INPUT_TOKENS: Body = {**RESPONSES, **openai.skip_all_but(CHAT_FIELDS, CONVERSATION)}

_OUTPUT_TEXT = shape(
    {"type": const("output_text"), "text": TEXT, "annotations": several(ANY_OBJECT), "logprobs": TOKEN_LOGPROBS}
)
_REASONING_TEXT = shape({"type": const("reasoning_text"), "text": TEXT})
_STATUS = enum("in_progress", "completed", "incomplete")
_OUTPUT_ITEM: dict[str, Schema] = {"id": TEXT, "status": _STATUS}
_EVENT: dict[str, Schema] = {"type": TEXT, "sequence_number": COUNT}
_OF_ITEM: dict[str, Schema] = {**_EVENT, "item_id": TEXT, "output_index": COUNT}
_OF_CONTENT: dict[str, Schema] = {**_OF_ITEM, "content_index": COUNT}
_TIMINGS: dict[str, Schema] = {"timings": ref("Timings")}
_USAGE = shape(
    {
        **members(COUNT, "input_tokens", "output_tokens", "total_tokens"),
        "input_tokens_details": shape(members(COUNT, "cached_tokens", "cache_write_tokens")),
        "output_tokens_details": shape({"reasoning_tokens": COUNT}),
    }
)

COMPONENTS: Mapping[str, Schema] = {
    "ResponseItem": any_of(
        shape(
            {
                **_OUTPUT_ITEM,
                "type": const("message"),
                "role": const("assistant"),
                "content": several(_OUTPUT_TEXT),
            }
        ),
        shape(
            {
                **_OUTPUT_ITEM,
                "type": const("reasoning"),
                "summary": several(ANY_OBJECT),
                "content": several(_REASONING_TEXT),
            }
        ),
        shape({**_OUTPUT_ITEM, "type": const("function_call"), **members(TEXT, "call_id", "name", "arguments")}),
    ),
    "Response": shape(
        {
            "id": TEXT,
            "object": const("response"),
            "created_at": COUNT,
            "completed_at": or_null(COUNT),
            "model": TEXT,
            "status": _STATUS,
            "incomplete_details": or_null(shape({"reason": const("max_output_tokens")})),
            **members(NULL, "error", "previous_response_id", "max_tool_calls"),
            **members(or_null(TEXT), *LABELS),
            **members(const(False), "store", "background"),
            **members(NUMBER, "temperature", "top_p", "presence_penalty", "frequency_penalty"),
            "truncation": enum("auto", "disabled"),
            "service_tier": const("default"),
            "instructions": or_null(TEXT),
            "max_output_tokens": or_null(COUNT),
            "metadata": ANY_OBJECT,
            "parallel_tool_calls": FLAG,
            "reasoning": shape({"effort": or_null(TEXT), "summary": NULL}),
            "text": shape({"format": ANY_OBJECT}),
            "tool_choice": any_of(TEXT, ANY_OBJECT),
            "tools": several(ANY_OBJECT),
            "top_logprobs": COUNT,
            "output": several(ref("ResponseItem")),
            "usage": or_null(_USAGE),
        }
    ),
    "ResponseEvent": any_of(
        shape({**_EVENT, "response": ref("Response")}, {"prompt_progress": PROMPT_PROGRESS, **_TIMINGS}),
        shape({**_EVENT, "output_index": COUNT, "item": ref("ResponseItem")}),
        shape({**_EVENT, "output_index": COUNT, "item": ANY_OBJECT}),
        shape({**_OF_CONTENT, "part": any_of(_OUTPUT_TEXT, _REASONING_TEXT)}),
        shape({**_OF_CONTENT, "delta": TEXT}, {"logprobs": TOKEN_LOGPROBS, **_TIMINGS}),
        shape({**_OF_CONTENT, "text": TEXT}, {"logprobs": TOKEN_LOGPROBS}),
        shape({**_OF_ITEM, "delta": TEXT}, _TIMINGS),
        shape({**_OF_ITEM, "name": TEXT, "arguments": TEXT}),
    ),
    "InputTokens": shape({"object": const("response.input_tokens"), "input_tokens": COUNT}),
}

RESPONSES_RESPONSE = ResponseSchema(body=ref("Response"), frame=ref("ResponseEvent"))
INPUT_TOKENS_RESPONSE = ResponseSchema(body=ref("InputTokens"))
