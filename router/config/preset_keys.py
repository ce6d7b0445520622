"""The names in the preset format: all spellings of keys in files, flags and variables, and their meanings.

A name is that of a key (`presets.KEYS`), that of an option of another server (`FOREIGN`), or unknown. Pure functions.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from router.config.option_types import Flag, nearest
from router.config.presets import KEYS, PresetKey
from router.config.settings import NEGATIVE

DEMOS = ("chat", "embed", "a", "b", "c")  # names in `model = demo:NAME`
_FLAG = Flag()
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"


def _is_one_of(text: str, values: str) -> bool:
    """True if `text` is one of the values, which are separated by blanks; numbers are compared as such."""
    try:
        return float(text) in [float(value) for value in values.split()]
    except ValueError:
        return text.strip().lower() in values.split()


@dataclass(frozen=True)
class ForeignOption:
    """An option of another server that is no key here, as `other_servers.toml` describes it."""

    names: tuple[str, ...]  # the first one names it here
    is_refused: bool  # values are errors unless they are neutral or have a meaning; else the option has no effect
    is_flag: bool
    advice: str = ""
    neutral: str = ""  # values that change nothing, separated by blanks
    env: tuple[str, ...] = ()  # variables that no name gives
    means: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # by value: the key that means it, and its value
    is_list: bool = False  # the option may have several values, separated by blanks or commas

    @property
    def name(self) -> str:
        return self.names[0]

    def values(self, text: str) -> list[str]:
        return text.replace(",", " ").split() if self.is_list else [text.strip()]

    def accepts(self, text: str) -> bool:
        """True if a value changes nothing."""
        return (self.is_refused and not text.strip()) or _is_one_of(text, self.neutral)

    @property
    def message(self) -> str:
        if self.is_refused:
            return "is not offered by this version: remove it" + (f"; {self.advice}" if self.advice else "")
        return f"has no meaning here; {self.advice or 'remove it'}"


KnownOption = PresetKey | ForeignOption

_COLUMNS = {"advice", "neutral", "env", "means", "is-list"}
_SWITCH_WORDS = {"OFF": "off false no disabled 0 none", "ON": "on true yes enabled 1 auto"}


def _foreign_options(text: str) -> Iterator[ForeignOption]:
    """The options in the text of `other_servers.toml`."""
    tables = tomllib.loads(text)
    for form in ("switches", "values"):
        is_flag = form == "switches"
        for kind in ("refused", "ignored"):
            for names, facts in tables[kind][form].items():
                row: Mapping[str, Any] = facts if isinstance(facts, dict) else {"advice": facts}
                assert row.keys() <= _COLUMNS, f"{names} has an unknown member"
                yield ForeignOption(
                    names=tuple(names.split()),
                    is_refused=kind == "refused",
                    is_flag=is_flag,
                    advice=row.get("advice", ""),
                    neutral=" ".join(_SWITCH_WORDS.get(word, word) for word in row.get("neutral", "").split()),
                    env=tuple(row.get("env", "").split()),
                    means={value: _setting(text) for value, text in row.get("means", {}).items()},
                    is_list=row.get("is-list", False),
                )
        for each in tables["ignored-lists"]:
            for name in each.get(form, "").split():
                yield ForeignOption((name,), is_refused=False, is_flag=is_flag, advice=each.get("advice", ""))


def _setting(text: str) -> tuple[str, str]:
    key, _, value = text.partition(" = ")
    return key, value


FOREIGN = tuple(_foreign_options(Path(__file__).with_name("other_servers.toml").read_text("utf-8")))
# Names with a different meaning in LMI's settings. llama-server spells them with a dash.
_IN_LMI = {
    "batch-size": ForeignOption(
        ("batch-size",),
        is_refused=False,
        is_flag=False,
        advice="max_rolling_batch_size limits the requests in one step",
    ),
}

BY_NAME: Mapping[str, PresetKey] = {key.name: key for key in KEYS}


def _spellings(options: Iterable[KnownOption]) -> dict[str, KnownOption]:
    table: dict[str, KnownOption] = {}
    for option in options:
        names = option.names if isinstance(option, ForeignOption) else (option.name, *option.also, *option.switches)
        for name in names:
            assert name not in table, f"{name} has two meanings"
            table[name] = option
    return table


_OPTIONS: tuple[KnownOption, ...] = (*KEYS, *FOREIGN)
# By all spellings except variables, case-sensitive (`C` is not `c`).
BY_SPELLING: Mapping[str, KnownOption] = _spellings(_OPTIONS)
# The spellings that a message may suggest.
_SUGGESTED = [name for name, option in BY_SPELLING.items() if isinstance(option, PresetKey) or option.is_refused]
# Variables whose names cannot be derived from a spelling.
VARIABLES: Mapping[str, KnownOption] = {name: option for option in _OPTIONS for name in option.env}
_LMI_PREFIXES = ("OPTION_", "SERVING_", "option.")
PREFIXES = ("LLAMA_ARG_", "ROUTER_", *_LMI_PREFIXES)
DEVICE_PREFIXES = ("gpu.", "cpu.")  # of LMI's keys for one kind of device
MAIN_GPU = "main-gpu"  # a spelling of `device`, which counts with split-mode = none only


@dataclass(frozen=True)
class Spelling:
    """The meaning of a name in a file, a flag or a variable: an option in the tables, possibly negated."""

    option: KnownOption
    name: str  # as in the tables: the option's name, a synonym or a switch
    negated: bool = False
    variable: str = ""  # NAME of `env.NAME`

    @property
    def canonical(self) -> str:
        """The name in a layer of settings. LMI's spellings for one kind of device keep their prefix until the device of
        the model is known, and main-gpu its name until the split mode is known."""
        if self.name in ("mg", MAIN_GPU):
            return MAIN_GPU
        prefix = next((prefix for prefix in DEVICE_PREFIXES if self.name.startswith(prefix)), "")
        return f"env.{self.variable}" if self.variable else f"{prefix}{self.option.name}"

    @property
    def is_flag(self) -> bool:
        """True if it may be given without a value."""
        return self.option.is_flag or (isinstance(self.option, PresetKey) and self.name in self.option.switches)

    def text(self, value: str) -> str:
        """The value in the form for the key's main name (a switch may stand for a value). Raises click.BadParameter."""
        if self.is_flag:
            on = _FLAG(value) != self.negated
            if isinstance(self.option, PresetKey) and self.name in self.option.switches:
                return self.option.switches[self.name][0 if on else 1]
            return "on" if on else "off"
        return value


