"""GET /models/sse, /slots and /props as llama-server's clients read them: a real router and fake workers."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.api.llama_server import NEUTRAL
from tests.processes.listening import Events, events_of
from tests.processes.routers import Router, chat, error_of, fake_snapshot, presets, router
from worker.interface import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

MARGIN = ("--models-memory-margin", "64")


def told(events: Events, model: str) -> list[tuple[str, Any]]:
    """The events of one model without progress: (event, status), and a third member if it drains."""
    return [
        (each["event"], each["data"].get("status"), *(("draining",) if each["data"].get("draining") else ()))
        for each in events.seen
        if each["model"] == model and "progress" not in each["data"]
    ]


BEGINS = [("model_status", "loading"), ("status_change", "loading")]
LOADED = ("status_change", "loaded")
ENDS = [("status_change", "loaded", "draining"), ("status_change", "unloaded")]


async def test_a_load_an_eviction_an_unload_and_a_crash_are_reported_in_order(one: Router, tmp_path: Path) -> None:
    broken = {"_die_at_start": 3, "_message": "no architecture"}
    await one.serve(tmp_path, {"a": {}, "b": {}, "broken": broken})
    async with events_of(one) as events:
        await one.client.post("/models/load?wait=1", json={"model": "a"})
        loaded = await one.client.post("/models/load?wait=1", json={"model": "b"})
        assert loaded.json()["evicted"] == [{"model": "a", "reason": "evicted"}]
        await events.until_one(lambda each: each["model"] == "b" and each["data"].get("status") == "loaded")
        assert told(events, "a") == [*BEGINS, LOADED, *ENDS]
        assert told(events, "b") == [*BEGINS, LOADED]
        last = [each["data"] for each in events.seen if each["model"] == "a"][-1]
        assert last == {"status": "unloaded", "exit_code": 0, "reason": "evicted"}
        (info,) = (each["data"]["info"] for each in events.seen if "info" in each["data"] and each["model"] == "b")
        assert info["n_ctx"] == 256
        await one.client.post("/models/unload?wait=1", json={"model": "b"})
        await events.until("status_change", status="unloaded", reason="requested")
        assert told(events, "b") == [*BEGINS, LOADED, *ENDS]
        events.seen.clear()
        await one.client.post("/models/load?wait=1", json={"model": "a"})
        os.kill((await one.workers())["a"], signal.SIGKILL)
        await events.until("status_change", status="unloaded", reason="crashed")
        assert told(events, "a") == [*BEGINS, LOADED, *ENDS]
        assert events.seen[-1]["data"]["exit_code"] == -signal.SIGKILL
        assert "SIGKILL" in events.seen[-1]["data"]["error"]
        await one.client.post("/models/load?wait=1", json={"model": "broken"})
        await events.until("status_change", status="unloaded", exit_code=3, reason="load_failed")
        assert told(events, "broken") == [*BEGINS, ("status_change", "unloaded")]


async def test_what_a_worker_beside_another_does_is_not_what_the_model_does(up: Router, tmp_path: Path) -> None:
    go = tmp_path / "go"
    file = await up.serve(tmp_path, {"a": {"_hold": str(go)}, "twin": {"replicas": "2"}})
    async with events_of(up) as events:
        await up.client.post("/models/load?wait=1", json={"model": "twin"})
        asking = asyncio.create_task(up.client.post("/v1/chat/completions", json=chat("twin")))
        await asking
        await up.becomes("twin", "loaded", replicas={"ready": 2, "open": 2, "least": 2, "most": 2})
        assert told(events, "twin") == [*BEGINS, LOADED]
        slots = (await up.client.get("/slots", params={"model": "twin"})).json()
        assert [slot["id"] for slot in slots] == list(range(32))
        await up.client.post("/models/load?wait=1", json={"model": "a"})
        first = asyncio.create_task(up.client.post("/v1/chat/completions", json=chat("a")))
        await up.becomes("a", "loaded", in_flight=1)
        file.write_text(file.read_text().replace("[a]\n", "[a]\nctx-size = 128\n"))
        reload = (await up.client.get("/models?reload=1")).json()["reload"]
        assert reload["restarted"] == ["a"]
        second = asyncio.create_task(up.client.post("/v1/chat/completions", json=chat("a")))
        await up.becomes("a", "loaded", in_flight=2)  # by two generations of it
        go.touch()
        assert {(await each).status_code for each in (first, second)} == {200}
        await up.becomes("a", "loaded", in_flight=0)
        await up.says(r"a#\d+ stopping→stopped reason=config_changed")
        assert [each[1] for each in told(events, "a")][-1] == "loaded"
        assert "unloaded" not in [each[1] for each in told(events, "a")]
    async with events_of(up, "?snapshot=1") as events:
        await events.until_one(lambda each: each["model"] == "twin")
        assert [(each["model"], each["event"], each["data"]["status"]) for each in events.seen] == [
            ("a", "status_change", "loaded"), ("twin", "status_change", "loaded"),
        ]  # fmt: skip
        assert events.seen[0]["data"]["info"]["n_ctx"] == 128


async def test_everything_is_below_the_prefix_and_nothing_beside_it(tmp_path: Path) -> None:
    file = presets(tmp_path, {"org/a": {}})
    async with router("--models-preset", str(file), "--api-prefix", "/llm/x", "--no-slots", *MARGIN) as up:
        assert any("/llm/x/v1" in line for line in up.log)
        for path in ("/health", "/v1/models", "/"):
            assert (await up.client.get(f"/llm/x{path}")).status_code == 200
            assert error_of(await up.client.get(path)) == (404, "not_found")
        response = await up.client.post("/llm/x/v1/chat/completions", json=chat("org/a"))
        assert response.status_code == 200
        assert (await up.client.get("/llm/x/v1/models/org/a")).json()["status"]["value"] == "loaded"
        assert (await up.client.post("/llm/x/predictions/org/a", json={"inputs": "a"})).status_code == 200
        assert (await up.client.get("/llm/x/openapi.json")).json()["servers"] == [{"url": "/llm/x"}]
        assert set((await up.client.get("/llm/x/api/chat")).json()) == {"error"}  # Ollama's, of a wrong method
        assert error_of(await up.client.get("/llm/x/slots")) == (501, "not_offered")


async def test_props_give_the_default_sampling(up: Router, tmp_path: Path) -> None:
    neutral = SamplingParams()
    renamed = {"repeat_penalty": "repetition_penalty"}
    assert {name: getattr(neutral, renamed.get(name, name)) for name in NEUTRAL} == NEUTRAL
    template = "{% if tools %}{{ tools }}{% endif %}{{ messages }}"
    snapshot = fake_snapshot(tmp_path / "snapshots" / "b")
    (snapshot / "chat_template.jinja").write_text(template)
    (snapshot / "generation_config.json").write_text('{"top_k": 50, "temperature": 0.6}')
    await up.serve(tmp_path, {"a": {"temp": "0.3", "seed": 7}, "b": {}})
    a, b = [await props(up.client, name) for name in "ab"]
    assert a["default_generation_settings"]["params"] == {
        **NEUTRAL, "temperature": 0.3, "seed": 7, "n_predict": -1, "max_tokens": -1,
    }  # fmt: skip
    assert (b["default_generation_settings"]["params"]["top_k"], b["chat_template"]) == (50, template)
    assert b["default_generation_settings"]["params"]["temperature"] == 0.6
    assert (a["chat_template_caps"]["supports_tools"], b["chat_template_caps"]["supports_tools"]) == (False, True)
    assert error_of(await up.client.post("/props", json={})) == (501, "not_offered")


async def props(client: httpx.AsyncClient, model: str) -> Any:
    return (await client.get("/props", params={"model": model})).json()
