"""LMI's published quick starts, by file and by variables, unchanged but for a tiny model in place of the user's. No GPU
is here."""

from pathlib import Path

import pytest

from tests import tiny
from tests.processes.hubs import Hub
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
    "HF_MODEL_ID": "org/llama",
    "TENSOR_PARALLEL_DEGREE": "max",
    "OPTION_ROLLING_BATCH": "lmi-dist",
    "OPTION_MAX_ROLLING_BATCH_SIZE": "64",
}
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


async def check(up: Router, model: str) -> None:
    """Check that the router serves this model alone, with the settings of the quick start."""
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


async def test_the_quick_start_with_serving_properties_serves_the_model(tmp_path: Path) -> None:
    model = tiny.make("llama", tmp_path / "weights" / "llama")
    folder = tmp_path / "models" / "mymodel"
    folder.mkdir(parents=True)
    (folder / "serving.properties").write_text(PROPERTIES.format(model=model))
    async with router(str(folder), "--no-models-cache", environ=NO_GPU) as up:
        await check(up, "mymodel")


async def test_the_quick_start_with_variables_serves_the_model(hub: Hub, tmp_path: Path) -> None:
    tiny.make("llama", hub.root / "org" / "llama")
    cache = {"HF_ENDPOINT": hub.address, "HF_HUB_CACHE": str(tmp_path / "hub")}
    environ = {**NO_GPU, **VARIABLES, **cache, "ROUTER_DEMO": "on"}  # as scripts/run.sh sets it
    async with router(environ=environ) as up:
        await check(up, "org/llama")
