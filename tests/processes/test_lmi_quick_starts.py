"""LMI's two published quick starts, unchanged but for a tiny model in place of the user's. No GPU is here."""

from pathlib import Path

import pytest

from tests import tiny
from tests.processes.routers import Router, router

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

PROPERTIES = """\
engine=Python
option.mpi_mode=True
option.tensor_parallel_degree=max
option.rolling_batch=lmi-dist
option.model_id={model}
# Adjust the following based on model size and instance type
option.max_rolling_batch_size=64
"""
VARIABLES = {
    "TENSOR_PARALLEL_DEGREE": "max",
    "OPTION_ROLLING_BATCH": "lmi-dist",
    "OPTION_MAX_ROLLING_BATCH_SIZE": "64",
}
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


async def answers(up: Router, model: str) -> None:
    """It is healthy once the one model of the router is loaded, and answers in LMI's schema."""
    await up.becomes(model, "loaded")
    assert [row["id"] for row in (await up.client.get("/v1/models")).json()["data"]] == [model]
    assert (await up.client.get("/ping")).json() == {"status": "healthy"}
    body = {"inputs": "The quick brown fox", "parameters": {"max_new_tokens": 4}}
    response = await up.client.post("/invocations", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["generated_text"]
    rows = (await up.client.get("/router/config", params={"model": model})).json()["settings"]
    values = {row["key"]: row["value"] for row in rows}
    assert (values["parallel"], values["tensor-parallel"], values["device"]) == ("64", "max", "auto")
    await up.says("tensor-parallel = max counts accelerators, and it is on the CPU, so one process computes it")
    assert not any(line.startswith("warning:") for line in up.log), "the configuration itself has no fault"


async def test_the_quick_start_with_variables_serves_the_model(tmp_path: Path) -> None:
    model = tiny.make("llama", tmp_path / "llama")
    async with router(environ={"HF_MODEL_ID": str(model), **VARIABLES, **NO_GPU}) as up:
        await answers(up, "llama")


async def test_the_quick_start_with_serving_properties_serves_the_model(tmp_path: Path) -> None:
    model = tiny.make("llama", tmp_path / "weights" / "llama")
    folder = tmp_path / "models" / "mymodel"
    folder.mkdir(parents=True)
    (folder / "serving.properties").write_text(PROPERTIES.format(model=model))
    async with router(str(folder), "--no-models-cache", environ=NO_GPU) as up:
        await answers(up, "mymodel")
