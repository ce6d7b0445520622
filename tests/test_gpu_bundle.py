"""scripts/gpu_bundle: the packages that a machine with Python and torch lacks."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from router.cli.worker_packages import NEEDED
from tests.programs import load

ROOT = Path(__file__).resolve().parent.parent


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


def wheel(folder: Path, name: str) -> None:
    """A package without content."""
    about = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        for path, text in files.items():
            file.writestr(path, text)
        file.writestr(f"{about}/RECORD", "".join(f"{path},,\n" for path in (*files, f"{about}/RECORD")))


@pytest.mark.slow
def test_its_script_installs_the_wheels_and_resumes_with_the_results_in_its_folder(
    program: Any, tmp_path: Path
) -> None:
    for name in ("bundle", "out", "bin"):
        (tmp_path / name).mkdir()
    wheel(tmp_path / "bundle", "only_in_the_bundle")
    (tmp_path / "bundle" / "commit").write_text("0123456789ab\n")
    (tmp_path / "bin" / "git").write_text("#!/bin/sh\nexit 1\n")  # of a machine without the repository's history
    (tmp_path / "bin" / "git").chmod(0o755)
    script = tmp_path / "bundle" / "run.sh"
    script.write_text(program.SCRIPT)
    python = tmp_path / "bin" / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    environment |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "OUT": str(tmp_path / "out")}

    def run(*options: str) -> str:
        done = subprocess.run(
            ["bash", str(script), "--device", "cpu", "--only", "device", *options],
            cwd=ROOT, env=environment | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stderr

    assert "passed before" not in run()
    assert "commit 0123456789ab," in (tmp_path / "out" / "gpu.md").read_text("utf-8")
    own = tmp_path / "gpu-check" / "bin" / "python"
    subprocess.run([own, "-c", "import torch, router, only_in_the_bundle"], check=True, env=environment)
    (tmp_path / "out" / "gpu.jsonl").rename(tmp_path / "bundle" / "gpu.jsonl")
    assert "device: passed before" in run("--resume")
