"""Step work of a model that generates text.

A step asks the scheduler for a batch, launches its forward and sampling, waits for the results and sends deltas. A
failure ends only the sequence that caused it (`step_launcher`).

Launching ahead: step n + 1 is launched before the results of step n are read, so that the device never waits for the
host. This is safe for three reasons:

* Step n + 1 contains only sequences that continue unless step n ends them. If step n ended one after all, its result in
  step n + 1 is dropped.
* The row of an ended sequence is freed only when step n + 1 has finished, because that step still writes to it.
* Input tokens stay on the device (`LaunchedForward.device_tokens`), so nothing depends on values that the host lacks.

A cancelled request therefore leaves the batch after at most two steps instead of one. With a grammar or penalties the
host must know token n before it can choose token n + 1: only the forward is launched ahead and the token is chosen
later. A prompt chunk, a new row or a preemption needs the scheduler's state after step n, so nothing is launched ahead.
A draft (speculative decoding) needs the tokens of step n, too.

Late masks: a sequence whose grammar mask is not there when the tokens of a step are chosen gets no token in that step,
and sits out of the following ones until it is. So a slow grammar delays only its own answer. After the last token that
the limit allows, the mask shows whether the text is complete. Only if no other sequence can go on, the step waits, for
ALONE_SECONDS at most.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, replace

from worker.detokenizer import TextPiece
from worker.engines.transformers.attention.cpu_linear import CpuLinears
from worker.engines.transformers.load.lora import LoraAdapters
from worker.engines.transformers.loop.active_choices import ActiveChoices
from worker.engines.transformers.loop.drafting import Drafter
from worker.engines.transformers.loop.requests import AdmissionLimit, DeltaWriter, RequestChoice, RequestStream
from worker.engines.transformers.loop.step_launcher import StepLauncher
from worker.engines.transformers.loop.step_loop import Outbox
from worker.engines.transformers.run.in_flight_step import InFlightStep, SegmentResult
from worker.engines.transformers.run.largest_step import LargestSizes
from worker.engines.transformers.run.runner import Runner
from worker.engines.transformers.sample.grammar import ALONE_SECONDS, Grammars
from worker.engines.transformers.sample.sampler import Sampled, copies_of_scores
from worker.engines.transformers.schedule.kv_cache import RowAllocator
from worker.engines.transformers.schedule.prefill_budget import PrefillBudget
from worker.engines.transformers.schedule.scheduler import Batch, Scheduler
from worker.engines.transformers.schedule.sequence import Sequence
from worker.errors import RequestError, SequenceFailed
from worker.interface import FinishReason, SamplingParams
from worker.protocol.events import Pulse

# Time spent after a step on weight layouts that make later steps faster, as a share of the step, until all are done.
# A guess: running requests slow down by at most a half meanwhile.
REORDER_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The parts of a loaded model that a generation loop computes with."""

    runner: Runner
    capacity: RowAllocator  # the size of the runner's cache
    prefill_budget: PrefillBudget
    linears: CpuLinears | None = None
    adapters: LoraAdapters | None = None
    drafter: Drafter | None = None  # None: no speculative decoding
    ahead: bool = False  # launch ahead; useful only where another device than the host computes


class LargestStep:
    """The largest steps so far, by what their main memory depends on."""

    def __init__(self, linears: CpuLinears | None = None) -> None:
        self._sizes, self._linears = LargestSizes(), linears

    def is_exceeded(self, batch: Batch, draws: Iterable[SamplingParams] = ()) -> bool:
        """Record a step. True if it is larger than all before: by its tokens, rows, logits, adapters and their tokens,
        what its `draws` take, or twice the context: every step makes it a little longer, which takes little memory.
        Context in several runs of blocks counts once more, because its keys and values are copied to be read.
        """
        tokens, rows = sum(segment.length for segment in batch), len(batch)
        logits = sum(segment.logits for segment in batch)
        context = sum(segment.end for segment in batch).bit_length()
        runs = sum(segment.end for segment in batch if segment.table is not None and len(segment.table.runs) > 1)
        adapted = sum(segment.length for segment in batch if segment.sequence.adapter is not None)
        adapters = len({segment.sequence.adapter for segment in batch})  # with the base model as one of them
        copies = sum(map(copies_of_scores, draws))
        sizes = tokens, rows, logits, context, runs.bit_length(), copies, adapted, adapters
        if self._linears is None:
            return self._sizes.are_exceeded(*sizes)
        if not self._linears.are_settled:  # weights are reordered and kernels are compiled after each step
            self._sizes.are_exceeded(*sizes)
            return True
        # One forward has all tokens, or the decoding rows and each prompt have one of their own.
        decodes, shapes = sum(segment.is_decode for segment in batch), set()
        counts = {tokens, logits, decodes, *(segment.length for segment in batch)}
        if self._linears.compiles_attention:
            shapes = {(decodes, max(segment.end for segment in batch))}
            shapes |= {(segment.length, segment.end) for segment in batch}
        return self._sizes.are_exceeded(*sizes, rows=counts - {0}, shapes=shapes)


