"""All families that the engine is compared with, and their variants."""

from typing import Any

from worker.protocol.architectures import VERIFIED

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in sorted(VERIFIED)} | {
    "falcon with grouped heads": ("falcon-new", {}),
    "falcon with linear biases": ("falcon-alibi", {}),
    "t5": ("t5", {"seed": 2}),
    "t5 with gates, a head of its own and a short decoder": ("flan-t5", {"num_layers": 3, "num_decoder_layers": 2}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "qwen2 with windows in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3 with windows in some layers": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "llama with scaled positions": (
        "llama",
        {"rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        }},
    ),
    "llama with positions that stretch beyond its context": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "phi3 with two sets of frequencies": (
        "phi3",
        {
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128,
                "short_factor": [1.5] * 8, "long_factor": [4.0] * 8,
            },
        },
    ),
    "llama with a head for each query": ("llama", {"num_key_value_heads": 4}),
}  # fmt: skip

# Changes of a family with more than two layers, so that it has one layer of each kind: for tests to which the number of
# layers adds nothing.
SHALLOW: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 2},
    "cohere2": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v3": {"num_hidden_layers": 2},
    "exaone4": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3_text": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "jamba": {"num_hidden_layers": 2},
    "lfm2": {"num_hidden_layers": 2},
    "llama4_text": {
        "num_hidden_layers": 2,
        "no_rope_layers": [1, 0],
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "olmo3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen2 with windows in some layers": {"num_hidden_layers": 2},
    "qwen3 with windows in some layers": {"num_hidden_layers": 2},
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "smollm3": {"num_hidden_layers": 2},
    "zamba2": {"num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"]},
}
