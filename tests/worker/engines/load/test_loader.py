"""Promises of loading: what works without copies, and what is refused by name, with the exit code that fits."""

import asyncio
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests import tiny
from tests.worker.loaded import complete_one, edit, generated, load, mapped, options, reference, serving, shard
from worker.engines.transformers.attention import kv_pool, paged
from worker.engines.transformers.device.process_group import ProcessGroup
from worker.engines.transformers.load import architectures, loader, safetensors
from worker.engines.transformers.load.loader import load_model
from worker.engines.transformers.load.snapshot import load_config, load_tokenizer
from worker.engines.transformers.load.tensor_parallel_plan import RankSlice
from worker.engines.transformers.sample.vocabulary import Vocabulary
from worker.engines.transformers.schedule.kv_cache import pool_blocks
from worker.errors import StartError
from worker.interface import EncoderInput
from worker.protocol.events import Exit
from worker.protocol.memory import BLOCK_TOKENS
from worker.protocol.snapshot_files import WEIGHTS

PROMPT = (9, 41, 70, 77, 80)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.make("llama", tmp_path / "llama")


def refused(folder: Path, **changes: Any) -> StartError:
    with pytest.raises(StartError) as error:
        asyncio.run(load(folder, **changes).close())
    assert "\n" not in str(error.value), "one line, for a person"
    assert len(str(error.value)) < 500
    return error.value


# What works


def test_a_rank_does_not_take_the_prebuilt_model_of_one_process(folder: Path) -> None:
    """It has slices of the weights, so it builds its own, which attends through the cache."""
    paged.register()
    asked = options(folder, tensor_parallel=2)
    config = load_config(asked)
    prebuilt = loader.build(asked, config, paged.SDPA)
    assert prebuilt is not None
    share = RankSlice(0, 2), ProcessGroup(0, 2, torch.device("cpu"))
    model = load_model(asked, config, paged.SDPA, lambda event: None, built=prebuilt, share=share).model
    assert model is not prebuilt.model
    assert (model.config._attn_implementation, model.training) == (paged.SDPA, False)


def test_weights_on_the_cpu_are_the_mapped_file_itself(folder: Path) -> None:
    asked = options(folder)
    stages: list[int] = []
    loaded = load_model(asked, load_config(asked), None, lambda event: stages.append(event.done))
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[0].split("-") for line in maps if line.endswith(str(folder / WEIGHTS))]
    ranges = [(int(low, 16), int(high, 16)) for low, high in mapped]
    for name, parameter in loaded.model.named_parameters():
        assert any(low <= parameter.data_ptr() < high for low, high in ranges), f"{name} was copied"
    assert stages == sorted(stages)
    assert stages[-1] == (folder / WEIGHTS).stat().st_size


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_load_ends_with_its_weights_in_memory(is_cached: bool, tmp_path: Path) -> None:
    """So that no first request waits for a disk, and what is measured then is what the model takes."""
    path = tmp_path / WEIGHTS
    save_file({"big": torch.zeros(33 << 18), "small": torch.zeros(8)}, path)
    if not is_cached:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    opened, reported = safetensors.WeightFile(path), list[int]()
    assert mapped(path)[1] == 0
    with safetensors.ReadAhead([opened]) as ahead:
        ahead.finish(reported.append)
    assert mapped(path)[1] >= path.stat().st_size
    assert reported == sorted(reported)
    assert reported[-1] == path.stat().st_size


def test_weights_in_the_page_cache_are_mapped_while_the_model_computes(tmp_path: Path) -> None:
    """The load does not wait for it, and the bytes still to be mapped are known."""
    folder = tiny.make("llama", tmp_path, hidden_size=512, intermediate_size=2048, vocab_size=4096)
    path, asked = folder / WEIGHTS, options(folder)
    loaded = load_model(asked, load_config(asked), None, lambda event: None)
    weight = sum(weight.nbytes for weight in loaded.model.parameters())
    assert mapped(path)[1] < loaded.unmapped.left == weight
    loaded.unmapped.start()
    loaded.unmapped.finish()
    assert mapped(path)[1] >= weight
    assert loaded.unmapped.left == 0


