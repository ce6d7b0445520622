"""Presets as text, over a disk that is a list of paths."""

from typing import Any, Literal

from router.config.presets import Preset
from router.config.resolve import LoadedPresets, load


class Disk:
    """Files by absolute path; a path that ends with a slash is a folder, with config.json below it a snapshot."""

    def __init__(self, *paths: str, **texts: str):
        self.paths = {"/etc/llm/models/qwen/config.json", "/etc/llm/models/qwen/", *paths}
        self.texts = {name.replace("_", "/"): text for name, text in texts.items()}

    def kind(self, path: str) -> Literal["", "file", "folder", "snapshot", "lmi", "adapter", "gguf"]:
        if path in self.paths or path in self.texts:
            return "file"
        if f"{path}/config.json" in self.paths:
            return "snapshot"
        if f"{path}/serving.properties" in self.paths:
            return "lmi"
        if f"{path}/adapter_config.json" in self.paths:
            return "adapter"
        return "folder" if f"{path}/" in self.paths else ""

    def folders(self, path: str) -> list[str]:
        inside = {each.removeprefix(f"{path}/").partition("/")[0] for each in self.paths if each.startswith(f"{path}/")}
        return sorted(name for name in inside if f"{path}/{name}/" in self.paths)

    def read(self, path: str) -> str:
        if path.endswith("not-utf8"):
            raise UnicodeDecodeError("utf-8", b"", 0, 1, "")
        if path not in self.texts:
            raise FileNotFoundError(2, "No such file or directory")
        return self.texts[path]


def read(text: str, disk: Disk | None = None, **rest: Any) -> LoadedPresets:
    rest = {"file": "models.ini", "folder": "/etc/llm", "working": "/home/me", **rest}
    return load(text, disk=disk or Disk(), **rest)


def one(text: str, **rest: Any) -> Preset:
    """The preset of a section `[m]` with a source and this body; there must be no problem."""
    loaded = read(f"[m]\nmodel = demo:a\n{text}", **rest)
    assert not loaded.problems, [str(problem) for problem in loaded.problems]
    return loaded.presets["m"]


def complaints(text: str, **rest: Any) -> list[str]:
    loaded = read(text, **rest)
    assert not loaded.problems or not loaded.presets
    return [str(problem) for problem in loaded.problems]


def complaint(body: str, **rest: Any) -> str:
    """The only problem of a section `[m]` with a source and this body."""
    (said,) = complaints(f"[m]\nmodel = demo:a\n{body}", **rest)
    return said
