"""The option types: those of click, with the spellings of llama-server, and types for times, sizes and devices.

Presets, flags and environment variables share them, so that one spelling has one meaning everywhere. Pure functions.
Calling a type with a text returns the value or raises click.BadParameter, whose message contains a few characters of
the text at most. Flags are not converted by click's parser: it would stop at the first error, without the errors of
variables and files.
"""

import contextlib
import dataclasses
import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from router.planner.ledger import DeviceShare
from worker.protocol.dialects.generation_fields import SAMPLER_ALIASES, SAMPLER_LETTERS
from worker.protocol.memory import MIB

_WHOLE = re.compile(r"[0-9]{1,18}")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]{1,18}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][+-]?[0-9]{1,3})?")
_TIME = re.compile(r"([0-9]{1,12}(?:\.[0-9]{0,9})?)[ ]*(ms|s|m|h|d)?")
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{0,9})?)[ ]*([A-Za-z]*)")
_SECONDS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {
    "": MIB, "b": 1, "kib": 1 << 10, "mib": MIB, "gib": 1 << 30, "tib": 1 << 40,
    "k": 1 << 10, "m": MIB, "g": 1 << 30, "t": 1 << 40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
# vLLM has decimals with suffixes in lower case only.
_COUNT = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?(?=[km])|[0-9]{1,9}(?=[KM]))([kmKM])")
_COUNTS = {"k": 10**3, "m": 10**6, "K": 1 << 10, "M": 1 << 20}
_ACCELERATOR = re.compile(r"(?:cuda:?|gpu:?)?([0-9]{1,3})", re.IGNORECASE)
_BIAS = re.compile(r"([0-9]{1,9})(-inf|[+-][0-9]{1,9}(?:\.[0-9]{0,9})?)")
_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]{1,80}")


class Kind(click.ParamType[Any]):
    """An option type that can also convert a value back to text."""

    name = "value"
    hint: str  # the allowed values, in a few words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self.read(value)

    def read(self, text: str) -> Any:
        """Return the value. Raises click.BadParameter."""
        raise NotImplementedError

    def write(self, value: Any) -> str:
        """A text that converts to `value`."""
        return str(value)


def declared(default: Any, *, shown: bool = True, **facts: Any) -> Any:
    """Declare a field of a dataclass with a default, and `facts` as its metadata. `shown`: it is part of the repr."""
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=facts)
    return dataclasses.field(default=default, repr=shown, metadata=facts)


def shown(text: str) -> str:
    """`text` in quotes, short enough for one line of a message."""
    return json.dumps(_brief(text), ensure_ascii=True)


