"""The fork server with real processes: forked and executed workers look the same, and nothing is left behind."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from router.launch.fork_server import ForkFailed, ForkServerProcess
from router.launch.interface import Program, WorkerLost
from router.launch.local import LocalLauncher
from router.launch.process import UNKNOWN_EXIT, Child, Log, started_pids, uncancelled
from router.launch.process_table import adopt_orphans, find_orphans
from router.launch.spawn import may_fork
from router.launch.worker_process import LocalWorker
from tests.fakes import CPU, DEADLINE, FAKE_ARGV, GIB, FixedDevices, Journal, ended, fake_program
from tests.processes.fork_server_program import STAY
from tests.processes.forking import ForkingLauncher, parent
from worker.protocol.argv import Estimate, Serve, to_argv
from worker.protocol.events import Event, Exit, Progress

PROGRAM = (sys.executable, "-P", str(Path(__file__).with_name("fork_server_program.py")))
ROOT = str(Path(__file__).resolve().parents[2])
WITHIN = 60.0  # seconds after a kill within which the other processes exit


@pytest.fixture(autouse=True)
async def _nothing_is_left() -> AsyncIterator[None]:
    """Become a subreaper, like a router. In the end all descriptors are closed, and no child is left."""
    before = set(os.listdir("/proc/self/fd"))
    children = _children(os.getpid())  # routers that other test files share
    had = adopt_orphans()
    yield
    adopt_orphans(enabled=had)
    assert set(os.listdir("/proc/self/fd")) == before
    assert started_pids == set()
    assert find_orphans() == []
    assert _children(os.getpid()) == children


@asynccontextmanager
async def warm_fork_server(**environ: str) -> AsyncIterator[ForkServerProcess]:
    """A warm fork server of `fork_server_program`."""
    warm = asyncio.Event()
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": ROOT, "OPENBLAS_NUM_THREADS": "1", **environ}
    fork_server = ForkServerProcess(PROGRAM, env, log=Log("fork-server", "fork-server"), on_warm=warm.set)
    fork_server.reply_timeout = DEADLINE
    try:
        async with asyncio.timeout(DEADLINE):
            await warm.wait()
            yield fork_server
    finally:
        await uncancelled(fork_server.child.end())


def stop(fork_server: ForkServerProcess) -> None:
    """Stop it, and wait for its replies only shortly from now on."""
    fork_server.reply_timeout = 0.3
    os.kill(fork_server.pid, signal.SIGSTOP)


def resume(fork_server: ForkServerProcess) -> None:
    fork_server.reply_timeout = DEADLINE
    os.kill(fork_server.pid, signal.SIGCONT)


async def facts(child: Child, token: str = "a-token-of-this-test") -> dict[str, Any]:
    """The report of the program about itself, once it has exited."""
    events: asyncio.Queue[Event] = asyncio.Queue()
    child.on_event = events.put_nowait
    child.send(token.encode() + b"\n")
    async with asyncio.timeout(DEADLINE):
        event = await events.get()
        assert isinstance(event, Progress)
        assert await child.exited == 0
    found: dict[str, Any] = json.loads(event.stage)
    return found


def estimate(parent_pid: int) -> list[str]:
    return to_argv(Estimate(snapshot="/a b", supervised=True, parent_pid=parent_pid))


ENV = {
    "PATH": os.environ["PATH"],
    "PYTHONPATH": ROOT,
    "OPENBLAS_NUM_THREADS": "1",
    "LANG": "C.UTF-8",
    "FLEET_WORKER": "0123456789ab",
}


async def forked(fork_server: ForkServerProcess) -> Child:
    return await fork_server.spawn(estimate(fork_server.pid), ENV, name="m#1", log=Log("m", "m#1"))


async def staying(fork_server: ForkServerProcess) -> Child:
    """A forked process that has its token, has sent an event and goes on."""
    argv = [*estimate(fork_server.pid), f"--config-override={STAY}"]
    child = await fork_server.spawn(argv, ENV, name="m#1", log=Log("m", "m#1"))
    events: asyncio.Queue[Event] = asyncio.Queue()
    child.on_event = events.put_nowait
    child.send(b"a-token-of-this-test\n")
    await events.get()
    return child


def executed() -> Child:
    return Child.spawn([*PROGRAM, *estimate(os.getpid())], ENV, name="m#1", log=Log("m", "m#1"), private=True)


def cut(child: Child) -> None:
    """End its stdin."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, child._stdin)
    os.close(nothing)


