"""The argument and the results of API functions: one call that the router answers itself.

Every function that `worker.protocol.routes` names has the signature `async def function(call: ApiCall) -> ApiResult`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from router.api.metrics import Metrics
from router.api.request_log import RequestLog
from router.config.api_keys import ApiKey
from router.errors import BadRequest
from router.registry.pulls import HubModels
from router.registry.registry import Registry
from worker.protocol.dialects import Dialect
from worker.protocol.routes import Route

TRUE, FALSE = frozenset({"true", "1"}), frozenset({"false", "0"})


@dataclass(frozen=True, slots=True)
class JsonReply:
    """A JSON response with a status code or headers of its own."""

    body: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FrameStream:
    """A response that is sent frame by frame until the client disconnects."""

    frames: AsyncIterator[bytes]
    dialect: Dialect = Dialect.ADMIN  # determines the media type; ADMIN: server-sent events
    first: bytes = b": open\n\n"  # sent before the frames; a comment of server-sent events


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of one router that API functions use."""

    registry: Registry
    hub: HubModels
    requests: RequestLog
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One request to a route that the router answers itself."""

    request: web.Request
    route: Route
    query: Mapping[str, str]  # the parameters that the route declares
    key: ApiKey
    services: Services
    body: Callable[[], Awaitable[dict[str, Any]]]  # reads the body, a JSON object; raises ApiError

    @property
    def registry(self) -> Registry:
        return self.services.registry

    @property
    def hub(self) -> HubModels:
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
        id, _ = self.registry.choose(self.key, path=self.path.get("id"), body=None, query=self.query)
        return id


def flag(query: Mapping[str, str], name: str) -> bool | None:
    """A boolean of the query; None if it is missing. Raises BadRequest."""
    text = query.get(name)
    if text is None:
        return None
    if text.casefold() in TRUE:
        return True
    if text.casefold() in FALSE:
        return False
    raise BadRequest(f"{name} must be true, 1, false or 0, not '{text[:40]}'", param=name)


def number(query: Mapping[str, str], name: str, low: int, high: int, default: int) -> int:
    """The number that a parameter of the query states. Raises BadRequest."""
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and low <= int(text[:9]) <= high):
        raise BadRequest(f"{name} must be a number from {low} to {high}", param=name)
    return int(text)


def model_name(fields: Mapping[str, Any], source: str = "request") -> str:
    """The field `model` of a body or of a query. Raises BadRequest."""
    name = fields.get("model")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"model name is missing from the {source}", reason="model_missing", param="model")
    return name


ApiResult = JsonReply | FrameStream | web.Response | dict[str, Any] | list[Any]
"""A dict or a list is sent as JSON with status 200."""
ApiFunction = Callable[[ApiCall], Awaitable[ApiResult]]
