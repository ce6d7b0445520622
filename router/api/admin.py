"""The router's own plane, /router/*: state, plan, events, reload."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, TypeVar

from router import __version__
from router.api.call import ApiCall, Frames, Result
from router.api.keepalive import PING, with_pauses
from router.api.status import pulse, status_of
from router.config.effective import effective
from router.errors import BadRequest
from router.fleet.worker import State, figures
from router.log import KEPT, Line
from router.registry.auth import ANYBODY
from router.registry.registry import Site

T = TypeVar("T")
LEVELS = {name: rank for rank, name in enumerate(("debug", "info", "warning", "error"))}


async def state(call: ApiCall) -> Result:
    """GET /router/state."""
    return _state(call.site)


def _state(site: Site) -> dict[str, Any]:
    """Devices, margins, models and the queue, in bytes and seconds."""
    fleet = site.fleet
    fleet.arrange()
    readings = {reading.id: reading for reading in site.launcher.readings()}
    return {
        "schema": 1,
        "version": __version__,
        "devices": [
            {
                "id": str(device.id),
                "name": readings[device.id].name if device.id in readings else "",
                "total": device.total,
                "used": device.used,
                "foreign": device.foreign,
                "margin": device.margin,
                "limit": device.limit,
                "reserved": fleet.reserved(device.id),
            }
            for device in fleet.devices
        ],
        "models": {id: status_of(site, ANYBODY, listed) for id, listed in site.members.listed.items()},
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
            {"model": sleeping.preset.id, "bytes": sleeping.request.size, "held": sleeping.is_held}
            for sleeping in fleet.sleeping_weights
        ],
        "prepared": [{"snapshot": folder, "bytes": size} for folder, size in site.files.converted.items()],
        "queue": [
            {"model": worker.preset.id, "position": worker.ahead + 1, "waiting_for": worker.waits_for}
            for worker in fleet.workers()
            if worker.state is State.QUEUED
        ],
        "reload": {"at": site.reloaded, "errors": list(site.reload_errors)},
        "last_event": site.events.last_id,
    }


async def plan(call: ApiCall) -> Result:
    """GET /router/plan: the effect of loading the model now (places, evictions, waits, or the refusal). Nothing is
    changed."""
    id = call.model_id()
    found = await call.site.members.preview(id)
    return {"schema": 1, "model": id, **found}


async def reload(call: ApiCall) -> Result:
    """POST /router/reload: read presets, folders and caches again."""
    return await call.site.reload()


async def pin(call: ApiCall) -> Result:
    """POST /router/pin: pin or unpin a model until this router exits. Raises ModelNotFound, BadRequest."""
    body = await call.body()
    name, pinned = body.get("model"), body.get("pinned", True)
    if not isinstance(name, str) or not name:
        raise BadRequest("model name is missing from the request", reason="model_missing", param="model")
    if not isinstance(pinned, bool):
        raise BadRequest("pinned must be true or false", param="pinned")
    id = call.site.model(call.key, name).id
    call.site.pin(id, pinned=pinned)
    return {"success": True, "model": id, "pinned": pinned}


async def config(call: ApiCall) -> Result:
    """GET /router/config: every setting of a model, and where it comes from; secrets are masked."""
    site, id = call.site, call.model_id()
    rows = effective(site.members.find(id).preset)
    settings = [{"key": key, "value": value, "origin": origin} for key, value, origin in rows]
    if id in site.pinned:
        settings = [{**row, "origin": "/router/pin"} if row["key"] == "pin" else row for row in settings]
    return {"schema": 1, "model": id, "settings": settings}


async def logs(call: ApiCall) -> Result:
    """GET /router/logs: the newest lines, the oldest of them first. Raises BadRequest, ModelNotFound."""
    wanted, count = _wanted(call)
    shown = [line for line in call.site.logs.lines if wanted(line)]
    return {"schema": 1, "lines": [asdict(line) for line in shown[-count:]]}


async def follow_logs(call: ApiCall) -> Result:
    """GET /router/logs/sse: the newest lines, or those after the client's last one, and then each new line. Raises
    BadRequest, ModelNotFound."""
    site, last_id = call.site, call.last_event_id
    wanted, count = _wanted(call)
    shown = [line.id for line in site.logs.lines if wanted(line)][-count:]
    after = shown[0] - 1 if shown else max((line.id for line in site.logs.lines), default=0)
    if last_id is not None and any(line.id == last_id for line in site.logs.lines):
        after = last_id
    lines = _with_pings(
        site.logs.follow(after), lambda line: _frame(line.id, "line", asdict(line)) if wanted(line) else b""
    )
    return Frames(lines)


def _wanted(call: ApiCall) -> tuple[Callable[[Line], bool], int]:
    """The filter and the number of lines of a query. Raises BadRequest, ModelNotFound."""
    query = call.query
    level, text = query.get("level", "debug").casefold(), query.get("lines", "200")
    if level not in LEVELS:
        raise BadRequest(f"level must be one of {', '.join(LEVELS)}", param="level")
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:9]) <= KEPT):
        raise BadRequest(f"lines must be a number from 1 to {KEPT}", param="lines")
    listed = call.site.model(call.key, query["model"]) if query.get("model") else None
    about = {listed.id, listed.model.preset.id} if listed is not None else set()

    def wanted(line: Line) -> bool:
        return LEVELS.get(line.level, len(LEVELS)) >= LEVELS[level] and (not about or any(map(line.is_about, about)))

    return wanted, int(text)


async def requests(call: ApiCall) -> Result:
    """GET /router/requests: running requests and the last that ended. Raises ModelNotFound."""
    name = call.query.get("model")
    model = call.site.model(call.key, name).id if name else None
    return {"schema": 1, **call.services.requests.told(may_see=lambda id: model is None or id == model)}


async def cancel(call: ApiCall) -> Result:
    """DELETE /router/requests/{request}: end its running requests with an error. Raises RequestNotFound."""
    return {"success": True, "cancelled": call.services.requests.cancel(call.path["request"])}


async def events(call: ApiCall) -> Result:
    """GET /router/events: every event, numbered, as it comes; `event:` names its kind."""
    return Frames(_events(call.site, call.last_event_id))


async def _events(site: Site, last_id: int | None) -> AsyncIterator[bytes]:
    """Start with the whole state, unless all events after `last_id` are still known."""
    after = site.events.last_id
    if last_id is not None and site.events.since(last_id) is not None:
        after = last_id
    else:
        yield _frame(after, "snapshot", _state(site))
    told = _with_pings(
        site.events.follow(after),
        lambda event: _frame(event.id, event.kind, {"model": event.model, "time": event.time, **event.data}),
    )
    async with aclosing(told):
        async for frame in told:
            yield frame


async def _with_pings(following: AsyncIterator[T], frame: Callable[[T], bytes]) -> AsyncGenerator[bytes]:
    """What comes, framed, and a comment when nothing has come for a while."""
    async with aclosing(with_pauses(following)) as told:
        async for each in told:
            if framed := PING if each is None else frame(each):
                yield framed


def _frame(id: int, kind: str, body: dict[str, Any]) -> bytes:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), default=str)
    return f"id: {id}\nevent: {kind}\ndata: {text}\n\n".encode()


__all__ = ["cancel", "config", "events", "follow_logs", "logs", "pin", "plan", "reload", "requests", "state"]
