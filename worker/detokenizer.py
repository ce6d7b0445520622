"""Incremental detokenization: tokens to text without split characters, and stop strings.

A tokenizer decodes a whole list of token ids. This module decodes a growing list piece by piece, so that the
concatenated pieces equal the whole. The tokenizer is passed as a function `decode(ids) -> text`, which must not clean
up spaces.
"""

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # output of a decoder for bytes that are not (yet) a character
# Maximum tokens that wait for a character to be completed before the oldest ones are released unchanged. A character
# has at most four bytes, so a longer run is never going to be one.
_LONGEST_WAIT = 32
_CONTEXT = 8  # number of prompt tokens that determine how the first token of the answer is spelled


class Detokenizer:
    """Incremental text of a growing list of tokens.

    Decoders look at neighbouring tokens: sentencepiece drops the space before the first word, and the bytes of one
    character may be spread over several tokens. Pending tokens are therefore decoded together with the tokens of the
    last complete piece, and only the text beyond that piece is new. Text that ends in an incomplete character is held
    back.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()):
        """`context`: tokens before the first one. Their text is not part of the answer."""
        self._decode = decode
        self._forget_context()
        for size in range(_CONTEXT, _CONTEXT + 4):  # one of these sizes does not start inside a character of four bytes
            begin = list(context[-size:])
            base = decode(begin) if begin else ""
            if not base.endswith(REPLACEMENT):
                self._context, self._base = begin, base
                break
        self._pending: list[int] = []
        self._sent = 0  # length of the pending tokens' text that was already returned

    def push(self, token: int) -> str:
        """Return the text that this token completes; often empty."""
        self._pending.append(token)
        text = self._pending_text()
        if text and not text.endswith(REPLACEMENT):
            new = text[self._sent :]
            self._context, self._base = self._pending, self._decode(self._pending)
            self._pending, self._sent = [], 0
            return new
        if len(self._pending) > _LONGEST_WAIT:
            return self._release()
        return self._send(text, len(text.rstrip(REPLACEMENT)))

    def finish(self) -> str:
        """Return the rest of the text, including incomplete characters."""
        text = self._pending_text()
        return self._send(text, len(text))

    def _pending_text(self) -> str:
        """Return the text of the pending tokens in their context. Drop the context if the pending tokens change its
        text.

        This happens where bytes are tokens: such a decoder replaces a whole run of bytes while one of them is
        invalid. Text that was returned is not taken back, and the rest of the run starts with a byte, which needs no
        context.
        """
        whole = self._decode([*self._context, *self._pending])
        if not whole.startswith(self._base):
            self._forget_context()
            whole = self._decode(self._pending)
        return whole[len(self._base) :]

    def _send(self, text: str, end: int) -> str:
        new = text[self._sent : end]
        self._sent = max(self._sent, end)
        return new

    def _release(self) -> str:
        """Release the oldest pending tokens, cut at a position that splits no character.

        Four characters of text behind the cut prove that. If no cut preserves the whole text (a run of bytes that is
        invalid as a whole), any cut is acceptable.
        """
        whole = self._decode([*self._context, *self._pending])
        for cut in range(len(self._pending) - 1, 0, -1):
            head = self._decode([*self._context, *self._pending[:cut]])
            tail = self._decode(self._pending[cut:])
            if len(tail) >= 4 and head + tail == whole and len(head) >= len(self._base) + self._sent:
                new = head[len(self._base) + self._sent :]
                self._forget_context()
                self._pending, self._sent = self._pending[cut:], 0
                return new
        new = whole[len(self._base) + self._sent :]
        self._forget_context()
        self._pending, self._sent = [], 0
        return new

    def _forget_context(self) -> None:
        self._context, self._base = [], ""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that may be shown next."""

    text: str = ""
    tokens: int = 0  # number of pushed tokens that belong to the text shown so far and were not counted before
    stop: str | None = None  # the stop string that was found; no text follows


