"""Packed weights: which methods there are, what each needs, and what becomes of its tensors while they are loaded.

Some stay packed, and are put into the order that kernels want; others are unpacked, because there are no kernels for
them, or none that keep what was promised of memory: compressed-tensors would unpack a whole model in its first step.
"""

import copy
import importlib
import importlib.util
import logging
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from worker.engines.transformers.device import memory
from worker.engines.transformers.load import safetensors
from worker.errors import StartError
from worker.protocol.architectures import FUSED_GROUPS, UNPACKED, UNPACKED_ON_CPU, UNPACKED_WITHOUT, USUAL_GROUP
from worker.protocol.argv import ModelOptions

LIBRARIES = {
    "awq": ("gptqmodel", "pip install 'gptqmodel<7.7' optimum"),
    "bitsandbytes": ("bitsandbytes", "pip install bitsandbytes"),
    "compressed-tensors": ("compressed_tensors", "pip install compressed-tensors"),
    "fp8": ("", ""),
    "gptq": ("gptqmodel", "pip install 'gptqmodel<7.7' optimum"),
    "mxfp4": ("", ""),
}
"""The methods that are served, which are those that our tests load, with what each needs beside transformers: module,
and how to get it. transformers knows more, whose memory nobody has measured here. As in router/memory/estimate.py."""
_WORD_BITS = {torch.int32: 32, torch.uint8: 8, torch.int8: 8}


def is_quantized(options: ModelOptions, config: Any) -> bool:
    """Whether the checkpoint is quantised, or is to be."""
    return bool(stated(config)) or options.quantization not in ("auto", "none")


def stated(config: Any) -> dict[str, Any]:
    """What config.json says of how the weights are packed; empty: they are not."""
    said = getattr(config, "quantization_config", None) or {}
    return said if isinstance(said, dict) else dict(said.to_dict())


def method(options: ModelOptions, config: Any) -> str:
    """How the model's weights are packed, or will be; "": they are not.

    Raises StartError if the preset wants another way than the checkpoint has, if we do not serve that, or if its
    library is not here.
    """
    found, asked = named(config), options.quantization
    if not found and asked in ("auto", "none"):
        return ""
    if not found and asked in ("bnb-8bit", "bnb-4bit"):
        found = "bitsandbytes"
    elif asked != "auto" and not found.startswith("bitsandbytes" if asked.startswith("bnb") else asked):
        fact = f"quantised with {found}" if found else "not quantised"
        raise StartError(f"quantization = {asked}, but the checkpoint is {fact}; leave the key out")
    if family(found) not in LIBRARIES:
        raise StartError(
            f"the checkpoint is quantised with {found!r}, which this version cannot load; take one that is not"
            f" quantised, or quantised with {', '.join(LIBRARIES)}"
        )
    said = stated(config)
    if found == "awq" and options.devices[0] == "cpu" and not is_fused(said):
        raise StartError(
            f"the checkpoint is quantised with awq in {said.get('bits', 4)} bits and groups of {said.get('group_size')}"
            " inputs, which this version computes on an accelerator only; on main memory it takes 4 bits and groups of"
            f" {', '.join(map(str, sorted(FUSED_GROUPS)))}"
        )
    module, command = LIBRARIES[family(found)]
    if module and not _is_installed(module):
        raise StartError(f"a checkpoint quantised with {found} needs the library {module}: {command}")
    return found


def named(config: Any) -> str:
    """What config.json calls the method; "": it states none."""
    said = stated(config)
    if not said:
        return ""
    by_bits = "bitsandbytes" if said.get("load_in_4bit") or said.get("load_in_8bit") else "unknown"  # as once written
    return str(said.get("quant_method") or by_bits)


def family(method: str) -> str:
    """The name by which a method's library is known."""
    return "bitsandbytes" if method.startswith("bitsandbytes") else method


