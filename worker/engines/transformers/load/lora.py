"""Adapters beside a model: which requests may name, and what a step adds for the sequences that use one.

Slots for `max-loras` adapters are allocated at load, for every linear layer that can have one. In a step the tokens of
each sequence are rows of a layer's input; for the rows of one adapter the layer adds scale * B(Ax), and rows without
one stay as the layer made them. Steps in which nobody has an adapter run the model's own code, with nothing in its way.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import count
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from worker.engines.transformers.attention.cpu_linear import is_read
from worker.engines.transformers.device import lazy_pages, memory
from worker.engines.transformers.load import lora_files
from worker.engines.transformers.load.lora_files import LoraFile
from worker.engines.transformers.schedule.lora_slots import Adapter, Slots, Use
from worker.errors import AdapterNotFound, UnsupportedByModel, UnusableAdapter
from worker.interface import AdapterChoice
from worker.protocol.argv import AdapterSource

Part = tuple[Use | None, int]
"""What a sequence of a step has, and how many rows of a layer's input are its tokens."""


@dataclass(frozen=True, slots=True)
class _Group:
    """The rows of one adapter in a step."""

    slot: int
    scale: float
    rows: slice | torch.Tensor
    """A run of them, or their numbers."""

    def on(self, device: torch.device) -> "_Group":
        """The same where a layer is, of a model that is split over several devices."""
        assert isinstance(self.rows, torch.Tensor)
        return self if self.rows.device == device else replace(self, rows=self.rows.to(device))


@dataclass(eq=False)
class _Layer:
    """One linear layer with its slots."""

    module: Any
    a: torch.Tensor
    """`[slots, rank, inputs]`."""
    b: torch.Tensor
    """`[slots, outputs, rank]`, times its scaling."""
    ranks: list[int]
    """By slot; 0: what lies there adds nothing to this layer."""
    plan: "_Plan"
    plain: Any = None
    """The module's forward, while this stands in its place."""
    own: Any = None
    """What the module had in place of its class's forward."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[.., inputs]` to `[.., outputs]`."""
        y: torch.Tensor = self.plain(x)
        rows = x.reshape(-1, x.shape[-1])
        if self.plan.rows is not None and len(rows) != self.plan.rows:
            raise RuntimeError("a layer with an adapter sees other rows than the tokens of the step")
        y = y.contiguous()
        out = y.view(-1, y.shape[-1])
        for group in self.plan.groups:
            if rank := self.ranks[group.slot]:
                self._add(rows, out, group if isinstance(group.rows, slice) else group.on(out.device), rank)
        return y

    def _add(self, rows: torch.Tensor, out: torch.Tensor, group: _Group, rank: int) -> None:
        a, b = self.a[group.slot, :rank], self.b[group.slot, :, :rank]
        inner = rows[group.rows].to(a.dtype) @ a.t()  # [rows of the group, rank]
        if out.dtype != a.dtype:
            self._put(out, group, (inner @ b.t()).to(out.dtype))
        elif isinstance(group.rows, slice):
            out[group.rows].addmm_(inner, b.t(), alpha=group.scale)
        else:
            out.index_add_(0, group.rows, inner @ b.t(), alpha=group.scale)

    def _put(self, out: torch.Tensor, group: _Group, more: torch.Tensor) -> None:
        if isinstance(group.rows, slice):
            out[group.rows].add_(more, alpha=group.scale)
        else:
            out.index_add_(0, group.rows, more, alpha=group.scale)


@dataclass(slots=True)
class _Plan:
    """What the step that runs has to add."""

    groups: tuple[_Group, ...] = ()
    rows: int | None = None
    """Of a layer's input; None: however many, as all belong to one sequence or to sequences with the same adapter."""


