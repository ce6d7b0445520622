"""The checkpoint reader: facts of a snapshot, and errors for damaged ones."""

import json
import math
import shutil
import struct
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from router.config.presets import Preset
from router.memory.checkpoint import has_only_pickles, meta, modalities, offered, read
from router.memory.checkpoint_facts import Linears, Part, Tally, UnknownCheckpoint
from router.store import catalogue
from tests import tiny
from tests.pickled import pickle_weights, poison
from tests.sparse import SIZES, Tensors, write_weights
from worker.fetch.pickles import pickle_files
from worker.protocol.pickled_weights import PICKLED

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    "max_position_embeddings": 256, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
TENSORS = {"model.embed_tokens.weight": ("BF16", [100, 64]), "lm_head.weight": ("BF16", [100, 64])}


def snapshot(folder: Path, config: Mapping[str, Any] = LLAMA, tensors: Tensors = TENSORS, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    write_weights(folder / "model.safetensors", tensors)
    return folder


def refuses(folder: Path, message: str) -> None:
    with pytest.raises(UnknownCheckpoint, match=message):
        read(folder)


def test_a_plain_decoder_is_read_whole(tmp_path: Path) -> None:
    facts = read(snapshot(tmp_path))
    assert (facts.model_type, facts.dtype) == ("llama", "bfloat16")
    assert (facts.layers, facts.hidden, facts.heads, facts.kv_heads, facts.head_dim) == (2, 64, 4, 2, 16)
    assert (facts.intermediate, facts.vocab_size, facts.max_positions) == (128, 100, 256)
    assert facts.tensors == {"bfloat16": Tally(12800, 25600)}
    assert facts.params == 12800
    assert facts.capabilities == ("completion",)


def test_the_keys_of_gpt_2_are_known(tmp_path: Path) -> None:
    gpt2 = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4,
        "n_positions": 128, "n_inner": None, "vocab_size": 50,
    }  # fmt: skip
    tensors = {
        "wte.weight": ("F32", [50, 64]),
        "h.0.attn.bias": ("F32", [1, 1, 128, 128]),
        "h.0.attn.masked_bias": ("F32", []),
    }
    facts = read(snapshot(tmp_path, gpt2, tensors))
    assert (facts.layers, facts.hidden, facts.heads, facts.kv_heads, facts.head_dim) == (3, 64, 4, 4, 16)
    assert (facts.intermediate, facts.max_positions, facts.dtype) == (256, 128, "float32")
    assert facts.tied
    assert facts.params == 50 * 64  # masks stored by old versions are made anew


def test_a_nested_text_config_is_the_language_models(tmp_path: Path) -> None:
    text = {key: value for key, value in LLAMA.items() if key not in ("architectures", "model_type")}
    config = {"architectures": ["XForConditionalGeneration"], "model_type": "x", "hidden_size": 9, "text_config": text}
    facts = read(snapshot(tmp_path, config))
    assert (facts.model_type, facts.hidden, facts.layers) == ("x", 64, 2)


def test_sizes_that_the_config_does_not_state_follow_from_tensors(tmp_path: Path) -> None:
    silent = {"architectures": ["XForCausalLM"], "model_type": "x", "num_hidden_layers": 2, "head_dim": 16}
    tensors = {
        "vision_model.layers.0.k_proj.weight": ("BF16", [999, 9]),
        "model.embed_tokens.weight": ("BF16", [100, 64]),
        "model.layers.0.self_attn.q_proj.weight": ("BF16", [128, 64]),
        "model.layers.0.self_attn.k_proj.weight": ("BF16", [32, 64]),
    }
    facts = read(snapshot(tmp_path, silent, tensors))
    assert (facts.hidden, facts.vocab_size, facts.heads, facts.kv_heads, facts.head_dim) == (64, 100, 8, 2, 16)
    assert facts.dtype == "bfloat16"


def test_layers_with_keys_of_several_sizes_count_as_the_largest(tmp_path: Path) -> None:
    rows = {0: 32, 1: 32, 2: 64}
    keys = {f"model.layers.{layer}.self_attn.k_proj.weight": ("BF16", [size, 64]) for layer, size in rows.items()}
    tower = {"vision_tower.layers.0.k_proj.weight": ("BF16", [999, 9])}
    facts = read(snapshot(tmp_path, tensors={**TENSORS, **keys, **tower}, head_dim=16, num_key_value_heads=2))
    assert (facts.kv_heads, facts.head_dim) == (4, 16)