def find(written: str, *, in_lmi: bool = False) -> Spelling | None:
    """The meaning of a name; None if it is unknown.

    Leading dashes are ignored, `_` is `-` (except in a name that LMI spells with `_` and gives another meaning),
    prefixes of variables are removed, and `no-` negates a flag. `in_lmi`: it is written in LMI's own file.
    """
    bare = written.lstrip("-")
    if bare.startswith("env."):
        return Spelling(BY_NAME["env"], bare, variable=bare[4:]) if re.fullmatch(_VARIABLE, bare[4:]) else None
    if bare in VARIABLES:
        return _of_variable(VARIABLES[bare], bare)
    positive = f"LLAMA_ARG_{bare.removeprefix(NEGATIVE)}"
    if bare.startswith(NEGATIVE) and positive in VARIABLES:
        spelling = _of_variable(VARIABLES[positive], positive)
        return replace(spelling, negated=True) if spelling.is_flag else None
    prefix = next((prefix for prefix in PREFIXES if bare.startswith(prefix)), "")
    name = bare.removeprefix(prefix).replace("_", "-")
    name = name.lower() if prefix.isupper() else name
    if prefix.isupper() and len(name) < 3:
        return None  # one-letter and two-letter names are valid as flags and keys only
    if name in _IN_LMI and (in_lmi or prefix in _LMI_PREFIXES or bare == name.replace("-", "_")):
        return Spelling(_IN_LMI[name], name)
    if name in BY_SPELLING:
        return Spelling(BY_SPELLING[name], name)
    if name.startswith("no-") and name[3:] in BY_SPELLING:
        spelling = Spelling(BY_SPELLING[name[3:]], name[3:], negated=True)
        return spelling if spelling.is_flag else None
    return None


def _of_variable(option: KnownOption, variable: str) -> Spelling:
    switch = {
        "LLAMA_ARG_EMBEDDINGS": "embeddings", "LLAMA_ARG_RERANKING": "reranking", "LLAMA_ARG_BATCH": "batch-size",
    }.get(variable, option.name)  # fmt: skip
    return Spelling(option, switch, negated=variable == "ENABLE_CUDA_GRAPHS")


def nearest_variable(name: str, further: Iterable[str]) -> str:
    """The variable of a key, or of `further`, that is most similar to an unknown one; empty if none is similar."""
    prefix = next(prefix for prefix in PREFIXES if name.startswith(prefix))
    known = {name.upper().replace("-", "_") for name in _SUGGESTED}
    known |= {other.removeprefix(prefix) for other in further if other.startswith(prefix)}
    near = nearest(name.removeprefix(prefix), (word for word in known if len(word) > 2))
    return f"{prefix}{near}" if near else ""


def is_own(name: str) -> bool:
    """True if `name` is a key that is specific to one model."""
    return name in BY_NAME and BY_NAME[name].own


def nearest_key(written: str, further: Iterable[str] = ()) -> str:
    """The key or element of `further` that is most similar to an unknown name; empty if none is similar."""
    bare = written.lstrip("-").replace("_", "-")
    return nearest(bare, [*(name for name in _SUGGESTED if len(name) > 2), *further])
