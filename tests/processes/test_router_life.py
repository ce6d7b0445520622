"""A router from its start to its end: signals, reloads, addresses, what a supervisor sees."""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.processes.routers import (
    ROOT,
    Router,
    chat,
    error_of,
    fake_python,
    fake_snapshot,
    is_alive,
    lines_written,
    presets,
    refused,
    router,
    until,
)

MARGIN = ("--models-memory-margin", "64")
PATH = "/v1/chat/completions"


pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


async def streaming(up: Router, body: dict[str, Any]) -> "tuple[asyncio.Task[bytes], asyncio.Event]":
    """A stream that goes on: a task with all that comes of it, and what is set when something has come."""
    begun = asyncio.Event()

    async def listen() -> bytes:
        got = b""
        async with up.client.stream("POST", PATH, json=body) as response:
            try:
                async for part in response.aiter_raw():
                    got += part
                    begun.set()
            except httpx.RemoteProtocolError:
                return got + b"<broken>"
        return got

    return asyncio.create_task(listen()), begun


# Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_during_the_start_takes_effect(tmp_path: Path, number: int) -> None:
    """The first line that it says may come before its devices have been read."""
    file = presets(tmp_path, {"a": {"load-on-startup": "on"}})
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "router", "--models-preset", str(file), "--port", "0", *MARGIN,
        "--state-dir", str(tmp_path / "state"), "--runtime-dir", str(tmp_path / "run"),
        stderr=asyncio.subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stderr is not None
    said = await process.stderr.readline()
    process.send_signal(number)
    if number == signal.SIGHUP:
        await until(process.stderr, "models")
        process.terminate()
    said += (await process.communicate())[1]
    assert process.returncode == 0, said.decode()
    assert b"Traceback" not in said
    assert b"was to be loaded on startup" not in said


async def test_a_second_signal_ends_everything_at_once(tmp_path: Path) -> None:
    file = presets(tmp_path, {"a": {"_ignore_sigterm": True, "stop-timeout": 3600}})  # far beyond the deadline of `end`
    async with router("--models-preset", str(file), *MARGIN) as up:
        task, begun = await streaming(up, chat("a", "w", stream=True, max_tokens=9000, fake={"delay": 0.02}))
        await begun.wait()
        (pid,) = (await up.workers()).values()
        up.process.send_signal(signal.SIGTERM)
        await up.says("stopping")
        assert await up.end(signal.SIGINT) == 130
        assert not is_alive(pid)
        got = await task
        assert b'"reason":"draining"' in got
        assert got.endswith(b"<broken>")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_no_signal_kills_a_router_that_is_about_to_exit(tmp_path: Path, number: int) -> None:
    async with router("--models-preset", str(presets(tmp_path, {"a": {}})), *MARGIN) as up:
        up.process.terminate()
        await up.says("stopping")
        exited = asyncio.create_task(up.process.wait())
        while not exited.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(up.process.pid, number)  # the method of the process would reap it, and lose its exit code
            await asyncio.wait({exited}, timeout=0.001)
        assert await exited in ({0, 130} if number == signal.SIGTERM else {0})


async def test_a_disk_that_does_not_answer_holds_up_neither_other_models_nor_the_end(tmp_path: Path) -> None:
    file = presets(tmp_path, {"a": {}, "gone": {}})
    unanswered = tmp_path / "snapshots" / "gone" / "tokenizer_config.json"
    unanswered.unlink()
    os.mkfifo(unanswered)  # opening it blocks, since no writer comes
    async with router("--models-preset", str(file), *MARGIN) as up:
        asked = asyncio.create_task(up.client.post(PATH, json=chat("gone")))
        await up.becomes("gone", "loading")
        assert (await up.client.post(PATH, json=chat("a"))).status_code == 200
        listed = (await up.client.get("/models")).json()["data"]
        assert {model["id"]: model["status"]["value"] for model in listed} == {"a": "loaded", "gone": "loading"}
        assert await up.end() == 0
        assert error_of(await asked) == (503, "draining")
        await up.says("a disk does not answer and is not waited for")


async def test_a_router_that_has_written_estimates_waits_for_no_disk_at_its_end(tmp_path: Path) -> None:
    async with router("--models-preset", str(presets(tmp_path, {"a": {}})), *MARGIN) as up:
        assert (await up.client.post(PATH, json=chat("a"))).status_code == 200
        assert await up.end() == 0
        assert (up.state / "estimates.json").exists()
        assert [line for line in up.log if "does not answer" in line] == []


