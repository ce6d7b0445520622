import difflib
import sys
from types import FrameType

import pytest

from router.config.presets import Preset
from router.errors import BadRequest, ModelNotFound
from router.registry.registry import COMPARED_LENGTH, MOST_COMPARED, ModelNames
from worker.protocol.argv import AdapterSource

PRESETS = {
    "Qwen/Qwen3-8B": Preset(id="Qwen/Qwen3-8B", repo="Qwen/Qwen3-8B", aliases=("qwen", "coder")),
    "small": Preset(id="small", path="/s"),
    "SMALL": Preset(id="SMALL", path="/t"),
}
NAMES = ModelNames(PRESETS)


def pick(**given: object) -> tuple[str, str]:
    settings = {"path": None, "body": None, "query": None, "default": "", "fall_back": False, "allowed": lambda _: True}
    return NAMES.choose(**{**settings, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "qwen", "coder", "QWEN", "qwen/qwen3-8b"])
def test_id_alias_and_any_unique_case_mean_the_model(name: str) -> None:
    assert NAMES.find(name) == "Qwen/Qwen3-8B"


def test_the_tag_of_ollamas_clients_is_left_out_once_unless_a_model_has_it() -> None:
    assert (NAMES.find("qwen:latest"), NAMES.find("QWEN:latest")) == ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B")
    assert ModelNames({**PRESETS, "qwen:latest": Preset(id="qwen:latest")}).find("qwen:latest") == "qwen:latest"
    with pytest.raises(ModelNotFound, match="model 'qwen:latest:latest' not found"):
        NAMES.find("qwen:latest:latest")


def test_a_repository_that_is_not_listed_beside_its_section_is_known_by_name_all_the_same() -> None:
    hides = Preset(id="mine", repo="org/model", dedup_cache_models=True)
    other = Preset(id="other", repo="org/model")
    assert ModelNames({"other": other, "mine": hides}).find("org/model") == "mine"
    assert ModelNames({"org/model": Preset(id="org/model", path="/x"), "mine": hides}).find("org/model") == "org/model"
    with pytest.raises(ModelNotFound):
        ModelNames({"other": other}).find("org/model")


def test_case_decides_between_names_that_differ_only_in_it() -> None:
    assert NAMES.find("small") == "small"
    assert NAMES.find("SMALL") == "SMALL"
    with pytest.raises(ModelNotFound):
        NAMES.find("Small")


def test_near_names_are_suggested_and_hidden_ones_are_not() -> None:
    with pytest.raises(ModelNotFound, match="did you mean qwen"):
        NAMES.find("qven")
    with pytest.raises(ModelNotFound) as found:
        NAMES.find("qven", lambda id: id == "small")
    assert "qwen" not in found.value.message


def test_an_unknown_name_is_compared_with_few_of_many_models() -> None:
    """Comparing it with a thousand would take a tenth of a second, in which no stream goes on."""
    ids = [f"organisation-{number % 17}/model-{number}-instruct-awq" for number in range(1000)]
    names, compared = ModelNames({id: Preset(id=id) for id in ids}), 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal compared
        compared += event == "call" and frame.f_code is difflib.SequenceMatcher.real_quick_ratio.__code__

    sys.setprofile(count)
    try:
        with pytest.raises(ModelNotFound, match="did you mean organisation-9/model-876-instruct-awq or "):
            names.find("organisation-9/model-876-instruct-gptq")
    finally:
        sys.setprofile(None)
    assert 0 < compared <= MOST_COMPARED


def test_a_long_unknown_name_is_compared_with_no_other() -> None:
    known = "m" * COMPARED_LENGTH
    names = ModelNames({known: Preset(id=known)})
    with pytest.raises(ModelNotFound, match=f"did you mean {known}"):
        names.find("n" + known[1:])
    with pytest.raises(ModelNotFound, match="GET /v1/models lists all models"):
        names.find("n" + known)


def test_a_model_that_the_key_may_not_use_is_unknown() -> None:
    with pytest.raises(ModelNotFound):
        NAMES.find("small", lambda id: id != "small")


def test_the_path_wins_then_the_body_then_the_query_then_the_default() -> None:
    assert pick(path="small", body="qwen", query="SMALL") == ("small", "small")
    assert pick(body="qwen") == ("Qwen/Qwen3-8B", "qwen")
    assert pick(query="coder", default="small") == ("Qwen/Qwen3-8B", "coder")
    assert pick(default="small") == ("small", "small")
    assert pick(body="qwen", query="coder") == ("Qwen/Qwen3-8B", "qwen")


def test_body_and_query_must_not_disagree() -> None:
    with pytest.raises(BadRequest) as found:
        pick(body="qwen", query="small")
    assert found.value.reason == "model_conflict"


def test_the_only_model_needs_no_name_and_one_of_several_does() -> None:
    assert pick(allowed=lambda id: id == "small") == ("small", "small")
    with pytest.raises(BadRequest) as found:
        pick()
    assert found.value.reason == "model_missing"
    assert "start the router with --default-model" in str(found.value)


def test_an_unknown_name_falls_back_only_if_it_may() -> None:
    with pytest.raises(ModelNotFound):
        pick(body="gpt-4", default="small")
    assert pick(body="gpt-4", default="small", fall_back=True) == ("small", "gpt-4")


FRENCH = AdapterSource(name="french", path="/f")


def test_a_name_with_an_adapter_means_its_model_and_an_id_with_that_spelling_stands_before_it() -> None:
    presets = {
        "m": Preset(id="m", path="/m", aliases=("em",), adapters=(FRENCH,)),
        "n": Preset(id="n", path="/n", adapters=(FRENCH,)),
        "n@french": Preset(id="n@french", path="/x"),
    }
    names = ModelNames(presets)
    for name, id, adapter in (
        ("m@french", "m", "french"),
        ("em@french", "m", "french"),
        ("M@French", "m", "french"),
        ("m@french:latest", "m", "french"),
        ("m", "m", ""),
        ("n@french", "n@french", ""),
    ):
        assert (names.find(name), names.adapter(name)) == (id, adapter), name
    with pytest.raises(ModelNotFound, match="did you mean m@french"):
        names.find("m@frensh")
    with pytest.raises(ModelNotFound, match="or m@french or"):
        names.find("french")
    settings = {"default": "", "fall_back": False, "allowed": lambda _: True}
    with pytest.raises(BadRequest, match="name one"):
        names.choose(path=None, body="m@french", query="m", **settings)  # type: ignore[arg-type]


def test_the_name_of_an_adapter_that_one_model_has_means_this_model_with_it() -> None:
    same = AdapterSource(name="n", path="/n")
    names = ModelNames({"m": Preset(id="m", path="/m", adapters=(FRENCH, same)), "n": Preset(id="n", path="/n")})
    for name, id, adapter in (("french", "m", "french"), ("French", "m", "french"), ("m", "m", ""), ("n", "n", "")):
        assert (names.find(name), names.adapter(name)) == (id, adapter), name
