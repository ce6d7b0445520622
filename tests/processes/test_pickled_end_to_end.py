"""Pickled weights for real: they are converted before a first load, and a pickle that could run code never is."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.pickled import pickle_weights, poison
from tests.processes.routers import Router, router, text

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


def command(*words: str, state: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-P", "-m", "router", *words, "--state-dir", str(state)]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


async def test_a_local_folder_of_pickled_weights_is_converted_once_and_gives_the_same_text(
    real: Router, tmp_path: Path
) -> None:
    plain = tiny.make("llama", tmp_path / "plain")
    pickle_weights(shutil.copytree(plain, tmp_path / "pickled"), shards=2)
    folder = real.state / "converted"
    before = set(folder.glob("*"))
    sections = [f"[{name}]\nmodel = {tmp_path}/{name}\n" for name in ("plain", "pickled")]
    await real.serve_presets("[*]\nctx-size = 128\n" + "".join(sections))
    first = await text(real, "pickled")
    assert first == await text(real, "plain")
    [target] = set(folder.iterdir()) - before
    file = (target / "model.safetensors").stat()
    await real.client.post("/models/unload?wait=1", json={"model": "pickled"})
    real.log.clear()
    assert await text(real, "pickled") == first
    assert not any("convert" in line for line in real.log)
    assert (target / "model.safetensors").stat().st_ino == file.st_ino


async def test_a_pickle_that_could_run_code_is_refused_by_check_and_by_a_load(real: Router, tmp_path: Path) -> None:
    models, trace = tmp_path / "models", tmp_path / "trace"
    poison(tiny.make("llama", models / "unsafe"), trace)
    checked = command("check", "--models-dir", str(models), state=tmp_path / "state")
    assert checked.returncode != 0
    assert "[unsafe]" in checked.stdout
    assert "pytorch_model.bin needs io.open, which could run code; take a revision" in checked.stdout
    await real.serve_presets(f"[unsafe]\nmodel = {models}/unsafe\n")
    response = await real.client.post("/v1/completions", json={"model": "unsafe", "prompt": "a"})
    assert response.status_code == 500
    assert "pytorch_model.bin needs io.open, which could run code" in response.json()["error"]["message"]
    pickle_weights(tiny.make("llama", models / "pickled"))
    async with router("--models-dir", str(models), "--models-memory-margin", "64", "--no-prepare") as up:
        response = await up.client.post("/v1/completions", json={"model": "pickled", "prompt": "a"})
        assert response.status_code == 500
        assert "--no-prepare" in response.json()["error"]["message"], "the error names the option"
    assert not trace.exists()
