"""Tensor parallelism: conditions, and the estimate of equal parts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.presets import ALL_DEVICES, Preset
from router.memory import sharding, tensor_parallel
from router.memory.checkpoint_facts import Checkpoint, effective_ctx
from router.memory.estimate import Estimate
from router.memory.estimate import estimate as estimate_whole
from router.memory.segments import weight_bytes
from router.memory.sharding import Choice, Indivisible, choices
from router.planner.ledger import DeviceId
from tests.router.checkpoints import most_context
from tests.router.large import BIG, CPU, GIB, GPU, LAYER

LARGE = replace(BIG, matrices=80 * (LAYER - 2 * 8192), kv_heads=8)
ROOM = dict.fromkeys(GPU, 100 * GIB)


def preset(**changes: Any) -> Preset:
    return Preset(id="a", **changes)


def ways(facts: Checkpoint, said: Preset, devices: list[DeviceId], room: Mapping[DeviceId, int]) -> list[Choice]:
    return list(choices(facts, said, devices, devices, room))


def test_tensor_parallel_is_the_number_of_devices() -> None:
    (found,) = ways(LARGE, preset(tensor_parallel=2), GPU, ROOM)
    assert (found.ranks, found.shards, found.devices, found.place) == (2, 2, frozenset(GPU), ())
    (found,) = ways(LARGE, preset(tensor_parallel=ALL_DEVICES), GPU, ROOM)
    assert found.shards == 4
    for wanted, said in ((8, "8"), (ALL_DEVICES, "max")):
        with pytest.raises(
            Indivisible, match=rf"a: tensor-parallel = {said} wants so many accelerators, and there are"
        ):
            ways(LARGE, preset(tensor_parallel=wanted), GPU if wanted == 8 else [CPU], ROOM)


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


@pytest.mark.parametrize(
    ("facts", "said", "why"),
    [
        (LARGE, {"tensor_parallel": 3}, "it has 64 attention heads, which 3 does not divide; remove it, or write pipe"),
        (replace(LARGE, kv_heads=2), {"tensor_parallel": 4}, "2 heads of keys and values, which 4 does not divide"),
        (replace(LARGE, intermediate=28673), {"tensor_parallel": 2}, "it has 28673 columns in its MLP"),
        (replace(LARGE, model_type="gpt2"), {"split_mode": "tensor"}, "split-mode = tensor cannot be: .*this is gpt2"),
        (replace(LARGE, quantization="gptq"), {"tensor_parallel": 2}, "its weights are quantised; remove it$"),
        (LARGE, {"tensor_parallel": 2, "quantization": "bnb-4bit"}, "its weights are quantised; remove it$"),
        (replace(LARGE, capabilities=("embedding",)), {"tensor_parallel": 2}, "it embeds or scores texts; remove it$"),
        (replace(LARGE, cross_attention=True), {"tensor_parallel": 2}, "it has an encoder and a decoder"),
        (replace(LARGE, capabilities=("completion", "vision")), {"tensor_parallel": 2}, "it takes images"),
        (LARGE, {"tensor_parallel": 2, "enable_lora": "on"}, "requests may name adapters"),
        (replace(LARGE, matrices=0), {"tensor_parallel": 2}, "its tensor names do not identify the layers"),
    ],
)
def test_an_indivisible_model_is_rejected_with_the_way_out(facts: Checkpoint, said: dict[str, Any], why: str) -> None:
    for devices in (GPU, [CPU]):
        if "split_mode" not in said or devices is GPU:
            with pytest.raises(Indivisible, match=why):
                ways(facts, preset(**said), devices, ROOM)


def test_each_part_is_smaller_than_the_whole_model() -> None:
    whole = estimate_whole(LARGE, preset(), on_host=False)
    for ranks in (2, 4):
        parts = tensor_parallel.estimate(LARGE, preset(), ranks, on_host=False)
        assert len(parts.shards) == ranks
        assert len(set(parts.shards)) == 1
        assert parts.shards[0] < whole.shards[0]
        assert parts.host > whole.host, "each process has libraries of its own"


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
    facts = replace(LARGE, matrices=matrices, tied=tied, vocab_size=vocab, behind=head, tensors={"bfloat16": tally})
    said = preset(ctx_size=tokens)
    found: Estimate = tensor_parallel.estimate(facts, said, ranks, on_host=False)
    whole = weight_bytes(facts, said, on_host=False)
    parted = 2 * tensor_parallel.divided_elements(facts, ranks)
    assert 2 * matrices <= parted <= 2 * (matrices + head)
    assert whole <= sum(found.weights) - (ranks - 1) * (whole - parted) < whole + ranks
    assert sum(found.granted(found.kv_steps).context) == most_context(
        facts, said, effective_ctx(facts, said), on_host=False
    )
