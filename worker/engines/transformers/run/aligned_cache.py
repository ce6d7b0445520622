"""The aligned cache: buffers behind transformers' `Cache` API, for models that run by their own forward.

One buffer for each tensor that a layer stores, for all rows, allocated at load:

    keys, values    [buffer_rows, heads, width, head_dim]; columns as in `aligned_layout`. A layer with a window stores
                    all columns and shows the model those in the window. If quantized, the last dimension is a record
                    (`quantized_kv_types`).
    index keys      [buffer_rows, 1, width, dim], by which a layer chooses the columns that it attends to
    cross keys,     the same for keys and values of an encoder's output; they begin at column 0
    values
    states          [buffer_rows, ...] of state-space, convolution and linear-attention layers, twice: the current ones,
                    and those before the newest step, which may have to be repeated

A forward sees views of these buffers, or unpacked copies of quantized ones.
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

from worker.engines.transformers.attention.quantized_kv_types import KvStorageType
from worker.engines.transformers.device.lazy_pages import claim
from worker.engines.transformers.run.cache_probe import LayerShape, TensorShape
from worker.engines.transformers.schedule.aligned_layout import ColumnMove, RowSwap


@dataclass(slots=True)
class CacheView:
    """The part of the buffers that a forward sees: `buffer_rows`, and of their past the columns `low` to `time`."""

    buffer_rows: slice = field(default_factory=lambda: slice(0, 1))
    low: int = 0
    time: int = 0
    cross_columns: int = 0  # columns of the encoder's output

    @property
    def past(self) -> int:
        return self.time - self.low


@dataclass(frozen=True, slots=True)
class _KeyValueBuffer:
    """Keys or values of all buffer rows: `[buffer_rows, heads, width, head_dim]`, or records in place of `head_dim`."""

    tensor: torch.Tensor
    kind: KvStorageType | None = None  # the type of the records; None: not quantized

    def write(self, buffer_rows: slice, columns: slice, given: torch.Tensor) -> None:
        """`given`: `[rows, heads, columns, head_dim]`."""
        self.tensor[buffer_rows, :, columns] = given if self.kind is None else self.kind.pack(given[..., None, :])

    def read(self, buffer_rows: slice, columns: slice) -> torch.Tensor:
        """`[rows, heads, columns, head_dim]`: a view, or a copy if quantized."""
        found = self.tensor[buffer_rows, :, columns]
        return found if self.kind is None else self.kind.unpack(found).squeeze(-2)


class _BufferLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of a layer, in the cache's buffers."""

    def __init__(self, view: CacheView, keys: _KeyValueBuffer, values: _KeyValueBuffer):
        super().__init__()  # type: ignore[no-untyped-call]
        self._view, self._buffers = view, (keys, values)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the buffers exist."""

    def get_max_length(self) -> int:
        return self._buffers[0].tensor.shape[2]


class _KeyValueLayer(_BufferLayer):  # type: ignore[no-untyped-call]
    """Keys and values of a layer's own tokens."""

    def __init__(self, view: CacheView, keys: _KeyValueBuffer, values: _KeyValueBuffer, window: int):
        super().__init__(view, keys, values)
        self.is_sliding = window > 0
        self.sliding_window = window

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[rows, heads, tokens, head_dim]` and return all columns that the layer may attend to."""
        view = self._view
        end = view.time + key_states.shape[2]
        seen = slice(view.low + self._hidden(), end)
        keys, values = self._buffers
        new = slice(view.time, end)
        keys.write(view.buffer_rows, new, key_states)
        values.write(view.buffer_rows, new, value_states)
        found = keys.read(view.buffer_rows, seen), values.read(view.buffer_rows, seen)
        if keys.kind is None:  # an unpacked copy must not stay referenced here: it would undo the memory saved
            self.keys, self.values = found
        return found

    def _hidden(self) -> int:
        """Columns of the past that lie before the window of the next token."""
        return max(self._view.past - self.sliding_window + 1, 0) if self.is_sliding else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._view.past - self._hidden() + query_length, self._hidden()

    def get_seq_length(self) -> int:
        return self._view.past


class _IndexedLayer(_KeyValueLayer):  # type: ignore[no-untyped-call]
    """A layer with index keys."""

    def __init__(
        self, view: CacheView, keys: _KeyValueBuffer, values: _KeyValueBuffer, window: int, index: _KeyValueBuffer
    ):
        super().__init__(view, keys, values, window)
        self._index = index

    def update_indexer(self, states: torch.Tensor) -> torch.Tensor:
        """Append `[rows, tokens, dim]` and return all columns."""
        view = self._view
        end = view.time + states.shape[1]
        self._index.write(view.buffer_rows, slice(view.time, end), states[:, None])
        return self._index.read(view.buffer_rows, slice(view.low, end))[:, 0]


class _CrossAttentionLayer(_BufferLayer):  # type: ignore[no-untyped-call]
    """Keys and values of an encoder's output: written once, then only read."""

    is_sliding = False

    @property
    def keys(self) -> torch.Tensor:
        """The columns shown. Models read these instead of calling `update`."""
        return self._read(0)

    @keys.setter
    def keys(self, nothing: torch.Tensor | None) -> None:
        """Ignored: the constructor of transformers' layer sets it."""

    @property
    def values(self) -> torch.Tensor:
        return self._read(1)

    @values.setter
    def values(self, nothing: torch.Tensor | None) -> None:
        """Ignored, as for `keys`."""

    def _read(self, which: int) -> torch.Tensor:
        return self._buffers[which].read(self._view.buffer_rows, slice(0, self._view.cross_columns))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        columns = slice(0, key_states.shape[2])
        for buffer, given in zip(self._buffers, (key_states, value_states), strict=True):
            buffer.write(self._view.buffer_rows, columns, given)
        if self._buffers[0].kind is None:
            return key_states, value_states
        keys, values = (buffer.read(self._view.buffer_rows, columns) for buffer in self._buffers)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._view.cross_columns, 0

    def get_seq_length(self) -> int:
        return self._view.cross_columns


class _KeyValueStateLayer(_KeyValueLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, override, no-untyped-call]
    """A layer with keys, values and states."""

    def __init__(self, view: CacheView, keys: _KeyValueBuffer, values: _KeyValueBuffer, window: int, states: int):
        _KeyValueLayer.__init__(self, view, keys, values, window)
        LinearAttentionLayer.__init__(self, number_of_states=states)
        self.is_initialized = True


class AlignedCache:
    """All buffers, and the `Cache` of transformers that shows them to a model.

    Order of a step: carry out the moves, `prepare` the states, `show` a view, run the forward, mark it `done`.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        *,
        buffer_rows: int,
        width: int,
        devices: Sequence[torch.device],
        kv_dtype: str = "auto",
    ):
        """`devices`: of each layer, in the order of `shapes`; `kv_dtype`: as the option `kv_cache_dtype`."""
        self._kv_dtype = kv_dtype
        self._view = CacheView()
        self._key_value_buffers: list[torch.Tensor] = []  # buffers of keys and values
        self._cross_buffers: list[torch.Tensor] = []  # buffers of cross attention
        self._states: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._state_layers: list[tuple[LinearAttentionLayer, dict[int, torch.Tensor], dict[int, torch.Tensor]]] = []
        self._buffer_rows, self._width = buffer_rows, width
        self._current_tokens = [0] * buffer_rows  # by buffer row: number of tokens in its current states
        self._previous_tokens = [0] * buffer_rows  # the same of the states before the newest step
        self.cross_columns = [0] * buffer_rows  # of the encoder's output in each buffer row
        own = Cache(layers=[self._layer(*each) for each in zip(shapes, devices, strict=True)])
        self._cross = [
            self._cross_layer(shape.cross_keys, device)
            for shape, device in zip(shapes, devices, strict=True)
            if shape.cross_keys is not None
        ]
        self.cache: Cache = EncoderDecoderCache(own, Cache(layers=[*self._cross])) if self._cross else own
        largest = dict.fromkeys(devices, 0)
        for buffer in self._all():
            largest[buffer.device] = max(largest[buffer.device], buffer[0].nbytes)
        # For each device, room for one row of one buffer: a move within a buffer row may overlap itself.
        self._scratch = {device: claim(size, dtype=torch.uint8, device=device) for device, size in largest.items()}

    def bytes_on(self, device: torch.device) -> int:
        return sum(buffer.nbytes for buffer in (*self._all(), *self._scratch.values()) if buffer.device == device)

    @property
    def has_states(self) -> bool:
        return bool(self._states)

    def shorten(self) -> None:
        """For an estimate: carry out moves on one buffer of each kind from now on. Moves take no memory beside the
        scratch buffer, but 0.1 ms of CPU time for each buffer of fake tensors. `bytes_on` counts these buffers only."""
        for buffers in (self._key_value_buffers, self._cross_buffers, self._states):
            del buffers[1:]

    def _all(self) -> list[torch.Tensor]:
        return [*self._key_value_buffers, *self._cross_buffers, *(buffer for pair in self._states for buffer in pair)]

    def _empty(self, *size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return claim(self._buffer_rows, *size, dtype=dtype, device=device)

    def _pair(self, shapes: tuple[TensorShape, TensorShape], device: torch.device) -> list[_KeyValueBuffer]:
        return [self._buffer(*shape.size, dtype=shape.dtype, device=device) for shape in shapes]

    def _buffer(self, heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> _KeyValueBuffer:
        kind = KvStorageType.of(self._kv_dtype, 1, head_dim, dtype)
        last, dtype = (head_dim, dtype) if kind is None else (kind.width, torch.uint8)
        return _KeyValueBuffer(self._empty(heads, self._width, last, dtype=dtype, device=device), kind)

    def _state(self, shape: TensorShape, device: torch.device) -> torch.Tensor:
        # Two copies: a step may have to be repeated with a smaller batch, and states cannot be rewound otherwise.
        current, previous = (self._empty(*shape.size, dtype=shape.dtype, device=device) for _ in range(2))
        self._states.append((current, previous))
        return current

    def _layer(self, shape: LayerShape, device: torch.device) -> Any:
        pair = self._pair(shape.keys, device) if shape.keys is not None else []
        self._key_value_buffers.extend(buffer.tensor for buffer in pair)
        if pair and shape.index is not None:
            heads, dim = shape.index.size
            # Never quantized: a rounded key may choose another column.
            keys = _KeyValueBuffer(self._empty(heads, self._width, dim, dtype=shape.index.dtype, device=device))
            self._key_value_buffers.append(keys.tensor)
            return _IndexedLayer(self._view, pair[0], pair[1], shape.window, keys)
        if not shape.has_states:
            nothing: Any = DummyLayer
            return _KeyValueLayer(self._view, pair[0], pair[1], shape.window) if pair else nothing()
        count = max(len(shape.convolutions), len(shape.recurrences))
        layer: Any = (
            _KeyValueStateLayer(self._view, pair[0], pair[1], shape.window, count)
            if pair
            else LinearAttentionLayer(number_of_states=count)
        )
        convolutions = {index: self._state(state, device) for index, state in shape.convolutions.items()}
        recurrences = {index: self._state(state, device) for index, state in shape.recurrences.items()}
        for index, buffer in convolutions.items():
            layer.conv_kernel_size[index] = buffer.shape[-1]
            layer.is_conv_states_initialized[index] = True
        for index in recurrences:
            layer.is_recurrent_states_initialized[index] = True
        layer.device = device
        self._state_layers.append((layer, convolutions, recurrences))
        return layer

    def _cross_layer(self, shapes: tuple[TensorShape, TensorShape], device: torch.device) -> _CrossAttentionLayer:
        pair = self._pair(shapes, device)
        self._cross_buffers.extend(buffer.tensor for buffer in pair)
        return _CrossAttentionLayer(self._view, *pair)

    # The view of one forward pass

    def show(self, buffer_rows: slice, low: int, time: int, *, has_past: bool, cross_columns: int = 0) -> Cache:
        """Transformers' cache, showing `buffer_rows` with their past in the columns `low` to `time`.

        `has_past`: the states are those of earlier tokens, not empty. `cross_columns`: columns of the encoder's output
        to show; 0 if the forward is to write them.
        """
        view = self._view
        view.buffer_rows, view.low, view.time, view.cross_columns = buffer_rows, low, time, cross_columns
        for layer, convolutions, recurrences in self._state_layers:
            for index, buffer in convolutions.items():
                layer.conv_states[index] = buffer[buffer_rows]
            for index, buffer in recurrences.items():
                layer.recurrent_states[index] = buffer[buffer_rows]
            for index in layer.has_previous_state:
                layer.has_previous_state[index] = has_past
        if isinstance(self.cache, EncoderDecoderCache):
            for index in range(len(self._cross)):
                self.cache.is_updated[index] = cross_columns > 0
        return self.cache

    # States

    def has_states_at(self, buffer_row: int, tokens: int) -> bool:
        """True if the states after the first `tokens` tokens are stored, as current ones or from before that step."""
        return tokens in (self._current_tokens[buffer_row], self._previous_tokens[buffer_row])

    def prepare(self, buffer_rows: slice, starts: Sequence[int]) -> None:
        """Make the states of `buffer_rows` those after `starts` tokens, and store a copy until `done`.

        Raises LookupError if they are not stored any more.
        """
        if not self._states:
            return
        numbers = range(buffer_rows.start, buffer_rows.stop)
        # The usual case, one copy for all buffer rows: every row continues where it is.
        if all(self._current_tokens[buffer_row] == start for buffer_row, start in zip(numbers, starts, strict=True)):
            self._copy(buffer_rows, to_current=False)
        else:
            for buffer_row, start in zip(numbers, starts, strict=True):
                self._rewind(buffer_row, start)
        for buffer_row, start in zip(numbers, starts, strict=True):
            self._previous_tokens[buffer_row] = start
            self._current_tokens[buffer_row] = -1  # unknown until the forward has ended

    def _rewind(self, buffer_row: int, start: int) -> None:
        one = slice(buffer_row, buffer_row + 1)
        if start == 0:
            for pair in self._states:
                for buffer in pair:
                    buffer[one].zero_()
        elif self._current_tokens[buffer_row] == start:
            self._copy(one, to_current=False)
        elif self._previous_tokens[buffer_row] == start:
            self._copy(one, to_current=True)
        else:
            raise LookupError(f"the states after {start} tokens are not stored any more")

    def _copy(self, buffer_rows: slice, *, to_current: bool) -> None:
        for current, previous in self._states:
            source, target = (previous, current) if to_current else (current, previous)
            target[buffer_rows] = source[buffer_rows]

    def done(self, buffer_rows: slice, ends: Sequence[int]) -> None:
        """Record that the forward has ended: the states of `buffer_rows` are those after `ends` tokens."""
        self._current_tokens[buffer_rows] = ends

    def clear(self, buffer_row: int) -> None:
        """Forget the states of a buffer row, for a new row."""
        self._current_tokens[buffer_row] = self._previous_tokens[buffer_row] = -1
        self.cross_columns[buffer_row] = 0

    def erase(self, buffer_row: int, begin: int, length: int) -> None:
        """Zero `length` columns of a buffer row, and its encoder's output."""
        for buffer in self._key_value_buffers:
            buffer[buffer_row, :, begin : begin + length].zero_()
        for buffer in self._cross_buffers:
            buffer[buffer_row, :, : self.cross_columns[buffer_row]].zero_()

    def assume_states(self, buffer_row: int, tokens: int) -> None:
        """Take the states of a new row for those after `tokens` tokens. For warmup steps only."""
        self._current_tokens[buffer_row] = tokens

    # Moves

    def carry_out(self, moves: Sequence[ColumnMove | RowSwap]) -> None:
        for move in moves:
            if isinstance(move, RowSwap):
                self._swap(move.one, move.other)
            else:
                self._move(move)

    def _move(self, move: ColumnMove) -> None:
        for buffer in self._key_value_buffers:
            source = buffer[move.source, :, move.begin : move.begin + move.length]
            target = buffer[move.target, :, move.to : move.to + move.length]
            # Overlapping ranges of one buffer row must go through a copy.
            target.copy_(self._scratch_copy(source) if move.source == move.target else source)
        if move.source == move.target:
            return
        columns = self.cross_columns[move.source]
        for buffer in self._cross_buffers:
            buffer[move.target, :, :columns] = buffer[move.source, :, :columns]
        for pair in self._states:
            for buffer in pair:
                buffer[move.target] = buffer[move.source]
        for numbers in (self._current_tokens, self._previous_tokens, self.cross_columns):
            numbers[move.target] = numbers[move.source]

    def _swap(self, one: int, other: int) -> None:
        for buffer in self._all():
            copied = self._scratch_copy(buffer[one])
            buffer[one] = buffer[other]
            buffer[other] = copied
        for numbers in (self._current_tokens, self._previous_tokens, self.cross_columns):
            numbers[one], numbers[other] = numbers[other], numbers[one]

    def _scratch_copy(self, source: torch.Tensor) -> torch.Tensor:
        """A copy of `source` in the scratch buffer, valid until the next call."""
        size = source.numel() * source.element_size()
        copied = self._scratch[source.device][:size].view(source.dtype).view(source.shape)
        return copied.copy_(source)
