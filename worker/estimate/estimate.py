"""The exact figure: the model's own code run on fake tensors, live bytes counted by storage. No weights are read.

The model is built without memory, in the types it will have; the cache is the very one that the engine makes; then
come the largest steps that the engine can take, of which `worker.estimate.memory_tracer` tells the most that is alive
at once. What a process takes beside that is measured on this one, which has imported and loaded what a serving one
does. One with accelerators is none like it: of that it is told what another has measured.
"""

import importlib
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import (
    FakeTensorMode,
    unset_fake_temporarily,
)
from transformers.initialization import no_init_weights
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from worker.engines.transformers import load_encoder
from worker.engines.transformers.attention import cpu_attention, cpu_linear, paged
from worker.engines.transformers.device import memory
from worker.engines.transformers.load import (
    architectures,
    layer_split,
    quantization,
    safetensors,
    sentence_transformers_config,
    snapshot,
)
from worker.engines.transformers.load.snapshot import (
    is_cross_encoder,
    is_embedder,
    load_config,
    load_tokenizer,
    model_class,
)
from worker.engines.transformers.loop import requests
from worker.engines.transformers.run import backends
from worker.engines.transformers.run.aligned import AlignedRunner
from worker.engines.transformers.run.cache_probe import UnsupportedCache
from worker.engines.transformers.run.cuda_graphs import GraphRunner
from worker.engines.transformers.run.pooling import Embedder, Encoder
from worker.engines.transformers.run.runner import PagedRunner, Runner
from worker.engines.transformers.run.vision import ImageProcessor, VisionTower, load_image_processor
from worker.engines.transformers.sample import grammar, sampler
from worker.engines.transformers.schedule.kv_cache import BlockTable, RowAllocator
from worker.engines.transformers.schedule.lora_slots import AppliedAdapter
from worker.engines.transformers.schedule.scheduler import Batch, Segment
from worker.engines.transformers.schedule.sequence import Sequence
from worker.errors import StartError
from worker.estimate import quantized
from worker.estimate.memory_tracer import LiveBytes, Step, live_bytes, peak_bytes, storage_key
from worker.interface import EncoderInput, PromptImage, PromptImages
from worker.protocol.architectures import EXPERT
from worker.protocol.argv import Estimate, ModelOptions
from worker.protocol.events import Estimated
from worker.protocol.memory import (
    ATTENTION_TILE_BYTES,
    CUBLAS_WORKSPACE_BYTES,
    DEVICE_PROCESS_BYTES,
    DEVICE_PROCESS_HOST_BYTES,
    FIRST_STEPS_BYTES,
    GRAPH_BYTES,
    HEAP_FACTOR,
    HELD_BYTES,
    OPENING_BYTES,
    PROMPT_LOGITS,
    STAGING_BYTES,
    UNUSABLE_SHARE,
)

MIB = 1 << 20
CPU = torch.device("cpu")
UNMASKED = "unmasked_sdpa"
KERNELS = 64
"""More shapes than the caches of kernels hold (`worker.program.main`)."""


@dataclass(frozen=True)
class Traced:
    """What a model's own tensors take, in bytes, whatever an allocator and the process put on top."""

    weights: int
    context: int
    compute: int
    """Alive at once in the largest step, beside the other two."""
    on_device: int
    """Further bytes on an accelerator, whose kernels want keys and values once for each head, and of its graphs."""
    kernels: int
    """Code for the model's linear layers on the CPU."""
    loading: int
    """Further bytes while the model is loaded: experts that are stored one by one, until all are put together; what
    mapped files hold beside the model."""
    images: int
    """Main memory for images on their way to the model."""
    staged: int
    """Main memory for weights on their way to an accelerator that are converted or packed first."""
    generates: bool
    """It goes on with a text, rather than turn it into numbers."""


