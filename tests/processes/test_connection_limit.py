"""Clients are accepted as long as there are file descriptors, and never get the last ones."""

import asyncio
import os
import resource
import socket
from pathlib import Path

import pytest

from router.http.listener import KEEP_ALIVE, LEAST, PER_CLIENT, RESERVED
from tests.processes.routers import DEADLINE, Router, presets, router
from tests.processes.upstreams import Upstream, request, until, world

ODD = b"Sec-Fetch-Site: none\r\n"  # a header without effect that is not plain, so that aiohttp takes over
RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


async def respond(upstream: Upstream) -> None:
    await upstream.send(RESPONSE)


async def status(reader: asyncio.StreamReader) -> int:
    """The status of the next response, which is read whole."""
    async with asyncio.timeout(DEADLINE):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.split(b":")[1]))
        return int(head.split(b" ")[1])


@pytest.mark.parametrize("headers", [b"", ODD], ids=["ours", "aiohttp's"])
async def test_a_connection_over_the_limit_waits_until_another_closes(tmp_path: Path, headers: bytes) -> None:
    async with world(tmp_path, respond, clients=2) as up:
        asked = request({}, headers=headers)
        (first, leaving), (second, staying) = [await up.connect() for _ in range(2)]
        for reader, writer in ((first, leaving), (second, staying)):
            writer.write(asked)
            assert await status(reader) == 200
        third, waiting = await up.connect(asked)  # it is in the backlog
        staying.write(asked)
        assert await status(second) == 200
        assert len(up.listener.clients) == 2
        assert len(up.requests) == 3
        leaving.close()
        assert await status(third) == 200
        for writer in (staying, waiting):
            writer.close()
        await until(lambda: not up.listener.clients)


async def test_a_waiting_client_that_disconnects_takes_no_place(tmp_path: Path) -> None:
    async with world(tmp_path, respond, clients=1) as up:
        reader, writer = await up.connect(request({}))
        assert await status(reader) == 200
        for _ in range(5):
            with socket.socket(socket.AF_UNIX) as leaving:
                leaving.connect(str(up.socket))
        last, waiting = await up.connect(request({}))
        writer.close()
        assert await status(last) == 200
        waiting.close()
        await until(lambda: not up.listener.clients)


@pytest.mark.slow
async def test_idle_connections_give_way_to_waiting_clients(tmp_path: Path) -> None:
    """Connections that a client keeps in its pool would otherwise keep others out for more than a minute."""
    async with world(tmp_path, respond, clients=2) as up:
        pool = [await up.connect() for _ in range(2)]
        for reader, writer in pool:
            writer.write(request({}))
            assert await status(reader) == 200
        late, _ = await up.connect(request({}))
        async with asyncio.timeout(KEEP_ALIVE / 2):
            assert await status(late) == 200
            assert await pool[0][0].read() == b"", "it is closed in order"


@pytest.mark.slow
async def test_clients_that_send_no_request_give_way_to_waiting_ones(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Connections with half a head, and those that aiohttp keeps for a next request, count as idle."""

    async def give_way(sent: bytes, folder: Path) -> None:
        async with world(folder, respond, clients=2) as up:
            silent = [await up.connect(sent) for _ in range(2)]
            late, waiting = await up.connect(request({}))
            async with asyncio.timeout(KEEP_ALIVE / 2):
                assert await status(late) == 200, sent
            for _, writer in [*silent, (late, waiting)]:
                writer.close()
            await until(lambda: not (up.listener.clients or up.listener.handed_over))

    async with asyncio.TaskGroup() as all_three:  # together, since most of their time is for waiting
        for sent in (b"", request({})[:30], b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"):
            all_three.create_task(give_way(sent, tmp_path_factory.mktemp("up")))


async def _idle(up: Router, count: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    return [await asyncio.open_connection("127.0.0.1", up.port) for _ in range(count)]


async def test_a_router_at_the_connection_limit_still_starts_workers_and_logs_once(tmp_path: Path) -> None:
    """The limit is so low that idle clients alone would take every descriptor."""
    limit = RESERVED + PER_CLIENT * LEAST
    file = presets(tmp_path, {"a": {}, "b": {}})
    options = ("--models-preset", str(file), "--models-memory-margin", "64")
    shell = ("sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh")
    async with router(*options, under=shell) as up:
        open_files = Path(f"/proc/{up.process.pid}/fd")
        clients = await _idle(up, limit)
        await up.says(f"{LEAST} clients are connected")
        assert len(os.listdir(open_files)) < limit - 64, "too few are left for workers"
        reader, writer = clients[0]
        for model in ("a", "b"):  # each starts a worker
            writer.write(request({"model": model, "messages": [{"role": "user", "content": "x"}]}))
            assert await status(reader) == 200
        late, last = clients[LEAST]
        last.write(request({"model": "a", "messages": [{"role": "user", "content": "x"}]}))
        clients[1][1].close()
        assert await status(late) == 200
        # accept() fails without a descriptor and is tried again
        before = resource.prlimit(up.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(up.process.pid, resource.RLIMIT_NOFILE, (8, before[1]))
        for _, client in clients[2 : LEAST + 1]:
            client.close()
        await up.says("no client can be accepted")
        resource.prlimit(up.process.pid, resource.RLIMIT_NOFILE, before)
        reader, writer = clients[-1]
        for _, client in clients[:-1]:
            client.close()
        writer.write(request({"model": "a", "messages": [{"role": "user", "content": "x"}]}))
        assert await status(reader) == 200
        writer.close()
        assert sum("clients are connected" in line for line in up.log) == 1, "at most one line a minute"
