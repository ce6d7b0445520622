"""LMI's management of models, below /lmi: a real router and fake workers."""

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.processes.routers import Router, chat, fake_python, fake_snapshot, router, shared_router

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

MARGIN = ("--models-memory-margin", "64")
LIMIT = ("--device-limit", "cpu=264")  # 200 MiB for models


def text_of(folder: Path, text: str = "") -> str:
    """Presets of fake models of 64 MiB, made in `folder`; `text` stands at the end."""
    return f"[*]\npython = {fake_python(folder)}\nrequired-memory = 64\nreplica-idle-seconds = 600\n{text}"


@asynccontextmanager
async def world(tmp_path: Path, *options: str, text: str = "") -> AsyncIterator[Router]:
    """A router with options of its own and one model, `local`."""
    fake_snapshot(tmp_path / "models" / "local")
    file = tmp_path / "models.ini"
    file.write_text(text_of(tmp_path, text))
    arguments = ("--models-preset", str(file), "--models-dir", str(tmp_path / "models"))
    async with router(*arguments, *options, *MARGIN, *LIMIT) as up:
        yield up


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Router]:
    async with shared_router(tmp_path_factory.mktemp("lmi"), *MARGIN, *LIMIT) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def up(shared: Router) -> AsyncIterator[Router]:
    """The router of several tests, with `local` and what a test registers."""
    fake_snapshot(shared.models / "local")
    await shared.serve_presets(text_of(shared.folder))
    yield shared
    for row in (await shared.client.get("/lmi/models")).json()["models"]:
        await shared.client.delete(f"/lmi/models/{row['modelName']}")
    shutil.rmtree(shared.models / "further", ignore_errors=True)


def error(response: httpx.Response, says: str = "") -> int:
    """The status of an error answer, whose body must be whole. `says`: a pattern in its message."""
    body = response.json()
    assert set(body) == {"code", "type", "message"}
    assert body["code"] == response.status_code
    assert re.search(says, body["message"])
    return response.status_code


async def described(up: Router, name: str) -> dict[str, Any]:
    ((workflow,),) = ((await up.client.get(f"/lmi/models/{name}")).json(),)
    assert workflow["workflowName"] == name
    (model,) = workflow["models"]
    found: dict[str, Any] = model
    return found


async def test_a_model_is_registered_described_listed_and_unregistered(up: Router) -> None:
    client = up.client
    url = str(fake_snapshot(up.models / "further" / "one"))
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (Path(url) / "adapters" / "x").mkdir(parents=True, exist_ok=True)
        (Path(url) / "adapters" / "x" / file).touch()
    query = {"url": f"file://{url}", "model_name": "org/mine", "job_queue_size": "7", "max_idle_time": "9",
             "device": "cpu", "batch_size": "4", "engine": "Python"}  # fmt: skip
    response = await client.post("/lmi/models", params=query)
    assert (response.status_code, response.json()) == (200, {"status": 'Model "org/mine" registered.'})
    assert response.headers["x-ignored-fields"] == "batch_size"
    assert (await up.status("org/mine"))["value"] == "loaded"
    assert (await client.post("/predictions/org/mine", json={"inputs": "a"})).status_code == 200
    model = await described(up, "org/mine")
    assert (model["queueSize"], model["maxIdleSeconds"], model["status"]) == (7, 9, "Healthy")
    assert model["batchSize"] == (await described(up, "local"))["batchSize"] == 16, "loaded or not"
    (group,) = model["workerGroups"]
    assert (group["device"], group["minWorkers"], group["maxWorkers"]) == (
        {"deviceType": "cpu", "deviceId": -1}, 1, 1,
    )  # fmt: skip
    assert [worker["status"] for worker in group["workers"]] == ["READY"]
    assert error(await client.post("/lmi/models", params=query), "org/mine") == 409
    listed = (await client.get("/lmi/models")).json()["models"]
    assert [(each["modelName"], each["status"]) for each in listed] == [("local", "PENDING"), ("org/mine", "READY")]
    page = (await client.get("/lmi/models", params={"limit": 1})).json()
    assert ([each["modelName"] for each in page["models"]], page["nextPageToken"]) == (["local"], "1")
    page = (await client.get("/lmi/models", params={"limit": 1, "next_page_token": 1})).json()
    assert ([each["modelName"] for each in page["models"]], "nextPageToken" in page) == (["org/mine"], False)
    await client.get("/models?reload=1")  # it stays, for as long as this router runs
    rows = (await client.get("/router/config", params={"model": "org/mine"})).json()["settings"]
    assert {row["origin"] for row in rows if row["key"] == "queue-size"} == {"registered:4"}
    pid = (await up.workers())["org/mine"]
    assert error(await client.delete("/lmi/models/org/mine@x"), "is the adapter x of 'org/mine'") == 400
    response = await client.delete("/lmi/models/org/mine")
    assert response.json() == {"status": 'Model or workflow "org/mine" unregistered'}
    await up.says(r"org/mine#\d+ stopping→stopped")
    assert pid not in (await up.workers()).values()
    assert error(await client.delete("/lmi/models/org/mine")) == 404
    folder = up.models / "further" / "two"
    folder.mkdir()
    (folder / "serving.properties").write_text(f"option.model_id={url}\njob_queue_size=6\nmaxWorkers=2\n")
    assert (await client.post("/lmi/models", params={"url": str(folder)})).status_code == 200
    model = await described(up, "two")
    assert (model["queueSize"], model["workerGroups"][0]["maxWorkers"]) == (6, 2)
    assert error(await client.get("/lmi/models/org/mine")) == 404
    assert error(await client.delete("/lmi/models/local")) == 400


