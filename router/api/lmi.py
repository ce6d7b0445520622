"""What LMI's API says without tokens: whether this server is well, and the management of models, below /lmi.

Registering lists a model for as long as this router runs; nothing of it is written to a disk. Scaling changes how many
workers a model keeps, in the same way: by a file's words again after a restart.
"""

import asyncio
import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from router.api.call import ApiCall, Reply, Result
from router.api.status import wall_clock
from router.config import ini
from router.config.presets import Preset, repository
from router.config.resolve import REGISTERED
from router.errors import ApiError, BadRequest, DoesNotFit, PresetInvalid
from router.fleet.model import Model
from router.fleet.worker import State, Worker
from router.registry.registry import Site, flag
from worker.protocol.headers import ignored_fields

MOST = 1000
"""Workers of one model."""
LONGEST_LIST = 100
_DEVICE = re.compile(r"cpu|-1|(?:gpu|cuda:)?[0-9]{1,3}")
_ENGINES = frozenset({"", "python", "mpi", "transformers"})
NO_EFFECT = ("batch_size", "max_batch_delay")
"""What has no meaning where batches are continuous."""


async def ping(call: ApiCall) -> Result:
    """GET /ping: well, or still loading; 500 while a model of `load-on-startup` is failed."""
    site = call.site
    for id in sorted(site.awaited):
        listed = site.members.listed.get(id)
        if listed is not None and listed.model.failure is not None:
            told = "a model of load-on-startup has failed; GET /models says which and why"  # to anybody, so no more
            return Reply({"code": 500, "type": "InternalServerException", "message": told}, status=500)
    return {"status": "pending" if site.awaited else "healthy"}


# Registering and scaling


async def register(call: ApiCall) -> Result:
    """POST /lmi/models: with `synchronous` (unless told otherwise) once its workers are ready.

    A model whose load fails while somebody waits for it is not listed any more. Raises BadRequest, Duplicate, and what
    its load raises.
    """
    site, query = call.site, call.query
    source, name = await asyncio.to_thread(_source, site, query.get("url", ""))
    name = query.get("model_name") or name
    if not ini.is_name(name):
        raise BadRequest(f"model_name: '{name[:100]}' cannot name a model", param="model_name")
    if query.get("model_version"):
        raise BadRequest("versions are not kept apart: register it under another model_name", param="model_version")
    if query.get("engine", "").casefold() not in _ENGINES:
        raise BadRequest(f"engine: {query['engine'][:40]} is not offered; leave it out", param="engine")
    count = _span(query, least=1)
    lines = [f"[{name}]", source, f"replicas = {count.kept}"]
    if device := query.get("device", "").casefold():
        if not _DEVICE.fullmatch(device):
            raise BadRequest(f"device: {device[:40]} is none; write cpu, or gpu0 and the like", param="device")
        lines.append(f"device = {'cpu' if device == '-1' else device}")
    for field, key, low in (("job_queue_size", "queue-size", 1), ("max_idle_time", "replica-idle-seconds", 0)):
        if field in query:
            lines.append(f"{key} = {_number(query, field, low)}")
    waits = flag(query, "synchronous") is not False
    try:
        await site.add(name, section="\n".join(lines) + "\n")
    except PresetInvalid as wrong:
        if any(row["file"] == REGISTERED for row in wrong.extra["errors"]):
            raise BadRequest(wrong.message) from None
        raise
    if waits:
        try:
            await _keep(site, name, count)
        except ApiError:
            if name in site.registered:
                site.remove(name, "requested")
            raise
        return _managed(call, f'Model "{name}" registered.')
    _begin(site, name, count)
    return _managed(call, f'Model "{name}" registration scheduled.', status=202)


async def scale(call: ApiCall) -> Result:
    """PUT /lmi/models/{id}: with `synchronous` (unless told otherwise) once it is so.

    Raises ModelNotFound, BadRequest, what a load raises, and DoesNotFit if memory is too short for the least number:
    then as many run as fit, and more begin where memory becomes free.
    """
    site, query = call.site, call.query
    id = site.model(call.key, call.path["id"]).id
    count = _span(query, least=1)
    waits = flag(query, "synchronous") is not False
    site.scale(id, count.replicas)
    model = site.members.find(id).model
    leaving = model.workers if not count.most else model.all_open[count.most :]
    for worker in list(leaving):
        site.fleet.retire(worker, "requested", drain=site.fleet.limits.drain_timeout)
    if not waits:
        _begin(site, id, count)
        return _managed(call, f'Model "{id}" scaling scheduled.', status=202)
    await _keep(site, id, count)
    told = f"New Worker configuration min workers:{count.least} max workers:{count.most}"
    return _managed(call, f'Workflow "{id}" worker scaled. {told}')


