"""Sections to `Preset`: types, defaults, origins.

Law: PURE; what depends on a folder (does this path exist?) comes in through `Disk`.
"""

import dataclasses
import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Literal, Protocol

from router import ini, keys
from router.ini import Problem
from router.keys import Key, Meaningless, Refused, Spelling
from router.ranks import USUAL, rank_of
from router.settings import BY_FLAG, BY_VARIABLE, LATER
from router.values import JsonObject, Strings, plain, sendable, shown
from worker.contract import AdapterSource

MASK = "***"
REGISTERED = "registered"
"""What stands for the file of models that came by a call."""
BUILT_IN = "built-in"
ALL_LAYERS = 99
"""From so many on, n-gpu-layers is taken for `all`, as its users mean it."""
CLIENT_VARIABLES = frozenset({"ROUTER_URL"})
"""Read by client commands, not by a server."""
_GGUF = "GGUF needs the llama-server engine, which this version does not offer; use a safetensors repository"
_NO_SNAPSHOT = {
    "lmi": "has serving.properties; such folders are not offered by this version",
    "adapter": "is an adapter, which needs the model that it was made for (adapter_config.json names it)",
    "gguf": "has GGUF files, which need the llama-server engine; this version does not offer it",
}
_REPO = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95})(?::([A-Za-z0-9][A-Za-z0-9._/-]{0,127}))?"
)
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""No `@` and no slash: it stands behind a model's name, and in paths."""
HUB = "hub:"
_SCALE = re.compile(r"-?[0-9]{1,4}(\.[0-9]{1,6})?")
_QUANTISATION = re.compile(r"(?:UD-)?(?:I?Q[0-9]|TQ[0-9]|MXFP4|BF16$|F16$|F32$).*", re.IGNORECASE)
_SECRET = re.compile(r"(?:^|[_.-])(?:key|token|secret|password)$", re.IGNORECASE)
_KEY_VARIABLES = ["ROUTER_" + key.name.upper().replace("-", "_") for key in keys.KEYS]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One model that may be loaded, and how. Bytes are int, times float seconds (-1.0: off)."""

    id: str
    source: Literal["preset", "models_dir", "cache"] = "preset"

    # Source: exactly one of path, repo, demo
    path: str = ""
    """Absolute path of a snapshot folder."""
    repo: str = ""
    """`org/name` on the hub."""
    revision: str = "main"
    demo: str = ""
    """Name of a built-in demo model (`model = demo:NAME`)."""
    tokenizer: str = ""
    load_format: str = "auto"
    trust_remote_code: bool = False
    config_override: str = ""
    dedup_cache_models: bool = False
    """Whether the cached repository of this preset is not listed a second time."""
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    task: Literal["auto", "generate", "embed", "rerank"] = "auto"
    pooling: str = ""
    embd_normalize: int = 2

    # Context and batch
    ctx_size: int = -1
    """Tokens per request; -1: the model's maximum up to 8192; 0: the model's maximum."""
    parallel: int = 4
    kv_tokens: int = 0
    """Tokens that the cache has room for; 0: ctx_size x parallel."""
    kv_cache_dtype: str = "auto"
    prefix_caching: bool = True
    prefill_chunk: int = 512
    max_prefill_tokens: int = 0
    """0: `prefill_chunk` alone bounds a step."""
    limit_images: int = 8
    """Of one prompt."""
    max_input_tokens: int = 0
    n_predict: int = -1
    queue_size: int = 1000
    max_concurrent: int = 0
    """Requests at once; 0: as many as come."""
    request_timeout: float | None = None
    """None: --timeout."""

    # Numerics
    dtype: str = "auto"
    quantization: str = "auto"
    attention: str = "auto"
    enforce_eager: bool = False
    """No CUDA graphs."""
    threads: int = 0
    """0: 1 on an accelerator, half the cores on the CPU."""
    seed: int = -1
    max_logprobs: int = 20

    # Placement
    device: tuple[str, ...] = ()
    """`cpu`, `cuda:N` or a UUID; empty: the planner chooses among the accelerators, or the CPU without any."""
    split_mode: Literal["auto", "none", "layer", "tensor"] = "auto"
    pipeline_parallel: int = 1
    """Accelerators that its layers are split over."""
    tensor_parallel: int = 1
    """Accelerators that each of its matrices is divided among; processes, on main memory."""
    gpu_split: tuple[int, ...] = ()
    """Bytes that it may take: one figure for each accelerator, or one by one."""
    tensor_split: tuple[float, ...] = ()
    """Proportions of its layers, by accelerator."""
    replicas: tuple[int, int] = (1, 1)
    """Workers at once: at least, where memory is free for more than one, and at most."""
    replica_idle: float = 60.0
    required_memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes by device name (`""`: whatever device it runs on); replaces the estimate."""
    reserved_memory: int = 0
    """Bytes added to the estimate on each device."""

    # Adapters
    lora: tuple[str, ...] = ()
    """`name=folder`, or a repository of the hub in its place."""
    lora_scaled: tuple[str, ...] = ()
    """The same, with `:scale` behind it."""
    default_lora: str = ""
    adapters_dir: str = ""
    enable_lora: str = "auto"
    max_loras: int = 4
    max_lora_rank: int = USUAL
    max_cpu_loras: int = 0
    adapters: tuple[AdapterSource, ...] = ()
    """All that requests may name: of the keys above, and those that came by a call. The path of one that is on the hub
    is `hub:org/name:revision` until its files are here."""

    # Prompt and sampling
    chat_template: str = ""
    chat_template_file: str = ""
    """Where `chat_template` was read from."""
    chat_template_kwargs: str = ""
    sampling: Mapping[str, float | int | str | tuple[str, ...]] = field(default_factory=dict)
    """Defaults for requests, by key: temp, top-k, top-p, min-p, repeat-penalty, repeat-last-n, presence-penalty,
    frequency-penalty, stop."""

    # Lifecycle
    load_on_startup: bool = False
    autoload: bool | None = None
    """None: --models-autoload."""
    pin: bool = False
    priority: int = 0
    ttl: float = -1.0
    companions: tuple[str, ...] = ()
    """Models that are usually asked for together with this one, by id or alias."""
    sleep_idle: float = -1.0
    """Like `ttl`; but the weights stay in main memory, within --sleep-memory."""
    linger: float = -1.0
    """-1.0: half the waiting model's expected load, 0.2 to 2 seconds; 0 if it is hardly ever asked for so soon."""
    min_residency: float = -1.0
    """The turn; -1.0: 10 seconds, or --swap-patience if less."""
    start_timeout: float = 240.0
    stop_timeout: float = 10.0
    stall_timeout: float = 120.0
    max_restarts: int = 3

    # Process
    engine: str = "transformers"
    python: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    strict_fields: bool = False

    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where each key came from, as written for people: `models.ini:14`, `--ctx-size`, `ROUTER_CTX_SIZE`."""

    @property
    def chunk(self) -> int:
        """Tokens of prompts in one step, at most."""
        return min(self.prefill_chunk, self.max_prefill_tokens or self.prefill_chunk)

    @property
    def adapter_slots(self) -> int:
        """Adapters that memory is kept for; 0: its worker has none, ever."""
        is_auto = self.enable_lora == "auto"
        has_some = bool(self.lora or self.lora_scaled or self.adapters_dir)
        return self.max_loras if self.enable_lora == "on" or (is_auto and has_some) else 0


@dataclass(frozen=True, slots=True)
class Found:
    """A model that is on disk without a section naming it."""

    id: str
    source: Literal["models_dir", "cache"]
    path: str = ""
    repo: str = ""
    revision: str = "main"


@dataclass(frozen=True, slots=True)
class Loaded:
    """All models that may be loaded, by id; none if there are problems."""

    presets: dict[str, Preset]
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()


class Disk(Protocol):
    """What the meaning of a preset depends on, beside its text."""

    def kind(self, path: str) -> Literal["", "file", "folder", "snapshot", "lmi", "adapter", "gguf"]:
        """What is at an absolute path: nothing, a file, a folder, one with config.json, one with serving.properties,
        one with an adapter, one with GGUF files."""

    def read(self, path: str) -> str:
        """A file's text; raises OSError or ValueError."""

    def folders(self, path: str) -> list[str]:
        """Names of the folders in a folder, in order; none if it cannot be read."""