def test_weights_that_were_let_go_are_not_mapped_again(tmp_path: Path) -> None:
    path = tmp_path / WEIGHTS
    save_file({str(number): torch.zeros(1 << 20) for number in range(4)}, path)
    opened = safetensors.WeightFile(path)
    views = [view for _, view in opened.tensors()]
    unmapped = safetensors.unmapped_views([opened], [*views, torch.zeros(1 << 20)] * 1000)  # it is not soon over
    unmapped.start()
    loaded = loader.LoadedModel(None, torch.device("cpu"), torch.float32, (opened,), unmapped=unmapped)
    assert all(loaded.release_pages(view) for view in views)
    assert not loaded.release_pages(torch.zeros(8))
    unmapped.finish()
    assert mapped(path)[1] < 1 << 20


def test_files_that_are_only_copied_from_are_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / WEIGHTS
    save_file({"big": torch.zeros(33 << 18)}, path)
    opened = safetensors.WeightFile(path)
    with safetensors.ReadAhead([opened], {opened}) as ahead:
        ahead.finish(lambda done: None)
    assert mapped(path)[1] == 0


async def test_sharded_weights_give_the_same_text(folder: Path) -> None:
    model = reference(folder)
    shard(folder)
    async with serving(load(folder)) as engine:
        assert (await complete_one(engine, PROMPT, max_tokens=9)).tokens == generated(model, PROMPT, 9)


