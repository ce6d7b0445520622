"""The OpenAPI document is valid, complete and generated from the tables that requests are served by."""

from collections.abc import Iterator
from inspect import iscoroutinefunction
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from router.api.openapi import document, statuses
from router.errors import ApiError
from router.http import app
from worker.errors import RequestError
from worker.protocol.dialects import Dialect
from worker.protocol.errors import error_body
from worker.protocol.routes import ROUTES, Route, offered, query
from worker.server import server

DOCUMENT = document()


def tree(root: type[Any]) -> Iterator[type[Any]]:
    for kind in root.__subclasses__():
        yield kind
        yield from tree(kind)


KINDS = [*tree(ApiError), *tree(RequestError)]  # all errors that have a status


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (target for name, target in value.items() if name == "$ref")
        value = list(value.values())
    if isinstance(value, list):
        for entry in value:
            yield from references(entry)


@pytest.mark.slow
def test_it_is_valid_openapi() -> None:
    import openapi_spec_validator  # it is slow to import, and only this test uses it

    openapi_spec_validator.validate(DOCUMENT)


@pytest.mark.parametrize("lmi_management", [False, True])
def test_every_route_is_described_and_nothing_else(*, lmi_management: bool) -> None:
    paths = document(lmi_management=lmi_management)["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert described == {(route.method, route.path) for route in offered(lmi_management=lmi_management)}
    names = [operation["operationId"] for methods in paths.values() for operation in methods.values()]
    assert len(set(names)) == len(names)


def test_every_route_of_a_worker_has_schemas_of_its_request_and_response() -> None:
    for route in ROUTES:
        if route.worker:
            assert route.requests, route.path
            assert route.response is not None, route.path
            assert route.response.body is not None or route.always_streams, route.path
            assert (route.response.frame is not None) == route.streams, route.path


def test_every_route_has_a_summary_or_names_its_alternative() -> None:
    for route in ROUTES:
        assert route.summary or (route.response is None and route.instead), route.path


def test_a_route_that_is_not_offered_names_its_alternative_and_has_no_success() -> None:
    for route in ROUTES:
        if route.name == "not_offered":
            operation = DOCUMENT["paths"][route.path][route.method.lower()]
            assert set(operation["responses"]) == {"400", "401", "403", "501"}
            assert route.instead in operation["summary"]


def test_every_reference_has_a_target() -> None:
    for reference in set(references(DOCUMENT)):
        found: Any = DOCUMENT
        for step in reference.removeprefix("#/").split("/"):
            found = found[step]


@pytest.mark.parametrize("dialect", Dialect)
def test_the_errors_of_each_dialect_are_as_described(dialect: Dialect) -> None:
    for kind in KINDS:
        check_error(dialect, kind)


def check_error(dialect: Dialect, kind: Any) -> None:
    error = RequestError("m")
    error.status, error.type, error.reason = kind.status, kind.type, kind.reason
    response = error_body(dialect, error, request_id="r")
    routes = (route for route in ROUTES if route.dialect is dialect and not route.always_streams)
    route = max(routes, key=lambda route: len(statuses(route)))
    for status in statuses(route):
        if status == kind.status:
            named = DOCUMENT["paths"][route.path][route.method.lower()]["responses"][str(status)]["$ref"]
            content = DOCUMENT["components"]["responses"][named.rpartition("/")[2]]["content"]
            schema = {**content["application/json"]["schema"], "components": DOCUMENT["components"]}
            jsonschema.Draft202012Validator(schema).validate(response)


def test_errors_of_a_route_that_always_streams_are_described_as_frames() -> None:
    (route,) = (route for route in ROUTES if route.always_streams)
    responses = DOCUMENT["paths"][route.path][route.method.lower()]["responses"]
    assert set(map(str, statuses(route))) < set(responses)
    for response in responses.values():
        assert list(response["content"]) == ["application/octet-stream"]
    assert "FastChatError" in str(responses["404"]["content"])
    assert "X-Should-Retry" in responses["404"]["headers"]


def test_a_route_of_a_worker_is_described_with_loading_and_autoload() -> None:
    for route in ROUTES:
        if route.worker:
            operation = DOCUMENT["paths"][route.path][route.method.lower()]
            assert operation["description"].startswith("Loads")
            assert "autoload" in query(route)
            assert {"404", "429", "502", "503", "504", "507"} <= set(operation["responses"])


def test_fields_that_a_counting_route_does_not_read_accept_any_value() -> None:
    for name in ("ResponsesInputTokensRequest", "ChatInputTokensRequest"):
        fields = DOCUMENT["components"]["schemas"][name]["properties"]
        assert fields["min_p"] == {}
        assert fields["chat_template_kwargs"] != {}


# The route table.


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_every_handler_resolves_to_a_coroutine_function(route: Route) -> None:
    function = server.function_of(route) if route.worker else app.function_of(route)
    assert iscoroutinefunction(function)


def test_a_method_and_a_path_are_declared_once() -> None:
    keys = [(route.method, route.path) for route in ROUTES]
    assert len(set(keys)) == len(keys)


def test_a_path_with_the_name_of_a_model_reaches_the_worker_at_a_path_without_it() -> None:
    for route in ROUTES:
        if route.worker:
            assert bool(route.upstream) == ("{" in route.path)
            assert "{" not in route.upstream
