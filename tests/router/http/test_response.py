"""Rendering of error responses."""

import json

import pytest

from router.errors import BadRequest
from router.http.response import json_bytes, render_error
from worker.protocol.dialects import Dialect


@pytest.mark.parametrize("dialect", Dialect)
def test_rendering_an_error_does_not_change_it(dialect: Dialect) -> None:
    error = BadRequest("no model at /models/\udcff", param="model")
    _, body = render_error(error, dialect, "r1")
    assert "no model at /models/?" in json.dumps(json.loads(body))
    assert error.message == "no model at /models/\udcff"


def test_any_value_becomes_json() -> None:
    assert json_bytes({"a": [1, 0.5, "\u00fc", None, True]}) == '{"a":[1,0.5,"\u00fc",null,true]}'.encode()
    assert json.loads(json_bytes({"a": "x\ud83d", "b": 10**30, "c": float("nan")})) == {
        "a": "x?",
        "b": 10**30,
        "c": None,
    }
