"""Threads of a step beside other programs on the same cores.

OpenMP threads spin at the end of each parallel region until the last one arrives. That is fastest while each thread has
a core. While other programs use the cores, the threads spin in turns. Steps then take up to ten times as long as with
one thread. Shorter spinning (GOMP_SPINCOUNT) was rejected: one short enough for busy cores is slower than one thread
on quiet ones. docs/engine.md has the measurements.
"""

import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path


def thread_count(most: int, cores: int, others: float) -> int:
    """Number of threads up to `most` for which `cores` are free, if other programs use `others` of them.

    `most` is halved until it fits: oneDNN compiles its kernels for each number of threads, so few numbers may occur.
    Half a core is tolerated, because the router and its clients need some time for each token.
    """
    count = min(most, cores)
    while count > 1 and count > cores - others + 0.5:
        count //= 2
    return count


def busy_seconds(
    cores: Collection[int],
    stat: Path = Path("/proc/stat"),
    ticks_per_second: int = os.sysconf("SC_CLK_TCK"),
) -> float:
    """CPU seconds that all programs, the kernel and the hypervisor have used on `cores`; 0 if unknown."""
    names, ticks = {f"cpu{core}" for core in cores}, 0
    with suppress(OSError):
        for line in stat.read_text().splitlines():
            name, *fields = line.split()
            if name in names:
                user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
                ticks += user + nice + system + irq + softirq + steal
    return ticks / ticks_per_second


@dataclass(slots=True)
class StepThreads:
    """The number of threads for the time until the next call, from the use of the cores since the call before."""

    most: int
    cores: Collection[int] = field(default_factory=lambda: os.sched_getaffinity(0))
    busy: Callable[[Collection[int]], float] = busy_seconds
    own: Callable[[], float] = time.process_time
    clock: Callable[[], float] = time.monotonic
    _previous: tuple[float, float] | None = None  # time and CPU seconds of other programs, at the call before

    def __call__(self) -> int:
        if self.most == 1:
            return 1
        now, others = self.clock(), self.busy(self.cores) - self.own()
        before, self._previous = self._previous, (now, others)
        if before is None:
            return self.most
        return thread_count(self.most, len(self.cores), (others - before[1]) / (now - before[0]))
