"""LoRA adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

Only plain LoRA is supported (Hu et al. 2021, section 4.1): a linear layer y = Wx gets two small matrices A
`[lora_rank, inputs]` and B `[outputs, lora_rank]`, and y becomes Wx + scaling * B(Ax). All other features of PEFT's
configuration change the layer in another way and are rejected by name, because ignoring them would give wrong text. The
PEFT library is not needed.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from worker.engines.transformers.load.safetensors import WeightFile
from worker.errors import StartError, UnusableAdapter
from worker.protocol.snapshot_files import ADAPTER_FILES

CONFIG, WEIGHTS = ADAPTER_FILES
# Keys of adapter_config.json (PEFT 0.21) that describe the training or are read here. target_modules is not read: the
# weights name their layers.
_TRAINING = (
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode r target_modules"
    " exclude_modules lora_alpha lora_dropout fan_in_fan_out use_rslora layers_to_transform layers_pattern rank_pattern"
    " alpha_pattern megatron_core eva_config qalora_group_size runtime_config ensure_weight_tying loftq_config"
    " corda_config lora_ga_config"
)
_REFUSED = {
    "use_dora": "it is a DoRA adapter, which scales the model's own weights",
    "modules_to_save": "it has whole layers of its own",
    "trainable_token_indices": "it has embeddings of its own",
    "lora_bias": "it has biases",
    "target_parameters": "it is for parameters that are no linear layers, as those of experts",
    "layer_replication": "it repeats layers of the model",
    "alora_invocation_tokens": "it begins at certain tokens only (aLoRA)",
}
# Values of init_lora_weights that leave the base model's weights unchanged, in lower case.
_WITHOUT_BASE = frozenset({"true", "false", "gaussian", "eva", "orthogonal"})
_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.(?:[^.]+\.)?weight")
_MOST_CONFIG = 1 << 20  # bytes; real files have a few hundred, or some thousand with patterns


@dataclass(frozen=True, slots=True, eq=False)
class LoraPair:
    """The two matrices of one linear layer."""

    a: torch.Tensor  # [lora_rank, inputs], a view of the mapped file
    b: torch.Tensor  # [outputs, lora_rank]
    scaling: float

    @property
    def lora_rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True, slots=True, eq=False)
class LoraFile:
    """One adapter with memory-mapped weights, whose pages the kernel may drop."""

    pairs: Mapping[str, LoraPair]  # by the layer's name in the model that it was trained on
    file: WeightFile
    stamp: tuple[int, ...]  # changes with the files

    @property
    def lora_rank(self) -> int:
        """The largest LoRA rank of its layers."""
        return max(pair.lora_rank for pair in self.pairs.values())


def read(folder: str) -> LoraFile:
    """Read the adapter in `folder`, headers only. Raises UnusableAdapter with the reason."""
    config = _config(Path(folder))
    _refuse_others(folder, config)
    path = Path(folder, WEIGHTS)
    if not path.is_file():
        old = Path(folder, "adapter_model.bin").is_file()
        why = (
            "only as a pickle (adapter_model.bin), which could run code; save it as safetensors" if old else "not there"
        )
        raise UnusableAdapter(f"{folder}: {WEIGHTS} is {why}")
    try:
        file = WeightFile(path)
        tensors = dict(file.tensors())
    except (StartError, OSError, ValueError) as error:
        raise UnusableAdapter(f"{folder}: {WEIGHTS} cannot be read: {error}") from None
    return LoraFile(_pairs(folder, config, tensors), file, stamp(folder))


def stamp(folder: str) -> tuple[int, ...]:
    """Inode, size and modification time of an adapter's files. Raises UnusableAdapter if one is missing."""
    try:
        facts = [os.stat(os.path.join(folder, name)) for name in (CONFIG, WEIGHTS)]
    except OSError as error:
        raise UnusableAdapter(f"{folder}: {error.strerror}") from None
    return tuple(number for fact in facts for number in (fact.st_ino, fact.st_size, fact.st_mtime_ns))


