"""One child process: its events, log and exit, and the end of all processes that it started."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.launch.process import EVENT_BATCH_INTERVAL, LOG_BURST, Child, Lines, Log, Pipes, uncancelled
from router.launch.process_table import adopt_orphans, end_orphans
from tests.fakes import DEADLINE
from tests.processes.forking import is_there
from worker.protocol.events import MAX_EVENT_BYTES, Event, Progress, RequestEnded

ROOT = str(Path(__file__).resolve().parents[2])
SUPERVISED = (
    "import os, sys; from worker.program import supervision; from worker.protocol import events\n"
    "channel = supervision.attach(supervised=True, parent_pid=os.getppid())\n"
)
WAIT = "import signal; signal.pause()\n"
TOKEN = "a-token-of-this-test"
TAG = "0123456789ab"


@asynccontextmanager
async def running(
    code: str, *, secrets: tuple[str, ...] = (), tag: str = TAG, batch_interval: float = EVENT_BATCH_INTERVAL
) -> AsyncIterator[tuple[Child, asyncio.Queue[Event]]]:
    """A child that runs `code` and has its token, and its events."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": ROOT, "FLEET_WORKER": tag}
    events: asyncio.Queue[Event] = asyncio.Queue()
    output = Log("m", "m#1", secrets=secrets)
    argv = [sys.executable, "-P", "-c", code, f"--listen=unix:/run/{tag}.sock"]
    child = Child.spawn(argv, env, name="m#1", log=output, private=True)
    child.batch_interval = batch_interval
    try:
        child.on_event = events.put_nowait
        child.send(TOKEN.encode() + b"\n")
        async with asyncio.timeout(DEADLINE):
            yield child, events
    finally:
        await uncancelled(child.end())
        assert await end_orphans(child.pid, tag) == []


async def number(events: "asyncio.Queue[Event]") -> int:
    """The number in the next progress event."""
    event = await events.get()
    assert isinstance(event, Progress)
    return event.done


@given(st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b".")), max_size=8), st.data())
def test_lines_do_not_depend_on_how_the_bytes_are_split(lines: list[bytes], data: st.DataObject) -> None:
    text = b"\n".join(lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    splitter = Lines(8)
    found = [line for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) for line in splitter.feed(text[a:b])]
    found += splitter.end()
    expected = [line[:9] for line in text.split(b"\n")]
    if expected[-1] == b"":
        expected.pop()
    assert found == expected


async def test_a_child_starts_in_the_routers_folder_or_if_that_was_deleted_in_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = tmp_path / "ours"
    ours.mkdir()
    monkeypatch.chdir(ours)
    says_where = "import os, sys; sys.stderr.write(os.getcwd()); sys.exit(1)"
    async with running(says_where) as (child, _):
        await child.exited
        assert child.cause == str(ours)
    ours.rmdir()
    async with running(says_where) as (child, _):
        await child.exited
        assert child.cause == "/"


async def test_a_line_that_is_no_event_is_skipped() -> None:
    noise = [b"x" * (MAX_EVENT_BYTES + 1), b"Loading: 100%", b'{"event":"unheard_of"}', b"\xff", b"[" * 5000]
    noise += [b'{"event":"pulse","steps":"many","running":0,"waiting":0,"measured":{}}', b'{"event":"ready"}', b""]
    code = (
        "import os\n"
        "def write(line):\n"
        "    while line: line = line[os.write(1, line):]\n"
        f"for line in {[line if len(line) < 9999 else len(line) for line in noise]!r}:\n"
        "    write(b'x' * line if isinstance(line, int) else line); write(b'\\n')\n"
        'write(b\'{"event":"progress","stage":"weights","done":7}\')'
    )
    async with running(code) as (child, events):
        assert await number(events) == 7
        assert await child.exited == 0
        assert events.empty()


# Reads the token; `end` sends events of requests that ended.
ENDING = """
import os, sys
def end(*ids):
    for id in ids: os.write(1, b'{"event":"request_ended","id":"%d"}\\n' % id)
sys.stdin.readline()
"""


async def test_request_events_close_together_are_received_together() -> None:
    """The second one begins batching. None is lost, even if the worker exits before the next batch."""
    code = ENDING + (
        "end(1); sys.stdin.readline(); end(2); sys.stdin.readline(); end(3); end(4); end(5)\n"
        "print('done', file=sys.stderr, flush=True); sys.stdin.readline()"
    )
    async with running(code, batch_interval=3600.0) as (child, events):
        for id in ("1", "2"):
            assert await events.get() == RequestEnded(id=id)
            child.send(b"go on\n")
        while child.cause != "done":  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert events.empty()
        child.send(b"go on\n")
        assert await child.exited == 0
        assert [events.get_nowait() for _ in range(events.qsize())] == [RequestEnded(id=id) for id in ("3", "4", "5")]


@pytest.mark.parametrize("interval", [0.0, 0.001, EVENT_BATCH_INTERVAL])
async def test_every_request_event_is_received_at_any_rate(interval: float) -> None:
    code = ENDING + "for id in range(100): end(id, -id); sys.stdin.readline()"
    async with running(code, batch_interval=interval) as (child, events):
        for id in range(100):
            assert [await events.get(), await events.get()] == [RequestEnded(id=f"{sign * id}") for sign in (1, -1)]
            child.send(b"go on\n")
        assert await child.exited == 0
        assert events.empty()


