"""The official clients without asyncio, in a thread: whole and streamed, texts and calls."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import anthropic
import ollama
import openai
import pytest

from tests.worker.serving import TOKEN, Serving, serving
from tests.worker.speaking import SAID, SCHEMA, THINKING, Speaking

T = TypeVar("T")
HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
OSLO = {"city": "Oslo"}
pytestmark = pytest.mark.slow


async def asked(ask: Callable[[Serving], T]) -> T:
    """Return the result of `ask` for a model that reasons, answers and calls a tool."""
    async with serving(Speaking(SAID), chat_template=THINKING) as world:
        return await asyncio.to_thread(ask, world)


def claude(world: Serving) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=world.url, auth_token=TOKEN, max_retries=0)


def gpt(world: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{world.url}/v1", api_key=TOKEN, max_retries=0)


async def test_anthropics_client_reads_blocks() -> None:
    tool: Any = {"name": "weather", "input_schema": SCHEMA}

    def ask(world: Serving) -> tuple[Any, Any]:
        with claude(world) as client:
            given: Any = {"model": "m", "max_tokens": 999, "messages": HI, "tools": [tool]}
            whole = client.messages.create(**given)
            with client.messages.stream(**given) as stream:
                for _ in stream:
                    pass
                return whole, stream.get_final_message()

    for message in await asked(ask):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert (message.content[2].input, message.stop_reason) == (OSLO, "tool_use")


async def test_openais_client_reads_responses() -> None:
    tool: Any = {"type": "function", **TOOL["function"], "strict": False}

    def ask(world: Serving) -> tuple[Any, Any]:
        with gpt(world) as client:
            whole = client.responses.create(model="m", input="hi", tools=[tool])
            with client.responses.stream(model="m", input="hi", tools=[tool]) as stream:
                for _ in stream:
                    pass
                return whole, stream.get_final_response()

    for response in await asked(ask):
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        assert response.output_text.strip() == "Let me look."


async def test_openais_client_reads_calls() -> None:
    def ask(world: Serving) -> tuple[Any, Any]:
        with gpt(world) as client:
            whole = client.chat.completions.create(model="m", messages=HI, tools=[TOOL])
            with client.chat.completions.stream(model="m", messages=HI, tools=[TOOL]) as stream:
                for _ in stream:
                    pass
                return whole, stream.get_final_completion()

    for answer in await asked(ask):
        [call] = answer.choices[0].message.tool_calls
        assert (call.function.name, answer.choices[0].finish_reason) == ("weather", "tool_calls")


async def test_ollamas_client_reads_lines() -> None:
    def ask(world: Serving) -> tuple[Any, list[Any]]:
        with ollama.Client(host=world.url, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
            return client.chat("m", HI, tools=[TOOL]), list(client.chat("m", HI, tools=[TOOL], stream=True))

    whole, lines = await asked(ask)
    assert whole.message.tool_calls[0].function.arguments == OSLO
    assert "".join(line.message.content or "" for line in lines) == whole.message.content
    assert "".join(line.message.thinking or "" for line in lines) == whole.message.thinking
    assert (lines[-1].done, lines[-1].done_reason) == (True, "stop")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
async def test_an_answer_repeats_the_name_that_the_router_was_asked_by(path: str) -> None:
    async with serving(Speaking("hi")) as world:
        body = {"messages": HI, "max_tokens": 1, "stream": False}
        _, _, answer = await world.post(path, body, **{"X-Router-Asked": "org%2Fn%C3%A4me"})
        assert answer["model"] == "org/näme"
        _, _, answer = await world.post(path, {**body, "model": "own"}, **{"X-Router-Asked": "other"})
        assert answer["model"] == "own"
