"""What Ollama's API says of models, without tokens: lists, what is loaded, what a model is."""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from router.errors import BadRequest, ModelNotFound
from router.faces.llama_server import capabilities, wall_clock
from router.fleet import Model
from router.life import Worker
from router.lifecycle import State
from router.settings import Key
from router.site import Site

LATEST = ":latest"
NEVER = datetime(9999, 12, 31, tzinfo=UTC)
"""When a model leaves that stays for ever."""
_CAPABILITIES = {"chat": "completion", "completion": "completion", "embedding": "embedding"}
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


async def tags(site: Site, key: Key) -> dict[str, Any]:
    """GET /api/tags: all models."""
    return {"models": [await _entry(site, model) for model in site.visible(key)]}


async def ps(site: Site, key: Key) -> dict[str, Any]:
    """GET /api/ps: those in memory, in bytes, and when they leave if nobody asks them again."""
    found = []
    for model in site.visible(key):
        for worker in model.workers:
            if worker.state is State.READY and not worker.retired.is_set():
                found.append({**await _entry(site, model), **await _running(site, worker)})  # noqa: PERF401
    return {"models": found}


async def show(site: Site, key: Key, body: Mapping[str, Any]) -> dict[str, Any]:
    """POST /api/show: one model. Raises BadRequest, ModelNotFound."""
    name = body.get("model") or body.get("name")
    if not isinstance(name, str):
        raise BadRequest("model name is missing from the request", reason="model_missing", param="model")
    model = site.model(key, known(site, key, name))
    facts, meta, _ = await site.describe(model.preset)
    words = await site.words(model.preset)
    able = {_CAPABILITIES[each] for each in capabilities(model, facts) if each in _CAPABILITIES}
    if "completion" in able and "tools" in words.chat_template:
        able.add("tools")
    if "completion" in able and any(each in words.chat_template for each in ("<think>", "enable_thinking")):
        able.add("thinking")
    family = facts.model_type if facts is not None else ""
    info: dict[str, Any] = {"general.architecture": family, "general.basename": model.preset.id}
    if meta:
        info["general.parameter_count"] = meta["n_params"]
        info[f"{family}.context_length"] = meta["n_ctx"] or meta["n_ctx_train"]
        info[f"{family}.embedding_length"] = meta["n_embd"]
    entry = await _entry(site, model)
    return {
        "modified_at": entry["modified_at"],
        "details": entry["details"],
        "model_info": info,
        "template": words.chat_template,
        "capabilities": sorted(able),
    }


async def _entry(site: Site, model: Model) -> dict[str, Any]:
    preset = model.preset
    facts, meta, _ = await site.describe(preset)
    family = facts.model_type if facts is not None else ""
    origin = f"{preset.repo}@{preset.revision}" if preset.repo else preset.path
    return {
        "name": preset.id,
        "model": preset.id,
        "modified_at": _moment(model.created),
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


async def _running(site: Site, worker: Worker) -> dict[str, Any]:
    _, meta, _ = await site.describe(worker.preset)
    held = {**worker.reserved, **worker.occupied}
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


__all__ = ["known", "ps", "show", "tags"]
