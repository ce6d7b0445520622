"""The page locker with real files: it reads and locks them, may be killed at any time, and leaves nothing."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.launch import page_lock
from router.launch.interface import NotLocked
from router.launch.page_lock import lockable
from tests.children import await_end
from tests.fakes import DEADLINE

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]
LOCKS = pytest.mark.skipif((lockable() or 1 << 60) < 40 * MIB, reason="this user may not lock 40 MiB of memory")


@pytest.fixture(autouse=True)
async def others() -> AsyncIterator[set[int]]:
    """The children of this process that other tests share. In the end there are no further ones."""
    before = _children()
    yield before
    assert _children() == before


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A file of 33 MiB and three bytes that is not in the page cache."""
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(MIB) * 33 + b"end")
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return str(path)


def status(pid: int, name: str) -> int:
    """A number of bytes of a process, by its name in proc_pid_status(5)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {name}")


def _children() -> set[int]:
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


@LOCKS
async def test_files_are_locked_in_memory_for_the_length_of_the_block(others: set[int], file: str) -> None:
    async with asyncio.timeout(DEADLINE):
        async with page_lock.lock([file]):
            [locker] = _children() - others
            assert status(locker, "VmLck") >= 33 * MIB
            assert status(locker, "RssAnon") < 12 * MIB, "it holds no buffer for reads: each sleeping model has one"
        assert _children() == others, "the process that held the lock is gone"


async def test_prefetch_reports_its_bytes(file: str) -> None:
    assert await asyncio.wait_for(page_lock.read([file, file]), DEADLINE) == 2 * (33 * MIB + 3)


async def test_an_empty_file_and_no_file_are_locked(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for files in ([str(tmp_path / "empty")], []):
        async with asyncio.timeout(DEADLINE), page_lock.lock(files):
            pass


async def test_an_unreadable_file_is_reported(file: str) -> None:
    with pytest.raises(NotLocked, match="No such file"):
        await asyncio.wait_for(page_lock.read([file, file + "-not"]), DEADLINE)
    with pytest.raises(NotLocked, match="No such file"):
        async with page_lock.lock([file + "-not"]):
            raise AssertionError("it was held")


async def test_a_cancelled_caller_ends_the_read_also_of_a_process_that_is_stopped(others: set[int], file: str) -> None:
    reading = asyncio.create_task(page_lock.read([file] * 2000))
    async with asyncio.timeout(DEADLINE):
        while _children() == others:  # noqa: ASYNC110 - nothing reports its start
            await asyncio.sleep(0)
        [locker] = _children() - others
        os.kill(locker, signal.SIGSTOP)
        reading.cancel()
        await asyncio.wait({reading})
    assert reading.cancelled()
    assert _children() == others


@LOCKS
async def test_the_user_of_a_killed_page_locker_is_notified(others: set[int], file: str) -> None:
    async with asyncio.timeout(DEADLINE), page_lock.lock([file]) as files:
        [locker] = _children() - others
        os.kill(locker, signal.SIGKILL)
        assert str(await files.lost()) == "the process that locked the files has ended"


async def test_a_page_locker_that_is_killed_at_work_is_reported(others: set[int], file: str) -> None:
    reading = asyncio.create_task(page_lock.read([file] * 2000))
    async with asyncio.timeout(DEADLINE):
        while _children() == others:  # noqa: ASYNC110 - nothing reports its start
            await asyncio.sleep(0)
        [locker] = _children() - others
        os.kill(locker, signal.SIGKILL)
        with pytest.raises(NotLocked, match="the page locker has exited"):
            await reading


def test_a_lack_of_descriptors_is_reported_and_costs_none(file: str) -> None:
    code = (
        "import asyncio, os, resource, sys, uvloop\n"
        "from router.launch.interface import NotLocked\n"
        "from router.launch.page_lock import read\n"
        "def used():\n"
        "    return [number for number in range(99) if os.path.exists(f'/proc/self/fd/{number}')]\n"
        "async def main():\n"
        "    await read([])\n"
        "    before, most = used(), max(used()) + 1\n"
        "    for free in range(12):\n"
        "        resource.setrlimit(resource.RLIMIT_NOFILE, (most + free, 99))\n"
        "        try:\n"
        "            await read([])\n"
        "            print('read')\n"
        "        except NotLocked as error:\n"
        "            print(error)\n"
        "        assert used() == before, free\n"
        "uvloop.run(main())"
    )
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert set(lines) == {"the page locker cannot be started: Too many open files", "read"}
    assert lines == sorted(lines, reverse=True)


@LOCKS
def test_a_page_locker_ends_with_its_router(file: str) -> None:
    code = (
        "import asyncio, os, sys; from router.launch.page_lock import lock\n"
        "async def main():\n"
        "    async with lock([sys.argv[1]]):\n"
        "        print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)\n"
        "        os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())"
    )
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-P", "-c", code, file], env=env, capture_output=True, check=False)
    await_end(int(done.stdout))
