"""Every face's paths: who answers them, where the model's name stands, what they need, how their errors look.

One table, read by the router (to find the model, to forward, and to describe the API) and by the worker (to bind
handlers). Law: standard library only; both sides import this module.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any
from urllib.parse import quote

from worker.bodies.anthropic import ANTHROPIC, COUNT_TOKENS
from worker.bodies.cohere import EMBED
from worker.bodies.common import NEUTRAL, NO_OPS
from worker.bodies.llama_server import COMPLETION, DETOKENIZE, INFILL, TOKENIZE
from worker.bodies.ollama import OLLAMA_CHAT, OLLAMA_EMBED, OLLAMA_EMBEDDINGS, OLLAMA_GENERATE, OLLAMA_PULL, OLLAMA_SHOW
from worker.bodies.openai import CHAT, CHAT_TOKENS, COMPLETIONS, EMBEDDING, EMBEDDINGS, RERANK, TEMPLATE
from worker.bodies.own import FETCH, NAMED, PIN
from worker.bodies.responses import RESPONSES, RESPONSES_TOKENS
from worker.bodies.seeds import (
    ERICLLM,
    FASTCHAT,
    FASTCHAT_CHECK,
    FASTCHAT_CONV,
    FASTCHAT_COUNT,
    FASTCHAT_EMBED,
    INVOCATIONS,
)
from worker.bodies.vllm import EMBED_CHAT, SCORE, TOKENIZE_CHAT, TOKENIZE_TEXT
from worker.schemas import Body, described
from worker.unknown import unknown


class Face(Enum):
    """One API dialect."""

    OPENAI = "openai"
    LLAMA_SERVER = "llama_server"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"
    RESPONSES = "responses"
    LMI = "lmi"
    ERICLLM = "ericllm"
    FASTCHAT = "fastchat"
    ADMIN = "admin"


class Plane(Enum):
    """Who may ask: anybody; whoever has a key, once keys exist; whoever has an admin key, once one exists."""

    PUBLIC = "public"
    USER = "user"
    ADMIN = "admin"


class Loads(Enum):
    """What a request for an unloaded model does when it does not say `autoload` itself."""

    FOLLOWS = "follows"
    """Follows the model's `autoload` key, then --models-autoload."""
    ON_DEMAND = "on demand"
    """Loads only with an explicit autoload=true."""
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Route:
    """One path of the API. Routes with `worker` are forwarded byte for byte to the worker of the request's model."""

    method: str
    path: str
    face: Face
    name: str
    """What the handler is called, and the `endpoint` label of metrics."""
    worker: bool
    plane: Plane = Plane.USER
    loads: Loads = Loads.NEVER
    streams: bool = False
    """Answers frame by frame when the body says `stream: true`."""
    streams_unless_told: bool = False
    """And also when it says nothing of it."""
    always_streams: bool = False
    """And also when it says no: the path means a stream."""
    counts: bool = False
    """Takes a model's tokenizer and nothing else: one that may not be loaded has a clerk that answers."""
    upstream: str = ""
    """The worker's path for it, where this one holds the model's name."""
    instead: str = ""
    """What to use in its place, of a path that is known and not offered."""


def _both(method: str, path: str, face: Face, name: str, *, worker: bool, **rest: Any) -> tuple[Route, Route]:
    """The path with and without `/v1`."""
    return (
        Route(method, "/v1" + path, face, name, worker, **rest),
        Route(method, path, face, name, worker, **rest),
    )


def _not_offered(
    methods: str, paths: str, instead: str, plane: Plane = Plane.USER, face: Face = Face.LLAMA_SERVER
) -> tuple[Route, ...]:
    """Paths that other servers of these dialects have: their clients are told what to do, not that nothing is there."""
    return tuple(
        Route(method, path, face, "not_offered", False, plane, instead=instead)
        for path in paths.split()
        for method in methods.split()
    )


