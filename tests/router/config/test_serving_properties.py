"""LMI's serving.properties: the syntax, and the four places where the file configures a model."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.effective import effective
from router.config.ini import Problem
from router.config.model_source import FoundModel
from router.config.serving_properties import parse
from tests.router.preset_texts import Disk, complaints, read

STARTER = """\
engine=Python
option.mpi_mode=True
option.tensor_parallel_degree=max
option.rolling_batch=lmi-dist
option.model_id=org/name
# Adjust the following
option.max_rolling_batch_size=64
"""


def disk(text: str, *paths: str) -> Disk:
    """A disk with serving.properties in /m/x, beside further files."""
    found = Disk("/m/x/serving.properties", "/m/x/", *paths)
    found.texts["/m/x/serving.properties"] = text
    return found


def pairs(text: str) -> list[tuple[str, str]]:
    section, problems = parse(text, file="f", name="m")
    assert not problems
    return [(entry.key, entry.value) for entry in section.entries]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=b", [("a", "b")]),
        ("  a : b  ", [("a", "b")]),
        ("a b c", [("a", "b c")]),
        ("a", [("a", "")]),
        ("# a=b\n! c=d\n\n\t\ne=f # g", [("e", "f # g")]),
        ("a=b=c:d", [("a", "b=c:d")]),
        ("a = one, \\\n    two", [("a", "one, two")]),
        ("a = b\\\\\nc = d", [("a", "b\\"), ("c", "d")]),
        ("a = \\u00e9\\t\\=\\n", [("a", "é\t=")]),
        ("a=b\r\nc=d\r\n", [("a", "b"), ("c", "d")]),
        ("a=b\u2028c=d", [("a", "b\u2028c=d")]),
        ("a = b\\", [("a", "b")]),
        ("\ufeffa=b", [("a", "b")]),
    ],
)
def test_the_syntax_is_that_of_java(text: str, expected: list[tuple[str, str]]) -> None:
    assert pairs(text) == expected


def test_lines_have_the_numbers_of_the_file() -> None:
    section, problems = parse("# x\na = 1, \\\n 2\n=b\nc=d", file="f", name="m")
    assert [(entry.key, entry.line) for entry in section.entries] == [("a", 2), ("c", 5)]
    assert problems == [Problem("f", 4, "m", "", "neither a comment nor key=value")]


@given(st.text(st.characters(codec="utf-8") | st.sampled_from("\\=:#\n u0"), max_size=60))
def test_any_text_is_read_without_an_exception(text: str) -> None:
    read("[m]\nimport = /m/x", disk=disk(text))


PLACES: Mapping[str, dict[str, Any]] = {
    "a subfolder of --models-dir": {"text": "", "found": [FoundModel("m", "models_dir", path="/m/x")]},
    "the same, with a section": {"text": "[m]\nseed = 1", "found": [FoundModel("m", "models_dir", path="/m/x")]},
    "model": {"text": "[m]\nmodel = /m/x"},
    "import of the folder": {"text": "[m]\nimport = /m/x"},
    "import of the file": {"text": "[m]\nimport = /m/x/serving.properties"},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("further", [(), ("/m/x/config.json",)], ids=["alone", "beside config.json"])
def test_the_starter_configuration_is_a_preset_in_each_place(place: str, further: tuple[str, ...]) -> None:
    loaded = read(disk=disk(STARTER, *further), **PLACES[place])
    assert (loaded.problems, loaded.warnings) == ((), ())
    preset = loaded.presets["m"]
    assert (preset.repo, preset.parallel, preset.engine, preset.tensor_parallel > 64) == (
        "org/name",
        64,
        "transformers",
        True,
    )
    rows = {key: (value, origin) for key, value, origin in effective(preset)}
    assert rows["parallel"] == ("64", "/m/x/serving.properties:7")
    assert rows["hf-repo"] == ("org/name", "/m/x/serving.properties:5")


GUIDES = {
    "vLLM": "engine=Python\noption.tensor_parallel_degree=max\noption.model_id=org/name\noption.rolling_batch=vllm\n"
    "# Adjust\noption.max_rolling_batch_size=64",
    "HuggingFace Accelerate": "engine=Python\n# use scheduler\noption.rolling_batch=scheduler\n"
    "option.model_id=org/name\noption.tensor_parallel_degree=max",
    "common configurations": "engine=MPI\noption.model_id=org/name\noption.trust_remote_code=true\n"
    "option.tensor_parallel_degree=4\noption.max_rolling_batch_size=32\noption.rolling_batch=auto",
}


@pytest.mark.parametrize("guide", GUIDES)
def test_the_starter_configurations_of_other_guides_load_without_a_warning(guide: str) -> None:
    loaded = read("[m]\nmodel = /m/x", disk=disk(GUIDES[guide]), strict=True)
    assert (loaded.problems, loaded.warnings, loaded.presets["m"].repo) == ((), (), "org/name")


@pytest.mark.parametrize("place", PLACES)
def test_without_a_model_id_the_model_is_in_the_folder(place: str) -> None:
    text = "option.max_rolling_batch_size=64"
    loaded = read(disk=disk(text, "/m/x/config.json"), **PLACES[place])
    assert loaded.problems == ()
    assert (loaded.presets["m"].path, loaded.presets["m"].parallel) == ("/m/x", 64)


def test_the_section_is_stronger_than_the_file_and_the_file_than_the_defaults() -> None:
    text = "option.max_model_len=2\noption.max_rolling_batch_size=2\nretry_threshold=2"
    ini = "[*]\nctx-size = 1\nparallel = 1\nmax-restarts = 1\nseed = 1\n[m]\nmodel = /m/x\nparallel = 3"
    preset = read(ini, disk=disk(text, "/m/x/config.json"), flags={"max-restarts": "4"}).presets["m"]
    assert (preset.seed, preset.ctx_size, preset.parallel, preset.max_restarts) == (1, 2, 3, 4)


def test_the_model_of_a_section_is_stronger_than_that_of_an_imported_file() -> None:
    for source in ("model = demo:a", "hf-repo = org/other"):
        preset = read(f"[m]\nimport = /m/x\n{source}", disk=disk(STARTER)).presets["m"]
        assert (preset.demo or preset.repo) in ("a", "org/other")
        assert preset.parallel == 64


def test_a_relative_path_in_the_file_starts_at_its_folder() -> None:
    found = disk("option.model_id=weights", "/m/x/weights/config.json")
    assert read("[m]\nmodel = /m/x", disk=found).presets["m"].path == "/m/x/weights"


def test_adapters_beside_the_file_belong_to_a_model_of_the_hub() -> None:
    found = disk(STARTER, "/m/x/adapters/", "/m/x/adapters/a/", "/m/x/adapters/a/adapter_config.json")
    for text in (STARTER, STARTER + "option.adapters=adapters"):
        found.texts["/m/x/serving.properties"] = text
        preset = read("[m]\nmodel = /m/x", disk=found).presets["m"]
        assert (preset.repo, [each.path for each in preset.adapters]) == ("org/name", ["/m/x/adapters/a"])


def test_a_folder_without_a_model_is_not_listed_and_an_error_in_a_section() -> None:
    found = disk("engine=Python")
    loaded = read("", disk=found, found=[FoundModel("m", "models_dir", path="/m/x")])
    assert not loaded.presets
    assert [str(warning) for warning in loaded.warnings] == [
        "/m/x: is not listed: it has a serving.properties without option.model_id, and no config.json"
    ]
    for line in ("model = /m/x", "import = /m/x"):
        (problem,) = complaints(f"[m]\n{line}", disk=found)
        assert "without option.model_id" in problem


def test_an_invalid_file_on_disk_is_a_warning_and_in_a_section_an_error() -> None:
    found = [FoundModel(name, "models_dir", path=f"/m/{name}") for name in ("x", "y")]
    files = disk("option.model_id=org/name\noption.max_num_seqs=many\noption.foo=1", "/m/y/config.json")
    loaded = read("", disk=files, found=found)
    assert (list(loaded.presets), loaded.problems) == (["y"], ())
    assert [str(warning) for warning in loaded.warnings] == [
        '/m/x/serving.properties:2: [x] is not listed: option.max_num_seqs: "many" is not a whole number'
        " from 1 to 4096, nor -1, nor auto",
        '/m/x/serving.properties:3: [x] is not listed: unknown key "option.foo"',
    ]
    assert len(read("[x]\nseed = 1", disk=files, found=found).problems) == 2
    assert len(read("", disk=files, found=found, strict=True).problems) == 2


def test_a_fault_of_another_place_stays_an_error_for_models_on_disk() -> None:
    found = [FoundModel("m", "models_dir", path="/m/x")]
    (problem,) = complaints("[*]\nmax-input-tokens = 10", disk=disk(STARTER + "option.max_model_len=9"), found=found)
    assert problem == "models.ini:2: [*] max-input-tokens must not be more than ctx-size"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "option.model_id=s3://bucket/x",
            '/m/x/serving.properties:1: [m] "s3://bucket/x" is a URL; download the model',
        ),
        ("option.max_model_lenn=1", 'unknown key "option.max_model_lenn"; did you mean "max-model-len"?'),
        ("option.model_id=", "option.model_id: the value is empty; write a folder or org/name"),
        ("import=/m/y", "import is not read from this file; write import into a section"),
        ("option.pythonExecutable=/bin/sh", "option.pythonExecutable is not read from this file; write python into a"),
        ("env.LD_PRELOAD=x", "is not read from this file"),
        ("minWorkers=3\nmaxWorkers=2", "the least number of workers is 3, the largest 2"),
    ],
)
def test_a_fault_names_the_file_and_its_line(text: str, message: str) -> None:
    text = text if "model_id" in text else f"{text}\noption.model_id=org/name"
    (problem,) = complaints("[m]\nmodel = /m/x", disk=disk(text))
    assert problem.startswith("/m/x/serving.properties:")
    assert message in problem


def test_an_import_without_the_file_is_an_error() -> None:
    for further in ("", "model = demo:a"):
        (problem,) = complaints(f"[m]\nimport = /m/gone\n{further}")
        assert problem == "models.ini:2: [m] import: no file /m/gone/serving.properties"


def test_a_handler_beside_the_file_is_an_error_unless_the_engines_own_is_asked_for() -> None:
    found = disk(STARTER, "/m/x/model.py")
    assert "model.py beside it is a handler" in complaints("[m]\nmodel = /m/x", disk=found)[0]
    found.texts["/m/x/serving.properties"] += "option.entryPoint=djl_python.huggingface\n"
    assert complaints("[m]\nmodel = /m/x", disk=found) == []


def test_the_file_of_a_downloaded_repository_is_read_only_if_a_section_imports_it() -> None:
    folder = "/hub/models--org--name/snapshots/abc"
    found = Disk(f"{folder}/config.json", f"{folder}/serving.properties")
    found.texts[f"{folder}/serving.properties"] = "option.trust_remote_code=true"
    loaded = read(f"[m]\nmodel = {folder}", disk=found)
    assert not loaded.presets["m"].trust_remote_code
    assert [str(warning) for warning in loaded.warnings] == [
        f"{folder}/serving.properties: [m] is not read, because it was downloaded; write import = its folder into a"
        " section to read it"
    ]
    assert read(f"[m]\nimport = {folder}", disk=found).presets["m"].trust_remote_code


def test_a_file_that_came_with_the_model_cannot_allow_its_code() -> None:
    found = disk("option.trust_remote_code=true", "/m/x/config.json")
    (problem,) = complaints("[m]\nmodel = /m/x", disk=found)
    assert "the author of the model cannot allow its code; give --trust-remote-code or" in problem
    assert read("[m]\nimport = /m/x", disk=found).presets["m"].trust_remote_code
    assert not read("[m]\nmodel = /m/x", disk=disk("option.trust_remote_code=false", "/m/x/config.json")).problems
    for allowed in ({"flags": {"trust-remote-code": "on"}}, {"environ": {"HF_MODEL_TRUST_REMOTE_CODE": "true"}}):
        assert read("[m]\nmodel = /m/x", disk=found, **allowed).presets["m"].trust_remote_code
    assert not read("[m]\nmodel = /m/x\ntrust-remote-code = off", disk=found).presets["m"].trust_remote_code
    assert complaints("[*]\ntrust-remote-code = off\n[m]\nmodel = /m/x", disk=found)
    alone = disk("option.trust_remote_code=true\noption.model_id=org/name")
    assert read("[m]\nmodel = /m/x", disk=alone).presets["m"].trust_remote_code


def test_the_prefix_option_may_stand_in_a_section() -> None:
    loaded = read(f"[m]\n{STARTER}")
    assert (loaded.problems, loaded.warnings, loaded.presets["m"].parallel) == ((), (), 64)


@pytest.mark.parametrize(
    ("text", "replicas", "warning"),
    [
        ("minWorkers=2\nmaxWorkers=4", (2, 4), ""),
        ("minWorkers=2", (2, 2), ""),
        ("minWorkers=0\nmaxWorkers=2", (1, 2), ""),
        ("gpu.minWorkers=2\ngpu.maxWorkers=3\nminWorkers=1", (2, 3), "has no effect beside"),
        ("cpu.minWorkers=2", (2, 2), "applies on every device"),
        ("cpu.minWorkers=2\nload_on_devices=-1", (2, 2), ""),
        ("gpu.minWorkers=2\nload_on_devices=-1", (1, 1), "has no effect, because device is cpu"),
        ("cpu.maxWorkers=3\ngpu.maxWorkers=2\nload_on_devices=-1", (1, 3), "gpu.maxWorkers has no effect, because"),
        ("cpu.maxWorkers=3\nmaxWorkers=2\nload_on_devices=-1", (1, 3), '"maxWorkers" has no effect beside "cpu.max'),
        ("gpu.maxWorkers=2\ncpu.maxWorkers=3\nload_on_devices=0", (1, 2), "cpu.maxWorkers has no effect, because"),
        ("cpu.maxWorkers=3\nload_on_devices=0", (1, 1), "cpu.maxWorkers has no effect, because device is cuda:0"),
        (
            "cpu.maxWorkers=3\ngpu.maxWorkers=2",
            (1, 2),
            'beside "gpu.maxWorkers"; write device = cpu on a machine without',
        ),
    ],
)
def test_numbers_of_workers_are_replicas(text: str, replicas: tuple[int, int], warning: str) -> None:
    loaded = read("[m]\nmodel = /m/x", disk=disk(f"{text}\noption.model_id=org/name"))
    assert loaded.problems == ()
    assert loaded.presets["m"].replicas == replicas
    said = [str(each) for each in loaded.warnings]
    assert all(warning in line for line in said) if warning else not said
    assert bool(said) is bool(warning)


def test_replicas_and_numbers_of_workers_follow_precedence() -> None:
    found = disk("minWorkers=2\noption.model_id=org/name")
    assert read("[m]\nmodel = /m/x\nreplicas = 3", disk=found).presets["m"].replicas == (3, 3)
    assert read("[*]\nreplicas = 3\n[m]\nmodel = /m/x", disk=found).presets["m"].replicas == (2, 2)
    assert "replicas is set as well" in complaints("[m]\nmodel = demo:a\nreplicas = 3\nmin-workers = 2")[0]


def test_a_number_of_workers_of_a_section_replaces_that_of_all_models_for_one_device() -> None:
    for star, own in (("gpu.maxWorkers", "maxWorkers"), ("maxWorkers", "gpu.maxWorkers")):
        loaded = read(f"[*]\n{star} = 2\n[m]\nmodel = demo:a\n{own} = 3")
        assert (loaded.presets["m"].replicas, loaded.warnings) == ((1, 3), ())
