"""Speculative decoding from a preset to the engine: a real router and real workers with tiny models."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests import tiny
from tests.processes.routers import DEADLINE, Router

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
TEXT = "the cat sat on the mat and " * 6
PRESETS = """
[*]
ctx-size = 256
parallel = 2
[plain]
model = {models}/plain
[lookup]
model = {models}/plain
spec-type = ngram-mod
[drafting]
model = {models}/plain
model-draft = {models}/small
speculative_length = 4
[heavy]
model = {models}/plain
model-draft = {models}/large
"""


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def models(real: Router) -> AsyncIterator[Path]:
    folder = real.models / "speculation"
    tiny.make("llama", folder / "plain")
    tiny.make("llama", folder / "small")  # the same: each of its drafts is accepted
    tiny.make("llama", folder / "large", hidden_size=1024, intermediate_size=4096)
    yield folder
    shutil.rmtree(folder)


@pytest_asyncio.fixture(loop_scope="session")
async def up(models: Path, real: Router) -> Router:
    await real.serve_presets(PRESETS.format(models=models))
    return real


async def completion(up: Router, model: str, **fields: Any) -> Any:
    body = {"model": model, "prompt": TEXT, "n_predict": 60, "temperature": 0, "ignore_eos": True, **fields}
    response = await up.client.post("/completion", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_presets_that_draft_give_the_text_of_one_that_does_not(up: Router) -> None:
    plain = await completion(up, "plain")
    assert "draft_n" not in plain["timings"]
    for model in ("lookup", "drafting"):
        found = await completion(up, model)
        assert found["content"] == plain["content"]
        if model == "drafting":  # the lookup may find nothing
            assert found["timings"]["draft_n"] >= found["timings"]["draft_n_accepted"] > 0
        off = await completion(up, model, **{"speculative.n_max": 0})
        assert off["content"] == plain["content"]
        assert "draft_n" not in off["timings"]
    slots = (await up.client.get("/slots", params={"model": "drafting"})).json()
    assert all(slot["speculative"] for slot in slots)
    counted = 'worker_draft_tokens_total{kind="accepted",model="drafting"}'
    async with asyncio.timeout(DEADLINE):  # the counts come with the worker's next pulse
        while counted not in (await up.client.get("/metrics")).text:
            pass


async def test_the_weights_of_a_draft_model_are_reserved(up: Router, models: Path) -> None:
    reserved = {}
    for model in ("plain", "heavy"):  # the second one may evict the first
        await completion(up, model)
        rows = (await up.client.get("/router/state")).json()["workers"]
        [reserved[model]] = [row["reserved"]["cpu"] for row in rows if row["model"].split(",")[0] == model]
    draft = (models / "large" / "model.safetensors").stat().st_size
    # What is learned about the process after the first load differs by a few MiB.
    assert reserved["heavy"] >= reserved["plain"] + 0.9 * draft
