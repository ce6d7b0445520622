"""Copy of weights from files to a device through a ring of staging buffers.

Reader threads fill buffers with chunks of a file (or of main memory, for converted weights). The calling thread starts
the copy to the device, and the buffer is filled again when its copy has finished. Disk, page cache and bus work in
parallel, and main memory holds the ring only. On the device the weights of one file are one allocation; tensors are
views of it. On CUDA the ring is pinned and copies use their own stream. On the CPU, where weights are mapped instead,
the same code copies within main memory; tests use that. With several devices the copies run in parallel and divide the
ring.

Invariant: a buffer is not refilled before its last copy has finished, whatever fails meanwhile.
"""

import contextlib
import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from worker.engines.transformers.load.safetensors import WeightFile
from worker.errors import StartError
from worker.protocol.events import Exit
from worker.protocol.memory import STAGING_BUFFER_BYTES, STAGING_BUFFERS

log = logging.getLogger(__name__)

# Maximum of threads. Measured on an H100 with a bus of 55 GB/s and 16 processors: 12 GB/s with 4 threads, 18 with 8, 23
# with 12, and 21 with 16. One reads 4.7 GB/s from the page cache.
READERS = 12
ALIGNMENT = 256  # of each tensor on the device, like allocations of CUDA itself


class DeviceCopies:
    """Copies to one device: on a stream of its own with CUDA, else finished as soon as they are started."""

    def __init__(self, device: torch.device):
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # Targets come from the allocator of the current stream: earlier use of that memory must finish first.
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start to copy. Neither tensor may be changed until the copy has finished."""
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        """Return a function that waits for all copies started so far. Any thread may call it."""
        if self._stream is None:
            return _nothing
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        wait: Callable[[], None] = event.synchronize
        return wait

    def end(self) -> None:
        """Wait for all copies."""
        if self._stream is not None:
            self._stream.synchronize()


@dataclass(frozen=True, slots=True)
class StagedChunk:
    """Content of one buffer: adjacent bytes of a source, and their targets."""

    source: WeightFile | torch.Tensor  # a file, or bytes in main memory [n]
    offset: int
    size: int
    # Offset in the buffer of each part, and the bytes on the device that it goes to, [n].
    targets: tuple[tuple[int, torch.Tensor], ...]


@dataclass(frozen=True, slots=True)
class RingSize:
    """Buffers of main memory, and the most threads that fill them."""

    buffers: int = STAGING_BUFFERS
    buffer_bytes: int = STAGING_BUFFER_BYTES
    readers: int = READERS

    def divided(self, count: int) -> "RingSize":
        """The share of one of `count` devices."""
        return RingSize(max(1, self.buffers // count), self.buffer_bytes, max(1, self.readers // count))


def move(
    model: torch.nn.Module,
    files: Sequence[WeightFile],
    device: torch.device,
    report: Callable[[int], None] = lambda done: None,
    *,
    read: Callable[[], None] = lambda: None,
    copies: DeviceCopies | None = None,
    size: RingSize = RingSize(),
) -> None:
    """Move all parameters and buffers of `model` to `device` by `copy_to_device`. An error leaves `model` unchanged."""
    tensors = [*model.parameters(), *model.buffers()]
    copy_of = copy_to_device(tensors, files, device, report, read=read, copies=copies, size=size)
    send: Any = model._apply  # the method behind `Module.to`
    send(copy_of)


def copy_to_device(
    tensors: Sequence[torch.Tensor],
    files: Sequence[WeightFile],
    device: torch.device,
    report: Callable[[int], None],
    *,
    read: Callable[[], None] = lambda: None,
    copies: DeviceCopies | None = None,
    size: RingSize = RingSize(),
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Copy `tensors` to `device` and return a function from each tensor to its copy. Views of `files` are read from
    there.

    Shared tensors stay shared. `report` gets the bytes copied so far, `read` is called when everything is read. Raises
    StartError (Exit.DAMAGED) for a truncated file, and errors of the device's allocator.
    """
    copies = copies or DeviceCopies(device)
    moved: dict[tuple[Any, ...], torch.Tensor] = {}
    chunks = _chunks_to_copy(tensors, files, device, moved, size.buffer_bytes)
    if chunks:
        with _ring(min(size.buffers, len(chunks)), size.buffer_bytes, device) as ring:
            _transfer(chunks, ring, copies, min(size.readers, os.cpu_count() or 1), report, read)

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        found = moved.get(_key(tensor)) if _is_in_main_memory(tensor) else None
        return tensor.to(device) if found is None else found

    return copy_of


