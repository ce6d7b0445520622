"""The route table: every path of the API, each declared once.

The HTTP application, the OpenAPI document, the worker's server and the access rules are generated from it. A handler is
named as `module.function` of the API package of the side that answers, because this package imports neither side.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
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
from worker.protocol.dialects.generation_fields import NEUTRAL, NO_OPS
from worker.protocol.schema import Body, ResponseSchema, described
from worker.protocol.streams import stream
from worker.protocol.unknown_fields import unknown


class Plane(Enum):
    """The keys that may use a route."""

    PUBLIC = "public"
    """No key is needed."""
    USER = "user"
    """Any key, once keys exist."""
    METRICS = "metrics"
    """As USER; with --metrics-public as PUBLIC."""
    ADMIN = "admin"
    """An admin key, once one exists."""


class Loads(Enum):
    """The effect of a request for an unloaded model if it has no `autoload` parameter."""

    FOLLOWS = "follows"
    """Follows the model's `autoload` key, then --models-autoload."""
    ON_DEMAND = "on demand"
    """Loads only with an explicit autoload=true."""
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Route:
    """One method and path of the API. A declaration may list several of each, separated by spaces."""

    method: str
    path: str
    dialect: Dialect
    name: str
    """The `endpoint` label of metrics. Routes with the same name have the same request schema."""
    handler: str
    """`module.function` in the API package of the router, or with `worker` in that of the worker."""
    summary: str = ""
    """One sentence for the OpenAPI document."""
    worker: bool = False
    """The request is forwarded byte for byte to the worker of its model."""
    plane: Plane = Plane.USER
    loads: Loads = Loads.NEVER
    streams: bool = False
    """The response is a stream if the body says `stream: true`."""
    streams_unless_told: bool = False
    """And also if the body has no `stream`."""
    always_streams: bool = False
    """And also if the body says `stream: false`: the path means a stream."""
    tells_load: bool = False
    """The response contains the seconds that the load took."""
    requests: tuple[Body, ...] = ()
    """The body has the fields of one of these tables; empty: the body is not read."""
    response: ResponseSchema | None = None
    """The successful response; None: the route never succeeds."""
    query: tuple[str, ...] = ()
    """Query parameters that are read, beside those that every route with `worker` has; others are ignored."""
    admin_query: tuple[str, ...] = ()
    """Query parameters that need an admin key."""
    errors: tuple[int, ...] = ()
    """Status codes of errors, beside those that all routes of its kind have."""
    upstream: str = ""
    """The worker's path, if this one contains the name of the model. Set by `_routes`."""
    instead: str = ""
    """The advice to clients, if the route is known and not offered."""


