"""Anthropic's messages: the official client, and bodies that it never sends."""

import io
import json
import time
from typing import Any

import anthropic
import pytest

from tests.worker.clients import anthropic_client
from tests.worker.fake_engine import CACHED, SCRIPT, FakeEngine
from tests.worker.serving import serving, tokenizer
from tests.worker.speaking import ANSWERS, SAID, SCHEMA, THINKING, TOOLS, Speaking

HI: Any = {"model": "m", "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]}
WEATHER: Any = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}


def plain(message: anthropic.types.Message) -> dict[str, Any]:
    """Return a message without the fields that differ between requests."""
    received = message.to_dict(mode="json")
    content: Any = received["content"]
    return {**received, "id": "", "content": [{**block, "id": ""} for block in content]}


async def test_a_message() -> None:
    async with serving() as world, anthropic_client(world) as client:
        message = await client.messages.create(
            **HI, system="Be brief.", extra_body={"temperature": 0.5, "top_k": 3, "top_p": 0.9}
        )
        [block] = message.content
        assert block.type == "text"
        assert block.text.startswith(f"0 {SCRIPT}")
        assert (message.role, message.model, message.stop_reason) == ("assistant", "m", "end_turn")
        [asked] = world.engine.requests
        assert message.usage.input_tokens == len(asked.prompt) - CACHED
        assert message.usage.cache_read_input_tokens == CACHED
        assert (asked.sampling.temperature, asked.sampling.top_k, asked.sampling.top_p) == (0.5, 3, 0.9)
        assert asked.max_tokens == 200


async def test_the_stop_reason_is_reported() -> None:
    async with serving() as world, anthropic_client(world) as client:
        short = await client.messages.create(**{**HI, "max_tokens": 3})
        assert (short.stop_reason, short.stop_sequence, short.usage.output_tokens) == ("max_tokens", None, 3)
        stopped = await client.messages.create(**HI, stop_sequences=["fox"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "fox")
        long: Any = {**HI, "messages": [{"role": "user", "content": "long"}], "max_tokens": 1000}
        full = await client.messages.create(**long)
        assert full.stop_reason == "model_context_window_exceeded"
        assert full.usage.output_tokens < 1000
        async with client.messages.stream(**long) as stream:
            assert (await stream.get_final_message()).stop_reason == full.stop_reason


@pytest.mark.parametrize("said", ANSWERS)
async def test_a_stream_builds_the_same_message(said: str) -> None:
    async with serving(Speaking(said), chat_template=THINKING) as world, anthropic_client(world) as client:
        whole = await client.messages.create(**HI, tools=[WEATHER])
        async with client.messages.stream(**HI, tools=[WEATHER]) as stream:
            kinds = [event.type async for event in stream]
            built = await stream.get_final_message()
        assert plain(built) == plain(whole)
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


async def test_reasoning_text_and_calls_are_blocks() -> None:
    async with serving(Speaking(SAID), chat_template=THINKING) as world, anthropic_client(world) as client:
        message = await client.messages.create(**HI, tools=[WEATHER])
        thinking, text, call = message.content
        assert (thinking.type, text.type, call.type) == ("thinking", "text", "tool_use")
        assert thinking.thinking == "They ask for Oslo."
        assert text.text == "Let me look."
        assert (call.name, call.input) == ("weather", {"city": "Oslo"})
        assert message.stop_reason == "tool_use"
        used = message.usage.to_dict()
        assert 0 < used["output_tokens_details"]["thinking_tokens"] < used["output_tokens"]


async def test_a_conversation_with_calls_and_results_reaches_the_template() -> None:
    engine = Speaking("fine")
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]}
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Oslo?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Let me look."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
        {"role": "user", "content": "Well?"},
    ]
    async with serving(engine, chat_template=TOOLS) as world, anthropic_client(world) as client:
        await client.messages.create(model="m", max_tokens=9, messages=messages, tools=[WEATHER], system="S")
        _, _, rendered = engine.prompt().partition("</tool_call>")
        assert rendered == (
            '<system>S<user>Oslo?<assistant>Let me look.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}'
            "</tool_call><tool>rain<user>So?\nWell?<assistant>"
        )
        count = await client.messages.count_tokens(model="m", messages=messages, tools=[WEATHER], system="S")
        assert count.input_tokens == len(engine.requests[-1].prompt)


