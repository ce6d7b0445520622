"""Memory of a process on an accelerator outside of torch's allocator, as far as the driver reports it."""

from collections.abc import Sequence

import pytest

from worker.engines.transformers.device.memory import allocator_share
from worker.engines.transformers.device.process_overhead import NvmlMemory, ProcessOverhead
from worker.protocol.memory import DEVICE_PROCESS_BYTES

MIB, GIB = 1 << 20, 1 << 30


class Card(NvmlMemory):
    """A driver's words about `cuda:0`, changed as a process loads."""

    def __init__(self, used: int | None = 5 * GIB, own: int | None = None):
        self.now, self.mine, self.held = used, own, 0

    def used(self, device: str) -> int | None:
        return self.now

    def own(self, device: str) -> int | None:
        return self.mine

    def load(self, torch: int, beside: int, *, listed: bool, others: int = 0) -> None:
        """The process has grown to so much, and other ones by so much."""
        if self.now is not None:
            self.now += torch + beside + others
        self.mine = torch + beside if listed else None
        self.held += torch


def begun(card: Card, devices: Sequence[str] = ("cuda:0",), reported: int = 0) -> ProcessOverhead:
    found = ProcessOverhead(card, lambda device: card.held)
    found.begin(devices, reported)
    return found


def test_overhead_comes_from_the_drivers_figure_for_this_process() -> None:
    card = Card()
    overhead = begun(card)
    card.load(9 * GIB, 300 * MIB, listed=True, others=2 * GIB)
    overhead.measure()
    assert overhead.reported == {"cuda:0": 300 * MIB}
    assert overhead.bytes("cuda:0") == 300 * MIB
    assert overhead.is_own


def test_without_a_process_list_overhead_is_the_increase_of_use() -> None:
    card = Card()
    overhead = begun(card)
    card.load(9 * GIB, 300 * MIB, listed=False)
    overhead.measure()
    assert (overhead.reported, overhead.is_own) == ({"cuda:0": 300 * MIB}, False)


@pytest.mark.parametrize("others", [-GIB, 20 * GIB])
def test_an_implausible_difference_is_not_overhead(others: int) -> None:
    card = Card()
    overhead = begun(card)
    card.load(9 * GIB, 300 * MIB, listed=False, others=others)
    overhead.measure()
    assert overhead.reported == {}
    assert overhead.bytes("cuda:0") == DEVICE_PROCESS_BYTES


def test_bytes_of_graphs_are_not_reported_as_overhead() -> None:
    card = Card()
    overhead = begun(card)
    card.load(9 * GIB, 300 * MIB, listed=True)
    overhead.measure()
    card.load(0, 380 * MIB, listed=True)
    card.mine = 9 * GIB + 380 * MIB
    overhead.measure()
    assert (overhead.reported["cuda:0"], overhead.bytes("cuda:0")) == (300 * MIB, 380 * MIB)


def test_overhead_before_a_measurement_is_the_routers_figure_or_the_constant() -> None:
    assert begun(Card(), reported=200 * MIB).bytes("cuda:0") == 200 * MIB
    assert begun(Card()).bytes("cuda:0") == DEVICE_PROCESS_BYTES


def test_without_a_driver_no_overhead_is_reported() -> None:
    for card, devices in ((Card(used=None), ("cuda:0",)), (Card(), ("cpu",))):
        overhead = begun(card, devices)
        overhead.measure()
        assert overhead.reported == {}


def test_the_allocator_gets_the_reservation_less_the_overhead() -> None:
    overhead = begun(Card(), reported=200 * MIB)
    assert allocator_share(10 * GIB, overhead.bytes("cuda:0"), 40 * GIB) == (10 * GIB - 200 * MIB) / (40 * GIB)
    assert allocator_share(100 * MIB, overhead.bytes("cuda:0"), 40 * GIB) == 0.01
    assert allocator_share(90 * GIB, overhead.bytes("cuda:0"), 40 * GIB) == 1.0
