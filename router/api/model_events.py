"""GET /models/sse: changes of models as server-sent events as llama-server sends them; keep-alive for all streams."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from router.api.call import ApiCall, ApiResult, FrameStream, flag
from router.api.status import REASONS, VALUES, bytes_by_source, progress_object, status
from router.config.api_keys import ApiKey
from router.events import Event
from router.fleet.lifecycle import FETCHED
from router.fleet.worker import State
from router.registry.auth import Access
from router.registry.registry import Registry
from router.registry.shared_workers import ListedModel
from worker.protocol.events import PERMANENT_EXITS, Exit

T = TypeVar("T")

KEEPALIVE_INTERVAL = 15.0  # seconds of silence; less than the idle timeout of usual proxies (60 s in nginx)
KEEPALIVE_COMMENT = b": ping\n\n"


async def with_keepalive(items: AsyncIterator[T]) -> AsyncGenerator[T | None]:
    """The items of an endless iterator, and None after each KEEPALIVE_INTERVAL without one."""
    pending: asyncio.Future[T] | None = None
    try:
        while True:
            # `wait` and not `wait_for`: the latter would cancel the pending item at the timeout and lose it.
            pending = pending or asyncio.ensure_future(anext(items))
            done, _ = await asyncio.wait({pending}, timeout=KEEPALIVE_INTERVAL)
            if not done:
                yield None
                continue
            item, pending = pending.result(), None
            yield item
    finally:
        if pending is not None:
            pending.cancel()


async def sse(call: ApiCall) -> ApiResult:
    """GET /models/sse."""
    snapshot = bool(flag(call.query, "snapshot"))
    return FrameStream(frames(call.registry, call.key, call.last_event_id, snapshot=snapshot))


async def frames(registry: Registry, key: ApiKey, last_id: int | None, *, snapshot: bool) -> AsyncIterator[bytes]:
    """Frames of all events after `last_id`, without end.

    If some of these events are no longer stored, the first frame makes the client reload the list of models. With
    `snapshot` the status of each model comes first.
    """
    after = registry.events.last_id
    if last_id is not None:
        if registry.events.since(last_id) is None:
            yield frame(after, "*", "models_reload", {})
        else:
            after = last_id
    if snapshot:
        for listed in registry.visible(key):
            yield frame(after, listed.id, "status_change", await _current(registry, listed))
    following = registry.events.follow(after).__aiter__()
    async with aclosing(with_keepalive(following)) as events:
        async for event in events:
            if event is None:
                yield KEEPALIVE_COMMENT
                continue
            has_own_names = event.model == "*" or event.kind == "listed"  # not the id of a fleet model
            names = (event.model,) if has_own_names else registry.shared_workers.names_of(event.model)
            visible = [name for name in names if name == "*" or Access.may_use(key, name)]
            for name in visible:
                for rendered in await render(registry, event, name, last=name == visible[-1]):
                    yield rendered


async def _current(registry: Registry, listed: ListedModel) -> dict[str, Any]:
    """The data of a `status_change` event with the current status of a model."""
    shown = status(registry.fleet, listed.model)
    data = {"status": shown["value"]}
    if shown["value"] == "loaded":
        _, data["info"] = await registry.snapshots.describe(listed.preset)
    elif shown["value"] == "unloaded":
        data["exit_code"] = shown.get("exit_code", 0)
    return data | {name: shown[name] for name in ("progress", "draining", "reason", "error") if shown.get(name)}


def frame(id: int | None, model: str, event: str, data: Mapping[str, Any]) -> bytes:
    """One server-sent event.

    If one event has several frames, only the last has the id. A client that disconnects in between reconnects with the
    id of the event before and receives all of them again.
    """
    body = json.dumps({"model": model, "event": event, "data": data}, ensure_ascii=False, separators=(",", ":"))
    return ("" if id is None else f"id: {id}\n").encode() + f"data: {body}\n\n".encode(errors="replace")


async def render(registry: Registry, event: Event, name: str, *, last: bool = True) -> list[bytes]:
    """The frames of one event; none for kinds that llama-server does not have.

    `name` is one of the models that the event is about. `last`: no other model of the event follows.
    """
    data, id = event.data, event.id if last else None
    listed = registry.shared_workers.listed.get(name)
    match event.kind:
        case "config" | "listed":
            return [frame(event.id, "*", "models_reload", {})]
        case "removed":
            return [frame(id, name, "model_remove", {})]
        case "progress" if data["stage"] == "download":
            source = (listed.preset.repo if listed is not None else "") or name
            progress = {"progress": bytes_by_source(source, data["done"], data["total"], data.get("files", {}))}
            return [frame(id, name, "download_progress", progress)]
        case "progress" if not data.get("extra_worker"):
            share = data["done"] / data["total"] if data["total"] else 0.0
            stage = {name: data[name] for name in ("stage", "done", "total", "unit", "rate", "eta")}
            progress = progress_object(min(1.0, share), stage)
            return [frame(id, name, "status_change", {"status": "loading", "progress": progress})]
        case "sleeping_weights" if listed is not None and not listed.model.workers:
            value = "unloaded" if data["state"] == "released" else "sleeping"
            return [frame(id, name, "status_change", {"status": value})]
        case "state":
            return await _render_state(registry, event, name, listed, id)
    return []


async def _render_state(
    registry: Registry, event: Event, model: str, listed: ListedModel | None, id: int | None
) -> list[bytes]:
    data, frames = event.data, []
    state = State[data["state"].upper()]
    if data.get("was") == "downloading":
        if state is State.STOPPED and data["reason"] != FETCHED:
            frames.append(frame(None, model, "download_failed", _download_failure(data)))
        else:
            frames.append(frame(None, model, "download_finished", {}))
    if data.get("extra_worker"):  # an extra worker: the status of the model does not change
        return frames
    change: dict[str, Any] = {"status": VALUES.get(state, "unloaded")}
    if state is State.READY and not data.get("draining") and listed is not None:
        _, change["info"] = await registry.snapshots.describe(listed.preset)
    if data.get("draining") or state is State.STOPPING:
        change["draining"] = True
    if state is State.STOPPED:
        change["exit_code"] = data.get("exit_code", 1 if "error" in data else 0)
        if data["reason"] in REASONS:
            change["reason"] = data["reason"]
        if "error" in data:
            change["error"] = data["error"]
    name = "model_status" if "was" not in data and not data.get("draining") else "status_change"
    frames.append(frame(id, model, name, change))
    return frames


def _download_failure(data: Mapping[str, Any]) -> dict[str, Any]:
    """The reason of a failed download as llama-server classifies it, and the error message."""
    if "error" not in data:
        return {"reason": "cancelled"}
    code = data.get("exit_code")
    reason = "disk_full" if code == Exit.DISK_FULL else "not_found" if code in PERMANENT_EXITS else "network"
    return {"reason": reason, "error": data["error"]}
