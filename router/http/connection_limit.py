"""The limit on client connections: accept as many as there are file descriptors for, leave others in the backlog.

A client takes one descriptor, its request another one to a worker, and an earlier request may have left a third one
open. If clients could take the last descriptor, no worker could be started and no file read for the requests that are
running. So descriptors are counted before a connection is accepted. The alternative, accepting and then rejecting with
503, needs a descriptor itself.
"""

import asyncio
import logging
import resource
import socket
from collections.abc import Callable

log = logging.getLogger("router.connections")

# Descriptors that clients never get: 64 for processes and files, and 128 that a router with twenty workers keeps open.
RESERVED = 192
PER_CLIENT = 3  # descriptors for a client: see above
LEAST, MOST = 16, 1 << 16  # bounds of the number of clients; both are guesses
AT_ONCE = 64  # connections accepted in one pass of the event loop, so that running requests get their turn
RETRY_INTERVAL = 1.0  # seconds until the next try after accept(2) failed
WARNING_INTERVAL = 60.0  # seconds between two log lines with the same message


def capacity() -> int:
    """The number of clients that this process can have at once, by its limit of descriptors."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if limit == resource.RLIM_INFINITY else max(LEAST, (limit - RESERVED) // PER_CLIENT)


class ConnectionLimit:
    """Accepts the clients of one router, on all sockets that it listens on. Must be made on its loop."""

    def __init__(self, make: Callable[[], asyncio.Protocol], most: int | None = None):
        """`make`: creates the protocol of a new client, for which `left` must be called when its connection is lost.
        `most`: clients at once (default: `capacity`)."""
        self.most = most or capacity()
        self.connected: set[object] = set()  # the protocols of all clients
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._accepts = True
        self._connecting: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._warned: dict[str, float] = {}

    def listen(self, sock: socket.socket, backlog: int) -> None:
        """Accept clients from `sock`, which must be bound and is closed by `close`. Raises OSError."""
        sock.setblocking(False)
        sock.listen(backlog)
        self._sockets.append(sock)
        if self._accepts:
            self._loop.add_reader(sock.fileno(), self._accept, sock)

    def left(self, client: object) -> None:
        """Count the client with this protocol no longer: its connection is lost."""
        self.connected.discard(client)
        if not self._accepts and self._retry is None and len(self.connected) < self.most:
            self._resume()

    def close(self) -> None:
        """Accept no more clients."""
        self._pause()
        if self._retry is not None:
            self._retry.cancel()
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()

    def _resume(self) -> None:
        self._accepts, self._retry = True, None
        for sock in self._sockets:
            self._loop.add_reader(sock.fileno(), self._accept, sock)

    def _pause(self) -> None:
        self._accepts = False
        for sock in self._sockets:
            self._loop.remove_reader(sock.fileno())

    def _accept(self, sock: socket.socket) -> None:
        """Accept waiting clients while there is room."""
        for _ in range(AT_ONCE):
            if len(self.connected) >= self.most:
                # The listening socket stays readable, so its reader is removed; otherwise the loop would spin.
                self._pause()
                self._warn(f"{self.most} clients are connected, which is as many as there are descriptors for")
                return
            try:
                client, _ = sock.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:  # it disconnected while it was in the backlog
                continue
            except OSError as error:  # no descriptor or memory left after all, or a broken network (accept(2))
                self._pause()
                self._retry = self._loop.call_later(RETRY_INTERVAL, self._resume)
                self._warn(f"no client can be accepted ({error.strerror or error})")
                return
            protocol = self._make()
            self.connected.add(protocol)
            task = self._loop.create_task(self._connect(client, protocol))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, client: socket.socket, protocol: asyncio.Protocol) -> None:
        try:
            client.setblocking(False)
            if client.family != socket.AF_UNIX:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(lambda: protocol, client)
        except OSError:  # it disconnected meanwhile
            client.close()
            self.left(protocol)

    def _warn(self, message: str) -> None:
        now = self._loop.time()
        if now - self._warned.get(message, -WARNING_INTERVAL) >= WARNING_INTERVAL:
            self._warned[message] = now
            log.warning("%s; others wait in the backlog (raise `ulimit -n` for more)", message)


__all__ = ["ConnectionLimit", "capacity"]
