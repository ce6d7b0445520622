"""Devices and dtype of a model; layer split: its layers on several devices, and the transfers between them.

Each device has consecutive layers with their keys and values. The first device also has the embeddings, the last one
the final norm and the head. A head that shares weights with the embeddings stays on the first device, because a copy
would cost more than moving its input. Tensors are moved when a module on another device is called with them; masks,
positions and others that all layers share move once per step and device.

The router decides how many layers each device gets.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from worker.engines.transformers.attention.kv_pool import KvPool
from worker.engines.transformers.attention.paged import AttentionLayout, LayerAttention, PackedBatch
from worker.engines.transformers.load import safetensors, staging
from worker.engines.transformers.load.safetensors import WeightFile
from worker.engines.transformers.load.snapshot import encodes
from worker.engines.transformers.schedule.scheduler import ForwardPart, Segment
from worker.errors import StartError
from worker.protocol.argv import DTYPES, ModelOptions
from worker.protocol.events import Exit


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """Devices in order, and the number of layers on each."""

    devices: tuple[torch.device, ...]
    layers: tuple[int, ...]

    @property
    def device_indices(self) -> tuple[int, ...]:
        """Index of the device of each layer."""
        return tuple(place for place, count in enumerate(self.layers) for _ in range(count))

    @property
    def by_layer(self) -> tuple[torch.device, ...]:
        return tuple(self.devices[place] for place in self.device_indices)

    @property
    def starts(self) -> tuple[int, ...]:
        """First layer of each device."""
        return (0, *accumulate(self.layers[:-1]))


def devices_of(options: ModelOptions) -> tuple[torch.device, ...]:
    """The devices of the model, in order. Raises StartError if there are none or one does not exist."""
    if not options.devices:
        raise StartError("no device is given; for example, use --devices=cpu", Exit.USAGE)
    return tuple(map(_device, options.devices))


def _device(name: str) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise StartError(f"device {name} is not usable: torch {torch.__version__} finds no CUDA device")
    device = torch.device(name)
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        raise StartError(f"device {name} does not exist; torch finds {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", device.index or 0)


def device_of(options: ModelOptions, rank: int) -> torch.device:
    """The device of one tensor-parallel rank. Raises StartError if there is none for it."""
    devices = devices_of(options)
    if devices[0].type == "cpu" and len(devices) == 1:
        return devices[0]
    if len(devices) != options.tensor_parallel:
        raise StartError(
            f"--tensor-parallel={options.tensor_parallel} needs as many devices, but --devices has {len(devices)}",
            Exit.USAGE,
        )
    return devices[rank]


def split_of(options: ModelOptions, config: Any, devices: Sequence[torch.device]) -> LayerSplit | None:
    """The layer split that `options` request; None for a single device. Raises StartError if it is impossible."""
    if len(devices) > 1 and encodes(options, config):
        raise StartError("a model that embeds or scores texts cannot be split over devices; give it one device")
    if len(devices) == 1 and not options.layers:
        return None
    if len(options.layers) != len(devices) or not all(word.isdecimal() and int(word) for word in options.layers):
        raise StartError(
            f"--layers={','.join(options.layers)} must have one number of layers for each of {len(devices)} devices",
            Exit.USAGE,
        )
    layers = tuple(map(int, options.layers))
    have = _count(config)
    if sum(layers) != have:
        raise StartError(f"--layers={','.join(options.layers)} are {sum(layers)} layers, the model has {have}")
    if why := reason_against_split(config):
        raise StartError(f"architecture {config.model_type!r} cannot be split over devices: {why}; give it one device")
    return LayerSplit(tuple(devices), layers)


def resolve_dtype(asked: str, stored: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype for `asked`. auto: that of the checkpoint, but float32 for float16 on the CPU, where float16 is
    slow."""
    if asked != "auto":
        dtype = getattr(torch, asked, None)
        if asked not in DTYPES or not isinstance(dtype, torch.dtype):
            raise StartError(f"dtype {asked!r} is none of {', '.join(DTYPES)}", Exit.USAGE)
        return dtype
    if stored is None or (stored == torch.float16 and device.type == "cpu"):
        return torch.float32
    return stored


