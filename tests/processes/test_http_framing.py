"""The framing of requests: an ambiguous one is rejected and its connection closed."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from router.http.listener import SWEEP
from tests.processes.upstreams import PATH, World, respond, until, world

SENT = b'{"model":"a","messages":[]}'
CHUNKED = b"1b\r\n%b\r\n0\r\n\r\n" % SENT
LENGTH = b"Content-Length: 27"
TE = b"Transfer-Encoding: chunked"
# Sent after each case: it must not be answered if the case was rejected.
LAST = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def post(*headers: bytes, body: bytes = SENT, version: str = "1.1", target: str = PATH, host: bytes = b"x") -> bytes:
    head = f"POST {target} HTTP/{version}\r\n".encode() + (b"Host: %b\r\n" % host if host else b"")
    return head + b"".join(header + b"\r\n" for header in headers) + b"\r\n" + body


REJECTED = {
    "a length and chunks": post(LENGTH, TE, body=CHUNKED),
    "a length and chunks behind a space": post(LENGTH, b"Transfer-Encoding : chunked", body=CHUNKED),
    "another coding": post(b"Transfer-Encoding: xchunked", body=CHUNKED),
    "chunked is not the last coding": post(b"Transfer-Encoding: chunked, identity", body=CHUNKED),
    "a vertical tab": post(b"Transfer-Encoding: \x0bchunked", body=CHUNKED),
    "chunks in HTTP/1.0": post(TE, body=CHUNKED, version="1.0"),
    "two lengths": post(LENGTH, b"Content-Length: 3"),
    "a list of lengths": post(b"Content-Length: 27, 27"),
    "a sign": post(b"Content-Length: +27"),
    "hexadecimal": post(b"Content-Length: 0x1b"),
    "digits of another script": post("Content-Length: \uff12\uff17".encode()),
    "an empty length": post(b"Content-Length:"),
    "a length beyond reason": post(b"Content-Length: 99999999999999999999999"),
    "a folded line": post(LENGTH, b"X-A: b\r\n c"),
    "bare line feeds": post(LENGTH).replace(b"\r\n", b"\n"),
    "one bare line feed": post(LENGTH, b"X-A: b\nX-B: c"),
    "a bare carriage return": post(LENGTH, b"X-A: b\rX-B: c"),
    "a space before the colon": post(b"Content-Length : 27"),
    "no colon": post(LENGTH, b"XA"),
    "a zero byte": post(LENGTH, b"X-A: a\0b"),
    "spaces before the method": b"  " + post(LENGTH),
    "two hosts": post(LENGTH, b"Host: y"),
    "no host": post(LENGTH, host=b""),
    "a header too long": post(LENGTH, b"X-A: " + b"a" * 20_000),
    "too many headers": post(LENGTH, *(b"X-%d: a" % number for number in range(2000))),
    "a target too long": post(LENGTH, target=PATH + "?a=" + "a" * 20_000),
    "another version": post(LENGTH, version="1.2"),
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "a preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a greeting of TLS": bytes.fromhex("16030100a5010000a10303") + b"x" * 150,
    "no size of a chunk": post(TE, body=b"zz\r\nabc\r\n0\r\n\r\n"),
    "a chunk's size beyond reason": post(TE, body=b"f" * 17 + b"\r\nabc"),
    "bare line feeds between chunks": post(TE, body=CHUNKED.replace(b"\r\n", b"\n")),
}
ACCEPTED = {
    "a length": post(LENGTH),
    "chunks": post(TE, body=CHUNKED),
    "chunks with an extension": post(TE, body=CHUNKED.replace(b"1b", b"1b;a=b", 1)),
    "zeros before a length": post(b"Content-Length: 00027"),
    "an empty line before": b"\r\n" + post(LENGTH),
    "an empty header": post(LENGTH, b"X-A:"),
    "a tab around a value": post(LENGTH, b"X-A:\tb\t"),
    "a byte that is no ASCII": post(LENGTH, b"X-A: \xe4"),
    "a whole address": post(LENGTH, target=f"http://x{PATH}"),
    "HTTP/1.0 that lasts": post(LENGTH, b"Connection: keep-alive", version="1.0"),
    "a header that calls the length its own": post(LENGTH, b"Connection: content-length"),
    "an expectation of nothing known": post(LENGTH, b"Expect: tea"),
    "an offer of another protocol": post(LENGTH, b"Connection: Upgrade", b"Upgrade: websocket"),
}


async def exchange(up: World, sent: bytes) -> list[int]:
    """The statuses of all responses on a connection, which the router must close."""
    reader, writer = await up.connect(sent)
    data = b""
    async with asyncio.timeout(60):
        while more := await reader.read(1 << 16):
            data += more
    writer.close()
    return [int(part[2:5]) for part in data.split(b"HTTP/1.")[1:]]


async def test_an_ambiguous_request_is_rejected_and_nothing_after_it_is_read(tmp_path: Path) -> None:
    """The same holds after a valid request that the listener has read."""
    async with world(tmp_path, respond) as up:
        assert await exchange(up, post(LENGTH) + LAST) == [200, 200]  # loads the model
        for name, sent in REJECTED.items():
            before = len(up.requests)
            assert await exchange(up, sent + LAST) == [400], name
            assert len(up.requests) == before, name
            assert await exchange(up, post(LENGTH) + sent + LAST) == [200, 400], f"{name}, as the second"
            assert len(up.requests) == before + 1, name


async def test_an_unusual_but_unambiguous_request_is_answered_and_so_is_the_next_one(tmp_path: Path) -> None:
    async with world(tmp_path, respond) as up:
        for name, sent in ACCEPTED.items():
            assert await exchange(up, sent + LAST) == [200, 200], name
            assert up.requests[-1].body == SENT, name
            assert b"transfer-encoding" not in up.requests[-1].head.encode().lower(), name


async def test_a_request_inside_a_body_is_not_a_request(tmp_path: Path) -> None:
    inner = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    async with world(tmp_path, respond) as up:
        body = b'{"model":"a","user":"' + inner.replace(b"\r\n", b" ") + b'"}'
        assert await exchange(up, post(b"Content-Length: %d" % len(body), body=body) + LAST) == [200, 200]
        broken = inner + SENT  # no JSON: rejected for that, and still one request
        assert await exchange(up, post(b"Content-Length: %d" % len(broken), body=broken) + LAST) == [400, 200]


async def test_an_unsupported_transfer_coding_is_415_and_closes_the_connection(tmp_path: Path) -> None:
    async with world(tmp_path, respond) as up:
        assert await exchange(up, post(b"Transfer-Encoding: gzip, chunked", body=CHUNKED) + LAST) == [415]
        assert await exchange(up, post(LENGTH, b"Content-Encoding: gzip") + LAST) == [415, 200]
        assert await exchange(up, post(b"Transfer-Encoding: ", body=CHUNKED) + LAST) == [400]
        assert up.requests == []


async def test_a_client_that_expects_100_continue_gets_it(tmp_path: Path) -> None:
    async with world(tmp_path, respond) as up:
        reader, writer = await up.connect(post(LENGTH, b"Expect: 100-continue", body=b""))
        async with asyncio.timeout(60):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(SENT + LAST)
            assert (await reader.read()).count(b"HTTP/1.1 200 OK") == 2
        writer.close()
        assert up.requests[-1].body == SENT


@pytest.mark.parametrize("head", [b"X-A: " + b"a" * 40_000, b"\r\n".join(b"X-%d: a" % number for number in range(400))])
async def test_the_error_for_a_head_that_is_too_long_says_so(tmp_path: Path, head: bytes) -> None:
    async with world(tmp_path, respond) as up:
        reader, _ = await up.connect(b"GET /health HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
        async with asyncio.timeout(60):
            answer = await reader.read()
    assert answer.split(b" ")[1] == b"400"
    assert b"too long" in answer


async def test_a_head_that_never_ends_is_cut_off(tmp_path: Path) -> None:
    """Further bytes do not extend the time limit."""
    async with world(tmp_path, respond) as up:
        runner = web.AppRunner(up.app.build(), handler_cancellation=True, access_log=None)
        await runner.setup()
        impatient = up.app.listener(runner, keep_alive=0.2)
        up.listener.make_fallback = impatient.make_fallback
        reader, writer = await up.connect(post(LENGTH)[:20])
        await until(lambda: any(connection._data for connection in up.listener.connections))
        for connection in tuple(up.listener.connections):
            connection.check(asyncio.get_running_loop().time() + SWEEP * 1.1)
        ended = asyncio.ensure_future(reader.read())
        async with asyncio.timeout(60):
            while not ended.done():
                writer.write(b"x")
                await asyncio.sleep(0.02)  # time must pass
        assert ended.exception() is not None or ended.result() == b""
        writer.close()
        assert up.requests == []
        await impatient.close(0.0)
        await runner.cleanup()
