"""Weights that are read while a worker imports, and whether they are in memory yet."""

import json
import os
from pathlib import Path

import pytest

from worker.engines.transformers.load.page_cache import STRETCH, BackgroundReader, cached
from worker.protocol.snapshot_files import INDEX, WEIGHTS

MIB = 1 << 20


def cold(path: Path, size: int) -> Path:
    """A file of which nothing is in memory."""
    path.write_bytes(os.urandom(MIB) * (size // MIB) + b"x" * (size % MIB))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def here(path: Path) -> int:
    with path.open("rb") as file:
        return cached(file.fileno(), 0, path.stat().st_size)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """In two files by an index, with a second copy of the weights that is not loaded."""
    for name in ("a.safetensors", "b.safetensors", WEIGHTS):
        cold(tmp_path / name, STRETCH + 3 * MIB + 5)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}))
    if here(tmp_path / WEIGHTS):
        pytest.skip("this file system keeps all of a file in memory")
    return tmp_path


def test_only_files_that_will_be_loaded_are_read_ahead(snapshot: Path) -> None:
    reading = BackgroundReader(str(snapshot))
    reading.start()
    reading.finish()
    assert [here(snapshot / name) > STRETCH + 3 * MIB for name in ("a.safetensors", "b.safetensors")] == [True] * 2
    assert here(snapshot / WEIGHTS) == 0


def test_one_that_was_stopped_reads_no_more(snapshot: Path) -> None:
    reading = BackgroundReader(str(snapshot))
    reading.stop()
    reading.start()
    reading.finish()
    assert here(snapshot / "a.safetensors") == 0


def test_missing_files_are_left_to_the_load(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("{")
    reading = BackgroundReader(str(tmp_path / "nowhere"))
    reading.start()
    reading.finish()
    reading = BackgroundReader(str(tmp_path))
    reading.start()
    reading.stop()
