"""The catalogue: models of the hub cache, the models folder and the preset file, read from disk and merged.

It uses no network and writes nothing. A snapshot counts only if it is complete: config.json and all its weight files,
without dangling links.
"""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from router.config import ini, precedence, resolve
from router.config.api_keys import ApiKey, configured_keys
from router.config.ini import Problem
from router.config.model_source import NOT_UTF8, FoundModel
from router.config.named_models import NamedModel, named_models
from router.config.option_types import nearest
from router.config.preset_keys import find, is_own
from router.config.presets import MODEL_REPO, Preset
from router.config.resolve import LoadedPresets
from router.config.settings import ALL, Settings, hub_cache
from router.errors import ConfigError
from worker.protocol.pickled_weights import PICKLED, PICKLED_INDEX
from worker.protocol.snapshot_files import (
    ADAPTER_FILES,
    IN_OLD_LAYOUT,
    INDEX,
    NO_GGUF,
    OLD_LAYOUT,
    WEIGHTS,
    shard_names,
    single_weights_in,
)


@dataclass(frozen=True, slots=True)
class AddedModels:
    """Models that calls have added to a running router, beside those of its files and folders."""

    found: tuple[FoundModel, ...] = ()  # models that are pulled from the hub; they may be incomplete
    sections: str = ""  # models that were registered by a call, as sections of a preset file


NONE_ADDED = AddedModels()
# Read presets, folders and caches again, or API keys and key files. The first returns problems, the second raises them.
LoadPresets = Callable[[AddedModels], LoadedPresets]
ReadKeys = Callable[[], tuple[ApiKey, ...]]


def load_catalogue(
    settings: Settings, model_flags: Mapping[str, str], environ: Mapping[str, str], added: AddedModels = NONE_ADDED
) -> LoadedPresets:
    """Return all models of a router. It may be called again at any time, for a reload.

    `model_flags`: preset keys of the command line. Nothing on disk raises an exception: what cannot be read is among
    the problems.
    """
    warnings: list[Problem] = []
    problems: list[Problem] = []
    found: list[FoundModel] = []
    if ALL in settings.model:
        environ = {"ROUTER_LOAD_ON_STARTUP": "on", **environ}
    if settings.models_dir:
        found, notes, fault = _models_dir(settings.models_dir)
        warnings += notes
        problems += [Problem("--models-dir", 0, "", "", f"{settings.models_dir}: {fault}")] if fault else []
    if settings.lists_cache:
        found += _cache(settings.hub_cache or hub_cache(environ))
    found += added.found
    path = Path(settings.models_preset) if settings.models_preset else None
    if settings.serves_demo:
        path = demo_preset()
    text, fault = _text(path) if path else ("", "")
    if path and path.is_dir():
        fault = "is a folder; give it as --models-dir, or name an INI file"
    file = settings.models_preset or (path.name if path else "")
    problems += [Problem(file, 0, "", "models-preset", fault)] if fault else []
    loaded = resolve.load(
        text,
        file=file,
        folder=str(path.absolute().parent) if path else "/",
        disk=LocalDisk(),
        found=found,
        named=named_models(settings),
        flags=model_flags,
        environ=environ,
        working=str(Path.cwd()),
        swap_patience=settings.swap_patience,
        strict=settings.strict_presets,
        strict_fields=settings.strict_fields,
        registered=added.sections,
    )
    problems += loaded.problems
    if not problems:
        problems += _default_model(settings.default_model, loaded)
    return LoadedPresets(
        {} if problems else loaded.presets, tuple(problems), (*warnings, *loaded.warnings), loaded.named
    )


