"""`router prepare`: a folder is converted once, by the worker's program; what needs no conversion is left alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from router.cli.main import main
from tests.router.cli.test_estimate import write
from tests.sparse import write_weights


def prepare(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    """Exit code and JSON document of `router prepare WORDS`."""
    code = main(["prepare", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_snapshot_without_experts_needs_no_conversion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write(tmp_path / "m"))
    code, found = prepare(capsys, folder)
    assert (code, found["converted"], found["target"]) == (0, False, "")
    assert main(["prepare", folder]) == 0
    assert capsys.readouterr().out == f"{folder}: needs no conversion\n"


def test_a_repository_that_is_not_in_the_cache_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = prepare(capsys, "org/name")
    assert (code, found["error"]["code"]) == (1, "prepare_failed")
    assert "is not in the hub cache" in found["error"]["message"]


def test_a_conversion_that_the_worker_cannot_do_fails_with_its_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "m")
    write_weights(folder / "model.safetensors", {"model.layers.0.mlp.experts.0.up_proj.weight": ("BF16", [64, 64])})
    (folder / "config.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text()), "model_type": "no-such-type"})
    )
    code, found = prepare(capsys, str(folder))
    assert (code, found["error"]["code"]) == (1, "prepare_failed"), found


@pytest.mark.slow
def test_a_mixture_of_experts_is_converted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests import tiny

    folder = tmp_path / "moe"
    tiny.make("mixtral", folder, num_hidden_layers=3)
    code, found = prepare(capsys, str(folder))
    assert (code, found["converted"]) == (0, True)
    assert found["weights"] > 0
    assert (Path(found["target"]) / "model.safetensors").is_file()
    code, again = prepare(capsys, str(folder))
    assert (code, again["converted"], again["target"]) == (0, False, found["target"])
