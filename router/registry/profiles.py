"""Workers that are told what holds for requests by one name: once each, before the first request that needs it."""

import json
from dataclasses import asdict
from typing import Any
from weakref import WeakKeyDictionary

from router.errors import LoadFailed, WorkerCrashed
from router.fleet.worker import Worker
from router.launch.worker_client import WireError
from worker.protocol.argv import Profile
from worker.protocol.headers import PROFILES_PATH, TOKEN_HEADER


class Profiles:
    """What each worker of one router knows."""

    def __init__(self) -> None:
        self._told: WeakKeyDictionary[Worker, dict[str, Profile]] = WeakKeyDictionary()

    async def tell(self, worker: Worker, profile: Profile) -> None:
        """Returns once a worker that is ready knows it. Raises LoadFailed with what cannot be used of it, WorkerCrashed
        if it cannot be told."""
        if (told := self._told.setdefault(worker, {})).get(profile.name) == profile:
            return
        async with worker.telling:
            if told.get(profile.name) == profile:
                return
            status, said = await put(worker, PROFILES_PATH, asdict(profile))
            if status != 200:
                raise LoadFailed(f"{profile.name} cannot be used: {_why(said)}; change its preset")
            told[profile.name] = profile


def _why(said: Any) -> str:
    try:
        return str(said["error"]["message"])
    except (KeyError, TypeError):
        return "its worker did not say why"


async def put(worker: Worker, path: str, body: Any) -> tuple[int, Any]:
    """(status, JSON) that a worker which is ready answers to what it is told. Raises WorkerCrashed if it does not."""
    process = worker.process
    assert process is not None, "it is ready"
    headers = {TOKEN_HEADER: f"Bearer {process.token}", "Content-Type": "application/json"}
    exchange = process.wire.begin("PUT", path, headers, json.dumps(body).encode())
    try:
        await exchange.head()
        answer = b""
        while part := await exchange.read():
            answer += part
        return exchange.status, json.loads(answer)
    except (WireError, ValueError) as error:
        what = path.rpartition("/")[2]
        message = f"{worker.preset.id}: its worker could not be told of its {what} ({str(error)[:200]}); ask again"
        raise WorkerCrashed(message) from None
    finally:
        exchange.close()


__all__ = ["Profiles", "put"]
