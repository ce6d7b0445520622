"""Rendering of error responses."""

import json

import pytest

from router.errors import BadRequest
from router.http.response import render_error
from worker.protocol.dialects import Dialect


@pytest.mark.parametrize("dialect", Dialect)
def test_rendering_an_error_does_not_change_it(dialect: Dialect) -> None:
    error = BadRequest("no model at /models/\udcff", param="model")
    _, body = render_error(error, dialect, "r1")
    assert "no model at /models/?" in json.dumps(json.loads(body))
    assert error.message == "no model at /models/\udcff"
