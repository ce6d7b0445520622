"""The exact estimate against the real thing: the same model loaded, the same cache made, the same steps taken."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from router.config.presets import Preset
from router.memory import checkpoint
from router.memory.checkpoint_facts import Checkpoint
from router.memory.estimate import beside_steps, from_trace
from router.memory.segments import compute_bytes, kv_range, weight_bytes
from router.memory.sharding import Choice, static_estimate
from router.planner.ledger import HOST, LOCAL, DeviceId
from tests import tiny
from tests.rankers import ranker
from tests.router.checkpoints import most_context
from tests.worker.allocated import allocated
from tests.worker.families import FAMILIES, SHALLOW
from tests.worker.loaded import edit
from worker.engines.transformers import load_encoder
from worker.engines.transformers.attention import cpu_linear
from worker.engines.transformers.load import architectures, loader, sentence_transformers_config
from worker.engines.transformers.load.snapshot import is_cross_encoder, is_embedder, load_config, model_class
from worker.engines.transformers.loop import requests
from worker.engines.transformers.run import backends
from worker.engines.transformers.run.cuda_graphs import graph_shapes
from worker.engines.transformers.sample import sampler
from worker.errors import StartError
from worker.estimate import estimate, largest_steps, meta_model, quantized
from worker.estimate.largest_steps import GenerationSteps
from worker.estimate.memory_tracer import LiveBytes, Step, live_bytes, peak_bytes
from worker.interface import EncoderInput
from worker.protocol import memory
from worker.protocol.argv import Estimate
from worker.protocol.events import Estimated, Exit

pytestmark = pytest.mark.slow

MEDIUM = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "vocab_size": 4000, "initializer_range": 0.02,
}  # fmt: skip
"""About 30 MB in float32."""
CPU = largest_steps.CPU
MIB = 1 << 20

OF_OTHER_SIZES = ("llama with a head for each query", "mistral without a window", "qwen2 with windows in some layers")
EVERY: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in tiny.FAMILIES},
    **{name: FAMILIES[name] for name in OF_OTHER_SIZES},
}


def llama(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": 128256, "max_position_embeddings": 8192, "dtype": "bfloat16",
        "tie_word_embeddings": False, **changes,
    }  # fmt: skip


PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen2.5 0.5B": llama(24, 896, 4864, 14, 2, model_type="qwen2", architectures=["Qwen2ForCausalLM"]),
    "Llama 3 70B": llama(80, 8192, 28672, 64, 8),
    "Mixtral 8x7B": llama(
        32, 4096, 14336, 32, 8, model_type="mixtral", architectures=["MixtralForCausalLM"], num_local_experts=8,
        num_experts_per_tok=2, sliding_window=None,
    ),
    "Gemma 2 9B": llama(
        42, 3584, 14336, 16, 8, model_type="gemma2", architectures=["Gemma2ForCausalLM"], head_dim=256,
        sliding_window=4096, query_pre_attn_scalar=256, vocab_size=256000,
    ),
    "DeepSeek-V2 Lite": llama(
        27, 2048, 10944, 16, 16, model_type="deepseek_v2", architectures=["DeepseekV2ForCausalLM"],
        moe_intermediate_size=1408, n_shared_experts=2, n_routed_experts=64, num_experts_per_tok=6,
        first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=128,
        v_head_dim=128, topk_method="greedy",
    ),
    "Mamba 2.8B": {
        "model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 2560, "num_hidden_layers": 64,
        "state_size": 16, "vocab_size": 50280,
    },
    "T5 3B": {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 1024, "d_kv": 128,
        "d_ff": 16384, "num_layers": 24, "num_heads": 32, "n_positions": 512, "decoder_start_token_id": 0,
        "is_encoder_decoder": True, "vocab_size": 32128,
    },
    "BERT large": {
        "model_type": "bert", "architectures": ["BertModel"], "hidden_size": 1024, "intermediate_size": 4096,
        "num_hidden_layers": 24, "num_attention_heads": 16, "max_position_embeddings": 512, "vocab_size": 30522,
    },
}  # fmt: skip


def options(snapshot: Path, **settings: Any) -> Estimate:
    return Estimate(snapshot=str(snapshot), **settings)


def measured(chosen: Estimate) -> tuple[int, int, int]:
    """Bytes of weights, of context, and of the peak of the largest steps, of a model in memory."""
    config = load_config(chosen)
    scores = is_cross_encoder(chosen, config)
    embeds = scores or is_embedder(chosen, config)
    loaded = loader.load_model(chosen, config, None, lambda progress: None)
    ctx_size = requests.context_size(chosen, architectures.positions(config))
    weights = meta_model.tensor_bytes(loaded.model)
    if embeds:
        folder = Path(chosen.snapshot)
        found = None if scores else sentence_transformers_config.read(folder)
        encoder, _ = load_encoder.make_encoder(loaded.model, CPU, folder, found, pad=0, is_dummy=False)
        whole = peak_bytes(lambda: encoder.run([EncoderInput([0] * ctx_size)]))
        steps = largest_steps.encoding_steps(loaded.model, encoder, chosen, [ctx_size])
        return weights + estimate.head_bytes(encoder), 0, max(whole, largest(steps))
    runner, capacity = meta_model.make_runner(loaded.model, config, chosen, ctx_size)
    return weights, runner.bytes_on(CPU), largest(GenerationSteps(runner, capacity, chosen, ctx_size).largest())


def largest(steps: Iterator[Step] | Sequence[Step]) -> int:
    return max(peak_bytes(step) for step in steps)


def traced(said: Estimated) -> float:
    """Live bytes of the largest step, without the share of the allocator."""
    return (said.compute[0] - memory.ATTENTION_TILE_BYTES) / memory.HEAP_FACTOR


def assert_exact(chosen: Estimate) -> Estimated:
    """Assert that the estimate has the weights of the model in memory, and at least the bytes of its largest steps."""
    said = estimate.estimate(chosen)
    weights, context, compute = measured(chosen)
    assert (said.weights, said.context) == ([weights], [context])
    # Above, because a mask that hides nothing is counted: fake tensors have no numbers. Never below.
    assert compute <= traced(said) <= compute * 1.08
    return said


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {**MEDIUM, "dtype": "bfloat16"}),
        ("qwen3", {"vocab_size": 16_000}),  # a head that is its embedding; sampling takes the most
        ("mistral", {}),  # a sliding window
        ("smollm3", {"tie_word_embeddings": False}),  # layers of two kinds
        ("llama-embed", {}),
        ("gemma2", {}),  # the aligned cache, in layers with windows and without
        ("deepseek_v3", {}),  # a compressed row for all heads; experts
        ("mamba", {}),  # states
        ("qwen3_next", {}),  # states in some layers, keys in others
        ("t5", {}),  # an encoder
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)}-{value.get('dtype', '')}",
)
def test_weights_and_context_are_exact_and_compute_is_close(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    ctx_size = 48 if family in ("mamba", "qwen3_next") else 0  # mamba states no longest sequence, and both are slow
    snapshot = tiny.make(family, tmp_path / "m", **settings, **SHALLOW.get(family, {}))
    assert_exact(options(snapshot, prefill_chunk=256, parallel=3, ctx_size=ctx_size))


def test_a_model_that_divides_sizes_as_tensors_is_traced(tmp_path: Path) -> None:
    config = transformers.LongformerConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=130, attention_window=16,
    )  # fmt: skip
    transformers.LongformerModel(config).save_pretrained(tmp_path)
    tiny.make_tokenizer("bert-embed").save_pretrained(tmp_path)
    assert_exact(options(tmp_path, ctx_size=128))


def test_a_model_that_reads_numbers_while_it_is_built_is_traced() -> None:
    config = transformers.QianfanOCRVisionConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2)
    cls: Any = transformers.MODEL_MAPPING[type(config)]
    with meta_model.no_memory():
        model = meta_model.build(cls, config, torch.float32, embeds=False)
    assert meta_model.tensor_bytes(model) == meta_model.tensor_bytes(cls(config))


def test_the_mask_of_a_window_in_an_encoder_is_counted(tmp_path: Path) -> None:
    chosen = options(ranker(tmp_path, "modernbert", hidden_size=32, intermediate_size=32), prefill_chunk=256)
    _, _, compute = measured(chosen)
    assert compute <= traced(estimate.estimate(chosen)) <= compute * 1.2  # the mask of the other layers hides nothing


def test_an_embedder_is_estimated_with_the_longest_text_that_it_accepts(tmp_path: Path) -> None:
    snapshot = tiny.make("t5", tmp_path / "m", n_positions=None)
    (snapshot / "sentence_bert_config.json").write_text('{"max_seq_length": 48}')
    chosen = options(snapshot, task="embed")
    assert traced(estimate.estimate(chosen)) == traced(estimate.estimate(dataclasses.replace(chosen, ctx_size=48)))


def fake_steps(chosen: Estimate, ctx_size: int, *, is_short: bool = True) -> GenerationSteps:
    """The steps of a model of fake tensors, with one layer of each kind or all of them."""
    config = load_config(chosen)
    model = meta_model.build(model_class(chosen, config, False), config, torch.float32, embeds=False)
    runner, capacity = meta_model.make_runner(model, config, chosen, ctx_size)
    if is_short:
        meta_model.shorten(model)
    return GenerationSteps(runner, capacity, chosen, ctx_size)


def untraced(chosen: Estimate) -> tuple[int, int]:
    """The bytes of weights and cache of a model on one device. Most of the time of an estimate is for its steps."""
    config = load_config(chosen)
    embeds = is_embedder(chosen, config)
    with meta_model.no_memory():
        model = meta_model.build(model_class(chosen, config, embeds), config, torch.float32, embeds=embeds)
        weights = meta_model.weight_bytes(chosen, config, model, torch.float32)[CPU]
        return weights, 0 if embeds else meta_model.make_runner(model, config, chosen, chosen.ctx_size)[0].bytes_on(CPU)


@pytest.mark.parametrize(("family", "rows", "chunk"), [("mamba", 1, 72), ("jamba", 3, 80)])
def test_a_prompt_that_is_traced_in_part_is_never_below_the_whole(
    tmp_path: Path, family: str, rows: int, chunk: int
) -> None:
    """These models loop over the tokens of a prompt, so a whole chunk takes long to trace."""
    snapshot = tiny.make(family, tmp_path / "m", **SHALLOW.get(family, {}))
    chosen = options(snapshot, prefill_chunk=chunk, parallel=rows, ctx_size=128)
    with meta_model.no_memory():
        steps = fake_steps(chosen, chosen.ctx_size)
        whole = largest(steps.largest())
        bound = largest_steps.looping_peak(steps, max_operators=0)
        assert bound is not None
        assert whole <= bound <= whole * 1.2
        assert largest_steps.looping_peak(steps, max_operators=1 << 30) is None


def test_the_operators_of_a_long_chunk_are_bounded(tmp_path: Path) -> None:
    """A chunk of 2,048 tokens has more than 100,000."""
    chosen = options(tiny.make("mamba", tmp_path / "m"), prefill_chunk=2048, parallel=3, ctx_size=2048)
    with meta_model.no_memory():
        steps = fake_steps(chosen, chosen.ctx_size)
        with LiveBytes() as counted:
            assert largest_steps.looping_peak(steps) is not None
    assert counted.operators < 6 * largest_steps.MAX_OPERATORS


@pytest.mark.parametrize(("family", "kv_dtype"), [("llama", "int8"), ("gemma2", "int4"), ("t5", "int8")])
def test_a_cache_of_another_dtype_is_exact_with_its_dequantized_part(
    tmp_path: Path, family: str, kv_dtype: str
) -> None:
    """In small models with long contexts, the dequantized part of the cache is much of a step."""
    sizes = {"n_positions": 800} if family == "t5" else {"max_position_embeddings": 800}
    snapshot = tiny.make(family, tmp_path / "m", **sizes)
    chosen = options(snapshot, prefill_chunk=32, parallel=6, ctx_size=800, kv_cache_dtype=kv_dtype)
    config = load_config(chosen)
    found = estimate.trace(chosen, config)
    _, context, compute = measured(chosen)
    assert found.context == context
    assert compute <= found.compute <= compute * 1.08
    assert context < untraced(dataclasses.replace(chosen, kv_cache_dtype="auto"))[1]
    preset = Preset(id="m", ctx_size=800, parallel=6, prefill_chunk=32, kv_cache_dtype=kv_dtype)
    assert found.compute <= compute_bytes(checkpoint.read(snapshot), preset, 800, on_host=True)


@pytest.mark.parametrize(
    ("family", "settings", "changes"),
    [
        ("llama", {}, {}),
        ("llama", {}, {"kv_cache_dtype": "int4"}),
        ("llama", {"num_hidden_layers": 5}, {"devices": ("cuda:0", "cuda:1"), "layers": ("2", "3")}),
        ("llama", {}, {"tensor_parallel": 2}),
        ("gemma2", {}, {}),  # the aligned cache
        ("deepseek_v3", {}, {}),
        ("deepseek_v3", {}, {"tensor_parallel": 2}),
        ("llama4_text", {}, {"tensor_parallel": 2}),
        ("t5", {}, {}),
        ("mamba", {}, {}),  # states only
        ("qwen3_next", {}, {}),  # states in some layers, keys in others
        ("jamba", {}, {"devices": ("cuda:0", "cuda:1"), "layers": ("1", "1")}),
    ],
)
def test_each_size_of_the_range_is_the_cache_of_so_many_tokens(
    tmp_path: Path, family: str, settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    """One trace, of the largest cache, shows the least cache and the bytes of a step."""
    snapshot = tiny.make(family, tmp_path / "m", **(SHALLOW.get(family, {}) | settings))
    chosen = options(snapshot, parallel=3, ctx_size=100, prefill_chunk=8, enforce_eager=True, **changes)
    facts = checkpoint.read(snapshot)
    preset = Preset(id="m", ctx_size=100, parallel=3, prefill_chunk=8, kv_cache_dtype=chosen.kv_cache_dtype)
    choice = Choice(
        layers=tuple(map(int, chosen.layers)),
        ranks=chosen.tensor_parallel,
        devices=frozenset(DeviceId(LOCAL, HOST if name == "cpu" else int(name[-1])) for name in chosen.devices),
    )
    found = from_trace(
        estimate.estimate(chosen), preset, first=static_estimate(choice, facts, preset, threads=1, forked=False)
    )
    assert found.kv_steps == (2 if facts.aligned else 14)
    is_divided = len(chosen.devices) > 1 or chosen.tensor_parallel > 1
    # No file states which kinds of layers a part has, so the least cache of a split model with states is a loose bound.
    for steps in {int(family == "jamba"), found.kv_steps if facts.aligned else found.kv_steps // 2}:
        granted = found.granted(steps)
        smaller = dataclasses.replace(chosen, kv_tokens=granted.kv_tokens)
        exact = estimate.estimate(smaller).context if is_divided else [untraced(smaller)[1]]
        if facts.state_layers and steps < found.kv_steps:  # the static bound on what does not grow is above the truth
            for context, size in zip(exact, granted.context, strict=True):
                assert context <= size <= 1.15 * context
        else:
            assert granted.context == tuple(exact)


def test_a_model_with_an_aligned_cache_that_is_split_is_traced_with_one_row(tmp_path: Path) -> None:
    asked = {"parallel": 1, "ctx_size": 64, "prefill_chunk": 8, "devices": ("cuda:0", "cuda:1"), "layers": ("1", "3")}
    chosen = options(tiny.make("jamba", tmp_path / "m"), **asked)
    parts, _ = estimate.trace_split(chosen, load_config(chosen))
    assert all(part.context and part.compute for part in parts)


def test_a_load_counts_on_the_least_kv_cache_only(tmp_path: Path) -> None:
    """Memory of a load is free again before the cache is made, and the router may grant one row of it."""
    chosen = options(tmp_path, parallel=4)
    assert estimate.least_context(chosen, 400) == 100
    assert estimate.least_context(dataclasses.replace(chosen, parallel=16, contexts=4), 400) == 100
    assert estimate.least_context(dataclasses.replace(chosen, kv_tokens=64), 400) == 400


def test_rows_of_full_contexts_are_no_more_than_the_contexts(tmp_path: Path) -> None:
    chosen = options(tmp_path, parallel=16, contexts=4)
    assert backends.aligned_rows(chosen, 96) == 4
    assert backends.aligned_rows(dataclasses.replace(chosen, kv_tokens=200), 96) == 2


def assert_static_covers(chosen: Estimate, facts: Checkpoint, found: meta_model.Traced | None = None) -> None:
    """Assert that the static estimate is not below the exact one: as a whole, and in KV cache and activations. Buffers
    that a model makes itself (rotary frequencies, causal masks) are not in its files, so only the whole covers them."""
    found, on_host = found or estimate.trace(chosen, load_config(chosen)), chosen.devices == ("cpu",)
    preset = Preset(
        id="m",
        ctx_size=chosen.ctx_size,
        parallel=chosen.parallel,
        prefill_chunk=chosen.prefill_chunk,
        load_format=chosen.load_format,
        spec_type="ngram-simple" if chosen.ngram_size else "none",
        model_draft=chosen.draft_snapshot,
    )
    compute = compute_bytes(facts, preset, chosen.ctx_size, on_host=on_host)
    context = most_context(facts, preset, chosen.ctx_size, on_host=on_host)
    assert found.compute + found.on_device <= compute
    assert found.context <= context
    if chosen.load_format != "dummy":  # the tensors that a config implies are those of a Llama
        weights = weight_bytes(facts, preset, on_host=on_host)
        assert found.weights + found.context + found.compute + found.on_device <= weights + context + compute


# Device, ctx-size, parallel, prefill-chunk: a long chunk, many rows and a full context let different parts of a step
# decide.
SETTINGS = (("cpu", 128, 3, 128), ("cpu", 96, 16, 24), ("cuda:0", 256, 4, 64))
# One family for each kind of cache, mask and layer.
KINDS = {
    "llama", "mistral", "mixtral", "falcon-alibi", "gemma2", "gpt_oss", "deepseek_v3", "mamba", "qwen3_next", "t5",
    "bert-embed",
}  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_the_static_estimate_of_every_family_is_never_below_the_exact_one(tmp_path: Path, name: str) -> None:
    """A family of each kind is traced on both devices, with many rows on the CPU: there the two estimates are closest.
    The others have one setting each, in turn, since a trace takes long."""
    family, changes = EVERY[name]
    snapshot = tiny.make(family, tmp_path / "m", **(changes | SHALLOW.get(name, {})))
    turn = list(EVERY).index(name) % len(SETTINGS)
    for device, ctx_size, parallel, chunk in SETTINGS[1:] if name in KINDS else SETTINGS[turn : turn + 1]:
        chosen = options(snapshot, devices=(device,), ctx_size=ctx_size, parallel=parallel, prefill_chunk=chunk)
        assert_static_covers(chosen, checkpoint.read(snapshot))


@pytest.mark.parametrize(("family", "device"), [("llama", "cuda:0"), ("gemma2", "cpu")])
def test_the_logits_behind_drafts_are_in_both_estimates(tmp_path: Path, family: str, device: str) -> None:
    snapshot = tiny.make(family, tmp_path / "m", vocab_size=20_000)
    plain = options(snapshot, devices=(device,), ctx_size=256, parallel=8, prefill_chunk=64)
    drafting = dataclasses.replace(plain, ngram_size=3)
    less, more = (estimate.trace(chosen, load_config(chosen)) for chosen in (plain, drafting))
    assert more.compute - less.compute > memory.DRAFT_LOGITS * 20_000 * 4
    assert_static_covers(drafting, checkpoint.read(snapshot), more)


@pytest.mark.parametrize(
    ("family", "draft", "device", "ctx_size"),
    [("llama", "qwen3", "cpu", 256), ("llama", "gpt2", "cuda:0", 256), ("gemma2", "qwen3", "cpu", 250)],
)
def test_a_draft_model_is_in_both_estimates(
    tmp_path: Path, family: str, draft: str, device: str, ctx_size: int
) -> None:
    snapshot, small = tiny.make(family, tmp_path / "m"), tiny.make(draft, tmp_path / "draft")
    plain = options(snapshot, devices=(device,), ctx_size=ctx_size, parallel=8, prefill_chunk=64)
    drafting = dataclasses.replace(plain, draft_snapshot=str(small))
    alone = dataclasses.replace(plain, snapshot=str(small))
    both = estimate.trace(drafting, load_config(drafting))
    assert (both.weights, both.context) == tuple(map(sum, zip(untraced(plain), untraced(alone), strict=True)))
    facts = dataclasses.replace(checkpoint.read(snapshot), draft=checkpoint.read(small), draft_snapshot=str(small))
    assert_static_covers(drafting, facts, both)
    preset = Preset(id="m", ctx_size=ctx_size, parallel=8, prefill_chunk=64, model_draft=str(small))
    assert kv_range(facts, preset, ctx_size, on_host=device == "cpu").most == both.context


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_static_estimate_at_published_sizes_is_never_below_the_exact_one(tmp_path: Path, name: str) -> None:
    """Wide enough that the layers decide, not the constant part of the bound. Only config.json exists. The devices take
    turns, since a trace takes long."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    facts = checkpoint.read(tmp_path, needs_weights=False)
    device, chunk = (("cpu", 64), ("cuda:0", 512))[list(PUBLISHED).index(name) % 2]
    if name == "Mamba 2.8B":  # its scan is a loop over the tokens of a chunk
        chunk = 32
    chosen = options(tmp_path, devices=(device,), ctx_size=512, parallel=3, prefill_chunk=chunk, load_format="dummy")
    assert_static_covers(chosen, facts)


