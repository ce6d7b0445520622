"""The page locker's program: reads files into main memory or locks their pages. See `router.launch.page_lock`.

    python page_locker.py read|lock FILE...

The reply on stdout is one line: `{"done": BYTES}` or `{"error": "..."}`. Pages stay locked until the process ends.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

OOM_SCORE = "1000"  # the first process for the OOM killer to end: all that it holds can be read again
_PR_SET_PDEATHSIG = 1
_PROT_READ, _MAP_SHARED = 1, 1

_BUFFER_BYTES = 16 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def read(path: str) -> int:
    """Read a file, and return its bytes. Large sequential reads are the fastest way for disks."""
    size, buffer = 0, bytearray(_BUFFER_BYTES)  # a process that locks has none
    with open(path, "rb", buffering=0) as file:
        while got := file.readinto(buffer):
            size += got
    return size


def lock(path: str) -> int:
    """Lock the pages of a file, and return its bytes. The kernel reads those that are not in memory."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        base = _libc.mmap(None, size, _PROT_READ, _MAP_SHARED, file.fileno(), 0) if size else None
    if size and (base == ctypes.c_void_p(-1).value or _libc.mlock(base, size) != 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return size


def main(task: str, *paths: str) -> None:
    reply: dict[str, Any]
    try:
        reply = {"done": sum(map(lock if task == "lock" else read, paths))}
    except OSError as error:
        reply = {"error": error.strerror or str(error)}
    print(json.dumps(reply), flush=True)
    while task == "lock" and "done" in reply and os.read(0, 1):
        pass  # the end of stdin: the router has exited


if __name__ == "__main__":
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
        score.write(OOM_SCORE)
    main(*sys.argv[1:])
