"""A real router process, over fake workers or real ones, for tests that talk HTTP to it."""

import asyncio
import contextlib
import json
import os
import re
import signal
import struct
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent.parent
FAKE_WORKER = ROOT / "tests" / "fake_worker.py"
DEADLINE = 240.0
"""Seconds after which a test that waits for something has failed; far above what anything takes on a busy machine."""
SECRET = "hf_secretOfThisTest"

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32,
    "max_position_embeddings": 256, "torch_dtype": "bfloat16",
}  # fmt: skip


def fake_snapshot(folder: Path, **behaviour: Any) -> Path:
    """A folder that the router takes for a model; `behaviour` is what fake_worker.py does with it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}", "eos_token": "</s>"}))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [8], "data_offsets": [0, 16]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    (folder / "fake.json").write_text(json.dumps(behaviour))
    return folder


def fake_python(folder: Path) -> Path:
    """An "interpreter" for the preset key `python` that runs the fake worker in the place of `-P -m worker`."""
    path = folder / "fake-python"
    if not path.exists():  # a file that is being executed cannot be written
        path.write_text(f'#!/bin/sh\nshift 3\nexec "{sys.executable}" -P "{FAKE_WORKER}" "$@"\n')
        path.chmod(0o755)
    return path


def presets(folder: Path, models: Mapping[str, Mapping[str, Any]], *, every: str = "") -> Path:
    """models.ini of fake models: keys of the preset, and with a leading underscore the fake worker's behaviour."""
    lines = ["[*]", f"python = {fake_python(folder)}", every]
    for name, keys in models.items():
        behaviour = {key[1:]: value for key, value in keys.items() if key.startswith("_")}
        snapshot = fake_snapshot(folder / "snapshots" / name, **behaviour)
        own = {"required-memory": 64} | {key: value for key, value in keys.items() if not key.startswith("_")}
        lines += [f"[{name}]", f"model = {snapshot}", *(f"{key} = {value}" for key, value in own.items())]
    path = folder / "models.ini"
    path.write_text("\n".join(lines) + "\n")
    return path


