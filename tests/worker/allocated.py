"""What torch's allocator held."""

from typing import Any

from worker.live_bytes import Step


def allocated(step: Step) -> int:
    """The most bytes that torch's allocator held at once: what operators take inside counts, too."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as recorded:
        step()
    assert recorded.profiler is not None
    events: Any = recorded.profiler.kineto_results.events()
    now = peak = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        now += size
        peak = max(peak, now)
    return peak