async def test_workers_are_scaled_up_within_memory_and_down(tmp_path: Path) -> None:
    async with world(tmp_path) as up:

        async def scale(**query: Any) -> httpx.Response:
            return await up.client.put("/lmi/models/local", params=query)

        response = await scale(min_worker=2)
        assert response.json()["status"].endswith("New Worker configuration min workers:2 max workers:2")
        first = await described(up, "local")
        assert [len(group["workers"]) for group in first["workerGroups"]] == [2]
        assert error(await scale(min_worker=5), "3 of 5") == 507
        assert (await described(up, "local"))["status"] == "Unhealthy"
        await up.client.get("/models?reload=1")
        assert (await up.status("local"))["replicas"] == {"ready": 3, "open": 3, "least": 5, "most": 5}
        assert (await scale(min_worker=1, max_worker=1)).status_code == 200
        await up.becomes("local", "loaded")
        assert (await described(up, "local"))["status"] == "Healthy"
        assert (await scale(min_worker=0, max_worker=0)).status_code == 200
        await up.becomes("local", "unloaded", reason="requested")
        response = await scale(min_worker=1, synchronous="false")
        assert (response.status_code, set(response.json())) == (202, {"status"})
        await up.becomes("local", "loaded")
        for query in ({"min_worker": "x"}, {"min_worker": 2, "max_worker": 1}, {"max_worker": 99999},
                      {"synchronous": "perhaps"}):  # fmt: skip
            assert error(await scale(**query)) == 400
        assert error(await up.client.put("/lmi/models/none")) == 404


async def test_a_call_for_workers_of_an_idle_model_starts_all_of_them_and_ends_if_it_is_unloaded(
    tmp_path: Path,
) -> None:
    local = tmp_path / "models" / "local"
    async with world(tmp_path, text=f"[local]\nmodel = {local}\nreplica-idle-seconds = 0\n") as up:
        assert (await up.client.post("/models/load", params={"wait": "1"}, json={"model": "local"})).status_code == 200
        assert (await up.client.put("/lmi/models/local", params={"min_worker": 3})).status_code == 200
        assert (await up.status("local"))["replicas"]["ready"] == 3
        await up.client.put("/lmi/models/local", params={"min_worker": 1})
        await up.becomes("local", "loaded", replicas=None)
        fake_snapshot(local, hold_load=str(tmp_path / "never"))
        scaling = asyncio.create_task(up.client.put("/lmi/models/local", params={"min_worker": 2}))
        await up.becomes("local", "loaded", replicas=lambda found: found and found["open"] == 2)
        await up.client.post("/models/unload", json={"model": "local"})
        assert error(await scaling, "^local was unloaded while its workers were starting; try again$") == 503