class GenerationLoop:
    """`StepWork` for text. Methods run on the step loop's thread unless their docstring names another."""

    def __init__(
        self,
        backend: Backend,
        outbox: Outbox,
        piece: Callable[[int], bytes],
        *,
        chunk: int,
        grammars: Grammars | None = None,
        has_steady_steps: bool = True,
        on_larger_step: Callable[[], None] | None = None,
    ):
        """`piece`: the bytes of a token; `chunk`: the most prompt tokens of a step; `on_larger_step`: called before a
        step that is larger than all before, without `has_steady_steps` before each."""
        self._backend, self._chunk = backend, chunk
        slots = backend.adapters.slots if backend.adapters is not None else None
        self._scheduler = Scheduler(backend.capacity, chunk, slots)
        self._active = ActiveChoices(self._scheduler, backend.runner)
        self._grammars = grammars
        self._launcher = StepLauncher(backend.runner, grammars, self._active, self._fail)
        self._writer = DeltaWriter(outbox, piece)
        self.limit = AdmissionLimit()
        self.prefill_tokens = self.decode_tokens = 0
        self._batched = self._longest = 0  # as in `Pulse`
        has_kernels = backend.linears is not None and backend.linears.has_layers
        self._largest = LargestStep(backend.linears if has_kernels else None)
        self._has_steady_steps, self._on_larger_step = has_steady_steps, on_larger_step
        if on_larger_step is not None and backend.drafter is not None:
            backend.drafter.announce_to(on_larger_step)
        self._finished_at = 0.0  # monotonic seconds when the last step finished

    # Requests

    def add(self, stream: RequestStream) -> None:
        self._active.add(stream)

    def cancel(self, stream: RequestStream) -> None:
        """Remove the sequences of a request whose client has disconnected from the next step."""
        for choice in list(stream.choices):
            self._remove(choice)

    def abandon(self, error: RequestError) -> None:
        self._active.in_flight = None
        # The step loop has ended, so no step writes to these rows any more.
        self._active.step_finished(frozenset())
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
        """The number of steps that were launched before the step in front of them had finished."""
        return self._launcher.steps_ahead

    def report(self, pulse: Pulse) -> Pulse:
        places, capacity, drafter = self._scheduler.places, self._backend.capacity, self._backend.drafter
        return replace(
            pulse,
            parallel=capacity.rows,
            cache_used=max(0, sum(sequence.computed for _, sequence in places) - capacity.shared),
            cache_reusable=capacity.reusable,
            cache_total=capacity.tokens,
            drafted=drafter.drafted if drafter is not None else 0,
            accepted=drafter.accepted if drafter is not None else 0,
            drafts=drafter.drafts if drafter is not None else 0,
            accepted_at=list(drafter.accepted_at) if drafter is not None else [],
            batched=self._batched,
            longest=self._longest,
            slots=[
                [
                    row,
                    sequence.id,
                    max(0, sequence.prompt_tokens - sequence.computed),
                    sequence.output_tokens,
                    sequence.limit - sequence.output_tokens,
                    sequence.drafted,
                    sequence.accepted,
                ]
                for row, sequence in places
            ],
        )

    def step(self) -> None:
        """Finish one step. If possible, launch the next one first."""
        active = self._active
        self._hold_late()
        step = active.in_flight  # launched ahead by the last call
        if step is None:
            batch = self._next()
            if not batch:
                self._wait_for_masks()
                return
            step = self._launch(batch)
        active.in_flight = self._launcher.launch_ahead(step) if self._launches_ahead(step) else None
        self._finish_step(step)
        if (
            # Tokens of the step ahead that depend on the tokens just read (grammar, penalties) are chosen now.
            active.in_flight is not None
            and not active.in_flight.is_sampled
            and not self._launcher.sample(active.in_flight)
        ):
            # The choice failed. Nothing was recorded, so the next call schedules and computes these tokens again.
            active.in_flight = None
            active.step_finished(())

    def _hold_late(self) -> None:
        """Let sequences sit out of the next step whose grammar mask is late. End those whose mask takes too long, or
        follows their last token."""
        if self._grammars is None:
            return
        self._grammars.has_neighbours = any(
            choice.matcher is None or not choice.matcher.has_slow_grammar for choice in self._active
        )
        for choice in self._active:
            if choice.matcher is None or choice.sequence not in self._active:
                continue
            is_over = False
            try:
                choice.sequence.is_held = self._grammars.is_late(choice.matcher)
                if choice.sequence.is_held:
                    continue
                is_over = choice.last is not None and choice.matcher.is_over
            except RequestError as error:
                if choice.last is None:
                    self._fail(choice.sequence, error)
            if choice.last is not None:
                self._send(choice, choice.last, is_over, "length", time.monotonic())

    def _wait_for_masks(self) -> None:
        """Wait a short time until a sequence that sits out can go on."""
        held = [choice.matcher for choice in self._active if choice.matcher is not None and choice.sequence.is_held]
        wait([matcher.mask.future for matcher in held if matcher.mask is not None], ALONE_SECONDS, FIRST_COMPLETED)

    def _launches_ahead(self, step: InFlightStep) -> bool:
        drafter = self._backend.drafter
        return self._backend.ahead and (drafter is None or not drafter.drafts_next(step.batch))

    def _next(self) -> Batch:
        """The batch of the next step. It has drafts if the backend drafts."""
        drafter = self._backend.drafter
        length = drafter.next_length if drafter is not None else None
        return self._active.next(self._backend.prefill_budget, self._chunk, length)

    def _launch(self, batch: Batch) -> InFlightStep:
        begin = time.monotonic()
        if self._backend.drafter is not None:
            batch = self._backend.drafter.draft(batch, self._active.of)
        if self._on_larger_step is not None and self._is_larger(batch):
            self._on_larger_step()
        for segment in batch:
            choice = self._active.of(segment.sequence)
            if not choice.started_at:
                choice.started_at = begin
                self._writer.progress(choice, begin)
        return self._launcher.launch(batch, begin)

    def _is_larger(self, batch: Batch) -> bool:
        """Record a step. True if it may take more main memory than all before."""
        draws = [
            choice.sequence.sampling
            for part in self._active.parts(batch)
            for choice in part.choosers
            for _ in range(1 + len(part.segment.drafted))
        ]
        drafter, adapters = self._backend.drafter, self._backend.adapters
        is_settled = drafter is None or drafter.is_settled  # as `LargestStep` for the layers of the target
        loads = adapters is not None and adapters.has_loads(segment.sequence.adapter for segment in batch)
        has_images = any(segment.has_image_tokens for segment in batch)  # of any size
        is_steady = self._has_steady_steps and is_settled and not has_images and not loads
        return self._largest.is_exceeded(batch, draws) or not is_steady

    def _finish_step(self, step: InFlightStep) -> None:
        """Wait for a step, record its results and send deltas."""
        results = step.results()
        self._batched += len(step.batch)
        now = time.monotonic()
        # A step that was launched ahead began computing only when the one in front of it had finished.
        seconds, self._finished_at = now - max(step.begun, self._finished_at), now
        # Steps with images and steps that were repeated for some sequences do not teach the prefill budget: their time
        # does not follow from the number of tokens.
        late = step.late
        if len(results) + len(late) == len(step.batch) and not any(segment.has_image_tokens for segment in step.batch):
            self._backend.prefill_budget.learn(step.batch, seconds)
            if self._backend.drafter is not None:
                tokens = sum(len(result.sampled) for result in results)
                self._backend.drafter.learn(step.batch, tokens + len(late), seconds)
        for segment in step.batch:
            segment.sequence.is_unchecked = segment.sequence.id in late
        spoiled = set()
        for result in results:
            sequence = result.segment.sequence
            # It may have ended in the step in front, or with another choice of its request.
            if sequence in self._active:
                self._advance(result, now)
            elif None in result.sampled:
                spoiled.add(sequence.id)
        self._active.step_finished(spoiled)
        if self._backend.linears is not None and any(segment.is_decode for segment in step.batch):
            self._backend.linears.reorder(REORDER_SHARE * seconds)
            if self._backend.drafter is not None:
                self._backend.drafter.reorder(REORDER_SHARE * seconds)

    def _advance(self, result: SegmentResult, now: float) -> None:
        """Record the result of a step for one sequence, and send it."""
        segment, sequence = result.segment, result.segment.sequence
        choice = self._active.of(sequence)
        sequence.computed = segment.end - len(segment.drafted)
        self._longest = max(self._longest, sequence.computed)
        if not segment.is_decode:
            self.prefill_tokens += segment.length
        if choice.prompt:
            # A preempted prompt is computed again in other chunks, so some of its logprobs may be known already.
            choice.prompt.extend(map(self._writer.logprob, result.prompt[len(choice.prompt) - segment.start - 1 :]))
        self._writer.progress(choice, now)
        if not segment.completes:
            return
        for follower, _ in result.forks:
            forked = self._active.fork(follower)
            forked.started_at, forked.prompt = choice.started_at, list(choice.prompt)
        if not result.chooses:
            self._finish(choice, TextPiece(), "length", now)
            return
        if segment.drafted and self._backend.drafter is not None:
            self._backend.drafter.count(sequence, len(segment.drafted), max(len(result.sampled) - 1, 0))
        for place, sampled in enumerate(result.sampled):
            if place:
                if sequence not in self._active:
                    break  # its text has ended with the token before
                sequence.computed += 1  # an accepted token of the draft; rejected ones are overwritten
            self._answer(choice, sampled, now)
        if result.is_spoiled and sequence in self._active:
            sequence.draft_limits = None
            self._active.restart(sequence)
        for follower, sampled in result.forks:
            if follower in self._active:  # a choice that fails has ended the others
                self._answer(self._active.of(follower), sampled, now)

    def _answer(self, choice: RequestChoice, sampled: Sampled | None, now: float) -> None:
        """Add the next token to a choice."""
        if sampled is None or (choice.matcher is not None and choice.matcher.is_over):
            self._end_without_token(choice, now)
            return
        self.decode_tokens += 1
        choice.first_token_at = choice.first_token_at or now
        finish = choice.sequence.append(sampled.token)
        matcher, is_over = choice.matcher, False
        try:
            if matcher is not None and sampled.token not in choice.sequence.ends:
                if not matcher.take(sampled.token) and finish is not None and self._grammars is not None:
                    self._grammars.mask(matcher)
                    choice.last, choice.sequence.is_held = sampled, True
                    return
                is_over = matcher.is_over
            self._send(choice, sampled, is_over, finish, now)
        except RequestError as error:
            self._fail(choice.sequence, error)

    def _end_without_token(self, choice: RequestChoice, now: float) -> None:
        """End a choice for which no token could be chosen.

        Either the logits are not finite, or the grammar is complete, as the next mask of a slow one shows, or only an
        end token that `min_tokens` or `ignore_eos` forbids could follow, or the allowed tokens would repeat an n-gram.
        """
        matcher, size = choice.matcher, choice.sequence.sampling.no_repeat_ngram_size
        repeats = f", or all allowed tokens would repeat {size} tokens; set no_repeat_ngram_size to 0" if size else ""
        if matcher is None:
            error = SequenceFailed(f"the model gave no finite logits for this request{repeats}")
            self._fail(choice.sequence, error, is_corrupt=True)
        elif matcher.can_only_end(choice.sequence.ends):
            self._finish(choice, choice.answer.finish(), "stop", now)
        else:
            why = "this request cannot continue: no finite logits, or a grammar that allows no token of this model"
            why += repeats
            self._fail(choice.sequence, matcher.error() if matcher.failure else SequenceFailed(why), is_corrupt=True)

    def _send(
        self, choice: RequestChoice, sampled: Sampled, is_over: bool, finish: FinishReason | None, now: float
    ) -> None:
        """Send a token. `is_over`: the grammar's text is complete with it."""
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

    def _finish(self, choice: RequestChoice, piece: TextPiece, finish: FinishReason, now: float) -> None:
        self._writer.send(choice, piece, finish, choice.timings(now))
        self._remove(choice)
        if not choice.stream.choices:
            self._writer.put(choice.stream, None)

    def _fail(self, sequence: Sequence, error: RequestError, *, is_corrupt: bool = False) -> None:
        """End the request of `sequence` with all of its choices.

        `is_corrupt`: their cache may contain NaN, so no other request may reuse it.
        """
        stream = self._active.of(sequence).stream
        for choice in list(stream.choices):
            self._remove(choice, is_corrupt=is_corrupt)
        self._writer.put(stream, error)

    def _remove(self, choice: RequestChoice, *, is_corrupt: bool = False) -> None:
        self._active.remove(choice, is_corrupt=is_corrupt)
        self.limit.release(choice.stream, 1)
