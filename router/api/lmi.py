"""LMI's API: GET /ping, and the management of models below /lmi.

Registrations and worker counts set by these calls are not written to disk. They are lost when the router exits or the
model is removed.
"""

import asyncio
import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from router.api.call import ApiCall, ApiResult, JsonReply, flag, number
from router.api.status import wall_clock
from router.config import ini, serving_properties
from router.config.api_keys import ApiKey
from router.config.presets import REPO, Preset, hub_name, repository
from router.config.resolve import REGISTERED
from router.config.settings import Settings
from router.errors import ApiError, BadRequest, DoesNotFit, Draining, ModelNotFound, PresetInvalid
from router.fleet.model import Model
from router.fleet.worker import State, Worker
from router.memory import checkpoint_facts
from router.registry.registry import Registry
from router.registry.shared_workers import ListedModel
from worker.protocol.routes import ignored_fields

T = TypeVar("T")
MAX_WORKERS, MAX_NUMBER = 1000, 1_000_000  # of workers of one model, and of other numbers; guesses
MAX_PAGE = 100  # entries of one page, as in LMI
_DEVICE = re.compile(r"cpu|-1|(?:gpu|cuda:)?[0-9]{1,3}")
_ENGINES = frozenset({"", "python", "mpi", "transformers"})
NO_EFFECT = ("batch_size", "max_batch_delay")  # parameters without a meaning for continuous batching


async def ping(call: ApiCall) -> ApiResult:
    """GET /ping: healthy, or pending while models of `load-on-startup` load; 500 if one of them has failed."""
    registry = call.registry
    for id in sorted(registry.startup_pending):
        listed = registry.shared_workers.listed.get(id)
        if listed is not None and _has_failed(listed.model):
            # Without name and error, because this route is public.
            message = "a model of load-on-startup has failed; see GET /models for the reason"
            return JsonReply({"code": 500, "type": "InternalServerException", "message": message}, status=500)
    return {"status": "pending" if registry.startup_pending else "healthy"}


# Versions and headers


def name_in_path(registry: Registry, key: ApiKey, path: str, version: str = "") -> str:
    """The name of the model that a path of LMI's API stands for: NAME or NAME/VERSION. Names may contain slashes.

    Version V of model N is the model N:V, or N itself if V is its revision on the hub. `version`: that of the query.
    Raises ModelNotFound if the model has no such version.
    """

    def is_known(name: str) -> bool:
        try:
            registry.model(key, name)
        except ModelNotFound:
            return False
        return True

    name = path
    if not version and not is_known(path):
        before, _, behind = path.rpartition("/")
        if is_known(before):
            name, version = before, behind
    if not version or is_known(id := f"{name}:{version}"):
        return id if version else name
    preset = registry.model(key, name).preset
    if preset.repo and preset.revision == version:
        return name
    raise ModelNotFound(
        f"model '{name}' has no version '{version[:100]}'; a version is a model of the name {name}:VERSION",
        param="model_version",
    )


def check_headers(headers: Mapping[str, str]) -> None:
    """Raise BadRequest for an asynchronous request: results are not stored. `headers` by lower-case name."""
    custom = headers.get("x-amzn-sagemaker-custom-attributes", "")
    given = dict(pair.strip().partition("=")[::2] for pair in custom.lower().split(",") if pair)
    asynchronous = headers.get("x-synchronous", given.get("x-synchronous", "true")).strip().casefold() != "true"
    if asynchronous or "x-starting-token" in headers or "x-starting-token" in given:
        name = "x-synchronous" if asynchronous else "x-starting-token"
        raise BadRequest(
            f"{name}: results are not stored for later calls; leave the header out, and read the answer as it is"
            ' generated with "stream": true',
            param=name,
        )


def target_model(headers: Mapping[str, str]) -> str:
    """The model that SageMaker's header names; empty without it. There it is the name of an archive."""
    return headers.get("x-amzn-sagemaker-target-model", "").removesuffix(".tar.gz")


# Registering and scaling


