"""The generation loop: the step loop's work for a model that generates text.

One step is: ask the scheduler for a batch, launch it (compute and choose), land it, send deltas. A failure ends the
sequence that caused it (`launcher`).

Running ahead, the step behind is launched before one lands, so that a device never waits for the host. It has the
sequences that go on unless the step in front ends them; its result for a sequence that did end is dropped, and that
sequence's row is freed when the step has landed. So a cancel takes effect within two steps, in place of one. Where the
host has to know a token before the next one can be chosen (a grammar, penalties), the step behind is computed
meanwhile, and its tokens are chosen when the one in front has landed. Where a prompt is to be computed, a row to be
given or room to be made, one step is landed before the next is launched.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from worker.detokenizer import TextPiece
from worker.engines.transformers.active_choices import ActiveChoices
from worker.engines.transformers.attention.cpu_linear import Linears
from worker.engines.transformers.load.lora import Adapters
from worker.engines.transformers.run.in_flight_step import Flight, Result
from worker.engines.transformers.run.runner import Runner
from worker.engines.transformers.run.vision import Tower
from worker.engines.transformers.sample.grammar import Grammars
from worker.engines.transformers.sample.sampler import Sampled
from worker.engines.transformers.schedule.kv_cache import Capacity
from worker.engines.transformers.schedule.prefill_budget import Pace
from worker.engines.transformers.schedule.scheduler import Batch, Scheduler, Segment
from worker.engines.transformers.schedule.sequence import Sequence
from worker.engines.transformers.step_launcher import Launcher
from worker.engines.transformers.step_loop import Outbox, Report
from worker.engines.transformers.stream import Choice, DeltaWriter, SequenceLimit, Stream
from worker.errors import RequestError, SequenceFailed
from worker.interface import FinishReason

REORDERING = 0.5
"""The share of a step's time that is spent behind it on weights that make the next ones faster, until none are left."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The parts of a loaded model that a generation loop computes with."""

    runner: Runner
    capacity: Capacity
    """The room of the runner's cache."""
    pace: Pace
    linears: Linears | None = None
    adapters: Adapters | None = None
    tower: Tower | None = None
    """Of a runner that takes images."""
    ahead: bool = False
    """Run ahead; worth it where the host need not do the computing itself."""


