"""Names and small files of a snapshot that both sides read: the index of weights, adapters, the conversion manifest."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The file of a model's weights, and the index if there are several files."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""The files that PEFT writes for an adapter; no others are read."""


def merged(config: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Apply `config_override` to config.json: objects are merged key by key, all other values are replaced."""
    found = dict(config)
    for key, value in override.items():
        before = found.get(key)
        found[key] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return found


def shard_names(index: bytes) -> list[str]:
    """The weight files that an index (the text of model.safetensors.index.json) names, in order. All lie in its folder.

    Raises ValueError with the rest of a sentence about the index, also for a name that leads to another folder.
    """
    try:
        names = sorted({str(name) for name in json.loads(index)["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"is no index of safetensors files ({type(error).__name__})") from None
    if not names:
        raise ValueError("names no safetensors files")
    if strange := [name for name in names if not name or "/" in name or not is_below(name)]:
        raise ValueError(f"names {strange[0]!r}, which is no file beside it")
    return names


def is_below(name: str) -> bool:
    """True if a path from a model's files or from a hub lies below the model's folder."""
    return name.isprintable() and not name.startswith("/") and ".." not in name.split("/")


# The manifest that `convert` writes into its target.

MANIFEST = "converted.json"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The origin of a converted snapshot. Without files: nothing had to be converted."""

    source: str
    """Folder of the snapshot."""
    files: dict[str, list[int]]
    """Size in bytes and time of the last change in nanoseconds of each file that was written, by name; all others are
    links."""


def encode_manifest(manifest: Manifest) -> bytes:
    return json.dumps(dataclasses.asdict(manifest), indent=1).encode() + b"\n"


def decode_manifest(text: bytes) -> Manifest:
    """Raises ValueError, TypeError, KeyError or AttributeError if it is none."""
    body = json.loads(text)
    files: dict[str, list[int]] = {name: [int(size), int(changed)] for name, (size, changed) in body["files"].items()}
    return Manifest(source=str(body["source"]), files=files)
