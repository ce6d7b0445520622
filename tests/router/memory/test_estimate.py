"""The static estimate, from facts alone. tests/processes/test_estimate_against_reality.py has real processes."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.presets import Preset
from router.memory import estimate as estimates
from router.memory.checkpoint_facts import (
    Checkpoint,
    ContextTooLarge,
    Linears,
    Part,
    Tally,
    UnknownArchitecture,
    WrongQuantization,
    effective_ctx,
    prefill_chunk,
    rows,
)
from router.memory.estimate import (
    INHERITED_SHARE,
    LEAST_BESIDE,
    RUNTIME_FORKED,
    RUNTIME_HOST,
    SAFETY_FACTOR,
    TOKENIZER_BYTES,
    MemoryEstimate,
    Overhead,
    beside_steps,
    estimate,
)
from router.memory.segments import compute_bytes, head_bytes, kv_type_differs, weight_bytes
from tests.router.checkpoints import QWEN3_4B, checkpoints, most_context, preset, presets
from worker.protocol import memory
from worker.protocol.events import Estimated

MIB = 1 << 20

GRAMMARS = memory.GRAMMAR_BYTES + 151936 * memory.GRAMMAR_ENTRY_BYTES
TOKENIZER = 151936 * TOKENIZER_BYTES
BESIDE = memory.DEVICE_PROCESS_HOST_BYTES + TOKENIZER + GRAMMARS + memory.STAGING_BYTES


def test_the_kv_cache_counts_kv_heads_and_the_stated_head_size() -> None:
    assert most_context(QWEN3_4B, preset(), 4096, on_host=False) == 4 * 4096 * 36 * 2 * 8 * 128 * 2
    assert most_context(QWEN3_4B, preset(dtype="float32"), 4096, on_host=False) == 4 * 4096 * 36 * 2 * 8 * 128 * 4


def test_latent_attention_counts_one_compressed_row_for_all_heads() -> None:
    deepseek = replace(QWEN3_4B, layers=61, heads=128, kv_heads=1, head_dim=512, value_dim=64)
    blocks = most_context(deepseek, preset(parallel=1), 1000, on_host=False)
    assert blocks == 61 * (512 + 64) * 1008 * 2, "whole blocks of 16 tokens"


def test_kv_tokens_limit_the_cache_but_not_below_one_request() -> None:
    whole = most_context(QWEN3_4B, preset(), 4096, on_host=False)
    assert most_context(QWEN3_4B, preset(kv_tokens=8192), 4096, on_host=False) * 2 == whole
    assert effective_ctx(QWEN3_4B, preset(ctx_size=-1, kv_tokens=5000)) == 5000
    with pytest.raises(ContextTooLarge, match="kv-tokens 4000 is less than the 4096 tokens"):
        estimate(QWEN3_4B, preset(kv_tokens=4000), on_host=False)


def test_sixteen_sequences_share_the_cache_of_four_unless_parallel_is_stated() -> None:
    unset, four = Preset(id="m", source="preset"), Preset(id="m", source="preset", parallel=4)
    assert (rows(QWEN3_4B, unset), rows(QWEN3_4B, four)) == (16, 4)
    cache = most_context(QWEN3_4B, unset, 4096, on_host=False)
    assert cache == most_context(QWEN3_4B, four, 4096, on_host=False)
    sixteen = replace(four, parallel=16)
    assert most_context(QWEN3_4B, sixteen, 4096, on_host=False) == 4 * cache
    for on_host in (False, True):
        assert compute_bytes(QWEN3_4B, unset, 4096, on_host=on_host) == compute_bytes(
            QWEN3_4B, sixteen, 4096, on_host=on_host
        ), "a step has 16 rows"


def test_without_a_cache_in_blocks_there_are_as_many_rows_as_full_contexts() -> None:
    unset = Preset(id="m", source="preset")
    assert rows(replace(QWEN3_4B, aligned=True), unset) == 4
    assert rows(QWEN3_4B, replace(unset, task="embed")) == 4


def test_a_state_has_the_same_size_at_any_length() -> None:
    without_heads = replace(QWEN3_4B, heads=0, kv_heads=0, head_dim=0)
    mamba = replace(without_heads, layers=8, state_layers=8, state_elements=1000, aligned=True)
    twice_in_float32, one_on_its_way = 4 * 8 * 1000 * 2 * 4, 1000 * 4
    assert most_context(mamba, preset(), 10, on_host=False) == twice_in_float32 + one_on_its_way
    assert most_context(mamba, preset(), 4096, on_host=False) == twice_in_float32 + one_on_its_way


def test_a_hybrid_layer_has_state_and_keys() -> None:
    keys = replace(QWEN3_4B, layers=8, state_elements=1000, aligned=True)
    both = replace(keys, state_layers=8, hybrids=8)
    states = 4 * 8 * 1000 * 2 * 4
    assert most_context(both, preset(), 96, on_host=False) == most_context(keys, preset(), 96, on_host=False) + states


def test_the_aligned_cache_has_a_buffer_for_one_row_of_a_layer() -> None:
    paged = replace(QWEN3_4B, layers=8)
    more = most_context(replace(paged, aligned=True), preset(), 96, on_host=False) - most_context(
        paged, preset(), 96, on_host=False
    )
    assert more == 96 * paged.kv_heads * paged.head_dim * 2


def test_kv_tokens_limit_the_rows_of_the_aligned_cache() -> None:
    aligned = replace(QWEN3_4B, layers=8, aligned=True)
    two = most_context(aligned, preset(parallel=2), 96, on_host=False)
    assert most_context(aligned, preset(parallel=4, kv_tokens=200), 96, on_host=False) == two


def test_a_model_that_embeds_or_scores_has_no_cache() -> None:
    embedder, ranker = (replace(QWEN3_4B, capabilities=(name,)) for name in ("embedding", "rerank"))
    for facts, task in ((embedder, "auto"), (ranker, "auto"), (QWEN3_4B, "embed"), (QWEN3_4B, "rerank")):
        assert most_context(facts, preset(task=task), 4096, on_host=True) == 0
    assert most_context(embedder, preset(task="generate"), 4096, on_host=True) > 0


@pytest.mark.parametrize(
    ("stored", "dtype", "on_host", "factor"),
    [
        ("bfloat16", "auto", True, 2),
        ("float16", "auto", True, 4),  # the CPU has no fast arithmetic for it
        ("float16", "auto", False, 2),
        ("float16", "float16", True, 2),
        ("float32", "bfloat16", False, 2),
        ("bfloat16", "float32", False, 4),
    ],
)
def test_weights_count_in_the_dtype_of_the_computation(stored: str, dtype: str, on_host: bool, factor: int) -> None:
    size = 4 if stored == "float32" else 2
    facts = replace(QWEN3_4B, dtype=stored, tensors={stored: Tally(1000, 1000 * size)}, file_bytes=1000 * size)
    assert weight_bytes(facts, preset(dtype=dtype), on_host=on_host) == 1000 * factor


def test_quantized_weights_keep_their_stored_size() -> None:
    quantized = {"int32": Tally(1000, 4000), "float8_e4m3fn": Tally(100, 100), "float16": Tally(10, 20)}
    gptq = replace(QWEN3_4B, dtype="float16", tensors=quantized, quantization="gptq", file_bytes=5000)
    assert weight_bytes(gptq, preset(), on_host=False) == 4000 + 100 + 20
    assert weight_bytes(gptq, preset(), on_host=True) == 4000 + 100 + 40
    plain = replace(gptq, quantization="")
    assert weight_bytes(plain, preset(), on_host=False) == 4000 + 200 + 20


@pytest.mark.parametrize(("bits", "group", "scales"), [(4, 32, 160), (4, 0, 160), (4, -1, 120), (8, 32, 120)])
def test_scales_grow_on_main_memory_with_and_without_a_kernel(bits: int, group: int, scales: int) -> None:
    tensors = {"int32": Tally(1000, 4000)}
    facts = replace(
        QWEN3_4B, quantization="gptq", bits=bits, group=group, tensors=tensors, scale_bytes=50, file_bytes=0
    )
    assert weight_bytes(facts, preset(), on_host=True) == 4000 + scales
    assert weight_bytes(facts, preset(), on_host=False) == 4050


LINEARS = Linears(count=252, elements=3_600_000_000, rows=1_000_000, blocks=56_250_000)


def test_quantization_on_load_shrinks_linear_layers_only() -> None:
    facts = replace(QWEN3_4B, linears=LINEARS)
    rest = (QWEN3_4B.params - LINEARS.elements) * 2
    assert weight_bytes(facts, preset(quantization="bnb-8bit"), on_host=False) == rest + 3_600_000_000 + 4 * 1_000_000
    four = weight_bytes(facts, preset(quantization="bnb-4bit"), on_host=False)
    assert four == rest + 1_800_000_000 + 4 * 56_250_000 + 252 * 64
    dequantized = compute_bytes(facts, preset(quantization="bnb-4bit", parallel=1), 4096, on_host=False)
    assert dequantized > 24_903_680 * 2, "a prompt's step dequantizes one matrix"
    assert estimate(facts, preset(quantization="bnb-4bit"), on_host=False).host > QWEN3_4B.file_bytes, "read from there"


@pytest.mark.parametrize(
    ("asked", "stored", "message"),
    [
        ("gptq", "", "quantization = gptq, but the checkpoint is not quantized"),
        ("awq", "gptq", "quantization = awq, but the checkpoint is quantized with gptq"),
        ("bnb-4bit", "fp8", "but the checkpoint is quantized with fp8"),
        ("none", "gptq", "but the checkpoint is quantized with gptq; leave the key out"),
        ("auto", "torchao", "quantized with torchao, which this version cannot load; take .* or quantized with awq"),
    ],
)
def test_another_quantization_than_the_checkpoints_is_rejected(asked: str, stored: str, message: str) -> None:
    with pytest.raises(WrongQuantization, match=message):
        estimate(replace(QWEN3_4B, quantization=stored), preset(quantization=asked), on_host=True)


def test_groups_without_a_cpu_kernel_are_rejected_on_main_memory_only() -> None:
    def of(group: int, bits: int = 4) -> Checkpoint:
        return replace(QWEN3_4B, quantization="awq", bits=bits, group=group)

    for facts in (of(16), of(-1), of(128, bits=8)):
        with pytest.raises(WrongQuantization, match=r"on an accelerator only; .* 4 bits and groups of 32, 64, 128"):
            estimate(facts, preset(), on_host=True)
        assert estimate(facts, preset(), on_host=False).total > 0
    assert estimate(of(128), preset(), on_host=True).total > 0


@pytest.mark.parametrize(
    ("asked", "stored"), [("auto", "gptq"), ("gptq", "gptq"), ("none", ""), ("bnb-8bit", ""), ("bnb-8bit", "bnb-4bit")]
)
def test_the_quantization_of_the_checkpoint_or_on_load_is_accepted(asked: str, stored: str) -> None:
    assert estimate(replace(QWEN3_4B, quantization=stored), preset(quantization=asked), on_host=False).total > 0


@pytest.mark.parametrize(
    ("method", "bits", "stored", "each", "on_device"),
    [
        # The libraries that these two need on an accelerator may be missing.
        ("fp8", 8, "float8_e4m3fn", 1, 2000),
        ("mxfp4", 4, "uint8", 2, 4000),
        ("compressed-tensors", 4, "int32", 8, 16000),
        ("compressed-tensors", 8, "int8", 1, 2000),
    ],
)
def test_methods_without_kernels_unpack_weights_and_drop_scales(
    method: str, bits: int, stored: str, each: int, on_device: int
) -> None:
    quantized = {stored: Tally(1000, 1000)}
    facts = replace(QWEN3_4B, quantization=method, bits=bits, tensors=quantized, file_bytes=0, scale_bytes=50)
    assert weight_bytes(facts, preset(), on_host=False) == on_device
    assert weight_bytes(facts, preset(), on_host=True) == 1000 * each * 2


def test_a_mapped_file_counts_whole() -> None:
    assert weight_bytes(QWEN3_4B, preset(), on_host=True) == QWEN3_4B.file_bytes
    assert weight_bytes(QWEN3_4B, preset(), on_host=False) == 8_044_936_192


def test_converting_for_an_accelerator_needs_main_memory_for_a_copy() -> None:
    straight = estimate(QWEN3_4B, preset(), on_host=False)
    converted = estimate(QWEN3_4B, preset(dtype="float16"), on_host=False)
    assert straight.host == BESIDE
    assert converted.host == BESIDE + 8_044_936_192, "beside what the process itself takes"
    drawn = estimate(QWEN3_4B, preset(load_format="dummy"), on_host=False)
    assert drawn.host == converted.host, "random weights are drawn there"


def test_segments_and_source_are_stated_by_shard() -> None:
    one = estimate(QWEN3_4B, preset(), on_host=True)
    assert one.runtime == (RUNTIME_HOST + TOKENIZER + GRAMMARS,)
    assert one.host == 0
    assert (one.source, one.is_exact) == ("static", False)
    assert one.total == one.shards[0] == one.weights[0] + one.context[0] + one.compute[0] + one.runtime[0]
    two = estimate(QWEN3_4B, preset(), layers=(16, 20), on_host=False, overhead=Overhead(device=7 * MIB))
    assert two.runtime == tuple(7 * MIB + beside_steps(each) for each in two.compute)
    assert sum(two.weights) == 8_044_936_192
    assert two.weights[1] == (20 * 100_930_816 + 2560) * 2, "the embeddings, and so the head, are on the first"
    assert two.context == tuple(each * 4096 * 2 * 8 * 128 * 2 for each in (16, 20)), "of one request"
    assert two.granted(two.kv_steps).context == tuple(4 * size for size in two.context)
    short = preset(prefill_chunk=16, ctx_size=256)
    tied, own = (estimate(replace(QWEN3_4B, tied=way), short, layers=(16, 20), on_host=False) for way in (True, False))
    assert tied.compute[0] > tied.compute[1], "logits are where the head is"
    assert own.compute == tied.compute[::-1]
    assert (two.layers, len(two.shards)) == ((16, 20), 2)


def test_layers_behind_an_embedder_are_float32() -> None:
    plain = replace(QWEN3_4B, capabilities=("embedding", "rerank"))
    projected = replace(plain, head_elements=1000)
    for dtype in ("bfloat16", "float32"):
        bare, said = (weight_bytes(facts, preset(dtype=dtype), on_host=True) for facts in (plain, projected))
        assert said - bare == 4000


def test_an_embedder_computes_its_longest_prompt_in_one_step() -> None:
    embedder = replace(QWEN3_4B, capabilities=("embedding",))
    short, long = (estimate(embedder, preset(ctx_size=tokens), on_host=False).compute[0] for tokens in (512, 8192))
    assert long > 15 * short


def test_either_key_of_the_prompt_budget_decides_if_it_is_set_alone() -> None:
    """As LMI's max_rolling_batch_prefill_tokens, which has no second limit."""
    default, large, small = (
        estimate(QWEN3_4B, preset(max_prefill_tokens=tokens), on_host=False) for tokens in (0, 4096, 64)
    )
    assert large == estimate(QWEN3_4B, preset(prefill_chunk=4096), on_host=False)
    assert small.total < default.total < large.total
    assert estimate(QWEN3_4B, preset(max_prefill_tokens=4096, prefill_chunk=64), on_host=False) == small


