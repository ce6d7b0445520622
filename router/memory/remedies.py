"""Remedies: the preset keys with which a model would fit that does not fit on empty devices. PURE."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from router.config.presets import Preset
from router.memory.checkpoint_facts import Checkpoint, EstimateError, effective_ctx, rows
from router.memory.estimate import MemoryEstimate
from router.memory.segments import ON_LOAD, bits_on_load
from router.memory.sharding import Choice, fits, static_estimate
from router.planner.ledger import MAIN_MEMORY, DeviceId
from worker.protocol.memory import BLOCK_TOKENS

LEAST_CTX = 256  # tokens; a shorter context is no remedy. A guess
_SMALLER_CACHES = ("int8", "int4")


@dataclass(frozen=True)
class Remedies:
    """Settings such as `ctx-size = 2048`, in the order of what they cost the user."""

    settings: tuple[str, ...] = ()
    are_joint: bool = False  # only all of them together are enough; otherwise each of them is

    def __str__(self) -> str:
        """An instruction for a message; empty if there is no remedy."""
        if self.are_joint and len(self.settings) > 1:
            return f"set {', '.join(self.settings[:-1])} and {self.settings[-1]} together"
        return f"set {', or '.join(self.settings)}" if self.settings else ""


def remedies(
    facts: Checkpoint,
    preset: Preset,
    choice: Choice,
    found: MemoryEstimate,
    room: Mapping[DeviceId, int],
    *,
    threads: int,
    forked: bool,
) -> Remedies:
    """Return the keys with which the model would fit in `room`: the bytes by device that could ever be free.

    `found`: its estimate, which does not fit. Another preset is estimated statically; the difference to the static
    estimate of `preset` is applied to `found`. `threads` and `forked` are those of `sharding.static_estimate`.
    """
    if found.source == "preset":
        return Remedies()  # its figure replaces the estimate, so no other key changes it

    def static(of: Preset) -> MemoryEstimate:
        return static_estimate(choice, facts, of, threads=threads, forked=forked, overhead=found.overhead)

    def fit(changed: Preset) -> bool:
        try:
            after = static(changed)
        except EstimateError:
            return False
        parts = zip(found.shards, before.shards, after.shards, strict=True)
        host = found.host + after.host - before.host
        has_host = not found.host or host <= room.get(MAIN_MEMORY, host)
        return has_host and fits(choice, [known - was + size for known, was, size in parts], room)

    try:
        before, tokens = static(preset), effective_ctx(facts, preset)
    except EstimateError:
        return Remedies()
    is_fixed = facts.quantization or bits_on_load(facts, preset) or choice.ranks > 1  # ranks divide no quantized matrix
    methods = () if is_fixed else tuple(ON_LOAD)
    caches = _SMALLER_CACHES if preset.kv_cache_dtype not in _SMALLER_CACHES else ()
    contexts = range(LEAST_CTX, tokens, BLOCK_TOKENS)
    pools = range(-(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS, preset.kv_tokens, BLOCK_TOKENS)
    changes: dict[str, int | str | None] = {
        "kv-tokens": _largest(pools, lambda tokens: fit(replace(preset, kv_tokens=tokens))),
        "parallel": _largest(range(1, rows(facts, preset)), lambda parallel: fit(replace(preset, parallel=parallel))),
        "ctx-size": _largest(contexts, lambda tokens: fit(replace(preset, ctx_size=tokens))),
        "kv-cache-dtype": _first(caches, lambda name: fit(replace(preset, kv_cache_dtype=name))),
        "quantization": _first(methods, lambda method: fit(replace(preset, quantization=method))),
    }
    if any(changes.values()):
        return Remedies(_settings(changes))
    return _joint_remedies(facts, preset, caches, methods, contexts, tokens, fit)


def _joint_remedies(
    facts: Checkpoint,
    preset: Preset,
    caches: Sequence[str],
    methods: Sequence[str],
    contexts: range,
    tokens: int,
    fit: Callable[[Preset], bool],
) -> Remedies:
    """Return the keys that are enough together, where none is alone: the longest context with everything else at its
    least. `tokens`: the context of `preset`."""
    least = replace(
        preset,
        parallel=1,
        kv_cache_dtype=caches[-1] if caches else preset.kv_cache_dtype,
        quantization=methods[-1] if methods else preset.quantization,
    )

    def fits_with_context(size: int) -> bool:
        return fit(replace(least, ctx_size=size, kv_tokens=size if preset.kv_tokens else 0))

    context = tokens if fits_with_context(tokens) else _largest(contexts, fits_with_context)
    if context is None:
        return Remedies()
    changes = {
        "kv-tokens": context if preset.kv_tokens else None,
        "parallel": 1 if rows(facts, preset) > 1 else None,
        "ctx-size": context if context < tokens else None,
        "kv-cache-dtype": caches[-1] if caches else None,
        "quantization": methods[-1] if methods else None,
    }
    return Remedies(_settings(changes), are_joint=True)


def _largest(values: range, fit: Callable[[int], bool]) -> int | None:
    """Return the largest of `values` that fits. The larger a value, the more memory it takes."""
    count = bisect_left(values, True, key=lambda value: not fit(value))
    return values[count - 1] if count else None


def _first(values: Iterable[str], fit: Callable[[str], bool]) -> str | None:
    return next(filter(fit, values), None)


def _settings(changes: Mapping[str, int | str | None]) -> tuple[str, ...]:
    return tuple(f"{key} = {value}" for key, value in changes.items() if value is not None)
