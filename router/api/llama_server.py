"""The API of llama-server's router mode: lists of models, loads, health, metrics, slots and properties.

Lists of models also have the members of Anthropic's API, for clients that send its version header.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from router.api.call import ApiCall, ApiResult, JsonReply, flag, model_name
from router.api.status import capabilities, status_of, value_of
from router.config.api_keys import ApiKey
from router.config.presets import Preset
from router.errors import BadRequest, Forbidden, ModelNotLoaded, NotOffered, SlotsBusy, Starting
from router.fleet.worker import State, Worker
from router.memory.checkpoint import modalities
from router.memory.checkpoint_facts import rows
from router.registry.pulls import presets_using_files
from router.registry.registry import BUILD, Registry
from router.registry.shared_workers import ListedModel, errors_with_name
from router.registry.snapshot_info import SnapshotTexts
from router.registry.worker_groups import preset_ids
from worker.protocol.dialects import Dialect
from worker.protocol.errors import error_body
from worker.protocol.memory import MIB

_ANTHROPIC_VERSION = "anthropic-version"  # a request header of all Anthropic clients
# llama-server's names of sampling options that have another name in presets or checkpoints.
SAMPLING_NAMES = {"temp": "temperature", "repetition_penalty": "repeat_penalty"}
# The sampling options of a request if neither it, its preset nor the model sets them: the defaults of the worker's
# `SamplingParams`, by llama-server's names.
NEUTRAL = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "repeat_last_n": -1,
    "presence_penalty": 0.0, "frequency_penalty": 0.0,
}  # fmt: skip


async def entry(registry: Registry, key: ApiKey, listed: ListedModel) -> dict[str, Any]:
    """A model's entry in the list of models."""
    preset = listed.preset
    facts, meta = await registry.snapshots.describe(preset)
    features = capabilities(listed, facts)
    return {
        "id": preset.id,
        "aliases": list(preset.aliases),
        "tags": list(preset.tags),
        "object": "model",
        "owned_by": "llamacpp",
        "created": listed.created,
        "status": status_of(registry, key, listed),
        "architecture": modalities(features),
        "source": preset.source,
        "can_remove": preset.source == "cache" and not await presets_using_files(registry, preset),
        "capabilities": features,
        "meta": meta,
        **({"max_model_len": meta["n_ctx"]} if meta.get("n_ctx") else {}),  # read by clients of vLLM and SGLang
    }


def _adapter_entry(shown: dict[str, Any], adapter: str) -> dict[str, Any]:
    id = shown["id"]
    return {**shown, "id": f"{id}@{adapter}", "aliases": [], "can_remove": False, "parent": id}


async def models(call: ApiCall) -> ApiResult:
    """GET /models and GET /v1/models. The latter has an entry for each LoRA adapter as well.

    `reload=` reads presets, folders and caches first. The route table restricts it to admin keys.
    """
    registry, key, query = call.registry, call.key, call.query
    has_adapters = call.route.dialect is Dialect.OPENAI
    extra: dict[str, Any] = {}
    if query.get("reload"):
        extra["reload"] = await registry.reload()
    data: list[dict[str, Any]] = []
    for listed in registry.visible(key):
        shown = await entry(registry, key, listed)
        data.append(shown)
        data += [_adapter_entry(shown, adapter.name) for adapter in listed.preset.adapters if has_adapters]
    if _ANTHROPIC_VERSION in call.request.headers:
        data = [_with_anthropic_members(shown) for shown in data]
        ids = [shown["id"] for shown in data] or [None]
        extra |= {"has_more": False, "first_id": ids[0], "last_id": ids[-1]}  # one page contains all models
    return {"object": "list", "data": data, **extra}


async def model(call: ApiCall) -> ApiResult:
    """GET /models/{id}. Raises ModelNotFound."""
    registry, name = call.registry, call.path["id"]
    shown = await entry(registry, call.key, registry.model(call.key, name))
    adapter = registry.names.adapter(name)
    found = _adapter_entry(shown, adapter) if adapter else shown
    return _with_anthropic_members(found) if _ANTHROPIC_VERSION in call.request.headers else found


