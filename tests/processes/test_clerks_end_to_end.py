"""What only takes a tokenizer is answered for models that may not be loaded, in the words of their workers."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests import tiny, tiny_vision
from tests.processes.routers import DEADLINE, Router, error_of, gone, router

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

ODD = "héllo <s> wörld 🙂\u0000\u202e ﷽ </s> naïve\r\n\tend"
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<s>{{ m.role }}:"
    " {{ m.content }}{% if m.tool_calls %}{{ m.tool_calls }}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant{{ word }}:{% endif %}"
)
TOOL = {"name": "look", "description": "Look it up.", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
SAID = [
    {"role": "system", "content": "Be odd. " + ODD},
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": ODD}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "42"},
]
ASKED = [{"role": "user", "content": ODD}]
PICTURE = {"type": "image_url", "image_url": {"url": tiny_vision.data_url(tiny_vision.picture())}}
SEEN = [{"role": "user", "content": [PICTURE, {"type": "text", "text": "What is it?"}, PICTURE]}]
CHAT = "/v1/chat/completions/input_tokens"
QUESTIONS: list[tuple[str, Any]] = [
    ("/tokenize", {"content": ODD}),
    ("/tokenize", {"content": ODD, "add_special": True, "parse_special": False, "with_pieces": True}),
    ("/tokenize", {"content": [5, ODD, 6, "UPPER"], "add_special": True, "nonsense": 1}),
    ("/tokenize", {"content": "word " * 50_000}),
    ("/tokenize", {"content": ""}),
    ("/tokenize", {"content": [1 << 40]}),
    ("/tokenize", {"content": 7}),
    ("/tokenize", {"prompt": ODD, "return_token_strs": True}),
    ("/tokenize", {"messages": ASKED, "add_special_tokens": True}),
    ("/tokenize", {"messages": SEEN}),
    ("/detokenize", {"tokens": [0, 1, 300, 17, 255, 200]}),
    ("/detokenize", {"tokens": [-1]}),
    ("/detokenize", {}),
    ("/apply-template", {"messages": SAID, "chat_template_kwargs": {"word": "!"}}),
    ("/apply-template", {"messages": ASKED, "add_generation_prompt": False}),
    ("/apply-template", {"messages": SEEN}),
    ("/apply-template", {"messages": []}),
    (CHAT, {"messages": SAID, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "auto"}),
    (CHAT, {"messages": ASKED, "temperature": 0.5, "nonsense": True}),
    (CHAT, {"messages": SEEN}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}),
    (CHAT, {"messages": [{"role": "nobody", "content": ""}]}),
    ("/chat/completions/input_tokens", {"messages": ASKED}),
    (
        "/v1/responses/input_tokens",
        {"input": ODD, "instructions": "Be brief.", "tools": [{"type": "function", **TOOL}]},
    ),
    ("/v1/responses/input_tokens", {"input": "x", "store": True}),
    ("/responses/input_tokens", {"input": [{"role": "user", "content": ODD}]}),
    ("/v1/messages/count_tokens", {"messages": ASKED, "system": [{"type": "text", "text": ODD}]}),
    ("/v1/messages/count_tokens", {"messages": ASKED, "tools": [{"name": "look", "input_schema": {"type": "object"}}]}),
    ("/v1/messages/count_tokens", {"messages": []}),
    ("/count_token", {"prompt": ODD}),
    ("/count_token", {"prompt": None}),
    ("/worker_get_conv_template", {}),
    ("/api/v1/token_check", {"prompts": [{"prompt": ODD, "max_tokens": 5}]}),
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def forking(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Router]:
    """A router that loads nothing unasked, with a model for texts, one that sees, and one that embeds. Only the second
    is forked, and has torch: nobody forks what has an environment of its own."""
    folder = tmp_path_factory.mktemp("models")
    tiny.make("llama", folder / "chat")
    tiny_vision.make("llava", folder / "eyes")
    embedder = tiny.make("bert-embed", folder / "embed")
    (embedder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 256, "do_lower_case": True}))
    lines = ["[*]", "autoload = off", "[eyes]", f"model = {folder / 'eyes'}"]
    lines += ["[embed]", "env.A = B", f"model = {folder / 'embed'}"]
    lines += ["[chat]", "env.A = B", f"model = {folder / 'chat'}", f"chat-template = {TEMPLATE}"]
    (folder / "models.ini").write_text("\n".join(lines) + "\n")
    async with router("--models-preset", str(folder / "models.ini"), "--nursery", folder=folder) as up:
        await up.says("is warm")
        yield up


async def ask(up: Router, model: str) -> list[tuple[str, Any, int, dict[str, Any], bytes]]:
    """What a model answers to each question: path, question, status, headers that mean something, body."""
    answers = []
    for path, question in QUESTIONS:
        body: dict[str, Any] = {"model": model, **question}
        if path == "/api/v1/token_check":
            body = {"prompts": [{**each, "model": model} for each in question["prompts"]]}
        told = await up.client.post(path, json=body, headers={"X-Request-Id": "the-same"})
        names = ("content-type", "x-ignored-fields", "x-should-retry", "retry-after", "x-router-model")
        headers = {name: told.headers.get(name) for name in names}
        answers.append((path, question, told.status_code, headers, told.content))
    return answers


async def clerks(up: Router) -> dict[str, Any]:
    """Clerks by model."""
    state = (await up.client.get("/router/state")).json()
    return {each["model"]: each for each in state["clerks"]}


@pytest.mark.parametrize("model", ["chat", "eyes", "embed"])
async def test_a_clerk_answers_byte_for_byte_as_the_worker_does(forking: Router, model: str) -> None:
    of_clerk = await ask(forking, model)
    status = await forking.status(model)
    assert (status["value"], status["clerk"]["state"]) == ("unloaded", "ready")
    assert (await clerks(forking))[model]["state"] == "ready"
    load = await forking.client.post("/models/load?wait=1", json={"model": model})
    assert load.status_code == 200, load.text
    for mine, other in zip(of_clerk, await ask(forking, model), strict=True):
        assert mine == other
    statuses = [status for _, _, status, _, _ in of_clerk]
    assert statuses.count(200) >= 8
    assert statuses.count(400) >= 7
    assert model not in await clerks(forking), "it ends once its model is loaded"
    unload = await forking.client.post("/models/unload?wait=1", json={"model": model})
    assert unload.status_code == 200, unload.text


async def test_images_are_counted_without_the_model(forking: Router) -> None:
    plain = [{"role": "user", "content": "What is it?"}]
    counted = [await forking.client.post(CHAT, json={"model": "eyes", "messages": each}) for each in (plain, SEEN)]
    few, many = (each.json()["input_tokens"] for each in counted)
    assert many > few + 16
    broken = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]
    told = await forking.client.post(CHAT, json={"model": "eyes", "messages": broken})
    assert (told.status_code, told.json()["error"]["reason"]) == (400, "invalid_value")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with presets of one model, `a`, and its snapshot."""
    folder = tmp_path_factory.mktemp("single")
    tiny.make("llama", folder / "a")
    (folder / "models.ini").write_text(f"[a]\nmodel = {folder / 'a'}\n")
    return folder


