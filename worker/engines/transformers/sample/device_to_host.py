"""Copies of a step's results from the device to the host, in one transfer.

Reading a single number from a device waits for everything launched before. So nothing is read while a step is being
launched: all results of a step are collected on the device, copied once in the background, and waited for once.
"""

from collections.abc import Callable

import torch


class DeviceToHost:
    """The results of one step: `add` tensors, `send` once, `wait`, then read them as lists."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self._ends = [0]
        self._sent: torch.Tensor | None = None
        self._arrival: Callable[[], object] | None = None
        self._numbers: list[float] = []

    def add(self, numbers: torch.Tensor) -> int:
        """Add numbers of any shape and return their index. Float64 holds every token id and logprob exactly."""
        self._parts.append(numbers.flatten())
        self._ends.append(self._ends[-1] + numbers.numel())
        return len(self._parts) - 1

    def send(self, device: torch.device) -> None:
        """Start the copy from `device` without waiting."""
        if self._parts:
            sent = torch.cat(self._parts)
            self._parts.clear()
            if sent.is_cuda:
                host = torch.empty(len(sent), dtype=sent.dtype, pin_memory=True)
                host.copy_(sent, non_blocking=True)
                sent = host
            self._sent = sent
        if device.type == "cuda":
            self._arrival = _event(device)

    def wait(self) -> None:
        """Wait for the copy: the only place where a step waits for the device. Further calls return at once.

        A step without results is waited for, too: its time teaches the prefill budget.
        """
        if self._arrival is not None:
            self._arrival()
            self._arrival = None
        if self._sent is not None:
            self._numbers, self._sent = self._sent.tolist(), None

    def __getitem__(self, place: int) -> list[float]:
        return self._numbers[self._ends[place] : self._ends[place + 1]]


def _event(device: torch.device) -> Callable[[], object]:
    """A function that waits until the device has done all work launched so far. It releases the interpreter lock."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
    event.record(torch.cuda.current_stream(device))
    wait: Callable[[], object] = event.synchronize
    return wait
