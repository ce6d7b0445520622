"""Statuses, bodies and headers that clients receive from a real router with fake workers."""

import asyncio
import functools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
import pytest_asyncio

from router.launch.page_lock import lockable
from tests.processes.routers import (
    Router,
    chat,
    error_of,
    is_alive,
    presets,
    refused,
    router,
)
from worker.protocol.dialects import Dialect
from worker.protocol.json_faults import MAX_OBJECTS
from worker.protocol.routes import ROUTES

MARGIN = ("--models-memory-margin", "64")
LIMIT = ("--device-limit", "cpu=1064")  # 1000 MiB for models
pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Router]:
    """A router whose models are asked and never put out."""
    folder = tmp_path_factory.mktemp("shared")
    models: dict[str, dict[str, Any]] = {
        "alpha": {},
        "org/beta:q4": {},
        "huge": {"required-memory": 9000},
        "broken": {"_die_at_start": 3, "_message": "config.json names no architecture"},
        "crashing": {"_die_at_start": 1, "_last_words": "something went wrong"},
        "manual": {"autoload": "off"},
        "answers-500": {"_status": 500},
    }
    async with router("--models-preset", str(presets(folder, models)), *MARGIN, *LIMIT) as up:
        yield up


async def test_health_and_ready_need_no_model(shared: Router) -> None:
    for path in ("/health", "/v1/health"):
        response = await shared.client.get(path)
        assert (response.status_code, response.json()) == (200, {"status": "ok"})
    assert (await shared.client.get("/ready")).status_code == 200
    head = await shared.client.head("/health")
    assert (head.status_code, head.content) == (200, b"")


async def test_health_of_one_model_never_loads_it(shared: Router) -> None:
    response = await shared.client.get("/health", params={"model": "org/beta:q4"})
    assert response.status_code == 503
    assert (await shared.status("org/beta:q4"))["value"] == "unloaded"
    assert (await shared.client.get("/health", params={"model": "no"})).status_code == 404


async def test_the_list_has_every_model_and_loads_none(shared: Router) -> None:
    for path in ("/v1/models", "/models"):
        body = (await shared.client.get(path)).json()
        assert body["object"] == "list"
        assert [entry["id"] for entry in body["data"]][:3] == ["alpha", "org/beta:q4", "huge"]
    entry = body["data"][1]
    assert {"id", "aliases", "tags", "object", "owned_by", "created", "status", "architecture", "source", "can_remove",
            "capabilities", "meta"} <= set(entry)  # fmt: skip
    assert entry["owned_by"] == "llamacpp"
    assert entry["source"] == "preset"
    assert entry["status"]["value"] == "unloaded"
    assert "failed" not in entry["status"]
    assert entry["meta"]["n_vocab"] == 32
    assert entry["max_model_len"] == entry["meta"]["n_ctx"] > 0


async def test_one_model_is_found_raw_and_percent_encoded(shared: Router) -> None:
    for path in ("/v1/models/org/beta:q4", "/v1/models/org%2Fbeta%3Aq4", "/models/org/beta:q4"):
        assert (await shared.client.get(path)).json()["id"] == "org/beta:q4"
    assert error_of(await shared.client.get("/v1/models/none")) == (404, "model_not_found")