def test_the_estimates_follow_the_larger_steps_of_accelerators(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama(8, 2048, 8192, 32, 8)))
    facts = checkpoint.read(tmp_path, needs_weights=False)
    small = options(tmp_path, devices=("cuda:0",), ctx_size=8192, parallel=4, prefill_chunk=512, load_format="dummy")
    large = dataclasses.replace(small, prefill_chunk=2048)
    less, more = (estimate.trace(chosen, load_config(chosen)) for chosen in (small, large))
    gate_and_up = 2 * 8192 * 2 * (2048 - 512)
    assert more.compute - less.compute >= gate_and_up
    assert_static_covers(large, facts, more)


@pytest.mark.parametrize(("asked", "bytes_each"), [("bfloat16", 2), ("auto", 4)])
def test_the_dtype_in_memory_decides_not_the_one_on_disk(tmp_path: Path, asked: str, bytes_each: int) -> None:
    """float16 becomes float32 on the CPU unless the preset states a dtype."""
    chosen = options(tiny.make("llama", tmp_path / "half", dtype="float16"), dtype=asked)
    said = estimate.estimate(chosen)
    weights, context, _ = measured(chosen)
    assert (said.weights, said.context) == ([weights], [context])
    assert context == 2 * 2 * 2 * 16 * 256 * 4 * bytes_each  # keys and values, layers, heads, elements, tokens, rows


