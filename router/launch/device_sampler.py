"""Regular readings of this machine's devices, and the wait until they have settled.

Drivers may block for seconds or for ever, so they are read in a thread of its own, which the program's exit does not
wait for. A device that cannot be read is shown as full: no worker starts where free memory is unknown.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from router.planner.ledger import HOST, DeviceId, Reading

log = logging.getLogger("router.launch.interface")

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
_MAX_PENDING = 64  # reads that are queued for a driver that does not answer; later ones share the last one


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
        self._latest: tuple[Reading, ...] = ()
        self._problems: Mapping[DeviceId, str] = {}
        self._requests: queue.SimpleQueue[asyncio.Future[None] | None] = queue.SimpleQueue()
        self._pending: list[asyncio.Future[None]] = []
        self._missed = 0
        self._closed = False
        self._error = ""

    @property
    def latest(self) -> Sequence[Reading]:
        return self._latest

    @property
    def problems(self) -> Mapping[DeviceId, str]:
        """For each device that is shown as full because it cannot be read, the reason, for people."""
        return self._problems

    async def start(self) -> None:
        """Return once there is a first reading, or none arrived in time."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(loop,), name="devices", daemon=True).start()
        await self._read_now(FIRST_READ_TIMEOUT)

    def close(self) -> None:
        """End the thread, as soon as the driver lets it."""
        self._closed = True
        self._requests.put(None)

    async def sample(self) -> None:
        """Read once; call it regularly. After `LOST_AFTER` failed reads every device is shown as full."""
        self._missed = 0 if await self._read_now(self._read_timeout) else self._missed + 1
        if self._missed == LOST_AFTER:
            log.error("the device drivers do not answer: no worker is started until they do")
            self._problems = {reading.id: "its driver does not answer" for reading in self._latest}
            self._publish(tuple(_full(reading) for reading in self._latest))

    async def refresh(self) -> Sequence[Reading]:
        """Readings that began after this call, if they arrive in time, else the latest ones."""
        await self._read_now(self._read_timeout)
        return self._latest

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
        if len(self._pending) < _MAX_PENDING:
            self._pending.append(asyncio.get_running_loop().create_future())
            self._requests.put(self._pending[-1])
        request = self._pending[-1]
        await asyncio.wait({request}, timeout=seconds)
        return request.done()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread. One reading serves all requests that were made before it began."""
        while (request := self._requests.get()) is not None:
            requests = [request]
            with contextlib.suppress(queue.Empty):
                while (request := self._requests.get_nowait()) is not None:
                    requests.append(request)
            result: tuple[list[Reading], Mapping[DeviceId, str]] | str
            try:
                result = self._devices.read(), self._devices.problems
            except Exception as error:  # noqa: BLE001  (logged by `_deliver`)
                result = f"{type(error).__name__}: {error}"
            try:
                loop.call_soon_threadsafe(self._deliver, requests, result)
            except RuntimeError:  # the loop is closed
                return
            if request is None:
                return

    def _deliver(
        self, requests: Sequence["asyncio.Future[None]"], result: tuple[list[Reading], Mapping[DeviceId, str]] | str
    ) -> None:
        for request in requests:
            self._pending.remove(request)
        if isinstance(result, str):
            if result != self._error:
                log.error("the devices cannot be read: %s", result)
            self._error = result
            return  # callers time out, as with a driver that hangs
        self._error = ""
        for request in requests:
            if not request.done():
                request.set_result(None)
        readings, self._problems = result
        self._publish(tuple(_full(reading) if reading.id in self._problems else reading for reading in readings))

    def _publish(self, readings: tuple[Reading, ...]) -> None:
        if readings != self._latest:
            self._latest = readings
            self.on_reading()


def _full(reading: Reading) -> Reading:
    return replace(reading, used=reading.total)


def agree(before: Sequence[Reading], after: Sequence[Reading], devices: Collection[DeviceId]) -> bool:
    """True if the readings of `devices` hardly differ."""
    used = {reading.id: reading.used for reading in before}
    pairs = [(used[reading.id], reading.used) for reading in after if reading.id in devices and reading.id in used]
    return all(abs(x - y) <= max(SETTLE_BYTES, SETTLE_FRACTION * max(x, y)) for x, y in pairs)
