"""Ollama's API of models: list, loaded models, details, pull and delete."""

import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from router.api.call import ApiCall, ApiResult, FrameStream
from router.api.status import capabilities, wall_clock
from router.config.presets import hub_name
from router.errors import ApiError, BadRequest
from router.fleet.scheduler import resident_of
from router.fleet.worker import State, Worker
from router.planner.ledger import DeviceId
from router.registry.pulls import HubModels
from router.registry.registry import LATEST, Registry
from router.registry.shared_workers import ListedModel
from worker.protocol.dialects import Dialect
from worker.protocol.streams import timestamp

# The release of Ollama with the features of this router: tools, reasoning, log probabilities, and the APIs of OpenAI
# and Anthropic. Clients refuse to work with servers that report an older release.
VERSION = "0.14.2"
MAX_UNLOAD = 4096  # bytes of a request that may only unload its model; longer ones are not decoded
NEVER = datetime(9999, 12, 31, tzinfo=UTC)  # the expiry time of a model without one
# Our names of capabilities and Ollama's.
_CAPABILITIES = {
    "chat": "completion",
    "completion": "completion",
    "tools": "tools",
    "vision": "vision",
    "embedding": "embedding",
}


def unload_answer(name: str, body: bytes) -> bytes | None:
    """The answer to a request that only unloads its model: `keep_alive` is 0, and there is no prompt. Else None."""
    fields = json.loads(body) if len(body) <= MAX_UNLOAD else {}
    has_content = fields.get("prompt") or fields.get("messages")
    if has_content or str(fields.get("keep_alive")) not in ("0", "0.0", "0s", "0m", "0h"):
        return None
    empty = {"message": {"role": "assistant", "content": ""}, "response": ""}  # of chats and of completions
    return _line(model=name, created_at=timestamp(), **empty, done_reason="unload", done=True)


async def tags(call: ApiCall) -> ApiResult:
    """GET /api/tags: all models."""
    return {"models": [await _entry(call.registry, listed) for listed in call.registry.visible(call.key)]}


async def version(call: ApiCall) -> ApiResult:
    """GET /api/version."""
    return {"version": VERSION}


async def ps(call: ApiCall) -> ApiResult:
    """GET /api/ps: loaded models with their bytes and their expiry times.

    If models share a worker, its bytes are listed with the first of them, so that a sum counts them once.
    """
    found, counted, registry = [], set(), call.registry
    for listed in registry.visible(call.key):
        for worker in listed.model.workers:
            if worker.state is State.READY and not worker.retired and not _exits_next(worker):
                sizes = {} if worker.id in counted else {**worker.reserved, **worker.occupied}
                counted.add(worker.id)
                found.append({**await _entry(registry, listed), **await _running(registry, listed, worker, sizes)})
    return {"models": found}


async def show(call: ApiCall) -> ApiResult:
    """POST /api/show: the details of one model. Raises BadRequest, ModelNotFound."""
    registry = call.registry
    listed = registry.model(call.key, _model_name(await call.body()))
    facts, meta = await registry.snapshots.describe(listed.preset)
    texts = await registry.snapshots.texts(listed.preset)
    features = {_CAPABILITIES[name] for name in capabilities(listed, facts) if name in _CAPABILITIES}
    if "completion" in features and any(mark in texts.chat_template for mark in ("<think>", "enable_thinking")):
        features.add("thinking")
    family = facts.model_type if facts is not None else ""
    info: dict[str, Any] = {"general.architecture": family, "general.basename": listed.id}
    if meta:
        info["general.parameter_count"] = meta["n_params"]
        info[f"{family}.context_length"] = meta["n_ctx"] or meta["n_ctx_train"]
        info[f"{family}.embedding_length"] = meta["n_embd"]
    entry = await _entry(registry, listed)
    return {
        "modified_at": entry["modified_at"],
        "details": entry["details"],
        "model_info": info,
        "template": texts.chat_template,
        "capabilities": sorted(features),
    }


