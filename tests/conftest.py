"""The `slow` mark (tests with real processes, long files), the order of files, and the environment of all tests."""

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).resolve().parent
SLOW = (
    "processes",
    "router/cli/test_estimate.py",
    "worker/api/test_anthropic.py",
    "worker/api/test_ollama.py",
    "worker/api/test_responses.py",
    "worker/api/test_structured_output_sdk.py",
    "worker/api/test_vision.py",
    "worker/engines/attention/test_paged_equality.py",
    "worker/engines/run/test_aligned.py",
    "worker/engines/run/test_vision_equality.py",
    "worker/engines/sample/test_grammar.py",
    "worker/engines/test_engine_faults.py",
    "worker/fetch/test_demo.py",
    "worker/test_detokenizer_families.py",
)

LONGEST = (
    "processes/test_forked_memory.py",
    "worker/estimate/test_exact_estimate.py",
    "test_gpu_check.py",
    "worker/engines/run/test_on_a_device.py",
    "worker/engines/run/test_tensor_parallel.py",
    "worker/engines/test_engine_equality.py",
    "worker/engines/test_speculation.py",
    "processes/test_openapi_fuzz.py",
    "processes/test_kv_range_end_to_end.py",
    "worker/engines/sample/test_grammar.py",
    "test_bench_engine.py",
    "processes/test_demo_end_to_end.py",
    "processes/test_worker_program.py",
)
"""Files that run first. pytest-xdist gives a whole file to one process, so a long file at the end would run alone."""

# The variables of the user who runs the tests by which a router, a worker, their clients or other servers are set. All
# programs under test inherit what is left. Tests on accelerators need those of CUDA.
SETTINGS = (
    "ROUTER_", "LLAMA_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "OPTION_", "SERVING_", "TENSOR_", "PIPELINE_", "MAX_",
    "FASTCHAT_", "MTMD_", "DJL_", "VLLM_", "PREDICT_", "MODEL_", "XDG_",
)  # fmt: skip
for name in list(os.environ):
    if name.startswith(SETTINGS) or name.lower().endswith("_proxy"):
        del os.environ[name]

# No deadline: the time that one example takes depends on the machine. The same examples in each run: a failure belongs
# to a change. `pytest --hypothesis-profile random` draws others.
settings.register_profile("random", deadline=None)
settings.register_profile("same", deadline=None, derandomize=True)
settings.load_profile("same")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background commands with SIGINT ignored, and programs under test would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A run that is ended ends what its tests have started: routers, workers, hubs.
signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without searches for garbage, which are 40 % of that time and find nothing: modules and tests stay
    for the whole run. Later searches pass over them, and are rare: a test leaves little garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 10, 100)
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {TESTS / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))
    slow = {path for path in {item.path for item in items} if any(path.is_relative_to(TESTS / name) for name in SLOW)}
    for item in items:
        if item.path in slow:
            item.add_marker("slow")
