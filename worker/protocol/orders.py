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
    """There is room now. What was not known when the worker was started: `devices` and `reserved` as in `Serve`, and
    `visible`, what CUDA_VISIBLE_DEVICES is to be from now on."""

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
    """Bring a worker into the world. With the packet come four descriptors: the new process's stdin, stdout and stderr,
    and a file that holds a Birth."""

    id: int


@dataclass(frozen=True, kw_only=True)
class Reap:
    """This child of the nursery has ended, and its group was killed: it may go."""

    pid: int


@dataclass(frozen=True, kw_only=True)
class Import:
    """These modules were wanted by a worker: have them before the next one is born."""

    modules: list[str]


@dataclass(frozen=True, kw_only=True)
class Call:
    """Say that you are there."""


@dataclass(frozen=True, kw_only=True)
class Birth:
    """What a forked worker begins with, in place of a command line. `argv`: verb first."""

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
    """Whether a nursery may import `module` because a worker did: transformers' own code for one family of models."""
    return _FAMILY_MODULE.fullmatch(module) is not None


_FAMILY_MODULE = re.compile(
    r"transformers\.models\.[a-z0-9_]+(\.(configuration|modeling|tokenization|processing)_[a-z0-9_]+)?"
)
