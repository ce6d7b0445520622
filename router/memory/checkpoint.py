"""The checkpoint reader: facts from config.json and from the headers of safetensors files.

It takes milliseconds, without torch and without reading weights: a safetensors file begins with 8 bytes of length and a
JSON table of its tensors (https://github.com/huggingface/safetensors, "Format"). A file whose size differs from its
table is an error here, before any model is evicted for it.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from router.config.presets import Preset
from router.memory.checkpoint_facts import Checkpoint, Linears, Tally, UnknownCheckpoint, packed_numbers
from worker.protocol.architectures import EXPERT, GENERATES, OFFSET_POSITIONS, PAGED, POSITION_KEYS, SCALE, VISION
from worker.protocol.snapshot_files import INDEX, WEIGHTS, is_below, merge_config, shard_names

MAX_HEADER = 100 << 20  # bytes; the format's own bound

MOST_LAYERS = 1 << 16
LARGEST_NUMBER = 1 << 48  # in a configuration; whatever states more is no model, and is not counted up to

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_BITS = {"64": 64, "32": 32, "16": 16, "8": 8, "8_E4M3": 8, "8_E5M2": 8, "8_E8M0": 8, "OOL": 8}

_EMBEDDING = re.compile(r"(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|^shared)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
# Stored by old versions; models of today make them again, or need them no more.
_BUFFER = re.compile(r"(\.attn\.(bias|masked_bias)|\.attention\.(bias|masked_bias)|rotary_emb\.inv_freq|position_ids)$")

_NO_PARAMETER = re.compile(r"(final_logits_bias|e_score_correction_bias)$")  # stored and loaded, but never trained

# Where a configuration leaves its tower unstated: as large as they come.
_TOWERS: Mapping[str, Mapping[str, int]] = {
    "gemma3": {"hidden_size": 1152, "intermediate_size": 4304, "image_size": 896, "patch_size": 14},
    "idefics3": {"hidden_size": 1152, "intermediate_size": 4304, "image_size": 364, "patch_size": 14},
    "llava": {"hidden_size": 1024, "intermediate_size": 4096, "image_size": 336, "patch_size": 14},
}  # fmt: skip

_CAPABILITIES = ("chat", "completion", "tools", "vision", "embedding", "rerank")

# Matrices that are none of a linear layer, or of one that transformers leaves alone when it quantises: embeddings,
# the head, routers and experts (which it keeps in tensors of their own), and what T5 wants in float32.
_NO_LINEAR = re.compile(
    r"(embed|(^|\.)wte\.|(^|\.)wpe\.|(^|\.)shared\.|relative_attention_bias|(^|\.)(lm_head|embed_out|score|classifier)\."
    r"|pooler\.|\.experts?\.|(^|\.)(gate|router)\.(\w+\.)?weight$|(^|\.)wo\.weight$)"
)

_TRANSPOSED = frozenset({"gpt2", "openai-gpt"})  # architectures that store their linear layers' inputs first

# The layer that a tensor belongs to. Those of a tower have such names, too: models with towers are not split.
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.([0-9]+)\.")
# What stands behind the layers: the head, the last norm.
_BEHIND = re.compile(r"(^|\.)(lm_head|embed_out|output|norm|norm_f|ln_f|final_layernorm|final_layer_norm)\.\w+$")

_BOTH = "hybrid"  # in the name of a kind of layer: it has a state beside keys and values
_STATE_KINDS = ("mamba", "linear_attention", "recurrent", "conv", "ssm", "rwkv", _BOTH)
# Architectures whose layers all are of that kind, whether the config states it or not.
_HYBRIDS = frozenset({"falcon_h1"})
_Tensor = tuple[str, tuple[int, ...], int]  # stored dtype, shape, bytes


def read(folder: Path, *, override: str = "", needs_weights: bool = True) -> Checkpoint:
    """Return the facts of the snapshot in `folder`. Blocks on the disk.

    `override`: JSON object that is merged into config.json. Without `needs_weights` (random weights), a folder without
    safetensors files counts the tensors that the config implies. Raises UnknownCheckpoint.
    """
    config = _config(folder, override)
    files = _weight_files(folder)
    if not files and needs_weights:
        raise UnknownCheckpoint(_no_weights(folder))
    tensors: dict[str, _Tensor] = {}
    for file in files:
        tensors.update(header(file))
    identity = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in files:
        identity.update(f"\n{file.name} {file.stat().st_size}".encode())
    size = sum(file.stat().st_size for file in files)
    try:
        return _assemble(folder, config, tensors, file_bytes=size, identity=identity.hexdigest())
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # any key may hold anything
        raise UnknownCheckpoint(f"{folder / 'config.json'} describes no model ({error}); fetch it again") from None


def header(file: Path) -> dict[str, _Tensor]:
    """Return the tensors of one safetensors file by name. Raises UnknownCheckpoint if the file is damaged or
    incomplete."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(MAX_HEADER, size - 8):
                raise UnknownCheckpoint(f"{file} is no complete safetensors file ({size} bytes); fetch it again")
            table = json.loads(opened.read(length))
        tensors = {name: _tensor(entry) for name, entry in table.items() if name != "__metadata__"}
        end = 8 + length + max((table[name]["data_offsets"][1] for name in tensors), default=0)
    except OSError as error:
        raise UnknownCheckpoint(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise UnknownCheckpoint(f"{file} has no valid safetensors header ({error}); fetch it again") from None
    if end != size:
        raise UnknownCheckpoint(f"{file} has {size} bytes, but its header promises {end}; fetch it again")
    return tensors


def meta(checkpoint: Checkpoint, n_ctx: int) -> dict[str, Any]:
    """Return the `meta` object of GET /models; `n_ctx`: tokens per request."""
    return {
        "vocab_type": checkpoint.vocab_type,
        "n_vocab": checkpoint.vocab_size,
        "n_ctx": n_ctx,
        "n_ctx_train": checkpoint.max_positions,
        "n_embd": checkpoint.hidden,
        "n_params": checkpoint.params,
        "size": sum(tally.bytes for tally in checkpoint.tensors.values()) + checkpoint.scale_bytes,
        "ftype": checkpoint.quantization or checkpoint.dtype,
    }


def offered(checkpoint: Checkpoint, preset: Preset) -> list[str]:
    """Return the capabilities of a worker of `preset`, by the names that workers use."""
    if preset.task == "embed":
        return ["embedding", "rerank"]
    if preset.task == "rerank":
        return ["rerank"]
    can = set(checkpoint.capabilities)
    if "completion" in can and preset.chat_template:
        can = (can - {"tools"}) | {"chat"} | ({"tools"} if "tools" in preset.chat_template else set())
    if "chat" not in can or not preset.limit_images:
        can -= {"vision"}
    return [name for name in _CAPABILITIES if name in can]


def modalities(capabilities: Sequence[str]) -> dict[str, list[str]]:
    """Return the `architecture` object of GET /models for a model of these capabilities."""
    return {"input_modalities": ["text", "image"] if "vision" in capabilities else ["text"],
            "output_modalities": ["text"]}  # fmt: skip


def _tensor(entry: Mapping[str, Any]) -> _Tensor:
    dtype, shape = str(entry["dtype"]), tuple(int(each) for each in entry["shape"])
    begin, end = entry["data_offsets"]
    if not (type(begin) is type(end) is int and 0 <= begin <= end and min(shape, default=0) >= 0):
        raise ValueError(f"a tensor of shape {list(shape)} cannot lie from {begin} to {end}")
    bits = _BITS.get(dtype[1:])
    if bits is not None and math.prod(shape) * bits != (end - begin) * 8:
        raise ValueError(f"a tensor of shape {list(shape)} in {dtype} cannot have {end - begin} bytes")
    return _DTYPES.get(dtype, dtype.lower()), shape, end - begin


def _json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`; empty if there is no file. Raises UnknownCheckpoint if it is not a JSON
    object."""
    try:
        body = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UnknownCheckpoint(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UnknownCheckpoint(f"{file} is no valid JSON ({error}); fetch it again") from None
    if not isinstance(body, dict):
        raise UnknownCheckpoint(f"{file} holds no JSON object; fetch it again")
    return body


def _json_list(file: Path) -> list[dict[str, Any]]:
    """Return the objects in the JSON array of `file`; none if there is no file. Raises UnknownCheckpoint if it is
    damaged."""
    try:
        body = json.loads(file.read_bytes())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UnknownCheckpoint(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UnknownCheckpoint(f"{file} is no valid JSON ({error}); fetch it again") from None
    return [each for each in body if isinstance(each, dict)] if isinstance(body, list) else []


def _config(folder: Path, override: str) -> dict[str, Any]:
    if not folder.is_dir():
        raise UnknownCheckpoint(f"{folder} is no folder; `model` names one with config.json and safetensors files")
    config = _json(folder / "config.json")
    if not config:
        raise UnknownCheckpoint(f"{folder} has no config.json; `model` names a folder with one and safetensors files")
    try:
        return merge_config(config, json.loads(override)) if override else config
    except (ValueError, AttributeError, RecursionError) as error:
        raise UnknownCheckpoint(f"config-override is no JSON object ({error})") from None


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the model in order; empty if there are none."""
    index = folder / INDEX
    if index.is_file():
        try:
            files = [folder / name for name in shard_names(index.read_bytes())]
        except OSError as error:
            raise UnknownCheckpoint(f"{index} cannot be read: {error.strerror or error}") from None
        except ValueError as error:
            raise UnknownCheckpoint(f"{index} {error}; fetch it again") from None
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise UnknownCheckpoint(f"{folder} lacks {', '.join(missing)} of its index; fetch the snapshot again")
        return files
    single = folder / WEIGHTS
    return [single] if single.is_file() else []


def _no_weights(folder: Path) -> str:
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickled:
        return f"{folder} has only pickled weights ({pickled[0]}), which are never opened; convert them to safetensors"
    if packed := sorted(file.name for file in folder.glob("*.gguf")):
        return f"{folder} has only GGUF weights ({packed[0]}), which this version does not load; take safetensors ones"
    parts = sorted(file.name for file in folder.glob("*.safetensors"))
    if "model.safetensors" in parts:
        return f"{folder / 'model.safetensors'} is no file, or a link to none; fetch it again"
    if parts:
        return f"{folder} has {parts[0]}, but no model.safetensors and no index that names parts; fetch it again"
    return f"{folder} has no model.safetensors; fetch the snapshot again, or set load-format = dummy"


def _assemble(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, _Tensor], *, file_bytes: int, identity: str
) -> Checkpoint:
    text = _text(config)
    model_type = str(config.get("model_type", ""))
    embedding = next((shape for name, (_, shape, _) in tensors.items() if _EMBEDDING.search(name)), (0, 0))
    hidden = _size(text, "hidden_size", "n_embd", "d_model", "dim") or embedding[-1]
    vocab = _size(text, "vocab_size") or embedding[0]
    heads = _size(text, "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", least=0)
    layers = _size(
        text, "num_decoder_layers", "decoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers"
    )
    if layers > MOST_LAYERS:
        raise ValueError(f"{layers} layers")
    heads, kv_heads, head_dim, value_dim, expanded = _heads(text, model_type, hidden, heads, tensors)
    states = min(max(_state_layers(text, layers), 0), layers)
    method, bits = _quantization(config)
    counted = {name: each for name, each in tensors.items() if not (_BUFFER.search(name) and len(each[1]) != 2)}
    scales = sum(size for name, (_, _, size) in counted.items() if method and SCALE.search(name))
    counted = {name: each for name, each in counted.items() if not (method and SCALE.search(name))}
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", not _has_head(tensors))))
    if tied and embedding != (0, 0):
        counted = {name: each for name, each in counted.items() if not (_HEAD.search(name) and each[1] == embedding)}
    dtype = _dtype(text, config, counted)
    width = _intermediate(text, hidden)
    queries, keys = heads * head_dim, kv_heads * (head_dim + value_dim)
    if not tensors:
        counted = _implied(dtype, layers, hidden, queries, keys, width, vocab)
    template = _template(folder)
    capabilities = _capabilities(folder, config, template)
    return Checkpoint(
        identity=identity,
        model_type=model_type,
        architectures=tuple(map(str, config.get("architectures") or ())),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        expanded=expanded,
        intermediate=width,
        vocab_size=vocab,
        max_positions=_shorter(
            _positions(text, model_type), 0 if "completion" in capabilities else _longest_text(folder)
        ),
        state_layers=states,
        state_elements=_state_elements(text, hidden) if states else 0,
        state_steps=_state_steps(text) if states else 1,
        hybrids=states if model_type in _HYBRIDS else min(sum(_BOTH in kind for kind in _layer_kinds(text)), states),
        aligned=model_type not in PAGED or bool(config.get("is_encoder_decoder")),
        cross_attention=bool(config.get("is_encoder_decoder")),
        tied=tied,
        dtype=dtype,
        tensors=_tallies(counted.values()),
        params=sum(
            math.prod(shape) * (packed_numbers(stored, bits) if method else 1)
            for name, (stored, shape, _) in counted.items()
            if not _NO_PARAMETER.search(name)
        ),
        by_layer=_by_layer(counted, layers),
        matrices=_matrices(counted) if tensors else layers * hidden * (2 * queries + keys + 3 * width),
        named_layers=len({match[1] for match in map(_LAYER.search, counted) if match}),
        behind=sum(math.prod(shape) for name, (_, shape, _) in counted.items() if _BEHIND.search(name)),
        file_bytes=file_bytes,
        head_elements=_head_elements(folder),
        stacked=sum(math.prod(shape) for name, (_, shape, _) in tensors.items() if EXPERT.search(name)),
        largest=max((size for _, _, size in tensors.values()), default=0),
        **_tower(folder, config),
        quantization=method,
        bits=bits,
        group=_group(config),
        scale_bytes=scales,
        linears=_linears(counted, transposed=model_type in _TRANSPOSED),
        capabilities=capabilities,
        chat_template=bool(template),
        vocab_type=_vocab_type(folder),
    )


# Reading config.json, whose keys differ by family.


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes the language model; multimodal configs nest it."""
    for key in ("text_config", "llm_config", "language_config", "thinker_config"):
        nested = config.get(key)
        if isinstance(nested, dict):
            return _text({**config, key: None, **nested})
    return config


def _first(config: Mapping[str, Any], *names: str) -> int:
    """Return the first of these keys with a positive number, or the largest of a list by layer; 0 if there is none.
    Raises ValueError if the number is too large for any model."""
    for name in names:
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
    config: Mapping[str, Any], model_type: str, hidden: int, heads: int, tensors: Mapping[str, _Tensor]
) -> tuple[int, int, int, int, int]:
    """Return query heads, key-value heads, elements of one cached key and value of a head, and elements of all keys and
    values of one token as attention reads them. If the config does not state them, they follow from the shapes of the
    projections."""
    keys, queries = _rows(tensors, ".k_proj.weight"), _rows(tensors, ".q_proj.weight")
    stated = _first(config, "head_dim", "attention_head_dim", "d_kv", "kv_channels")
    head_dim = stated or (hidden // heads if heads else keys)
    heads = heads or (queries // head_dim if head_dim else 0)
    rank, rope = _first(config, "kv_lora_rank"), _first(config, "qk_rope_head_dim")
    if rank and rope:  # multi-head latent attention (DeepSeek-V2, section 2.1): one compressed row, one rotary key
        value_dim = _first(config, "v_head_dim") or head_dim
        return heads, 1, rank, rope, heads * (_first(config, "qk_nope_head_dim") + rope + value_dim)
    nested = config.get("attn_config")  # MPT
    kv_heads = _first(config, "num_key_value_heads", "n_head_kv", "num_kv_heads", "n_kv_heads") or (
        _first(nested, "kv_n_heads") if isinstance(nested, dict) else 0
    )
    is_old_falcon = model_type == "falcon" and not config.get("new_decoder_architecture")
    if model_type == "falcon" and not is_old_falcon:
        kv_heads = heads  # transformers repeats them before it caches them
    if is_old_falcon or model_type == "gpt_bigcode":
        kv_heads = 1 if config.get("multi_query", True) else heads
    kv_heads = kv_heads or (-(-keys // head_dim) if head_dim else 0) or heads
    return heads, kv_heads, head_dim, head_dim, 2 * heads * head_dim


def _rows(tensors: Mapping[str, _Tensor], ending: str) -> int:
    """Return the rows of the first tensor of the language model with this name ending; 0 without one."""
    for name, (_, shape, _) in tensors.items():
        if name.endswith(ending) and shape and not any(word in name for word in ("vision", "visual", "audio")):
            return shape[0]
    return 0


def _intermediate(config: Mapping[str, Any], hidden: int) -> int:
    """Return the width of the MLP for one token; with experts, of all that are active for it."""
    dense = _first(config, "intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size") or 4 * hidden
    chosen = _first(config, "num_experts_per_tok", "num_experts_per_token", "top_k_experts")
    expert = _first(config, "moe_intermediate_size") or dense
    shared = _first(config, "shared_expert_intermediate_size") or expert * _first(config, "n_shared_experts")
    return max(dense, chosen * expert + shared)


def _positions(config: Mapping[str, Any], model_type: str) -> int:
    """Return the tokens that one sequence may have, by the same rule as the worker (load/architectures.py)."""
    most = _first(config, *POSITION_KEYS)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type")) in ("longrope", "su"):
        original = _first(rope, "original_max_position_embeddings") or _first(
            config, "original_max_position_embeddings"
        )
        return min(most or original, original or most)
    if most and model_type in OFFSET_POSITIONS:
        padding = config.get("pad_token_id")
        return most - 1 - (padding if isinstance(padding, int) else 1)
    return most


def _shorter(*limits: int) -> int:
    """Return the least of the limits that are stated (not 0)."""
    return min(filter(None, limits), default=0)


def _longest_text(folder: Path) -> int:
    """Return the tokens to which sentence-transformers truncates a text; 0 if the files do not state it."""
    stated = _first(_json(folder / "sentence_bert_config.json"), "max_seq_length")
    usual = _json(folder / "tokenizer_config.json").get("model_max_length")  # 10**30: there is none
    return stated or (int(usual) if isinstance(usual, (int, float)) and 0 < usual < 1 << 31 else 0)


def _head_elements(folder: Path) -> int:
    """Return the parameters of layers that sentence-transformers adds after the model, each in its own folder."""
    total = 0
    for module in _json_list(folder / "modules.json"):
        path = str(module.get("path") or "")
        file = folder / path / WEIGHTS
        if path and is_below(path) and file.is_file():  # the worker reports any other
            total += sum(math.prod(shape) for _, shape, _ in header(file).values())
    return total


def _layer_kinds(config: Mapping[str, Any]) -> list[str]:
    kinds = config.get("layer_types") or config.get("layers_block_type") or []
    return [str(kind) for kind in kinds] if isinstance(kinds, list) else []


def _state_layers(config: Mapping[str, Any], layers: int) -> int:
    """Return the number of layers with a state of constant size, most of them instead of keys and values."""
    if config.get("model_type") in _HYBRIDS:
        return layers
    if kinds := _layer_kinds(config):
        return sum(any(word in kind for word in _STATE_KINDS) for kind in kinds)
    if _first(config, "attn_layer_period"):  # Jamba
        period, offset = _first(config, "attn_layer_period"), _first(config, "attn_layer_offset")
        return layers - sum(layer % period == offset for layer in range(layers))
    if isinstance(config.get("attn_layer_indices"), list):  # Bamba
        return layers - len(config["attn_layer_indices"])
    if _first(config, "full_attention_interval"):  # Qwen3-Next
        return layers - layers // _first(config, "full_attention_interval")
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
    inner = _first(config, "mamba_intermediate", "mamba_d_ssm") or hidden * (
        _first(config, "expand", "mamba_expand") or 2
    )
    groups = _first(config, "n_groups", "mamba_n_groups") or 1
    return inner * state + (inner + 2 * groups * state) * kernel


def _state_steps(config: Mapping[str, Any]) -> int:
    """Return the tokens that share one state while a chunk is computed: a block if states have heads (Dao and Gu 2024,
    section 6); one in the scan of the first Mamba."""
    with_heads = _first(
        config, "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "num_heads", "conv_L_cache"
    )
    return _first(config, "mamba_chunk_size", "chunk_size") or 64 if with_heads else 1


def _quantization(config: Mapping[str, Any]) -> tuple[str, int]:
    """Return the stated method and its bits; "" and 0 without one."""
    said = config.get("quantization_config") or config.get("compression_config") or {}
    if not isinstance(said, dict) or not said:
        return "", 0
    by_bits = "bitsandbytes" if said.get("load_in_4bit") or said.get("load_in_8bit") else "unknown"  # as once written
    method = str(said.get("quant_method") or by_bits)
    if method == "bitsandbytes":
        method = "bnb-4bit" if said.get("load_in_4bit") else "bnb-8bit"
    groups = said.get("config_groups")
    found = [_group_bits(each) for each in groups.values()] if isinstance(groups, dict) else []
    usual = 4 if method in ("bnb-4bit", "gptq", "awq", "mxfp4") else 8
    return method, _first(said, "bits", "w_bit") or min(filter(None, found), default=usual)


def _group(config: Mapping[str, Any]) -> int:
    """Return the inputs that share a scale, for gptq and awq; -1: all of a layer; 0: not stated."""
    said = config.get("quantization_config")
    stated = [said.get(name) for name in ("group_size", "q_group_size")] if isinstance(said, dict) else []
    return next((each for each in stated if type(each) is int and each), 0)


def _group_bits(group: Any) -> int:
    """Return the bits of weights in one group of layers of compressed-tensors; 0: not stated."""
    weights = group.get("weights") if isinstance(group, dict) else None
    return _first(weights, "num_bits") if isinstance(weights, dict) else 0


def _dtype(text: Mapping[str, Any], config: Mapping[str, Any], tensors: Mapping[str, _Tensor]) -> str:
    """Return the dtype of the config, else of the first floating-point tensor, by the same rule as the worker."""
    for source in (text, config):
        said = source.get("dtype") or source.get("torch_dtype")
        if isinstance(said, str):
            return said.removeprefix("torch.")
    return next((dtype for dtype, _, _ in tensors.values() if "float" in dtype), "float32")


def _has_head(tensors: Mapping[str, _Tensor]) -> bool:
    return any(_HEAD.search(name) for name in tensors)


def _linears(tensors: Mapping[str, _Tensor], *, transposed: bool) -> Linears:
    shapes = [
        shape
        for name, (dtype, shape, _) in tensors.items()
        if len(shape) == 2 and "float" in dtype and name.endswith(".weight") and not _NO_LINEAR.search(name)
    ]
    sizes = [math.prod(shape) for shape in shapes]
    rows = sum(shape[-1 if transposed else 0] for shape in shapes)
    blocks = sum(-(-size // 64) for size in sizes)
    return Linears(len(shapes), sum(sizes), rows, blocks, sum(map(sum, shapes)))


def _by_layer(tensors: Mapping[str, _Tensor], layers: int) -> tuple[int, ...]:
    """Return the elements of each layer; empty if the tensor names do not show the layers."""
    found: dict[int, int] = {}
    for name, (_, shape, _) in tensors.items():
        match = _LAYER.search(name)
        if match:
            found[int(match[1])] = found.get(int(match[1]), 0) + math.prod(shape)
    return tuple(found[layer] for layer in range(layers)) if sorted(found) == list(range(layers)) else ()


def _matrices(tensors: Mapping[str, _Tensor]) -> int:
    """Return the elements of all matrices in layers."""
    return sum(math.prod(shape) for name, (_, shape, _) in tensors.items() if len(shape) > 1 and _LAYER.search(name))


def _tallies(tensors: Iterable[_Tensor]) -> dict[str, Tally]:
    totals: dict[str, Tally] = {}
    for dtype, shape, size in tensors:
        before = totals.get(dtype, Tally())
        totals[dtype] = Tally(before.elements + math.prod(shape), before.bytes + size)
    return totals


def _implied(
    dtype: str, layers: int, hidden: int, queries: int, kv: int, intermediate: int, vocab: int
) -> dict[str, _Tensor]:
    """Return one tensor for each layer and some for the rest, with as many elements as a gated decoder of these sizes
    with an untied head. Rounds up."""
    layer = hidden * (2 * queries + kv + 3 * intermediate) + 4 * hidden + queries + kv + 2 * intermediate
    size = {"float32": 4, "float64": 8}.get(dtype, 2)
    parts = {f"layers.{index}.implied": layer for index in range(layers)}
    parts |= {"embed": vocab * hidden, "lm_head.weight": vocab * hidden, "norm": 2 * hidden}
    return {name: (dtype, (elements,), elements * size) for name, elements in parts.items() if elements}


def _template(folder: Path) -> str:
    """Return the chat template that the tokenizer of the worker finds; of several, all."""
    try:
        return (folder / "chat_template.jinja").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        pass
    for name in ("tokenizer_config.json", "chat_template.json"):
        stated = _json(folder / name).get("chat_template")
        if isinstance(stated, list):
            stated = "\n".join(str(each.get("template")) for each in stated if isinstance(each, dict))
        if stated and isinstance(stated, str):
            return stated
    return ""


def _sees(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return whether the worker serves images: the family is verified, and the processor files are in the folder."""
    files = ("preprocessor_config.json", "processor_config.json")
    return config.get("model_type") in VISION and any((folder / name).is_file() for name in files)


def _tower(folder: Path, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the memory figures of the largest image, from the config of the vision tower.

    The tower processes each image at `image_size`, or each of the tiles of the Idefics3 processor and the whole image
    once more. Activations: eight times the width of a layer and two and a quarter times the width of its MLP, as traced
    on the shapes of CLIP and SigLIP, and a mask if there are tiles.
    """
    family = str(config.get("model_type", ""))
    if not _sees(folder, config):
        return {}
    stated = config.get("vision_config")
    vision: Mapping[str, Any] = {**_TOWERS[family], **(stated if isinstance(stated, dict) else {})}
    width, inner = _first(vision, "hidden_size"), _first(vision, "intermediate_size")
    side = _first(vision, "image_size")
    patches = (side // max(_first(vision, "patch_size"), 1)) ** 2 + 1
    parts, tokens = 1, patches
    if family == "gemma3":
        tokens = _first(config, "mm_tokens_per_image") or 256
    if family == "idefics3":
        said = {**_json(folder / "preprocessor_config.json"), **_image_processor(folder)}
        longest = _longest_edge(said.get("size")) or 4 * side
        each = _longest_edge(said.get("max_image_size")) or side
        parts = (-(-longest // each)) ** 2 + 1
        tokens = parts * -(-patches // max(_first(config, "scale_factor"), 1) ** 2)
    alive = patches * (8 * width + 9 * inner // 4) + (patches**2 if parts > 1 else 0)
    return {"tower": parts * alive, "picture_tokens": tokens, "picture_elements": parts * 4 * side**2}


def _image_processor(folder: Path) -> Mapping[str, Any]:
    nested = _json(folder / "processor_config.json").get("image_processor")
    return nested if isinstance(nested, dict) else {}


def _longest_edge(size: Any) -> int:
    return _first(size, "longest_edge") if isinstance(size, dict) else 0


def _capabilities(folder: Path, config: Mapping[str, Any], template: str) -> tuple[str, ...]:
    """Return the capabilities of the model. A cross-encoder has a head that scores pairs; an embedder has the layout of
    sentence-transformers or no language head, and it can rerank too.

    `vision` does not need a chat template: the preset may state one.
    """
    classes: Sequence[Any] = config.get("architectures") or ()
    if any(str(each).endswith("ForSequenceClassification") for each in classes):
        kinds = [str(module.get("type", "")) for module in _json_list(folder / "modules.json")]
        return ("embedding", "rerank") if any(kind.endswith(".Pooling") for kind in kinds) else ("rerank",)
    mapped = config.get("auto_map") or {}
    own = isinstance(mapped, dict) and any(name in mapped for name in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM"))
    generates = own or any(str(each).endswith(GENERATES) for each in classes)
    if (folder / "modules.json").is_file() or not generates:
        return ("embedding", "rerank")
    if not template:
        return ("completion", "vision") if _sees(folder, config) else ("completion",)
    tools, vision = ("tools",) * ("tools" in template), ("vision",) * _sees(folder, config)
    return ("chat", "completion", *tools, *vision)


def _vocab_type(folder: Path) -> int:
    """Return the kind of vocabulary as llama.cpp numbers it: 0 none, 1 byte pairs with a fall-back to bytes
    (SentencePiece), 2 byte pairs, 3 word pieces, 4 unigrams. Reads only the beginning of tokenizer.json."""
    try:
        with (folder / "tokenizer.json").open("rb") as file:
            text = file.read(4 << 20)
    except OSError:
        return 1 if (folder / "tokenizer.model").is_file() else 2 if (folder / "merges.txt").is_file() else 0
    kind = re.search(rb'"model"\s*:\s*\{\s*"type"\s*:\s*"(\w+)"(?:[^{]*?"byte_fallback"\s*:\s*(true))?', text)
    if kind is None:
        return 0
    if kind[1] == b"BPE":
        return 1 if kind[2] else 2
    return {b"WordPiece": 3, b"Unigram": 4}.get(kind[1], 0)
