"""The route table, in which every path of the API is declared once, and the headers of requests and responses.

The HTTP application, the OpenAPI document, the worker's server and the access rules are generated from the table. The
handler is `module.function` of the API package of the side that responds, because this package imports neither.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any
from urllib.parse import quote

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
from worker.protocol.unknown_fields import unknown_paths


class AccessLevel(Enum):
    """The keys that may use a route."""

    PUBLIC = "public"  # no key needed
    USER = "user"  # any key, once keys exist
    METRICS = "metrics"  # as USER; with --metrics-public as PUBLIC
    ADMIN = "admin"  # an admin key, once one exists


@dataclass(frozen=True, slots=True)
class Route:
    """One method and path of the API. A declaration may list several of each, separated by spaces."""

    method: str
    path: str
    dialect: Dialect
    name: str  # the `endpoint` label of metrics; routes with the same name have the same request schema
    handler: str  # `module.function` in the API package of the router, or with `worker` in that of the worker
    summary: str = ""  # one sentence for the OpenAPI document
    worker: bool = False  # the request is forwarded byte for byte to the worker of its model
    access: AccessLevel = AccessLevel.USER
    streams: bool = False  # the response is a stream if the body has `stream: true`
    streams_by_default: bool = False  # also if the body has no `stream`
    always_streams: bool = False  # also if the body has `stream: false`: the path implies a stream
    reports_load_time: bool = False  # the response contains the seconds of the load
    requests: tuple[Body, ...] = ()  # the body has the fields of one of these tables; empty: the body is not read
    response: ResponseSchema | None = None  # the successful response; None: the route never succeeds
    # Query parameters, beside those of every route with `worker`. All others are ignored.
    query: tuple[str, ...] = ()
    admin_query: tuple[str, ...] = ()  # query parameters that need an admin key
    errors: tuple[int, ...] = ()  # status codes of errors, beside those of all routes of its kind
    upstream: str = ""  # the path on the worker, if `path` contains the name of the model; set by `_routes`
    instead: str = ""  # the alternative for clients, if the route is known but not offered


def _not_offered(
    method: str, path: str, dialect: Dialect, instead: str, access: AccessLevel = AccessLevel.USER
) -> Route:
    """A route of another server that answers 501 and names the alternative `instead`."""
    return Route(
        method, path, dialect, "not_offered", "about.not_offered", access=access, errors=(501,), instead=instead
    )


_PRESETS = "the file of --models-preset, and GET /models?reload=1"
_NO_WORKFLOWS = "POST /lmi/models for each model, and let the client call them in turn"
_UNSTORED = "the whole conversation in `input` of POST /v1/responses: no response is stored"
# fmt: off
_DECLARATIONS: tuple[Route, ...] = (
    Route("POST", "/v1/chat/completions /chat/completions /api/v1/chat/completions",
          Dialect.OPENAI, "chat", "openai.chat",
          summary="A chat completion.", worker=True, streams=True,
          requests=(openai.CHAT,), response=openai.CHAT_RESPONSE),
    Route("POST", "/v1/completions", Dialect.OPENAI, "completions", "openai.completions",
          summary="A text completion.", worker=True, streams=True,
          requests=(openai.COMPLETIONS,), response=openai.COMPLETIONS_RESPONSE),
    Route("POST", "/v1/embeddings /v1/engines/{id}/embeddings", Dialect.OPENAI, "embeddings", "embeddings.embeddings",
          summary="One embedding for each text.", worker=True,
          requests=(openai.EMBEDDINGS, vllm.EMBED_CHAT), response=openai.EMBEDDINGS_RESPONSE),
    Route("POST", "/completion /completions", Dialect.LLAMA_SERVER, "completion", "llama_server.completion",
          summary="A text completion in llama-server's format, limited to `response_fields` if given; a list for"
          " several prompts or choices.",
          worker=True, streams=True, requests=(llama_server.COMPLETION,), response=llama_server.COMPLETION_RESPONSE),
    Route("POST", "/infill", Dialect.LLAMA_SERVER, "infill", "llama_server.infill",
          summary="Fill in the middle: the text between a prefix and a suffix, in the format of `/completion`.",
          worker=True, streams=True, requests=(llama_server.INFILL,), response=llama_server.COMPLETION_RESPONSE),
    Route("POST", "/embedding /embeddings", Dialect.LLAMA_SERVER, "embedding", "embeddings.native",
          summary="Embeddings of each text: one vector, or one for each token without pooling.", worker=True,
          requests=(llama_server.EMBEDDING,), response=llama_server.EMBEDDING_RESPONSE),
    Route("POST", "/v1/rerank /rerank /v1/reranking /reranking /v2/rerank",
          Dialect.LLAMA_SERVER, "rerank", "embeddings.rerank",
          summary="Documents by descending relevance; a bare list if they were sent as `texts`.",
          worker=True, requests=(llama_server.RERANK,), response=llama_server.RERANK_RESPONSE),
    Route("POST", "/v1/score /score", Dialect.OPENAI, "score", "embeddings.score",
          summary="Similarity scores of pairs of texts.", worker=True,
          requests=(vllm.SCORE,), response=vllm.SCORE_RESPONSE),
    Route("POST", "/v2/embed", Dialect.OPENAI, "cohere_embed", "cohere.embed",
          summary="One vector for each text, in each of the requested types.", worker=True,
          requests=(cohere.EMBED,), response=cohere.EMBED_RESPONSE),
    Route("POST", "/v1/chat/completions/input_tokens /chat/completions/input_tokens",
          Dialect.OPENAI, "chat_input_tokens", "openai.input_tokens",
          summary="The number of prompt tokens of this chat.", worker=True,
          requests=(openai.CHAT_TOKENS,), response=openai.CHAT_INPUT_TOKENS_RESPONSE),
    Route("POST", "/v1/responses /responses", Dialect.RESPONSES, "responses", "responses.responses",
          summary="A response.", worker=True, streams=True,
          requests=(responses.RESPONSES,), response=responses.RESPONSES_RESPONSE),
    Route("POST", "/v1/responses/input_tokens /responses/input_tokens",
          Dialect.RESPONSES, "responses_input_tokens", "responses.input_tokens",
          summary="The number of prompt tokens of this input.", worker=True,
          requests=(responses.INPUT_TOKENS,), response=responses.INPUT_TOKENS_RESPONSE),
    Route("GET", "/ping", Dialect.LMI, "ping", "lmi.ping",
          summary="Health: healthy, or still loading.", access=AccessLevel.PUBLIC,
          response=lmi.PING_RESPONSE),
    Route("GET", "/lmi/models", Dialect.LMI, "lmi_list", "lmi.list_models",
          summary="A page of models.",
          response=lmi.LIST_RESPONSE, query=("limit", "next_page_token")),
    Route("GET", "/lmi/workflows", Dialect.LMI, "lmi_workflows", "lmi.list_workflows",
          summary="A page of models, by LMI's other path.",
          response=lmi.WORKFLOWS_RESPONSE, query=("limit", "next_page_token")),
    Route("POST", "/lmi/models", Dialect.LMI, "lmi_register", "lmi.register",
          summary="Register a model and load it.", access=AccessLevel.ADMIN,
          response=lmi.SCHEDULED_RESPONSE,
          query=("url", "model_name", "model_version", "engine", "device",
                 "job_queue_size", "max_idle_time", "min_worker", "max_worker",
                 "synchronous", "batch_size", "max_batch_delay"),
          errors=(409, 429, 501, 502, 503, 504, 507)),
    Route("GET", "/lmi/models/{id} /lmi/workflows/{id}", Dialect.LMI, "lmi_describe", "lmi.describe_model",
          summary="One model and its workers.",
          response=lmi.DESCRIBE_RESPONSE, errors=(404,)),
    Route("PUT", "/lmi/models/{id} /lmi/workflows/{id}", Dialect.LMI, "lmi_scale", "lmi.scale",
          summary="Set the number of workers of a model.", access=AccessLevel.ADMIN,
          response=lmi.SCHEDULED_RESPONSE,
          query=("min_worker", "max_worker", "synchronous", "batch_size", "max_batch_delay"),
          errors=(404, 429, 501, 502, 503, 504, 507)),
    Route("DELETE", "/lmi/models/{id} /lmi/workflows/{id}", Dialect.LMI, "lmi_unregister", "lmi.unregister",
          summary="Unregister a model.", access=AccessLevel.ADMIN,
          response=lmi.STATUS_RESPONSE, errors=(404,)),
    _not_offered("GET POST", "/server/metrics", Dialect.LMI, "GET /metrics"),
    _not_offered("POST", "/server/logging", Dialect.LMI, "--log-level"),
    _not_offered("POST", "/lmi/workflows", Dialect.LMI, _NO_WORKFLOWS, access=AccessLevel.ADMIN),
    _not_offered("POST", "/workflows", Dialect.LMI, _NO_WORKFLOWS),
    _not_offered("GET", "/workflows", Dialect.LMI, "/lmi/workflows, or --lmi-management"),
    _not_offered("GET PUT DELETE", "/workflows/{id}", Dialect.LMI, "/lmi/workflows, or --lmi-management"),
    Route("POST", "/invocations /predictions/{id} /models/{id}/invoke", Dialect.LMI, "invocations", "lmi.invocations",
          summary="Generated text; of other models, vectors or scores.", worker=True, streams=True,
          requests=(lmi.INVOCATIONS, openai.CHAT, openai.COMPLETIONS, openai.EMBEDDINGS,
                    llama_server.RERANK, vllm.SCORE),
          response=lmi.INVOCATIONS_RESPONSE,
          query=("adapter", "model_version")),
    Route("POST", "/generate", Dialect.ERICLLM, "ericllm_generate", "ericllm.generate",
          summary="The prompt and the generated text.", worker=True,
          requests=(ericllm.GENERATE,), response=ericllm.GENERATE_RESPONSE),
    Route("POST", "/worker_generate_stream", Dialect.FASTCHAT, "fastchat_stream", "fastchat.generate_stream",
          summary="A stream in which every frame contains the whole text so far.",
          worker=True, streams=True, streams_by_default=True, always_streams=True,
          requests=(fastchat.GENERATE,), response=fastchat.STREAM_RESPONSE),
    Route("POST", "/worker_generate", Dialect.FASTCHAT, "fastchat_generate", "fastchat.generate",
          summary="Generated text.", worker=True,
          requests=(fastchat.GENERATE,), response=fastchat.GENERATE_RESPONSE),
    Route("POST", "/worker_get_embeddings", Dialect.FASTCHAT, "fastchat_embeddings", "fastchat.get_embeddings",
          summary="One embedding for each text.", worker=True,
          requests=(openai.EMBEDDINGS,), response=fastchat.EMBED_RESPONSE),
    Route("POST", "/worker_get_conv_template", Dialect.FASTCHAT, "fastchat_conv", "fastchat.get_conv_template",
          summary="The conversation template that FastChat's API server uses for this model.",
          worker=True, requests=(fastchat.CONV_TEMPLATE,), response=fastchat.CONV_TEMPLATE_RESPONSE),
    Route("POST", "/count_token", Dialect.FASTCHAT, "fastchat_count", "fastchat.count_token",
          summary="The number of tokens of a prompt.", worker=True,
          requests=(fastchat.COUNT_TOKENS,), response=fastchat.COUNT_TOKENS_RESPONSE),
    Route("POST", "/worker_get_status", Dialect.FASTCHAT, "fastchat_status", "fastchat.status",
          summary="Status of a FastChat worker that serves all models.",
          response=fastchat.STATUS_RESPONSE),
    Route("POST", "/model_details", Dialect.FASTCHAT, "fastchat_details", "fastchat.details",
          summary="The context length of a model.",
          requests=(fastchat.CONV_TEMPLATE,), response=fastchat.DETAILS_RESPONSE, errors=(404,)),
    Route("POST", "/list_models /list_language_models /list_multimodal_models", Dialect.FASTCHAT,
          "fastchat_models", "fastchat.list_models",
          summary="The names of models, as FastChat's controller lists them: all, those without and those with images.",
          response=fastchat.MODELS_RESPONSE),
    Route("POST", "/get_worker_address", Dialect.FASTCHAT, "fastchat_address", "fastchat.worker_address",
          summary="The address of this router, which serves all models; empty for an unknown model.",
          requests=(fastchat.CONV_TEMPLATE,), response=fastchat.ADDRESS_RESPONSE),
    Route("POST", "/refresh_all_workers", Dialect.FASTCHAT, "fastchat_refresh", "fastchat.refresh",
          summary="Nothing to do: the list of models is always current.", response=fastchat.NULL_RESPONSE),
    Route("GET", "/test_connection", Dialect.FASTCHAT, "fastchat_test", "fastchat.test_connection",
          summary="The word success.", response=fastchat.WORD_RESPONSE),
    _not_offered("POST", "/register_worker /receive_heart_beat", Dialect.FASTCHAT,
                 "a section of the file of --models-preset: this router starts its workers itself"),
    Route("POST", "/api/v1/token_check", Dialect.FASTCHAT, "fastchat_check", "fastchat.token_check",
          summary="Check that each prompt and its completion fit into the context of their model.",
          requests=(fastchat.TOKEN_CHECK,), response=fastchat.TOKEN_CHECK_RESPONSE, errors=(404, 502, 503, 504)),
    Route("POST", "/v1/messages", Dialect.ANTHROPIC, "messages", "anthropic.messages",
          summary="One message of the assistant.", worker=True, streams=True,
          requests=(anthropic.MESSAGES,), response=anthropic.MESSAGES_RESPONSE),
    Route("POST", "/v1/messages/count_tokens", Dialect.ANTHROPIC, "count_tokens", "anthropic.count_tokens",
          summary="The number of prompt tokens of these messages.", worker=True,
          requests=(anthropic.COUNT_TOKENS,), response=anthropic.COUNT_TOKENS_RESPONSE),
    Route("POST", "/api/chat", Dialect.OLLAMA, "ollama_chat", "ollama.chat",
          summary="One message of the assistant.", worker=True, streams=True,
          streams_by_default=True, reports_load_time=True,
          requests=(ollama.CHAT,), response=ollama.CHAT_RESPONSE),
    Route("POST", "/api/generate", Dialect.OLLAMA, "ollama_generate", "ollama.generate",
          summary="Generated text.", worker=True, streams=True, streams_by_default=True,
          reports_load_time=True,
          requests=(ollama.GENERATE,), response=ollama.GENERATE_RESPONSE),
    Route("POST", "/api/embed", Dialect.OLLAMA, "ollama_embed", "ollama.embed",
          summary="One embedding for each text.", worker=True, reports_load_time=True,
          requests=(ollama.EMBED,), response=ollama.EMBED_RESPONSE),
    Route("POST", "/api/embeddings", Dialect.OLLAMA, "ollama_embeddings", "ollama.embeddings",
          summary="One vector.", worker=True,
          requests=(ollama.EMBEDDINGS,), response=ollama.EMBEDDINGS_RESPONSE),
    Route("GET", "/api/tags", Dialect.OLLAMA, "ollama_tags", "ollama.tags",
          summary="A list of all models.",
          response=ollama.TAGS_RESPONSE),
    Route("GET", "/api/ps", Dialect.OLLAMA, "ollama_ps", "ollama.ps",
          summary="The loaded models.",
          response=ollama.PS_RESPONSE),
    Route("GET", "/api/version", Dialect.OLLAMA, "ollama_version", "ollama.version",
          summary="The version of Ollama's API that is implemented.",
          response=ollama.VERSION_RESPONSE),
    Route("POST", "/api/show", Dialect.OLLAMA, "ollama_show", "ollama.show",
          summary="Details of one model.",
          requests=(ollama.SHOW,), response=ollama.SHOW_RESPONSE, errors=(404,)),
    Route("POST", "/api/pull", Dialect.OLLAMA, "ollama_pull", "ollama.pull",
          summary="Download a model; the last line contains the result.", access=AccessLevel.ADMIN, streams=True,
          streams_by_default=True,
          requests=(ollama.PULL,), response=ollama.PULL_RESPONSE, errors=(503,)),
    Route("DELETE", "/api/delete", Dialect.OLLAMA, "ollama_delete", "ollama.delete",
          summary="Delete the files of a model. The response is empty.", access=AccessLevel.ADMIN,
          requests=(ollama.SHOW,), response=ollama.DELETE_RESPONSE, errors=(404, 409)),
    Route("GET", "/v1/models", Dialect.OPENAI, "models", "llama_server.models",
          summary="All models; with the header `anthropic-version` also with Anthropic's fields.",
          response=llama_server.MODELS_RESPONSE, query=("reload",), admin_query=("reload",)),
    Route("GET", "/v1/models/{id}", Dialect.OPENAI, "model", "llama_server.model",
          summary="One model; with the header `anthropic-version` also with Anthropic's fields.",
          response=llama_server.MODEL_RESPONSE, errors=(404,)),
    Route("POST", "/models/{id}/adapters /adapters", Dialect.LMI, "adapter_register", "lmi_adapters.register",
          summary="Register an adapter of the model.", access=AccessLevel.ADMIN,
          response=lmi.STATUS_RESPONSE, query=("model", "name", "src", "preload", "pin"), errors=(404, 409, 507)),
    Route("GET", "/models/{id}/adapters /adapters", Dialect.LMI, "adapter_list", "lmi_adapters.list_adapters",
          summary="A page of the list of the model's adapters.",
          response=lmi.ADAPTER_LIST_RESPONSE, query=("model", "limit", "next_page_token"), errors=(404,)),
    Route("POST", "/models/{id}/adapters/{adapter}/update /adapters/{adapter}/update",
          Dialect.LMI, "adapter_update", "lmi_adapters.update",
          summary="Update an adapter; takes effect with the next request that names it.", access=AccessLevel.ADMIN,
          response=lmi.STATUS_RESPONSE, query=("model", "src", "preload", "pin"), errors=(404, 507)),
    Route("GET", "/models/{id}/adapters/{adapter} /adapters/{adapter}",
          Dialect.LMI, "adapter_describe", "lmi_adapters.describe_adapter",
          summary="One adapter, as a list.",
          response=lmi.ADAPTER_DESCRIBE_RESPONSE, query=("model",), errors=(404,)),
    Route("DELETE", "/models/{id}/adapters/{adapter} /adapters/{adapter}",
          Dialect.LMI, "adapter_unregister", "lmi_adapters.unregister",
          summary="Unregister an adapter.", access=AccessLevel.ADMIN,
          response=lmi.STATUS_RESPONSE, query=("model",), errors=(404,)),
    Route("GET", "/models", Dialect.LLAMA_SERVER, "models", "llama_server.models",
          summary="All models; with the header `anthropic-version` also with Anthropic's fields.",
          response=llama_server.MODELS_RESPONSE, query=("reload",), admin_query=("reload",)),
    Route("GET", "/models/sse", Dialect.LLAMA_SERVER, "models_sse", "model_events.sse",
          summary="A stream of model events, each with an id.",
          response=llama_server.MODELS_SSE_RESPONSE, query=("snapshot",)),
    Route("GET", "/models/{id}", Dialect.LLAMA_SERVER, "model", "llama_server.model",
          summary="One model; with the header `anthropic-version` also with Anthropic's fields.",
          response=llama_server.MODEL_RESPONSE, errors=(404,)),
    Route("POST", "/models", Dialect.LLAMA_SERVER, "fetch", "llama_server.fetch",
          summary="Start the download of a model from the hub. `/models/sse` reports its progress.",
          access=AccessLevel.ADMIN,
          requests=(llama_server.DOWNLOAD,), response=llama_server.SUCCESS_RESPONSE, errors=(503,)),
    Route("DELETE", "/models", Dialect.LLAMA_SERVER, "delete", "llama_server.delete",
          summary="Delete the files of a model.", access=AccessLevel.ADMIN,
          response=llama_server.SUCCESS_RESPONSE, query=("model",), errors=(404, 409)),
    Route("POST", "/models/load", Dialect.LLAMA_SERVER, "load", "llama_server.load",
          summary="Load a model; with `wait` the response follows the load.", access=AccessLevel.ADMIN,
          requests=(llama_server.MODEL_NAME,), response=llama_server.LOAD_RESPONSE, query=("wait",),
          errors=(404, 501, 502, 503, 504, 507)),
    Route("POST", "/models/unload", Dialect.LLAMA_SERVER, "unload", "llama_server.unload",
          summary="Unload a model; with `wait` the response follows the unload.", access=AccessLevel.ADMIN,
          requests=(llama_server.MODEL_NAME,), response=llama_server.SUCCESS_RESPONSE, query=("wait", "force"),
          errors=(404,)),
    Route("GET", "/v1/health /health", Dialect.LLAMA_SERVER, "health", "llama_server.health",
          summary="Health of the router, or of one model.", access=AccessLevel.PUBLIC,
          response=llama_server.HEALTH_RESPONSE, query=("model",), errors=(404,)),
    Route("GET", "/version", Dialect.OPENAI, "version", "about.version",
          summary="The router's version.",
          response=vllm.VERSION_RESPONSE),
    Route("GET", "/ready", Dialect.LLAMA_SERVER, "ready", "llama_server.ready",
          summary="Readiness: all models with load-on-startup are loaded.", access=AccessLevel.PUBLIC,
          response=llama_server.HEALTH_RESPONSE),
    Route("GET", "/metrics", Dialect.LLAMA_SERVER, "metrics", "llama_server.metrics",
          summary="Metrics in Prometheus' text format.", access=AccessLevel.METRICS,
          response=llama_server.METRICS_RESPONSE, query=("model",), errors=(404,)),
    Route("GET", "/props", Dialect.LLAMA_SERVER, "props", "llama_server.props",
          summary="Properties of the router or of one model.",
          response=llama_server.PROPS_RESPONSE, query=("model", "autoload"), errors=(404, 501, 502, 503, 504, 507)),
    Route("POST", "/tokenize", Dialect.LLAMA_SERVER, "tokenize", "tokens.tokenize",
          summary="Token ids of `content`, with their text if requested; of `prompt` or `messages`, with their"
          " number, in vLLM's format.",
          worker=True,
          requests=(llama_server.TOKENIZE, vllm.TOKENIZE_TEXT, vllm.TOKENIZE_CHAT),
          response=llama_server.TOKENIZE_RESPONSE),
    Route("POST", "/detokenize", Dialect.LLAMA_SERVER, "detokenize", "tokens.detokenize",
          summary="The text of the tokens, as `content` and as `prompt`.", worker=True,
          requests=(llama_server.DETOKENIZE,), response=llama_server.DETOKENIZE_RESPONSE),
    Route("POST", "/apply-template", Dialect.LLAMA_SERVER, "apply_template", "llama_server.apply_template",
          summary="The prompt of this chat after the chat template.", worker=True,
          requests=(llama_server.TEMPLATE,), response=llama_server.APPLY_TEMPLATE_RESPONSE),
    Route("GET", "/router/state", Dialect.ADMIN, "state", "admin.state",
          summary="Devices, models, workers and the admission queue, in bytes and seconds.", access=AccessLevel.ADMIN,
          response=router.OBJECT_RESPONSE),
    Route("GET", "/router/plan", Dialect.ADMIN, "plan", "admin.plan",
          summary="The plan of a load of the model at this moment, without carrying it out.", access=AccessLevel.ADMIN,
          response=router.OBJECT_RESPONSE, query=("model", "model_name"), errors=(404, 503, 507)),
    Route("GET", "/router/events", Dialect.ADMIN, "events", "admin.events",
          summary="A stream of all events, each with an id.", access=AccessLevel.ADMIN,
          response=router.EVENTS_RESPONSE),
    Route("POST", "/router/reload", Dialect.ADMIN, "reload", "admin.reload",
          summary="Read presets, folders and caches again.", access=AccessLevel.ADMIN,
          response=router.RELOAD_RESPONSE),
    Route("POST", "/router/pin", Dialect.ADMIN, "pin", "admin.pin",
          summary="Pin a model, so that it is never evicted, or unpin it.", access=AccessLevel.ADMIN,
          requests=(router.PIN,), response=router.PIN_RESPONSE, errors=(404,)),
    Route("POST", "/router/forget", Dialect.ADMIN, "forget", "admin.forget",
          summary="Drop what was learned of a model's memory.", access=AccessLevel.ADMIN,
          requests=(router.FORGET,), response=router.FORGET_RESPONSE, errors=(404,)),
    Route("GET", "/router/config", Dialect.ADMIN, "config", "admin.config",
          summary="All settings of a model with their origin.", access=AccessLevel.ADMIN,
          response=router.CONFIG_RESPONSE, query=("model", "model_name"), errors=(404,)),
    Route("GET", "/router/logs", Dialect.ADMIN, "logs", "admin.logs",
          summary="The newest log lines.", access=AccessLevel.ADMIN,
          response=router.LOGS_RESPONSE, query=("model", "level", "lines"), errors=(404,)),
    Route("GET", "/router/logs/sse", Dialect.ADMIN, "logs_sse", "admin.follow_logs",
          summary="A stream of log lines, each with an id, beginning with the newest ones.", access=AccessLevel.ADMIN,
          response=router.LOGS_SSE_RESPONSE, query=("model", "level", "lines"), errors=(404,)),
    Route("GET", "/router/requests", Dialect.ADMIN, "requests", "admin.requests",
          summary="Requests to workers: those that run, and the last 1000 that have ended.", access=AccessLevel.ADMIN,
          response=router.REQUESTS_RESPONSE, query=("model",), errors=(404,)),
    Route("DELETE", "/router/requests/{request}", Dialect.ADMIN, "cancel", "admin.cancel",
          summary="Cancel the running requests with this id.", access=AccessLevel.ADMIN,
          response=router.CANCEL_RESPONSE, errors=(404,)),
    Route("GET", "/", Dialect.ADMIN, "index", "about.index",
          summary="Name and version; the web page for browsers.", access=AccessLevel.PUBLIC,
          response=router.INDEX_RESPONSE),
    Route("GET", "/ui/page.css", Dialect.ADMIN, "style", "about.page_file",
          summary="Style sheet of the web page.", access=AccessLevel.PUBLIC,
          response=router.STYLE_RESPONSE),
    Route("GET", "/ui/page.js", Dialect.ADMIN, "script", "about.page_file",
          summary="Script of the web page.", access=AccessLevel.PUBLIC,
          response=router.SCRIPT_RESPONSE),
    Route("GET", "/openapi.json", Dialect.ADMIN, "openapi", "about.openapi",
          summary="This OpenAPI document.",
          response=router.OBJECT_RESPONSE),
    Route("GET", "/slots", Dialect.LLAMA_SERVER, "slots", "llama_server.slots",
          summary="Slots in the batches of loaded models.",
          response=llama_server.SLOTS_RESPONSE, query=("model", "fail_on_no_slot"), errors=(404, 501, 503)),
    Route("POST", "/v1/streams/lookup", Dialect.LLAMA_SERVER, "streams_lookup", "llama_server.streams",
          summary="Always empty: a stream ends with its connection.",
          response=llama_server.STREAMS_LOOKUP_RESPONSE),
    Route("GET", "/v1/streams", Dialect.LLAMA_SERVER, "streams_lookup", "llama_server.streams",
          summary="Always empty: a stream ends with its connection.",
          response=llama_server.STREAMS_LOOKUP_RESPONSE),
    Route("GET POST", "/tools /cors-proxy", Dialect.LLAMA_SERVER, "disabled", "about.disabled",
          summary="Disabled: this server neither fetches URLs nor runs tools."),
    _not_offered("POST", "/api/push /api/create /api/copy", Dialect.OLLAMA, _PRESETS, access=AccessLevel.ADMIN),
    _not_offered("GET POST", "/api/blobs/{digest}", Dialect.OLLAMA, _PRESETS, access=AccessLevel.ADMIN),
    _not_offered("POST", "/props", Dialect.LLAMA_SERVER, _PRESETS),
    _not_offered("POST", "/v1/chat/completions/control", Dialect.LLAMA_SERVER,
                 "reasoning_effort in the chat, or a closed connection: an answer ends with it"),
    _not_offered("POST", "/v1/systemone", Dialect.LLAMA_SERVER,
                 "POST /v1/chat/completions with json_schema, or POST /v1/score"),
    _not_offered("POST", "/slots/{slot}", Dialect.LLAMA_SERVER,
                 "prefix-caching: common beginnings of prompts are cached automatically"),
    Route("GET", "/lora-adapters", Dialect.LLAMA_SERVER, "lora_adapters", "llama_server.lora_adapters",
          summary="The LoRA adapters of the model with their numbers.",
          response=llama_server.LORA_ADAPTERS_RESPONSE, query=("model",), errors=(404,)),
    _not_offered("POST", "/lora-adapters", Dialect.LLAMA_SERVER,
                 "`lora` in a request: a global scale would change the responses to other clients"),
    _not_offered("POST", "/pooling /classify", Dialect.OPENAI, "POST /v1/embeddings, or POST /v1/rerank"),
    _not_offered("POST", "/v1/load_lora_adapter /v1/unload_lora_adapter", Dialect.OPENAI, "/models/{id}/adapters"),
    _not_offered("GET DELETE", "/v1/chat/completions/{id}", Dialect.OPENAI,
                 "the whole conversation in `messages` of POST /v1/chat/completions: no completion is stored"),
    _not_offered("GET DELETE", "/v1/responses/{id}", Dialect.RESPONSES, _UNSTORED),
    _not_offered("GET", "/v1/responses/{id}/input_items", Dialect.RESPONSES, _UNSTORED),
    _not_offered("POST", "/v1/responses/compact", Dialect.RESPONSES,
                 "POST /v1/responses with a shorter `input`: this server compacts no conversation"),
    _not_offered("POST", "/v1/responses/{id}/cancel", Dialect.RESPONSES,
                 "a closed connection: a response ends with it"),
    _not_offered("POST", "/v1/conversations", Dialect.RESPONSES, _UNSTORED),
    _not_offered("GET", "/v1/realtime", Dialect.OPENAI,
                 "POST /v1/responses with `stream`: this server has no WebSockets"),
    _not_offered("GET", "/tokenizer_info", Dialect.OPENAI, "GET /props?model=, or POST /tokenize"),
    _not_offered("POST", "/v1/audio/transcriptions /v1/audio/speech /v1/images/generations /v1/moderations",
                 Dialect.LLAMA_SERVER, "another server"),
)
# fmt: on


def _routes(declared: Route) -> Iterator[Route]:
    """Yield one route for each method and path of a declaration. If a path contains the name of the model, the worker
    receives the request at the first path of the declaration."""
    paths = declared.path.split()
    for path in paths:
        upstream = paths[0] if declared.worker and "{" in path else ""
        for method in declared.method.split():
            yield replace(declared, method=method, path=path, upstream=upstream)


ROUTES: tuple[Route, ...] = tuple(route for declared in _DECLARATIONS for route in _routes(declared))


def offered(*, lmi_management: bool = False) -> tuple[Route, ...]:
    """Return the routes that a router offers. `lmi_management`: those below /lmi also exist without this prefix, and
    replace routes of llama-server's API with the same method and path."""
    if not lmi_management:
        return ROUTES
    own = {
        (route.method, path): replace(route, path=path)
        for route in ROUTES
        if (path := route.path.removeprefix("/lmi")) != route.path
    }
    return (*(route for route in ROUTES if (route.method, route.path) not in own), *own.values())


