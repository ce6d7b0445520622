"""FastChat's worker calls, as FastChat's API server sends them."""

import itertools
import json
from typing import Any

import pytest

from tests.worker.fake_engine import SCRIPT, FakeEngine
from tests.worker.serving import Serving, bare_tokenizer, serving, tokenizer
from tests.worker.speaking import THINKING

PATH = "/worker_generate_stream"
CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe {kind}.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


async def frames(world: Serving, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with world.client.post(world.url + PATH, json=body) as answer:
        assert answer.status == 200, await answer.text()
        data = await answer.read()
    assert data.endswith(b"\0")
    return [json.loads(each) for each in data[:-1].split(b"\0")]


@pytest.mark.parametrize("echo", [None, True, False])
async def test_each_frame_has_all_of_the_text_so_far(echo: bool | None) -> None:
    async with serving() as world:
        body = {"model": "tiny", "prompt": "hi ", "max_new_tokens": 12, "echo": echo, "stream": False}
        received = await frames(world, body)
        begin = "" if echo is False else "hi "
        texts = [each["text"] for each in received]
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        assert f"{begin}0 {SCRIPT}".startswith(texts[-1].rstrip("\ufffd"))
        assert {each["error_code"] for each in received} == {0}
        assert [each["finish_reason"] for each in received] == [None] * (len(received) - 1) + ["length"]
        assert received[-1]["usage"]["completion_tokens"] == 12
        assert received[-1]["usage"]["total_tokens"] == received[-1]["usage"]["prompt_tokens"] + 12
        status, _, whole = await world.post("/worker_generate", body)
        assert (status, whole) == (200, received[-1])


async def test_requests_without_parameters_get_fastchats_defaults() -> None:
    async with serving(sampling='{"temp": 0.3, "top-k": 5}') as world:
        await world.post("/worker_generate", {"prompt": "hi"})
        await world.post("/worker_generate", {"prompt": "hi", "top_p": 0, "temperature": 0.7, "max_new_tokens": 3})
        await world.post("/worker_generate", {"prompt": "hi", "temperature": 1e-6, "stop": "fox", "top_k": 4})
        first, greedy, cold = world.engine.requests
        assert (first.max_tokens, first.sampling.temperature, first.sampling.top_k) == (256, 1.0, 0)
        assert (first.sampling.top_p, first.sampling.repetition_penalty) == (1.0, 1.0)
        assert (greedy.max_tokens, greedy.sampling.temperature, greedy.sampling.top_p) == (3, 0.0, 1.0)
        assert (cold.sampling.temperature, cold.stop) == (0.0, ("fox",))


async def test_logprobs_are_growing_arrays() -> None:
    async with serving() as world:
        received = await frames(world, {"prompt": "hi ", "max_new_tokens": 5, "logprobs": 1})
        last = received[-1]["logprobs"]
        assert {len(last[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {5}
        assert last["text_offset"][0] == 3
        assert received[0]["logprobs"]["tokens"] == last["tokens"][:1]


async def test_a_prompt_over_the_context_is_error_40303() -> None:
    async with serving(FakeEngine(tokenizer(), ctx_size=16)) as world:
        body = {"prompt": "far too long " * 40}
        status, _, answer = await world.post("/worker_generate", body)
        assert (status, answer["error_code"]) == (400, 40303)
        assert "maximum context length is 16 tokens" in answer["text"]
        async with world.client.post(world.url + PATH, json=body) as streamed:
            data = await streamed.read()
        assert data.endswith(b"\0"), "its clients look at frames, and at no status"
        assert json.loads(data[:-1]) == answer


@pytest.mark.parametrize("field", [{"images": ["x"]}, {"best_of": 2}, {"use_beam_search": True}])
async def test_unsupported_fields_are_rejected_in_fastchats_format(field: dict[str, Any]) -> None:
    async with serving() as world:
        status, _, answer = await world.post("/worker_generate", {"prompt": "hi", **field})
        assert (status, answer["error_code"]) == (400, 40001)
        assert next(iter(field)) in answer["text"]


async def test_a_failed_stream_ends_with_an_error_frame() -> None:
    async with serving() as world:
        data = await world.failed_stream(PATH, {"prompt": "fail-later"})
        last = json.loads(data.removesuffix(b"\0").rpartition(b"\0")[2])
        assert last["error_code"] == 50001
        assert "logits" in last["text"]


async def test_tokens_are_counted() -> None:
    async with serving() as world:
        status, _, answer = await world.post("/count_token", {"model": "tiny", "prompt": "a b c"})
        assert status == 200
        assert answer == {"count": len(world.engine.tokenizer("a b c")["input_ids"]), "error_code": 0}
        status, _, answer = await world.post("/count_token", {"prompt": 5})
        assert (status, answer["error_code"]) == (400, 40302)


def laid_out(conv: dict[str, Any], messages: list[tuple[str, str | None]], system: str | None = None) -> str:
    """Return a prompt as FastChat's Conversation lays it out: role, message and two alternating separators."""
    text = str(conv["system_template"]).format(system_message=conv["system_message"] if system is None else system)
    for number, (role, message) in enumerate(messages):
        text += role if message is None else role + message + (conv["sep"], conv["sep2"])[number % 2]
    return text


@pytest.mark.parametrize("template", [CHATML, PLAIN, ""])
async def test_separators_give_the_same_prompt_as_the_template(template: str) -> None:
    async with serving(chat_template=template) as world:
        status, _, answer = await world.post("/worker_get_conv_template", {"model": "tiny"})
        assert status == 200, answer
        conv = answer["conv"]
        assert conv["sep_style"] == 5
        user, assistant = conv["roles"]
        chat = [("user", "one"), ("assistant", "two"), ("user", "three")]
        roles = {"user": user, "assistant": assistant}
        for system in (None, "Be brief, {name}."):
            if system is not None and template == PLAIN:
                continue
            asked = [] if system is None else [{"role": "system", "content": system}]
            asked += [{"role": role, "content": text} for role, text in chat]
            _, _, rendered = await world.post("/apply-template", {"messages": asked})
            begins = str(world.engine.tokenizer.bos_token)
            found = laid_out(conv, [*((roles[role], text) for role, text in chat), (assistant, None)], system)
            if system is None and template == "":
                continue  # without a system message it has no header for one, which FastChat cannot say
            assert found == rendered["prompt"].removeprefix(begins)


async def test_a_template_that_separators_cannot_express_is_rejected() -> None:
    repeats = "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"
    async with serving(chat_template=repeats) as world:
        status, _, answer = await world.post("/worker_get_conv_template", {})
        assert (status, answer["error_code"]) == (501, 50001)
        assert "/v1/chat/completions" in answer["text"]
    async with serving(chat_template=THINKING) as world:
        status, _, answer = await world.post("/worker_get_conv_template", {})
        assert status == 501, "the prompt of an answer differs from the text before a past answer"
    async with serving(FakeEngine(bare_tokenizer())) as world:
        status, _, answer = await world.post("/worker_get_conv_template", {})
        assert status == 501
