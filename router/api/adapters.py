"""LMI's calls about the LoRA adapters of one model: register, update, list, describe, unregister.

What is registered by a call is kept by the router, and handed to each worker of the model; nothing of it is written to
a disk. What stands in a preset or in its folder of adapters is changed there.
"""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from router.api.call import ApiCall, Result
from router.api.lmi import LONGEST_LIST, page
from router.config.presets import ADAPTER_NAME, HUB, Preset, repository
from router.config.settings import Key
from router.errors import ApiError, BadRequest, DoesNotFit, Duplicate, LoadFailed
from router.fleet.worker import State
from router.fleet.worker_argv import program_of
from router.launch.interface import WorkerLost
from router.registry.adapters import Registered, tell
from router.registry.registry import Site, flag
from router.store.catalogue import missing_adapter
from worker.protocol.argv import AdapterSource


async def register(call: ApiCall) -> Result:
    """POST .../adapters: it may be named from now on. With `preload`, which is so unless told otherwise, workers that
    are ready have read it, and say what is wrong. Raises BadRequest, Duplicate, DoesNotFit if no slot is left for it,
    LoadFailed if it cannot be fetched."""
    site, id, query = call.site, call.model_id(), call.query
    preset = _enabled(site, id)
    name, src = query.get("name", ""), query.get("src", "")
    if not ADAPTER_NAME.fullmatch(name):
        raise BadRequest("name must be given, of letters, digits, dots, dashes and underscores", param="name")
    if not src:
        raise BadRequest("src must be given: a folder, or org/name of the hub", param="src")
    _must_be_new(preset, name)
    pinned, preload = bool(flag(query, "pin")), flag(query, "preload") is not False
    path = await _folder(site, preset, src)
    _must_be_new(site.members.find(id).preset, name)  # meanwhile somebody else may have registered it
    made = Registered(src, AdapterSource(name=name, path=path, pinned=pinned))
    await _put(site, id, name, made, preload=preload)
    return {"status": f"Adapter {name} registered"}


async def update(call: ApiCall) -> Result:
    """POST .../adapters/{adapter}/update: it has another source, or is pinned or no longer. Raises as `register`, and
    ModelNotFound."""
    site, id, name, query = call.site, call.model_id(), call.path["adapter"], call.query
    before = _registered(site, id, name)
    src = query.get("src") or before.src
    path = await _folder(site, _enabled(site, id), src) if src != before.src else before.source.path
    _registered(site, id, name)
    pinned = flag(query, "pin")
    source = AdapterSource(name=name, path=path, pinned=before.source.pinned if pinned is None else pinned)
    await _put(site, id, name, Registered(src, source), preload=flag(query, "preload") is not False)
    return {"status": f"Adapter {name} updated"}


async def unregister(call: ApiCall) -> Result:
    """DELETE .../adapters/{adapter}: it may be named no longer; running requests keep it. Raises ModelNotFound."""
    site, id, name = call.site, call.model_id(), call.path["adapter"]
    _registered(site, id, name)
    site.adapt(id, name, None)
    await _tell(site, id)
    return {"status": f"Adapter {name} unregistered"}


async def listed(call: ApiCall) -> Result:
    """GET .../adapters: a page of them, in the order of registration."""
    site, key, id, query = call.site, call.key, call.model_id(), call.query
    limit = page(query, "limit", LONGEST_LIST)
    limit = limit if 0 < limit <= LONGEST_LIST else LONGEST_LIST
    first = page(query, "next_page_token", 0)
    every = site.members.find(id).preset.adapters
    told: dict[str, Any] = {"adapters": [_row(site, key, id, each) for each in every[first : first + limit]]}
    if first + limit < len(every):
        told["nextPageToken"] = str(first + limit)
    return told


async def described(call: ApiCall) -> Result:
    """GET .../adapters/{adapter}: a list of one. Raises ModelNotFound."""
    site, key, id, name = call.site, call.key, call.model_id(), call.path["adapter"]
    site.check_adapter(id, name)
    return [_row(site, key, id, each) for each in site.members.find(id).preset.adapters if each.name == name]


def _row(site: Site, key: Key, id: str, source: AdapterSource) -> dict[str, Any]:
    made = site.adapters.get(id, {}).get(source.name)
    src = made.src if made is not None else source.path.removeprefix(HUB)
    is_shown = not src.startswith("/") or site.access.is_admin(key)
    return {"name": source.name, "src": src if is_shown else source.name, "pin": source.pinned}


def _enabled(site: Site, id: str) -> Preset:
    """The model's preset. Raises BadRequest if no memory is kept for adapters."""
    preset = site.members.find(id).preset
    if not preset.adapter_slots:
        raise BadRequest(f"model '{id}' is served without adapters; set enable-lora = on in its preset")
    return preset


