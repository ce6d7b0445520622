"""A launcher whose fake workers are forked: their behaviour is in their snapshots. Requests to workers.

A worker whose preset has an environment is executed, and fake workers get their behaviour from there. So it is moved.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from router.launch.fork_server import ForkServerProcess
from router.launch.interface import Listen, Program, WorkerProcess
from router.launch.local import LocalLauncher
from router.launch.worker_client import Exchange
from router.launch.worker_process import LocalWorker
from router.planner.ledger import Bytes
from tests.fakes import DEADLINE
from worker.protocol.argv import Estimate, Serve
from worker.protocol.events import Estimated

Model = TypeVar("Model", Serve, Estimate)


class ForkingLauncher(LocalLauncher):
    """Takes what `LocalLauncher` takes; snapshots are made below its runtime folder's parent."""

    def __init__(self, *, runtime_dir: Path, **options: Any):
        super().__init__(runtime_dir=runtime_dir, fork_server=True, **options)
        self._snapshots = runtime_dir.parent / "behaviour"
        self._count = 0
        self._warm = asyncio.Event()
        self.fork_servers.on_warm = self._warm.set

    async def warmed(self) -> ForkServerProcess:
        """Returns once there is a fork server that can fork."""
        async with asyncio.timeout(DEADLINE):
            while (server := self.fork_servers.server) is None or not server.can_fork:
                self._warm.clear()
                await self._warm.wait()
            return server

    @asynccontextmanager
    async def serve(self, program: Program, command: Serve, place: Bytes, listen: Listen) -> AsyncIterator[LocalWorker]:
        async with super().serve(*self._moved(program, command), place, listen) as worker:
            yield worker

    @asynccontextmanager
    async def prepare(self, program: Program, command: Serve, listen: Listen) -> AsyncIterator[LocalWorker]:
        async with super().prepare(*self._moved(program, command), listen) as early:
            yield early

    async def estimate(self, program: Program, command: Estimate) -> Estimated:
        return await super().estimate(*self._moved(program, command))

    def _moved(self, program: Program, command: Model) -> tuple[Program, Model]:
        if set(program.env) != {"FAKE_WORKER"} or program.python:
            return program, command
        file = Path(command.snapshot, "fake.json")
        behaviour = json.loads(file.read_text()) if file.is_file() else {}
        self._count += 1
        folder = self._snapshots / str(self._count)
        folder.mkdir(parents=True)
        (folder / "fake.json").write_text(json.dumps(behaviour | json.loads(program.env["FAKE_WORKER"])))
        return replace(program, env={}), replace(command, snapshot=str(folder))


def is_there(pid: int) -> bool:
    """True if there is such a process, if only as a zombie."""
    return Path(f"/proc/{pid}").exists()


def parent(pid: int) -> int:
    """The parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children(pid: int) -> list[int]:
    """The children of a process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it has just ended
                found += [int(entry.name)] * (parent(int(entry.name)) == pid)
    return found


@asynccontextmanager
async def request_to(
    worker: WorkerProcess, path: str, body: Mapping[str, Any] | None = None, *, token: str = ""
) -> AsyncIterator[Exchange]:
    """Send a request to `worker`, and yield the answer once its head is there. Without a body it is a GET."""
    headers = {"Authorization": f"Bearer {token or worker.token}", "X-Request-Id": "r"}
    data = b"" if body is None else json.dumps(body).encode()
    exchange = worker.worker_client.begin("GET" if body is None else "POST", path, headers, data)
    try:
        await exchange.head()
        yield exchange
    finally:
        exchange.close()


async def read_all(exchange: Exchange) -> bytes:
    """Return the rest of an answer."""
    parts = []
    while part := await exchange.read():
        parts.append(part)
    return b"".join(parts)
