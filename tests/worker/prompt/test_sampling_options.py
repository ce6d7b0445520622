"""Precedence of sampling parameters: request, preset, checkpoint, API default."""

import re
from typing import Any

import pytest

from worker.errors import InvalidValue, StartError, UnsupportedField
from worker.interface import SamplingParams
from worker.prompt import sampling_options
from worker.prompt.body_reader import BodyFields
from worker.prompt.sampling_options import SamplingDefaults
from worker.protocol.dialects.generation_fields import GRAMMAR, SAMPLING
from worker.protocol.events import Exit


def options(
    body: dict[str, Any], defaults: SamplingDefaults | None = None, seed: int | None = None
) -> tuple[SamplingParams, tuple[str, ...]]:
    return sampling_options.read(
        BodyFields(body, SAMPLING), defaults or SamplingDefaults(), vocab_size=100, logprobs=None, seed=seed
    )


def read(body: dict[str, Any], defaults: SamplingDefaults | None = None, seed: int | None = None) -> SamplingParams:
    return options(body, defaults, seed)[0]


def defaults_of(preset: str, checkpoint: dict[str, Any]) -> SamplingDefaults:
    return sampling_options.defaults(preset, checkpoint, vocab_size=100)


def stop(body: dict[str, Any], defaults: SamplingDefaults | None = None) -> tuple[str, ...]:
    return options(body, defaults)[1]


def test_the_request_precedes_the_preset_and_the_preset_the_checkpoint() -> None:
    checkpoint = {"temperature": 0.6, "top_k": 50, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}
    defaults = defaults_of('{"temp": 0.3, "top-k": 20}', checkpoint)
    expected = SamplingParams(temperature=0.2, top_k=20, top_p=0.9, min_p=0.1, repetition_penalty=1.1)
    assert read({"temperature": 0.2}, defaults) == expected


def test_every_key_of_a_preset_has_its_effect() -> None:
    preset = (
        '{"temp": 0.1, "top-k": 2, "top-p": 0.3, "min-p": 0.4, "repeat-penalty": 1.5, "repeat-last-n": 6,'
        ' "presence-penalty": 0.7, "frequency-penalty": 0.8, "stop": ["END", "FIN"]}'
    )
    defaults = defaults_of(preset, {})
    assert read({}, defaults) == SamplingParams(
        temperature=0.1,
        top_k=2,
        top_p=0.3,
        min_p=0.4,
        repetition_penalty=1.5,
        repeat_last_n=6,
        presence_penalty=0.7,
        frequency_penalty=0.8,
    )
    assert stop({}, defaults) == ("END", "FIN")
    assert stop({"stop": "x"}, defaults) == ("x",)
    assert stop({"stop": []}, defaults) == ()


MEMBERS = '{"logit-bias": {"5": 1}, "ignore-eos": true, "samplers": ["top_k"], "grammar": "root ::= x"}'
TABLE = {**SAMPLING, **GRAMMAR, "reasoning_format": {}, "include_reasoning": {}, "tools": {}, "tool_choice": {}}


def test_a_body_gets_the_members_of_the_preset_that_it_lacks() -> None:
    defaults = defaults_of(MEMBERS, {})
    added = {"logit_bias": {"5": 1}, "ignore_eos": True, "samplers": ["top_k"], "grammar": "root ::= x"}
    assert defaults.complete({"n": 1}, TABLE) == {"n": 1, **added}
    own = {"logit_bias": {}, "ignore_eos": False, "samplers": ["top_p"], "grammar": "root ::= y"}
    assert defaults.complete(own, TABLE) == own
    assert defaults.complete({}, {"ignore_eos": {}}) == {"ignore_eos": True}, "the call has no others"
    schema = {"type": "object"}
    assert defaults_of('{"json-schema": {"type": "object"}}', {}).complete({}, TABLE)["json_schema"] == schema
    assert read(defaults.complete({}, SAMPLING), defaults) == SamplingParams(
        logit_bias={5: 1.0}, ignore_eos=True, temperature_last=False
    )


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "text"}},
        {"json_schema": {}},
        {"guided_regex": "x"},
        {"tools": [{}]},
        {"tools": [{}], "tool_choice": "auto"},
    ],
)
def test_a_request_with_a_grammar_or_tools_gets_no_grammar_of_the_preset(body: dict[str, Any]) -> None:
    assert "grammar" not in defaults_of(MEMBERS, {}).complete(body, TABLE)
    assert "grammar" in defaults_of(MEMBERS, {}).complete({"tools": [{}], "tool_choice": "none"}, TABLE)


