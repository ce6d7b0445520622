"""The official OpenAI client's helpers for structured output and tools, against a real engine with random weights."""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests import tiny
from tests.worker.clients import openai_client
from tests.worker.loaded import load
from tests.worker.serving import serving
from tests.worker.speaking import THINKING
from tests.worker.speaking import TOOLS as HERMES
from worker.engines.transformers.engine import TransformersEngine

HELLO: Any = [{"role": "user", "content": "hi"}]


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    age: int = pydantic.Field(ge=0, le=30)
    names: list[Literal["Ada", "Bob"]] = pydantic.Field(max_length=2)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransformersEngine]:
    folder = tiny.make("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=768)
    made = load(folder, ctx_size=768, parallel=8)
    yield made
    asyncio.run(made.close())


async def test_an_answer_parses_as_the_callers_own_type(engine: TransformersEngine) -> None:
    async with serving(engine) as world, openai_client(world) as client:
        asked = [
            client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Pet, seed=seed, max_tokens=400)
            for seed in range(3)
        ]
        for answer in await asyncio.gather(*asked):
            (choice,) = answer.choices
            assert choice.finish_reason == "stop"
            assert isinstance(choice.message.parsed, Pet)


async def test_a_grammar_that_does_not_compile_is_a_bad_request(engine: TransformersEngine) -> None:
    bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "objekt"}}}
    async with serving(engine) as world, openai_client(world) as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="objekt") as caught:
                await client.chat.completions.create(model="tiny", messages=HELLO, response_format=bad, stream=stream)
            assert caught.value.param == "response_format.json_schema"


async def test_a_tool_with_parameters_that_do_not_compile_is_a_bad_request(engine: TransformersEngine) -> None:
    odd: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}]
    async with serving(engine, chat_template=HERMES) as world, openai_client(world) as client:
        with pytest.raises(openai.BadRequestError, match="objekt") as caught:
            await client.chat.completions.create(model="tiny", messages=HELLO, tools=odd, tool_choice="required")
        assert caught.value.param == "tools"


# Tools


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]
    days: int = pydantic.Field(ge=1, le=9)


class Clock(pydantic.BaseModel):
    zone: Literal["UTC", "CET"]


TOOLS: Any = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Clock)]


def checked(calls: Any) -> list[str]:
    """The names of calls, their arguments validated."""
    assert calls
    for call in calls:
        kinds: dict[str, type[pydantic.BaseModel]] = {"Weather": Weather, "Clock": Clock}
        kinds[call.function.name].model_validate_json(call.function.arguments)
        assert call.id.startswith("call_")
    return [call.function.name for call in calls]


@pytest.mark.parametrize("template", [HERMES, HERMES.replace("<tool_call>", "[").replace("</tool_call>", "]")])
async def test_a_call_that_is_required_is_made(engine: TransformersEngine, template: str) -> None:
    """Constrained calls use the format's syntax, or plain JSON if the format is unknown."""
    async with serving(engine, chat_template=template) as world, openai_client(world) as client:
        for seed in range(2):
            answer = await client.chat.completions.create(
                model="tiny", messages=HELLO, tools=TOOLS, tool_choice="required", parallel_tool_calls=False,
                seed=seed, max_tokens=300,
            )  # fmt: skip
            (choice,) = answer.choices
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
            assert len(checked(choice.message.tool_calls)) == 1
        named: Any = {"type": "function", "function": {"name": "Clock"}}
        answer = await client.chat.completions.create(
            model="tiny", messages=HELLO, tools=TOOLS, tool_choice=named, n=2, max_tokens=300, seed=1
        )
        for choice in answer.choices:
            assert set(checked(choice.message.tool_calls)) == {"Clock"}


async def test_an_answer_is_either_a_call_or_in_the_requested_format(engine: TransformersEngine) -> None:
    class Reply(pydantic.BaseModel):
        mood: Literal["good", "bad"]

    async with serving(engine, chat_template=HERMES) as world, openai_client(world) as client:

        async def ask(first: str) -> Any:
            """`first`: the letter that decides between the two."""
            answer = await client.chat.completions.parse(
                model="tiny", messages=HELLO, tools=TOOLS, response_format=Reply, seed=3, max_tokens=600,
                parallel_tool_calls=False, temperature=0.5, extra_body={"logit_bias": {first: 50}},
            )  # fmt: skip
            return answer.choices[0].message

        called, replied = await ask("<"), await ask("{")
        assert len(checked(called.tool_calls)) == 1
        assert called.parsed is None
        assert not replied.tool_calls
        assert isinstance(replied.parsed, Reply)


async def test_calls_are_parsed_as_the_callers_own_types_streamed_or_not(engine: TransformersEngine) -> None:
    asked: Any = {
        "model": "tiny", "messages": HELLO, "tools": TOOLS, "tool_choice": "required", "seed": 5, "max_tokens": 600,
    }  # fmt: skip
    async with serving(engine, chat_template=HERMES) as world, openai_client(world) as client:
        whole = (await client.chat.completions.parse(**asked)).choices[0].message
        async with client.chat.completions.stream(**asked) as stream:
            kinds = {event.type async for event in stream}
            streamed = (await stream.get_final_completion()).choices[0].message
        assert "tool_calls.function.arguments.done" in kinds
        assert whole.tool_calls
        assert [call.function.parsed_arguments for call in whole.tool_calls] == [
            call.function.parsed_arguments for call in streamed.tool_calls or []
        ]
        assert all(isinstance(call.function.parsed_arguments, Weather | Clock) for call in whole.tool_calls)
        deltas = [chunk.choices[0] async for chunk in await client.chat.completions.create(**asked, stream=True)]
        calls = [call for choice in deltas for call in choice.delta.tool_calls or []]
        assert [call.index for call in calls] == list(range(len(whole.tool_calls)))
        assert deltas[-1].finish_reason == "tool_calls"


async def test_reasoning_precedes_a_constrained_answer_and_is_separated(engine: TransformersEngine) -> None:
    async with serving(engine, chat_template=THINKING) as world, openai_client(world) as client:
        body: Any = {
            "model": "tiny", "messages": HELLO, "seed": 3, "max_tokens": 40, "extra_body": {"guided_regex": "[0-9]{3}"},
        }  # fmt: skip
        answer = await client.chat.completions.create(**body)
        message: Any = answer.choices[0].message
        assert message.reasoning_content
        assert message.content == "", "a model of random weights thinks on and on"
        assert answer.usage is not None
        assert answer.usage.completion_tokens_details is not None
        assert answer.usage.completion_tokens_details.reasoning_tokens
        kept = await client.chat.completions.create(
            **{**body, "extra_body": {"guided_regex": "[0-9]{3}", "reasoning_format": "none"}}
        )
        assert (kept.choices[0].message.content or "").startswith(message.reasoning_content[:20].lstrip())
