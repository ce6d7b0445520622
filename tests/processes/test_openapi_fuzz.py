"""A real router conforms to its OpenAPI document: schemathesis finds no violation."""

from pathlib import Path

import pytest

from tests.processes.questioner import question, write_models
from tests.processes.routers import router

pytestmark = pytest.mark.slow


async def test_a_router_answers_as_its_description_says(tmp_path: Path) -> None:
    presets = write_models(tmp_path)
    async with router("--models-preset", str(presets), "--fork-server", environ={"HF_HUB_OFFLINE": "1"}) as up:
        await up.says("is warm")
        for model in ("chat", "embed"):
            (await up.client.post("/models/load?wait=1", json={"model": model})).raise_for_status()
        url = f"http://127.0.0.1:{up.port}"
        code, report = await question(url, tmp_path, "--phases", "fuzzing", "--max-examples", "2", "--seed", "1")
        assert code == 0, report
        assert [line for line in up.log if " failed: " in line or "failed in the router" in line] == []
