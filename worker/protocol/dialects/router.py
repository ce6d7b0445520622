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
    members,
    or_null,
    ref,
    several,
    shape,
)

PIN: Body = {
    "model": {**TEXT, "minLength": 1},
    "pinned": {**FLAG, "description": "true unless stated."},
}

FORGET: Body = {"model": {**TEXT, "minLength": 1}}

_LINE = shape({"id": COUNT, "time": NUMBER, **members(TEXT, "level", "logger", "message")})
_REQUEST = shape(
    {
        **members(TEXT, "id", "model", "endpoint", "client", "key"),
        **members(NUMBER, "arrived", "seconds"),
        "phase": enum("queued", "starting", "streaming"),
        **members(or_null(COUNT), "status", "prompt_tokens", "cached_tokens", "completion_tokens"),
        **members(or_null(NUMBER), "queue_seconds", "load_seconds", "ttft", "tokens_per_second"),
    }
)
_SETTINGS = several(shape(members(TEXT, "key", "value", "origin")))

# Of the state, of a plan, and of this document.
OBJECT_RESPONSE = ResponseSchema(body=ANY_OBJECT)
EVENTS_RESPONSE = ResponseSchema(frame=ANY_OBJECT)
RELOAD_RESPONSE = ResponseSchema(body=ref("Reload"))
INDEX_RESPONSE = ResponseSchema(body=shape({"message": TEXT, "version": TEXT}), has_page=True)
STYLE_RESPONSE = ResponseSchema(media="text/css")
SCRIPT_RESPONSE = ResponseSchema(media="text/javascript")
PIN_RESPONSE = ResponseSchema(body=shape({"success": const(True), "model": TEXT, "pinned": FLAG}))
FORGET_RESPONSE = ResponseSchema(
    body=shape({"success": const(True), "model": TEXT, "forgotten": COUNT}, {"warning": TEXT})
)
CONFIG_RESPONSE = ResponseSchema(body=shape({"schema": const(1), "model": TEXT, "settings": _SETTINGS}))
LOGS_RESPONSE = ResponseSchema(body=shape({"schema": const(1), "lines": several(_LINE)}))
LOGS_SSE_RESPONSE = ResponseSchema(frame=_LINE)
REQUESTS_RESPONSE = ResponseSchema(
    body=shape({"schema": const(1), "running": several(_REQUEST), "ended": several(_REQUEST)})
)
CANCEL_RESPONSE = ResponseSchema(body=shape({"success": const(True), "cancelled": {**COUNT, "minimum": 1}}))
