"""A T5 served by a real worker behind a router: completions and chat, as any other model."""

from pathlib import Path

import pytest
import torch

from tests import tiny
from tests.processes.routers import Router, chat
from tests.worker.loaded import generated, reference

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


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
