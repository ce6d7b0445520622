"""The errors of a worker, with the HTTP status and the reason of a response, or with the exit code of the process.

WorkerError
├── RequestError            a response with a status; the worker continues
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
│   ├── SequenceFailed      500 internal               (one sequence; the others of its batch continue)
│   ├── UnsupportedByModel  501 unsupported_by_model
│   └── Draining            503 draining
├── RankLost                ends the process like a crash
└── StartError              ends the process with an exit code of `Exit`
"""

from collections.abc import Mapping
from typing import Any

from worker.protocol.events import Exit


class WorkerError(Exception):
    """Root of the tree."""


class RequestError(WorkerError):
    """One request fails with `status`. `extra`: further members of the error object."""

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

    def __init__(
        self, prompt_tokens: int, limit: int, *, param: str | None = None, is_exact: bool = True, setting: str = ""
    ):
        """`is_exact`: the tokens were counted. Otherwise the prompt has at least that many, by its length.

        `setting`: the preset key with the limit, if it is not ctx-size.
        """
        least = "" if is_exact else "at least "
        what = "prompt" if setting else "context"
        super().__init__(
            # Clients recognize this error by "prompt is too long" (Anthropic) or "maximum context length" (OpenAI).
            f"the prompt is too long: it has {least}{prompt_tokens} tokens, but this model's maximum {what} length is"
            f" {limit} tokens; shorten the prompt or raise {setting or 'ctx-size'} in the preset",
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
    """The files of an adapter are invalid or do not fit this model."""

    status, type, reason = 400, "invalid_request_error", "invalid_value"


class QueueFull(RequestError):
    status, type, reason = 429, "rate_limit_error", "queue_full"


class SequenceFailed(RequestError):
    """One sequence cannot continue (NaN logits, a device error in its step)."""


class UnsupportedByModel(RequestError):
    status, type, reason = 501, "not_supported_error", "unsupported_by_model"


class Draining(RequestError):
    status, type, reason = 503, "unavailable_error", "draining"


class RankLost(WorkerError):
    """A tensor-parallel rank has exited or is out of step with the others."""


class StartError(WorkerError):
    """The process must exit with code `exit`. The message is for the user and names a remedy."""

    def __init__(self, message: str, exit: Exit = Exit.UNUSABLE):
        super().__init__(message)
        self.exit = exit
