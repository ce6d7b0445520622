"""Models of a hub through the router: a download first, then an offline load; a real worker and a fake hub."""

from pathlib import Path

import pytest

from tests import lora
from tests.processes.hubs import Hub
from tests.processes.routers import SECRET, Router, error_of, router
from tests.tiny import make

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
PRESETS = "[*]\nctx-size = 64\nthreads = 1\n"


async def test_a_model_of_the_hub_is_fetched_once_then_served_offline(real: Router, hub: Hub, tmp_path: Path) -> None:
    make("llama", hub.root / "org" / "tiny")
    file = tmp_path / "models.ini"
    file.write_text(f"{PRESETS}[small]\nhf-repo = org/tiny\n[gone]\nhf-repo = org/gone\n")
    body = {"model": "small", "prompt": "hello", "max_tokens": 4, "temperature": 0}
    await real.serve_presets(file.read_text())
    assert (await real.status("small"))["value"] == "unloaded"
    response = await real.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    text = response.json()["choices"][0]["text"]
    assert any("downloading→queued" in line for line in real.log)
    assert not any(SECRET in line for line in real.log)
    response = await real.client.post("/v1/completions", json={**body, "model": "gone"})
    assert error_of(response, "org/gone") == (500, "load_failed")
    assert (await real.status("gone"))["failed"] is True
    cache = {"HF_HUB_CACHE": str(real.folder / "cache")}
    async with router("--models-preset", str(file), "--offline", "--fork-server", environ=cache) as up:
        await up.says("is warm")
        response = await up.client.post("/v1/completions", json=body)
        assert response.json()["choices"][0]["text"] == text
        response = await up.client.post("/v1/completions", json={**body, "model": "gone"})
        assert error_of(response, "--offline") == (500, "load_failed")
        sources = {entry["id"]: entry["source"] for entry in (await up.client.get("/models")).json()["data"]}
        assert sources.items() >= {"org/tiny": "cache", "small": "preset", "gone": "preset"}.items()
    await real.serve_presets(PRESETS)
    assert (await real.client.delete("/models", params={"model": "org/tiny"})).status_code == 200


async def test_adapters_of_the_hub_come_before_their_model_is_loaded_and_by_a_call_at_once(
    real: Router, hub: Hub, tmp_path: Path
) -> None:
    snapshot = make("llama", tmp_path / "tiny")
    for number, name in enumerate(("french", "german")):
        lora.make(snapshot, hub.root / "org" / name, seed=number)
    await real.serve_presets(f"{PRESETS}[tiny]\nmodel = {snapshot}\nlora = org/french, org/gone\n")
    body = {"prompt": "hello", "max_tokens": 8, "temperature": 0}
    texts = []
    for name in ("tiny", "tiny@french"):
        response = await real.client.post("/v1/completions", json={"model": name, **body})
        assert response.status_code == 200, response.text
        texts.append(response.json()["choices"][0]["text"])
    response = await real.client.post("/v1/completions", json={"model": "tiny@gone", **body})
    assert response.status_code == 400, "what cannot be fetched does not keep the model from its users"
    assert "cannot be used" in response.json()["error"]["message"]
    registered = await real.client.post("/adapters", params={"name": "de", "src": "org/german", "model": "tiny"})
    assert registered.json() == {"status": "Adapter de registered"}
    response = await real.client.post("/v1/completions", json={"model": "tiny@de", **body})
    texts.append(response.json()["choices"][0]["text"])
    assert len(set(texts)) == 3
    response = await real.client.post("/adapters", params={"name": "no", "src": "org/none", "model": "tiny"})
    assert (response.status_code, "org/none" in response.json()["message"]) == (500, True)
