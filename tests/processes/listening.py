"""A client of GET /models/sse that keeps what it receives."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tests.processes.routers import DEADLINE, Router


class Events:
    """The events of /models/sse, in order."""

    def __init__(self, up: Router):
        self._up = up
        self.seen: list[dict[str, Any]] = []
        self.ids: list[int | None] = []  # of the events seen; None for those without
        self._arrived = asyncio.Condition()

    async def listen(self, opened: asyncio.Event, query: str, headers: Mapping[str, str]) -> None:
        id: int | None = None
        async with self._up.client.stream("GET", f"/models/sse{query}", headers=headers) as stream:
            async for line in stream.aiter_lines():
                if line.startswith(": open"):
                    opened.set()
                if line.startswith("id:"):
                    id = int(line[3:])
                if line.startswith("data:"):
                    async with self._arrived:
                        self.seen.append(json.loads(line[5:]))
                        self.ids.append(id)
                        id = None
                        self._arrived.notify_all()

    async def until(self, event: str, **data: Any) -> list[str]:
        """Return the kinds so far, without repetitions, once there is an event with these data."""
        await self.until_one(
            lambda seen: seen["event"] == event and all(seen["data"].get(key) == value for key, value in data.items())
        )
        kinds = [seen["event"] + ":" + seen["data"].get("status", "") for seen in self.seen]
        return [kind for number, kind in enumerate(kinds) if number == 0 or kinds[number - 1] != kind]

    async def fetched(self, count: int) -> None:
        """Wait until a download has so many bytes."""
        await self.until_one(
            lambda seen: (
                seen["event"] == "download_progress"
                and sum(progress["done"] for progress in seen["data"]["progress"].values()) >= count
            )
        )

    async def until_one(self, fits: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until there is such an event."""
        async with asyncio.timeout(DEADLINE), self._arrived:
            await self._arrived.wait_for(lambda: any(map(fits, self.seen)))


@asynccontextmanager
async def events_of(up: Router, query: str = "", **headers: str) -> AsyncIterator[Events]:
    """Follow the events for the duration of the block. Underscores in names of headers are dashes."""
    opened, events = asyncio.Event(), Events(up)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    listening = asyncio.create_task(events.listen(opened, query, sent))
    try:
        await opened.wait()
        yield events
    finally:
        listening.cancel()
        await asyncio.wait({listening})
