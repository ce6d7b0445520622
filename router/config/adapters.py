"""The LoRA adapters of a preset: those that its keys name, those in its folder of adapters, and their ranks. Pure."""

import json
from pathlib import PurePosixPath
from typing import Any

from router.config.option_types import nearest, shown
from router.config.precedence import PROPERTIES, DiskReader, Layer, SettingReader
from router.config.presets import ADAPTER_NAME, DEFAULT_LORA_RANK, DEFAULTS
from worker.protocol.argv import AdapterSource

MAX_LORA_RANK = 4096  # the limit of max-lora-rank; a larger number in an adapter's file is not a rank


def resolve_adapters(settings: Layer, fields: dict[str, Any], reader: SettingReader) -> None:
    """Set the fields for the adapters of a model. Those in `lora` take precedence over those in the adapter folder."""
    fail, warn, disk = reader.collector.fail, reader.collector.warn, reader.disk
    # LMI also takes the folder adapters/ beside a serving.properties, whose model may be elsewhere.
    files = [PurePosixPath(setting.place.file) for setting in settings.values() if setting.level == PROPERTIES]
    for place in dict.fromkeys([fields.get("path", ""), *(str(file.parent) for file in files)]):
        if "adapters_dir" not in fields and place and disk.folders(f"{place}/adapters"):
            fields["adapters_dir"] = f"{place}/adapters"
    found: dict[str, AdapterSource] = {}
    if folder := fields.get("adapters_dir", ""):
        for name in disk.folders(folder):
            if disk.kind(f"{folder}/{name}") == "adapter" and ADAPTER_NAME.fullmatch(name):
                found[name] = AdapterSource(name=name, path=f"{folder}/{name}")
    named: set[str] = set()
    for key, items in (("lora", fields.get("lora", ())), ("lora-scaled", fields.get("lora_scaled", ()))):
        for item in items:
            name, _, target = item.partition("=")
            path, _, scale = target.rpartition(":") if key == "lora-scaled" else (target, "", "1")
            if name in named:
                fail(settings[key].place, f"{key} names {name} twice; give one of them another name")
            named.add(name)
            found[name] = AdapterSource(name=name, path=path, scale=float(scale))
    fields["adapters"] = tuple(found.values())
    _set_largest_rank(settings, fields, reader)
    if fields.get("enable_lora") == "off":
        if fields.get("default_lora"):
            message = "enable-lora is off, and default-lora names an adapter; remove one of the two"
            fail(settings["default-lora"].place, message)
        for key in ("lora", "lora-scaled"):
            if key in settings and settings[key].value:
                warn(settings[key].place, "enable-lora is off, so these adapters are not used; remove one of the two")
    most, kept = fields.get("max_loras", DEFAULTS["max_loras"]), fields.get("max_cpu_loras", 0)
    if 0 < kept < most:
        message = f"max-cpu-loras is {kept}, less than the {most} of max-loras; raise it, or remove it"
        fail(settings["max-cpu-loras"].place, message)
    default = fields.get("default_lora", "")
    if default and default not in found:
        message = f"default-lora: there is no adapter {shown(default)}"
        fail(settings["default-lora"].place, message, nearest(default, found))


def _set_largest_rank(settings: Layer, fields: dict[str, Any], reader: SettingReader) -> None:
    """Set max_lora_rank to the largest rank among the adapters on disk, unless the preset sets it."""
    ranks = {adapter.name: _rank_of(adapter.path, reader.disk) for adapter in fields["adapters"]}
    largest = fields.get("max_lora_rank")
    if largest is None:
        fields["max_lora_rank"] = max([DEFAULT_LORA_RANK, *ranks.values()])
        return
    place = settings["max-lora-rank"].place
    for name, rank in ranks.items():
        if rank > largest:
            reader.collector.warn(place, f"max-lora-rank is {largest}, and adapter {name} has rank {rank}: raise it")


def _rank_of(folder: str, disk: DiskReader) -> int:
    """The largest rank in an adapter's adapter_config.json, as PEFT writes it; 0 if it is not downloaded yet, or states
    none."""
    try:
        content = json.loads(disk.read(f"{folder}/adapter_config.json"))
        patterns = content.get("rank_pattern") or {}
        ranks = [content.get("r"), *patterns.values()]
    except (OSError, ValueError, RecursionError, AttributeError):
        return 0
    return max((rank for rank in ranks if type(rank) is int and 0 < rank <= MAX_LORA_RANK), default=0)
