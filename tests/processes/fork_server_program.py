"""A worker program that only tells how it finds the world: run as `fork_server_program.py VERB ...`, it is executed;
its verb `nursery` is the real fork server, whose children run the same.

It says one `progress` event whose stage is a JSON object. The environment variable NURSERY_HAS names what is wrong with
its nursery: `thread`, or `loaded` or `started`, that of the CUDA driver in NURSERY_CUDA.
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

STAY = "stay"
"""As --config-override: end only with the leash."""


def facts() -> dict[str, Any]:
    """Of this process, all that a parent could have left its mark on."""
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


def luck() -> list[float]:
    """The next numbers of every generator that libraries draw from."""
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
    tied = supervision.attach(supervised=command.supervised, parent_pid=command.parent_pid)
    found["oom after"] = int(Path("/proc/self/oom_score_adj").read_text())
    found["cmdline"] = Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    found["luck"] = luck()
    tied.send(Progress(stage=json.dumps(found)))
    if isinstance(command, Estimate) and command.config_override == STAY:
        threading.Event().wait()
    tied.send(Estimated(weights=[1], context=[], compute=[], runtime=[]))
    os._exit(0)


if __name__ == "__main__":
    words = sys.argv[1:]
    order = from_argv(words)
    if isinstance(order, ForkServerOptions):
        if os.environ.get("NURSERY_HAS") == "thread":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        if "NURSERY_CUDA" in os.environ:
            driver = ctypes.CDLL(os.environ["NURSERY_CUDA"])
            if os.environ["NURSERY_HAS"] == "started":
                driver.cuInit(0)
        os._exit(fork_server.serve(order, run, modules=("json", "worker.no_such_module")))
    run(words)
