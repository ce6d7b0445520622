"""Tiny snapshots whose weights are quantized, as published checkpoints of each method have them; written by hand.

`make("gptq", folder)` writes a Llama, or with mxfp4 a gpt-oss, and beside it, in `plain`, the same model with the very
numbers that the quantized weights stand for, so that both have to say the same.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from tests import tiny

GROUP = 32
"""Inputs that share a scale with gptq, awq and mxfp4."""
BLOCK = 64
"""Rows and columns that share a scale with fp8."""
SIZES: Mapping[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "initializer_range": 0.05, "max_position_embeddings": 256,
}  # fmt: skip
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the 4 bits of mxfp4: OCP Microscaling Formats, version 1.0, section 5.3.3."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs lies in which 4 bits of an int32: AutoAWQ's `gemm` version."""

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Tensors by the ending of their names, and the matrix `[outputs, inputs]` that they stand for, in float32."""


def fp8(weight: torch.Tensor) -> Packed:
    """As DeepSeek-V3 and Qwen3 in fp8: a float32 for each block of a matrix."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
    stored = (blocks / scale).to(torch.float8_e4m3fn)
    whole = (stored.float() * scale).view(rows, columns)
    return {"weight": stored.view(rows, columns), "weight_scale_inv": scale[:, 0, :, 0].contiguous()}, whole


