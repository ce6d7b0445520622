"""Models named at start: names on the command line become presets that are loaded at start."""

from collections.abc import Mapping, Sequence

import pytest

from router.config import settings
from router.config.model_source import FoundModel
from router.config.named_models import named_models
from router.config.presets import Preset
from router.config.resolve import LoadedPresets, load
from tests.router.preset_texts import Disk

FOLDERS = (
    "/home/me/llama", "/home/me/a/llama", "/home/me/b/llama", "/x y/-odd (1)", "/home/me/org/name", "/x/me/llama",
    "/y/me/llama",
)  # fmt: skip
CACHED = "/hub/models--org--cached/snapshots/0123456789abcdef"


def start(
    flags: Mapping[str, str],
    *,
    text: str = "",
    environ: Mapping[str, str] | None = None,
    found: Sequence[FoundModel] = (),
    **models: str,
) -> LoadedPresets:
    """The presets of a router with these flags, in /home/me."""
    parsed, problems = settings.parse(flags, environ or {})
    assert not problems
    disk = Disk(*(f"{folder}/config.json" for folder in (*FOLDERS, CACHED)))
    cached = [FoundModel("org/name", "cache", repo="org/name")] if parsed.lists_cache else []
    return load(
        text, file="models.ini", folder="/home/me", disk=disk, named=named_models(parsed), environ=environ or {},
        flags={name.replace("_", "-"): value for name, value in models.items()}, working="/home/me",
        found=[*found, *cached],
    )  # fmt: skip


def ids(**flags: str) -> list[str]:
    return list(start({name.replace("_", "-"): value for name, value in flags.items()}).presets)


def test_ids_are_folder_names_or_names_of_repositories() -> None:
    assert ids(model="llama") == ids(model="./llama") == ids(model="/home/me/llama/") == ["llama"]
    assert ids(model="meta/llama-3") == ids(hf_repo="meta/llama-3") == ["meta/llama-3"]
    assert ids(hf_repo="meta/llama-3:v1") == ["meta/llama-3:v1"]
    assert ids(model="org/name") == ["name"], "a folder"
    assert ids(hf_repo="org/name") == ["org/name"], "a repository, although there is a folder of this name"
    assert ids(model="demo:chat") == ["demo-chat"]
    assert ids(model="/x y/-odd (1)") == ["odd-1-"]
    assert ids(model=CACHED) == ["org/cached"]


def test_a_name_without_an_organisation_is_a_section_else_a_folder_else_a_repository() -> None:
    text = "[coder]\nmodel = demo:a\n"
    for name, source in {"coder": "demo:a", "llama": "/home/me/llama", "gpt2": "gpt2"}.items():
        preset = start({"model": name}, text=text).presets[name]
        assert (preset.path or preset.repo or f"demo:{preset.demo}") == source
    assert start({"hf-repo": "codr"}, text=text).presets["codr"].repo == "codr"
    assert start({"model": "llama"}, model_draft="distilgpt2").presets["llama"].model_draft == "hub:distilgpt2:main"


@pytest.mark.parametrize(
    "address", ["hf.co/org/name", "https://huggingface.co/org/name/", "hf://org/name", "huggingface.co/org/name"]
)
def test_an_address_of_the_hub_is_its_repository(address: str) -> None:
    for key in ("model", "hf-repo"):
        loaded = start({key: address})
        assert not loaded.problems
        assert loaded.presets["org/name"].repo == "org/name", "although there is a folder of this name"
    text = f"[m]\nmodel = {address}\ntokenizer = {address}\nmodel-draft = hf.co/org/small\n"
    preset = start({}, text=text).presets["m"]
    assert (preset.repo, preset.tokenizer, preset.model_draft) == ("org/name", "", "hub:org/small:main")


