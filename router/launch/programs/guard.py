"""The guard's program: outlives the router by a moment and kills the process groups that it leaves behind.

See `router.launch.process_table.Guard`. It reads `+PID` and `-PID`, one per line, until the pipe closes because the
router has exited. Then it kills every group that is left.
"""

import contextlib
import os
import signal


def main() -> None:
    """Return once the router has exited and its groups are killed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    os.write(1, b"!")  # ready
    os.close(1)
    groups: set[int] = set()
    rest = b""
    while data := os.read(0, 4096):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
