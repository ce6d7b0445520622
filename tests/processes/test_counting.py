"""Requests that only count tokens take a worker like all others: they load the model, where it may be loaded."""

from pathlib import Path

import pytest

from tests.processes.routers import Router, error_of
from worker.protocol.routes import ROUTES

COUNTING = (
    "/tokenize", "/detokenize", "/apply-template", "/v1/chat/completions/input_tokens",
    "/chat/completions/input_tokens", "/v1/responses/input_tokens", "/responses/input_tokens",
    "/v1/messages/count_tokens", "/count_token", "/worker_get_conv_template",
)  # fmt: skip


def test_every_counting_path_is_answered_by_a_worker() -> None:
    assert {route.path for route in ROUTES if route.worker and route.path in COUNTING} == set(COUNTING)


@pytest.mark.asyncio(loop_scope="session")
async def test_counting_loads_the_model_and_is_400_where_autoload_is_off(up: Router, tmp_path: Path) -> None:
    await up.serve(tmp_path, {"a": {}, "manual": {"autoload": "off"}})
    assert (await up.client.post("/tokenize", json={"model": "a", "content": "x"})).status_code == 200
    assert (await up.status("a"))["value"] == "loaded"
    for path in COUNTING:
        refused = await up.client.post(path, json={"model": "manual", "content": "x", "messages": []})
        assert refused.status_code == 400, (path, refused.text)
    refused = await up.client.post("/tokenize", json={"model": "manual", "content": "x"})
    assert error_of(refused) == (400, "model_not_loaded")
    assert (await up.status("manual"))["value"] == "unloaded"
