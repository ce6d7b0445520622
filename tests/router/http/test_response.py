"""Bodies that the router reads, error responses that it sends, and errors of its listening sockets."""

import json
import socket
import tracemalloc

import pytest

from router.config.settings import Settings
from router.errors import BadRequest
from router.http import listen
from router.http.pipeline import peek
from router.http.response import json_bytes, render_error
from worker.protocol.dialects import Dialect


@pytest.mark.parametrize("dialect", Dialect)
def test_rendering_an_error_does_not_change_it(dialect: Dialect) -> None:
    error = BadRequest("no model at /models/\udcff", param="model")
    _, body = render_error(error, dialect, "r1")
    assert "no model at /models/?" in json.dumps(json.loads(body))
    assert error.message == "no model at /models/\udcff"


def test_any_value_becomes_json() -> None:
    assert json_bytes({"a": [1, 0.5, "\u00fc", None, True]}) == '{"a":[1,0.5,"\u00fc",null,true]}'.encode()
    assert json.loads(json_bytes({"a": "x\ud83d", "b": 10**30, "c": float("nan")})) == {
        "a": "x?",
        "b": 10**30,
        "c": None,
    }


NOT_HERE = "192.0.2.1"  # an address for documents (RFC 5737), which no machine has


def test_an_address_of_another_machine_is_an_error_of_the_host() -> None:
    with pytest.raises(OSError, match=rf"cannot listen on {NOT_HERE} port 0: .+; choose --host"):
        listen.bind(Settings(host=NOT_HERE, port=0))


def test_a_port_in_use_is_an_error_of_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"cannot listen on 127.0.0.1 port {port}: .+; choose --port"):
            listen.bind(Settings(port=port))


def test_the_model_of_a_body_is_read() -> None:
    assert peek(b'{"model": "a", "prompt": "\\ud83d\\ude00"}').model == "a"
    assert peek(b'{"stream":true,"name" : "b","x":[{}]}') == (None, True, "b")


@pytest.mark.parametrize("name", ["model", "stream", "name"])
@pytest.mark.parametrize("value", [b"[" + b"[]," * 10**6 + b"1]", b'{"a":[' + b"{}," * 10**6 + b"1]}"])
def test_no_memory_is_taken_for_the_members_of_an_array_or_object_instead_of_a_name(name: str, value: bytes) -> None:
    body = b'{"%s": %s}' % (name.encode(), value)
    tracemalloc.start()
    try:
        assert getattr(peek(body), name) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b'{"prompt": "b \\ud83d"}', "a string has half a surrogate pair (byte 14), as of a text that was cut inside"),
        (b'{"prompt": "\\ude00"}', "a string has half a surrogate pair (byte 12)"),
        (b'{"prompt": "b', "Input data was truncated"),
        (b'{"model": "\xe9"}', "it is not UTF-8 (byte 11)"),
    ],
)
def test_a_body_that_is_no_json_is_rejected_with_its_fault(body: bytes, fault: str) -> None:
    with pytest.raises(BadRequest) as caught:
        peek(body)
    assert caught.value.reason == "invalid_json"
    assert caught.value.message.startswith(f"the body is not a JSON object: {fault}")
