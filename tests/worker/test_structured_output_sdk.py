"""The official OpenAI client's helpers for structured output and tools, against a real engine with random weights."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import openai
import pydantic
import pytest
import torch

from tests import tiny
from tests.worker.loaded import load, options
from worker.engine.engine import TransformersEngine
from worker.server import Server

torch.set_num_threads(1)
HELLO: Any = [{"role": "user", "content": "hi"}]
Answer = TypeVar("Answer")


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    age: int = pydantic.Field(ge=0, le=30)
    names: list[Literal["Ada", "Bob"]] = pydantic.Field(max_length=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=768)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[TransformersEngine]:
    made = load(folder, ctx_size=768, parallel=8)
    yield made
    asyncio.run(made.close())


@contextlib.asynccontextmanager
async def serving(engine: TransformersEngine, folder: Path, **changes: Any) -> AsyncIterator[str]:
    """Its address."""
    server = Server(
        engine, engine.tokenizer, options(folder, name="tiny", **changes), token=None, announce=lambda event: None
    )
    address = await server.start()
    try:
        yield address.replace("tcp:", "http://") + "/v1"
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def asking(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def in_a_thread(url: str, ask: Callable[[openai.OpenAI], Answer]) -> Answer:
    def run() -> Answer:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return ask(client)

    return await asyncio.to_thread(run)


async def test_an_answer_parses_as_the_callers_own_type(engine: TransformersEngine, folder: Path) -> None:
    async with serving(engine, folder) as url, asking(url) as client:
        asked = [
            client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Pet, seed=seed, max_tokens=400)
            for seed in range(8)
        ]
        for answer in await asyncio.gather(*asked):
            (choice,) = answer.choices
            assert choice.finish_reason == "stop"
            assert isinstance(choice.message.parsed, Pet)


async def test_a_streamed_answer_parses_as_the_callers_own_type(engine: TransformersEngine, folder: Path) -> None:
    async with serving(engine, folder) as url, asking(url) as client:
        seen = ""
        async with client.chat.completions.stream(
            model="tiny", messages=HELLO, response_format=Pet, seed=3, max_tokens=400
        ) as stream:
            async for event in stream:
                if event.type == "content.delta":
                    seen += event.delta
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == Pet.model_validate_json(seen)


async def test_the_synchronous_client_parses_too(engine: TransformersEngine, folder: Path) -> None:
    def ask(client: openai.OpenAI) -> Pet | None:
        answer = client.chat.completions.parse(
            model="tiny", messages=HELLO, response_format=Pet, seed=1, max_tokens=400
        )
        return answer.choices[0].message.parsed

    def ask_for_a_stream(client: openai.OpenAI) -> Pet | None:
        with client.chat.completions.stream(
            model="tiny", messages=HELLO, response_format=Pet, seed=1, max_tokens=400
        ) as stream:
            return stream.get_final_completion().choices[0].message.parsed

    async with serving(engine, folder) as url:
        whole = await in_a_thread(url, ask)
        assert whole == await in_a_thread(url, ask_for_a_stream)
        assert isinstance(whole, Pet)


async def test_every_choice_of_a_request_is_held_to_it(engine: TransformersEngine, folder: Path) -> None:
    async with serving(engine, folder) as url, asking(url) as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=HELLO, n=5, seed=2, max_tokens=200, extra_body={"guided_regex": "[xyz]{4,9}!"}
        )
        texts = [choice.message.content or "" for choice in answer.choices]
        assert all(text.endswith("!") and set(text) <= set("xyz!") for text in texts)
        assert len(set(texts)) > 1


async def test_a_text_completion_is_held_to_it_too(engine: TransformersEngine, folder: Path) -> None:
    async with serving(engine, folder) as url, asking(url) as client:
        answer = await client.completions.create(
            model="tiny", prompt=["a", "b"], max_tokens=20, logprobs=0, extra_body={"guided_choice": ["ja", "nein"]}
        )
        assert {choice.text for choice in answer.choices} <= {"ja", "nein"}
        answer = await client.completions.create(
            model="tiny", prompt="a", max_tokens=99, seed=4, extra_body={"response_format": {"type": "json_object"}}
        )
        assert answer.choices[0].finish_reason == "length" or isinstance(json.loads(answer.choices[0].text), dict)


async def test_what_cannot_be_compiled_is_a_bad_request_streamed_or_not(
    engine: TransformersEngine, folder: Path
) -> None:
    bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "objekt"}}}
    async with serving(engine, folder) as url, asking(url) as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="objekt") as caught:
                await client.chat.completions.create(model="tiny", messages=HELLO, response_format=bad, stream=stream)
            assert caught.value.param == "response_format.json_schema"
        fine = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=3)
        assert fine.usage is not None
        assert fine.usage.completion_tokens == 3
