"""Prometheus metrics: counters and histograms fed by the event log, and gauges read from the fleet on each scrape.

Durations are in seconds, sizes in bytes. The label `model` is a configured name or `unknown`. Metrics per worker have
all names that share the worker (`a,b`), so that nothing counts twice.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import partial
from itertools import accumulate
from typing import ClassVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from router.api.status import value_of
from router.events import Event, EventLog
from router.fleet.fleet import Fleet
from router.fleet.lifecycle import FETCHED
from router.fleet.worker import State, estimated
from router.planner.ledger import LOCAL, WORKER_SLOTS, DeviceId
from router.registry.worker_groups import ID_SEPARATOR
from worker.protocol.events import Pulse

WAITS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
RESIDENCIES = (1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0, 86400.0)
MOMENTS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0)
LAG_INTERVAL = 1.0  # seconds between two measurements of the event loop's lag
STATES = ("unloaded", "sleeping", "downloading", "loading", "loaded")
NO_PULSE = Pulse(steps=0, running=0, waiting=0, measured={})
# Parts of a worker's start, as the worker reports them.
SPENT = {
    "fork", "exec", "imports", "config", "tokenizer", "early_start", "read", "copy", "build", "kernel", "warmup",
    "graphs", "handles", "server",
}  # fmt: skip
STAGES = {"download", "wait", "start", "weights", "warmup"}
TOKEN_KINDS = {"prompt": "prompt_tokens", "cached": "cached_tokens", "completion": "completion_tokens"}
STEP_STAGES = {"prefill": "prefill_seconds", "decode": "decode_seconds"}
TOKEN_WAITS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
# Reasons for which a load may end without having failed.
INTENDED = frozenset(
    {"", "abandoned", "config_changed", "draining", "evicted", "idle", "no_room", "requested", "shutdown"}
)


class Metrics:
    """All metrics of one router."""

    content_type: ClassVar[str] = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, fleet: Fleet, events: EventLog):
        self._fleet = fleet
        self._registry = registry = CollectorRegistry()
        self._fresh: dict[str, int] = {}  # workers without a first token yet, by model
        self._fetched: dict[str, tuple[int, int]] = {}  # by model: the worker that downloads, and its bytes so far
        self._removed: set[str] = set()  # models whose series are still there
        # fmt: off
        # With a model, or of every request
        self.requests = RequestCounter("router_requests", "Finished requests.", ("model", "endpoint", "code"))
        self.ttft = RequestHistogram("router_ttft_seconds", "From arrival to the first byte of the response.",
            ("model",), WAITS)
        self.overhead = RequestHistogram("router_overhead_seconds",
            "From a request's last byte until it is sent to the worker, without waits for the worker.", (), MOMENTS)
        self._token_seconds = RequestHistogram("router_token_seconds",
            "Mean time per output token of a response, without the first.", ("model",), TOKEN_WAITS)
        self._token_count = RequestCounter("router_tokens", "Tokens by kind.", ("model", "kind"))
        self._step_seconds = RequestCounter("router_step_seconds",
            "Seconds that requests spent in steps of the engine, by stage.", ("model", "stage"))
        self._loads = RequestCounter("router_loads", "Loads by outcome.", ("model", "result"))
        self._load_seconds = RequestHistogram("router_load_seconds",
            "Loads by stage; total: from the start of a worker to ready.", ("model", "stage"), WAITS)
        self._start_seconds = RequestHistogram("router_start_seconds",
            "Duration of a start by stage; first_token: of the first request, from its arrival at the worker.",
            ("model", "stage"), (0.001, 0.003, *WAITS))
        self._downloaded = RequestCounter("router_download_bytes", "Downloaded bytes.", ("model",))
        self._evictions = RequestCounter("router_evictions", "Workers evicted by the planner.", ("model", "reason"))
        self._queued = RequestHistogram("router_queue_seconds",
            "Waits of requests by cause; requests that found a ready worker are not counted.", ("model", "cause"),
            WAITS)
        self._exits = RequestCounter("router_worker_exits", "Workers that exited.", ("model", "reason"))
        self._of_models = (self.requests, self.ttft, self.overhead, self._token_seconds, self._token_count,
            self._step_seconds, self._loads, self._load_seconds, self._start_seconds, self._downloaded,
            self._evictions, self._queued, self._exits)
        # Of rarer events
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self.rejections = counter("router_rejections", "Rejected requests.", ["reason"])
        self.disconnects = counter("router_client_disconnects", "Clients that disconnected early.", ["phase"])
        self._residency = histogram("router_eviction_residency_seconds",
            "From ready to the eviction; short ones indicate thrashing.", buckets=RESIDENCIES)
        self._settling = histogram("router_memory_settle_seconds",
            "From the end of a worker until its memory is free.", ["node"], buckets=WAITS)
        self._loop_lag = histogram("router_loop_lag_seconds", "Lateness of a timer of the event loop.", buckets=MOMENTS)
        self._reloads = counter("router_reloads", "Reloads of the presets.", ["result"])
        # fmt: on
        self._gauges = _Gauges(fleet)
        for collector in self._of_models:
            registry.register(collector)
        events.subscribe(self._on_event)

    async def watch_the_loop(self) -> None:
        """Measure the lag of the event loop, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            self._loop_lag.observe(max(0.0, loop.time() - due))

    def _on_event(self, event: Event) -> None:
        data = event.data
        match event.kind:
            case "request":
                if data.get("ttft") and self._fresh.get(event.model) == data["worker"]:
                    del self._fresh[event.model]
                    self._start_seconds.observe(data["ttft"], event.model, "first_token")
                for kind, field in TOKEN_KINDS.items():
                    if count := data[field]:
                        self._token_count.add(event.model, kind, by=count)
                for stage, field in STEP_STAGES.items():
                    if seconds := data.get(field):
                        self._step_seconds.add(event.model, stage, by=seconds)
                if data.get("token_seconds"):
                    self._token_seconds.observe(data["token_seconds"], event.model)
            case "progress" if data["stage"] == "download":
                self._count_download(event.model, data["worker"], data["done"])
            case "config" | "config_refused":
                self._reloads.labels("applied" if event.kind == "config" else "refused").inc()
            case "plan" if data["decision"] == "evict":
                cause = "count" if data["short_of"] == ["slots"] else "memory"
                if data.get("resident_seconds") is not None and data["reason"] == "evicted":
                    self._residency.observe(data["resident_seconds"])
                self._evictions.add(event.model, cause if data["reason"] == "evicted" else data["reason"])
            case "state" if data["state"] == "ready" and "load_seconds" in data:
                self._loads.add(event.model, "ready")
                self._load_seconds.observe(data["load_seconds"], event.model, "total")
                self._fresh[event.model] = data["worker"]
                for stages, name, histogram in (
                    (SPENT, "spent", self._start_seconds),
                    (STAGES, "stages", self._load_seconds),
                ):
                    for stage in stages & data.get(name, {}).keys():
                        histogram.observe(data[name][stage], event.model, stage)
            case "waited":
                for cause, seconds in data["seconds"].items():
                    self._queued.observe(seconds, event.model, cause)
            case "removed":
                if not self._removed:  # a reload removes many, and one search for their series is enough
                    asyncio.get_running_loop().call_soon(self._forget_removed)
                self._removed.add(event.model)
            case "state" if data["state"] == "stopped":
                if "settle_seconds" in data:
                    self._settling.labels(LOCAL).observe(data["settle_seconds"])
                self._exits.add(event.model, data["reason"] or "stopped")
                if data.get("was") in ("starting", "queued", "downloading") and data["reason"] != FETCHED:
                    self._loads.add(event.model, _result(data["reason"]))

    def _forget_removed(self) -> None:
        """Drop the series of models that are gone, so that their number does not grow with each model ever listed."""
        gone = _names(self._removed) - _names(self._fleet.models)
        self._removed.clear()
        if not gone:
            return
        for name in gone:
            self._fresh.pop(name, None)
            self._fetched.pop(name, None)
        for series in self._of_models:
            series.forget(gone)

    def _count_download(self, model: str, worker: int, done: int) -> None:
        """Count downloaded bytes. A download's first report counts nothing, as it includes what was on disk before."""
        before = self._fetched.get(model)
        if before is not None and before[0] == worker:
            self._downloaded.add(model, by=max(0, done - before[1]))
        self._fetched[model] = worker, done

    async def rendered(self, model: str | None = None, member: str = "") -> bytes:
        """`render`, without delaying streams: the series of a hundred models that have been loaded take a quarter of a
        second. Only the fleet is read in the event loop; the text is made in a thread."""
        self._forget_removed()
        gauges = _Collected(self._gauges.collect())
        return await asyncio.to_thread(self._text, gauges, model, member) + self._of_worker(model, member)

    def render(self, model: str | None = None, member: str = "") -> bytes:
        """The text of all metrics.

        With `model`: only its own and those of the fleet's `member` that serves it (default: itself), plus the
        unlabelled metrics of llama-server, which are about the worker.
        """
        self._forget_removed()
        return self._text(self._gauges, model, member) + self._of_worker(model, member)

    def _text(self, gauges: Collector, model: str | None, member: str) -> bytes:
        text = generate_latest(self._registry) + generate_latest(gauges)
        if model is None:
            return text
        labels = [f'model="{_escape(id)}"' for id in {model, member or model}]
        lines = [
            line
            for line in text.decode().splitlines()
            if line.startswith("#") or any(label in line for label in labels)
        ]
        return "\n".join([*lines, ""]).encode()

    def _of_worker(self, model: str | None, member: str) -> bytes:
        return b"" if model is None else self.llama_server(member or model)

    def llama_server(self, model: str) -> bytes:
        """The text of llama-server's metrics about one model."""
        worker = self._fleet.models[model].open if model in self._fleet.models else None
        pulse = worker.pulse if worker is not None and worker.pulse is not None else NO_PULSE
        tokens, seconds = self._token_count.count, self._step_seconds.count
        rows: Mapping[str, tuple[float, str]] = {
            "prompt_tokens_total": (
                tokens(model, "prompt") - tokens(model, "cached"), "Prompt tokens computed."
            ),
            "prompt_tokens_cached_total": (tokens(model, "cached"), "Prompt tokens found in the cache."),
            "prompt_seconds_total": (seconds(model, "prefill"), "Seconds of prefill, summed over prompts."),
            "tokens_predicted_total": (tokens(model, "completion"), "Tokens generated."),
            "tokens_predicted_seconds_total": (
                seconds(model, "decode"), "Seconds after the first token, summed over answers."
            ),
            "n_decode_total": (pulse.steps, "Steps of the model."),
            "n_busy_slots_per_decode": (
                pulse.batched / pulse.steps if pulse.steps else 0, "Average number of sequences in a step."
            ),
            "n_tokens_max": (pulse.longest, "Most tokens of one sequence in the KV cache so far."),
            "spec_decode_num_drafts_total": (pulse.drafts, "Drafts of speculative decoding."),
            "spec_decode_num_draft_tokens_total": (pulse.drafted, "Tokens drafted by speculative decoding."),
            "spec_decode_num_accepted_tokens_total": (pulse.accepted, "Drafted tokens that were accepted."),
            "requests_processing": (pulse.running, "Running sequences."),
            "requests_deferred": (pulse.waiting, "Waiting sequences."),
            "prompt_tokens_seconds": (pulse.prefill_rate, "Prompt tokens computed per second."),
            "predicted_tokens_seconds": (pulse.decode_rate, "Tokens generated per second."),
            "kv_cache_tokens": (pulse.cache_used, "Tokens in the KV cache of running sequences."),
            "kv_cache_usage_ratio": (
                pulse.cache_used / pulse.cache_total if pulse.cache_total else 0, "Used part of the KV cache."
            ),
        }  # fmt: skip
        lines = [
            f"# HELP llamacpp:{name} {about}\n# TYPE llamacpp:{name} {_kind(name)}\nllamacpp:{name} {float(value)}\n"
            for name, (value, about) in rows.items()
        ]
        if pulse.accepted_at:
            name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
            lines.append(f"# HELP {name} Accepted tokens by position in their draft.\n# TYPE {name} counter\n")
            lines += [f'{name}{{position="{at}"}} {float(count)}\n' for at, count in enumerate(pulse.accepted_at)]
        return "".join(lines).encode()


