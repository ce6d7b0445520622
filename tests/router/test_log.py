import asyncio
import contextlib
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading

from router.events import Event
from router.log import UNREAD, Spool, _Json, _Text, plan_line, size, state_line

MIB = 1 << 20


def record(message: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("router.x", level, "", 0, message, (), None)


class Written(io.StringIO):
    """A stream that keeps each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str, /) -> int:
        self.writes.append(text)
        return len(text)


def test_a_transition_is_one_line_with_its_facts() -> None:
    data = {"worker": 7, "state": "stopped", "was": "ready", "reason": "evicted", "for": "b", "error": "it died"}
    assert state_line(Event(1, 0.0, "state", "a", data)) == 'a#7 ready→stopped reason=evicted for=b error="it died"'


def test_an_eviction_names_who_for_and_the_numbers() -> None:
    devices = {"cpu": {"total": 8, "used": 900 * MIB, "foreign": 0, "margin": 64 * MIB, "limit": 1000 * MIB}}
    data = {"decision": "evict", "worker": 1, "reason": "evicted", "for": "c", "idle_seconds": 3.5,
            "frees": {"cpu": 400 * MIB}, "needs": [500 * MIB], "source": "exact", "devices": devices}  # fmt: skip
    line = plan_line(Event(1, 0.0, "plan", "a", data))
    assert line == (
        "evict a#1 reason=evicted for=c idle=3.5s frees=400MiB@cpu needs=500MiB(exact)"
        " cpu:used=900MiB,foreign=0MiB,margin=64MiB,limit=1000MiB"
    )


def test_a_refusal_and_a_dropped_copy_are_one_line_with_their_numbers() -> None:
    devices = {"cpu": {"total": 8, "used": 900 * MIB, "foreign": 0, "margin": 64 * MIB, "limit": None}}
    for decision in ("refuse", "drop"):
        data = {"decision": decision, "worker": 1, "needs": [500 * MIB], "source": "exact", "devices": devices}
        line = plan_line(Event(1, 0.0, "plan", "a", data))
        assert line == f"{decision} a#1 needs=500MiB(exact) cpu:used=900MiB,foreign=0MiB,margin=64MiB"


def test_no_input_breaks_a_line_or_colours_a_terminal() -> None:
    text = _Text().format(record("a\nb\r\x1b[31mc"))
    assert "\n" not in text
    assert "\x1b" not in text
    assert json.loads(_Json().format(record("a\nb")))["message"] == "a\nb"


def test_what_a_library_warns_of_is_a_line_of_the_log() -> None:
    code = "import warnings; from router.log import set_up; set_up('info', 'json'); warnings.warn('two\\nlines')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    [line] = ended.stderr.splitlines()
    assert json.loads(line)["message"] == "UserWarning: two\nlines"


def test_sizes_are_for_people() -> None:
    assert [size(value) for value in (None, 5 * MIB, 9000 * MIB, 20480 * MIB)] == ["-", "5MiB", "9000MiB", "20.0GiB"]


async def test_lines_of_one_moment_are_written_together_and_warnings_at_once() -> None:
    stream = Written()
    spool = Spool(stream)
    spool.setFormatter(logging.Formatter("%(message)s"))
    for text in ("one", "two"):
        spool.handle(record(text))
    assert stream.writes == []
    async with asyncio.timeout(5):
        while not stream.writes:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert stream.writes == ["one\ntwo\n"]
    spool.handle(record("three"))
    spool.handle(record("four", logging.WARNING))
    assert stream.writes[1:] == ["three\nfour\n"]
    await asyncio.to_thread(spool.handle, record("elsewhere"))
    assert stream.writes[2:] == ["elsewhere\n"]


async def test_a_reader_of_the_log_that_does_not_read_holds_up_nobody_and_hears_what_it_missed() -> None:
    source, end = os.pipe()
    with os.fdopen(source, encoding="utf-8") as reader, os.fdopen(end, "w", encoding="utf-8") as stream:
        spool = Spool(stream)
        spool.setFormatter(_Text())
        said = 0
        while said * 1000 < 2 * UNREAD:  # more than the pipe and what is kept for it
            spool.handle(record(f"{said} {'x' * 1000}", logging.WARNING))
            said += 1
        got: list[str] = []
        missing = threading.Event()

        def read() -> None:
            for line in reader:
                got.append(line)
                if "missing" in line:
                    missing.set()
                    return

        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        async with asyncio.timeout(20):
            while not missing.is_set():
                spool.handle(record("more", logging.WARNING))
                await asyncio.sleep(0)
        reading.join()
    *before, told = got
    numbers = [int(line.split(" WARNING router.x ")[1].split()[0]) for line in before if "more" not in line]
    assert numbers == list(range(len(numbers)))
    match = re.search(r"WARNING router.log (\d+) lines are missing here", told)
    assert match is not None
    assert int(match[1]) >= said - len(numbers) > 0


async def test_what_was_not_read_in_time_is_offered_again_without_a_further_line() -> None:
    source, end = os.pipe()
    with os.fdopen(source, "rb") as reader, os.fdopen(end, "w", encoding="utf-8") as stream:
        os.set_blocking(end, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(end, b"x" * 4096)
        os.set_blocking(end, True)
        spool = Spool(stream)
        spool.setFormatter(_Text())
        spool.handle(record("the last word", logging.WARNING))
        async with asyncio.timeout(20):
            await asyncio.to_thread(_until, reader, b"the last word\n")


def _until(reader: io.BufferedReader, ending: bytes) -> None:
    """Returns once what was read ends so."""
    got = b""
    while not got.endswith(ending):
        got = (got + reader.read1())[-100:]


def test_a_log_that_nobody_reads_any_more_harms_nobody() -> None:
    source, end = os.pipe()
    os.close(source)
    with os.fdopen(end, "w", encoding="utf-8") as stream:
        spool = Spool(stream)
        spool.setFormatter(_Text())
        spool.handle(record("one", logging.WARNING))
        spool.handle(record("two", logging.WARNING))
