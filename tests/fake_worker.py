"""A worker program without a model: it follows the real contract and misbehaves as it is configured.

Started in the worker's place (`python -P tests/fake_worker.py serve ...`). What it does wrong is said by `Behaviour`,
whose fields come, the later the stronger, from the model's name (`NAMED`), from `fake.json` in the snapshot folder, and
from the environment variable FAKE_WORKER (both JSON objects). A request may change the fields of `Answer` for itself,
with an object `fake` in its body. Its answers are a function of the request (`answer_pieces`, `stream_frames`,
`whole_answer`), so that a test can tell every byte. Standard library only; up in about 0.1 s.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # -P keeps the script's own surroundings out

from worker.program import fork_server, supervision
from worker.protocol import events
from worker.protocol.argv import Command, Convert, Download, Estimate, ForkServerOptions, Profile, Serve, from_argv
from worker.protocol.orders import decode_grant

MIB = 1 << 20
LONG_LINE = 2 * events.MAX_EVENT_BYTES
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a request. Seconds are real ones; a code below 0 is a signal, as in subprocess."""

    delay: float = 0.0
    """Seconds before each piece."""
    status: int = 200
    """Other than 200: an error object with this status."""
    hang_after: int = -1
    """Stops after that many pieces without an end, and takes no step."""
    die_after: int = -1
    """Exits after that many pieces; 0: before the first byte of the answer."""
    die_code: int = 1
    hold: str = ""
    """Path; before the first piece it waits until this file exists."""
    garbage: bool = False
    """Answers something that is not HTTP."""


@dataclass(frozen=True, kw_only=True)
class Behaviour(Answer):
    """The faults of this program."""

    journal: str = ""
    """Path of a file or FIFO to which a line is appended for each thing that happens: `started PID`, `grandchild PID`,
    `prepared`, `told to go`, `ready`, `profile NAME SAMPLING`, `request ID PATH`, perhaps with `under PROFILE`,
    `done ID`, `cancelled ID`, `stopped`."""
    environ_file: str = ""
    """Path to which its environment is written as JSON."""
    argv_file: str = ""
    message: str = ""
    """The cause in a `failed` event before it exits at its start; empty: none."""
    last_words: str = ""
    """Written to stderr at its start."""
    die_at_start: int | None = None
    deaf: bool = False
    """Never becomes ready and sends no event."""
    load_steps: int = 0
    """Progress events while it loads."""
    load_interval: float = 0.02
    stuck_progress: bool = False
    """Sends the same progress again and again, and never becomes ready."""
    hold_load: str = ""
    """Path; it is not ready before this file exists."""
    noise: bool = False
    """Writes to its event pipe: no JSON, an unknown event, a line that is too long, a foreign ready; later a second."""
    prepared_mib: int = 0
    """Bytes that it reports once it is prepared; 0: its resident set."""
    measured: dict[str, int] = field(default_factory=dict)
    """Bytes that it reports as measured; empty: its resident set on `cpu`, its reservation elsewhere."""
    grandchild: str = ""
    """`group` or `session`: starts a process that ignores SIGTERM, in its own or in another session."""
    pulse_interval: float = 1.0
    silent: bool = False
    """Sends no pulse once it is ready."""
    freezes: bool = False
    """Stops itself (SIGSTOP) once it is ready."""
    ignore_sigterm: bool = False
    stop_seconds: float = 0.0
    health: int = 200
    wrong_address: bool = False
    """Does not listen at the address that it reports."""
    snapshot: str = ""
    """The answer of `download`; empty: a folder that it makes."""
    estimated: dict[str, Any] = field(default_factory=dict)
    """Fields of its `estimated` event; by default 64 MiB of weights on each device."""


NAMED: Mapping[str, Mapping[str, Any]] = {
    "dies-at-start": {"die_at_start": 1, "last_words": "fake: told to die at start"},
    "unusable": {"die_at_start": events.Exit.UNUSABLE, "message": "config.json names no architecture"},
    "deaf": {"deaf": True},
    "ignores-sigterm": {"ignore_sigterm": True},
    "dies-mid-stream": {"die_after": 3, "die_code": -signal.SIGKILL},
    "noisy": {"noise": True},
}
"""Behaviour by the model's name, up to its last `@` if it has one: `deaf`, `deaf@2`."""


