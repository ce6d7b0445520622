"""Snapshot to encoder: the model with what stands behind it, and how it wants its texts."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import normalizers

from worker import contract
from worker.engine import architectures, layout, loader
from worker.engine.pooling import CrossEncoder, Embedder, Encoder, Head, activation
from worker.errors import StartError
from worker.generation import Encoding


@dataclass(frozen=True)
class Loaded:
    """An encoder ready to run."""

    encoder: Encoder
    encoding: Encoding | None
    """Of an embedder."""
    device: torch.device
    positions: int
    """Tokens that one text may have; 0: nothing says so."""
    pad: int
    """Stands where a shorter text of a batch has no token."""


def load(
    options: contract.Serve,
    config: Any,
    tokenizer: transformers.PreTrainedTokenizerBase,
    progress: Callable[[contract.Progress], None],
) -> Loaded:
    """An embedder or a cross-encoder, as the loader finds it to be. Changes `tokenizer` to what the snapshot's files
    say of it. Raises StartError."""
    snapshot, scores = Path(options.snapshot), loader.is_cross_encoder(options, config)
    if scores and options.pooling not in ("", "rank"):
        raise StartError(f"pooling = {options.pooling} is not for a cross-encoder; leave it out, or set task = embed")
    found = None if scores else layout.read(snapshot, options.pooling)
    implementation = None if options.attention == "auto" else options.attention
    loaded = loader.load_model(options, config, implementation, progress)
    stated = getattr(config, "pad_token_id", None)  # code of a repository's own may state none
    pad = int((tokenizer.pad_token_id if stated is None else stated) or 0)
    encoder, encoding = make(loaded.model, loaded.device, snapshot, found, pad=pad, is_dummy=is_dummy(options))
    if found is not None and found.lowercases:
        _lowercase(tokenizer)
    limits = (architectures.positions(config), layout.max_tokens(snapshot))
    return Loaded(encoder, encoding, loaded.device, min(filter(None, limits), default=0), pad)


def is_dummy(options: contract.ModelOptions) -> bool:
    return options.load_format == "dummy"


def make(
    model: Any, device: torch.device, snapshot: Path, found: layout.Layout | None, *, pad: int, is_dummy: bool
) -> tuple[Encoder, Encoding | None]:
    """`model` with what stands behind it: an embedder if there is a layout, else a cross-encoder. Raises StartError."""
    if found is None:
        named = layout.activation_of_scores(snapshot, model.config) or "torch.nn.Sigmoid"  # the default of one label
        return CrossEncoder(model, device, activation(named, snapshot / "config.json"), pad=pad), None
    head = Head(found)
    size = head.size(model.config.get_text_config().hidden_size)
    if not is_dummy:
        head.load()
    encoding = Encoding(
        dimensions=size,
        is_pooled=bool(found.steps),
        prompts=found.prompts,
        default_prompt=found.default_prompt,
        skips_prompt=any(isinstance(step, layout.Pooling) and step.skips_prompt for step in found.steps),
    )
    if device.type != "cpu":
        head.to(device)
    return Embedder(model, device, head.eval().requires_grad_(False), pad=pad), encoding


def _lowercase(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Have `tokenizer` read all letters as small ones."""
    if not tokenizer.is_fast:
        raise StartError("sentence_bert_config.json wants do_lower_case, which this kind of tokenizer cannot be told")
    backend = tokenizer.backend_tokenizer
    before = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *before])