async def test_estimates_that_cannot_be_written_do_not_hold_up_the_end(tmp_path: Path) -> None:
    async with router("--models-preset", str(presets(tmp_path, {"a": {}})), *MARGIN) as up:
        with (up.state / "estimates.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # as another router on a disk that does not answer
            assert (await up.client.post(PATH, json=chat("a"))).status_code == 200
            assert await up.end() == 0
            await up.says("a disk does not answer and is not waited for")


async def test_a_router_that_stops_rejects_waiting_requests_and_ends_event_streams_in_good_order(
    tmp_path: Path,
) -> None:
    async def follow(path: str, begun: asyncio.Event) -> str:
        text = ""
        async with up.client.stream("GET", path) as events:
            async for part in events.aiter_text():
                text += part
                begun.set()
        return text

    file = presets(tmp_path, {"a": {"_hold_load": str(tmp_path / "never"), "load-on-startup": "on"}})
    async with router("--models-preset", str(file), *MARGIN) as up:
        opened = {path: asyncio.Event() for path in ("/models/sse", "/router/events")}
        following = [asyncio.create_task(follow(path, begun)) for path, begun in opened.items()]
        for begun in opened.values():
            await begun.wait()
        asked = asyncio.create_task(up.client.post(PATH, json=chat("a")))
        loading = asyncio.create_task(up.client.post("/models/load?wait=1", json={"model": "a"}))
        await up.becomes("a", "loading", queued=3)
        assert await up.end() == 0
        assert error_of(await asked) == (503, "draining")
        assert error_of(await loading) == (503, "draining")
        assert all(text.endswith("\n\n") for text in await asyncio.gather(*following))
        assert not any("was to be loaded on startup" in line or "Traceback" in line for line in up.log)


async def test_a_worker_with_a_deleted_socket_is_replaced_for_the_next_request(up: Router, tmp_path: Path) -> None:
    """Answers in progress are completed."""
    go, journal = tmp_path / "go", tmp_path / "journal"
    await up.serve(tmp_path, {"a": {"_journal": str(journal)}})
    async with lines_written(journal) as lines:
        first = asyncio.create_task(up.client.post(PATH, json=chat("a", fake={"hold": str(go)})))
        await until(lines, "request")
        before = await up.workers()
        for name in up.run.glob("*.sock"):
            name.unlink()
        assert (await up.client.post(PATH, json=chat("a"))).status_code == 200
        assert (await up.workers())["a"] != before["a"]
        go.touch()
        assert (await first).status_code == 200
        await up.says(r"a#\d+ ready→stopping reason=unreachable")


async def test_a_download_ends_with_the_router(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    behaviour = json.dumps({"journal": str(journal), "hold_load": str(tmp_path / "never")})
    file = tmp_path / "models.ini"
    python = fake_python(tmp_path)
    file.write_text(f"[a]\nmodel = org/repo\nrequired-memory = 64\npython = {python}\nenv.FAKE_WORKER = {behaviour}\n")
    async with lines_written(journal) as lines, router("--models-preset", str(file), *MARGIN) as up:
        asked = asyncio.create_task(up.client.post(PATH, json=chat("a")))
        download = int((await until(lines, "started")).split()[1])
        assert (await up.status("a"))["value"] == "downloading"
        assert await up.end() == 0
        assert error_of(await asked) == (503, "draining")
        assert not is_alive(download)


async def test_a_hangup_reads_presets_and_keys_again_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    keys.chmod(0o600)
    file = presets(tmp_path, {"a": {}})
    good = file.read_text()
    options = ("--models-preset", str(file), "--api-key-file", str(keys), *MARGIN)
    async with router(*options) as up:
        up.client.headers["Authorization"] = "Bearer one"
        file.write_text(good + "ctx-sise = 5\n")
        up.process.send_signal(signal.SIGHUP)
        await up.says(r"models\.ini:\d+.*ctx-sise")
        await up.says("not reloaded")
        file.write_text(good + "alias = other\n")
        keys.chmod(0o644)
        up.process.send_signal(signal.SIGHUP)
        await up.says("other users may read it")
        assert len([line for line in up.log if "ctx-sise" in line]) == 1, "one failed reload is one line"
        response = await up.client.post("/router/reload")
        assert error_of(response) == (500, "preset_invalid")
        assert "chmod 600" in response.json()["error"]["errors"][0]["message"]
        assert (await up.client.get("/v1/models")).json()["data"][0]["aliases"] == []
        keys.chmod(0o600)
        keys.write_text("two\n")
        up.process.send_signal(signal.SIGHUP)
        await up.says("presets reloaded: changed=a")
        assert (await up.client.get("/v1/models")).status_code == 401
        up.client.headers["Authorization"] = "Bearer two"
        assert (await up.client.get("/v1/models")).json()["data"][0]["aliases"] == ["other"]
        assert not any("Traceback" in line for line in up.log)


async def test_the_log_line_about_a_file_of_something_else_is_short(tmp_path: Path) -> None:
    file = presets(tmp_path, {"a": {}})
    async with router("--models-preset", str(file), *MARGIN) as up:
        file.write_text("this is no preset\n" * 300)
        response = await up.client.post("/router/reload")
        assert len(response.json()["error"]["errors"]) == 300
        line = await up.says("not reloaded")
        assert line.count("neither [section] nor key = value") == 20
        assert line.endswith("; and 280 more")


async def test_a_file_that_is_emptied_before_it_is_written_unloads_no_model(tmp_path: Path) -> None:
    """Some editors write a file so. The hangup comes in between."""
    file = presets(tmp_path, {"a": {}})
    good = file.read_text()
    async with router("--models-preset", str(file), *MARGIN) as up:
        assert (await up.client.post(PATH, json=chat("a"))).status_code == 200
        before = await up.workers()
        file.write_text("")
        up.process.send_signal(signal.SIGHUP)
        await up.says(r"models\.ini is empty; the models are kept")
        file.write_text(good + "alias = other\n")
        await up.says("presets reloaded: changed=a")
        assert await up.workers() == before
        file.write_text("")
        up.process.send_signal(signal.SIGHUP)
        await up.says("presets reloaded: removed=a")


async def test_a_request_whose_model_is_removed_leaves_no_series_of_it(tmp_path: Path) -> None:
    file = presets(tmp_path, {"a": {}, "gone": {"_hold_load": str(tmp_path / "go")}})
    async with router("--models-preset", str(file), *MARGIN) as up:
        asked = asyncio.create_task(up.client.post(PATH, json=chat("gone")))
        await up.becomes("gone", "loading")
        file.write_text(file.read_text().partition("[gone]")[0])
        await up.client.post("/router/reload")
        assert (await asked).status_code == 404
        text = (await up.client.get("/metrics")).text
        assert 'model="gone"' not in text
        assert 'router_requests_total{code="404",endpoint="chat",model="unknown"} 1.0' in text


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-"])
async def test_a_router_whose_standard_streams_are_closed_serves_and_ends(tmp_path: Path, closed: str) -> None:
    under = ("sh", "-c", f'exec "$@" {closed}', "sh")
    async with router("--models-preset", str(presets(tmp_path, {"a": {}})), *MARGIN, under=under) as up:
        assert (await up.client.post(PATH, json=chat("a"))).status_code == 200
        assert await up.end() == 0


async def test_a_router_that_may_start_no_thread_ends_with_one_line(tmp_path: Path) -> None:
    """The limit of address space is below one stack, so each start of a thread fails. `ulimit -u` would not do: it does
    not hold for root."""
    under = ("sh", "-c", 'ulimit -s 100000000; ulimit -v 50000000; exec "$@"', "sh")
    code, said = await refused("--models-preset", str(presets(tmp_path, {"a": {}})), *MARGIN, under=under)
    assert code == 1
    assert said.startswith("router: no thread can be started: the limit of processes is reached; raise it (ulimit -u")
    assert said.count("\n") == 1


# Readiness


async def test_ready_waits_for_each_model_to_load_on_startup_that_is_not_removed(tmp_path: Path) -> None:
    go, start = tmp_path / "go", {"load-on-startup": "on"}
    models: dict[str, dict[str, Any]] = {
        "a": {"_hold_load": str(go), **start},
        "dies": {"_die_at_start": 1, **start},
        "slow": {"_hold_load": str(tmp_path / "never"), **start},
        "b": {},
    }
    file = presets(tmp_path, models)

    async def waiting(up: Router) -> list[str]:
        response = await up.client.get("/ready")
        assert error_of(response) == (503, "starting")
        found: list[str] = response.json()["waiting_for"]
        return found

    async with router("--models-preset", str(file), *MARGIN) as up:
        await up.says("dies was to be loaded on startup")
        assert await waiting(up) == ["a", "dies", "slow"]
        response = await up.client.get("/health?model=a")
        assert error_of(response) == (503, "starting")
        assert response.json()["error"]["message"] == "Loading model", "llama-server's clients wait for this text"
        assert (await up.client.get("/health")).status_code == 200
        go.touch()
        await up.becomes("a", "loaded")
        assert await waiting(up) == ["dies", "slow"]
        assert (await up.client.post(PATH, json=chat("b"))).status_code == 200
        (tmp_path / "snapshots" / "dies" / "fake.json").write_text("{}")
        assert (await up.client.post("/models/load?wait=1", json={"model": "dies"})).status_code == 200
        assert await waiting(up) == ["slow"]
        text = file.read_text()
        file.write_text(text[: text.index("[slow]")] + text[text.index("[b]") :])
        assert (await up.client.get("/models?reload=1")).status_code == 200
        assert (await up.client.get("/ready")).status_code == 200


async def test_looking_at_a_model_does_not_try_again_what_has_just_failed(up: Router, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    keys = {"_die_at_start": 1, "_journal": str(journal), "max-restarts": 0}
    await up.serve(tmp_path, {"a": keys, "b": {}})
    assert error_of(await up.client.post(PATH, json=chat("a"))) == (503, "load_backoff")
    assert error_of(await up.client.get("/props", params={"model": "a", "autoload": "true"})) == (503, "load_backoff")
    assert journal.read_text().count("started") == 1
    assert (await up.client.get("/props", params={"model": "b", "autoload": "true"})).json()["is_loaded"]
    assert (await up.status("b"))["in_flight"] == 0


# Addresses


async def test_a_unix_socket_belongs_to_one_router(tmp_path: Path) -> None:
    path = tmp_path / "router.sock"
    file = presets(tmp_path, {"a": {}})
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "router", "--models-preset", str(file), "--host", str(path),
        "--state-dir", str(tmp_path / "state"), "--runtime-dir", str(tmp_path / "run"),
        stderr=asyncio.subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert process.stderr is not None
        await until(process.stderr, "router ")
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/health")).status_code == 200
            code, said = await refused("--models-preset", str(file), "--host", str(path))
            assert code == 1
            assert "another router" in said
            assert "Traceback" not in said
            assert (await client.get("/health")).status_code == 200
    finally:
        process.terminate()
        await process.communicate()
    assert process.returncode == 0
    assert not path.exists()


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious.sock"
    path.write_text("notes")
    code, said = await refused("--models-preset", str(presets(tmp_path, {"a": {}})), "--host", str(path))
    assert code == 1
    assert "precious.sock" in said
    assert path.read_text() == "notes"


# Started with names of models, or with nothing at all


async def test_a_named_folder_is_loaded_at_start_and_answers_requests_without_a_model(tmp_path: Path) -> None:
    one = fake_snapshot(tmp_path / "one")
    keys = ("--python", str(fake_python(tmp_path)), "--required_memory", "64", "--ctx-size=96")
    async with router(str(one), *keys) as up:
        await up.becomes("one", "loaded")
        assert [row["id"] for row in (await up.client.get("/v1/models")).json()["data"]] == ["one"]
        body = {key: value for key, value in chat("").items() if key != "model"}
        for named in ({}, {"model": "gpt-4"}):  # any name, as in llama-server
            assert (await up.client.post("/v1/chat/completions", json=body | named)).status_code == 200
        assert "llamacpp:tokens_predicted_total" in (await up.client.get("/metrics")).text
        props = (await up.client.get("/props")).json()
        assert (props["default_generation_settings"]["n_ctx"], props["total_slots"]) == (96, 16)
        args = (await up.status("one"))["args"]
        assert args[args.index("--ctx-size") + 1] == "96"


async def test_a_router_without_names_serves_the_hub_cache_and_says_so(tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    async with router(environ={"HF_HUB_CACHE": str(cache)}) as up:
        await up.says(f"no model is named, and the hub cache {cache} has none; try router org/name, router -m DIR")
        assert (await up.client.get("/models")).json()["data"] == []
    fake_snapshot(cache / "models--org--kept" / "snapshots" / ("0" * 40))
    (cache / "models--org--kept" / "refs").mkdir()
    (cache / "models--org--kept" / "refs" / "main").write_text("0" * 40)
    async with router(environ={"HF_HUB_CACHE": str(cache)}) as up:
        await up.says(f"no model is named, so these are the models of the hub cache {cache}; or try router org/name")
        assert [row["id"] for row in (await up.client.get("/models")).json()["data"]] == ["org/kept"]
