"""What all faces share: the fleet, the names of its models, the facts in their files, the keys.

A face says one API; what it needs to know of the router it asks here.
"""

import asyncio
import contextlib
import difflib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from router import __version__
from router.config.presets import Preset
from router.config.resolve import REGISTERED, Found, Loaded
from router.config.settings import Key, Settings
from router.errors import BadRequest, ConfigError, Duplicate, ModelNotFound, PresetInvalid
from router.events import Event, EventLog
from router.fleet.fleet import Fleet
from router.fleet.interfaces import Files
from router.fleet.worker import State, Worker
from router.launch.interface import Launcher
from router.log import Ring
from router.memory.checkpoint import meta, modalities, offered
from router.memory.checkpoint_facts import Checkpoint, EstimateError, effective_ctx
from router.registry.adapters import Registered
from router.registry.aliases import Names, choose
from router.registry.auth import Access
from router.registry.shared_workers import Listed, Members
from router.registry.sharing import Group, share
from router.store.catalogue import Further

T = TypeVar("T")

BUILD = f"b0-{__version__}"
TRUE, FALSE = frozenset({"true", "1"}), frozenset({"false", "0"})
LOOK = 5.0
"""Seconds that those who look at a model wait for its disk."""


@dataclass(slots=True)
class Site:
    """One router, as its faces see it."""

    settings: Settings
    fleet: Fleet
    launcher: Launcher
    files: Files
    events: EventLog
    access: Access
    load: Callable[[Further], Loaded]
    """Reads presets, folders and caches again; problems are part of what it returns."""
    keys: Callable[[], tuple[Key, ...]]
    """Reads key files again."""
    members: Members
    names: Names = field(init=False)
    port: int = 0
    awaited: frozenset[str] = frozenset()
    """Models of `load-on-startup` that are not up yet."""
    closing: bool = False
    reloaded: float | None = None
    """When presets were last read again, well or not, in seconds since 1970."""
    reload_errors: tuple[str, ...] = ()
    """What was wrong with them then: the old ones still hold."""
    fetched: dict[str, Found] = field(default_factory=dict)
    """Models that somebody asked to be fetched, and that are not complete yet."""
    registered: dict[str, str] = field(default_factory=dict)
    """Sections of models that came by a call, by id."""
    pinned: dict[str, bool] = field(default_factory=dict)
    """Models that were pinned, or no longer, by a call."""
    adapters: dict[str, dict[str, Registered]] = field(default_factory=dict)
    """Adapters that came by a call, by their names, by model."""
    scaled: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Least and most workers of models that were scaled by a call."""
    logs: Ring = field(default_factory=Ring)
    leaving: set[str] = field(default_factory=set)
    """Models whose files are being deleted: they are not listed again."""
    stated: dict[str, Preset] = field(default_factory=dict)
    """Presets as files say, whatever calls have changed since, by id; those that are alike share a worker."""
    _gone: set[str] = field(default_factory=set)
    """Models that calls took out since presets were last begun to be read, which may have found them still."""
    _facts: dict[str, tuple[str, Checkpoint]] = field(default_factory=dict)
    _looks: dict[str, tuple[asyncio.Task[Checkpoint | None], float]] = field(default_factory=dict)
    """Readings of facts that go on, and when they were begun, by the id of their model."""
    _reloading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.stated = {id: listed.preset for id, listed in self.members.listed.items()}
        self._name()

    def choose(self, key: Key, *, path: str | None, body: str | None, query: Mapping[str, str]) -> tuple[str, str]:
        """(id, name as asked) of the model that a request means. Raises BadRequest, ModelNotFound."""
        return choose(
            self.names,
            path=path,
            body=body,
            query=query.get("model") or query.get("model_name"),
            default=self.settings.default_model,
            fall_back=self.settings.unknown_model == "default",
            allowed=lambda id: id in self.members.listed and Access.may_use(key, id),
        )

    def model(self, key: Key, name: str) -> Listed:
        """Raises ModelNotFound."""
        id = self.names.find(name, lambda id: id in self.members.listed and Access.may_use(key, id))
        return self.members.find(id)

    def hear(self, event: Event) -> None:
        """Models that are up are awaited no longer, whoever loaded them."""
        if self.awaited and event.kind == "state" and event.data["state"] == "ready":
            self.awaited -= {*self.members.names_of(event.model)}

    def visible(self, key: Key) -> list[Listed]:
        return [listed for id, listed in self.members.listed.items() if Access.may_use(key, id)]

    def sharing(self, key: Key, listed: Listed) -> list[str]:
        """The other models by which the same worker is known, as far as the key may see them."""
        return [name for name in listed.others if Access.may_use(key, name)]

    async def facts(self, preset: Preset) -> Checkpoint | None:
        """The facts in the preset's files; None if they are not here (yet), cannot be read, or have not been read LOOK
        seconds after somebody began to."""
        now = asyncio.get_running_loop().time()
        if preset.id not in self._looks:
            reading = asyncio.create_task(self._read(preset))
            reading.add_done_callback(lambda _: self._looks.pop(preset.id))
            self._looks[preset.id] = reading, now
        reading, began = self._looks[preset.id]
        await asyncio.wait({reading}, timeout=max(0.0, began + LOOK - now))
        return reading.result() if reading.done() else None

    async def _read(self, preset: Preset) -> Checkpoint | None:
        listed = self.members.listed.get(preset.id)
        worker = next(iter(listed.model.workers), None) if listed is not None else None
        snapshot = (worker.snapshot if worker is not None else "") or await asyncio.to_thread(self._find, preset)
        known = self._facts.get(preset.id)
        if known is not None and (not snapshot or known[0] == snapshot):
            return known[1]
        if not snapshot:
            return None
        try:
            facts = await self.files.read(snapshot, preset)
        except EstimateError:
            return None
        self._facts[preset.id] = (snapshot, facts)
        return facts

    def _find(self, preset: Preset) -> str:
        return self.files.find(preset) or ""

    async def describe(self, preset: Preset) -> tuple[Checkpoint | None, dict[str, Any], dict[str, Any]]:
        """(facts, `meta`, `architecture`) of a model, from its files."""
        facts = await self.facts(preset)
        if facts is None:
            return None, {}, modalities(())
        try:
            n_ctx = effective_ctx(facts, preset)
        except EstimateError:
            n_ctx = 0
        return facts, meta(facts, n_ctx), modalities(offered(facts, preset))

    async def words(self, preset: Preset) -> "Words":
        """The model's own template and special tokens, as far as its files say."""
        known = self._facts.get(preset.id)
        return await asyncio.to_thread(_words, Path(known[0])) if known is not None else Words()

    async def reload(self) -> dict[str, Any]:
        """Apply changed presets, folders and caches. Raises PresetInvalid, having changed nothing."""
        async with self._reloading:
            try:
                further = self._further()
                self._gone.clear()
                loaded, keys = await asyncio.to_thread(lambda: (self.load(further), self.keys()))
            except ConfigError as broken:
                rows = [{"message": line} for line in broken.problems]
                raise self._refused("settings", broken.problems, rows) from None
            if loaded.problems:
                rows = [problem_row(problem) for problem in loaded.problems]
                raise self._refused("presets", [str(problem) for problem in loaded.problems], rows)
            self.reloaded, self.reload_errors = time.time(), ()
            self.access.keys = keys
            self._facts.clear()
            warnings = [str(warning) for warning in loaded.warnings]
            for id in [id for id in self.registered if not _is_registered(loaded.presets.get(id))]:
                del self.registered[id]
                warnings.append(f"{id} was registered by a call, and now stands in a file: that holds")
            left = self.leaving | self._gone
            self.stated = {id: preset for id, preset in loaded.presets.items() if id not in left}
            self.awaited &= self.stated.keys()
            result = self.members.apply(*self._told())
            self._name()
            return {**result, "warnings": warnings}

    async def add(self, id: str, *, found: Found | None = None, section: str = "") -> Preset:
        """List one more model, found on the hub or written as a section, as all files say now; nothing else changes.

        Raises Duplicate if there is one of that name, PresetInvalid if files or section cannot be used.
        """
        async with self._reloading:
            if self._is_taken(id):
                raise Duplicate(f"there is a model '{id}' already", param="model")
            sections = {**self.registered, id: section} if section else self.registered
            further = Further((*self.fetched.values(), *((found,) if found else ())), "\n".join(sections.values()))
            loaded = await asyncio.to_thread(self.load, further)
            if loaded.problems:
                rows = [problem_row(problem) for problem in loaded.problems]
                raise PresetInvalid(f"'{id}' cannot be added: {loaded.problems[0]}", extra={"errors": rows})
            preset = loaded.presets.get(id)
            if preset is None or self._is_taken(id):
                raise Duplicate(f"there is a model like '{id}' already", param="model")
            if found is not None:
                self.fetched[id] = found
            if section:
                self.registered[id] = section
            self.stated[id] = preset
            self.members.settle(*self._told())
            self._name()
            return preset

    def remove(self, id: str, reason: str) -> list[Worker]:
        """List a model no longer; its workers, which drain and stop unless others share them."""
        self.fetched.pop(id, None)
        self.registered.pop(id, None)
        self.scaled.pop(id, None)
        self.adapters.pop(id, None)
        self.pinned.pop(id, None)
        self._facts.pop(id, None)
        self._gone.add(id)
        self.awaited -= {id}
        del self.stated[id]
        workers = self.members.remove(id, reason, *self._told())
        self._name()
        return workers

    def pin(self, id: str, *, pinned: bool) -> None:
        """Whether model `id`, and whatever shares its worker, may be put out, from now on and whatever presets say."""
        self.pinned |= dict.fromkeys(self.members.find(id).names, pinned)
        self._change(id)

    def scale(self, id: str, replicas: tuple[int, int]) -> None:
        """How many workers model `id`, and whatever shares them, keeps, from now on and whatever presets say."""
        self.scaled |= dict.fromkeys(self.members.find(id).names, replicas)
        self._change(id)

    def adapt(self, id: str, name: str, made: Registered | None) -> None:
        """Model `id`, and whatever shares its worker, has this adapter from now on, as a call wants it; None: no
        longer."""
        rest = {each: one for each, one in self.adapters.get(id, {}).items() if each != name}
        mine = rest if made is None else {**self.adapters.get(id, {}), name: made}
        self.adapters |= dict.fromkeys(self.members.find(id).names, mine)
        self._change(id)
        self._name()

    def _change(self, id: str) -> None:
        self.members.settle(*self._told())
        self.events.append("listed", id)

    def check_adapter(self, id: str, name: str) -> None:
        """Raises ModelNotFound with near names if model `id` has no adapter of that name."""
        known = [each.name for each in self.members.find(id).preset.adapters]
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ModelNotFound(f"model '{id}' has no adapter '{name[:100]}'{hint}", param="adapter")

    def _told(self) -> tuple[dict[str, Preset], list[Group]]:
        """The presets with what calls have changed of them, and which share a worker. What was said of one of these
        holds for all, who came later too."""
        groups = share(self.stated)
        for group in groups:
            _agree(self.pinned, group)
            _agree(self.scaled, group)
            _agree(self.adapters, group)
        return {id: self._as_told(preset) for id, preset in self.stated.items()}, groups

    def _as_told(self, preset: Preset) -> Preset:
        """The preset with what calls have changed of it."""
        id, mine = preset.id, self.adapters.get(preset.id, {})
        if id not in self.pinned and id not in self.scaled and not mine:
            return preset
        own = (each for each in preset.adapters if each.name not in mine)
        adapters = (*own, *(each.source for each in mine.values()))
        pinned, replicas = self.pinned.get(id, preset.pin), self.scaled.get(id, preset.replicas)
        return replace(preset, pin=pinned, replicas=replicas, adapters=adapters)

    def _is_taken(self, id: str) -> bool:
        try:
            self.names.find(id)
        except ModelNotFound:
            return id in self.leaving
        return True

    def _name(self) -> None:
        self.names = Names({id: listed.preset for id, listed in self.members.listed.items()})

    def _further(self) -> Further:
        for id in [id for id in self.fetched if id not in self.members.listed or self._is_complete(id)]:
            del self.fetched[id]  # from now on its files say that it is there, or that it is not
        return Further(tuple(self.fetched.values()), "\n".join(self.registered.values()))

    def _is_complete(self, id: str) -> bool:
        listed = self.members.listed[id]
        fetching = any(worker.state is State.DOWNLOADING for worker in listed.model.workers)
        return not fetching and self.files.find(listed.preset) is not None

    def _refused(self, what: str, lines: Sequence[str], rows: list[dict[str, Any]]) -> PresetInvalid:
        """Tell everybody who may look for it: the log, the state, the events, and whoever asked."""
        self.reloaded, self.reload_errors = time.time(), tuple(lines)
        self.events.append("config_refused", "*", errors=list(lines))
        return PresetInvalid(f"the {what} cannot be used; the old ones still are: {lines[0]}", extra={"errors": rows})


