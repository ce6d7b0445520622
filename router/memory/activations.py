"""The bound on activations: bytes that one prefill chunk or one decode step takes at most beside weights and cache.

The worker's own trace (`worker estimate`) is the exact figure, and it alone decides evictions and refusals. Until it is
there this bound stands in for it. It is a product of few numbers of a model and a preset, never of how transformers
computes a layer: such formulas had to be changed with each release of the library. It is therefore coarse: two to three
times the traced figure on most families. Law: PURE.
"""

from typing import Literal

from router.config.kv_types import is_compact
from router.config.presets import Preset
from router.memory.checkpoint_facts import DTYPE_BYTES, Checkpoint, UnknownArchitecture, compute_dtype, embeds, sees
from router.memory.weights import on_load
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

COPIES = 6
"""Tensors of each width (hidden, attention, MLP) that a layer is counted with at once, in the model's type but of 4
bytes at least where weights are packed. Traced layers of the verified families have at most four copies of the hidden
size, five of the queries and five of the MLP's width, and never the last two at the same moment."""

NORM_BYTES = 8
"""For each element of the hidden size: a norm computes its square and its result in float32."""

SCORE_BYTES = 16
"""For each score where attention keeps all of them: four float32 tensors. Traced: at most four (BLOOM, gpt-oss)."""

MASK_BYTES = 12
"""For each pair of a token in the step and a position that it may see: two masks (a model may have windows in some of
its layers) in float32, and the comparisons that they are made from."""

STATE_BYTES = 24
"""For each element of a state, for each token that has one of its own: six float32 tensors. Traced: 2.8 on Mamba and
Jamba, 5 where several tokens share a state."""

DISTANCE_BYTES = 64
"""For each pair of tokens while an encoder works out how far apart they are, in whole numbers of 64 bits. Traced: 49
(T5)."""

DRAW_BYTES = 64
"""For each entry of a row of logits while its token is drawn: the logits, in the model's type and in float32, and what
sorting them for top-p needs, when every row wants it of a flat distribution. Traced: 52 (worker/engines/transformers/sample/sampler.py)."""

LIKELIHOOD_BYTES = 24
"""For each entry of a row of logits whose logprobs a prompt asks for. Traced: 16."""

LEAST_BYTES = 1 * MIB
"""Added to every bound for positions, tables and indices, which only matter in the smallest models."""


def compute_bytes(
    facts: Checkpoint, preset: Preset, tokens: int, *, on_host: bool, part: Literal["whole", "layers", "head"] = "whole"
) -> int:
    """The bound for a worker of `preset` with `tokens` of context for each request; on a device that has only some
    `layers`, or some layers and the `head`, without recorded graphs.

    Raises UnknownArchitecture where hidden size or vocabulary are not stated.
    """
    if not facts.hidden or not facts.vocab_size:
        raise UnknownArchitecture(
            preset.id,
            f"config.json of {facts.model_type or 'this model'} does not state its hidden size and vocabulary",
        )
    each = DTYPE_BYTES[compute_dtype(facts, preset, on_host=on_host)]
    rows, is_embedder = preset.parallel, embeds(facts, preset)
    if is_embedder or facts.cross_attention:  # an encoder takes a prompt as a whole, however long
        step = max(preset.chunk, tokens) + rows
    else:
        step = min(preset.chunk, rows * tokens) + rows
    layer = _layer_bytes(facts, preset, step, each) + _attention_bytes(facts, preset, step, tokens, each, on_host)
    if sees(facts, preset):  # the tower's own, and the features of one image for each row
        layer += (facts.tower + rows * facts.picture_tokens * facts.hidden) * each
    if is_embedder or part == "layers":
        return LEAST_BYTES + layer
    largest = layer + facts.vocab_size * (rows * DRAW_BYTES + PROMPT_LOGITS * LIKELIHOOD_BYTES)
    if on_host and not preset.enforce_eager:  # between steps linear layers are reordered, slice by slice
        largest += min(facts.hidden * max(facts.vocab_size, facts.intermediate) * each, SLICE_BYTES)
    if not (on_host or preset.enforce_eager or facts.aligned or part == "head"):
        largest += _graph_bytes(facts, preset, tokens, each)
    return LEAST_BYTES + largest


def _layer_bytes(facts: Checkpoint, preset: Preset, step: int, each: int) -> int:
    """A layer's own tensors for `step` tokens at once."""
    queries = max(facts.expanded // 2, facts.hidden)
    is_packed = bool(facts.quantization or on_load(facts, preset))
    widths = facts.hidden + queries + facts.intermediate
    found = step * (COPIES * widths * (max(each, 4) if is_packed else each) + NORM_BYTES * facts.hidden)
    if is_packed:  # one matrix is unpacked at a time
        found += facts.hidden * max(facts.intermediate, queries) * UNPACKED_ELEMENT_BYTES
    if facts.state_elements:  # tokens that share a state are computed together
        found += (-(-step // facts.state_steps) + 1) * facts.state_elements * STATE_BYTES
    return found


def _attention_bytes(facts: Checkpoint, preset: Preset, step: int, tokens: int, each: int, on_host: bool) -> int:
    """Masks, scores, and keys and values side by side, for `step` tokens that see `tokens` positions at most."""
    if embeds(facts, preset):  # texts that share a step are padded to one chunk; a single text has no mask
        seen = tokens if preset.attention == "eager" else min(tokens, preset.chunk)
        pairs = max(preset.chunk, seen) * seen
    else:
        pairs = step * (tokens + step)  # a window is widened by the step
    found = pairs * MASK_BYTES
    if preset.attention == "eager" or (facts.aligned and not embeds(facts, preset)):
        found += pairs * facts.heads * SCORE_BYTES
    if facts.cross_attention:
        found += tokens * tokens * DISTANCE_BYTES
    # one row's keys and values in one piece, and once more for each query head; unpacked where they are kept in int8
    row = tokens * max(facts.expanded, facts.kv_heads * (facts.head_dim + facts.value_dim)) * each
    found += 2 * row + preset.parallel * tokens * each
    if facts.aligned:  # all decoding rows repeat theirs
        found += 2 * preset.parallel * row
    is_kept_so = is_compact(preset.kv_cache_dtype, compute_dtype(facts, preset, on_host=on_host))
    if is_kept_so and not embeds(facts, preset):  # rows are unpacked together
        cached = tokens * facts.kv_heads * (facts.head_dim + facts.value_dim) * each
        found += 2 * min(preset.parallel * cached, UNPACKED_BYTES["cpu" if on_host else "cuda"])
    if on_host:
        found += SPREAD_SCORES * SPREAD_TENSORS * 4 + WIDENED_BYTES
    return found


def _graph_bytes(facts: Checkpoint, preset: Preset, tokens: int, each: int) -> int:
    """Recorded steps of decoding keep memory of their own: a step of all rows, gathered keys and values, and the graphs
    themselves, one for each power of two of rows and of context."""
    rows = preset.parallel
    row = tokens * facts.kv_heads * (facts.head_dim + facts.value_dim) * each
    gathered = min(rows * row, GATHERED_BYTES)
    step = _layer_bytes(facts, preset, rows, each) + rows * facts.vocab_size * (each + 8)
    graphs = (rows.bit_length() + 1) * ((tokens // 256).bit_length() + 1)
    return step + gathered + rows * tokens * MASK_BYTES + graphs * GRAPH_BYTES