async def register(call: ApiCall) -> ApiResult:
    """POST /lmi/models: register a model. Responds when its workers are ready, or at once with `synchronous=false`.

    A model whose load fails while the call waits is removed again. Raises BadRequest, Duplicate, and the error of the
    load.
    """
    registry, query = call.registry, call.query
    source, name = await asyncio.to_thread(_source, registry, query.get("url", ""))
    name = query.get("model_name") or name
    if not ini.is_name(name):
        raise BadRequest(f"model_name: '{name[:100]}' cannot name a model", param="model_name")
    if version := query.get("model_version"):
        name = f"{name}:{version}"
        if not ini.is_name(name):
            raise BadRequest("model_version cannot be part of a model's name", param="model_version")
    if query.get("engine", "").casefold() not in _ENGINES:
        raise BadRequest(f"engine: {query['engine'][:40]} is not offered; leave it out", param="engine")
    count = _worker_count(query)
    lines = [f"[{name}]", source]
    if {"min_worker", "max_worker"} & query.keys():  # else a serving.properties in the folder decides
        lines.append("replicas = {}-{}".format(*count.replicas))
    if device := query.get("device", "").casefold():
        if not _DEVICE.fullmatch(device):
            raise BadRequest(f"device: {device[:40]} is not a device; write cpu, or gpu0, gpu1, ...", param="device")
        lines.append(f"device = {'cpu' if device == '-1' else device}")
    for field, key, low in (("job_queue_size", "queue-size", 1), ("max_idle_time", "replica-idle-seconds", 0)):
        if field in query:
            lines.append(f"{key} = {number(query, field, low, MAX_NUMBER, 0)}")
    waits = flag(query, "synchronous") is not False
    section = "\n".join(lines) + "\n"
    try:
        await registry.add(name, section=section)
    except PresetInvalid as invalid:
        # A problem in the section is the caller's fault; one in a file is not.
        if any(row["file"] == REGISTERED for row in invalid.extra["errors"]):
            raise BadRequest(invalid.message) from None
        raise
    if waits:
        try:
            await _wait_for_workers(registry, name, count)
        except ApiError:
            if registry.overrides.sections.get(name) is section:  # else another call has replaced it
                registry.remove(name, "requested")
            raise
        return _managed(call, f'Model "{name}" registered.')
    _begin(registry, name, count)
    return _managed(call, f'Model "{name}" registration scheduled.', status=202)


async def scale(call: ApiCall) -> ApiResult:
    """PUT /lmi/models/{id}: set the number of workers. Responds when they run, or at once with `synchronous=false`.

    Raises ModelNotFound, BadRequest, the error of a load, and DoesNotFit if the least number does not fit into memory.
    Then as many workers run as fit, and more start when memory becomes free.
    """
    registry, query = call.registry, call.query
    id = registry.model(call.key, name_in_path(registry, call.key, call.path["id"])).id
    count = _worker_count(query)
    waits = flag(query, "synchronous") is not False
    registry.scale(id, count.replicas)
    model = registry.shared_workers.find(id).model
    leaving = model.workers if not count.most else model.all_open[count.most :]
    for worker in list(leaving):
        registry.fleet.retire(worker, "requested", drain=registry.fleet.settings.drain_timeout)
    if not waits:
        _begin(registry, id, count)
        return _managed(call, f'Model "{id}" scaling scheduled.', status=202)
    await _wait_for_workers(registry, id, count)
    configuration = f"New Worker configuration min workers:{count.least} max workers:{count.most}"
    return _managed(call, f'Workflow "{id}" worker scaled. {configuration}')


def _managed(call: ApiCall, message: str, *, status: int = 200) -> JsonReply:
    """The reply to a management call, with a header that names the parameters that had no effect."""
    ignored = ignored_fields(name for name in NO_EFFECT if name in call.query)
    return JsonReply({"status": message}, status=status, headers=ignored)


async def unregister(call: ApiCall) -> ApiResult:
    """DELETE /lmi/models/{id}: remove a registered model; running requests finish. Raises ModelNotFound, BadRequest."""
    registry = call.registry
    id = registry.whole_model(call.key, name_in_path(registry, call.key, call.path["id"])).id
    if id not in registry.overrides.sections:
        raise BadRequest(f"model '{id}' was not registered by a call; remove it from its file or folder", param="id")
    registry.remove(id, "requested")
    return {"status": f'Model or workflow "{id}" unregistered'}


@dataclass(frozen=True, slots=True)
class _WorkerCount:
    """The requested least and most workers of a model."""

    least: int
    most: int

    @property
    def replicas(self) -> tuple[int, int]:
        """The value for the preset, which allows no 0: requests decide whether the first worker runs."""
        return max(1, self.least), max(1, self.most)


