"""The responses that clients get when workers, connections or other clients misbehave, byte by byte."""

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, UnixConnector

from router.config.settings import Settings
from router.fleet.worker import State
from router.registry import worker_groups
from tests.processes.upstreams import DONE, END, PATH, STREAM, Upstream, World, chunk, dying, request, until, world
from worker.errors import RequestError
from worker.protocol.dialects import Dialect
from worker.protocol.events import Pulse
from worker.protocol.routes import PROFILES_PATH
from worker.protocol.streams import error_frame

WORDS = [b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % number for number in range(6)]
ANSWER = STREAM + b"".join(map(chunk, [*WORDS, DONE])) + END
BODY = json.dumps({"object": "chat.completion", "choices": [{"message": {"content": "w" * 300}}]}).encode()
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


async def send_whole(upstream: Upstream) -> None:
    await upstream.send(WHOLE)


class Got:
    """The bytes that a client received until the end of its connection."""

    def __init__(self, data: bytes, *, reset: bool):
        head, _, self.rest = data.partition(b"\r\n\r\n")
        self.head = head.decode("latin-1").lower()
        self.status = int(self.head.split(" ")[1]) if head else 0
        self.reset = reset
        # True if the framing shows that the response is complete, and the payload.
        self.whole, self.body = _unchunk(self.rest) if "chunked" in self.head else self._sized()

    def _sized(self) -> tuple[bool, bytes]:
        lines = [line for line in self.head.split("\r\n") if line.startswith("content-length:")]
        return bool(lines) and len(self.rest) == int(lines[0].split(":")[1]), self.rest

    @property
    def reason(self) -> str:
        """The reason of the error at the end; empty if there is none."""
        last = self.body.removesuffix(b"\n\n").rpartition(b"\n\n")[2].removeprefix(b"data: ")
        try:
            return str(json.loads(last)["error"]["reason"])
        except (ValueError, KeyError, TypeError):
            return ""


def _unchunk(data: bytes) -> tuple[bool, bytes]:
    body = b""
    while b"\r\n" in data:
        size, _, data = data.partition(b"\r\n")
        if int(size, 16) == 0:
            return data == b"\r\n", body
        body, data = body + data[: int(size, 16)], data[int(size, 16) + 2 :]
    return False, body


async def ask(
    up: World, body: dict[str, Any], *, version: str = "1.1", headers: bytes = b"", seen: asyncio.Event | None = None
) -> Got:
    """Send one request on a connection of its own. `seen` is set at the first event of the response."""
    reader, writer = await up.connect(request(body, version=version, headers=headers + b"Connection: close\r\n"))
    data, reset = b"", False
    try:
        async with asyncio.timeout(60):
            while more := await reader.read(1 << 16):
                data += more
                if seen is not None and b"data:" in data:
                    seen.set()
    except ConnectionResetError:
        reset = True
    writer.close()
    return Got(data, reset=reset)


# A worker's response breaks off


