"""Tokens to text, piece by piece: never half a character, none taken back; stop strings never leak.

A tokenizer turns token ids into text as a whole; this turns a growing list of them into pieces whose concatenation is
that whole. Law: PURE; the tokenizer comes in as a function, `decode(ids) -> text`, which must not tidy up spaces.
"""

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Decode = Callable[[Sequence[int]], str]

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are no character, or not yet."""
_LONGEST_WAIT = 32
"""Tokens that may wait for a character to be complete before the oldest are let go as they are. A character has four
bytes at most; what waits longer will never be one."""
_CONTEXT = 8
"""Tokens of the prompt that tell how the first token of the answer joins on."""


class Detokenizer:
    """The text of a growing list of tokens.

    Decoders look at neighbours: sentencepiece drops the space before the first word, bytes of one character may lie in
    several tokens. So pending tokens are decoded together with those of the last complete piece before them, and only
    what goes beyond that piece is new. Text that ends in an incomplete character waits for the rest of it.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()):
        """`context`: tokens before the first one; their text is not part of the answer."""
        self._decode = decode
        self._forget_context()
        for size in range(_CONTEXT, _CONTEXT + 4):  # one of these does not begin within a character of four bytes
            begin = list(context[-size:])
            base = decode(begin) if begin else ""
            if not base.endswith(UNKNOWN):
                self._context, self._base = begin, base
                break
        self._pending: list[int] = []
        self._sent = 0  # characters of the pending tokens' text that are out already

    def push(self, token: int) -> str:
        """Text that is complete now and was not before; often empty."""
        self._pending.append(token)
        text = self._pending_text()
        if text and not text.endswith(UNKNOWN):
            new = text[self._sent :]
            self._context, self._base = self._pending, self._decode(self._pending)
            self._pending, self._sent = [], 0
            return new
        if len(self._pending) > _LONGEST_WAIT:
            return self._let_go()
        return self._send(text, len(text.rstrip(UNKNOWN)))

    def finish(self) -> str:
        """What is left at the end, incomplete characters included."""
        text = self._pending_text()
        return self._send(text, len(text))

    def _pending_text(self) -> str:
        """Text of the pending tokens in their context; the context is forgotten if they change how it reads.

        They do where bytes are tokens: such a decoder calls a whole run of them unknown while one of them is. What
        was said of the run stays said, and its rest, which begins with a byte, needs nothing before it.
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

    def _let_go(self) -> str:
        """Part with the oldest pending tokens, cut where no character crosses; four bytes behind the cut prove that.
        Where no cut keeps the whole as it is, in a run of bytes that is unknown as one, any will do."""
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
class Piece:
    """What an answer may show next."""

    text: str = ""
    tokens: int = 0
    """How many of the tokens pushed and not shown yet belong to the text shown so far."""
    stop: str | None = None
    """The stop string that was found; nothing follows."""


class Answer:
    """The visible text of one answer. Text that may turn out to be the beginning of a stop string is held back."""

    def __init__(
        self, decode: Decode, stops: Sequence[str] = (), context: Sequence[int] = (), *, shows_stop: bool = False
    ):
        """`shows_stop`: the stop string that ends the text is its end, and not left out."""
        self._detokenizer = Detokenizer(decode, context)
        self._stops = tuple(stops)
        self._shows_stop = shows_stop
        self._held = ""
        self._shown = 0
        self._tokens: deque[tuple[int, int]] = deque()  # first and last offset in the text of each token not shown yet

    def push(self, token: int) -> Piece:
        """Take the next token; returns what may be shown because of it."""
        start = self._shown + len(self._held)
        self._held += self._detokenizer.push(token)
        self._tokens.append((start, self._shown + len(self._held)))
        return self._cut() or self._show(len(self._held) - self._suspicious())

    def finish(self) -> Piece:
        """The answer is over; returns all that was held back, up to a stop string."""
        self._held += self._detokenizer.finish()
        piece = self._cut()
        if piece is not None:
            return piece
        shown = self._show(len(self._held))
        rest = len(self._tokens)
        self._tokens.clear()
        return Piece(shown.text, shown.tokens + rest)

    def _show(self, length: int) -> Piece:
        text, self._held = self._held[:length], self._held[length:]
        self._shown += length
        tokens = 0
        while self._tokens and self._tokens[0][1] <= self._shown:
            self._tokens.popleft()
            tokens += 1
        return Piece(text, tokens)

    def _cut(self) -> Piece | None:
        """The text up to the first stop string in what is held; tokens that begin behind it belong to nothing."""
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if not found:
            return None
        at, stop = min(found, key=lambda pair: pair[0])
        end = at + len(stop) if self._shows_stop else at
        tokens = sum(start < self._shown + end for start, _ in self._tokens)
        return Piece(self._held[:end], tokens, stop)

    def _suspicious(self) -> int:
        """Length of the longest end of what is held that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class TokenBytes:
    """The bytes of one token alone, which may be part of a character only."""

    def __init__(self, decoder: str, spell: Callable[[int], str | None], added: Mapping[int, str]):
        """`decoder`: the tokenizer's decoder as JSON; `spell`: the token as the vocabulary writes it; `added`: text
        of tokens that stand for themselves."""
        kinds = _decoder_kinds(decoder)
        self._is_byte_level = "ByteLevel" in kinds
        self._has_marked_spaces = bool({"Metaspace", "Replace"} & kinds)
        self._has_byte_tokens = "ByteFallback" in kinds
        self._spell = spell
        self._added = added

    def __call__(self, token: int) -> bytes:
        """Empty for ids that the tokenizer does not know."""
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
    """Byte by the character that byte-level BPE writes for it: printable Latin-1 as is, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()