def test_latent_attention_caches_one_compressed_row(tmp_path: Path) -> None:
    mla: dict[str, Any] = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    facts = read(snapshot(tmp_path, num_key_value_heads=4, index_head_dim=24, **mla))
    assert (facts.kv_heads, facts.head_dim, facts.value_dim, facts.index_dim) == (1, 32, 8, 24)
    assert facts.attention_elements == 4 * (16 + 8 + 16)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"head_dim": 32}, "head_dim", 32),  # not hidden / heads
        ({"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 96}, "intermediate", 8 * 96),
        ({"decoder_layers": 0}, "layers", 2),  # a zero under one name does not hide another name
        ({"num_attention_heads": 0, "n_head": 2}, "heads", 2),
        ({"architectures": ["BertModel"]}, "capabilities", ("embedding", "rerank")),
        ({"quantization_config": {"quant_method": "gptq", "group_size": 64}}, "group", 64),
        ({"quantization_config": {"quant_method": "gptq", "group_size": -1}}, "group", -1),
        ({"quantization_config": {"quant_method": "gptq", "q_group_size": 32}}, "group", 32),
        ({"quantization_config": {"quant_method": "gptq"}}, "group", 0),
        ({"num_key_value_heads": None}, "kv_heads", 4),
        ({"num_key_value_heads": None, "model_type": "falcon", "multi_query": True}, "kv_heads", 1),
        ({"num_key_value_heads": None, "model_type": "gpt_bigcode"}, "kv_heads", 1),
        ({"num_key_value_heads": None, "model_type": "mpt", "attn_config": {"kv_n_heads": 2}}, "kv_heads", 2),
        (
            {"num_key_value_heads": None, "model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
            "kv_heads", 4,
        ),
    ],
)  # fmt: skip
def test_a_fact_is_found_under_each_of_its_names(
    tmp_path: Path, changes: dict[str, Any], field: str, value: object
) -> None:
    assert getattr(read(snapshot(tmp_path, **changes)), field) == value


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]}, 3),
        ({"attn_layer_period": 4, "attn_layer_offset": 1}, 3),
        ({"attn_layer_indices": [2]}, 3),
        ({"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]}, 4),
        ({"full_attention_interval": 4}, 3),
        ({"model_type": "mamba", "num_attention_heads": None, "num_key_value_heads": None, "state_size": 16}, 4),
        ({}, 0),
    ],
)
def test_layers_with_a_state_are_counted(tmp_path: Path, changes: dict[str, Any], layers: int) -> None:
    facts = read(snapshot(tmp_path, num_hidden_layers=4, **changes))
    assert facts.state_layers == layers
    assert (facts.state_elements > 0) == (layers > 0)


@pytest.mark.parametrize(
    "kinds",
    [
        {"hybrid_override_pattern": "M-M*ME", "num_hidden_layers": 6},
        {
            "layers_block_type": [
                "linear_attention", "mlp", "linear_attention", "full_attention", "linear_attention", "moe",
            ],
            "num_hidden_layers": None,
        },
    ],
)  # fmt: skip
def test_layers_of_nemotron_h_that_are_mlps_cache_nothing(tmp_path: Path, kinds: dict[str, Any]) -> None:
    """In the files of its author, and as transformers writes them."""
    states: dict[str, Any] = {
        "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 10, "n_groups": 1, "conv_kernel": 4,
    }  # fmt: skip
    tensors = {f"backbone.layers.{layer}.norm.weight": ("BF16", [64]) for layer in range(6)}
    facts = read(snapshot(tmp_path, LLAMA, tensors, model_type="nemotron_h", **kinds, **states))
    assert (facts.layers, facts.state_layers, facts.attention_layers) == (6, 3, 1)
    assert len(facts.by_layer) == 6, "it can be split by layers"
    assert facts.state_elements == 40 * 8 + (40 + 2 * 8) * 4


