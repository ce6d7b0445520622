"""llama-server's /apply-template."""

from typing import Any

import pytest

from tests.worker import serving
from tests.worker.fake_engine import FakeEngine
from worker.api import llama_server
from worker.api.served_model import ServedModel
from worker.errors import UnsupportedByModel


def model(*, bare: bool = False, **settings: Any) -> ServedModel:
    tokenizer = serving.bare_tokenizer() if bare else serving.tokenizer()
    return ServedModel(FakeEngine(tokenizer), tokenizer, serving.options(**settings))


async def test_apply_template_shows_the_prompt_of_a_chat() -> None:
    chat = serving.chat("hi", temperature=0.5, stream=True, max_tokens=3, stop=["x"], model="m", wibble=1)
    result = await llama_server.apply_template(chat, model())
    assert result.body == {"prompt": "<s><|user|>\nhi\n<|assistant|>\n"}
    assert result.ignored == ("wibble",)


async def test_apply_template_shows_tools_to_the_template() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    made = model(chat_template="{{ tools[0].function.name }}")
    result = await llama_server.apply_template(serving.chat("hi", tools=[tool]), made)
    assert result.body == {"prompt": "f"}


async def test_apply_template_needs_a_template() -> None:
    with pytest.raises(UnsupportedByModel):
        await llama_server.apply_template(serving.chat("hi"), model(bare=True))
