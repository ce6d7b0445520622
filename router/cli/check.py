"""The result of `router check`: problems, warnings, and with --effective all settings of all models."""

from dataclasses import asdict
from typing import Any

from router.config.effective import effective as effective_settings
from router.config.resolve import LoadedPresets
from router.registry import worker_groups


def text(loaded: LoadedPresets, *, effective: bool) -> str:
    """The result for a terminal."""
    lines = [str(problem) for problem in loaded.problems]
    lines += [f"warning: {warning}" for warning in loaded.warnings]
    if effective:
        for id, preset in loaded.presets.items():
            rows = [(key, _short(value), origin) for key, value, origin in effective_settings(preset)]
            widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
            lines += ["", f"[{id}]", *(f"{key:{widths[0]}} = {value:{widths[1]}}  ; {at}" for key, value, at in rows)]
        lines.append("")
    lines += [
        f"one worker for {' '.join(group)}" for group in worker_groups.group_presets(loaded.presets) if len(group) > 1
    ]
    if loaded.problems:
        lines.append(_count(len(loaded.problems), "fault"))
    else:
        count = f"{_count(len(loaded.presets), 'model')}, no fault"
        lines.append(f"{count}: {' '.join(loaded.presets)}" if loaded.presets else count)
    return "\n".join(lines)


def document(loaded: LoadedPresets, *, effective: bool) -> dict[str, Any]:
    """The result as a JSON document."""
    models: list[dict[str, Any]] = []
    groups = {id: group for group in worker_groups.group_presets(loaded.presets) for id in group}
    for id, preset in loaded.presets.items():
        model: dict[str, Any] = {"id": id, "source": preset.source, "aliases": list(preset.aliases)}
        model["shares"] = [other for other in groups[id] if other != id]
        if effective:
            rows = effective_settings(preset)
            model["settings"] = [{"key": key, "value": value, "origin": origin} for key, value, origin in rows]
        models.append(model)
    return {
        "problems": [asdict(problem) for problem in loaded.problems],
        "warnings": [asdict(warning) for warning in loaded.warnings],
        "models": models,
    }


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."
