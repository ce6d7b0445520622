"""The router's own plane, /router/*: state, plan, events, reload."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, TypeVar

from router import __version__
from router.access import ANYBODY
from router.errors import BadRequest
from router.faces.pings import PING, with_pauses
from router.faces.status import pulse, status_of
from router.lifecycle import State
from router.log import KEPT, Line
from router.requests import Requests
from router.settings import Key
from router.site import Site
from router.worker import figures
from router.written import effective

T = TypeVar("T")
LEVELS = {name: rank for rank, name in enumerate(("debug", "info", "warning", "error"))}


def state(site: Site) -> dict[str, Any]:
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
        "clerks": [figures(clerk) for clerk in site.clerks.alive],
        "sleeping": [
            {"model": holding.preset.id, "bytes": holding.wish.size, "held": holding.is_held}
            for holding in fleet.holdings
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


async def plan(site: Site, id: str) -> dict[str, Any]:
    """What loading `id` would do now: start where, evict whom, wait for whom, or why it cannot; changes nothing."""
    found = await site.members.preview(id)
    return {"schema": 1, "model": id, **found}


def pin(site: Site, key: Key, body: Mapping[str, Any]) -> dict[str, Any]:
    """POST /router/pin: from now on, until this router ends or is told otherwise. Raises ModelNotFound, BadRequest."""
    name, pinned = body.get("model"), body.get("pinned", True)
    if not isinstance(name, str) or not name:
        raise BadRequest("model name is missing from the request", reason="model_missing", param="model")
    if not isinstance(pinned, bool):
        raise BadRequest("pinned must be true or false", param="pinned")
    id = site.model(key, name).id
    site.pin(id, pinned=pinned)
    return {"success": True, "model": id, "pinned": pinned}


def config(site: Site, id: str) -> dict[str, Any]:
    """GET /router/config: every setting of a model, and where it comes from; secrets are masked."""
    rows = effective(site.members.find(id).preset)
    settings = [{"key": key, "value": value, "origin": origin} for key, value, origin in rows]
    if id in site.pinned:
        settings = [{**row, "origin": "/router/pin"} if row["key"] == "pin" else row for row in settings]
    return {"schema": 1, "model": id, "settings": settings}


def logs(site: Site, key: Key, query: Mapping[str, str]) -> dict[str, Any]:
    """GET /router/logs: the newest lines, the oldest of them first. Raises BadRequest, ModelNotFound."""
    wanted, count = _wanted(site, key, query)
    shown = [line for line in site.logs.lines if wanted(line)]
    return {"schema": 1, "lines": [asdict(line) for line in shown[-count:]]}


def follow_logs(site: Site, key: Key, query: Mapping[str, str], last_id: int | None) -> AsyncIterator[bytes]:
    """The newest lines, or those after `last_id`, and then each as it comes. Raises BadRequest, ModelNotFound."""
    wanted, count = _wanted(site, key, query)
    shown = [line.id for line in site.logs.lines if wanted(line)][-count:]
    after = shown[0] - 1 if shown else max((line.id for line in site.logs.lines), default=0)
    if last_id is not None and any(line.id == last_id for line in site.logs.lines):
        after = last_id
    return _with_pings(
        site.logs.follow(after), lambda line: _frame(line.id, "line", asdict(line)) if wanted(line) else b""
    )


def _wanted(site: Site, key: Key, query: Mapping[str, str]) -> tuple[Callable[[Line], bool], int]:
    """Which lines a query asks for, and how many at most. Raises BadRequest, ModelNotFound."""
    level, text = query.get("level", "debug").casefold(), query.get("lines", "200")
    if level not in LEVELS:
        raise BadRequest(f"level must be one of {', '.join(LEVELS)}", param="level")
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:9]) <= KEPT):
        raise BadRequest(f"lines must be a number from 1 to {KEPT}", param="lines")
    listed = site.model(key, query["model"]) if query.get("model") else None
    about = {listed.id, listed.model.preset.id} if listed is not None else set()

    def wanted(line: Line) -> bool:
        return LEVELS.get(line.level, len(LEVELS)) >= LEVELS[level] and (not about or any(map(line.is_about, about)))

    return wanted, int(text)


def requests(site: Site, known: Requests, key: Key, query: Mapping[str, str]) -> dict[str, Any]:
    """GET /router/requests: those that run and the last that ended. Raises ModelNotFound."""
    model = site.model(key, query["model"]).id if query.get("model") else None
    return {"schema": 1, **known.told(may_see=lambda id: model is None or id == model)}


async def events(site: Site, last_id: int | None) -> AsyncIterator[bytes]:
    """Every event, numbered, as it comes; `event:` names its kind. Starts with the whole state."""
    after = site.events.last_id
    if last_id is not None and site.events.since(last_id) is not None:
        after = last_id
    else:
        yield _frame(after, "snapshot", state(site))
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


__all__ = ["config", "events", "logs", "pin", "plan", "requests", "state"]
