"""The `transformers` engine: one model, loaded; generations and embeddings on its step loop.

`TransformersEngine` implements `worker.generation.Engine`. Its asyncio side checks a request, posts it to the step loop
and reads what comes back; everything that computes happens on the loop's thread.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import transformers

from worker.detokenize import Answer
from worker.engine import backends, bounds, cache_types, encoders, generators, loader, memory
from worker.engine.adapters import Adapters
from worker.engine.claims import Claims
from worker.engine.embedding import Embedding, Job
from worker.engine.generating import Choice, Generating, Stream
from worker.engine.grammar import Grammars, Matcher
from worker.engine.kv_cache import Capacity, Rows
from worker.engine.linears import Linears
from worker.engine.lockstep import Leader
from worker.engine.overhead import overhead
from worker.engine.pace import Pace
from worker.engine.runner import Runner
from worker.engine.sampler import has_penalties
from worker.engine.sequence import Repeats, answer_limit
from worker.engine.sequence import Sequence as TokenSequence
from worker.engine.shelf import shelf
from worker.engine.slots import Use
from worker.engine.steploop import Outbox, StepLoop
from worker.engine.vision import Eyes, Tower
from worker.engine.vocabulary import Vocabulary
from worker.engine.weights import Prefault
from worker.errors import (
    ContextExceeded,
    Draining,
    InvalidValue,
    QueueFull,
    RequestError,
    StartError,
    UnsupportedByModel,
)
from worker.generation import Delta, Generation, Occupancy, Text, TokenLogprob
from worker.images import TEXT_ONLY
from worker.protocol.argv import AdapterSource, Serve
from worker.protocol.events import Progress, Pulse
from worker.protocol.exits import Exit
from worker.ranks import Ranks

log = logging.getLogger(__name__)

_NO_ADAPTERS = "this model is served without adapters; set enable-lora = on in its preset"


@dataclass(frozen=True)
class Prepared:
    """What of a load needs neither weights nor a device."""

    config: Any
    tokenizer: transformers.PreTrainedTokenizerBase
    built: loader.Built | None = None
    """The model, but for its weights: the nursery had it."""
    imported: int = 0
    """Bytes of main memory that the imports took; 0: a nursery's."""


