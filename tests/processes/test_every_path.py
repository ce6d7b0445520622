"""Promises for every path of the route table, over a socket: HEAD, OPTIONS, methods, pages of other origins, and the
headers that are forwarded to a worker."""

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from router.config.api_keys import ApiKey, digest
from router.config.settings import Settings
from router.registry.auth import Access
from tests.processes.upstreams import BODY, PATH, World, request, respond, world
from worker.protocol.routes import ROUTES, Route

METHODS = {"GET", "POST", "PUT", "DELETE"}
OF_THE_MOMENT = {"state", "metrics", "requests"}
"""Their lengths tell of time and of the requests before."""
OPEN = {"/health", "/v1/health", "/ready", "/ping", "/", "/ui/page.css", "/ui/page.js"}
ADMINS = ("/router/", "/api/pull", "/api/delete", "/api/push", "/api/create", "/api/copy", "/api/blobs/")
SECRETS = (
    b"Authorization: Bearer hunter2\r\nX-Api-Key: hunter2\r\nProxy-Authorization: Basic hunter2\r\n"
    b"Cookie: session=hunter2\r\nX-Amz-Security-Token: hunter2\r\nReferer: http://x/hunter2\r\n"
    b"Connection: X-Hop\r\nX-Hop: hunter2\r\nKeep-Alive: hunter2\r\nTE: trailers, hunter2\r\nUpgrade: hunter2\r\n"
    b"X-Router-Profile: hunter2\r\nX-Router-Waited: hunter2\r\nAccept-Encoding: gzip, hunter2\r\n"
)


def is_endless(route: Route) -> bool:
    """The response is a stream of events that never ends."""
    return not route.worker and route.response is not None and not route.response.body and bool(route.response.frame)


def filled(route: Route) -> str:
    return re.sub(r"\{\w+\}", "a", route.path)


def by_path() -> dict[str, set[str]]:
    methods = defaultdict(set)
    for route in ROUTES:
        methods[filled(route)].add(route.method)
    return methods


@asynccontextmanager
async def asking(folder: Path) -> AsyncIterator[tuple[World, httpx.AsyncClient]]:
    async with world(folder, respond) as up, up.client() as client:
        yield up, client


async def test_head_is_get_without_its_body(tmp_path: Path) -> None:
    looks = [route for route in ROUTES if route.method == "GET"]
    assert len(looks) > 20
    async with asking(tmp_path) as (_, client):
        for route in looks:
            path = filled(route)
            head = await client.head(path)
            assert head.content == b"", path
            assert {"x-request-id", "request-id"} <= head.headers.keys(), path
            if is_endless(route):
                assert (head.status_code, head.headers["content-type"]) == (200, "text/event-stream"), path
                continue
            whole = await client.get(path)
            assert (head.status_code, head.headers["content-type"]) == (
                whole.status_code,
                whole.headers["content-type"],
            ), path
            if route.name not in OF_THE_MOMENT:
                assert int(head.headers["content-length"]) == len(whole.content), path


async def test_options_is_fine_everywhere_and_a_wrong_method_names_the_right_ones(tmp_path: Path) -> None:
    async with asking(tmp_path) as (up, client):
        for path, methods in by_path().items():
            assert (await client.options(path)).status_code == 200, path
            for method in METHODS - methods:
                answer = await client.request(method, path)
                if method == "GET" and path.startswith("/models/a/"):  # a model may be called so
                    assert answer.status_code == 404, path
                    continue
                stored = ("/v1/responses/", "/v1/chat/completions/")  # so may a response or a completion
                if method in {"GET", "DELETE"} and path.startswith(stored):
                    assert answer.status_code == 501, path
                    continue
                assert answer.status_code == 405, (method, path)
                allowed = set(answer.headers["allow"].split(", "))
                assert methods <= allowed, (method, path)
                assert method not in allowed, (method, path)
        assert up.requests == []


def plane(route: Route) -> str:
    """The access level of a route, as the documentation states it."""
    if route.path in OPEN:
        return "public"
    changes = route.method != "GET" and not route.path.endswith("/invoke")
    is_below = route.path.startswith(("/models", "/lmi", "/adapters"))
    return "admin" if (changes and is_below) or route.path.startswith(ADMINS) else "user"


