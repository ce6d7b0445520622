"""No key of a model is silent: each value changes the effective configuration or gives a message, and each is used."""

import ast
import dataclasses
from pathlib import Path

import pytest

from router.config.preset_keys import FOREIGN, ForeignOption
from router.config.presets import DEFAULTS, KEYS, Preset, PresetKey
from tests.router.preset_texts import Disk, read

ROOT = Path(__file__).resolve().parents[3]
DISK = Disk(
    "/etc/llm/a/adapter_config.json", "/etc/llm/dir/", "/etc/llm/dir/b/", "/etc/llm/dir/b/adapter_config.json",
    "/etc/llm/lmi/serving.properties", "/etc/llm/lmi/config.json",
    _etc_llm_text="root ::= 'a'", _etc_llm_schema='{"type": "object"}',
)  # fmt: skip
DISK.texts["/etc/llm/lmi/serving.properties"] = "option.dtype=fp16"
# Values to try; a key refuses those that it cannot have.
VALUES = (
    "on", "off", "0", "1", "2", "3", "0.5", "0.25,0.75", "-1", "1,2", "1-3", "none", "cpu", "cuda:1", "cuda:1=2",
    '{"a": 1}', "a", "a,b", "a=b", "max", "auto", "org/name", "./text", "1=2",
)  # fmt: skip
# Keys that need another value, or others beside them.
GIVEN = {
    "import": ["import = ./lmi"],
    "revision": ["revision = dev", "hf-repo = org/name"],
    "tokenizer": ["tokenizer = ./dir"],
    "chat-template": ["chat-template = {{ messages }}"],
    "prefetch": ["prefetch = other"],
    "default-lora": ["default-lora = a", "lora = a=./a"],
    "lora": ["lora = a=./a"],
    "lora-scaled": ["lora-scaled = a=./a:0.5"],
    "adapters-dir": ["adapters-dir = ./dir"],
    "max-cpu-loras": ["max-cpu-loras = 5"],
    "grammar": ["grammar = root ::= 'a'"],
    "json-schema-file": ["json-schema-file = ./schema"],
    "alpha-value": ["alpha-value = 2"],
}


def given(key: PresetKey) -> list[list[str]]:
    """Lines of a section that set `key`: those of the table, one for each word of a choice, or one for each value."""
    if key.name in GIVEN:
        return [GIVEN[key.name]]
    words = [word for word in getattr(key.kind, "choices", ()) if word]
    return [[f"{key.name} = {value}"] for value in words or VALUES]


def effective(lines: list[str]) -> tuple[Preset | None, str]:
    """The preset of these lines without the places of its settings, and all messages."""
    sources = ("model ", "hf-repo ", "import ")
    model = [] if any(line.startswith(sources) for line in lines) else ["model = demo:a"]
    loaded = read("\n".join(["[other]", "model = demo:b", "[m]", *model, *lines]), disk=DISK)
    messages = [str(each) for each in (*loaded.problems, *loaded.warnings)]
    preset = loaded.presets.get("m")
    return preset and dataclasses.replace(preset, origins={}), "; ".join(messages)


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_each_value_of_a_key_changes_the_configuration_or_gives_a_message(key: PresetKey) -> None:
    plain, _ = effective(GIVEN[key.name][1:] if key.name in GIVEN else [])
    silent, changed = [], []
    for lines in given(key):
        preset, messages = effective(lines)
        if preset is not None and preset != plain:
            changed.append(lines)
        elif not messages:
            silent.append(lines[0].partition(" = ")[2])
    assert changed or len(getattr(key.kind, "choices", "  ")) == 1, "no value changes the configuration"
    for value in silent:  # only other words for what holds without the key
        assert is_default(key, value), f"{key.name} = {value} changes nothing, and no message says so"


# Keys of a feature, and a line that turns the feature on.
PARTS = {
    "draft-max = 5": "spec-type = ngram-simple",
    "draft-min = 2": "model-draft = org/small",
    "spec-ngram-size-n = 4": "spec-type = ngram-simple",
    "spec-type = draft-simple": "model-draft = org/small",
    "max-loras = 2": "enable-lora = on",
    "max-lora-rank = 32": "lora = org/a",
    "max-cpu-loras = 9": "adapters-dir = ./dir",
}


@pytest.mark.parametrize("line", PARTS)
def test_a_key_of_a_feature_that_no_model_uses_gives_a_warning(line: str) -> None:
    name = line.partition(" = ")[0]
    for lines in (f"[m]\nmodel = demo:a\n{line}", f"[*]\n{line}\n[n]\nmodel = demo:b\n[m]\nmodel = demo:a"):
        (warning,) = read(lines, disk=DISK).warnings
        assert warning.message.startswith(f"{name} has no effect")
        assert read(f"{lines}\n{PARTS[line]}", disk=DISK).warnings == ()
    assert read(f"[m]\nmodel = demo:a\n{line}", disk=DISK, strict=True).problems


def is_default(key: PresetKey, value: str) -> bool:
    parsed = key.kind.convert(value, None, None)
    if key.field in ("", "sampling", "rope"):
        return value in NEUTRAL.get(key.name, ())
    return bool(parsed == DEFAULTS[key.field])


# Values of keys without a field of their own that state what holds anyway.
NEUTRAL = {
    "n-gpu-layers": ("-1", "auto", "all"), "min-workers": ("0", "1"), "max-workers": ("1",), "rope-scale": ("1",),
    "rope-freq-scale": ("0", "1"), "rope-freq-base": ("0",), "alpha-value": ("1",), "yarn-orig-ctx": ("0",),
    "yarn-ext-factor": ("-1",), "yarn-attn-factor": ("-1", "0", "1"), "yarn-beta-slow": ("-1", "0", "1"),
    "yarn-beta-fast": ("-1", "0"), "reasoning": ("auto",), "reasoning-effort": ("default",),
}  # fmt: skip


@pytest.mark.parametrize("option", FOREIGN, ids=lambda option: option.name)
def test_each_name_of_an_option_that_is_not_offered_gives_a_message(option: ForeignOption) -> None:
    harmless = {*option.neutral.split(), *option.means}
    for name in option.names:
        for value in {"on", "off", "7", "x"} - harmless:
            _, messages = effective([f"{name} = {value}"])
            assert messages, f"{name} = {value} has no effect, and no message says so"


def test_each_setting_is_read_outside_the_configuration() -> None:
    """A setting that is parsed and used by nothing has no effect, whatever its value."""
    used: set[str] = set()
    for path in (ROOT / "router").rglob("*.py"):
        if path.parent.name != "config" or path.name == "presets.py":
            nodes = ast.walk(ast.parse(path.read_text("utf-8")))
            used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    unused = {key.field for key in KEYS if key.field} - used
    assert unused == {"chat_template_file"}, "its text is in chat_template"
