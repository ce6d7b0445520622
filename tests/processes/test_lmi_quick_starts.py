"""LMI's published quick start by variables, unchanged but for a tiny model in place of the user's. No GPU is here.

tests/router/config/test_serving_properties.py has the one by file.
"""

from pathlib import Path

import pytest

from tests import tiny
from tests.processes.hubs import Hub
from tests.processes.routers import router

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

MODEL = "org/llama"
VARIABLES = {
    "HF_MODEL_ID": MODEL, "TENSOR_PARALLEL_DEGREE": "max", "OPTION_ROLLING_BATCH": "lmi-dist",
    "OPTION_MAX_ROLLING_BATCH_SIZE": "64",
}  # fmt: skip


async def test_the_quick_start_with_variables_serves_the_model_with_its_settings(hub: Hub, tmp_path: Path) -> None:
    tiny.make("llama", hub.root / MODEL)
    cache = {"HF_ENDPOINT": hub.address, "HF_HUB_CACHE": str(tmp_path / "hub"), "CUDA_VISIBLE_DEVICES": ""}
    async with router(environ={**VARIABLES, **cache, "ROUTER_DEMO": "on"}) as up:  # as scripts/run.sh sets it
        await up.becomes(MODEL, "loaded")
        assert [row["id"] for row in (await up.client.get("/v1/models")).json()["data"]] == [MODEL]
        assert (await up.client.get("/ping")).json() == {"status": "healthy"}
        body = {"inputs": "The quick brown fox", "parameters": {"max_new_tokens": 4}}
        response = await up.client.post("/invocations", json=body)
        assert response.status_code == 200, response.text
        assert response.json()["generated_text"]
        rows = (await up.client.get("/router/config", params={"model": MODEL})).json()["settings"]
        values = {row["key"]: row["value"] for row in rows}
        assert (values["parallel"], values["tensor-parallel"], values["device"]) == ("64", "max", "auto")
        await up.says("tensor-parallel = max counts accelerators, and it is on the CPU, so one process computes it")
        assert not any(line.startswith("warning:") for line in up.log), "the configuration itself has no fault"
