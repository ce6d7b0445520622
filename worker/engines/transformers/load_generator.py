"""Loading of a generator: the model with its runner and cache, its adapters and image reader, and its first steps."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import transformers

from worker.engines.transformers import load_draft
from worker.engines.transformers.attention import paged
from worker.engines.transformers.attention.cpu_linear import CpuLinears, onednn_bytes
from worker.engines.transformers.device import cuda_errors, memory
from worker.engines.transformers.device.lazy_pages import LazyPages, claiming
from worker.engines.transformers.device.process_overhead import overhead
from worker.engines.transformers.device.rank_processes import RankProcesses
from worker.engines.transformers.load import architectures, loader, snapshot, tensor_parallel_plan
from worker.engines.transformers.load.lora import LoraAdapters
from worker.engines.transformers.loop import requests
from worker.engines.transformers.loop.drafting import Drafter
from worker.engines.transformers.loop.generation_loop import Backend
from worker.engines.transformers.run import backends, tensor_parallel
from worker.engines.transformers.run.aligned import AlignedRunner
from worker.engines.transformers.run.cache_probe import UnsupportedCache
from worker.engines.transformers.run.draft_model import DraftModel
from worker.engines.transformers.run.runner import PagedRunner, Runner
from worker.engines.transformers.run.vision import ImageReader, VisionTower, load_image_processor
from worker.engines.transformers.run.warmup import compute_largest_steps, record, warm_up
from worker.engines.transformers.schedule.kv_cache import RowAllocator
from worker.engines.transformers.schedule.prefill_budget import PrefillBudget
from worker.engines.transformers.schedule.speculation import DraftLength
from worker.errors import StartError
from worker.images import TEXT_ONLY
from worker.protocol import events
from worker.protocol.architectures import VERIFIED
from worker.protocol.argv import Serve, decode_adapters
from worker.protocol.events import Exit
from worker.protocol.memory import DRAFT_LOGITS, DRAW_BYTES, PROMPT_LOGITS

# Multiply-adds of a warmup on the CPU, at most: about half a second. A guess. The steps of a larger model are a smaller
# part of its memory, and the first request should not wait for them.
MOST_WARMUP_WORK = 1 << 33

log = logging.getLogger(__name__)
Progress = Callable[[events.Progress], None]


@dataclass(frozen=True)
class LoadedGenerator:
    """A generator ready to run."""

    ctx_size: int  # tokens that prompt and answer of one request may have together
    backend: Backend
    image_reader: ImageReader | None = None
    no_vision: str = TEXT_ONLY  # why it takes no images
    unmapped: LazyPages = field(default_factory=LazyPages)  # main memory that is not mapped yet
    has_warmed_up: bool = False  # as in `Ready`
    larger: int = 0  # bytes of main memory that steps which are larger than all before may take
    announces_steps: bool = False  # it announces steps that are larger than those so far
    has_steady_steps: bool = True  # a step that is not larger than those before takes no more memory


def load(
    options: Serve,
    config: Any,
    tokenizer: transformers.PreTrainedTokenizerBase,
    progress: Progress,
    stage_done: Callable[[str], None],
    built: loader.Built | None,
    ranks: RankProcesses | None,
    ahead: bool | None,
) -> LoadedGenerator:
    """Load a model that generates text. Arguments as for `TransformersEngine.load`. Raises StartError."""
    # Checked first: a model that generates no text may have no maximum length, and that error would mislead.
    snapshot.model_class(options, config, embeds=False)
    is_divided = tensor_parallel_plan.requested_ranks(options, config) > 1
    paged.register()
    implementation = backends.implementation(options, config)
    ctx_size = requests.context_size(options, architectures.positions(config))
    share = tensor_parallel.start_followers(options, ctx_size, ranks) if is_divided else None
    loaded = loader.load_model(options, config, implementation, progress, stage_done, built, share)
    processor, no_vision = load_image_processor(options, config, tokenizer)
    draft_config = load_draft.load_config(options, config, tokenizer) if options.draft_snapshot else None
    with _start_errors(loaded, config, options, ctx_size):
        tower = VisionTower(loaded.model, processor.token, loaded.device) if processor is not None else None
        backend: PagedRunner | AlignedRunner
        unmapped = loaded.unmapped
        if ranks is not None and share is not None:
            backend, capacity = tensor_parallel.make_leader(
                loaded, config, options, ctx_size, ranks, share[1], progress
            )
        else:
            # The first step reads the weights, so they are mapped before the cache.
            with claiming(unmapped) as unmapped:
                backend, capacity = backends.make_runner(
                    loaded.model,
                    config,
                    options,
                    ctx_size,
                    loaded.device,
                    caches=options.prefix_caching,
                    tower=tower,
                    split=loaded.split,
                )
        draft_model = None
        if draft_config is not None:
            with claiming(unmapped) as unmapped:
                draft_model = load_draft.load(options, backend, draft_config, capacity, ctx_size)
        prefill_budget = PrefillBudget(separate=not isinstance(backend, PagedRunner))
        backends.check_cache(backend, config, ctx_size)
        adapters = _adapters(backend, loaded, options)
        # Reordered weights exist only for a whole model on one device.
        reorders = not options.enforce_eager and loaded.split is None and share is None
        linears = CpuLinears(loaded.model, release_pages=loaded.release_pages) if reorders else None
        stage_done("build")
        announces_steps = options.announce_steps and loaded.device.type == "cpu" and memory.inheritance.is_forked
        is_fast = loaded.device.type == "cpu" and _warms_up_fast(loaded, options, config, ctx_size)
        if announces_steps and (tower is not None or options.max_loras or options.speculates):
            is_fast = False  # requests may bring larger steps than the warmup would compute
        warms_up = options.warm_up and (is_fast or loaded.device.type != "cpu")
        announces_steps = announces_steps and loaded.share is None  # the memory of other ranks is not known here
        larger = 0
        if loaded.device.type == "cpu" and (warms_up or announces_steps):
            larger = PROMPT_LOGITS * DRAW_BYTES * config.get_text_config(decoder=True).vocab_size
            kernels, reordering = onednn_bytes(loaded.model) if reorders else (0, 0)
            larger += kernels + reordering
        runner = _first_steps(
            backend, capacity, prefill_budget, loaded, options, ctx_size, progress, stage_done, warms_up=warms_up
        )
    stage_done("warmup")
    return LoadedGenerator(
        ctx_size=ctx_size,
        backend=Backend(
            runner=runner,
            capacity=capacity,
            prefill_budget=prefill_budget,
            linears=linears,
            adapters=adapters,
            drafter=_drafter(options, config, backend, draft_model),
            # Ranks of a tensor-parallel model receive each step from the host, so nothing can be launched ahead.
            ahead=share is None and (loaded.device.type != "cpu" if ahead is None else ahead),
        ),
        image_reader=ImageReader(processor, loaded.dtype, most=options.limit_images) if processor is not None else None,
        no_vision=no_vision,
        unmapped=unmapped,
        has_warmed_up=warms_up,
        announces_steps=announces_steps,
        # The memory of a step depends on the experts of its tokens.
        has_steady_steps=is_fast or not any("experts" in name for name, _ in loaded.model.named_modules()),
        larger=larger,
    )


@contextmanager
def _start_errors(loaded: loader.LoadedModel, config: Any, options: Serve, ctx_size: int) -> Iterator[None]:
    """Turn failures between the weights and the first steps into StartErrors that name a remedy."""
    try:
        yield
    except (NotImplementedError, UnsupportedCache) as error:
        # On accelerators, transformers does not compute fp8 experts with the scales of activations that files state.
        is_static = "activation_scheme" in str(error)
        remedy = "take a checkpoint with dynamic activations" if is_static else "serve it with another program"
        raise StartError(
            f"architecture {config.model_type!r} cannot be served by this engine: {cuda_errors.one_line(error)};"
            f" {remedy}"
        ) from error
    except ImportError as error:  # of a kernel that a library loads in the first step
        raise StartError(
            f"{config.model_type!r} needs a library that cannot be loaded: {cuda_errors.one_line(error)}; a worker"
            " downloads nothing, so install it, or get its kernel into the hub cache"
        ) from error
    except Exception as error:
        if loaded.split is not None and "on the same device" in str(error):
            # The text of torch's error for tensors on different devices. It has no class of its own.
            raise StartError(
                f"architecture {config.model_type!r} cannot be split over devices: its code uses tensors of several"
                f" devices at once ({cuda_errors.one_line(error)}); give it one device"
            ) from error
        if not cuda_errors.is_exhausted(error):
            raise
        what = f"the context ({options.contexts or options.parallel} sequences of {ctx_size} tokens) and one step"
        raise memory.start_error(what, loaded.device, error) from error


def _adapters(backend: PagedRunner | AlignedRunner, loaded: loader.LoadedModel, options: Serve) -> LoraAdapters | None:
    """Allocate adapter slots and load the preset's adapters. An unusable adapter is logged and skipped."""
    copies = options.max_cpu_loras
    adapters = backends.make_adapters(backend, loaded.model, options, loaded.device, copies=copies, share=loaded.share)
    if adapters is not None:
        try:
            sources = decode_adapters(options.adapters)
        except ValueError as error:
            raise StartError(str(error), Exit.USAGE) from None
        for name, wrong in adapters.update(sources, options.default_adapter).items():
            log.warning("adapter %s cannot be used: %s", name, wrong)
    return adapters