def behaviour(command: Command, environ: Mapping[str, str]) -> Behaviour:
    """Raises TypeError if a field is unknown."""
    name = getattr(command, "name", "") or getattr(command, "repo", "")
    told: dict[str, Any] = dict(NAMED.get(name.partition("@")[0], {}))
    file = Path(getattr(command, "snapshot", "")) / "fake.json"
    if file.is_file():
        told |= json.loads(file.read_text())
    told |= json.loads(environ.get("FAKE_WORKER", "{}"))
    return Behaviour(**told)


# Answers


def answer_pieces(request: Mapping[str, Any]) -> list[str]:
    """Echoes the prompt word by word: `max_tokens` pieces, from the start again when the prompt is used up."""
    messages = request.get("messages")
    prompt = messages[-1].get("content", "") if messages else request.get("prompt", "")
    words = [word + " " for word in str(prompt).split()] or ["nothing "]
    count = request.get("max_completion_tokens") or request.get("max_tokens") or len(words)
    return [words[at % len(words)] for at in range(count)]


def stream_frames(path: str, request: Mapping[str, Any], *, model: str, id: str) -> list[bytes]:
    """The server-sent events of a streamed answer, without the final DONE."""
    pieces = answer_pieces(request)
    ends: list[str | None] = [None] * (len(pieces) - 1) + ["stop"]
    return [_frame(path, piece, end, model=model, id=id) for piece, end in zip(pieces, ends, strict=True)]


def _frame(path: str, piece: str, end: str | None, *, model: str, id: str) -> bytes:
    chat = path.endswith("/chat/completions")
    text = {"delta": {"role": "assistant", "content": piece}} if chat else {"text": piece}
    kind = "chat.completion.chunk" if chat else "text_completion"
    choice = {"index": 0, **text, "finish_reason": end}
    return b"data: " + _json({"id": id, "object": kind, "created": 0, "model": model, "choices": [choice]}) + b"\n\n"


def whole_answer(path: str, request: Mapping[str, Any], *, model: str, id: str) -> bytes:
    """The JSON body of an answer in one piece."""
    if path.endswith("/tokenize"):
        return _json({"tokens": list(str(request.get("content", "")).encode())})
    pieces = answer_pieces(request)
    chat = path.endswith("/chat/completions")
    text = "".join(pieces)
    part = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    usage = {"prompt_tokens": 1, "completion_tokens": len(pieces), "total_tokens": 1 + len(pieces)}
    kind = "chat.completion" if chat else "text_completion"
    choices = [{"index": 0, **part, "finish_reason": "stop"}]
    return _json({"id": id, "object": kind, "created": 0, "model": model, "choices": choices, "usage": usage})


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


# The program


