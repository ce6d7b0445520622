"""LMI's serving.properties: Java properties, with the settings of one model. Pure functions.

line  = ws ( ("#" | "!") comment | key ( ws? ("=" | ":") ws? | ws ) value )
value = text, with escapes; a backslash at the end of a line continues it
"""

import re
from collections.abc import Iterator

from router.config import ini
from router.config.ini import Entry, Problem, Section

FILE = "serving.properties"
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_PAIR = re.compile(r"((?:[^\\=:\s]|\\.)+)(?:\s*[=:]\s*|\s+|$)(.*)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}


def parse(text: str, *, file: str, name: str) -> tuple[Section, list[Problem]]:
    """The settings as a section `name`, and what is wrong with the text. Keys keep the prefix `option.`."""
    entries: list[Entry] = []
    problems: list[Problem] = []
    for number, line in _logical_lines(text):
        pair = _PAIR.fullmatch(line)
        if pair is None or not _KEY.fullmatch(pair[1]):
            problems.append(Problem(file, number, name, "", "neither a comment nor key=value"))
        else:
            entries.append(Entry(pair[1], ini.unescape(pair[2], lambda code: _ESCAPES.get(code, code)).strip(), number))
    return Section(name, 1, tuple(entries), file), problems


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without blank lines and comments; continued lines are joined."""
    begun, first = "", 0
    # Not splitlines(): it ends lines at further characters, such as U+2028.
    for number, raw in enumerate([*re.split(r"\r\n|\r|\n", text.removeprefix("\ufeff")), ""], start=1):
        line = raw.lstrip()
        if not begun and (not line or line[0] in "#!"):
            continue
        first = first if begun else number
        if (len(line) - len(line.rstrip("\\"))) % 2:
            begun += line[:-1]
        else:
            yield first, (begun + line).rstrip()
            begun = ""
