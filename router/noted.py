"""What is noted of one of aiohttp's requests while it is answered, and what its query says."""

from collections.abc import Mapping

from aiohttp import web

from worker.protocol.routes import Route, query

ID = web.RequestKey("id", str)
ARRIVED = web.RequestKey("arrived", float)
ROUTE = web.RequestKey("route", Route)
PHASE = web.RequestKey("phase", str)
"""How far a request had come when its client left: queued, starting, streaming; events."""
BUFFERED = web.RequestKey("buffered", int)
IGNORED = web.RequestKey("ignored", dict[str, str])
"""The header that names fields of the body which nobody knows, if there are any."""
MODEL = web.RequestKey("model", str)
STATUS = web.RequestKey("status", int)
"""How it really ended, where that is not what the status line says."""
NO_QUERY: Mapping[str, str] = {}


def asked_of(request: web.Request) -> Mapping[str, str]:
    """What the query says, as far as the table knows its call to read it."""
    if "?" not in request.raw_path:  # the query itself costs more to make than to look for
        return NO_QUERY
    known = query(request[ROUTE])
    return {name: request.query[name] for name in known if name in request.query}