def _managed(call: ApiCall, message: str, *, status: int = 200) -> Reply:
    """The reply to a management call, with a header that names the parameters that had no effect."""
    ignored = ignored_fields(name for name in NO_EFFECT if name in call.query)
    return Reply({"status": message}, status=status, headers=ignored)


async def unregister(call: ApiCall) -> Result:
    """DELETE /lmi/models/{id}: it is listed no longer; running requests end. Raises ModelNotFound, BadRequest."""
    site = call.site
    id = site.model(call.key, call.path["id"]).id
    if id not in site.registered:
        raise BadRequest(f"model '{id}' was not registered by a call: take it out of its file or folder", param="id")
    site.remove(id, "requested")
    return {"status": f'Model or workflow "{id}" unregistered'}


@dataclass(frozen=True, slots=True)
class _Count:
    """Workers that a model is to have: at least, and at most."""

    least: int
    most: int

    @property
    def replicas(self) -> tuple[int, int]:
        """As a preset says it, where one worker is the least: whether there is any is a matter of requests."""
        return max(1, self.least), max(1, self.most)

    @property
    def kept(self) -> str:
        return "-".join(map(str, self.replicas))


def _span(query: Mapping[str, str], *, least: int) -> _Count:
    low = _number(query, "min_worker", 0, least)
    high = _number(query, "max_worker", 0, low)
    if high < low:
        raise BadRequest(f"max_worker {high} is less than min_worker {low}", param="max_worker")
    return _Count(low, high)


def _number(query: Mapping[str, str], name: str, low: int, default: int = 0) -> int:
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and low <= int(text[:9]) <= MOST * 1000):
        raise BadRequest(f"{name} must be a number from {low} to {MOST * 1000}", param=name)
    if name.endswith("_worker") and int(text) > MOST:
        raise BadRequest(f"{name} must be at most {MOST}", param=name)
    return int(text)


def _source(site: Site, url: str) -> tuple[str, str]:
    """(line of a section, name) of what a URL means. Raises BadRequest: no call names a place beside the hub, its cache
    and --models-dir."""
    if not url:
        raise BadRequest("Parameter url is required.", param="url")
    path = url.removeprefix("file://")
    if path.startswith("/"):
        real = Path(path).resolve()
        roots = [Path(root).resolve() for root in (site.settings.models_dir, site.settings.hub_cache) if root]
        if not any(root in real.parents for root in roots):
            raise BadRequest("url: only folders inside --models-dir and the hub cache can be registered", param="url")
        if not os.path.isfile(real / "config.json") or not str(real).isprintable():
            raise BadRequest(f"url: {path[:200]} is no folder of a model, it has no config.json", param="url")
        return f"model = {json.dumps(str(real))}", real.name
    text = url.removeprefix("https://huggingface.co/").removeprefix("hf://")
    try:
        repo, revision = repository(text)
    except ValueError as error:
        message = f"url: {error}; name a model of the hub as org/name[:revision], or a folder"
        raise BadRequest(message, param="url") from None
    return f"hf-repo = {repo}:{revision}", repo.rpartition("/")[2]


def _begin(site: Site, id: str, count: _Count) -> None:
    """Let it have a worker, without waiting: of what becomes of it the events and the list tell."""
    model = site.members.find(id).model
    model.no_replica_before = 0.0
    if count.least:
        site.fleet.wanted(model.preset.id)