async def break_as_instructed(upstream: Upstream) -> None:
    """Break off the response. `fake`: (stream or JSON, bytes until it breaks, how)."""
    kind, offset, how = upstream.fake
    await upstream.send((ANSWER if kind == "stream" else WHOLE)[:offset])
    if how == "garbage":
        await upstream.send(b"\x00\xff zz\r\nnot the protocol\r\n\r\n" * 3)
    transport = upstream.writer.transport
    transport.abort() if how == "reset" else transport.close()
    raise ConnectionError


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stream", "json"])
async def test_a_response_that_breaks_at_any_byte_is_never_taken_for_complete(tmp_path: Path, kind: str) -> None:
    """The client gets whole events, one error frame and an aborted connection, or an error status."""
    everything = ANSWER if kind == "stream" else WHOLE
    events = b"".join([*WORDS, DONE])
    cases = [(offset, how) for how in ("close", "reset", "garbage") for offset in range(0, len(everything), 5)]
    if kind == "json":  # any bytes are a valid body of stated length
        cases = [(offset, how) for offset, how in cases if how != "garbage" or offset < len(WHOLE) - len(BODY)]
    async with world(tmp_path, break_as_instructed) as up:
        asked = (ask(up, {"stream": kind == "stream", "fake": (kind, *case)}) for case in cases)
        for (offset, how), got in zip(cases, await asyncio.gather(*asked), strict=True):
            case = f"{how} after {offset}: {got.head} {got.rest!r}"
            assert got.status in (200, 502), case
            if got.status == 502:
                assert got.whole, case
                assert got.reason == "worker_crashed", case
                continue
            if got.whole:  # only the end of the connection was missing
                assert got.body == (events if kind == "stream" else BODY), case
                continue
            assert kind == "stream", case
            assert got.reason == "worker_crashed", case
            sent = got.body[: got.body.index(b'data: {"error"')]
            assert events.startswith(sent), case
            assert not sent or sent.endswith(b"\n\n"), case
        attempts = Counter(str(sent.fake) for sent in up.requests)
        assert max(attempts.values()) == 2


@pytest.mark.parametrize("behind", ["a head", "a comment", "half an event", "half a body"])
async def test_a_request_is_retried_if_its_worker_dies_before_the_first_byte_of_the_response(
    tmp_path: Path, behind: str
) -> None:
    stream, comment = behind != "half a body", b": prefill done=1 total=2\n\n"
    begun = {
        "a head": STREAM,
        "a comment": STREAM + chunk(comment),
        "half an event": STREAM + chunk(WORDS[0][:9]),
        "half a body": WHOLE[:-9],
    }[behind]

    async def die_once(upstream: Upstream) -> None:
        if len(up.requests) > 1:
            await upstream.send(ANSWER if stream else WHOLE)
            return
        await upstream.send(begun)
        if behind == "a comment":
            await received.wait()
        up.launcher.die("a")
        upstream.break_off()

    received = asyncio.Event()
    async with world(tmp_path, die_once) as up:
        reader, writer = await up.connect(request({"stream": stream}, headers=b"Connection: close\r\n"))
        data = await reader.readuntil(comment) if behind == "a comment" else b""
        received.set()
        got = Got(data + await reader.read(), reset=False)
        writer.close()
        frames = [frame for frame in got.body.split(b"\n\n") if not frame.startswith(b":")]
        assert (got.status, got.whole) == (200, True)
        assert b"\n\n".join(frames) == (b"".join([*WORDS, DONE]) if stream else BODY)
        assert len(up.requests) == 2
        assert up.count('router_requests_total{code="200",endpoint="chat",model="a"}') == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_retried_if_its_worker_was_stopped_by_a_signal_of_somebody_else(
    tmp_path: Path, stream: bool
) -> None:
    async def stop_once(upstream: Upstream) -> None:
        if len(up.requests) > 1:
            await upstream.send(ANSWER if stream else WHOLE)
            return
        head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n"
        await upstream.send(head + b"{}")
        up.launcher.die("a")

    async with world(tmp_path, stop_once) as up:
        got = await ask(up, {"stream": stream})
        assert (got.status, got.whole, len(up.requests)) == (200, True, 2)


async def test_a_request_is_retried_if_its_worker_dies_before_it_has_the_settings_of_the_request(
    tmp_path: Path,
) -> None:
    async def die_once(upstream: Upstream) -> None:
        if len(up.requests) > 1:
            await upstream.send(WHOLE)
            return
        up.launcher.die("a,b")
        upstream.break_off()

    async with world(tmp_path, die_once, twin="b") as up:
        got = await ask(up, {})
        assert (got.status, got.whole) == (200, True)
        paths = [upstream.head.split()[1] for upstream in up.requests]
        assert paths == [PROFILES_PATH, PROFILES_PATH, PATH]


