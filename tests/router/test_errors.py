"""The errors of the router agree with the table of errors in worker/protocol/errors.py."""

from collections.abc import Iterator

import pytest

from router.errors import ApiError
from worker.protocol.errors import ERRORS

# Statuses of errors for which a retry may help. Others fail again in the same way, or have cost too much already.
RETRIED = {408, 429, 502, 503}


def every(kind: type[ApiError] = ApiError) -> Iterator[type[ApiError]]:
    for each in kind.__subclasses__():
        yield each
        yield from every(each)


@pytest.mark.parametrize("kind", [*every()], ids=lambda kind: kind.__name__)
def test_only_errors_of_retryable_statuses_have_should_retry(kind: type[ApiError]) -> None:
    assert kind.should_retry is (kind.status in RETRIED)
    assert any((row.status, row.type) == (kind.status, kind.type) and kind.reason in row.reasons for row in ERRORS)
