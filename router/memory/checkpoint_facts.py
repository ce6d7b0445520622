"""The facts of a checkpoint that determine its memory and its description: what config.json states, and what it means
under a preset. PURE."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from router.config.presets import ACCELERATOR_CHUNK, DEFAULT_CHUNK, DEFAULT_ROWS, Preset
from router.errors import RouterError
from worker.protocol.architectures import PAGED
from worker.protocol.model_config import TEXT_KEYS, longest_sequence

AUTO_CTX = 8192  # tokens that a preset without ctx-size gets at most

DTYPE_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

MOST_LAYERS = 1 << 16
LARGEST_NUMBER = 1 << 48  # in a config; a larger number describes no model

# Sizes of a vision tower that the config does not state: those of the largest published models.
_TOWERS: Mapping[str, Mapping[str, int]] = {
    "gemma3": {"hidden_size": 1152, "intermediate_size": 4304, "image_size": 896, "patch_size": 14},
    "idefics3": {"hidden_size": 1152, "intermediate_size": 4304, "image_size": 364, "patch_size": 14},
    "llava": {"hidden_size": 1024, "intermediate_size": 4096, "image_size": 336, "patch_size": 14},
}  # fmt: skip

_BOTH = "hybrid"  # in the name of a kind of layer: it has a state beside keys and values
_STATE_KINDS = ("mamba", "linear_attention", "recurrent", "conv", "ssm", "rwkv", _BOTH)
_CACHELESS = ("mlp", "moe")  # kinds of layers that have neither keys and values nor a state (Nemotron-H)
_LETTERS: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # of Nemotron-H's pattern
_HYBRIDS = frozenset({"falcon_h1"})  # architectures whose layers are all of that kind, even if the config is silent


class EstimateError(RouterError):
    """No estimate is possible; `message` is for users and contains the remedy."""

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
    """Weights of linear layers that bitsandbytes quantizes: all but embeddings, output head, routers and experts."""

    count: int = 0
    elements: int = 0
    rows: int = 0  # of all of them; 8 bits have a scale for each
    blocks: int = 0  # of 64 elements; 4 bits have a scale for each
    lora_elements: int = 0  # of a LoRA adapter of rank 1: inputs and outputs of all of them


@dataclass(frozen=True, slots=True)
class Part:
    """The tensors of one layer, or of what stands behind the layers; the fields are those of `Checkpoint`."""

    tensors: Mapping[str, Tally] = field(default_factory=dict)
    scale_bytes: int = 0
    linears: Linears = Linears()


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The facts of a snapshot. 0 and "" mean: not stated."""

    identity: str = ""  # hash of file names, sizes and config: the same for the same snapshot wherever it lies
    model_type: str = ""
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    # Heads of keys and values in the cache; 1 with multi-head latent attention, which caches one compressed row.
    kv_heads: int = 0
    head_dim: int = 0  # elements of one head's key in the cache; the config's when given, else hidden / heads
    # Elements of one head's value in the cache; the rotary part of the key with multi-head latent attention.
    value_dim: int = 0
    # Elements of one further key in the cache, by which a layer chooses the tokens to attend to (DeepSeek-V3.2, GLM-5).
    index_dim: int = 0
    attention_elements: int = 0  # elements of keys and values of one token as attention reads them, of all query heads
    intermediate: int = 0  # width of the MLP; of all experts that one token visits together
    mlp_widths: Mapping[str, int] = field(default_factory=dict)  # of MLPs and experts; heads of linear attention
    vocab_size: int = 0
    # Longest sequence that the model was made for; 0: the config states none (ALiBi, state-space models).
    max_positions: int = 0
    # Layers that keep a state of constant size, most of them in place of keys and values (state-space, linear
    # attention).
    state_layers: int = 0
    state_elements: int = 0  # elements of that state, of one layer for one sequence
    hybrids: int = 0  # of its state layers, those that keep keys and values, too
    cacheless: int = 0  # layers with neither keys and values nor a state (MLPs of Nemotron-H)
    # The worker runs it by the model's own forward, on the cache that any model can use
    # (worker/engines/transformers/run/aligned.py).
    aligned: bool = False
    cross_attention: bool = False  # an encoder's output is cached as well, for each layer of the decoder
    tied: bool = False  # the output head is the input embedding
    dtype: str = ""  # of the config, else of the first floating-point tensor, as torch names it
    # Elements to load, by dtype as stored (torch's names); a stored copy of a tied head is not among it.
    tensors: Mapping[str, Tally] = field(default_factory=dict)
    params: int = 0  # parameters of the model; quantized ones are counted dequantized
    by_layer: tuple[Part, ...] = ()  # empty: the tensor names do not show the layers
    matrix_elements: int = 0  # elements of all layers' matrices, without their vectors; 0: the names do not show them
    named_layers: int = 0  # number of layers that the tensor names show
    behind: Part = Part()  # what stands behind the layers: a head that is not the embedding, the last norm
    file_bytes: int = 0  # of the weight files
    pickled: bool = False  # the weights are pickled: they are converted before a load
    head_elements: int = 0  # parameters of layers behind an embedder's model, which the worker keeps in float32
    largest: int = 0  # bytes of the largest stored tensor
    stacked: int = 0  # elements of tensors that are put together into larger ones while the model is loaded
    vision_elements: int = 0  # bound for one step of the vision tower, on the largest image; 0: no images
    picture_tokens: int = 0  # of that image in a prompt
    picture_elements: int = 0  # of that image as the tower takes it
    quantization: str = ""  # method that the config states: gptq, awq, fp8
    bits: int = 0  # of a quantized number
    group: int = 0  # inputs that share a scale, of gptq and awq; -1: all of a layer; 0: not stated
    # Of a quantized checkpoint's scales, zero points, orders and maps, which stay as they are stored; not in
    # `tensors`.
    scale_bytes: int = 0
    linears: Linears = Linears()
    # Of chat, completion, tools, vision, embedding, rerank, as far as the files show.
    capabilities: tuple[str, ...] = ()
    draft: "Checkpoint | None" = None  # of the draft model that the preset names
    draft_snapshot: str = ""  # its folder
    vocab_type: int = 0  # as llama.cpp numbers them: 0 none, 1 SentencePiece, 2 byte pairs, 3 word pieces, 4 unigrams

    @property
    def has_latent_keys(self) -> bool:
        """True if attention caches one compressed row for all heads (`_heads`)."""
        return self.value_dim != self.head_dim

    @property
    def attention_layers(self) -> int:
        """The number of layers with keys and values."""
        return self.layers - self.cacheless - self.state_layers + self.hybrids


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
    if most and preset.ctx_size > most and preset.caps_ctx:
        return most
    if most and preset.ctx_size > most:
        raise ContextTooLarge(
            f"{preset.id}: ctx-size {preset.ctx_size} is more than the model's maximum of {most} tokens;"
            f" set it to {most} or less, or 0 for the maximum; rope-scale = N makes the maximum N times longer"
        )
    return preset.ctx_size


