"""llama-server's `/completion`, `/infill` and `/apply-template`: parsing of bodies and serialization of answers."""

import math
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tests import tiny
from tests.worker import serving
from tests.worker.fake_engine import SCRIPT, FakeEngine
from tests.worker.speaking import model, only
from worker.api import llama_server
from worker.api.call import GenerationCall
from worker.api.served_model import ServedModel
from worker.errors import RequestError, UnsupportedByModel
from worker.interface import Grammar

PROMPT = {"prompt": "hi"}


async def read(body: dict[str, Any], **settings: Any) -> GenerationCall:
    return await llama_server.completion({**PROMPT, **body}, model(**settings))


async def test_a_completion_has_llama_servers_fields() -> None:
    async with serving.serving() as world:
        status, _, answer = await world.post("/completion", {**PROMPT, "n_predict": 4, "return_tokens": True})
        assert status == 200
        assert answer["content"] == f"0 {SCRIPT}"[: len(answer["content"])]
        assert answer["stop"] is True
        assert (answer["stop_type"], answer["stopping_word"], answer["truncated"]) == ("limit", "", False)
        assert (answer["tokens_predicted"], answer["tokens_evaluated"], len(answer["tokens"])) == (4, 2, 4)
        assert (answer["model"], answer["prompt"], answer["index"]) == ("tiny", "hi", 0)
        assert answer["generation_settings"]["n_predict"] == 4
        assert answer["timings"]["predicted_n"] == 4
        assert "completion_probabilities" not in answer


async def test_the_stop_type_is_reported() -> None:
    async with serving.serving() as world:
        _, _, ended = await world.post("/completion", PROMPT)
        assert (ended["stop_type"], ended["stopping_word"]) == ("eos", "")
        _, _, stopped = await world.post("/completions", {**PROMPT, "stop": ["fox"]})
        assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", "fox")
        assert "fox" not in stopped["content"]


@pytest.mark.parametrize("body", [{}, {"n_predict": 9}, {"stop": ["lazy"]}, {"n_probs": 2, "return_tokens": True}])
async def test_the_chunks_of_a_stream_add_up_to_the_full_answer(body: dict[str, Any]) -> None:
    async with serving.serving() as world:
        _, _, whole = await world.post("/completion", {**PROMPT, **body})
        chunks = serving.chunks(await world.stream("/completion", {**PROMPT, **body}))
        assert "".join(chunk["content"] for chunk in chunks) == whole["content"]
        assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        _, _, counted = await world.post("/completion", {**PROMPT, **body, "return_tokens": True})
        assert [token for chunk in chunks for token in chunk["tokens"]] == counted["tokens"]
        assert whole["tokens"] == (counted["tokens"] if "return_tokens" in body else [])
        assert chunks[-1]["stop_type"] == whole["stop_type"]
        received = [each for chunk in chunks[:-1] for each in chunk.get("completion_probabilities", [])]
        assert received == whole.get("completion_probabilities", [])
        assert "completion_probabilities" not in chunks[-1]


async def test_several_prompts_or_choices_are_a_list_in_order() -> None:
    async with serving.serving() as world:
        _, _, answers = await world.post("/completion", {"prompt": ["a", "b b b"], "n": 2, "n_predict": 3})
        assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
        assert [answer["prompt"] for answer in answers] == ["a", "a", "b b b", "b b b"]
        assert [answer["content"][0] for answer in answers] == ["0", "1", "0", "1"]
        chunks = serving.chunks(await world.stream("/completion", {"prompt": ["a", "b"], "n_predict": 3}))
        assert sorted(chunk["index"] for chunk in chunks if chunk["stop"]) == [0, 1]