def _registered(site: Site, id: str, name: str) -> Registered:
    site.check_adapter(id, name)
    made = site.adapters.get(id, {}).get(name)
    if made is None:
        raise BadRequest(
            f"adapter '{name}' stands in the preset of {id}, or in its folder of adapters: change it there"
        )
    return made


def _must_be_new(preset: Preset, name: str) -> None:
    if any(each.name == name for each in preset.adapters):
        raise Duplicate(f"{preset.id} has an adapter '{name}' already; update it, or choose another name", param="name")


async def _put(site: Site, id: str, name: str, made: Registered, *, preload: bool) -> None:
    """Record it, and tell; if a worker cannot use it, all is as before."""
    preset = site.members.find(id).preset
    others = [each for each in preset.adapters if each.name != name]
    pinned = made.source.pinned + sum(each.pinned for each in others)
    unpinned = len(others) + 1 - pinned
    if pinned > preset.adapter_slots or (pinned == preset.adapter_slots and unpinned):
        raise DoesNotFit(
            f"{id} keeps memory for {preset.adapter_slots} adapters, and with this one {pinned} would be pinned, which"
            f" leaves none for {unpinned} others; raise max-loras"
        )
    before = site.adapters.get(id, {}).get(name)
    site.adapt(id, name, made)
    if not preload:
        return
    problems = await _tell(site, id)
    if name in problems and site.adapters.get(id, {}).get(name) is made:
        site.adapt(id, name, before)
        await _tell(site, id)
        raise BadRequest(f"adapter '{name}' cannot be used: {problems[name]}", param="src")


async def _tell(site: Site, id: str) -> dict[str, str]:
    """Every worker that is ready; one that cannot be told now is told before its next request."""
    problems: dict[str, str] = {}
    for worker in site.members.find(id).model.all_open:
        if worker.state is State.READY:
            try:
                problems |= await tell(worker, site.files)
            except ApiError:
                continue
    return problems


async def _folder(site: Site, preset: Preset, src: str) -> str:
    """Where the files of `src` are, once they are. Raises BadRequest, LoadFailed: no call names a place beside the hub,
    its cache, --models-dir and the model's own folder of adapters."""
    path = src.removeprefix("file://")
    if path.startswith("/"):
        return await asyncio.to_thread(_local, site, preset, path)
    try:
        repo, revision = repository(src.removeprefix("https://huggingface.co/").removeprefix("hf://"))
    except ValueError as error:
        raise BadRequest(
            f"src: {error}; name an adapter of the hub as org/name[:revision], or a folder", param="src"
        ) from None
    source = AdapterSource(name="", path=f"{HUB}{repo}:{revision}")
    wanted = site.files.missing_adapters(_with(preset, source))
    for command in wanted:
        try:
            program = program_of(preset, f"{preset.id}+{repo}")
            await site.launcher.download(program, command, lambda event: None)
        except WorkerLost as lost:
            raise LoadFailed(f"the adapter {repo} cannot be fetched: {lost.message}") from None
    (found,) = site.files.adapters(_with(preset, source))
    if found.path.startswith(HUB):
        raise BadRequest(
            f"src: {repo} at {revision} is not in the cache, and --offline forbids fetching it", param="src"
        )
    await asyncio.to_thread(_check, Path(found.path), preset)
    return found.path


def _with(preset: Preset, source: AdapterSource) -> Preset:
    return replace(preset, adapters=(source,))


def _local(site: Site, preset: Preset, path: str) -> str:
    real = Path(path).resolve()
    roots = (site.settings.models_dir, site.settings.hub_cache, preset.adapters_dir)
    if not any(Path(root).resolve() in real.parents for root in roots if root):
        raise BadRequest(
            "src: only folders inside adapters-dir, --models-dir and the hub cache can be registered", param="src"
        )
    _check(real, preset)
    return str(real)


def _check(folder: Path, preset: Preset) -> None:
    """Raises BadRequest for what no worker could use, as far as a few small files tell."""
    if lacking := missing_adapter(folder):
        raise BadRequest(f"src: it is no folder of an adapter, {lacking} is missing", param="src")
    try:
        said = json.loads((folder / "adapter_config.json").read_bytes()[: 1 << 20])
        kind, rank = said.get("peft_type"), said.get("r")
    except (OSError, ValueError, RecursionError, AttributeError):
        raise BadRequest("src: its adapter_config.json cannot be read", param="src") from None
    if kind != "LORA" or not os.path.getsize(folder / "adapter_model.safetensors"):
        raise BadRequest("src: it is no LoRA adapter", param="src")
    if isinstance(rank, int) and rank > preset.max_lora_rank:
        raise BadRequest(
            f"src: it has rank {rank}, {preset.max_lora_rank} is the most; raise max-lora-rank", param="src"
        )


__all__ = ["described", "listed", "register", "unregister", "update"]
