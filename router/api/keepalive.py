"""Streams that never end: in silence they say from time to time that somebody is still there."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

T = TypeVar("T")

KEEP_ALIVE = 15.0
"""Seconds of silence after which there is a word."""
PING = b": ping\n\n"


async def with_pauses(following: AsyncIterator[T]) -> AsyncGenerator[T | None]:
    """What comes, and None whenever nothing has come for a while."""
    pending: asyncio.Future[T] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(following))
            done, _ = await asyncio.wait({pending}, timeout=KEEP_ALIVE)
            if not done:
                yield None
                continue
            told, pending = pending.result(), None
            yield told
    finally:
        if pending is not None:
            pending.cancel()