def test_the_decoder_of_t5gemma_has_the_cache(tmp_path: Path) -> None:
    sizes = {name: LLAMA[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")}
    decoder = {**sizes, "num_hidden_layers": 3, "vocab_size": 100, "max_position_embeddings": 256}
    config = {
        "architectures": ["T5GemmaForConditionalGeneration"], "model_type": "t5gemma", "is_encoder_decoder": True,
        "decoder": decoder, "encoder": {**decoder, "num_hidden_layers": 5},
    }  # fmt: skip
    facts = read(snapshot(tmp_path, config))
    assert (facts.model_type, facts.layers, facts.kv_heads, facts.head_dim) == ("t5gemma", 3, 2, 16)
    assert (facts.cross_attention, facts.max_positions) == (True, 256)


def test_llama_4_computes_all_tokens_with_all_experts(tmp_path: Path) -> None:
    """Each expert has a copy of all tokens, so its width counts with the hidden size."""
    experts: dict[str, Any] = {"num_local_experts": 16, "num_experts_per_tok": 1}
    assert read(snapshot(tmp_path, model_type="llama4_text", **experts)).intermediate == 16 * (128 + 64)
    assert read(snapshot(tmp_path, model_type="mixtral", **experts)).intermediate == 128
    assert read(snapshot(tmp_path, model_type="llama4_text")).intermediate == 128, "it states no number of experts"


def test_longcat_has_two_attention_layers_in_each_layer(tmp_path: Path) -> None:
    facts = read(snapshot(tmp_path, model_type="longcat_flash", num_hidden_layers=None, num_layers=3))
    assert facts.attention_layers == 6


def test_a_tied_head_is_counted_once_even_if_stored_twice(tmp_path: Path) -> None:
    assert read(snapshot(tmp_path, tie_word_embeddings=True)).params == 6400
    assert read(snapshot(tmp_path, tie_word_embeddings=False)).params == 12800


def test_quantized_weights_without_a_method_are_refused(tmp_path: Path) -> None:
    folder = snapshot(tmp_path, tensors={**TENSORS, "model.layers.0.mlp.qweight": ("I32", [8, 128])})
    refuses(folder, r"mlp\.qweight\), but config.json has no quantization_config at its")
    override = '{"quantization_config": {"quant_method": "gptq", "bits": 4}}'
    assert read(folder, override=override).quantization == "gptq"


def test_quantize_config_json_counts_where_config_json_states_no_quantization(tmp_path: Path) -> None:
    """As in checkpoints of AutoGPTQ, without the method."""
    folder = snapshot(tmp_path, tensors={**TENSORS, "model.layers.0.mlp.qweight": ("I32", [8, 128])})
    (folder / "quantize_config.json").write_text('{"bits": 8, "group_size": 64}')
    facts = read(folder)
    assert (facts.quantization, facts.bits, facts.group) == ("gptq", 8, 64)
    override = '{"quantization_config": {"quant_method": "awq"}}'
    assert read(folder, override=override).quantization == "awq"
    (folder / "quantize_config.json").rename(folder / "quant_config.json")
    (folder / "quant_config.json").write_text('{"w_bit": 4, "q_group_size": 128, "version": "GEMM"}')
    facts = read(folder)
    assert (facts.quantization, facts.bits, facts.group) == ("awq", 4, 128)
    stated = {"quant_method": "gptq", "bits": 4}
    assert read(snapshot(tmp_path, tensors=TENSORS, quantization_config=stated)).bits == 4


def test_a_quantize_config_that_was_left_beside_plain_weights_does_not_count(tmp_path: Path) -> None:
    folder = snapshot(tmp_path / "whole")
    index = {"weight_map": dict.fromkeys(TENSORS, "model-1.safetensors")}
    parts = snapshot(tmp_path / "parts")
    (parts / "model.safetensors").rename(parts / "model-1.safetensors")
    (parts / "model.safetensors.index.json").write_text(json.dumps(index))
    for each in (folder, parts):
        before = read(each)
        (each / "quantize_config.json").write_text('{"bits": 4, "group_size": 128}')
        assert read(each) == before
        assert not before.quantization


def test_weights_may_have_the_name_that_autogptq_gave_them(tmp_path: Path) -> None:
    folder = snapshot(tmp_path, tensors={**TENSORS, "model.layers.0.mlp.qweight": ("I32", [8, 128])})
    (folder / "quantize_config.json").write_text('{"bits": 4, "group_size": 128}')
    before = read(folder)
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-128g.safetensors")
    found = read(folder)
    assert (found.quantization, replace(found, identity=before.identity)) == ("gptq", before)
    assert catalogue.missing(folder) == ""
    (folder / PICKLED).touch()  # a second copy, which is neither converted nor read
    assert not has_only_pickles(str(folder))
    assert pickle_files(folder) == []
    assert read(folder) == found


def test_compression_config_is_quantization_config(tmp_path: Path) -> None:
    """The name that compressed-tensors wrote first, without the method."""
    stated = {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}
    facts = read(snapshot(tmp_path, compression_config=stated), override='{"quantization_config": {"ignore": []}}')
    assert (facts.quantization, facts.bits) == ("compressed-tensors", 4)


def test_quantized_weights_have_stored_bytes_and_dequantized_parameters(tmp_path: Path) -> None:
    tensors = {**TENSORS, "model.layers.0.mlp.qweight": ("I32", [8, 128])}
    facts = read(snapshot(tmp_path, tensors=tensors, quantization_config={"quant_method": "gptq", "bits": 4}))
    assert facts.quantization == "gptq"
    assert facts.tensors["int32"] == Tally(1024, 4096)
    assert facts.params == 12800 + 8 * 1024


def test_each_layer_has_its_own_tensors_and_scales(tmp_path: Path) -> None:
    """A layer may stay unquantized, and a head may be quantized."""
    tensors = {
        "model.embed_tokens.weight": ("F16", [512, 64]),
        "model.layers.0.mlp.up_proj.weight": ("F16", [128, 64]),
        "model.layers.1.mlp.up_proj.qweight": ("I32", [8, 128]),
        "model.layers.1.mlp.up_proj.scales": ("F16", [1, 128]),
        "model.layers.1.self_attn.norm.weight": ("F16", [16]),
        "model.norm.weight": ("F16", [64]),
        "lm_head.qweight": ("I32", [8, 512]),
        "lm_head.scales": ("F16", [1, 512]),
    }
    stated = {"quant_method": "gptq", "bits": 4}
    facts = read(snapshot(tmp_path, tensors=tensors, num_hidden_layers=2, quantization_config=stated))
    plain, quantized = facts.by_layer
    assert plain == Part({"float16": Tally(8192, 16384)}, 0, Linears(1, 8192, 128, 128, 192))
    assert (quantized.tensors, quantized.scale_bytes) == ({"int32": Tally(1024, 4096), "float16": Tally(16, 32)}, 256)
    assert facts.behind == Part({"float16": Tally(64, 128), "int32": Tally(4096, 16384)}, 1024)
    assert facts.scale_bytes == 256 + 1024


@pytest.mark.parametrize(
    ("method", "quantized", "scales", "parameters"),
    [
        ({"quant_method": "gptq", "bits": 4}, {"qweight": ("I32", [8, 64])},
         {"qzeros": ("I32", [1, 8]), "scales": ("F16", [1, 64]), "g_idx": ("I32", [64])}, 8 * 512),
        ({"quant_method": "awq", "bits": 4}, {"qweight": ("I32", [64, 8])},
         {"qzeros": ("I32", [1, 8]), "scales": ("F16", [1, 64])}, 8 * 512),
        ({"quant_method": "fp8"}, {"weight": ("F8_E4M3", [64, 64])}, {"weight_scale_inv": ("F32", [1, 1])}, 4096),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, {"weight": ("U8", [2048, 1])},
         {"weight.absmax": ("F32", [64]), "weight.quant_map": ("F32", [16]),
          "weight.quant_state.bitsandbytes__nf4": ("U8", [80])}, 4096),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, {"weight": ("I8", [64, 64])},
         {"SCB": ("F32", [64]), "weight_format": ("U8", [])}, 4096),
        ({"quant_method": "mxfp4"}, {"gate_up_proj_blocks": ("U8", [4, 8, 64])},
         {"gate_up_proj_scales": ("U8", [4, 8, 4])}, 4096),
    ],
    ids=["gptq", "awq", "fp8", "bnb-4bit", "bnb-8bit", "mxfp4"],
)  # fmt: skip
def test_scales_are_no_parameters_and_keep_their_stored_size(
    tmp_path: Path, method: dict[str, Any], quantized: Tensors, scales: Tensors, parameters: int
) -> None:
    layer = {f"model.layers.0.mlp.up_proj.{name}": each for name, each in {**quantized, **scales}.items()}
    facts = read(snapshot(tmp_path, tensors={**TENSORS, **layer}, quantization_config=method))
    stored = sum(SIZES[dtype] * math.prod(shape) for dtype, shape in scales.values())
    assert facts.params == 12800 + parameters
    assert facts.scale_bytes == stored
    assert sum(tally.bytes for tally in facts.tensors.values()) + stored == facts.file_bytes - header_bytes(tmp_path)