_O, _L, _A = Face.OPENAI, Face.LLAMA_SERVER, Face.ADMIN
_M, _OLLAMA, _R, _F = Face.ANTHROPIC, Face.OLLAMA, Face.RESPONSES, Face.FASTCHAT

_PRESETS = "the file of --models-preset, and GET /models?reload=1"

ROUTES: tuple[Route, ...] = (
    *_both("POST", "/chat/completions", _O, "chat", worker=True, loads=Loads.FOLLOWS, streams=True),
    Route("POST", "/v1/completions", _O, "completions", True, loads=Loads.FOLLOWS, streams=True),
    Route("POST", "/v1/embeddings", _O, "embeddings", True, loads=Loads.FOLLOWS),
    *(
        Route("POST", path, _L, "completion", True, loads=Loads.FOLLOWS, streams=True)
        for path in ("/completion", "/completions")
    ),
    Route("POST", "/infill", _L, "infill", True, loads=Loads.FOLLOWS, streams=True),
    *(Route("POST", path, _L, "embedding", True, loads=Loads.FOLLOWS) for path in ("/embedding", "/embeddings")),
    *_both("POST", "/rerank", _L, "rerank", worker=True, loads=Loads.FOLLOWS),
    *_both("POST", "/reranking", _L, "rerank", worker=True, loads=Loads.FOLLOWS),
    Route("POST", "/v2/rerank", _L, "rerank", True, loads=Loads.FOLLOWS),
    *_both("POST", "/score", _O, "score", worker=True, loads=Loads.FOLLOWS),
    Route("POST", "/v2/embed", _O, "cohere_embed", True, loads=Loads.FOLLOWS),
    *_both("POST", "/chat/completions/input_tokens", _O, "chat_input_tokens", worker=True, counts=True),
    *_both("POST", "/responses", _R, "responses", worker=True, loads=Loads.FOLLOWS, streams=True),
    *_both("POST", "/responses/input_tokens", _R, "responses_input_tokens", worker=True, counts=True),
    Route("GET", "/ping", Face.LMI, "ping", False, Plane.PUBLIC),
    Route("GET", "/lmi/models", Face.LMI, "lmi_list", False),
    Route("POST", "/lmi/models", Face.LMI, "lmi_register", False, Plane.ADMIN),
    Route("GET", "/lmi/models/{id}", Face.LMI, "lmi_describe", False),
    Route("PUT", "/lmi/models/{id}", Face.LMI, "lmi_scale", False, Plane.ADMIN),
    Route("DELETE", "/lmi/models/{id}", Face.LMI, "lmi_unregister", False, Plane.ADMIN),
    Route("POST", "/invocations", Face.LMI, "invocations", True, loads=Loads.FOLLOWS, streams=True),
    *(
        Route("POST", path, Face.LMI, "invocations", True, loads=Loads.FOLLOWS, streams=True, upstream="/invocations")
        for path in ("/predictions/{id}", "/models/{id}/invoke")
    ),
    Route("POST", "/generate", Face.ERICLLM, "ericllm_generate", True, loads=Loads.FOLLOWS),
    Route(
        "POST",
        "/worker_generate_stream",
        _F,
        "fastchat_stream",
        True,
        loads=Loads.FOLLOWS,
        streams=True,
        streams_unless_told=True,
        always_streams=True,
    ),
    Route("POST", "/worker_generate", _F, "fastchat_generate", True, loads=Loads.FOLLOWS),
    Route("POST", "/worker_get_embeddings", _F, "fastchat_embeddings", True, loads=Loads.FOLLOWS),
    Route("POST", "/worker_get_conv_template", _F, "fastchat_conv", True, counts=True),
    Route("POST", "/count_token", _F, "fastchat_count", True, counts=True),
    Route("POST", "/worker_get_status", _F, "fastchat_status", False),
    Route("POST", "/model_details", _F, "fastchat_details", False),
    Route("POST", "/api/v1/token_check", _F, "fastchat_check", False),
    Route("POST", "/v1/messages", _M, "messages", True, loads=Loads.FOLLOWS, streams=True),
    Route("POST", "/v1/messages/count_tokens", _M, "count_tokens", True, counts=True),
    *(
        Route("POST", f"/api/{name}", _OLLAMA, f"ollama_{name}", True, Plane.USER, Loads.FOLLOWS, True, True)
        for name in ("chat", "generate")
    ),
    *(
        Route("POST", f"/api/{name}", _OLLAMA, f"ollama_{name}", True, loads=Loads.FOLLOWS)
        for name in ("embed", "embeddings")
    ),
    *(Route("GET", f"/api/{name}", _OLLAMA, f"ollama_{name}", False) for name in ("tags", "ps", "version")),
    Route("POST", "/api/show", _OLLAMA, "ollama_show", False),
    Route("POST", "/api/pull", _OLLAMA, "ollama_pull", False, Plane.ADMIN, streams=True, streams_unless_told=True),
    Route("DELETE", "/api/delete", _OLLAMA, "ollama_delete", False, Plane.ADMIN),
    Route("GET", "/v1/models", _O, "models", False),
    Route("GET", "/v1/models/{id}", _O, "model", False),
    *(
        Route(method, base + path, Face.LMI, f"adapter_{name}", False, plane)
        for base in ("/models/{id}", "")
        for method, path, name, plane in (
            ("POST", "/adapters", "register", Plane.ADMIN),
            ("GET", "/adapters", "list", Plane.USER),
            ("POST", "/adapters/{adapter}/update", "update", Plane.ADMIN),
            ("GET", "/adapters/{adapter}", "describe", Plane.USER),
            ("DELETE", "/adapters/{adapter}", "unregister", Plane.ADMIN),
        )
    ),
    Route("GET", "/models", _L, "models", False),
    Route("GET", "/models/sse", _L, "models_sse", False),
    Route("GET", "/models/{id}", _L, "model", False),
    Route("POST", "/models", _L, "fetch", False, Plane.ADMIN),
    Route("DELETE", "/models", _L, "delete", False, Plane.ADMIN),
    Route("POST", "/models/load", _L, "load", False, Plane.ADMIN),
    Route("POST", "/models/unload", _L, "unload", False, Plane.ADMIN),
    *_both("GET", "/health", _L, "health", worker=False, plane=Plane.PUBLIC),
    Route("GET", "/version", _O, "version", False),
    Route("GET", "/ready", _L, "ready", False, Plane.PUBLIC),
    Route("GET", "/metrics", _L, "metrics", False),
    Route("GET", "/props", _L, "props", False),
    Route("POST", "/tokenize", _L, "tokenize", True, loads=Loads.FOLLOWS, counts=True),
    Route("POST", "/detokenize", _L, "detokenize", True, loads=Loads.FOLLOWS, counts=True),
    Route("POST", "/apply-template", _L, "apply_template", True, loads=Loads.FOLLOWS, counts=True),
    Route("GET", "/router/state", _A, "state", False, Plane.ADMIN),
    Route("GET", "/router/plan", _A, "plan", False, Plane.ADMIN),
    Route("GET", "/router/events", _A, "events", False, Plane.ADMIN),
    Route("POST", "/router/reload", _A, "reload", False, Plane.ADMIN),
    Route("POST", "/router/pin", _A, "pin", False, Plane.ADMIN),
    Route("GET", "/router/config", _A, "config", False, Plane.ADMIN),
    Route("GET", "/router/logs", _A, "logs", False, Plane.ADMIN),
    Route("GET", "/router/logs/sse", _A, "logs_sse", False, Plane.ADMIN),
    Route("GET", "/router/requests", _A, "requests", False, Plane.ADMIN),
    Route("DELETE", "/router/requests/{request}", _A, "cancel", False, Plane.ADMIN),
    Route("GET", "/", _A, "index", False, Plane.PUBLIC),
    Route("GET", "/ui/page.css", _A, "style", False, Plane.PUBLIC),
    Route("GET", "/ui/page.js", _A, "script", False, Plane.PUBLIC),
    Route("GET", "/openapi.json", _A, "openapi", False),
    Route("GET", "/slots", _L, "slots", False),
    Route("POST", "/v1/streams/lookup", _L, "streams_lookup", False),
    Route("GET", "/v1/streams", _L, "streams_lookup", False),
    *(Route(method, path, _L, "disabled", False) for path in ("/tools", "/cors-proxy") for method in ("GET", "POST")),
    *_not_offered("POST", "/api/push /api/create /api/copy", _PRESETS, Plane.ADMIN, _OLLAMA),
    *_not_offered("GET POST", "/api/blobs/{digest}", _PRESETS, Plane.ADMIN, _OLLAMA),
    *_not_offered("POST", "/props", _PRESETS),
    *_not_offered("POST", "/slots/{slot}", "prefix-caching: what prompts have in common is kept by itself"),
    Route("GET", "/lora-adapters", _L, "lora_adapters", False),
    *_not_offered("POST", "/lora-adapters", "lora of a request: a scale for all would change other clients' answers"),
    *_not_offered("POST", "/pooling /classify", "POST /v1/embeddings, or POST /v1/rerank", face=_O),
    *_not_offered("POST", "/v1/load_lora_adapter /v1/unload_lora_adapter", "/models/{id}/adapters", face=_O),
    *_not_offered("GET", "/tokenizer_info", "GET /props?model=, or POST /tokenize", face=_O),
    *_not_offered(
        "POST", "/v1/audio/transcriptions /v1/audio/speech /v1/images/generations /v1/moderations", "another server"
    ),
)


