"""Incremental detokenization: whole characters, in order, never taken back; stop strings are never shown."""

import json
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tests import tiny
from worker.detokenizer import REPLACEMENT, AnswerText, Detokenizer, TokenBytes

TEXTS = (
    "The quick brown fox — jumps “over” the lazy dog.\n\n\tTwice.",
    "Grüße aus Köln, größer als Übermut; déjà vu, señor!",
    "Быстрая лиса прыгает. Ταχεία αλεπού. שלום עולם. مرحبا بالعالم",
    "敏捷的棕色狐狸跳过懒狗。素早い茶色の狐。빠른 갈색 여우",
    "🦊🐶🏠 👩‍👩‍👧‍👦 🇩🇪 e\u0301 \u200d \ufffd end",
    "नमस्ते दुनिया, สวัสดีชาวโลก",
)
TOKENIZER = tiny.make_tokenizer("qwen3").backend_tokenizer
IDS = TOKENIZER.get_vocab()
VOCABULARY = TOKENIZER.get_vocab_size()


def decode(tokens: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(tokens), skip_special_tokens=True))


def pieces(tokens: Sequence[int], context: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(decode, context)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


@settings(max_examples=400)
@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=80), st.lists(st.integers(0, VOCABULARY - 1), max_size=4))
def test_any_byte_level_tokens_add_up_to_the_decoded_text(tokens: list[int], prompt: list[int]) -> None:
    said = "".join(pieces(tokens, prompt))
    if decode(prompt).endswith(REPLACEMENT):
        prompt = []  # a prompt that ends within a character is no context
    assert said == decode([*prompt, *tokens])[len(decode(prompt)) :]


def test_a_long_run_of_invalid_bytes_is_released() -> None:
    lone = IDS["Ģ"]  # byte 0x80, which continues a character that never began
    said = pieces([lone] * 500)
    assert "".join(said) == REPLACEMENT * 500
    assert any(said[:100]), "it does not wait for the end"


def shown(text: str, stops: Sequence[str], size: int = 1) -> tuple[str, str | None, int]:
    """Return text, stop string and token count for `text` in tokens of `size` characters."""
    words = [text[start : start + size] for start in range(0, len(text), size)]
    answer = AnswerText(lambda tokens: "".join(words[token] for token in tokens), stops)
    said, tokens = "", 0
    for token in range(len(words)):
        piece = answer.push(token)
        said, tokens = said + piece.text, tokens + piece.tokens
        assert not any(stop in said for stop in stops)
        if piece.stop is not None:
            return said, piece.stop, tokens
    piece = answer.finish()
    return said + piece.text, piece.stop, tokens + piece.tokens


def test_the_earliest_stop_string_wins() -> None:
    assert shown("xaby", ["b", "ab"], 50)[:2] == ("x", "ab")
    assert shown("xaby", ["abyz", "b"], 1)[:2] == ("xa", "b")


def test_tokens_of_the_stop_string_are_not_counted() -> None:
    assert shown("abcSTOPxyz", ["STOP"])[2] == 3
    assert shown("abcSTOPxyz", ["STOP"], 2)[2] == 2, "the token across the border belongs to the text"


@settings(max_examples=300)
@given(st.text("ab🦊", max_size=40), st.lists(st.text("ab🦊", min_size=1, max_size=4), max_size=3), st.integers(1, 5))
def test_the_shown_text_ends_before_the_first_stop_string(text: str, stops: list[str], size: int) -> None:
    said, stop, _ = shown(text, stops, size)
    if stop is None:
        assert said == text
        assert not any(each in text for each in stops)
    else:
        assert text.startswith(said + stop)
        assert not any(each in said for each in stops)


def test_the_bytes_of_tokens_add_up_to_the_bytes_of_the_text() -> None:
    state = TOKENIZER.decoder.__getstate__().decode()
    spell = TokenBytes(state, TOKENIZER.id_to_token, {0: "<s>"})
    for text in TEXTS:
        tokens = TOKENIZER.encode(text, add_special_tokens=False).ids
        assert b"".join(map(spell, tokens)) == text.encode()
    assert spell(0) == b"<s>"
    assert spell(VOCABULARY + 7) == b""


def test_sentencepiece_byte_tokens_and_space_markers_become_bytes() -> None:
    decoders = [{"type": "Replace"}, {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip"}]
    names = {5: "\u2581Hello", 6: "<0xE4>"}
    spell = TokenBytes(json.dumps({"type": "Sequence", "decoders": decoders}), names.get, {})
    assert [spell(token) for token in (5, 6, 7)] == [b" Hello", b"\xe4", b""]