async def test_every_call_wants_the_key_of_its_plane(tmp_path: Path) -> None:
    keys = [ApiKey(name=name, digest=digest(name), admin=name == "boss") for name in ("somebody", "boss")]
    async with asking(tmp_path) as (up, client):
        up.registry.access = Access(keys, Settings())
        up.registry.keys = lambda: tuple(keys)  # for the call that reads them anew
        for route in ROUTES:
            method = "HEAD" if is_endless(route) else route.method
            wanted = plane(route)
            for key, ranks in ((None, 0), ("nobody", 0), ("somebody", 1), ("boss", 2)):
                headers = {} if key is None else {"Authorization": f"Bearer {key}"}
                answer = await client.request(method, filled(route), headers=headers, content=b"{}")
                is_refused = answer.status_code in (401, 403) and b"feature_disabled" not in answer.content
                assert is_refused is (ranks < ["public", "user", "admin"].index(wanted)), (method, route.path, key)
                if is_refused:
                    assert answer.status_code == (403 if ranks else 401), (method, route.path, key)


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        ((), "http://localhost:3000", None),
        (("https://ui.example",), "https://ui.example", "https://ui.example"),
        (("https://ui.example",), "https://evil.example", None),
        (("localhost",), "http://127.0.0.1:5", "http://127.0.0.1:5"),
        (("localhost",), "https://localhost.evil.example", None),
        (("*",), "https://any.example", "*"),
    ],
)
async def test_a_preflight_is_200_and_a_foreign_origin_gets_no_cors_headers(
    origins: tuple[str, ...], origin: str, allowed: str | None, tmp_path: Path
) -> None:
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    async with asking(tmp_path) as (up, client):
        up.registry.access = Access((), Settings(cors_origins=origins))
        for path in (PATH, "/models/load", "/v1/messages", "/nothing"):
            answer = await client.options(path, headers=asked)
            told = {name: value for name, value in answer.headers.items() if name.startswith("access-control-")}
            assert (answer.status_code, answer.content) == (200, b"")
            assert told.get("access-control-allow-origin") == allowed
            assert "access-control-allow-credentials" not in told
            if allowed is None:
                assert told == {}
                continue
            assert "POST" in told["access-control-allow-methods"]
            assert told["access-control-allow-headers"] == "authorization, content-type"
        posted = await client.post(PATH, json={"model": "a"}, headers={"Origin": origin})
        assert posted.status_code == (403 if allowed is None else 200)
        assert posted.headers.get("access-control-allow-origin") == allowed


async def lines_of(client: httpx.AsyncClient, path: str, last: int | None, count: int) -> list[str]:
    """The first lines of a stream of events that are neither empty nor comments."""
    headers = {} if last is None else {"Last-Event-ID": str(last)}
    heard: list[str] = []
    async with asyncio.timeout(60), client.stream("GET", path, headers=headers) as stream:
        async for line in stream.aiter_lines():
            if line and not line.startswith(":"):
                heard.append(line)
            if len(heard) == count:
                break
    return heard


async def test_a_reconnected_event_client_gets_missed_events_or_a_snapshot(tmp_path: Path) -> None:
    async with asking(tmp_path) as (up, client):
        events = up.registry.events
        first = events.append("state", "a", state="queued").id
        for number in range(3):
            events.append("state", "a", state=f"s{number}")
        again = await lines_of(client, "/router/events", first, 9)
        assert again[::3] == [f"id: {first + 1 + number}" for number in range(3)]
        assert [f'"s{number}"' in line for number, line in enumerate(again[2::3])] == [True] * 3
        for last in (None, first + 1000, 10**17):
            told = await lines_of(client, "/router/events", last, 3)
            assert told[:2] == [f"id: {first + 3}", "event: snapshot"]
        for _ in range(1001):
            events.append("state", "a", state="more")
        assert (await lines_of(client, "/router/events", first, 2))[1] == "event: snapshot", "more than the ring has"
        assert "models_reload" in (await lines_of(client, "/models/sse", first, 2))[1]


@pytest.mark.parametrize("more", [b"", b"X-Odd: \xff\r\n"], ids=["plain", "odd"])
async def test_nothing_that_is_between_a_client_and_the_router_reaches_a_worker(more: bytes, tmp_path: Path) -> None:
    async with world(tmp_path, respond) as up:
        reader, writer = await up.connect(request({}, headers=SECRETS + more))
        async with asyncio.timeout(60):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert await reader.readexactly(len(BODY)) == BODY
        writer.close()
        assert head.startswith(b"http/1.1 200 ")
        assert b"content-encoding" not in head
        [asked] = up.requests
        assert "hunter2" not in asked.head
        assert "accept-encoding: identity" in asked.head.lower()
