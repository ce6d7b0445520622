"""The verb `serve`: load the engine, serve HTTP until a signal or a fatal error, report each stage to the router."""

import asyncio
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

from worker.engines.transformers.load.page_cache import BackgroundReader
from worker.errors import StartError
from worker.program.supervision import RouterChannel, importing
from worker.protocol.argv import Serve
from worker.protocol.events import Exit, MemoryNeed, Prepared, Pulse, Ready
from worker.protocol.orders import decode_grant, is_family_module

if TYPE_CHECKING:
    from worker.engines.transformers.device.rank_processes import RankProcesses


class LoadTimes:
    """The seconds of each stage of a load. Stages follow each other without gaps."""

    def __init__(self, began: float):
        """`began`: start of the first stage, monotonic clock."""
        self.seconds: dict[str, float] = {}
        self._at = began

    def end(self, stage: str) -> None:
        """Add the time since the end of the last stage to `stage`. A stage may have several parts."""
        now = time.monotonic()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._at
        self._at = now


async def serve(command: Serve, channel: RouterChannel, began: float, ranks: "RankProcesses | None") -> None:
    """Load the model and serve it. Returns once a signal has requested the stop and running requests have ended.

    Raises the engine's fatal error, and StartError for options that cannot be served.
    """
    prefetch = BackgroundReader(command.snapshot)
    # With early start the router decides when weights may be read: memory is not reserved yet.
    may_prefetch = not command.prepare and command.load_format != "dummy"
    if may_prefetch and "torch" not in sys.modules:
        prefetch.start()  # read the weights into the page cache while torch is imported
        may_prefetch = False
    with importing():
        from worker.engines.transformers.device import memory
        from worker.engines.transformers.device.process_overhead import overhead
        from worker.engines.transformers.engine import TransformersEngine
        from worker.engines.transformers.preparation import prebuilt_models, prepare
        from worker.server.server import Server, stop_requested

    times = LoadTimes(began)
    times.end("imports")
    if may_prefetch and prebuilt_models.find(command) is None:
        prefetch.start()

    if command.prepare and not channel.supervised:
        raise StartError("--prepare waits for a memory grant on stdin, so it needs --supervised", Exit.USAGE)
    prepared = prepare(command, times.end)
    if command.prepare:
        channel.send(Prepared(measured={"cpu": memory.prepared()}))
        command = _wait_for_grant(command, channel)
        times.end("early_start")
    prefetch.stop()
    # Without a router a line per second on stdout would only hide the other events.
    pulse: Callable[[Pulse | MemoryNeed], None] = channel.send if channel.supervised else lambda _: None
    engine = TransformersEngine.load(
        command, prepared, progress=channel.send, pulse=pulse, announce=pulse, stage_done=times.end, ranks=ranks
    )
    server = Server(engine, engine.tokenizer, command, token=channel.token or None, announce=channel.send)
    address = await server.start()
    times.end("server")
    stop = stop_requested()
    fatal = asyncio.wrap_future(engine.fatal)
    fatal.add_done_callback(lambda _: stop.set())
    if not channel.supervised:
        url = address.replace("tcp:", "http://")
        logging.getLogger("worker").info("%s listens on %s; Ctrl-C stops it", command.name or command.snapshot, url)
    # If its steps are known from earlier loads, a worker does not wait for a count: its first pulse has exact figures.
    is_estimated = engine.announces_steps and not command.warm_up
    with memory.inheritance.last_count() if is_estimated else memory.inheritance.one_count():
        ready = Ready(
            address=address,
            measured=engine.measured,
            later=engine.later,
            unannounced=engine.unannounced,
            steps=0 if engine.has_warmed_up else engine.steps_to_come,
            mapped=memory.mapped(),
            capabilities=server.capabilities,
            n_ctx=engine.ctx_size,
            seconds=times.seconds,
            processor=time.process_time(),
            overhead=overhead.reported,
            overhead_is_own=overhead.is_own,
            has_warmed_up=engine.has_warmed_up,
            modules=_family_modules(),
        )
    channel.send(ready)
    engine.map_rest()
    await stop.wait()
    if server.is_idle and not fatal.done():
        # The memory may be needed by the next worker, and no client waits: exit without an orderly shutdown.
        server.unlink()
        return
    await server.close()
    await engine.close()
    if fatal.done():
        raise fatal.result()


def _wait_for_grant(command: Serve, channel: RouterChannel) -> Serve:
    """Wait until memory is reserved. Returns the command with the grant. No library has looked at devices so far."""
    line = channel.receive_line()
    try:
        grant = decode_grant(line)
        os.environ["CUDA_VISIBLE_DEVICES"] = grant.visible
        return dataclasses.replace(
            command, devices=tuple(grant.devices), reserved=grant.reserved, kv_tokens=grant.kv_tokens
        )
    except (ValueError, TypeError) as error:
        raise StartError(f"the line on stdin is not a memory grant: {error}", Exit.USAGE) from None


def _family_modules() -> list[str]:
    """Modules of the model's family that this process imported itself, for the fork server."""
    from worker.engines.transformers.device import memory

    # Newest first: reading a name that was inherited from the fork server copies its memory page, 5 ms for all of them.
    own = islice(reversed(sys.modules), len(sys.modules) - memory.inheritance.modules)
    families = [name for name in tuple(own) if name.startswith("transformers.") and is_family_module(name)]
    # transformers has modules under further names (tokenization_llama_fast), which cannot be imported.
    return [name for name in families if sys.modules[name].__name__ == name]
