"""Messages from the router to a worker: the line that a prepared worker waits for, and orders to the fork server."""

import dataclasses
import json
import re
import typing
from dataclasses import dataclass
from typing import Any

# The line that follows the token on stdin of a worker that was started with `Serve.prepare`.


@dataclass(frozen=True, kw_only=True)
class Go:
    """Memory is reserved now. Contains the options that were not known at the start of the worker: `devices` and
    `reserved` as in `Serve`, and `visible`, the new value of CUDA_VISIBLE_DEVICES."""

    devices: list[str]
    reserved: str = ""
    visible: str = ""


def encode_go(go: Go) -> bytes:
    """One line, ending in a newline."""
    return json.dumps(dataclasses.asdict(go), separators=(",", ":")).encode() + b"\n"


def decode_go(line: bytes) -> Go:
    """Raises ValueError or TypeError if the line is none."""
    return Go(**json.loads(line))


# Orders to the fork server, one packet each. Replies are events.


@dataclass(frozen=True, kw_only=True)
class Fork:
    """Fork a worker. The packet carries four descriptors: the new process's stdin, stdout and stderr, and a file that
    contains a Birth."""

    id: int


@dataclass(frozen=True, kw_only=True)
class Reap:
    """Reap a child of the fork server that has exited and whose process group was killed."""

    pid: int


@dataclass(frozen=True, kw_only=True)
class Import:
    """Import these modules, which a worker has used, before the next fork."""

    modules: list[str]


@dataclass(frozen=True, kw_only=True)
class Call:
    """Ask for a Here event."""


@dataclass(frozen=True, kw_only=True)
class Birth:
    """The start parameters of a forked worker, instead of a command line. `argv`: verb first."""

    argv: list[str]
    env: dict[str, str]


Order = Fork | Reap | Import | Call
MAX_ORDER_BYTES = 1 << 16
_ORDERS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in typing.get_args(Order)}


def encode_order(order: Order) -> bytes:
    """One packet."""
    return json.dumps({"order": type(order).__name__.lower(), **dataclasses.asdict(order)}).encode()


def decode_order(packet: bytes) -> Order:
    """The order in `packet`. Raises ValueError, TypeError or KeyError if it is none."""
    body = json.loads(packet)
    order: Order = _ORDERS[body.pop("order")](**body)
    return order


def is_warmable(module: str) -> bool:
    """True if the fork server may import `module` because a worker did: transformers' code of one model family."""
    return _FAMILY_MODULE.fullmatch(module) is not None


_FAMILY_MODULE = re.compile(
    r"transformers\.models\.[a-z0-9_]+(\.(configuration|modeling|tokenization|processing)_[a-z0-9_]+)?"
)
