"""`router prepare`: a folder is converted once, by the worker's program; what needs no conversion is left alone."""

import json
from pathlib import Path

import pytest

from tests.router.cli.commands import Run, write
from tests.sparse import write_weights


def test_a_snapshot_without_experts_needs_no_conversion(tmp_path: Path, run: Run) -> None:
    folder = str(write(tmp_path / "m"))
    found = run("prepare", folder, "--json", code=0).document
    assert (found["converted"], found["target"]) == (False, "")
    assert run("prepare", folder, code=0).out == f"{folder}: needs no conversion\n"


def test_a_repository_that_is_not_in_the_cache_is_reported(run: Run) -> None:
    found = run("prepare", "org/name", "--json", code=1).document
    assert found["error"]["code"] == "prepare_failed"
    assert "is not in the hub cache" in found["error"]["message"]


def test_a_conversion_that_the_worker_cannot_do_fails_with_its_message(tmp_path: Path, run: Run) -> None:
    folder = write(tmp_path / "m")
    write_weights(folder / "model.safetensors", {"model.layers.0.mlp.experts.0.up_proj.weight": ("BF16", [64, 64])})
    (folder / "config.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text()), "model_type": "no-such-type"})
    )
    found = run("prepare", str(folder), "--json", code=1).document
    assert found["error"]["code"] == "prepare_failed", found


@pytest.mark.slow
def test_a_mixture_of_experts_is_converted_once(tmp_path: Path, run: Run) -> None:
    from tests import tiny

    folder = tmp_path / "moe"
    tiny.make("mixtral", folder, num_hidden_layers=3)
    found = run("prepare", str(folder), "--json", code=0).document
    assert found["converted"] is True
    assert found["weights"] > 0
    assert (Path(found["target"]) / "model.safetensors").is_file()
    again = run("prepare", str(folder), "--json", code=0).document
    assert (again["converted"], again["target"]) == (False, found["target"])
