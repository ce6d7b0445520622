"""What a model is doing and why, as every face tells it in llama-server's words."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from router.config.effective import args, effective
from router.config.presets import Preset
from router.config.settings import Key
from router.fleet.failures import Failure
from router.fleet.fleet import Fleet
from router.fleet.load_stages import whole
from router.fleet.model import Model
from router.fleet.worker import State, Worker, estimated
from router.memory.checkpoint import offered
from router.memory.checkpoint_facts import Checkpoint
from router.planner.ledger import SLOTS, DeviceId, pooled
from router.registry.registry import Site
from router.registry.shared_workers import Listed

MIB = 1 << 20
VALUES = {
    State.DOWNLOADING: "downloading",
    State.QUEUED: "loading",
    State.STARTING: "loading",
    State.READY: "loaded",
    State.STOPPING: "loaded",
}
REASONS = frozenset(
    {
        "evicted",
        "idle",
        "requested",
        "crashed",
        "oom",
        "load_failed",
        "load_timeout",
        "stalled",
        "config_changed",
        "download_failed",
        "shutdown",
        "abandoned",
        "does_not_fit",
    }
)


def value_of(model: Model) -> str:
    worker = model.shown
    if model.sleeps:
        return "sleeping"
    return VALUES[worker.state] if worker is not None and worker.state in VALUES else "unloaded"


def status_of(site: Site, key: Key, listed: Listed) -> dict[str, Any]:
    """The status object of one that is listed. Who share a worker each have what that does, and all that the key may
    see are named; what memory it has is told of the first of them, so that sums are right."""
    told = status(site.fleet, listed.model, admin=site.access.is_admin(key), preset=listed.preset)
    others = site.sharing(key, listed)
    if others:
        told["shares"] = others
        if listed.names.index(others[0]) < listed.names.index(listed.id):
            told.pop("memory", None)
    return told


def status(fleet: Fleet, model: Model, *, admin: bool, preset: Preset | None = None) -> dict[str, Any]:
    """The status object of one model; `args` and `preset` only for admins: of the listed preset, unless that is the
    fleet's own."""
    worker, value = model.shown, value_of(model)
    result: dict[str, Any] = {"value": value, "args": [], "pinned": model.preset.pin}
    if admin:
        result["args"] = args(preset or model.preset)
        result["preset"] = preset_text(preset or model.preset)
    leases = [len(each.leases) for each in model.workers if each.state >= State.READY]
    queued = [len(each.leases) for each in model.workers if each.state < State.READY]
    result["in_flight"], result["queued"] = sum(leases), sum(queued)
    least, most = model.preset.replicas
    if most > 1:
        ready = sum(each.state is State.READY and each.open for each in model.workers)
        result["replicas"] = {"ready": ready, "open": len(model.all_open), "least": least, "most": most}
    if worker is not None:
        result["since"] = wall_clock(fleet, worker.since)
        result["draining"] = leaving = worker.retired.is_set() or worker.state is State.STOPPING
        if leaving and worker.reason in REASONS:
            result["reason"] = worker.reason
        if worker.state is State.QUEUED and worker.waits_for:
            result["waiting_for"] = worker.waits_for
        if worker.progress is not None and worker.state < State.READY:
            result["progress"] = fetched(worker) if worker.state is State.DOWNLOADING else progress(worker)
        if (beat := pulse(worker)) is not None:
            result["pulse"] = beat
        if worker.process is not None and worker.process.ready.seconds:
            spent = worker.process.ready.seconds.items()
            result["spent"] = {stage: round(seconds, 4) for stage, seconds in spent}
            result["processor_seconds"] = round(worker.process.ready.processor, 4)
            if worker.first_token:
                result["spent"]["first_token"] = round(worker.first_token, 4)
        memory = memory_of(model.workers)
        if memory:
            result["memory"] = memory
        if worker.costs is not None:
            estimate = worker.costs.estimate
            result["estimate"] = {"source": estimate.source} | ({"note": estimate.note} if estimate.note else {})
        if model.open is None and model.failure is not None and fleet.now() < model.failure.until:
            result |= why_not(fleet, model.failure)  # what is shown is an older one, which still drains
        return result
    if model.since is not None:
        result["since"] = wall_clock(fleet, model.since)
    if model.sleeping is not None and model.sleeps:
        size = -(-model.sleeping.request.size // MIB)
        held = size if model.sleeping.is_held else None
        result["memory"] = {"cpu": {"estimated_mib": size, "measured_mib": held, "reserved_mib": size}}
    if model.reason in REASONS:
        result["reason"] = model.reason
    failure = model.failure
    if failure is not None:
        result |= {"failed": True, **why_not(fleet, failure)}
        result["exit_code"] = failure.exit if failure.exit is not None else 1
    return result


def why_not(fleet: Fleet, failure: Failure) -> dict[str, Any]:
    """Why a model failed, and until when no worker of it is begun by itself."""
    return {"error": failure.message, "retry_at": wall_clock(fleet, failure.until)}


def wall_clock(fleet: Fleet, at: float) -> float:
    """Seconds since 1970 of a moment of the fleet's clock, for people."""
    return round(time.time() + at - fleet.now(), 3)


def memory_of(workers: Sequence[Worker]) -> dict[str, dict[str, int | None]]:
    """MiB by device: estimated, measured, reserved; of all workers together."""
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
        if device.index != SLOTS
    }


def fetched(worker: Worker) -> dict[str, Any]:
    """Bytes of a download, by where they come from."""
    told = worker.progress
    return by_source(worker.preset.repo or worker.preset.id, told.done, told.total, told.files) if told else {}


def by_source(name: str, done: int, total: int, files: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """By URL where single files are known, else all in all."""
    known = {url: {"done": pair[0], "total": pair[1]} for url, pair in files.items() if len(pair) == 2}
    return known or {name: {"done": done, "total": total}}


def progress(worker: Worker) -> dict[str, Any]:
    """Progress of a load as llama-server shapes it, `value` from 0 to 1 for all its stages."""
    return bar_of(worker.stages.share, worker.stages.as_dict())


def bar_of(share: float, told: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a load whose stage has come to that share, from 0 to 1."""
    return {"stages": ["text_model"], "current": "text_model", "value": round(whole(told["stage"], share), 4), **told}


def pulse(worker: Worker) -> dict[str, Any] | None:
    """What a worker's engine does, as of its last pulse: counts of sequences and tokens, tokens per second."""
    said = worker.pulse
    if said is None or worker.state < State.READY:
        return None
    return {
        "steps": said.steps,
        "running": said.running,
        "waiting": said.waiting,
        "parallel": said.parallel or worker.preset.parallel,
        "prefill_tokens_per_second": said.prefill_rate,
        "decode_tokens_per_second": said.decode_rate,
        "cache": {"used": said.cache_used, "reusable": said.cache_reusable, "total": said.cache_total},
    }


def preset_text(preset: Preset) -> str:
    """The effective preset as a section of an INI file."""
    return "\n".join([f"[{preset.id}]", *(f"{key} = {value}" for key, value, _ in effective(preset))]) + "\n"


def capabilities(listed: Listed, facts: Checkpoint | None) -> list[str]:
    """Of chat, completion, tools, vision, embedding, rerank: as its worker says; before there is one, or where it has a
    template of its own, by preset and files."""
    for worker in listed.model.workers if not listed.preset.chat_template else ():
        if worker.process is not None and worker.process.ready.capabilities:
            return list(worker.process.ready.capabilities)
    return offered(facts or Checkpoint(), listed.preset)
