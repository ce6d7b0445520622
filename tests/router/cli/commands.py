"""Commands of the router that run in this process, and snapshots for them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.sparse import write_weights


class CommandResult(NamedTuple):
    """The exit code of a command, and its output."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., CommandResult]
Estimate = Callable[..., tuple[int, Any]]
"""`router estimate --json`: its exit code, and the document that it prints."""
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip


def write(folder: Path, *, shards: int = 1, padding: int = 0, **config: Any) -> Path:
    """A snapshot with real headers; `padding`: bytes of metadata that make each header longer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "tokenizer_config.json").write_text("{}")
    numbers = range(shards)
    names = [
        f"model-{number:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors" for number in numbers
    ]
    weight_map: dict[str, str] = {}
    for number, name in enumerate(names):
        tensors = {f"model.layers.{number}.mlp.weight": ("BF16", [300, 100])}
        if number == 0:
            tensors["model.embed_tokens.weight"] = ("BF16", [512, 64])
        write_weights(folder / name, tensors, padding=padding)
        weight_map |= dict.fromkeys(tensors, name)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
