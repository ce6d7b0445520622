"""The devices that a model lies on, and the type that it computes in."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from worker.engines.transformers.load import layer_split, safetensors
from worker.engines.transformers.load.layer_split import Split
from worker.engines.transformers.load.snapshot import is_cross_encoder, is_embedder
from worker.errors import StartError
from worker.protocol.argv import ModelOptions
from worker.protocol.exits import Exit


def devices_of(options: ModelOptions) -> tuple[torch.device, ...]:
    """The devices of the model, in order. Raises StartError if there are none, or one that is not here."""
    if not options.devices:
        raise StartError("no device is given; --devices=cpu, for one", Exit.USAGE)
    return tuple(map(_device, options.devices))


def _device(name: str) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise StartError(f"device {name} is not usable: this torch ({torch.__version__}) sees no CUDA device")
    device = torch.device(name)
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        raise StartError(f"device {name} is not here; torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", device.index or 0)


def device_of(options: ModelOptions, rank: int) -> torch.device:
    """The device of one rank of a divided model. Raises StartError if there is none for it."""
    devices = devices_of(options)
    if devices[0].type == "cpu" and len(devices) == 1:
        return devices[0]
    if len(devices) != options.tensor_parallel:
        raise StartError(
            f"--tensor-parallel={options.tensor_parallel} wants as many devices, and --devices names {len(devices)}",
            Exit.USAGE,
        )
    return devices[rank]


def split_of(options: ModelOptions, config: Any, devices: Sequence[torch.device]) -> Split | None:
    """How the model is to lie on several devices; None: it lies on one. Raises StartError for one that cannot."""
    if len(devices) > 1 and (is_cross_encoder(options, config) or is_embedder(options, config)):
        raise StartError("a model that embeds or scores texts cannot be split over devices; give it one device")
    return layer_split.wanted(options, config, devices)


def resolve_dtype(asked: str, stored: torch.dtype | None, device: torch.device) -> torch.dtype:
    """auto: the checkpoint's; float16 becomes float32 on the CPU, which has no fast arithmetic for it."""
    if asked != "auto":
        dtype = getattr(torch, asked, None)
        if asked not in ("float32", "float16", "bfloat16") or not isinstance(dtype, torch.dtype):
            raise StartError(f"dtype {asked!r} is none of auto, float32, float16, bfloat16", Exit.USAGE)
        return dtype
    if stored is None or (stored == torch.float16 and device.type == "cpu"):
        return torch.float32
    return stored


def resolved(
    options: ModelOptions, config: Any, files: Iterable[safetensors.WeightFile], device: torch.device
) -> torch.dtype:
    """Of the model: as asked, else the configuration's, else the files'."""
    stored = getattr(config, "dtype", None) or next((file.floating for file in files if file.floating), None)
    return resolve_dtype(options.dtype, stored, device)
