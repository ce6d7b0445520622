"""Memory of a real worker under requests that it rejects, and under grammars that take long."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests import tiny
from tests.children import Child, memory, python
from tests.processes.routers import DEADLINE, Router
from worker.protocol.events import Ready

MIB = 1 << 20
# Bytes that reading bodies may take beyond the worker's idle size: three times the bodies in progress (64 MiB).
STORM_BYTES = 3 * 64 * MIB
CALLS = {
    "/v1/completions": "prompt",
    "/completion": "prompt",
    "/tokenize": "content",
    "/count_token": "prompt",
    "/v1/responses": "input",
}


async def rejected(client: aiohttp.ClientSession, url: str, field: str, text: str) -> None:
    body = json.dumps({field: text}).encode()
    async with client.post(url, data=io.BytesIO(body)) as answer:
        assert answer.status == 400
        assert "maximum context length" in await answer.text()


@pytest.mark.asyncio(loop_scope="session")
async def test_the_router_keeps_no_body_of_a_request_that_has_ended(up: Router) -> None:
    """Bodies are few objects, so the garbage collector does not run for them."""
    content = b'{"model": "unknown", "prompt": "' + b"x" * (20 * MIB) + b'"}'
    pid = up.process.pid
    for _ in range(2):
        assert (await up.client.post("/v1/completions", content=content)).status_code == 404
    before = memory(pid, "VmRSS")
    for _ in range(12):
        assert (await up.client.post("/v1/completions", content=content)).status_code == 404
    assert memory(pid, "VmRSS") - before < 60 * MIB


@pytest.mark.asyncio(loop_scope="session")
async def test_the_router_gives_back_the_memory_of_bodies_that_never_end(up: Router) -> None:
    pid, writers = up.process.pid, []
    before = memory(pid, "VmRSS")
    for _ in range(160):
        _, writer = await asyncio.open_connection("127.0.0.1", up.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (4 * MIB))
        writer.write(b"x" * (3 * MIB))
        writers.append(writer)
    for writer in writers:
        await writer.drain()
    while memory(pid, "VmRSS") - before < 200 * MIB:
        await up.client.get("/health")
    for writer in writers:
        writer.close()
    async with asyncio.timeout(DEADLINE):
        while memory(pid, "VmRSS") - before > 60 * MIB:
            await up.client.get("/health")


@pytest.mark.slow
async def test_over_long_prompts_take_no_more_memory_than_their_bodies_and_give_it_back(tmp_path: Path) -> None:
    snapshot = tiny.make("llama", tmp_path / "tiny", max_position_embeddings=2048)
    argv = python("-m", "worker", "serve", f"--snapshot={snapshot}", "--listen=tcp:127.0.0.1:0", "--ctx-size=2048")
    with Child(argv) as child:
        url = child.event(Ready).address.replace("tcp:", "http://")
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout) as client:
            await rejected(client, f"{url}/v1/completions", "prompt", "word " * 10_000)
            idle = memory(child.pid, "VmRSS")

            # One prompt of 12 MB: the body, its JSON, and no tokens.
            await rejected(client, f"{url}/v1/completions", "prompt", "hello world " * MIB)
            assert memory(child.pid, "VmHWM") - idle < 60 * MIB

            # a storm of 24 bodies of 12 MB, which are 288 MB
            async with asyncio.TaskGroup() as tasks:
                for path, field in CALLS.items():
                    for _ in range(4):
                        tasks.create_task(rejected(client, url + path, field, "hello world " * MIB))
                for _ in range(4):
                    tasks.create_task(rejected(client, f"{url}/v1/completions", "prompt", "x" * (12 * MIB)))
            assert memory(child.pid, "VmHWM") - idle < STORM_BYTES

            async with client.post(f"{url}/v1/completions", json={"prompt": "hi", "max_tokens": 1}) as answer:
                assert answer.status == 200
            # The memory is given back after the last large body, in a thread.
            while memory(child.pid, "VmRSS") - idle > 32 * MIB:
                await client.get(f"{url}/health")


AMBIGUOUS = 'root ::= s\ns ::= s s | s s s | [a-z ] | ""'  # each mask takes longer than the one before
ATTACKERS = 2
# Limit of the memory of grammars beyond the reservation: three are compiled at once, each within 128 MiB.
GRAMMARS_BYTES = 3 * 128 * MIB
NEIGHBOUR = {"model": "m", "prompt": "hello there", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
CONSTRAINED = {**NEIGHBOUR, "ignore_eos": False, "regex": "[a-e]{40}"}


def optional(number: int) -> str:
    """A grammar of a quarter of a megabyte that takes seconds to compile and allows too much at its first token."""
    return "root ::= " + " ".join(f'"{number}{index:x}"?' for index in range(26_000))


async def text_of(up: Router, body: dict[str, Any]) -> str:
    """The text of a streamed answer, which must be complete."""
    text, lines = "", []
    async with up.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            lines.append(line)
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    assert "data: [DONE]" in lines, lines
    return text


async def attack(up: Router, **fields: Any) -> tuple[int, str]:
    body = {**NEIGHBOUR, "max_tokens": 200, "temperature": 1, **fields}
    answer = await up.client.post("/v1/completions", json=body)
    return answer.status_code, answer.json().get("error", {}).get("message", "").partition(":")[0]


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_grammar_bombs_are_bounded_in_memory_and_change_no_neighbours_answer(
    real: Router, tmp_path: Path
) -> None:
    tiny.make("llama", tmp_path / "m", max_position_embeddings=512)
    await real.serve_presets(f"[m]\nmodel = {tmp_path}/m\nctx-size = 512\nparallel = 16\nthreads = 1\n")
    expected = [await text_of(real, body) for body in (NEIGHBOUR, CONSTRAINED)]
    [worker] = (await real.client.get("/router/state")).json()["workers"]
    idle = memory(worker["pid"], "VmRSS")

    ambiguous = [attack(real, ebnf=AMBIGUOUS, seed=number) for number in range(ATTACKERS)]
    large = [attack(real, ebnf=optional(number)) for number in range(ATTACKERS)]
    repeated = [attack(real, regex=f"(a{{1000}}){{{470 + number}}}") for number in range(ATTACKERS)]
    bombs = asyncio.gather(*ambiguous, *large, *repeated)
    while not bombs.done():
        assert [await text_of(real, body) for body in (NEIGHBOUR, CONSTRAINED)] == expected
    assert await bombs == [
        (400, f"{field} is too complex") for field in ("ebnf", "ebnf", "regex") for _ in range(ATTACKERS)
    ]

    # The resident memory includes pages of the fork server, which the reservation does not.
    grown = memory(worker["pid"], "VmHWM") - idle
    assert worker["measured"]["cpu"] + grown < worker["reserved"]["cpu"] + GRAMMARS_BYTES
