"""The exact estimate: the model's own code runs on fake tensors, and live bytes are counted. No weights are read.

The model is built without memory, in its dtypes. The cache is the engine's. `memory_tracer` finds the peak of the
largest steps that the engine can take. Process overhead on main memory is measured on this process, which has imported
and loaded what a serving process does. Process overhead on accelerators is an option, as another process measured it.
"""

import importlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import unset_fake_temporarily

from worker.engines.transformers import load_draft, load_encoder
from worker.engines.transformers.attention import cpu_linear
from worker.engines.transformers.device import memory
from worker.engines.transformers.load import (
    architectures,
    layer_split,
    quantization,
    snapshot,
    tensor_parallel_plan,
)
from worker.engines.transformers.loop import requests
from worker.engines.transformers.run import backends
from worker.engines.transformers.run.aligned import AlignedRunner
from worker.engines.transformers.run.pooling import Embedder, Encoder
from worker.engines.transformers.run.runner import PagedRunner
from worker.engines.transformers.run.vision import TransformersImageProcessor, VisionTower, load_image_processor
from worker.engines.transformers.sample import grammar
from worker.engines.transformers.schedule.kv_cache import pool_blocks
from worker.estimate import meta_model, quantized
from worker.estimate.largest_steps import (
    CPU,
    GenerationSteps,
    encoding_steps,
    graphs_bytes,
    looping_peak,
    make_encoder,
    reordered_peak,
)
from worker.estimate.memory_tracer import Step, live_bytes, peak_bytes
from worker.estimate.meta_model import StoredTensors, Traced, device_of
from worker.protocol.argv import Estimate, ModelOptions
from worker.protocol.events import Estimated
from worker.protocol.memory import (
    ATTENTION_TILE_BYTES,
    BLOCK_TOKENS,
    CUBLAS_WORKSPACE_BYTES,
    DEVICE_PROCESS_BYTES,
    DEVICE_PROCESS_HOST_BYTES,
    FIRST_STEPS_BYTES,
    GLOO_BYTES,
    HEAP_FACTOR,
    HELD_BYTES,
    KERNEL_CODES,
    NCCL_BYTES,
    OPENING_BYTES,
    STAGING_BYTES,
    UNUSABLE_SHARE,
)


def estimate(options: Estimate) -> Estimated:
    """Return the bytes that `serve` with the same options would occupy. Takes little longer than its imports.

    Rank 0 stands for all ranks of a divided model. On accelerators each rank has a device; on the CPU all share main
    memory. Only rank 0 has a grammar's vocabulary.

    Raises StartError for whatever `serve` would reject before it reads weights.
    """
    torch.set_num_threads(options.threads)
    memory.keep_small()
    config = snapshot.load_config(options)
    ranks = tensor_parallel_plan.requested_ranks(options, config)
    on_cpu = device_of(options).type == "cpu"
    # Measured around the imports and the tokenizer: on accelerators only what this model adds to the process counts.
    resident = memory.resident()
    quantization.bring_library(quantization.method(options, config))  # raises for a method that cannot be loaded
    importlib.import_module("worker.engines.transformers.engine")  # whose code is in the memory of a worker, too
    tokenizer = snapshot.load_tokenizer(options)
    if on_cpu:
        process, grown = resident_bytes(StoredTensors(options).dtype(options, config)), 0
    else:
        process, grown = host_overhead(options), max(0, memory.resident() - resident)
    # Before the trace: pages that it writes to are not shared any more.
    inherited = ranks * memory.inheritance.bytes()
    if not snapshot.encodes(options, config):
        grown += grammar.vocabulary_bytes(tokenizer, config.get_text_config(decoder=True).vocab_size)
    del tokenizer  # alive until here: on the CPU its memory is part of `process`
    if ranks > 1:
        shards = [trace(options, config, ranks)] * ranks
        staged = ranks * shards[0].staged
    elif options.layers or len(options.devices) > 1:
        shards, staged = trace_split(options, config)
    else:
        shards = [trace(options, config)]
        staged = shards[0].staged
    if on_cpu:
        traced = shards[0]
        compute = HEAP_FACTOR * traced.compute + options.threads * ATTENTION_TILE_BYTES
        groups = GLOO_BYTES if ranks > 1 else 0
        return Estimated(
            weights=[ranks * traced.weights],
            context=[ranks * traced.context],
            compute=[ranks * max(compute, traced.loading - least_context(options, traced.context))],
            runtime=[ranks * (process + FIRST_STEPS_BYTES + groups) + grown + traced.kernels + traced.images],
            inherited=inherited,
        )
    steps = [shard.compute + shard.on_device for shard in shards]
    groups = NCCL_BYTES if ranks > 1 else 0
    return Estimated(
        weights=[shard.weights for shard in shards],
        context=[shard.context for shard in shards],
        compute=steps,
        runtime=[device_overhead(options, step) + groups for step in steps],
        host=ranks * (process + STAGING_BYTES) + grown + shards[0].images + staged,
    )


