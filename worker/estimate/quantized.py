"""Bytes of quantized weights: in memory, in a step, and while they are loaded."""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from worker.engines.transformers.load import quantization, safetensors
from worker.protocol.architectures import SCALE
from worker.protocol.argv import ModelOptions
from worker.protocol.memory import QUANTIZING_BYTES

# One in so many inputs of a linear layer is an outlier that bitsandbytes multiplies unquantized. Published models have
# less than one in a hundred (Dettmers et al. 2022, section 4).
OUTLIERS = 8

_GPTQ = frozenset({"gptq", "awq"})

# Bytes for each element of a matrix that gptqmodel dequantizes in each step, including the result, by bits. Measured
# with 7.6: 7.0 in float32 and 7.5 in 16 bits for 4 bits, 5.0 and 3.5 for 8.
_DEQUANTIZING_BYTES = {4: 8, 8: 5}


def stored_tensors(options: ModelOptions, config: Any, dtype: torch.dtype) -> Iterator[tuple[str, int]]:
    """Yield the bytes in memory of each tensor of a quantized checkpoint: quantized tensors and their scales as stored,
    other floats in the dtype of the model. If loading dequantizes the weights, all tensors have that dtype, and there
    are no scales."""
    stated = quantization.quantization_config(config)
    device = torch.device(options.devices[0])
    dequantizes = quantization.dequantizes(quantization.named(config), device)
    arranged = _as_stored
    if options.devices[0] == "cpu" and stated.get("quant_method") in _GPTQ:
        arranged = _side_by_side if quantization.is_fused(stated) else partial(_widened, bits=stated.get("bits", 4))
    for file in map(safetensors.WeightFile, safetensors.files(Path(options.snapshot))):
        for name, stored, count in file.listed():
            is_plain = stored.is_floating_point and stored.itemsize > 1
            if SCALE.search(name):
                yield name, 0 if dequantizes else arranged(name, stored, count)
            elif is_plain or dequantizes:
                yield name, count * (1 if is_plain else quantization.numbers(stored, stated)) * dtype.itemsize
            else:
                yield name, count * stored.itemsize


def _as_stored(name: str, stored: torch.dtype, count: int) -> int:
    """Return the bytes of a tensor of scales or the like with `count` elements."""
    return count * stored.itemsize


def _side_by_side(name: str, stored: torch.dtype, count: int) -> int:
    """Like `_as_stored`, in the layout of the CPU's 4-bit kernel (gptqmodel 7.6: torch_aten_kernel.py): scales and zero
    points in 16 bits, and both once more side by side; the order of inputs and its inverse, with a table of eight
    shifts."""
    if name.endswith("qzeros"):
        return 0
    if name.endswith("scales"):
        return 8 * count
    return 2 * count * stored.itemsize + 32