def _drafter(
    options: Serve, config: Any, runner: PagedRunner | AlignedRunner, model: DraftModel | None
) -> Drafter | None:
    if not options.speculates:
        return None
    if isinstance(runner, AlignedRunner) and (runner.has_states or config.model_type not in VERIFIED):
        # Not an error: a preset for all models ([*]) may ask for it.
        why = "states cannot be taken back" if runner.has_states else "it was not tested with several tokens of a row"
        log.warning("no speculative decoding for architecture %r: %s", config.model_type, why)
        return None
    return Drafter(DraftLength.up_to(min(options.draft_max, DRAFT_LOGITS), options.draft_min), model)


def _warms_up_fast(loaded: loader.LoadedModel, options: Serve, config: Any, ctx_size: int) -> bool:
    text = config.get_text_config(decoder=True)
    attention = 2 * (getattr(text, "num_hidden_layers", 0) or 0) * (getattr(text, "hidden_size", 0) or 0) * ctx_size
    elements = sum(weight.numel() for weight in loaded.model.parameters())
    tokens = min(options.prefill_chunk, ctx_size) + 2 * options.parallel
    return bool(tokens * (elements + attention) <= MOST_WARMUP_WORK)


def _first_steps(
    backend: PagedRunner | AlignedRunner,
    capacity: RowAllocator,
    prefill_budget: PrefillBudget,
    loaded: loader.LoadedModel,
    options: Serve,
    ctx_size: int,
    progress: Progress,
    stage_done: Callable[[str], None],
    *,
    warms_up: bool,
) -> Runner:
    """Run warmup steps, and record decode steps as CUDA graphs where possible."""
    chunk = min(options.prefill_chunk, ctx_size)
    progress(events.Progress(stage="warmup", total=chunk))
    if loaded.device.type == "cuda" and isinstance(backend, PagedRunner):
        backend.try_decode_kernel()
        stage_done("kernel")
    if warms_up:
        if loaded.device.type == "cpu":
            loaded.unmapped.start()
            loaded.unmapped.finish()  # the warmup reads all weights, and they must not count twice
            # No timed steps: the first steps are slower than others here, as they map memory.
            compute_largest_steps(backend, capacity, chunk=chunk, ctx_size=ctx_size)
        else:
            warm_up(backend, capacity, prefill_budget, chunk=chunk, ctx_size=ctx_size, progress=progress)
    if loaded.share is not None:
        return backend
    overhead.measure()
    if loaded.split is not None:
        log.info(
            "%s layers on %s: steps are not recorded as CUDA graphs",
            ",".join(options.layers),
            ",".join(options.devices),
        )
        return backend
    if loaded.device.type != "cuda" or options.enforce_eager or not isinstance(backend, PagedRunner):
        return backend
    stage_done("warmup")
    runner = record(backend, capacity, prefill_budget, ctx_size=ctx_size, progress=progress)
    overhead.measure()  # graphs belong to this model, so they must not count as overhead of any process
    stage_done("graphs")
    return runner
