"""What llama-server's router mode says of models, without tokens: lists, loads, events, health, properties."""

import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from router.access import Access
from router.backoff import Failure
from router.checkpoint import modalities, offered
from router.errors import BadRequest, ModelNotLoaded, NotOffered, SlotsBusy, Starting
from router.events import Event
from router.faces.pings import PING, with_pauses
from router.facts import Checkpoint
from router.fleet import Fleet
from router.hub import Hub, users
from router.ledger import HOST, LOCAL, SLOTS, DeviceId, pooled
from router.life import FETCHED
from router.lifecycle import State
from router.members import Listed, speaking_of
from router.model import Model
from router.presets import Preset
from router.settings import Key
from router.sharing import names_in
from router.site import BUILD, Site, Words, flag
from router.stages import whole
from router.worker import Worker, estimated
from router.written import args, effective
from worker import routes
from worker.contract import FINAL_EXITS, Exit

MIB = 1 << 20
VALUES = {
    State.DOWNLOADING: "downloading",
    State.QUEUED: "loading",
    State.STARTING: "loading",
    State.READY: "loaded",
    State.STOPPING: "loaded",
}
REASONS = frozenset(
    {
        "evicted",
        "idle",
        "requested",
        "crashed",
        "oom",
        "load_failed",
        "load_timeout",
        "stalled",
        "config_changed",
        "download_failed",
        "shutdown",
        "abandoned",
        "does_not_fit",
    }
)
OWN_WORDS = {"temp": "temperature", "repetition_penalty": "repeat_penalty"}
"""llama-server's, for what presets and checkpoints call otherwise."""
NEUTRAL = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "repeat_last_n": -1,
    "presence_penalty": 0.0, "frequency_penalty": 0.0,
}  # fmt: skip
"""How a request is sampled where nobody says anything: as the worker's `Sampling`, in llama-server's words."""


def value_of(model: Model) -> str:
    worker = model.shown
    if model.sleeps:
        return "sleeping"
    return VALUES[worker.state] if worker is not None and worker.state in VALUES else "unloaded"


def status_of(site: Site, key: Key, listed: Listed) -> dict[str, Any]:
    """The status object of one that is listed. Who share a worker each have what that does, and all that the key may
    see are named; what memory it has is told of the first of them, so that sums are right."""
    told = status(site.fleet, listed.model, admin=site.access.is_admin(key), preset=listed.preset)
    clerk = site.clerks.of(listed.model.preset.id)
    if clerk is not None:
        told["clerk"] = counting(clerk)
    others = site.sharing(key, listed)
    if others:
        told["shares"] = others
        if listed.names.index(others[0]) < listed.names.index(listed.id):
            told.pop("memory", None)
            told.pop("clerk", None)
    return told


