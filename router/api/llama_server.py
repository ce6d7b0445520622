"""What llama-server's router mode says of models, without tokens: lists, loads, health, properties."""

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from router.api import anthropic
from router.api.call import ApiCall, Reply, Result
from router.api.status import MIB, capabilities, status_of, value_of
from router.config.presets import Preset
from router.config.settings import Key
from router.errors import BadRequest, Forbidden, ModelNotLoaded, NotOffered, SlotsBusy, Starting
from router.fleet.worker import State, Worker
from router.memory.checkpoint import modalities
from router.registry.pulls import users
from router.registry.registry import BUILD, Site, Words, flag
from router.registry.shared_workers import Listed, speaking_of
from router.registry.sharing import names_in
from worker.protocol.dialects import Dialect
from worker.protocol.errors import error_body

OWN_WORDS = {"temp": "temperature", "repetition_penalty": "repeat_penalty"}
"""llama-server's, for what presets and checkpoints call otherwise."""
NEUTRAL = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "repeat_last_n": -1,
    "presence_penalty": 0.0, "frequency_penalty": 0.0,
}  # fmt: skip
"""How a request is sampled where nobody says anything: as the worker's `Sampling`, in llama-server's words."""


async def entry(site: Site, key: Key, listed: Listed) -> dict[str, Any]:
    """One model as lists show it."""
    preset = listed.preset
    facts, meta, _ = await site.describe(preset)
    able = capabilities(listed, facts)
    return {
        "id": preset.id,
        "aliases": list(preset.aliases),
        "tags": list(preset.tags),
        "object": "model",
        "owned_by": "llamacpp",
        "created": listed.created,
        "status": status_of(site, key, listed),
        "architecture": modalities(able),
        "source": preset.source,
        "can_remove": preset.source == "cache" and not await users(site, preset),
        "capabilities": able,
        "meta": meta,
        **({"max_model_len": meta["n_ctx"]} if meta.get("n_ctx") else {}),  # where vLLM's and SGLang's clients look
    }


def _adapted(shown: dict[str, Any], adapter: str) -> dict[str, Any]:
    """A model with one of its adapters, as lists show it."""
    id = shown["id"]
    return {**shown, "id": f"{id}@{adapter}", "aliases": [], "can_remove": False, "parent": id}


async def models(call: ApiCall) -> Result:
    """GET /models, and GET /v1/models, where adapters are entries of their own. `reload=` first reads presets, folders
    and caches again; the route table says that it needs an admin key."""
    site, key, query = call.site, call.key, call.query
    has_adapters = call.route.dialect is Dialect.OPENAI
    extra: dict[str, Any] = {}
    if query.get("reload"):
        extra["reload"] = await site.reload()
    data = []
    for listed in site.visible(key):
        shown = await entry(site, key, listed)
        data.append(shown)
        data += [_adapted(shown, each.name) for each in listed.preset.adapters if has_adapters]
    found = {"object": "list", "data": data, **extra}
    return anthropic.listed(found) if anthropic.VERSION in call.request.headers else found


async def model(call: ApiCall) -> Result:
    """GET /models/{id}. Raises ModelNotFound."""
    site, name = call.site, call.path["id"]
    shown = await entry(site, call.key, site.model(call.key, name))
    adapter = site.names.adapter(name)
    found = _adapted(shown, adapter) if adapter else shown
    return anthropic.described(found) if anthropic.VERSION in call.request.headers else found


async def lora_adapters(call: ApiCall) -> Result:
    """GET /lora-adapters: of the model by name, or of the only one. Raises ModelNotFound."""
    site, key, name = call.site, call.key, call.query.get("model")
    seen = [site.model(key, name)] if name else site.visible(key)
    if len(seen) != 1:
        return []
    admin = site.access.is_admin(key)
    return [
        {"id": number, "path": each.path if admin else each.name, "scale": each.scale}
        for number, each in enumerate(seen[0].preset.adapters)
    ]


def _named(body: Mapping[str, Any]) -> str:
    if "extra_args" in body:
        raise BadRequest("extra_args is not supported: put the settings into the model's preset", param="extra_args")
    name = body.get("model")
    if not isinstance(name, str) or not name:
        raise BadRequest("model name is missing from the request", reason="model_missing", param="model")
    return name


async def fetch(call: ApiCall) -> Result:
    """POST /models: 200 once the hub has said that there is such a model; its files come meanwhile."""
    await call.hub.fetch(_named(await call.body()))
    return {"success": True}


