from pathlib import Path
from typing import Any

import pytest

from router.cli.main import main
from tests.router.cli.commands import CommandResult, Estimate, Run


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands read no variables, caches and state of the user who runs the tests."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty-cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `router WORDS` in this process. `code`: the exit code that it must have."""

    def ran(*words: str, code: int | None = None) -> CommandResult:
        said = CommandResult(main(words), *capsys.readouterr())
        assert code in (None, said.code), said
        return said

    return ran


@pytest.fixture
def estimate(run: Run) -> Estimate:
    def estimated(*words: str) -> tuple[int, Any]:
        said = run("estimate", *words, "--json")
        assert said.err == ""
        return said.code, said.document

    return estimated
