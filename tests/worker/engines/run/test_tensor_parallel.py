"""Tensor parallelism: the text is the same as without, and a lost rank is reported.

Followers are forked from this process, and communicate as with a worker.
"""

import asyncio
import gc
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from router.config.presets import Preset
from router.memory import checkpoint
from router.memory import tensor_parallel as static_tensor_parallel
from tests import lora, tiny
from tests.worker.drafts import Oracle, drafting
from tests.worker.families import SHALLOW
from tests.worker.loaded import (
    DEADLINE,
    collect_choices,
    complete_one,
    complete_preempting,
    generated,
    generation,
    options,
    reference,
    serving,
    words,
    work_of,
)
from tests.worker.scheduled import check_scheduler
from worker.engines.transformers.device.rank_processes import RankProcesses
from worker.engines.transformers.engine import TransformersEngine
from worker.engines.transformers.load import loader, tensor_parallel_plan
from worker.engines.transformers.load.snapshot import load_config
from worker.engines.transformers.load.tensor_parallel_plan import RankSlice
from worker.engines.transformers.run.aligned import AlignedRunner
from worker.errors import AdapterNotFound, Draining, RankLost, StartError, UnusableAdapter
from worker.estimate import estimate, meta_model
from worker.interface import AdapterChoice
from worker.program import supervision
from worker.program.main import _follow
from worker.protocol.architectures import DIVISIBLE, PAGED
from worker.protocol.argv import AdapterSource, Estimate, encode_adapters, to_argv
from worker.protocol.events import Exit

COMMON: dict[str, Any] = {"ctx_size": 128, "parallel": 4, "prefill_chunk": 24, "tensor_parallel": 2}
NEW = 8
# Matrices that each rank has as a whole: choices of experts, compressed queries and keys, and what belongs to states.
WHOLE = re.compile(r"gate\.weight$|\.router\.|\.(q_a_proj|kv_a_proj_with_mqa|conv1d|mamba)\.")
ATTENTION, MLP = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}


PROMPTS = (words(35), words(50), words(9, 1), words(35), words(3, 3))  # some share a prefix; more than run at once


@contextmanager
def ranked(folder: Path, **changes: Any) -> Iterator[tuple[TransformersEngine, RankProcesses]]:
    """A leading engine with its followers, which have exited at the end of the block."""
    asked = options(folder, **{**COMMON, **changes})
    ranks = RankProcesses.fork(asked.tensor_parallel, partial(_follow, to_argv(asked)), supervision.attach_rank)
    try:
        silent: Any = lambda _: None  # noqa: E731
        yield TransformersEngine.load(asked, progress=silent, pulse=silent, ranks=ranks), ranks
    finally:
        ranks.end()
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.pids)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(DIVISIBLE))
async def test_text_is_the_same_as_of_one_rank(family: str, tmp_path: Path) -> None:
    folder = tiny.make(family, tmp_path, **SHALLOW.get(family, {}))
    model = reference(folder)
    expected = [generated(model, prompt, NEW) for prompt in PROMPTS]
    with ranked(folder) as (engine, _):
        async with serving(engine):
            collected = await asyncio.gather(*(complete_one(engine, prompt, max_tokens=NEW) for prompt in PROMPTS))
            assert [each.tokens for each in collected] == expected
            for _ in range(2):
                again = await complete_one(engine, PROMPTS[1], max_tokens=NEW)
                assert again.tokens == expected[1]
            found = 48 if family in PAGED else 0
            assert again.cached_tokens == found, "found by all ranks, or the text would be another"


@pytest.mark.slow
async def test_four_ranks_in_bfloat16_with_a_cache_too_small_for_all(tmp_path: Path) -> None:
    """Weights are converted, blocks preempted and copied, choices forked; seeded requests give the same twice."""
    folder = tiny.make("llama", tmp_path, num_attention_heads=8, num_key_value_heads=4, head_dim=8, vocab_size=511)
    changes = {"tensor_parallel": 4, "dtype": "bfloat16", "kv_tokens": 128}
    with ranked(folder, **changes) as (engine, ranks):
        async with serving(engine):
            assert len(ranks.pids) == 3
            alone = [await complete_one(engine, prompt, max_tokens=NEW) for prompt in PROMPTS[:3]]
            together = await asyncio.gather(*(complete_one(engine, prompt, max_tokens=NEW) for prompt in PROMPTS[:3]))
            assert [len(each.tokens) for each in alone] == [len(each.tokens) for each in together] == [NEW] * 3
            choices = await collect_choices(engine, generation(PROMPTS[1], n=3, max_tokens=NEW))
            assert len({tuple(each.tokens) for each in choices}) == 1, "greedy, so all alike"
            check_scheduler(work_of(engine)._scheduler)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes"), [("deepseek_v2", {}), ("jamba", {"kv_cache_dtype": "int8"})])
