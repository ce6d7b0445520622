"""The number of modules that a reader has to open to follow one request."""

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType

import router
from tests.processes.upstreams import BODY, request, respond, world

PACKAGE = Path(router.__file__).parent
BOUND = 15
"""Modules of `router` on the path of a warm request."""


async def test_a_warm_chat_request_crosses_few_modules(tmp_path: Path) -> None:
    async with world(tmp_path, respond) as up:
        reader, writer = await up.connect()

        async def ask() -> None:
            writer.write(request({}))
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(len(BODY)) == BODY
            await up.idle()

        await ask()  # loads the model
        crossed = await _modules_entered(ask)
    assert {"http/pipeline.py", "http/proxy.py", "launch/worker_client.py"} <= crossed, (
        "the trace does not see the request"
    )
    assert len(crossed) <= BOUND, sorted(crossed)


async def _modules_entered(ask: Callable[[], Awaitable[None]]) -> set[str]:
    """Modules of `router`, by path, whose functions run on this thread while `ask` does."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        await ask()
    finally:
        sys.setprofile(before)
    return {str(Path(file).relative_to(PACKAGE)) for file in files if Path(file).is_relative_to(PACKAGE)}
