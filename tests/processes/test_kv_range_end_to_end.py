"""A real model with `parallel` 64 on a device that has room for the KV cache of a few requests only."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.processes.routers import Router, router

MIB = 1 << 20
PARALLEL, CTX = 64, 1024
REQUESTS = 4  # whole contexts that fit beside the least
SHAPE = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}  # 16 KiB a token

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


def model(folder: Path) -> Path:
    """Return a file of presets with the model `m`."""
    snapshot = tiny.make("llama", folder / "m", **SHAPE, max_position_embeddings=CTX)
    file = folder / "models.ini"
    file.write_text(f"[m]\nmodel = {snapshot}\nparallel = {PARALLEL}\nctx-size = {CTX}\n")
    return file


async def plan(up: Router) -> dict[str, Any]:
    found: dict[str, Any] = (await up.client.get("/router/plan", params={"model": "m"})).json()
    return found


async def ask(up: Router, number: int) -> int:
    """Send one request of 240 tokens; return the number of tokens of its answer."""
    body = {"model": "m", "prompt": [7 + number % 50] * 200, "max_tokens": 40, "ignore_eos": True}
    answer = await up.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    tokens: int = answer.json()["usage"]["completion_tokens"]
    return tokens


async def test_64_requests_at_once_are_answered_through_a_pool_for_a_few(up: Router, tmp_path: Path) -> None:
    file = model(tmp_path)
    await up.serve_presets(file.read_text())
    found = await plan(up)
    least, most = found["kv_cache"]["least"]["bytes"], found["kv_cache"]["most"]["bytes"]
    assert most == PARALLEL * least, "most of the device is the cache"
    limit = -(-(found["needs"][0] + REQUESTS * least) // MIB)
    options = ("--models-preset", str(file), "--device-limit", f"cpu={limit + 1}", "--models-memory-margin", "1")
    async with router(*options) as small:
        for count in (PARALLEL, 8):  # the second load is planned with what was learned from the first one
            requests = [asyncio.create_task(ask(small, number)) for number in range(count)]
            while not all(request.done() for request in requests):
                await asyncio.wait(requests, timeout=0.2)
                await within_reservation(small, limit * MIB)
            assert [request.result() for request in requests] == [40] * count
            cache = (await small.status("m"))["kv_cache"]
            assert (
                CTX == cache["least"]["tokens"] < cache["granted"]["tokens"] < cache["most"]["tokens"] == PARALLEL * CTX
            )
            assert cache["granted"]["tokens"] < 12 * CTX, "a few requests"
            status = await small.becomes("m", "loaded", pulse=bool)  # the answers may come before the first pulse
            assert status["pulse"]["cache"]["total"] == cache["granted"]["tokens"]
            assert (await small.client.post("/models/unload", json={"model": "m"})).status_code == 200
            await small.has_no_workers()


async def within_reservation(up: Router, limit: int) -> None:
    """Check that a ready worker has no more than was reserved for it, and that this is within the limit."""
    for worker in (await up.client.get("/router/state")).json()["workers"]:
        if worker["state"] == "ready":
            assert worker["measured"]["cpu"] <= worker["reserved"]["cpu"] <= limit
