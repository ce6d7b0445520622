"""The part of a load that needs no weights: options checked, configuration, tokenizer, and the way to the devices."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from worker.engines.transformers.attention import quantized_kv_types
from worker.engines.transformers.device import memory
from worker.engines.transformers.device.process_overhead import overhead
from worker.engines.transformers.load import loader, placement
from worker.engines.transformers.prebuilt_models import shelf
from worker.engines.transformers.run import backends
from worker.errors import StartError
from worker.protocol.argv import Serve
from worker.protocol.exits import Exit

_TASKS = ("auto", "generate", "embed", "rerank")
_LEAST = {
    "parallel": 1, "prefill_chunk": 1, "threads": 1, "ctx_size": 0, "kv_tokens": 0, "queue_size": 0,
    "max_input_tokens": 0, "max_loras": 0, "max_lora_rank": 1, "max_cpu_loras": 0, "tensor_parallel": 1,
}  # fmt: skip
"""The least value of each option that is a number."""


@dataclass(frozen=True)
class Prepared:
    """The parts of a load that need neither weights nor a device."""

    config: Any
    tokenizer: transformers.PreTrainedTokenizerBase
    built: loader.Built | None = None
    """The model without its weights, if the fork server had built it."""
    imported: int = 0
    """Bytes of main memory that the imports took; 0: they were the fork server's."""


def prepare(options: Serve, over: Callable[[str], None]) -> Prepared:
    """Do what can be done before there is room for weights, and before devices are looked at."""
    check(options)
    torch.set_num_threads(options.threads)
    memory.keep_small()
    imported = 0 if memory.inheritance.is_heir else memory.resident()
    if (made := shelf.find(options)) is not None:
        over("config")
        over("tokenizer")
        return Prepared(made.config, made.tokenizer, made.built, imported)
    config = loader.load_config(options)
    over("config")
    tokenizer = loader.load_tokenizer(options)
    over("tokenizer")
    return Prepared(config, tokenizer, imported=imported)


def check(options: Serve) -> None:
    """Raise StartError for an option with a value that it cannot have."""
    if options.task not in _TASKS:
        raise StartError(f"task {options.task!r} is none of {', '.join(_TASKS)}", Exit.USAGE)
    backends.check_attention(options.attention)
    if options.kv_cache_dtype not in quantized_kv_types.NAMES:
        raise StartError(
            f"kv_cache_dtype {options.kv_cache_dtype!r} is none of {', '.join(quantized_kv_types.NAMES)}", Exit.USAGE
        )
    for name, least in _LEAST.items():
        if getattr(options, name) < least:
            raise StartError(f"{name} is {getattr(options, name)}; it must be at least {least}", Exit.USAGE)


def come_to_devices(options: Serve, imported: int) -> None:
    """Check that the devices are there, limit torch to the reserved memory, and record the memory that this takes.

    `imported`: bytes of main memory that the imports took.
    """
    accelerators = [name for name in options.devices if name != "cpu"]
    if options.tensor_parallel > 1:
        accelerators = accelerators[:1]  # each rank process opens its own device
    before = memory.resident()
    overhead.begin(accelerators if options.tensor_parallel == 1 else (), options.overhead)
    placement.devices_of(options)
    memory.cap(accelerators, options.reserved)
    for name in accelerators:
        torch.cuda.synchronize(torch.device(name))  # creates the CUDA context
    host = imported + (memory.resident() - before if accelerators else 0)
    if host > 0 and options.tensor_parallel == 1:
        overhead.said["cpu"] = host
