"""Usage, timings and prefill progress in the fields of OpenAI and llama-server, for the answers of every dialect."""

from collections.abc import Sequence
from dataclasses import dataclass

from worker.interface import ChoiceTimings, Delta, GenerationRequest, PrefillProgress
from worker.prompt.body_reader import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOptions:
    """Optional content of stream chunks."""

    has_usage: bool = False  # a final chunk reports the usage of all choices
    counts: bool = False  # each chunk reports the usage so far
    has_progress: bool = False  # chunks report prefill progress
    has_timings: bool = False  # each chunk reports the timings so far, instead of the last one only

    def usage(self, totals: "UsageTotals") -> Json:
        """Return the usage field of a chunk other than the final one."""
        return {"usage": totals.usage() if self.counts else None} if self.has_usage else {}

    def progress(self, prefill: PrefillProgress) -> Json:
        """Return the fields of a chunk that reports prefill progress."""
        return progress_field(prefill, has_timings=self.has_timings)


class UsageTotals:
    """Token counts and timings over all choices of an answer."""

    def __init__(self, generations: Sequence[GenerationRequest]):
        self._prompt_tokens = sum(len(generation.prompt) for generation in generations)
        self._open_choices = sum(generation.n for generation in generations)
        self._latest: dict[tuple[int, int], ChoiceTimings] = {}
        self._is_completion_hidden = False
        self._reasoning_tokens = 0

    def add(self, number: int, delta: Delta) -> None:
        """Add the next delta of generation `number`."""
        if delta.finish is not None:
            self._open_choices -= 1
        if delta.timings is not None:
            self._latest[number, delta.index] = delta.timings

    def add_reasoning(self, tokens: int) -> None:
        """Count this many tokens as reasoning."""
        self._reasoning_tokens += tokens

    @property
    def is_complete(self) -> bool:
        return self._open_choices <= 0

    def without_completion(self) -> None:
        self._is_completion_hidden = True

    @property
    def _cached(self) -> int:
        """Cached tokens of the first choice of each prompt. Further choices reuse the first choice's prefill, which
        does not count as cached."""
        return sum(timings.cached_tokens for (_, index), timings in self._latest.items() if index == 0)

    @property
    def _completion_tokens(self) -> int:
        shown = () if self._is_completion_hidden else self._latest.values()
        return sum(timings.completion_tokens for timings in shown)

    def usage(self) -> Json:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached},
            "completion_tokens_details": {"reasoning_tokens": self._reasoning_tokens} | self._predictions(),
        }

    @property
    def _drafted(self) -> tuple[int, int]:
        """Numbers of drafted tokens and of those that were accepted."""
        timings = self._latest.values()
        return sum(choice.drafted_tokens for choice in timings), sum(choice.accepted_tokens for choice in timings)

    def _predictions(self) -> Json:
        """Return the drafted tokens in OpenAI's fields for predicted output, if there are any."""
        drafted, accepted = self._drafted
        rejected = drafted - accepted
        return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected} if drafted else {}

    def timings(self) -> Json:
        """Return llama-server's `timings` so far. Choices run concurrently, so durations are those of
        the longest one."""
        drafted, accepted = self._drafted
        # As in llama-server, only if something was drafted.
        drafts = {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
        return drafts | _timings(
            cached=self._cached,
            prompt_n=self._prompt_tokens - self._cached,
            prefill_seconds=max((timings.prefill_seconds for timings in self._latest.values()), default=0.0),
            completion_tokens=self._completion_tokens,
            first_tokens=len(self._latest),
            decode_seconds=max((timings.decode_seconds for timings in self._latest.values()), default=0.0),
        )

    def so_far(self) -> Json:
        """Return the field of a chunk that reports timings."""
        return {"timings": self.timings()} if self._latest else {}


def _timings(
    *,
    cached: int,
    prompt_n: int,
    prefill_seconds: float,
    completion_tokens: int = 0,
    first_tokens: int = 0,
    decode_seconds: float = 0.0,
) -> Json:
    decoded = max(completion_tokens - first_tokens, 0)  # the prefill computes the first token of each choice
    return {
        "cache_n": cached,
        "prompt_n": prompt_n,
        "prompt_ms": prefill_seconds * 1e3,
        "prompt_per_token_ms": _rate(prefill_seconds * 1e3, prompt_n),
        "prompt_per_second": _rate(prompt_n, prefill_seconds),
        "predicted_n": completion_tokens,
        "predicted_ms": decode_seconds * 1e3,
        "predicted_per_token_ms": _rate(decode_seconds * 1e3, decoded),
        "predicted_per_second": _rate(decoded, decode_seconds),
    }


def progress_field(prefill: PrefillProgress, *, has_timings: bool = False) -> Json:
    """Return llama-server's `prompt_progress` (tokens and milliseconds). `has_timings`: add the timings of the computed
    part."""
    done = prefill.done - prefill.cached
    timings = _timings(cached=prefill.cached, prompt_n=max(done, 0), prefill_seconds=prefill.seconds)
    return ({"timings": timings} if has_timings else {}) | {
        "prompt_progress": {
            "total": prefill.total,
            "cache": prefill.cached,
            "processed": prefill.done,
            "time_ms": prefill.seconds * 1e3,
        }
    }


def _rate(amount: float, per: float) -> float:
    return amount / per if per > 0 else 0.0
