"""Faults of a JSON body: too many values, and the reason why it is not JSON, in clearer words than those of the
parsers. PURE."""

import re

# The most objects and arrays of a body, and the most values. 60 MB of empty arrays take 4 s to parse, with the
# interpreter lock, and 72 bytes of memory each (orjson 3.13); then objects are read on the event loop, in a microsecond
# each. 65,536 objects are enough for 512 tools with 128 objects each, 2 million values for all token ids of a request.
MAX_OBJECTS, MAX_VALUES = 1 << 16, 2 << 20
_MARKS = b'",[{'
_NO_MARKS = bytes(set(range(256)) - set(_MARKS))

# Half of a surrogate pair: JavaScript writes it when a text was cut inside an emoji. A `ud83d` after an escaped
# backslash matches, too. That is rare, and the body is rejected in any case.
_HALF = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


def describe(body: bytes | bytearray, found: str) -> str:
    """Return the fault of `body`. `found`: the parser's message, which is returned if there is no better one."""
    if "utf-8" in found.lower():  # orjson takes every invalid byte for a surrogate, at position 0
        try:
            body.decode()
        except UnicodeDecodeError as wrong:
            return f"it is not UTF-8 (byte {wrong.start})"
    # msgspec reports half a pair at the end of a string as truncated input.
    if ("surrogate" in found or "truncated" in found) and (half := _HALF.search(body)):
        return f"a string has half a surrogate pair (byte {half.start()}), as of a text that was cut inside an emoji"
    return found


def too_many_values(body: bytes | bytearray) -> str:
    """Return an error message if `body` has more than MAX_OBJECTS or MAX_VALUES, else an empty string.

    Takes a tenth of a second for 10 MB of program text.
    """
    # Most bodies need no exact count: their strings contain few commas and brackets.
    if not _exceeds(body):
        return ""
    marks = _marks(body)
    if marks.count(b'"') > 2 * MAX_VALUES:
        return f"the request body has more than {MAX_VALUES} strings; send several requests"
    if _exceeds(_outside_strings(marks)):
        return (
            f"the request body has more than {MAX_OBJECTS} objects and arrays, or {MAX_VALUES} values; join texts, or"
            " send several requests"
        )
    return ""


def _marks(body: bytes | bytearray) -> bytes | bytearray:
    """Return the commas, the opening brackets, and the quotes that begin or end a string."""
    return body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS)


def _outside_strings(marks: bytes | bytearray) -> bytes:
    return b"".join(marks.split(b'"')[::2])


def _exceeds(body: bytes | bytearray) -> bool:
    objects = body.count(b"[") + body.count(b"{")
    return objects > MAX_OBJECTS or objects + body.count(b",") > MAX_VALUES
