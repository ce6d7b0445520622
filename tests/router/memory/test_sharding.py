"""Layer split: one device if it holds the model, else the fewest devices, equally full."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.presets import ALL_DEVICES, Preset
from router.memory import sharding
from router.memory.checkpoint_facts import Checkpoint, EstimateError, Linears, Part, Tally
from router.memory.estimate import estimate
from router.memory.sharding import Choice, Indivisible, balanced_layers, choices, fits, within_gpu_split
from router.planner.ledger import DeviceId, Reading
from tests.router.large import BIG, CPU, GIB, GPU, LAYER


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
