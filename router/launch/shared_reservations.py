"""What routers that share this machine have set aside for their workers, and no driver shows yet.

A load takes its memory bit by bit, and of files that are mapped the kernel says that anybody may have the pages. So
each router tells those beside it, in a file of its own, how much of what it has given to its workers is in nobody's
figure, and counts what they tell as used. A file is locked by the router that writes it, for as long as that lives.

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

from router.launch.device_sampler import Devices
from router.planner.ledger import HOST, Bytes, DeviceId, Reading

log = logging.getLogger("router.launch.interface")

MAIN = "cpu"
"""What main memory is called in the files; accelerators by UUID, as their numbers differ from router to router."""
MOST_BYTES = 1 << 16
"""Of a file that is read."""


class Claim:
    """What one worker was given, in bytes by device, from before it is born until its memory is back."""

    def __init__(self, neighbours: "Neighbours", place: Bytes):
        self._neighbours = neighbours
        self._place = place
        self.unseen: Bytes = place
        """Of it, what no driver shows."""

    def give(self, place: Bytes) -> None:
        """So much more than its process holds."""
        self._place = self.unseen = place
        self._neighbours.tell()

    def count(self, counted: Bytes) -> None:
        """So much of it is in the figures of drivers by now; all of it on a device of which nothing is said."""
        unseen = {id: max(0, size - counted.get(id, size)) for id, size in self._place.items()}
        if unseen != self.unseen:
            self.unseen = unseen
            self._neighbours.tell()


class Neighbours:
    """This machine's devices, with what the routers beside this one have set aside counted as used.

    `folder` is theirs together; without one nobody is beside this router. To be read in one thread, as `devices` are;
    all else belongs to the loop's.
    """

    def __init__(self, devices: Devices, folder: Path | None):
        self._devices = devices
        self._folder = folder
        self._claims: set[Claim] = set()
        self._names: Mapping[DeviceId, str] = {}
        self._told: Mapping[str, int] = {}
        self._file: int | None = None
        self._path = Path()

    @property
    def problems(self) -> Mapping[DeviceId, str]:
        return self._devices.problems

    def open(self) -> None:
        """Have a file of one's own; where there can be none, the others are heard all the same."""
        if self._folder is None:
            return
        name = secrets.token_hex(8)
        self._path, new = self._folder / f"{name}.json", self._folder / f".{name}"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(new, self._path)  # locked by now: nobody takes it for one that was left
        except OSError as error:
            log.warning("routers beside this one do not hear what it sets aside: %s: %s", new, error.strerror or error)
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
        """A worker is given so much, for the length of the block."""
        claim = Claim(self, place)
        self._claims.add(claim)
        self.tell()
        try:
            yield claim
        finally:
            self._claims.discard(claim)
            self.tell()

    def tell(self) -> None:
        """Write down what no driver shows of all claims together, by device."""
        sizes: Counter[str] = Counter()
        for claim in self._claims:
            for id, size in claim.unseen.items():
                if size and (name := self._names.get(id)):
                    sizes[name] += size
        if self._file is None or sizes == self._told:
            return
        self._told = sizes
        data = json.dumps(sizes).encode() + b"\n"
        try:
            os.pwrite(self._file, data, 0)
            os.ftruncate(self._file, len(data))
        except OSError as error:
            log.warning("routers beside this one do not hear what it sets aside: %s", error.strerror or error)

    def read(self) -> list[Reading]:
        """As `devices` say, with what the others have set aside."""
        readings = self._devices.read()
        self._names = {each.id: MAIN if each.id.index == HOST or each.pool else each.uuid for each in readings}
        heard = self._hear()
        if not heard:
            return readings
        more = {each.id: heard.get(self._names[each.id], 0) for each in readings}
        return [replace(each, used=min(each.total, each.used + more[each.id])) for each in readings]

    def _hear(self) -> Mapping[str, int]:
        """What all the others say together; files that nobody holds any more are removed."""
        heard: Counter[str] = Counter()
        if self._folder is None:
            return heard
        for path in self._folder.glob("*.json"):
            if path != self._path:
                with contextlib.suppress(OSError):  # it has gone meanwhile, or is not for us
                    heard.update(_said(path))
        return heard


def _said(path: Path) -> Mapping[str, int]:
    """What one router says in its file; nothing if that is gone, or says it badly. Raises OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            line = os.pread(file, MOST_BYTES, 0).partition(b"\n")[0]
        else:
            os.unlink(path)
            return {}
    finally:
        os.close(file)
    try:
        said = json.loads(line or b"{}")
    except ValueError:
        return {}
    if not isinstance(said, dict):
        return {}
    return {name: size for name, size in said.items() if type(size) is int and size > 0}


__all__ = ["Claim", "Neighbours"]
