"""Relay of one stream of events from a worker to a client: whole events, byte for byte.

The loop in `run` handles every event. A callback takes over from it while the client keeps up: the worker's connection
calls it as bytes arrive, and it writes to the client's connection without waking the loop's coroutine. A task switch
for each event is most of the cost of a stream of short ones. The callback returns False, having written nothing, where
it would have to wait; the bytes then go through the loop.

Rejected: such a callback for a whole response, too. In a run of 15 rounds it saved 8 % of a request's CPU at 1
connection and 1 % at 16, by medians on a busy machine. Rejected: to forward a chunk that arrives alone without parsing
it. In three pairs of runs of scripts/bench_proxy it saved 6 to 14 % of the CPU for each chunk of a paced stream at 16
connections (1.3 to 3.4 µs), and nothing at 64.
"""

import time

from router.errors import WorkerCrashed
from router.http.response import ProxiedResponse
from router.launch.worker_client import Exchange
from worker.protocol.routes import IGNORED_FIELDS_HEADER

MAX_TAIL_BYTES = 1 << 20  # the largest incomplete event that is kept until its end arrives


class EventRelay:
    """Forwards the events of one stream."""

    __slots__ = ("_end", "_exchange", "_form", "_outlet", "_response", "_tail")

    def __init__(self, exchange: Exchange, response: ProxiedResponse):
        self._exchange = exchange
        self._response = response
        self._outlet = response.outlet
        self._form = response.form
        self._end = response.form.end
        self._tail = b""  # the beginning of an event whose end has not arrived

    async def run(self, headers: dict[str, str]) -> None:
        """Forward all events. `headers`: those of the response, if it has not begun. Raises ApiError, ClientGone."""
        exchange, response = self._exchange, self._response
        ignored = exchange.headers.get(IGNORED_FIELDS_HEADER.lower(), "")
        if response.committed and ignored:
            await response.comment(f"ignored-fields {ignored}")
        while chunk := await exchange.read():
            events = self._whole_events(chunk)
            if not events:
                if len(self._tail) > MAX_TAIL_BYTES:
                    raise WorkerCrashed(f"{response.request.model}: its worker sent an event that does not end")
                continue
            if response.first_byte is None and self._form.has_data(events):
                response.first_byte = time.monotonic()  # comments do not count
            if response.committed:
                await response.write(events)
            else:
                await response.commit(exchange.status, headers, events)
            response.events_sent = events
            exchange.sink = self._forward_events
        if not response.committed:
            await response.commit(exchange.status, headers)
        if self._tail:
            await response.write(self._tail)
        await response.finish()

    def _whole_events(self, data: bytes) -> bytes:
        """Return the whole events in the tail and `data`, and keep the rest as the tail."""
        seen = self._tail + data if self._tail else data
        at = seen.rfind(self._end) + len(self._end)
        if at < len(self._end):
            self._tail = seen
            return b""
        self._tail = seen[at:]
        return seen if at == len(seen) else seen[:at]

    def _forward_events(self, data: bytes) -> bool:
        """Forward the whole events in `data` and keep the rest."""
        before, response = self._tail, self._response
        events = self._whole_events(data)
        if not (self._outlet.has_room(len(events)) if events else len(self._tail) <= MAX_TAIL_BYTES):
            self._tail = before  # the loop gets the same bytes
            return False
        if events:
            self._outlet.write(events)
            if response.first_byte is None and self._form.has_data(events):
                response.first_byte = time.monotonic()
            response.events_sent = events
        return True
