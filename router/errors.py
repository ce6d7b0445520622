"""The error tree of the router: one class per cause, each with its HTTP status, type and symbolic reason.

    RouterError
    ├── ConfigError                  stops the start (exit 2), or a reload
    └── ApiError                     becomes an HTTP response
        ├── BadRequest               400 invalid_value (param) or a more exact reason: invalid_json, model_missing, ...
        ├── ModelNotLoaded           400 model_not_loaded
        ├── AlreadyRunning           400 already_running
        ├── NotRunning               400 not_running
        ├── Unauthorized             401 invalid_api_key
        ├── Forbidden                403 admin_required, host_not_allowed, origin_not_allowed
        ├── ModelNotFound            404 model_not_found
        ├── PathNotFound             404 not_found
        ├── RequestNotFound          404 not_found
        ├── MethodNotAllowed         405 method
        ├── BodyTimeout              408 body_timeout
        ├── InUse                    409 in_use
        ├── Duplicate                409 duplicate
        ├── TooLarge                 413 too_large
        ├── EncodingUnsupported      415 encoding
        ├── QueueFull                429 queue_full
        ├── Internal                 500 internal
        ├── LoadFailed               500 load_failed         would fail the same way again
        ├── PresetInvalid            500 preset_invalid      a reload that changed nothing
        ├── NotOffered               501 not_offered
        ├── WorkerCrashed            502 worker_crashed
        ├── Starting                 503 starting
        ├── Draining                 503 draining
        ├── QueueTimeout             503 queue_timeout
        ├── LoadBackoff              503 load_backoff
        ├── SlotsBusy                503 no_slot             GET /slots with fail_on_no_slot only
        ├── RequestTimeout           504 request_timeout
        ├── Stalled                  504 stalled
        ├── Cancelled                504 cancelled           by an administrator
        └── DoesNotFit               507 does_not_fit

`retry_after` (seconds, 1 to 60) becomes the Retry-After header; official clients give up on much larger values.
`should_retry` becomes X-Should-Retry.
"""

from collections.abc import Mapping
from typing import Any


def without_name(name: str, why: str) -> str:
    """`why` without the name of a model at its start, for messages that have it already."""
    return why.removeprefix(f"{name}: ")


class RouterError(Exception):
    """Root of the tree."""


class ConfigError(RouterError):
    """Settings or presets cannot be used. `problems` has one line per fault."""

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class ApiError(RouterError):
    """An error response to a client. The message has the name, the number and the remedy."""

    status = 500
    type = "server_error"
    reason = "internal"
    should_retry = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        reason: str | None = None,
        retry_after: float | None = None,
        extra: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.param = param
        self.reason = reason or self.reason
        self.retry_after = None if retry_after is None else min(60.0, max(1.0, retry_after))
        self.extra = dict(extra or {})
        self.headers = dict(headers or {})


class BadRequest(ApiError):
    status, type, reason = 400, "invalid_request_error", "invalid_value"


class ModelNotLoaded(ApiError):
    status, type, reason = 400, "invalid_request_error", "model_not_loaded"


class AlreadyRunning(ApiError):
    status, type, reason = 400, "invalid_request_error", "already_running"


class NotRunning(ApiError):
    status, type, reason = 400, "invalid_request_error", "not_running"


class Unauthorized(ApiError):
    status, type, reason = 401, "authentication_error", "invalid_api_key"

    def __init__(self) -> None:
        super().__init__("Invalid API Key", headers={"WWW-Authenticate": "Bearer"})


class Forbidden(ApiError):
    status, type, reason = 403, "permission_error", "admin_required"


class ModelNotFound(ApiError):
    status, type, reason = 404, "not_found_error", "model_not_found"


class PathNotFound(ApiError):
    status, type, reason = 404, "not_found_error", "not_found"


class RequestNotFound(ApiError):
    status, type, reason = 404, "not_found_error", "not_found"


class MethodNotAllowed(ApiError):
    status, type, reason = 405, "not_found_error", "method"


class BodyTimeout(ApiError):
    status, type, reason, should_retry = 408, "invalid_request_error", "body_timeout", True


class InUse(ApiError):
    status, type, reason = 409, "conflict_error", "in_use"


class Duplicate(ApiError):
    status, type, reason = 409, "conflict_error", "duplicate"


class TooLarge(ApiError):
    status, type, reason = 413, "invalid_request_error", "too_large"


class EncodingUnsupported(ApiError):
    status, type, reason = 415, "invalid_request_error", "encoding"


class QueueFull(ApiError):
    status, type, reason, should_retry = 429, "rate_limit_error", "queue_full", True


class Internal(ApiError):
    status, type, reason = 500, "server_error", "internal"


class LoadFailed(ApiError):
    status, type, reason = 500, "server_error", "load_failed"

    @classmethod
    def of(cls, name: str, why: str) -> "LoadFailed":
        """The error for a failed load of model `name`. `why` may begin with the name."""
        return cls(f"{name} cannot be loaded: {without_name(name, why)}")


class PresetInvalid(ApiError):
    status, type, reason = 500, "server_error", "preset_invalid"


class NotOffered(ApiError):
    status, type, reason = 501, "not_supported_error", "not_offered"


class WorkerCrashed(ApiError):
    status, type, reason, should_retry = 502, "server_error", "worker_crashed", True


class Starting(ApiError):
    status, type, reason, should_retry = 503, "unavailable_error", "starting", True


class Draining(ApiError):
    status, type, reason, should_retry = 503, "unavailable_error", "draining", True


class QueueTimeout(ApiError):
    status, type, reason, should_retry = 503, "unavailable_error", "queue_timeout", True


class LoadBackoff(ApiError):
    status, type, reason, should_retry = 503, "unavailable_error", "load_backoff", True


class SlotsBusy(ApiError):
    """All slots are busy. Only GET /slots with fail_on_no_slot gets it; requests wait."""

    status, type, reason, should_retry = 503, "unavailable_error", "no_slot", True


class RequestTimeout(ApiError):
    status, type, reason = 504, "timeout_error", "request_timeout"


class Stalled(ApiError):
    status, type, reason = 504, "timeout_error", "stalled"


class Cancelled(ApiError):
    status, type, reason = 504, "timeout_error", "cancelled"


class DoesNotFit(ApiError):
    """The model does not fit an empty machine, or exceeds its own limits. `extra["devices"]` has the arithmetic of the
    first, in MiB by device."""

    status, type, reason = 507, "insufficient_memory_error", "does_not_fit"