BODIES: Mapping[str, tuple[Body, ...]] = {
    "chat": (CHAT,),
    "completions": (COMPLETIONS,),
    "embeddings": (EMBEDDINGS, EMBED_CHAT),
    "completion": (COMPLETION,),
    "infill": (INFILL,),
    "embedding": (EMBEDDING,),
    "rerank": (RERANK,),
    "score": (SCORE,),
    "cohere_embed": (EMBED,),
    "chat_input_tokens": (CHAT_TOKENS,),
    "responses": (RESPONSES,),
    "responses_input_tokens": (RESPONSES_TOKENS,),
    "invocations": (INVOCATIONS, CHAT, COMPLETIONS),
    "ericllm_generate": (ERICLLM,),
    "fastchat_stream": (FASTCHAT,),
    "fastchat_generate": (FASTCHAT,),
    "fastchat_embeddings": (FASTCHAT_EMBED,),
    "fastchat_conv": (FASTCHAT_CONV,),
    "fastchat_count": (FASTCHAT_COUNT,),
    "fastchat_details": (FASTCHAT_CONV,),
    "fastchat_check": (FASTCHAT_CHECK,),
    "messages": (ANTHROPIC,),
    "count_tokens": (COUNT_TOKENS,),
    "ollama_chat": (OLLAMA_CHAT,),
    "ollama_generate": (OLLAMA_GENERATE,),
    "ollama_embed": (OLLAMA_EMBED,),
    "ollama_embeddings": (OLLAMA_EMBEDDINGS,),
    "ollama_show": (OLLAMA_SHOW,),
    "ollama_pull": (OLLAMA_PULL,),
    "ollama_delete": (OLLAMA_SHOW,),
    "tokenize": (TOKENIZE, TOKENIZE_TEXT, TOKENIZE_CHAT),
    "detokenize": (DETOKENIZE,),
    "apply_template": (TEMPLATE,),
    "fetch": (FETCH,),
    "pin": (PIN,),
    "load": (NAMED,),
    "unload": (NAMED,),
}
"""What a route's body may say, by the name of the route: one of these. Calls that are not here look at no body."""