# Forks


@pytest.fixture
def hanging_up() -> Iterator[None]:
    """Handle SIGHUP, as a router does. An executed process would inherit an ignored signal, as with nohup."""
    before = signal.signal(signal.SIGHUP, signal.default_int_handler)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hanging_up")
async def test_exec_and_fork_look_the_same() -> None:
    """Environment, descriptors, folder, mask of modes, signals, session, OOM score, privileges, arguments. Each worker
    draws random numbers of its own, and a command line may be larger than a packet."""
    async with warm_fork_server(OWN_VARIABLE="secret") as fork_server:
        by_fork, by_exec = await facts(await forked(fork_server)), await facts(executed())
        drawn = [*by_fork["random_numbers"], *(await facts(await forked(fork_server)))["random_numbers"]]
        assert len(set(drawn)) == 4
        argv = [*estimate(fork_server.pid), f"--config-override={'x' * 900_000}"]
        large = await fork_server.spawn(argv, ENV, name="m#1", log=Log("m", "m#1"))
        assert (await facts(large))["argv"] == argv
    assert by_fork["argv"] == estimate(fork_server.pid)
    assert f"--parent-pid={fork_server.pid}" in by_fork["cmdline"]
    assert "--orders" not in by_fork["cmdline"]
    for each in (by_fork, by_exec):
        del each["argv"], each["cmdline"], each["random_numbers"]

    assert by_fork == by_exec
    assert by_fork["descriptors"] == ["pipe", "pipe", "pipe"]
    assert by_fork["environ"] == {name: value for name, value in ENV.items() if name != "FLEET_WORKER"}
    assert by_fork["oom after"] > by_fork["oom"]


async def test_an_error_at_the_start_of_a_forked_worker_is_in_its_log() -> None:
    log = Log("m", "m#1")
    async with warm_fork_server() as fork_server, asyncio.timeout(DEADLINE):
        child = await fork_server.spawn(["estimate"], ENV, name="m#1", log=log)
        assert await child.exited == 1
    assert log.last == "ValueError: estimate: the following arguments are required: --snapshot"


async def test_a_fork_server_with_a_second_thread_refuses_to_fork() -> None:
    async with warm_fork_server(FORK_SERVER_HAS="thread") as fork_server:
        with pytest.raises(ForkFailed, match="2 threads"):
            await forked(fork_server)
        assert fork_server.can_fork, "it refuses each time, and may be asked again"


CUDA = """
static int started;
int cuInit(unsigned int flags) { started = 1; return 0; }
int cuCtxGetCurrent(void **context) { *context = 0; return started ? 0 : 3; }
"""


@pytest.mark.parametrize("is_started", [False, True])
async def test_an_initialized_driver_prevents_a_fork_and_a_loaded_one_does_not(
    is_started: bool, tmp_path: Path
) -> None:
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    source.write_text(CUDA)
    built = await asyncio.create_subprocess_exec(
        "cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source
    )
    assert await built.wait() == 0
    async with warm_fork_server(
        FORK_SERVER_HAS="started" if is_started else "loaded", FORK_SERVER_CUDA=str(library)
    ) as fork_server:
        if is_started:
            with pytest.raises(ForkFailed, match="CUDA driver is initialized"):
                await forked(fork_server)
        else:
            assert (await facts(await forked(fork_server)))["path"]


async def test_only_processes_that_behave_the_same_are_forked() -> None:
    plain = Program(model="m", worker="m#1")
    assert may_fork(plain, "serve")
    assert may_fork(plain, "estimate")
    assert not may_fork(plain, "download")
    assert not may_fork(Program(model="m", worker="m#1", python="/usr/bin/python3"), "serve")
    assert not may_fork(Program(model="m", worker="m#1", env={"LD_PRELOAD": "x.so"}), "serve")
    assert not may_fork(Program(model="m", worker="m#1", forks=False), "serve")


# A launcher with a fork server


@pytest.fixture
async def launcher(tmp_path: Path) -> AsyncIterator[ForkingLauncher]:
    async with ForkingLauncher(
        devices=FixedDevices(),
        runtime_dir=tmp_path / "run",
        environ={"PATH": os.environ["PATH"]},
        python_argv=FAKE_ARGV,
        fork_server_pause=0.02,
    ) as found:
        yield found