def header_bytes(folder: Path) -> int:
    return 8 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")


def test_only_matrices_that_are_quantized_count_as_linear_layers(tmp_path: Path) -> None:
    linear = {
        "model.layers.0.self_attn.q_proj.weight": ("BF16", [64, 60]),
        "model.layers.0.mlp.shared_expert_gate.weight": ("BF16", [1, 64]),
    }
    others = {
        "model.layers.0.mlp.gate.weight": ("BF16", [4, 64]),
        "model.layers.0.mlp.experts.0.up_proj.weight": ("BF16", [64, 64]),
        "model.layers.0.input_layernorm.weight": ("BF16", [64]),
        "model.layers.0.self_attn.q_proj.bias": ("BF16", [64]),
        "model.embed_positions.weight": ("BF16", [9, 64]),
    }
    facts = read(snapshot(tmp_path, tensors={**TENSORS, **linear, **others}))
    assert facts.linears == Linears(count=2, elements=3904, rows=65, blocks=61, lora_elements=189)


def test_shards_of_an_index_are_read_together(tmp_path: Path) -> None:
    snapshot(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    write_weights(tmp_path / "one.safetensors", {"model.embed_tokens.weight": TENSORS["lm_head.weight"]})
    write_weights(tmp_path / "two.safetensors", {"lm_head.weight": TENSORS["lm_head.weight"]})
    index = {"weight_map": {"model.embed_tokens.weight": "one.safetensors", "lm_head.weight": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read(tmp_path).params == 12800
    (tmp_path / "two.safetensors").unlink()
    refuses(tmp_path, r"lacks two\.safetensors")


def test_an_index_that_is_larger_than_any_header_is_not_read(tmp_path: Path) -> None:
    with (snapshot(tmp_path) / "model.safetensors.index.json").open("wb") as file:
        file.truncate(200 << 20)
    refuses(tmp_path, r"model\.safetensors\.index\.json is larger than")


def test_files_outside_the_snapshot_are_not_opened(tmp_path: Path) -> None:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    snapshot(folder)
    (tmp_path / "elsewhere").mkdir()
    write_weights(tmp_path / "elsewhere" / "model.safetensors", {"x": ("BF16", [8])})
    for path in ("../elsewhere", f"{tmp_path}/elsewhere"):
        modules = [{"path": path, "type": "sentence_transformers.models.Dense"}]
        (folder / "modules.json").write_text(json.dumps(modules))
        assert read(folder).head_elements == 0
    for name in ("../elsewhere/model.safetensors", f"{tmp_path}/elsewhere/model.safetensors"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
        refuses(folder, "which is not a file in the same folder; fetch it again")


def test_a_head_that_scores_pairs_reranks_and_does_not_embed(tmp_path: Path) -> None:
    scorer = ["BertForSequenceClassification"]
    assert read(snapshot(tmp_path / "scorer", architectures=scorer)).capabilities == ("rerank",)
    folder = snapshot(tmp_path / "embedder", architectures=scorer)
    modules = [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    assert read(folder).capabilities == ("embedding", "rerank")


def test_an_embedder_that_generates_keeps_the_limit_of_its_config(tmp_path: Path) -> None:
    folder = snapshot(tmp_path)
    (folder / "modules.json").write_text("[]")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 128}')
    assert (read(folder).max_positions, read(folder, task="generate").max_positions) == (128, 256)


def test_an_encoder_has_the_shortest_stated_limit(tmp_path: Path) -> None:
    folder = snapshot(tmp_path, architectures=["BertModel"], max_position_embeddings=512)
    assert read(folder).max_positions == 512
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 1000000000000000019884624838656}')
    assert read(folder).max_positions == 512
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 256}')
    assert read(folder).max_positions == 256
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 384}')
    assert read(folder).max_positions == 384


def test_layers_behind_an_embedder_are_counted(tmp_path: Path) -> None:
    folder = snapshot(tmp_path, architectures=["BertModel"])
    before = read(folder)
    kinds = enumerate(["Pooling", "Dense", "Normalize"])
    modules = [{"path": f"{place}_{kind}", "type": f"sentence_transformers.models.{kind}"} for place, kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Dense").mkdir()
    layer = {"linear.weight": ("F16", [8, 64]), "linear.bias": ("F16", [8])}
    write_weights(folder / "1_Dense" / "model.safetensors", layer)
    facts = read(folder)
    assert (before.head_elements, facts.head_elements) == (0, 8 * 65)
    assert (facts.params, facts.file_bytes) == (before.params, before.file_bytes)
    (folder / "1_Dense" / "model.safetensors").unlink()
    torch.save({"linear.weight": torch.zeros(8, 64)}, folder / "1_Dense" / "pytorch_model.bin")
    assert read(folder).head_elements == 8 * 64


def test_an_override_is_merged_into_the_config(tmp_path: Path) -> None:
    folder = snapshot(tmp_path)
    assert read(folder, override='{"num_hidden_layers": 7}').layers == 7
    assert read(folder, override='{"num_hidden_layers": 7}').identity != read(folder).identity
    with pytest.raises(UnknownCheckpoint, match="config-override"):
        read(folder, override="[1")


def test_rope_keys_grow_the_positions_and_make_another_model(tmp_path: Path) -> None:
    folder = snapshot(tmp_path, max_position_embeddings=4096)
    grown = read(folder, rope={"rope-scale": 4.0})
    assert grown.max_positions == 16384
    assert grown.identity != read(folder).identity
    table = snapshot(
        tmp_path / "table", max_position_embeddings=4096, rope_scaling={"rope_type": "llama3", "factor": 8.0}
    )
    with pytest.raises(
        UnknownCheckpoint, match="table: rope-scale: the checkpoint has RoPE scaling of the kind llama3"
    ):
        read(table, rope={"rope-scale": 4.0})
    damaged = snapshot(tmp_path / "damaged", max_position_embeddings=4096, rope_scaling="much")
    with pytest.raises(UnknownCheckpoint, match="describes no RoPE"):
        read(damaged, rope={"rope-scale": 4.0})


def test_the_identity_does_not_depend_on_the_folder(tmp_path: Path) -> None:
    one, other = snapshot(tmp_path / "one"), snapshot(tmp_path / "other")
    assert read(one).identity == read(other).identity
    write_weights(other / "model.safetensors", {**TENSORS, "more": ("BF16", [1])})
    assert read(one).identity != read(other).identity


def test_random_weights_count_the_tensors_that_the_config_implies(tmp_path: Path) -> None:
    folder = snapshot(tmp_path)
    (folder / "model.safetensors").unlink()
    refuses(folder, "load-format = dummy")
    facts = read(folder, needs_weights=False)
    exact = 2 * 100 * 64 + 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64) + 64
    assert exact <= facts.params <= 1.05 * exact
    assert facts.tensors["bfloat16"].bytes == 2 * facts.params
    assert facts.linears.lora_elements == 2 * (4 * 64 + 2 * (64 + 32) + 3 * (64 + 128)), (
        "LoRA slots have room for all of them"
    )


def test_meta_has_the_fields_of_llama_server(tmp_path: Path) -> None:
    folder = snapshot(tmp_path)
    (folder / "tokenizer.json").write_text('{"added_tokens": [], "model": {"type": "BPE", "byte_fallback": false}}')
    assert meta(read(folder), 128) == {
        "vocab_type": 2, "n_vocab": 100, "n_ctx": 128, "n_ctx_train": 256, "n_embd": 64, "n_params": 12800,
        "size": 25600, "ftype": "bfloat16",
    }  # fmt: skip


LLAVA = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vision_config": {}}
TOOLS = "{% if tools %}{{ tools }}{% endif %}{{ messages }}"


@pytest.mark.parametrize(
    ("config", "files", "settings", "capabilities"),
    [
        ({}, {}, {}, ["completion"]),
        ({}, {"tokenizer_config.json": '{"chat_template": "{{ messages }}"}'}, {}, ["chat", "completion"]),
        ({}, {"modules.json": "[]", "chat_template.jinja": "{{ messages }}"}, {}, ["embedding", "rerank"]),
        ({}, {"modules.json": "[]", "chat_template.jinja": TOOLS}, {"task": "generate"},
         ["chat", "completion", "tools"]),
        ({"architectures": []}, {}, {"task": "generate"}, ["completion"]),
        ({}, {"chat_template.jinja": TOOLS}, {}, ["chat", "completion", "tools"]),
        ({}, {"chat_template.jinja": TOOLS}, {"chat_template": "{{ messages }}"}, ["chat", "completion"]),
        ({}, {}, {"chat_template": TOOLS}, ["chat", "completion", "tools"]),
        ({}, {"chat_template.jinja": TOOLS}, {"task": "embed"}, ["embedding", "rerank"]),
        (LLAVA, {"processor_config.json": "{}", "chat_template.jinja": "x"}, {}, ["chat", "completion", "vision"]),
        (LLAVA, {"preprocessor_config.json": "{}", "chat_template.json": '{"chat_template": "x"}'}, {},
         ["chat", "completion", "vision"]),
        (LLAVA, {"processor_config.json": "{}", "chat_template.jinja": "x"}, {"limit_images": 0},
         ["chat", "completion"]),
        (LLAVA, {"processor_config.json": "{}"}, {}, ["completion"]),
        (LLAVA, {"processor_config.json": "{}"}, {"chat_template": "x"}, ["chat", "completion", "vision"]),
        (LLAVA, {"chat_template.jinja": "x"}, {}, ["chat", "completion"]),
        ({**LLAVA, "model_type": "blip-2"}, {"processor_config.json": "{}", "chat_template.jinja": "x"}, {},
         ["chat", "completion"]),
    ],
)  # fmt: skip
def test_offered_capabilities_follow_from_files_and_preset(
    tmp_path: Path, config: dict[str, Any], files: dict[str, str], settings: dict[str, Any], capabilities: list[str]
) -> None:
    folder = snapshot(tmp_path, **config)
    for name, text in files.items():
        (folder / name).write_text(text)
    preset = Preset(id="a", **settings)
    able = offered(read(folder, task=preset.task), preset)
    assert able == capabilities
    takes = ["text", "image"] if "vision" in capabilities else ["text"]
    assert modalities(able) == {"input_modalities": takes, "output_modalities": ["text"]}


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ({"type": "BPE", "unk_token": None, "byte_fallback": True, "vocab": {}}, 1),
        ({"type": "BPE", "byte_fallback": False, "vocab": {}}, 2),
        ({"type": "WordPiece", "vocab": {}}, 3),
        ({"type": "Unigram", "vocab": []}, 4),
        ({"type": "Other"}, 0),
    ],
)
def test_the_kind_of_vocabulary_is_read(tmp_path: Path, model: dict[str, Any], kind: int) -> None:
    folder = snapshot(tmp_path)
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}, indent=2))
    assert read(folder).vocab_type == kind


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    folder = snapshot(tmp_path)
    write_weights(folder / "model.safetensors", TENSORS, missing=1)
    with pytest.raises(
        UnknownCheckpoint, match=r"model\.safetensors has \d+ bytes, but its header promises \d+; fetch"
    ):
        read(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05\x00",
        b"\xff" * 16,
        struct.pack("<Q", 4) + b"nope",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 9) + b'{"a": {}}',
        struct.pack("<Q", 58) + b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}    ' + bytes(8),
    ],
)
def test_a_damaged_weight_file_is_named(tmp_path: Path, content: bytes) -> None:
    folder = snapshot(tmp_path)
    (folder / "model.safetensors").write_bytes(content)
    refuses(folder, r"model\.safetensors .*fetch it again")


