"""Resolution of presets: from the sections of a file, flags, variables and the models on disk to `Preset` objects.

Also rejects settings that contradict each other. Pure functions; the disk is read through `DiskReader`.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click

from router.config import ini, named_models, preset_keys, serving_properties
from router.config.adapters import resolve_adapters
from router.config.chat_templates import FALLBACKS, jinja
from router.config.ini import Problem
from router.config.model_source import FoundModel, resolve_source
from router.config.named_models import NamedModel
from router.config.option_types import nearest, plain, shown
from router.config.precedence import OWN, PROPERTIES, STAR, DiskReader, Layer, Setting, SettingReader, unreadable
from router.config.presets import ALL_DEVICES, ALL_LAYERS, DEFAULT_CHUNK, Preset, hub_name

SOURCES = {"model", "hf-repo"}  # keys that name the model
_IS_NO_PATH = re.compile("demo:|[A-Za-z0-9+]+://")  # at the start of a value of `model`
_DOWNLOADED = re.compile("/models--[^/]+/snapshots/")  # in the path of a folder of the hub cache
REGISTERED = "registered"  # file name in problems and origins of models that an API call has registered
# Values of RoPE keys that change nothing: llama-server's and EricLLM's defaults. Of keys not listed: 0 and -1.
_NEUTRAL_ROPE: Mapping[str, tuple[float | str, ...]] = {
    "rope-scaling": ("",), "rope-scale": (1,), "rope-freq-scale": (0, 1), "alpha-value": (1,),
    "yarn-attn-factor": (0, -1, 1), "yarn-beta-slow": (0, -1, 1), "yarn-beta-fast": (0, -1, 32),
}  # fmt: skip
_DRAFT_MODEL = "draft-simple"  # of spec-type: the model of model-draft, which drafts here wherever it is named
_NO_DRAFTS = "nothing drafts tokens; write model-draft, or spec-type = ngram-simple"
_NO_ADAPTERS = "adapters are not enabled; write lora, or enable-lora = on"
# Keys of a feature: when a preset uses it, and otherwise the reason for which the key has no effect.
_PARTS: Mapping[str, tuple[Callable[[Preset], object], str]] = {
    **dict.fromkeys(("draft-max", "draft-min"), (lambda it: it.model_draft or it.spec_type != "none", _NO_DRAFTS)),
    "spec-ngram-size-n": (lambda it: it.spec_type != "none", "write spec-type = ngram-simple"),
    **dict.fromkeys(("max-loras", "max-lora-rank", "max-cpu-loras"), (lambda it: it.adapter_slots, _NO_ADAPTERS)),
}


@dataclass(frozen=True, slots=True)
class LoadedPresets:
    """All presets by id; empty if there are problems."""

    presets: dict[str, Preset]
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()
    named: tuple[str, ...] = ()  # ids of the models named at start


def load(
    text: str = "",
    *,
    file: str = "",
    folder: str = "/",
    disk: DiskReader,
    found: Sequence[FoundModel] = (),
    named: Sequence[NamedModel] = (),
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    working: str = "/",
    swap_patience: float = 10.0,
    strict: bool = False,
    strict_fields: bool = False,
    registered: str = "",
) -> LoadedPresets:
    """Resolve the presets of a file, with flags by key, the environment, the models named at start, and the models
    found on disk.

    Flags take precedence over `[id]`, then come `[*]`, the environment, and the defaults. Flags and variables of keys
    that are for one model (`alias`) apply to the model named at start if there is one alone. Relative paths in the file
    start at `folder`, those in flags and variables at `working`. `registered` contains the sections of models that API
    calls have registered. A section of the file with the same name takes precedence over them.
    """
    reader = SettingReader(file=file, folder=folder, disk=disk, environ=environ or {}, working=working, strict=strict)
    resolution = _Resolution(reader, file, swap_patience=swap_patience, strict_fields=strict_fields)
    document = _joined(ini.parse(text, file=file, environ=environ), registered)
    names = [section.name for section in document.sections]
    chosen, added = named_models.sections(named, names, working=working, disk=disk)
    return resolution.load(document, chosen, added, found, flags or {})


def _joined(document: ini.Document, registered: str) -> ini.Document:
    """The document with those sections of `registered` whose names it does not have."""
    if not registered:
        return document
    names = {section.name.casefold() for section in document.sections}
    further = ini.parse(registered, file=REGISTERED)
    added = [replace(section, file=REGISTERED) for section in further.sections if section.name.casefold() not in names]
    return replace(document, sections=(*document.sections, *added), problems=(*document.problems, *further.problems))


class _Resolution:
    """One resolution of all presets. Problems are collected, so that the user sees all of them at once."""

    def __init__(self, reader: SettingReader, file: str, *, swap_patience: float, strict_fields: bool):
        self._reader, self._collector, self._disk = reader, reader.collector, reader.disk
        self._fail, self._warn = reader.collector.fail, reader.collector.warn
        self._file = file
        self._sections: list[str] = []  # names in the file
        self._swap_patience, self._strict_fields = swap_patience, strict_fields
        self._used_parts: set[Problem] = set()  # places of keys of features that a model uses
        self._unused_parts: dict[Problem, tuple[str, str]] = {}  # of others: the key, and the reason

    def load(
        self,
        document: ini.Document,
        chosen: Mapping[str, ini.Section],
        added: Sequence[ini.Section],
        found: Sequence[FoundModel],
        flags: Mapping[str, str],
    ) -> LoadedPresets:
        self._collector.problems |= dict.fromkeys(document.problems)
        self._sections = [section.name for section in document.sections]
        named = (*chosen, *(section.name for section in added))
        variables, own_variables = _own_apart(self._reader.environment(named=len(named)))
        options, own_options = _own_apart(self._reader.flags(flags, named=len(named)))
        star: Layer = {}
        for section in document.sections:
            if section.name == "*":
                star |= self._reader.section(section, STAR)
        general = variables | star
        known = {name.casefold() for name in (*self._sections, *named)}
        presets: dict[str, Preset] = {}
        layers: dict[str, Layer] = {}
        for section in (*added, *document.sections):
            if section.name == "*":
                continue
            own = self._reader.section(section, OWN)
            if section.name in chosen:
                own |= self._reader.section(chosen[section.name], OWN)
            if section.name in named:
                settings = self._layered(section.name, own_variables | general, own, options | own_options, found)
            else:
                settings = self._layered(section.name, general, own, options, found)
            preset = self._preset(section, settings, found)
            if preset is not None:
                if section in added and preset.aliases and preset.aliases[0].casefold() not in known:
                    # Lists show the first alias, as llama-server, vLLM and FastChat do. The other name stays valid.
                    preset = replace(preset, id=preset.aliases[0], aliases=(*preset.aliases[1:], preset.id))
                    named = tuple(preset.id if name == section.name else name for name in named)
                    known.add(preset.id.casefold())
                presets[preset.id], layers[preset.id] = preset, settings
        self._check_aliases(presets, layers)
        presets |= _short_names(presets, [section.name for section in added])
        for entry in self._unconfigured(found, presets):
            preset = self._listed(entry, general, options)
            if preset is not None:
                presets[preset.id] = preset
        self._check_prefetch(presets, layers)
        self._warn_of_unused_parts()
        self._reader.finish()
        problems, warnings = tuple(self._collector.problems), tuple(self._collector.warnings)
        return LoadedPresets({} if problems else presets, problems, warnings, named)

    def _listed(self, entry: FoundModel, general: Layer, options: Layer) -> Preset | None:
        """The preset of a model on disk without a section; None, with a warning, if its serving.properties is invalid.

        Such a file may have come with the model. It does not stop the start of the others.
        """
        file, before = f"{entry.path}/{serving_properties.FILE}", len(self._collector.problems)
        settings = self._layered(entry.id, general, {}, options, [entry])
        if not self._reader.strict and self._collector.demote(file, before):
            return None
        preset = self._preset(ini.Section(entry.id, 0), settings, [entry])
        return None if not self._reader.strict and self._collector.demote(file, before) else preset

    def _layered(self, id: str, general: Layer, own: Layer, options: Layer, found: Sequence[FoundModel]) -> Layer:
        """All settings of a model. A serving.properties is weaker than the section that uses it, stronger than [*].

        It stands in the model's folder, or `import` names it or its folder. `general`: settings of all models from
        variables and [*]; `own`: those of the model's section; `options`: those of the command line.
        """
        settings = general | own | options
        imported, model = settings.get("import"), settings.get("model")
        folder = ""
        if imported is not None:
            folder = imported.value.removesuffix(f"/{serving_properties.FILE}")
        elif model is not None and model.value and not _IS_NO_PATH.match(model.value):
            folder = self._reader.path(model.value, model.place)
        elif model is None and "hf-repo" not in settings:
            folder = next((entry.path for entry in found if entry.id.casefold() == id.casefold()), "")
        file = f"{folder}/{serving_properties.FILE}" if folder else ""
        if file and imported is None and _DOWNLOADED.search(folder):
            if self._disk.kind(file) == "file":  # Its author decides nothing on this machine.
                message = "is not read, because it was downloaded; write import = its folder into a section to read it"
                self._warn(Problem(file, 0, id, "", ""), message)
            return settings
        if not file or self._disk.kind(file) != "file":
            if imported is not None:
                self._fail(imported.place, f"import: no file {file}")
                self._collector.faulty.add((id, "model"))
            return settings
        lmi = self._reader.properties(file, id)
        if imported is not None and SOURCES & {*own}:
            lmi = {name: setting for name, setting in lmi.items() if name not in SOURCES}
        elif SOURCES & {*lmi}:
            own = {name: setting for name, setting in own.items() if name not in SOURCES}
        elif imported is not None:
            lmi["model"] = Setting(folder, PROPERTIES, imported.place, "model")
        if imported is None and self._disk.kind(folder) == "snapshot":
            self._distrust(lmi, settings)
        return general | lmi | own | options

    def _distrust(self, lmi: Layer, others: Layer) -> None:
        """Drop trust-remote-code from a serving.properties that may have come with the model."""
        trust = lmi.pop("trust-remote-code", None)
        allowed = others.get("trust-remote-code")
        if trust is None or not trust.value or (allowed is not None and (allowed.value or allowed.level > PROPERTIES)):
            return
        message = "the author of the model cannot allow its code; give --trust-remote-code or"
        remedy = "HF_MODEL_TRUST_REMOTE_CODE=true, or write import = this folder into a section"
        self._fail(trust.place, f"{trust.place.key}: {message} {remedy}")

    def _preset(self, section: ini.Section, settings: Layer, found: Sequence[FoundModel]) -> Preset | None:
        place = Problem(section.file or self._file, section.line, section.name, "", "")
        fields = resolve_source(section.name, settings, found, place, self._reader, self._sections)
        if fields is None:
            return None
        fields |= self._fields(settings)
        self._drop_own_tokenizer(settings, fields)
        fields["rope"] = self._rope(settings, fields["rope"])
        fields["caps_ctx"] = "ctx-size" in settings and settings["ctx-size"].level != OWN
        device = settings.get("device")
        fields["expects_accelerator"] = device is not None and device.text in ("cuda", "gpu")
        self._drop_draft(settings, fields)
        self._place(settings, fields)
        self._drop_unused_on_cpu(settings, fields)
        self._choose_by_device(settings, fields)
        self._chunk(settings, fields)
        self._replicas(settings, fields)
        self._texts(settings, fields)
        resolve_adapters(settings, fields, self._reader)
        origins = {name: setting.origin for name, setting in settings.items()}
        if "replicas" in fields and "replicas" not in origins:
            origins["replicas"] = origins.get("min-workers") or origins["max-workers"]
        # They may be equal, as EricLLM's defaults are: a prompt must leave room for a token anyway.
        if 0 < fields.get("ctx_size", 0) < fields.get("max_input_tokens", 0):
            self._fail(settings["max-input-tokens"].place, "max-input-tokens must not be more than ctx-size")
        if fields.get("min_residency", -1.0) > self._swap_patience:
            message = f"min-residency must not be more than --swap-patience, {plain(self._swap_patience)} s"
            self._fail(settings["min-residency"].place, message)
        aliases = tuple(alias for alias in fields.pop("aliases", ()) if alias != section.name)
        preset = Preset(
            id=section.name, aliases=aliases, strict_fields=self._strict_fields, origins=origins, **fields
        )  # fmt: skip
        for name, (is_used, why) in _PARTS.items():
            setting = settings.get(name)
            if setting is not None and is_used(preset):
                self._used_parts.add(setting.place)
            elif setting is not None and setting.value:  # 0 is none, as without the feature
                self._unused_parts[setting.place] = (name, why)
        setting = settings.get("spec-type")
        if setting is not None and setting.value == "none" and _DRAFT_MODEL in setting.text:
            if preset.model_draft:
                self._used_parts.add(setting.place)
            else:
                self._unused_parts[setting.place] = ("spec-type", _NO_DRAFTS)
        return preset

    def _warn_of_unused_parts(self) -> None:
        """Warn about keys of features that no model with the key uses. A key in [*] may be for one model of several."""
        for place, (name, why) in self._unused_parts.items():
            if place not in self._used_parts:
                message = f"has no effect: {why}"
                self._reader.have_no_effect(name, place, f"{place.key} {message}" if place.line else message)

    def _fields(self, settings: Layer) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        mappings: dict[str, dict[str, Any]] = {"sampling": {}, "rope": {}}
        variables: dict[str, str] = {}
        for name, setting in settings.items():
            if name.startswith("env."):
                variables[name[4:]] = setting.value
                continue
            if name.startswith((preset_keys.MAIN_GPU, *preset_keys.DEVICE_PREFIXES)):
                continue  # see `_apply_main_gpu` and `_choose_by_device`
            key = preset_keys.BY_NAME[name]
            if key.item:
                mappings[key.field][key.item] = setting.value
            elif key.field and key.name != "revision":
                fields[key.field] = setting.value
        return fields | mappings | {"env": variables}

    def _rope(self, settings: Layer, rope: Mapping[str, Any]) -> dict[str, Any]:
        """The RoPE keys that change something, with one name for each meaning."""
        found = {name: value for name, value in rope.items() if value not in _NEUTRAL_ROPE.get(name, (0, -1))}
        if (shrink := found.pop("rope-freq-scale", None)) is not None:
            scale = found.setdefault("rope-scale", 1 / shrink)
            settings.setdefault("rope-scale", settings["rope-freq-scale"])
            if abs(scale * shrink - 1) > 1e-6:
                message = f"rope-freq-scale is 1 / rope-scale, which is {plain(scale)}; remove one of the two"
                self._fail(settings["rope-freq-scale"].place, message)
        extrapolation = found.pop("yarn-ext-factor", rope.get("yarn-ext-factor", -1))
        if extrapolation not in (-1, 0, 1):
            message = "yarn-ext-factor: only 1, 0 and -1 are supported; write rope-scaling = yarn, or linear"
            self._fail(settings["yarn-ext-factor"].place, message)
        kind = found.get("rope-scaling", "yarn")
        if extrapolation == 1 or (extrapolation == 0 and kind == "yarn"):
            # without extrapolation YaRN is linear (ggml, rope_yarn)
            found["rope-scaling"] = "yarn" if extrapolation else "linear"
            settings["rope-scaling"] = settings["yarn-ext-factor"]
        return found

    def _drop_own_tokenizer(self, settings: Layer, fields: dict[str, Any]) -> None:
        """Remove a tokenizer that is the repository of the model itself, and reject other repositories."""
        text = fields.get("tokenizer", "")
        if not text:
            return
        place = settings["tokenizer"].place
        path = self._reader.path(text, place)
        if self._disk.kind(path) in {"folder", "snapshot"}:
            return
        repo = fields.get("repo")
        if repo and hub_name(text).rstrip("/") in (repo, f"{repo}:{fields['revision']}"):
            fields["tokenizer"] = ""
            return
        message = f"no folder {path}, and not the model's own repository; download the tokenizer and write its folder"
        self._fail(place, f"{place.key}: {message}" if place.line else message)

    def _drop_draft(self, settings: Layer, fields: dict[str, Any]) -> None:
        """Remove the draft model of a model with spec-type = none."""
        kind, draft = settings.get("spec-type"), settings.get("model-draft")
        if kind is None or draft is None or kind.text != "none" or kind.level < draft.level or not draft.value:
            return
        fields["model_draft"] = ""
        self._unused_parts[draft.place] = ("model-draft", "spec-type = none turns it off; remove one of the two")

    def _place(self, settings: Layer, fields: dict[str, Any]) -> None:
        """Apply main-gpu and n-gpu-layers, and reject contradictions between the keys of placement."""
        self._apply_main_gpu(settings, fields)
        self._apply_gpu_layers(settings, fields)
        shares = [share for share in fields.get("tensor_split", ()) if share]
        self._check_tensor_parallel(settings, fields, shares)
        count = len(shares) or fields.get("pipeline_parallel", 1)
        if count == 1:
            return
        place = settings["tensor-split" if shares else "pipeline-parallel"].place
        if shares and fields.get("pipeline_parallel", 1) not in (1, ALL_DEVICES, count):
            self._fail(place, f"tensor-split is for {count} devices, pipeline-parallel for another number; remove one")
        if shares and fields.get("gpu_split"):
            self._fail(place, "tensor-split and gpu-split both set the placement; remove one")
        if fields.get("split_mode") == "none":
            self._fail(place, "split-mode = none forbids what this asks for; remove one of the two")
        if fields.get("device") == ("cpu",):
            self._fail(place, "needs accelerators, and device is cpu; remove one of the two")

    def _drop_unused_on_cpu(self, settings: Layer, fields: dict[str, Any]) -> None:
        """Remove keys for accelerators from a model with device = cpu. In [*] they are for the other models."""
        for name in ("gpu-split", "split-mode") if fields.get("device") == ("cpu",) else ():
            setting = settings.pop(name, None)
            fields.pop(preset_keys.BY_NAME[name].field, None)
            if setting is not None and setting.value not in ((), "auto") and setting.level > STAR:
                self._warn(setting.place, f"{name} has no effect, because device is cpu; remove one of the two")

    def _check_tensor_parallel(self, settings: Layer, fields: dict[str, Any], shares: Sequence[float]) -> None:
        """Reject settings that contradict tensor parallelism."""
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
        if ranks == ALL_DEVICES and fields.get("device") == ("cpu",):
            self._fail(place, "max counts accelerators, and device is cpu; write how many processes")

    def _apply_main_gpu(self, settings: Layer, fields: dict[str, Any]) -> None:
        """Treat main-gpu as `device` if split-mode is none. As in llama-server, it does not limit a model that may be
        split."""
        main, device = settings.pop(preset_keys.MAIN_GPU, None), settings.get("device")
        if main is None:
            return
        if fields.get("split_mode") != "none":
            self._unused_parts[main.place] = (preset_keys.MAIN_GPU, "it needs split-mode = none; write device = cuda:N")
            return
        self._used_parts.add(main.place)
        if device is None or device.level <= main.level:
            settings["device"], fields["device"] = main, main.value

    def _apply_gpu_layers(self, settings: Layer, fields: dict[str, Any]) -> None:
        """Treat n-gpu-layers = 0 as device = cpu, unless `device` is set with higher precedence."""
        layers, device = settings.get("n-gpu-layers"), settings.get("device")
        if layers is not None and 0 < layers.value < ALL_LAYERS:
            fields["gpu_layers"] = layers.value
        if layers is None or layers.value:
            return
        if device is None or device.level < layers.level or (device.level == layers.level and not device.value):
            fields["device"] = ("cpu",)
        elif device.level == layers.level and device.value != ("cpu",):
            self._fail(
                layers.place,
                f"n-gpu-layers = 0 means device = cpu, but device is {','.join(device.value)}; remove one of the two",
            )

    def _chunk(self, settings: Layer, fields: dict[str, Any]) -> None:
        """Keep the default of prefill-chunk beside llama-server's batch-size, which never raises ubatch-size."""
        most = settings.get("max-prefill-tokens")
        if most is not None and most.name in ("b", "batch-size"):
            fields.setdefault("prefill_chunk", DEFAULT_CHUNK)

    def _replicas(self, settings: Layer, fields: dict[str, Any]) -> None:
        """Apply LMI's numbers of workers, unless `replicas` is set with the same or higher precedence."""
        given = {name: settings[name] for name in ("min-workers", "max-workers") if name in settings}
        if not given:
            return
        level, place = max(((setting.level, setting.place) for setting in given.values()), key=lambda pair: pair[0])
        replicas = settings.get("replicas")
        if replicas is not None and replicas.level > level:
            return
        if replicas is not None and replicas.level == level:
            self._fail(place, "replicas is set as well; remove one of the two")
        numbers = {name: max(1, setting.value) for name, setting in given.items()}
        least = numbers.get("min-workers", 1)
        most = numbers.get("max-workers", least)
        if least > most:
            self._fail(place, f"the least number of workers is {least}, the largest {most}; change one of the two")
        fields["replicas"] = (least, most)

    def _choose_by_device(self, settings: Layer, fields: dict[str, Any]) -> None:
        """Replace LMI's keys for one kind of device (`gpu.KEY`, `cpu.KEY`) by `KEY`."""
        for name in ("min-workers", "max-workers", "required-memory", "reserved-memory"):
            best = self._for_device(name, settings, fields.get("device", ()))
            for prefix in preset_keys.DEVICE_PREFIXES:
                settings.pop(f"{prefix}{name}", None)
            if best is not None:
                settings[name] = best
                if field := preset_keys.BY_NAME[name].field:
                    fields[field] = best.value

    def _for_device(self, name: str, settings: Layer, device: tuple[str, ...]) -> Setting | None:
        """Choose among `gpu.KEY`, `KEY` and `cpu.KEY`, with a warning about the others.

        Within one place, that for the model's device takes precedence over `KEY`. Where the device is not set, the
        model may be on an accelerator, so `gpu.KEY` takes precedence.
        """
        own, other = ("cpu.", "gpu.") if device == ("cpu",) else ("gpu.", "cpu.")
        given = [settings[key] for key in (f"{own}{name}", name, f"{other}{name}") if key in settings]
        if device and (wrong := settings.get(f"{other}{name}")):
            given.remove(wrong)
            why = f"because device is {','.join(device)}; remove one of the two"
            self._warn(wrong.place, f"{wrong.place.key} has no effect, {why}")
        if not given:
            return None
        best = max(given, key=lambda setting: setting.level)  # the first of equals
        for weak in given:
            if weak is not best and weak.level == best.level:
                on_cpu = "write device = cpu on a machine without accelerators"
                remedy = on_cpu if weak.name.startswith(other) else "remove one of the two"
                self._warn(weak.place, f'"{weak.place.key}" has no effect beside "{best.place.key}"; {remedy}')
        if best.name.startswith(other):
            self._warn(best.place, f"{best.place.key} applies on every device; write device = cpu, or replicas")
        return best

    def _texts(self, settings: Layer, fields: dict[str, Any]) -> None:
        """Read the files of the chat template and of the grammar, and apply the keys for reasoning."""
        template = self._file_of("chat-template", settings)
        if template is None:
            fields.pop("chat_template_file", None)
        else:
            fields["chat_template"] = template
        if fields.get("chat_template") in FALLBACKS:
            self._prefer_own_template(settings["chat-template"].place, fields)
        sampling = fields["sampling"]
        for name in ("grammar", "json-schema"):
            if (text := self._file_of(name, settings)) is not None:
                file = settings[f"{name}-file"]
                try:
                    value = preset_keys.BY_NAME[name].kind(text)
                except click.BadParameter as error:
                    self._fail(file.place, f"{name}-file: {file.value}: {error.message}")
                    continue
                sampling[name], settings[name] = value, replace(file, value=value)
        levels = {name: settings[name].level for name in ("grammar", "json-schema") if sampling.get(name)}
        if len(levels) == 2:
            lower = min(levels, key=lambda name: levels[name])
            if levels["grammar"] == levels["json-schema"]:
                self._fail(settings[lower].place, "grammar and json-schema both constrain answers; remove one")
            del sampling[lower]
        fields["sampling"] = {name: value for name, value in sampling.items() if value not in ("", {})}
        self._reasoning(settings, fields)

    def _prefer_own_template(self, place: Problem, fields: dict[str, Any]) -> None:
        """Replace a name in `FALLBACKS` by the checkpoint's own template, or by its Jinja text if a folder has none.

        A model of the hub may not be on disk yet, and is taken to have a template.
        """
        name = fields["chat_template"]
        if fields.get("path") and not self._has_template(fields["path"]):
            fields["chat_template"] = jinja(name)
        else:
            fields["chat_template"] = ""
            why = f"the checkpoint's own template takes precedence over {name}"
            self._warn(place, f"chat-template: {why}; remove the key, or write a template into chat-template-file")

    def _has_template(self, folder: str) -> bool:
        """True if a checkpoint has a chat template, or a file that cannot be read may contain one."""
        if self._disk.kind(f"{folder}/chat_template.jinja"):
            return True
        for name in ("tokenizer_config.json", "chat_template.json"):
            if self._disk.kind(f"{folder}/{name}"):
                try:
                    if json.loads(self._disk.read(f"{folder}/{name}")).get("chat_template"):
                        return True
                except (OSError, ValueError, AttributeError, RecursionError):
                    return True
        return False

    def _file_of(self, name: str, settings: Layer) -> str | None:
        """The text of the file of a key; None if there is none, or the key itself takes precedence."""
        text, file = settings.get(name), settings.get(f"{name}-file")
        if file is None or not file.value or (text is not None and text.value and text.level > file.level):
            return None
        if text is not None and text.value and text.level == file.level:
            self._fail(file.place, f"{name} and {name}-file are both set; remove one")
            return None
        try:
            return self._disk.read(file.value)
        except (OSError, ValueError) as error:
            self._fail(file.place, f"{name}-file: {file.value}: {unreadable(error)}")
            return None

    def _reasoning(self, settings: Layer, fields: dict[str, Any]) -> None:
        """Write the keys for reasoning as variables of the chat template, unless chat-template-kwargs has them."""
        stated = settings.get("chat-template-kwargs")
        variables = json.loads(fields.get("chat_template_kwargs") or "{}")
        for key, name in (("reasoning", "enable_thinking"), ("reasoning-effort", "reasoning_effort")):
            setting = settings.get(key)
            if setting is None or setting.value in ("auto", "default"):
                continue
            if name not in variables or (stated is not None and setting.level > stated.level):
                variables[name] = setting.value == "on" if key == "reasoning" else setting.value
                settings["chat-template-kwargs"] = stated or replace(setting, value="")
        if variables:
            fields["chat_template_kwargs"] = preset_keys.BY_NAME["chat-template-kwargs"].kind(json.dumps(variables))

    def _check_aliases(self, presets: Mapping[str, Preset], layers: Mapping[str, Layer]) -> None:
        """Reject an alias that is an id or an alias of another model."""
        owners = {id: id for id in presets}
        for id, layer in layers.items():
            for alias in presets[id].aliases:
                owner = owners.setdefault(alias, id)
                if owner != id:
                    what = "the id of another model" if owner == alias else f"already an alias of {owner}"
                    self._fail(layer["alias"].place, f'alias "{alias}" is {what}; choose another')

    def _check_prefetch(self, presets: Mapping[str, Preset], layers: Mapping[str, Layer]) -> None:
        """Reject models to prefetch that do not exist."""
        names = {name for preset in presets.values() for name in (preset.id, *preset.aliases)}
        for id, layer in layers.items():
            for name in presets[id].prefetch:
                if name not in names:
                    message = f"prefetch names {shown(name)}, and there is no such model"
                    self._fail(layer["prefetch"].place, message, nearest(name, names))

    def _unconfigured(self, found: Sequence[FoundModel], presets: Mapping[str, Preset]) -> Iterator[FoundModel]:
        """The models on disk without a section. If two have the same name, the first one counts."""
        used_ids = {id.casefold() for id in presets}
        owners = {alias: preset for preset in presets.values() for alias in preset.aliases}
        hidden = {preset.repo for preset in presets.values() if preset.dedup_cache_models and preset.repo}
        for entry in found:
            if entry.id.casefold() in used_ids or (entry.source == "cache" and entry.repo in hidden):
                continue
            if (owner := owners.get(entry.id)) is not None:
                if (entry.path, entry.repo, entry.revision) != (owner.path, owner.repo, owner.revision):
                    place = Problem(entry.path or entry.repo, 0, "", "", "")
                    self._warn(place, f'is not listed: "{entry.id}" is an alias of another model')
                continue
            used_ids.add(entry.id.casefold())
            yield entry


def _short_names(presets: Mapping[str, Preset], ids: Sequence[str]) -> dict[str, Preset]:
    """The presets of models named `org/name` at start, with the alias `name`, by which FastChat's users ask for them.

    A model with other aliases gets none, nor does a name that another model has.
    """
    shorts = {id: id.rpartition("/")[2].partition(":")[0] for id in ids if id in presets and "/" in id}
    names = [*shorts.values(), *(name for preset in presets.values() for name in (preset.id, *preset.aliases))]
    folded = [name.casefold() for name in names]
    origin = {"alias": "the name of the repository"}
    return {
        id: replace(presets[id], aliases=(short,), origins={**presets[id].origins, **origin})
        for id, short in shorts.items()
        if not presets[id].aliases and folded.count(short.casefold()) == 1
    }


def _own_apart(layer: Layer) -> tuple[Layer, Layer]:
    """The settings for all models, and those for one model."""
    own = {name: setting for name, setting in layer.items() if preset_keys.is_own(name)}
    return {name: setting for name, setting in layer.items() if name not in own}, own
