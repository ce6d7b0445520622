"""A model with layers on several devices: inputs are moved where needed, and the text is the same."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from router.config.presets import Preset
from router.memory import checkpoint
from router.memory.estimate import estimate as static_estimate
from tests import lora, quantized_snapshots, tiny
from tests.worker.families import SHALLOW
from tests.worker.loaded import complete_one, generated, load, reference, serving
from worker.engines.transformers.load import layer_split, staging
from worker.engines.transformers.load.safetensors import WeightFile
from worker.engines.transformers.load.snapshot import load_config
from worker.errors import StartError
from worker.estimate import estimate, meta_model
from worker.interface import AdapterChoice
from worker.protocol.argv import AdapterSource, Estimate, encode_adapters

COMMON: dict[str, Any] = {"ctx_size": 64, "parallel": 2, "prefill_chunk": 16}
WHOLE = {**COMMON, "enforce_eager": True}  # of the whole model, only weights and cache are compared
DEEP = {"num_hidden_layers": 3}


def traced(folder: Path, layers: tuple[str, ...], **changes: Any) -> list[meta_model.Traced]:
    """The steps of a model on devices that exist in name only: an operator that is given tensors of two of them, or a
    tensor that was not moved, is an error."""
    devices = tuple(f"cuda:{index}" for index in range(len(layers)))
    options = Estimate(snapshot=str(folder), devices=devices, layers=layers, **{**COMMON, **changes})
    return estimate.trace_split(options, load_config(options))[0]


KINDS = ("llama", "gpt2", "mistral", "gemma2", "falcon-alibi", "jamba", "deepseek_v2")
"""Of each way in which models of today hand things from layer to layer one."""


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_no_operator_is_given_tensors_of_two_devices(family: str, tmp_path: Path) -> None:
    folder = tiny.make(family, tmp_path, **SHALLOW.get(family, {}))
    config = load_config(Estimate(snapshot=str(folder)))
    count: int = config.get_text_config(decoder=True).num_hidden_layers
    shards = traced(folder, ("1", str(count - 1)), prefill_chunk=8, parallel=2)
    assert all(min(each.weights, each.context, each.compute) > 0 for each in shards)


@pytest.mark.slow
def test_each_weight_and_each_key_lies_on_one_device(tmp_path: Path) -> None:
    """Qwen 3's head is its embeddings here, and stays with them."""
    for family in ("llama", "qwen3"):
        folder = tiny.make(family, tmp_path / family, **DEEP)
        options = Estimate(snapshot=str(folder), devices=("cuda:0",), **WHOLE)
        whole = estimate.trace(options, load_config(options))
        shards = traced(folder, ("1", "1", "1"))
        assert sum(each.weights for each in shards) == whole.weights
        assert [each.context for each in shards] == [whole.context // 3] * 3
        logits = max(range(3), key=lambda shard: shards[shard].compute)
        assert logits == {"llama": 2, "qwen3": 0}[family]


@pytest.mark.slow
def test_the_exact_estimate_has_a_figure_for_each_device(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path, **DEEP)
    devices = ("cuda:0", "cuda:1")
    answers = estimate.estimate(Estimate(snapshot=str(folder), devices=devices, layers=("1", "2"), **COMMON))
    assert len(answers.weights) == len(answers.runtime) == 2
    assert answers.context[1] == 2 * answers.context[0]
    assert answers.host > 0


# On the processor, which is one device, all that a split does happens, but for the way between two memories.


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "jamba"])
async def test_text_is_the_same_however_the_layers_lie(family: str, tmp_path: Path) -> None:
    folder = tiny.make(family, tmp_path)
    model = reference(folder)
    count: int = model.config.num_hidden_layers
    prompts = [tuple(3 + (seed + index * 37) % 480 for index in range(length)) for seed, length in ((1, 30), (2, 9))]
    changes: dict[str, Any] = {"devices": ("cpu", "cpu"), "layers": ("1", str(count - 1)), **COMMON}
    async with serving(load(folder, ahead=family in ("llama", "gemma2"), **changes)) as engine:
        reported = await asyncio.gather(
            *(complete_one(engine, prompt, max_tokens=12) for prompt in (*prompts, prompts[0]))
        )
        assert [each.tokens for each in reported] == [generated(model, prompt, 12) for prompt in (*prompts, prompts[0])]
        again = await complete_one(engine, prompts[0], max_tokens=12)
        assert again.tokens == reported[0].tokens
        assert again.cached_tokens == (16 if family in ("llama", "gpt2") else 0), "found on all devices"


