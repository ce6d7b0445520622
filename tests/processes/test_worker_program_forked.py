"""The worker program, forked by the real fork server: it behaves like an executed one."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from router.config.presets import Preset
from router.launch.interface import NotStarted, Program, WorkerLost
from router.launch.worker_process import LocalWorker
from router.memory import checkpoint, tensor_parallel
from router.memory.estimate import MemoryEstimate, Overhead, estimate, from_trace
from tests import tiny
from tests.children import await_end
from tests.fakes import CPU, DEADLINE, GIB, FixedDevices
from tests.processes.forking import ForkingLauncher, children, parent, read_all, request_to
from worker.protocol import argv
from worker.protocol.argv import Serve
from worker.protocol.events import Estimated, Event, Pulse

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
ROOT = Path(__file__).resolve().parents[2]
FORKED, EXECUTED = Program(model="m", worker="m#1"), Program(model="m", worker="m#2", forks=False)
CTX, ROWS = 256, 4


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("model") / "tiny")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def launcher(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ForkingLauncher]:
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHONPATH": str(ROOT)}
    runtime = tmp_path_factory.mktemp("launcher") / "run"
    async with ForkingLauncher(devices=FixedDevices(), runtime_dir=runtime, environ=environ) as found:
        await found.warmed()
        yield found


@dataclass(frozen=True)
class Served:
    """A worker that all tests of it share. Each test sends it other requests."""

    worker: LocalWorker
    measured: int
    """Bytes when it was ready."""
    pulses: asyncio.Queue[Pulse]
    seconds: float
    """From its start until it was ready."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(launcher: ForkingLauncher, snapshot: Path) -> AsyncIterator[dict[bool, Served]]:
    """The worker that is forked (True) and the executed one."""
    command = Serve(snapshot=str(snapshot), listen="", name="m", ctx_size=CTX, parallel=ROWS)
    found = {}
    async with contextlib.AsyncExitStack() as stack:
        for program in (FORKED, EXECUTED):
            pulses: asyncio.Queue[Pulse] = asyncio.Queue()
            began = time.monotonic()
            program = replace(program, worker=f"{program.worker}-served")
            worker = await stack.enter_async_context(launcher.serve(program, command, {CPU: GIB}, queued(pulses)))
            found[program.forks] = Served(worker, worker.measured[CPU], pulses, time.monotonic() - began)
        yield found


def queued(pulses: asyncio.Queue[Pulse]) -> Callable[[Event], None]:
    """A listener that keeps pulses only."""
    return lambda event: pulses.put_nowait(event) if isinstance(event, Pulse) else None


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def traced(launcher: ForkingLauncher, snapshot: Path) -> dict[bool, Estimated]:
    """Estimates of the real program, forked (True) and executed."""
    command = argv.Estimate(snapshot=str(snapshot), ctx_size=CTX, parallel=ROWS)
    return {way.forks: await launcher.estimate(way, command) for way in (FORKED, EXECUTED)}


async def post(worker: LocalWorker, **body: Any) -> Any:
    async with request_to(worker, "/v1/completions", body) as exchange:
        response: Any = json.loads(await read_all(exchange))
        assert exchange.status == 200, response
        return response


async def answer(worker: LocalWorker) -> list[int]:
    response = await post(worker, prompt="One model", max_tokens=12, temperature=0, ignore_eos=True, logprobs=0)
    return [response["choices"][0]["text"], response["usage"]]


async def fill(worker: LocalWorker) -> None:
    """Send a full batch at full context with all options that cost memory, and responses with grammars."""
    full = {"prompt": [5 + at % 300 for at in range(CTX - 24)], "max_tokens": 24, "temperature": 1.0, "top_p": 0.9,
            "logprobs": 5, "ignore_eos": True}  # fmt: skip
    for _ in range(2):
        await asyncio.gather(*(post(worker, **full, seed=seed) for seed in range(2 * ROWS)))
    for number in range(6):
        listed = {"type": "object", "properties": {f"a{number}": {"type": "array", "items": {"type": "number"}}}}
        await post(worker, prompt="a", max_tokens=16, guided_json=listed)


async def test_exec_and_fork_look_the_same_to_a_client(launcher: ForkingLauncher, served: dict[bool, Served]) -> None:
    """The response is the same. A forked worker does not count memory that it shares with the fork server."""
    stages = ["imports", "config", "tokenizer", "read", "build", "warmup", "server"]
    for forked, each in served.items():
        worker, spent = each.worker, each.worker.ready.seconds
        assert parent(worker.pid) == (launcher.fork_servers.pid if forked else os.getpid())
        assert not _mapped(worker.pid, Path("/scipy")), "35 MB that no model needs"
        assert list(spent) == ["fork" if forked else "exec", *stages]
        assert 0 < sum(spent.values()) <= each.seconds + 0.01  # rounded
    assert await answer(served[True].worker) == await answer(served[False].worker)
    assert 0 < served[True].measured < served[False].measured - (100 << 20)