async def test_counting_never_loads_whoever_is_killed_and_dies_with_the_router(single: Path) -> None:
    question = {"model": "a", "messages": ASKED}
    async with router("--models-preset", str(single / "models.ini")) as up:
        post = up.client.post
        assert (await post("/v1/messages/count_tokens", json=question)).json()["input_tokens"] > 9
        assert (await post("/tokenize?autoload=false", json={"model": "a", "content": "x"})).status_code == 200
        assert await up.workers() == {}
        assert 'router_clerks{model="a"} 1.0' in (await up.client.get("/metrics")).text
        first = (await clerks(up))["a"]
        assert 0 < first["measured"]["cpu"] < 160 << 20, "torch alone would be more"
        os.kill(first["pid"], signal.SIGKILL)
        again = await asyncio.gather(*(post(CHAT, json=question) for _ in range(8)))
        assert {each.status_code for each in again} == {200}
        second = (await clerks(up))["a"]
        assert second["pid"] != first["pid"]
        await up.end(signal.SIGKILL)
        assert await gone([second["pid"]], within=DEADLINE)


async def test_a_reload_and_changed_files_change_what_is_counted(single: Path) -> None:
    file, tokenizer = single / "models.ini", single / "a" / "tokenizer.json"
    async with router("--models-preset", str(file), "--no-models-autoload") as up:

        async def post(path: str, **question: Any) -> httpx.Response:
            return await up.client.post(path, json={"model": "a", **question})

        assert "said it" not in (await post("/apply-template", messages=ASKED)).json()["prompt"]
        file.write_text(file.read_text() + "chat-template = {{ messages[0].role }} said it\n")
        await up.client.post("/router/reload")
        assert (await post("/apply-template", messages=ASKED)).json() == {"prompt": "user said it"}
        usual = tokenizer.read_text()
        tokenizer.write_text("{}")
        await up.client.post("/router/reload")
        told = await post("/tokenize", content="x")
        assert error_of(told) == (500, "load_failed")
        assert "has no tokenizer that can be loaded" in told.json()["error"]["message"]
        tokenizer.write_text(usual)
        assert (await post("/tokenize", content="x")).status_code == 200
        assert (await up.status("a"))["value"] == "unloaded"
