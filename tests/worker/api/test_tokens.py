"""/tokenize and /detokenize, for llama-server's and for vLLM's clients."""

import threading
from typing import Any

import pytest

from tests import tiny_vision
from tests.worker import serving
from tests.worker.speaking import model
from worker.api.served_model import LONG_TEXT
from worker.api.tokens import detokenize, tokenize
from worker.detokenizer import TokenBytes
from worker.errors import UnsupportedField

BOS = 0


async def tokens(body: dict[str, Any]) -> Any:
    return (await tokenize(body, model())).body["tokens"]


async def test_a_text_becomes_its_tokens_without_special_ones() -> None:
    expected = serving.tokenizer().encode("hi there", add_special_tokens=False)
    assert await tokens({"content": "hi there"}) == expected
    assert await tokens({"content": "hi there", "add_special": True}) == [BOS, *expected]
    assert await tokens({"content": ""}) == []


async def test_tokenize_accepts_lists_of_texts_and_token_ids() -> None:
    hi, there = await tokens({"content": "hi"}), await tokens({"content": " there"})
    assert await tokens({"content": ["hi", 7, " there"]}) == [*hi, 7, *there]
    assert await tokens({"content": ["hi", " there"], "add_special": True}) == [BOS, *hi, *there]
    assert await tokens({"content": [7, "hi"], "add_special": True}) == [7, *hi]
    assert await tokens({"content": []}) == []


async def test_special_tokens_in_a_text_are_parsed_by_default() -> None:
    assert (await tokens({"content": "<s>"})) == [BOS]
    literal = await tokens({"content": "<s>", "parse_special": False})
    assert BOS not in literal
    assert serving.tokenizer().decode(literal) == "<s>"
    assert (await tokens({"content": "<s>"})) == [BOS]


async def test_pieces_are_text_or_the_bytes_of_a_part_of_a_character() -> None:
    pieces = await tokens({"content": "hi ü", "with_pieces": True})
    assert [each["piece"] for each in pieces] == ["hi", [0x20, 0xC3], [0xBC]]
    assert [each["id"] for each in pieces] == await tokens({"content": "hi ü"})


@pytest.mark.parametrize("text", ["hi there", "Grüße, 世界! 🦊", "", "  two  spaces ", "<s>x</s>"])
async def test_detokenize_restores_the_text(text: str) -> None:
    made = model()
    encoded = (await tokenize({"content": text}, made)).body
    assert (await detokenize(encoded, made)).body == {"content": text, "prompt": text}


async def test_a_long_text_is_tokenized_like_a_short_one() -> None:
    text = "word " * (LONG_TEXT // 4)
    assert await tokens({"content": text}) == serving.tokenizer().encode(text, add_special_tokens=False)


async def test_the_pieces_of_a_text_are_built_beside_the_event_loop() -> None:
    made, threads = model(), set[str]()
    whole = made.token_bytes

    class Noted(TokenBytes):
        def __init__(self) -> None:
            pass

        def __call__(self, token: int) -> bytes:
            threads.add(threading.current_thread().name)
            return whole(token)

    made.token_bytes = Noted()
    pieces = (await tokenize({"content": "hi there", "with_pieces": True}, made)).body["tokens"]
    assert "".join(each["piece"] for each in pieces).strip() == "hi there"
    assert threading.current_thread().name not in threads


async def ask(body: dict[str, Any], **settings: Any) -> Any:
    return (await tokenize(body, model(**settings))).body


async def test_vllms_clients_get_the_tokens_of_a_prompt_and_their_number() -> None:
    expected = serving.tokenizer().encode("hi there", add_special_tokens=False)
    received = await ask({"model": "tiny", "prompt": "hi there"})
    assert received == {
        "count": len(expected) + 1,
        "max_model_len": 256,
        "tokens": [BOS, *expected],
        "token_strs": None,
    }
    received = await ask({"prompt": "hi there", "add_special_tokens": False})
    assert (received["count"], received["tokens"]) == (len(expected), expected)


async def test_vllms_clients_get_token_strings_on_request() -> None:
    received = await ask({"prompt": "hi ü", "return_token_strs": True})
    assert received["token_strs"] == serving.tokenizer().convert_ids_to_tokens(received["tokens"])
    assert received["token_strs"][0] == "<s>"


async def test_a_chat_becomes_the_tokens_that_its_answer_would_start_from() -> None:
    encode = serving.tokenizer().encode
    received = await ask(serving.chat("hi", temperature=0.5, return_token_strs=True))
    prompt = "<s><|user|>\nhi\n<|assistant|>\n"
    assert received["tokens"] == encode(prompt, add_special_tokens=False)
    assert received["count"] == len(received["tokens"]) == len(received["token_strs"])
    received = await ask(serving.chat("hi", add_generation_prompt=False))
    assert received["tokens"] == encode("<s><|user|>\nhi\n", add_special_tokens=False)
    received = await ask(serving.chat("hi", add_special_tokens=True))
    assert received["tokens"] == [BOS, *encode(prompt, add_special_tokens=False)]


async def test_the_tools_of_a_chat_are_among_its_tokens() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    received = await ask(serving.chat("hi", tools=[tool]), chat_template="{{ tools[0].function.name }}")
    assert received["tokens"] == serving.tokenizer().encode("f", add_special_tokens=False)


async def test_special_tokens_around_a_prompt_with_images_are_rejected() -> None:
    picture = {"type": "image_url", "image_url": {"url": tiny_vision.data_url(tiny_vision.picture())}}
    chat = {"messages": [{"role": "user", "content": [picture]}], "add_special_tokens": True}
    with pytest.raises(UnsupportedField) as caught:
        await tokenize(chat, model())
    assert caught.value.param == "messages[0].content[0]"


async def test_a_text_longer_than_the_context_is_tokenized() -> None:
    received = await ask({"prompt": "word " * 1000})
    assert received["count"] == len(received["tokens"]) > received["max_model_len"]


async def test_fields_of_the_other_dialect_are_reported() -> None:
    assert (await tokenize({"content": "a", "add_special_tokens": True}, model())).ignored == ("add_special_tokens",)
    assert (await tokenize({"prompt": "a", "with_pieces": True}, model())).ignored == ("with_pieces",)