@asynccontextmanager
async def serving(launcher: LocalLauncher, number: int = 1, **wrong: Any) -> AsyncIterator[LocalWorker]:
    command = Serve(snapshot="/", listen="", name="m")
    async with launcher.serve(
        fake_program("m", number=number, **wrong), command, {CPU: GIB}, lambda event: None
    ) as worker:
        yield worker


async def test_a_worker_is_executed_until_the_fork_server_is_warm_and_then_forked(launcher: ForkingLauncher) -> None:
    async with serving(launcher) as early:
        assert parent(early.pid) == os.getpid()
        fork_server = await launcher.warmed()
        async with serving(launcher, 2) as late:
            assert parent(late.pid) == fork_server.pid


async def test_will_fork_waits_for_the_imports_or_the_exit_of_the_fork_server(launcher: ForkingLauncher) -> None:
    program = Program(model="m", worker="m#1")
    async with asyncio.timeout(DEADLINE):
        while (fork_server := launcher.fork_servers.server) is None:  # noqa: ASYNC110 - nothing reports its start
            await asyncio.sleep(0)
        os.kill(fork_server.pid, signal.SIGKILL)  # before its imports
        assert not await launcher.will_fork(program)
        while launcher.fork_servers.server in (None, fork_server):  # noqa: ASYNC110 - nothing reports the next one
            await asyncio.sleep(0.001)
        assert await launcher.will_fork(program)
        assert not await launcher.will_fork(Program(model="m", worker="m#2", forks=False))


async def test_all_loads_together_wait_for_a_fork_server_that_does_not_end_its_imports() -> None:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": ROOT}
    waits = ForkServerProcess(PROGRAM, env, log=Log("a", "a"), on_warm=lambda: None, import_timeout=0.1)
    try:
        os.kill(waits.pid, signal.SIGSTOP)
        async with asyncio.timeout(DEADLINE):
            await waits.settled.wait()
        assert not waits.can_fork
        assert waits.settled.is_set(), "further loads do not wait"
    finally:
        await uncancelled(waits.child.end())


async def test_workers_die_with_their_fork_server_and_later_ones_run(launcher: ForkingLauncher) -> None:
    fork_server = await launcher.warmed()
    async with serving(launcher) as worker:
        os.kill(fork_server.pid, signal.SIGKILL)
        lost = await worker.lost()
        assert (lost.cause, lost.exit) == ("crashed", -signal.SIGKILL)
        await ended(worker.pid, within=WITHIN)
    async with serving(launcher, 2):
        pass  # forked or executed, whichever is possible by now
    successor = await launcher.warmed()
    assert successor.pid != fork_server.pid
    async with serving(launcher, 3) as again:
        assert parent(again.pid) == successor.pid


async def test_a_stopped_fork_server_costs_no_healthy_worker() -> None:
    """Exits of its children are seen without it, also of one whose stdin has ended. It reaps them when it goes on."""
    async with warm_fork_server() as fork_server, asyncio.timeout(DEADLINE):
        healthy, killed, orphaned = await staying(fork_server), await staying(fork_server), await staying(fork_server)
        stop(fork_server)
        killed.kill()
        assert await killed.exited == -signal.SIGKILL
        cut(orphaned)
        assert await orphaned.exited == Exit.ORPHANED
        assert not healthy.exited.done()
        assert not fork_server.child.exited.done()
        resume(fork_server)
        while not fork_server.can_fork or _children(fork_server.pid).split() != [str(healthy.pid)]:  # noqa: ASYNC110 - see below
            await asyncio.sleep(0.01)
        assert (await facts(await forked(fork_server)))["path"]
        assert not healthy.exited.done()
    await healthy.exited


async def test_no_exit_code_is_read_as_0_while_the_fork_server_hangs() -> None:
    """The kernel shows 0 to a router that is not root, whatever the code was."""
    async with warm_fork_server() as fork_server, asyncio.timeout(DEADLINE):
        worker = await forked(fork_server)
        other = await staying(fork_server)  # so it has started the worker as well
        stop(fork_server)
        worker.send(b"a-token-of-this-test\n")
        assert await worker.exited == UNKNOWN_EXIT
    await other.exited