def resolved(
    options: ModelOptions, config: Any, files: Iterable[safetensors.WeightFile], device: torch.device
) -> torch.dtype:
    """The model's dtype: as requested, else from the configuration, else from the files."""
    stored = getattr(config, "dtype", None) or next((file.floating for file in files if file.floating), None)
    return resolve_dtype(options.dtype, stored, device)


def reason_against_split(config: Any) -> str:
    """Reason why a model has to be on one device; empty if it can be on several, as far as known here."""
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder and a decoder"
    if getattr(config, "vision_config", None) is not None:
        return "it sees images"
    return ""


def _count(config: Any) -> int:
    count: int = config.get_text_config(decoder=True).num_hidden_layers
    return count


def tail_of(model: Any, split: LayerSplit) -> torch.device:
    """Device of the last hidden state and the logits: the last one, or the first if the head shares the embeddings."""
    return split.devices[0 if has_tied_head(model) else -1]


def has_tied_head(model: Any) -> bool:
    """True if the head shares its weights with the embeddings."""
    head = model.get_output_embeddings()
    shared = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    return head is not None and any(id(parameter) in shared for parameter in head.parameters())


def place(
    model: Any,
    split: LayerSplit,
    files: Sequence[WeightFile] = (),
    report: Callable[[int], None] = lambda done: None,
) -> None:
    """Move the parts of `model` to their devices in parallel, and install hooks that move their inputs.

    Views of `files` are read from there. `report` gets the bytes that have arrived. Raises StartError if the layers
    cannot be found, and the errors of `staging.copy_to_device`.
    """
    parent, _ = stack_of(model)
    module_devices = _module_devices(model, split)
    _move(model, module_devices, split.devices[0], files, report)
    transfers = _ForwardTransfers()
    parent.register_forward_pre_hook(transfers.begin)
    for module, device in module_devices.items():
        module.register_forward_pre_hook(transfers.to(device), with_kwargs=True)
    parent.register_forward_hook(transfers.end(tail_of(model, split)))


def device_map(model: Any, split: LayerSplit) -> dict[str, torch.device]:
    """The devices of all parts of `model` by their names. Raises StartError if the layers cannot be identified."""
    module_devices = _module_devices(model, split)
    return {name: module_devices[module] for name, module in model.named_modules() if module in module_devices}


def _module_devices(model: Any, split: LayerSplit) -> dict[nn.Module, torch.device]:
    """The devices of the layers and of the largest modules beside them."""
    parent, stack = stack_of(model)
    devices: dict[nn.Module, torch.device] = dict(zip(stack, split.by_layer, strict=True))
    devices |= dict.fromkeys(_outside(model, stack), split.devices[0])
    children = list(parent.children())
    after = children[children.index(stack) + 1 :]  # usually the final norm
    devices |= {child: split.devices[-1] for child in after if next(child.parameters(), None) is not None}
    head = model.get_output_embeddings()
    if head is not None:
        devices[head] = tail_of(model, split)
    return devices


