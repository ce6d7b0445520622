"""RMS norms are fused where torch's kernel computes the same, and only there."""

import copy
import importlib

import pytest
import torch
from torch import nn

from worker.engines.transformers.load import fused_norms

WIDTH = 48


def norm(family: str, name: str) -> nn.Module:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    widths = [WIDTH, WIDTH] if name.endswith("Gated") else [WIDTH]  # the second is that of a group
    made: nn.Module = getattr(module, name)(*widths).to(torch.bfloat16)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made.requires_grad_(False)


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "LlamaRMSNorm"), ("qwen3", "Qwen3RMSNorm"), ("mamba", "MambaRMSNorm"), ("llama4", "Llama4TextRMSNorm")],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_fused_norm_gives_the_bits_of_its_class(family: str, name: str, dtype: torch.dtype) -> None:
    original = norm(family, name)
    model = nn.Sequential(copy.deepcopy(original))
    assert fused_norms.fuse(model) == 1
    hidden_states = torch.randn(3, 5, WIDTH).to(dtype)
    found, expected = model(hidden_states), original(hidden_states)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gemma2", "Gemma2RMSNorm"),  # adds one to the weights
        ("gpt_oss", "GptOssRMSNorm"),  # multiplies before it rounds
        ("t5", "T5LayerNorm"),  # rounds to the dtype of the weights
        ("mamba2", "MambaRMSNormGated"),  # takes a gate
        ("cohere", "CohereLayerNorm"),  # subtracts the mean
    ],
)
def test_a_norm_of_another_kind_stays(family: str, name: str) -> None:
    model = nn.Sequential(norm(family, name))
    assert fused_norms.fuse(model) == 0
    assert "forward" not in vars(model[0])
