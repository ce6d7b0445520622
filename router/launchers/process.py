"""One child: pipes, events, exit, the stop ladder; spawning by exec."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which runs to its end whatever is cancelled meanwhile; a cancellation is raised after it.

    For what must not stop half-way: reaping a process, giving memory back.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()
