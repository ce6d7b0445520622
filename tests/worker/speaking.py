"""A fake engine with a fixed answer that contains reasoning and tool calls, and OpenAI's calls in this process: parsed
requests and answers over a fake engine."""

import json
from collections.abc import Sequence
from typing import Any

from tests.worker import serving
from tests.worker.fake_engine import FakeEngine
from worker.api import openai
from worker.api.call import GenerationCall
from worker.api.served_model import ServedModel
from worker.interface import EncoderInput, GenerationRequest

# a chat template with tools, in the format of Hermes
TOOLS = (
    "{% if tools %}{{ tools | tojson }} <tool_call>name, arguments</tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# the same for a model that reasons first
THINKING = TOOLS.replace("<assistant>{% endif %}", "<assistant><think>\n{% endif %}") + "{# </think> #}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
# reasoning, content and a call
SAID = f"They ask for Oslo.</think>\n\nLet me look. {CALL}"
# answers of a reasoning model: with a call, cut in the reasoning, without a call, with two calls
ANSWERS = (SAID, "just thoughts", "</think>\n\nfour words of text", "a</think>" + SAID[26:] * 2)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Speaking(FakeEngine):
    """An engine that answers every request with `text`."""

    def __init__(self, text: str, *, ctx_size: int = 2048):
        super().__init__(serving.tokenizer(), ctx_size=ctx_size)
        self._text = text

    def script(self, request: GenerationRequest, index: int) -> str:
        return self._text

    def prompt(self) -> str:
        """Return the prompt of the last request as text."""
        return str(self.tokenizer.decode(list(self.requests[-1].prompt)))


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def model(
    capabilities: Sequence[str] = ("completion", "embedding"), *, bare: bool = False, **settings: Any
) -> ServedModel:
    tokenizer = serving.bare_tokenizer() if bare else serving.tokenizer()
    return ServedModel(FakeEngine(tokenizer, capabilities=capabilities), tokenizer, serving.options(**settings))


def encoded(made: ServedModel) -> Sequence[EncoderInput]:
    """Return what the engine encoded."""
    assert isinstance(made.engine, FakeEngine)
    return made.engine.texts


def seen(made: ServedModel) -> list[str]:
    """Return the texts that the engine encoded, without special tokens."""
    return [str(made.tokenizer.decode(list(text.tokens), skip_special_tokens=True)) for text in encoded(made)]


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