@dataclass(frozen=True, slots=True)
class Words:
    """What a snapshot's small files say for people."""

    chat_template: str = ""
    bos_token: str = ""
    eos_token: str = ""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """What generation_config.json says."""


def _agree(said: dict[str, T], group: Group) -> None:
    """What was said of one of a group is said of all."""
    first = next((name for name in group if name in said), None)
    if first is not None:
        said.update(dict.fromkeys(group, said[first]))


def _is_registered(preset: Preset | None) -> bool:
    """Whether it came by a call, and no file says what it is."""
    origins = preset.origins if preset is not None else {}
    return origins.get("model", origins.get("hf-repo", "")).startswith(f"{REGISTERED}:")


def _words(folder: Path) -> Words:
    said = _said(folder / "tokenizer_config.json")
    template = said.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((each.get("template") for each in template if each.get("name") == "default"), "")
    if not template:
        template = _older_template(folder)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        template = (folder / "chat_template.jinja").read_text()
    tokens = [said.get(name) for name in ("bos_token", "eos_token")]
    bos, eos = (str(token.get("content", "")) if isinstance(token, dict) else str(token or "") for token in tokens)
    generation = _said(folder / "generation_config.json")
    return Words(template if isinstance(template, str) else "", bos, eos, generation)


def _said(file: Path) -> dict[str, Any]:
    try:
        said = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _older_template(folder: Path) -> str:
    """What older checkpoints of models with images keep beside the tokenizer's files."""
    try:
        return str(json.loads((folder / "chat_template.json").read_bytes())["chat_template"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def problem_row(problem: Any) -> dict[str, Any]:
    return {
        "file": problem.file,
        "line": problem.line,
        "section": problem.section,
        "key": problem.key,
        "message": problem.message,
        "suggestion": problem.suggestion,
    }


def flag(query: Mapping[str, str], name: str) -> bool | None:
    """A boolean of the query; None if it is not there. Raises BadRequest."""
    text = query.get(name)
    if text is None:
        return None
    if text.casefold() in TRUE:
        return True
    if text.casefold() in FALSE:
        return False
    raise BadRequest(f"{name} must be true, 1, false or 0, not '{text[:40]}'", param=name)


__all__ = ["BUILD", "Site", "flag", "problem_row"]
