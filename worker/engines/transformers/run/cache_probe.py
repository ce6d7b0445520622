"""Shapes of the tensors that a model caches, found by one forward of a few tokens through transformers' own cache."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

_KEY_VALUE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)
_STATE_LAYERS = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


class UnsupportedCache(Exception):
    """The model caches something that the aligned cache does not support; the message names it."""


@dataclass(frozen=True, slots=True)
class TensorShape:
    """Size and dtype of one cached tensor, without the dimensions of rows and columns."""

    size: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor, *columns: int) -> "TensorShape":
        """The shape of `tensor` `[1, ...]`. `columns`: its dimensions that grow with the number of tokens."""
        return cls(
            tuple(size for index, size in enumerate(tensor.shape) if index and index not in columns), tensor.dtype
        )


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The tensors that one layer caches."""

    keys: tuple[TensorShape, TensorShape] | None = None  # keys and values: (heads, head_dim)
    window: int = 0
    index: TensorShape | None = None  # keys that choose the columns to attend to (DeepSeek-V3.2, GLM-5): (1, dim)
    convolutions: dict[int, TensorShape] = field(default_factory=dict)
    recurrences: dict[int, TensorShape] = field(default_factory=dict)
    cross_keys: tuple[TensorShape, TensorShape] | None = None  # keys and values of the encoder's output

    @property
    def has_states(self) -> bool:
        return bool(self.convolutions or self.recurrences)


def read_layer_shapes(model: Any, run: Callable[[Cache], None]) -> list[LayerShape]:
    """The shapes of all layers after `run`, a forward of one row with the given cache. Raises UnsupportedCache."""
    is_encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
    # The decoder may have another number of layers than the encoder (ByT5).
    config = model.config
    if is_encoder_decoder:
        config = getattr(model.get_decoder(), "config", None)
        if config is None:
            raise UnsupportedCache("its decoder has no configuration")
    own = DynamicCache(config=config.get_text_config(decoder=True))
    other = DynamicCache() if is_encoder_decoder else None
    run(EncoderDecoderCache(own, other) if other is not None else own)
    shapes = [_shape(layer) for layer in own.layers]
    if other is not None:
        shapes = [
            replace(shape, cross_keys=_key_value_shapes(layer))
            for shape, layer in zip(shapes, other.layers, strict=True)
        ]
    if not any(shape.keys or shape.has_states for shape in shapes):
        raise UnsupportedCache("it stores nothing in transformers' cache")
    return shapes


def _shape(layer: Any) -> LayerShape:
    if type(layer) is DummyLayer:
        return LayerShape()
    if type(layer) not in (*_KEY_VALUE_LAYERS, *_STATE_LAYERS):
        raise UnsupportedCache(f"it stores a {type(layer).__name__}")
    window = int(layer.sliding_window) if getattr(layer, "is_sliding", False) else 0
    keys = _key_value_shapes(layer) if isinstance(layer, CacheLayerMixin) and layer.keys is not None else None
    if isinstance(layer, DynamicIndexedLayer):
        return LayerShape(keys, window, _index_shape(layer))
    if not isinstance(layer, LinearAttentionLayer):
        return LayerShape(keys, window)
    convolutions = {i: TensorShape.of(state) for i, state in layer.conv_states.items() if state is not None}
    recurrences = {i: TensorShape.of(state) for i, state in layer.recurrent_states.items() if state is not None}
    return LayerShape(keys, window, None, convolutions, recurrences)


def _index_shape(layer: Any) -> TensorShape | None:
    if layer.indexer_position_ids is not None:
        raise UnsupportedCache("it stores positions of tokens")
    return None if layer.indexer_keys is None else TensorShape.of(layer.indexer_keys[:, None], 2)


def _key_value_shapes(layer: Any) -> tuple[TensorShape, TensorShape]:
    if layer.keys.ndim != 4 or layer.values.ndim != 4:
        raise UnsupportedCache(f"it stores keys of shape {list(layer.keys.shape)}")
    return TensorShape.of(layer.keys, 2), TensorShape.of(layer.values, 2)
