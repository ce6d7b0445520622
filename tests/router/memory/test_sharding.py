"""Layer split: one device if it holds the model, else the fewest devices, equally full. Tensor parallelism: conditions,
and the estimate of equal parts."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.presets import ALL_DEVICES, Preset
from router.memory import sharding, tensor_parallel
from router.memory.checkpoint_facts import Checkpoint, EstimateError, Linears, Part, Tally, effective_ctx, from_config
from router.memory.estimate import MemoryEstimate, estimate
from router.memory.estimate import estimate as estimate_whole
from router.memory.segments import weight_bytes
from router.memory.sharding import Choice, Indivisible, balanced_layers, choices, fits, within_gpu_split
from router.planner.ledger import DeviceId, Reading
from tests.router.checkpoints import BIG, CPU, GIB, GPU, LAYER, most_context


def preset(**changes: Any) -> Preset:
    return Preset(id="a", **changes)


def first_fit(facts: Checkpoint, said: Preset, room: Mapping[DeviceId, int]) -> Choice | None:
    """The first choice whose static estimate fits."""
    order = sorted(room)
    for choice in choices(facts, said, order, order, room):
        if fits(
            choice,
            estimate(facts, said, layers=choice.layers, on_host=False).shards,
            within_gpu_split(said, order, room),
        ):
            return choice
    return None


@pytest.mark.parametrize(
    ("sizes", "shards"), [((180, 180, 180), 1), ((80, 180), 1), ((100, 100, 100, 100), 2), ((40, 40, 40, 40), 4)]
)
def test_a_model_is_on_the_fewest_devices_that_hold_it(sizes: tuple[int, ...], shards: int) -> None:
    found = first_fit(BIG, preset(), {id: size * GIB for id, size in zip(GPU, sizes, strict=False)})
    assert found is not None
    assert found.shards == shards
    assert sum(found.layers) == (80 if shards > 1 else 0)
    assert found.place == (), "any of them will do"


def test_all_devices_together_may_be_too_small() -> None:
    assert first_fit(BIG, preset(), dict.fromkeys(GPU, 34 * GIB)) is None


def test_a_larger_device_gets_more_layers_and_all_are_equally_full() -> None:
    room = {GPU[0]: 60 * GIB, GPU[1]: 120 * GIB}
    found = first_fit(BIG, preset(), room)
    assert found is not None
    shards = estimate(BIG, preset(), layers=found.layers, on_host=False).shards
    shares = [shard / room[id] for shard, id in zip(shards, GPU, strict=False)]
    assert abs(shares[0] - shares[1]) < 0.04, "of a layer each"


def test_split_mode_none_keeps_a_model_whole_and_layer_splits_it() -> None:
    room = dict.fromkeys(GPU, 180 * GIB)
    layer = preset(split_mode="layer")
    assert [each.shards for each in choices(BIG, preset(split_mode="none"), GPU, GPU, room)] == [1]
    assert [each.shards for each in choices(BIG, layer, GPU, GPU, room)] == [2, 3, 4]
    assert [each.shards for each in choices(BIG, layer, GPU[:1], GPU[:1], room)] == [1]
    assert [each.shards for each in choices(BIG, layer, [CPU], [CPU], {CPU: 1})] == [1]


def test_layers_outside_of_accelerators_are_refused_unless_there_is_none() -> None:
    room = dict.fromkeys(GPU, 180 * GIB)
    with pytest.raises(
        Indivisible, match="a: n-gpu-layers = 8 leaves 72 of 80 layers in host memory, which the engine"
    ):
        list(choices(BIG, preset(gpu_layers=8), GPU, GPU, room))
    assert len(list(choices(BIG, preset(gpu_layers=80), GPU, GPU, room))) == 4
    assert len(list(choices(BIG, preset(gpu_layers=8), [CPU], [CPU], {CPU: 1}))) == 1
    assert len(list(choices(replace(BIG, layers=130), preset(), GPU, GPU, room))) == 4


def test_pipeline_parallel_is_the_number_of_devices() -> None:
    room = dict.fromkeys(GPU, 180 * GIB)
    assert [each.shards for each in choices(BIG, preset(pipeline_parallel=3), GPU, GPU, room)] == [3]
    assert [each.shards for each in choices(BIG, preset(pipeline_parallel=ALL_DEVICES), GPU, GPU, room)] == [4]
    with pytest.raises(
        Indivisible, match="a: pipeline-parallel is for 5 accelerators, and there are 4 that it may use"
    ):
        list(choices(BIG, preset(pipeline_parallel=5), GPU, GPU, room))
    with pytest.raises(Indivisible, match="there is none that it may use"):
        list(choices(BIG, preset(pipeline_parallel=2), [CPU], [CPU], {CPU: 1}))


def test_gpu_split_limits_and_selects_devices() -> None:
    room = dict.fromkeys(GPU, 180 * GIB)
    found = first_fit(BIG, preset(gpu_split=(60 * GIB, 0, 110 * GIB)), room)
    assert found is not None
    assert found.place == (GPU[0], GPU[2]), "as listed, and none of the second"
    shards = estimate(BIG, preset(), layers=found.layers, on_host=False).shards
    assert shards[0] <= 60 * GIB
    assert shards[1] <= 110 * GIB
    one_for_all = first_fit(BIG, preset(gpu_split=(60 * GIB,)), room)
    assert one_for_all is not None
    assert (one_for_all.shards, one_for_all.place) == (3, ())
    assert first_fit(BIG, preset(gpu_split=(30 * GIB,)), room) is None


def test_tensor_split_divides_layers_and_selects_devices() -> None:
    room = dict.fromkeys(GPU, 180 * GIB)
    (found,) = choices(BIG, preset(tensor_split=(0.0, 3.0, 1.0)), GPU, GPU, room)
    assert (found.layers, found.place) == ((60, 20), (GPU[1], GPU[2]))


def test_lists_count_devices_in_the_order_of_the_preset() -> None:
    order = [GPU[2], GPU[0]]
    (found,) = choices(BIG, preset(tensor_split=(3.0, 1.0)), order, order, dict.fromkeys(GPU, GIB))
    assert found.place == (GPU[2], GPU[0])


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (replace(BIG, cross_attention=True), "it has an encoder and a decoder"),
        (replace(BIG, capabilities=("embedding",)), "it embeds or scores texts"),
        (replace(BIG, capabilities=("completion", "vision")), "it takes images"),
        (replace(BIG, draft=BIG), "it has a draft model"),
        (replace(BIG, by_layer=()), "its tensor names do not identify the layers"),
    ],
)
def test_an_indivisible_model_stays_whole_or_is_rejected_with_the_reason(facts: Checkpoint, why: str) -> None:
    room = dict.fromkeys(GPU, 10 * GIB)
    assert [each.shards for each in choices(facts, preset(), GPU, GPU, room)] == [1]
    with pytest.raises(EstimateError, match=f"{why}; remove pipeline-parallel"):
        list(choices(facts, preset(pipeline_parallel=2), GPU, GPU, room))


def test_a_quantized_model_is_split_by_the_bytes_of_its_layers() -> None:
    """Half of the layers are quantized: to a quarter, with scales."""
    quantized = Part({"int32": Tally(LAYER // 8, LAYER // 2)}, scale_bytes=LAYER // 16)
    parts = (quantized,) * 40 + BIG.by_layer[:40]
    plain = 40 * LAYER + 2 * 128256 * 8192
    tensors = {"int32": Tally(5 * LAYER, 20 * LAYER), "bfloat16": Tally(plain, 2 * plain)}
    facts = replace(BIG, quantization="gptq", by_layer=parts, tensors=tensors, scale_bytes=40 * (LAYER // 16))
    (found,) = choices(facts, preset(pipeline_parallel=2), GPU[:2], GPU, dict.fromkeys(GPU, 180 * GIB))
    first, second = found.layers
    assert first > 50 > second
    weights = estimate(facts, preset(), layers=(40, 40), on_host=False).weights
    assert weights[1] == 40 * 2 * LAYER + 2 * 128256 * 8192
    said = preset(quantization="bnb-8bit")
    linears = replace(BIG.by_layer[0], linears=Linears(7, LAYER, 1000, LAYER // 64))
    weights = estimate(replace(BIG, by_layer=(linears,) * 80), said, layers=(30, 50), on_host=False).weights
    assert weights[1] == 50 * (LAYER + 4 * 1000) + 2 * 128256 * 8192


def test_required_memory_means_one_device() -> None:
    room = dict.fromkeys(GPU, 10 * GIB)
    assert [each.shards for each in choices(BIG, preset(required_memory={"": 90 * GIB}), GPU, GPU, room)] == [1]


@pytest.mark.parametrize(
    ("said", "devices", "found"),
    [
        ({"required_memory": {"cuda:7": GIB}}, GPU[:2], ["required-memory names cuda:7, and there is no such device"]),
        ({"required_memory": {"cuda:1": GIB}}, GPU[:1], ["required-memory names cuda:1, which the key `device` exclu"]),
        ({"required_memory": {"cuda:1": GIB, "cpu": GIB, "": GIB, "GPU-1": GIB}}, GPU[:2], []),
        ({"gpu_split": (GIB, GIB)}, [CPU], ["gpu-split has no effect on the CPU"]),
        ({"expects_accelerator": True}, [CPU], ["device = cuda, and there is no accelerator here"]),
        ({"expects_accelerator": True}, GPU[:1], []),
        ({"split_mode": "layer"}, [CPU], ["split-mode = layer has no effect on the CPU"]),
        ({"gpu_split": (GIB, GIB, GIB)}, GPU[:2], ["gpu-split has 3 values, and there are 2 accelerators"]),
        ({"gpu_split": (GIB,), "split_mode": "layer"}, GPU[:2], []),
        ({"gpu_layers": 8}, [CPU], ["n-gpu-layers = 8 has no effect on the CPU"]),
        ({"ctx_size": 8192, "caps_ctx": True}, GPU[:2], ["ctx-size is 4096, the model's maximum, and not 8192"]),
        ({"ctx_size": 4096, "caps_ctx": True}, GPU[:2], []),
    ],
)
def test_keys_of_placement_without_effect_are_reported(
    said: dict[str, Any], devices: list[DeviceId], found: list[str]
) -> None:
    readings = [Reading(id, 100 * GIB, 0, uuid=f"GPU-{id.index}") for id in (*GPU[:2], CPU)]
    warnings = list(sharding.unused_settings(preset(**said), replace(BIG, max_positions=4096), readings, devices))
    assert len(warnings) == len(found)
    assert all(warning.startswith(text) for warning, text in zip(warnings, found, strict=True))


@pytest.mark.parametrize(
    ("said", "devices", "message"),
    [
        ({"tensor_split": (3.0, 0.0, 1.0)}, GPU[:1], "tensor-split is for 2 accelerators, and there are 1"),
        ({"pipeline_parallel": 2}, [CPU], "pipeline-parallel is for 2 accelerators, and there is none"),
        ({"tensor_parallel": 2}, GPU[:1], "tensor-parallel = 2 needs 2 accelerators, and there are 1"),
        ({"tensor_parallel": 2}, [CPU], ""),
        ({"tensor_parallel": ALL_DEVICES}, GPU[:1], ""),
        ({"tensor_split": (3.0, 1.0)}, GPU[:2], ""),
    ],
)
def test_a_preset_for_more_accelerators_than_there_are_is_refused_before_its_files_are_read(
    said: dict[str, Any], devices: list[DeviceId], message: str
) -> None:
    if not message:
        sharding.check_count(preset(**said), devices)
        return
    with pytest.raises(Indivisible, match=message):
        sharding.check_count(preset(**said), devices)


costs = st.lists(st.integers(1, 1000), min_size=4, max_size=30)


@given(costs=costs, rooms=st.lists(st.tuples(st.integers(0, 500), st.integers(1, 5000)), min_size=1, max_size=4))
def test_the_fullest_device_is_as_empty_as_possible(costs: list[int], rooms: list[tuple[int, int]]) -> None:
    beside, room = [each for each, _ in rooms], [each for _, each in rooms]
    found = balanced_layers(costs, beside, room)
    assert sum(found) == len(costs)
    assert min(found) >= 1
    best = fullest(costs, beside, room, found)
    for place in range(len(found) - 1):
        for move in (-1, 1):  # no layer is better off with its neighbour
            other = [*found]
            other[place] += move
            other[place + 1] -= move
            if min(other) >= 1:
                assert fullest(costs, beside, room, tuple(other)) >= best * (1 - 1e-9)


def fullest(costs: list[int], beside: list[int], room: list[int], counts: tuple[int, ...]) -> float:
    at, worst = 0, 0.0
    for count, taken, have in zip(counts, beside, room, strict=True):
        worst = max(worst, (taken + sum(costs[at : at + count])) / have)
        at += count
    return worst


def test_shards_fit_devices_in_any_order_unless_the_place_is_given() -> None:
    room = {GPU[0]: 10, GPU[1]: 30}
    assert fits(Choice((1, 1), frozenset(GPU[:2])), (30, 10), room)
    assert not fits(Choice((1, 1), frozenset(GPU[:2]), (GPU[0], GPU[1])), (30, 10), room)
    assert not fits(Choice((1, 1), frozenset(GPU[:2])), (30, 11), room)
    assert not fits(Choice((1, 1, 1), frozenset(GPU[:2])), (1, 1, 1), room)
    assert sharding.assigned(Choice((1, 1), frozenset(GPU[:2])), (30, 10), room) == (GPU[1], GPU[0])


LARGE = replace(BIG, matrix_elements=80 * (LAYER - 2 * 8192), kv_heads=8)
ROOM = dict.fromkeys(GPU, 100 * GIB)


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
