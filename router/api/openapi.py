"""The OpenAPI document, generated from the route table. Pure functions."""

import re
from collections.abc import Mapping
from typing import Any

from router import __version__
from worker.protocol.dialects import Dialect, anthropic, fastchat, llama_server, lmi, ollama, openai, responses
from worker.protocol.dialects.generation_fields import NON_EMPTY_TEXT
from worker.protocol.errors import ERRORS, anthropic_error_type
from worker.protocol.routes import FLAGS, AccessLevel, Route, body_schema, offered, query
from worker.protocol.schema import ANY_OBJECT, COUNT, TEXT, WHOLE, Schema, any_of, const, enum, or_null, ref, shape
from worker.protocol.streams import stream

# Schemas that several responses share, by name.
COMPONENTS: Mapping[str, Schema] = {
    name: schema
    for dialect in (openai, llama_server, responses, anthropic, ollama, lmi, fastchat)
    for name, schema in dialect.COMPONENTS.items()
}
_FLAG: Schema = {**TEXT, "pattern": "^([Tt][Rr][Uu][Ee]|[Ff][Aa][Ll][Ss][Ee]|1|0)$"}
_PARAMETERS: Mapping[str, str] = {
    "model": "Id or alias of a model.",
    "model_name": "The same as model; the name of a model to register.",
    "autoload": "Load the model for this request if it is not loaded.",
    "reload": "If not empty, read presets, folders and caches again first.",
    "wait": "Respond when the operation is complete.",
    "force": "Do not wait for running requests.",
    "snapshot": "Begin with the status of every model.",
    "limit": "Entries of one page, at most 100.",
    "next_page_token": "The nextPageToken of the previous page.",
    "url": "org/name[:revision] on the hub, or a folder inside --models-dir or the hub cache.",
    "model_version": "Version of the model, which is the model NAME:VERSION or a revision on the hub.",
    "engine": "Python or MPI; no effect.",
    "device": "cpu, or an accelerator such as gpu0.",
    "job_queue_size": "Largest number of waiting requests.",
    "max_idle_time": "Idle seconds after which workers beyond the least number stop.",
    "min_worker": "Least number of workers; 0: none until the next request.",
    "max_worker": "Largest number of workers.",
    "synchronous": "Respond when the workers are ready; true by default.",
    "batch_size": "No effect, because batching is continuous.",
    "max_batch_delay": "No effect, because batching is continuous.",
    "adapter": "The LoRA adapter to use, by name.",
    "name": "The name that requests use.",
    "src": "org/name[:revision] on the hub, or a folder inside adapters-dir, --models-dir or the hub cache.",
    "preload": "Ready workers read the adapter now and report problems; true by default.",
    "pin": "Keep it in memory until it is unregistered.",
    "level": "The least severe level to include: debug, info, warning or error.",
    "lines": "Largest number of lines; the newest are returned; 200 by default.",
    "fail_on_no_slot": "Respond with 503 if no slot is free.",
}
# The tag of each dialect, and the component with its errors.
_DIALECTS: Mapping[Dialect, tuple[str, str]] = {
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
_ALWAYS = (400, 401, 403, 500)  # error statuses of all routes
_BODY = (408, 413, 415, 429)  # of routes with a request body
_WORKER = (404, 408, 413, 415, 429, 501, 502, 503, 504, 507)  # of routes that a worker answers
_MEANINGS: Mapping[int, str] = {
    400: "The request is invalid or not supported.",
    401: "The key is missing or unknown.",
    403: "This key, host or origin has no access, or the feature is disabled.",
    404: "The model does not exist, or this key may not use it.",
    408: "The body did not arrive in time.",
    409: "The model is in use, or the name is taken.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "Too many requests are waiting.",
    500: "The server failed, or the model failed to load.",
    501: "This model or this server does not support it.",
    502: "The worker exited before its response.",
    503: "Not available now; see Retry-After.",
    504: "The time limit was exceeded.",
    507: "The model does not fit into memory, even if nothing else is loaded.",
}

_LOADS = "Loads the model if it is not loaded, unless autoload is off in preset, router or call."
_LAST_EVENT = "Id of the last received event; the stream begins with the next one."
_IN_PATH: Mapping[str, str] = {
    "id": "Id or alias of a model; its slashes and colons may be percent-encoded.",
    "request": "X-Request-Id of a request.",
    "slot": "Number of a slot.",
    "digest": "sha256: and the digest of a file.",
    "adapter": "Name of an adapter.",
}


def document(*, prefix: str = "", lmi_management: bool = False) -> dict[str, Any]:
    """The OpenAPI 3.1 document of all offered routes, all below `prefix`."""
    paths: dict[str, dict[str, Any]] = {}
    routes = offered(lmi_management=lmi_management)
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    bodies = {_body_name(route): schema for route in routes if (schema := body_schema(route)) is not None}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Fleet router",
            "version": __version__,
            "description": "One address for many language models, in several dialects. HEAD works wherever GET works. "
            "Every response has X-Request-Id.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "servers": [{"url": prefix or "/"}],
        "security": [{}, {"bearer": []}, {"header": []}],
        "tags": [{"name": name} for name in dict.fromkeys(tag for tag, _ in _DIALECTS.values())],
        "paths": paths,
        "components": {
            "schemas": {**COMPONENTS, **_errors(), **bodies},
            "responses": {
                f"{error}{status}": _error(status, error)
                for error in dict.fromkeys(error for _, error in _DIALECTS.values())
                for status in _MEANINGS
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def statuses(route: Route) -> tuple[int, ...]:
    """The error statuses of a route."""
    if route.response is None:
        return (400, 401, 403, *route.errors)
    found = {*_ALWAYS, *route.errors, *(_WORKER if route.worker else ())}
    if route.requests:
        found |= set(_BODY)
    if route.access is AccessLevel.PUBLIC:
        found -= {401}
    return tuple(sorted(found))


def _operation(route: Route) -> dict[str, Any]:
    tag, error = _DIALECTS[route.dialect]
    operation: dict[str, Any] = {
        "operationId": "_".join([route.method.lower(), *re.findall(r"\w+", route.path)]),
        "tags": [tag],
        "summary": route.summary or f"Not offered; use {route.instead}.",
        "responses": {
            **_success(route),
            **{str(status): _error_response(route, status, error) for status in statuses(route)},
            **_other_responses(route),
        },
    }
    if route.worker:
        operation["description"] = _LOADS
    if parameters := _parameters(route):
        operation["parameters"] = parameters
    if route.requests:
        operation["requestBody"] = {"required": True, "content": _json(ref(_body_name(route)))}
    if route.access is AccessLevel.PUBLIC:
        operation["security"] = []
    return operation


def _body_name(route: Route) -> str:
    return "".join(word.capitalize() for word in route.name.split("_")) + "Request"


def _parameters(route: Route) -> list[dict[str, Any]]:
    """The parameters in the path, in the query and in headers."""
    found = [
        {"name": name, "in": "path", "required": True, "description": about, "schema": NON_EMPTY_TEXT}
        for name, about in _IN_PATH.items()
        if f"{{{name}}}" in route.path
    ]
    found += [
        {"name": name, "in": "query", "description": _PARAMETERS[name], "schema": _FLAG if name in FLAGS else TEXT}
        for name in query(route)
    ]
    if _is_event_stream(route):
        found.append({"name": "Last-Event-ID", "in": "header", "description": _LAST_EVENT, "schema": TEXT})
    return found


def _is_event_stream(route: Route) -> bool:
    """True for a route of the router that sends events without end."""
    response = route.response
    return not route.worker and response is not None and response.frame is not None and response.body is None


def _success(route: Route) -> dict[str, Any]:
    response = route.response
    if response is None:
        return {}
    content: dict[str, Any] = {}
    if response.body is not None:
        content[response.media] = {"schema": response.body}
    elif response.frame is None:
        content[response.media] = {"schema": TEXT}
    if response.has_page:
        content["text/html"] = {"schema": TEXT}
    if response.frame is not None and (route.streams or response.body is None):
        content |= _stream(response.frame, route.dialect)
    if response.events is not None:
        content |= _stream(response.events, Dialect.OPENAI)
    headers = {name: {"schema": TEXT, "required": True} for name in ("X-Request-Id", "request-id")}
    if route.worker:
        headers["X-Router-Model"] = {"schema": TEXT, "description": "The model's id.", "required": True}
    if route.requests:
        headers["X-Ignored-Fields"] = {"schema": TEXT, "description": "Fields of the request that had no effect."}
    return {"200": {"description": route.summary, "headers": headers, "content": content}}


def _other_responses(route: Route) -> dict[str, Any]:
    """Responses that are neither a success nor an error object, by status."""
    further = route.response.further if route.response is not None else {}
    return {
        str(status): {"description": _MEANINGS.get(status, "In progress."), "content": _json(schema)}
        for status, schema in further.items()
    }


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _stream(frame: Schema, dialect: Dialect) -> dict[str, Any]:
    """The content of a stream: of its events, lines or objects."""
    media = stream(dialect).headers["Content-Type"]
    data: Schema = {**TEXT, "contentMediaType": "application/json", "contentSchema": frame}
    if media != "text/event-stream":
        unit = "Objects, each followed by a zero byte" if dialect is Dialect.FASTCHAT else "Lines of JSON"
        about = f"{unit}. A stream that fails ends with an error object and a broken connection."
        return {media: {"schema": {**data, "description": about}}}
    about = (
        "Lines that begin with a colon are comments. A stream that fails ends with an error and a broken connection."
    )
    if dialect is Dialect.OPENAI:
        data = any_of(data, const("[DONE]"), about="JSON; the last event of a whole response is [DONE].")
    return {media: {"schema": {**shape({"data": data}, {"event": TEXT, "id": TEXT}), "description": about}}}


def _error(status: int, component: str) -> dict[str, Any]:
    headers = {"X-Should-Retry": {"schema": enum("true", "false"), "required": True}}
    if status in (429, 503):
        headers["Retry-After"] = {"schema": {**WHOLE, "minimum": 1, "maximum": 60}, "required": True}
    if status == 401:
        headers["WWW-Authenticate"] = {"schema": TEXT, "required": True}
    return {"description": _MEANINGS[status], "content": _json(ref(component)), "headers": headers}


def _error_response(route: Route, status: int, component: str) -> dict[str, Any]:
    if not route.always_streams:
        return {"$ref": f"#/components/responses/{component}{status}"}
    return {**_error(status, component), "content": _stream(ref(component), route.dialect)}


def _errors() -> dict[str, Schema]:
    """The error bodies of all dialects."""
    further = {"n_prompt_tokens": COUNT, "n_ctx": COUNT, "devices": ANY_OBJECT, "errors": {"type": "array"}}
    rows = [
        shape(
            {
                "code": const(row.status),
                "message": TEXT,
                "type": const(row.type),
                "param": or_null(TEXT),
                "reason": enum(*row.reasons),
            },
            {name: further[name] for name in row.further},
        )
        for row in ERRORS
    ]
    types = sorted({anthropic_error_type(row.status, row.type) for row in ERRORS})
    anthropic_error = shape({"type": enum(*types), "message": TEXT}, {"details": ANY_OBJECT})
    return {
        "Error": shape({"error": any_of(*rows)}),
        "AnthropicError": shape({"type": const("error"), "error": anthropic_error, "request_id": TEXT}),
        "OllamaError": shape({"error": TEXT}),
        "LmiError": shape({"code": WHOLE, "type": TEXT, "message": TEXT}),
        "EricLlmError": shape({"detail": TEXT}),
        "FastChatError": shape({"error_code": {**WHOLE, "minimum": 40000}, "text": TEXT}),
    }
