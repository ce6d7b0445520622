"""The launcher of this machine with real processes: each block ends, and nothing is left of its worker."""

import asyncio
import errno
import json
import os
import signal
import stat
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from router.launch.exit_causes import lost_at_spawn, lost_by_exit
from router.launch.interface import Launcher, Listen, Program, Verb, WorkerLost
from router.launch.local import LocalLauncher
from router.launch.process import UNKNOWN_EXIT, started_pids
from router.launch.process_table import adopt_orphans, find_orphans
from router.launch.worker_client import Exchange, Unreachable, WorkerClientError
from router.launch.worker_process import EXIT_WAIT, LocalWorker, device_names
from router.planner.ledger import Bytes, DeviceId
from tests.fakes import (
    CPU,
    DEADLINE,
    FAKE_ARGV,
    GIB,
    GPU0,
    GPU1,
    MIB,
    FixedDevices,
    Journal,
    ended,
    fake_program,
)  # fmt: skip
from tests.processes.forking import ForkingLauncher, is_there, read_all, request_to
from worker.protocol.argv import Convert, Download, Estimate, Serve
from worker.protocol.events import Event, Exit, Progress, Pulse, Ready

SECRETS = {"HF_TOKEN": "hf_planted", "ROUTER_API_KEY": "sk-planted", "AWS_SECRET_ACCESS_KEY": "aws-planted"}
PLACE: Bytes = {CPU: 64 * MIB}
PROMPT = {"messages": [{"role": "user", "content": "one two three four"}]}
SIGKILL = "SIGKILL: another program sent it, or the kernel, because memory ran out (dmesg shows that)"
WITHIN = 60.0  # seconds after a kill of the router within which its workers exit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def devices() -> FixedDevices:
    return FixedDevices({GPU0: 8 * GIB, GPU1: 8 * GIB, CPU: 16 * GIB})


@pytest.fixture(params=[LocalLauncher, ForkingLauncher], ids=["exec", "fork-server"])
async def launcher(request: pytest.FixtureRequest, folder: Path, devices: FixedDevices) -> AsyncIterator[LocalLauncher]:
    """A launcher whose end leaves neither a process nor a file."""
    environ = {"PATH": os.environ["PATH"], **SECRETS}
    async with request.param(
        devices=devices, runtime_dir=folder, environ=environ, hf_token="hf_given", python_argv=FAKE_ARGV
    ) as found:
        if isinstance(found, ForkingLauncher):
            await found.warmed()
        yield found
    assert traces(folder) == []
    assert find_orphans() == []
    assert started_pids == set()


# For tests that do not depend on the parent.
EXECUTED = pytest.mark.parametrize("launcher", [LocalLauncher], indirect=True, ids=["exec"])


def traces(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir() if file.name != "lock"]


def modes(folder: Path) -> dict[str, int]:
    """The permissions of the folder and its files, by the end of the name."""
    return {file.name.rpartition(".")[2]: stat.S_IMODE(file.stat().st_mode) for file in (folder, *folder.iterdir())}


def ignore(event: Event) -> None:
    pass


def as_launcher(launcher: LocalLauncher) -> Launcher:
    """The launcher as the fleet expects it, for the type checker."""
    return launcher


def serve(
    launcher: LocalLauncher, program: Program, *, place: Bytes = PLACE, listen: Listen = ignore
) -> AbstractAsyncContextManager[LocalWorker]:
    return launcher.serve(program, Serve(snapshot="/", listen="", name=program.model), place, listen)


def post(worker: LocalWorker, body: dict[str, Any], *, token: str = "") -> AbstractAsyncContextManager[Exchange]:
    return request_to(worker, "/v1/chat/completions", body, token=token)


async def lost_at_start(launcher: LocalLauncher, program: Program) -> WorkerLost:
    with pytest.raises(WorkerLost) as raised:
        async with serve(launcher, program):
            raise AssertionError("it got ready")
    return raised.value


# Serving


async def test_a_ready_worker_answers_on_its_socket(launcher: LocalLauncher, folder: Path) -> None:
    async with serve(launcher, fake_program("m")) as worker:
        assert worker.ready.capabilities == ["chat", "completion", "embedding"]
        async with post(worker, PROMPT) as response:
            assert response.status == 200
            assert json.loads(await read_all(response))["choices"][0]["message"]["content"] == "one two three four "
        async with post(worker, PROMPT, token="wrong") as response:
            assert response.status == 401
        assert modes(folder) == {"lock": 0o600, "sock": 0o700, "run": 0o700}
    assert worker.worker_client.closed
    assert not is_there(worker.pid)


