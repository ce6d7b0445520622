"""The parts of scripts/gpu_check. Each runs in a process of its own and records what it finds as soon as it has it.

Every part runs on an accelerator at full scale, and on the CPU at a small one, where figures of memory and speed mean
nothing but the program is the same.
"""

import argparse
import asyncio
import gc
import json
import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Facts = dict[str, Any]
MIB = 1 << 20
TOKEN = "gpu-check"  # of all workers started here
CHUNK = 2048  # prefill-chunk that the router gives a worker on an accelerator by default
SETTLE = 10.0  # seconds within which the driver must have a dead process's memory back


class Defect(Exception):
    """The finding of a part, in one sentence."""


@dataclass(frozen=True)
class PartRun:
    """The place of a part and of its results."""

    device: str
    models: Path  # folder of the models and files that parts share; they are kept
    out: Path  # without suffix; traces get names that begin with it
    record: Callable[[str, Facts], None]  # append the facts of one step of the part
    # By step, of an earlier run of the part that was not finished.
    known: Mapping[str, Facts] = field(default_factory=dict)

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"


# Readings


def used(setting: PartRun, pid: int, index: int = 0) -> int:
    """Bytes used on device `index` by the driver; on the CPU those of process `pid`."""
    if setting.on_cpu:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")
    return int(_reading(index)[0].used)


@cache
def _devices() -> Any:
    """NVML, open as long as the part runs, as in a router. While no process has a card open, the driver may shut it
    down, and each reading would start it again."""
    from router.launch.devices import Devices

    return Devices(os.environ)


def _reading(index: int = 0) -> tuple[Any, str]:
    devices = _devices()
    for reading in devices.read():
        if reading.id.index == index:
            return reading, "; ".join(devices.notes)
    raise Defect(f"NVML shows no accelerator: {'; '.join(devices.notes) or 'no reason given'}")


@cache
def _mem_info() -> tuple[int, int]:
    """Free and total bytes by torch, read in a process of its own: this process stays without a context."""
    free, total = map(int, _output("import torch; print(*torch.cuda.mem_get_info(0))").split())
    return free, total


def _output(program: str) -> str:
    """Run a Python program in a process of its own and return its output."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def _settled(setting: PartRun, before: int, begin: float) -> float:
    """Seconds from `begin` until the driver has the `before` value again; 0 on the CPU, where the process has ended.
    Raises Defect after SETTLE."""
    while not setting.on_cpu and used(setting, 0) > before + 16 * MIB:
        if time.monotonic() - begin > SETTLE:
            left = (used(setting, 0) - before) >> 20
            raise Defect(f"{left} MiB of a killed process are not back after {SETTLE:.0f} s")
        time.sleep(0.02)
    return 0.0 if setting.on_cpu else time.monotonic() - begin


# Device and context

NVML = """
import time, pynvml

def seconds(work):
    begin = time.monotonic()
    work()
    return time.monotonic() - begin

opened = seconds(pynvml.nvmlInit)
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
used = min(seconds(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle)) for _ in range(5))
listed = min(seconds(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) for _ in range(5))
print(opened, used, listed)
"""


def nvml_seconds() -> list[float]:
    """Seconds to open NVML in a process of its own, and of the two queries that a worker makes."""
    return list(map(float, _output(NVML).split()))


CONTEXT = """
import sys, torch
device = sys.argv[1]
x = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
(x @ x).sum().item()
if device == "cpu":
    print(0, 0, flush=True)
else:
    print(torch.cuda.memory_reserved(0), torch.cuda.memory_allocated(0) - x.nbytes, flush=True)
