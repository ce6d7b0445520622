"""What a model keeps of the tokens that it has seen: the shapes, read off the model itself.

One forward of a few tokens through transformers' own cache shows the layers' kinds and the shapes of their keys, values
and states.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

_KEEPING = (DynamicLayer, DynamicSlidingWindowLayer)
_STATEFUL = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


class Unsupported(Exception):
    """The model keeps what it remembers in a way that this cache does not know; the message says how."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one tensor, without the dimensions of rows and columns."""

    size: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor, *columns: int) -> "Shape":
        """Of `tensor` `[1, ...]`, whose dimensions `columns` are those of time."""
        return cls(
            tuple(size for index, size in enumerate(tensor.shape) if index and index not in columns), tensor.dtype
        )


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps."""

    keys: tuple[Shape, Shape] | None = None
    """Of keys and values: (heads, head_dim)."""
    window: int = 0
    convolutions: dict[int, Shape] = field(default_factory=dict)
    recurrences: dict[int, Shape] = field(default_factory=dict)
    crossed: tuple[Shape, Shape] | None = None

    @property
    def has_states(self) -> bool:
        return bool(self.convolutions or self.recurrences)


def read_off(config: Any, run: Callable[[Cache], None]) -> list[LayerShape]:
    """The layers' shapes, from what `run`, a forward of one row with this cache, leaves in it. Raises Unsupported."""
    crosses = bool(getattr(config, "is_encoder_decoder", False))
    own = DynamicCache(config=config.get_text_config(decoder=True))
    other = DynamicCache() if crosses else None
    run(EncoderDecoderCache(own, other) if other is not None else own)
    shapes = [_shape(layer) for layer in own.layers]
    if other is not None:
        shapes = [replace(each, crossed=_keys(layer)) for each, layer in zip(shapes, other.layers, strict=True)]
    if not any(each.keys or each.has_states for each in shapes):
        raise Unsupported("it keeps nothing in transformers' cache")
    return shapes


def _shape(layer: Any) -> LayerShape:
    if type(layer) is DummyLayer:
        return LayerShape()
    if type(layer) not in (*_KEEPING, *_STATEFUL):
        raise Unsupported(f"it keeps a {type(layer).__name__}")
    window = int(layer.sliding_window) if getattr(layer, "is_sliding", False) else 0
    keys = _keys(layer) if isinstance(layer, CacheLayerMixin) and layer.keys is not None else None
    if not isinstance(layer, LinearAttentionLayer):
        return LayerShape(keys, window)
    convolutions = {i: Shape.of(state) for i, state in layer.conv_states.items() if state is not None}
    recurrences = {i: Shape.of(state) for i, state in layer.recurrent_states.items() if state is not None}
    return LayerShape(keys, window, convolutions, recurrences)


def _keys(layer: Any) -> tuple[Shape, Shape]:
    if layer.keys.ndim != 4 or layer.values.ndim != 4:
        raise Unsupported(f"it keeps keys of shape {list(layer.keys.shape)}")
    return Shape.of(layer.keys, 2), Shape.of(layer.values, 2)
