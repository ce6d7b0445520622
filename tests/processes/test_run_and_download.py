"""`router run` and `router download` as processes: a chat, and the files of models before any server runs."""

import asyncio
import os
import signal
import sys
from asyncio import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests import lora
from tests.processes.hubs import Hub
from tests.processes.routers import DEADLINE, ROOT, Router, fake_python, fake_snapshot, lines_written, until
from tests.tiny import make

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


async def command(*words: str, folder: Path, environ: Mapping[str, str] | None = None) -> subprocess.Process:
    """A command of the router, with folders of its own."""
    names = {"ROUTER_STATE_DIR": "state", "ROUTER_RUNTIME_DIR": "run", "HF_HUB_CACHE": "hub"}
    own = {name: f"{folder}/{place}" for name, place in names.items()}
    return await subprocess.create_subprocess_exec(
        sys.executable, "-P", "-m", "router", *words,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), **own, **(environ or {})},
    )  # fmt: skip


async def done(process: subprocess.Process, typed: str = "") -> tuple[int, str, str]:
    """(exit code, stdout, stderr) after this input."""
    async with asyncio.timeout(DEADLINE):
        out, errors = await process.communicate(typed.encode())
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


def fake(folder: Path) -> tuple[str, ...]:
    return ("--python", str(fake_python(folder)), "--required_memory", "64", "--no-fork-server")


async def test_a_chat_starts_a_router_for_itself_and_ends_it(tmp_path: Path) -> None:
    snapshot, keys = fake_snapshot(tmp_path / "tiny"), {"ROUTER_API_KEY": "sk-of-both"}
    chat = await command("run", str(snapshot), *fake(tmp_path), folder=tmp_path, environ=keys)
    code, out, errors = await done(chat, "one two\n/bye\n")
    assert (code, out) == (0, "one two \n"), errors
    assert errors.startswith("tiny: /bye")
    assert not list((tmp_path / "run").glob("**/*.sock")), "the workers have ended"


async def test_a_chat_uses_a_running_router_that_lists_the_model(up: Router, tmp_path: Path) -> None:
    await up.serve(tmp_path, {"a": {"alias": "first"}})
    url = f"http://127.0.0.1:{up.port}"
    code, out, errors = await done(await command("run", "--url", url, "first", folder=tmp_path), "hello there\n")
    assert (code, out) == (0, "hello there \n"), errors
    assert errors.startswith(f"a at {url}: ")
    assert (await up.status("a"))["value"] == "loaded"


async def test_a_chat_with_a_model_of_the_hub_downloads_it_and_answers(hub: Hub, tmp_path: Path) -> None:
    make("llama", hub.root / "org" / "chat")
    environ = {"HF_ENDPOINT": hub.address}
    words = ("org/chat", "--ctx-size", "128", "--n-predict", "4", "--device", "cpu", "--no-fork-server")
    code, out, errors = await done(await command("run", *words, folder=tmp_path, environ=environ), "one two\n/bye\n")
    assert code == 0, errors
    assert errors.startswith("org/chat: downloading org/chat: ")
    assert errors.splitlines()[-1].startswith("org/chat: /bye"), "no error behind it"
    assert out.endswith("\n")
    assert (tmp_path / "hub" / "models--org--chat" / "snapshots").is_dir()


async def test_ctrl_c_stops_an_answer_and_not_the_chat(tmp_path: Path) -> None:
    snapshot = fake_snapshot(tmp_path / "tiny", hang_after=1)
    chat = await command("run", str(snapshot), *fake(tmp_path), folder=tmp_path)
    assert chat.stdin is not None
    assert chat.stdout is not None
    assert chat.stderr is not None
    chat.stdin.write(b"one two\n")
    async with asyncio.timeout(DEADLINE):
        assert await chat.stdout.readexactly(4) == b"one "
    chat.send_signal(signal.SIGINT)
    assert "(stopped)" in await until_contains(chat.stderr, "(stopped)")
    code, out, _ = await done(chat, "/bye\n")
    assert (code, out) == (0, "\n")


async def until_contains(stream: asyncio.StreamReader, text: str) -> str:
    found = ""
    async with asyncio.timeout(DEADLINE):
        while text not in found and (piece := await stream.read(100)):
            found += piece.decode()
    return found