def estimate(options: Estimate) -> Estimated:
    """Bytes that `serve` with the same options would occupy. Takes little longer than its imports.

    Raises StartError for what `serve` would refuse before it reads weights.
    """
    torch.set_num_threads(options.threads)
    memory.keep_small()
    config = load_config(options)
    device, bare = _device(options), memory.resident()
    quantization.bring_library(quantization.method(options, config))  # it refuses what could not be loaded
    importlib.import_module(
        "worker.engines.transformers.engine"
    )  # of which, too, a worker's process has the code in memory
    tokenizer = load_tokenizer(options)
    if device.type == "cpu":
        runtime = resident_bytes(dtype_of(options, config, stored_tensors(options), device))
    else:
        runtime = host_overhead(options) + max(0, memory.resident() - bare)
    inherited = memory.inheritance.bytes()  # now: what the trace writes to is shared no longer
    if options.layers or len(options.devices) > 1:
        shards, staged = trace_split(options, config)
        runtime += grammar.vocabulary_bytes(tokenizer, config.get_text_config(decoder=True).vocab_size)
        return Estimated(
            weights=[shard.weights for shard in shards],
            context=[shard.context for shard in shards],
            compute=[shard.compute + shard.on_device for shard in shards],
            runtime=[device_overhead(options, shard.compute + shard.on_device) for shard in shards],
            host=runtime + STAGING_BYTES + staged,
        )
    traced = trace(options, config)
    if traced.generates:
        runtime += grammar.vocabulary_bytes(tokenizer, config.get_text_config(decoder=True).vocab_size)
    del tokenizer  # alive until here: its memory is part of the runtime's
    weights, context, compute = traced.weights, traced.context, traced.compute
    if device.type == "cpu":
        compute = HEAP_FACTOR * compute + options.threads * ATTENTION_TILE_BYTES
        compute = max(compute, traced.loading - context)  # a model is loaded before its cache is made
        return _one_shard(
            weights,
            context,
            compute,
            runtime + FIRST_STEPS_BYTES + traced.kernels + traced.images,
            inherited=inherited,
        )
    compute += traced.on_device
    host = runtime + STAGING_BYTES + traced.images + traced.staged
    return _one_shard(weights, context, compute, device_overhead(options, compute), host=host)


def device_overhead(options: Estimate, compute: int) -> int:
    """What a process takes on an accelerator beside weights, context and the `compute` bytes of its largest step."""
    return (options.overhead or DEVICE_PROCESS_BYTES) + CUBLAS_WORKSPACE_BYTES + int(UNUSABLE_SHARE * compute)


def host_overhead(options: Estimate) -> int:
    """Main memory that a process takes beside its accelerators, whatever its model."""
    return options.host_overhead or DEVICE_PROCESS_HOST_BYTES


