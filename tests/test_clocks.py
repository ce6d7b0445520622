"""The wall clock is for people: nothing waits, expires or is in order by it. Read from the source."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SHOWN = {
    "router/cli/main.py": "how long it is until a failed model is tried again, for ps",
    "router/events.py": "when it happened, of an event; its order is its number",
    "router/fleet/failures.py": "until when a model that failed is not tried again, of an event",
    "router/api/llama_server.py": "when a model was listed",
    "router/api/lmi.py": "when a worker was ready",
    "router/api/ollama.py": "when a model was listed, and will leave",
    "router/api/request_log.py": "the time of a line about a request",
    "router/api/status.py": "moments of the fleet's clock, as a time of day",
    "router/fleet/model.py": "when a model was listed",
    "router/http/listener.py": "the header Date",
    "router/log.py": "the time of a line",
    "router/registry/shared_workers.py": "when a preset was first listed",
    "router/http/pipeline.py": "when a request came, in the list of requests",
    "router/cli/serve.py": "the first number of events and lines: above those of an earlier router",
    "router/registry/registry.py": "when presets were reloaded",
    "worker/api/embeddings.py": "when an answer was created",
    "worker/api/openai.py": "when an answer was created",
    "worker/api/responses.py": "when an answer was created",
    "worker/protocol/streams.py": "when an answer was created",
}
"""The readers of the wall clock and their purpose: each reading is shown, none is compared with a later one."""
WALL = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime", "ctime", "strftime", "fromtimestamp"}
MODULES = {"time", "datetime", "date"}
READS = re.compile(rf"\b({'|'.join(MODULES)})\s*\.\s*({'|'.join(WALL)})\b|from time import")
"""Without this a source is not worth a closer look."""


def wall_clocks(source: str) -> set[str]:
    """Calls of `time.time()`, `datetime.now()` and the like, as they are written; also where one is handed on."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in WALL and isinstance(node.value, ast.Name | ast.Attribute):
            of = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if of in MODULES:
                found.add(f"{of}.{node.attr}")
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            found |= {f"time.{alias.name}" for alias in node.names if alias.name in WALL}
    return found


def test_time_outs_ages_and_orders_are_by_the_monotonic_clock() -> None:
    reads = {}
    for package in ("router", "worker"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if READS.search(text) and (found := wall_clocks(text)):
                reads[str(path.relative_to(ROOT))] = found
    assert reads.keys() == SHOWN.keys()


def test_a_wall_clock_is_found_however_it_is_written() -> None:
    for line in ("time.time()", "datetime.datetime.now()", "clock = time.time", "from time import time_ns"):
        assert wall_clocks(line), line
    for line in ("time.monotonic()", "loop.time()", "time.perf_counter()", "fleet.now()"):
        assert not wall_clocks(line), line