def _kind(name: str) -> str:
    return "counter" if name.endswith("_total") or name == "n_tokens_max" else "gauge"  # as in llama-server


class RequestCounter(Collector):
    """A counter for events of every request, and for models, whose series are dropped together. An addition costs a
    third of that of the library's counter."""

    def __init__(self, name: str, about: str, labels: tuple[str, ...]):
        self._name, self._about, self._labels = name, about, labels
        self._counts: dict[tuple[str, ...], float] = {}

    def add(self, *labels: str, by: float = 1.0) -> None:
        self._counts[labels] = self._counts.get(labels, 0.0) + by

    def count(self, *labels: str) -> float:
        return self._counts.get(labels, 0.0)

    def forget(self, models: Set[str]) -> None:
        """Drop the series whose first label is one of `models`."""
        self._counts = {labels: count for labels, count in self._counts.items() if labels[0] not in models}

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._about, labels=self._labels)
        for labels, count in self._counts.copy().items():  # a copy, as this runs in a thread
            family.add_metric(labels, count)
        yield family


class RequestHistogram(Collector):
    """A histogram for the same events. `bounds`: upper ends of its buckets, ascending."""

    def __init__(self, name: str, about: str, labels: tuple[str, ...], bounds: tuple[float, ...]):
        self._name, self._about, self._labels, self._bounds = name, about, labels, bounds
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        if not labels:
            self._counts[()], self._sums[()] = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, *labels: str) -> None:
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * (len(self._bounds) + 1)
            self._sums[labels] = 0.0
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def forget(self, models: Set[str]) -> None:
        """Drop the series whose first label is one of `models`."""
        for labels in [labels for labels in self._counts if not models.isdisjoint(labels[:1])]:
            del self._counts[labels], self._sums[labels]

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._about, labels=self._labels)
        ends = [*map(str, self._bounds), "+Inf"]
        series, sums = self._counts.copy(), self._sums.copy()  # copies, as this runs in a thread
        for labels, counts in series.items():
            family.add_metric(labels, list(zip(ends, accumulate(counts), strict=True)), sums.get(labels, 0.0))
        yield family


