"""The fields of a body that the router reads."""

import pytest

from router.errors import BadRequest
from router.http.pipeline import peek


def test_the_model_of_a_body_is_read() -> None:
    assert peek(b'{"model": "a", "prompt": "\\ud83d\\ude00"}').model == "a"


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b'{"prompt": "b \\ud83d"}', "a string has half a surrogate pair (byte 14), as of a text that was cut inside"),
        (b'{"prompt": "\\ude00"}', "a string has half a surrogate pair (byte 12)"),
        (b'{"prompt": "b', "Input data was truncated"),
        (b'{"model": "\xe9"}', "it is not UTF-8 (byte 11)"),
    ],
)
def test_a_body_that_is_no_json_is_rejected_with_its_fault(body: bytes, fault: str) -> None:
    with pytest.raises(BadRequest) as caught:
        peek(body)
    assert caught.value.reason == "invalid_json"
    assert caught.value.message.startswith(f"the body is not a JSON object: {fault}")
