"""Reservations that the routers of one machine share, of memory that the drivers do not show as used yet.

A load takes its memory bit by bit, and the kernel counts pages of mapped files as available. So each router writes into
a file of its own how much of its workers' reservations is in no driver's figure, and counts the other routers' figures
as used. A router keeps its file locked for as long as it lives.

Two routers that start a worker within the same milliseconds still do not see each other.
"""

import contextlib
import fcntl
import json
import logging
import os
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from router.launch.device_sampler import ReadableDevices
from router.planner.ledger import HOST, Bytes, DeviceId, Reading

log = logging.getLogger("router.launch.interface")

# Main memory's name in the files. Accelerators have their UUID, as their numbers differ between routers.
MAIN = "cpu"
MAX_FILE_BYTES = 1 << 16  # of a file that is read


class Claim:
    """The reservation of one worker, in bytes by device, from before it starts until its memory is free again."""

    def __init__(self, shared: "SharedReservations", place: Bytes):
        self._shared = shared
        self._place = place
        self.unseen: Bytes = place  # the part that no driver shows

    def extend(self, place: Bytes) -> None:
        """Reserve `place`, in addition to what the process holds already."""
        self._place = self.unseen = place
        self._shared.publish()

    def count(self, counted: Bytes) -> None:
        """Note how much of it the drivers show by now.

        On a device that `counted` does not contain, they show all of it.
        """
        unseen = {id: max(0, size - counted.get(id, size)) for id, size in self._place.items()}
        if unseen != self.unseen:
            self.unseen = unseen
            self._shared.publish()


class SharedReservations:
    """This machine's devices, with the reservations of the other routers counted as used.

    `folder` is the one that the routers share; None: there is no other router. `read` is called in one thread, like
    that of `devices`, everything else in the event loop's thread.
    """

    def __init__(self, devices: ReadableDevices, folder: Path | None):
        self._devices = devices
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
        """Reserve `place` for a worker, for the length of the block."""
        claim = Claim(self, place)
        self._claims.add(claim)
        self.publish()
        try:
            yield claim
        finally:
            self._claims.discard(claim)
            self.publish()

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
        others = self._read_others()
        if not others:
            return readings
        more = {reading.id: others.get(self._names[reading.id], 0) for reading in readings}
        return [replace(reading, used=min(reading.total, reading.used + more[reading.id])) for reading in readings]

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
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            line = os.pread(file, MAX_FILE_BYTES, 0).partition(b"\n")[0]
        else:  # its router has exited, or it would hold the lock
            os.unlink(path)
            return {}
    finally:
        os.close(file)
    try:
        sizes = json.loads(line or b"{}")
    except ValueError:
        return {}
    if not isinstance(sizes, dict):
        return {}
    return {name: size for name, size in sizes.items() if type(size) is int and size > 0}


__all__ = ["Claim", "SharedReservations"]
