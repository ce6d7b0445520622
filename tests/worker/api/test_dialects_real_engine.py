"""A required tool call, constrained by a grammar on a real engine with random weights, in each dialect, whole and
streamed.
"""

from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest

from tests import tiny
from tests.worker.loaded import load
from tests.worker.serving import serving
from tests.worker.speaking import TOOLS

SCHEMA: Any = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
SCHEMA["additionalProperties"] = False
HI: Any = [{"role": "user", "content": "hi"}]
CITIES = ({"city": "Oslo"}, {"city": "Rome"})


@pytest.mark.slow
async def test_every_dialect_gets_the_required_call(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path, max_position_embeddings=768)
    engine = load(folder, ctx_size=768, parallel=4)
    settings: dict[str, Any] = {"snapshot": str(folder), "chat_template": TOOLS, "sampling": '{"temp": 0}'}
    async with serving(engine, token=None, **settings) as world:
        url = world.url
        tool: Any = {"name": "weather", "input_schema": SCHEMA}
        asked: Any = {"model": "tiny", "max_tokens": 400, "messages": HI, "tools": [tool]}
        asked["tool_choice"] = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
        async with anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as claude:
            whole = await claude.messages.create(**asked)
            async with claude.messages.stream(**asked) as stream:
                built = await stream.get_final_message()
        for message in (whole, built):
            assert len(message.content) == 1
            block: Any = message.content[0]
            assert (block.type, message.stop_reason) == ("tool_use", "tool_use")
            assert block.input in CITIES
        assert whole.content[0].to_dict()["input"] == built.content[0].to_dict()["input"]

        function: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
        body: Any = {"model": "tiny", "input": "hi", "tools": [function], "tool_choice": "required"}
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client:
            response = await client.responses.create(**body, parallel_tool_calls=False)
            [call] = response.output
            assert call.type == "function_call"
            assert call.arguments.replace(" ", "") in ('{"city":"Oslo"}', '{"city":"Rome"}')

        async with ollama.AsyncClient(host=url) as llama:
            answer = await llama.chat("tiny", HI, format=SCHEMA, options={"num_predict": 60})
            lines = [line async for line in await llama.chat("tiny", HI, format=SCHEMA, stream=True)]
            text = "".join(line.message.content or "" for line in lines)
            assert answer.message.content == text
            assert "Oslo" in text or "Rome" in text
    await engine.close()
