"""Tiny random-weight snapshots of real architectures, made in a fraction of a second, offline, the same each time.

`make("llama", folder)` writes config.json, model.safetensors, generation_config.json and a byte-level BPE tokenizer
with the special tokens `<s>` and `</s>` and a chat template. Weights are drawn wide enough that greedy text is varied.
"""

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

torch.set_num_threads(1)  # test processes run side by side, and their models are too small for more threads
BOS, EOS = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CORPUS = (
    "The quick brown fox jumps over the lazy dog while the small cat sleeps in the warm sun near the old stone house. ",
    "Every morning the baker opens his shop, and every evening the children walk home along the river. ",
    "A router leases a worker to a request; the worker computes tokens and hands them back one by one. ",
    "Die Katze schläft auf dem Dach, während der Hund im Garten läuft. Übermäßige Größe schadet nicht. ",
    "Les élèves étudient à l'école près de la forêt où coule une rivière. ¿Dónde está la niña pequeña? ",
    "Быстрая лиса прыгает через ленивую собаку. 敏捷的棕色狐狸跳过懒狗。 素早い茶色の狐が跳ぶ。 🦊🐶🏠 ",
    'def add(a: int, b: int) -> int:\n    return a + b\n\nprint(add(1, 2))  # 3\n{"name": "value", "list": [1, 2]}\n',
)
VOCAB_SIZE = 512
"""Upper bound of the tokenizer's vocabulary, special tokens included."""

_SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.15,
}  # fmt: skip
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.3}
_EXPERTS = {**_SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_BERT = {key: value for key, value in _SMALL.items() if key != "num_key_value_heads"}

_MLA = {
    **_BERT, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
_MAMBA = {
    "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "expand": 2, "initializer_range": 0.15,
    "tie_word_embeddings": False,
}  # fmt: skip
_T5 = {
    "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 32, "decoder_start_token_id": 0, "initializer_factor": 1.0, "n_positions": 256,
}  # fmt: skip

# family: (configuration class, model class, its settings). A family name is what callers say, not always a model_type.
_FAMILIES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _SMALL),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**_SMALL, "vocab_size": VOCAB_SIZE + 8}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_SMALL, "head_dim": 32, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_SMALL, "sliding_window": 8}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**_SMALL, "head_dim": 16, "tie_word_embeddings": False}),
    "phi": ("PhiConfig", "PhiForCausalLM", _BERT),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {**_SMALL, "sliding_window": None}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", _SMALL),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {**_SMALL, "num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _BERT),
    "cohere": ("CohereConfig", "CohereForCausalLM", _SMALL),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", {**_SMALL, "num_hidden_layers": 4, "sliding_window": 8}),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM", {
        **_SMALL, "num_hidden_layers": 6, "head_dim": 16, "sliding_window": 8, "tie_word_embeddings": False,
    }),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {**_SMALL, "head_dim": 16}),
    "gpt_bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", _GPT2),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {**_SMALL, "logits_scaling": 2.0, "attention_multiplier": 0.3}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**_SMALL, "num_local_experts": 4, "sliding_window": None}),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", _SMALL),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", {**_SMALL, "num_hidden_layers": 4, "sliding_window": 8}),
    "opt": ("OPTConfig", "OPTForCausalLM", {**_BERT, "ffn_dim": 128, "word_embed_proj_dim": 64, "init_std": 0.15}),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**_EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_EXPERTS, "head_dim": 32}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {**_SMALL, "sliding_window": 8}),
    # Of the backend that runs any forward. Caps are low enough that leaving one out changes the text.
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {
        **_SMALL, "head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 4, "tie_word_embeddings": False,
    }),
    "falcon": ("FalconConfig", "FalconForCausalLM", {**_BERT, "multi_query": True}),
    "falcon-new": ("FalconConfig", "FalconForCausalLM", {**_BERT, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-alibi": ("FalconConfig", "FalconForCausalLM", {
        **_BERT, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True,
        "tie_word_embeddings": False,
    }),
    "mpt": ("MptConfig", "MptForCausalLM", {
        "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, "initializer_range": 0.3,
    }),
    "bloom": ("BloomConfig", "BloomForCausalLM", {
        "hidden_size": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.15, "tie_word_embeddings": False,
    }),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {**_GPT2, "rotary_dim": 8}),
    "gpt_neo": ("GPTNeoConfig", "GPTNeoForCausalLM", {
        "hidden_size": 64, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
        "window_size": 8, "max_position_embeddings": 256, "initializer_range": 0.15,
    }),
    "codegen": ("CodeGenConfig", "CodeGenForCausalLM", {**_GPT2, "rotary_dim": 8}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {
        **_SMALL, "partial_rotary_factor": 0.25, "use_qkv_bias": True,
    }),
    "dbrx": ("DbrxConfig", "DbrxForCausalLM", {
        "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, "initializer_range": 0.15,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    }),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {
        **_MLA, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "topk_method": "greedy",
    }),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {
        **_MLA, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "num_hidden_layers": 3,
    }),
    # The index chooses fewer tokens than a text has, with so many heads that hardly two tokens have an equal score.
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM", {
        **_MLA, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "index_head_dim": 16, "index_topk": 8, "index_n_heads": 32,
    }),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {
        **_SMALL, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", {**_SMALL, "num_hidden_layers": 4, "sliding_window": 8}),
    "llama4_text": ("Llama4TextConfig", "Llama4ForCausalLM", {
        **_SMALL, "num_hidden_layers": 4, "head_dim": 16, "intermediate_size_mlp": 128, "num_local_experts": 2,
        "attention_chunk_size": 8, "interleave_moe_layer_step": 2,
    }),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {**_SMALL, "num_experts": 4, "num_experts_per_tok": 2}),
    "phimoe": ("PhimoeConfig", "PhimoeForCausalLM", {**_SMALL, "num_local_experts": 4, "sliding_window": None}),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", _SMALL),
    "persimmon": ("PersimmonConfig", "PersimmonForCausalLM", _BERT),
    "biogpt": ("BioGptConfig", "BioGptForCausalLM", {**_BERT, "tie_word_embeddings": False}),
    "xglm": ("XGLMConfig", "XGLMForCausalLM", {
        "d_model": 64, "ffn_dim": 128, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": 256,
        "init_std": 0.45, "tie_word_embeddings": False,
    }),
    "mamba": ("MambaConfig", "MambaForCausalLM", _MAMBA),
    "falcon_mamba": ("FalconMambaConfig", "FalconMambaForCausalLM", _MAMBA),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM", {
        **_MAMBA, "head_dim": 16, "num_heads": 8, "n_groups": 2, "chunk_size": 8,
    }),
    "jamba": ("JambaConfig", "JambaForCausalLM", {
        **_SMALL, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False,
    }),
    "bamba": ("BambaConfig", "BambaForCausalLM", {
        **_SMALL, "num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16,
        "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8,
    }),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM", {
        **_SMALL, "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    }),
    "zamba2": ("Zamba2Config", "Zamba2ForCausalLM", {
        **_SMALL, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_mem_blocks": 1, "mamba_d_state": 16, "mamba_ngroups": 1, "n_mamba_heads": 4, "chunk_size": 8,
    }),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {
        **_EXPERTS, "num_hidden_layers": 4, "head_dim": 16, "shared_expert_intermediate_size": 64,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", {
        **_SMALL, "num_hidden_layers": 3, "full_attn_idxs": [1], "block_multiple_of": 32,
    }),
    "t5": ("T5Config", "T5ForConditionalGeneration", _T5),
    "flan-t5": ("T5Config", "T5ForConditionalGeneration", {
        **_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    }),
    "bart": ("BartConfig", "BartForConditionalGeneration", {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 256,
        "init_std": 0.15, "decoder_start_token_id": 1, "forced_eos_token_id": None,
    }),
    "bert-embed": ("BertConfig", "BertModel", _BERT),
    "llama-embed": ("LlamaConfig", "LlamaModel", _SMALL),
}  # fmt: skip
FAMILIES = tuple(_FAMILIES)
_WIDER = {"t5": 4.0, "flan-t5": 16.0, "bart": 4.0}
"""Factors of the spread of weights in families whose text would otherwise be one token again and again."""
_ADDS_BOS = {"llama", "mistral", "gemma", "llama-embed"}