async def test_a_known_path_that_is_not_offered_names_the_alternative(shared: Router) -> None:
    routes = [route for route in ROUTES if route.instead]
    assert len(routes) >= 10
    for route in routes:
        path = route.path.replace("{slot}", "0").replace("{digest}", "sha256:0")
        response = await shared.client.request(route.method, path, json={"model": "huge"})
        if route.dialect in (Dialect.OLLAMA, Dialect.LMI, Dialect.FASTCHAT):
            member = {Dialect.OLLAMA: "error", Dialect.LMI: "message", Dialect.FASTCHAT: "text"}[route.dialect]
            assert response.status_code == 501
            assert "; use " in response.json()[member]
            continue
        assert error_of(response, "; use ") == (501, "not_offered")
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        stored = await shared.client.request(method, f"/v1/responses/resp_1{path}", json={})
        assert error_of(stored) == (501, "not_offered")
    conversation = await shared.client.post("/v1/conversations", json={})
    assert "use the whole conversation in `input`" in conversation.json()["error"]["message"]
    completion = await shared.client.get("/v1/chat/completions/chatcmpl-1")
    assert "use the whole conversation in `messages`" in completion.json()["error"]["message"]
    for path in ("/tools", "/cors-proxy"):
        assert error_of(await shared.client.get(path)) == (403, "feature_disabled")
    assert (await shared.client.post("/v1/streams/lookup", json={})).json() == []
    assert (await shared.client.get("/v1/streams", params={"conversation_id": "x"})).json() == []
    assert error_of(await shared.client.get("/v1/stream")) == (404, "not_found")


async def test_an_unknown_path_gets_the_error_format_of_its_api(shared: Router) -> None:
    for path, member in (("/api/wibble", "error"), ("/v1/messages/batches", "request_id"), ("/lmi/wibble", "message")):
        response = await shared.client.post(path, json={})
        assert response.status_code == 404
        told = response.json()[member]
        assert isinstance(told, str)
        assert told == response.headers["x-request-id"] or told.startswith("File Not Found")


async def test_slots_are_those_of_loaded_models_and_load_none(shared: Router) -> None:
    await shared.client.post("/v1/chat/completions", json=chat("alpha"))
    slots = (await shared.client.get("/slots", params={"model": "alpha", "fail_on_no_slot": "1"})).json()
    assert [slot["id"] for slot in slots] == list(range(16))
    assert {slot["model"] for slot in (await shared.client.get("/slots")).json()} <= {"alpha", "manual", "answers-500"}
    assert error_of(await shared.client.get("/slots", params={"model": "huge"})) == (400, "model_not_loaded")


async def test_the_model_may_stand_in_the_query_or_the_path(shared: Router) -> None:
    assert (await shared.client.post("/v1/engines/alpha/embeddings", json={"input": "a"})).status_code == 200
    body = {"messages": [{"role": "user", "content": "hi"}]}
    response = await shared.client.post("/v1/chat/completions?model=alpha", json=body)
    assert response.status_code == 200
    wrong = await shared.client.post("/v1/chat/completions", json=chat("x") | {"model": 3})
    assert error_of(wrong) == (400, "invalid_value")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"nul", b'{"model":"alpha","x":NaN}', b'{"a":1}}', b"\xff", b'{"model":"al\xffpha"}',
     b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"],
    ids=["empty", "open", "list", "string", "word", "nan", "tail", "bytes", "utf8", "deep"],
)  # fmt: skip
async def test_what_is_no_json_object_is_400(shared: Router, body: bytes) -> None:
    assert error_of(await shared.client.post("/v1/chat/completions", content=body)) == (400, "invalid_json")


async def test_a_body_with_too_many_values_is_rejected_where_the_router_parses_it(shared: Router) -> None:
    body = b'{"model":"alpha","x":[' + b"[]," * MAX_OBJECTS + b"1]}"
    assert error_of(await shared.client.post("/models/load", content=body)) == (400, "invalid_value")


@pytest.mark.parametrize("headers", [{}, {"Content-Encoding": "identity"}], ids=["plain", "aiohttp"])
async def test_a_byte_order_mark_before_the_body_is_ignored(shared: Router, headers: dict[str, str]) -> None:
    mark = b"\xef\xbb\xbf"
    for path, body in (("/v1/chat/completions", chat("alpha")), ("/api/show", {"model": "alpha"})):
        response = await shared.client.post(path, content=mark + orjson.dumps(body), headers=headers)
        assert response.status_code == 200
        response = await shared.client.post(path, content=mark + mark + orjson.dumps(body), headers=headers)
        assert response.status_code == 400


