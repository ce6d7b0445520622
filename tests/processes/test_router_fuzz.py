"""Invalid HTTP: answered or disconnected at once, without an error of the router, and never quoted in its log."""

import asyncio
import contextlib
import json
import random
import re
from pathlib import Path

import pytest

from tests.processes.routers import Router, presets, router

REQUESTS = 200
AT_ONCE = 8
SLOWEST = 60.0
"""Seconds within which every answer has begun or the connection is closed."""
SECRET = b"sk-never-to-be-seen"

METHODS = (
    b"GET",
    b"POST",
    b"HEAD",
    b"OPTIONS",
    b"DELETE",
    b"PATCH",
    b"CONNECT",
    b"TRACE",
    b"get",
    b"",
    b"\x16\x03\x01",
)
TARGETS = (
    b"/health", b"/", b"//", b"//evil.example/health", b"/models", b"/v1/models/alpha", b"/models/%00", b"/models/%ff",
    b"/models/%zz", b"/models/..", b"/../../etc/passwd", b"/models/%2e%2e%2fhealth", b"*", b"http://evil.example/health",
    b"http://[/", b"http://localhost:99999/", b"localhost:80", b"health", b"?model=alpha", b"/props?model=%ff%00",
    b"/models?reload", b"/tokenize", b"/v1/chat/completions?model=%F0%9F%98%80", b"/mod\0els", b"/mod\xe9els",
    b"/" + b"a" * 65536, b"/health?" + b"&".join(b"a%d=%%" % each for each in range(500)), b"/health#part",
)  # fmt: skip
VERSIONS = (b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"")
HEADERS = (
    b"Host: localhost", b"Host: [::1", b"Host: [evil]", b"Host: \xe9vil", b"Host: a@b", b"Host:", b"Host: evil.example",
    b"Content-Length: 2", b"Content-Length: 999", b"Content-Length: 99999999999", b"Content-Length: -1",
    b"Content-Length: 2, 2", b"Transfer-Encoding: chunked", b"Transfer-Encoding:", b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: identity", b"Content-Encoding: gzip", b"Content-Type: \xff/\xfe;charset=\xff",
    b"Expect: 100-continue", b"Expect: 200-ok", b"Connection: Upgrade", b"Upgrade: websocket",
    b"Connection: keep-alive",
    b"Connection: close", b"Origin: http://[bad", b"Origin: \xe9", b"Origin: null", b"Cookie: \xff=;;=",
    b"X-Request-Id: \x80", b"X-Api-Key: \xff", b"Authorization: Bearer", b"Last-Event-ID: 99999999999999999999",
    b"Access-Control-Request-Headers: \xe9", b"Bad Header: 1", b"X: a\0b", b" folded", b"X: " + b"a" * 65536,
    b"Authorization " + SECRET, b"Host : localhost", b"X-" + b"a" * 9000 + b": 1",
)  # fmt: skip
BODIES = (
    b"", b"{}", b'{"model":"alpha"}', b"5\r\n{\"a\":\r\n", b"ZZ\r\nabc", b"2\r\n{}\r\n0\r\n\r\n",
    b"ffffffffffffffff1\r\n",
    b"2\r\n{}extra", b"0\r\nX: y\r\n\r\n", b"a" * 100_000, b"\x1f\x8b\x08\0",
    b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n",
)  # fmt: skip
MALFORMED = (
    b"GE T / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"sk-secret\r\n\r\n",
    b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: sk-secret\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nsk-secret\r\n\r\n",
    b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 9000 + b"\r\n\r\n",
)
"""Each is answered as any other error is, and not quoted."""
OWN_LINE = re.compile(rb"HTTP/1\.[01] ([0-9]{3}) [A-Z]")


def request(chance: random.Random) -> list[bytes]:
    """One request of a small grammar that knows what parsers stumble over, in the pieces that it arrives in."""
    line = b" ".join((chance.choice(METHODS[:5] * 3 + METHODS), chance.choice(TARGETS), chance.choice(VERSIONS)))
    headers = [b"Host: localhost"] * chance.choice((0, 1, 1, 1, 1, 2)) + chance.sample(HEADERS, chance.randrange(4))
    end = chance.choice((b"\r\n", b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r"))
    data = end.join((line, *headers, b"", b"")) + chance.choice(BODIES)
    cut = chance.randrange(len(data) + 1)
    return [data[:cut], data[cut:]] if chance.random() < 0.5 else [data * chance.choice((1, 1, 1, 3))]


async def converse(port: int, pieces: list[bytes]) -> bytes:
    """All that comes back, once we have said all and no more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    got = b""
    try:
        with contextlib.suppress(OSError):  # it may hang up on us at any byte
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            writer.write_eof()
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(SLOWEST):
                while data := await reader.read(1 << 16):
                    got += data
    finally:
        writer.close()
    return got


@pytest.mark.slow
async def test_no_malformed_request_makes_the_router_fail_hang_or_quote_it(tmp_path: Path) -> None:
    chance = random.Random(20)
    todo = [request(chance) for _ in range(REQUESTS)]
    options = ("--body-timeout", "0.5", "--max-body-size", "1", "--cors-origins", "localhost")
    async with router("--models-preset", str(presets(tmp_path, {"alpha": {}})), *options) as up:

        async def work() -> None:
            while todo:
                pieces = todo.pop()
                try:
                    got = await converse(up.port, pieces)
                except TimeoutError:
                    raise AssertionError(f"no end of {pieces!r:.500}") from None
                assert not any(code.startswith(b"5") for code in OWN_LINE.findall(got)), (pieces, got)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        for malformed in MALFORMED:
            reader, writer = await asyncio.open_connection("127.0.0.1", up.port)
            writer.write(malformed)
            async with asyncio.timeout(SLOWEST):
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            assert head.split(b" ")[1] == b"400", malformed
            assert b"Content-Type: application/json" in head
            assert b"Server: router/" in head
            error = json.loads(body)["error"]
            assert (error["code"], error["type"], error["reason"]) == (400, "invalid_request_error", "invalid_value")
            assert b"sk-secret" not in head + body
        await is_well(up)
    # the fake worker's end is none of the router's: asyncio 3.11 makes a traceback of a stream's task cancelled then
    mine = [line for line in up.log if " worker.alpha " not in line]
    assert not any("Traceback" in line for line in mine)
    assert not any(SECRET.decode() in line for line in up.log)


async def is_well(up: Router) -> None:
    assert (await up.client.get("/ready")).status_code == 200
    response = await up.client.post("/tokenize", json={"model": "alpha", "content": "a"})
    assert response.json() == {"tokens": [97]}
