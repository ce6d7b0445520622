"""A model's layers over several devices: which lies where, and what moves when a step goes from one to the next.

Each device has a run of layers with their keys and values. The first has the embeddings as well, the last the final
norm and the head; a head that shares the embeddings' weights stays with them, as a second copy would cost more than to
move what it reads. Tensors move where a layer (or the norm, or the head) of another device wants them: what all layers
of a device share, such as masks and positions, once in a step.

Law: it decides nothing. How many layers lie on which device, the router says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from worker.engines.transformers.attention.kv_pool import Pool
from worker.engines.transformers.attention.paged import Layout, Packed
from worker.engines.transformers.load import staging
from worker.engines.transformers.load.safetensors import WeightFile
from worker.engines.transformers.schedule.scheduler import Batch
from worker.errors import StartError
from worker.protocol.argv import ModelOptions
from worker.protocol.exits import Exit


@dataclass(frozen=True, slots=True)
class Split:
    """Devices, in order, and how many layers each has."""

    devices: tuple[torch.device, ...]
    layers: tuple[int, ...]

    @property
    def homes(self) -> tuple[int, ...]:
        """By layer: the place of its device."""
        return tuple(place for place, count in enumerate(self.layers) for _ in range(count))

    @property
    def by_layer(self) -> tuple[torch.device, ...]:
        return tuple(self.devices[place] for place in self.homes)

    @property
    def starts(self) -> tuple[int, ...]:
        """By device: its first layer."""
        return (0, *accumulate(self.layers[:-1]))


def wanted(options: ModelOptions, config: Any, devices: Sequence[torch.device]) -> Split | None:
    """The split that `options` ask for; None: one device has it all. Raises StartError for one that cannot be."""
    if len(devices) == 1 and not options.layers:
        return None
    if len(options.layers) != len(devices) or not all(word.isdecimal() and int(word) for word in options.layers):
        raise StartError(
            f"--layers={','.join(options.layers)} does not say how many layers each of {len(devices)} devices has",
            Exit.USAGE,
        )
    layers = tuple(map(int, options.layers))
    have = _count(config)
    if sum(layers) != have:
        raise StartError(f"--layers={','.join(options.layers)} are {sum(layers)} layers, the model has {have}")
    why = cannot(config)
    if getattr(config, "quantization_config", None) or options.quantization not in ("auto", "none"):
        why = "its weights are quantised"
    elif options.max_loras:
        why = "requests may name adapters (max-loras)"
    if why:
        raise StartError(f"architecture {config.model_type!r} cannot be split over devices: {why}; give it one device")
    return Split(tuple(devices), layers)


def cannot(config: Any) -> str:
    """Why a model of this configuration cannot be split; empty: it can."""
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder and a decoder"
    if getattr(config, "vision_config", None) is not None:
        return "it sees images"
    return ""


def _count(config: Any) -> int:
    count: int = config.get_text_config(decoder=True).num_hidden_layers
    return count


def tail_of(model: Any, split: Split) -> torch.device:
    """The device on which the last hidden state comes out, and logits: the last, or the first if the head is the
    embeddings."""
    head = model.get_output_embeddings()
    shared = {id(each) for each in model.get_input_embeddings().parameters()}
    is_tied = head is not None and any(id(each) in shared for each in head.parameters())
    return split.devices[0 if is_tied else -1]


def place(
    model: Any,
    split: Split,
    files: Sequence[WeightFile] = (),
    report: Callable[[int], None] = lambda done: None,
) -> None:
    """Move the parts of `model` to their devices, to all at once, and have whatever they compute with follow them.

    Weights that are views of `files` are read from there; `report` gets the bytes that have arrived. Raises StartError
    if its layers cannot be told from the rest, and what `staging.bring` raises.
    """
    parent, stack = stack_of(model)
    first, last, tail = split.devices[0], split.devices[-1], tail_of(model, split)
    head = model.get_output_embeddings()
    homes: dict[nn.Module, torch.device] = dict(zip(stack, split.by_layer, strict=True))
    homes |= dict.fromkeys(_behind(parent, stack), last)
    if head is not None:
        homes[head] = tail
    _move(model, homes, first, files, report)
    visit = _Visit()
    parent.register_forward_pre_hook(visit.begin)
    for each in (*stack, *_beside(model, stack)):
        each.register_forward_pre_hook(visit.bring(homes.get(each, first)), with_kwargs=True)
    parent.register_forward_hook(visit.end(tail))


def stack_of(model: Any) -> tuple[nn.Module, nn.ModuleList]:
    """What calls the layers, and the layers. Raises StartError if they cannot be told from the rest."""
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


def _behind(parent: nn.Module, stack: nn.Module) -> list[nn.Module]:
    """What stands behind the layers and has weights: the final norm, as a rule."""
    children = list(parent.children())
    return [each for each in children[children.index(stack) + 1 :] if next(each.parameters(), None) is not None]


def _beside(model: nn.Module, stack: nn.Module) -> list[nn.Module]:
    """The largest parts of the model that have no layer in them."""
    found: list[nn.Module] = []
    for child in model.children():
        if child is stack:
            continue
        if any(each is stack for each in child.modules()):
            found += _beside(child, stack)
        elif next(child.parameters(), None) is not None or next(child.buffers(), None) is not None:
            found.append(child)
    return found


def _move(
    model: nn.Module,
    homes: dict[nn.Module, torch.device],
    first: torch.device,
    files: Sequence[WeightFile],
    report: Callable[[int], None],
) -> None:
    """Weights and buffers to the home of the part that they belong to; what several parts share, once."""
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    home_of: dict[int, torch.device] = {}
    shares: dict[torch.device, list[torch.Tensor]] = {}

    def find(module: nn.Module, home: torch.device) -> None:
        home = homes.get(module, home)
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or tensor.device == home_of.get(id(tensor), home):
                    continue
                places.append((tensors, name, tensor))
                if home_of.setdefault(id(tensor), home) is home:
                    shares.setdefault(home, []).append(tensor)
        for child in module.children():
            find(child, home)

    find(model, first)
    brought = staging.bring_each(shares, files, report)
    moved: dict[int, torch.Tensor] = {}
    for tensors, name, tensor in places:
        if id(tensor) not in moved:
            new = brought[home_of[id(tensor)]](tensor.detach())
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            moved[id(tensor)] = new
        tensors[name] = moved[id(tensor)]


class _Visit:
    """One forward: what has been moved in it, so that it moves once to each device."""

    def __init__(self) -> None:
        self._moved: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
        """By identity, which nobody else has while the tensor is kept here."""

    def begin(self, module: nn.Module, args: Any) -> None:
        self._moved.clear()

    def bring(self, home: torch.device) -> Callable[[nn.Module, Any, Any], tuple[Any, Any]]:
        """A hook that brings what a module is called with to its home."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            # the first argument is what changes from layer to layer: nobody wants it twice
            hidden = tuple(each.to(home) if isinstance(each, torch.Tensor) else each for each in args[:1])
            return (*hidden, *self._brought(args[1:], home)), self._brought(kwargs, home)

        return hook

    def end(self, tail: torch.device) -> Callable[[nn.Module, Any, Any], Any]:
        """A hook that hands on the last hidden state where the head is."""

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            self._moved.clear()
            if isinstance(output, tuple):
                return (output[0].to(tail), *output[1:])
            output.last_hidden_state = output.last_hidden_state.to(tail)
            return output

        return hook

    def _brought(self, value: Any, home: torch.device) -> Any:
        if isinstance(value, torch.Tensor):
            return value if value.device == home else self._copy(value, home)
        if type(value) in (tuple, list):
            return type(value)([self._brought(each, home) for each in value])
        if type(value) is dict:
            return {name: self._brought(each, home) for name, each in value.items()}
        return value

    def _copy(self, tensor: torch.Tensor, home: torch.device) -> torch.Tensor:
        key = (id(tensor), home)
        if key not in self._moved:
            self._moved[key] = tensor, tensor.to(home)
        return self._moved[key][1]