def test_steps_are_larger_on_an_accelerator_unless_their_masks_or_scores_take_too_much() -> None:
    assert prefill_chunk(QWEN3_4B, preset(), on_host=False) == 2048
    assert prefill_chunk(QWEN3_4B, preset(), on_host=True) == 512
    assert prefill_chunk(QWEN3_4B, preset(attention="eager"), on_host=False) == 512
    assert prefill_chunk(replace(QWEN3_4B, aligned=True), preset(), on_host=False) == 512
    assert prefill_chunk(replace(QWEN3_4B, capabilities=("embedding",)), preset(), on_host=False) == 512
    for on_host in (True, False):
        assert prefill_chunk(QWEN3_4B, preset(max_prefill_tokens=64), on_host=on_host) == 64
    assert estimate(QWEN3_4B, preset(), on_host=False) == estimate(QWEN3_4B, preset(prefill_chunk=2048), on_host=False)
    assert estimate(QWEN3_4B, preset(), on_host=True) == estimate(QWEN3_4B, preset(prefill_chunk=512), on_host=True)


def test_each_thread_has_a_workspace() -> None:
    long = preset(prefill_chunk=2048)
    one, many = (estimate(QWEN3_4B, long, on_host=True, threads=threads) for threads in (0, 32))
    assert many.total - one.total >= 31 * memory.ATTENTION_TILE_BYTES
    assert estimate(QWEN3_4B, replace(long, threads=32), on_host=True, threads=1) == many