class TransformersEngine:
    """A loaded model. Made by `load`; ended by `close`."""

    def __init__(
        self,
        options: Serve,
        tokenizer: transformers.PreTrainedTokenizerBase,
        *,
        config: Any,
        ctx_size: int,
        pulse: Callable[[Pulse], None],
        runner: Runner | None = None,
        capacity: Capacity | None = None,
        pace: Pace | None = None,
        linears: Linears | None = None,
        adapters: Adapters | None = None,
        encoder: encoders.Loaded | None = None,
        tower: Tower | None = None,
        vision: Eyes | None = None,
        blind: str = TEXT_ONLY,
        ahead: bool = False,
        prefault: Prefault | None = None,
        claims: Claims | None = None,
    ):
        """With a `runner` it generates, with an `encoder` it embeds or scores. Starts the step loop.

        `ahead`: the next step is launched before the newest tokens are known (`Generating`).

        With `vision` it takes images; else `blind` says why not. `prefault`: of weights that are not mapped yet;
        `claims`: of the cache, whose pages have not come yet.
        `capacity`: what the runner's cache has room for; None: the whole context in each of `parallel` rows.
        """
        self.tokenizer = tokenizer
        self.ctx_size = ctx_size
        """Tokens that prompt and answer of one request may have together."""
        self._options = options
        self._prefault, self._claims = prefault, claims or Claims()
        self._reads_first = bool(getattr(config, "is_encoder_decoder", False))
        """An encoder reads the prompt; the answer is a text of its own, and does not go on with it."""
        self._vocabulary = vocabulary = Vocabulary(tokenizer, config, Path(options.snapshot))
        self._bounds = bounds.Bounds(options, vocabulary, ctx_size, reads_first=self._reads_first)
        self._grammars = Grammars(tokenizer, ends=vocabulary.ends, vocab_size=vocabulary.size)
        self.vision, self.blind = vision, "" if vision is not None else blind
        self._ids = count()
        outbox = Outbox()
        self._generating = self._embedding = None
        self._adapters = adapters
        work: Generating | Embedding
        if runner is not None:
            capacity = capacity or Rows(options.parallel, ctx_size)
            work = self._generating = Generating(
                runner,
                outbox,
                vocabulary.piece,
                capacity=capacity,
                chunk=options.prefill_chunk,
                pace=pace or Pace(),
                linears=linears,
                grammars=self._grammars,
                adapters=adapters,
                tower=tower,
                ahead=ahead,
            )
        else:
            assert encoder is not None
            work = self._embedding = Embedding(encoder.encoder, outbox, budget=options.prefill_chunk)
        self.encoding = encoder.encoding if encoder is not None else None
        self._leader = runner if isinstance(runner, Leader) else None
        self._loop = StepLoop(
            work, outbox, pulse=pulse, measured=self._measure, later=self._to_come, threads=options.threads
        )
        if self._leader is not None:
            self._leader.on_lost(self._loop.fail)

    @staticmethod
    def prepare(options: Serve, *, over: Callable[[str], None] = lambda stage: None) -> "Prepared":
        """What can be done before there is room for weights, and before devices are looked at; see `load`."""
        _check(options)
        torch.set_num_threads(options.threads)
        memory.keep_small()
        imported = 0 if memory.inheritance.is_heir else memory.resident()
        if (made := shelf.find(options)) is not None:
            over("config")
            over("tokenizer")
            return Prepared(made.config, made.tokenizer, made.built, imported)
        config = loader.load_config(options)
        over("config")
        tokenizer = loader.load_tokenizer(options)
        over("tokenizer")
        return Prepared(config, tokenizer, imported=imported)

    @classmethod
    def load(
        cls,
        options: Serve,
        prepared: "Prepared | None" = None,
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
        _come_to_devices(options, prepared.imported)
        try:
            own = loader.is_own_code(options, prepared.config)
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
        loaded = generators.load(options, config, tokenizer, progress, over, prepared.built, ranks, ahead)
        return cls(
            options,
            tokenizer,
            config=config,
            ctx_size=loaded.ctx_size,
            pulse=pulse,
            runner=loaded.runner,
            capacity=loaded.capacity,
            pace=loaded.pace,
            linears=loaded.linears,
            adapters=loaded.adapters,
            tower=loaded.tower,
            vision=loaded.eyes,
            blind=loaded.blind,
            ahead=loaded.ahead,
            prefault=loaded.prefault,
            claims=loaded.claims,
        )

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
        loaded = encoders.load(options, config, tokenizer, progress, over, prepared.built)
        over("build")
        ctx_size = bounds.context_size(options, loaded.positions)
        progress(Progress(stage="warmup"))
        try:
            encoders.warm_up(loaded.encoder, ctx_size=ctx_size, vocab_size=config.get_text_config().vocab_size)
        except Exception as error:
            if not memory.is_exhausted(error):
                raise
            raise memory.start_error("one step", loaded.device, error) from error
        overhead.look()
        over("warmup")
        return cls(options, tokenizer, config=config, ctx_size=ctx_size, pulse=pulse, encoder=loaded)

    def _take_handles(self) -> None:
        """Returns once the step loop's thread has what it will keep of the accelerators, and that has been counted."""
        devices = [each for each in loader.devices_of(self._options) if each.type != "cpu"]
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
    def occupancy(self) -> Occupancy:
        return self._loop.occupancy

    @property
    def measured(self) -> dict[str, int]:
        return self._measure()

    def _measure(self) -> dict[str, int]:
        return self._leader.measured() if self._leader is not None else memory.measured(self._options.devices)

    def map_rest(self) -> None:
        """Have what is in the page cache mapped meanwhile, ahead of the first step, and then what was claimed; to be
        called once."""
        if self._prefault is None:
            self._claims.start()
        else:
            self._prefault.start()
            self._claims.start(behind=self._prefault.finish)

    def until_mapped(self) -> None:
        """Returns once what was claimed has come, which `map_rest` began."""
        self._claims.finish()

    @property
    def later(self) -> int:
        """As in `Pulse`."""
        return self._to_come()

    def _to_come(self) -> int:
        to_map = self._prefault.left if self._prefault is not None else 0
        tables = self._grammars.bytes_to_come if self._generating is not None else 0
        return to_map + self._claims.left + tables + memory.yet_to_copy()

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

    async def generate(self, request: Generation) -> AsyncGenerator[Delta, None]:
        """See `worker.generation.Engine`."""
        work = self._generating
        if work is None:
            raise UnsupportedByModel("this model embeds or scores texts; it cannot generate any")
        prompt = self._bounds.check(request)
        adapter = self._adapter(request)
        matcher = None
        if request.grammar is not None:
            matcher = await asyncio.wrap_future(self._grammars.begin(request.grammar))
        stream = self._stream(request, prompt, matcher, adapter)
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

    async def adapt(self, sources: Sequence[AdapterSource], default: str = "") -> Mapping[str, str]:
        """See `worker.generation.Engine`."""
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

    def _adapter(self, request: Generation) -> Use | None:
        """What the request's choice stands for. Raises AdapterNotFound, UnusableAdapter, UnsupportedByModel."""
        if self._adapters is not None:
            return self._adapters.find(request.adapter)
        if request.adapter is not None and (request.adapter.name or request.adapter.number is not None):
            raise UnsupportedByModel(_NO_ADAPTERS)
        return None

    def _stream(
        self, request: Generation, prompt: Sequence[int], matcher: Matcher | None, adapter: Use | None
    ) -> Stream:
        """The request's sequences, with fresh seeds where it has none."""
        stream, vocabulary = Stream(asyncio.get_running_loop()), self._vocabulary
        limit = answer_limit(len(prompt), request.max_tokens, self._options.n_predict, self.ctx_size)
        seed = request.sampling.seed
        if seed is None and self._options.seed >= 0:
            seed = self._options.seed
        for index in range(request.n):
            sequence = TokenSequence.of(
                request,
                id=next(self._ids),
                limit=limit,
                ends=vocabulary.ends,
                seed=secrets.randbits(63) if seed is None else seed + index,
                prompt=prompt,
                adapter=adapter,
            )
            if request.n > 1:
                sequence.group = stream.choices[0].sequence.id if index else sequence.id
            decode = partial(vocabulary.decode_with, request.shown) if request.shown else vocabulary.decode
            context = () if self._reads_first else prompt
            answer = Answer(decode, request.stop, context, shows_stop=request.shows_end)
            choice = Choice(index, sequence, stream, answer)
            choice.shows_end = request.shows_end
            choice.matcher = matcher and matcher.copy()
            choice.tells_progress = request.progress
            choice.wants_timings = request.timings
            if has_penalties(request.sampling):
                first = len(prompt) if self._reads_first else 0
                choice.repeats = Repeats(sequence, request.sampling.repeat_last_n, first)
            if request.prompt_logprobs:
                choice.prompt = [TokenLogprob(prompt[0], vocabulary.piece(prompt[0]), None)]
            stream.choices.append(choice)
        return stream

    # Vectors and scores

    async def embed(self, texts: Sequence[Text], *, normalize: int | None = None) -> list[list[float]]:
        """See `worker.generation.Engine`."""
        if self.encoding is None:
            raise UnsupportedByModel("this model was not loaded for embeddings; an embedder, or task = embed, has them")
        if not self.encoding.is_pooled:
            raise UnsupportedByModel("pooling = none gives a vector for each token: ask POST /embedding for them")
        return await self._encode(texts, self._options.embd_normalize if normalize is None else normalize)

    async def embed_tokens(self, texts: Sequence[Text]) -> list[list[list[float]]]:
        """See `worker.generation.Engine`."""
        if self.encoding is None or self.encoding.is_pooled:
            raise UnsupportedByModel("this model was not loaded with pooling = none")
        return await self._encode(texts, -1)

    async def score(self, pairs: Sequence[Text]) -> list[float]:
        """See `worker.generation.Engine`."""
        if self._generating is not None or self.encoding is not None:
            raise UnsupportedByModel("this model is no cross-encoder; it scores no pairs")
        return [score for (score,) in await self._encode(pairs, -1)]

    async def _encode(self, texts: Sequence[Text], normalize: int) -> list[Any]:
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


def _check(options: Serve) -> None:
    """Raises StartError for options that mean nothing."""
    tasks = ("auto", "generate", "embed", "rerank")
    if options.task not in tasks:
        raise StartError(f"task {options.task!r} is none of {', '.join(tasks)}", Exit.USAGE)
    if options.attention not in backends.ATTENTION:
        raise StartError(f"attention {options.attention!r} is none of {', '.join(backends.ATTENTION)}", Exit.USAGE)
    if options.kv_cache_dtype not in cache_types.NAMES:
        raise StartError(
            f"kv_cache_dtype {options.kv_cache_dtype!r} is none of {', '.join(cache_types.NAMES)}", Exit.USAGE
        )
    least = {"parallel": 1, "prefill_chunk": 1, "threads": 1, "ctx_size": 0, "kv_tokens": 0, "queue_size": 0,
             "max_input_tokens": 0, "max_loras": 0, "max_lora_rank": 1, "max_cpu_loras": 0,
             "tensor_parallel": 1}  # fmt: skip
    for name, smallest in least.items():
        if getattr(options, name) < smallest:
            raise StartError(f"{name} is {getattr(options, name)}; it must be at least {smallest}", Exit.USAGE)


def _come_to_devices(options: Serve, imported: int) -> None:
    """See that the devices are here, hold torch to what is reserved, and note what the way there takes. `imported`:
    bytes of main memory that the imports took."""
    accelerators = [name for name in options.devices if name != "cpu"]
    if options.tensor_parallel > 1:
        accelerators = accelerators[:1]  # each rank comes to its own
    before = memory.resident()
    overhead.begin(accelerators if options.tensor_parallel == 1 else (), options.overhead)
    loader.devices_of(options)
    memory.cap(accelerators, options.reserved)
    for name in accelerators:
        torch.cuda.synchronize(torch.device(name))  # takes the context
    host = imported + (memory.resident() - before if accelerators else 0)
    if host > 0 and options.tensor_parallel == 1:
        overhead.said["cpu"] = host
