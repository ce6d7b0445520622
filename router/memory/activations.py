"""The bound on activations: bytes of one prefill chunk or one decode step at most, beside weights and cache. PURE.

The trace of the worker (`worker estimate`) is exact, and it alone decides evictions and refusals. This bound stands
in until the trace is there. It is a product of a few numbers of model and preset, not a copy of how transformers
computes a layer: such formulas had to be changed with each release of the library. The price is that the bound is
coarse: 2.9 to 8.6 times the trace on eight families of tests/tiny.py (hidden size 512 on the CPU, 256 tokens, 3 rows).
"""

from typing import Literal

from router.config.kv_types import is_compact
from router.config.presets import Preset
from router.memory.checkpoint_facts import (
    DTYPE_BYTES,
    Checkpoint,
    UnknownArchitecture,
    compute_dtype,
    serves_embeddings,
    takes_images,
)
from router.memory.weights import bits_on_load
from worker.protocol.memory import (
    GATHERED_BYTES,
    GRAPH_BYTES,
    MIB,
    PROMPT_LOGITS,
    SLICE_BYTES,
    SPREAD_SCORES,
    SPREAD_TENSORS,
    UNPACKED_BYTES,
    UNPACKED_ELEMENT_BYTES,
    WIDENED_BYTES,
)

# Tensors of each width (hidden, attention, MLP) that a layer is counted with at once, in the model's type but of 4
# bytes at least where weights are packed. Traced layers of the verified families have at most four copies of the
# hidden size, five of the queries and five of the MLP's width, and never the last two at the same moment.
COPIES = 6

NORM_BYTES = 8  # for each element of the hidden size: a norm computes its square and its result in float32

# For each score where attention keeps all of them: four float32 tensors. Traced: at most four (BLOOM, gpt-oss).
SCORE_BYTES = 16

# For each pair of a token in the step and a position that it may see: two masks (a model may have windows in some of
# its layers) in float32, and the comparisons that they are made from.
MASK_BYTES = 12

# For each element of a state, for each token that has one of its own: six float32 tensors. Traced: 2.8 on Mamba and
# Jamba, 5 where several tokens share a state.
STATE_BYTES = 24

# For each pair of tokens while an encoder works out how far apart they are, in whole numbers of 64 bits. Traced: 49
# (T5).
DISTANCE_BYTES = 64

# For each entry of a row of logits while its token is drawn: the logits, in the model's type and in float32, and what
# sorting them for top-p needs, when every row wants it of a flat distribution. Traced: 52
# (worker/engines/transformers/sample/sampler.py).
DRAW_BYTES = 64

# For each entry of a row of logits whose logprobs a prompt asks for. Traced: 16.
LIKELIHOOD_BYTES = 24

# Added to every bound for positions, tables and indices, which only matter in the smallest models.
LEAST_BYTES = 1 * MIB


def compute_bytes(
    facts: Checkpoint, preset: Preset, tokens: int, *, on_host: bool, part: Literal["whole", "layers", "head"] = "whole"
) -> int:
    """Return the bound for a worker of `preset` with `tokens` of context per request.

    `part` of "layers" or "head": a device with some of the layers, or with some of them and the head, without CUDA
    graphs. Raises UnknownArchitecture if the config does not state hidden size and vocabulary.
    """
    if not facts.hidden or not facts.vocab_size:
        raise UnknownArchitecture(
            preset.id,
            f"config.json of {facts.model_type or 'this model'} does not state its hidden size and vocabulary",
        )
    each = DTYPE_BYTES[compute_dtype(facts, preset, on_host=on_host)]
    rows, only_encodes = preset.parallel, serves_embeddings(facts, preset)
    if only_encodes or facts.cross_attention:  # an encoder gets the whole prompt in one step
        step = max(preset.chunk, tokens) + rows
    else:
        step = min(preset.chunk, rows * tokens) + rows
    layer = _layer_bytes(facts, preset, step, each) + _attention_bytes(facts, preset, step, tokens, each, on_host)
    if takes_images(facts, preset):  # activations of the vision tower, and the features of one image for each row
        layer += (facts.tower + rows * facts.picture_tokens * facts.hidden) * each
    if only_encodes or part == "layers":
        return LEAST_BYTES + layer
    largest = layer + facts.vocab_size * (rows * DRAW_BYTES + PROMPT_LOGITS * LIKELIHOOD_BYTES)
    if on_host and not preset.enforce_eager:  # the CPU kernel reorders linear layers between steps, by slices
        largest += min(facts.hidden * max(facts.vocab_size, facts.intermediate) * each, SLICE_BYTES)
    if not (on_host or preset.enforce_eager or facts.aligned or part == "head"):
        largest += _graph_bytes(facts, preset, tokens, each)
    return LEAST_BYTES + largest


