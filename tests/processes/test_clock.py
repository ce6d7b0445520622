"""A wall clock that jumps by hours, in a real router: what is counted in seconds goes on as if nothing had happened."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from tests.fake_clock import Clock
from tests.processes.routers import chat, error_of, presets, router

HOUR = 3600
CHAT = "/v1/chat/completions"


async def test_nothing_expires_because_the_wall_clock_jumps(tmp_path: Path) -> None:
    """Neither a time to live, nor the pause of a model that failed, nor a turn, nor a connection, nor a request."""
    clock, go = Clock(tmp_path), tmp_path / "go"
    journal = tmp_path / "journal"
    models: dict[str, dict[str, Any]] = {
        "a": {"ttl": "30m"},
        "held": {"ttl": "30m", "_hold": str(go)},
        "broken": {"_die_at_start": 3, "_journal": str(journal)},
        "b": {"ttl": "30m"},
        "c": {"ttl": "30m"},
    }
    file = presets(tmp_path, models)
    options = ("--models-preset", str(file), "--models-max", "4", "--models-memory-margin", "64")
    async with router(*options, environ=clock.environment()) as up:
        assert (await up.client.post(CHAT, json=chat("a"))).status_code == 200
        assert error_of(await up.client.post(CHAT, json=chat("broken"))) == (500, "load_failed")
        waiting = asyncio.create_task(up.client.post(CHAT, json=chat("held")))
        await up.becomes("held", "loaded")
        before = await up.workers()
        began = await _events(up.client, after=None)
        for hours, newcomer in ((6, "b"), (-6, "c")):
            clock.jump(hours * HOUR)
            shown = datetime.fromisoformat((await _ollama(up.client, "a"))["expires_at"])
            wanted = datetime.now(UTC).timestamp() + hours * HOUR + 1800
            assert abs(shown.timestamp() - wanted) < 60, "what is shown follows the wall clock"
            # a load makes the planner choose victims again
            assert (await up.client.post(CHAT, json=chat(newcomer))).status_code == 200
            assert (await up.client.post(CHAT, json=chat("a"))).status_code == 200
            assert error_of(await up.client.post(CHAT, json=chat("broken"))) == (500, "load_failed")
            assert before.items() <= (await up.workers()).items(), "a worker was evicted"
        go.touch()
        assert (await waiting).status_code == 200
        later = await _events(up.client, after=began[-1])
        assert later == list(range(began[-1] + 1, later[-1] + 1)), "events are numbered on"
        assert not any("evicted" in line for line in up.log), up.log
    assert journal.read_text().count("started") == 1, "the pause of a model that failed was cut short"


async def _ollama(client: httpx.AsyncClient, model: str) -> dict[str, str]:
    found = (await client.get("/api/ps")).json()["models"]
    return next(each for each in found if each["name"].startswith(model))


async def _events(client: httpx.AsyncClient, after: int | None) -> list[int]:
    """Numbers of the events until now, after that one."""
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    numbers: list[int] = []
    last = (await client.get("/router/state")).json()["last_event"]
    async with asyncio.timeout(60), client.stream("GET", "/router/events", headers=headers) as response:
        async for line in response.aiter_lines():
            if line.startswith("id:"):
                numbers.append(int(line.removeprefix("id:")))
                if numbers[-1] >= last:
                    break
    return numbers
