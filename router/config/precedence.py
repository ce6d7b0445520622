"""Reading of preset settings: the text of sections, variables and flags becomes values with place and precedence.

Pure functions; the disk (does this path exist?) is read through `DiskReader`.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Literal, Protocol

import click

from router.config import ini, preset_keys, serving_properties, vllm_objects
from router.config.ini import Problem
from router.config.option_types import Strings, sendable, shown
from router.config.preset_keys import ForeignOption, Spelling
from router.config.presets import ADAPTER_NAME, HUB, MODEL_REPO, REPO, WHOLE_STRINGS, PresetKey, hub_name, repository
from router.config.settings import BY_VARIABLE, NEGATIVE, SPELLINGS, UNAVAILABLE, variable_text

CLIENT_VARIABLES = frozenset({"ROUTER_URL"})  # variables of client commands, which a server ignores
_MTP = "draft-mtp"  # of spec-type: llama-server drafts with layers of the checkpoint itself
_SCALE = re.compile(r"-?[0-9]{1,4}(\.[0-9]{1,6})?")
# llama-server's spellings of kv-cache-dtype for a half of the cache. Here one alone sets both, and two must agree.
_HALVES = {"ctk": "keys", "cache-type-k": "keys", "ctv": "values", "cache-type-v": "values"}


class DiskReader(Protocol):
    """The facts about files on which the meaning of a preset depends."""

    def kind(self, path: str) -> Literal["", "file", "folder", "snapshot", "lmi", "adapter", "gguf"]:
        """The kind of an absolute path.

        snapshot: a folder with config.json; lmi: one with serving.properties only; empty: the path does not exist.
        """

    def read(self, path: str) -> str:
        """The text of a file. Raises OSError, ValueError."""

    def folders(self, path: str) -> list[str]:
        """The sorted names of the folders in a folder; empty if it cannot be read."""


# Levels of precedence, lowest first: environment, [*], serving.properties in the model's folder, [id], command line.
ENVIRONMENT, STAR, PROPERTIES, OWN, COMMAND_LINE = range(5)


@dataclass(frozen=True, slots=True)
class Setting:
    """One key's value, its place, and its precedence."""

    value: Any
    level: int  # of precedence: ENVIRONMENT to COMMAND_LINE; the higher one wins
    place: Problem  # file, line, section and key; without a message
    name: str  # the spelling, as in the tables of `preset_keys`
    text: str = ""  # the value as it was written, in lower case

    @property
    def origin(self) -> str:
        return f"{self.place.file}:{self.place.line}" if self.place.line else self.place.file


Layer = dict[str, Setting]


def _completes(layer: Layer, spelling: Spelling) -> bool:
    """True if `layer` has the other half of the same key: cache-type-k and cache-type-v may both be given."""
    before = layer.get(spelling.canonical)
    return before is not None and {_HALVES.get(before.name), _HALVES.get(spelling.name)} == {"keys", "values"}


def lmi_batching(settings: Iterable[tuple[str, str]], *, in_lmi: bool = False) -> Mapping[str, str]:
    """The keys in place of those of `settings` that together decide how LMI batches; an empty key has no effect.

    Beside rolling_batch = disable, batch_size limits the requests in one step. async_mode requires this value, and
    batches continuously nevertheless.
    """
    given: dict[str, dict[str, str]] = {}  # by option: the texts by name
    for name, text in settings:
        if spelling := preset_keys.find(name, in_lmi=in_lmi):
            with contextlib.suppress(click.BadParameter):
                given.setdefault(spelling.option.name, {})[name] = spelling.text(text).strip().lower()
    disabled = [name for name, text in given.get("rolling-batch", {}).items() if text == "disable"]
    if "on" in given.get("async-mode", {}).values():
        return dict.fromkeys(disabled, "")
    sizes = given.get("batch-size", {}) if disabled else {}
    return dict.fromkeys(disabled, "") | dict.fromkeys(sizes, "parallel") if sizes else {}