@dataclass
class Counts:
    """Token counts since the start, and the largest steps, as in `Pulse`."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    most_prompt: int = 0
    most_rows: int = 0
    most_end: int = 0

    def computed(self, segment: Segment) -> None:
        if not segment.is_decode:
            self.prefill_tokens += segment.length
            self.most_prompt = max(self.most_prompt, segment.length)
        self.most_end = max(self.most_end, segment.end)


class Generating:
    """The engine's `Work` for text. Methods run on the step loop's thread unless their docstring says otherwise."""

    def __init__(
        self,
        backend: Backend,
        outbox: Outbox,
        piece: Callable[[int], bytes],
        *,
        chunk: int,
        grammars: Grammars | None = None,
    ):
        """`piece`: the bytes of a token; `chunk`: prompt tokens of a step at most."""
        self._backend, self._chunk = backend, chunk
        slots = backend.adapters.slots if backend.adapters is not None else None
        self._scheduler = Scheduler(backend.capacity, chunk, slots)
        self._active = ActiveChoices(self._scheduler, backend.runner)
        self._launcher = Launcher(backend.runner, grammars, self._active, self._fail)
        self._writer = DeltaWriter(outbox, piece)
        self._limit = SequenceLimit()
        self._counts = Counts()
        self._landed = 0.0
        """Monotonic seconds of the last landing."""

    # Requests

    def admit(self, stream: Stream, most: int) -> bool:
        """Count the choices of `stream`, unless `most` sequences are here already. From any thread."""
        return self._limit.admit(stream, most)

    def release(self, stream: Stream, places: int) -> None:
        """Stop counting up to `places` of the choices of `stream`. From any thread."""
        self._limit.release(stream, places)

    def add(self, stream: Stream) -> None:
        self._active.add(stream)

    def cancel(self, stream: Stream) -> None:
        """The client has disconnected: the next step is without its sequences."""
        for choice in list(stream.choices):
            self._remove(choice)

    def forget_adapters(self) -> None:
        """Free the memory of adapters that were removed, as soon as no sequence uses them."""
        if self._backend.adapters is not None:
            self._backend.adapters.forget_gone()

    def abandon(self, error: RequestError) -> None:
        self._active.in_flight = None
        self._active.landed(frozenset())
        for choice in self._active:
            if choice.sequence in self._active:  # the failure of another choice may have ended it
                self._fail(choice.sequence, error)

    # Steps

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def load(self) -> tuple[int, int]:
        return self._scheduler.running, self._scheduler.waiting

    @property
    def steps_ahead(self) -> int:
        """The number of steps that were launched before the step in front of them had landed."""
        return self._launcher.steps_ahead

    def report(self) -> Report:
        places, capacity, counts = self._scheduler.places, self._backend.capacity, self._counts
        tower = self._backend.tower
        return Report(
            parallel=capacity.rows,
            prefill_tokens=counts.prefill_tokens,
            decode_tokens=counts.decode_tokens,
            largest=(counts.most_prompt, counts.most_rows, counts.most_end),
            seen=tower.largest if tower is not None else (0, 0),
            cache_used=max(0, sum(sequence.computed for _, sequence in places) - capacity.shared),
            cache_reusable=capacity.reusable,
            cache_total=capacity.tokens,
            slots=tuple(
                (row, each.id, max(0, each.prompt_tokens - each.computed), each.answered, each.limit - each.answered)
                for row, each in places
            ),
        )

    def step(self) -> None:
        """Land one step. Launch the one behind it before, if that is possible."""
        active = self._active
        flight = active.in_flight or self._launch(active.next(self._backend.pace, self._chunk))
        active.in_flight = self._launcher.launch_ahead(flight) if self._backend.ahead else None
        self._land(flight)
        if (
            active.in_flight is not None
            and not active.in_flight.is_chosen
            and not self._launcher.choose(active.in_flight)
        ):
            active.in_flight = None
            active.landed(())

    def _launch(self, batch: Batch) -> Flight:
        begin = time.monotonic()
        for segment in batch:
            choice = self._active.of(segment.sequence)
            if not choice.started:
                choice.started = begin
                self._writer.progress(choice, begin)
        return self._launcher.launch(batch, begin)

    def _land(self, flight: Flight) -> None:
        """Wait for a step, record its results and send deltas."""
        results = flight.land()
        now = time.monotonic()
        seconds, self._landed = now - max(flight.begun, self._landed), now
        # The time of a vision tower does not depend on the number of tokens, and that of a step which failed for some
        # sequences has its repetitions in it: the pace would learn wrong costs from both.
        if len(results) == len(flight.batch) and not any(segment.sees for segment in flight.batch):
            self._backend.pace.learn(flight.batch, seconds)
        self._counts.most_rows = max(self._counts.most_rows, len(results))
        spoiled = set()
        for result in results:
            sequence = result.segment.sequence
            # It may have ended in the step in front, or with another choice of its request.
            if sequence in self._active:
                self._advance(result, now)
            elif result.chooses and result.sampled is None:
                spoiled.add(sequence.id)
        self._active.landed(spoiled)
        if self._backend.linears is not None and any(segment.is_decode for segment in flight.batch):
            self._backend.linears.reorder(REORDERING * seconds)

    def _advance(self, result: Result, now: float) -> None:
        """Record the result of a step for one sequence, and send it."""
        segment, sequence = result.segment, result.segment.sequence
        choice = self._active.of(sequence)
        self._counts.computed(segment)
        sequence.computed = segment.end
        if choice.prompt:
            # A preempted prompt is computed again in other parts, so some of its logprobs may be known already.
            choice.prompt.extend(map(self._writer.logprob, result.prompt[len(choice.prompt) - segment.start - 1 :]))
        self._writer.progress(choice, now)
        if not segment.completes:
            return
        for follower, _ in result.forks:
            forked = self._active.fork(follower)
            forked.started, forked.prompt = choice.started, list(choice.prompt)
        if not result.chooses:
            self._finish(choice, TextPiece(), "length", now)
            return
        for each, sampled in ((sequence, result.sampled), *result.forks):
            if each in self._active:  # a choice that fails has ended the others
                self._answer(self._active.of(each), sampled, now)

    def _answer(self, choice: Choice, sampled: Sampled | None, now: float) -> None:
        """Add the next token to a choice."""
        if sampled is None:
            self._end_without_token(choice, now)
            return
        self._counts.decode_tokens += 1
        choice.answered = choice.answered or now
        finish = choice.sequence.append(sampled.token)
        try:
            self._send(choice, sampled, self._match(choice, sampled.token, finish), finish, now)
        except SequenceFailed as error:
            self._fail(choice.sequence, error)

    def _match(self, choice: Choice, token: int, finish: FinishReason | None) -> bool:
        """Whether the grammar's text is complete with `token`. Raises SequenceFailed if the grammar forbids it."""
        if choice.matcher is None or finish == "stop":
            return False
        choice.matcher.take(token)
        return choice.matcher.is_over

    def _end_without_token(self, choice: Choice, now: float) -> None:
        """No token could be chosen: a failure, or the end of a grammar where no end of sequence was allowed."""
        matcher = choice.matcher
        if matcher is None:
            error = SequenceFailed("the model gave no finite logits for this request")
            self._fail(choice.sequence, error, is_spoiled=True)
        elif matcher.can_only_end(choice.sequence.ends):
            self._finish(choice, choice.answer.finish(), "stop", now)
        else:
            why = matcher.failure or "no finite logits, or a grammar that allows no token of this model"
            self._fail(choice.sequence, SequenceFailed(f"this request cannot go on: {why}"), is_spoiled=True)

    def _send(self, choice: Choice, sampled: Sampled, is_over: bool, finish: FinishReason | None, now: float) -> None:
        """Send a token; `is_over`: the grammar's text is complete with it."""
        piece = TextPiece()
        if finish != "stop" or choice.include_stop:
            piece = self._writer.token(choice, sampled)
        if piece.stop is not None:
            self._finish(choice, piece, "stop", now)
        elif finish is not None or is_over:
            rest = choice.answer.finish()
            piece = TextPiece(piece.text + rest.text, piece.tokens + rest.tokens, rest.stop)
            self._finish(choice, piece, "stop" if rest.stop is not None or is_over else finish or "stop", now)
        elif piece.text or piece.tokens or choice.prompt:
            self._writer.send(choice, piece, None, choice.timings(now) if choice.wants_timings else None)

    def _finish(self, choice: Choice, piece: TextPiece, finish: FinishReason, now: float) -> None:
        self._writer.send(choice, piece, finish, choice.timings(now))
        self._remove(choice)
        if choice.stream.has_ended:
            self._writer.put(choice.stream, None)

    def _fail(self, sequence: Sequence, error: RequestError, *, is_spoiled: bool = False) -> None:
        """End the request of `sequence`, with all of its choices.

        `is_spoiled`: their cache may contain NaN, so no other request may reuse it.
        """
        stream = self._active.of(sequence).stream
        for choice in list(stream.choices):
            self._remove(choice, is_spoiled=is_spoiled)
        self._writer.put(stream, error)

    def _remove(self, choice: Choice, *, is_spoiled: bool = False) -> None:
        self._active.remove(choice, is_spoiled=is_spoiled)
        self._limit.release(choice.stream, 1)
