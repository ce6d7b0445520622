"""FastChat's API: worker status, context lengths, and token checks of prompts."""

from typing import Any

import orjson

from router.api.call import ApiCall, ApiResult
from router.config.settings import ApiKey
from router.errors import BadRequest, WorkerCrashed
from router.launch.worker_client import WorkerClientError
from router.registry.registry import Registry
from router.registry.shared_workers import errors_with_name
from worker.protocol.routes import TOKEN_HEADER

MAX_PROMPTS = 256  # of one token check; a guess


async def status(call: ApiCall) -> ApiResult:
    """The report of a FastChat worker to its controller, as if one worker served all models. Loads nothing."""
    visible = call.registry.visible(call.key)
    names = [name for listed in visible for name in (listed.id, *listed.preset.aliases)]
    models = {id(listed.model): listed.model for listed in visible}  # shared workers count once
    return {"model_names": names, "speed": 1, "queue_length": sum(model.leases for model in models.values())}


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
    if type(more) is not int or more < 0:
        raise BadRequest(f"{where}.max_tokens must be an integer of at least 0", param=f"{where}.max_tokens")
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
    _, meta, _ = await registry.snapshots.describe(listed.preset)
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
            await exchange.head()
            parts = []
            while part := await exchange.read():
                parts.append(part)
            reply = orjson.loads(b"".join(parts))
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
