"""Checkpoints with quantized weights, loaded on the CPU: their text and their memory."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate  # type: ignore[import-untyped]
import pytest
import safetensors.torch
import torch
import transformers
from transformers.integrations.finegrained_fp8 import fp8_grouped_mm_experts_forward

from router.config.presets import Preset
from router.memory import checkpoint
from router.memory.segments import compute_bytes, weight_bytes
from tests import quantized_snapshots
from tests.worker.allocated import allocated
from tests.worker.loaded import complete_one, load, serving
from worker.engines.transformers import load_generator
from worker.engines.transformers.attention import paged
from worker.engines.transformers.load import loader, quantization
from worker.engines.transformers.load.layer_split import LayerSplit
from worker.engines.transformers.load.snapshot import load_config
from worker.engines.transformers.run import backends
from worker.errors import StartError
from worker.estimate import estimate
from worker.estimate.largest_steps import GenerationSteps
from worker.protocol.architectures import LIBRARIES
from worker.protocol.argv import Estimate, Serve


def _method(name: str) -> Any:
    module, command = LIBRARIES[quantized_snapshots.said(name)["quant_method"]]
    if not module:
        return name
    is_missing = importlib.util.find_spec(module) is None
    why = f"{module} is not installed: {command}"
    return pytest.param(name, marks=[pytest.mark.extra, pytest.mark.skipif(is_missing, reason=why)])


pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own
]
METHODS = [_method(name) for name in quantized_snapshots.METHODS]
PROMPT = [5, 9, 17, 40, 33, 21, 60, 8, 11]


@pytest.mark.parametrize("method", METHODS)
async def test_a_quantized_checkpoint_gives_the_text_of_its_dequantized_weights(tmp_path: Path, method: str) -> None:
    folder = quantized_snapshots.make(method, tmp_path / "m")
    reported = []
    layers: dict[str, Any] = {"devices": ("cpu", "cpu"), "layers": ("1", "1")}
    for each, split in ((quantized_snapshots.plain(folder), {}), (folder, {}), (folder, layers)):
        async with serving(load(each, parallel=2, ctx_size=64, dtype="float32", **split)) as engine:
            reported.append((await complete_one(engine, PROMPT, max_tokens=8)).tokens)
    assert reported[0] == reported[1] == reported[2]


@pytest.mark.parametrize("method", [_method("pack-quantized"), _method("gptq"), _method("awq")])
async def test_a_checkpoint_that_states_its_quantization_elsewhere_is_loaded_alike(tmp_path: Path, method: str) -> None:
    """As compressed-tensors wrote it first, and as AutoGPTQ and AutoAWQ did, which do not name their method."""
    folder = quantized_snapshots.make(method, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    before = estimate.estimate(Estimate(snapshot=str(folder), ctx_size=64))
    stated = config.pop("quantization_config")
    if method == "gptq":
        del stated["quant_method"]
        stated |= {"model_name_or_path": None, "model_file_base_name": "model", "true_sequential": True}
        (folder / "quantize_config.json").write_text(json.dumps(stated), "utf-8")
        (folder / "model.safetensors").rename(folder / f"gptq_model-4bit-{quantized_snapshots.GROUP}g.safetensors")
    elif method == "awq":
        stated = {"w_bit": 4, "q_group_size": quantized_snapshots.GROUP, "zero_point": True, "version": "GEMM"}
        (folder / "quant_config.json").write_text(json.dumps(stated), "utf-8")
    else:
        config["compression_config"] = stated
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    assert estimate.estimate(Estimate(snapshot=str(folder), ctx_size=64)).weights == before.weights
    reported = []
    for each in (quantized_snapshots.plain(folder), folder):
        async with serving(load(each, parallel=2, ctx_size=64, dtype="float32")) as engine:
            reported.append((await complete_one(engine, PROMPT, max_tokens=8)).tokens)
    assert reported[0] == reported[1]


@pytest.mark.parametrize("method", METHODS)
def test_a_quantized_checkpoint_without_a_tensor_is_refused(tmp_path: Path, method: str) -> None:
    """transformers would draw it at random."""
    folder = quantized_snapshots.make(method, tmp_path / "m")
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    layer = "layers.1.mlp.experts" if method == "mxfp4" else "layers.1.mlp.up_proj"
    kept = {name: tensor for name, tensor in tensors.items() if layer not in name}
    safetensors.torch.save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartError, match=rf"the files lack what \w+ needs: .*{layer}"):
        load(folder, parallel=2, ctx_size=64, dtype="float32")


@pytest.mark.parametrize("method", [_method("gptq"), _method("awq")])
def test_a_mixture_whose_experts_are_quantized_one_by_one_is_refused(tmp_path: Path, method: str) -> None:
    folder = quantized_snapshots.make(method, tmp_path / "m", family="qwen3_moe")
    fact = rf"each of them quantized with {method} \(model\.layers\.0\.mlp\.experts\.0\."
    with pytest.raises(StartError, match=rf"{fact}.*; take one that is quantized with fp8 or mxfp4"):
        load(folder, parallel=2, ctx_size=64, dtype="float32")


def test_fp8_experts_with_static_activations_have_a_remedy() -> None:
    """transformers refuses them in the first step on an accelerator."""
    experts: Any = SimpleNamespace(activation_scheme="static")
    loaded: Any = None
    options = Serve(snapshot="", listen="")
    with (
        pytest.raises(StartError, match=r"'mixtral' cannot be served .*; take a checkpoint with dynamic activations"),
        load_generator._start_errors(loaded, transformers.MixtralConfig(), options, 64),
    ):
        fp8_grouped_mm_experts_forward(experts, *[torch.empty(0)] * 3)


def test_an_fp8_checkpoint_with_scales_of_another_name_is_refused(tmp_path: Path) -> None:
    """As AutoFP8 wrote it. transformers would take the weights without their scales."""
    folder = quantized_snapshots.make("fp8", tmp_path / "m")
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    renamed = {name.replace("weight_scale_inv", "weight_scale"): tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartError, match=r"does not read the scales of this fp8 checkpoint \(model\.layers\.0\."):
        load(folder, parallel=2, ctx_size=64, dtype="float32")


class WithPermutation(transformers.LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """With the tensor that gptqmodel's kernels for Hopper and Blackwell add to each layer, and that no file has."""

    def __init__(self, config: transformers.LlamaConfig):
        super().__init__(config)
        self.model.layers[1].mlp.up_proj.register_buffer("input_perm", torch.empty(0, dtype=torch.int32))