def load(
    text: str = "",
    *,
    file: str = "",
    folder: str = "/",
    disk: Disk,
    found: Sequence[Found] = (),
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    working: str = "/",
    swap_patience: float = 10.0,
    strict: bool = False,
    strict_fields: bool = False,
    registered: str = "",
) -> Loaded:
    """The presets that a file, flags (by key), the environment and the models found on disk make together.

    Flags win over `[id]`, that over `[*]`, that over the environment, that over what is built in. `folder` is the
    file's own, where its relative paths start; `working` the current one, where those of flags and variables do.
    `registered` are sections that came by a call: a section of the file with the same name stands before them.
    """
    return _Loading(
        file=file, folder=folder, disk=disk, environ=environ or {}, working=working, strict=strict,
        swap_patience=swap_patience, strict_fields=strict_fields,
    ).load(_joined(ini.parse(text, file=file, environ=environ), registered), found, flags or {})  # fmt: skip


def _joined(document: ini.Document, registered: str) -> ini.Document:
    """The document with the sections of another text that it does not have itself."""
    if not registered:
        return document
    names = {section.name.casefold() for section in document.sections}
    further = ini.parse(registered, file=REGISTERED)
    added = [replace(each, file=REGISTERED) for each in further.sections if each.name.casefold() not in names]
    return replace(document, sections=(*document.sections, *added), problems=(*document.problems, *further.problems))