def _widened(name: str, stored: torch.dtype, count: int, *, bits: int) -> int:
    """Like `_as_stored`, of a layer that is dequantized in each step (gptqmodel 7.6: torch.py): the order of inputs
    once more in 64 bits, zero points as single numbers, and a table of shifts."""
    if name.endswith("scales"):
        return count * stored.itemsize
    return 3 * count * stored.itemsize + (4 * (32 // bits) if name.endswith("g_idx") else 0)


def _quantized_layers(model: Any) -> Iterator[Any]:
    """Yield the layers that bitsandbytes quantizes, by the rules of transformers."""
    kept = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    for name, module in model.named_modules():
        is_linear = isinstance(module, Conv1D) or type(module) is torch.nn.Linear
        if is_linear and should_convert_module(name, kept):
            yield module


def saved_by_bitsandbytes(model: Any, dtype: torch.dtype, *, bits: int) -> dict[torch.device, int]:
    """Return the bytes by which quantization on load shrinks the parts of the model on each device.

    8 bits: a byte for each element, and a float32 scale for each row (Dettmers et al. 2022, section 3). 4 bits: half a
    byte, a float32 for each block of 64, and a table of 16 for each layer (Dettmers et al. 2023, section 3; defaults of
    bitsandbytes, without double quantization).
    """
    saved: dict[torch.device, int] = defaultdict(int)
    for module in _quantized_layers(model):
        elements = module.weight.numel()
        rows = module.weight.shape[1 if isinstance(module, Conv1D) else 0]
        quantized = elements + 4 * rows if bits == 8 else -(-elements // 2) + 4 * -(-elements // 64) + 64
        saved[module.weight.device] += elements * dtype.itemsize - quantized
    return saved


def pretend(options: ModelOptions, config: Any, model: Any) -> int:
    """Replace quantized layers by ones that allocate in a step what the real ones do. Returns the bytes that it takes
    to arrange the largest one for its kernel."""
    bits, on_cpu = _bits(options, config), options.devices[0] == "cpu"
    stated = quantization.quantization_config(config)
    is_gptq = on_cpu and stated.get("quant_method") in _GPTQ
    if not bits and not is_gptq:
        return 0
    fused, quantized_bits = quantization.is_fused(stated), stated.get("bits", 4)
    layers = set(_quantized_layers(model))
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if layer in layers:
                quantized = _Gptq(layer, bits=quantized_bits, fused=fused) if is_gptq else _Bitsandbytes(layer, bits)
                setattr(parent, name, quantized)
    largest = max((int(layer.weight.numel()) for layer in layers), default=0)
    return QUANTIZING_BYTES * largest if on_cpu and (bits == 4 or is_gptq) else 0


class _Bitsandbytes(torch.nn.Linear):
    """The tensors of a step in a linear layer of bitsandbytes (0.50: autograd/_functions.py, backends/default/ops.py).
    Only their sizes are right.

    4 bits are dequantized into a matrix of the dtype of the inputs, if there is no kernel that does not need it. With 8
    bits the inputs are quantized row by row, through float16; outliers are multiplied unquantized, with their weights
    dequantized.
    """

    def __init__(self, layer: Any, bits: int):
        weight = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight
        outputs, inputs = weight.shape
        super().__init__(inputs, outputs, device="meta")
        self.weight, self.bias = torch.nn.Parameter(weight, requires_grad=False), layer.bias
        self._bits = bits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, inputs = self.out_features, self.in_features
        if self._bits == 4:
            return F.linear(x, torch.empty(outputs, inputs, dtype=x.dtype, device=x.device), self.bias)
        rows = x.reshape(-1, inputs)
        half = rows.to(torch.float16)
        is_outlier = half.abs() >= 0
        scales = half.abs().amax(dim=1, keepdim=True).float()
        quantized = torch.round(half * (127.0 / scales)).to(torch.int8)
        del half, is_outlier
        few = -(-inputs // OUTLIERS)
        met = torch.empty(outputs, few, dtype=torch.int8, device=x.device)  # the weights of the outliers
        dequantized = met.float().to(x.dtype)
        if torch.backends.cpu.get_cpu_capability() == "AVX512":
            sums = torch.empty(len(rows), outputs, dtype=torch.int32, device=x.device)
        else:  # a CPU without kernels for bytes dequantizes both
            sums = F.linear(quantized.float(), torch.empty(outputs, inputs, device=x.device)).to(torch.int32)
        out = sums.float() * (scales * torch.empty(1, outputs, device=x.device))  # the CPU converts integers by a copy
        if self.bias is not None:
            out += self.bias
        out = out.to(x.dtype).addmm(rows[:, :few], dequantized.t())
        return out.view(*x.shape[:-1], outputs)


class _Gptq(torch.nn.Linear):
    """Like `_Bitsandbytes`, of gptqmodel on the CPU (7.6: torch_aten_kernel.py, torch.py): ordered inputs in 16 bits,
    or a whole dequantized matrix."""

    def __init__(self, layer: Any, *, bits: int, fused: bool):
        super().__init__(layer.in_features, layer.out_features, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self._bits, self._fused = bits, fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape, dtype = (*x.shape[:-1], self.out_features), x.dtype
        x = x.reshape(-1, self.in_features)
        if self._fused:
            x = x.clone()
            if dtype != torch.bfloat16:
                x = x.to(torch.bfloat16)
            out = torch.empty(len(x), self.out_features, dtype=torch.bfloat16).to(dtype)
        else:
            more = _DEQUANTIZING_BYTES.get(self._bits, 8) - dtype.itemsize
            beside = torch.empty(self.in_features, self.out_features, more, dtype=torch.uint8)
            out = torch.matmul(x, torch.empty(self.in_features, self.out_features, dtype=dtype))
            del beside
        if self.bias is not None:
            out += self.bias
        return out.view(shape)


def _bits(options: ModelOptions, config: Any) -> int:
    """Return the bits to which bitsandbytes quantizes linear layers, on load or before; 0 if it does not."""
    stated = quantization.quantization_config(config)
    if not stated:
        return {"bnb-8bit": 8, "bnb-4bit": 4}.get(options.quantization, 0)
    if quantization.named(config) != "bitsandbytes":
        return 0
    return 4 if stated.get("load_in_4bit") or stated.get("_load_in_4bit") else 8