def _with_anthropic_members(shown: Mapping[str, Any]) -> dict[str, Any]:
    """The entry with the members that clients of Anthropic's API show, and without capabilities: there they are an
    object with an answer for every feature of Anthropic's models."""
    created = datetime.fromtimestamp(shown["created"], UTC).isoformat().replace("+00:00", "Z")
    named = {"type": "model", "display_name": shown["id"], "created_at": created, "lifecycle": "active"}
    return {**shown, **named, "capabilities": None}


async def lora_adapters(call: ApiCall) -> ApiResult:
    """GET /lora-adapters: the adapters of a model. Raises ModelNotFound.

    Without `model=`, those of the only visible model; an empty list if there are several, as llama-server's clients
    expect a list.
    """
    registry, key, name = call.registry, call.key, call.query.get("model")
    models = [registry.model(key, name)] if name else registry.visible(key)
    if len(models) != 1:
        return []
    admin = registry.access.is_admin(key)
    return [
        {"id": number, "path": adapter.path if admin else adapter.name, "scale": adapter.scale}
        for number, adapter in enumerate(models[0].preset.adapters)
    ]


def _model_name(body: Mapping[str, Any]) -> str:
    if "extra_args" in body:
        raise BadRequest("extra_args is not supported; write the settings into the model's preset", param="extra_args")
    return model_name(body)


async def fetch(call: ApiCall) -> ApiResult:
    """POST /models: download a model. Responds when the hub has listed its files; the download goes on."""
    await call.hub.fetch(_model_name(await call.body()))
    return {"success": True}


async def delete(call: ApiCall) -> ApiResult:
    """DELETE /models?model=: delete a downloaded model. Responds when its files are deleted."""
    await call.hub.delete(call.key, model_name(call.query, "query"))
    return {"success": True}


async def load(call: ApiCall) -> ApiResult:
    """POST /models/load: load a model. Responds when it is queued; with `wait`, when it is ready or has failed."""
    registry, key = call.registry, call.key
    chosen = registry.model(key, _model_name(await call.body()))
    wait = flag(call.query, "wait")
    if not wait:
        await registry.shared_workers.load_queued(chosen.id)
        return {"success": True}
    began, mark = registry.fleet.now(), registry.events.last_id
    await registry.shared_workers.load(chosen.id)
    evicted = [
        {"model": name, "reason": "evicted"}
        for event in registry.events.since(mark) or ()
        if event.kind == "plan" and event.data.get("decision") == "evict"
        and event.data.get("for") == chosen.model.preset.id
        for name in preset_ids(event.model)
    ]  # fmt: skip
    load_ms = round((registry.fleet.now() - began) * 1000, 1)
    return {"success": True, "status": status_of(registry, key, chosen), "evicted": evicted, "load_ms": load_ms}


async def unload(call: ApiCall) -> ApiResult:
    """POST /models/unload: unload a model. Responds at once; with `wait`, when the memory is free again.

    `force` stops the worker without waiting for running requests.
    """
    chosen = call.registry.model(call.key, _model_name(await call.body()))
    wait, force = flag(call.query, "wait"), flag(call.query, "force")
    workers = call.registry.shared_workers.unload(chosen.id, force=bool(force))
    if wait:
        for worker in workers:
            await worker.stopped.wait()
    return {"success": True}


async def health(call: ApiCall) -> ApiResult:
    """GET /health: the health of the router, or of one model with `model=`. Never loads it."""
    name = call.query.get("model")
    if not name:
        return {"status": "ok"}
    chosen = call.registry.model(call.key, name)
    value, worker = value_of(chosen.model), chosen.model.open
    ok = worker is not None and worker.state is State.READY
    body: dict[str, Any] = {"status": "ok" if ok else value, "model": chosen.id}
    if not ok and worker is not None:
        body |= _starting("Loading model")  # clients of llama-server look for this message and wait
    return body if ok else _not_ready(body)