async def test_a_request_is_not_retried_after_the_first_event(tmp_path: Path) -> None:
    async with dying(tmp_path, WORDS[0]) as (up, seen):
        got = await ask(up, {"stream": True}, seen=seen)
        assert (got.status, got.reason, got.whole) == (200, "worker_crashed", False)
        assert got.body.startswith(WORDS[0])
        assert len(up.requests) == 1


@pytest.mark.parametrize(
    ("sent", "streams"),
    [
        (b"SMTP 220 not the protocol\r\n\r\n", (False, True)),
        (STREAM + chunk(b"data: " + b"x" * (3 << 20)), (True,)),
    ],
    ids=["not HTTP", "an event that does not end"],
)
async def test_an_unreadable_response_is_502_and_not_retried(
    tmp_path: Path, sent: bytes, streams: tuple[bool, ...]
) -> None:
    async def send(upstream: Upstream) -> None:
        with contextlib.suppress(ConnectionError):
            await upstream.send(sent)
            await upstream.left()

    async with world(tmp_path, send) as up:
        for stream in streams:
            got = await ask(up, {"stream": stream})
            assert (got.status, got.reason) == (502, "worker_crashed")
        assert len(up.requests) == len(streams)


@pytest.mark.slow
async def test_a_long_response_that_breaks_is_shorter_than_its_content_length(tmp_path: Path) -> None:
    async def half(upstream: Upstream) -> None:
        await upstream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4000000\r\n\r\n" + b"x" * 2_000_000)
        upstream.break_off()

    async with world(tmp_path, half) as up:
        got = await ask(up, {})
        assert got.status == 200
        assert "content-length: 4000000" in got.head
        assert not got.whole
        assert set(got.rest) == {ord("x")}


async def test_events_arrive_one_by_one_in_the_workers_framing_and_a_death_between_them_is_reported(
    tmp_path: Path,
) -> None:
    heard = asyncio.Queue[None]()

    async def stream(upstream: Upstream) -> None:
        await upstream.send(STREAM + chunk(WORDS[0]))
        for sent in (chunk(WORDS[1]), chunk(WORDS[2] + WORDS[3]), chunk(b": ping\n\n"), chunk(WORDS[4])):
            await heard.get()
            await upstream.send(sent)
        await heard.get()
        if upstream.fake:
            await upstream.send(chunk(WORDS[5])[:9])
            up.launcher.die("a")
            upstream.writer.transport.abort()
            raise ConnectionError
        await upstream.send(chunk(DONE) + END)

    async with world(tmp_path, stream) as up:
        for dies in (False, True):
            reader, writer = await up.connect(request({"stream": True, "fake": dies}))
            async with asyncio.timeout(60):
                await reader.readuntil(b"\r\n\r\n")
                for expected in (WORDS[0], WORDS[1], WORDS[2] + WORDS[3], b": ping\n\n", WORDS[4]):
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


async def test_an_error_frame_of_the_worker_is_not_repeated(tmp_path: Path) -> None:
    frame = error_frame(Dialect.OPENAI, RequestError("NaN in the logits"))

    async def fail(upstream: Upstream) -> None:
        await upstream.send(STREAM + chunk(WORDS[0]))
        await seen.wait()
        await upstream.send(chunk(frame))
        upstream.break_off()

    seen = asyncio.Event()
    async with world(tmp_path, fail) as up:
        got = await ask(up, {"stream": True}, seen=seen)
        assert got.body == WORDS[0] + frame
        assert not got.whole
        assert up.count('router_requests_total{code="500",endpoint="chat",model="a"}') == 1


@pytest.mark.slow
async def test_a_stream_is_complete_although_the_connection_breaks_after_its_last_event(tmp_path: Path) -> None:
    async def almost(upstream: Upstream) -> None:
        await upstream.send(STREAM + chunk(WORDS[0]))
        await seen.wait()
        await upstream.send(b"".join(map(chunk, [*WORDS[1:], DONE])))
        upstream.break_off()

    seen = asyncio.Event()
    async with world(tmp_path, almost) as up:
        got = await ask(up, {"stream": True}, seen=seen)
        assert got.whole
        assert got.body == b"".join([*WORDS, DONE])


