"""Loading of a draft model beside its target, and the checks that both fit together."""

import dataclasses
from typing import Any

import torch
import transformers

from worker.engines.transformers.attention.cpu_linear import CpuLinears
from worker.engines.transformers.load import architectures, loader, snapshot
from worker.engines.transformers.run import backends
from worker.engines.transformers.run.aligned import AlignedRunner
from worker.engines.transformers.run.draft_model import DraftModel, RowTables, TargetTables
from worker.engines.transformers.run.runner import PagedRunner
from worker.engines.transformers.schedule.kv_cache import BlockAllocator, RowAllocator, pool_blocks
from worker.errors import StartError
from worker.protocol.architectures import VERIFIED
from worker.protocol.argv import ModelOptions
from worker.protocol.events import Exit
from worker.protocol.vocabulary import vocabulary_fault


def draft_options(options: ModelOptions) -> Any:
    """The options with which the draft model of `options` is loaded. Settings of the target's files do not apply."""
    return dataclasses.replace(
        options,
        snapshot=options.draft_snapshot,
        draft_snapshot="",
        ngram_size=0,
        tokenizer="",
        task="generate",
        quantization="auto",
        config_override="",
        rope="",
        max_loras=0,
        limit_images=0,
        # Its steps are too short and too different to be recorded; on the CPU its weights are reordered.
        enforce_eager=options.enforce_eager or options.devices[0] != "cpu",
    )


def load_config(options: ModelOptions, target: Any, tokenizer: transformers.PreTrainedTokenizerBase) -> Any:
    """The configuration of the draft model. Raises StartError if it cannot draft for the configuration `target`."""
    wanted = draft_options(options)
    if len(options.devices) > 1 or options.tensor_parallel > 1:
        raise _refused(options, "it is for models on one device only; remove it, or give the model one device")
    if getattr(target, "is_encoder_decoder", False):
        raise _refused(options, f"it is not for architecture {target.model_type!r}, which has an encoder; remove it")
    if target.model_type not in VERIFIED:
        raise _refused(
            options,
            f"architecture {target.model_type!r} was not tested with several tokens of a row in one step; remove it",
        )
    config = snapshot.load_config(wanted)
    if snapshot.encodes(wanted, config) or architectures.backend(config) != "paged":
        raise _refused(options, f"architecture {config.model_type!r} cannot draft; name a model with plain attention")
    ours, theirs = (
        {number: token for token, number in kind.get_vocab().items()}
        for kind in (tokenizer, snapshot.load_tokenizer(wanted))
    )
    if why := vocabulary_fault(ours, theirs):
        raise _refused(options, why)
    return config


def load(
    options: ModelOptions, target: PagedRunner | AlignedRunner, config: Any, capacity: RowAllocator, ctx_size: int
) -> DraftModel:
    """Load the draft model of `config`, for a target with the cache `capacity`. Call within `claiming`, so that its
    pool is mapped later. Raises StartError."""
    if isinstance(target, AlignedRunner) and target.has_states:
        raise _refused(options, "the model has states, and states cannot be taken back; remove it")
    wanted = draft_options(options)
    loaded = loader.load_model(wanted, config, backends.implementation(wanted, config), lambda progress: None)
    loaded.unmapped.start()
    loaded.unmapped.finish()
    blocks = capacity
    if not isinstance(blocks, BlockAllocator):
        blocks = BlockAllocator(capacity.rows, pool_blocks(capacity.rows, ctx_size), caches=False)
    runner = make_runner(loaded.model, config, wanted, blocks, loaded.device)
    return DraftModel(
        runner,
        TargetTables(target, runner.pool) if isinstance(target, PagedRunner) else RowTables(ctx_size),
        vocab_size=min(runner.vocab_size, target.vocab_size),
        positions=architectures.positions(config),
        # Beside one further token of each sequence: with these a step is as large as one of the target.
        chunk=max(min(options.prefill_chunk, ctx_size) - options.parallel, 1),
        linears=None if wanted.enforce_eager else CpuLinears(loaded.model, release_pages=loaded.release_pages),
    )


def make_runner(
    model: Any, config: Any, options: ModelOptions, blocks: BlockAllocator, device: torch.device
) -> PagedRunner:
    """The runner of a draft model with a pool of `blocks`. `options`: from `draft_options`."""
    pool = backends.make_pool(config, blocks, model.dtype, device, kv_dtype=options.kv_cache_dtype)
    runner = PagedRunner(model, pool, blocks, device)
    if device.type == "cuda":
        runner.try_decode_kernel()  # with other heads than the target it has variants of its own
    return runner


def _refused(options: ModelOptions, why: str) -> StartError:
    return StartError(f"model-draft = {options.draft_snapshot}: {why}", Exit.USAGE)
