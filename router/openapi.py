"""The API in OpenAPI's words, made of the tables that it is served by. Law: PURE.

Paths and schemas are those of `worker.protocol`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from router import __version__
from worker.protocol.dialects import Dialect, anthropic, fastchat, llama_server, lmi, ollama, openai, responses
from worker.protocol.errors import ERRORS
from worker.protocol.routes import ANSWERS, FLAGS, ROUTES, Loads, Plane, Route, body_schema, query
from worker.protocol.schema import ANY_OBJECT, COUNT, TEXT, ResponseSchema, Schema, const, enum, maybe, ref, shape
from worker.protocol.streams import stream

COMPONENTS: Mapping[str, Schema] = {
    **openai.COMPONENTS,
    **llama_server.COMPONENTS,
    **responses.COMPONENTS,
    **anthropic.COMPONENTS,
    **ollama.COMPONENTS,
    **lmi.COMPONENTS,
    **fastchat.COMPONENTS,
}
"""Schemas that several responses share, by name."""
_FLAG: Schema = {"type": "string", "pattern": "^([Tt][Rr][Uu][Ee]|[Ff][Aa][Ll][Ss][Ee]|1|0)$"}
_PARAMETERS: Mapping[str, str] = {
    "model": "Id or alias of a model.",
    "model_name": "The same as model; where one is registered, its name.",
    "autoload": "Whether a model that is not loaded is loaded for this request.",
    "reload": "Not empty: presets, folders and caches are read again before.",
    "wait": "Answer once it is done.",
    "force": "Do not wait for running requests.",
    "snapshot": "Begin with the state of every model.",
    "limit": "Models of one page; 100 at most.",
    "next_page_token": "What the page before said.",
    "url": "org/name[:revision] on the hub, or a folder inside --models-dir or the hub cache.",
    "model_version": "Not offered: versions are not kept apart.",
    "engine": "Python or MPI; makes no difference.",
    "device": "cpu, or gpu0 and the like.",
    "job_queue_size": "Requests that may wait.",
    "max_idle_time": "Seconds until workers beyond the least number end.",
    "min_worker": "Workers at least; 0: none until somebody asks.",
    "max_worker": "Workers at most.",
    "synchronous": "Answer once the workers are ready; true unless stated.",
    "batch_size": "Makes no difference: batches are continuous.",
    "max_batch_delay": "Makes no difference: nobody waits for a batch to fill.",
    "adapter": "The LoRA adapter to use, by name.",
    "name": "What requests are to call it.",
    "src": "org/name[:revision] on the hub, or a folder inside adapters-dir, --models-dir or the hub cache.",
    "preload": "Workers that are ready read it now, and say what is wrong; true unless stated.",
    "pin": "Once in memory it stays there until it is unregistered.",
    "level": "Leave out lines that are less severe: debug, info, warning or error.",
    "lines": "How many at most, the newest; 200 unless stated.",
    "fail_on_no_slot": "503 where no slot is free.",
}
_FACES: Mapping[Dialect, tuple[str, str]] = {
    Dialect.OPENAI: ("OpenAI", "Error"),
    Dialect.LLAMA_SERVER: ("llama-server", "Error"),
    Dialect.RESPONSES: ("OpenAI responses", "Error"),
    Dialect.ADMIN: ("router", "Error"),
    Dialect.ANTHROPIC: ("Anthropic", "AnthropicError"),
    Dialect.OLLAMA: ("Ollama", "OllamaError"),
    Dialect.LMI: ("LMI", "LmiError"),
    Dialect.ERICLLM: ("EricLLM", "EricLlmError"),
    Dialect.FASTCHAT: ("FastChat", "FastChatError"),
}
"""The tag of each dialect and the component that its errors are."""
_ANYWHERE = (400, 401, 403, 500)
_BODY = (408, 413, 415, 429)
_WORKER = (404, 408, 413, 415, 429, 501, 502, 503, 504, 507)
_OWN: Mapping[str, tuple[int, ...]] = {
    "model": (404,),
    "fetch": (503,),
    "delete": (404, 409),
    "load": (404, 501, 502, 503, 504, 507),
    "unload": (404,),
    "health": (404,),
    "metrics": (404,),
    "props": (404, 501, 502, 503, 504, 507),
    "slots": (404, 501, 503),
    "lora_adapters": (404,),
    "plan": (404, 503, 507),
    "fastchat_details": (404,),
    "fastchat_check": (404, 502, 503, 504),
    "pin": (404,),
    "config": (404,),
    "logs": (404,),
    "logs_sse": (404,),
    "requests": (404,),
    "cancel": (404,),
    "lmi_register": (409, 429, 501, 502, 503, 504, 507),
    "lmi_describe": (404,),
    "lmi_scale": (404, 429, 501, 502, 503, 504, 507),
    "lmi_unregister": (404,),
    "adapter_register": (404, 409, 507),
    "adapter_update": (404, 507),
    "adapter_unregister": (404,),
    "adapter_list": (404,),
    "adapter_describe": (404,),
    "ollama_show": (404,),
    "ollama_pull": (503,),
    "ollama_delete": (404, 409),
}
"""Statuses of calls that the router answers itself, by the name of the route, besides those of all."""
_WORDS: Mapping[int, str] = {
    400: "The request cannot be understood or is not supported.",
    401: "No key, or one that nobody knows.",
    403: "This key, host or origin may not do that, or nobody may.",
    404: "There is no such model for this key.",
    408: "The body did not arrive in time.",
    409: "It is in use, or there already.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "Too many requests wait.",
    500: "It failed here, or loading the model did.",
    501: "This model or this server cannot do that.",
    502: "The worker was lost before it answered.",
    503: "Not now.",
    504: "It took too long.",
    507: "The model does not fit, even alone.",
}

_BEGUN = "Begun, and not done yet."


def document(*, prefix: str = "", routes: Iterable[Route] = ROUTES) -> dict[str, Any]:
    """The description of `routes`, all below `prefix`, as OpenAPI 3.1 has it."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Fleet router",
            "version": __version__,
            "description": "One address for many language models, in several dialects. HEAD works where GET does; "
            "every answer has X-Request-Id.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "servers": [{"url": prefix or "/"}],
        "security": [{}, {"bearer": []}, {"header": []}],
        "tags": [{"name": name} for name in dict.fromkeys(tag for tag, _ in _FACES.values())],
        "paths": paths,
        "components": {
            "schemas": {**COMPONENTS, **_errors(), **_bodies(routes)},
            "responses": {
                f"{error}{status}": _error(status, error)
                for error in dict.fromkeys(error for _, error in _FACES.values())
                for status in _WORDS
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def statuses(route: Route) -> tuple[int, ...]:
    """The statuses of errors that `route` may answer with."""
    if route.name == "disabled":
        return (400, 401, 403)
    if route.name == "not_offered":
        return (400, 401, 403, 501)
    found = {*_ANYWHERE, *(_WORKER if route.worker else _OWN.get(route.name, ()))}
    if body_schema(route) is not None:
        found |= set(_BODY)
    if route.plane is Plane.PUBLIC:
        found -= {401}
    return tuple(sorted(found))


def _operation(route: Route) -> dict[str, Any]:
    answer = ANSWERS.get(route.name, ResponseSchema())
    tag, error = _FACES[route.dialect]
    operation: dict[str, Any] = {
        "operationId": "_".join([route.method.lower(), *re.findall(r"\w+", route.path)]),
        "tags": [tag],
        "summary": answer.about or _refusal(route),
        "responses": {
            **_success(route, answer),
            **{str(status): _refused(route, status, error) for status in statuses(route)},
            **{str(status): _json(schema, _WORDS.get(status, _BEGUN)) for status, schema in answer.further.items()},
        },
    }
    if route.worker:
        operation["description"] = _LOADS[route.loads] + (f" {_COUNTS}" if route.counts else "")
    parameters = [*_in_path(route), *_in_query(route), *_in_header(route, answer)]
    if parameters:
        operation["parameters"] = parameters
    body = body_schema(route)
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref(_named(route))}}}
    if route.plane is Plane.PUBLIC:
        operation["security"] = []
    return operation


