"""Reference for quantized caches: transformers' own cache, whose layers round as the documented format does."""

from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

GROUPS = {8: 8, 16: 16, 32: 32, 64: 32, 80: 20, 96: 32}  # elements of a group, by head dimension


def kept(given: torch.Tensor, name: str) -> torch.Tensor:
    """`given` `[..., head_dim]` after packing and unpacking, in plain torch (see `quantized_kv_types`)."""
    casts = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    if name in casts:
        return given.to(casts[name]).to(given.dtype)
    x = given.float().reshape(*given.shape[:-1], -1, GROUPS[given.shape[-1]])
    if name == "int8":
        least = torch.zeros(())
        scale = (x.abs().amax(-1, keepdim=True) / 127).bfloat16()
        codes = torch.where(scale == 0, 0, x / scale.float()).round().clamp(-127, 127)
    else:
        least = x.amin(-1, keepdim=True).bfloat16()
        scale = ((x - least.float()).amax(-1, keepdim=True) / 15).bfloat16()
        codes = torch.where(scale == 0, 0, (x - least.float()) / scale.float()).round().clamp(0, 15)
    dtype = given.dtype
    found: torch.Tensor = codes.to(dtype) * scale.to(dtype) + least.to(dtype)
    return found.reshape(given.shape)


def cache(model: Any, name: str) -> Any:
    """For `generate`: a cache that rounds keys and values from the step in which they are computed."""
    own = DynamicCache(config=model.config.get_text_config(decoder=True))
    for layer in own.layers:
        if isinstance(layer, CacheLayerMixin):
            _keep(layer, name)
    if not model.config.is_encoder_decoder:
        return own
    crossed: Any = DynamicCache()
    new: Any = DynamicLayer
    crossed.layer_class_to_replicate = lambda: _keep(new(), name)
    return EncoderDecoderCache(own, crossed)


def _keep(layer: Any, name: str) -> Any:
    update = layer.update

    def updated(keys: torch.Tensor, values: torch.Tensor, *args: Any, **options: Any) -> Any:
        return update(kept(keys, name), kept(values, name), *args, **options)

    layer.update = updated
    return layer
