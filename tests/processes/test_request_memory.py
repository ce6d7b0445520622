"""Memory of a real worker under requests that it rejects."""

import asyncio
import io
import json
from pathlib import Path

import aiohttp
import pytest

from tests import tiny
from tests.children import Child, python
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


def memory(pid: int, field: str) -> int:
    """Bytes of a field of /proc/PID/status."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


async def rejected(client: aiohttp.ClientSession, url: str, field: str, text: str) -> None:
    body = json.dumps({field: text}).encode()
    async with client.post(url, data=io.BytesIO(body)) as answer:
        assert answer.status == 400
        assert "maximum context length" in await answer.text()


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
