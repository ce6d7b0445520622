"""The router's own API, /router/*: state, plan, configuration, logs, requests, events, reload."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, TypeVar

from router import __version__
from router.api.call import ApiCall, ApiResult, FrameStream, model_name, number
from router.api.model_events import KEEPALIVE_COMMENT, with_keepalive
from router.api.status import pulse, status_of
from router.config.effective import effective
from router.errors import BadRequest
from router.fleet.load_cost import forget_learned
from router.fleet.scheduler import device_figures
from router.fleet.worker import State, figures
from router.log import KEPT, Line
from router.memory.checkpoint_facts import EstimateError
from router.registry.auth import NO_KEY
from router.registry.registry import Registry

T = TypeVar("T")
LEVELS = {name: rank for rank, name in enumerate(("debug", "info", "warning", "error"))}


async def state(call: ApiCall) -> ApiResult:
    """GET /router/state."""
    return _state(call.registry)


def _state(registry: Registry) -> dict[str, Any]:
    """The state of devices, models, workers, sleeping weights and the admission queue, in bytes and seconds."""
    fleet = registry.fleet
    fleet.scheduler.plan_now()
    readings = {reading.id: reading for reading in registry.launcher.readings()}
    return {
        "schema": 1,
        "version": __version__,
        "devices": [
            {
                "id": str(device.id),
                "name": readings[device.id].name if device.id in readings else "",
                **device_figures(device),
                "shared": device.shared,
                "reserved": fleet.scheduler.reserved(device.id),
            }
            for device in fleet.scheduler.devices
        ],
        "models": {id: status_of(registry, NO_KEY, listed) for id, listed in registry.shared_workers.listed.items()},
        "workers": [
            {
                "id": worker.id,
                **figures(worker),
                "steps": worker.pulse.steps if worker.pulse is not None else None,
                "pulse": pulse(worker),
            }
            for worker in fleet.workers()
        ],
        "sleeping": [
            {"model": sleeping.preset.id, "bytes": sleeping.request.size, "locked": sleeping.is_locked}
            for sleeping in fleet.sleeping_weights.all.values()
        ],
        "prepared": [{"snapshot": folder, "bytes": size} for folder, size in registry.files.conversions.sizes.items()],
        "queue": [
            {"model": worker.preset.id, "position": worker.queue.ahead + 1, "waiting_for": worker.queue.waits_for}
            for worker in fleet.workers()
            if worker.state is State.QUEUED
        ],
        "reload": {"at": registry.reloaded_at, "errors": list(registry.reload_errors)},
        "last_event": registry.events.last_id,
    }


async def plan(call: ApiCall) -> ApiResult:
    """GET /router/plan: the effect of loading the model now: placement, evictions and waits, or the rejection.

    Changes nothing.
    """
    id = call.model_id()
    found = await call.registry.shared_workers.preview(id)
    return {"schema": 1, "model": id, **found}


async def reload(call: ApiCall) -> ApiResult:
    """POST /router/reload: read presets, folders, caches and keys again. Raises PresetInvalid."""
    return await call.registry.reload()


async def pin(call: ApiCall) -> ApiResult:
    """POST /router/pin: pin or unpin a model until this router exits or the model is removed.

    Raises ModelNotFound, BadRequest.
    """
    body = await call.body()
    name, pinned = model_name(body), body.get("pinned", True)
    if "pin" in body:  # the name of the preset key; ignored as an unknown field, {"pin": false} would pin
        raise BadRequest("pin is not a field of this request; write pinned: true or false", param="pin")
    if not isinstance(pinned, bool):
        raise BadRequest("pinned must be true or false", param="pinned")
    id = call.registry.model(call.key, name).id
    call.registry.pin(id, pinned=pinned)
    return {"success": True, "model": id, "pinned": pinned}


async def forget(call: ApiCall) -> ApiResult:
    """POST /router/forget: drop what was learned of a model's memory. Raises ModelNotFound."""
    registry = call.registry
    listed = registry.model(call.key, model_name(await call.body()))
    try:
        forgotten = await forget_learned(listed.model.preset, registry.fleet)
    except EstimateError as unknown:
        raise BadRequest(unknown.message, param="model") from None
    answer = {"success": True, "model": listed.id, "forgotten": forgotten}
    if listed.model.workers:
        answer["warning"] = f"a worker of {listed.id} records its memory again when it stops; unload it first"
    return answer


