"""LMI's published quick start with a file, unchanged but for a tiny model in place of the user's. No GPU is here. The
variables of the other one are in tests/router/config/test_named_models.py and docs/migration/lmi.md."""

from pathlib import Path

import pytest

from tests import tiny
from tests.processes.routers import router

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


async def test_the_quick_start_with_serving_properties_serves_the_model(tmp_path: Path) -> None:
    model = tiny.make("llama", tmp_path / "weights" / "llama")
    folder = tmp_path / "models" / "mymodel"
    folder.mkdir(parents=True)
    (folder / "serving.properties").write_text(PROPERTIES.format(model=model))
    async with router(str(folder), "--no-models-cache", environ={"CUDA_VISIBLE_DEVICES": ""}) as up:
        await up.becomes("mymodel", "loaded")
        assert [row["id"] for row in (await up.client.get("/v1/models")).json()["data"]] == ["mymodel"]
        assert (await up.client.get("/ping")).json() == {"status": "healthy"}
        body = {"inputs": "The quick brown fox", "parameters": {"max_new_tokens": 4}}
        response = await up.client.post("/invocations", json=body)
        assert response.status_code == 200, response.text
        assert response.json()["generated_text"]
        rows = (await up.client.get("/router/config", params={"model": "mymodel"})).json()["settings"]
        values = {row["key"]: row["value"] for row in rows}
        assert (values["parallel"], values["tensor-parallel"], values["device"]) == ("64", "max", "auto")
        await up.says("tensor-parallel = max counts accelerators, and it is on the CPU, so one process computes it")
        assert not any(line.startswith("warning:") for line in up.log), "the configuration itself has no fault"
