"""The argument and the results of API functions: one call that the router answers itself.

Every function that `worker.protocol.routes` names has the signature `async def function(call: ApiCall) -> Result`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from aiohttp import web

from router.api.request_log import Requests
from router.config.settings import Key
from router.registry.pulls import Hub
from router.registry.registry import Site
from worker.protocol.dialects import Dialect
from worker.protocol.routes import Route


@dataclass(frozen=True, slots=True)
class Reply:
    """A JSON response with a status code or headers of its own."""

    body: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Frames:
    """A response that is sent frame by frame until the client disconnects."""

    frames: AsyncIterator[bytes]
    dialect: Dialect = Dialect.ADMIN
    """The dialect of the frames: server-sent events unless stated."""


class RendersMetrics(Protocol):
    """The metrics registry, as API functions use it."""

    content_type: ClassVar[str]

    def render(self, model: str | None = None, member: str = "") -> bytes:
        """The metrics in Prometheus text format; with `model`, those of one model."""


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of one router that API functions use."""

    site: Site
    hub: Hub
    requests: Requests
    metrics: RendersMetrics


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One request to a route that the router answers itself."""

    request: web.Request
    route: Route
    query: Mapping[str, str]  # the parameters that the route declares
    key: Key
    services: Services
    body: Callable[[], Awaitable[dict[str, Any]]]  # reads the body, a JSON object; raises ApiError

    @property
    def site(self) -> Site:
        return self.services.site

    @property
    def hub(self) -> Hub:
        return self.services.hub

    @property
    def path(self) -> Mapping[str, str]:
        """The variables of the path, by name."""
        return self.request.match_info

    @property
    def last_event_id(self) -> int | None:
        """The id of the last event that the client has received; None for a new client."""
        text = self.request.headers.get("Last-Event-ID", "")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None

    def model_id(self) -> str:
        """The id of the model that the path or the query names. Raises BadRequest, ModelNotFound."""
        id, _ = self.site.choose(self.key, path=self.path.get("id"), body=None, query=self.query)
        return id


Result = Reply | Frames | web.Response | dict[str, Any] | list[Any]
"""A dict or a list is sent as JSON with status 200."""
ApiFunction = Callable[[ApiCall], Awaitable[Result]]

__all__ = ["ApiCall", "ApiFunction", "Frames", "Reply", "Result", "Services"]
