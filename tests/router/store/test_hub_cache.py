"""Deleting from the hub cache: the named snapshot is deleted, files that other models need are kept."""

import fcntl
from pathlib import Path

import pytest

from router.store.hub_cache import remove

OLD, NEW = "a" * 40, "b" * 40


def cached(cache: Path, commit: str, ref: str = "", **files: str) -> Path:
    """A snapshot of org/name; contents are blobs of their own names. Returns the repository's folder."""
    folder = cache / "models--org--name"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir(exist_ok=True)
    for name, blob in {"config": "config", "model": "weights", **files}.items():
        (folder / "blobs" / blob).write_text("{}")
        suffix = ".safetensors" if name == "model" else ".json"
        (snapshot / f"{name}{suffix}").symlink_to(Path("../../blobs") / blob)
    if ref:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return folder


def left(folder: Path) -> tuple[set[str], set[str]]:
    snapshots, blobs = ({each.name for each in (folder / part).iterdir()} for part in ("snapshots", "blobs"))
    return snapshots, blobs


def test_the_only_revision_leaves_nothing(tmp_path: Path) -> None:
    cached(tmp_path, OLD, "main")
    (tmp_path / ".locks" / "models--org--name").mkdir(parents=True)
    (tmp_path / "models--org--other").mkdir()
    (tmp_path / "models--org--name" / "refs" / ".main.7.8").write_text(OLD)  # left by a download that was killed
    remove(str(tmp_path), "org/name", "main")
    assert {path.name for path in tmp_path.iterdir()} == {".locks", "models--org--other"}
    assert not list((tmp_path / ".locks").iterdir())
    remove(str(tmp_path), "org/name", "main")  # nothing is there: nothing to do


def test_contents_that_another_revision_links_to_stay(tmp_path: Path) -> None:
    cached(tmp_path, OLD, "main", model="old")
    folder = cached(tmp_path, NEW, "v2", model="new")
    remove(str(tmp_path), "org/name", "main")
    assert left(folder) == ({NEW}, {"config", "new"})


def test_a_commit_with_two_names_stays_for_the_other(tmp_path: Path) -> None:
    folder = cached(tmp_path, OLD, "main")
    (folder / "refs" / "v1").write_text(OLD)
    remove(str(tmp_path), "org/name", "v1")
    assert left(folder) == ({OLD}, {"config", "weights"})
    assert [path.name for path in (folder / "refs").iterdir()] == ["main"]


def test_a_commit_that_another_model_uses_is_kept(tmp_path: Path) -> None:
    cached(tmp_path, OLD, model="old")
    folder = cached(tmp_path, NEW, "main", model="new")
    remove(str(tmp_path), "org/name", "main", keep={OLD})
    assert left(folder) == ({OLD}, {"config", "old"})


@pytest.mark.parametrize("alone", [True, False])
def test_files_of_a_running_download_are_kept(tmp_path: Path, alone: bool) -> None:
    folder = cached(tmp_path, OLD, "main")
    cached(tmp_path, NEW)
    (folder / "snapshots" / NEW / "model.safetensors").unlink()  # on its way
    mine, theirs = folder / "blobs" / "mine.incomplete", folder / "blobs" / "theirs.incomplete"
    mine.touch()
    with theirs.open("w") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        remove(str(tmp_path), "org/name", "main", alone=alone)
        assert left(folder) == ({NEW}, {"config", "theirs.incomplete"})
    remove(str(tmp_path), "org/name", "gone")
    assert not folder.exists()


def test_an_incomplete_snapshot_without_a_download_is_deleted_with_the_last_model(tmp_path: Path) -> None:
    folder = cached(tmp_path, OLD, "main")
    cached(tmp_path, NEW)
    (folder / "snapshots" / NEW / "model.safetensors").unlink()
    remove(str(tmp_path), "org/name", "gone", alone=False)
    assert left(folder)[0] == {OLD, NEW}
    remove(str(tmp_path), "org/name", "gone")
    assert left(folder)[0] == {OLD}


def test_a_partial_file_that_is_completed_meanwhile_does_not_end_the_deletion(tmp_path: Path) -> None:
    cached(tmp_path, OLD, "main", model="old")
    folder = cached(tmp_path, NEW, "v2", model="new")
    renamed = folder / "blobs" / "renamed.incomplete"
    renamed.symlink_to("nothing")  # listed, and cannot be opened
    remove(str(tmp_path), "org/name", "main")
    assert left(folder) == ({NEW}, {"config", "new", "renamed.incomplete"})


def test_a_partial_file_that_cannot_be_opened_is_kept(tmp_path: Path) -> None:
    """As that of another user; a folder cannot be opened by any user."""
    folder = cached(tmp_path, OLD, "main")
    (folder / "blobs" / "theirs.incomplete").mkdir()
    remove(str(tmp_path), "org/name", "main")
    assert left(folder) == (set(), {"theirs.incomplete"})


def test_a_cache_without_links_has_no_folder_of_contents(tmp_path: Path) -> None:
    for commit in (OLD, NEW):
        (tmp_path / "models--org--name" / "snapshots" / commit).mkdir(parents=True)
    remove(str(tmp_path), "org/name", OLD, alone=False)
    assert [path.name for path in (tmp_path / "models--org--name" / "snapshots").iterdir()] == [NEW]


def test_nothing_outside_the_cache_is_touched(tmp_path: Path) -> None:
    elsewhere = cached(tmp_path / "elsewhere", OLD, "main")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "models--org--name").symlink_to(elsewhere)
    with pytest.raises(ValueError, match="out of the cache"):
        remove(str(tmp_path / "cache"), "org/name", "main")
    folder = cached(tmp_path / "cache2", OLD, "main")
    (tmp_path / "cache2" / "precious").touch()
    with pytest.raises(ValueError, match="no name"):
        remove(str(tmp_path / "cache2"), "org/name", "../../precious")
    assert (tmp_path / "cache2" / "precious").exists()
    assert left(folder)[0] == left(elsewhere)[0] == {OLD}