async def test_a_hanging_fork_server_is_kept_while_its_workers_live_and_reused_if_it_answers() -> None:
    """A worker that it forks too late has no owner: it exits by itself, and is reaped."""
    async with warm_fork_server() as fork_server:
        worker = await forked(fork_server)  # it waits for its token
        stop(fork_server)
        with pytest.raises(ForkFailed, match="does not answer"):
            await forked(fork_server)
        assert fork_server.is_silent
        assert not fork_server.can_fork
        assert not worker.exited.done()
        resume(fork_server)
        async with asyncio.timeout(DEADLINE):
            while not fork_server.can_fork or len(_children(fork_server.pid).split()) > 1:  # noqa: ASYNC110 - /proc cannot be awaited
                await asyncio.sleep(0.01)
        assert (await facts(await forked(fork_server)))["path"]
        assert (await facts(worker))["path"]


async def test_a_worker_that_notices_the_loss_of_its_fork_server_counts_as_killed() -> None:
    """So its requests get another worker, as if it had died with the fork server."""
    async with warm_fork_server() as fork_server:
        async with asyncio.timeout(DEADLINE):
            worker = await staying(fork_server)
            os.kill(fork_server.pid, signal.SIGSTOP)  # it reaps no child
            cut(worker)
            await ended(worker.pid, within=WITHIN)
            os.kill(fork_server.pid, signal.SIGKILL)
            assert await worker.exited == -signal.SIGKILL


@pytest.mark.slow
async def test_a_stopped_fork_server_is_killed_and_waiting_workers_are_executed(
    launcher: ForkingLauncher,
) -> None:
    fork_server = await launcher.warmed()
    fork_server.reply_timeout = 0.3
    os.kill(fork_server.pid, signal.SIGSTOP)
    async with serving(launcher) as worker:
        assert parent(worker.pid) == os.getpid()
        await ended(fork_server.pid, within=WITHIN)
    assert (await launcher.warmed()).pid != fork_server.pid


async def test_a_descriptor_of_one_worker_is_not_held_by_the_next(launcher: ForkingLauncher) -> None:
    """Otherwise the end of its pipes would not be seen, for which the router waits."""
    await launcher.warmed()
    async with serving(launcher) as first, serving(launcher, 2) as second:
        streams = [_inodes(worker.pid) for worker in (first, second)]
        assert streams[0] & streams[1] == set()
        os.kill(first.pid, signal.SIGKILL)
        assert (await first.lost()).exit == -signal.SIGKILL


def _children(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


def _inodes(pid: int) -> set[str]:
    found = {os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
    return {name for name in found if name.startswith(("pipe", "socket"))}


@pytest.mark.slow
async def test_twenty_swaps_leave_nothing_behind(launcher: ForkingLauncher, tmp_path: Path) -> None:
    """No process, descriptor or socket here or in the fork server, and no memory of the fork server."""
    fork_server = await launcher.warmed()

    def state() -> tuple[set[str], set[str], list[str], str]:
        files = [file.name for file in (tmp_path / "run").iterdir()]
        return (
            set(os.listdir("/proc/self/fd")),
            set(os.listdir(f"/proc/{fork_server.pid}/fd")),
            files,
            _children(fork_server.pid),
        )

    async def swap(number: int) -> None:
        async with serving(launcher, number) as worker:
            if number % 5 == 0:
                os.kill(worker.pid, signal.SIGKILL)
                await worker.lost()

    await asyncio.gather(*(swap(number) for number in range(10)))
    before, pages = state(), _resident(fork_server.pid)
    for batch in range(4):
        await asyncio.gather(*(swap(5 * batch + number) for number in range(5)))
    assert state() == before
    assert _resident(fork_server.pid) - pages < 64, "pages of the fork server"


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


@pytest.mark.slow
async def test_a_kill_at_any_moment_leaves_nothing_behind(launcher: ForkingLauncher, journal: Journal) -> None:
    """Fork servers are killed at moments of a load that differ by milliseconds; the next load works."""
    for number in range(5):
        loop, victim = asyncio.get_running_loop(), (await launcher.warmed()).pid
        timer = loop.call_later(0.005 * number, os.kill, victim, signal.SIGKILL)
        with suppress(WorkerLost):
            async with asyncio.timeout(DEADLINE), serving(launcher, number, journal=journal.path) as worker:
                if parent(worker.pid) == victim:
                    await worker.lost()
        timer.cancel()
        await ended(victim, within=WITHIN)
        assert find_orphans() == []
