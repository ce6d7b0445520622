"""Access rules: API keys, host names, origins, and the requests that one key may run at once.

Keys are stored and compared as digests. Each check compares all of them, so timing reveals nothing about a key, and a
memory dump contains none.
"""

import fnmatch
import hashlib
import hmac
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from urllib.parse import urlsplit

from aiohttp import web

from router.config.api_keys import ApiKey
from router.config.settings import Settings, is_address, is_loopback
from router.errors import BadRequest, Forbidden, QueueFull, Unauthorized
from worker.protocol.routes import AccessLevel

# The identity of all requests of a router without keys: full access.
NO_KEY = ApiKey(name="", digest=b"", admin=True, models=(), max_concurrent=0)
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
MAX_CACHED_HOSTS = 256  # bounded because clients choose the header; the number is a guess
UNLIMITED = nullcontext()  # shared by all requests of keys without a limit
# Response headers that pages of other origins may read, beside those that browsers always expose.
EXPOSED = "X-Request-Id, X-Router-Model, X-Ignored-Fields, X-Should-Retry, Retry-After, Server-Timing"
HEADER_NAMES = re.compile(r"[A-Za-z0-9_-]+(, ?[A-Za-z0-9_-]+)*")


class Access:
    """The access rules of one router, on the headers of requests (by lower-case name). A reload replaces `keys`."""

    def __init__(self, keys: Sequence[ApiKey], settings: Settings):
        self.keys = tuple(keys)
        self._origins = settings.cors_origins
        self._hosts = tuple(host.casefold() for host in settings.allowed_hosts)
        self._metrics_public = settings.metrics_public
        self._running: Counter[bytes] = Counter()
        # A Host header that is rejected raises, so only allowed ones are cached.
        self._check_host = lru_cache(MAX_CACHED_HOSTS)(self._check_new_host)

    def identify(self, headers: Mapping[str, str]) -> ApiKey | None:
        """The key of a request; None if it has none or an unknown one."""
        if not self.keys:
            return NO_KEY
        presented = headers.get("x-api-key", "")
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.casefold() == "bearer" and token.strip():
            presented = token.strip()
        digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self.keys:  # no early exit: the time must not depend on the position of the key
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def authorize(self, headers: Mapping[str, str], level: AccessLevel) -> ApiKey:
        """Return the key of a request if it may use routes of `level`. Raises Unauthorized, Forbidden."""
        key = self.identify(headers)
        if key is None:
            if level is AccessLevel.PUBLIC or (level is AccessLevel.METRICS and self._metrics_public):
                return ApiKey(name="", digest=b"", admin=False, models=(), max_concurrent=0)
            raise Unauthorized
        if level is AccessLevel.ADMIN and not self.is_admin(key):
            raise Forbidden("this needs an admin key")
        return key

    def is_admin(self, key: ApiKey) -> bool:
        """True if `key` has admin rights. If no admin key is configured, all keys without `models=` have them."""
        if not self.keys:
            return True
        return key.admin if any(configured.admin for configured in self.keys) else not key.models

    @staticmethod
    def may_use(key: ApiKey, model: str) -> bool:
        return not key.models or any(fnmatch.fnmatchcase(model, glob) for glob in key.models)

    def running(self, key: ApiKey, retry_after: Callable[[], float] = lambda: 1.0) -> AbstractContextManager[None]:
        """Count one running request of `key` during the block.

        Raises QueueFull, with the seconds of `retry_after`, if the key already runs its max-concurrent requests.
        """
        return self._count_running(key, retry_after) if key.max_concurrent else UNLIMITED

    @contextmanager
    def _count_running(self, key: ApiKey, retry_after: Callable[[], float]) -> Iterator[None]:
        if self._running[key.digest] >= key.max_concurrent:
            raise QueueFull(
                f"this key already runs {key.max_concurrent} requests, the most that it may run at once",
                reason="key_concurrency",
                retry_after=retry_after(),
            )
        self._running[key.digest] += 1
        try:
            yield
        finally:
            self._running[key.digest] -= 1

    def check_host(self, headers: Mapping[str, str]) -> None:
        """Reject Host headers of DNS rebinding attacks. Raises Forbidden, BadRequest.

        Without keys the host must be an IP address, a single label, *.localhost, or one of --allowed-hosts. With keys
        the rule only applies if --allowed-hosts is given: a rebound page does not have a key.
        """
        # It may be missing in HTTP/1.0, and empty (RFC 9112, section 3.3). Browsers always send one. The transport has
        # rejected a missing or second Host in HTTP/1.1.
        host = headers.get("host", "").strip()
        if not host:
            return
        self._check_host(host, bool(self.keys))

    def _check_new_host(self, value: str, has_keys: bool) -> None:
        # `urlsplit` below would accept these characters and take another part of the text for the host.
        if any(mark in value for mark in "@/\\,?#") or any(char.isspace() for char in value):
            raise BadRequest("the Host header is not a host")
        host = _hostname(f"//{value}").rstrip(".")
        if not host or not host.isascii():
            raise BadRequest("the Host header is not a host")
        if "*" in self._hosts or host in self._hosts or any(
            allowed.startswith("*.") and host.endswith(allowed[1:]) for allowed in self._hosts
        ):  # fmt: skip
            return
        if has_keys and not self._hosts:
            return
        if is_address(host) or "." not in host or host.endswith(".localhost"):
            return
        raise Forbidden(
            f"host '{host}' is not allowed; start the router with --allowed-hosts {host}", reason="host_not_allowed"
        )

    def allows_origin(self, origin: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        return "localhost" in self._origins and origin.isascii() and is_loopback(_hostname(origin))

    def check_origin(self, headers: Mapping[str, str], *, changes_state: bool) -> None:
        """Reject state-changing requests that pages of other origins make a browser send (CSRF). Raises Forbidden."""
        if not changes_state:
            return
        origin = headers.get("origin")
        if origin is not None:
            if self.allows_origin(origin) or _same_origin(origin, headers.get("host", "")):
                return
            raise Forbidden("this origin is not allowed; see --cors-origins", reason="origin_not_allowed")
        # Browsers leave Origin out of some requests, but not Sec-Fetch-Site.
        if headers.get("sec-fetch-site", "").casefold() == "cross-site":
            raise Forbidden("cross-site requests are not allowed; see --cors-origins", reason="origin_not_allowed")

    def cors_headers(self, request: web.Request) -> dict[str, str]:
        """The `Access-Control-*` headers for an allowed origin. They never allow credentials."""
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
    """The host of a URL in lower case; empty if the URL has none or is invalid."""
    try:
        return (urlsplit(url).hostname or "").casefold()
    except ValueError:
        return ""


def _same_origin(origin: str, host: str) -> bool:
    """True if the page came from this server. Browsers send Origin with POSTs to the page's own server as well."""
    scheme, _, rest = origin.partition("://")
    return bool(host) and scheme.casefold() in ("http", "https") and rest.casefold() == host.strip().casefold()