def trace(options: ModelOptions, config: Any) -> Traced:
    """The model of `config` built, its cache made and its largest steps run, all without memory.

    Raises StartError for what cannot be served.
    """
    device, stored = _device(options), stored_tensors(options)
    scores = is_cross_encoder(options, config)
    embeds = not scores and is_embedder(options, config)
    cls = model_class(options, config, embeds)
    dtype = dtype_of(options, config, stored, device)
    converts = any(each != dtype for each, _ in stored if each.is_floating_point)
    seeing = None if embeds or scores else _seeing(options, config)
    with FakeTensorMode():
        # Always of fake CPU tensors: those of a CUDA device begin by taking a context there, half a gigabyte.
        model = build(cls, config, dtype, embeds=embeds)
        weights = _weight_bytes(options, config, model, dtype)
        ctx_size = requests.context_size(options, architectures.positions(config))
        context = graphs = kernels = reordering = prompt_images = 0
        if embeds or scores:
            encoder = make_encoder(model, options, embeds=embeds)
            weights += head_bytes(encoder)
            arranging = quantized.pretend(options, config, model)
            shorten(model)
            if device.type == "cpu" and not options.enforce_eager:
                layers = cpu_linear.CpuLinears(model)
                lengths = layers.peak_row_counts(ctx_size)
            else:
                lengths = {ctx_size: 0}
            steps = encoding_steps(model, encoder, options, lengths)
        else:
            tower = VisionTower(model, seeing.token, CPU) if seeing is not None else None
            runner, capacity = make_runner(model, config, options, ctx_size, tower)
            context = runner.bytes
            arranging = quantized.pretend(options, config, model)
            adapters = backends.make_adapters(runner, model, options, CPU, copies=0)
            weights += adapters.bytes if adapters is not None else 0
            if device.type == "cpu" and not options.enforce_eager:
                kernels, reordering = cpu_linear.onednn_bytes(model)
            shorten(model)
            use = adapters.pretend() if adapters is not None else None
            steps = generation_steps(runner, capacity, options, ctx_size, use)
            if isinstance(runner, PagedRunner) and device.type == "cpu":
                heads = config.get_text_config(decoder=True).num_attention_heads
                steps = itertools.chain(steps, spread_steps(runner, capacity, options, ctx_size, heads, use))
            if device.type == "cpu" and not options.enforce_eager:
                reordering = reordered_peak(model, runner, capacity, options, ctx_size, use, steps, least=reordering)
                steps = iter(())
            if seeing is not None:
                with unset_fake_temporarily():
                    shown = seeing.largest(dtype, ctx_size)
                prompt_images = OPENING_BYTES + max(HELD_BYTES, shown[1] if shown else 0)
                steps = itertools.chain(steps, seeing_steps(runner, capacity, options, ctx_size, shown))
            if isinstance(runner, PagedRunner) and device.type == "cuda" and not options.enforce_eager:
                graphs = graphs_bytes(runner, options.parallel, ctx_size)
        compute = max(reordering, *(peak_bytes(step) for step in steps), 0)
    gathered = repeated_bytes(config, ctx_size, dtype) if architectures.backend(config) == "paged" else 0
    loading = _stacked(options, config) * dtype.itemsize
    if device.type == "cpu" and not converts:  # files are mapped and read as a whole, and then let go where unused
        loading = max(loading, sum(each.itemsize * count for each, count in stored) - weights)
    staged = weights if converts or options.load_format == "dummy" else 0  # random ones are drawn in main memory
    if quantization.is_quantized(options, config) and not quantization.quantization_config(config):
        loading = staged = sum(count for _, count in stored) * dtype.itemsize  # all of it, until the last is packed
    loading = max(loading, arranging)
    return Traced(
        weights,
        context,
        compute,
        gathered + graphs,
        kernels,
        loading,
        prompt_images,
        staged,
        generates=not (embeds or scores),
    )


@dataclass(frozen=True)
class Shard:
    """What lies on one of several devices, and what is computed there, in bytes."""

    weights: int
    context: int
    compute: int
    on_device: int
    """As in `Traced`."""


def trace_split(options: ModelOptions, config: Any) -> tuple[list[Shard], int]:
    """As `trace`, of a model whose layers are split over devices: each of them, and main memory for weights that are
    converted on their way there.

    A tensor that is not where an operator wants it is an error here as it would be there: fake tensors have devices
    though there are none. Raises StartError for what cannot be served so.
    """
    stored = stored_tensors(options)
    # of the processor's kind, for the reason in `trace`; there is no second processor, and need be none
    devices = [torch.device("cpu", index) if index else CPU for index in range(len(options.devices))]
    parts = layer_split.split_of(options, config, devices)
    assert parts is not None, "several devices"
    dtype = dtype_of(options, config, stored, torch.device(options.devices[0]))
    cls = model_class(options, config, embeds=False)
    ctx_size = requests.context_size(options, architectures.positions(config))
    with FakeTensorMode():
        model = build(cls, config, dtype, embeds=False)
        # before the parts are placed: transformers' own cache, which is tried on it, makes tensors with a call that
        # knows no such devices
        runner, capacity = make_runner(model, config, options, ctx_size, parts=parts)
        layer_split.place(model, parts)
        weights = _bytes_by_device(model, dtype)
        _shorten_parts(model, parts)
        peaks = dict.fromkeys(devices, 0)
        for step in generation_steps(runner, capacity, options, ctx_size):
            for device, peak in live_bytes(step).peaks.items():
                peaks[device] = max(peaks[device], peak)
        context = [runner.bytes_on(device) for device in devices]
    repeated = repeated_bytes(config, ctx_size, dtype) if architectures.backend(config) == "paged" else 0
    shards = [
        Shard(weights[device], pool, peaks[device], repeated) for device, pool in zip(devices, context, strict=True)
    ]
    converts = any(each != dtype for each, _ in stored if each.is_floating_point)
    staged = converts or options.load_format == "dummy"
    return shards, sum(shard.weights for shard in shards) if staged else 0


