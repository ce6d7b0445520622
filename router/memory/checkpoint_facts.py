"""What a checkpoint states that its memory and its description depend on, and what a preset makes of it. Law: PURE."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from router.config.presets import Preset
from router.errors import RouterError

AUTO_CTX = 8192
"""Tokens that a preset without ctx-size gets at most."""

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
    vocab_size: int = 0
    max_positions: int = 0
    """Longest sequence that the model was made for; 0: the config states none (ALiBi, state-space models)."""
    state_layers: int = 0
    """Layers that keep a state of constant size, most of them in place of keys and values (state-space, linear
    attention)."""
    state_elements: int = 0
    """Elements of that state, of one layer for one sequence."""
    state_steps: int = 1
    """Tokens that share one such state while many are computed at once."""
    hybrids: int = 0
    """Of its state layers, those that keep keys and values, too."""
    aligned: bool = False
    """The worker runs it by the model's own forward, on the cache that any model can use (worker/engines/transformers/run/aligned.py)."""
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
    """Inputs that share a scale, of gptq and awq; -1: all of a layer; 0: not stated."""
    scale_bytes: int = 0
    """Of a quantised checkpoint's scales, zero points, orders and maps, which stay as they are stored; not in
    `tensors`."""
    linears: Linears = Linears()
    capabilities: tuple[str, ...] = ()
    """Of chat, completion, tools, vision, embedding, rerank, as far as the files tell."""
    chat_template: bool = False
    vocab_type: int = 0
    """As llama.cpp numbers them: 0 none, 1 SentencePiece, 2 byte pairs, 3 word pieces, 4 unigrams."""

    @property
    def attending(self) -> int:
        """Layers that keep keys and values."""
        return self.layers - self.state_layers + self.hybrids


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
