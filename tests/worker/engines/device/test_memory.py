"""Memory that a process reports."""

import gc
import mmap
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from worker.engines.transformers.device.cuda_errors import is_exhausted, is_sticky
from worker.engines.transformers.device.memory import Inheritance, cap, keep_small, mapped
from worker.errors import StartError

MIB = 1 << 20
WEIGHTS = Path(__file__).parents[4] / "worker" / "fetch" / "demo" / "chat" / "model.safetensors"


def survey(mib: int) -> tuple[Inheritance, torch.Tensor]:
    """Return a survey of this process, and data of so many MiB that are part of it."""
    gc.collect()
    ours = torch.ones(mib * MIB, dtype=torch.uint8)
    look = Inheritance()
    look.survey()
    return look, ours


def forked(
    look: Inheritance,
    written: torch.Tensor,
    mapped_file: mmap.mmap | None = None,
    read: int = 0,
    count: Callable[[Inheritance], int] = Inheritance.bytes,
) -> int:
    """Bytes that a child shares with its parent by `count`, after it has overwritten `written` and read the first
    `read` bytes of `mapped_file`."""
    reported, tell = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the child does nothing that another thread's lock could hold up
        pid = os.fork()
    if pid == 0:
        try:
            gc.disable()  # a collection would write to the pages of all objects
            look.take()
            written.fill_(7)
            if mapped_file is not None:
                assert not any(mapped_file[: read : mmap.PAGESIZE])
            os.write(tell, str(count(look)).encode())
        finally:
            os._exit(0)
    os.close(tell)
    with os.fdopen(reported) as file:
        answers = file.read()
    assert os.waitpid(pid, 0)[1] == 0
    return int(answers)


def test_a_child_counts_shared_pages_until_it_writes_to_them() -> None:
    look, ours = survey(64)
    shared, less = forked(look, ours[:0]), forked(look, ours[: 48 * MIB])
    assert shared > 64 * MIB
    # The difference is what other threads of this process wrote between the two forks: 0.27 MiB on a busy machine.
    assert shared - less == pytest.approx(48 * MIB, abs=MIB)


def test_shared_data_is_counted_as_the_kernel_counts_it_in_large_and_small_areas() -> None:
    small = [mmap.mmap(-1, 2 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE, prot=3 - at % 2 * 2) for at in range(6000)]
    assert not any(area[0] for area in small)
    for area in small[::2]:
        area[0] = 1
    look = Inheritance()
    look.survey()

    def difference(look: Inheritance) -> int:
        """From the kernel's own account."""
        rows = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
        sizes = {name: int(size) * 1024 for name, size, *_ in rows}
        return abs(look.count()[0] - (sizes["Anonymous:"] - sizes["Private_Dirty:"]))

    # The difference is what both counts write to themselves, and other threads before the fork: 2.3 MiB if busy.
    # Without the small areas it would be 12 MiB.
    assert forked(look, torch.empty(0), count=difference) < 6 * MIB


def test_what_a_child_shares_at_least_is_a_sixteenth_less_than_the_data_of_its_parent() -> None:
    look, ours = survey(256)

    def estimated(look: Inheritance) -> int:
        look.estimate()
        with look.last_count():
            return look.bytes()

    least, shared = (forked(look, ours[:0], count=count) for count in (estimated, Inheritance.bytes))
    assert least == pytest.approx(shared * 15 / 16, rel=0.02)
    assert estimated(look) == 0, "this process was not forked"


def test_an_estimate_serves_until_the_first_count() -> None:
    look, ours = survey(256)

    def difference(look: Inheritance) -> int:
        look.estimate()
        with look.last_count():
            estimated = look.bytes()
        with look.one_count():
            return look.bytes() - estimated

    assert forked(look, ours[:0], count=difference) > 12 * MIB


@pytest.mark.parametrize(("name", "is_shared"), [("library", True), ("model.safetensors", False)])
def test_the_first_half_of_a_library_is_counted_as_half_and_that_of_weights_not(
    tmp_path: Path, name: str, is_shared: bool
) -> None:
    (tmp_path / name).write_bytes(bytes(4 * MIB))
    with (tmp_path / name).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as area:
        assert not is_shared or not any(area[:: mmap.PAGESIZE])
        look = Inheritance()
        look.survey()
        nothing, half = (forked(look, torch.empty(0), area, read) for read in (0, 2 * MIB))
    assert half - nothing == pytest.approx(2 * MIB * is_shared, abs=MIB // 4)


def test_the_last_count_serves_where_no_request_may_wait_for_another() -> None:
    look, ours = survey(64)

    def keeps_it(look: Inheritance) -> int:
        with look.last_count():
            first = look.bytes()
        ours[: 48 * MIB].fill_(7)
        with look.last_count():
            kept = look.bytes()
        return int(first > 64 * MIB and kept == first and first - look.bytes() > 40 * MIB)

    assert forked(look, ours[:0], count=keeps_it) == 1


def test_a_page_that_the_parent_copies_is_counted_as_the_childs() -> None:
    look, ours = survey(64)
    (counted, tell_parent), (written, tell_child) = os.pipe(), os.pipe()

    def write() -> None:
        os.read(counted, 1)
        ours[: 48 * MIB].fill_(7)
        os.write(tell_child, b"!")

    def lost(look: Inheritance) -> int:
        first = min(look.bytes() for _ in range(3))  # the first counts cause page faults
        os.write(tell_parent, b"!")
        os.read(written, 1)
        return first - look.bytes()

    parent = threading.Thread(target=write)
    parent.start()
    assert forked(look, ours[:0], count=lost) == pytest.approx(48 * MIB, abs=MIB)
    parent.join()
    for descriptor in (counted, tell_parent, written, tell_child):
        os.close(descriptor)


def test_a_process_that_was_not_forked_shares_nothing() -> None:
    look = Inheritance()
    look.survey()
    assert look.bytes() == 0


def test_pages_of_mapped_files_are_counted_apart() -> None:
    before, size = mapped(), WEIGHTS.stat().st_size
    with WEIGHTS.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as area:
        assert any(area[:: mmap.PAGESIZE])
        assert mapped() - before > 0.9 * size
    assert mapped() - before < 0.1 * size


@pytest.mark.parametrize("reserved", ["5", "[1]", '{"cuda:0": "much"}', '{"cuda:0": null}', "{"])
def test_a_reservation_that_is_no_object_of_bytes_is_refused(reserved: str) -> None:
    with pytest.raises(StartError, match="--reserved must be a JSON object of bytes by device"):
        cap(["cpu"], reserved)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_a_device_that_is_full_is_not_lost(error: Exception) -> None:
    assert is_exhausted(error)
    assert not is_sticky(error)


def test_a_device_that_is_lost_is_not_full() -> None:
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    assert is_sticky(error)
    assert not is_exhausted(error)


def test_attention_is_left_to_no_kernels_that_keep_a_plan_for_each_shape() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    keep_small()
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