_PRESETS = "the file of --models-preset, and GET /models?reload=1"
# fmt: off
_DECLARATIONS: tuple[Route, ...] = (
    Route("POST", "/v1/chat/completions /chat/completions", Dialect.OPENAI, "chat", "openai.chat",
          summary="A chat completion.", worker=True, loads=Loads.FOLLOWS, streams=True,
          requests=(openai.CHAT,), response=openai.CHAT_RESPONSE),
    Route("POST", "/v1/completions", Dialect.OPENAI, "completions", "openai.completions",
          summary="A text completion.", worker=True, loads=Loads.FOLLOWS, streams=True,
          requests=(openai.COMPLETIONS,), response=openai.COMPLETIONS_RESPONSE),
    Route("POST", "/v1/embeddings", Dialect.OPENAI, "embeddings", "embeddings.embeddings",
          summary="One vector for each text.", worker=True, loads=Loads.FOLLOWS,
          requests=(openai.EMBEDDINGS, vllm.EMBED_CHAT), response=openai.EMBEDDINGS_RESPONSE),
    Route("POST", "/completion /completions", Dialect.LLAMA_SERVER, "completion", "llama_server.completion",
          summary="Text that goes on from the prompt, with all of these fields or those of `response_fields`; a list"
          " where several were asked for.",
          worker=True, loads=Loads.FOLLOWS, streams=True,
          requests=(llama_server.COMPLETION,), response=llama_server.COMPLETION_RESPONSE),
    Route("POST", "/infill", Dialect.LLAMA_SERVER, "infill", "llama_server.infill",
          summary="Text that goes between two others, as of `/completion`.", worker=True, loads=Loads.FOLLOWS,
          streams=True,
          requests=(llama_server.INFILL,), response=llama_server.INFILL_RESPONSE),
    Route("POST", "/embedding /embeddings", Dialect.LLAMA_SERVER, "embedding", "embeddings.native",
          summary="Vectors of each text: one, or without pooling one for each token.", worker=True,
          loads=Loads.FOLLOWS,
          requests=(openai.EMBEDDING,), response=llama_server.EMBEDDING_RESPONSE),
    Route("POST", "/v1/rerank /rerank /v1/reranking /reranking /v2/rerank",
          Dialect.LLAMA_SERVER, "rerank", "embeddings.rerank",
          summary="Documents, the one that fits best first; a bare list where they were sent as `texts`.",
          worker=True, loads=Loads.FOLLOWS,
          requests=(openai.RERANK,), response=openai.RERANK_RESPONSE),
    Route("POST", "/v1/score /score", Dialect.OPENAI, "score", "embeddings.score",
          summary="How well texts fit each other, pair by pair.", worker=True, loads=Loads.FOLLOWS,
          requests=(vllm.SCORE,), response=vllm.SCORE_RESPONSE),
    Route("POST", "/v2/embed", Dialect.OPENAI, "cohere_embed", "cohere.embed",
          summary="One vector for each text, in each of the types asked for.", worker=True, loads=Loads.FOLLOWS,
          requests=(cohere.EMBED,), response=cohere.COHERE_EMBED_RESPONSE),
    Route("POST", "/v1/chat/completions/input_tokens /chat/completions/input_tokens",
          Dialect.OPENAI, "chat_input_tokens", "openai.input_tokens",
          summary="Tokens of the prompt that this chat makes.", worker=True, loads=Loads.FOLLOWS,
          requests=(openai.CHAT_TOKENS,), response=openai.CHAT_INPUT_TOKENS_RESPONSE),
    Route("POST", "/v1/responses /responses", Dialect.RESPONSES, "responses", "responses.responses",
          summary="A response.", worker=True, loads=Loads.FOLLOWS, streams=True,
          requests=(responses.RESPONSES,), response=responses.RESPONSES_RESPONSE),
    Route("POST", "/v1/responses/input_tokens /responses/input_tokens",
          Dialect.RESPONSES, "responses_input_tokens", "responses.input_tokens",
          summary="Tokens of the prompt that this input makes.", worker=True, loads=Loads.FOLLOWS,
          requests=(responses.RESPONSES_TOKENS,), response=responses.RESPONSES_INPUT_TOKENS_RESPONSE),
    Route("GET", "/ping", Dialect.LMI, "ping", "lmi.ping",
          summary="Well, or still loading.", plane=Plane.PUBLIC,
          response=lmi.PING_RESPONSE),
    Route("GET", "/lmi/models", Dialect.LMI, "lmi_list", "lmi.list_models",
          summary="A page of models.",
          response=lmi.LMI_LIST_RESPONSE, query=("limit", "next_page_token")),
    Route("POST", "/lmi/models", Dialect.LMI, "lmi_register", "lmi.register",
          summary="Listed, and ready.", plane=Plane.ADMIN,
          response=lmi.LMI_REGISTER_RESPONSE,
          query=("url", "model_name", "model_version", "engine", "device",
                 "job_queue_size", "max_idle_time", "min_worker", "max_worker",
                 "synchronous", "batch_size", "max_batch_delay"),
          errors=(409, 429, 501, 502, 503, 504, 507)),
    Route("GET", "/lmi/models/{id}", Dialect.LMI, "lmi_describe", "lmi.describe_model",
          summary="One model and its workers.",
          response=lmi.LMI_DESCRIBE_RESPONSE, errors=(404,)),
    Route("PUT", "/lmi/models/{id}", Dialect.LMI, "lmi_scale", "lmi.scale",
          summary="So many workers run.", plane=Plane.ADMIN,
          response=lmi.LMI_SCALE_RESPONSE,
          query=("min_worker", "max_worker", "synchronous", "batch_size", "max_batch_delay"),
          errors=(404, 429, 501, 502, 503, 504, 507)),
    Route("DELETE", "/lmi/models/{id}", Dialect.LMI, "lmi_unregister", "lmi.unregister",
          summary="Listed no longer.", plane=Plane.ADMIN,
          response=lmi.LMI_UNREGISTER_RESPONSE, errors=(404,)),
    Route("POST", "/invocations /predictions/{id} /models/{id}/invoke", Dialect.LMI, "invocations", "lmi.invocations",
          summary="Generated text.", worker=True, loads=Loads.FOLLOWS, streams=True,
          requests=(lmi.INVOCATIONS, openai.CHAT, openai.COMPLETIONS), response=lmi.INVOCATIONS_RESPONSE,
          query=("adapter",)),
    Route("POST", "/generate", Dialect.ERICLLM, "ericllm_generate", "ericllm.generate",
          summary="The prompt and what follows it.", worker=True, loads=Loads.FOLLOWS,
          requests=(ericllm.ERICLLM,), response=ericllm.ERICLLM_GENERATE_RESPONSE),
    Route("POST", "/worker_generate_stream", Dialect.FASTCHAT, "fastchat_stream", "fastchat.generate_stream",
          summary="The text so far, again and again.", worker=True, loads=Loads.FOLLOWS, streams=True,
          streams_unless_told=True, always_streams=True,
          requests=(fastchat.FASTCHAT,), response=fastchat.FASTCHAT_STREAM_RESPONSE),
    Route("POST", "/worker_generate", Dialect.FASTCHAT, "fastchat_generate", "fastchat.generate",
          summary="Generated text.", worker=True, loads=Loads.FOLLOWS,
          requests=(fastchat.FASTCHAT,), response=fastchat.FASTCHAT_GENERATE_RESPONSE),
    Route("POST", "/worker_get_embeddings", Dialect.FASTCHAT, "fastchat_embeddings", "fastchat.get_embeddings",
          summary="One vector for each text.", worker=True, loads=Loads.FOLLOWS,
          requests=(fastchat.FASTCHAT_EMBED,), response=fastchat.FASTCHAT_EMBEDDINGS_RESPONSE),
    Route("POST", "/worker_get_conv_template", Dialect.FASTCHAT, "fastchat_conv", "fastchat.get_conv_template",
          summary="How FastChat's own API server lays out a chat for this model.", worker=True, loads=Loads.FOLLOWS,
          requests=(fastchat.FASTCHAT_CONV,), response=fastchat.FASTCHAT_CONV_RESPONSE),
    Route("POST", "/count_token", Dialect.FASTCHAT, "fastchat_count", "fastchat.count_token",
          summary="Tokens of a prompt.", worker=True, loads=Loads.FOLLOWS,
          requests=(fastchat.FASTCHAT_COUNT,), response=fastchat.FASTCHAT_COUNT_RESPONSE),
    Route("POST", "/worker_get_status", Dialect.FASTCHAT, "fastchat_status", "fastchat.status",
          summary="What a worker of all models would tell a controller.",
          response=fastchat.FASTCHAT_STATUS_RESPONSE),
    Route("POST", "/model_details", Dialect.FASTCHAT, "fastchat_details", "fastchat.details",
          summary="Tokens of a model's context.",
          requests=(fastchat.FASTCHAT_CONV,), response=fastchat.FASTCHAT_DETAILS_RESPONSE, errors=(404,)),
    Route("POST", "/api/v1/token_check", Dialect.FASTCHAT, "fastchat_check", "fastchat.token_check",
          summary="Whether each prompt and its answer fit into their model's context.",
          requests=(fastchat.FASTCHAT_CHECK,), response=fastchat.FASTCHAT_CHECK_RESPONSE, errors=(404, 502, 503, 504)),
    Route("POST", "/v1/messages", Dialect.ANTHROPIC, "messages", "anthropic.messages",
          summary="One message of the assistant.", worker=True, loads=Loads.FOLLOWS, streams=True,
          requests=(anthropic.ANTHROPIC,), response=anthropic.MESSAGES_RESPONSE),
    Route("POST", "/v1/messages/count_tokens", Dialect.ANTHROPIC, "count_tokens", "anthropic.count_tokens",
          summary="Tokens of the prompt that these messages make.", worker=True, loads=Loads.FOLLOWS,
          requests=(anthropic.COUNT_TOKENS,), response=anthropic.COUNT_TOKENS_RESPONSE),
    Route("POST", "/api/chat", Dialect.OLLAMA, "ollama_chat", "ollama.chat",
          summary="One message of the assistant.", worker=True, loads=Loads.FOLLOWS, streams=True,
          streams_unless_told=True, tells_load=True,
          requests=(ollama.OLLAMA_CHAT,), response=ollama.OLLAMA_CHAT_RESPONSE),
    Route("POST", "/api/generate", Dialect.OLLAMA, "ollama_generate", "ollama.generate",
          summary="Generated text.", worker=True, loads=Loads.FOLLOWS, streams=True, streams_unless_told=True,
          tells_load=True,
          requests=(ollama.OLLAMA_GENERATE,), response=ollama.OLLAMA_GENERATE_RESPONSE),
    Route("POST", "/api/embed", Dialect.OLLAMA, "ollama_embed", "ollama.embed",
          summary="One vector for each text.", worker=True, loads=Loads.FOLLOWS, tells_load=True,
          requests=(ollama.OLLAMA_EMBED,), response=ollama.OLLAMA_EMBED_RESPONSE),
    Route("POST", "/api/embeddings", Dialect.OLLAMA, "ollama_embeddings", "ollama.embeddings",
          summary="One vector.", worker=True, loads=Loads.FOLLOWS,
          requests=(ollama.OLLAMA_EMBEDDINGS,), response=ollama.OLLAMA_EMBEDDINGS_RESPONSE),
    Route("GET", "/api/tags", Dialect.OLLAMA, "ollama_tags", "ollama.tags",
          summary="All models.",
          response=ollama.OLLAMA_TAGS_RESPONSE),
    Route("GET", "/api/ps", Dialect.OLLAMA, "ollama_ps", "ollama.ps",
          summary="The models in memory.",
          response=ollama.OLLAMA_PS_RESPONSE),
    Route("GET", "/api/version", Dialect.OLLAMA, "ollama_version", "ollama.version",
          summary="The release of Ollama that has what is here.",
          response=ollama.OLLAMA_VERSION_RESPONSE),
    Route("POST", "/api/show", Dialect.OLLAMA, "ollama_show", "ollama.show",
          summary="One model.",
          requests=(ollama.OLLAMA_SHOW,), response=ollama.OLLAMA_SHOW_RESPONSE, errors=(404,)),
    Route("POST", "/api/pull", Dialect.OLLAMA, "ollama_pull", "ollama.pull",
          summary="Its files come; the last line says how it ended.", plane=Plane.ADMIN, streams=True,
          streams_unless_told=True,
          requests=(ollama.OLLAMA_PULL,), response=ollama.OLLAMA_PULL_RESPONSE, errors=(503,)),
    Route("DELETE", "/api/delete", Dialect.OLLAMA, "ollama_delete", "ollama.delete",
          summary="Its files are gone. Nothing is said.", plane=Plane.ADMIN,
          requests=(ollama.OLLAMA_SHOW,), response=ollama.OLLAMA_DELETE_RESPONSE, errors=(404, 409)),
    Route("GET", "/v1/models", Dialect.OPENAI, "models", "llama_server.models",
          summary="All models; with the header `anthropic-version` in Anthropic's words, too.",
          response=llama_server.MODELS_RESPONSE, query=("reload",), admin_query=("reload",)),
    Route("GET", "/v1/models/{id}", Dialect.OPENAI, "model", "llama_server.model",
          summary="One model; with the header `anthropic-version` in Anthropic's words, too.",
          response=llama_server.MODEL_RESPONSE, errors=(404,)),
    Route("POST", "/models/{id}/adapters /adapters", Dialect.LMI, "adapter_register", "lmi_adapters.register",
          summary="Requests may name it.", plane=Plane.ADMIN,
          response=lmi.ADAPTER_REGISTER_RESPONSE, query=("name", "src", "preload", "pin"), errors=(404, 409, 507)),
    Route("GET", "/models/{id}/adapters /adapters", Dialect.LMI, "adapter_list", "lmi_adapters.list_adapters",
          summary="A page of the model's adapters.",
          response=lmi.ADAPTER_LIST_RESPONSE, query=("limit", "next_page_token"), errors=(404,)),
    Route("POST", "/models/{id}/adapters/{adapter}/update /adapters/{adapter}/update",
          Dialect.LMI, "adapter_update", "lmi_adapters.update",
          summary="It is so for the next request that names it.", plane=Plane.ADMIN,
          response=lmi.ADAPTER_UPDATE_RESPONSE, query=("src", "preload", "pin"), errors=(404, 507)),
    Route("GET", "/models/{id}/adapters/{adapter} /adapters/{adapter}",
          Dialect.LMI, "adapter_describe", "lmi_adapters.describe_adapter",
          summary="One adapter, in a list.",
          response=lmi.ADAPTER_DESCRIBE_RESPONSE, errors=(404,)),
    Route("DELETE", "/models/{id}/adapters/{adapter} /adapters/{adapter}",
          Dialect.LMI, "adapter_unregister", "lmi_adapters.unregister",
          summary="Requests may name it no longer.", plane=Plane.ADMIN,
          response=lmi.ADAPTER_UNREGISTER_RESPONSE, errors=(404,)),
    Route("GET", "/models", Dialect.LLAMA_SERVER, "models", "llama_server.models",
          summary="All models; with the header `anthropic-version` in Anthropic's words, too.",
          response=llama_server.MODELS_RESPONSE, query=("reload",), admin_query=("reload",)),
    Route("GET", "/models/sse", Dialect.LLAMA_SERVER, "models_sse", "model_events.sse",
          summary="What happens to models, as it happens, each with an id.",
          response=llama_server.MODELS_SSE_RESPONSE, query=("snapshot",)),
    Route("GET", "/models/{id}", Dialect.LLAMA_SERVER, "model", "llama_server.model",
          summary="One model; with the header `anthropic-version` in Anthropic's words, too.",
          response=llama_server.MODEL_RESPONSE, errors=(404,)),
    Route("POST", "/models", Dialect.LLAMA_SERVER, "fetch", "llama_server.fetch",
          summary="The hub has it; its files come. Watch the events of models.", plane=Plane.ADMIN,
          requests=(llama_server.FETCH,), response=llama_server.FETCH_RESPONSE, errors=(503,)),
    Route("DELETE", "/models", Dialect.LLAMA_SERVER, "delete", "llama_server.delete",
          summary="Its files are gone.", plane=Plane.ADMIN,
          response=llama_server.DELETE_RESPONSE, query=("model",), errors=(404, 409)),
    Route("POST", "/models/load", Dialect.LLAMA_SERVER, "load", "llama_server.load",
          summary="Queued; with wait, loaded.", plane=Plane.ADMIN,
          requests=(llama_server.NAMED,), response=llama_server.LOAD_RESPONSE, query=("wait",),
          errors=(404, 501, 502, 503, 504, 507)),
    Route("POST", "/models/unload", Dialect.LLAMA_SERVER, "unload", "llama_server.unload",
          summary="Leaving; with wait, gone.", plane=Plane.ADMIN,
          requests=(llama_server.NAMED,), response=llama_server.UNLOAD_RESPONSE, query=("wait", "force"),
          errors=(404,)),
    Route("GET", "/v1/health /health", Dialect.LLAMA_SERVER, "health", "llama_server.health",
          summary="It is up.", plane=Plane.PUBLIC,
          response=llama_server.HEALTH_RESPONSE, query=("model",), errors=(404,)),
    Route("GET", "/version", Dialect.OPENAI, "version", "about.version",
          summary="The router's version.",
          response=vllm.VERSION_RESPONSE),
    Route("GET", "/ready", Dialect.LLAMA_SERVER, "ready", "llama_server.ready",
          summary="What loads on startup is up.", plane=Plane.PUBLIC,
          response=llama_server.READY_RESPONSE),
    Route("GET", "/metrics", Dialect.LLAMA_SERVER, "metrics", "llama_server.metrics",
          summary="Prometheus' text format.", plane=Plane.METRICS,
          response=llama_server.METRICS_RESPONSE, query=("model",), errors=(404,)),
    Route("GET", "/props", Dialect.LLAMA_SERVER, "props", "llama_server.props",
          summary="The router's properties, or those of one model.",
          response=llama_server.PROPS_RESPONSE, query=("model", "autoload"), errors=(404, 501, 502, 503, 504, 507)),
    Route("POST", "/tokenize", Dialect.LLAMA_SERVER, "tokenize", "tokens.tokenize",
          summary="Token ids of `content`, with their pieces if asked for; of `prompt` or `messages`, with their"
          " number, as at vLLM.",
          worker=True, loads=Loads.FOLLOWS,
          requests=(llama_server.TOKENIZE, vllm.TOKENIZE_TEXT, vllm.TOKENIZE_CHAT),
          response=llama_server.TOKENIZE_RESPONSE),
    Route("POST", "/detokenize", Dialect.LLAMA_SERVER, "detokenize", "tokens.detokenize",
          summary="The text of the tokens, by two names.", worker=True, loads=Loads.FOLLOWS,
          requests=(llama_server.DETOKENIZE,), response=llama_server.DETOKENIZE_RESPONSE),
    Route("POST", "/apply-template", Dialect.LLAMA_SERVER, "apply_template", "llama_server.apply_template",
          summary="The prompt that this chat makes.", worker=True, loads=Loads.FOLLOWS,
          requests=(openai.TEMPLATE,), response=llama_server.APPLY_TEMPLATE_RESPONSE),
    Route("GET", "/router/state", Dialect.ADMIN, "state", "admin.state",
          summary="Devices, models, workers and the queue, in bytes and seconds.", plane=Plane.ADMIN,
          response=router.STATE_RESPONSE),
    Route("GET", "/router/plan", Dialect.ADMIN, "plan", "admin.plan",
          summary="What loading the model would do now; nothing is done.", plane=Plane.ADMIN,
          response=router.PLAN_RESPONSE, query=("model", "model_name"), errors=(404, 503, 507)),
    Route("GET", "/router/events", Dialect.ADMIN, "events", "admin.events",
          summary="Everything that happens, as it happens, each with an id.", plane=Plane.ADMIN,
          response=router.EVENTS_RESPONSE),
    Route("POST", "/router/reload", Dialect.ADMIN, "reload", "admin.reload",
          summary="Presets, folders and caches were read again.", plane=Plane.ADMIN,
          response=router.RELOAD_RESPONSE),
    Route("POST", "/router/pin", Dialect.ADMIN, "pin", "admin.pin",
          summary="It may be put out no longer, or again.", plane=Plane.ADMIN,
          requests=(router.PIN,), response=router.PIN_RESPONSE, errors=(404,)),
    Route("GET", "/router/config", Dialect.ADMIN, "config", "admin.config",
          summary="Every setting of a model, and where it comes from.", plane=Plane.ADMIN,
          response=router.CONFIG_RESPONSE, query=("model", "model_name"), errors=(404,)),
    Route("GET", "/router/logs", Dialect.ADMIN, "logs", "admin.logs",
          summary="The newest log lines.", plane=Plane.ADMIN,
          response=router.LOGS_RESPONSE, query=("model", "level", "lines"), errors=(404,)),
    Route("GET", "/router/logs/sse", Dialect.ADMIN, "logs_sse", "admin.follow_logs",
          summary="The newest log lines, and then each as it comes, with an id.", plane=Plane.ADMIN,
          response=router.LOGS_SSE_RESPONSE, query=("model", "level", "lines"), errors=(404,)),
    Route("GET", "/router/requests", Dialect.ADMIN, "requests", "admin.requests",
          summary="Requests for workers: those that run, and the last 1000 that ended.", plane=Plane.ADMIN,
          response=router.REQUESTS_RESPONSE, query=("model",), errors=(404,)),
    Route("DELETE", "/router/requests/{request}", Dialect.ADMIN, "cancel", "admin.cancel",
          summary="The running requests of that id end with an error.", plane=Plane.ADMIN,
          response=router.CANCEL_RESPONSE, errors=(404,)),
    Route("GET", "/", Dialect.ADMIN, "index", "about.index",
          summary="What this is.", plane=Plane.PUBLIC,
          response=router.INDEX_RESPONSE),
    Route("GET", "/ui/page.css", Dialect.ADMIN, "style", "about.page_file",
          summary="How the page looks.", plane=Plane.PUBLIC,
          response=router.STYLE_RESPONSE),
    Route("GET", "/ui/page.js", Dialect.ADMIN, "script", "about.page_file",
          summary="What the page does.", plane=Plane.PUBLIC,
          response=router.SCRIPT_RESPONSE),
    Route("GET", "/openapi.json", Dialect.ADMIN, "openapi", "about.openapi",
          summary="This description.",
          response=router.OPENAPI_RESPONSE),
    Route("GET", "/slots", Dialect.LLAMA_SERVER, "slots", "llama_server.slots",
          summary="Places in the batches of loaded models.",
          response=llama_server.SLOTS_RESPONSE, query=("model", "fail_on_no_slot"), errors=(404, 501, 503)),
    Route("POST", "/v1/streams/lookup", Dialect.LLAMA_SERVER, "streams_lookup", "llama_server.streams",
          summary="None: no stream outlives its connection.",
          response=llama_server.STREAMS_LOOKUP_RESPONSE),
    Route("GET", "/v1/streams", Dialect.LLAMA_SERVER, "streams_lookup", "llama_server.streams",
          summary="None: no stream outlives its connection.",
          response=llama_server.STREAMS_LOOKUP_RESPONSE),
    Route("GET POST", "/tools /cors-proxy", Dialect.LLAMA_SERVER, "disabled", "about.disabled",
          summary="Disabled: this server fetches and runs nothing."),
    Route("POST", "/api/push /api/create /api/copy", Dialect.OLLAMA, "not_offered", "about.not_offered",
          plane=Plane.ADMIN, errors=(501,), instead=_PRESETS),
    Route("GET POST", "/api/blobs/{digest}", Dialect.OLLAMA, "not_offered", "about.not_offered",
          plane=Plane.ADMIN, errors=(501,), instead=_PRESETS),
    Route("POST", "/props", Dialect.LLAMA_SERVER, "not_offered", "about.not_offered",
          errors=(501,), instead=_PRESETS),
    Route("POST", "/slots/{slot}", Dialect.LLAMA_SERVER, "not_offered", "about.not_offered",
          errors=(501,), instead="prefix-caching: what prompts have in common is kept by itself"),
    Route("GET", "/lora-adapters", Dialect.LLAMA_SERVER, "lora_adapters", "llama_server.lora_adapters",
          summary="Adapters of the model, by their number.",
          response=llama_server.LORA_ADAPTERS_RESPONSE, query=("model",), errors=(404,)),
    Route("POST", "/lora-adapters", Dialect.LLAMA_SERVER, "not_offered", "about.not_offered",
          errors=(501,), instead="lora of a request: a scale for all would change other clients' answers"),
    Route("POST", "/pooling /classify", Dialect.OPENAI, "not_offered", "about.not_offered",
          errors=(501,), instead="POST /v1/embeddings, or POST /v1/rerank"),
    Route("POST", "/v1/load_lora_adapter /v1/unload_lora_adapter", Dialect.OPENAI, "not_offered", "about.not_offered",
          errors=(501,), instead="/models/{id}/adapters"),
    Route("GET", "/tokenizer_info", Dialect.OPENAI, "not_offered", "about.not_offered",
          errors=(501,), instead="GET /props?model=, or POST /tokenize"),
    Route("POST", "/v1/audio/transcriptions /v1/audio/speech /v1/images/generations /v1/moderations",
          Dialect.LLAMA_SERVER, "not_offered", "about.not_offered",
          errors=(501,), instead="another server"),
)
# fmt: on


