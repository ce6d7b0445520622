"""Error bodies in each dialect, and the table of error statuses, types and reasons."""

import json
from dataclasses import dataclass
from typing import Any, Protocol

from worker.protocol.dialects import Dialect


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """One row of the error table: a status code, a type for programs, and the possible reasons."""

    status: int
    type: str
    reasons: tuple[str, ...]
    further: tuple[str, ...] = ()  # further members of the error object


ERRORS: tuple[ErrorKind, ...] = (
    ErrorKind(
        400,
        "invalid_request_error",
        (
            "invalid_json", "invalid_value", "unsupported_parameter", "unknown_parameter", "model_missing",
            "model_conflict", "model_not_loaded", "already_running", "not_running",
        ),
    ),
    ErrorKind(400, "exceed_context_size_error", ("context_length_exceeded",), ("n_prompt_tokens", "n_ctx")),
    ErrorKind(401, "authentication_error", ("invalid_api_key",)),
    ErrorKind(
        403,
        "permission_error",
        ("admin_required", "host_not_allowed", "origin_not_allowed", "feature_disabled"),
    ),
    ErrorKind(404, "not_found_error", ("model_not_found", "not_found")),
    ErrorKind(405, "not_found_error", ("method",)),
    ErrorKind(408, "invalid_request_error", ("body_timeout",)),
    ErrorKind(409, "conflict_error", ("in_use", "duplicate")),
    ErrorKind(413, "invalid_request_error", ("too_large",)),
    ErrorKind(415, "invalid_request_error", ("encoding",)),
    ErrorKind(429, "rate_limit_error", ("queue_full", "key_concurrency")),
    ErrorKind(500, "server_error", ("internal", "load_failed", "preset_invalid"), ("errors",)),
    ErrorKind(501, "not_supported_error", ("unsupported_by_model", "not_offered")),
    ErrorKind(502, "server_error", ("worker_crashed",)),
    ErrorKind(503, "unavailable_error", ("starting", "draining", "queue_timeout", "load_backoff", "no_slot")),
    ErrorKind(504, "timeout_error", ("request_timeout", "stalled", "cancelled")),
    ErrorKind(507, "insufficient_memory_error", ("does_not_fit",), ("devices",)),
)  # fmt: skip


class ReportedError(Protocol):
    """An error of the router or of a worker, as far as its response shows it."""

    status: int
    type: str
    reason: str
    message: str
    param: str | None
    extra: dict[str, Any]  # further members of the error object


def error_body(dialect: Dialect, error: ReportedError, *, request_id: str = "") -> dict[str, Any]:
    """Return the JSON body of an error in `dialect`. Most dialects use llama-server's error object, which
    OpenAI's clients accept."""
    status, type = error.status, error.type
    message = error.message.encode(errors="replace").decode()  # lone surrogates, as of a path, cannot be sent
    if dialect is Dialect.ANTHROPIC:
        kind = anthropic_error_type(status, type)
        details = {"details": error.extra["details"]} if "details" in error.extra else {}
        return {"type": "error", "error": {"type": kind, "message": message, **details}, "request_id": request_id}
    if dialect is Dialect.OLLAMA:
        return {"error": message}
    if dialect is Dialect.LMI:
        return {"code": status, "type": type, "message": message}
    if dialect is Dialect.ERICLLM:
        return {"detail": message}
    if dialect is Dialect.FASTCHAT:
        return {"error_code": _fastchat_code(status, error.reason), "text": message}
    return {"error": _error_object(status, type, message, error.param, error.reason) | error.extra}


def anthropic_error_type(status: int, type: str) -> str:
    """Return the error type of Anthropic's API. Its clients know one type for all invalid requests."""
    own = {400: "invalid_request_error", 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error",
           507: "overloaded_error"}  # fmt: skip
    return own.get(status) or (type if status < 500 else "api_error")


def _error_object(status: int, type: str, message: str, param: str | None, reason: str) -> dict[str, Any]:
    return {"code": status, "message": message, "type": type, "param": param, "reason": reason}


def _fastchat_code(status: int, reason: str) -> int:
    """Return FastChat's number of an error (fastchat/constants.py)."""
    own = {"context_length_exceeded": 40303, "does_not_fit": 50002, "invalid_value": 40302, "model_not_found": 40301}
    by_status = {401: 40102, 403: 40103, 429: 42901, 503: 42903, 507: 50002}
    return own.get(reason) or by_status.get(status) or (40001 if status < 500 else 50001)


def to_openai_error(body: bytes) -> bytes:
    """Convert the body of an error in LMI's dialect to that of OpenAI's."""
    lmi_error = json.loads(body)
    status, type = lmi_error["code"], lmi_error["type"]
    rows = [row for row in ERRORS if (row.status, row.type) == (status, type)]
    reasons = [reason for row in rows for reason in row.reasons]
    reason = "invalid_value" if "invalid_value" in reasons else reasons[0] if reasons else "internal"
    error = _error_object(status, type, lmi_error["message"], None, reason)
    return json.dumps({"error": error}, ensure_ascii=False).encode(errors="replace")