def _shorten_parts(model: Any, parts: layer_split.LayerSplit) -> None:
    """Two layers on each device show what all would, as for `shorten`, where they are of one kind; else all stay."""
    parent, stack = layer_split.stack_of(model)
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or [""]
    if len(set(types)) > 1 or len({_parts(layer) for layer in stack}) > 1:
        return
    name = next(name for name, child in parent.named_children() if child is stack)
    each = zip(parts.starts, parts.layers, strict=True)
    kept = [layer for start, count in each for layer in stack[start : start + min(count, 2)]]
    setattr(parent, name, torch.nn.ModuleList(kept))


def _bytes_by_device(model: Any, dtype: torch.dtype) -> dict[torch.device, int]:
    """Of all parameters and buffers, each storage once, in the types that they will have in memory."""
    names = tuple(model._get_dtype_plan(dtype))
    found: dict[int, tuple[torch.device, int]] = {}
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        size = each.untyped_storage().nbytes()
        if isinstance(each, torch.nn.Parameter) and any(part in name for part in names):
            size = each.numel() * torch.float32.itemsize
        found[storage_key(each)] = each.device, size
    sizes: dict[torch.device, int] = {}
    for device, size in found.values():
        sizes[device] = sizes.get(device, 0) + size
    return sizes


def _seeing(options: ModelOptions, config: Any) -> ImageProcessor | None:
    """What prepares images for a model that takes them."""
    if getattr(config, "vision_config", None) is None:
        return None
    return load_image_processor(options, config, load_tokenizer(options))[0]


def _device(options: ModelOptions) -> torch.device:
    """The first device of the model, which need not be here."""
    return torch.device(options.devices[0])


def dtype_of(
    options: ModelOptions, config: Any, stored: list[tuple[torch.dtype, int]], device: torch.device
) -> torch.dtype:
    return layer_split.resolve_dtype(options.dtype, getattr(config, "dtype", None) or _first_floating(stored), device)


def repeated_bytes(config: Any, ctx_size: int, dtype: torch.dtype) -> int:
    """Keys and values of one row, repeated for all heads: with a mask CUDA's kernels want them so (`attention`)."""
    shape = architectures.CacheShape.of(config)
    heads: int = config.num_attention_heads
    return 2 * heads * shape.head_dim * ctx_size * dtype.itemsize


def _one_shard(
    weights: int, context: int, compute: int, runtime: int, *, host: int = 0, inherited: int = 0
) -> Estimated:
    return Estimated(
        weights=[weights], context=[context], compute=[compute], runtime=[runtime], host=host, inherited=inherited
    )


# What is built


def build(cls: Any, config: Any, dtype: torch.dtype, *, embeds: bool) -> Any:
    """The model as the loader makes it, its parameters never filled. Under a FakeTensorMode it takes no memory."""
    extra = {"add_pooling_layer": False} if embeds and snapshot.has_pooler(cls) else {}
    with no_init_weights():
        model = cls._from_config(config, dtype=dtype, **extra)
    model.tie_weights()
    return model.eval().requires_grad_(False)


