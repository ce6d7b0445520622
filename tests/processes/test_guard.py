"""The guard kills the process groups that its router leaves behind, and no group that the router has removed."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.launch.process_table import Guard

WITHIN = 60.0


@pytest.fixture
def group() -> Iterator["subprocess.Popen[bytes]"]:
    """A process in a group of its own."""
    yield from _group()


@pytest.fixture
def other() -> Iterator["subprocess.Popen[bytes]"]:
    yield from _group()


def _group() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:
        yield process
        process.kill()


def test_a_closed_guard_kills_all_groups_that_it_knows(
    group: "subprocess.Popen[bytes]", other: "subprocess.Popen[bytes]"
) -> None:
    guard = Guard()
    guard.add(group.pid)
    guard.add(other.pid)
    guard.remove(other.pid)
    guard.remove(other.pid)
    guard.close()
    assert group.wait(WITHIN) == -signal.SIGKILL
    assert other.poll() is None


def test_a_router_that_is_killed_leaves_no_group(group: "subprocess.Popen[bytes]") -> None:
    code = (
        "import os, sys; from router.launch.process_table import Guard\n"
        "guard = Guard(); guard.add(int(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    env = {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "PATH": os.environ["PATH"]}
    subprocess.run([sys.executable, "-P", "-c", code, str(group.pid)], env=env, check=False)
    assert group.wait(WITHIN) == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_guard_ignores_signals_for_the_router(number: signal.Signals, group: "subprocess.Popen[bytes]") -> None:
    guard = Guard()
    guard.add(group.pid)
    os.kill(guard.pid, number)
    guard.close()
    assert group.wait(WITHIN) == -signal.SIGKILL


def test_a_dead_guard_is_replaced_and_the_new_one_knows_all_groups(
    group: "subprocess.Popen[bytes]", other: "subprocess.Popen[bytes]"
) -> None:
    guard = Guard()
    guard.add(group.pid)
    first = guard.pid
    os.kill(first, signal.SIGKILL)
    _ended(first)
    guard.add(other.pid)
    assert guard.pid != first
    guard.close()
    assert group.wait(WITHIN) == other.wait(WITHIN) == -signal.SIGKILL


def test_a_stopped_guard_does_not_delay_the_routers_exit() -> None:
    guard = Guard()
    os.kill(guard.pid, signal.SIGSTOP)
    guard.close()


def test_a_stopped_guard_blocks_nothing_and_is_replaced_when_its_pipe_is_full(
    group: "subprocess.Popen[bytes]",
) -> None:
    guard = Guard()
    guard.add(group.pid)
    first = guard.pid
    os.kill(first, signal.SIGSTOP)
    for _ in range(1 << 16):  # a pipe holds so many bytes
        guard.add(group.pid)
        if guard.pid != first:
            break
    assert guard.pid != first
    _ended(first)
    guard.close()
    assert group.wait(WITHIN) == -signal.SIGKILL


def _ended(pid: int) -> None:
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    assert poll.poll(WITHIN * 1000)
    os.close(watch)