class Pools:
    """Keys and values of a split model: a pool on each device, for its layers, with the same blocks in all of them."""

    def __init__(self, pools: Sequence[Pool], split: Split):
        self.pools = tuple(pools)
        self._homes = tuple((place, layer - split.starts[place]) for layer, place in enumerate(split.homes))

    @property
    def bytes(self) -> int:
        return sum(pool.bytes for pool in self.pools)

    def bytes_on(self, device: torch.device) -> int:
        return sum(pool.bytes_on(device) for pool in self.pools)

    def lay_out(self, batch: Batch) -> "Spread":
        return Spread(tuple(Packed.of(batch, pool) for pool in self.pools), self._homes)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for pool in self.pools:
            pool.copy(pairs)

    def erase(self, blocks: Sequence[int]) -> None:
        for pool in self.pools:
            pool.erase(blocks)


@dataclass(frozen=True, slots=True)
class Spread(Layout):
    """The layout of one step on each device."""

    parts: tuple[Packed, ...]
    homes: tuple[tuple[int, int], ...]
    """By layer: its device, and its place among the layers there."""

    def attend(
        self,
        kernel: Any,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int,
        scaling: float | None,
    ) -> torch.Tensor:
        """See `Layout`."""
        place, layer = self.homes[layer]
        return self.parts[place].attend(kernel, layer, query, key, value, window, scaling)