async def test_no_secret_reaches_a_worker_and_no_token_its_command_line(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    file = tmp_path / "argv"
    program = fake_program("m", argv_file=str(file))
    async with serve(launcher, program) as worker, request_to(worker, "/fake/environ") as response:
        text = (await read_all(response)).decode()
    assert "planted" not in text
    assert "hf_given" not in text
    assert worker.token not in text + file.read_text()
    env = json.loads(text)
    assert env["HF_HUB_OFFLINE"] == env["OMP_NUM_THREADS"] == "1"


@EXECUTED
async def test_only_a_download_gets_the_hub_token(launcher: LocalLauncher, tmp_path: Path) -> None:
    file = tmp_path / "environ"
    program = fake_program("m", environ_file=str(file))
    await launcher.download(program, Download(repo="org/m", cache=str(tmp_path)), ignore)
    assert json.loads(file.read_text())["HF_TOKEN"] == "hf_given"
    await launcher.estimate(program, Estimate(snapshot="/"))
    assert "HF_TOKEN" not in json.loads(file.read_text())


@EXECUTED
async def test_a_conversion_gets_no_device_and_no_hub(launcher: LocalLauncher, tmp_path: Path) -> None:
    file = tmp_path / "environ"
    program = fake_program("m", environ_file=str(file))
    await launcher.convert(program, Convert(snapshot="/", target=str(tmp_path / "target")), ignore)
    env = json.loads(file.read_text())
    assert (env["CUDA_VISIBLE_DEVICES"], env["HF_HUB_OFFLINE"]) == ("", "1")
    assert "HF_TOKEN" not in env


@EXECUTED
async def test_a_place_is_sent_by_uuid_and_a_measurement_returns_by_device(launcher: LocalLauncher) -> None:
    program = fake_program("m", measured={"cuda:0": 1, "cuda:1": 2, "cpu": 3, "tpu": 4})
    place = {GPU1: GIB, GPU0: GIB, CPU: GIB}
    async with serve(launcher, program, place=place) as worker:
        assert worker.measured == {GPU1: 1, GPU0: 2, CPU: 3}
        async with request_to(worker, "/fake/environ") as response:
            env = json.loads(await read_all(response))
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-fake-1,GPU-fake-0"
    assert list(device_names(place)) == ["cuda:0", "cuda:1", "cpu"]


@EXECUTED
async def test_a_pulse_brings_a_new_measurement(launcher: LocalLauncher) -> None:
    seen: asyncio.Queue[tuple[Event, Mapping[DeviceId, int]]] = asyncio.Queue()
    started: list[LocalWorker] = []

    def record(event: Event) -> None:
        # Before the next pulse, which may bring another figure.
        seen.put_nowait((event, dict(started[0].measured) if started else {}))

    program = fake_program("m", pulse_interval=0.05)
    async with serve(launcher, program, listen=record) as worker:
        started.append(worker)
        while not (isinstance((event := await seen.get())[0], Pulse) and event[1]):
            pass
        pulse, measured = event
        assert isinstance(pulse, Pulse)
        assert measured == {CPU: pulse.measured["cpu"]}


@EXECUTED
async def test_leaving_waits_until_the_driver_has_settled(launcher: LocalLauncher, devices: FixedDevices) -> None:
    async with serve(launcher, fake_program("m")):
        devices.used[CPU] = 5 * GIB
        before = devices.reads
    assert devices.reads >= before + 2
    assert [reading.used for reading in launcher.readings() if reading.id == CPU] == [5 * GIB]


# Starting badly


@EXECUTED
@pytest.mark.parametrize(
    ("code", "cause", "memory", "final"),
    [
        (Exit.USAGE, "load_failed", "", True),
        (Exit.UNUSABLE, "load_failed", "", True),
        (Exit.DEVICE_MEMORY, "oom", "device", False),
        (Exit.POISONED, "crashed", "", False),
        (Exit.HOST_MEMORY, "oom", "host", False),
        (1, "crashed", "", False),
        (0, "crashed", "", False),
        (-signal.SIGSEGV, "crashed", "", False),
    ],
)
async def test_a_failed_start_gives_the_reason(
    launcher: LocalLauncher, code: int, cause: str, memory: str, final: bool
) -> None:
    lost = await lost_at_start(launcher, fake_program("m", die_at_start=code, message="cause of this test"))
    assert (lost.cause, lost.memory, lost.final, lost.exit) == (cause, memory, final, code)
    number = "SIGSEGV" if code < 0 else f"exit code {code}"
    assert lost.message.startswith("m: the worker ")
    assert number in lost.message
    assert lost.message.endswith(": cause of this test")


async def test_without_a_cause_the_last_log_lines_are_reported(launcher: LocalLauncher) -> None:
    lost = await lost_at_start(launcher, fake_program("dies-at-start"))
    assert lost.message == "dies-at-start: the worker ended with exit code 1: fake: told to die at start"


@pytest.mark.parametrize(("number", "remedy"), [(errno.EMFILE, "ulimit -n"), (errno.EAGAIN, "TasksMax=")])
def test_a_process_that_a_limit_prevents_is_lost_with_the_name_of_the_limit(number: int, remedy: str) -> None:
    lost = lost_at_spawn(fake_program("m"), "serve", "python", OSError(number, os.strerror(number)))
    assert lost.message.startswith(f"m: cannot start a process ({os.strerror(number)})")
    assert remedy in lost.message
    assert not lost.final


@EXECUTED
async def test_an_interpreter_that_is_missing_is_named(launcher: LocalLauncher) -> None:
    lost = await lost_at_start(launcher, fake_program("m", python="/no/such/python"))
    assert lost.message == "m: cannot run /no/such/python (No such file or directory); correct `python` in its preset"
    assert lost.final


@EXECUTED
async def test_garbage_on_stdout_is_skipped(launcher: LocalLauncher, caplog: pytest.LogCaptureFixture) -> None:
    events: asyncio.Queue[Event] = asyncio.Queue()
    async with serve(launcher, fake_program("noisy"), listen=events.put_nowait) as worker:
        assert [type(await events.get()) for _ in range(2)] == [Ready, Pulse]
        assert worker.ready.address.startswith("unix:")
        assert worker.ready.n_ctx == 8192
    for part in ("more than 1048576 bytes", "unheard_of", "which is not its socket", "a second ready"):
        assert part in caplog.text


@EXECUTED
@pytest.mark.parametrize(
    ("behaviour", "problem"),
    [({"wrong_address": True}, "its socket does not answer"), ({"health": 500}, "its /health answered 500")],
)
async def test_ready_counts_only_once_it_answers(
    launcher: LocalLauncher, behaviour: dict[str, Any], problem: str
) -> None:
    lost = await lost_at_start(launcher, fake_program("m", **behaviour))
    assert problem in lost.message


@pytest.mark.slow
@EXECUTED
async def test_a_load_that_stalls_is_ended(launcher: LocalLauncher, journal: Journal) -> None:
    stuck = fake_program("stuck", start_timeout=4.0, stuck_progress=True, journal=journal.path)
    lost = await lost_at_start(launcher, stuck)
    assert (lost.cause, lost.exit) == ("load_timeout", None)
    assert lost.message == "stuck: the worker made no progress for 4 s (last: weights, 0 of 1) and was killed"
    assert not is_there(await journal.pid())


@pytest.mark.parametrize("verb", ["serve", "download"])
async def test_a_cancelled_start_or_download_is_killed_at_once(
    launcher: LocalLauncher, journal: Journal, verb: Verb
) -> None:
    program = fake_program("deaf", stop_timeout=1000.0, ignore_sigterm=True, journal=journal.path)

    async def start() -> None:
        async with serve(launcher, program):
            raise AssertionError("it got ready")

    begun = start() if verb == "serve" else launcher.download(program, Download(repo="org/m"), ignore)
    task = asyncio.create_task(begun)
    pid = await journal.pid()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_there(pid)


# Ending


async def test_a_killed_worker_is_lost_and_not_stopped_in_order(launcher: LocalLauncher, journal: Journal) -> None:
    async with serve(launcher, fake_program("m", journal=journal.path)) as worker:
        os.kill(worker.pid, signal.SIGKILL)
        lost = await worker.lost()
        assert (lost.cause, lost.exit) == ("crashed", -9)
        assert lost.message == f"m: the worker was killed by {SIGKILL}"
    assert "stopped" not in journal.lines


@EXECUTED
async def test_a_worker_without_its_socket_finishes_responses_and_is_unreachable(
    launcher: LocalLauncher,
) -> None:
    slowly = PROMPT | {"stream": True, "fake": {"delay": 0.1}}
    async with (
        asyncio.timeout(DEADLINE),
        serve(launcher, fake_program("m")) as worker,
        post(worker, slowly) as answer,
    ):
        os.unlink(worker._address.removeprefix("unix:"))
        with pytest.raises(Unreachable):
            async with post(worker, PROMPT):
                pass
        await worker.unreachable()
        assert (await read_all(answer)).endswith(b"data: [DONE]\n\n")


async def test_a_worker_that_has_exited_is_lost_and_not_unreachable(launcher: LocalLauncher) -> None:
    async with serve(launcher, fake_program("m")) as worker, asyncio.timeout(DEADLINE):
        os.kill(worker.pid, signal.SIGKILL)
        worker.worker_client.unreachable.set()
        out = asyncio.ensure_future(worker.unreachable())
        assert (await worker.lost()).exit == -9
        await asyncio.wait({out}, timeout=2 * EXIT_WAIT)
        assert not out.done()
        out.cancel()


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
async def test_leaving_the_block_stops_the_worker_in_order(
    launcher: LocalLauncher, journal: Journal, error: type[Exception] | None
) -> None:
    with pytest.raises(error) if error else nullcontext():
        async with serve(launcher, fake_program("m", journal=journal.path)) as worker:
            if error:
                raise error
    await journal.line("stopped")
    assert (await worker.lost()).exit == 0


async def test_a_worker_that_ignores_sigterm_is_killed(launcher: LocalLauncher) -> None:
    async with serve(launcher, fake_program("ignores-sigterm", stop_timeout=0.2)) as worker:
        pass
    assert (await worker.lost()).exit == -9


async def test_leaving_cannot_be_cancelled_half_way(launcher: LocalLauncher, journal: Journal) -> None:
    left = asyncio.Event()
    workers: list[LocalWorker] = []

    async def live() -> None:
        async with serve(launcher, fake_program("m", stop_seconds=0.3, journal=journal.path)) as worker:
            workers.append(worker)
            left.set()

    life = asyncio.create_task(live())
    await left.wait()
    for _ in range(20):
        life.cancel()
        await asyncio.sleep(0)
    assert is_there(workers[0].pid)
    with pytest.raises(asyncio.CancelledError):
        await life
    assert not is_there(workers[0].pid)
    await journal.line("stopped")


@pytest.mark.slow
@EXECUTED
async def test_a_wedged_worker_is_killed(launcher: LocalLauncher) -> None:
    async def wedge(number: int, reason: str, **behaviour: Any) -> None:
        program = fake_program("m", number=number, stall_timeout=1.0, pulse_interval=0.05, hang_after=1, **behaviour)
        async with serve(launcher, program) as worker:
            asking = asyncio.ensure_future(_read(worker, PROMPT | {"stream": True}))
            lost = await worker.lost()
            assert (lost.cause, lost.exit) == ("stalled", None)
            assert lost.message.startswith(f"m: the worker {reason} for 1 s")
            with pytest.raises(WorkerClientError):
                await asking
        assert not is_there(worker.pid)

    async with asyncio.TaskGroup() as all_three:
        all_three.create_task(wedge(1, "gave no pulse", silent=True))
        all_three.create_task(wedge(2, "gave no pulse", freezes=True))
        all_three.create_task(wedge(3, "took no step"))


async def _read(worker: LocalWorker, body: dict[str, Any]) -> bytes:
    async with post(worker, body) as response:
        return bytes(await read_all(response))


@pytest.mark.slow
@EXECUTED
async def test_a_pause_of_the_router_itself_kills_no_worker(launcher: LocalLauncher) -> None:
    pulses: asyncio.Queue[Event] = asyncio.Queue()
    program = fake_program("m", stall_timeout=4.0, pulse_interval=0.05)
    async with serve(launcher, program, listen=pulses.put_nowait) as worker:
        os.kill(worker.pid, signal.SIGSTOP)  # as when a whole machine is held
        threading.Event().wait(5.0)  # longer than the stall timeout
        asyncio.get_running_loop().call_later(0.5, os.kill, worker.pid, signal.SIGCONT)
        while not pulses.empty():
            pulses.get_nowait()
        for _ in range(20):
            await pulses.get()
        async with post(worker, PROMPT) as response:
            assert response.status == 200


# Downloads and estimates


@EXECUTED
async def test_a_download_reports_progress_and_its_folder(launcher: LocalLauncher, tmp_path: Path) -> None:
    events: list[Event] = []
    command = Download(repo="org/m", cache=str(tmp_path))
    found = await launcher.download(fake_program("m", load_steps=3), command, events.append)
    assert found == str(tmp_path / "org--m")
    assert [event.done for event in events if isinstance(event, Progress)] == [0, 1, 2]


@EXECUTED
@pytest.mark.parametrize("code", [Exit.NETWORK, 1])
async def test_a_failed_download_gives_the_reason(launcher: LocalLauncher, code: int) -> None:
    program = fake_program("m", die_at_start=code, message="404 Not Found")
    with pytest.raises(WorkerLost) as lost:
        await launcher.download(program, Download(repo="org/m"), ignore)
    assert (lost.value.cause, lost.value.exit) == ("download_failed", code)
    assert lost.value.message.startswith(f"m: the download ended with exit code {code:d}")
    assert lost.value.message.endswith(": 404 Not Found")


@pytest.mark.slow
async def test_silence_ends_a_download_and_time_an_estimate(folder: Path) -> None:
    async with LocalLauncher(
        devices=FixedDevices(),
        runtime_dir=folder,
        environ=os.environ,
        download_silence=1.0,
        estimate_timeout=1.0,
        python_argv=FAKE_ARGV,
    ) as launcher:
        busy = fake_program("m", load_steps=30, load_interval=0.05)
        with pytest.raises(WorkerLost) as late:
            await launcher.estimate(busy, Estimate(snapshot="/"))
        assert late.value.cause == "load_timeout"
        with pytest.raises(WorkerLost) as silent:
            await launcher.download(fake_program("m", deaf=True), Download(demo="m"), ignore)
        assert silent.value.cause == "download_failed"


@pytest.mark.slow
async def test_silence_ends_a_conversion_and_progress_prolongs_it(folder: Path, tmp_path: Path) -> None:
    async with LocalLauncher(
        devices=FixedDevices(), runtime_dir=folder, environ=os.environ, conversion_silence=2.0, python_argv=FAKE_ARGV
    ) as launcher:
        command = Convert(snapshot="/", target=str(tmp_path / "target"))
        busy = fake_program("m", load_steps=50, load_interval=0.05)
        await launcher.convert(busy, command, ignore)
        with pytest.raises(WorkerLost) as silent:
            await launcher.convert(fake_program("m", deaf=True), command, ignore)
        assert silent.value.cause == "load_timeout"


async def test_an_estimate_is_the_workers_event(launcher: LocalLauncher, tmp_path: Path) -> None:
    (tmp_path / "fake.json").write_text('{"estimated": {"weights": [7], "host": 5}}')
    answer = await launcher.estimate(fake_program("m"), Estimate(snapshot=str(tmp_path)))
    assert (answer.weights, answer.host) == ([7], 5)


@EXECUTED
async def test_estimates_are_made_one_at_a_time(launcher: LocalLauncher, journal: Journal) -> None:
    """Their memory is not reserved, so there may not be much of it."""
    endless = fake_program("first", deaf=True, journal=journal.path)
    first = asyncio.create_task(launcher.estimate(endless, Estimate(snapshot="/")))
    await journal.pid()
    second = asyncio.create_task(launcher.estimate(fake_program("second"), Estimate(snapshot="/")))
    await launcher.download(fake_program("beside"), Download(repo="org/m"), ignore)  # as long as an estimate
    assert not second.done()
    first.cancel()
    assert (await second).weights == [64 << 20]
    assert first.cancelled()


@EXECUTED
async def test_a_process_without_a_result_event_is_a_failure_despite_exit_code_0(launcher: LocalLauncher) -> None:
    with pytest.raises(WorkerLost, match="although it was not asked to stop"):
        await launcher.estimate(fake_program("m", die_at_start=0), Estimate(snapshot="/"))


# The launcher itself


async def test_closing_ends_what_still_runs(folder: Path, journal: Journal) -> None:
    program = fake_program("deaf", journal=journal.path)
    async with LocalLauncher(
        devices=FixedDevices(), runtime_dir=folder, environ=os.environ, python_argv=FAKE_ARGV
    ) as launcher:
        starting = asyncio.create_task(lost_at_start(launcher, program))
        pid = await journal.pid()
    assert not is_there(pid)
    assert (await starting).exit == -9
    assert started_pids == set(), "a block that is left late starts no guard"


async def test_kill_all_ends_all_processes_at_once(launcher: LocalLauncher) -> None:
    program = fake_program("ignores-sigterm", stop_timeout=1000.0)
    async with serve(launcher, program) as worker:
        launcher.kill_all()
        assert (await worker.lost()).exit == -9


def test_an_oom_kill_is_distinguished_from_a_crash() -> None:
    verb: Verb = "serve"
    lost = lost_by_exit(fake_program("m"), verb, -9, "", oom_killed=True)
    assert (lost.cause, lost.memory) == ("oom", "host")
    assert lost.message == "m: the worker was killed by the kernel because main memory ran out (SIGKILL)"


def test_log_lines_before_a_kill_are_not_the_reason() -> None:
    line = "WARNING: adapter x cannot be used"
    messages = [
        lost_by_exit(fake_program("m"), "serve", code, line, oom_killed=oom_killed).message
        for code, oom_killed in ((-9, False), (-9, True), (3, False), (UNKNOWN_EXIT, False))
    ]
    assert messages == [
        f"m: the worker was killed by {SIGKILL}; its last line: {line}",
        f"m: the worker was killed by the kernel because main memory ran out (SIGKILL); its last line: {line}",
        f"m: the worker ended with exit code 3 (the model cannot be used): {line}",
        f"m: the worker ended with an unknown exit code: {line}",
    ]


# The router is killed


class Spawner:
    """`spawner.py` as a child: another router, reduced to its launcher."""

    def __init__(self, process: asyncio.subprocess.Process):
        self.process = process

    async def reached(self, stage: str) -> None:
        assert self.process.stdout is not None
        while (line := (await self.process.stdout.readline()).decode().strip()) != stage:
            assert line, f"it exited before {stage!r}"

    async def killed(self) -> None:
        self.process.kill()
        await self.process.wait()


@pytest.fixture
async def spawn(folder: Path) -> AsyncIterator[Callable[..., Any]]:
    spawners: list[Spawner] = []

    async def start(verb: str, behaviour: dict[str, Any], **plan: Any) -> Spawner:
        program = str(Path(__file__).with_name("spawner.py"))
        argument = json.dumps({"verb": verb, "behaviour": behaviour, **plan})
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", program, str(folder), argument, stdout=asyncio.subprocess.PIPE
        )
        spawners.append(Spawner(process))
        return spawners[-1]

    yield start
    for spawner in spawners:
        if spawner.process.returncode is None:
            await spawner.killed()