def compute_dtype(facts: Checkpoint, preset: Preset, *, on_host: bool) -> str:
    """Return the dtype of the computation, as torch names it. On main memory float16 becomes float32."""
    wanted = facts.dtype if preset.dtype == "auto" else preset.dtype
    if wanted not in DTYPE_BYTES or wanted == "float64":
        wanted = "float32"
    return "float32" if wanted == "float16" and on_host and preset.dtype == "auto" else wanted


def prefill_chunk(facts: Checkpoint, preset: Preset, *, on_host: bool) -> int:
    """Return the most tokens of prompts in one step.

    An accelerator computes 512 tokens in less time than the host takes to launch the kernels of the step. Without a KV
    cache in blocks, or with eager attention, scores and masks of a larger step take too much memory.
    """
    is_small = on_host or facts.aligned or preset.attention == "eager" or serves_embeddings(facts, preset)
    return preset.chunk or (DEFAULT_CHUNK if is_small else ACCELERATOR_CHUNK)


def rows(facts: Checkpoint, preset: Preset) -> int:
    """Return the most sequences in one step.

    Blocks are taken as texts grow, so more sequences than full contexts share a KV cache in blocks. Each row of another
    cache takes the memory of a full context.
    """
    is_paged = not (facts.aligned or serves_embeddings(facts, preset))
    return preset.parallel or (DEFAULT_ROWS if is_paged else preset.contexts)


def serves_embeddings(facts: Checkpoint, preset: Preset) -> bool:
    """Return whether the worker embeds or scores texts instead of generating."""
    return preset.task in ("embed", "rerank") or (preset.task == "auto" and "completion" not in facts.capabilities)


def takes_images(facts: Checkpoint, preset: Preset) -> bool:
    """Return whether the worker accepts images."""
    return "vision" in facts.capabilities and preset.limit_images > 0 and not serves_embeddings(facts, preset)


