"""LMI's API for the LoRA adapters of one model: register, update, list, describe, unregister.

The router keeps adapters registered by a call in memory and sends them to each worker of the model. They are lost when
the router exits or the model is removed. Adapters of a preset or of its adapter folder cannot be changed by these
calls.
"""

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from router.api.call import ApiCall, ApiResult, flag
from router.api.lmi import allowed_folder, hub_source, page
from router.config.api_keys import ApiKey
from router.config.presets import ADAPTER_NAME, HUB, Preset
from router.errors import ApiError, BadRequest, DoesNotFit, Duplicate, LoadFailed
from router.fleet.worker import State
from router.fleet.worker_argv import program_of
from router.launch.interface import WorkerLost
from router.registry.overrides import RegisteredAdapter
from router.registry.registry import Registry
from router.registry.shared_workers import send_adapters
from router.store.catalogue import missing_adapter
from worker.protocol.argv import AdapterSource


async def register(call: ApiCall) -> ApiResult:
    """POST .../adapters: register an adapter.

    With `preload`, the default, the response comes after ready workers have read it, and reports their problems. Raises
    BadRequest, Duplicate, DoesNotFit if no slot is left for it, LoadFailed if it cannot be downloaded.
    """
    registry, id, query = call.registry, call.model_id(), call.query
    preset = _enabled(registry, id)
    name, src = query.get("name", ""), query.get("src", "")
    if not ADAPTER_NAME.fullmatch(name):
        raise BadRequest("name is required: letters, digits, dots, dashes and underscores", param="name")
    if not src:
        raise BadRequest("src is required: a folder, or org/name of the hub", param="src")
    _must_be_new(preset, name)
    pinned, preload = bool(flag(query, "pin")), _preloads(query)
    path = await _folder(registry, preset, src)
    _must_be_new(
        registry.shared_workers.find(id).preset, name
    )  # another call may have registered it during the download
    registered = RegisteredAdapter(src, AdapterSource(name=name, path=path, pinned=pinned))
    await _put(registry, id, name, registered, preload=preload)
    return {"status": f"Adapter {name} registered"}


async def update(call: ApiCall) -> ApiResult:
    """POST .../adapters/{adapter}/update: change its source, or pin or unpin it.

    Raises the errors of `register`, and ModelNotFound.
    """
    registry, id, name, query = call.registry, call.model_id(), call.path["adapter"], call.query
    before = _registered(registry, id, name)
    pinned, preload = flag(query, "pin"), _preloads(query)
    src = query.get("src") or before.src
    path = await _folder(registry, _enabled(registry, id), src) if src != before.src else before.source.path
    before = _registered(registry, id, name)  # another call may have pinned or removed it during the download
    source = AdapterSource(name=name, path=path, pinned=before.source.pinned if pinned is None else pinned)
    await _put(registry, id, name, RegisteredAdapter(src, source), preload=preload)
    return {"status": f"Adapter {name} updated"}


async def unregister(call: ApiCall) -> ApiResult:
    """DELETE .../adapters/{adapter}: remove an adapter; running requests keep it. Raises ModelNotFound."""
    registry, id, name = call.registry, call.model_id(), call.path["adapter"]
    _registered(registry, id, name)
    registry.set_adapter(id, name, None)
    await _send_to_workers(registry, id)
    return {"status": f"Adapter {name} unregistered"}


async def list_adapters(call: ApiCall) -> ApiResult:
    """GET .../adapters: a page of the adapters, in the order of registration."""
    registry, id = call.registry, call.model_id()
    adapters, next_page = page(call.query, registry.shared_workers.find(id).preset.adapters)
    return {"adapters": [_row(registry, call.key, id, source) for source in adapters], **next_page}


async def describe_adapter(call: ApiCall) -> ApiResult:
    """GET .../adapters/{adapter}: a list with this adapter. Raises ModelNotFound."""
    registry, key, id, name = call.registry, call.key, call.model_id(), call.path["adapter"]
    registry.check_adapter(id, name)
    return [
        _row(registry, key, id, source)
        for source in registry.shared_workers.find(id).preset.adapters
        if source.name == name
    ]


def _row(registry: Registry, key: ApiKey, id: str, source: AdapterSource) -> dict[str, Any]:
    registered = registry.overrides.adapters.get(id, {}).get(source.name)
    src = registered.src if registered is not None else source.path.removeprefix(HUB)
    is_shown = not src.startswith("/") or registry.access.is_admin(key)
    return {"name": source.name, "src": src if is_shown else source.name, "pin": source.pinned}


def _preloads(query: Mapping[str, str]) -> bool:
    """Raises BadRequest for a pinned adapter without preload, as LMI does: a pinned one is always in memory."""
    preload = flag(query, "preload") is not False
    if flag(query, "pin") and not preload:
        raise BadRequest("preload=false and pin=true exclude each other; leave preload out", param="preload")
    return preload


