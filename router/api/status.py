"""The status object of a model, in llama-server's terms. All APIs that report states use it."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from router.config.api_keys import ApiKey
from router.fleet.failures import Failure
from router.fleet.fleet import Fleet
from router.fleet.model import Model
from router.fleet.worker import State, Worker, estimated, kv_cache, load_share
from router.memory.checkpoint import offered
from router.memory.checkpoint_facts import Checkpoint
from router.planner.ledger import WORKER_SLOTS, DeviceId, pooled
from router.registry.registry import Registry
from router.registry.shared_workers import ListedModel
from worker.protocol.events import Progress
from worker.protocol.memory import MIB

VALUES = {
    State.DOWNLOADING: "downloading",
    State.QUEUED: "loading",
    State.STARTING: "loading",
    State.READY: "loaded",
    State.STOPPING: "loaded",
}
# Reasons for which a worker stopped, as far as clients see them.
REASONS = frozenset({
    "evicted", "idle", "requested", "crashed", "oom", "load_failed", "load_timeout", "stalled", "config_changed",
    "download_failed", "shutdown", "abandoned", "does_not_fit",
})  # fmt: skip


def value_of(model: Model) -> str:
    """`downloading`, `loading`, `loaded`, `sleeping` or `unloaded`."""
    worker = model.shown
    if model.sleeps:
        return "sleeping"
    return VALUES[worker.state] if worker is not None and worker.state in VALUES else "unloaded"


def status_of(registry: Registry, key: ApiKey, listed: ListedModel) -> dict[str, Any]:
    """The status object of a listed model, as `key` may see it.

    Models that share a worker have the same status, and `shares` lists the others that `key` may use. Only the first of
    them has `memory`, so that a sum over all models counts each worker once.
    """
    shown = status(registry.fleet, listed.model)
    if registry.access.is_admin(key):
        shown |= listed.shown_settings
    if others := [name for name in listed.others if registry.access.may_use(key, name)]:
        shown["shares"] = others
        if listed.names.index(others[0]) < listed.names.index(listed.id):
            shown.pop("memory", None)
    return shown


def status(fleet: Fleet, model: Model) -> dict[str, Any]:
    """The status object of a fleet model, without its settings, which are for admins only."""
    worker, value = model.shown, value_of(model)
    result: dict[str, Any] = {"value": value, "args": [], "pinned": model.preset.pin}
    result["in_flight"] = sum(len(other.leases) for other in model.workers if other.state >= State.READY)
    result["queued"] = sum(len(other.leases) for other in model.workers if other.state < State.READY)
    least, most = model.preset.replicas
    if most > 1:
        ready = sum(other.state is State.READY and other.open for other in model.workers)
        result["replicas"] = {"ready": ready, "open": len(model.all_open), "least": least, "most": most}
    if worker is not None:
        result["since"] = wall_clock(fleet, worker.since)
        result["draining"] = leaving = worker.retired or worker.state is State.STOPPING
        if leaving and worker.reason in REASONS:
            result["reason"] = worker.reason
        if worker.state is State.QUEUED and worker.queue.waits_for:
            result["waiting_for"] = worker.queue.waits_for
        if worker.load.latest is not None and worker.state < State.READY:
            result["progress"] = _progress(worker, worker.load.latest)
        if (beat := pulse(worker)) is not None:
            result["pulse"] = beat
        if worker.process is not None and worker.process.ready.seconds:
            spent = worker.process.ready.seconds.items()
            result["spent"] = {stage: round(seconds, 4) for stage, seconds in spent}
            result["processor_seconds"] = round(worker.process.ready.processor, 4)
            if worker.usage.first_token:
                result["spent"]["first_token"] = round(worker.usage.first_token, 4)
        memory = memory_of(model.workers)
        if memory:
            result["memory"] = memory
        if worker.costs is not None:
            estimate = worker.costs.estimate
            result["estimate"] = {"source": estimate.source} | ({"note": estimate.note} if estimate.note else {})
        if cache := kv_cache(worker):
            result["kv_cache"] = {name: _in_mib(figures) for name, figures in cache.items()}
        if model.open is None and model.failure is not None and fleet.now() < model.failure.until:
            result |= failure_fields(fleet, model.failure)  # `worker` is an older one, which still drains
        return result
    if model.since is not None:
        result["since"] = wall_clock(fleet, model.since)
    if model.sleeping is not None and model.sleeps:
        size = -(-model.sleeping.request.size // MIB)
        measured = size if model.sleeping.is_locked else None
        result["memory"] = {"cpu": {"estimated_mib": size, "measured_mib": measured, "reserved_mib": size}}
    if model.reason in REASONS:
        result["reason"] = model.reason
    failure = model.failure
    if failure is not None:
        result |= {"failed": True, **failure_fields(fleet, failure)}
        result["exit_code"] = failure.exit if failure.exit is not None else 1
    return result


def failure_fields(fleet: Fleet, failure: Failure) -> dict[str, Any]:
    """The error of a failed model, and the time until which it is not loaded again automatically."""
    return {"error": failure.message, "retry_at": wall_clock(fleet, failure.until)}


def wall_clock(fleet: Fleet, at: float) -> float:
    """Convert a time of the fleet's monotonic clock to seconds since 1970."""
    return round(time.time() + at - fleet.now(), 3)


