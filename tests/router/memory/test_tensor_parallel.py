"""Tensor parallelism: conditions, and the estimate of equal parts."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.presets import ALL_DEVICES, Preset
from router.memory import sharding, tensor_parallel
from router.memory.checkpoint_facts import Checkpoint, Part, Tally, effective_ctx, from_config
from router.memory.estimate import MemoryEstimate
from router.memory.estimate import estimate as estimate_whole
from router.memory.segments import weight_bytes
from router.memory.sharding import Choice, Indivisible, choices
from router.planner.ledger import DeviceId
from tests.router.checkpoints import most_context
from tests.router.large import BIG, CPU, GIB, GPU, LAYER

LARGE = replace(BIG, matrix_elements=80 * (LAYER - 2 * 8192), kv_heads=8)
ROOM = dict.fromkeys(GPU, 100 * GIB)


def preset(**changes: Any) -> Preset:
    return Preset(id="a", **changes)


def with_widths(**members: int) -> Checkpoint:
    config = {"hidden_size": 8192, "num_experts_per_tok": 8, **members}
    stated = from_config(
        config, embedding=(9, 8192), key_rows=0, most_key_rows=0, query_rows=0, stored_dtype="bfloat16"
    )
    return replace(LARGE, mlp_widths=stated.mlp_widths)


def ways(facts: Checkpoint, said: Preset, devices: list[DeviceId], room: Mapping[DeviceId, int]) -> list[Choice]:
    return list(choices(facts, said, devices, devices, room))


def test_tensor_parallel_is_the_number_of_devices() -> None:
    (found,) = ways(LARGE, preset(tensor_parallel=2), GPU, ROOM)
    assert (found.ranks, found.shards, found.devices, found.place) == (2, 2, frozenset(GPU), ())
    (found,) = ways(LARGE, preset(tensor_parallel=ALL_DEVICES), GPU, ROOM)
    assert found.shards == 4
    with pytest.raises(Indivisible, match="a: tensor-parallel = 8 needs 8 accelerators, and there are 4 that"):
        ways(LARGE, preset(tensor_parallel=8), GPU, ROOM)
    assert ways(LARGE, preset(tensor_parallel=ALL_DEVICES), GPU[:1], ROOM) == [Choice(devices=frozenset(GPU[:1]))]


def test_split_mode_tensor_uses_the_fewest_possible_devices() -> None:
    said = preset(split_mode="tensor")
    assert [each.shards for each in ways(LARGE, said, GPU, ROOM)] == [2, 4], "3 divides no heads"
    assert [each.shards for each in ways(LARGE, said, GPU[:1], ROOM)] == [1]
    assert [each.shards for each in ways(LARGE, said, [CPU], {CPU: GIB})] == [1]


def test_ranks_on_main_memory_share_one_shard() -> None:
    (found,) = ways(LARGE, preset(tensor_parallel=2), [CPU], {CPU: GIB})
    assert (found.ranks, found.shards) == (2, 1)
    cost = sharding.static_estimate(found, LARGE, preset(), threads=1, forked=False)
    one = estimate_whole(LARGE, preset(), on_host=True, threads=1)
    assert len(cost.shards) == 1
    assert cost.context == one.context, "each has the keys of its own heads"
    assert cost.runtime[0] > one.runtime[0]
    assert cost.host == 0


def test_gpu_split_selects_the_devices() -> None:
    (found,) = ways(LARGE, preset(tensor_parallel=2, gpu_split=(90 * GIB, 0, 90 * GIB)), GPU, ROOM)
    assert found.place == (GPU[0], GPU[2])


def test_max_is_one_process_where_there_is_no_accelerator() -> None:
    (found,) = ways(LARGE, preset(tensor_parallel=ALL_DEVICES), [CPU], {CPU: GIB})
    assert (found.ranks, found.shards) == (1, 1)
    assert found.note == "tensor-parallel = max counts accelerators, and it is on the CPU, so one process computes it"


@pytest.mark.parametrize(
    ("facts", "said", "why"),
    [
        (LARGE, {"tensor_parallel": 3}, "it has 64 attention heads, which 3 does not divide"),
        (replace(LARGE, kv_heads=2), {"tensor_parallel": 4},
         "it has 2 heads of keys and values, which 4 does not divi"),
        (with_widths(intermediate_size=28673), {"tensor_parallel": 2}, "it has 28673 columns in its MLP"),
        (with_widths(moe_intermediate_size=1407), {"tensor_parallel": 2}, "it has 1407 columns in its experts"),
        (with_widths(moe_intermediate_size=1408, shared_expert_intermediate_size=5633), {"tensor_parallel": 2},
         "it has 5633 columns in its shared expert"),
        (with_widths(linear_num_value_heads=33), {"tensor_parallel": 2}, "it has 33 columns in its linear attention"),
        (with_widths(intermediate_size_mlp=8193), {"tensor_parallel": 2}, "it has 8193 columns in its dense MLP"),
        (replace(LARGE, model_type="gpt2"), {"tensor_parallel": ALL_DEVICES}, "this version divides .* this is gpt2"),
        (replace(LARGE, model_type="gpt2"), {"tensor_parallel": 2, "enable_lora": "on", "max_loras": 2},
         "this version divides .* this is gpt2"),
        (replace(LARGE, matrix_elements=0), {"tensor_parallel": 2}, "its tensor names do not identify the layers"),
        (replace(LARGE, quantization="gptq"), {"tensor_parallel": ALL_DEVICES}, "its weights are quantized"),
        (LARGE, {"tensor_parallel": 2, "quantization": "bnb-4bit"}, "its weights are quantized"),
    ],
)  # fmt: skip
def test_layers_are_split_where_tensor_parallelism_is_not_possible(
    facts: Checkpoint, said: dict[str, Any], why: str
) -> None:
    asked = said["tensor_parallel"]
    (found,) = ways(facts, preset(**said), GPU, ROOM)
    assert (found.shards, found.ranks) == (4 if asked == ALL_DEVICES else asked, 1)
    (by_layers,) = ways(facts, preset(**(said | {"tensor_parallel": 1, "pipeline_parallel": found.shards})), GPU, ROOM)
    assert replace(found, note="") == by_layers
    key = "max" if asked == ALL_DEVICES else asked
    assert re.fullmatch(
        f"tensor-parallel = {key} is not possible, so its layers are split over {found.shards} accelerators: {why}.*",
        found.note,
    )
    if asked != ALL_DEVICES:
        (alone,) = ways(facts, preset(**said), [CPU], {CPU: GIB})
        assert (alone.ranks, alone.shards) == (1, 1)
        assert f"tensor-parallel = {asked} is not possible, so one process computes it: " in alone.note


@pytest.mark.parametrize(
    ("facts", "said", "why"),
    [
        (replace(LARGE, capabilities=("embedding",)), {}, "it embeds or scores texts"),
        (replace(LARGE, cross_attention=True), {}, "it has an encoder and a decoder"),
        (replace(LARGE, capabilities=("completion", "vision")), {}, "it takes images"),
        (replace(LARGE, draft=LARGE), {}, "it has a draft model"),
        (
            replace(LARGE, model_type="gpt2", by_layer=()),
            {},
            "and this is gpt2; its tensor names do not identify the l",
        ),
    ],
)
def test_a_model_that_nothing_divides_is_on_one_accelerator(facts: Checkpoint, said: dict[str, Any], why: str) -> None:
    for asked in (2, ALL_DEVICES):
        (found,) = ways(facts, preset(tensor_parallel=asked, **said), GPU, ROOM)
        assert (found.shards, found.ranks, found.devices) == (1, 1, frozenset(GPU))
        assert re.fullmatch(f"tensor-.* is not possible, so it is on one accelerator: .*{why}.*", found.note)


def test_split_mode_tensor_splits_layers_over_the_fewest_devices_where_it_divides_nothing() -> None:
    found = ways(replace(LARGE, model_type="gpt2"), preset(split_mode="tensor"), GPU, ROOM)
    assert [each.shards for each in found] == [2, 3, 4]
    assert all(each.note.startswith("split-mode = tensor is not possible, so its layers are split") for each in found)


def test_a_layer_split_in_place_of_ranks_keeps_required_memory() -> None:
    said = preset(tensor_parallel=2, required_memory={"": 70 * GIB})
    (found,) = ways(replace(LARGE, model_type="gpt2"), said, GPU, ROOM)
    cost = sharding.static_estimate(found, LARGE, said, threads=1, forked=False)
    assert (cost.weights, cost.source) == ((70 * GIB,) * 2, "preset")


def test_more_devices_than_layers_are_not_used() -> None:
    small = replace(LARGE, model_type="gpt2", layers=3, by_layer=LARGE.by_layer[:3])
    (found,) = ways(small, preset(tensor_parallel=4), GPU, ROOM)
    assert found.layers == (1, 1, 1)
    with pytest.raises(Indivisible, match="a: it has 3 layers for 4 devices; lower the number"):
        ways(small, preset(pipeline_parallel=4), GPU, ROOM)


def test_each_rank_caches_all_compressed_keys() -> None:
    latent = replace(LARGE, model_type="deepseek_v2", aligned=True, kv_heads=1, head_dim=512, value_dim=64)
    (found,) = ways(latent, preset(tensor_parallel=4), GPU, ROOM)
    assert found.ranks == 4
    cost = tensor_parallel.estimate(latent, preset(ctx_size=4096), 4, on_host=False)
    assert cost.context == estimate_whole(latent, preset(ctx_size=4096), on_host=False).context * 4


def test_required_memory_counts_for_each_rank() -> None:
    said = tensor_parallel.estimate(LARGE, preset(required_memory={"": 70 * GIB, "cpu": GIB}), 2, on_host=False)
    assert (said.weights, said.host, said.source, said.layers) == ((70 * GIB,) * 2, GIB, "preset", ())


@given(
    ranks=st.sampled_from([2, 4, 8]),
    matrices=st.integers(1, 1 << 36),
    rest=st.integers(0, 1 << 30),
    tied=st.booleans(),
    vocab=st.integers(8, 200_000),
    tokens=st.integers(1, 8192),
)
def test_dividing_conserves_weights_and_keys(
    ranks: int, matrices: int, rest: int, tied: bool, vocab: int, tokens: int
) -> None:
    """The divided parts sum to the whole, up to rounding; the rest is on each rank."""
    head = 0 if tied else vocab * 8192
    elements = matrices + rest + head
    tally = replace(LARGE.tensors["bfloat16"], elements=elements, bytes=2 * elements)
    facts = replace(LARGE, matrix_elements=matrices, tied=tied, vocab_size=vocab, tensors={"bfloat16": tally})
    facts = replace(facts, behind=Part({"bfloat16": Tally(head, 2 * head)}))
    said = preset(ctx_size=tokens)
    found: MemoryEstimate = tensor_parallel.estimate(facts, said, ranks, on_host=False)
    whole = weight_bytes(facts, said, on_host=False)
    parted = 2 * tensor_parallel.divided_elements(facts, ranks)
    assert 2 * matrices <= parted <= 2 * (matrices + head)
    assert whole <= sum(found.weights) - (ranks - 1) * (whole - parted) < whole + ranks
    assert sum(found.granted(found.kv_steps).context) == most_context(
        facts, said, effective_ctx(facts, said), on_host=False
    )
