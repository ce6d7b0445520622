"""A divided model in real processes: a router's worker leads, its followers are its children, and nobody is left."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from router import checkpoint, divided
from router.estimate import exact
from router.launchers import Program, WorkerLost
from router.presets import Preset
from tests import tiny
from tests.children import await_end
from tests.fakes import CPU, DEADLINE, GIB, FixedDevices
from tests.processes.asking import asked, everything
from tests.processes.forking import ForkingLauncher, parent
from tests.processes.routers import Router, router
from worker import contract

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
ROOT = Path(__file__).resolve().parents[2]
FORKED = Program(model="m", worker="m#1")
CTX, ROWS = 256, 4
INI = "[*]\nctx-size = 128\nparallel = 2\n[divided]\nmodel = {0}\ntensor-parallel = 2\n"


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("model") / "tiny", vocab_size=512)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def launcher(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ForkingLauncher]:
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHONPATH": str(ROOT)}
    runtime = tmp_path_factory.mktemp("launcher") / "run"
    async with ForkingLauncher(devices=FixedDevices(), runtime_dir=runtime, environ=environ) as found:
        await found.warmed()
        yield found


def followers(leader: int) -> list[int]:
    """Its children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                found += [int(entry.name)] * (parent(int(entry.name)) == leader)
            except OSError:  # it has just ended
                continue
    return found


async def post(worker: Any, **body: Any) -> Any:
    async with asked(worker, "/v1/completions", {"temperature": 0, "ignore_eos": True, **body}) as exchange:
        told: Any = json.loads(await everything(exchange))
        assert exchange.status == 200, told
        return told


async def test_a_divided_model_stays_within_its_estimate_and_ends_as_a_whole(
    launcher: ForkingLauncher, snapshot: Path
) -> None:
    """What all its processes take together is what is measured; both figures of it are no less."""
    pulses: asyncio.Queue[contract.Pulse] = asyncio.Queue()

    def listen(event: contract.Event) -> None:
        if isinstance(event, contract.Pulse):
            pulses.put_nowait(event)

    said = Preset(id="m", ctx_size=CTX, parallel=ROWS, threads=1, tensor_parallel=2)
    shared: dict[str, Any] = {"snapshot": str(snapshot), "ctx_size": CTX, "parallel": ROWS, "tensor_parallel": 2}
    traced = await launcher.estimate(FORKED, contract.Estimate(**shared))
    static = divided.estimate(checkpoint.read(snapshot), said, 2, on_host=True, forked=True)
    command = contract.Serve(**shared, listen="", name="m")
    async with launcher.serve(FORKED, command, {CPU: GIB}, listen) as worker:
        (follower,) = followers(worker.pid)
        assert os.getpgid(follower) == os.getpgid(worker.pid)
        full = {"prompt": [5 + at % 300 for at in range(CTX - 24)], "max_tokens": 24, "temperature": 1.0, "top_p": 0.9}
        for _ in range(2):
            await asyncio.gather(*(post(worker, **full, logprobs=5, seed=seed) for seed in range(2 * ROWS)))
        listed = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "number"}}}}
        await post(worker, prompt="a", max_tokens=16, guided_json=listed, ignore_eos=False)
        while not pulses.empty():
            pulses.get_nowait()
        last = await asyncio.wait_for(pulses.get(), DEADLINE)
    await_end(follower, 1.0)
    most = last.measured["cpu"] + last.later
    for each in (static, exact(traced, said, forked=True)):
        assert most <= each.total <= 1.4 * most, f"{each.source}: {most >> 20} MiB of {each.total >> 20}"


async def test_followers_die_with_a_leader_that_is_killed(launcher: ForkingLauncher, snapshot: Path) -> None:
    command = contract.Serve(snapshot=str(snapshot), listen="", name="m", ctx_size=CTX, tensor_parallel=4)
    with pytest.raises(WorkerLost, match=r"2 heads of keys and values, which 4 does not divide"):
        async with launcher.serve(FORKED, command, {CPU: GIB}, lambda event: None):
            raise AssertionError("it got ready")
    command = contract.Serve(snapshot=str(snapshot), listen="", name="m", ctx_size=CTX, tensor_parallel=2)
    async with launcher.serve(FORKED, command, {CPU: GIB}, lambda event: None) as worker:
        (follower,) = followers(worker.pid)
        os.kill(worker.pid, signal.SIGKILL)
        lost = await asyncio.wait_for(worker.lost(), DEADLINE)
        assert (lost.cause, lost.exit) == ("crashed", -signal.SIGKILL)
        await_end(follower, 1.0)


# With a router


@pytest_asyncio.fixture(loop_scope="module")
async def up(snapshot: Path, tmp_path: Path) -> AsyncIterator[Router]:
    file = tmp_path / "models.ini"
    file.write_text(INI.format(snapshot))
    async with router("--models-preset", str(file)) as running:
        yield running


async def text(up: Router, model: str) -> str:
    body = {"model": model, "prompt": "The quick brown", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    response = await up.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    found: str = response.json()["choices"][0]["text"]
    return found


async def test_a_rank_that_dies_ends_a_stream_with_an_error_and_the_next_request_finds_a_new_worker(
    up: Router,
) -> None:
    said = await text(up, "divided")
    leader = (await up.workers())["divided"]
    (follower,) = followers(leader)
    body = {"model": "divided", "prompt": "The quick", "max_tokens": 100, "ignore_eos": True, "stream": True}
    lines: list[str] = []
    async with asyncio.timeout(3 * DEADLINE):
        try:
            async with up.client.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if not lines:
                        os.kill(follower, signal.SIGKILL)
                    lines.append(line)
        except Exception as broken:  # noqa: BLE001 - the connection is cut behind the error
            lines.append(repr(broken))
        assert any('"error"' in line for line in lines), lines[-3:]
        assert "data: [DONE]" not in lines
        await up.says(rf"rank 1 of 2 \(process {follower}\): was killed by SIGKILL")
        assert await text(up, "divided") == said
    assert (await up.workers())["divided"] != leader
