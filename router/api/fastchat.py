"""FastChat's API: the calls of its controller, worker status, context lengths, and token checks of prompts.

FastChat's API server asks a controller for the address of a worker. Here the router is both: the address is its own.
"""

from collections.abc import Iterable
from typing import Any

import orjson

from router.api.call import ApiCall, ApiResult, JsonReply
from router.config.api_keys import ApiKey
from router.errors import BadRequest, ModelNotFound, WorkerCrashed
from router.launch.worker_client import WorkerClientError
from router.memory.checkpoint import offered
from router.registry.registry import Registry
from router.registry.shared_workers import ListedModel, errors_with_name
from worker.protocol.dialects.generation_fields import MAX_INT32
from worker.protocol.routes import TOKEN_HEADER

MAX_PROMPTS = 256  # of one token check; a guess


async def status(call: ApiCall) -> ApiResult:
    """The report of a FastChat worker to its controller, as if one worker served all models. Loads nothing."""
    visible = call.registry.visible(call.key)
    names = _names(visible)
    models = {id(listed.model): listed.model for listed in visible}  # shared workers count once
    return {"model_names": names, "speed": 1, "queue_length": sum(model.leases for model in models.values())}


async def list_models(call: ApiCall) -> ApiResult:
    """POST /list_models, and those of models that take images and of those that do not. Loads nothing."""
    visible = call.registry.visible(call.key)
    if call.route.path != "/list_models":
        images = call.route.path == "/list_multimodal_models"
        visible = [listed for listed in visible if await _takes_images(call.registry, listed) is images]
    return {"models": _names(visible)}


async def worker_address(call: ApiCall) -> ApiResult:
    """POST /get_worker_address: the address of this request; empty for an unknown model, as in FastChat."""
    try:
        _choose(call.registry, call.key, (await call.body()).get("model"))
    except ModelNotFound:
        return {"address": ""}
    request = call.request
    scheme = "https" if request.headers.get("X-Forwarded-Proto", "").casefold() == "https" else request.scheme
    return {"address": f"{scheme}://{request.host}{call.registry.settings.api_prefix}"}


async def refresh(call: ApiCall) -> ApiResult:
    """POST /refresh_all_workers."""
    return JsonReply(None)


async def test_connection(call: ApiCall) -> ApiResult:
    """GET /test_connection."""
    return JsonReply("success")


def _names(models: Iterable[ListedModel]) -> list[str]:
    return [name for listed in models for name in (listed.id, *listed.preset.aliases)]


async def _takes_images(registry: Registry, listed: ListedModel) -> bool:
    facts = await registry.snapshots.facts(listed.preset)
    return facts is not None and "vision" in offered(facts, listed.preset)


async def details(call: ApiCall) -> ApiResult:
    """The context length of a model in tokens; computed from its files if it is not loaded."""
    body = await call.body()
    return {"context_length": await _context(call.registry, _choose(call.registry, call.key, body.get("model")))}


async def token_check(call: ApiCall) -> ApiResult:
    """Check for each prompt whether it and its answer fit into the model's context."""
    prompts = (await call.body()).get("prompts")
    if not isinstance(prompts, list) or not all(isinstance(item, dict) for item in prompts):
        raise BadRequest("prompts must be an array of objects", param="prompts")
    if len(prompts) > MAX_PROMPTS:
        raise BadRequest(f"prompts must have at most {MAX_PROMPTS} entries", param="prompts")
    registry, key = call.registry, call.key
    return {"prompts": [await _check(registry, key, item, f"prompts[{index}]") for index, item in enumerate(prompts)]}


async def _check(registry: Registry, key: ApiKey, item: dict[str, Any], where: str) -> dict[str, Any]:
    prompt, more = item.get("prompt"), item.get("max_tokens")
    more = 0 if more is None else more
    if not isinstance(prompt, str):
        raise BadRequest(f"{where}.prompt must be a string", param=f"{where}.prompt")
    if type(more) is not int or not 0 <= more <= MAX_INT32:
        raise BadRequest(f"{where}.max_tokens must be an integer from 0 to {MAX_INT32}", param=f"{where}.max_tokens")
    id = _choose(registry, key, item.get("model"))
    count = await _count(registry, id, prompt)
    context = await _context(registry, id)
    return {"fits": count + more <= context, "tokenCount": count, "contextLength": context}


def _choose(registry: Registry, key: ApiKey, name: object) -> str:
    if name is not None and not isinstance(name, str):
        raise BadRequest("model must be a string", param="model")
    id, _ = registry.choose(key, path=None, body=name, query={})
    return id


async def _context(registry: Registry, id: str) -> int:
    listed = registry.shared_workers.find(id)
    worker = listed.model.open
    if worker is not None and worker.process is not None and worker.process.ready.n_ctx:
        return worker.process.ready.n_ctx
    _, meta = await registry.snapshots.describe(listed.preset)
    return int(meta.get("n_ctx", 0))


async def _count(registry: Registry, id: str, prompt: str) -> int:
    """The number of tokens of `prompt`, counted by a worker of the model. Raises ApiError."""
    shared_workers = registry.shared_workers
    with errors_with_name(shared_workers.find(id)), shared_workers.lease(id) as lease:
        process = await lease.ready()
        headers = {TOKEN_HEADER: f"Bearer {process.token}", "Content-Type": "application/json"}
        exchange = process.worker_client.begin("POST", "/count_token", headers, orjson.dumps({"prompt": prompt}))
        lease.on_abort = exchange.close
        try:
            reply = orjson.loads(await exchange.whole())
        except (WorkerClientError, orjson.JSONDecodeError):
            raise lease.aborted or WorkerCrashed(
                f"{id}: its worker failed while counting tokens; repeat the request"
            ) from None
        finally:
            lease.on_abort = None
            exchange.close()
    if exchange.status != 200:
        raise BadRequest(str(reply.get("text", "the prompt cannot be counted")), param="prompts")
    return int(reply["count"])
