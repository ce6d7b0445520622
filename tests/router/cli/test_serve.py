"""The start and the end of a router. Its signals: tests/processes/test_router_life.py."""

import asyncio
import contextlib
import gc
import os

import pytest

from router.cli.serve import ESSENTIAL, _check_locking, _freeze_collector, _say, _state_folder, _Stop, reload_when_set
from router.config.settings import Settings
from router.errors import ConfigError, PresetInvalid


async def stop_after_failure_of(name: str) -> _Stop:
    """The state of a router in which the task of this name has ended in an error."""
    stop = _Stop()

    async def fail() -> None:
        raise RuntimeError("a bug")

    task = asyncio.create_task(fail(), name=name)
    await asyncio.wait({task})
    loop = asyncio.get_running_loop()
    loop.call_exception_handler({"message": "has ended", "exception": task.exception(), "task": task})
    return stop


def test_objects_from_before_serving_are_exempt_from_garbage_collection() -> None:
    before, made = gc.get_threshold(), [[number] for number in range(1000)]
    frozen = gc.get_freeze_count()  # modules and tests: conftest.py
    gc.disable()
    try:
        _freeze_collector()
        assert gc.isenabled()
        assert gc.get_freeze_count() - frozen > len(made)
    finally:
        gc.set_threshold(*before)
        gc.enable()


def test_sleep_memory_is_rejected_where_no_model_may_be_locked(caplog: pytest.LogCaptureFixture) -> None:
    _check_locking(64 << 20, None)
    _check_locking(64 << 20, 64 << 20)
    _check_locking(0, 0)
    with pytest.raises(ConfigError) as refused:
        _check_locking(65 << 20, 8 << 20)
    assert "--sleep-memory 65: this user may lock only 8 MiB of main memory; raise that (ulimit -l" in str(
        refused.value
    )
    assert caplog.messages == []


def test_the_lock_limit_is_that_of_one_model(caplog: pytest.LogCaptureFixture) -> None:
    _check_locking(65 << 20, 64 << 20)
    (message,) = caplog.messages
    assert "may lock only 64 MiB of main memory for each model, so models with more weights do not sleep" in message


def test_an_unusable_state_folder_is_reported_with_the_option() -> None:
    with pytest.raises(OSError, match=r"cannot use the state folder /dev/null/x: .*; give another --state-dir"):
        _state_folder(Settings(state_dir="/dev/null/x"))


def test_a_full_disk_for_stderr_does_not_prevent_the_start() -> None:
    with open("/dev/full", "w") as full, contextlib.redirect_stderr(full):
        _say("router 0.0.0")
        with pytest.raises(OSError, match="No space left"):
            full.flush()
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), full.fileno())  # so that it can be closed


async def test_the_end_of_the_device_task_ends_the_router() -> None:
    assert {"devices"} == ESSENTIAL
    assert (await stop_after_failure_of("devices")).failed.is_set()


async def test_the_end_of_a_request_task_does_not_end_the_router() -> None:
    stop = await stop_after_failure_of("a request")
    assert not stop.failed.is_set()
    assert not stop.wanted.is_set()


class Slow:
    """A registry whose reloads end when the test says so. The first two fail."""

    def __init__(self) -> None:
        self.failures = [PresetInvalid("a bad edit"), RuntimeError("a bug")]
        self.turns: asyncio.Queue[asyncio.Event] = asyncio.Queue()

    async def reload(self) -> dict[str, list[str]]:
        over = asyncio.Event()
        await self.turns.put(over)
        await over.wait()
        if self.failures:
            raise self.failures.pop(0)
        return {"warnings": ["m is not listed"]}


async def test_signals_during_a_reload_cause_one_further_reload_and_failures_do_not_end_the_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry, wanted = Slow(), asyncio.Event()
    reloading = asyncio.create_task(reload_when_set(wanted, registry.reload))
    async with asyncio.timeout(60):
        wanted.set()
        for _ in range(3):
            over = await registry.turns.get()
            for _ in range(5):
                wanted.set()
            over.set()
        last = await registry.turns.get()
        last.set()
        for _ in range(5):
            await asyncio.sleep(0)
    assert registry.turns.empty()
    assert "m is not listed" in [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert not reloading.done()
    reloading.cancel()