async def test_prompts_may_be_texts_token_ids_and_mixed_lists() -> None:
    made = model()
    limit = made.prompt_limit("prompt")
    [hi], [there] = await made.encode(["hi"], limit), await made.encode([" there"], limit, add_special=False)
    whole = [*hi, *there]
    for prompt in (whole, ["hi", " there"], [*hi, " there"], ["hi", *there]):
        call = await llama_server.completion({"prompt": [prompt] if prompt == ["hi", " there"] else prompt}, made)
        assert call.generations[0].prompt == tuple(whole)
    call = await llama_server.completion({"prompt": [whole, "hi", ["hi", *there]]}, made)
    assert [each.prompt for each in call.generations] == [tuple(whole), tuple(hi), tuple(whole)]


async def test_response_fields_select_the_fields_of_the_answer() -> None:
    async with serving.serving() as world:
        body = {**PROMPT, "n_predict": 4, "response_fields": ["content", "generation_settings/n_predict", "no/such"]}
        _, _, answer = await world.post("/completion", body)
        assert answer.keys() == {"content", "generation_settings/n_predict"}
        assert answer["generation_settings/n_predict"] == 4
        chunks = serving.chunks(await world.stream("/completion", body))
        assert chunks[-1] == {"content": "", "generation_settings/n_predict": 4}
        _, _, answer = await world.post("/completion", {**body, "response_fields": []})
        assert "timings" in answer


async def test_a_bias_of_a_text_applies_to_each_of_its_tokens() -> None:
    made = model()
    ids = made.encode_piece("hi there")
    call = await llama_server.completion({**PROMPT, "logit_bias": [["hi there", False], [4, 2]]}, made)
    assert call.generations[0].sampling.logit_bias == {**dict.fromkeys(ids, -100.0), 4: 2.0}


async def test_every_field_of_a_completion_reaches_the_engine() -> None:
    body = {
        "n_predict": -1, "temperature": 0.5, "top_k": 7, "min_p": 0.1, "repeat_penalty": 1.1, "repeat_last_n": 8,
        "seed": 5, "n_probs": 3, "stop": ["x"], "ignore_eos": True, "logit_bias": [[4, 2.0], [5, False]],
        "json_schema": {"type": "integer"}, "cache_prompt": True, "id_slot": 0, "samplers": [],
    }  # fmt: skip
    call = await read(body, strict_fields=True)
    (generation,) = call.generations
    sampling = generation.sampling
    assert generation.max_tokens is None
    assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (0.5, 7, 0.1, 1.1)
    assert (sampling.seed, sampling.logprobs, sampling.ignore_eos, generation.stop) == (5, 3, True, ("x",))
    assert sampling.logit_bias == {4: 2.0, 5: -100.0}
    assert generation.grammar == Grammar("json_schema", '{"type":"integer"}')
    assert call.ignored == ()
    assert (await read({"n_predict": 0})).generations[0].max_tokens == 0
    assert (await read({}, n_predict=6)).generations[0].max_tokens == 6
    assert (await read({"prompt": [5, 6]})).generations[0].prompt == (5, 6)
    plain = (await read({"prompt": ["a b", "c"]})).generations
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]
    for first in ({"prompt_string": "a b", "multimodal_data": []}, {"content": "a b"}, {"content": parts}):
        spelt = await read({"prompt": [first, {"prompt_string": "c"}]}, strict_fields=True)
        assert [each.prompt for each in spelt.generations] == [each.prompt for each in plain]
    mixed = await read({"prompt": {"prompt_string": [5, "c"]}})
    assert [each.prompt for each in mixed.generations] == [
        each.prompt for each in (await read({"prompt": [5, "c"]})).generations
    ]


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"prompt": {"prompt_string": 5}}, "prompt", "invalid_value"),
        ({"prompt": [{"content": []}]}, "prompt", "invalid_value"),
        ({"prompt": {"content": ["a"]}}, "prompt", "invalid_value"),
        ({"prompt": {"content": [{"type": "text", "text": 5}]}}, "prompt", "invalid_value"),
        ({"prompt": {"content": [{"type": ["x"]}]}}, "prompt", "unsupported_parameter"),
        ({"prompt": {"content": [{"type": "image_url", "image_url": {}}]}}, "prompt", "unsupported_parameter"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["aGk="]}}, "prompt", "unsupported_parameter"),
        ({"n": 2, "n_cmpl": 3}, "n_cmpl", "invalid_value"),
        ({"samplers": ["top_q"]}, "samplers", "invalid_value"),
        ({"logit_bias": [["", 1.0]]}, "logit_bias", "invalid_value"),
        ({"logit_bias": [["x" * 129, 1.0]]}, "logit_bias", "invalid_value"),
    ],
)
async def test_an_unsupported_or_invalid_field_is_rejected_by_name(
    body: dict[str, Any], param: str, reason: str
) -> None:
    with pytest.raises(RequestError) as caught:
        await read(body)
    assert (caught.value.param, caught.value.reason) == (param, reason)


