"""`router estimate` of a model that no single accelerator holds, on the cards of a fake driver."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import fake_nvml
from tests.fake_nvml import Card, Driver
from tests.sparse import write_weights

pytestmark = pytest.mark.slow
GIB = 1 << 30
ROOT = Path(__file__).resolve().parents[2]
SMALL = Card(uuid="GPU-bbcc3333", total=16 * GIB, used=0, name="NVIDIA Fake C")
LARGE = Card(uuid="GPU-bbbb2222", total=24 * GIB, used=0, name="NVIDIA Fake B")
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 5120, "num_hidden_layers": 40,
    "num_attention_heads": 40, "num_key_value_heads": 8, "intermediate_size": 13824, "vocab_size": 32000,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
"""12 billion parameters: 23 GiB."""
TENSORS = {"model.embed_tokens.weight": ("BF16", [32000, 5120]), "lm_head.weight": ("BF16", [32000, 5120])}
for layer in range(40):
    shapes = {"q": [5120, 5120], "k": [1024, 5120], "v": [1024, 5120], "o": [5120, 5120]}
    TENSORS |= {f"model.layers.{layer}.self_attn.{part}_proj.weight": ("BF16", shape) for part, shape in shapes.items()}
    shapes = {"gate": [13824, 5120], "up": [13824, 5120], "down": [5120, 13824]}
    TENSORS |= {f"model.layers.{layer}.mlp.{part}_proj.weight": ("BF16", shape) for part, shape in shapes.items()}
    TENSORS |= {
        f"model.layers.{layer}.{part}_layernorm.weight": ("BF16", [5120]) for part in ("input", "post_attention")
    }


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_nvml.build(tmp_path_factory.mktemp("nvml"))


def asked(library: Path, folder: Path, cards: list[Card], *words: str, verb: str = "estimate", **changes: Any) -> str:
    """The output of `router estimate`, or of another command, for a model with these `changes` in its config.json."""
    snapshot = folder / "model"
    snapshot.mkdir(exist_ok=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG | changes))
    (snapshot / "tokenizer_config.json").write_text("{}")
    write_weights(snapshot / "model.safetensors", TENSORS)
    own = {key: value for key, value in os.environ.items() if not key.startswith("CUDA")}
    env = {**own, **Driver(library, folder / "cards", cards).environment(), "XDG_STATE_HOME": str(folder / "state")}
    argv = [sys.executable, "-m", "router", verb, *([str(snapshot)] if verb == "estimate" else [])]
    done = subprocess.run([*argv, *words], env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.stderr == ""
    return done.stdout


def document(*args: Any, **changes: Any) -> Any:
    return json.loads(asked(*args, "--json", **changes))


def test_each_device_is_shown_with_its_part(library: Path, tmp_path: Path) -> None:
    found, text = document(library, tmp_path, [SMALL, LARGE]), asked(library, tmp_path, [SMALL, LARGE])
    assert found["fits"]
    assert sum(found["layers"]) == 40
    small, large, main = found["devices"]
    assert (small["device"], large["device"], main["device"]) == ("cuda:0", "cuda:1", "cpu")
    assert small["needs"] < large["needs"] <= large["usable_when_empty"]
    assert small["needs"] <= small["usable_when_empty"]
    first, second = found["layers"]
    assert f"layers 0 to {first - 1}: " in text
    assert f"layers {first} to 39: " in text
    assert second > first, "the larger card has more of them"
    assert "over 2 devices; no CUDA graphs" in text


def test_a_model_that_fits_one_card_is_not_split_and_missing_memory_is_shown(library: Path, tmp_path: Path) -> None:
    whole = document(library, tmp_path, [SMALL, Card(uuid="GPU-dddd4444", total=80 * GIB, used=0)])
    assert (whole["fits"], whole["layers"]) == (True, [])
    none = document(library, tmp_path, [SMALL, SMALL], "--split-mode", "none")
    assert (none["fits"], none["layers"]) == (False, [])
    text = asked(library, tmp_path, [SMALL, LARGE], "--models-memory-margin", "9216")
    assert text.count("does not fit: ") == 2


def test_the_parts_of_a_tensor_parallel_model_are_shown(library: Path, tmp_path: Path) -> None:
    text = asked(library, tmp_path, [LARGE, LARGE, SMALL], "--tensor-parallel", "2", "--load-format", "dummy")
    assert "2 devices: " in text
    assert "each matrix divided among 2 processes; no CUDA graphs" in text
    assert "cuda:0    fits when empty" in text
    assert "cpu       does not fit" in text, "random weights are drawn as a whole by each process"


def test_check_memory_reports_keys_of_placement_without_effect(library: Path, tmp_path: Path) -> None:
    presets = tmp_path / "models.ini"
    presets.write_text(f"[m]\nmodel = {tmp_path / 'model'}\nrequired-memory = cuda:7=100\ntensor-parallel = max\n")
    text = asked(library, tmp_path, [LARGE, LARGE], str(presets), "--memory", verb="check", num_key_value_heads=5)
    assert "warning: m: required-memory names cuda:7, and there is no such device here, only " in text
    assert "warning: m: tensor-parallel = max is not possible, so its layers are split over 2 accelerators: " in text


def test_check_memory_reports_keys_that_the_load_would_refuse(library: Path, tmp_path: Path) -> None:
    presets = tmp_path / "models.ini"
    presets.write_text(f"[m]\nmodel = {tmp_path / 'model'}\nn-gpu-layers = 8\n")
    text = asked(library, tmp_path, [LARGE], str(presets), "--memory", verb="check")
    assert "warning: m: n-gpu-layers = 8 leaves 32 of 40 layers in host memory, which " in text
