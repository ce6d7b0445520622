"""A base installation: the router without the packages of a worker."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from router import DISTRIBUTION
from tests.processes.routers import ROOT, fake_python
from tests.router.cli.commands import write

HIDDEN = """
import sys

class Hiding:
    "A finder of modules that does not find those of a worker."
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in ("torch", "transformers", "safetensors", "bitsandbytes", "gptqmodel")
        return None if hidden else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""
REMEDY = f"has no safetensors, torch, transformers, so it can load no model: run pip install '{DISTRIBUTION}[worker]'"


@pytest.fixture
def base(tmp_path: Path) -> dict[str, str]:
    """The environment of a router without these packages."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HIDDEN)
    return {**os.environ, "PYTHONPATH": f"{tmp_path}/site:{ROOT}", "ROUTER_STATE_DIR": f"{tmp_path}/state"}


def command(environ: dict[str, str], *words: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command in that installation."""
    argv = [sys.executable, "-P", "-m", "router", *words]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False, timeout=240)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_start_is_refused_with_the_packages_to_install(base: dict[str, str], tmp_path: Path) -> None:
    folder = str(write(tmp_path / "m"))
    for words in ([folder], ["--demo"], []):
        code, _, errors = command(base, *words, "--port", "0")
        assert (code, errors.count("\n")) == (2, 1)
        assert REMEDY in errors


@pytest.mark.slow
def test_check_and_estimate_name_the_packages_to_install(base: dict[str, str], tmp_path: Path) -> None:
    folder = str(write(tmp_path / "m"))
    code, out, _ = command(base, "check", "-m", folder)
    assert (code, out.splitlines()[-1]) == (0, "1 model, no fault: m")
    assert REMEDY in out
    code, out, errors = command(base, "estimate", folder)
    assert code == 0
    assert "static" in out
    assert REMEDY in errors
    code, out, errors = command(base, "estimate", folder, "--exact")
    assert code == 1
    assert REMEDY in errors


@pytest.mark.slow
def test_check_names_the_libraries_of_quantized_models(base: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path / "gptq", quantization_config={"quant_method": "gptq", "bits": 4})
    write(tmp_path / "plain")
    path = tmp_path / "models.ini"
    path.write_text(
        "[a]\nmodel = gptq\n[b]\nmodel = plain\nload-in-8bit = on\n"
        f"[c]\nmodel = gptq\npython = {fake_python(tmp_path)}\n[d]\nmodel = plain\n"
    )
    code, out, _ = command(base, "check", str(path))
    warnings = [line for line in out.splitlines() if "quantization with" in line]
    assert code == 0
    assert [warning.split(", which")[0] for warning in warnings] == [
        f"warning: {path}:2: [a] quantization with gptq needs the library gptqmodel",
        f"warning: {path}:5: [b] quantization with bnb-8bit needs the library bitsandbytes",
    ]


@pytest.mark.slow
def test_models_with_an_interpreter_of_their_own_need_no_packages_here(base: dict[str, str], tmp_path: Path) -> None:
    own = ("--python", str(fake_python(tmp_path)))
    code, out, _ = command(base, "check", "-m", str(write(tmp_path / "m")), *own)
    assert (code, out) == (0, "1 model, no fault: m\n")