sys.stdin.read()
"""


def device(setting: PartRun) -> Facts:
    """NVML against torch; memory of a process on the device before it computes; all of it is back after its exit."""
    from router.memory.estimate import RUNTIME_HOST
    from worker.protocol.memory import CUBLAS_WORKSPACE_BYTES, DEVICE_PROCESS_BYTES

    facts: Facts = {}
    if not setting.on_cpu:
        facts["nvml_seconds"] = nvml_seconds()  # before this process opens it, so that nothing holds the card
        reading, notes = _reading()
        free, total = _mem_info()
        facts |= {"total": reading.total, "used": reading.used, "torch_total": total, "torch_used": total - free}
        setting.record("readings", facts)
        if abs(reading.total - total) > 0.05 * total:
            raise Defect(f"NVML reports {reading.total >> 20} MiB in all, torch {total >> 20}: another device? {notes}")
        if abs(reading.used - (total - free)) > 2048 * MIB:
            raise Defect(f"NVML reports {reading.used >> 20} MiB used, torch {(total - free) >> 20}")
    before = 0 if setting.on_cpu else used(setting, 0)
    process = subprocess.Popen([sys.executable, "-c", CONTEXT, setting.device], stdin=-1, stdout=-1, text=True)
    try:
        assert process.stdout is not None
        reserved, workspace = map(int, process.stdout.readline().split())
        during = used(setting, process.pid)
        if not setting.on_cpu:
            facts["nvml_seconds_beside"] = nvml_seconds()
    finally:
        process.kill()
        process.communicate()
        begin = time.monotonic()
    context, assumed = during - before - reserved, RUNTIME_HOST if setting.on_cpu else DEVICE_PROCESS_BYTES
    facts |= {
        "context": context, "assumed": assumed, "back_after": _settled(setting, before, begin),
        "workspace": workspace, "assumed_workspaces": CUBLAS_WORKSPACE_BYTES,  # of three users
    }  # fmt: skip
    if context > assumed and not setting.on_cpu:  # there it depends on the build of torch
        raise Defect(
            f"a process takes {context >> 20} MiB here, more than the {assumed >> 20} MiB that estimates assume until a"
            " worker has measured it: raise DEVICE_PROCESS_BYTES in worker/protocol/memory.py"
        )
    return facts


# Tests


def smoke(setting: PartRun) -> Facts:
    """The tests marked `gpu`: equality with generate and with the CPU, graphs against dynamic steps, constant memory,
    no waits."""
    # Packages beside torch may warn where the test environment's do not.
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", "-W", "default"]
    command += ["--timeout=100", "-n", "0" if setting.on_cpu else "6"]
    command += ["tests/gpu", "tests/worker/engines/attention/test_paged_kernel.py"]
    if setting.on_cpu:
        command += ["-k", "test_greedy_text_equals_generate_on_the_device and llama and True"]
    environment = os.environ | {"GPU_TESTS_DEVICE": setting.device}
    passed, failures, last = 0, list[str](), ""
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            print(line, end="", file=sys.stderr, flush=True)  # to the log: tracebacks are needed later
            last = line.strip() or last
            if (ended := _test_outcome(line)) is not None:
                name, outcome = ended
                passed += outcome == "PASSED"
                failures += [name] * (outcome != "PASSED")
                setting.record("tests", {"passed": passed, "failed": failures})
    if tests.returncode or not passed:
        raise Defect(f"{last}; {'; '.join(failures)[:1500]}")
    return {"passed": passed}


def _test_outcome(line: str) -> tuple[str, str] | None:
    """Name and outcome of a test, from a line of `pytest -v`, with or without processes of pytest-xdist."""
    outcomes = r"(PASSED|FAILED|ERROR)"
    if (found := re.match(rf"\S+?::(.+?) {outcomes}", line)) is not None:
        return found[1], found[2]
    found = re.match(rf"\[gw\d+\] \[ *\d+%\] {outcomes} \S+?::(.+?)\s*$", line)
    return (found[2], found[1]) if found is not None else None


# Models


@cache
def bench() -> Any:
    """The module of scripts/bench_engine: shapes, contestants, bandwidth."""
    loader = SourceFileLoader("bench_engine", str(ROOT / "scripts" / "bench_engine"))
    spec = spec_from_loader("bench_engine", loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules["bench_engine"] = module  # dataclasses look their module up
    loader.exec_module(module)
    module.begin_process(argparse.Namespace(threads=1))
    return module


def shape_name(setting: PartRun) -> str:
    """The largest shape whose weights, with a KV cache beside them, fit on the device."""
    if setting.on_cpu:
        return "tiny"
    _, total = _mem_info()
    return "8b" if total > 36 << 30 else "1b" if total > 12 << 30 else "110m"


def kept(setting: PartRun, name: str, make: Callable[[Path], object]) -> Path:
    """The file or folder `name` among the shared models, which `make` creates once. It is whole or absent."""
    path = setting.models / name
    if not path.exists():
        setting.models.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.unlink(missing_ok=True)
        try:
            make(unfinished)
        except BaseException:  # a full disk, above all, would fail other parts, too
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.unlink(missing_ok=True)
            raise
        unfinished.rename(path)
    return path


def shaped(setting: PartRun) -> Path:
    """A snapshot of that shape with random weights."""
    name = shape_name(setting)
    shape = bench().SHAPES[name]
    return kept(
        setting, f"llama-{name}", lambda path: bench().make_snapshot(shape, path, setting.device, positions=65536)
    )


@cache
def bandwidth(device: str) -> float:
    rate: float = bench().bandwidth(device, 1, 64 * MIB if device == "cpu" else 4 << 30)
    return rate


# Decoding


def decode(setting: PartRun) -> Facts:
    """Tokens per second of the engine, and its steps as a share of what reading weights and cache would take."""
    tool, shape = bench(), bench().SHAPES[shape_name(setting)]
    levels = (1, 4) if setting.on_cpu else (1, 64)
    snapshot, rate = shaped(setting), bandwidth(setting.device)
    asked = argparse.Namespace(device=setting.device, threads=1)
    begin = time.monotonic()
    ours = tool.Ours(
        snapshot, asked, name="ours", parallel=levels[-1], ctx_size=-(-shape.longest // 32) * 32,
        prefill_chunk=512 if setting.on_cpu else CHUNK,
    )  # fmt: skip
    facts = {"shape": shape_name(setting), "bandwidth": rate, "load_seconds": time.monotonic() - begin}
    setting.record("loaded", facts)
    import torch

    itemsize = getattr(torch, shape.dtype).itemsize
    try:
        ours.run(tool.requests_of(shape, levels[-1], seed=9))  # the first requests choose kernels
        for level in levels:
            trace = ours.run(tool.requests_of(shape, level, seed=level))
            floor = tool.floor_seconds(shape, level, shape.read * itemsize, itemsize, rate)
            gap = statistics.median(trace.gaps)
            found = {"tokens_per_second": trace.tokens / trace.seconds, "step_ms": 1e3 * gap, "of_floor": floor / gap}
            setting.record(f"{level} at once", found)
            facts |= {f"{level} at once": found}
        if not setting.on_cpu:
            facts["memory"] = {
                "allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(),
                "driver": used(setting, os.getpid()), "host": _peak_host_bytes(),
            }  # fmt: skip
    finally:
        ours.close()
    return facts


def _peak_host_bytes() -> int:
    """Largest main memory of this process, mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Stepper:
    """Decode steps of a model without scheduler and sampler, at any number of rows and context length."""

    def __init__(self, setting: PartRun):
        from tests.worker.loaded import options
        from worker.engines.transformers.attention import paged
        from worker.engines.transformers.load import loader
        from worker.engines.transformers.load.snapshot import load_config
        from worker.engines.transformers.run import backends

        self.setting = setting
        self._options = options(shaped(setting), devices=(setting.device,), threads=1)
        paged.register()
        self._config = load_config(self._options)
        implementation = backends.implementation(self._options, self._config)
        self._loaded = loader.load_model(self._options, self._config, implementation, lambda _: None)
        self.layers: int = self._config.num_hidden_layers
        self.weights = sum(each.nbytes for each in self._loaded.model.parameters())
        # Of the last recording: graphs, their bytes outside torch's allocator and in it, and seconds.
        self.recording: Facts = {}

    @contextmanager
    def steps(self, rows: int, length: int) -> Iterator[tuple[Callable[[], object], Callable[[], object], bool]]:
        """A step of `rows` sequences of `length` tokens as the engine runs it, the same kernel by kernel, and whether
        the first one is a graph. Each returns once it has been computed."""
        import torch

        from worker.engines.transformers.run import backends, warmup
        from worker.engines.transformers.run.runner import PagedRunner
        from worker.engines.transformers.schedule.prefill_budget import PrefillBudget

        asked = replace(self._options, parallel=rows, ctx_size=length)
        runner, capacity = backends.make_runner(
            self._loaded.model, self._config, asked, length, self._loaded.device, caches=False
        )
        batch = tuple(warmup._segment(capacity, row, length - 1, 1) for row in range(rows))
        assert isinstance(runner, PagedRunner)
        held: dict[str, Any] = {"eager": runner, "best": runner}  # emptied at the end: the steps outlive the block
        is_graph = False
        if not self.setting.on_cpu:
            before, begin = _driver_and_allocator(), time.monotonic()
            held["best"] = recorded = warmup.record(
                runner, capacity, PrefillBudget(), ctx_size=length, progress=lambda _: None
            )
            outside, inside = (now - then for now, then in zip(_driver_and_allocator(), before, strict=True))
            self.recording = {
                "graphs": recorded.recorded, "outside": outside, "inside": inside, "seconds": time.monotonic() - begin,
            }  # fmt: skip
            is_graph = recorded.recorded > 0 and recorded.shape_of(batch) is not None
            del recorded
        del runner, capacity

        def step(kind: str) -> None:
            held[kind].run(batch)
            if not self.setting.on_cpu:
                torch.cuda.synchronize()

        try:
            yield partial(step, "best"), partial(step, "eager"), is_graph
        finally:
            held.clear()
            _free(self.setting)


