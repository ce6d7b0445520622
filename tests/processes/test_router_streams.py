"""Streams through the router: loads, deaths, departures, ends."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.fake_worker import stream_frames
from tests.processes.routers import (
    Router,
    chat,
    error_of,
    is_alive,
    presets,
    router,
)

MARGIN = ("--models-memory-margin", "64")
PATH = "/v1/chat/completions"


pytestmark = pytest.mark.asyncio(loop_scope="session")


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


async def test_a_wedged_worker_is_replaced_and_its_client_told(up: Router, tmp_path: Path) -> None:
    await up.serve(tmp_path, {"a": {"stall-timeout": "1.5", "_pulse_interval": 0.1}})
    body = chat("a", "one two three", stream=True, fake={"hang_after": 1})
    _, rest, _ = await raw_stream(up, body)
    assert b'"reason":"stalled"' in rest
    assert b"[DONE]" not in rest
    assert (await up.client.post(PATH, json=chat("a"))).status_code == 200


async def test_an_answer_that_takes_too_long_is_504(up: Router, tmp_path: Path) -> None:
    await up.serve(tmp_path, {"a": {"request-timeout": "0.5"}})
    await up.client.post("/models/load?wait=1", json={"model": "a"})
    assert error_of(await up.client.post(PATH, json=chat("a", fake={"delay": 30}))) == (504, "request_timeout")
    _, rest, _ = await raw_stream(up, chat("a", "w", stream=True, max_tokens=1000, fake={"delay": 0.05}))
    assert b'"reason":"request_timeout"' in rest


async def test_a_router_that_is_told_to_stop_lets_running_answers_end(tmp_path: Path) -> None:
    file, go = presets(tmp_path, {"a": {}, "b": {}}), tmp_path / "go"
    async with router("--models-preset", str(file), *MARGIN, "--stream-commit-seconds", "0") as up:
        await up.client.post(PATH, json=chat("a"))
        pids = list((await up.workers()).values())
        body = chat("a", "w", stream=True, max_tokens=40, fake={"hold": str(go)})
        async with up.client.stream("POST", PATH, json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            up.process.send_signal(signal.SIGTERM)
            await up.says("stopping")
            assert error_of(await up.client.post(PATH, json=chat("b"))) == (503, "draining")
            assert (await up.client.get("/ready")).status_code == 503
            go.touch()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert await up.process.wait() == 0
        assert not any(is_alive(pid) for pid in pids)
