"""The worker's HTTP server: authentication, addresses, errors, request events, shutdown."""

import asyncio
import itertools
import json
import logging
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.worker import serving as worlds
from tests.worker.fake_engine import DECODE, PREFILL, FakeEngine
from tests.worker.serving import TOKEN, Serving, chat, serving
from worker.errors import StartError, Unauthorized
from worker.protocol.dialects import Dialect
from worker.protocol.errors import error_body
from worker.protocol.events import Exit
from worker.protocol.routes import DIALECTS, ROUTES
from worker.server.server import Server

CHAT = "/v1/chat/completions"
PATHS = [("GET", "/health"), *((route.method, route.path) for route in ROUTES if route.worker and not route.upstream)]


def make(listen: str, token: str | None = TOKEN, **settings: Any) -> Server:
    engine = FakeEngine(worlds.tokenizer())
    options = worlds.options(listen=listen, **settings)
    return Server(engine, engine.tokenizer, options, token=token, announce=lambda event: None)


# Authentication

UNAUTHORIZED = {
    "code": 401, "message": "Invalid API Key", "type": "authentication_error", "param": None,
    "reason": "invalid_api_key",
}  # fmt: skip


async def test_a_request_without_the_token_is_401() -> None:
    wrong = (None, "", "Bearer", "Bearer ", "Bearer wrong", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \xff")
    async with serving(bearer=None) as world:
        for (method, path), given in itertools.product(PATHS, wrong):
            headers = {} if given is None else {"Authorization": given}
            async with world.client.request(method, world.url + path, data=b"{}", headers=headers) as answer:
                body, id = json.loads((await answer.read()).rstrip(b"\0")), answer.headers["X-Request-Id"]
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer"), (path, given)
            dialect = DIALECTS.get(path, Dialect.OPENAI)
            assert body == error_body(dialect, Unauthorized("Invalid API Key"), request_id=id)
            if dialect in (Dialect.OPENAI, Dialect.LLAMA_SERVER):  # once literally, without the code under test
                assert body == {"error": UNAUTHORIZED}
        assert world.engine.journal == []
        assert world.events == []


async def test_health_is_reported_and_is_no_request() -> None:
    async with serving() as world, world.client.get(world.url + "/health") as answer:
        assert (answer.status, await answer.json()) == (200, {"status": "ok"})
        assert world.events == []


async def test_without_a_token_any_client_on_this_machine_is_served() -> None:
    async with serving(token=None, bearer=None) as world:
        assert (await world.post("/tokenize", {"content": "hi"}))[0] == 200


# Addresses


@pytest.mark.parametrize(
    ("listen", "token", "bound"),
    [
        ("tcp:127.0.0.1:0", None, "127.0.0.1"),
        ("tcp:localhost:0", None, "127.0.0.1"),
        ("tcp:0.0.0.0:0", TOKEN, "0.0.0.0"),  # only with a token
    ],
)
async def test_the_bound_address_is_returned(listen: str, token: str | None, bound: str) -> None:
    server = make(listen, token=token)
    kind, host, port = (await server.start()).split(":")
    assert (kind, host) == ("tcp", bound)
    assert int(port) > 0
    await server.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "example.test", "10.0.0.1", "[::]"])
async def test_without_a_token_only_loopback_is_served(host: str) -> None:
    with pytest.raises(StartError, match="loopback") as caught:
        await make(f"tcp:{host}:0", token=None).start()
    assert caught.value.exit == Exit.USAGE


@pytest.mark.parametrize(
    "listen",
    ["", "tcp", "tcp:", "tcp:127.0.0.1", "tcp:127.0.0.1:x", "tcp:127.0.0.1:70000", "tcp::80", "unix:", "http://x"],
)
async def test_an_invalid_address_stops_the_start(listen: str) -> None:
    with pytest.raises(StartError, match="--listen") as caught:
        await make(listen).start()
    assert caught.value.exit == Exit.USAGE


async def test_a_port_in_use_stops_the_start_and_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"127.0.0.1:{port}: Address already in use"):
            await make(f"tcp:127.0.0.1:{port}").start()


async def test_a_unix_socket_is_private_and_removed_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    async with serving(listen=f"unix:{path}") as world:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (await world.post("/tokenize", {"content": "hi"}))[0] == 200
    assert not path.exists()


async def test_the_folder_of_the_socket_is_created_if_it_was_deleted(tmp_path: Path) -> None:
    path = tmp_path / "run" / "a.sock"
    async with serving(listen=f"unix:{path}") as world:
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert (await world.post("/tokenize", {"content": "hi"}))[0] == 200


async def test_a_socket_path_beyond_the_kernels_limit_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="107 bytes"):
        await make(f"unix:{tmp_path / ('x' * 107)}").start()


