"""Whether the kernel has just killed somebody for want of main memory.

The kernel's victim dies of SIGKILL and can say nothing; the counter of its kills tells that it was not a person's.
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path

RECENT = 5.0
"""Seconds for which a kill explains a death."""


class OomKills:
    """The kernel's counter of kills, looked at now and then. Times are seconds of a monotonic clock."""

    def __init__(self, count: Callable[[], int]):
        """`count`: the counter now, such as `counted`."""
        self._count = count
        self._looks: deque[tuple[float, int]] = deque()

    def look(self, now: float) -> None:
        """Remember the counter; to be called each second or so."""
        self._looks.append((now, self._count()))
        while len(self._looks) > 1 and self._looks[1][0] <= now - RECENT:
            self._looks.popleft()

    def happened(self, now: float) -> bool:
        """Whether it rose of late."""
        self.look(now)
        return self._looks[-1][1] > self._looks[0][1]


def counted(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Kills in our own control group, or where that has no counter, in the whole machine; 0 where nobody counts."""
    for file in (*_own_group(proc, cgroup), proc / "vmstat"):
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.strip().isdigit():
                return int(value)
    return 0


def _own_group(proc: Path, cgroup: Path) -> list[Path]:
    """Where the memory controller counts, by version 2 and 1; a container may see its own group at the root."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    files: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files += (cgroup / path.strip("/") / "memory.events", cgroup / "memory.events")
        elif "memory" in controllers.split(","):
            root = cgroup / "memory"
            files += (root / path.strip("/") / "memory.oom_control", root / "memory.oom_control")
    return files
