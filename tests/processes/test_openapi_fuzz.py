"""A real router conforms to its OpenAPI document: schemathesis finds no violation."""

from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest

from router.api.openapi import document
from tests.processes.questioner import closed, question, write_models
from tests.processes.routers import router
from tests.processes.upstreams import unasked, world
from worker.protocol.routes import ROUTES, query

pytestmark = pytest.mark.slow


async def test_a_router_answers_as_its_description_says(tmp_path: Path) -> None:
    presets = write_models(tmp_path)
    async with router("--models-preset", str(presets), "--fork-server", environ={"HF_HUB_OFFLINE": "1"}) as up:
        await up.says("is warm")
        for model in ("chat", "embed"):
            (await up.client.post("/models/load?wait=1", json={"model": model})).raise_for_status()
        url = f"http://127.0.0.1:{up.port}"
        code, report = await question(url, tmp_path, "--phases", "fuzzing", "--max-examples", "1", "--seed", "1")
        assert code == 0, report
        assert [line for line in up.log if " failed: " in line or "failed in the router" in line] == []


DOCUMENT = closed(document())
GETS = [route.path for route in ROUTES if route.method == "GET" and route.response and route.response.body]


@pytest.mark.parametrize("of_a", ["nothing", "a worker"])
async def test_whatever_is_looked_up_is_as_described(tmp_path: Path, of_a: str) -> None:
    async with world(tmp_path, unasked) as up:
        if of_a == "a worker":
            await up.fleet.load("a")
        async with up.client() as client:
            for path in GETS:
                route = next(route for route in ROUTES if (route.method, route.path) == ("GET", path))
                for asked in [{}, {"model": "a"}][: 1 + ("model" in query(route))]:
                    answer = await client.get(path.replace("{id}", "a"), params=asked)
                    told = DOCUMENT["paths"][path]["get"]["responses"][str(answer.status_code)]
                    if "$ref" in told:
                        told = DOCUMENT["components"]["responses"][told["$ref"].rpartition("/")[2]]
                    schema = told["content"][answer.headers["content-type"].partition(";")[0]]["schema"]
                    judge = jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]})
                    assert (path, [error.message for error in judge.iter_errors(answer.json())]) == (path, [])
