"""Requests that are refused leave no trace in what is learned of a model's memory: a real router and a tiny model."""

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.processes.routers import DEADLINE, Router, router

pytestmark = pytest.mark.slow  # torch is imported

REQUESTS = 1000
"""Of the fuzz."""
LONG = "hello world " * 250_000
"""Three megabytes, far beyond the context. Tokenizing it once took 300 MiB."""
CAPACITY, MARGIN = 900, 100
"""In MiB. An executed worker of this model fits; one with all that a long prompt leaves behind does not."""
PICTURE = "data:image/png;base64,AA"


def serving(folder: Path) -> AbstractAsyncContextManager[Router]:
    """A router with the model `m`, whose state is kept in `folder`."""
    model, ini = folder / "model", folder / "models.ini"
    if not ini.exists():
        tiny.make("llama", model)
        ini.write_text(f"[m]\nmodel = {model}\nctx-size = 256\nparallel = 2\nthreads = 1\n")
    limits = ("--device-limit", f"cpu={CAPACITY}", "--models-memory-margin", str(MARGIN))
    return router("--models-preset", str(ini), "--state-dir", str(folder / "state"), *limits)


async def ask(up: Router, path: str = "/v1/completions", **fields: Any) -> tuple[int, str]:
    """Status and text of an answer."""
    answer = await up.client.post(path, json={"model": "m", "prompt": "hi", "max_tokens": 2, **fields})
    return answer.status_code, answer.text


async def unload(up: Router) -> None:
    assert (await up.client.post("/models/unload", json={"model": "m"})).status_code == 200
    await up.has_no_workers()


async def first_estimates(up: Router, folder: Path) -> bytes:
    """The estimates after the first load. The router writes them in a thread of its own."""
    async with asyncio.timeout(DEADLINE):
        while not (folder / "state" / "estimates.json").exists() or not json.loads(estimates(folder))["learned"]:
            await up.status("m")
    return estimates(folder)


def estimates(folder: Path) -> bytes:
    return (folder / "state" / "estimates.json").read_bytes()


# Each makes a request that is refused, from a source of randomness.
REFUSED: Mapping[str, Callable[[random.Random], dict[str, Any]]] = {
    "too long": lambda chance: {"prompt": "word " * chance.randint(600, 60_000)},
    "too many tokens": lambda chance: {"prompt": [5] * chance.randint(300, 9000)},
    "outside the vocabulary": lambda chance: {"prompt": [1, 10**6 + chance.randint(0, 10**9)]},
    "no prompt": lambda chance: {"prompt": chance.choice([None, 3, {}, []])},
    "temperature": lambda chance: {"temperature": chance.choice([-1, "hot", [], 1e9])},
    "top_p": lambda chance: {"top_p": chance.choice([-0.5, 2, "x"])},
    "n": lambda chance: {"n": chance.choice([0, -3, 10**6, "x"])},
    "max_tokens": lambda chance: {"max_tokens": chance.choice([-5, "x", 1.5])},
    "stop": lambda chance: {"stop": chance.choice([3, [3], {"a": 1}])},
    "logit_bias": lambda chance: {"logit_bias": {str(10**6 + chance.randint(0, 999)): 1}},
    "grammar": lambda chance: {"grammar": "root ::= " + "(" * chance.randint(1, 2000)},
    "schema": lambda chance: {"json_schema": {"type": f"nothing{chance.randint(0, 9)}"}},
    "seed": lambda chance: {"seed": chance.choice(["x", [], 1.5])},
    "model": lambda chance: {"model": f"none{chance.randint(0, 9)}"},
    "messages": lambda chance: {
        "path": "/v1/chat/completions", "prompt": None,
        "messages": [{"role": "user", "content": "word " * chance.randint(600, 60_000)}],
    },
    "role": lambda chance: {
        "path": "/v1/chat/completions", "prompt": None, "messages": [{"role": chance.random(), "content": "a"}],
    },
    "image": lambda chance: {
        "path": "/v1/chat/completions", "prompt": None,
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]}],
    },
    "embeddings": lambda chance: {"path": "/v1/embeddings", "prompt": None, "input": "a" * chance.randint(1, 99_999)},
}  # fmt: skip


async def test_a_thousand_refused_requests_leave_the_estimates_as_they_are_and_the_model_loadable(
    tmp_path: Path,
) -> None:
    chance = random.Random(8)
    async with serving(tmp_path) as up:
        assert (await ask(up))[0] == 200
        before = await first_estimates(up, tmp_path)
        for _ in range(2):
            status, text = await ask(up, prompt=LONG)
            assert (status, "context_length_exceeded" in text) == (400, True)
        assert (await ask(up))[0] == 200, "a step afterwards"
        kinds = [*REFUSED, *chance.choices([*REFUSED], k=REQUESTS - len(REFUSED))]
        for kind in kinds:
            fields = REFUSED[kind](chance)
            status, text = await ask(up, **fields)
            assert status in (400, 404, 422, 501), (kind, json.dumps(fields)[:300], status, text[:300])
        await unload(up)
    assert estimates(tmp_path) == before
    async with serving(tmp_path) as again:
        assert (await ask(again))[0] == 200, "after a restart"
