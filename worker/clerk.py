"""A clerk: a worker with a model's tokenizer and without the model.

It answers what only turns texts and chats into tokens, and tokens into text, for a model that is not loaded and may not
be: by the code by which its worker would, and so in the same words. It reads no weights and looks at no device. Law: no
torch, which would be three quarters of its memory and of its start; only who prepares images needs it, or runs code of
a snapshot's own, and one that is forked has it.
"""

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from worker import leash
from worker.engine import architectures, layout
from worker.errors import UnsupportedByModel
from worker.generation import Delta, Encoding, Generation, Occupancy, Text, Vision
from worker.images import TEXT_ONLY
from worker.protocol.argv import AdapterSource, Serve
from worker.protocol.events import Progress, Pulse, Ready
from worker.server import Server, asked_to_stop

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PULSE_INTERVAL = 1.0
"""Seconds; a clerk whose loop hangs is noticed by it."""


class Clerk:
    """Implements `worker.generation.Engine`, but for what takes a model: nobody asks a clerk for that."""

    encoding: Encoding | None = None
    occupancy = Occupancy(steps=0, running=0, waiting=0)

    def __init__(self, options: Serve):
        """Raises StartError for what no worker could be, either."""
        from worker.engine import snapshot  # late: with the libraries of tokenizers

        config, tokenizer = _read(options)
        self.tokenizer = tokenizer
        self.ctx_size = options.ctx_size
        self.vision: Vision | None = None
        self.blind = TEXT_ONLY
        self.capabilities = _capabilities(options, config)
        if "completion" not in self.capabilities:
            snapshot.settle(tokenizer, Path(options.snapshot))
        elif config.model_type in architectures.VISION:
            from worker.engine import vision  # late: it has torch

            self.vision, self.blind = vision.counting(options, config, tokenizer)
        else:
            self.blind = architectures.why_blind(config)
        if self.vision is not None:
            self.capabilities |= {"vision"}

    @property
    def measured(self) -> dict[str, int]:
        if not _has_torch():
            with open("/proc/self/statm", encoding="ascii") as file:
                return {"cpu": int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
        from worker.engine import memory  # late: it has torch

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

    async def adapt(self, sources: Sequence[AdapterSource], default: str = "") -> Mapping[str, str]:
        """Adapters change no token."""
        return {}

    async def close(self) -> None:
        """See `worker.generation.Engine`."""


def _refuse() -> NoReturn:
    raise UnsupportedByModel("only the tokenizer of this model is here; load it with POST /models/load")


def _has_torch() -> bool:
    return sys.modules.get("torch") is not None


def _do_without_torch(options: Serve) -> None:
    """Before any library is imported: to those that come there is no torch, unless it is needed, or here already."""
    try:
        stated = json.loads((Path(options.snapshot) / "config.json").read_bytes())["model_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        stated = ""  # whoever reads it next says what is wrong
    is_plain = stated not in architectures.VISION and "model_type" not in options.config_override
    if is_plain and not options.trust_remote_code and "torch" not in sys.modules:
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that it lacks torch
        sys.modules["torch"] = None  # type: ignore[assignment]  # what importlib takes for: there is none


def _read(options: Serve) -> "tuple[Any, PreTrainedTokenizerBase]":
    """The model's configuration and tokenizer. Raises StartError."""
    from worker.engine import snapshot  # late: with the libraries of tokenizers

    if _has_torch():
        from worker.engine.shelf import shelf  # late: it has torch

        if (made := shelf.find(options)) is not None:
            return made.config, made.tokenizer
    return snapshot.load_config(options), snapshot.load_tokenizer(options)


def _capabilities(options: Serve, config: Any) -> frozenset[str]:
    """What its worker could do, which says why a chat cannot be counted for it; `vision` aside."""
    from worker.engine import snapshot  # late: with the libraries of tokenizers

    if snapshot.is_cross_encoder(options, config):
        return frozenset({"rerank"})
    if not snapshot.is_embedder(options, config):
        return frozenset({"completion"})
    is_pooled = bool(layout.read(Path(options.snapshot), options.pooling).steps)
    return frozenset({"embedding", "rerank"} if is_pooled else {"embedding"})


async def serve(command: Serve, tied: leash.Leash) -> None:
    """Returns once it has been asked to stop and its running answers have ended. Raises StartError."""
    began = time.monotonic()
    tied.say(Progress(stage="start"))
    _do_without_torch(command)
    clerk = Clerk(command)
    server = Server(clerk, clerk.tokenizer, command, token=tied.token or None, announce=tied.say)
    address = await server.start()
    told = asked_to_stop()
    logging.getLogger("worker").info("the tokenizer of %s answers at %s", command.name or command.snapshot, address)
    tied.say(
        Ready(
            address=address,
            measured=clerk.measured,
            capabilities=server.capabilities,
            n_ctx=clerk.ctx_size,
            seconds={"tokenizer": time.monotonic() - began},
            processor=time.process_time(),
        )
    )
    while not told.is_set():
        tied.say(Pulse(steps=0, running=0, waiting=0, measured=clerk.measured))
        try:
            async with asyncio.timeout(PULSE_INTERVAL):
                await told.wait()
        except TimeoutError:
            pass
    await server.close()
