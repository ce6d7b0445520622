"""Names and small files of a snapshot that both sides read: the index of weights, adapters, the conversion manifest."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""A model's weights in one file; where they lie in several, what names these."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""What PEFT writes of an adapter, and all that is read of one."""


def merged(config: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """What `config_override` makes of config.json: objects are merged key by key, anything else is replaced."""
    found = dict(config)
    for key, value in override.items():
        before = found.get(key)
        found[key] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return found


def shard_names(index: bytes) -> list[str]:
    """The weight files that the text of an index (model.safetensors.index.json) names, in order: all lie beside it.

    Raises ValueError with the rest of a sentence about the index; a name that leads elsewhere is one, so that nobody
    opens what it leads to.
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
    """Whether a path that a model's files, or a hub, name lies below the model's own folder."""
    return name.isprintable() and not name.startswith("/") and ".." not in name.split("/")


# The manifest that `convert` writes into its target.

MANIFEST = "converted.json"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a converted snapshot is of. One without files says that nothing had to be converted."""

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
