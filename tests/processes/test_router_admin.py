"""The router's own plane: pins, log lines, requests and their end, over a real router and fake workers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.processes.routers import DEADLINE, Router, chat, error_of, lines_written, presets, router, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

MARGIN = ("--models-memory-margin", "64")


async def requests(up: Router, **query: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = (await up.client.get("/router/requests", params=query)).json()
    return found


async def test_a_pinned_model_is_not_put_out_whatever_its_file_says(one: Router, tmp_path: Path) -> None:
    await one.serve(tmp_path, {"a": {}, "b": {"pin": "on"}, "c": {}})
    client = one.client
    await client.post("/v1/chat/completions", json=chat("a"))
    assert (await client.post("/router/pin", json={"model": "a"})).json() == {
        "success": True, "model": "a", "pinned": True,
    }  # fmt: skip
    assert (await one.status("a"))["pinned"] is True
    plan = (await client.get("/router/plan", params={"model": "c"})).json()
    assert (plan["decision"], plan["keep"]) == ("wait", {"a": "pinned"})
    await client.get("/models?reload=1")
    assert (await one.status("a"))["pinned"] is True
    rows = (await client.get("/router/config", params={"model": "a"})).json()["settings"]
    assert {"key": "pin", "value": "on", "origin": "/router/pin"} in rows
    await client.post("/router/pin", json={"model": "a", "pinned": False})
    await client.post("/router/pin", json={"model": "b", "pinned": False})
    assert (await one.status("b"))["pinned"] is False
    assert (await client.post("/v1/chat/completions", json=chat("c"))).status_code == 200
    assert error_of(await client.post("/router/pin", json={"model": "x"})) == (404, "model_not_found")
    assert error_of(await client.post("/router/pin", json={})) == (400, "model_missing")
    for wrong in ({"pinned": 1}, {"pin": False}):
        assert error_of(await client.post("/router/pin", json={"model": "a", **wrong})) == (400, "invalid_value")


async def test_changes_by_calls_end_with_the_removal_of_their_model(one: Router, tmp_path: Path) -> None:
    folder = tmp_path / "adapters" / "in-folder"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1}')
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    models = {"a": {"enable-lora": "on", "adapters-dir": folder.parent}}
    await one.serve(tmp_path, models)
    adapter = {"name": "by-call", "src": str(folder)}
    assert (await one.client.post("/models/a/adapters", params=adapter)).status_code == 200
    assert (await one.client.post("/router/pin", json={"model": "a"})).status_code == 200
    await one.serve(tmp_path, models)  # removes all models first
    adapters = (await one.client.get("/models/a/adapters")).json()["adapters"]
    assert [adapter["name"] for adapter in adapters] == ["in-folder"]
    assert (await one.status("a"))["pinned"] is False


async def test_what_was_learned_of_a_models_memory_can_be_dropped(one: Router, tmp_path: Path) -> None:
    async def source() -> str:
        """The source of the estimate of a load."""
        await one.client.post("/v1/chat/completions", json=chat("a"))
        found = (await one.status("a"))["estimate"]["source"]
        await one.client.post("/models/unload", json={"model": "a"})
        await one.has_no_workers()
        return str(found)

    async def forget(**body: str) -> httpx.Response:
        return await one.client.post("/router/forget", json=body)

    text = presets(tmp_path, {"a": {}}).read_text()
    await one.serve_presets(text.replace("required-memory = 64", ""))  # nothing is learned beside a stated figure
    assert [await source(), await source()] == ["static", "learned"]
    assert (await forget(model="a")).json() == {"success": True, "model": "a", "forgotten": 1}
    assert (await forget(model="a")).json()["forgotten"] == 0
    assert await source() == "static"
    await one.client.post("/v1/chat/completions", json=chat("a"))
    answer = (await forget(model="a")).json()
    assert answer["forgotten"] == 1
    assert "a worker of a records its memory again when it stops" in answer["warning"]
    await one.client.post("/models/unload", json={"model": "a"})
    await one.has_no_workers()
    assert (await forget(model="a")).json() == {"success": True, "model": "a", "forgotten": 1}
    assert error_of(await forget(model="x")) == (404, "model_not_found")
    assert error_of(await forget()) == (400, "model_missing")


async def test_least_granted_and_most_of_the_kv_cache_are_shown_wherever_a_model_is(
    one: Router, tmp_path: Path
) -> None:
    text = presets(tmp_path, {"a": {"parallel": 4, "ctx-size": 128}}).read_text()
    await one.serve_presets(text.replace("required-memory = 64", ""))
    token = 2 * 2 * 8 * 2  # bytes: keys and values of two heads of 8 elements
    sizes = {"least": 128, "granted": 4 * 128, "most": 4 * 128}
    expected = {name: {"tokens": tokens, "bytes": tokens * token} for name, tokens in sizes.items()}
    plan = (await one.client.get("/router/plan", params={"model": "a"})).json()
    assert (plan["decision"], plan["kv_cache"]) == ("start", expected)
    last = (await one.client.get("/router/state")).json()["last_event"]
    assert (await one.client.post("/v1/chat/completions", json=chat("a"))).status_code == 200
    in_mib = {name: {"tokens": tokens, "mib": 1} for name, tokens in sizes.items()}
    assert (await one.status("a"))["kv_cache"] == in_mib
    state = (await one.client.get("/router/state")).json()
    assert state["models"]["a"]["kv_cache"] == in_mib
    found, after = None, {"Last-Event-ID": str(last)}
    async with asyncio.timeout(DEADLINE), one.client.stream("GET", "/router/events", headers=after) as events:
        async for line in events.aiter_lines():
            if line.startswith("data:") and '"start"' in line:
                found = json.loads(line.removeprefix("data:"))
                break
    assert found is not None
    assert found["kv_cache"] == expected


async def test_log_lines_can_be_read_by_model_level_and_number(tmp_path: Path) -> None:
    file = presets(tmp_path, {"a": {"_last_words": "hello from a"}, "b": {"_die_at_start": 1, "_last_words": "oh"}})
    async with router("--models-preset", str(file), *MARGIN) as up:
        for name in "ab":
            await up.client.post("/v1/chat/completions", json=chat(name))

        async def lines(**query: Any) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = (await up.client.get("/router/logs", params=query)).json()["lines"]
            return found

        everything = await lines()
        assert [line["id"] for line in everything] == sorted(line["id"] for line in everything)
        about_a = "\n".join(line["message"] for line in await lines(model="a"))
        assert "hello from a" in about_a
        assert "a#1 starting→ready" in about_a
        assert "b#2" not in about_a
        assert {line["level"] for line in await lines(level="warning")} <= {"warning", "error"}
        assert any("b#2" in line["message"] for line in await lines(level="warning"))
        assert [len(await lines(lines=number)) for number in (1, 2)] == [1, 2]
        assert min(line["id"] for line in await lines(lines=2)) > everything[-1]["id"]
        for query in ({"level": "loud"}, {"lines": "0"}, {"lines": "x"}):
            assert error_of(await up.client.get("/router/logs", params=query)) == (400, "invalid_value")
        assert error_of(await up.client.get("/router/logs", params={"model": "x"})) == (404, "model_not_found")


async def test_log_lines_can_be_followed_from_where_one_left(tmp_path: Path) -> None:
    async def until(text: str, after: int | None = None, **query: str) -> list[tuple[int, str]]:
        headers = {} if after is None else {"Last-Event-ID": str(after)}
        found: list[tuple[int, str]] = []
        async with up.client.stream("GET", "/router/logs/sse", params=query, headers=headers) as response:
            assert response.headers["content-type"] == "text/event-stream"
            async for line in response.aiter_lines():
                if line == ": open" and text == "POST":  # text that is logged while a client follows the log
                    await up.client.post("/v1/chat/completions", json=chat("a"))
                if line.startswith("data: "):
                    told = json.loads(line.removeprefix("data: "))
                    found.append((told["id"], told["message"]))
                    if text in told["message"]:
                        break
        return found

    file = presets(tmp_path, {"a": {}, "b": {}})
    async with router("--models-preset", str(file), *MARGIN) as up:
        await up.client.get("/health")
        first = await until("GET /health")
        asked = await until("POST")
        assert [id for id, _ in asked] == sorted({id for id, _ in asked})
        missed = await until("POST", after=first[-1][0])
        assert missed[0][0] == first[-1][0] + 1
        assert {id for id, _ in missed} <= {id for id, _ in asked} | {missed[-1][0]}
        about_a = [message for _, message in await until("starting→ready", model="a")]
        assert all("a#1" in message or "model=a " in message for message in about_a)
        assert error_of(await up.client.get("/router/logs/sse", params={"level": "loud"})) == (400, "invalid_value")


async def read(response: httpx.Response, lines: list[str]) -> None:
    async for line in response.aiter_lines():
        lines.append(line)  # noqa: PERF401 - what came before it fails counts


async def test_requests_are_listed_while_they_run_and_after_they_ended(tmp_path: Path) -> None:
    go, fifo = tmp_path / "go", tmp_path / "journal"
    file = presets(tmp_path, {"a": {}, "held": {"_hold": str(go), "_journal": str(fifo)}})
    options = ("--models-preset", str(file), "--stream-commit-seconds", "0", *MARGIN)
    async with lines_written(fifo) as journal, router(*options) as up:
        await up.client.post("/v1/chat/completions", json=chat("a", "one two"), headers={"X-Request-Id": "first"})
        (ended,) = (await requests(up))["ended"]
        assert {name: ended[name] for name in ("id", "model", "endpoint", "status", "phase", "client")} == {
            "id": "first", "model": "a", "endpoint": "chat", "status": 200, "phase": "streaming", "client": "127.0.0.1",
        }  # fmt: skip
        assert ended["load_seconds"] > 0
        assert 0 < ended["ttft"] <= ended["seconds"]
        body = chat("held", stream=True)
        sent = {"X-Request-Id": "second"}
        async with up.client.stream("POST", "/v1/chat/completions", json=body, headers=sent) as response:
            (running,) = (await requests(up))["running"]
            assert (running["id"], running["status"]) == ("second", None)
            assert (await requests(up, model="a"))["running"] == []
            assert error_of(await up.client.delete("/router/requests/nobody")) == (404, "not_found")
            answer = await up.client.delete("/router/requests/second")
            assert answer.json() == {"success": True, "cancelled": 1}
            lines: list[str] = []
            with pytest.raises(httpx.RemoteProtocolError):
                await read(response, lines)
            assert any('"reason":"cancelled"' in line for line in lines)
        (ended,) = (await requests(up, model="held"))["ended"]
        assert (ended["id"], ended["status"]) == ("second", 504)
        asking = asyncio.create_task(
            up.client.post("/v1/chat/completions", json=chat("held"), headers={"X-Request-Id": "third"})
        )
        await until(journal, "request third")
        await up.client.delete("/router/requests/third")
        assert error_of(await asking) == (504, "cancelled")
        assert error_of(await up.client.delete("/router/requests/third")) == (404, "not_found")
        go.touch()
        assert (await up.client.post("/v1/chat/completions", json=chat("held"))).status_code == 200
        assert error_of(await up.client.get("/router/requests", params={"model": "x"})) == (404, "model_not_found")
