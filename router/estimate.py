"""Checkpoint and preset to a static estimate: bytes by shard, in milliseconds and without torch.

    weights   parameters as they will sit in memory, whatever dtype the files have
    context   the cache pool, which the engine makes at load for `parallel` sequences of `ctx_size` tokens
    compute   the largest live set of one prefill chunk or one decode step, beyond those two
    runtime   the process itself on main memory; the device's context and libraries on an accelerator

Law: PURE. A figure here is never below the truth: what is not known exactly rounds up. Where nothing but the weights
is known, they are multiplied with a stated factor, and the estimate says so; where not even they are,
`UnknownArchitecture` is raised (the way out is the key `required-memory`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from router import kv_types
from router.errors import RouterError
from router.presets import Preset
from worker import contract

MIB = 1 << 20

RUNTIME_HOST = 420 * MIB
"""Resident bytes of a worker process on main memory beside its model: 367 MiB once ready with a model of half a MiB
(torch 2.13 for the CPU, transformers 5.23, Python 3.11; a third of it mapped libraries), and what serving adds: packing
buffers of the matrix library and the interpreter's growth, 10 to 45 MiB seen."""

RUNTIME_FORKED = 96 * MIB
"""Of one that was forked, without what it shares with its nursery: 67 MiB once ready and 72 in service with a model of
half a MiB, and a tenth of the 250 MiB that it shares at first, for pages that are written to as time goes by."""

INHERITED_SHARE = 0.85
"""Of what a forked process shares with its nursery while it estimates, what a worker will share for good."""

RUNTIME_DEVICE = 512 * MIB
"""Device context, libraries, workspaces of one process, 100 to 600 MiB by card and driver: a guess until measured."""

RUNTIME_DEVICE_HOST = 1536 * MIB
"""Resident bytes of main memory of a worker on an accelerator: imports with CUDA libraries. A guess."""

STAGING_BYTES = 256 * MIB
"""Pinned buffers through which weights go to an accelerator (worker/engine/staging.py)."""

BLOCK_TOKENS = 16
"""Tokens of one block of the pool (worker/engine/kv_cache.py)."""

PROMPT_LOGITS = 16
"""Prompt positions whose logits the engine computes in one step at most (worker/engine/scheduler.py)."""

SAMPLER_BYTES = 44
"""Of each entry of a row of logits while its token is drawn: raw logprobs, scores, a sorted copy with its indices,
weights and their sums, when every row wants top-p of a flat distribution (worker/engine/sampler.py)."""

TOKENIZER_BYTES = 1100
"""Of each entry of the vocabulary in a loaded tokenizer; measured on byte-pair tokenizers of 32,000 and 128,000 entries
with tokenizers 0.23: 32 and 124 MiB."""

GRAMMAR_BYTES = 32 * MIB
"""What answers that are held to a grammar need, whatever the vocabulary: 8 MiB of library, and 32 compiled grammars
that stay (worker/engine/grammar.py), of three quarters of a MiB each. Measured with llguidance 1.9."""

GRAMMAR_ENTRY_BYTES = 960
"""Of each entry of the vocabulary, once the first grammar is compiled: 140 MB for 151,000 tokens."""

KERNEL_BYTES = 40 * MIB
"""Compiled kernels that oneDNN keeps on the CPU: 0.65 MiB for each shape of a matrix product, whatever its size, of
which a worker keeps at most 64 (worker/__main__.py)."""
KERNELS_FROM = 1 * MIB
"""In float32 it computes matrices from this size on; in bfloat16 all (worker/engine/linears.py)."""

RETENTION = 2
"""Times the live bytes of steps on main memory that malloc holds on to, as blocks of ever other sizes come and go: 1.5
to 2 measured on Llama, Qwen3 and GPT-2 shapes with prompts of random lengths."""

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

STATE_TENSORS = 11
"""Bytes of each element of a state, of each token of a chunk, where a recurrence is computed step by step: 2.75 float32
tensors. Measured likewise on Mamba and Jamba."""

LIKELIHOOD_BYTES = 8
"""Of each entry of a row of logits while the logprobs of a prompt's tokens are taken (worker/engine/sampler.py)."""

