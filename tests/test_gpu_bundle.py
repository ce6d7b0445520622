"""scripts/gpu_bundle: the packages that a machine with Python and torch lacks."""

import re
from typing import Any

import pytest

from router.cli.worker_packages import NEEDED
from tests.programs import load


@pytest.fixture(scope="module")
def program() -> Any:
    return load("gpu_bundle")


def test_it_has_the_packages_of_router_and_worker_but_torch_and_what_torch_requires(program: Any) -> None:
    names = {each.partition("==")[0] for each in program.wanted("3.12")}
    torch = program.closure(["torch"], "3.12")
    declared = {program.canonical(re.split(r"[^\w.-]", each)[0]) for each in program.declared()}
    assert {"torch", "sympy", "filelock"} <= torch
    assert declared - torch - program.LEFT_OUT <= names
    assert {"numpy", "tokenizers", "pytest", "aiosignal"} <= names, "with what they require in turn"
    assert not names & (torch | {"hf-xet", "typer", "rich", "pydantic", "pillow"})


def test_with_it_the_router_starts(program: Any) -> None:
    """Without one of NEEDED, the router does not start, and gpu_check has no swap."""
    there = {each.partition("==")[0] for each in program.wanted("3.12")} | program.closure(["torch"], "3.12")
    assert {module.lower() for module in NEEDED} <= there


def test_requirements_hold_for_the_other_python(program: Any) -> None:
    assert "numpy" in program.closure(["numpy; python_version >= '3.12'"], "3.12")
    assert program.closure(["numpy; python_version >= '3.12'"], "3.11") == set()
    assert "pysocks" not in program.closure(["httpx[socks]; sys_platform == 'win32'"], "3.12")


def test_each_package_has_its_pinned_version(program: Any) -> None:
    pins = program.pins()
    for each in program.wanted("3.11"):
        name, _, version = each.partition("==")
        assert pins[name] == version