def test_converting_holds_the_largest_tensor_twice_before_the_cache_exists() -> None:
    converted = preset(dtype="float32", ctx_size=1, parallel=1, prefill_chunk=1)
    found = estimate(replace(QWEN3_4B, largest=1 << 30), converted, on_host=True)
    assert found.compute[0] + found.context[0] == 1 << 30


def test_cuda_graphs_count_unless_they_are_turned_off() -> None:
    def compute(**changes: Any) -> int:
        return estimate(QWEN3_4B, preset(**changes), on_host=False).compute[0]

    assert compute(parallel=1) - compute(parallel=1, enforce_eager=True) >= 10 * memory.GRAPH_BYTES
    most = compute(ctx_size=32768, parallel=64) - compute(ctx_size=32768, parallel=64, enforce_eager=True)
    assert memory.GATHERED_BYTES < most < 4 * memory.GATHERED_BYTES, (
        "what is gathered is bounded, however long the context"
    )


def test_compiled_kernels_count_on_main_memory_only() -> None:
    small = replace(QWEN3_4B, hidden=64, heads=4, head_dim=16, attention_elements=128, intermediate=128, vocab_size=512)
    host, device = (
        estimate(small, preset(ctx_size=64, parallel=1, enforce_eager=True), on_host=way).compute[0]
        for way in (True, False)
    )
    assert host > memory.KERNEL_CODE_BYTES * memory.KERNEL_CODES > device


