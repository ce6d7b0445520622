"""Streams through the router: loads, deaths, departures, ends."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from tests.fake_worker import stream_frames
from tests.processes.routers import (
    Router,
    chat,
    error_of,
    gone,
    is_alive,
    lines_written,
    presets,
    router,
    shared_router,
    until,
)

MARGIN = ("--models-memory-margin", "64")
PATH = "/v1/chat/completions"


pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def impatient(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Router]:
    """Another one, with short times."""
    commit = ("--stream-commit-seconds", "0.2", "--sse-ping-interval", "0.1")
    options = (*commit, "--write-stall", "0.5", "--drain-timeout", "0.5", *MARGIN)
    async with shared_router(tmp_path_factory.mktemp("impatient"), *options) as running:
        yield running


async def raw_stream(up: Router, body: dict[str, Any], *, version: str = "1.1") -> tuple[str, bytes, bool]:
    """(status line, everything after the headers, whether the connection was reset) of one streamed request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", up.port)
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    received = b""
    reset = False
    try:
        async with asyncio.timeout(60):
            while chunk := await reader.read(65536):
                received += chunk
    except ConnectionResetError:
        reset = True
    writer.close()
    header, _, rest = received.partition(b"\r\n\r\n")
    return header.split(b"\r\n")[0].decode(), rest, reset


async def lines_of(up: Router, body: dict[str, Any]) -> list[str]:
    async with up.client.stream("POST", PATH, json=body) as response:
        assert response.status_code == 200
        return [line async for line in response.aiter_lines() if line]


async def test_the_answer_is_the_workers_bytes(up: Router, tmp_path: Path) -> None:
    await up.serve(tmp_path, {"a": {}})
    body = chat("a", "one two three", stream=True)
    async with up.client.stream("POST", PATH, json=body, headers={"X-Request-Id": "r1"}) as response:
        got = b"".join([chunk async for chunk in response.aiter_raw()])
        assert response.headers["content-type"] == "text/event-stream"
        assert response.headers["cache-control"] == "no-cache, no-transform"
        assert response.headers["x-accel-buffering"] == "no"
        assert "server-timing" in response.headers
    assert got == b"".join(stream_frames(PATH, body, model="a", id="r1")) + b"data: [DONE]\n\n"


async def test_tokens_arrive_one_by_one_while_another_model_loads(up: Router, tmp_path: Path) -> None:
    go = tmp_path / "go"
    await up.serve(tmp_path, {"a": {}, "slow": {"_hold_load": str(go)}})
    await up.client.post(PATH, json=chat("a"))
    loading = asyncio.create_task(up.client.post(PATH, json=chat("slow")))
    await up.becomes("slow", "loading")
    body = chat("a", "w", stream=True, max_tokens=5, fake={"delay": 0.02})
    assert len(await lines_of(up, body)) == 6
    assert (await up.client.post(PATH, json=chat("a"))).status_code == 200
    assert not loading.done()
    go.touch()
    assert (await loading).status_code == 200


async def test_a_stream_that_waits_long_gets_its_status_and_comments(impatient: Router, tmp_path: Path) -> None:
    go = tmp_path / "go"
    await impatient.serve(tmp_path, {"a": {"_hold_load": str(go)}})
    async with impatient.client.stream("POST", PATH, json=chat("a", stream=True)) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        comments = [await anext(lines) for _ in range(6)]
        assert any(line.startswith(": loading") for line in comments)
        go.touch()
        rest = [line async for line in lines if line.startswith("data:")]
    assert rest[-1] == "data: [DONE]"
    assert len(rest) == 4


async def test_an_early_failure_keeps_its_status_and_a_late_one_becomes_a_frame(
    impatient: Router, tmp_path: Path
) -> None:
    await impatient.serve(
        tmp_path, {"a": {"_die_at_start": 3, "_message": "no good"}, "b": {"_deaf": True, "start-timeout": "0.5"}}
    )
    await impatient.client.post(PATH, json=chat("a"))
    response = await impatient.client.post(PATH, json=chat("a", stream=True))
    assert error_of(response) == (500, "load_failed")
    status, rest, _ = await raw_stream(impatient, chat("b", stream=True))
    assert " 200 " in status
    comments, _, frame = rest.partition(b"data: ")
    assert b": loading" in comments
    assert json.loads(frame.partition(b"\n\n")[0])["error"]["reason"] == "load_backoff"
    assert not rest.endswith(b"0\r\n\r\n"), "no client may take that for the whole answer"