FLAGS = ("autoload", "wait", "force", "snapshot", "fail_on_no_slot", "synchronous", "preload", "pin")
"""Parameters of a query that are true, 1, false or 0."""
_CHOSEN = ("model", "model_name")
QUERIES: Mapping[str, tuple[str, ...]] = {
    "health": ("model",),
    "metrics": ("model",),
    "props": ("model", "autoload"),
    "slots": ("model", "fail_on_no_slot"),
    "lora_adapters": ("model",),
    "invocations": ("adapter",),
    "adapter_register": ("name", "src", "preload", "pin"),
    "adapter_update": ("src", "preload", "pin"),
    "adapter_list": ("limit", "next_page_token"),
    "models": ("reload",),
    "models_sse": ("snapshot",),
    "delete": ("model",),
    "load": ("wait",),
    "unload": ("wait", "force"),
    "plan": _CHOSEN,
    "config": _CHOSEN,
    "logs": ("model", "level", "lines"),
    "logs_sse": ("model", "level", "lines"),
    "requests": ("model",),
    "lmi_list": ("limit", "next_page_token"),
    "lmi_register": (
        "url",
        "model_name",
        "model_version",
        "engine",
        "device",
        "job_queue_size",
        "max_idle_time",
        "min_worker",
        "max_worker",
        "synchronous",
        "batch_size",
        "max_batch_delay",
    ),
    "lmi_scale": ("min_worker", "max_worker", "synchronous", "batch_size", "max_batch_delay"),
}
"""The parameters that a route reads of its query, by the name of the route; see `query`."""


