"""Engines with tiny models, and helpers that collect their answers."""

import asyncio
import contextlib
import json
import queue
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from worker.engines.transformers.attention import paged
from worker.engines.transformers.engine import TransformersEngine
from worker.engines.transformers.load import architectures, loader
from worker.engines.transformers.load.snapshot import load_config, load_tokenizer
from worker.engines.transformers.load_generator import LoadedGenerator
from worker.engines.transformers.loop.generation_loop import Backend, GenerationLoop
from worker.engines.transformers.preparation import PreparedModel
from worker.engines.transformers.run.backends import make_blocks, make_pool
from worker.engines.transformers.run.runner import PagedRunner, Runner
from worker.engines.transformers.sample.work_thread import Job, WorkThread
from worker.engines.transformers.schedule.kv_cache import BlockAllocator
from worker.engines.transformers.schedule.prefill_budget import PrefillBudget
from worker.interface import ChoiceTimings, Delta, FinishReason, GenerationRequest, SamplingParams, TokenLogprob
from worker.protocol.argv import Serve
from worker.protocol.snapshot_files import WEIGHTS

DEADLINE = 60.0
GREEDY = SamplingParams(temperature=0.0)


def options(folder: Path, **changes: Any) -> Serve:
    return Serve(snapshot=str(folder), listen="tcp:127.0.0.1:0", **changes)


def load(folder: Path, *, ahead: bool | None = None, **changes: Any) -> TransformersEngine:
    return TransformersEngine.load(options(folder, **changes), progress=_ignore, pulse=_ignore, ahead=ahead)


def paged_runner(asked: Serve) -> tuple[PagedRunner, BlockAllocator]:
    """A model whose KV cache has blocks, and these blocks."""
    paged.register()
    config = load_config(asked)
    loaded = loader.load_model(asked, config, paged.SDPA, _ignore)
    blocks = make_blocks(asked, asked.ctx_size or architectures.positions(config), caches=asked.prefix_caching)
    pool = make_pool(config, blocks, loaded.dtype, loaded.device, kv_dtype=asked.kv_cache_dtype)
    return PagedRunner(loaded.model, pool, blocks, loaded.device), blocks


def load_with(
    folder: Path, wrap: Callable[[Runner], Runner], *, ahead: bool = False, **changes: Any
) -> TransformersEngine:
    """An engine whose runner is wrapped by `wrap`."""
    asked = options(folder, **changes)
    runner, blocks = paged_runner(asked)
    prepared = PreparedModel(load_config(asked), load_tokenizer(asked))
    ctx_size = asked.ctx_size or architectures.positions(prepared.config)
    backend = Backend(runner=wrap(runner), capacity=blocks, prefill_budget=PrefillBudget(), ahead=ahead)
    return TransformersEngine(asked, prepared, LoadedGenerator(ctx_size, backend), _ignore)


def work_of(engine: TransformersEngine) -> GenerationLoop:
    assert engine._generation is not None
    return engine._generation


@asynccontextmanager
async def serving(engine: TransformersEngine) -> AsyncIterator[TransformersEngine]:
    """Close the engine at the end of the block, within a deadline."""
    try:
        yield engine
    finally:
        async with asyncio.timeout(DEADLINE):
            await engine.close()


class LateThread(WorkThread):
    """Runs one job whenever the test says so."""

    def __init__(self) -> None:
        super().__init__("late")
        self.jobs: queue.SimpleQueue[Job[Any]] = queue.SimpleQueue()

    def submit(self, function: Any) -> Job[Any]:
        job = Job(function)
        self.jobs.put(job)
        return job

    def run_one(self) -> None:
        with contextlib.suppress(queue.Empty):
            self.jobs.get_nowait().run()


def put_back_the_youngest(engine: TransformersEngine) -> None:
    """Preempt the youngest of several running sequences before the next step."""
    work = work_of(engine)

    def put_back() -> None:
        running = [each for _, each in work._scheduler.places]
        if len(running) > 1:
            work._scheduler.preempt(max(running, key=lambda each: each.id))

    engine._loop.post(put_back)