async def test_an_error_body_that_arrives_in_parts_is_one_frame_of_a_stream_that_has_begun(tmp_path: Path) -> None:
    error = json.dumps({"error": {"code": 400, "reason": "invalid_value", "message": "é" * 400}}).encode()

    async def refuse(upstream: Upstream) -> None:
        while len(up.requests) and not begun.is_set():
            await begun.wait()
        await upstream.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(error))
        for start in range(0, len(error), 100):
            await upstream.send(error[start : start + 100])
            await asyncio.sleep(0)

    begun = asyncio.Event()
    async with world(tmp_path, refuse, settings=Settings(stream_commit_seconds=0.0, sse_ping_interval=0.05)) as up:
        reader, _ = await up.connect(request({"stream": True}))
        head = await reader.readuntil(b": ping")
        begun.set()
        got = Got(head + await reader.read(), reset=False)
        assert got.status == 200
        assert got.body.split(b"\n\n")[-2] == b"data: " + error
        assert not got.whole


async def test_comments_of_a_worker_are_forwarded_and_do_not_count_as_first_token(tmp_path: Path) -> None:
    received = asyncio.Event()

    async def patient(upstream: Upstream) -> None:
        await upstream.send(STREAM + chunk(b": prefill done=5 total=20\n\n"))
        await received.wait()
        await upstream.send(b"".join(map(chunk, [*WORDS, DONE])) + END)

    async with world(tmp_path, patient) as up:
        reader, writer = await up.connect()
        begin = time.monotonic()
        writer.write(request({"stream": True}))
        await reader.readuntil(b": prefill done=5 total=20\n\n")
        before = time.monotonic() - begin
        await until(lambda: time.monotonic() > begin + 2 * before)
        received.set()
        await reader.readuntil(DONE)
        await up.idle()
        await until(lambda: up.count('router_ttft_seconds_count{model="a"}') == 1)
        assert up.count('router_ttft_seconds_sum{model="a"}') > before, "the first token came later than the comment"


@pytest.mark.parametrize("commit", [0.02, 30.0])
async def test_ignored_fields_are_sent_in_a_comment_once_the_head_is_sent(commit: float, tmp_path: Path) -> None:
    async def answer(upstream: Upstream) -> None:
        head = STREAM.replace(b"\r\n\r\n", b"\r\nX-Ignored-Fields: wibble,tools[].odd\r\n\r\n")
        await upstream.send(head + b"".join(map(chunk, [*WORDS, DONE])) + END)

    async with world(
        tmp_path, answer, settings=Settings(stream_commit_seconds=commit, sse_ping_interval=30.0), load_seconds=0.2
    ) as up:
        got = await ask(up, {"stream": True})
        assert got.whole
        is_late = commit < 0.2
        assert (b": ignored-fields wibble,tools[].odd\n\n" in got.body) is is_late
        assert ("\r\nx-ignored-fields: wibble,tools[].odd\r\n" in got.head) is not is_late