async def delete(call: ApiCall) -> Result:
    """DELETE /models?model=: 200 once its files are gone."""
    name = call.query.get("model")
    if not name:
        raise BadRequest("model name is missing from the query", reason="model_missing", param="model")
    await call.hub.delete(call.key, name)
    return {"success": True}


async def load(call: ApiCall) -> Result:
    """POST /models/load: 200 once queued; with `wait` once ready, or the load's error."""
    site, key = call.site, call.key
    chosen = site.model(key, _named(await call.body()))
    wait = flag(call.query, "wait")
    if not wait:
        await site.members.load_queued(chosen.id)
        return {"success": True}
    began, mark = site.fleet.now(), site.events.last_id
    await site.members.wanted(chosen.id)
    evicted = [
        {"model": name, "reason": "evicted"}
        for event in site.events.since(mark) or ()
        if event.kind == "plan" and event.data.get("decision") == "evict"
        and event.data.get("for") == chosen.model.preset.id
        for name in names_in(event.model)
    ]  # fmt: skip
    load_ms = round((site.fleet.now() - began) * 1000, 1)
    return {"success": True, "status": status_of(site, key, chosen), "evicted": evicted, "load_ms": load_ms}


async def unload(call: ApiCall) -> Result:
    """POST /models/unload: 200 at once; with `wait` once the memory is back; with `force` without a drain."""
    chosen = call.site.model(call.key, _named(await call.body()))
    wait, force = flag(call.query, "wait"), flag(call.query, "force")
    workers = call.site.members.unload(chosen.id, force=bool(force))
    if wait:
        for worker in workers:
            await worker.stopped.wait()
    return {"success": True}


async def health(call: ApiCall) -> Result:
    """GET /health: of the router, or with `model=` of one model, which it never loads."""
    name = call.query.get("model")
    if not name:
        return {"status": "ok"}
    chosen = call.site.model(call.key, name)
    value, worker = value_of(chosen.model), chosen.model.open
    ok = worker is not None and worker.state is State.READY
    body: dict[str, Any] = {"status": "ok" if ok else value, "model": chosen.id}
    if not ok and worker is not None:
        body |= _starting("Loading model")  # in these words llama-server's clients wait for it
    return body if ok else _not_ready(body)


def _starting(message: str) -> dict[str, Any]:
    error = Starting(message)
    return error_body(Dialect.OPENAI, status=error.status, type=error.type, reason=error.reason, message=message)


def _not_ready(body: dict[str, Any]) -> Reply:
    return Reply(body, status=503, headers={"X-Should-Retry": "true", "Retry-After": "1"})


async def ready(call: ApiCall) -> Result:
    """GET /ready: 200 once presets are parsed and the models of `load-on-startup` are up."""
    site = call.site
    if site.closing:
        return _not_ready({"status": "draining", "message": "the router is shutting down"})
    if site.awaited:
        names = sorted(site.awaited)
        starting = _starting(f"Loading model {', '.join(names)}")
        return _not_ready({"status": "starting", "waiting_for": names} | starting)
    return {"status": "ok"}


async def metrics(call: ApiCall) -> Result:
    """GET /metrics. Raises ModelNotFound, and Forbidden for a key that may see only some models and names none."""
    name = call.query.get("model")
    if not name and call.key.models:
        raise Forbidden("this key may see some models only; name one with ?model=")
    about: tuple[str, ...] = ()
    if name:
        listed = call.site.model(call.key, name)
        about = listed.id, listed.model.preset.id
    return web.Response(
        body=call.services.metrics.render(*about), headers={"Content-Type": call.services.metrics.content_type}
    )


async def streams(call: ApiCall) -> Result:
    """GET /v1/streams: always empty, because no stream outlives its connection."""
    return []


async def slots(call: ApiCall) -> Result:
    """GET /slots: places in the batches of loaded models, as of each worker's last pulse (a second ago at most).

    It never loads. Raises ModelNotLoaded for one model by name, SlotsBusy with `fail_on_no_slot`, NotOffered.
    """
    site, key, query = call.site, call.key, call.query
    name = query.get("model")
    chosen = [site.model(key, name)] if name else _once(site.visible(key))
    if not site.settings.slots:
        raise NotOffered("the places in batches are not told: the router was started with --no-slots")
    loaded = [
        (listed, worker, number)
        for listed in chosen
        for number, worker in enumerate(each for each in listed.model.all_open if each.state is State.READY)
    ]
    if name and not loaded:
        raise ModelNotLoaded(f"model '{chosen[0].id}' is not loaded; load it with POST /models/load")
    found: list[dict[str, Any]] = []
    for listed, worker, number in loaded:
        _, meta, _ = await site.describe(listed.preset)
        about = {"model": listed.id, "n_ctx": meta.get("n_ctx", 0)}
        found += [{**about, **slot} for slot in _slots(worker, number * worker.preset.parallel)]
    if flag(query, "fail_on_no_slot") and all(slot["is_processing"] for slot in found):
        raise SlotsBusy("no slot is free; requests wait for one by themselves", retry_after=1)
    return found


