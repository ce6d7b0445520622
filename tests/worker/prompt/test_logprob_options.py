"""vLLM's fields for logprobs, token ids, the end of an answer and truncation of the prompt."""

from typing import Any

import pytest

from tests.worker.serving import chunks, serving
from tests.worker.speaking import CHAT, THINKING, Speaking, model, only, streamed, whole
from worker.api import openai
from worker.api.served_model import ServedModel
from worker.errors import ContextExceeded


async def said(made: ServedModel, body: dict[str, Any]) -> Any:
    return await whole(await openai.completions({"prompt": "Grün", **body}, made), made.engine)


async def test_logprobs_of_a_prompt_are_by_token_id_with_ranks() -> None:
    made = model()
    [choice] = (await said(made, {"max_tokens": 1, "prompt_logprobs": 2}))["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert len(others) == len(made.tokenizer("Grün")["input_ids"]) - 1
    [g] = made.tokenizer.encode("G", add_special_tokens=False)
    assert others[0][str(g)] == {"logprob": -0.5, "rank": None, "decoded_token": "G"}
    ranks = [each["rank"] for id, each in others[0].items() if id != str(g)]
    assert ranks == [1, 2], "the fake's alternatives are never the token itself"
    assert choice["logprobs"] is None, "logprobs of the answer were not requested"


async def test_answer_and_prompt_have_their_own_numbers_of_alternatives() -> None:
    made = model()
    body = {"max_tokens": 2, "prompt_logprobs": 3, "logprobs": 1}
    [choice] = (await said(made, body))["choices"]
    assert {len(each) for each in choice["logprobs"]["top_logprobs"]} == {2}, "one, and the token itself"
    assert {len(each) for each in choice["prompt_logprobs"][1:]} == {4}
    echoed = (await said(made, {**body, "echo": True}))["choices"][0]["logprobs"]["top_logprobs"]
    assert {len(each) for each in echoed[1:]} == {2}
    chat = await whole(await openai.chat({**CHAT, "max_tokens": 2, "prompt_logprobs": 0}, made), made.engine)
    assert chat["choices"][0]["logprobs"] is None
    assert {len(each) for each in chat["prompt_logprobs"][1:]} == {1}


@pytest.mark.parametrize("stop", [{}, {"max_tokens": 5}, {"stop": ["brown"]}])
async def test_token_ids_include_all_computed_tokens(stop: dict[str, Any]) -> None:
    made = model()
    body = {"prompt": ["ab", "c"], "n": 2, "return_token_ids": True, **stop}
    expected = await said(made, body)
    *chunks, _ = await streamed(await openai.completions({**body, "stream": True}, made), made.engine)
    for choice in expected["choices"]:
        mine = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert [id for one in mine for id in one["token_ids"]] == choice["token_ids"]
        assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert not any("prompt_token_ids" in one for one in mine[1:])
        text = made.decode(choice["token_ids"])
        assert text == choice["text"] if "stop" not in stop else text.startswith(choice["text"] + "b")
    chat = await whole(await openai.chat({**CHAT, "return_token_ids": True, **stop}, made), made.engine)
    *chunks, _ = await streamed(
        await openai.chat({**CHAT, "return_token_ids": True, "stream": True, **stop}, made), made.engine
    )
    assert chunks[0]["prompt_token_ids"] == chat["prompt_token_ids"]
    assert [id for each in chunks for id in each["choices"][0]["token_ids"]] == chat["choices"][0]["token_ids"]


async def test_logprobs_may_name_tokens_by_their_ids() -> None:
    made = model()
    ids = {"return_tokens_as_token_ids": True, "return_token_ids": True, "max_tokens": 3}
    [choice] = (await said(made, {**ids, "logprobs": 1}))["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{id}" for id in choice["token_ids"]]
    assert all(name.startswith("token_id:") for each in choice["logprobs"]["top_logprobs"] for name in each)
    chat = await whole(await openai.chat({**CHAT, **ids, "logprobs": True, "top_logprobs": 1}, made), made.engine)
    [choice] = chat["choices"]
    received = choice["logprobs"]["content"]
    assert [each["token"] for each in received] == [f"token_id:{id}" for id in choice["token_ids"]]
    assert all(top["token"].startswith("token_id:") for each in received for top in each["top_logprobs"])


async def test_every_chunk_has_the_usage_so_far_on_request() -> None:
    made = model()
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"max_tokens": 4, "stream": True, "stream_options": options}
    *chunks, usage, _ = await streamed(await openai.chat({**CHAT, **body}, made), made.engine)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1], usage["usage"]["completion_tokens"]) == (0, 4, 4), "the role is no token"
    assert not any("timings" in chunk for chunk in chunks[:-1]), "timings were not requested"
    body["stream_options"] = {"continuous_usage_stats": True}
    *chunks, _ = await streamed(await openai.chat({**CHAT, **body}, made), made.engine)
    assert not any("usage" in chunk for chunk in chunks), (
        "continuous_usage_stats has no effect without include_usage, as in vLLM"
    )


