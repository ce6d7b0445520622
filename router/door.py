"""The door: takes clients in, as many as there are descriptors for; all others wait in the kernel's backlog.

A client takes one descriptor, its request another to a worker, where an earlier one may have left a third open. Were
the last one given to a client, no worker could be started and no file be read for those who are here already. So it is
counted beforehand, and nobody is taken in who would have to be turned away.
"""

import asyncio
import logging
import resource
import socket
from collections.abc import Callable

log = logging.getLogger("router.door")

KEPT = 192
"""Descriptors that clients never get: 64 for what is started or read, and 128 for what a router with twenty workers has
open all the time."""
EACH = 3
"""Descriptors for a client."""
LEAST, MOST = 16, 1 << 16
AT_ONCE = 64
"""Clients taken in before everybody else has a turn."""
PAUSE = 1.0
"""Seconds until the next try where the kernel would not give us a client."""
SILENCE = 60.0
"""Seconds between two lines about the same."""


def room() -> int:
    """Clients that this process may have at once, by its limit of descriptors."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if limit == resource.RLIM_INFINITY else max(LEAST, (limit - KEPT) // EACH)


class Door:
    """Of one router, through all sockets that it listens on. Must be made on its loop."""

    def __init__(self, make: Callable[[], asyncio.Protocol], most: int | None = None):
        """`make`: what speaks to a client; its loss is told by `left`. `most`: clients at once (None: see `room`)."""
        self.most = most or room()
        self.inside: set[object] = set()
        """Protocols of those who are here."""
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._is_open = True
        self._entering: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._told: dict[str, float] = {}

    def listen(self, sock: socket.socket, backlog: int) -> None:
        """Take clients from `sock`, which is bound, from now on; it is the door's to close. Raises OSError."""
        sock.setblocking(False)
        sock.listen(backlog)
        self._sockets.append(sock)
        if self._is_open:
            self._loop.add_reader(sock.fileno(), self._take, sock)

    def left(self, client: object) -> None:
        """The client whose protocol that was is gone."""
        self.inside.discard(client)
        if not self._is_open and self._pause is None and len(self.inside) < self.most:
            self._open()

    def close(self) -> None:
        """Nobody comes in any more."""
        self._shut()
        if self._pause is not None:
            self._pause.cancel()
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()

    def _open(self) -> None:
        self._is_open, self._pause = True, None
        for sock in self._sockets:
            self._loop.add_reader(sock.fileno(), self._take, sock)

    def _shut(self) -> None:
        self._is_open = False
        for sock in self._sockets:
            self._loop.remove_reader(sock.fileno())

    def _take(self, sock: socket.socket) -> None:
        """Those who wait, as far as there is room."""
        for _ in range(AT_ONCE):
            if len(self.inside) >= self.most:
                self._shut()
                self._tell(f"{self.most} clients are connected, which is as many as there are descriptors for")
                return
            try:
                client, _ = sock.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:  # it was in the backlog, and has left
                continue
            except OSError as error:  # no descriptor or memory left after all, or a broken network (accept(2))
                self._shut()
                self._pause = self._loop.call_later(PAUSE, self._open)
                self._tell(f"no client can be taken in ({error.strerror or error})")
                return
            protocol = self._make()
            self.inside.add(protocol)
            task = self._loop.create_task(self._enter(client, protocol))
            self._entering.add(task)
            task.add_done_callback(self._entering.discard)

    async def _enter(self, client: socket.socket, protocol: asyncio.Protocol) -> None:
        try:
            client.setblocking(False)
            if client.family != socket.AF_UNIX:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(lambda: protocol, client)
        except OSError:  # it has left
            client.close()
            self.left(protocol)

    def _tell(self, what: str) -> None:
        now = self._loop.time()
        if now - self._told.get(what, -SILENCE) >= SILENCE:
            self._told[what] = now
            log.warning("%s; others wait until there is room (a higher `ulimit -n` makes more)", what)


__all__ = ["Door", "room"]