def repository(text: str) -> tuple[str, str]:
    """(`org/name`, revision) that `org/name[:revision]` means. Raises ValueError, with what to do instead."""
    match = _REPO.fullmatch(text)
    if match is None or ".." in text or "//" in text:
        raise ValueError(f"{shown(text)} is not org/name or org/name:revision")
    if match[1].lower().endswith("-gguf") or (match[2] and _QUANTISATION.fullmatch(match[2])):
        raise ValueError(_GGUF)
    return match[1], match[2] or "main"


ENVIRONMENT, STAR, OWN, COMMAND_LINE = range(4)
"""Ranks of a setting: environment, [*], [id], command line."""


@dataclass(frozen=True, slots=True)
class _Setting:
    """One key's value, where it was written, and its rank."""

    value: Any
    rank: int
    place: Problem
    """With an empty message: file, line, section, key."""
    name: str
    """Its spelling, as it stands in the tables."""

    @property
    def origin(self) -> str:
        return f"{self.place.file}:{self.place.line}" if self.place.line else self.place.file


_Layer = dict[str, _Setting]


def _completes(layer: _Layer, spelling: Spelling) -> bool:
    """Whether it states a part of what another spelling in `layer` has stated another part of."""
    before = layer.get(spelling.canonical)
    return before is not None and isinstance(spelling.word, Key) and spelling.word.may_stand_beside(
        before.name, spelling.name
    )  # fmt: skip