async def test_the_stop_is_part_of_the_answer_only_on_request() -> None:
    made = model()
    [space] = made.tokenizer.encode(" ", add_special_tokens=False)
    generation = await only({"stop_token_ids": [space], "include_stop_str_in_output": True}, made)
    assert (generation.ends, generation.include_stop) == (frozenset({space}), True)
    [choice] = (await said(made, {"stop": ["brown"], "include_stop_str_in_output": True}))["choices"]
    assert (choice["text"][-11:], choice["finish_reason"]) == ("quick brown", "stop")


async def test_special_tokens_are_shown_on_request() -> None:
    made = model()
    assert (await only({"skip_special_tokens": True}, made)).visible_special_tokens == frozenset()
    assert (await only({"skip_special_tokens": False}, made)).visible_special_tokens >= made.special_ids


async def test_a_prompt_is_truncated_only_on_request() -> None:
    made = model()
    long = {"prompt": "x" * 300, "max_tokens": 1, "echo": True}
    with pytest.raises(ContextExceeded):
        await openai.completions(long, made)
    [generation] = (await openai.completions({**long, "truncate_prompt_tokens": -1}, made)).generations
    assert len(generation.prompt) == made.max_prompt
    call = await openai.completions({"prompt": ["abc", "c"], "truncate_prompt_tokens": 2, "echo": True}, made)
    assert [made.decode(each.prompt) for each in call.generations] == ["bc", "<s>c"]
    assert [each["text"][:2] for each in (await whole(call, made.engine))["choices"]] == ["bc", "c0"]
    assert made.decode((await only({"truncate_prompt_tokens": 3}, made)).prompt) == "|>\n"
    first = {"prompt": "abc", "truncate_prompt_tokens": 2, "truncation_side": "right"}
    [generation] = (await openai.completions(first, made)).generations
    assert made.decode(generation.prompt) == "<s>a"
    assert (await openai.completions({"prompt": "a", "truncation_side": "left"}, made)).ignored == ("truncation_side",)


async def test_a_prompt_can_be_tokenized_without_special_tokens() -> None:
    made = model()
    [generation] = (await openai.completions({"prompt": "ab", "add_special_tokens": False}, made)).generations
    assert made.decode(generation.prompt) == "ab"
    [generation] = (await openai.completions({"prompt": ["ab", 5], "add_special_tokens": False}, made)).generations
    assert generation.prompt[0] != made.tokenizer.bos_token_id


async def test_documents_reach_templates_that_mention_them() -> None:
    documents = [{"title": "Oslo", "text": "rains"}]
    call = await openai.chat({**CHAT, "documents": documents}, model())
    assert call.ignored == ("documents",)
    made = model(chat_template="{% for d in documents or [] %}{{ d.title }} {{ d.text }}{% endfor %}!")
    call = await openai.chat({**CHAT, "documents": documents}, made)
    assert (made.decode(call.generations[0].prompt), call.ignored) == ("Oslo rains!", ())


@pytest.mark.parametrize("count", [-1, 21])
@pytest.mark.parametrize(
    ("path", "name", "body"),
    [
        ("/v1/chat/completions", "top_logprobs", {**CHAT, "logprobs": True}),
        ("/v1/chat/completions", "prompt_logprobs", CHAT),
        ("/v1/completions", "logprobs", {"prompt": "a"}),
        ("/completion", "n_probs", {"prompt": "a"}),
    ],
)
async def test_too_many_alternatives_are_rejected_with_the_remedy(
    path: str, name: str, body: dict[str, Any], count: int
) -> None:
    async with serving() as world:
        status, _, received = await world.post(path, {**body, name: count})
        assert (status, received["error"]["param"]) == (400, name)
        assert received["error"]["message"] == (
            f"{name} must be between 0 and 20, the model's max-logprobs; its preset may allow more"
        )


async def test_reasoning_is_left_out_on_request() -> None:
    path, body = "/v1/chat/completions", {**CHAT, "include_reasoning": False, "stream_options": {"include_usage": True}}
    async with serving(Speaking("They ask.</think>\n\nLet me look."), chat_template=THINKING) as world:
        _, headers, answer = await world.post(path, {**CHAT, "include_reasoning": False})
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Let me look.", "refusal": None}
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        assert "X-Ignored-Fields" not in headers
        received = chunks(await world.stream(path, body))
        deltas = [each["choices"][0]["delta"] for each in received if each != "[DONE]" and each["choices"]]
        assert not any(delta.keys() & {"reasoning_content", "reasoning"} for delta in deltas)
        assert "".join(delta.get("content") or "" for delta in deltas) == "Let me look."
        _, _, shown = await world.post(path, {**CHAT, "include_reasoning": True})
        message = shown["choices"][0]["message"]
        assert (message["reasoning_content"], message["reasoning"]) == ("They ask.", "They ask.")
        status, _, refused = await world.post(path, {**CHAT, "include_reasoning": False, "reasoning_format": "none"})
        assert (status, refused["error"]["param"]) == (400, "include_reasoning")
