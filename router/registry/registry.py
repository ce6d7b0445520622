"""The registry: the models of one router, their names, and changes of the list.

HTTP and API modules reach the rest of the router through a `Registry`.
"""

import asyncio
import difflib
import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router import __version__
from router.config.api_keys import ApiKey
from router.config.model_source import FoundModel
from router.config.presets import Preset
from router.config.resolve import REGISTERED
from router.config.settings import Settings
from router.errors import BadRequest, ConfigError, Duplicate, ModelNotFound, PresetInvalid
from router.events import Event, EventLog
from router.fleet.fleet import Fleet
from router.fleet.worker import State, Worker
from router.launch.interface import Launcher
from router.log import Ring
from router.registry.auth import Access
from router.registry.overrides import ModelOverrides, RegisteredAdapter
from router.registry.shared_workers import ListedModel, SharedWorkers
from router.registry.snapshot_info import SnapshotInfo
from router.store.catalogue import LoadPresets, ReadKeys
from router.store.snapshots import Snapshots

BUILD = f"b0-{__version__}"
MAX_NAME_LENGTH = 192  # characters; a longer name is not repeated in a message
MOST_COMPARED = 20  # names that an unknown one is compared with
# Characters of an unknown name; similar names to a longer one are not searched for. With 1,000 models the search takes
# up to 10 ms of the event loop, with 192 characters 60 ms.
COMPARED_LENGTH = 80
MOST_RECORDED = 20  # faults of a failed reload in its log line and in the status; the response to a call has all
LATEST = ":latest"  # Ollama's tag of names without one; its clients append it, also on paths of OpenAI's API


