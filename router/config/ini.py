"""The parser of the INI format. It returns sections and entries with line numbers.

    line    = ws ( "[" name "]" | key ws "=" ws value | comment )? ws comment?
    comment = ";" or "#" at the start of a line or after white space, to its end
    value   = "double" with escapes | 'single' without | JSON ({..} or [..]) | bare text

`parse` raises nothing: it returns all errors of the text as `Problem`s with their lines. Pure functions.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

MAX_PRESET_BYTES = 1 << 20  # of one file; a guess
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,191}")
# The title of a section may also contain blanks and parentheses, as in llama-server's files: [Qwen3 8B (low)].
_TITLE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._:/@+()~ -]{0,190}[A-Za-z0-9._:/@+()~-])?")
_HEADER = re.compile(r"\[([^\]]*)\](.*)", re.DOTALL)
_KEY = re.compile(r"(-*[A-Za-z_][A-Za-z0-9_.-]*)[ \t]*=(.*)", re.DOTALL)
_END = re.compile(r"[ \t]*(?:[ \t][;#].*)?", re.DOTALL)
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_SINGLE = re.compile(r"'([^']*)'", re.DOTALL)
_COMMENT = re.compile(r"[ \t][;#]")
_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_ESCAPES = {'"': '"', "\\": "\\", "n": "\n", "t": "\t"}
_VARIABLE = re.compile(r"\$\{env:([^}]*)(\}?)")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_UNCLOSED = "a [ without ]; sections are written [name]"
_JSON = json.JSONDecoder(parse_constant=lambda word: _reject(f"{word} is no JSON"))


@dataclass(frozen=True, slots=True)
class Problem:
    """An error or a warning about a file, a flag or a variable. Printed as one line, without control characters."""

    file: str  # or the name of the flag or variable
    line: int  # from 1; 0: no line
    section: str
    key: str
    message: str
    suggestion: str = ""  # the most similar valid spelling

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        section = f"[{self.section}] " if self.section else ""
        hint = f'; did you mean "{self.suggestion}"?' if self.suggestion else ""
        line = f"{place}: {section}{self.message}{hint}" if place else f"{section}{self.message}{hint}"
        return printable(line)

    def row(self) -> dict[str, str | int]:
        """The fields as members of a JSON object."""
        return {name: printable(value) if isinstance(value, str) else value for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """`key = value`: the key as written, the value without quotes and with variables replaced."""

    key: str
    value: str
    line: int
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """`[name]` and the entries below it."""

    name: str
    line: int
    entries: tuple[Entry, ...] = ()
    file: str = ""  # its source, if not the file that is read


@dataclass(frozen=True, slots=True)
class Document:
    """The sections of a file in their order. Unusable if there are problems."""

    sections: tuple[Section, ...]
    problems: tuple[Problem, ...]


def parse(text: str, *, file: str = "", environ: Mapping[str, str] | None = None) -> Document:
    """Parse a text. Problems name it `file`; `${env:NAME}` is replaced with values of `environ`."""
    if len(text) > MAX_PRESET_BYTES:
        return Document((), (Problem(file, 0, "", "", f"is larger than {MAX_PRESET_BYTES >> 20} MiB"),))
    found: list[tuple[str, int, list[Entry]]] = []  # the sections: their names, first lines and entries
    problems: list[Problem] = []
    name, lines_of = "", dict[str, int]()

    def complain(line: int, key: str, message: str) -> None:
        problems.append(Problem(file, line, name, key, message))

    for number, raw in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        line = raw.removesuffix("\r").strip(" \t")
        if not line or line[0] in ";#":
            continue
        control = _CONTROL.search(line)
        header, pair = _HEADER.fullmatch(line), _KEY.fullmatch(line)
        if control:
            complain(number, "", f"control character U+{ord(control[0]):04X}; remove it")
        elif header:
            name = header[1].strip(" \t")
            found.append((name, number, []))
            fault = _header_fault(name, header[2])
            if fault:
                problems.append(Problem(file, number, "", "", fault))
            elif name in lines_of:
                complain(number, "", f"this section already began in line {lines_of[name]}; merge the two")
            lines_of.setdefault(name, number)
        elif pair:
            try:
                value, quoted = _value(pair[2], environ or {})
            except ValueError as error:
                complain(number, pair[1], f"{pair[1]}: {error}")
                continue
            entry = Entry(pair[1], value, number, quoted)
            fault = _preamble_fault(entry)  # `version = 1` may stand in a section, too, as in llama-server
            if fault and found:
                found[-1][2].append(entry)
            elif fault:
                complain(number, entry.key, fault)
        else:
            is_open = line[0] == "["
            complain(number, "", _UNCLOSED if is_open else "neither [section] nor key = value")
    sections = tuple(Section(title, line, tuple(entries)) for title, line, entries in found)
    return Document(sections, tuple(problems))


def printable(text: str) -> str:
    """Escape control characters and bytes that are not UTF-8. Names of folders may have both."""
    text = text.encode(errors="backslashreplace").decode()
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def is_utf8(path: str) -> bool:
    """True if a path has no bytes that are not UTF-8; Python has them as halves of surrogate pairs."""
    return path.isascii() or path.encode(errors="replace").decode() == path


def is_name(text: str) -> bool:
    """True if `text` is a valid model name: allowed characters, and no empty part, `.` or `..` between slashes."""
    return bool(NAME.fullmatch(text)) and _has_proper_parts(text)


def _has_proper_parts(name: str) -> bool:
    return all(part not in {"", ".", ".."} for part in name.split("/"))


def _header_fault(name: str, rest: str) -> str:
    if not _END.fullmatch(rest):
        return f"text after [{name}]; a comment needs a blank before it"
    if name != "*" and not (_TITLE.fullmatch(name) and _has_proper_parts(name)):
        return (
            f"[{name[:60]}] is no model name; use letters, digits, blanks and ._:/@+()~- (192 at most, no empty part)"
        )
    return ""


def _preamble_fault(entry: Entry) -> str:
    """The problem of an entry before the first section, where only `version = 1` is allowed; empty if it is that."""
    if entry.key.lstrip("-") != "version":
        return f"{entry.key} stands before the first section; write [*] above it to set it for all models"
    return "" if entry.value == "1" else f"version {entry.value[:20]} is not known; this router reads version 1"


def _value(text: str, environ: Mapping[str, str]) -> tuple[str, bool]:
    """The value and whether it was in quotes; `text` is everything after the equals sign. Raises ValueError."""
    start = text.lstrip(" \t")
    for quoted in (_DOUBLE, _SINGLE):
        match = quoted.match(start)
        if match and _END.fullmatch(start[match.end() :]):
            return (_fill(_unescape(match[1]), environ), True) if quoted is _DOUBLE else (match[1], True)
    if (start[:1] == '"' and not _DOUBLE.match(start)) or (start[:1] == "'" and not _SINGLE.match(start)):
        raise ValueError(f"{start[0]} without its closing {start[0]}; quote the whole value")
    if start[:1] in {"{", "["}:
        try:
            end = _JSON.raw_decode(start)[1]
        except (ValueError, RecursionError):
            pass  # bare text that begins with a bracket, for example a template
        else:
            if _END.fullmatch(start[end:]):
                return _fill(start[:end], environ, in_json=True), False
    comment = _COMMENT.search(text)
    return _fill(text[: comment.start()].strip(" \t") if comment else start.rstrip(" \t"), environ), False


def _unescape(text: str) -> str:
    def character(code: str) -> str:
        if code not in _ESCAPES:
            raise ValueError(f'\\{code} is no escape in "..."; write \\\\ for a backslash, or use single quotes')
        return _ESCAPES[code]

    return unescape(text, character)


def unescape(text: str, character: Callable[[str], str]) -> str:
    r"""Replace `\uXXXX`, and the other escapes by the `character` of the code behind the backslash."""

    def replaced(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code[1:], 16)) if len(code) == 5 else character(code)

    # Two \u escapes may be a surrogate pair, which is one character outside the basic multilingual plane.
    return _ESCAPE.sub(replaced, text).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def _fill(text: str, environ: Mapping[str, str], *, in_json: bool = False) -> str:
    def variable(match: re.Match[str]) -> str:
        name = match[1]
        if not match[2] or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError("write ${env:NAME}, or single quotes to mean it literally")
        if name not in environ:
            raise ValueError(f"the environment variable {name} is not set")
        return json.dumps(environ[name])[1:-1] if in_json else environ[name]

    filled = _VARIABLE.sub(variable, text)
    if "\0" in filled or (not filled.isascii() and any("\ud800" <= char <= "\udfff" for char in filled)):
        raise ValueError("the value has a NUL or half a surrogate pair")
    return filled


def _reject(message: str) -> None:
    raise ValueError(message)
