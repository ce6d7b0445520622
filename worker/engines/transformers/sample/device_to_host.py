"""What the host wants to know of a step: gathered on the device, and fetched all at once.

Whoever asks a device for a number waits until it has done all that was begun before. So nobody asks while a step is
being launched: what will be wanted goes into the step's `Readout`, a copy of which is under way to the host as soon as
the device has it, and the host waits once, for that.
"""

from collections.abc import Callable

import torch


class Readout:
    """Numbers of one step. `add` them, `send` once, `wait`, then they are lists."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self._ends = [0]
        self._sent: torch.Tensor | None = None
        self._arrival: Callable[[], object] | None = None
        self._numbers: list[float] = []

    def add(self, numbers: torch.Tensor) -> int:
        """Numbers of any shape; where they will be found, flat. As float64, which holds every token and logprob."""
        self._parts.append(numbers.flatten())
        self._ends.append(self._ends[-1] + numbers.numel())
        return len(self._parts) - 1

    def send(self) -> None:
        """Begin the copy. Waits for nothing."""
        if not self._parts:
            return
        sent = torch.cat(self._parts)
        self._parts.clear()
        if sent.is_cuda:
            host = torch.empty(len(sent), dtype=sent.dtype, pin_memory=True)
            host.copy_(sent, non_blocking=True)
            self._arrival, sent = _event(sent.device), host
        self._sent = sent

    def wait(self) -> None:
        """Returns once the numbers are here: the only place where a step waits for the device. Again is free."""
        if self._sent is None:
            return
        if self._arrival is not None:
            self._arrival()
        self._numbers, self._sent = self._sent.tolist(), None

    def __getitem__(self, place: int) -> list[float]:
        return self._numbers[self._ends[place] : self._ends[place + 1]]


def _event(device: torch.device) -> Callable[[], object]:
    """Called, it returns once the device has done all that it was given until now. Other threads run meanwhile."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
    event.record(torch.cuda.current_stream(device))
    wait: Callable[[], object] = event.synchronize
    return wait
