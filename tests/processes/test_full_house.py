"""Three models at once, each at full batch and full context, in a budget of just their estimates."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from router.config.presets import Preset
from router.memory import checkpoint
from router.memory.estimate import estimate
from tests import tiny
from tests.children import memory
from tests.processes.routers import Router, router

pytestmark = pytest.mark.slow

MIB = 1 << 20
MARGIN = 64
CTX, ROWS = 512, 2
SHAPE = {
    "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_hidden_layers": 4,
    "max_position_embeddings": 1024, "vocab_size": 8000,
}  # fmt: skip
MODELS = {"paged": ("llama", {"num_key_value_heads": 2}), "wide": ("phi", {}), "aligned": ("bloom", {})}


async def ask(up: Router, model: str, seed: int) -> None:
    body: dict[str, Any] = {
        "model": model, "prompt": [5 + (seed + 7 * at) % 400 for at in range(CTX - 16)], "max_tokens": 16,
        "temperature": 1.0, "top_p": 0.9, "logprobs": 5, "ignore_eos": True, "seed": seed,
    }  # fmt: skip
    answer = await up.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == CTX, "the whole context was used"


async def test_three_models_at_full_batch_and_full_context_stay_within_the_limit_less_the_margin(
    tmp_path: Path,
) -> None:
    lines, expected = ["[*]", f"ctx-size = {CTX}", f"parallel = {ROWS}", "threads = 1"], 0
    for name, (family, own) in MODELS.items():
        sizes = SHAPE if family != "bloom" else {"hidden_size": 256, "n_layer": 4, "n_head": 4, "vocab_size": 8000}
        folder = tiny.make(family, tmp_path / name, **sizes, **own)
        said = Preset(id=name, ctx_size=CTX, parallel=ROWS, threads=1)
        expected += estimate(checkpoint.read(folder), said, on_host=True).total
        lines += [f"[{name}]", f"model = {folder}"]
    ini = tmp_path / "models.ini"
    ini.write_text("\n".join(lines) + "\n")
    limit = -(-expected // MIB) + MARGIN
    options = ("--models-preset", str(ini), "--device-limit", f"cpu={limit}", "--models-memory-margin", str(MARGIN))
    async with router(*options) as up:
        await asyncio.gather(*(ask(up, name, seed) for name in MODELS for seed in range(ROWS)))
        await asyncio.gather(*(ask(up, name, 100 + seed) for name in MODELS for seed in range(ROWS)))
        pids = await up.workers()
        assert set(pids) == set(MODELS), "all three are loaded at once, and none was evicted"
        peaks = {name: memory(pid, "VmHWM") for name, pid in pids.items()}
    assert sum(peaks.values()) <= (limit - MARGIN) * MIB, f"{peaks} in {limit - MARGIN} MiB"
