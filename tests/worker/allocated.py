"""The bytes that torch's allocator holds."""

from typing import Any

from worker.estimate.memory_tracer import Step


def allocated(step: Step) -> int:
    """The most bytes of blocks taken during `step` that the allocator held at once: what operators take inside counts.

    Blocks that were there before are not counted when they are given back: an engine of an earlier test may end in a
    thread of its own meanwhile, and how soon depends on the load of the machine.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as recorded:
        step()
    assert recorded.profiler is not None
    blocks: dict[int, int] = {}
    now = peak = 0
    for address, size in _changes(recorded.profiler.kineto_results):
        if size > 0:
            blocks[address] = size
            now += size
            peak = max(peak, now)
        else:
            now -= blocks.pop(address, 0)
    return peak


def _changes(results: Any) -> list[tuple[int, int]]:
    """Address and size of each block taken (above 0) or given back (below), in the order of time."""
    found, waiting = [], list(results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]":
            found.append((event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr))
    return [(address, size) for _, size, address in sorted(found)]