@pytest.mark.parametrize("config", ["", "{", "[]", "\xff"])
def test_a_damaged_config_is_named(tmp_path: Path, config: str) -> None:
    folder = snapshot(tmp_path)
    (folder / "config.json").write_bytes(config.encode("latin-1"))
    refuses(folder, r"config\.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": math.inf},
        {"hidden_size": 10**30},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**30},
        {"num_hidden_layers": -3},
        {"num_hidden_layers": 0},
        {"num_attention_heads": -2},
        {"hidden_size": -64},
        {"vocab_size": -1},
        {"n_layer": -2},
        {"architectures": 5},
        {"model_type": []},
        {"text_config": {"model_type": {}}},
    ],
    ids=str,
)
def test_an_impossible_config_is_rejected_at_once(tmp_path: Path, changes: dict[str, Any]) -> None:
    refuses(snapshot(tmp_path, **changes), r"config\.json describes no model .*fetch it again")


@pytest.mark.parametrize("kinds", [{"layer_types": ["mamba"] * 9}, {"attn_layer_indices": [0, 1, 2, 3]}], ids=str)
def test_state_layers_are_at_most_all_layers(tmp_path: Path, kinds: dict[str, Any]) -> None:
    assert 0 <= read(snapshot(tmp_path, **kinds)).state_layers <= 2


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F4", "shape": [8], "data_offsets": [9, 4]},
        {"dtype": "F4", "shape": [8], "data_offsets": [-4, 0]},
        {"dtype": "F4", "shape": [-8], "data_offsets": [0, 4]},
        {"dtype": "F4", "shape": [8], "data_offsets": [0, 4.5]},
    ],
    ids=str,
)
def test_impossible_tensor_offsets_are_rejected(tmp_path: Path, entry: dict[str, Any]) -> None:
    folder = snapshot(tmp_path)
    good = {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}
    text = json.dumps({"good": good, "odd": entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(9))
    refuses(folder, "cannot lie from")


def test_a_folder_without_a_snapshot_is_rejected_with_the_way_out(tmp_path: Path) -> None:
    refuses(tmp_path / "missing", "is no folder")
    refuses(tmp_path, r"has no config\.json")
    folder = snapshot(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refuses(folder, r"pytorch_model\.bin is no file of torch\.save; fetch it again")
    (folder / "pytorch_model.bin").rename(folder / "model.pt")
    refuses(folder, r"only model\.pt; of pickled weights only pytorch_model\.bin")
    (folder / "model.pt").rename(folder / "model.gguf")
    refuses(folder, r"only GGUF weights .*: GGUF needs the llama-server engine")
    (folder / "model.gguf").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "gone")
    refuses(folder, r"model\.safetensors is no file, or a link to none; fetch it again")


def test_reading_time_is_linear_in_the_number_of_tensors(tmp_path: Path) -> None:
    def calls(layers: int) -> int:
        """Count function calls while a snapshot of so many layers is read."""
        shapes = {f"model.layers.{at}.{part}.weight": ("BF16", [1024, 1024]) for at in range(layers) for part in "abcd"}
        folder = snapshot(tmp_path / str(layers), tensors=shapes)
        counted = 0

        def count(*_: object) -> None:
            nonlocal counted
            counted += 1

        sys.setprofile(count)
        try:
            read(folder)
        finally:
            sys.setprofile(None)
        return counted

    calls(8)  # fills caches
    assert calls(160) < 12 * calls(16)


def test_pickled_weights_have_the_facts_of_safetensors(tmp_path: Path) -> None:
    plain = tiny.make("llama", tmp_path / "plain", dtype="bfloat16")
    usual = read(plain)
    for shards in (1, 2):
        facts = read(pickle_weights(shutil.copytree(plain, tmp_path / f"pickled-{shards}"), shards=shards))
        assert facts.pickled
        assert facts.file_bytes >= usual.file_bytes // 2
        same: dict[str, Any] = {"pickled": False, "file_bytes": usual.file_bytes, "identity": usual.identity}
        assert replace(facts, **same) == usual


def test_weights_that_are_pickled_with_code_have_no_facts(tmp_path: Path) -> None:
    folder = poison(tiny.make("llama", tmp_path / "model"), tmp_path / "trace")
    refuses(folder, r"pytorch_model\.bin needs _?io\.open, which could run code; take a")
    assert not (tmp_path / "trace").exists()
