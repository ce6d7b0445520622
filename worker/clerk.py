"""A clerk: a worker with a model's tokenizer and without the model.

It answers what only turns texts and chats into tokens, and tokens into text, for a model that is not loaded and may not
be: by the code by which its worker would, and so in the same words. It reads no weights and looks at no device.
"""

import asyncio
import logging
import signal
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from transformers import PreTrainedTokenizerBase

from worker import contract, leash
from worker.engine import encoders, layout, loader, memory, vision
from worker.engine.engine import Prepared, TransformersEngine
from worker.errors import UnsupportedByModel
from worker.generation import Delta, Encoding, Generation, Occupancy, Text, Vision
from worker.images import TEXT_ONLY
from worker.server import Server

PULSE_INTERVAL = 1.0
"""Seconds; a clerk whose loop hangs is noticed by it."""


class Clerk:
    """Implements `worker.generation.Engine`, but for what takes a model: nobody asks a clerk for that."""

    encoding: Encoding | None = None
    occupancy = Occupancy(steps=0, running=0, waiting=0)

    def __init__(self, options: contract.Serve, prepared: Prepared):
        """Raises StartError for what no worker could be, either."""
        self.tokenizer: PreTrainedTokenizerBase = prepared.tokenizer
        self.ctx_size = options.ctx_size
        self.vision: Vision | None = None
        self.blind = TEXT_ONLY
        self.capabilities = _capabilities(options, prepared.config)
        if "completion" not in self.capabilities:
            encoders.settle(self.tokenizer, Path(options.snapshot))
            return
        self.vision, self.blind = vision.counting(options, prepared.config, self.tokenizer)
        if self.vision is not None:
            self.capabilities |= {"vision"}

    @property
    def measured(self) -> dict[str, int]:
        return memory.measured(("cpu",))

    async def generate(self, request: Generation) -> AsyncGenerator[Delta, None]:
        """See `worker.generation.Engine`."""
        _refuse()
        yield Delta()  # what makes it a generator

    async def embed(self, texts: Sequence[Text], *, normalize: int | None = None) -> list[list[float]]:
        """See `worker.generation.Engine`."""
        _refuse()

    async def embed_tokens(self, texts: Sequence[Text]) -> list[list[list[float]]]:
        """See `worker.generation.Engine`."""
        _refuse()

    async def score(self, pairs: Sequence[Text]) -> list[float]:
        """See `worker.generation.Engine`."""
        _refuse()

    async def adapt(self, sources: Sequence[contract.AdapterSource], default: str = "") -> Mapping[str, str]:
        """Adapters change no token."""
        return {}

    async def close(self) -> None:
        """See `worker.generation.Engine`."""


def _refuse() -> NoReturn:
    raise UnsupportedByModel("only the tokenizer of this model is here; load it with POST /models/load")


def _capabilities(options: contract.Serve, config: object) -> frozenset[str]:
    """What its worker could do, which says why a chat cannot be counted for it; `vision` aside."""
    if loader.is_cross_encoder(options, config):
        return frozenset({"rerank"})
    if not loader.is_embedder(options, config):
        return frozenset({"completion"})
    is_pooled = bool(layout.read(Path(options.snapshot), options.pooling).steps)
    return frozenset({"embedding", "rerank"} if is_pooled else {"embedding"})


async def serve(command: contract.Serve, tied: leash.Leash) -> None:
    """Returns once it has been asked to stop and its running answers have ended. Raises StartError."""
    began = time.monotonic()
    tied.say(contract.Progress(stage="start"))
    clerk = Clerk(command, TransformersEngine.prepare(command))
    server = Server(clerk, clerk.tokenizer, command, token=tied.token or None, announce=tied.say)
    address = await server.start()
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    logging.getLogger("worker").info("the tokenizer of %s answers at %s", command.name or command.snapshot, address)
    tied.say(
        contract.Ready(
            address=address,
            measured=clerk.measured,
            capabilities=server.capabilities,
            n_ctx=clerk.ctx_size,
            seconds={"tokenizer": time.monotonic() - began},
            processor=time.process_time(),
        )
    )
    while not told.is_set():
        tied.say(contract.Pulse(steps=0, running=0, waiting=0, measured=clerk.measured))
        try:
            async with asyncio.timeout(PULSE_INTERVAL):
                await told.wait()
        except TimeoutError:
            pass
    await server.close()
    if isinstance(clerk.vision, vision.Eyes):
        clerk.vision.close()
