"""Prebuilt models: the same answers as any other, without reading weights."""

import asyncio
import gc
import os
import shutil
from pathlib import Path

import pytest

from tests import tiny
from tests.worker.loaded import complete_one, mapped, options, serving
from worker.api.served_model import vocabulary_facts
from worker.engines.transformers.engine import TransformersEngine
from worker.engines.transformers.preparation import MAX_MODELS, PrebuiltModels, prebuilt_models
from worker.interface import EncoderInput
from worker.program import fork_server
from worker.protocol.argv import Serve
from worker.protocol.snapshot_files import WEIGHTS

PROMPT = (9, 41, 70, 77, 80)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.make("llama", tmp_path / "llama")


@pytest.fixture
def ours() -> PrebuiltModels:
    return PrebuiltModels()


def load(asked: Serve) -> TransformersEngine:
    return TransformersEngine.load(asked, progress=lambda event: None, pulse=lambda event: None)


def test_nothing_of_the_weights_is_read_before_a_worker_wants_them(folder: Path, ours: PrebuiltModels) -> None:
    ours.build(options(folder))
    assert mapped(folder / WEIGHTS) == (1, 0)


async def test_a_prebuilt_model_answers_like_any_other(folder: Path) -> None:
    asked = options(folder)
    async with serving(load(asked)) as engine:
        usual = (await complete_one(engine, PROMPT, max_tokens=24)).tokens
    del engine
    async with asyncio.timeout(60):
        while mapped(folder / WEIGHTS)[0]:  # the thread that closes the engine releases them a little later
            gc.collect()
            await asyncio.sleep(0)
    prebuilt_models.build(asked)
    made = prebuilt_models.find(asked)
    assert made is not None
    assert made.built is not None
    async with serving(load(asked)) as engine:
        assert engine.tokenizer is made.tokenizer, "it was loaded once more"
        assert mapped(folder / WEIGHTS)[0] == 1, "it was built once more"
        assert (await complete_one(engine, PROMPT, max_tokens=24)).tokens == usual


async def test_a_prebuilt_embedder_answers_like_any_other(tmp_path: Path) -> None:
    asked = options(tiny.make("llama-embed", tmp_path / "embedder"))
    text = EncoderInput(list(PROMPT))
    async with serving(load(asked)) as engine:
        usual = await engine.embed([text])
    prebuilt_models.build(asked)
    made = prebuilt_models.find(asked)
    assert made is not None
    assert made.built is not None
    async with serving(load(asked)) as engine:
        assert await engine.embed([text]) == usual


def test_a_prebuilt_model_with_changed_files_is_not_used(folder: Path, ours: PrebuiltModels) -> None:
    asked = options(folder)
    ours.build(asked)
    assert not ours.lacks(asked)
    shutil.copy(folder / "model.safetensors", folder / "new")
    os.replace(folder / "new", folder / "model.safetensors")
    assert ours.find(asked) is None
    assert ours.lacks(asked)
    ours.drop_stale()
    assert len(ours) == 0
    assert mapped(folder / WEIGHTS) == (0, 0), "the old content stays on the disk"


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {"dtype": "bfloat16"}), ("qwen3_moe", {}), ("llama", {"quantization": "bnb-8bit"})],
    ids=["another type", "experts to be stacked", "quantized"],
)
def test_models_that_need_memory_for_weights_are_not_prebuilt(
    family: str, changes: dict[str, str], tmp_path: Path, ours: PrebuiltModels
) -> None:
    asked = options(tiny.make(family, tmp_path / "model"), **changes)
    ours.build(asked)
    made = ours.find(asked)
    assert made is not None, "its tokenizer is as good as any"
    assert made.built is None


def test_weights_that_do_not_lie_where_kernels_expect_them_are_left_to_the_worker(
    folder: Path, ours: PrebuiltModels
) -> None:
    """Weights that must be converted have no prebuilt model."""
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + whole[8 : 8 + length] + b" " + whole[8 + length :])
    asked = options(folder)
    ours.build(asked)
    made = ours.find(asked)
    assert made is not None
    assert made.built is None
    assert mapped(folder / WEIGHTS) == (0, 0)


def test_code_of_a_snapshots_own_never_runs_in_a_fork_server(folder: Path, ours: PrebuiltModels) -> None:
    assert not ours.lacks(options(folder, trust_remote_code=True))


def test_a_model_that_failed_is_not_built_again_until_its_files_change(folder: Path, ours: PrebuiltModels) -> None:
    asked = options(folder)
    ours.exclude(asked)
    assert not ours.lacks(asked)
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert ours.lacks(asked)


def test_the_vocabulary_of_a_prebuilt_model_is_not_read_again(
    folder: Path, ours: PrebuiltModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_server._make(ours, options(folder))
    made = ours.find(options(folder))
    assert made is not None
    size = len(made.tokenizer)
    monkeypatch.setattr(made.tokenizer, "get_vocab", None)
    assert vocabulary_facts(made.tokenizer).size == size


def test_other_options_are_another_model(folder: Path, ours: PrebuiltModels) -> None:
    ours.build(options(folder))
    assert ours.find(options(folder, dtype="bfloat16")) is None
    assert ours.find(options(folder, rope='{"rope-scale": 2.0}')) is None, "its rotations are other ones"
    assert ours.find(options(folder, ctx_size=32, parallel=1, threads=2, name="other")) is not None


@pytest.mark.slow
def test_the_least_recently_requested_model_is_dropped(folder: Path, tmp_path: Path, ours: PrebuiltModels) -> None:
    asked = []
    for number in range(MAX_MODELS + 1):
        linked = tmp_path / str(number)
        linked.symlink_to(folder)
        asked.append(options(linked))
        ours.build(asked[-1])
        ours.lacks(asked[0])
    assert ours.find(asked[0]) is not None
    assert ours.find(asked[1]) is None
    assert len(ours) == MAX_MODELS
