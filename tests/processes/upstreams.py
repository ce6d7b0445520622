"""The HTTP side of a router in this process, over a worker whose every byte a test decides, with real sockets."""

import asyncio
import contextlib
import json
import socket as unix_socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

import httpx
from aiohttp import web

from router.api.metrics import Metrics
from router.config.presets import Preset
from router.config.resolve import LoadedPresets
from router.config.settings import Settings
from router.events import EventLog
from router.fleet.fleet import Fleet
from router.http.app import App
from router.http.listener import Listener
from router.http.proxy import Proxy
from router.launch.interface import Listen, Program, WorkerProcess
from router.launch.worker_client import WorkerClient
from router.memory.learned import LearnedEstimates
from router.planner.ledger import Bytes, Ledger
from router.registry import worker_groups
from router.registry.auth import Access
from router.registry.registry import Registry
from router.registry.shared_workers import SharedWorkers
from tests.fakes import GIB, FakeLauncher, FakeModel, FakeWorker
from tests.router.fleet.worlds import FakeFiles
from worker.protocol.argv import Serve

PATH = "/v1/chat/completions"
DEADLINE = 60.0


class Upstream:
    """One request as the worker received it, and its connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: str, body: bytes):
        self.reader = reader
        self.writer = writer
        self.head = head
        self.body = body
        self._end: asyncio.Task[bytes] | None = None

    @property
    def fake(self) -> Any:
        """The value of the request's member `fake`, which instructs the fake worker."""
        return json.loads(self.body).get("fake")

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def break_off(self) -> NoReturn:
        """End this connection in the middle of the response."""
        self.writer.close()
        raise ConnectionError

    async def left(self) -> None:
        """Wait until the router has closed this connection."""
        self._end = self._end or asyncio.ensure_future(self.reader.read())
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(DEADLINE):
                await asyncio.shield(self._end)


Answering = Callable[[Upstream], Awaitable[None]]
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class SocketWorker:
    """A fake worker with a socket. Everything else is the fake worker's."""

    def __init__(self, worker: FakeWorker, worker_client: WorkerClient):
        self._worker = worker
        self.worker_client = worker_client

    async def unreachable(self) -> None:
        await self.worker_client.unreachable.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)


class SocketLauncher(FakeLauncher):
    """A machine without programs. All workers answer on one socket."""

    def __init__(self, socket: Path, models: Mapping[str, FakeModel]):
        super().__init__(models=models)
        self._socket = socket

    @asynccontextmanager
    async def serve(  # type: ignore[override]  # yields a worker that has a client
        self, program: Program, command: Serve, place: Bytes, listen: Listen
    ) -> AsyncIterator[WorkerProcess]:
        async with FakeLauncher.serve(self, program, command, place, listen) as worker:
            worker_client = WorkerClient(f"unix:{self._socket}")
            try:
                yield cast("WorkerProcess", SocketWorker(worker, worker_client))
            finally:
                worker_client.close()


class World:
    """The parts of the router that a test sees."""

    def __init__(self, registry: Registry, fleet: Fleet, launcher: SocketLauncher, metrics: Metrics, socket: Path):
        self.registry = registry
        self.fleet = fleet
        self.launcher = launcher
        self.metrics = metrics
        self.socket = socket
        self.app: App
        self.listener: Listener
        self.requests: list[Upstream] = []  # those that the worker received
        self.errors: list[Mapping[str, Any]] = []  # from the loop's exception handler
        self.clients: list[asyncio.StreamWriter] = []

    async def connect(self, data: bytes = b"", *, reads: bool = True) -> Connection:
        """A client that has sent `data`. It is disconnected at the end of the world, if not before."""
        reader, writer = await asyncio.open_unix_connection(str(self.socket), limit=1 << 24)
        self.clients.append(writer)
        if not reads:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(data)
        return reader, writer

    def client(self, **headers: str) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(uds=str(self.socket))
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers, timeout=DEADLINE)

    async def idle(self) -> None:
        """Wait until no request holds a worker."""
        async with asyncio.timeout(DEADLINE):
            for worker in self.fleet.workers():
                while worker.leases:
                    worker.leases_changed.clear()
                    await worker.leases_changed.wait()

    def count(self, sample: str) -> float:
        """The value of one line of the metrics."""
        for line in self.metrics.render().decode().splitlines():
            if line.startswith(f"{sample} "):
                return float(line.rpartition(" ")[2])
        return 0.0


