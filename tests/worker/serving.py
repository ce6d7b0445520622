"""A worker's server on a real socket for the duration of a block, over a fake engine or a real one."""

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from transformers import PreTrainedTokenizerFast

from tests import tiny
from tests.worker.fake_engine import FakeEngine
from worker.protocol.argv import Serve
from worker.protocol.events import Event, RequestEnded
from worker.server.server import Server

TOKEN = "the-token-of-this-worker"
LOOPBACK = "tcp:127.0.0.1:0"


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny.make_tokenizer("llama")


@functools.cache
def bare_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer without a chat template."""
    made = tiny.make_tokenizer("gpt2")
    made.chat_template = None
    return made


def options(**settings: Any) -> Serve:
    return Serve(**{"snapshot": "", "listen": LOOPBACK, "name": "tiny", **settings})


@dataclass
class Serving:
    """The parts of a running test server: engine, client and announced events."""

    engine: Any  # a FakeEngine unless the test passes a real one
    client: aiohttp.ClientSession
    url: str
    server: Server
    events: list[RequestEnded] = field(default_factory=list)
    announced: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        """Return status, headers and JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(self.url + path, data=data, headers=headers) as answer:
            return answer.status, answer.headers, await answer.json()

    async def stream(self, path: str, body: Any) -> list[str]:
        """Return the frames of a stream without their blank lines, including comments."""
        async with self.client.post(self.url + path, json={**body, "stream": True}) as answer:
            assert answer.status == 200, await answer.text()
            text = (await answer.read()).decode()
        assert text.endswith("\n\n")
        return text[:-2].split("\n\n")

    async def failed_stream(self, path: str, body: Any) -> bytes:
        """Return the data of a stream before its connection is aborted."""
        data = b""
        with pytest.raises(aiohttp.ClientError):  # noqa: PT012 - the end of the connection comes last
            async with self.client.post(self.url + path, json=body) as answer:
                async for part in answer.content.iter_any():
                    data += part
        return data


@contextlib.asynccontextmanager
async def serving(
    engine: Any = None,
    *,
    token: str | None = TOKEN,
    bearer: str | None = TOKEN,
    write_timeout: float = 20.0,
    **settings: Any,
) -> AsyncIterator[Serving]:
    engine = engine or FakeEngine(tokenizer())
    events: list[RequestEnded] = []
    announced = asyncio.Event()

    def announce(event: Event) -> None:
        assert isinstance(event, RequestEnded)
        events.append(event)
        announced.set()

    server = Server(
        engine, engine.tokenizer, options(**settings), token=token, announce=announce, write_timeout=write_timeout
    )
    address = await server.start()
    headers = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
    if address.startswith("unix:"):
        connector: aiohttp.BaseConnector = aiohttp.UnixConnector(address.removeprefix("unix:"))
        url = "http://worker"
    else:
        connector, url = aiohttp.TCPConnector(), address.replace("tcp:", "http://")
    async with aiohttp.ClientSession(connector=connector, headers=headers) as client:
        try:
            yield Serving(engine, client, url, server, events, announced)
        finally:
            if isinstance(engine, FakeEngine):
                engine.gate.set()
            await server.close()


def chunks(frames: Sequence[str]) -> list[Any]:
    """Return the JSON of data frames; `[DONE]` stays a string."""
    data = [frame.removeprefix("data: ") for frame in frames if frame.startswith("data: ")]
    return [text if text == "[DONE]" else json.loads(text) for text in data]


def chat(content: str, **further: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **further}
