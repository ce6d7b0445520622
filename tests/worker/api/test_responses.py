"""OpenAI's Responses API: the official client, and bodies that it never sends."""

import asyncio
import contextlib
import json
import typing
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import ResponseIncludable

from tests.worker.clients import openai_client
from tests.worker.fake_engine import CACHED, SCRIPT
from tests.worker.serving import serving
from tests.worker.speaking import ANSWERS, SAID, SCHEMA, THINKING, TOOLS, Speaking, model, whole
from worker.api.responses import responses
from worker.errors import ContextExceeded

LOGPROBS = "message.output_text.logprobs"
HI: Any = {"model": "m", "input": "hi"}
HI_THERE: Any = [{"role": "user", "content": "hi"}]
WEATHER: Any = {"type": "function", "name": "weather", "description": "?", "parameters": SCHEMA, "strict": False}


def plain(response: Any) -> Any:
    """Return a response without the fields that differ between requests."""
    received = response.to_dict(mode="json")
    ids = {"id", "call_id", "created_at", "completed_at", "parsed", "parsed_arguments"}

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: strip(each) for name, each in value.items() if name not in ids}
        return [strip(each) for each in value] if isinstance(value, list) else value

    return strip(received)


async def test_a_response() -> None:
    async with serving() as world, openai_client(world) as client:
        response = await client.responses.create(
            **HI, instructions="Be brief.", temperature=0.5, top_p=0.9, max_output_tokens=200
        )
        assert response.output_text.startswith(f"0 {SCRIPT}")
        assert (response.status, response.model, response.object) == ("completed", "m", "response")
        [asked] = world.engine.requests
        assert response.usage is not None
        assert response.usage.input_tokens == len(asked.prompt)
        assert response.usage.input_tokens_details.cached_tokens == CACHED
        assert (asked.sampling.temperature, asked.sampling.top_p, asked.max_tokens) == (0.5, 0.9, 200)
        short = await client.responses.create(**HI, max_output_tokens=3)
        assert short.incomplete_details is not None
        assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_a_response_has_the_members_that_open_responses_requires() -> None:
    tool = {"type": "function", "name": "weather"}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -0.5}
    labels = {"safety_identifier": "s", "prompt_cache_key": "p"}
    async with serving(chat_template=TOOLS) as world:
        status, _, body = await world.post("/v1/responses", {**HI, "tools": [tool], **penalties, **labels})
        assert status == 200
        assert {name: body[name] for name in (*penalties, *labels)} == {**penalties, **labels}
        assert (body["service_tier"], body["max_tool_calls"]) == ("default", None)
        assert body["tools"] == [{**tool, "description": None, "parameters": None, "strict": None}]
        assert body["completed_at"] >= body["created_at"]
        _, _, cut = await world.post("/v1/responses", {**HI, "max_output_tokens": 3})
        assert (cut["status"], cut["completed_at"]) == ("incomplete", None)
        assert {cut[name] for name in labels} == {None}


async def test_a_response_accepts_further_fields_of_chats() -> None:
    further = {"top_k": 3, "min_p": 0.1, "seed": 7, "stop": ["fox"], "repeat_penalty": 1.2, "logit_bias": {"5": 1}}
    async with serving() as world, openai_client(world) as client:
        response = await client.responses.create(**HI, extra_body={**further, "cache_salt": "mine"})
        [asked] = world.engine.requests
        picked = asked.sampling
        assert (picked.top_k, picked.min_p, picked.seed, picked.repetition_penalty) == (3, 0.1, 7, 1.2)
        assert (picked.logit_bias, asked.stop, asked.salt) == ({5: 1.0}, ("fox",), "mine")
        assert response.output_text.endswith("brown ")
        status, headers, received = await world.post("/v1/responses", {"input": "hi", **further})
        assert (status, "X-Ignored-Fields" in headers) == (200, False)
        held = {"text": {"format": {"type": "json_object"}}, "response_format": {"type": "json_object"}}
        status, _, received = await world.post("/v1/responses", {"input": "hi", **held})
        assert (status, received["error"]["param"]) == (400, "response_format")