def query(route: Route) -> tuple[str, ...]:
    """The parameters that `route` reads of its query; others are passed over."""
    own = QUERIES.get(route.name, ())
    return (*_CHOSEN, "autoload", *own) if route.worker else own


def body_schema(route: Route) -> Mapping[str, Any] | None:
    """The JSON Schema of `route`'s body; None if it looks at none."""
    if route.name not in BODIES:
        return None
    further = {**NEUTRAL, **NO_OPS} if route.worker else {}
    every = [described({**further, **body}) for body in BODIES[route.name]]
    return every[0] if len(every) == 1 else {"anyOf": every}


FACES: Mapping[str, Face] = {route.path: route.face for route in ROUTES}
"""By path: for errors about a path whose method is wrong, say."""
_BELOW = (
    ("/api/", Face.OLLAMA),
    ("/v1/messages/", Face.ANTHROPIC),
    ("/lmi/", Face.LMI),
    ("/predictions/", Face.LMI),
)


def face_of(path: str) -> Face:
    """Whose words an error about `path` is told in, which may be no path of this server."""
    return FACES.get(path) or next((face for prefix, face in _BELOW if path.startswith(prefix)), Face.OPENAI)


@dataclass(frozen=True, slots=True)
class Trouble:
    """One row of what may go wrong: a status, the type that says it to programs, and the reasons for it."""

    status: int
    type: str
    reasons: tuple[str, ...]
    further: tuple[str, ...] = ()
    """Members that its error object has besides."""