@pytest.mark.parametrize(("text", "temperature"), [('{"temperature": 0.25, "do_sample": true}', 0.25), ("{", 1.0)])
async def test_sampling_defaults_come_from_the_checkpoint_unless_the_file_is_damaged(
    tmp_path: Path, text: str, temperature: float
) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    async with serving(snapshot=str(tmp_path)) as world:
        assert (await world.post(CHAT, chat("hi", max_tokens=1)))[0] == 200
        assert world.engine.requests[0].sampling.temperature == temperature


# Errors


async def raw(world: Serving, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any, Any]:
    async with world.client.request(method, world.url + path, data=body, headers=headers) as answer:
        return answer.status, answer.headers, json.loads(await answer.read())


ERRORS: list[tuple[str, str, Any, int, str, str, str | None]] = [
    ("POST", "/v1/nothing", {}, 404, "not_found_error", "not_found", None),
    ("GET", CHAT, None, 405, "not_found_error", "method", None),
    ("POST", CHAT, b"{", 400, "invalid_request_error", "invalid_json", None),
    ("POST", "/chat/completions", {}, 400, "invalid_request_error", "invalid_value", "messages"),
    ("POST", CHAT, chat("hi", mirostat=2), 400, "invalid_request_error", "unsupported_parameter", "mirostat"),
    ("POST", CHAT, chat("fail"), 500, "server_error", "internal", None),
    ("POST", CHAT, chat("break"), 500, "server_error", "internal", None),
    ("POST", CHAT, chat("full"), 429, "rate_limit_error", "queue_full", None),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body", "status", "type", "reason", "param"), ERRORS)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_error_is_one_json_object_with_the_same_members(
    method: str, path: str, body: Any, status: int, type: str, reason: str, param: str | None, stream: bool
) -> None:
    if isinstance(body, dict) and stream:
        body = {**body, "stream": True}
    async with serving() as world:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        got, headers, answer = await raw(world, method, path, data, **{"X-Request-Id": "r-1"})
        assert got == status
        assert headers["Content-Type"].partition(";")[0] == "application/json"
        assert headers["X-Should-Retry"] == ("true" if status == 429 else "false")
        assert ("Retry-After" in headers) == (status == 429)
        assert headers.get("Allow") == ("POST" if status == 405 else None)
        assert headers["X-Request-Id"] == "r-1"
        assert list(answer) == ["error"]
        error = answer["error"]
        assert set(error) == {"code", "message", "type", "param", "reason"}
        assert (error["code"], error["type"], error["reason"], error["param"]) == (status, type, reason, param)
        assert isinstance(error["message"], str)
        assert error["message"]


@pytest.mark.parametrize(("waiting", "seconds"), [(0, "1"), (40, "11"), (4000, "60")])
async def test_a_full_queue_states_when_to_retry(waiting: int, seconds: str) -> None:
    async with serving(FakeEngine(worlds.tokenizer(), waiting=waiting), parallel=4) as world:
        status, headers, _ = await world.post(CHAT, chat("full"))
        assert (status, headers["Retry-After"]) == (429, seconds)


async def test_an_unexpected_error_hides_its_message_and_the_log_hides_the_prompt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as world:
        with caplog.at_level(logging.DEBUG):
            status, _, body = await world.post(CHAT, chat("break hunter2"), **{"X-Request-Id": "r-7"})
        assert status == 500
        assert "hunter2" not in json.dumps(body)
        assert "Traceback" not in json.dumps(body)
        assert "r-7" in caplog.text
        assert "ValueError" in caplog.text
        assert "fake_engine.py" in caplog.text
        assert "hunter2" not in caplog.text
        assert (await world.post(CHAT, chat("hi")))[0] == 200


async def test_a_compressed_body_is_rejected() -> None:
    async with serving() as world:
        status, _, body = await raw(world, "POST", "/tokenize", b"\x1f\x8b", **{"Content-Encoding": "gzip"})
        assert (status, body["error"]["reason"]) == (415, "encoding")


async def test_a_body_needs_no_content_type() -> None:
    async with serving() as world:
        status, _, body = await raw(world, "POST", "/detokenize", b'{"tokens": [40]}', **{"Content-Type": "text/plain"})
        assert (status, body) == (200, {"content": "G", "prompt": "G"})


async def test_ignored_fields_are_listed_in_a_header_percent_encoded() -> None:
    async with serving() as world:
        body = chat("hi", max_tokens=1, wibble=1, **{"a\r\nb": 2, "ü": 3, "x" * 99: 4})
        status, headers, _ = await world.post(CHAT, body)
        assert status == 200
        assert headers["X-Ignored-Fields"] == f"wibble,a%0D%0Ab,%C3%BC,{'x' * 64}"


