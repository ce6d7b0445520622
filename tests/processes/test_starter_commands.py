"""The commands with which users of FastChat, EricLLM and llama-server start a model, as docs/migration translates them.

Tiny models are in place of theirs, on a hub and in folders. Requests are those of the documents of each system.
"""

import asyncio
import fnmatch
import re
import shlex
from pathlib import Path

import pytest

from router.cli.main import main
from tests.processes.hubs import Hub
from tests.processes.routers import ROOT, router
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


async def test_ericllms_workers_share_its_requests(tmp_path: Path) -> None:
    words = starter("ericllm", "*--num_workers 2*")
    make("mistral", tmp_path / words[1])
    async with router(*words, working=tmp_path) as up:
        await up.becomes("NeuralHermes-2.5-Mistral-7B", "loaded")
        prompts = [
            "This will only test single-threaded performance",
            "This is is a second prompt",
            "Here's a 3rd thing",
        ]
        answers = await asyncio.gather(
            *(
                up.client.post("/generate", json={"prompt": prompt, "max_tokens": 128, "temperature": 0.7})
                for prompt in prompts
            )
        )
        assert [answer.status_code for answer in answers] == [200] * 3
        rows = (await up.client.get("/router/state")).json()["workers"]
        assert [row["model"] for row in rows] == ["NeuralHermes-2.5-Mistral-7B"] * 2


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
