"""Every row of the table of errors, as each dialect's official client raises it; time-outs and cancels of theirs."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import ollama
import openai
import pytest

from router.config.api_keys import ApiKey, digest
from router.config.settings import Settings
from router.registry.auth import Access
from tests.processes.clients import async_anthropic, async_ollama, async_openai
from tests.processes.upstreams import END, STREAM, Upstream, World, chunk, world
from worker.errors import RequestError
from worker.protocol.dialects import Dialect
from worker.protocol.errors import ERRORS, ErrorKind, error_body

HI: Any = [{"role": "user", "content": "hi"}]
OPENAI: dict[int, type[Exception]] = {
    400: openai.BadRequestError,
    401: openai.AuthenticationError,
    403: openai.PermissionDeniedError,
    404: openai.NotFoundError,
    409: openai.ConflictError,
    429: openai.RateLimitError,
    **dict.fromkeys((500, 501, 502, 503, 504, 507), openai.InternalServerError),
}
"""By status; the rest are APIStatusError."""
ANTHROPIC: dict[int, type[Exception]] = {
    400: anthropic.BadRequestError,
    401: anthropic.AuthenticationError,
    403: anthropic.PermissionDeniedError,
    404: anthropic.NotFoundError,
    409: anthropic.ConflictError,
    429: anthropic.RateLimitError,
    **dict.fromkeys((500, 501, 502, 503, 504, 507), anthropic.APIStatusError),
}
ANTHROPIC_TYPES = {400: "invalid_request_error", 413: "request_too_large", 504: "timeout_error"}
"""By status; the rest below 500 have the type of their row."""
TIRED = (openai.APITimeoutError, anthropic.APITimeoutError, httpx.TimeoutException, httpx2.TimeoutException)
"""The exceptions of clients whose own timeout ends, before an answer and within one."""
Asking = Callable[[World], Awaitable[Any]]


async def by_openai(up: World) -> None:
    async with async_openai(up) as client:
        await client.chat.completions.create(model="a", messages=HI)


async def by_openai_streaming(up: World) -> None:
    async with async_openai(up) as client:
        await client.chat.completions.create(model="a", messages=HI, stream=True)


async def by_responses(up: World) -> None:
    async with async_openai(up) as client:
        await client.responses.create(model="a", input="hi")


async def by_anthropic(up: World) -> None:
    async with async_anthropic(up) as client:
        await client.messages.create(model="a", messages=HI, max_tokens=9)


async def by_ollama(up: World) -> None:
    async with async_ollama(up) as client:
        await client.chat("a", HI)


def refusal(row: ErrorKind, face: Dialect) -> bytes:
    """A worker's answer with the first reason of a row."""
    error = RequestError("so it is", param="x")
    error.status, error.type, error.reason = row.status, row.type, row.reasons[0]
    body = json.dumps(error_body(face, error)).encode()
    retry = b"Retry-After: 7\r\n" if row.status in (429, 503) else b""
    head = f"HTTP/1.1 {row.status} X\r\nContent-Type: application/json\r\nX-Should-Retry: false\r\n"
    return head.encode() + retry + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ask", "face", "classes", "otherwise"),
    [
        (by_openai, Dialect.OPENAI, OPENAI, openai.APIStatusError),
        (by_openai_streaming, Dialect.OPENAI, OPENAI, openai.APIStatusError),
        (by_responses, Dialect.RESPONSES, OPENAI, openai.APIStatusError),
        (by_anthropic, Dialect.ANTHROPIC, ANTHROPIC, anthropic.APIStatusError),
        (by_ollama, Dialect.OLLAMA, {}, ollama.ResponseError),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_every_row_is_an_exception_of_the_client(
    ask: Asking, face: Dialect, classes: dict[int, type[Exception]], otherwise: type[Exception], tmp_path: Path
) -> None:
    rows = iter(ERRORS)

    async def refuse(upstream: Upstream) -> None:
        await upstream.send(refusal(next(rows), face))

    async with world(tmp_path, refuse) as up:
        await up.fleet.load("a")
        for row in ERRORS:
            with pytest.raises(classes.get(row.status, otherwise), match="so it is") as caught:
                await ask(up)
            error: Any = caught.value
            assert error.status_code == row.status
            if face in (Dialect.OPENAI, Dialect.RESPONSES):
                assert (str(error.code), error.param, error.type) == (str(row.status), "x", row.type)
                assert error.body["reason"] == row.reasons[0]
            if face is Dialect.ANTHROPIC and (row.status < 500 or row.status in ANTHROPIC_TYPES):
                assert error.body["error"]["type"] == ANTHROPIC_TYPES.get(row.status, row.type)


# Rows that the router makes


async def holding(upstream: Upstream) -> None:
    """A worker that says nothing until its client leaves."""
    await upstream.left()


@asynccontextmanager
async def guarded(folder: Path, *keys: ApiKey) -> AsyncIterator[World]:
    """A router that wants one of these keys, over a worker that says nothing."""
    async with world(folder, holding) as up:
        up.registry.access = Access(keys, Settings())
        yield up


def key(name: str, **further: Any) -> ApiKey:
    return ApiKey(name=name, digest=digest(name), **further)


async def test_a_key_is_needed_known_and_allowed_what_it_asks(tmp_path: Path) -> None:
    keys = key("user"), key("boss", admin=True), key("other", models=("b*",))
    async with guarded(tmp_path, *keys) as up:
        async with async_openai(up, api_key="nobody") as client:
            with pytest.raises(openai.AuthenticationError, match="Invalid API Key") as unknown:
                await client.models.list()
            assert unknown.value.response.headers["www-authenticate"] == "Bearer"
        async with async_openai(up, api_key="user") as client:
            assert [model.id async for model in client.models.list()] == ["a"]
            with pytest.raises(openai.PermissionDeniedError) as forbidden:
                await client.post("/../models/load", body={"model": "a"}, cast_to=object)
            assert (forbidden.value.status_code, told(forbidden)["reason"]) == (403, "admin_required")
        async with async_openai(up, api_key="other") as client:
            assert [model.id async for model in client.models.list()] == []
            with pytest.raises(openai.NotFoundError) as hidden:
                await client.chat.completions.create(model="a", messages=HI)
            assert told(hidden)["reason"] == "model_not_found"
            assert "did you mean" not in told(hidden)["message"]
        async with async_anthropic(up, api_key="nobody") as claude:
            with pytest.raises(anthropic.AuthenticationError):
                await claude.messages.create(model="a", messages=HI, max_tokens=9)


def told(caught: Any) -> Any:
    """The error object of an exception of OpenAI's client."""
    return caught.value.body


async def test_a_key_at_its_limit_gets_retry_after(tmp_path: Path) -> None:
    async with guarded(tmp_path, key("one", max_concurrent=1)) as up, async_openai(up, api_key="one") as client:
        first = asyncio.ensure_future(client.chat.completions.create(model="a", messages=HI))
        await arrived(up)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="a", messages=HI)
        assert told(caught)["reason"] == "key_concurrency"
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        assert caught.value.response.headers["x-should-retry"] == "true"
        await leave(first)