async def test_a_failed_registration_gives_the_reason_and_lists_nothing(tmp_path: Path) -> None:
    async with world(tmp_path, "--offline", text="[big]\nmodel = models/local\nrequired-memory = 100\n") as up:

        async def register(says: str = "", **query: Any) -> int:
            return error(await up.client.post("/lmi/models", params=query), says)

        good = str(fake_snapshot(tmp_path / "models" / "x" / "good"))
        broken = str(fake_snapshot(tmp_path / "models" / "x" / "broken", die_at_start=3, message="no architecture"))
        outside = str(fake_snapshot(tmp_path / "outside"))
        (tmp_path / "models" / "x" / "link").symlink_to(outside)
        (tmp_path / "models" / "x" / "loop").symlink_to("loop")
        assert await register(r"^Parameter url is required\.$") == 400
        for url in ("s3://bucket/x", "djl://a/b", "https://a.example/b.zip", "word", outside, "/etc/passwd",
                    str(tmp_path / "models" / "x" / "link"), f"{tmp_path}/models/../outside",
                    str(tmp_path / "models" / "x"), f"{tmp_path}/models/x/loop/y", f"{tmp_path}/models/a\0b",
                    "/\0"):  # fmt: skip
            assert await register(url=url) == 400, url
        wrong_ones = (
            "model_name=a b", "model_name=*", "model_name=x\n[y]", "model_version=2\n[y]", "engine=PyTorch",
            "device=nc1", "job_queue_size=0", "min_worker=-1",
        )  # fmt: skip
        for wrong in (dict([each.split("=")]) for each in wrong_ones):
            assert await register(url=good, **wrong) == 400, wrong
        assert await register("no architecture", url=broken) == 500
        assert await register("--offline", url="org/nowhere") == 500
        assert error(await up.client.get("/lmi/models/broken")) == 404
        names = {each["id"] for each in (await up.client.get("/models")).json()["data"]}
        assert names == {"big", "local"}
        response = await up.client.post("/lmi/models", params={"url": broken, "synchronous": "false"})
        assert (response.status_code, response.json()) == (202, {"status": 'Model "broken" registration scheduled.'})
        await up.becomes("broken", "unloaded", failed=True)
        assert [each["status"] for each in (await up.client.get("/lmi/models")).json()["models"]] == [
            "PENDING", "FAILED", "PENDING",
        ]  # fmt: skip
        assert (await described(up, "broken"))["status"] == "FAILED"
        text = (tmp_path / "models.ini").read_text()
        (tmp_path / "models.ini").write_text(text + f"[broken]\nmodel = {good}\n")
        reload = (await up.client.get("/models?reload=1")).json()["reload"]
        assert any("broken" in warning for warning in reload["warnings"])
        assert error(await up.client.delete("/lmi/models/broken")) == 400
        assert (await up.client.post("/v1/chat/completions", json=chat("broken"))).status_code == 200


async def test_a_model_that_is_unregistered_while_presets_are_read_does_not_come_back(
    up: Router, tmp_path: Path
) -> None:
    """The file is a pipe: what is in it is read when we say so."""
    url = str(fake_snapshot(up.models / "further" / "one"))
    query = {"url": f"file://{url}", "model_name": "mine", "synchronous": "false"}
    assert (await up.client.post("/lmi/models", params=query)).status_code == 202
    file, pipe = up.folder / "models.ini", tmp_path / "pipe"
    text = file.read_text()
    os.mkfifo(pipe)
    os.replace(pipe, file)
    reading = asyncio.create_task(up.client.post("/router/reload"))
    with await asyncio.to_thread(open, file, "w") as writer:
        assert (await up.client.delete("/lmi/models/mine")).status_code == 200
        writer.write(text)
    assert (await reading).status_code == 200
    assert (await up.client.get("/lmi/models/mine")).status_code == 404
    file.unlink()


async def test_with_the_flag_lmis_management_is_at_its_own_paths(tmp_path: Path) -> None:
    async with world(tmp_path, "--lmi-management") as up:
        client = up.client
        url = str(fake_snapshot(tmp_path / "models" / "further" / "one"))
        response = await client.post("/models", params={"url": url, "model_name": "mine"})
        assert (response.status_code, response.json()) == (200, {"status": 'Model "mine" registered.'})
        rows = (await client.get("/models")).json()
        assert [row["modelName"] for row in rows["models"]] == ["local", "mine"]
        assert rows == (await client.get("/lmi/models")).json()
        ((workflow,),) = ((await client.get("/models/mine")).json(),)
        assert workflow["workflowName"] == "mine"
        workflows = [{"workflowName": row["modelName"]} for row in rows["models"]]
        assert (await client.get("/workflows")).json() == {"workflows": workflows}
        (described,) = (await client.get("/workflows/mine")).json()
        assert (described["workflowName"], described.keys()) == ("mine", workflow.keys())  # times may differ
        assert (await client.put("/workflows/mine", params={"min_worker": 0})).status_code == 200
        response = await client.post("/workflows", params={"url": url, "model_name": "flow"})
        assert error(response, "use POST /lmi/models") == 501
        assert (await client.get("/workflows")).json() == {"workflows": workflows}, "no model was registered"
        assert (await client.put("/models/mine", params={"min_worker": 0})).status_code == 200
        assert (await client.delete("/models/mine")).status_code == 200
        assert error(await client.get("/models/mine")) == 404
        # llama-server's other calls, and OpenAI's list, stay where they are
        assert (await client.post("/models/load", json={"model": "local"})).status_code == 200
        assert [row["id"] for row in (await client.get("/v1/models")).json()["data"]] == ["local"]
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert paths["/models"]["get"]["tags"] == paths["/lmi/models"]["get"]["tags"] == ["LMI"]


