"""The metrics as Prometheus parses them, after given events and states of the fleet."""

import asyncio
import dataclasses
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.api.metrics import Metrics
from router.api.status import status
from router.config.settings import Settings
from router.log import state_line
from tests.fakes import CPU, GIB, FakeModel, virtual
from tests.router.fleet.worlds import Schedule
from worker.protocol.events import Progress, Pulse, RequestEnded


def samples(metrics: Metrics, model: str | None = None) -> dict[str, float]:
    """Every line, as `name{label="value"}` with labels in order; raises if it is not the format that it says."""

    def lines() -> Iterator[tuple[str, float]]:
        for family in text_string_to_metric_families(metrics.render(model).decode()):
            for name, labels, value, *_ in family.samples:
                inner = ",".join(f'{key}="{labels[key]}"' for key in sorted(labels))
                yield (f"{name}{{{inner}}}" if inner else name), value

    return dict(lines())


def made(*models: str, size: int = GIB, **changes: Any) -> tuple[Schedule, Metrics]:
    world = Schedule(dict.fromkeys(models, size), **changes)
    return world, Metrics(world.fleet, world.events)


async def test_an_idle_router_reports_every_model_and_no_requests() -> None:
    _, metrics = made("a", "b")
    found = samples(metrics)
    assert found['router_model_state{model="a",state="unloaded"}'] == 1.0
    assert found['router_model_state{model="b",state="loaded"}'] == 0.0
    assert found['router_queue_depth{model="a"}'] == 0.0
    assert not any(name.startswith("router_requests_total") for name in found)
    assert Metrics.content_type.startswith("text/plain; version=0.0.4")


async def test_tokens_are_counted_by_kind() -> None:
    world, metrics = made("a")
    for _ in range(2):
        world.events.notify("request", "a", prompt_tokens=5, cached_tokens=2, completion_tokens=7)
    found = samples(metrics)
    assert found['router_tokens_total{kind="prompt",model="a"}'] == 10.0
    assert found['router_tokens_total{kind="cached",model="a"}'] == 4.0
    assert found['router_tokens_total{kind="completion",model="a"}'] == 14.0


@pytest.mark.parametrize(
    ("reason", "result"),
    [
        ("oom", "oom"), ("crashed", "failed"), ("load_failed", "failed"), ("load_timeout", "failed"),
        ("download_failed", "failed"), ("does_not_fit", "failed"), ("requested", "cancelled"),
        ("abandoned", "cancelled"), ("shutdown", "cancelled"), ("config_changed", "cancelled"), ("", "cancelled"),
    ],
)  # fmt: skip
async def test_a_load_that_ended_early_is_counted_by_its_outcome(reason: str, result: str) -> None:
    world, metrics = made("a")
    world.events.append("state", "a", worker=1, state="stopped", was="starting", reason=reason)
    found = samples(metrics)
    loads = {name: value for name, value in found.items() if name.startswith("router_loads_total")}
    assert loads == {f'router_loads_total{{model="a",result="{result}"}}': 1.0}
    assert found[f'router_worker_exits_total{{model="a",reason="{reason or "stopped"}"}}'] == 1.0


@virtual
async def test_a_pull_is_no_load() -> None:
    world, metrics = made("a", missing=("a",))
    worker = world.fleet.fetch("a")
    await worker.stopped.wait()
    assert worker.reason == "downloaded"
    assert not any(name.startswith("router_loads_total") for name in samples(metrics))


async def test_series_of_a_removed_model_are_dropped() -> None:
    world, metrics = made("a", "b,c", "d")
    for model in ("a", "d"):
        world.events.append("state", model, worker=1, state="ready", was="starting", load_seconds=3.0)
        world.events.append("state", model, worker=1, state="stopped", was="ready", reason="evicted")
        world.events.notify("request", model, prompt_tokens=5, cached_tokens=2, completion_tokens=7)
    for model in ("a", "b", "d"):
        metrics.requests.add(model, "chat", "200")
        metrics.ttft.observe(1.0, model)
    world.fleet.models.remove("a", "requested")
    world.fleet.models.remove("b,c", "requested")
    found = samples(metrics)
    assert not [name for name in found if any(f'model="{gone}"' in name for gone in ("a", "b", "b,c"))]
    assert found['router_loads_total{model="d",result="ready"}'] == 1.0
    assert found['router_requests_total{code="200",endpoint="chat",model="d"}'] == 1.0
    metrics.requests.add("a", "chat", "200")
    again = 'router_requests_total{code="200",endpoint="chat",model="a"}'
    assert samples(metrics)[again] == 1.0, "a model that is listed again begins a new series"