class Router:
    """A router that is up. `client` has its address and no time-out of its own."""

    def __init__(self, process: asyncio.subprocess.Process, client: httpx.AsyncClient, folder: Path, run: Path):
        self.process = process
        self.client = client
        self.port = 0
        self.folder = folder
        self.models = folder / "models"
        """Of a shared router: its --models-dir."""
        self.run = run
        """Its runtime folder, which stands on the command line of its workers."""
        self.state = run.with_name("state")
        self.log: list[str] = []
        self._heard = asyncio.Condition()
        self.over = asyncio.Event()

    async def hear(self) -> None:
        """Take in its log, so that it never waits for us."""
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log.append(line.decode(errors="replace").rstrip())
            async with self._heard:
                self._heard.notify_all()
        self.over.set()
        async with self._heard:
            self._heard.notify_all()

    async def says(self, pattern: str) -> str:
        """Returns with the first log line that matches, once there is one."""
        async with asyncio.timeout(DEADLINE), self._heard:
            while True:
                for line in self.log:
                    if re.search(pattern, line):
                        return line
                assert not self.over.is_set(), f"the router ended without saying {pattern}\n" + "\n".join(self.log)
                await self._heard.wait()

    async def status(self, model: str) -> dict[str, Any]:
        response = await self.client.get(f"/v1/models/{model}")
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()["status"]
        return found

    async def becomes(self, model: str, value: str, **also: Any) -> dict[str, Any]:
        """Returns the status of `model` once its value, and other members, are so, or as a function of them says."""

        def fits(status: Mapping[str, Any]) -> bool:
            return status["value"] == value and all(is_so(status.get(key), wanted) for key, wanted in also.items())

        def is_so(found: Any, wanted: Any) -> bool:
            return bool(wanted(found)) if callable(wanted) else found == wanted

        async with asyncio.timeout(DEADLINE), self.client.stream("GET", "/router/events") as events:
            lines = events.aiter_lines()
            line = asyncio.ensure_future(anext(lines))
            while not fits(status := await self.status(model)):
                await asyncio.wait({line}, timeout=0.2)  # figures, such as times of a load, change without an event
                if line.done():
                    line.result()
                    line = asyncio.ensure_future(anext(lines))
            line.cancel()
            return status

    async def workers(self) -> dict[str, int]:
        """Process ids of ready workers by model."""
        state = (await self.client.get("/router/state")).json()
        return {row["model"]: row["pid"] for row in state["workers"] if row["pid"] is not None}

    async def serve(self, folder: Path, models: Mapping[str, Mapping[str, Any]]) -> Path:
        """Replace all models of a router of `shared_router`, and forget its log. Files of `models` are made in `folder`
        as by `presets`; the return value is the file to edit."""
        return await self.serve_presets(presets(folder, models).read_text())

    async def serve_presets(self, text: str) -> Path:
        """The same with the text of a file of presets."""
        file = self.folder / "models.ini"
        file.write_text("")
        await self._reload()
        await self.has_no_workers()
        self.log.clear()
        file.write_text(text)
        await self._reload()
        return file

    async def _reload(self) -> None:
        response = await self.client.post("/router/reload")
        assert response.status_code == 200, response.text

    async def has_no_workers(self) -> None:
        """Return once all workers have exited."""
        async with asyncio.timeout(DEADLINE), self.client.stream("GET", "/router/events") as events:
            async for line in events.aiter_lines():  # the first event comes at once
                if line.startswith("data:") and not (await self.client.get("/router/state")).json()["workers"]:
                    return

    async def end(self, number: int = signal.SIGTERM) -> int:
        """Signal it; its exit code, once it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        async with asyncio.timeout(DEADLINE):
            return await self.process.wait()


@asynccontextmanager
async def router(
    *options: str,
    folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
    under: Sequence[str] = (),
    working: Path = ROOT,
) -> AsyncIterator[Router]:
    """A router with `options` on a free port, for the length of the block. `under`: a command that executes it.
    `working`: its working directory."""
    with tempfile.TemporaryDirectory(prefix="router-test-") as own:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_CACHE": f"{own}/hub", **(environ or {})}
        process = await asyncio.create_subprocess_exec(
            *under, sys.executable, "-P", "-m", "router",
            "--port", "0", "--state-dir", f"{own}/state", "--runtime-dir", f"{own}/run",
            "--no-fork-server", *options,  # the last one counts: pass --fork-server for a fork server
            stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL, cwd=working,
            env=env | {"PYTHONPATH": str(ROOT)}, limit=1 << 20,
        )  # fmt: skip
        client = httpx.AsyncClient(timeout=httpx.Timeout(DEADLINE))
        up = Router(process, client, folder or Path(own), Path(own) / "run")
        hearing = asyncio.create_task(up.hear())
        try:
            line = await up.says(r"API http://")
            up.port = int(line.rsplit(":", 1)[1].split("/")[0])
            client.base_url = httpx.URL(f"http://127.0.0.1:{up.port}")
            yield up
        except BaseException:
            print("\n".join(up.log[-60:]))
            raise
        finally:
            await client.aclose()
            await up.end()
            await hearing
        assert not [line for line in up.log if "an event could not be rendered" in line]


@asynccontextmanager
async def shared_router(folder: Path, *options: str, environ: Mapping[str, str] | None = None) -> AsyncIterator[Router]:
    """A router for several tests, each of which gives it its own models with `Router.serve`."""
    file, models = folder / "models.ini", folder / "models"
    file.touch()
    models.mkdir()
    folders = ("--models-preset", str(file), "--models-dir", str(models))
    async with router(*folders, *options, folder=folder, environ=environ) as up:
        yield up


async def refused(
    *options: str, environ: Mapping[str, str] | None = None, under: Sequence[str] = ()
) -> tuple[int, str]:
    """(exit code, stderr) of a router that must not start. `under`: a command that executes it."""
    with tempfile.TemporaryDirectory(prefix="router-test-") as own:
        process = await asyncio.create_subprocess_exec(
            *under, sys.executable, "-P", "-m", "router",
            "--port", "0", "--state-dir", f"{own}/state", "--runtime-dir", f"{own}/run", *options,
            stderr=asyncio.subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})},
        )  # fmt: skip
        async with asyncio.timeout(DEADLINE):
            _, errors = await process.communicate()
    return process.returncode or 0, errors.decode()


def error_of(response: httpx.Response, says: str = "") -> tuple[int, str]:
    """(status, reason) of an error answer, whose body must be whole. `says`: a part of its message."""
    error = response.json()["error"]
    assert says in error["message"]
    assert error["code"] == response.status_code
    assert {"code", "message", "type", "param", "reason"} <= set(error)
    assert response.headers["x-should-retry"] in ("true", "false")
    return response.status_code, error["reason"]


def chat(model: str, text: str = "one two three", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}


async def text(up: Router, model: str, **fields: Any) -> str:
    """The greedy completion of a real model."""
    body = {"model": model, "prompt": "The quick brown", "max_tokens": 12, "temperature": 0, **fields}
    response = await up.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    return str(response.json()["choices"][0]["text"])


def is_alive(pid: int) -> bool:
    """True if the process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


async def gone(pids: Sequence[int], within: float) -> bool:
    """True if all processes have exited `within` seconds. Returns as soon as they have."""
    loop = asyncio.get_running_loop()
    futures = []
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended: asyncio.Future[None] = loop.create_future()

        def tell(descriptor: int = descriptor, ended: asyncio.Future[None] = ended) -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            ended.set_result(None)

        loop.add_reader(descriptor, tell)
        futures.append(ended)
    if futures:
        await asyncio.wait(futures, timeout=within)
    return not any(is_alive(pid) for pid in pids)


@asynccontextmanager
async def lines_written(fifo: Path) -> AsyncIterator[asyncio.StreamReader]:
    """Lines that processes write to a FIFO made here, one process after the other."""
    os.mkfifo(fifo)
    descriptor = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)  # open for writing, too: no end of file between writers
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
    )
    try:
        yield reader
    finally:
        os.unlink(fifo)  # a worker that opened it without a reader would wait
        transport.close()


async def until(reader: asyncio.StreamReader, start: str) -> str:
    """Returns the first line that begins so, once it is there."""
    async with asyncio.timeout(DEADLINE):
        while line := await reader.readline():
            if line.decode().startswith(start):
                return line.decode().strip()
    raise AssertionError(f"no line {start}")