def _brief(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


def nearest(text: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The element of `known` that is most similar to `text`; empty if none is similar."""
    return next(iter(difflib.get_close_matches(text, sorted(known), n=1, cutoff=cutoff)), "")


def plain(value: float) -> str:
    """A number as text, without `.0`."""
    return str(int(value)) if value == int(value) else repr(value)


class Flag(Kind, click.types.BoolParamType):
    """A boolean: on or off."""

    hint = "on/off"

    def read(self, text: str) -> bool:
        word = text.strip().lower()
        if not word:  # click reads it as `off`, but a key without a value is more likely a mistake
            self.fail("the value is empty; write on or off")
        try:
            words = {"enabled": "on", "disabled": "off"}
            return click.types.BoolParamType.convert(self, words.get(word, word), None, None)
        except click.BadParameter:
            self.fail(f"{shown(text)} is neither on nor off")

    def write(self, value: bool) -> str:
        return "on" if value else "off"


def switch_words(on: str, off: str) -> dict[str, str]:
    """The words for on and off as other spellings of two values of a `OneOf`."""
    words = {"on": on, "yes": on, "true": on, "1": on, "enabled": on}
    return words | {"off": off, "no": off, "false": off, "0": off, "disabled": off}


class Integer(Kind, click.IntRange):
    """A whole number between `low` and `high`, or one of `words`."""

    def __init__(self, low: int = 0, high: int = 1 << 31, words: Mapping[str, int] | None = None, unit: str = "number"):
        super().__init__(low, high)
        self._low, self._high = low, high
        self.words = words or {}
        self.hint = ", ".join([unit, *self.words])

    def read(self, text: str) -> int:
        word: Any = text.strip().lower()
        if word in self.words:
            return self.words[word]
        try:
            return click.IntRange.convert(self, word, None, None)
        except click.BadParameter:
            self.fail(
                f"{shown(text)} is not a whole number from {self._low} to {self._high}"
                + "".join(f", nor {other}" for other in self.words)
            )

    def write(self, value: int) -> str:
        """The number, or a word for it if only a word can set it."""
        words = (word for word, number in self.words.items() if number == value)
        return str(value) if self._low <= value <= self._high else next(words, str(value))


class Tokens(Integer):
    """A number of tokens, also in vLLM's notation: 1k is 1000, 1K is 1024, 25.6k is 25600."""

    def read(self, text: str) -> int:
        match = _COUNT.fullmatch(text.strip())
        return super().read(text if match is None else plain(round(float(match[1]) * _COUNTS[match[2]])))


class Number(Kind, click.FloatRange):
    """A finite number between `low` and `high`."""

    hint = "number"

    def __init__(self, low: float = -1e9, high: float = 1e9):
        super().__init__(low, high)
        self._range = f"{plain(low)} to {plain(high)}"

    def read(self, text: str) -> float:
        word: Any = text.strip()
        with contextlib.suppress(click.BadParameter):
            found = click.FloatRange.convert(self, word, None, None)
            if not math.isnan(found):  # click compares it with the limits, and no comparison is true
                return found
        self.fail(f"{shown(text)} is not a number from {self._range}")

    def write(self, value: float) -> str:
        return plain(value)


class OneOf(Kind, click.Choice[str]):
    """One of `values`. `also` maps other spellings to them, `refused` maps words that are not offered to advice."""

    def __init__(
        self,
        values: Sequence[str],
        also: Mapping[str, str] | None = None,
        refused: Mapping[str, str] | None = None,
    ):
        super().__init__(values, case_sensitive=False)
        self.also, self.refused = also or {}, refused or {}
        self.hint = ", ".join(filter(None, values))

    def read(self, text: str) -> str:
        word = text.strip().lower()
        word = self.also.get(word, word)
        if word in self.refused:
            self.fail(f"{word} is not offered by this version: {self.refused[word]}")
        return click.Choice.convert(self, _brief(word), None, None)


class LastOf(OneOf):
    """A list of `values`, separated by commas. The one that comes last in `values` applies."""

    def read(self, text: str) -> str:
        found = {OneOf.read(self, item) for item in text.split(",")}
        return next(choice for choice in reversed(self.choices) if choice in found)


@dataclass(frozen=True)
class Span(Kind):
    """A whole number from 1, or the least and the most of it: `2` or `1-3`."""

    high: int = 1000
    hint: str = "N or MIN-MAX"

    def read(self, text: str) -> tuple[int, int]:
        parts = text.strip().split("-")
        numbers = [int(part) for part in parts if _WHOLE.fullmatch(part.strip())]
        if len(numbers) != len(parts) or len(parts) > 2 or not 1 <= numbers[0] <= numbers[-1] <= self.high:
            self.fail(f"{shown(text)} is not a number from 1 to {self.high}, nor two such as 1-3")
        return numbers[0], numbers[-1]

    def write(self, value: tuple[int, int]) -> str:
        least, most = value
        return str(least) if least == most else f"{least}-{most}"


class Seconds(Kind):
    """A time such as 30, 5m or 2h. -1 means `off`; None: -1 is not allowed."""

    def __init__(self, low: float = 0.0, off: float | None = None, words: Mapping[str, float] | None = None):
        self.low, self.off, self.words = low, off, words or {}
        self.hint = ", ".join(["seconds", *self.words, *(["-1"] if off is not None else [])])

    def read(self, text: str) -> float:
        word = text.strip().lower()
        if word in self.words:
            return self.words[word]
        if _DECIMAL.fullmatch(word) and float(word) == -1:
            if self.off is None:
                self.fail("this time cannot be turned off (-1)")
            return self.off
        match = _TIME.fullmatch(word)
        if match is None:
            self.fail(f"{shown(text)} is not a time; write seconds, or 5m, 2h")
        found = float(match[1]) * _SECONDS[match[2] or ""]
        if not self.low <= found <= 1e9:
            self.fail(f"{shown(text)} is not a time of {plain(self.low)} seconds or more (and 30 years or less)")
        return found

    def write(self, value: float) -> str:
        return next((word for word, meaning in self.words.items() if meaning == value), plain(value))


@dataclass(frozen=True)
class Text(Kind):
    """Any text."""

    hint: str = "text"
    pattern: str = ""
    complaint: str = ""

    def read(self, text: str) -> str:
        if self.pattern and not re.fullmatch(self.pattern, text):
            self.fail(f"{shown(text)} {self.complaint}")
        return text


@dataclass(frozen=True)
class Names(Kind):
    """A list separated by commas, or a JSON list of strings. Empty and repeated items are dropped."""

    pattern: str = ""
    complaint: str = ""
    hint: str = "list"

    def read(self, text: str) -> tuple[str, ...]:
        items = tuple(dict.fromkeys(item.strip() for item in _items(text) if item.strip()))
        for item in items:
            if self.pattern and not re.fullmatch(self.pattern, item):
                self.fail(f"{shown(item)} {self.complaint}")
        return items

    def write(self, value: tuple[str, ...]) -> str:
        simple = all("," not in item for item in value) and not (value and value[0].startswith("["))
        return ",".join(value) if simple else json.dumps(value, ensure_ascii=False)


class Groups(Kind):
    """Lists separated by semicolons, each as `Names` reads it."""

    hint = "LIST"

    def read(self, text: str) -> tuple[tuple[str, ...], ...]:
        return tuple(Names().read(group) for group in text.split(";") if group.strip())

    def write(self, value: tuple[tuple[str, ...], ...]) -> str:
        return ";".join(map(Names().write, value))


class Strings(Kind):
    """A JSON list of strings, or a list separated by commas whose items keep their blanks."""

    hint = "list, or JSON list"

    def read(self, text: str) -> tuple[str, ...]:
        items = tuple(item for item in _items(text) if item)
        if any(_unsendable(item) for item in items):
            self.fail("a string has half a surrogate pair")
        return items

    def write(self, value: tuple[str, ...]) -> str:
        return json.dumps(value, ensure_ascii=False)


class Samplers(Kind):
    """Samplers of llama-server in their order: names separated by `;` or `,`, or one letter each (`kpmt`)."""

    hint = "names;names, or letters"

    def read(self, text: str) -> tuple[str, ...]:
        words = [word.strip() for word in re.split("[;,]", text) if word.strip()]
        names = [SAMPLER_ALIASES.get(word, word) for word in words]
        if len(names) == 1 and names[0] not in SAMPLER_LETTERS.values():
            names = [SAMPLER_LETTERS.get(letter, letter) for letter in names[0]]
        for name in names:
            if name not in SAMPLER_LETTERS.values() or names.count(name) > 1:
                known = ", ".join(SAMPLER_LETTERS.values())
                self.fail(f"{shown(text)} is not a list of samplers, each once, among {known}")
        if "infill" in names:
            self.fail("the sampler infill is not offered; leave it out")
        return tuple(names)

    def write(self, value: tuple[str, ...]) -> str:
        return ";".join(value)


class LogitBias(Kind):
    """Biases by token id as a JSON object of a request's form: `15043+1`, `15043-0.5,9-inf`, or such an object."""

    hint = "ID+BIAS,ID-BIAS, or JSON object"

    def read(self, text: str) -> dict[str, Any]:
        if text.lstrip().startswith("{"):
            found: dict[str, Any] = json.loads(JsonObject().read(text))
            return found
        biases: dict[str, Any] = {}
        for item in (item.strip() for item in text.split(",") if item.strip()):
            match = _BIAS.fullmatch(item)
            if match is None:
                self.fail(f"{shown(item)} is not a token id with a bias; write 15043+1 or 15043-inf")
            biases[match[1]] = False if match[2] == "-inf" else float(match[2])
        return biases

    def write(self, value: dict[str, Any]) -> str:
        return json.dumps(value, separators=(",", ":"))


@dataclass(frozen=True)
class Memory(Kind):
    """A size in bytes, written in MiB or with a unit: 9000, 9GiB, 512MB."""

    low: int = 0
    hint: str = "MiB"
    unit: str = "MiB"  # of a number without one, for messages

    def read(self, text: str) -> int:
        match = _SIZE.fullmatch(text.strip())
        if match is None or match[2].lower() not in _BYTES:
            self.fail(f"{shown(text)} is not a size; write {self.unit}, or 9GiB, 512MB")
        size = float(match[1]) * _BYTES[match[2].lower()]
        if size >= 1 << 60:
            self.fail(f"{shown(text)} is more than any device has; write {self.unit}, or 9GiB, 512MB")
        if int(size) < self.low:
            least = self.write(self.low)
            self.fail(f"{shown(text)} is not a size of at least {least if 'B' in least else least + ' MiB'}")
        return int(size)

    def write(self, value: int) -> str:
        return str(value // MIB) if value % MIB == 0 else f"{value}B"


class Share(Kind):
    """A share above 0 and up to 1, as a number or a percentage: `0.9`, `90%`."""

    hint = "0.9, or 90%"

    def read(self, text: str) -> float:
        word = text.strip()
        number, divisor = (word[:-1].strip(), 100) if word.endswith("%") else (word, 1)
        share = float(number) / divisor if _DECIMAL.fullmatch(number) else 0.0
        if not 0 < share <= 1:
            self.fail(f"{shown(text)} is not a share above 0 and up to 1; write 0.9, or 90%")
        return share

    def write(self, value: float) -> str:
        return plain(value)


class Sizes(Kind):
    """Sizes in bytes by position, written in GiB or with a unit: `20`, `16,24`, `20GiB,8000MiB`."""

    hint = "GiB, or GiB,GiB by device"

    def read(self, text: str) -> tuple[int, ...]:
        items = [item.strip() for item in text.split(",") if item.strip()]
        sizes = tuple(Memory(unit="GiB").read(f"{item}GiB" if _DECIMAL.fullmatch(item) else item) for item in items)
        if items and not any(sizes):
            self.fail("no size above 0 is given")
        return sizes

    def write(self, value: tuple[int, ...]) -> str:
        return ",".join(plain(size / (1 << 30)) if size % MIB == 0 else f"{size}B" for size in value)


class Numbers(Kind):
    """Proportions, at least two of them above 0: `3,1`."""

    hint = "N,N by device"

    def read(self, text: str) -> tuple[float, ...]:
        if not text.strip():
            return ()
        items = re.split(r"[,/]", text.strip())
        numbers = tuple(Number(low=0.0).read(item) for item in items)
        if sum(1 for number in numbers if number) < 2:
            self.fail(f"{shown(text)} names no two shares; for one device, write device = it")
        return numbers

    def write(self, value: tuple[float, ...]) -> str:
        return ",".join(map(plain, value))


@dataclass(frozen=True)
class MemoryByDevice(Kind):
    """Sizes in bytes by device: `9000` for all, or `cuda:0=9000,cpu=1500`; `9,8` means cuda:0=9,cuda:1=8."""

    low: int = 0
    named: bool = False  # each size needs the name of its device
    shares: bool = False  # a size may be a percentage of the device: `cuda:0=90%`, as a `DeviceShare`
    hint: str = "MiB, or cuda:0=MiB,cpu=MiB"

    def read(self, text: str) -> dict[str, int | DeviceShare]:
        sizes: dict[str, int | DeviceShare] = {}
        items = [item.strip() for item in text.split(",") if item.strip()]
        if not items:
            self.fail("no size is given")
        for position, item in enumerate(items):
            device, has_name, size = item.rpartition("=")
            if self.named and not has_name:
                self.fail(f"{shown(item)} names no device; write {self.hint}")
            nameless = "" if len(items) == 1 else f"cuda:{position}"
            name = device_name(device) if has_name else nameless
            if name in sizes:
                self.fail(f"{name} stands there twice")
            if self.shares and size.endswith("%"):
                sizes[name] = DeviceShare(Share().read(size))
            else:
                sizes[name] = Memory(low=self.low).read(size)
        return sizes

    def write(self, value: Mapping[str, int | DeviceShare]) -> str:
        sizes = {
            name: str(size) if isinstance(size, DeviceShare) else Memory().write(size) for name, size in value.items()
        }
        return ",".join(f"{name}={size}" if name else size for name, size in sizes.items())


class DeviceNames(Kind):
    """`auto` (empty), `cpu`, or accelerators as `cuda:0`, `0`, `gpu0` or a UUID."""

    hint = "auto, cpu, cuda:0,cuda:1 or UUIDs"

    def read(self, text: str) -> tuple[str, ...]:
        if text.strip().lower() in {"auto", "", "*", "cuda", "gpu"}:  # FastChat's default is `cuda`
            return ()
        names = tuple(dict.fromkeys(device_name(item) for item in re.split("[,;]", text) if item.strip()))
        if "cpu" in names and len(names) > 1:
            self.fail("cpu and accelerators do not mix; name one kind")
        return names

    def write(self, value: tuple[str, ...]) -> str:
        return ",".join(value) or "auto"


class JsonObject(Kind):
    """A JSON object as normalized text, with sorted members and without blanks; empty text: no object."""

    hint = "JSON object"

    def read(self, text: str) -> str:
        if not text.strip():
            return ""
        try:
            found = json.loads(text)
            normal = json.dumps(found, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            self.fail(f"{shown(text)} is not JSON")
        if not isinstance(found, dict):
            self.fail(f"{shown(text)} is not a JSON object")
        if _unsendable(normal):
            self.fail("the JSON has half a surrogate pair")
        return normal


_UNSUPPORTED = frozenset({"amd", "hip", "metal", "mps", "npu", "rocm", "sycl", "vulkan", "xpu"})


def device_name(text: str) -> str:
    """The canonical name of a device: `cpu`, `cuda:N` or a UUID. Raises click.BadParameter."""
    name = text.strip()
    if name.lower() in {"cpu", "none", "host", "-1"}:
        return "cpu"
    match = _ACCELERATOR.fullmatch(name)
    if match:
        return f"cuda:{int(match[1])}"
    if _UUID.fullmatch(name):
        return name
    if name.lower().rstrip("0123456789").rstrip(":") in _UNSUPPORTED:
        raise click.BadParameter(
            f"{shown(text)} is not supported by this version, which runs on CUDA devices and on cpu"
        )
    raise click.BadParameter(f"{shown(text)} is no device; write cpu, cuda:0, 0, gpu0 or a UUID such as GPU-...")


def sendable(text: str) -> bool:
    """True if `text` can be an argument of a program: valid UTF-8 without NUL."""
    return "\0" not in text and not _unsendable(text)


def _unsendable(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)


def _items(text: str) -> list[str]:
    if not text.lstrip().startswith("["):
        return text.split(",")
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        raise click.BadParameter(f"{shown(text)} is not a JSON list") from None
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise click.BadParameter(f"{shown(text)} is not a JSON list of strings")
    return items