def _starting(message: str) -> dict[str, Any]:
    return error_body(Dialect.OPENAI, Starting(message))


def _not_ready(body: dict[str, Any]) -> JsonReply:
    return JsonReply(body, status=503, headers={"X-Should-Retry": "true", "Retry-After": "1"})


async def ready(call: ApiCall) -> ApiResult:
    """GET /ready: 200 when the models of `load-on-startup` are ready, 503 before and during shutdown."""
    registry = call.registry
    if registry.closing:
        return _not_ready({"status": "draining", "message": "the router is shutting down"})
    if registry.startup_pending:
        names = sorted(registry.startup_pending)
        starting = _starting(f"Loading model {', '.join(names)}")
        return _not_ready({"status": "starting", "waiting_for": names} | starting)
    return {"status": "ok"}


async def metrics(call: ApiCall) -> ApiResult:
    """GET /metrics. Raises ModelNotFound, and Forbidden for a key limited to some models if it names none."""
    name = call.query.get("model")
    if not name and call.key.models:
        raise Forbidden("this key is limited to some models; name one with ?model=")
    ids: tuple[str, ...] = ()
    if name:
        listed = call.registry.model(call.key, name)
        ids = listed.id, listed.model.preset.id
    rendered, only = await call.services.metrics.rendered(*ids), call.registry.only_model(call.key)
    if only is not None and not name:
        rendered += call.services.metrics.llama_server(only.model.preset.id)
    return web.Response(body=rendered, headers={"Content-Type": call.services.metrics.content_type})


async def streams(call: ApiCall) -> ApiResult:
    """GET /v1/streams: always empty, because no stream outlives its connection."""
    return []


async def slots(call: ApiCall) -> ApiResult:
    """GET /slots: the batch slots of loaded models at each worker's last pulse, which is a second old at most.

    Never loads a model. Raises ModelNotLoaded if `model=` is not loaded, SlotsBusy with `fail_on_no_slot`, NotOffered.
    """
    registry, key, query = call.registry, call.key, call.query
    name = query.get("model")
    chosen = [registry.model(key, name)] if name else _one_per_worker(registry.visible(key))
    if not registry.settings.slots:
        raise NotOffered("GET /slots is disabled: the router was started with --no-slots")
    loaded = [
        (listed, worker, number)
        for listed in chosen
        for number, worker in enumerate(worker for worker in listed.model.all_open if worker.state is State.READY)
    ]
    if name and not loaded:
        raise ModelNotLoaded(f"model '{chosen[0].id}' is not loaded; load it with POST /models/load")
    found: list[dict[str, Any]] = []
    for listed, worker, number in loaded:
        _, meta = await registry.snapshots.describe(listed.preset)
        common = {"model": listed.id, "n_ctx": meta.get("n_ctx", 0)}
        found += [{**common, **slot} for slot in _slots(worker, number * worker.rows)]
    if flag(query, "fail_on_no_slot") and all(slot["is_processing"] for slot in found):
        raise SlotsBusy("no slot is free; a request waits until one is", retry_after=1)
    return found


def _one_per_worker(models: Sequence[ListedModel]) -> list[ListedModel]:
    """One listed model per fleet model: the first of those that share a worker."""
    return list({id(listed.model): listed for listed in reversed(models)}.values())[::-1]


def _slots(worker: Worker, first: int) -> list[dict[str, Any]]:
    """The slots of one worker's batch, with the task in each. `first` is the number of its first slot.

    Workers of embedding models do not report slots. Then as many slots as sequences run are shown as busy.
    """
    last = worker.pulse
    tasks = {slot: rest for slot, *rest in last.slots} if last is not None else {}
    running = last.running if last is not None and not tasks else 0
    slots: list[dict[str, Any]] = []
    for slot in range(worker.rows):
        task, prompt_left, decoded, remain, drafted, accepted = tasks.get(slot, (-1, 0, 0, -1, 0, 0))
        slots.append(
            {
                "id": first + slot,
                "id_task": task,
                "is_processing": slot in tasks or slot < running,
                "speculative": worker.preset.speculates,
                "draft_n": drafted,
                "draft_n_accepted": accepted,
                "n_prompt_tokens_left": prompt_left,
                # A list of one object, as llama-server sends it. Its documentation shows the bare object.
                "next_token": [{"has_next_token": slot in tasks, "n_decoded": decoded, "n_remain": remain}],
            }
        )
    return slots


