"""Devices are read beside the loop, whatever the driver does."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from router.launch.readings import LOST_AFTER, DeviceSampler, agree
from router.planner.ledger import Reading
from tests.fakes import CPU, DEADLINE, GIB, GPU0, GPU1, MIB, FixedDevices

READ_TIMEOUT = 0.1


class SlowDevices(FixedDevices):
    """A driver that hangs from `hang` to `go_on`."""

    def __init__(self) -> None:
        super().__init__({GPU0: 8 * GIB, CPU: 16 * GIB})
        self._may = threading.Event()
        self._may.set()
        self.asked = threading.Event()
        """Set when a reading is begun."""
        self.error: Exception | None = None

    def hang(self) -> None:
        self._may.clear()

    def go_on(self) -> None:
        self._may.set()

    def read(self) -> list[Reading]:
        readings = super().read()
        self.asked.set()
        self._may.wait()
        if self.error is not None:
            raise self.error
        return readings


@pytest.fixture
async def devices() -> AsyncIterator[SlowDevices]:
    found = SlowDevices()
    yield found
    found.go_on()


@pytest.fixture
async def probe(devices: SlowDevices) -> AsyncIterator[DeviceSampler]:
    found = DeviceSampler(devices, lambda: None, read_timeout=READ_TIMEOUT)
    await found.start()
    yield found
    found.close()


def used(readings: object) -> list[int]:
    assert isinstance(readings, tuple)
    return [reading.used for reading in readings]


async def test_a_new_reading_wakes_the_fleet_and_an_equal_one_does_not(
    devices: SlowDevices, probe: DeviceSampler
) -> None:
    woken: list[list[int]] = []
    probe.on_reading = lambda: woken.append(used(probe.latest))
    await probe.refresh()
    assert woken == []
    devices.used[GPU0] = GIB
    await probe.refresh()
    assert woken == [[GIB, 0]]


async def test_a_refresh_sees_what_was_true_when_it_was_asked(devices: SlowDevices, probe: DeviceSampler) -> None:
    """Not the answer to an earlier question, which may have been read before the change."""
    patient = DeviceSampler(devices, lambda: None, read_timeout=DEADLINE)
    await patient.start()
    devices.hang()
    devices.asked.clear()
    early = asyncio.create_task(patient.refresh())
    await asyncio.to_thread(devices.asked.wait)
    devices.used[GPU0] = GIB
    late = asyncio.create_task(patient.refresh())
    await asyncio.sleep(0)
    devices.go_on()
    await early
    assert used(await late) == [GIB, 0]
    patient.close()


async def test_a_device_with_a_problem_is_shown_as_full(devices: SlowDevices, probe: DeviceSampler) -> None:
    devices.problems = {GPU0: "has fallen off the bus"}
    assert used(await probe.refresh()) == [8 * GIB, 0]
    assert probe.problems == {GPU0: "has fallen off the bus"}
    devices.problems = {}
    assert used(await probe.refresh()) == [0, 0]


async def test_a_driver_that_hangs_delays_nobody_for_long_and_shows_no_room(
    devices: SlowDevices, probe: DeviceSampler
) -> None:
    loop = asyncio.get_running_loop()
    devices.hang()
    began = loop.time()
    assert used(await probe.refresh()) == [0, 0]
    assert loop.time() - began < READ_TIMEOUT + 1.0
    for _ in range(LOST_AFTER):
        await probe.sample()
    assert used(probe.latest) == [8 * GIB, 16 * GIB]
    devices.go_on()
    assert used(await probe.refresh()) == [0, 0]
    assert probe.problems == {}


async def test_a_driver_that_errs_is_like_one_that_hangs(
    devices: SlowDevices, probe: DeviceSampler, caplog: pytest.LogCaptureFixture
) -> None:
    devices.error = RuntimeError("Unknown Error")
    for _ in range(LOST_AFTER):
        await probe.sample()
    assert used(probe.latest) == [8 * GIB, 16 * GIB]
    assert caplog.messages.count("the devices cannot be read: RuntimeError: Unknown Error") == 1


async def test_memory_has_settled_once_two_readings_agree(devices: SlowDevices, probe: DeviceSampler) -> None:
    """It sinks with every reading, and the last step is small."""
    levels = iter([7 * GIB, 5 * GIB, 2 * GIB, 2 * GIB - 200 * MIB, GIB])

    class Sinking(SlowDevices):
        def read(self) -> list[Reading]:
            self.used[GPU0] = next(levels)
            return super().read()

    sinking = Sinking()
    found = DeviceSampler(sinking, lambda: None)
    await found.start()
    await found.settle([GPU0])
    found.close()
    assert used(found.latest) == [2 * GIB - 200 * MIB, 0]


def test_agreement_is_of_the_devices_in_question() -> None:
    def readings(gpu0: int, gpu1: int) -> list[Reading]:
        return [Reading(GPU0, 80 * GIB, gpu0), Reading(GPU1, 80 * GIB, gpu1)]

    assert agree(readings(GIB, GIB), readings(GIB + 256 * MIB, 9 * GIB), [GPU0])
    assert not agree(readings(GIB, GIB), readings(GIB + 257 * MIB, GIB), [GPU0])
    assert not agree(readings(GIB, GIB), readings(GIB, 9 * GIB), [GPU0, GPU1])
    assert agree(readings(50 * GIB, 0), readings(51 * GIB, 0), [GPU0]), "2 % of much is more"
