"""Loading of an encoder: the model, its pooling or classification head, and its tokenizer settings."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from worker.engines.transformers.attention.cpu_linear import CpuLinears
from worker.engines.transformers.device import cuda_errors, memory
from worker.engines.transformers.device.process_overhead import overhead
from worker.engines.transformers.load import architectures, loader, sentence_transformers_config
from worker.engines.transformers.load.snapshot import is_cross_encoder, settle
from worker.engines.transformers.loop import requests
from worker.engines.transformers.run import backends
from worker.engines.transformers.run.pooling import CrossEncoder, Embedder, Encoder, PoolingHead, activation
from worker.errors import StartError
from worker.interface import EncoderInput, EncodingConfig
from worker.protocol.argv import ModelOptions, Serve
from worker.protocol.events import Progress

# Largest difference of a text's vector alone and in a batch, relative to its norm, in float32 and in 16-bit types.
# Guesses, far above rounding. Padding that only a convolution reads may change a vector by a few percent.
_EXACT, _ROUNDED = 0.01, 0.05


@dataclass(frozen=True)
class LoadedEncoder:
    """An encoder ready to run."""

    encoder: Encoder
    encoding: EncodingConfig | None  # of an embedder; None of a cross-encoder
    ctx_size: int  # tokens that one text may have
    announces_steps: bool = False  # it announces steps that are larger than those so far
    compiles_attention: bool = False  # as `CpuLinears.compiles_attention`


def load(
    options: Serve,
    config: Any,
    tokenizer: transformers.PreTrainedTokenizerBase,
    progress: Callable[[Progress], None],
    stage_done: Callable[[str], None],
    built: loader.Built | None,
) -> LoadedEncoder:
    """Load an embedder or a cross-encoder, and run it once. Raises StartError.

    Changes `tokenizer` to the settings in the snapshot's files. Other arguments as for `TransformersEngine.load`.
    """
    if options.tensor_parallel > 1:
        raise StartError("tensor-parallel is not for models that embed or score; remove it")
    if options.max_loras:
        raise StartError("this model does not generate text, so it takes no adapters; set enable-lora = off")
    snapshot, scores = Path(options.snapshot), is_cross_encoder(options, config)
    if scores and options.pooling not in ("", "rank"):
        raise StartError(f"pooling = {options.pooling} is not for a cross-encoder; leave it out, or set task = embed")
    found = None if scores else sentence_transformers_config.read(snapshot, options.pooling)
    loaded = loader.load_model(options, config, backends.implementation(options, config), progress, stage_done, built)
    loaded.unmapped.start()
    loaded.unmapped.finish()  # the warmup reads all weights
    linears = None if options.enforce_eager else CpuLinears(loaded.model)
    stated = getattr(config, "pad_token_id", None)  # custom code may have no such attribute
    pad = int((tokenizer.pad_token_id if stated is None else stated) or 0)
    is_dummy = options.load_format == "dummy"
    encoder, encoding = make_encoder(loaded.model, loaded.device, snapshot, found, pad=pad, is_dummy=is_dummy)
    settle(tokenizer, snapshot)
    ctx_size = context_size(options, config)
    stage_done("build")
    progress(Progress(stage="warmup"))
    try:
        vocab_size = config.get_text_config().vocab_size
        tolerance = _EXACT if loaded.dtype == torch.float32 else _ROUNDED
        warm_up(encoder, kind=config.model_type, ctx_size=ctx_size, vocab_size=vocab_size, tolerance=tolerance)
    except Exception as error:
        if not cuda_errors.is_exhausted(error):
            raise
        raise memory.start_error("one step", loaded.device, error) from error
    overhead.measure()
    stage_done("warmup")
    announces_steps = options.announce_steps and loaded.device.type == "cpu" and memory.inheritance.is_forked
    compiles_attention = linears is not None and linears.compiles_attention
    return LoadedEncoder(encoder, encoding, ctx_size, announces_steps, compiles_attention)


def context_size(options: ModelOptions, config: Any) -> int:
    """Tokens that one text may have: at most those of the model and of sentence-transformers. Raises StartError."""
    limits = (architectures.positions(config), sentence_transformers_config.max_tokens(Path(options.snapshot)))
    return requests.context_size(options, min(filter(None, limits), default=0))


def warm_up(encoder: Encoder, *, kind: str, ctx_size: int, vocab_size: int, tolerance: float) -> None:
    """Run the encoder on texts alone and in a batch.

    tolerance: the largest difference of the results, relative to their norm.

    Raises StartError if it cannot run, or if the results differ: an architecture that does not mask padding would give
    a request results that depend on other requests.
    """
    tokens = [(5 + place) % vocab_size for place in range(min(8, ctx_size))]
    # Three lengths, because the scores of one text alone and in a batch may be close by accident.
    *shorter, longest = (EncoderInput(tokens[: max(1, len(tokens) * part // 4)]) for part in (1, 2, 3, 4))
    try:
        alone = [encoder.run([text])[0] for text in shorter]
        batched = encoder.run([*shorter, longest])
    except Exception as error:
        if not cuda_errors.is_of_code(error):
            raise
        raise StartError(f"architecture {kind!r} cannot be served: {cuda_errors.one_line(error)}") from error
    pairs = zip(alone, batched, strict=False)
    if any((one - other).norm() > tolerance * one.norm() + 1e-6 for one, other in pairs):
        raise StartError(
            f"architecture {kind!r} cannot be served: a text gives other numbers in a batch with a longer one"
        )


def make_encoder(
    model: Any,
    device: torch.device,
    snapshot: Path,
    found: sentence_transformers_config.EmbedderConfig | None,
    *,
    pad: int,
    is_dummy: bool,
) -> tuple[Encoder, EncodingConfig | None]:
    """`model` with its head: an embedder if `found` is a layout, else a cross-encoder. Raises StartError."""
    if found is None:
        named = sentence_transformers_config.activation_of_scores(snapshot, model.config)
        named = named or "torch.nn.Sigmoid"  # the default of sentence-transformers for one label
        return CrossEncoder(model, device, activation(named, snapshot / "config.json"), pad=pad), None
    head = PoolingHead(found)
    width = getattr(model.config.get_text_config(), "hidden_size", None)
    if width is None:  # custom code may use another name
        raise StartError('config.json has no hidden_size; set config-override = {"hidden_size": N}')
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
