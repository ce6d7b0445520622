"""Models without memory: built on fake tensors, with the engine's own cache, and the bytes of their tensors."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.initialization import no_init_weights
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from worker.engines.transformers.attention import paged
from worker.engines.transformers.load import (
    architectures,
    layer_split,
    quantization,
    safetensors,
    snapshot,
    tensor_parallel_plan,
)
from worker.engines.transformers.load.tensor_parallel_plan import RankShare, RankSlice
from worker.engines.transformers.run import backends
from worker.engines.transformers.run.aligned import AlignedRunner
from worker.engines.transformers.run.cache_probe import UnsupportedCache
from worker.engines.transformers.run.runner import PagedRunner
from worker.engines.transformers.run.vision import VisionTower
from worker.engines.transformers.schedule.kv_cache import RowAllocator
from worker.errors import StartError
from worker.estimate import quantized
from worker.estimate.largest_steps import CPU, UNMASKED
from worker.estimate.memory_tracer import LiveBytes, storage_key
from worker.protocol.architectures import BEHIND, EXPERT, LAYER
from worker.protocol.argv import ModelOptions


@dataclass(frozen=True)
class Traced:
    """Bytes of a model's tensors, without the overhead of allocator and process."""

    weights: int
    context: int
    compute: int  # alive at once in the largest step, beside the other two
    on_device: int = 0  # further bytes on an accelerator: keys and values repeated for each head, and CUDA graphs
    kernels: int = 0  # code for the model's linear layers on the CPU
    # Further bytes while the model is loaded: single experts until all are stacked, parts of mapped files that the
    # model does not use, quantized layers while they are arranged.
    loading: int = 0
    images: int = 0  # main memory for images on their way to the model
    staged: int = 0  # main memory for weights on their way to an accelerator that are converted or quantized first


class FakeGroup:
    """A process group with one rank: results have the right sizes and no content."""

    def __init__(self, count: int):
        self._count = count

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.empty_like(tensor) for _ in range(self._count)], dim=-1)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@contextmanager
def no_memory() -> Iterator[None]:
    """Make all tensors of the block fake.

    All of them are made in inference mode, as the steps make theirs: torch caches no view of a tensor made outside of
    it, and the trace would take a tenth longer.
    """
    with FakeTensorMode(), torch.inference_mode():
        yield


def build(cls: Any, config: Any, dtype: torch.dtype, *, embeds: bool) -> Any:
    """Return the model as the loader makes it, with unfilled parameters. Under `no_memory` it takes no memory."""
    extra = {"add_pooling_layer": False} if embeds and snapshot.has_pooler(cls) else {}
    with no_init_weights(), LiveBytes():  # which answers for numbers that the model asks of fake tensors
        model = cls._from_config(config, dtype=dtype, **extra)
    model.tie_weights()
    return model.eval().requires_grad_(False)


def divide(model: torch.nn.Module, ranks: int) -> RankShare:
    """Leave the slices of rank 0 in `model`, with memory of their own, as the loader does. Raises StartError for a
    model that cannot be divided.

    Rank 0 stands for all ranks: it has the sampler beside what the others have, and tensors that cannot be divided are
    the same on each.
    """
    share = RankSlice(0, ranks), FakeGroup(ranks)
    tensor_parallel_plan.divide(model, share)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.untyped_storage().nbytes() > parameter.nbytes:
                copy = torch.empty(parameter.shape, dtype=parameter.dtype)
                module._parameters[name] = torch.nn.Parameter(copy, requires_grad=False)
    return share


def loading_bytes(options: ModelOptions, config: Any, model: torch.nn.Module, dtype: torch.dtype) -> int:
    """Return the further bytes while a rank loads `model`, which is not divided yet."""
    if options.load_format == "dummy":
        return tensor_bytes(model)
    largest = max(parameter.nbytes for parameter in model.parameters())
    return max(2 * largest, StoredTensors(options).stacked(config) * dtype.itemsize)


def make_runner(
    model: Any,
    config: Any,
    options: ModelOptions,
    ctx_size: int,
    tower: VisionTower | None = None,
    parts: layer_split.LayerSplit | None = None,
    ranks: int = 1,
) -> tuple[PagedRunner | AlignedRunner, RowAllocator]:
    """Return the engine's runner with its cache. Raises StartError for an architecture that it cannot serve."""
    paged.register()
    implementation = backends.implementation(options, config)
    if implementation is not None:
        model.set_attn_implementation(implementation)
    encoder = model.get_encoder() if getattr(config, "is_encoder_decoder", False) else None
    of_encoder = getattr(encoder, "config", None)
    if of_encoder is not None and of_encoder._attn_implementation == "sdpa":
        # The encoder reads one prompt at a time, without padding.
        ALL_ATTENTION_FUNCTIONS.register(UNMASKED, ALL_ATTENTION_FUNCTIONS["sdpa"])
        of_encoder._attn_implementation = UNMASKED
    with LiveBytes():  # answers for numbers that the forward asks of fake tensors while it shows the cache's shapes
        try:
            return backends.make_runner(
                model, config, options, ctx_size, CPU, caches=False, tower=tower, split=parts, ranks=ranks
            )
        except UnsupportedCache as error:
            raise StartError(f"architecture {config.model_type!r} cannot be served by this engine: {error}") from error


