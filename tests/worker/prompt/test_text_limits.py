"""The bound of bytes for a number of tokens, and the parts of a long text that are tokenized at once."""

import unicodedata
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from tests import tiny
from worker.errors import ContextExceeded
from worker.prompt import text_limits
from worker.prompt.text_limits import GRACE_BYTES, PIECE, TextBound, TextLimit, bound_of, pieces, shorten, utf8_length


def wrapped(made: Tokenizer, **settings: Any) -> PreTrainedTokenizerFast:
    cls: Any = PreTrainedTokenizerFast  # its constructor is untyped
    tokenizer: PreTrainedTokenizerFast = cls(tokenizer_object=made, **settings)
    return tokenizer


def byte_fallback(normalizer: Any) -> PreTrainedTokenizerFast:
    """A tokenizer as of Llama 2: merges of characters, blanks as U+2581, a token for each byte."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "é", "ab", "▁a", "▁ab", "abab"]
    vocabulary = {name: id for id, name in enumerate(names)}
    merges = [("a", "b"), ("▁", "a"), ("▁", "ab"), ("ab", "ab")]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizer
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return wrapped(made)


def sentence_piece() -> Any:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


COMPOSED = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
TOKENIZERS = {
    "byte-level": tiny.make_tokenizer("llama"),
    "byte-fallback": byte_fallback(sentence_piece()),
    "composed": byte_fallback(COMPOSED),
    "lower-case": byte_fallback(normalizers.Lowercase()),
}
TEXT = st.text(
    st.one_of(st.sampled_from("aab  \nébAK\u0301\u1112\u1161\u11ab"), st.characters(codec="utf-8")), max_size=60
)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXT)
def test_no_text_has_more_bytes_than_its_tokens_may_stand_for(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    bound = bound_of(tokenizer, tokenizer.get_vocab())
    assert len(text.encode()) <= bound.bytes_per_token * len(tokens)


def test_the_bound_is_the_longest_token_in_bytes() -> None:
    tokenizer = byte_fallback(None)
    assert bound_of(tokenizer, tokenizer.get_vocab()).bytes_per_token == len("▁ab".encode()) + 1
    tokenizer.add_tokens(["<|übersetzen|>"])
    assert bound_of(tokenizer, tokenizer.get_vocab()) == TextBound(len("<|übersetzen|>".encode()))


def test_no_character_shrinks_more_than_assumed() -> None:
    forms: list[Literal["NFC", "NFD", "NFKC", "NFKD"]] = ["NFC", "NFD", "NFKC", "NFKD"]
    # All but surrogates, and but those without a meaning, which no form changes.
    characters = [each for each in map(chr, range(0x110000)) if unicodedata.category(each) not in ("Cs", "Cn", "Co")]
    for character in characters:
        for text in {character, *(unicodedata.normalize(form, character) for form in forms)}:
            for form in forms:
                normal = unicodedata.normalize(form, text).lower()
                assert len(text.encode()) <= text_limits.SHRINKING * len(normal.encode())


def test_a_text_that_a_tokenizer_drops_is_not_rejected_up_to_a_limit() -> None:
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##a": 2}, unk_token="[UNK]"))
    tokenizer = wrapped(made, unk_token="[UNK]")
    bound = bound_of(tokenizer, tokenizer.get_vocab())
    assert bound.fit("x" * 10_000, TextLimit(4, "prompt")), "one unknown word is one token"
    with pytest.raises(ContextExceeded):
        bound.fit("x" * (2 * GRACE_BYTES), TextLimit(4, "prompt"))


def test_a_text_is_rejected_from_the_first_byte_above_the_bound() -> None:
    bound, limit, most = TextBound(8), TextLimit(10, "prompt"), 80 + GRACE_BYTES
    assert bound.fit("é" * (most // 2), limit)
    with pytest.raises(ContextExceeded, match="at least 11 tokens, but this model's maximum context length is 10"):
        bound.fit("é" * (most // 2) + "a", limit)
    with pytest.raises(ContextExceeded, match="maximum context length is 11"):
        bound.fit("a" * (most + 1), TextLimit(10, "prompt", shown=11))


@pytest.mark.parametrize(("keep", "first"), [("start", 0), ("end", -1)])
def test_a_text_that_is_truncated_is_cut_to_at_least_its_tokens(keep: Any, first: int) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    text = "".join(f"word{number} Straße {number} 敏捷 " for number in range(20_000))
    limit = TextLimit(100, "prompt", keep=keep)
    cut = bound_of(tokenizer, tokenizer.get_vocab()).fit(text, limit)
    assert len(cut) < len(text)
    whole, part = tokenizer.encode(text), tokenizer.encode(cut)
    assert (part[:100] == whole[:100]) if keep == "start" else (part[-100:] == whole[-100:])
    assert cut == (text[: len(cut)] if keep == "start" else text[-len(cut) :])


@given(TEXT, st.integers(0, 100))
def test_the_length_in_utf8_is_exact_where_it_decides(text: str, most: int) -> None:
    assert (utf8_length(text, at_most=most) > most) == (len(text.encode()) > most)


def test_pieces_make_up_the_text_and_end_before_blanks() -> None:
    text = "word " * 50_000 + "x" * 200_000
    parts = pieces(text)
    assert "".join(text[part] for part in parts) == text
    assert all(0 < part.stop - part.start <= PIECE for part in parts)
    assert all(text[part.stop] == " " for part in parts if part.stop < 240_000)


def test_the_tokens_of_a_long_text_are_counted_in_pieces_until_there_are_too_many() -> None:
    counted: list[int] = []

    def count(piece: str) -> int:
        counted.append(len(piece))
        return len(piece) // 2

    text = "x" * (40 * PIECE)
    with pytest.raises(ContextExceeded, match="at least"):
        shorten(text, TextLimit(2 * PIECE, "prompt"), count)
    assert counted == [PIECE] * 5
    for keep in ("start", "end"):
        assert len(shorten(text, TextLimit(2 * PIECE, "prompt", keep=keep), count)) == 5 * PIECE
    assert shorten("x" * PIECE, TextLimit(1, "prompt"), count) == "x" * PIECE


def test_text_of_a_usual_length_for_its_limit_is_not_counted() -> None:
    text = "x" * (6 * PIECE)
    assert shorten(text, TextLimit(PIECE, "prompt"), lambda piece: pytest.fail("counted")) == text
