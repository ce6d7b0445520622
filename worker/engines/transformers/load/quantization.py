"""Quantized checkpoints: supported methods, their libraries, and what happens to the weights at load.

Some methods keep weights quantized, in the layout of their kernels. Others are dequantized, because there are no
kernels for them or none that keep the estimated memory: compressed-tensors would dequantize a whole model in its first
step.
"""

import copy
import importlib
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from accelerate.hooks import remove_hook_from_submodules  # type: ignore[import-untyped]

from worker.engines.transformers.device import cuda_errors
from worker.engines.transformers.load import safetensors
from worker.errors import StartError
from worker.protocol.architectures import (
    DEQUANTIZED,
    DEQUANTIZED_ON_CPU,
    DEQUANTIZED_WITHOUT,
    FUSED_GROUPS,
    LIBRARIES,
    SCALE,
    USUAL_GROUP,
    experts_fault,
)
from worker.protocol.argv import ModelOptions

_WORD_BITS = {torch.int32: 32, torch.uint8: 8, torch.int8: 8}
# The order of a layer's inputs, which gptqmodel's kernels for Hopper and Blackwell compute at load (7.6: machete.py and
# swordfish.py).
_PERMUTATION = ".input_perm"


def is_quantized(options: ModelOptions, config: Any) -> bool:
    """True if the checkpoint is quantized or the options request quantization at load."""
    return bool(quantization_config(config)) or options.quantization not in ("auto", "none")


def quantization_config(config: Any) -> dict[str, Any]:
    """Quantization settings of config.json; empty if the checkpoint is not quantized."""
    settings = getattr(config, "quantization_config", None) or {}
    return settings if isinstance(settings, dict) else dict(settings.to_dict())


def method(options: ModelOptions, config: Any) -> str:
    """Quantization method of the model; "" if it is not quantized.

    Raises StartError if the preset requests another method than the checkpoint has, if the method is not supported, or
    if its library is not installed.
    """
    found, asked = named(config), options.quantization
    if not found and asked in ("auto", "none"):
        return ""
    if not found and asked in ("bnb-8bit", "bnb-4bit"):
        found = "bitsandbytes"
    elif asked != "auto" and not found.startswith("bitsandbytes" if asked.startswith("bnb") else asked):
        fact = f"quantized with {found}" if found else "not quantized"
        raise StartError(f"quantization = {asked}, but the checkpoint is {fact}; leave the key out")
    if found not in LIBRARIES:
        raise StartError(
            f"the checkpoint is quantized with {found!r}, which this version cannot load; take one that is not"
            f" quantized, or quantized with {', '.join(LIBRARIES)}"
        )
    settings = quantization_config(config)
    if found == "awq" and options.devices[0] == "cpu" and not is_fused(settings):
        raise StartError(
            f"the checkpoint is quantized with awq in {settings.get('bits', 4)} bits and groups of"
            f" {settings.get('group_size')} inputs, which this version computes on an accelerator only; on main memory"
            " it takes 4 bits and groups of"
            f" {', '.join(map(str, sorted(FUSED_GROUPS)))}"
        )
    module, command = LIBRARIES[found]
    if module and not _is_installed(module):
        raise StartError(f"quantization with {found} needs the library {module}: {command}")
    return found


def named(config: Any) -> str:
    """Method named in config.json; "" if there is none."""
    settings = quantization_config(config)
    if not settings:
        return ""
    # Older checkpoints of bitsandbytes name no method.
    by_bits = "bitsandbytes" if settings.get("load_in_4bit") or settings.get("load_in_8bit") else "unknown"
    name = str(settings.get("quant_method") or by_bits)
    return "bitsandbytes" if name.startswith("bitsandbytes") else name


def bring_library(method: str) -> None:
    """Import the library of `method` if it needs one, so that it counts as process overhead."""
    module, _ = LIBRARIES.get(method, ("", ""))
    if module:
        importlib.import_module(module)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def dequantizes(method: str, device: torch.device) -> bool:
    """True if the weights are dequantized at load, to the model's own type."""
    if method in DEQUANTIZED or (device.type == "cpu" and method in DEQUANTIZED_ON_CPU):
        return True
    return not all(map(_is_installed, DEQUANTIZED_WITHOUT.get(method, ())))


def is_fused(settings: dict[str, Any]) -> bool:
    """True if gptqmodel has a CPU kernel for this gptq or awq checkpoint; others it dequantizes."""
    group = settings.get("group_size") or settings.get("q_group_size") or USUAL_GROUP
    return (settings.get("bits") or 4) == 4 and group in FUSED_GROUPS


