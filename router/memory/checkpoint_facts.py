"""The facts of a checkpoint that determine its memory and its description, and their meaning under a preset. PURE."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from router.config.presets import Preset
from router.errors import RouterError

AUTO_CTX = 8192  # tokens that a preset without ctx-size gets at most

DTYPE_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class EstimateError(RouterError):
    """No estimate is possible; `message` is for users and contains the way out."""

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message


class UnknownCheckpoint(EstimateError):
    """The folder has no readable checkpoint: a file is missing, damaged, or of another format."""


class UnknownArchitecture(EstimateError):
    """The checkpoint does not state a number that its memory depends on; `fact` describes it."""

    def __init__(self, id: str, fact: str, way_out: str = "set required-memory in MiB"):
        super().__init__(f"{id}: {fact}; {way_out}")
        self.fact = fact


class WrongQuantization(EstimateError):
    """The preset states another quantization than the checkpoint has."""


class ContextTooLarge(EstimateError):
    """The preset asks for more tokens than the model has positions, or than fit in its KV cache."""


@dataclass(frozen=True, slots=True)
class Tally:
    """The tensors of one stored dtype."""

    elements: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Linears:
    """Weights of linear layers that bitsandbytes would pack: all but embeddings, output head, routers and experts."""

    count: int = 0
    elements: int = 0
    rows: int = 0  # of all of them; 8 bits have a scale for each
    blocks: int = 0  # of 64 elements; 4 bits have a scale for each
    ends: int = 0  # inputs and outputs of all of them: a LoRA adapter of rank 1 has so many elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The facts of a snapshot. 0 and "" mean: not stated."""

    identity: str = ""  # hash of file names, sizes and config: the same for the same snapshot wherever it lies
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    # Heads of keys and values in the cache; 1 with multi-head latent attention, which caches one compressed row.
    kv_heads: int = 0
    head_dim: int = 0  # elements of one head's key in the cache; the config's when given, else hidden / heads
    # Elements of one head's value in the cache; the rotary part of the key with multi-head latent attention.
    value_dim: int = 0
    expanded: int = 0  # elements of keys and values of one token as attention reads them, of all query heads
    intermediate: int = 0  # width of the MLP; of all experts that one token visits together
    vocab_size: int = 0
    # Longest sequence that the model was made for; 0: the config states none (ALiBi, state-space models).
    max_positions: int = 0
    # Layers that keep a state of constant size, most of them in place of keys and values (state-space, linear
    # attention).
    state_layers: int = 0
    state_elements: int = 0  # elements of that state, of one layer for one sequence
    state_steps: int = 1  # tokens that share one such state while many are computed at once
    hybrids: int = 0  # of its state layers, those that keep keys and values, too
    # The worker runs it by the model's own forward, on the cache that any model can use
    # (worker/engines/transformers/run/aligned.py).
    aligned: bool = False
    cross_attention: bool = False  # an encoder's output is cached as well, for each layer of the decoder
    tied: bool = False  # the output head is the input embedding
    dtype: str = ""  # of the config, else of the first floating-point tensor, as torch names it
    # What will be loaded, by dtype as stored (torch's names); a stored copy of a tied head is not among it.
    tensors: Mapping[str, Tally] = field(default_factory=dict)
    params: int = 0  # parameters of the model; packed quantised ones are counted unpacked
    by_layer: tuple[int, ...] = ()  # elements of each layer's tensors; empty: the names do not show them
    matrices: int = 0  # elements of all layers' matrices, without their vectors; 0: the names do not show them
    named_layers: int = 0  # number of layers that the tensor names show
    behind: int = 0  # elements of what stands behind the layers: a head that is not the embedding, the last norm
    file_bytes: int = 0  # of the safetensors files
    head_elements: int = 0  # parameters of layers behind an embedder's model, which the worker keeps in float32
    largest: int = 0  # bytes of the largest stored tensor
    stacked: int = 0  # elements of tensors that are put together into larger ones while the model is loaded
    # Elements alive at once in the vision tower while it sees the largest image; 0: there is none that is used.
    tower: int = 0
    picture_tokens: int = 0  # of that image in a prompt
    picture_elements: int = 0  # of that image as the tower takes it
    quantization: str = ""  # method that the config states: gptq, awq, fp8,
    bits: int = 0  # of a packed number
    group: int = 0  # inputs that share a scale, of gptq and awq; -1: all of a layer; 0: not stated
    # Of a quantised checkpoint's scales, zero points, orders and maps, which stay as they are stored; not in
    # `tensors`.
    scale_bytes: int = 0
    linears: Linears = Linears()
    # Of chat, completion, tools, vision, embedding, rerank, as far as the files show.
    capabilities: tuple[str, ...] = ()
    chat_template: bool = False
    vocab_type: int = 0  # as llama.cpp numbers them: 0 none, 1 SentencePiece, 2 byte pairs, 3 word pieces, 4 unigrams

    @property
    def attending(self) -> int:
        """The number of layers with keys and values."""
        return self.layers - self.state_layers + self.hybrids


def effective_ctx(facts: Checkpoint, preset: Preset) -> int:
    """Return the tokens per request with which a worker of `preset` starts.

    Raises ContextTooLarge if the preset asks for more than the model has, and UnknownArchitecture if it asks for the
    maximum of a model that states none.
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


def compute_dtype(facts: Checkpoint, preset: Preset, *, on_host: bool) -> str:
    """Return the dtype of the computation, as torch names it. On main memory float16 becomes float32."""
    wanted = facts.dtype if preset.dtype == "auto" else preset.dtype
    if wanted not in DTYPE_BYTES or wanted == "float64":
        wanted = "float32"
    return "float32" if wanted == "float16" and on_host and preset.dtype == "auto" else wanted


def serves_embeddings(facts: Checkpoint, preset: Preset) -> bool:
    """Return whether the worker embeds or scores texts instead of generating."""
    return preset.task in ("embed", "rerank") or (preset.task == "auto" and "completion" not in facts.capabilities)


def takes_images(facts: Checkpoint, preset: Preset) -> bool:
    """Return whether the worker accepts images."""
    return "vision" in facts.capabilities and preset.limit_images > 0 and not serves_embeddings(facts, preset)


def packed_numbers(stored: str, bits: int) -> int:
    """Return how many numbers of `bits` bits one element of the stored type holds."""
    word = {"int32": 32, "uint32": 32, "uint8": 8, "int8": 8}.get(stored, 0)
    return max(1, word // bits) if word and bits else 1
