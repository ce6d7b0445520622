"""Readings of devices: in a thread of their own, settled after an exit, shared between routers."""

import asyncio
import fcntl
import os
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from router.launch.interface import NotStarted
from router.launch.readings import LOST_AFTER, DeviceSampler, SharedReservations, agree
from router.planner.ledger import DeviceId, Reading
from tests.fakes import CPU, DEADLINE, GIB, GPU0, GPU1, MIB, FixedDevices


class SlowDevices(FixedDevices):
    """A driver that hangs from `hang` to `go_on`."""

    def __init__(self) -> None:
        super().__init__({GPU0: 8 * GIB, CPU: 16 * GIB})
        self._may = threading.Event()
        self._may.set()
        self.asked = threading.Event()  # set when a reading is begun
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
async def sampler(devices: SlowDevices) -> AsyncIterator[DeviceSampler]:
    found = DeviceSampler(devices, lambda: None, read_timeout=DEADLINE)
    await found.start()
    yield found
    found.close()


def used(readings: object) -> list[int]:
    assert isinstance(readings, tuple)
    return [reading.used for reading in readings]


async def test_a_new_reading_notifies_and_an_equal_one_does_not(devices: SlowDevices, sampler: DeviceSampler) -> None:
    woken: list[list[int]] = []
    sampler.on_reading = lambda: woken.append(used(sampler.latest))
    await sampler.refresh()
    assert woken == []
    devices.used[GPU0] = GIB
    await sampler.refresh()
    assert woken == [[GIB, 0]]


async def test_a_refresh_reads_after_it_was_requested(devices: SlowDevices, sampler: DeviceSampler) -> None:
    """It does not return an earlier request's reading, which may be from before the change."""
    devices.hang()
    devices.asked.clear()
    early = asyncio.create_task(sampler.refresh())
    await asyncio.to_thread(devices.asked.wait)
    devices.used[GPU0] = GIB
    late = asyncio.create_task(sampler.refresh())
    await asyncio.sleep(0)
    devices.go_on()
    await early
    assert used(await late) == [GIB, 0]


async def test_a_device_with_a_problem_is_shown_as_full_and_its_problem_is_logged_once(
    devices: SlowDevices, sampler: DeviceSampler, caplog: pytest.LogCaptureFixture
) -> None:
    devices.problems = {GPU0: "cuda:0 cannot be read: GPU is lost"}
    for _ in range(3):
        assert used(await sampler.refresh()) == [8 * GIB, 0]
    assert caplog.messages == ["cuda:0 cannot be read: GPU is lost: no worker is started there"]
    devices.problems = {}
    assert used(await sampler.refresh()) == [0, 0]


async def test_workers_see_devices_by_uuid_where_the_driver_gives_one() -> None:
    class Named(FixedDevices):
        def read(self) -> list[Reading]:
            return [replace(each, uuid="GPU-12" if each.id == GPU1 else "") for each in super().read()]

    sampler = DeviceSampler(Named({GPU0: GIB, GPU1: GIB, CPU: GIB}), lambda: None)
    await sampler.start()
    assert sampler.visible({"cuda:0": GPU1, "cuda:1": GPU0, "cpu": CPU}) == "GPU-12,0"
    sampler.close()


async def test_a_driver_that_hangs_delays_no_caller_and_its_devices_are_shown_as_full(devices: SlowDevices) -> None:
    sampler = DeviceSampler(devices, lambda: None, read_timeout=0.1)
    await sampler.start()
    devices.hang()
    assert used(await sampler.refresh()) == [0, 0], "without the driver, which does not answer before `go_on`"
    for _ in range(LOST_AFTER):
        await sampler.sample()
    assert used(sampler.latest) == [8 * GIB, 16 * GIB]
    devices.go_on()
    while used(sampler.latest) != [0, 0]:
        await sampler.refresh()
    sampler.close()


async def test_a_driver_that_fails_is_like_one_that_hangs(
    devices: SlowDevices, sampler: DeviceSampler, caplog: pytest.LogCaptureFixture
) -> None:
    devices.error = RuntimeError("Unknown Error")
    for _ in range(LOST_AFTER):
        await sampler.sample()
    assert used(sampler.latest) == [8 * GIB, 16 * GIB]
    assert caplog.messages.count("the devices cannot be read: RuntimeError: Unknown Error") == 1


async def test_memory_has_settled_once_two_readings_agree(devices: SlowDevices, sampler: DeviceSampler) -> None:
    """The use sinks with each reading, by little in the last one."""
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


def test_readings_agree_on_the_devices_in_question() -> None:
    def readings(gpu0: int, gpu1: int) -> list[Reading]:
        return [Reading(GPU0, 80 * GIB, gpu0), Reading(GPU1, 80 * GIB, gpu1)]

    assert agree(readings(GIB, GIB), readings(GIB + 256 * MIB, 9 * GIB), [GPU0])
    assert not agree(readings(GIB, GIB), readings(GIB + 257 * MIB, GIB), [GPU0])
    assert not agree(readings(GIB, GIB), readings(GIB, 9 * GIB), [GPU0, GPU1])
    assert agree(readings(50 * GIB, 0), readings(51 * GIB, 0), [GPU0]), "2 % of much is more"


Pair = tuple[SharedReservations, SharedReservations]


class SwappedDevices(FixedDevices):
    """The same two accelerators in the other order, as CUDA_VISIBLE_DEVICES may have it."""

    def read(self) -> list[Reading]:
        other = {GPU0: GPU1, GPU1: GPU0}
        return [replace(reading, id=other.get(reading.id, reading.id)) for reading in super().read()]


