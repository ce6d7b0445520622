"""Conversion for real: a mixture of experts is downloaded, converted, loaded from the copy, and deleted."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.processes.hubs import running_hub
from tests.processes.routers import DEADLINE, Router, router

pytestmark = pytest.mark.slow


async def converted_event(up: Router) -> dict[str, Any]:
    """Return the data of the first `converted` event."""
    async with asyncio.timeout(DEADLINE), up.client.stream("GET", "/router/events?last_event_id=0") as events:
        kind = ""
        async for line in events.aiter_lines():
            kind = line.removeprefix("event: ") if line.startswith("event: ") else kind
            if kind == "converted" and line.startswith("data: "):
                told: dict[str, Any] = json.loads(line.removeprefix("data: "))
                return told
    raise AssertionError("the events ended")


def words_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().split()


async def answer(up: Router, model: str) -> tuple[str, str]:
    """The text of an answer, and the folder with which its worker was started."""
    body = {"model": model, "prompt": "The quick brown fox", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    response = await up.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    pid = (await up.workers())[model]
    words = words_of(pid)
    [snapshot] = [word.removeprefix("--snapshot=") for word in words if word.startswith("--snapshot=")]
    return response.json()["choices"][0]["text"], snapshot


async def unloaded(up: Router, model: str) -> None:
    response = await up.client.post("/models/unload", json={"model": model})
    assert response.status_code == 200, response.text
    await up.becomes(model, "unloaded")


async def test_a_fetched_model_is_converted_once_and_every_load_takes_that_until_it_is_torn_or_unwanted(
    tmp_path: Path,
) -> None:
    model = "org/moe"
    tiny.make("mixtral", tmp_path / "hub" / "org" / "moe", num_hidden_layers=3)
    common = tmp_path / "models.ini"
    common.write_text("[*]\nctx-size = 128\nparallel = 1\nthreads = 1\n")
    converted = tmp_path / "state" / "converted"
    words = ["--models-preset", str(common), "--models-memory-margin", "64", "--fork-server"]
    words += ["--state-dir", str(tmp_path / "state")]
    async with running_hub(tmp_path / "hub") as hub:
        environ = {"HF_ENDPOINT": hub.address, "HF_HUB_CACHE": str(tmp_path / "cache")}
        async with router(*words, environ=environ) as up:
            await up.says("is warm")
            assert (await up.client.post("/models", json={"model": model})).status_code == 200
            event = await converted_event(up)
            assert (event["model"], event["outcome"]) == (model, "done")
            [target] = converted.iterdir()
            usual, used = await answer(up, model)
            assert used == str(target)
            file = target / "model.safetensors"
            assert event["bytes"] < file.stat().st_size < event["bytes"] + 100_000
            [row] = (await up.client.get("/router/state")).json()["prepared"]
            snapshot = row["snapshot"]
            assert snapshot.startswith(str(tmp_path / "cache"))
            assert row == {"snapshot": snapshot, "bytes": file.stat().st_size}
            await unloaded(up, model)
            os.rename(file, tmp_path / "aside")
            assert await answer(up, model) == (usual, snapshot), "it is torn"
            os.rename(tmp_path / "aside", file)
        async with router(*words, "--no-fork-server", "--no-prepare", environ=environ) as up:
            assert (await up.client.get("/router/state")).json()["prepared"] == []
            assert (await up.client.delete("/models", params={"model": model})).status_code == 200
            assert list(converted.iterdir()) == []