async def test_a_full_queue_gives_retry_after(tmp_path: Path) -> None:
    async with (
        world(tmp_path, holding, settings=Settings(queue_size=1), load_seconds=30) as up,
        async_openai(up) as client,
    ):
        ask = client.chat.completions.create
        first = asyncio.ensure_future(ask(model="a", messages=HI))
        async with asyncio.timeout(60):
            while not up.fleet.workers():  # noqa: ASYNC110
                await asyncio.sleep(0)
        with pytest.raises(openai.RateLimitError) as caught:
            await ask(model="a", messages=HI)
        assert told(caught)["reason"] == "queue_full"
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        await leave(first)


async def test_bodies_over_the_buffer_limit_get_retry_after(tmp_path: Path) -> None:
    """By the listener, which has the whole body before it counts it, and by aiohttp, which counts while it comes."""
    body = b'{"model":"a","x":"' + b"y" * 600 + b'"}'
    length = b"Content-Length: %d\r\n\r\n" % len(body) + body
    pieces = b"Transfer-Encoding: chunked\r\n\r\n" + chunk(body) + END
    async with world(tmp_path, holding, most_buffered=1000) as up, async_openai(up) as client:
        held = {"model": "a", "messages": HI, "extra_body": {"x": "y" * 600}}
        first = asyncio.ensure_future(client.chat.completions.create(**held))
        await arrived(up)
        for framed in (length, pieces):
            reader, writer = await up.connect(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + framed)
            head, _, told_ = (await reader.read()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 429 ")
            assert b"Retry-After: 1\r\n" in head + b"\r\n"
            assert b'"reason":"queue_full"' in told_
            writer.close()
        await leave(first)
        await up.idle()
        again = asyncio.ensure_future(client.chat.completions.create(**held))
        while len(up.requests) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await leave(again)


async def test_a_small_body_is_admitted_while_large_ones_take_the_whole_buffer(tmp_path: Path) -> None:
    most, body = 8192 * 100, b'{"model":"a","x":"%b"}'
    async with world(tmp_path, holding, most_buffered=most) as up:
        for size in (most - 20, 50, 200):
            text = body % (b"y" * (size - len(body % b"")))
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size
            reader, _ = await up.connect(head + text)
            if size == 200:
                assert (await reader.readline()).startswith(b"HTTP/1.1 429 ")
            else:
                async with asyncio.timeout(60):
                    while len(up.requests) < len(up.clients):  # noqa: ASYNC110
                        await asyncio.sleep(0)


@pytest.mark.slow
async def test_a_body_that_does_not_come_is_408(tmp_path: Path) -> None:
    async with world(tmp_path, holding) as up:
        object.__setattr__(up.registry.settings, "body_timeout", 0.1)
        begun = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
        reader, writer = await up.connect(begun)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"X-Should-Retry: true" in head
        writer.write_eof()  # otherwise the router waits for the rest of the body, to close the connection in order
        assert json.loads(await reader.read())["error"]["reason"] == "body_timeout"


async def arrived(up: World) -> None:
    """Returns once the worker has a request."""
    async with asyncio.timeout(60):
        while not up.requests:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def leave(asking: "asyncio.Future[Any]") -> None:
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking


# Clients that give up


async def openai_first(up: World) -> AsyncIterator[Any]:
    async with (
        async_openai(up, timeout=0.3) as client,
        await client.chat.completions.create(model="a", messages=HI, stream=True) as stream,
    ):
        async for each in stream:
            yield each


async def anthropic_first(up: World) -> AsyncIterator[Any]:
    async with (
        async_anthropic(up, timeout=0.3) as client,
        await client.messages.create(model="a", messages=HI, max_tokens=9, stream=True) as stream,
    ):
        async for each in stream:
            yield each


async def ollama_first(up: World) -> AsyncIterator[Any]:
    async with async_ollama(up, timeout=0.3) as client:
        stream = await client.chat("a", HI, stream=True)
        try:
            async for each in stream:
                yield each
        finally:
            await stream.aclose()


CLIENTS = {
    Dialect.OPENAI: (
        openai_first,
        STREAM,
        b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"a","choices":[]}\n\n',
    ),
    Dialect.ANTHROPIC: (
        anthropic_first,
        STREAM,
        b'event: ping\ndata: {"type":"ping"}\n\nevent: content_block_stop\n'
        b'data: {"type":"content_block_stop","index":0}\n\n',
    ),
    Dialect.OLLAMA: (
        ollama_first,
        STREAM.replace(b"text/event-stream", b"application/x-ndjson"),
        b'{"model":"a","created_at":"2026-01-01T00:00:00Z","message":{"role":"assistant","content":"w"},"done":false}\n',
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("face", CLIENTS)
async def test_who_is_tired_of_a_stream_stops_the_worker_and_gives_the_lease_back(
    face: Dialect, tmp_path: Path
) -> None:
    opening, head, first = CLIENTS[face]
    gone = asyncio.Event()

    async def begin(upstream: Upstream) -> None:
        await upstream.send(head + chunk(first))
        await upstream.left()
        gone.set()

    async with world(tmp_path, begin, settings=Settings(sse_ping_interval=0)) as up:
        await up.fleet.load("a")
        stream = opening(up)
        assert await anext(stream)
        with pytest.raises(TIRED):
            await anext(stream)
        async with asyncio.timeout(60):
            await gone.wait()
            await up.idle()


@pytest.mark.slow
@pytest.mark.parametrize("face", CLIENTS)
async def test_who_is_tired_of_waiting_for_a_load_leaves_the_queue(face: Dialect, tmp_path: Path) -> None:
    opening, _, _ = CLIENTS[face]
    async with world(tmp_path, holding, load_seconds=30) as up:
        with pytest.raises(TIRED):
            await anext(opening(up))
        async with asyncio.timeout(60):
            await up.idle()
        assert up.requests == []
