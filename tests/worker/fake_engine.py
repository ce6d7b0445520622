"""A fake engine: it generates a fixed script token by token, and fails if the prompt contains certain words.

Words in a prompt:
    hold        wait for `gate` before the first token
    hold-later  wait for `gate` after the second token
    prefill     report half of the prompt as computed, wait for `gate`, then report the whole prompt
    silent      generate no text, only the end
    full        raise QueueFull
    break       raise an unexpected error
    fail        raise SequenceFailed before the first token
    fail-later  raise SequenceFailed after the second token
    fail-last   raise SequenceFailed after the last token
    long        repeat the script until max_tokens
`journal` lists the events in order; `until` waits for an entry.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from worker import detokenizer
from worker.errors import ContextExceeded, Draining, InvalidValue, QueueFull, SequenceFailed
from worker.images import TEXT_ONLY
from worker.interface import (
    ChoiceTimings,
    Delta,
    EncoderInput,
    EncodingConfig,
    EngineLoad,
    FinishReason,
    GenerationRequest,
    Grammar,
    ImageProcessor,
    PrefillProgress,
    TokenLogprob,
)
from worker.protocol.argv import AdapterSource

SCRIPT = "Grüße, 世界! 🦊 The quick brown fox jumps over the lazy dog."
CACHED, PREFILL, DECODE = 2, 0.5, 0.25
DEADLINE = 60.0


ENCODING = EncodingConfig(dimensions=4, prompts={"query": "? ", "document": "", "title": "# "}, skips_prompt=True)


class FakeEngine:
    """Implements `worker.interface.Engine`. Choice i of a prompt of p tokens is `<i> SCRIPT <p>`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        capabilities: Sequence[str] = ("completion", "embedding"),
        ctx_size: int = 256,
        waiting: int = 0,
        encoding: EncodingConfig | None = ENCODING,
        vision: ImageProcessor | None = None,
    ):
        self.tokenizer = tokenizer
        self.capabilities = frozenset(capabilities)
        self.ctx_size = ctx_size
        self.encoding = encoding
        self.vision, self.no_vision = vision, "" if vision is not None else TEXT_ONLY
        self.gate = asyncio.Event()
        self.requests: list[GenerationRequest] = []
        self.texts: list[EncoderInput] = []
        self.journal: list[str] = []
        self.adapters: list[AdapterSource] = []
        self.default_adapter = ""
        self._changed = asyncio.Condition()
        self._waiting = waiting
        self._steps = 0
        self._is_closed = False
        added = {id: token.content for id, token in tokenizer.added_tokens_decoder.items()}
        decoder = tokenizer.backend_tokenizer.decoder.__getstate__().decode()
        spell: Any = tokenizer.convert_ids_to_tokens
        self._bytes = detokenizer.TokenBytes(decoder, spell, added)

    def announced(self, size: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @property
    def occupancy(self) -> EngineLoad:
        return EngineLoad(steps=self._steps, running=0, waiting=self._waiting)

    @property
    def measured(self) -> dict[str, int]:
        return {"cpu": 1 << 20}

    async def set_adapters(self, sources: Sequence[AdapterSource], default: str = "") -> Mapping[str, str]:
        """Report an error for adapters whose path ends in `broken`."""
        self.adapters, self.default_adapter = list(sources), default
        return {each.name: f"{each.path} is no adapter" for each in sources if each.path.endswith("broken")}

    async def close(self) -> None:
        self._is_closed = True

    async def until(self, entry: str) -> None:
        """Wait until the journal has `entry`."""
        async with asyncio.timeout(DEADLINE), self._changed:
            await self._changed.wait_for(lambda: entry in self.journal)

    def script(self, request: GenerationRequest, index: int) -> str:
        """Return the text of choice `index`, before max_tokens and stop strings apply."""
        text = f"{index} {SCRIPT} {len(request.prompt)}"
        words = self._words(request)
        return "" if "silent" in words else text * (1 + (request.max_tokens or 0) // 40) if "long" in words else text

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        self._admit(request)
        await self._note("begin")
        try:
            words = self._words(request)
            if "hold" in words:
                await self.gate.wait()
            if "prefill" in words and request.progress:
                total = len(request.prompt)
                yield Delta(progress=PrefillProgress(done=total // 2, total=total, cached=CACHED, seconds=0.125))
                await self._note("halfway")
                await self.gate.wait()
                yield Delta(progress=PrefillProgress(done=total, total=total, cached=CACHED, seconds=PREFILL))
            if "fail" in words:
                raise SequenceFailed("the logits of this sequence are not numbers")
            choices = [_Choice(self, request, index) for index in range(request.n)]
            while choices:
                for choice in list(choices):
                    self._steps += 1
                    yield choice.step()
                    if choice.finish is not None:
                        choices.remove(choice)
                if "hold-later" in words and choices and choices[0].generated == 2:
                    await self._note("holding")
                    await self.gate.wait()
                if "fail-later" in words and choices and choices[0].generated == 2:
                    raise SequenceFailed("the logits of this sequence are not numbers")
                await asyncio.sleep(0)  # other tasks run between steps
            if "fail-last" in words:
                await self._note("failing")
                raise SequenceFailed("the logits of this sequence are not numbers")
            await self._note("end")
        except (GeneratorExit, asyncio.CancelledError):
            self.journal.append("cancelled")
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self._note("")))
            raise

    async def check_grammar(self, grammar: Grammar) -> None:
        """Report an error for the text "broken"."""
        if grammar.text == "broken":
            raise InvalidValue(f"{grammar.field} cannot be compiled", param=grammar.field)

    async def embed(self, texts: Sequence[EncoderInput], *, normalize: int | None = None) -> list[list[float]]:
        """Return unnormalized vectors: component i is (length of the text) * (i + 1)."""
        await self._encode(texts)
        return [[float(len(text.tokens) * (index + 1)) for index in range(4)] for text in texts]

    async def embed_tokens(self, texts: Sequence[EncoderInput]) -> list[list[list[float]]]:
        """Return each token's id twice as its vector."""
        await self._encode(texts)
        return [[[float(token)] * 2 for token in text.tokens] for text in texts]

    async def score(self, pairs: Sequence[EncoderInput]) -> list[float]:
        """Return the number of tokens of each pair as its score."""
        await self._encode(pairs)
        return [float(len(pair.tokens)) for pair in pairs]

    async def _encode(self, texts: Sequence[EncoderInput]) -> None:
        self.texts.extend(texts)
        await self._note("embed")
        if any("hold" in self.tokenizer.decode(list(text.tokens)) for text in texts):
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.journal.append("cancelled")
                asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self._note("")))
                raise

    def entry(self, token: int, logprob: float | None, top: int = 0) -> TokenLogprob:
        alternatives = tuple(
            self.entry((token + 1 + rank) % 256, -math.inf if rank == 1 else -2.0 - rank) for rank in range(top)
        )
        return TokenLogprob(token, self._bytes(token), logprob, alternatives)

    def _admit(self, request: GenerationRequest) -> None:
        if self._is_closed:
            raise Draining("the engine is stopping")
        if "full" in self._words(request):
            raise QueueFull("4 requests are waiting already; try again later")
        if "break" in self._words(request):
            raise ValueError(f"a secret of the prompt: {self.tokenizer.decode(list(request.prompt))}")
        if len(request.prompt) >= self.ctx_size:
            raise ContextExceeded(len(request.prompt), self.ctx_size)
        if max(request.prompt) >= len(self.tokenizer):
            raise InvalidValue("a token id outside the vocabulary")

    def _words(self, request: GenerationRequest) -> list[str]:
        return str(self.tokenizer.decode(list(request.prompt), skip_special_tokens=True)).split()

    async def _note(self, entry: str) -> None:
        async with self._changed:
            if entry:
                self.journal.append(entry)
            self._changed.notify_all()


