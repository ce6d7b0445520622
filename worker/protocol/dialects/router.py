"""The router's own API (/router/*): schemas of requests and responses."""

from collections.abc import Mapping

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

ANSWERS: Mapping[str, ResponseSchema] = {
    "state": ResponseSchema(body=ANY_OBJECT, about="Devices, models, workers and the queue, in bytes and seconds."),
    "plan": ResponseSchema(body=ANY_OBJECT, about="What loading the model would do now; nothing is done."),
    "events": ResponseSchema(frame=ANY_OBJECT, about="Everything that happens, as it happens, each with an id."),
    "reload": ResponseSchema(body=ref("Reload"), about="Presets, folders and caches were read again."),
    "index": ResponseSchema(body=shape({"message": TEXT, "version": TEXT}), has_page=True, about="What this is."),
    "style": ResponseSchema(media="text/css", about="How the page looks."),
    "script": ResponseSchema(media="text/javascript", about="What the page does."),
    "openapi": ResponseSchema(body=ANY_OBJECT, about="This description."),
    "pin": ResponseSchema(
        body=shape({"success": const(True), "model": TEXT, "pinned": FLAG}),
        about="It may be put out no longer, or again.",
    ),
    "config": ResponseSchema(
        body=shape(
            {
                "schema": const(1),
                "model": TEXT,
                "settings": several(shape({"key": TEXT, "value": TEXT, "origin": TEXT})),
            }
        ),
        about="Every setting of a model, and where it comes from.",
    ),
    "logs": ResponseSchema(
        body=shape({"schema": const(1), "lines": several(_LINE)}),
        about="The newest log lines.",
    ),
    "logs_sse": ResponseSchema(frame=_LINE, about="The newest log lines, and then each as it comes, with an id."),
    "requests": ResponseSchema(
        body=shape({"schema": const(1), "running": several(_REQUEST), "ended": several(_REQUEST)}),
        about="Requests for workers: those that run, and the last 1000 that ended.",
    ),
    "cancel": ResponseSchema(
        body=shape({"success": const(True), "cancelled": {"type": "integer", "minimum": 1}}),
        about="The running requests of that id end with an error.",
    ),
}