async def props(call: ApiCall) -> ApiResult:
    """GET /props: the properties of the router, or of one model: that of the query, or the only one if it was named at
    start. They come from its files; it need not be loaded."""
    registry, key, query = call.registry, call.key, call.query
    settings, only = registry.settings, registry.only_model(key)
    name = query.get("model") or (only.id if only is not None else "")
    if not name:
        return {
            "role": "router",
            "max_instances": registry.fleet.settings.workers_at_once,
            "models_autoload": settings.models_autoload,
            "model_alias": "llama-server",
            "model_path": "none",
            "default_generation_settings": {"params": {}, "n_ctx": 0},
            "ui_settings": {},
            "build_info": BUILD,
            "cors_proxy_enabled": False,
            "memory_margin_mib": settings.models_memory_margin.get("", 0) // MIB,
        }
    chosen = registry.model(key, name)
    preset = chosen.preset
    if flag(query, "autoload"):
        with errors_with_name(chosen), registry.shared_workers.lease(preset.id, autoload=True) as lease:
            await lease.ready()
    facts, meta = await registry.snapshots.describe(preset)
    texts = await registry.snapshots.texts(preset)
    if facts is None:
        raise NotOffered(f"the files of {preset.id} are not downloaded yet; load it once and repeat the request")
    worker, features = chosen.model.shown, capabilities(chosen, facts)
    return {
        "default_generation_settings": {"n_ctx": meta.get("n_ctx", 0), "params": params(preset, texts)},
        "total_slots": rows(facts, preset),
        "model_alias": preset.id,
        "model_path": (preset.path or preset.repo or f"demo:{preset.demo}")
        if registry.access.is_admin(key)
        else preset.id,
        "modalities": {"vision": "vision" in features, "audio": False, "video": False},
        "chat_template": preset.chat_template or texts.chat_template,
        "chat_template_caps": template_caps(preset.chat_template or texts.chat_template),
        "bos_token": texts.bos_token,
        "eos_token": texts.eos_token,
        "capabilities": features,
        "build_info": BUILD,
        # llama-server's clients wait for it after `sleep-idle-seconds`, also where no --sleep-memory keeps the weights.
        "is_sleeping": chosen.model.sleeps
        or (worker is None and chosen.model.reason == "idle" and preset.sleep_idle >= 0),
        "is_loaded": worker is not None and worker.state is State.READY,
    }


def params(preset: Preset, texts: SnapshotTexts) -> dict[str, Any]:
    """The sampling options of a request that sets none: from the preset, else generation_config.json, else NEUTRAL."""
    found: dict[str, Any] = dict(NEUTRAL)
    generation = texts.generation
    if generation.get("do_sample") is False:  # greedy: the other sampling options have no effect
        generation = {"temperature": 0.0, "repetition_penalty": generation.get("repetition_penalty")}
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        value = generation.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[SAMPLING_NAMES.get(name, name)] = value
    found |= {SAMPLING_NAMES.get(key, key.replace("-", "_")): value for key, value in preset.sampling.items()}
    return {**found, "n_predict": preset.n_predict, "max_tokens": preset.n_predict, "seed": preset.seed}


def template_caps(template: str) -> dict[str, bool]:
    """The features of a chat template, judged by the names that it contains."""
    return {
        "supports_system_role": "system" in template,
        "supports_tools": "tools" in template,
        "supports_tool_calls": "tool_calls" in template,
        "supports_preserve_reasoning": "reasoning_content" in template,
    }
