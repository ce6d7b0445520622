"""The keys that a message names for a model that does not fit: each value is the largest that fits."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.presets import Preset
from router.memory.checkpoint_facts import Linears
from router.memory.estimate import MemoryEstimate, estimate
from router.memory.remedies import LEAST_CTX, Remedies, remedies
from router.memory.sharding import Choice, fits, static_estimate
from router.planner.ledger import DeviceId
from tests.router.checkpoints import BIG, CPU, GIB, GPU, QWEN3_4B, preset

MIB = 1 << 20
ORDER = ["kv-tokens", "parallel", "ctx-size", "kv-cache-dtype", "quantization"]
ONE = Choice(devices=frozenset(GPU[:1]))
TWO = frozenset(GPU[:2])


def found(said: Preset, room: int | dict[DeviceId, int], choice: Choice = ONE, facts: Any = QWEN3_4B) -> Remedies:
    sizes = room if isinstance(room, dict) else {GPU[0]: room, CPU: 1 << 50}
    known = static_estimate(choice, facts, said, threads=1, forked=False)
    return remedies(facts, said, choice, known, sizes, threads=1, forked=False)


def needs(said: Preset) -> int:
    return estimate(QWEN3_4B, said, on_host=False, threads=1).shards[0]


def with_setting(said: Preset, setting: str) -> Preset:
    key, value = setting.split(" = ")
    changes: dict[str, Any] = {key.replace("-", "_"): int(value) if value.isdecimal() else value}
    return replace(said, **changes)


@given(
    ctx_size=st.sampled_from([300, 4096, 32768, 40000]),
    parallel=st.integers(1, 64),
    pools=st.sampled_from([0, 1, 3]),
    share=st.floats(0.05, 0.999),
)
def test_each_named_setting_fits_alone_and_the_next_larger_does_not(
    ctx_size: int, parallel: int, pools: int, share: float
) -> None:
    said = preset(ctx_size=ctx_size, parallel=parallel, kv_tokens=pools * ctx_size)
    room = int(share * needs(said))
    what = found(said, room)
    keys = [setting.split(" = ")[0] for setting in what.settings]
    assert keys == sorted(keys, key=ORDER.index)
    if what.are_joint:
        for setting in what.settings:
            said = with_setting(said, setting)
        assert needs(said) <= room
        return
    for setting in what.settings:
        changed = with_setting(said, setting)
        assert needs(changed) <= room
        key, value = setting.split(" = ")
        step = {"parallel": 1, "ctx-size": 16, "kv-tokens": 16}.get(key)
        if step:
            larger = with_setting(changed, f"{key} = {int(value) + step}")
            assert needs(larger) > room or getattr(larger, key.replace("-", "_")) >= getattr(
                said, key.replace("-", "_")
            )


def test_a_setting_that_does_not_help_is_not_named() -> None:
    said = preset(ctx_size=32768, parallel=1)
    what = found(said, needs(said) - 64 * MIB)
    assert [setting.split(" = ")[0] for setting in what.settings] == ["ctx-size", "kv-cache-dtype", "quantization"][
        : len(what.settings)
    ]
    assert str(what).startswith("set ctx-size = ")
    fixed = replace(said, kv_tokens=100_000, parallel=2)
    assert found(fixed, needs(fixed) - 64 * MIB).settings[0].startswith("kv-tokens = ")
    assert found(preset(required_memory={"": 9 * GIB}), 8 * GIB).settings == ()


def test_settings_that_are_enough_only_together_are_named_together() -> None:
    said = preset(ctx_size=4096, parallel=64, kv_tokens=8192, quantization="bnb-4bit")
    least = replace(said, parallel=1, kv_tokens=4096, kv_cache_dtype="int4")
    together = "set kv-tokens = 4096, parallel = 1 and kv-cache-dtype = int4 together"
    assert str(found(said, needs(least))) == together
    shorter = found(said, needs(replace(least, ctx_size=1024, kv_tokens=1024)))
    assert shorter.settings[:3] == ("kv-tokens = 1024", "parallel = 1", "ctx-size = 1024")
    assert found(said, MIB) == Remedies()


def test_a_context_that_is_too_short_is_no_remedy() -> None:
    said = preset(ctx_size=4096, parallel=1, quantization="none")
    room = needs(replace(said, ctx_size=LEAST_CTX)) - 1
    assert not any(setting.startswith("ctx-size") for setting in found(said, room).settings)


def test_the_difference_is_applied_to_the_estimate_in_use() -> None:
    """An exact estimate is lower than the static one, so a longer context fits."""
    said = preset(ctx_size=32768, parallel=1)
    static = static_estimate(ONE, QWEN3_4B, said, threads=1, forked=False)
    exact = replace(static, compute=(static.compute[0] // 2,), source="exact")
    room = {GPU[0]: exact.shards[0] - 300 * MIB, CPU: 1 << 50}

    def context(known: MemoryEstimate) -> int:
        what = remedies(QWEN3_4B, said, ONE, known, room, threads=1, forked=False)
        return int(what.settings[0].removeprefix("ctx-size = "))

    assert context(exact) > context(static)


def test_quantization_is_a_remedy_for_a_layer_split_but_not_for_ranks() -> None:
    linears = Linears(8, 800_000_000, 60_000, 12_500_000)
    parts = tuple(replace(part, linears=linears) for part in BIG.by_layer)
    facts = replace(
        BIG, matrix_elements=80 * 800_000_000, by_layer=parts, linears=Linears(640, 64 * 10**9, 4_800_000, 10**9)
    )
    for choice, is_remedy in ((Choice(layers=(40, 40), devices=TWO), True), (Choice(ranks=2, devices=TWO), False)):
        what = found(preset(parallel=1), {**dict.fromkeys(GPU, 60 * GIB), CPU: 1 << 50}, choice, facts)
        assert ("quantization = bnb-8bit" in what.settings) is is_remedy


@pytest.mark.parametrize("choice", [Choice(layers=(40, 40), devices=TWO), Choice(ranks=2, devices=TWO)])
def test_the_parts_of_a_split_model_count_on_each_device(choice: Choice) -> None:
    facts = replace(BIG, matrix_elements=80 * 800_000_000)
    said = preset(ctx_size=8192, parallel=1)
    known = static_estimate(choice, facts, said, threads=1, forked=False)
    room = {device: size - 100 * MIB for device, size in zip(GPU, sorted(known.shards, reverse=True), strict=False)}
    what = found(said, {**room, CPU: 1 << 50}, choice, facts)
    assert [setting.split(" = ")[0] for setting in what.settings] in (["ctx-size"], ["ctx-size", "kv-cache-dtype"])
    changed = static_estimate(choice, facts, with_setting(said, what.settings[0]), threads=1, forked=False)
    assert fits(choice, changed.shards, room)
    assert found(said, {**room, CPU: 0}, choice, facts) == Remedies(), "main memory beside the devices is short"
