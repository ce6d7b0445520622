"""Requests in the queue of a real router: what is sent to them meanwhile, and when Retry-After is sent."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.config.settings import Settings
from router.fleet.model import FIRST_LOAD_SECONDS
from tests.fakes import CPU, GIB
from tests.processes.routers import Router, chat, error_of, presets, router
from tests.processes.upstreams import unasked, until, world
from worker.protocol.dialects import Dialect
from worker.protocol.routes import ROUTES

PATH = "/v1/chat/completions"
PATIENCE, TIMEOUT = 30.0, 4.0
"""Seconds: the busy worker stays, and there is time for a second request, on a slow machine as well."""
ONE_PLACE = (
    "--models-max", "1", "--models-memory-margin", "64", "--queue-timeout", f"{TIMEOUT:.0f}",
    "--swap-patience", f"{PATIENCE:.0f}",
)  # fmt: skip
SOON = ("--stream-commit-seconds", "0.05", "--sse-ping-interval", "0.1")


async def lines_of(up: Router, model: str) -> AsyncGenerator[str, None]:
    """Of a stream, those that have something in them, up to its orderly end or the broken one behind an error."""
    with contextlib.suppress(httpx.RemoteProtocolError):
        async with up.client.stream("POST", PATH, json=chat(model, stream=True)) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line:
                    yield line


def heard(comment: str) -> tuple[Any, ...]:
    """(position, cause, expected seconds) of a comment in a stream that waits."""
    found = re.fullmatch(r": queued position=(\d+) waiting_for=(\w+) eta_s=(\d+)", comment)
    assert found is not None, comment
    return int(found[1]), found[2], int(found[3])


async def first_planned(lines: AsyncGenerator[str, None]) -> tuple[Any, ...]:
    """The first comment after a plan with this request. Until then the cause is `memory`."""
    while (found := heard(await anext(lines)))[1] == "memory":
        pass
    return found


def told(refused: httpx.Response) -> tuple[Any, ...]:
    """(status, reason, Retry-After) of a refusal."""
    return *error_of(refused), int(refused.headers["retry-after"])


@pytest.mark.slow
async def test_a_waiting_request_gets_its_position_and_cause_and_a_rejected_one_retry_after(tmp_path: Path) -> None:
    """`b` has been loaded before and `c` never; `a` has the one place and is in use until `go`."""
    go = tmp_path / "go"
    sizes = {name: {"ctx-size": 32 * number} for number, name in enumerate("abc", 1)}  # or they are one and the same
    file = presets(tmp_path, sizes | {"c": {"queue-size": 1, **sizes["c"]}})
    async with router("--models-preset", str(file), *ONE_PLACE, *SOON) as up:
        assert (await up.client.post("/models/load?wait=1", json={"model": "b"})).status_code == 200
        found = re.search(r"load_seconds=([0-9.]+)", await up.says("starting→ready"))
        assert found is not None
        load = float(found[1])
        assert (await up.client.post("/models/unload?wait=1", json={"model": "b"})).status_code == 200
        began = asyncio.get_running_loop().time()
        using = asyncio.create_task(up.client.post(PATH, json=chat("a", fake={"hold": str(go)})))
        await up.becomes("a", "loaded")

        def about(seconds: float) -> Any:
            """So many seconds, or less by the time that has passed since the request for `a`."""
            passed = asyncio.get_running_loop().time() - began
            return pytest.approx(seconds - passed / 2, abs=passed / 2 + 2)

        own, behind = PATIENCE + load, PATIENCE + load + FIRST_LOAD_SECONDS
        async with aclosing(lines_of(up, "b")) as first, aclosing(lines_of(up, "c")) as second:
            assert await first_planned(first) == (1, "residency", about(own))
            assert await first_planned(second) == (2, "slots", about(behind))
            assert told(await up.client.post(PATH, json=chat("c"))) == (429, "queue_full", about(behind))
            *refused, seconds = told(await up.client.post(PATH, json=chat("b")))
            assert (refused, seconds) == ([503, "queue_timeout"], about(own - TIMEOUT))
            for stream in (first, second):
                assert '"queue_timeout"' in [line async for line in stream][-1]

        go.touch()
        assert (await using).status_code == 200
        assert (await up.client.post(PATH, json=chat("b"))).status_code == 200


@pytest.mark.asyncio(loop_scope="session")
async def test_the_request_that_loaded_a_model_is_answered_before_its_eviction(one: Router, tmp_path: Path) -> None:
    """Its request is on its way to the worker when another model needs its place."""
    up_to, journal = tmp_path / "up-to", {"_journal": str(tmp_path / "journal")}
    await one.serve(tmp_path, {"a": {"_hold_load": str(up_to), **journal}, "b": journal})
    asked = []
    for name in "ab":
        body = {"model": name, "content": "hello world"}
        sent = one.client.post("/tokenize", json=body, headers={"X-Request-Id": f"of-{name}"})
        asked.append(asyncio.create_task(sent))
        await one.becomes(name, "loading", queued=1)
    up_to.touch()
    async with asyncio.timeout(60):
        assert [(await each).status_code for each in asked] == [200, 200]
    lines = (tmp_path / "journal").read_text().splitlines()
    requests = [line for line in lines if line.startswith("request")]
    assert requests == ["request of-a /tokenize", "request of-b /tokenize"]


# In every dialect that streams

COMMENT = rb": queued position=1 waiting_for=memory eta_s=[1-9]\d*\n\n"
SAID: dict[Dialect, bytes] = {
    Dialect.OPENAI: COMMENT,
    Dialect.LLAMA_SERVER: COMMENT,
    Dialect.RESPONSES: COMMENT,
    Dialect.ANTHROPIC: COMMENT,
    Dialect.OLLAMA: rb'\{"model":"a",.*"done":false\}\n',
    Dialect.FASTCHAT: rb'\{"error_code":0,"text":"",.*\}\0',
    Dialect.LMI: b"",
}
"""The first bytes of a stream that waits for memory, in the format of its API. JSON lines have no comments: Ollama's
stream gets a line without text, FastChat's an empty text, LMI's only its status line."""


STREAMING = {route.dialect: route for route in ROUTES if route.worker and route.streams}


@pytest.mark.parametrize("dialect", STREAMING)
async def test_a_waiting_stream_of_every_dialect_gets_its_position_and_cause(dialect: Dialect, tmp_path: Path) -> None:
    path = STREAMING[dialect].path.replace("{id}", "a")
    async with world(tmp_path, unasked, settings=Settings(stream_commit_seconds=0.01, sse_ping_interval=0.01)) as up:
        up.launcher.set_foreign(CPU, 8 * GIB - 1)
        reader, writer = await up.connect()
        body = json.dumps({"model": "a", "stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        if SAID[dialect]:
            for _ in range(2):
                size = int(await reader.readline(), 16)
                told_ = await reader.readexactly(size)
                assert re.fullmatch(SAID[dialect], told_), told_
                await reader.readline()
        writer.close()
        await until(lambda: not any(worker.leases for worker in up.fleet.workers()))