async def test_ranks_without_blocks_fork_cancel_and_preempt_rows_together(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """The cache of Jamba is checked at load with an exact one. Its states are lost with each preemption."""
    folder = tiny.make(family, tmp_path, **SHALLOW.get(family, {}))
    with ranked(folder, **changes) as (engine, _):
        async with serving(engine), asyncio.timeout(DEADLINE):
            alone = [await complete_one(engine, prompt, max_tokens=NEW) for prompt in PROMPTS]
            choices = await collect_choices(engine, generation(PROMPTS[1], n=3, max_tokens=NEW))
            assert [each.tokens for each in choices] == [alone[1].tokens] * 3

            stream = engine.generate(generation(words(9), max_tokens=60))
            await anext(stream)
            wanted = [generation(prompt, max_tokens=NEW) for prompt in PROMPTS]
            together = asyncio.gather(*(complete_preempting(engine, request) for request in wanted))
            await anext(stream)
            await stream.aclose()
            assert await together == [each.tokens for each in alone]
            work = work_of(engine)
            check_scheduler(work._scheduler)
            estimated = Estimate(snapshot=str(folder), **{**COMMON, "threads": 1}, **changes)
            runner = work._backend.runner
            assert isinstance(runner, AlignedRunner)
            rank = estimate.trace(estimated, load_config(estimated), 2)
            assert runner.bytes_on(torch.device("cpu")) == rank.context
            assert sum(each.nbytes for each in (*runner._model.parameters(), *runner._model.buffers())) == rank.weights


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "llama4_text"])
async def test_ranks_compute_drafts_together(family: str, tmp_path: Path) -> None:
    folder = tiny.make(family, tmp_path)
    model = reference(folder)
    expected = [generated(model, prompt, NEW) for prompt in PROMPTS]
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, expected, strict=True)]
    with ranked(folder, ngram_size=2) as (engine, _):
        async with serving(engine):
            drafter = drafting(engine, Oracle(0.7, texts))
            collected = await asyncio.gather(*(complete_one(engine, prompt, max_tokens=NEW) for prompt in PROMPTS))
            assert [each.tokens for each in collected] == expected
            assert 0 < drafter.accepted < drafter.drafted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("qwen2", ATTENTION | MLP),
        ("qwen2_moe", ATTENTION | MLP),
        ("olmoe", ATTENTION),
        ("phimoe", ATTENTION),
        ("deepseek_v2", {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}),
        ("qwen3_next", ATTENTION | {"in_proj_qkvz", "in_proj_ba", "out_proj"}),
    ],
)
async def test_adapters_give_the_text_of_one_rank(family: str, layers: set[str], tmp_path: Path) -> None:
    """Two slots for three adapters, in batches with each other and with the base model. A fourth comes at run time."""
    folder = tiny.make(family, tmp_path / "model", **SHALLOW.get(family, {}))
    paths = {
        name: lora.make(folder, tmp_path / name, seed=seed, target_modules=layers) for seed, name in enumerate("abcd")
    }
    models = {name: lora.adapted(folder, path) for name, path in paths.items()} | {"": reference(folder)}
    expected = {(name, each): generated(model, each, NEW) for name, model in models.items() for each in PROMPTS[:3]}
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected), "adapters change the text"

    def sources(names: str) -> list[AdapterSource]:
        return [AdapterSource(name=name, path=str(paths[name])) for name in names]

    async def texts(names: str) -> None:
        asked = [(name, prompt) for prompt in PROMPTS[:3] for name in (*names, "")]
        answers = (complete_one(engine, each, max_tokens=NEW, adapter=AdapterChoice(name)) for name, each in asked)
        assert [each.tokens for each in await asyncio.gather(*answers)] == [expected[each] for each in asked]

    with ranked(folder, max_loras=2, max_lora_rank=4, adapters=encode_adapters(sources("abc"))) as (engine, _):
        async with serving(engine), asyncio.timeout(DEADLINE):
            await texts("abc")
            assert await engine.set_adapters(sources("bd")) == {}
            with pytest.raises(AdapterNotFound):
                await complete_one(engine, PROMPTS[0], adapter=AdapterChoice("a"))
            await texts("db")


