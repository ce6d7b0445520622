"""LoRA adapters of a loaded model: registration, slots on the device, and their part of a step.

Slots for `max-loras` adapters are allocated at load, for every linear layer that can have one. In a step the tokens of
each sequence are rows of a layer's input. For the rows of one adapter the layer adds scale * B(Ax); rows without an
adapter stay unchanged.

Tensor parallelism divides an adapter as its layer is divided: B by outputs, or A by inputs, and then the sum over ranks
that the layer needs anyway includes the adapter's. Only the leader has names and files. It sends its plan of a step to
the other ranks, and the weights while all ranks load them.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from worker.engines.transformers.attention.cpu_linear import uses_weight_directly
from worker.engines.transformers.device import lazy_pages, memory
from worker.engines.transformers.load import lora_files, tensor_parallel_plan
from worker.engines.transformers.load.lora_files import LoraFile, LoraPair
from worker.engines.transformers.load.tensor_parallel_plan import RankShare
from worker.engines.transformers.schedule.lora_slots import AppliedAdapter, LoraAdapter, LoraSlots
from worker.errors import AdapterNotFound, UnsupportedByModel, UnusableAdapter
from worker.interface import AdapterChoice
from worker.protocol.argv import AdapterSource

LoraRows = tuple[AppliedAdapter | None, int]  # adapter of one sequence in a step, and its number of input rows


class LoraStep(NamedTuple):
    """The adapters of one step, as plain numbers: what each rank must do."""

    loads: Sequence[tuple[int, Mapping[str, int]]] = ()  # slot of each adapter to load, and its LoRA ranks by layer
    # Slot, scale, and the ranges of rows of each adapter. No ranges: it is the adapter of all rows.
    groups: Sequence[tuple[int, float, Sequence[tuple[int, int]]]] = ()
    # Rows of a layer's input; None if all rows have the same adapter, so their number does not matter.
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class _LoraGroup:
    """The rows of one adapter in a step."""

    slot: int
    scale: float
    rows: slice | torch.Tensor  # a range of rows, or their indices
    spans: Sequence[tuple[int, int]]  # the same as ranges; empty: all rows

    def on(self, device: torch.device) -> "_LoraGroup":
        """The same with indices on `device`, for models on several devices."""
        assert isinstance(self.rows, torch.Tensor)
        return self if self.rows.device == device else replace(self, rows=self.rows.to(device))


@dataclass(eq=False)
class _LoraLayer:
    """One linear layer with its adapter slots."""

    module: Any
    a: torch.Tensor  # [slots, lora_rank, inputs]
    b: torch.Tensor  # [slots, outputs, lora_rank], multiplied with the adapter's scaling
    lora_ranks: list[int]  # by slot; 0: the slot's adapter does not change this layer
    adapters: "LoraAdapters"  # with the additions of the current step
    divided: int | None  # the dimension of its weight [outputs, inputs] of which this tensor-parallel rank has a slice
    expands_cache: bool  # its input is not the tokens of the step but all compressed keys so far (DeepSeek)
    plain: Any = None  # the module's forward, which this object replaces before the first step with an adapter

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[.., inputs]` to `[.., outputs]`."""
        y: torch.Tensor = self.plain(x)
        if not self.adapters.groups or not any(self.lora_ranks):
            return y
        rows = x.reshape(-1, x.shape[-1])
        # The base layer may return a view or an expanded tensor; the additions below are in place.
        y = y.contiguous()
        out = y.view(-1, y.shape[-1])
        for group in self._groups(len(rows)):
            if lora_rank := self.lora_ranks[group.slot]:
                self._add(rows, out, group if isinstance(group.rows, slice) else group.on(out.device), lora_rank)
        return y

    def _groups(self, rows: int) -> Sequence[_LoraGroup]:
        """The additions of the current step to an input of `rows` rows."""
        groups, tokens = self.adapters.groups, self.adapters.rows
        if tokens is None or rows == tokens:
            return groups
        if not self.expands_cache:
            raise RuntimeError("a layer with an adapter sees other rows than the tokens of the step")
        # All sequences of a forward have as many tokens, and this layer sees as many columns of the cache of each.
        return [
            replace(group, rows=slice(first * rows // tokens, last * rows // tokens))
            for group in groups
            for first, last in group.spans
        ]

    def _add(self, rows: torch.Tensor, out: torch.Tensor, group: _LoraGroup, lora_rank: int) -> None:
        a, b = self.a[group.slot, :lora_rank], self.b[group.slot, :, :lora_rank]
        inner = rows[group.rows].to(a.dtype) @ a.t()  # [rows of the group, lora_rank]
        if isinstance(group.rows, slice) and out.dtype == a.dtype:
            out[group.rows].addmm_(inner, b.t(), alpha=group.scale)
            return
        # Different types: compute in the adapter's type, then add in the layer's.
        more = (inner @ b.t()).to(out.dtype)
        if isinstance(group.rows, slice):
            out[group.rows].add_(more, alpha=group.scale)
        else:
            out.index_add_(0, group.rows, more, alpha=group.scale)


class LoraAdapters:
    """The adapters of one model. Names are looked up from any thread; steps run in the step loop's thread."""

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        lora_rank: int,
        copies: int,
        device: torch.device,
        share: RankShare | None = None,
    ):
        """Allocate `slots` slots for LoRA ranks up to `lora_rank`. `copies`: adapter files kept open, 0 for all.
        `share`: of a tensor-parallel model. Raises UnsupportedByModel if the model has no suitable layer."""
        self.slots, self._lora_rank, self._copies, self._device = LoraSlots(slots), lora_rank, copies, device
        self._share = share
        self.groups: tuple[_LoraGroup, ...] = ()  # the additions of the current step
        self.rows: int | None = None  # as in `LoraStep`
        divided = tensor_parallel_plan.divided_dims(model) if share is not None else {}
        self._layers = {
            name: self._layer(name, module, inputs, outputs, model.dtype, divided.get(name))
            for name, (module, inputs, outputs) in linear_layers(model).items()
        }
        if not self._layers:
            raise UnsupportedByModel("this model has no linear layers that support adapters")
        self._modules = {name for name, _ in model.named_modules()}
        self._prefix = f"{model.base_model_prefix}."
        self._by_slot: list[LoraAdapter | None] = [None] * slots
        self._opened: dict[int, tuple[LoraAdapter, LoraFile]] = {}  # by slot: to be loaded by the planned step
        self._is_installed = False
        self._lock = threading.Lock()
        self._numbers = count(1)
        # By name in order of registration; a string is the reason why an adapter cannot be used.
        self._adapters: dict[str, LoraAdapter | str] = {}
        self._sources: dict[str, AdapterSource] = {}
        self._default = ""
        self._files: OrderedDict[int, LoraFile] = OrderedDict()
        # Of former registrations, whose folder may have changed. A request that waits for a slot may still load them.
        self._former_files: WeakKeyDictionary[LoraAdapter, LoraFile] = WeakKeyDictionary()
        self._stamps: dict[int, tuple[int, ...]] = {}

    def _layer(
        self, name: str, module: nn.Module, inputs: int, outputs: int, dtype: torch.dtype, divided: int | None
    ) -> _LoraLayer:
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        kind, slots = weight.dtype if weight.is_floating_point() else dtype, self.slots.count
        a = lazy_pages.claim(slots, self._lora_rank, inputs, dtype=kind, device=weight.device)  # the layer's own device
        b = lazy_pages.claim(slots, outputs, self._lora_rank, dtype=kind, device=weight.device)
        return _LoraLayer(module, a, b, [0] * slots, self, divided, name.endswith(".kv_b_proj"))

    @property
    def bytes(self) -> int:
        """Bytes of the slots, allocated at load."""
        return sum(self.bytes_by_device().values())

    def bytes_by_device(self) -> dict[torch.device, int]:
        """Bytes of the slots on each device."""
        sizes: dict[torch.device, int] = {}
        for layer in self._layers.values():
            sizes[layer.a.device] = sizes.get(layer.a.device, 0) + layer.a.nbytes + layer.b.nbytes
        return sizes

    # Names

    def update(self, sources: Sequence[AdapterSource], default: str = "") -> dict[str, str]:
        """Replace the set of registered adapters; new and changed ones are read. Returns the problems by name. A broken
        adapter stays registered, and requests for it get the reason. Blocks; running sequences keep their adapters."""
        with self._lock:
            known: dict[str, LoraAdapter | str] = {}
            for source in sources:
                before = self._adapters.get(source.name)
                is_same = self._sources.get(source.name) == source
                if isinstance(before, LoraAdapter) and is_same and not self._has_changed(before):
                    known[source.name] = before
                else:
                    known[source.name] = self._read(source)
            former = {adapter for adapter in self._adapters.values() if isinstance(adapter, LoraAdapter)}
            for adapter in former.difference(known.values()):
                if adapter.number in self._files:
                    self._former_files[adapter] = self._files[adapter.number]
            self._adapters, self._default = known, default
            self._sources = {source.name: source for source in sources}
            return {name: adapter for name, adapter in known.items() if isinstance(adapter, str)}

    def _read(self, source: AdapterSource) -> LoraAdapter | str:
        adapter = LoraAdapter(next(self._numbers), source.name, source.path, source.scale, source.pinned)
        try:
            self._check(adapter, self._open(adapter))
        except UnusableAdapter as error:
            return error.message
        return adapter

    def _has_changed(self, adapter: LoraAdapter) -> bool:
        """True if the adapter's files are others than at its registration, or are gone."""
        try:
            return lora_files.stamp(adapter.folder) != self._stamps[adapter.number]
        except UnusableAdapter:
            return True

    def forget_gone(self) -> None:
        """Free the slots of unregistered adapters as soon as no sequence uses them."""
        with self._lock:
            known = {adapter.number for adapter in self._adapters.values() if isinstance(adapter, LoraAdapter)}
            for number in [number for number in self._files if number not in known]:
                del self._files[number]
        self.slots.keep_only(known)

    def find(self, choice: AdapterChoice | None) -> AppliedAdapter | None:
        """The adapter for a request's choice; None: the base model. Raises AdapterNotFound."""
        with self._lock:
            if choice is None:
                if not self._default:
                    return None
                choice = AdapterChoice(self._default)
            name = choice.name
            if choice.number is not None:
                if not 0 <= choice.number < len(self._adapters):
                    raise AdapterNotFound(f"there is no adapter {choice.number}; GET /lora-adapters lists them")
                name = list(self._adapters)[choice.number]
            if not name or not choice.scale:
                return None
            found = self._adapters.get(name)
            if found is None:
                raise AdapterNotFound(_unknown(name, list(self._adapters)))
            if isinstance(found, str):
                raise UnusableAdapter(f"adapter '{name}' cannot be used: {found}")
            return AppliedAdapter(found, choice.scale * found.scale)

    # Files

    def _open(self, adapter: LoraAdapter) -> LoraFile:
        """Open an adapter's file and close the least recently used one above the limit. Raises UnusableAdapter."""
        file = self._files.pop(adapter.number, None) or self._former_files.get(adapter)
        if file is None or lora_files.is_overwritten(adapter.folder, file.stamp):
            file = lora_files.read(adapter.folder)
            # A file that changed on disk belongs to another registration; mixing both would give wrong text.
            if self._stamps.setdefault(adapter.number, file.stamp) != file.stamp:
                changed = f"{adapter.folder} has changed since '{adapter.name}' was registered"
                raise UnusableAdapter(f"{changed}: update it, reload the presets, or unload the model")
            file = replace(file, pairs={self._named(adapter, name): pair for name, pair in file.pairs.items()})
        self._files[adapter.number] = file
        while self._copies and len(self._files) > self._copies:
            self._files.popitem(last=False)
        return file

    def _check(self, adapter: LoraAdapter, file: LoraFile) -> None:
        """Raise UnusableAdapter if the adapter does not fit the model or the slots."""
        if file.lora_rank > self._lora_rank:
            raise UnusableAdapter(
                f"{adapter.folder} has rank {file.lora_rank}, {self._lora_rank} is the most; raise max-lora-rank"
            )
        for name, pair in file.pairs.items():
            a, b = self._undivided_shapes(self._layers[name], pair.lora_rank)
            if (tuple(pair.a.shape), tuple(pair.b.shape)) != (a, b):
                shapes = f"{list(pair.b.shape)} x {list(pair.a.shape)} in the file, {list(b)} x {list(a)} here"
                raise UnusableAdapter(f"{adapter.folder} is for another model: {name} is {shapes}")

    def _named(self, adapter: LoraAdapter, name: str) -> str:
        """The layer with an adapter's layer name, which may have or lack the base model's prefix."""
        names = (name, self._prefix + name, name.removeprefix(self._prefix))
        found = next((layer for layer in names if layer in self._layers), None)
        if found is not None:
            return found
        if any(module in self._modules for module in names):
            raise UnusableAdapter(
                f"{adapter.folder}: {name} is a layer that does not support adapters (a head, an embedding, experts,"
                " their router, a vision tower, or one whose weights the model's code reads directly); merge it into a"
                " checkpoint"
            )
        raise UnusableAdapter(f"{adapter.folder} is for another model: there is no layer {name}")

    def _undivided_shapes(self, layer: _LoraLayer, lora_rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of A and B of an undivided layer."""
        sizes = [layer.b.shape[1], layer.a.shape[2]]  # outputs, inputs
        if self._share is not None and layer.divided is not None:
            sizes[layer.divided] *= self._share[0].count
        return (lora_rank, sizes[1]), (sizes[0], lora_rank)

    def _load(self, slot: int, lora_ranks: Mapping[str, int]) -> None:
        """Copy an adapter into its slot: from its file, or from the leader."""
        # Empty the slot first: after an error below it must not hold a mix of two adapters.
        self._by_slot[slot] = None
        for layer in self._layers.values():
            layer.lora_ranks[slot] = 0
        adapter, file = self._opened.pop(slot, (None, None))
        for name, lora_rank in lora_ranks.items():
            layer, pair = self._layers[name], file.pairs[name] if file is not None else None
            layer.a[slot, :lora_rank], layer.b[slot, :, :lora_rank] = self._parts(layer, lora_rank, pair)
            layer.lora_ranks[slot] = lora_rank
            if file is not None and pair is not None:
                file.file.release_pages(pair.a)
                file.file.release_pages(pair.b)
        self._by_slot[slot] = adapter

    def _parts(self, layer: _LoraLayer, lora_rank: int, pair: LoraPair | None) -> tuple[torch.Tensor, torch.Tensor]:
        """A and scaled B of a layer, or this rank's slices of them. `pair`: None on ranks that get it from the
        leader."""
        if pair is not None:
            a = pair.a.to(layer.a.device, layer.a.dtype)
            b = (pair.b.to(layer.b.device, torch.float32) * pair.scaling).to(layer.b.dtype)
        else:
            a, b = (layer.a.new_empty(shape) for shape in self._undivided_shapes(layer, lora_rank))
        if self._share is None:
            return a, b
        part, group = self._share
        a, b = group.broadcast(a), group.broadcast(b)
        return part.of(a, 1) if layer.divided == 1 else a, part.of(b, 0) if layer.divided == 0 else b

    # Steps

    def in_slot(self, slot: int, scale: float) -> AppliedAdapter:
        """The adapter that was loaded into a slot, for `begin` on a rank that has no names."""
        adapter = self._by_slot[slot]
        if adapter is None:
            adapter = self._by_slot[slot] = LoraAdapter(next(self._numbers), "", "")
            self.slots.assign(slot, adapter)
        return AppliedAdapter(adapter, scale)

    def begin(self, parts: Sequence[LoraRows]) -> None:
        """Prepare the next forward pass, which has these rows in this order. Raises UnusableAdapter if an adapter's
        files have changed."""
        self.apply(self.plan(parts))

    def has_loads(self, uses: Iterable[AppliedAdapter | None]) -> bool:
        """True if one of these adapters, which have slots, is not loaded yet."""
        applied = (use.adapter for use in uses if use is not None)
        return any(self._by_slot[self.slots.slot(adapter)] is not adapter for adapter in applied)

    def plan(self, parts: Sequence[LoraRows]) -> LoraStep:
        """The work of each rank for the forward pass of `begin`. Opens the files of adapters to load, so that `apply`
        cannot fail because of them. Raises UnusableAdapter."""
        if all(use is None for use, _ in parts):
            return LoraStep()
        self._opened = {}
        runs: dict[AppliedAdapter | None, list[tuple[int, int]]] = {}
        end = 0
        for use, rows in parts:
            end += rows
            runs.setdefault(use, []).append((end - rows, end))
        groups = []
        for use, spans in runs.items():
            if use is not None:
                slot = self.slots.slot(use.adapter)
                groups.append((slot, use.scale, spans if len(runs) > 1 else ()))
                if self._by_slot[slot] is not use.adapter and slot not in self._opened:
                    with self._lock:
                        self._opened[slot] = use.adapter, self._open(use.adapter)
        loads = [
            (slot, {name: pair.lora_rank for name, pair in file.pairs.items()})
            for slot, (_, file) in self._opened.items()
        ]
        return LoraStep(loads, groups, end if len(runs) > 1 else None)

    def apply(self, step: LoraStep) -> None:
        """Load the adapters of `step`, and add them in the next forward pass."""
        for slot, lora_ranks in step.loads:
            self._load(slot, lora_ranks)
        self.groups = tuple(_LoraGroup(slot, scale, self._rows(spans), spans) for slot, scale, spans in step.groups)
        self.rows = step.rows
        if step.groups and not self._is_installed:
            self._install()

    def _rows(self, spans: Sequence[tuple[int, int]]) -> slice | torch.Tensor:
        if not spans:
            return slice(None)
        begin, end = spans[0][0], spans[-1][1]
        if sum(last - first for first, last in spans) == end - begin:
            return slice(begin, end)
        return memory.upload([row for span in spans for row in range(*span)], self._device)

    def _install(self) -> None:
        """Replace the forward functions. Not in the constructor: weights are reordered by functions set after it."""
        self._is_installed = True
        for layer in self._layers.values():
            layer.plain = layer.module.forward
            layer.module.forward = layer

    def pretend(self) -> AppliedAdapter:
        """Put an adapter of the largest LoRA rank for every layer into slot 0, for memory estimates."""
        adapter = LoraAdapter(0, "", "")
        self.slots.acquire(adapter)
        slot = self.slots.slot(adapter)
        self._by_slot[slot] = adapter
        for layer in self._layers.values():
            layer.lora_ranks[slot] = self._lora_rank
        return AppliedAdapter(adapter)


def _unknown(name: str, known: list[str]) -> str:
    name = name[:100]  # chosen by a client, and compared for each character
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    return f"adapter '{name}' not found{hint}"


def linear_layers(model: Any) -> Mapping[str, tuple[nn.Module, int, int]]:
    """Linear layers that support adapters, by name, with their numbers of inputs and outputs.

    Their input has one row for each token of the step, or for each compressed key. That excludes the head, which sees
    the last tokens only, experts and vision towers. Layers whose weights are read by the code around them are excluded,
    too, and routers that are linear layers but return the chosen experts.
    """
    head = model.get_output_embeddings()
    is_multimodal = any(getattr(model.config, name, None) is not None for name in ("vision_config", "audio_config"))
    text = set((model.get_decoder() if is_multimodal else model).modules())
    found = {}
    for path, parent in model.named_modules():
        for own, module in parent.named_children():
            name = f"{path}.{own}" if path else own
            if not isinstance(module, nn.Linear | Conv1D) or module not in text or module is head:
                continue
            if ".experts." in name or hasattr(module, "num_experts"):
                continue
            if not uses_weight_directly(type(parent).__module__, own):
                found[name] = (module, *_shape(module))
    return found


def _shape(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, Conv1D):
        return int(module.nx), int(module.nf)
    assert isinstance(module, nn.Linear)
    return module.in_features, module.out_features
