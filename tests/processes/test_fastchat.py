"""Answers of the router to FastChat's own API server and to other programs with the same requests."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.config.settings import Settings
from router.errors import DoesNotFit, WorkerCrashed
from tests.processes.upstreams import END, Upstream, chunk, dying, unasked, world
from worker.protocol.dialects import Dialect
from worker.protocol.errors import error_body

BEGIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PATH = "/worker_generate_stream"


def frame(text: str, finish: str | None = None) -> bytes:
    body = {"text": text, "usage": None, "logprobs": None, "error_code": 0, "finish_reason": finish}
    return json.dumps(body, separators=(",", ":")).encode() + b"\0"


def whole(body: Any) -> bytes:
    data = json.dumps(body).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)


async def test_fastchats_frames_go_on_whole_whatever_stream_says(tmp_path: Path) -> None:
    """Its clients parse what one read gives them: half a frame would be an error."""
    sent = frame("one") + frame("one two", "stop")

    async def answer(upstream: Upstream) -> None:
        assert upstream.head.startswith(f"POST {PATH} ")
        for part in (sent[:9], sent[9:30], sent[30:]):
            await upstream.send((BEGIN if part == sent[:9] else b"") + chunk(part))
            await asyncio.sleep(0)
        await upstream.send(END)

    async with world(tmp_path, answer) as up, up.client() as asking:
        for told in ({}, {"stream": False}, {"stream": True}):
            async with asking.stream("POST", PATH, json={"model": "a", "prompt": "x", **told}) as got:
                reads = [part async for part in got.aiter_raw()]
            assert b"".join(reads) == sent
            assert all(part.endswith(b"\0") for part in reads)


async def test_a_fastchat_stream_ends_with_an_error_frame_when_a_worker_is_lost(tmp_path: Path) -> None:
    data, first = b"", frame("one") + frame("one two")[:10]
    async with dying(tmp_path, first, BEGIN) as (up, seen), up.client() as asking:
        with contextlib.suppress(httpx.RemoteProtocolError):
            async with asking.stream("POST", PATH, json={"model": "a", "prompt": "x"}) as got:
                async for part in got.aiter_raw():
                    data += part
                    seen.set()
            raise AssertionError("an orderly end would mean that this was all")
    begun, last = (json.loads(each) for each in data.removesuffix(b"\0").split(b"\0"))
    assert begun["text"] == "one"
    assert last["error_code"] == 50001
    assert "worker" in last["text"]


async def test_a_fastchat_client_waits_through_a_load_with_empty_texts(tmp_path: Path) -> None:
    async def answer(upstream: Upstream) -> None:
        await upstream.send(BEGIN + chunk(frame("one", "stop")) + END)

    settings = Settings(stream_commit_seconds=0.05, sse_ping_interval=0.05)
    async with world(tmp_path, answer, settings=settings, load_seconds=0.3) as up, up.client() as asking:
        told = await asking.post(PATH, json={"model": "a", "prompt": "x"})
        texts = [json.loads(each) for each in told.content.removesuffix(b"\0").split(b"\0")]
        assert len(texts) > 2
        assert {each["error_code"] for each in texts} == {0}
        assert {each["text"] for each in texts[:-1]} == {""}
        assert (texts[-1]["text"], texts[-1]["finish_reason"]) == ("one", "stop")


async def test_the_routers_own_errors_are_fastchats(tmp_path: Path) -> None:
    async with world(tmp_path, unasked) as up, up.client() as asking:
        plain = await asking.post("/worker_generate", json={"model": "b", "prompt": "x"})
        assert (plain.status_code, plain.json()["error_code"]) == (404, 40301)
        framed = await asking.post(PATH, json={"model": "b", "prompt": "x"})
        assert framed.content.endswith(b"\0"), "its clients look at frames, and at no status"
        assert json.loads(framed.content[:-1]) == plain.json()
        assert framed.headers["Content-Type"] == "application/octet-stream", "a frame is no JSON"
        up.fleet.files.missing.add("a")  # type: ignore[attr-defined]
        for path in ("/count_token", "/worker_get_conv_template"):
            told = await asking.post(path, params={"autoload": "false"}, json={"model": "a", "prompt": "x"})
            assert (told.status_code, told.json()["error_code"]) == (400, 40001)
            assert "not loaded" in told.json()["text"]
        assert up.launcher.journal == []


def test_what_has_no_room_is_fastchats_out_of_memory() -> None:
    assert error_body(Dialect.FASTCHAT, DoesNotFit("m")) == {"error_code": 50002, "text": "m"}
    assert error_body(Dialect.FASTCHAT, WorkerCrashed("m"))["error_code"] == 50001


async def test_a_workers_refusal_in_a_frame_keeps_its_status_and_fails_a_stream_that_has_begun(tmp_path: Path) -> None:
    said = b'{"text":"no","error_code":40001}\0'
    type_ = b"Content-Type: application/octet-stream\r\n"

    async def refuse(upstream: Upstream) -> None:
        if b"late" in upstream.body:
            await begun.wait()
        await upstream.send(b"HTTP/1.1 400 No\r\n%bContent-Length: %d\r\n\r\n%b" % (type_, len(said), said))

    async def listen(asking: httpx.AsyncClient) -> None:
        async with asking.stream("POST", PATH, json={"model": "a", "prompt": "late"}) as got:
            assert got.status_code == 200
            begun.set()
            async for part in got.aiter_raw():
                seen.append(part)

    begun, seen = asyncio.Event(), list[bytes]()
    async with world(tmp_path, refuse, settings=Settings(stream_commit_seconds=0.05)) as up, up.client() as asking:
        await up.fleet.load("a")
        early = await asking.post("/worker_generate", json={"model": "a", "prompt": "early"})
        assert (early.status_code, early.content) == (400, said)
        with pytest.raises(httpx.RemoteProtocolError):
            await listen(asking)
    assert seen[-1] == said


async def test_fastchats_statuses_load_nothing(tmp_path: Path) -> None:
    async with world(tmp_path, unasked, keys={"aliases": ("gpt",)}) as up, up.client() as asking:
        told = await asking.post("/worker_get_status")
        assert told.json() == {"model_names": ["a", "gpt"], "speed": 1, "queue_length": 0}
        told = await asking.post("/model_details", json={"model": "gpt"})
        assert told.status_code == 200
        assert told.json()["context_length"] > 0
        assert up.launcher.journal == []


async def test_the_router_is_a_controller_whose_only_worker_is_itself(tmp_path: Path) -> None:
    async with world(tmp_path, unasked, keys={"aliases": ("gpt",)}) as up, up.client() as asking:
        assert (await asking.post("/refresh_all_workers")).json() is None
        assert (await asking.get("/test_connection")).json() == "success"
        for path, names in (("/list_models", ["a", "gpt"]), ("/list_language_models", ["a", "gpt"]),
                            ("/list_multimodal_models", [])):  # fmt: skip
            assert (await asking.post(path)).json() == {"models": names}
        for model, headers, address in (
            ("gpt", {}, "http://localhost"),
            ("a", {"Host": "localhost:7000"}, "http://localhost:7000"),
            ("a", {"X-Forwarded-Proto": "https"}, "https://localhost"),
            ("none", {}, ""),
        ):
            told = await asking.post("/get_worker_address", json={"model": model}, headers=headers)
            assert told.json() == {"address": address}
        told = await asking.post("/register_worker", json={"worker_name": "http://x", "check_heart_beat": True})
        assert (told.status_code, "starts its workers itself" in told.json()["text"]) == (501, True)
        assert up.launcher.journal == []


async def test_whether_prompts_fit_is_what_their_own_worker_counts(tmp_path: Path) -> None:
    async def answer(upstream: Upstream) -> None:
        if upstream.head.startswith("POST /count_token "):
            prompt = json.loads(upstream.body)["prompt"]
            await upstream.send(whole({"count": len(prompt), "error_code": 0}))
        else:
            await upstream.send(whole({"text": "", "error_code": 0}))

    async with world(tmp_path, answer) as up, up.client() as asking:
        await asking.post("/worker_generate", json={"model": "a", "prompt": "load it"})
        context = (await asking.post("/model_details", json={"model": "a"})).json()["context_length"]
        prompts = [
            {"model": "a", "prompt": "four", "max_tokens": context - 4},
            {"model": "A", "prompt": "four", "max_tokens": context - 3},
            {"prompt": "four"},
        ]
        told = await asking.post("/api/v1/token_check", json={"prompts": prompts})
        row = {"tokenCount": 4, "contextLength": context}
        assert told.json() == {"prompts": [{"fits": fits, **row} for fits in (True, False, True)]}
        for wrong in (
            {},
            {"prompts": [5]},
            {"prompts": [{"prompt": 5}]},
            {"prompts": [{"prompt": "x", "max_tokens": -1}]},
            {"prompts": [{"prompt": "x", "max_tokens": 1 << 31}]},
        ):
            told = await asking.post("/api/v1/token_check", json=wrong)
            assert told.status_code == 400, wrong
            assert told.json()["error_code"] in (40001, 40302)
