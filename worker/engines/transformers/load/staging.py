"""Weights from their files to a device: a ring of buffers, filled by several readers while others are on their way.

Each buffer goes round: a reader fills it with a stretch of a file (or of main memory, where weights were converted
there), the caller's thread sends it off, and it is filled again once what was sent has arrived. So disk, page cache and
bus work at once, and main memory holds the ring and no more. On the device the weights of one file lie in one piece;
tensors are views of it. On CUDA the ring is pinned and copies run on a stream of their own; on the CPU, where loads map
their files instead, the same code copies within main memory: that is for tests.
Several devices, each with layers of its own, are served at once and divide the ring.

Law: a buffer is filled by nobody before its last copy has arrived, whatever fails meanwhile.
"""

import contextlib
import logging
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor

from worker.engines.transformers.load.safetensors import WeightFile
from worker.errors import StartError
from worker.protocol.exits import Exit
from worker.protocol.memory import STAGING_BUFFER_BYTES, STAGING_BUFFERS

log = logging.getLogger(__name__)

READERS = 8
"""Threads at most. One copies about 10 GB/s out of the page cache, a bus takes 50 (memory.md, section 8): a guess until
measured on such a machine."""
ALIGNMENT = 256
"""Of each tensor on the device, as CUDA's own allocations are."""
_PATIENCE = 0.1
"""Seconds after which a thread that waits looks whether it still should."""


class Lane(Protocol):
    """The way to a device."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy; neither may be touched until that is over."""

    def mark(self) -> Callable[[], None]:
        """A function that returns once everything that was begun so far is over; any thread may call it."""

    def end(self) -> None:
        """Returns once everything is over."""


class Direct:
    """Within main memory: over as soon as begun."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def mark(self) -> Callable[[], None]:
        return _nothing

    def end(self) -> None:
        pass


class Bus:
    """To a CUDA device, on a stream of its own."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # targets come from the allocator of the current stream: whatever used that memory before must be over
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        wait: Callable[[], None] = event.synchronize
        return wait

    def end(self) -> None:
        self._stream.synchronize()


@dataclass(frozen=True, slots=True)
class Stretch:
    """What one buffer takes: bytes that lie side by side, and where they go."""

    source: WeightFile | torch.Tensor
    """A file, or bytes in main memory `[n]`."""
    offset: int
    size: int
    targets: tuple[tuple[int, torch.Tensor], ...]
    """Where in the buffer a part begins, and the bytes of the device that it goes to, `[n]`."""


def move(
    model: torch.nn.Module,
    files: Sequence[WeightFile],
    device: torch.device,
    report: Callable[[int], None] = lambda done: None,
    *,
    read: Callable[[], None] = lambda: None,
    lane: Lane | None = None,
    buffers: int = STAGING_BUFFERS,
    buffer_bytes: int = STAGING_BUFFER_BYTES,
    readers: int = READERS,
) -> None:
    """Have all parameters and buffers of `model` on `device`, as `bring` does; where that raises, `model` is as it
    was."""
    brought = bring(
        [*model.parameters(), *model.buffers()],
        files,
        device,
        report,
        read=read,
        lane=lane,
        buffers=buffers,
        buffer_bytes=buffer_bytes,
        readers=readers,
    )
    send: Any = model._apply  # what `to` does for each tensor
    send(brought)


