"""Everything that the API's description says, asked of a running router by schemathesis.

Answers are held to the description with no member more: what is described open, so that clients put up with what comes
later, is closed here.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx

from router.api.openapi import COMPONENTS
from tests import tiny
from tests.processes.routers import ROOT

ENDLESS = r"/sse$|^/router/events$"
"""Streams that never end; they have tests of their own."""
HOOKS = '''
"""Names of models that there are: a made-up one says 404 and nothing of the call."""
import schemathesis


def named(context, value, names):
    path = context.operation.path
    model = "embed" if any(word in path for word in ("embed", "rank", "score")) else "chat"
    if isinstance(value, dict):
        value = {**value, **{name: model for name in names if isinstance(value.get(name), str)}}
        value.setdefault(names[0], model)
    return value


@schemathesis.hook
def map_body(context, body):
    if isinstance(body, dict) and type(body.get("keep_alive")) in (int, float):
        body = {**body, "keep_alive": -1}  # else the model leaves, again and again
    path = context.operation.path
    apart = ("/models", "/lmi", "/router", "/api/delete", "/api/pull", "/worker_", "/count_token", "/model_details")
    managed = path.startswith(apart) and not path.endswith("invoke")
    return body if managed else named(context, body, ("model", "name"))


@schemathesis.hook
def map_query(context, query):
    if context.operation.path.startswith("/lmi"):
        return query
    return named(context, query, ("model", "model_name")) if query else query


@schemathesis.hook
def map_path_parameters(context, parameters):
    if context.operation.path.startswith("/lmi"):  # these register and unregister
        return parameters
    return {**parameters, "id": "chat"} if parameters and len(parameters.get("id", "")) % 2 else parameters
'''
CONFIG = """
[checks]
# answers here, and no faults: 501, this model or this server cannot do that; 503, a model that is unloaded
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "501", "503"]
negative_data_rejection.expected-statuses = ["4xx", "501", "503"]
# no schema says what else a request must be: within the context, of fields that go together, a grammar that compiles
positive_data_acceptance.enabled = false
"""


def write_models(folder: Path, *, template: str = "", ctx_size: int = 256) -> Path:
    """Presets of two tiny models, one that chats and one that embeds. `template`: a chat template, on one line."""
    tiny.make("llama", folder / "llama", max_position_embeddings=ctx_size)
    tiny.make("bert-embed", folder / "bert")
    presets = folder / "models.ini"
    presets.write_text(
        f"[*]\nn-predict = 8\n[chat]\nmodel = {folder / 'llama'}\n"
        + (f"chat-template = {template}\n" if template else "")
        + f"[embed]\nmodel = {folder / 'bert'}\n",
        "utf-8",
    )
    return presets


def closed(document: dict[str, Any]) -> dict[str, Any]:
    """The description, its answers allowed no member that it does not name."""
    for name in COMPONENTS:
        _close(document["components"]["schemas"][name])
    for methods in document["paths"].values():
        for operation in methods.values():
            _close(operation["responses"])
    return document


def _close(value: Any) -> None:
    if isinstance(value, dict):
        if value.get("type") == "object" and "properties" in value:
            value.setdefault("additionalProperties", False)
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            _close(each)


async def question(url: str, folder: Path, *arguments: str) -> tuple[int, str]:
    """(exit code, report) of schemathesis over the description at `url`; 0: it found nothing. Both models must be
    loaded."""
    async with httpx.AsyncClient(base_url=url) as client:
        document = (await client.get("/openapi.json")).json()
    for name, text in (
        ("openapi.json", json.dumps(closed(document))),
        ("questions.py", HOOKS),
        ("schemathesis.toml", CONFIG),
    ):
        (folder / name).write_text(text, "utf-8")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()",
        "--config-file", str(folder / "schemathesis.toml"), "run", str(folder / "openapi.json"), "--url", url,
        "--exclude-path-regex", ENDLESS, "--continue-on-failure", "--request-timeout", "60", "--no-color",
        "--generation-database", "none", *arguments,
        cwd=folder, env={**os.environ, "SCHEMATHESIS_HOOKS": "questions", "PYTHONPATH": f"{folder}:{ROOT}"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    return process.returncode or 0, said.decode(errors="replace")
