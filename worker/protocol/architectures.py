"""Tables of model families and of checkpoint formats that router and worker share. Standard library only.

`model_type` is the key of config.json. The families are those whose greedy text the tests have compared with
transformers' own `generate`, token for token, alone and in a changing batch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

PAGED = frozenset(
    {
        "cohere",
        "exaone4",
        "gemma",
        "gemma3_text",
        "glm4",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "olmo3",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "starcoder2",
    }
)
"""Decoders with plain attention, which the paged backend serves. All others run on the aligned backend."""

DIVISIBLE = frozenset(
    {
        "cohere",
        "exaone4",
        "gemma",
        "gemma3_text",
        "gpt_neox",
        "granite",
        "llama",
        "mistral",
        "olmo",
        "phi",
        "qwen2",
        "qwen3",
        "smollm3",
        "starcoder2",
    }
)
"""Families whose matrices may be divided among tensor-parallel ranks."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The needs of a family with a vision tower, beside the features of its images in the place of their tokens."""

    is_whole: bool = False
    """Tokens of one image see each other: they are computed in one step."""


VISION: Mapping[str, Sight] = {
    "gemma3": Sight(is_whole=True),
    "idefics3": Sight(),
    "llava": Sight(),
}
"""Families whose images are served, by `model_type`. Others with a vision tower are served for text."""

OFFSET_POSITIONS = frozenset(
    {"camembert", "data2vec-text", "ibert", "longformer", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta",
     "xlm-roberta-xl", "xmod"}
)  # fmt: skip
"""Encoders that count positions from behind the padding token's id, so that the table's first rows are never used."""

POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
"""Keys of config.json that state the longest sequence; the first one that is there counts."""

GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "MTModel")
"""Endings of class names in config.json that have a head for text."""

EXPERT = re.compile(r"\.experts\.\d+\.")
"""Tensors of single experts. transformers puts those of a layer together into one tensor while it loads."""

SCALE = re.compile(
    r"(\.(absmax|quant_map|nested_absmax|nested_quant_map|SCB|weight_format|weight_scale|weight_scale_inv|scale_inv"
    r"|input_scale|activation_scale|weight_zero_point|weight_shape|weight_g_idx|scales|qzeros|g_idx)"
    r"|\.quant_state\.\w+|_(scales|scale_inv))$"
)
"""Tensors that accompany quantised weights of gptq, awq, bitsandbytes, fp8, mxfp4 and compressed-tensors. They stay as
they are stored."""

UNPACKED = frozenset({"compressed-tensors"})
"""Quantisation methods whose weights transformers unpacks while it loads, on every device."""

UNPACKED_ON_CPU = frozenset({"fp8", "mxfp4"})
"""Methods without kernels for the CPU, whose weights are unpacked there."""

UNPACKED_WITHOUT: Mapping[str, tuple[str, ...]] = {"mxfp4": ("kernels", "triton")}
"""Methods whose weights are unpacked on accelerators, too, where these libraries are missing (transformers 5.23,
quantizer_mxfp4.py)."""

FUSED_GROUPS = frozenset({32, 64, 128})
"""Inputs that share a scale, for which torch multiplies by 4 bits on the CPU (_weight_int4pack_mm_for_cpu)."""

USUAL_GROUP = 128
"""Inputs that share a scale where config.json states none (transformers 5.23, GPTQConfig and AwqConfig)."""