@pytest.mark.parametrize("asked", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}])
async def test_logprobs_of_a_message_are_returned_on_request(asked: dict[str, Any]) -> None:
    async with serving(Speaking(SAID), chat_template=THINKING) as world, openai_client(world) as client:
        response: Any = await client.responses.create(**HI, tools=[WEATHER], extra_body=asked)
        reasoning, message, call = response.output
        [part] = message.content
        assert "".join(entry.token for entry in part.logprobs).strip() == part.text
        assert {len(entry.top_logprobs) for entry in part.logprobs} == {asked.get("top_logprobs", 0)}
        assert not any(hasattr(item, "logprobs") for item in (reasoning, call))
        received: list[Any] = []
        async for event in await client.responses.create(**HI, tools=[WEATHER], extra_body=asked, stream=True):
            received += event.logprobs if event.type == "response.output_text.delta" else []
            if event.type == "response.output_text.done":
                assert [entry.token for entry in event.logprobs] == [entry.token for entry in received]
        assert [entry.token for entry in received] == [entry.token for entry in part.logprobs]
        unasked: Any = await client.responses.create(**HI)
        [silent] = unasked.output[1:2]
        assert silent.content[0].logprobs == []


@pytest.mark.parametrize("said", ANSWERS)
async def test_a_stream_builds_the_same_response(said: str) -> None:
    async with serving(Speaking(said), chat_template=THINKING) as world, openai_client(world) as client:
        whole = await client.responses.create(**HI, tools=[WEATHER])
        async with client.responses.stream(**HI, tools=[WEATHER]) as stream:
            events = [event async for event in stream]
            built = await stream.get_final_response()
        assert plain(built) == plain(whole)
        assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        for kind in ("response.output_item.added", "response.output_item.done"):
            assert kinds.count(kind) == len(built.output)
        texts = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert texts == whole.output_text


async def test_a_stream_reports_progress_and_timings_on_request() -> None:
    asked = {"return_progress": True, "timings_per_token": True}
    long: Any = {"model": "m", "input": " prefill "}
    async with serving(Speaking(SAID), chat_template=THINKING) as world, openai_client(world) as client:
        world.engine.gate.set()
        events: list[Any] = [
            event.to_dict()
            async for event in await client.responses.create(**long, tools=[WEATHER], stream=True, extra_body=asked)
        ]
        kinds = [event["type"] for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        assert len(progress) == kinds.count("response.in_progress") > 1
        assert progress[-1]["processed"] == progress[-1]["total"] == len(world.engine.requests[0].prompt)
        timed = [event["type"] for event in events if "timings" in event]
        assert timed == [kind for kind in kinds if kind.endswith((".delta", ".completed"))]
        counts = [event["timings"]["predicted_n"] for event in events if "timings" in event]
        assert 0 < counts[0] < counts[-1] == events[-1]["response"]["usage"]["output_tokens"]
        plainly: list[Any] = [event.to_dict() async for event in await client.responses.create(**HI, stream=True)]
        assert not any({"timings", "prompt_progress"} & event.keys() for event in plainly)
        status, headers, _ = await world.post("/v1/responses", {"input": "hi", **asked})
        assert (status, headers["X-Ignored-Fields"]) == (200, "return_progress,timings_per_token")


async def test_reasoning_belongs_to_its_own_turn() -> None:
    """An answer that was cut in its reasoning has no message of its own."""
    made = model(
        chat_template="{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}|{{ m.content }}{% endfor %}"
    )
    cut, whole, again = (
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]} for text in ("cut", "all", "more")
    )
    asked = [{"role": "user", "content": "q"}, cut, {"role": "user", "content": "go on"}]
    first, second, third = ({"role": "assistant", "content": text} for text in "abc")
    answered = [first, again, whole, second, third]
    call = await responses({"input": [*asked, *answered]}, made)
    turns = made.decode(call.generations[0].prompt).split("<")[1:]
    assert turns[:3] == ["user>|q", "assistant>cut|", "user>|go on"]
    assert turns[3:] == ["assistant>|a", "assistant>more|", "assistant>all|b", "assistant>|c"]


async def test_reasoning_text_and_calls_are_items() -> None:
    async with serving(Speaking(SAID), chat_template=THINKING) as world, openai_client(world) as client:
        response: Any = await client.responses.create(**HI, tools=[WEATHER])
        reasoning, message, call = response.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "They ask for Oslo.")
        assert (message.type, message.content[0].text) == ("message", "Let me look.")
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Oslo"})
        assert response.usage.output_tokens_details.reasoning_tokens > 0


