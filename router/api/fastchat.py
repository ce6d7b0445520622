"""What FastChat's API says without tokens: who is here, how long contexts are, and whether prompts fit."""

from typing import Any

import orjson

from router.api.call import ApiCall, Result
from router.config.settings import Key
from router.errors import BadRequest, WorkerCrashed
from router.launch.worker_client import WireError
from router.registry.registry import Site
from router.registry.shared_workers import speaking_of
from worker.protocol.headers import TOKEN_HEADER

MOST_PROMPTS = 256
"""In one question whether they fit."""


async def status(call: ApiCall) -> Result:
    """As a worker of all models would report itself to a controller; loads nothing."""
    every = call.site.visible(call.key)
    names = [name for listed in every for name in (listed.id, *listed.preset.aliases)]
    models = {id(listed.model): listed.model for listed in every}  # each once, however many share it
    return {"model_names": names, "speed": 1, "queue_length": sum(model.leases for model in models.values())}


async def details(call: ApiCall) -> Result:
    """Tokens that a model's context has; of one that is not loaded, as its files say."""
    body = await call.body()
    return {"context_length": await _context(call.site, _choose(call.site, call.key, body.get("model")))}


async def token_check(call: ApiCall) -> Result:
    """Whether each prompt and its answer fit into their model's context; loads nothing."""
    asked = (await call.body()).get("prompts")
    if not isinstance(asked, list) or not all(isinstance(each, dict) for each in asked):
        raise BadRequest("prompts must be an array of objects", param="prompts")
    if len(asked) > MOST_PROMPTS:
        raise BadRequest(f"prompts must have at most {MOST_PROMPTS} entries", param="prompts")
    site, key = call.site, call.key
    return {"prompts": [await _check(site, key, each, f"prompts[{index}]") for index, each in enumerate(asked)]}


async def _check(site: Site, key: Key, asked: dict[str, Any], where: str) -> dict[str, Any]:
    prompt, more = asked.get("prompt"), asked.get("max_tokens")
    more = 0 if more is None else more
    if not isinstance(prompt, str):
        raise BadRequest(f"{where}.prompt must be a string", param=f"{where}.prompt")
    if type(more) is not int or more < 0:
        raise BadRequest(f"{where}.max_tokens must be an integer of at least 0", param=f"{where}.max_tokens")
    id = _choose(site, key, asked.get("model"))
    count = await _count(site, id, prompt)
    context = await _context(site, id)
    return {"fits": count + more <= context, "tokenCount": count, "contextLength": context}


def _choose(site: Site, key: Key, name: object) -> str:
    if name is not None and not isinstance(name, str):
        raise BadRequest("model must be a string", param="model")
    id, _ = site.choose(key, path=None, body=name, query={})
    return id


async def _context(site: Site, id: str) -> int:
    listed = site.members.find(id)
    worker = listed.model.open
    if worker is not None and worker.process is not None and worker.process.ready.n_ctx:
        return worker.process.ready.n_ctx
    _, told, _ = await site.describe(listed.preset)
    return int(told.get("n_ctx", 0))


async def _count(site: Site, id: str, prompt: str) -> int:
    """Tokens of `prompt`, as the model's own worker counts them. Raises ApiError."""
    members = site.members
    with speaking_of(members.find(id)), members.lease(id) as lease:
        process = await lease.ready()
        headers = {TOKEN_HEADER: f"Bearer {process.token}", "Content-Type": "application/json"}
        exchange = process.wire.begin("POST", "/count_token", headers, orjson.dumps({"prompt": prompt}))
        lease.on_abort = exchange.close
        try:
            await exchange.head()
            parts = []
            while part := await exchange.read():
                parts.append(part)
            told = orjson.loads(b"".join(parts))
        except (WireError, orjson.JSONDecodeError):
            raise lease.aborted or WorkerCrashed(f"{id}: its worker was lost while it counted; ask again") from None
        finally:
            lease.on_abort = None
            exchange.close()
    if exchange.status != 200:
        raise BadRequest(str(told.get("text", "the prompt cannot be counted")), param="prompts")
    return int(told["count"])


__all__ = ["details", "status", "token_check"]
