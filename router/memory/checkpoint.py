"""The checkpoint reader: facts from config.json, from the headers of weight files and from files beside them.

It takes milliseconds, without torch and without reading weights: a safetensors file begins with 8 bytes of length and a
JSON table of its tensors (https://github.com/huggingface/safetensors, "Format"). A file whose size differs from its
table is an error here, before any model is evicted for it. Of a file that torch.save has written only the instructions
of its pickle are parsed (worker/protocol/pickled_weights.py).
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from router.config.presets import Preset
from router.memory.checkpoint_facts import (
    Checkpoint,
    Linears,
    Part,
    Tally,
    UnknownCheckpoint,
    at_most,
    from_config,
    is_tied,
    largest_image,
    longest_text,
    quantized_numbers,
)
from worker.protocol import pickled_weights, tekken
from worker.protocol.architectures import BEHIND, EXPERT, GENERATES, LAYER, SCALE, VISION, unstated_quantization
from worker.protocol.events import CAPABILITIES
from worker.protocol.model_config import apply_rope, merge, with_quantization
from worker.protocol.pickled_weights import PICKLED, PICKLED_INDEX, PICKLED_SUFFIXES
from worker.protocol.snapshot_files import (
    ADAPTER_FILES,
    INDEX,
    MAX_HEADER_BYTES,
    NO_GGUF,
    TORCH_DTYPES,
    WEIGHTS,
    is_below,
    quantization_beside,
    shard_names,
    single_weights_in,
)

_BITS = {"64": 64, "32": 32, "16": 16, "8": 8, "8_E4M3": 8, "8_E5M2": 8, "8_E8M0": 8, "OOL": 8}

_EMBEDDING = re.compile(r"(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|^shared)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
# Buffers that old versions stored. Current models make them or do not use them.
_BUFFER = re.compile(r"(\.attn\.(bias|masked_bias)|\.attention\.(bias|masked_bias)|rotary_emb\.inv_freq|position_ids)$")
_NO_PARAMETER = re.compile(r"(final_logits_bias|e_score_correction_bias)$")  # stored and loaded, but never trained

# Matrices that transformers does not quantize: embeddings, the head, routers and experts (which it keeps in tensors of
# their own), and what T5 computes in float32.
_NO_LINEAR = re.compile(
    r"(embed|(^|\.)wte\.|(^|\.)wpe\.|(^|\.)shared\.|relative_attention_bias|(^|\.)(lm_head|embed_out|score|classifier)\."
    r"|pooler\.|\.experts?\.|(^|\.)(gate|router)\.(\w+\.)?weight$|(^|\.)wo\.weight$)"
)
_TRANSPOSED = frozenset({"gpt2", "openai-gpt"})  # architectures whose linear layers store inputs first
_LAST = -1  # the place of tensors behind the layers, among numbers of layers

# Matrices of layers that each tensor-parallel rank has as a whole: routers, which choose or weigh experts, layers with
# states, and compressed queries and keys (worker/engines/transformers/load/tensor_parallel_plan.py).
_UNDIVIDED = re.compile(r"[._](gate|router)\.weight$|\.(mamba|conv1d|q_a_proj|kv_a_proj_with_mqa)\.")

_Tensor = tuple[str, tuple[int, ...], int]  # stored dtype, shape, bytes


def read(
    folder: Path,
    *,
    override: str = "",
    rope: Mapping[str, Any] | None = None,
    needs_weights: bool = True,
    task: str = "auto",
) -> Checkpoint:
    """Return the facts of the snapshot in `folder`. Blocks on the disk.

    `override`: JSON object that is merged into config.json; `rope` and `task`: keys of the preset. Without
    `needs_weights` (random weights), a folder without safetensors files counts the tensors that the config implies.
    Raises UnknownCheckpoint.
    """
    config = _config(folder, override, rope or {})
    files = _weight_files(folder, INDEX, WEIGHTS)
    is_pickled = not files and needs_weights
    if is_pickled:
        files = _weight_files(folder, PICKLED_INDEX, PICKLED)
    if not files and needs_weights:
        raise UnknownCheckpoint(_no_weights(folder))
    tensors: dict[str, _Tensor] = {}
    for file in files:
        tensors.update(pickled_header(file) if is_pickled else header(file))
    identity = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in files:
        identity.update(f"\n{file.name} {file.stat().st_size}".encode())
    try:
        facts = replace(
            _facts(config, tensors),
            identity=identity.hexdigest(),
            file_bytes=sum(file.stat().st_size for file in files),
            pickled=is_pickled,
            head_elements=_head_elements(folder),
            capabilities=capabilities(folder, config, task),
            vocab_type=_vocab_type(folder),
        )
        if "completion" not in facts.capabilities:
            texts = longest_text(
                read_json(folder / "sentence_bert_config.json"), read_json(folder / "tokenizer_config.json")
            )
            facts = replace(facts, max_positions=at_most(facts.max_positions, texts))
        if _sees(folder, config):
            nested = read_json(folder / "processor_config.json").get("image_processor")
            processor = {
                **read_json(folder / "preprocessor_config.json"),
                **(nested if isinstance(nested, dict) else {}),
            }
            tower, tokens, elements = largest_image(config, processor)
            facts = replace(facts, vision_elements=tower, picture_tokens=tokens, picture_elements=elements)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # any key may hold anything
        raise UnknownCheckpoint(f"{folder / 'config.json'} describes no model ({error}); fetch it again") from None
    return facts


def header(file: Path) -> dict[str, _Tensor]:
    """Return the tensors of one safetensors file by name. Raises UnknownCheckpoint if the file is damaged or
    incomplete."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
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