def numbers(stored: torch.dtype, settings: dict[str, Any]) -> int:
    """Quantized numbers per element of a stored tensor of type `stored`."""
    bits = settings.get("bits") or settings.get("w_bit") or _group_bits(settings)
    if settings.get("quant_method") in ("fp8", "mxfp4") and stored in (torch.int8, torch.uint8):
        bits = 4  # experts of an 8-bit checkpoint may have 4 bits
    return max(1, _WORD_BITS.get(stored, 0) // int(bits)) if bits else 1


def _group_bits(settings: dict[str, Any]) -> int:
    """Smallest bit width of the groups of compressed-tensors: the most numbers per element, so the upper bound."""
    groups = settings.get("config_groups") or {}
    found = [(group.get("weights") or {}).get("num_bits") for group in groups.values() if isinstance(group, dict)]
    return min((int(bits) for bits in found if bits), default=0)


def load(
    cls: Any,
    options: ModelOptions,
    config: Any,
    devices: Mapping[str, torch.device],
    dtype: torch.dtype,
    files: Sequence[safetensors.WeightFile],
) -> tuple[Any, list[str]]:
    """Load the model with transformers. Return it and the names of tensors that are not in the files.

    `devices`: by names of modules, "" for the whole model. Raises StartError.
    """
    device = next(iter(devices.values()))
    found = method(options, config)
    if found == "bitsandbytes":  # it logs a conversion for each layer in each step
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    settings = quantization_config(config)
    source: str | None = options.snapshot
    given: dict[str, Any] = {"use_safetensors": True, "local_files_only": True}
    if not settings:
        bits: Any = transformers.BitsAndBytesConfig
        asked = options.quantization
        on_load = bits(load_in_8bit=asked == "bnb-8bit", load_in_4bit=asked == "bnb-4bit")
        # Views of our own mapping: quantized pages can be released. transformers would keep all of them.
        source, given = None, {"state_dict": _tensors(files, dtype), "quantization_config": on_load}
    elif dequantizes(found, device):
        config = copy.deepcopy(config)
        config.quantization_config = {**settings, "dequantize": True}
    elif found == "gptq" and device.type == "cpu" and not is_fused(settings):
        config = copy.deepcopy(config)  # the default backend picks kernels without support for these groups or bits
        config.quantization_config = {**settings, "backend": "torch"}
    if len(files) == 1 and settings:
        config.transformers_weights = files[0].path.name  # another name than transformers expects (`single_weights`)
    try:
        model, info = cls.from_pretrained(
            source, config=config, dtype=dtype, device_map=dict(devices), output_loading_info=True, **given
        )
    except (ImportError, ValueError, RuntimeError) as error:
        if cuda_errors.is_exhausted(error):
            raise
        raise StartError(
            f"transformers cannot load this {found} checkpoint here: {cuda_errors.one_line(error)}"
        ) from error
    if fault := experts_fault(found, info["unexpected_keys"]):
        raise StartError(fault)
    unread = sorted(name for name in info["unexpected_keys"] if name.endswith(".weight_scale"))
    if found == "fp8" and unread:
        raise StartError(
            f"transformers does not read the scales of this fp8 checkpoint ({unread[0]}), and its weights would be"
            " wrong; take a checkpoint that is quantized with compressed-tensors, or one that is not quantized"
        )
    remove_hook_from_submodules(model)  # accelerate's, of a model on several devices, which has those of `layer_split`
    if settings and dequantizes(found, device):
        _unify(model, dtype)
    # Without scales and the like: libraries add some that no file has.
    return model, [name for name in info["missing_keys"] if not (SCALE.search(name) or name.endswith(_PERMUTATION))]


def _tensors(files: Sequence[safetensors.WeightFile], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors by name, floating point in `dtype`; views where the files have that type."""
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found.update(file.converted(dtype, lambda read: None) if file.converts_to(dtype) else file.tensors())
    return found


def _unify(model: Any, dtype: torch.dtype) -> None:
    """Convert weights that were not quantized to `dtype`, like the dequantized ones."""
    kept = tuple(model._get_dtype_plan(dtype))
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not any(part in name for part in kept):
            parameter.data = parameter.data.to(dtype)


def convert_layouts(model: Any, dtype: torch.dtype) -> None:
    """Run every quantized layer once, so that it converts its weights to the CPU kernel's layout. The first request
    would do it otherwise, with memory that is not accounted for."""
    with torch.inference_mode():
        for layer in model.modules():
            if type(layer).__name__ in ("Linear4bit", "Linear8bitLt") or hasattr(layer, "qweight"):
                layer(torch.zeros(1, 1, layer.in_features, dtype=dtype))
