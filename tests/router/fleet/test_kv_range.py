"""The KV cache as a range: the worker gets as much of it as is free at its start, and no other worker leaves for it."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from router.api.status import status
from router.config.presets import Preset
from router.errors import DoesNotFit
from router.launch.interface import WorkerLost
from router.memory.estimate import MemoryEstimate, estimate
from tests.fakes import CPU, GIB, GPU0, GPU1, FakeModel
from tests.router.fleet.worlds import LLAMA, Schedule

MIB = 1 << 20
KEYS: dict[str, Any] = {"parallel": 64, "threads": 1, "ctx_size": 1024}


def known(parallel: int = 64) -> MemoryEstimate:
    """The estimate of each model here; the range is 1024 to 65536 tokens in steps of 16 for `parallel` 64."""
    return estimate(LLAMA, Preset(id="a", **{**KEYS, "parallel": parallel}), on_host=True)


def world(free: int, **models: FakeModel) -> Schedule:
    """Models of equal size on a machine that has `free` bytes beside the least of one of them."""
    least = known()
    fake = FakeModel(shards=(sum(least.shards) - least.context[0],), bytes_per_token=least.kv_step[0] // 16)
    fakes = {name: models.get(name, replace(fake)) for name in ("a", "b")}
    totals = {CPU: sum(least.shards) + free}
    return Schedule(dict.fromkeys(fakes, 1), totals=totals, models=fakes, keys=dict.fromkeys(fakes, KEYS), stated=False)


def granted_tokens(schedule: Schedule) -> list[int]:
    """Of each start, in order."""
    plans = [event.data for event in schedule.events_of("plan")]
    return [plan["kv_cache"]["granted"]["tokens"] for plan in plans if plan["decision"] == "start"]


async def test_a_worker_is_granted_the_whole_steps_that_are_free() -> None:
    least = known()
    schedule = world(10 * least.kv_step[0] + 5)
    await schedule.ask("a")
    assert schedule.worker("a").reserved[CPU] == sum(least.shards) + 10 * least.kv_step[0]
    assert schedule.launcher.kv_tokens["a"] == 1024 + 10 * 16
    shown = status(schedule.fleet, schedule.fleet.models["a"])["kv_cache"]
    assert shown["granted"] == {"tokens": 1184, "mib": -(-(least.context[0] + 10 * least.kv_step[0]) // MIB)}
    assert (shown["least"]["tokens"], shown["most"]["tokens"]) == (1024, 65536)


async def test_kv_tokens_fix_the_cache() -> None:
    schedule = world(4 << 30)
    schedule.fleet.models["a"].preset = replace(schedule.fleet.models["a"].preset, kv_tokens=2048)
    await schedule.ask("a")
    assert schedule.launcher.kv_tokens["a"] == 2048
    shown = status(schedule.fleet, schedule.fleet.models["a"])["kv_cache"]
    assert shown["least"] == shown["granted"] == shown["most"]


async def test_a_model_is_placed_by_its_least_beside_a_worker_that_has_a_grant() -> None:
    """The first worker has taken a part of the range only because that was free; it does not shrink, and the second
    one gets the rest."""
    schedule = world(sum(known().shards) + 30 * known().kv_step[0])
    schedule.launcher.hold("start a")
    first = [schedule.fleet.lease(name) for name in "ab"]
    for lease in first:
        lease.__enter__()
    schedule.fleet.scheduler.plan_now()
    schedule.launcher.release("start a")
    for lease in first:
        await lease.ready()
        lease.__exit__()
    assert schedule.entries("stop") == []
    assert granted_tokens(schedule) == [1024 + 30 * 16, 1024]


async def test_a_preview_shows_the_grant_that_a_load_would_get() -> None:
    schedule = world(10 * known().kv_step[0])
    found = await schedule.fleet.scheduler.preview("a")
    assert found["decision"] == "start"
    assert {name: cache["tokens"] for name, cache in found["kv_cache"].items()} == {
        "least": 1024, "granted": 1184, "most": 65536
    }  # fmt: skip


async def test_the_estimate_event_has_the_range_before_the_grant() -> None:
    schedule = world(0)
    await schedule.ask("a")
    [event] = schedule.events_of("estimate")
    assert event.data["kv_cache"]["granted"] is None
    assert event.data["kv_cache"]["most"]["tokens"] == 65536


async def test_a_load_that_ran_out_of_memory_is_retried_with_the_least() -> None:
    lost = WorkerLost("no memory", cause="oom", exit=6, memory="host")
    least = known()
    fake = FakeModel(shards=(1 << 20,), bytes_per_token=least.kv_step[0] // 16, start_fails=[lost])
    schedule = world(1 << 30, a=fake)
    await schedule.ask("a")
    granted = granted_tokens(schedule)
    assert granted[0] > 1024
    assert granted[1:] == [1024]


async def test_an_early_start_gets_its_pool_with_its_memory() -> None:
    """Its process is spawned before the grant is known, while its victim stops."""
    schedule = world(650 * MIB)
    schedule.launcher.models["a"].stop_seconds = 5.0
    await schedule.ask("a")
    await schedule.ask("b")
    assert schedule.entries("stop a", "prepare b", "start b") == ["prepare b", "stop a", "start b"]
    found = schedule.costs("b").estimate
    assert schedule.launcher.kv_tokens["b"] == found.kv_tokens == 65536
    assert schedule.worker("b").reserved[CPU] == sum(found.shards)


async def test_a_split_model_gets_the_same_steps_on_each_device() -> None:
    """As many as the device with less memory has room for."""
    preset = Preset(id="a", **KEYS)
    least = estimate(LLAMA, preset, layers=(2, 2), on_host=False)
    totals = {GPU0: least.shards[0] + 9 * least.kv_step[0], GPU1: least.shards[1] + 100 * least.kv_step[1]}
    keys = {"a": {**KEYS, "pipeline_parallel": 2}}
    fakes = {"a": FakeModel(shards=(1, 1))}
    schedule = Schedule({"a": 1}, totals={CPU: 8 * GIB, **totals}, models=fakes, keys=keys, stated=False)
    await schedule.ask("a")
    worker = schedule.worker("a")
    assert worker.kv_range is not None
    assert worker.kv_range.kv_step == least.kv_step
    assert worker.reserved[worker.place[0]] == least.shards[0] + 9 * least.kv_step[0]
    assert worker.reserved[worker.place[1]] == least.shards[1] + 9 * least.kv_step[1]
    assert schedule.launcher.kv_tokens["a"] == 1024 + 9 * 16


async def test_a_replica_has_a_grant_of_its_own() -> None:
    schedule = world(sum(known().shards) + 200 * MIB)
    keys = {**KEYS, "parallel": 2, "replicas": (1, 2)}
    schedule.fleet.models["a"].preset = replace(schedule.fleet.models["a"].preset, **keys)
    await asyncio.gather(*(schedule.ask("a", 30.0) for _ in range(6)))
    assert granted_tokens(schedule) == [2048, 2048]
    assert sum(worker.reserved[CPU] for worker in schedule.fleet.workers()) <= schedule.launcher.totals[CPU]


async def test_gpu_memory_utilization_limits_the_grant() -> None:
    """95 % of the device; the rest stays free for other models."""
    schedule = world(100 * MIB)
    preset = schedule.fleet.models["a"].preset
    schedule.fleet.models["a"].preset = replace(preset, gpu_memory_utilization=0.95)
    await schedule.ask("a")
    most, step = int(0.95 * schedule.launcher.totals[CPU]), known().kv_step[0]
    assert most - step < schedule.worker("a").reserved[CPU] <= most


async def test_a_refusal_names_the_device_limit_and_not_a_share_of_the_preset_that_changes_nothing() -> None:
    least = sum(known().shards)
    schedule = Schedule(
        {"a": 1}, totals={CPU: 2 * least}, limit={CPU: least - MIB}, models={"a": FakeModel(shards=(least,))},
        keys={"a": {**KEYS, "gpu_memory_utilization": 0.4}}, stated=False,
    )  # fmt: skip
    with pytest.raises(DoesNotFit) as refused:
        await schedule.ask("a")
    assert f"(margin 0 MiB, --device-limit {(least - MIB) // MIB} MiB)" in str(refused.value)
    assert str(refused.value).endswith("or raise --device-limit")
    assert "gpu-memory-utilization" not in str(refused.value)