async def test_documents_of_plain_text_reach_the_template() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "one\ntwo"}
    document: Any = {"type": "document", "source": source, "title": "Numbers", "context": "A list."}
    call: Any = {"type": "tool_use", "id": "c", "name": "weather", "input": {}}
    result: Any = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "document", "source": source}]}
    messages: Any = [
        {"role": "user", "content": [document, {"type": "text", "text": "Why?"}]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    engine = Speaking("four")
    async with serving(engine, chat_template=TOOLS, strict_fields=True) as world, anthropic_client(world) as client:
        await client.messages.create(**{**HI, "messages": messages})
        assert "<user>Numbers\nA list.\none\ntwo\nWhy?<" in engine.prompt()
        assert "<tool>one\ntwo<" in engine.prompt()
        wrong: list[tuple[Any, str]] = [
            ({"source": {"type": "base64", "media_type": "application/pdf", "data": "eA=="}}, "this model takes text"),
            ({"source": {"type": "text", "data": 5}}, "source.data must be a string"),
            ({"source": source, "title": 5}, "title and context must be strings"),
            ({"source": source, "citations": {"enabled": True}}, "this field is unknown"),
        ]
        for members, message in wrong:
            block: Any = {"type": "document", **members}
            with pytest.raises(anthropic.BadRequestError, match=message):
                await client.messages.create(**{**HI, "messages": [{"role": "user", "content": [block]}]})


async def test_an_assistant_message_at_the_end_is_continued() -> None:
    engine = Speaking("fine")
    async with serving(engine, chat_template=TOOLS) as world, anthropic_client(world) as client:
        begun: Any = [*HI["messages"], {"role": "assistant", "content": "I am"}]
        await client.messages.create(**{**HI, "messages": begun})
        assert engine.prompt().endswith("<user>hi<assistant>I am")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_a_required_call_is_constrained_by_a_grammar(choice: Any) -> None:
    engine = Speaking("fine")
    async with serving(engine, chat_template=TOOLS) as world, anthropic_client(world) as client:
        choice = {**choice, "disable_parallel_tool_use": True}
        await client.messages.create(**HI, tools=[WEATHER], tool_choice=choice)
        await client.messages.create(**HI, tools=[WEATHER], tool_choice={"type": "none"})
        held, free = engine.requests
        assert held.grammar is not None
        assert "weather" in held.grammar.text
        assert free.grammar is None


async def test_unsupported_fields_are_rejected_by_name() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"messages": [{"role": "user", "content": [image]}]}, r"content\[0\]: this model takes text, not images"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "server tools are not supported"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
        ({"messages": []}, "at least one message"),
        ({"stop_sequences": ["a", 1]}, r"stop_sequences\[1\] must be a string of 1 to 4096 characters"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences must have at most 16 entries"),
        ({"stop_sequences": "a"}, "stop_sequences must be an array"),
        ({"thinking": {"type": "often"}}, "thinking.type"),
        ({"temperature": -1}, "temperature"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
    ]
    async with serving() as world, anthropic_client(world) as client:
        for wrong, message in refused:
            with pytest.raises(anthropic.BadRequestError, match=message):
                await client.messages.create(**HI, extra_body=wrong)
        assert world.engine.requests == []


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
async def test_threads_are_rejected_with_the_details_that_clients_expect(thread: Any) -> None:
    async with serving() as world, anthropic_client(world) as client:
        with pytest.raises(anthropic.BadRequestError, match="conversations are not stored") as refused:
            await client.messages.create(**HI, extra_body={"thread": thread})
        body: Any = refused.value.body
        assert body["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert world.engine.requests == []


async def test_a_prompt_that_is_too_long_is_an_invalid_request_with_anthropics_words() -> None:
    async with serving(FakeEngine(tokenizer(), ctx_size=10)) as world:
        status, _, body = await world.post("/v1/messages", {"messages": [{"role": "user", "content": "a " * 40}]})
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        assert "prompt is too long" in body["error"]["message"]


async def test_the_time_to_join_messages_of_one_role_grows_with_them_and_not_with_their_square() -> None:
    template = "{% for m in messages %}[{{ m.role }} {{ m.content | length }}]{% endfor %}"
    async with serving(chat_template=template) as world:

        async def seconds(count: int) -> float:
            """The processor's time, which other programs hardly change."""
            body = json.dumps({"messages": [{"role": "user", "content": "hello"}] * count}).encode()
            began = time.process_time()
            async with world.client.post(world.url + "/v1/messages/count_tokens", data=io.BytesIO(body)) as answer:
                counted = (await answer.json())["input_tokens"]
            text = f"[user {6 * count - 1}]"
            assert counted == len(tokenizer().encode(text, add_special_tokens=False))
            return time.process_time() - began

        assert await seconds(64_000) < 3 * 16 * await seconds(4_000)


async def test_comments_and_then_pings_keep_an_idle_stream_alive() -> None:
    content = " prefill hold-later "
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    body = {**HI, "messages": [{"role": "user", "content": content}], "sse_ping_interval": 0.05, "stream": True}
    async with serving(chat_template=template) as world:
        async with world.client.post(world.url + "/v1/messages", json=body) as answer:
            first = (await answer.content.readuntil(b"\n\n")).decode()
            assert first.startswith(": prefill done=")
            world.engine.gate.set()
            await world.engine.until("holding")
            rest = (await answer.content.read()).decode()
        assert rest.index("event: message_start") < rest.index("event: message_stop")


async def test_thinking_sets_the_switch_of_the_template() -> None:
    template = TOOLS + "{{ 'thinks' if enable_thinking else 'does not' }}"
    engine = Speaking("fine")
    async with serving(engine, chat_template=template) as world, anthropic_client(world) as client:
        await client.messages.create(**HI, thinking={"type": "enabled", "budget_tokens": 1024})
        assert engine.prompt().endswith("thinks")
        await client.messages.create(**HI, thinking={"type": "disabled"})
        assert engine.prompt().endswith("does not")
        await client.messages.create(**HI, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
        assert engine.prompt().endswith("thinks")
    async with serving(Speaking("fine"), chat_template=TOOLS) as world:
        body = {**HI, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        _, headers, _ = await world.post("/v1/messages", body)
        assert headers["X-Ignored-Fields"] == "thinking,thinking.budget_tokens"


async def test_reports_and_errors_use_the_clients_field_names() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    async with serving() as world:
        for further, field in (
            ({"output_config": {"format": form}}, "output_config.format"),
            ({"output_format": form}, "output_format"),
        ):
            await world.post("/v1/messages", {**HI, **further})
            held = world.engine.requests[-1].grammar
            assert held is not None
            assert (held.field, json.loads(held.text)["required"]) == (field, ["city"])
        _, headers, _ = await world.post("/v1/messages", {**HI, "output_config": {"effort": "low", "odd": 1}})
        assert headers["X-Ignored-Fields"] == "output_config.odd,output_config.effort"
        counted = {**HI, "output_config": {"effort": "low"}}
        _, headers, _ = await world.post("/v1/messages/count_tokens", counted)
        assert headers["X-Ignored-Fields"] == "output_config.effort"
