"""Tiny cross-encoders with random weights, made in a fraction of a second, offline, the same each time."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import processors

from tests import tiny

SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "initializer_range": 0.3, "num_labels": 1, "classifier_dropout": 0.0,
}  # fmt: skip
RANKERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertConfig", "BertForSequenceClassification", {"max_position_embeddings": 256}),
    "xlm-roberta": (
        "XLMRobertaConfig",
        "XLMRobertaForSequenceClassification",
        {"max_position_embeddings": 900, "type_vocab_size": 1},
    ),
    "qwen3": (
        "Qwen3Config",
        "Qwen3ForSequenceClassification",
        {"max_position_embeddings": 256, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertForSequenceClassification",
        {"max_position_embeddings": 256, "local_attention": 16, "classifier_pooling": "mean", "embedding_dropout": 0.0},
    ),
}


def ranker(folder: Path, kind: str, **changes: Any) -> Path:
    """A tiny cross-encoder with random weights, whose tokenizer joins pairs; BERT's tells the two texts apart."""
    config_name, model_name, settings = RANKERS[kind]
    tokenizer = tiny.make_tokenizer("bert-embed")
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.chat_template = None
    second = 1 if kind == "bert" else 0
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair=f"<s> $A </s> $B:{second} </s>:{second}",
        special_tokens=[(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")],
    )
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    merged = {"vocab_size": len(tokenizer), **ids, **SMALL, **settings, **changes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, model_name)(getattr(transformers, config_name)(**merged))
        tiny.spread(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    stated = json.loads((folder / "tokenizer_config.json").read_text())
    stated["model_input_names"] = ["input_ids", *(["token_type_ids"] if kind == "bert" else []), "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return folder