def quantized_numbers(stored: str, bits: int) -> int:
    """Return how many numbers of `bits` bits one element of the stored type holds."""
    word = {"int32": 32, "uint32": 32, "uint8": 8, "int8": 8}.get(stored, 0)
    return max(1, word // bits) if word and bits else 1


# Facts that config.json states. Its keys differ by family.


def from_config(
    config: Mapping[str, Any],
    *,
    embedding: tuple[int, ...],
    key_rows: int,
    most_key_rows: int,
    query_rows: int,
    stored_dtype: str,
) -> Checkpoint:
    """Return the facts that `config` states, or that follow from the shapes of tensors if it does not.

    `embedding`: the shape of the input embedding; `key_rows`, `query_rows`: rows of the projections of one layer;
    `most_key_rows`: of the largest layer if layers differ, else 0; `stored_dtype`: of the first floating-point tensor.
    Raises ValueError for numbers that no model can have.
    """
    text = _text(config)
    model_type = str(config.get("model_type", ""))
    hidden = _size(text, "hidden_size", "n_embd", "d_model", "dim") or embedding[-1]
    layers = _size(
        text, "num_decoder_layers", "decoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers"
    )
    if model_type == "longcat_flash":
        layers = max(layers, 2 * _first(text, "num_layers"))  # each of these has two attention layers
    kinds = _layer_kinds(text)
    layers = layers or len(kinds)
    if layers > MOST_LAYERS:
        raise ValueError(f"{layers} layers")
    states = min(max(_state_layers(text, layers), 0), layers)
    cacheless = min(sum(kind in _CACHELESS for kind in kinds), layers - states)
    heads, kv_heads, head_dim, value_dim, expanded = _heads(
        text, model_type, hidden, key_rows=key_rows, most_key_rows=most_key_rows, query_rows=query_rows
    )
    method, bits, group = quantization(config)
    is_encoder_decoder = bool(config.get("is_encoder_decoder"))
    return Checkpoint(
        model_type=model_type,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        index_dim=_first(text, "index_head_dim") if value_dim != head_dim else 0,
        attention_elements=expanded,
        intermediate=_intermediate(text, hidden),
        mlp_widths={
            "MLP": _dense(text, hidden),
            "experts": _first(text, "moe_intermediate_size"),
            "shared expert": _first(text, "shared_expert_intermediate_size"),
            "dense MLP": _first(text, "intermediate_size_mlp"),
            "linear attention": _first(text, "linear_num_value_heads"),
        },
        vocab_size=_size(text, "vocab_size") or embedding[0],
        max_positions=_positions(text),
        state_layers=states,
        state_elements=_state_elements(text, hidden) if states else 0,
        hybrids=states if model_type in _HYBRIDS else min(sum(_BOTH in kind for kind in kinds), states),
        cacheless=cacheless,
        aligned=model_type not in PAGED or is_encoder_decoder,
        cross_attention=is_encoder_decoder,
        dtype=_dtype(text, config) or stored_dtype,
        quantization=method,
        bits=bits,
        group=group,
    )


def is_tied(config: Mapping[str, Any], *, has_head: bool) -> bool:
    """Return whether the output head is the input embedding. `has_head`: the files have a tensor for it."""
    return bool(_text(config).get("tie_word_embeddings", config.get("tie_word_embeddings", not has_head)))


def largest_image(config: Mapping[str, Any], processor: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the memory facts of the largest image: a bound on the elements of one step of the vision tower, tokens in
    a prompt, and elements of the image as the tower takes it. `processor`: config of the image processor.

    The vision tower processes each image at `image_size`. The processor of Idefics3 divides an image into tiles of this
    size, and adds the whole image once more.
    """
    family = str(config.get("model_type", ""))
    stated = config.get("vision_config")
    vision = {**_TOWERS[family], **(stated if isinstance(stated, dict) else {})}
    side, patch = _first(vision, "image_size"), max(_first(vision, "patch_size"), 1)
    patches = (side // patch) ** 2 + 1
    images, tokens = 1, patches
    if family == "gemma3":
        tokens = _first(config, "mm_tokens_per_image") or 256
    if family == "idefics3":
        longest = _first(processor.get("size"), "longest_edge") or 4 * side
        tile = _first(processor.get("max_image_size"), "longest_edge") or side
        images = (-(-longest // tile)) ** 2 + 1
        tokens = images * -(-patches // max(_first(config, "scale_factor"), 1) ** 2)
    widths = 2 * _first(vision, "hidden_size") + _first(vision, "intermediate_size")
    # Eight tensors of each width, as in any other layer (segments.COPIES).
    return images * patches * 8 * widths, tokens, images * 4 * side**2


def longest_text(config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> int:
    """Return the tokens to which sentence-transformers truncates a text; 0 if neither of its config (
    sentence_bert_config.json) and the tokenizer's states it."""
    usual = tokenizer.get("model_max_length")  # 10**30 means: no maximum
    return _first(config, "max_seq_length") or (
        int(usual) if isinstance(usual, (int, float)) and 0 < usual < 1 << 31 else 0
    )


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes the language model, or the decoder of one with an encoder (T5Gemma);
    multimodal configs nest it."""
    for key in (*TEXT_KEYS, "decoder"):
        nested = config.get(key)
        if isinstance(nested, dict):
            return _text({**config, key: None, **nested})
    return config


def _first(config: Any, *names: str) -> int:
    """Return the first of these keys with a positive number, or the largest of a list by layer; 0 if there is none, or
    if `config` is no object. Raises ValueError if the number is too large for any model."""
    for name in names if isinstance(config, dict) else ():
        value = config.get(name)
        if isinstance(value, list):
            value = max((each for each in value if isinstance(each, int)), default=0)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            if value > LARGEST_NUMBER:
                raise ValueError(f"{name} is {value}")
            return int(value)
    return 0


def _size(config: Mapping[str, Any], *names: str, least: int = 1) -> int:
    """Like `_first`. Also raises ValueError if one of the keys is negative or the result is below `least`."""
    found = _first(config, *names)
    for name in names:
        value = config.get(name)
        if isinstance(value, (int, float)) and value < (0 if found else least):
            raise ValueError(f"{name} is {value}")
    return found


def _heads(
    config: Mapping[str, Any], model_type: str, hidden: int, *, key_rows: int, most_key_rows: int, query_rows: int
) -> tuple[int, int, int, int, int]:
    """Return query heads, key-value heads, elements of one cached key and value of a head, and elements of all keys and
    values of one token as attention reads them."""
    heads = _size(config, "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", least=0)
    stated = _first(config, "head_dim", "attention_head_dim", "d_kv", "kv_channels")
    head_dim = stated or (hidden // heads if heads else key_rows)
    heads = heads or (query_rows // head_dim if head_dim else 0)
    rank, rope = _first(config, "kv_lora_rank"), _first(config, "qk_rope_head_dim")
    if rank and rope:  # multi-head latent attention (DeepSeek-V2, section 2.1): one compressed row, one rotary key
        value_dim = _first(config, "v_head_dim") or head_dim
        expanded = heads * (_first(config, "qk_nope_head_dim") + rope + value_dim)
        return heads, 1, rank, rope, expanded
    kv_heads = _first(config, "num_key_value_heads", "n_head_kv", "num_kv_heads", "n_kv_heads")
    kv_heads = kv_heads or _first(config.get("attn_config"), "kv_n_heads")  # MPT
    is_new_falcon = model_type == "falcon" and config.get("new_decoder_architecture")
    if is_new_falcon:
        kv_heads = heads  # transformers repeats them before it caches them
    elif model_type in ("falcon", "gpt_bigcode"):
        kv_heads = 1 if config.get("multi_query", True) else heads
    kv_heads = kv_heads or (-(-key_rows // head_dim) if head_dim else 0) or heads
    if most_key_rows and head_dim:
        # Layers have heads of several sizes (Gemma 4) or several numbers of heads (MiMo-V2). config.json states them
        # under names of its family, or not at all. All layers are counted as the largest, which is never too little.
        kv_heads = max(kv_heads, -(-most_key_rows // head_dim))
    return heads, kv_heads, head_dim, head_dim, 2 * heads * head_dim


# Families whose experts compute all tokens, with a copy of each token for each expert (transformers 5.23,
# modeling_llama4.py).
_ALL_EXPERTS = frozenset({"llama4", "llama4_text"})
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")


def _dense(config: Mapping[str, Any], hidden: int) -> int:
    return _first(config, "intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size") or 4 * hidden


def _intermediate(config: Mapping[str, Any], hidden: int) -> int:
    """Return the width of the MLP for one token; with experts, of all that are active for it."""
    dense, active = _dense(config, hidden), _first(config, *_ACTIVE)
    if config.get("model_type") in _ALL_EXPERTS:
        return max(dense, _first(config, "num_local_experts") * (dense + hidden))
    expert = _first(config, "moe_intermediate_size") or dense
    shared = _first(config, "shared_expert_intermediate_size") or expert * _first(config, "n_shared_experts")
    return max(dense, active * expert + shared)


def _positions(config: Mapping[str, Any]) -> int:
    """Return the tokens that one sequence may have. Raises ValueError for more than any model has."""
    most = longest_sequence(config.get)
    if most > LARGEST_NUMBER:
        raise ValueError(f"{most} positions")
    return most


def at_most(*limits: int) -> int:
    """Return the least of the limits that are stated (not 0)."""
    return min(filter(None, limits), default=0)


def _layer_kinds(config: Mapping[str, Any]) -> list[str]:
    kinds = config.get("layer_types") or config.get("layers_block_type") or []
    if not kinds and isinstance(pattern := config.get("hybrid_override_pattern"), str):
        return [_LETTERS.get(letter, letter) for letter in pattern]
    return [str(kind) for kind in kinds] if isinstance(kinds, list) else []


def _state_layers(config: Mapping[str, Any], layers: int) -> int:
    """Return the number of layers with a state of constant size, most of them instead of keys and values."""
    if config.get("model_type") in _HYBRIDS:
        return layers
    if kinds := _layer_kinds(config):
        return sum(any(word in kind for word in _STATE_KINDS) for kind in kinds)
    if period := _first(config, "attn_layer_period"):  # Jamba
        offset = _first(config, "attn_layer_offset")
        return layers - sum(layer % period == offset for layer in range(layers))
    if isinstance(config.get("attn_layer_indices"), list):  # Bamba
        return layers - len(config["attn_layer_indices"])
    if interval := _first(config, "full_attention_interval"):  # Qwen3-Next
        return layers - layers // interval
    is_pure = "state_size" in config and not _first(config, "num_attention_heads")  # Mamba
    return layers if is_pure else 0


def _state_elements(config: Mapping[str, Any], hidden: int) -> int:
    """Return the elements of the state of one layer for one sequence: recurrence and short convolution."""
    kernel = _first(config, "conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim", "conv_L_cache") or 4
    if values := _first(config, "linear_num_value_heads"):
        key, value = _first(config, "linear_key_head_dim"), _first(config, "linear_value_head_dim")
        keys = _first(config, "linear_num_key_heads")
        return values * key * value + (2 * keys * key + values * value) * kernel
    if window := _first(config, "conv_L_cache"):  # nothing but a convolution
        return hidden * window
    state = _first(config, "state_size", "mamba_d_state", "ssm_state_size") or 16
    inner = _first(config, "mamba_intermediate", "mamba_d_ssm")
    inner = inner or _first(config, "mamba_num_heads") * _first(config, "mamba_head_dim")
    inner = inner or hidden * (_first(config, "expand", "mamba_expand") or 2)
    groups = _first(config, "n_groups", "mamba_n_groups") or 1
    return inner * state + (inner + 2 * groups * state) * kernel


def quantization(config: Mapping[str, Any]) -> tuple[str, int, int]:
    """Return the method, its bits, and the inputs that share a scale (gptq and awq; -1: all of a layer; 0: not
    stated). Without quantization: "", 0, 0."""
    stated = config.get("quantization_config")
    if not isinstance(stated, dict) or not stated:
        return "", 0, 0
    # Old files of bitsandbytes do not name the method.
    unnamed = "bitsandbytes" if stated.get("load_in_4bit") or stated.get("load_in_8bit") else "unknown"
    method = str(stated.get("quant_method") or unnamed)
    if method == "bitsandbytes":
        method = "bnb-4bit" if stated.get("load_in_4bit") else "bnb-8bit"
    bits = _first(stated, "bits", "w_bit") or _group_bits(stated.get("config_groups"))
    group = next((size for name in ("group_size", "q_group_size") if type(size := stated.get(name)) is int and size), 0)
    return method, bits or (4 if method in ("bnb-4bit", "gptq", "awq", "mxfp4") else 8), group


def _group_bits(groups: Any) -> int:
    """Return the fewest bits of any group of layers of compressed-tensors; 0: not stated."""
    stated = groups.values() if isinstance(groups, dict) else ()
    return at_most(*(_first(group.get("weights"), "num_bits") for group in stated if isinstance(group, dict)))


def _dtype(text: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the dtype that the config states, by the same rule as the worker; "" if it states none."""
    for source in (text, config):
        stated = source.get("dtype") or source.get("torch_dtype")
        if isinstance(stated, str):
            return stated.removeprefix("torch.")
    return ""
