"""The number of modules that a reader has to open to follow a cold load: a real router, fork server and worker."""

import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import httpx

import router
from tests.children import DEADLINE, Child, environment, python

PACKAGE = Path(router.__file__).parent
BOUND = 45
"""Modules of `router` that a cold chat request enters from its arrival to its answer."""


def test_a_cold_load_enters_few_modules(tmp_path: Path) -> None:
    with Child(python(__file__, str(tmp_path)), env=environment(HF_HUB_CACHE=str(tmp_path / "hub"))) as traced:
        line = traced.line()
        assert line is not None, traced.log
        entered = set(json.loads(line))
        assert traced.exit() == 0, traced.log
    path = (
        "http/proxy.py",
        "fleet/lifecycle.py",
        "planner/planner.py",
        "launch/fork_server.py",
        "memory/checkpoint.py",
    )
    assert entered.issuperset(path), "the trace does not see the load"
    assert len(entered) <= BOUND, "\n".join([f"{len(entered)} modules", *sorted(entered)])


class Trace:
    """The files whose functions run in this process, on any thread, in the block `running`."""

    def __init__(self) -> None:
        self._is_on = False
        self._files: set[str] = set()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if self._is_on and event == "call":
            self._files.add(frame.f_code.co_filename)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._files.clear()
        self._is_on = True
        yield
        self._is_on = False

    def modules(self) -> set[str]:
        """The modules of `router` among them, by path."""
        return {str(Path(file).relative_to(PACKAGE)) for file in self._files if Path(file).is_relative_to(PACKAGE)}


class ForkServerIsWarm(logging.Handler):
    """`seen` is set once the router has logged that its fork server is ready."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if re.search(r"the fork server \(process \d+\) is warm", record.getMessage()):
            self.seen.set()


def ask(socket: str, is_warm: threading.Event, trace: Trace) -> None:
    """Send a chat request to two models that are not loaded, print the modules that both enter, and stop the router.
    A module that only one enters belongs to other work of the router, such as a reading of a device."""
    url, messages = "http://localhost/v1/chat/completions", [{"role": "user", "content": "hello"}]
    entered = []
    try:
        assert is_warm.wait(DEADLINE)
        with httpx.Client(transport=httpx.HTTPTransport(uds=socket, retries=5), timeout=DEADLINE) as client:
            for model in ("demo-chat", "demo-a"):
                client.post(url, json={"model": "none", "messages": messages})  # the work before this one has ended
                with trace.running():
                    answer = client.post(url, json={"model": model, "max_tokens": 2, "messages": messages})
                assert answer.status_code == 200, answer.text
                entered.append(trace.modules())
        print(json.dumps(sorted(entered[0] & entered[1])), flush=True)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def serve(folder: Path) -> None:
    """Run a router in this process, traced."""
    from router.cli.main import main

    fork_server, trace, socket = ForkServerIsWarm(), Trace(), f"{folder}/router.sock"
    logging.getLogger("router").addHandler(fork_server)
    threading.Thread(target=ask, args=(socket, fork_server.seen, trace), daemon=True).start()
    folders = ["--state-dir", f"{folder}/state", "--runtime-dir", f"{folder}/run"]
    sys.argv = ["router", "--demo", "--host", socket, *folders]
    main()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
