"""Snapshots whose weights are pickled, as torch.save writes them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from worker.protocol.pickled_weights import PICKLED, PICKLED_INDEX
from worker.protocol.snapshot_files import WEIGHTS


def pickle_weights(
    snapshot: Path, *, shards: int = 1, legacy: bool = False, shared: dict[str, str] | None = None
) -> Path:
    """Replace the safetensors file of a snapshot by files of torch.save, and return the folder.

    `shared`: further names of stored tensors, by the new name; they share its data.
    """
    tensors = load_file(snapshot / WEIGHTS)
    tensors |= {name: tensors[other] for name, other in (shared or {}).items()}
    names = list(tensors)
    files = [f"pytorch_model-{number:05}-of-{shards:05}.bin" for number in range(1, shards + 1)]
    for number, file in enumerate(files if shards > 1 else [PICKLED]):
        part = {name: tensors[name] for name in names[number::shards]}
        torch.save(part, snapshot / file, _use_new_zipfile_serialization=not legacy)
    if shards > 1:
        index = {"weight_map": {name: files[place % shards] for place, name in enumerate(names)}}
        (snapshot / PICKLED_INDEX).write_text(json.dumps(index))
    (snapshot / WEIGHTS).unlink()
    return snapshot


class Command:
    """An object whose unpickling creates a file."""

    def __init__(self, trace: Path):
        self._trace = trace

    def __reduce__(self) -> Any:
        return open, (str(self._trace), "w")


def poison(snapshot: Path, trace: Path) -> Path:
    """Replace the weights of a snapshot by a pickle that creates `trace` when it is executed."""
    (snapshot / WEIGHTS).unlink(missing_ok=True)
    torch.save({"w": torch.zeros(1), "x": Command(trace)}, snapshot / PICKLED)
    return snapshot