async def test_no_secret_and_no_control_character_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    code = "import sys; print(f'\\x1b[31mtoken {sys.stdin.readline()[:-1]} and sesame\\r\\x07end', file=sys.stderr)"
    with caplog.at_level(logging.INFO, "worker.m"):
        async with running(code, secrets=(TOKEN, "sesame")) as (child, _):
            await child.exited
            assert child.cause == "\\x07end"
    assert "m#1: \\x1b[31mtoken *** and ***" in caplog.messages
    assert TOKEN not in caplog.text


async def test_log_lines_beyond_the_rate_limit_are_counted_and_the_last_one_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    code = "import sys; [print('line', n, file=sys.stderr) for n in range(20_000)]"
    with caplog.at_level(logging.INFO, "worker.m"):
        async with running(code) as (child, _):
            await child.exited
            assert child.cause == "line 19999"
    assert len(caplog.messages) < LOG_BURST + 200
    assert any("lines left out" in message for message in caplog.messages)


async def test_events_of_an_orderly_stop_are_received() -> None:
    code = (
        "import signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before there is a thread that does not know\n"
        f"{SUPERVISED}"
        "channel.send(events.Progress(stage='here', done=1))\n"
        "signal.sigwait({signal.SIGTERM})\n"
        "channel.send(events.Progress(stage='bye', done=2))\n"
    )
    async with running(code) as (child, events):
        assert await number(events) == 1
        await child.stop(DEADLINE)
        assert child.exited.result() == 0
        assert await number(events) == 2


GRANDCHILD = (
    "import os, subprocess, sys\n"
    "deaf = 'import signal, sys; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()'\n"
    "child = subprocess.Popen([sys.executable, '-ISc', deaf], stdout=subprocess.PIPE, {how})\n"
    "child.stdout.readline(); channel.send(events.Progress(stage='grandchild', done=child.pid))\n"
)
# Forked twice, in a session of its own, with a child of its own: nothing links it to the worker but descent.
DAEMON = (
    "reader, writer = os.pipe()\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork() == 0:\n"
    "        inner = os.fork()\n"
    "        if inner: os.write(writer, b'%d %d' % (os.getpid(), inner))\n"
    "        import signal; signal.pause()\n"
    "    os._exit(0)\n"
    "os.wait()\n"
    "for pid in os.read(reader, 100).split(): channel.send(events.Progress(stage='daemon', done=int(pid)))\n"
)


@pytest.fixture
def _adopting() -> Iterator[None]:
    had = adopt_orphans()
    yield
    adopt_orphans(enabled=had)


@pytest.mark.usefixtures("_adopting")
@pytest.mark.parametrize(
    ("how", "end"),
    [
        ("", "exit"),
        ("", "crash"),
        ("", "stop"),
        ("start_new_session=True", "stop"),
        ("process_group=0, env={}", "stop"),
    ],
)
async def test_grandchildren_end_with_the_child(how: str, end: str) -> None:
    last = {"exit": "sys.exit(0)", "crash": "os.kill(os.getpid(), 11)", "stop": WAIT}[end]
    async with running(SUPERVISED + GRANDCHILD.replace("{how}", how) + last) as (child, events):
        grandchild = await number(events)
        if end == "stop":
            await child.stop(DEADLINE)
        await child.exited
        await end_orphans(child.pid, TAG)
        assert not is_there(grandchild)


@pytest.mark.usefixtures("_adopting")
async def test_orphans_of_other_workers_and_foreign_processes_are_not_killed() -> None:
    stranger = await asyncio.create_subprocess_exec("sleep", "1000", start_new_session=True)
    try:
        async with running(SUPERVISED + DAEMON + WAIT) as (other, events):
            daemons = [await number(events), await number(events)]
            async with running("pass", tag="fedcba987654") as (child, _):
                await child.exited
            assert all(is_there(pid) for pid in daemons)
            assert not other.exited.done()
            assert stranger.returncode is None
        assert not any(is_there(pid) for pid in daemons)
    finally:
        stranger.kill()
        assert await stranger.wait() == -signal.SIGKILL


async def test_an_unreaped_ended_process_is_not_reported_as_stuck(caplog: pytest.LogCaptureFixture) -> None:
    """The message names the fork server, which does not answer, and not a driver."""
    process = os.posix_spawn("/bin/sleep", ["sleep", "600"], {}, setsid=True)  # noqa: ASYNC221 - returns at once
    has_ended, reports = asyncio.Event(), []

    def reap(pid: int, report: Callable[[int], None]) -> None:
        reports.append(report)
        has_ended.set()

    child = Child(process, Pipes(), "m#1", Log("m", "m#1"), reap)
    child.kill()
    async with asyncio.timeout(DEADLINE):
        await has_ended.wait()
        ending = asyncio.create_task(child.end(0.01))
        while "m#1: process" not in caplog.text:
            await asyncio.wait({ending}, timeout=0.01)
        reports[0](os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))  # noqa: ASYNC222 - it has ended
        await ending
    assert "has ended, but the fork server that forked it has not reaped it" in caplog.text
    assert "stuck" not in caplog.text
