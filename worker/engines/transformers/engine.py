"""The `transformers` engine: one loaded model that generates text, embeds or scores.

`TransformersEngine` implements `worker.interface.Engine`. Its asyncio side checks a request, posts it to the step loop
and reads the deltas. All computation happens on the step loop's thread.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from worker.engines.transformers import load_encoder, load_generator, preparation
from worker.engines.transformers.device import cuda_errors, memory
from worker.engines.transformers.device.cores import StepThreads
from worker.engines.transformers.device.growth import Growth
from worker.engines.transformers.device.lazy_pages import LazyPages
from worker.engines.transformers.device.process_overhead import overhead
from worker.engines.transformers.device.rank_processes import RankProcesses
from worker.engines.transformers.load import layer_split, snapshot
from worker.engines.transformers.load.lora import LoraAdapters
from worker.engines.transformers.loop.encoder_loop import EncoderJob, EncoderLoop
from worker.engines.transformers.loop.generation_loop import GenerationLoop
from worker.engines.transformers.loop.requests import RequestStream, StreamFactory
from worker.engines.transformers.loop.step_loop import Outbox, StepLoop
from worker.engines.transformers.preparation import PreparedModel
from worker.engines.transformers.run.tensor_parallel import AlignedLeader, Leader, PagedLeader
from worker.engines.transformers.run.vision import ImageReader
from worker.engines.transformers.sample.grammar import Grammars
from worker.engines.transformers.sample.vocabulary import Vocabulary
from worker.engines.transformers.schedule.lora_slots import AppliedAdapter
from worker.errors import (
    ContextExceeded,
    Draining,
    InvalidValue,
    QueueFull,
    RequestError,
    StartError,
    UnsupportedByModel,
)
from worker.images import TEXT_ONLY
from worker.interface import Delta, EncoderInput, EncodingConfig, EngineLoad, GenerationRequest, Grammar
from worker.protocol.argv import AdapterSource, Serve
from worker.protocol.events import MemoryNeed, Progress, Pulse

log = logging.getLogger(__name__)

# Main memory for each number of an answer of an encoder: the number in Python, and its text, which is copied. Measured:
# 81 to 88 with 2,048 vectors.
ANSWER_BYTES = 96

_NO_ADAPTERS = "this model is served without adapters; set enable-lora = on in its preset"


class TransformersEngine:
    """A loaded model, made by `load` and ended by `close`."""

    def __init__(
        self,
        options: Serve,
        prepared: PreparedModel,
        loaded: load_generator.LoadedGenerator | load_encoder.LoadedEncoder,
        pulse: Callable[[Pulse], None],
        announce: Callable[[MemoryNeed], None] = lambda need: None,
    ):
        """Start the step loop, for generation or for encoding."""
        tokenizer, config = prepared.tokenizer, prepared.config
        self.tokenizer = tokenizer
        self.ctx_size = loaded.ctx_size  # tokens that prompt and answer of one request may have together
        self._options = options
        # An encoder-decoder's answer is a text of its own: it does not continue the text of the prompt.
        has_encoder = bool(getattr(config, "is_encoder_decoder", False))
        self._vocabulary = vocabulary = Vocabulary(tokenizer, config, Path(options.snapshot))
        self._send_need = announce
        self._growth = Growth(self._announce)
        self._grammars = Grammars(
            tokenizer,
            ends=vocabulary.ends,
            vocab_size=vocabulary.size,
            growth=self._growth,
            rests=all(device.type == "cpu" for device in layer_split.devices_of(options)),
        )
        self._streams = StreamFactory(options, vocabulary, self.ctx_size, has_encoder=has_encoder)
        self._generation: GenerationLoop | None = None
        self._encoder: EncoderLoop | None = None
        self._adapters: LoraAdapters | None = None
        self._leader: Leader | None = None
        self._unmapped = LazyPages()
        self.has_warmed_up = False  # as in `Ready`
        self._until_first_pulse = memory.TAKEN_WHEN_READY if memory.inheritance.is_forked else 0
        self._steps_later = 0  # bytes that steps may take beyond what the warmup took
        self._with_steps = 0  # bytes of main memory with the largest steps and requests, if these are announced
        self.vision: ImageReader | None = None
        self.no_vision = TEXT_ONLY  # why it takes no images; empty if it takes them
        self.encoding: EncodingConfig | None = None
        self._has_had_requests = False
        outbox = Outbox()
        on_larger_step = self._announce_steps if loaded.announces_steps else None
        work: GenerationLoop | EncoderLoop
        if isinstance(loaded, load_generator.LoadedGenerator):
            backend = loaded.backend
            work = self._generation = GenerationLoop(
                backend,
                outbox,
                vocabulary.piece,
                chunk=options.prefill_chunk,
                grammars=self._grammars,
                has_steady_steps=loaded.has_steady_steps,
                on_larger_step=on_larger_step,
            )
            self._adapters, self._unmapped = backend.adapters, loaded.unmapped
            self.has_warmed_up = loaded.has_warmed_up
            if not loaded.announces_steps:
                self._steps_later = loaded.larger
            elif self.has_warmed_up:
                taken = loaded.larger + memory.TAKEN_BY_REQUESTS
                self._with_steps = self._present + self._grammar_bytes + taken
            self.vision = loaded.image_reader
            if self.vision is not None:
                self.vision.announced = self._announced_beside_steps
            self.no_vision = "" if loaded.image_reader is not None else loaded.no_vision
            self._leader = backend.runner.leader if isinstance(backend.runner, PagedLeader | AlignedLeader) else None
        else:
            work = self._encoder = EncoderLoop(
                loaded.encoder,
                outbox,
                budget=options.prefill_chunk,
                compiles_attention=loaded.compiles_attention,
                on_larger_step=on_larger_step,
            )
            self.encoding = loaded.encoding
        if loaded.announces_steps and not self.has_warmed_up:
            self._with_steps = int(json.loads(options.reserved).get("cpu", 0))
        self._loop = StepLoop(
            work,
            outbox,
            pulse=pulse,
            measured=lambda: self.measured,
            later=lambda: self.later,
            threads=StepThreads(options.threads),
            unannounced=lambda: self.unannounced,
            growth=self._growth,
        )
        if self._leader is not None:
            self._leader.on_lost(self._loop.fail)

    @classmethod
    def load(
        cls,
        options: Serve,
        prepared: PreparedModel | None = None,
        *,
        progress: Callable[[Progress], None],
        pulse: Callable[[Pulse], None],
        announce: Callable[[MemoryNeed], None] = lambda need: None,
        stage_done: Callable[[str], None] = lambda stage: None,
        ahead: bool | None = None,
        ranks: RankProcesses | None = None,
    ) -> "TransformersEngine":
        """Load the model and start its step loop. Blocks. Raises StartError, and RankLost if a rank process ends.

        progress: called on this thread (start, weights in bytes, warmup in tokens).
        pulse: called each second on the step loop's thread.
        announce: called before main memory is used that the last pulse did not contain, on any thread.
        stage_done: called with the name of each stage that has ended (config, tokenizer, read, copy, build, kernel,
            warmup, graphs, handles). Stages overlap, so one may end several times.
        prepared: from `preparation.prepare` for the same options, except those that a `MemoryGrant` changes; None:
            prepare now.
        ahead: launch each step before the one in front of it has finished; None: on accelerators only.
        ranks: the rank processes of a tensor-parallel model.
        """
        progress(Progress(stage="start"))
        prepared = prepared or preparation.prepare(options, stage_done)
        preparation.open_devices(options, prepared.imported)
        try:
            own = snapshot.is_own_code(options, prepared.config)
            with snapshot.own_code("its model") if own else snapshot.native_code(prepared.config):
                config, tokenizer, built = prepared.config, prepared.tokenizer, prepared.built
                loaded: load_generator.LoadedGenerator | load_encoder.LoadedEncoder
                if snapshot.encodes(options, config):
                    loaded = load_encoder.load(options, config, tokenizer, progress, stage_done, built)
                else:
                    loaded = load_generator.load(options, config, tokenizer, progress, stage_done, built, ranks, ahead)
                engine = cls(options, prepared, loaded, pulse, announce)
            if engine._take_handles():
                stage_done("handles")
            return engine
        finally:
            memory.end_helpers()

    def _take_handles(self) -> bool:
        """Open the libraries' handles on the step loop's thread, so that their memory is measured as overhead. False if
        no device has any.

        cuBLAS keeps a handle and a workspace for each thread. Opened by the first request instead, they would appear
        as memory of the model.
        """
        devices = [device for device in layer_split.devices_of(self._options) if device.type != "cpu"]
        if not devices:
            return False
        try:
            self._loop.call(partial(memory.take_handles, devices[:1] if self._leader is not None else devices))
        except Exception as error:
            if not cuda_errors.is_exhausted(error):
                raise
            raise memory.start_error("one step", devices[0], error) from error
        overhead.measure()
        return True

    @property
    def capabilities(self) -> frozenset[str]:
        if self._generation is not None:
            return frozenset({"completion"} if self.vision is None else {"completion", "vision"})
        if self.encoding is None:
            return frozenset({"rerank"})
        return frozenset({"embedding", "rerank"} if self.encoding.is_pooled else {"embedding"})

    @property
    def occupancy(self) -> EngineLoad:
        return self._loop.occupancy

    @property
    def measured(self) -> dict[str, int]:
        return self._leader.measured() if self._leader is not None else memory.measured(self._options.devices)

    def map_rest(self) -> None:
        """Map the weights in the page cache ahead of the first step, and then the KV cache. Called once, when ready."""
        self._until_first_pulse = 0  # `Ready` contained it, and the first pulse has what was taken
        self._unmapped.start()

    @property
    def later(self) -> int:
        """Bytes still to be allocated, as in `Pulse`."""
        copied = memory.inheritance.yet_to_copy()
        if self._with_steps:  # all but these are announced
            copied = min(copied, memory.COPIED_BETWEEN_PULSES)
        return self._unmapped.left + self._growth.bytes + self._until_first_pulse + self._steps_later + copied

    @property
    def unannounced(self) -> int:
        """Bytes for grammars and steps that are not announced yet, as in `Pulse`."""
        return max(0, self._grammar_bytes + self.steps_to_come - self._growth.bytes)

    @property
    def _grammar_bytes(self) -> int:
        return self._grammars.bytes_to_come if self._generation is not None else 0

    @property
    def announces_steps(self) -> bool:
        """True if it announces the main memory of steps that are larger than those so far."""
        return self._with_steps > 0

    @property
    def steps_to_come(self) -> int:
        """Bytes that steps larger than those so far and their requests may take; 0: it does not announce them."""
        if not self._with_steps:
            return 0
        return max(0, self._with_steps - self._present - self._grammar_bytes)

    @property
    def _present(self) -> int:
        """Bytes of main memory that it has, or may take without an announcement."""
        return self.later - self._growth.bytes + memory.measured(())["cpu"]

    def _announce_steps(self) -> None:
        # `steps_to_come` is too low if the process has taken memory for other purposes than steps.
        with memory.inheritance.last_count():
            self._growth.announce_steps(max(self.steps_to_come, memory.TAKEN_BY_REQUESTS))

    def _announced_beside_steps(self) -> AbstractContextManager[None]:
        """Announce that the block, on another thread than the steps, takes main memory that their estimate contains."""
        if not self._with_steps:
            return contextlib.nullcontext()
        with memory.inheritance.last_count():
            return self._growth.announced(max(self.steps_to_come, memory.TAKEN_BY_REQUESTS))

    def _announce(self) -> None:
        # As in a pulse, `later` is read before `measured`. A leader would wait for its ranks, whose memory no grammar
        # takes.
        later, unannounced = self.later, self.unannounced
        measured = memory.measured(()) if self._leader is None else {}
        self._send_need(MemoryNeed(measured=measured, later=later, unannounced=unannounced))

    @property
    def fatal(self) -> Future[StartError]:
        """Done once the step loop has died, and only then. All running requests have ended by then.

        After a sticky device error, its result is the StartError to exit with (POISONED). Otherwise it raises the error
        of the crash. Await it with `asyncio.wrap_future`.
        """
        return self._loop.fatal

    async def close(self) -> None:
        """Stop the step loop after the current step. Running requests end with Draining."""
        await asyncio.to_thread(self._loop.close)
        if self._leader is not None:
            await asyncio.to_thread(self._leader.end)
        self._grammars.close()
        if self.vision is not None:
            self.vision.close()

    def _admit(self, work: GenerationLoop | EncoderLoop, request: RequestStream | EncoderJob, number: int) -> None:
        """Count a request. Raises QueueFull."""
        queue_size = self._options.queue_size
        if not work.limit.admit(request, number, self._options.parallel + queue_size):
            raise QueueFull(f"{queue_size} requests are waiting for this model already; try again later")

    # Text

    async def check_grammar(self, grammar: Grammar) -> None:
        await self._grammars.compiled(grammar)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        work = self._generation
        if work is None:
            raise UnsupportedByModel("this model embeds or scores texts, so it cannot generate text")
        self._streams.check(request)
        adapter = self._adapter(request)
        matcher = None
        if request.grammar is not None:
            matcher = await self._grammars.compiled(request.grammar)
        stream = self._streams.make(request, matcher, adapter)
        self._admit(work, stream, request.n)
        try:
            if not self._loop.post(partial(work.add, stream)):
                raise Draining("the model is being unloaded")
            while (item := await stream.items.get()) is not None:
                if isinstance(item, RequestError):
                    raise item
                yield item
        finally:
            work.limit.release(stream, request.n)
            self._loop.post(partial(work.cancel, stream))

    async def set_adapters(self, sources: Sequence[AdapterSource], default: str = "") -> Mapping[str, str]:
        adapters = self._adapters
        if adapters is None:
            raise UnsupportedByModel(_NO_ADAPTERS)

        def update() -> Mapping[str, str]:
            try:
                with self._announced_beside_steps():
                    return adapters.update(sources, default)
            finally:
                memory.end_helpers()

        problems = await asyncio.to_thread(update)
        self._loop.post(adapters.forget_gone)  # the slots belong to the step loop's thread
        return problems

    def _adapter(self, request: GenerationRequest) -> AppliedAdapter | None:
        """The adapter of the request. Raises AdapterNotFound, UnusableAdapter, UnsupportedByModel."""
        if self._adapters is not None:
            return self._adapters.find(request.adapter)
        if request.adapter is not None and (request.adapter.name or request.adapter.number is not None):
            raise UnsupportedByModel(_NO_ADAPTERS)
        return None

    # Vectors and scores

    async def embed(self, texts: Sequence[EncoderInput], *, normalize: int | None = None) -> list[list[float]]:
        if self.encoding is None:
            raise UnsupportedByModel("this model has no embeddings; use an embedding model, or set task = embed")
        if not self.encoding.is_pooled:
            raise InvalidValue("pooling = none gives one vector per token; use POST /embedding for these")
        return await self._encode(texts, self._options.embd_normalize if normalize is None else normalize)

    async def embed_tokens(self, texts: Sequence[EncoderInput]) -> list[list[list[float]]]:
        if self.encoding is None or self.encoding.is_pooled:
            raise UnsupportedByModel("this model gives no vectors per token; set pooling = none")
        return await self._encode(texts, -1)

    async def score(self, pairs: Sequence[EncoderInput]) -> list[float]:
        if self._generation is not None or self.encoding is not None:
            raise UnsupportedByModel("this model is not a cross-encoder, so it cannot score pairs")
        return [score for (score,) in await self._encode(pairs, -1)]

    async def _encode(self, texts: Sequence[EncoderInput], normalize: int) -> list[Any]:
        """Check the texts, queue them and return the encoder's result for each."""
        work = self._encoder
        assert work is not None
        for text in texts:
            if not text.tokens:
                raise InvalidValue("an input is empty", param="input")
            self._streams.check_tokens(text.tokens, "input")
            if len(text.tokens) > self.ctx_size:
                raise ContextExceeded(len(text.tokens), self.ctx_size)
        if not texts:
            return []
        loop = asyncio.get_running_loop()
        job = EncoderJob(texts, loop, loop.create_future(), normalize)
        self._admit(work, job, 1)
        width = self.encoding.dimensions if self.encoding is not None else 1
        is_pooled = self.encoding is None or self.encoding.is_pooled
        numbers = width * (len(texts) if is_pooled else sum(len(text.tokens) for text in texts))
        answer, task = contextlib.ExitStack(), asyncio.current_task()
        answer.enter_context(self.announced(ANSWER_BYTES * numbers))
        assert task is not None
        task.add_done_callback(lambda _: answer.close())  # its text is written by then
        try:
            if not self._loop.post(partial(work.add, job)):
                raise Draining("the model is being unloaded")
            return await job.answer
        finally:
            work.limit.release(job, 1)
            self._loop.post(partial(work.cancel, job))

    @contextlib.contextmanager
    def announced(self, size: int) -> Iterator[None]:
        """See `worker.interface.Engine`. Requests that are small together are part of what the steps may take."""
        growth, is_first = self._growth, not self._has_had_requests
        self._has_had_requests = True
        growth.running_bytes += size
        try:
            if self._with_steps and (is_first or growth.running_bytes > memory.COPIED_BETWEEN_PULSES // 4):
                # Pages that are copied meanwhile come on top: a large request copies as many as many small ones.
                more = memory.TAKEN_BY_REQUESTS if is_first else memory.COPIED_BETWEEN_PULSES
                with memory.inheritance.last_count():  # a new count would hold up all requests for 10 ms
                    growth.announce_requests(growth.running_bytes + more)
            yield
        finally:
            growth.running_bytes -= size