def bring_library(method: str) -> None:
    """Import what `method` needs, if it needs anything: it is part of what a process takes."""
    module, _ = LIBRARIES.get(family(method), ("", ""))
    if module:
        importlib.import_module(module)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def unpacks(method: str, device: torch.device) -> bool:
    """Whether the weights are plain numbers, of the model's type, once they are loaded."""
    if method in UNPACKED or (device.type == "cpu" and method in UNPACKED_ON_CPU):
        return True
    return not all(map(_is_installed, UNPACKED_WITHOUT.get(method, ())))


def is_fused(said: dict[str, Any]) -> bool:
    """Whether gptqmodel has a kernel of main memory's own for a checkpoint of gptq or awq; others it unpacks."""
    group = said.get("group_size") or said.get("q_group_size") or USUAL_GROUP
    return (said.get("bits") or 4) == 4 and group in FUSED_GROUPS


def numbers(stored: torch.dtype, said: dict[str, Any]) -> int:
    """How many numbers an element of a packed tensor of that type holds, by what config.json `said`."""
    bits = said.get("bits") or said.get("w_bit") or _group_bits(said)
    if said.get("quant_method") in ("fp8", "mxfp4") and stored in (torch.int8, torch.uint8):
        bits = 4  # experts of a checkpoint in 8 bits may have 4
    return max(1, _WORD_BITS.get(stored, 0) // int(bits)) if bits else 1


def _group_bits(said: dict[str, Any]) -> int:
    """Of compressed-tensors, which has groups of layers: the fewest, as then there are the most numbers."""
    groups = said.get("config_groups") or {}
    found = [(group.get("weights") or {}).get("num_bits") for group in groups.values() if isinstance(group, dict)]
    return min((int(bits) for bits in found if bits), default=0)


def load(
    cls: Any,
    options: ModelOptions,
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    files: Sequence[safetensors.WeightFile],
) -> Any:
    """The model on `device`, as transformers loads it. Raises StartError."""
    found = method(options, config)
    if family(found) == "bitsandbytes":  # it would tell of each layer in each step that numbers are converted
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    said = stated(config)
    source: str | None = options.snapshot
    given: dict[str, Any] = {"use_safetensors": True, "local_files_only": True}
    if not said:
        bits: Any = transformers.BitsAndBytesConfig
        asked = options.quantization
        on_load = bits(load_in_8bit=asked == "bnb-8bit", load_in_4bit=asked == "bnb-4bit")
        # of our own mapping: pages that are packed can be let go, where transformers would keep all of them
        source, given = None, {"state_dict": _tensors(files, dtype), "quantization_config": on_load}
    elif unpacks(found, device):
        config = copy.deepcopy(config)
        config.quantization_config = {**said, "dequantize": True}
    elif found == "gptq" and device.type == "cpu" and not is_fused(said):
        config = copy.deepcopy(config)  # left alone it takes kernels that then find no such group, or other bits
        config.quantization_config = {**said, "backend": "torch"}
    try:
        model = cls.from_pretrained(source, config=config, dtype=dtype, device_map={"": device}, **given)
    except (ImportError, ValueError, RuntimeError) as error:
        if memory.is_exhausted(error):
            raise
        raise StartError(f"transformers cannot load this {found} checkpoint here: {memory.one_line(error)}") from error
    if said and unpacks(found, device):
        _unify(model, dtype)
    return model


def _tensors(files: Sequence[safetensors.WeightFile], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors by name, floating point in `dtype`; views where they are so in the files."""
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found.update(file.converted(dtype, lambda read: None) if file.converts_to(dtype) else file.tensors())
    return found


def _unify(model: Any, dtype: torch.dtype) -> None:
    """What was not packed keeps the type of the files, where the rest is unpacked to `dtype`: both have to be one."""
    kept = tuple(model._get_dtype_plan(dtype))
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not any(part in name for part in kept):
            parameter.data = parameter.data.to(dtype)


def arrange(model: Any, dtype: torch.dtype) -> None:
    """Have packed weights put into the order that the CPU's kernels want: else the first request would, and take the
    memory for it then."""
    with torch.inference_mode():
        for layer in model.modules():
            if type(layer).__name__ in ("Linear4bit", "Linear8bitLt") or hasattr(layer, "qweight"):
                layer(torch.zeros(1, 1, layer.in_features, dtype=dtype))
