import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from router import log
from router.api.request_log import request_line
from router.events import Event, EventLog
from router.log import Line, LogQueue, Ring, _Json, _Text, converted_line, plan_line, size, state_line

MIB = 1 << 20


def record(message: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("router.x", level, "", 0, message, (), None)


def test_a_transition_is_one_line_with_its_facts() -> None:
    data = {"worker": 7, "state": "stopped", "was": "ready", "reason": "evicted", "for": "b", "error": "it died"}
    assert state_line(Event(1, 0.0, "state", "a", data)) == 'a#7 ready→stopped reason=evicted for=b error="it died"'


def test_an_eviction_line_names_the_demand_and_the_numbers() -> None:
    devices = {"cpu": {"total": 8, "used": 900 * MIB, "foreign": 0, "margin": 64 * MIB, "limit": 1000 * MIB}}
    data = {"decision": "evict", "worker": 1, "reason": "evicted", "for": "c", "idle_seconds": 3.5,
            "frees": {"cpu": 400 * MIB}, "needs": [500 * MIB], "source": "exact", "devices": devices}  # fmt: skip
    line = plan_line(Event(1, 0.0, "plan", "a", data))
    assert line == (
        "evict a#1 reason=evicted for=c idle=3.5s frees=400MiB@cpu needs=500MiB(exact)"
        " cpu:used=900MiB,foreign=0MiB,margin=64MiB,limit=1000MiB"
    )


@pytest.mark.parametrize(("written", "done"), [(3 << 30, "weights 3072MiB"), (0, "nothing to convert")])
def test_a_conversion_is_one_line_with_its_size_and_time(written: int, done: str) -> None:
    data = {"outcome": "done", "bytes": written, "seconds": 2.25}
    assert converted_line(Event(1, 0.0, "converted", "a", data)) == f"a converted: {done} in 2.2s"


def test_a_refusal_and_a_dropped_copy_are_one_line_with_their_numbers() -> None:
    devices = {"cpu": {"total": 8, "used": 900 * MIB, "foreign": 0, "margin": 64 * MIB, "limit": None}}
    for decision in ("refuse", "drop"):
        data = {"decision": decision, "worker": 1, "needs": [500 * MIB], "source": "exact", "devices": devices}
        line = plan_line(Event(1, 0.0, "plan", "a", data))
        assert line == f"{decision} a#1 needs=500MiB(exact) cpu:used=900MiB,foreign=0MiB,margin=64MiB"


def test_a_pause_is_one_line_whose_time_is_in_utc_as_that_of_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"worker": 3, "cause": "crashed", "seconds": 2.1, "final": False, "until": 43384.0}
    try:
        monkeypatch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        line = log.pause_line(Event(1, 0.0, "back_off", "a", data))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert line == "a#3 failed (crashed): next attempt in 2.1 s, at 12:03:04Z"


@pytest.mark.parametrize(("changed", "line"), [(["a", "b"], "changed=a,b"), ([], "no model has changed")])
def test_a_reload_is_one_line(changed: list[str], line: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    events = EventLog()
    log.follow(events)
    events.append("config", "*", added=[], changed=changed)
    assert caplog.messages == [f"presets reloaded: {line}"]


def test_no_input_breaks_a_line_or_colours_a_terminal() -> None:
    text = _Text().format(record("a\nb\r\x1b[31mc"))
    assert "\n" not in text
    assert "\x1b" not in text
    assert json.loads(_Json().format(record("a\nb")))["message"] == "a\nb"


@pytest.mark.parametrize(
    ("logger", "message", "is_about"),
    [
        ("worker.a", "loading", True),
        ("worker.demo-a", "loading", False),
        ("router.fleet.fleet", "a#3 starting→ready", True),
        ("router.fleet.fleet", "evict a#3 reason=evicted", True),
        ("router.fleet.fleet", "demo-a#3 starting→ready", False),
        ("router.fleet.fleet", "a: 2 requests refused (queue_full): full", True),
        ("router.fleet.fleet", "demo-a: 2 requests refused (queue_full): full", False),
        ("router.http.access", "- POST / 200 0.1s model=a rid=1", True),
        ("router.http.access", "- POST / 200 0.1s model=demo-a rid=1", False),
    ],
)
def test_a_line_is_about_a_model_that_it_names_as_a_whole_word(logger: str, message: str, is_about: bool) -> None:
    assert Line(1, 0.0, "info", logger, message).is_about("a") is is_about


def test_a_python_warning_is_a_line_of_the_log() -> None:
    code = "import warnings; from router.log import set_up; set_up('info', 'json'); warnings.warn('two\\nlines')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    [line] = ended.stderr.splitlines()
    assert json.loads(line)["message"] == "UserWarning: two\nlines"


def test_sizes_are_for_people() -> None:
    assert [size(value) for value in (None, 5 * MIB, 9000 * MIB, 20480 * MIB)] == ["-", "5MiB", "9000MiB", "20.0GiB"]


@contextlib.contextmanager
def full_pipe() -> Iterator[tuple[int, int]]:
    """(end to read, end to write) of a pipe that has no room."""
    source, end = os.pipe()
    os.set_blocking(end, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(end, b"x" * 4096)
    os.set_blocking(end, True)
    try:
        yield source, end
    finally:
        with contextlib.suppress(OSError):
            os.close(source)
        os.close(end)


def log_queue(descriptor: int, form: type[logging.Formatter] = _Text, **options: int) -> LogQueue:
    queue = LogQueue(descriptor, **options)
    queue.setFormatter(form())
    return queue


def lines(source: int) -> list[str]:
    """The lines of a pipe up to its end."""
    with open(source, encoding="utf-8") as reader:
        return reader.read().splitlines()


def test_every_line_before_the_close_is_written_in_order() -> None:
    source, end = os.pipe()
    queue = log_queue(end)
    for number in range(100):
        queue.handle(record(f"line {number}"))
    queue.close()
    os.close(end)
    assert [line.rpartition(" ")[2] for line in lines(source)] == [str(number) for number in range(100)]


def test_a_log_that_is_not_read_blocks_nothing_and_dropped_lines_are_counted() -> None:
    with full_pipe() as (source, end):
        queue = log_queue(end, size=10)
        for number in range(100):
            queue.handle(record(f"line {number}"))  # returns although the pipe is full
        found: list[str] = []
        reading = threading.Thread(target=lambda: found.extend(lines(os.dup(source))))
        reading.start()
        queue.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), end)  # the end of the pipe
        reading.join()
    number = dropped = 0
    for line in found:
        # The thread may take lines before the last one is queued, so lines may follow a count.
        if match := re.search(r"WARNING router.log (\d+) log lines were dropped here", line):
            dropped += int(match[1])
            number += int(match[1])
        else:
            assert line.endswith(f" line {number}")
            number += 1
    assert number == 100
    assert dropped > 0


