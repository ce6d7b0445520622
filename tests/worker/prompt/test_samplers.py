"""llama-server's `samplers`: selection and order."""

from typing import Any

import pytest

from tests.worker.sampled import read
from worker.errors import InvalidValue, UnsupportedField
from worker.interface import SamplingParams
from worker.prompt import sampling_options

WARM = {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.1}
USUAL = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]


def test_llama_servers_own_order_has_temperature_last() -> None:
    asked = SamplingParams(
        temperature=0.7, top_k=40, top_p=0.95, min_p=0.05, repetition_penalty=1.1, temperature_last=True
    )
    assert read({**WARM, "samplers": USUAL}) == asked
    assert read({**WARM, "samplers": "edskypmxt"}) == asked
    assert read({**WARM, "samplers": ["penalties", "top-k", "nucleus", "min-p", "temp"]}) == asked
    assert not read(WARM).temperature_last
    assert not read({**WARM, "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"]}).temperature_last


def test_a_sampler_that_is_not_listed_is_disabled() -> None:
    assert read({**WARM, "samplers": ["top_k"]}) == SamplingParams(temperature=1.0, top_k=40)
    assert read({**WARM, "samplers": "p"}) == SamplingParams(top_p=0.95)
    assert read({**WARM, "samplers": ["temperature"]}) == SamplingParams(temperature=0.7)
    assert read({**WARM, "samplers": []}) == read(WARM)


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 0.7, "samplers": "mtk"},
        {"temperature": 0.7, "top_k": 3, "samplers": "ptkm"},
        {"temperature": 0.0, "top_k": 3, "min_p": 0.1, "samplers": "ktm"},
        {"temperature": 0.7, "top_k": 3, "min_p": 0.1, "samplers": "mkt"},
        {"temperature": 0.7, "samplers": "te"},
    ],
    ids=str,
)
def test_the_order_of_samplers_without_effect_is_free(body: dict[str, Any]) -> None:
    read(body)


@pytest.mark.parametrize(
    "body",
    [
        {**WARM, "samplers": "ektpm"},
        {**WARM, "samplers": "epkmt"},
        {**WARM, "samplers": "ekmpt"},
        {**WARM, "samplers": "kpmte"},
        {"samplers": "ki"},
    ],
    ids=str,
)
def test_an_unsupported_order_is_rejected(body: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedField) as caught:
        read(body)
    assert caught.value.param == "samplers"


@pytest.mark.parametrize("stated", [["top_q"], ["top_k", "top_k"], "kk", "kq", [5], {"top_k": 1}, 5], ids=str)
def test_an_unknown_sampler_is_rejected(stated: Any) -> None:
    with pytest.raises(InvalidValue) as caught:
        read({"samplers": stated})
    assert caught.value.param == "samplers"


def test_the_reported_order_is_accepted_as_input() -> None:
    for temperature_last in (False, True):
        received = sampling_options.sampler_names({"temperature_last": temperature_last})
        assert read({**WARM, "samplers": received}).temperature_last is temperature_last