PHASES: dict[str, dict[str, Any]] = {
    "loading": {"verb": "serve", "behaviour": {"deaf": True}},
    "idle": {"verb": "serve", "behaviour": {}, "until": "ready"},
    "answering": {
        "verb": "serve",
        "behaviour": {"hang_after": 1},
        "request": PROMPT | {"stream": True},
        "until": "answering",
    },
    "stopping": {"verb": "serve", "behaviour": {"ignore_sigterm": True}, "leave": True, "until": "leaving"},
    "downloading": {"verb": "download", "behaviour": {"deaf": True}},
    "estimating": {"verb": "estimate", "behaviour": {"deaf": True}},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "forks"),
    [*((phase, False) for phase in PHASES), ("loading", True), ("answering", True), ("estimating", True)],
)
async def test_no_child_outlives_the_router(
    phase: str, forks: bool, spawn: Callable[..., Any], journal: Journal, folder: Path
) -> None:
    plan = PHASES[phase] | {"forks": forks}
    until = plan.pop("until", "")
    plan["behaviour"] = plan["behaviour"] | {"journal": journal.path, "grandchild": "group", "ignore_sigterm": True}
    router = await spawn(**plan)
    worker, grandchild = await journal.pid(), await journal.pid("grandchild")
    if until:
        await router.reached(until)
    await router.killed()
    await ended(worker, within=WITHIN)
    await ended(grandchild, within=WITHIN)
    async with LocalLauncher(devices=FixedDevices(), runtime_dir=folder, environ={}):
        assert traces(folder) == []


