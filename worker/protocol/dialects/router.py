"""The router's own API (/router/*): schemas of requests and responses."""

from worker.protocol.schema import (
    ANY_OBJECT,
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    Body,
    ResponseSchema,
    const,
    enum,
    maybe,
    ref,
    several,
    shape,
)

PIN: Body = {
    "model": {"type": "string", "minLength": 1},
    "pinned": {"type": "boolean", "description": "true unless stated."},
}

_LINE = shape({"id": COUNT, "time": NUMBER, "level": TEXT, "logger": TEXT, "message": TEXT})
_REQUEST = shape(
    {
        "id": TEXT,
        "model": TEXT,
        "endpoint": TEXT,
        "client": TEXT,
        "key": TEXT,
        "arrived": NUMBER,
        "phase": enum("queued", "starting", "streaming"),
        "status": maybe(COUNT),
        "seconds": NUMBER,
        "queue_seconds": maybe(NUMBER),
        "load_seconds": maybe(NUMBER),
        "ttft": maybe(NUMBER),
        "prompt_tokens": maybe(COUNT),
        "cached_tokens": maybe(COUNT),
        "completion_tokens": maybe(COUNT),
        "tokens_per_second": maybe(NUMBER),
    }
)

STATE_RESPONSE = ResponseSchema(body=ANY_OBJECT)
PLAN_RESPONSE = ResponseSchema(body=ANY_OBJECT)
EVENTS_RESPONSE = ResponseSchema(frame=ANY_OBJECT)
RELOAD_RESPONSE = ResponseSchema(body=ref("Reload"))
INDEX_RESPONSE = ResponseSchema(body=shape({"message": TEXT, "version": TEXT}), has_page=True)
STYLE_RESPONSE = ResponseSchema(media="text/css")
SCRIPT_RESPONSE = ResponseSchema(media="text/javascript")
OPENAPI_RESPONSE = ResponseSchema(body=ANY_OBJECT)
PIN_RESPONSE = ResponseSchema(body=shape({"success": const(True), "model": TEXT, "pinned": FLAG}))
CONFIG_RESPONSE = ResponseSchema(
    body=shape(
        {
            "schema": const(1),
            "model": TEXT,
            "settings": several(shape({"key": TEXT, "value": TEXT, "origin": TEXT})),
        }
    )
)
LOGS_RESPONSE = ResponseSchema(body=shape({"schema": const(1), "lines": several(_LINE)}))
LOGS_SSE_RESPONSE = ResponseSchema(frame=_LINE)
REQUESTS_RESPONSE = ResponseSchema(
    body=shape({"schema": const(1), "running": several(_REQUEST), "ended": several(_REQUEST)})
)
CANCEL_RESPONSE = ResponseSchema(body=shape({"success": const(True), "cancelled": {"type": "integer", "minimum": 1}}))
