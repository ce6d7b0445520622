"""What one prefill chunk or one decode step takes beside weights and pool: the largest live set. Law: PURE."""

from collections.abc import Mapping
from typing import Literal

from router import kv_types
from router.facts import DTYPE_BYTES, Checkpoint, UnknownArchitecture, compute_dtype, embeds, sees
from router.presets import Preset
from router.weights import ARRANGED, is_fused, on_load, packed_bits

MIB = 1 << 20

PROMPT_LOGITS = 16
"""Prompt positions whose logits the engine computes in one step at most (worker/engine/scheduler.py)."""

SAMPLER_BYTES = 44
"""Of each entry of a row of logits while its token is drawn: raw logprobs, scores, a sorted copy with its indices,
weights and their sums, when every row wants top-p of a flat distribution (worker/engine/sampler.py)."""

KERNELS_FROM = 1 * MIB
"""In float32 oneDNN computes matrices from this size on; in bfloat16 all (worker/engine/linears.py)."""

SLICE_BYTES = 64 * MIB
"""Of a matrix that is reordered at once, and has been there twice until that is done (worker/engine/linears.py)."""

TILE_BYTES = 2 * MIB
"""Workspace of one thread in torch's flash attention on the CPU; measured on torch 2.13."""

GATHERED_BYTES = 256 * MIB
"""Of one layer's keys and values that a step of fixed shape has side by side, at most (worker/engine/graphs.py)."""

GRAPH_BYTES = 4 * MIB
"""Of one recorded CUDA graph: a guess until measured (worker/engine/graphs.py)."""

SCORES: Mapping[str, float] = {
    "bart": 0, "bloom": 4, "codegen": 3.3, "deepseek_v2": 2.5, "deepseek_v3": 2.5, "falcon": 2.6, "gemma2": 2.6,
    "gpt_oss": 4, "gptj": 3.3, "jamba": 0, "mpt": 3, "qwen3_next": 0, "stablelm": 0,
}  # fmt: skip
"""By architecture: float32 tensors of a chunk's scores that are alive at once in its own attention; 0: none, a kernel
computes them by tiles. Measured with scripts/bench_estimates."""

SPREAD_SCORES, SPREAD_SCORE_BYTES, WIDENED_BYTES = 1 << 18, 16, 8 * MIB
"""On the CPU short rows that decode attend by calls that keep scores: so many at most, the bytes of each with what
lives beside it, and those of keys in float32 where they are kept in fewer (worker/engine/kernels.py)."""

MOST_SCORES = 4
"""Of an architecture that was not measured."""

ENCODED_SCORES = 12
"""Bytes of each score while an encoder that was not measured reads a prompt as a whole: three tensors in float32."""

DISTANCE_BYTES = 49
"""Of each pair of tokens while T5 works out how far apart they are, once for all heads: whole numbers of 64 bits."""

STATE_TENSORS = 11.2
"""Bytes of each element of a state, of each token of a chunk, where a recurrence is computed step by step: 2.8 float32
tensors. Measured likewise on Mamba and Jamba."""

LIKELIHOOD_BYTES = 8
"""Of each entry of a row of logits while the logprobs of a prompt's tokens are taken (worker/engine/sampler.py)."""