def copy_to_devices(
    shares: Mapping[torch.device, Sequence[torch.Tensor]],
    files: Sequence[WeightFile],
    report: Callable[[int], None],
    size: RingSize = RingSize(),
) -> dict[torch.device, Callable[[torch.Tensor], torch.Tensor]]:
    """As `copy_to_device`, for several devices in parallel. Raises the error of one of them after all have ended."""
    done, lock = dict.fromkeys(shares, 0), threading.Lock()

    def report_device(device: torch.device, size: int) -> None:
        with lock:
            done[device] = size
            report(sum(done.values()))

    count = max(len(shares), 1)
    with ThreadPoolExecutor(count) as pool:
        copies = {
            device: pool.submit(
                copy_to_device, tensors, files, device, partial(report_device, device), size=size.divided(count)
            )
            for device, tensors in shares.items()
        }
    return {device: copy.result() for device, copy in copies.items()}


def _is_in_main_memory(tensor: torch.Tensor) -> bool:
    """True if the tensor's bytes are contiguous main memory. Fake tensors (estimates) have none."""
    return (
        tensor.device.type == "cpu"
        and tensor.numel() > 0
        and tensor.is_contiguous()
        and not isinstance(tensor, FakeTensor)
    )


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


# Targets


def _chunks_to_copy(
    tensors: Sequence[torch.Tensor],
    files: Sequence[WeightFile],
    device: torch.device,
    moved: dict[tuple[Any, ...], torch.Tensor],
    buffer_bytes: int,
) -> list[StagedChunk]:
    """Allocate device memory for `tensors` (entered into `moved`) and return the copies to make, in file order. Tensors
    that are not contiguous are left to torch."""
    here: dict[tuple[Any, ...], torch.Tensor] = {}
    # Shared tensors have one key and are copied once.
    for tensor in tensors:
        if _is_in_main_memory(tensor):
            here[_key(tensor)] = tensor.detach()
    by_file: dict[int, list[tuple[int, tuple[Any, ...]]]] = {}
    outside: list[tuple[Any, ...]] = []
    for key, tensor in here.items():
        places = ((number, file.offset(tensor)) for number, file in enumerate(files))
        number, offset = next(((number, at) for number, at in places if at is not None), (-1, 0))
        if number >= 0:
            by_file.setdefault(number, []).append((offset, key))
        else:
            outside.append(key)
    chunks: list[StagedChunk] = []
    for number, entries in sorted(by_file.items()):
        entries.sort(key=lambda entry: entry[0])
        parts = []
        # One allocation per file: thousands of small ones would fragment the allocator's memory.
        allocated = _allocate([here[key].nbytes for _, key in entries], device)
        for (offset, key), target in zip(entries, allocated, strict=True):
            moved[key] = target.view(here[key].dtype).view(here[key].shape)
            parts.append((offset, target))
        chunks += _chunks(files[number], parts, buffer_bytes)
    for key, target in zip(outside, _allocate([here[key].nbytes for key in outside], device), strict=True):
        moved[key] = target.view(here[key].dtype).view(here[key].shape)
        chunks += _chunks(here[key].reshape(-1).view(torch.uint8), [(0, target)], buffer_bytes)
    return chunks


