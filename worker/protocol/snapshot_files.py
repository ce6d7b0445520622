"""Names and small files of a snapshot that both sides read: weight index, adapters, conversion manifest."""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The file of a model's weights, and the index if there are several files.
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_OF_AUTOGPTQ = re.compile(r"gptq_model-\w+-+\w+\.safetensors")  # the name that old versions give to the file of weights
# Files of AutoGPTQ and AutoAWQ with the quantization, where config.json does not state it.
QUANTIZE_CONFIGS = ("quantize_config.json", "quant_config.json")
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file; the limit of the reference implementation
# torch's names of the types in the header of a safetensors file.
TORCH_DTYPES: Mapping[str, str] = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
# The files that PEFT writes for an adapter; no others are read.
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

# The reason in all messages about GGUF files. Each message adds its own remedy.
NO_GGUF = "GGUF needs the llama-server engine, which this version does not offer"

# The folder of the model in snapshots of old versions of sentence-transformers, and the message about it.
OLD_LAYOUT = "0_Transformer"
IN_OLD_LAYOUT = (
    f"the model is in {OLD_LAYOUT}; a newer sentence-transformers writes it beside modules.json when it saves the model"
    " again"
)

# Suffix of an unfinished folder of a conversion. Its process holds a lock (flock) on the folder of all conversions.
PART = ".part"


def single_weights(names: Iterable[str]) -> str:
    """The file of the weights among the files of a snapshot without an index; "model.safetensors" if there is none."""
    found = set(names)
    others = sorted(filter(_OF_AUTOGPTQ.fullmatch, found))
    return others[0] if others and WEIGHTS not in found else WEIGHTS


def single_weights_in(folder: Path) -> Path:
    """As `single_weights`, of the files in a folder."""
    return folder / single_weights(path.name for path in folder.glob("*.safetensors"))


def quantization_beside(folder: Path) -> dict[str, Any]:
    """The quantization in files beside config.json. Empty without such a file, and for one that was left beside weights
    that are not quantized."""
    for name in QUANTIZE_CONFIGS:
        try:
            stated = json.loads((folder / name).read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(stated, dict) and _is_packed(folder):
            return stated
    return {}


def _is_packed(folder: Path) -> bool:
    """True if the weights have the tensors of GPTQ and AWQ, or none are here in this format."""
    try:
        if (folder / INDEX).is_file():
            return b'.qweight"' in (folder / INDEX).read_bytes()
        with single_weights_in(folder).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return b'.qweight"' in file.read(min(length, MAX_HEADER_BYTES))
    except OSError:
        return True


def shard_names(index: bytes) -> list[str]:
    """Return the weight files in an index (the text of model.safetensors.index.json, or of the index of pickled
    weights), sorted. All are in its folder.

    Raises ValueError whose message continues a sentence about the index, also for a path to another folder.
    """
    try:
        names = sorted({str(name) for name in json.loads(index)["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"is not an index of weight files ({type(error).__name__})") from None
    if not names:
        raise ValueError("names no weight files")
    if strange := [name for name in names if not name or "/" in name or not is_below(name)]:
        raise ValueError(f"names {strange[0]!r}, which is not a file in the same folder")
    return names


def is_of_tokenizer(name: str) -> bool:
    """True if a file may belong to a tokenizer, by its name."""
    parts = ("token", "vocab", "merges", "spiece", "sentencepiece", "tekken", ".model")
    return any(part in name.lower() for part in parts)


def is_below(name: str) -> bool:
    """True if a path from a model's files or from a hub stays below the model's folder."""
    return name.isprintable() and not name.startswith("/") and ".." not in name.split("/")


# The manifest that `convert` writes into its target.

MANIFEST = "converted.json"


@dataclass(frozen=True, kw_only=True)
class ConversionManifest:
    """The origin of a converted snapshot. Without files: no conversion was necessary."""

    source: str  # folder of the original snapshot
    # Size in bytes and modification time in nanoseconds of each written file, by name. All other files are links.
    files: dict[str, list[int]]


def encode_manifest(manifest: ConversionManifest) -> bytes:
    return json.dumps(dataclasses.asdict(manifest), indent=1).encode() + b"\n"


def decode_manifest(text: bytes) -> ConversionManifest:
    """Parse a manifest. Raises ValueError, TypeError, KeyError or AttributeError for any other text."""
    body = json.loads(text)
    files: dict[str, list[int]] = {name: [int(size), int(changed)] for name, (size, changed) in body["files"].items()}
    return ConversionManifest(source=str(body["source"]), files=files)
