"""What each dialect's official client makes of a worker that is lost in mid-stream, and of the router's own errors."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest

from router.proxy import Pace
from tests.processes.upstreams import STREAM, Upstream, World, chunk, world

HI: Any = {"model": "a", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
BEGUN = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant",'
    b'"model":"a","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":1,"output_tokens":0}}}\n\n'
)


def claude(socket: Path) -> anthropic.AsyncAnthropic:
    transport = httpx2.AsyncHTTPTransport(uds=str(socket))
    return anthropic.AsyncAnthropic(
        base_url="http://localhost", api_key="k", max_retries=0, http_client=httpx2.AsyncClient(transport=transport)
    )


async def silent(upstream: Upstream) -> None:
    """A worker that is never asked."""
    raise AssertionError


@contextlib.asynccontextmanager
async def dying(folder: Path, first: bytes, headers: bytes = STREAM) -> AsyncIterator[tuple[World, asyncio.Event]]:
    """A router whose worker dies after its first words, once the event is set."""

    async def die(upstream: Upstream) -> None:
        await upstream.send(headers + chunk(first))
        await seen.wait()
        up.launcher.die("a")
        upstream.writer.close()
        raise ConnectionError

    seen = asyncio.Event()
    async with world(folder, die) as up:
        try:
            yield up, seen
        finally:
            seen.set()


async def test_anthropics_client_raises_when_a_worker_is_lost(tmp_path: Path) -> None:
    async with dying(tmp_path, BEGUN) as (up, seen), claude(up.socket) as client:
        stream = await client.messages.create(**HI, stream=True)
        assert (await anext(stream)).type == "message_start"
        seen.set()
        with pytest.raises(anthropic.APIStatusError, match="worker"):
            await anext(stream)


async def test_anthropics_client_knows_the_routers_own_errors(tmp_path: Path) -> None:
    async with world(tmp_path, silent) as up, claude(up.socket) as client:
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.messages.create(**{**HI, "model": "b"})
        body: Any = caught.value.body
        assert body["type"] == "error"
        assert body["error"]["type"] == "not_found_error"
        assert body["request_id"] == caught.value.request_id
        with pytest.raises(anthropic.BadRequestError, match="not loaded"):
            await client.messages.count_tokens(model="a", messages=HI["messages"])
        with pytest.raises(anthropic.APIStatusError) as wrong:
            await client.get("/v1/messages", cast_to=object)
        assert (wrong.value.status_code, json.loads(wrong.value.response.text)["type"]) == (405, "error")


async def test_a_refusal_after_the_status_line_is_an_error_of_anthropics_client(tmp_path: Path) -> None:
    """The worker refuses what is a stream to the client by now."""

    async def refuse(upstream: Upstream) -> None:
        waiting = asyncio.Event()
        asyncio.get_running_loop().call_later(0.15, waiting.set)
        await waiting.wait()
        body = b'{"type":"error","error":{"type":"invalid_request_error","message":"too odd"},"request_id":"r"}'
        head = f"HTTP/1.1 400 Bad\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        await upstream.send(head.encode() + body)

    async with world(tmp_path, refuse, pace=Pace(commit=0.05)) as up, claude(up.socket) as client:
        with pytest.raises(anthropic.APIStatusError, match="too odd"):
            async for _ in await client.messages.create(**HI, stream=True):
                pass
