"""Supervision with real processes: a worker ends with its router, however either of them ends.

Each child is a few lines that attach first and then do what the test is about.
"""

import contextlib
import gc
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.children import TOKEN, Child, await_end, python
from worker.program import supervision
from worker.protocol.events import Exit, Failed, Progress, Pulse

STDIN = f"{TOKEN}\n".encode()
ATTACH = (
    "import os, sys\n"
    "from worker.program import supervision\n"
    "channel = supervision.attach(supervised=True, parent_pid=int(sys.argv[1]))\n"
)
SEND_PID = "from worker.protocol import events\nchannel.send(events.Progress(stage='pid', done=os.getpid()))\n"
WAIT = "import threading\nthreading.Event().wait()\n"
WAIT_IN_C = "import ctypes\nwhile True: ctypes.PyDLL(None).pause()\n"  # PyDLL: the interpreter lock stays held


def supervised(code: str, *, spawner: int | None = None, stdin: bytes = STDIN, pass_fds: Sequence[int] = ()) -> Child:
    argv = python("-c", ATTACH + code, str(os.getpid() if spawner is None else spawner))
    return Child(argv, stdin=stdin, pass_fds=pass_fds)


@contextlib.contextmanager
def child_of_another(code: str) -> Iterator[tuple[Child, int]]:
    """A spawner, and the pid of its supervised child, which runs `code`.

    The child's stdin stays open when the spawner dies, so that only the parent's death itself can end it.
    """
    reader, writer = os.pipe()
    os.write(writer, STDIN)
    program = (
        "import os, subprocess, sys, threading\n"
        f"code = {ATTACH + SEND_PID + code!r}\n"
        f"subprocess.Popen([sys.executable, '-P', '-c', code, str(os.getpid())], stdin={reader})\n"
        "threading.Event().wait()\n"
    )
    pid = 0
    try:
        with Child(python("-c", program), pass_fds=[reader]) as spawner:
            pid = spawner.event(Progress).done
            yield spawner, pid
    finally:
        os.close(reader)
        os.close(writer)


def test_a_worker_dies_with_its_spawner_even_while_c_code_holds_the_interpreter() -> None:
    with child_of_another(WAIT_IN_C) as (spawner, pid):
        spawner.signal(signal.SIGKILL)
        await_end(pid)


def test_the_end_of_stdin_ends_a_worker_as_orphaned() -> None:
    with supervised(SEND_PID + WAIT) as child:
        child.event(Progress)
        child.close_stdin()
        assert child.exit() == Exit.ORPHANED


def test_a_worker_receives_the_first_line_after_the_token_and_no_other() -> None:
    send_line = "channel.send(events.Failed(message=channel.receive_line().decode()))\n"
    with supervised(SEND_PID + send_line + send_line, stdin=STDIN + b"go") as child:
        child.event(Progress)
        child.send(b" on\nnoise\n")
        assert [child.event(Failed).message for _ in range(2)] == ["go on", "go on"]


def test_a_worker_of_another_parent_ends_as_orphaned() -> None:
    with supervised(WAIT, spawner=os.getppid()) as child:
        assert child.exit() == Exit.ORPHANED


def test_stdin_that_ends_before_the_token_ends_the_worker() -> None:
    with supervised(WAIT, stdin=b"half a tok") as child:
        child.close_stdin()
        assert child.exit() == Exit.ORPHANED


def test_output_of_libraries_does_not_reach_the_event_channel() -> None:
    code = (
        "print('from print', flush=True); os.write(1, b'from C\\n'); os.system('echo from a child; cat')\n"
        "from worker.protocol import events\nchannel.send(events.Failed(message=channel.token))\n"
    )
    with supervised(code) as child:
        assert child.events() == [Failed(message=TOKEN)], "the first line of stdin"
        assert child.exit() == 0
        assert child.log.split("\n")[:3] == ["from print", "from C", "from a child"]


