"""Converted snapshots: only complete ones of an unchanged source are found."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from router.config.presets import Preset
from router.memory.checkpoint_facts import Checkpoint
from router.store.converted import ConvertedSnapshots
from router.store.snapshots import Snapshots
from worker.protocol.snapshot_files import MANIFEST, ConversionManifest, encode_manifest

MIXTURE = Checkpoint(stacked=1000)  # the experts are stored one by one


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """Files as in the hub cache: links to blobs."""
    (tmp_path / "blobs").mkdir()
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "blobs" / name).write_text(name)
        (folder / name).symlink_to(tmp_path / "blobs" / name)
    return folder


@pytest.fixture
def ours(tmp_path: Path) -> ConvertedSnapshots:
    return ConvertedSnapshots(tmp_path / "converted", versions=("1",))


def make(ours: ConvertedSnapshots, snapshot: Path, *, size: int = 64) -> Path:
    """The result of a conversion by the worker. Without a `size` nothing had to be converted."""
    target = ours.target(str(snapshot))
    assert target is not None
    target.mkdir(parents=True)
    files = {}
    if size:
        (target / "model.safetensors").write_bytes(bytes(size))
        (target / "config.json").symlink_to(snapshot / "config.json")
        files["model.safetensors"] = [size, (target / "model.safetensors").stat().st_mtime_ns]
    manifest = ConversionManifest(source=str(snapshot), files=files)
    (target / MANIFEST).write_bytes(encode_manifest(manifest))
    return target


def test_a_complete_conversion_is_found_and_not_repeated(ours: ConvertedSnapshots, snapshot: Path) -> None:
    assert ours.find(str(snapshot)) is None
    assert ours.command(str(snapshot), MIXTURE) is not None
    target = make(ours, snapshot)
    assert ours.find(str(snapshot)) == str(target)
    assert ours.command(str(snapshot), MIXTURE) is None
    assert ours.is_one(str(target))
    assert not ours.is_one(str(snapshot))


def test_a_conversion_without_files_is_not_repeated_and_the_original_is_loaded(
    ours: ConvertedSnapshots, snapshot: Path
) -> None:
    make(ours, snapshot, size=0)
    assert ours.find(str(snapshot)) is None
    assert ours.command(str(snapshot), MIXTURE) is None


def _replace(snapshot: Path) -> None:
    """Another file of the same size and time, as a new revision on a machine without a clock has it."""
    blob = snapshot.parent / "blobs" / "model.safetensors"
    facts = blob.stat()
    (blob.parent / "new").write_text("Model.safetensors")
    os.utime(blob.parent / "new", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    os.replace(blob.parent / "new", blob)


@pytest.mark.parametrize(
    "change",
    [
        _replace,
        lambda snapshot: (snapshot / "config.json").write_text("other words"),
        lambda snapshot: (snapshot / "chat_template.jinja").write_text("{{ messages }}"),
        lambda snapshot: (snapshot / "model.safetensors").unlink(),
    ],
    ids=["replaced", "rewritten", "added", "deleted"],
)
def test_a_conversion_of_a_changed_source_is_not_found_and_is_swept(
    change: Callable[[Path], None], ours: ConvertedSnapshots, snapshot: Path
) -> None:
    target = make(ours, snapshot)
    change(snapshot)
    assert ours.find(str(snapshot)) is None
    assert ours.sweep() == 1
    assert not target.exists()


def _write_into(target: Path) -> None:
    facts = (target / "model.safetensors").stat()
    (target / "model.safetensors").write_bytes(b"x" * facts.st_size)
    os.utime(target / "model.safetensors", ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))


@pytest.mark.parametrize(
    "damage",
    [
        _write_into,
        lambda target: os.truncate(target / "model.safetensors", 63),
        lambda target: (target / MANIFEST).write_text('{"source": 1'),
        lambda target: (target / MANIFEST).write_text('{"source": "/x", "files": {"model.safetensors": 12}}'),
        lambda target: (target / MANIFEST).unlink(),
        lambda target: (target / "model.safetensors").unlink(),
    ],
    ids=["other bytes", "truncated", "manifest cut", "manifest of another form", "no manifest", "no weights"],
)
def test_a_damaged_conversion_is_not_found_and_is_swept_and_repeated(
    damage: Callable[[Path], None], ours: ConvertedSnapshots, snapshot: Path
) -> None:
    target = make(ours, snapshot)
    damage(target)
    assert ours.find(str(snapshot)) is None
    assert ours.sweep() == 1
    assert not target.exists()
    assert ours.command(str(snapshot), MIXTURE) is not None


def test_the_conversion_of_another_snapshot_is_never_found(
    ours: ConvertedSnapshots, snapshot: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("config.json")
    made = make(ours, other)
    target = ours.target(str(snapshot))
    assert target is not None
    os.rename(made, target)
    assert ours.sweep() == 1, "its manifest names another source"
    assert ours.find(str(snapshot)) is None


def test_other_library_versions_convert_anew(ours: ConvertedSnapshots, snapshot: Path, tmp_path: Path) -> None:
    make(ours, snapshot)
    later = ConvertedSnapshots(tmp_path / "converted", versions=("2",))
    assert later.find(str(snapshot)) is None
    assert later.sweep() == 1


def test_a_valid_conversion_is_kept_and_listed_with_its_size(ours: ConvertedSnapshots, snapshot: Path) -> None:
    target = make(ours, snapshot, size=1000)
    assert ours.sweep() == 0
    assert target.exists()
    assert ours.sizes == {str(snapshot): 1000}


def test_a_sweep_deletes_abandoned_parts_unless_a_conversion_runs(ours: ConvertedSnapshots, tmp_path: Path) -> None:
    part = tmp_path / "converted" / "a.part"  # a process has just made it
    part.mkdir(parents=True)
    holder = os.open(part.parent, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    assert ours.sweep() == 0
    assert part.exists()
    os.close(holder)
    assert ours.sweep() == 1
    assert not part.exists()


def test_a_conversion_that_was_given_up_is_neither_used_nor_repeated(ours: ConvertedSnapshots, snapshot: Path) -> None:
    target = make(ours, snapshot)
    text = (target / MANIFEST).read_bytes()
    ours.give_up(target)
    assert ours.find(str(snapshot)) is None
    assert ours.command(str(snapshot), MIXTURE) is None
    assert ConvertedSnapshots(target.parent, versions=("1",)).find(str(snapshot)) is None, "nor by another router"
    (target / MANIFEST).write_bytes(text)
    assert ours.find(str(snapshot)) is None, "although the manifest could not be deleted"


@pytest.mark.parametrize(
    ("keys", "prepare", "used"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"python": "/other/python"}, True, False),
        ({"trust_remote_code": True}, True, False),
    ],
)
def test_loads_use_the_conversion_if_the_libraries_of_the_router_load_it(
    keys: dict[str, object], prepare: bool, used: bool, snapshot: Path, tmp_path: Path
) -> None:
    files = Snapshots(cache="", state=tmp_path, offline=True, prepare=prepare)
    target = make(files.conversions, snapshot)
    preset = Preset(id="m", path=str(snapshot), **keys)  # type: ignore[arg-type]
    assert files.loads_from(preset, str(snapshot)) == (str(target) if used else str(snapshot))


def test_only_a_converted_snapshot_can_be_given_up(snapshot: Path, tmp_path: Path) -> None:
    files = Snapshots(cache="", state=tmp_path, offline=True)
    target = make(files.conversions, snapshot)
    assert not files.give_up_converted(str(snapshot))
    assert files.give_up_converted(str(target))
    assert files.loads_from(Preset(id="m", path=str(snapshot)), str(snapshot)) == str(snapshot)


@pytest.mark.parametrize(
    ("facts", "needed"),
    [
        (MIXTURE, True),
        (Checkpoint(), False),
        (Checkpoint(stacked=1000, quantization="gptq"), False),
        (Checkpoint(pickled=True), True),
    ],
)
def test_a_worker_is_started_only_if_something_needs_conversion(
    facts: Checkpoint, needed: bool, ours: ConvertedSnapshots, snapshot: Path
) -> None:
    assert (ours.command(str(snapshot), facts) is not None) == needed
