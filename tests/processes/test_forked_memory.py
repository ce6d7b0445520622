"""Forked workers are charged what they take: their private memory and their share of shared pages."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.processes.forking import children
from tests.processes.routers import DEADLINE, Router, router

pytestmark = pytest.mark.slow

TOLERANCE = 0.05
MODELS = ("a", "b", "c")
KEYS = ("ctx-size = 256", "parallel = 2", "threads = 1")


def proportional(pid: int) -> int:
    """The private memory of a process and its share of shared pages, by the kernel's own account."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except PermissionError:
        pytest.skip("workers forbid others to look at their pages")
    return next(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))


async def workers_of(up: Router) -> dict[str, Any]:
    state = (await up.client.get("/router/state")).json()
    return {row["model"]: row for row in state["workers"]}


async def test_forked_workers_are_charged_their_private_memory_and_their_share(tmp_path: Path) -> None:
    lines = ["[*]", *KEYS]
    for name in MODELS:
        lines += [f"[{name}]", f"model = {tiny.make('llama', tmp_path / name)}"]
    ini = tmp_path / "models.ini"
    ini.write_text("\n".join(lines) + "\n")
    async with router("--models-preset", str(ini), "--fork-server") as up:
        await up.says("the fork server .* is warm")
        for name in MODELS:
            answer = await up.client.post("/v1/completions", json={"model": name, "prompt": "hi", "max_tokens": 4})
            assert answer.status_code == 200, answer.text
        [fork_server] = [pid for pid in children(up.process.pid) if children(pid)]

        def is_close(row: Any) -> bool:
            holds = proportional(row["pid"])
            measured: int = row["measured"]["cpu"]
            return abs(measured - holds) <= TOLERANCE * holds

        # Shares fall with each further worker, and workers look at theirs every ten seconds.
        async with asyncio.timeout(DEADLINE):
            while not all(map(is_close, (rows := await workers_of(up)).values())):
                await asyncio.wait({asyncio.ensure_future(up.over.wait())}, timeout=0.2)
        assert set(rows) == set(MODELS)
        holds = {name: proportional(row["pid"]) for name, row in rows.items()}
        assert all(row["reserved"]["cpu"] >= holds[name] for name, row in rows.items())
        truth = sum(holds.values()) + proportional(fork_server)
        assert sum(row["reserved"]["cpu"] for row in rows.values()) >= truth
