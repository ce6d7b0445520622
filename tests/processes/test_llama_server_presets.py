"""Files of llama-server's --models-preset, with tiny models in place of GGUF files, and real workers."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.config.chat_templates import jinja
from tests import tiny
from tests.processes.routers import Router, chat

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

# The example of llama-server's README, "Model presets", without comments.
EXAMPLE = """
version = 1

[*]
c = 8192
n-gpu-layers = 8

[MY-MODEL]
chat-template = chatml
n-gpu-layers = 123
jinja = true
c = 4096
LLAMA_ARG_CACHE_RAM = 0
model-draft = ./my-models/draft
model-draft = {draft}

[custom_model]
model = {model}
"""
# Keys of published files: fit, neutral values of RoPE and reasoning, KV cache, batches.
COMMON = """
[*]
fit = on
fit-target = 1024
flash-attn = on
n-gpu-layers = 99
cache-type-k = q8_0
cache-type-v = q8_0
batch-size = 2048
ubatch-size = 512
jinja = true
rope-scale = 1
rope-freq-base = 0
rope-freq-scale = 1.0
yarn-orig-ctx = 0
yarn-ext-factor = -1.0
reasoning = auto
reasoning-format = auto
reasoning-budget = -1
metrics = true

[thinking]
model = {model}
chat-template-file = {template}

[not-thinking]
model = {model}
chat-template-file = {template}
reasoning = off
"""
DEFAULTS = """
[m]
model = {model}
grammar = "root ::= [0-9][0-9] \\"!\\""
logit-bias = {{"{token}": false}}
temp = 0
samplers = top_k;temperature
"""


async def said(up: Router, model: str, **fields: Any) -> str:
    response = await up.client.post("/v1/chat/completions", json=chat(model, max_tokens=8, **fields))
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


@pytest.fixture
def listed(real: Router) -> Iterator[None]:
    """A model in the folder of the shared router, for the length of a test."""
    folder = tiny.make("llama", real.models / "MY-MODEL", max_position_embeddings=8192)
    yield
    shutil.rmtree(folder)


@pytest.mark.usefixtures("listed")
async def test_the_example_of_llama_servers_readme_loads(real: Router, tmp_path: Path) -> None:
    tiny.make("llama", real.folder / "my-models" / "draft")
    draft = tiny.make("llama", tmp_path / "draft", seed=1)
    await real.serve_presets(EXAMPLE.format(model=tiny.make("llama", tmp_path / "custom"), draft=draft))
    for name, tokens in (("MY-MODEL", 4096), ("custom_model", 256)):
        await said(real, name)
        listed = (await real.client.get(f"/v1/models/{name}")).json()
        assert listed["meta"]["n_ctx"] == tokens, "8192 for all models is at most the maximum of each"
    props = (await real.client.get("/props", params={"model": "MY-MODEL"})).json()
    assert props["chat_template"] == jinja("chatml")


async def test_a_file_of_common_keys_loads_and_reasoning_is_on_unless_it_is_turned_off(
    real: Router, tmp_path: Path
) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ 'thinks' if enable_thinking else 'does not think' }}")
    await real.serve_presets(COMMON.format(model=tiny.make("llama", tmp_path / "m"), template=template))

    async def prompt(model: str, **fields: Any) -> str:
        response = await real.client.post("/apply-template", json=chat(model, **fields))
        return str(response.json()["prompt"])

    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert await prompt("thinking") == "thinks"
    assert await prompt("thinking", **off) == "does not think"
    assert await prompt("not-thinking") == "does not think"
    assert await prompt("not-thinking", chat_template_kwargs={"enable_thinking": True}) == "thinks"
    await said(real, "thinking")


async def test_defaults_of_requests_hold_unless_a_request_says_otherwise(real: Router, tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path / "m")
    await real.serve_presets(DEFAULTS.format(model=folder, token=0))
    first = await said(real, "m")
    assert first[:2].isdecimal()
    assert first[2:] == "!"
    digit = tiny.make_tokenizer("llama").convert_tokens_to_ids(first[0])
    await real.serve_presets(DEFAULTS.format(model=folder, token=digit))
    second = await said(real, "m")
    assert first[0] not in second, "its token is banned"
    assert await said(real, "m", logit_bias={}) == first
    assert await said(real, "m", grammar='root ::= "own"') == "own"
    assert await said(real, "m", response_format={"type": "text"}) not in (first, second)
    completion = await real.client.post("/completion", json={"model": "m", "prompt": "x", "n_predict": 8})
    assert completion.json()["content"].endswith("!")
    text = await real.client.post("/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": 8})
    assert text.json()["choices"][0]["text"].endswith("!")
