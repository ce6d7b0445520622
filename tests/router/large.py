"""A model that no single device holds, and the devices."""

from router.memory.checkpoint_facts import Checkpoint, Part, Tally
from router.planner.ledger import HOST, LOCAL, DeviceId

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
