"""Which waiting texts are computed together.

Texts wait by request. The requests take turns: each batch begins with the longest text of the one whose turn it is, and
fills up with the texts of all that are nearly as long. So a batch has little padding, and nobody waits for another
one's thousand texts: a request of k texts among j requests is done after k x j batches at most.
Law: PURE; lengths and indices only.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from heapq import merge
from typing import Generic, TypeVar

WASTE = 0.1
"""Of a batch's tokens, at most this part may be padding."""

Job = TypeVar("Job", bound=Hashable)


class _Texts(Generic[Job]):
    """The texts of one request that wait, by length."""

    def __init__(self, job: Job, lengths: Sequence[int]):
        self.job = job
        self.entries = sorted((length, index) for index, length in enumerate(lengths))

    def nearest(self, length: int) -> "Iterator[tuple[int, int, _Texts[Job]]]":
        """Lengths and places, the nearest first; of two as near, the longer one."""
        above = bisect_left(self.entries, (length,))
        below = above - 1
        while below >= 0 or above < len(self.entries):
            is_above = above < len(self.entries) and (
                below < 0 or self.entries[above][0] - length <= length - self.entries[below][0]
            )
            place = above if is_above else below
            above, below = (above + 1, below) if is_above else (above, below - 1)
            yield self.entries[place][0], place, self


class Queue(Generic[Job]):
    """Waiting texts, by the request (`Job`) they belong to."""

    def __init__(self) -> None:
        self._waiting: deque[_Texts[Job]] = deque()

    def __len__(self) -> int:
        """Texts that wait."""
        return sum(len(texts.entries) for texts in self._waiting)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def jobs(self) -> list[Job]:
        """Requests that have texts waiting, in the order of their turns."""
        return [texts.job for texts in self._waiting]

    def add(self, job: Job, lengths: Sequence[int]) -> None:
        """The texts of a request, by their lengths in tokens; at least one."""
        self._waiting.append(_Texts(job, lengths))

    def drop(self, job: Job) -> None:
        """None of its texts waits any longer."""
        self._waiting = deque(texts for texts in self._waiting if texts.job is not job)

    def take(self, budget: int) -> list[tuple[Job, int]]:
        """The next batch: requests, and which of their texts. They no longer wait.

        At most `budget` tokens with padding (the first text alone may exceed it), at most WASTE of it padding.
        """
        first = self._waiting[0]
        longest = first.entries[-1][0]
        chosen = [(len(first.entries) - 1, first)]
        tokens = most = longest
        takes_shorter = takes_longer = True
        near = merge(*(texts.nearest(longest) for texts in self._waiting), key=lambda each: abs(each[0] - longest))
        for length, place, texts in near:
            if (place, texts) == chosen[0]:
                continue
            wide = max(most, length)
            padded = (len(chosen) + 1) * wide
            if padded <= budget and tokens + length >= (1 - WASTE) * padded:
                chosen.append((place, texts))
                tokens, most = tokens + length, wide
            elif length <= longest:
                takes_shorter = False  # whatever comes now is shorter still
            else:
                takes_longer = False
            if not (takes_shorter or takes_longer):
                break
        batch = [(texts.job, texts.entries[place][1]) for place, texts in chosen]
        for place, texts in sorted(chosen, key=lambda each: -each[0]):
            del texts.entries[place]
        self._waiting.rotate(-1)
        self._waiting = deque(texts for texts in self._waiting if texts.entries)
        return batch