def counting(clerk: Worker) -> dict[str, Any]:
    """The process that counts for a model which is not loaded: what it is at, for how many, and what it takes."""
    is_ready = clerk.state >= State.READY
    host = DeviceId(LOCAL, HOST)
    measured = clerk.measured.get(host)
    return {
        "state": clerk.state.name.lower(),
        "draining": clerk.retired.is_set(),
        "in_flight": len(clerk.leases) if is_ready else 0,
        "queued": 0 if is_ready else len(clerk.leases),
        "memory": {
            str(host): {
                "measured_mib": None if measured is None else -(-measured // MIB),
                "reserved_mib": -(-clerk.reserved.get(host, 0) // MIB),
            }
        },
        "load_seconds": round(clerk.load_seconds, 3) if is_ready else None,
    }


def status(fleet: Fleet, model: Model, *, admin: bool, preset: Preset | None = None) -> dict[str, Any]:
    """The status object of one model; `args` and `preset` only for admins: of the listed preset, unless that is the
    fleet's own."""
    worker, value = model.shown, value_of(model)
    result: dict[str, Any] = {"value": value, "args": [], "pinned": model.preset.pin}
    if admin:
        result["args"] = args(preset or model.preset)
        result["preset"] = preset_text(preset or model.preset)
    leases = [len(each.leases) for each in model.workers if each.state >= State.READY]
    queued = [len(each.leases) for each in model.workers if each.state < State.READY]
    result["in_flight"], result["queued"] = sum(leases), sum(queued)
    least, most = model.preset.replicas
    if most > 1:
        ready = sum(each.state is State.READY and each.open for each in model.workers)
        result["replicas"] = {"ready": ready, "open": len(model.all_open), "least": least, "most": most}
    if worker is not None:
        result["since"] = wall_clock(fleet, worker.since)
        result["draining"] = leaving = worker.retired.is_set() or worker.state is State.STOPPING
        if leaving and worker.reason in REASONS:
            result["reason"] = worker.reason
        if worker.state is State.QUEUED and worker.waits_for:
            result["waiting_for"] = worker.waits_for
        if worker.progress is not None and worker.state < State.READY:
            result["progress"] = fetched(worker) if worker.state is State.DOWNLOADING else progress(worker)
        if (beat := pulse(worker)) is not None:
            result["pulse"] = beat
        if worker.process is not None and worker.process.ready.seconds:
            spent = worker.process.ready.seconds.items()
            result["spent"] = {stage: round(seconds, 4) for stage, seconds in spent}
            result["processor_seconds"] = round(worker.process.ready.processor, 4)
            if worker.first_token:
                result["spent"]["first_token"] = round(worker.first_token, 4)
        memory = memory_of(model.workers)
        if memory:
            result["memory"] = memory
        if worker.costs is not None:
            estimate = worker.costs.estimate
            result["estimate"] = {"source": estimate.source} | ({"note": estimate.note} if estimate.note else {})
        if model.open is None and model.failure is not None and fleet.now() < model.failure.until:
            result |= why_not(fleet, model.failure)  # what is shown is an older one, which still drains
        return result
    if model.since is not None:
        result["since"] = wall_clock(fleet, model.since)
    if model.holding is not None and model.sleeps:
        size = -(-model.holding.wish.size // MIB)
        held = size if model.holding.is_held else None
        result["memory"] = {"cpu": {"estimated_mib": size, "measured_mib": held, "reserved_mib": size}}
    if model.reason in REASONS:
        result["reason"] = model.reason
    failure = model.failure
    if failure is not None:
        result |= {"failed": True, **why_not(fleet, failure)}
        result["exit_code"] = failure.exit if failure.exit is not None else 1
    return result


def why_not(fleet: Fleet, failure: Failure) -> dict[str, Any]:
    """Why a model failed, and until when no worker of it is begun by itself."""
    return {"error": failure.message, "retry_at": wall_clock(fleet, failure.until)}


def wall_clock(fleet: Fleet, at: float) -> float:
    """Seconds since 1970 of a moment of the fleet's clock, for people."""
    return round(time.time() + at - fleet.now(), 3)


def memory_of(workers: Sequence[Worker]) -> dict[str, dict[str, int | None]]:
    """MiB by device: estimated, measured, reserved; of all workers together."""
    planned: Counter[DeviceId] = Counter()
    measured: Counter[DeviceId] = Counter()
    reserved: Counter[DeviceId] = Counter()
    for worker in workers:
        planned.update(pooled(estimated(worker), worker.pools))
        measured.update(worker.occupied)
        reserved.update(worker.reserved)
    return {
        str(device): {
            "estimated_mib": -(-planned[device] // MIB),
            "measured_mib": -(-measured[device] // MIB) if device in measured else None,
            "reserved_mib": -(-size // MIB),
        }
        for device, size in reserved.items()
        if device.index != SLOTS
    }


def fetched(worker: Worker) -> dict[str, Any]:
    """Bytes of a download, by where they come from."""
    told = worker.progress
    return _by_source(worker.preset.repo or worker.preset.id, told.done, told.total, told.files) if told else {}


def _by_source(name: str, done: int, total: int, files: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """By URL where single files are known, else all in all."""
    known = {url: {"done": pair[0], "total": pair[1]} for url, pair in files.items() if len(pair) == 2}
    return known or {name: {"done": done, "total": total}}


def progress(worker: Worker) -> dict[str, Any]:
    """Progress of a load as llama-server shapes it, `value` from 0 to 1 for all its stages."""
    return _bar(worker.stages.share, worker.stages.told())


def _bar(share: float, told: Mapping[str, Any]) -> dict[str, Any]:
    return {"stages": ["text_model"], "current": "text_model", "value": round(whole(told["stage"], share), 4), **told}


def pulse(worker: Worker) -> dict[str, Any] | None:
    """What a worker's engine does, as of its last pulse: counts of sequences and tokens, tokens per second."""
    said = worker.pulse
    if said is None or worker.state < State.READY:
        return None
    return {
        "steps": said.steps,
        "running": said.running,
        "waiting": said.waiting,
        "parallel": said.parallel or worker.preset.parallel,
        "prefill_tokens_per_second": said.prefill_rate,
        "decode_tokens_per_second": said.decode_rate,
        "cache": {"used": said.cache_used, "reusable": said.cache_reusable, "total": said.cache_total},
    }


def preset_text(preset: Preset) -> str:
    """The effective preset as a section of an INI file."""
    return "\n".join([f"[{preset.id}]", *(f"{key} = {value}" for key, value, _ in effective(preset))]) + "\n"


def capabilities(listed: Listed, facts: Checkpoint | None) -> list[str]:
    """Of chat, completion, tools, vision, embedding, rerank: as its worker says; before there is one, or where it has a
    template of its own, by preset and files."""
    for worker in listed.model.workers if not listed.preset.chat_template else ():
        if worker.process is not None and worker.process.ready.capabilities:
            return list(worker.process.ready.capabilities)
    return offered(facts or Checkpoint(), listed.preset)


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
    }


def _adapted(shown: dict[str, Any], adapter: str) -> dict[str, Any]:
    """A model with one of its adapters, as lists show it."""
    id = shown["id"]
    return {**shown, "id": f"{id}@{adapter}", "aliases": [], "can_remove": False, "parent": id}


async def models(site: Site, key: Key, query: Mapping[str, str], *, adapters: bool = False) -> dict[str, Any]:
    """GET /models, with `adapters` as entries of their own. `reload=` first applies what has changed; the caller has
    checked that the key may."""
    extra: dict[str, Any] = {}
    if query.get("reload"):
        extra["reload"] = await site.reload()
    data = []
    for listed in site.visible(key):
        shown = await entry(site, key, listed)
        data.append(shown)
        data += [_adapted(shown, each.name) for each in listed.preset.adapters if adapters]
    return {"object": "list", "data": data, **extra}


async def model(site: Site, key: Key, name: str) -> dict[str, Any]:
    """GET /models/{id}. Raises ModelNotFound."""
    shown = await entry(site, key, site.model(key, name))
    adapter = site.names.adapter(name)
    return _adapted(shown, adapter) if adapter else shown


def lora_adapters(site: Site, key: Key, name: str | None) -> list[dict[str, Any]]:
    """GET /lora-adapters: of the model by name, or of the only one. Raises ModelNotFound."""
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


async def fetch(hub: Hub, body: Mapping[str, Any]) -> dict[str, Any]:
    """POST /models: 200 once the hub has said that there is such a model; its files come meanwhile."""
    await hub.fetch(_named(body))
    return {"success": True}


async def delete(hub: Hub, key: Key, query: Mapping[str, str]) -> dict[str, Any]:
    """DELETE /models?model=: 200 once its files are gone."""
    name = query.get("model")
    if not name:
        raise BadRequest("model name is missing from the query", reason="model_missing", param="model")
    await hub.delete(key, name)
    return {"success": True}


async def load(site: Site, key: Key, body: Mapping[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
    """POST /models/load: 200 once queued; with `wait` once ready, or the load's error."""
    chosen = site.model(key, _named(body))
    wait = flag(query, "wait")
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


async def unload(site: Site, key: Key, body: Mapping[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
    """POST /models/unload: 200 at once; with `wait` once the memory is back; with `force` without a drain."""
    chosen = site.model(key, _named(body))
    wait, force = flag(query, "wait"), flag(query, "force")
    workers = site.members.unload(chosen.id, force=bool(force))
    if wait:
        for worker in workers:
            await worker.stopped.wait()
    return {"success": True}


def health(site: Site, key: Key, query: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
    """(status, body); with `model=` that of one model, which it never loads."""
    name = query.get("model")
    if not name:
        return 200, {"status": "ok"}
    chosen = site.model(key, name)
    value, worker = value_of(chosen.model), chosen.model.open
    ok = worker is not None and worker.state is State.READY
    body: dict[str, Any] = {"status": "ok" if ok else value, "model": chosen.id}
    if not ok and worker is not None:
        body |= _starting("Loading model")  # in these words llama-server's clients wait for it
    return (200 if ok else 503), body


def _starting(message: str) -> dict[str, Any]:
    error = Starting(message)
    return routes.error_body(
        routes.Face.OPENAI, status=error.status, type=error.type, reason=error.reason, message=message
    )


def ready(site: Site) -> tuple[int, dict[str, Any]]:
    """200 once presets are parsed and the models of `load-on-startup` are up."""
    if site.closing:
        return 503, {"status": "draining", "message": "the router is shutting down"}
    if site.awaited:
        names = sorted(site.awaited)
        return 503, {"status": "starting", "waiting_for": names} | _starting(f"Loading model {', '.join(names)}")
    return 200, {"status": "ok"}


async def slots(site: Site, key: Key, query: Mapping[str, str]) -> list[dict[str, Any]]:
    """GET /slots: places in the batches of loaded models, as of each worker's last pulse (a second ago at most).

    It never loads. Raises ModelNotLoaded for one model by name, SlotsBusy with `fail_on_no_slot`, NotOffered.
    """
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


async def props(site: Site, key: Key, query: Mapping[str, str]) -> dict[str, Any]:
    """GET /props: of the router, or of one model from its files, whether or not it is loaded."""
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


async def sse(site: Site, key: Key, last_id: int | None, *, snapshot: bool) -> AsyncIterator[bytes]:
    """GET /models/sse: frames for ever; a comment in silence. Events before `last_id` are not told again."""
    after = site.events.last_id
    if last_id is not None:
        if site.events.since(last_id) is None:
            yield frame(after, "*", "models_reload", {})
        else:
            after = last_id
    if snapshot:
        for known in site.visible(key):
            yield frame(after, known.id, "status_change", await _now(site, known))
    following = site.events.follow(after).__aiter__()
    async with aclosing(with_pauses(following)) as told_of:
        async for event in told_of:
            if event is None:
                yield PING
                continue
            is_of_names = event.model == "*" or event.kind == "listed"
            names = (event.model,) if is_of_names else site.members.names_of(event.model)
            seen = [name for name in names if name == "*" or Access.may_use(key, name)]
            for name in seen:
                for told in await render(site, event, name, last=name == seen[-1]):
                    yield told


async def _now(site: Site, known: Listed) -> dict[str, Any]:
    """The state of a model, as its events would have told it."""
    shown = status(site.fleet, known.model, admin=False)
    told = {"status": shown["value"]}
    if shown["value"] == "loaded":
        _, told["info"], _ = await site.describe(known.preset)
    elif shown["value"] == "unloaded":
        told["exit_code"] = shown.get("exit_code", 0)
    return told | {name: shown[name] for name in ("progress", "draining", "reason", "error") if shown.get(name)}


def frame(id: int | None, model: str, event: str, data: Mapping[str, Any]) -> bytes:
    """One event; without an id if more of the same one follows: whoever has not seen all of it has seen nothing."""
    body = json.dumps({"model": model, "event": event, "data": data}, ensure_ascii=False, separators=(",", ":"))
    return ("" if id is None else f"id: {id}\n").encode() + f"data: {body}\n\n".encode()


async def render(site: Site, event: Event, name: str, *, last: bool = True) -> list[bytes]:
    """The frames that llama-server's clients get for one event of ours; none for what they do not know. `name`: of the
    model that they are about, which may share a worker; `last`: no other follows with the same event."""
    data, id = event.data, event.id if last else None
    listed = site.members.listed.get(name)
    match event.kind:
        case "config" | "listed":
            return [frame(event.id, "*", "models_reload", {})]
        case "removed":
            return [frame(id, name, "model_remove", {})]
        case "progress" if data["stage"] == "download":
            source = (listed.preset.repo if listed is not None else "") or name
            told = {"progress": _by_source(source, data["done"], data["total"], data.get("files", {}))}
            return [frame(id, name, "download_progress", told)]
        case "progress" if not data.get("beside"):
            share = data["done"] / data["total"] if data["total"] else 0.0
            told = {name: data[name] for name in ("stage", "done", "total", "unit", "rate", "eta")}
            bar = _bar(min(1.0, share), told)
            return [frame(id, name, "status_change", {"status": "loading", "progress": bar})]
        case "holding" if listed is not None and not listed.model.workers:
            value = "unloaded" if data["state"] == "released" else "sleeping"
            return [frame(id, name, "status_change", {"status": value})]
        case "state":
            return await _render_state(site, event, name, listed, id)
    return []


async def _render_state(site: Site, event: Event, model: str, listed: Listed | None, id: int | None) -> list[bytes]:
    data, frames = event.data, []
    state = State[data["state"].upper()]
    value = VALUES.get(state, "unloaded")
    if data.get("was") == "downloading":
        if state is State.STOPPED and data["reason"] != FETCHED:
            frames.append(frame(None, model, "download_failed", _why_not_fetched(data)))
        else:
            frames.append(frame(None, model, "download_finished", {}))
    if data.get("beside"):
        return frames
    told: dict[str, Any] = {"status": value}
    if state is State.READY and not data.get("draining") and listed is not None:
        _, told["info"], _ = await site.describe(listed.preset)
    if data.get("draining") or state is State.STOPPING:
        told["draining"] = True
    if state is State.STOPPED:
        told["exit_code"] = data.get("exit_code", 1 if "error" in data else 0)
        if data["reason"] in REASONS:
            told["reason"] = data["reason"]
        if "error" in data:
            told["error"] = data["error"]
    name = "model_status" if "was" not in data and not data.get("draining") else "status_change"
    frames.append(frame(id, model, name, told))
    return frames


def _why_not_fetched(data: Mapping[str, Any]) -> dict[str, Any]:
    """Why a download ended without the files: in llama-server's sense, and in words."""
    if "error" not in data:
        return {"reason": "cancelled"}
    code = data.get("exit_code")
    reason = "disk_full" if code == Exit.DISK_FULL else "not_found" if code in FINAL_EXITS else "network"
    return {"reason": reason, "error": data["error"]}


__all__ = [
    "delete",
    "entry",
    "fetch",
    "health",
    "load",
    "lora_adapters",
    "model",
    "models",
    "props",
    "ready",
    "slots",
    "sse",
    "unload",
]