def test_the_count_of_dropped_lines_stands_where_they_are_missing() -> None:
    with full_pipe() as (source, end):
        queue = log_queue(end, size=2)
        queue.handle(record("first"))
        while queue.queue.qsize():  # type: ignore[attr-defined]  # its thread has taken it
            os.sched_yield()
        for number in range(10):
            queue.handle(record(str(number)))  # two wait at least; the thread may have gathered further ones
        os.set_blocking(source, False)
        emptied = os.read(source, 1 << 20).count(b"x")  # the thread writes from now on
        assert emptied
        while queue.queue.qsize():  # type: ignore[attr-defined]
            os.sched_yield()
        queue.handle(record("later"))
        os.set_blocking(source, True)
        found: list[str] = []
        reading = threading.Thread(target=lambda: found.extend(lines(os.dup(source))))
        reading.start()
        queue.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), end)  # the end of the pipe
        reading.join()
    shown = [line.rpartition(" ")[2] if "dropped" not in line else line for line in found]
    position = next(index for index, text in enumerate(shown) if "dropped" in text)
    assert shown[:position] == ["first", *(str(number) for number in range(position - 1))]
    assert f"{11 - position} log lines were dropped here" in shown[position]
    assert shown[position + 1 :] == ["later"]


def test_a_request_has_the_line_of_a_record_without_one(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("router.http.access")
    source, end = os.pipe()
    queue, ring, root = log_queue(end), Ring(), logging.getLogger()
    root.addHandler(queue)
    root.addHandler(ring)
    try:
        with caplog.at_level(logging.INFO):
            logger.info("GET /x\x1b 200")
            request_line(logger, "GET /x\x1b 200")
        with caplog.at_level(logging.WARNING):
            request_line(logger, "below the level")
    finally:
        root.removeHandler(queue)
        root.removeHandler(ring)
    queue.close()
    os.close(end)
    one, other = (line.split(" ", 1)[1] for line in lines(source))
    assert one == other == "INFO router.http.access GET /x\\x1b 200"
    first, second = ring.lines
    assert (first.level, first.logger, first.message) == (second.level, second.logger, second.message)
    assert len(caplog.records) == 2


def test_a_process_whose_log_is_not_read_ends() -> None:
    code = (
        "import logging; from router.log import set_up; set_up('info', 'text')\n"
        "for number in range(10_000): logging.info('line %d', number)"
    )
    with full_pipe() as (_, end):
        ended = subprocess.run([sys.executable, "-c", code], stderr=end, check=False, timeout=60)
    assert ended.returncode == 0


def test_a_log_whose_reader_has_gone_harms_nothing() -> None:
    source, end = os.pipe()
    os.close(source)
    queue = log_queue(end)
    queue.handle(record("one"))
    queue.handle(record("two"))
    queue.close()
    os.close(end)


def test_a_traceback_is_a_field_of_a_json_line() -> None:
    source, end = os.pipe()
    queue = log_queue(end, _Json)
    try:
        raise ValueError("wrong")
    except ValueError:
        queue.handle(logging.LogRecord("router.x", logging.ERROR, "", 0, "failed: %s", ("a",), sys.exc_info()))
    queue.close()
    os.close(end)
    [line] = lines(source)
    assert json.loads(line)["message"] == "failed: a"
    assert json.loads(line)["traceback"].endswith("ValueError: wrong")