async def pull(call: ApiCall) -> ApiResult:
    """POST /api/pull: download a model. Responds with lines of progress, or with the last line if `stream` is false.

    Raises BadRequest, LoadBackoff if the download cannot begin.
    """
    hub, body = call.hub, await call.body()
    wants_stream = body.get("stream", True)
    if not isinstance(wants_stream, bool):
        raise BadRequest("stream must be true or false", param="stream")
    lines = _pull_lines(hub, await hub.pull(call.key, _repository(body)))
    if not wants_stream:
        return await _last(lines)
    frames = _with_error_line(lines)
    # The download is followed from here on. A client that disconnects before it gets a line ends it as well.
    return FrameStream(frames, Dialect.OLLAMA, first=await anext(frames))


async def _with_error_line(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The lines. An error becomes the last line, because the status of the response has been sent by then."""
    try:
        async with aclosing(lines) as open_lines:  # type: ignore[type-var]
            async for line in open_lines:
                yield line
    except ApiError as failed:
        yield _line(error=failed.message)


async def _pull_lines(hub: HubModels, worker: Worker | None) -> AsyncIterator[bytes]:
    """The lines that `ollama pull` shows. Raises BadRequest, LoadBackoff if the download fails."""
    with hub.following(worker):
        yield _line(status="pulling manifest")
        if worker is not None:
            digest = f"sha256:{hashlib.sha256(worker.preset.id.encode()).hexdigest()}"
            yield _progress(worker, digest)
            async for event in hub.follow(worker):
                if event.kind == "progress":
                    yield _progress(worker, digest)
    if worker is not None:
        hub.check(worker)
        yield _line(status="verifying sha256 digest")  # the worker has verified each file during the download
        yield _line(status="writing manifest")
    yield _line(status="success")


async def _last(lines: AsyncIterator[bytes]) -> dict[str, Any]:
    """The last line of a pull. Raises the error of the pull."""
    async with aclosing(lines) as open_lines:  # type: ignore[type-var]
        found: dict[str, Any] = json.loads([line async for line in open_lines][-1])
    return found


async def delete(call: ApiCall) -> ApiResult:
    """DELETE /api/delete. Raises BadRequest, ModelNotFound, InUse."""
    await call.hub.delete(call.key, _model_name(await call.body()))
    return web.Response(text="")


def _repository(body: Mapping[str, Any]) -> str:
    """The repository in a pull request, without the prefix and the tag that Ollama's clients add."""
    return hub_name(_model_name(body).removesuffix(LATEST))


def _model_name(body: Mapping[str, Any]) -> str:
    for field in ("model", "name"):
        if not isinstance(body.get(field), str | None):
            raise BadRequest(f"{field} must be a string", param=field)
    name = body.get("model") or body.get("name")
    if not isinstance(name, str):
        raise BadRequest("model name is missing from the request", reason="model_missing", param="model")
    return name


def _progress(worker: Worker, digest: str) -> bytes:
    progress = worker.load.latest
    done, total = (progress.done, progress.total) if progress is not None else (0, 0)
    return _line(status=f"pulling {digest[7:19]}", digest=digest, total=total, completed=done)


def _line(**fields: Any) -> bytes:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n"


async def _entry(registry: Registry, listed: ListedModel) -> dict[str, Any]:
    preset = listed.preset
    facts, meta = await registry.snapshots.describe(preset)
    family = facts.model_type if facts is not None else ""
    origin = f"{preset.repo}@{preset.revision}" if preset.repo else preset.path
    name = preset.id if ":" in preset.id else preset.id + LATEST  # Open WebUI looks models up by name and tag
    return {
        "name": name,
        "model": name,
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


async def _running(
    registry: Registry, listed: ListedModel, worker: Worker, sizes: Mapping[DeviceId, int]
) -> dict[str, Any]:
    _, meta = await registry.snapshots.describe(listed.preset)
    expires = resident_of(worker).expires
    expires_at = _moment(wall_clock(registry.fleet, expires)) if expires is not None else NEVER.isoformat()
    return {
        "size": sum(size for device, size in sizes.items() if device.index >= -1),
        "size_vram": sum(size for device, size in sizes.items() if device.index >= 0),
        "expires_at": expires_at,
        "context_length": meta.get("n_ctx", 0),
    }


def _exits_next(worker: Worker) -> bool:
    """True if its last request had `keep_alive` 0 and has ended: the next plan retires it."""
    return worker.usage.keep_alive == 0 and not worker.leases and not worker.preset.pin


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _billions(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 10**9 else f"{count / 1e6:.2f}M"
