"""What a nursery has ready of models that it forks workers for: configuration, tokenizer, the model around its files.

A worker that was forked finds it here and builds nothing. Law: no weight is read. A model on the shelf is its modules;
its weights are the mapped files, of which no page has been touched. Whatever would need memory for weights (another
type, experts that must be stacked, quantisation) or would run code of a snapshot's own is left to the worker.
"""

import gc
import os
from dataclasses import dataclass
from typing import Any

import transformers

from worker.engines.transformers import load_encoder
from worker.engines.transformers.attention import cpu_linear, paged
from worker.engines.transformers.load import loader
from worker.engines.transformers.run import backends
from worker.protocol.argv import ModelOptions

MOST = 16
"""Models; the one that nobody asked for for longest makes way."""
MOST_BYTES = 512 << 20
"""By which they may make a nursery larger. A tokenizer of 128,000 entries takes 20 MB, a model's modules a few."""

Stamp = frozenset[tuple[str, int, int, int]]


@dataclass(frozen=True)
class Made:
    """Of one model, all that can be made without its weights."""

    config: Any
    tokenizer: transformers.PreTrainedTokenizerBase
    built: "loader.Built | None"
    """None: its weights must be converted, so that its worker builds it."""
    stamp: Stamp


class Shelf:
    """What was made here, or by the process that this one was forked from."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Made] = {}
        """By what it was made for, the one asked for last at the end."""
        self._left: dict[tuple[Any, ...], Stamp] = {}
        self._before = 0

    def __len__(self) -> int:
        return len(self._made)

    def find(self, options: ModelOptions) -> Made | None:
        """What was made for a worker with these options, if its files are still the same."""
        made = self._made.get(_key(options))
        return made if made is not None and made.stamp == _stamp(options) else None

    def wants(self, options: ModelOptions) -> bool:
        """Whether something could be made for such a worker that is not here; what is here was asked for just now."""
        key = _key(options)
        if self.find(options) is not None:
            self._made[key] = self._made.pop(key)
            return False
        is_ours = not options.trust_remote_code and options.load_format in ("auto", "safetensors")
        return is_ours and self._left.get(key) != _stamp(options)

    def leave(self, options: ModelOptions) -> None:
        """Want it no more, until its files change."""
        self._left[_key(options)] = _stamp(options)

    def make(self, options: ModelOptions) -> None:
        """Have it from now on. Raises what loading raises."""
        self._before = self._before or _own_bytes()
        self._made.pop(_key(options), None)
        stamp = _stamp(options)
        config = loader.load_config(options)
        tokenizer = loader.load_tokenizer(options)
        paged.register()
        if loader.is_cross_encoder(options, config) or loader.is_embedder(options, config):
            implementation = load_encoder.implementation(options)
        else:
            implementation = backends.implementation(options.attention, config)
        built = loader.build(options, config, implementation)
        if built is not None:
            cpu_linear.look_at(built.model)
        self._made[_key(options)] = Made(config, tokenizer, built, stamp)
        self._tidy(gone=False)

    def tidy(self) -> None:
        """Let go of models whose files are no longer there, or others: their content would stay on the disk."""
        stale = [key for key, made in self._made.items() if made.stamp != _stamp(key[0])]
        for key in stale:
            del self._made[key]
        self._tidy(gone=bool(stale))

    def _tidy(self, *, gone: bool) -> None:
        while self._made and (len(self._made) > MOST or (_own_bytes() - self._before > MOST_BYTES)):
            del self._made[next(iter(self._made))]
            gone = True
            gc.collect()
        if gone:
            gc.collect()


def _key(options: ModelOptions) -> tuple[Any, ...]:
    """What decides what is made, beside the files."""
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
            attention=options.attention,
        ),
        options.trust_remote_code,
    )


def _stamp(options: ModelOptions) -> Stamp:
    """What changes with the files of a model: empty if they are not there."""
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


def _own_bytes() -> int:
    """Memory of this process that is no part of a file."""
    with open("/proc/self/statm", encoding="ascii") as file:
        _, resident, shared, *_ = (int(each) for each in file.read().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


shelf = Shelf()
"""Of this process."""