async def _keep(site: Site, id: str, count: _Count) -> None:
    """Returns once `id` has its least number of workers. Raises DoesNotFit if memory holds fewer, and what loads do."""
    model = site.members.find(id).model
    model.no_replica_before = 0.0
    if not count.least:
        return
    mark = site.events.last_id
    await site.members.wanted(id)
    if _ready(model) >= count.least:
        return
    async for event in site.events.follow(mark):
        if event.kind not in ("state", "plan", "config"):
            continue
        listed = site.members.listed.get(id)
        if _ready(model) >= count.least or listed is None or listed.model is not model:
            return
        if all(worker.state is State.READY for worker in model.all_open) and site.fleet.now() < model.no_replica_before:
            raise DoesNotFit(
                f"{id} runs {_ready(model)} of {count.least} workers: there is no memory for more; further ones begin"
                " when there is"
            )


def _ready(model: Model) -> int:
    return sum(worker.state is State.READY for worker in model.all_open)


# Looking


async def listed(call: ApiCall) -> Result:
    """GET /lmi/models: a page of them, by name."""
    site, key, query = call.site, call.key, call.query
    limit = page(query, "limit", LONGEST_LIST)
    limit = limit if 0 < limit <= LONGEST_LIST else LONGEST_LIST
    first = page(query, "next_page_token", 0)
    models = sorted(site.visible(key), key=lambda listed: listed.id)
    shown = models[first : first + limit]
    admin = site.access.is_admin(key)
    told: dict[str, Any] = {
        "models": [
            {"modelName": each.id, "modelUrl": _url(each.preset, admin=admin), "status": _status(each.model)}
            for each in shown
        ]
    }
    if first + limit < len(models):
        told["nextPageToken"] = str(first + limit)
    return told


async def described(call: ApiCall) -> Result:
    """GET /lmi/models/{id}. Raises ModelNotFound."""
    site, key = call.site, call.key
    listed = site.model(key, call.path["id"])
    preset, model = listed.preset, listed.model
    shown = _status(model)
    groups: dict[tuple[str, int], list[Worker]] = defaultdict(list)
    for worker in model.workers:
        if worker.place and worker.ready_at is not None:
            index = worker.place[0].index
            groups["gpu" if index >= 0 else "cpu", max(-1, index)].append(worker)
    least, most = site.scaled.get(preset.id, preset.replicas)
    if shown == "READY":
        shown = "Healthy" if _ready(model) >= least else "Unhealthy"
    return [
        {
            "workflowName": preset.id,
            "models": [
                {
                    "modelName": preset.id,
                    "modelUrl": _url(preset, admin=site.access.is_admin(key)),
                    "batchSize": preset.parallel,
                    "maxBatchDelayMillis": 0,
                    "maxIdleSeconds": round(preset.replica_idle),
                    "queueSize": preset.queue_size,
                    "requestInQueue": sum(len(each.leases) for each in model.workers if each.state < State.READY),
                    "status": shown,
                    "loadedAtStartup": preset.load_on_startup,
                    "workerGroups": [
                        {
                            "device": {"deviceType": kind, "deviceId": index},
                            "minWorkers": least,
                            "maxWorkers": most,
                            "workers": [_worker(site, worker) for worker in workers],
                        }
                        for (kind, index), workers in groups.items()
                    ],
                }
            ],
        }
    ]


def _worker(site: Site, worker: Worker) -> dict[str, Any]:
    assert worker.ready_at is not None
    started = datetime.fromtimestamp(wall_clock(site.fleet, worker.ready_at), UTC)
    serves = worker.state is State.READY and not worker.retired.is_set()
    return {
        "id": worker.id,
        "startTime": started.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "status": "READY" if serves else "UNLOADING",
    }


def _status(model: Model) -> str:
    if any(worker.state is State.READY for worker in model.all_open):
        return "READY"
    return "FAILED" if model.failure is not None and not model.all_open else "PENDING"


def _url(preset: Preset, *, admin: bool) -> str:
    if preset.repo:
        return preset.repo if preset.revision == "main" else f"{preset.repo}:{preset.revision}"
    if preset.demo:
        return f"demo:{preset.demo}"
    return preset.path if admin else preset.id


def page(query: Mapping[str, str], name: str, default: int) -> int:
    """A number of the query that says where a page begins, or how long it is. Raises BadRequest."""
    text = query.get(name, str(default))
    if not re.fullmatch(r"-?[0-9]{1,9}", text):
        raise BadRequest(f"{name} must be a number", param=name)
    return max(0, int(text))


__all__ = ["NO_EFFECT", "described", "listed", "page", "ping", "register", "scale", "unregister"]