ERRORS: tuple[Trouble, ...] = (
    Trouble(
        400,
        "invalid_request_error",
        (
            "invalid_json", "invalid_value", "unsupported_parameter", "unknown_parameter", "model_missing",
            "model_conflict", "model_not_loaded", "already_running", "not_running",
        ),
    ),
    Trouble(400, "exceed_context_size_error", ("context_length_exceeded",), ("n_prompt_tokens", "n_ctx")),
    Trouble(401, "authentication_error", ("invalid_api_key",)),
    Trouble(
        403,
        "permission_error",
        ("admin_required", "host_not_allowed", "origin_not_allowed", "feature_disabled"),
    ),
    Trouble(404, "not_found_error", ("model_not_found", "not_found")),
    Trouble(405, "not_found_error", ("method",)),
    Trouble(408, "invalid_request_error", ("body_timeout",)),
    Trouble(409, "conflict_error", ("in_use", "duplicate")),
    Trouble(413, "invalid_request_error", ("too_large",)),
    Trouble(415, "invalid_request_error", ("encoding",)),
    Trouble(429, "rate_limit_error", ("queue_full", "key_concurrency")),
    Trouble(500, "server_error", ("internal", "load_failed", "preset_invalid"), ("errors",)),
    Trouble(501, "not_supported_error", ("unsupported_by_model", "not_offered")),
    Trouble(502, "server_error", ("worker_crashed",)),
    Trouble(503, "unavailable_error", ("starting", "draining", "queue_timeout", "load_backoff", "no_slot")),
    Trouble(504, "timeout_error", ("request_timeout", "stalled", "cancelled")),
    Trouble(507, "insufficient_memory_error", ("does_not_fit",), ("devices",)),
)  # fmt: skip


def error_body(
    face: Face,
    *,
    status: int,
    type: str,
    reason: str,
    message: str,
    param: str | None = None,
    extra: Mapping[str, Any] | None = None,
    request_id: str = "",
) -> dict[str, Any]:
    """The JSON body of an error in `face`'s dialect. All but Anthropic's and Ollama's have llama-server's error object,
    which OpenAI's clients read too."""
    if face is Face.ANTHROPIC:
        kind = "overloaded_error" if status in (503, 507) else "api_error" if status >= 500 else type
        details = {"details": extra["details"]} if extra and "details" in extra else {}
        return {"type": "error", "error": {"type": kind, "message": message, **details}, "request_id": request_id}
    if face is Face.OLLAMA:
        return {"error": message}
    if face is Face.LMI:
        return {"code": status, "type": type, "message": message}
    if face is Face.ERICLLM:
        return {"detail": message}
    if face is Face.FASTCHAT:
        return {"error_code": _fastchat_code(status, reason), "text": message}
    error = {"code": status, "message": message, "type": type, "param": param, "reason": reason}
    return {"error": {**error, **(extra or {})}}


def _fastchat_code(status: int, reason: str) -> int:
    """FastChat's number for an error (fastchat/constants.py)."""
    own = {"context_length_exceeded": 40303, "does_not_fit": 50002, "invalid_value": 40302, "model_not_found": 40301}
    by_status = {401: 40102, 403: 40103, 429: 42901, 503: 42903, 507: 50002}
    return own.get(reason) or by_status.get(status) or (40001 if status < 500 else 50001)


def refusal(path: str, body: bytes) -> tuple[str, bytes]:
    """An error's body as an answer of its own, and its type: where clients read nothing but frames, as one."""
    if path in _FRAMES_ONLY:
        return stream(Face.FASTCHAT).headers["Content-Type"], body + b"\0"
    return "application/json", body


_FRAMES_ONLY = frozenset(route.path for route in ROUTES if route.always_streams)


@dataclass(frozen=True, slots=True)
class Stream:
    """How the streams of one dialect are made of frames."""

    headers: Mapping[str, str]
    end: bytes
    """What ends a frame, and stands nowhere within one."""
    first: bytes
    """How a line begins that says something, after perhaps another one of the same frame; comments have none."""
    error: bytes | tuple[bytes, ...]
    """How an error frame begins."""
    last: bytes | tuple[bytes, ...]
    """How the last frame of a whole answer begins."""
    ending: bytes | tuple[bytes, ...] = b""
    """How it ends."""

    def is_error(self, frames: bytes) -> bool:
        """Whether the last of these whole frames is an error."""
        return self._last(frames).startswith(self.error)

    def is_whole(self, frames: bytes) -> bool:
        """Whether the last of these whole frames ends a whole answer."""
        return frames.endswith(self.ending) and self._last(frames).startswith(self.last)

    def says(self, frames: bytes) -> bool:
        """Whether there is more than comments."""
        return frames.startswith(self.first) or b"\n" + self.first in frames

    def _last(self, frames: bytes) -> bytes:
        before = frames.rfind(self.end, 0, -len(self.end))
        return frames if before < 0 else frames[before + len(self.end) :]