def _allocate(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Byte tensors `[size]` on the device, all parts of one allocation."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    whole = torch.empty(end, dtype=torch.uint8, device=device)
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _chunks(
    source: WeightFile | torch.Tensor, parts: Sequence[tuple[int, torch.Tensor]], buffer_bytes: int
) -> Iterator[StagedChunk]:
    """Divide the parts of `source` into chunks of at most a buffer. Adjacent parts are read together."""
    begin = end = 0
    targets: list[tuple[int, torch.Tensor]] = []
    for offset, target in parts:
        done = 0
        while done < target.nbytes:
            if targets and (offset + done != end or end - begin == buffer_bytes):
                yield StagedChunk(source, begin, end - begin, tuple(targets))
                targets = []
            if not targets:
                begin = end = offset + done
            size = min(target.nbytes - done, buffer_bytes - (end - begin))
            targets.append((end - begin, target[done : done + size]))
            end, done = end + size, done + size
    if targets:
        yield StagedChunk(source, begin, end - begin, tuple(targets))


# The ring


@contextlib.contextmanager
def _ring(buffers: int, buffer_bytes: int, device: torch.device) -> Iterator[list[torch.Tensor]]:
    """Buffers `[buffer_bytes]` in main memory, pinned for CUDA, and released at the end.

    torch's own pinned memory is not used, because its allocator would keep it.
    """
    # Freed with its last view.
    area = mmap.mmap(-1, buffers * buffer_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(area, dtype=torch.uint8)
    is_pinned = device.type == "cuda" and _pin(whole, device)
    try:
        yield [whole[start : start + buffer_bytes] for start in range(0, len(whole), buffer_bytes)]
    finally:
        if is_pinned:
            _runtime().cudaHostUnregister(whole.data_ptr())


def _pin(whole: torch.Tensor, device: torch.device) -> bool:
    """Pin these bytes. False if that fails; copies are then slower but correct."""
    runtime = _runtime()
    error = runtime.cudaHostRegister(whole.data_ptr(), whole.nbytes, 0)
    if error != runtime.cudaError.success:
        with contextlib.suppress(RuntimeError):  # CUDA reports the error again at the next kernel launch; clear it
            torch.ones(1, device=device)
        log.warning("%d MiB of main memory cannot be pinned (%s); copies are slower", whole.nbytes >> 20, error)
        return False
    return True


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _transfer(
    chunks: Sequence[StagedChunk],
    ring: Sequence[torch.Tensor],
    copies: DeviceCopies,
    readers: int,
    report: Callable[[int], None],
    read: Callable[[], None],
) -> None:
    """Fill buffers in threads, start their copies in this one, and return when everything has arrived.

    If it raises, no copy is running any more. Copies start in the order of the chunks: a chunk that is filled early
    waits for those in front of it, which costs nothing as long as all buffers are being filled.
    """
    with contextlib.ExitStack() as stack:
        descriptors: dict[WeightFile, int] = {}
        for file in {chunk.source for chunk in chunks if isinstance(chunk.source, WeightFile)}:
            descriptors[file] = stack.enter_context(file.path.open("rb")).fileno()
        # Callbacks run in reverse: join the readers, finish the copies, close the files.
        stack.callback(copies.end)
        pool = ThreadPoolExecutor(readers, "staging")
        stack.callback(pool.shutdown, cancel_futures=True)
        rest = iter(chunks)
        filling: deque[tuple[StagedChunk, torch.Tensor, Future[None]]] = deque()

        def fill_next(buffer: torch.Tensor, has_arrived: Callable[[], None]) -> None:
            if (chunk := next(rest, None)) is not None:
                filling.append((chunk, buffer, pool.submit(_fill, chunk, buffer, descriptors, has_arrived)))

        for buffer in ring:
            fill_next(buffer, _nothing)
        done = 0
        while filling:
            chunk, buffer, filled = filling.popleft()
            filled.result()
            for start, target in chunk.targets:
                copies.copy(target, buffer[start : start + target.nbytes])
            fill_next(buffer, copies.mark())
            done += chunk.size
            report(done)
        read()


def _fill(
    chunk: StagedChunk,
    buffer: torch.Tensor,
    descriptors: Mapping[WeightFile, int],
    has_arrived: Callable[[], None],
) -> None:
    """Read a chunk into `buffer` after the last copy from there has finished, for which `has_arrived` waits."""
    has_arrived()
    source = chunk.source
    if isinstance(source, torch.Tensor):
        buffer[: chunk.size].copy_(source[chunk.offset : chunk.offset + chunk.size])
        return
    rest = buffer[: chunk.size].numpy().data
    offset = chunk.offset
    while rest:
        count = os.preadv(descriptors[source], [rest], offset)
        if not count:
            raise StartError(
                f"{source.path} ends at byte {offset}, in its tensors: it has become shorter; download it again",
                Exit.DAMAGED,
            )
        rest, offset = rest[count:], offset + count


def _nothing() -> None:
    pass
