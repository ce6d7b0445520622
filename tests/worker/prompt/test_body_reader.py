"""BodyFields: strict reading of a JSON body, with a report of unread fields."""

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.errors import InvalidJson, InvalidValue, UnsupportedField
from worker.prompt import body_reader
from worker.prompt.body_reader import BodyFields
from worker.protocol import json_faults
from worker.protocol.dialects.generation_fields import NEUTRAL, NO_OPS
from worker.protocol.schema import array, choice, flag, integer, number, one_of, record, text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": "\\ud800"}',
        b'{"a": "\\udc00\\ud800"}',
        b'{"a": "\xed\xa0\x80"}',
        b'\xef\xbb\xbf{"a": 1}',
        b'{"a": ' + b"[" * 2000 + b"]" * 2000 + b"}",
        b'{"a": 1} trailing',
        b"{'a': 1}",
    ],
)
def test_anything_but_strict_json_is_rejected(body: bytes) -> None:
    with pytest.raises(InvalidJson) as caught:
        body_reader.parse(body)
    assert (caught.value.status, caught.value.reason) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b'{"a": "caf\xe9"}', "it is not UTF-8 (byte 10)"),
        (
            b'{"a": "b \\ud83d"}',
            "a string has half a surrogate pair (byte 9), as of a text that was cut inside an emoji",
        ),
        (b'{"a": "\\ud83d\\ude00 \\ude00"}', "a string has half a surrogate pair (byte 20)"),
        (b'{"a": 1} \\ud83d', "unexpected content after document"),
    ],
)
def test_a_text_that_is_no_unicode_is_named(body: bytes, fault: str) -> None:
    with pytest.raises(InvalidJson) as caught:
        body_reader.parse(body)
    assert str(caught.value).startswith(f"the request body is not valid JSON: {fault}")


def test_the_last_of_equal_keys_wins_as_in_the_router() -> None:
    assert body_reader.parse(b'{"a": 1, "a": 2}') == {"a": 2}