@pytest.mark.parametrize("family", ["llama", "llama4_text"])
async def test_an_adapter_whose_files_have_changed_ends_its_request_only(family: str, tmp_path: Path) -> None:
    """No rank has begun the step by then, so none is out of step."""
    folder = tiny.make(family, tmp_path / "model")
    paths = {name: lora.make(folder, tmp_path / name, target_modules=ATTENTION) for name in "ab"}
    known = encode_adapters([AdapterSource(name=name, path=str(path)) for name, path in paths.items()])
    with ranked(folder, max_loras=1, max_lora_rank=4, max_cpu_loras=1, adapters=known) as (engine, _):
        async with serving(engine), asyncio.timeout(DEADLINE):
            (paths["a"] / "adapter_config.json").write_text("{}")  # its file was closed when that of `b` was read
            with pytest.raises(UnusableAdapter):
                await complete_one(engine, PROMPTS[0], adapter=AdapterChoice("a"))
            answer = await complete_one(engine, PROMPTS[0], max_tokens=NEW, adapter=AdapterChoice("b"))
            assert answer.tokens == generated(lora.adapted(folder, paths["b"]), PROMPTS[0], NEW)


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
async def test_a_rank_that_is_killed_ends_the_answers_and_the_engine(family: str, tmp_path: Path) -> None:
    folder = tiny.make(family, tmp_path)
    with ranked(folder) as (engine, ranks):
        async with serving(engine), asyncio.timeout(DEADLINE):
            stream = engine.generate(generation(words(9), max_tokens=100))
            await anext(stream)
            os.kill(ranks.pids[0], signal.SIGKILL)
            with pytest.raises(Draining, match="its worker is being replaced"):
                [delta async for delta in stream]
            with pytest.raises(RankLost, match=rf"rank 1 of 2 \(process {ranks.pids[0]}\): was killed by SIGKILL"):
                await asyncio.wrap_future(engine.fatal)
            with pytest.raises(Draining):
                await complete_one(engine, words(3))


async def test_a_rank_that_is_killed_while_idle_is_missed_at_once(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path)
    with ranked(folder) as (engine, ranks):
        async with serving(engine), asyncio.timeout(DEADLINE):
            await complete_one(engine, words(3), max_tokens=1)
            os.kill(ranks.pids[0], signal.SIGKILL)
            with pytest.raises(RankLost, match="was killed by SIGKILL"):
                await asyncio.wrap_future(engine.fatal)


class Bound:
    """An object that only the process that made it may destroy."""

    def __init__(self) -> None:
        self._owner, self._itself = os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self._owner:
            os._exit(77)


def test_a_follower_destroys_no_object_inherited_from_its_leader() -> None:
    """Example: the process group of an earlier engine, whose destructor waits for threads of the leader."""

    def follow(link: Any) -> int:
        gc.collect()
        link.ready()
        link.receive()
        return 0

    gc.collect()
    gc.disable()
    try:
        Bound()
        ranks = RankProcesses.fork(2, follow, supervision.attach_rank)
        try:
            ranks.until_ready(lambda _: None)
        finally:
            ranks.end()
    finally:
        gc.enable()


def test_a_rank_that_cannot_load_reports_its_error_and_exit_code(tmp_path: Path) -> None:
    def follow(link: Any) -> int:
        link.receive()
        link.fail(Exit.DEVICE_MEMORY, "no memory for the weights on cuda:1")
        return Exit.DEVICE_MEMORY

    asked = options(tiny.make("llama", tmp_path), **COMMON)
    ranks = RankProcesses.fork(2, follow, supervision.attach_rank)
    silent: Any = lambda _: None  # noqa: E731
    with pytest.raises(StartError, match=r"rank 1 of 2 \(process \d+\): no memory for the weights on cuda:1") as failed:
        TransformersEngine.load(asked, progress=silent, pulse=silent, ranks=ranks)
    assert failed.value.exit == Exit.DEVICE_MEMORY
    ranks.end()


# Without ranks


