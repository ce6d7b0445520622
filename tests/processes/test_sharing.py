"""Presets of one model, which differ in what matters for requests alone: one worker process, and many names for it."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.processes.routers import Router, chat, error_of, fake_python, fake_snapshot, router

pytestmark = pytest.mark.asyncio(loop_scope="session")

COLD, WARM = {"temp": 0.1}, {"temp": 0.9, "chat-template-kwargs": '{"tone": "kind"}'}


def one_model(folder: Path, models: Mapping[str, Mapping[str, Any]]) -> str:
    """Presets that are all of one fake model, whose worker keeps a journal."""
    snapshot = fake_snapshot(folder / "m", journal=str(folder / "journal"))
    lines = ["[*]", f"python = {fake_python(folder)}", "required-memory = 64"]
    for name, keys in models.items():
        lines += [f"[{name}]", f"model = {snapshot}", *(f"{key} = {value}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def journal(folder: Path, *kinds: str) -> list[str]:
    """The journal of the workers without process ids."""
    lines = (folder / "journal").read_text().splitlines()
    return [line.split()[0] if line.startswith("started") else line for line in lines if line.startswith(kinds)]


async def ask(up: Router, name: str, **headers: str) -> str:
    """The model that answers, as it says itself."""
    response = await up.client.post("/v1/chat/completions", json=chat(name), headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["x-router-model"] == name
    return str(response.json()["model"])


async def test_two_names_have_one_process_and_each_its_own_defaults(up: Router, tmp_path: Path) -> None:
    await up.serve_presets(one_model(tmp_path, {"cold": COLD, "warm": WARM}))
    for number, name in enumerate(("cold", "warm", "cold")):
        assert await ask(up, name, **{"X-Request-Id": f"r{number}"}) == name
    assert journal(tmp_path, "started", "profile", "request") == [
        "started", 'profile cold {"temp": 0.1}', "request r0 /v1/chat/completions under cold",
        'profile warm {"temp": 0.9}', "request r1 /v1/chat/completions under warm",
        "request r2 /v1/chat/completions under cold",
    ]  # fmt: skip
    state = (await up.client.get("/router/state")).json()
    assert [row["model"] for row in state["workers"]] == ["cold,warm"]
    assert list(state["models"]) == ["cold", "warm"]


async def test_lists_tell_the_memory_of_a_shared_worker_once(up: Router, tmp_path: Path) -> None:
    await up.serve_presets(one_model(tmp_path, {"cold": COLD, "hot": WARM | {"tags": "x", "alias": "w"}}))
    await up.client.post("/v1/chat/completions", json=chat("w"))
    listed = {each["id"]: each for each in (await up.client.get("/models")).json()["data"]}
    first, second = (listed[name]["status"] for name in ("cold", "hot"))
    assert (first["value"], second["value"]) == ("loaded", "loaded")
    assert (first["shares"], second["shares"]) == (["hot"], ["cold"])
    assert "memory" in first
    assert "memory" not in second
    assert (listed["cold"]["tags"], listed["hot"]["aliases"]) == ([], ["w"])
    assert "--temp" in first["args"]
    assert first["args"] != second["args"]
    held = (await up.client.get("/api/ps")).json()["models"]
    assert [(each["name"], each["size"] > 0) for each in held] == [("cold:latest", True), ("hot:latest", False)]
    slots = (await up.client.get("/slots")).json()
    assert {slot["model"] for slot in slots} == {"cold"}
    props = [(await up.client.get("/props", params={"model": name})).json() for name in ("cold", "hot")]
    assert [each["default_generation_settings"]["params"]["temperature"] for each in props] == [0.1, 0.9]
    metrics = (await up.client.get("/metrics")).text
    assert 'router_model_workers{model="cold,hot"} 1.0' in metrics
    assert 'router_requests_total{code="200",endpoint="chat",model="hot"} 1.0' in metrics
    own = (await up.client.get("/metrics", params={"model": "hot"})).text
    assert 'router_model_workers{model="cold,hot"} 1.0' in own
    assert "llamacpp:tokens_predicted_total" in own
    plan = (await up.client.get("/router/plan", params={"model": "hot"})).json()
    assert (plan["model"], plan["message"]) == ("hot", "hot is ready already")


async def test_what_is_loaded_and_unloaded_is_the_worker(up: Router, tmp_path: Path) -> None:
    await up.serve_presets(one_model(tmp_path, {"cold": COLD, "warm": WARM}))
    loaded = await up.client.post("/models/load", params={"wait": "1"}, json={"model": "cold"})
    assert loaded.json()["status"]["value"] == "loaded"
    again = await up.client.post("/models/load", json={"model": "warm"})
    assert (error_of(again), again.json()["error"]["message"]) == (
        (400, "already_running"), "model 'warm' is already running",
    )  # fmt: skip
    (tmp_path / "hold").unlink(missing_ok=True)
    held = asyncio.create_task(ask_held(up, "cold", tmp_path / "hold"))
    await up.becomes("cold", "loaded", in_flight=1)
    unloaded = await up.client.post("/models/unload", json={"model": "warm"})
    assert unloaded.json() == {"success": True}
    await up.becomes("cold", "loaded", draining=True)
    (tmp_path / "hold").touch()
    assert (await held) == 200, "running requests of the other name end in peace"
    assert (await up.becomes("warm", "unloaded"))["reason"] == "requested"
    assert (await up.status("cold"))["value"] == "unloaded"
    refused = await up.client.post("/v1/chat/completions", params={"autoload": "false"}, json=chat("warm"))
    assert error_of(refused) == (400, "model_not_loaded")
    assert "cold" not in refused.text


async def ask_held(up: Router, name: str, hold: Path) -> int:
    body = chat(name) | {"fake": {"hold": str(hold)}}
    return (await up.client.post("/v1/chat/completions", json=body)).status_code


async def test_autoload_is_a_matter_of_names(up: Router, tmp_path: Path) -> None:
    await up.serve_presets(one_model(tmp_path, {"eager": {}, "shy": {"autoload": "off"}}))
    assert error_of(await up.client.post("/v1/chat/completions", json=chat("shy"))) == (400, "model_not_loaded")
    assert await ask(up, "eager") == "eager"
    assert await ask(up, "shy") == "shy"
    assert journal(tmp_path, "started") == ["started"]


async def test_a_key_hears_of_its_own_names_only(tmp_path: Path) -> None:
    file, keys = tmp_path / "models.ini", tmp_path / "keys"
    file.write_text(one_model(tmp_path, {"cold": COLD, "warm": WARM}))
    keys.write_text("boss name=boss admin\nguest name=guest models=warm\n")
    keys.chmod(0o600)
    async with router("--models-preset", str(file), "--api-key-file", str(keys)) as up:
        guest, boss = ({"X-Api-Key": key} for key in ("guest", "boss"))
        assert await ask(up, "warm", **guest) == "warm"
        (entry,) = (await up.client.get("/models", headers=guest)).json()["data"]
        assert "shares" not in entry["status"]
        assert (entry["status"]["args"], "preset" in entry["status"]) == ([], False), "they are for administrators"
        assert "memory" in entry["status"], "it is the first that this key sees"
        refused = await up.client.post("/v1/chat/completions", json=chat("cold"), headers=guest)
        assert error_of(refused) == (404, "model_not_found")
        await up.client.post("/models/unload", params={"wait": "1"}, json={"model": "cold"}, headers=boss)
        answers = [
            await up.client.post("/v1/chat/completions", params={"autoload": "0"}, json=chat("warm"), headers=guest),
            await up.client.get("/slots", params={"model": "warm"}, headers=guest),
        ]
        assert [error_of(each) for each in answers] == [(400, "model_not_loaded")] * 2
        assert not any("cold" in each.text for each in answers)
        assert not any("guest" in line.replace("name=guest", "") for line in up.log), "keys are not logged"


async def test_events_tell_each_name_of_the_worker_that_it_shares(up: Router, tmp_path: Path) -> None:
    await up.serve_presets(one_model(tmp_path, {"cold": COLD, "warm": WARM}))
    async with up.client.stream("GET", "/models/sse") as events:
        lines = events.aiter_lines()
        await anext(lines)  # it is open
        await up.client.post("/models/load", json={"model": "warm"})
        seen: dict[str, str] = {}
        ids: list[str] = []
        async with asyncio.timeout(60):
            async for line in lines:
                if line.startswith("id:"):
                    ids.append(line)
                if line.startswith("data:"):
                    said = json.loads(line[5:])
                    seen[said["model"]] = said["data"].get("status", "")
                if seen == {"cold": "loaded", "warm": "loaded"}:
                    break
        assert len(ids) == len(set(ids)), "one event has one id, with the last of its frames"


async def reload(up: Router, folder: Path, models: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    (up.folder / "models.ini").write_text(one_model(folder, models))
    response = await up.client.post("/router/reload")
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def test_defaults_of_requests_change_without_a_restart(up: Router, tmp_path: Path) -> None:
    await up.serve_presets(one_model(tmp_path, {"cold": COLD}))
    await ask(up, "cold")
    assert (await reload(up, tmp_path, {"cold": {"temp": 0.3}}))["restarted"] == []
    await ask(up, "cold")
    assert journal(tmp_path, "started", "profile") == [
        "started", 'profile cold {"temp": 0.1}', 'profile cold {"temp": 0.3}',
    ]  # fmt: skip


async def test_who_waits_for_a_worker_that_is_given_up_for_a_shared_one_gets_that(up: Router, tmp_path: Path) -> None:
    await up.serve_presets(
        one_model(tmp_path, {"cold": COLD, "warm": WARM | {"ctx-size": 64, "env.FAKE_WORKER": '{"deaf": true}'}})
    )
    await ask(up, "cold")
    waiting = asyncio.create_task(ask(up, "warm"))
    await up.becomes("warm", "loading", queued=1)
    await reload(up, tmp_path, {"cold": COLD, "warm": WARM})
    async with asyncio.timeout(60):
        assert await waiting == "warm"


async def test_calls_are_about_the_worker_and_all_its_names(up: Router, tmp_path: Path) -> None:
    await up.serve_presets(one_model(tmp_path, {"cold": COLD, "warm": WARM}))
    await ask(up, "cold")
    pinned = await up.client.post("/router/pin", json={"model": "warm"})
    assert pinned.json()["model"] == "warm"
    assert [(await up.status(name))["pinned"] for name in ("cold", "warm")] == [True, True]
    await reload(up, tmp_path, {"cold": COLD, "warm": WARM, "third": {"temp": 0.5}})
    assert [(await up.status(name))["pinned"] for name in ("cold", "third")] == [True, True]
    assert journal(tmp_path, "started") == ["started"]
    assert list(await up.workers()) == ["cold,warm,third"]
    await up.client.post("/router/pin", json={"model": "warm", "pinned": False})


async def test_a_template_that_cannot_be_used_is_an_error_of_its_own_name_alone(up: Router, tmp_path: Path) -> None:
    await up.serve_presets(one_model(tmp_path, {"good": {}, "bad": {"chat-template": "{{ broken }}"}}))
    refused = await up.client.post("/v1/chat/completions", json=chat("bad"))
    assert error_of(refused) == (500, "load_failed")
    assert "bad cannot be used: chat-template: it is broken" in refused.text
    assert await ask(up, "good") == "good"
    waited = await up.client.post("/models/load", params={"wait": "1"}, json={"model": "bad"})
    assert error_of(waited) == (500, "load_failed")


REAL = """
[*]
model-threads
[plain]
model = demo:chat
temp = 0
n-predict = 6
[curt]
model = demo:chat
temp = 1.5
seed = 7
n-predict = 3
stop = never said
[piped]
model = demo:chat
temp = 0
chat-template = "{% for message in messages %}|{{ message.content }}|{{ mood }}{% endfor %}"
chat-template-kwargs = {"mood": "calm"}
"""


@pytest.mark.slow
async def test_a_real_worker_answers_each_name_with_its_own_defaults(real: Router) -> None:
    await real.serve_presets(REAL.replace("model-threads", "threads = 1\nctx-size = 256\ndevice = cpu"))

    async def said(name: str, **fields: Any) -> tuple[str, str, int]:
        response = await real.client.post("/v1/chat/completions", json=chat(name, "What are you?", **fields))
        assert response.status_code == 200, response.text
        body = response.json()
        return body["model"], body["choices"][0]["message"]["content"], body["usage"]["completion_tokens"]

    plain, curt = await said("plain"), await said("curt")
    assert (plain[0], plain[2], curt[0], curt[2]) == ("plain", 6, "curt", 3)
    assert (await said("plain"), await said("curt")) == (plain, curt), "greedy, and seeded"
    assert (await said("curt", temperature=0, max_tokens=6))[1] == plain[1], "what a request says itself holds"
    prompts = []
    for name in ("plain", "piped"):
        asked = await real.client.post("/apply-template", json=chat(name, "Hello"))
        prompts.append(asked.json()["prompt"])
    assert prompts[1] == "|Hello|calm"
    assert prompts[0] != prompts[1]
    settings = await real.client.post("/completion", json={"model": "curt", "prompt": "Hello"})
    assert settings.json()["generation_settings"]["temperature"] == 1.5
    line = (await real.client.post("/api/generate", json={"model": "curt", "prompt": "x", "stream": False})).json()
    assert (line["model"], line["eval_count"]) == ("curt", 3)
    assert list(await real.workers()) == ["plain,curt,piped"]
