"""Forked workers are charged what they take, and the memory that they share is charged once.

Definitions, by the kernel's account (proc_pid_smaps(5)):

    private   data that no other process has: Private_Dirty, and what the worker held more at its peak
    share     its part of the data that it has in common with the fork server and other workers: Pss_Anon less
              Private_Dirty
    later     what the worker reports that it may still allocate: a fixed amount for grammars, a part of the shared data
    shared    the fork server's own account: all that it holds, and code of libraries that only workers use

A worker's reservation after its load, without `later`, is within 5 % of private + share, less the share, which `shared`
contains. Workers sample their pages, which is 2 MiB wrong at most. Mapped libraries are in `shared` only.
The models have files of less than a mebibyte.
"""

import asyncio
import re
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from router.config.presets import Preset
from router.memory import checkpoint
from router.memory.estimate import estimate
from tests import tiny
from tests.processes.routers import Router, router
from worker.protocol.memory import FORK_SERVER_BYTES, GRAMMAR_BYTES, LIBRARY_CODE_BYTES, MIB

pytestmark = pytest.mark.slow

TOLERANCE = 0.05
SAMPLE_BYTES = 2 * MIB
MODELS = {"a": "llama", "b": "qwen3", "c": "gpt2", "d": "llama"}
CTX, ROWS, MARGIN = 256, 2, 16
KEYS = (f"ctx-size = {CTX}", f"parallel = {ROWS}", "threads = 1")
# The fixed amount: grammars with tables for some hundred tokens, and a sixteenth of at most 300 MiB of shared data.
MOST_LATER = GRAMMAR_BYTES + MIB + 300 * MIB // 16


def account(pid: int) -> dict[str, int]:
    """The kernel's sums over all areas of a process, in bytes."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except PermissionError:
        pytest.skip("workers forbid others to look at their pages")
    lines = rollup.splitlines()[1:] + Path(f"/proc/{pid}/status").read_text().splitlines()
    rows = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in rows}


def write_presets(folder: Path) -> Path:
    lines = ["[*]", *KEYS]
    for name, family in MODELS.items():
        lines += [f"[{name}]", f"model = {tiny.make(family, folder / name)}"]
    ini = folder / "models.ini"
    ini.write_text("\n".join(lines) + "\n")
    return ini


async def ask(up: Router, name: str, **fields: Any) -> int:
    body = {"model": name, "prompt": "hi", "max_tokens": 4, **fields}
    return (await up.client.post("/v1/completions", json=body)).status_code


async def fill(up: Router, name: str) -> None:
    """Send a full batch at full context."""
    full = {"prompt": [5 + at % 300 for at in range(CTX - 16)], "max_tokens": 16, "ignore_eos": True, "top_p": 0.9}
    assert set(await asyncio.gather(*(ask(up, name, **full, seed=seed) for seed in range(2 * ROWS)))) == {200}


async def fork_server_of(up: Router) -> int:
    found = re.search(r"process (\d+)", await up.says("the fork server .* is warm"))
    assert found
    return int(found[1])


async def test_forked_workers_are_charged_what_they_take_from_their_first_load_on(tmp_path: Path) -> None:
    async with router("--models-preset", str(write_presets(tmp_path)), "--fork-server") as up:
        fork_server = await fork_server_of(up)
        for count, name in enumerate(MODELS, 1):
            assert await ask(up, name) == 200
            state: Any = (await up.client.get("/router/state")).json()
            [host], rows = state["devices"], {row["model"]: row for row in state["workers"]}
            assert len(rows) == count
            held, charged, later = account(rows[name]["pid"]), rows[name]["reserved"]["cpu"], rows[name]["later"]
            freed = held["VmHWM"] - held["VmRSS"]
            private, whole = held["Private_Dirty"] + freed, held["Pss_Anon"] + freed
            assert later <= MOST_LATER
            assert charged - later == pytest.approx(private, abs=TOLERANCE * whole + SAMPLE_BYTES), held
            await fill(up, name)
            assert account(rows[name]["pid"])["Private_Dirty"] <= charged, "its largest steps are included"
            truth = sum(account(pid)["Pss"] for pid in (fork_server, *(row["pid"] for row in rows.values())))
            assert truth <= sum(row["reserved"]["cpu"] for row in rows.values()) + host["shared"]
            assert host["shared"] <= account(fork_server)["Rss"] + LIBRARY_CODE_BYTES


async def test_the_first_worker_and_the_fork_server_stay_within_a_tight_limit(tmp_path: Path) -> None:
    preset = Preset(id="a", ctx_size=CTX, parallel=ROWS, threads=1)
    ini = write_presets(tmp_path)
    least = estimate(checkpoint.read(tmp_path / "a"), preset, on_host=True, forked=True)
    within = -(-(least.granted(least.kv_steps).total + FORK_SERVER_BYTES + LIBRARY_CODE_BYTES) // MIB)
    async with limited_router(ini, within) as up:
        fork_server = await fork_server_of(up)
        assert await ask(up, "a") == 200
        state: Any = (await up.client.get("/router/state")).json()
        [worker], [host] = state["workers"], state["devices"]
        claim = re.search(r"(\d+)MiB@cpu", await up.says("starting reserved"))
        assert claim
        assert int(claim[1]) * MIB + host["shared"] <= within * MIB, "also while it loaded"
        most = account(fork_server)["Rss"] + account(worker["pid"])["Private_Dirty"]
        assert most <= worker["reserved"]["cpu"] + host["shared"] <= within * MIB


async def test_a_worker_is_refused_if_the_fork_server_leaves_too_little_of_a_limit(tmp_path: Path) -> None:
    beside = 40  # less than any worker takes, which alone would fit
    async with limited_router(write_presets(tmp_path), (FORK_SERVER_BYTES + LIBRARY_CODE_BYTES) // MIB + beside) as up:
        answer = await up.client.post("/v1/completions", json={"model": "a", "prompt": "hi", "max_tokens": 4})
        assert answer.status_code == 507
        assert "fork server 4" in answer.text


def limited_router(ini: Path, mib: int) -> AbstractAsyncContextManager[Router]:
    """A router with a fork server and so much main memory."""
    limits = ("--device-limit", f"cpu={mib + MARGIN}", "--models-memory-margin", str(MARGIN))
    return router("--models-preset", str(ini), "--fork-server", *limits)
