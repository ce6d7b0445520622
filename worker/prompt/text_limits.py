"""The size of texts that a number of tokens can hold, known before they are tokenized.

Tokenizing takes up to 225 bytes of memory and a microsecond per byte of text (tokenizers 0.22, measured), and most of
this is for texts that do not fit the context anyway. A tokenizer of bytes gives at least one token per
`TextBound.bytes_per_token` bytes of a text, so a longer text is rejected by its length alone.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from worker.errors import ContextExceeded

# Bytes beyond the bound that a text may have if its tokenizer drops or merges some text without limit, such as blanks
# or unknown words. A text with more of them is rejected although it might fit. 256 KiB take about 50 MB. A guess.
GRACE_BYTES = 256 << 10
# Characters that are tokenized at once, to bound the memory of counting.
PIECE = 64 << 10
# A text of more characters per token of its limit is counted in pieces first: usual text has 3 to 5 bytes per token, so
# it is probably too long.
USUAL_CHARACTERS = 6
# Tokens by which the count of a piece may differ from that of the same text inside of the whole: cutting changes the
# tokens of the words at both ends. A guess.
PIECE_SLACK = 64
_CUT_BYTES = 1024  # kept beyond the tokens of a cut text, so that the word at the cut is not among them

# The most UTF-8 bytes of a text that become one byte in a normalized text: Hangul syllables, the Kelvin sign and
# mathematical letters are the worst. tests/worker/prompt/test_text_limits.py tries all characters.
_SHRINKING = {"NFC": 3, "NFD": 3, "NFKC": 4, "NFKD": 4, "Lowercase": 3, "ByteLevel": 1, "Prepend": 1}
_KEEPING = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "Punctuation", "Split"}


@dataclass(frozen=True, slots=True)
class TextLimit:
    """The most tokens of a text in one field of a request, and what happens to a longer text."""

    tokens: int
    param: str  # for errors
    keep: Literal["", "start", "end"] = ""  # the part of a longer text that is kept; empty: it is rejected
    # The value of the error, if it is not `tokens`: a prompt may be one token shorter than the context.
    shown: int = 0
    setting: str = ""  # the preset key with the limit, if it is not ctx-size

    def error(self, tokens: int, *, is_exact: bool = False) -> ContextExceeded:
        """The error for a text of at least `tokens` tokens."""
        least = max(tokens, self.tokens + 1)
        limit = self.shown or self.tokens
        return ContextExceeded(least, limit, param=self.param, is_exact=is_exact, setting=self.setting)


@dataclass(frozen=True, slots=True)
class TextBound:
    """The most bytes of text that one token of a tokenizer stands for."""

    bytes_per_token: int
    grace: int  # further bytes of a text that may be without tokens; 0: each byte belongs to a token

    def most_bytes(self, tokens: int) -> int:
        """The most bytes of a text of that many tokens."""
        return tokens * self.bytes_per_token + self.grace

    def fit(self, text: str, limit: TextLimit) -> str:
        """Return `text`, cut if the limit allows it. Raise ContextExceeded if its length alone is above the limit."""
        most = self.most_bytes(limit.tokens)
        if limit.keep:
            # A character has at least one byte, so this many characters are enough.
            longest = most + _CUT_BYTES
            return text if len(text) <= longest else text[:longest] if limit.keep == "start" else text[-longest:]
        size = utf8_length(text, at_most=most)
        if size > most:
            raise limit.error(-(-(size - self.grace) // self.bytes_per_token))
        return text


def shorten(text: str, limit: TextLimit, count: Callable[[str], int]) -> str:
    """Return a text that tokenizing in one call costs little: `text` itself, or the part that `limit` keeps.

    Raise ContextExceeded if the tokens of its pieces are more than the limit. `count` returns the tokens of a piece. A
    text of a usual length for its limit is not counted. The memory is that of one piece, where tokenizing the whole
    text could take a gigabyte.
    """
    if len(text) <= max(PIECE, USUAL_CHARACTERS * limit.tokens):
        return text
    parts = pieces(text)
    tokens = 0
    for part in reversed(parts) if limit.keep == "end" else parts:
        tokens += count(text[part]) - PIECE_SLACK
        if tokens > limit.tokens:
            if not limit.keep:
                raise limit.error(tokens)
            return text[part.start :] if limit.keep == "end" else text[: part.stop]
    return text


def utf8_length(text: str, *, at_most: int) -> int:
    """The bytes of `text` in UTF-8, without encoding a text that certainly has more or less than `at_most`."""
    if text.isascii() or len(text) > at_most or 4 * len(text) <= at_most:
        return len(text)
    return len(text.encode(errors="replace"))


def pieces(text: str) -> list[slice]:
    """The parts of `text` of at most PIECE characters, cut before a blank where there is one."""
    found, begin = [], 0
    while begin < len(text):
        end = begin + PIECE
        if end < len(text):
            blank = max(text.rfind(" ", end - 1024, end), text.rfind("\n", end - 1024, end))
            end = blank if blank > begin else end
        found.append(slice(begin, end))
        begin = end
    return found


def groups(texts: Iterable[str]) -> Iterator[list[str]]:
    """`texts` in their order, in groups of about PIECE characters, or of one longer text."""
    group: list[str] = []
    size = 0
    for text in texts:
        if group and size + len(text) > PIECE:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group


def strings_length(*values: Any) -> int:
    """The characters of all strings in JSON values. Iterative, because clients choose the nesting."""
    total, stack = 0, list(values)
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, dict):
            stack.extend(value)
            stack.extend(value.values())
        elif isinstance(value, list | tuple):
            stack.extend(value)
    return total


def bound_of(tokenizer: Any, vocabulary: Mapping[str, int] | None = None) -> TextBound:
    """The bound for a tokenizer of transformers. `vocabulary`: its `get_vocab()`, which takes 50 ms for 150,000 tokens.

    It is exact for tokenizers whose tokens cover all bytes: byte-level BPE, and BPE with byte fallback. All others, and
    those whose normalizer or special tokens swallow text, have a grace: a word that is unknown to WordPiece, or a run
    of characters that are unknown to Unigram, is one token of any length.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = tokenizer.get_vocab() if vocabulary is None else vocabulary
    if backend is None:
        return TextBound(max(map(_utf8_bytes, vocabulary), default=1), GRACE_BYTES)
    normalizers, pre_tokenizers = _parts(backend.normalizer), _parts(backend.pre_tokenizer)
    is_byte_level = any(part["type"] == "ByteLevel" for part in (*normalizers, *pre_tokenizers))
    shrinking, keeps = 1, True
    for part in normalizers:
        factor = _SHRINKING.get(part["type"]) or _replacement_factor(part)
        shrinking *= factor or 1
        keeps = keeps and factor is not None
    keeps = keeps and all(
        part["type"] in _KEEPING and "Removed" not in str(part.get("behavior", "")) for part in pre_tokenizers
    )
    added = tokenizer.added_tokens_decoder.values()
    keeps = keeps and not any(token.lstrip or token.rstrip for token in added)
    longest = max((len(token) if is_byte_level else _utf8_bytes(token) for token in vocabulary), default=1)
    longest = max(longest, *(len(token.content.encode()) for token in added), 1)
    covers = _covers_bytes(backend.model, vocabulary, is_byte_level=is_byte_level)
    return TextBound(longest * shrinking, 0 if keeps and covers else GRACE_BYTES)


