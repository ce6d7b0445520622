"""The router's own API (/router/*): schemas of requests and responses."""

from worker.protocol import schema as s
from worker.protocol.schema import Body, ResponseSchema

PIN: Body = {
    "model": {**s.TEXT, "minLength": 1},
    "pinned": {**s.FLAG, "description": "true unless stated."},
}

FORGET: Body = {"model": {**s.TEXT, "minLength": 1}}

_LINE = s.shape({"id": s.COUNT, "time": s.NUMBER, **s.members(s.TEXT, "level", "logger", "message")})
_REQUEST = s.shape(
    {
        **s.members(s.TEXT, "id", "model", "endpoint", "client", "key"),
        **s.members(s.NUMBER, "arrived", "seconds"),
        "phase": s.enum("queued", "starting", "streaming"),
        **s.members(s.or_null(s.COUNT), "status", "prompt_tokens", "cached_tokens", "completion_tokens"),
        **s.members(s.or_null(s.NUMBER), "queue_seconds", "load_seconds", "ttft", "tokens_per_second"),
    }
)
_SETTINGS = s.several(s.shape(s.members(s.TEXT, "key", "value", "origin")))

# Of the state, of a plan, and of this document.
OBJECT_RESPONSE = ResponseSchema(body=s.ANY_OBJECT)
EVENTS_RESPONSE = ResponseSchema(frame=s.ANY_OBJECT)
RELOAD_RESPONSE = ResponseSchema(body=s.ref("Reload"))
INDEX_RESPONSE = ResponseSchema(body=s.shape({"message": s.TEXT, "version": s.TEXT}), has_page=True)
STYLE_RESPONSE = ResponseSchema(media="text/css")
SCRIPT_RESPONSE = ResponseSchema(media="text/javascript")
PIN_RESPONSE = ResponseSchema(body=s.shape({"success": s.const(True), "model": s.TEXT, "pinned": s.FLAG}))
FORGET_RESPONSE = ResponseSchema(
    body=s.shape({"success": s.const(True), "model": s.TEXT, "forgotten": s.COUNT}, {"warning": s.TEXT})
)
CONFIG_RESPONSE = ResponseSchema(body=s.shape({"schema": s.const(1), "model": s.TEXT, "settings": _SETTINGS}))
LOGS_RESPONSE = ResponseSchema(body=s.shape({"schema": s.const(1), "lines": s.several(_LINE)}))
LOGS_SSE_RESPONSE = ResponseSchema(frame=_LINE)
REQUESTS_RESPONSE = ResponseSchema(
    body=s.shape({"schema": s.const(1), "running": s.several(_REQUEST), "ended": s.several(_REQUEST)})
)
CANCEL_RESPONSE = ResponseSchema(body=s.shape({"success": s.const(True), "cancelled": {**s.COUNT, "minimum": 1}}))
