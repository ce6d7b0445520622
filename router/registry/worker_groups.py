"""Groups of presets that share a worker. Pure functions.

Presets are in one group if they would start the same worker and keep it under the same conditions. Settings that only
concern requests are not part of the worker's command line: each name that a worker serves has a `Profile`, which the
router sends to the worker. So presets of one model that differ only in such settings share one model of the fleet.
"""

import dataclasses
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from router.config.presets import DEFAULTS, KEYS, Preset, Scope
from worker.protocol.argv import Profile

PresetGroup = tuple[str, ...]  # the ids of the presets that share a worker, in the order of the list of models
ID_SEPARATOR = ","  # between preset ids in the id of a group; no preset id contains it


# Fields of one name alone (aliases, tags, sampling, ...). Presets of a group may differ in them.
_NAME_FIELDS = {key.field for key in KEYS if key.field and key.scope is not Scope.WORKER}
_NAME_DEFAULTS: Mapping[str, Any] = {name: DEFAULTS[name] for name in _NAME_FIELDS} | {"sampling": {}}
# Fields in which all presets of a group are equal.
_GROUP_FIELDS = tuple(
    field.name for field in dataclasses.fields(Preset) if field.name not in _NAME_FIELDS | {"id", "source", "origins"}
)
_MAPPING_FIELDS = [name for name in _GROUP_FIELDS if isinstance(DEFAULTS[name], Mapping)]
_scalar_values = attrgetter(*(name for name in _GROUP_FIELDS if name not in _MAPPING_FIELDS))


def group_presets(presets: Mapping[str, Preset]) -> list[PresetGroup]:
    """Divide all presets into groups that share a worker. A group is listed where its first preset is."""
    groups: dict[Hashable, list[str]] = {}
    for id, preset in presets.items():
        # Mappings are not hashable, so they enter the key as sorted items.
        mappings = tuple(tuple(sorted(getattr(preset, name).items())) for name in _MAPPING_FIELDS)
        groups.setdefault((_scalar_values(preset), mappings), []).append(id)
    return [tuple(group) for group in groups.values()]


def fleet_presets(presets: Mapping[str, Preset], groups: Iterable[PresetGroup]) -> dict[str, Preset]:
    """One preset per group, by group id: the models of the fleet."""
    merged = (fleet_preset([presets[name] for name in group]) for group in groups)
    return {preset.id: preset for preset in merged}


def fleet_preset(group: Sequence[Preset]) -> Preset:
    """The preset with which the fleet serves a group: fields of one name alone have their defaults."""
    first = group[0]
    names = [name for preset in group for name in (preset.id, *preset.aliases)] if len(group) > 1 else first.aliases
    values: dict[str, Any] = {**_NAME_DEFAULTS, "aliases": tuple(names)}
    if len(group) == 1 and all(getattr(first, name) == value for name, value in values.items()):
        return first  # the usual case; avoids a copy for each of maybe a thousand presets
    return replace(first, id=group_id([preset.id for preset in group]), **values)


def group_id(ids: Iterable[str]) -> str:
    """The id of a group. A group of one preset has the preset's own id."""
    return ID_SEPARATOR.join(ids)


def preset_ids(id: str) -> PresetGroup:
    """The preset ids in a group id."""
    return tuple(id.split(ID_SEPARATOR))


def request_profile(preset: Preset) -> Profile | None:
    """The settings that the worker needs for requests by this name; None if all have their defaults."""
    profile = Profile(
        name=preset.id,
        n_predict=preset.n_predict,
        seed=preset.seed,
        sampling=json.dumps(dict(preset.sampling)) if preset.sampling else "",
        chat_template=preset.chat_template,
        chat_template_kwargs=preset.chat_template_kwargs,
        default_adapter=preset.default_lora if preset.adapter_slots else "",
    )
    return profile if profile != Profile(name=preset.id) else None