@pytest.mark.slow
async def test_adapters_change_the_layers_of_all_devices(tmp_path: Path) -> None:
    """A request with an adapter, one with another, and one without, at once."""
    folder = tiny.make("llama", tmp_path / "m", **DEEP)
    made = [lora.make(folder, tmp_path / name, seed=seed) for seed, name in enumerate(("a", "b"))]
    known = encode_adapters([AdapterSource(name=each.name, path=str(each)) for each in made])
    prompt = tuple(range(3, 40))
    models = [reference(folder), *(lora.adapted(folder, each) for each in made)]
    expected = [generated(model, prompt, 12) for model in models]
    changes: dict[str, Any] = {"devices": ("cpu", "cpu"), "layers": ("1", "2"), **COMMON, "parallel": 3}
    async with serving(load(folder, max_loras=2, adapters=known, **changes)) as engine:
        choices = (None, AdapterChoice("a"), AdapterChoice("b"))
        found = await asyncio.gather(
            *(complete_one(engine, prompt, max_tokens=12, adapter=choice) for choice in choices)
        )
    assert [each.tokens for each in found] == expected
    assert len({tuple(tokens) for tokens in expected}) == 3


@pytest.mark.slow
def test_the_slots_of_adapters_lie_with_their_layers(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path, **DEEP)
    plain, adapted = traced(folder, ("1", "2")), traced(folder, ("1", "2"), max_loras=2, max_lora_rank=8)
    first, second = (after.weights - before.weights for before, after in zip(plain, adapted, strict=True))
    options = Estimate(snapshot=str(folder), devices=("cuda:0",), max_loras=2, max_lora_rank=8, **WHOLE)
    whole = estimate.trace(options, load_config(options)).weights - sum(each.weights for each in plain)
    assert second == 2 * first > 0
    assert first + second == whole
    presets = [Preset(id="m", enable_lora=word, max_loras=2, max_lora_rank=8, **COMMON) for word in ("off", "on")]
    facts = checkpoint.read(folder)
    static = [static_estimate(facts, preset, layers=(1, 2), on_host=False).weights for preset in presets]
    assert [after - before for before, after in zip(*static, strict=True)] == [first, second]


