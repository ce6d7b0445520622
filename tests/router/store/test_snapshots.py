"""Locations of the files of models."""

import os
from pathlib import Path
from typing import Any

import pytest

from router.config.presets import Preset
from router.errors import LoadFailed
from router.fleet import worker_argv
from router.memory.checkpoint_facts import UnknownCheckpoint
from router.store.snapshots import Snapshots
from tests import tiny
from worker.protocol.argv import Estimate


def snapshots(folder: Path, *, offline: bool = False) -> Snapshots:
    return Snapshots(cache=str(folder / "hub"), state=folder / "state", offline=offline)


def a_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_a_look_tells_whether_anything_has_changed(tmp_path: Path) -> None:
    folder = a_model(tmp_path / "model")
    files, preset = snapshots(tmp_path), Preset(id="m", path=str(folder))
    looks = [files.fingerprint(preset)]
    assert files.fingerprint(preset) == looks[0]
    (folder / "config.json").write_text('{"model_type": "llama"}')
    looks.append(files.fingerprint(preset))
    (folder / "tokenizer.json").write_text("{}")
    looks.append(files.fingerprint(preset))
    os.utime(folder / "model.safetensors", ns=(1, 1))
    looks.append(files.fingerprint(preset))
    assert all(looks[one] != looks[other] for one in range(4) for other in range(one))


def test_a_look_follows_links_as_they_stand_in_the_hub_cache(tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    blob.write_text("{}")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "config.json").symlink_to(blob)
    (folder / "dangling").symlink_to(tmp_path / "nothing")
    files, preset = snapshots(tmp_path), Preset(id="m", path=str(folder))
    before = files.fingerprint(preset)
    blob.write_text("{ }")
    assert files.fingerprint(preset) != before


def test_a_missing_snapshot_looks_the_same_until_it_exists(tmp_path: Path) -> None:
    files, preset = snapshots(tmp_path), Preset(id="m", path=str(tmp_path / "model"))
    before = files.fingerprint(preset)
    assert files.fingerprint(preset) == before
    a_model(tmp_path / "model")
    assert files.fingerprint(preset) != before
    missing = Preset(id="r", repo="org/repo")
    assert files.fingerprint(missing) is None
    commit = a_model(tmp_path / "hub/models--org--repo/snapshots/abc")
    (tmp_path / "hub/models--org--repo/refs").mkdir()
    (tmp_path / "hub/models--org--repo/refs/main").write_text("abc")
    assert files.find(missing) == str(commit)
    assert files.fingerprint(missing) is not None


def test_a_demo_model_is_found_once_it_was_made(tmp_path: Path) -> None:
    files, preset = snapshots(tmp_path), Preset(id="d", demo="a")
    assert files.find(preset) is None
    files.fetched(preset, str(a_model(tmp_path / "made")))
    assert files.find(preset) == str(tmp_path / "made")


def test_offline_nothing_is_fetched(tmp_path: Path) -> None:
    preset = Preset(id="m", repo="org/repo", revision="main")
    with pytest.raises(LoadFailed, match="--offline"):
        snapshots(tmp_path, offline=True).download(preset)
    assert snapshots(tmp_path).download(preset).repo == "org/repo"
    assert snapshots(tmp_path, offline=True).download(Preset(id="d", demo="a")).demo == "a"


def test_facts_have_those_of_the_draft_model_and_another_identity(tmp_path: Path) -> None:
    target, draft = (
        tiny.make("llama", tmp_path / name, num_hidden_layers=layers) for name, layers in (("m", 2), ("d", 1))
    )
    files = snapshots(tmp_path)
    alone = files.facts(target, Preset(id="m", path=str(target)))
    drafting = Preset(id="m", path=str(target), model_draft=str(draft))
    both = files.facts(target, drafting)
    assert both.draft is not None
    assert (both.draft.layers, both.draft_snapshot) == (1, str(draft))
    assert both.identity != alone.identity
    argv = worker_argv.model_options(Estimate, drafting, both, str(target), on_host=True)
    assert (argv.draft_snapshot, argv.draft_max, argv.ngram_size) == (str(draft), 16, 0)
    off = Preset(id="m", path=str(target), model_draft=str(draft), draft_max=0)
    assert files.facts(target, off) == alone


def test_a_worker_without_parallel_gets_more_sequences_than_full_contexts(tmp_path: Path) -> None:
    paged, aligned = (tiny.make(family, tmp_path / family) for family in ("llama", "mamba"))
    files = snapshots(tmp_path)

    def asked(folder: Path, **keys: Any) -> tuple[int, int, int]:
        preset = Preset(id="m", path=str(folder), ctx_size=96, **keys)
        argv = worker_argv.model_options(Estimate, preset, files.facts(folder, preset), str(folder), on_host=True)
        return argv.parallel, argv.contexts, argv.kv_tokens

    assert asked(paged) == (16, 4, 0)
    assert asked(paged, kv_tokens=200) == (16, 4, 200)
    assert asked(paged, parallel=2) == (2, 2, 0)
    assert asked(aligned) == (4, 4, 0)


def test_a_draft_model_of_the_hub_is_downloaded_with_its_target(tmp_path: Path) -> None:
    preset = Preset(id="m", path=str(tmp_path / "m"), model_draft="hub:org/draft:v1")
    command = snapshots(tmp_path).missing_draft(preset)
    assert command is not None
    assert (command.repo, command.revision) == ("org/draft", "v1")
    with pytest.raises(LoadFailed, match="the draft model org/draft is not in the cache, and --offline"):
        snapshots(tmp_path, offline=True).missing_draft(preset)
    tiny.make("llama", tmp_path / "m")
    with pytest.raises(UnknownCheckpoint, match="router download m"):
        snapshots(tmp_path).facts(tmp_path / "m", preset)
