"""The effective settings of a preset as text, with their origins; secrets are masked. Pure functions."""

import json
import re
from typing import Any

from router.config.option_types import JsonObject
from router.config.presets import DEFAULTS, KEYS, Preset, PresetKey
from router.config.settings import OPTIONS, Settings

MASK = "***"
BUILT_IN = "built-in"
_UNSET = Settings()
_SECRET = re.compile(r"(?:^|[_.-])(?:key|token|secret|password)$", re.IGNORECASE)


def effective(preset: Preset) -> list[tuple[str, str, str]]:
    """(key, value, origin) of all settings of a model, in the order of the reference; secrets are masked."""
    rows: list[tuple[str, str, str]] = []
    for key in KEYS:
        if key.name in {"model", "hf-repo", "revision"}:
            value = dict(_source_of(preset)).get(key.name)
            if value is not None:
                rows.append((key.name, value, preset.origins.get(key.name) or _source_origin(preset)))
        elif key.name == "env":
            rows += [(f"env.{name}", MASK, preset.origins.get(f"env.{name}", BUILT_IN)) for name in preset.env]
        elif key.field and not (key.name == "chat-template" and preset.chat_template_file):
            text, is_set = _value_text(key, preset)
            rows.append((key.name, text if is_set else key.unset or text, preset.origins.get(key.name, BUILT_IN)))
    return rows


def section(preset: Preset) -> str:
    """All settings of a model as a section of an INI file; secrets are masked."""
    return "\n".join([f"[{preset.id}]", *(f"{key} = {value}" for key, value, _ in effective(preset))]) + "\n"


def options(settings: Settings) -> dict[str, str]:
    """All options of the router by flag, as text; secrets are masked."""
    values = {option: getattr(settings, option.field) for option in OPTIONS}
    return {
        option.flag: option.unset
        if option.unset and value == getattr(_UNSET, option.field)
        else option.kind.write(value)
        for option, value in values.items()
    }


def args(preset: Preset) -> list[str]:
    """The settings that differ from their defaults, as flags; secrets are masked."""
    words = [word for name, value in _source_of(preset) for word in (f"--{name}", value)]
    for key in KEYS:
        if not key.field or key.name == "revision" or (key.name == "chat-template" and preset.chat_template_file):
            continue
        text, is_set = _value_text(key, preset)
        if not is_set:
            continue
        if key.is_flag:
            words.append(f"--{key.name}" if text == "on" else f"--no-{key.name}")
        else:
            words += [f"--{key.name}", text]
    return [*words, *(word for name in preset.env for word in ("--env", f"{name}={MASK}"))]


def _source_of(preset: Preset) -> list[tuple[str, str]]:
    if preset.demo:
        return [("model", f"demo:{preset.demo}")]
    if preset.path:
        return [("model", preset.path)]
    return [("hf-repo", preset.repo), ("revision", preset.revision)]


def _source_origin(preset: Preset) -> str:
    if preset.source != "preset":
        return "--models-dir" if preset.source == "models_dir" else "Hugging Face cache"
    return preset.origins.get("model") or preset.origins.get("hf-repo") or BUILT_IN


def _value_text(key: PresetKey, preset: Preset) -> tuple[str, bool]:
    """The key's value as text, and whether it differs from the default."""
    value = getattr(preset, key.field)
    if key.item:
        return (key.kind.write(value[key.item]), True) if key.item in value else ("", False)
    is_set = value != DEFAULTS[key.field]
    if value is None:
        return "", False
    text = key.kind.write(value)
    return (_masked_json(text) if isinstance(key.kind, JsonObject) and text else text), is_set


def _masked_json(text: str) -> str:
    """JSON text in which values of members such as `api_key` or `token` are masked."""

    def masked(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                name: MASK if isinstance(member, str) and _SECRET.search(name) else masked(member)
                for name, member in value.items()
            }
        return [masked(item) for item in value] if isinstance(value, list) else value

    return json.dumps(masked(json.loads(text)), separators=(",", ":"), ensure_ascii=False)