def find_preset(
    name: str, loaded: LoadedPresets, model_flags: Mapping[str, str], environ: Mapping[str, str]
) -> tuple[Preset, tuple[Problem, ...]]:
    """Return the preset with this id or alias, else one for a folder, `demo:NAME` or `org/name`, and the warnings about
    it. Raises ConfigError.

    Flags for one model, such as `--revision`, make a preset of their own for a folder or repository.
    """
    own = next(filter(_is_own, model_flags), "")
    for preset in loaded.presets.values():
        if name == preset.id or name in preset.aliases:
            if not own:
                return preset, tuple(each for each in loaded.warnings if each.section in ("", preset.id))
            if preset.source == "preset":
                raise ConfigError(f"--{own} is for a folder or a repository; {name} is a preset: write {own} there")
    is_source = "/" in name or name.startswith("demo:") or (name and Path(name).exists())
    is_typo = nearest(name, [id for id, preset in loaded.presets.items() if preset.source != "cache"])
    if not is_source and (is_typo or not MODEL_REPO.fullmatch(name)):
        near = nearest(name, _names_of(loaded))
        hint = f"did you mean {near}?" if near else f"models are: {', '.join(loaded.presets) or 'none'}"
        raise ConfigError(f"{name!r} is no model, no folder and no repository (org/name); {hint}")
    folder = str(Path.cwd())
    alone = resolve.load(
        folder=folder, disk=LocalDisk(), named=[NamedModel("model", name, "")], flags=model_flags, environ=environ,
        working=folder,
    )  # fmt: skip
    if alone.problems:
        # The name has no file; a serving.properties in the folder has one.
        raise ConfigError(*(str(replace(each, section="")) if each.file else each.message for each in alone.problems))
    warnings = tuple(replace(each, section="") for each in alone.warnings)
    return replace(alone.presets[alone.named[0]], id=name), warnings


def for_all(model_flags: Mapping[str, str]) -> dict[str, str]:
    """The flags of keys without those for one model."""
    return {flag: text for flag, text in model_flags.items() if not _is_own(flag)}


def read_keys(settings: Settings) -> tuple[ApiKey, ...]:
    """Return the keys of flags and key files, read anew. Raises ConfigError."""
    texts: list[str] = []
    problems: list[str] = []
    for option, file in (("--api-key-file", settings.api_key_file), ("--admin-key-file", settings.admin_key_file)):
        text, fault = _secret_text(Path(file)) if file else ("", "")
        problems += [f"{option}: {file}: {fault}"] if fault else []
        texts.append(text)
    if problems:
        raise ConfigError(*problems)
    return configured_keys(settings, user_file=texts[0], admin_file=texts[1])


def folder_of(cache: str | Path, repo: str) -> Path:
    """Return the folder of `repo` (org/name) in a hub cache."""
    return Path(cache) / f"models--{repo.replace('/', '--')}"


def find_snapshot(repo: str, revision: str = "main", cache_dir: str = "", *, adapter: bool = False) -> str | None:
    """Return the folder of a complete snapshot of `repo` (`org/name`), or of an `adapter`, in the hub cache; None if
    there is none.

    `revision`: branch, tag or full commit. Without `cache_dir` the default of the hub library is used.
    """
    folder = folder_of(cache_dir or hub_cache(os.environ), repo)
    if ".." in revision.split("/") or revision.startswith("/"):
        return None
    reference = folder / "refs" / revision
    commit = _text(reference)[0].strip() if reference.is_file() else revision
    snapshot = folder / "snapshots" / commit
    is_one = re.fullmatch(r"[0-9A-Za-z]{1,64}", commit) and snapshot.is_dir()
    lacks = missing_adapter if adapter else missing
    return str(snapshot.absolute()) if is_one and not lacks(snapshot) else None


def missing_adapter(folder: Path) -> str:
    """Return the name of the file that the folder of an adapter lacks; empty if it is complete."""
    return next((name for name in ADAPTER_FILES if not os.path.isfile(folder / name)), "")


def missing(folder: Path) -> str:
    """Return what a snapshot lacks, as text for a message; empty if it is complete."""
    # Not Path.is_file, which raises where a folder may not be entered.
    if not os.path.isfile(folder / "config.json"):
        return "config.json"
    for index, single in ((INDEX, single_weights_in(folder).name), (PICKLED_INDEX, PICKLED)):
        if os.path.isfile(folder / index):
            return _missing_shard(folder, index)
        if os.path.isfile(folder / single):
            return ""
    # Weights of further names are not loaded, such as consolidated.safetensors and adapter_model.safetensors.
    return WEIGHTS


def _missing_shard(folder: Path, index: str) -> str:
    """Return a file of the index that is not in the folder; empty if all are."""
    try:
        names = shard_names((folder / index).read_bytes())
    except (OSError, ValueError):
        return f"a readable {index}"
    return next((name for name in names if not os.path.isfile(folder / name)), "")


