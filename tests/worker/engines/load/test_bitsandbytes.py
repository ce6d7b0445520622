"""Models that bitsandbytes quantizes during the load or has quantized before: really loaded, on the CPU."""

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from router.config.presets import Preset
from router.memory import checkpoint
from router.memory.segments import compute_bytes, weight_bytes
from tests import tiny
from tests.worker.allocated import allocated
from tests.worker.loaded import complete_one, generated, load, mapped, serving
from worker.engines.transformers.attention import paged
from worker.engines.transformers.load import loader
from worker.engines.transformers.load.snapshot import load_config
from worker.engines.transformers.run import backends
from worker.estimate import estimate
from worker.estimate.largest_steps import GenerationSteps
from worker.protocol.argv import Estimate
from worker.protocol.snapshot_files import WEIGHTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extra,
    pytest.mark.skipif(
        importlib.util.find_spec("bitsandbytes") is None,
        reason="bitsandbytes is not installed: pip install -e '.[bitsandbytes]'",
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # of the library's own
]
METHODS = ["bnb-8bit", "bnb-4bit"]
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "initializer_range": 0.02, "vocab_size": 512}
PROMPT = [5, 9, 17, 40, 33, 21, 60, 8, 11]


def as_transformers_loads_it(folder: Path, method: str) -> Any:
    bits: Any = transformers.BitsAndBytesConfig
    asked = bits(load_in_8bit=method == "bnb-8bit", load_in_4bit=method == "bnb-4bit")
    config = transformers.AutoConfig.from_pretrained(folder)
    given = {} if getattr(config, "quantization_config", None) else {"quantization_config": asked}
    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, device_map={"": "cpu"}, **given)


@pytest.mark.parametrize("is_quantized", [False, True], ids=["on load", "before"])
@pytest.mark.parametrize("method", METHODS)
async def test_a_quantized_model_gives_the_text_of_transformers(
    tmp_path: Path, method: str, is_quantized: bool
) -> None:
    folder = tiny.make("llama", tmp_path / "m", **SIZES)
    model = as_transformers_loads_it(folder, method)
    if is_quantized:
        stored = tmp_path / "quantized"
        model.save_pretrained(stored)
        for file in folder.glob("token*"):
            (stored / file.name).write_bytes(file.read_bytes())
        folder, model = stored, as_transformers_loads_it(stored, method)
    expected = generated(model, PROMPT, 8)
    asked: dict[str, Any] = {} if is_quantized else {"quantization": method}
    layers: dict[str, Any] = {"devices": ("cpu", "cpu"), "layers": ("1", str(len(model.model.layers) - 1))}
    for split in ({}, layers):
        async with serving(load(folder, parallel=2, ctx_size=64, **asked, **split)) as engine:
            reported = await complete_one(engine, PROMPT, max_tokens=8)
        assert reported.tokens == expected
    assert logging.getLogger("bitsandbytes").level == logging.ERROR, "it would write a line for each layer and step"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
def test_a_quantized_model_takes_the_estimated_bytes(tmp_path: Path, method: str, dtype: str) -> None:
    folder = tiny.make("llama", tmp_path / "m", dtype=dtype, **SIZES)
    chosen = Estimate(snapshot=str(folder), quantization=method, parallel=2, ctx_size=128, prefill_chunk=64, threads=1)
    config = load_config(chosen)
    traced = estimate.trace(chosen, config)
    paged.register()
    loaded = loader.load_model(chosen, config, backends.implementation(chosen, config), lambda progress: None)
    weights = held_bytes(loaded.model)
    # with 4 bits, kernels of some processors want scales of 16 bits instead of 32, one for 64 elements
    assert weights <= traced.weights <= 1.04 * weights
    preset = Preset(id="m", quantization=method, parallel=2, ctx_size=128, prefill_chunk=64, threads=1)
    facts = checkpoint.read(folder)
    assert weights <= 1.001 * weight_bytes(facts, preset, on_host=True) <= 1.05 * weights
    runner, capacity = backends.make_runner(loaded.model, config, chosen, 128, loaded.device, caches=True)
    peak = max(allocated(step) for step in GenerationSteps(runner, capacity, chosen, 128).largest())
    total = weights + runner.bytes_on(torch.device("cpu")) + peak
    assert total <= traced.weights + traced.context + traced.compute <= 1.2 * total
    assert peak <= compute_bytes(facts, preset, 128, on_host=True)
    assert held_bytes(loaded.model) == weights, "no request has anything quantized anew"


def held_bytes(model: Any) -> int:
    """Of all that quantized layers keep, beside parameters and buffers."""
    return sum(
        {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held(model)}.values()
    )


def held(model: Any) -> Iterator[torch.Tensor]:
    for module in model.modules():
        kept = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        sources: list[Any] = [*kept, getattr(module, "state", None)]
        sources += [state for each in kept if (state := getattr(each, "quant_state", None)) is not None]
        yield from kept
        for source in sources:
            for name in ("CB", "SCB", "absmax", "code", "offset"):
                found = getattr(source, name, None)
                if isinstance(found, torch.Tensor):
                    yield found


def test_layers_that_were_quantized_do_not_keep_the_files_in_memory(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path / "m", **{**SIZES, "hidden_size": 512, "num_hidden_layers": 4})
    chosen = Estimate(snapshot=str(folder), quantization="bnb-4bit", threads=1)
    config = load_config(chosen)
    loaded = loader.load_model(chosen, config, None, lambda progress: None)
    kept = sum(tensor.nbytes for tensor in (loaded.model.model.embed_tokens.weight, loaded.model.lm_head.weight))
    assert loaded.model.lm_head.weight.dtype == torch.float32
    assert mapped(folder / WEIGHTS)[1] <= kept + (1 << 20)