async def test_a_progress_chunk_has_the_timings_so_far_on_request() -> None:
    async with serving.serving() as world:
        world.engine.gate.set()
        asked = {"prompt": "prefill it now", "n_predict": 1, "return_progress": True}
        for further in ({}, {"timings_per_token": True}):
            received = serving.chunks(await world.stream("/completion", {**asked, **further}))
            timed = ["timings" in chunk for chunk in received if "prompt_progress" in chunk]
            assert timed == [bool(further)] * 2
        plain = serving.chunks(await world.stream("/completion", {"prompt": "prefill it now", "n_predict": 1}))
        assert not any("prompt_progress" in chunk for chunk in plain)


async def test_an_answer_that_fills_the_context_is_reported_as_truncated() -> None:
    async with serving.serving(FakeEngine(serving.tokenizer(), ctx_size=16)) as world:
        _, _, answer = await world.post("/completion", PROMPT)
        assert (answer["stop_type"], answer["truncated"]) == ("limit", True)
        _, _, answer = await world.post("/completion", {**PROMPT, "n_predict": 3})
        assert (answer["stop_type"], answer["truncated"]) == ("limit", False)


async def test_the_number_of_choices_has_two_names() -> None:
    assert [(await read(body)).generations[0].n for body in ({"n": 2}, {"n_cmpl": 2}, {"n": 2, "n_cmpl": 2})] == [2] * 3


async def test_post_sampling_probabilities_replace_logprobs() -> None:
    async with serving.serving() as world:
        body = {**PROMPT, "n_predict": 2, "n_probs": 3, "post_sampling_probs": True}
        _, _, answer = await world.post("/completion", body)
        assert answer["generation_settings"]["post_sampling_probs"] is True
        for each in answer["completion_probabilities"]:
            assert each["prob"] == pytest.approx(math.exp(-1.0)), "the fake's, which it has in logprobs"
            assert each.keys() == {"id", "token", "bytes", "prob", "top_probs"}
            assert [top.keys() for top in each["top_probs"]] == [{"id", "token", "bytes", "prob"}] * 3
    (generation,) = (await read({"post_sampling_probs": True, "n_probs": 1})).generations
    assert generation.sampling.post_sampling_logprobs


FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
GAP = {"input_prefix": "ab", "input_suffix": "yz", "prompt": "c"}


def coder(*further: str) -> ServedModel:
    tokenizer = tiny.make_tokenizer("llama")
    tokenizer.add_special_tokens({"additional_special_tokens": [*FIM, *further]})
    return ServedModel(FakeEngine(tokenizer), tokenizer, serving.options())


async def gap(body: dict[str, Any], made: ServedModel) -> str:
    (generation,) = (await llama_server.infill({**GAP, **body}, made)).generations
    return made.decode(generation.prompt)