def _worker_count(query: Mapping[str, str]) -> _WorkerCount:
    low = number(query, "min_worker", 0, MAX_WORKERS, 1)
    high = number(query, "max_worker", 0, MAX_WORKERS, low)
    if high < low:
        raise BadRequest(f"max_worker {high} is less than min_worker {low}", param="max_worker")
    return _WorkerCount(low, high)


def _source(registry: Registry, url: str) -> tuple[str, str]:
    """The line of an INI section and the default name of the model at `url`.

    Raises BadRequest. Only the hub and folders that the administrator allowed can be registered.
    """
    if not url:
        raise BadRequest("Parameter url is required.", param="url")
    path = url.removeprefix("file://")
    if path.startswith("/"):
        real = allowed_folder(path, registry.settings, "url")
        is_model = any(os.path.isfile(real / name) for name in ("config.json", serving_properties.FILE))
        if not is_model or not str(real).isprintable():
            message = f"url: {path[:200]} is not a model folder: it has no config.json and no {serving_properties.FILE}"
            raise BadRequest(message, param="url")
        return f"model = {json.dumps(str(real))}", real.name
    repo, revision = hub_source(url, "url", "a model")
    return f"hf-repo = {repo}:{revision}", repo.rpartition("/")[2]


def allowed_folder(path: str, settings: Settings, param: str, *further: str) -> Path:
    """The folder `path`, if it is inside one that calls may register: --models-dir, the hub's cache, one of
    --registration-dirs, or `further`. Raises BadRequest for others, so that a call cannot read them."""
    try:
        real = Path(path).resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, or characters that no path has
        raise BadRequest(f"{param}: {path[:200]!a} is not a path of a folder", param=param) from None
    roots = (settings.models_dir, settings.hub_cache, *settings.registration_dirs, *further)
    if any(Path(root).resolve() in real.parents for root in roots if root):
        return real
    among = "adapters-dir, --models-dir" if further else "--models-dir"
    raise BadRequest(
        f"{param}: only folders inside {among}, the hub cache and --registration-dirs can be registered", param=param
    )


def hub_source(text: str, param: str, kind: str) -> tuple[str, str]:
    """The repository and the revision on the hub that a parameter names. Raises BadRequest."""
    try:
        return repository(hub_name(text), REPO)
    except ValueError as error:
        message = f"{param}: {error}; name {kind} of the hub as org/name[:revision], or a folder"
        raise BadRequest(message, param=param) from None


def _begin(registry: Registry, id: str, count: _WorkerCount) -> None:
    """Begin to load the model without waiting. Clients follow it by events and the list of models."""
    model = registry.shared_workers.find(id).model
    model.no_replica_before = 0.0
    if count.least:
        registry.fleet.ensure_loaded(model.preset.id)


async def _wait_for_workers(registry: Registry, id: str, count: _WorkerCount) -> None:
    """Wait until the least number of workers is ready.

    Raises DoesNotFit if memory is too small, Draining if the model is unloaded meanwhile, or a load's error.
    """
    model = registry.shared_workers.find(id).model
    model.no_replica_before = 0.0
    if not count.least:
        return
    await registry.shared_workers.load(id)
    mark = registry.events.last_id
    if _start_next(registry, id, model, count.least):
        return
    async for event in registry.events.follow(mark):
        if event.kind in ("state", "plan", "config") and _start_next(registry, id, model, count.least):
            return


def _start_next(registry: Registry, id: str, model: Model, least: int) -> bool:
    """Start one more worker, unless one is starting. Return True if none is left to start: `least` are ready, or
    another call or a reload has changed the model or its least number. Raises DoesNotFit, Draining."""
    listed = registry.shared_workers.listed.get(id)
    is_changed = listed is None or listed.model is not model or model.preset.replicas[0] < least
    if is_changed or _ready(model) >= least:
        return True
    if not model.all_open:
        raise Draining(f"{id} was unloaded while its workers were starting; try again", retry_after=1)
    if any(worker.state is not State.READY for worker in model.all_open):
        return False
    # The fleet sets `no_replica_before` when it has tried to start an extra worker and found no room.
    if registry.fleet.now() < model.no_replica_before:
        raise DoesNotFit(
            f"{id} runs {_ready(model)} of {least} workers; there is no memory for more. They start when"
            " memory becomes free"
        )
    registry.fleet.ensure_loaded(model.preset.id)  # counts as a use: a model without one gets no extra worker
    return False


def _ready(model: Model) -> int:
    return sum(worker.state is State.READY for worker in model.all_open)


# Describing