async def test_a_worker_killed_in_mid_stream_gives_an_error_frame_and_an_aborted_connection(
    up: Router, tmp_path: Path
) -> None:
    await up.serve(tmp_path, {"a": {}})
    await up.client.post(PATH, json=chat("a"))
    (pid,) = (await up.workers()).values()
    seen: list[str] = []

    async def listen() -> None:
        body = chat("a", "w", stream=True, max_tokens=1000, fake={"delay": 0.01})
        async with up.client.stream("POST", PATH, json=body) as response:
            async for line in response.aiter_lines():
                seen.extend([line] if line else [])
                if line and len(seen) == 3:
                    os.kill(pid, signal.SIGKILL)

    with pytest.raises(httpx.RemoteProtocolError):
        await listen()
    error = json.loads(seen[-1].removeprefix("data: "))["error"]
    assert (error["code"], error["reason"]) == (502, "worker_crashed")
    assert "data: [DONE]" not in seen
    assert not any('"finish_reason":"' in line for line in seen)
    assert (await up.client.post(PATH, json=chat("a"))).status_code == 200
    assert (await up.workers())["a"] != pid


async def test_the_official_client_raises_when_its_stream_breaks(up: Router, tmp_path: Path) -> None:
    await up.serve(tmp_path, {"a": {}})
    body: dict[str, Any] = {"fake": {"die_after": 3, "die_code": -9, "delay": 0.01}}
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{up.port}/v1", api_key="x", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="a", messages=[{"role": "user", "content": "w " * 50}], stream=True, extra_body=body
        )
        with pytest.raises((openai.APIError, httpx.RemoteProtocolError)):
            async for _ in stream:
                pass


async def test_http_1_0_sees_a_reset_and_not_an_orderly_end(up: Router, tmp_path: Path) -> None:
    await up.serve(tmp_path, {"a": {}})
    body = chat("a", "w " * 50, stream=True, fake={"die_after": 3, "die_code": -9, "delay": 0.01})
    status, rest, reset = await raw_stream(up, body, version="1.0")
    assert " 200 " in status
    assert reset
    assert b"worker_crashed" in rest
    status, rest, reset = await raw_stream(up, chat("a", stream=True), version="1.0")
    assert rest.endswith(b"data: [DONE]\n\n")
    assert not reset


async def test_a_death_before_the_first_byte_is_retried_once_in_silence(up: Router, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    await up.serve(tmp_path, {"a": {"_journal": str(journal)}})
    response = await up.client.post(PATH, json=chat("a", fake={"die_after": 0, "die_code": -9}))
    assert error_of(response) == (502, "worker_crashed")
    assert response.headers["x-should-retry"] == "true"
    lines = journal.read_text().splitlines()
    assert sum(line.startswith("request") for line in lines) == 2
    assert (await up.client.post(PATH, json=chat("a"))).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_its_work(up: Router, tmp_path: Path, stream: bool) -> None:
    journal = tmp_path / "journal"
    await up.serve(tmp_path, {"a": {"_journal": str(journal)}})
    async with lines_written(journal) as lines:
        body = chat("a", "w", stream=stream, max_tokens=3000, fake={"delay": 0.01})
        asked = asyncio.create_task(up.client.post(PATH, json=body, headers={"X-Request-Id": "leaver"}))
        await until(lines, "request leaver")
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lines, "cancelled leaver")
        status = await up.status("a")
        assert status["in_flight"] == 0


async def test_a_client_that_disconnects_before_its_model_is_ready_evicts_nothing(tmp_path: Path) -> None:
    go = tmp_path / "go"
    file = presets(tmp_path, {"a": {}, "b": {"_hold_load": str(go)}})
    async with router("--models-preset", str(file), "--models-max", "1", *MARGIN) as up:
        body = chat("a", "w", stream=True, max_tokens=3000, fake={"delay": 0.01})
        async with up.client.stream("POST", PATH, json=body) as busy:
            await anext(busy.aiter_lines())
            asked = asyncio.create_task(up.client.post(PATH, json=chat("b")))
            await up.becomes("b", "loading")
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await up.becomes("b", "unloaded")
            assert (await up.status("a"))["value"] == "loaded"