def make_runner(
    model: Any,
    config: Any,
    options: ModelOptions,
    ctx_size: int,
    tower: VisionTower | None = None,
    parts: layer_split.LayerSplit | None = None,
    ranks: int = 1,
) -> tuple[PagedRunner | AlignedRunner, RowAllocator]:
    """The backend of the engine, with its cache."""
    paged.register()
    implementation = backends.implementation(options, config)
    if implementation is not None:
        model.set_attn_implementation(implementation)
    if getattr(config, "is_encoder_decoder", False) and model.get_encoder().config._attn_implementation == "sdpa":
        # it reads one prompt at a time, without padding: see `encoding_steps`
        ALL_ATTENTION_FUNCTIONS.register(UNMASKED, ALL_ATTENTION_FUNCTIONS["sdpa"])
        model.get_encoder().config._attn_implementation = UNMASKED
    with LiveBytes():  # it knows what to say where the forward that shows the cache's shapes asks for a number
        try:
            return backends.make_runner(
                model, config, options, ctx_size, CPU, caches=False, tower=tower, split=parts, ranks=ranks
            )
        except UnsupportedCache as error:
            raise StartError(f"architecture {config.model_type!r} cannot be served by this engine: {error}") from error


def shorten(model: Any) -> None:
    """Leave one layer of each kind: what lives during a step does not depend on the number of layers.

    Keys and values are in the pool, and a layer's own tensors are gone before the next one's come. (Checked to the byte
    on 2, 32 and 80 layers.) Running a deep model on fake tensors would take seconds. Layers are of one kind if they are
    called so and have the same parts.
    """
    config = model.config.get_text_config(decoder=True)
    count = config.num_hidden_layers
    types = list(getattr(config, "layer_types", None) or ["all"] * count)
    for path, module in list(model.named_modules()):
        if "vision" in path or "visual" in path:
            continue  # a tower: it may keep what its layers gave
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.ModuleList) and len(child) == count:
                kinds = [(kind, _parts(layer)) for kind, layer in zip(types, child, strict=True)]
                needed = 1 + max(kinds.index(kind) for kind in set(kinds))
                setattr(module, name, child[: max(needed, 2)])


def _parts(layer: torch.nn.Module) -> tuple[tuple[str, torch.Size], ...]:
    return tuple((name, parameter.shape) for name, parameter in layer.named_parameters())


def stored_tensors(options: ModelOptions) -> list[tuple[torch.dtype, int]]:
    """Type and number of elements of every tensor in the files, from their headers."""
    if options.load_format == "dummy":
        return []
    files = map(safetensors.WeightFile, safetensors.files(Path(options.snapshot)))
    return [(dtype, count) for file in files for _, dtype, count in file.listed()]


def _stacked(options: ModelOptions, config: Any) -> int:
    """Elements that are in memory beside the model while transformers puts stored tensors together into larger ones:
    all of those, and one layer's once more."""
    if options.load_format == "dummy" or getattr(config, "quantization_config", None):
        return 0
    files = map(safetensors.WeightFile, safetensors.files(Path(options.snapshot)))
    stacked = sum(count for file in files for name, _, count in file.listed() if EXPERT.search(name))
    return stacked + stacked // int(config.get_text_config(decoder=True).num_hidden_layers)


def _first_floating(stored: list[tuple[torch.dtype, int]]) -> torch.dtype | None:
    return next((dtype for dtype, _ in stored if dtype.is_floating_point), None)


def _weight_bytes(options: ModelOptions, config: Any, model: Any, dtype: torch.dtype) -> int:
    """Bytes of the weights as they will sit in memory, and of the buffers that the model makes itself."""
    saved = model.state_dict()
    own: int = sum(buffer.nbytes for name, buffer in model.named_buffers() if name not in saved)
    if quantization.quantization_config(config):
        return own + quantized.stored_bytes(options, config, dtype)
    built = tensor_bytes(model)
    if options.quantization.startswith("bnb"):
        return built - quantized.saved_by_bitsandbytes(
            model, dtype, bits=4 if options.quantization == "bnb-4bit" else 8
        )
    if options.load_format == "dummy":
        return built
    return built + _kept_in_float32(model, dtype)


