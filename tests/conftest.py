"""Real processes are the slow tier: `-m "not slow"` leaves them out."""

import signal
from pathlib import Path

import pytest

PROCESSES = Path(__file__).resolve().parent / "processes"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell starts its background commands so, and programs under test would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(PROCESSES):
            item.add_marker("slow")