async def list_models(call: ApiCall) -> ApiResult:
    """GET /lmi/models: a page of the models, sorted by name."""
    admin = call.registry.access.is_admin(call.key)
    models, next_page = _page_of_models(call)
    rows = [
        {"modelName": listed.id, "modelUrl": _url(listed.preset, admin=admin), "status": _status(listed.model)}
        for listed in models
    ]
    return {"models": rows, **next_page}


async def list_workflows(call: ApiCall) -> ApiResult:
    """GET /lmi/workflows: a page of the models, each of which is a workflow of its own, sorted by name."""
    models, next_page = _page_of_models(call)
    return {"workflows": [{"workflowName": listed.id} for listed in models], **next_page}


def _page_of_models(call: ApiCall) -> tuple[Sequence[ListedModel], dict[str, str]]:
    return page(call.query, sorted(call.registry.visible(call.key), key=lambda listed: listed.id))


async def describe_model(call: ApiCall) -> ApiResult:
    """GET /lmi/models/{id}. Raises ModelNotFound."""
    registry, key = call.registry, call.key
    listed = registry.model(key, name_in_path(registry, key, call.path["id"]))
    preset, model = listed.preset, listed.model
    facts = await registry.snapshots.facts(preset)
    # The files may be only on the hub.
    batch = checkpoint_facts.rows(facts, preset) if facts is not None else preset.contexts
    shown = _status(model)
    groups: dict[tuple[str, int], list[Worker]] = defaultdict(list)
    for worker in model.workers:
        if worker.place and worker.ready_at is not None:
            index = worker.place[0].index
            groups["gpu" if index >= 0 else "cpu", max(-1, index)].append(worker)
    least, most = registry.overrides.replicas.get(preset.id, preset.replicas)
    if shown == "READY":
        shown = "Healthy" if _ready(model) >= least else "Unhealthy"
    return [
        {
            "workflowName": preset.id,
            "models": [
                {
                    "modelName": preset.id,
                    "modelUrl": _url(preset, admin=registry.access.is_admin(key)),
                    "batchSize": max((worker.rows for worker in model.workers), default=batch),
                    "maxBatchDelayMillis": 0,
                    "maxIdleSeconds": round(preset.replica_idle),
                    "queueSize": preset.queue_size,
                    "requestInQueue": sum(len(worker.leases) for worker in model.workers if worker.state < State.READY),
                    "status": shown,
                    "loadedAtStartup": preset.load_on_startup,
                    "workerGroups": [
                        {
                            "device": {"deviceType": kind, "deviceId": index},
                            "minWorkers": least,
                            "maxWorkers": most,
                            "workers": [_worker(registry, worker) for worker in workers],
                        }
                        for (kind, index), workers in groups.items()
                    ],
                }
            ],
        }
    ]


def _worker(registry: Registry, worker: Worker) -> dict[str, Any]:
    assert worker.ready_at is not None
    started = datetime.fromtimestamp(wall_clock(registry.fleet, worker.ready_at), UTC)
    serves = worker.state is State.READY and not worker.retired
    return {
        "id": worker.id,
        "startTime": started.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "status": "READY" if serves else "UNLOADING",
    }


def _status(model: Model) -> str:
    if any(worker.state is State.READY for worker in model.all_open):
        return "READY"
    return "FAILED" if _has_failed(model) and not model.all_open else "PENDING"


def _has_failed(model: Model) -> bool:
    """The last load has failed. A model that does not fit has no failure: its next request is planned again."""
    return model.failure is not None or (model.reason == DoesNotFit.reason and not model.all_open)


def _url(preset: Preset, *, admin: bool) -> str:
    if preset.repo:
        return preset.repo if preset.revision == "main" else f"{preset.repo}:{preset.revision}"
    if preset.demo:
        return f"demo:{preset.demo}"
    return preset.path if admin else preset.id


def page(query: Mapping[str, str], rows: Sequence[T]) -> tuple[Sequence[T], dict[str, str]]:
    """The page of `rows` that the query asks for, and the member that refers to the next page. Raises BadRequest."""
    limit, first = _page_number(query, "limit", MAX_PAGE), _page_number(query, "next_page_token", 0)
    end = first + (limit if 0 < limit <= MAX_PAGE else MAX_PAGE)
    return rows[first:end], {"nextPageToken": str(end)} if end < len(rows) else {}


def _page_number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not re.fullmatch(r"-?[0-9]{1,9}", text):
        raise BadRequest(f"{name} must be a number", param=name)
    return max(0, int(text))
