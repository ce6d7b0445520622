"""Snapshot to generator: the model with its backend and cache, its adapters and images, and its first steps."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import transformers

from worker.engines.transformers import request_limits
from worker.engines.transformers.attention import paged
from worker.engines.transformers.attention.cpu_linear import Linears
from worker.engines.transformers.device import memory
from worker.engines.transformers.device.lazy_pages import Claims, claiming
from worker.engines.transformers.device.process_overhead import overhead
from worker.engines.transformers.device.rank_processes import Ranks
from worker.engines.transformers.generation_loop import Backend
from worker.engines.transformers.load import architectures, loader, model_class, tensor_parallel_plan
from worker.engines.transformers.load.lora import Adapters
from worker.engines.transformers.load.safetensors import Prefault
from worker.engines.transformers.run import backends, tensor_parallel
from worker.engines.transformers.run.aligned import AlignedRunner
from worker.engines.transformers.run.cache_probe import Unsupported
from worker.engines.transformers.run.runner import PackedRunner, Runner
from worker.engines.transformers.run.vision import Eyes, Tower, see
from worker.engines.transformers.run.warmup import record, warm_up
from worker.engines.transformers.schedule.kv_cache import Capacity
from worker.engines.transformers.schedule.prefill_budget import Pace
from worker.errors import StartError
from worker.images import TEXT_ONLY
from worker.protocol import events
from worker.protocol.argv import Serve, decode_adapters
from worker.protocol.exits import Exit

log = logging.getLogger(__name__)
Progress = Callable[[events.Progress], None]


class LateMemory:
    """Main memory that a loaded model uses but that is not mapped yet: weights in the page cache, and the KV cache."""

    def __init__(self, prefault: Prefault | None = None, claims: Claims | None = None):
        self._prefault, self.claims = prefault, claims or Claims()

    @property
    def left(self) -> int:
        """Bytes that are still to be mapped."""
        return (self._prefault.left if self._prefault is not None else 0) + self.claims.left

    def start(self) -> None:
        """Map it in the background: first the weights, which the first step reads, then the KV cache. Called once."""
        if self._prefault is None:
            self.claims.start()
        else:
            self._prefault.start()
            self.claims.start(behind=self._prefault.finish)

    def finish(self) -> None:
        """Wait until the KV cache is mapped."""
        self.claims.finish()


@dataclass(frozen=True)
class Loaded:
    """A generator ready to run."""

    ctx_size: int
    """Tokens that prompt and answer of one request may have together."""
    backend: Backend
    eyes: Eyes | None = None
    no_vision: str = TEXT_ONLY
    """Why it takes no images, if so."""
    late: LateMemory = field(default_factory=LateMemory)


def load(
    options: Serve,
    config: Any,
    tokenizer: transformers.PreTrainedTokenizerBase,
    progress: Progress,
    over: Callable[[str], None] = lambda stage: None,
    built: loader.Built | None = None,
    ranks: Ranks | None = None,
    ahead: bool | None = None,
) -> Loaded:
    """As `TransformersEngine.load`, of a model that makes text. Raises StartError."""
    model_class.model_class(options, config, embeds=False)  # refuses what makes no text, which need not have a length
    divides = tensor_parallel_plan.wanted(options, config) > 1
    paged.register()
    implementation = backends.implementation(options.attention, config)
    ctx_size = request_limits.context_size(options, architectures.positions(config))
    share = tensor_parallel.begin(options, ctx_size, ranks) if divides else None
    loaded = loader.load_model(options, config, implementation, progress, over, built, share)
    processor, no_vision = see(options, config, tokenizer)
    with _told(loaded, config, options, ctx_size):
        tower = Tower(loaded.model, processor.token, loaded.device) if processor is not None else None
        claims = None
        backend: PackedRunner | AlignedRunner
        capacity: Capacity
        if share is not None and ranks is not None:
            backend, capacity = tensor_parallel.lead(loaded, config, options, ctx_size, ranks, share[1], progress)
        else:
            with claiming() as claims:
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
        pace = Pace(apart=not isinstance(backend, PackedRunner))
        backends.prove(backend, config, ctx_size)
        adapters = _adapters(backend, loaded, options)
        arranges = not options.enforce_eager and loaded.split is None and share is None
        linears = Linears(loaded.model, let_go=loaded.let_go) if arranges else None
        over("build")
        runner = _begin(backend, capacity, pace, loaded, options, ctx_size, progress, divides=divides)
    over("warmup")
    return Loaded(
        ctx_size=ctx_size,
        backend=Backend(
            runner=runner,
            capacity=capacity,
            pace=pace,
            linears=linears,
            adapters=adapters,
            tower=tower,
            ahead=share is None and (loaded.device.type != "cpu" if ahead is None else ahead),
        ),
        eyes=Eyes(processor, loaded.dtype, most=options.limit_images) if processor is not None else None,
        no_vision=no_vision,
        late=LateMemory(loaded.prefault, claims),
    )


@contextmanager
def _told(loaded: loader.Loaded, config: Any, options: Serve, ctx_size: int) -> Iterator[None]:
    """What may fail between weights and first steps, as StartErrors that say what to do."""
    try:
        yield
    except (NotImplementedError, Unsupported) as error:
        raise StartError(
            f"architecture {config.model_type!r} cannot be served by this engine: {memory.one_line(error)};"
            " another engine may do it"
        ) from error
    except Exception as error:
        if loaded.split is not None and "on the same device" in str(error):
            raise StartError(
                f"architecture {config.model_type!r} cannot be split over devices: its code uses tensors of several"
                f" at once ({memory.one_line(error)}); give it one device"
            ) from error
        if not memory.is_exhausted(error):
            raise
        what = f"the context ({options.parallel} sequences of {ctx_size} tokens) and one step"
        raise memory.start_error(what, loaded.device, error) from error


def _adapters(backend: PackedRunner | AlignedRunner, loaded: loader.Loaded, options: Serve) -> Adapters | None:
    """Slots for adapters, and those of the preset in them as far as they can be used."""
    adapters = backends.make_adapters(backend, loaded.model, options, loaded.device, copies=options.max_cpu_loras)
    if adapters is not None:
        try:
            sources = decode_adapters(options.adapters)
        except ValueError as error:
            raise StartError(str(error), Exit.USAGE) from None
        for name, wrong in adapters.update(sources, options.default_adapter).items():
            log.warning("adapter %s cannot be used: %s", name, wrong)
    return adapters


def _begin(
    backend: PackedRunner | AlignedRunner,
    capacity: Capacity,
    pace: Pace,
    loaded: loader.Loaded,
    options: Serve,
    ctx_size: int,
    progress: Progress,
    *,
    divides: bool,
) -> Runner:
    """The first steps, on accelerators, and those of decoding recorded as CUDA graphs where that can be. On the CPU no
    kernel is chosen and no buffer grows: the first request would only compute the same again."""
    chunk = min(options.prefill_chunk, ctx_size)
    progress(events.Progress(stage="warmup", total=chunk))
    if loaded.device.type != "cpu" and options.warm_up:
        warm_up(backend, capacity, pace, chunk=chunk, ctx_size=ctx_size, progress=progress)
    if divides:
        return backend
    overhead.look()
    if loaded.split is not None:
        told = ",".join(options.layers), ",".join(options.devices)
        log.info("%s layers on %s: steps are not recorded as CUDA graphs", *told)
        return backend
    if loaded.device.type != "cuda" or options.enforce_eager or not isinstance(backend, PackedRunner):
        return backend
    runner = record(backend, capacity, pace, ctx_size=ctx_size, progress=progress)
    overhead.look()  # recorded graphs are part of what this model takes, and not of what any would
    return runner
