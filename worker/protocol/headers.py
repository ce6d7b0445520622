"""Headers between client, router and worker, and the paths that only the router uses."""

from collections.abc import Iterable
from urllib.parse import quote

TOKEN_HEADER = "Authorization"
"""Carries `Bearer <token of this worker>`; the client's own credentials never reach a worker."""
REQUEST_ID_HEADER = "X-Request-Id"
ASKED_HEADER = "X-Router-Asked"
"""The name of the model in the request, percent-encoded, if its body has none. Responses repeat it."""
ADAPTER_HEADER = "X-Router-Adapter"
"""The adapter that a request names outside its body, percent-encoded: after the model's name, in the query or in a
header of LMI's clients."""
PROFILE_HEADER = "X-Router-Profile"
"""The name of the profile that applies to a request, percent-encoded. The worker has received it before."""
WAITED_HEADER = "X-Router-Waited"
"""Seconds that an Ollama request waited for the load of its model. They are part of the response."""
PROFILES_PATH = "/internal/profiles"
"""PUT of a `Profile`, which holds from now on for requests by its name. Between router and worker only."""
ADAPTERS_PATH = "/internal/adapters"
"""PUT `{adapters: [AdapterSource], default}`: which may be named from now on; `{problems: {name: why}}` of those that
cannot be used. Between router and worker only."""
IGNORED_FIELDS_HEADER = "X-Ignored-Fields"
MOST_REPORTED = 32
"""Names in that header."""


def ignored_fields(names: Iterable[str]) -> dict[str, str]:
    """The header that names ignored fields, each once, in characters that a header may have; none if there are
    none."""
    every = list(dict.fromkeys(names))  # one dialect may have read what another has read before
    told = [quote(name[:64], safe="[]") for name in every[:MOST_REPORTED]]
    return {IGNORED_FIELDS_HEADER: ",".join(told + ["..."] * (len(every) > MOST_REPORTED))} if every else {}


REQUEST_HEADERS = (
    "Content-Type",
    "Accept",
    "X-Request-Id",
    "traceparent",
    "tracestate",
    "User-Agent",
    "anthropic-version",
    "anthropic-beta",
)
"""Request headers that the router forwards; it drops all others."""
RESPONSE_HEADERS = (
    "Content-Type", "Content-Length", "Cache-Control", "X-Accel-Buffering", "X-Ignored-Fields", "X-Should-Retry",
    "Retry-After",
)  # fmt: skip
"""Response headers that the router forwards."""