def _covers_bytes(model: Any, vocabulary: Mapping[str, int], *, is_byte_level: bool) -> bool:
    """True if the model has a token for each byte, so that no text is unknown to it."""
    kind = type(model).__name__
    if kind == "BPE" and is_byte_level:
        from tokenizers.pre_tokenizers import ByteLevel

        return all(symbol in vocabulary for symbol in ByteLevel.alphabet())
    # Unigram may fall back to bytes as well, but its object does not show it.
    return kind == "BPE" and model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _utf8_bytes(token: str) -> int:
    """Bytes of text that a token stands for. SentencePiece writes a blank as U+2581, which has 3 bytes."""
    return len(token.replace("\u2581", " ").encode(errors="replace"))


def _replacement_factor(part: dict[str, Any]) -> int | None:
    """The factor by which a replacement of one text with another shortens; None if there is no bound."""
    if part["type"] != "Replace":
        return None
    pattern, content = part["pattern"].get("String"), part["content"]
    if not pattern or not content:  # a regular expression, or a removal
        return None
    return max(1, -(-len(pattern.encode()) // len(content.encode())))


def _parts(component: Any) -> list[dict[str, Any]]:
    """The settings of a normalizer or pre-tokenizer, those of its parts if it is a sequence."""
    if component is None:
        return []
    found, stack = [], [json.loads(component.__getstate__())]
    while stack:
        part = stack.pop()
        inner = part.get("normalizers") or part.get("pretokenizers")
        if inner is not None:
            stack.extend(inner)
        else:
            found.append(part)
    return found
