"""What a process takes of an accelerator beyond what torch's allocator holds: measured as far as the driver tells."""

from collections.abc import Sequence

import pytest

from worker.engines.transformers.device.memory import allocator_share
from worker.engines.transformers.device.process_overhead import ProcessOverhead
from worker.protocol.memory import DEVICE_PROCESS_BYTES

MIB, GIB = 1 << 20, 1 << 30


class Card:
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


def begun(card: Card, devices: Sequence[str] = ("cuda:0",), told: int = 0) -> ProcessOverhead:
    found = ProcessOverhead(card, lambda device: card.held)
    found.begin(devices, told)
    return found


def test_what_the_driver_says_of_this_process_is_believed_whatever_others_do() -> None:
    card = Card()
    overhead = begun(card)
    card.load(9 * GIB, 300 * MIB, listed=True, others=2 * GIB)
    overhead.look()
    assert overhead.said == {"cuda:0": 300 * MIB}
    assert overhead.bytes("cuda:0") == 300 * MIB
    assert overhead.is_own


def test_where_no_process_is_listed_it_is_by_how_much_more_is_in_use_and_said_to_be_so() -> None:
    card = Card()
    overhead = begun(card)
    card.load(9 * GIB, 300 * MIB, listed=False)
    overhead.look()
    assert (overhead.said, overhead.is_own) == ({"cuda:0": 300 * MIB}, False)


@pytest.mark.parametrize("others", [-GIB, 20 * GIB])
def test_a_difference_that_can_only_be_another_process_is_nobodys_overhead(others: int) -> None:
    card = Card()
    overhead = begun(card)
    card.load(9 * GIB, 300 * MIB, listed=False, others=others)
    overhead.look()
    assert overhead.said == {}
    assert overhead.bytes("cuda:0") == DEVICE_PROCESS_BYTES


def test_what_graphs_take_is_counted_for_this_model_and_not_told_of_others() -> None:
    card = Card()
    overhead = begun(card)
    card.load(9 * GIB, 300 * MIB, listed=True)
    overhead.look()
    card.load(0, 380 * MIB, listed=True)
    card.mine = 9 * GIB + 380 * MIB
    overhead.look()
    assert (overhead.said["cuda:0"], overhead.bytes("cuda:0")) == (300 * MIB, 380 * MIB)


def test_before_it_has_measured_it_goes_by_what_it_was_told_and_else_by_the_constant() -> None:
    assert begun(Card(), told=200 * MIB).bytes("cuda:0") == 200 * MIB
    assert begun(Card()).bytes("cuda:0") == DEVICE_PROCESS_BYTES


def test_without_a_driver_or_an_accelerator_nothing_is_said() -> None:
    for card, devices in ((Card(used=None), ("cuda:0",)), (Card(), ("cpu",))):
        overhead = begun(card, devices)
        overhead.look()
        assert overhead.said == {}


def test_the_allocator_has_what_is_reserved_less_that() -> None:
    overhead = begun(Card(), told=200 * MIB)
    assert allocator_share(10 * GIB, overhead.bytes("cuda:0"), 40 * GIB) == (10 * GIB - 200 * MIB) / (40 * GIB)
    assert allocator_share(100 * MIB, overhead.bytes("cuda:0"), 40 * GIB) == 0.01
    assert allocator_share(90 * GIB, overhead.bytes("cuda:0"), 40 * GIB) == 1.0
