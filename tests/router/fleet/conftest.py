"""All async tests of the fleet run in virtual time, and then their worlds are stopped and checked."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from tests.fakes import VirtualLoop
from tests.router.fleet.worlds import Schedule


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"virtual": VirtualLoop}


@pytest.fixture(autouse=True)
async def _stop_worlds(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    Schedule.made.clear()
    yield
    for world in Schedule.made if asyncio.iscoroutinefunction(request.function) else ():
        if not world.fleet.closing:
            await world.stop()