@asynccontextmanager
async def world(
    folder: Path,
    answer: Answering,
    *,
    keys: Mapping[str, Any] | None = None,
    settings: Settings | None = None,
    load_seconds: float = 0.0,
    backlog: int = 2048,
    clients: int | None = None,
    twin: str = "",
    **further: int,
) -> AsyncIterator[World]:
    """A router with one model, `a`, on a unix socket; each request to its worker is answered by `answer`.

    `backlog`: connections that may wait for the worker; `clients`: that may be connected at once; `twin`: another name
    for the model, which shares its worker; `further`: arguments of the App.
    """
    loop = asyncio.get_running_loop()
    upstream_socket, socket = folder / "up.sock", folder / "down.sock"
    names = ["a", twin] if twin else ["a"]
    presets = {name: Preset(id=name, path="/snapshots/a", required_memory={"": GIB}, **(keys or {})) for name in names}
    model = worker_groups.group_id(names)
    launcher = SocketLauncher(upstream_socket, {model: FakeModel(shards=(GIB,), load_seconds=load_seconds)})
    events, files, settings = EventLog(), FakeFiles(), settings or Settings()
    fleet = Fleet(
        launcher=launcher,
        learned_estimates=LearnedEstimates(folder / "estimates.json"),
        events=events,
        files=files,
        ledger=Ledger(),
        settings=settings,
        presets=worker_groups.fleet_presets(presets, worker_groups.group_presets(presets)),
    )
    launcher.on_reading = fleet.scheduler.plan_soon
    metrics = Metrics(fleet, events)
    shared_workers = SharedWorkers(fleet, presets)
    registry = Registry(
        settings=settings,
        fleet=fleet,
        launcher=launcher,
        files=files,
        events=events,
        access=Access((), settings),
        load=lambda further: LoadedPresets(presets),
        keys=tuple,
        shared_workers=shared_workers,
    )
    made = World(registry, fleet, launcher, metrics, socket)
    loop.set_exception_handler(lambda _, context: made.errors.append(context))
    app = App(registry, Proxy(shared_workers), metrics, **further)
    made.app = app
    runner = web.AppRunner(app.build(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    server = await asyncio.start_unix_server(
        _serve_connection(made, answer), upstream_socket, limit=1 << 24, backlog=backlog
    )
    await runner.setup()
    made.listener = listener = app.listener(runner, most=clients)
    sock = unix_socket.socket(unix_socket.AF_UNIX)
    sock.bind(str(socket))
    listener.listen(sock, backlog=2048)
    try:
        yield made
    finally:
        for writer in made.clients:
            writer.transport.abort()
        await fleet.close(force=True)
        await listener.close(1.0)
        await runner.cleanup()
        server.close()
    assert made.errors == []
    assert all(not worker.leases for worker in fleet.workers())


def _serve_connection(
    made: World, answer: Answering
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                length = next(line for line in head.split("\r\n") if line.lower().startswith("content-length:"))
                body = await reader.readexactly(int(length.split(":")[1]))
                made.requests.append(Upstream(reader, writer, head, body))
                await answer(made.requests[-1])
        writer.close()

    return connection


async def until(fact: Callable[[], bool]) -> None:
    """Wait until `fact` is true, where no event reports it."""
    async with asyncio.timeout(DEADLINE):
        while not fact():  # noqa: ASYNC110
            await asyncio.sleep(0)


def request(body: Mapping[str, Any], *, version: str = "1.1", headers: bytes = b"") -> bytes:
    """The bytes of a chat request."""
    data = json.dumps({"model": "a", "messages": [], **body}).encode()
    head = f"POST {PATH} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + headers + b"\r\n" + data


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"
BODY = b'{"choices":[]}'
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
STREAMED = STREAM + chunk(EVENT) + chunk(EVENT + DONE) + END


async def unasked(upstream: Upstream) -> None:
    """A worker that never receives a request."""
    raise AssertionError


@asynccontextmanager
async def dying(folder: Path, first: bytes, headers: bytes = STREAM) -> AsyncIterator[tuple[World, asyncio.Event]]:
    """A router whose worker sends `first` and dies once the event is set."""

    async def die(upstream: Upstream) -> None:
        await upstream.send(headers + chunk(first))
        await seen.wait()
        up.launcher.die("a")
        upstream.break_off()

    seen = asyncio.Event()
    async with world(folder, die) as up:
        try:
            yield up, seen
        finally:
            seen.set()


async def respond(upstream: Upstream) -> None:
    """Answer with `fake` bytes; without `fake`, with a short body, or a stream if the request asks for one."""
    if upstream.fake is not None:
        data = b"x" * upstream.fake
        await upstream.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
        return
    await upstream.send(STREAMED if b'"stream": true' in upstream.body else WHOLE)
