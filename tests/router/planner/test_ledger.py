"""Bytes in use on each device."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.planner.availability import FreeMemory, FreeMemoryTimeline
from router.planner.ledger import (
    LOCAL,
    WORKER_SLOTS,
    Bytes,
    Device,
    DeviceId,
    Ledger,
    Reading,
    Resident,
    in_use,
    pooled,
)
from tests.router.planner.fleets import COUNT, CPU, GPU, machine, resident

WORLD = 100


def foreign(ledger: Ledger, used: int, residents: Sequence[Resident]) -> int:
    [device] = ledger.observe([Reading(GPU[0], WORLD, used)], residents)
    return device.foreign


# The foreign row


@pytest.mark.parametrize("unquiet", [{"starting": True}, {"leaving": True}], ids=["starting", "leaving"])
def test_the_last_quiet_value_stands_while_workers_start_or_leave(unquiet: dict[str, bool]) -> None:
    ledger = Ledger()
    assert foreign(ledger, 12, []) == 12
    assert foreign(ledger, 35, [resident(1, {GPU[0]: 40}, **unquiet)]) == 12
    assert foreign(ledger, 52, [resident(1, {GPU[0]: 40})]) == 12
    assert foreign(ledger, 60, [resident(1, {GPU[0]: 40})]) == 20


@pytest.mark.parametrize(
    ("used", "one", "expected"),
    [
        (35, resident(1, {GPU[0]: 40}, starting=True), 35),
        (17, resident(1, {GPU[1]: 40}, starting=True), 17),
        (45, resident(1, {GPU[0]: 40}, measured={CPU: 3}), 5),
        (30, resident(1, {GPU[0]: 40}), 0),
    ],
    ids=["no quiet value yet", "a load elsewhere", "without a measurement its reservation counts", "never negative"],
)
def test_foreign_memory_beside_one_worker(used: int, one: Resident, expected: int) -> None:
    assert foreign(Ledger(), used, [one]) == expected


@given(st.integers(0, 40), st.lists(st.integers(1, 10), max_size=5))
def test_the_driver_figure_is_foreign_or_ours(others: int, ours: list[int]) -> None:
    residents = [resident(id, {GPU[0]: size}) for id, size in enumerate(ours)]
    assert foreign(Ledger(), others + sum(ours), residents) == others


# Margins, limits, slots


def test_margins_and_limits_are_asked_for_by_device() -> None:
    ledger = Ledger(margin={GPU[0]: 5, CPU: 7}.__getitem__, limit={CPU: 50}.get)
    readings = [Reading(GPU[0], 100, 0), Reading(CPU, 200, 0)]
    devices = ledger.observe(readings, [])
    assert [(device.id, device.margin, device.limit) for device in devices] == [(CPU, 7, 50), (GPU[0], 5, None)]


def test_models_max_is_a_device_of_slots_on_each_node() -> None:
    far = DeviceId("far", 0)
    devices = Ledger(models_max=3).observe(
        [Reading(GPU[0], 100, 10), Reading(far, 100, 0)], [resident(1, {GPU[0]: 10})]
    )
    slots = {device.id: (device.total, device.used) for device in devices if device.id.index == WORKER_SLOTS}
    assert slots == {COUNT: (3, 1), DeviceId("far", WORKER_SLOTS): (3, 0)}


def test_a_device_has_its_usual_name() -> None:
    assert [str(id) for id in (GPU[3], CPU, COUNT, DeviceId("far", 0))] == ["cuda:3", "cpu", "slots", "far/cuda:0"]
    assert GPU[0].node == LOCAL


# What would be free


def test_shared_memory_counts_once_against_the_limit_and_is_foreign_otherwise() -> None:
    ours = [resident(1, {CPU: 10}), resident(2, {CPU: 5})]
    reading = Reading(CPU, 100, 10 + 5 + 20, shared=20)
    for limit, left in ((None, 100 - 3 - 35), (50, 50 - 3 - 35)):
        [device] = Ledger(margin=lambda _: 3, limit={CPU: limit}.get).observe([reading], ours)
        assert (device.foreign, device.shared) == (20, 20)
        assert FreeMemory([device], ours).free[CPU] == left


def test_restore_undoes_remove() -> None:
    one = resident(1, {GPU[0]: 40}, measured={GPU[0]: 30, CPU: 5})
    view = FreeMemory(machine([one], {GPU[0]: WORLD, CPU: WORLD}), [one])
    before = view.free[GPU[0]], view.free[CPU]
    other = view.copy()
    view.remove(one)
    assert (other.free[GPU[0]], other.free[CPU]) == before
    view.restore(one)
    assert (view.free[GPU[0]], view.free[CPU]) == before


# Several views as one


@settings(max_examples=200)
@given(st.integers(0, 1 << 40))
def test_the_timeline_keeps_the_minimum_of_its_views(seed: int) -> None:
    """The timeline keeps three views. A list of all views gives the same figures."""
    random = Random(seed)
    here = [
        resident(id, {GPU[id % 2]: random.randint(1, 9)}, measured={GPU[id % 2]: random.randint(1, 12), CPU: 2})
        for id in range(1, 8)
    ]
    devices = machine(here, {GPU[0]: 40, GPU[1]: 50, CPU: 20}, foreign={GPU[0]: random.randint(0, 9)})
    stages, views = FreeMemoryTimeline(FreeMemory(devices, here)), [FreeMemory(devices, here)]
    for _ in range(random.randint(1, 12)):
        one, claim = random.choice(here), {random.choice(GPU[:2]): random.randint(0, 9), CPU: 1}
        match random.choice(["remove", "restore", "commit", "commit_later", "commit_later"]):
            case "remove":
                stages.remove(one)
                for view in views:
                    view.remove(one)
            case "restore":
                stages.restore(one)
                for view in views:
                    view.restore(one)
            case "commit":
                stages.commit(claim)
                for view in views:
                    view.commit(claim)
            case "commit_later":
                victims = random.sample(here, random.randint(0, 2))
                stages.commit_later(claim, victims)
                views += [views[-1].copy()] if victims else []
                for each in victims:
                    views[-1].remove(each)
                views[-1].commit(claim)
        for id in (*GPU[:2], CPU):
            assert stages.least.free[id] == min(view.free[id] for view in views)
            assert stages.last.free[id] == views[-1].free[id]
        assert stages.is_overcommitted() != all(view.free[id] >= 0 for view in views for id in view.committed)


# One memory under two names


def unified(*, margin: int = 0, limit: int | None = None) -> Ledger:
    return Ledger(margin=lambda id: margin if id == GPU[0] else 1, limit=lambda id: limit if id == GPU[0] else None)


def test_an_accelerator_without_memory_of_its_own_shows_that_of_its_pool() -> None:
    readings = [Reading(GPU[0], WORLD, 47, pool=CPU), Reading(CPU, WORLD, 47)]
    ours = [resident(1, {CPU: 30})]
    assert [(d.id, d.used, d.foreign, d.pool) for d in unified().observe(readings, ours)] == [
        (CPU, 47, 17, None),
        (GPU[0], 47, 17, CPU),
    ]


def test_an_accelerator_that_is_full_as_it_cannot_be_read_leaves_its_pool_as_it_is() -> None:
    readings = [Reading(GPU[0], WORLD, WORLD, pool=CPU), Reading(CPU, WORLD, 47)]
    assert [(d.id, d.used) for d in unified().observe(readings, [])] == [(CPU, 47), (GPU[0], WORLD)]


def test_the_largest_margin_and_the_smallest_limit_hold_for_all_of_one_memory() -> None:
    readings = [Reading(GPU[0], WORLD, 0, pool=CPU), Reading(CPU, WORLD, 0)]
    devices = unified(margin=5, limit=60).observe(readings, [])
    assert [(device.margin, device.limit) for device in devices] == [(5, 60), (5, 60)]
    assert FreeMemory(devices, []).short({CPU: 56}) == [CPU]
    assert FreeMemory(devices, []).short({CPU: 55}) == []


def test_sizes_are_added_where_their_memory_is() -> None:
    assert pooled({GPU[0]: 30, CPU: 4, GPU[1]: 7}, {GPU[0]: CPU}) == {CPU: 34, GPU[1]: 7}


@pytest.mark.parametrize("by_driver", [True, False])
def test_victims_are_kept_only_while_the_rest_is_enough(by_driver: bool) -> None:
    """15 and 40 bytes are needed for 45. Of the other two, 10 bytes each, neither is."""
    sizes = {1: 15, 2: 10, 3: 10, 4: 40}
    residents = [
        resident(id, {GPU[0]: 1 if by_driver else size}, measured={GPU[0]: size if by_driver else 1})
        for id, size in sizes.items()
    ]
    rows = [Device(id=GPU[0], total=100, used=100 if by_driver else 29, foreign=25)]
    view = FreeMemory(rows, residents)
    claim = {GPU[0]: 45}
    victims = view.victims_for(claim, residents, view.short(claim))
    assert [one.id for one in victims or ()] == [1, 4]


@pytest.mark.parametrize("further", [{}, {CPU: 1, COUNT: 1}])
def test_memory_that_is_measured_without_a_reservation_is_freed_too(further: Bytes) -> None:
    stray = resident(1, {CPU: 1}, measured={GPU[0]: 50, GPU[1]: 50, **further})
    rows = [Device(id=id, total=100, used=50, foreign=0) for id in GPU[:2]]
    view = FreeMemory(rows, [stray])
    claim = dict.fromkeys(GPU[:2], 80)
    assert view.victims_for(claim, [stray], view.short(claim)) == (stray,)
    view.remove(stray)
    assert not view.short(claim)


@pytest.mark.parametrize(("driver", "used"), [(75, 80), (95, 95)])
def test_memory_in_use_is_the_worse_of_driver_and_ledger(driver: int, used: int) -> None:
    device = Device(id=GPU[0], total=WORLD, used=driver, foreign=10)
    residents = [resident(1, {GPU[0]: 50}, measured={GPU[0]: 45}), resident(2, {GPU[0]: 20}), resident(3, {GPU[1]: 9})]
    assert in_use(device, residents) == used
