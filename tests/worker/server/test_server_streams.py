"""Streams over a real socket: whole frames, failures before and after the first byte, comments, disconnects."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from tests.worker import serving as worlds
from tests.worker.clients import openai_client
from tests.worker.fake_engine import SCRIPT, FakeEngine
from tests.worker.serving import TOKEN, Serving, chat, chunks, serving
from worker.errors import ContextExceeded, UnsupportedField
from worker.protocol.dialects import Dialect
from worker.protocol.streams import error_frame

CHAT = "/v1/chat/completions"
DEADLINE = 60.0
LONG = chat("long", max_tokens=8000, logprobs=True, top_logprobs=2)  # the response is longer than a socket's buffers


@contextlib.asynccontextmanager
async def talking(world: Serving, path: str, body: Any) -> AsyncIterator[Any]:
    """A raw connection on which the request has been written: reader and writer."""
    data = json.dumps(body).encode()
    if world.url == "http://worker":
        connector = world.client.connector
        assert isinstance(connector, aiohttp.UnixConnector)
        reader, writer = await asyncio.open_unix_connection(connector.path)
    else:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: worker\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    await writer.drain()
    try:
        async with asyncio.timeout(DEADLINE):
            yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def ended(world: Serving, outcome: str) -> None:
    """Wait until the only request has ended with `outcome`."""
    async with asyncio.timeout(DEADLINE):
        await world.announced.wait()
    assert [event.outcome for event in world.events] == [outcome]


async def test_a_stream_has_the_headers_that_proxies_need() -> None:
    async with serving() as world, world.client.post(world.url + CHAT, json=chat("hi", stream=True)) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/event-stream"
        assert answer.headers["Cache-Control"] == "no-cache, no-transform"
        assert answer.headers["X-Accel-Buffering"] == "no"
        assert answer.headers["Transfer-Encoding"] == "chunked"
        assert "Content-Encoding" not in answer.headers
        assert "X-Request-Id" in answer.headers
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")


async def test_the_frames_of_several_prompts_are_interleaved() -> None:
    async with serving() as world:
        *streamed, _ = chunks(await world.stream("/v1/completions", {"prompt": ["one", "two"]}))
        order = [choice["index"] for chunk in streamed for choice in chunk["choices"]]
        assert order.index(1) < len(order) - 1 - order[::-1].index(0)
        assert order.index(0) < len(order) - 1 - order[::-1].index(1)


async def test_a_text_is_streamed_while_it_is_generated() -> None:
    async with serving() as world, world.client.post(world.url + CHAT, json=chat("hold-later", stream=True)) as answer:
        seen = b""
        while b" G" not in seen:
            seen += await answer.content.readany()
        assert b'finish_reason":"' not in seen
        world.engine.gate.set()
        assert (await answer.read()).endswith(b"[DONE]\n\n")


# Failures


@pytest.mark.parametrize(
    ("content", "status"), [("fail", 500), ("break", 500), ("prefill fail", 500), ("full", 429), ("x " * 300, 400)]
)
async def test_a_failure_before_the_first_byte_keeps_its_status(content: str, status: int) -> None:
    async with serving() as world:
        world.engine.gate.set()  # for the prompt that fails during prefill
        got, headers, body = await world.post(CHAT, chat(content, stream=True))
        assert (got, body["error"]["code"]) == (status, status)
        assert headers["Content-Type"].startswith("application/json")


async def test_a_failure_after_the_first_byte_is_one_frame_and_an_aborted_connection() -> None:
    async with serving() as world, talking(world, CHAT, chat("fail-later", stream=True)) as (reader, _):
        received = await reader.read()
        assert received.startswith(b"HTTP/1.1 200 OK\r\n")
        assert not received.endswith(b"0\r\n\r\n")
        assert b"[DONE]" not in received
        assert received.count(b'"error"') == 1
        frame = received[received.index(b'data: {"error"') :].split(b"\n\n")[0]
        assert json.loads(frame.removeprefix(b"data: ")) == {
            "error": {
                "code": 500,
                "message": "the logits of this sequence are not numbers",
                "type": "server_error",
                "param": None,
                "reason": "internal",
            }
        }
        await ended(world, "error")


@pytest.mark.parametrize("dialect", [Dialect.OPENAI, Dialect.LLAMA_SERVER, Dialect.RESPONSES])
def test_an_error_frame_has_the_further_members_of_the_error(dialect: Dialect) -> None:
    frame = error_frame(dialect, ContextExceeded(12, 10, param="prompt"))
    error = json.loads(frame.partition(b"data: ")[2])["error"]
    assert (error["param"], error["n_prompt_tokens"], error["n_ctx"]) == ("prompt", 12, 10)


def test_an_error_frame_of_anthropic_has_the_details_of_the_error() -> None:
    error = UnsupportedField("no threads", param="thread", extra={"details": {"error_code": "x"}})
    frame = error_frame(Dialect.ANTHROPIC, error, request_id="r")
    assert json.loads(frame.partition(b"data: ")[2])["error"]["details"] == {"error_code": "x"}


async def test_one_failing_prompt_of_several_breaks_the_stream_and_cancels_the_others() -> None:
    async with (
        serving() as world,
        talking(world, "/v1/completions", {"prompt": ["hold", "fail-later"], "stream": True}) as (reader, _),
    ):
        received = await reader.read()
        assert received.count(b'"error"') == 1
        assert not received.endswith(b"0\r\n\r\n")
        await ended(world, "error")
        assert world.engine.journal == ["begin", "begin", "cancelled"]


# Silence


async def test_a_silent_stream_gets_comments() -> None:
    async with serving() as world:
        body = chat("hold-later", stream=True, sse_ping_interval=0.02)
        async with world.client.post(world.url + CHAT, json=body) as answer:
            received = b""
            while received.count(b": ping\n\n") < 3:
                received += await answer.content.readany()
            world.engine.gate.set()
            received += await answer.read()
        frames = received.decode().removesuffix("\n\n").split("\n\n")
        assert {frame for frame in frames if not frame.startswith("data: ")} == {": ping"}
        text = "".join(one["choices"][0]["delta"].get("content") or "" for one in chunks(frames)[:-1])
        assert text.startswith(f"0 {SCRIPT}")


async def test_comments_during_prefill_state_its_progress() -> None:
    body = chat("prefill", stream=True, sse_ping_interval=0.02)
    async with serving() as world, world.client.post(world.url + CHAT, json=body) as answer:
        total = len(world.engine.requests[0].prompt)
        comment = f": prefill done={total // 2} total={total}\n\n".encode()
        assert answer.status == 200
        received = b""
        while received.count(comment) < 2:
            received += await answer.content.readany()
        assert received.replace(comment, b"") == b"", "no other frame has been sent"
        world.engine.gate.set()
        received += await answer.read()
        frames = received.replace(comment, b"").decode().removesuffix("\n\n").split("\n\n")
        assert chunks(frames)[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
        assert chunks(frames)[-1] == "[DONE]"


async def test_no_progress_is_sent_if_comments_are_off() -> None:
    body = chat("prefill", stream=True, sse_ping_interval=-1)
    async with serving() as world, talking(world, CHAT, body) as (reader, _):
        await world.engine.until("halfway")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await reader.read(1)
        world.engine.gate.set()
        assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
        lines = [await reader.readline() for _ in range(6)]
        while b"[DONE]" not in lines[-1]:
            lines.append(await reader.readline())
        assert not any(line.startswith(b": ") for line in lines)


async def test_nothing_is_sent_before_the_first_delta_decides_the_status() -> None:
    body = chat("hold", stream=True, sse_ping_interval=0.01)
    async with serving() as world, talking(world, CHAT, body) as (reader, _):
        await world.engine.until("begin")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await reader.read(1)
        world.engine.gate.set()
        assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"


# Disconnects


PHASES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, chat("hold", stream=True), "begin"),
    (CHAT, chat("hold-later", stream=True), "holding"),
    (CHAT, chat("hold"), "begin"),
    (CHAT, chat("hold-later"), "holding"),
    ("/v1/completions", {"prompt": ["hold", "hold", "hold"], "n": 2}, "begin"),
    ("/v1/embeddings", {"input": "hold"}, "embed"),
]


@pytest.mark.parametrize(("path", "body", "phase"), PHASES, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
async def test_a_disconnect_cancels_all_generations_of_the_request(
    path: str, body: dict[str, Any], phase: str, how: str
) -> None:
    async with serving() as world:
        async with talking(world, path, body) as (_, writer):
            await world.engine.until(phase)
            connection: socket.socket = writer.get_extra_info("socket")
            if how == "half-close":
                writer.write_eof()
            elif how == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            else:
                writer.close()
            await world.engine.until("cancelled")
        await ended(world, "cancelled")
        begun = world.engine.journal.count("begin") + world.engine.journal.count("embed")
        assert world.engine.journal.count("cancelled") == begun


async def test_a_disconnect_is_noticed_after_a_large_body() -> None:
    async with serving() as world:
        async with talking(world, CHAT, chat("hold", metadata={"blob": "x" * 3_000_000})) as (_, writer):
            await world.engine.until("begin")
            writer.close()
            await world.engine.until("cancelled")
        await ended(world, "cancelled")


async def test_the_event_of_a_cancelled_request_counts_the_tokens_so_far() -> None:
    async with serving() as world:
        async with talking(world, CHAT, chat("hold-later", stream=True)) as (_, writer):
            await world.engine.until("holding")
            writer.close()
            await world.engine.until("cancelled")
        await ended(world, "cancelled")
        [event] = world.events
        assert event.completion_tokens == 2
        assert event.prompt_tokens == len(world.engine.requests[0].prompt)
        assert event.ttft > 0


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_does_not_read_is_disconnected(tmp_path: Path, stream: bool) -> None:
    engine = FakeEngine(worlds.tokenizer(), ctx_size=10**6)
    async with (
        serving(engine, token=None, bearer=None, listen=f"unix:{tmp_path}/s.sock", write_timeout=0.1) as world,
        talking(world, CHAT, {**LONG, "stream": stream}) as (reader, writer),
    ):
        writer.transport.pause_reading()
        await ended(world, "cancelled")
        writer.transport.resume_reading()
        with contextlib.suppress(ConnectionError):
            assert b"[DONE]" not in await reader.read()


@pytest.mark.slow
async def test_a_router_may_stop_reading_without_a_time_limit(tmp_path: Path) -> None:
    engines = [FakeEngine(worlds.tokenizer(), ctx_size=10**6) for _ in range(2)]
    async with (
        serving(engines[0], listen=f"unix:{tmp_path}/s.sock", write_timeout=0.1) as world,
        serving(engines[1], token=None, bearer=None, listen=f"unix:{tmp_path}/t.sock", write_timeout=0.1) as stranger,
        talking(world, CHAT, {**LONG, "stream": True}) as (reader, writer),
    ):
        writer.transport.pause_reading()
        await engines[0].until("begin")
        async with talking(stranger, CHAT, {**LONG, "stream": True}) as (_, other):
            other.transport.pause_reading()
            await ended(stranger, "cancelled")  # the router has not read for the same time
        writer.transport.resume_reading()
        while line := await reader.readline():
            if line == b"data: [DONE]\n":
                break
        assert line


async def test_a_failed_stream_raises_an_error_of_openais_client() -> None:
    text = ""
    async with serving() as world, openai_client(world) as client:
        stream = await client.completions.create(model="m", prompt="fail-later", stream=True)
        with pytest.raises(openai.APIError, match="logits"):  # noqa: PT012 - the text before the error counts
            async for chunk in stream:
                text += chunk.choices[0].text
        assert text == "0 G"