async def test_a_router_does_not_outlive_a_chat_that_is_killed(tmp_path: Path) -> None:
    async with lines_written(tmp_path / "journal") as journal:
        snapshot = fake_snapshot(tmp_path / "tiny", journal=f"{tmp_path}/journal")
        chat = await command("run", str(snapshot), *fake(tmp_path), folder=tmp_path)
        assert chat.stdin is not None
        assert chat.stdout is not None
        chat.stdin.write(b"one two\n")  # a worker that is not ready yet is killed, and writes no line
        async with asyncio.timeout(DEADLINE):
            assert await chat.stdout.readexactly(7) == b"one two"
        chat.kill()
        await until(journal, "stopped")
        await chat.communicate()


async def test_a_download_brings_all_files_and_a_second_one_asks_for_none(hub: Hub, tmp_path: Path) -> None:
    make("llama", hub.root / "org" / "base")
    environ = {"HF_ENDPOINT": hub.address}
    code, out, errors = await done(await command("download", "org/base", folder=tmp_path, environ=environ))
    assert (code, out.partition(": ")[0]) == (0, "org/base"), errors
    assert "org/base: downloading org/base: " in errors
    folder = Path(out.partition(": ")[2].strip())
    assert (folder / "config.json").is_file()
    code, again, errors = await done(await command("download", "org/base", "--offline", folder=tmp_path))
    assert (code, again, errors) == (0, out, "")
    server = ("--port", "0", "--ctx-size=64")
    for words in (("org/base", "--download-only", *server), ("--download-only", *server, "org/base")):
        assert await done(await command(*words, folder=tmp_path)) == (0, out, "")


async def test_a_repository_without_an_organisation_is_downloaded_under_its_name(hub: Hub, tmp_path: Path) -> None:
    make("llama", hub.root / "org" / "gpt2")
    environ = {"HF_ENDPOINT": hub.address}
    code, out, errors = await done(await command("gpt2", "--download-only", folder=tmp_path, environ=environ))
    assert (code, out.partition(": ")[0]) == (0, "gpt2"), errors
    assert out.startswith(f"gpt2: {tmp_path}/hub/models--gpt2/snapshots/")
    assert await done(await command("download", "-m", "gpt2", "--offline", folder=tmp_path)) == (0, out, "")


async def test_a_download_is_converted_like_a_first_load(hub: Hub, tmp_path: Path) -> None:
    make("mixtral", hub.root / "org" / "moe", num_hidden_layers=3)
    environ = {"HF_ENDPOINT": hub.address}
    code, out, errors = await done(await command("download", "org/moe", folder=tmp_path, environ=environ))
    assert code == 0, errors
    assert out.startswith(f"org/moe: {tmp_path}/state/converted/")
    assert "org/moe: converting: " in errors
    code, out, _ = await done(await command("download", "org/moe", "--no-prepare", folder=tmp_path))
    assert (code, out.startswith(f"org/moe: {tmp_path}/hub/")) == (0, True)


async def test_a_download_takes_all_models_of_a_file_and_fails_if_one_of_them_does(hub: Hub, tmp_path: Path) -> None:
    base = make("llama", tmp_path / "folder")
    make("llama", hub.root / "org" / "other")
    lora.make(base, hub.root / "org" / "adapter")
    file = tmp_path / "models.ini"
    file.write_text(
        f"[local]\nmodel = {base}\nlora = org/adapter\n[gone]\nhf-repo = org/absent\n[other]\nhf-repo = org/other\n"
    )
    environ = {"HF_ENDPOINT": hub.address}
    download = ("download", "--models-preset", str(file))
    code, out, errors = await done(await command(*download, folder=tmp_path, environ=environ))
    assert (code, [line.partition(": ")[0] for line in out.splitlines()]) == (1, ["local", "other"]), errors
    assert "router: gone: " in errors
    assert (tmp_path / "hub" / "models--org--adapter").is_dir()
    code, out, errors = await done(await command(*download, "other", folder=tmp_path, environ=environ))
    assert (code, out.partition(": ")[0], errors) == (0, "other", "")


async def test_a_download_of_nothing_is_a_usage_error(tmp_path: Path) -> None:
    code, out, errors = await done(await command("download", folder=tmp_path))
    assert (code, out) == (2, "")
    assert "no model is named" in errors
