"""The slow tier, which `-m "not slow"` leaves out: real processes, and files that add up to more than a second."""

import signal
from pathlib import Path

import pytest
from hypothesis import settings

PROCESSES = Path(__file__).resolve().parent / "processes"
ADDING_UP = {
    "test_aligned.py", "test_anthropic_face.py", "test_demo.py", "test_detokenize_families.py", "test_engine_faults.py",
    "test_forecast.py", "test_grammar.py", "test_ollama_face.py", "test_paged_equality.py", "test_responses_face.py",
    "test_structured_output_sdk.py", "test_vision_equality.py", "test_vision_faces.py",
}  # fmt: skip

settings.register_profile("busy", deadline=None)  # the time that one example takes depends on the machine
settings.load_profile("busy")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell starts its background commands so, and programs under test would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(PROCESSES) or item.path.name in ADDING_UP:
            item.add_marker("slow")