async def test_a_conversation_of_items_reaches_the_template() -> None:
    engine = Speaking("fine")
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Oslo?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"role": "user", "content": "So?"},
    ]
    async with serving(engine, chat_template=TOOLS) as world, openai_client(world) as client:
        await client.responses.create(model="m", input=items, instructions="S")
        call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
        expected = f"<system>S<user>Oslo?<assistant>Let me look.{call}<tool>rain<user>So?<assistant>"
        assert engine.prompt().endswith(expected)
        for path in ("responses", "chat/completions"):
            body = {"input": items, "instructions": "S"}
            if path == "chat/completions":
                body = {"messages": [{"role": "user", "content": "hi"}]}
                await client.chat.completions.create(model="m", messages=body["messages"])
            _, _, counted = await world.post(f"/v1/{path}/input_tokens", body)
            assert counted == {"object": "response.input_tokens", "input_tokens": len(engine.requests[-1].prompt)}
        for rest in ({}, {"instructions": "S"}):
            _, _, empty = await world.post("/v1/responses/input_tokens", {**rest, "input": ""})
            assert (await world.post("/v1/responses/input_tokens", rest))[2] == empty
        for path, effort, ignored in (
            ("chat/completions", {"reasoning_effort": "low"}, "reasoning_effort"),
            ("responses", {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ):
            _, headers, _ = await world.post(f"/v1/{path}/input_tokens", {**HI, "messages": HI_THERE, **effort})
            assert ignored in headers["X-Ignored-Fields"].split(",")


class Pet(pydantic.BaseModel):
    kind: str


async def test_a_format_constrains_the_answer() -> None:
    engine = Speaking('{"kind": "cat"}')
    async with serving(engine) as world, openai_client(world) as client:
        response = await client.responses.parse(**HI, text_format=Pet)
        assert response.output_parsed == Pet(kind="cat")
        await client.responses.create(**HI, text={"format": {"type": "json_object"}})
        await client.responses.create(**HI)
        first, second, third = [request.grammar for request in engine.requests]
        assert first is not None
        assert '"kind"' in first.text
        assert second is not None
        assert third is None


async def test_reports_and_errors_use_the_clients_field_names() -> None:
    form = {"type": "json_schema", "schema": SCHEMA, "description": "?"}
    async with serving() as world:
        asked = {"input": "hi", "text": {"format": form, "verbosity": "low"}, "reasoning": {"effort": "low"}}
        _, headers, received = await world.post("/v1/responses", asked)
        assert headers["X-Ignored-Fields"] == "text.format.description,reasoning.effort,text.verbosity"
        assert received["text"] == asked["text"]
        held = world.engine.requests[-1].grammar
        assert held is not None
        assert held.field == "text.format"
        await world.post("/v1/responses", {"input": "hi", "response_format": {"type": "json_object"}})
        held = world.engine.requests[-1].grammar
        assert held is not None
        assert held.field == "response_format"
        _, _, received = await world.post("/v1/responses", {"input": "hi", "text": {"format": {"type": "odd"}}})
        assert received["error"]["param"] == "text.format.type"
        assert received["error"]["message"].startswith("text.format.type must be one of")
        _, _, received = await world.post("/v1/responses", {"input": "word " * 3000})
        assert (received["error"]["param"], received["error"]["reason"]) == ("input", "context_length_exceeded")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
async def test_a_required_call_is_constrained_by_a_grammar(choice: Any) -> None:
    engine = Speaking("fine")
    async with serving(engine, chat_template=TOOLS) as world, openai_client(world) as client:
        await client.responses.create(**HI, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
        grammar = engine.requests[-1].grammar
        assert grammar is not None
        assert "weather" in grammar.text


async def test_a_call_of_a_function_outside_allowed_tools_is_text() -> None:
    engine = Speaking(SAID)
    clock: Any = {**WEATHER, "name": "clock"}
    async with serving(engine, chat_template=THINKING) as world, openai_client(world) as client:
        for allowed, kinds in ((WEATHER, ["reasoning", "message", "function_call"]), (clock, ["reasoning", "message"])):
            choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [allowed]}
            response = await client.responses.create(**HI, tools=[WEATHER, clock], tool_choice=choice)
            assert [item.type for item in response.output] == kinds
            assert response.tool_choice.to_dict() == choice
            assert len(response.tools) == 2
        assert "clock" in engine.prompt()
        assert "weather" not in engine.prompt().partition("<tool_call>")[0]
        choice["mode"] = "required"
        await client.responses.create(**HI, tools=[WEATHER, clock], tool_choice=choice)
        grammar = engine.requests[-1].grammar
        assert grammar is not None
        assert ("clock" in grammar.text, "weather" in grammar.text) == (True, False)


async def test_unsupported_fields_are_rejected_by_name() -> None:
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,aGk="}]}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "x"}]}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"previous_response_id": "resp_1"}, "requests are stateless"),
        ({"conversation": "conv_1"}, "requests are stateless"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "needs tools of type function"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": allowed}, "tool_choice"),
        ({"input": [image]}, "takes text, not images"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "items of this type"),
    ]
    async with serving() as world, openai_client(world) as client:
        for wrong, message in refused:
            with pytest.raises(openai.BadRequestError, match=message):
                await client.responses.create(**HI, extra_body=wrong)
        assert world.engine.requests == []
        await client.responses.create(**HI, store=False, truncation="disabled")


async def test_truncation_drops_as_few_of_the_oldest_turns_as_possible() -> None:
    asking = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    turns: list[list[Any]] = [[{"role": "user", "content": f"{turn} " * 20}] for turn in range(6)]
    turns[2] += [asking, {"type": "function_call_output", "call_id": "c", "output": "sun"}]
    asked = {"instructions": "Be brief.", "truncation": "auto"}

    def body(first: int, **further: Any) -> Any:
        return {**asked, **further, "input": [item for turn in turns[first:] for item in turn]}

    made = model()
    wholes: list[list[int]] = []
    for first in range(6):
        with contextlib.suppress(ContextExceeded):
            wholes.append(list((await responses(body(first, truncation="disabled"), made)).generations[0].prompt))
    assert 1 <= len(wholes) <= 4, "some turns are too many"
    call = await responses(body(0), made)
    assert list(call.generations[0].prompt) == wholes[0]
    assert list((await responses(body(5), made)).generations[0].prompt) == wholes[-1]
    assert (await whole(call, made.engine))["truncation"] == "auto"
    with pytest.raises(ContextExceeded):
        await responses({**asked, "input": "hi " * 400}, made)
    passes = 0  # of the event loop while turns are dropped
    parsing = asyncio.ensure_future(responses(body(0), made))
    while not parsing.done():
        await asyncio.sleep(0)
        passes += 1
    assert passes > 2


async def test_tools_that_are_no_functions_are_reported_as_ignored() -> None:
    grouped: dict[str, Any] = {"type": "namespace", "name": "agents", "tools": [{**WEATHER, "name": "spawn"}]}
    engine = Speaking(SAID)
    async with serving(engine, chat_template=THINKING) as world:
        sent = {**HI, "tools": [WEATHER, grouped, {"type": "web_search"}, {"type": "custom", "name": "patch"}]}
        status, headers, body = await world.post("/v1/responses", sent)
        assert status == 200
        assert (
            headers["X-Ignored-Fields"] == "tools[namespace],tools[web_search],tools[custom],tools[].name,tools[].tools"
        )
        assert [tool["name"] for tool in body["tools"]] == ["weather"]
        assert ("weather" in engine.prompt(), "spawn" in engine.prompt()) == (True, False)
        assert "function_call" in [item["type"] for item in body["output"]]


async def test_a_request_to_store_the_response_is_reported_as_ignored() -> None:
    async with serving() as world:
        status, headers, body = await world.post("/v1/responses", {**HI, "store": True})
        assert (status, headers["X-Ignored-Fields"]) == (200, "store")
        assert body["store"] is False


@pytest.mark.parametrize("included", sorted(set(typing.get_args(ResponseIncludable)) - {LOGPROBS}))
async def test_what_no_response_includes_is_reported_as_ignored(included: str) -> None:
    async with serving() as world:
        status, headers, _ = await world.post("/v1/responses", {**HI, "include": [included, LOGPROBS]})
        assert (status, headers["X-Ignored-Fields"]) == (200, f"include[{included}]")
