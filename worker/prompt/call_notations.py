"""Notations of tool calls that are neither JSON nor tagged, rewritten as JSON.

One token after the other is translated and nothing is checked: the result is JSON only if the text is well-formed. So
any text may be passed, and the time is proportional to its length.
"""

import json
import re

# A quote ends a text only before a delimiter: models write 'it's' without a backslash.
_TOKEN = re.compile(
    r"""
      <\|"\|>(?P<raw>.*?)<\|"\|>
    | '(?P<single>(?:[^'\\]|\\.|'(?!\s{0,8}[,:)\]}]))*+)'
    | "(?P<double>(?:[^"\\]|\\.|"(?!\s{0,8}[,:)\]}]))*+)"
    | (?P<word>[\w.+$-]++)(?:\s{0,8}(?P<after>[(=:]))?
    | (?P<mark>[\[\](){},:\s])
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NOT_BLANK = re.compile(r"\S")
_CLOSING = {"{": "}", "[": "]", "(": "]"}


def python_to_json(region: str) -> str:
    """Rewrite `[f(a='b')]` as `[{"name": "f", "arguments": {"a": "b"}}]`, wherever it is in `region`."""
    begin, end = region.find("["), region.rfind("]") + 1
    return region[:begin] + _to_json(region[begin:end]) + region[end:]


def gemma_to_json(region: str) -> str:
    """Rewrite Gemma 4's `{a:<|"|>b<|"|>}` as `{"a": "b"}`, wherever it is in `region`."""
    begin, end = region.find("{"), region.rfind("}") + 1
    return region[:begin] + _to_json(region[begin:end]) + region[end:]


def lines_to_json(region: str) -> str:
    """Rewrite the calls `f(a='b')` between two tags, a line each, as `[{"name": "f", "arguments": {"a": "b"}}]`."""
    begin, end = region.find(">") + 1, region.rfind("<")
    return objects_to_list(region[:begin] + _to_json(region[begin:end]) + region[end:])


def objects_to_list(region: str) -> str:
    """Rewrite `{"name": "f", ...} {...}` as `[{"name": "f", ...}, {...}]`, wherever it is in `region`. Raise ValueError
    for text between the objects."""
    begin, end = region.find("{"), region.rfind("}") + 1
    if "[" in region[:begin]:
        return region
    objects, at, decode = [], begin, json.JSONDecoder().raw_decode
    while at < end:
        found, at = decode(region, at)
        objects.append(found)
        following = _NOT_BLANK.search(region, at, end)
        at = following.start() if following else end
    return f"{region[:begin]}{json.dumps(objects)}{region[end:]}"


def keyed_to_json(region: str) -> str:
    """Rewrite `[{"f": {"a": 1}}]` as `[{"name": "f", "arguments": {"a": 1}}]`, wherever it is in `region`."""
    begin, end = region.find("["), region.rfind("]") + 1
    calls = [
        {"name": name, "arguments": given} for call in json.loads(region[begin:end]) for name, given in call.items()
    ]
    return region[:begin] + json.dumps(calls) + region[end:]


def _to_json(text: str) -> str:
    """Translate `text`. Raise ValueError for a character outside of both notations, IndexError for a bracket that
    closes nothing."""
    written: list[str] = []
    closing: list[str] = []  # of the open brackets
    end = 0
    while end < len(text):
        token = _TOKEN.match(text, end)
        if token is None:
            raise ValueError(f"unexpected character at {end}")
        end = token.end()
        word, mark = token["word"], token["mark"]
        if token["after"] == "(":
            written.append(f'{{"name": {json.dumps(word)}, "arguments": {{')
            closing.append("}}")
        elif token["after"]:
            written.append(f"{json.dumps(word)}:")
        elif word is not None:
            # Other words are texts, and the tool's schema makes 007 a number.
            written.append(_CONSTANTS.get(word) or (word if _NUMBER.fullmatch(word) else json.dumps(word)))
        elif mark is None:
            raw = token["raw"]
            written.append(json.dumps(_unescaped(token["single"] or token["double"] or "") if raw is None else raw))
        elif mark in _CLOSING:
            written.append("[" if mark == "(" else mark)
            closing.append(_CLOSING[mark])
        else:
            written.append(closing.pop() if mark in ")]}" else mark)
    return "".join(written)


def _unescaped(text: str) -> str:
    """Replace Python's escapes. As in Python, a backslash before any other character stays."""

    def replacement(escape: re.Match[str]) -> str:
        code = escape[1] or escape[2]
        return chr(int(code, 16)) if code else _ESCAPED.get(escape[3], escape[0])

    return _ESCAPE.sub(replacement, text)
