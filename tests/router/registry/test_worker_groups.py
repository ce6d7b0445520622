"""Presets that share a worker, key by key."""

from typing import Any

import pytest

from router.config.presets import KEYS, Preset, Scope
from router.config.resolve import load
from router.registry.worker_groups import fleet_preset, fleet_presets, group_presets, preset_ids, request_profile
from router.store.catalogue import LocalDisk
from worker.protocol.argv import Profile

# A value of each key that differs from its default.
SAMPLES = {
    "revision": "v1", "tokenizer": "/", "load-format": "dummy", "trust-remote-code": "on", "task": "embed",
    "pooling": "mean", "embd-normalize": "1", "ctx-size": "99", "parallel": "2", "kv-tokens": "512",
    "kv-cache-dtype": "int8", "prefix-caching": "off", "prefill-chunk": "64", "max-prefill-tokens": "64",
    "limit-images": "1", "max-input-tokens": "9", "dtype": "float32", "quantization": "none", "attention": "eager",
    "threads": "3", "enforce-eager": "on", "max-logprobs": "3", "device": "cpu", "n-gpu-layers": "0",
    "split-mode": "layer", "pipeline-parallel": "2", "tensor-parallel": "2", "gpu-split": "1,1",
    "gpu-memory-utilization": "0.9", "tensor-split": "1,2",
    "required-memory": "7", "reserved-memory": "7", "lora": "org/french", "lora-scaled": "org/french:2",
    "adapters-dir": "/", "enable-lora": "on", "max-loras": "2", "max-lora-rank": "8", "max-cpu-loras": "9",
    "model-draft": "org/draft",
    "spec-type": "ngram-simple", "draft-max": "3", "draft-min": "2", "spec-ngram-size-n": "9",
    "rope-scaling": "yarn", "rope-scale": "2", "rope-freq-scale": "0.5", "rope-freq-base": "9", "alpha-value": "2",
    "yarn-orig-ctx": "9", "yarn-ext-factor": "1", "yarn-attn-factor": "2", "yarn-beta-slow": "2", "yarn-beta-fast": "9",
    "config-override": '{"a": 1}', "python": "python3", "env": "X=1",
    "replicas": "2", "replica-idle-seconds": "7", "queue-size": "7", "max-concurrent": "7", "pin": "on",
    "priority": "7", "ttl": "7", "prefetch": "one", "sleep-idle-seconds": "7", "idle-grace": "1", "min-residency": "7",
    "start-timeout": "7", "stop-timeout": "7", "stall-timeout": "7", "max-restarts": "7",
    "n-predict": "7", "seed": "7", "chat-template": "{{ x }}", "chat-template-kwargs": '{"x": 1}',
    "temp": "0.5", "top-k": "7", "top-p": "0.5", "min-p": "0.5", "repeat-penalty": "2", "repeat-last-n": "7",
    "presence-penalty": "1", "frequency-penalty": "1", "stop": "x",
    "samplers": "top_k", "logit-bias": "5+1", "ignore-eos": "on", "grammar": "x", "json-schema": '{"a": 1}',
    "reasoning-format": "none", "reasoning-budget": "5", "reasoning": "off", "reasoning-effort": "low",
    "alias": "x", "tags": "x", "dedup-cache-models": "on", "request-timeout": "7", "load-on-startup": "on",
    "autoload": "off", "min-workers": "2", "max-workers": "2",
}  # fmt: skip
# Keys with a test of their own; of `engine` there is only one.
ELSEWHERE = {
    "grammar-file", "json-schema-file", "model", "hf-repo", "engine", "chat-template-file", "default-lora", "import",
}  # fmt: skip

SCOPES = {key.name: key.scope for key in KEYS}


def presets(text: str) -> dict[str, Preset]:
    found = load(text, disk=LocalDisk())
    assert not found.problems, found.problems
    return found.presets


def pair(line: str) -> dict[str, Preset]:
    """Two presets of one model, the second with one more line."""
    return presets(f"[one]\nhf-repo = org/m\n[two]\nhf-repo = org/m\n{line}\n")


def test_every_key_is_sampled() -> None:
    assert SAMPLES.keys() | ELSEWHERE == SCOPES.keys()
    assert not SAMPLES.keys() & ELSEWHERE


@pytest.mark.parametrize("key", sorted(SAMPLES))
def test_presets_that_differ_in_a_key_share_a_worker_only_if_the_key_concerns_requests(key: str) -> None:
    both = pair(f"{key} = {SAMPLES[key]}")
    free = SCOPES[key] is not Scope.WORKER
    assert both["one"] != both["two"]
    assert group_presets(both) == ([("one", "two")] if free else [("one",), ("two",)])
    assert (request_profile(both["two"]) is not None) is (SCOPES[key] is Scope.REQUEST)


@pytest.mark.parametrize("key", sorted(key for key in SAMPLES if SCOPES[key] is not Scope.WORKER))
def test_keys_of_one_name_do_not_reach_the_fleet(key: str) -> None:
    plain, changed = pair(f"{key} = {SAMPLES[key]}").values()
    first, second = fleet_preset([plain]), fleet_preset([changed])
    aliases: tuple[str, ...] = ("x",) if key == "alias" else ()
    assert (second.id, second.aliases) == ("two", aliases)  # `prefetch` of other models may name its aliases
    assert [getattr(first, name) for name in vars(first) if name not in ("id", "aliases", "origins")] == [
        getattr(second, name) for name in vars(second) if name not in ("id", "aliases", "origins")
    ]


def test_another_source_is_another_worker() -> None:
    text = "[a]\nhf-repo = org/m\n[b]\nmodel = org/m\n[c]\nhf-repo = org/n\n[d]\nmodel = demo:a\n[e]\nmodel = demo:a\n"
    assert group_presets(presets(text)) == [("a", "b"), ("c",), ("d", "e")]


def test_a_default_adapter_concerns_requests_and_other_adapters_need_another_worker() -> None:
    lora = "lora = org/french, org/german"
    text = "".join(
        f"[{name}]\nhf-repo = org/m\n{lines}\n"
        for name, lines in {
            "a": lora, "b": f"{lora}\ndefault-lora = french", "c": f"{lora}\ndefault-lora = german",
            "d": "lora = org/x",
        }.items()
    )  # fmt: skip
    found = presets(text)
    assert group_presets(found) == [("a", "b", "c"), ("d",)]
    assert [request_profile(found[name]) for name in "ab"] == [None, Profile(name="b", default_adapter="french")]


def test_a_template_file_concerns_requests(tmp_path: Any) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    found = pair(f"chat-template-file = {tmp_path / 't.jinja'}")
    assert group_presets(found) == [("one", "two")]
    assert request_profile(found["two"]) == Profile(name="two", chat_template="{{ messages }}")


def test_a_shared_model_has_the_names_of_all_its_presets() -> None:
    found = presets("[a]\nmodel = demo:a\nalias = x\n[b]\nmodel = demo:b\n[c]\nmodel = demo:a\ntemp = 0\nalias = y\n")
    fleet = fleet_presets(found, group_presets(found))
    assert list(fleet) == ["a,c", "b"]
    assert fleet["a,c"].aliases == ("a", "x", "c", "y")  # `prefetch` may name any of them
    assert preset_ids("a,c") == ("a", "c")
    assert fleet["b"] == found["b"]