async def test_the_cost_per_removed_model_does_not_grow_with_their_number() -> None:
    async def calls(count: int) -> int:
        """The calls of functions that it takes to remove so many models."""
        world, metrics = made(*(f"m{number}" for number in range(count)))
        for model in world.fleet.models:
            world.events.append("waited", model, seconds={"memory": 1.0, "start": 1.0})
            metrics.requests.add(model, "chat", "200")
        made_calls = 0

        def count_call(*_: object) -> None:
            nonlocal made_calls
            made_calls += 1

        sys.setprofile(count_call)
        world.fleet.models.apply({})
        await asyncio.sleep(0)
        sys.setprofile(None)
        assert not [name for name in samples(metrics) if 'model="' in name]
        return made_calls

    assert await calls(160) < 6 * await calls(40)


async def test_a_worker_that_was_ready_is_not_counted_as_a_failed_load() -> None:
    world, metrics = made("a")
    world.events.append("state", "a", worker=1, state="ready", was="starting", load_seconds=3.0)
    world.events.append("state", "a", worker=1, state="ready", draining=True, reason="requested")
    world.events.append("state", "a", worker=1, state="stopping", was="ready", reason="requested")
    world.events.append("state", "a", worker=1, state="stopped", was="stopping", reason="requested")
    found = samples(metrics)
    assert found['router_loads_total{model="a",result="ready"}'] == 1.0
    assert sum(name.startswith("router_loads_total") for name in found) == 1
    assert found['router_load_seconds_sum{model="a",stage="total"}'] == 3.0
    assert found['router_load_seconds_bucket{le="2.5",model="a",stage="total"}'] == 0.0
    assert found['router_load_seconds_bucket{le="5.0",model="a",stage="total"}'] == 1.0


@virtual
async def test_gauges_show_the_state_of_the_fleet() -> None:
    world = Schedule({"a": 2 * GIB, "b": GIB}, margin=GIB)
    metrics = Metrics(world.fleet, world.events)
    world.launcher.set_foreign(CPU, GIB)
    asked = await world.asking("a", 20.0, wait=5)
    waiting = await world.asking("b", wait=1)
    world.launcher.say("a", Pulse(steps=9, running=1, waiting=2, measured={"cpu": 3 * GIB}))
    world.fleet.scheduler.plan_soon()
    await asyncio.sleep(0.01)
    found = samples(metrics)
    at = 'device="cpu",node="local"'
    assert found[f"router_device_total_bytes{{{at}}}"] == 8 * GIB
    assert found[f"router_device_margin_bytes{{{at}}}"] == GIB
    assert found[f"router_device_reserved_bytes{{{at}}}"] == 4 * GIB
    assert found[f'router_device_memory_bytes{{{at},segment="foreign"}}'] == GIB
    segments = [found[f'router_device_memory_bytes{{{at},segment="{name}"}}'] for name in ("weights", "context",
                "compute", "runtime")]  # fmt: skip
    assert sum(segments) == 3 * GIB
    assert found['router_model_state{model="a",state="loaded"}'] == 1.0
    assert found['router_model_state{model="b",state="loading"}'] == 1.0
    assert found['router_requests_in_flight{model="a"}'] == 1.0
    assert found['router_queue_depth{model="b"}'] == 1.0
    assert found[f'router_model_memory_bytes{{device="cpu",kind="estimated",model="a",{at[13:]}}}'] == 2 * GIB
    assert found[f'router_model_memory_bytes{{device="cpu",kind="measured",model="a",{at[13:]}}}'] == 3 * GIB
    assert found['router_estimate_ratio{model="a"}'] == 1.5
    await asked
    await waiting
    await world.stop()
    found = samples(metrics)
    assert found[f"router_device_reserved_bytes{{{at}}}"] == 0
    assert not any(name.startswith("router_model_memory_bytes") for name in found)


