"""`router run MODEL`: a chat in the terminal, with a running router or with one that is started for it."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from router.cli import client
from router.errors import RouterError

_HELP = "/bye or Ctrl-D ends the chat, /clear forgets it, Ctrl-C stops an answer"
_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h


class ChatError(RouterError):
    """No chat is possible, or a request was refused. If the message is empty, it has been printed already."""


def run(model: str, options: Sequence[str], url: str, key: str) -> int:
    """Chat until the user ends it, and return the exit code. `options`: of the router that is started.

    A running router is used if it lists the model and no options are given. Raises ChatError.
    """
    name = "" if options else _served(model, url, key)
    with (
        client.connect(url, key) if name else _started(model, options, key) as http,
        contextlib.suppress(EOFError),
    ):
        http.timeout = httpx.Timeout(None)  # a load has no time limit here, and Ctrl-C ends the wait
        place = f" at {url}" if name else ""
        name = name or _first(http, model)
        print(f"{name}{place}: {_HELP}", file=sys.stderr)
        return _chat(http, name)
    return 0


def _first(http: httpx.Client, model: str) -> str:
    """The id of the model at the router that was started for it: the named one, else the first. Raises ChatError."""
    try:
        rows: list[dict[str, Any]] = http.get("/models").raise_for_status().json()["data"]
    except httpx.HTTPError as error:
        raise ChatError(str(error)) from None
    return str(next((row for row in rows if model in (row["id"], *row["aliases"])), rows[0])["id"])


def _served(model: str, url: str, key: str) -> str:
    """The id of the model at the running router; empty if there is none, or it does not list the model."""
    with contextlib.suppress(client.RouterUnreachable):
        return next((row["id"] for row in client.models(url, key) if model in (row["id"], *row["aliases"])), "")
    return ""


@contextlib.contextmanager
def _started(model: str, options: Sequence[str], key: str) -> Iterator[httpx.Client]:
    """A client of a router that serves the model for the length of the block, on a socket of this user. Raises
    ChatError."""
    command = [sys.executable, "-P", "-m", "router", "serve", model, *options]
    if subprocess.run([*command, "--download-only"], stdout=subprocess.DEVNULL, check=False).returncode:
        raise ChatError("")
    libc = ctypes.CDLL(None)
    with tempfile.TemporaryDirectory() as folder:
        socket = os.path.join(folder, "router.sock")
        process = subprocess.Popen(
            [*command, "--host", socket, "--log-level", "warning"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
            # Ctrl-C must not reach the router, so it has a session of its own; it must not outlive a killed chat.
            start_new_session=True, preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )  # fmt: skip
        assert process.stderr is not None
        with process, process.stderr as log:
            try:
                output = []
                while (line := log.readline()) and not line.startswith(b"router "):  # its first line, once it listens
                    output.append(line.decode(errors="replace"))
                if not line:
                    raise ChatError("".join(output).strip())
                threading.Thread(target=lambda: all(iter(log.readline, b"")), daemon=True).start()  # keep it empty
                with client.connect(socket, key) as http:
                    yield http
            finally:
                process.terminate()
                process.wait()


def _chat(http: httpx.Client, model: str) -> int:
    """Read questions and stream answers. Return 1 if a request failed whose question was not typed. Raises EOFError."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # lines can be edited and repeated

    messages: list[dict[str, str]] = []
    prompt = ">>> " if sys.stdin.isatty() else ""
    while True:
        try:
            question = input(prompt).strip()
        except KeyboardInterrupt:
            print(f"\n{_HELP}", file=sys.stderr)
            continue
        if question == "/bye":
            return 0
        if question == "/clear":
            messages = []
        if not question or question.startswith("/"):
            if question not in ("", "/clear"):
                print(_HELP, file=sys.stderr)
            continue
        asked = {"role": "user", "content": question}
        answer = ""
        try:
            for text, is_answer in _stream(http, {"model": model, "messages": [*messages, asked], "stream": True}):
                answer += text if is_answer else ""
                print(text, end="", flush=True)
        except KeyboardInterrupt:
            print(" (stopped)", end="", file=sys.stderr)
        except (ChatError, httpx.HTTPError) as error:
            print(error, file=sys.stderr)
            if not prompt:
                return 1
            continue
        print()
        messages += [asked, {"role": "assistant", "content": answer}]


def _stream(http: httpx.Client, body: object) -> Iterator[tuple[str, bool]]:
    """The texts of an answer as they arrive, and False for those of its reasoning. Raises ChatError, HTTPError."""
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.is_error:
            response.read()
            raise ChatError(_reason(response))
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ChatError(event["error"]["message"])
            for choice in event["choices"]:
                for member in ("reasoning_content", "content"):
                    if text := choice["delta"].get(member):
                        yield text, member == "content"


def _reason(response: httpx.Response) -> str:
    """The message of an error response; the status of one that is not the router's, but for example a proxy's."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.url.host} answered {response.status_code}"