class Adapters:
    """The adapters of one model. Names are asked for from any thread; what computes, on the step loop's."""

    def __init__(self, model: Any, *, slots: int, rank: int, copies: int, device: torch.device):
        """Room for `slots` adapters at once with ranks up to `rank`. `copies`: of how many files are kept open; 0: of
        all. Raises UnsupportedByModel if the model has no layer for any."""
        self.slots, self._rank, self._copies, self._device = Slots(slots), rank, copies, device
        self._plan = _Plan()
        self._layers = {
            name: self._layer(module, inputs, outputs, model.dtype, slots)
            for name, (module, inputs, outputs) in linear_layers(model).items()
        }
        if not self._layers:
            raise UnsupportedByModel("this model has no linear layers that adapters could stand beside")
        self._modules = {name for name, _ in model.named_modules()}
        self._prefix = f"{model.base_model_prefix}."
        self._held: list[Adapter | None] = [None] * slots
        self._active: list[_Layer] = []
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._known: dict[str, Adapter | str] = {}
        """By name, in order of registration; of those that cannot be used, why."""
        self._sources: dict[str, AdapterSource] = {}
        self._default = ""
        self._files: OrderedDict[int, LoraFile] = OrderedDict()
        self._stamps: dict[int, tuple[int, ...]] = {}

    def _layer(self, module: nn.Module, inputs: int, outputs: int, dtype: torch.dtype, slots: int) -> _Layer:
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        kind = weight.dtype if weight.is_floating_point() else dtype
        a = lazy_pages.claim(slots, self._rank, inputs, dtype=kind, device=weight.device)  # one of several, perhaps
        b = lazy_pages.claim(slots, outputs, self._rank, dtype=kind, device=weight.device)
        return _Layer(module, a, b, [0] * slots, self._plan)

    @property
    def bytes(self) -> int:
        """Of the slots, allocated at load; nothing of it grows later."""
        return sum(layer.a.nbytes + layer.b.nbytes for layer in self._layers.values())

    # Names

    def update(self, sources: Sequence[AdapterSource], default: str = "") -> dict[str, str]:
        """These may be named from now on, and no others; what is new or has changed is read. Returns what is wrong, by
        name: such a one is known, and a request for it hears why. Blocks; running sequences keep what they have."""
        with self._lock:
            known: dict[str, Adapter | str] = {}
            for source in sources:
                before = self._known.get(source.name)
                if isinstance(before, Adapter) and self._sources.get(source.name) == source:
                    known[source.name] = before
                else:
                    known[source.name] = self._read(source)
            self._known, self._default = known, default
            self._sources = {source.name: source for source in sources}
            return {name: each for name, each in known.items() if isinstance(each, str)}

    def _read(self, source: AdapterSource) -> Adapter | str:
        adapter = Adapter(next(self._numbers), source.name, source.path, source.scale, source.pinned)
        try:
            self._check(adapter, self._open(adapter))
        except UnusableAdapter as error:
            return error.message
        return adapter

    def forget_gone(self) -> None:
        """Slots of adapters that are registered no longer are free as soon as nobody uses them."""
        with self._lock:
            known = {each.number for each in self._known.values() if isinstance(each, Adapter)}
            for number in [number for number in self._files if number not in known]:
                del self._files[number]
        for adapter in self._held:
            if adapter is not None and adapter.number not in known:
                self.slots.forget(adapter)

    def find(self, choice: AdapterChoice | None) -> Use | None:
        """What a request's choice stands for now; None: the model as it is. Raises AdapterNotFound."""
        with self._lock:
            if choice is None:
                if not self._default:
                    return None
                choice = AdapterChoice(self._default)
            name = choice.name
            if choice.number is not None:
                if not 0 <= choice.number < len(self._known):
                    raise AdapterNotFound(f"there is no adapter {choice.number}; GET /lora-adapters lists them")
                name = list(self._known)[choice.number]
            if not name or not choice.scale:
                return None
            found = self._known.get(name)
            if found is None:
                raise AdapterNotFound(_unknown(name, list(self._known)))
            if isinstance(found, str):
                raise UnusableAdapter(f"adapter '{name}' cannot be used: {found}")
            return Use(found, choice.scale * found.scale)

    # Files

    def _open(self, adapter: Adapter) -> LoraFile:
        """Its file, mapped; of those that are open only so many as may be stay so. Raises UnusableAdapter."""
        file = self._files.pop(adapter.number, None)
        if file is None:
            file = lora_files.read(adapter.folder)
            if self._stamps.setdefault(adapter.number, file.stamp) != file.stamp:
                raise UnusableAdapter(f"{adapter.folder} has changed since '{adapter.name}' was registered: update it")
        self._files[adapter.number] = file
        while self._copies and len(self._files) > self._copies:
            self._files.popitem(last=False)
        return file

    def _check(self, adapter: Adapter, file: LoraFile) -> None:
        """Raises UnusableAdapter if it does not fit the model, or the slots."""
        if file.rank > self._rank:
            raise UnusableAdapter(
                f"{adapter.folder} has rank {file.rank}, {self._rank} is the most; raise max-lora-rank"
            )
        for name, pair in file.pairs.items():
            layer = self._layers[self._named(adapter, name)]
            a, b = (pair.rank, layer.a.shape[2]), (layer.b.shape[1], pair.rank)
            if (tuple(pair.a.shape), tuple(pair.b.shape)) != (a, b):
                shapes = f"{list(pair.b.shape)} x {list(pair.a.shape)} in the file, {list(b)} x {list(a)} here"
                raise UnusableAdapter(f"{adapter.folder} is for another model: {name} is {shapes}")

    def _named(self, adapter: Adapter, name: str) -> str:
        """The layer that an adapter calls `name`: trained around the same class, or around the model in it."""
        names = (name, self._prefix + name, name.removeprefix(self._prefix))
        found = next((each for each in names if each in self._layers), None)
        if found is not None:
            return found
        if any(each in self._modules for each in names):
            raise UnusableAdapter(
                f"{adapter.folder}: {name} is a layer that cannot have an adapter here (a head, an embedding, experts,"
                " a vision tower, or one whose weights the model's code reads itself); merge it into a checkpoint"
            )
        raise UnusableAdapter(f"{adapter.folder} is for another model: there is no layer {name}")

    def _load(self, adapter: Adapter, slot: int) -> None:
        """Put it into its slot. Raises UnusableAdapter."""
        self._held[slot] = None
        for layer in self._layers.values():
            layer.ranks[slot] = 0
        with self._lock:
            file = self._open(adapter)
        for name, pair in file.pairs.items():
            layer = self._layers[self._named(adapter, name)]
            layer.a[slot, : pair.rank] = pair.a.to(layer.a.device)
            layer.b[slot, :, : pair.rank] = pair.b.to(layer.b.device, torch.float32) * pair.scaling
            layer.ranks[slot] = pair.rank
            file.file.let_go(pair.a)
            file.file.let_go(pair.b)
        self._held[slot] = adapter

    # Steps

    def begin(self, parts: Sequence[Part]) -> None:
        """What follows is a forward of these rows, in this order. Raises UnusableAdapter if an adapter's files are no
        longer what they were."""
        if all(use is None for use, _ in parts):
            self._step_aside()
            return
        for use in {use for use, _ in parts if use is not None}:
            slot = self.slots.slot(use.adapter)
            if self._held[slot] is not use.adapter:
                self._step_aside()
                self._load(use.adapter, slot)
        self._plan.groups, self._plan.rows = self._grouped(parts)
        if not self._active:
            self._step_in()

    def _grouped(self, parts: Sequence[Part]) -> tuple[tuple[_Group, ...], int | None]:
        first = parts[0][0]
        if first is not None and all(use == first for use, _ in parts):
            return (_Group(self.slots.slot(first.adapter), first.scale, slice(None)),), None
        runs: dict[Use, list[tuple[int, int]]] = {}
        end = 0
        for use, rows in parts:
            end += rows
            if use is not None:
                runs.setdefault(use, []).append((end - rows, end))
        groups = tuple(
            _Group(self.slots.slot(use.adapter), use.scale, self._rows(spans)) for use, spans in runs.items()
        )
        return groups, end

    def _rows(self, spans: list[tuple[int, int]]) -> slice | torch.Tensor:
        begin, end = spans[0][0], spans[-1][1]
        if sum(last - first for first, last in spans) == end - begin:
            return slice(begin, end)
        return memory.upload([row for span in spans for row in range(*span)], torch.int64, self._device)

    def _step_in(self) -> None:
        """Stand in place of the forward of those layers to which what lies in the slots adds something."""
        for layer in self._layers.values():
            if any(layer.ranks):
                layer.own = layer.module.__dict__.get("forward")
                layer.plain = layer.module.forward
                layer.module.forward = layer
                self._active.append(layer)

    def _step_aside(self) -> None:
        for layer in self._active:
            if layer.own is not None:
                layer.module.forward = layer.own
            else:
                del layer.module.forward
            layer.plain = layer.own = None
        self._active.clear()

    @property
    def stands_aside(self) -> bool:
        """Whether the model's own code runs, with nothing in between."""
        return not self._active

    def pretend(self) -> Use:
        """An adapter of the largest rank for every layer, in slot 0: for trials of what a step takes."""
        adapter = Adapter(0, "", "")
        self.slots.lend(adapter)
        slot = self.slots.slot(adapter)
        self._held[slot] = adapter
        for layer in self._layers.values():
            layer.ranks[slot] = self._rank
        return Use(adapter)


