"""The fakes keep their word: time jumps, a wait without end is an error, the journal tells what happened."""

import asyncio

import pytest

from router.launch.interface import Launcher, Program, WorkerLost, WorkerProcess
from tests.fakes import CPU, GIB, GPU0, GPU1, Deadlock, FakeLauncher, FakeModel, run_virtual, virtual
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


@virtual
async def test_a_death_is_told_and_needs_no_stop() -> None:
    fake = FakeLauncher(models={"c": FakeModel(dies_after=5.0)})
    async with fake.serve(program("c"), SERVE, {CPU: GIB}, ignore) as process:
        assert (await process.lost()).cause == "crashed"
    assert fake.journal == ["start c"]
    assert fake.timeline[-1] == (7.0, "lost c")


@virtual
async def test_who_takes_more_than_there_is_runs_out_of_memory() -> None:
    fake = FakeLauncher({GPU0: GIB, GPU1: GIB}, {"c": FakeModel(shards=(GIB, 2 * GIB))})
    with pytest.raises(WorkerLost) as lost:
        async with fake.serve(program("c"), SERVE, {GPU0: GIB, GPU1: GIB}, ignore):
            pass
    assert (lost.value.cause, lost.value.memory) == ("oom", "device")
    assert fake.over_commits
    assert fake.used(GPU1) == 0


@virtual
async def test_a_held_load_ends_when_told_or_cancelled() -> None:
    fake = FakeLauncher()
    fake.hold("start c")

    async def serve(name: str) -> None:
        async with fake.serve(program(name), SERVE, {CPU: GIB}, ignore):
            pass

    loading = asyncio.create_task(serve("c"))
    await asyncio.sleep(100)
    assert fake.journal == ["start c"]
    fake.release("start c")
    await loading
    assert fake.journal == ["start c", "stop c"]
    fake.hold("start d")
    loading = asyncio.create_task(serve("d"))
    await asyncio.sleep(1)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert fake.timeline[-1] == (101.5, "abandoned d")
    assert fake.used(CPU) == 0
