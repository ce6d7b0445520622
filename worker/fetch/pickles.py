"""The files of pickled weights of a snapshot, checked without torch and without executing them."""

from pathlib import Path

from worker.errors import StartError
from worker.protocol import pickled_weights
from worker.protocol.events import Exit
from worker.protocol.pickled_weights import PICKLED, PICKLED_INDEX
from worker.protocol.snapshot_files import INDEX, shard_names, single_weights_in


def pickle_files(snapshot: Path) -> list[Path]:
    """Return the files of pickled weights of a snapshot without safetensors files; empty if it has such.

    Raise StartError if one is missing, is damaged, or holds anything else than tensors.
    """
    if single_weights_in(snapshot).is_file() or (snapshot / INDEX).is_file():
        return []
    names = [PICKLED] if (snapshot / PICKLED).is_file() else []
    if not names and (snapshot / PICKLED_INDEX).is_file():
        try:
            names = shard_names((snapshot / PICKLED_INDEX).read_bytes())
        except ValueError as error:
            raise StartError(f"{snapshot / PICKLED_INDEX} {error}; download it again", Exit.DAMAGED) from error
    files = [snapshot / name for name in names]
    for path in files:
        if not path.is_file():
            raise StartError(f"{path} is missing; download it again", Exit.DAMAGED)
        if fault := pickle_fault(path):
            raise StartError(f"{fault}; delete it and download it again", Exit.DAMAGED)
    return files


def pickle_fault(path: Path) -> str:
    """Return the defect of a file of pickled weights; empty if it is complete. Raise StartError if it needs more than
    tensors, so that loading it could run code."""
    try:
        with path.open("rb") as file:
            pickled_weights.tensors(file)
    except pickled_weights.DamagedPickle as error:
        return f"{path} {error}"
    except pickled_weights.UnusablePickle as error:
        raise StartError(f"{path} {error}; take a revision of the model with safetensors weights") from None
    return ""
