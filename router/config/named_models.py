"""Models named at start: `router org/name`, `router -m DIR`, `router -hf org/name:revision`.

Each becomes a section like those of a preset file, with `load-on-startup = on`. A name of a section of the file means
that section. Pure functions.
"""

import posixpath
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from router.config import ini
from router.config.precedence import DiskReader
from router.config.presets import hub_name
from router.config.settings import ALL, BY_FLAG, Settings, lmi_model

_REPO_FOLDER = re.compile(r"models--(.+)")  # of a repository in the hub cache, above snapshots/COMMIT
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._:@+-]+")


@dataclass(frozen=True, slots=True)
class NamedModel:
    """One model as the user wrote it."""

    key: str  # `model`, or `hf-repo` for a repository that must not be read as a folder
    text: str
    origin: str  # the flag or variable
    names: tuple[str, ...] = ()  # further names, from --model-names or LMI's load_models


def named_models(settings: Settings) -> tuple[NamedModel, ...]:
    """The models that flags and variables name."""
    of_lmi = [lmi_model(text)[0] for text in settings.model]
    named, used = list[NamedModel](), {names[0] for names in of_lmi if len(names) == 1}
    for key in ("model", "hf-repo"):
        for text in getattr(settings, BY_FLAG[key].field):
            if text == ALL:
                continue  # see `load_catalogue`
            names, source = lmi_model(text) if key == "model" else ((), text)
            if names[1:] and names[0] in used:
                names = names[1:]  # the name alone is that of the model without a version, else of the first
            used.update(names)
            bare = source.rstrip("/")
            source = bare if "/" in bare else source  # org/name/ of LMI's documents is org/name, and gpt2/ is a folder
            model = hub_name(source)
            kind = key if model == source else "hf-repo"
            named.append(NamedModel(kind, model, settings.origins.get(key, f"--{key}"), names))
    if settings.model_names:
        pairs = zip(named, settings.model_names, strict=True)
        named = [replace(model, names=(*names, *model.names)) for model, names in pairs]
    return tuple(named)


def sections(
    named: Sequence[NamedModel], present: Collection[str], *, working: str, disk: DiskReader
) -> tuple[dict[str, ini.Section], tuple[ini.Section, ...]]:
    """Return the sections of the models named at start: additions to sections of the file, by name, and one new section
    for each other model.

    `present`: names of the sections of the file. The ids of new sections differ from them and from each other, without
    regard to case.
    """
    named = _distinct(named, working, disk)
    used, chosen, added = {name.casefold() for name in present}, dict[str, ini.Section](), list[ini.Section]()
    for model in named:
        entries = [ini.Entry("load-on-startup", "on", 0)]
        if model.names:
            entries.append(ini.Entry("model-names", ",".join(model.names), 0))
        if model.key == "model" and model.text in present:
            chosen[model.text] = ini.Section(model.text, 0, tuple(entries), file=model.origin)
            continue
        # Not the name of another model either: [a]=/models/b,[b]=/models/a
        others = {name.casefold() for other in named if other is not model for name in other.names}
        id = next(id for id in _ids(model, working, disk) if id.casefold() not in used | others)
        used.add(id.casefold())
        entries = [ini.Entry(model.key, model.text, 0), *entries]
        added.append(ini.Section(id, 0, tuple(entries), file=model.origin))
    return chosen, tuple(added)


def _distinct(named: Sequence[NamedModel], working: str, disk: DiskReader) -> list[NamedModel]:
    """The models, each once, with all its further names: `-m X -m ./X` names one folder twice."""
    found: dict[str, NamedModel] = {}
    for model in named:
        path = posixpath.normpath(posixpath.join(working, model.text))
        source = path if model.key == "model" and disk.kind(path) else model.text
        before = found.get(source)
        found[source] = replace(before, names=(*before.names, *model.names)) if before else model
    return list(found.values())


def _ids(model: NamedModel, working: str, disk: DiskReader) -> Iterator[str]:
    """Ids for a model, the preferred one first: `org/name`, or the name of the folder, or with the folder above it."""
    path = posixpath.normpath(posixpath.join(working, model.text))
    if model.text.startswith("demo:"):
        ids = [model.text.replace(":", "-")]
    elif ini.is_name(model.text) and (model.key == "hf-repo" or not disk.kind(path)):
        ids = [model.text]
    else:
        parts = path.split("/")
        cached = _REPO_FOLDER.fullmatch(parts[-3]) if len(parts) > 3 and parts[-2] == "snapshots" else None
        names = [_cleaned(part) for part in ([cached[1].replace("--", "/")] if cached else parts[-2:])]
        ids = [names[-1] or "model", "/".join(filter(None, names))]
    yield from ids
    number = 2
    while True:
        yield f"{ids[0]}-{number}"
        number += 1


def _cleaned(name: str) -> str:
    """A folder's name as (part of) a model's name."""
    return "/".join(_NOT_IN_NAMES.sub("-", part).lstrip("._:@+-")[:90] for part in name.split("/"))