def _kept_in_float32(model: Any, dtype: torch.dtype) -> int:
    """Further bytes of the parts that transformers leaves in float32 in a model of a smaller type."""
    names = tuple(model._get_dtype_plan(dtype))
    kept = (each for name, each in model.named_parameters() if any(part in name for part in names))
    elements: int = sum(parameter.numel() for parameter in kept)
    return elements * (torch.float32.itemsize - dtype.itemsize)


def tensor_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers, each storage once: a tied head is its embedding."""
    tensors = [*model.parameters(), *model.buffers()]
    sizes: dict[int, int] = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())


# What is run


def generation_steps(
    runner: PagedRunner | AlignedRunner,
    capacity: RowAllocator,
    options: ModelOptions,
    ctx_size: int,
    use: AppliedAdapter | None = None,
) -> Iterator[Step]:
    """The largest steps of a batch: a chunk of a prompt at the far end of the context, which lies in two runs if there
    are such, beside rows that decode there; the same with logprobs of the prompt; and all rows decoding. Every other
    row has the adapter `use`."""
    rows, chunk = capacity.rows, min(options.prefill_chunk, ctx_size)
    is_encoder_decoder, has_states = False, False
    if isinstance(runner, AlignedRunner):
        is_encoder_decoder, has_states = runner.is_encoder_decoder, runner.has_states
    part, decodes = partial(_segment, capacity, use=use), partial(_decodes, capacity, ctx_size=ctx_size, use=use)
    yield partial(_generate, runner, (*decodes(rows - 1), part(rows - 1, ctx_size - chunk, chunk)))
    yield partial(_generate, runner, decodes(rows))
    if is_encoder_decoder:
        return  # the encoder has read the prompt as a whole in that step, and gives no logprobs of it
    if has_states:
        yield partial(_generate, runner, (*decodes(rows - 1), part(rows - 1, 0, chunk)))
    asked = min(PROMPT_LOGITS, chunk)
    end = asked if has_states else ctx_size
    told = part(rows - 1, end - asked, asked, prompt_logprobs=True)
    if rows > 1 and chunk > asked:
        rest = chunk - asked
        begin = 0 if has_states else ctx_size - rest
        yield partial(_generate, runner, (*decodes(rows - 2), part(rows - 2, begin, rest), told))
    else:
        yield partial(_generate, runner, (*decodes(rows - 1), told))


def spread_steps(
    runner: PagedRunner,
    capacity: RowAllocator,
    options: ModelOptions,
    ctx_size: int,
    heads: int,
    use: AppliedAdapter | None = None,
) -> Iterator[Step]:
    """On the CPU rows that are still short attend in another way: all of them as long as that goes, alone and beside a
    chunk of a prompt. Every other row has the adapter `use`."""
    chunk = min(options.prefill_chunk, ctx_size)
    last = _segment(capacity, capacity.rows - 1, ctx_size - chunk, chunk, use=use)
    for rows, beside in ((capacity.rows - 1, (last,)), (capacity.rows, ())):
        short = min(ctx_size, cpu_attention.max_tokens(rows, heads, runner.pool.keys[0]))
        if short:
            yield partial(_generate, runner, (*_decodes(capacity, rows, ctx_size=short, use=use), *beside))


def costly_steps(
    runner: PagedRunner | AlignedRunner,
    capacity: RowAllocator,
    options: ModelOptions,
    ctx_size: int,
    layers: cpu_linear.CpuLinears,
    use: AppliedAdapter | None = None,
) -> Iterator[tuple[int, Step]]:
    """Chunks at the far end of the context, of as many tokens as cost the linear `layers` the most memory, with the
    bytes at most that this is; an encoder reads no chunks, but prompts as a whole."""
    rows, chunk = capacity.rows, min(options.prefill_chunk, ctx_size)
    is_encoder_decoder = isinstance(runner, AlignedRunner) and runner.is_encoder_decoder
    beside = rows - 1 if isinstance(runner, PagedRunner) else 0  # tokens in the same forward
    for count, extra in layers.peak_row_counts(ctx_size if is_encoder_decoder else beside + chunk).items():
        end = count if is_encoder_decoder else ctx_size
        length = min(chunk, end) if is_encoder_decoder else count - beside
        if length > 0:
            last = _segment(capacity, rows - 1, end - length, length, use=use)
            decodes = _decodes(capacity, rows - 1, ctx_size=ctx_size, use=use)
            yield extra, partial(_generate, runner, (*decodes, last))


def seeing_steps(
    runner: PagedRunner | AlignedRunner,
    capacity: RowAllocator,
    options: ModelOptions,
    ctx_size: int,
    largest: tuple[PromptImage, int] | None,
) -> Iterator[Step]:
    """A chunk that begins the largest image there is, beside rows that decode and the features of their images."""
    if largest is None:
        return
    picture, _ = largest
    rows, chunk = capacity.rows, min(options.prefill_chunk, ctx_size)
    empty = {name: torch.ones(each.shape, dtype=each.dtype) for name, each in picture.inputs.items()}
    shown = PromptImages((PromptImage(picture.runs, empty, picture.is_whole),))
    whole = _segment(capacity, rows - 1, 0, min(chunk, picture.end))
    whole.sequence.tokens, whole.sequence.prompt_tokens = [0] * ctx_size, ctx_size
    whole.sequence.prompt_images = shown
    assert isinstance(runner, AlignedRunner)

    def step() -> None:
        held = [torch.empty(picture.tokens, runner.hidden, dtype=runner.dtype) for _ in range(rows - 1)]
        _generate(runner, (*_decodes(capacity, rows - 1, ctx_size=ctx_size), whole))
        del held

    yield step


def _generate(runner: Runner, batch: Batch) -> None:
    """One step, as `Generating` takes it, of rows that nobody computed before."""
    for segment in batch:
        runner.forget(segment.row)
    logits = runner.run(batch)
    first = 0
    chosen = []
    for segment in batch:
        if segment.sequence.prompt_logprobs:
            following = [0] * segment.logits
            sampler.likelihoods(
                logits[first : first + segment.logits], following, sampler.COSTLIEST_SAMPLING.logprobs or 0
            )
        first += segment.logits
        chosen.append(first - 1)
    picks = [sampler.RowSampling(sampler.COSTLIEST_SAMPLING, uniform=0.5)] * len(chosen)
    sampler.sample(logits if len(chosen) == len(logits) else logits[chosen], picks)


def _decodes(
    capacity: RowAllocator, count: int, ctx_size: int, use: AppliedAdapter | None = None
) -> tuple[Segment, ...]:
    """So many rows, each with another length, near the end of the context."""
    return tuple(
        _segment(capacity, row, max(ctx_size - 1 - row, 0), 1, use=use if row % 2 else None) for row in range(count)
    )


def _segment(
    capacity: RowAllocator,
    row: int,
    start: int,
    length: int,
    *,
    prompt_logprobs: bool = False,
    use: AppliedAdapter | None = None,
) -> Segment:
    tokens = [0] * (start + length)
    sequence = Sequence(
        id=row,
        prompt_tokens=len(tokens) if prompt_logprobs or length > 1 else max(start, 1),
        tokens=tokens,
        limit=len(tokens),
        ends=frozenset(),
        prompt_logprobs=prompt_logprobs,
        adapter=use,
        computed=start,
    )
    table = capacity.contiguous_table(row, start + length)
    return Segment(sequence, row, start, length, _broken(table) if table is not None and length > 1 else table)


def _broken(table: BlockTable) -> BlockTable:
    """The same blocks in two runs, if there are two: attention has to gather them."""
    broken, half = BlockTable(), len(table.blocks) // 2
    for block in (*table.blocks[half:], *table.blocks[:half]):
        broken.append(block)
    return broken


def graphs_bytes(runner: PagedRunner, rows: int, ctx_size: int) -> int:
    """What recorded steps take beside all others, because memory of a graph serves graphs only: the largest of them,
    the buffers, and the graphs themselves."""
    fixed = GraphRunner(runner, rows=rows, ctx_size=ctx_size)
    longest = {size: (size, blocks) for size, blocks in fixed.shapes}  # of each batch size
    largest = max((peak_bytes(partial(fixed.compute, *shape)) for shape in longest.values()), default=0)
    return fixed.buffer_bytes + largest + len(fixed.shapes) * GRAPH_BYTES


def make_encoder(model: Any, options: ModelOptions, *, embeds: bool) -> Encoder:
    """The engine's encoder around `model`; layers behind the model have their shapes and no weights of their own."""
    snapshot = Path(options.snapshot)
    found = sentence_transformers_config.read(snapshot) if embeds else None
    return load_encoder.make_encoder(model, CPU, snapshot, found, pad=0, is_dummy=True)[0]


