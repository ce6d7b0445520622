"""Requests of the tests of llama-server's router. Where those slow a child process down, a file decides here when it
goes on. (Lists, properties, keys, downloads and reloads: test_router_http.py, test_model_management.py.)"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.processes.routers import Router

pytestmark = pytest.mark.asyncio(loop_scope="session")


def three(folder: Path, **keys: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Presets of `a`, `b` and `c`, whose workers keep one journal."""
    journal = {"_journal": str(folder / "journal")}
    return {name: journal | {**keys.get(name, {})} for name in "abc"}


async def load(up: Router, *names: str) -> None:
    for name in names:
        assert (await up.client.post("/models/load", json={"model": name})).json() == {"success": True}
        await up.becomes(name, "loaded")


def tokenize(up: Router, name: str, hold: Path | None = None) -> "asyncio.Task[httpx.Response]":
    """A request that is on its way; with `hold` it is not answered before that file is there."""
    body = {"model": name, "content": "hello world"} | ({"fake": {"hold": str(hold)}} if hold else {})
    return asyncio.create_task(up.client.post("/tokenize", json=body, headers={"X-Request-Id": f"of-{name}"}))


async def busy(up: Router, name: str, hold: Path) -> "asyncio.Task[httpx.Response]":
    """A request that its worker has and does not answer yet."""
    asked = tokenize(up, name, hold)
    await up.becomes(name, "loaded", in_flight=1)
    return asked


async def states(up: Router) -> dict[str, str]:
    return {each["id"]: each["status"]["value"] for each in (await up.client.get("/models")).json()["data"]}


async def all_answered(*asked: "asyncio.Task[httpx.Response]") -> None:
    async with asyncio.timeout(60):
        assert [(await each).status_code for each in asked] == [200] * len(asked)


async def test_a_disconnected_waiter_delays_no_other_request(one: Router, tmp_path: Path) -> None:
    go = tmp_path / "go"
    await one.serve(tmp_path, three(tmp_path))
    await load(one, "a")
    first = await busy(one, "a", go)
    leaves = tokenize(one, "b")
    await one.becomes("b", "loading", queued=1)
    leaves.cancel()
    await one.becomes("b", "unloaded")
    go.touch()
    await all_answered(first, tokenize(one, "a"))
    assert await states(one) == {"a": "loaded", "b": "unloaded", "c": "unloaded"}


async def test_the_line_is_served_as_it_came(one: Router, tmp_path: Path) -> None:
    go = tmp_path / "go"
    await one.serve(tmp_path, three(tmp_path))
    await load(one, "a")
    first = await busy(one, "a", go)
    asked = []
    for name in "bc":
        asked.append(tokenize(one, name))
        await one.becomes(name, "loading", queued=1)
    go.touch()
    await all_answered(first, *asked)
    journal = (tmp_path / "journal").read_text().splitlines()
    assert [line for line in journal if line.startswith("request")] == [
        f"request of-{name} /tokenize" for name in "abc"
    ]


async def test_the_request_that_loaded_a_model_is_answered_before_its_eviction(one: Router, tmp_path: Path) -> None:
    """Its request is on its way to the worker when another model needs its place."""
    up_to = tmp_path / "up-to"
    await one.serve(tmp_path, three(tmp_path, a={"_hold_load": str(up_to)}))
    first = tokenize(one, "a")
    await one.becomes("a", "loading", queued=1)
    second = tokenize(one, "b")
    await one.becomes("b", "loading", queued=1)
    up_to.touch()
    await all_answered(first, second)
    requests = [line for line in (tmp_path / "journal").read_text().splitlines() if line.startswith("request")]
    assert requests == [f"request of-{name} /tokenize" for name in "ab"]
