"""Access rules: API keys, host names, origins, and the requests that one key may run at once.

Keys are stored and compared as digests, all of them each time, so that neither timing nor a memory dump reveals one.
"""

import fnmatch
import hashlib
import hmac
import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol
from urllib.parse import urlsplit

from aiohttp import web

from router.config.settings import Key
from router.errors import BadRequest, Forbidden, QueueFull, Unauthorized
from worker.protocol.routes import Plane

ANYBODY = Key(name="", digest=b"", admin=True, models=(), max_concurrent=0)
"""The key of every request while no key is configured."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
MOST_HOSTS = 256
"""Host headers whose check is cached. The cache is bounded because clients choose the header."""
UNCOUNTED = nullcontext()
"""For a request whose key has no limit."""
EXPOSED = "X-Request-Id, X-Router-Model, X-Ignored-Fields, X-Should-Retry, Retry-After, Server-Timing"
"""What pages of other origins may read of an answer's head, beside what browsers let all of them read."""
HEADER_NAMES = re.compile(r"[A-Za-z0-9_-]+(, ?[A-Za-z0-9_-]+)*")


class Headed(Protocol):
    """The headers of a request."""

    @property
    def headers(self) -> Mapping[str, str]:
        """By lower-case name."""


class Access:
    """The rules of one router. `keys` may be replaced at any time (key files are read again on a reload)."""

    def __init__(
        self,
        keys: Sequence[Key],
        *,
        cors_origins: Sequence[str] = (),
        allowed_hosts: Sequence[str] = (),
        metrics_public: bool = False,
    ):
        self.keys = tuple(keys)
        self._origins = tuple(cors_origins)
        self._hosts = tuple(host.casefold() for host in allowed_hosts)
        self._metrics_public = metrics_public
        self._running: Counter[bytes] = Counter()
        self._fine_hosts: set[tuple[str, bool]] = set()
        """Host headers that were looked at and let pass, with whether keys existed then."""

    def identify(self, request: Headed) -> Key | None:
        """The key that a request carries; None if it carries none that is known."""
        if not self.keys:
            return ANYBODY
        presented = request.headers.get("x-api-key", "")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.casefold() == "bearer" and token.strip():
            presented = token.strip()
        digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def authorize(self, request: Headed, plane: Plane) -> Key:
        """The key, if it may use `plane`. Raises Unauthorized, Forbidden."""
        public = plane is Plane.PUBLIC or (plane is Plane.METRICS and self._metrics_public)
        key = self.identify(request)
        if key is None:
            if public:
                return Key(name="", digest=b"", admin=False, models=(), max_concurrent=0)
            raise Unauthorized
        if plane is Plane.ADMIN and not self.is_admin(key):
            raise Forbidden("this needs an admin key")
        return key

    def is_admin(self, key: Key) -> bool:
        """An admin key if one exists, else any key that is not limited to some models."""
        if not self.keys:
            return True
        return key.admin if any(each.admin for each in self.keys) else not key.models

    @staticmethod
    def may_use(key: Key, model: str) -> bool:
        return not key.models or any(fnmatch.fnmatchcase(model, glob) for glob in key.models)

    def running(self, key: Key, come_back: Callable[[], float] = lambda: 1.0) -> AbstractContextManager[None]:
        """Count one request of `key` for the length of the block. Raises QueueFull over its max-concurrent, with the
        seconds that `come_back` says."""
        return self._running_one(key, come_back) if key.max_concurrent else UNCOUNTED

    @contextmanager
    def _running_one(self, key: Key, come_back: Callable[[], float]) -> Iterator[None]:
        if self._running[key.digest] >= key.max_concurrent:
            raise QueueFull(
                f"this key already runs {key.max_concurrent} requests at once",
                reason="key_concurrency",
                retry_after=come_back(),
            )
        self._running[key.digest] += 1
        try:
            yield
        finally:
            self._running[key.digest] -= 1

    def check_host(self, request: Headed) -> None:
        """Refuse names that a rebound DNS entry could have: without keys a Host must be an IP literal, a single
        label, *.localhost or allowed; with keys only if there is a list. Raises Forbidden, BadRequest."""
        host = request.headers.get("host")
        if host is None:  # HTTP/1.0; the transport has rejected a missing or second Host in HTTP/1.1
            return
        looked_at = host, bool(self.keys)
        if looked_at in self._fine_hosts:
            return
        self._check_host(host.strip())
        if len(self._fine_hosts) < MOST_HOSTS:
            self._fine_hosts.add(looked_at)

    def _check_host(self, value: str) -> None:
        if not value or any(mark in value for mark in "@/\\,?#") or any(char.isspace() for char in value):
            raise BadRequest("the Host header is not a host")
        host = _hostname(f"//{value}").rstrip(".")
        if not host or not host.isascii():
            raise BadRequest("the Host header is not a host")
        if "*" in self._hosts or host in self._hosts or any(
            each.startswith("*.") and host.endswith(each[1:]) for each in self._hosts
        ):  # fmt: skip
            return
        if self.keys and not self._hosts:
            return
        if _is_address(host) or "." not in host or host.endswith(".localhost"):
            return
        raise Forbidden(
            f"host '{host}' is not allowed; start the router with --allowed-hosts {host}", reason="host_not_allowed"
        )

    def allows_origin(self, origin: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        return "localhost" in self._origins and origin.isascii() and _is_loopback(_hostname(origin))

    def check_origin(self, request: Headed, *, changes_state: bool) -> None:
        """Refuse state-changing requests that a foreign page makes a browser send. Raises Forbidden."""
        if not changes_state:
            return
        origin = request.headers.get("origin")
        if origin is not None:
            if self.allows_origin(origin) or _same_origin(origin, request.headers.get("host", "")):
                return
            raise Forbidden("this origin is not allowed; see --cors-origins", reason="origin_not_allowed")
        if request.headers.get("sec-fetch-site", "").casefold() == "cross-site":
            raise Forbidden("cross-site requests are not allowed; see --cors-origins", reason="origin_not_allowed")

    def cors_headers(self, request: web.Request) -> dict[str, str]:
        """`Access-Control-*` for an allowed origin; never with credentials."""
        origin = request.headers.get("Origin")
        if origin is None or not self.allows_origin(origin):
            return {}
        headers = {"Access-Control-Allow-Origin": "*" if "*" in self._origins else origin, "Vary": "Origin"}
        if request.method == "OPTIONS":
            headers["Access-Control-Allow-Methods"] = "GET, POST, PUT, DELETE, OPTIONS"
            asked = request.headers.get("Access-Control-Request-Headers", "")
            headers["Access-Control-Allow-Headers"] = (
                asked if HEADER_NAMES.fullmatch(asked) else "Authorization, Content-Type, X-Api-Key"
            )
            headers["Access-Control-Max-Age"] = "600"
        else:
            headers["Access-Control-Expose-Headers"] = EXPOSED
        return headers


def _hostname(url: str) -> str:
    """The host of a URL, without regard to case; empty if it has none that can be read."""
    try:
        return (urlsplit(url).hostname or "").casefold()
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    return "%" not in host and _is_address(host) and ipaddress.ip_address(host).is_loopback


def _same_origin(origin: str, host: str) -> bool:
    """Whether the page came from this very server (a browser sends Origin with its own POSTs, too)."""
    scheme, _, rest = origin.partition("://")
    return bool(host) and scheme.casefold() in ("http", "https") and rest.casefold() == host.strip().casefold()
