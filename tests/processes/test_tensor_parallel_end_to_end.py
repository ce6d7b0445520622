"""A divided model behind a router: its adapters, and a rank that dies."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests import lora, tiny
from tests.processes.forking import children
from tests.processes.routers import DEADLINE, Router, text

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


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
