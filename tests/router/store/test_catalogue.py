"""Models on disk: the hub cache, the models folder, the preset file."""

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from router.config.model_source import NOT_UTF8
from router.config.resolve import LoadedPresets
from router.config.settings import Settings, parse
from router.errors import ConfigError
from router.store.catalogue import (
    LocalDisk,
    demo_preset,
    find_preset,
    find_snapshot,
    load_catalogue,
    missing,
    read_keys,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40


def snapshot(folder: Path, *files: str) -> Path:
    """A folder with config.json and these files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", *(files or ("model.safetensors",))):
        (folder / name).write_text("{}")
    return folder


def cached(cache: Path, repo: str, commit: str = COMMIT, ref: str = "main") -> Path:
    """A repository as the hub library keeps it: files are links to blobs. Returns the snapshot."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    real = snapshot(folder / "blobs")
    links = folder / "snapshots" / commit
    links.mkdir(parents=True)
    for path in real.iterdir():
        (links / path.name).symlink_to(Path("../../blobs") / path.name)
    if ref:
        (folder / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return links


def read(**rest: str) -> LoadedPresets:
    """The catalogue of these settings (flags with `_`), without a hub cache unless one is named."""
    given = {name.replace("_", "-"): value for name, value in rest.items() if name != "cache"}
    found, problems = parse(given, {"HF_HUB_CACHE": rest.get("cache", "/nowhere")})
    assert not problems
    return load_catalogue(found, {}, {})


def lines(loaded: LoadedPresets) -> tuple[list[str], list[str]]:
    return [str(problem) for problem in loaded.problems], [str(warning) for warning in loaded.warnings]


# Snapshots


@pytest.mark.parametrize(
    ("files", "lacks"),
    [
        (["model.safetensors"], ""),
        (["pytorch_model.bin"], ""),
        (["consolidated.safetensors", "pytorch_model.bin"], ""),
        *(
            (files, "model.safetensors")
            for files in (
                ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],  # of no index
                ["model-00001-of-00002.safetensors"],
                ["consolidated.safetensors"],
                ["adapter_model.safetensors"],
                ["model.pt"],
                ["model.gguf"],
            )
        ),
    ],
)
def test_a_snapshot_is_complete_with_all_its_weights(tmp_path: Path, files: list[str], lacks: str) -> None:
    assert missing(snapshot(tmp_path / "m", *files)) == lacks


def test_the_files_in_the_index_belong_to_a_snapshot(tmp_path: Path) -> None:
    folder = snapshot(tmp_path / "m", "a.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    assert missing(folder) == "b.safetensors"
    (folder / "b.safetensors").touch()
    assert missing(folder) == ""
    for broken in ("{", "[]", '{"weight_map": 3}', "[" * 100_000):
        index.write_text(broken)
        assert missing(folder) == "a readable model.safetensors.index.json"


def test_a_link_to_nothing_is_a_missing_file(tmp_path: Path) -> None:
    folder = snapshot(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("gone")
    assert missing(folder) == "model.safetensors"
    (folder / "config.json").unlink()
    assert missing(folder) == "config.json"
    assert missing(tmp_path / "gone") == "config.json"


def test_a_cached_snapshot_is_found_by_branch_tag_and_commit(tmp_path: Path) -> None:
    links = cached(tmp_path, "org/name")
    cached(tmp_path, "org/name", OTHER, "refs/pr/1")
    assert find_snapshot("org/name", "main", str(tmp_path)) == str(links)
    assert find_snapshot("org/name", COMMIT, str(tmp_path)) == str(links)
    assert find_snapshot("org/name", "refs/pr/1", str(tmp_path)) == str(links.parent / OTHER)
    (tmp_path / "planted").write_text(COMMIT)
    for revision in ("v1", "", "../snapshots/" + COMMIT, "../../planted", f"{tmp_path}/planted", COMMIT[:8]):
        assert find_snapshot("org/name", revision, str(tmp_path)) is None
    assert find_snapshot("org/else", "main", str(tmp_path)) is None


def test_an_incomplete_snapshot_is_not_found(tmp_path: Path) -> None:
    links = cached(tmp_path, "org/name")
    (links / "model.safetensors").resolve().unlink()
    assert find_snapshot("org/name", "main", str(tmp_path)) is None


def test_complete_repositories_of_the_cache_are_listed(tmp_path: Path) -> None:
    hub, empty = tmp_path / "hub", tmp_path / "empty"
    empty.mkdir()
    cached(hub, "org/name")
    cached(hub, "org/tagged", ref="v1")
    cached(hub, "org/bare", ref="")
    broken = cached(hub, "org/broken")
    (broken / "config.json").unlink()
    shutil.copytree(hub / "models--org--name", hub / "datasets--org--data", symlinks=True)
    (hub / "models--org--name" / "refs" / ".main.7.8").write_text(COMMIT)  # left by a download that was killed
    (hub / "version.txt").touch()
    loaded = read(cache=str(hub), models_dir=str(empty))
    assert {preset.id: preset.revision for preset in loaded.presets.values()} == {
        "org/name": "main", "org/tagged:v1": "v1", "org/bare": COMMIT,
    }  # fmt: skip
    assert {preset.source for preset in loaded.presets.values()} == {"cache"}
    assert not read(cache=str(hub), models_cache="off", models_dir=str(empty)).presets


# The models folder


def test_a_model_whose_path_is_not_utf8_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON cannot contain such a path, so no list of models could be sent."""
    folder = tmp_path / os.fsdecode(b"M\xfcller")
    try:
        snapshot(folder / "phi")
    except OSError:
        pytest.skip("this file system has only UTF-8 names")
    problems, [warning] = lines(read(models_dir=str(folder)))
    assert problems == []
    assert warning == f"{tmp_path}/M\\udcfcller/phi: is not listed: it {NOT_UTF8}"
    monkeypatch.chdir(folder)
    [problem], _ = lines(read(model="./phi"))
    assert problem == f"--model: [phi] {tmp_path}/M\\udcfcller/phi {NOT_UTF8}"


def test_each_complete_folder_is_a_model_and_the_rest_causes_warnings(tmp_path: Path) -> None:
    snapshot(tmp_path / "phi")
    snapshot(tmp_path / "org" / "nested")
    snapshot(tmp_path / "half", "model-00001-of-00002.safetensors")
    snapshot(tmp_path / "bad name")
    snapshot(tmp_path / ".hidden")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "llama.gguf").touch()
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "x.GGUF").touch()
    (tmp_path / "lmi").mkdir()
    (tmp_path / "lmi" / "serving.properties").touch()
    snapshot(tmp_path / "old" / "0_Transformer")
    (tmp_path / "gone").symlink_to("nothing")
    (tmp_path / "far").symlink_to("x" * 300)  # like a link into a folder that may not be entered
    (tmp_path / "org" / "far").symlink_to("x" * 300)
    os.mkfifo(tmp_path / "pipe")
    loaded = read(models_dir=str(tmp_path))
    problems, warnings = lines(loaded)
    assert problems == []
    assert {preset.id: preset.path for preset in loaded.presets.values()} == {
        "phi": str(tmp_path / "phi"), "org/nested": str(tmp_path / "org" / "nested"),
    }  # fmt: skip
    assert {preset.source for preset in loaded.presets.values()} == {"models_dir"}
    said = {Path(line.split(": ")[0]).name: line.split(": is not listed: ")[1] for line in warnings}
    assert said.keys() == {"half", "bad name", "llama.gguf", "ggufs", "lmi", "old", "gone", "far"}
    assert said["half"] == "it is not complete, model.safetensors is missing"
    assert said["bad name"].startswith("its name cannot be a model's")
    assert said["llama.gguf"].startswith("GGUF needs the llama-server engine")
    assert said["ggufs"].startswith("it has GGUF files: GGUF needs the llama-server engine")
    assert said["old"].startswith("the model is in 0_Transformer; a newer sentence-transformers writes it beside")
    assert said["gone"] == "it is a link to nothing"
    assert said["far"] == "it cannot be read (File name too long)"
    assert said["lmi"] == "it has a serving.properties without option.model_id, and no config.json"


def test_all_models_of_lmis_model_store_are_loaded_at_start(tmp_path: Path) -> None:
    store, file = tmp_path / "store", tmp_path / "models.ini"
    for name in ("one", "org/two"):
        snapshot(store / name)
    file.write_text("[one]\nload-on-startup = off\n")
    for word, loaded_at_start in (("ALL", [False, True]), ("NONE", [False, False])):
        environ = {"SERVING_LOAD_MODELS": word, "SERVING_MODEL_STORE": str(store), "HF_HUB_CACHE": "/nowhere"}
        found, problems = parse({"models-preset": str(file)}, environ)
        loaded = load_catalogue(found, {}, environ)
        assert (problems, *lines(loaded)) == ((), [], [])
        assert list(loaded.presets) == ["one", "org/two"]
        assert [preset.load_on_startup for preset in loaded.presets.values()] == loaded_at_start


def test_a_link_to_the_folder_of_models_lists_none_of_them_twice(tmp_path: Path) -> None:
    snapshot(tmp_path / "phi")
    snapshot(tmp_path / "org" / "nested")
    (tmp_path / "link").symlink_to(".")
    (tmp_path / "org" / "link").symlink_to("..")
    assert list(read(models_dir=str(tmp_path)).presets) == ["org/nested", "phi"]


def test_a_folder_of_models_that_is_a_model_itself_is_that_model(tmp_path: Path) -> None:
    model = snapshot(tmp_path / "model")
    (model / "adapters").mkdir()
    (model / "serving.properties").write_text("option.max_rolling_batch_size=8")
    (preset,) = read(models_dir=str(model)).presets.values()
    assert (preset.id, preset.path, preset.parallel) == ("model", str(model), 8)


def test_a_huge_file_of_settings_is_not_read_whole(tmp_path: Path) -> None:
    file = snapshot(tmp_path / "m") / "serving.properties"
    with file.open("w") as settings:
        settings.truncate(1 << 40)
    assert lines(read(models_dir=str(tmp_path))) == ([], [f"{file}: [m] is not listed: is larger than 1 MiB"])


def test_the_content_of_a_pipe_is_the_same_at_each_read() -> None:
    reads, writes = os.pipe()
    os.write(writes, b"[a]\nmodel = demo:a\n")
    os.close(writes)
    for _ in range(2):
        assert list(read(models_preset=f"/dev/fd/{reads}").presets) == ["a"]
    os.close(reads)


def test_a_named_pipe_is_read_anew(tmp_path: Path) -> None:
    pipe = tmp_path / "models.ini"
    os.mkfifo(pipe)
    for name in ("a", "b"):
        threading.Thread(target=pipe.write_text, args=[f"[{name}]\nmodel = demo:a\n"], daemon=True).start()
        assert list(read(models_preset=str(pipe)).presets) == [name]


def test_a_name_like_that_of_a_folder_is_no_repository(tmp_path: Path) -> None:
    snapshot(tmp_path / "phi-4")
    with pytest.raises(ConfigError, match=r"did you mean phi-4\?"):
        find_preset("phi4", read(models_dir=str(tmp_path)), {}, {})


def test_a_missing_models_folder_is_a_fault(tmp_path: Path) -> None:
    expected = f"--models-dir: {tmp_path}/gone: no such file or directory"
    assert lines(read(models_dir=str(tmp_path / "gone")))[0] == [expected]


def test_the_folder_wins_over_the_cache_and_a_section_configures_either(tmp_path: Path) -> None:
    cached(tmp_path / "hub", "org/name")
    cached(tmp_path / "hub", "org/other")
    snapshot(tmp_path / "models" / "org" / "name")
    (tmp_path / "m.ini").write_text("[ORG/Other]\nctx-size = 77\n")
    loaded = read(
        cache=str(tmp_path / "hub"), models_dir=str(tmp_path / "models"), models_preset=str(tmp_path / "m.ini")
    )
    assert not loaded.problems
    assert {id: (preset.source, preset.ctx_size) for id, preset in loaded.presets.items()} == {
        "ORG/Other": ("preset", 77), "org/name": ("models_dir", -1),
    }  # fmt: skip


# The preset file


def test_paths_of_a_preset_start_at_its_folder(tmp_path: Path) -> None:
    snapshot(tmp_path / "models" / "a")
    (tmp_path / "t.jinja").write_text("{{ x }}")
    (tmp_path / "m.ini").write_text("[a]\nmodel = models/a\nchat-template-file = t.jinja\n")
    loaded = read(models_preset=str(tmp_path / "m.ini"))
    assert not loaded.problems
    assert loaded.presets["a"].path == str(tmp_path / "models" / "a")
    assert loaded.presets["a"].chat_template == "{{ x }}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file or directory"),
        (b"[a]\nmodel = \xff", "is not UTF-8 text: byte 12, in line 2; save it as UTF-8"),
        (b";" * (1 << 20) + b";", "is larger than 1 MiB"),
    ],
)
def test_a_preset_that_cannot_be_read_is_one_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "m.ini"
    if content is not None:
        path.write_bytes(content)
    assert lines(read(models_preset=str(path))) == ([f"{path}: {message}"], [])


def test_the_built_in_models_are_listed_where_they_are_asked_for() -> None:
    assert not read().presets
    loaded = read(demo="on")
    assert lines(loaded) == ([], [])
    assert list(loaded.presets) == ["demo-chat", "demo-embed", "demo-a", "demo-b", "demo-c"]
    assert loaded.presets["demo-embed"].pooling == "mean"
    assert loaded.presets["demo-embed"].task == "embed"
    assert all(preset.threads == 1 and preset.demo for preset in loaded.presets.values())
    assert demo_preset().is_file()


def test_a_model_named_at_start_is_listed_alone_unless_the_cache_is_asked_for(tmp_path: Path) -> None:
    cached(tmp_path, "org/name")
    cache = str(tmp_path)
    assert list(read(cache=cache).presets) == ["org/name"]
    assert list(read(cache=cache, model="org/other,org/third:v1").presets) == ["org/other", "org/third:v1"]
    assert list(read(cache=cache, hf_repo="org/other", models_cache="on").presets) == ["org/other", "org/name"]
    assert {preset.source for preset in read(cache=cache, demo="on").presets.values()} == {"preset"}


def test_the_demo_models_are_never_served_beside_a_named_model(tmp_path: Path) -> None:
    file = tmp_path / "m.ini"
    file.write_text("[a]\nmodel = org/a\n")
    snapshot(tmp_path / "dir" / "b")
    for flags in ({"model": "org/a"}, {"hf-repo": "org/a"}, {"models-preset": str(file)},
                  {"models-dir": f"{tmp_path}/dir"}):  # fmt: skip
        found, problems = parse(flags, {"ROUTER_DEMO": "on"})
        loaded = load_catalogue(found, {}, {})
        assert (problems, loaded.problems, found.device_limit) == ((), (), {})
        assert [preset.demo for preset in loaded.presets.values()] == [""]
        (problem,) = parse(flags | {"demo": "on"}, {})[1]
        assert str(problem).startswith("--demo: models are named as well")


def test_the_reference_can_be_served_as_it_is() -> None:
    path = Path(__file__).parents[3] / "config" / "models.ini"
    assert lines(read(models_preset=str(path), strict_presets="on")) == ([], [])


def test_a_default_model_must_exist() -> None:
    assert read(demo="on", default_model="chat").presets
    assert lines(read(demo="on", default_model="demo-chta"))[0] == [
        '--default-model: there is no model "demo-chta"; did you mean "demo-chat"?'
    ]


def test_settings_reach_the_presets(tmp_path: Path) -> None:
    path = tmp_path / "m.ini"
    path.write_text("[a]\nmodel = demo:a\nmin-residency = 20\n")
    assert "must not be more than --swap-patience, 10 s" in lines(read(models_preset=str(path)))[0][0]
    loaded = read(models_preset=str(path), swap_patience="20", strict_fields="on")
    assert loaded.presets["a"].strict_fields
    path.write_text("[a]\nmodel = demo:a\nnuma = 1\n")
    assert lines(read(models_preset=str(path)))[1]
    assert lines(read(models_preset=str(path), strict_presets="on"))[0]


def test_the_kind_of_any_path_is_determined_without_an_exception(tmp_path: Path) -> None:
    disk = LocalDisk()
    snapshot(tmp_path / "s")
    (tmp_path / "lmi").mkdir()
    (tmp_path / "lmi" / "serving.properties").touch()
    kinds = {"s": "snapshot", "lmi": "lmi", "s/config.json": "file", "gone": "", "s/config.json/x": "", "a\0b": ""}
    assert {name: disk.kind(f"{tmp_path}/{name}") for name in kinds} == kinds
    assert disk.kind(str(tmp_path)) == "folder"


# Key files


def test_keys_come_from_files_that_only_their_owner_may_read(tmp_path: Path) -> None:
    user, admin = tmp_path / "user", tmp_path / "admin"
    for path in (user, admin):
        path.write_text(path.name)
        path.chmod(0o600)
    found = Settings(api_key_file=str(user), admin_key_file=str(admin))
    assert [key.admin for key in read_keys(found)] == [False, True]
    user.write_text("other")
    assert len(read_keys(found)) == 2
    user.chmod(0o640)
    admin.unlink()
    with pytest.raises(ConfigError) as caught:
        read_keys(found)
    assert caught.value.problems == [
        f"--api-key-file: {user}: other users may read it; chmod 600 {user}",
        f"--admin-key-file: {admin}: no such file or directory",
    ]


def test_an_unreadable_folder_is_passed_over(tmp_path: Path) -> None:
    cached(tmp_path / "hub", "org/name")
    locked = tmp_path / "hub" / "models--org--locked"
    locked.mkdir(mode=0o000)
    (tmp_path / "hub" / "models--org--loop").symlink_to("models--org--loop")
    loaded = read(cache=str(tmp_path / "hub"), models_dir=str(tmp_path / "hub" / "models--org--name" / "refs"))
    os.chmod(locked, 0o700)
    assert list(loaded.presets) == ["org/name"]