def is_overwritten(folder: str, before: tuple[int, ...]) -> bool:
    """True if the weights were written to in place since the stamp `before`, so that a mapping shows other content. A
    mapped file that was replaced or removed keeps its content."""
    try:
        fact = os.stat(os.path.join(folder, WEIGHTS))
    except OSError:
        return False
    inode, *content = before[3:]
    return fact.st_ino == inode and [fact.st_size, fact.st_mtime_ns] != content


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        if path.stat().st_size > _MOST_CONFIG:
            raise UnusableAdapter(f"{path} has more than {_MOST_CONFIG} bytes; it is no adapter's configuration")
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UnusableAdapter(f"{folder} has no {CONFIG}; name a folder written by PEFT") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UnusableAdapter(f"{path} cannot be read: {type(error).__name__}") from None
    if not isinstance(config, dict):
        raise UnusableAdapter(f"{path} is not a JSON object")
    return config


def _refuse_others(folder: str, config: Mapping[str, Any]) -> None:
    """Raise UnusableAdapter for everything but plain LoRA."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnusableAdapter(f"{folder}: adapters of type {str(kind)[:40]!r} are not supported, only LORA")
    if config.get("bias", "none") != "none":
        raise UnusableAdapter(
            f"{folder}: bias = {str(config['bias'])[:40]!r}: trained biases are not supported; {_OUT}"
        )
    begun = str(config.get("init_lora_weights", True)).lower()
    if begun not in _WITHOUT_BASE:
        raise UnusableAdapter(
            f"{folder}: init_lora_weights = {begun[:40]!r} changes the model's own weights; convert it with PEFT's"
            " path_initial_model_for_weight_conversion"
        )
    for key, value in config.items():
        if key in _TRAINING.split() or key in ("bias", "init_lora_weights") or not value:
            continue
        why = _REFUSED.get(key, f"{key[:60]} is set, which is not supported")
        raise UnusableAdapter(f"{folder}: {why}; {_OUT}")


_OUT = "merge it into a checkpoint of its own"


def _pairs(folder: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, LoraPair]:
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            has_embeddings = any("lora_embedding" in other for other in tensors)
            what = "embeddings" if has_embeddings else "no LoRA weights of linear layers"
            raise UnusableAdapter(f"{folder}: {key[:120]} are {what}, which is not supported; {_OUT}")
        halves.setdefault(match[1], {})[match[2]] = tensor
    if not halves:
        raise UnusableAdapter(f"{folder}: {WEIGHTS} is empty")
    pairs = {}
    for layer, found in halves.items():
        a, b = found.get("A"), found.get("B")
        if a is None or b is None or a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1] or not len(a):
            raise UnusableAdapter(f"{folder}: lora_A and lora_B of {layer[:120]} do not fit together")
        if not (a.is_floating_point() and b.is_floating_point()):
            raise UnusableAdapter(f"{folder}: the weights of {layer[:120]} are no floating-point numbers")
        pairs[layer] = LoraPair(a, b, _scaling(folder, config, layer, len(a)))
    return pairs


def _scaling(folder: str, config: Mapping[str, Any], layer: str, rank: int) -> float:
    """alpha / rank, or with rslora alpha / sqrt(rank) (Kalajdzievski 2023, section 3), subject to PEFT's patterns."""
    stated = _pattern_value(folder, config, "rank_pattern", layer, config.get("r"))
    alpha = _pattern_value(folder, config, "alpha_pattern", layer, config.get("lora_alpha"))
    if stated != rank:
        raise UnusableAdapter(f"{folder}: {layer[:120]} has rank {rank}, and the rank in {CONFIG} is {stated:g}")
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _pattern_value(folder: str, config: Mapping[str, Any], patterns: str, layer: str, otherwise: Any) -> float:
    """The value for `layer`: that of the first pattern that matches the end of its name, else `otherwise`."""
    stated = config.get(patterns) or {}
    value = otherwise
    try:
        for pattern, own in stated.items():
            if re.match(rf"(.*\.)?({pattern})$", layer):
                value = own
                break
    except (AttributeError, TypeError, re.error):
        raise UnusableAdapter(f"{folder}: {patterns} in {CONFIG} cannot be used") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UnusableAdapter(f"{folder}: {CONFIG} states no r or lora_alpha for {layer[:120]}")
    return float(value)