@virtual
async def test_evictions_are_counted_by_memory_or_count() -> None:
    for settings, totals, reason in ((Settings(models_max=1), {CPU: 64 * GIB}, "count"), (Settings(), None, "memory")):
        world, metrics = made("a", "b", size=5 * GIB, settings=settings, totals=totals)
        await world.ask("a")
        await asyncio.sleep(60)
        await world.ask("b")
        assert samples(metrics)[f'router_evictions_total{{model="a",reason="{reason}"}}'] == 1.0
        await world.stop()


@virtual
async def test_the_metrics_of_one_model_include_those_of_llama_server() -> None:
    world, metrics = made("a", "aa", 'q"\\x')
    await world.ask("a")
    pulse = Pulse(steps=9, running=1, waiting=2, measured={"cpu": GIB}, drafted=6, accepted=4)
    world.launcher.say("a", dataclasses.replace(pulse, drafts=3, accepted_at=[3, 1], batched=18, longest=15))
    for _ in range(2):
        world.launcher.say("a", RequestEnded(id="r", prefill_seconds=0.5, decode_seconds=1.5))
    world.launcher.say("a", RequestEnded(id="r", prompt_tokens=8, cached_tokens=3, completion_tokens=7))
    found = samples(metrics, "a")
    assert {name for name in found if "model=" in name and 'model="a"' not in name} == set()
    expected = {
        "prompt_tokens_total": 5, "prompt_tokens_cached_total": 3, "tokens_predicted_total": 7,
        "prompt_seconds_total": 1, "tokens_predicted_seconds_total": 3, "n_decode_total": 9, "requests_processing": 1,
        "requests_deferred": 2,
        "spec_decode_num_draft_tokens_total": 6, "spec_decode_num_accepted_tokens_total": 4,
        "spec_decode_num_drafts_total": 3, 'spec_decode_num_accepted_tokens_per_pos_total{position="1"}': 1,
        "n_busy_slots_per_decode": 2, "n_tokens_max_total": 15,  # a counter, which this parser names so
    }  # fmt: skip
    assert {name: found[f"llamacpp:{name}"] for name in expected} == expected
    lines = metrics.render("a").decode().splitlines()
    kinds = [line.split()[2] for line in lines if line.startswith("# TYPE llamacpp:")]
    assert [line.split()[2] for line in lines if line.startswith("# HELP llamacpp:")] == kinds
    idle = samples(metrics, "aa")
    assert idle["llamacpp:prompt_tokens_total"] == 0.0
    assert idle["llamacpp:n_busy_slots_per_decode"] == 0.0
    strange = samples(metrics, 'q"\\x')
    assert any(name.startswith("router_model_state") for name in strange)


PULSE = Pulse(
    steps=9, running=1, waiting=2, measured={"cpu": GIB}, parallel=4, prefill_rate=120.5, decode_rate=33.0,
    cache_used=300, cache_reusable=50, cache_total=1200,
)  # fmt: skip


@virtual
async def test_drafted_and_accepted_tokens_are_counted_for_models_that_draft() -> None:
    world, metrics = made("a", "b")
    model = world.fleet.models["a"]
    model.preset = dataclasses.replace(model.preset, spec_type="ngram-simple")
    for name in ("a", "b"):
        await world.ask(name)
        world.launcher.say(name, dataclasses.replace(PULSE, drafted=40, accepted=25))
    found = samples(metrics)
    assert {name: value for name, value in found.items() if name.startswith("worker_draft")} == {
        'worker_draft_tokens_total{kind="drafted",model="a"}': 40.0,
        'worker_draft_tokens_total{kind="accepted",model="a"}': 25.0,
    }