_EVENTS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",
}
_STREAM = Stream(_EVENTS, b"\n\n", b"data: ", b'data: {"error":', b"data: [DONE]")
_STREAMS: Mapping[Face, Stream] = {
    Face.ANTHROPIC: Stream(_EVENTS, b"\n\n", b"data: ", b"event: error\n", b"event: message_stop\n"),
    Face.RESPONSES: Stream(
        _EVENTS,
        b"\n\n",
        b"data: ",
        b"event: error\n",
        (b"event: response.completed\n", b"event: response.incomplete\n"),
    ),
    Face.LMI: Stream(
        {**_EVENTS, "Content-Type": "application/jsonlines"},
        b"\n",
        b"{",
        b'{"token":{"id":-1,"text":"","log_prob":-1,',
        b'{"generated_text":',
    ),
    Face.FASTCHAT: Stream(
        {**_EVENTS, "Content-Type": "application/octet-stream"},
        b"\0",
        b'{"text":',
        (b'{"error_code":4', b'{"error_code":5'),
        b'{"text":',
        (b'"finish_reason":"stop"}\0', b'"finish_reason":"length"}\0'),
    ),
    Face.OLLAMA: Stream(
        {**_EVENTS, "Content-Type": "application/x-ndjson"}, b"\n", b"{", b'{"error":', b"{", b'"done":true}\n'
    ),
}


OPENAIS = frozenset({"messages", "prompt"})
"""What a body of OpenAI's has at least one of, and one of LMI's has not: at LMI's paths it is answered as OpenAI's are,
and so is its stream."""


def stream(face: Face) -> Stream:
    """How `face` streams."""
    return _STREAMS.get(face, _STREAM)


def error_frame(
    face: Face,
    *,
    status: int,
    type: str,
    reason: str,
    message: str,
    param: str | None = None,
    request_id: str = "",
) -> bytes:
    """The bytes that tell a client in mid-stream that its answer will not be complete."""
    body = error_body(
        face, status=status, type=type, reason=reason, message=message, param=param, request_id=request_id
    )
    return refusal_frame(face, json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode())


def refusal_frame(face: Face, body: bytes) -> bytes:
    """An error's body as a frame of a stream that has already begun."""
    if face is Face.OLLAMA:
        return body.replace(b"\n", b" ") + b"\n"
    if face is Face.FASTCHAT:
        return body.removesuffix(b"\0") + b"\0"
    if face is Face.LMI:
        token = {"id": -1, "text": "", "log_prob": -1, "special_token": True, "error_msg": json.loads(body)["message"]}
        line = {"token": token, "generated_text": "", "details": {"finish_reason": "error"}}
        return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    if face is Face.RESPONSES:  # as an event: which number it has only its own stream would know
        told = json.loads(body)["error"]
        event_body = {"type": "error", "code": told["type"], "message": told["message"], "param": told["param"]}
        body = json.dumps({**event_body, "sequence_number": -1, "error": told}, ensure_ascii=False).encode()
    event = b"event: error\n" if face in (Face.ANTHROPIC, Face.RESPONSES) else b""
    return event + b"data: " + body.replace(b"\n", b" ") + b"\n\n"


def in_openais_words(body: bytes) -> bytes:
    """The body of an error of LMI's, as OpenAI's clients know it."""
    told = json.loads(body)
    rows = [row for row in ERRORS if (row.status, row.type) == (told["code"], told["type"])]
    reasons = [reason for row in rows for reason in row.reasons]
    reason = "invalid_value" if "invalid_value" in reasons else reasons[0] if reasons else "internal"
    error = {"status": told["code"], "type": told["type"], "message": told["message"], "reason": reason}
    return json.dumps(error_body(Face.OPENAI, **error), ensure_ascii=False).encode()