def test_eager_attention_keeps_all_scores() -> None:
    plain, eager = (
        estimate(QWEN3_4B, preset(), on_host=True),
        estimate(QWEN3_4B, preset(attention="eager"), on_host=True),
    )
    assert eager.compute[0] - plain.compute[0] > 32 * 512 * 4096 * 2 * 4


@pytest.mark.parametrize(
    ("ctx_size", "most", "tokens"),
    [(-1, 40960, 8192), (-1, 2048, 2048), (-1, 0, 8192), (0, 40960, 40960), (100, 40960, 100), (100, 0, 100)],
)
def test_the_context_is_the_stated_one_within_the_models_limit(ctx_size: int, most: int, tokens: int) -> None:
    assert effective_ctx(replace(QWEN3_4B, max_positions=most), preset(ctx_size=ctx_size)) == tokens


def test_a_context_beyond_the_models_is_rejected_with_both_numbers() -> None:
    with pytest.raises(ContextTooLarge, match=r"a: ctx-size 50000 is more than the model's maximum of 40960 tokens"):
        estimate(QWEN3_4B, preset(ctx_size=50000), on_host=True)


def test_a_context_for_all_models_is_cut_to_the_maximum_of_each() -> None:
    assert effective_ctx(QWEN3_4B, preset(ctx_size=50000, caps_ctx=True)) == 40960
    assert effective_ctx(QWEN3_4B, preset(ctx_size=9000, caps_ctx=True)) == 9000


