"""Fetching and deleting models while the router runs: real router, real downloads, a hub program that misbehaves."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import ollama
import pytest
import pytest_asyncio

from tests.processes.hubs import HALF, WEIGHTS, Hub
from tests.processes.listening import events_of
from tests.processes.routers import (
    FAKE_WORKER,
    Router,
    error_of,
    fake_snapshot,
    lines_written,
    router,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


@asynccontextmanager
async def fetching(folder: Path, hub: Hub, *options: str, text: str = "", **further: str) -> AsyncIterator[Router]:
    """A router whose downloads are real and whose workers are not. Its cache is in `folder` unless `further` says."""
    python = folder / "python"
    real = f'exec "{sys.executable}"'
    python.write_text(f'#!/bin/sh\n[ "$4" = download ] && {real} "$@"\nshift 3\n{real} -P "{FAKE_WORKER}" "$@"\n')
    python.chmod(0o755)
    file = folder / "models.ini"
    file.write_text(f"[*]\npython = {python}\nrequired-memory = 64\n{text}")
    environ = {"HF_ENDPOINT": hub.address, "HF_HUB_CACHE": str(folder / "cache"), **further}
    options = ("--models-preset", str(file), "--models-memory-margin", "64", *options)
    async with router(*options, folder=folder, environ=environ) as up:
        yield up


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def up(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Router]:
    """One for most tests, each of which fetches repositories of its own."""
    async with fetching(tmp_path_factory.mktemp("fetching"), hub) as running:
        yield running


async def entries(up: Router) -> dict[str, Any]:
    return {entry["id"]: entry for entry in (await up.client.get("/models")).json()["data"]}


def cached(up: Router, repo: str) -> Path:
    """The folder of a repository in the cache."""
    return up.folder / "cache" / f"models--{repo.replace('/', '--')}"


def partials(up: Router, repo: str) -> list[Path]:
    return list(cached(up, repo).rglob("*.incomplete"))


async def test_a_model_is_fetched_without_a_load_listed_served_and_deleted(up: Router, hub: Hub) -> None:
    repo = hub.repo("one")
    async with events_of(up) as events:
        response = await up.client.post("/models", json={"model": repo})
        assert (response.status_code, response.json()) == (200, {"success": True})
        kinds = await events.until("status_change", status="unloaded")
        assert kinds == ["model_status:downloading", "download_progress:", "download_finished:",
                         "status_change:unloaded"]  # fmt: skip
        assert {each["model"] for each in events.seen} == {repo}
        told = [each["data"]["progress"] for each in events.seen if each["event"] == "download_progress"]
        assert all(f"/{repo}/resolve/" in url for url in told[-1])
        assert all(file["done"] == file["total"] for file in told[-1].values())
        assert max(file["total"] for file in told[-1].values()) > 2 * HALF
        assert events.seen[-1]["data"] == {"status": "unloaded", "exit_code": 0}
        entry = (await entries(up))[repo]
        assert (entry["source"], entry["can_remove"]) == ("cache", True)
        assert entry["status"]["value"] == "unloaded"
        assert "failed" not in entry["status"]
        assert repo not in await up.workers()
        for again in (repo, f"{repo}:main", repo.upper()):
            response = await up.client.post("/models", json={"model": again})
            assert error_of(response, "already exists") == (400, "invalid_value")
        assert (await up.client.post("/v1/completions", json={"model": repo, "prompt": "a"})).status_code == 200
        response = await up.client.delete("/models", params={"model": repo})
        assert (response.status_code, response.json()) == (200, {"success": True})
        assert not cached(up, repo).exists()
        await events.until("model_remove")
    assert repo not in await entries(up)
    assert error_of(await up.client.delete("/models", params={"model": repo})) == (404, "model_not_found")


async def test_what_cannot_be_fetched_is_400_and_not_listed(up: Router, hub: Hub) -> None:
    before = set(await entries(up))
    async with events_of(up) as events:
        response = await up.client.post("/models", json={"model": "org/nowhere"})
        assert error_of(response, "org/nowhere is not on") == (400, "invalid_value")
        await events.until("model_remove")
        failed = next(each["data"] for each in events.seen if each["event"] == "download_failed")
        assert failed["reason"] == "not_found"
    (hub.root / "org" / "pickles").mkdir(parents=True)
    (hub.root / "org" / "pickles" / "config.json").write_text("{}")
    (hub.root / "org" / "pickles" / "model.pt").write_text("")
    response = await up.client.post("/models", json={"model": "org/pickles"})
    assert "no pytorch_model.bin, only model.pt" in response.json()["error"]["message"]
    wrong = "word ../x/y org/x:../y org/name-GGUF org/name:Q4_K_M https://a/b /tmp/x a/b/c"
    for name in wrong.split():
        assert error_of(await up.client.post("/models", json={"model": name})) == (400, "invalid_value"), name
    assert error_of(await up.client.post("/models", json={})) == (400, "model_missing")
    assert error_of(await up.client.delete("/models")) == (400, "model_missing")
    hub.fails(**{hub.repo("ill"): {"status": 503}})
    assert error_of(await up.client.post("/models", json={"model": "org/ill"})) == (503, "load_backoff")
    assert set(await entries(up)) == before


async def test_a_download_that_broke_off_stays_listed_and_goes_on_where_it_was(up: Router, hub: Hub) -> None:
    repo = hub.repo("big")
    hub.fails(**{f"{repo}/{WEIGHTS}": [{"drop": HALF}, {"status": 503}]})
    async with events_of(up) as events:
        assert (await up.client.post("/models", json={"model": repo})).status_code == 200
        await events.until("download_failed", reason="network")
        status = await up.status(repo)
        assert (status["value"], status["failed"]) == ("unloaded", True)
        assert [path.stat().st_size for path in partials(up, repo)] == [HALF]
        assert (await up.client.post("/models", json={"model": repo})).status_code == 200
        await events.until("download_finished")
    assert any(line.endswith(f"bytes={HALF}-") for line in hub.fetched(repo))
    assert "failed" not in await up.status(repo)


async def test_a_download_is_cancelled_by_unload_which_keeps_and_by_delete_which_frees(up: Router, hub: Hub) -> None:
    repo = hub.repo("slow")
    hub.fails(**{f"{repo}/{WEIGHTS}": {"stall": HALF}})
    async with events_of(up) as events:
        assert (await up.client.post("/models", json={"model": repo})).status_code == 200
        await up.becomes(repo, "downloading")
        assert "already exists" in (await up.client.post("/models", json={"model": repo})).text
        await events.fetched(HALF)
        progress = (await up.status(repo))["progress"]
        assert sum(file["done"] for file in progress.values()) >= HALF
        assert sum(file["total"] for file in progress.values()) > 2 * HALF
        response = await up.client.post("/models/unload?wait=1", json={"model": repo})
        assert response.json() == {"success": True}
        await events.until("download_failed", reason="cancelled")
        assert "failed" not in await up.status(repo)
        assert [path.stat().st_size for path in partials(up, repo)] == [HALF]
        events.seen.clear()
        assert (await up.client.post("/models", json={"model": repo})).status_code == 200
        assert (await up.client.delete("/models", params={"model": repo})).status_code == 200
        await events.until("download_failed", reason="cancelled")
        await events.until("model_remove")
    assert repo not in await entries(up)
    assert not list(cached(up, repo).rglob("blobs/*"))


async def test_a_request_that_comes_during_a_download_waits_for_it_and_the_load(hub: Hub, tmp_path: Path) -> None:
    async with fetching(tmp_path, hub, "--stream-commit-seconds", "0") as up:
        repo = hub.repo("awaited")
        body = {"model": repo, "prompt": "a"}
        hub.fails(**{f"{repo}/{WEIGHTS}": {"stall": HALF}})
        async with events_of(up) as events:
            await up.client.post("/models", json={"model": repo})
            await events.fetched(HALF)
            response = await up.client.post("/v1/completions?autoload=false", json=body)
            assert error_of(response) == (400, "model_not_loaded")
            async with up.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as waiting:
                assert (await anext(waiting.aiter_lines())).startswith(": downloading")
            await up.says("POST /v1/completions 499")
            assert (await up.status(repo))["value"] == "downloading"  # one that leaves again ends nothing
            async with up.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as waiting:
                lines = waiting.aiter_lines()
                assert (await anext(lines)).startswith(": downloading")
                hub.fails()
                assert [line async for line in lines if line][-1] == "data: [DONE]"
            kinds = await events.until("status_change", status="loaded")
        assert kinds == ["model_status:downloading", "download_progress:", "download_finished:",
                         "status_change:loading", "status_change:loaded"]  # fmt: skip


async def test_a_delete_lets_running_requests_end_and_takes_no_new_ones(up: Router, hub: Hub, tmp_path: Path) -> None:
    go, fifo = tmp_path / "go", tmp_path / "journal"
    async with lines_written(fifo) as journal:
        repo = hub.repo("busy", hold=str(go), journal=str(fifo))
        body = {"model": repo, "prompt": "a"}
        await up.client.post("/models", json={"model": repo})
        asking = asyncio.create_task(up.client.post("/v1/completions", json=body, headers={"X-Request-Id": "first"}))
        await until(journal, "request first")
        deleting = asyncio.create_task(up.client.delete("/models", params={"model": repo}))
        await up.says(rf"{repo}#\d+ draining")
        assert error_of(await up.client.post("/v1/completions", json=body)) == (404, "model_not_found")
        assert "already exists" in (await up.client.post("/models", json={"model": repo})).text
        assert (await up.client.get("/models?reload=1")).json()["reload"]["added"] == []
        assert not deleting.done()
        go.touch()
        assert (await asking).status_code == 200
        assert (await deleting).json() == {"success": True}
        assert not cached(up, repo).exists()


async def test_what_cannot_be_deleted_is_listed_again(up: Router, hub: Hub, tmp_path: Path) -> None:
    repo = hub.repo("elsewhere")
    await up.client.post("/models", json={"model": repo})
    await up.becomes(repo, "unloaded")
    folder = cached(up, repo)
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    assert error_of(await up.client.delete("/models", params={"model": repo}), "out of the cache") == (500, "internal")
    assert repo in await entries(up)
    assert (tmp_path / "moved" / "refs" / "main").exists()
    async with fetching(tmp_path, hub, "--no-models-cache") as up:
        response = await up.client.post("/models", json={"model": repo})
        assert error_of(response, "--no-models-cache") == (400, "invalid_value")


async def test_the_name_of_an_adapter_deletes_no_model(hub: Hub, tmp_path: Path) -> None:
    adapter = tmp_path / "cache" / "french"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    async with fetching(tmp_path, hub, text="enable-lora = on\n") as up:
        repo = hub.repo("adapted")
        await up.client.post("/models", json={"model": repo})
        await up.becomes(repo, "unloaded")
        query = {"name": "french", "src": str(adapter)}
        assert (await up.client.post(f"/models/{repo}/adapters", params=query)).status_code == 200
        for name in (f"{repo}@french", "french", "FRENCH:latest"):
            response = await up.client.request("DELETE", "/api/delete", json={"model": name})
            assert (response.status_code, repo in response.json()["error"]) == (400, True)
        assert repo in await entries(up)
        assert (await up.client.delete("/models", params={"model": repo})).status_code == 200


async def test_what_is_not_of_the_cache_or_needed_by_a_preset_is_not_deleted(
    up: Router, hub: Hub, tmp_path: Path
) -> None:
    repo = hub.repo("shared")
    await up.client.post("/models", json={"model": repo})
    await up.becomes(repo, "unloaded")
    fake_snapshot(tmp_path / "dir" / "local")
    text = f"[mine]\nhf-repo = {repo}\n"
    cache = f"{up.folder}/cache"
    async with fetching(tmp_path, hub, "--models-dir", str(tmp_path / "dir"), text=text, HF_HUB_CACHE=cache) as up:
        for name in ("mine", "local"):
            assert error_of(await up.client.delete("/models", params={"model": name})) == (400, "invalid_value")
        assert error_of(await up.client.delete("/models", params={"model": repo}), "mine") == (409, "in_use")
        listed = await entries(up)
        assert {name: listed[name]["can_remove"] for name in ("mine", "local", repo)} == {
            "mine": False, "local": False, repo: False,
        }  # fmt: skip


async def test_a_revision_is_a_model_of_its_own_and_leaves_the_others_alone(up: Router, hub: Hub) -> None:
    repo = hub.repo("twice")

    async def revisions() -> set[str]:
        return {name for name in await entries(up) if name.startswith(repo)}

    await up.client.post("/models", json={"model": repo})
    await up.becomes(repo, "unloaded")
    folder = cached(up, repo)
    (commit,) = (each.name for each in (folder / "snapshots").iterdir())
    (hub.root / repo / "config.json").write_text((hub.root / repo / "config.json").read_text() + "\n")
    commit_now = hub.commit(repo)
    pinned = f"{repo}:{commit_now}"
    await up.client.post("/models", json={"model": pinned})
    await up.becomes(pinned, "unloaded")
    assert {commit, commit_now} == {each.name for each in (folder / "snapshots").iterdir()}
    await up.client.get("/models?reload=1")
    assert await revisions() == {repo, pinned}
    assert (await up.client.delete("/models", params={"model": repo})).status_code == 200
    assert {commit_now} == {each.name for each in (folder / "snapshots").iterdir()}
    assert await revisions() == {pinned}
    assert (await up.client.post("/v1/completions", json={"model": pinned, "prompt": "a"})).status_code == 200


async def test_ollamas_client_pulls_and_deletes(up: Router, hub: Hub) -> None:
    async with AsyncExitStack() as stack:
        repo = hub.repo("pulled")
        client = await stack.enter_async_context(ollama.AsyncClient(host=str(up.client.base_url)))
        said = [part async for part in await client.pull(f"hf.co/{repo}:latest", stream=True)]
        assert (said[0].status, said[-1].status) == ("pulling manifest", "success")
        moved = [part for part in said if part.total]
        assert moved[-1].completed == moved[-1].total
        assert (moved[-1].digest or "").startswith("sha256:")
        assert (await client.pull(repo)).status == "success"  # it is here
        assert f"{repo}:latest" in {model.model for model in (await client.list()).models}
        assert (await client.delete(repo)).status == "success"
        with pytest.raises(ollama.ResponseError) as refused:
            await client.delete(repo)
        assert refused.value.status_code == 404
        with pytest.raises(ollama.ResponseError) as refused:
            await client.pull("org/nowhere")
        assert refused.value.status_code == 400
        hub.fails(**{f"{repo}/{WEIGHTS}": [{"drop": HALF}, {"status": 503}]})
        with pytest.raises(ollama.ResponseError, match="cannot be fetched now"):
            _ = [part async for part in await client.pull(repo, stream=True)]
        assert partials(up, repo)
        assert (await client.pull(repo)).status == "success"


async def test_a_pull_that_is_left_ends_its_download_and_keeps_what_came(up: Router, hub: Hub) -> None:
    repo = hub.repo("left")
    hub.fails(**{f"{repo}/{WEIGHTS}": {"stall": HALF}})
    async with up.client.stream("POST", "/api/pull", json={"model": repo}) as first:
        assert first.headers["content-type"] == "application/x-ndjson"
        lines = first.aiter_lines()
        assert json.loads(await anext(lines)) == {"status": "pulling manifest"}
        while json.loads(await anext(lines))["completed"] < HALF:
            pass
        async with up.client.stream("POST", "/api/pull", json={"name": repo}) as second:
            await anext(second.aiter_lines())
        assert (await up.status(repo))["value"] == "downloading"
    await up.becomes(repo, "unloaded", reason="requested")
    assert partials(up, repo)