def make(family: str, folder: Path, *, seed: int = 0, **config_overrides: Any) -> Path:
    """Write a snapshot of `family` (one of FAMILIES) into `folder`, made if missing, and return it.

    `config_overrides` go into the configuration by name (`num_hidden_layers=1`); `dtype="bfloat16"` also sets the type
    of the stored weights. `bert-embed` and `llama-embed` have the layout of sentence-transformers: mean pooling, then
    L2 normalisation. The same arguments write the same weights.
    """
    config_name, model_name, settings = _FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(family)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    dtype = getattr(torch, str(config_overrides.pop("dtype", "float32")).removeprefix("torch."))
    merged = {"vocab_size": len(tokenizer), **ids, **settings, **config_overrides}
    config = getattr(transformers, config_name)(**merged)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_name)(config)
        spread(model, _WIDER.get(family, 1.0))
    with no_progress_bar():
        model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if family.endswith("-embed"):
        _write_sentence_transformers(folder, model.config.hidden_size)
    return folder


def make_tokenizer(family: str = "llama") -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on CORPUS; some families put `<s>` first, bert-embed also `</s>` last."""
    fast = Tokenizer.from_str(_trained())
    if family == "bert-embed":
        specials = [(token, fast.token_to_id(token)) for token in (BOS, EOS)]
        fast.post_processor = processors.TemplateProcessing(single=f"{BOS} $A {EOS}", special_tokens=specials)
    elif family in _ADDS_BOS:
        specials = [(BOS, fast.token_to_id(BOS))]
        fast.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=specials)
    build: Any = transformers.PreTrainedTokenizerFast  # untyped in transformers
    tokenizer: transformers.PreTrainedTokenizerFast = build(
        tokenizer_object=fast, bos_token=BOS, eos_token=EOS, chat_template=CHAT_TEMPLATE
    )
    return tokenizer


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    logging: Any = transformers.utils.logging  # untyped
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@functools.cache
def _trained() -> str:
    """The tokenizer as JSON. All 256 bytes are tokens, so any text can be said."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    fast.train_from_iterator(CORPUS, trainer)
    return fast.to_str()


def spread(model: torch.nn.Module, wider: float = 1.0) -> None:
    """Draw biases and norms as well, so that leaving one out changes the text; `wider` scales the matrices."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and not any(part in name for part in ("shared", "embed", "lm_head")):
                parameter.mul_(wider)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                shift = torch.randn_like(parameter) * 0.1
                parameter.add_(shift) if "norm" in name or "ln_" in name else parameter.copy_(shift)


def _write_sentence_transformers(folder: Path, width: int) -> None:
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds)
    ]
    for path, _ in kinds[1:]:
        (folder / path).mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": width, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 256, "do_lower_case": False}))