def _unknown(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    return f"adapter '{name[:100]}' not found{hint}"


def linear_layers(model: Any) -> Mapping[str, tuple[nn.Module, int, int]]:
    """Linear layers that can have an adapter, by name, with their inputs and outputs.

    Those whose input has a row for each token of the step: neither the head, which sees the last ones only, nor experts
    or what sees images. Nor such whose weights the code around them reads, past the layer.
    """
    head = model.get_output_embeddings()
    return {
        name: (module, *_shape(module))
        for name, parent, own, module in _linears(model)
        if module is not head and ".experts." not in name and not is_read(type(parent).__module__, own)
    }


def _linears(model: Any) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """Full name, parent, name in it, and layer; of models that see, those of the text's part only."""
    seen = {id(module) for text in _texts(model) for module in text.modules()}
    for path, parent in model.named_modules():
        for own, module in parent.named_children():
            if isinstance(module, nn.Linear | Conv1D) and (not seen or id(module) in seen):
                yield f"{path}.{own}" if path else own, parent, own, module


def _texts(model: Any) -> list[nn.Module]:
    """The parts of a model that read or write text; nothing: all of it does."""
    if getattr(model.config, "vision_config", None) is None and getattr(model.config, "audio_config", None) is None:
        return []
    return [model.get_decoder()]


def _shape(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, Conv1D):
        return int(module.nx), int(module.nf)
    assert isinstance(module, nn.Linear)
    return module.in_features, module.out_features
