"""Snapshot to encoder: the model with what stands behind it, and how it wants its texts."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from worker.engines.transformers import request_limits
from worker.engines.transformers.attention.cpu_linear import Linears
from worker.engines.transformers.device import memory
from worker.engines.transformers.load import architectures, loader, sentence_transformers_config
from worker.engines.transformers.load.snapshot import settle
from worker.engines.transformers.run import backends
from worker.engines.transformers.run.pooling import CrossEncoder, Embedder, Encoder, Head, activation
from worker.errors import StartError
from worker.interface import EncoderInput, EncodingConfig
from worker.protocol.argv import ModelOptions, Serve
from worker.protocol.events import Progress

COMPANY_TOLERANCE = 0.05
"""By how much numbers may differ with the company, of their norm: a guess, far above the rounding of 16 bits and far
below what padding that counts does."""


@dataclass(frozen=True)
class Loaded:
    """An encoder ready to run."""

    encoder: Encoder
    encoding: EncodingConfig | None
    """Of an embedder."""
    device: torch.device
    ctx_size: int
    """Tokens that one text may have."""


def load(
    options: Serve,
    config: Any,
    tokenizer: transformers.PreTrainedTokenizerBase,
    progress: Callable[[Progress], None],
    over: Callable[[str], None] = lambda stage: None,
    built: loader.Built | None = None,
) -> Loaded:
    """An embedder or a cross-encoder, as the loader finds it to be. Changes `tokenizer` to what the snapshot's files
    say of it. `over` and `built` as for `loader.load_model`. Raises StartError."""
    snapshot, scores = Path(options.snapshot), loader.is_cross_encoder(options, config)
    if scores and options.pooling not in ("", "rank"):
        raise StartError(f"pooling = {options.pooling} is not for a cross-encoder; leave it out, or set task = embed")
    found = None if scores else sentence_transformers_config.read(snapshot, options.pooling)
    loaded = loader.load_model(options, config, implementation(options), progress, over, built)
    if loaded.prefault is not None:
        loaded.prefault.start()
        loaded.prefault.finish()  # it computes before it is ready
    if not options.enforce_eager:
        Linears(loaded.model)
    stated = getattr(config, "pad_token_id", None)  # code of a repository's own may state none
    pad = int((tokenizer.pad_token_id if stated is None else stated) or 0)
    encoder, encoding = make(loaded.model, loaded.device, snapshot, found, pad=pad, is_dummy=is_dummy(options))
    settle(tokenizer, snapshot)
    limits = (architectures.positions(config), sentence_transformers_config.max_tokens(snapshot))
    ctx_size = request_limits.context_size(options, min(filter(None, limits), default=0))
    return Loaded(encoder, encoding, loaded.device, ctx_size)


def implementation(options: ModelOptions) -> str | None:
    """Return transformers' name of the attention; None: what the model's own code prefers.

    Raises StartError if `attention` has an unknown value.
    """
    backends.check_attention(options.attention)
    return None if options.attention == "auto" else options.attention


def warm_up(encoder: Encoder, *, ctx_size: int, vocab_size: int) -> None:
    """Run the encoder once alone and once in company. Raises StartError if it cannot run so, or if a text's numbers
    depend on who is in the batch: an architecture that looks at padding cannot be served."""
    long = EncoderInput([(5 + place) % vocab_size for place in range(min(8, ctx_size))])
    short = EncoderInput(long.tokens[: max(1, len(long.tokens) // 2)])
    try:
        [alone], (company, _) = encoder.run([short]), encoder.run([short, long])
    except (TypeError, ValueError, NotImplementedError) as error:
        raise StartError(f"this architecture cannot be served: {memory.one_line(error)}") from error
    if (alone - company).norm() > COMPANY_TOLERANCE * alone.norm() + 1e-6:
        raise StartError("this architecture gives a text other numbers beside a longer one; it cannot be served")


def is_dummy(options: ModelOptions) -> bool:
    return options.load_format == "dummy"


def make(
    model: Any,
    device: torch.device,
    snapshot: Path,
    found: sentence_transformers_config.Layout | None,
    *,
    pad: int,
    is_dummy: bool,
) -> tuple[Encoder, EncodingConfig | None]:
    """`model` with what stands behind it: an embedder if there is a layout, else a cross-encoder. Raises StartError."""
    if found is None:
        named = (
            sentence_transformers_config.activation_of_scores(snapshot, model.config) or "torch.nn.Sigmoid"
        )  # the default of one label
        return CrossEncoder(model, device, activation(named, snapshot / "config.json"), pad=pad), None
    head = Head(found)
    width = getattr(model.config.get_text_config(), "hidden_size", None)
    if width is None:  # code of a repository's own may call it what it likes
        raise StartError('config.json states no hidden_size; state it: config-override = {"hidden_size": N}')
    size = head.size(width)
    if not is_dummy:
        head.load()
    encoding = EncodingConfig(
        dimensions=size,
        is_pooled=bool(found.steps),
        prompts=found.prompts,
        default_prompt=found.default_prompt,
        skips_prompt=any(
            isinstance(step, sentence_transformers_config.Pooling) and step.skips_prompt for step in found.steps
        ),
    )
    if device.type != "cpu":
        head.to(device)
    return Embedder(model, device, head.eval().requires_grad_(False), pad=pad), encoding
