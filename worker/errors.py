"""What can go wrong in a worker, each with its HTTP status and symbolic reason, or with its exit code.

WorkerError
├── RequestError            an answer with a status; the worker lives on
│   ├── InvalidJson         400 invalid_json
│   ├── InvalidValue        400 invalid_value          (param)
│   ├── UnsupportedField    400 unsupported_parameter  (param)
│   ├── UnknownField        400 unknown_parameter      (param)
│   ├── ContextExceeded     400 context_length_exceeded
│   ├── Unauthorized        401 invalid_api_key
│   ├── UnusableAdapter     400 invalid_value          (files of an adapter)
│   ├── NotFound            404 not_found
│   ├── AdapterNotFound     404 model_not_found
│   ├── QueueFull           429 queue_full
│   ├── SequenceFailed      500 internal               (one sequence; its neighbours go on)
│   ├── UnsupportedByModel  501 unsupported_by_model
│   └── Draining            503 draining
├── RankLost                ends the process as a crash does
└── StartError              ends the process with an exit code of `Exit`
"""

from collections.abc import Mapping
from typing import Any

from worker.protocol.exits import Exit


class WorkerError(Exception):
    """Root of the tree."""


class RequestError(WorkerError):
    """One request is answered with `status`; `extra` holds further members of the error object."""

    status = 500
    type = "server_error"
    reason = "internal"

    def __init__(self, message: str, *, param: str | None = None, extra: Mapping[str, Any] | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.extra = dict(extra or {})


class InvalidValue(RequestError):
    status, type, reason = 400, "invalid_request_error", "invalid_value"


class InvalidJson(RequestError):
    status, type, reason = 400, "invalid_request_error", "invalid_json"


class UnsupportedField(RequestError):
    status, type, reason = 400, "invalid_request_error", "unsupported_parameter"


class UnknownField(RequestError):
    status, type, reason = 400, "invalid_request_error", "unknown_parameter"


class ContextExceeded(RequestError):
    status, type, reason = 400, "exceed_context_size_error", "context_length_exceeded"

    def __init__(self, prompt_tokens: int, limit: int, *, param: str | None = None):
        super().__init__(
            f"the prompt has {prompt_tokens} tokens, but this model's maximum context length is {limit} tokens;"
            " shorten the prompt or raise ctx-size in the preset",
            param=param,
            extra={"n_prompt_tokens": prompt_tokens, "n_ctx": limit},
        )


class Unauthorized(RequestError):
    status, type, reason = 401, "authentication_error", "invalid_api_key"


class NotFound(RequestError):
    status, type, reason = 404, "not_found_error", "not_found"


class AdapterNotFound(RequestError):
    status, type, reason = 404, "not_found_error", "model_not_found"


class UnusableAdapter(RequestError):
    """The files of an adapter cannot be used with this model, or not at all."""

    status, type, reason = 400, "invalid_request_error", "invalid_value"


class QueueFull(RequestError):
    status, type, reason = 429, "rate_limit_error", "queue_full"


class SequenceFailed(RequestError):
    """This sequence cannot go on (NaN logits, a device error in its step)."""


class UnsupportedByModel(RequestError):
    status, type, reason = 501, "not_supported_error", "unsupported_by_model"


class Draining(RequestError):
    status, type, reason = 503, "unavailable_error", "draining"


class RankLost(WorkerError):
    """One of the processes among which a model is divided has ended, or is out of step with the others."""


class StartError(WorkerError):
    """The process must end with `exit`; the message is for a person and names the way out."""

    def __init__(self, message: str, exit: Exit = Exit.UNUSABLE):
        super().__init__(message)
        self.exit = exit