_COUNTS = "Where it is not loaded and may not be, a process with nothing of it but the tokenizer answers."
_LOADS: Mapping[Loads, str] = {
    Loads.FOLLOWS: "Loads the model if it is not loaded, unless its preset, the router or autoload=false says no.",
    Loads.ON_DEMAND: "Loads the model only with autoload=true.",
    Loads.NEVER: "Never loads a model, unless with autoload=true.",
}


def _refusal(route: Route) -> str:
    return f"Not offered; use {route.instead}." if route.instead else "Disabled: this server fetches and runs nothing."


def _success(route: Route, answer: ResponseSchema) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if answer.body is not None:
        content[answer.media] = {"schema": answer.body}
    elif route.name in ANSWERS and answer.frame is None:
        content[answer.media] = {"schema": TEXT}
    if answer.has_page:
        content["text/html"] = {"schema": TEXT}
    if answer.frame is not None and (route.streams or answer.body is None):
        manner = stream(route.dialect)
        media = manner.headers["Content-Type"]
        content[media] = {"schema": _stream(media, answer.frame, route.dialect)}
    if answer.events is not None:
        media = stream(Dialect.OPENAI).headers["Content-Type"]
        content[media] = {"schema": _stream(media, answer.events, Dialect.OPENAI)}
    if not content:
        return {}
    headers = {name: {"schema": TEXT, "required": True} for name in ("X-Request-Id", "request-id")}
    if route.worker:
        headers["X-Router-Model"] = {"schema": TEXT, "description": "The model's id.", "required": True}
    if body_schema(route) is not None:
        headers["X-Ignored-Fields"] = {"schema": TEXT, "description": "Fields that made no difference."}
    return {"200": {"description": answer.about, "headers": headers, "content": content}}


