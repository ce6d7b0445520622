"""Generations on the step loop: sequences in, deltas out.

One step is: ask the scheduler, launch (compute and choose), land, tell. A failure ends the sequence that caused it; all
keys and values are written at fixed places, so a step can be computed again without whoever failed.

Running ahead, the step behind is launched before one lands, so that a device never waits for the host. It has the
sequences that go on unless the step in front ends them; what it finds for one that did end is thrown away, and that
one's place is given back when the step has landed. So a cancel takes effect within two steps, in place of one. Where
the host has to know a token before the next one can be chosen (a grammar, penalties), the step behind is computed
meanwhile, and its tokens are chosen when the one in front has landed. Where a prompt is to be computed, a place to be
given or room to be made, one step is landed before the next is launched.

Far back in a long prompt, while others stream, its tokens are not in the steps but beside them (`aside`), where the
pace says so and the runner can stop between layers.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch

from worker.detokenize import Answer, Piece
from worker.engine import memory
from worker.engine.adapters import Adapters
from worker.engine.aside import Aside
from worker.engine.flight import Attempt, Flight, Masking, Part, Result, compute, launch
from worker.engine.grammar import Grammars, Matcher
from worker.engine.kv_cache import Capacity
from worker.engine.linears import Linears
from worker.engine.pace import Pace
from worker.engine.runner import PackedRunner, Runner
from worker.engine.sampler import Likelihood, Sampled
from worker.engine.scheduler import Batch, Scheduler, Segment
from worker.engine.sequence import Repeats, Sequence
from worker.engine.steploop import Outbox, Report
from worker.engine.vision import Tower
from worker.errors import RequestError, SequenceFailed
from worker.generation import Delta, Finish, Prefill, Timings, TokenLogprob

log = logging.getLogger(__name__)

REORDERING = 0.5
"""Of a step's time, spent behind it on weights that make the next ones faster, until none are left."""


class Stream:
    """What one request's reader gets: deltas, then None, or an error. Filled without ever waiting for the reader."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.items: asyncio.Queue[Delta | RequestError | None] = asyncio.Queue()
        self.choices: list[Choice] = []
        self.places = 0
        """How many sequences of it count against the queue's bound."""

    @property
    def has_ended(self) -> bool:
        return not self.choices


@dataclass(eq=False)
class Choice:
    """One sequence with its reader, its text and its times (monotonic seconds)."""

    index: int
    sequence: Sequence
    stream: Stream
    answer: Answer
    repeats: Repeats | None = None
    matcher: Matcher | None = None
    """Where it stands in its grammar."""
    started: float = 0.0
    answered: float = 0.0
    unsaid: list[TokenLogprob | int] = field(default_factory=list)
    """Tokens whose text is held back; with their logprobs if asked for."""
    said: int = 0
    """Tokens that the reader has."""
    prompt: list[TokenLogprob] = field(default_factory=list)
    """Logprobs of the prompt's tokens as far as they are known, the first one (which has none) included; empty once
    they are said, or if nobody asked."""
    shows_end: bool = False
    """The token that ends it is part of it."""
    tells_progress: bool = False
    mixes: bool = False
    """Its prompt is computed in steps, whatever would be better."""
    told: int = -1
    """Tokens of the prompt that the reader was told are computed; -1: nothing yet."""
    wants_timings: bool = False
    """On every delta."""

    def timings(self, now: float) -> Timings:
        """Counts and times so far."""
        answered = self.answered or now
        return Timings(
            prompt_tokens=self.sequence.prompt_tokens,
            cached_tokens=self.sequence.cached,
            completion_tokens=self.sequence.answered,
            prefill_seconds=answered - self.started,
            decode_seconds=now - answered,
        )