async def test_a_half_closed_connection_counts_as_leaving(up: Router, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    await up.serve(tmp_path, {"a": {"_journal": str(journal)}})
    async with lines_written(journal) as lines:
        reader, writer = await asyncio.open_connection("127.0.0.1", up.port)
        data = json.dumps(chat("a", "w", stream=True, max_tokens=3000, fake={"delay": 0.01})).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nX-Request-Id: half\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await reader.readuntil(b"data:")
        writer.write_eof()
        await until(lines, "cancelled half")
        writer.close()


async def test_a_reader_that_stalls_is_dropped_and_holds_up_nobody(impatient: Router, tmp_path: Path) -> None:
    await impatient.serve(tmp_path, {"a": {}})
    await impatient.client.post(PATH, json=chat("a"))
    stalled = socket.create_connection(("127.0.0.1", impatient.port))
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    data = json.dumps(chat("a", "w" * 5000, stream=True, max_tokens=20_000)).encode()
    stalled.sendall(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    assert (await impatient.client.post(PATH, json=chat("a"))).status_code == 200
    await impatient.says("the client is gone")
    assert (await impatient.status("a"))["in_flight"] == 0
    stalled.close()


async def test_a_wedged_worker_is_replaced_and_its_client_told(up: Router, tmp_path: Path) -> None:
    await up.serve(tmp_path, {"a": {"stall-timeout": "0.6", "_pulse_interval": 0.1}})
    body = chat("a", "one two three", stream=True, fake={"hang_after": 1})
    _, rest, _ = await raw_stream(up, body)
    assert b'"reason":"stalled"' in rest
    assert b"[DONE]" not in rest
    assert (await up.client.post(PATH, json=chat("a"))).status_code == 200


async def test_an_answer_that_takes_too_long_is_504(up: Router, tmp_path: Path) -> None:
    await up.serve(tmp_path, {"a": {"request-timeout": "0.5"}})
    await up.client.post("/models/load?wait=1", json={"model": "a"})
    response = await up.client.post(PATH, json=chat("a", fake={"delay": 30}))
    assert error_of(response) == (504, "request_timeout")
    _, rest, _ = await raw_stream(up, chat("a", "w", stream=True, max_tokens=1000, fake={"delay": 0.05}))
    assert b'"reason":"request_timeout"' in rest


async def test_an_unload_cuts_streams_only_after_the_drain_timeout(impatient: Router, tmp_path: Path) -> None:
    await impatient.serve(tmp_path, {"a": {}})
    body = chat("a", "w", stream=True, max_tokens=3000, fake={"delay": 0.02})
    streaming = asyncio.create_task(raw_stream(impatient, body))
    await impatient.becomes("a", "loaded", in_flight=1)
    assert (await impatient.client.post("/models/unload", json={"model": "a"})).status_code == 200
    assert (await impatient.status("a"))["draining"] is True
    _, rest, _ = await streaming
    assert b'"reason":"draining"' in rest
    await impatient.becomes("a", "unloaded", reason="requested")


async def test_a_router_that_is_told_to_stop_lets_running_answers_end(tmp_path: Path) -> None:
    file = presets(tmp_path, {"a": {}, "b": {}})
    async with router("--models-preset", str(file), *MARGIN) as up:
        await up.client.post(PATH, json=chat("a"))
        pids = list((await up.workers()).values())
        body = chat("a", "w", stream=True, max_tokens=40, fake={"delay": 0.02})
        async with up.client.stream("POST", PATH, json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            up.process.send_signal(signal.SIGTERM)
            await up.says("stopping")
            assert error_of(await up.client.post(PATH, json=chat("b"))) == (503, "draining")
            assert (await up.client.get("/ready")).status_code == 503
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert await up.process.wait() == 0
        assert not any(is_alive(pid) for pid in pids)


@pytest.mark.parametrize("phase", ["idle", "loading", "streaming"])
async def test_no_child_outlives_the_router(tmp_path: Path, phase: str) -> None:
    journal, go = tmp_path / "journal", tmp_path / "go"
    behaviour: dict[str, Any] = {"_journal": str(journal), "_ignore_sigterm": True, "_grandchild": "group"}
    if phase == "loading":
        behaviour["_hold_load"] = str(go)
    file = presets(tmp_path, {"a": behaviour})
    async with lines_written(journal) as lines, router("--models-preset", str(file), *MARGIN) as up:
        body = chat("a", "w", stream=True, max_tokens=3000, fake={"delay": 0.01})
        asked = asyncio.create_task(up.client.post(PATH, json=body if phase == "streaming" else chat("a")))
        pid = int((await until(lines, "started")).split()[1])
        grandchild = int((await until(lines, "grandchild")).split()[1])
        if phase != "loading":
            await until(lines, "request")
        if phase == "idle":
            await asked
        assert is_alive(pid)
        await up.end(signal.SIGKILL)
        assert await gone([pid, grandchild], 1.0)
        await asyncio.gather(asked, return_exceptions=True)