def least_context(options: Estimate, context: int) -> int:
    """Return the bytes of the KV cache that the load of a worker may count on: loading is over before the cache is
    made. The router may grant less than the whole `context`, but that of one row at least."""
    return context if options.kv_tokens else context // (options.contexts or options.parallel)


def device_overhead(options: Estimate, compute: int) -> int:
    """Return the bytes of a process on an accelerator beside weights, context and the `compute` bytes of its largest
    step."""
    return (options.overhead or DEVICE_PROCESS_BYTES) + CUBLAS_WORKSPACE_BYTES + int(UNUSABLE_SHARE * compute)


def host_overhead(options: Estimate) -> int:
    """Return the main memory of a process on accelerators, for any model."""
    return options.host_overhead or DEVICE_PROCESS_HOST_BYTES


def resident_bytes(dtype: torch.dtype) -> int:
    """Return the resident bytes of this process after the libraries that compute have run."""
    square = torch.ones(64, 64, dtype=dtype)
    for length in range(1, KERNEL_CODES + 1):  # one kernel for each shape, until the caches of kernels are full
        rows = torch.softmax(F.linear(torch.ones(length, 64, dtype=dtype), square), dim=-1)
    heads = rows[:64].view(1, 4, 16, 64)
    F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def trace(options: ModelOptions, config: Any, ranks: int = 1) -> Traced:
    """Return the bytes of a model on one device, or of one of its tensor-parallel ranks: build it, make its cache and
    run its largest steps without memory.

    Raises StartError for a model that cannot be served.
    """
    dtype = StoredTensors(options).dtype(options, config)
    if snapshot.encodes(options, config):
        return _with_loading(options, config, *_trace_encoder(options, config, dtype))
    traced, arranging = _trace_generation(options, config, dtype, ranks)
    if ranks == 1:
        traced = _with_loading(options, config, traced, arranging)
    return _with_draft(options, config, traced) if options.draft_snapshot else traced


def _with_draft(options: ModelOptions, config: Any, traced: Traced) -> Traced:
    """Add the draft model of `options`: its weights, its cache beside that of the target, and its steps, which come
    before those of the target. Raises StartError if it does not fit the target."""
    drafting = load_draft.draft_options(options)
    draft_config = load_draft.load_config(options, config, snapshot.load_tokenizer(options))
    # The cache of the target, also where the draft model has fewer positions.
    ctx_size = requests.context_size(options, architectures.positions(config))
    if architectures.backend(config) == "paged":
        blocks = pool_blocks(options.contexts or options.parallel, ctx_size, options.kv_tokens)
    else:
        blocks = pool_blocks(backends.aligned_rows(options, ctx_size), ctx_size)
    draft = trace(replace(drafting, ctx_size=ctx_size, kv_tokens=blocks * BLOCK_TOKENS), draft_config)
    return Traced(
        traced.weights + draft.weights,
        traced.context + draft.context,
        max(traced.compute, draft.compute),
        on_device=max(traced.on_device, draft.on_device),
        kernels=traced.kernels + draft.kernels,
        loading=max(traced.loading, draft.loading),
        images=traced.images,
        staged=max(traced.staged, draft.staged),
    )