def pickled_header(file: Path) -> dict[str, _Tensor]:
    """Return the tensors of one file of torch.save by name. Raises UnknownCheckpoint if the file is damaged or holds
    anything else, such as code."""
    try:
        with file.open("rb") as opened:
            found = pickled_weights.tensors(opened)
    except OSError as error:
        raise UnknownCheckpoint(f"{file} cannot be read: {error.strerror or error}") from None
    except pickled_weights.UnusablePickle as error:
        raise UnknownCheckpoint(f"{file} {error}; take a revision of the model with safetensors weights") from None
    except pickled_weights.DamagedPickle as error:
        raise UnknownCheckpoint(f"{file} {error}; fetch it again") from None
    return {name: (tensor.dtype, tensor.shape, tensor.bytes) for name, tensor in found.items()}


def tensor_names(folder: Path) -> list[str]:
    """Return the names of the tensors in the safetensors files of a snapshot. Raises UnknownCheckpoint."""
    return [name for file in _weight_files(folder, INDEX, WEIGHTS) for name in header(file)]


def check_pickles(folder: Path) -> None:
    """Raise UnknownCheckpoint if the pickled weights of a snapshot cannot be converted."""
    for file in _weight_files(folder, PICKLED_INDEX, PICKLED):
        pickled_header(file)


def has_only_pickles(folder: str) -> bool:
    """Return whether a snapshot has pickled weights and no others. Reads directory entries only."""
    has = {name: os.path.isfile(os.path.join(folder, name)) for name in (INDEX, PICKLED, PICKLED_INDEX)}
    has_others = has[INDEX] or single_weights_in(Path(folder)).is_file()
    return not has_others and (has[PICKLED] or has[PICKLED_INDEX])


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
    return [name for name in CAPABILITIES if name in can]


def modalities(capabilities: Sequence[str]) -> dict[str, list[str]]:
    """Return the `architecture` object of GET /models for a model of these capabilities."""
    return {"input_modalities": ["text", "image"] if "vision" in capabilities else ["text"],
            "output_modalities": ["text"]}  # fmt: skip


# Files


def _tensor(entry: Mapping[str, Any]) -> _Tensor:
    dtype, shape = str(entry["dtype"]), tuple(map(int, entry["shape"]))
    begin, end = entry["data_offsets"]
    if not (type(begin) is type(end) is int and 0 <= begin <= end and min(shape, default=0) >= 0):
        raise ValueError(f"a tensor of shape {list(shape)} cannot lie from {begin} to {end}")
    bits = _BITS.get(dtype[1:])
    if bits is not None and math.prod(shape) * bits != (end - begin) * 8:
        raise ValueError(f"a tensor of shape {list(shape)} in {dtype} cannot have {end - begin} bytes")
    return TORCH_DTYPES.get(dtype, dtype.lower()), shape, end - begin


