"""Batching for encoders: selection of the waiting texts that are computed together.

Requests take turns (round robin). Each batch starts with the longest text of the request whose turn it is, and is
filled with texts of all requests that are nearly as long. So a batch has little padding, and no request waits for all
texts of another one: with j requests waiting, a request of k texts is done after at most k x j batches.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from heapq import merge
from typing import Generic, TypeVar

MAX_PADDING = 0.1  # share of a batch's tokens that may be padding; a guess between wasted arithmetic and small batches

Job = TypeVar("Job", bound=Hashable)


class _RequestTexts(Generic[Job]):
    """Waiting texts of one request, sorted by length."""

    def __init__(self, job: Job, lengths: Sequence[int]):
        self.job = job
        self.entries = sorted((length, index) for index, length in enumerate(lengths))

    def nearest(self, length: int) -> "Iterator[tuple[int, int, _RequestTexts[Job]]]":
        """Lengths and positions in `entries`, nearest to `length` first; of two equally near, the longer first."""
        above = bisect_left(self.entries, (length,))
        longer, shorter = range(above, len(self.entries)), reversed(range(above))
        for index in merge(longer, shorter, key=lambda index: abs(self.entries[index][0] - length)):
            yield self.entries[index][0], index, self


class EncoderQueue(Generic[Job]):
    """Waiting texts by request. `Job` identifies a request."""

    def __init__(self) -> None:
        self._waiting: deque[_RequestTexts[Job]] = deque()

    def __len__(self) -> int:
        """Number of waiting texts."""
        return sum(len(texts.entries) for texts in self._waiting)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def jobs(self) -> list[Job]:
        """Requests with waiting texts, in the order of their turns."""
        return [texts.job for texts in self._waiting]

    def add(self, job: Job, lengths: Sequence[int]) -> None:
        """Add the texts of a request by their lengths in tokens; at least one."""
        self._waiting.append(_RequestTexts(job, lengths))

    def drop(self, job: Job) -> None:
        """Remove the waiting texts of a request."""
        self._waiting = deque(texts for texts in self._waiting if texts.job is not job)

    def take(self, budget: int) -> list[tuple[Job, int]]:
        """Remove and return the next batch: pairs of a request and the index of its text.

        A batch has at most `budget` tokens including padding (the first text alone may exceed it), of which at most the
        share MAX_PADDING is padding.
        """
        first = self._waiting[0]
        longest = first.entries[-1][0]
        chosen = [(len(first.entries) - 1, first)]
        tokens = most = longest
        # Candidates come in order of their distance to the first text's length. Once a shorter one is rejected, all
        # further shorter ones would be, too (more padding); likewise for longer ones (a larger product).
        takes_shorter = takes_longer = True
        near = merge(
            *(texts.nearest(longest) for texts in self._waiting), key=lambda candidate: abs(candidate[0] - longest)
        )
        for length, index, texts in near:
            if (index, texts) == chosen[0]:
                continue
            width = max(most, length)
            padded = (len(chosen) + 1) * width
            if padded <= budget and tokens + length >= (1 - MAX_PADDING) * padded:
                chosen.append((index, texts))
                tokens, most = tokens + length, width
            elif length <= longest:
                takes_shorter = False
            else:
                takes_longer = False
            if not (takes_shorter or takes_longer):
                break
        batch = [(texts.job, texts.entries[index][1]) for index, texts in chosen]
        # Delete from the back, so that positions of earlier entries stay valid.
        for index, texts in sorted(chosen, key=lambda entry: -entry[0]):
            del texts.entries[index]
        self._waiting.rotate(-1)
        self._waiting = deque(texts for texts in self._waiting if texts.entries)
        return batch