def test_random_weights_need_no_files(tmp_path: Path) -> None:
    snapshot = tiny.make("llama", tmp_path / "m")
    stored = estimate.estimate(options(snapshot))
    (snapshot / "model.safetensors").unlink()
    assert estimate.estimate(options(snapshot, load_format="dummy")).weights == stored.weights
    with pytest.raises(StartError):
        estimate.estimate(options(snapshot))


def test_unused_stored_tensors_count_only_while_the_model_is_loaded(tmp_path: Path) -> None:
    snapshot = tiny.make("bert-embed", tmp_path / "m")  # with a pooler, which embedding does without
    [weights] = assert_exact(options(snapshot)).weights
    config = load_config(options(snapshot))
    stored = sum(tensor.nbytes for tensor in safetensors.torch.load_file(snapshot / "model.safetensors").values())
    assert estimate.trace(options(snapshot), config).loading == stored - weights > 0
    assert estimate.trace(options(snapshot, dtype="bfloat16"), config).loading == 0, "converted ones are never mapped"
    converted = options(snapshot, dtype="bfloat16")
    assert estimate.estimate(converted).weights == [measured(converted)[0]]


def test_layers_behind_the_model_count_in_float32(tmp_path: Path) -> None:
    snapshot = tiny.make("bert-embed", tmp_path / "m", dtype="bfloat16")
    bare = estimate.estimate(options(snapshot))
    modules = json.loads((snapshot / "modules.json").read_text())
    modules.insert(2, {"path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (snapshot / "modules.json").write_text(json.dumps(modules))
    (snapshot / "2_Dense").mkdir()
    (snapshot / "2_Dense" / "config.json").write_text(json.dumps({"in_features": 64, "out_features": 500}))
    tensors = {"linear.weight": torch.zeros(500, 64), "linear.bias": torch.zeros(500)}
    safetensors.torch.save_file(tensors, snapshot / "2_Dense" / "model.safetensors")
    said = assert_exact(options(snapshot))
    assert said.weights[0] - bare.weights[0] == 65 * 500 * 4, "float32, whatever the model computes in"


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "t5", "bert-embed"])
def test_bitsandbytes_weights_are_the_same_by_headers_and_by_the_rules_of_transformers(
    tmp_path: Path, family: str
) -> None:
    snapshot = tiny.make(family, tmp_path / "m")
    facts = checkpoint.read(snapshot)
    for method, bits in (("bnb-8bit", 8), ("bnb-4bit", 4)):
        chosen = options(snapshot, quantization=method)
        config = load_config(chosen)
        cls = model_class(chosen, config, is_embedder(chosen, config))
        with meta_model.no_memory():
            model = meta_model.build(cls, config, torch.float32, embeds=family == "bert-embed")
            saved = quantized.saved_by_bitsandbytes(model, torch.float32, bits=bits)[CPU]
        plain, small = (
            weight_bytes(facts, Preset(id="m", quantization=each), on_host=False) for each in ("auto", method)
        )
        assert plain - small == saved > 0
    asked = options(snapshot, quantization="bnb-4bit", ctx_size=64)
    whole, _ = untraced(options(snapshot, ctx_size=64))
    assert estimate.trace(asked, load_config(asked)).weights == whole - saved


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("method", ["gptq", "fp8"])
def test_a_quantized_checkpoint_is_the_same_by_headers_and_by_the_worker(
    tmp_path: Path, method: str, device: str
) -> None:
    snapshot = tiny.make("llama", tmp_path / "m", dtype="bfloat16")
    stored = safetensors.torch.load_file(snapshot / "model.safetensors")
    layer = "model.layers.0.mlp.up_proj"
    rows, columns = stored.pop(f"{layer}.weight").shape
    if method == "gptq":
        stored[f"{layer}.qweight"] = torch.zeros(columns // 8, rows, dtype=torch.int32)
        stored[f"{layer}.scales"] = torch.zeros(1, rows, dtype=torch.float16)
        stored[f"{layer}.qzeros"] = torch.zeros(1, rows // 8, dtype=torch.int32)
    else:
        stored[f"{layer}.weight"] = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
        stored[f"{layer}.weight_scale_inv"] = torch.zeros(1, 1)
    safetensors.torch.save_file(stored, snapshot / "model.safetensors", metadata={"format": "pt"})
    edit(snapshot / "config.json", quantization_config={"quant_method": method, "bits": 4, "group_size": columns})
    chosen = options(snapshot, devices=(device,))
    stored_tensors = quantized.stored_tensors(chosen, load_config(chosen), torch.bfloat16)
    by_worker = sum(size for _, size in stored_tensors)
    by_headers = weight_bytes(checkpoint.read(snapshot), Preset(id="m"), on_host=device == "cpu")
    assert by_worker == by_headers


def test_a_cross_encoder_is_estimated_with_its_head(tmp_path: Path) -> None:
    snapshot = tiny.make("bert-embed", tmp_path / "m")
    config = transformers.BertConfig.from_pretrained(snapshot, num_labels=1, pad_token_id=0)
    transformers.BertForSequenceClassification(config).save_pretrained(snapshot)
    (snapshot / "modules.json").unlink()
    weights, _, compute = measured(options(snapshot))
    said = estimate.estimate(options(snapshot))
    assert weights <= said.weights[0] <= weights + 8192
    assert compute <= traced(said) <= compute * 1.08


@pytest.mark.parametrize(
    ("family", "depth"),
    [
        ("llama", {"num_hidden_layers": 4}),
        ("smollm3", {}),
        ("gemma2", {"num_hidden_layers": 4}),
        ("deepseek_v3", {}),
        ("t5", {"num_layers": 4}),
    ],
)
def test_a_step_takes_the_same_in_a_model_of_any_depth(tmp_path: Path, family: str, depth: dict[str, int]) -> None:
    chosen = options(tiny.make(family, tmp_path / "m", **depth), prefill_chunk=64)
    with meta_model.no_memory():
        short, whole = (
            [live_bytes(step) for step in fake_steps(chosen, 128, is_short=each).largest()] for each in (True, False)
        )
    assert max(step.peak for step in short) == max(step.peak for step in whole)
    assert all(few.operators < most.operators for few, most in zip(short, whole, strict=True)), "layers were left out"


def test_longer_contexts_more_rows_and_longer_chunks_cost_what_they_should(llama: Path) -> None:
    base = options(llama, ctx_size=128, parallel=2, prefill_chunk=64)
    said = estimate.estimate(base)
    larger = estimate.estimate(dataclasses.replace(base, ctx_size=256, parallel=4, prefill_chunk=128))
    assert larger.context == [4 * said.context[0]]
    assert larger.compute[0] > said.compute[0]
    assert estimate.estimate(dataclasses.replace(base, attention="eager")).compute[0] > said.compute[0]


def test_an_accelerator_is_estimated_without_one(llama: Path) -> None:
    host, device = (estimate.estimate(options(llama, devices=(name,))) for name in ("cpu", "cuda:0"))
    assert (device.weights, device.context) == (host.weights, host.context)
    assert device.runtime == [memory.DEVICE_PROCESS_BYTES + beside_steps(device.compute[0])]
    assert device.host > 0 == host.host


def test_the_overhead_of_a_process_on_accelerators_is_the_one_measured_before(tmp_path: Path) -> None:
    """The estimating process has no such libraries and may be forked, so its own overhead is another."""
    snapshot = tiny.make("llama", tmp_path / "m", num_hidden_layers=2)
    one = options(snapshot, devices=("cuda:0",), ctx_size=64, host_overhead=700 * MIB, enforce_eager=True)
    several = dataclasses.replace(one, devices=("cuda:0", "cuda:1"))
    said = {
        1: (estimate.estimate(one), estimate.estimate(dataclasses.replace(several, layers=("1", "1")))),
        2: (estimate.estimate(dataclasses.replace(several, tensor_parallel=2)),),
    }
    for ranks, found in ((ranks, found) for ranks, each in said.items() for found in each):
        own = found.host - ranks * (700 * MIB + memory.STAGING_BYTES)
        assert 0 < own <= 96 * MIB, "its tokenizer, and what grammars need"
        assert found.inherited == 0
    assert estimate.host_overhead(options(snapshot)) == memory.DEVICE_PROCESS_HOST_BYTES


def test_weights_quantized_or_converted_for_an_accelerator_pass_through_main_memory(llama: Path) -> None:
    def staged(**changes: str) -> int:
        chosen = options(llama, devices=("cuda:0",), ctx_size=64, parallel=2, enforce_eager=True, **changes)
        return estimate.trace(chosen, load_config(chosen)).staged

    elements = sum(count for _, count in meta_model.StoredTensors(options(llama)).sizes)
    assert staged() == 0
    assert 0 <= staged(load_format="dummy") - 4 * elements < 1000, "drawn there"
    assert 0 <= staged(dtype="bfloat16") - 2 * elements < 1000, "with the buffers that a model makes itself"
    assert staged(quantization="bnb-8bit") == 4 * elements, "all of it, until the last is quantized"


def test_cuda_graphs_count_unless_they_are_turned_off(llama: Path) -> None:
    def compute(*, enforce_eager: bool) -> int:
        asked = options(llama, devices=("cuda:0",), ctx_size=256, parallel=4, enforce_eager=enforce_eager)
        return estimate.estimate(asked).compute[0]

    gathered = 4 * 256 * 2 * 2 * 16 * 4  # of 4 rows the whole context: keys and values of 2 heads of 16 in float32
    more = (
        compute(enforce_eager=False) - compute(enforce_eager=True) - len(graph_shapes(4, 256, 1)) * memory.GRAPH_BYTES
    )
    assert gathered < more < 4 * gathered


@pytest.mark.parametrize(
    ("config", "settings", "exit", "words"),
    [
        ({"model_type": "bert"}, {}, Exit.UNUSABLE, "is an encoder"),
        ({"model_type": "nobody-knows"}, {}, Exit.UNUSABLE, "unknown to transformers"),
        (None, {"devices": ("cuda:0", "cuda:1")}, Exit.USAGE, "2 devices"),
        (None, {"dtype": "int4"}, Exit.USAGE, "none of auto, float32"),
        ({"quantization_config": {"quant_method": "torchao"}}, {}, Exit.UNUSABLE, "'torchao', which this version"),
        ({"quantization_config": {"bits": 3}}, {}, Exit.UNUSABLE, "'unknown', which this version cannot load"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, {"quantization": "awq"}, Exit.UNUSABLE, "gptq"),
        (
            {"quantization_config": {"quant_method": "awq", "group_size": -1}},
            {},
            Exit.UNUSABLE,
            "groups of 32, 64, 128",
        ),
    ],
)
def test_a_model_that_cannot_be_served_is_rejected(
    tmp_path: Path, config: dict[str, Any] | None, settings: dict[str, Any], exit: Exit, words: str
) -> None:
    snapshot = tiny.make("llama", tmp_path / "m")
    override = "" if config is None else json.dumps({**config, "architectures": ["XForCausalLM"]})
    with pytest.raises(StartError, match=words) as caught:
        estimate.estimate(options(snapshot, config_override=override, **settings))
    assert caught.value.exit == exit


def test_a_storage_counts_once_and_only_while_it_lives() -> None:
    live = LiveBytes()
    with live, torch.inference_mode():
        kept = torch.empty(100, dtype=torch.uint8)
        view = kept[:50].view(5, 10)
        assert live.now == 100
        gone = torch.empty(1000, dtype=torch.uint8)
        assert live.now == 1100
        del gone
        assert live.now == 100
        kept.add_(1)
        assert torch.nn.functional.linear(view.float(), torch.ones(3, 10)).shape == (5, 3)
    assert live.peak == 1100


def test_one_expert_gets_all_tokens_where_their_numbers_are_unknown() -> None:
    """JetMoE splits tokens among experts by numbers that a trace does not know."""
    shapes: list[tuple[int, ...]] = []

    def step() -> None:
        tokens, counts = torch.zeros(6, 8), torch.zeros(3, dtype=torch.int64)
        parts = tokens.split(counts.tolist())  # type: ignore[no-untyped-call]
        shapes.append(torch.cat([part @ torch.zeros(8, 4) for part in parts]).shape)
        shapes.extend(part.shape for part in tokens.split([5, 3], dim=1))  # type: ignore[no-untyped-call]

    with FakeTensorMode(), torch.inference_mode():
        live_bytes(step)
    assert shapes == [(6, 4), (6, 5), (6, 3)]


def test_internal_copies_of_operators_count_as_in_the_allocator() -> None:
    wide, half = torch.randn(50, 1000), torch.randn(50, 1000).bfloat16()
    mask = wide > 0
    steps: dict[str, Step] = {
        "sum": lambda: mask.sum(-1),
        "cumsum": lambda: mask.cumsum(-1),
        "wider sum": lambda: half.sum(-1, dtype=torch.float32),
        "plain sum": lambda: wide.sum(-1),
        "product in place": lambda: wide.mul_(mask),
        "comparison": lambda: half >= wide,
        "choice": lambda: torch.where(mask, wide, half),
        "number": lambda: half * 2.0,
    }
    expected = {name: allocated(step) for name, step in steps.items()}
    assert {name: peak_bytes(step) for name, step in steps.items()} == pytest.approx(expected, rel=0.01)
    assert expected["sum"] >= 8 * mask.numel() > 4 * expected["plain sum"]


def test_the_most_expensive_sampling_is_traced_as_the_allocator_counts_it() -> None:
    rows, vocab = 20, 8000
    picks = [sampler.RowSampling(sampler.COSTLIEST_SAMPLING, uniform=0.5)] * rows
    logits = torch.randn(rows, vocab)
    expected = allocated(lambda: sampler.sample(logits, picks))
    with meta_model.no_memory():
        fake = torch.empty(rows, vocab)
        traced = peak_bytes(lambda: sampler.sample(fake, picks))
    assert expected <= traced <= 1.01 * expected


@pytest.mark.parametrize("is_tied", [False, True])
def test_reordering_needs_the_bytes_of_the_largest_untied_matrix(tmp_path: Path, is_tied: bool) -> None:
    snapshot = tiny.make("llama", tmp_path / "m", vocab_size=16000, tie_word_embeddings=is_tied)
    chosen = options(snapshot, parallel=1)
    with meta_model.no_memory():
        model = meta_model.build(transformers.LlamaForCausalLM, load_config(chosen), torch.float32, embeds=False)
        _, reordering = cpu_linear.onednn_bytes(model)
    assert reordering == (0 if is_tied else 16000 * 64 * 4), "the others are small enough to be left alone"
    compute = compute_bytes(checkpoint.read(snapshot), Preset(id="m", parallel=1, ctx_size=16), 16, on_host=True)
    eager = Preset(id="m", parallel=1, ctx_size=16, enforce_eager=True)
    assert compute > compute_bytes(checkpoint.read(snapshot), eager, 16, on_host=True), "the bound covers reordering"


def test_no_chunk_length_needs_more_than_the_estimate(tmp_path: Path) -> None:
    """Most lengths have to be padded by the linear layers, or are computed in parts (linears.py)."""
    sizes = {"n_embd": 512, "n_layer": 2, "n_head": 8, "n_positions": 512, "vocab_size": 500}
    chosen = options(tiny.make("gpt_bigcode", tmp_path / "m", **sizes), prefill_chunk=128, parallel=2)
    config = load_config(chosen)
    plain = estimate.trace(dataclasses.replace(chosen, enforce_eager=True), config).compute
    said = estimate.trace(chosen, config).compute
    loaded = loader.load_model(chosen, config, None, lambda progress: None)
    runner, capacity = meta_model.make_runner(loaded.model, config, chosen, 512)
    steps = GenerationSteps(runner, capacity, chosen, 512)
    layers = cpu_linear.CpuLinears(loaded.model, release_pages=loaded.release_pages)
    peaks = []
    for _ in range(2):
        for length in (65, 95, 96, 97, 111, 112, 126, 127, 128):
            chunk = steps.segment(1, 512 - length, length)
            peaks.append(peak_bytes(steps.step(*steps.decodes(1), chunk)))
        layers.pretend()
    assert plain < max(peaks) <= said <= max(peaks) * 1.01


def test_a_trace_leaves_the_methods_of_fake_tensors_as_they_were() -> None:
    before = FakeTensor.tolist
    with FakeTensorMode():
        peak_bytes(lambda: torch.zeros(3).tolist())
        assert FakeTensor.tolist is before