def json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`; empty if there is no file, or no object in it."""
    try:
        return read_json(file)
    except UnknownCheckpoint:
        return {}


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`; empty if there is no file. Raises UnknownCheckpoint for any other content."""
    content = _content(file, {})
    if not isinstance(content, dict):
        raise UnknownCheckpoint(f"{file} holds no JSON object; fetch it again")
    return content


def _content(file: Path, default: Any) -> Any:
    """Return the JSON value in `file`, or `default` if there is no file. Raises UnknownCheckpoint if it is damaged."""
    try:
        return json.loads(file.read_bytes())
    except FileNotFoundError:
        return default
    except OSError as error:
        raise UnknownCheckpoint(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UnknownCheckpoint(f"{file} is no valid JSON ({error}); fetch it again") from None


def _modules(folder: Path) -> list[dict[str, Any]]:
    """Return the modules of sentence-transformers: the model and layers behind it."""
    content = _content(folder / "modules.json", [])
    return [module for module in content if isinstance(module, dict)] if isinstance(content, list) else []


def _config(folder: Path, override: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    if not folder.is_dir():
        raise UnknownCheckpoint(f"{folder} is no folder; `model` names one with config.json and safetensors files")
    config = read_json(folder / "config.json")
    if not config:
        raise UnknownCheckpoint(f"{folder} has no config.json; `model` names a folder with one and safetensors files")
    config = with_quantization(config, quantization_beside(folder))
    try:
        config = merge(config, json.loads(override)) if override else config
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UnknownCheckpoint(f"config-override is no JSON object ({error})") from None
    try:
        return apply_rope(config, rope) if rope else config
    except ValueError as error:
        raise UnknownCheckpoint(f"{folder}: {error}") from None
    except (ArithmeticError, AttributeError, TypeError) as error:  # any member may hold anything
        raise UnknownCheckpoint(f"{folder / 'config.json'} describes no RoPE ({error}); fetch it again") from None


def _weight_files(folder: Path, index_name: str, single_name: str) -> list[Path]:
    """Return the weight files of the model in order, of the index or the single one; empty if there are none."""
    index = folder / index_name
    if index.is_file():
        if index.stat().st_size > MAX_HEADER_BYTES:
            raise UnknownCheckpoint(f"{index} is larger than {MAX_HEADER_BYTES} bytes; fetch it again")
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
    single = single_weights_in(folder) if single_name == WEIGHTS else folder / single_name
    return [single] if single.is_file() else []


def _no_weights(folder: Path) -> str:
    """Return the error message for a folder without readable weights."""
    pickled = sorted(file.name for suffix in PICKLED_SUFFIXES for file in folder.glob(f"*{suffix}"))
    if pickled:
        return (
            f"{folder} has no model.safetensors, only {pickled[0]}; of pickled weights only {PICKLED} and the parts of"
            f" {PICKLED_INDEX} are read; take a revision with safetensors weights"
        )
    if gguf := sorted(file.name for file in folder.glob("*.gguf")):
        return f"{folder} has only GGUF weights ({gguf[0]}): {NO_GGUF}; take safetensors ones"
    if (folder / ADAPTER_FILES[1]).is_file():
        return f"{folder} has an adapter only ({ADAPTER_FILES[1]}); serve its model, with this folder as lora"
    parts = sorted(file.name for file in folder.glob("*.safetensors"))
    if "model.safetensors" in parts:
        return f"{folder / 'model.safetensors'} is no file, or a link to none; fetch it again"
    if parts:
        return (
            f"{folder} has {parts[0]}, but no model.safetensors and no index that names parts; fetch it again, or take"
            " a revision that has them"
        )
    return f"{folder} has no model.safetensors; fetch the snapshot again, or set load-format = dummy"


def _head_elements(folder: Path) -> int:
    """Return the parameters of layers that sentence-transformers adds after the model, each in its own folder."""
    total = 0
    for module in _modules(folder):
        path = str(module.get("path") or "")
        if not path or not is_below(path):
            continue  # the worker reports it
        stored, pickled = folder / path / WEIGHTS, folder / path / PICKLED
        tensors = header(stored) if stored.is_file() else pickled_header(pickled) if pickled.is_file() else {}
        total += sum(math.prod(shape) for _, shape, _ in tensors.values())
    return total


def _template(folder: Path) -> str:
    """Return the chat template that the tokenizer of the worker finds; of several, all."""
    try:
        return (folder / "chat_template.jinja").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        pass
    for name in ("tokenizer_config.json", "chat_template.json"):
        stated = read_json(folder / name).get("chat_template")
        if isinstance(stated, list):
            stated = "\n".join(str(template.get("template")) for template in stated if isinstance(template, dict))
        if stated and isinstance(stated, str):
            return stated
    return tekken.chat_template(folder) if tekken.is_alone(folder) else ""


def _sees(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return whether the worker serves images: the family is verified, and the processor files are in the folder."""
    files = ("preprocessor_config.json", "processor_config.json")
    return config.get("model_type") in VISION and any((folder / name).is_file() for name in files)


