"""Changes of the list of models by API calls: pulls, registrations, pins, replica counts, LoRA adapters.

The files of presets stay as they are. A change holds until the router exits, or until the model is removed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from router.config.model_source import FoundModel
from router.config.presets import Preset
from router.registry.worker_groups import PresetGroup, group_presets
from router.store.catalogue import AddedModels
from worker.protocol.argv import AdapterSource

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RegisteredAdapter:
    """A LoRA adapter that a call has registered. The router forgets it when it exits."""

    src: str  # the source as written in the call
    source: AdapterSource


@dataclass(slots=True)
class ModelOverrides:
    """All changes of one router by API calls, each by model id."""

    fetched: dict[str, FoundModel] = field(default_factory=dict)  # pulled models whose files are not complete yet
    sections: dict[str, str] = field(default_factory=dict)  # INI sections of registered models
    pinned: dict[str, bool] = field(default_factory=dict)
    replicas: dict[str, tuple[int, int]] = field(default_factory=dict)  # least and most workers
    adapters: dict[str, dict[str, RegisteredAdapter]] = field(default_factory=dict)  # by model, then by adapter name

    def sources(self, found: FoundModel | None = None, *, id: str = "", section: str = "") -> AddedModels:
        """The models to read beside those in files; with `found`, or `section` as model `id`, one more."""
        sections = {**self.sections, id: section} if section else self.sections
        return AddedModels((*self.fetched.values(), *((found,) if found else ())), "\n".join(sections.values()))

    def set_adapter(self, id: str, names: PresetGroup, adapter: str, registered: RegisteredAdapter | None) -> None:
        """Add or replace an adapter of model `id`, or remove it with None, for all `names` that share its worker."""
        current = self.adapters.get(id, {})
        if registered is None:
            adapters = {name: other for name, other in current.items() if name != adapter}
        else:
            adapters = {**current, adapter: registered}
        self.adapters |= dict.fromkeys(names, adapters)

    def apply(self, file_presets: Mapping[str, Preset]) -> tuple[dict[str, Preset], list[PresetGroup]]:
        """The presets with all changes, and the groups that share a worker.

        Groups are formed from the presets in files, because a change of one preset applies to its whole group: it is
        copied to the other presets first, including presets that joined the group after the call.
        """
        groups = group_presets(file_presets)
        for group in groups:
            _copy_to_group(self.pinned, group)
            _copy_to_group(self.replicas, group)
            _copy_to_group(self.adapters, group)
        return {id: self._changed(preset) for id, preset in file_presets.items()}, groups

    def forget(self, id: str) -> None:
        """Drop all changes of a model."""
        for changes in (self.fetched, self.sections, self.pinned, self.replicas, self.adapters):
            changes.pop(id, None)

    def _changed(self, preset: Preset) -> Preset:
        id, registered = preset.id, self.adapters.get(preset.id, {})
        if id not in self.pinned and id not in self.replicas and not registered:
            return preset
        in_files = (source for source in preset.adapters if source.name not in registered)
        return replace(
            preset,
            pin=self.pinned.get(id, preset.pin),
            replicas=self.replicas.get(id, preset.replicas),
            adapters=(*in_files, *(adapter.source for adapter in registered.values())),
        )


def _copy_to_group(values: dict[str, T], group: PresetGroup) -> None:
    """Give all presets of the group the value of the first one that has any."""
    first = next((name for name in group if name in values), None)
    if first is not None:
        values.update(dict.fromkeys(group, values[first]))