async def test_infill_uses_the_layout_of_the_model() -> None:
    assert await gap({}, coder()) == "<s><|fim_prefix|>ab<|fim_suffix|>yz<|fim_middle|>c"
    assert await gap({"prompt": None}, coder()) == "<s><|fim_prefix|>ab<|fim_suffix|>yz<|fim_middle|>"
    extra = {"input_extra": [{"filename": "a.h", "text": "int a;"}, {"text": "b"}]}
    received = await gap(extra, coder("<|repo_name|>", "<|file_sep|>"))
    files = "<|repo_name|>myproject\n<|file_sep|>a.h\nint a;<|file_sep|>tmp\nb<|file_sep|>filename\n"
    assert received == f"<s>{files}<|fim_prefix|>ab<|fim_suffix|>yz<|fim_middle|>c"
    received = await gap(extra, coder())
    assert received.startswith("<s>\n\n--- snippet ---\n\nint a;\n\n--- snippet ---\n\nb<|fim_prefix|>ab")


async def test_infill_accepts_the_fields_of_completions() -> None:
    made = coder()
    call = await llama_server.infill({**GAP, "n_predict": 3, "stop": ["x"], "temperature": 0}, made)
    assert (call.generations[0].max_tokens, call.generations[0].stop) == (3, ("x",))
    assert isinstance(made.engine, FakeEngine)
    async with serving.serving(made.engine) as world:
        status, _, answer = await world.post("/infill", {**GAP, "n_predict": 3})
        assert (status, answer["stop_type"], answer["tokens_predicted"]) == (200, "limit", 3)
        chunks = serving.chunks(await world.stream("/infill", {**GAP, "n_predict": 3}))
        assert "".join(chunk["content"] for chunk in chunks) == answer["content"]


async def test_the_requests_of_editor_plugins_are_answered() -> None:
    """The members that llama.vim and llama.vscode send."""
    made = coder()
    shown = ["content", "timings/prompt_n", "timings/predicted_ms", "truncated", "tokens_cached"]
    body = {
        **GAP, "input_extra": [{"filename": "a.h", "text": "int a;"}], "n_predict": 3, "stop": [], "n_indent": 4,
        "top_k": 40, "top_p": 0.99, "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True,
        "t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "model": "",
        "response_fields": shown,
    }  # fmt: skip
    assert isinstance(made.engine, FakeEngine)
    async with serving.serving(made.engine) as world:
        status, headers, answer = await world.post("/infill", body)
    assert (status, set(answer)) == (200, set(shown))
    ignored = {"samplers[infill]", "n_indent", "t_max_prompt_ms", "t_max_predict_ms"}
    assert set(headers["X-Ignored-Fields"].split(",")) == ignored


async def test_infill_needs_fill_in_the_middle_tokens() -> None:
    with pytest.raises(UnsupportedByModel, match="fill-in-the-middle"):
        await llama_server.infill(GAP, model())


async def test_apply_template_shows_the_prompt_of_a_chat_as_a_completion_takes_it() -> None:
    chat = serving.chat("hi", temperature=0.5, stream=True, max_tokens=3, stop=["x"], model="m", wibble=1)
    made = model()
    result = await llama_server.apply_template(chat, made)
    assert result.body == {"prompt": "<|user|>\nhi\n<|assistant|>\n"}
    assert result.ignored == ("wibble",)
    [completion] = (await llama_server.completion(result.body, made)).generations
    assert completion.prompt == (await only(serving.chat("hi"), made)).prompt


async def test_apply_template_needs_no_token_for_a_question_mark() -> None:
    """A tokenizer of a small alphabet, as of proteins, drops all other characters. It does not add its first token."""
    fast: Any = PreTrainedTokenizerFast
    made = fast(tokenizer_object=Tokenizer(BPE({"a": 0, "c": 1}, [])), bos_token="a")
    served = ServedModel(
        FakeEngine(serving.tokenizer()), made, serving.options(chat_template="{{ messages[0].content }}")
    )
    result = await llama_server.apply_template(serving.chat("ac"), served)
    assert result.body == {"prompt": "ac"}
