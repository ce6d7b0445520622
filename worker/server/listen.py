"""The address of a worker's server: a unix socket, or a TCP port for workers that are started by hand."""

import contextlib
import errno
import ipaddress
import os
import re

from aiohttp import web

from worker.errors import StartError
from worker.protocol.events import Exit
from worker.protocol.memory import SOCKET_PATH_BYTES

BACKLOG = 1024


async def listen(runner: web.AppRunner, address: str, *, has_token: bool) -> str:
    """Set up `runner` and bind it to `address` (`unix:PATH` or `tcp:HOST:PORT`). Returns the address with the actual
    port. Without a token only loopback is allowed. Raises StartError for an unusable address."""
    kind, _, place = address.partition(":")
    if kind not in ("unix", "tcp") or not place:
        raise StartError("--listen must be unix:PATH or tcp:HOST:PORT", Exit.USAGE)
    await runner.setup()
    try:
        if kind == "unix":
            return await _listen_unix(runner, place, may_create_folder=has_token)
        return await _listen_tcp(runner, place, loopback_only=not has_token)
    except OSError as error:
        await runner.cleanup()
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy, code = ("free space there", Exit.DISK_FULL) if is_full else ("choose another --listen", Exit.USAGE)
        raise StartError(f"cannot listen on {address}: {why}; {remedy}", code) from None
    except StartError:
        await runner.cleanup()
        raise


def unlink(address: str) -> None:
    """Remove the file of a unix socket; nothing for TCP."""
    kind, _, path = address.partition(":")
    if kind == "unix":
        with contextlib.suppress(OSError):
            os.unlink(path)


async def _listen_unix(runner: web.AppRunner, path: str, *, may_create_folder: bool) -> str:
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        raise StartError(
            f"--listen: the path of a socket has at most {SOCKET_PATH_BYTES} bytes; shorten it", Exit.USAGE
        )
    if may_create_folder:  # the folder is the router's; cleanup tools may have deleted it since the worker started
        os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
    await web.UnixSite(runner, path, backlog=BACKLOG).start()
    os.chmod(path, 0o600)
    return f"unix:{path}"


async def _listen_tcp(runner: web.AppRunner, place: str, *, loopback_only: bool) -> str:
    host, _, port = place.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise StartError("--listen must be tcp:HOST:PORT with a port between 0 and 65535", Exit.USAGE)
    if loopback_only and not _is_loopback(host):
        raise StartError(
            f"--listen: without a token only loopback is served, and {host} is not; use tcp:127.0.0.1:{port}",
            Exit.USAGE,
        )
    await web.TCPSite(runner, host, int(port), backlog=BACKLOG).start()
    bound = runner.addresses[0]
    return f"tcp:[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"tcp:{bound[0]}:{bound[1]}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