class AnswerText:
    """Text of one answer up to a stop string. Text that may be the beginning of a stop string is held back."""

    def __init__(
        self, decode: Decode, stops: Sequence[str] = (), context: Sequence[int] = (), *, shows_stop: bool = False
    ):
        """`shows_stop`: keep the stop string at the end of the text."""
        self._detokenizer = Detokenizer(decode, context)
        self._stops = tuple(stops)
        self._shows_stop = shows_stop
        self._buffer = ""
        self._shown = 0
        # start and end offset in the text of each token that is not shown yet
        self._tokens: deque[tuple[int, int]] = deque()

    def push(self, token: int) -> TextPiece:
        """Add the next token and return the text that may be shown now."""
        start = self._shown + len(self._buffer)
        self._buffer += self._detokenizer.push(token)
        self._tokens.append((start, self._shown + len(self._buffer)))
        return self._cut() or self._show(len(self._buffer) - self._possible_stop_length())

    def finish(self) -> TextPiece:
        """End the answer and return all text that was held back, up to a stop string."""
        self._buffer += self._detokenizer.finish()
        piece = self._cut()
        if piece is not None:
            return piece
        shown = self._show(len(self._buffer))
        rest = len(self._tokens)
        self._tokens.clear()
        return TextPiece(shown.text, shown.tokens + rest)

    def _show(self, length: int) -> TextPiece:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        self._shown += length
        tokens = 0
        while self._tokens and self._tokens[0][1] <= self._shown:
            self._tokens.popleft()
            tokens += 1
        return TextPiece(text, tokens)

    def _cut(self) -> TextPiece | None:
        """Return the text up to the first stop string, or None. Tokens that start behind it are not counted."""
        found = [(at, stop) for stop in self._stops if (at := self._buffer.find(stop)) >= 0]
        if not found:
            return None
        at, stop = min(found, key=lambda pair: pair[0])
        end = at + len(stop) if self._shows_stop else at
        tokens = sum(start < self._shown + end for start, _ in self._tokens)
        return TextPiece(self._buffer[:end], tokens, stop)

    def _possible_stop_length(self) -> int:
        """Return the length of the longest suffix of the buffered text that is a prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._buffer)), longest, -1):
                if self._buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class TokenBytes:
    """Maps a token to its bytes, which may be part of a character."""

    def __init__(self, decoder: str, spell: Callable[[int], str | None], added: Mapping[int, str]):
        """`decoder`: the tokenizer's decoder as JSON. `spell`: maps an id to its vocabulary entry. `added`: text of
        added tokens, which are not encoded."""
        kinds = _decoder_kinds(decoder)
        self._is_byte_level = "ByteLevel" in kinds
        self._has_marked_spaces = bool({"Metaspace", "Replace"} & kinds)
        self._has_byte_tokens = "ByteFallback" in kinds
        self._spell = spell
        self._added = added

    @classmethod
    def of(cls, tokenizer: Any) -> "TokenBytes":
        """Return the map of a tokenizer of transformers."""
        added = {id: str(token.content) for id, token in tokenizer.added_tokens_decoder.items()}
        if not tokenizer.is_fast:
            return cls("", lambda token: str(tokenizer.decode([token])), added)
        decoder = tokenizer.backend_tokenizer.decoder
        state = decoder.__getstate__().decode() if decoder is not None else ""
        return cls(state, tokenizer.backend_tokenizer.id_to_token, added)

    def __call__(self, token: int) -> bytes:
        """Return empty bytes for an unknown id."""
        if (text := self._added.get(token)) is not None:
            return text.encode()
        text = self._spell(token) or ""
        if self._is_byte_level:
            return b"".join(_BYTES[char] if char in _BYTES else char.encode() for char in text)
        if self._has_byte_tokens and len(text) == 6 and text.startswith("<0x"):
            return bytes.fromhex(text[3:5])
        return (text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ") if self._has_marked_spaces else text).encode()


def _decoder_kinds(decoder: str) -> set[str]:
    if not decoder:
        return set()
    state = json.loads(decoder)
    return {part["type"] for part in [state, *state.get("decoders", ())]}


def _byte_alphabet() -> dict[str, bytes]:
    """Return the byte for each character of byte-level BPE: printable Latin-1 bytes are themselves, the others start at
    U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()
