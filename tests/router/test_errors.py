"""What a client may do about an error: the table of the contract, row by row."""

from collections.abc import Iterator

import pytest

from router.errors import ApiError
from worker.protocol.errors import ERRORS

RETRIED = {408, 429, 502, 503}
"""Asking again may help; for all others the same request fails in the same way, or has cost too much already."""


def every(kind: type[ApiError] = ApiError) -> Iterator[type[ApiError]]:
    for each in kind.__subclasses__():
        yield each
        yield from every(each)


@pytest.mark.parametrize("kind", [*every()], ids=lambda kind: kind.__name__)
def test_only_errors_of_retryable_statuses_have_should_retry(kind: type[ApiError]) -> None:
    assert kind.should_retry is (kind.status in RETRIED)
    assert any((row.status, row.type) == (kind.status, kind.type) and kind.reason in row.reasons for row in ERRORS)
