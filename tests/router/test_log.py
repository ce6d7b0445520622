import asyncio
import io
import json
import logging

from router.events import Event
from router.log import Spool, _Json, _Text, plan_line, size, state_line

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
