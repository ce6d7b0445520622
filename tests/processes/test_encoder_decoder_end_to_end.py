"""A T5 served by a real worker: completions and chat, over HTTP, as any other model."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from tests import tiny
from tests.children import Child, python
from tests.worker.loaded import generated, reference
from worker.protocol.argv import Serve, to_argv
from worker.protocol.events import Ready

pytestmark = pytest.mark.slow
DEADLINE = 240.0
"""Seconds; far above what a worker takes here."""


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("flan-t5", tmp_path_factory.mktemp("model") / "t5")


@pytest.fixture(scope="module")
def url(snapshot: Path) -> Iterator[str]:
    command = Serve(snapshot=str(snapshot), listen="tcp:127.0.0.1:0", parallel=2)
    with Child(python("-m", "worker", *to_argv(command))) as worker:
        yield worker.event(Ready, DEADLINE).address.replace("tcp:", "http://")


def test_a_completion_is_the_text_that_generate_gives(snapshot: Path, url: str) -> None:
    torch.set_num_threads(1)
    tokenizer = tiny.make_tokenizer("flan-t5")
    prompt = "The quick brown fox jumps over the lazy dog"
    ids: list[int] = tokenizer(prompt)["input_ids"]
    expected = tokenizer.decode(generated(reference(snapshot), ids, 24), skip_special_tokens=True)
    body = {"model": "m", "prompt": prompt, "max_tokens": 24, "temperature": 0.0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE).json()
    assert answer["choices"][0]["text"] == expected
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_a_chat_has_an_answer(url: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "n": 2, "seed": 1}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=DEADLINE).json()
    assert len(answer["choices"]) == 2
    assert answer["usage"]["completion_tokens"] > 0


def test_logprobs_of_what_the_encoder_reads_are_refused(url: str) -> None:
    body = {"model": "m", "prompt": "Hello", "max_tokens": 2, "echo": True, "logprobs": 1}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE)
    assert answer.status_code in (400, 422, 501)
    assert "encoder" in answer.text