def demo_preset() -> Path:
    """Return the preset file of the built-in models: in the wheel, or in the checkout beside the package."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "data" / "demo.ini"
    return installed if installed.is_file() else package.parent / "config" / "demo.ini"


# Contents of pipes without a name, as in `--api-key-file <(command)`, by device and inode. They come once: reads
# for further models and reloads would find nothing. The writer of a named pipe may write new keys for each read.
_pipes: dict[tuple[int, int], bytes] = {}


class LocalDisk:
    """The files of this machine, for the preset resolution."""

    def kind(self, path: str) -> Literal["", "file", "folder", "snapshot", "lmi", "adapter", "gguf"]:
        if os.path.isfile(path):
            return "file"
        if not os.path.isdir(path):
            return ""
        if os.path.isfile(os.path.join(path, "config.json")):
            return "snapshot"
        if os.path.isfile(os.path.join(path, "serving.properties")):
            return "lmi"
        if os.path.isfile(os.path.join(path, "adapter_config.json")):
            return "adapter"
        return "gguf" if any(_is_gguf(Path(name)) for name in _names(path, quiet=True)) else "folder"

    def read(self, path: str) -> str:
        facts = os.stat(path)
        is_unnamed = stat.S_ISFIFO(facts.st_mode) and not os.path.exists(os.path.realpath(path))  # /proc/1/fd/pipe:[2]
        pipe = (facts.st_dev, facts.st_ino) if is_unnamed else None
        content = _pipes.get(pipe) if pipe else None
        if content is None:
            with open(path, "rb") as file:
                content = file.read(ini.MAX_PRESET_BYTES + 1)
        if len(content) > ini.MAX_PRESET_BYTES:
            raise OSError(errno.EFBIG, f"is larger than {ini.MAX_PRESET_BYTES >> 20} MiB")
        if pipe is not None:
            _pipes[pipe] = content
        return content.decode()

    def folders(self, path: str) -> list[str]:
        return [name for name in _names(path, quiet=True) if os.path.isdir(os.path.join(path, name))]


def _text(path: Path) -> tuple[str, str]:
    """Return the text of a file, or the problem with it."""
    try:
        return LocalDisk().read(str(path)), ""
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        return "", f"is not UTF-8 text: byte {error.start}, in line {line}; save it as UTF-8"
    except OSError as error:
        return "", precedence.unreadable(error)


def _secret_text(path: Path) -> tuple[str, str]:
    with contextlib.suppress(OSError):  # which reading the text reports
        mode = path.stat().st_mode
        if stat.S_IMODE(mode) & 0o077 and not stat.S_ISDIR(mode):
            return "", f"other users may read it; chmod 600 {path}"
    return _text(path)


def _models_dir(folder: str) -> tuple[list[FoundModel], list[Problem], str]:
    """Return the models of a folder, warnings about entries that are no models, and the problem with the folder
    itself."""
    try:
        names = _names(folder)
    except NotADirectoryError:
        return [], [], "is a file; give it as --models-preset, or name a folder of models"
    except OSError as error:
        return [], [], (error.strerror or "cannot be read").lower()
    found: list[FoundModel] = []
    notes: list[Problem] = []
    for id, path in _candidates(Path(folder).absolute(), names):
        fault = _unusable(id, path)
        if fault:
            notes.append(Problem(str(path), 0, "", "models-dir", f"is not listed: {fault}"))
        elif os.path.isdir(path):
            found.append(FoundModel(id, "models_dir", path=str(path)))
    return found, notes, ""


def _candidates(folder: Path, names: list[str]) -> Iterator[tuple[str, Path]]:
    """Yield (id, path) of the entries of the folder, and of subfolders that are no models but may contain some
    (org/name). A folder that is a model itself, as LMI's model store may be, is the only one."""
    if LocalDisk().kind(str(folder)) in ("snapshot", "lmi"):
        yield folder.name, folder
        return
    for name in names:
        path = folder / name
        # Not Path.is_dir, which raises for a link into a folder that may not be entered.
        if not os.path.isdir(path) or _is_model(path):
            yield name, path
            continue
        if os.path.samefile(path, folder):  # a link back, whose models are listed already
            continue
        for inner in _names(str(path), quiet=True):
            if not os.path.isdir(path / inner) or _is_model(path / inner):
                yield f"{name}/{inner}", path / inner


