"""Promises of converted snapshots, as the router finds them: only whole ones, only of what they were made of."""

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

MIXTURE = Checkpoint(stacked=1000)
"""Its experts are stored one by one."""


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """Files as in the hub's cache: links to contents."""
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
    """What a worker would have made; without a `size` nothing had to be converted."""
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


def test_a_whole_one_is_found(ours: ConvertedSnapshots, snapshot: Path) -> None:
    assert ours.find(str(snapshot)) is None
    assert not ours.is_settled(str(snapshot), MIXTURE)
    target = make(ours, snapshot)
    assert ours.find(str(snapshot)) == str(target)
    assert ours.is_settled(str(snapshot), MIXTURE)
    assert ours.is_one(str(target))
    assert not ours.is_one(str(snapshot))


def test_where_nothing_had_to_be_converted_the_original_is_loaded_and_nobody_asks_again(
    ours: ConvertedSnapshots, snapshot: Path
) -> None:
    make(ours, snapshot, size=0)
    assert ours.find(str(snapshot)) is None
    assert ours.is_settled(str(snapshot), MIXTURE)


def _rewrite(snapshot: Path) -> None:
    (snapshot / "config.json").write_text("other words")


def _replace(snapshot: Path) -> None:
    """The same size and time, another file: a repository's new revision on a machine without clocks."""
    blob = snapshot.parent / "blobs" / "model.safetensors"
    facts = blob.stat()
    (blob.parent / "new").write_text("Model.safetensors")
    os.utime(blob.parent / "new", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    os.replace(blob.parent / "new", blob)


def _add(snapshot: Path) -> None:
    (snapshot / "chat_template.jinja").write_text("{{ messages }}")


def _lose(snapshot: Path) -> None:
    (snapshot / "model.safetensors").unlink()


@pytest.mark.parametrize("change", [_rewrite, _replace, _add, _lose])
def test_one_whose_source_has_changed_is_not_found_and_swept(
    change: Callable[[Path], None], ours: ConvertedSnapshots, snapshot: Path
) -> None:
    target = make(ours, snapshot)
    change(snapshot)
    assert ours.find(str(snapshot)) is None
    assert ours.sweep() == 1
    assert not target.exists()


def _cut(target: Path) -> None:
    os.truncate(target / "model.safetensors", 63)


def _write_into(target: Path) -> None:
    facts = (target / "model.safetensors").stat()
    (target / "model.safetensors").write_bytes(b"x" * facts.st_size)
    os.utime(target / "model.safetensors", ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))


def _garble(target: Path) -> None:
    (target / MANIFEST).write_text('{"source": 1')


def _mistake(target: Path) -> None:
    (target / MANIFEST).write_text('{"source": "/x", "files": {"model.safetensors": 12}}')


def _empty(target: Path) -> None:
    (target / MANIFEST).unlink()


def _take(target: Path) -> None:
    (target / "model.safetensors").unlink()


@pytest.mark.parametrize("harm", [_cut, _write_into, _garble, _mistake, _empty, _take])
def test_a_torn_one_is_not_found_and_swept(
    harm: Callable[[Path], None], ours: ConvertedSnapshots, snapshot: Path
) -> None:
    target = make(ours, snapshot)
    harm(target)
    assert ours.find(str(snapshot)) is None
    assert not ours.is_settled(str(snapshot), MIXTURE), "it is made again"
    assert ours.sweep() == 1
    assert not target.exists()


def test_one_of_another_snapshot_is_never_found(ours: ConvertedSnapshots, snapshot: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("config.json")
    made = make(ours, other)
    target = ours.target(str(snapshot))
    assert target is not None
    os.rename(made, target)
    assert ours.sweep() == 1, "its manifest says what it is of"
    assert ours.find(str(snapshot)) is None


def test_other_versions_convert_anew(ours: ConvertedSnapshots, snapshot: Path, tmp_path: Path) -> None:
    make(ours, snapshot)
    later = ConvertedSnapshots(tmp_path / "converted", versions=("2",))
    assert later.find(str(snapshot)) is None
    assert later.sweep() == 1


def test_what_is_kept_and_its_size_is_told(ours: ConvertedSnapshots, snapshot: Path) -> None:
    target = make(ours, snapshot, size=1000)
    assert ours.sweep() == 0
    assert target.exists()
    assert ours.sizes == {str(snapshot): 1000}


def test_what_somebody_is_making_is_left_to_them_and_what_nobody_is_making_goes(
    ours: ConvertedSnapshots, tmp_path: Path
) -> None:
    begun, left = (tmp_path / "converted" / name for name in ("a.part", "b.part"))
    for folder in (begun, left):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text("half")
    holder = os.open(begun, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    assert ours.sweep() == 1
    os.close(holder)
    assert begun.exists()
    assert not left.exists()


def test_one_that_is_given_up_is_not_found_though_it_could_not_be_deleted(
    ours: ConvertedSnapshots, snapshot: Path
) -> None:
    target = make(ours, snapshot)
    text = (target / MANIFEST).read_bytes()
    ours.give_up(target)
    (target / MANIFEST).write_bytes(text)
    assert ours.find(str(snapshot)) is None


def test_one_that_is_given_up_is_neither_used_nor_made_again(ours: ConvertedSnapshots, snapshot: Path) -> None:
    target = make(ours, snapshot)
    ours.give_up(target)
    assert ours.find(str(snapshot)) is None
    assert ours.is_settled(str(snapshot), MIXTURE)
    assert ConvertedSnapshots(target.parent, versions=("1",)).find(str(snapshot)) is None, "nor by another router"


@pytest.mark.parametrize(
    ("keys", "prepare", "used"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"python": "/other/python"}, True, False),
        ({"trust_remote_code": True}, True, False),
    ],
)
def test_loads_use_it_where_our_libraries_do_the_loading(
    keys: dict[str, object], prepare: bool, used: bool, snapshot: Path, tmp_path: Path
) -> None:
    files = Snapshots(cache="", state=tmp_path, offline=True, prepare=prepare)
    target = make(files.conversions, snapshot)
    preset = Preset(id="m", path=str(snapshot), **keys)  # type: ignore[arg-type]
    assert files.loads_from(preset, str(snapshot)) == (str(target) if used else str(snapshot))


def test_a_snapshot_that_is_none_of_ours_is_not_forsaken(snapshot: Path, tmp_path: Path) -> None:
    files = Snapshots(cache="", state=tmp_path, offline=True)
    target = make(files.conversions, snapshot)
    assert not files.give_up_converted(str(snapshot))
    assert files.give_up_converted(str(target))
    assert files.loads_from(Preset(id="m", path=str(snapshot)), str(snapshot)) == str(snapshot)


@pytest.mark.parametrize(
    ("facts", "names", "settled"),
    [
        (MIXTURE, (), False),
        (Checkpoint(), (), True),
        (Checkpoint(stacked=1000, quantization="gptq"), (), True),
        (Checkpoint(), ("tokenizer.json", "merges.txt"), True),
        (Checkpoint(), ("vocab.json", "merges.txt"), False),
        (Checkpoint(), ("tokenizer.model",), False),
    ],
)
def test_no_worker_is_asked_about_what_is_seen_to_be_right_as_it_lies(
    facts: Checkpoint, names: tuple[str, ...], settled: bool, ours: ConvertedSnapshots, snapshot: Path
) -> None:
    for name in names:
        (snapshot / name).write_text("{}")
    assert ours.is_settled(str(snapshot), facts) == settled