async def test_a_model_that_was_served_once_is_prebuilt_for_the_next_worker(
    launcher: ForkingLauncher, tmp_path: Path
) -> None:
    """Weights are mapped from the fork server, and the response is the same."""
    folder = tiny.make("qwen3", tmp_path / "tiny")
    command = Serve(snapshot=str(folder), listen="", name="m", ctx_size=64)
    answers = []
    kept = asyncio.Event()
    async with launcher.serve(FORKED, command, {CPU: GIB}, lambda event: None) as worker:
        answers.append(await answer(worker))
        fork_server = launcher.fork_servers.server
        assert fork_server is not None
        before = launcher.fork_servers.on_warm
        launcher.fork_servers.on_warm = kept.set
        async with asyncio.timeout(DEADLINE):
            while not _mapped(fork_server.pid, folder / "model.safetensors"):
                kept.clear()
                await kept.wait()
        launcher.fork_servers.on_warm = before
    async with launcher.serve(FORKED, command, {CPU: GIB}, lambda event: None) as worker:
        assert parent(worker.pid) == fork_server.pid
        answers.append(await answer(worker))
        assert len(_mapped(worker.pid, folder / "model.safetensors")) == 1, "that of the fork server, and no other"
    assert answers[0] == answers[1]
    assert _mapped(fork_server.pid, folder / "model.safetensors") == [0], "it read weights"


def _mapped(pid: int, path: Path) -> list[int]:
    """Resident bytes of each mapping of the file in that process."""
    areas = Path(f"/proc/{pid}/smaps").read_text().split("VmFlags:")
    return [int(area.partition("Rss:")[2].split()[0]) << 10 for area in areas if str(path) in area]


async def test_a_forked_worker_computes_with_the_threads_of_its_preset(
    launcher: ForkingLauncher, snapshot: Path
) -> None:
    """The fork server has one thread. In a worker, the step loop and the thread that loads have a pool each."""
    there = []
    for threads in (1, 4):
        command = Serve(snapshot=str(snapshot), listen="", name="m", threads=threads, ctx_size=CTX)
        async with launcher.serve(FORKED, command, {CPU: GIB}, lambda event: None) as worker:
            await post(worker, prompt=[5 + at % 300 for at in range(CTX - 8)], max_tokens=4, ignore_eos=True)
            there.append(len(os.listdir(f"/proc/{worker.pid}/task")))
    assert there[1] - there[0] in (3, 2 * 3)


async def test_an_estimate_is_the_same_by_both_ways(traced: dict[bool, Estimated]) -> None:
    forked, executed = traced[True], traced[False]
    assert (forked.weights, forked.context, forked.compute) == (executed.weights, executed.context, executed.compute)
    assert forked.inherited > 100 << 20
    assert executed.inherited == 0


@pytest.mark.parametrize("forked", [True, False], ids=["forked", "executed"])
async def test_a_ready_worker_never_grows_past_its_reservation_grammars_included(
    served: dict[bool, Served], snapshot: Path, traced: dict[bool, Estimated], forked: bool
) -> None:
    worker, pulses = served[forked].worker, served[forked].pulses
    assert worker.forked == forked
    preset = Preset(id="m", ctx_size=CTX, parallel=ROWS, threads=1)
    static = estimate(checkpoint.read(snapshot), preset, on_host=True, forked=forked)
    unannounced, overhead = worker.ready.unannounced, worker.ready.overhead
    await fill(worker)
    while not pulses.empty():
        pulses.get_nowait()
    last = await asyncio.wait_for(pulses.get(), DEADLINE)
    peak = last.measured["cpu"]
    assert served[forked].measured < peak, "something was really used"
    assert set(overhead) == (set() if forked else {"cpu"}), "a forked one shares its imports"
    remembered = Overhead(host=overhead.get("cpu", 0))
    known = estimate(checkpoint.read(snapshot), preset, on_host=True, forked=forked, overhead=remembered)
    for each in (static, known, from_trace(traced[forked], preset, forked=forked)):
        most = peak + last.later + last.unannounced
        assert most <= each.total, f"{each.source}: {most >> 20} MiB of {segments(each)}"
        # The static figure has a conservative bound for activations and may be far above.
        assert each.source == "static" or each.total <= 1.3 * most, f"{most >> 20} MiB of {segments(each)}"
    assert last.unannounced < unannounced, "the tables for grammars are there now"


