"""One HTTP request and the seam to the transport that has read it.

`Incoming` is a request on its way through the pipeline. `ForwardedRequest` is what the proxy needs of it, once a worker
is to answer. All write through an `Outlet`, which a transport implements.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from router.config.api_keys import ApiKey
from router.registry.auth import NO_KEY
from worker.protocol.dialects import Dialect
from worker.protocol.routes import Route

CLOSE = {"Connection": "close"}  # the header of a response after which the connection cannot be used


class Outlet(Protocol):
    """One request as its transport has read it, and the way back to the client for one response.

    `begin`, `write` and `end` write at once if the transport can. They return None then, and otherwise an awaitable:
    it ends when there is room again and raises ConnectionError if the client is gone. Returning it, instead of being
    coroutines, lets the streaming path write without a task switch. The first design had a second set of methods for
    that, which each transport had to keep equal to the first.
    """

    @property
    def headers(self) -> Mapping[str, str]:
        """The request's headers, by lower-case name."""

    @property
    def is_old(self) -> bool:
        """True for HTTP/1.0: a response without a length ends with the connection."""

    @property
    def transport(self) -> asyncio.Transport | None:
        """None once the client is gone."""

    @property
    def has_begun(self) -> bool:
        """True once the status line is written."""

    @property
    def content_length(self) -> int | None:
        """The stated length of the request's body; None if it is not stated."""

    def check_framing(self) -> None:
        """Reject a request that another server could frame or route differently. Raises ApiError."""

    def received(self) -> bytes | None:
        """The request's body if all of it has arrived, else None."""

    def parts(self) -> AsyncIterator[bytes]:
        """The request's body as it arrives. Raises BadRequest."""

    def has_room(self, size: int) -> bool:
        """True if `size` bytes can be written now, without waiting."""

    def begin(
        self, status: int, headers: Mapping[str, str], data: bytes = b"", *, is_whole: bool = False
    ) -> Awaitable[None] | None:
        """Write the head and the first `data` of the body. `is_whole`: there is no more, and the length is stated."""

    def write(self, data: bytes) -> Awaitable[None] | None:
        """Write more of the body."""

    def end(self) -> Awaitable[None] | None:
        """Write the end of the body."""


@dataclass(slots=True, kw_only=True)
class ForwardedRequest:
    """One request for a worker. `model` is its id, `body` the client's bytes. Not modified after it is made; it is not
    declared frozen because that makes construction five times slower."""

    route: Route
    model: str
    body: bytes
    stream: bool
    autoload: bool | None  # None: the preset's setting
    request_id: str
    arrived: float
    read: float  # when the last byte had arrived, by the clock of `arrived`
    timeout: float  # seconds for the whole request; 0.0: no limit
    adapter: str = ""  # the adapter that is named outside the body
    outside_name: str = ""  # the model's name as the client wrote it, if the body does not contain it
    stream_dialect: Dialect | None = None  # the API whose frames the stream has; None: that of the path


@dataclass(slots=True, eq=False, kw_only=True)
class Incoming:
    """One HTTP request. The transport fills in the facts; the pipeline adds what its steps find out."""

    outlet: Outlet
    method: str
    path: str
    client: str  # its address; empty for a unix socket
    id: str  # the value of X-Request-Id in the response and in the log
    arrived: float
    route: Route | None  # None: no route has this path and method
    path_id: str | None = None  # the model named in the path
    query: Mapping[str, str] = field(default_factory=dict)  # parameters that the route declares; others are ignored
    changes_state: bool = True  # False for a GET that triggers nothing; any web page may send such requests
    # Found out by the pipeline:
    key: ApiKey = NO_KEY
    body: bytes = b""
    buffered: int = 0  # bytes of its body that are counted in `Bodies.buffered`
    model: str = "unknown"  # the id of the model
    phase: str = "queued"  # the phase that a disconnect is counted under: queued, starting, streaming, events
    ignored: Mapping[str, str] = field(default_factory=dict)  # the header that lists unknown body fields
    status: int = 499  # the outcome, which can differ from the status line; 499: the client disconnected
