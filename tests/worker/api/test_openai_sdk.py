"""The official OpenAI client against a worker on TCP. Its embeddings and exceptions are tested in tests/processes:
test_encoders_end_to_end.py and test_error_rows.py.
"""

from typing import Any

import openai
import pytest

from tests.worker.clients import openai_client
from tests.worker.serving import serving

HELLO: Any = [{"role": "user", "content": "hi"}]


async def test_a_chat() -> None:
    async with serving() as world, openai_client(world) as client:
        answer = await client.chat.completions.create(
            model="m", messages=HELLO, n=2, logprobs=True, top_logprobs=2, max_completion_tokens=3, seed=1
        )
        assert [choice.message.role for choice in answer.choices] == ["assistant", "assistant"]
        assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
        assert answer.choices[1].message.content == "1 Gr\ufffd"
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert [len(entry.top_logprobs) for entry in logprobs.content] == [2, 2, 2]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 6
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 2
        assert answer.model == "m"


async def test_a_completion() -> None:
    async with serving() as world, openai_client(world) as client:
        answer = await client.completions.create(model="m", prompt=["a", "b"], echo=True, logprobs=1, max_tokens=1)
        assert [choice.text for choice in answer.choices] == ["a0", "b0"]
        assert answer.choices[0].logprobs is not None
        assert answer.choices[0].logprobs.tokens == ["<s>", "a", "0"]
        assert answer.choices[0].logprobs.text_offset == [0, 0, 1]


async def test_a_failed_stream_raises_an_error_of_the_client() -> None:
    text = ""
    async with serving() as world, openai_client(world) as client:
        stream = await client.completions.create(model="m", prompt="fail-later", stream=True)
        with pytest.raises(openai.APIError, match="logits"):  # noqa: PT012 - the text before the error counts
            async for chunk in stream:
                text += chunk.choices[0].text
        assert text == "0 G"
