"""The main job on real processes and real models: what `scripts/run.sh` serves."""

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from router.config.settings import DEMO_LIMIT, DEMO_MARGIN
from tests.processes.forking import parent
from tests.processes.routers import DEADLINE, ROOT, Router, gone, router

MIB = 1 << 20
LIMIT, MARGIN = DEMO_LIMIT // MIB, DEMO_MARGIN // MIB

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def demo() -> AsyncIterator[Router]:
    """The built-in models, forked, under a limit that does not hold them all."""
    async with router("--fork-server", environ={"ROUTER_DEMO": "on"}) as up:
        await up.says("is warm")
        yield up


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def client(demo: Router) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{demo.port}/v1", api_key="x", timeout=300) as client:
        yield client


def resident(up: Router) -> int:
    """Bytes really resident in all processes of a router, whatever it thinks of them. A page that forked workers share
    counts once."""
    total = 0
    for entry in os.listdir("/proc"):
        folder = Path("/proc") / entry
        with contextlib.suppress(OSError, IndexError):
            if str(up.run).encode() in (folder / "cmdline").read_bytes():
                total += int((folder / "smaps_rollup").read_text().partition("\nPss:")[2].split()[0]) * 1024
    return total


async def printed(*words: str) -> str:
    """The stdout of a command of the router."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "router", *words,
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    said, _ = await process.communicate()
    assert process.returncode == 0
    return said.decode()


async def fork_server(up: Router) -> int:
    """Its process id."""
    found = re.search(r"the fork server \(process (\d+)\) is warm", await up.says("is warm"))
    assert found is not None
    return int(found[1])


async def test_a_worker_is_forked_and_each_stage_of_its_start_is_measured(demo: Router) -> None:
    answer = await demo.client.post("/v1/completions", json={"model": "demo-a", "prompt": "hello", "max_tokens": 2})
    assert answer.status_code == 200
    assert parent((await demo.workers())["demo-a"]) == await fork_server(demo)
    spent = (await demo.becomes("demo-a", "loaded", spent=lambda found: "first_token" in found))["spent"]
    assert next(iter(spent)) == "fork"
    stages = {"fork", "imports", "config", "tokenizer", "read", "build", "warmup", "server"}
    assert spent.keys() == stages | {"first_token"}
    timing = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    assert timing.keys() == {"queue", "load", *(f"load-{stage}" for stage in stages)}
    metrics = (await demo.client.get("/metrics")).text
    for stage in ("fork", "config", "read", "build", "first_token"):
        assert f'router_start_seconds_count{{model="demo-a",stage="{stage}"}} 1.0' in metrics
    table = await printed("ps", "--url", f"http://127.0.0.1:{demo.port}")
    [line] = [line for line in table.splitlines() if line.startswith("demo-a ")]
    assert " loaded " in line
    assert f"first_token {spent['first_token']:.2f}" in line or spent["first_token"] < 0.005


async def test_the_openai_client_chats_streams_and_embeds(client: openai.AsyncOpenAI) -> None:
    question: list[Any] = [{"role": "user", "content": "What are you?"}]
    answer = await client.chat.completions.create(model="demo-chat", messages=question, temperature=0)
    text = answer.choices[0].message.content
    assert text
    assert "router" in text.lower()
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 3
    stream = await client.chat.completions.create(model="demo-chat", messages=question, temperature=0, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(pieces) == text
    assert sum(piece != "" for piece in pieces) > 3
    vectors = await client.embeddings.create(model="demo-embed", input=["a margin", "an eviction"])
    assert [len(row.embedding) for row in vectors.data] == [len(vectors.data[0].embedding)] * 2
    assert math.isclose(math.fsum(x * x for x in vectors.data[0].embedding), 1.0, rel_tol=1e-3)


async def test_models_in_turn_evict_the_least_recently_used_and_stay_within_the_limit(
    demo: Router, client: openai.AsyncOpenAI
) -> None:
    budget = (LIMIT - MARGIN) * MIB
    highest = 0
    over = asyncio.Event()

    async def watch() -> None:
        nonlocal highest
        while not over.is_set():
            highest = max(highest, resident(demo))
            await asyncio.sleep(0.1)  # a sampler has nothing to wait for

    watching = asyncio.create_task(watch())
    used = ["demo-a"]  # by the test before

    async def use(name: str) -> set[str]:
        done = await client.completions.create(model=name, prompt="hello " * 40, max_tokens=30)
        assert done.usage is not None
        return set(await demo.workers()) - {"demo-embed"}

    for name in ("demo-chat", "demo-a", "demo-b", "demo-chat", "demo-a", "demo-b"):
        loaded = await use(name)
        used = [*[other for other in used if other != name], name]
        assert loaded == set(used[-len(loaded) :]), f"{loaded} are loaded after {used}"
    assert "demo-c" in await use("demo-c")  # it is so large that size, too, decides what leaves
    over.set()
    await watching
    assert 0 < highest <= budget, f"{highest / MIB:.0f} MiB resident, {budget / MIB:.0f} allowed"
    entries = (await demo.client.get("/models")).json()["data"]
    assert "evicted" in {entry["status"].get("reason") for entry in entries}
    for entry in entries:
        for row in entry["status"].get("memory", {}).values():
            assert row["measured_mib"] is None or row["measured_mib"] <= row["reserved_mib"]


async def test_the_demo_calls_a_tool_and_uses_its_answer(demo: Router, client: openai.AsyncOpenAI) -> None:
    place = {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}
    numbers = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tools: Any = [
        {
            "type": "function",
            "function": {"name": "get_weather", "description": "Get the weather", "parameters": place},
        },
        {"type": "function", "function": {"name": "add", "description": "Add two numbers", "parameters": numbers}},
    ]
    messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    ask: Any = {"model": "demo-chat", "messages": messages, "tools": tools, "temperature": 0}
    answer = await client.chat.completions.create(**ask)
    assert answer.choices[0].finish_reason == "tool_calls"
    said = answer.choices[0].message
    assert said.tool_calls
    (call,) = said.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"location": "Paris"})

    streamed = [chunk async for chunk in await client.chat.completions.create(**ask, stream=True)]
    deltas = [each for chunk in streamed for each in chunk.choices[0].delta.tool_calls or []]
    assert "".join(each.function.arguments or "" for each in deltas if each.function) == call.function.arguments

    messages += [said, {"role": "tool", "tool_call_id": call.id, "content": "sunny, 25 degrees"}]
    told = await client.chat.completions.create(**ask)
    assert told.choices[0].message.content == "The answer of get_weather is: sunny, 25 degrees"

    forced: Any = {"type": "function", "function": {"name": "add"}}
    question: Any = [{"role": "user", "content": "hello"}]
    held = await client.chat.completions.create(**{**ask, "messages": question}, tool_choice=forced, max_tokens=100)
    assert [each.function.name for each in held.choices[0].message.tool_calls or []][:1] == ["add"]


async def test_the_demo_comes_to_the_end_of_an_object_that_a_schema_asks_for(client: openai.AsyncOpenAI) -> None:
    members = {"title": {"type": "string"}, "participants": {"type": "array", "items": {"type": "string"}}}
    schema = {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}
    answer = await client.chat.completions.create(
        model="demo-chat",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "said", "schema": schema, "strict": True}},
    )
    assert answer.choices[0].finish_reason == "stop"
    assert list(json.loads(answer.choices[0].message.content or "")) == list(members)


async def test_no_process_of_the_demo_outlives_a_killed_router(demo: Router) -> None:
    pids = [*(await demo.workers()).values(), await fork_server(demo)]
    assert len(pids) > 1
    await demo.end(signal.SIGKILL)
    assert await gone(pids, within=DEADLINE)
