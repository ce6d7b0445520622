"""The route table: every declaration leads to a function, and no two routes have the same method and path."""

from inspect import iscoroutinefunction

import pytest

from router.http import app
from worker.protocol.routes import ROUTES, Route
from worker.server import server


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