class ProblemCollector:
    """Problems and warnings of one resolution. Collecting them shows the user all problems at once."""

    def __init__(self) -> None:
        # Dicts as ordered sets: a setting for all models is read once per model.
        self.problems: dict[Problem, None] = {}
        self.warnings: dict[Problem, None] = {}
        self.faulty: set[tuple[str, str]] = set()  # (section, key) of invalid values, which cause no further problems

    def fail(self, place: Problem, message: str, suggestion: str = "") -> None:
        self.problems[replace(place, message=message, suggestion=suggestion)] = None

    def fault(self, place: Problem, key: str, message: str) -> None:
        """Record that the value of `key` is invalid."""
        self.faulty.add((place.section, key))
        self.fail(place, f"{place.key}: {message}" if place.line else message)  # else the place names the key

    def demote(self, file: str, since: int) -> bool:
        """Make the problems after the first `since` ones warnings if all of them are in `file`; else return False."""
        further = tuple(self.problems)[since:]
        if not further or any(problem.file != file for problem in further):
            return False
        for problem in further:
            del self.problems[problem]
            self.warn(problem, f"is not listed: {problem.message}", problem.suggestion)
        return True

    def warn(self, place: Problem, message: str, suggestion: str = "") -> None:
        self.warnings[replace(place, message=message, suggestion=suggestion)] = None