async def config(call: ApiCall) -> ApiResult:
    """GET /router/config: all settings of a model with their origins; secrets are masked."""
    registry, id = call.registry, call.model_id()
    rows = effective(registry.shared_workers.find(id).preset)
    settings = [{"key": key, "value": value, "origin": origin} for key, value, origin in rows]
    if id in registry.overrides.pinned:  # set by a call, so the origin in the preset is wrong
        settings = [{**row, "origin": "/router/pin"} if row["key"] == "pin" else row for row in settings]
    return {"schema": 1, "model": id, "settings": settings}


async def logs(call: ApiCall) -> ApiResult:
    """GET /router/logs: the newest lines, oldest first. Raises BadRequest, ModelNotFound."""
    matches, count = _line_filter(call)
    shown = [line for line in call.registry.logs.lines if matches(line)]
    return {"schema": 1, "lines": [asdict(line) for line in shown[-count:]]}


async def follow_logs(call: ApiCall) -> ApiResult:
    """GET /router/logs/sse: the newest lines, or those after the client's last one, then each new line.

    Raises BadRequest, ModelNotFound.
    """
    registry, last_id = call.registry, call.last_event_id
    matches, count = _line_filter(call)
    shown = [line.id for line in registry.logs.lines if matches(line)][-count:]
    after = shown[0] - 1 if shown else max((line.id for line in registry.logs.lines), default=0)
    if last_id is not None and any(line.id == last_id for line in registry.logs.lines):
        after = last_id
    lines = _frames(
        registry.logs.follow(after), lambda line: _frame(line.id, "line", asdict(line)) if matches(line) else b""
    )
    return FrameStream(lines)


def _line_filter(call: ApiCall) -> tuple[Callable[[Line], bool], int]:
    """The filter and the number of lines of a query. Raises BadRequest, ModelNotFound."""
    query = call.query
    level = query.get("level", "debug").casefold()
    if level not in LEVELS:
        raise BadRequest(f"level must be one of {', '.join(LEVELS)}", param="level")
    lines = number(query, "lines", 1, KEPT, 200)
    listed = call.registry.model(call.key, query["model"]) if query.get("model") else None
    ids = {listed.id, listed.model.preset.id} if listed is not None else set()

    def matches(line: Line) -> bool:
        return LEVELS.get(line.level, len(LEVELS)) >= LEVELS[level] and (not ids or any(map(line.is_about, ids)))

    return matches, lines


async def requests(call: ApiCall) -> ApiResult:
    """GET /router/requests: running requests and the last ended ones. Raises ModelNotFound."""
    name = call.query.get("model")
    model = call.registry.model(call.key, name).id if name else None
    return {"schema": 1, **call.services.requests.as_dict(may_see=lambda id: model is None or id == model)}


async def cancel(call: ApiCall) -> ApiResult:
    """DELETE /router/requests/{request}: abort the running requests with this id. Raises RequestNotFound."""
    return {"success": True, "cancelled": call.services.requests.cancel(call.path["request"])}


async def events(call: ApiCall) -> ApiResult:
    """GET /router/events: all events with their ids; the `event` field of a frame is the event's kind."""
    return FrameStream(_events(call.registry, call.last_event_id))


async def _events(registry: Registry, last_id: int | None) -> AsyncIterator[bytes]:
    """All events after `last_id`, or a snapshot of the state and all later events if some of them are lost."""
    after = registry.events.last_id
    if last_id is not None and registry.events.since(last_id) is not None:
        after = last_id
    else:
        yield _frame(after, "snapshot", _state(registry))
    frames = _frames(
        registry.events.follow(after),
        lambda event: _frame(event.id, event.kind, {"model": event.model, "time": event.time, **event.data}),
    )
    async with aclosing(frames):
        async for frame in frames:
            yield frame


async def _frames(items: AsyncIterator[T], to_frame: Callable[[T], bytes]) -> AsyncGenerator[bytes]:
    """A frame per item, except for items with an empty frame, and a comment in each pause."""
    async with aclosing(with_keepalive(items)) as with_pauses:
        async for item in with_pauses:
            if frame := KEEPALIVE_COMMENT if item is None else to_frame(item):
                yield frame


def _frame(id: int, kind: str, body: dict[str, Any]) -> bytes:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), default=str)
    return f"id: {id}\nevent: {kind}\ndata: {text}\n\n".encode(errors="replace")
