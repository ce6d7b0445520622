"""The official OpenAI clients for a worker on TCP."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import openai

from tests.worker.serving import TOKEN, Serving

Answer = TypeVar("Answer")


@contextlib.asynccontextmanager
async def asking(world: Serving, key: str = TOKEN) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=world.url + "/v1", api_key=key, max_retries=0) as client:
        yield client


async def in_a_thread(world: Serving, ask: Callable[[openai.OpenAI], Answer]) -> Answer:
    """Return the result of `ask`, called with the synchronous client."""

    def run() -> Answer:
        with openai.OpenAI(base_url=world.url + "/v1", api_key=TOKEN, max_retries=0) as client:
            return ask(client)

    return await asyncio.to_thread(run)
