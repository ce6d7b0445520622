"""The guard kills what its router leaves behind, and nothing that the router has already buried."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.launch.reaper import Guard

WITHIN = 60.0


@pytest.fixture
def group() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that heeds nothing, in a group of its own."""
    yield from _group()


@pytest.fixture
def other() -> Iterator["subprocess.Popen[bytes]"]:
    yield from _group()


def _group() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:
        yield process
        process.kill()


def test_its_end_is_the_end_of_all_groups_that_it_knows(
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
        "import os, sys; from router.launch.reaper import Guard\n"
        "guard = Guard(); guard.add(int(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    env = {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "PATH": os.environ["PATH"]}
    subprocess.run([sys.executable, "-P", "-c", code, str(group.pid)], env=env, check=False)
    assert group.wait(WITHIN) == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_it_heeds_no_signal_that_is_meant_for_the_router(
    number: signal.Signals, group: "subprocess.Popen[bytes]"
) -> None:
    guard = Guard()
    guard.add(group.pid)
    os.kill(guard.pid, number)
    guard.close()
    assert group.wait(WITHIN) == -signal.SIGKILL


def test_a_dead_guard_is_replaced_by_one_that_knows_as_much(
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


def test_a_stopped_guard_does_not_hold_up_the_routers_end() -> None:
    guard = Guard()
    os.kill(guard.pid, signal.SIGSTOP)
    guard.close()


def test_a_stopped_guard_blocks_nothing_and_is_replaced_when_far_behind(
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
