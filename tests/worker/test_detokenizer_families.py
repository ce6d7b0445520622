"""Incremental detokenization for the decoders of real tokenizers, built here and decoded by `tokenizers`."""

import functools
import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests import tiny
from worker.detokenizer import REPLACEMENT, Detokenizer

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
TEXT = """
    the quick brown fox jumps over lazy dog Grüße aus Köln déjà vu señor быстрая лиса прыгает Ταχεία αλεπού
    שלום עולם مرحبا بالعالم 敏捷的 棕色 狐狸 素早い 茶色の 빠른 갈색 여우 नमस्ते दुनिया สวัสดี ชาวโลก
    🦊 👩\u200d👩\u200d👧 🇩🇪 e\u0301 . , ! ? ' n't don 's
"""
WORDS = re.findall(r"\S+", TEXT)
CHARACTERS = "aeßéяλשم狐の여नส🦊👧🇩\u200d\u0301\ufffd \n\t…“"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SEQUENCES = 800  # examples per family


@dataclass(frozen=True)
class Family:
    """One family of decoders. `bytes_at`: the id of byte 0 if bytes are tokens of their own."""

    tokenizer: Tokenizer
    bytes_at: int | None = None

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def is_byte(self, token: int) -> bool:
        return self.bytes_at is not None and self.bytes_at <= token < self.bytes_at + 256


def _pieces() -> list[str]:
    """Return words with and without the space marker, their parts, single characters, and the marker alone."""
    halves = [word[: len(word) // 2 + 1] for word in WORDS] + [word[len(word) // 2 :] for word in WORDS]
    found = [*(SPACE + word for word in WORDS), *WORDS, *halves, *CHARACTERS.replace(" ", ""), SPACE, SPACE * 2]
    return list(dict.fromkeys(found))


def _sentencepiece(*, strips: bool) -> decoders.Decoder:
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strips else parts)


@functools.cache
def family(name: str) -> Family:
    if name == "byte-level":
        return Family(tiny.make_tokenizer("qwen3").backend_tokenizer)
    if name == "unigram":  # as T5 and XLM-R do
        scores = [("<unk>", 0.0), *((byte, -20.0) for byte in BYTES), *((piece, -5.0) for piece in _pieces())]
        tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        return Family(tokenizer, bytes_at=1)
    if name in ("bpe", "bpe-strip"):  # as Gemma does, and Llama 2
        vocabulary = {piece: id for id, piece in enumerate(["<unk>", *BYTES, *_pieces()])}
        tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        tokenizer.decoder = _sentencepiece(strips=name == "bpe-strip")
        return Family(tokenizer, bytes_at=1)
    words = ["[UNK]", *WORDS, *(f"##{word}" for word in WORDS), *(f"##{each}" for each in CHARACTERS.strip())]
    vocabulary = {word: id for id, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=name == "wordpiece-tidy")
    return Family(tokenizer)


FAMILIES = ("byte-level", "unigram", "bpe", "bpe-strip", "wordpiece", "wordpiece-tidy")
WITH_BYTES = ("unigram", "bpe", "bpe-strip")


def drawn(of: Family, source: random.Random) -> list[int]:
    """Generate words, pieces and whole characters in bytes, as a well-behaved model does."""
    tokens: list[int] = []
    size = of.tokenizer.get_vocab_size()
    if of.bytes_at is None:
        text = " ".join(source.choices(WORDS, k=source.randint(1, 12))) + source.choice(CHARACTERS)
        return list(of.tokenizer.encode(text, add_special_tokens=False).ids)
    for _ in range(source.randint(1, 16)):
        if source.random() < 0.4:
            tokens += [of.bytes_at + byte for byte in source.choice(CHARACTERS).encode()]
        else:
            tokens.append(source.randrange(of.bytes_at + 256, size))
    return tokens


def said(of: Family, tokens: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(of.decode, prompt)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


@pytest.mark.parametrize("name", FAMILIES)
def test_deltas_add_up_to_the_text_and_release_complete_text_at_once(name: str) -> None:
    of, source = family(name), random.Random(11)
    for _ in range(SEQUENCES):
        tokens = drawn(of, source)
        prompt = drawn(of, source)[: source.choice([0, 1, 3, 20])]
        if of.decode(prompt).endswith(REPLACEMENT):
            continue  # a prompt that ends within a character is no context
        begin = len(of.decode(prompt))
        pieces = said(of, tokens, prompt)
        assert "".join(pieces) == of.decode([*prompt, *tokens])[begin:]
        for count, so_far in enumerate(itertools.accumulate(pieces[:-1]), 1):
            complete = of.decode([*prompt, *tokens[:count]])
            if not complete.endswith(REPLACEMENT):
                assert so_far == complete[begin:], "what is complete is not held back"


@pytest.mark.parametrize("name", WITH_BYTES)
def test_invalid_bytes_do_not_affect_later_text(name: str) -> None:
    """A decoder replaces a whole run of byte tokens if one of them is invalid; text returned before is kept."""
    of, source = family(name), random.Random(13)
    assert of.bytes_at is not None
    size = of.tokenizer.get_vocab_size()
    for _ in range(400):
        expected, tokens = "", []
        for _ in range(source.randint(1, 4)):
            run = [
                source.choice([0x41, 0xC3, 0xA9, 0xE4, 0xB8, 0x96, 0xFF, 0x80]) for _ in range(source.randint(1, 40))
            ]
            word = source.randrange(of.bytes_at + 256 + len(WORDS), size)
            tokens += [*(of.bytes_at + byte for byte in run), word]
            text = of.decode([*(of.bytes_at + byte for byte in run), word])
            after = of.decode([of.bytes_at + 0x41, word])[1:]
            is_valid = REPLACEMENT not in text.removesuffix(after)
            expected += re.escape(text) if is_valid else f".{{1,{len(run)}}}" + re.escape(after)
        detokenizer = Detokenizer(of.decode)
        so_far = ""
        for count, token in enumerate(tokens):
            so_far += detokenizer.push(token)
            after = of.decode([of.bytes_at + 0x41, token])[1:]
            if not of.is_byte(token) and after and REPLACEMENT not in after:
                assert so_far.endswith(after), f"a word behind the bytes is said at once ({count})"
        whole = so_far + detokenizer.finish()
        assert re.fullmatch(expected, whole, re.DOTALL), (tokens, whole)