def test_a_request_without_reasoning_needs_it_separated() -> None:
    defaults = defaults_of('{"reasoning-format": "none"}', {})
    assert defaults.complete({}, TABLE) == {"reasoning_format": "none"}
    assert defaults.complete({"include_reasoning": False}, TABLE) == {"include_reasoning": False}


def test_do_sample_false_in_a_checkpoint_means_greedy_by_default() -> None:
    defaults = defaults_of("", {"do_sample": False, "temperature": 0.7, "top_k": 5, "repetition_penalty": 1.2})
    assert read({}, defaults) == SamplingParams(temperature=0.0, repetition_penalty=1.2)
    assert read({"temperature": 0.5}, defaults) == SamplingParams(temperature=0.5, repetition_penalty=1.2)
    ngrams = defaults_of("", {"do_sample": False, "no_repeat_ngram_size": 3})
    assert read({}, ngrams).no_repeat_ngram_size == 3
    assert read({"no_repeat_ngram_size": 0}, ngrams).no_repeat_ngram_size == 0
    with pytest.raises(InvalidValue, match="no_repeat_ngram_size must be"):
        read({"no_repeat_ngram_size": 65}, ngrams)


def test_a_checkpoint_without_sampling_values_changes_nothing() -> None:
    assert defaults_of("", {"eos_token_id": 2, "temperature": None}) == SamplingDefaults()


def test_invalid_values_of_a_checkpoint_are_ignored() -> None:
    assert defaults_of("", {"temperature": -3, "top_p": "much", "top_k": 7}).tuning == {"top_k": 7}


@pytest.mark.parametrize(
    ("preset", "named"),
    [
        ("[1]", "JSON object"),
        ("{", "JSON object"),
        ('{"heat": 1}', "heat"),
        ('{"temp": "hot"}', "temperature"),
        ('{"top-p": 2}', "top_p"),
        ('{"stop": [1]}', "stop"),
        ('{"logit-bias": {"100": 1}}', "token ids outside this model's vocabulary of 100 tokens: 100"),
        ('{"samplers": ["best"]}', "samplers must be names"),
        ('{"samplers": ["temperature", "penalties"]}', "samplers in this order are not supported"),
        ('{"json-schema": "{"}', "json_schema must be a JSON schema"),
        ('{"grammar": "x", "json-schema": "{}"}', "both constrain the answer"),
    ],
)
def test_an_invalid_preset_prevents_the_start(preset: str, named: str) -> None:
    with pytest.raises(StartError, match=named) as caught:
        defaults_of(preset, {})
    assert caught.value.exit == Exit.USAGE


def test_minus_one_is_neutral_for_top_k_and_seed() -> None:
    assert read({"top_k": -1}).top_k == 0
    assert read({"seed": -1}, seed=5).seed is None


def test_a_top_p_of_zero_keeps_the_most_likely_token() -> None:
    assert 0 < read({"top_p": 0}).top_p < 1e-3


def test_both_names_of_the_repetition_penalty_are_one_field() -> None:
    assert read({"repeat_penalty": 1.2}).repetition_penalty == 1.2
    assert read({"repeat_penalty": 1.2, "repetition_penalty": 1.2}).repetition_penalty == 1.2
    with pytest.raises(InvalidValue, match="send one of them"):
        read({"repeat_penalty": 1.2, "repetition_penalty": 1.3})


def test_sixteen_stops_are_accepted() -> None:
    stops = [str(number) for number in range(16)]
    assert stop({"stop": stops}) == tuple(stops)


