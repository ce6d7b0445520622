"""A worker program that only reports its process state. Its verb `fork-server` is the real fork server, whose children
run the same program as `fork_server_program.py VERB ...`.

It sends one `progress` event whose stage is a JSON object. The environment variable FORK_SERVER_HAS adds a fault to the
fork server: `thread`, or `loaded` or `started`, the state of the CUDA driver in FORK_SERVER_CUDA.
"""

import ctypes
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy.random  # it draws its seed when it is imported

from worker.program import fork_server, supervision
from worker.protocol.argv import Download, Estimate, ForkServerOptions, from_argv
from worker.protocol.events import Estimated, Progress

STAY = "stay"  # as --config-override: exit only with the router


def facts() -> dict[str, Any]:
    """All properties of this process that depend on how it was started."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    masks = {name: status[name].strip() for name in ("SigBlk", "SigIgn", "NoNewPrivs", "Threads", "Umask")}
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    kinds = {number: _kind(number) for number in sorted(numbers)}
    return {
        **masks,
        "argv": sys.argv[1:],
        "cwd": os.getcwd(),
        "descriptors": [kind for kind in kinds.values() if kind],
        "environ": {name: value for name, value in os.environ.items() if name != "FLEET_WORKER"},
        "handlers": [repr(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)],
        "leads": (os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()),
        "oom": int(Path("/proc/self/oom_score_adj").read_text()),
        "path": sys.path[1:],
    }


def random_numbers() -> list[float]:
    """The next numbers of the random generators that libraries use."""
    return [random.random(), float(numpy.random.random())]


def _kind(number: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}").partition(":")[0]
    except FileNotFoundError:  # that of the listing itself
        return ""


def run(argv: list[str]) -> NoReturn:
    command = from_argv(argv)
    assert not isinstance(command, Download | ForkServerOptions)
    found = facts()
    channel = supervision.attach(supervised=command.supervised, parent_pid=command.parent_pid)
    found["oom after"] = int(Path("/proc/self/oom_score_adj").read_text())
    found["cmdline"] = Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    found["random_numbers"] = random_numbers()
    channel.send(Progress(stage=json.dumps(found)))
    if isinstance(command, Estimate) and command.config_override == STAY:
        threading.Event().wait()
    channel.send(Estimated(weights=[1], context=[], compute=[], runtime=[]))
    os._exit(0)


if __name__ == "__main__":
    argv = sys.argv[1:]
    command = from_argv(argv)
    if isinstance(command, ForkServerOptions):
        if os.environ.get("FORK_SERVER_HAS") == "thread":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        if "FORK_SERVER_CUDA" in os.environ:
            driver = ctypes.CDLL(os.environ["FORK_SERVER_CUDA"])
            if os.environ["FORK_SERVER_HAS"] == "started":
                driver.cuInit(0)
        os._exit(fork_server.serve(command, run, modules=("json", "worker.no_such_module")))
    run(argv)
