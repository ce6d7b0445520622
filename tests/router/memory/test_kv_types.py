"""Bytes of a KV cache with another data type, computed from checkpoint facts."""

from dataclasses import replace

from router.memory.segments import compute_bytes, head_bytes, is_compact
from tests.router.checkpoints import QWEN3_4B, most_context, preset

KINDS = ("auto", "f32", "f16", "bf16", "int8", "int4")


def test_a_head_takes_its_codes_and_a_scale_for_each_group() -> None:
    assert [head_bytes(name, 128, 2) for name in KINDS] == [256, 512, 256, 256, 128 + 4 * 2, 64 + 4 * 4]
    assert head_bytes("int8", 80, 4) == 80 + 4 * 2, "groups of 20"
    assert head_bytes("int8", 37, 4) == 37 + 2, "no group divides it"


def test_the_cache_takes_what_its_heads_do() -> None:
    tokens = 4 * 4096 * 36 * 2 * 8
    assert most_context(QWEN3_4B, preset(kv_cache_dtype="int8"), 4096, on_host=False) == tokens * 136
    assert most_context(QWEN3_4B, preset(kv_cache_dtype="int4"), 4096, on_host=False) == tokens * 80
    deepseek = replace(QWEN3_4B, kv_heads=1, head_dim=512, value_dim=64, aligned=True)
    row = 4096 * 36 * ((512 + 32) + (64 + 4))
    found = most_context(deepseek, preset(kv_cache_dtype="int8", parallel=1), 4096, on_host=False)
    assert found == row + 4096 * (512 + 32), "and a row of the larger ones, on its way"


def test_states_stay_as_they_are() -> None:
    headless = replace(QWEN3_4B, heads=0, kv_heads=0, head_dim=0, layers=8, aligned=True)
    mamba = replace(headless, state_layers=8, state_elements=1000)
    plain, quantized = (most_context(mamba, preset(kv_cache_dtype=name), 96, on_host=True) for name in ("auto", "int4"))
    assert plain == quantized


def test_only_another_type_than_the_models_is_dequantized() -> None:
    assert not is_compact("auto", "float32")
    assert not is_compact("bf16", "bfloat16")
    assert is_compact("bf16", "float16")
    assert is_compact("f32", "bfloat16")
    assert is_compact("int8", "float32")
    same = compute_bytes(QWEN3_4B, preset(kv_cache_dtype="bf16"), 4096, on_host=True)
    assert same == compute_bytes(QWEN3_4B, preset(), 4096, on_host=True)
