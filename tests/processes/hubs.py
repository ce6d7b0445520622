"""A small hub as a real program, for the length of a block."""

import asyncio
import hashlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.processes.routers import ROOT, fake_snapshot

WEIGHTS = "model.safetensors"
HALF = 40_000
"""Bytes: half of the weights of a repository."""


class Hub:
    """A hub program and the folder that it serves."""

    def __init__(self, root: Path, address: str):
        self.root = root
        self.address = address

    def repo(self, name: str, **behaviour: Any) -> str:
        """Make `org/name`: a folder that the router takes for a model; `behaviour` is what its fake worker does."""
        folder = fake_snapshot(self.root / "org" / name, **behaviour)
        header = json.dumps({"w": {"dtype": "U8", "shape": [2 * HALF], "data_offsets": [0, 2 * HALF]}}).encode()
        content = hashlib.shake_128(name.encode()).digest(2 * HALF)
        (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + content)
        (folder / "tokenizer.json").write_text("{}")
        return f"org/{name}"

    def fails(self, **faults: Any) -> None:
        """From now on these faults, and no others; `repo` of the name stands for its listing. This ends
        the connections of responses that have stalled."""
        httpx.put(f"{self.address}/_faults", json=faults)

    def commit(self, repo: str) -> str:
        """The commit that `main` names now."""
        commit: str = httpx.get(f"{self.address}/api/models/{repo}/revision/main").json()["sha"]
        return commit

    def journal(self, repo: str) -> list[str]:
        """Requests for this repository so far."""
        return [line for line in httpx.get(f"{self.address}/_journal").text.split("\n") if repo in line]

    def fetched(self, repo: str) -> list[str]:
        """The files asked for so far, with ranges."""
        return [line.partition("/resolve/")[2].partition("/")[2] for line in self.journal(repo) if "/resolve/" in line]


@asynccontextmanager
async def running_hub(root: Path) -> AsyncIterator[Hub]:
    program = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "tests" / "fake_hub.py"), str(root), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert program.stdout is not None
    try:
        yield Hub(root, (await program.stdout.readline()).decode().strip())
    finally:
        program.terminate()
        await program.wait()
