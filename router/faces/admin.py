"""The router's own plane, /router/*: state, plan, events, reload."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from router import __version__
from router.events import Event
from router.faces.llama_server import KEEP_ALIVE, pulse, status
from router.lifecycle import State
from router.site import Site


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
                "reserved": sum(worker.reserved.get(device.id, 0) for worker in fleet.workers()),
            }
            for device in fleet.devices
        ],
        "models": {id: status(fleet, model, admin=True) for id, model in fleet.models.items()},
        "workers": [
            {
                "id": worker.id,
                "model": worker.preset.id,
                "state": worker.state.name.lower(),
                "pid": worker.process.pid if worker.process is not None else None,
                "leases": len(worker.leases),
                "reserved": {str(device): size for device, size in worker.reserved.items()},
                "measured": {str(device): size for device, size in worker.measured.items()},
                "retired": worker.retired.is_set(),
                "steps": worker.pulse.steps if worker.pulse is not None else None,
                "pulse": pulse(worker),
            }
            for worker in fleet.workers()
        ],
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
    found = await site.fleet.preview(id)
    return {"schema": 1, "model": id, **found}


async def events(site: Site, last_id: int | None) -> AsyncIterator[bytes]:
    """Every event, numbered, as it comes; `event:` names its kind. Starts with the whole state."""
    after = site.events.last_id
    if last_id is not None and site.events.since(last_id) is not None:
        after = last_id
    else:
        yield _frame(after, "snapshot", state(site))
    following = site.events.follow(after).__aiter__()
    pending: asyncio.Future[Event] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(following))
            done, _ = await asyncio.wait({pending}, timeout=KEEP_ALIVE)
            if not done:
                yield b": ping\n\n"
                continue
            event, pending = pending.result(), None
            yield _frame(event.id, event.kind, {"model": event.model, "time": event.time, **event.data})
    finally:
        if pending is not None:
            pending.cancel()


def _frame(id: int, kind: str, body: dict[str, Any]) -> bytes:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), default=str)
    return f"id: {id}\nevent: {kind}\ndata: {text}\n\n".encode()


__all__ = ["events", "plan", "state"]
