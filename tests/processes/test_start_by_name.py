"""A router that is started with names of models, or with nothing at all."""

from pathlib import Path

import pytest

from tests.processes.routers import chat, fake_python, fake_snapshot, router

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


async def test_a_named_folder_is_loaded_at_start_and_answers_requests_without_a_model(tmp_path: Path) -> None:
    one = fake_snapshot(tmp_path / "one")
    keys = ("--python", str(fake_python(tmp_path)), "--required_memory", "64", "--ctx-size=96")
    async with router(str(one), *keys) as up:
        await up.becomes("one", "loaded")
        assert [row["id"] for row in (await up.client.get("/v1/models")).json()["data"]] == ["one"]
        body = {key: value for key, value in chat("").items() if key != "model"}
        for named in ({}, {"model": "gpt-4"}):  # any name, as in llama-server
            assert (await up.client.post("/v1/chat/completions", json=body | named)).status_code == 200
        assert "llamacpp:tokens_predicted_total" in (await up.client.get("/metrics")).text
        props = (await up.client.get("/props")).json()
        assert (props["default_generation_settings"]["n_ctx"], props["total_slots"]) == (96, 4)
        args = (await up.status("one"))["args"]
        assert args[args.index("--ctx-size") + 1] == "96"


async def test_a_router_without_names_serves_the_hub_cache_and_says_so(tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    async with router(environ={"HF_HUB_CACHE": str(cache)}) as up:
        await up.says(f"no model is named, and the hub cache {cache} has none; try router org/name, router -m DIR")
        assert (await up.client.get("/models")).json()["data"] == []
    fake_snapshot(cache / "models--org--kept" / "snapshots" / ("0" * 40))
    (cache / "models--org--kept" / "refs").mkdir()
    (cache / "models--org--kept" / "refs" / "main").write_text("0" * 40)
    async with router(environ={"HF_HUB_CACHE": str(cache)}) as up:
        await up.says(f"no model is named, so these are the models of the hub cache {cache}; or try router org/name")
        assert [row["id"] for row in (await up.client.get("/models")).json()["data"]] == ["org/kept"]
