"""The reason why a body is not JSON, in clearer words than those of the parsers. PURE."""

import re

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
