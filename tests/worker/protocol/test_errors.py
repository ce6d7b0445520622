"""Bodies and frames of errors."""

import pytest

from worker.errors import InvalidValue
from worker.protocol.dialects import Dialect
from worker.protocol.errors import ERRORS, anthropic_error_type, error_body
from worker.protocol.streams import error_body_frame, error_frame

PATH = "no model at /models/\udcff"  # as Python decodes a byte of a path that is no UTF-8


@pytest.mark.parametrize("dialect", Dialect)
def test_an_error_with_a_lone_surrogate_is_sent_with_a_question_mark(dialect: Dialect) -> None:
    error = InvalidValue(PATH, param="model")
    assert "no model at /models/?" in str(error_body(dialect, error))
    assert "no model at /models/?" in error_frame(dialect, error).decode()
    assert error.message == PATH, "the error itself is not changed"


@pytest.mark.parametrize("dialect", [Dialect.LMI, Dialect.RESPONSES])
def test_a_body_with_an_escaped_lone_surrogate_becomes_a_frame(dialect: Dialect) -> None:
    body = rb'{"message": "\udcff", "error": {"type": "t", "message": "\udcff", "param": null}}'
    assert b'"?"' in error_body_frame(dialect, body)


@pytest.mark.parametrize(
    ("status", "type"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"), (404, "not_found_error"),
     (413, "request_too_large"), (429, "rate_limit_error"), (500, "api_error"), (504, "timeout_error")],
)  # fmt: skip
def test_errors_have_the_types_of_anthropics_documentation(status: int, type: str) -> None:
    assert {anthropic_error_type(row.status, row.type) for row in ERRORS if row.status == status} == {type}
