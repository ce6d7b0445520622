"""The page locker with real files: it reads and locks them, is replaced when it dies, and leaves nothing."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.launch.interface import NotLocked
from router.launch.page_lock import PageLocker, lockable
from tests.children import await_end
from tests.fakes import DEADLINE

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]
LOCKS = pytest.mark.skipif((lockable() or 1 << 60) < 40 * MIB, reason="this user may not lock 40 MiB of memory")


@pytest.fixture
async def locker() -> AsyncIterator[PageLocker]:
    before = _children()
    found = PageLocker()
    yield found
    await found.close()
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


def locked(pid: int) -> int:
    """Bytes that a process has locked."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmLck:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmLck")


def _children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


def opened(pid: int) -> list[str]:
    return [os.readlink(item) for item in Path(f"/proc/{pid}/fd").iterdir()]


@LOCKS
async def test_files_are_locked_in_memory_for_the_length_of_the_block(locker: PageLocker, file: str) -> None:
    async with asyncio.timeout(DEADLINE), locker.lock([file]):
        assert locker.pid is not None
        assert locked(locker.pid) >= 33 * MIB
    assert await asyncio.wait_for(locker.read([file]), DEADLINE) == 33 * MIB + 3, (
        "by then it has read the order to unlock"
    )
    assert locked(locker.pid) == 0


async def test_prefetch_locks_nothing_and_reports_its_bytes(locker: PageLocker, file: str) -> None:
    assert await asyncio.wait_for(locker.read([file, file]), DEADLINE) == 2 * (33 * MIB + 3)
    assert locker.pid is not None
    assert locked(locker.pid) == 0
    assert not any("weights" in name for name in opened(locker.pid))


async def test_an_unreadable_file_is_reported(locker: PageLocker, file: str) -> None:
    with pytest.raises(NotLocked, match="No such file"):
        await asyncio.wait_for(locker.read([file, file + "-not"]), DEADLINE)
    with pytest.raises(NotLocked, match="No such file"):
        async with locker.lock([file + "-not"]):
            raise AssertionError("it was held")


async def test_a_cancelled_caller_stops_the_read(locker: PageLocker, file: str) -> None:
    reading = asyncio.create_task(locker.read([file] * 200))
    await asyncio.wait_for(locker.read([file]), DEADLINE)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert await asyncio.wait_for(locker.read([file]), DEADLINE) == 33 * MIB + 3


@LOCKS
async def test_a_killed_page_locker_is_replaced_and_its_users_are_notified(locker: PageLocker, file: str) -> None:
    async with asyncio.timeout(DEADLINE):
        async with locker.lock([file]) as files:
            assert locker.pid is not None
            os.kill(locker.pid, signal.SIGKILL)
            assert str(await files.lost()) == "the process that locked the files has ended"
        async with locker.lock([file]):
            assert locked(locker.pid) >= 33 * MIB


async def test_a_stopped_page_locker_blocks_nothing_and_is_replaced(locker: PageLocker, file: str) -> None:
    """Stopped, or waiting for a disk that does not answer."""
    await asyncio.wait_for(locker.read([file]), DEADLINE)
    stopped = locker.pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    waiting = [asyncio.create_task(locker.read([file + "-not"] * 1000)) for _ in range(30)]
    failures = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), DEADLINE)
    assert "the page locker cannot be used: it does not answer" in {str(item) for item in failures}
    assert await asyncio.wait_for(locker.read([file]), DEADLINE) == 33 * MIB + 3
    assert locker.pid != stopped


async def test_orders_that_do_not_fit_the_pipe_arrive_later(locker: PageLocker, file: str) -> None:
    await asyncio.wait_for(locker.read([file]), DEADLINE)
    assert locker.pid is not None
    os.kill(locker.pid, signal.SIGSTOP)
    waiting = [asyncio.create_task(locker.read([f"{file}-{number}-{'not' * 30}"] * 40)) for number in range(100)]
    waiting.append(asyncio.create_task(locker.read([file])))
    await asyncio.sleep(0)
    os.kill(locker.pid, signal.SIGCONT)
    *failures, size = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), DEADLINE)
    assert {str(item) for item in failures} == {"No such file or directory"}
    assert size == 33 * MIB + 3


def test_a_page_locker_ends_with_its_router(file: str) -> None:
    code = (
        "import asyncio, os, sys; from router.launch.page_lock import PageLocker\n"
        "async def main():\n"
        "    locker = PageLocker()\n"
        "    await locker.read([sys.argv[1]])\n"
        "    print(locker.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())"
    )
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-P", "-c", code, file], env=env, capture_output=True, check=False)
    await_end(int(done.stdout))
