"""A divided model behind a router: a rank that dies is told to clients, and the worker is replaced."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests import tiny
from tests.processes.forking import children
from tests.processes.routers import DEADLINE, Router

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


async def text(up: Router, model: str) -> str:
    body = {"model": model, "prompt": "The quick brown", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    response = await up.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    found: str = response.json()["choices"][0]["text"]
    return found


async def test_a_rank_that_dies_ends_a_stream_with_an_error_and_the_next_request_finds_a_new_worker(
    real: Router, tmp_path: Path
) -> None:
    snapshot = tiny.make("llama", tmp_path / "tiny", vocab_size=512)
    await real.serve_presets(f"[*]\nctx-size = 128\nparallel = 2\n[divided]\nmodel = {snapshot}\ntensor-parallel = 2\n")
    said = await text(real, "divided")
    leader = (await real.workers())["divided"]
    (follower,) = children(leader)
    body = {"model": "divided", "prompt": "The quick", "max_tokens": 100, "ignore_eos": True, "stream": True}
    lines: list[str] = []
    async with asyncio.timeout(DEADLINE):
        try:
            async with real.client.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if not lines:
                        os.kill(follower, signal.SIGKILL)
                    lines.append(line)
        except Exception as broken:  # noqa: BLE001 - the connection is cut behind the error
            lines.append(repr(broken))
        assert any('"error"' in line for line in lines), lines[-3:]
        assert "data: [DONE]" not in lines
        await real.says(rf"rank 1 of 2 \(process {follower}\): was killed by SIGKILL")
        assert await text(real, "divided") == said
    assert (await real.workers())["divided"] != leader
