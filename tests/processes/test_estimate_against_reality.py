"""The static estimate against real workers: never below the memory that they occupy."""

import json
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from router.config.presets import Preset
from router.memory import checkpoint
from router.memory.checkpoint_facts import Checkpoint, compute_dtype, effective_ctx, prefill_chunk, serves_embeddings
from router.memory.estimate import estimate
from tests import tiny
from tests.children import Child, memory, python
from tests.router.checkpoints import most_context
from worker.protocol.argv import Estimate, Serve, to_argv
from worker.protocol.events import Ready

pytestmark = pytest.mark.slow  # torch is imported, here or in the workers

DEADLINE = 240.0
"""Seconds; far above what a worker takes here."""


@dataclass(frozen=True)
class Case:
    """A model, how it is run, and requests that make its largest steps."""

    family: str
    config: dict[str, Any]
    preset: dict[str, Any]
    prompts: Sequence[int]
    """Tokens of requests that are sent at once."""


SMALL = {
    "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "vocab_size": 8000, "max_position_embeddings": 4096,
}  # fmt: skip

CASES = {
    "33 MiB, converted": Case(
        "llama", {**SMALL, "num_hidden_layers": 3, "dtype": "float16"}, {"ctx_size": 512, "parallel": 2}, (500, 500)
    ),
    "experts, stacked while they load": Case(
        "mixtral", {**SMALL, "num_hidden_layers": 3}, {"ctx_size": 512, "parallel": 2}, (500, 500)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_worker_stays_within_its_static_estimate(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = tiny.make(case.family, tmp_path, **case.config)
    preset = Preset(id="m", **case.preset)
    facts = checkpoint.read(folder)
    estimated = estimate(facts, preset, on_host=True)
    peak = peak_of_a_worker(folder, facts, preset, case.prompts)
    assert peak <= estimated.total


def peak_of_a_worker(folder: Path, facts: Checkpoint, preset: Preset, prompts: Sequence[int]) -> int:
    """Highest resident bytes of a worker that was sent `prompts`, by their lengths, all at once."""
    command = Serve(
        snapshot=str(folder),
        listen="tcp:127.0.0.1:0",
        ctx_size=effective_ctx(facts, preset),
        parallel=preset.parallel,
        prefill_chunk=prefill_chunk(facts, preset, on_host=True),
        dtype=preset.dtype,
    )
    with Child(python("-m", "worker", *to_argv(command))) as worker, ThreadPoolExecutor(len(prompts)) as pool:
        url = worker.event(Ready, DEADLINE).address.replace("tcp:", "http://")

        def ask(length: int) -> None:
            body = {"prompt": [5] * length, "max_tokens": 8, "temperature": 1.0, "top_p": 0.99, "logprobs": 5}
            request = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
                answer.read()

        list(pool.map(ask, prompts))
        return memory(worker.pid, "VmHWM")


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {family: tiny.make(family, folder / family) for family in tiny.FAMILIES}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_router_and_worker_read_a_snapshot_alike(family: str, snapshots: dict[str, Path]) -> None:
    import torch

    from worker.engines.transformers.load import architectures, layer_split, loader
    from worker.engines.transformers.load.snapshot import is_embedder, load_config
    from worker.estimate import meta_model

    folder, preset = snapshots[family], Preset(id="m", ctx_size=100, parallel=3)
    facts = checkpoint.read(folder)
    options = Estimate(snapshot=str(folder))
    config = load_config(options)
    assert serves_embeddings(facts, preset) == is_embedder(options, config)
    stored = layer_split.resolve_dtype("auto", config.dtype, torch.device("cpu"))
    assert f"torch.{compute_dtype(facts, preset, on_host=True)}" == str(stored)
    if not serves_embeddings(facts, preset):
        assert facts.max_positions == architectures.positions(config)
        assert facts.aligned == (architectures.backend(config) == "aligned")
        model = loader.load_model(options, config, None, lambda event: None).model
        asked = Estimate(snapshot=str(folder), parallel=3)
        cache = meta_model.make_runner(model, config, asked, 100)[0].bytes_on(torch.device("cpu"))
        estimated = most_context(facts, preset, 100, on_host=True)
        # of states it knows the outer sizes, and not every model's convolution
        assert estimated == cache if not facts.state_layers else cache <= estimated <= 1.1 * cache


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_parameters_are_counted_as_the_model_counts_them(family: str, snapshots: dict[str, Path]) -> None:
    import torch
    import transformers

    folder = snapshots[family]
    facts = checkpoint.read(folder)
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    with torch.device("meta"):
        model = getattr(transformers, name)(transformers.AutoConfig.from_pretrained(folder))
    assert facts.params == sum(parameter.numel() for parameter in model.parameters())
