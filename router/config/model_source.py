"""The place of a model's files, from the keys that name it and from the models on disk. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from router.config import preset_keys
from router.config.ini import Problem, is_utf8
from router.config.option_types import nearest, shown
from router.config.precedence import OWN, Layer, Setting, SettingReader
from router.config.presets import GGUF, MODEL_REPO, REPO, hub_name, repository
from worker.protocol.snapshot_files import IN_OLD_LAYOUT, NO_GGUF, OLD_LAYOUT

_NO_SNAPSHOT = {
    "lmi": "has a serving.properties without option.model_id, and no config.json",
    "adapter": "is an adapter, which needs the model that it was made for (adapter_config.json names it)",
    "gguf": f"has GGUF files: {NO_GGUF}",
}

NOT_UTF8 = "has a path that is not UTF-8, which no JSON can contain; rename the folder"

_REMEDY = "name a folder with config.json and safetensors files"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model on disk that no section names."""

    id: str
    source: Literal["models_dir", "cache"]
    path: str = ""
    repo: str = ""
    revision: str = "main"


def resolve_source(
    id: str,
    settings: Layer,
    found: Sequence[FoundModel],
    place: Problem,
    reader: SettingReader,
    sections: Sequence[str],
) -> dict[str, Any] | None:
    """The fields for the location of the model's files; None, with a problem, if they cannot be determined."""
    fail = reader.collector.fail
    model, repo, revision = (settings.get(name) for name in ("model", "hf-repo", "revision"))
    if model and repo:
        fail(repo.place, f"hf-repo and model (line {model.place.line}) both name a source; remove one")
        return None
    named = model or repo
    entry = next((entry for entry in found if entry.id.casefold() == id.casefold()), None)
    fields: dict[str, Any] | None
    if named is None and {(id, "model"), (id, "hf-repo")} & reader.collector.faulty:
        return None
    if named is None and entry is None and ":" in id and REPO.fullmatch(id):  # as `router org/name:revision`
        named = repo = Setting(id, OWN, place, "hf-repo")
    if named is not None:
        others = {entry.id: entry.path for entry in found if entry.source == "models_dir"}
        others |= {name: name for name in sections}
        fields = _parse(named, reader, others, is_repo=named is repo)
    elif entry is None:
        fail(place, "names no model; add model = a folder or org/name, or hf-repo = org/name")
        return None
    else:
        if reader.disk.kind(entry.path) == "lmi" and not place.line:
            reader.collector.warn(
                replace(place, file=entry.path, section=""), f"is not listed: it {_NO_SNAPSHOT['lmi']}"
            )
            return None
        source = "preset" if place.line else entry.source
        fields = {"source": source, "path": entry.path, "repo": entry.repo, "revision": entry.revision}
    if fields is None or revision is None:
        return fields
    if not fields.get("repo"):
        fail(revision.place, "revision belongs to a repository of the hub, and this model is none; remove it")
    elif named is not None and ":" in named.value:
        where = f"line {named.place.line}" if named.place.line else named.place.file
        fail(revision.place, f"a revision stands in {where} already; remove one of the two")
    return {**fields, "revision": revision.value}


def _parse(
    setting: Setting, reader: SettingReader, others: Mapping[str, str], *, is_repo: bool
) -> dict[str, Any] | None:
    """The path, repository or built-in model that a value of `model` or `hf-repo` means.

    `others`: the sections and the models of --models-dir, which a name on the command line may be a typo of, and their
    right names.
    """
    fail = reader.collector.fail
    text, place = hub_name(setting.value), setting.place
    is_repo = is_repo or text != setting.value
    if text.startswith("demo:") and not is_repo:
        if text[5:] in preset_keys.DEMOS:
            return {"demo": text[5:]}
        near = nearest(text[5:], preset_keys.DEMOS)
        known = ", ".join(preset_keys.DEMOS)
        fail(place, f"{shown(text)} is no built-in model; there are {known}", f"demo:{near}" if near else "")
        return None
    if not text:
        fail(place, f"{place.key or setting.name}: the value is empty; write a folder or org/name")
        return None
    if "://" in text:
        fail(place, f"{shown(text)} is a URL; download the model and name its folder, or use hf-repo")
        return None
    path = "" if is_repo else reader.path(text, place)
    kind = reader.disk.kind(path) if path else ""
    if text.lower().endswith(".gguf") or (kind and not is_repo and kind == "file"):
        presets = "give presets as --models-preset, or " if text.endswith(".ini") else ""
        fail(place, GGUF if text.lower().endswith(".gguf") else f"{path} is a file; {presets}name the model's folder")
        return None
    if kind == "snapshot" and is_utf8(path):
        return {"path": path}
    if kind == "snapshot":
        fail(place, f"{path} {NOT_UTF8}")
        return None
    if kind:
        what = _NO_SNAPSHOT.get(kind, "has no config.json")
        remedy = "name that model, and the adapter as lora" if kind == "adapter" else _REMEDY
        remedy = IN_OLD_LAYOUT if OLD_LAYOUT in reader.disk.folders(path) else remedy
        fail(place, f"{path} {what}; {remedy}")
        return None
    form = REPO if text.endswith("/") and not is_repo else MODEL_REPO  # `gpt2/` is a folder
    text = text.rstrip("/")  # LMI's documents have a repository with a slash at its end
    near = "" if place.line else others.get(nearest(text, others), "")
    if form.fullmatch(text) is None or (near and not is_repo and "/" not in text):
        where = f" ({path})" if path != text else ""
        fail(place, f"{shown(text)} is {f'neither a folder{where} nor' if path else 'not'} org/name", near)
        return None
    try:
        repo, revision = repository(text)
    except ValueError as error:
        fail(place, str(error))
        return None
    return {"repo": repo, "revision": revision}