def test_ids_are_unique() -> None:
    assert ids(model="llama,a/llama,b/llama,/x/me/llama") == ["llama", "a/llama", "b/llama", "me/llama"]
    assert ids(model="llama,/x/me/llama,/y/me/llama") == ["llama", "me/llama", "llama-2"]
    assert ids(model="a/llama,x/LLAMA,y/llama") == ["llama", "x/LLAMA", "y/llama"]
    loaded = start({"model": "llama"}, text="[LLAMA]\nmodel = org/other\n")
    assert {id: preset.path or preset.repo for id, preset in loaded.presets.items()} == {
        "me/llama": "/home/me/llama",
        "LLAMA": "org/other",
    }


def test_a_model_that_is_named_twice_is_listed_once_with_all_its_names() -> None:
    assert ids(model="llama,./llama,/home/me/llama/") == ["llama"]
    assert ids(model="meta/llama-3", hf_repo="meta/llama-3") == ["meta/llama-3"]
    loaded = start({"model": "llama,./llama,a/llama", "model-names": "x;y,z;w"})
    assert {id: preset.aliases for id, preset in loaded.presets.items()} == {
        "x": ("y", "z", "llama"),
        "w": ("a/llama",),
    }


def test_the_name_of_a_section_means_that_section() -> None:
    text = "[*]\nload-on-startup = off\n[one]\nmodel = org/one\n[org/two]\nmodel = llama\nctx-size = 9\n"
    loaded = start({"model": "org/two,org/three"}, text=text)
    found = {id: (preset.repo or preset.path, preset.load_on_startup) for id, preset in loaded.presets.items()}
    assert found == {
        "org/three": ("org/three", True), "one": ("org/one", False), "org/two": ("/home/me/llama", True)
    }  # fmt: skip
    assert loaded.named == ("org/two", "org/three")
    assert start({"model": "one"}, text=text, alias="uno").presets["one"].aliases == ("uno",)
    assert not start({"model": "one"}, text=text, lazy="on").presets["one"].load_on_startup
    assert not loaded.problems


def test_flags_and_defaults_of_a_file_apply_to_named_models() -> None:
    loaded = start({"model": "llama,org/x"}, text="[*]\nctx-size = 1\nparallel = 2\n", ctx_size="512")
    assert [(preset.ctx_size, preset.parallel) for preset in loaded.presets.values()] == [(512, 2)] * 2


def test_keys_of_one_model_apply_to_the_one_that_is_named_and_to_no_other() -> None:
    environ = {"HF_REVISION": "v1", "LLAMA_ARG_ALIAS": "weaker"}
    loaded = start({"hf-repo": "org/x"}, text="[other]\nmodel = org/other\n", environ=environ, alias="gpt,mini")
    x, other = loaded.presets["gpt"], loaded.presets["other"]  # lists show the first alias
    assert (x.aliases, x.revision, loaded.named) == (("mini", "org/x"), "v1", ("gpt",))
    assert (other.aliases, other.revision) == ((), "main")
    assert not loaded.warnings
    (problem,) = start({"model": "llama"}, text="[other]\nmodel = org/other\n", alias="other").problems
    assert str(problem) == '--alias: alias "other" is the id of another model; choose another'
    (problem,) = start({"model": "llama,org/x"}, alias="gpt").problems
    assert str(problem).startswith("--alias: is for one model, and 2 are named at start")
    (warning,) = start({"model": "llama,org/x"}, environ={"HF_REVISION": "v1"}).warnings
    assert str(warning).startswith("HF_REVISION: is for one model, and 2 are named at start, so it is not read")


