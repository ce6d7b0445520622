"""The keeper, with real files: what it holds is in memory and locked, what it reads is there, and it leaves nothing."""

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
async def keeper() -> AsyncIterator[PageLocker]:
    before = _children()
    found = PageLocker()
    yield found
    await found.close()
    assert _children() == before


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Of 33 MiB and a bit, and not in memory."""
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
    return [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]


@LOCKS
async def test_what_is_held_is_locked_in_memory_until_the_block_is_left(keeper: PageLocker, file: str) -> None:
    async with asyncio.timeout(DEADLINE), keeper.lock([file]):
        assert keeper.pid is not None
        assert locked(keeper.pid) >= 33 * MIB
    assert await asyncio.wait_for(keeper.read([file]), DEADLINE) == 33 * MIB + 3, "by then it has heard of the end"
    assert locked(keeper.pid) == 0


async def test_prefetch_locks_nothing_and_reports_its_bytes(keeper: PageLocker, file: str) -> None:
    assert await asyncio.wait_for(keeper.read([file, file]), DEADLINE) == 2 * (33 * MIB + 3)
    assert keeper.pid is not None
    assert locked(keeper.pid) == 0
    assert not any("weights" in name for name in opened(keeper.pid))


async def test_an_unreadable_file_is_reported(keeper: PageLocker, file: str) -> None:
    with pytest.raises(NotLocked, match="No such file"):
        await asyncio.wait_for(keeper.read([file, file + "-not"]), DEADLINE)
    with pytest.raises(NotLocked, match="No such file"):
        async with keeper.lock([file + "-not"]):
            raise AssertionError("it was held")


async def test_a_cancelled_caller_stops_the_read(keeper: PageLocker, file: str) -> None:
    reading = asyncio.create_task(keeper.read([file] * 200))
    await asyncio.wait_for(keeper.read([file]), DEADLINE)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert await asyncio.wait_for(keeper.read([file]), DEADLINE) == 33 * MIB + 3


@LOCKS
async def test_a_killed_page_locker_is_replaced_and_its_users_are_notified(keeper: PageLocker, file: str) -> None:
    async with asyncio.timeout(DEADLINE):
        async with keeper.lock([file]) as files:
            assert keeper.pid is not None
            os.kill(keeper.pid, signal.SIGKILL)
            assert str(await files.lost()) == "the process that locked the files has ended"
        async with keeper.lock([file]):
            assert locked(keeper.pid) >= 33 * MIB


async def test_a_stopped_page_locker_blocks_nothing_and_is_replaced(keeper: PageLocker, file: str) -> None:
    """Stopped, or waiting for a disk that does not answer."""
    await asyncio.wait_for(keeper.read([file]), DEADLINE)
    deaf = keeper.pid
    assert deaf is not None
    os.kill(deaf, signal.SIGSTOP)
    waiting = [asyncio.create_task(keeper.read([file + "-not"] * 1000)) for _ in range(30)]
    failures = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), DEADLINE)
    assert "the page locker cannot be used: it does not answer" in {str(each) for each in failures}
    assert await asyncio.wait_for(keeper.read([file]), DEADLINE) == 33 * MIB + 3
    assert keeper.pid != deaf


async def test_orders_that_do_not_fit_the_pipe_arrive_in_the_end(keeper: PageLocker, file: str) -> None:
    await asyncio.wait_for(keeper.read([file]), DEADLINE)
    assert keeper.pid is not None
    os.kill(keeper.pid, signal.SIGSTOP)
    waiting = [asyncio.create_task(keeper.read([f"{file}-{number}-{'not' * 30}"] * 40)) for number in range(100)]
    waiting.append(asyncio.create_task(keeper.read([file])))
    await asyncio.sleep(0)
    os.kill(keeper.pid, signal.SIGCONT)
    *failures, size = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), DEADLINE)
    assert {str(each) for each in failures} == {"No such file or directory"}
    assert size == 33 * MIB + 3


def test_a_keeper_ends_with_its_router(file: str) -> None:
    code = (
        "import asyncio, os, sys; from router.launch.page_lock import PageLocker\n"
        "async def main():\n"
        "    keeper = PageLocker()\n"
        "    await keeper.read([sys.argv[1]])\n"
        "    print(keeper.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())"
    )
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-P", "-c", code, file], env=env, capture_output=True, check=False)
    await_end(int(done.stdout))
