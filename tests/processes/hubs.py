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

    async def fails(self, **faults: Any) -> None:
        async with httpx.AsyncClient() as client:
            await client.put(f"{self.address}/_faults", json=faults)

    async def commit(self, repo: str) -> str:
        """The commit that `main` names now."""
        async with httpx.AsyncClient() as client:
            commit: str = (await client.get(f"{self.address}/api/models/{repo}/revision/main")).json()["sha"]
            return commit

    async def journal(self) -> list[str]:
        async with httpx.AsyncClient() as client:
            return (await client.get(f"{self.address}/_journal")).text.split("\n")


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
