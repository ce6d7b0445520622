"""The commands with which users of FastChat, EricLLM and llama-server start a model, as docs/migration translates them.

Tiny models are in place of theirs, on a hub and in folders. Requests are those of the documents of each system.
"""

import asyncio
import fnmatch
import os
import re
import shlex
import shutil
from asyncio import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from router.cli.main import main
from tests.processes.hubs import Hub
from tests.processes.routers import DEADLINE, ROOT, Router, router
from tests.tiny import make

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


def starter(page: str, pattern: str) -> list[str]:
    """The options of the one command `router ...` in the first table of a page that matches a glob."""
    table = (ROOT / "docs" / "migration" / f"{page}.md").read_text().partition("## ")[0]
    [found] = fnmatch.filter(re.findall(r"`router ([^`]*)`", table), pattern)
    return shlex.split(found)


async def test_fastchats_worker_serves_one_model_for_its_api_and_its_workers_protocol(hub: Hub, tmp_path: Path) -> None:
    make("llama", hub.root / "lmsys" / "vicuna-7b-v1.5")
    environ = {"HF_ENDPOINT": hub.address, "HF_HUB_CACHE": str(tmp_path / "hub")}
    words = starter("fastchat", "--model-path lmsys/vicuna-7b-v1.5")
    async with router(*words, environ=environ) as up:
        await up.becomes("lmsys/vicuna-7b-v1.5", "loaded")
        body = {"model": "vicuna-7b-v1.5", "prompt": "Once upon a time", "max_tokens": 4}
        completed = await up.client.post("/v1/completions", json=body)
        assert completed.status_code == 200, completed.text
        asked = {"model": "vicuna-7b-v1.5", "prompt": "Once upon a time", "max_new_tokens": 4}
        generated = await up.client.post("/worker_generate", json=asked)
        assert (generated.status_code, generated.json()["error_code"]) == (200, 0)


async def test_fastchats_lazy_workers_take_turns(hub: Hub, tmp_path: Path) -> None:
    for name in ("vicuna-7b-v1.5", "longchat-7b-16k"):
        make("llama", hub.root / "lmsys" / name)
    environ = {"HF_ENDPOINT": hub.address, "HF_HUB_CACHE": str(tmp_path / "hub")}
    async with router(*starter("fastchat", "*--lazy*"), "--fork-server", environ=environ) as up:
        await up.says("is warm")  # the libraries of models are imported once
        ids = [row["id"] for row in (await up.client.get("/v1/models")).json()["data"]]
        assert ids == ["lmsys/vicuna-7b-v1.5", "lmsys/longchat-7b-16k"]
        assert [(await up.status(id))["value"] for id in ids] == ["unloaded"] * 2
        for name in ("vicuna-7b-v1.5", "longchat-7b-16k"):
            body = {"model": name, "prompt": "Once upon a time", "max_tokens": 4}
            assert (await up.client.post("/v1/completions", json=body)).status_code == 200
            assert list(await up.workers()) == [f"lmsys/{name}"]


# EricLLM's README has no client but this line of curl, three times with `&` between them. The apostrophe of the third
# prompt ends its quotes, and its last double quote opens others.
CURL = """curl http://192.168.0.155:8000/generate -H "Content-Type: application/json" -d '{{ "prompt": "{prompt}", \
"max_tokens": 128, "temperature": 0.7 }}'"""
PROMPTS = (
    "This block of code tests multi-threaded performance",
    "This is is a second prompt that will hopefully",
    "Here's a 3rd thing that needs to be",
)


@pytest.fixture
def ericllm(tmp_path: Path) -> list[str]:
    """The options of EricLLM's command for one card, with a tiny model in its place. No text ends early."""
    words = starter("ericllm", "*--num_workers 2*")
    make("mistral", tmp_path / words[1], max_position_embeddings=512)
    return [*words, "--ignore-eos"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_the_lines_of_curl_in_ericllms_readme_get_their_answers(ericllm: list[str], tmp_path: Path) -> None:
    async with router(*ericllm, working=tmp_path) as up:
        await up.becomes("NeuralHermes-2.5-Mistral-7B", "loaded")
        # All addresses, also those that curl takes the words behind the apostrophe for, are the router's.
        (tmp_path / ".curlrc").write_text(f'connect-to = "::127.0.0.1:{up.port}"\nsilent\nnoproxy = "*"\n')
        line = " & ".join(CURL.format(prompt=prompt) for prompt in PROMPTS)
        shell = await asyncio.create_subprocess_exec(
            "bash", stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "HOME": str(tmp_path)}
        )
        printed, _ = await shell.communicate(f'{line}\n"\nwait\n'.encode())
        answers = printed.decode()
        for prompt in PROMPTS[:2]:
            assert f'{{"text":"{prompt}' in answers
        assert "the body is not a JSON object" in answers, "of the third one, from which the shell takes the end"


async def test_ericllms_workers_share_the_requests_of_its_benchmark(ericllm: list[str], tmp_path: Path) -> None:
    """32 threads with 256 tokens each, as its README describes it. The client itself was not published."""
    async with router(*ericllm, working=tmp_path) as up:
        await up.becomes("NeuralHermes-2.5-Mistral-7B", "loaded")

        def ask(number: int) -> httpx.Response:
            body = {"prompt": PROMPTS[number % 3], "max_tokens": 256, "temperature": 0.7}
            return httpx.post(f"http://127.0.0.1:{up.port}/generate", json=body, timeout=None)

        with ThreadPoolExecutor(32) as threads:
            loop = asyncio.get_running_loop()
            answers = await asyncio.gather(*(loop.run_in_executor(threads, ask, number) for number in range(32)))
        for number, answer in enumerate(answers):
            assert answer.status_code == 200, answer.text
            assert answer.json()["text"].startswith(PROMPTS[number % 3])
        rows = (await up.client.get("/router/state")).json()["workers"]
        assert [row["model"] for row in rows] == ["NeuralHermes-2.5-Mistral-7B"] * 2
        assert await tokens(up) == [256] * 32


async def tokens(up: Router) -> list[int]:
    """The tokens of all answers, once the workers have reported them."""
    async with asyncio.timeout(DEADLINE):
        while True:
            rows = (await up.client.get("/router/requests")).json()["ended"]
            found: list[int] = [row["completion_tokens"] for row in rows]
            if None not in found:
                return found


async def test_ericllms_command_for_two_cards_has_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = starter("ericllm", "*--gpu_split*")
    make("mistral", tmp_path / words[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["check", *words]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "warning: NeuralHermes-2.5-Mistral-7B: gpu-split has no effect on the CPU",
        "1 model, no fault: NeuralHermes-2.5-Mistral-7B",
    ]


async def test_llama_servers_quick_start_answers_its_completion(tmp_path: Path) -> None:
    words = starter("llama-server", "-m models/7B*")
    make("llama", tmp_path / "models" / "7B")
    async with router(*words, working=tmp_path) as up:
        # Random weights may draw an end token.
        body = {"prompt": "Building a website can be done in 10 simple steps:", "n_predict": 16, "ignore_eos": True}
        answer = await up.client.post("/completion", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["tokens_predicted"] == 16