@pytest.mark.parametrize(
    ("flags", "environ", "line"),
    [
        ({"model": "g.one"}, {}, '--model: [g.one] "g.one" is neither a folder (/home/me/g.one) nor org/name'),
        ({}, {"LLAMA_ARG_MODEL": "g.one"}, 'LLAMA_ARG_MODEL: [g.one] "g.one" is neither a folder (/home/me/g.one'),
        ({"hf-repo": "/x"}, {}, '--hf-repo: [x] "/x" is not org/name'),
        ({"hf-repo": "a/b:v1"}, {"HF_REVISION": "v2"}, "HF_REVISION: a revision stands in --hf-repo already; remove"),
        ({"model": "llama"}, {"HF_REVISION": "v2"}, "HF_REVISION: revision belongs to a repository of the hub, and"),
    ],
)
def test_a_name_without_a_model_is_refused_where_it_was_given(
    flags: dict[str, str], environ: dict[str, str], line: str
) -> None:
    loaded = start(flags, environ=environ)
    assert [str(problem)[: len(line)] for problem in loaded.problems] == [line]


def test_a_name_like_that_of_a_section_is_refused_with_the_section() -> None:
    (problem,) = start({"model": "codr"}, text="[coder]\nmodel = demo:a\n").problems
    assert str(problem).endswith('"codr" is neither a folder (/home/me/codr) nor org/name; did you mean "coder"?')


def test_a_name_like_that_of_a_model_in_the_models_folder_is_refused_with_its_folder() -> None:
    for name in ("phi-4", "phi4"):
        flags = {"model": name, "models-dir": "/models"}
        (problem,) = start(flags, found=[FoundModel("phi-4", "models_dir", path="/models/phi-4")]).problems
        assert str(problem).endswith(' nor org/name; did you mean "/models/phi-4"?')


def test_a_name_with_a_slash_at_its_end_is_a_folder_or_has_an_organisation() -> None:
    assert start({"model": "llama/"}).presets["llama"].path == "/home/me/llama"
    assert start({"model": "a/b/"}).presets["a/b"].repo == "a/b"
    for loaded in (start({"model": "gpt2/"}), start({}, text="[m]\nmodel = gpt2/\n")):
        assert ["is neither a folder (/home/me/gpt2) nor org/name" in str(each) for each in loaded.problems] == [True]
    assert start({"model": "hf.co/gpt2/"}).presets["gpt2"].repo == "gpt2"


def test_a_named_model_has_the_origin_of_its_name() -> None:
    preset: Preset = start({}, environ={"LLAMA_ARG_HF_REPO": "org/x"}).presets["org/x"]
    assert preset.origins == {
        "hf-repo": "LLAMA_ARG_HF_REPO", "load-on-startup": "LLAMA_ARG_HF_REPO", "alias": "the name of the repository"
    }  # fmt: skip


def test_a_repository_is_found_by_its_name_alone_unless_two_models_have_it() -> None:
    def aliases(text: str = "", **flags: str) -> dict[str, tuple[str, ...]]:
        loaded = start({name.replace("_", "-"): value for name, value in flags.items()}, text=text)
        return {id: preset.aliases for id, preset in loaded.presets.items()}

    assert aliases(model="org/x,llama,other/y") == {"org/x": ("x",), "llama": (), "other/y": ("y",)}
    assert aliases(model="org/x,other/X") == {"org/x": (), "other/X": ()}
    assert aliases(model="org/llama,llama") == {"org/llama": (), "llama": ()}
    assert aliases("[b]\nmodel = org/b\nalias = x", model="org/x") == {"org/x": (), "b": ("x",)}
    assert aliases("[org/z]\nmodel = org/z", model="org/x:v1") == {"org/x:v1": ("x",), "org/z": ()}


def test_model_names_are_given_once_per_model_in_their_order() -> None:
    loaded = start({"model": "org/x,llama", "hf-repo": "org/y", "model-names": "a,b;c;d"})
    found = {id: preset.aliases for id, preset in loaded.presets.items()}
    assert found == {"a": ("b", "org/x"), "c": ("llama",), "d": ("org/y",)}
    (problem,) = settings.parse({"model": "org/x", "model-names": "a;b"}, {})[1]
    assert str(problem) == "--model-names: is given 2 times for 1 model named at start; give it once per model"


