"""The size of texts that a number of tokens can hold, known before they are tokenized.

Tokenizing takes up to 225 bytes of memory and a microsecond per byte of text (tokenizers 0.22, measured), and most of
this is for texts that do not fit the context anyway. A tokenizer gives about one token per `TextBound.bytes_per_token`
bytes of a text at least, so a much longer text is rejected by its length alone. A text of usual tokens that is too long
is counted in pieces until it exceeds the limit (`shorten`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from worker.errors import ContextExceeded

# Bytes beyond the bound that a text may have, because some tokenizers drop or merge text without limit, such as blanks
# or unknown words. A text with more of them is rejected although it might fit. 256 KiB take about 50 MB. A guess.
GRACE_BYTES = 256 << 10
# The most UTF-8 bytes of a text that become one byte of the text that is tokenized: of NFKD (mathematical letters), and
# then of lower case (the Kelvin sign). tests/worker/prompt/test_text_limits.py tries all characters.
SHRINKING = 4 * 3
# Characters that are tokenized at once, to bound the memory of counting.
PIECE = 64 << 10
# A text of more characters per token of its limit is counted in pieces first: usual text has 3 to 5 bytes per token, so
# it is probably too long.
USUAL_CHARACTERS = 6
# Tokens by which the count of a piece may differ from that of the same text inside of the whole: cutting changes the
# tokens of the words at both ends. A guess.
PIECE_SLACK = 64
_CUT_BYTES = 1024  # kept beyond the tokens of a cut text, so that the word at the cut is not among them


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
    """The most bytes of text that one token of a tokenizer stands for, beside GRACE_BYTES of the whole text."""

    bytes_per_token: int

    def most_bytes(self, tokens: int) -> int:
        """The most bytes of a text of that many tokens."""
        return tokens * self.bytes_per_token + GRACE_BYTES

    def fit(self, text: str, limit: TextLimit) -> str:
        """Return `text`, cut if the limit allows it. Raise ContextExceeded if its length alone is above the limit."""
        most = self.most_bytes(limit.tokens)
        if limit.keep:
            # A character has at least one byte, so this many characters are enough.
            longest = most + _CUT_BYTES
            return text if len(text) <= longest else text[:longest] if limit.keep == "start" else text[-longest:]
        size = utf8_length(text, at_most=most)
        if size > most:
            raise limit.error(-(-(size - GRACE_BYTES) // self.bytes_per_token))
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


def bound_of(tokenizer: Any, vocabulary: Mapping[str, int]) -> TextBound:
    """The bound for a tokenizer of transformers with this `vocabulary`."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = (token.content for token in tokenizer.added_tokens_decoder.values())
    longest = max((len(token.encode(errors="replace")) for token in (*vocabulary, *added)), default=1)
    normalizes = backend is not None and backend.normalizer is not None
    return TextBound(longest * (SHRINKING if normalizes else 1))
