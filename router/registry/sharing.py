"""Which presets share a worker: those that would start the same one, and keep it alike. Law: PURE.

What a preset says of requests is told to a worker beside its command line, once for each name that it serves
(`Profile`). So presets of one model that differ in nothing else are one member of the fleet.
"""

import dataclasses
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from router.config.presets import DEFAULTS, KEYS, Preset, Scope
from worker.protocol.argv import Profile

Group = tuple[str, ...]
"""The ids of the presets that share a worker, as they are listed."""
BETWEEN = ","
"""Stands between names in the id of what they share; no name has it."""


_OWN = {key.field for key in KEYS if key.field and key.scope is not Scope.WORKER}
_NOBODYS: Mapping[str, Any] = {name: DEFAULTS[name] for name in _OWN} | {"sampling": {}}
"""What a member of the fleet has of all that is of one name alone."""
_EQUAL = tuple(
    field.name for field in dataclasses.fields(Preset) if field.name not in _OWN | {"id", "source", "origins"}
)
"""Fields that presets have in common which share a worker."""
_TABLES = [name for name in _EQUAL if isinstance(DEFAULTS[name], Mapping)]
_rest = attrgetter(*(name for name in _EQUAL if name not in _TABLES))


def share(presets: Mapping[str, Preset]) -> list[Group]:
    """All ids, those that share a worker together, each group where its first is listed."""
    groups: dict[Hashable, list[str]] = {}
    for id, preset in presets.items():
        tables = tuple(tuple(sorted(getattr(preset, name).items())) for name in _TABLES)
        groups.setdefault((_rest(preset), tables), []).append(id)
    return [tuple(group) for group in groups.values()]


def members(presets: Mapping[str, Preset], groups: Iterable[Group]) -> dict[str, Preset]:
    """What the fleet has of all presets, by id."""
    found = (member([presets[name] for name in group]) for group in groups)
    return {each.id: each for each in found}


def member(group: Sequence[Preset]) -> Preset:
    """What the fleet has of presets that share a worker: nothing in it is of one name alone."""
    first = group[0]
    further = [name for each in group for name in (each.id, *each.aliases)] if len(group) > 1 else first.aliases
    own: dict[str, Any] = {**_NOBODYS, "aliases": tuple(further)}
    if len(group) == 1 and all(getattr(first, name) == value for name, value in own.items()):
        return first  # as most are, and there may be a thousand
    return replace(first, id=id_of([each.id for each in group]), **own)


def id_of(names: Iterable[str]) -> str:
    """The id of what presets share: a preset's own where it shares nothing."""
    return BETWEEN.join(names)


def names_in(id: str) -> Group:
    """The names that an id is made of."""
    return tuple(id.split(BETWEEN))


def profile(preset: Preset) -> Profile | None:
    """What a worker is to be told of requests by this name; None: nothing."""
    found = Profile(
        name=preset.id,
        n_predict=preset.n_predict,
        seed=preset.seed,
        sampling=json.dumps(dict(preset.sampling)) if preset.sampling else "",
        chat_template=preset.chat_template,
        chat_template_kwargs=preset.chat_template_kwargs,
        default_adapter=preset.default_lora if preset.adapter_slots else "",
    )
    return found if found != Profile(name=preset.id) else None


__all__ = ["BETWEEN", "Group", "id_of", "member", "members", "names_in", "profile", "share"]