class _Loading:
    """One pass over everything; collects what is wrong instead of stopping."""

    def __init__(
        self, *, file: str, folder: str, disk: Disk, environ: Mapping[str, str], working: str, strict: bool,
        swap_patience: float, strict_fields: bool,
    ):  # fmt: skip
        self.file, self.folder, self.working = file, folder, working
        self.disk, self.environ = disk, environ
        self.strict, self.swap_patience, self.strict_fields = strict, swap_patience, strict_fields
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []
        self._warned: set[str] = set()
        self._faulty: set[tuple[str, str]] = set()
        """(section, key) of values that could not be read: nothing more is said about them."""

    def load(self, document: ini.Document, found: Sequence[Found], flags: Mapping[str, str]) -> Loaded:
        self.problems += document.problems
        under, over = self._environment(), self._flags(flags)
        star: _Layer = {}
        for section in document.sections:
            if section.name == "*":
                star |= self._section(section, STAR)
        general = under | star
        presets: dict[str, Preset] = {}
        aliases: list[tuple[str, Problem]] = []
        companions: list[tuple[str, Problem]] = []
        for section in document.sections:
            if section.name == "*":
                continue
            settings = general | self._section(section, OWN) | over
            preset = self._preset(section, settings, found)
            if preset is not None:
                presets[preset.id] = preset
                if "alias" in settings:
                    aliases.append((preset.id, settings["alias"].place))
                if "companions" in settings:
                    companions.append((preset.id, settings["companions"].place))
        self._unique(presets, aliases)
        for entry in self._unconfigured(found, presets):
            preset = self._preset(ini.Section(entry.id, 0), general | over, [entry])
            if preset is not None:
                presets[preset.id] = preset
        self._company(presets, companions)
        return Loaded({} if self.problems else presets, tuple(self.problems), tuple(self.warnings))

    # Layers: text to values

    def _section(self, section: ini.Section, rank: int) -> _Layer:
        layer: _Layer = {}
        written: dict[str, ini.Entry] = {}
        for entry in section.entries:
            place = Problem(section.file or self.file, entry.line, section.name, entry.key, "")
            for spelling, text in self._spelled(entry.key, entry.value, place):
                before = written.get(spelling.canonical)
                if before is not None and spelling.word.name != "env" and not _completes(layer, spelling):
                    self._warn(place, f'"{entry.key}" repeats "{before.key}" of line {before.line}; the last counts')
                written[spelling.canonical] = entry
                self._add(layer, spelling, text, place, rank, quoted=entry.quoted)
        return layer

    def _environment(self) -> _Layer:
        """Values of variables: ROUTER_<KEY>, then llama-server's name, then LMI's."""
        layer: _Layer = {}
        order = {"ROUTER_": 0, "LLAMA_": 1, "OPTION_": 2}
        for name in sorted(self.environ, key=lambda name: (order.get(name[: name.find("_") + 1], 3), name)):
            spelling = None
            if name not in BY_VARIABLE and self.environ[name]:
                is_ours = name.startswith(("ROUTER_", "LLAMA_ARG_", "OPTION_", "SERVING_")) or name in keys.VARIABLES
                spelling = keys.find(name) if is_ours else None
                if spelling is None and name.startswith(("ROUTER_", "LLAMA_ARG_")) and name not in CLIENT_VARIABLES:
                    self._unknown_variable(name)
            if spelling is None or (spelling.canonical in layer and not _completes(layer, spelling)):
                continue
            place = Problem(name, 0, "", name, "")
            if isinstance(spelling.word, Key) and spelling.word.own:
                self._warn(place, "names one model, so it is not read; write a section in a file for --models-preset")
                continue
            for each, text in self._spelled(name, self.environ[name], place):
                self._add(layer, each, text, place, ENVIRONMENT)
        return layer

    def _flags(self, flags: Mapping[str, str]) -> _Layer:
        layer: _Layer = {}
        for name, text in flags.items():
            place = Problem(f"-{name}" if len(name) == 1 else f"--{name}", 0, "", name, "")
            for spelling, value in self._spelled(name, text, place):
                if isinstance(spelling.word, Key) and spelling.word.own:
                    message = "names one model; write a section [id] with it in a file for --models-preset"
                    self._fail(place, f"{message}, or use --models-dir")
                elif spelling.canonical in layer and spelling.word.name != "env" and not _completes(layer, spelling):
                    self._fail(place, f"{layer[spelling.canonical].origin} says the same; give one of the two")
                else:
                    self._add(layer, spelling, value, place, COMMAND_LINE)
        return layer

    def _spelled(self, written: str, text: str, place: Problem) -> Iterator[tuple[Spelling, str]]:
        """What a setting means; nothing if it cannot stand. `env` yields its members."""
        spelling = keys.find(written)
        if spelling is None:
            self._unknown(written, place)
            return
        word = spelling.word
        if isinstance(word, Meaningless):
            if word.name not in self._warned:
                self._warned.add(word.name)
                message = f'"{written.lstrip("-")}" has no meaning here; remove it'
                (self._fail if self.strict else self._warn)(place, message)
            return
        try:
            text = spelling.text(text)
        except ValueError as error:
            self._fault(place, word.name, str(error))
            return
        if isinstance(word, Refused):
            if not word.accepts(text):
                self._fail(place, word.message)
        elif word.name == "env" and not spelling.variable:
            yield from self._variables(text, place)
        else:
            yield spelling, text

    def _variables(self, text: str, place: Problem) -> Iterator[tuple[Spelling, str]]:
        for pair in text.split(","):
            name, has_value, value = pair.strip().partition("=")
            spelling = keys.find(f"env.{name}")
            if has_value and spelling is not None:
                yield spelling, value
            elif pair.strip():
                self._fail(place, "env: write NAME=value, several with commas, or one env.NAME = value each")

    def _add(
        self, layer: _Layer, spelling: Spelling, text: str, place: Problem, rank: int, *, quoted: bool = False
    ) -> None:
        key = spelling.word
        assert isinstance(key, Key)
        if key.own and rank == STAR:
            self._fault(place, key.name, "names one model, so it cannot stand in [*]; write it into [id]")
            return
        try:
            value = self._read(key, spelling, text, place, quoted)
        except ValueError as error:
            self._fault(place, key.name, str(error))
            return
        before = layer.get(spelling.canonical)
        if before is not None and _completes(layer, spelling) and before.value != value:
            self._fault(place, key.name, f"{before.name} says {before.value}, and both have to agree; write one"
                        f" {key.name}")  # fmt: skip
        layer[spelling.canonical] = _Setting(value, rank, place, spelling.name)

    def _read(self, key: Key, spelling: Spelling, text: str, place: Problem, quoted: bool) -> Any:
        if not sendable(text):
            raise ValueError("the value has a NUL or is not UTF-8")
        if spelling.variable == "CUDA_VISIBLE_DEVICES":
            raise ValueError("the router chooses the devices; write device = instead")
        if isinstance(key.kind, Strings) and quoted:
            return (text,) if text else ()
        value = key.kind.read(text)
        if key.path and value and (key.name != "python" or "/" in value):
            value = self._path(value, place)
        if key.name in ("lora", "lora-scaled"):
            value = tuple(self._adapter(item, place, scaled=key.name == "lora-scaled") for item in value)
        if key.name == "adapters-dir" and value and self.disk.kind(value) not in {"folder", "adapter"}:
            raise ValueError(f"no folder {value}")
        if key.name == "tokenizer" and value and self.disk.kind(value) not in {"folder", "snapshot"}:
            raise ValueError(f"no folder {value}; a tokenizer of the hub must be downloaded first")
        if key.name == "python" and "/" in value and self.disk.kind(value) != "file":
            raise ValueError(f"no file {value}")
        if key.name == "n-gpu-layers" and 0 < value < ALL_LAYERS:
            raise ValueError("layers in host memory are not offered by this version: remove it, or write 0 for cpu")
        if key.name == "chat-template" and value and not ("{{" in value or "{%" in value):
            raise ValueError("is no Jinja text; names of built-in templates are not known here, see chat-template-file")
        return value

    def _adapter(self, item: str, place: Problem, *, scaled: bool) -> str:
        """`name=folder` or `name=hub:org/name:revision`, with `:scale` behind it if `scaled`. Raises ValueError."""
        said, has_name, text = item.rpartition("=")
        scale = ""
        if scaled:
            text, _, scale = text.rpartition(":")
            if not text or not _SCALE.fullmatch(scale):
                raise ValueError(f"{shown(item)} is not folder:scale")
        path = self._path(text, place)
        kind = self.disk.kind(path)
        target = path
        if not kind and _REPO.fullmatch(text) and not text.startswith((".", "~", "/")):
            target = HUB + ":".join(repository(text))
        elif kind != "adapter":
            raise ValueError(
                f"{path} {'has no adapter_config.json' if kind else 'is not there'}; name an adapter's folder"
            )
        name = said if has_name else PurePosixPath(text.partition(":")[0] if target != path else path).name
        if not ADAPTER_NAME.fullmatch(name):
            raise ValueError(f"{shown(name)} cannot name an adapter; write name={text}")
        return f"{name}={target}" + (f":{scale}" if scaled else "")

    def _path(self, text: str, place: Problem) -> str:
        """Absolute. From a file it starts at that file's folder, or, with a warning, where llama-server would look."""
        if text == "~" or text.startswith("~/"):
            return str(PurePosixPath(self.environ.get("HOME", "/")) / text[2:])
        start = self.folder if place.line else self.working
        path = str(PurePosixPath(start) / text)
        fallback = str(PurePosixPath(self.working) / text)
        if not self.disk.kind(path) and fallback != path and self.disk.kind(fallback):
            self._warn(place, f"{text} is not in {start} but in the working directory; write {fallback}")
            return fallback
        return path

    # Models: values to a Preset

    def _preset(self, section: ini.Section, settings: _Layer, found: Sequence[Found]) -> Preset | None:
        place = Problem(section.file or self.file, section.line, section.name, "", "")
        fields = self._source(section.name, settings, found, place)
        if fields is None:
            return None
        fields |= self._fields(settings)
        self._place(settings, fields)
        self._template(section.name, settings, fields)
        self._adapters(settings, fields)
        origins = {name: setting.origin for name, setting in settings.items()}
        if fields.get("max_input_tokens", 0) and 0 < fields.get("ctx_size", 0) <= fields["max_input_tokens"]:
            self._fail(settings["max-input-tokens"].place, "max-input-tokens must be less than ctx-size")
        if fields.get("min_residency", -1.0) > self.swap_patience:
            message = f"min-residency must not be more than --swap-patience, {plain(self.swap_patience)} s"
            self._fail(settings["min-residency"].place, message)
        aliases = tuple(alias for alias in fields.pop("aliases", ()) if alias != section.name)
        return Preset(
            id=section.name, aliases=aliases, strict_fields=self.strict_fields, origins=origins, **fields
        )  # fmt: skip

    def _fields(self, settings: _Layer) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        sampling: dict[str, Any] = {}
        variables: dict[str, str] = {}
        for name, setting in settings.items():
            if name.startswith("env."):
                variables[name[4:]] = setting.value
                continue
            key = keys.BY_NAME[name]
            if key.item:
                sampling[key.item] = setting.value
            elif key.field and key.name != "revision":
                fields[key.field] = setting.value
        return fields | {"sampling": sampling, "env": variables}

    def _source(self, id: str, settings: _Layer, found: Sequence[Found], place: Problem) -> dict[str, Any] | None:
        """Where the model's files are; None, with a problem, if that is not said."""
        model, repo, revision = (settings.get(name) for name in ("model", "hf-repo", "revision"))
        if model and repo:
            self._fail(repo.place, f"hf-repo and model (line {model.place.line}) both name a source; remove one")
            return None
        named = model or repo
        fields: dict[str, Any] | None
        if named is not None:
            fields = self._named(named, is_repo=named is repo)
        elif (id, "model") in self._faulty or (id, "hf-repo") in self._faulty:
            return None
        else:
            entry = next((entry for entry in found if entry.id.casefold() == id.casefold()), None)
            if entry is None:
                self._fail(place, "names no model; add model = a folder or org/name, or hf-repo = org/name")
                return None
            source = "preset" if place.line else entry.source
            fields = {"source": source, "path": entry.path, "repo": entry.repo, "revision": entry.revision}
        if fields is None or revision is None:
            return fields
        if not fields.get("repo"):
            self._fail(revision.place, "revision belongs to a repository of the hub, and this model is none; remove it")
        elif named is not None and ":" in named.value:
            self._fail(revision.place, f"a revision stands in line {named.place.line} already; remove one of the two")
        return {**fields, "revision": revision.value}

    def _named(self, setting: _Setting, *, is_repo: bool) -> dict[str, Any] | None:
        """Path, repository or built-in model that a text means."""
        text, place = setting.value, setting.place
        if text.startswith("demo:") and not is_repo:
            if text[5:] in keys.DEMOS:
                return {"demo": text[5:]}
            near = next(iter(difflib.get_close_matches(text[5:], keys.DEMOS, n=1)), "")
            known = ", ".join(keys.DEMOS)
            self._fail(place, f"{shown(text)} is no built-in model; there are {known}", f"demo:{near}" if near else "")
            return None
        if "://" in text:
            self._fail(place, f"{shown(text)} is a URL; download the model and name its folder, or use hf-repo")
            return None
        path = "" if is_repo or not text else self._path(text, place)
        kind = self.disk.kind(path) if path else ""
        if text.lower().endswith(".gguf") or (kind and not is_repo and kind == "file"):
            self._fail(place, _GGUF if text.lower().endswith(".gguf") else f"{path} is a file; name the model's folder")
            return None
        if kind == "snapshot":
            return {"path": path}
        if kind:
            what = _NO_SNAPSHOT.get(kind, "has no config.json")
            self._fail(place, f"{path} {what}; name a folder with config.json and safetensors files")
            return None
        if _REPO.fullmatch(text) is None or (text.startswith((".", "~", "/")) and not is_repo):
            where = f" ({path})" if path != text else ""
            self._fail(place, f"{shown(text)} is {f'neither a folder{where} nor' if path else 'not'} org/name")
            return None
        try:
            repo, revision = repository(text)
        except ValueError as error:
            self._fail(place, str(error))
            return None
        return {"repo": repo, "revision": revision}

    def _place(self, settings: _Layer, fields: dict[str, Any]) -> None:
        """n-gpu-layers = 0 is device = cpu, unless something stronger says where; and what a split contradicts."""
        self._on_host(settings, fields)
        shares = [share for share in fields.get("tensor_split", ()) if share]
        self._divide(settings, fields, shares)
        count = len(shares) or fields.get("pipeline_parallel", 1)
        if count == 1:
            return
        place = settings["tensor-split" if shares else "pipeline-parallel"].place
        if shares and fields.get("pipeline_parallel", 1) not in (1, keys.ALL_DEVICES, count):
            self._fail(place, f"tensor-split is for {count} devices, pipeline-parallel for another number; remove one")
        if shares and fields.get("gpu_split"):
            self._fail(place, "tensor-split and gpu-split both say what goes where; remove one")
        if fields.get("split_mode") == "none":
            self._fail(place, "split-mode = none forbids what this asks for; remove one of the two")
        if fields.get("device") == ("cpu",):
            self._fail(place, "wants accelerators, and device is cpu; remove one of the two")

    def _divide(self, settings: _Layer, fields: dict[str, Any], shares: Sequence[float]) -> None:
        """What contradicts that matrices are divided."""
        ranks, mode = fields.get("tensor_parallel", 1), fields.get("split_mode", "auto")
        if ranks == 1 and mode != "tensor":
            return
        place = settings["tensor-parallel" if ranks > 1 else "split-mode"].place
        if shares:
            self._fail(place, "all devices get equal parts of each matrix: remove tensor-split, or this")
        if fields.get("pipeline_parallel", 1) > 1:
            self._fail(place, "pipeline-parallel splits it by layers, and this divides each: remove one of the two")
        if ranks > 1 and mode in ("none", "layer"):
            self._fail(place, f"split-mode = {mode} forbids what this asks for; remove one of the two")
        if ranks == keys.ALL_DEVICES and fields.get("device") == ("cpu",):
            self._fail(place, "max counts accelerators, and device is cpu; write how many processes")

    def _on_host(self, settings: _Layer, fields: dict[str, Any]) -> None:
        layers, device = settings.get("n-gpu-layers"), settings.get("device")
        if layers is None or layers.value:
            return
        if device is None or device.rank < layers.rank or (device.rank == layers.rank and not device.value):
            fields["device"] = ("cpu",)
        elif device.rank == layers.rank and device.value != ("cpu",):
            self._fail(layers.place, f"n-gpu-layers = 0 means device = cpu, but device is {','.join(device.value)}")

    def _template(self, id: str, settings: _Layer, fields: dict[str, Any]) -> None:
        text, file = settings.get("chat-template"), settings.get("chat-template-file")
        if file is None or not file.value or (text is not None and text.value and text.rank > file.rank):
            fields.pop("chat_template_file", None)
            return
        if text is not None and text.value and text.rank == file.rank:
            self._fail(file.place, "chat-template and chat-template-file are both set; remove one")
            return
        try:
            fields["chat_template"] = self.disk.read(file.value)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "is not UTF-8 text"
            self._fail(file.place, f"chat-template-file: {file.value}: {reason}")

    def _adapters(self, settings: _Layer, fields: dict[str, Any]) -> None:
        """All adapters of the model: those in a folder, then those that are named, which stand before them."""
        if "adapters_dir" not in fields and fields.get("path") and self.disk.folders(f"{fields['path']}/adapters"):
            fields["adapters_dir"] = f"{fields['path']}/adapters"
        found: dict[str, AdapterSource] = {}
        if folder := fields.get("adapters_dir", ""):
            for name in self.disk.folders(folder):
                if self.disk.kind(f"{folder}/{name}") == "adapter" and ADAPTER_NAME.fullmatch(name):
                    found[name] = AdapterSource(name=name, path=f"{folder}/{name}")
        named: set[str] = set()
        for key, items in (("lora", fields.get("lora", ())), ("lora-scaled", fields.get("lora_scaled", ()))):
            for item in items:
                name, _, target = item.partition("=")
                path, _, scale = target.rpartition(":") if key == "lora-scaled" else (target, "", "1")
                if name in named:
                    self._fail(settings[key].place, f"{key} names {name} twice; give one of them another name")
                named.add(name)
                found[name] = AdapterSource(name=name, path=path, scale=float(scale))
        fields["adapters"] = tuple(found.values())
        self._ranks(settings, fields)
        default = fields.get("default_lora", "")
        if default and default not in found:
            near = next(iter(difflib.get_close_matches(default, sorted(found), n=1)), "")
            self._fail(settings["default-lora"].place, f"default-lora: there is no adapter {shown(default)}", near)

    def _ranks(self, settings: _Layer, fields: dict[str, Any]) -> None:
        """Slots are as large as the largest adapter that is here, unless the preset says how large."""
        ranks = {each.name: self._rank(each.path) for each in fields["adapters"]}
        stated = fields.get("max_lora_rank")
        if stated is None:
            fields["max_lora_rank"] = max([USUAL, *ranks.values()])
            return
        place = settings["max-lora-rank"].place
        for name, rank in ranks.items():
            if rank > stated:
                self._warn(place, f"max-lora-rank is {stated}, and adapter {name} has rank {rank}: raise it")

    def _rank(self, folder: str) -> int:
        """0 for an adapter that is not here yet."""
        try:
            return rank_of(self.disk.read(f"{folder}/adapter_config.json"))
        except (OSError, ValueError):
            return 0

    def _unique(self, presets: Mapping[str, Preset], aliases: Sequence[tuple[str, Problem]]) -> None:
        """Ids and aliases are one set of names."""
        owners = {id: id for id in presets}
        for id, place in aliases:
            for alias in presets[id].aliases:
                owner = owners.setdefault(alias, id)
                if owner != id:
                    what = "the id of another model" if owner == alias else f"already an alias of {owner}"
                    self._fail(place, f'alias "{alias}" is {what}; choose another')

    def _company(self, presets: Mapping[str, Preset], companions: Sequence[tuple[str, Problem]]) -> None:
        """Whoever is named as a companion must be there."""
        names = {name for preset in presets.values() for name in (preset.id, *preset.aliases)}
        for id, place in companions:
            for name in presets[id].companions:
                if name not in names:
                    near = next(iter(difflib.get_close_matches(name, sorted(names), n=1)), "")
                    self._fail(place, f"companions names {shown(name)}, and there is no such model", near)

    def _unconfigured(self, found: Sequence[Found], presets: Mapping[str, Preset]) -> Iterator[Found]:
        """What was found and no section configures; earlier sources win over later ones of the same name."""
        taken = {id.casefold() for id in presets}
        aliases = {alias for preset in presets.values() for alias in preset.aliases}
        hidden = {preset.repo for preset in presets.values() if preset.dedup_cache_models and preset.repo}
        for entry in found:
            if entry.id.casefold() in taken or (entry.source == "cache" and entry.repo in hidden):
                continue
            if entry.id in aliases:
                place = Problem(entry.path or entry.repo, 0, "", "", "")
                self._warn(place, f'is not listed: "{entry.id}" is an alias of another model')
                continue
            taken.add(entry.id.casefold())
            yield entry

    # Complaints

    def _fail(self, place: Problem, message: str, suggestion: str = "") -> None:
        problem = replace(place, message=message, suggestion=suggestion)
        if problem not in self.problems:  # a setting of [*] or of all models is wrong once
            self.problems.append(problem)

    def _fault(self, place: Problem, key: str, message: str) -> None:
        self._faulty.add((place.section, key))
        self._fail(place, f"{place.key}: {message}" if place.line else message)  # else the place is the key

    def _warn(self, place: Problem, message: str, suggestion: str = "") -> None:
        warning = replace(place, message=message, suggestion=suggestion)
        if warning not in self.warnings:
            self.warnings.append(warning)

    def _unknown(self, written: str, place: Problem) -> None:
        flag = written.lstrip("-").replace("_", "-")
        option = BY_FLAG.get(flag) or BY_VARIABLE.get(written)
        if option is not None:
            further = ", or request-timeout for one model" if option.flag == "timeout" else ""
            self._fail(place, f'"{flag}" is an option of the router, not of a model: use --{option.flag}{further}')
        elif flag in LATER:
            self._fail(place, f'"{flag}" is an option of the router that this version does not offer: remove it')
        else:
            self._fail(place, f'unknown key "{written.lstrip("-")}"', keys.nearest(written))

    def _unknown_variable(self, name: str) -> None:
        near = difflib.get_close_matches(name, [*BY_VARIABLE, *_KEY_VARIABLES], n=1, cutoff=0.75)
        self._warn(Problem(name, 0, "", name, ""), "is no variable that this router reads", next(iter(near), ""))