@pytest.mark.slow
@pytest.mark.parametrize("method", [*quantized_snapshots.METHODS, "bnb-8bit", "bnb-4bit"])
def test_the_estimates_have_the_quantized_weights_of_each_device(method: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {}
    if method.startswith("bnb"):
        folder, changes = tiny.make("llama", tmp_path / "m", **DEEP), {"quantization": method}
    else:
        folder = quantized_snapshots.make(method, tmp_path / "m", num_hidden_layers=3)
    options = Estimate(snapshot=str(folder), devices=("cuda:0",), **WHOLE, **changes)
    whole = estimate.trace(options, load_config(options))
    first, second = traced(folder, ("1", "2"), **changes)
    assert first.weights + second.weights == whole.weights
    preset = Preset(id="m", **COMMON, **changes)
    static = static_estimate(checkpoint.read(folder), preset, layers=(1, 2), on_host=False)
    assert static.weights[1] == second.weights
    assert 0 <= first.weights - static.weights[0] <= 1024, "buffers that no file has"
    assert all(found.compute <= bound for found, bound in zip((first, second), static.compute, strict=True))


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_weights_go_to_all_devices_at_once_from_their_files(family: str, tmp_path: Path) -> None:
    """`cpu:0` is no other memory, but another device by its name: what belongs there goes the way through the ring."""
    folder = tiny.make(family, tmp_path)
    expected = {name: each.clone() for name, each in reference(folder).named_parameters()}
    model, files, reported = reference(folder), [WeightFile(folder / "model.safetensors")], list[int]()
    views = dict(files[0].tensors())
    for name, parameter in model.named_parameters():
        parameter.data = views.get(name, parameter.data)
    there = torch.device("cpu", 0)
    layer_split.place(
        model,
        layer_split.LayerSplit((torch.device("cpu"), there), (1, model.config.num_hidden_layers - 1)),
        files,
        reported.append,
    )
    assert all(torch.equal(each, expected[name]) for name, each in model.named_parameters())
    _, stack = layer_split.stack_of(model)
    assert all(files[0].offset(each) is None for each in stack[1:].parameters())
    assert all(files[0].offset(each) is not None for each in stack[0].parameters())
    assert reported == sorted(reported)
    assert reported[-1] >= sum(each.nbytes for each in stack[1:].parameters())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_each_part_has_a_device_by_its_name(family: str, tmp_path: Path) -> None:
    """Qwen 3's head is its embeddings here, and stays with them."""
    first, second = torch.device("cpu"), torch.device("cpu", 0)
    model = reference(tiny.make(family, tmp_path, **DEEP))
    found = layer_split.device_map(model, layer_split.LayerSplit((first, second), (1, 2)))
    parts = ("embed_tokens", "rotary_emb", "layers.0", "layers.1", "layers.2", "norm")
    expected = dict(zip((f"model.{part}" for part in parts), (first,) * 3 + (second,) * 3, strict=True))
    assert found == expected | {"lm_head": {"llama": second, "qwen3": first}[family]}
    assert all(name.startswith(tuple(f"{part}." for part in found)) for name in model.state_dict())


def test_several_devices_divide_the_ring(tmp_path: Path) -> None:
    tensors = {str(number): torch.full((5000,), float(number)) for number in range(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    file, reported = WeightFile(tmp_path / "model.safetensors"), list[int]()
    views = dict(file.tensors())
    here, there = torch.device("cpu"), torch.device("cpu", 0)
    shares = {here: [views[each] for each in "0246"], there: [views[each] for each in "1357"]}
    brought = staging.copy_to_devices(shares, [file], reported.append, staging.RingSize(buffer_bytes=4096))
    for device, share in shares.items():
        for view in share:
            new = brought[device](view)
            assert file.offset(new) is None
            assert torch.equal(new, view)
    assert reported == sorted(reported)
    assert reported[-1] == sum(each.nbytes for each in tensors.values())


@pytest.mark.parametrize(
    ("family", "devices", "layers", "why"),
    [
        ("llama", ("cpu", "cpu"), (), "--layers= must have one number of layers for each of 2 devices"),
        ("llama", ("cpu", "cpu"), ("1", "0"), "--layers=1,0 must have one number"),
        ("llama", ("cpu", "cpu"), ("1", "2"), "--layers=1,2 are 3 layers, the model has 2"),
        ("llama", ("cpu",), ("1", "1"), "--layers=1,1 must have one number"),
        ("llama", (), (), "no device is given"),
        ("t5", ("cpu", "cpu"), ("1", "1"), "'t5' cannot be split over devices: it has an encoder and a decoder"),
        ("llama-embed", ("cpu", "cpu"), ("1", "1"), "embeds or scores texts cannot be split over devices"),
    ],
)
def test_a_split_that_cannot_be_is_refused_with_the_way_out(
    family: str, devices: tuple[str, ...], layers: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    folder = tiny.make(family, tmp_path)
    with pytest.raises(StartError, match=why):
        load(folder, devices=devices, layers=layers)
