"""What Anthropic's API says of models, beside what is said of them to everybody: its clients show the names and look at
the dates."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

VERSION = "anthropic-version"
"""The header by which its clients are known."""


def listed(told: Mapping[str, Any]) -> dict[str, Any]:
    """A list of models, with what Anthropic's pages of one have: all are on this page."""
    data = [described(each) for each in told["data"]]
    ids = [each["id"] for each in data] or [None]
    return {**told, "data": data, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}


def described(model: Mapping[str, Any]) -> dict[str, Any]:
    """One model."""
    created = datetime.fromtimestamp(model["created"], UTC)
    return {
        **model,
        "type": "model",
        "display_name": model["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
    }
