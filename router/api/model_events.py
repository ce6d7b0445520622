"""GET /models/sse: what happens to models, in the events that llama-server's clients know."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from router.api.call import ApiCall, Frames, Result
from router.api.keepalive import PING, with_pauses
from router.api.status import REASONS, VALUES, bar_of, by_source, status
from router.config.settings import Key
from router.events import Event
from router.fleet.lifecycle import FETCHED
from router.fleet.worker import State
from router.registry.auth import Access
from router.registry.registry import Site, flag
from router.registry.shared_workers import Listed
from worker.protocol.exits import FINAL_EXITS, Exit


async def sse(call: ApiCall) -> Result:
    """GET /models/sse."""
    snapshot = bool(flag(call.query, "snapshot"))
    return Frames(frames(call.site, call.key, call.last_event_id, snapshot=snapshot))


async def frames(site: Site, key: Key, last_id: int | None, *, snapshot: bool) -> AsyncIterator[bytes]:
    """Frames for ever; a comment in silence. Events before `last_id` are not told again."""
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
            told = {"progress": by_source(source, data["done"], data["total"], data.get("files", {}))}
            return [frame(id, name, "download_progress", told)]
        case "progress" if not data.get("beside"):
            share = data["done"] / data["total"] if data["total"] else 0.0
            told = {name: data[name] for name in ("stage", "done", "total", "unit", "rate", "eta")}
            bar = bar_of(min(1.0, share), told)
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
