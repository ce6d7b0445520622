"""The latest readings of this machine's devices, and when they have settled.

Drivers may block for seconds or for ever, so they are asked in one thread of its own, which the program's end does not
wait for. A device that cannot be read is shown as full: nobody starts where it is not known that there is room.
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

READ_TIMEOUT = 1.0
"""Seconds that one look at all devices may take."""
FIRST_READ_TIMEOUT = 15.0
"""The first one may have to wake a driver."""
LOST_AFTER = 5
"""Looks without an answer after which nothing is known any more."""
SETTLE_INTERVAL = 0.1
SETTLE_INTERVAL_HOST = 0.0
"""The kernel gives a process's main memory back before its parent can see that it has ended; only a driver is late."""
SETTLE_TIMEOUT = 5.0
SETTLE_BYTES = 256 << 20
SETTLE_FRACTION = 0.02
"""Two readings agree within the larger of these."""
_MOST_QUESTIONS = 64
"""Put to a driver that does not answer; later ones wait with the last of them."""


class Devices(Protocol):
    """What can be read; see `router.launch.devices`. Called in one thread, never twice at a time."""

    def read(self) -> list[Reading]:
        """Every device; may block."""

    @property
    def problems(self) -> Mapping[DeviceId, str]:
        """Why a device cannot be used at present; of the last `read`."""


class Probe:
    """Reads devices in its own thread, from `start` to `close`."""

    def __init__(self, devices: Devices, on_reading: Callable[[], None], *, read_timeout: float = READ_TIMEOUT):
        """`on_reading` is called on the loop after each reading that differs from the one before."""
        self.on_reading = on_reading
        self._read_timeout = read_timeout
        self._devices = devices
        self._latest: tuple[Reading, ...] = ()
        self._problems: Mapping[DeviceId, str] = {}
        self._questions: queue.SimpleQueue[asyncio.Future[None] | None] = queue.SimpleQueue()
        self._asked: list[asyncio.Future[None]] = []
        self._missed = 0
        self._closed = False
        self._error = ""

    @property
    def latest(self) -> Sequence[Reading]:
        return self._latest

    @property
    def problems(self) -> Mapping[DeviceId, str]:
        """Why a device is shown as full, for people."""
        return self._problems

    async def start(self) -> None:
        """Returns once there is a first reading, or none came in time."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(loop,), name="devices", daemon=True).start()
        await self._ask(FIRST_READ_TIMEOUT)

    def close(self) -> None:
        """End the thread, as soon as the driver lets it."""
        self._closed = True
        self._questions.put(None)

    async def look(self) -> None:
        """One look, to be taken regularly; after `LOST_AFTER` of them in vain every device is shown as full."""
        self._missed = 0 if await self._ask(self._read_timeout) else self._missed + 1
        if self._missed == LOST_AFTER:
            log.error("the device drivers do not answer: nothing new is started until they do")
            self._problems = {each.id: "its driver does not answer" for each in self._latest}
            self._publish(tuple(_full(each) for each in self._latest))

    async def refresh(self) -> Sequence[Reading]:
        """Readings that were begun after this call, if they come in time; else the latest ones."""
        await self._ask(self._read_timeout)
        return self._latest

    async def settle(self, devices: Collection[DeviceId]) -> None:
        """Returns once two readings of `devices`, `SETTLE_INTERVAL` apart, agree, or after `SETTLE_TIMEOUT`; then the
        worse of the last two stands, until the next one. Main memory alone is looked at twice at once."""
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
        log.warning("%s: readings did not settle within %g s; the worse one stands", names, SETTLE_TIMEOUT)
        used = {reading.id: reading.used for reading in before}
        self._publish(tuple(replace(each, used=max(each.used, used.get(each.id, 0))) for each in after))

    async def _ask(self, seconds: float) -> bool:
        """Whether an answer to a question that was put now came within `seconds`."""
        if self._closed:
            return False
        if len(self._asked) < _MOST_QUESTIONS:
            self._asked.append(asyncio.get_running_loop().create_future())
            self._questions.put(self._asked[-1])
        question = self._asked[-1]
        await asyncio.wait({question}, timeout=seconds)
        return question.done()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread: one reading answers everybody who asked before it was begun."""
        while (question := self._questions.get()) is not None:
            questions = [question]
            with contextlib.suppress(queue.Empty):
                while (question := self._questions.get_nowait()) is not None:
                    questions.append(question)
            answer: tuple[list[Reading], Mapping[DeviceId, str]] | str
            try:
                answer = self._devices.read(), self._devices.problems
            except Exception as error:  # noqa: BLE001  (delivered to the loop, which says so)
                answer = f"{type(error).__name__}: {error}"
            try:
                loop.call_soon_threadsafe(self._deliver, questions, answer)
            except RuntimeError:  # the loop is closed
                return
            if question is None:
                return

    def _deliver(
        self, questions: Sequence["asyncio.Future[None]"], answer: tuple[list[Reading], Mapping[DeviceId, str]] | str
    ) -> None:
        for question in questions:
            self._asked.remove(question)
        if isinstance(answer, str):
            if answer != self._error:
                log.error("the devices cannot be read: %s", answer)
            self._error = answer
            return  # who asked waits in vain, as with a driver that hangs
        self._error = ""
        for question in questions:
            if not question.done():
                question.set_result(None)
        readings, self._problems = answer
        self._publish(tuple(_full(each) if each.id in self._problems else each for each in readings))

    def _publish(self, readings: tuple[Reading, ...]) -> None:
        if readings != self._latest:
            self._latest = readings
            self.on_reading()


def _full(reading: Reading) -> Reading:
    return replace(reading, used=reading.total)


def agree(before: Sequence[Reading], after: Sequence[Reading], devices: Collection[DeviceId]) -> bool:
    """Whether nothing moves any more on `devices`."""
    used = {reading.id: reading.used for reading in before}
    pairs = [(used[each.id], each.used) for each in after if each.id in devices and each.id in used]
    return all(abs(one - other) <= max(SETTLE_BYTES, SETTLE_FRACTION * max(one, other)) for one, other in pairs)