def test_a_model_without_known_weights_is_rejected_with_the_way_out() -> None:
    for unknown in (replace(QWEN3_4B, kv_heads=0), replace(QWEN3_4B, layers=0), replace(QWEN3_4B, hidden=0)):
        with pytest.raises(UnknownArchitecture, match="set required-memory in MiB"):
            estimate(replace(unknown, tensors={}, file_bytes=0), preset(), on_host=True)
    with pytest.raises(UnknownArchitecture, match="set ctx-size"):
        estimate(replace(QWEN3_4B, max_positions=0), preset(ctx_size=0), on_host=True)


@pytest.mark.parametrize(
    ("required", "device", "shards", "on_host", "expected", "host"),
    [
        ({"": 900}, (), 1, True, (900,), 0),
        ({"cpu": 900}, ("cpu",), 1, True, (900,), 0),
        ({"cuda:0": 900, "cpu": 100}, ("cuda:0",), 1, False, (900,), 100),
        ({"cuda:1": 900, "cuda:0": 800}, ("cuda:1", "cuda:0"), 2, False, (900, 800), BESIDE),
        ({"cuda:0": 900, "": 700}, ("cuda:0", "cuda:1"), 2, False, (900, 700), BESIDE),
        ({"": 900}, (), 2, False, (900, 900), BESIDE),
        ({"cuda:0": 900}, (), 1, False, (900,), BESIDE),
    ],
)
def test_required_memory_replaces_the_estimate(
    required: dict[str, int], device: tuple[str, ...], shards: int, on_host: bool, expected: tuple[int, ...], host: int
) -> None:
    said = preset(required_memory=required, device=device)
    found = estimate(QWEN3_4B, said, layers=(18, 18) if shards == 2 else (), on_host=on_host)
    assert (found.shards, found.host, found.source, found.is_exact) == (expected, host, "preset", True)


def test_required_memory_admits_an_unknown_model_and_ignores_other_devices() -> None:
    assert estimate(Checkpoint(), preset(required_memory={"": 900}), on_host=True).total == 900
    assert estimate(QWEN3_4B, preset(required_memory={"cuda:0": 900}), on_host=True).source == "static"


def test_reserved_memory_is_added_on_each_device_to_any_estimate() -> None:
    more = preset(reserved_memory=1000)
    plain, added = (
        estimate(QWEN3_4B, preset(), layers=(18, 18), on_host=False),
        estimate(QWEN3_4B, more, layers=(18, 18), on_host=False),
    )
    assert [b - a for a, b in zip(plain.shards, added.shards, strict=True)] == [1000, 1000]
    required = preset(reserved_memory=1000, required_memory={"": 900})
    assert estimate(QWEN3_4B, required, on_host=True).shards == (1900,)
    said = Estimated(weights=[5], context=[4], compute=[3], runtime=[2], host=1)
    assert estimates.from_trace(said, more) == MemoryEstimate((5,), (4,), (3,), (1002,), 1, "exact", 1000)


