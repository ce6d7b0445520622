"""Readings of this machine's devices: taken regularly, settled after a process has exited, shared between routers.

Drivers may block for seconds or without end, so they are read in a thread of its own, which the program's exit does not
wait for. A device that cannot be read is shown as full: no worker starts where free memory is unknown.

A load takes its memory bit by bit, and the kernel counts pages of mapped files as available. So each router of this
machine writes into a file of its own how much of its workers' reservations is in no driver's figure, and counts the
other routers' figures as used. A router keeps its file locked for as long as it lives. A reservation is written before
the others are read once more. So of two routers that start a worker at the same moment, one sees the other's
reservation, or both do, and plans again.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from router.launch.interface import NotStarted
from router.planner.ledger import HOST, Bytes, DeviceId, Reading

log = logging.getLogger("router.launch.readings")

READ_TIMEOUT = 1.0  # seconds for one reading of all devices
FIRST_READ_TIMEOUT = 15.0  # the first reading may have to wake a driver
LOST_AFTER = 5  # samples without a reading after which all devices are shown as full
SETTLE_INTERVAL = 0.1
# Main memory needs no pause: the kernel frees that of a process before its parent can see the exit. Drivers are late.
SETTLE_INTERVAL_HOST = 0.0
SETTLE_TIMEOUT = 5.0
# Two readings agree if they differ by no more than the larger of these. Both are guesses.
SETTLE_BYTES = 256 << 20
SETTLE_FRACTION = 0.02
# Main memory's name in the files. Accelerators have their UUID, as their numbers differ between routers.
MAIN = "cpu"
MAX_FILE_BYTES = 1 << 16  # of a file that is read


class ReadableDevices(Protocol):
    """The devices to read; see `router.launch.devices`. Used in one thread only."""

    def read(self) -> list[Reading]:
        """The readings of all devices; may block."""

    @property
    def problems(self) -> Mapping[DeviceId, str]:
        """For each device that the last `read` could not use, the reason."""


class DeviceSampler:
    """Reads devices in its own thread, from `start` to `close`."""

    def __init__(self, devices: ReadableDevices, on_reading: Callable[[], None], *, read_timeout: float = READ_TIMEOUT):
        """`on_reading`: called on the event loop after each reading that differs from the one before."""
        self.on_reading = on_reading
        self._read_timeout = read_timeout
        self._devices = devices
        self.latest: Sequence[Reading] = ()
        self._problems: Mapping[DeviceId, str] = {}  # those of the last successful reading, which were logged
        # The reading that was requested and has not begun: True if it was successful. Guarded by `_lock`.
        self._next: asyncio.Future[bool] | None = None
        self._lock = threading.Lock()
        self._wake = threading.Semaphore(0)  # released once for each `_next`, and to end the thread
        self._missed = 0
        self._closed = False
        self._error = ""

    def visible(self, names: Mapping[str, DeviceId]) -> str:
        """CUDA_VISIBLE_DEVICES for these devices, by UUID where the driver gives one."""
        uuids = {reading.id: reading.uuid for reading in self.latest}
        accelerators = [device for device in names.values() if device.index >= 0]
        return ",".join(uuids.get(device) or str(device.index) for device in accelerators)

    async def start(self) -> None:
        """Return once there is a first reading, or none arrived in time."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(loop,), name="devices", daemon=True).start()
        await self._read_now(FIRST_READ_TIMEOUT)

    def close(self) -> None:
        """End the thread, as soon as the driver lets it."""
        self._closed = True
        self._wake.release()

    async def sample(self) -> None:
        """Read once; call it regularly. After `LOST_AFTER` failed reads every device is shown as full."""
        self._missed = 0 if await self._read_now(self._read_timeout) else self._missed + 1
        if self._missed == LOST_AFTER:
            log.error("the device drivers do not answer: no worker is started until they do")
            self._publish(tuple(_full(reading) for reading in self.latest))

    async def refresh(self) -> Sequence[Reading]:
        """Readings that began after this call, if they arrive in time, else the latest ones."""
        await self._read_now(self._read_timeout)
        return self.latest

    async def settle(self, devices: Collection[DeviceId]) -> None:
        """Return once two readings of `devices`, `SETTLE_INTERVAL` apart, agree, or after `SETTLE_TIMEOUT`.

        In the latter case the higher of the last two readings is published. Main memory alone is read twice at once.
        """
        interval = SETTLE_INTERVAL_HOST if all(device.index == HOST for device in devices) else SETTLE_INTERVAL
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SETTLE_TIMEOUT
        before = after = await self.refresh()
        while loop.time() < deadline:
            if self._closed:
                return
            await asyncio.sleep(interval)
            before, after = after, await self.refresh()
            if agree(before, after, devices):
                return
        names = ", ".join(str(device) for device in devices)
        log.warning("%s: readings did not settle within %g s; using the higher one", names, SETTLE_TIMEOUT)
        used = {reading.id: reading.used for reading in before}
        self._publish(tuple(replace(reading, used=max(reading.used, used.get(reading.id, 0))) for reading in after))

    async def _read_now(self, seconds: float) -> bool:
        """Have the thread read all devices. Returns True if that was done within `seconds`."""
        if self._closed:
            return False
        with self._lock:  # a reading that has begun may not show what is true now
            if self._next is None:
                self._next = asyncio.get_running_loop().create_future()
                self._wake.release()
            request = self._next
        await asyncio.wait({request}, timeout=seconds)
        return request.done() and request.result()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread. One reading serves all requests that were made before it began."""
        while self._wake.acquire():
            with self._lock:
                request, self._next = self._next, None
            if request is None:  # closed
                return
            readings, problems, error = list[Reading](), dict[DeviceId, str](), ""
            try:
                readings, problems = self._devices.read(), dict(self._devices.problems)
            except Exception as failure:  # noqa: BLE001  (logged by `_deliver`)
                error = f"{type(failure).__name__}: {failure}"
            try:
                loop.call_soon_threadsafe(self._deliver, request, readings, problems, error)
            except RuntimeError:  # the loop is closed
                return

    def _deliver(
        self, request: "asyncio.Future[bool]", readings: list[Reading], problems: Mapping[DeviceId, str], error: str
    ) -> None:
        if error and error != self._error:
            log.error("the devices cannot be read: %s", error)
        self._error = error
        if not error:
            for device, problem in problems.items():
                if problem != self._problems.get(device):
                    log.error("%s: no worker is started there", problem)
            self._problems = problems
            self._publish(tuple(_full(reading) if reading.id in problems else reading for reading in readings))
        request.set_result(not error)

    def _publish(self, readings: tuple[Reading, ...]) -> None:
        if readings != self.latest:
            self.latest = readings
            self.on_reading()


def _full(reading: Reading) -> Reading:
    return replace(reading, used=reading.total)


def agree(before: Sequence[Reading], after: Sequence[Reading], devices: Collection[DeviceId]) -> bool:
    """True if the readings of `devices` hardly differ."""
    used = {reading.id: reading.used for reading in before}
    pairs = [(used[reading.id], reading.used) for reading in after if reading.id in devices and reading.id in used]
    return all(abs(x - y) <= max(SETTLE_BYTES, SETTLE_FRACTION * max(x, y)) for x, y in pairs)


class Claim:
    """The reservation of one worker, in bytes by device, from before it starts until its memory is free again."""

    def __init__(self, shared: "SharedReservations", place: Bytes):
        self._shared = shared
        self._place = place
        self._counted: Bytes = dict.fromkeys(place, 0)
        self.unseen: Bytes = place  # the part that no driver shows

    def extend(self, place: Bytes) -> None:
        """Reserve `place`, in addition to what the process holds already. Raises NotStarted."""
        self._place = self.unseen = place
        self._counted = dict.fromkeys(place, 0)
        self._shared.publish()
        self._shared.check(place)

    def count(self, counted: Bytes) -> None:
        """Note how much of it the drivers show by now.

        On a device that `counted` does not contain, they show all of it.
        """
        self._counted = counted
        unseen = {id: max(0, size - counted.get(id, size)) for id, size in self._place.items()}
        if unseen != self.unseen:
            self.unseen = unseen
            self._shared.publish()

    def settle(self, place: Bytes) -> None:
        """Reserve `place` instead, of which the drivers show as much as before."""
        self._place = place
        self.count(self._counted)


class SharedReservations:
    """This machine's devices, with the reservations of the other routers counted as used.

    `folder` is the one that the routers share; None: there is no other router. `read` is called in one thread, like
    that of `devices`, everything else in the event loop's thread.
    """

    def __init__(
        self,
        devices: ReadableDevices,
        folder: Path | None,
        *,
        shared_bytes: Callable[[], int] = lambda: 0,
        latest: Callable[[], Sequence[Reading]] = tuple,
    ):
        """
        shared_bytes: returns the bytes of main memory that this router's workers share.
        latest: returns the readings that plans are made from.
        """
        self._devices = devices
        self._shared_bytes = shared_bytes
        self._latest = latest
        self._folder = folder
        self._claims: set[Claim] = set()
        self._names: Mapping[DeviceId, str] = {}
        self._published: Mapping[str, int] = {}
        self._file: int | None = None
        self._path = Path()

    @property
    def problems(self) -> Mapping[DeviceId, str]:
        return self._devices.problems

    def open(self) -> None:
        """Create this router's file. If that fails, this is logged, and the other routers' files are still read."""
        if self._folder is None:
            return
        name = secrets.token_hex(8)
        self._path, new = self._folder / f"{name}.json", self._folder / f".{name}"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(new, self._path)  # locked by now, so that no router removes it as a stale one
        except OSError as error:
            log.warning("other routers do not see the reservations of this one: %s: %s", new, error.strerror or error)
            with contextlib.suppress(OSError):
                os.unlink(new)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            os.close(self._file)
            self._file = None

    @contextmanager
    def claim(self, place: Bytes) -> Iterator[Claim]:
        """Reserve `place` for a worker, for the length of the block. Raises NotStarted."""
        claim = Claim(self, place)
        self._claims.add(claim)
        self.publish()
        try:
            self.check(place)
            yield claim
        finally:
            self._claims.discard(claim)
            self.publish()

    def check(self, place: Bytes) -> None:
        """Raise NotStarted if another router has reserved more memory of these devices since they were read."""
        now = self._read_others() if place else {}
        for reading in self._latest():
            if reading.id in place and now.get(self._names.get(reading.id, ""), 0) > reading.others:
                raise NotStarted(f"another router has just reserved memory of {reading.id}")

    def publish(self) -> None:
        """Write the bytes that no driver shows, of all claims together, by device. Skipped if they are unchanged."""
        sizes: Counter[str] = Counter()
        for claim in self._claims:
            for id, size in claim.unseen.items():
                if size and (name := self._names.get(id)):
                    sizes[name] += size
        if self._file is None or sizes == self._published:
            return
        self._published = sizes
        data = json.dumps(sizes).encode() + b"\n"
        try:
            os.pwrite(self._file, data, 0)
            os.ftruncate(self._file, len(data))
        except OSError as error:
            log.warning("other routers do not see the reservations of this one: %s", error.strerror or error)

    def read(self) -> list[Reading]:
        """The readings of `devices`, with the reservations of the other routers."""
        readings = self._devices.read()
        self._names = {
            reading.id: MAIN if reading.id.index == HOST or reading.pool else reading.uuid for reading in readings
        }
        if shared := self._shared_bytes():
            readings = [replace(each, shared=shared) if each.id.index == HOST else each for each in readings]
        others = self._read_others()
        if not others:
            return readings
        more = {reading.id: others.get(self._names[reading.id], 0) for reading in readings}
        return [
            replace(each, used=min(each.total, each.used + more[each.id]), others=more[each.id]) for each in readings
        ]

    def _read_others(self) -> Mapping[str, int]:
        """The reservations of all other routers together. Removes the files of routers that have exited."""
        others: Counter[str] = Counter()
        if self._folder is None:
            return others
        for path in self._folder.glob("*.json"):
            if path != self._path:
                with contextlib.suppress(OSError):  # removed meanwhile, or unreadable for this user
                    others.update(_read_file(path))
        return others


def _read_file(path: Path) -> Mapping[str, int]:
    """The content of one router's file; empty if the router has exited, or the content is invalid. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            line = file.read(MAX_FILE_BYTES).partition(b"\n")[0]
        else:  # its router has exited, or it would hold the lock
            os.unlink(path)
            return {}
    try:
        sizes = json.loads(line or b"{}")
    except ValueError:
        return {}
    if not isinstance(sizes, dict):
        return {}
    return {name: size for name, size in sizes.items() if type(size) is int and size > 0}
