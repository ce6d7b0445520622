"""The HTTP client for workers, against workers that send exactly the bytes of a test."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.launch.worker_client import (
    LONGEST_HEAD,
    MAX_INTERIM,
    ConnectionBroken,
    Exchange,
    NotHttp,
    Unreachable,
    WorkerClient,
)
from tests.processes.forking import read_all
from tests.processes.upstreams import until

DEADLINE = 60.0
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
Answering = Callable[["Worker", asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]]


class Worker:
    """The requests that arrived at a worker's socket."""

    def __init__(self) -> None:
        self.connections = 0
        self.bodies: list[bytes] = []
        self.heads: list[bytes] = []
        self.left = asyncio.Event()  # the last connection has ended from the other side


@asynccontextmanager
async def worker(folder: Path, answer: Answering | bytes) -> AsyncIterator[tuple[WorkerClient, Worker]]:
    """A client of a worker that answers each request with these bytes, or by a function."""
    seen = Worker()

    tasks: set[asyncio.Task[None]] = set()

    def begun(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(connection(reader, writer)))

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                seen.heads.append(head)
                at = head.lower().find(b"content-length: ")
                length = int(head[at + 16 :].partition(b"\r\n")[0]) if at >= 0 else 0
                if isinstance(answer, bytes):
                    seen.bodies.append(await reader.readexactly(length))
                    writer.write(answer)
                    await writer.drain()
                else:
                    await answer(seen, reader, writer, head)
        seen.left.set()
        writer.transport.abort()
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await writer.wait_closed()

    server = await asyncio.start_unix_server(begun, folder / "s", limit=1 << 24)
    worker_client = WorkerClient(f"unix:{folder / 's'}")
    try:
        async with asyncio.timeout(DEADLINE):
            yield worker_client, seen
    finally:
        worker_client.close()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)
        await asyncio.sleep(0)  # connections are closed in the next pass of the loop


def ask(worker_client: WorkerClient, body: bytes = b"{}") -> Exchange:
    return worker_client.begin("POST", "/x", {"Authorization": "Bearer t"}, body)


async def whole(exchange: Exchange) -> bytes:
    """The whole body of a response."""
    try:
        await exchange.head()
        return await read_all(exchange)
    finally:
        exchange.close()


async def test_one_connection_carries_one_exchange_after_the_other(tmp_path: Path) -> None:
    async with worker(tmp_path, OK) as (worker_client, seen):
        for number in range(3):
            assert await whole(ask(worker_client, b"%d" % number)) == b"ok"
        assert (seen.connections, seen.bodies) == (1, [b"0", b"1", b"2"])
        assert b"POST /x HTTP/1.1\r\n" in seen.heads[0]
        assert b"Authorization: Bearer t\r\n" in seen.heads[0]
        several = await asyncio.gather(*(whole(ask(worker_client)) for _ in range(5)))
        assert several == [b"ok"] * 5
        assert seen.connections == 5


NOT_HTTP = {
    "garbage": b"SMTP 220 no\r\n\r\n",
    "zeros": bytes(100),
    "an old version": OK.replace(b"1.1", b"1.0"),
    "no stated end": b"HTTP/1.1 200 OK\r\n\r\nok",
    "another coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    "both framings": CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 2\r\n\r\n") + b"0\r\n\r\n",
    "a change of protocol": b"HTTP/1.1 101 Hm\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "only interim answers": b"HTTP/1.1 102 Wait\r\n\r\n" * (MAX_INTERIM + 1),
    "a long header": b"HTTP/1.1 200 OK\r\nX: " + b"x" * (LONGEST_HEAD + 9),
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"X-Y: zzzzzzzz\r\n" * 9000,
    "a long status line": b"HTTP/1.1 200 " + b"K" * (LONGEST_HEAD + 9),
}


@pytest.mark.parametrize("sent", NOT_HTTP.values(), ids=list(NOT_HTTP))
async def test_a_response_that_is_not_http_fails_at_once_and_ends_the_connection(tmp_path: Path, sent: bytes) -> None:
    async with worker(tmp_path, sent) as (worker_client, seen):
        with pytest.raises(NotHttp):
            await whole(ask(worker_client))
        await seen.left.wait()


BROKEN_LATER = {
    "no chunk's size": CHUNKED + b"3\r\nabc\r\nzz\r\n",
    "a long extension": CHUNKED + b"3\r\nabc\r\n3;" + b"x" * (9 * LONGEST_HEAD),
    "a long trailer": CHUNKED + b"3\r\nabc\r\n0\r\nX: " + b"x" * (9 * LONGEST_HEAD),
    "a size beyond reason": CHUNKED + b"3\r\nabc\r\nfffffffffffffffff\r\n",
}


