"""A router reduced to its launcher, to be killed: runs one fake program, `python spawner.py RUN_FOLDER JSON`.

The JSON object has `verb`, `behaviour` (of the program), and optionally `request` (a body to post once ready), `leave`
(leave the block once ready), `kills_parent` (the program kills its parent as its first act), `forks` (it is forked).
The stages are printed: `fork-server PID`, `ready`, `answering`, `leaving`.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from router.launch.local import LocalLauncher
from tests.fakes import CPU, FAKE_ARGV, GIB, FixedDevices, fake_program
from tests.processes.forking import ForkingLauncher, request_to
from worker.protocol.argv import Download, Estimate, Serve

KILLS_ITS_PARENT = (
    "import os, runpy, sys; os.kill(os.getppid(), 9); "
    f"sys.argv[0] = {FAKE_ARGV[-1]!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def report(word: str) -> None:
    print(word, flush=True)


async def main(folder: Path, plan: dict[str, Any]) -> None:
    argv = (sys.executable, "-P", "-c", KILLS_ITS_PARENT) if plan.get("kills_parent") else FAKE_ARGV
    program = fake_program("m", stop_timeout=1000.0, **plan["behaviour"])
    kind = ForkingLauncher if plan.get("forks") else LocalLauncher
    async with kind(devices=FixedDevices(), runtime_dir=folder, environ=os.environ, python_argv=argv) as launcher:
        if isinstance(launcher, ForkingLauncher):
            report(f"fork-server {(await launcher.warmed()).pid}")
        if plan["verb"] == "download":
            await launcher.download(program, Download(repo="org/m"), lambda event: None)
        elif plan["verb"] == "estimate":
            await launcher.estimate(program, Estimate(snapshot="/"))
        else:
            await serve(launcher, program, plan)


async def serve(launcher: LocalLauncher, program: Any, plan: dict[str, Any]) -> None:
    command = Serve(snapshot="/", listen="", name="m")
    async with launcher.serve(program, command, {CPU: GIB}, lambda event: None) as worker:
        report("ready")
        if "request" in plan:
            async with request_to(worker, "/v1/chat/completions", plan["request"]) as exchange:
                await exchange.read()
                report("answering")
                await worker.lost()
        elif plan.get("leave"):
            report("leaving")
        else:
            await worker.lost()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