async def test_the_figures_of_a_pulse_appear_in_every_view(tmp_path: Path) -> None:
    async with world(tmp_path, send_whole, keys={"parallel": 3}) as up:
        assert (await ask(up, {})).status == 200
        slots = [[0, 41, 0, 7, 5, 9, 4], [2, 44, 90, 0, 12, 0, 0]]
        up.launcher.say(
            "a",
            Pulse(
                steps=70, running=2, waiting=1, measured={"cpu": 1}, parallel=3, prefill_rate=80.0, decode_rate=6.5,
                cache_used=110, cache_reusable=30, cache_total=600, slots=slots,
            ),
        )  # fmt: skip
        async with ClientSession(connector=UnixConnector(str(up.socket))) as client:

            async def get(path: str) -> Any:
                async with client.get(f"http://x{path}") as answer:
                    assert answer.status == 200
                    return await answer.json()

            beat = {
                "steps": 70, "running": 2, "waiting": 1, "parallel": 3, "prefill_tokens_per_second": 80.0,
                "decode_tokens_per_second": 6.5, "cache": {"used": 110, "reusable": 30, "total": 600},
            }  # fmt: skip
            [entry] = (await get("/models"))["data"]
            assert entry["status"]["pulse"] == beat
            assert (await get("/router/state"))["workers"][0]["pulse"] == beat
            reported = await get("/slots")
            assert [slot["is_processing"] for slot in reported] == [True, False, True]
            assert [slot["id_task"] for slot in reported] == [41, -1, 44]
            assert [slot["next_token"] for slot in reported] == [
                [{"has_next_token": True, "n_decoded": 7, "n_remain": 5}],
                [{"has_next_token": False, "n_decoded": 0, "n_remain": -1}],
                [{"has_next_token": True, "n_decoded": 0, "n_remain": 12}],
            ]  # fmt: skip
            assert [(slot["draft_n"], slot["draft_n_accepted"]) for slot in reported] == [(9, 4), (0, 0), (0, 0)]
            up.launcher.say("a", Pulse(steps=71, running=1, waiting=0, measured={"cpu": 1}))
            reported = await get("/slots")
            assert [slot["is_processing"] for slot in reported] == [True, False, False], (
                "an engine that does not report slots"
            )
            up.launcher.say("a", Pulse(steps=72, running=0, waiting=0, measured={"cpu": 1}, parallel=16))
            assert len(await get("/slots")) == 16, "the rows of its engine"


async def test_a_lost_worker_is_502_if_autoload_is_off(tmp_path: Path) -> None:
    async def die(upstream: Upstream) -> None:
        up.launcher.die("a")
        upstream.break_off()

    async with world(tmp_path, die, settings=Settings(models_autoload=False)) as up:
        await up.fleet.load("a")
        got = await ask(up, {})
        assert (got.status, got.reason) == (502, "worker_crashed")
        assert len(up.requests) == 1


# Clients


async def wait_for_the_end(upstream: Upstream) -> None:
    """Begin a stream if the request asks for one, and continue until the router disconnects."""
    if json.loads(upstream.body).get("stream"):
        await upstream.send(STREAM)
        with contextlib.suppress(ConnectionError):
            while not upstream.reader.at_eof():
                await upstream.send(chunk(WORDS[0]))
                await asyncio.sleep(0.01)
    await upstream.left()
    raise ConnectionError


def leave(writer: asyncio.StreamWriter, how: str) -> None:
    if how == "half-closes":
        writer.write_eof()
    elif how == "resets":
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
    else:
        writer.close()


@pytest.mark.parametrize(
    ("how", "size"), [("closes", 10), ("resets", 10), ("half-closes", 10), ("half-closes", 3_000_000)]
)
@pytest.mark.parametrize("phase", ["loading", "before the head", "streaming"])
async def test_a_client_that_disconnects_frees_its_worker(tmp_path: Path, phase: str, how: str, size: int) -> None:
    async with world(tmp_path, wait_for_the_end, load_seconds=0.5 if phase == "loading" else 0.0) as up:
        if phase != "loading":
            await up.fleet.load("a")
        reader, writer = await up.connect(request({"stream": phase == "streaming", "x": "x" * size}))
        await writer.drain()
        if phase == "streaming":
            await reader.readuntil(b"data:")
        if phase == "loading":
            await until(lambda: any(worker.leases and worker.state is State.STARTING for worker in up.fleet.workers()))
        if phase == "before the head":
            await until(lambda: bool(up.requests))
        leave(writer, how)
        await up.idle()
        for upstream in up.requests:
            await upstream.left()
        assert len(up.requests) == (phase != "loading")
        writer.close()

        assert up.count('router_requests_total{code="499",endpoint="chat",model="a"}') == 1
        counted = "starting" if phase == "loading" else "streaming"
        assert up.count(f'router_client_disconnects_total{{phase="{counted}"}}') == 1