async def test_a_stream_names_ignored_fields_too_and_long_lists_are_cut() -> None:
    async with serving() as world:
        many = {f"field{number}": 1 for number in range(5000)}
        body = chat("hi", max_tokens=1, stream=True, **many)
        async with world.client.post(world.url + CHAT, json=body) as answer:
            assert answer.headers["X-Ignored-Fields"].endswith("field31,...")
            await answer.read()


async def test_strict_fields_reject_unknown_fields_in_every_kind_of_route() -> None:
    async with serving(strict_fields=True) as world:
        for path, body in [(CHAT, chat("hi")), ("/v1/embeddings", {"input": "hi"}), ("/tokenize", {"content": "hi"})]:
            status, _, answer = await world.post(path, {**body, "wibble": 1})
            assert (status, answer["error"]["reason"]) == (400, "unknown_parameter")


async def test_a_long_text_does_not_block_the_event_loop() -> None:
    async with serving() as world:
        work = asyncio.create_task(world.post("/tokenize", {"content": "word " * 50_000}))
        answered = 0
        while not work.done():
            async with world.client.get(world.url + "/health") as answer:
                answered += answer.status == 200
        status, _, body = await work
        assert status == 200
        assert len(body["tokens"]) >= 50_000
        assert answered >= 5


# Request events


async def test_each_request_has_one_event_at_its_end() -> None:
    async with serving() as world:
        await world.post(CHAT, chat("hi", max_tokens=3, n=2), **{"X-Request-Id": "a.b_c-1"})
        [event] = world.events
        assert (event.id, event.outcome) == ("a.b_c-1", "ok")
        assert (event.prompt_tokens, event.completion_tokens) == (len(world.engine.requests[0].prompt), 6)
        assert event.cached_tokens == 2
        assert event.ttft > 0
        assert event.token_seconds == DECODE / 2, "two choices, of two tokens after the first each"
        assert (event.prefill_seconds, event.decode_seconds) == (PREFILL, 2 * DECODE)
        await world.post("/v1/embeddings", {"input": ["hi", "ho"]})
        assert (world.events[1].prompt_tokens, world.events[1].completion_tokens) == (4, 0)
        assert world.events[1].ttft == 0


async def test_the_token_counts_of_an_event_are_those_of_the_usage() -> None:
    async with serving() as world:
        for body in (chat("hi"), chat("hi", stop="世"), chat("hi", max_tokens=4, n=3)):
            _, _, answer = await world.post(CHAT, body)
            event = world.events[-1]
            counts = {"prompt_tokens": event.prompt_tokens, "completion_tokens": event.completion_tokens}
            assert answer["usage"].items() >= counts.items()


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "ü"])
async def test_an_invalid_request_id_is_replaced(given: str) -> None:
    async with serving() as world:
        _, headers, _ = await world.post("/tokenize", {"content": "a"}, **{"X-Request-Id": given})
        assert headers["X-Request-Id"] == world.events[0].id != given
        assert len(world.events[0].id) == 32


@pytest.mark.parametrize("content", ["fail", "break", "full", "fail-later", None])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_request_ends_with_the_outcome_error(content: str | None, stream: bool) -> None:
    async with serving() as world:
        body = b"{" if content is None else json.dumps(chat(content, stream=stream)).encode()
        try:
            await raw(world, "POST", CHAT, body)
        except aiohttp.ClientPayloadError:
            assert (content, stream) == ("fail-later", True)
        assert [event.outcome for event in world.events] == ["error"]


# Shutdown


async def test_closing_the_server_ends_running_requests_with_draining() -> None:
    async with serving() as world:
        asking = asyncio.create_task(world.post(CHAT, chat("hold")))
        await world.engine.until("begin")
        await world.server.close()
        status, headers, body = await asking
        assert (status, body["error"]["reason"]) == (503, "draining")
        assert (headers["X-Should-Retry"], headers["Retry-After"]) == ("true", "1")
        assert world.engine.journal == ["begin", "cancelled"]
        assert [event.outcome for event in world.events] == ["error"]


async def test_closing_the_server_ends_a_stream_with_an_error_frame_and_an_aborted_connection() -> None:
    async with serving() as world:
        url = world.url + CHAT
        async with world.client.post(url, json=chat("hold-later", stream=True)) as answer:
            await world.engine.until("holding")
            await world.server.close()
            received = [line async for line in until_broken(answer.content)]
        assert b'"reason":"draining"' in received[-1]
        assert b"data: [DONE]\n" not in received


async def until_broken(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The lines that are not empty, up to an aborted connection; an orderly end fails."""
    try:
        async for line in content:
            if line.strip():
                yield line
    except aiohttp.ClientPayloadError:
        return
    pytest.fail("the stream has an orderly end")
