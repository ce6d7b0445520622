"""Slots for adapters: lent, pinned, taken back; and who waits for one."""

import pytest

from worker.engines.transformers.schedule.kv_cache import Rows
from worker.engines.transformers.schedule.lora_slots import Adapter, Slots, Use
from worker.engines.transformers.schedule.scheduler import Scheduler
from worker.engines.transformers.schedule.sequence import Sequence

A, B, C = (Adapter(number, name, "") for number, name in enumerate("abc"))


def test_the_slot_of_who_was_used_least_recently_is_given_away() -> None:
    slots = Slots(2)
    first, second = slots.lend(A), slots.lend(B)
    for each in (A, B):
        slots.give_back(each)
    assert slots.lend(A) == first, "it kept its slot"
    slots.give_back(A)
    assert slots.lend(C) == second
    slots.check_integrity()


def test_a_slot_in_use_is_not_given_away_nor_that_of_a_pinned_adapter() -> None:
    slots = Slots(2)
    pinned = Adapter(7, "p", "", pinned=True)
    slots.lend(pinned)
    slots.give_back(pinned)
    slots.lend(A)
    slots.lend(A)
    assert not slots.can_lend(B)
    slots.give_back(A)
    assert not slots.can_lend(B), "it still has a user"
    slots.give_back(A)
    assert slots.can_lend(B)
    slots.lend(B)
    assert slots.can_lend(pinned)
    assert not slots.can_lend(A)
    slots.check_integrity()


def test_who_is_registered_no_longer_leaves_with_its_last_user() -> None:
    slots = Slots(1)
    pinned = Adapter(7, "p", "", pinned=True)
    slots.lend(pinned)
    slots.forget(pinned)
    assert not slots.can_lend(A)
    slots.give_back(pinned)
    assert slots.can_lend(A)
    slots.forget(A)
    slots.check_integrity()


def sequence(id: int, adapter: Adapter | None) -> Sequence:
    use = Use(adapter) if adapter is not None else None
    return Sequence(id=id, prompt_tokens=4, tokens=[1, 2, 3, 4], limit=8, ends=frozenset(), adapter=use)


@pytest.mark.parametrize("rows", [2, 8])
def test_who_waits_for_a_slot_lets_those_pass_who_need_none_and_nobody_else(rows: int) -> None:
    scheduler = Scheduler(Rows(rows), 16, Slots(1))
    first, waits, same, plain = sequence(0, A), sequence(1, B), sequence(2, A), sequence(3, None)
    for each in (first, waits, same, plain):
        scheduler.add(each)
    scheduler.next(16)
    assert [each.id for _, each in scheduler.places] == [0, 3], "the third would keep the slot from the second"
    scheduler.remove(first)
    scheduler.next(16)
    assert [each.id for _, each in scheduler.places] == [1, 3]
    scheduler.remove(waits)
    scheduler.remove(plain)
    scheduler.next(16)
    assert [each.id for _, each in scheduler.places] == [2]
    scheduler.check_integrity()
