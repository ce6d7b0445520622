"""Real processes are the slow tier: `-m "not slow"` leaves them out."""

from pathlib import Path

import pytest

PROCESSES = Path(__file__).resolve().parent / "processes"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(PROCESSES):
            item.add_marker("slow")
