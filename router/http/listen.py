"""Listening sockets of a router: TCP or a unix socket."""

import contextlib
import errno
import hashlib
import os
import socket
import stat

from router.config.settings import Settings
from router.errors import ConfigError


def bind(settings: Settings) -> list[socket.socket]:
    """Listening sockets for each host of the list, or the unix socket. Raises OSError."""
    bound: list[socket.socket] = []
    for host in settings.host.split(","):
        host = host.strip()
        if host.endswith(".sock"):
            bound.append(_bind_unix(host))
            continue
        number = port(bound[0]) if bound and settings.port == 0 else settings.port
        try:
            found = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except socket.gaierror as unknown:
            raise ConfigError(f"--host {host}: {unknown.strerror}") from None
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            sock.bind(address)
        except OSError as refused:
            sock.close()
            option = "--host" if refused.errno == errno.EADDRNOTAVAIL else "--port"
            message = f"cannot listen on {host} port {number}: {refused.strerror}; choose {option}"
            raise OSError(refused.errno, message) from None
        bound.append(sock)
    return bound


def _bind_unix(path: str) -> socket.socket:
    """Replace a socket that an earlier router left behind. Raises OSError if one is in use, or `path` is no socket."""
    if _is_in_use(path):
        raise OSError(errno.EADDRINUSE, f"cannot listen on {path}: another router listens there; choose --host")
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(path)
    except OSError as refused:
        raise OSError(refused.errno, f"cannot listen on {path}: {refused.strerror}; choose --host") from None
    return sock


def _is_in_use(path: str) -> bool:
    """True if a process accepts connections at `path`."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except TimeoutError:  # a busy process: its backlog is full
            return True
    return True


def name(sock: socket.socket) -> str:
    """The name of the runtime folder of a router that listens on `sock`; routers on other addresses have their own."""
    if sock.family != socket.AF_UNIX:
        return f"run-{port(sock)}"
    path = os.path.abspath(sock.getsockname())
    return f"run-{hashlib.sha256(path.encode()).hexdigest()[:12]}"


def port(sock: socket.socket) -> int:
    """The port of a TCP socket; 0 for a unix socket."""
    return int(sock.getsockname()[1]) if sock.family != socket.AF_UNIX else 0