async def test_a_version_is_a_model_of_its_own(up: Router) -> None:
    client = up.client
    for version in ("1", "2"):
        url = str(fake_snapshot(up.models / "further" / version))
        query = {"url": url, "model_name": "local", "model_version": version, "synchronous": "false"}
        assert (await client.post("/lmi/models", params=query)).status_code == 202
    body = {"inputs": "a"}
    for path, model in (("/predictions/local/2", "local:2"), ("/predictions/local", "local"),
                        ("/invocations?model_name=local&model_version=1", "local:1"),
                        ("/predictions/local:1", "local:1")):  # fmt: skip
        response = await client.post(path, json=body)
        assert (response.status_code, response.headers["x-router-model"]) == (200, model), path
    assert error(await client.post("/predictions/local/3", json=body), "model 'local' has no version '3'") == 404
    assert error(await client.post("/predictions/none/3", json=body)) == 404
    assert (await client.put("/lmi/models/local/2", params={"min_worker": 0})).status_code == 200
    assert (await client.delete("/lmi/models/local/2")).status_code == 200
    assert error(await client.get("/lmi/models/local/2")) == 404


async def test_sagemakers_headers_name_the_model_and_an_asynchronous_request_is_refused(up: Router) -> None:
    await up.serve_presets(text_of(up.folder, f"[other]\nmodel = {up.models}/local\n"))

    async def post(body: dict[str, Any], **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await up.client.post("/invocations", json=body, headers=named)

    for target in ("other", "other.tar.gz"):
        response = await post({"inputs": "a"}, X_Amzn_SageMaker_Target_Model=target)
        assert (response.status_code, response.headers["x-router-model"]) == (200, "other")
    assert error(await post({"inputs": "a"}, X_Amzn_SageMaker_Target_Model="none")) == 404
    body = {"inputs": "a", "model": "local"}
    assert error(await post(body, X_Amzn_SageMaker_Target_Model="other")) == 400
    assert (await post(body, X_Synchronous="true")).status_code == 200
    for headers in ({"X_Synchronous": "false"}, {"X_Starting_Token": "a"},
                    {"X_Amzn_SageMaker_Custom_Attributes": "trace=1,x-synchronous=false"}):  # fmt: skip
        assert error(await post(body, **headers), "results are not stored") == 400


async def test_calls_register_what_lies_in_folders_that_the_administrator_allowed(tmp_path: Path) -> None:
    allowed = tmp_path / "shelf"
    async with world(tmp_path, "--registration-dirs", str(allowed), text="enable-lora = on\n") as up:
        outside = str(fake_snapshot(tmp_path / "outside"))
        assert error(await up.client.post("/lmi/models", params={"url": outside}), "--registration-dirs") == 400
        inside = str(fake_snapshot(allowed / "one"))
        assert (await up.client.post("/lmi/models", params={"url": inside})).status_code == 200
        for name, folder in (("mine", allowed / "adapter"), ("other", tmp_path / "adapter")):
            folder.mkdir()
            (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
            (folder / "adapter_model.safetensors").write_text("{}")
            query = {"name": name, "src": str(folder), "preload": "false"}
            response = await up.client.post("/models/local/adapters", params=query)
            assert response.status_code == (200 if name == "mine" else 400), response.text
        query["pin"] = "true"
        answer = await up.client.post("/models/local/adapters/mine/update", params=query)
        assert error(answer, "^preload=false and pin=true exclude each other; leave preload out$") == 400
        assert error(await up.client.post("/models/local/adapters", params={**query, "name": "x"})) == 400