@pytest.mark.parametrize("family", sorted(DIVISIBLE))
def test_slices_are_the_whole_model_and_nothing_twice(family: str) -> None:
    """The ranks' slices of each parameter make up the whole, or all ranks hold the same."""
    count = 2
    config_name, model_name, settings = tiny._FAMILIES[family]
    transformers: Any = __import__("transformers")
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512, "pad_token_id": None}
    config = getattr(transformers, config_name)(**{**settings, **heads})
    whole = getattr(transformers, model_name)(config)
    parts = [getattr(transformers, model_name)(config) for _ in range(count)]
    parted = set[str]()
    for rank, part in enumerate(parts):
        part.load_state_dict(whole.state_dict())
        tensor_parallel_plan.divide(part, (RankSlice(rank, count), meta_model.FakeGroup(count)))
    for name, parameter in whole.named_parameters():
        mine = [dict(part.named_parameters()).get(name) for part in parts]
        first = mine[0]
        assert first is not None
        if first.shape == parameter.shape:  # the same on all ranks, but for a bias that is added once
            assert all(each is None or torch.equal(each, parameter) for each in mine)
            continue
        dim = next(dim for dim in range(parameter.ndim) if first.shape[dim] < parameter.shape[dim])
        slices = [each for each in mine if each is not None]
        if name.endswith("experts.gate_up_proj"):  # a slice of all gates, and one of all ups
            slices = [half for halves in zip(*(each.chunk(2, dim) for each in slices), strict=True) for half in halves]
        assert torch.equal(torch.cat(slices, dim), parameter)
        parted.add(name)
    matrices = {name for name, each in whole.named_parameters() if "layers." in name and each.ndim > 1}
    assert matrices - parted == {name for name in matrices if WHOLE.search(name)}


@pytest.mark.parametrize(
    ("family", "changes", "config", "why"),
    [
        ("llama", {"tensor_parallel": 3}, {}, "it has 4 attention heads, which 3 does not divide.*pipeline-parallel"),
        ("llama", {"tensor_parallel": 4}, {}, "it has 2 heads of keys and values, which 4 does not divide"),
        ("llama", {}, {"intermediate_size": 129}, "its MLP is 129 wide, which 2 does not divide"),
        ("gpt2", {}, {}, "transformers has no plan for this family; remove tensor-parallel; pipeline-parallel puts"),
        ("qwen2_moe", {}, {"shared_expert_intermediate_size": 63}, "its shared expert is 63 wide, which 2 does not"),
        ("qwen3_moe", {}, {"moe_intermediate_size": 33}, "its experts are 33 wide, which 2 does not divide"),
        ("phi3", {}, {}, r"this version divides cohere, .* only \(its plan has colwise_gather_output\)"),
        ("olmoe", {}, {"intermediate_size": 33}, "its MLP is 33 wide, which 2 does not divide"),
        ("qwen3_next", {}, {"linear_num_value_heads": 7, "linear_num_key_heads": 7}, "its linear attention is 7 wide"),
        ("llama4_text", {}, {"intermediate_size_mlp": 129}, "its dense MLP is 129 wide, which 2 does not divide"),
        ("gpt_oss", {}, {}, "transformers has no plan for this family; remove tensor-parallel; pipeline-parallel puts"),
        ("t5", {}, {}, "it has an encoder and a decoder; remove tensor-parallel$"),
        ("llama", {"quantization": "bnb-4bit"}, {}, "its weights are quantized; remove tensor-parallel$"),
        ("llama-embed", {}, {}, "tensor-parallel is not for models that embed or score"),
        ("llama", {}, {}, "this process was started without its ranks"),
    ],
)
def test_the_error_for_an_indivisible_model_names_the_way_out(
    family: str, changes: dict[str, Any], config: dict[str, Any], why: str, tmp_path: Path
) -> None:
    asked = options(tiny.make(family, tmp_path, **config), **{**COMMON, **changes})
    silent: Any = lambda _: None  # noqa: E731
    with pytest.raises(StartError, match=why):
        TransformersEngine.load(asked, progress=silent, pulse=silent)


