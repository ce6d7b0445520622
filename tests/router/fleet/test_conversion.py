"""Conversion: a stage after the download; loads take the converted copy, and do without one that cannot be used."""

import asyncio
from typing import Any

import pytest

from router.config.settings import Settings
from router.errors import LoadFailed
from router.launch.interface import WorkerLost
from tests.fakes import GIB, FakeModel
from tests.router.fleet.worlds import Schedule
from worker.protocol.events import Exit


def schedule_of(*, missing: bool = True, model: FakeModel | None = None, **fields: Any) -> Schedule:
    """One model `a`, whose snapshot is converted after its download."""
    models = {"a": model or FakeModel(shards=(GIB,))}
    schedule = Schedule(
        {"a": GIB}, models=models, settings=Settings(swap_patience=0.0), missing=("a",) if missing else (), **fields
    )
    schedule.files.convertible.add("/snapshots/a")
    return schedule


async def test_a_snapshot_is_converted_after_its_download_and_before_its_load() -> None:
    schedule = schedule_of()
    await schedule.ask("a")
    assert schedule.journal == ["download a", "convert a", "start a"]
    [event] = schedule.events_of("converted")
    assert (event.data["outcome"], event.data["bytes"]) == ("done", GIB)
    states = [event.data["state"] for event in schedule.events_of("state")]
    assert states[:2] == ["downloading", "queued"]


async def test_a_model_that_is_only_fetched_is_converted() -> None:
    schedule = schedule_of()
    schedule.fleet.fetch("a")
    await asyncio.sleep(30.0)
    assert schedule.journal == ["download a", "convert a"]


async def test_a_snapshot_that_is_here_is_not_converted_by_a_load() -> None:
    schedule = schedule_of(missing=False)
    await schedule.ask("a")
    assert schedule.journal == ["start a"]


async def test_a_failed_conversion_is_an_event_and_the_snapshot_is_loaded_as_it_is() -> None:
    full = WorkerLost("a: the disk is full", cause="crashed", exit=Exit.DISK_FULL)
    schedule = schedule_of(model=FakeModel(shards=(GIB,), convert_fails=[full]))
    await schedule.ask("a")
    assert schedule.worker("a").snapshot == "/snapshots/a"
    [event] = schedule.events_of("converted")
    assert (event.data["outcome"], event.data["error"]) == ("disk_full", "a: the disk is full")
    assert schedule.fleet.models["a"].failure is None


async def test_a_conversion_ends_when_its_client_disconnects() -> None:
    schedule = schedule_of(model=FakeModel(shards=(GIB,), convert_seconds=1000.0))
    request = asyncio.ensure_future(schedule.ask("a"))
    await asyncio.sleep(30.0)
    request.cancel()
    await asyncio.sleep(10.0)
    assert "cancelled a" in [entry for _, entry in schedule.launcher.timeline]
    assert schedule.fleet.workers() == []


@pytest.mark.parametrize("readable", [True, False])
async def test_a_converted_snapshot_that_cannot_be_read_or_loaded_is_not_used_again(readable: bool) -> None:
    """The request does not fail."""
    lost = WorkerLost("a: damaged", cause="crashed", exit=Exit.DAMAGED)
    schedule = schedule_of(missing=False, model=FakeModel(shards=(GIB,), start_fails=[lost] if readable else []))
    schedule.files.copies["/snapshots/a"] = "/converted/a"
    if not readable:
        schedule.files.damaged.add("/converted/a")
    await schedule.ask("a")
    assert schedule.worker("a").snapshot == "/snapshots/a"
    assert schedule.journal == ["start a"] * (2 if readable else 1)
    assert schedule.files.copies == {}
    assert schedule.fleet.models["a"].failure is None


async def test_pickled_weights_that_are_here_are_converted_before_their_first_load() -> None:
    schedule = schedule_of(missing=False)
    schedule.files.pickled.add("/snapshots/a")
    await schedule.ask("a")
    assert schedule.journal == ["convert a", "start a"]
    states = [event.data["state"] for event in schedule.events_of("state")]
    assert states[:2] == ["downloading", "queued"]


async def test_a_failed_conversion_of_pickled_weights_fails_the_load_with_its_reason() -> None:
    unsafe = WorkerLost("a: needs os.system, which could run code", cause="load_failed", exit=Exit.UNUSABLE)
    schedule = schedule_of(missing=False, model=FakeModel(shards=(GIB,), convert_fails=[unsafe]))
    schedule.files.pickled.add("/snapshots/a")
    with pytest.raises(LoadFailed, match=r"os\.system"):
        await schedule.ask("a")
    assert schedule.journal == ["convert a"]
    failure = schedule.fleet.models["a"].failure
    assert failure is not None
    assert failure.final