def _with_loading(options: ModelOptions, config: Any, traced: Traced, arranging: int) -> Traced:
    """Add the bytes that only loading takes. `arranging`: bytes to arrange a quantized layer for its kernel."""
    on_cpu, stored = device_of(options).type == "cpu", StoredTensors(options)
    dtype = stored.dtype(options, config)
    loading = stored.stacked(config) * dtype.itemsize
    converts = stored.are_converted(dtype)
    if on_cpu and not converts:  # files are mapped and read whole; unused parts are released after the load
        loading = max(loading, stored.bytes - traced.weights)
    staged = _staged_bytes(options, config, stored, traced.weights)
    if _quantizes(options, config):
        loading = staged
    return replace(traced, loading=max(loading, arranging), staged=staged)


def _staged_bytes(options: ModelOptions, config: Any, stored: StoredTensors, weights: int) -> int:
    """Return the bytes of main memory for the `weights` of a model on their way to accelerators."""
    dtype = stored.dtype(options, config)
    if _quantizes(options, config):
        return stored.elements * dtype.itemsize  # all plain tensors, until the last one is quantized
    is_random = options.load_format == "dummy"  # random weights are drawn there
    return weights if is_random or stored.are_converted(dtype) else 0


def _quantizes(options: ModelOptions, config: Any) -> bool:
    """Return whether weights are quantized on load."""
    return quantization.is_quantized(options, config) and not quantization.quantization_config(config)


def _trace_encoder(options: ModelOptions, config: Any, dtype: torch.dtype) -> tuple[Traced, int]:
    """Trace a model that embeds or scores texts. Also returns the `arranging` of `_with_loading`."""
    embeds = not snapshot.is_cross_encoder(options, config)
    ctx_size = load_encoder.context_size(options, config)
    with meta_model.no_memory():
        model = meta_model.build(snapshot.model_class(options, config, embeds), config, dtype, embeds=embeds)
        encoder = make_encoder(model, options, embeds=embeds)
        weights = meta_model.weight_bytes(options, config, model, dtype)[CPU] + head_bytes(encoder)
        arranging = quantized.pretend(options, config, model)
        meta_model.shorten(model)
        lengths = {ctx_size: 0}
        if _reorders(options):
            lengths = cpu_linear.CpuLinears(model).peak_row_counts(ctx_size)
        compute = max(peak_bytes(step) for step in encoding_steps(model, encoder, options, lengths))
    return Traced(weights, 0, compute, on_device=meta_model.repeated_bytes(config, ctx_size, dtype)), arranging