def stack_of(model: Any) -> tuple[nn.Module, nn.ModuleList]:
    """The layers of a model and the module that calls them. Raises StartError if they cannot be identified."""
    count = _count(model.config)
    found = [
        (parent, child)
        for parent in model.modules()
        for child in parent.children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    if len(found) != 1:
        raise StartError(
            f"{type(model).__name__} cannot be split over devices: it has {len(found)} stacks of {count} layers;"
            " give it one device"
        )
    return found[0]


def _outside(model: nn.Module, stack: nn.Module) -> list[nn.Module]:
    """The largest submodules that contain none of the layers."""
    found: list[nn.Module] = []
    for child in model.children():
        if child is stack:
            continue
        if any(module is stack for module in child.modules()):
            found += _outside(child, stack)
        elif next(child.parameters(), None) is not None or next(child.buffers(), None) is not None:
            found.append(child)
    return found


def _move(
    model: nn.Module,
    module_devices: dict[nn.Module, torch.device],
    first: torch.device,
    files: Sequence[WeightFile],
    report: Callable[[int], None],
) -> None:
    """Move weights and buffers to the device of their module. Tensors shared by modules move once."""
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    device_of_tensor: dict[int, torch.device] = {}
    shares: dict[torch.device, list[torch.Tensor]] = {}

    def find(module: nn.Module, device: torch.device) -> None:
        device = module_devices.get(module, device)
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or tensor.device == device_of_tensor.get(id(tensor), device):
                    continue
                places.append((tensors, name, tensor))
                if device_of_tensor.setdefault(id(tensor), device) is device:
                    shares.setdefault(device, []).append(tensor)
        for child in module.children():
            find(child, device)

    find(model, first)
    copies = staging.copy_to_devices(shares, files, report)
    moved: dict[int, torch.Tensor] = {}
    for tensors, name, tensor in places:
        if id(tensor) not in moved:
            new = copies[device_of_tensor[id(tensor)]](tensor.detach())
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            moved[id(tensor)] = new
        tensors[name] = moved[id(tensor)]


class _ForwardTransfers:
    """Tensors moved during one forward pass, so that each moves once to each device."""

    def __init__(self) -> None:
        # By identity, which is unique as long as the tensor is kept here.
        self._moved: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, module: nn.Module, args: Any) -> None:
        self._moved.clear()

    def to(self, device: torch.device) -> Callable[[nn.Module, Any, Any], tuple[Any, Any]]:
        """Hook that moves a module's arguments to its device."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            # The first argument is the hidden state. It changes with every layer, so it is not kept.
            hidden = tuple(arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args[:1])
            return (*hidden, *self._moved_to(args[1:], device)), self._moved_to(kwargs, device)

        return hook

    def end(self, tail: torch.device) -> Callable[[nn.Module, Any, Any], Any]:
        """Hook that moves the last hidden state to the head's device."""

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            self._moved.clear()
            if isinstance(output, tuple):
                return (output[0].to(tail), *output[1:])
            output.last_hidden_state = output.last_hidden_state.to(tail)
            return output

        return hook

    def _moved_to(self, value: Any, device: torch.device) -> Any:
        if isinstance(value, torch.Tensor):
            return value if value.device == device else self._copy(value, device)
        if type(value) in (tuple, list):
            return type(value)([self._moved_to(item, device) for item in value])
        if type(value) is dict:
            return {name: self._moved_to(item, device) for name, item in value.items()}
        return value

    def _copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        key = (id(tensor), device)
        if key not in self._moved:
            self._moved[key] = tensor, tensor.to(device)
        return self._moved[key][1]


class SplitKvPools:
    """KV pools of a split model: one on each device for its layers, with the same blocks in all of them."""

    def __init__(self, pools: Sequence[KvPool], split: LayerSplit):
        self.pools = tuple(pools)
        self._layer_places = tuple(
            (place, layer - split.starts[place]) for layer, place in enumerate(split.device_indices)
        )

    def bytes_on(self, device: torch.device) -> int:
        return sum(pool.bytes_on(device) for pool in self.pools)

    def lay_out(self, batch: Sequence[Segment | ForwardPart]) -> "SplitPackedBatch":
        return SplitPackedBatch(tuple(PackedBatch.of(batch, pool) for pool in self.pools), self._layer_places)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for pool in self.pools:
            pool.copy(pairs)

    def erase(self, blocks: Sequence[int]) -> None:
        for pool in self.pools:
            pool.erase(blocks)


@dataclass(frozen=True, slots=True)
class SplitPackedBatch(AttentionLayout):
    """A packed batch on each device."""

    parts: tuple[PackedBatch, ...]
    layer_places: tuple[tuple[int, int], ...]  # by layer: index of its device, and index among the layers there

    def attend(self, at: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `AttentionLayout`."""
        place, layer = self.layer_places[at.layer]
        return self.parts[place].attend(at._replace(layer=layer), query, key, value)