async def test_a_client_that_closes_at_the_last_event_has_its_whole_answer(tmp_path: Path) -> None:
    """Codex does not wait for the end of the body."""

    async def without_end(upstream: Upstream) -> None:
        await upstream.send(STREAM + chunk(WORDS[0]) + chunk(DONE))
        await upstream.left()
        raise ConnectionError

    async with world(tmp_path, without_end) as up:
        reader, writer = await up.connect(request({"stream": True}))
        await reader.readuntil(DONE)
        writer.close()
        await up.idle()
        assert up.count('router_requests_total{code="200",endpoint="chat",model="a"}') == 1
        assert "router_client_disconnects_total{" not in up.metrics.render().decode()
        async with up.client() as client:
            ended = (await client.get("/router/requests")).json()["ended"]
        assert [each["status"] for each in ended] == [200]


async def test_a_request_that_waits_follows_its_model_to_a_new_name(tmp_path: Path) -> None:
    async with world(tmp_path, send_whole, load_seconds=0.5) as up:
        reader, _ = await up.connect(request({}))
        for old, new in ("ab", "bc"):
            await until(partial(up.launcher.journal.__contains__, f"start {old}"))
            up.launcher.models[new] = up.launcher.models["a"]
            renamed = {new: replace(up.registry.shared_workers.find("a").preset, id=new, aliases=("a",))}
            up.registry.shared_workers.apply(renamed, worker_groups.group_presets(renamed))
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"


async def test_a_model_that_its_last_request_unloads_is_not_listed_as_loaded(tmp_path: Path) -> None:
    """With Ollama's `keep_alive` 0. It exits after the next plan."""
    async with world(tmp_path, send_whole) as up, up.client() as client:
        with up.fleet.lease("a") as lease:
            await lease.ready()
            lease.worker.usage.keep_alive = 0.0
            assert len((await client.get("/api/ps")).json()["models"]) == 1
            lease.worker.leases.discard(lease)
            assert (await client.get("/api/ps")).json()["models"] == []


@pytest.mark.slow
async def test_a_client_that_does_not_read_the_end_of_a_response_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """This holds even if only the end of the response is still to be written. The log names the cause."""
    caplog.set_level("INFO", "router.http.proxy")

    async def much(upstream: Upstream) -> None:
        await upstream.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(upstream.fake):
                await upstream.send(chunk(b"x" * 10_000))
            await upstream.send(END)

    async with world(tmp_path, much, settings=Settings(write_stall=0.3)) as up:
        for count in range(100, 160):  # from what fits into buffers to what does not, in steps smaller than any
            await up.connect(request({"fake": count}), reads=False)
        await until(lambda: len(up.requests) == len(up.clients))
        await up.idle()
        assert "disconnected: the client read nothing for 0.3 s (--write-stall)" in caplog.text


@pytest.mark.slow
async def test_the_end_of_a_broken_stream_waits_for_its_reader_in_bounded_time(tmp_path: Path) -> None:
    """Request and connection end although the client does not read the rest of the buffer."""

    async def fill(upstream: Upstream) -> None:
        await upstream.send(STREAM)
        with contextlib.suppress(ConnectionError):
            for _ in range(upstream.fake):
                await upstream.send(chunk(b"data: " + b"x" * 3000 + b"\n\n"))
        upstream.break_off()

    async with world(tmp_path, fill, settings=Settings(write_stall=0.3)) as up:
        for count in range(20, 120, 4):  # from what fits into the kernel's buffer to what fits into none
            asked = request({"stream": True, "fake": count}, headers=b"Connection: close\r\n")
            await up.connect(asked, reads=False)
        await until(lambda: len(up.requests) == len(up.clients))
        await up.idle()
        await until(lambda: not connections(up))


async def test_a_client_that_does_not_read_responses_of_the_router_is_dropped(tmp_path: Path) -> None:
    async with world(tmp_path, send_whole, settings=Settings(write_stall=0.3)) as up:
        for path in ("/openapi.json", "/nothing"):
            await up.connect(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode() * 2000, reads=False)
        await until(lambda: not connections(up))