@given(facts=checkpoints, said=presets, on_host=st.booleans(), more=st.integers(1, 900))
def test_an_estimate_never_falls_when_anything_grows(facts: Checkpoint, said: Preset, on_host: bool, more: int) -> None:
    base = estimate(facts, said, on_host=on_host)
    grown = [
        estimate(facts, replace(said, ctx_size=said.ctx_size + more), on_host=on_host),
        estimate(facts, replace(said, parallel=said.parallel + more), on_host=on_host),
        estimate(facts, replace(said, prefill_chunk=said.prefill_chunk + more), on_host=on_host),
        estimate(replace(facts, layers=facts.layers + more), said, on_host=on_host),
    ]
    assert all(each.total >= base.total for each in grown)
    assert min(base.shards) > 0


@pytest.mark.parametrize(
    "facts",
    [
        replace(QWEN3_4B, layers=0),
        replace(QWEN3_4B, kv_heads=0),
        replace(QWEN3_4B, hidden=0),
        replace(QWEN3_4B, vocab_size=0),
    ],
)
def test_an_unknown_architecture_is_a_multiple_of_its_weights_or_stated(facts: Checkpoint) -> None:
    guess = estimate(facts, preset(), on_host=True)
    assert (guess.source, guess.is_exact) == ("weights", False)
    assert guess.weights[0] == weight_bytes(facts, preset(), on_host=True)
    assert guess.weights[0] + guess.context[0] + guess.compute[0] == SAFETY_FACTOR * guess.weights[0]
    assert f"weights x {SAFETY_FACTOR}" in guess.note
    assert "does not state" in guess.note
    small = replace(facts, tensors={"bfloat16": Tally(1000, 2000)}, file_bytes=2000)
    assert estimate(small, preset(), on_host=True).compute[0] >= LEAST_BESIDE
    stated = estimate(facts, preset(required_memory={"": 900 * MIB}), on_host=True)
    assert (stated.total, stated.source, stated.is_exact) == (900 * MIB, "preset", True)


def shaped(
    layers: int, hidden: int, heads: int, kv: int, size: int, width: int, vocab: int, positions: int, billions: float
) -> Checkpoint:
    """A model of published sizes in 16 bits: `size` of a head, `width` of the MLP."""
    count = int(billions * 1e9)
    return Checkpoint(
        model_type="llama", layers=layers, hidden=hidden, heads=heads, kv_heads=kv, head_dim=size, value_dim=size,
        attention_elements=2 * heads * size, intermediate=width, vocab_size=vocab, max_positions=positions,
        dtype="bfloat16",
        tensors={"bfloat16": Tally(count, 2 * count)}, params=count, file_bytes=2 * count, named_layers=layers,
        largest=2 * vocab * hidden, linears=Linears(7 * layers, count, 0, 0, 0),
        capabilities=("completion",),
    )  # fmt: skip


PUBLISHED = {
    "CodeLlama 7B": shaped(32, 4096, 32, 32, 128, 11008, 32016, 16384, 6.74),
    "Llama 3 8B": shaped(32, 4096, 32, 8, 128, 14336, 128256, 8192, 8.03),
    "Llama 3.2 1B": shaped(16, 2048, 32, 8, 64, 8192, 128256, 131072, 1.24),
    "Gemma 3 270M": shaped(18, 640, 4, 1, 256, 2048, 262144, 32768, 0.27),
    "Falcon 7B": shaped(32, 4544, 71, 1, 64, 18176, 65024, 2048, 7.2),
    "GPT-2": shaped(12, 768, 12, 12, 64, 3072, 50257, 1024, 0.124),
    "SmolLM2 135M": shaped(30, 576, 9, 3, 64, 1536, 49152, 8192, 0.135),
}


@pytest.mark.parametrize("way", [{"ctx_size": -1}, {"ctx_size": 0, "parallel": 1}, {"ctx_size": -1, "parallel": 32}])
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_guess_from_the_weights_is_never_below_the_static_estimate(
    name: str, on_host: bool, way: dict[str, int]
) -> None:
    known = estimate(PUBLISHED[name], preset(**way), on_host=on_host)
    for unknown in (replace(PUBLISHED[name], kv_heads=0), replace(PUBLISHED[name], layers=0)):
        guess = estimate(unknown, preset(**way), on_host=on_host)
        assert (known.source, guess.source) == ("static", "weights")
        assert guess.total >= known.total


