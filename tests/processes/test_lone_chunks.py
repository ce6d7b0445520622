"""A chunk that comes alone is passed on without parsing. The response is the same as with parsing."""

import asyncio
import itertools
from pathlib import Path

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from router.launch.worker_client import (
    Exchange,
    NotHttp,
    WorkerClient,
    WorkerClientError,
    _WorkerConnection,
    start_of_lone_chunk,
)
from tests.processes.upstreams import DONE, END, STREAM, Upstream, chunk, request, world

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % number for number in range(6)]


def test_only_a_chunk_in_the_plainest_form_is_taken_as_it_comes() -> None:
    assert start_of_lone_chunk(chunk(b"abc")) == 3
    assert start_of_lone_chunk(chunk(b"x" * 300)) == 5
    assert start_of_lone_chunk(chunk(b"\n" * 17)) == 4
    for other in (
        b"",
        b"3",
        b"\r\n",
        END,
        chunk(b"abc") * 2,
        chunk(b"abc")[:-1],
        chunk(b"abc") + b"3",
        b"03\r\nabc\r\n",
        b"3;a=b\r\nabc\r\n",
        b" 3\r\nabc\r\n",
        b"+3\r\nabc\r\n",
        b"0x3\r\nabc\r\n",
        b"3\nabc\n",
        b"3\nabc\r\n",
        b"4\r\nabc\r\n",
        b"2\r\nabc\r\n",
        b"3\r\nabcde",
        b"A\r\n0123456789\r\n",
        b"x" * 300,
    ):
        assert start_of_lone_chunk(other) == 0, other


class Transport(asyncio.Transport):
    """A writer that discards everything."""

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        pass


class Hearing:
    """One answer as it comes in: `past`, with chunks that may go past the parser."""

    def __init__(self, *, past: bool, takes: int = -1):
        self.exchange = Exchange(asyncio.get_running_loop())
        self.content = b""
        self.lone = 0
        """Chunks that went past the parser."""
        self._takes = takes
        self.connection = _WorkerConnection(WorkerClient("unix:/nowhere"))
        self.connection.connection_made(Transport())
        self.connection.begin(self.exchange)
        self.exchange.sink = self._take
        if past:
            self.exchange.chunk_sink = self._take_framed

    def _take(self, data: bytes) -> bool:
        self.content += data
        return True

    def _take_framed(self, framed: bytes, start: int) -> bool:
        if self.lone == self._takes:
            return False
        self.lone += 1
        self.content += framed[start:-2]
        return True

    @property
    def end(self) -> str:
        """The error with which the answer ended, if it has ended."""
        error: WorkerClientError | None = self.exchange._error
        if error is not None:
            return "not HTTP" if isinstance(error, NotHttp) else "broken"
        return "whole" if self.exchange.at_end else "open"


PIECES = st.one_of(
    st.sampled_from(EVENTS).map(chunk),
    st.binary(min_size=1, max_size=20).map(chunk),
    st.sampled_from([b"3;a=b\r\nabc\r\n", b"A\r\n0123456789\r\n", b"003\r\nabc\r\n", END, b"3", b"\r\n", b"zz"]),
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(pieces=st.lists(PIECES, max_size=8), cuts=st.lists(st.integers(0, 300), max_size=4), takes=st.integers(-1, 3))
@example(pieces=[chunk(b"abc"), b"3", b"\r\nabc\r\n"], cuts=[], takes=-1)
@example(pieces=[chunk(b"abc") + b"1", chunk(b"abc")], cuts=[], takes=-1)  # its size is 13 in hexadecimal
@example(pieces=[chunk(b"abc"), b"3\r", b"\nabc\r", b"\n", chunk(b"d"), END], cuts=[], takes=-1)
@example(pieces=[chunk(b"abc"), b"b\r\n", chunk(b"abcdef"), END], cuts=[], takes=-1)  # a chunk within a chunk
def test_what_goes_past_the_parser_is_what_it_would_have_found(
    pieces: list[bytes], cuts: list[int], takes: int
) -> None:
    """However the bytes of an answer, right or wrong, are cut into what comes at once."""
    asyncio.run(_compared(pieces, cuts, takes))


async def _compared(pieces: list[bytes], cuts: list[int], takes: int) -> None:
    whole = b"".join(pieces)
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    for parts in (pieces, [whole[a:b] for a, b in itertools.pairwise(edges)]):
        ours, theirs = Hearing(past=True, takes=takes), Hearing(past=False)
        for hearing in (ours, theirs):
            for part in (HEAD, *parts):
                if hearing.end == "open":
                    hearing.connection.data_received(part)
        assert (ours.content, ours.end) == (theirs.content, theirs.end)


async def test_events_arrive_one_by_one_in_the_workers_framing_and_a_death_between_them_is_reported(
    tmp_path: Path,
) -> None:
    heard = asyncio.Queue[None]()

    async def stream(upstream: Upstream) -> None:
        await upstream.send(STREAM + chunk(EVENTS[0]))
        for sent in (chunk(EVENTS[1]), chunk(EVENTS[2] + EVENTS[3]), chunk(b": ping\n\n"), chunk(EVENTS[4])):
            await heard.get()
            await upstream.send(sent)
        await heard.get()
        if upstream.fake:
            await upstream.send(chunk(EVENTS[5])[:9])
            up.launcher.die("a")
            upstream.writer.transport.abort()
            raise ConnectionError
        await upstream.send(chunk(DONE) + END)

    async with world(tmp_path, stream) as up:
        for dies in (False, True):
            reader, writer = await up.connect()
            writer.write(request({"stream": True, "fake": dies}))
            async with asyncio.timeout(60):
                await reader.readuntil(b"\r\n\r\n")
                for expected in (EVENTS[0], EVENTS[1], EVENTS[2] + EVENTS[3], b": ping\n\n", EVENTS[4]):
                    assert await reader.readexactly(len(chunk(expected))) == chunk(expected)
                    heard.put_nowait(None)
                rest = await reader.read() if dies else await reader.readuntil(END)
            if dies:
                assert b'data: {"error":' in rest
                assert b"worker_crashed" in rest
                assert not rest.endswith(END)
            else:
                assert rest == chunk(DONE) + END
            writer.close()
