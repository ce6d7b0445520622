"""What Ollama's API says of models, without tokens: lists, what is loaded, what a model is."""

import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from router.api.call import ApiCall, Frames, Result
from router.api.status import capabilities, wall_clock
from router.config.settings import Key
from router.errors import ApiError, BadRequest, ModelNotFound
from router.fleet.worker import State, Worker
from router.planner.ledger import DeviceId
from router.registry.pulls import Hub, Pull
from router.registry.registry import Site
from router.registry.shared_workers import Listed
from worker.protocol.dialects import Dialect

LATEST = ":latest"
VERSION = "0.14.2"
"""The release of Ollama that has what is offered here, tools, thoughts, log-probabilities and the calls of OpenAI and
Anthropic: clients look at it, and refuse to talk to an old one."""
NEVER = datetime(9999, 12, 31, tzinfo=UTC)
"""When a model leaves that stays for ever."""
_CAPABILITIES = {
    "chat": "completion",
    "completion": "completion",
    "tools": "tools",
    "vision": "vision",
    "embedding": "embedding",
}
"""Ours in Ollama's words."""


def known(site: Site, key: Key, name: str) -> str:
    """The name without the tag that Ollama's clients add, where only so there is such a model."""
    if not name.endswith(LATEST):
        return name
    try:
        site.model(key, name)
    except ModelNotFound:
        return name.removesuffix(LATEST)
    return name


async def tags(call: ApiCall) -> Result:
    """GET /api/tags: all models."""
    return {"models": [await _entry(call.site, listed) for listed in call.site.visible(call.key)]}


async def version(call: ApiCall) -> Result:
    """GET /api/version."""
    return {"version": VERSION}


async def ps(call: ApiCall) -> Result:
    """GET /api/ps: those in memory, in bytes, and when they leave if nobody asks them again. A worker that several
    share has its bytes with the first of them, so that sums are right."""
    found, counted, site = [], set(), call.site
    for listed in site.visible(call.key):
        for worker in listed.model.workers:
            if worker.state is State.READY and not worker.retired.is_set():
                held = {} if worker.id in counted else {**worker.reserved, **worker.occupied}
                counted.add(worker.id)
                found.append({**await _entry(site, listed), **await _running(site, listed, worker, held)})
    return {"models": found}


async def show(call: ApiCall) -> Result:
    """POST /api/show: one model. Raises BadRequest, ModelNotFound."""
    site, key = call.site, call.key
    listed = site.model(key, known(site, key, _named(await call.body())))
    facts, meta, _ = await site.describe(listed.preset)
    words = await site.words(listed.preset)
    able = {_CAPABILITIES[each] for each in capabilities(listed, facts) if each in _CAPABILITIES}
    if "completion" in able and any(each in words.chat_template for each in ("<think>", "enable_thinking")):
        able.add("thinking")
    family = facts.model_type if facts is not None else ""
    info: dict[str, Any] = {"general.architecture": family, "general.basename": listed.id}
    if meta:
        info["general.parameter_count"] = meta["n_params"]
        info[f"{family}.context_length"] = meta["n_ctx"] or meta["n_ctx_train"]
        info[f"{family}.embedding_length"] = meta["n_embd"]
    entry = await _entry(site, listed)
    return {
        "modified_at": entry["modified_at"],
        "details": entry["details"],
        "model_info": info,
        "template": words.chat_template,
        "capabilities": sorted(able),
    }


async def pull(call: ApiCall) -> Result:
    """POST /api/pull: lines as they come, or only the last one, which says how it ended.

    Raises BadRequest, LoadBackoff if there is nothing to wait for.
    """
    hub, body = call.hub, await call.body()
    wants_stream = body.get("stream", True)
    if not isinstance(wants_stream, bool):
        raise BadRequest("stream must be true or false", param="stream")
    name = known(call.site, call.key, _repository(body))
    lines = _pulled(hub, await hub.pull(call.key, name))
    return Frames(_told(lines), Dialect.OLLAMA) if wants_stream else await _last(lines)