def _stream(media: str, frame: Schema, face: Dialect) -> Schema:
    """One event of a stream, or one of its lines."""
    if media != "text/event-stream":
        unit = "Objects, each followed by a zero byte" if face is Dialect.FASTCHAT else "Lines of JSON"
        about = f"{unit}; a stream that fails ends with one that says so and a broken connection."
        return {"type": "string", "description": about, "contentMediaType": "application/json", "contentSchema": frame}
    about = (
        "Lines that begin with a colon are comments. A stream that fails ends with an error and a broken connection."
    )
    told: Schema = {"type": "string", "contentMediaType": "application/json", "contentSchema": frame}
    if face is Dialect.OPENAI:
        told = {"anyOf": [told, const("[DONE]")], "description": "JSON; the last event of a whole answer is [DONE]."}
    return {**shape({"data": told}, {"event": TEXT, "id": TEXT}), "description": about}


def _json(schema: Schema, about: str) -> dict[str, Any]:
    return {"description": about, "content": {"application/json": {"schema": schema}}}


def _error(status: int, component: str) -> dict[str, Any]:
    headers = {"X-Should-Retry": {"schema": enum("true", "false"), "required": True}}
    if status in (429, 503):
        headers["Retry-After"] = {"schema": {"type": "integer", "minimum": 1, "maximum": 60}, "required": True}
    if status == 401:
        headers["WWW-Authenticate"] = {"schema": TEXT, "required": True}
    return {**_json(ref(component), _WORDS[status]), "headers": headers}


def _refused(route: Route, status: int, component: str) -> dict[str, Any]:
    if not route.always_streams:
        return {"$ref": f"#/components/responses/{component}{status}"}
    media = stream(route.dialect).headers["Content-Type"]
    content = {media: {"schema": _stream(media, ref(component), route.dialect)}}
    return {**_error(status, component), "content": content}


def _bodies(routes: Iterable[Route]) -> dict[str, Schema]:
    """What requests may say, by the names of their routes."""
    found = {_named(route): body_schema(route) for route in routes}
    return {name: schema for name, schema in found.items() if schema is not None}


def _named(route: Route) -> str:
    return "".join(word.capitalize() for word in route.name.split("_")) + "Request"


_IN_PATH: Mapping[str, str] = {
    "id": "Id or alias of a model; its slashes and colons may be percent-encoded.",
    "request": "X-Request-Id of a request.",
    "slot": "Number of a slot.",
    "digest": "sha256: and the digest of a file.",
    "adapter": "Name of an adapter.",
}


def _in_path(route: Route) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": about,
            "schema": {"type": "string", "minLength": 1},
        }
        for name, about in _IN_PATH.items()
        if f"{{{name}}}" in route.path
    ]


def _in_query(route: Route) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "query",
            "description": _PARAMETERS[name],
            "schema": _FLAG if name in FLAGS else {"type": "string"},
        }
        for name in query(route)
    ]


def _in_header(route: Route, answer: ResponseSchema) -> list[dict[str, Any]]:
    if route.worker or answer.frame is None or answer.body is not None:
        return []
    about = "The last event that was seen: those after it come first."
    return [{"name": "Last-Event-ID", "in": "header", "description": about, "schema": TEXT}]


def _errors() -> dict[str, Schema]:
    """The error bodies of all dialects."""
    further = {"n_prompt_tokens": COUNT, "n_ctx": COUNT, "devices": ANY_OBJECT, "errors": {"type": "array"}}
    rows = [
        shape(
            {
                "code": const(row.status),
                "message": TEXT,
                "type": const(row.type),
                "param": maybe(TEXT),
                "reason": enum(*row.reasons),
            },
            {name: further[name] for name in row.further},
        )
        for row in ERRORS
    ]
    types = sorted({row.type for row in ERRORS if row.status < 500} | {"overloaded_error", "api_error"})
    return {
        "Error": shape({"error": {"anyOf": rows}}),
        "AnthropicError": shape(
            {
                "type": const("error"),
                "error": shape({"type": enum(*types), "message": TEXT}, {"details": ANY_OBJECT}),
                "request_id": TEXT,
            }
        ),
        "OllamaError": shape({"error": TEXT}),
        "LmiError": shape({"code": {"type": "integer"}, "type": TEXT, "message": TEXT}),
        "EricLlmError": shape({"detail": TEXT}),
        "FastChatError": shape({"error_code": {"type": "integer", "minimum": 40000}, "text": TEXT}),
    }