def test_a_forked_worker_needs_less_than_an_executed_one() -> None:
    forked, executed = (estimate(QWEN3_4B, preset(), on_host=True, forked=way) for way in (True, False))
    assert executed.total - forked.total == RUNTIME_HOST - RUNTIME_FORKED
    assert (
        estimate(QWEN3_4B, preset(), on_host=False, forked=True).shards
        == estimate(QWEN3_4B, preset(), on_host=False).shards
    ), "a device's context is each worker's own"


def test_memory_shared_with_the_fork_server_is_subtracted_for_forked_workers_only() -> None:
    said = Estimated(weights=[9], context=[9], compute=[9], runtime=[1000], inherited=700)
    shared = int(INHERITED_SHARE * 700)
    assert estimates.from_trace(said, preset()).runtime == (1000,)
    assert estimates.from_trace(said, preset(), forked=True).runtime == (1000 - shared,)
    beside = replace(said, host=2000, inherited=0)
    assert estimates.from_trace(beside, preset(), forked=True).host == 2000, (
        "the figure is of a process on accelerators"
    )


def test_a_model_that_generates_has_memory_for_grammars() -> None:
    embedder = replace(QWEN3_4B, capabilities=("embedding",))
    assert estimates.grammar_bytes(QWEN3_4B, preset()) == GRAMMARS
    assert estimates.grammar_bytes(embedder, preset()) == 0
    assert estimates.grammar_bytes(QWEN3_4B, preset(task="embed")) == 0


@given(facts=checkpoints, said=presets, counts=st.lists(st.integers(1, 8), min_size=2, max_size=5))
def test_splitting_loses_nothing(facts: Checkpoint, said: Preset, counts: list[int]) -> None:
    layers = sum(counts)
    facts = replace(
        facts,
        layers=layers,
        state_layers=min(facts.state_layers, layers),
        by_layer=(Part({facts.dtype: Tally(1000)}),) * layers,
    )
    whole, split = estimate(facts, said, on_host=False), estimate(facts, said, layers=tuple(counts), on_host=False)
    assert whole.weights[0] <= sum(split.weights) <= max(whole.weights[0], layers * 1000 * 8)
    assert whole.context[0] <= sum(split.context)
    assert all(min(each) >= 0 for each in (split.weights, split.context, split.compute))
    assert max(split.compute) <= whole.compute[0], "no recorded graphs"


def test_a_grant_grows_the_cache_of_each_shard_by_whole_steps_and_fixes_it() -> None:
    ranged = MemoryEstimate((9, 9), (64, 32), (1, 1), (2, 2), kv_step=(16, 8), kv_steps=5, kv_tokens=64, step_tokens=16)
    assert ranged.shards == (76, 44), "the least"
    granted = ranged.granted(3)
    assert (granted.context, granted.kv_tokens, granted.kv_steps) == ((112, 56), 112, 0)
    assert granted.granted(0) == granted, "a fixed estimate stays as it is"
    assert ranged.granted(0).shards == ranged.shards


PER_TOKEN = 36 * 2 * 8 * 128 * 2  # bytes of QWEN3_4B


def test_the_least_cache_is_one_request_and_the_most_is_that_of_all_sequences() -> None:
    found = estimate(QWEN3_4B, preset(ctx_size=1000, parallel=5), on_host=False)
    assert found.context == (1008 * PER_TOKEN,), "whole blocks"
    assert (found.kv_tokens, found.step_tokens, found.kv_step) == (1008, 16, (16 * PER_TOKEN,))
    assert found.granted(found.kv_steps).kv_tokens == 5 * 1008
    rows = estimate(replace(QWEN3_4B, aligned=True), preset(ctx_size=1000, parallel=5), on_host=False)
    assert (rows.kv_tokens, rows.step_tokens, rows.kv_steps, rows.kv_step) == (1000, 1000, 4, (1000 * PER_TOKEN,))


@pytest.mark.parametrize(
    ("facts", "changes", "tokens"),
    [
        (QWEN3_4B, {"parallel": 1}, 4096),
        (QWEN3_4B, {"kv_tokens": 9000}, 9008),
        (replace(QWEN3_4B, aligned=True), {"kv_tokens": 9000}, 8192),
        (QWEN3_4B, {"required_memory": {"": 900}}, 0),
        (QWEN3_4B, {"task": "embed"}, 0),
        (Checkpoint(tensors=QWEN3_4B.tensors, file_bytes=1), {}, 0),
    ],
)
def test_a_cache_without_a_range_is_fixed(facts: Checkpoint, changes: dict[str, Any], tokens: int) -> None:
    found = estimate(facts, preset(**changes), on_host=False)
    assert (found.kv_steps, found.kv_step, found.kv_tokens) == (0, (), tokens)