def capabilities(folder: Path, config: Mapping[str, Any], task: str = "auto") -> tuple[str, ...]:
    """Return the capabilities of the model, which generates with the `task` generate, whatever its files say.

    `vision` does not need a chat template: the preset may state one.
    """
    if task != "generate" and (encodes := _encodes(folder, config)):
        return encodes
    template, vision = _template(folder), ("vision",) * _sees(folder, config)
    if not template:
        return ("completion", *vision)
    return ("chat", "completion", *("tools",) * ("tools" in template), *vision)


def _encodes(folder: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the capabilities of a model that by its files does not generate; else none. A cross-encoder has a head
    that scores pairs; an embedder has the layout of sentence-transformers or no language head, and it can rerank too.
    """
    classes = [str(name) for name in config.get("architectures") or ()]
    if any(name.endswith("ForSequenceClassification") for name in classes):
        pools = any(str(module.get("type", "")).endswith(".Pooling") for module in _modules(folder))
        return ("embedding", "rerank") if pools else ("rerank",)
    mapped = config.get("auto_map") or {}
    own = isinstance(mapped, dict) and any(name in mapped for name in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM"))
    generates = own or any(name.endswith(GENERATES) for name in classes)
    return ("embedding", "rerank") if (folder / "modules.json").is_file() or not generates else ()


def _vocab_type(folder: Path) -> int:
    """Return the kind of vocabulary as llama.cpp numbers it: 0 none, 1 byte pairs with a fall-back to bytes
    (SentencePiece), 2 byte pairs, 3 word pieces, 4 unigrams. Reads only the beginning of tokenizer.json."""
    try:
        with (folder / "tokenizer.json").open("rb") as file:
            text = file.read(4 << 20)
    except OSError:
        of_pairs = any((folder / name).is_file() for name in ("merges.txt", tekken.TEKKEN))
        return 1 if (folder / "tokenizer.model").is_file() else 2 if of_pairs else 0
    kind = re.search(rb'"model"\s*:\s*\{\s*"type"\s*:\s*"(\w+)"(?:[^{]*?"byte_fallback"\s*:\s*(true))?', text)
    if kind is None:
        return 0
    if kind[1] == b"BPE":
        return 1 if kind[2] else 2
    return {b"WordPiece": 3, b"Unigram": 4}.get(kind[1], 0)


# Tensors


def _facts(config: Mapping[str, Any], tensors: Mapping[str, _Tensor]) -> Checkpoint:
    """Return the facts of the config and of the tensors of all files."""
    embedding = next((shape for name, (_, shape, _) in tensors.items() if _EMBEDDING.search(name)), (0, 0))
    # Buffers are filtered by name, unless they have two dimensions: a matrix of such a name is a weight.
    loaded = {name: tensor for name, tensor in tensors.items() if not (_BUFFER.search(name) and len(tensor[1]) != 2)}
    facts = from_config(
        config,
        embedding=embedding,
        key_rows=_rows(tensors, ".k_proj.weight"),
        most_key_rows=_most_rows(tensors, ".k_proj.weight"),
        query_rows=_rows(tensors, ".q_proj.weight"),
        stored_dtype=next((dtype for dtype, _, _ in loaded.values() if "float" in dtype), "float32"),
    )
    if not facts.quantization and (fault := unstated_quantization(tensors)):
        raise UnknownCheckpoint(fault)
    scales: dict[str, _Tensor] = {}
    if facts.quantization:
        scales = {name: tensor for name, tensor in loaded.items() if SCALE.search(name)}
        loaded = {name: tensor for name, tensor in loaded.items() if name not in scales}
    tied = is_tied(config, has_head=any(map(_HEAD.search, tensors)))
    if tied and embedding != (0, 0):  # a stored copy of the embedding is not loaded
        loaded = {
            name: tensor for name, tensor in loaded.items() if not (_HEAD.search(name) and tensor[1] == embedding)
        }
    if not tensors:
        loaded = _implied(facts)
    transposed = facts.model_type in _TRANSPOSED
    by_layer, behind = _parts(loaded, scales, facts.layers, transposed=transposed)
    matrices = sum(
        math.prod(shape)
        for name, (_, shape, _) in loaded.items()
        if len(shape) > 1 and LAYER.search(name) and not _UNDIVIDED.search(name)
    )
    return replace(
        facts,
        tied=tied,
        tensors=_tallies(loaded.values()),
        params=sum(
            math.prod(shape) * (quantized_numbers(stored, facts.bits) if facts.quantization else 1)
            for name, (stored, shape, _) in loaded.items()
            if not _NO_PARAMETER.search(name)
        ),
        by_layer=by_layer,
        matrix_elements=matrices,
        named_layers=len({match[1] for match in map(LAYER.search, loaded) if match}),
        behind=behind,
        stacked=sum(math.prod(shape) for name, (_, shape, _) in tensors.items() if EXPERT.search(name)),
        largest=max((size for _, _, size in tensors.values()), default=0),
        scale_bytes=_bytes(scales),
        linears=_linears(loaded, transposed=transposed),
    )


def _rows(tensors: Mapping[str, _Tensor], ending: str) -> int:
    """Return the rows of the first tensor of the language model with this name ending; 0 without one."""
    for name, (_, shape, _) in tensors.items():
        if name.endswith(ending) and shape and not any(word in name for word in ("vision", "visual", "audio")):
            return shape[0]
    return 0


def _most_rows(tensors: Mapping[str, _Tensor], ending: str) -> int:
    """Return the most rows of a tensor with this name ending in layers that differ in it; 0 if all layers are alike."""
    stacks: dict[tuple[str, str], set[int]] = {}
    for name, (_, shape, _) in tensors.items():
        if name.endswith(ending) and shape and (layer := LAYER.search(name)):
            stacks.setdefault((name[: layer.start()], name[layer.end() :]), set()).add(shape[0])
    return max((max(rows) for rows in stacks.values() if len(rows) > 1), default=0)


def _tallies(tensors: Iterable[_Tensor]) -> dict[str, Tally]:
    totals: dict[str, Tally] = {}
    for dtype, shape, size in tensors:
        before = totals.get(dtype, Tally())
        totals[dtype] = Tally(before.elements + math.prod(shape), before.bytes + size)
    return totals


def _bytes(tensors: Mapping[str, _Tensor]) -> int:
    return sum(size for _, _, size in tensors.values())


def _parts(
    tensors: Mapping[str, _Tensor], scales: Mapping[str, _Tensor], layers: int, *, transposed: bool
) -> tuple[tuple[Part, ...], Part]:
    """Return the tensors of each layer (empty if the names do not show the layers) and of what stands behind them."""
    found: dict[int, tuple[dict[str, _Tensor], dict[str, _Tensor]]] = {}
    for kind, source in enumerate((tensors, scales)):
        for name, tensor in source.items():
            match = LAYER.search(name)
            if match or BEHIND.search(name):
                place = int(match[1]) if match else _LAST
                found.setdefault(place, ({}, {}))[kind][name] = tensor
    parts = {
        place: Part(_tallies(plain.values()), _bytes(beside), _linears(plain, transposed=transposed))
        for place, (plain, beside) in found.items()
    }
    behind = parts.pop(_LAST, Part())
    return tuple(parts[layer] for layer in range(layers)) if sorted(parts) == list(range(layers)) else (), behind


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


def _implied(facts: Checkpoint) -> dict[str, _Tensor]:
    """Return the matrices of each layer of a gated decoder of these sizes, one tensor for its vectors, and some for the
    rest with an untied head. Rounds up."""
    queries, keys, values = (
        facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim, facts.kv_heads * facts.value_dim
    )  # fmt: skip
    to_hidden = (queries, facts.intermediate)
    from_hidden = (queries, keys, values, facts.intermediate, facts.intermediate)
    shapes = [(facts.hidden, width) for width in to_hidden] + [(width, facts.hidden) for width in from_hidden]
    vectors = 4 * facts.hidden + queries + keys + values + 2 * facts.intermediate
    head = facts.vocab_size * facts.hidden
    parts: dict[str, tuple[int, ...]] = {"embed": (head,), "lm_head.weight": (head,), "norm": (2 * facts.hidden,)}
    for layer in range(facts.layers):
        parts[f"layers.{layer}.vectors"] = (vectors,)
        parts |= {f"layers.{layer}.{number}.weight": shape for number, shape in enumerate(shapes)}
    size = {"float32": 4, "float64": 8}.get(facts.dtype, 2)
    return {name: (facts.dtype, shape, math.prod(shape) * size) for name, shape in parts.items() if math.prod(shape)}
