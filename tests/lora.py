"""Adapters for tiny models, as PEFT writes them, and what the library itself makes of them."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch

from tests.worker.loaded import reference


def make(snapshot: Path, folder: Path, *, seed: int = 0, width: float = 0.3, **settings: Any) -> Path:
    """Write an adapter for `snapshot` into `folder`, drawn wide enough to change greedy text; `settings` are PEFT's."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings}
    with quiet():
        model: Any = peft.get_peft_model(reference(snapshot), peft.LoraConfig(**settings))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=width)
    with quiet():
        model.save_pretrained(folder)
    return folder


def adapted(snapshot: Path, folder: Path) -> Any:
    """The model of a snapshot with an adapter, as PEFT loads it."""
    with quiet():
        return peft.PeftModel.from_pretrained(reference(snapshot), folder).eval()


@contextmanager
def quiet() -> Iterator[None]:
    """PEFT asks transformers for what is deprecated there, and says what it does to a Conv1D."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