@virtual
async def test_the_figures_of_a_pulse_are_shown_while_the_worker_is_ready() -> None:
    world, metrics = made("a", "b")
    await world.ask("a")
    assert not any(name.startswith("worker_") for name in samples(metrics)), "there is no figure before the first pulse"
    world.launcher.say("a", PULSE)
    found = samples(metrics)
    assert {name: value for name, value in found.items() if name.startswith("worker_")} == {
        'worker_steps_total{model="a"}': 9.0,
        'worker_sequences{model="a",state="running"}': 1.0,
        'worker_sequences{model="a",state="waiting"}': 2.0,
        'worker_sequences{model="a",state="places"}': 4.0,
        'worker_tokens_per_second{kind="prefill",model="a"}': 120.5,
        'worker_tokens_per_second{kind="decode",model="a"}': 33.0,
        'worker_cache_tokens{kind="used",model="a"}': 300.0,
        'worker_cache_tokens{kind="reusable",model="a"}': 50.0,
        'worker_cache_tokens{kind="total",model="a"}': 1200.0,
    }
    alone = samples(metrics, "a")
    assert alone["llamacpp:prompt_tokens_seconds"] == 120.5
    assert alone["llamacpp:predicted_tokens_seconds"] == 33.0
    assert alone["llamacpp:kv_cache_tokens"] == 300.0
    assert alone["llamacpp:kv_cache_usage_ratio"] == 0.25
    await world.stop()
    assert not any(name.startswith("worker_") for name in samples(metrics))