@pytest.mark.parametrize("sent", BROKEN_LATER.values(), ids=list(BROKEN_LATER))
async def test_bytes_before_a_framing_error_are_read_before_the_error(tmp_path: Path, sent: bytes) -> None:
    async with worker(tmp_path, sent) as (worker_client, seen):
        exchange = ask(worker_client)
        await exchange.head()
        assert await exchange.read() == b"abc"
        with pytest.raises(NotHttp):
            await exchange.read()
        await seen.left.wait()


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize(
    "sent", [b"", b"HTTP/1.1 2", OK[:-4], OK[:-1], CHUNKED, CHUNKED + b"5\r\nab", CHUNKED + b"2\r\nab\r\n0"]
)
async def test_a_cut_response_always_fails(tmp_path: Path, sent: bytes, how: str) -> None:
    async def answer(seen: Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        writer.write(sent)
        writer.transport.abort() if how == "reset" else writer.transport.close()
        raise ConnectionError

    async with worker(tmp_path, answer) as (worker_client, _):
        with pytest.raises(ConnectionBroken):
            await whole(ask(worker_client))


async def test_a_response_may_arrive_byte_by_byte(tmp_path: Path) -> None:
    sent = b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + b"3;a=b\r\nabc\r\n1\r\nd\r\n0\r\nX-Late: 1\r\n\r\n"

    async def answer(seen: Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        await reader.readexactly(2)
        for byte in sent:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)

    async with worker(tmp_path, answer) as (worker_client, seen):
        for _ in range(2):
            exchange = ask(worker_client)
            assert await whole(exchange) == b"abcd"
            assert "x-late" not in exchange.headers
        assert seen.connections == 1


@pytest.mark.parametrize("extra", [OK, b"zz", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nstolen"])
async def test_bytes_after_a_response_reach_no_other_exchange(tmp_path: Path, extra: bytes) -> None:
    async with worker(tmp_path, OK + extra) as (worker_client, seen):
        for _ in range(2):
            assert await whole(ask(worker_client)) == b"ok"
        assert seen.connections == 2


async def test_a_connection_with_unexpected_bytes_is_not_used_again(tmp_path: Path) -> None:
    async def answer(seen: Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        await reader.readexactly(2)
        writer.write(OK)
        await is_due.wait()
        writer.write(OK.replace(b"ok", b"no"))
        is_due.clear()

    is_due = asyncio.Event()
    async with worker(tmp_path, answer) as (worker_client, seen):
        assert await whole(ask(worker_client)) == b"ok"
        is_due.set()
        await seen.left.wait()
        assert await whole(ask(worker_client)) == b"ok"
        assert seen.connections == 2


@pytest.mark.parametrize("header", [b"Connection: close", b"Connection: x, close"])
async def test_connection_close_is_obeyed(tmp_path: Path, header: bytes) -> None:
    async with worker(tmp_path, OK.replace(b"\r\n\r\n", b"\r\n" + header + b"\r\n\r\n")) as (worker_client, seen):
        for _ in range(2):
            assert await whole(ask(worker_client)) == b"ok"
        assert seen.connections == 2


async def test_a_large_response_waits_for_its_reader(tmp_path: Path) -> None:
    size = 8 << 20

    async def answer(seen: Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        await reader.readexactly(2)
        writer.write(CHUNKED + b"%x\r\n" % size + bytes(size) + b"\r\n0\r\n\r\n")
        stuck.set()
        await writer.drain()
        drained.set()

    stuck, drained = asyncio.Event(), asyncio.Event()
    async with worker(tmp_path, answer) as (worker_client, seen):
        exchange = ask(worker_client)
        await exchange.head()
        await stuck.wait()
        for _ in range(200):
            await asyncio.sleep(0)
        assert not drained.is_set()
        assert len(await read_all(exchange)) == size
        assert await whole(ask(worker_client)) != b""
        assert seen.connections == 1


async def test_a_large_body_arrives_whole(tmp_path: Path) -> None:
    async with worker(tmp_path, OK) as (worker_client, seen):
        for size in (1 << 16, (1 << 16) + 1, 5_000_000):
            body = bytes(range(256)) * (size // 256) + b"e"
            assert await whole(ask(worker_client, body)) == b"ok"
            assert seen.bodies[-1] == body
        assert seen.connections == 1


async def test_a_response_before_the_end_of_the_request_is_received(tmp_path: Path) -> None:
    async def answer(seen: Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(OK.replace(b"200 OK", b"413 Too much"))
        await asyncio.Event().wait()

    async with worker(tmp_path, answer) as (worker_client, seen):
        exchange = ask(worker_client, bytes(4 << 20))
        assert await whole(exchange) == b"ok"
        assert exchange.status == 413
        second = ask(worker_client, bytes(4 << 20))
        assert await whole(second) == b"ok"
        assert seen.connections == 2, "what was not sent must not be taken for a request"


@pytest.mark.parametrize("sent", [b"", OK[:-1]])
async def test_closing_an_exchange_ends_its_connection_and_its_reader(tmp_path: Path, sent: bytes) -> None:
    async with worker(tmp_path, sent) as (worker_client, seen):
        exchange = ask(worker_client)
        waiting = asyncio.create_task(read_all(exchange))
        await until(lambda: bool(seen.bodies))
        exchange.close()
        with pytest.raises(ConnectionBroken):
            await waiting
        await seen.left.wait()


async def test_a_closed_client_ends_all_exchanges_and_begins_none(tmp_path: Path) -> None:
    async with worker(tmp_path, b"") as (worker_client, seen):
        running, fresh = ask(worker_client), None
        await until(lambda: bool(seen.bodies))
        fresh = ask(worker_client, bytes(1 << 20))
        worker_client.close()
        for exchange in (running, fresh, ask(worker_client)):
            with pytest.raises(ConnectionBroken):
                await exchange.head()
        await seen.left.wait()


async def test_an_address_without_a_listener_fails_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "left"))
    for name in ("nobody", "file", "left", "file/s"):
        worker_client = WorkerClient(f"unix:{tmp_path / name}")
        with pytest.raises(Unreachable):
            await whole(ask(worker_client))
        assert worker_client.unreachable.is_set()
        worker_client.close()
