"""Adapters in a running batch: each sequence's greedy text is that of PEFT's model, in any batch."""

import asyncio
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import lora, tiny
from tests.worker.loaded import (
    DEADLINE,
    CollectedChoice,
    complete_one,
    complete_preempting,
    complete_until,
    generated,
    generation,
    load,
    reference,
    serving,
    work_of,
)
from tests.worker.scheduled import check_scheduler
from worker.engines.transformers.engine import TransformersEngine
from worker.engines.transformers.load import lora_files
from worker.engines.transformers.load.lora import LoraAdapters, linear_layers
from worker.engines.transformers.schedule.lora_slots import AppliedAdapter, LoraAdapter
from worker.engines.transformers.schedule.scheduler import Segment
from worker.engines.transformers.schedule.sequence import Sequence
from worker.errors import AdapterNotFound, StartError, UnsupportedByModel, UnusableAdapter
from worker.interface import AdapterChoice
from worker.protocol.argv import AdapterSource, encode_adapters

pytestmark = pytest.mark.slow
NEW = 20
LENGTHS = (5, 23, 40)
SETTINGS: dict[str, dict[str, Any]] = {
    "first": {"r": 4, "lora_alpha": 8},
    "second": {"seed": 1, "r": 6, "lora_alpha": 3, "use_rslora": True, "rank_pattern": {"0.*": 2}},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2 with biases": ("qwen2", {}),
    "gpt2 with weights that lie across": ("gpt2", {}),
    "t5": ("t5", {"seed": 2}),
}
Expected = dict[tuple[str, tuple[int, ...]], list[int]]


