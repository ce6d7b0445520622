"""Tables of model families and of checkpoint formats that both the router and the engine use.

`model_type` is the key of config.json. A family is listed once the tests have compared its greedy text with
transformers' `generate`, token for token, alone and in a changing batch.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

# Decoders with plain attention, which run on the paged backend. All others run on the aligned backend.
PAGED = frozenset({
    "cohere", "exaone4", "gemma", "gemma3_text", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "granite", "llama",
    "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_moe", "smollm3", "starcoder2",
})  # fmt: skip

# Other tested families. They run on the aligned backend.
ALIGNED = frozenset({
    "bamba", "bart", "biogpt", "bloom", "codegen", "cohere2", "dbrx", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "falcon",
    "falcon_h1", "falcon_mamba", "gemma2", "gpt_neo", "gpt_oss", "gptj", "jamba", "lfm2", "llama4_text", "mamba",
    "mamba2", "mpt", "nemotron", "persimmon", "qwen3_next", "stablelm", "t5", "xglm",
})  # fmt: skip

VERIFIED = PAGED | ALIGNED  # tests/worker/engines/test_engine_equality.py has one model of each

# Families that support tensor parallelism.
DIVISIBLE = (PAGED - {"glm4", "gpt2", "gpt_bigcode", "opt", "phi3"}) | {
    "deepseek_v2", "deepseek_v3", "jamba", "llama4_text", "qwen3_next",
}  # fmt: skip

# Families that accept images, by `model_type`. Other families with a vision tower accept text only.
VISION = frozenset({"gemma3", "idefics3", "llava"})

# Of these, the families in which the tokens of one image attend to each other, so that one step computes all of them.
WHOLE_IMAGES = frozenset({"gemma3"})

# Encoders that count positions from the padding token's id + 1, so that the first rows of the table are unused.
OFFSET_POSITIONS = frozenset(
    {"camembert", "data2vec-text", "ibert", "longformer", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta",
     "xlm-roberta-xl", "xmod"}
)  # fmt: skip

# Encoders that mix padding into the texts of a batch, in a convolution or a transform, so that each text is computed
# alone.
READS_PADDING = frozenset({"convbert", "fnet", "mobilebert", "nystromformer", "yoso"})

# Keys of config.json for the longest sequence; the first existing one counts.
POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")

# Endings of class names in config.json that have a language model head.
GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "MTModel")

# Tensors of single experts. transformers stacks those of a layer into one tensor while it loads.
EXPERT = re.compile(r"\.experts\.\d+\.")

# The layer of a tensor. Layers of a vision tower have such names too, but models with a tower are not split.
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.([0-9]+)\.")

# Tensors that follow the layers, if they are of no layer: the head, the last norm.
BEHIND = re.compile(r"(^|\.)(lm_head|embed_out|output|norm|norm_f|ln_f|final_layernorm|final_layer_norm)\.\w+$")

# Tensors that accompany quantized weights of gptq, awq, bitsandbytes, fp8, mxfp4 and compressed-tensors. They keep
# their stored type.
SCALE = re.compile(
    r"(\.(absmax|quant_map|nested_absmax|nested_quant_map|SCB|weight_format|weight_scale|weight_scale_inv|scale_inv"
    r"|input_scale|activation_scale|weight_zero_point|weight_shape|weight_g_idx|scales|qzeros|g_idx)"
    r"|\.quant_state\.\w+|_(scales|scale_inv))$"
)

# Tensors that only quantized weights have: packed numbers and their scales.
_QUANTIZED = re.compile(r"\.(qweight|weight_packed|weight_scale|weight_scale_inv|SCB)$")


def unstated_quantization(names: Iterable[str]) -> str:
    """Return the message for a checkpoint without `quantization_config`; empty if no tensor of `names` is quantized.

    Such weights would be taken for numbers, without their scales.
    """
    name = next(filter(_QUANTIZED.search, names), "")
    return name and (
        f"the weights are quantized ({name}), but config.json has no quantization_config at its top level, and there is"
        " no quantize_config.json; take a revision that has one, or write it, with its quant_method, into"
        " config-override"
    )


EXPERTS_ALONE = frozenset({"gptq", "awq"})  # methods that quantize each expert of a mixture alone


def experts_fault(method: str, names: Iterable[str]) -> str:
    """Return the reason why experts that `method` has quantized one by one cannot be loaded; empty if there are none.

    `names`: quantized tensors, or those that transformers did not read.
    """
    name = min(filter(EXPERT.search, names), default="") if method in EXPERTS_ALONE else ""
    if not name:
        return ""
    return (
        "transformers computes the experts of a layer in one tensor, and this checkpoint has each of them quantized"
        f" with {method} ({name}); take one that is quantized with fp8 or mxfp4, or one that is not quantized"
    )


def scoring_fault(names: Sequence[str], labels: int) -> str:
    """Return the reason why a model with these `architectures` cannot score pairs of texts; empty if it can.

    `labels`: the outputs of its classification head.
    """
    if not any(name.endswith("ForSequenceClassification") for name in names):
        return (
            "task = rerank needs a cross-encoder (*ForSequenceClassification), but config.json names"
            f" {', '.join(names) or 'no class'}; take a conversion of the model for sequence classification; with"
            " task = embed it reranks by the angle between vectors"
        )
    if labels != 1:
        return (
            f"{names[0]} has {labels} labels; only heads with one label, a score, are supported"
            " (task = embed serves the model below the head)"
        )
    return ""


# Supported methods, which are those that the tests load: the module each needs beside transformers, and the command to
# install it. transformers supports more, whose memory use is not measured here.
LIBRARIES: Mapping[str, tuple[str, str]] = {
    "awq": ("gptqmodel", "pip install 'gptqmodel<7.7' optimum"),
    "bitsandbytes": ("bitsandbytes", "pip install bitsandbytes"),
    "compressed-tensors": ("compressed_tensors", "pip install compressed-tensors"),
    "fp8": ("", ""),
    "gptq": ("gptqmodel", "pip install 'gptqmodel<7.7' optimum"),
    "mxfp4": ("", ""),
}

# Quantization methods whose weights transformers dequantizes while it loads, on every device.
DEQUANTIZED = frozenset({"compressed-tensors"})

# Quantization methods without CPU kernels: their weights are dequantized on the CPU.
DEQUANTIZED_ON_CPU = frozenset({"fp8", "mxfp4"})

# Quantization methods whose weights are dequantized on accelerators too if these libraries are missing (transformers
# 5.23, quantizer_mxfp4.py). fp8 would fail in the first step (finegrained_fp8.py).
DEQUANTIZED_WITHOUT: Mapping[str, tuple[str, ...]] = {"fp8": ("kernels", "triton"), "mxfp4": ("kernels", "triton")}

# Group sizes (inputs that share a scale) for which torch has a 4-bit CPU kernel (_weight_int4pack_mm_for_cpu).
FUSED_GROUPS = frozenset({32, 64, 128})

# Group size if config.json states none (transformers 5.23, GPTQConfig and AwqConfig).
USUAL_GROUP = 128