def _free(setting: PartRun) -> None:
    """Free what nothing refers to any more. The first of two collections of an engine frees only some of it."""
    for _ in range(2):
        gc.collect()
    if not setting.on_cpu:
        import torch

        torch.cuda.empty_cache()


def _driver_and_allocator() -> tuple[int, int]:
    """Used bytes of the device outside torch's allocator, and bytes in it."""
    import torch

    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    return total - free - reserved, reserved


def trace(setting: PartRun) -> Facts:
    """The kernels of one decode step at two sizes, counted, and saved as a trace for chrome://tracing."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    stepper = Stepper(setting)
    activities = [ProfilerActivity.CPU] + ([] if setting.on_cpu else [ProfilerActivity.CUDA])
    facts: Facts = {"layers": stepper.layers}
    for rows in (1, 4) if setting.on_cpu else (1, 64):
        with stepper.steps(rows, 32 if setting.on_cpu else 1024) as (step, _, is_graph):
            step()
            with torch.inference_mode(), profile(activities=activities) as found:
                step()
        path = setting.out.with_name(f"{setting.out.name}-step-{rows}.trace.json")
        found.export_chrome_trace(str(path))
        counted = kernels(found.events() or (), on_cpu=setting.on_cpu)
        each = {name: count // stepper.layers for name, count in counted.items() if count >= stepper.layers}
        facts[f"{rows} rows"] = {
            "graph": is_graph, "kernels": sum(counted.values()), "per_layer": sum(each.values()), "file": path.name,
            "most": {name[:60]: count for name, count in Counter(each).most_common(8)}, "recording": stepper.recording,
        }  # fmt: skip
        setting.record(f"{rows} rows", facts[f"{rows} rows"])
        if not counted:
            raise Defect("the profiler shows no kernel of the step; CUPTI may be missing or in use")
    return facts


# Operators that compute nothing.
_NO_KERNELS = frozenset(
    {
        "alias", "as_strided", "detach", "detach_", "empty", "empty_like", "empty_strided", "expand", "lift_fresh",
        "permute", "reshape", "resolve_conj", "resolve_neg", "result_type", "select", "slice", "split", "squeeze", "t",
        "to", "transpose", "unsqueeze", "view", "_reshape_alias", "_unsafe_view",
    }
)  # fmt: skip


def kernels(events: Any, *, on_cpu: bool) -> Counter[str]:
    """The number of kernels by name; on the CPU of operators that call no other operator."""
    from torch._C._autograd import DeviceType

    if on_cpu:
        leaves = (event.name for event in events if event.name.startswith("aten::") and not event.cpu_children)
        return Counter(name for name in leaves if name.removeprefix("aten::") not in _NO_KERNELS)
    return Counter(
        event.name
        for event in events
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    )


def long(setting: PartRun) -> Facts:
    """Steps with long contexts: graph against kernel by kernel, and the share of what reading would take."""
    shape, rate = bench().SHAPES[shape_name(setting)], bandwidth(setting.device)
    import torch

    stepper, facts = Stepper(setting), Facts()
    sizes = [(1, 64), (4, 128)] if setting.on_cpu else [(64, 1024), (64, 1040), (64, 2048), (16, 4096), (1, 32768)]
    for rows, length in sizes:
        cache_bytes = rows * length * shape.cache_bytes(getattr(torch, shape.dtype).itemsize)
        if not setting.on_cpu and stepper.weights + 1.3 * cache_bytes > 0.9 * _mem_info()[1]:
            continue
        name = f"{rows} x {length}"
        if name in setting.known:
            facts[name] = setting.known[name]
            continue
        with stepper.steps(rows, length) as (step, eager, is_graph):
            seconds = {}
            for kind, run in (("step_ms", step), ("eager_ms", eager)):
                run()
                seconds[kind] = 1e3 * statistics.median(_seconds(run) for _ in range(5))
        floor = 1e3 * (stepper.weights + cache_bytes) / rate
        facts[name] = {"graph": is_graph, **seconds, "of_floor": floor / seconds["step_ms"]}
        setting.record(name, facts[name])
    facts["attention"] = attention_calls(stepper, length=128 if setting.on_cpu else 1024, rate=rate)
    setting.record("attention", facts["attention"])
    return facts


def attention_calls(stepper: Stepper, *, length: int, rate: float) -> Facts:
    """The time of one attention call in a step that is no graph, for all rows or for one, and the bytes that are read
    meanwhile; and that of one launch of the Triton kernel. They are what two guesses need: `decode_plan._CALL_BYTES`
    and `paged._MOST_CALLS`."""
    from worker.engines.transformers.attention import decode_plan, paged, paged_kernel

    rows, kind = 4, stepper.setting.device.partition(":")[0]
    before = decode_plan._CALL_BYTES[kind], paged._MOST_CALLS
    seconds = {}
    # Rows of one length attend in one call, unless padding costs too much, and then in calls of their own, unless these
    # are too many.
    ways = {"together": (before[0], rows), "apart": (-1, rows)}
    if not stepper.setting.on_cpu and paged_kernel.is_available():
        ways["kernel"] = -1, 0
    for way, (call_bytes, most) in ways.items():
        decode_plan._CALL_BYTES[kind], paged._MOST_CALLS = call_bytes, most
        try:
            with stepper.steps(rows, length) as (_, eager, _):
                eager()
                seconds[way] = statistics.median(_seconds(eager) for _ in range(9))
        finally:
            decode_plan._CALL_BYTES[kind], paged._MOST_CALLS = before
    call = (seconds["apart"] - seconds["together"]) / (rows - 1) / stepper.layers
    facts: Facts = {"call_us": 1e6 * call, "call_bytes": int(call * rate), "assumed_bytes": before[0]}
    if "kernel" in seconds:
        kernel = call + (seconds["kernel"] - seconds["together"]) / stepper.layers
        facts |= {"kernel_us": 1e6 * kernel, "calls_of_a_kernel": kernel / max(call, 1e-9), "assumed_calls": before[1]}
    return facts


def _seconds(work: Callable[[], object]) -> float:
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


# The promise

FAMILIES: dict[str, Facts] = {
    "llama": {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    "qwen3": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12},
    "qwen3_moe": {"hidden_size": 512, "num_hidden_layers": 8},
    "gemma3_text": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12},
    "gpt2": {"n_embd": 1024, "n_layer": 12},
    "mamba": {"hidden_size": 1024, "num_hidden_layers": 12},
}  # fmt: skip


# Options of workers: on the CPU, and on an accelerator.
_SIZES = {
    True: ("--ctx-size=512", "--parallel=4", "--threads=1"),
    False: ("--ctx-size=4096", "--parallel=16", f"--prefill-chunk={CHUNK}"),
}
# As the router sets it for a model with states, on any device.
_SMALL_CHUNK = "--prefill-chunk=512"


def promise(setting: PartRun) -> Facts:
    """A worker of each family under load stays within its own estimate, by torch and by NVML, and all of its memory is
    back after a kill. Once it is ready, its peak rises by no more than the estimate allows for fragmentation."""
    families = ["llama"] if setting.on_cpu else list(FAMILIES)
    with ExitStack() as stack:
        asked = {
            family: _asked(setting, family) for family in families if "promised" not in setting.known.get(family, {})
        }
        # Imports and estimates would take most of the part's time one after the other. Each worker waits for its grant.
        workers = {family: stack.enter_context(GpuWorker([*asked[family], "--prepare"])) for family in asked}
        pool = stack.enter_context(ThreadPoolExecutor(os.cpu_count()))
        estimates = {family: pool.submit(_estimate, options) for family, options in asked.items()}

        def measure(family: str) -> Facts:
            if family not in asked:
                return setting.known[family]
            worker = workers[family]
            try:
                return _promise(setting, family, worker, estimates[family].result())
            finally:  # also if it has not ended its load: it must not run beside the next
                worker.process.kill()
                worker.process.wait()

        return judge_families(setting, families, measure)


def judge_families(setting: PartRun, families: Sequence[str], measure: Callable[[str], Facts]) -> Facts:
    """Record what `measure` finds of each family. Raises Defect after the last one, if some break or take too much."""
    facts, broken = Facts(), []
    for family in families:
        try:
            found = measure(family)
        except Exception as error:  # noqa: BLE001  whatever it is, the other families are measured, too
            said = f"{type(error).__name__}: {error}"
            broken.append(f"{family}: {said}")
            setting.record(family, {"error": said})
            continue
        facts[family] = found
        setting.record(family, found)
        if max(found["measured"], found["nvml_loaded"]) > found["promised"]:
            broken.append(f"{family}: promised {found['promised'] >> 20} MiB: {found}")
        elif not setting.on_cpu and found["host"] > found["host_promised"]:
            broken.append(f"{family}: {found['host_promised'] >> 20} MiB of main memory promised: {found}")
        # Of peaks: the driver shows less when the worker is ready than the warmup took, because a recording of graphs
        # begins by emptying the allocator's cache.
        elif not setting.on_cpu and found["measured"] > found["measured_ready"] + found["fragmentation"]:
            broken.append(f"{family}: its peak rose under load after it was ready: {found}")
    if broken:
        raise Defect("; ".join(broken))
    return facts


def _asked(setting: PartRun, family: str) -> list[str]:
    """The options of a worker, of a model that is made here."""
    from tests import tiny

    given: Facts = {} if setting.on_cpu else FAMILIES[family] | {"dtype": "bfloat16"}
    if family != "mamba":
        given["n_positions" if family == "gpt2" else "max_position_embeddings"] = 4096
    snapshot = kept(setting, f"promise-{family}", lambda path: tiny.make(family, path, **given))
    asked = [f"--snapshot={snapshot}", f"--devices={setting.device}", *_SIZES[setting.on_cpu]]
    return [*asked, _SMALL_CHUNK] if family == "mamba" else asked  # the last of two counts


def _promise(setting: PartRun, family: str, worker: "GpuWorker", estimated: Facts) -> Facts:
    from worker.protocol.memory import UNUSABLE_SHARE

    small = setting.on_cpu
    parts = ("weights", "context", "compute", "runtime")
    promised = sum(sum(estimated[part]) for part in parts)
    process, events = worker.process, worker.events
    events.wait(lambda: bool(events.of("prepared")))
    before = 0 if small else used(setting, 0)
    reserved = json.dumps({setting.device: promised})
    visible = "" if small else os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    worker.send(json.dumps({"devices": [setting.device], "reserved": reserved, "visible": visible}))
    address = worker.ready()
    ready = used(setting, process.pid) - before
    grown: Facts = {}
    for kind, body in _KINDS.items():
        asyncio.run(_ask(address, {"prompt": [10] * 40, "max_tokens": 8, "ignore_eos": True} | body))
        grown[kind] = used(setting, process.pid) - before - ready
    lengths = _MAMBA_PROMPTS if family == "mamba" else _PROMPTS[small]
    asyncio.run(_load(address, lengths, None if small else LOAD_SECONDS))
    loaded = used(setting, process.pid) - before
    pulses = _next_pulses(events, setting.device)
    process.send_signal(signal.SIGKILL)
    process.wait()
    seconds = _settled(setting, before, time.monotonic())
    return {
        **{part: estimated[part][0] for part in parts},
        "promised": promised, "fragmentation": int(UNUSABLE_SHARE * estimated["compute"][0]) + 16 * MIB,
        "measured_ready": events.of("ready")[0]["measured"][setting.device], "measured": max(pulses),
        "nvml_ready": ready, "nvml_loaded": loaded, "grown": grown,
        "overhead": events.of("ready")[0]["overhead"],
        "host_promised": estimated.get("host", 0), "host": max(pulse["measured"]["cpu"] for pulse in events.pulses()),
        "back_after": seconds,
    }  # fmt: skip


def _next_pulses(events: "Events", name: str) -> list[int]:
    """The bytes that the worker has measured on device `name` so far, with two more pulses."""
    count = len(events.pulses())
    events.wait(lambda: len(events.pulses()) >= count + 2)
    return [pulse["measured"][name] for pulse in events.pulses()]


def _estimate(options: list[str]) -> Facts:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "worker", "estimate", *options],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        event: Facts = json.loads(line)
        if event["event"] == "estimated":
            return event
    raise Defect(f"no estimate, exit {done.returncode}: {(done.stdout + done.stderr)[-500:]}")


class Events:
    """The events of a worker, as they come."""

    def __init__(self) -> None:
        self._all: list[Facts] = []
        self._changed = threading.Condition()
        self.ended = False

    def read(self, lines: Any) -> None:
        for line in lines:
            with self._changed:
                self._all.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def of(self, kind: str) -> list[Facts]:
        return [event for event in self._all if event["event"] == kind]

    def pulses(self) -> list[Facts]:
        return self.of("pulse")

    def wait(self, happened: Callable[[], bool], seconds: float = 120.0) -> None:
        """Return once `happened`. Raises Defect if the worker ends before that."""
        with self._changed:
            self._changed.wait_for(lambda: happened() or self.ended, seconds)
        if not happened():
            raise Defect(f"the worker {'ended' if self.ended else 'is not ready'}: {self._all[-2:]}")


class GpuWorker:
    """A worker process. It is supervised as a router's workers are, since only those report their memory."""

    def __init__(self, options: list[str]):
        command = [
            *(sys.executable, "-P", "-m", "worker", "serve", "--supervised", f"--parent-pid={os.getpid()}"),
            *("--listen=tcp:127.0.0.1:0", "--name=m", *options),
        ]
        self.events = Events()
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in __exit__
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=-1, stdout=-1, stderr=self._said, text=True)
        self._reader = threading.Thread(target=self.events.read, args=[self.process.stdout])
        self._reader.start()
        self.send(TOKEN)

    def __enter__(self) -> "GpuWorker":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self._reader.join()
        self._said.close()

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def ready(self) -> str:
        """The address, once it is ready."""
        try:
            self.events.wait(lambda: bool(self.events.of("ready")))
        except Defect as error:
            self._said.seek(0)
            raise Defect(f"{error} {self._said.read()[-600:]}") from None
        return "http://" + str(self.events.of("ready")[0]["address"]).removeprefix("tcp:")