def memory_of(workers: Sequence[Worker]) -> dict[str, dict[str, int | None]]:
    """Estimated, measured and reserved MiB by device, summed over the workers."""
    planned: Counter[DeviceId] = Counter()
    measured: Counter[DeviceId] = Counter()
    reserved: Counter[DeviceId] = Counter()
    for worker in workers:
        planned.update(pooled(estimated(worker), worker.pools))
        measured.update(worker.occupied)
        reserved.update(worker.reserved)
    return {
        str(device): {
            "estimated_mib": -(-planned[device] // MIB),
            "measured_mib": -(-measured[device] // MIB) if device in measured else None,
            "reserved_mib": -(-size // MIB),
        }
        for device, size in reserved.items()
        if device.index != WORKER_SLOTS  # --models-max counts workers as units of a device of its own
    }


def _in_mib(figures: Mapping[str, int] | None) -> dict[str, int] | None:
    if figures is None:
        return None
    return {"tokens": figures["tokens"], "mib": -(-figures["bytes"] // MIB)}


def _progress(worker: Worker, latest: Progress) -> dict[str, Any]:
    if worker.state is State.DOWNLOADING:
        return bytes_by_source(worker.preset.repo or worker.preset.id, latest.done, latest.total, latest.files)
    return progress_object(worker.load.share, worker.load.as_dict())


def bytes_by_source(name: str, done: int, total: int, files: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Downloaded and total bytes by the URL of each file; by `name` if single files are not known."""
    known = {url: {"done": pair[0], "total": pair[1]} for url, pair in files.items() if len(pair) == 2}
    return known or {name: {"done": done, "total": total}}


def progress_object(share: float, stage: Mapping[str, Any]) -> dict[str, Any]:
    """The progress of a load: `share` is the done part of the current stage, `value` that of all stages, 0 to 1."""
    value = round(load_share(stage["stage"], share), 4)
    return {"stages": ["text_model"], "current": "text_model", "value": value, **stage}


def pulse(worker: Worker) -> dict[str, Any] | None:
    """The load of a worker's engine at its last pulse: sequences, tokens per second, KV-cache blocks."""
    last = worker.pulse
    if last is None or worker.state < State.READY:
        return None
    return {
        "steps": last.steps,
        "running": last.running,
        "waiting": last.waiting,
        "parallel": last.parallel or worker.rows,
        "prefill_tokens_per_second": last.prefill_rate,
        "decode_tokens_per_second": last.decode_rate,
        "cache": {"used": last.cache_used, "reusable": last.cache_reusable, "total": last.cache_total},
    }


def capabilities(listed: ListedModel, facts: Checkpoint | None) -> list[str]:
    """A subset of chat, completion, tools, vision, embedding and rerank.

    A running worker reports them. Without one they are derived from the preset and the files. That also holds for a
    preset with a chat template of its own, because the worker reports those of the model's template.
    """
    for worker in listed.model.workers if not listed.preset.chat_template else ():
        if worker.process is not None and worker.process.ready.capabilities:
            return list(worker.process.ready.capabilities)
    return offered(facts or Checkpoint(), listed.preset)
