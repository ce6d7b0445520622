"""Additions of Anthropic's API to lists of models. Its clients show the display names and read the dates."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

VERSION = "anthropic-version"  # a request header of all Anthropic clients


def model_list(models: Mapping[str, Any]) -> dict[str, Any]:
    """The list of models, as one page that contains all of them."""
    data = [model_entry(entry) for entry in models["data"]]
    ids = [entry["id"] for entry in data] or [None]
    return {**models, "data": data, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}


def model_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """One entry of the list."""
    created = datetime.fromtimestamp(entry["created"], UTC)
    return {
        **entry,
        "type": "model",
        "display_name": entry["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
    }
