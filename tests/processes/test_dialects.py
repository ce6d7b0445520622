"""Exceptions of the official client of each API: a worker that exits within a stream, and the router's own errors."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from router.config.api_keys import ApiKey
from router.config.settings import Settings
from router.errors import ModelNotFound
from router.launch.interface import WorkerLost
from tests.fakes import GIB
from tests.processes.clients import async_anthropic, async_ollama, async_openai
from tests.processes.upstreams import STREAM, Upstream, World, chunk, dying, unasked, world
from worker.protocol.argv import AdapterSource
from worker.protocol.events import RequestEnded

HI: Any = {"model": "a", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
BEGUN = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant",'
    b'"model":"a","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":1,"output_tokens":0}}}\n\n'
)


async def send_json(upstream: Upstream, body: bytes, status: str = "200 OK") -> None:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    await upstream.send(head.encode() + body)


async def test_anthropics_client_raises_when_a_worker_is_lost(tmp_path: Path) -> None:
    async with dying(tmp_path, BEGUN) as (up, seen), async_anthropic(up) as client:
        stream = await client.messages.create(**HI, stream=True)
        assert (await anext(stream)).type == "message_start"
        seen.set()
        with pytest.raises(anthropic.APIStatusError, match="worker"):
            await anext(stream)


async def test_anthropics_client_knows_the_routers_own_errors(tmp_path: Path) -> None:
    async with world(tmp_path, unasked) as up, async_anthropic(up) as client:
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.messages.create(**{**HI, "model": "b"})
        body: Any = caught.value.body
        assert body["type"] == "error"
        assert body["error"]["type"] == "not_found_error"
        assert body["request_id"] == caught.value.request_id
        up.fleet.files.missing.add("a")  # type: ignore[attr-defined]
        with pytest.raises(anthropic.BadRequestError, match="not loaded"):
            await client.messages.count_tokens(model="a", messages=HI["messages"], extra_query={"autoload": "false"})
        with pytest.raises(anthropic.APIStatusError) as wrong:
            await client.get("/v1/messages", cast_to=object)
        assert (wrong.value.status_code, json.loads(wrong.value.response.text)["type"]) == (405, "error")


async def test_anthropics_client_lists_models_by_name_and_date(tmp_path: Path) -> None:
    async with world(tmp_path, unasked) as up, async_anthropic(up, _strict_response_validation=True) as client:
        page = await client.models.list(limit=1)
        [listed] = page.data
        one = await client.models.retrieve("a")
        for model in (listed, one):
            assert (model.id, model.type, model.display_name) == ("a", "model", "a")
            assert model.created_at.tzinfo is not None
        assert one.created_at == listed.created_at
        assert (page.has_more, page.first_id, page.last_id) == (False, "a", "a")
        assert [model.id async for model in client.models.list()] == ["a"]
        unsaid: Any = {"headers": {"anthropic-version": anthropic.omit}}
        plain = await client.get("/v1/models", cast_to=object, options=unsaid)
        assert isinstance(plain, dict)
        assert plain.keys() == {"object", "data"}


async def test_a_responses_client_raises_when_a_worker_is_lost(tmp_path: Path) -> None:
    response: Any = {"id": "resp_1", "object": "response", "created_at": 1, "model": "a", "output": [], "tools": []}
    response |= {"parallel_tool_calls": True, "tool_choice": "auto", "status": "in_progress"}
    told = json.dumps({"type": "response.created", "response": response, "sequence_number": 0})
    first = f"event: response.created\ndata: {told}\n\n".encode()
    async with dying(tmp_path, first) as (up, seen), async_openai(up) as client:
        stream = await client.responses.create(model="a", input="hi", stream=True)
        assert (await anext(stream)).type == "response.created"
        seen.set()
        with pytest.raises(openai.APIError, match="worker") as caught:
            await anext(stream)
        body: Any = caught.value.body
        assert (body["type"], body["reason"]) == ("server_error", "worker_crashed")
        with pytest.raises(openai.NotFoundError, match="not found"):
            await client.responses.create(model="b", input="hi")


# Ollama

LINES = STREAM.replace(b"text/event-stream", b"application/x-ndjson")


def line(**told: Any) -> bytes:
    return json.dumps({"model": "a", **told}, separators=(",", ":")).encode() + b"\n"


async def test_ollamas_client_raises_when_a_worker_is_lost(tmp_path: Path) -> None:
    first = line(message={"role": "assistant", "content": "w"}, done=False)
    async with dying(tmp_path, first, LINES) as (up, seen), async_ollama(up) as client:
        stream = await client.chat("a:latest", HI["messages"], stream=True)
        assert (await anext(stream)).message.content == "w"
        seen.set()
        with pytest.raises(ollama.ResponseError, match="worker"):
            await anext(stream)


async def test_ollamas_client_waits_through_a_load_and_gets_its_lines(tmp_path: Path) -> None:
    """Ollama streams by default and has no comments: until a token comes, lines have an empty text."""
    last = line(response="", done_reason="stop", done=True)

    async def answer(upstream: Upstream) -> None:
        await upstream.send(LINES + b"".join(map(chunk, [line(response="w", done=False), last])) + b"0\r\n\r\n")

    settings = Settings(stream_commit_seconds=0.02, sse_ping_interval=0.02)
    async with world(tmp_path, answer, settings=settings, load_seconds=0.2) as up, up.client() as client:
        body = (await client.post("/api/generate", json={"name": "a", "prompt": "x"})).content
        told = [json.loads(each) for each in body.splitlines()]
        assert len(told) > 3
        assert "".join(each["response"] for each in told) == "w"
        assert [each["done"] for each in told] == [False] * (len(told) - 1) + [True]


async def test_only_an_ollama_request_carries_its_load_time_to_the_worker(tmp_path: Path) -> None:
    async def answer(upstream: Upstream) -> None:
        await send_json(upstream, b"{}")

    def told(upstream: Upstream) -> list[float]:
        lines = [each.split(": ") for each in upstream.head.split("\r\n")]
        return [float(value) for name, *rest in lines if name.lower() == "x-router-waited" for value in rest]

    async with world(tmp_path, answer, load_seconds=0.2) as up:
        async with up.client(**{"X-Router-Waited": "99"}) as client:
            body = {"model": "a", "messages": HI["messages"], "stream": False}
            both = (client.post("/api/chat", json=body), client.post("/v1/chat/completions", json=body))
            for answered in await asyncio.gather(*both):
                assert answered.status_code == 200
            await client.post("/api/chat", json=body)
        paths = {each.head.split(" ")[1]: told(each) for each in up.requests[:2]}
        assert paths["/v1/chat/completions"] == told(up.requests[2]) == []
        [waited] = paths["/api/chat"]
        assert 0.2 <= waited < 99


async def test_ollamas_client_lists_and_describes_models(tmp_path: Path) -> None:
    async def answer(upstream: Upstream) -> None:
        body = line(message={"role": "assistant", "content": "w"}, done=True)
        await send_json(upstream, body)

    async with world(tmp_path, answer) as up, async_ollama(up) as client:
        assert [model.model for model in (await client.list()).models] == ["a:latest"]
        assert list((await client.ps()).models) == []
        release = (await client._client.get("/api/version")).json()["version"]
        assert [int(part) for part in release.split(".")] >= [0, 6, 4], "editors refuse to talk to older ones"
        assert (await client.chat("a", HI["messages"])).message.content == "w"
        [running] = (await client.ps()).models
        assert running.size
        assert running.expires_at is not None
        assert (running.model, running.expires_at.year) == ("a:latest", 9999)
        up.launcher.say("a", RequestEnded(id="r", keep_alive=3600.0))
        [running] = (await client.ps()).models
        assert running.expires_at is not None
        left = running.expires_at - datetime.now(UTC)
        assert 3000 < left.total_seconds() <= 3601
        shown = await client.show("a")
        assert shown.details is not None
        assert shown.details.format == "safetensors"
        with pytest.raises(ollama.ResponseError, match="not found") as caught:
            await client.show("b")
        assert caught.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match="not offered") as copied:
            await client.copy("a", "b")
        assert copied.value.status_code == 501


async def test_keep_alive_of_a_shared_worker_is_the_latest_value_by_any_name(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, unasked, keys={"ttl": 600.0}, twin="b") as up, async_ollama(up) as client:
        await up.fleet.load("a,b")
        for keep_alive, wanted in ((None, 600.0), (3600.0, 3600.0), (None, 3600.0), (1800.0, 1800.0)):
            up.launcher.say("a,b", RequestEnded(id="r", keep_alive=keep_alive))
            running = (await client.ps()).models
            left = [each.expires_at - datetime.now(UTC) for each in running if each.expires_at is not None]
            assert [each.model for each in running] == ["a:latest", "b:latest"]
            assert [wanted - 300 < each.total_seconds() <= wanted + 1 for each in left] == [True, True]
        up.launcher.say("a,b", RequestEnded(id="r", keep_alive=0.0))
        [worker] = up.fleet.workers()
        async with asyncio.timeout(60):
            await worker.stopped.wait()
        assert list((await client.ps()).models) == []


async def test_a_model_that_is_not_loaded_is_unloaded_without_a_load(tmp_path: Path) -> None:
    async with world(tmp_path, unasked) as up, async_ollama(up) as client:
        for answer in (await client.chat("a:latest", keep_alive="0s"), await client.generate("a:latest", keep_alive=0)):
            assert (answer.model, answer.done_reason) == ("a:latest", "unload")
        assert up.launcher.journal == []


async def test_a_router_started_with_one_model_by_name_takes_any_name_for_it(tmp_path: Path) -> None:
    adapted: Any = {"keys": {"adapters": (AdapterSource(name="french", path="/f"),)}}
    cases: list[tuple[dict[str, Any], Any, bool]] = [
        ({"model": ("/a",)}, {}, True),
        ({"hf_repo": ("org/a",)}, {}, True),
        ({}, {}, False),
        ({"model": ("/a",), "unknown_model": "reject"}, {}, False),
        ({"model": ("/a",)}, {"twin": "b"}, False),
        ({"model": ("/a",)}, adapted, False),
    ]
    for number, (settings, further, is_found) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with world(folder, unasked, **further) as up:
            up.registry.settings = Settings(**settings)
            with contextlib.nullcontext() if is_found else pytest.raises(ModelNotFound):
                found = up.registry.choose(ApiKey(digest=b""), path=None, body="gpt-4", query={})
                assert found == ("a", "gpt-4")


# LMI


async def test_lmis_stream_ends_with_an_error_line_when_a_worker_is_lost(tmp_path: Path) -> None:
    first = b'{"token":{"id":5,"text":"w","log_prob":-0.5}}\n'
    headers = STREAM.replace(b"text/event-stream", b"application/jsonlines")
    async with dying(tmp_path, first, headers) as (up, seen), up.client() as client:
        lines = []
        with pytest.raises(httpx.RemoteProtocolError):  # noqa: PT012 - the end of the connection comes last
            async with client.stream("POST", "/invocations", json={"inputs": "hi", "stream": True}) as answer:
                async for each in answer.aiter_lines():
                    lines.append(json.loads(each))
                    seen.set()
        assert lines[0]["token"]["text"] == "w"
        assert lines[1]["token"]["id"] == -1
        assert "worker" in lines[1]["token"]["error_msg"]
        assert lines[1]["details"] == {"finish_reason": "error"}


SAID = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"a","choices":[]}\n\n'


async def frames_of(up: World, path: str, **body: Any) -> AsyncIterator[str]:
    """The lines of a stream that are not empty, until it ends or breaks off."""
    async with (
        up.client() as client,
        client.stream("POST", path, json={"model": "a", "stream": True, **body}) as answer,
    ):
        assert answer.headers["content-type"] == "text/event-stream"
        async for line in answer.aiter_lines():
            if line:
                yield line


@pytest.mark.parametrize(
    ("path", "body"),
    [("/invocations", {"messages": []}), ("/predictions/a", {"prompt": "hi"}), ("/models/a/invoke", {"messages": []})],
)
async def test_a_body_of_openais_gets_a_stream_of_openais_at_lmis_paths(
    path: str, body: dict[str, Any], tmp_path: Path
) -> None:
    async def answer(upstream: Upstream) -> None:
        assert upstream.head.startswith("POST /invocations ")
        await upstream.send(STREAM + chunk(SAID) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with world(
        tmp_path, answer, settings=Settings(stream_commit_seconds=0.02, sse_ping_interval=0.02), load_seconds=0.2
    ) as up:
        lines = [line async for line in frames_of(up, path, **body)]
        assert lines[0].startswith(": ")
        assert lines[-2:] == [SAID.decode().strip(), "data: [DONE]"]


async def test_a_late_error_on_an_lmi_path_has_openais_format_for_openai_clients(tmp_path: Path) -> None:
    async def refuse(upstream: Upstream) -> None:
        waiting = asyncio.Event()
        asyncio.get_running_loop().call_later(0.15, waiting.set)
        await waiting.wait()
        body = b'{"code":400,"type":"invalid_request_error","message":"too odd"}'
        await send_json(upstream, body, "400 Bad")

    async with world(tmp_path, refuse, settings=Settings(stream_commit_seconds=0.05)) as up:
        lines = []
        with pytest.raises(httpx.RemoteProtocolError):  # noqa: PT012 - the end of the connection comes last
            async for line in frames_of(up, "/invocations", messages=[]):
                lines.append(line)  # noqa: PERF401
        error = json.loads(lines[-1].removeprefix("data: "))["error"]
        assert (error["code"], error["message"], error["reason"]) == (400, "too odd", "invalid_value")


@pytest.mark.parametrize("path", ["/predictions/a", "/models/a/invoke", "/predictions/A"])
async def test_a_model_named_in_lmis_path_is_asked_for_its_invocation(tmp_path: Path, path: str) -> None:
    async def answer(upstream: Upstream) -> None:
        assert upstream.head.startswith("POST /invocations ")
        body = b'{"generated_text":"w"}'
        await send_json(upstream, body)

    async with world(tmp_path, answer) as up, up.client() as client:
        told = await client.post(path, json={"inputs": "hi"})
        assert told.json() == {"generated_text": "w"}
        unknown = await client.post(path.replace("/a", "/org%2Fb").replace("/A", "/b"), json={"inputs": "hi"})
        assert (unknown.status_code, set(unknown.json())) == (404, {"code", "type", "message"})


async def test_a_name_that_is_none_is_refused_as_its_dialect_does(tmp_path: Path) -> None:
    async with world(tmp_path, unasked) as up, up.client() as client:
        for path in ("/v1/models/%0A", "/lmi/models/%0A"):
            answer = await client.get(path)
            assert (answer.status_code, "model" in answer.text) == (404, True), answer.text
        shown = await client.post("/api/show", json={"model": "a", "name": 5})
        assert (shown.status_code, shown.json()) == (400, {"error": "name must be a string"})


@pytest.mark.parametrize("path", ["/v1/completions?model=A", "/models/A/invoke", "/v1/completions?model_name=%41"])
async def test_an_answer_can_repeat_the_name_that_was_not_in_its_body(tmp_path: Path, path: str) -> None:
    async def answer(upstream: Upstream) -> None:
        await send_json(upstream, b"{}")

    async with world(tmp_path, answer) as up, up.client() as client:
        assert (await client.post(path, json={"inputs": "x"})).headers["x-router-model"] == "a"
        assert "\r\nx-router-asked: a\r\n" in up.requests[-1].head.lower()
        assert "X-Router-Asked: A" in up.requests[-1].head
        await client.post(path.replace("=A", "=a").replace("/A/", "/a/").replace("%41", "a"), json={"model": "a"})
        assert "router-asked" not in up.requests[-1].head.lower()


async def test_ping_is_well_until_a_model_of_the_start_fails(tmp_path: Path) -> None:
    async with world(tmp_path, unasked) as up, up.client() as client:
        answer = await client.get("/ping")
        assert (answer.status_code, answer.json()) == (200, {"status": "healthy"})
        up.registry.startup_pending = frozenset({"a"})
        assert (await client.get("/ping")).json() == {"status": "pending"}
        up.launcher.models["a"].start_fails = [WorkerLost("no", cause="load_failed", exit=3)]
        await client.post("/models/load?wait=1", json={"model": "a"})
        answer = await client.get("/ping")
        assert (answer.status_code, answer.json()["code"]) == (500, 500)


async def test_a_model_of_the_start_that_does_not_fit_has_failed(tmp_path: Path) -> None:
    async with world(tmp_path, unasked) as up, up.client() as client:
        up.registry.startup_pending = frozenset({"a"})
        model = up.fleet.models["a"]
        model.preset = replace(model.preset, required_memory={"": 900 * GIB})
        assert (await client.post("/models/load?wait=1", json={"model": "a"})).status_code == 507
        assert (await client.get("/ping")).status_code == 500
        (shown,) = (await client.get("/lmi/models")).json()["models"]
        assert shown["status"] == "FAILED"
