"""Asking a worker directly, as a launcher yields it."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from router.launch.interface import WorkerProcess
from router.launch.worker_client import Exchange


@asynccontextmanager
async def asked(
    worker: WorkerProcess, path: str, body: Mapping[str, Any] | None = None, *, token: str = ""
) -> AsyncIterator[Exchange]:
    """The answer of `worker`, whose head is there; a GET without a body."""
    headers = {"Authorization": f"Bearer {token or worker.token}", "X-Request-Id": "r"}
    data = b"" if body is None else json.dumps(body).encode()
    exchange = worker.worker_client.begin("GET" if body is None else "POST", path, headers, data)
    try:
        await exchange.head()
        yield exchange
    finally:
        exchange.close()


async def everything(exchange: Exchange) -> bytes:
    """The rest of an answer."""
    parts = []
    while part := await exchange.read():
        parts.append(part)
    return b"".join(parts)