class FakeWorker:
    """One run of this program."""

    def __init__(self, command: Command, tied: supervision.RouterChannel, wrong: Behaviour, raw: int):
        """`raw`: descriptor of the event pipe, for noise."""
        self.command = command
        self.tied = tied
        self.wrong = wrong
        self.raw = raw
        self.steps = 0
        self.running = 0
        self.hanging = 0

    def note(self, line: str) -> None:
        if self.wrong.journal:
            journal = os.open(self.wrong.journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(journal, line.encode() + b"\n")
            os.close(journal)

    def begin(self) -> None:
        """The first actions of every verb."""
        wrong = self.wrong
        self.note(f"started {os.getpid()}")
        if wrong.environ_file:
            Path(wrong.environ_file).write_text(json.dumps(dict(os.environ)))
        if wrong.argv_file:
            Path(wrong.argv_file).write_text(json.dumps(sys.argv))
        if wrong.ignore_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if wrong.grandchild:
            self._start_grandchild()
        if wrong.last_words:
            print(wrong.last_words, file=sys.stderr, flush=True)
        if wrong.noise:
            self._make_noise()
        if wrong.die_at_start is not None:
            if wrong.message:
                self.tied.send(events.Failed(message=wrong.message))
            die(wrong.die_at_start)
        if wrong.deaf:
            sleep_for_ever()

    def _start_grandchild(self) -> None:
        code = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code],
            stdout=subprocess.PIPE,
            start_new_session=self.wrong.grandchild == "session",
        )
        assert child.stdout is not None
        child.stdout.readline()
        self.note(f"grandchild {child.pid}")

    def _make_noise(self) -> None:
        foreign = events.Ready(address="unix:/somewhere/else.sock", measured={})
        lines = (b"Loading checkpoint shards: 100%", b'{"event":"unheard_of"}', b"\xff\xfe", b"[1,2]", b"null")
        for line in (*lines, b"x" * LONG_LINE, events.encode(foreign).strip()):
            self._write_raw(line + b"\n")

    def _write_raw(self, data: bytes) -> None:
        os.set_blocking(self.raw, True)
        while data:
            data = data[os.write(self.raw, data) :]
        os.set_blocking(self.raw, self.tied.supervised is False)

    def load(self) -> None:
        """Return once the load is complete, if it ever is."""
        wrong = self.wrong
        total = max(1, wrong.load_steps)
        for step in range(wrong.load_steps):
            self.tied.send(events.Progress(stage="weights", done=step, total=total))
            time.sleep(wrong.load_interval)
        while wrong.stuck_progress:
            self.tied.send(events.Progress(stage="weights", done=0, total=total))
            time.sleep(wrong.load_interval)
        while wrong.hold_load and not os.path.exists(wrong.hold_load):
            time.sleep(0.005)

    def measured(self) -> dict[str, int]:
        """The bytes by device name that it reports."""
        assert isinstance(self.command, Serve)
        if self.wrong.measured:
            return self.wrong.measured
        resident = _resident()
        reserved = json.loads(self.command.reserved or "{}")
        return {name: resident if name == "cpu" else reserved.get(name, 0) for name in self.command.devices}

    # Verbs

    def download(self, command: Download) -> None:
        wrong = self.wrong
        self.load()
        folder = wrong.snapshot
        if not folder:
            name = (command.repo or command.demo).replace("/", "--")
            folder = str(Path(command.cache or command.target or os.environ.get("TMPDIR", "/tmp")) / name)
            Path(folder).mkdir(parents=True, exist_ok=True)
        self.tied.send(events.Downloaded(snapshot=folder))

    def estimate(self, command: Estimate) -> None:
        self.load()
        zeros = [0] * len(command.devices)
        default = {"weights": [64 * MIB for _ in zeros], "context": zeros, "compute": zeros, "runtime": zeros}
        self.tied.send(events.Estimated(**(default | self.wrong.estimated)))

    def prepare(self, command: Serve) -> Serve:
        """Return once it may load."""
        if not command.prepare:
            return command
        self.note("prepared")
        self.tied.send(events.Prepared(measured={"cpu": self.wrong.prepared_mib * MIB or _resident()}))
        go = decode_grant(self.tied.receive_line())
        os.environ["CUDA_VISIBLE_DEVICES"] = go.visible
        self.note("told to go")
        self.command = dataclasses.replace(command, devices=tuple(go.devices), reserved=go.reserved)
        return self.command

    async def serve(self, command: Serve) -> None:
        """Return once it is asked to stop."""
        self.load()
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        if not self.wrong.ignore_sigterm:
            loop.add_signal_handler(signal.SIGTERM, stop.set)
        address, server = await self._listen(command)
        ready = events.Ready(
            address=address, measured=self.measured(), capabilities=["chat", "completion", "embedding"], n_ctx=8192
        )
        self.note("ready")
        self.tied.send(ready)
        if self.wrong.noise:
            self.tied.send(dataclasses.replace(ready, n_ctx=1))
        if self.wrong.freezes:
            loop.call_later(0.05, os.kill, os.getpid(), signal.SIGSTOP)
        pulse = asyncio.create_task(self._pulse())
        await stop.wait()
        pulse.cancel()
        server.close()
        await asyncio.sleep(self.wrong.stop_seconds)
        self.note("stopped")

    async def _listen(self, command: Serve) -> tuple[str, asyncio.Server]:
        kind, _, where = command.listen.partition(":")
        if kind == "unix":
            path = f"\0fake-{os.getpid()}" if self.wrong.wrong_address else where  # a leading 0: no file at all
            return command.listen, await asyncio.start_unix_server(self._connection, path)
        host, _, port = where.rpartition(":")
        server = await asyncio.start_server(self._connection, host, int(port))
        return f"tcp:{host}:{server.sockets[0].getsockname()[1]}", server

    async def _pulse(self) -> None:
        while not self.wrong.silent:
            if not self.hanging:
                self.steps += self.running
            pulse = events.Pulse(steps=self.steps, running=self.running, waiting=0, measured=self.measured())
            self.tied.send(pulse)
            await asyncio.sleep(self.wrong.pulse_interval)

    # HTTP

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._request(reader, writer):
                pass
        writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Read one request and answer it; False if the connection is over."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = target.partition("?")[0]
        if self.tied.token and headers.get("authorization") != f"Bearer {self.tied.token}":
            _send(writer, 401, b'{"error":{"code":401,"reason":"invalid_api_key"}}')
            return True
        if method == "GET":
            self._get(writer, path)
            return True
        if path == "/internal/profiles":
            self._take_profile(writer, body)
            return True
        return await self._post(reader, writer, path, body, headers)

    def _get(self, writer: asyncio.StreamWriter, path: str) -> None:
        if path == "/health":
            _send(writer, self.wrong.health, b'{"status":"ok"}')
        elif path == "/fake/environ":
            _send(writer, 200, _json(dict(os.environ)))
        else:
            _send(writer, 404, b'{"error":{"code":404,"reason":"not_found"}}')

    def _take_profile(self, writer: asyncio.StreamWriter, body: bytes) -> None:
        profile = Profile(**json.loads(body))
        if "broken" in profile.chat_template:
            _send(writer, 400, b'{"error":{"code":400,"message":"chat-template: it is broken"}}')
            return
        self.note(f"profile {profile.name} {profile.sampling}")
        _send(writer, 200, b"{}")

    async def _post(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
    ) -> bool:
        request = json.loads(body)
        told = request.get("fake", {})
        mine = {part.name: getattr(self.wrong, part.name) for part in dataclasses.fields(Answer)}
        id = headers.get("x-request-id", "unnamed")
        under = headers.get("x-router-profile", "")
        self.note(f"request {id} {path}" + (f" under {under}" if under else ""))
        self.running += 1
        work = asyncio.ensure_future(
            self._answer(writer, path, request, Answer(**(mine | told)), id, under or self._name)
        )
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            complete = work.done() and work.exception() is None
        finally:
            self.running -= 1
            work.cancel()
            gone.cancel()
            await asyncio.wait({work, gone})
        self.note(f"{'done' if complete else 'cancelled'} {id}")
        outcome = "ok" if complete else "cancelled"
        self.tied.send(events.RequestEnded(id=id, completion_tokens=len(answer_pieces(request)), outcome=outcome))
        return complete

    async def _answer(
        self, writer: asyncio.StreamWriter, path: str, request: Mapping[str, Any], how: Answer, id: str, name: str
    ) -> None:
        while how.hold and not os.path.exists(how.hold):  # noqa: ASYNC110, ASYNC240  (a test says when)
            await asyncio.sleep(0.005)
        if how.garbage:
            writer.write(b"SMTP 220 not the protocol that you expect\r\n\r\n")
            raise ConnectionError
        if how.status != 200:
            _send(
                writer, how.status, _json({"error": {"code": how.status, "message": "as told", "reason": "internal"}})
            )
        elif request.get("stream"):
            await self._stream(writer, stream_frames(path, request, model=name, id=id), how)
        else:
            for piece in range(len(answer_pieces(request))):
                await self._step(piece, how)
            _send(writer, 200, whole_answer(path, request, model=name, id=id))
        await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter, frames: list[bytes], how: Answer) -> None:
        if how.die_after == 0:
            die(how.die_code)
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for piece, frame in enumerate(frames):
            await self._step(piece, how)
            writer.write(_chunk(frame))
            await writer.drain()
        writer.write(_chunk(DONE) + b"0\r\n\r\n")

    async def _step(self, piece: int, how: Answer) -> None:
        """Wait before one piece, or exit there."""
        if piece == how.die_after:
            die(how.die_code)
        if piece == how.hang_after:
            self.hanging += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.hanging -= 1
        await asyncio.sleep(how.delay)
        self.steps += 1

    @property
    def _name(self) -> str:
        return getattr(self.command, "name", "")


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _send(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    head = f"HTTP/1.1 {status} Fake\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def die(code: int) -> None:
    """Exit at once without cleaning up; a code below 0 is a signal."""
    if code >= 0:
        os._exit(code)
    os.kill(os.getpid(), -code)
    sleep_for_ever()


def sleep_for_ever() -> None:
    while True:
        time.sleep(3600)


def forked(argv: list[str]) -> NoReturn:
    """The work of a child of its fork server."""
    main(argv)
    os._exit(0)


def main(argv: list[str]) -> None:
    command = from_argv(argv)
    if isinstance(command, ForkServerOptions):
        os._exit(fork_server.serve(command, forked, modules=()))
    raw = os.dup(1)
    tied = supervision.attach(supervised=command.supervised, parent_pid=command.parent_pid)
    worker = FakeWorker(command, tied, behaviour(command, os.environ), raw)
    worker.begin()
    if isinstance(command, Download):
        worker.download(command)
    elif isinstance(command, Estimate):
        worker.estimate(command)
    elif isinstance(command, Convert):
        worker.load()
        tied.send(events.Converted(weights=0))
    else:
        asyncio.run(worker.serve(worker.prepare(command)))


if __name__ == "__main__":
    main(sys.argv[1:])
