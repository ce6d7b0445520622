"""The description of the API: valid, whole, and made of the tables that requests are served by."""

from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import openapi_spec_validator
import pytest

from router.api.openapi import document, statuses
from router.errors import ApiError
from worker.errors import RequestError
from worker.protocol.dialects import Dialect
from worker.protocol.errors import ERRORS, error_body
from worker.protocol.routes import ROUTES, query

DOCUMENT = document()


def tree(root: type[Any]) -> Iterator[type[Any]]:
    for kind in root.__subclasses__():
        yield kind
        yield from tree(kind)


KINDS = [*tree(ApiError), *tree(RequestError)]
"""All errors that have a status."""


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (each for name, each in value.items() if name == "$ref")
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from references(each)


@pytest.mark.slow
def test_it_is_valid_openapi() -> None:
    openapi_spec_validator.validate(DOCUMENT)


def test_every_route_is_described_and_nothing_else() -> None:
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == {(route.method, route.path) for route in ROUTES}
    names = [each["operationId"] for methods in DOCUMENT["paths"].values() for each in methods.values()]
    assert len(set(names)) == len(names)


def test_every_route_that_succeeds_is_described() -> None:
    for route in ROUTES:
        assert route.response is None or route.summary, route.path


def test_every_route_of_a_worker_has_schemas_of_its_request_and_response() -> None:
    for route in ROUTES:
        if route.worker:
            assert route.requests, route.path
            assert route.response is not None, route.path
            assert route.response.body is not None or route.always_streams, route.path
            assert (route.response.frame is not None) == route.streams, route.path


def test_a_route_that_never_succeeds_says_why() -> None:
    for route in ROUTES:
        if route.response is None:
            assert route.instead or route.summary


def test_what_is_not_offered_says_so_and_promises_nothing() -> None:
    for route in ROUTES:
        if route.name == "not_offered":
            operation = DOCUMENT["paths"][route.path][route.method.lower()]
            assert set(operation["responses"]) == {"400", "401", "403", "501"}
            assert route.instead in operation["summary"]


def test_every_reference_leads_somewhere() -> None:
    for reference in set(references(DOCUMENT)):
        found: Any = DOCUMENT
        for step in reference.removeprefix("#/").split("/"):
            found = found[step]


def test_every_error_is_a_row_of_the_table() -> None:
    rows = {(row.status, row.type, reason) for row in ERRORS for reason in row.reasons}
    assert [kind for kind in KINDS if (kind.status, kind.type, kind.reason) not in rows] == []


@pytest.mark.parametrize("face", Dialect)
def test_the_errors_of_each_dialect_are_as_described(face: Dialect) -> None:
    for kind in KINDS:
        check_error(face, kind)


def check_error(face: Dialect, kind: Any) -> None:
    error = RequestError("m")
    error.status, error.type, error.reason = kind.status, kind.type, kind.reason
    response = error_body(face, error, request_id="r")
    routes = (route for route in ROUTES if route.dialect is face and not route.always_streams)
    route = max(routes, key=lambda route: len(statuses(route)))
    for status in statuses(route):
        if status == kind.status:
            named = DOCUMENT["paths"][route.path][route.method.lower()]["responses"][str(status)]["$ref"]
            content = DOCUMENT["components"]["responses"][named.rpartition("/")[2]]["content"]
            schema = {**content["application/json"]["schema"], "components": DOCUMENT["components"]}
            jsonschema.Draft202012Validator(schema).validate(response)


def test_where_clients_read_nothing_but_frames_errors_are_described_as_frames() -> None:
    (route,) = (route for route in ROUTES if route.always_streams)
    responses = DOCUMENT["paths"][route.path][route.method.lower()]["responses"]
    assert set(map(str, statuses(route))) < set(responses)
    for response in responses.values():
        assert list(response["content"]) == ["application/octet-stream"]
    assert "FastChatError" in str(responses["404"]["content"])
    assert "X-Should-Retry" in responses["404"]["headers"]


def test_a_call_that_loads_says_so_and_takes_autoload() -> None:
    for route in ROUTES:
        if route.worker:
            operation = DOCUMENT["paths"][route.path][route.method.lower()]
            assert operation["description"].startswith("Loads")
            assert "autoload" in query(route)
            assert {"404", "429", "502", "503", "504", "507"} <= set(operation["responses"])


def test_what_a_call_that_only_counts_passes_over_is_described_as_anything() -> None:
    for name in ("ResponsesInputTokensRequest", "ChatInputTokensRequest"):
        fields = DOCUMENT["components"]["schemas"][name]["properties"]
        assert fields["min_p"] == {}
        assert fields["chat_template_kwargs"] != {}