def _trace_generation(options: ModelOptions, config: Any, dtype: torch.dtype, ranks: int) -> tuple[Traced, int]:
    """Trace a model that generates text. Also returns the `arranging` of `_with_loading`."""
    on_cpu = device_of(options).type == "cpu"
    reorders = _reorders(options) and ranks == 1
    ctx_size = requests.context_size(options, architectures.positions(config))
    processor = _image_processor(options, config)
    with meta_model.no_memory():
        # Fake tensors are always on the CPU: the first one on a CUDA device would create a context there, of half a
        # gigabyte.
        model = meta_model.build(snapshot.model_class(options, config, embeds=False), config, dtype, embeds=False)
        loading, share = 0, None
        if ranks > 1:
            loading = meta_model.loading_bytes(options, config, model, dtype)
            share = meta_model.divide(model, ranks)
        weights = meta_model.weight_bytes(options, config, model, dtype)[CPU]
        tower = VisionTower(model, processor.token, CPU) if processor is not None else None
        runner, capacity = meta_model.make_runner(model, config, options, ctx_size, tower, ranks=ranks)
        arranging = quantized.pretend(options, config, model)
        adapters = backends.make_adapters(runner, model, options, CPU, copies=0, share=share)
        kernels, reordering = cpu_linear.onednn_bytes(model) if reorders else (0, 0)
        context = runner.bytes_on(CPU)
        meta_model.shorten(model)
        if isinstance(runner, AlignedRunner):
            runner.shorten()
        adapter = adapters.pretend() if adapters is not None else None
        steps = GenerationSteps(runner, capacity, options, ctx_size, adapter)
        others: list[Step] = []
        if isinstance(runner, PagedRunner) and on_cpu:
            others += steps.short_rows(config.get_text_config(decoder=True).num_attention_heads // ranks)
        looping = looping_peak(steps, cpu_linear.CpuLinears(model) if reorders else None)
        if looping is not None:
            peaks = [max(looping, reordering)]
        elif reorders:
            peaks = [reordered_peak(model, steps, others, least=reordering)]
        else:
            peaks = [peak_bytes(step) for step in (*steps.largest(), *others)]
        images = graphs = 0
        if processor is not None:
            with unset_fake_temporarily():
                picture = processor.largest(dtype, ctx_size)
            images = OPENING_BYTES + max(HELD_BYTES, picture[1] if picture else 0)
            peaks += [peak_bytes(step) for step in steps.with_image(picture)]
        if isinstance(runner, PagedRunner) and not (on_cpu or options.enforce_eager or ranks > 1):
            if adapters is not None:
                adapters.begin(())  # graphs are of steps without adapters
            graphs = graphs_bytes(runner, options.parallel, ctx_size)
    traced = Traced(
        weights + (adapters.bytes if adapters is not None else 0),
        context,
        max(peaks),
        on_device=meta_model.repeated_bytes(config, ctx_size, dtype) // ranks + graphs,
        kernels=kernels,
        loading=loading,
        images=images,
        staged=loading,
    )
    return traced, arranging


def _reorders(options: ModelOptions) -> bool:
    """Return whether the CPU kernels reorder linear layers."""
    return device_of(options).type == "cpu" and not options.enforce_eager


def _image_processor(options: ModelOptions, config: Any) -> TransformersImageProcessor | None:
    if getattr(config, "vision_config", None) is None:
        return None
    return load_image_processor(options, config, snapshot.load_tokenizer(options))[0]


def head_bytes(encoder: Encoder) -> int:
    """Return the bytes of the layers behind an embedder's model. Those of a cross-encoder are part of its model."""
    return meta_model.tensor_bytes(encoder.head) if isinstance(encoder, Embedder) else 0


def trace_split(options: ModelOptions, config: Any) -> tuple[list[Traced], int]:
    """Return the bytes of each part of a model whose layers are split over devices, and of main memory for weights that
    are converted on their way there.

    Fake tensors have devices, so a tensor on a wrong device is an error here as it would be in the engine. Raises
    StartError for a model that cannot be split.
    """
    stored = StoredTensors(options)
    # The fake devices are CPUs, for the reason in `_trace_generation`. A second CPU need not exist.
    devices = [torch.device("cpu", index) if index else CPU for index in range(len(options.devices))]
    parts = layer_split.split_of(options, config, devices)
    assert parts is not None, "several devices"
    dtype = stored.dtype(options, config)
    ctx_size = requests.context_size(options, architectures.positions(config))
    with meta_model.no_memory():
        model = meta_model.build(snapshot.model_class(options, config, embeds=False), config, dtype, embeds=False)
        # The runner is made before the parts are placed: it tries the cache of transformers on the model, which makes
        # tensors with a call that does not support such devices.
        runner, capacity = meta_model.make_runner(model, config, options, ctx_size, parts=parts)
        layer_split.place(model, parts)
        weights = meta_model.weight_bytes(options, config, model, dtype, parts)
        quantized.pretend(options, config, model)
        adapters = backends.make_adapters(runner, model, options, CPU, copies=0)
        slots = adapters.bytes_by_device() if adapters is not None else {}
        context = {device: runner.bytes_on(device) for device in devices}
        meta_model.shorten(model, parts.starts)
        if isinstance(runner, AlignedRunner):
            runner.shorten()
        adapter = adapters.pretend() if adapters is not None else None
        steps = GenerationSteps(runner, capacity, options, ctx_size, adapter)
        peaks = [live_bytes(step).peaks for step in steps.largest()]
        repeated = meta_model.repeated_bytes(config, ctx_size, dtype)
        shards = [
            Traced(
                weights[device] + slots.get(device, 0),
                context[device],
                max(peak.get(device, 0) for peak in peaks),
                on_device=repeated,
            )
            for device in devices
        ]
    return shards, _staged_bytes(options, config, stored, sum(shard.weights for shard in shards))
