"""Routers of one machine, by the files in which they tell each other what they have set aside."""

import fcntl
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from router.launch.readings import SharedReservations
from router.planner.ledger import DeviceId, Reading
from tests.fakes import CPU, GIB, GPU0, GPU1, FixedDevices


class Turned(FixedDevices):
    """The same two accelerators in the other order, as CUDA_VISIBLE_DEVICES may have it."""

    def read(self) -> list[Reading]:
        other = {GPU0: GPU1, GPU1: GPU0}
        return [replace(each, id=other.get(each.id, each.id)) for each in super().read()]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[SharedReservations, SharedReservations]]:
    totals = {GPU0: 8 * GIB, GPU1: 8 * GIB, CPU: 16 * GIB}
    both = (
        SharedReservations(FixedDevices(totals), tmp_path / "beside"),
        SharedReservations(Turned(totals), tmp_path / "beside"),
    )
    for each in both:
        each.open()
        each.read()
    yield both
    for each in both:
        each.close()
    assert list((tmp_path / "beside").iterdir()) == []


def used(router: SharedReservations) -> dict[DeviceId, int]:
    return {each.id: each.used for each in router.read() if each.used}


def test_what_one_gives_to_a_worker_is_used_for_the_other_as_far_as_no_driver_shows_it(
    pair: tuple[SharedReservations, SharedReservations],
) -> None:
    ours, theirs = pair
    with ours.claim({GPU0: 3 * GIB, CPU: 2 * GIB}) as claim:
        assert (used(theirs), used(ours)) == ({GPU1: 3 * GIB, CPU: 2 * GIB}, {})
        with ours.claim({GPU0: GIB}):
            assert used(theirs)[GPU1] == 4 * GIB
        claim.count({GPU0: 2 * GIB, CPU: 5 * GIB})
        assert used(theirs) == {GPU1: GIB}
        claim.count({CPU: GIB})
        assert used(theirs) == {CPU: GIB}, "who does not measure its device is in the driver's figure with all it has"
    assert used(theirs) == {}


def test_a_standby_is_given_its_room_when_it_is_told_to_go(pair: tuple[SharedReservations, SharedReservations]) -> None:
    ours, theirs = pair
    with ours.claim({}) as claim:
        claim.count({CPU: GIB})
        assert used(theirs) == {}
        claim.extend({CPU: 2 * GIB})
        assert used(theirs) == {CPU: 2 * GIB}


def test_no_device_is_used_for_more_than_it_has(pair: tuple[SharedReservations, SharedReservations]) -> None:
    ours, theirs = pair
    with ours.claim({CPU: 900 * GIB}):
        assert used(theirs) == {CPU: 16 * GIB}


def test_nobody_hears_a_router_that_was_killed(pair: tuple[SharedReservations, SharedReservations]) -> None:
    ours, theirs = pair
    with ours.claim({CPU: GIB}):
        assert ours._file is not None
        os.close(ours._file)  # as the kernel does
        ours._file = None
        assert used(theirs) == {}


@pytest.mark.parametrize("text", ["", "nonsense", "[1]", '{"cpu": "much"}', '{"cpu": -1}', '{"cpu": true}'])
def test_what_is_said_badly_counts_for_nothing(
    text: str, pair: tuple[SharedReservations, SharedReservations], tmp_path: Path
) -> None:
    path = tmp_path / "beside" / "odd.json"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(text)
        file.flush()
        assert used(pair[0]) == {}
    path.unlink()


def test_a_router_that_can_tell_nobody_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "beside").write_text("a file")
    alone = SharedReservations(FixedDevices(), tmp_path / "beside")
    alone.open()
    with alone.claim({CPU: GIB}):
        assert used(alone) == {}
    alone.close()
    assert "do not see" in caplog.text
