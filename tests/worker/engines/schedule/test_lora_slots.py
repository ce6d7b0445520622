"""Slots for adapters: assignment, pins, reuse, and sequences that wait for one."""

import pytest

from tests.worker.scheduled import check_scheduler, check_slots, sequence
from worker.engines.transformers.schedule.kv_cache import RowAllocator
from worker.engines.transformers.schedule.lora_slots import AppliedAdapter, LoraAdapter, LoraSlots
from worker.engines.transformers.schedule.scheduler import Scheduler

A, B, C = (LoraAdapter(number, name, "") for number, name in enumerate("abc"))


def test_the_least_recently_used_slot_is_reused_first() -> None:
    slots = LoraSlots(2)
    first, second = slots.acquire(A), slots.acquire(B)
    for each in (A, B):
        slots.release(each)
    assert slots.acquire(A) == first, "it kept its slot"
    slots.release(A)
    assert slots.acquire(C) == second
    check_slots(slots)


def test_a_slot_in_use_is_not_given_away_nor_that_of_a_pinned_adapter() -> None:
    slots = LoraSlots(2)
    pinned = LoraAdapter(7, "p", "", pinned=True)
    slots.acquire(pinned)
    slots.release(pinned)
    slots.acquire(A)
    slots.acquire(A)
    assert not slots.can_acquire(B)
    slots.release(A)
    assert not slots.can_acquire(B), "it still has a user"
    slots.release(A)
    assert slots.can_acquire(B)
    slots.acquire(B)
    assert slots.can_acquire(pinned)
    assert not slots.can_acquire(A)
    check_slots(slots)


def test_an_unregistered_adapter_leaves_its_slot_with_the_last_user() -> None:
    slots = LoraSlots(1)
    pinned = LoraAdapter(7, "p", "", pinned=True)
    slots.acquire(pinned)
    slots.keep_only({A.number})
    assert not slots.can_acquire(A)
    slots.release(pinned)
    assert slots.can_acquire(A)
    slots.acquire(pinned)
    slots.release(pinned)
    assert slots.can_acquire(A), "a request that waited meanwhile does not pin it again"
    slots.acquire(A)
    slots.keep_only({A.number})
    slots.release(A)
    assert slots.slot(A) == 0, "a registered one keeps its slot"
    check_slots(slots)


@pytest.mark.parametrize("rows", [2, 8])
def test_only_requests_without_adapters_pass_one_that_waits_for_a_slot(rows: int) -> None:
    scheduler = Scheduler(RowAllocator(rows), 16, LoraSlots(1))
    first, waits, same = (sequence(id, 4, adapter=AppliedAdapter(use)) for id, use in enumerate((A, B, A)))
    plain = sequence(3, 4)
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
    check_scheduler(scheduler)