@pytest.mark.parametrize("value", [{"1": -100, "99": 5.5}, [[1, -100], [99, 5.5]], [[1, False], [99.0, 5.5]]])
def test_a_bias_is_an_object_or_pairs(value: Any) -> None:
    assert read({"logit_bias": value}).logit_bias == {1: -100.0, 99: 5.5}


REJECTED: dict[str, list[Any]] = {
    "stop": ["", [""], ["a"] * 17, [1], {"a": 1}, 5, ["a", None]],
    "logit_bias": [
        {"1": 101}, {"1": True}, {"1": "5"}, {"-1": 1}, {"100": 1}, {"\u0663": 1}, {"9" * 5000: 1}, [["1", 2]],
        [[True, 2]], {str(number): 1 for number in range(1025)},
    ],
    "samplers": [["top_q"], ["top_k", "top_k"], "kk", "kq", [5], {"top_k": 1}, 5],
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in REJECTED.items() for value in values],
    ids=lambda each: str(each)[:20],
)
def test_an_invalid_stop_bias_or_sampler_is_rejected(field: str, value: Any) -> None:
    with pytest.raises(InvalidValue) as caught:
        read({field: value})
    assert caught.value.param == field


# llama-server's `samplers`

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


def test_a_sampler_of_older_clients_has_no_effect() -> None:
    older = ["top_k", "tfs_z", "typical_p", "top_p", "min_p", "temperature"]
    assert read({**WARM, "samplers": older}) == read({**WARM, "samplers": "kypmt"})
    assert read({**WARM, "samplers": "kfypmt"}) == read({**WARM, "samplers": "kypmt"})


def test_a_sampler_that_is_not_listed_is_disabled() -> None:
    assert read({**WARM, "samplers": ["top_k"]}) == SamplingParams(temperature=1.0, top_k=40)
    assert read({**WARM, "samplers": "p"}) == SamplingParams(top_p=0.95)
    assert read({**WARM, "samplers": ["temperature"]}) == SamplingParams(temperature=0.7)
    assert read({**WARM, "samplers": []}) == read(WARM)


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 0.7, "top_k": 3, "samplers": "ptkm"},
        {"temperature": 0.0, "top_k": 3, "min_p": 0.1, "samplers": "ktm"},
        {"temperature": 0.7, "top_k": 3, "min_p": 0.1, "samplers": "mkt"},
    ],
    ids=str,
)
def test_the_order_of_samplers_without_effect_is_free(body: dict[str, Any]) -> None:
    read(body)


@pytest.mark.parametrize(
    "body", [{**WARM, "samplers": "ektpm"}, {**WARM, "samplers": "ekmpt"}, {**WARM, "samplers": "kpmte"}], ids=str
)
def test_an_unsupported_order_is_rejected(body: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedField) as caught:
        read(body)
    assert caught.value.param == "samplers"


def test_the_reported_order_is_accepted_as_input() -> None:
    for temperature_last in (False, True):
        received = sampling_options.sampler_names({"temperature_last": temperature_last})
        assert read({**WARM, "samplers": received}).temperature_last is temperature_last


@pytest.mark.parametrize(
    ("given", "outside"),
    [
        ({"5": 1, "100": 1}, "100"),
        ({"-1": 1}, "-1"),
        ({"99999999999": 1}, "99999999999"),
        ({"1" * 5000: 1}, "1" * 20),
        ([[7, 1], [100, False], [10**9, 1]], "100, 1000000000"),
        ({str(id): 1 for id in range(100, 120)}, "100, 101, 102, 103, 104, 105, 106, 107, ..."),
    ],
)
def test_biases_of_tokens_outside_the_vocabulary_are_rejected_by_id(given: Any, outside: str) -> None:
    def encode(text: str) -> list[int]:
        return [3] * len(text)

    with pytest.raises(
        InvalidValue, match="vocabulary of 100 tokens: " + re.escape(f"{outside}; remove them")
    ) as error:
        sampling_options.read(
            BodyFields({"logit_bias": given}, SAMPLING), SamplingDefaults(), vocab_size=100, logprobs=None, seed=None,
            encode=encode,
        )  # fmt: skip
    assert error.value.param == "logit_bias"
