"""OpenAI's calls in this process: what a body means to a fake engine, and what is answered."""

import json
from collections.abc import Sequence
from typing import Any

from tests.worker import serving
from tests.worker.fake_engine import FakeEngine
from worker.api import openai
from worker.api.call import Call, Model
from worker.interface import Generation

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def model(capabilities: Sequence[str] = ("completion", "embedding"), *, bare: bool = False, **settings: Any) -> Model:
    tokenizer = serving.bare_tokenizer() if bare else serving.tokenizer()
    return Model(FakeEngine(tokenizer, capabilities=capabilities), tokenizer, serving.options(**settings))


async def only(body: dict[str, Any], made: Model | None = None) -> Generation:
    [generation] = (await openai.chat({**CHAT, **body}, made or model())).generations
    return generation


async def whole(call: Call, engine: Any) -> Any:
    deltas = [
        (number, delta)
        for number, generation in enumerate(call.generations)
        async for delta in engine.generate(generation)
    ]
    return json.loads(json.dumps(call.reply.whole(deltas)))


async def streamed(call: Call, engine: Any) -> list[Any]:
    frames = b""
    for number, generation in enumerate(call.generations):
        async for delta in engine.generate(generation):
            frames += call.reply.frames(number, delta)
    frames += call.reply.closing()
    return serving.chunks(frames.decode().split("\n\n"))
