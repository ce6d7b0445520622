"""OpenAI's calls in this process: parsed requests and answers over a fake engine."""

import json
from collections.abc import Sequence
from typing import Any

from tests.worker import serving
from tests.worker.fake_engine import FakeEngine
from worker.api import openai
from worker.api.call import GenerationCall
from worker.api.served_model import ServedModel
from worker.interface import GenerationRequest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def model(
    capabilities: Sequence[str] = ("completion", "embedding"), *, bare: bool = False, **settings: Any
) -> ServedModel:
    tokenizer = serving.bare_tokenizer() if bare else serving.tokenizer()
    return ServedModel(FakeEngine(tokenizer, capabilities=capabilities), tokenizer, serving.options(**settings))


def seen(made: ServedModel) -> list[str]:
    """Return the texts that the engine encoded, without special tokens."""
    assert isinstance(made.engine, FakeEngine)
    return [str(made.tokenizer.decode(list(text.tokens), skip_special_tokens=True)) for text in made.engine.texts]


async def only(body: dict[str, Any], made: ServedModel | None = None) -> GenerationRequest:
    [generation] = (await openai.chat({**CHAT, **body}, made or model())).generations
    return generation


async def whole(call: GenerationCall, engine: Any) -> Any:
    deltas = [
        (number, delta)
        for number, generation in enumerate(call.generations)
        async for delta in engine.generate(generation)
    ]
    return json.loads(json.dumps(call.reply.full_body(deltas)))


async def streamed(call: GenerationCall, engine: Any) -> list[Any]:
    frames = b""
    for number, generation in enumerate(call.generations):
        async for delta in engine.generate(generation):
            frames += call.reply.frames(number, delta)
    frames += call.reply.closing_frames()
    return serving.chunks(frames.decode().split("\n\n"))