# A preset, seen from outside


def effective(preset: Preset) -> list[tuple[str, str, str]]:
    """(key, value, origin) of every setting of a model, in the order of the reference; secrets are masked."""
    rows: list[tuple[str, str, str]] = []
    for key in keys.KEYS:
        if key.name in {"model", "hf-repo", "revision"}:
            value = dict(_source_of(preset)).get(key.name)
            if value is not None:
                rows.append((key.name, value, preset.origins.get(key.name) or _given_by(preset)))
        elif key.name == "env":
            rows += [(f"env.{name}", MASK, preset.origins.get(f"env.{name}", BUILT_IN)) for name in preset.env]
        elif key.field and not (key.name == "chat-template" and preset.chat_template_file):
            text, is_set = _written(key, preset)
            rows.append((key.name, text if is_set else key.unset or text, preset.origins.get(key.name, BUILT_IN)))
    return rows


def args(preset: Preset) -> list[str]:
    """The settings that differ from what is built in, as flags; secrets are masked."""
    words = [word for name, value in _source_of(preset) for word in (f"--{name}", value)]
    for key in keys.KEYS:
        if not key.field or key.name == "revision" or (key.name == "chat-template" and preset.chat_template_file):
            continue
        text, is_set = _written(key, preset)
        if not is_set:
            continue
        if key.is_flag:
            words.append(f"--{key.name}" if text == "on" else f"--no-{key.name}")
        else:
            words += [f"--{key.name}", text]
    return [*words, *(word for name in preset.env for word in ("--env", f"{name}={MASK}"))]


