"""Both estimates include images: weights and activations of the vision tower, and main memory for incoming images."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from router.config.presets import Preset
from router.memory import checkpoint
from router.memory.estimate import estimate as static
from router.memory.estimate import picture_bytes
from tests import tiny_vision
from worker.engines.transformers.load import loader
from worker.engines.transformers.load.snapshot import load_config, load_tokenizer
from worker.engines.transformers.run import vision
from worker.estimate import estimate as exact
from worker.estimate import meta_model
from worker.estimate.largest_steps import GenerationSteps
from worker.estimate.memory_tracer import peak_bytes
from worker.protocol.argv import Estimate
from worker.protocol.memory import HELD_BYTES, OPENING_BYTES

pytestmark = pytest.mark.slow
TOWER = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
SIDES = {"gemma3": 144, "idefics3": 128, "llava": 140}
CTX = 512


@pytest.fixture(scope="module", params=sorted(SIDES))
def snapshot(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small language model behind a tower that outweighs it."""
    family, side = request.param, SIDES[request.param]
    folder = tiny_vision.make(family, tmp_path_factory.mktemp("snapshot"))
    rewrite(folder / "config.json", lambda config: config["vision_config"].update(TOWER, image_size=side))
    rewrite(folder / "processor_config.json", lambda config: enlarge(config, side))
    (folder / "model.safetensors").unlink()
    config = load_config(options(folder))
    loaded = loader.load_model(options(folder), config, None, lambda progress: None)
    loaded.model.save_pretrained(folder)
    return folder


def rewrite(path: Path, change: Any) -> None:
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def enlarge(config: dict[str, Any], side: int) -> None:
    said = config["image_processor"]
    if "height" in said["size"]:
        said.update(size={"height": side, "width": side})
    elif "crop_size" in said:
        said.update(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    else:
        said.update(size={"longest_edge": 2 * side}, max_image_size={"longest_edge": side})
        config["image_seq_len"] = (side // 8) ** 2 // 4


def options(folder: Path, **settings: Any) -> Estimate:
    is_there = (folder / "model.safetensors").is_file()
    settings = {"ctx_size": CTX, "parallel": 2, "prefill_chunk": 32, **settings}
    return Estimate(snapshot=str(folder), load_format="auto" if is_there else "dummy", **settings)


@pytest.fixture(scope="module")
def traced(snapshot: Path) -> meta_model.Traced:
    return exact.trace(options(snapshot), load_config(options(snapshot)))


def test_the_step_with_the_largest_image_is_exact(snapshot: Path, traced: meta_model.Traced) -> None:
    chosen = options(snapshot)
    config = load_config(chosen)
    loaded = loader.load_model(chosen, config, None, lambda progress: None)
    assert traced.weights == meta_model.tensor_bytes(loaded.model)
    processor = vision.TransformersImageProcessor(chosen, config, load_tokenizer(chosen))
    tower = vision.VisionTower(loaded.model, processor.token, loaded.device)
    runner, capacity = meta_model.make_runner(loaded.model, config, chosen, CTX, tower)
    largest = processor.largest(loaded.dtype, CTX)
    assert largest is not None
    [step] = GenerationSteps(runner, capacity, chosen, CTX).with_image(largest)
    plain = max(peak_bytes(each) for each in GenerationSteps(runner, capacity, chosen, CTX).largest())
    assert plain < 0.5 * traced.compute, "the tower is what costs most"
    really = peak_bytes(step)
    assert 0.98 * really <= traced.compute <= 1.1 * really


def test_the_static_estimate_with_images_is_never_below_the_exact_one(
    snapshot: Path, traced: meta_model.Traced
) -> None:
    facts = checkpoint.read(snapshot)
    preset = Preset(id="a", path=str(snapshot), ctx_size=CTX, parallel=2, prefill_chunk=32, threads=1)
    [compute] = static(facts, preset, on_host=False).compute
    assert traced.compute <= compute
    assert picture_bytes(facts, preset) == traced.images == OPENING_BYTES + HELD_BYTES
    [without] = static(facts, replace(preset, limit_images=0), on_host=True).runtime
    assert static(facts, preset, on_host=True).runtime == (without + traced.images,)


def test_the_static_estimate_covers_a_tower_of_published_size(tmp_path: Path) -> None:
    """LLaVA 1.5's: 577 patches, a width of 1,024."""
    folder = tiny_vision.make("llava", tmp_path)
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16}
    text = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 1024}
    rewrite(folder / "config.json", lambda config: config["vision_config"].update(large, image_size=336, patch_size=14))
    rewrite(folder / "config.json", lambda config: config["text_config"].update(text))
    rewrite(folder / "processor_config.json", lambda config: enlarge(config, 336))
    rewrite(folder / "processor_config.json", lambda config: config.update(patch_size=14))
    chosen = Estimate(snapshot=str(folder), load_format="dummy", dtype="bfloat16", ctx_size=1024)
    traced = exact.trace(chosen, load_config(chosen))
    facts = checkpoint.read(folder)
    assert (facts.picture_tokens, facts.picture_elements) == (577, 4 * 336 * 336)
    preset = Preset(id="a", path=str(folder), ctx_size=1024, dtype="bfloat16", threads=1)
    [compute] = static(facts, preset, on_host=False).compute
    assert traced.compute <= compute


def test_images_beyond_the_context_need_no_tower(snapshot: Path, traced: meta_model.Traced) -> None:
    small = options(snapshot, ctx_size=8)
    assert exact.trace(small, load_config(small)).compute < 0.5 * traced.compute