# Query parameters with the values true, 1, false and 0.
FLAGS = ("autoload", "wait", "force", "snapshot", "fail_on_no_slot", "synchronous", "preload", "pin")


def query(route: Route) -> tuple[str, ...]:
    """Return the query parameters of `route`; others are ignored."""
    return ("model", "model_name", "autoload", *route.query) if route.worker else route.query


def body_schema(route: Route) -> Mapping[str, Any] | None:
    """Return the JSON Schema of the request body of `route`; None if it reads no body."""
    if not route.requests:
        return None
    further = {**NEUTRAL, **NO_OPS} if route.worker else {}
    every = [described({**further, **body}) for body in route.requests]
    return every[0] if len(every) == 1 else {"anyOf": every}


# Dialect by path, for errors about a wrong method.
DIALECTS: Mapping[str, Dialect] = {route.path: route.dialect for route in ROUTES}
_PREFIXES = (
    ("/api/", Dialect.OLLAMA),
    ("/v1/messages/", Dialect.ANTHROPIC),
    ("/lmi/", Dialect.LMI),
    ("/predictions/", Dialect.LMI),
)


def dialect_of(path: str) -> Dialect:
    """Return the dialect for errors about `path`, which may be unknown."""
    return DIALECTS.get(path) or next(
        (dialect for prefix, dialect in _PREFIXES if path.startswith(prefix)), Dialect.OPENAI
    )


