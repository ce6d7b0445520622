"""What GET /models/sse tells a client, kept for tests."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tests.processes.routers import DEADLINE, Router


class Events:
    """What /models/sse tells, in order."""

    def __init__(self, up: Router):
        self._up = up
        self.seen: list[dict[str, Any]] = []
        self.ids: list[int | None] = []
        """Of the events seen; None for those without."""
        self._heard = asyncio.Condition()

    async def listen(self, opened: asyncio.Event, query: str, headers: Mapping[str, str]) -> None:
        id: int | None = None
        async with self._up.client.stream("GET", f"/models/sse{query}", headers=headers) as stream:
            async for line in stream.aiter_lines():
                if line.startswith(": open"):
                    opened.set()
                if line.startswith("id:"):
                    id = int(line[3:])
                if line.startswith("data:"):
                    async with self._heard:
                        self.seen.append(json.loads(line[5:]))
                        self.ids.append(id)
                        id = None
                        self._heard.notify_all()

    async def until(self, event: str, **data: Any) -> list[str]:
        """Returns the kinds so far, repetitions left out, once there is an event with these data."""

        await self.until_one(
            lambda each: each["event"] == event and all(each["data"].get(key) == value for key, value in data.items())
        )
        kinds = [each["event"] + ":" + each["data"].get("status", "") for each in self.seen]
        return [kind for number, kind in enumerate(kinds) if number == 0 or kinds[number - 1] != kind]

    async def fetched(self, count: int) -> None:
        """Returns once a download has so many bytes."""
        await self.until_one(
            lambda each: (
                each["event"] == "download_progress"
                and sum(progress["done"] for progress in each["data"]["progress"].values()) >= count
            )
        )

    async def until_one(self, fits: Callable[[dict[str, Any]], bool]) -> None:
        """Returns once there is such an event."""
        async with asyncio.timeout(DEADLINE), self._heard:
            await self._heard.wait_for(lambda: any(fits(each) for each in self.seen))


@asynccontextmanager
async def events_of(up: Router, query: str = "", **headers: str) -> AsyncIterator[Events]:
    """Listens for the length of the block. A header's underscores are dashes."""
    opened, events = asyncio.Event(), Events(up)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    listening = asyncio.create_task(events.listen(opened, query, sent))
    try:
        await opened.wait()
        yield events
    finally:
        listening.cancel()
        await asyncio.wait({listening})