async def _told(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The lines, and one about what went wrong, if something did."""
    try:
        async with aclosing(lines) as open_lines:  # type: ignore[type-var]
            async for line in open_lines:
                yield line
    except ApiError as failed:
        yield _line(error=failed.message)


async def _pulled(hub: Hub, pull: Pull) -> AsyncIterator[bytes]:
    """Raises BadRequest, LoadBackoff if the files do not come."""
    yield _line(status="pulling manifest")
    worker = pull.worker
    if worker is not None:
        digest = f"sha256:{hashlib.sha256(worker.preset.id.encode()).hexdigest()}"
        with hub.wanted(pull):
            yield _progress(worker, digest)
            async for event in hub.follow(worker):
                if event.kind == "progress":
                    yield _progress(worker, digest)
        hub.check(worker)
        yield _line(status="verifying sha256 digest")  # each file was, as it came
        yield _line(status="writing manifest")
    yield _line(status="success")


async def _last(lines: AsyncIterator[bytes]) -> dict[str, Any]:
    """How a pull ended. Raises what the lines do."""
    async with aclosing(lines) as open_lines:  # type: ignore[type-var]
        found: dict[str, Any] = json.loads([line async for line in open_lines][-1])
    return found


async def delete(call: ApiCall) -> Result:
    """DELETE /api/delete. Raises BadRequest, ModelNotFound, InUse."""
    site, key = call.site, call.key
    await call.hub.delete(key, known(site, key, _named(await call.body())))
    return web.Response(text="")


def _repository(body: Mapping[str, Any]) -> str:
    """What a pull names, without what Ollama's clients put around it."""
    name = _named(body).removesuffix(LATEST)
    for hub in ("hf.co/", "huggingface.co/"):
        name = name.removeprefix(f"https://{hub}").removeprefix(hub)
    return name


def _named(body: Mapping[str, Any]) -> str:
    for field in ("model", "name"):
        if not isinstance(body.get(field), str | None):
            raise BadRequest(f"{field} must be a string", param=field)
    name = body.get("model") or body.get("name")
    if not isinstance(name, str):
        raise BadRequest("model name is missing from the request", reason="model_missing", param="model")
    return name


def _progress(worker: Worker, digest: str) -> bytes:
    told = worker.progress
    done, total = (told.done, told.total) if told is not None else (0, 0)
    return _line(status=f"pulling {digest[7:19]}", digest=digest, total=total, completed=done)


def _line(**said: Any) -> bytes:
    return json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


async def _entry(site: Site, listed: Listed) -> dict[str, Any]:
    preset = listed.preset
    facts, meta, _ = await site.describe(preset)
    family = facts.model_type if facts is not None else ""
    origin = f"{preset.repo}@{preset.revision}" if preset.repo else preset.path
    return {
        "name": preset.id,
        "model": preset.id,
        "modified_at": _moment(listed.created),
        "size": meta.get("size", 0),
        "digest": hashlib.sha256(f"{preset.id}\n{origin}".encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": "safetensors",
            "family": family,
            "families": [family] if family else [],
            "parameter_size": _billions(meta.get("n_params", 0)),
            "quantization_level": str(meta.get("ftype") or ""),
        },
    }


async def _running(site: Site, listed: Listed, worker: Worker, held: Mapping[DeviceId, int]) -> dict[str, Any]:
    _, meta, _ = await site.describe(listed.preset)
    expires = worker.resident().expires
    leaves = _moment(wall_clock(site.fleet, expires)) if expires is not None else NEVER.isoformat()
    return {
        "size": sum(size for device, size in held.items() if device.index >= -1),
        "size_vram": sum(size for device, size in held.items() if device.index >= 0),
        "expires_at": leaves,
        "context_length": meta.get("n_ctx", 0),
    }


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _billions(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 10**9 else f"{count / 1e6:.2f}M"


__all__ = ["delete", "known", "ps", "pull", "show", "tags", "version"]
