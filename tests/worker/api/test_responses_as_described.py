"""Answers of workers match the OpenAPI schemas exactly, in every frame."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from router.api.openapi import document
from tests.processes.questioner import closed
from tests.worker.fake_engine import FakeEngine
from tests.worker.serving import serving, tokenizer
from tests.worker.speaking import SAID, SCHEMA, THINKING, TOOLS, Speaking

pytestmark = pytest.mark.slow

DOCUMENT = closed(document())
HI = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "weather", "parameters": SCHEMA}
TOLD = {"type": "function", "function": FUNCTION}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": HI, "tools": [TOLD], "stream_options": {"include_usage": True}},
        {"messages": HI, "return_token_ids": True, "logprobs": True, "return_tokens_as_token_ids": True},
        {"messages": HI, "prompt_logprobs": 2, "n": 2},
        {"messages": HI, "n": 2, "logprobs": True, "top_logprobs": 2, "timings_per_token": True},
        {"messages": HI, "return_progress": True},
    ],
    "/v1/completions": [
        {"prompt": ["a", "b"], "logprobs": 2, "echo": True, "stream_options": {"include_usage": True}},
        {"prompt": "a", "return_progress": True, "timings_per_token": True},
        {"prompt": ["a", "b"], "return_token_ids": True, "logprobs": 1, "return_tokens_as_token_ids": True},
        {"prompt": "ab", "prompt_logprobs": 1},
    ],
    "/completion": [
        {"prompt": "a", "n_probs": 2, "return_tokens": True},
        {"prompt": ["a", "b"], "n_predict": 3},
        {"prompt": "a", "n_probs": 2, "post_sampling_probs": True},
    ],
    "/v1/responses": [
        {"input": "hi", "tools": [{"type": "function", **FUNCTION}], "top_logprobs": 2},
        {"input": "hi", "return_progress": True, "timings_per_token": True},
    ],
    "/v1/messages": [{"messages": HI, "tools": [{"name": "weather", "input_schema": SCHEMA}]}],
    "/api/chat": [{"messages": HI, "tools": [TOLD], "logprobs": True, "top_logprobs": 1}, {}],
    "/api/generate": [{"prompt": "hi"}, {"prompt": "hi", "raw": True}, {}],
    "/invocations": [
        {"inputs": "hi", "parameters": {"details": True, "top_n_tokens": 2}},
        {"inputs": "hi"},
        {"inputs": ["hi", "ho"], "parameters": {"n": 2, "top_n_tokens": 1, "decoder_input_details": True}},
        {"messages": HI, "stream_options": {"include_usage": True}},
        {"prompt": "hi"},
    ],
}


def judge(path: str, status: int, media: str) -> jsonschema.Draft202012Validator:
    content = DOCUMENT["paths"][path]["post"]["responses"][str(status)]["content"]
    return jsonschema.Draft202012Validator({**content[media]["schema"], "components": DOCUMENT["components"]})


def lines(body: str) -> Iterator[Any]:
    """Return the data of the events or lines of a stream."""
    for line in body.splitlines():
        if line.startswith(("{", "data: {")):
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("speaks", [False, True])
async def test_answers_and_frames_match_the_schemas(path: str, *, speaks: bool) -> None:
    engine = Speaking(SAID) if speaks else FakeEngine(tokenizer())
    async with serving(engine, chat_template=THINKING if speaks else TOOLS) as world:
        for body in BODIES[path]:
            whole = {name: value for name, value in body.items() if name != "stream_options"}
            async with world.client.post(world.url + path, json={**whole, "stream": False}) as answer:
                assert answer.status == 200, await answer.text()
                judge(path, 200, answer.content_type).validate(await answer.json())
            if "prompt_logprobs" in body or "n" in body.get("parameters", {}):  # which cannot be streamed
                continue
            async with world.client.post(world.url + path, json={**body, "stream": True}) as answer:
                received = await answer.text()
                media = answer.content_type
            if media == "application/json":  # an Ollama call without a prompt only loads the model
                assert not body
                judge(path, 200, media).validate(json.loads(received))
                continue
            schema = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"][media]["schema"]
            frame = schema.get("contentSchema") or contained(schema["properties"]["data"])
            validator = jsonschema.Draft202012Validator({**frame, "components": DOCUMENT["components"]})
            frames = list(lines(received))
            assert frames
            for each in frames:
                validator.validate(each)


def contained(data: Any) -> Any:
    """Return the schema of an event's data."""
    return data["contentSchema"] if "contentSchema" in data else data["anyOf"][0]["contentSchema"]


async def test_an_undescribed_member_is_detected() -> None:
    validator = judge("/v1/messages/count_tokens", 200, "application/json")
    validator.validate({"input_tokens": 3})
    for wrong in ({"input_tokens": 3, "odd": 1}, {}, {"input_tokens": "3"}):
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(wrong)


async def test_two_names_of_one_field_are_rejected() -> None:
    async with serving(FakeEngine(tokenizer())) as world:
        status, _, received = await world.post("/embedding", {"input": "a", "content": [{}]})
        assert (status, received["error"]["param"]) == (400, "content")