PLAIN_ENCODERS = frozenset(
    {"bert", "camembert", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl"}
)
"""Encoders whose MLP has no gate: its width lives twice, before the activation and behind it."""

STEPWISE = frozenset({"gelu_new", "gelu_fast", "gelu_accurate", "quick_gelu", "gelu_python", "gelu_10", "laplace"})
"""Activations that transformers computes with several tensors alive."""

OUTLIERS = 8
"""One in so many inputs of a layer of 8 bits may stand out: bitsandbytes multiplies it in full (worker/estimate.py)."""

PACKED_ROW_BYTES = 19
"""Of each element of the widest row that a layer of 8 bits reads or gives: four tensors of 32 bits, one of 16, one of
8. Measured with bitsandbytes 0.50."""

PACKING_BYTES = 7
"""Of each element of a matrix of 4 bits, while main memory's kernels have it put into their order. Likewise."""


UNPACKING_BYTES: Mapping[int, int] = {8: 5}
MOST_UNPACKING_BYTES = 8
"""Of each element of a matrix that is unpacked in a step, by its bits, the result included (worker/packed.py)."""


def compute_bytes(
    facts: Checkpoint, preset: Preset, tokens: int, *, on_host: bool, part: Literal["whole", "layers", "head"] = "whole"
) -> int:
    """Bytes of the largest live set of one step, beside weights and pool; on a device that has only some `layers`, or
    some and the `head`, neither with recorded graphs.

    A step holds one chunk of prompts and one token of every other row, packed into one row; what follows is counted
    in its tokens. The multiples are those of transformers' modelling code, read off it and measured on Llama, Qwen3
    and GPT-2 shapes in float32 and bfloat16: the residual, what entered the layer, the model's input and the normed
    input live through a layer; rotary embedding holds four copies of the queries (five with a norm of them); an MLP
    four of its width (five with a GELU that is computed in steps). Raises UnknownArchitecture.
    """
    if not facts.hidden or not facts.vocab_size:
        raise UnknownArchitecture(
            preset.id,
            f"config.json of {facts.model_type or 'this model'} does not state its hidden size and vocabulary",
        )
    each = DTYPE_BYTES[compute_dtype(facts, preset, on_host=on_host)]
    rows, is_embedder = preset.parallel, embeds(facts, preset)
    # an embedder takes a prompt whole, however long, and without a mask; several share one chunk, padded and masked
    packed = max(preset.chunk, tokens) if is_embedder else min(preset.chunk, rows * tokens) + rows
    queries = max(facts.expanded // 2, facts.hidden)
    passing = 4 * facts.hidden * each + 2 * facts.head_dim * 4
    norm = 2 * 4 * facts.hidden  # its square and result in float32
    attention = (5 * queries + 2 * facts.kv_heads * (facts.head_dim + facts.value_dim)) * each
    making_masks = 2 * tokens  # comparisons of positions, one byte each
    if facts.model_type in PLAIN_ENCODERS:  # no rotary embedding, either
        attention = (2 * queries + facts.kv_heads * (facts.head_dim + facts.value_dim)) * each
        mlp = 2 * facts.intermediate * each
    else:
        mlp = (5 if facts.activation in STEPWISE else 4) * facts.intermediate * each
    layer = packed * (passing + max(norm, attention + making_masks, mlp))
    layer += _attention_bytes(facts, preset, packed, tokens, each, on_host=on_host)
    bits, matrix = packed_bits(facts, preset), facts.linears.largest
    if facts.quantization:  # of packed matrices only the bytes are stated
        matrix = facts.hidden * max(facts.intermediate, queries)
    if bits == 4:  # a step of many tokens unpacks one matrix at a time
        layer += matrix * each
    if bits == 8:
        # inputs by way of float16, sums and scales in 32 bits; the part of a matrix that inputs which stand out meet
        widest = max(facts.intermediate, queries)
        layer += packed * PACKED_ROW_BYTES * widest + -(-matrix // OUTLIERS) * (5 + each)
    is_gptq = on_host and facts.quantization in ARRANGED
    if is_gptq:
        layer += packed * (each + 4) * max(facts.intermediate, queries)  # inputs and results in 16 bits
        if not is_fused(facts):
            layer += UNPACKING_BYTES.get(facts.bits, MOST_UNPACKING_BYTES) * matrix
    if is_embedder:
        return layer
    if facts.aligned:
        compact = _is_compact(facts, preset, on_host=on_host)
        layer = max(layer, _aligned_bytes(facts, preset, packed, tokens, each, passing, compact=compact))
    if sees(facts, preset):
        # the features of as many images as there are rows, beside what goes through the tower
        features = rows * facts.picture_tokens * facts.hidden
        layer = max(layer, packed * passing + (facts.tower + features) * each)
    if part == "layers":
        return layer
    wanted = PROMPT_LOGITS + rows
    logits = wanted * facts.vocab_size * (4 if each == 4 else each + 4)  # the sampler wants them in float32
    sampler = facts.vocab_size * max(rows * SAMPLER_BYTES, PROMPT_LOGITS * LIKELIHOOD_BYTES)
    largest = max(layer, packed * passing + logits + sampler)
    if on_host and (bits == 4 or is_gptq):
        largest = max(largest, PACKING_BYTES * matrix)
    if on_host:
        return max(largest, _reordered_bytes(facts, preset, each))
    if preset.enforce_eager or facts.aligned or part == "head":
        return largest
    step = rows * (passing + max(norm, attention, mlp) + facts.vocab_size * (each + 8))
    return largest + step + _graph_bytes(facts, preset, tokens, each)


def _reordered_bytes(facts: Checkpoint, preset: Preset, each: int) -> int:
    """Linear layers are reordered between steps; a head that is the embedding, and packed layers, are not."""
    if preset.enforce_eager:
        return 0
    layers = 0 if facts.quantization or on_load(facts, preset) else facts.linears.largest
    most = max(layers, 0 if facts.tied else facts.vocab_size * facts.hidden) * each
    return min(most, SLICE_BYTES) if each == 2 or most >= KERNELS_FROM else 0


def _graph_bytes(facts: Checkpoint, preset: Preset, tokens: int, each: int) -> int:
    """Recorded steps of decoding keep memory of their own: what they gather, masks, buffers, and the graphs."""
    rows = preset.parallel
    gathered = min(rows * _row_bytes(facts, tokens, each), GATHERED_BYTES)
    if _is_compact(facts, preset, on_host=False):
        gathered = int(gathered * kv_types.WHILE_GATHERING)
    masks = rows * tokens * (2 + each) * max(len(set(facts.windows)), 1)
    graphs = (rows.bit_length() + 1) * ((tokens // 256).bit_length() + 1)
    return gathered + masks + rows * (tokens + 64) + graphs * GRAPH_BYTES


def _is_compact(facts: Checkpoint, preset: Preset, *, on_host: bool) -> bool:
    return kv_types.is_compact(preset.kv_cache_dtype, compute_dtype(facts, preset, on_host=on_host))


def _row_bytes(facts: Checkpoint, tokens: int, each: int) -> int:
    """Keys and values of one row in one layer, as attention reads them."""
    return tokens * facts.kv_heads * (facts.head_dim + facts.value_dim) * each


def _aligned_bytes(
    facts: Checkpoint, preset: Preset, packed: int, tokens: int, each: int, passing: int, *, compact: bool
) -> int:
    """The largest live set of a step that the model's own attention and states compute, as far as it is theirs.

    Of these the largest: the scores of a chunk, with masks and biases, where they are computed in full (`SCORES`);
    rows that decode, which repeat their keys and values for every query head, and once more where they are expanded
    from a compressed row; an encoder that reads a prompt as a whole; and states that are computed for many tokens of a
    chunk at once, where no kernels of their own do it. A `compact` cache is unpacked for all who read it in a layer.
    """
    times = SCORES.get(facts.model_type, MOST_SCORES)
    queries = max(facts.expanded // 2, facts.hidden)
    chunk = 1 if facts.cross_attention else min(preset.chunk, tokens)  # prompts are the encoder's
    chunked = packed * (passing + 3 * queries * each) + tokens * facts.expanded * each
    chunked += int(times * facts.heads * max(chunk, preset.parallel) * tokens * 4)
    repeats = times and facts.kv_heads < facts.heads
    decoding = 2 * preset.parallel * tokens * facts.expanded * each + preset.parallel * passing if repeats else 0
    if compact and facts.kv_heads:
        row = int(_row_bytes(facts, tokens, each) * kv_types.WHILE_UNPACKING)
        chunked += row
        decoding += preset.parallel * (row + passing)
    encoding = 0
    if facts.cross_attention:
        scores = _pair_bytes(facts, preset, each) * tokens**2
        scores += tokens * (passing + 3 * queries * each)
        encoding = max(scores, tokens * (passing + 4 * facts.intermediate * each))
    if facts.state_steps > 1:  # beside whatever else lives in the layer
        chunked += 5 * -(-packed // facts.state_steps) * facts.state_elements * 4
    stepwise = max(min(preset.chunk, tokens), preset.parallel)  # a chunk of one prompt, or the rows that decode
    states = stepwise * (passing + STATE_TENSORS * facts.state_elements) if facts.state_steps == 1 else 0
    return max(chunked, decoding, encoding, int(states))


def _pair_bytes(facts: Checkpoint, preset: Preset, each: int) -> int:
    """Of each pair of tokens while an encoder reads a prompt; BART's scores are computed by tiles, and so are T5's, but
    with a bias for each head: as it is looked up, and in the order that the kernel wants."""
    if preset.attention != "eager" and facts.model_type == "bart":
        return 0
    if preset.attention != "eager" and facts.model_type == "t5":
        return max(DISTANCE_BYTES, 2 * facts.heads * each)
    return ENCODED_SCORES * facts.heads


def _attention_bytes(facts: Checkpoint, preset: Preset, packed: int, tokens: int, each: int, *, on_host: bool) -> int:
    """Masks, scores and workspaces of attention, for `packed` tokens that look back at `tokens` positions at most."""
    masked = tokens
    if embeds(facts, preset) and preset.attention != "eager":
        masked = min(tokens, preset.chunk)
    spans = {min(masked, window + packed) if window else masked for window in facts.windows or (0,)}
    masks = min(packed, max(masked, preset.chunk + preset.parallel)) * sum(spans) * each
    compact = _is_compact(facts, preset, on_host=on_host)
    if not embeds(facts, preset):  # keys and values of a prompt that lies in several runs, side by side
        row = _row_bytes(facts, tokens, each)
        masks += kv_types.unpacked_bytes(row, preset.parallel, on_host=on_host) if compact else row
    repeated = tokens * facts.expanded * each  # keys and values, once for each query head
    if preset.attention == "eager":
        # scores and masked scores, or in 16 bits scores, their float32 form and its softmax
        return masks + repeated + facts.heads * packed * tokens * (8 if each == 4 else 10)
    if on_host:
        masks += max(preset.threads, 1) * TILE_BYTES
        spreads = not (embeds(facts, preset) or facts.aligned or compact)
        return masks + _spread_bytes(facts, preset, tokens, each) if spreads else masks
    return masks + repeated  # CUDA's kernels with a mask want it so


def _spread_bytes(facts: Checkpoint, preset: Preset, tokens: int, each: int) -> int:
    """Of decoding rows that attend together, up to `tokens` of each."""
    scores = min(preset.parallel * facts.heads * tokens, SPREAD_SCORES)
    widened = preset.parallel * tokens * facts.kv_heads * facts.head_dim * 4 if each < 4 else 0
    return scores * SPREAD_SCORE_BYTES + min(widened, WIDENED_BYTES)
