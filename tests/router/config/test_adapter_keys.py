"""The keys of LoRA adapters."""

from typing import Any

import pytest

from router.config.effective import args
from router.config.presets import Preset, same_load
from router.memory.checkpoint_facts import Checkpoint, Linears
from router.memory.segments import adapter_bytes
from tests.router.preset_texts import Disk, complaint, one, read
from worker.protocol.argv import AdapterSource

FILES = Disk(
    "/etc/llm/french/", "/etc/llm/french/adapter_config.json",
    "/etc/llm/models/qwen/adapters/", "/etc/llm/models/qwen/adapters/old/",
    "/etc/llm/models/qwen/adapters/old/adapter_config.json", "/etc/llm/models/qwen/adapters/notes/",
)  # fmt: skip


def adapters(text: str) -> list[tuple[str, str, float]]:
    return [(each.name, each.path, each.scale) for each in one(text, disk=FILES).adapters]


def test_an_adapter_is_a_folder_or_a_repository_with_a_name_and_perhaps_a_scale() -> None:
    assert adapters("lora = french, mine=./french, org/german:v2") == [
        ("french", "/etc/llm/french", 1.0),
        ("mine", "/etc/llm/french", 1.0),
        ("german", "hub:org/german:v2", 1.0),
    ]
    assert adapters("lora = mine=https://huggingface.co/org/german") == [("mine", "hub:org/german:main", 1.0)]
    assert adapters("lora-scaled = french:0.5, org/german:main:2") == [
        ("french", "/etc/llm/french", 0.5),
        ("german", "hub:org/german:main", 2.0),
    ]


def test_an_adapter_may_be_an_object_of_vllm() -> None:
    mine, german = '{"name": "mine", "path": "french", "base_model_name": "m"}', '{"name": "de", "path": "org/german"}'
    assert adapters(f"lora-modules = {mine}") == [("mine", "/etc/llm/french", 1.0)]
    assert adapters(f"lora-modules = {mine},{german}")[1:] == [("de", "hub:org/german:main", 1.0)]


def test_adapters_in_the_models_folder_are_found_and_named_ones_take_precedence() -> None:
    found = read("[m]\nmodel = models/qwen", disk=FILES).presets["m"]
    assert [each.name for each in found.adapters] == ["old"]
    assert (found.adapters_dir, found.adapter_slots) == ("/etc/llm/models/qwen/adapters", 4)
    named = read("[m]\nmodel = models/qwen\nlora = old=french", disk=FILES).presets["m"]
    assert named.adapters == (AdapterSource(name="old", path="/etc/llm/french"),)


def test_adapter_slots_are_reserved_if_there_are_adapters_or_if_enabled() -> None:
    assert one("").adapter_slots == 0
    assert one("enable-lora = on\nmax-loras = 2").adapter_slots == 2
    assert one("lora = org/german").adapter_slots == 4
    assert one("lora = org/german\nenable-lora = off").adapter_slots == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("lora = french\ndefault-lora = french\nenable-lora = off", "enable-lora is off, and default-lora names"),
        ("max-loras = 4\nmax-cpu-loras = 2", "max-cpu-loras is 2, less than the 4 of max-loras; raise it"),
        ("lora = nowhere", "/etc/llm/nowhere does not exist"),
        ('lora-modules = {"name": "x"}', 'each adapter must be {"name": ..., "path": ...}, or write lora ='),
        ('lora-modules = {"name": "x", "path": "french", "odd": 1}', 'no key means the member "odd"; remove it'),
        ("lora-modules = {name: x}", "is not JSON; write lora = name=folder"),
        ("lora = models/qwen", "has no adapter_config.json"),
        ("lora = a/b/c=french", "cannot name an adapter"),
        ("lora = french, french=org/x", "names french twice"),
        ("lora-scaled = french", "is not folder:scale"),
        ("lora = french\ndefault-lora = frensh", 'there is no adapter "frensh"; did you mean "french"?'),
        ("adapters-dir = nowhere", "no folder /etc/llm/nowhere"),
        ("max-loras = 0", "max-loras"),
    ],
)
def test_a_value_that_names_no_adapter_is_rejected(body: str, message: str) -> None:
    assert message in complaint(body, disk=FILES)


def test_a_running_worker_goes_on_when_adapters_come_and_go_but_not_when_their_slots_do() -> None:
    some, more = one("lora = org/a"), one("lora = org/a, org/b\ndefault-lora = a")
    assert same_load(some, more)
    assert not same_load(some, one(""))
    assert not same_load(some, one("lora = org/a\nmax-lora-rank = 8"))
    assert args(some)[-2:] == ["--lora", "a=hub:org/a:main"]


def ranked(*ranks: tuple[str, str]) -> Disk:
    """A disk with adapters of these names and configurations."""
    folders = [path for name, _ in ranks for path in (f"/etc/llm/{name}/", f"/etc/llm/{name}/adapter_config.json")]
    disk = Disk(*folders)
    disk.texts = {f"/etc/llm/{name}/adapter_config.json": config for name, config in ranks}
    return disk


def test_slots_are_as_large_as_the_largest_adapter_that_is_here() -> None:
    disk = ranked(("a", '{"r": 8}'), ("b", '{"r": 64}'), ("c", '{"r": 4, "rank_pattern": {"x": 96}}'))
    assert one("lora = a", disk=disk).max_lora_rank == 16
    assert one("lora = a, b, org/german", disk=disk).max_lora_rank == 64
    assert one("lora-scaled = b:0.5, c:1", disk=disk).max_lora_rank == 96
    assert one("").max_lora_rank == 16
    odd = ranked(
        ("a", "{"), ("b", '{"r": true}'), ("c", '{"r": 5000}'), ("d", "[]"), ("e", '{"r": 8, "rank_pattern": 5}')
    )
    assert one("lora = a, b, c, d, e", disk=odd).max_lora_rank == 16


def test_an_adapter_of_a_larger_rank_than_the_preset_allows_causes_a_warning() -> None:
    disk = ranked(("a", '{"r": 8}'), ("b", '{"r": 64}'))
    loaded = read("[m]\nmodel = demo:a\nlora = a, b\nmax-lora-rank = 32", disk=disk)
    assert loaded.presets["m"].max_lora_rank == 32
    [warning] = loaded.warnings
    assert "max-lora-rank is 32, and adapter b has rank 64: raise it" in str(warning)


def test_slots_are_part_of_the_static_estimate() -> None:
    """Of each linear layer inputs and outputs, times slots and rank."""
    facts = Checkpoint(linears=Linears(count=2, lora_elements=2 * (64 + 128)))
    preset: Any = Preset(id="m", enable_lora="on", max_loras=3, max_lora_rank=8)
    assert adapter_bytes(facts, preset, 2) == 3 * 8 * 2 * (64 + 128) * 2