def _layer_bytes(facts: Checkpoint, preset: Preset, step: int, each: int) -> int:
    """Return the bytes of the tensors of one layer for a step of `step` tokens."""
    queries = max(facts.expanded // 2, facts.hidden)
    is_packed = bool(facts.quantization or bits_on_load(facts, preset))
    widths = facts.hidden + queries + facts.intermediate
    found = step * (COPIES * widths * (max(each, 4) if is_packed else each) + NORM_BYTES * facts.hidden)
    if is_packed:  # one matrix is unpacked at a time
        found += facts.hidden * max(facts.intermediate, queries) * UNPACKED_ELEMENT_BYTES
    if facts.state_elements:  # with heads, a block of tokens shares one state
        found += (-(-step // facts.state_steps) + 1) * facts.state_elements * STATE_BYTES
    return found


def _attention_bytes(facts: Checkpoint, preset: Preset, step: int, tokens: int, each: int, on_host: bool) -> int:
    """Return the bytes of masks, scores and gathered keys and values, for `step` tokens that attend to `tokens`
    positions at most."""
    if serves_embeddings(facts, preset):  # texts of one step are padded to one chunk; a single text has no mask
        seen = tokens if preset.attention == "eager" else min(tokens, preset.chunk)
        pairs = max(preset.chunk, seen) * seen
    else:
        pairs = step * (tokens + step)  # a window is widened by the step
    found = pairs * MASK_BYTES
    if preset.attention == "eager" or (facts.aligned and not serves_embeddings(facts, preset)):
        found += pairs * facts.heads * SCORE_BYTES
    if facts.cross_attention:
        found += tokens * tokens * DISTANCE_BYTES
    # Keys and values of one row in one piece, and once more repeated for each query head.
    row = tokens * max(facts.expanded, facts.kv_heads * (facts.head_dim + facts.value_dim)) * each
    found += 2 * row + preset.parallel * tokens * each
    if facts.aligned:  # each decoding row repeats its keys and values for all query heads
        found += 2 * preset.parallel * row
    is_kept_so = is_compact(preset.kv_cache_dtype, compute_dtype(facts, preset, on_host=on_host))
    if is_kept_so and not serves_embeddings(facts, preset):  # a quantized cache is unpacked for all rows of a step
        cached = tokens * facts.kv_heads * (facts.head_dim + facts.value_dim) * each
        found += 2 * min(preset.parallel * cached, UNPACKED_BYTES["cpu" if on_host else "cuda"])
    if on_host:
        found += SPREAD_SCORES * SPREAD_TENSORS * 4 + WIDENED_BYTES
    return found


def _graph_bytes(facts: Checkpoint, preset: Preset, tokens: int, each: int) -> int:
    """Return the bytes that CUDA graphs of decode steps keep: one step of all rows, gathered keys and values, and the
    graphs themselves, one for each power of two of rows and of context."""
    rows = preset.parallel
    row = tokens * facts.kv_heads * (facts.head_dim + facts.value_dim) * each
    gathered = min(rows * row, GATHERED_BYTES)
    step = _layer_bytes(facts, preset, rows, each) + rows * facts.vocab_size * (each + 8)
    graphs = (rows.bit_length() + 1) * ((tokens // 256).bit_length() + 1)
    return step + gathered + rows * tokens * MASK_BYTES + graphs * GRAPH_BYTES