class _Collected(Collector):
    """Metrics that were collected before."""

    def __init__(self, found: Iterable[Metric]):
        self._found = list(found)

    def collect(self) -> Iterable[Metric]:
        return self._found


class _Gauges(Collector):
    """Gauges of the fleet's present state."""

    def __init__(self, fleet: Fleet):
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        yield from self._devices()
        yield from self._models()
        yield from self._workers()

    def _devices(self) -> Iterator[Metric]:
        labels = ["node", "device"]
        total = GaugeMetricFamily("router_device_total_bytes", "Capacity.", labels=labels)
        margin = GaugeMetricFamily("router_device_margin_bytes", "Kept free.", labels=labels)
        reserved = GaugeMetricFamily("router_device_reserved_bytes", "Reserved for workers.", labels=labels)
        memory = GaugeMetricFamily("router_device_memory_bytes", "By segment.", labels=[*labels, "segment"])
        breaches = CounterMetricFamily("router_device_margin_breaches", "Readings below the margin.", labels=labels)
        for device in self._fleet.scheduler.devices:
            if device.id.index == WORKER_SLOTS:
                continue
            at = [device.id.node, str(device.id)]
            total.add_metric(at, device.total)
            margin.add_metric(at, device.margin)
            reserved.add_metric(at, self._fleet.scheduler.reserved(device.id))
            breaches.add_metric(at, self._fleet.scheduler.breaches[device.id])
            sizes = {"foreign": device.foreign, "free": max(0, device.total - device.used)}
            for segment, size in (sizes | self._segments(device.id)).items():
                memory.add_metric([*at, segment], size)
        yield from (total, margin, reserved, memory, breaches)

    def _segments(self, id: DeviceId) -> dict[str, int]:
        """Estimated bytes of all shards on one device, by purpose."""
        total = dict.fromkeys(("weights", "context", "compute", "runtime"), 0)
        for worker in self._fleet.workers():
            if worker.costs is None or not worker.state.holds_memory:
                continue
            for shard, at in enumerate(worker.place):
                for segment in total if at == id else ():
                    total[segment] += getattr(worker.costs.estimate, segment)[shard]
        return total

    def _models(self) -> Iterator[Metric]:
        state = GaugeMetricFamily("router_model_state", "1 for the current state.", labels=["model", "state"])
        memory = GaugeMetricFamily(
            "router_model_memory_bytes", "By device.", labels=["model", "node", "device", "kind"]
        )
        ratio = GaugeMetricFamily("router_estimate_ratio", "Measured over estimated.", labels=["model"])
        running = GaugeMetricFamily("router_requests_in_flight", "Leases of ready workers.", labels=["model"])
        waiting = GaugeMetricFamily("router_queue_depth", "Leases of workers not ready.", labels=["model"])
        ready = GaugeMetricFamily("router_model_workers", "Workers that are ready.", labels=["model"])
        for id, model in self._fleet.models.items():
            shown, current = model.shown, value_of(model)
            for name in STATES:
                state.add_metric([id, name], float(name == current))
            running.add_metric([id], sum(len(w.leases) for w in model.workers if w.state >= State.READY))
            waiting.add_metric([id], sum(len(w.leases) for w in model.workers if w.state < State.READY))
            ready.add_metric([id], sum(w.state is State.READY for w in model.workers))
            if shown is None:
                continue
            planned = estimated(shown)
            for device, size in planned.items():
                memory.add_metric([id, device.node, str(device), "estimated"], size)
            for device, size in shown.measured.items():
                memory.add_metric([id, device.node, str(device), "measured"], size)
            if shown.measured and sum(planned.values()):
                ratio.add_metric([id], sum(shown.measured.values()) / sum(planned.values()))
        yield from (state, memory, ratio, running, waiting, ready)

    def _workers(self) -> Iterator[Metric]:
        """The engines' last pulses, summed over the replicas of a model, and the progress of loads."""
        steps = CounterMetricFamily("worker_steps", "Steps of the engine since its start.", labels=["model"])
        sequences = GaugeMetricFamily(
            "worker_sequences", "Running, waiting, and the most that may run.", labels=["model", "state"]
        )
        rates = GaugeMetricFamily(
            "worker_tokens_per_second", "In the last second, of prompts and of output.", labels=["model", "kind"]
        )
        cache = GaugeMetricFamily(
            "worker_cache_tokens", "Tokens of the KV cache: used, reusable, total.", labels=["model", "kind"]
        )
        drafts = CounterMetricFamily(
            "worker_draft_tokens",
            "Tokens of speculative decoding: drafted, and of these accepted. Since the start of the worker.",
            labels=["model", "kind"],
        )
        progress = GaugeMetricFamily(
            "router_load_progress_ratio", "Progress of the current stage of a load.", labels=["model", "stage"]
        )
        for id, model in self._fleet.models.items():
            for worker in model.workers:
                if worker.load.latest is not None and worker.state < State.READY and worker.load.latest.stage in STAGES:
                    progress.add_metric([id, worker.load.latest.stage], worker.load.share)
            pulses = [worker.pulse for worker in model.workers if worker.state == State.READY and worker.pulse]
            if not pulses:
                continue
            steps.add_metric([id], sum(pulse.steps for pulse in pulses))
            if model.preset.speculates:
                drafts.add_metric([id, "drafted"], sum(pulse.drafted for pulse in pulses))
                drafts.add_metric([id, "accepted"], sum(pulse.accepted for pulse in pulses))
            for family, kind, figure in (
                (sequences, "running", "running"),
                (sequences, "waiting", "waiting"),
                (sequences, "places", "parallel"),
                (rates, "prefill", "prefill_rate"),
                (rates, "decode", "decode_rate"),
                (cache, "used", "cache_used"),
                (cache, "reusable", "cache_reusable"),
                (cache, "total", "cache_total"),
            ):
                family.add_metric([id, kind], sum(getattr(pulse, figure) for pulse in pulses))
        yield from (steps, sequences, rates, cache, drafts, progress)


def _result(reason: str) -> str:
    """The outcome of a load that did not become ready."""
    if reason == "oom":
        return "oom"
    return "cancelled" if reason in INTENDED else "failed"


def _names(ids: Iterable[str]) -> set[str]:
    """Ids of models and all names in them."""
    return {name for id in ids for name in (id, *id.split(ID_SEPARATOR))}


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"")