@pytest.fixture(scope="module", params=FAMILIES)
def snapshot(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = FAMILIES[request.param]
    return tiny.make(family, tmp_path_factory.mktemp("snapshot"), **overrides)


@pytest.fixture(scope="module")
def adapters(snapshot: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: lora.make(snapshot, folder / name, **settings) for name, settings in SETTINGS.items()}


def sources(adapters: dict[str, Path], **changes: Any) -> list[AdapterSource]:
    return [AdapterSource(name=name, path=str(path), **changes) for name, path in adapters.items()]


@pytest.fixture(scope="module")
def expected(snapshot: Path, adapters: dict[str, Path]) -> Expected:
    """By adapter (none: the model as it is) and prompt."""
    source = random.Random(3)
    prompts = [tuple(source.randrange(2, 500) for _ in range(length)) for length in LENGTHS]
    models = {"": reference(snapshot), **{name: lora.adapted(snapshot, path) for name, path in adapters.items()}}
    return {(name, prompt): generated(model, prompt, NEW) for name, model in models.items() for prompt in prompts}


def start(snapshot: Path, adapters: dict[str, Path], **changes: Any) -> TransformersEngine:
    settings = {"ctx_size": 128, "parallel": 4, "prefill_chunk": 16, "max_loras": 2, **changes}
    return load(snapshot, adapters=encode_adapters(sources(adapters)), **settings)


@pytest.fixture(scope="module")
def engine(snapshot: Path, adapters: dict[str, Path]) -> Iterator[TransformersEngine]:
    engine = start(snapshot, adapters)
    yield engine
    asyncio.run(engine.close())


async def test_each_sequence_of_a_batch_answers_as_its_adapter_alone(
    engine: TransformersEngine, expected: Expected
) -> None:
    """Base and adapters side by side, joining, leaving and coming again behind prefixes that others left."""
    assert len({tuple(answer) for answer in expected.values()}) > len(expected) - 2, "adapters change the text"
    source = random.Random(5)

    async def talk(name: str, prompt: tuple[int, ...], count: int, leave_after: int | None) -> None:
        request = generation(prompt, max_tokens=count, adapter=AdapterChoice(name) if name else None)
        tokens, whole = await complete_until(engine, request, leave_after), expected[name, prompt]
        assert tokens == whole[: len(tokens)]
        assert leave_after is not None or tokens == whole[:count]

    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
        for name, prompt in [*expected, *random.Random(4).sample(list(expected), len(expected))]:
            count = source.choice((3, 9, NEW, NEW))
            leave = source.choice((None, None, source.randrange(1, count + 1)))
            tasks.create_task(talk(name, prompt, count, leave))
            for _ in range(source.randrange(30)):
                await asyncio.sleep(0)


def test_compressed_keys_are_expanded_with_the_adapter_of_their_sequence(tmp_path: Path) -> None:
    """DeepSeek's layer for that sees the cache of all sequences, and not the tokens of the step."""
    snapshot = tiny.make("deepseek_v2", tmp_path / "m")
    layers = ["kv_b_proj", "q_b_proj"]
    paths = {
        name: lora.make(snapshot, tmp_path / name, seed=seed, target_modules=layers) for seed, name in enumerate("ab")
    }
    engine = start(snapshot, paths, max_lora_rank=4)
    backend = work_of(engine)._backend
    assert backend.adapters is not None
    batch = []
    for row, name in enumerate(["a", "", "b", "a"]):
        adapter = backend.adapters.find(AdapterChoice(name))
        if adapter is not None:
            backend.adapters.slots.acquire(adapter.adapter)
        tokens = list(range(3, 9 + row))
        sequence = Sequence(row, len(tokens) - 1, tokens, limit=1, ends=frozenset(), adapter=adapter)
        backend.runner.run((Segment(sequence, row, 0, len(tokens) - 1),))
        batch.append(Segment(sequence, row, len(tokens) - 1, 1))
    alone = torch.cat([backend.runner.run((segment,)) for segment in batch])
    torch.testing.assert_close(backend.runner.run(tuple(batch)), alone)
    asyncio.run(engine.close())


async def test_preempted_requests_with_adapters_answer_the_same_with_one_slot(
    snapshot: Path, adapters: dict[str, Path], expected: Expected
) -> None:
    async with serving(start(snapshot, adapters, max_loras=1, max_cpu_loras=1)) as engine:
        async with asyncio.timeout(DEADLINE):
            wanted = [generation(prompt, max_tokens=NEW, adapter=AdapterChoice(name)) for name, prompt in expected]
            reported = await asyncio.gather(*(complete_preempting(engine, request) for request in wanted))
        assert reported == list(expected.values())
        check_scheduler(work_of(engine)._scheduler)


# What a name stands for


@pytest.fixture(scope="module")
def one(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lora.make(llama, tmp_path_factory.mktemp("adapter") / "one")


PROMPT = tuple(range(20, 60))


async def test_cached_blocks_of_an_adapter_serve_no_other_adapter(llama: Path, one: Path) -> None:
    async with serving(load(llama, max_loras=1, adapters=encode_adapters(sources({"one": one})))) as engine:
        plain = await complete_one(engine, PROMPT, max_tokens=NEW)
        adapted = await complete_one(engine, PROMPT, max_tokens=NEW, adapter=AdapterChoice("one"))
        halved = await complete_one(engine, PROMPT, max_tokens=NEW, adapter=AdapterChoice("one", scale=0.5))
        again = await complete_one(engine, PROMPT, max_tokens=NEW, adapter=AdapterChoice("one"))
    assert [each.cached_tokens for each in (plain, adapted, halved, again)] == [0, 0, 0, 32]
    assert len({tuple(each.tokens) for each in (plain, adapted, halved)}) == 3
    assert again.tokens == adapted.tokens


async def test_an_adapter_is_chosen_by_name_by_number_or_by_default_and_none_by_an_empty_name(
    llama: Path, one: Path
) -> None:
    known = encode_adapters(sources({"one": one}))
    async with serving(load(llama, max_loras=2, adapters=known, default_adapter="one")) as engine:
        adapted = (await complete_one(engine, PROMPT, max_tokens=NEW, adapter=AdapterChoice("one"))).tokens
        plain = (await complete_one(engine, PROMPT, max_tokens=NEW, adapter=AdapterChoice())).tokens
        assert adapted != plain
        for choice in (None, AdapterChoice(number=0)):
            assert (await complete_one(engine, PROMPT, max_tokens=NEW, adapter=choice)).tokens == adapted
        assert (
            await complete_one(engine, PROMPT, max_tokens=NEW, adapter=AdapterChoice("one", scale=0.0))
        ).tokens == plain
        with pytest.raises(AdapterNotFound, match="did you mean one"):
            await complete_one(engine, PROMPT, adapter=AdapterChoice("onee"))
        with pytest.raises(AdapterNotFound, match="no adapter 1"):
            await complete_one(engine, PROMPT, adapter=AdapterChoice(number=1))


async def test_an_update_holds_from_the_next_request_on(llama: Path, one: Path, tmp_path: Path) -> None:
    other = lora.make(llama, tmp_path / "other", seed=9)
    async with serving(load(llama, max_loras=1, adapters=encode_adapters(sources({"a": one})))) as engine:
        before = (await complete_one(engine, PROMPT, max_tokens=NEW, adapter=AdapterChoice("a"))).tokens
        runs = engine.generate(generation(PROMPT, max_tokens=NEW, adapter=AdapterChoice("a")))
        reported = [delta async for delta in _until_first(runs)]
        assert await engine.set_adapters(sources({"a": other})) == {}
        after = complete_one(engine, PROMPT, max_tokens=NEW, adapter=AdapterChoice("a"))
        rest = [delta async for delta in runs]
        assert [token for delta in [*reported, *rest] for token in delta.tokens] == before
        assert (await after).tokens == generated(lora.adapted(llama, other), PROMPT, NEW)
        assert await engine.set_adapters([]) == {}
        with pytest.raises(AdapterNotFound):
            await complete_one(engine, PROMPT, adapter=AdapterChoice("a"))


async def _until_first(stream: Any) -> Any:
    yield await anext(stream)


async def test_changed_adapter_files_end_their_request_only(llama: Path, one: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(one, tmp_path / "mine")
    known = encode_adapters(sources({"one": one, "mine": folder}))
    async with serving(load(llama, max_loras=1, max_cpu_loras=1, adapters=known)) as engine:
        await complete_one(
            engine, PROMPT, max_tokens=1, adapter=AdapterChoice("one")
        )  # its file is open now, the other's not
        (folder / lora_files.CONFIG).write_text("{}")
        plain = complete_one(engine, PROMPT, max_tokens=NEW)
        results = await asyncio.gather(
            complete_one(engine, PROMPT, adapter=AdapterChoice("mine")), plain, return_exceptions=True
        )
        assert isinstance(results[0], UnusableAdapter)
        assert isinstance(results[1], CollectedChoice)


@pytest.mark.parametrize("replaced", [False, True])
async def test_an_adapter_is_not_read_from_an_open_file_with_other_content(
    llama: Path, one: Path, tmp_path: Path, *, replaced: bool
) -> None:
    """A file that is replaced keeps its content while it is open; one that is written to in place does not."""
    folder, other = shutil.copytree(one, tmp_path / "mine"), lora.make(llama, tmp_path / "other", seed=9)
    weights = folder / lora_files.WEIGHTS
    async with serving(
        load(llama, max_loras=1, adapters=encode_adapters(sources({"one": one, "a": folder})))
    ) as engine:
        before = await complete_one(engine, PROMPT, max_tokens=NEW, adapter=AdapterChoice("a"))
        await complete_one(engine, PROMPT, max_tokens=1, adapter=AdapterChoice("one"))  # takes the slot
        if replaced:
            weights.unlink()
        weights.write_bytes((other / lora_files.WEIGHTS).read_bytes())
        after = complete_one(engine, PROMPT, max_tokens=NEW, adapter=AdapterChoice("a"))
        if replaced:
            assert (await after).tokens == before.tokens
        else:
            with pytest.raises(UnusableAdapter, match="has changed since 'a' was registered"):
                await after


async def test_an_update_reads_files_again_that_have_changed(llama: Path, one: Path, tmp_path: Path) -> None:
    folder, other = shutil.copytree(one, tmp_path / "mine"), lora.make(llama, tmp_path / "other", seed=9)
    async with serving(load(llama, max_loras=1, adapters=encode_adapters(sources({"a": folder})))) as engine:
        await complete_one(engine, PROMPT, max_tokens=1, adapter=AdapterChoice("a"))
        shutil.rmtree(folder)
        shutil.copytree(other, folder)
        assert await engine.set_adapters(sources({"a": folder})) == {}
        after = await complete_one(engine, PROMPT, max_tokens=NEW, adapter=AdapterChoice("a"))
        assert after.tokens == generated(lora.adapted(llama, other), PROMPT, NEW)


async def test_a_request_that_waits_for_a_slot_while_its_adapter_is_updated_keeps_the_old_files(
    llama: Path, one: Path, tmp_path: Path
) -> None:
    folder, other = shutil.copytree(one, tmp_path / "mine"), lora.make(llama, tmp_path / "other", seed=9)
    known = sources({"one": one, "a": folder})
    async with serving(load(llama, ctx_size=256, max_loras=1, adapters=encode_adapters(known))) as engine:
        running = engine.generate(generation(PROMPT, max_tokens=200, adapter=AdapterChoice("one")))
        await anext(running)
        waiting = asyncio.create_task(complete_one(engine, PROMPT, max_tokens=NEW, adapter=AdapterChoice("a")))
        await asyncio.sleep(0)
        shutil.rmtree(folder)
        shutil.copytree(other, folder)
        assert await engine.set_adapters(known) == {}
        await running.aclose()
        assert (await waiting).tokens == generated(lora.adapted(llama, one), PROMPT, NEW)


async def test_the_slot_of_a_pinned_adapter_is_free_once_it_is_unregistered(llama: Path, one: Path) -> None:
    pinned = encode_adapters(sources({"a": one}, pinned=True))
    async with serving(load(llama, max_loras=1, adapters=pinned)) as engine:
        await complete_one(engine, PROMPT, max_tokens=1, adapter=AdapterChoice("a"))
        assert await engine.set_adapters(sources({"b": one})) == {}
        async with asyncio.timeout(DEADLINE):
            await complete_one(engine, PROMPT, max_tokens=1, adapter=AdapterChoice("b"))


async def test_the_error_without_adapter_slots_names_the_option(llama: Path, one: Path) -> None:
    async with serving(load(llama)) as engine:
        assert (await complete_one(engine, PROMPT, max_tokens=1, adapter=AdapterChoice())).tokens
        with pytest.raises(UnsupportedByModel, match="enable-lora = on"):
            await complete_one(engine, PROMPT, adapter=AdapterChoice("one"))
        with pytest.raises(UnsupportedByModel, match="enable-lora = on"):
            await engine.set_adapters(sources({"one": one}))


# Which files can be used


def problem(llama: Path, folder: Path) -> str:
    adapters = LoraAdapters(reference(llama), slots=1, lora_rank=4, copies=0, device=torch.device("cpu"))
    return adapters.update([AdapterSource(name="x", path=str(folder))]).get("x", "")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "whole layers of its own"),
        ({"bias": "all"}, "trained biases"),
        ({"peft_type": "LOHA"}, "'LOHA' are not supported"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "no linear layers, as those of experts"),
        ({"init_lora_weights": "pissa"}, "changes the model's own weights"),
        ({"something_new": 1}, "something_new is set"),
        ({"r": 3}, "has rank 4, and the rank in adapter_config.json is 3"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern"),
        ({"lora_alpha": None}, "states no r or lora_alpha"),
    ],
)
def test_the_error_for_other_kinds_of_adapters_names_the_kind(
    llama: Path, one: Path, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    folder = shutil.copytree(one, tmp_path / "mine")
    config = json.loads((folder / lora_files.CONFIG).read_text())
    (folder / lora_files.CONFIG).write_text(json.dumps(config | changes))
    assert says in problem(llama, folder)
    assert not problem(llama, one)


def test_a_router_that_is_a_linear_layer_has_no_adapter(tmp_path: Path) -> None:
    snapshot = tiny.make("phimoe", tmp_path / "m")
    attention = lora.make(snapshot, tmp_path / "attention", target_modules=["q_proj", "o_proj"])
    assert not problem(snapshot, attention)
    found = problem(snapshot, lora.make(snapshot, tmp_path / "all"))
    assert "layers.0.mlp.router is a layer that does not support adapters" in found


def test_files_that_are_missing_damaged_or_of_another_model_are_refused(llama: Path, one: Path, tmp_path: Path) -> None:
    assert "has no adapter_config.json" in problem(llama, tmp_path)
    folder = shutil.copytree(one, tmp_path / "cut")
    weights = folder / lora_files.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "cannot be read" in problem(llama, folder)
    weights.unlink()
    (folder / "adapter_model.bin").write_bytes(b"")
    assert "pickle" in problem(llama, folder)
    wider = tiny.make("llama", tmp_path / "wide", hidden_size=32)
    assert "is for another model" in problem(wider, one)
    assert "there is no layer" in problem(tiny.make("gpt2", tmp_path / "gpt2"), one)


def test_ranks_above_the_slots_and_layers_that_see_other_rows_are_refused(llama: Path, tmp_path: Path) -> None:
    assert "raise max-lora-rank" in problem(llama, lora.make(llama, tmp_path / "high", r=5))
    head = lora.make(llama, tmp_path / "head", target_modules=["lm_head"])
    assert "lm_head" in problem(llama, head)
    embedding = lora.make(llama, tmp_path / "embedding", target_modules=["embed_tokens"])
    assert "embeddings" in problem(llama, embedding)


def test_experts_have_no_adapters_and_the_layers_around_them_do(tmp_path: Path) -> None:
    found = linear_layers(reference(tiny.make("qwen3_moe", tmp_path)))
    assert {name.split(".")[-1] for name in found} >= {"q_proj", "o_proj"}
    assert not any("experts" in name for name in found)


def test_an_embedder_has_no_adapters(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="enable-lora = off"):
        load(tiny.make("bert-embed", tmp_path), max_loras=1)


# What they cost


def test_the_bytes_of_slots_follow_from_their_shapes(llama: Path) -> None:
    """2 layers: q and o 64 x 64, k and v 64 x 32, gate, up and down 64 x 128; float32."""
    adapters = LoraAdapters(reference(llama), slots=3, lora_rank=5, copies=0, device=torch.device("cpu"))
    assert adapters.bytes == 3 * 5 * 2 * (2 * 128 + 2 * 96 + 3 * 192) * 4


def test_a_step_with_an_adapter_that_is_in_no_slot_loads_it(llama: Path) -> None:
    adapters = LoraAdapters(reference(llama), slots=2, lora_rank=4, copies=0, device=torch.device("cpu"))
    loaded, other = adapters.pretend(), AppliedAdapter(LoraAdapter(1, "", ""))
    adapters.slots.acquire(other.adapter)
    assert not adapters.has_loads([None, loaded])
    assert adapters.has_loads([loaded, other])