def _client(address: str) -> Any:
    """A client of a supervised worker that ignores proxies in the environment."""
    import httpx

    headers = {"Authorization": f"Bearer {TOKEN}"}
    return httpx.AsyncClient(base_url=address, headers=headers, timeout=120.0, trust_env=False)


# Requests that may load further kernels into the context of the device, sent one after the other.
_KINDS: dict[str, Facts] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    "logprobs": {"temperature": 0, "logprobs": 5, "echo": True},
    "choices": {"temperature": 1.0, "n": 3},
    "grammar": {"temperature": 0, "response_format": {"type": "json_object"}},
}


LOAD_SECONDS = 40.0  # limit of one family's load on an accelerator, a guess

# Tokens of the prompts of a load: on the CPU, and on an accelerator.
_PROMPTS = {True: [300, 5], False: [3000, 5, 800, 1900, 2500, 60, 3500, 400] * 4}
# A chunk of 512 beside all other rows is the largest step. Of a longer prompt each further token would take a forward
# of its own, because mamba's code cannot continue a state with several tokens.
_MAMBA_PROMPTS = [512, 5, 5, 5] * 4


async def _load(address: str, lengths: Sequence[int], most_seconds: float | None = None) -> None:
    """Send requests with prompts of these lengths at once. Raises Defect if some have not ended by `most_seconds`."""
    body = {"max_tokens": 64, "ignore_eos": True, "temperature": 1.0, "top_p": 0.9, "logprobs": 5}
    bodies = ({"prompt": [10 + place] * length} | body for place, length in enumerate(lengths))
    try:
        async with asyncio.timeout(most_seconds):
            await asyncio.gather(*(_ask(address, body) for body in bodies))
    except TimeoutError:
        raise Defect(f"the load did not end within {most_seconds:.0f} s") from None