def test_states_of_all_sequences_are_in_the_least_cache_of_blocks() -> None:
    facts = replace(QWEN3_4B, layers=8, state_layers=4, state_elements=1000)
    found = estimate(facts, preset(parallel=3), on_host=False)
    per_token = 4 * 2 * 8 * 128 * 2
    assert found.context == (4096 * per_token + 3 * 4 * 4000,)
    assert found.kv_step == (16 * per_token,)


@given(facts=checkpoints, said=presets, rows=st.integers(1, 32))
def test_the_range_is_the_cache_of_as_many_kv_tokens(facts: Checkpoint, said: Preset, rows: int) -> None:
    """A worker gets its grant as kv-tokens, so each size of the range must be that of a preset with this key."""
    found = estimate(facts, said, on_host=False)
    steps = min(rows - 1, said.parallel - 1) * (found.kv_steps // max(1, said.parallel - 1))
    granted = found.granted(steps)
    assert granted.context == estimate(facts, replace(said, kv_tokens=granted.kv_tokens), on_host=False).context


def test_a_trace_of_the_largest_cache_shows_the_bytes_of_its_steps() -> None:
    """Static bytes of states are a bound, so the traced least and step may be less than the static ones."""
    first = replace(estimate(QWEN3_4B, preset(), on_host=False), context=(1000,), kv_step=(400,), kv_steps=3)
    first = replace(first, kv_tokens=4096, step_tokens=4096)  # 600 bytes do not grow
    found = estimates.from_trace(
        Estimated(weights=[5], context=[1801], compute=[3], runtime=[2]), preset(), first=first
    )
    assert (found.context, found.kv_step) == ((901,), (300,))
    assert found.granted(3).context == (1801,), "the most is exact"
    assert (found.kv_tokens, found.step_tokens, found.kv_steps) == (4096, 4096, 3)


def test_an_exact_estimate_from_before_has_the_range_of_the_static_one() -> None:
    first = estimate(QWEN3_4B, preset(), on_host=False)
    known = replace(first.granted(first.kv_steps), source="exact", weights=(7,))
    assert estimates.refreshed(known, first) == replace(first, source="exact", weights=(7,))
    fixed = estimate(QWEN3_4B, preset(kv_tokens=9000), on_host=False)
    assert estimates.refreshed(replace(fixed, source="exact", kv_tokens=0), fixed) == replace(fixed, source="exact")


# A KV cache with another data type.


KINDS = ("auto", "f32", "f16", "bf16", "int8", "int4")


def test_a_head_takes_its_codes_and_a_scale_for_each_group() -> None:
    assert [head_bytes(name, 128, 2) for name in KINDS] == [256, 512, 256, 256, 128 + 4 * 2, 64 + 4 * 4]
    assert head_bytes("int8", 80, 4) == 80 + 4 * 2, "groups of 20"
    assert head_bytes("int8", 37, 4) == 37 + 2, "no group divides it"


def test_the_cache_takes_what_its_heads_do() -> None:
    tokens = 4 * 4096 * 36 * 2 * 8
    assert most_context(QWEN3_4B, preset(kv_cache_dtype="int8"), 4096, on_host=False) == tokens * 136
    assert most_context(QWEN3_4B, preset(kv_cache_dtype="int4"), 4096, on_host=False) == tokens * 80
    deepseek = replace(QWEN3_4B, kv_heads=1, head_dim=512, value_dim=64, index_dim=128, aligned=True)
    row = 4096 * 36 * ((512 + 32) + (64 + 4) + 2 * 128)  # index keys are never quantized
    found = most_context(deepseek, preset(kv_cache_dtype="int8", parallel=1), 4096, on_host=False)
    assert found == row + 4096 * (512 + 32), "and a row of the larger ones, on its way"


def test_states_stay_as_they_are() -> None:
    headless = replace(QWEN3_4B, heads=0, kv_heads=0, head_dim=0, layers=8, aligned=True)
    mamba = replace(headless, state_layers=8, state_elements=1000)
    plain, quantized = (most_context(mamba, preset(kv_cache_dtype=name), 96, on_host=True) for name in ("auto", "int4"))
    assert plain == quantized


def test_only_another_type_than_the_models_is_dequantized() -> None:
    assert not kv_type_differs("auto", "float32")
    assert not kv_type_differs("bf16", "bfloat16")
    assert kv_type_differs("bf16", "float16")
    assert kv_type_differs("f32", "bfloat16")
    assert kv_type_differs("int8", "float32")
    same = compute_bytes(QWEN3_4B, preset(kv_cache_dtype="bf16"), 4096, on_host=True)
    assert same == compute_bytes(QWEN3_4B, preset(), 4096, on_host=True)
