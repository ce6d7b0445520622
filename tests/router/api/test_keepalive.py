"""Streams of events in silence: a word every fifteen seconds, and nothing lost or late for it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from router.api.keepalive import KEEP_ALIVE, with_pauses
from tests.fakes import virtual


@virtual
async def test_silence_is_broken_every_fifteen_seconds_and_an_event_comes_at_once() -> None:
    async def happening() -> AsyncIterator[str]:
        for seconds, event in ((1.0, "soon"), (40.0, "late"), (KEEP_ALIVE - 0.1, "in time")):
            await asyncio.sleep(seconds)
            yield event

    loop = asyncio.get_running_loop()
    began, heard = loop.time(), []
    async with aclosing(with_pauses(aiter(happening()))) as events:
        async for event in events:
            heard.append((round(loop.time() - began, 1), event))
            if event == "in time":
                break
    assert heard == [(1.0, "soon"), (16.0, None), (31.0, None), (41.0, "late"), (55.9, "in time")]