@dataclass
class CollectedChoice:
    """The collected deltas of one choice."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    finish: FinishReason | None = None
    stop: str | None = None
    timings: ChoiceTimings | None = None

    @property
    def cached_tokens(self) -> int:
        assert self.timings is not None
        return self.timings.cached_tokens

    def add(self, delta: Delta) -> None:
        assert self.finish is None, "nothing comes after the end"
        self.text += delta.text
        self.tokens.extend(delta.tokens)
        self.logprobs.extend(delta.logprobs)
        self.prompt_logprobs.extend(delta.prompt_logprobs)
        self.deltas.append(delta)
        self.finish, self.stop, self.timings = delta.finish, delta.stop, delta.timings


def generation(prompt: Sequence[int], *, sampling: SamplingParams = GREEDY, **changes: Any) -> GenerationRequest:
    return GenerationRequest(id="test", prompt=tuple(prompt), sampling=sampling, **changes)


async def collect_choices(engine: TransformersEngine, request: GenerationRequest) -> list[CollectedChoice]:
    """All choices by index, after the last has ended."""
    reported = [CollectedChoice() for _ in range(request.n)]
    async with asyncio.timeout(DEADLINE):
        async for delta in engine.generate(request):
            reported[delta.index].add(delta)
    assert all(each.finish is not None and each.timings is not None for each in reported)
    return reported


async def complete_until(
    engine: TransformersEngine, request: GenerationRequest, leave_after: int | None = None
) -> list[int]:
    """The tokens of a request that its client leaves after so many of them."""
    reported = CollectedChoice()
    stream = engine.generate(request)
    async for delta in stream:
        reported.add(delta)
        if leave_after is not None and len(reported.tokens) >= leave_after:
            break
    await stream.aclose()
    assert leave_after is not None or reported.finish is not None
    return reported.tokens


async def complete_preempting(engine: TransformersEngine, request: GenerationRequest) -> list[int]:
    """The tokens of a request with which the youngest sequence is preempted after the fourth of each nine."""
    reported = CollectedChoice()
    async for delta in engine.generate(request):
        reported.add(delta)
        if len(reported.tokens) % 9 == 4:
            put_back_the_youngest(engine)
    return reported.tokens


async def complete_one(engine: TransformersEngine, prompt: Sequence[int], **changes: Any) -> CollectedChoice:
    """The only choice of a request."""
    (reported,) = await collect_choices(engine, generation(prompt, **changes))
    return reported


def edit(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    body = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in body.items() if value is not None}))


def shard(folder: Path) -> list[Path]:
    """Split the weights over two files with an index."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, members in parts.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / WEIGHTS).unlink()
    return [folder / file for file in parts]


def mapped(path: Path) -> tuple[int, int]:
    """The mappings of a file into this process: their number, and their bytes in memory."""
    areas = Path("/proc/self/smaps").read_text().split("VmFlags:")
    found = [area for area in areas if str(path) in area]
    return len(found), sum(int(area.partition("Rss:")[2].split()[0]) << 10 for area in found)


def words(count: int, seed: int = 0) -> tuple[int, ...]:
    """Token ids of a text."""
    return tuple(3 + (seed * 131 + index * 37) % 480 for index in range(count))


def generated(model: Any, prompt: Sequence[int], count: int, **options: Any) -> list[int]:
    """Tokens of transformers' own greedy `generate`, without the end token."""
    tokens = torch.tensor([list(prompt)], device=model.device)
    mask = torch.ones_like(tokens)
    out = model.generate(tokens, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0, **options)
    answer: list[int] = out[0, 1 if model.config.is_encoder_decoder else len(prompt) :].tolist()
    return answer[:-1] if answer and answer[-1] == model.generation_config.eos_token_id else answer


def reference(folder: Path) -> Any:
    """The model of a snapshot, loaded by transformers."""
    config = transformers.AutoConfig.from_pretrained(folder)
    auto: Any = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder)


def _ignore(event: object) -> None:
    pass