async def _ask(address: str, body: Facts) -> None:
    async with _client(address) as client:
        response = await client.post("/v1/completions", json={"model": "m"} | body)
        if response.status_code != 200:
            raise Defect(f"under load: {response.status_code} {response.text[:300]}")


# A load

LOAD = """
import json, os, sys, time
from pathlib import Path
import torch
from worker.engines.transformers.load.staging import move
from worker.engines.transformers.load.safetensors import WeightFile

device, path = torch.device(sys.argv[1]), Path(sys.argv[2])

def settle():
    if device.type == "cuda":
        torch.cuda.synchronize()

def fresh(share):
    file, model = WeightFile(path), torch.nn.Module()
    found = list(file.tensors())
    for name, view in found[:int(share * len(found))]:
        model.register_parameter(name, torch.nn.Parameter(view, requires_grad=False))
    return file, model

def seconds(work):
    settle()
    begin = time.monotonic()
    work()
    settle()
    return time.monotonic() - begin

for share in (0.5, 1.0):
    _, model = fresh(share)
    size = sum(each.nbytes for each in model.parameters())
    for each in model.parameters():
        each.sum()  # into the page cache
    source = torch.ones(min(size, 1 << 30), dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)
    bus = source.nbytes / min(seconds(lambda: target.copy_(source, non_blocking=True)) for _ in range(5))
    del source, target
    times = {"staged": [], "plain": []}
    for _ in range(2):
        file, model = fresh(share)
        times["staged"].append(seconds(lambda: move(model, [file], device)))
        wrong = [name for name, each in model.named_parameters() if not bool((each == int(name[1:]) + 0.5).all())]
        assert not wrong, f"{wrong[0]} arrived wrong"
        del model
        file, model = fresh(share)
        times["plain"].append(seconds(lambda: model.to(device)))
        del model
    staged, plain = (min(found) for found in times.values())
    print(json.dumps({"bytes": size, "bus_bytes_per_second": bus, "staged": staged, "plain": plain,
                      "fraction_of_bus": size / staged / bus}), flush=True)
"""


