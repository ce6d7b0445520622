"""One worker with several profiles, each with its own defaults, over a fake engine."""

import json
from typing import Any

import pytest

from tests.worker.serving import Serving, serving
from worker.interface import AdapterChoice, GenerationRequest
from worker.protocol.argv import Profile, Serve
from worker.protocol.routes import PROFILE_HEADER, PROFILES_PATH

pytestmark = pytest.mark.asyncio

TEXT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
# request bodies without sampling parameters, by path
BODIES: dict[str, Any] = {
    "/v1/chat/completions": TEXT, "/v1/completions": {"prompt": "hi"}, "/v1/messages": {**TEXT, "max_tokens": 2},
    "/v1/responses": {"input": "hi"}, "/api/chat": {**TEXT, "stream": False}, "/completion": {"prompt": "hi"},
}  # fmt: skip
KIND = "{% for message in messages %}{{ tone }}{{ message.content }}{% endfor %}"


async def tell(world: Serving, **profile: Any) -> tuple[int, Any]:
    async with world.client.put(world.url + PROFILES_PATH, json=profile) as answer:
        return answer.status, await answer.json()


async def asked(world: Serving, path: str, body: Any, profile: str = "") -> GenerationRequest:
    """Return the request that reached the engine."""
    headers = {PROFILE_HEADER: profile} if profile else {}
    status, _, answer = await world.post(path, body, **headers)
    assert status == 200, answer
    request: GenerationRequest = world.engine.requests[-1]
    return request


@pytest.mark.parametrize("path", BODIES)
async def test_a_profile_sets_the_defaults_of_a_request(path: str) -> None:
    async with serving() as world:
        received = {"temp": 0.25, "stop": ["never"]}
        assert await tell(
            world, name="a", n_predict=7, seed=3, sampling=json.dumps(received), default_adapter="french"
        ) == (200, {})  # fmt: skip
        other, own = await asked(world, path, BODIES[path]), await asked(world, path, BODIES[path], "a")
        most = 2 if path == "/v1/messages" else 7
        assert (own.sampling.temperature, own.sampling.seed, own.stop, own.max_tokens, own.adapter) == (
            0.25, 3, ("never",), most, AdapterChoice("french"),
        )  # fmt: skip
        assert other.sampling.temperature != 0.25
        assert (other.sampling.seed, other.stop, other.adapter) == (None, (), None)


async def test_the_fields_of_a_request_precede_the_profile() -> None:
    async with serving() as world:
        await tell(world, name="a", n_predict=7, seed=3, sampling='{"temp": 0.25}', default_adapter="french")
        said = {"temperature": 0.5, "seed": 4, "max_tokens": 2, "lora": []}
        found = await asked(world, "/v1/chat/completions", {**TEXT, **said}, "a")
        assert (found.sampling.temperature, found.sampling.seed, found.max_tokens) == (0.5, 4, 2)
        assert found.adapter == AdapterChoice(), "none, and not the default one"


async def test_each_profile_has_its_own_template_and_name() -> None:
    async with serving() as world:
        await tell(world, name="a", chat_template=KIND, chat_template_kwargs='{"tone": "kindly "}')
        await tell(world, name="b ü", chat_template=KIND, chat_template_kwargs='{"tone": "curtly "}')
        prompts = []
        for profile in ("a", "b%20%C3%BC"):
            status, _, body = await world.post("/apply-template", TEXT, **{PROFILE_HEADER: profile})
            assert status == 200
            prompts.append(body["prompt"])
        assert prompts == ["kindly hi", "curtly hi"]
        _, _, body = await world.post("/v1/chat/completions", TEXT, **{PROFILE_HEADER: "b%20%C3%BC"})
        assert body["model"] == "b ü"


async def test_a_valid_profile_replaces_the_old_one_and_an_invalid_one_does_not() -> None:
    async with serving() as world:
        await tell(world, name="a", sampling='{"temp": 0.25}')
        for wrong, why in (
            ({"chat_template": "{% for %}"}, "chat"),
            ({"sampling": '{"tempo": 1}'}, "tempo"),
            ({"sampling": '{"grammar": "broken"}'}, "grammar cannot be compiled"),
            ({"chat_template_kwargs": "[]"}, "JSON object"),
            ({"colour": "red"}, "profile"),
        ):
            status, body = await tell(world, name="a", **wrong)
            assert status == 400, wrong
            assert why in body["error"]["message"]
        assert (await asked(world, "/v1/completions", {"prompt": "x"}, "a")).sampling.temperature == 0.25
        await tell(world, name="a", sampling='{"temp": 0.75}')
        assert (await asked(world, "/v1/completions", {"prompt": "x"}, "a")).sampling.temperature == 0.75


async def test_an_unknown_profile_is_rejected() -> None:
    async with serving() as world:
        status, _, body = await world.post("/v1/chat/completions", TEXT, **{PROFILE_HEADER: "x"})
        assert (status, body["error"]["message"]) == (400, "this worker has no profile 'x'")
        headers = {"Authorization": "Bearer wrong"}
        async with world.client.put(world.url + PROFILES_PATH, json={"name": "x"}, headers=headers) as answer:
            assert answer.status == 401


async def test_a_profile_has_the_defaults_of_the_worker_options() -> None:
    mine = {name: field.default for name, field in Profile.__dataclass_fields__.items() if name != "name"}
    serve = Serve.__dataclass_fields__
    assert mine == {name: serve[name].default for name in mine}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
async def test_an_answer_has_the_model_name_of_the_body_or_else_of_the_router(path: str) -> None:
    async with serving() as world:
        body = {**TEXT, "max_tokens": 1, "stream": False}
        _, _, answer = await world.post(path, body, **{"X-Router-Asked": "org%2Fn%C3%A4me"})
        assert answer["model"] == "org/näme"
        _, _, answer = await world.post(path, {**body, "model": "own"}, **{"X-Router-Asked": "other"})
        assert answer["model"] == "own"
