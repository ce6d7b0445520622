"""Worker commands: the program and the command line of a preset."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from router.config.presets import Preset
from router.fleet.early_start import Phase
from router.fleet.worker import Worker, estimated
from router.launch.devices import usable_cores
from router.launch.interface import Program
from router.memory.checkpoint_facts import Checkpoint, effective_ctx, prefill_chunk, rows, takes_images
from router.planner.ledger import HOST
from worker.protocol.argv import ENGINES, Estimate, encode_adapters

if TYPE_CHECKING:  # it imports this module
    from router.fleet.fleet import Fleet


def program_of(preset: Preset, worker: str) -> Program:
    """Return the program of a worker process."""
    return Program(
        model=preset.id,
        worker=worker,
        python=preset.python,
        env=preset.env,
        forks=ENGINES[preset.engine].forks,
        start_timeout=preset.start_timeout,
        stop_timeout=preset.stop_timeout,
        stall_timeout=preset.stall_timeout,
    )


def threads(preset: Preset, *, on_host: bool, ranks: int = 1) -> int:
    """Return the torch threads of a worker, or of each rank.

    On the CPU all ranks together use half the cores, so that two workers can run at once.
    """
    return preset.threads or (max(1, usable_cores() // 2 // ranks) if on_host else 1)


def options(worker: Worker, kind: Any, **fields: Any) -> Any:
    """Return a command of `kind` (Estimate or Serve) for a worker."""
    assert worker.facts is not None
    assert worker.costs is not None
    return model_options(
        kind,
        worker.preset,
        worker.facts,
        worker.snapshot,
        on_host=worker.on_host,
        layers=worker.costs.choice.layers,
        ranks=worker.costs.choice.ranks,
        overhead=worker.costs.estimate.overhead.device,
        **fields,
    )


def estimate_command(worker: Worker) -> Estimate:
    """Return the command of `worker estimate`. It runs on the CPU, so it gets the known overhead of accelerators."""
    assert worker.costs is not None
    overhead, forked = worker.costs.estimate.overhead, worker.costs.forked
    beside = 0 if worker.on_host else overhead.beside_device(forked=forked)
    command: Estimate = options(worker, Estimate, host_overhead=beside)
    return command


def model_options(
    kind: Any,
    preset: Preset,
    facts: Checkpoint,
    snapshot: str,
    *,
    on_host: bool,
    layers: tuple[int, ...] = (),
    ranks: int = 1,
    **fields: Any,
) -> Any:
    """Return a command of `kind` for a model without a worker. `layers` and `ranks` as in `sharding.Choice`."""
    devices = ("cpu",) if on_host else tuple(f"cuda:{shard}" for shard in range(len(layers) or ranks))
    return kind(
        snapshot=snapshot,
        tokenizer=preset.tokenizer,
        task=preset.task,
        devices=devices,
        layers=tuple(map(str, layers)),
        tensor_parallel=ranks,
        dtype=preset.dtype,
        quantization=preset.quantization,
        load_format=preset.load_format,
        trust_remote_code=preset.trust_remote_code,
        config_override=preset.config_override,
        rope=json.dumps(dict(preset.rope)) if preset.rope else "",
        attention=preset.attention,
        enforce_eager=preset.enforce_eager,
        ctx_size=effective_ctx(facts, preset),
        parallel=rows(facts, preset),
        contexts=preset.contexts,
        kv_tokens=preset.kv_tokens,
        kv_cache_dtype=preset.kv_cache_dtype,
        prefill_chunk=prefill_chunk(facts, preset, on_host=on_host),
        draft_max=preset.draft_max,
        draft_snapshot=facts.draft_snapshot if preset.speculates else "",
        ngram_size=preset.ngram_size if preset.spec_type == "ngram-simple" else 0,
        limit_images=preset.limit_images,
        max_loras=preset.adapter_slots,
        max_lora_rank=preset.max_lora_rank,
        threads=threads(preset, on_host=on_host, ranks=ranks),
        **fields,
    )


def serve_fields(worker: Worker, fleet: Fleet) -> dict[str, Any]:
    """Return the fields of Serve beside the model's options."""
    preset, is_learned = worker.preset, worker.costs is not None and worker.costs.estimate.source == "learned"
    if preset.adapter_slots and worker.early.phase is not Phase.TAKEN:  # an early process already has its adapters
        worker.adapters.sent = preset.adapters, preset.default_lora
    return {
        "name": preset.id,
        **(_place_fields(worker) if worker.place else {}),
        "prefix_caching": preset.prefix_caching,
        "adapters": encode_adapters(fleet.files.adapters(preset)) if preset.adapter_slots else "",
        "default_adapter": preset.default_lora if preset.adapter_slots else "",
        "max_cpu_loras": preset.max_cpu_loras,
        "max_input_tokens": preset.max_input_tokens,
        "n_predict": preset.n_predict,
        "draft_min": preset.draft_min,
        "queue_size": preset.queue_size,
        "max_logprobs": preset.max_logprobs,
        "warm_up": not is_learned,
        "announce_steps": _announces_steps(worker),
        "seed": preset.seed,
        "sampling": json.dumps(dict(preset.sampling)) if preset.sampling else "",
        "pooling": preset.pooling,
        "embd_normalize": preset.embd_normalize,
        "chat_template": preset.chat_template,
        "chat_template_kwargs": preset.chat_template_kwargs,
        "strict_fields": preset.strict_fields,
    }


def _announces_steps(worker: Worker) -> bool:
    """Return whether the worker announces large steps: if it is forked in main memory."""
    costs = worker.costs
    if costs is None or costs.estimate.reserved:  # memory of the preset is not for steps
        return False
    return costs.forked and worker.on_host


def exceeds_warmup(preset: Preset, facts: Checkpoint) -> bool:
    """Return whether requests may bring larger steps than the warmup computes: with images, adapters or drafts."""
    return bool(preset.adapter_slots or preset.speculates or takes_images(facts, preset))


def _place_fields(worker: Worker) -> dict[str, Any]:
    """Return the fields that depend on the place."""
    names = ["cpu"] if worker.place[0].index == HOST else [f"cuda:{shard}" for shard in range(len(worker.place))]
    shares = estimated(worker)
    reserved = {name: shares[device] for name, device in zip(names, worker.place, strict=True)}
    fields: dict[str, Any] = {"devices": tuple(names), "reserved": json.dumps(reserved)}
    if worker.kv_range is not None and worker.costs is not None:
        fields["kv_tokens"] = worker.costs.estimate.kv_tokens
    return fields