def gptq(weight: torch.Tensor, bits: int = 4, group: int = GROUP) -> Packed:
    """As many inputs as fit in an int32, symmetric around their middle; zero points are stored less one (AutoGPTQ's
    first format). `group` -1: all inputs of a layer share a scale."""
    group = weight.shape[1] if group < 0 else group
    numbers, scale = _grouped(weight, bits, group)
    inputs, outputs = numbers.shape
    each = 32 // bits
    zero = {4: 0x77777777, 8: 0x7F7F7F7F}[bits]
    zeros = torch.full((inputs // group, outputs // each), zero, dtype=torch.int32)
    order = torch.arange(inputs, dtype=torch.int32) // group
    words = _in_words(numbers.view(inputs // each, each, outputs).transpose(1, 2), bits)
    tensors = {"qweight": words, "qzeros": zeros, "scales": scale.half(), "g_idx": order}
    return tensors, _whole(numbers, scale, bits)


def awq(weight: torch.Tensor) -> Packed:
    """Eight outputs in an int32, in an order of its own; zero points likewise."""
    numbers, scale = _grouped(weight)
    inputs, outputs = numbers.shape
    quantized = _in_words(numbers.view(inputs, outputs // 8, 8)[:, :, list(_AWQ_ORDER)])
    zeros = torch.full((inputs // GROUP, outputs // 8), -0x77777778, dtype=torch.int32)  # eights
    return {"qweight": quantized, "qzeros": zeros, "scales": scale.half()}, _whole(numbers, scale)


def float_quantized(weight: torch.Tensor) -> Packed:
    """compressed-tensors in 8 bits of floating point: a scale for each output."""
    scale = weight.float().abs().amax(dim=1, keepdim=True) / 448
    stored = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def pack_quantized(weight: torch.Tensor) -> Packed:
    """compressed-tensors in 4 bits: eight inputs in an int32, from the lowest bits on, numbers less 8."""
    numbers, scale = _grouped(weight)
    inputs, outputs = numbers.shape
    quantized = _in_words(numbers.t().reshape(outputs, inputs // 8, 8))
    stored = {"weight_packed": quantized, "weight_scale": scale.t().half().contiguous()}
    return {**stored, "weight_shape": torch.tensor([outputs, inputs])}, _whole(numbers, scale)


def _grouped(weight: torch.Tensor, bits: int = 4, group: int = GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers from 0 on `[inputs, outputs]`, of which the middle one is nothing, and scales `[groups, outputs]` that
    float16 can tell."""
    outputs, inputs = weight.shape
    middle = 1 << (bits - 1)
    groups = weight.float().t().reshape(inputs // group, group, outputs)
    scale = (groups.abs().amax(dim=1) / (middle - 1)).half().float()
    numbers = (groups / scale[:, None]).round().clamp(-middle, middle - 1).to(torch.int64) + middle
    return numbers.reshape(inputs, outputs), scale


def _whole(numbers: torch.Tensor, scale: torch.Tensor, bits: int = 4) -> torch.Tensor:
    group = len(numbers) // len(scale)
    return ((numbers - (1 << (bits - 1))).float() * scale.repeat_interleave(group, dim=0)).t().contiguous()


def _in_words(numbers: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """As many numbers as fit, along the last dimension, as one int32: the first is lowest."""
    words = (numbers << torch.arange(0, 32, bits)).sum(dim=-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).contiguous()


_COMPRESSED: Mapping[str, Any] = {
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
    "pack-quantized": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True,
                       "dynamic": False},
}  # fmt: skip


def _compressed(name: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": _COMPRESSED[name], "input_activations": None, "format": name}
    return {
        "quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True,
         "checkpoint_format": "gptq"}  # fmt: skip
_METHODS: Mapping[str, tuple[Callable[[torch.Tensor], Packed], dict[str, Any]]] = {
    "fp8": (fp8,
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}),
    "gptq": (gptq, _GPTQ),
    "gptq, 8 bits": (partial(gptq, bits=8), {**_GPTQ, "bits": 8}),
    "gptq, one group": (partial(gptq, group=-1), {**_GPTQ, "group_size": -1}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "float-quantized": (float_quantized, _compressed("float-quantized")),
    "pack-quantized": (pack_quantized, _compressed("pack-quantized")),
}  # fmt: skip
_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
METHODS = (*_METHODS, "mxfp4")


def make(method: str, folder: Path, dtype: str = "bfloat16", family: str = "llama", **sizes: Any) -> Path:
    """The quantized snapshot; `plain` beside it has the same numbers in float32. `dtype`: of what is not quantized."""
    if method == "mxfp4":
        return _mixture(folder, dtype, **sizes)
    pack, _ = _METHODS[method]
    tiny.make(family, folder, **{**SIZES, **sizes}, dtype=dtype)
    found: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors(folder).items():
        if name.endswith("_proj.weight"):
            quantized, whole = pack(tensor)
            found |= {name.removesuffix("weight") + ending: each for ending, each in quantized.items()}
            plain[name] = whole
        else:
            found[name], plain[name] = tensor, tensor.float()
    return _written(folder, found, plain, said(method))


def _mixture(folder: Path, dtype: str, **sizes: Any) -> Path:
    """As gpt-oss is published: the experts' matrices in 4 bits, 32 numbers with a power of two as their scale."""
    tiny.make("gpt_oss", folder, **{"intermediate_size": 128, **sizes}, dtype=dtype)
    table = torch.tensor(_E2M1)
    found, plain = {}, {}
    for name, tensor in _tensors(folder).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name], plain[name] = tensor, tensor.float()
            continue
        experts, inputs, outputs = tensor.shape
        groups = tensor.float().transpose(1, 2).reshape(experts, outputs, inputs // GROUP, GROUP)
        power = (groups.abs().amax(dim=-1) / 6).log2().ceil()
        chosen = (groups[..., None] / power.exp2()[..., None, None] - table).abs().argmin(dim=-1)
        found[f"{name}_blocks"] = (chosen[..., 0::2] | chosen[..., 1::2] << 4).to(torch.uint8).contiguous()
        found[f"{name}_scales"] = (power + 127).to(torch.uint8).contiguous()
        plain[name] = (table[chosen] * power.exp2()[..., None]).flatten(-2).transpose(1, 2).contiguous()
    return _written(folder, found, plain, _MXFP4)


def said(method: str) -> dict[str, Any]:
    """The `quantization_config` of this method in config.json."""
    return _METHODS[method][1] if method in _METHODS else _MXFP4


def plain(folder: Path) -> Path:
    """The folder of the dequantized model, beside `folder`."""
    return folder.with_name(f"{folder.name}-plain")


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def _written(
    folder: Path, found: dict[str, torch.Tensor], numbers: dict[str, torch.Tensor], stated: Mapping[str, Any]
) -> Path:
    beside = plain(folder)
    beside.mkdir()
    for file in folder.glob("*.json"):
        (beside / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (beside / "config.json").write_text(json.dumps({**config, "dtype": "float32"}), "utf-8")
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": dict(stated)}), "utf-8")
    safetensors.torch.save_file(found, folder / "model.safetensors", {"format": "pt"})
    safetensors.torch.save_file(numbers, beside / "model.safetensors", {"format": "pt"})
    return folder