@dataclass(slots=True)
class Registry:
    """The models of one router and the services behind them."""

    settings: Settings
    fleet: Fleet
    launcher: Launcher
    files: Snapshots
    events: EventLog
    access: Access
    load: LoadPresets
    keys: ReadKeys
    shared_workers: SharedWorkers
    port: int = 0
    logs: Ring = field(default_factory=Ring)
    closing: bool = False  # the router is shutting down
    startup_pending: frozenset[str] = frozenset()  # models of `load-on-startup` that are not ready yet
    overrides: ModelOverrides = field(default_factory=ModelOverrides)
    deleting: set[str] = field(default_factory=set)  # models whose files are being deleted: they are not listed again
    reloaded_at: float | None = None  # when presets were last read, successfully or not; seconds since 1970
    reload_errors: tuple[str, ...] = ()  # the problems of that reading; if there are any, the old presets still apply
    names: "ModelNames" = field(init=False)
    snapshots: SnapshotInfo = field(init=False)
    file_presets: dict[str, Preset] = field(init=False)  # presets as in files, without overrides, by id
    _removed: set[str] = field(default_factory=set)  # removed since a reload began, which may still have found them
    _reloading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.file_presets = {id: listed.preset for id, listed in self.shared_workers.listed.items()}
        self.snapshots = SnapshotInfo(self.files, self.shared_workers)
        self._update_names()

    # Finding models

    def choose(self, key: ApiKey, *, path: str | None, body: str | None, query: Mapping[str, str]) -> tuple[str, str]:
        """The id of the model for a request, and the name that the request used. Raises BadRequest, ModelNotFound."""
        unknown, named = self.settings.unknown_model, query.get("model") or query.get("model_name")
        try:
            return self.names.choose(
                path=path,
                body=body,
                query=named,
                default=self.settings.default_model,
                fall_back=unknown == "default",
                allowed=self._allowed(key),
            )
        except ModelNotFound:
            only = self.only_model(key)
            # The name of an adapter may be misspelled. The model without it would answer differently.
            if only is None or only.preset.adapters or unknown == "reject":
                raise
            return only.id, path or body or named or only.id

    def model(self, key: ApiKey, name: str) -> ListedModel:
        """Raises ModelNotFound."""
        return self.shared_workers.find(self.names.find(name, self._allowed(key)))

    def whole_model(self, key: ApiKey, name: str) -> ListedModel:
        """As `model`, for calls that remove it. Raises BadRequest for the name of an adapter."""
        listed = self.model(key, name)
        if adapter := self.names.adapter(name):
            raise BadRequest(f"'{name}' is the adapter {adapter} of '{listed.id}'; name the model", param="model")
        return listed

    def _allowed(self, key: ApiKey) -> Callable[[str], bool]:
        return lambda id: id in self.shared_workers.listed and Access.may_use(key, id)

    def visible(self, key: ApiKey) -> list[ListedModel]:
        """The models that the key may use."""
        return [listed for id, listed in self.shared_workers.listed.items() if Access.may_use(key, id)]

    def only_model(self, key: ApiKey) -> ListedModel | None:
        """The model of a router that was started with one by name, as llama-server is. None if others are listed."""
        is_one = len(self.shared_workers.listed) == 1 and (self.settings.model or self.settings.hf_repo)
        return next(iter(self.visible(key)), None) if is_one else None

    def check_adapter(self, id: str, name: str) -> None:
        """Raise ModelNotFound, with similar names, if model `id` has no adapter of that name."""
        known = [adapter.name for adapter in self.shared_workers.find(id).preset.adapters]
        if name not in known:
            near = _near(name, known)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ModelNotFound(f"model '{id}' has no adapter '{name[:100]}'{hint}", param="adapter")

    def on_event(self, event: Event) -> None:
        """Take models that became ready out of `startup_pending`, whichever request loaded them."""
        if self.startup_pending and event.kind == "state" and event.data["state"] == "ready":
            self.startup_pending -= {*self.shared_workers.names_of(event.model)}

    # Changing the list

    async def reload(self) -> dict[str, Any]:
        """Read presets, folders, caches and keys again and apply the changes.

        Raises PresetInvalid if there is any problem. Then nothing has changed.
        """
        async with self._reloading:
            try:
                self._drop_completed_pulls()
                added = self.overrides.sources()
                self._removed.clear()
                loaded, keys = await asyncio.to_thread(lambda: (self.load(added), self.keys()))
            except ConfigError as error:
                messages = [{"message": line} for line in error.problems]
                raise self._reload_failed("settings", error.problems, messages) from None
            if loaded.problems:
                rows = [problem.row() for problem in loaded.problems]
                raise self._reload_failed("presets", [str(problem) for problem in loaded.problems], rows)
            self.reloaded_at, self.reload_errors = time.time(), ()
            self.access.keys = keys
            self.snapshots.clear()
            warnings = [str(warning) for warning in loaded.warnings]
            for id in [id for id in self.overrides.sections if not _is_registered(loaded.presets.get(id))]:
                del self.overrides.sections[id]
                warnings.append(f"{id} was registered by a call and is now defined in a file; the file applies")
            left_out = self.deleting | self._removed
            self.file_presets = {id: preset for id, preset in loaded.presets.items() if id not in left_out}
            self.startup_pending &= self.file_presets.keys()
            result = self.shared_workers.apply(*self.overrides.apply(self.file_presets))
            for id in result["removed"]:
                self.overrides.forget(id)
            self._update_names()
            return {**result, "warnings": warnings}

    async def add(self, id: str, *, found: FoundModel | None = None, section: str = "") -> Preset:
        """Add one model: `found` on the hub, or written as an INI section. Other models do not change.

        Raises Duplicate if the name is taken, PresetInvalid if the files or the section cannot be used.
        """
        async with self._reloading:
            if self._is_taken(id):
                raise Duplicate(f"model '{id}' exists already", param="model")
            # All presets are read again, because the new one is checked against them; only the new one is used.
            loaded = await asyncio.to_thread(self.load, self.overrides.sources(found, id=id, section=section))
            if loaded.problems:
                rows = [problem.row() for problem in loaded.problems]
                raise PresetInvalid(f"'{id}' cannot be added: {loaded.problems[0]}", extra={"errors": rows})
            preset = loaded.presets.get(id)
            if preset is None or self._is_taken(id):
                raise Duplicate(f"a model like '{id}' exists already", param="model")
            if found is not None:
                self.overrides.fetched[id] = found
            if section:
                self.overrides.sections[id] = section
            self.file_presets[id] = preset
            self.shared_workers.update(*self.overrides.apply(self.file_presets))
            self._update_names()
            return preset

    def remove(self, id: str, reason: str) -> list[Worker]:
        """Remove a model from the list. Returns its workers, which drain and stop; none if other models share them."""
        self.overrides.forget(id)
        self.snapshots.forget(id)
        self._removed.add(id)
        self.startup_pending -= {id}
        del self.file_presets[id]
        workers = self.shared_workers.remove(id, reason, *self.overrides.apply(self.file_presets))
        self._update_names()
        return workers

    def pin(self, id: str, *, pinned: bool) -> None:
        """Pin or unpin model `id` and all that share its worker. Takes precedence over presets."""
        self.overrides.pinned |= dict.fromkeys(self.shared_workers.find(id).names, pinned)
        self._apply_overrides(id)

    def scale(self, id: str, replicas: tuple[int, int]) -> None:
        """Set the least and most workers of model `id` and all that share them. Takes precedence over presets."""
        self.overrides.replicas |= dict.fromkeys(self.shared_workers.find(id).names, replicas)
        self._apply_overrides(id)

    def set_adapter(self, id: str, name: str, registered: RegisteredAdapter | None) -> None:
        """Add or replace an adapter of model `id` and all that share its worker; remove it with None."""
        self.overrides.set_adapter(id, self.shared_workers.find(id).names, name, registered)
        self._apply_overrides(id)
        self.shared_workers.send_adapters_again([self.shared_workers.find(id).model])  # its folder may have other files
        self._update_names()

    def _apply_overrides(self, id: str) -> None:
        """Apply all changes by calls after one of model `id`."""
        self.shared_workers.update(*self.overrides.apply(self.file_presets))
        self.events.append("listed", id)

    def _update_names(self) -> None:
        self.names = ModelNames({id: listed.preset for id, listed in self.shared_workers.listed.items()})

    def _is_taken(self, id: str) -> bool:
        try:
            self.names.find(id)
        except ModelNotFound:
            return id in self.deleting
        return True

    def _drop_completed_pulls(self) -> None:
        """Forget pulls that are complete or no longer listed: from now on the folder of the cache lists the model."""
        listed = self.shared_workers.listed
        for id in [id for id in self.overrides.fetched if id not in listed or self._is_complete(id)]:
            del self.overrides.fetched[id]

    def _is_complete(self, id: str) -> bool:
        listed = self.shared_workers.listed[id]
        fetching = any(worker.state is State.DOWNLOADING for worker in listed.model.workers)
        return not fetching and self.files.find(listed.preset) is not None

    def _reload_failed(self, what: str, lines: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> PresetInvalid:
        """Record a failed reload, emit an event, and return the error for the caller to raise."""
        first = list(lines[:MOST_RECORDED])
        if len(lines) > MOST_RECORDED:  # a file of something else has a fault in each line
            first.append(f"and {len(lines) - MOST_RECORDED} more")
        self.reloaded_at, self.reload_errors = time.time(), tuple(first)
        self.events.append("config_refused", "*", errors=first)
        return PresetInvalid(f"the {what} cannot be used; the old ones still apply: {lines[0]}", extra={"errors": rows})


class ModelNames:
    """All names of a set of presets: ids, aliases, cached repositories, MODEL@ADAPTER, ADAPTER if one model has it."""

    def __init__(self, presets: Mapping[str, Preset]):
        # An id takes precedence over an alias, an alias over a repository, and any of them over adapters.
        self._exact: dict[str, str] = {id: id for id in presets}
        for preset in presets.values():
            for alias in preset.aliases:
                self._exact.setdefault(alias, preset.id)
        for preset in presets.values():
            if preset.dedup_cache_models and preset.repo:  # not in lists, but requests may still use the repository
                self._exact.setdefault(preset.repo, preset.id)
        self._adapters: dict[str, str] = {}
        models_with = Counter(adapter.name for preset in presets.values() for adapter in preset.adapters)
        for preset in presets.values():
            for adapter in preset.adapters:
                for base in (preset.id, *preset.aliases):
                    name = f"{base}@{adapter.name}"
                    if self._exact.setdefault(name, preset.id) == preset.id and name not in presets:
                        self._adapters[name] = adapter.name
                if models_with[adapter.name] == 1 and adapter.name not in self._exact:  # as clients of vLLM name it
                    self._exact[adapter.name], self._adapters[adapter.name] = preset.id, adapter.name
        self._folded: dict[str, set[str]] = {}
        for name, id in self._exact.items():
            self._folded.setdefault(name.casefold(), set()).add(id)
        self._ids = tuple(presets)

    def find(self, name: str, allowed: Callable[[str], bool] = lambda id: True) -> str:
        """The id for `name`: an exact id or alias, else a unique match without regard to case, else without `:latest`.

        Raises ModelNotFound with up to three similar names. A model outside `allowed` is treated as unknown and is not
        suggested, so that a key cannot find out which models exist.
        """
        for known in (name, name.removesuffix(LATEST)):
            id = self._exact.get(known)
            if id is None:
                folded = self._folded.get(known.casefold(), set())
                id = next(iter(folded)) if len(folded) == 1 else None
            if id is not None and allowed(id):
                return id
        if len(name) > MAX_NAME_LENGTH:
            raise ModelNotFound(
                f"model not found: the name has {len(name)} characters, {MAX_NAME_LENGTH} are allowed", param="model"
            )
        near = _near(name, (known for known, id in self._exact.items() if allowed(id)))
        hint = f"; did you mean {' or '.join(near)}?" if near else "; GET /v1/models lists all models"
        raise ModelNotFound(f"model '{name}' not found{hint}", param="model")

    def adapter(self, name: str) -> str:
        """The adapter in a name of the form MODEL@ADAPTER; empty if the name has none."""
        if name not in self._exact:
            name = name.removesuffix(LATEST)
        if name in self._exact:
            return self._adapters.get(name, "")
        folded = {adapter for known, adapter in self._adapters.items() if known.casefold() == name.casefold()}
        return next(iter(folded)) if len(folded) == 1 else ""

    def choose(
        self,
        *,
        path: str | None,
        body: str | None,
        query: str | None,
        default: str,
        fall_back: bool,
        allowed: Callable[[str], bool],
    ) -> tuple[str, str]:
        """The id of the model for a request and the name that it used: from path, body, query, or the default, in
        order.

        With `fall_back` an unknown name selects the default. Raises BadRequest (model_missing, model_conflict) and
        ModelNotFound.
        """

        def find(name: str) -> str:
            try:
                return self.find(name, allowed)
            except ModelNotFound:
                if fall_back and default:
                    return self.find(default, allowed)
                raise

        if path is None and body and query and (find(body), self.adapter(body)) != (find(query), self.adapter(query)):
            message = "the body and the query name different models; name one"
            raise BadRequest(message, reason="model_conflict", param="model")
        requested = path or body or query
        if requested:
            return find(requested), requested
        if default:
            return self.find(default, allowed), default
        ids = [id for id in self._ids if allowed(id)]
        if len(ids) != 1:
            message = "model name is missing from the request; add it, or start the router with --default-model"
            raise BadRequest(message, reason="model_missing", param="model")
        return ids[0], ids[0]


def _near(name: str, known: Iterable[str]) -> list[str]:
    """Up to three of the `known` names, the most similar one first."""
    if len(name) > COMPARED_LENGTH:
        return []
    by_fold = {candidate.casefold(): candidate for candidate in known}
    fold = name.casefold()
    # difflib takes up to 0.1 ms of the event loop for each name, so only those with most of its pairs of letters.
    pairs = {fold[at : at + 2] for at in range(len(fold) - 1)}
    compared = heapq.nlargest(MOST_COMPARED, by_fold, key=lambda known: sum([pair in known for pair in pairs]))
    return [by_fold[fold] for fold in difflib.get_close_matches(fold, compared, n=3, cutoff=0.6)]


def _is_registered(preset: Preset | None) -> bool:
    """True if a call has registered the model and no file defines it."""
    origins = preset.origins if preset is not None else {}
    return origins.get("model", origins.get("hf-repo", "")).startswith(f"{REGISTERED}:")
