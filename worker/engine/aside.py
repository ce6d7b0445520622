"""A part of a prompt that is computed a few layers at a time, beside the steps of others.

A step that takes some tokens of a long prompt reads all keys and values before them, for however few. To take many, and
still not to keep those who stream waiting, their forward stops between two layers and goes on behind the next step. It
is the same call of the model, on a stack of its own (a greenlet): no architecture has to be cut into layers for it.
What it writes of keys and values lies at fixed places that nobody else reads yet, so it may be given up at any layer.

Law: all on the thread of the step loop.
"""

import time
from collections.abc import Callable

import torch
from greenlet import greenlet

from worker.engine.scheduler import Segment


class Aside:
    """The forward of one segment."""

    def __init__(self, segment: Segment, compute: Callable[[Callable[[], None]], torch.Tensor]):
        """`compute(pause)` gives the logits of `segment`; it calls `pause` wherever it may stop."""
        self.segment = segment
        self._compute = compute
        self._stack = greenlet(self._run)
        self._logits: torch.Tensor | None = None
        self._until = self._resumed = 0.0
        self.seconds = 0.0
        """That it has computed so far."""

    @property
    def logits(self) -> torch.Tensor:
        """Of a forward that has ended."""
        assert self._logits is not None, "it is going on"
        return self._logits

    def go_on(self, seconds: float) -> bool:
        """Compute for about so long, and from one pause to the next at least. True once it has ended. Raises what
        computing raised; it has ended then, too."""
        begin = self._resumed = time.monotonic()
        self._until = begin + seconds
        try:
            self._stack.switch()
        finally:
            self.seconds += time.monotonic() - begin
        return self._stack.dead

    def give_up(self) -> None:
        """It is not gone on with."""
        if self._stack:
            self._stack.throw()

    def _run(self) -> None:
        self._logits = self._compute(self._pause)

    def _pause(self) -> None:
        """The next layer will take as long as this one did; it is begun if there is time for all of it."""
        now = time.monotonic()
        layer, self._resumed = now - self._resumed, now
        if now + layer <= self._until:
            return
        steps = self._stack.parent
        assert steps is not None
        with torch.inference_mode(mode=False):  # the mode is the thread's, and would hold for the steps meanwhile
            steps.switch()
        self._resumed = time.monotonic()
