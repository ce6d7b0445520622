"""The worker program, forked by the real nursery: it loads, answers, measures and fails as an executed one does."""

import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from router.launchers import Program, WorkerLost
from router.launchers.local import LocalWorker
from tests import tiny
from tests.fakes import CPU, GIB, FixedDevices
from tests.processes.asking import asked, everything
from tests.processes.forking import ForkingLauncher, parent
from worker import contract
from worker.contract import Exit

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
ROOT = Path(__file__).resolve().parents[2]
FORKED, EXECUTED = Program(model="m", worker="m#1"), Program(model="m", worker="m#2", forks=False)


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


async def answer(worker: LocalWorker) -> list[int]:
    body = {"prompt": "One model", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    async with asked(worker, "/v1/completions", body) as exchange:
        told: Any = json.loads(await everything(exchange))
        assert exchange.status == 200, told
        return [told["choices"][0]["text"], told["usage"]]


async def test_exec_and_nursery_look_the_same_to_a_client(launcher: ForkingLauncher, snapshot: Path) -> None:
    """One answer, stages that account for the load; and a forked one does not count what it shares
    with the nursery as its own memory."""
    answers, measured, spent = [], [], []
    command = contract.Serve(snapshot=str(snapshot), listen="", name="m", threads=2, ctx_size=64)
    for program in (FORKED, EXECUTED):
        began = time.monotonic()
        async with launcher.serve(program, command, {CPU: GIB}, lambda event: None) as worker:
            total = time.monotonic() - began
            assert launcher.nursery is not None
            assert parent(worker.pid) == (launcher.nursery.pid if program.forks else os.getpid())
            answers.append(await answer(worker))
            measured.append(worker.measured[CPU])
            spent.append(worker.ready.seconds)
            assert total / 2 < sum(worker.ready.seconds.values()) < total + 0.01
    assert answers[0] == answers[1]
    assert measured[0] < measured[1] - (100 << 20)
    assert measured[0] > 0
    stages = ["imports", "config", "tokenizer", "read", "build", "warmup", "server"]
    assert [list(each) for each in spent] == [["fork", *stages], ["exec", *stages]]
    assert spent[0]["imports"] < spent[1]["imports"] / 3


async def test_an_estimate_is_the_same_by_both_ways(launcher: ForkingLauncher, snapshot: Path) -> None:
    command = contract.Estimate(snapshot=str(snapshot), ctx_size=64)
    forked, executed = await launcher.estimate(FORKED, command), await launcher.estimate(EXECUTED, command)
    assert (forked.weights, forked.context, forked.compute) == (executed.weights, executed.context, executed.compute)


async def test_a_forked_worker_says_why_it_fails(launcher: ForkingLauncher, tmp_path: Path) -> None:
    with pytest.raises(WorkerLost, match=r"config\.json") as lost:
        async with launcher.serve(
            FORKED, contract.Serve(snapshot=str(tmp_path), listen="", name="m"), {CPU: GIB}, lambda event: None
        ):
            raise AssertionError("it got ready")
    assert lost.value.exit == Exit.UNUSABLE
