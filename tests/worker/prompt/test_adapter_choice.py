"""Selection of adapters in requests, and replacement of a worker's set of adapters."""

from typing import Any
from urllib.parse import quote

import pytest

from tests.worker.fake_engine import FakeEngine
from tests.worker.serving import Serving, serving, tokenizer
from worker.errors import UnsupportedByModel
from worker.interface import AdapterChoice
from worker.protocol.routes import ADAPTER_HEADER, ADAPTERS_PATH

FRENCH = AdapterChoice("french")
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


async def chosen(world: Serving, path: str, body: Any, **headers: str) -> list[AdapterChoice | None]:
    """Return the adapter choices that reached the engine."""
    before = len(world.engine.requests)
    status, _, answer = await world.post(path, body, **headers)
    assert status == 200, answer
    return [request.adapter for request in world.engine.requests[before:]]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ("french", FRENCH),
        ("", AdapterChoice()),
        (["french"], FRENCH),
        ([], AdapterChoice()),
        ([{"id": 0, "scale": 0.5}], AdapterChoice(number=0, scale=0.5)),
        ([{"id": 0, "scale": 0}, {"id": 2, "scale": 1}], AdapterChoice(number=2)),
        ([{"id": 0, "scale": 0}], AdapterChoice()),
        ([{"name": "french"}], FRENCH),
    ],
)
async def test_an_adapter_is_selected_in_every_form_of_the_clients(given: Any, expected: AdapterChoice | None) -> None:
    async with serving() as world:
        for name in ("adapters", "lora"):
            assert await chosen(world, "/v1/chat/completions", {**CHAT, name: given}) == [expected]
            assert await chosen(world, "/completion", {"prompt": "hi", "n_predict": 1, name: given}) == [expected]
        assert await chosen(world, "/invocations", {"inputs": "hi", "adapters": given}) == [expected]


async def test_each_of_several_inputs_may_have_its_own_adapter() -> None:
    each = [FRENCH, AdapterChoice()]
    async with serving() as world:
        body = {"inputs": ["a", "b"], "adapters": ["french", ""]}
        assert await chosen(world, "/invocations", body) == each
        assert await chosen(world, "/v1/completions", {"prompt": ["a", "b"], "adapters": ["french", ""]}) == each
        status, _, answer = await world.post("/v1/completions", {"prompt": ["a"] * 3, "adapters": ["b", "c"]})
        assert (status, answer["error"]["param"]) == (400, "adapters")


async def test_the_adapter_header_applies_in_every_dialect() -> None:
    header = {ADAPTER_HEADER: quote("français")}
    bodies: dict[str, Any] = {
        "/v1/chat/completions": CHAT,
        "/v1/messages": CHAT,
        "/v1/responses": {"input": "hi", "max_output_tokens": 2},
        "/api/chat": {**CHAT, "stream": False},
        "/generate": {"prompt": "hi", "max_tokens": 2},
        "/invocations": {"inputs": "hi"},
        "/worker_generate": {"prompt": "hi", "max_new_tokens": 2},
    }
    async with serving() as world:
        for path, body in bodies.items():
            assert await chosen(world, path, {"model": "x", **body}, **header) == [AdapterChoice("français")], path
        assert await chosen(world, "/v1/chat/completions", {**CHAT, "lora": "français"}, **header)
        status, _, answer = await world.post("/v1/chat/completions", {**CHAT, "lora": "german"}, **header)
        assert (status, answer["error"]["param"]) == (400, "adapters")


async def test_replacing_the_adapters_reports_unusable_ones() -> None:
    class Without(FakeEngine):
        async def set_adapters(self, sources: Any, default: str = "") -> dict[str, str]:
            raise UnsupportedByModel("served without adapters")

    received = [{"name": "a", "path": "/x"}, {"name": "b", "path": "/broken", "scale": 0.5, "pinned": True}]
    async with serving() as world:
        for bearer, status in ((None, 200), ("wrong", 401)):
            headers = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
            url = world.url + ADAPTERS_PATH
            async with world.client.put(url, json={"adapters": received, "default": "a"}, headers=headers) as answer:
                assert answer.status == status
                assert bearer or await answer.json() == {"problems": {"b": "/broken is no adapter"}}
        assert [(each.name, each.scale, each.pinned) for each in world.engine.adapters] == [
            ("a", 1.0, False),
            ("b", 0.5, True),
        ]
        assert world.engine.default_adapter == "a"
        async with world.client.put(world.url + ADAPTERS_PATH, json={"adapters": [{"nme": "a"}]}) as answer:
            assert answer.status == 400
    async with (
        serving(Without(tokenizer())) as world,
        world.client.put(world.url + ADAPTERS_PATH, json={"adapters": []}) as answer,
    ):
        assert answer.status == 501
