"""Functions that several benchmarks share: figures, servers on this machine, and the origin of a record."""

import http.client
import os
import platform
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile by nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(percent) // 100) - 1)]


def bandwidth(device: str, threads: int, size: int) -> float:
    """Bytes per second that this device reads: the best of several sums and copies (a copy counts twice)."""
    import torch

    torch.set_num_threads(threads)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(5):
        for copies, moved in ((False, size), (True, 2 * size)):
            begin = time.monotonic()
            if copies:
                target.copy_(source)
            else:
                source.sum()
            if device != "cpu":
                torch.cuda.synchronize()
            best = max(best, moved / (time.monotonic() - begin))
    return best


# Servers


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def is_up(port: int) -> bool:
    """True if the server on this port answers GET /health with 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def wait_until_up(process: "subprocess.Popen[bytes]", port: int, name: str, seconds: float) -> None:
    """Raises RuntimeError if the process ends, or does not answer within `seconds`."""
    end = time.monotonic() + seconds
    while not is_up(port):
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"{name} does not answer; try its program by hand")
        time.sleep(0.2)


def stop(process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    """Return once the process has ended."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# Records


def git(*words: str) -> str:
    """The output of a git command in this repository; empty if it fails."""
    with suppress(OSError):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def commit(*paths: str) -> str:
    """The last commit that changed `paths` (none: any file), with a plus if they have changed since."""
    head = git("log", "-1", "--format=%h", "--", *paths) or "unknown"
    return head + ("+" if git("status", "--porcelain", "--", *paths) else "")


def machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"


def libraries() -> str:
    import torch
    import transformers

    return f"torch {torch.__version__}, transformers {transformers.__version__}"