def test_json_has_at_most_200_levels() -> None:
    def nested(levels: int) -> bytes:
        return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"

    assert body_reader.parse(nested(200))["a"]
    assert body_reader.parse(b'{"a": [' + b",".join([b"{}"] * 500) + b"]}")["a"], "many objects are not deep ones"
    with pytest.raises(InvalidJson, match="nested too deeply: at most 200 levels"):
        body_reader.parse(nested(201))


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (b"[]", json_faults.MAX_OBJECTS),
        (b'{"a": "b"}', json_faults.MAX_OBJECTS),
        (b"1", json_faults.MAX_VALUES),
        (b'"b"', json_faults.MAX_VALUES),
        (b'"b, [{"', json_faults.MAX_VALUES),
    ],
)
def test_a_body_with_too_many_values_is_rejected_before_it_is_parsed(value: bytes, count: int) -> None:
    body = b'{"a": [' + b",".join([value] * count)
    with pytest.raises(InvalidValue, match="the request body has more than"):
        body_reader.parse(body)
    with pytest.raises(InvalidJson):  # the end is missing
        body_reader.parse(body[: len(body) // 2])


JSON = st.recursive(
    st.none() | st.integers() | st.text('a",[{}]\\é'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('a",[{}]\\é'), inner),
)


def without_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(index): without_texts(member) for index, member in enumerate(value.values())}
    if isinstance(value, list):
        return [without_texts(member) for member in value]
    return "" if isinstance(value, str) else value


@given(st.dictionaries(st.text(), JSON))
def test_marks_inside_of_texts_are_no_values(body: dict[str, Any]) -> None:
    marks = json_faults._outside_strings(json_faults._marks(json.dumps(body).encode()))
    expected = "".join(mark for mark in json.dumps(without_texts(body)) if mark in ",[{")
    assert marks.decode() == expected


def test_a_text_may_have_many_brackets_and_commas() -> None:
    text = '[{"a": 1}, ' * json_faults.MAX_OBJECTS
    assert body_reader.parse(json.dumps({"a": text}).encode()) == {"a": text}


def test_an_error_about_json_does_not_repeat_the_body() -> None:
    with pytest.raises(InvalidJson) as caught:
        body_reader.parse(b'{"secret": hunter2}')
    assert "hunter2" not in caught.value.message
    assert "secret" not in caught.value.message


NUMBERS = {
    "number": (number(0, 2), "a number between 0 and 2", [True, False, "1", [], {}, -0.1, 2.1, 10**400]),
    "integer": (integer(1, 10), "an integer between 1 and 10", [True, "1", 1.5, [], {}, 0, 11, 1e300]),
}


@pytest.mark.parametrize(("read", "value"), [(read, value) for read in NUMBERS for value in NUMBERS[read][2]])
def test_a_number_is_a_number_and_an_integer_is_whole_within_its_range(read: str, value: Any) -> None:
    schema, words, _ = NUMBERS[read]
    with pytest.raises(InvalidValue, match=f"x must be {words}") as caught:
        getattr(BodyFields({"x": value}, {"x": schema}), read)("x")
    assert caught.value.param == "x"


@pytest.mark.parametrize(("value", "whole"), [(3, 3), (3.0, 3), (10, 10)])
def test_a_whole_float_is_an_integer(value: Any, whole: int) -> None:
    assert BodyFields({"x": value}, {"x": integer(1, 10)}).integer("x") == whole


@pytest.mark.parametrize("body", [{}, {"x": None}])
def test_null_is_absent(body: dict[str, Any]) -> None:
    for read, schema in {"flag": flag(), "text": text(), "mapping": record({}), "sequence": array({})}.items():
        assert getattr(BodyFields(body, {"x": schema}), read)("x") is None
    assert BodyFields(body, {"x": number(1, 2)}).number("x") is None
    assert BodyFields(body, {"x": integer(1)}).integer("x") is None
    assert BodyFields(body, {"x": choice(["a"])}).choice("x") is None
    BodyFields(body, {"x": one_of([])}).refuse("x", "never")


def test_an_error_of_a_choice_names_the_allowed_values_only() -> None:
    with pytest.raises(InvalidValue, match="x must be one of low, high") as caught:
        BodyFields({"x": "hunter2"}, {"x": choice(["low", "high"])}).choice("x")
    assert "hunter2" not in caught.value.message


def test_no_ops_and_nulls_are_accepted_without_a_report() -> None:
    body = dict.fromkeys(NO_OPS, "anything") | {"store": False, "frobnicate": None}
    assert BodyFields(body, {}).check_unknown(strict=True) == ()


def test_a_field_outside_the_table_cannot_be_read() -> None:
    with pytest.raises(AssertionError, match="odd"):
        BodyFields({"odd": 1}, {"x": flag()}).take("odd")


def test_an_unread_field_of_the_table_is_detected() -> None:
    with pytest.raises(AssertionError, match="x"):
        BodyFields({}, {"x": flag()}).check_unknown(strict=False)


@pytest.mark.parametrize("name", NEUTRAL)
def test_an_unsupported_field_is_rejected_unless_neutral(name: str) -> None:
    is_neutral = jsonschema.Draft202012Validator(NEUTRAL[name]).is_valid
    for value in (True, False, 0, 1, -1, 0.5, "", "x", [], ["x"], {}, {"x": 1}):
        if is_neutral(value):
            assert BodyFields({name: value}, {}).check_unknown(strict=True) == ()
        else:
            with pytest.raises(UnsupportedField) as caught:
                BodyFields({name: value}, {}).check_unknown(strict=False)
            assert (caught.value.reason, caught.value.param) == ("unsupported_parameter", name)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"use_beam_search": True}, "use_beam_search is not supported; leave it out"),
        ({"functions": [{"name": "f"}]}, "functions is not supported; send tools"),
        ({"priority": 1}, "priority is not supported in a request; set it in the model's preset"),
    ],
)
def test_a_refusal_names_the_remedy_that_the_schema_describes(body: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedField) as caught:
        BodyFields(body, {}).check_unknown(strict=False)
    assert caught.value.message == message
