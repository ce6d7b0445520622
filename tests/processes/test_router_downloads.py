"""Models of a hub through the router: a download first, then an offline load; a real worker and a fake hub."""

from pathlib import Path

import pytest

from tests import lora
from tests.processes.hubs import running_hub
from tests.processes.routers import error_of, router
from tests.tiny import make

pytestmark = pytest.mark.slow


async def test_a_model_of_the_hub_is_fetched_once_then_served_offline(tmp_path: Path) -> None:
    make("llama", tmp_path / "hub" / "org" / "tiny")
    file = tmp_path / "models.ini"
    file.write_text("[*]\nctx-size = 64\nthreads = 1\n[tiny]\nhf-repo = org/tiny\n[gone]\nhf-repo = org/gone\n")
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}
    cache = {"HF_HUB_CACHE": str(tmp_path / "cache")}
    async with running_hub(tmp_path / "hub") as hub:
        environ = {**cache, "HF_ENDPOINT": hub.address, "HF_TOKEN": "hf_secretOfThisTest"}
        async with router("--models-preset", str(file), "--fork-server", environ=environ) as up:
            await up.says("is warm")
            assert (await up.status("tiny"))["value"] == "unloaded"
            response = await up.client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            text = response.json()["choices"][0]["text"]
            assert any("downloading→queued" in line for line in up.log)
            assert not any("hf_secretOfThisTest" in line for line in up.log)
            response = await up.client.post("/v1/completions", json={**body, "model": "gone"})
            assert error_of(response) == (500, "load_failed")
            assert "org/gone" in response.json()["error"]["message"]
            assert (await up.status("gone"))["failed"] is True
    async with router("--models-preset", str(file), "--offline", environ=cache) as up:
        response = await up.client.post("/v1/completions", json=body)
        assert response.json()["choices"][0]["text"] == text
        response = await up.client.post("/v1/completions", json={**body, "model": "gone"})
        assert error_of(response) == (500, "load_failed")
        assert "--offline" in response.json()["error"]["message"]
        entries = {entry["id"]: entry["source"] for entry in (await up.client.get("/models")).json()["data"]}
        assert entries == {"org/tiny": "cache", "tiny": "preset", "gone": "preset"}


async def test_adapters_of_the_hub_come_before_their_model_is_loaded_and_by_a_call_at_once(tmp_path: Path) -> None:
    snapshot = make("llama", tmp_path / "tiny")
    for number, name in enumerate(("french", "german")):
        lora.make(snapshot, tmp_path / "hub" / "org" / name, seed=number)
    file = tmp_path / "models.ini"
    lines = f"[*]\nctx-size = 64\nthreads = 1\n[tiny]\nmodel = {snapshot}\nlora = org/french, org/gone\n"
    file.write_text(lines)
    body = {"prompt": "hello", "max_tokens": 8, "temperature": 0}
    async with running_hub(tmp_path / "hub") as hub:
        environ = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": hub.address}
        async with router("--models-preset", str(file), "--fork-server", environ=environ) as up:
            await up.says("is warm")
            texts = []
            for name in ("tiny", "tiny@french"):
                response = await up.client.post("/v1/completions", json={"model": name, **body})
                assert response.status_code == 200, response.text
                texts.append(response.json()["choices"][0]["text"])
            response = await up.client.post("/v1/completions", json={"model": "tiny@gone", **body})
            assert response.status_code == 400, "what cannot be fetched does not keep the model from its users"
            assert "cannot be used" in response.json()["error"]["message"]
            registered = await up.client.post("/adapters", params={"name": "de", "src": "org/german"})
            assert registered.json() == {"status": "Adapter de registered"}
            response = await up.client.post("/v1/completions", json={"model": "tiny@de", **body})
            texts.append(response.json()["choices"][0]["text"])
            assert len(set(texts)) == 3
            response = await up.client.post("/adapters", params={"name": "no", "src": "org/none"})
            assert (response.status_code, "org/none" in response.json()["message"]) == (500, True)
