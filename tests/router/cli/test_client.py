"""The table of `router ps`, and its errors."""

import contextlib
import http.server
import io
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.cli.client import RouterUnreachable, get, models, processes
from tests.router.cli.commands import Run


class SocketServer(socketserver.UnixStreamServer):
    def get_request(self) -> tuple[Any, Any]:
        return super().get_request()[0], ("client", 0)  # a handler of HTTP takes its host


@contextlib.contextmanager
def answering(
    text: str,
    socket: str = "",
    *,
    redirect: str = "",
    tls: ssl.SSLContext | None = None,
    key: str = "",
    refusal: int = 0,
) -> Iterator[str]:
    """The URL of a server whose response to every request is `text` or a `redirect`, or the path `socket` where it
    listens. `refusal`: the status for requests without this `key`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_allowed = not refusal or self.headers["Authorization"] == f"Bearer {key}"
            self.send_response(refusal if not is_allowed else 301 if redirect else 200)
            self.send_header("Location", redirect)
            self.end_headers()
            self.wfile.write(text.encode())

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    tcp = http.server.HTTPServer
    with SocketServer(socket, Handler) if socket else tcp(("127.0.0.1", 0), Handler) as server:
        scheme = "https" if tls else "http"
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield socket or f"{scheme}://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            serving.join()


def model(id: str, value: str, **status: Any) -> dict[str, Any]:
    return {"id": id, "status": {"value": value, "in_flight": 0, "queued": 0, **status}}


def test_models_are_shown_with_their_memory_and_the_stages_of_their_loads() -> None:
    spent = {"fork": 0.02, "config": 0.001, "early_start": 3.0, "read": 0.2, "build": 0.05, "first_token": 0.03}
    memory = {"cpu": {"estimated_mib": 90, "measured_mib": 80, "reserved_mib": 90}}
    asleep = {"cpu": {"estimated_mib": 70, "measured_mib": None, "reserved_mib": 70}}
    cache = {name: {"tokens": 32 * mib, "mib": mib} for name, mib in [("least", 64), ("granted", 96), ("most", 256)]}
    fixed = {"tokens": 512, "mib": 1}
    lines = processes(
        [
            model("one", "loaded", memory=memory, spent=spent, in_flight=2, draining=True, kv_cache=cache),
            model("two", "sleeping", memory=asleep),
            model("four", "loading", kv_cache={"least": fixed, "granted": None, "most": fixed}),
            model("three", "unloaded"),
        ],
        now=0.0,
    ).splitlines()
    assert [line.split() for line in lines] == [
        ["NAME", "STATE", "DEVICE", "EST/MEAS", "MiB", "KV", "TOKENS", "KV", "MiB", "ACTIVE", "QUEUE", "LOAD",
         "STAGES"],
        ["one", "loaded", "(draining)", "cpu", "90/80", "3072", "(2048..8192)", "96", "(64..256)", "2", "0",
         "0.27", "s", "fork", "0.02", "early_start", "3.00", "read", "0.20", "build", "0.05", "first_token", "0.03"],
        ["two", "sleeping", "cpu", "70/-", "-", "-", "0", "0", "-", "-"],
        ["four", "loading", "-", "-", "-", "-", "0", "0", "-", "-"],
    ]  # fmt: skip
    assert (
        processes([model("three", "unloaded")], now=0.0, everything=True).splitlines()[1].startswith("three  unloaded")
    )


def test_failed_models_are_shown_with_the_reason_and_the_next_attempt() -> None:
    lines = processes(
        [
            model("one", "unloaded", failed=True, error="out of host memory,\ntwice", retry_at=1012.2),
            model("two", "unloaded", failed=True, error="two: no such device", retry_at=1000.0),
            model("three", "loaded", draining=True, error="died", retry_at=1300.0),
            model("four", "unloaded"),
        ],
        now=1000.0,
    ).splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["one", "failed"], ["two", "failed"], ["three", "loaded"]]
    assert lines[4:] == [
        "one: out of host memory, twice (next attempt in 12 s)",
        "two: no such device (next attempt with its next request)",
        "three: died (next attempt in 300 s)",
    ]


def test_the_message_without_a_router_names_the_remedy() -> None:
    with pytest.raises(
        RouterUnreachable, match=r"no router answers at http://127\.0\.0\.1:1 .*give --url, or set ROUTER_URL"
    ):
        get("http://127.0.0.1:1", "/models")
    for url in ("ftp://x", "http://[::1"):
        with pytest.raises(RouterUnreachable, match="no address"):
            get(url, "/models")


@pytest.mark.parametrize("refusal", [401, 403])
def test_commands_send_their_key_and_without_it_name_the_option(
    refusal: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = '{"data": [{"id": "x", "aliases": [], "status": {"value": "loaded", "in_flight": 0}}]}'
    with answering(listed, key="k", refusal=refusal) as url:
        refused = run("ps", "--url", url, code=3).err
        assert refused.endswith(f"answered {refusal}; give --api-key, or set ROUTER_API_KEY\n")
        run("ps", "--url", url, "--api-key", "k", code=0)
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        run("run", "--url", url, "--api-key", "k", "x", code=0)


@pytest.mark.parametrize(
    "answer",
    ["[]", '"x"', "{}", '{"data": null}', '{"data": [5]}', '{"data": [{"id": "x"}]}',
     '{"data": [{"id": "x", "status": "loaded"}]}', '{"data": [{"id": "x", "status": {"value": "loaded"}}]}'],
)  # fmt: skip
def test_another_server_is_not_taken_for_a_router(answer: str, run: Run) -> None:
    with answering(answer) as url:
        said = f"router ps: what answers at {url} is not this kind of router; give --url, or set ROUTER_URL\n"
        assert run("ps", "--url", url) == (3, "", said)


def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with answering('{"data": [{"id": "x", "status": {"value": "unloaded", "in_flight": 0}}]}') as url:
        assert [each["id"] for each in models(url)] == ["x"]


def test_a_proxy_with_tls_in_front_of_a_router_is_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It redirects from HTTP, and its certificate is signed by an authority that only this machine trusts."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=x -addext subjectAltName=IP:127.0.0.1 -keyout"
    subprocess.run([*made.split(), key, "-out", certificate], check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listed = '{"data": [{"id": "x", "status": {"value": "unloaded", "in_flight": 0}}]}'
    with answering(listed, tls=context) as https, answering("", redirect=f"{https}/models") as url:
        assert [each["id"] for each in models(url)] == ["x"]


# httpcore leaves a socket that cannot connect to the collector.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning")
def test_a_router_is_asked_through_its_socket(tmp_path: Path, run: Run) -> None:
    path = str(tmp_path / "router.sock")
    missing = f"no router answers at {path} ([Errno 2] No such file or directory)"
    assert missing in run("ps", "--url", path, code=3).err
    with answering('{"data": [{"id": "x", "status": {"value": "unloaded", "in_flight": 0}}]}', path):
        assert run("ps", "--url", path, "--all", code=0).out.splitlines()[1].startswith("x ")