@pytest.mark.parametrize(
    ("environ", "expected", "without_effect"),
    [
        ({"HF_MODEL_ID": "org/model"}, {"org/model": "org/model"}, ""),
        ({"HF_MODEL_ID": "org/model/"}, {"org/model": "org/model"}, ""),
        ({"OPTION_MODEL_ID": "/home/me/llama"}, {"llama": "/home/me/llama"}, ""),
        ({"OPTION_MODEL_ID": "org/one", "HF_MODEL_ID": "org/two"}, {"org/one": "org/one"}, "HF_MODEL_ID"),
        ({"OPTION_MODEL_ID": "org/one", "HF_MODEL_ID": "org/one"}, {"org/one": "org/one"}, ""),
        ({"SERVING_LOAD_MODELS": "test::MPI=/home/me/llama"}, {"test": "/home/me/llama"}, ""),
        ({"SERVING_LOAD_MODELS": "test=/home/me/llama"}, {"test": "/home/me/llama"}, ""),
        ({"SERVING_LOAD_MODELS": "[a:v1:Python:*]=org/one,[b]=org/two"}, {"a": "org/one", "b": "org/two"}, ""),
        (
            {"SERVING_LOAD_MODELS": " [a]=org/one [b]=org/two, org/three"},
            {"a": "org/one", "b": "org/two", "org/three": "org/three"},
            "",
        ),
        ({"SERVING_LOAD_MODELS": "NONE", "HF_MODEL_ID": "org/one"}, {"org/one": "org/one"}, "SERVING_LOAD_MODELS"),
        (
            {"HF_MODEL_ID": "org/two", "SERVING_LOAD_MODELS": "test::Python=/home/me/llama"},
            {"org/two": "org/two"},
            "SERVING_LOAD_MODELS",
        ),
    ],
)
def test_variables_of_lmi_name_models_that_are_loaded_at_start(
    environ: dict[str, str], expected: dict[str, str], without_effect: str
) -> None:
    loaded = start({}, environ=environ)
    assert loaded.problems == ()
    assert [warning.key for warning in loaded.warnings] == ([without_effect] if without_effect else [])
    assert {id: preset.repo or preset.path for id, preset in loaded.presets.items()} == expected
    assert all(preset.load_on_startup for preset in loaded.presets.values())


def test_none_as_lmis_load_models_names_no_model() -> None:
    loaded = start({}, environ={"SERVING_LOAD_MODELS": "none"})
    assert (loaded.problems, loaded.warnings, loaded.named) == ((), (), ())


def test_a_model_of_lmis_load_models_has_the_name_and_the_version_that_are_given_there() -> None:
    loaded = start({}, environ={"SERVING_LOAD_MODELS": "[a:v1:Python:*]=org/x,[a:v2]=org/y,[b]=file:/home/me/llama"})
    assert {id: preset.aliases for id, preset in loaded.presets.items()} == {
        "a": ("a:v1", "org/x"), "a:v2": ("org/y",), "b": ("llama",)
    }  # fmt: skip
    loaded = start({}, environ={"SERVING_LOAD_MODELS": "[a:v2]=org/y,[a]=org/x"})
    assert {id: preset.repo for id, preset in loaded.presets.items()} == {"a:v2": "org/y", "a": "org/x"}
    assert start({"model": "test::Python=llama", "model-names": "mine"}).presets["mine"].aliases == ("test", "llama")
    loaded = start({}, environ={"SERVING_LOAD_MODELS": "[name]=/home/me/llama,[llama]=/home/me/org/name"})
    assert {id: preset.path for id, preset in loaded.presets.items()} == {
        "name": "/home/me/llama", "llama": "/home/me/org/name"
    }  # fmt: skip
    (problem,) = start({}, environ={"SERVING_LOAD_MODELS": "[a]=org/x,[a]=org/y"}).problems
    assert "alias" in str(problem)
