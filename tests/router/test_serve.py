"""What ends a router, beside its signals (those: tests/processes/test_router_life.py)."""

import asyncio

from router.serve import ESSENTIAL, _Stop


async def dies(name: str) -> _Stop:
    """Why a router ends whose task of that name has ended in an error, told as its owner tells it."""
    stop = _Stop()

    async def fail() -> None:
        raise RuntimeError("a bug")

    task = asyncio.create_task(fail(), name=name)
    await asyncio.wait({task})
    loop = asyncio.get_running_loop()
    loop.call_exception_handler({"message": "has ended", "exception": task.exception(), "task": task})
    return stop


async def test_a_router_does_not_live_on_without_readings() -> None:
    assert {"devices"} == ESSENTIAL
    assert (await dies("devices")).failed.is_set()


async def test_a_router_lives_on_without_a_task_that_serves_one_request() -> None:
    stop = await dies("a request")
    assert not stop.failed.is_set()
    assert not stop.wanted.is_set()
