"""The `transformers` engine: one model, loaded; generations and embeddings on its step loop.

`TransformersEngine` implements `worker.interface.Engine`. Its asyncio side checks a request, posts it to the step loop
and reads what comes back; everything that computes happens on the loop's thread.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from worker.engines.transformers import load_encoder, load_generator, request_limits, start
from worker.engines.transformers.device import memory
from worker.engines.transformers.device.process_overhead import overhead
from worker.engines.transformers.device.rank_processes import Ranks
from worker.engines.transformers.embedding import Embedding, Job
from worker.engines.transformers.generation_loop import Generating
from worker.engines.transformers.load import loader, model_class, placement
from worker.engines.transformers.load.lora import Adapters
from worker.engines.transformers.request_streams import RequestStreams
from worker.engines.transformers.run.tensor_parallel import Leader
from worker.engines.transformers.run.vision import Eyes
from worker.engines.transformers.sample.grammar import Grammars
from worker.engines.transformers.sample.vocabulary import Vocabulary
from worker.engines.transformers.schedule.lora_slots import Use
from worker.engines.transformers.start import Prepared
from worker.engines.transformers.step_loop import Outbox, StepLoop
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
from worker.interface import Delta, EncoderInput, EncodingConfig, EngineLoad, GenerationRequest
from worker.protocol.argv import AdapterSource, Serve
from worker.protocol.events import Progress, Pulse

log = logging.getLogger(__name__)

_NO_ADAPTERS = "this model is served without adapters; set enable-lora = on in its preset"


class TransformersEngine:
    """A loaded model. Made by `load`; ended by `close`."""

    def __init__(
        self,
        options: Serve,
        prepared: Prepared,
        loaded: load_generator.Loaded | load_encoder.Loaded,
        pulse: Callable[[Pulse], None],
    ):
        """Start the step loop: of a model that generates, or of one that embeds or scores."""
        tokenizer, config = prepared.tokenizer, prepared.config
        self.tokenizer = tokenizer
        self.ctx_size = loaded.ctx_size
        """Tokens that prompt and answer of one request may have together."""
        self._options = options
        # An encoder reads the prompt; the answer is a text of its own and does not continue the prompt.
        reads_first = bool(getattr(config, "is_encoder_decoder", False))
        self._vocabulary = vocabulary = Vocabulary(tokenizer, config, Path(options.snapshot))
        self._bounds = request_limits.Bounds(options, vocabulary, self.ctx_size, reads_first=reads_first)
        self._grammars = Grammars(tokenizer, ends=vocabulary.ends, vocab_size=vocabulary.size)
        self._streams = RequestStreams(options, vocabulary, self.ctx_size, reads_first=reads_first)
        self._generating: Generating | None = None
        self._embedding: Embedding | None = None
        self._adapters: Adapters | None = None
        self._leader: Leader | None = None
        self._late = load_generator.LateMemory()
        self.vision: Eyes | None = None
        self.no_vision = TEXT_ONLY
        """Why it takes no images; empty if it takes them."""
        self.encoding: EncodingConfig | None = None
        outbox = Outbox()
        work: Generating | Embedding
        if isinstance(loaded, load_generator.Loaded):
            backend = loaded.backend
            work = self._generating = Generating(
                backend, outbox, vocabulary.piece, chunk=options.prefill_chunk, grammars=self._grammars
            )
            self._adapters, self._late = backend.adapters, loaded.late
            self.vision, self.no_vision = loaded.eyes, "" if loaded.eyes is not None else loaded.no_vision
            self._leader = backend.runner if isinstance(backend.runner, Leader) else None
        else:
            work = self._embedding = Embedding(loaded.encoder, outbox, budget=options.prefill_chunk)
            self.encoding = loaded.encoding
        self._loop = StepLoop(
            work, outbox, pulse=pulse, measured=self._measure, later=self._to_come, threads=options.threads
        )
        if self._leader is not None:
            self._leader.on_lost(self._loop.fail)

    @staticmethod
    def prepare(options: Serve, *, over: Callable[[str], None] = lambda stage: None) -> Prepared:
        """Do what can be done before there is room for weights, and before devices are looked at; see `load`."""
        return start.prepare(options, over)

    @classmethod
    def load(
        cls,
        options: Serve,
        prepared: Prepared | None = None,
        *,
        progress: Callable[[Progress], None],
        pulse: Callable[[Pulse], None],
        over: Callable[[str], None] = lambda stage: None,
        ahead: bool | None = None,
        ranks: Ranks | None = None,
    ) -> "TransformersEngine":
        """Load the model and start its step loop. Blocks; `progress` is called on this thread (start, weights in bytes,
        warmup in tokens), `pulse` on the step loop's, each second; `over` with each stage that has ended (config,
        tokenizer, read, copy, build, warmup; some go hand in hand, and end several times). `prepared` for the same
        options, but for what `Go` changes; None: that is done now. `ahead`: whether a step is launched before
        the one in front has landed; None: on accelerators. `ranks`: the followers, of a model that is divided. Raises
        StartError, and RankLost if one of those ends.
        """
        progress(Progress(stage="start"))
        prepared = prepared or cls.prepare(options, over=over)
        start.come_to_devices(options, prepared.imported)
        try:
            own = model_class.is_own_code(options, prepared.config)
            with loader.own_code("its model", runs=own), loader.native_code(prepared.config, runs=not own):
                if loader.is_cross_encoder(options, prepared.config) or loader.is_embedder(options, prepared.config):
                    if options.tensor_parallel > 1:
                        raise StartError("a model that embeds or scores texts is not divided; remove tensor-parallel")
                    engine = cls._load_encoder(options, prepared, progress, pulse, over)
                else:
                    engine = cls._load_generator(options, prepared, progress, pulse, over, ahead, ranks)
            engine._take_handles()
            return engine
        finally:
            memory.end_helpers()

    @classmethod
    def _load_generator(
        cls,
        options: Serve,
        prepared: Prepared,
        progress: Callable[[Progress], None],
        pulse: Callable[[Pulse], None],
        over: Callable[[str], None],
        ahead: bool | None,
        ranks: Ranks | None,
    ) -> "TransformersEngine":
        config, tokenizer = prepared.config, prepared.tokenizer
        loaded = load_generator.load(options, config, tokenizer, progress, over, prepared.built, ranks, ahead)
        return cls(options, prepared, loaded, pulse)

    @classmethod
    def _load_encoder(
        cls,
        options: Serve,
        prepared: Prepared,
        progress: Callable[[Progress], None],
        pulse: Callable[[Pulse], None],
        over: Callable[[str], None],
    ) -> "TransformersEngine":
        config, tokenizer = prepared.config, prepared.tokenizer
        if options.max_loras:
            raise StartError("adapters are for models that generate text, and this one does not; set enable-lora = off")
        loaded = load_encoder.load(options, config, tokenizer, progress, over, prepared.built)
        over("build")
        progress(Progress(stage="warmup"))
        try:
            load_encoder.warm_up(
                loaded.encoder, ctx_size=loaded.ctx_size, vocab_size=config.get_text_config().vocab_size
            )
        except Exception as error:
            if not memory.is_exhausted(error):
                raise
            raise memory.start_error("one step", loaded.device, error) from error
        overhead.look()
        over("warmup")
        return cls(options, prepared, loaded, pulse)

    def _take_handles(self) -> None:
        """Returns once the step loop's thread has what it will keep of the accelerators, and that has been counted."""
        devices = [each for each in placement.devices_of(self._options) if each.type != "cpu"]
        if not devices:
            return
        try:
            self._loop.call(partial(memory.take_handles, devices[:1] if self._leader is not None else devices))
        except Exception as error:
            if not memory.is_exhausted(error):
                raise
            raise memory.start_error("one step", devices[0], error) from error
        overhead.look()

    @property
    def capabilities(self) -> frozenset[str]:
        if self._generating is not None:
            return frozenset({"completion"} if self.vision is None else {"completion", "vision"})
        if self.encoding is None:
            return frozenset({"rerank"})
        return frozenset({"embedding", "rerank"} if self.encoding.is_pooled else {"embedding"})

    @property
    def occupancy(self) -> EngineLoad:
        return self._loop.occupancy

    @property
    def measured(self) -> dict[str, int]:
        return self._measure()

    def _measure(self) -> dict[str, int]:
        return self._leader.measured() if self._leader is not None else memory.measured(self._options.devices)

    def map_rest(self) -> None:
        """Map the weights in the page cache ahead of the first step, and then the KV cache. Called once."""
        self._late.start()

    def until_mapped(self) -> None:
        """Wait until the KV cache is mapped, which `map_rest` began."""
        self._late.finish()

    @property
    def later(self) -> int:
        """As in `Pulse`."""
        return self._to_come()

    def _to_come(self) -> int:
        tables = self._grammars.bytes_to_come if self._generating is not None else 0
        return self._late.left + tables + memory.yet_to_copy()

    @property
    def fatal(self) -> Future[StartError]:
        """Done once the step loop has died, and only then; every running request has ended by then.

        After a sticky device error its result is the StartError to end with (exit POISONED); anything else it raises,
        and that is a crash. To be awaited with `asyncio.wrap_future`.
        """
        return self._loop.fatal

    async def close(self) -> None:
        """Stop the step loop; whatever runs ends with Draining. Returns once the current step is over."""
        await asyncio.to_thread(self._loop.close)
        if self._leader is not None:
            await asyncio.to_thread(self._leader.end)
        self._grammars.close()
        if self.vision is not None:
            self.vision.close()

    # Text

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """See `worker.interface.Engine`."""
        work = self._generating
        if work is None:
            raise UnsupportedByModel("this model embeds or scores texts; it cannot generate any")
        prompt = self._bounds.check(request)
        adapter = self._adapter(request)
        matcher = None
        if request.grammar is not None:
            matcher = await asyncio.wrap_future(self._grammars.begin(request.grammar))
        stream = self._streams.make(request, prompt, matcher, adapter)
        if not work.admit(stream, self._options.parallel + self._options.queue_size):
            raise QueueFull(f"{self._options.queue_size} requests wait for this model already; try again later")
        try:
            if not self._loop.post(partial(work.add, stream)):
                raise Draining("the model is being unloaded")
            while (item := await stream.items.get()) is not None:
                if isinstance(item, RequestError):
                    raise item
                yield item
        finally:
            work.release(stream, request.n)
            self._loop.post(partial(work.cancel, stream))

    async def set_adapters(self, sources: Sequence[AdapterSource], default: str = "") -> Mapping[str, str]:
        """See `worker.interface.Engine`."""
        adapters, work = self._adapters, self._generating
        if adapters is None or work is None:
            raise UnsupportedByModel(_NO_ADAPTERS)

        def update() -> Mapping[str, str]:
            try:
                return adapters.update(sources, default)
            finally:
                memory.end_helpers()

        problems = await asyncio.to_thread(update)
        self._loop.post(work.forget_adapters)
        return problems

    def _adapter(self, request: GenerationRequest) -> Use | None:
        """What the request's choice stands for. Raises AdapterNotFound, UnusableAdapter, UnsupportedByModel."""
        if self._adapters is not None:
            return self._adapters.find(request.adapter)
        if request.adapter is not None and (request.adapter.name or request.adapter.number is not None):
            raise UnsupportedByModel(_NO_ADAPTERS)
        return None

    # Vectors and scores

    async def embed(self, texts: Sequence[EncoderInput], *, normalize: int | None = None) -> list[list[float]]:
        """See `worker.interface.Engine`."""
        if self.encoding is None:
            raise UnsupportedByModel("this model was not loaded for embeddings; an embedder, or task = embed, has them")
        if not self.encoding.is_pooled:
            raise UnsupportedByModel("pooling = none gives a vector for each token: ask POST /embedding for them")
        return await self._encode(texts, self._options.embd_normalize if normalize is None else normalize)

    async def embed_tokens(self, texts: Sequence[EncoderInput]) -> list[list[list[float]]]:
        """See `worker.interface.Engine`."""
        if self.encoding is None or self.encoding.is_pooled:
            raise UnsupportedByModel("this model was not loaded with pooling = none")
        return await self._encode(texts, -1)

    async def score(self, pairs: Sequence[EncoderInput]) -> list[float]:
        """See `worker.interface.Engine`."""
        if self._generating is not None or self.encoding is not None:
            raise UnsupportedByModel("this model is no cross-encoder; it scores no pairs")
        return [score for (score,) in await self._encode(pairs, -1)]

    async def _encode(self, texts: Sequence[EncoderInput], normalize: int) -> list[Any]:
        """What the encoder makes of each text."""
        work = self._embedding
        assert work is not None
        limit = min(self.ctx_size, self._options.max_input_tokens or self.ctx_size)
        for text in texts:
            if not text.tokens:
                raise InvalidValue("an input is empty", param="input")
            self._bounds.check_tokens(text.tokens)
            if len(text.tokens) > limit:
                raise ContextExceeded(len(text.tokens), limit)
        if not texts:
            return []
        if not work.admit(self._options.parallel + self._options.queue_size):
            raise QueueFull(f"{self._options.queue_size} requests wait for this model already; try again later")
        loop = asyncio.get_running_loop()
        job = Job(texts, loop, loop.create_future(), normalize)
        try:
            if not self._loop.post(partial(work.add, job)):
                raise Draining("the model is being unloaded")
            return await job.answer
        finally:
            work.release()
            self._loop.post(partial(work.cancel, job))