def _unusable(id: str, path: Path) -> str:
    """Return the reason for which an entry of --models-dir is no model; empty if it is one, or clearly something
    else."""
    if not os.path.isdir(path):
        if _is_gguf(path):
            return NO_GGUF
        try:
            os.stat(path)
        except FileNotFoundError:
            return "it is a link to nothing"
        except OSError as error:
            return f"it cannot be read ({error.strerror})"
        return ""
    if not ini.is_utf8(str(path)):
        return f"it {NOT_UTF8}"
    is_snapshot = os.path.isfile(path / "config.json")
    if not is_snapshot and _is_in_old_layout(path):
        return IN_OLD_LAYOUT
    if not is_snapshot and not os.path.isfile(path / "serving.properties"):
        return f"it has GGUF files: {NO_GGUF}; write a section with model = a safetensors folder"
    if not ini.is_name(id):
        return "its name cannot be a model's; use letters, digits and ._:@+-"
    lacks = missing(path) if is_snapshot else ""
    return f"it is not complete, {lacks} is missing" if lacks else ""


def _is_model(path: Path) -> bool:
    """Return whether a folder is meant to be a model, of any format."""
    return LocalDisk().kind(str(path)) in ("snapshot", "lmi", "gguf") or _is_in_old_layout(path)


def _is_in_old_layout(path: Path) -> bool:
    return os.path.isfile(path / OLD_LAYOUT / "config.json")


def _is_gguf(path: Path) -> bool:
    return path.name.lower().endswith(".gguf")


def _names(folder: str, *, quiet: bool = False) -> list[str]:
    """Return the visible entries in order. Raises OSError unless `quiet`."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError:
        if quiet:
            return []
        raise


def _cache(folder: str) -> list[FoundModel]:
    """Return the named revisions in the hub cache with a complete snapshot. Of a repository without names, any complete
    snapshot."""
    found: list[FoundModel] = []
    for name in _names(folder, quiet=True):
        kind, _, rest = name.partition("--")
        repo = rest.replace("--", "/")
        if kind == "models" and ini.is_name(repo):
            found += _cached(Path(folder) / name, repo, folder)
    return found


def reference_files(folder: Path) -> list[Path]:
    """Return the files in `refs` of a repository's folder. A name that begins with a dot is no revision: a killed
    download leaves such a file."""
    return [path for path in (folder / "refs").rglob("*") if path.is_file() and not path.name.startswith(".")]


def _cached(folder: Path, repo: str, cache: str) -> list[FoundModel]:
    refs = sorted(str(path.relative_to(folder / "refs")) for path in reference_files(folder))
    named = [revision for revision in refs if find_snapshot(repo, revision, cache)]
    if not named:
        commits = _names(str(folder / "snapshots"), quiet=True)
        commit = next((commit for commit in commits if find_snapshot(repo, commit, cache)), "")
        return [FoundModel(repo, "cache", repo=repo, revision=commit)] if commit else []
    found = [FoundModel(hub_id(repo, revision), "cache", repo=repo, revision=revision) for revision in named]
    return [entry for entry in found if ini.is_name(entry.id)]


def hub_id(repo: str, revision: str) -> str:
    """Return the id of a cached revision that no preset names."""
    return repo if revision == "main" else f"{repo}:{revision}"


def _default_model(name: str, loaded: LoadedPresets) -> list[Problem]:
    names = _names_of(loaded)
    if not name or name in names:
        return []
    message = f'there is no model "{name}"'
    return [Problem("--default-model", 0, "", "default-model", message, nearest(name, names))]


def _is_own(flag: str) -> bool:
    """True if the flag of a key is for one model."""
    spelling = find(flag)
    return spelling is not None and is_own(spelling.canonical)


def _names_of(loaded: LoadedPresets) -> set[str]:
    return {name for preset in loaded.presets.values() for name in (preset.id, *preset.aliases)}