PLAIN_ENCODERS = frozenset(
    {"bert", "camembert", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl"}
)
"""Encoders whose MLP has no gate: its width lives twice, before the activation and behind it."""

STEPWISE = frozenset({"gelu_new", "gelu_fast", "gelu_accurate", "quick_gelu", "gelu_python", "gelu_10", "laplace"})
"""Activations that transformers computes with several tensors alive."""

SAFETY_FACTOR = 2
"""What the bytes of weights are multiplied with where nothing else of a model is known. A guess, and stated as such."""

LEAST_BESIDE = 512 * MIB
"""Added to weights and cache at least in that case, with an eighth of that cache: steps take some of either."""

Source = Literal["static", "weights", "exact", "learned", "preset"]
"""Where a figure comes from. `weights`: their bytes times a factor, as nothing else is known."""

OPENING_BYTES = 256 * MIB
"""Main memory in which a worker opens and prepares one image (worker/images.py)."""

HELD_BYTES = 128 * MIB
"""Of prepared images that requests may have together; one alone may have more (worker/engine/vision.py)."""

AUTO_CTX = 8192
"""Tokens that a preset without ctx-size gets at most."""

ON_LOAD: Mapping[str, int] = {"bnb-8bit": 8, "bnb-4bit": 4}
"""Bits of an element, where a checkpoint that is not quantised is packed while it is loaded."""

OUTLIERS = 8
"""One in so many inputs of a layer of 8 bits may stand out: bitsandbytes multiplies it in full (worker/estimate.py)."""

PACKED_ROW_BYTES = 19
"""Of each element of the widest row that a layer of 8 bits reads or gives: four tensors of 32 bits, one of 16, one of
8. Measured with bitsandbytes 0.50."""

PACKING_BYTES = 7
"""Of each element of a matrix of 4 bits, while main memory's kernels have it put into their order. Likewise."""

UNPACKED = frozenset({"compressed-tensors", "mxfp4"})
"""Methods whose weights the worker unpacks while it loads, or may have to (worker/engine/packing.py)."""
UNPACKED_ON_HOST = frozenset({"fp8", "mxfp8"})
"""Likewise on main memory, which has no kernels for them."""

ARRANGED: Mapping[str, float] = {"gptq": 3.2, "awq": 3.2}
"""Times their stored bytes that scales, zero points and orders take on main memory, whose kernel has them in 16 bits
and side by side (worker/packed.py): 8 bytes in place of 2.5."""
FUSED_GROUPS = frozenset({16, 32, 64, 128})
"""Inputs with a scale of their own, for which it has that kernel, of 4 bits; for others each step unpacks matrices."""
UNPACKING_BYTES = 8
"""Of each element of a matrix meanwhile, beside the result (worker/packed.py)."""

LIBRARY_BYTES: Mapping[str, int] = {
    "gptq": 112 * MIB, "awq": 112 * MIB, "bnb-4bit": 44 * MIB, "bnb-8bit": 44 * MIB, "compressed-tensors": 16 * MIB,
}  # fmt: skip
"""Resident bytes of a method's library once it is imported. Measured: gptqmodel 7.6 100 MiB, bitsandbytes 0.50 39,
compressed-tensors 0.20 13."""

DTYPE_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class EstimateError(RouterError):
    """No estimate can be made; `message` is for a person and names the way out."""

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message


class UnknownCheckpoint(EstimateError):
    """The folder holds no checkpoint that can be read: a file is missing, damaged, or not what it claims to be."""


class UnknownArchitecture(EstimateError):
    """The checkpoint does not state what its memory depends on; `fact`: what, in words."""

    def __init__(self, id: str, fact: str, way_out: str = "set required-memory in MiB"):
        super().__init__(f"{id}: {fact}; {way_out}")
        self.fact = fact


class WrongQuantization(EstimateError):
    """The preset wants another quantisation than the checkpoint has."""


class ContextTooLarge(EstimateError):
    """The preset asks for more tokens than the model has positions, or than its cache has room for."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Tensors of one stored dtype."""

    elements: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Linears:
    """Weights of the linear layers that bitsandbytes would pack: not the embeddings, the head, routers and experts."""

    count: int = 0
    elements: int = 0
    rows: int = 0
    """Of all of them; 8 bits have a scale for each."""
    blocks: int = 0
    """Of 64 elements; 4 bits have a scale for each."""
    largest: int = 0
    """Elements of one."""
    ends: int = 0
    """Inputs and outputs of all of them: a LoRA adapter of rank 1 has so many elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The facts of a snapshot that its memory and its description depend on. 0 and "" mean: not stated."""

    identity: str = ""
    """Hash of file names, sizes and config: the same for the same snapshot wherever it lies."""
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    """Heads of keys and values in the cache; 1 with multi-head latent attention, which caches one compressed row."""
    head_dim: int = 0
    """Elements of one head's key in the cache; the config's when given, else hidden / heads."""
    value_dim: int = 0
    """Elements of one head's value in the cache; the rotary part of the key with multi-head latent attention."""
    expanded: int = 0
    """Elements of keys and values of one token as attention reads them, of all query heads."""
    intermediate: int = 0
    """Width of the MLP; of all experts that one token visits together."""
    activation: str = ""
    """Of the MLP, as transformers names it."""
    vocab_size: int = 0
    max_positions: int = 0
    """Longest sequence that the model was made for; 0: the config states none (ALiBi, state-space models)."""
    windows: tuple[int, ...] = ()
    """By layer: tokens that its attention looks back at; 0: all."""
    state_layers: int = 0
    """Layers that keep a state of constant size in place of keys and values (state-space, linear attention)."""
    state_elements: int = 0
    """Elements of that state, of one layer for one sequence."""
    state_steps: int = 1
    """Tokens that share one such state while many are computed at once."""
    hybrid: bool = False
    """Its state layers keep keys and values, too."""
    aligned: bool = False
    """The worker runs it by the model's own forward, on the cache that any model can use (worker/engine/aligned.py)."""
    cross_attention: bool = False
    """An encoder's output is cached as well, for each layer of the decoder."""
    tied: bool = False
    """The output head is the input embedding."""
    dtype: str = ""
    """Of the config, else of the first floating-point tensor, as torch names it."""
    tensors: Mapping[str, Tally] = field(default_factory=dict)
    """What will be loaded, by dtype as stored (torch's names); a stored copy of a tied head is not among it."""
    params: int = 0
    """Parameters of the model; packed quantised ones are counted unpacked."""
    by_layer: tuple[int, ...] = ()
    """Elements of each layer's tensors; empty: they cannot be told from the rest."""
    matrices: int = 0
    """Elements of all layers' matrices, without their vectors; 0: they cannot be told from the rest."""
    named_layers: int = 0
    """As many layers as the tensors' names tell of."""
    behind: int = 0
    """Elements of what stands behind the layers: a head that is not the embedding, the last norm."""
    file_bytes: int = 0
    """Of the safetensors files."""
    head_elements: int = 0
    """Parameters of layers behind an embedder's model, which the worker keeps in float32."""
    largest: int = 0
    """Bytes of the largest stored tensor."""
    stacked: int = 0
    """Elements of tensors that are put together into larger ones while the model is loaded."""
    tower: int = 0
    """Elements alive at once in the vision tower while it sees the largest image; 0: there is none that is used."""
    picture_tokens: int = 0
    """Of that image in a prompt."""
    picture_elements: int = 0
    """Of that image as the tower takes it."""
    quantization: str = ""
    """Method that the config states: gptq, awq, fp8, ..."""
    bits: int = 0
    """Of a packed number."""
    group: int = 0
    """Inputs that share a scale, of gptq and awq; 0: not stated."""
    scale_bytes: int = 0
    """Of a quantised checkpoint's scales, zero points, orders and maps, which stay as they are stored; not in
    `tensors`."""
    linears: Linears = Linears()
    capabilities: tuple[str, ...] = ()
    """Of chat, completion, tools, vision, embedding, rerank, as far as the files tell."""
    chat_template: bool = False
    vocab_type: int = 0
    """As llama.cpp numbers them: 0 none, 1 SentencePiece, 2 byte pairs, 3 word pieces, 4 unigrams."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes that a model will occupy, by shard and segment, and on main memory beside its shards."""

    weights: tuple[int, ...]
    context: tuple[int, ...]
    compute: tuple[int, ...]
    runtime: tuple[int, ...]
    host: int = 0
    """Bytes of main memory beside the shards; 0 for a model whose shard is main memory."""
    source: Source = "static"
    reserved: int = 0
    """Bytes of each shard's runtime that only the preset asked for (`reserved-memory`)."""
    note: str = ""
    """What a person should know of how the figure came about."""
    layers: tuple[int, ...] = ()
    """How many each shard has; empty: there is one shard, which has them all."""

    @property
    def shards(self) -> tuple[int, ...]:
        """All segments together, by shard."""
        return tuple(map(sum, zip(self.weights, self.context, self.compute, self.runtime, strict=True)))

    @property
    def total(self) -> int:
        """All shards and main memory together."""
        return sum(self.shards) + self.host

    @property
    def sure(self) -> bool:
        """Whether somebody may be evicted or refused on it."""
        return self.source not in ("static", "weights")


def exact(said: contract.Estimated, preset: Preset, *, forked: bool = False, layers: tuple[int, ...] = ()) -> Estimate:
    """What `worker estimate` said, with the preset's `reserved-memory` on top; of a worker that will be `forked`
    without what it will share with its nursery, as far as the estimating process was forked and could tell."""
    extra = preset.reserved_memory
    shared = int(INHERITED_SHARE * said.inherited) if forked else 0
    on_shard = 0 if said.host else shared
    runtime = tuple(max(0, each - on_shard) + extra for each in said.runtime)
    host = max(0, said.host - shared)
    return Estimate(
        tuple(said.weights), tuple(said.context), tuple(said.compute), runtime, host, "exact", extra, layers=layers
    )


def learned(about: Estimate, shards: tuple[int, ...], host: int) -> Estimate:
    """`about` with its segments made to sum to what was measured (`shards` and `host`, in bytes) and what the preset
    adds to that. Weights and context are known best, so the difference shows as compute and runtime.
    """
    shards = tuple(each + about.reserved for each in shards)
    weights = tuple(map(min, about.weights, shards))
    context = tuple(map(min, about.context, _minus(shards, weights)))
    compute = tuple(map(min, about.compute, _minus(shards, weights, context)))
    return Estimate(
        weights,
        context,
        compute,
        _minus(shards, weights, context, compute),
        host,
        "learned",
        about.reserved,
        layers=about.layers,
    )


def _minus(wholes: tuple[int, ...], *parts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(whole - sum(each) for whole, *each in zip(wholes, *parts, strict=True))


def effective_ctx(facts: Checkpoint, preset: Preset) -> int:
    """Tokens per request that a worker of `preset` is started with.

    Raises ContextTooLarge if the preset asks for more than the model has, and UnknownArchitecture if it asks for the
    model's maximum and the model states none.
    """
    most = facts.max_positions
    if preset.ctx_size == -1:
        return min(filter(None, (most, AUTO_CTX, preset.kv_tokens)))
    if preset.ctx_size == 0:
        if not most:
            raise UnknownArchitecture(preset.id, "config.json states no longest sequence", "set ctx-size in tokens")
        return most
    if most and preset.ctx_size > most:
        raise ContextTooLarge(
            f"{preset.id}: ctx-size {preset.ctx_size} is more than the model's maximum of {most} tokens;"
            f" set it to {most} or less, or 0 for the maximum"
        )
    return preset.ctx_size


def estimate(
    facts: Checkpoint,
    preset: Preset,
    *,
    layers: tuple[int, ...] = (),
    on_host: bool,
    runtime: int | None = None,
    threads: int = 0,
    forked: bool = False,
) -> Estimate:
    """What a worker of `preset` will occupy on a device, or on main memory (`on_host`); or on several devices, of which
    each has so many of its `layers`.

    `runtime` is what a process occupies on each shard beside the model, in bytes; None: by the constants above, of one
    that is `forked` from a nursery or of one that is executed. `threads`: the worker's torch threads, where the preset
    leaves them open. `required-memory` replaces the figures, `reserved-memory` is added to them. Raises EstimateError.
    """
    check_quantization(facts, preset)
    preset = replace(preset, threads=preset.threads or threads)
    libraries = facts.vocab_size * TOKENIZER_BYTES + grammar_bytes(facts, preset) + picture_bytes(facts, preset)
    libraries += LIBRARY_BYTES.get(facts.quantization or preset.quantization, 0)
    if runtime is None:
        runtime = (RUNTIME_FORKED if forked else RUNTIME_HOST) + libraries if on_host else RUNTIME_DEVICE
    beside = 0 if on_host else RUNTIME_DEVICE_HOST + libraries + _staged_bytes(facts, preset)
    extra = preset.reserved_memory
    shards = len(layers) or 1
    required = required_shards(preset, shards=shards, on_host=on_host)
    if required is not None:
        none = (0,) * shards
        host = 0 if on_host else preset.required_memory.get("cpu", beside)
        return Estimate(required, none, none, (extra,) * shards, host, "preset", extra, layers=layers)
    tokens = effective_ctx(facts, preset)
    weights = weight_bytes(facts, preset, on_host=on_host)
    if layers:
        return Estimate(
            weights=_weights_by_shard(facts, preset, weights, layers),
            context=tuple(context_bytes(_part(facts, count), preset, tokens, on_host=False) for count in layers),
            compute=tuple(
                compute_bytes(facts, preset, tokens, on_host=False, part="head" if shard == head else "layers")
                for head in [head_shard(facts, layers)]
                for shard in range(shards)
            ),
            runtime=(runtime + extra,) * shards,
            host=beside,
            reserved=extra,
            layers=layers,
        )
    source: Source = "static"
    note = ""
    try:
        context = context_bytes(facts, preset, tokens, on_host=on_host)
        compute = compute_bytes(facts, preset, tokens, on_host=on_host)
    except UnknownArchitecture as unknown:
        if not weights:
            raise
        source, context = "weights", _widest_context(facts, preset, tokens, on_host=on_host)
        compute = max((SAFETY_FACTOR - 1) * weights - context, LEAST_BESIDE + context // 8)
        note = (
            f"weights x {SAFETY_FACTOR}, or more where a cache of hidden size would need it, and"
            f" {LEAST_BESIDE // MIB} MiB beside them at least: {unknown.fact}; required-memory would replace this"
        )
    else:
        compute = kept_bytes(facts, preset, compute, context) if on_host else compute
    return Estimate(
        weights=(weights,),
        context=(context,),
        compute=(compute,),
        runtime=(runtime + extra,),
        host=beside,
        source=source,
        reserved=extra,
        note=note,
    )


def _widest_context(facts: Checkpoint, preset: Preset, tokens: int, *, on_host: bool) -> int:
    """Bytes of keys and values if each is as wide as the model, in as many layers as the tensors' names tell of: more
    than a model caches whose heads share them, or that caches a compressed row. 0 where not even that is known."""
    if embeds(facts, preset):
        return 0
    layers = facts.layers or facts.named_layers
    cached = preset.kv_tokens or preset.parallel * tokens
    return 2 * facts.hidden * layers * cached * DTYPE_BYTES[compute_dtype(facts, preset, on_host=on_host)]


def head_shard(facts: Checkpoint, layers: tuple[int, ...]) -> int:
    """Which shard has the head, and so the logits: the last; a head that is the embedding stays there, in the first."""
    return 0 if facts.tied else len(layers) - 1


def _weights_by_shard(facts: Checkpoint, preset: Preset, total: int, layers: tuple[int, ...]) -> tuple[int, ...]:
    """`total` bytes of weights: of each shard its layers, of the last what is behind them, of the first the rest."""
    each = DTYPE_BYTES[compute_dtype(facts, preset, on_host=False)]
    first, sizes = 0, []
    for count in layers:
        sizes.append(sum(facts.by_layer[first : first + count]) * each)
        first += count
    sizes[-1] += facts.behind * each
    sizes[0] += max(0, total - sum(sizes))
    return tuple(sizes)


def _part(facts: Checkpoint, layers: int) -> Checkpoint:
    """A model of so many of its layers; of two kinds as many of each as their share is, rounded up: the files do not
    say which is which."""
    if facts.hybrid or not facts.state_layers:
        return replace(facts, layers=layers, state_layers=layers if facts.hybrid else 0)
    states = -(-facts.state_layers * layers // facts.layers)
    attending = -(-(facts.layers - facts.state_layers) * layers // facts.layers)
    return replace(facts, layers=states + attending, state_layers=states)


def layer_costs(facts: Checkpoint, preset: Preset) -> tuple[int, ...]:
    """Bytes of weights and context of each layer on an accelerator. Raises EstimateError."""
    each = DTYPE_BYTES[compute_dtype(facts, preset, on_host=False)]
    context = context_bytes(facts, preset, effective_ctx(facts, preset), on_host=False)
    share = -(-context // max(1, len(facts.by_layer)))
    return tuple(elements * each + share for elements in facts.by_layer)


def kept_whole(facts: Checkpoint, preset: Preset) -> str:
    """Why the model lies on one device, whichever way it would be divided; empty: nothing forbids it."""
    if embeds(facts, preset):
        return "it embeds or scores texts"
    if facts.cross_attention:
        return "it has an encoder and a decoder"
    if "vision" in facts.capabilities:
        return "it sees images"
    if facts.quantization or on_load(facts, preset):
        return "its weights are quantised"
    if preset.adapter_slots:
        return "requests may name adapters"
    return ""


def indivisible(facts: Checkpoint, preset: Preset) -> str:
    """Why the model's layers cannot lie on several devices; empty: they can."""
    return kept_whole(facts, preset) or ("" if facts.by_layer else "its files do not tell its layers from the rest")


def prepared_bytes(facts: Checkpoint, found: Estimate, *, on_host: bool, forked: bool) -> int:
    """Bytes of main memory, at most, of a worker that has done all it can before its weights: the process itself and
    its tokenizer, as far as they are part of what was `found`."""
    most = found.shards[0] if on_host else found.host
    return min(most, (RUNTIME_FORKED if forked else RUNTIME_HOST) + facts.vocab_size * TOKENIZER_BYTES)


def kept_bytes(facts: Checkpoint, preset: Preset, compute: int, context: int) -> int:
    """Bytes beside weights and pool that main memory has to hold: those that steps leave with malloc, or those that are
    needed only while the model is loaded, before there is a pool."""
    kept = RETENTION * compute
    itemsize = DTYPE_BYTES[compute_dtype(facts, preset, on_host=True)]
    kept += KERNEL_BYTES if itemsize == 2 or facts.largest >= KERNELS_FROM else 0
    if not is_mapped(facts, preset):
        kept = max(kept, facts.largest - context)  # while weights are converted
    if on_load(facts, preset):  # all are there until the last is packed
        kept = max(kept, sum(tally.elements for tally in facts.tensors.values()) * itemsize - context)
    stacking = facts.stacked * itemsize
    if stacking and not facts.quantization:
        # each is here twice until all are put together, and those of one layer once more
        kept = max(kept, stacking + stacking // max(facts.layers, 1) - context)
    return kept


def grammar_bytes(facts: Checkpoint, preset: Preset) -> int:
    """Bytes of main memory that a worker takes once an answer has to follow a grammar: any request may ask for that."""
    return 0 if embeds(facts, preset) else GRAMMAR_BYTES + facts.vocab_size * GRAMMAR_ENTRY_BYTES


def compute_dtype(facts: Checkpoint, preset: Preset, *, on_host: bool) -> str:
    """The dtype that the model will compute in, as torch names it. float16 becomes float32 on main memory."""
    wanted = facts.dtype if preset.dtype == "auto" else preset.dtype
    if wanted not in DTYPE_BYTES or wanted == "float64":
        wanted = "float32"
    return "float32" if wanted == "float16" and on_host and preset.dtype == "auto" else wanted


def embeds(facts: Checkpoint, preset: Preset) -> bool:
    """Whether the worker will embed or score texts rather than generate."""
    return preset.task in ("embed", "rerank") or (preset.task == "auto" and "completion" not in facts.capabilities)


def sees(facts: Checkpoint, preset: Preset) -> bool:
    """Whether the worker will take images."""
    return "vision" in facts.capabilities and preset.limit_images > 0 and not embeds(facts, preset)


def picture_bytes(facts: Checkpoint, preset: Preset) -> int:
    """Main memory for images on their way to the model: one that is opened, and all that are prepared."""
    if not sees(facts, preset):
        return 0
    ctx_size = preset.ctx_size if preset.ctx_size > 0 else facts.max_positions or AUTO_CTX
    most = min(preset.limit_images, max(ctx_size // max(facts.picture_tokens, 1), 1))
    return OPENING_BYTES + max(HELD_BYTES, most * facts.picture_elements * DTYPE_BYTES["float32"])


def weight_bytes(facts: Checkpoint, preset: Preset, *, on_host: bool) -> int:
    """Bytes of all tensors as they will sit in memory.

    Plain floating-point tensors take the dtype that the model computes in; packed integers, and 8-bit floats of a
    checkpoint quantised that way, stay as they are stored where there are kernels for them. Where the preset has linear
    layers packed on load, they are. On main memory a file whose tensors all have that dtype is mapped whole and made
    resident, with what the model does not use of it. Layers behind an embedder are float32.
    """
    each = DTYPE_BYTES[compute_dtype(facts, preset, on_host=on_host)]
    packed, kept = packing(facts, preset, on_host=on_host)
    unpacks = is_unpacked(facts, on_host=on_host)
    total = packed + kept
    for stored, tally in facts.tensors.items():
        if _is_plain(stored, facts):
            continue
        total += tally.elements * numbers(stored, facts.bits) * each if unpacks else tally.bytes
    total = max(total, facts.file_bytes) if on_host and is_mapped(facts, preset) else total
    if facts.model_type == "gpt_bigcode":  # it makes a causal mask of all positions, a byte each
        total += facts.max_positions**2
    return total + facts.head_elements * DTYPE_BYTES["float32"] + adapter_bytes(facts, preset, each)


def adapter_bytes(facts: Checkpoint, preset: Preset, each: int) -> int:
    """Bytes of the slots for LoRA adapters, of elements of `each` bytes: A and B of every linear layer (Hu et al. 2021,
    section 4.1)."""
    return preset.adapter_slots * preset.max_lora_rank * facts.linears.ends * each


def packing(facts: Checkpoint, preset: Preset, *, on_host: bool) -> tuple[int, int]:
    """Bytes that quantising on load, or the scales of a quantised checkpoint, will take, and those of what stays in
    plain floating point.

    8 bits: a byte for each element, a float32 for each row (Dettmers et al. 2022, section 3). 4 bits: half a byte, a
    float32 for each 64 elements, and a table of 16 for each layer (Dettmers et al. 2023, section 3; what bitsandbytes
    does by default, without double quantisation).
    """
    each = DTYPE_BYTES[compute_dtype(facts, preset, on_host=on_host)]
    plain = sum(tally.elements * each for stored, tally in facts.tensors.items() if _is_plain(stored, facts))
    linears, bits = facts.linears, on_load(facts, preset)
    if not bits:  # whoever is unpacked has no scales any more
        times = ARRANGED.get(facts.quantization, 1.0) if on_host else 1.0
        return 0 if is_unpacked(facts, on_host=on_host) else int(times * facts.scale_bytes), plain
    packed = linears.elements + 4 * linears.rows
    if bits == 4:
        packed = -(-linears.elements // 2) + 4 * linears.blocks + 64 * linears.count
    return packed, max(0, plain - linears.elements * each)


def is_unpacked(facts: Checkpoint, *, on_host: bool) -> bool:
    """Whether the weights of a quantised checkpoint become plain numbers while they are loaded."""
    return facts.quantization in UNPACKED or (on_host and facts.quantization in UNPACKED_ON_HOST)


def numbers(stored: str, bits: int) -> int:
    """How many numbers of so many bits an element of that stored type holds."""
    word = {"int32": 32, "uint32": 32, "uint8": 8, "int8": 8}.get(stored, 0)
    return max(1, word // bits) if word and bits else 1


def on_load(facts: Checkpoint, preset: Preset) -> int:
    """Bits to which linear layers are packed while the model is loaded; 0: they are not."""
    return 0 if facts.quantization else ON_LOAD.get(preset.quantization, 0)


def packed_bits(facts: Checkpoint, preset: Preset) -> int:
    """Bits of linear layers that bitsandbytes packs, or has packed; 0: it does not."""
    return on_load(facts, preset) or ON_LOAD.get(facts.quantization, 0)


def check_quantization(facts: Checkpoint, preset: Preset) -> None:
    """Raises WrongQuantization if the preset asks for one that the checkpoint does not have and cannot get."""
    asked, is_ = preset.quantization, facts.quantization
    if asked == "auto" or (asked == "none" and not is_) or on_load(facts, preset) or (is_ and asked == is_):
        return
    if is_.startswith("bnb") and asked.startswith("bnb"):
        return  # loaded as it is stored
    fact = f"quantised with {is_}" if is_ else "not quantised"
    raise WrongQuantization(f"{preset.id}: quantization = {asked}, but the checkpoint is {fact}; leave the key out")


def _is_plain(stored: str, facts: Checkpoint) -> bool:
    return stored in DTYPE_BYTES or (stored.startswith("float8") and not facts.quantization)


def is_mapped(facts: Checkpoint, preset: Preset) -> bool:
    """Whether a worker on main memory needs no copy of the files: each tensor has the dtype that is computed in."""
    if facts.quantization or on_load(facts, preset):
        return False
    dtype = compute_dtype(facts, preset, on_host=True)
    return bool(facts.file_bytes) and all(stored == dtype for stored in facts.tensors if stored in DTYPE_BYTES)


def _staged_bytes(facts: Checkpoint, preset: Preset) -> int:
    """Bytes of main memory that hold weights on their way to an accelerator: buffers, and all weights if they are
    converted."""
    dtype = compute_dtype(facts, preset, on_host=False)
    if on_load(facts, preset):
        return facts.file_bytes
    if all(stored == dtype for stored in facts.tensors if stored in DTYPE_BYTES):
        return STAGING_BYTES
    return STAGING_BYTES + weight_bytes(facts, preset, on_host=False)


def context_bytes(facts: Checkpoint, preset: Preset, tokens: int, *, on_host: bool) -> int:
    """Bytes of the pool of keys and values: blocks for `kv_tokens`, or for `parallel` sequences of `tokens` each.

    Sum over layers of kv_heads x (key + value elements of a head) x dtype bytes (Kwon et al. 2023, section 3), or what
    these take as `kv-cache-dtype` keeps them. The engine caps no layer at its window. A state layer costs the same
    whatever the length, and is kept twice, in float32 if the model's code wants that. With an encoder each layer keeps
    the prompt's keys and values as well, in as many columns. The aligned cache has rows, as many as `kv_tokens` leaves,
    in place of blocks, and moves one of a layer through a buffer of that size. An embedder has no pool.
    Raises UnknownArchitecture if the layers are unstated, ContextTooLarge if one request would not fit.
    """
    if embeds(facts, preset):
        return 0
    if 0 < preset.kv_tokens < tokens:
        raise ContextTooLarge(
            f"{preset.id}: kv-tokens {preset.kv_tokens} is less than the {tokens} tokens that one request may have"
            " (ctx-size); raise kv-tokens or lower ctx-size"
        )
    attending = facts.layers - (0 if facts.hybrid else facts.state_layers)
    if facts.layers <= 0 or (attending and not (facts.kv_heads and facts.head_dim)):
        raise UnknownArchitecture(
            preset.id,
            f"config.json of {facts.model_type or 'this model'} does not state its layers, key-value heads and head"
            " size",
        )
    each = DTYPE_BYTES[compute_dtype(facts, preset, on_host=on_host)]
    attending *= 2 if facts.cross_attention else 1
    sizes = [
        facts.kv_heads * kv_types.head_bytes(preset.kv_cache_dtype, elements, each)
        for elements in (facts.head_dim, facts.value_dim or facts.head_dim)
    ]
    per_token = attending * sum(sizes)
    state = facts.state_elements * max(each, 4)
    if facts.aligned:
        rows = min(preset.parallel, preset.kv_tokens // tokens) if preset.kv_tokens else preset.parallel
        one = tokens * max(sizes) if attending else 0
        return rows * (tokens * per_token + 2 * facts.state_layers * state) + max(one, state)
    blocks = -(-preset.kv_tokens // BLOCK_TOKENS) if preset.kv_tokens else preset.parallel * -(-tokens // BLOCK_TOKENS)
    return blocks * BLOCK_TOKENS * per_token + preset.parallel * facts.state_layers * state


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
        if facts.bits != 4 or facts.group not in FUSED_GROUPS:
            layer += (each + UNPACKING_BYTES) * matrix
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
    chunk = min(preset.chunk, tokens)
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
        scores = _encoded_score_bytes(facts, preset) * facts.heads * tokens**2
        scores += tokens * (passing + 3 * queries * each)
        encoding = max(scores, tokens * (passing + 4 * facts.intermediate * each))
    if facts.state_steps > 1:  # beside whatever else lives in the layer
        chunked += 5 * -(-packed // facts.state_steps) * facts.state_elements * 4
    states = packed * (passing + STATE_TENSORS * facts.state_elements) if facts.state_steps == 1 else 0
    return max(chunked, decoding, encoding, int(states))


def _encoded_score_bytes(facts: Checkpoint, preset: Preset) -> int:
    """Of each score while an encoder reads a prompt; BART computes them by tiles.
    By its exact trace, in 16 bits and 32, with 256 to 1024 tokens."""
    if preset.attention == "eager":
        return ENCODED_SCORES
    return {"bart": 0}.get(facts.model_type, ENCODED_SCORES)


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


def required_shards(preset: Preset, *, shards: int, on_host: bool) -> tuple[int, ...] | None:
    """What the preset itself says that each shard needs; None if it does not say so for all of them."""
    said = preset.required_memory
    if not said:
        return None
    if on_host:
        names = ["cpu"]
    elif preset.device:
        names = list(preset.device[:shards])
    else:
        names = [name for name in said if name not in ("", "cpu")][:shards]
    names += [""] * (shards - len(names))
    values = [said.get(name, said.get("")) for name in names]
    return None if None in values else tuple(value for value in values if value is not None)