def bring(
    tensors: Sequence[torch.Tensor],
    files: Sequence[WeightFile],
    device: torch.device,
    report: Callable[[int], None],
    *,
    read: Callable[[], None] = lambda: None,
    lane: Lane | None = None,
    buffers: int = STAGING_BUFFERS,
    buffer_bytes: int = STAGING_BUFFER_BYTES,
    readers: int = READERS,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """What each of `tensors` is on `device`, once all are there: those that are views of `files` are read from there.

    Tensors that are one stay one. `report` gets the bytes that are there so far, `read` is called once no more has to
    be read. Raises StartError (Exit.DAMAGED) for a file that has become shorter, and what the device's allocator
    raises.
    """
    lane = lane or (Bus(device) if device.type == "cuda" else Direct())
    moved: dict[tuple[Any, ...], torch.Tensor] = {}
    stretches = _plan(tensors, files, device, moved, buffer_bytes)
    if stretches:
        with _ring(min(buffers, len(stretches)), buffer_bytes, device) as ring:
            _Transfer(stretches, ring, lane).run(min(readers, os.cpu_count() or 1), report, read)

    def brought(tensor: torch.Tensor) -> torch.Tensor:
        found = moved.get(_key(tensor)) if _lies_here(tensor) else None
        return tensor.to(device) if found is None else found

    return brought


def bring_each(
    shares: Mapping[torch.device, Sequence[torch.Tensor]],
    files: Sequence[WeightFile],
    report: Callable[[int], None],
    *,
    buffer_bytes: int = STAGING_BUFFER_BYTES,
) -> dict[torch.device, Callable[[torch.Tensor], torch.Tensor]]:
    """As `bring`, of each device's tensors, to all at once. Raises what one of them raises, once all are over."""
    done, lock = dict.fromkeys(shares, 0), threading.Lock()

    def told(device: torch.device, size: int) -> None:
        with lock:
            done[device] = size
            report(sum(done.values()))

    with ThreadPoolExecutor(max(len(shares), 1)) as pool:
        begun = {
            device: pool.submit(
                bring,
                tensors,
                files,
                device,
                partial(told, device),
                buffers=max(1, STAGING_BUFFERS // len(shares)),
                buffer_bytes=buffer_bytes,
                readers=max(1, READERS // len(shares)),
            )
            for device, tensors in shares.items()
        }
    return {device: each.result() for device, each in begun.items()}


def _lies_here(tensor: torch.Tensor) -> bool:
    """Whether its bytes are one piece of main memory; those of an estimate are fake and have none."""
    return (
        tensor.device.type == "cpu"
        and tensor.numel() > 0
        and tensor.is_contiguous()
        and not isinstance(tensor, FakeTensor)
    )


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


# Where everything goes


def _plan(
    tensors: Sequence[torch.Tensor],
    files: Sequence[WeightFile],
    device: torch.device,
    moved: dict[tuple[Any, ...], torch.Tensor],
    buffer_bytes: int,
) -> list[Stretch]:
    """Room on the device for all of `tensors`, which are told in `moved`, and what goes there, by file and place. What
    is not in one piece is left to torch."""
    here: dict[tuple[Any, ...], torch.Tensor] = {}
    for tensor in tensors:
        if _lies_here(tensor):
            here[_key(tensor)] = tensor.detach()
    by_file: dict[int, list[tuple[int, tuple[Any, ...]]]] = {}
    alone: list[tuple[Any, ...]] = []
    for key, tensor in here.items():
        places = ((number, file.offset(tensor)) for number, file in enumerate(files))
        number, offset = next(((number, at) for number, at in places if at is not None), (-1, 0))
        if number >= 0:
            by_file.setdefault(number, []).append((offset, key))
        else:
            alone.append(key)
    stretches: list[Stretch] = []
    for number, entries in sorted(by_file.items()):
        entries.sort(key=lambda entry: entry[0])
        parts = []
        room = _room([here[key].nbytes for _, key in entries], device)
        for (offset, key), target in zip(entries, room, strict=True):
            moved[key] = target.view(here[key].dtype).view(here[key].shape)
            parts.append((offset, target))
        stretches += _stretches(files[number], parts, buffer_bytes)
    for key, target in zip(alone, _room([here[key].nbytes for key in alone], device), strict=True):
        moved[key] = target.view(here[key].dtype).view(here[key].shape)
        stretches += _stretches(here[key].reshape(-1).view(torch.uint8), [(0, target)], buffer_bytes)
    return stretches


def _room(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Bytes on the device, `[size]` each, one behind another in one piece."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    whole = torch.empty(end, dtype=torch.uint8, device=device)
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _stretches(
    source: WeightFile | torch.Tensor, parts: Sequence[tuple[int, torch.Tensor]], buffer_bytes: int
) -> Iterator[Stretch]:
    """What of `source` is wanted, by place, in stretches of a buffer at most; neighbours are read at once."""
    begin = end = 0
    targets: list[tuple[int, torch.Tensor]] = []
    for offset, target in parts:
        done = 0
        while done < target.nbytes:
            if targets and (offset + done != end or end - begin == buffer_bytes):
                yield Stretch(source, begin, end - begin, tuple(targets))
                targets = []
            if not targets:
                begin = end = offset + done
            size = min(target.nbytes - done, buffer_bytes - (end - begin))
            targets.append((end - begin, target[done : done + size]))
            end, done = end + size, done + size
    if targets:
        yield Stretch(source, begin, end - begin, tuple(targets))


# The ring


@contextlib.contextmanager
def _ring(buffers: int, buffer_bytes: int, device: torch.device) -> Iterator[list[torch.Tensor]]:
    """Buffers in main memory, `[buffer_bytes]` bytes each, pinned where there is a bus; given back at the end, which
    torch's own pinned memory would not be."""
    area = mmap.mmap(-1, buffers * buffer_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # gone with its last view
    whole = torch.frombuffer(area, dtype=torch.uint8)
    is_pinned = device.type == "cuda" and _pin(whole, device)
    try:
        yield [whole[start : start + buffer_bytes] for start in range(0, len(whole), buffer_bytes)]
    finally:
        if is_pinned:
            _runtime().cudaHostUnregister(whole.data_ptr())


def _pin(whole: torch.Tensor, device: torch.device) -> bool:
    """Whether the bus may take these bytes by itself from now on; where not, copies are slower and still right."""
    runtime = _runtime()
    error = runtime.cudaHostRegister(whole.data_ptr(), whole.nbytes, 0)
    if error != runtime.cudaError.success:
        with contextlib.suppress(RuntimeError):  # CUDA has it told once more, by the next kernel that is started
            torch.ones(1, device=device)
        log.warning("%d MiB of main memory cannot be pinned (%s); copies are slower", whole.nbytes >> 20, error)
        return False
    return True


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class _Transfer:
    """Readers, who fill buffers, and the caller's thread, which sends them off."""

    def __init__(self, stretches: Sequence[Stretch], ring: Sequence[torch.Tensor], lane: Lane):
        self._stretches = stretches
        self._rest = iter(stretches)
        self._lane = lane
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._empty: queue.SimpleQueue[tuple[torch.Tensor, Callable[[], None]]] = queue.SimpleQueue()
        """Buffers, and what to wait for before they are filled."""
        self._full: queue.SimpleQueue[tuple[Stretch, torch.Tensor] | BaseException] = queue.SimpleQueue()
        for buffer in ring:
            self._empty.put((buffer, _nothing))

    def run(self, readers: int, report: Callable[[int], None], read: Callable[[], None]) -> None:
        """Returns once everything has arrived; raises what kept it from that, and nothing is on its way then."""
        files = {id(each.source): each.source for each in self._stretches if isinstance(each.source, WeightFile)}
        with contextlib.ExitStack() as stack:
            descriptors = {}
            for key, file in files.items():
                descriptors[key] = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, descriptors[key])
            stack.callback(self._lane.end)
            threads = [
                threading.Thread(target=self._read, args=(descriptors,), name="staging", daemon=True)
                for _ in range(max(readers, 1))
            ]
            stack.callback(self._join, threads)
            for thread in threads:
                thread.start()
            done = 0
            for _ in self._stretches:
                filled = self._full.get()
                if isinstance(filled, BaseException):
                    raise filled
                stretch, buffer = filled
                for start, target in stretch.targets:
                    self._lane.copy(target, buffer[start : start + target.nbytes])
                self._empty.put((buffer, self._lane.mark()))
                done += stretch.size
                report(done)
            read()

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        self._stopped.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()

    def _read(self, descriptors: dict[int, int]) -> None:
        try:
            while not self._stopped.is_set():
                with self._lock:
                    stretch = next(self._rest, None)
                if stretch is None:
                    return
                buffer = self._next_empty()
                if buffer is None:
                    return
                self._fill(stretch, buffer, descriptors)
                self._full.put((stretch, buffer))
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits for us
            self._full.put(error)

    def _next_empty(self) -> torch.Tensor | None:
        """A buffer that nobody needs; None: no more are wanted."""
        while not self._stopped.is_set():
            with contextlib.suppress(queue.Empty):
                buffer, arrived = self._empty.get(timeout=_PATIENCE)
                arrived()
                return buffer
        return None

    @staticmethod
    def _fill(stretch: Stretch, buffer: torch.Tensor, descriptors: dict[int, int]) -> None:
        source = stretch.source
        if isinstance(source, torch.Tensor):
            buffer[: stretch.size].copy_(source[stretch.offset : stretch.offset + stretch.size])
            return
        rest = buffer[: stretch.size].numpy().data
        offset = stretch.offset
        while rest:
            count = os.preadv(descriptors[id(source)], [rest], offset)
            if not count:
                raise StartError(
                    f"{source.path} ends at byte {offset}, in its tensors: it has become shorter; download it again",
                    Exit.DAMAGED,
                )
            rest, offset = rest[count:], offset + count


def _nothing() -> None:
    pass


__all__ = ["Direct", "Lane", "bring", "bring_each", "move"]
