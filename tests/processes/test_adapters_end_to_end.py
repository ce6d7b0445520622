"""Adapters from a request to the engine: a real router, a real worker, a tiny model with adapters of PEFT's."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests import lora, tiny
from tests.processes.routers import Router, error_of, text

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
SAGEMAKER = "X-Amzn-SageMaker-Adapter-Identifier"


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def models(real: Router) -> AsyncIterator[Path]:
    """The folder of models with `tiny`, which has the adapter `french`; beside it adapters that no model has yet."""
    folder = real.models
    snapshot = tiny.make("llama", folder / "tiny")
    lora.make(snapshot, snapshot / "adapters" / "french")
    lora.make(snapshot, folder / "more" / "german", seed=3)
    lora.make(tiny.make("llama", folder / "other", hidden_size=32), folder / "more" / "foreign")
    yield folder
    for name in ("tiny", "other", "more"):
        shutil.rmtree(folder / name)


@pytest_asyncio.fixture(loop_scope="session")
async def up(models: Path, real: Router) -> Router:
    await real.serve_presets("[*]\nctx-size = 128\nmax-loras = 2\nparallel = 2\n[tiny]\nalias = t\n")
    return real


async def invoked(up: Router, **more: Any) -> str:
    body = {"inputs": "The quick brown", "parameters": {"max_new_tokens": 12}}
    response = await up.client.post("/models/tiny/invoke", json=body, **more)
    assert response.status_code == 200, response.text
    found: str = response.json()["generated_text"]
    return found


def said(response: httpx.Response) -> tuple[int, str]:
    """Status and message of an answer in LMI's shape."""
    body = response.json()
    return response.status_code, body.get("status") or body["message"]


async def test_an_adapter_is_named_behind_its_model_in_the_body_in_the_query_or_in_a_header(up: Router) -> None:
    plain, french = await text(up, "tiny"), await text(up, "tiny@french")
    assert plain != french
    assert await text(up, "t@FRENCH") == french
    assert await text(up, "tiny", lora="french") == french
    assert await invoked(up) == plain
    assert await invoked(up, params={"adapter": "french"}) == french
    assert await invoked(up, headers={SAGEMAKER: "french"}) == french
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    response = await up.client.post("/v1/chat/completions", json={"model": "t@french", **chat})
    assert (response.headers["x-router-model"], response.json()["model"]) == ("tiny@french", "t@french")
    status, reason = error_of(await up.client.post("/v1/chat/completions", json={"model": "tiny@frensh", **chat}))
    assert (status, reason) == (404, "model_not_found")
    missing = await up.client.post("/models/tiny/invoke", params={"adapter": "frensh"}, json={"inputs": "a"})
    assert missing.status_code == 404
    assert "did you mean french" in missing.json()["message"]
    twice = {"model": "tiny@french", "prompt": "a", "lora": "german"}
    assert error_of(await up.client.post("/v1/completions", json=twice))[0] == 400


async def test_adapters_are_listed_with_their_model(up: Router) -> None:
    data = (await up.client.get("/v1/models")).json()["data"]
    assert [(each["id"], each.get("parent")) for each in data if each["id"].startswith("tiny")] == [
        ("tiny", None),
        ("tiny@french", "tiny"),
    ]
    one = (await up.client.get("/v1/models/tiny@french")).json()
    assert (one["id"], one["parent"]) == ("tiny@french", "tiny")
    (listed,) = (await up.client.get("/lora-adapters", params={"model": "tiny"})).json()
    assert (listed["id"], Path(listed["path"]).name, listed["scale"]) == (0, "french", 1.0)
    assert (await up.client.post("/lora-adapters", json=[])).status_code == 501


async def test_an_adapter_comes_and_goes_by_calls_and_outlives_the_worker(up: Router, models: Path) -> None:
    client, path = up.client, "/models/tiny/adapters"
    german = {"name": "german", "src": str(models / "more" / "german")}
    plain = await text(up, "tiny")
    assert said(await client.post(path, params=german)) == (200, "Adapter german registered")
    with_german = await text(up, "tiny@german")
    assert with_german not in (plain, await text(up, "tiny@french"))
    assert said(await client.post(path, params=german))[0] == 409
    code, message = said(await client.post(path, params={"name": "x", "src": str(models / "more" / "foreign")}))
    assert (code, "is for another model" in message) == (400, True)
    assert said(await client.post(path, params={"name": "x", "src": "/etc"}))[0] == 400
    assert (await client.get(path, params={"limit": 1})).json() == {
        "adapters": [{"name": "french", "src": str(models / "tiny" / "adapters" / "french"), "pin": False}],
        "nextPageToken": "1",
    }
    (row,) = (await client.get(f"{path}/german")).json()
    assert row == {**german, "pin": False}
    # two slots: both pinned would leave none for french, which stands in the folder
    assert said(await client.post(f"{path}/german/update", params={"pin": "true"}))[0] == 200
    pinned = {**german, "name": "second", "pin": "true"}
    assert said(await client.post(path, params=pinned))[0] == 507
    await client.post("/models/unload", params={"wait": "1"}, json={"model": "tiny"})
    assert await text(up, "tiny@german") == with_german, "the next worker was handed it at its start"
    assert (
        said(await client.post(f"{path}/german/update", params={"src": str(models / "tiny/adapters/french")}))[0] == 200
    )
    assert await text(up, "tiny@german") == await text(up, "tiny@french")
    assert said(await client.delete(f"{path}/german")) == (200, "Adapter german unregistered")
    assert said(await client.delete(f"{path}/german"))[0] == 404
    assert said(await client.delete(f"{path}/french"))[0] == 400
    assert error_of(await client.post("/v1/completions", json={"model": "tiny@german", "prompt": "a"}))[0] == 404
    code, message = said(await client.post("/models/other/adapters", params=german))
    assert (code, "enable-lora = on" in message) == (400, True)
