"""Keep-alive of event streams: a comment every fifteen seconds of silence; no event is lost or delayed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from router.api.model_events import KEEPALIVE_INTERVAL, with_keepalive
from tests.fakes import virtual


@virtual
async def test_silence_is_broken_every_fifteen_seconds_and_an_event_comes_at_once() -> None:
    async def happening() -> AsyncIterator[str]:
        for seconds, event in ((1.0, "soon"), (40.0, "late"), (KEEPALIVE_INTERVAL - 0.1, "in time")):
            await asyncio.sleep(seconds)
            yield event

    loop = asyncio.get_running_loop()
    began, received = loop.time(), []
    async with aclosing(with_keepalive(aiter(happening()))) as events:
        async for event in events:
            received.append((round(loop.time() - began, 1), event))
            if event == "in time":
                break
    assert received == [(1.0, "soon"), (16.0, None), (31.0, None), (41.0, "late"), (55.9, "in time")]
