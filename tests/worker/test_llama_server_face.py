"""llama-server's service calls: /tokenize, /detokenize, /apply-template."""

from typing import Any

import pytest

from tests.worker import serving
from tests.worker.fake_engine import FakeEngine
from worker.errors import InvalidValue, RequestError, UnsupportedByModel
from worker.faces import LONG_TEXT, Model, llama_server

BOS = 0


def model(*, bare: bool = False, **settings: Any) -> Model:
    tokenizer = serving.bare_tokenizer() if bare else serving.tokenizer()
    return Model(FakeEngine(tokenizer), tokenizer, serving.options(**settings))


async def tokens(body: dict[str, Any]) -> Any:
    return (await llama_server.tokenize(body, model())).body["tokens"]


async def test_a_text_becomes_its_tokens_without_special_ones() -> None:
    expected = serving.tokenizer().encode("hi there", add_special_tokens=False)
    assert await tokens({"content": "hi there"}) == expected
    assert await tokens({"content": "hi there", "add_special": True}) == [BOS, *expected]
    assert await tokens({"content": ""}) == []


async def test_tokenize_takes_texts_and_token_ids_one_behind_another() -> None:
    hi, there = await tokens({"content": "hi"}), await tokens({"content": " there"})
    assert await tokens({"content": ["hi", 7, " there"]}) == [*hi, 7, *there]
    assert await tokens({"content": ["hi", " there"], "add_special": True}) == [BOS, *hi, *there]
    assert await tokens({"content": [7, "hi"], "add_special": True}) == [7, *hi]
    assert await tokens({"content": []}) == []


async def test_special_tokens_in_a_text_are_tokens_unless_told_otherwise() -> None:
    assert (await tokens({"content": "<s>"})) == [BOS]
    literal = await tokens({"content": "<s>", "parse_special": False})
    assert BOS not in literal
    assert serving.tokenizer().decode(literal) == "<s>"
    assert (await tokens({"content": "<s>"})) == [BOS]


async def test_reading_special_tokens_as_text_leaves_the_shared_tokenizer_as_it_was() -> None:
    made = model()
    await llama_server.tokenize({"content": "<s>", "parse_special": False}, made)
    assert made.tokenizer.backend_tokenizer.encode_special_tokens is False


async def test_pieces_are_text_or_the_bytes_of_a_part_of_a_character() -> None:
    pieces = await tokens({"content": "hi ü", "with_pieces": True})
    assert [each["piece"] for each in pieces] == ["hi", [0x20, 0xC3], [0xBC]]
    assert [each["id"] for each in pieces] == await tokens({"content": "hi ü"})


@pytest.mark.parametrize("text", ["hi there", "Grüße, 世界! 🦊", "", "  two  spaces ", "<s>x</s>"])
async def test_tokens_and_back_is_the_same_text(text: str) -> None:
    made = model()
    encoded = (await llama_server.tokenize({"content": text}, made)).body
    assert (await llama_server.detokenize(encoded, made)).body == {"content": text}


async def test_a_long_text_is_tokenized_like_a_short_one() -> None:
    text = "word " * (LONG_TEXT // 4)
    assert await tokens({"content": text}) == serving.tokenizer().encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "content"),
        ({"content": None}, "content"),
        ({"content": 5}, "content"),
        ({"content": [True]}, "content"),
        ({"content": [["a"]]}, "content"),
        ({"content": "a", "add_special": 1}, "add_special"),
        ({"content": "a", "parse_special": "no"}, "parse_special"),
        ({"content": "a", "with_pieces": 1}, "with_pieces"),
        ({"content": "a", "model": 1}, "model"),
    ],
    ids=str,
)
async def test_a_field_of_tokenize_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        await llama_server.tokenize(body, model())
    assert caught.value.param == param


@pytest.mark.parametrize("value", [None, 5, "5", [True], ["5"], [-1], [1.5], [10**6], [10**30], [None]], ids=str)
async def test_detokenize_takes_token_ids_of_this_model(value: Any) -> None:
    with pytest.raises(InvalidValue) as caught:
        await llama_server.detokenize({"tokens": value}, model())
    assert caught.value.param == "tokens"


async def test_apply_template_shows_the_prompt_of_a_chat() -> None:
    chat = serving.chat("hi", temperature=0.5, stream=True, max_tokens=3, stop=["x"], model="m", wibble=1)
    result = await llama_server.apply_template(chat, model())
    assert result.body == {"prompt": "<s><|user|>\nhi\n<|assistant|>\n"}
    assert result.ignored == ("wibble",)


async def test_apply_template_shows_tools_to_the_template() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    made = model(chat_template="{{ tools[0].function.name }}")
    result = await llama_server.apply_template(serving.chat("hi", tools=[tool]), made)
    assert result.body == {"prompt": "f"}


async def test_apply_template_needs_a_template() -> None:
    with pytest.raises(UnsupportedByModel):
        await llama_server.apply_template(serving.chat("hi"), model(bare=True))


async def test_unknown_fields_are_reported_or_refused() -> None:
    assert (await llama_server.tokenize({"content": "a", "x": 1}, model())).ignored == ("x",)
    with pytest.raises(RequestError) as caught:
        await llama_server.detokenize({"tokens": [], "x": 1}, model(strict_fields=True))
    assert caught.value.reason == "unknown_parameter"
