"""Preparation of a load before there is memory for weights: options, configuration, tokenizer, prebuilt models.

The fork server keeps `PrebuiltModels`: the configuration, the tokenizer and the empty modules of models that it forks
workers for. A forked worker finds them here and saves the time to build them. No weights are read: a prebuilt model
maps its files and touches none of their pages. A model that would need memory for weights (another dtype, stacked
experts, quantization) or that runs code from its repository is left to the worker.
"""

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

from worker.engines.transformers.attention import cpu_linear, paged
from worker.engines.transformers.device import memory
from worker.engines.transformers.device.process_overhead import overhead
from worker.engines.transformers.load import layer_split, loader
from worker.engines.transformers.load.snapshot import load_config, load_tokenizer
from worker.engines.transformers.run import backends
from worker.errors import StartError
from worker.protocol.argv import KV_CACHE_DTYPES, TASKS, ModelOptions, Serve
from worker.protocol.events import Exit

# The least recently requested model is dropped beyond this number. A guess.
MAX_MODELS = 16
# Private memory that prebuilt models may add to the fork server. A tokenizer of 128,000 entries takes 20 MB, the
# modules of a model a few.
MAX_PREBUILT_BYTES = 512 << 20

# The least value of each numeric option.
_LEAST = {
    "parallel": 1, "prefill_chunk": 1, "threads": 1, "ctx_size": 0, "contexts": 0, "kv_tokens": 0, "queue_size": 0,
    "max_input_tokens": 0, "max_loras": 0, "max_lora_rank": 1, "max_cpu_loras": 0, "tensor_parallel": 1,
}  # fmt: skip

FileStamp = frozenset[tuple[str, int, int, int]]


@dataclass(frozen=True)
class PreparedModel:
    """The parts of a load that need neither weights nor a device."""

    config: Any
    tokenizer: transformers.PreTrainedTokenizerBase
    # The model without weights, if the fork server has built it. It does not if the weights must be converted.
    built: loader.Built | None = None
    imported: int = 0  # bytes of main memory that imports took; 0 if the fork server did them


def prepare(options: Serve, stage_done: Callable[[str], None]) -> PreparedModel:
    """Do everything that needs neither memory for weights nor a device. Raises StartError."""
    check(options)
    torch.set_num_threads(options.threads)
    memory.keep_small()
    imported = 0 if memory.inheritance.is_forked else memory.resident()
    if (prebuilt := prebuilt_models.find(options)) is not None:
        stage_done("config")
        stage_done("tokenizer")
        return replace(prebuilt, imported=imported)
    config = load_config(options)
    stage_done("config")
    tokenizer = load_tokenizer(options)
    stage_done("tokenizer")
    return PreparedModel(config, tokenizer, imported=imported)


def check(options: Serve) -> None:
    """Raise StartError for an option whose value is not allowed."""
    if options.task not in TASKS:
        raise StartError(f"task {options.task!r} is unknown; use one of {', '.join(TASKS)}", Exit.USAGE)
    backends.check_attention(options)
    if options.kv_cache_dtype not in KV_CACHE_DTYPES:
        raise StartError(
            f"kv_cache_dtype {options.kv_cache_dtype!r} is unknown; use one of {', '.join(KV_CACHE_DTYPES)}",
            Exit.USAGE,
        )
    for name, least in _LEAST.items():
        if getattr(options, name) < least:
            raise StartError(f"{name} is {getattr(options, name)}; it must be at least {least}", Exit.USAGE)


def open_devices(options: Serve, imported: int) -> None:
    """Check that the devices exist, cap torch to the reserved memory, and record the memory that this takes.

    `imported`: bytes of main memory that imports took.
    """
    accelerators = [name for name in options.devices if name != "cpu"]
    if options.tensor_parallel > 1:
        accelerators = accelerators[:1]  # each rank process opens its own device
    before = memory.resident()
    overhead.begin(accelerators if options.tensor_parallel == 1 else (), options.overhead)
    layer_split.devices_of(options)
    memory.cap(accelerators, options.reserved)
    for name in accelerators:
        torch.cuda.synchronize(torch.device(name))  # creates the CUDA context
    host = imported + (memory.resident() - before if accelerators else 0)
    if host > 0 and options.tensor_parallel == 1:
        overhead.reported["cpu"] = host