def connections(up: World) -> int:
    """The number of open connections at the router's own socket."""
    return sum(str(up.socket) in line for line in Path("/proc/net/unix").read_text().splitlines()) - 1


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/models/sse", "/router/events"])
async def test_an_event_client_that_does_not_read_is_dropped_and_blocks_nothing(tmp_path: Path, path: str) -> None:
    async with world(tmp_path, send_whole, settings=Settings(write_stall=0.3)) as up:
        reader, writer = await up.connect(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await reader.readuntil(b": open\n\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        asked = 0
        while connections(up):
            for _ in range(50):
                up.registry.events.append("state", "a", worker=1, state="stopped", reason="crashed", error="x" * 2000)
            assert (await ask(up, {})).status == 200
            asked += 1
        assert 1 < asked < 1000


async def test_a_disconnect_from_an_event_stream_has_a_phase_of_its_own(tmp_path: Path) -> None:
    async with world(tmp_path, send_whole) as up:
        reader, writer = await up.connect(b"GET /router/events HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b": open\n\n")
        writer.transport.abort()
        await until(lambda: up.count('router_client_disconnects_total{phase="events"}') == 1)


async def test_headers_that_are_not_printable_ascii_are_not_forwarded(tmp_path: Path) -> None:
    async with world(tmp_path, send_whole) as up:
        got = await ask(up, {}, headers=b"User-Agent: caf\xe9 \xff\r\ntraceparent: 00-ab-cd-01\r\nCookie: secret\r\n")
        assert (got.status, got.body) == (200, BODY)
        head = up.requests[0].head.lower()
        assert "traceparent: 00-ab-cd-01" in head
        assert "accept-encoding: identity" in head
        assert "user-agent" not in head
        assert "secret" not in head


async def test_many_requests_at_once_are_served_although_the_backlog_of_the_worker_is_short(tmp_path: Path) -> None:
    async with world(tmp_path, send_whole, load_seconds=0.3, backlog=4) as up:
        answers = await asyncio.gather(*(ask(up, {}) for _ in range(100)))
        assert {got.status for got in answers} == {200}
        assert len(up.requests) == 100
        assert up.launcher.journal == ["start a"]


@pytest.mark.parametrize("size", [100, 70_000, 5_000_000])
async def test_a_body_of_any_size_arrives_unchanged(tmp_path: Path, size: int) -> None:
    async with world(tmp_path, send_whole) as up:
        sent = request({"x": "y" * size})
        reader, _ = await up.connect(sent)
        assert b" 200 " in await reader.readline()
        assert up.requests[0].body == sent.partition(b"\r\n\r\n")[2]


async def test_a_stream_that_exceeds_the_drain_timeout_ends_with_draining(tmp_path: Path) -> None:
    async with world(tmp_path, wait_for_the_end, settings=Settings(drain_timeout=0.2)) as up:
        asked = asyncio.create_task(ask(up, {"stream": True}))
        plain = asyncio.create_task(ask(up, {}))
        await until(lambda: len(up.requests) == 2)
        (worker,) = up.fleet.unload("a")
        streamed, whole = await asked, await plain
        assert (streamed.status, streamed.reason, streamed.whole) == (200, "draining", False)
        assert up.count('router_requests_total{code="503",endpoint="chat",model="a"}') == 2
        assert (whole.status, whole.reason, whole.whole) == (503, "draining", True)
        await worker.stopped.wait()


async def test_the_wait_for_the_worker_counts_towards_the_request_timeout(tmp_path: Path) -> None:
    async with world(tmp_path, wait_for_the_end, keys={"request_timeout": 0.2}, load_seconds=0.3) as up:
        got = await ask(up, {})
        assert (got.status, got.reason) == (504, "request_timeout")
        await up.idle()
        assert up.requests == [], "no time was left when the worker was ready"