def error_response(path: str, body: bytes) -> tuple[str, bytes]:
    """Return the content type and the body of an error response: a frame if clients of `path` read only frames."""
    if path in _FRAMES_ONLY:
        return stream(Dialect.FASTCHAT).headers["Content-Type"], body + b"\0"
    return "application/json", body


_FRAMES_ONLY = frozenset(route.path for route in ROUTES if route.always_streams)


def unknown_fields(route: Route, body: Mapping[str, Any]) -> list[str]:
    """Return the fields of `body` that are not in the only table of `route`: names, and paths of inner fields."""
    (table,) = route.requests
    beside = [name for name, value in body.items() if value is not None and name not in table]
    return [*beside, *unknown_paths(table, body)]


# Headers between client, router and worker, and paths between router and worker only.

TOKEN_HEADER = "Authorization"  # `Bearer <token of this worker>`; the client's credentials never reach a worker
REQUEST_ID_HEADER = "X-Request-Id"
# The name of the model in the request, percent-encoded, if its body has none. Responses repeat it.
MODEL_HEADER = "X-Router-Asked"
# The adapter that a request names outside its body, percent-encoded: after the model's name, in the query, or in the
# header of LMI's clients.
ADAPTER_HEADER = "X-Router-Adapter"
# The profile of the request, percent-encoded. The worker has received it before, by PROFILES_PATH.
PROFILE_HEADER = "X-Router-Profile"
# Seconds that an Ollama request waited for the load of its model. They are part of the response.
WAITED_HEADER = "X-Router-Waited"
PROFILES_PATH = "/internal/profiles"  # PUT a `Profile`: the request defaults of its name from now on
# PUT `{adapters: [AdapterSource], default}`: the adapters that requests may name from now on. The response is
# `{problems: {name: why}}` with the unusable ones.
ADAPTERS_PATH = "/internal/adapters"
IGNORED_FIELDS_HEADER = "X-Ignored-Fields"
MAX_IGNORED_FIELDS = 32  # names in that header


def ignored_fields(names: Iterable[str]) -> dict[str, str]:
    """Return the header that lists ignored fields, percent-encoded and without duplicates; empty for no fields."""
    fields = list(dict.fromkeys(names))  # two readers of one body may report the same field
    listed = [quote(name[:64], safe="[]") for name in fields[:MAX_IGNORED_FIELDS]]
    if not fields:
        return {}
    return {IGNORED_FIELDS_HEADER: ",".join(listed + ["..."] * (len(fields) > MAX_IGNORED_FIELDS))}


# Request headers that the router forwards. It drops all others.
REQUEST_HEADERS = (
    "Content-Type", "Accept", "X-Request-Id", "traceparent", "tracestate", "User-Agent", "anthropic-version",
    "anthropic-beta",
)  # fmt: skip
# Response headers that the router forwards.
RESPONSE_HEADERS = (
    "Content-Type", "Content-Length", "Cache-Control", "X-Accel-Buffering", "X-Ignored-Fields", "X-Should-Retry",
    "Retry-After",
)  # fmt: skip
