"""Published starter configurations on the cards for which they are published, from headers of the real shapes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from router.planner.ledger import HOST, LOCAL, DeviceId
from tests import fake_nvml
from tests.fake_nvml import Card, Driver
from tests.sparse import write_weights

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]
MARGIN = 1024 * MIB
GPU, CPU = DeviceId(LOCAL, 0), DeviceId(LOCAL, HOST)
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "torch_dtype": "float16",
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_7B = {
    **LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32,
}  # fmt: skip
LLAMA_13B = {
    **LLAMA, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
    "num_key_value_heads": 40,
}  # fmt: skip
MISTRAL_7B = {
    **LLAMA_7B, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "intermediate_size": 14336,
    "num_key_value_heads": 8, "max_position_embeddings": 32768, "torch_dtype": "bfloat16", "sliding_window": 4096,
}  # fmt: skip

# Config, settings, and the memory that the driver of the card reports, in MiB.
STARTERS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "LMI, 64 sequences, Llama-2-7B, 24 GB": (LLAMA_7B, {"parallel": 64}, 24564),
    "LMI, 64 sequences, Llama-2-7B, 80 GB": (LLAMA_7B, {"parallel": 64}, 81559),
    "LMI, 64 sequences, Mistral-7B, 80 GB": (MISTRAL_7B, {"parallel": 64}, 81559),
    "EricLLM, 8 prompts, Llama-2-7B, 24 GB": (LLAMA_7B, {"parallel": 8}, 24564),
    "FastChat, no option, Llama-2-13B, 32 GB": (LLAMA_13B, {}, 32510),
}


def write(folder: Path, config: dict[str, Any]) -> Path:
    """Write a checkpoint of the real shapes, whose tensors take no disk space."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kind = {"float16": "F16", "bfloat16": "BF16"}[config["torch_dtype"]]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": [hidden, hidden], "self_attn.k_proj": [keys, hidden], "self_attn.v_proj": [keys, hidden],
        "self_attn.o_proj": [hidden, hidden], "mlp.gate_proj": [inner, hidden], "mlp.up_proj": [inner, hidden],
        "mlp.down_proj": [hidden, inner], "input_layernorm": [hidden], "post_attention_layernorm": [hidden],
    }  # fmt: skip
    names = {"model.embed_tokens": [32000, hidden], "model.norm": [hidden], "lm_head": [32000, hidden]}
    for layer in range(config["num_hidden_layers"]):
        names |= {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder / "model.safetensors", {f"{name}.weight": (kind, shape) for name, shape in names.items()})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTERS)
def test_a_starter_configuration_fits_its_card(name: str, tmp_path: Path, tmp_path_factory: Any) -> None:
    config, keys, total = STARTERS[name]
    library = fake_nvml.build(tmp_path_factory.mktemp("nvml"))
    driver = Driver(library, tmp_path / "cards", [Card(uuid="GPU-aaaa1111", total=total * MIB)])
    own = {key: value for key, value in os.environ.items() if not key.startswith("CUDA")}
    env = {**own, **driver.environment(), "XDG_STATE_HOME": str(tmp_path / "state")}
    words = [str(write(tmp_path / "m", config)), "--json", *(f"--{key}={value}" for key, value in keys.items())]
    argv = [sys.executable, "-m", "router", "estimate", *words]
    done = subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert (done.stderr, done.returncode) == ("", 0)
    said = json.loads(done.stdout)
    card = said["devices"][0]
    assert (said["fits"], card["margin"], len(said["layers"])) == (True, MARGIN, 0)
    cache = said["kv_cache"]
    assert cache["least"]["tokens"] == said["ctx_size"] == (8192 if config is MISTRAL_7B else 4096)
    assert cache["most"]["tokens"] == said["ctx_size"] * keys.get("parallel", 4)
    assert cache["least"]["tokens"] < cache["granted"]["tokens"] <= cache["most"]["tokens"]
    taken = card["needs"] + cache["granted"]["bytes"] - cache["least"]["bytes"]
    assert taken <= card["usable_when_empty"] == (total * MIB) - MARGIN
    if cache["granted"] != cache["most"]:
        step = cache["least"]["bytes"] // cache["least"]["tokens"] * 16
        assert card["usable_when_empty"] - taken < step, "less than a block is left"