@pytest.mark.parametrize("rest", [b'"x":"\xff"', b'"x":1e999', b'"x":"\\ud800"', b'"model":"\\udfff"'])
async def test_what_only_the_strict_parser_refuses_is_400_too(shared: Router, rest: bytes) -> None:
    for path in ("/models/load", "/models/unload"):
        response = await shared.client.post(path, content=b'{"model":"alpha",' + rest + b"}")
        assert error_of(response) == (400, "invalid_json")


async def test_the_last_of_two_models_counts_in_the_router_as_in_the_worker(shared: Router) -> None:
    for first in (b'"model"', b'"mod\\u0065l"'):
        body = b"{" + first + b':"huge","model":"alpha","content":"a"}'
        response = await shared.client.post("/tokenize", content=body)
        assert response.headers["x-router-model"] == orjson.loads(body)["model"] == "alpha"


async def test_a_name_that_cannot_be_one_is_neither_compared_nor_repeated(shared: Router) -> None:
    response = await shared.client.post("/tokenize", json={"model": "alph" * 500_000})
    assert error_of(response) == (404, "model_not_found")
    assert len(response.content) < 1000  # and a comparison would take longer than the time-out of the client


async def test_paths_encodings_and_sizes(shared: Router) -> None:
    client = shared.client
    response = await client.get("/v1/nothing")
    assert error_of(response) == (404, "not_found")
    told = "File Not Found: /v1/nothing is no path of this server; GET /openapi.json lists what is"
    assert response.json()["error"]["message"] == told
    prefixed = ("/v1/v1", "/openai/v1", "/v1/openai/v1", "/engines/v1", "/some/other/place/v1")
    for mistaken in ("/v1/chat/completion", *(f"{prefix}/chat/completions" for prefix in prefixed)):
        response = await client.post(mistaken, json={})
        assert response.json()["error"]["message"].endswith("did you mean /v1/chat/completions?")
    for method in ("GET", "POST"):
        response = await client.request(method, "/load")
        assert response.json()["error"]["message"].endswith("did you mean /models/load?")
    response = await client.post("/v1/responses/compact", json={"model": "alpha", "input": "hi"})
    assert error_of(response) == (501, "not_offered")
    assert error_of(await client.get("/v1/realtime", params={"model": "alpha"})) == (501, "not_offered")
    response = await client.get("/" + "x" * 300)
    assert response.json()["error"]["message"] == "File Not Found"
    assert error_of(await client.get("/v1/models/load")) == (404, "model_not_found")
    response = await client.post("/v1/chat/completions", content=b"x", headers={"Content-Encoding": "gzip"})
    assert error_of(response) == (415, "encoding")
    reader, writer = await asyncio.open_connection("127.0.0.1", shared.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n{" % (65 << 20))
    assert b" 413 " in await reader.readline(), "the answer comes before the whole body is sent"
    writer.close()
    response = await client.post("/v1/chat/completions?autoload=perhaps", json=chat("alpha"))
    assert error_of(response) == (400, "invalid_value")


async def test_request_ids_are_kept_if_they_are_fit(shared: Router) -> None:
    response = await shared.client.get("/health", headers={"X-Request-Id": "my.id-1"})
    assert response.headers["x-request-id"] == response.headers["request-id"] == "my.id-1"
    await shared.says("rid=my.id-1")
    response = await shared.client.get("/health", headers={"X-Request-Id": "not fit"})
    assert response.headers["x-request-id"].startswith("req_")


async def test_unknown_fields_in_a_call_to_the_router_are_reported(shared: Router) -> None:
    body = {"model": "manual", "wait": True, "odd": None}
    for path in ("/models/unload", "/api/show", "/router/pin"):
        answer = await shared.client.post(path, json={**body, "pinned": False} if "pin" in path else body)
        assert answer.headers["x-ignored-fields"] == "wait", path
    prompts = {"prompts": [{"model": "manual", "max_token": 4}]}
    answer = await shared.client.post("/api/v1/token_check", json=prompts)
    assert answer.headers["x-ignored-fields"] == "prompts[].max_token"
    answer = await shared.client.post("/api/show", json={"model": "manual"})
    assert "x-ignored-fields" not in answer.headers


async def test_a_model_that_cannot_fit_is_507_at_once_with_the_arithmetic(shared: Router) -> None:
    response = await shared.client.post("/v1/chat/completions", json=chat("huge"))
    assert error_of(response) == (507, "does_not_fit")
    row = response.json()["error"]["devices"]["cpu"]
    assert row == {"required_mib": 9000, "available_mib": 1000, "margin_mib": 64}
    assert error_of(await shared.client.post("/models/load", json={"model": "huge"})) == (507, "does_not_fit")
    assert (await shared.status("huge"))["value"] == "unloaded"


async def test_a_model_that_would_fail_the_same_way_is_500_load_failed(shared: Router) -> None:
    for _ in range(2):
        response = await shared.client.post("/v1/chat/completions", json=chat("broken"))
        assert error_of(response, "config.json names no architecture") == (500, "load_failed")
    status = await shared.status("broken")
    assert (status["value"], status["failed"], status["exit_code"]) == ("unloaded", True, 3)
    assert "no architecture" in status["error"]
    response = await shared.client.post("/v1/chat/completions?autoload=false", json=chat("broken"))
    assert error_of(response) == (400, "model_not_loaded")


async def test_a_model_that_crashes_at_its_start_backs_off(shared: Router) -> None:
    response = await shared.client.post("/v1/chat/completions", json=chat("crashing"))
    assert error_of(response) == (503, "load_backoff")
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert "something went wrong" in response.json()["error"]["message"]
    assert (await shared.status("crashing"))["reason"] == "crashed"


async def test_autoload_off_is_400_until_it_is_loaded(shared: Router) -> None:
    client = shared.client
    assert error_of(await client.post("/v1/chat/completions", json=chat("manual"))) == (400, "model_not_loaded")
    response = await client.post("/v1/chat/completions?autoload=true", json=chat("manual"))
    assert response.status_code == 200
    assert (await client.post("/v1/chat/completions", json=chat("manual"))).status_code == 200


async def test_a_workers_own_errors_pass_unchanged(shared: Router) -> None:
    response = await shared.client.post("/v1/chat/completions", json=chat("answers-500"))
    assert response.status_code == 500
    assert response.json() == {"error": {"code": 500, "message": "as told", "reason": "internal"}}


async def test_props_of_the_router_and_of_a_model_that_is_not_loaded(shared: Router) -> None:
    body = (await shared.client.get("/props")).json()
    assert body["role"] == "router"
    assert body["memory_margin_mib"] == 64
    body = (await shared.client.get("/props", params={"model": "huge"})).json()
    assert body["is_loaded"] is False
    assert body["chat_template"] == "{{ messages }}"
    assert body["eos_token"] == "</s>"
    assert body["default_generation_settings"]["n_ctx"] == 256


async def test_metrics_name_every_model_and_load_none(shared: Router) -> None:
    await shared.client.post("/v1/chat/completions", json=chat("alpha"))
    text = (await shared.client.get("/metrics")).text
    assert 'router_model_state{model="alpha",state="loaded"} 1.0' in text
    assert 'router_model_state{model="org/beta:q4",state="unloaded"} 1.0' in text
    assert 'router_device_margin_bytes{device="cpu",node="local"} 6.7108864e+07' in text
    one = (await shared.client.get("/metrics", params={"model": "alpha"})).text
    assert "llamacpp:tokens_predicted_total" in one
    assert "org/beta" not in one


async def test_the_state_of_the_router_adds_up(shared: Router) -> None:
    await shared.client.post("/v1/chat/completions", json=chat("alpha"))
    body = (await shared.client.get("/router/state")).json()
    (cpu,) = [device for device in body["devices"] if device["id"] == "cpu"]
    assert cpu["margin"] == 64 << 20
    assert cpu["limit"] == 1064 << 20
    assert cpu["reserved"] == sum(worker["reserved"].get("cpu", 0) for worker in body["workers"])


async def test_a_dry_run_shows_what_a_load_would_do(shared: Router) -> None:
    body = (await shared.client.get("/router/plan", params={"model": "huge"})).json()
    assert body["decision"] == "refuse"
    assert body["shortage"]["cpu"]["required"] == 9000 << 20
    body = (await shared.client.get("/router/plan", params={"model": "org/beta:q4"})).json()
    assert body["decision"] == "start"
    assert (await shared.status("org/beta:q4"))["value"] == "unloaded"


async def test_load_unload_and_their_errors(up: Router, tmp_path: Path) -> None:
    await up.serve(tmp_path, {"a": {}, "b": {}})
    client = up.client
    assert error_of(await client.post("/models/unload", json={"model": "a"})) == (400, "not_running")
    assert error_of(await client.post("/models/load", json={"model": "x"})) == (404, "model_not_found")
    assert error_of(await client.post("/models/load", json={})) == (400, "model_missing")
    assert error_of(await client.post("/models/load", json={"model": "a", "extra_args": []})) == (
        400,
        "invalid_value",
    )
    response = await client.post("/models/load", json={"model": "a"})
    assert (response.status_code, response.json()) == (200, {"success": True})
    assert error_of(await client.post("/models/load", json={"model": "a"})) == (400, "already_running")
    response = await client.post("/models/load?wait=1", json={"model": "a"})
    body = response.json()
    assert (body["success"], body["status"]["value"], body["evicted"]) == (True, "loaded", [])
    assert body["load_ms"] >= 0
    pid = (await up.workers())["a"]
    response = await client.post("/models/unload?wait=1", json={"model": "a"})
    assert response.json() == {"success": True}
    status = await up.status("a")
    assert (status["value"], status["reason"]) == ("unloaded", "requested")
    assert not is_alive(pid)


async def test_a_model_past_its_sleep_idle_seconds_is_sleeping_for_clients_of_llama_server(
    up: Router, tmp_path: Path
) -> None:
    await up.serve(tmp_path, {"a": {"sleep-idle-seconds": "0"}})
    assert (await up.client.get("/props?model=a")).json()["is_sleeping"] is False
    assert (await up.client.post("/v1/chat/completions", json=chat("a"))).status_code == 200
    await up.becomes("a", "unloaded")
    assert (await up.client.get("/props?model=a")).json()["is_sleeping"] is True


@pytest.mark.skipif((lockable() or 1 << 60) < 8 << 20, reason="this user may not lock 8 MiB of memory")
async def test_an_evicted_model_sleeps_in_main_memory_until_it_is_asked_for_or_unloaded(tmp_path: Path) -> None:
    file = presets(tmp_path, {"a": {}, "b": {}})
    async with router(
        "--models-preset", str(file), "--models-max", "1", "--swap-patience", "0", "--sleep-memory", "8", *MARGIN
    ) as up:
        ask = functools.partial(up.client.post, "/v1/chat/completions")
        for name in ("a", "b"):
            assert (await ask(json=chat(name))).status_code == 200
        status = await up.becomes("a", "sleeping")
        assert status["reason"] == "evicted"
        assert status["memory"]["cpu"]["reserved_mib"] == 1
        assert (await up.client.get("/props?model=a")).json()["is_sleeping"] is True
        assert 'router_model_state{model="a",state="sleeping"} 1.0' in (await up.client.get("/metrics")).text
        assert error_of(await up.client.post("/models/load", json={"model": "a"})) == (400, "already_running")
        assert (await ask(json=chat("a"))).status_code == 200
        await up.becomes("b", "sleeping")
        assert (await up.client.post("/models/unload?wait=1", json={"model": "b"})).json() == {"success": True}
        assert (await up.status("b"))["value"] == "unloaded"
        assert error_of(await up.client.post("/models/unload", json={"model": "b"})) == (400, "not_running")


async def test_a_reload_restarts_only_what_has_changed(up: Router, tmp_path: Path) -> None:
    file = await up.serve(tmp_path, {"a": {}, "b": {}})
    for name in "ab":
        await up.client.post("/v1/chat/completions", json=chat(name))
    before = await up.workers()
    good = file.read_text()
    file.write_text(good + "ctx-size = 128\n")  # of b, the last section
    body = (await up.client.get("/models?reload=1")).json()["reload"]
    assert (body["changed"], body["restarted"]) == (["b"], ["b"])
    await up.becomes("b", "unloaded", reason="config_changed")
    assert await up.workers() == {"a": before["a"]}
    file.write_text(good + "ctx-sise = 1\n")
    response = await up.client.get("/models?reload=1")
    assert error_of(response) == (500, "preset_invalid")
    (row,) = response.json()["error"]["errors"]
    assert (row["section"], row["key"], row["line"]) == ("b", "ctx-sise", len(good.splitlines()) + 1)
    assert "ctx-size" in str(row)
    assert (await up.client.post("/v1/chat/completions", json=chat("b"))).status_code == 200


async def test_lists_have_a_model_whose_files_no_json_can_contain(up: Router, tmp_path: Path) -> None:
    """Half a surrogate pair and a number of more than 64 bits, which orjson does not write."""
    await up.serve(tmp_path, {"a": {}, "odd": {}})
    file = tmp_path / "snapshots" / "odd" / "config.json"
    config = {
        **json.loads(file.read_text()),
        "torch_dtype": "\ud83d",
        "quantization_config": {"quant_method": "\ud83d"},
    }
    file.write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [10**30], "data_offsets": [0, 16]}}).encode()
    (file.parent / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    assert (await up.client.post("/v1/chat/completions", json=chat("odd"))).status_code != 200
    for path in ("/v1/models", "/models", "/api/tags", "/router/state", "/router/logs", "/v1/models/odd"):
        response = await up.client.get(path)
        assert response.status_code == 200, path
        assert orjson.loads(response.content), path


async def test_a_file_that_is_edited_is_read_again_and_a_bad_edit_changes_nothing(tmp_path: Path) -> None:
    file = presets(tmp_path, {"a": {}, "b": {}})
    async with router("--models-preset", str(file), "--models-watch", *MARGIN) as up:
        for name in "ab":
            await up.client.post("/v1/chat/completions", json=chat(name))
        before = await up.workers()
        good = file.read_text()
        file.write_text(good + "ctx-sise = 1\n")
        assert f"models.ini:{len(good.splitlines()) + 1}: [b]" in await up.says("presets not reloaded")
        (error,) = (await up.client.get("/router/state")).json()["reload"]["errors"]
        assert "ctx-sise" in error
        assert await up.workers() == before
        file.write_text(good + "ctx-size = 128\n")  # of b, the last section
        await up.becomes("b", "unloaded", reason="config_changed")
        assert (await up.client.get("/router/state")).json()["reload"]["errors"] == []


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--device-limit", "cuda:9=100"), 2, ("cuda:9",)),
        (("--device-limit", "cpu=0.001%"), 2, ("cpu=0.001%", "leaves nothing beside the margin")),
        (("--port", "{port}"), 1, ("{port}",)),
    ],
)
async def test_what_cannot_be_served_stops_the_start_with_one_message(
    shared: Router, options: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    found, message = await refused(*(option.format(port=shared.port) for option in options))
    assert found == code
    assert all(word.format(port=shared.port) in message for word in words), message
    assert "Traceback" not in message


async def test_openai_clients_try_again_only_what_may_succeed(up: Router, tmp_path: Path) -> None:
    await up.serve(tmp_path, {"huge": {"required-memory": 9000}, "dies": {"_die_at_start": 1}})
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{up.port}/v1", api_key="x", max_retries=1)
    for model, status, attempts in (("huge", 507, 1), ("dies", 503, 2)):
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model=model, prompt="a")
        counted = f'router_requests_total{{code="{status}",endpoint="completions",model="{model}"}} {attempts}.0'
        assert counted in (await up.client.get("/metrics")).text
    await client.close()
