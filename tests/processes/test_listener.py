"""The listener reads and answers plain requests itself, exactly as aiohttp does."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpRequestParser
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from router.config.settings import Settings
from router.http.aiohttp_transport import AiohttpConnection
from router.http.listener import (
    KEEP_ALIVE,
    LONGEST_BODY,
    LONGEST_HEAD,
    SWEEP,
    Fallback,
    Listener,
    PlainRequest,
    _PlainConnection,
)
from tests.processes.upstreams import (
    BODY,
    DONE,
    END,
    EVENT,
    PATH,
    STREAM,
    Answering,
    Upstream,
    World,
    chunk,
    request,
    respond,
    until,
    world,
)
from worker.protocol.routes import ROUTES

ODD = b"Sec-Fetch-Site: none\r\n"  # a header without effect that is not plain, so that aiohttp takes over


def respond_after(go: asyncio.Event) -> Answering:
    async def wait(upstream: Upstream) -> None:
        await go.wait()
        await respond(upstream)

    return wait


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (without those that differ each time) and body of the next response on a connection."""
    async with asyncio.timeout(60):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = head.split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
        if "content-length" in headers:
            body = await reader.readexactly(int(headers["content-length"]))
        else:
            body = b""
            while size := int((await reader.readline()), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            assert await reader.readline() == b"\r\n"
    for name in ("date", "x-request-id", "request-id"):
        del headers[name]
    headers.pop("server-timing", None)
    return int(lines[0].split(" ")[1]), headers, body


@pytest.mark.parametrize(
    "asked",
    [
        request({}),
        request({"stream": True}),
        request({"model": "nobody"}),
        request({"model": 3}),
        request({}).replace(b"Host: x", b"Host: evil.example"),
        request({}).replace(b"Host: x", b"Host: a b"),
        request({}).replace(PATH.encode(), b"/v1/messages"),
        request({}).replace(PATH.encode(), b"/api/chat"),
        request({"model": "nobody"}).replace(PATH.encode(), b"/worker_generate_stream"),
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n{{".encode(),
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode(),
    ],
    ids=range(11),
)
async def test_a_plain_request_gets_the_response_of_the_other_transport(tmp_path: Path, asked: bytes) -> None:
    async with world(tmp_path, respond) as up:
        reader, writer = await up.connect(asked)
        ours = await answer(reader)
        assert len(up.listener.connections) == 1
        writer.write(asked.replace(b"Content-Length", ODD + b"Content-Length"))
        theirs = await answer(reader)
        assert not up.listener.connections
    assert ours == theirs


async def test_pipelined_requests_are_answered_in_order_by_any_transport(tmp_path: Path) -> None:
    async with world(tmp_path, respond) as up:
        plain = b"".join(request({"fake": size}) for size in (5, 60_000, 7))
        health = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        reader, _ = await up.connect(plain + health + request({"fake": 9}))
        found = [(await answer(reader))[2] for _ in range(5)]
        assert [len(body) for body in found[:3]] == [5, 60_000, 7]
        assert b"ok" in found[3]
        assert len(found[4]) == 9


@pytest.mark.slow
async def test_pipelined_requests_beyond_the_buffer_wait_until_the_first_is_answered(tmp_path: Path) -> None:
    go = asyncio.Event()
    async with world(tmp_path, respond_after(go)) as up:
        reader, writer = await up.connect(request({}))
        await until(lambda: len(up.requests) == 1)
        count = 3 * LONGEST_HEAD // len(request({}))
        writer.write(request({}) * count)
        connection = next(iter(up.listener.connections))
        await until(lambda: connection._paused)
        assert len(connection._data) < 1 << 20
        go.set()
        for _ in range(count + 1):
            assert (await answer(reader))[0] == 200


async def test_a_request_that_arrives_byte_by_byte_is_answered(tmp_path: Path) -> None:
    async with world(tmp_path, respond) as up:
        reader, writer = await up.connect()
        for byte in request({}) + request({"stream": True}):
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await answer(reader))[2] == BODY
        assert (await answer(reader))[2] == EVENT * 2 + DONE
        assert len(up.listener.connections) == 1


@pytest.mark.parametrize("cut", [10, 80, -5])
async def test_a_request_that_arrives_slowly_is_handed_to_aiohttp(tmp_path: Path, cut: int) -> None:
    async with world(tmp_path, respond) as up:
        reader, writer = await up.connect(request({})[:cut])
        await until(lambda: any(connection._data for connection in up.listener.connections))
        for connection in tuple(up.listener.connections):
            connection.check(asyncio.get_running_loop().time() + SWEEP * 1.1)
        assert not up.listener.connections
        writer.write(request({})[cut:])
        assert (await answer(reader))[2] == BODY


async def test_a_long_body_and_a_long_head_are_handed_to_aiohttp(tmp_path: Path) -> None:
    async with world(tmp_path, respond) as up:
        for long in (
            request({"messages": ["x" * LONGEST_BODY]}),
            request({}, headers=b"".join(b"X-%d: %b\r\n" % (number, b"y" * 5000) for number in range(4))),
        ):
            reader, writer = await up.connect(long)
            assert (await answer(reader))[2] == BODY
            assert not up.listener.connections
            writer.close()


async def test_an_idle_connection_is_closed_after_the_keep_alive_time(tmp_path: Path) -> None:
    async with world(tmp_path, respond) as up:
        for asked in (b"", request({})):
            reader, writer = await up.connect(asked)
            if asked:
                await answer(reader)
            await until(lambda: len(up.listener.connections) == 1)
            connection, now = next(iter(up.listener.connections)), asyncio.get_running_loop().time()
            connection.check(now + KEEP_ALIVE - 1)
            assert connection.transport is not None
            assert not connection.transport.is_closing()
            connection.check(now + KEEP_ALIVE + 1)
            assert await reader.read() == b""
            writer.close()


UNREAD = [(b"", 30.0), (b"Connection: close\r\n", 30.0), (b"Connection: close\r\n", 1000.0)]


@pytest.mark.parametrize(("ends", "write_stall"), UNREAD)
async def test_a_client_that_does_not_read_the_end_of_its_response_is_disconnected(
    tmp_path: Path, ends: bytes, write_stall: float
) -> None:
    limit = max(KEEP_ALIVE, write_stall)
    async with world(tmp_path, respond, settings=Settings(write_stall=write_stall)) as up:
        _, writer = await up.connect(reads=False)
        await until(lambda: len(up.listener.connections) == 1)
        (connection,) = up.listener.connections
        answered = 0
        while connection.transport is not None and not connection.transport.get_write_buffer_size():
            writer.write(request({"fake": 1 << 14}))
            answered += 1
            await until(lambda: len(up.requests) == answered and not connection.is_busy)  # noqa: B023
        if ends:
            writer.write(request({"fake": 1}, headers=ends))
            await until(lambda: len(up.requests) == answered + 1 and not connection.is_busy)
        now = asyncio.get_running_loop().time()
        for after in (1, limit / 2):
            connection.check(now + after)
            await asyncio.sleep(0)
            assert connection.transport is not None
        for _ in range(2):
            connection.check(now + limit + 1)
        await until(lambda: not up.listener.connections)


@pytest.mark.parametrize(("ends", "write_stall"), UNREAD)
async def test_nor_does_aiohttp_keep_a_client_that_does_not_read_the_end(
    tmp_path: Path, ends: bytes, write_stall: float
) -> None:
    limit = max(KEEP_ALIVE, write_stall)
    async with world(tmp_path, respond, settings=Settings(write_stall=write_stall)) as up:
        _, writer = await up.connect(request({"fake": 1}, headers=ODD), reads=False)
        await until(lambda: len(up.listener.handed_over) == 1)
        (connection,) = cast("set[AiohttpConnection]", up.listener.handed_over)
        await until(lambda: len(up.requests) == 1 and is_idle(connection))
        answered = 1
        while not connection._connection.get_write_buffer_size():
            writer.write(request({"fake": 1 << 14}))
            answered += 1
            await until(lambda: len(up.requests) == answered and is_idle(connection))  # noqa: B023
        if ends:
            writer.write(request({"fake": 1}, headers=ends))
            await until(connection._connection.is_closing)
        now = asyncio.get_running_loop().time() + (0 if ends else KEEP_ALIVE + 1)  # it is idle until then
        for after in (0, 0, limit - KEEP_ALIVE / 2):
            connection.check(now + after, KEEP_ALIVE)
        await asyncio.sleep(0)
        assert up.listener.handed_over == {connection}
        connection.check(now + limit + 1, KEEP_ALIVE)
        await until(lambda: not up.listener.handed_over)


def is_idle(connection: AiohttpConnection) -> bool:
    return connection._waiter is not None and not connection._waiter.done()


async def test_closing_ends_idle_connections_and_finishes_running_responses(tmp_path: Path) -> None:
    go = asyncio.Event()
    async with world(tmp_path, respond_after(go)) as up:
        idle, _ = await up.connect()
        busy, _ = await up.connect(request({}))
        await until(lambda: len(up.requests) == 1)
        closing = asyncio.create_task(up.listener.close(20.0))
        assert await idle.read() == b""
        go.set()
        assert (await answer(busy))[2] == BODY
        assert await busy.read() == b""
        await closing


@pytest.mark.slow
async def test_two_hundred_streams_at_once_leave_nothing_behind(tmp_path: Path) -> None:
    """Half are read to their end, the others are reset in the middle."""
    go = asyncio.Event()

    async def stream(upstream: Upstream) -> None:
        await upstream.send(STREAM + chunk(EVENT))
        await go.wait()
        await upstream.send(chunk(EVENT) + chunk(DONE) + END)

    async def ask(up: World, number: int) -> None:
        reader, writer = await up.connect(request({"stream": True}))
        async with asyncio.timeout(60):
            await reader.readuntil(EVENT)
            if number % 2:
                writer.transport.abort()
                return
            assert (await reader.readuntil(b"\r\n0\r\n\r\n")).endswith(DONE + b"\r\n0\r\n\r\n")
        writer.close()

    async with world(tmp_path, stream, keys={"parallel": 200}) as up:
        asked = asyncio.gather(*(ask(up, number) for number in range(200)))
        await until(lambda: up.count('router_client_disconnects_total{phase="streaming"}') == 100)
        go.set()
        await asked
        await up.idle()
        await until(lambda: not up.listener.connections)
        proxy = up.listener.serve.__self__._proxy  # type: ignore[attr-defined]
        assert not proxy._limits
        assert up.listener.serve.__self__.bodies.buffered == 0  # type: ignore[attr-defined]
        assert up.count('router_requests_total{code="200",endpoint="chat",model="a"}') == 100


@pytest.mark.slow
async def test_a_slow_reader_gets_everything(tmp_path: Path) -> None:
    """The connection to the worker pauses for it."""
    count = 40_000

    async def pour(upstream: Upstream) -> None:
        await upstream.send(STREAM)
        for _ in range(count // 1000):
            await upstream.send(chunk(EVENT) * 1000)
        await upstream.send(chunk(DONE) + END)

    async with world(tmp_path, pour, settings=Settings(write_stall=0.3)) as up:
        reader, _ = await up.connect(request({"stream": True}))
        await reader.readuntil(b"\r\n\r\n")
        body, size = b"", 1
        async with asyncio.timeout(60):
            while size:
                size = int(await reader.readline(), 16)
                body += (await reader.readexactly(size + 2))[:-2]
                if len(body) < 200_000:
                    await asyncio.sleep(0.001)  # the reader must be slow
        assert body == EVENT * count + DONE


# Which requests are plain


class Sink(asyncio.Transport):
    """The transport of a connection that a test feeds with bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: asyncio.BaseProtocol | None = None

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def close(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False


async def test_a_request_that_aiohttp_has_just_read_keeps_its_connection() -> None:
    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response()

    for data, is_kept in ((b"", False), (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", True)):
        read = AiohttpConnection(web.Server(answer), lambda: None, loop=asyncio.get_running_loop())
        read.connection_made(Sink())
        await asyncio.sleep(0)
        read.data_received(data)
        read.check(math.inf, KEEP_ALIVE)
        assert (read.transport is not None) == is_kept
        read.connection_lost(None)


class Other(Fallback):
    """Takes the place of aiohttp's protocol."""

    def __init__(self) -> None:
        self.data = b""

    def data_received(self, data: bytes) -> None:
        self.data += data


# Requests with these headers need aiohttp, or checks of the application.
ODD_HEADERS = {"expect", "transfer-encoding", "content-encoding", "origin", "sec-fetch-site"}
HEAD = (
    f"POST {PATH} HTTP/1.1\r\nHost: localhost:8080\r\nUser-Agent: a/1\r\nConnection: keep-alive\r\n"
    "Authorization: Bearer k\r\nContent-Length: 14\r\n\r\n"
).encode()
TOKENS = [
    b"\r\n", b"\n", b"\r", b" ", b"\t", b"\0", b":", b",", b"\xff", b"Content-Length: 3\r\n", b"content-length: 14\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Host: y\r\n", b"Expect: 100-continue\r\n", b"Connection: close\r\n",
    b"Connection: upgrade\r\nUpgrade: websocket\r\n", b"X-A: b\r\n c\r\n", b"X-B : c\r\n", b": d\r\n", b"X-Empty:\r\n",
    b"X-Api-Key:  k  \r\n", b"HTTP/1.0", b"GET", b"/", b"?a=b", b"%2f", b"+", b"0", b"0x", b"Origin: http://z\r\n",
]  # fmt: skip
EDITS = st.lists(
    st.tuples(st.integers(0, len(HEAD)), st.integers(0, 3), st.one_of(st.sampled_from(TOKENS), st.binary(max_size=2))),
    min_size=1,
    max_size=3,
)


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(edits=EDITS, split=st.integers(0, len(HEAD) + 20))
@example(edits=[(0, 0, b"\r\n")], split=0)
@example(edits=[(len(HEAD) - 2, 0, b"Connection: close\r\n")], split=3)
@example(edits=[(len(HEAD) - 2, 0, b"X-Empty:\r\n")], split=3)
@example(edits=[(len(HEAD) - 2, 0, b"Expect: 100-continue\r\n")], split=3)
@example(edits=[(len(HEAD) - 2, 0, b"Origin: http://z\r\n")], split=3)
@example(edits=[(HEAD.index(b"1.1"), 3, b"1.0")], split=0)
@example(edits=[(HEAD.index(b"1.1"), 3, b"2.0")], split=0)
@example(edits=[(HEAD.index(b"POST"), 4, b"PUT")], split=0)
@example(edits=[(HEAD.index(b"keep-alive"), 10, b"close")], split=0)
@example(edits=[(HEAD.index(b"keep-alive"), 10, b"Close, te")], split=0)
def test_a_plain_request_is_parsed_as_aiohttp_parses_it(edits: list[tuple[int, int, bytes]], split: int) -> None:
    """All other bytes arrive at the fallback."""
    data = HEAD
    for at, cut, put in edits:
        data = data[:at] + put + data[at + cut :]
    data += BODY
    asyncio.run(_compared(data, split))


async def _compared(data: bytes, split: int) -> None:
    taken: list[PlainRequest] = []

    async def serve(asked: PlainRequest) -> None:
        taken.append(asked)
        asked.is_complete = True

    routes = {route.path.encode(): route for route in ROUTES if route.worker}
    fallbacks: list[Other] = []

    def make_fallback(_: Callable[[], None]) -> Other:
        fallbacks.append(Other())
        return fallbacks[-1]

    listener, transport = Listener(routes, serve, make_fallback), Sink()
    connection = _PlainConnection(listener)
    connection.connection_made(transport)
    for part in (data[:split], data[split:]):
        if part:
            cast("Any", transport.protocol or connection).data_received(part)
            await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    listener._timer.cancel()
    rest = fallbacks[0].data if fallbacks else connection._data
    loop = asyncio.get_running_loop()
    parser = HttpRequestParser(BaseProtocol(loop), loop, 1 << 16)
    for asked in taken:
        end = data.index(b"\r\n\r\n") + 4 + int(asked.headers["content-length"])
        ((message, payload),), _, _ = parser.feed_data(data[:end])
        data = data[end:]
        assert (message.method, message.path, message.version) == ("POST", asked.path, (1, 1))
        assert {name.lower(): value for name, value in message.headers.items()} == asked.headers
        assert len(message.headers) == len(asked.headers)
        assert (payload.read_nowait() if int(asked.headers["content-length"]) else b"") == asked.body
        assert message.should_close == (not asked.stays_open)
        assert not ODD_HEADERS & asked.headers.keys()
        assert not message.upgrade
    if not taken or taken[-1].stays_open:
        assert rest == data