def silence(face: Face, text: str, *, has_begun: bool, model: str) -> bytes:
    """What keeps a stream alive that has nothing to say: a comment, `text`, where the dialect has none of its own.
    `has_begun`: something of the answer has been said."""
    if face is Face.OLLAMA:  # no comments in JSON lines: one that adds nothing, to a chat or to a text
        line = {"model": model, "created_at": timestamp(), "message": {"role": "assistant", "content": ""}}
        return json.dumps({**line, "response": "", "done": False}, separators=(",", ":")).encode() + b"\n"
    if face is Face.LMI or (face is Face.FASTCHAT and has_begun):
        return b""  # FastChat's clients would take an empty text for the text so far
    if face is Face.FASTCHAT:
        return b'{"error_code":0,"text":"","usage":null,"finish_reason":null}\0'
    if face is Face.ANTHROPIC and has_begun:
        return b'event: ping\ndata: {"type":"ping"}\n\n'
    return f": {text}\n\n".encode()


def timestamp() -> str:
    """Now, as RFC 3339 has it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


TOKEN_HEADER = "Authorization"
"""Carries `Bearer <token of this worker>`; the client's own credentials never reach a worker."""
REQUEST_ID_HEADER = "X-Request-Id"
ASKED_HEADER = "X-Router-Asked"
"""The name by which a request asked for its model, percent-encoded, where its body has none: answers repeat it."""
ADAPTER_HEADER = "X-Router-Adapter"
"""The adapter that a request named beside its body, percent-encoded: behind the model's name, in the query or in a
header of LMI's clients."""
PROFILE_HEADER = "X-Router-Profile"
"""The name, percent-encoded, under whose profile a request is answered: one that the worker was told of."""
WAITED_HEADER = "X-Router-Waited"
"""Seconds that an Ollama request waited until its model was loaded, where it did: those are part of its answer."""
PROFILES_PATH = "/internal/profiles"
"""PUT of a `contract.Profile`, which holds from now on for requests by its name. Between router and worker only."""
ADAPTERS_PATH = "/internal/adapters"
"""PUT `{adapters: [AdapterSource], default}`: which may be named from now on; `{problems: {name: why}}` of those that
cannot be used. Between router and worker only."""
IGNORED_FIELDS_HEADER = "X-Ignored-Fields"
MOST_REPORTED = 32
"""Names in that header."""


def ignored_fields(names: Iterable[str]) -> dict[str, str]:
    """The header that names ignored fields, each once, in characters that a header may have; none if there are
    none."""
    every = list(dict.fromkeys(names))  # one face may have read what another has read before
    told = [quote(name[:64], safe="[]") for name in every[:MOST_REPORTED]]
    return {IGNORED_FIELDS_HEADER: ",".join(told + ["..."] * (len(every) > MOST_REPORTED))} if every else {}


def unknown_fields(route: Route, body: Mapping[str, Any]) -> list[str]:
    """What stands in `body` and in no table of `route`, which has just one: names, and paths of what is inside."""
    (table,) = BODIES[route.name]
    beside = [name for name, value in body.items() if value is not None and name not in table]
    return [*beside, *unknown(table, body)]


REQUEST_HEADERS = (
    "Content-Type",
    "Accept",
    "X-Request-Id",
    "traceparent",
    "tracestate",
    "User-Agent",
    "anthropic-version",
    "anthropic-beta",
)
"""What the router hands on of a request's headers; all others stay behind."""
RESPONSE_HEADERS = (
    "Content-Type", "Content-Length", "Cache-Control", "X-Accel-Buffering", "X-Ignored-Fields", "X-Should-Retry",
    "Retry-After",
)  # fmt: skip
"""What it hands on of an answer's."""