@pytest.mark.parametrize(
    ("stored", "asked", "used"),
    [
        ("bfloat16", "auto", torch.bfloat16),
        ("float16", "auto", torch.float32),
        ("bfloat16", "float32", torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
        ("float32", "auto", torch.float32),
    ],
)
def test_the_dtype_is_as_asked_or_the_checkpoints(stored: str, asked: str, used: torch.dtype, tmp_path: Path) -> None:
    folder = tiny.make("qwen3", tmp_path, dtype=stored)
    config = load_config(options(folder))
    stages: list[int] = []
    loaded = load_model(options(folder, dtype=asked), config, None, lambda event: stages.append(event.done))
    assert loaded.dtype == used
    assert stages == sorted(stages), "it went back"
    assert stages[-1] == (folder / WEIGHTS).stat().st_size
    exact = load_file(folder / WEIGHTS)
    found = dict(loaded.model.named_parameters())
    assert {parameter.dtype for parameter in found.values()} == {used}
    assert torch.equal(found["model.embed_tokens.weight"], exact["model.embed_tokens.weight"].to(used))


def test_progress_of_a_conversion_never_goes_back(tmp_path: Path) -> None:
    """Bytes that are converted and bytes that are read ahead are counted apart, and one is behind the other."""
    folder = tiny.make("qwen3", tmp_path)
    parts = shard(folder)
    reported: list[int] = []
    asked = options(folder, dtype="bfloat16")
    load_model(asked, load_config(asked), None, lambda event: reported.append(event.done))
    assert reported == sorted(reported), "it went back"
    assert len(set(reported)) > len(parts)
    assert reported[-1] == sum(part.stat().st_size for part in parts)


async def test_random_weights_need_no_files(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    answers = []
    for _ in range(2):
        async with serving(load(folder, load_format="dummy", ctx_size=64)) as engine:
            answers.append((await complete_one(engine, PROMPT, max_tokens=9)).tokens)
    assert answers[0] == answers[1]
    assert len(answers[0]) > 0


async def test_a_context_beyond_the_models_positions_is_cut_to_them(folder: Path) -> None:
    async with serving(load(folder, ctx_size=100_000)) as engine:
        assert engine.ctx_size == 256
    async with serving(load(folder, ctx_size=99)) as engine:
        assert engine.ctx_size == 99


async def test_a_vision_model_generates_text_where_the_text_class_is_built_from_a_part_of_its_configuration(
    tmp_path: Path,
) -> None:
    """Qwen3.5. transformers lists the class of the text part for the whole configuration."""
    tokenizer = tiny.make_tokenizer("qwen3")
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "initializer_range": 0.15, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model: Any = transformers.Qwen3_5ForConditionalGeneration(config)
    tiny.spread(model)
    with tiny.no_progress_bar():
        model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    async with serving(load(tmp_path, ctx_size=64, parallel=2)) as engine:
        found = await complete_one(engine, PROMPT, max_tokens=24)
    assert found.tokens == generated(model, PROMPT, 24)


def test_positions_are_those_that_a_sequence_can_use() -> None:
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096, **factors}
    phi = transformers.Phi3Config(max_position_embeddings=131072, rope_parameters=longrope)
    assert architectures.positions(phi) == 4096, "beyond it all earlier positions would turn otherwise"
    roberta = transformers.RobertaConfig(max_position_embeddings=514, pad_token_id=1)
    assert architectures.positions(roberta) == 512
    assert architectures.positions(transformers.GPT2Config(n_positions=77)) == 77
    assert architectures.positions(transformers.MambaConfig()) == 0


def test_the_pool_has_exactly_the_bytes_that_are_promised() -> None:
    config = transformers.Qwen3Config(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    shape = architectures.CacheShape.of(config)
    pool = kv_pool.KvPool(
        layers=shape.layers, kv_heads=shape.kv_heads, head_dim=shape.head_dim, rows=5, blocks=pool_blocks(5, 40),
        dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip
    # keys and values of 3 layers, 2 heads of 16, 2 bytes each: 40 tokens take three blocks of each of 5 rows
    assert pool.bytes_on(torch.device("cpu")) == 2 * 3 * 2 * 16 * 2 * 15 * BLOCK_TOKENS
    llama = transformers.LlamaConfig(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    published = 128 << 10  # Llama 3 8B in bfloat16: of a token
    answers = architectures.CacheShape.of(llama)
    assert 2 * answers.layers * answers.kv_heads * answers.head_dim * 2 == published
    gpt2 = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4)
    assert architectures.CacheShape.of(gpt2) == architectures.CacheShape(layers=2, kv_heads=4, head_dim=16)


def test_a_tokenizer_of_another_folder_may_be_named(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tiny.make_tokenizer("qwen3").save_pretrained(other)
    found: Any = load_tokenizer(options(folder, tokenizer=str(other)))
    assert found("Hello")["input_ids"] == tiny.make_tokenizer("qwen3")("Hello")["input_ids"]


async def test_all_tokens_that_end_an_answer_end_it(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[1, 217])
    edit(folder / "config.json", eos_token_id=303)
    async with serving(load(folder)) as engine:
        reported = await complete_one(engine, PROMPT, max_tokens=40)
        model = reference(folder)
        answer = generated(model, PROMPT, 40)
        ends = [answer.index(token) for token in (1, 217, 303) if token in answer]
        assert reported.tokens == answer[: min(ends, default=40)]
        assert engine._vocabulary.ends == {1, 217, 303}


@pytest.mark.parametrize("architecture", ["llama", "bart"])
@pytest.mark.parametrize(
    "given",
    [
        lambda answer: {"suppress_tokens": [answer[0], answer[2]]},
        lambda answer: {"begin_suppress_tokens": [answer[0]]},
        lambda answer: {"bad_words_ids": [[answer[1]], [1]]},  # 1 ends an answer
        lambda answer: {"forced_bos_token_id": 77},
        lambda answer: {
            "forced_bos_token_id": 77,
            "begin_suppress_tokens": [answer[0]],
            "suppress_tokens": [answer[1]],
        },
    ],
)
async def test_tokens_that_the_checkpoint_forbids_or_forces_are_as_in_transformers(
    tmp_path: Path, architecture: str, given: Callable[[list[int]], dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    tiny.make(architecture, tmp_path)
    before = generated(reference(tmp_path), PROMPT, 12)
    edit(tmp_path / "generation_config.json", **given(before))
    expected = generated(reference(tmp_path), PROMPT, 12)
    async with serving(load(tmp_path)) as engine:
        assert (await complete_one(engine, PROMPT, max_tokens=12)).tokens == expected
    # a prompt of several tokens comes before the token that would be forced
    is_kept = architecture == "llama" and given(before).keys() == {"forced_bos_token_id"}
    assert (expected == before) is is_kept
    assert "has no effect" not in caplog.text


@pytest.mark.parametrize("architecture", ["llama", "bart"])
@pytest.mark.parametrize("ngram_size", [0, 2])
async def test_a_token_that_the_checkpoint_forces_at_the_limit_is_as_in_transformers(
    tmp_path: Path, architecture: str, ngram_size: int
) -> None:
    """Alone and in a batch of requests with other limits, with and without drafts."""
    tiny.make(architecture, tmp_path)
    edit(tmp_path / "generation_config.json", forced_eos_token_id=[303, 1], forced_bos_token_id=77)
    model = reference(tmp_path)
    expected = {count: [*generated(model, PROMPT, count), 1] for count in (1, 2, 7, 12)}
    assert [len(tokens) for tokens in expected.values()] == list(expected), "no answer ends before its limit"
    async with serving(load(tmp_path, ngram_size=ngram_size)) as engine:
        alone = [await complete_one(engine, PROMPT, max_tokens=count) for count in expected]
        together = await asyncio.gather(*(complete_one(engine, PROMPT, max_tokens=count) for count in expected))
    for answers in (alone, together):
        assert [answer.tokens for answer in answers] == list(expected.values())
        assert {answer.finish for answer in answers} == {"length"}, "the limit has ended them"


def test_what_the_checkpoint_sets_without_effect_is_logged_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer, config = load_tokenizer(options(folder)), transformers.AutoConfig.from_pretrained(folder)
    path = folder / "generation_config.json"
    edit(
        path,
        no_repeat_ngram_size=3,
        num_beams=1,
        typical_p=1.0,
        eta_cutoff=0.0,
        bad_words_ids=[[5]],
        suppress_tokens=[5, 10**9, "x"],
        min_length=None,
    )
    assert Vocabulary(tokenizer, config, folder).rules.never == {5}
    assert caplog.text == ""
    edit(path, encoder_no_repeat_ngram_size=3, typical_p=0.9, eta_cutoff=0.1, bad_words_ids=[[5, 6], [7], [[8]], 9])
    assert Vocabulary(tokenizer, config, folder).rules.never == {5, 7}
    unused = "encoder_no_repeat_ngram_size, typical_p, eta_cutoff, bad_words_ids of several tokens"
    assert [record.message for record in caplog.records] == [f"generation_config.json: {unused} has no effect"]


CODE = """
from transformers import LlamaConfig, LlamaModel


class BrandnewConfig(LlamaConfig):
    model_type = "brandnew"


class BrandnewModel(LlamaModel):
    config_class = BrandnewConfig
"""


async def test_code_in_a_snapshot_runs_only_when_trusted_and_never_with_our_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    folder = tiny.make("llama-embed", tmp_path / "model")
    async with serving(load(folder)) as engine:
        expected = await engine.embed([EncoderInput(PROMPT)])
    (folder / "code.py").write_text(CODE)
    names = {"AutoConfig": "code.BrandnewConfig", "AutoModel": "code.BrandnewModel"}
    edit(folder / "config.json", model_type="brandnew", auto_map=names)
    assert "trust-remote-code" in str(refused(folder))
    async with serving(load(folder, trust_remote_code=True)) as engine:
        assert (await engine.embed([EncoderInput(PROMPT)]))[0] == pytest.approx(expected[0], abs=1e-6)
    assert "brandnew" in str(refused(folder, trust_remote_code=True, task="generate"))


@pytest.mark.parametrize(
    "classes", [{"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, "evil.Model"], ids=["named", "odd"]
)
def test_a_native_class_is_preferred_to_code_of_the_snapshot(folder: Path, classes: Any) -> None:
    edit(folder / "config.json", auto_map=classes)
    (folder / "evil.py").write_text("raise SystemExit('this must not run')")
    for trusted in (False, True):
        config = load_config(options(folder, trust_remote_code=trusted))
        assert type(config) is transformers.LlamaConfig
        loaded = load_model(options(folder, trust_remote_code=trusted), config, None, lambda event: None)
        assert type(loaded.model) is transformers.LlamaForCausalLM


def test_pages_of_the_file_that_the_model_does_not_use_are_let_go(tmp_path: Path) -> None:
    """Experts are stacked into new tensors; the file's own would count twice."""
    folder = tiny.make("mixtral", tmp_path, hidden_size=256, intermediate_size=1024, vocab_size=512)
    asked = options(folder)
    loaded = load_model(asked, load_config(asked), None, lambda event: None)
    experts = sum(each.nbytes for name, each in loaded.model.named_parameters() if "experts" in name)
    assert 0 < mapped(folder / WEIGHTS)[1] <= (folder / WEIGHTS).stat().st_size - 0.9 * experts


# What is refused


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"task": "classify"}, "classify"),
        ({"attention": "xformers"}, "none of auto, sdpa, eager; set attention = auto"),
        ({"parallel": 0}, "parallel"),
        ({"prefill_chunk": 0}, "prefill_chunk"),
        ({"load_format": "pt"}, "pt"),
        ({"dtype": "int8"}, "int8"),
        ({"config_override": "[1]"}, "config-override"),
        ({"config_override": "{"}, "config-override"),
    ],
)
def test_an_option_that_means_nothing_is_named(folder: Path, changes: dict[str, Any], word: str) -> None:
    error = refused(folder, **changes)
    assert word in str(error)
    assert error.exit is Exit.USAGE


def test_devices_that_are_not_here_are_named(folder: Path) -> None:
    assert "cuda:7" in str(refused(folder, devices=("cuda:7",)))
    assert "for each of 2 devices" in str(refused(folder, devices=("cpu", "cpu")))


Damage = Callable[[Path], object]


def changed(**changes: Any) -> Damage:
    """Changes config.json."""
    return lambda folder: edit(folder / "config.json", **changes)


def without(*names: str) -> Damage:
    """Deletes files."""

    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


def weights(change: Callable[[bytes], bytes]) -> Damage:
    """Changes the content of the weight file."""
    return lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


def _pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def _without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def _tokenizer_code(folder: Path) -> None:
    """As Kimi-K2 and the first Qwen."""
    (folder / "tokenizer.json").unlink()
    auto_map = {"AutoTokenizer": ["tokenization_mine.MineTokenizer", None]}
    edit(folder / "tokenizer_config.json", tokenizer_class="MineTokenizer", auto_map=auto_map)


def _scaled(folder: Path) -> None:
    """As in repositories that state their method in hf_quant_config.json only."""
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(folder / WEIGHTS)
    stored = {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.tensor(2.0)}
    save_file({**tensors, **stored}, folder / WEIGHTS, metadata={"format": "pt"})


def _scaled_by_row(folder: Path) -> None:
    """As bitsandbytes in 8 bits."""
    name = "model.layers.0.mlp.up_proj"
    tensors = load_file(folder / WEIGHTS)
    stored = {f"{name}.weight": tensors[f"{name}.weight"].to(torch.int8), f"{name}.SCB": torch.ones(128)}
    save_file({**tensors, **stored}, folder / WEIGHTS, metadata={"format": "pt"})


_quantized = changed(quantization_config={"quant_method": "gptq", "bits": 4})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without("config.json"), ["config.json"]),
        (without(WEIGHTS), [WEIGHTS]),
        (_pickled, ["pickled", "safetensors"]),
        (without("tokenizer.json", "tokenizer_config.json"), ["tokenizer"]),
        (_tokenizer_code, ["tokenizer", "code in the snapshot", "trust-remote-code = on"]),
        (changed(model_type="brandnew", architectures=["BrandnewForCausalLM"]), ["brandnew"]),
        (
            changed(model_type="brandnew", auto_map={"AutoConfig": "code.BrandnewConfig"}),
            ["brandnew", "trust-remote-code"],
        ),
        (changed(model_type=None), ["names no model_type"]),
        (_without_a_tensor, ["model.layers.1.self_attn.q_proj.weight", "fetch the snapshot again"]),
        (changed(intermediate_size=96), ["mlp.down_proj.weight is [64, 128] in the file, [64, 96] by config.json"]),
        (changed(num_attention_heads="many"), ["config.json", "llama"]),
        (
            changed(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
            ["config.json", "llama", "KeyError: 'spiral'"],
        ),
        (changed(pad_token_id=99999), ["config.json", "llama", "Padding_idx must be within num_embeddings"]),
        (_quantized, ["gptq", "pip install"]),
        (_scaled_by_row, ["(model.layers.0.mlp.up_proj.SCB)", "config.json has no quantization_config"]),
        (_scaled, ["(model.layers.0.mlp.up_proj.weight_scale)", "config.json has no quantization_config"]),
    ],
)
def test_the_error_for_an_unusable_snapshot_names_the_reason(folder: Path, damage: Damage, words: list[str]) -> None:
    damage(folder)
    error = refused(folder)
    assert error.exit is Exit.UNUSABLE
    for word in words:
        assert word in str(error)


def _without_a_shard(folder: Path) -> None:
    shard(folder)[1].unlink()


def _shard_elsewhere(folder: Path) -> None:
    shard(folder)
    edit(folder / "model.safetensors.index.json", weight_map={"a": "../../etc/passwd"})


@pytest.mark.parametrize(
    "damage",
    [
        weights(lambda content: content[:-1000]),
        weights(lambda content: b"\x10\0\0"),
        weights(lambda content: struct.pack("<Q", 1 << 60) + b"{}"),
        weights(lambda content: content[:9] + b"\xff\xff\xff" + content[12:]),
        _without_a_shard,
        _shard_elsewhere,
        lambda folder: (folder / "config.json").write_text('{"model_type": "lla'),
    ],
    ids=["cut short", "header cut", "absurd header", "garbled header", "missing shard", "shard elsewhere", "config"],
)
def test_damaged_files_may_be_fetched_again(folder: Path, damage: Damage) -> None:
    damage(folder)
    assert refused(folder).exit is Exit.DAMAGED


@pytest.mark.parametrize(
    ("model", "task", "words"),
    [
        (
            transformers.BertConfig(vocab_size=512, hidden_size=32, num_hidden_layers=1),
            "generate",
            ["'bert' is an encoder", "task = embed"],
        ),
        (transformers.WhisperConfig(), "generate", ["whisper", "text"]),
        (transformers.ViTConfig(), "generate", ["vit", "text"]),
        (transformers.Pix2StructConfig(), "generate", ["pix2struct", "text"]),
        (transformers.BartConfig(vocab_size=512), "embed", ["bart", "task = generate"]),
    ],
)
def test_the_error_for_a_task_that_a_family_lacks_names_the_family(
    folder: Path, model: Any, task: str, words: list[str]
) -> None:
    model.save_pretrained(folder)
    error = refused(folder, task=task)
    assert error.exit is Exit.UNUSABLE
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize("kind", ["aquila", "baichuan", "qwen", "chatglm"])
def test_a_family_that_transformers_dropped_names_the_way(folder: Path, kind: str) -> None:
    edit(
        folder / "config.json",
        model_type=kind,
        auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.M"},
    )
    assert kind in str(refused(folder))
    assert "trust-remote-code = on" in str(refused(folder))
    edit(folder / "config.json", model_type=kind, auto_map=None)
    error = refused(folder)
    assert error.exit is Exit.UNUSABLE
    for word in (repr(kind), "auto_map", "trust-remote-code = on"):
        assert word in str(error), "the error for a copy without its code names the missing key"


def test_a_quantisation_that_contradicts_the_checkpoint_is_refused(folder: Path) -> None:
    assert "not quantized" in str(refused(folder, quantization="awq"))
    _quantized(folder)
    assert "gptq" in str(refused(folder, quantization="none"))


def test_an_override_with_sizes_that_do_not_fit_is_refused_with_a_way_out(tmp_path: Path) -> None:
    """torch raises a RuntimeError for them in the first step. It is as final as a ValueError."""
    folder = tiny.make("qwen3_moe", tmp_path)
    with pytest.raises(StartError, match=r"'qwen3_moe' does not run .* out of range; if no config-override") as caught:
        load(folder, config_override='{"num_experts_per_tok": 9}')
    assert caught.value.exit is Exit.UNUSABLE


def test_a_kernel_that_the_first_step_cannot_load_is_named_with_a_way_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As fp8's on accelerators: transformers gets it from the hub, which workers do not use."""

    def forward(self: Any, **arguments: Any) -> None:
        raise ImportError("finegrained-fp8 kernel unavailable")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    error = str(refused(folder, warm_up=True))
    assert "finegrained-fp8 kernel unavailable" in error
    assert "hub cache" in error


def test_an_odd_offset_is_read_correctly(tmp_path: Path) -> None:
    """The format does not promise alignment."""
    numbers = torch.arange(5, dtype=torch.float32)
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
            "b": {"dtype": "F32", "shape": [5], "data_offsets": [3, 23]},
            "c": {"dtype": "F32", "shape": [0, 4], "data_offsets": [23, 23]},
        }
    ).encode()
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\1\2\3" + numbers.numpy().tobytes())
    found = dict(safetensors.WeightFile(path).tensors())
    assert found["a"].tolist() == [1, 2, 3]
    assert found["b"].tolist() == numbers.tolist()
    assert found["c"].shape == (0, 4)


def test_a_file_larger_than_main_memory_is_mapped(tmp_path: Path) -> None:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kilobytes = {name.rstrip(":"): int(size) for name, size, *_ in lines}
    size = 2 * 1024 * (kilobytes["MemTotal"] + kilobytes["SwapTotal"])
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (tmp_path / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)  # sparse
    [(name, tensor)] = safetensors.WeightFile(tmp_path / WEIGHTS).tensors()
    assert (name, tensor.nbytes, int(tensor[-1])) == ("w", size, 0)