class SettingReader:
    """Reader of all settings of one resolution. Invalid settings become problems."""

    def __init__(
        self, *, file: str, folder: str, disk: DiskReader, environ: Mapping[str, str], working: str, strict: bool
    ):
        self.collector, self.disk = ProblemCollector(), disk
        self._fail, self._fault, self._warn = self.collector.fail, self.collector.fault, self.collector.warn
        self._file, self._folder, self._working = file, folder, working
        self._environ, self.strict = environ, strict
        self._lmi_folders: dict[str, str] = {}  # by serving.properties that was read
        self._ignored: dict[str, list[Problem]] = {}  # places of options without a meaning here, by name

    def section(self, section: ini.Section, level: int) -> Layer:
        """The settings of `[*]` or `[id]`."""
        layer: Layer = {}
        written: dict[str, ini.Entry] = {}
        in_lmi = level == PROPERTIES
        batching = lmi_batching(((entry.key, entry.value) for entry in section.entries), in_lmi=in_lmi)
        for entry in section.entries:
            name = batching.get(entry.key, entry.key)
            if not name:
                continue
            place = Problem(section.file or self._file, entry.line, section.name, entry.key, "")
            for spelling, text in self._spelled(name, entry.value, place, in_lmi=in_lmi):
                before = written.get(spelling.canonical)
                if before is not None and spelling.option.name != "env" and not _completes(layer, spelling):
                    self._warn(place, f'"{entry.key}" repeats "{before.key}" of line {before.line}; the last counts')
                written[spelling.canonical] = entry
                self._add(layer, spelling, text, place, level, quoted=entry.quoted)
        return layer

    def properties(self, path: str, name: str) -> Layer:
        """The settings in a serving.properties, for the model `name`. Relative paths start at its folder."""
        try:
            text = self.disk.read(path)
        except (OSError, ValueError) as error:
            self._fail(Problem(path, 0, name, "", ""), unreadable(error))
            return {}
        self._lmi_folders[path] = str(PurePosixPath(path).parent)
        section, problems = serving_properties.parse(text, file=path, name=name)
        self.collector.problems |= dict.fromkeys(problems)
        given = {spelling.option.name for entry in section.entries if (spelling := preset_keys.find(entry.key))}
        if "entry-point" not in given and self.disk.kind(f"{self._lmi_folders[path]}/model.py") == "file":
            message = "model.py beside it is a handler, which is not run; remove it, or set option.entryPoint ="
            self._fail(Problem(path, 0, name, "", ""), f"{message} djl_python.huggingface")
        return self.section(section, PROPERTIES)

    def environment(self, *, named: int = 0) -> Layer:
        """The settings in variables. If several set one key: ROUTER_<KEY>, then llama-server's name, then LMI's.

        `named`: the number of models named at start. Keys of one model are read only if it is 1.
        """
        layer: Layer = {}
        texts: dict[str, str] = {}
        order = {"ROUTER_": 0, "LLAMA_": 1, "OPTION_": 2}
        of_batching = ("_ASYNC_MODE", "_ROLLING_BATCH", "_BATCH_SIZE")
        batching = lmi_batching(item for item in self._environ.items() if item[0].endswith(of_batching))
        for name in sorted(
            self._environ,
            key=lambda name: (order.get(name[: name.find("_") + 1], 3), not name.startswith(NEGATIVE), name),
        ):
            meant = batching.get(name, name)
            spelling = None
            if name in BY_VARIABLE:
                self._check_option(name)
            elif self._environ[name] and meant:
                is_ours = name.startswith(preset_keys.PREFIXES) and name not in CLIENT_VARIABLES
                spelling = preset_keys.find(meant) if is_ours or name in preset_keys.VARIABLES else None
                if is_ours and spelling is None:
                    self._unknown_variable(name)
            if spelling is None:
                continue
            place = Problem(name, 0, "", name, "")
            text = self._environ[name]
            if name.startswith(NEGATIVE) and spelling.negated:
                self._check_negative(name)
                text = "on"
            stated = text
            with contextlib.suppress(click.BadParameter):
                stated = spelling.text(text)
            before = layer.get(spelling.canonical)
            if before is not None and spelling.option.name != "env" and not _completes(layer, spelling):
                if stated != texts[spelling.canonical]:
                    self._warn(place, f"has no effect beside {before.place.file}; remove one of the two")
                continue
            if named != 1 and preset_keys.is_own(spelling.canonical):
                self._warn(place, f"is for one model, and {_count(named)} named at start, so it is not read;"
                                  " write a section in a file for --models-preset")  # fmt: skip
                continue
            meanings = list(self._spelled(meant, text, place))
            for meaning, value in meanings:
                is_other = meaning.option is not spelling.option  # rolling_batch = disable
                if is_other and (before := layer.get(meaning.canonical)):
                    counts = before.place.key.startswith(("ROUTER_", "LLAMA_"))
                    unread, other = (place, before.place.key) if counts else (before.place, name)
                    part = f"its {meaning.canonical} " if counts and len(meanings) > 1 else ""  # of a JSON object
                    self._warn(unread, f"{part}has no effect beside {other}; remove one of the two")
                    if counts:
                        continue
                self._add(layer, meaning, value, place, ENVIRONMENT)
                texts[meaning.canonical] = stated
        return layer

    def _check_negative(self, name: str) -> None:
        """Warn if a negative variable, or a positive one beside it, reads as if the option were on."""
        positive, off = name.replace(NEGATIVE, "LLAMA_ARG_"), ("", "0", "off", "false", "no")
        if self._environ[name].strip().lower() in off:
            message = f"turns it off with any value, as in llama-server; write {positive}=1 to keep it on"
            self._warn(Problem(name, 0, "", name, ""), message)
        if self._environ.get(positive, "").strip().lower() not in off:
            self._warn(Problem(positive, 0, "", positive, ""), f"has no effect beside {name}; remove one of the two")

    def _check_option(self, name: str) -> None:
        """Warn if a variable of an option of the router has no effect, because an earlier one has another value."""
        first = next((each for each in BY_VARIABLE[name].variables if self._environ.get(each)), name)
        if name.startswith(NEGATIVE):
            self._check_negative(name)
        if self._environ[name] and variable_text(name, self._environ) != variable_text(first, self._environ):
            self._warn(Problem(name, 0, "", name, ""), f"has no effect beside {first}; remove one of the two")

    def flags(self, flags: Mapping[str, str], *, named: int = 0) -> Layer:
        """The settings on the command line; `flags` by name without dashes, `named` as for `environment`."""
        layer: Layer = {}
        texts: dict[str, str] = {}
        for name, text in flags.items():
            place = Problem(f"-{name}" if len(name) == 1 else f"--{name}", 0, "", name, "")
            for spelling, value in self._spelled(name, text, place):
                if named != 1 and preset_keys.is_own(spelling.canonical):
                    message = f"is for one model, and {_count(named)} named at start; name one alone"
                    self._fail(place, f"{message}, or write a section [id] with it in a file for --models-preset")
                    continue
                canonical, is_variable = spelling.canonical, spelling.option.name == "env"
                before = None if is_variable or _completes(layer, spelling) else layer.get(canonical)
                self._add(layer, spelling, value, place, COMMAND_LINE)
                if before is not None and layer[canonical].value == ():
                    layer[canonical] = before  # FastChat has --device cuda, which names no device, beside --gpus
                elif before is not None and before.value != () and texts[canonical] != value:
                    self._fail(place, f"{before.origin} sets the same key; give one of the two")
                texts[canonical] = value
        return layer

    def path(self, text: str, place: Problem) -> str:
        """The absolute path for a text.

        In a file, relative paths start at the file's folder. If nothing is there, the working directory is tried with a
        warning, because llama-server looks there.
        """
        if text == "~" or text.startswith("~/"):
            return str(PurePosixPath(self._environ.get("HOME", "/")) / text[2:])
        start = self._lmi_folders.get(place.file, self._folder) if place.line else self._working
        path = str(PurePosixPath(start) / text)
        fallback = str(PurePosixPath(self._working) / text)
        if not self.disk.kind(path) and fallback != path and self.disk.kind(fallback):
            self._warn(place, f"{text} is not in {start} but in the working directory; write {fallback}")
            return fallback
        return path

    def _spelled(
        self, written: str, text: str, place: Problem, *, in_lmi: bool = False
    ) -> Iterator[tuple[Spelling, str]]:
        """The key and the value of a setting; none if it is invalid or has no effect. `env` yields each variable."""
        spelling = preset_keys.find(written, in_lmi=in_lmi)
        if spelling is None:
            self._unknown(written, place)
            return
        option = spelling.option
        if isinstance(option, ForeignOption) and not option.is_refused:
            self._ignore(option, spelling, written, text, place)
            return
        try:
            text = spelling.text(text)
        except click.BadParameter as error:
            self._fault(place, option.name, error.message)
            return
        if isinstance(option, ForeignOption):
            for value in option.values(text):
                if meant := option.means.get(value.lower()):
                    yield Spelling(preset_keys.BY_NAME[meant[0]], spelling.name), meant[1]
                elif not option.accepts(value):
                    self._fail(place, _not_offered(option, place, value))
        elif option.name == "env" and not spelling.variable:
            yield from self._variables(text, place)
        elif option.name == "model-draft" and text.strip() == "[ngram]":  # vLLM's speculative-model
            yield Spelling(preset_keys.BY_NAME["spec-type"], spelling.name), "ngram-simple"
        elif option.name == "rope-scaling" and text.lstrip().startswith("{"):
            yield from self._members(vllm_objects.rope_scaling, text, option, place)
        elif option.name == "model-draft" and text.lstrip().startswith("{"):
            yield from self._members(vllm_objects.speculative_config, text, option, place)
        elif option.name == "lora" and text.lstrip().startswith("{"):
            yield from self._members(vllm_objects.lora_modules, text, option, place)
        elif option.name == "limit-images" and ("{" in text or "=" in text):
            yield from self._members(vllm_objects.limit_mm_per_prompt, text, option, place)
        elif option.name == "chat-template" and text.endswith(".jinja") and self.disk.kind(self.path(text, place)):
            yield Spelling(preset_keys.BY_NAME["chat-template-file"], spelling.name), text
        else:
            yield spelling, text

    def _ignore(self, option: ForeignOption, spelling: Spelling, written: str, text: str, place: Problem) -> None:
        """Record an option without a meaning here, unless its value changes nothing. `finish` warns about it."""
        with contextlib.suppress(click.BadParameter):  # it has no effect with any value
            text = spelling.text(text)
        if option.accepts(text):
            return
        # Without a line, the place names the option.
        message = f'"{written.lstrip("-")}" {option.message}' if place.line else option.message
        self.have_no_effect(spelling.name if place.line else written, place, message)  # several variables may mean one

    def have_no_effect(self, name: str, place: Problem, message: str) -> None:
        """Record that `name` has no effect; an error with --strict-presets."""
        if self.strict:
            self._fail(place, message)
        else:
            self._ignored.setdefault(name, []).append(replace(place, message=message))

    def finish(self) -> None:
        """Warn about options without a meaning here: once for each, naming all sections that have it."""
        for first, *further in self._ignored.values():
            sections = dict.fromkeys(f"[{place.section}]" for place in further if place.section != first.section)
            self._warn(first, f"{first.message}; the same in {', '.join(sections)}" if sections else first.message)

    def _variables(self, text: str, place: Problem) -> Iterator[tuple[Spelling, str]]:
        for pair in text.split(","):
            name, has_value, value = pair.strip().partition("=")
            spelling = preset_keys.find(f"env.{name}")
            if has_value and spelling is not None:
                yield spelling, value
            elif pair.strip():
                self._fail(place, "env: write NAME=value, several with commas, or one env.NAME = value each")

    def _members(
        self, keys_of: Callable[[str], Mapping[str, str]], text: str, option: PresetKey, place: Problem
    ) -> Iterator[tuple[Spelling, str]]:
        """The keys that a JSON object of vLLM and LMI means."""
        try:
            found = keys_of(text)
        except (click.BadParameter, ValueError) as error:
            self._fault(place, option.name, str(error))
        else:
            yield from ((Spelling(preset_keys.BY_NAME[name], name), value) for name, value in found.items())

    def _add(
        self, layer: Layer, spelling: Spelling, text: str, place: Problem, level: int, *, quoted: bool = False
    ) -> None:
        key = spelling.option
        assert isinstance(key, PresetKey)
        if level == PROPERTIES and key.name in ("python", "env", "import"):
            # The file comes with the model. The first two would run any program, and imports are not nested.
            self._fail(place, f"{place.key} is not read from this file; write {key.name} into a section")
            return
        if key.own and level == STAR:
            self._fault(place, key.name, "names one model, so it cannot stand in [*]; write it into [id]")
            return
        try:
            value = self._read(key, spelling, text, place, quoted)
        except (click.BadParameter, ValueError) as error:
            self._fault(place, key.name, str(error))
            return
        before = layer.get(spelling.canonical)
        if before is not None and _completes(layer, spelling) and before.value != value:
            self._fault(place, key.name, f"{before.name} is {before.value}, and both must agree; write one"
                        f" {key.name}")  # fmt: skip
        layer[spelling.canonical] = Setting(value, level, place, spelling.name, text.strip().lower())

    def _read(self, key: PresetKey, spelling: Spelling, text: str, place: Problem, quoted: bool) -> Any:
        if not sendable(text):
            raise ValueError("the value has a NUL or is not UTF-8")
        if spelling.variable == "CUDA_VISIBLE_DEVICES":
            raise ValueError("the router chooses the devices; write device = instead")
        if (quoted and isinstance(key.kind, Strings)) or (spelling.name in WHOLE_STRINGS and not text.startswith("[")):
            return (text,) if text else ()
        value = key.kind(text)
        if key.name == "spec-type" and _MTP in text.lower():
            message = f"{_MTP} drafts nothing here, and answers are the same: write model-draft, or ngram-simple"
            self.have_no_effect(_MTP, place, f"{place.key}: {message}" if place.line else message)
        if key.name == "model-draft" and value:
            return self._draft(value, place)
        if key.path and value and (key.name != "python" or "/" in value):
            value = self.path(value, place)
        if key.name in ("lora", "lora-scaled"):
            value = tuple(self._adapter(item, place, scaled=key.name == "lora-scaled") for item in value)
        if key.name == "adapters-dir" and value and self.disk.kind(value) not in {"folder", "adapter"}:
            raise ValueError(f"no folder {value}")
        if key.name == "tokenizer" and value and self.disk.kind(value) not in {"folder", "snapshot"}:
            return text  # perhaps the model's own repository, which `resolve` knows
        if key.name == "python" and "/" in value and self.disk.kind(value) != "file":
            raise ValueError(f"no file {value}")
        return value

    def _draft(self, text: str, place: Problem) -> str:
        """Normalize a draft model to its folder or `hub:org/name:revision`. Raises ValueError."""
        path = self.path(text, place)
        if self.disk.kind(path) in {"folder", "snapshot"}:
            return path
        if MODEL_REPO.fullmatch(repo := hub_name(text)):
            return HUB + ":".join(repository(repo))
        raise ValueError(f"no folder {path}, and it is not org/name of the hub")

    def _adapter(self, item: str, place: Problem, *, scaled: bool) -> str:
        """Normalize an adapter to `name=folder` or `name=hub:org/name:revision`, with `:scale` at the end if `scaled`.

        Raises ValueError.
        """
        prefix, has_name, text = item.rpartition("=")
        scale = ""
        if scaled:
            text, _, scale = text.rpartition(":")
            if not text or not _SCALE.fullmatch(scale):
                raise ValueError(f"{shown(item)} is not folder:scale")
        path = self.path(text, place)
        kind = self.disk.kind(path)
        target = path
        text = hub_name(text)
        if not kind and REPO.fullmatch(text):
            target = HUB + ":".join(repository(text))
        elif kind != "adapter":
            raise ValueError(
                f"{path} {'has no adapter_config.json' if kind else 'does not exist'}; name an adapter's folder"
            )
        name = prefix if has_name else PurePosixPath(text.partition(":")[0] if target != path else path).name
        if not ADAPTER_NAME.fullmatch(name):
            raise ValueError(f"{shown(name)} cannot name an adapter; write name={text}")
        return f"{name}={target}" + (f":{scale}" if scaled else "")

    def _unknown(self, written: str, place: Problem) -> None:
        flag = written.lstrip("-").replace("_", "-")
        option = SPELLINGS.get(flag) or BY_VARIABLE.get(written)
        if (positive := SPELLINGS.get(flag.removeprefix("no-"))) is not None and positive.is_flag:
            option = positive
        if option is not None:
            further = ", or request-timeout for one model" if option.flag == "timeout" else ""
            self._fail(place, f'"{flag}" is an option of the router, not of a model: use --{option.flag}{further}')
        elif flag in UNAVAILABLE:
            instead = UNAVAILABLE[flag] or "remove it"
            self._fail(place, f'"{flag}" is an option of the router that this version does not offer: {instead}')
        else:
            self._fail(place, f'unknown key "{written.lstrip("-")}"', preset_keys.nearest_key(written))

    def _unknown_variable(self, name: str) -> None:
        near = preset_keys.nearest_variable(name, BY_VARIABLE)
        flag = name.removeprefix("LLAMA_ARG_").lower().replace("_", "-")
        if UNAVAILABLE.get(flag):
            self._fail(Problem(name, 0, "", name, ""), f"is not offered by this version: {UNAVAILABLE[flag]}")
            return
        report = self._fail if self.strict else self._warn
        report(Problem(name, 0, "", name, ""), "is not a variable of this router", near)


def _not_offered(option: ForeignOption, place: Problem, text: str) -> str:
    """The message for an option that is not offered, with its value if other values are accepted."""
    if (option.neutral or option.means) and not (option.is_flag and place.file.startswith("-")):  # a flag has no value
        return f"{place.key}: {shown(text)} {option.message}" if place.line else f"{shown(text)} {option.message}"
    return f'"{place.key}" {option.message}' if place.line else option.message  # else the place names the key


def unreadable(error: OSError | ValueError) -> str:
    """The reason for which a file could not be read as text."""
    if not isinstance(error, OSError):
        return "is not UTF-8 text"
    reason = error.strerror or "cannot be read"
    return reason[0].lower() + reason[1:]


def _count(named: int) -> str:
    return f"{named or 'none'} {'is' if named < 2 else 'are'}"
