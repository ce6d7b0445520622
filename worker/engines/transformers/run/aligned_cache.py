"""The aligned cache: buffers behind transformers' `Cache` API, for models that run by their own forward.

Of each tensor that a layer keeps (`kept`) there is one buffer for all rows, allocated and touched at once:

    keys, values    [slots, heads, width, head_dim]; columns as in `alignment`. A layer with a window keeps all, and
                    shows the model only what the window reaches. Kept in another type than the model's, the last
                    dimension is a record (`cache_types`)
    crossed         the same for keys and values of an encoder's output; they begin at column 0
    states          [slots, ...] of state-space, convolution and linear-attention layers, twice: as they are now, and
                    as they were before the newest step, which may have to be taken again

Whatever the forward gets to see are views of these, or what was unpacked for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import EncoderDecoderCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from worker.engines.transformers.attention.quantized_kv_types import CacheType
from worker.engines.transformers.device.lazy_pages import claim
from worker.engines.transformers.run.cache_probe import LayerShape, Shape
from worker.engines.transformers.schedule.aligned_layout import Move, Swap


@dataclass(slots=True)
class View:
    """Which part of the buffers a forward sees: these slots, and of their past the columns `low` to `time`."""

    slots: slice = field(default_factory=lambda: slice(0, 1))
    low: int = 0
    time: int = 0
    crossed: int = 0
    """Columns of the encoder's output."""

    @property
    def past(self) -> int:
        return self.time - self.low


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Keys, or values, of all slots: `[slots, heads, width, head_dim]`, or records in place of `head_dim`."""

    tensor: torch.Tensor
    kind: CacheType | None = None
    """What the records are."""

    def write(self, slots: slice, columns: slice, given: torch.Tensor) -> None:
        """`[rows, heads, columns, head_dim]`."""
        self.tensor[slots, :, columns] = given if self.kind is None else self.kind.pack(given[..., None, :])

    def read(self, slots: slice, columns: slice) -> torch.Tensor:
        """`[rows, heads, columns, head_dim]`: a view, or what was unpacked for the reader alone."""
        found = self.tensor[slots, :, columns]
        return found if self.kind is None else self.kind.unpack(found).squeeze(-2)


class _Keys(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of a layer, in buffers of ours."""

    def __init__(self, view: View, keys: _Buffer, values: _Buffer, window: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self._view, self._buffers = view, (keys, values)
        self.is_sliding = window > 0
        self.sliding_window = window
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the buffers are here."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[rows, heads, tokens, head_dim]` behind the past; gives what of both the layer's tokens may look at."""
        view = self._view
        end = view.time + key_states.shape[2]
        seen = slice(view.low + self._hidden(), end)
        keys, values = self._buffers
        new = slice(view.time, end)
        keys.write(view.slots, new, key_states)
        values.write(view.slots, new, value_states)
        found = keys.read(view.slots, seen), values.read(view.slots, seen)
        if keys.kind is None:  # what was unpacked nobody but the caller may hold: it takes what the cache saves
            self.keys, self.values = found
        return found

    def _hidden(self) -> int:
        """Columns of the past that are behind the window of the next token already."""
        return max(self._view.past - self.sliding_window + 1, 0) if self.is_sliding else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._view.past - self._hidden() + query_length, self._hidden()

    def get_seq_length(self) -> int:
        return self._view.past

    def get_max_length(self) -> int:
        return self._buffers[0].tensor.shape[2]


class _Crossed(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of an encoder's output: written when it has been computed, and only read from then on."""

    is_sliding = False

    def __init__(self, view: View, keys: _Buffer, values: _Buffer):
        super().__init__()  # type: ignore[no-untyped-call]
        self._view, self._buffers = view, (keys, values)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the buffers are here."""

    @property
    def keys(self) -> torch.Tensor:
        """Of the columns that are shown; models ask for these in place of an update."""
        return self._read(0)

    @keys.setter
    def keys(self, nothing: torch.Tensor | None) -> None:
        """transformers' own layer begins so."""

    @property
    def values(self) -> torch.Tensor:
        return self._read(1)

    @values.setter
    def values(self, nothing: torch.Tensor | None) -> None:
        """As of `keys`."""

    def _read(self, which: int) -> torch.Tensor:
        return self._buffers[which].read(self._view.slots, slice(0, self._view.crossed))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        columns = slice(0, key_states.shape[2])
        for buffer, given in zip(self._buffers, (key_states, value_states), strict=True):
            buffer.write(self._view.slots, columns, given)
        if self._buffers[0].kind is None:
            return key_states, value_states
        keys, values = (buffer.read(self._view.slots, columns) for buffer in self._buffers)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._view.crossed, 0

    def get_seq_length(self) -> int:
        return self._view.crossed

    def get_max_length(self) -> int:
        return self._buffers[0].tensor.shape[2]


class _KeysAndStates(_Keys, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, override, no-untyped-call]
    """A layer with both."""

    def __init__(self, view: View, keys: _Buffer, values: _Buffer, window: int, states: int):
        _Keys.__init__(self, view, keys, values, window)
        LinearAttentionLayer.__init__(self, number_of_states=states)
        self.is_initialized = True


class AlignedCache:
    """All buffers, and the `Cache` of transformers that shows them to a model.

    A step is: carry out the moves, `prepare` the states, `show` a view, run the forward, and say what is now `done`.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        *,
        slots: int,
        width: int,
        devices: Sequence[torch.device],
        kept_as: str = "auto",
    ):
        """`devices`: of each layer, in the order of `shapes`; `kept_as`: in which numbers keys and values are kept
        (`cache_types`)."""
        self._kept_as = kept_as
        self._view = View()
        self._timed: list[torch.Tensor] = []
        self._across: list[torch.Tensor] = []
        self._states: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._stateful: list[tuple[LinearAttentionLayer, dict[int, torch.Tensor], dict[int, torch.Tensor]]] = []
        self._slots, self._width = slots, width
        self._now = [0] * slots
        """By slot: tokens that its states have taken in."""
        self._before = [0] * slots
        """The same of the states as they were before the newest step."""
        self._crossed = [0] * slots
        own = Cache(layers=[self._layer(*each) for each in zip(shapes, devices, strict=True)])
        self._cross = [
            self._cross_layer(shape.crossed, device)
            for shape, device in zip(shapes, devices, strict=True)
            if shape.crossed is not None
        ]
        self.cache: Cache = EncoderDecoderCache(own, Cache(layers=[*self._cross])) if self._cross else own
        largest = dict.fromkeys(devices, 0)
        for each in self._all():
            largest[each.device] = max(largest[each.device], each[0].nbytes)
        self._scratch = {device: claim(size, dtype=torch.uint8, device=device) for device, size in largest.items()}
        """On each device, room for one row of one buffer: what moves within a slot may overlap itself."""

    @property
    def bytes(self) -> int:
        return sum(each.nbytes for each in (*self._all(), *self._scratch.values()))

    def bytes_on(self, device: torch.device) -> int:
        return sum(each.nbytes for each in (*self._all(), *self._scratch.values()) if each.device == device)

    @property
    def has_states(self) -> bool:
        return bool(self._states)

    def _all(self) -> list[torch.Tensor]:
        return [*self._timed, *self._across, *(each for pair in self._states for each in pair)]

    def _empty(self, *size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return claim(self._slots, *size, dtype=dtype, device=device)

    def _pair(self, shapes: tuple[Shape, Shape], device: torch.device) -> list[_Buffer]:
        return [self._buffer(*each.size, dtype=each.dtype, device=device) for each in shapes]

    def _buffer(self, heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> _Buffer:
        kind = CacheType.of(self._kept_as, 1, head_dim, dtype)
        last, dtype = (head_dim, dtype) if kind is None else (kind.width, torch.uint8)
        return _Buffer(self._empty(heads, self._width, last, dtype=dtype, device=device), kind)

    def _state(self, shape: Shape, device: torch.device) -> torch.Tensor:
        now, before = (self._empty(*shape.size, dtype=shape.dtype, device=device) for _ in range(2))
        self._states.append((now, before))
        return now

    def _layer(self, shape: LayerShape, device: torch.device) -> Any:
        pair = self._pair(shape.keys, device) if shape.keys is not None else []
        self._timed.extend(buffer.tensor for buffer in pair)
        if not shape.has_states:
            nothing: Any = DummyLayer
            return _Keys(self._view, pair[0], pair[1], shape.window) if pair else nothing()
        count = max(len(shape.convolutions), len(shape.recurrences))
        layer: Any = (
            _KeysAndStates(self._view, pair[0], pair[1], shape.window, count)
            if pair
            else LinearAttentionLayer(number_of_states=count)
        )
        convolutions = {index: self._state(each, device) for index, each in shape.convolutions.items()}
        recurrences = {index: self._state(each, device) for index, each in shape.recurrences.items()}
        for index, buffer in convolutions.items():
            layer.conv_kernel_size[index] = buffer.shape[-1]
            layer.is_conv_states_initialized[index] = True
        for index in recurrences:
            layer.is_recurrent_states_initialized[index] = True
        layer.device = device
        self._stateful.append((layer, convolutions, recurrences))
        return layer

    def _cross_layer(self, shapes: tuple[Shape, Shape], device: torch.device) -> _Crossed:
        pair = self._pair(shapes, device)
        self._across.extend(buffer.tensor for buffer in pair)
        return _Crossed(self._view, *pair)

    # What a forward sees

    def show(self, slots: slice, low: int, time: int, *, has_past: bool, crossed: int = 0) -> Cache:
        """transformers' cache, showing these slots with their past in the columns `low` to `time`.

        `has_past`: their states are of tokens, not of nothing. `crossed`: columns of the encoder's output to show; 0
        where the forward is to write them.
        """
        view = self._view
        view.slots, view.low, view.time, view.crossed = slots, low, time, crossed
        for layer, convolutions, recurrences in self._stateful:
            for index, buffer in convolutions.items():
                layer.conv_states[index] = buffer[slots]
            for index, buffer in recurrences.items():
                layer.recurrent_states[index] = buffer[slots]
            for index in layer.has_previous_state:
                layer.has_previous_state[index] = has_past
        if isinstance(self.cache, EncoderDecoderCache):
            for index in range(len(self._cross)):
                self.cache.is_updated[index] = crossed > 0
        return self.cache

    def crossed(self, slot: int) -> int:
        """Columns of the encoder's output of that slot."""
        return self._crossed[slot]

    def has_crossed(self, slot: int, columns: int) -> None:
        self._crossed[slot] = columns

    # States

    def knows(self, slot: int, tokens: int) -> bool:
        """Whether the states behind the first `tokens` tokens are here, now or from before the newest step."""
        return tokens in (self._now[slot], self._before[slot])

    def prepare(self, slots: slice, starts: Sequence[int]) -> None:
        """Bring the states of `slots` to where they were behind `starts` tokens, and keep them so until `done`.

        Raises LookupError if they are not here any more.
        """
        if not self._states:
            return
        everyone = range(slots.start, slots.stop)
        if all(self._now[slot] == start for slot, start in zip(everyone, starts, strict=True)):
            self._copy(slots, to_now=False)
        else:
            for slot, start in zip(everyone, starts, strict=True):
                self._rewind(slot, start)
        for slot, start in zip(everyone, starts, strict=True):
            self._before[slot], self._now[slot] = start, -1  # nothing is sure until the forward has ended

    def _rewind(self, slot: int, start: int) -> None:
        one = slice(slot, slot + 1)
        if start == 0:
            for pair in self._states:
                for each in pair:
                    each[one].zero_()
        elif self._now[slot] == start:
            self._copy(one, to_now=False)
        elif self._before[slot] == start:
            self._copy(one, to_now=True)
        else:
            raise LookupError(f"the states behind {start} tokens are gone")

    def _copy(self, slots: slice, *, to_now: bool) -> None:
        for now, before in self._states:
            source, target = (before, now) if to_now else (now, before)
            target[slots] = source[slots]

    def done(self, slots: slice, ends: Sequence[int]) -> None:
        """The forward has ended: the states of `slots` are those behind `ends` tokens."""
        self._now[slots] = ends

    def clear(self, slot: int) -> None:
        """A fresh row is to begin there."""
        self._now[slot] = self._before[slot] = -1
        self._crossed[slot] = 0

    def erase(self, slot: int, begin: int, length: int) -> None:
        """So many columns of that slot, and what its encoder gave, are zeros again."""
        for buffer in self._timed:
            buffer[slot, :, begin : begin + length].zero_()
        for buffer in self._across:
            buffer[slot, :, : self._crossed[slot]].zero_()

    def pretend(self, slot: int, tokens: int) -> None:
        """Take the states of a fresh row for those behind `tokens` tokens: for steps that only take time."""
        self._now[slot] = tokens

    # Moves

    def carry_out(self, moves: Sequence[Move | Swap]) -> None:
        for move in moves:
            if isinstance(move, Swap):
                self._swap(move.one, move.other)
            else:
                self._move(move)

    def _move(self, move: Move) -> None:
        for buffer in self._timed:
            source = buffer[move.source, :, move.begin : move.begin + move.length]
            target = buffer[move.target, :, move.to : move.to + move.length]
            target.copy_(self._kept(source) if move.source == move.target else source)
        if move.source == move.target:
            return
        columns = self._crossed[move.source]
        for buffer in self._across:
            buffer[move.target, :, :columns] = buffer[move.source, :, :columns]
        for pair in self._states:
            for each in pair:
                each[move.target] = each[move.source]
        for numbers in (self._now, self._before, self._crossed):
            numbers[move.target] = numbers[move.source]

    def _swap(self, one: int, other: int) -> None:
        for buffer in self._all():
            kept = self._kept(buffer[one])
            buffer[one] = buffer[other]
            buffer[other] = kept
        for numbers in (self._now, self._before, self._crossed):
            numbers[one], numbers[other] = numbers[other], numbers[one]

    def _kept(self, source: torch.Tensor) -> torch.Tensor:
        """A copy in the scratch buffer, good until the next."""
        size = source.numel() * source.element_size()
        kept = self._scratch[source.device][:size].view(source.dtype).view(source.shape)
        return kept.copy_(source)