def head_bytes(encoder: Encoder) -> int:
    """Bytes of the layers that stand behind an embedder's model; a cross-encoder's are part of its model."""
    return tensor_bytes(encoder.head) if isinstance(encoder, Embedder) else 0


def encoding_steps(model: Any, encoder: Encoder, options: ModelOptions, lengths: Iterable[int]) -> Iterator[Step]:
    """The largest steps of an encoder: one text of each of `lengths`, which are as long as may be, and those that cost
    its linear layers the most memory; and two with padding, as long as two may be. More and shorter ones have as many
    tokens and smaller masks."""
    usual = model.config._attn_implementation
    # A single text has no padding, so transformers builds no mask; it cannot see that in a fake tensor, and has to be
    # told: for attention of an unknown name it builds none.
    ALL_ATTENTION_FUNCTIONS.register(UNMASKED, ALL_ATTENTION_FUNCTIONS["sdpa"])
    for length in lengths:
        yield partial(_encode, model, encoder, UNMASKED if usual == "sdpa" else usual, [[0] * length])
    longest = min(options.prefill_chunk // 2, max(lengths))
    if longest > 1:
        yield partial(_encode, model, encoder, usual, [[0] * longest, [0] * (longest - 1)])


def _encode(model: Any, encoder: Encoder, implementation: str, texts: list[list[int]]) -> None:
    model.set_attn_implementation(implementation)
    encoder.run([EncoderInput(text) for text in texts])


# What is counted


def reordered_peak(
    model: Any,
    runner: PagedRunner | AlignedRunner,
    capacity: RowAllocator,
    options: ModelOptions,
    ctx_size: int,
    use: AppliedAdapter | None,
    steps: Iterator[Step],
    *,
    least: int,
) -> int:
    """The most bytes that are alive at once in any of `steps` (the first of them `generation_steps`'), or with other
    numbers of tokens, before and after the linear layers of `model` are reordered. That takes `least`, so that smaller
    steps need not be looked at."""
    layers = cpu_linear.CpuLinears(model)
    peaks = [peak_bytes(step) for step in steps]
    most = max(least, *peaks)
    for _ in range(2):
        for extra, step in costly_steps(runner, capacity, options, ctx_size, layers, use):
            if peaks[0] + extra > most:
                most = max(most, peak_bytes(step))
        layers.pretend()
    return most


def resident_bytes(dtype: torch.dtype) -> int:
    """Resident bytes of this process, once the libraries that compute have been used in earnest."""
    square = torch.ones(64, 64, dtype=dtype)
    for length in range(1, KERNELS + 1):  # one kernel for each shape, until their caches are full
        rows = torch.softmax(F.linear(torch.ones(length, 64, dtype=dtype), square), dim=-1)
    heads = rows[:64].view(1, 4, 16, 64)
    F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
