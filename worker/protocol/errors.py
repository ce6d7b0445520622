"""Error bodies in each dialect, and the table of error statuses, types and reasons."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.protocol.dialects import Dialect


@dataclass(frozen=True, slots=True)
class Trouble:
    """One row of what may go wrong: a status, the type that says it to programs, and the reasons for it."""

    status: int
    type: str
    reasons: tuple[str, ...]
    further: tuple[str, ...] = ()
    """Members that its error object has besides."""


ERRORS: tuple[Trouble, ...] = (
    Trouble(
        400,
        "invalid_request_error",
        (
            "invalid_json", "invalid_value", "unsupported_parameter", "unknown_parameter", "model_missing",
            "model_conflict", "model_not_loaded", "already_running", "not_running",
        ),
    ),
    Trouble(400, "exceed_context_size_error", ("context_length_exceeded",), ("n_prompt_tokens", "n_ctx")),
    Trouble(401, "authentication_error", ("invalid_api_key",)),
    Trouble(
        403,
        "permission_error",
        ("admin_required", "host_not_allowed", "origin_not_allowed", "feature_disabled"),
    ),
    Trouble(404, "not_found_error", ("model_not_found", "not_found")),
    Trouble(405, "not_found_error", ("method",)),
    Trouble(408, "invalid_request_error", ("body_timeout",)),
    Trouble(409, "conflict_error", ("in_use", "duplicate")),
    Trouble(413, "invalid_request_error", ("too_large",)),
    Trouble(415, "invalid_request_error", ("encoding",)),
    Trouble(429, "rate_limit_error", ("queue_full", "key_concurrency")),
    Trouble(500, "server_error", ("internal", "load_failed", "preset_invalid"), ("errors",)),
    Trouble(501, "not_supported_error", ("unsupported_by_model", "not_offered")),
    Trouble(502, "server_error", ("worker_crashed",)),
    Trouble(503, "unavailable_error", ("starting", "draining", "queue_timeout", "load_backoff", "no_slot")),
    Trouble(504, "timeout_error", ("request_timeout", "stalled", "cancelled")),
    Trouble(507, "insufficient_memory_error", ("does_not_fit",), ("devices",)),
)  # fmt: skip


def error_body(
    dialect: Dialect,
    *,
    status: int,
    type: str,
    reason: str,
    message: str,
    param: str | None = None,
    extra: Mapping[str, Any] | None = None,
    request_id: str = "",
) -> dict[str, Any]:
    """The JSON body of an error in `dialect`. Most dialects have llama-server's error object, which OpenAI's clients
    read too."""
    if dialect is Dialect.ANTHROPIC:
        kind = "overloaded_error" if status in (503, 507) else "api_error" if status >= 500 else type
        details = {"details": extra["details"]} if extra and "details" in extra else {}
        return {"type": "error", "error": {"type": kind, "message": message, **details}, "request_id": request_id}
    if dialect is Dialect.OLLAMA:
        return {"error": message}
    if dialect is Dialect.LMI:
        return {"code": status, "type": type, "message": message}
    if dialect is Dialect.ERICLLM:
        return {"detail": message}
    if dialect is Dialect.FASTCHAT:
        return {"error_code": _fastchat_code(status, reason), "text": message}
    error = {"code": status, "message": message, "type": type, "param": param, "reason": reason}
    return {"error": {**error, **(extra or {})}}


def _fastchat_code(status: int, reason: str) -> int:
    """FastChat's number for an error (fastchat/constants.py)."""
    own = {"context_length_exceeded": 40303, "does_not_fit": 50002, "invalid_value": 40302, "model_not_found": 40301}
    by_status = {401: 40102, 403: 40103, 429: 42901, 503: 42903, 507: 50002}
    return own.get(reason) or by_status.get(status) or (40001 if status < 500 else 50001)


def in_openais_words(body: bytes) -> bytes:
    """The body of an error of LMI's, as OpenAI's clients know it."""
    told = json.loads(body)
    rows = [row for row in ERRORS if (row.status, row.type) == (told["code"], told["type"])]
    reasons = [reason for row in rows for reason in row.reasons]
    reason = "invalid_value" if "invalid_value" in reasons else reasons[0] if reasons else "internal"
    error = {"status": told["code"], "type": told["type"], "message": told["message"], "reason": reason}
    return json.dumps(error_body(Dialect.OPENAI, **error), ensure_ascii=False).encode()