@pytest.mark.slow
async def test_a_router_that_dies_while_its_worker_starts_leaves_nothing(
    spawn: Callable[..., Any], journal: Journal
) -> None:
    """The program kills its parent before it attaches, so only its own check of the parent ends it."""
    router = await spawn("serve", {"journal": journal.path}, kills_parent=True)
    assert await router.process.wait() == -signal.SIGKILL
    with pytest.raises(TimeoutError):
        await journal.line("started", within=1.0)  # a busy machine only misses a failure


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    before = adopt_orphans(enabled=False)
    adopt_orphans(enabled=before)
    yield
    after = adopt_orphans(enabled=before)
    assert after == before, "a launcher gives back what it changed of this process"


# Two steps


def prepare(launcher: LocalLauncher, program: Program) -> AbstractAsyncContextManager[LocalWorker]:
    return launcher.prepare(program, Serve(snapshot="/", listen="", name=program.model), ignore)


LOAD = Serve(snapshot="/", listen="", reserved='{"cuda:0": 1}')


async def test_an_early_process_gets_its_devices_only_when_it_starts(launcher: LocalLauncher, journal: Journal) -> None:
    program = fake_program("m", journal=journal.path, prepared_mib=7, measured={"cuda:0": 3})
    async with prepare(launcher, program) as early:
        await early.prepared()
        assert early.measured == {CPU: 7 * MIB}
        assert f"started {early.pid}" in journal.lines
        assert "told to go" not in journal.lines
        worker = await early.load(LOAD, {GPU1: GIB, CPU: GIB})
        assert worker.pid == early.pid
        assert worker.measured == {GPU1: 3}, "its measurement from before does not count any more"
        async with request_to(worker, "/fake/environ") as response:
            assert json.loads(await read_all(response))["CUDA_VISIBLE_DEVICES"] == "GPU-fake-1"
        async with post(worker, PROMPT) as response:
            assert response.status == 200
    assert not is_there(worker.pid)
    assert journal.lines[-1] == "stopped", "in order, like any worker that served"


