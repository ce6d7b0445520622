"""On an accelerator: every feature of the engine gives the answers that it gives on the CPU, in float32."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests import tiny
from tests.worker import loaded
from tests.worker.every_kind import comparable, prompts, requests
from tests.worker.stepped import journaled
from worker.engines.transformers.load import fused_norms
from worker.engines.transformers.schedule.scheduler import Batch
from worker.images import EncodedImage
from worker.interface import AdapterChoice, EncoderInput, GenerationRequest, Grammar
from worker.protocol.argv import AdapterSource, encode_adapters

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda:0")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE != "cpu" and not torch.cuda.is_available(), reason="torch sees no accelerator here"),
]
Answers = list[list[loaded.CollectedChoice]]


async def answers(folder: Path, device: str, wanted: list[GenerationRequest], **changes: Any) -> Answers:
    """Answers to `wanted`, requested at once."""
    engine = loaded.load(
        folder, devices=(device,), ctx_size=128, parallel=4, prefill_chunk=16, dtype="float32", **changes
    )
    async with loaded.serving(engine), asyncio.timeout(loaded.DEADLINE):
        return list(await asyncio.gather(*(loaded.collect_choices(engine, each) for each in wanted)))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"kv_tokens": 160}),
        ("llama", {"ngram_size": 2}),
        ("gpt2", {}),
        ("qwen3_moe", {}),
        ("gemma2", {}),
        ("gpt_oss", {}),
        ("deepseek_v2", {}),
        ("deepseek_v32", {}),
        ("mamba", {}),
        ("falcon_h1", {}),
        ("t5", {}),
    ],
    ids=str,
)
async def test_every_kind_of_request_gets_the_answer_of_the_cpu(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = tiny.make(family, tmp_path)
    wanted = requests(prompt_logprobs=family != "t5")
    found, expected = [comparable(await answers(folder, device, wanted, **changes)) for device in (DEVICE, "cpu")]
    drawn = [place for place, one in enumerate(found) if one != expected[place]]
    assert all(wanted[place].sampling.temperature > 0 for place in drawn)
    assert len(drawn) <= 1, "a draw may be so close to the border of two tokens that rounding decides"


async def test_late_masks_of_a_grammar_change_no_text(tmp_path: Path) -> None:
    """A sequence without a mask gets no token in a step, which waits for the mask until the logits are computed."""
    folder = tiny.make("llama", tmp_path)
    held = loaded.generation(prompts()[1], max_tokens=20, grammar=Grammar("regex", "[a-z ]{12}[0-9]{4}"))
    free = loaded.generation(prompts()[2], max_tokens=60, sampling=replace(loaded.GREEDY, ignore_eos=True))
    expected = await answers(folder, "cpu", [held, free])
    async with loaded.serving(
        loaded.load(folder, devices=(DEVICE,), ctx_size=128, parallel=4, dtype="float32")
    ) as engine:
        late = loaded.LateThread()
        engine._grammars._mask_threads = (late, late)
        task = asyncio.create_task(loaded.collect_choices(engine, held))
        neighbour = loaded.CollectedChoice()
        async for delta in engine.generate(free):
            neighbour.add(delta)
            late.run_one()
        async with asyncio.timeout(loaded.DEADLINE):
            while not task.done():
                late.run_one()
                await asyncio.sleep(0)
    assert comparable([await task, [neighbour]]) == comparable(expected)


async def test_without_memory_for_a_step_smaller_ones_give_the_text_of_the_cpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny.make("llama", tmp_path)
    wanted = [loaded.generation(each, max_tokens=12) for each in prompts()[:3]]
    refused: list[int] = []

    def fault(batch: Batch, ahead: bool) -> None:
        if len(batch) == 3 and not refused:
            refused.append(len(batch))
            torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)

    engine, _ = journaled(folder, fault, devices=(DEVICE,), ctx_size=128, parallel=4, dtype="float32")
    async with loaded.serving(engine), asyncio.timeout(loaded.DEADLINE):
        found = list(await asyncio.gather(*(loaded.collect_choices(engine, each) for each in wanted)))
    assert "out of memory in a step of 3 sequences" in caplog.text
    assert comparable(found) == comparable(await answers(folder, "cpu", wanted))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
async def test_a_draft_model_changes_no_text(family: str, tmp_path: Path) -> None:
    folder, draft = tiny.make(family, tmp_path / "target"), tiny.make("llama", tmp_path / "draft", seed=3)
    wanted = requests()
    found = [await answers(folder, DEVICE, wanted, draft_snapshot=name) for name in (str(draft), "")]
    assert comparable(found[0]) == comparable(found[1])


@pytest.mark.parametrize("kind", ["int8", "int4"])
async def test_a_quantized_cache_gives_the_text_of_the_cpu(kind: str, tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path)
    wanted = [loaded.generation(each, max_tokens=12) for each in prompts()]
    found = [await answers(folder, device, wanted, kv_cache_dtype=kind) for device in (DEVICE, "cpu")]
    assert comparable(found[0]) == comparable(found[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_norms_round_like_those_of_the_cpu(dtype: torch.dtype) -> None:
    norms = [LlamaRMSNorm(4096).to(dtype).requires_grad_(False) for _ in range(2)]
    fused = norms[1].to(DEVICE)
    assert fused_norms.fuse(fused) == 1
    hidden_states = torch.randn(64, 1, 4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    found, expected = fused(hidden_states.to(DEVICE)).cpu().float(), norms[0](hidden_states).float()
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


async def test_adapters_give_the_text_of_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="no part of the bundle of scripts/gpu_bundle")
    from tests import lora

    folder = tiny.make("llama", tmp_path / "model")
    sources = [
        AdapterSource(name=name, path=str(lora.make(folder, tmp_path / name, seed=seed)))
        for seed, name in enumerate(("first", "second"))
    ]
    changes: dict[str, Any] = {"adapters": encode_adapters(sources), "max_loras": 2}
    wanted = [
        loaded.generation(prompt, max_tokens=20, adapter=AdapterChoice(name) if name else None)
        for prompt in prompts()
        for name in ("", "first", "second")
    ]
    found = [await answers(folder, device, wanted, **changes) for device in (DEVICE, "cpu")]
    assert comparable(found[0]) == comparable(found[1])


async def test_images_give_the_text_of_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="no part of the bundle of scripts/gpu_bundle")
    from tests import tiny_vision

    folder, found = tiny_vision.make("llava", tmp_path), []
    for device in (DEVICE, "cpu"):
        engine = loaded.load(folder, devices=(device,), ctx_size=400, parallel=3, prefill_chunk=11, dtype="float32")
        async with loaded.serving(engine), asyncio.timeout(loaded.DEADLINE):
            assert engine.vision is not None
            images = [
                EncodedImage(f"image {seed}", tiny_vision.encoded(tiny_vision.picture(40, 30, seed=seed)))
                for seed in (1, 2)
            ]
            text = "<s>Compare PLACE with PLACE now.".replace("PLACE", engine.vision.placeholder)
            tokens, seen = await engine.vision.read(text, images)
            wanted = GenerationRequest(
                id="test", prompt=tuple(tokens), prompt_images=seen, sampling=loaded.GREEDY, max_tokens=24
            )
            found.append([await loaded.collect_choices(engine, wanted)])
    assert comparable(found[0]) == comparable(found[1])


@pytest.mark.parametrize("family", ["bert-embed", "llama-embed"])
async def test_vectors_are_those_of_the_cpu(family: str, tmp_path: Path) -> None:
    folder, found = tiny.make(family, tmp_path), []
    texts = [EncoderInput(tuple(range(3, 3 + length))) for length in (4, 31, 1, 9, 60, 5, 12)]
    for device in (DEVICE, "cpu"):
        async with loaded.serving(loaded.load(folder, devices=(device,), parallel=3, prefill_chunk=64)) as engine:
            found.append(await engine.embed(texts))
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