def test_memory_that_workers_share_is_main_memory() -> None:
    readings = SharedReservations(FixedDevices({GPU0: 8 * GIB, CPU: 16 * GIB}), None, shared_bytes=lambda: MIB).read()
    assert {reading.id: reading.shared for reading in readings} == {GPU0: 0, CPU: MIB}


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    totals = {GPU0: 8 * GIB, GPU1: 8 * GIB, CPU: 16 * GIB}
    both = (
        SharedReservations(FixedDevices(totals), tmp_path / "shared"),
        SharedReservations(SwappedDevices(totals), tmp_path / "shared"),
    )
    for router in both:
        router.open()
        router.read()
    yield both
    for router in both:
        router.close()
    assert list((tmp_path / "shared").iterdir()) == []


def used_by(router: SharedReservations) -> dict[DeviceId, int]:
    return {reading.id: reading.used for reading in router.read() if reading.used}


def test_a_reservation_counts_as_used_for_other_routers_until_the_driver_shows_it(pair: Pair) -> None:
    ours, theirs = pair
    with ours.claim({GPU0: 3 * GIB, CPU: 2 * GIB}) as claim:
        assert (used_by(theirs), used_by(ours)) == ({GPU1: 3 * GIB, CPU: 2 * GIB}, {})
        with ours.claim({GPU0: GIB}):
            assert used_by(theirs)[GPU1] == 4 * GIB
        claim.count({GPU0: 2 * GIB, CPU: 5 * GIB})
        assert used_by(theirs) == {GPU1: GIB}
        claim.count({CPU: GIB})
        assert used_by(theirs) == {CPU: GIB}, "a device that it does not measure is in the driver's figure"
    assert used_by(theirs) == {}


def test_a_reservation_that_follows_the_measurement_counts_for_other_routers_as_it_is(pair: Pair) -> None:
    ours, theirs = pair
    with ours.claim({CPU: 8 * GIB}) as claim:
        claim.count({CPU: GIB})
        assert used_by(theirs) == {CPU: 7 * GIB}
        claim.settle({CPU: 3 * GIB})
        assert used_by(theirs) == {CPU: 2 * GIB}


def test_a_reservation_that_changes_before_the_first_measurement_counts_as_a_whole(pair: Pair) -> None:
    ours, theirs = pair
    with ours.claim({CPU: 8 * GIB}) as claim:
        claim.settle({CPU: 3 * GIB})
        assert used_by(theirs) == {CPU: 3 * GIB}
    with ours.claim({}) as early:
        early.extend({CPU: 8 * GIB})
        early.settle({CPU: 3 * GIB})
        assert used_by(theirs) == {CPU: 3 * GIB}


def test_an_early_process_reserves_its_memory_when_it_starts(pair: Pair) -> None:
    ours, theirs = pair
    with ours.claim({}) as claim:
        claim.count({CPU: GIB})
        assert used_by(theirs) == {}
        claim.extend({CPU: 2 * GIB})
        assert used_by(theirs) == {CPU: 2 * GIB}


def test_of_two_routers_that_start_a_worker_at_once_one_plans_again(tmp_path: Path) -> None:
    devices = FixedDevices({CPU: 16 * GIB})
    read: dict[str, list[Reading]] = {}
    ours = SharedReservations(devices, tmp_path, latest=lambda: read["ours"])
    theirs = SharedReservations(devices, tmp_path, latest=lambda: read["theirs"])
    for name, router in (("ours", ours), ("theirs", theirs)):
        router.open()
        read[name] = router.read()
    with ours.claim({CPU: GIB}):
        with pytest.raises(NotStarted, match="another router has just reserved memory of cpu"), theirs.claim({CPU: 1}):
            pass
        assert used_by(ours) == {}, "a reservation that was not granted is withdrawn"
        read["theirs"] = theirs.read()
        with theirs.claim({CPU: 1}):
            assert used_by(ours) == {CPU: 1}
        early = theirs.claim({})
        read["theirs"] = read["ours"]
        with early as claim, pytest.raises(NotStarted):
            claim.extend({CPU: 1})
    for router in (ours, theirs):
        router.close()


def test_no_device_is_used_for_more_than_it_has(pair: Pair) -> None:
    ours, theirs = pair
    with ours.claim({CPU: 900 * GIB}):
        assert used_by(theirs) == {CPU: 16 * GIB}


def test_the_reservations_of_a_killed_router_do_not_count(pair: Pair) -> None:
    ours, theirs = pair
    with ours.claim({CPU: GIB}):
        assert ours._file is not None
        os.close(ours._file)  # as the kernel does
        ours._file = None
        assert used_by(theirs) == {}


@pytest.mark.parametrize("text", ["", "nonsense", "[1]", '{"cpu": "much"}', '{"cpu": -1}', '{"cpu": true}'])
def test_an_invalid_file_counts_as_no_reservation(text: str, pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "shared" / "odd.json"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(text)
        file.flush()
        assert used_by(pair[0]) == {}
    path.unlink()


def test_a_router_whose_folder_is_unusable_runs_without_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "shared").write_text("a file")
    alone = SharedReservations(FixedDevices(), tmp_path / "shared")
    alone.open()
    with alone.claim({CPU: GIB}):
        assert used_by(alone) == {}
    alone.close()
    assert "do not see" in caplog.text