def _routes(declared: Route) -> Iterator[Route]:
    """The routes of one declaration, one for each method and path. If a path contains the name of the model, the worker
    gets the request at the first path of the declaration."""
    paths = declared.path.split()
    for path in paths:
        upstream = paths[0] if declared.worker and "{" in path else ""
        for method in declared.method.split():
            yield replace(declared, method=method, path=path, upstream=upstream)


ROUTES: tuple[Route, ...] = tuple(route for declared in _DECLARATIONS for route in _routes(declared))

FLAGS = ("autoload", "wait", "force", "snapshot", "fail_on_no_slot", "synchronous", "preload", "pin")
"""Query parameters with the values true, 1, false and 0."""


def query(route: Route) -> tuple[str, ...]:
    """The query parameters that `route` reads; others are ignored."""
    return ("model", "model_name", "autoload", *route.query) if route.worker else route.query


def body_schema(route: Route) -> Mapping[str, Any] | None:
    """The JSON Schema of the request body of `route`; None if it reads no body."""
    if not route.requests:
        return None
    further = {**NEUTRAL, **NO_OPS} if route.worker else {}
    every = [described({**further, **body}) for body in route.requests]
    return every[0] if len(every) == 1 else {"anyOf": every}


DIALECTS: Mapping[str, Dialect] = {route.path: route.dialect for route in ROUTES}
"""The dialect of each path, for errors about a wrong method."""
_BELOW = (
    ("/api/", Dialect.OLLAMA),
    ("/v1/messages/", Dialect.ANTHROPIC),
    ("/lmi/", Dialect.LMI),
    ("/predictions/", Dialect.LMI),
)


def dialect_of(path: str) -> Dialect:
    """The dialect of an error about `path`, which may be unknown."""
    return DIALECTS.get(path) or next(
        (dialect for prefix, dialect in _BELOW if path.startswith(prefix)), Dialect.OPENAI
    )


def refusal(path: str, body: bytes) -> tuple[str, bytes]:
    """The content type and body of an error response. Where clients read only frames, it is a frame."""
    if path in _FRAMES_ONLY:
        return stream(Dialect.FASTCHAT).headers["Content-Type"], body + b"\0"
    return "application/json", body


_FRAMES_ONLY = frozenset(route.path for route in ROUTES if route.always_streams)


def unknown_fields(route: Route, body: Mapping[str, Any]) -> list[str]:
    """The fields of `body` that the only table of `route` does not have: names, and paths of inner fields."""
    (table,) = route.requests
    beside = [name for name, value in body.items() if value is not None and name not in table]
    return [*beside, *unknown(table, body)]