def test_a_matrix_that_the_plan_does_not_name_is_refused(tmp_path: Path) -> None:
    """Cohere's norm may have weights for each head."""
    asked = options(tiny.make("cohere", tmp_path, use_qk_norm=True), **COMMON)
    config = load_config(asked)
    with pytest.raises(StartError, match=r"its plan has no entry for .*norm.weight, which is a matrix"):
        loader.load_model(asked, config, None, lambda progress: None, share=(RankSlice(0, 2), meta_model.FakeGroup(2)))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_exact_estimate_is_of_one_rank_for_each_device(family: str, tmp_path: Path) -> None:
    """Llama's head is divided here; Qwen 3's is its embeddings, which every rank needs."""
    folder = tiny.make(family, tmp_path, vocab_size=512)
    one = Estimate(snapshot=str(folder), ctx_size=128, parallel=2, prefill_chunk=32, enforce_eager=True)
    config = load_config(one)
    whole = estimate.trace(one, config)
    each = replace(one, tensor_parallel=2, devices=("cuda:0", "cuda:1"))
    rank = estimate.trace(each, config, 2)
    assert rank.context == whole.context // 2
    embeddings = 512 * 64 * 4
    half = (whole.weights - embeddings) / 2
    assert half <= rank.weights - embeddings <= half + 4096, "vectors are on both"
    assert 0 < rank.compute <= whole.compute
    answers = estimate.estimate(each)
    assert answers.weights == [rank.weights] * 2
    assert len(answers.runtime) == len(answers.compute) == 2
    on_host = estimate.estimate(replace(one, tensor_parallel=2))
    assert on_host.weights == [2 * rank.weights]
    assert on_host.host == 0


def test_both_estimates_count_the_same_bytes_of_adapters_for_each_rank(tmp_path: Path) -> None:
    """2 layers: q and o 64 x 64, k and v 64 x 32, gate, up and down 64 x 128; the other side of the 64 is halved."""
    folder = tiny.make("llama", tmp_path)
    small: dict[str, Any] = {"ctx_size": 32, "parallel": 1, "prefill_chunk": 8}  # the steps do not matter
    plain = Estimate(snapshot=str(folder), devices=("cuda:0", "cuda:1"), tensor_parallel=2, **small)
    adapted = replace(plain, max_loras=3, max_lora_rank=5)
    config = load_config(plain)
    exact = [estimate.trace(each, config, 2).weights for each in (plain, adapted)]
    slots = 3 * 5 * 2 * (2 * 96 + 2 * 80 + 3 * 128) * 4
    assert exact[1] - exact[0] == slots
    facts = checkpoint.read(folder)
    presets = [Preset(id="m", enable_lora=word, max_loras=3, max_lora_rank=5) for word in ("off", "on")]
    static = [static_tensor_parallel.estimate(facts, each, 2, on_host=False).weights for each in presets]
    assert [size - less for less, size in zip(*static, strict=True)] == [slots, slots]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "devices", "ngram_size", "max_loras"),
    [
        ("llama", ("cpu",), 3, 2),
        ("mixtral", ("cpu",), 0, 0),
        ("mixtral", ("cuda:0", "cuda:1"), 0, 0),
        ("qwen2_moe", ("cuda:0", "cuda:1"), 3, 2),
        ("olmoe", ("cuda:0", "cuda:1"), 3, 2),
        ("phimoe", ("cpu",), 0, 2),
        ("deepseek_v2", ("cuda:0", "cuda:1"), 3, 0),
        ("deepseek_v3", ("cpu",), 0, 2),
        ("jamba", ("cpu",), 0, 2),
        ("llama4_text", ("cuda:0", "cuda:1"), 3, 0),
        ("qwen3_next", ("cuda:0", "cuda:1"), 0, 0),
    ],
)
def test_the_static_estimate_of_ranks_is_never_below_the_exact_one(
    family: str, devices: tuple[str, ...], ngram_size: int, max_loras: int, tmp_path: Path
) -> None:
    depth = SHALLOW.get(family, {"num_hidden_layers": 4})
    folder = tiny.make(family, tmp_path, vocab_size=512, hidden_size=128, **depth)
    keys: dict[str, Any] = {"ctx_size": 128, "parallel": 2, "prefill_chunk": 32, "max_loras": max_loras}
    asked = Estimate(snapshot=str(folder), devices=devices, tensor_parallel=2, ngram_size=ngram_size, **keys)
    exact = estimate.estimate(asked)
    words: dict[str, Any] = {
        "spec_type": "ngram-simple" if ngram_size else "none",
        "enable_lora": "on" if max_loras else "off",
    }
    preset = Preset(id="m", tensor_parallel=2, **keys, **words)
    static = static_tensor_parallel.estimate(
        checkpoint.read(folder), preset, 2, on_host=devices == ("cpu",), threads=asked.threads
    )
    static = static.granted(static.kv_steps)
    for shard in range(len(exact.weights)):
        assert exact.weights[shard] <= 1.01 * static.weights[shard], "but for buffers that the model makes itself"
        assert exact.context[shard] <= static.context[shard]
        assert exact.weights[shard] + exact.compute[shard] <= static.weights[shard] + static.compute[shard]