LIVE_KEYS = frozenset(key.name for key in keys.KEYS if key.live)
"""Keys that a running worker does not see: when only these differ, it goes on."""
_LIVE_FIELDS = {key.field for key in keys.KEYS if key.live} | {"source", "chat_template_file", "origins", "adapters"}
_LOAD_FIELDS = tuple(field.name for field in dataclasses.fields(Preset) if field.name not in _LIVE_FIELDS)


DEFAULTS = {
    field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    for field in dataclasses.fields(Preset)
}


def same_load(a: Preset, b: Preset) -> bool:
    """Whether both would start the same worker."""
    return a.adapter_slots == b.adapter_slots and all(getattr(a, name) == getattr(b, name) for name in _LOAD_FIELDS)


def _source_of(preset: Preset) -> list[tuple[str, str]]:
    if preset.demo:
        return [("model", f"demo:{preset.demo}")]
    if preset.path:
        return [("model", preset.path)]
    return [("hf-repo", preset.repo), ("revision", preset.revision)]


def _given_by(preset: Preset) -> str:
    if preset.source != "preset":
        return "--models-dir" if preset.source == "models_dir" else "Hugging Face cache"
    return preset.origins.get("model") or preset.origins.get("hf-repo") or BUILT_IN


def _written(key: Key, preset: Preset) -> tuple[str, bool]:
    """The key's value as text, and whether it is another than the built-in one."""
    value = getattr(preset, key.field)
    if key.item:
        return (key.kind.write(value[key.item]), True) if key.item in value else ("", False)
    is_set = value != DEFAULTS[key.field]
    if value is None:
        return "", False
    text = key.kind.write(value)
    return (_masked_json(text) if isinstance(key.kind, JsonObject) and text else text), is_set


def _masked_json(text: str) -> str:
    """Members whose name says that they are secret lose their text."""

    def masked(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                name: MASK if isinstance(member, str) and _SECRET.search(name) else masked(member)
                for name, member in value.items()
            }
        return [masked(item) for item in value] if isinstance(value, list) else value

    return json.dumps(masked(json.loads(text)), separators=(",", ":"), ensure_ascii=False)


__all__ = [
    "LIVE_KEYS", "Disk", "Found", "Loaded", "Preset", "Problem", "args", "effective", "load", "same_load",
]  # fmt: skip