class PrebuiltModels:
    """The models that this process, or the fork server that it was forked from, has built without weights."""

    def __init__(self) -> None:
        # By `_key`, least recently requested first: each model and the stamp of its files.
        self._models: dict[tuple[Any, ...], tuple[PreparedModel, FileStamp]] = {}
        self._excluded: dict[tuple[Any, ...], FileStamp] = {}
        self._bytes_before = 0

    def __len__(self) -> int:
        return len(self._models)

    def find(self, options: ModelOptions) -> PreparedModel | None:
        """The model for a worker with these options, if its files are still the same."""
        model, stamp = self._models.get(_key(options), (None, None))
        return model if model is not None and stamp == _stamp(options) else None

    def lacks(self, options: ModelOptions) -> bool:
        """True if a model for such a worker could be built and is not here. Marks a present one as recently used."""
        key = _key(options)
        if self.find(options) is not None:
            self._models[key] = self._models.pop(key)
            return False
        runs_our_code = not options.trust_remote_code and options.load_format in ("auto", "safetensors")
        return runs_our_code and self._excluded.get(key) != _stamp(options)

    def exclude(self, options: ModelOptions) -> None:
        """Do not build this model until its files change: a trial in a child process failed."""
        self._excluded[_key(options)] = _stamp(options)

    def build(self, options: ModelOptions) -> None:
        """Build the model and keep it. Raises the errors of a load."""
        self._bytes_before = self._bytes_before or _private_bytes()
        self._models.pop(_key(options), None)
        stamp = _stamp(options)  # before the files are read: a change meanwhile makes the model stale
        config = load_config(options)
        tokenizer = load_tokenizer(options)
        paged.register()
        implementation = backends.implementation(options, config)
        built = loader.build(options, config, implementation)
        if built is not None:
            cpu_linear.read_sources(built.model)
        self._models[_key(options)] = PreparedModel(config, tokenizer, built), stamp
        self._enforce_limits()

    def drop_stale(self) -> None:
        """Drop models whose files were deleted or replaced: mapped files would keep their space on the disk."""
        stale = [key for key, (_, stamp) in self._models.items() if stamp != _stamp(key[0])]
        for key in stale:
            del self._models[key]
        if stale:
            gc.collect()
        self._enforce_limits()

    def _enforce_limits(self) -> None:
        while self._models and (
            len(self._models) > MAX_MODELS or (_private_bytes() - self._bytes_before > MAX_PREBUILT_BYTES)
        ):
            del self._models[next(iter(self._models))]
            gc.collect()  # modules have reference cycles: without this the next reading shows no difference


def _key(options: ModelOptions) -> tuple[Any, ...]:
    """The options that decide about the prebuilt model."""
    return (
        ModelOptions(
            snapshot=options.snapshot,
            tokenizer=options.tokenizer,
            task=options.task,
            devices=(options.devices[0].partition(":")[0],) if options.devices else (),
            dtype=options.dtype,
            quantization=options.quantization,
            load_format=options.load_format,
            config_override=options.config_override,
            rope=options.rope,
            attention=options.attention,
        ),
        options.trust_remote_code,
    )


def _stamp(options: ModelOptions) -> FileStamp:
    """Paths, inodes, sizes and times of the model's files. Empty if the folder does not exist."""
    found = set()
    for folder in {options.snapshot, options.tokenizer} - {""}:
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    facts = entry.stat()
                    found.add((entry.path, facts.st_ino, facts.st_size, facts.st_mtime_ns))
        except OSError:
            return frozenset()
    return frozenset(found)


def _private_bytes() -> int:
    """Resident memory of this process that is not part of a file."""
    with open("/proc/self/statm", encoding="ascii") as file:
        _, resident, shared, *_ = (int(number) for number in file.read().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


prebuilt_models = PrebuiltModels()  # of this process