class Generating:
    """The engine's `Work` for text. Methods run on the step loop's thread unless they say otherwise."""

    def __init__(
        self,
        runner: Runner,
        outbox: Outbox,
        piece: Callable[[int], bytes],
        *,
        capacity: Capacity,
        chunk: int,
        pace: Pace,
        linears: Linears | None = None,
        grammars: Grammars | None = None,
        adapters: Adapters | None = None,
        tower: Tower | None = None,
        ahead: bool = False,
    ):
        """`tower`: of a runner that takes images; `ahead`: run ahead; worth it where the host need not do the computing
        itself."""
        self._runner, self._outbox, self._piece, self._grammars = runner, outbox, piece, grammars
        self._capacity, self._chunk, self._pace, self._linears = capacity, chunk, pace, linears
        self._adapters, self._tower = adapters, tower
        self._scheduler = Scheduler(capacity, chunk, adapters.slots if adapters is not None else None)
        self._choices: dict[int, Choice] = {}
        self._prefill_tokens = self._decode_tokens = 0
        self._most_prompt = self._most_rows = self._most_end = 0
        """As in `Pulse.largest`."""
        self._live = 0
        self._lock = threading.Lock()
        self._runs_ahead = ahead
        self._flight: Flight | None = None
        """The step that was launched ahead."""
        self._leaving: list[tuple[Sequence, bool]] = []
        """Who has ended, but is in that step; and whether what is cached of them is spoiled."""
        self._pausing = runner if isinstance(runner, PackedRunner) and not ahead else None
        self._aside: Aside | None = None
        """A part of a prompt that goes on behind each step."""
        self._landed = 0.0
        """Monotonic seconds of the last landing."""
        self.steps_ahead = 0
        """Launched before the step in front of them had landed, since the start."""

    # Of requests

    def admit(self, stream: Stream, most: int) -> bool:
        """Count its choices in, unless `most` sequences are here already. From any thread."""
        with self._lock:
            if self._live >= most:
                return False
            stream.places = len(stream.choices)
            self._live += stream.places
            return True

    def release(self, stream: Stream, places: int) -> None:
        """Up to `places` of its choices count no more. From any thread."""
        with self._lock:
            places = min(places, stream.places)
            stream.places -= places
            self._live -= places

    def add(self, stream: Stream) -> None:
        for choice in stream.choices:
            self._choices[choice.sequence.id] = choice
            self._scheduler.add(choice.sequence)

    def cancel(self, stream: Stream) -> None:
        """Its reader is gone: its sequences are out of the next step."""
        for choice in list(stream.choices):
            self._forget(choice)

    def forget_adapters(self) -> None:
        """Those that may be named no longer are out of memory as soon as nobody uses them."""
        if self._adapters is not None:
            self._adapters.forget_gone()

    def abandon(self, error: RequestError) -> None:
        self._flight = None
        self._give_up_aside()
        self._release(frozenset())
        for choice in list(self._choices.values()):
            self._fail(choice.sequence, error)

    # Of steps

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def load(self) -> tuple[int, int]:
        return self._scheduler.running, self._scheduler.waiting

    def report(self) -> Report:
        places = self._scheduler.places
        return Report(
            parallel=self._capacity.rows,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            largest=(self._most_prompt, self._most_rows, self._most_end),
            seen=self._tower.largest if self._tower is not None else (0, 0),
            cache_used=max(0, sum(sequence.computed for _, sequence in places) - self._capacity.shared),
            cache_reusable=self._capacity.reusable,
            cache_total=self._capacity.tokens,
            slots=tuple(
                (row, each.id, max(0, each.prompt_tokens - each.computed), each.answered, each.limit - each.answered)
                for row, each in places
            ),
        )

    def step(self) -> None:
        """Land one step, and launch the one behind it before if that can be."""
        flight = self._flight or self._launch(self._next())
        self._flight = self._launch_ahead(flight) if self._runs_ahead else None
        self._land(flight)
        if self._flight is not None and not self._flight.is_chosen:
            self._choose(self._flight)
        if self._aside is not None:
            self._outbox.flush()  # no token waits for what is beside its step
            seconds = self._pace.slice(self._scheduler.decoding, time.monotonic() - flight.begun)
            self._go_on_aside(self._aside, seconds)

    def _next(self) -> Batch:
        if self._aside is None and self._pausing is not None and self._pausing.layers:
            self._put_aside(self._pausing)
        batch = self._scheduler.next(self._budget)
        self._forget_void()
        if self._scheduler.aside is None:  # it was put back, to make room
            self._give_up_aside()
        return batch

    def _budget(self) -> int:
        scheduler, chunk = self._scheduler, self._chunk
        decoding = scheduler.decoding
        prompts = scheduler.running - decoding
        if self._aside is not None:
            prompts, chunk = prompts - 1, chunk - self._aside.segment.length
        beside = self._pausing is not None and self._pausing.layers > 0
        return self._pace.budget(decoding, chunk, prompts, scheduler.looks_back, beside=beside)

    def _put_aside(self, runner: PackedRunner) -> None:
        """Of the oldest prompt as many tokens as had better be computed beside the steps; half a step's at most, so
        that others may be in the steps, and both together take no more memory than one step."""
        scheduler = self._scheduler
        sequence = scheduler.oldest_prompt
        if sequence is None or sequence.prompt_logprobs or self._choices[sequence.id].mixes:
            return
        decoding, most = scheduler.decoding, min(sequence.pending, self._chunk // 2)
        prompts = scheduler.running - decoding
        length = self._pace.aside(decoding, prompts, sequence.computed, most, runner.layers, self._budget())
        if length:
            segment = scheduler.set_aside(sequence, length)
            self._begin((segment,), time.monotonic())
            self._aside = Aside(segment, partial(runner.run, (segment,), None))

    def _go_on_aside(self, aside: Aside, seconds: float) -> None:
        segment = aside.segment
        try:
            if not aside.go_on(seconds):
                return
            parts = self._parts((segment,))
            attempt = Attempt(parts, aside.logits)
            attempt.choose(Masking(self._grammars, parts[0].choosers))
            results = attempt.land()
        except Exception as error:
            if memory.is_sticky(error):
                raise
            self._compute_in_steps(aside, error)
            return
        self._aside = self._scheduler.aside = None
        self._pace.learn((segment,), aside.seconds)
        for result in results:
            self._advance(result, time.monotonic())

    def _compute_in_steps(self, aside: Aside, error: Exception) -> None:
        """Not beside them, as that has failed with `error`, or a step for want of what it occupies."""
        log.warning("a prompt is computed in steps, as beside them it failed: %s", memory.one_line(error))
        self._choices[aside.segment.sequence.id].mixes = True
        self._give_up_aside()

    def _give_up_aside(self) -> None:
        aside, self._aside, self._scheduler.aside = self._aside, None, None
        if aside is not None:
            aside.give_up()

    def _launch(self, batch: Batch) -> Flight:
        begin = time.monotonic()
        self._begin(batch, begin)
        return Flight(batch, self._compute(batch), begin)

    def _begin(self, batch: Batch, now: float) -> None:
        """It is whose turn it is."""
        for segment in batch:
            choice = self._choices[segment.sequence.id]
            if not choice.started:
                choice.started = now
                if choice.tells_progress:
                    self._tell_progress(choice, now)

    def _launch_ahead(self, flight: Flight) -> Flight | None:
        """The step behind `flight`, if it can be told already."""
        batch = self._scheduler.ahead(flight.batch, self._going(flight))
        if not batch:
            return None
        begin = time.monotonic()
        parts = self._parts(batch)
        waits = any(each.matcher is not None or each.repeats is not None for part in parts for each in part.choosers)
        try:
            fed = flight.fed(batch)
            attempt = compute(self._runner, parts, fed) if waits else launch(self._runner, self._grammars, parts, fed)
        except Exception as error:
            if memory.is_sticky(error):
                raise
            log.warning("a step could not be run ahead, and is computed in its turn: %s", memory.one_line(error))
            return None
        self.steps_ahead += 1
        return Flight(batch, (attempt,), begin)

    def _choose(self, flight: Flight) -> None:
        """The step in front of `flight` has landed, so the host knows all that its tokens depend on."""
        here = [self._choices[id] for id in (each.sequence.id for each in flight.batch) if id in self._choices]
        try:
            flight.choose(Masking(self._grammars, here))
        except Exception as error:
            if memory.is_sticky(error):
                raise
            log.warning("a step that ran ahead is computed again: %s", memory.one_line(error))
            self._flight = None
            self._release(())

    def _going(self, flight: Flight) -> set[int]:
        """Those who go on behind `flight` unless it ends them, by id; nobody, if others begin behind one of them."""
        going: set[int] = set()
        if len(flight.attempts) != 1:
            return going
        for segment in flight.batch:
            sequence = segment.sequence
            choice = self._choices.get(sequence.id)
            if choice is None or sequence.answered + 1 >= sequence.limit:
                continue
            if self._scheduler.followers(sequence):
                return set()
            going.add(sequence.id)
        return going

    def _land(self, flight: Flight) -> None:
        """Wait for a step, and tell what it found."""
        results = flight.land()
        now = time.monotonic()
        seconds, self._landed = now - max(flight.begun, self._landed), now
        decodes = any(segment.is_decode for segment in flight.batch)
        if len(results) == len(flight.batch) > 0 and not any(segment.sees for segment in flight.batch):
            self._pace.learn(flight.batch, seconds)  # what a tower takes says nothing about tokens
        self._most_rows = max(self._most_rows, len(results))
        spoiled = set()
        for result in results:
            id = result.segment.sequence.id
            if id in self._choices:  # it may have ended in the step in front; a sibling's failure ends all of a request
                self._advance(result, now)
            elif result.chooses and result.sampled is None:
                spoiled.add(id)
        self._release(spoiled)
        if self._linears is not None and decodes:
            self._linears.reorder(REORDERING * seconds)

    def _compute(self, batch: Batch) -> list[Attempt]:
        """Of those segments that could be computed; the sequences of the others have ended or wait again."""
        try:
            return [self._attempt(batch)] if batch else []
        except Exception as error:
            if memory.is_sticky(error):
                raise
            if not memory.is_exhausted(error):
                return self._one_by_one(batch)
            if self._aside is None:
                return self._with_fewer(batch, error)
            self._compute_in_steps(self._aside, error)
        return self._compute(batch)

    def _with_fewer(self, batch: Batch, error: Exception) -> list[Attempt]:
        """Memory ran out: once more without the youngest, who waits until somebody has ended."""
        log.warning("out of memory in a step of %d sequences: %s", len(batch), error)
        youngest = max(batch, key=lambda segment: segment.sequence.id).sequence
        alone = len(batch) == 1
        if youngest.spared or alone:
            self._fail(youngest, SequenceFailed("the device has no memory for this request's step; shorten it"))
        else:
            self._scheduler.preempt(youngest)
            self._forget_void()
        rest = self._present(segment for segment in batch if segment.sequence is not youngest)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            return [self._attempt(rest)] if rest else []
        except Exception as again:
            if not memory.is_exhausted(again):
                raise
            for segment in rest:
                if self._present([segment]):
                    self._fail(segment.sequence, SequenceFailed("the device has no memory for a step of this request"))
            return []

    def _one_by_one(self, batch: Batch) -> list[Attempt]:
        """Something else failed: find out for whom, by computing each alone."""
        attempts: list[Attempt] = []
        for segment in batch:
            if not self._present([segment]):
                continue
            try:
                attempts.append(self._attempt((segment,)))
                attempts[-1].wait()
            except Exception as error:
                if memory.is_sticky(error):
                    raise
                log.exception("a sequence failed in its step")
                told = SequenceFailed(f"the model failed on this request: {type(error).__name__}")
                self._fail(segment.sequence, error if isinstance(error, RequestError) else told)
        return attempts

    def _present(self, segments: Iterable[Segment]) -> Batch:
        """Those whose sequences have not ended meanwhile."""
        return tuple(segment for segment in segments if segment.sequence.id in self._choices)

    def _attempt(self, batch: Batch) -> Attempt:
        """Compute and choose. Changes no sequence, so it may be repeated with fewer."""
        return launch(self._runner, self._grammars, self._parts(batch))

    def _parts(self, batch: Batch) -> list[Part]:
        return [Part(segment, self._choosers(segment)) for segment in batch]

    def _choosers(self, segment: Segment) -> list[Choice]:
        """Who takes a token by the last logits of `segment`: its own choice, then those for whom it completes the
        prompt as well."""
        sequence = segment.sequence
        if not (segment.completes and sequence.limit > 0):
            return []
        followers = self._scheduler.followers(sequence) if not sequence.answered else []
        return [self._choices[each.id] for each in (sequence, *followers)]

    def _advance(self, result: Result, now: float) -> None:
        """Record what the step found, and tell the reader."""
        segment, sequence = result.segment, result.segment.sequence
        choice = self._choices[sequence.id]
        if not segment.is_decode:
            self._prefill_tokens += segment.length
            self._most_prompt = max(self._most_prompt, segment.length)
        sequence.computed = segment.end
        self._most_end = max(self._most_end, segment.end)
        if choice.prompt:  # some may be known: of whom was put back, and whose prompt is cut otherwise now
            choice.prompt.extend(map(self._logprob, result.prompt[len(choice.prompt) - segment.start - 1 :]))
        if choice.tells_progress:
            self._tell_progress(choice, now)
        if not segment.completes:
            return
        for follower, _ in result.forks:
            self._runner.fork(*self._scheduler.fork(follower))
            forked = self._choices[follower.id]
            forked.started, forked.prompt = choice.started, list(choice.prompt)
        if not result.chooses:
            self._finish(choice, Piece(), "length", now)
            return
        for each, sampled in ((sequence, result.sampled), *result.forks):
            if each.id in self._choices:  # a choice that fails has ended the others
                self._answer(self._choices[each.id], sampled, now)

    def _answer(self, choice: Choice, sampled: Sampled | None, now: float) -> None:
        """The next token of a choice."""
        if sampled is None:
            self._end_without_token(choice, now)
            return
        self._decode_tokens += 1
        choice.answered = choice.answered or now
        finish = choice.sequence.append(sampled.token)
        try:
            self._say(choice, sampled, self._match(choice, sampled.token, finish), finish, now)
        except SequenceFailed as error:
            self._fail(choice.sequence, error)

    def _match(self, choice: Choice, token: int, finish: Finish | None) -> bool:
        """Whether the text's grammar ends with `token`. Raises SequenceFailed if it cannot have it."""
        if choice.matcher is None or finish == "stop":
            return False
        choice.matcher.take(token)
        return choice.matcher.is_over

    def _end_without_token(self, choice: Choice, now: float) -> None:
        """There was none to choose: a failure, or the end of a grammar where no end of sequence was allowed."""
        matcher = choice.matcher
        if matcher is None:
            error = SequenceFailed("the model gave no finite logits for this request")
            self._fail(choice.sequence, error, is_spoiled=True)
        elif matcher.can_only_end(choice.sequence.ends):
            self._finish(choice, choice.answer.finish(), "stop", now)
        else:
            why = matcher.failure or "no finite logits, or a grammar that allows no token of this model"
            self._fail(choice.sequence, SequenceFailed(f"this request cannot go on: {why}"), is_spoiled=True)

    def _tell_progress(self, choice: Choice, now: float) -> None:
        """How far its prompt is, beginning with what was found of it. Once only as far as that: a preempted sequence
        begins again without a word."""
        done = min(choice.sequence.computed, choice.sequence.prompt_tokens)
        if done > choice.told:
            choice.told = done
            prefill = Prefill(
                done=done,
                total=choice.sequence.prompt_tokens,
                cached=choice.sequence.cached,
                seconds=now - choice.started,
            )
            self._put(choice.stream, Delta(index=choice.index, progress=prefill))

    def _say(self, choice: Choice, sampled: Sampled, is_over: bool, finish: Finish | None, now: float) -> None:
        """Tell the reader of a token; `is_over`: its text is complete with it."""
        piece = Piece()
        if finish != "stop" or choice.shows_end:
            likelihood = sampled.likelihood
            choice.unsaid.append(sampled.token if likelihood is None else self._logprob(likelihood))
            piece = choice.answer.push(sampled.token)
        if piece.stop is not None:
            self._finish(choice, piece, "stop", now)
        elif finish is not None or is_over:
            rest = choice.answer.finish()
            piece = Piece(piece.text + rest.text, piece.tokens + rest.tokens, rest.stop)
            self._finish(choice, piece, "stop" if rest.stop is not None or is_over else finish or "stop", now)
        elif piece.text or piece.tokens or choice.prompt:
            self._send(choice, piece, None, choice.timings(now) if choice.wants_timings else None)

    def _finish(self, choice: Choice, piece: Piece, finish: Finish, now: float) -> None:
        self._send(choice, piece, finish, choice.timings(now))
        self._forget(choice)
        if choice.stream.has_ended:
            self._put(choice.stream, None)

    def _send(self, choice: Choice, piece: Piece, finish: Finish | None, timings: Timings | None) -> None:
        said, choice.unsaid = choice.unsaid[: piece.tokens], choice.unsaid[piece.tokens :]
        choice.said += len(said)
        prompt, choice.prompt = tuple(choice.prompt), []
        sequence = choice.sequence
        delta = Delta(
            index=choice.index,
            text=piece.text,
            tokens=tuple(each.token if isinstance(each, TokenLogprob) else each for each in said),
            logprobs=tuple(each for each in said if isinstance(each, TokenLogprob)),
            finish=finish,
            stop=piece.stop,
            unshown=() if finish is None else tuple(sequence.tokens[sequence.prompt_tokens + choice.said :]),
            prompt_logprobs=prompt,
            timings=timings,
        )
        self._put(choice.stream, delta)

    def _fail(self, sequence: Sequence, error: RequestError, *, is_spoiled: bool = False) -> None:
        """One sequence cannot go on: its request ends with `error`, all choices of it. `is_spoiled`: what is cached of
        them may be no numbers, and must serve nobody."""
        stream = self._choices[sequence.id].stream
        for choice in list(stream.choices):
            self._forget(choice, is_spoiled=is_spoiled)
        self._put(stream, error)

    def _forget_void(self) -> None:
        for row in self._scheduler.take_void():
            self._runner.forget(row)

    def _forget(self, choice: Choice, *, is_spoiled: bool = False) -> None:
        """It gives its place back, at once or, if the step ahead has it, with that one's landing."""
        sequence = choice.sequence
        if self._flight is not None and self._flight.has(sequence):
            self._leaving.append((sequence, is_spoiled))
        else:
            self._scheduler.remove(sequence, is_spoiled=is_spoiled)
            self._forget_void()
        if self._scheduler.aside is None:
            self._give_up_aside()
        choice.stream.choices.remove(choice)
        self._choices.pop(sequence.id, None)
        self.release(choice.stream, 1)

    def _release(self, spoiled: Collection[int]) -> None:
        """A step has landed: who has ended, and is not in the next one, gives its place back. `spoiled`: for whom the
        step found no numbers, by id."""
        leaving, self._leaving = self._leaving, []
        for sequence, is_spoiled in leaving:
            if self._flight is not None and self._flight.has(sequence):
                self._leaving.append((sequence, is_spoiled))
            else:
                self._scheduler.remove(sequence, is_spoiled=is_spoiled or sequence.id in spoiled)
        if leaving:
            self._forget_void()

    def _put(self, stream: Stream, item: Delta | RequestError | None) -> None:
        self._outbox.put(stream.loop, partial(stream.items.put_nowait, item))

    def _logprob(self, likelihood: Likelihood) -> TokenLogprob:
        return TokenLogprob(
            likelihood.token,
            self._piece(likelihood.token),
            _finite(likelihood.logprob),
            tuple(TokenLogprob(token, self._piece(token), _finite(value)) for token, value in likelihood.top),
        )


def _finite(logprob: float) -> float | None:
    """JSON has no minus infinity."""
    return logprob if math.isfinite(logprob) else None
