"""The route table: every path of the API, and functions that look something up in it.

The router reads it to find the model, to forward, and to describe the API; the worker reads it to bind handlers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from worker.protocol.dialects import (
    Dialect,
    anthropic,
    cohere,
    ericllm,
    fastchat,
    llama_server,
    lmi,
    ollama,
    openai,
    responses,
    router,
    vllm,
)
from worker.protocol.dialects.anthropic import ANTHROPIC, COUNT_TOKENS
from worker.protocol.dialects.cohere import EMBED
from worker.protocol.dialects.ericllm import ERICLLM
from worker.protocol.dialects.fastchat import FASTCHAT, FASTCHAT_CHECK, FASTCHAT_CONV, FASTCHAT_COUNT, FASTCHAT_EMBED
from worker.protocol.dialects.generation_fields import NEUTRAL, NO_OPS
from worker.protocol.dialects.llama_server import COMPLETION, DETOKENIZE, FETCH, INFILL, NAMED, TOKENIZE
from worker.protocol.dialects.lmi import INVOCATIONS
from worker.protocol.dialects.ollama import (
    OLLAMA_CHAT,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    OLLAMA_GENERATE,
    OLLAMA_PULL,
    OLLAMA_SHOW,
)
from worker.protocol.dialects.openai import CHAT, CHAT_TOKENS, COMPLETIONS, EMBEDDING, EMBEDDINGS, RERANK, TEMPLATE
from worker.protocol.dialects.responses import RESPONSES, RESPONSES_TOKENS
from worker.protocol.dialects.router import PIN
from worker.protocol.dialects.vllm import EMBED_CHAT, SCORE, TOKENIZE_CHAT, TOKENIZE_TEXT
from worker.protocol.schema import Body, ResponseSchema, described
from worker.protocol.streams import stream
from worker.protocol.unknown_fields import unknown

ANSWERS: Mapping[str, ResponseSchema] = {
    **openai.ANSWERS,
    **llama_server.ANSWERS,
    **responses.ANSWERS,
    **anthropic.ANSWERS,
    **ollama.ANSWERS,
    **lmi.ANSWERS,
    **ericllm.ANSWERS,
    **fastchat.ANSWERS,
    **vllm.ANSWERS,
    **cohere.ANSWERS,
    **router.ANSWERS,
}


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
    dialect: Dialect
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


def _both(method: str, path: str, dialect: Dialect, name: str, *, worker: bool, **rest: Any) -> tuple[Route, Route]:
    """The path with and without `/v1`."""
    return (
        Route(method, "/v1" + path, dialect, name, worker, **rest),
        Route(method, path, dialect, name, worker, **rest),
    )


def _not_offered(
    methods: str, paths: str, instead: str, plane: Plane = Plane.USER, dialect: Dialect = Dialect.LLAMA_SERVER
) -> tuple[Route, ...]:
    """Paths that other servers of these dialects have: their clients are told what to do, not that nothing is there."""
    return tuple(
        Route(method, path, dialect, "not_offered", False, plane, instead=instead)
        for path in paths.split()
        for method in methods.split()
    )


_O, _L, _A = Dialect.OPENAI, Dialect.LLAMA_SERVER, Dialect.ADMIN
_M, _OLLAMA, _R, _F = Dialect.ANTHROPIC, Dialect.OLLAMA, Dialect.RESPONSES, Dialect.FASTCHAT

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
    Route("GET", "/ping", Dialect.LMI, "ping", False, Plane.PUBLIC),
    Route("GET", "/lmi/models", Dialect.LMI, "lmi_list", False),
    Route("POST", "/lmi/models", Dialect.LMI, "lmi_register", False, Plane.ADMIN),
    Route("GET", "/lmi/models/{id}", Dialect.LMI, "lmi_describe", False),
    Route("PUT", "/lmi/models/{id}", Dialect.LMI, "lmi_scale", False, Plane.ADMIN),
    Route("DELETE", "/lmi/models/{id}", Dialect.LMI, "lmi_unregister", False, Plane.ADMIN),
    Route("POST", "/invocations", Dialect.LMI, "invocations", True, loads=Loads.FOLLOWS, streams=True),
    *(
        Route(
            "POST", path, Dialect.LMI, "invocations", True, loads=Loads.FOLLOWS, streams=True, upstream="/invocations"
        )
        for path in ("/predictions/{id}", "/models/{id}/invoke")
    ),
    Route("POST", "/generate", Dialect.ERICLLM, "ericllm_generate", True, loads=Loads.FOLLOWS),
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
        Route(method, base + path, Dialect.LMI, f"adapter_{name}", False, plane)
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
    *_not_offered("POST", "/pooling /classify", "POST /v1/embeddings, or POST /v1/rerank", dialect=_O),
    *_not_offered("POST", "/v1/load_lora_adapter /v1/unload_lora_adapter", "/models/{id}/adapters", dialect=_O),
    *_not_offered("GET", "/tokenizer_info", "GET /props?model=, or POST /tokenize", dialect=_O),
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


DIALECTS: Mapping[str, Dialect] = {route.path: route.dialect for route in ROUTES}
"""By path: for errors about a path whose method is wrong, say."""
_BELOW = (
    ("/api/", Dialect.OLLAMA),
    ("/v1/messages/", Dialect.ANTHROPIC),
    ("/lmi/", Dialect.LMI),
    ("/predictions/", Dialect.LMI),
)


def dialect_of(path: str) -> Dialect:
    """Whose words an error about `path` is told in, which may be no path of this server."""
    return DIALECTS.get(path) or next(
        (dialect for prefix, dialect in _BELOW if path.startswith(prefix)), Dialect.OPENAI
    )


def refusal(path: str, body: bytes) -> tuple[str, bytes]:
    """An error's body as an answer of its own, and its type: where clients read nothing but frames, as one."""
    if path in _FRAMES_ONLY:
        return stream(Dialect.FASTCHAT).headers["Content-Type"], body + b"\0"
    return "application/json", body


_FRAMES_ONLY = frozenset(route.path for route in ROUTES if route.always_streams)


def unknown_fields(route: Route, body: Mapping[str, Any]) -> list[str]:
    """What stands in `body` and in no table of `route`, which has just one: names, and paths of what is inside."""
    (table,) = BODIES[route.name]
    beside = [name for name, value in body.items() if value is not None and name not in table]
    return [*beside, *unknown(table, body)]