def shorten(model: Any, starts: Sequence[int] = (0,)) -> None:
    """Leave one layer of each kind, and two at least: the peak of a step does not depend on the number of layers.

    Keys and values are in the cache, and the tensors of a layer are freed before the next layer runs. (Checked to the
    byte on 2, 32 and 80 layers.) A deep model would take seconds on fake tensors. Layers are of one kind if they have
    the same type and the same parameters. `starts`: the first layer on each device. Where a model on several devices
    has layers of several kinds, all are left.
    """
    config = model.config.get_text_config(decoder=True)
    count = config.num_hidden_layers
    types = list(getattr(config, "layer_types", None) or ["all"] * count)
    for path, module in list(model.named_modules()):
        if "vision" in path or "visual" in path:
            continue  # a vision tower may keep the output of each layer
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.ModuleList) and len(child) == count:
                kinds = [(kind, _shapes(layer)) for kind, layer in zip(types, child, strict=True)]
                if len(set(kinds)) == 1:
                    kept = sorted({at for start in starts for at in (start, start + 1) if at < count})
                    setattr(module, name, torch.nn.ModuleList(child[at] for at in kept))
                elif len(starts) == 1:
                    needed = 1 + max(kinds.index(kind) for kind in set(kinds))
                    setattr(module, name, child[: max(needed, 2)])


def _shapes(layer: torch.nn.Module) -> tuple[tuple[str, torch.Size], ...]:
    return tuple((name, parameter.shape) for name, parameter in layer.named_parameters())


def device_of(options: ModelOptions) -> torch.device:
    """Return the first device of the model. It need not exist on this machine."""
    return torch.device(options.devices[0])


class StoredTensors:
    """The tensors in the files of a snapshot, from their headers: none for random weights."""

    def __init__(self, options: ModelOptions):
        files = [] if options.load_format == "dummy" else safetensors.files(Path(options.snapshot))
        listed = [entry for file in map(safetensors.WeightFile, files) for entry in file.listed()]
        self.sizes: list[tuple[torch.dtype, int]] = [(dtype, count) for _, dtype, count in listed]  # with elements
        self.elements = sum(count for _, count in self.sizes)
        self.bytes = sum(dtype.itemsize * count for dtype, count in self.sizes)
        self._experts = sum(count for name, _, count in listed if EXPERT.search(name))

    def dtype(self, options: ModelOptions, config: Any) -> torch.dtype:
        """Return the dtype of the model in memory."""
        first = next((dtype for dtype, _ in self.sizes if dtype.is_floating_point), None)
        return layer_split.resolve_dtype(options.dtype, getattr(config, "dtype", None) or first, device_of(options))

    def are_converted(self, dtype: torch.dtype) -> bool:
        """Return whether loading converts any of them to the `dtype` of the model."""
        return any(stored != dtype for stored, _ in self.sizes if stored.is_floating_point)

    def stacked(self, config: Any) -> int:
        """Return the elements that are in memory beside the model while transformers stacks single experts: all of
        them, and those of one layer once more."""
        if getattr(config, "quantization_config", None):
            return 0
        return self._experts + self._experts // int(config.get_text_config(decoder=True).num_hidden_layers)


def weight_bytes(
    options: ModelOptions,
    config: Any,
    model: Any,
    dtype: torch.dtype,
    split: layer_split.LayerSplit | None = None,
) -> dict[torch.device, int]:
    """Return the bytes of the weights in memory, and of the buffers that the model makes itself, by device.

    `split`: by which `model` is placed, if it is on several devices.
    """
    if quantization.quantization_config(config):
        stored = model.state_dict()
        sizes: dict[torch.device, int] = defaultdict(int)
        for name, buffer in model.named_buffers():
            sizes[buffer.device] += 0 if name in stored else buffer.nbytes
        for name, size in quantized.stored_tensors(options, config, dtype):
            sizes[_device_of_stored(name, split) if split is not None else CPU] += size
        return sizes
    # Random weights are made in one dtype.
    sizes = bytes_by_device(model, () if options.load_format == "dummy" else tuple(model._get_dtype_plan(dtype)))
    if options.quantization.startswith("bnb"):
        bits = 4 if options.quantization == "bnb-4bit" else 8
        for device, saved in quantized.saved_by_bitsandbytes(model, dtype, bits=bits).items():
            sizes[device] -= saved
    return sizes


def _device_of_stored(name: str, split: layer_split.LayerSplit) -> torch.device:
    """Return the device of a tensor of the files, by the rules of the router (router/memory/checkpoint.py)."""
    if match := LAYER.search(name):
        return split.by_layer[int(match[1])]
    return split.devices[-1 if BEHIND.search(name) else 0]


def tensor_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all parameters and buffers. Tied tensors count once."""
    return sum(bytes_by_device(model).values())


def bytes_by_device(model: torch.nn.Module, in_float32: Collection[str] = ()) -> dict[torch.device, int]:
    """Return the bytes of all parameters and buffers. Tied tensors count once.

    `in_float32`: parts of the names of parameters that transformers keeps in float32 in a model of a smaller dtype.
    """
    found: dict[int, tuple[torch.device, int]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        size = tensor.untyped_storage().nbytes()
        if isinstance(tensor, torch.nn.Parameter) and any(part in name for part in in_float32):
            size = tensor.numel() * torch.float32.itemsize
        found[storage_key(tensor)] = tensor.device, size
    sizes: dict[torch.device, int] = defaultdict(int)
    for device, size in found.values():
        sizes[device] += size
    return sizes


def repeated_bytes(config: Any, ctx_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values of one row, repeated for all heads, as CUDA's kernels need them with a mask.
    0 on the aligned backend, whose steps are traced with the repeated ones."""
    if architectures.backend(config) != "paged":
        return 0
    heads: int = config.num_attention_heads
    return 2 * heads * architectures.CacheShape.of(config).head_dim * ctx_size * dtype.itemsize
