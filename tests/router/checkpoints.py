"""Checkpoints and presets to estimate."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from router.config.presets import Preset
from router.memory.checkpoint_facts import Checkpoint, Part, Tally
from router.memory.segments import kv_range
from router.planner.ledger import HOST, LOCAL, DeviceId

QWEN3_4B = Checkpoint(
    model_type="qwen3", layers=36, hidden=2560, heads=32, kv_heads=8, head_dim=128, value_dim=128,
    attention_elements=8192, intermediate=9728, vocab_size=151936, max_positions=40960, tied=True, dtype="bfloat16",
    tensors={"bfloat16": Tally(4_022_468_096, 8_044_936_192)}, params=4_022_468_096, file_bytes=8_044_982_080,
    by_layer=(Part({"bfloat16": Tally(100_930_816, 201_861_632)}),) * 36, behind=Part({"bfloat16": Tally(2560, 5120)}),
    largest=777_912_320, capabilities=("chat", "completion"),
)  # fmt: skip
"""Its config has head_dim 128, where hidden / heads is 80."""


def preset(**changes: Any) -> Preset:
    return Preset(id="a", **{"ctx_size": 4096, "parallel": 4, **changes})


def most_context(facts: Checkpoint, preset: Preset, tokens: int, *, on_host: bool) -> int:
    """Return the bytes of the largest KV cache of a range."""
    return kv_range(facts, preset, tokens, on_host=on_host).most


checkpoints = st.builds(
    replace,
    st.just(QWEN3_4B),
    layers=st.integers(1, 64),
    kv_heads=st.sampled_from([1, 2, 8]),
    head_dim=st.sampled_from([32, 64, 256]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    capabilities=st.sampled_from([("completion",), ("embedding",)]),
    model_type=st.sampled_from(["qwen3", "bloom", "stablelm", "mamba", "bert", "nobody-measured"]),
    aligned=st.booleans(),
    cross_attention=st.booleans(),
    state_elements=st.sampled_from([0, 5000]),
)
presets = st.builds(
    preset, ctx_size=st.integers(1, 40000), parallel=st.integers(1, 32), prefill_chunk=st.integers(1, 2048),
    attention=st.sampled_from(["auto", "eager"]),
)  # fmt: skip


GIB = 1 << 30
GPU = [DeviceId(LOCAL, index) for index in range(4)]
CPU = DeviceId(LOCAL, HOST)
LAYER = 850_000_000
"""Elements, of a model as large as they come on one node: 80 layers, 68 billion parameters, untied."""
BIG = Checkpoint(
    model_type="llama", layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, value_dim=128,
    attention_elements=16384, intermediate=28672, vocab_size=128256, max_positions=8192, dtype="bfloat16",
    tensors={"bfloat16": Tally(80 * LAYER + 2 * 128256 * 8192, 2 * (80 * LAYER + 2 * 128256 * 8192))},
    by_layer=(Part({"bfloat16": Tally(LAYER, 2 * LAYER)}),) * 80,
    behind=Part({"bfloat16": Tally(128256 * 8192, 2 * 128256 * 8192)}), capabilities=("completion",),
)  # fmt: skip
"""142 GiB with its context of 8,192 tokens for 4 sequences."""
