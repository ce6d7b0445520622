"""config.json with the changes of a preset, as values."""

import math
from typing import Any

import pytest

from worker.protocol.model_config import FULL, apply_rope, longest_sequence, merge, with_quantization

LLAMA: dict[str, Any] = {
    "hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
OLD = {**LLAMA, "rope_theta": 10000.0, "rope_scaling": None}
del OLD["rope_parameters"]
GEMMA = {
    **LLAMA, "head_dim": 256, "rope_parameters": {
        FULL: {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip


def rope(config: dict[str, Any], **keys: Any) -> tuple[dict[str, Any], int]:
    """The RoPE parameters and the longest sequence under these keys."""
    found = apply_rope(config, {name.replace("_", "-"): value for name, value in keys.items()})
    assert not {"rope_theta", "rope_scaling", "rotary_emb_base"} & found.keys(), "transformers prefers old names"
    return found["rope_parameters"], longest_sequence(found.get)


@pytest.mark.parametrize(
    ("members", "longest"),
    [
        ({}, 4096),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 4096),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 16384),
        ({"rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048}}, 16384),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}}, 4096),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}}, 4096),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 512}, 512),
        ({"rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0}}}, 32768),
        ({"rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0}}, "model_type": "gemma3_text"}, 4096),
        ({"max_position_embeddings": 514, "model_type": "xlm-roberta"}, 512),
        ({"max_position_embeddings": 514, "model_type": "xlm-roberta", "pad_token_id": 0}, 513),
        ({"max_position_embeddings": None, "rope_scaling": "much"}, 0),
    ],
)
def test_scaling_of_the_checkpoint_counts_as_in_vllm_where_it_keeps_cached_keys_valid(
    members: dict[str, Any], longest: int
) -> None:
    assert longest_sequence({**OLD, **members}.get) == longest


@pytest.mark.parametrize("config", [LLAMA, OLD])
def test_rope_scale_is_linear_and_multiplies_the_context(config: dict[str, Any]) -> None:
    expected = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    assert rope(config, rope_scale=4.0) == (expected, 16384)
    assert rope(config, rope_scaling="linear", rope_scale=4.0) == (expected, 16384)


@pytest.mark.parametrize("config", [LLAMA, OLD])
def test_alpha_makes_the_slowest_rotation_alpha_times_slower_and_keeps_the_fastest(config: dict[str, Any]) -> None:
    found, longest = rope(config, alpha_value=2.5)
    assert found == {"rope_type": "default", "rope_theta": 10000 * 2.5 ** (128 / 126)}
    assert math.isclose(found["rope_theta"], 25366.25, rel_tol=1e-6)
    before, after = ([theta ** (-pair / 128) for pair in range(0, 128, 2)] for theta in (10000, found["rope_theta"]))
    assert before[0] == after[0] == 1
    assert math.isclose(before[-1] / after[-1], 2.5)
    assert longest == 10240


def test_alpha_counts_rotated_dimensions_only() -> None:
    partial = {**LLAMA, "rope_parameters": {**LLAMA["rope_parameters"], "partial_rotary_factor": 0.25}}
    assert rope(partial, alpha_value=2.0)[0]["rope_theta"] == 10000 * 2 ** (32 / 30)
    latent = {**LLAMA, "qk_rope_head_dim": 64}
    assert rope(latent, alpha_value=2.0)[0]["rope_theta"] == 10000 * 2 ** (64 / 62)


def test_a_base_above_that_of_the_model_grows_the_context_like_the_alpha_that_gives_it() -> None:
    base = 10000 * 3.0 ** (128 / 126)
    assert rope(LLAMA, rope_freq_base=base)[0]["rope_theta"] == base
    assert rope(LLAMA, rope_freq_base=base)[1] == 12288
    assert rope(LLAMA, rope_freq_base=500.0)[1] == 4096
    assert rope(LLAMA, rope_freq_base=500.0, alpha_value=2.0)[0]["rope_theta"] == 500 * 2 ** (128 / 126)


def test_yarn_has_its_original_context_and_the_attention_factor_of_llama_cpp() -> None:
    found, longest = rope(LLAMA, rope_scaling="yarn", rope_scale=8.0)
    assert longest == 32768
    assert found == {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 4096
    }  # fmt: skip
    keys = {"yarn_orig_ctx": 2048, "yarn_attn_factor": 0.5, "yarn_beta_slow": 2.0, "yarn_beta_fast": 16.0}
    found, longest = rope(LLAMA, rope_scaling="yarn", rope_scale=8.0, **keys)
    assert longest == 16384
    assert (found["beta_slow"], found["beta_fast"], found["original_max_position_embeddings"]) == (2.0, 16.0, 2048)
    assert math.isclose(found["attention_factor"], 0.5 * (1 + 0.1 * math.log(8)))


def test_scaling_of_the_checkpoint_is_replaced_or_removed() -> None:
    linear = {**OLD, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert rope(linear, rope_scale=4.0) == ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, 16384)
    assert rope(linear, rope_scaling="none") == ({"rope_type": "default", "rope_theta": 10000.0}, 4096)
    assert rope(linear, alpha_value=2.0)[0]["factor"] == 2.0
    yarn = {**OLD, "max_position_embeddings": 8192, "rope_scaling": {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096, "mscale": 0.7,
    }}  # fmt: skip
    found, longest = rope(yarn, rope_scale=4.0)
    assert (found["rope_type"], found["factor"], found["mscale"], longest) == ("yarn", 4.0, 0.7, 16384)
    for keys in ({"rope_scaling": "none"}, {"rope_scaling": "linear", "rope_scale": 1.0}):
        assert rope(yarn, **keys) == ({"rope_type": "default", "rope_theta": 10000.0}, 4096)
    assert rope(yarn, rope_scaling="linear")[1] == 8192
    product = {**GEMMA, "model_type": "gemma3_text", "rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0}}}
    assert rope(product, rope_scaling="none")[1] == 512
    assert rope(product, rope_scale=4.0)[1] == 2048
    assert rope(product, alpha_value=2.0)[1] == 8192


@pytest.mark.parametrize("kind", ["llama3", "longrope"])
def test_scaling_that_is_a_table_cannot_be_combined_with_another(kind: str) -> None:
    scaled = {**LLAMA, "rope_parameters": {"rope_type": kind, "rope_theta": 5e5, "factor": 8.0}}
    for keys in ({"rope-scale": 2.0}, {"rope-scaling": "yarn"}, {"yarn-orig-ctx": 9}):
        with pytest.raises(ValueError, match=f"{next(iter(keys))}: the checkpoint has RoPE scaling of the kind {kind}"):
            apply_rope(scaled, keys)
    for scaling in ("none", "linear"):  # llama.cpp keeps it
        assert apply_rope(scaled, {"rope-scaling": scaling}) == scaled
    assert apply_rope(scaled, {"rope-freq-base": 1e6})["rope_parameters"]["rope_type"] == kind


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope-scaling": "yarn"}, "needs rope-scale"),
        ({"yarn-orig-ctx": 2048}, "needs rope-scaling = yarn"),
        ({"yarn-beta-fast": 9.0, "rope-scale": 4.0}, "yarn-beta-fast: needs rope-scaling = yarn"),
    ],
)
def test_keys_without_their_counterpart_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_rope(LLAMA, keys)


def test_keys_change_full_attention_where_kinds_of_layers_rotate_differently() -> None:
    found, _ = rope(GEMMA, rope_scale=8.0)
    assert found[FULL] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    assert found["sliding_attention"] == GEMMA["rope_parameters"]["sliding_attention"]


def test_keys_change_the_language_model_of_a_model_with_images() -> None:
    found = apply_rope({"model_type": "llava", "text_config": OLD}, {"rope-scale": 2.0})
    assert found["model_type"] == "llava"
    assert longest_sequence(found["text_config"].get) == 8192


@pytest.mark.parametrize(
    ("config", "override", "expected"),
    [
        (LLAMA, {"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (LLAMA, {"rope_parameters": {"rope_theta": 5e5}}, {"rope_type": "default", "rope_theta": 5e5}),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}},
         {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
        (OLD, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
         {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
        ({**OLD, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, {"rope_parameters": {"rope_type": "linear"}},
         {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
        ({**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 9.0, "factor": 2.0}},
         {"rope_scaling": None},
         {"rope_theta": 9.0}),
        (GEMMA, {"rope_theta": 7.0, "rope_local_base_freq": 8.0},
         {FULL: {"rope_type": "default", "rope_theta": 7.0},
          "sliding_attention": {"rope_type": "default", "rope_theta": 8.0}}),
    ],
)  # fmt: skip
def test_an_override_reaches_rope_by_old_and_new_names(
    config: dict[str, Any], override: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = merge(config, override)
    assert found["rope_parameters"] == expected
    assert not {"rope_theta", "rope_scaling"} & found.keys()


def test_an_override_merges_objects_and_replaces_the_rest() -> None:
    config = {"a": {"b": 1, "c": [1]}, "d": 2}
    assert merge(config, {"a": {"c": [2]}, "d": {"x": 1}}) == {"a": {"b": 1, "c": [2]}, "d": {"x": 1}}
    assert merge(OLD, {"rope_theta": 7.0}) == {**OLD, "rope_theta": 7.0}, "the checkpoint's layout stays"
    assert config == {"a": {"b": 1, "c": [1]}, "d": 2}


def test_a_quantize_config_of_onnx_files_states_no_quantization() -> None:
    """transformers.js writes a file of this name beside weights that are not quantized."""
    assert with_quantization(LLAMA, {"modes": ["q8"], "per_channel": True, "reduce_range": True}) == LLAMA
    assert with_quantization(LLAMA, {"bits": 4})["quantization_config"] == {"quant_method": "gptq", "bits": 4}


def test_the_members_of_autoawqs_file_are_those_of_transformers() -> None:
    found = with_quantization(LLAMA, {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"})
    stated = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "GEMM"}
    assert found["quantization_config"] == stated


def test_a_compression_config_of_zeros_alone_states_no_quantization() -> None:
    """llm-compressor writes it for a pruned model, whose weights are stored like any others."""
    sparsity = {"sparsity_config": {"format": "dense", "global_sparsity": 0.5}}
    pruned = {**LLAMA, "compression_config": {"quant_method": "compressed-tensors", **sparsity}}
    assert with_quantization(pruned, {}) == pruned
    groups = {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}
    both = {**LLAMA, "compression_config": {**sparsity, **groups}}
    assert with_quantization(both, {})["quantization_config"]["config_groups"] == groups["config_groups"]