def load(setting: PartRun) -> Facts:
    """Weights from the page cache to the device: seconds, and the fraction of the bus bandwidth."""
    size = 32 * MIB if setting.on_cpu else min(16 << 30, _mem_info()[0] // 2)
    path = kept(setting, f"load-{size >> 20}.safetensors", lambda path: _write_weights(path, size))
    facts = Facts()
    for found in measure_load(setting.device, path):
        name = f"{found['bytes'] / (1 << 30):.2g} GiB"
        facts[name] = found
        setting.record(name, found)
    slow = [name for name, found in facts.items() if found["staged"] > 1.05 * found["plain"]]
    if slow and not setting.on_cpu:
        raise Defect(f"staged, {slow[0]} take longer to the device than by torch alone: {facts}")
    return facts


def _write_weights(path: Path, size: int) -> None:
    """A file of 128 tensors of `size` bytes in all, whose values are their numbers and a half."""
    import torch

    count = 128
    each = size // count // 2 * 2
    spans = {f"t{number}": [each * number, each * (number + 1)] for number in range(count)}
    header = {name: {"dtype": "BF16", "shape": [each // 2], "data_offsets": span} for name, span in spans.items()}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number in range(count):
            values = torch.full((each // 2,), number + 0.5, dtype=torch.bfloat16)
            file.write(values.view(torch.uint8).numpy().data)


def measure_load(device: str, path: Path) -> Iterator[Facts]:
    """Seconds that half of the file's tensors, and then all, take from the page cache to `device`: staged, and by torch
    alone. Raises Defect."""
    with subprocess.Popen(
        [sys.executable, "-c", LOAD, device, str(path)],
        cwd=ROOT, stdout=-1, stderr=-1, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        yield from map(json.loads, process.stdout)
        said = process.stderr.read()
    if process.returncode:
        raise Defect(f"the load ended with {process.returncode}: {said[-1500:]}")


# A swap


def swap(setting: PartRun) -> Facts:
    """A router with room for one model serves two in turn; each swap with the whole load. The forked worker keeps to
    its reservation, also with a grammar, whose memory it announces."""
    snapshot = shaped(setting)
    size = sum(path.stat().st_size for path in snapshot.glob("*.safetensors"))
    return {"bytes": size} | asyncio.run(_swap(setting, snapshot, size))


async def _swap(setting: PartRun, snapshot: Path, size: int) -> Facts:
    from tests.processes.routers import router

    seconds: list[float] = []
    # On an accelerator there is memory for one of them. On the CPU the models are too small for that.
    room = ["--device-limit", f"{setting.device}={(3 * size // 2 >> 20) + 2048}"]
    room = ["--models-max", "1"] if setting.on_cpu else room
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        presets = Path(folder) / "models.ini"
        # The same files, with another length of context: two models for the router.
        presets.write_text(
            "".join(
                f"[{name}]\nmodel = {snapshot}\ndevice = {setting.device}\nctx-size = {length}\n"
                for name, length in (("one", 256), ("two", 272))
            )
        )
        before = 0 if setting.on_cpu else used(setting, 0)
        async with router("--models-preset", str(presets), *room, "--fork-server") as up:
            await up.says("is warm")
            for model in ("one", "two", "one", "two") if not setting.on_cpu else ("one", "two"):
                await asyncio.sleep(2.5)  # so soon after a load a model is evicted only once idle for 2 s
                begin = time.monotonic()
                body: Facts = {"model": model, "prompt": [300, 301, 302], "max_tokens": 4, "temperature": 0}
                response = await up.client.post("/v1/completions", json=body)
                if response.status_code != 200:
                    raise Defect(f"{model}: {response.status_code} {response.text[:500]}")
                seconds.append(time.monotonic() - begin)
                timing = response.headers.get("server-timing", "")
                setting.record(f"request {len(seconds)} ({model})", {"seconds": seconds[-1], "timing": timing})
            if set(await up.workers()) != {"two"}:
                raise Defect(f"after the last request to `two` these run: {sorted(await up.workers())}")
            body |= {"response_format": {"type": "json_object"}}
            response = await up.client.post("/v1/completions", json=body)
            if response.status_code != 200:
                raise Defect(f"with a grammar: {response.status_code} {response.text[:500]}")
            state = (await up.client.get("/router/state")).json()
            worker = next(row for row in state["workers"] if row["model"] == "two")
            memory = {name: worker[name] for name in ("reserved", "measured", "expected_growth")}
            setting.record("memory", memory)
            is_exceeded = any(size > memory["reserved"].get(name, 0) for name, size in memory["measured"].items())
            if is_exceeded and not setting.on_cpu:
                raise Defect(f"a forked worker took more than was reserved: {memory}")
    return {"seconds": seconds, "memory": memory, "back_after": _settled(setting, before, time.monotonic())}


# Prompts


def prompts(setting: PartRun) -> Facts:
    """Prompt tokens per second of long prompts, and gaps between tokens of streams beside one, by prefill-chunk."""
    tool, shape = bench(), bench().SHAPES[shape_name(setting)]
    length, chunks, streams = (48, (16, 32), 2) if setting.on_cpu else (4096, (512, 1024, 2048, 4096), 8)
    asked, snapshot, facts = argparse.Namespace(device=setting.device, threads=1), shaped(setting), Facts()
    tokens = tuple(300 + place % (shape.vocab - 300) for place in range(length))
    short = [tool.Request(tokens[: 8 + place], 16 if setting.on_cpu else 256) for place in range(streams)]
    for chunk in chunks:
        name = f"prefill-chunk {chunk}"
        if name in setting.known:
            facts[name] = setting.known[name]
            continue
        ours = tool.Ours(snapshot, asked, name="ours", parallel=streams + 1, ctx_size=2 * length, prefill_chunk=chunk)
        try:
            seconds = [ours.run([tool.Request(tokens, 1)]).seconds for _ in range(4)][1:]  # the first chooses kernels
            before = ours.run(short).gaps
            beside = ours.run([*short, tool.Request(tokens, 1)]).gaps
        finally:
            ours.close()
        facts[name] = {
            "tokens_per_second": length / statistics.median(seconds), "gap_ms": 1e3 * statistics.median(before),
            "gap_beside_ms": 1e3 * statistics.median(beside), "most_beside_ms": 1e3 * max(beside),
        }  # fmt: skip
        setting.record(name, facts[name])
        del ours
        _free(setting)
    return facts


# Peers


def peers(setting: PartRun) -> Facts:
    """transformers' continuous batching and this engine on the same requests, in turn, and the kernels it had."""
    tool, shape = bench(), bench().SHAPES[shape_name(setting)]
    level = 4 if setting.on_cpu else 64
    asked = argparse.Namespace(device=setting.device, threads=1, shape=shape_name(setting), dtype="")
    requests = tool.requests_of(shape, level, seed=level)
    snapshot = shaped(setting)
    made = tool.make_theirs(snapshot, asked, tool.ContinuousBatch)
    theirs = made[tool.ContinuousBatch.name]
    facts: Facts = {"kernels": _kernels_of(theirs._contestant._model), "level": level}
    theirs.run(requests[:2])
    facts["transformers"] = _rate(theirs.run(requests))
    setting.record("transformers", facts)
    made.clear()
    del theirs
    _free(setting)
    ours = tool.Ours(
        snapshot, asked, name="ours", parallel=level, ctx_size=-(-shape.longest // 32) * 32,
        prefill_chunk=512 if setting.on_cpu else CHUNK,
    )  # fmt: skip
    try:
        ours.run(requests[:2])
        facts["ours"] = _rate(ours.run(requests))
    finally:
        ours.close()
    return facts | {"ratio": facts["ours"] / facts["transformers"]}


def _rate(trace: Any) -> float:
    rate: float = trace.tokens / trace.seconds
    return rate


def _kernels_of(model: Any) -> Facts:
    """Which kernels transformers could use here. Without a FlashAttention package it has neither a paged kernel nor
    CUDA graphs, so it is not at its best."""
    found = {name: find_spec(name) is not None for name in ("flash_attn", "flash_attn_interface", "kernels")}
    return {"attention": model.config._attn_implementation, **found}


# The rest


def ahead(setting: PartRun) -> Facts:
    """The gain of launching a step before the previous one has finished. The model is small: its steps take about as
    long on the device as on the host, so both ways differ most."""
    tool, rows, tokens = bench(), 2 if setting.on_cpu else 16, 32 if setting.on_cpu else 96
    shape = tool.SHAPES["tiny"] if setting.on_cpu else replace(tool.SHAPES["35m"], dtype="bfloat16")
    snapshot = kept(
        setting, "ahead-llama", lambda path: tool.make_snapshot(shape, path, setting.device, positions=1024)
    )
    asked = argparse.Namespace(device=setting.device, threads=1)
    requests, found = [tool.Request(tuple(range(300, 316)), tokens)] * rows, dict[str, Facts]()
    for name, options in _WAYS.items():
        ours = tool.Ours(snapshot, asked, name="ours", parallel=rows, ctx_size=128, **options)
        try:
            ours.run(requests)  # the first requests choose kernels
            gap = statistics.median(ours.run(requests).gaps)
            found[name] = {
                "tokens_per_second": rows / gap, "steps": ours.engine.occupancy.steps,
                "steps_ahead": ours.engine._generation.steps_ahead,
            }  # fmt: skip
        finally:
            ours.close()
        setting.record(name, found[name])
        del ours
        _free(setting)
    return judge_ahead(found, in_time=not setting.on_cpu)


_WAYS: dict[str, Facts] = {
    "step by step": {"ahead": False},
    "ahead": {"ahead": True},
    "step by step, no graphs": {"ahead": False, "enforce_eager": True},
    "ahead, no graphs": {"ahead": True, "enforce_eager": True},
}


def judge_ahead(found: dict[str, Facts], *, in_time: bool = True) -> Facts:
    """The facts of the part from those of each way. Raises Defect if steps are not launched ahead, or, with `in_time`,
    if that costs time."""
    facts: Facts = {name: each["tokens_per_second"] for name, each in found.items()}
    facts["steps ahead"] = found["ahead"]["steps_ahead"] / max(found["ahead"]["steps"], 1)
    if facts["steps ahead"] < 0.8:
        raise Defect(f"of {found['ahead']['steps']} steps {found['ahead']['steps_ahead']} were launched ahead: {facts}")
    for kind in ("", ", no graphs") if in_time else ():
        before, after = facts[f"step by step{kind}"], facts[f"ahead{kind}"]
        if after < 0.97 * before:
            raise Defect(f"ahead{kind} made {after:.0f} tokens per second, step by step {before:.0f}: {facts}")
    return facts


def ranks(setting: PartRun) -> Facts:
    """A model divided among two devices gives the same text as on one, within its estimate; skipped with one."""
    from tests import tiny
    from worker.protocol.memory import DEVICE_PROCESS_BYTES, NCCL_BYTES

    if not setting.on_cpu and int(_output("import torch; print(torch.cuda.device_count())")) < 2:
        return {"skipped": "it takes two accelerators"}
    size = {} if setting.on_cpu else {
        "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 4,
    }  # fmt: skip
    snapshot = kept(
        setting, "ranks-llama",
        lambda path: tiny.make("llama", path, max_position_embeddings=4096, initializer_range=0.02, **size),
    )  # fmt: skip
    shared = [f"--snapshot={snapshot}", "--dtype=float32", *_SIZES[setting.on_cpu]]
    with GpuWorker([*shared, f"--devices={setting.device}"]) as worker:
        alone = asyncio.run(_texts(worker.ready(), setting))
    shared += ["--devices=cpu" if setting.on_cpu else "--devices=cuda:0,cuda:1", "--tensor-parallel=2"]
    estimated = _estimate(shared)
    parts = ("weights", "context", "compute", "runtime")
    promised = [sum(estimated[part][shard] for part in parts) for shard in range(len(estimated["weights"]))]
    names = [setting.device] if setting.on_cpu else [f"cuda:{shard}" for shard in range(2)]
    reserved = dict(zip(names, promised, strict=True))
    before = [0 if setting.on_cpu else used(setting, 0, shard) for shard in range(len(names))]
    with GpuWorker([*shared, f"--reserved={json.dumps(reserved)}"]) as worker:
        address = worker.ready()
        together = asyncio.run(_texts(address, setting))
        asyncio.run(_load(address, _PROMPTS[setting.on_cpu]))
        measured = [max(_next_pulses(worker.events, name)) for name in reserved]
        driver = [used(setting, worker.process.pid, shard) - before[shard] for shard in range(len(names))]
    facts: Facts = {"promised": promised, "measured": measured}
    if not setting.on_cpu:
        # Ranks report the assumed figures for what is outside of torch's allocator.
        assumed = DEVICE_PROCESS_BYTES + NCCL_BYTES
        outside = [size - own + assumed for size, own in zip(driver, measured, strict=True)]
        facts |= {"driver": driver, "context_and_nccl": outside, "assumed": assumed}
        setting.record("memory", facts)
        measured = list(map(max, measured, driver))
    if together != alone:
        raise Defect(f"two ranks give another text than one: {together} and {alone}")
    if any(size > most for size, most in zip(measured, promised, strict=True)):
        raise Defect(f"a device took more than was promised: {facts}")
    return facts


async def _texts(address: str, setting: PartRun) -> list[str]:
    """Greedy answers to prompts of several lengths, requested at once."""
    async with _client(address) as client:
        body = {"model": "m", "max_tokens": 32, "ignore_eos": True, "temperature": 0}
        lengths = (3, 40, 200) if setting.on_cpu else (3, 40, 700, 2000)
        prompts = ([5 + (7 * place + n) % 400 for place in range(n)] for n in lengths)
        asked = (client.post("/v1/completions", json=body | {"prompt": prompt}) for prompt in prompts)
        answers = await asyncio.gather(*asked)
    for response in answers:
        if response.status_code != 200:
            raise Defect(f"{response.status_code} {response.text[:300]}")
    return [response.json()["choices"][0]["text"] for response in answers]


@dataclass(frozen=True)
class GpuPart:
    """`seconds`: its time on an H100, measured but for `promise`, `load`, `long`, `ahead` and `ranks`."""

    run: Callable[[PartRun], Facts]
    seconds: float

    @property
    def limit(self) -> float:
        """Seconds after which the part is ended: it hangs, or the card is much slower."""
        return min(max(4 * self.seconds, 120.0), 290.0)


# In the order of their value: what the first minutes on a card should show comes first.
PARTS = {
    "device": GpuPart(device, 11),
    "smoke": GpuPart(smoke, 51),
    "decode": GpuPart(decode, 59),
    "trace": GpuPart(trace, 22),
    "promise": GpuPart(promise, 110),
    "load": GpuPart(load, 25),
    "swap": GpuPart(swap, 53),
    "long": GpuPart(long, 30),
    "prompts": GpuPart(prompts, 47),
    "peers": GpuPart(peers, 50),
    "ahead": GpuPart(ahead, 25),
    "ranks": GpuPart(ranks, 10),
}
