"""The fakes keep their word: time jumps, a wait without end is an error, the journal tells what happened."""

import asyncio

import pytest

from router.launch.interface import Launcher, Program, WorkerProcess
from tests.fakes import CPU, GIB, GPU0, Deadlock, FakeLauncher, FakeModel, run_virtual, virtual
from worker.protocol.argv import Download, Serve
from worker.protocol.events import Event

SERVE = Serve(snapshot="/s", listen="")


def ignore(event: Event) -> None:
    pass


def program(name: str) -> Program:
    return Program(model=name, worker=f"{name}#1")


@virtual
async def test_an_hour_passes_at_once() -> None:
    loop = asyncio.get_running_loop()
    await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(1800))
    assert loop.time() == 3600.0


def test_waiting_for_nothing_is_a_deadlock() -> None:
    async def wait_for_nothing() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="wait_for_nothing"):
        run_virtual(wait_for_nothing())


def as_launcher(fake: FakeLauncher) -> Launcher:
    """For the type checker: the fake has the real one's shape."""
    return fake


def as_process(fake_worker: WorkerProcess) -> WorkerProcess:
    return fake_worker


@virtual
async def test_the_journal_tells_who_came_and_went() -> None:
    fake = FakeLauncher({GPU0: 4 * GIB, CPU: 8 * GIB}, {"c": FakeModel(shards=(3 * GIB,), host=GIB)})
    launcher = as_launcher(fake)
    await launcher.download(program("c"), Download(repo="org/c"), ignore)
    async with launcher.serve(program("c"), SERVE, {GPU0: 3 * GIB, CPU: GIB}, ignore) as process:
        assert as_process(process).measured == {GPU0: 3 * GIB, CPU: GIB}
        await asyncio.sleep(0)
        assert [reading.used for reading in launcher.readings()] == [3 * GIB, GIB]
    assert fake.journal == ["download c", "start c", "stop c"]
    assert [reading.used for reading in launcher.readings()] == [0, 0]
    assert asyncio.get_running_loop().time() == 1.0 + 2.0 + 0.5
