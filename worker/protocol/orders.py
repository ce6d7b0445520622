"""Messages from the router to a worker process: the memory grant of an early start, and orders to the fork server."""

import dataclasses
import json
import re
import typing
from dataclasses import dataclass
from typing import Any

# The line that follows the token on stdin of a worker that was started with `Serve.prepare` (early start).


@dataclass(frozen=True, kw_only=True)
class MemoryGrant:
    """Memory is reserved: the worker may open its devices and load weights. The options were unknown at its start."""

    devices: list[str]  # as in `Serve`
    reserved: str = ""  # as in `Serve`
    kv_tokens: int = 0  # as in `Serve`
    visible: str = ""  # value of CUDA_VISIBLE_DEVICES


def encode_grant(grant: MemoryGrant) -> bytes:
    """Return one line, ending in a newline."""
    return json.dumps(dataclasses.asdict(grant), separators=(",", ":")).encode() + b"\n"


def decode_grant(line: bytes) -> MemoryGrant:
    """Parse a line of `encode_grant`. Raises ValueError or TypeError for any other line."""
    return MemoryGrant(**json.loads(line))


# Orders to the fork server, one packet each. Replies are events.


@dataclass(frozen=True, kw_only=True)
class Fork:
    """Fork a worker. The packet carries four descriptors: the child's stdin, stdout and stderr, and a file with a
    `ForkSpec`, because the argv and environment of a worker may be larger than a packet."""

    id: int


@dataclass(frozen=True, kw_only=True)
class Reap:
    """Reap a child of the fork server that has exited and whose process group was killed."""

    pid: int


@dataclass(frozen=True, kw_only=True)
class ImportModules:
    """Import modules that a worker has used, so that later children inherit them."""

    modules: list[str]


@dataclass(frozen=True, kw_only=True)
class ForkSpec:
    """The command line and environment of a forked worker. It has no exec, so both travel in a file."""

    argv: list[str]  # verb first
    env: dict[str, str]


Order = Fork | Reap | ImportModules
MAX_ORDER_BYTES = 1 << 16
_ORDERS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in typing.get_args(Order)}


def encode_order(order: Order) -> bytes:
    """Return one packet."""
    return json.dumps({"order": type(order).__name__.lower(), **dataclasses.asdict(order)}).encode()


def decode_order(packet: bytes) -> Order:
    """Parse a packet of `encode_order`. Raises ValueError, TypeError or KeyError for any other packet."""
    body = json.loads(packet)
    order: Order = _ORDERS[body.pop("order")](**body)
    return order


def is_family_module(module: str) -> bool:
    """True for transformers' code of one model family: modules that the fork server may import because a worker did."""
    return _FAMILY_MODULE.fullmatch(module) is not None


_FAMILY_MODULE = re.compile(
    r"transformers\.models\.[a-z0-9_]+(\.(configuration|modeling|tokenization|processing)_[a-z0-9_]+)?"
)