def _once(every: Sequence[Listed]) -> list[Listed]:
    """The first of those that share a worker, and all others."""
    return list({id(listed.model): listed for listed in reversed(every)}.values())[::-1]


def _slots(worker: Worker, first: int) -> list[dict[str, Any]]:
    """The places of one batch: whose task is where and how far it is; where the engine does not say (vectors have no
    place of their own), as many as run are taken. `first`: the number of the first one among its model's."""
    said = worker.pulse
    known = {place: rest for place, *rest in said.slots} if said is not None else {}
    running = said.running if said is not None and not known else 0
    slots: list[dict[str, Any]] = []
    for at in range(worker.preset.parallel):
        task, prompt_left, decoded, remain = known.get(at, (-1, 0, 0, 0))
        slots.append(
            {
                "id": first + at,
                "id_task": task,
                "is_processing": at in known or at < running,
                "n_prompt_tokens_left": prompt_left,
                "next_token": {"n_decoded": decoded, "n_remain": remain},
            }
        )
    return slots


async def props(call: ApiCall) -> Result:
    """GET /props: of the router, or of one model from its files, whether or not it is loaded."""
    site, key, query = call.site, call.key, call.query
    settings = site.settings
    if not query.get("model"):
        return {
            "role": "router",
            "max_instances": site.fleet.limits.models_max,
            "models_autoload": settings.models_autoload,
            "model_alias": "llama-server",
            "model_path": "none",
            "default_generation_settings": {"params": {}, "n_ctx": 0},
            "ui_settings": {},
            "build_info": BUILD,
            "cors_proxy_enabled": False,
            "memory_margin_mib": settings.models_memory_margin.get("", 0) // MIB,
        }
    chosen = site.model(key, query["model"])
    preset = chosen.preset
    if flag(query, "autoload"):
        with speaking_of(chosen), site.members.lease(preset.id, autoload=True) as lease:
            await lease.ready()
    facts, meta, _ = await site.describe(preset)
    words = await site.words(preset)
    if facts is None:
        raise NotOffered(f"the files of {preset.id} are not here yet; load it once, and ask again")
    worker, able = chosen.model.shown, capabilities(chosen, facts)
    return {
        "default_generation_settings": {"n_ctx": meta.get("n_ctx", 0), "params": params(preset, words)},
        "total_slots": preset.parallel,
        "model_alias": preset.id,
        "model_path": (preset.path or preset.repo or f"demo:{preset.demo}") if site.access.is_admin(key) else preset.id,
        "modalities": {"vision": "vision" in able, "audio": False, "video": False},
        "chat_template": preset.chat_template or words.chat_template,
        "chat_template_caps": template_caps(preset.chat_template or words.chat_template),
        "bos_token": words.bos_token,
        "eos_token": words.eos_token,
        "capabilities": able,
        "build_info": BUILD,
        "is_sleeping": chosen.model.sleeps,
        "is_loaded": worker is not None and worker.state is State.READY,
    }


def params(preset: Preset, words: Words) -> dict[str, Any]:
    """How a request that says nothing is sampled: by its preset, else by the model's files, else neutrally."""
    found: dict[str, Any] = dict(NEUTRAL)
    said = words.generation
    if said.get("do_sample") is False:  # greedy, and its other knobs rest
        said = {"temperature": 0.0, "repetition_penalty": said.get("repetition_penalty")}
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        value = said.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[OWN_WORDS.get(name, name)] = value
    found |= {OWN_WORDS.get(key, key.replace("-", "_")): value for key, value in preset.sampling.items()}
    return {**found, "n_predict": preset.n_predict, "max_tokens": preset.n_predict, "seed": preset.seed}


def template_caps(template: str) -> dict[str, bool]:
    """What a chat template has words for."""
    return {
        "supports_system_role": "system" in template,
        "supports_tools": "tools" in template,
        "supports_tool_calls": "tool_calls" in template,
        "supports_preserve_reasoning": "reasoning_content" in template,
    }


__all__ = [
    "delete",
    "entry",
    "fetch",
    "health",
    "load",
    "lora_adapters",
    "metrics",
    "model",
    "models",
    "props",
    "ready",
    "slots",
    "streams",
    "unload",
]
