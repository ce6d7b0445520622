"""The requests of FastChat's API server in their order: a real router is its controller and its worker."""

import json
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests import tiny
from tests.processes.routers import Router

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def up(real: Router) -> AsyncIterator[Router]:
    tiny.make("llama", real.models / "chat")
    await real.serve_presets("[*]\nctx-size = 128\n")
    yield real
    shutil.rmtree(real.models / "chat")


async def post(up: Router, url: str, body: Any = None) -> Any:
    response = await (up.client.post(url) if body is None else up.client.post(url, json=body))
    assert response.status_code == 200, response.text
    return response.json()


async def parameters(up: Router, address: str, **further: Any) -> dict[str, Any]:
    """The body of a generation for CHAT: the prompt by the separators that the router returned."""
    conv = (await post(up, f"{address}/worker_get_conv_template", {"model": "chat"}))["conv"]
    assert conv["sep_style"] == 5  # NO_COLON_TWO
    user, assistant = conv["roles"]
    system, question = [message["content"] for message in CHAT]
    prompt = f"{conv['system_template'].format(system_message=system)}{user}{question}{conv['sep']}{assistant}"
    return {
        "model": "chat", "prompt": prompt, "temperature": 0.0, "logprobs": None, "top_p": 1.0, "top_k": -1,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "max_new_tokens": 8, "echo": False,
        "stop_token_ids": conv["stop_token_ids"], "stop": [], **further,
    }  # fmt: skip


async def test_a_chat_goes_through_fastchats_api_server_as_it_does_directly(up: Router) -> None:
    controller = str(up.client.base_url).rstrip("/")
    assert await post(up, f"{controller}/refresh_all_workers") is None
    assert (await post(up, f"{controller}/list_models"))["models"] == ["chat"]
    address = (await post(up, f"{controller}/get_worker_address", {"model": "chat"}))["address"]
    assert address == controller
    body = await parameters(up, address)
    assert (await post(up, f"{address}/model_details", {"model": "chat"})) == {"context_length": 128}
    count = (await post(up, f"{address}/count_token", {"model": "chat", "prompt": body["prompt"]}))["count"]
    whole = await post(up, f"{address}/worker_generate", body)
    assert (whole["error_code"], whole["usage"]["prompt_tokens"]) == (0, count)
    # FastChat has defaults of its own: those of the checkpoint do not count.
    direct = {
        "model": "chat", "messages": CHAT, "temperature": 0, "max_tokens": 8, "top_k": -1, "repetition_penalty": 1.0,
    }  # fmt: skip
    message = (await post(up, f"{controller}/v1/chat/completions", direct))["choices"][0]["message"]
    assert whole["text"] == message["content"]
    async with up.client.stream("POST", f"{address}/worker_generate_stream", json=body) as response:
        frames = [json.loads(frame) for frame in (await response.aread()).removesuffix(b"\0").split(b"\0")]
    assert (frames[-1]["text"], frames[-1]["finish_reason"]) == (whole["text"], "length")