def test_a_tensor_that_a_kernel_adds_is_not_missing(tmp_path: Path) -> None:
    chosen = Estimate(snapshot=str(quantized_snapshots.make("fp8", tmp_path / "m")))
    here = {"": torch.device("cpu")}
    model, missing = quantization.load(WithPermutation, chosen, load_config(chosen), here, torch.float32, ())
    assert "model.layers.1.mlp.up_proj.input_perm" in model.state_dict()
    assert missing == []


def test_a_split_model_is_loaded_onto_its_devices_without_hooks_of_accelerate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cpu:0` is another device by its name, and its tensors report `cpu`: accelerate would copy them each time."""
    monkeypatch.setattr(accelerate.utils.modeling, "check_device_same", lambda one, other: one.type == other.type)
    here, there = torch.device("cpu"), torch.device("cpu", 0)
    folder = quantized_snapshots.make("fp8", tmp_path / "m")
    chosen = Estimate(snapshot=str(folder))
    split = LayerSplit((here, there), (1, 1))
    load = loader.WeightLoad(chosen, load_config(chosen), here, split, False, lambda progress: None, lambda stage: None)
    loaded = load.load_quantized()
    assert set(loaded.model.hf_device_map.values()) == {here, there}
    assert not any(hasattr(module, "_hf_hook") for module in loaded.model.modules())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("method", METHODS)
def test_a_quantized_checkpoint_takes_the_estimated_bytes(tmp_path: Path, method: str, dtype: str) -> None:
    folder = quantized_snapshots.make(method, tmp_path / "m")
    chosen = Estimate(snapshot=str(folder), parallel=2, ctx_size=128, prefill_chunk=64, threads=1, dtype=dtype)
    config = load_config(chosen)
    traced = estimate.trace(chosen, config)
    paged.register()
    loaded = loader.load_model(chosen, config, backends.implementation(chosen, config), lambda progress: None)
    weights = held_bytes(loaded.model)
    assert weights == traced.weights
    preset = Preset(id="m", parallel=2, ctx_size=128, prefill_chunk=64, threads=1, dtype=dtype)
    facts = checkpoint.read(folder)
    assert weights <= 1.001 * weight_bytes(facts, preset, on_host=True) <= 1.06 * weights
    runner, capacity = backends.make_runner(loaded.model, config, chosen, 128, loaded.device, caches=True)
    peak = max(allocated(step) for step in GenerationSteps(runner, capacity, chosen, 128).largest())
    assert peak <= 1.02 * traced.compute <= 1.2 * peak + (1 << 18)
    assert peak <= compute_bytes(facts, preset, 128, on_host=True)
    assert held_bytes(loaded.model) == weights, "no request has anything dequantized or put into order"


def held_bytes(model: torch.nn.Module) -> int:
    """Of parameters and buffers, and of what layers keep beside them, each storage once."""
    kept = [each for layer in model.modules() for each in vars(layer).values() if isinstance(each, torch.Tensor)]
    tensors = [*model.parameters(), *model.buffers(), *kept]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, ["gptqmodel", "pip install"]),
        ({"quant_method": "compressed-tensors"}, ["compressed_tensors", "pip install"]),
        ({"quant_method": "brand-new"}, ["'brand-new'", "cannot load", "not quantized"]),
    ],
)
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_an_unsupported_quantization_is_rejected_before_any_read(
    tmp_path: Path, key: str, said: dict[str, Any], words: list[str]
) -> None:
    folder = quantized_snapshots.make("fp8", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": None, key: said}), "utf-8")
    chosen = Estimate(snapshot=str(folder))
    module, _ = LIBRARIES.get(str(said["quant_method"]), ("", ""))
    if module and importlib.util.find_spec(module):
        pytest.skip(f"{module} is installed")
    with pytest.raises(StartError) as refused:
        estimate.estimate(chosen)
    assert all(word in str(refused.value) for word in words)
