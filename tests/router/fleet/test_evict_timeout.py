"""Eviction of busy workers: after the swap patience they drain, and --evict-timeout cuts their answers."""

import asyncio
import contextlib

import pytest

from router.errors import ApiError
from router.fleet.admission import Limits
from tests.fakes import GIB
from tests.router.fleet.worlds import Schedule, virtual

STOP, LOAD = 0.5, 2.0  # seconds of any fake model


def pair(evict_timeout: float = -1.0) -> Schedule:
    """Two models that exclude each other; patience 5 s."""
    keys = {name: {"min_residency": 1.0} for name in "ab"}
    return Schedule({"a": 5 * GIB, "b": 5 * GIB}, keys=keys, limits=Limits(patience=5.0, evict_timeout=evict_timeout))


async def answered(world: Schedule, model: str, seconds: float) -> tuple[float, ApiError | None]:
    """Seconds that an answer of `seconds` took, and the cause if it was cut."""
    cut = asyncio.Event()
    with world.fleet.lease(model) as lease:
        lease.on_abort = cut.set
        await lease.ready()
        began = world.now
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(cut.wait(), seconds)
        return world.now - began, lease.aborted


@virtual
async def test_an_eviction_waits_for_running_answers_however_long_they_are_and_for_no_new_ones() -> None:
    world = pair()
    long = asyncio.create_task(answered(world, "a", 300.0))
    await asyncio.sleep(10)
    cold = asyncio.create_task(world.ask("b"))
    await asyncio.sleep(4.5)
    assert await world.ask("a", 0.1) == 0.0, "b still has patience"
    await asyncio.sleep(1)
    later = asyncio.create_task(world.ask("a"))
    assert await long == (300.0, None)
    assert await cold == pytest.approx(300.0 + LOAD - 10 + STOP + LOAD, abs=0.1)
    assert await later > 300.0 - 10, "it waits behind b"
    assert world.journal == ["start a", "stop a", "start b", "stop b", "start a"]


@virtual
async def test_with_an_evict_timeout_a_running_answer_is_cut_when_that_is_over_and_not_before() -> None:
    world = pair(evict_timeout=20.0)
    long = asyncio.create_task(answered(world, "a", 300.0))
    await asyncio.sleep(10)
    waited = await world.ask("b")
    seconds, why = await long
    assert seconds == pytest.approx(10 - LOAD + 5.0 + 20.0, abs=0.1)
    assert why is not None
    assert (why.reason, why.status) == ("draining", 503)
    assert waited == pytest.approx(5.0 + 20.0 + STOP + LOAD, abs=0.1)