class _Choice:
    """One choice and its position in the script."""

    def __init__(self, engine: FakeEngine, request: GenerationRequest, index: int):
        self._engine = engine
        self._request = request
        self._index = index
        self._script = engine.tokenizer.encode(engine.script(request, index), add_special_tokens=False)
        room = engine.ctx_size - len(request.prompt)
        self._limit = min(room, request.max_tokens or room)
        self._answer = detokenizer.AnswerText(
            lambda ids: str(engine.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)),
            request.stop,
            shows_stop=request.include_stop,
        )
        self.generated = 0
        self.finish: FinishReason | None = None

    def step(self) -> Delta:
        token = self._script[self.generated] if self.generated < len(self._script) else None
        if token is None:
            return self._end("stop", self._answer.finish().text)
        self.generated += 1
        if token in self._request.ends:
            return self._end("stop", self._answer.finish().text, hidden_tokens=(token,))
        piece = self._answer.push(token)
        if piece.stop is not None:
            return self._end("stop", piece.text, None, piece.stop, hidden_tokens=(token,))
        if self.generated == self._limit:
            return self._end("length", piece.text + self._answer.finish().text, token)
        return self._delta(piece.text, token, timings=self._timings() if self._request.timings else None)

    def _end(
        self,
        finish: FinishReason,
        text: str,
        token: int | None = None,
        stop: str | None = None,
        *,
        hidden_tokens: tuple[int, ...] = (),
    ) -> Delta:
        self.finish = finish
        return self._delta(text, token, finish=finish, stop=stop, hidden_tokens=hidden_tokens, timings=self._timings())

    def _timings(self) -> ChoiceTimings:
        return ChoiceTimings(
            prompt_tokens=len(self._request.prompt),
            cached_tokens=CACHED if self._index == 0 else len(self._request.prompt) - 1,
            completion_tokens=self.generated,
            prefill_seconds=PREFILL,
            decode_seconds=DECODE,
        )

    def _delta(self, text: str, token: int | None, **further: Any) -> Delta:
        wanted = self._request.sampling.logprobs
        tokens = () if token is None else (token,)
        # later choices are more likely, so that the best one is not the first
        logprob = -1.0 / (1 + self._index)
        logprobs = tuple(self._engine.entry(each, logprob, wanted) for each in tokens) if wanted is not None else ()
        prompt: tuple[TokenLogprob, ...] = ()
        if self._request.prompt_logprobs and self.generated <= 1:
            prompt = tuple(
                self._engine.entry(each, None if place == 0 else -0.5, (wanted or 0) if place else 0)
                for place, each in enumerate(self._request.prompt)
            )
        return Delta(index=self._index, text=text, tokens=tokens, logprobs=logprobs, prompt_logprobs=prompt, **further)