@EXECUTED
async def test_the_grant_may_come_before_the_process_is_prepared(launcher: LocalLauncher) -> None:
    async with prepare(launcher, fake_program("m")) as early:
        worker = await early.load(LOAD, PLACE)
        assert worker.ready.capabilities


async def test_an_early_process_that_is_not_needed_leaves_nothing(launcher: LocalLauncher) -> None:
    async with prepare(launcher, fake_program("m", grandchild="session")) as early:
        await early.prepared()
    assert not is_there(early.pid)


@EXECUTED
async def test_an_early_process_that_dies_gives_the_reason(launcher: LocalLauncher) -> None:
    async with prepare(launcher, fake_program("unusable")) as early:
        with pytest.raises(WorkerLost, match="names no architecture") as lost:
            await early.prepared()
        assert lost.value.final
        with pytest.raises(WorkerLost, match="names no architecture"):
            await early.load(LOAD, PLACE)


@EXECUTED
async def test_an_early_process_without_progress_is_killed(launcher: LocalLauncher) -> None:
    async with prepare(launcher, fake_program("deaf", start_timeout=0.2)) as early:
        with pytest.raises(WorkerLost, match="made no progress"):
            await early.prepared()


async def test_the_reservation_of_a_load_counts_as_used_for_another_router(tmp_path: Path, journal: Journal) -> None:
    totals, go = {CPU: 16 * GIB}, tmp_path / "go"
    environ = {"PATH": os.environ["PATH"]}
    ours, theirs = [
        LocalLauncher(
            devices=FixedDevices(totals), runtime_dir=tmp_path / name, environ=environ, python_argv=FAKE_ARGV,
            shared_folder=tmp_path / "shared",
        )
        for name in ("ours", "theirs")
    ]  # fmt: skip

    async def used() -> int:
        return (await theirs.refresh())[0].used

    async with ours, theirs:
        program = fake_program("m", journal=journal.path, hold_load=str(go), measured={"cpu": 2 * GIB})
        async with asyncio.TaskGroup() as group:
            ready, over = asyncio.Event(), asyncio.Event()

            async def live() -> None:
                async with serve(ours, program, place={CPU: 3 * GIB}):
                    ready.set()
                    await over.wait()

            group.create_task(live())
            await journal.line("started")
            assert await used() == 3 * GIB
            go.touch()
            await ready.wait()
            assert await used() == GIB, "the driver shows what it has taken by now"
            over.set()
        assert await used() == 0
