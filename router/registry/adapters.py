"""Adapters that came by a call, and workers that are told which there are.

A worker is handed the adapters of its model when it starts. Whoever changes them tells those that are ready; one that
has not heard is told before the next request that it gets, so that no request meets a worker that knows less than this
router does.
"""

from dataclasses import asdict, dataclass

from router.errors import WorkerCrashed
from router.fleet.interfaces import Files
from router.fleet.worker import Worker
from router.registry.profiles import put
from worker.protocol.argv import AdapterSource
from worker.protocol.headers import ADAPTERS_PATH


@dataclass(frozen=True, slots=True)
class Registered:
    """An adapter that came by a call; forgotten when this router ends."""

    src: str
    """As the call said it."""
    source: AdapterSource


async def tell(worker: Worker, files: Files) -> dict[str, str]:
    """Returns once a worker that is ready knows the adapters of its preset: what is wrong, by name; nothing if it knew.

    Raises WorkerCrashed if it cannot be told.
    """
    if worker.told == (worker.preset.adapters, worker.preset.default_lora) or not worker.preset.adapter_slots:
        return {}
    async with worker.telling:
        preset = worker.preset
        wanted = preset.adapters, preset.default_lora
        if worker.told == wanted:
            return {}
        body = {"adapters": [asdict(each) for each in files.adapters(preset)], "default": preset.default_lora}
        status, said = await put(worker, ADAPTERS_PATH, body)
        try:
            if status != 200:
                raise ValueError(said)
            problems = {str(name): str(why) for name, why in said["problems"].items()}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            message = f"{preset.id}: its worker could not be told of its adapters ({str(error)[:200]}); ask again"
            raise WorkerCrashed(message) from None
        worker.told = wanted
        return problems


__all__ = ["Registered", "tell"]