def segments(found: MemoryEstimate) -> str:
    return f"{[sum(each) >> 20 for each in (found.weights, found.context, found.compute, found.runtime)]} MiB"


async def test_a_preparing_worker_reads_no_weights_before_the_grant(launcher: ForkingLauncher, tmp_path: Path) -> None:
    snapshot = tiny.make("llama", tmp_path / "m")
    weights, away = snapshot / "model.safetensors", tmp_path / "away"
    weights.rename(away)  # whatever looks for them now fails
    command = Serve(snapshot=str(snapshot), listen="", name="m", ctx_size=64)
    pulses: asyncio.Queue[Pulse] = asyncio.Queue()
    async with launcher.prepare(FORKED, command, queued(pulses)) as early:
        await early.prepared()
        assert 0 < early.measured[CPU] < 2 << 30
        away.rename(weights)
        worker = await early.load(replace(command, kv_tokens=96), {CPU: GIB})
        assert list(worker.ready.seconds)[:5] == ["fork", "imports", "config", "tokenizer", "early_start"]
        pulse = await asyncio.wait_for(pulses.get(), DEADLINE)
        assert pulse.cache_total == 96, "the pool has the granted tokens"


async def test_a_worker_that_must_be_forked_is_never_executed(launcher: ForkingLauncher, snapshot: Path) -> None:
    command = Serve(snapshot=str(snapshot), listen="", name="m", ctx_size=CTX)
    program = Program(model="m", worker="m#3", env={"A": "b"}, must_fork=True)
    with pytest.raises(NotStarted, match="m#3: no fork server can fork it"):
        async with launcher.serve(program, command, {CPU: GIB}, lambda event: None):
            raise AssertionError("it got ready")


async def test_a_tensor_parallel_model_stays_within_its_estimate_and_ends_as_a_whole(
    launcher: ForkingLauncher, snapshot: Path
) -> None:
    """The memory of all its processes together is measured, and is within both estimates."""
    pulses: asyncio.Queue[Pulse] = asyncio.Queue()
    preset = Preset(id="m", ctx_size=CTX, parallel=ROWS, threads=1, tensor_parallel=2)
    shared: dict[str, Any] = {"snapshot": str(snapshot), "ctx_size": CTX, "parallel": ROWS, "tensor_parallel": 2}
    traced = await launcher.estimate(FORKED, argv.Estimate(**shared))
    static = tensor_parallel.estimate(checkpoint.read(snapshot), preset, 2, on_host=True, forked=True)
    async with launcher.serve(FORKED, Serve(**shared, listen="", name="m"), {CPU: GIB}, queued(pulses)) as worker:
        (follower,) = children(worker.pid)
        assert os.getpgid(follower) == os.getpgid(worker.pid)
        await fill(worker)
        while not pulses.empty():
            pulses.get_nowait()
        last = await asyncio.wait_for(pulses.get(), DEADLINE)
    await_end(follower, 1.0)
    most = last.measured["cpu"] + last.later + last.unannounced
    for each in (static, from_trace(traced, preset, forked=True)):
        assert most <= each.total, f"{each.source}: {most >> 20} MiB of {segments(each)}"
        # Two processes with 20 MiB for first steps, 8 for Gloo and 10 for copied pages each, which this model leaves.
        assert each.source == "static" or each.total - most <= 80 << 20, f"{most >> 20} MiB of {segments(each)}"


async def test_ranks_die_with_a_killed_leader(launcher: ForkingLauncher, snapshot: Path) -> None:
    command = Serve(snapshot=str(snapshot), listen="", name="m", ctx_size=CTX, tensor_parallel=4)
    with pytest.raises(WorkerLost, match=r"2 heads of keys and values, which 4 does not divide"):
        async with launcher.serve(FORKED, command, {CPU: GIB}, lambda event: None):
            raise AssertionError("it got ready")
    command = replace(command, tensor_parallel=2)
    async with launcher.serve(FORKED, command, {CPU: GIB}, lambda event: None) as worker:
        (follower,) = children(worker.pid)
        os.kill(worker.pid, signal.SIGKILL)
        lost = await asyncio.wait_for(worker.lost(), DEADLINE)
        assert (lost.cause, lost.exit) == ("crashed", -signal.SIGKILL)
        await_end(follower, 1.0)