def test_a_supervised_process_raises_its_oom_score_leaves_no_core_and_stays_readable() -> None:
    code = (
        "import ctypes\nfrom worker.protocol import events\n"
        "score = int(open('/proc/self/oom_score_adj').read())\n"
        "read = ctypes.CDLL(None).prctl\n"
        "peak = [line for line in open('/proc/self/status') if line.startswith('VmHWM')]\n"
        "channel.send(events.Progress(stage=f'{read(3)} {read(39, 0, 0, 0, 0)} {peak[0]}', done=score))\n" + WAIT
    )
    before = int(Path("/proc/self/oom_score_adj").read_text())
    with supervised(code) as child:
        event = child.event(Progress)
        assert event.done == min(1000, before + supervision.OOM_SCORE)
        assert event.stage.startswith("0 1 VmHWM"), "PR_GET_DUMPABLE, PR_GET_NO_NEW_PRIVS, and its own peak"
        assert int(Path(f"/proc/{child.pid}/statm").read_text().split()[1]) > 0


def test_a_full_pipe_drops_pulses_and_delays_everything_else() -> None:
    pulses = 20_000  # about 1.5 MB, many times the pipe's size
    reader, writer = os.pipe()
    code = (
        "from worker.protocol import events\n"
        f"for step in range({pulses}):\n"
        "    channel.send(events.Pulse(steps=step, running=0, waiting=0, measured={'cpu': 1}))\n"
        f"os.close({writer})\n"
        "channel.send(events.Failed(message='x' * 300_000))\n"
        "channel.send(events.Failed(message='the end'))\n"
    )
    with supervised(code, pass_fds=[writer]) as child:
        os.close(writer)
        assert os.read(reader, 1) == b"", "end of file: all pulses were sent, and none was read"
        os.close(reader)
        events = child.events()  # each one decodes: no line is cut
        assert child.exit() == 0
    steps = [event.steps for event in events if isinstance(event, Pulse)]
    assert 0 < len(steps) < pulses
    assert steps == list(range(len(steps))), "the pipe was full from there on"
    assert [len(event.message) for event in events if isinstance(event, Failed)] == [300_000, 7]


def test_a_pulse_too_long_for_one_write_is_whole_all_the_same() -> None:
    code = (
        "from worker.protocol import events\n"
        "measured = {f'device {number}': number for number in range(10_000)}\n"  # 270 KB: a pipe holds 64
        "for step in range(5): channel.send(events.Pulse(steps=step, running=0, waiting=0, measured=measured))\n"
        "channel.send(events.Failed(message='the end'))\n"
    )
    with supervised(code) as child:
        assert Failed(message="the end") in child.events()  # each one decodes
        assert child.exit() == 0


def test_lines_of_many_threads_stay_whole() -> None:
    code = (
        "import threading\nfrom worker.protocol import events\n"
        "def send(name):\n"
        "    for step in range(50): channel.send(events.Progress(stage=name * 3000, done=step))\n"
        "threads = [threading.Thread(target=send, args=(name,)) for name in 'abcd']\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
    )
    with supervised(code) as child:
        events = child.events()
        assert child.exit() == 0
    received = [(event.stage[0], event.done) for event in events if isinstance(event, Progress)]
    assert sorted(received) == [(name, step) for name in "abcd" for step in range(50)]


def test_a_router_that_stops_reading_for_good_ends_the_worker() -> None:
    code = "from worker.protocol import events\nwhile True: channel.send(events.Progress(stage='x'))\n"
    with supervised(code) as child:
        child.event(Progress)
        child.close_stdout()
        assert child.exit() == Exit.ORPHANED


def test_an_unsupervised_worker_sends_events() -> None:
    code = (
        "import os\nfrom worker.program import supervision\nfrom worker.protocol import events\n"
        "channel = supervision.attach(supervised=False)\nprint('noise', flush=True)\n"
        "channel.send(events.Failed(message=channel.token))\n"
    )
    with Child(python("-c", code)) as child:
        assert child.events() == [Failed(message="")]
        assert child.exit() == 0


def test_attaching_comes_before_large_imports() -> None:
    code = "os.write(2, repr(sorted({'json', 'dataclasses', 'inspect'} & set(sys.modules))).encode())"
    with supervised(code) as child:
        assert child.exit() == 0
        assert child.log == "[]"
    assert supervision.ORPHANED == Exit.ORPHANED


def test_imports_make_no_full_collection() -> None:
    before, full = gc.get_threshold(), gc.get_stats()[2]["collections"]
    with supervision.importing():
        kept: list[list[int]] = [[] for _ in range(1_000_000)]
        assert gc.get_stats()[2]["collections"] == full
    assert gc.get_threshold() == before
    assert len(kept) == 1_000_000