@virtual
async def test_a_load_is_timed_by_stage_and_its_progress_is_shown() -> None:
    model = FakeModel(shards=(GIB,), download_seconds=40.0)
    world, metrics = made("a", models={"a": model}, missing=("a",))
    world.launcher.hold("start a")
    asked = await world.asking("a", wait=50)
    (worker,) = world.fleet.models["a"].workers
    listen = world.launcher._listeners[str(worker)]
    for stage, done in (("start", 0), ("weights", 0), ("weights", GIB // 4)):
        listen(Progress(stage=stage, done=done, total=GIB if stage == "weights" else 0))
        await asyncio.sleep(5)
    assert samples(metrics)['router_load_progress_ratio{model="a",stage="weights"}'] == 0.25
    shown = status(world.fleet, world.fleet.models["a"])["progress"]
    assert (shown["value"], shown["stage"], shown["unit"]) == (0.225, "weights", "bytes"), "of the whole load"
    assert (shown["done"], shown["total"]) == (GIB // 4, GIB)
    assert shown["rate"] == pytest.approx(GIB / 4 / 5)
    assert shown["eta"] == pytest.approx(15.0)
    listen(Progress(stage="warmup", done=64, total=512))
    await asyncio.sleep(2)
    world.launcher.release("start a")
    await asked
    found = samples(metrics)
    assert not any(name.startswith("router_load_progress") for name in found), "the load is over"
    seconds = {
        stage: found[f'router_load_seconds_sum{{model="a",stage="{stage}"}}']
        for stage in ("download", "wait", "start", "weights", "warmup", "total")
    }
    assert seconds["download"] == pytest.approx(40.0, abs=0.5)
    assert seconds["weights"] == pytest.approx(10.0, abs=0.1)
    assert seconds["warmup"] >= 2.0
    in_start = seconds["start"] + seconds["weights"] + seconds["warmup"]
    assert in_start == pytest.approx(seconds["total"], abs=0.01), "no second of a start is unaccounted for"
    assert found['router_download_bytes_total{model="a"}'] == GIB
    ready = next(event for event in world.events.since(0) or () if event.data.get("state") == "ready")
    assert "stages=download:40.0s,wait:0.0s,start:" in state_line(ready)


@virtual
async def test_a_start_is_timed_by_stage_and_up_to_its_first_token() -> None:
    world, metrics = made("a")
    spent = {"fork": 0.01, "read": 0.5, "of its own": 9.0}
    world.events.append("state", "a", worker=7, state="ready", load_seconds=0.51, spent=spent)
    counts = {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 1}
    for worker, ttft in ((6, 3.0), (7, 0.0), (7, 0.25), (7, 8.0)):  # another worker, no token, the first token
        world.events.notify("request", "a", worker=worker, id="r", ttft=ttft, **counts)
    found = samples(metrics)
    seconds = {
        stage: found.get(f'router_start_seconds_sum{{model="a",stage="{stage}"}}') for stage in (*spent, "first_token")
    }
    assert seconds == {"fork": 0.01, "read": 0.5, "of its own": None, "first_token": 0.25}


@virtual
async def test_bytes_that_were_on_disk_are_not_counted_as_downloaded() -> None:
    world, metrics = made("a")
    for worker, done in ((1, 600), (1, 1000), (2, 1000), (2, 1000), (3, 0), (3, 10)):
        world.events.append("progress", "a", worker=worker, stage="download", done=done, total=1000)
    assert samples(metrics)['router_download_bytes_total{model="a"}'] == 410.0


async def test_responses_with_one_token_do_not_count_for_the_time_per_token() -> None:
    world, metrics = made("a")
    for seconds in (0.0, 0.02, 0.04):
        request = RequestEnded(id="r", completion_tokens=5, token_seconds=seconds)
        world.events.notify("request", "a", **dataclasses.asdict(request))
    found = samples(metrics)
    assert found['router_token_seconds_count{model="a"}'] == 2.0
    assert found['router_token_seconds_sum{model="a"}'] == pytest.approx(0.06)


@virtual
async def test_a_wait_is_counted_by_its_cause() -> None:
    """The first request starts the download, the second finds it running, the third finds a ready worker."""
    model = FakeModel(shards=(GIB,), download_seconds=20.0, load_seconds=3.0)
    world, metrics = made("a", models={"a": model}, missing=("a",))
    first = await world.asking("a", 30.0, wait=15)
    await asyncio.gather(first, world.ask("a"))
    await world.ask("a")
    found = samples(metrics)
    for cause, seconds in (("download", 25.0), ("start", 6.0)):
        at = f'cause="{cause}",model="a"'
        assert found[f"router_queue_seconds_count{{{at}}}"] == 2.0
        assert found[f"router_queue_seconds_sum{{{at}}}"] == pytest.approx(seconds, abs=0.1)


@pytest.mark.parametrize(("most", "cause"), [(0, "memory"), (1, "slot")])
@virtual
async def test_waits_for_memory_and_for_a_slot_are_counted_separately(most: int, cause: str) -> None:
    size = GIB if most else 5 * GIB
    world, metrics = made("a", "b", size=size, settings=Settings(models_max=most, swap_patience=4.0))
    busy = await world.asking("a", 20.0, wait=10)
    await world.ask("b")
    await busy
    found = samples(metrics)
    assert found[f'router_queue_seconds_sum{{cause="{cause}",model="b"}}'] > 9.0


@virtual
async def test_residency_before_an_eviction_and_settling_of_memory_are_measured() -> None:
    models = {name: FakeModel(shards=(5 * GIB,), load_seconds=2.0) for name in "ab"}
    world, metrics = made("a", "b", size=5 * GIB, models=models)
    world.launcher.reading_lag = 0.7
    await world.ask("a")
    await asyncio.sleep(58)
    await world.ask("b")
    found = samples(metrics)
    assert found["router_eviction_residency_seconds_sum"] == pytest.approx(59.0, abs=1.0)
    assert found['router_memory_settle_seconds_sum{node="local"}'] == pytest.approx(0.7)


@virtual
async def test_a_reading_below_the_margin_is_counted_once() -> None:
    world, metrics = made("a", margin=2 * GIB)
    for used in (5, 7, 7.5, 3):
        world.launcher.set_foreign(CPU, int(used * GIB))
        await asyncio.sleep(1)
        world.fleet.scheduler.plan_soon()
        await asyncio.sleep(1)
    assert samples(metrics)['router_device_margin_breaches_total{device="cpu",node="local"}'] == 2.0


@virtual
async def test_the_lag_of_the_event_loop_is_measured() -> None:
    _, metrics = made("a")
    watching = asyncio.create_task(metrics.watch_the_loop())
    await asyncio.sleep(3.5)
    found = samples(metrics)
    assert found["router_loop_lag_seconds_count"] == 3.0
    assert found["router_loop_lag_seconds_sum"] == pytest.approx(0.0)
    watching.cancel()


async def test_the_event_loop_goes_on_while_a_scrape_is_rendered() -> None:
    _, metrics = made("a")
    has_gone_on = threading.Event()

    class Slow(str):
        def replace(self, *old_and_new: Any) -> str:
            assert has_gone_on.wait(60), "the event loop waits for the text"
            return super().replace(*old_and_new)

    metrics.requests.add(Slow("a"), "chat", "200")
    rendering = asyncio.create_task(metrics.rendered("a"))
    await asyncio.sleep(0)  # it has begun
    has_gone_on.set()
    assert await rendering == metrics.render("a")