def _enabled(registry: Registry, id: str) -> Preset:
    """The model's preset. Raises BadRequest if no memory is kept for adapters."""
    preset = registry.shared_workers.find(id).preset
    if not preset.adapter_slots:
        raise BadRequest(f"model '{id}' has no memory for adapters; set enable-lora = on in its preset")
    return preset


def _registered(registry: Registry, id: str, name: str) -> RegisteredAdapter:
    """The registered adapter. Raises ModelNotFound, BadRequest if it was not registered by a call."""
    registry.check_adapter(id, name)
    registered = registry.overrides.adapters.get(id, {}).get(name)
    if registered is None:
        raise BadRequest(
            f"adapter '{name}' belongs to the preset of {id} or to its adapter folder; change its files there, then"
            " POST /router/reload"
        )
    return registered


def _must_be_new(preset: Preset, name: str) -> None:
    if any(source.name == name for source in preset.adapters):
        raise Duplicate(f"{preset.id} already has an adapter '{name}'; update it, or choose another name", param="name")


async def _put(registry: Registry, id: str, name: str, registered: RegisteredAdapter, *, preload: bool) -> None:
    """Register or replace an adapter. With `preload` send it to ready workers; if one cannot use it, undo the change.

    Raises DoesNotFit, BadRequest.
    """
    preset = registry.shared_workers.find(id).preset
    others = [source for source in preset.adapters if source.name != name]
    pinned = registered.source.pinned + sum(source.pinned for source in others)
    unpinned = len(others) + 1 - pinned  # they need at least one slot that no pinned adapter occupies
    if pinned > preset.adapter_slots or (pinned == preset.adapter_slots and unpinned):
        raise DoesNotFit(
            f"{id} has memory for {preset.adapter_slots} adapters; with this one {pinned} would be pinned, which leaves"
            f" no slot for {unpinned} others; raise max-loras"
        )
    before = registry.overrides.adapters.get(id, {}).get(name)
    registry.set_adapter(id, name, registered)
    if not preload:
        return
    problems = await _send_to_workers(registry, id)
    # Undo it unless another call has replaced it meanwhile.
    if name in problems and registry.overrides.adapters.get(id, {}).get(name) is registered:
        registry.set_adapter(id, name, before)
        await _send_to_workers(registry, id)
        raise BadRequest(f"adapter '{name}' cannot be used: {problems[name]}", param="src")


async def _send_to_workers(registry: Registry, id: str) -> dict[str, str]:
    """Send the adapters to all ready workers. After an error the worker receives them before its next request."""
    problems: dict[str, str] = {}
    for worker in registry.shared_workers.find(id).model.all_open:
        if worker.state is State.READY:
            try:
                problems |= await send_adapters(worker, registry.files)
            except ApiError:
                continue
    return problems


async def _folder(registry: Registry, preset: Preset, src: str) -> str:
    """The folder with the files of `src`, downloaded if necessary. Raises BadRequest, LoadFailed.

    Only the hub and folders that the administrator allowed can be registered.
    """
    path = src.removeprefix("file://")
    if path.startswith("/"):
        real = await asyncio.to_thread(allowed_folder, path, registry.settings, "src", preset.adapters_dir)
        await asyncio.to_thread(_check, real, preset)
        return str(real)
    repo, revision = hub_source(src, "src", "an adapter")
    alone = replace(preset, adapters=(AdapterSource(name="", path=f"{HUB}{repo}:{revision}"),))
    for command in registry.files.missing_adapters(alone):
        try:
            program = program_of(preset, f"{preset.id}+{repo}")
            await registry.launcher.download(program, command, lambda event: None)
        except WorkerLost as lost:
            raise LoadFailed(f"the adapter {repo} cannot be downloaded: {lost.message}") from None
    (found,) = registry.files.adapters(alone)
    if found.path.startswith(HUB):
        raise BadRequest(
            f"src: {repo} at {revision} is not in the cache, and --offline forbids downloading it", param="src"
        )
    await asyncio.to_thread(_check, Path(found.path), preset)
    return found.path


def _check(folder: Path, preset: Preset) -> None:
    """Raise BadRequest for an adapter that a worker would reject. Reads small files only."""
    if missing := missing_adapter(folder):
        raise BadRequest(f"src: not an adapter folder: {missing} is missing", param="src")
    try:
        config = json.loads((folder / "adapter_config.json").read_bytes()[: 1 << 20])
        kind, rank = config.get("peft_type"), config.get("r")
    except (OSError, ValueError, RecursionError, AttributeError):
        raise BadRequest("src: its adapter_config.json cannot be read", param="src") from None
    if kind != "LORA" or not os.path.getsize(folder / "adapter_model.safetensors"):
        raise BadRequest("src: not a LoRA adapter", param="src")
    if isinstance(rank, int) and rank > preset.max_lora_rank:
        raise BadRequest(
            f"src: the adapter has rank {rank}, max-lora-rank is {preset.max_lora_rank}; raise it", param="src"
        )
